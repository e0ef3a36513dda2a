//! The laboratory: readers on good, cut and hostile input, workloads that
//! repeat, and laws that every replay obeys.

#![allow(missing_docs)]

use std::path::PathBuf;

use kvtier::base::checksum::checksum;
use kvtier::base::status::Status;
use kvtier::io::source::Source;
use kvtier::lab::explain::explain;
use kvtier::lab::format;
use kvtier::lab::generate::{self, GenOpts};
use kvtier::lab::reader::{self, Kind, ReadOpts};
use kvtier::lab::replay::{self, Hints, Replay, ReplayOpts};
use kvtier::lab::report::Report;
use kvtier::lab::study::Study;
use kvtier::lab::tiers::{self, Machine, Tier};
use kvtier::lab::trace::{Builder, Request, Trace};
use kvtier::meta::sessions::Stop;
use kvtier::policy::registry;

fn shared(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os("KVTIER_TRACE_DIR")?).join(name);
    path.exists().then_some(path)
}

fn read(bytes: &[u8]) -> kvtier::base::status::Result<Trace> {
    reader::read(&mut Source::bytes(bytes.to_vec())?, &ReadOpts::default())
}

fn paths(trace: &Trace) -> Vec<&[u64]> {
    trace.requests().iter().map(|r| trace.blocks(r)).collect()
}

