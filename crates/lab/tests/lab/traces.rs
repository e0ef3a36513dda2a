//! kvtier's trace format, repeatable workloads, and invariants of every replay.

use std::path::PathBuf;

use kvtier::base::checksum::checksum;
use kvtier::base::status::Status;
use kvtier::io::source::Source;
use kvtier::meta::sessions::Stop;
use kvtier::policy::registry;
use kvtier::trace::format;
use kvtier::trace::generate::{self, GenOpts};
use kvtier::trace::reader::{self, ReadOpts};
use kvtier::trace::replay::{self, Hints, Replay, ReplayOpts};
use kvtier::trace::report::Report;
use kvtier::trace::requests::{Builder, Request, Trace};
use kvtier::trace::study::Study;
use kvtier_lab::explain::explain;
use kvtier_lab::tiers::{self, Machine, Tier};

fn shared(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os("KVTIER_TRACE_DIR")?).join(name);
    path.exists().then_some(path)
}

fn read(bytes: &[u8]) -> kvtier::base::status::Result<Trace> {
    reader::read(&mut Source::bytes(bytes.to_vec())?, &ReadOpts::default())
}

/// The table of docs/reference/lab.md, from the traces in `KVTIER_TRACE_DIR`.
#[test]
fn lru_agrees_with_published_results() {
    let Some(path) = shared("mooncake_conversation_trace.jsonl.zst") else { return };
    let trace = reader::open(&path, &ReadOpts::default()).expect("a trace");
    assert_eq!((trace.requests().len(), trace.references()), (12_031, 288_500));
    assert_eq!(trace.uniques(), 182_790);
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let mut proceed = |_| true;
    for (blocks, percent) in [(1_828, 94.7), (5_859, 86.1), (18_279, 71.6)] {
        let r = replay::run(&trace, &study, "lru", blocks, &opts, &mut proceed).expect("a run");
        assert!((100.0 * r.token_miss_ratio() - percent).abs() < 0.06, "{blocks}");
        assert!((100.0 * r.token_floor() - 62.6).abs() < 0.06);
    }
    let r = replay::run(&trace, &study, "lru", 5_859, &opts, &mut proceed).expect("a run");
    assert!((r.re_prefill_rate - 0.230).abs() < 0.0006);
    for (blocks, percent) in [(1_828, 74.9), (5_859, 64.0), (18_279, 62.6)] {
        let r = replay::run(&trace, &study, "belady", blocks, &opts, &mut proceed).expect("a run");
        assert!((100.0 * r.token_miss_ratio() - percent).abs() < 0.06, "{blocks}");
    }
    let half = ReplayOpts { warm_up: trace.requests().len() / 2, ..opts };
    for (blocks, found) in [(1_828, 0.0546), (5_859, 0.1367), (18_279, 0.2939)] {
        let r = replay::run(&trace, &study, "lru", blocks, &half, &mut proceed).expect("a run");
        assert!((1.0 - r.token_miss_ratio() - found).abs() < 0.00006, "{blocks}");
    }
    let flat = trace.flat().expect("memory");
    let study = Study::of(&flat, &opts.cost).expect("memory");
    for (blocks, ratio) in
        [(1_827, 0.948), (9_139, 0.805), (18_279, 0.722), (45_697, 0.647), (91_395, 0.637)]
    {
        let r = replay::run(&flat, &study, "lru", blocks, &opts, &mut proceed).expect("a run");
        assert!((r.block_miss_ratio() - ratio).abs() < 0.0006, "{blocks}");
    }
}

#[test]
fn public_traces_are_read() {
    for (name, requests, uniques) in [
        ("mooncake_synthetic_trace.jsonl.zst", 3_993, 43_924),
        ("azure_llm_2023_conv.csv.zst", 19_366, 0),
        ("azure_llm_2023_code.csv.zst", 8_819, 0),
        ("weka_claude_code_half.jsonl.zst", 0, 0),
    ] {
        let Some(path) = shared(name) else { continue };
        let opts = ReadOpts { duration_ns: 2 * 3_600_000_000_000, ..ReadOpts::default() };
        let trace = reader::open(&path, &opts).expect("a trace");
        assert!(requests == 0 || trace.requests().len() == requests);
        assert!(uniques == 0 || trace.uniques() == uniques);
        let file = format::write(&trace).expect("memory");
        assert!(read(&file).expect("our own") == trace);
    }
}

