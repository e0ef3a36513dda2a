//! `kvtier fsck`: exit status and output.

use std::path::Path;
use std::process::{Command, Output};

use kvtier_testkit::fixtures::disk::{SEGMENT_1, STORE, store};

fn run(path: &Path, more: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .arg("fsck")
        .arg(path)
        .args(more)
        .output()
        .expect("it starts");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (status.code().expect("it ends"), text(stdout), text(stderr))
}

fn lines(text: &str) -> Vec<serde_json::Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn exit_status_and_output_report_damage() {
    let (scratch, tier) = store("tool");
    let (code, _, error) = run(&scratch.0, &[]);
    assert!(code == 2 && error.contains("is open already"), "{code} {error}");
    assert!(error.contains("--read-only"), "{error}");
    assert_eq!(run(&scratch.0, &["--read-only"]).0, 0);
    drop(tier);
    let (code, out, error) = run(&scratch.0, &[]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(out.contains("clean") && out.contains("live        2 cells"), "{out}");

    let path = scratch.0.join(SEGMENT_1);
    let mut bytes = std::fs::read(&path).expect("found");
    bytes[2 * 4096 + 5] ^= 1;
    std::fs::write(&path, &bytes).expect("written");
    let (code, out, _) = run(&scratch.0, &[]);
    assert!(code == 1 && out.contains(&format!("{SEGMENT_1} at offset 8192, ")), "{out}");
    let (code, out, _) = run(&scratch.0, &["--json"]);
    let all = lines(&out);
    assert_eq!((code, all[0]["what"].as_str()), (1, Some("cell")));
    assert_eq!((all[0]["layer"].as_u64(), all[0]["live"].as_bool()), (Some(0), Some(true)));
    let summary = all.last().expect("a summary");
    assert_eq!(summary["kind"], "summary");
    assert_eq!(
        (summary["clean"].as_bool(), summary["live"]["cells"].as_u64()),
        (Some(false), Some(1))
    );
    assert!(std::fs::read(&path).expect("found") == bytes);

    std::fs::remove_file(scratch.0.join(STORE)).expect("removed");
    assert_eq!(run(&scratch.0, &[]).0, 2);
    let nowhere = scratch.0.join("nowhere");
    let (code, out, _) = run(&nowhere, &["--json"]);
    assert_eq!((code, lines(&out)[0]["kind"].as_str()), (2, Some("error")));
    assert!(!nowhere.exists(), "it makes nothing");
}
