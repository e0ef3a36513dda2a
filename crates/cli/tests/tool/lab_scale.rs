//! `kvtier lab scale`: tables and JSON of the scale study.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A committed trace.
fn data(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/data/{kind}.kvtrace"))
}

fn scale(args: &[&str]) -> Output {
    let trace = data("chat").to_string_lossy().into_owned();
    let base = ["lab", "scale", "--trace", &trace, "--host", "20GiB@25GB"];
    let tool = Command::new(env!("CARGO_BIN_EXE_kvtier")).args([&base[..], args].concat()).output();
    tool.expect("the tool starts")
}

fn stdout_of(args: &[&str]) -> String {
    let output = scale(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn tables_and_json_are_deterministic() {
    let axes = ["--engines", "1,6", "--routers", "session,prefix", "--write", "through"];
    let table = stdout_of(&axes);
    assert!(
        table.contains("hottest chunk") && table.contains("session") && table == stdout_of(&axes)
    );
    let lines = stdout_of(&[&axes[..], &["--json"]].concat());
    assert_eq!(lines.lines().count(), 4);
    for line in lines.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let tokens = |name: &str| line["tokens"][name].as_u64().expect("a number");
        let parts = ["host", "disk", "remote_own", "remote_others", "computed"];
        assert_eq!(parts.iter().map(|part| tokens(part)).sum::<u64>(), tokens("all"));
        assert!(line["cost"]["per_million_tokens"].as_f64().is_some_and(|cost| cost > 0.0));
    }
    let dead = ["--engines", "6", "--write", "through", "--dead", "4@7m", "--place", "chunk"];
    assert!(stdout_of(&dead).contains("hits were lost"));
    let dead = stdout_of(&[&dead[..], &["--json"]].concat());
    let dead: serde_json::Value = serde_json::from_str(&dead).expect("JSON");
    let others = |of: &serde_json::Value| of["tokens"]["remote_others"].as_u64();
    assert!(others(&dead) < others(&dead["whole"]));
    assert!(!stdout_of(&["--remote", "none"]).contains("hottest chunk"));
    let copies = stdout_of(&["--copies", "3", "--shared", "50%", "--engines", "3", "--json"]);
    assert!(copies.contains("\"requests\""));
}

#[test]
fn invalid_arguments_are_reported() {
    for (args, words) in [
        (&["--routers", "prefx"][..], "did you mean 'prefix'"),
        (&["--engines", "many"], "'many' is not a number of engines"),
        (&["--engines", "0"], "0 engines, allowed are 1 to"),
        (&["--engines", ""], "0 runs"),
        (&["--place", "chunks"], "did you mean 'chunk'"),
        (&["--write", "bak"], "did you mean 'back'"),
        (&["--remote", "0"], "bytes, unbounded or none"),
        (&["--remote", "1MiB"], "too small for an object of"),
        (&["--dead", "1"], "such as 1@30m"),
        (&["--dead", "1@30d"], "no request is after that time"),
        (&["--dead", "17@1m"], "17 failed shards"),
        (&["--shared", "0.3"], "such as 30%"),
        (&["--shared", "101%"], "a shared part of"),
        (&["--copies", "0"], "0 copies"),
        (&["--latency", "soon"], "soon"),
        (&["--layers", "7"], "a multiple of 7 layers"),
        (&["--object", "1GiB"], "are possible"),
        (&["--price-gib=-1"], "out of range"),
        (&["--policy", "belady"], "the future of one cache"),
        (&["--prefill-us=-1"], "per unit of cost"),
        (&["--warm-up", "100%"], "leaves nothing"),
    ] {
        let output = scale(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(words), "{args:?}: {error}");
    }
}
