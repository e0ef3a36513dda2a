//! `kvtier-bench model`, and the processes that it starts.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kvtier_testkit::fixtures::model_files::{Sizes, write_gguf, write_safetensors};
use kvtier_testkit::fixtures::scratch::Scratch;
use serde_json::Value;

use crate::{ToolOutput, json, tool};

fn number(value: &Value, at: &str) -> u64 {
    value.pointer(at).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {at} in {value}"))
}

/// Layers of about 1.4 MiB.
fn dense() -> Sizes {
    Sizes { layers: 12, hidden: 256, ffn: 640, vocabulary: 500, ..Sizes::default() }
}

fn gguf(dir: &Scratch, sizes: &Sizes) -> PathBuf {
    write_gguf(&dir.0, "model", &sizes.gguf(), &sizes.metadata(), 1).remove(0)
}

fn model(path: &Path, args: &[&str]) -> ToolOutput {
    ToolOutput::of(tool().arg("model").arg(path).args(args).output().expect("the tool starts"))
}

/// 68 MiB: enough for a process and a part of the model in its cgroup.
fn large() -> Sizes {
    Sizes { layers: 24, hidden: 512, ffn: 448, ..Sizes::default() }
}

/// Bars that need no cgroup.
const ANYWHERE: [&str; 2] = ["steady_pass", "interleaved_over_first"];
/// Bars that need a cgroup.
const IN_CGROUPS: [&str; 8] = [
    "over_map",
    "over_map_128k",
    "parts_direct",
    "parts_pinned_first",
    "parts_interleaved",
    "parts_bound",
    "memory_as_told",
    "memory_as_found",
];

fn bars(path: &Path) {
    let output = model(path, &["--rounds", "1", "--json"]);
    if output.error.contains("without O_DIRECT") {
        // Without direct I/O (tmpfs on older Linux) there is no bound.
        return output.fails(1, "without O_DIRECT");
    }
    let lines: Vec<Value> = output.fine().lines().map(json).collect();
    for name in ANYWHERE {
        let bar = lines.iter().find(|bar| bar["bar"] == name).expect("a bar");
        // The speed of the disk is unknown while tests run, but a pass takes some time.
        assert!(bar["value"].as_f64().is_some_and(|value| value > 0.05), "{bar}");
    }
    for name in IN_CGROUPS {
        let bar = lines.iter().find(|bar| bar["bar"] == name).expect("a bar");
        let value = bar["value"].as_f64().is_some_and(f64::is_normal);
        let note = bar["note"].as_str().unwrap_or("");
        assert!(value || note.len() > 8, "neither a number nor why there is none: {bar}");
        if name == "memory_as_told" && value {
            assert!(bar["value"].as_f64().is_some_and(|part| part > 0.2 && part <= 1.0), "{bar}");
        }
    }
}

#[test]
fn a_model_in_shards_is_measured() {
    let (dir, sizes) = (Scratch::created("tool-bench"), large());
    bars(&write_safetensors(&dir.0, &sizes.safetensors(false), &sizes.config(), 3));
}

#[test]
fn invalid_models_and_arguments_are_reported() {
    let dir = Scratch::created("tool-bench-small");
    let path = gguf(&dir, &dense());
    let bench = |args: &[&str]| model(&path, args);
    bench(&[]).fails(1, "passes are measured from 64.0 MiB on");
    bench(&["--rounds", "0"]).fails(2, "0 is not in 1..=1000");
    bench(&["--host", "many"]).fails(2, "does not begin with a number");
    let dir = Scratch::created("tool-bench-all");
    let path = gguf(&dir, &large());
    model(&path, &["--host", "1G"]).fails(1, "holds all");
}

/// A process of the benchmark in a cgroup, and the first line that it prints.
fn child(
    args: &[&str],
    path: &Path,
) -> (std::process::Child, BufReader<std::process::ChildStdout>, Value) {
    let mut tool: Command = tool();
    tool.args(["child", "--how", "interleaved"]).args(args).arg(path);
    let mut process =
        tool.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the tool starts");
    let mut answers = BufReader::new(process.stdout.take().expect("piped"));
    let mut line = String::new();
    answers.read_line(&mut line).expect("a line");
    (process, answers, json(&line))
}

#[test]
fn a_process_joins_its_cgroup_and_counts_passes() {
    let dir = Scratch::created("tool-child");
    let path = gguf(&dir, &dense());
    let group = dir.0.join("group");
    std::fs::create_dir(&group).expect("made");
    let at = group.to_str().expect("text");
    let (mut process, mut answers, ready) = child(&["--cgroup", at, "--host", "8388608"], &path);
    let joined = std::fs::read_to_string(group.join("cgroup.procs")).expect("it joined");
    assert_eq!(joined, process.id().to_string());
    assert!(number(&ready, "/moved_bytes") > 4 << 20 && number(&ready, "/units") == 16);
    let mut requests = process.stdin.take().expect("piped");
    let mut sums = Vec::new();
    for _ in 0..2 {
        writeln!(requests, "1").expect("written");
        let mut line = String::new();
        answers.read_line(&mut line).expect("a line");
        let answer = json(&line);
        assert!(answer["pass_ns"].as_f64().is_some_and(|ns| ns > 0.0));
        sums.push(number(&answer, "/sum"));
    }
    assert_eq!(sums[0], sums[1]);
    drop(requests);
    assert!(process.wait().expect("it ends").success());
}

#[test]
fn a_process_reports_failures() {
    let dir = Scratch::created("tool-child-wrong");
    let path = gguf(&dir, &dense());
    let absent = dir.0.join("absent");
    let output = |args: &[&str], path: &Path| {
        let (mut process, _answers, line) = child(args, path);
        drop(process.stdin.take());
        process.wait().expect("it ends");
        line["error"].as_str().expect("an error").to_string()
    };
    let words = output(&["--cgroup", absent.to_str().expect("text")], &path);
    assert!(words.contains("absent/cgroup.procs: No such file"), "{words}");
    assert!(output(&["--host", "4096"], &path).contains("KVT_E_BUDGET"));
    assert!(output(&[], &absent).contains("KVT_E_NOT_FOUND"));
}
