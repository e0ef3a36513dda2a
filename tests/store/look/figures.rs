//! Reports, and the Prometheus text.

use std::collections::{BTreeMap, BTreeSet};

use kvtier::base::exposition::{Kind, Value};
use kvtier::base::status::Status;
use kvtier::store::admission::REFUSALS;
use kvtier::store::counters::StoreStats;
use kvtier::store::state::TransferKind;
use kvtier::store::state::stats::MAX_TENANTS;
use kvtier::store::state::stats::{Latency, TIMED};
use kvtier::store::state::work::WorkerKind;

use crate::look::world::World;

/// A sample: its name and labels, its value.
type Samples = BTreeMap<String, f64>;

/// Parses the text exposition format of Prometheus strictly.
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
            let suffix = metric.strip_prefix(&*family);
            let is_its = match types.get(&family).map(String::as_str) {
                Some("histogram") => matches!(suffix, Some("_bucket" | "_sum" | "_count")),
                _ => suffix == Some(""),
            };
            if !is_its || !is_name(metric) {
                return wrong("a sample of another family");
            }
            for pair in labels.split(',').filter(|_| !labels.is_empty()) {
                let (label, text) = pair.split_once('=').ok_or("a label without a value")?;
                let quoted = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
                if !is_name(label) || quoted.is_none_or(|text| text.contains('"')) {
                    return wrong("a label");
                }
            }
            if types[&family] == "counter" && !(metric.ends_with("_total") && value >= 0.0) {
                return wrong("a counter");
            }
            if samples.insert(name.to_string(), value).is_some() {
                return wrong("a sample twice");
            }
        }
    }
    for name in types.iter().filter(|(_, kind)| *kind == "histogram").map(|(name, _)| name) {
        check_histograms(name, &samples)?;
    }
    Ok((types, samples))
}

/// Bounds and counts rise together, and the last bucket counts all samples.
fn check_histograms(family: &str, samples: &Samples) -> Result<(), String> {
    let mut found: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let start = format!("{family}_bucket{{");
    for (name, &count) in samples.iter().filter(|(name, _)| name.starts_with(&start)) {
        let labels = &name[start.len()..name.len() - 1];
        let at = labels.find("le=\"").ok_or("a bucket without a bound")?;
        let bound = labels[at + 4..].trim_end_matches('"');
        let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap() };
        let others = labels[..at].trim_end_matches(',').to_string();
        found.entry(others).or_default().push((bound, count));
    }
    for (labels, mut buckets) in found {
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let of = |what: &str| samples.get(&format!("{family}_{what}{{{labels}}}")).copied();
        let (count, sum) = (of("count").unwrap_or(-1.0), of("sum").unwrap_or(-1.0));
        let rises = buckets.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 <= two[1].1);
        let last = buckets.last().copied();
        if !rises || last != Some((f64::INFINITY, count)) || (sum > 0.0) != (count > 0.0) {
            return Err(format!("{family}{{{labels}}}: {buckets:?}, {count} of {sum}"));
        }
    }
    Ok(())
}

#[test]
fn metrics_parser_rejects_malformed_text() {
    let head = "# HELP a_total Words.\n# TYPE a_total counter\n";
    assert!(parse(&format!("{head}a_total 1\n")).is_ok());
    for bad in ["a_total 1", "a_total x\n", "b 1\n", "a_total{x=1} 1\n", "a_total 1\na_total 1\n"] {
        assert!(parse(&format!("{head}{bad}")).is_err(), "{bad}");
    }
    assert!(parse("# TYPE a gauge\na 1\n").is_err(), "no help");
}