/// The tables of docs/lab.md, from the traces that `KVTIER_TRACE_DIR` holds.
#[test]
fn lru_agrees_with_published_results() {
    let Some(path) = shared("mooncake_conversation_trace.jsonl.zst") else { return };
    let trace = reader::open(&path, &ReadOpts::default()).expect("a trace");
    assert_eq!((trace.requests().len(), trace.references()), (12_031, 288_500));
    assert_eq!(trace.uniques(), 182_790);
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let mut go = |_| true;
    for (blocks, percent) in [(1_828, 94.7), (5_859, 86.1), (18_279, 71.6)] {
        let r = replay::run(&trace, &study, "lru", blocks, &opts, &mut go).expect("a run");
        assert!((100.0 * r.token_miss_ratio() - percent).abs() < 0.06, "{blocks}");
        assert!((100.0 * r.token_floor() - 62.6).abs() < 0.06);
    }
    let r = replay::run(&trace, &study, "lru", 5_859, &opts, &mut go).expect("a run");
    assert!((r.re_prefill_rate - 0.230).abs() < 0.0006);
    for (blocks, percent) in [(1_828, 74.9), (5_859, 64.0), (18_279, 62.6)] {
        let r = replay::run(&trace, &study, "belady", blocks, &opts, &mut go).expect("a run");
        assert!((100.0 * r.token_miss_ratio() - percent).abs() < 0.06, "{blocks}");
    }
    let half = ReplayOpts { warm_up: trace.requests().len() / 2, ..opts };
    for (blocks, found) in [(1_828, 0.0546), (5_859, 0.1367), (18_279, 0.2939)] {
        let r = replay::run(&trace, &study, "lru", blocks, &half, &mut go).expect("a run");
        assert!((1.0 - r.token_miss_ratio() - found).abs() < 0.00006, "{blocks}");
    }
    let flat = trace.flat().expect("memory");
    let study = Study::of(&flat, &opts.cost).expect("memory");
    for (blocks, ratio) in
        [(1_827, 0.948), (9_139, 0.805), (18_279, 0.722), (45_697, 0.647), (91_395, 0.637)]
    {
        let r = replay::run(&flat, &study, "lru", blocks, &opts, &mut go).expect("a run");
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

const MOONCAKE: &str = r#"
{"timestamp": 2, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 1.5, "input_length": 600, "output_length": 6, "hash_ids": [1, 4], "more": [{}]}
"#;

#[test]
fn mooncake_lines_become_requests() {
    let trace = read(MOONCAKE.as_bytes()).expect("a trace");
    assert_eq!(paths(&trace), [&[1, 4][..], &[1, 2, 3]]);
    let first = trace.requests()[0];
    assert_eq!((first.at_ns, first.input_tokens, first.output_tokens), (1_500_000, 600, 6));
    for line in [
        r#"{"timestamp": -1, "hash_ids": []}"#,
        r#"{"timestamp": 1e300, "hash_ids": []}"#,
        r#"{"timestamp": 1, "hash_ids": [1.5]}"#,
        r#"{"timestamp": 1, "hash_ids": [1]"#,
        r#"{"timestamp": 1, "hash_ids": [1]} {}"#,
        r#"{"timestamp": 1, "input_length": 4294967296, "hash_ids": [1]}"#,
        r#"{"timestamp": 1}"#,
    ] {
        let error = read(format!("{MOONCAKE}{line}").as_bytes()).expect_err(line);
        assert!(error.message().contains("line 4"), "{line}: {error}");
    }
    let twice = MOONCAKE.replace("[1, 4]", "[4, 2]");
    assert!(read(twice.as_bytes()).expect_err("two parents").message().contains("block 2"));
}

const WEKA: &str = concat!(
    r#"{"id":"a","block_size":64,"hash_id_scope":"local","requests":["#,
    r#"{"t":0.0,"type":"n","in":640,"out":9,"hash_ids":[1,2,3,4,5,6,7,8,9,10],"stop":"tool_use"},"#,
    r#"{"t":2.0,"type":"subagent","requests":["#,
    r#"{"t":0.5,"in":64,"out":1,"hash_ids":[77],"stop":"end_turn"}]},"#,
    r#"{"t":5.0,"type":"n","in":700,"out":9,"hash_ids":[1,2,3,4,5,6,7,8,9,10,11],"stop":"end_turn"}]}"#,
    "\n",
);

#[test]
fn agent_sessions_are_unpacked_and_put_together() {
    let two = format!("{WEKA}{WEKA}");
    let trace = read(two.as_bytes()).expect("a trace");
    let of = |n: usize| {
        let session = trace.requests()[n].session;
        trace.requests().iter().filter(move |r| r.session == session).collect::<Vec<_>>()
    };
    let main = of(0);
    assert_eq!((trace.requests().len(), main.len(), of(1).len()), (6, 2, 1));
    assert_eq!((main[0].len(), main[1].len()), (2, 2));
    assert_eq!(trace.blocks(main[0])[0], trace.blocks(main[1])[0]);
    assert_eq!((main[0].stop, main[1].stop), (Stop::ToolUse, Stop::EndTurn));
    assert_eq!((main[0].think_ns, main[1].think_ns), (5_000_000_000, 0));
    assert_eq!(trace.uniques(), 8);
    let at = |n: usize| trace.requests()[n].at_ns;
    assert_eq!(at(1) - at(0), 2_500_000_000);
    assert_eq!(read(two.as_bytes()).expect("again"), trace);
    for wrong in [
        WEKA.replace("\"block_size\":64", "\"block_size\":0"),
        WEKA.replace("\"block_size\":64", "\"block_size\":100"),
        WEKA.replace("\"t\":2.0,", ""),
        WEKA.replace("\"t\":5.0", "\"t\":-5.0"),
        WEKA.replace("[77]", &format!("{}{}", "[".repeat(99), "]".repeat(99))),
        WEKA[..WEKA.len() - 9].to_string(),
    ] {
        assert!(read(wrong.as_bytes()).expect_err("wrong").message().contains("line 1"));
    }
}

#[test]
fn conversations_become_requests_that_share_their_beginning() {
    let long = "words ".repeat(800);
    let talk = |end: &str| {
        format!(
            r#"{{"id":"x","conversations":[{{"from":"human","value":"{long}"}},
            {{"from":"gpt","value":"yes"}},{{"from":"human","value":"{end}"}},
            {{"from":"gpt","value":"no\u00e9"}}]}}"#
        )
        .replace('\n', " ")
    };
    let array = format!("[{}, {}]", talk("a"), talk("b"));
    let trace = read(array.as_bytes()).expect("a trace");
    assert_eq!(trace.requests().len(), 4);
    assert_eq!(read(format!("{}\n{}\n", talk("a"), talk("b")).as_bytes()), Ok(trace.clone()));
    let study = Study::of(&trace, &Default::default()).expect("memory");
    // Two full blocks in common; the last one of each request is its own, except
    // that both begin alike.
    assert_eq!((trace.references(), trace.uniques(), study.session_count), (12, 5, 2));
    let of = |s: u64| trace.requests().iter().filter(move |r| r.session == Some(s));
    assert!(of(1).all(|r| r.input_tokens > 1200 && r.stop == Stop::EndTurn));
    for wrong in ["[{\"conversations\": 3}]", "[{\"conversations\": [1]}]"] {
        assert!(read(wrong.as_bytes()).expect_err(wrong).message().contains("conversation 1"));
    }
}

