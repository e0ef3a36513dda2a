//! `kvtier plan`: capacity of given sizes.

use std::process::{Command, Output};

fn run(args: &str) -> (i32, String, String) {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .arg("plan")
        .args(args.split_whitespace())
        .output()
        .expect("it starts");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (status.code().expect("it ends"), text(stdout), text(stderr))
}

const MODEL: &str = "--layers 32 --kv-heads 8 --head-dim 128 --dtype bf16 --tokens 100000";

#[test]
fn a_plan_reports_the_capacity_of_each_tier() {
    let (code, out, error) =
        run(&format!("{MODEL} --host 8GiB --disk 200GiB --remote 1TiB --json"));
    assert_eq!((code, error.as_str()), (0, ""));
    let all: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(
        (all["token_bytes"].as_u64(), all["wanted_chunks"].as_u64()),
        (Some(128 << 10), Some(1563))
    );
    let tiers = all["tiers"].as_array().expect("tiers");
    let chunks: Vec<u64> = tiers.iter().filter_map(|tier| tier["chunks"].as_u64()).collect();
    assert_eq!((chunks.len(), chunks[0], chunks[2]), (3, 1024, 131_072));
    assert!((23_000..25_600).contains(&chunks[1]), "{chunks:?}");
    let spec = all["spec"].as_str().expect("a spec");
    kvtier::store::spec::StoreSpec::parse(spec).expect("one that opens");

    let (code, out, _) = run(&format!("{MODEL} --host 8GiB --disk 200GiB"));
    assert_eq!(code, 0);
    for words in ["128.0 KiB", "8.0 MiB for 64 tokens", "12.2 GiB in 1563 chunks", "store(host="] {
        assert!(out.contains(words), "{words}: {out}");
    }
}

#[test]
fn many_small_chunks_set_the_parameter_chunks() {
    let (code, out, _) = run(
        "--layers 2 --latent 64 --dtype fp8_e4m3 --chunk 16 --tokens 1000 --disk 100GiB --json",
    );
    let all: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(code, 0);
    assert!(all["spec"].as_str().expect("a spec").contains("chunks="), "{all}");
}

#[test]
fn invalid_sizes_are_reported() {
    let (code, _, error) = run("--layers 2 --kv-heads 1 --head-dim 8 --dtype bf17 --tokens 1");
    assert!(code == 1 && error.contains("bf16"), "{error}");
    let (code, _, error) = run("--layers 2 --tokens 1");
    assert!(code == 2 && error.contains("--kv-heads"), "{error}");
    let (code, _, error) = run(&format!("{MODEL} --chunk 4096 --disk 1GiB --segment 1MiB"));
    assert!(code == 1 && error.contains("segment="), "{error}");
}