#[test]
fn metrics_text_matches_the_report() {
    for (seed, disk_bytes) in [(1, 0), (2, 20 * 131_072)] {
        let mut world = World::new(seed, 600 << 10, disk_bytes);
        let mut last: Option<(BTreeMap<String, String>, Samples)> = None;
        for _ in 0..10 {
            (0..60).for_each(|_| world.step());
            let core = world.core.0.lock();
            let (types, samples) = parse(&core.metrics_text()).unwrap();
            let report = core.report();
            let counters = report.stats;
            let wanted = [
                ("kvtier_puts_total", counters.puts),
                ("kvtier_host_hit_cells_total", counters.host_hit_cells),
                ("kvtier_host_limit_bytes", 600 << 10),
                ("kvtier_sessions", world.sessions.len() as u64),
                ("kvtier_queue_bytes{stage=\"copies\",lane=\"demand\"}", report.copies.bytes[0]),
                ("kvtier_batches{kind=\"read\"}", u64::from(report.batches[1])),
                ("kvtier_policy_objects{tier=\"host\",policy=\"lru\"}", report.host_policy.objects),
                ("kvtier_get_seconds_count{tier=\"host\"}", report.latencies[0].count),
                ("kvtier_put_seconds_count{level=\"ram\"}", report.latencies[2].count),
                ("kvtier_batch_seconds_count{kind=\"write\"}", report.latencies[7].count),
                (
                    "kvtier_policy_decision_seconds_count{tier=\"host\",policy=\"lru\"}",
                    report.host_policy.decision.count,
                ),
            ];
            for row in StoreStats::ROWS {
                let suffix = if row.kind == Kind::Counter { "_total" } else { "" };
                let value = match (row.get)(&report.stats) {
                    Value::Whole(whole) => whole as f64,
                    Value::Real(real) => real,
                };
                assert_eq!(samples[&format!("kvtier_{}{suffix}", row.name)], value);
            }
            for (name, value) in wanted {
                assert_eq!(samples.get(name), Some(&(value as f64)), "{name}");
            }
            assert_eq!(
                samples.contains_key("kvtier_policy_objects{tier=\"disk\",policy=\"lru\"}"),
                disk_bytes > 0
            );
            assert!((report.stats.admitted_chunks > 0) <= (disk_bytes > 0));
            if let Some((_, before)) = last {
                let kind = |name: &str| types.get(name.split('{').next().unwrap());
                let counter = |name: &str| kind(name).is_none_or(|kind| kind == "counter");
                for (name, value) in before.iter().filter(|(name, _)| counter(name)) {
                    assert!(samples[name] >= *value, "{name} decreased");
                }
            }
            last = Some((types, samples));
        }
    }
}

/// Each batch takes 1000 ns in this test.
#[test]
fn latency_is_attributed_to_the_slowest_tier_used() {
    let mut world = World::new(5, 600 << 10, 40 * 131_072);
    let times = |world: &World| {
        let latencies = world.core.0.lock().report().latencies;
        TIMED.iter().map(|(name, _)| *name).zip(latencies).collect::<BTreeMap<_, _>>()
    };
    let at = world.open(0, 1);
    world.grow(at, 1, 8);
    // Nothing is stored yet. A get that misses cells is not timed.
    assert!(world.submit_part(at, TransferKind::Get, 0, 0, 8, 0..3));
    world.rest(0);
    assert!(times(&world).values().all(|one| one.count == 0));
    for kind in [TransferKind::Put, TransferKind::Get, TransferKind::Prefetch] {
        assert!(world.submit_part(at, kind, 0, 4, 4, 1..2));
        world.rest(700);
    }
    let one = Latency { count: 1, mean_ns: 1000, p50_ns: 1000, p99_ns: 1000, max_ns: 1000 };
    let copies = Latency { count: 2, mean_ns: 700, p50_ns: 700, p99_ns: 700, max_ns: 700 };
    let seen = times(&world);
    assert_eq!((seen["put_ram"], seen["get_host"]), (one, one));
    assert_eq!((seen["copy_batch"], seen["get_disk"].count), (copies, 0));
    assert_eq!((seen["read_batch"].count, seen["write_batch"].count), (0, 0));
    // Other chunks are put until that cell is on disk only.
    for document in 2.. {
        let other = world.open(4, 1);
        world.grow(other, document, 24);
        assert!(world.submit_part(other, TransferKind::Put, 0, 0, 24, 0..2));
        world.rest(0);
        let session = world.sessions.swap_remove(other);
        let mut core = world.core.0.lock();
        core.close_session(session.number).unwrap();
        if core.counters.demoted_chunks > 10 {
            break;
        }
    }
    // Reads that are cancelled or time out before they begin do not count as failed.
    for status in [Status::Cancelled, Status::Timeout] {
        assert!(world.submit_part(at, TransferKind::Get, 0, 4, 4, 1..2));
        // Other workers first make memory for the read.
        for kind in WorkerKind::ALL.into_iter().filter(|&kind| kind != WorkerKind::Read) {
            let work = world.core.0.lock().take(kind);
            work.into_iter().for_each(|work| world.carry_out(work, 0));
        }
        assert!(world.core.0.lock().has_work(WorkerKind::Read));
        world.core.0.lock().cancel(0, status);
        world.rest(0);
    }
    assert_eq!(world.core.0.lock().counters.failed_reads, 0);
    let began_ns = world.core.0.lock().now_ns();
    assert!(world.submit_part(at, TransferKind::Get, 0, 4, 4, 1..2));
    world.rest(700);
    let took_ns = world.core.0.lock().now_ns() - began_ns;
    let seen = times(&world);
    let (below, reads) = (seen["get_disk"], seen["read_batch"]);
    assert_eq!((below.count, reads.count, reads.max_ns, seen["get_host"]), (1, 1, 700, one));
    assert!((2000..=took_ns).contains(&below.max_ns), "{below:?} in {took_ns}");
    // A cancelled get is not timed.
    assert!(world.submit_part(at, TransferKind::Get, 0, 0, 8, 0..3));
    world.core.0.lock().cancel(0, Status::Cancelled);
    world.rest(0);
    assert_eq!((times(&world)["get_disk"], times(&world)["get_host"]), (below, one));
}