fn small() -> Trace {
    let mut builder = Builder::new(16).expect("tokens");
    for at_ns in 0..200i64 {
        let user = at_ns as u64 % 7;
        let path: Vec<u64> = (0..=at_ns as u64 / 20).map(|i| (user << 32) + i * 3).collect();
        let request = Request {
            at_ns: at_ns * 1000 - 500,
            session: (user > 2).then_some(user << 60),
            tenant: user as u32,
            priority: user as u8 % 3,
            stop: Stop::ALL[at_ns as usize % 5],
            input_tokens: path.len() as u32 * 16 - 3,
            output_tokens: 9,
            think_ns: 100 - at_ns,
            ..Request::default()
        };
        builder.push(request, &path).expect("room");
    }
    builder.finish().expect("a forest")
}

#[test]
fn the_trace_format_round_trips_and_survives_hostile_files() {
    let trace = small();
    let file = format::write(&trace).expect("memory");
    assert_eq!(read(&file), Ok(trace));
    for cut in 0..file.len() {
        assert!(read(&file[..cut]).is_err(), "cut at {cut}");
    }
    for bit in 0..file.len() * 8 {
        let mut damaged = file.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&damaged).is_err(), "bit {bit}");
    }
    // With a correct checksum, no other defect may cause a panic.
    let body = file.len() - 8;
    for at in 8..body {
        for value in [0x00, 0x7F, 0x80, 0xFF] {
            let mut forged = file.clone();
            forged[at] = value;
            let sum = checksum(&forged[..body]);
            forged[body..].copy_from_slice(&sum.to_le_bytes());
            if let Err(error) = read(&forged) {
                assert_ne!(error.status(), Status::Panic);
            }
        }
    }
    let mut newer = file.clone();
    newer[8] = 2;
    assert_eq!(read(&newer).expect_err("newer").status(), Status::TooNew);
}

/// The committed traces and their parameters.
const MADE: [(&str, i64, u64); 5] =
    [("chat", 15, 1), ("agent", 30, 2), ("batch", 15, 3), ("multitenant", 10, 4), ("burst", 15, 5)];

fn data(kind: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/data/{kind}.kvtrace"))
}

fn made(kind: &str) -> Trace {
    reader::open(&data(kind), &ReadOpts::default()).expect("a committed trace")
}

#[test]
fn workloads_equal_the_committed_ones() {
    for (name, minutes, seed) in MADE {
        let opts = GenOpts {
            kind: generate::kind_of(name).expect("known"),
            duration_ns: minutes * 60_000_000_000,
            seed,
            rate: 0.0,
            block_tokens: 512,
        };
        let trace = generate::make(&opts).expect("a workload");
        let file = format::write(&trace).expect("memory");
        assert!(file.len() < 40_000, "{name}: {} bytes", file.len());
        assert!(std::fs::read(data(name)).expect("committed") == file, "{name} has changed");
        let other = generate::make(&GenOpts { seed: seed + 1, ..opts }).expect("a workload");
        assert!(trace != other);
        let sorted = trace.requests().windows(2).all(|w| w[0].at_ns <= w[1].at_ns);
        assert!(sorted && trace.duration_ns() <= opts.duration_ns);
    }
    let opts = GenOpts {
        kind: generate::Kind::Chat,
        duration_ns: 1_000_000_000,
        seed: 1,
        rate: 0.0,
        block_tokens: 16,
    };
    for wrong in [
        GenOpts { duration_ns: 0, ..opts },
        GenOpts { duration_ns: i64::MAX, ..opts },
        GenOpts { rate: -1.0, ..opts },
        GenOpts { rate: f64::NAN, ..opts },
        GenOpts { rate: 1e12, ..opts },
        GenOpts { block_tokens: 0, ..opts },
    ] {
        assert!(generate::make(&wrong).is_err(), "{wrong:?}");
    }
}