#[test]
fn arrivals_share_nothing() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0,100,8";
    let trace = read(text.as_bytes()).expect("a trace");
    assert_eq!((trace.references(), trace.uniques(), trace.duration_ns()), (11, 11, 20_040_000));
    for wrong in ["x,1,1", "2023-11-16 18:17:03,1", "2023-11-16 18:17:03,-1,1"] {
        let error = read(format!("{text}\n{wrong}").as_bytes()).expect_err(wrong);
        assert!(error.message().contains("line 4"), "{error}");
    }
}

#[test]
fn object_traces_are_read() {
    let mut binary = Vec::new();
    for (time, id, next) in [(1u32, 9u64, 2i64), (1, 8, -1), (2, 9, -1)] {
        binary.extend_from_slice(&time.to_le_bytes());
        binary.extend_from_slice(&id.to_le_bytes());
        binary.extend_from_slice(&4096u32.to_le_bytes());
        binary.extend_from_slice(&next.to_le_bytes());
    }
    let trace = read(&binary).expect("a trace");
    assert_eq!(paths(&trace), [&[9], &[8], &[9]]);
    assert_eq!(trace.duration_ns(), 1_000_000_000);
    assert!(read(&binary[..binary.len() - 1]).is_err());
    assert!(read(&[0u8; 25]).is_err());
    let plain = "1,9,4096\n1, 8, 1\n2,9,1\n";
    assert_eq!(read(plain.as_bytes()), Ok(trace.clone()));
    let named = "# op,obj_id,time\nr,9,1\nw,8,1\nr,9,2\n";
    assert_eq!(read(named.as_bytes()), Ok(trace));
    assert_eq!(read(b"1,abc,1\n2,abc,1\n").expect("names").uniques(), 1);
    assert!(read(b"1,9\nx,9\n").expect_err("no time").message().contains("line 2"));
    assert!(read(b"1,9\n1\n").is_err());
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
fn the_own_format_round_trips_and_survives_hostile_files() {
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
    // With a sum that is right, whatever else is wrong must not panic.
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

/// Cuts and changes bytes at places that a fixed sequence picks.
fn damaged(text: &[u8], times: u64) -> impl Iterator<Item = Vec<u8>> + '_ {
    const BYTES: &[u8] = b"{}[]\",:0-9.eE\\u\n \x00\xff\xc3";
    let mut state = 5u64;
    let mut next = move |n: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n.max(1)
    };
    (0..times).map(move |_| {
        let mut bytes = text.to_vec();
        for _ in 0..=next(3) {
            let at = next(bytes.len());
            match next(4) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, BYTES[next(BYTES.len())]),
                2 => drop(bytes.splice(at..at, text[next(text.len())..].iter().copied())),
                _ => {
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte = BYTES[next(BYTES.len())];
                    }
                }
            }
        }
        bytes
    })
}

#[test]
fn no_reader_panics_whatever_it_is_given() {
    let talk = r#"[{"id":"x","conversations":[{"from":"human","value":"a\u00e9"},{"from":"gpt","value":"b"}]}]"#;
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n";
    let own = format::write(&small()).expect("memory");
    let samples: [&[u8]; 6] = [
        MOONCAKE.as_bytes(),
        WEKA.as_bytes(),
        talk.as_bytes(),
        azure.as_bytes(),
        b"time,obj_id\n1,9\n2,abc\n",
        &own,
    ];
    for (sample, (_, kind)) in samples.iter().flat_map(|s| reader::KINDS.map(|k| (s, k))) {
        for bytes in damaged(sample, 300) {
            let opts = ReadOpts { kind: Some(kind), ..ReadOpts::default() };
            let Ok(trace) = reader::read(&mut Source::bytes(bytes).expect("bytes"), &opts) else {
                continue;
            };
            let opts = ReplayOpts::default();
            let study = Study::of(&trace, &opts.cost).expect("memory");
            replay::run(&trace, &study, "lru", 3, &opts, &mut |_| true).expect("a run");
        }
    }
}

#[test]
fn files_are_told_apart_by_their_content() {
    let kinds = [
        (MOONCAKE, Kind::Mooncake),
        (WEKA, Kind::Weka),
        ("[{\"id\": 1, \"conversations\": []}]", Kind::ShareGpt),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", Kind::Azure),
        ("1,2,3\n", Kind::Csv),
        ("KVTTRACE", Kind::Kvtier),
        ("\u{1}\0\0\0", Kind::Oracle),
    ];
    for (start, kind) in kinds {
        assert_eq!(reader::detect(start.as_bytes()), Ok(kind), "{start}");
    }
    for nothing in ["", "hello", "{\"a\": 1}"] {
        assert!(reader::detect(nothing.as_bytes()).is_err());
    }
    assert!(reader::kind_of("monocake").expect_err("no kind").message().contains("mooncake"));
}