#[test]
fn admission_rejections_are_counted_by_reason() {
    for (admission, reason) in [
        ("none", "never"),
        ("select(hits=9,free=1)", "hits"),
        ("select(hits=0,priority=2)", "priority"),
        ("select(hits=0,min_bytes=1GiB)", "size"),
        ("select(hits=0,wear=1B)", "wear"),
        ("all", ""),
    ] {
        let mut world = World::with(9, 600 << 10, 40 * 131_072, admission);
        (0..300).for_each(|_| world.step());
        world.rest(0);
        let core = world.core.0.lock();
        let report = core.report();
        let (_, samples) = parse(&core.metrics_text()).unwrap();
        for why in REFUSALS {
            let count = samples[&format!("kvtier_rejected_{why}_total")];
            assert_eq!(count > 0.0, why == reason, "{admission}: {count} rejected by {why}");
        }
        assert_eq!(report.stats.admitted_chunks > 0, reason.is_empty(), "{admission}");
        assert_eq!(report.stats.admitted_bytes > 0, reason.is_empty(), "{admission}");
    }
}

#[test]
fn report_totals_are_consistent() {
    let mut world = World::new(11, 700 << 10, 20 * 131_072 + 400_000);
    for _ in 0..60 {
        (0..20).for_each(|_| world.step());
        let core = world.core.0.lock();
        let report = core.report();
        let stats = report.stats;
        assert!(report.stats.host_used_bytes <= report.stats.host_cost_bytes);
        assert!(stats.disk_live_bytes + stats.disk_dead_bytes <= stats.disk_used_bytes);
        assert!(stats.disk_used_bytes <= stats.disk_limit_bytes);
        assert!((0.0..=1.0).contains(&report.stats.hit_ratio()));
        assert!(report.stats.host_hit_ratio() <= report.stats.hit_ratio());
        assert!(stats.disk_appended_bytes == 0 || stats.write_amplification() >= 1.0);
        let tenants = core.tenants();
        assert_eq!(tenants.len() as u64, report.stats.tenants);
        // No transfer here belongs to a tenant beyond the maximum.
        assert_eq!(core.other_tenants(), Default::default());
        let hits: u64 = tenants.iter().map(|tenant| tenant.hits).sum();
        let got: u64 = tenants.iter().map(|tenant| tenant.got_bytes).sum();
        assert!(hits <= report.stats.host_hit_cells + report.stats.disk_hit_cells);
        assert!(got == 0 || hits > 0);
        assert!(tenants.len() < MAX_TENANTS && tenants.is_sorted_by(|a, b| a.id < b.id));
    }
    world.rest(0);
    let report = world.core.0.lock().report();
    let busy = [
        report.stats.transfers,
        report.stats.transfer_cells,
        report.stats.memory_waiters,
        report.stats.memory_waiter_bytes,
        report.stats.demoting_bytes,
    ];
    assert_eq!(busy, [0; 5]);
    assert_eq!((report.copies.cells, report.reads.cells), ([0; 3], [0; 3]));
    assert_eq!(
        (report.batches, report.copies.batch_bytes, report.reads.batch_bytes),
        ([0; 8], 0, 0)
    );
    let stored = world.core.0.lock().tenants().iter().map(|tenant| tenant.put_bytes).sum::<u64>();
    assert!(stored > 0 && report.stats.missed_cells + report.stats.host_hit_cells > 0);
}

#[test]
fn transfers_are_counted_per_tenant() {
    let mut world = World::new(12, 4 << 20, 0);
    let bytes = 24 * world.namespaces[0].layout.chunk_bytes(4);
    for tenant in [7, 3] {
        let at = world.open(0, tenant);
        world.grow(at, tenant, 96);
        assert!(world.submit_part(at, TransferKind::Get, 0, 0, 96, 0..3));
        world.rest(0);
        assert!(world.submit_part(at, TransferKind::Put, 0, 0, 96, 0..3));
        world.rest(0);
        assert!(world.submit_part(at, TransferKind::Get, 0, 0, 48, 0..3));
        world.rest(0);
    }
    let core = world.core.0.lock();
    let rows: Vec<_> =
        core.tenants().iter().map(|t| (t.id, t.put_bytes, t.got_bytes, t.hits, t.misses)).collect();
    assert_eq!(rows, [(3, bytes, bytes / 2, 36, 72), (7, bytes, bytes / 2, 36, 72)]);
    assert_eq!(core.report().stats.hit_ratio(), 72.0 / (72.0 + 144.0));
}
