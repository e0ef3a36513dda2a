//! Reports, and the text for Prometheus.

use std::collections::{BTreeMap, BTreeSet};

use kvtier::kv::core::Deed;
use kvtier::kv::core::tenants::MAX_TENANTS;

use crate::world::World;

/// A sample: its name and labels, its value.
type Samples = BTreeMap<String, f64>;

/// Reads the text format as its description has it, and nothing beside that.
fn parse(text: &str) -> Result<(BTreeMap<String, String>, Samples), String> {
    let (mut types, mut samples, mut helped) = (BTreeMap::new(), Samples::new(), BTreeSet::new());
    let mut family = String::new();
    if !text.ends_with('\n') {
        return Err("the last line has no end".into());
    }
    for line in text.lines() {
        let wrong = |why: &str| Err(format!("{why}: {line}"));
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, words) = rest.split_once(' ').ok_or("a HELP without words")?;
            if words.is_empty() || !helped.insert(name.to_string()) {
                return wrong("help");
            }
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or("a TYPE without a type")?;
            if !["counter", "gauge", "histogram"].contains(&kind) || !helped.contains(name) {
                return wrong("type");
            }
            if types.insert(name.to_string(), kind.to_string()).is_some() {
                return wrong("a family twice");
            }
            family = name.to_string();
        } else {
            let (name, value) = line.rsplit_once(' ').ok_or("a sample without a value")?;
            let value: f64 = match value {
                "+Inf" => f64::INFINITY,
                "-Inf" => f64::NEG_INFINITY,
                other => other.parse().map_err(|_| format!("{other} is no number"))?,
            };
            let (metric, labels) = match name.split_once('{') {
                Some((metric, rest)) => match rest.strip_suffix('}') {
                    Some(labels) => (metric, labels),
                    None => return wrong("braces"),
                },
                None => (name, ""),
            };
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let is_name = |word: &str| !word.is_empty() && word.chars().all(is_word);
            if metric != family || !is_name(metric) {
                return wrong("a sample of another family");
            }
            for pair in labels.split(',').filter(|_| !labels.is_empty()) {
                let (label, text) = pair.split_once('=').ok_or("a label without a value")?;
                let quoted = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
                if !is_name(label) || quoted.is_none_or(|text| text.contains('"')) {
                    return wrong("a label");
                }
            }
            if types[metric] == "counter" && !(metric.ends_with("_total") && value >= 0.0) {
                return wrong("a counter");
            }
            if samples.insert(name.to_string(), value).is_some() {
                return wrong("a sample twice");
            }
        }
    }
    Ok((types, samples))
}

#[test]
fn the_parser_sees_what_is_wrong() {
    let head = "# HELP a_total Words.\n# TYPE a_total counter\n";
    assert!(parse(&format!("{head}a_total 1\n")).is_ok());
    for bad in ["a_total 1", "a_total x\n", "b 1\n", "a_total{x=1} 1\n", "a_total 1\na_total 1\n"] {
        assert!(parse(&format!("{head}{bad}")).is_err(), "{bad}");
    }
    assert!(parse("# TYPE a gauge\na 1\n").is_err(), "no help");
}

#[test]
fn the_text_is_sound_and_says_what_the_report_says() {
    for (seed, disk_bytes) in [(1, 0), (2, 20 * 131_072)] {
        let mut world = World::new(seed, 600 << 10, disk_bytes);
        let mut last: Option<(BTreeMap<String, String>, Samples)> = None;
        for _ in 0..10 {
            (0..60).for_each(|_| world.step());
            let core = world.core.0.lock();
            let (types, samples) = parse(&core.metrics_text()).unwrap();
            let report = core.report();
            let counters = report.counters;
            let wanted = [
                ("kvtier_moves_total{deed=\"put\"}", counters.moves[Deed::Put as usize]),
                ("kvtier_cells_read_total{from=\"host\"}", counters.host_hits),
                ("kvtier_cells_read_total{from=\"nowhere\"}", counters.misses),
                ("kvtier_cells_stored_total", counters.stored),
                ("kvtier_written_bytes_total", counters.written_bytes),
                ("kvtier_live_bytes{tier=\"host\"}", report.host.live_bytes),
                ("kvtier_used_bytes{tier=\"disk\"}", report.disk.used_bytes),
                ("kvtier_limit_bytes{tier=\"host\"}", 600 << 10),
                ("kvtier_cells{tier=\"disk\"}", report.disk_cells),
                (
                    "kvtier_disk_written_bytes_total{for=\"callers\"}",
                    report.disk.stats.appended_bytes,
                ),
                ("kvtier_sessions", world.sessions.len() as u64),
                ("kvtier_jobs", report.jobs),
                ("kvtier_queue_bytes{way=\"copies\",lane=\"demand\"}", report.copies.bytes[0]),
                ("kvtier_batches{kind=\"read\"}", u64::from(report.batches[1])),
                ("kvtier_events_total", report.events),
                ("kvtier_policy_objects{tier=\"host\",policy=\"lru\"}", report.host_policy.objects),
            ];
            for (name, value) in wanted {
                assert_eq!(samples.get(name), Some(&(value as f64)), "{name}");
            }
            assert_eq!(
                samples.contains_key("kvtier_policy_objects{tier=\"disk\",policy=\"lru\"}"),
                disk_bytes > 0
            );
            if let Some((_, before)) = last {
                let counter = |name: &str| types[name.split('{').next().unwrap()] == "counter";
                for (name, value) in before.iter().filter(|(name, _)| counter(name)) {
                    assert!(samples[name] >= *value, "{name} goes back");
                }
            }
            last = Some((types, samples));
        }
    }
}

