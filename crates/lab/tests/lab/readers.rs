//! Readers of foreign trace files: formats, detection, truncated and hostile input.

use std::path::PathBuf;

use kvtier::base::status::Status;
use kvtier::io::source::Source;
use kvtier::meta::sessions::Stop;
use kvtier::trace::reader::{self, Kind, ReadOpts};
use kvtier::trace::replay::{self, ReplayOpts};
use kvtier::trace::requests::Trace;
use kvtier::trace::study::Study;

fn read(bytes: &[u8]) -> kvtier::base::status::Result<Trace> {
    reader::read(&mut Source::bytes(bytes.to_vec())?, &ReadOpts::default())
}

fn paths(trace: &Trace) -> Vec<&[u64]> {
    trace.requests().iter().map(|r| trace.blocks(r)).collect()
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
fn nested_agent_sessions_become_requests() {
    let doubled = format!("{WEKA}{WEKA}");
    let trace = read(doubled.as_bytes()).expect("a trace");
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
    assert_eq!(read(doubled.as_bytes()).expect("again"), trace);
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
fn conversations_become_requests_with_common_prefixes() {
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
    // Two full common blocks. The last block of each request is its own, except that both start
    // alike.
    assert_eq!((trace.references(), trace.uniques(), study.session_count), (12, 5, 2));
    let of = |s: u64| trace.requests().iter().filter(move |r| r.session == Some(s));
    assert!(of(1).all(|r| r.input_tokens > 1200 && r.stop == Stop::EndTurn));
    for wrong in ["[{\"conversations\": 3}]", "[{\"conversations\": [1]}]"] {
        assert!(read(wrong.as_bytes()).expect_err(wrong).message().contains("conversation 1"));
    }
}

#[test]
fn azure_requests_share_no_blocks() {
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
fn libcachesim_traces_are_read() {
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

/// Truncates the text and changes bytes at fixed pseudo-random places.
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
fn readers_never_panic_on_damaged_input() {
    let talk = r#"[{"id":"x","conversations":[{"from":"human","value":"a\u00e9"},{"from":"gpt","value":"b"}]}]"#;
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n";
    let made = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/batch.kvtrace");
    let own = std::fs::read(made).expect("committed");
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
fn formats_are_detected_from_the_content() {
    let kinds = [
        (MOONCAKE, Kind::Mooncake),
        (WEKA, Kind::Weka),
        ("[{\"id\": 1, \"conversations\": []}]", Kind::ShareGpt),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", Kind::Azure),
        ("1,2,3\n", Kind::Csv),
        ("KVTTRACE", Kind::Kvtier),
        // Only names at the top level count, in any order.
        ("{\"timestamp\": 1, \"conversations\": [{\"from\": \"gpt\"", Kind::ShareGpt),
        (
            "{\"conversations\": [{\"value\": \"\\\"hash_ids\\\"\"}], \"timestamp\": 1}",
            Kind::ShareGpt,
        ),
        ("{\"messages\": [{\"requests\": 1, \"timestamp\": 3}]}", Kind::ShareGpt),
        (
            "[\n {\"timestamp\": \"now\", \"conversations\": []}, {\"hash_ids\": []}]",
            Kind::ShareGpt,
        ),
        ("{\"hash_ids\": [1, 2], \"note\": \"conversations\", \"timestamp\": 3}", Kind::Mooncake),
        ("{\"timestamp\": 3, \"hash_ids\": [1, 2", Kind::Mooncake),
        ("{\"requests\": [{\"hash_ids\": [1], \"timestamp\": 1", Kind::Weka),
        ("time,größe\n", Kind::Csv),
    ];
    for (start, kind) in kinds {
        assert_eq!(reader::detect(start.as_bytes()), Ok(kind), "{start}");
        let marked = format!("\u{FEFF}{start}");
        assert!(kind == Kind::Kvtier || reader::detect(marked.as_bytes()) == Ok(kind), "{start}");
    }
    for nothing in
        ["", "hello", "{\"a\": 1}", "[]", "[{\"hash_ids\": []}]", "{\"a\": {\"hash_ids\": []}}"]
    {
        assert!(reader::detect(nothing.as_bytes()).is_err(), "{nothing}");
    }
    assert!(reader::kind_of("monocake").expect_err("no kind").message().contains("mooncake"));
}

fn records(of: &[(u32, u64, u32, i64)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (time, id, size, next) in of {
        out.extend_from_slice(&time.to_le_bytes());
        out.extend_from_slice(&id.to_le_bytes());
        out.extend_from_slice(&size.to_le_bytes());
        out.extend_from_slice(&next.to_le_bytes());
    }
    out
}

#[test]
fn binary_records_are_recognised_by_plausible_fields() {
    // Numbers from 0 and from 1, never as -1, -2 and the largest number; first bytes that look like
    // JSON, a space, or gzip.
    for sound in [
        &[(5, 9, 1, 2), (5, 8, 1, -1), (6, 9, 1, -1)][..],
        &[(5, 9, 1, 3), (5, 8, 1, -2), (6, 9, 1, i64::MAX)],
        &[(0, 1, 4096, 700)],
        &[(u32::from(b'{'), 1, 1, -1), (200, 2, 1, -1)],
        &[(u32::from(b' '), 1, 1, -1), (200, 2, 1, -1)],
    ] {
        let bytes = records(sound);
        assert_eq!(reader::detect(&bytes), Ok(Kind::Oracle), "{sound:?}");
        assert_eq!(read(&bytes).expect("a trace").requests().len(), sound.len());
    }
    for wrong in [
        &[(5, 9, 0, -1)][..],
        &[(5, 9, 1, 0)],
        &[(5, 9, 1, -3)],
        &[(5, 9, 1, 1 << 50)],
        &[(5, 9, 1, -1), (4, 9, 1, -1)],
        &[(5, 9, 1, 1), (5, 8, 1, -1)],
        &[(5, 9, 1, 2), (5, 8, 1, -1), (6, 7, 1, -1)],
    ] {
        let error = read(&records(wrong)).map(drop).expect_err("not plausible");
        let text = error.message();
        assert!(text.contains("oracle") && text.contains("--format"), "{wrong:?}: {error}");
    }
    // With the format given, unusual values are accepted: here a size of 0.
    let opts = ReadOpts { kind: Some(Kind::Oracle), ..ReadOpts::default() };
    let mut source = Source::bytes(records(&[(5, 9, 0, -1), (4, 9, 0, -1)])).expect("bytes");
    assert_eq!(reader::read(&mut source, &opts).expect("named").requests().len(), 2);
    // Bytes of no format, in any number of whole records.
    let mut state = 1u64;
    for records in 1..200 {
        let bytes: Vec<u8> = (0..24 * records)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        assert!(read(&bytes).is_err(), "{records}");
    }
    assert!(read(&[0; 24 * 9]).is_err());
}

#[test]
fn packed_files_are_rejected_with_the_tool_to_unpack_them() {
    for (start, words) in [
        (&b"\x1f\x8b\x08\0\0\0\0\0"[..], "gzip -dc"),
        (b"\xfd7zXZ\0\0\x04", "xz -dc"),
        (b"BZh91AY&SY\xff\0", "bzip2 -dc"),
        (b"PK\x03\x04\x14\0", "unzip -p"),
        (b"\x04\x22\x4d\x18\x64", "lz4 -dc"),
        (b"7z\xbc\xaf\x27\x1c\0\x04", "7z x"),
        (b"PAR1\x15\0", "Parquet"),
        (b"\xff\xfet\0i\0m\0e\0", "UTF-16"),
        (b"\xfe\xff\0t\0i", "UTF-16"),
    ] {
        // Any length, with any given format.
        for len in [start.len(), 24, 240] {
            let mut bytes = start.to_vec();
            bytes.resize(len.max(start.len()), 0x5A);
            let error = read(&bytes).expect_err(words);
            assert!(error.message().contains(words), "{words}: {error}");
            for kind in [Kind::Mooncake, Kind::Csv, Kind::Kvtier] {
                let opts = ReadOpts { kind: Some(kind), ..ReadOpts::default() };
                let mut source = Source::bytes(bytes.clone()).expect("bytes");
                let error = reader::read(&mut source, &opts).expect_err(words);
                assert!(error.message().contains(words), "{words}: {error}");
            }
        }
    }
    // Column names that begin like a container are still text.
    assert_eq!(reader::detect(b"PK,BZh\n1,2\n"), Ok(Kind::Csv));
}

#[test]
fn a_byte_order_mark_is_skipped() {
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n";
    let talk = r#"[{"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b"}]}]"#;
    for text in [MOONCAKE, WEKA, azure, talk, "time,obj_id\n1,9\n2,abc\n", "1,9\n2,9\n"] {
        let marked = format!("\u{FEFF}{text}");
        let trace = read(text.as_bytes()).expect("a trace");
        assert!(!trace.requests().is_empty());
        assert_eq!(read(marked.as_bytes()), Ok(trace.clone()), "{text}");
        for (_, kind) in reader::KINDS {
            let opts = ReadOpts { kind: Some(kind), ..ReadOpts::default() };
            let [plain, marked] = [text, &marked].map(|text| {
                let mut source = Source::bytes(text.as_bytes().to_vec()).expect("bytes");
                reader::read(&mut source, &opts).map_err(|e| e.status())
            });
            assert!(plain == marked || kind == Kind::Oracle, "{kind:?}: {text}");
        }
    }
}

#[test]
fn azure_files_cannot_request_unbounded_memory() {
    let head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    let line = |tokens: u64| format!("2023-11-16 18:17:03,{tokens},1\n");
    let with = |text: String, block_tokens: u32| {
        let opts = ReadOpts { kind: Some(Kind::Azure), block_tokens, ..ReadOpts::default() };
        reader::read(&mut Source::bytes(text.into_bytes())?, &opts)
    };
    let one = with(format!("{head}{}", line(16 << 20)), 512).expect("long");
    assert_eq!(one.references(), 32_768);
    for (text, block_tokens) in [
        (format!("{head}{}", line((16 << 20) + 1)), 512),
        (format!("{head}{}", line(u64::from(u32::MAX))), 512),
        (format!("{head}{}", line(16 << 20)), 1),
        (format!("{head}{}", line(16 << 20).repeat(40)), 512),
    ] {
        let error = with(text, block_tokens).map(drop).expect_err("too much");
        assert_eq!(error.status(), Status::Limit);
        assert!(error.message().contains("line "), "{error}");
    }
    // Without a header the first line is a request.
    assert_eq!(with(line(512).repeat(2), 512).expect("two").requests().len(), 2);
}