/// What is committed, and how it was made.
const MADE: [(&str, i64, u64); 5] =
    [("chat", 15, 1), ("agent", 30, 2), ("batch", 15, 3), ("multitenant", 10, 4), ("burst", 15, 5)];

fn data(kind: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/{kind}.kvtrace"))
}

fn made(kind: &str) -> Trace {
    reader::open(&data(kind), &ReadOpts::default()).expect("a committed trace")
}

#[test]
fn workloads_are_the_same_on_every_machine() {
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

/// Replays step by step under the laws: nothing is found that was not asked for,
/// nothing is resident that does not fit or was not inserted.
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
fn every_policy_obeys_the_laws_repeats_itself_and_stays_behind_the_optimum() {
    for (name, ..) in MADE {
        let trace = made(name).head(500).expect("memory");
        let opts = ReplayOpts::default();
        let study = Study::of(&trace, &opts.cost).expect("memory");
        for (percent, holes) in [(3, false), (12, true)] {
            let blocks = (trace.uniques() as u64 * percent / 100).max(1);
            let opts = ReplayOpts { holes, ..opts };
            let best = lawful(&trace, &study, "belady", blocks, &opts);
            for entry in registry::ENTRIES {
                let report = lawful(&trace, &study, entry.name, blocks, &opts);
                let again = replay::run(&trace, &study, entry.name, blocks, &opts, &mut |_| true);
                assert!(report.same_as(&again.expect("a run")), "{name}: {}", entry.name);
                assert!(best.done.hits >= report.done.hits, "{name}: {} wins", entry.name);
            }
        }
    }
}

#[test]
fn enough_room_is_as_good_as_no_bound() {
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
fn cells_are_whole_blocks_to_a_policy_that_takes_them_together() {
    let trace = made("chat").head(400).expect("memory");
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let blocks = trace.uniques() as u64 / 10;
    for holes in [false, true] {
        let whole = lawful(&trace, &study, "lru", blocks, &ReplayOpts { holes, ..opts });
        let cells = ReplayOpts { layers: 4, holes, ..opts };
        let parts = lawful(&trace, &study, "lru", blocks, &cells);
        assert_eq!(parts.inserts, parts.evictions + blocks * 4);
        // A cut inside a block loses that block alone.
        let near = parts.done.hits.abs_diff(whole.done.hits);
        assert!(near * 50 < whole.done.hits, "{} and {}", parts.done.hits, whole.done.hits);
    }
}

#[test]
fn what_cannot_be_replayed_is_refused() {
    let trace = small();
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let run = |spec: &str, blocks: u64, opts: &ReplayOpts| {
        replay::run(&trace, &study, spec, blocks, opts, &mut |_| true).err().map(|e| e.status())
    };
    assert_eq!(run("lru", 10, &opts), None);
    assert_eq!(run("lur", 10, &opts), Some(Status::Spec));
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
    // To know when each session goes on is worth much.
    assert!(with(Hints::Think) < with(Hints::None));
}

#[test]
fn tiers_share_the_work() {
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
    let one = run(&[tier("device", all, 0.0)]);
    assert_eq!(one.ttft_mean_ns, one.ttft_floor_ns);
    assert_eq!((one.loss(), one.tiers[0].read_bytes), (0.0, 0));
    let small = run(&[tier("device", all / 20, 0.0)]);
    let two = run(&[tier("device", all / 20, 0.0), tier("host", all, 25e9)]);
    assert_eq!(two.tiers[0].hit_tokens, small.tiers[0].hit_tokens);
    let found: u64 = two.tiers.iter().map(|t| t.hit_tokens).sum();
    assert_eq!(found, study.floor.hit_tokens);
    assert_eq!(two.tiers[1].read_bytes, two.tiers[1].hit_tokens * machine.token_bytes);
    assert!(one.ttft_mean_ns < two.ttft_mean_ns && two.ttft_mean_ns < small.ttft_mean_ns);
    assert!(two.ttft_p50_ns <= two.ttft_p99_ns);
    assert!(tiers::run(&trace, &study, "lru", &[], &machine, &opts, &mut |_| true).is_err());
}

#[test]
fn what_is_explained_is_what_happens() {
    let trace = made("chat");
    let opts = ReplayOpts::default();
    let study = Study::of(&trace, &opts.cost).expect("memory");
    let mut replay = Replay::open(&trace, &study, "lru", 60, &opts).expect("a policy");
    while replay.done() < 300 {
        replay.step().expect("a step");
    }
    let told = explain(&trace, &mut replay, 4).expect("a picture");
    assert_eq!((told.policy, told.requests), ("lru", 300));
    let first = told.blocks.iter().find(|b| b.turn == Some(0)).expect("a victim");
    let score = |b: &kvtier::lab::explain::Shown| b.standing.map(|s| s.score);
    assert_eq!(first.standing.map(|s| s.children), Some(0));
    let least = told.blocks.iter().filter(|b| b.standing.is_some_and(|s| s.children == 0));
    assert!(least.map(score).all(|s| s >= score(first)));
    assert_eq!(told.blocks.iter().filter(|b| b.turn.is_some()).count(), 4);
    // Looking changed nothing.
    let mut other = Replay::open(&trace, &study, "lru", 60, &opts).expect("a policy");
    while other.step().expect("a step").is_some() {}
    while replay.step().expect("a step").is_some() {}
    assert_eq!(other.finish().done, replay.finish().done);
}

#[cfg(feature = "tool")]
mod tool {
    use super::data;
    use std::process::{Command, Output};

    fn lab(args: &[&str]) -> Output {
        let tool = Command::new(env!("CARGO_BIN_EXE_kvtier")).arg("lab").args(args).output();
        tool.expect("the tool starts")
    }

    fn told(args: &[&str]) -> String {
        let output = lab(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    #[test]
    fn a_workload_is_made_converted_compared_and_explained() {
        let dir = std::env::temp_dir().join(format!("kvtier-lab-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let path = |name: &str| dir.join(name).to_string_lossy().into_owned();
        let (a, b, page) = (path("a.kvtrace"), path("b.kvtrace"), path("page.html"));
        told(&["gen", "--kind", "chat", "--duration", "15m", "--seed", "1", "--out", &a]);
        told(&["convert", &a, &b]);
        let read = |path: &str| std::fs::read(path).expect("written");
        assert!(read(&a) == read(&b) && read(&a) == std::fs::read(data("chat")).expect("ours"));

        let two = ["compare", "--trace", &a, "--policies", "lru,arc", "--sizes", "2%,200"];
        let table = told(&[&two[..], &["--html", &page, "--threads", "2"]].concat());
        assert!(table.contains("arc") && table.contains("unbounded cache misses"));
        let html = String::from_utf8(read(&page)).expect("text");
        assert!(html.contains("<svg") && html.contains("polyline"));
        for outside in ["http", "src=", "href=", "@import", "url("] {
            assert!(!html.contains(outside), "{outside}");
        }
        assert_eq!(told(&[&two[..], &["--csv"]].concat()).lines().count(), 5);
        let lines = told(&[&two[..], &["--json"]].concat());
        for line in lines.lines() {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            assert!(line["token_miss_ratio"].as_f64().is_some_and(|r| r > 0.3 && r < 1.0));
        }
        assert_eq!(lines.lines().count(), 4);
        let tiers = ["--device", "10GiB", "--host", "50GiB@25GB", "--json"];
        assert!(told(&[&two[..5], &tiers[..]].concat()).contains("\"host\""));
        let dot = told(&["explain", "--trace", &a, "--policy", "arc", "--size", "2%", "--dot"]);
        assert!(dot.starts_with("digraph") && dot.contains("leaves first"));
        assert!(told(&["policies"]).contains("lru"));
        std::fs::remove_dir_all(&dir).expect("ours");
    }

    #[test]
    fn what_is_wrong_is_said() {
        let chat = data("chat").to_string_lossy().into_owned();
        for (args, words) in [
            (&["compare", "--trace", &chat, "--policies", "s3fif"][..], "did you mean 's3fifo'"),
            (&["compare", "--trace", &chat, "--sizes", "0"], "'0'"),
            (&["compare", "--trace", "/nonexistent"], "/nonexistent"),
            (&["compare", "--trace", &chat, "--host", "1B"], "a block has"),
            (&["compare", "--trace", &chat, "--hints", "all"], "none, stop or think"),
            (&["gen", "--kind", "chad", "--out", "x"], "did you mean 'chat'"),
            (&["gen", "--kind", "chat", "--duration", "soon", "--out", "x"], "soon"),
            (&["convert", "--format", "azur", &chat, "x"], "did you mean 'azure'"),
        ] {
            let output = lab(args);
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && error.contains(words), "{args:?}: {error}");
        }
    }
}
