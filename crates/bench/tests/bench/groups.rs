//! Benchmark groups with an absent or simulated subject.

use std::path::PathBuf;
use std::process::Command;

use kvtier_testkit::fixtures::{emulated, fake_cuda, fake_cufile};
use serde_json::Value;

use crate::{ToolOutput, tool};

#[test]
fn only_the_group_remote_accepts_a_url() {
    let output =
        ToolOutput::of(tool().args(["abi", "--url", "redis://a"]).output().expect("it runs"));
    output.fails(1, "'remote'");
}

/// Over a fake driver, whose speed means nothing: each bar is measured. Without a driver each bar
/// gives the reason for its missing value.
#[test]
fn bars_have_a_value_or_a_reason() {
    for (has_driver, devices) in [(true, "2"), (true, "1"), (false, "1")] {
        let library =
            if has_driver { fake_cuda::library() } else { PathBuf::from("/nowhere/libcuda.so") };
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier-bench"));
        command.args(["device", "--quick", "--json"]);
        command.env("KVTIER_CUDA_LIBRARY", library);
        command.env("KVTIER_CUFILE_LIBRARY", fake_cufile::library());
        command.env("KVTIER_BENCH_DIR", env!("CARGO_TARGET_TMPDIR"));
        // The processor runs the kernels.
        command.env("KVTIER_FAKE_KERNELS", emulated::library());
        command.env("KVTIER_FAKE_DEVICES", devices);
        let output = command.output().expect("it runs");
        let text = String::from_utf8(output.stdout).expect("text");
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), if has_driver { 42 } else { 18 }, "{text}");
        for line in &lines {
            if line["bar"] == "disk_to_device" && has_driver {
                // Measured if the directory supports direct reads.
                let why = line["note"].as_str().expect("words");
                assert!(line["value"].as_f64().is_some() != why.contains("the file"), "{line}");
                continue;
            }
            let measured = line["value"].as_f64().is_some_and(|value| value > 0.0);
            let is_alone = line["bar"] == "peer_copy" && devices == "1";
            assert_eq!(measured, has_driver && !is_alone, "{line}");
            let note = line["note"].as_str().unwrap_or("");
            assert!(!is_alone || !has_driver || note.contains("has no peer"), "{line}");
            assert!(has_driver || note.contains("no CUDA driver"), "{line}");
        }
    }
}

#[test]
fn without_a_server_only_plans_are_measured() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier-bench"));
    let output = command.args(["remote", "--quick", "--json"]).env("PATH", "").output();
    let out = String::from_utf8(output.expect("started").stdout).expect("text");
    let lines: Vec<Value> =
        out.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(lines.len(), 9, "{out}");
    for line in &lines {
        let is_plan = line["bar"] == "remote_slow_loads";
        let note = line["note"].as_str().unwrap_or_default();
        assert_eq!(note.starts_with("SKIP"), !is_plan, "{line}");
        assert_eq!(line["value"].is_null(), !is_plan, "{line}");
        // 0 if computing is faster than loading; large if loading would have been faster.
        let part = line["baseline_value"].as_f64();
        assert!(!is_plan || line["value"] == 0.0 && part.is_some_and(|part| part > 0.3), "{line}");
    }
}
