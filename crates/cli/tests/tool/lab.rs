//! `kvtier lab`: generating, converting, comparing and explaining traces.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A committed trace.
fn data(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/data/{kind}.kvtrace"))
}

fn lab(args: &[&str]) -> Output {
    let tool = Command::new(env!("CARGO_BIN_EXE_kvtier")).arg("lab").args(args).output();
    tool.expect("the tool starts")
}

fn stdout_of(args: &[&str]) -> String {
    let output = lab(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_closed_pipe_ends_the_tool_quietly() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut tool = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    let output = tool.args(["lab", "policies"]).stdout(writer).output().expect("the tool starts");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(128 + 13));
}

#[test]
fn a_workload_is_generated_converted_compared_and_explained() {
    let dir = std::env::temp_dir().join(format!("kvtier-lab-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let path = |name: &str| dir.join(name).to_string_lossy().into_owned();
    let (a, b, page) = (path("a.kvtrace"), path("b.kvtrace"), path("page.html"));
    stdout_of(&["gen", "--kind", "chat", "--duration", "15m", "--seed", "1", "--out", &a]);
    stdout_of(&["convert", &a, &b]);
    let read = |path: &str| std::fs::read(path).expect("written");
    assert!(read(&a) == read(&b) && read(&a) == std::fs::read(data("chat")).expect("ours"));

    let args = ["compare", "--trace", &a, "--policies", "lru,arc", "--sizes", "2%,200"];
    let table = stdout_of(&[&args[..], &["--html", &page, "--threads", "2"]].concat());
    assert!(table.contains("arc") && table.contains("unbounded cache misses"));
    let html = String::from_utf8(read(&page)).expect("text");
    assert!(html.contains("<svg") && html.contains("polyline"));
    for outside in ["http", "src=", "href=", "@import", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
    assert_eq!(stdout_of(&[&args[..], &["--csv"]].concat()).lines().count(), 5);
    let lines = stdout_of(&[&args[..], &["--json"]].concat());
    for line in lines.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert!(line["token_miss_ratio"].as_f64().is_some_and(|r| r > 0.3 && r < 1.0));
    }
    assert_eq!(lines.lines().count(), 4);
    let tiers = ["--device", "10GiB", "--host", "50GiB@25GB", "--json"];
    assert!(stdout_of(&[&args[..5], &tiers[..]].concat()).contains("\"host\""));
    let dot = stdout_of(&["explain", "--trace", &a, "--policy", "arc", "--size", "2%", "--dot"]);
    assert!(dot.starts_with("digraph") && dot.contains("first victim"));
    assert!(stdout_of(&["policies"]).contains("lru"));
    let tool = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .args(["lab", "convert", "-", &b])
        .stdin(std::fs::File::open(data("burst")).expect("committed"))
        .output();
    assert!(tool.expect("the tool starts").status.success());
    assert!(read(&b) == std::fs::read(data("burst")).expect("ours"));
    std::fs::remove_dir_all(&dir).expect("ours");
}

#[test]
fn invalid_arguments_are_reported() {
    let chat = data("chat").to_string_lossy().into_owned();
    for (args, words) in [
        (&["compare", "--trace", &chat, "--policies", "s3fif"][..], "did you mean 's3fifo'"),
        (&["compare", "--trace", &chat, "--policies", "lru,custom"], "a replay has none"),
        (&["compare", "--trace", &chat, "--policies", "qos(inner=custom)"], "at offset 10"),
        (&["compare", "--trace", &chat, "--sizes", "0"], "'0'"),
        (&["compare", "--trace", &chat, "--sizes", "5%,0%"], "'0%'"),
        (&["compare", "--trace", "/dev/zero"], "/dev/zero: a device"),
        (&["compare", "--trace", "/"], "/: a directory"),
        (&["compare", "--trace", "/nonexistent"], "/nonexistent"),
        (&["compare", "--trace", &chat, "--host", "1B"], "a block has"),
        (&["compare", "--trace", &chat, "--hints", "all"], "none, stop or think"),
        (&["gen", "--kind", "chad", "--out", "x"], "did you mean 'chat'"),
        (&["gen", "--kind", "chat", "--duration", "soon", "--out", "x"], "soon"),
        (&["gen", "--kind", "chat", "--duration", "100000d", "--out", "x"], "is 90 days"),
        (&["convert", "--format", "azur", &chat, "x"], "did you mean 'azure'"),
    ] {
        let output = lab(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(words), "{args:?}: {error}");
    }
}

#[test]
fn policies_for_experts_are_compared_on_a_routing_trace() {
    let path = std::env::temp_dir().join(format!("kvtier-routing-{}", std::process::id()));
    let name = path.to_string_lossy().into_owned();
    let mut trace = "kvtier-routing 1\nlayer 1 0 8 1048576\n".to_string();
    for at in 0..200 {
        trace += &format!("use 1 0 1 {},{} {}\n", at % 3, 3 + at % 5, at % 3);
    }
    std::fs::write(&path, trace).expect("written");
    let args = ["experts", &name, "--policies", "lru,auto(of=any(lru,lfu))", "--sizes", "50%,8"];
    let table = stdout_of(&args);
    let shown = ["400 uses of 8 experts in 1 layers, 8.0 MiB", "auto(of=any(lru,lfu))", "belady"];
    for text in shown.into_iter().chain(["lru, predicted, 4 experts: predictions cover"]) {
        assert!(table.contains(text), "{text}:\n{table}");
    }
    let lines = stdout_of(&[&args[..], &["--json"]].concat());
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 8);
    for line in &lines {
        let all = line["experts"] == 8 && line["policy"] != "lru, predicted";
        // If all experts fit, each is read once.
        assert!(!all || line["hits"] == 392, "{line}");
    }
    std::fs::write(&path, "kvtier-routing 1\n").expect("written");
    for (args, said) in [
        (["experts", &name, "--sizes", "4"], "decode some tokens first"),
        (["experts", "/nonexistent", "--sizes", "4"], "/nonexistent"),
    ] {
        let output = lab(&args);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(said), "{errors}");
    }
    std::fs::remove_file(&path).expect("removed");
}