#[test]
fn the_report_adds_up() {
    let mut world = World::new(11, 700 << 10, 20 * 131_072 + 400_000);
    for _ in 0..60 {
        (0..20).for_each(|_| world.step());
        let core = world.core.0.lock();
        let report = core.report();
        let disk = report.disk;
        assert!(report.host.live_bytes <= report.host.cost_bytes);
        assert!(disk.live_bytes + disk.dead_bytes <= disk.used_bytes);
        assert!(disk.used_bytes <= disk.budget_bytes);
        assert!((0.0..=1.0).contains(&report.hit_ratio()));
        assert!(report.host_hit_ratio() <= report.hit_ratio());
        assert!(disk.stats.appended_bytes == 0 || disk.wear() >= 1.0);
        let tenants = core.tenants();
        assert_eq!(tenants.len() as u64, report.tenants);
        // Who is not told apart has done nothing here.
        assert_eq!(core.other_tenants(), Default::default());
        let hits: u64 = tenants.iter().map(|tenant| tenant.hits).sum();
        let got: u64 = tenants.iter().map(|tenant| tenant.got_bytes).sum();
        assert!(hits <= report.counters.host_hits + report.counters.disk_hits);
        assert!(got == 0 || hits > 0);
        assert!(tenants.len() < MAX_TENANTS && tenants.is_sorted_by(|a, b| a.id < b.id));
    }
    world.rest(0);
    let report = world.core.0.lock().report();
    let busy =
        [report.moves, report.jobs, report.hungry, report.hungry_bytes, report.leaving_bytes];
    assert_eq!(busy, [0; 5]);
    assert_eq!((report.copies.cells, report.reads.cells), ([0; 3], [0; 3]));
    assert_eq!(
        (report.batches, report.copies.batch_bytes, report.reads.batch_bytes),
        ([0; 5], 0, 0)
    );
    let stored = world.core.0.lock().tenants().iter().map(|tenant| tenant.put_bytes).sum::<u64>();
    assert!(stored > 0 && report.counters.misses + report.counters.host_hits > 0);
}

#[test]
fn tenants_have_what_they_moved() {
    let mut world = World::new(12, 4 << 20, 0);
    let bytes = 24 * world.spaces[0].layout.chunk_bytes(4);
    for tenant in [7, 3] {
        let at = world.open(0, tenant);
        world.grow(at, tenant, 96);
        assert!(world.submit_part(at, Deed::Get, 0, 0, 96, 0..3));
        world.rest(0);
        assert!(world.submit_part(at, Deed::Put, 0, 0, 96, 0..3));
        world.rest(0);
        assert!(world.submit_part(at, Deed::Get, 0, 0, 48, 0..3));
        world.rest(0);
    }
    let core = world.core.0.lock();
    let rows: Vec<_> =
        core.tenants().iter().map(|t| (t.id, t.put_bytes, t.got_bytes, t.hits, t.misses)).collect();
    assert_eq!(rows, [(3, bytes, bytes / 2, 36, 72), (7, bytes, bytes / 2, 36, 72)]);
    assert_eq!(core.report().hit_ratio(), 72.0 / (72.0 + 144.0));
}