/// Replays step by step and checks the invariants: every hit was requested, every resident block
/// fits and was inserted.
fn lawful(trace: &Trace, study: &Study, spec: &str, blocks: u64, opts: &ReplayOpts) -> Report {
    let mut replay = Replay::open(trace, study, spec, blocks, opts).expect("a policy");
    let capacity = blocks * u64::from(opts.layers);
    let (mut inserted, mut evicted) = (0, 0);
    for request in trace.requests() {
        let step = replay.step().expect("a step").expect("a request");
        inserted += step.inserted;
        evicted += step.evicted;
        let resident = replay.evictor().objects().len();
        assert!(resident as u64 <= capacity, "{spec}: {resident} in {capacity}");
        assert_eq!(inserted - evicted, resident, "{spec}");
        assert!(step.hits <= request.len() && step.hit_tokens <= u64::from(request.input_tokens));
    }
    assert!(replay.step().expect("the end").is_none());
    replay.evictor().check().expect("sound");
    let report = replay.finish();
    let counts = (report.requests, report.done.references, report.done.tokens);
    let tokens = trace.requests().iter().map(|r| u64::from(r.input_tokens)).sum();
    assert_eq!(counts, (trace.requests().len() as u64, trace.references() as u64, tokens));
    assert!(report.done.hits <= report.floor.hits || opts.holes, "{spec} beats an unbounded cache");
    assert!(report.done.hit_tokens <= report.floor.hit_tokens, "{spec}");
    let timeline: u64 = report.timeline.iter().map(|p| p.hit_tokens).sum();
    assert_eq!(timeline, report.done.hit_tokens, "{spec}");
    for share in [report.session_fairness, report.tenant_fairness, report.utilisation] {
        assert!((0.0..=1.0 + 1e-9).contains(&share), "{spec}: {share}");
    }
    report
}

#[test]
fn every_policy_keeps_the_invariants_repeats_and_is_below_the_optimum() {
    for (name, ..) in MADE {
        let trace = made(name).head(500).expect("memory");
        let opts = ReplayOpts::default();
        let study = Study::of(&trace, &opts.cost).expect("memory");
        for (percent, holes) in [(3, false), (12, true)] {
            let blocks = (trace.uniques() as u64 * percent / 100).max(1);
            let opts = ReplayOpts { holes, ..opts };
            let best = lawful(&trace, &study, "belady", blocks, &opts);
            // A replay has no scorer.
            for entry in registry::ENTRIES.iter().filter(|entry| entry.name != "custom") {
                let report = lawful(&trace, &study, entry.name, blocks, &opts);
                let again = replay::run(&trace, &study, entry.name, blocks, &opts, &mut |_| true);
                assert!(report.same_as(&again.expect("a run")), "{name}: {}", entry.name);
                assert!(best.done.hits >= report.done.hits, "{name}: {} wins", entry.name);
            }
        }
    }
}

#[test]
fn a_large_capacity_equals_an_unbounded_cache() {
    let trace = made("chat");
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let blocks = trace.uniques() as u64;
    for (layers, holes) in [(1, false), (1, true), (3, false), (3, true)] {
        let opts = ReplayOpts { layers, holes, ..opts };
        let report = lawful(&trace, &study, "lru", blocks, &opts);
        assert_eq!((report.done.hits, report.evictions), (study.floor.hits, 0));
        assert_eq!((report.session_fairness, report.re_prefill_rate), (1.0, 0.0));
        assert_eq!(report.recomputed_tokens(), study.floor.tokens - study.floor.hit_tokens);
    }
}

#[test]
fn cells_behave_as_whole_blocks_if_evicted_together() {
    let trace = made("chat").head(400).expect("memory");
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let blocks = trace.uniques() as u64 / 10;
    for holes in [false, true] {
        let whole = lawful(&trace, &study, "lru", blocks, &ReplayOpts { holes, ..opts });
        let cells = ReplayOpts { layers: 4, holes, ..opts };
        let parts = lawful(&trace, &study, "lru", blocks, &cells);
        assert_eq!(parts.inserts, parts.evictions + blocks * 4);
        // A cut inside a block loses only that block.
        let difference = parts.done.hits.abs_diff(whole.done.hits);
        assert!(difference * 50 < whole.done.hits, "{} and {}", parts.done.hits, whole.done.hits);
    }
}

#[test]
fn invalid_replays_are_rejected() {
    let trace = small();
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let run = |spec: &str, blocks: u64, opts: &ReplayOpts| {
        replay::run(&trace, &study, spec, blocks, opts, &mut |_| true).err().map(|e| e.status())
    };
    assert_eq!(run("lru", 10, &opts), None);
    assert_eq!(run("lur", 10, &opts), Some(Status::Spec));
    for spec in ["custom", "qos(inner=custom)", "qos(inner = custom, strict=true)"] {
        assert_eq!(run(spec, 10, &opts), Some(Status::Invalid), "{spec}");
    }
    assert_eq!(run("lru", 0, &opts), Some(Status::Limit));
    assert_eq!(run("lru", u64::MAX, &opts), Some(Status::Limit));
    assert_eq!(run("lru", 10, &ReplayOpts { layers: 0, ..opts }), Some(Status::Limit));
    assert_eq!(run("lru", 10, &ReplayOpts { points: usize::MAX, ..opts }), Some(Status::Limit));
    let long = made("chat");
    let study = Study::of(&long, &opts.cost).expect("memory");
    let stopped = replay::run(&long, &study, "lru", 9, &opts, &mut |done| done < 300);
    assert_eq!(stopped.err().map(|e| e.status()), Some(Status::Cancelled));
}

#[test]
fn hints_reach_the_policy() {
    let trace = made("agent");
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let blocks = trace.uniques() as u64 / 10;
    let with = |hints: Hints| {
        let opts = ReplayOpts { hints, ..opts };
        lawful(&trace, &study, "predictive", blocks, &opts).recomputed_tokens()
    };
    // Knowing when each session continues is worth much.
    assert!(with(Hints::Think) < with(Hints::None));
}

#[test]
fn tiers_share_hits_and_writes() {
    let trace = made("chat");
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let machine = Machine::default();
    let tier = |name: &str, blocks: u64, bytes_per_second: f64| Tier {
        name: name.to_string(),
        blocks,
        bytes_per_second,
    };
    let run = |tiers: &[Tier]| {
        tiers::run(&trace, &study, "lru", tiers, &machine, &opts, &mut |_| true).expect("a run")
    };
    let all = trace.uniques() as u64;
    let device_only = run(&[tier("device", all, 0.0)]);
    assert_eq!(device_only.ttft_mean_ns, device_only.ttft_floor_ns);
    assert_eq!((device_only.loss(), device_only.tiers[0].read_bytes), (0.0, 0));
    let small = run(&[tier("device", all / 20, 0.0)]);
    let device_and_host = run(&[tier("device", all / 20, 0.0), tier("host", all, 25e9)]);
    assert_eq!(device_and_host.tiers[0].hit_tokens, small.tiers[0].hit_tokens);
    let found: u64 = device_and_host.tiers.iter().map(|t| t.hit_tokens).sum();
    assert_eq!(found, study.floor.hit_tokens);
    assert_eq!(
        device_and_host.tiers[1].read_bytes,
        device_and_host.tiers[1].hit_tokens * machine.token_bytes
    );
    assert!(
        device_only.ttft_mean_ns < device_and_host.ttft_mean_ns
            && device_and_host.ttft_mean_ns < small.ttft_mean_ns
    );
    assert!(device_and_host.ttft_p50_ns <= device_and_host.ttft_p99_ns);
    assert!(tiers::run(&trace, &study, "lru", &[], &machine, &opts, &mut |_| true).is_err());
}

#[test]
fn an_explanation_matches_the_next_eviction() {
    let trace = made("chat");
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let mut replay = Replay::open(&trace, &study, "lru", 60, &opts).expect("a policy");
    while replay.done() < 300 {
        replay.step().expect("a step");
    }
    let explanation = explain(&trace, &mut replay, 4).expect("a picture");
    assert_eq!((explanation.policy, explanation.requests), ("lru", 300));
    let first = explanation.blocks.iter().find(|b| b.turn == Some(0)).expect("a victim");
    let score = |b: &kvtier_lab::explain::ExplainedBlock| b.standing.map(|s| s.score);
    assert_eq!(first.standing.map(|s| s.children), Some(0));
    let least = explanation.blocks.iter().filter(|b| b.standing.is_some_and(|s| s.children == 0));
    assert!(least.map(score).all(|s| s >= score(first)));
    assert_eq!(explanation.blocks.iter().filter(|b| b.turn.is_some()).count(), 4);
    // The explanation changed nothing.
    let mut other = Replay::open(&trace, &study, "lru", 60, &opts).expect("a policy");
    while other.step().expect("a step").is_some() {}
    while replay.step().expect("a step").is_some() {}
    assert_eq!(other.finish().done, replay.finish().done);
}
