//! `kvtier device-conformance`, for built-in and for custom devices.

use kvtier_testkit::fixtures::fake_cuda;
use kvtier_testkit::fixtures::fake_cufile;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A minimal device that copies at once. `RUNS`: the number of runs that it copies.
const SOURCE: &str = r#"
#include <kvtier/kvtier.h>
#include <stdlib.h>
#include <string.h>
static kvt_status_t submit(void *data, uint32_t stream, uint64_t after,
                           const kvt_copy_rows_t *rows, uint64_t count, uint64_t stride_bytes,
                           uint64_t *event_out) {
    (void)data, (void)stream, (void)after;
    for (uint64_t i = 0; i < count; i++) {
        const kvt_copy_rows_t *row = (const void *)((const char *)rows + i * stride_bytes);
        for (uint64_t run = 0; run < RUNS; run++)
            memcpy((char *)row->to + run * row->to_stride_bytes,
                   (const char *)row->from + run * row->from_stride_bytes, row->run_bytes);
    }
    *event_out = 1;
    return KVT_OK;
}
static kvt_status_t query(void *data, uint64_t event) {
    (void)data;
    return event == 1 ? KVT_OK : KVT_E_HANDLE;
}
kvt_status_t kvtier_device(kvt_device_custom_t *out) {
    out->streams = 1;
    out->submit = submit;
    out->query = query;
    return KVT_OK;
}
"#;

fn library(name: &str, runs: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = dir.join(format!("{name}-{}.c", std::process::id()));
    let path = source.with_extension("so");
    std::fs::write(&source, SOURCE).expect("a source");
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../../include");
    let runs = format!("-DRUNS={runs}");
    let flags = ["-std=gnu11", "-Wno-int-to-pointer-cast", "-shared", "-fPIC", include, &runs];
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(compiler).args(flags).arg(&source).arg("-o").arg(&path).status();
    assert!(status.expect("a C compiler").success());
    path
}

fn conformance(args: &[&str]) -> (Option<i32>, String) {
    let tool = env!("CARGO_BIN_EXE_kvtier");
    let mut command = Command::new(tool);
    command.args(["device-conformance", "--rounds", "3"]).args(args);
    let Output { status, stdout, stderr } = command.output().expect("it runs");
    let text = [stdout, stderr].concat();
    (status.code(), String::from_utf8(text).expect("text"))
}

#[test]
fn built_in_devices_conform() {
    for kind in ["host", "simulated"] {
        let (code, text) = conformance(&[kind]);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains(" 0 failed") && text.contains("threads "), "{text}");
    }
    let (code, text) = conformance(&["host", "--json"]);
    assert_eq!(code, Some(0));
    let checks: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    // The device has no kernels: their checks are skipped.
    let is_kernel =
        |check: &serde_json::Value| check["check"].as_str().unwrap_or("").starts_with("kernel-");
    let skips = |check: &serde_json::Value| {
        is_kernel(check) || ["promises", "polling"].iter().any(|name| check["check"] == *name)
    };
    let expected = |check: &serde_json::Value| if skips(check) { "skipped" } else { "passed" };
    assert_eq!(checks.iter().filter(|check| is_kernel(check)).count(), 13, "{text}");
    assert!(checks.len() > 23 && checks.iter().all(|check| check["verdict"] == expected(check)));
}

#[test]
fn a_custom_device_is_tested_for_conformance() {
    let path = library("good", "row->runs");
    let (code, text) = conformance(&["custom", "--library", path.to_str().expect("a name")]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.starts_with("custom\n") && text.contains(" 0 failed"), "{text}");
    let path = library("short", "(row->runs > 1 ? row->runs - 1 : 1)");
    let (code, text) = conformance(&["custom", "--library", path.to_str().expect("a name")]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("layouts") && text.contains("FAILED"), "{text}");
}

#[test]
fn a_device_that_cannot_be_opened_reports_the_reason() {
    for (args, word) in [
        (&["custom"][..], "needs --library"),
        (&["custom", "--library", "/nowhere.so"], "cannot be loaded"),
        (&["custom", "--library", "libc.so.6"], "has no kvtier_device"),
        (&["cuda", "--library", "/nowhere.so"], "no CUDA driver"),
    ] {
        let (code, text) = conformance(args);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(word), "{text}");
    }
}

/// The doctor's finding on direct reads to a device, with this driver and this cuFile.
fn disk_to_device(driver: &Path, cufile: &Path, has_module: bool) -> (String, String) {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("doctor-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    command.args(["doctor", "--json", "--path"]).arg(&dir);
    command.env("KVTIER_CUDA_LIBRARY", driver).env("KVTIER_CUFILE_LIBRARY", cufile);
    if !has_module {
        command.env("KVTIER_FAKE_CUFILE_ALONE", "1");
    }
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    let wrong = String::from_utf8_lossy(&output.stderr).contains("fake cuFile");
    assert!(!wrong, "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let mut lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let is_it = |line: &serde_json::Value| line["check"] == "disk to device";
    let found = lines.find(is_it).expect("it is looked at");
    assert_eq!(std::fs::read_dir(&dir).expect("found").count(), 0, "something stays");
    std::fs::remove_dir(&dir).expect("empty");
    let word = |key: &str| found[key].as_str().expect("words").to_string();
    (word("mark"), word("value"))
}

#[test]
fn doctor_reports_direct_reads_to_a_device() {
    let (driver, cufile, none) =
        (fake_cuda::library(), fake_cufile::library(), PathBuf::from("/nowhere/lib.so"));
    let (mark, value) = disk_to_device(&none, &cufile, true);
    assert!(mark == "absent" && value.contains("no CUDA driver"), "{value}");
    let (mark, value) = disk_to_device(&driver, &none, true);
    assert!(mark == "absent" && value.contains("no cuFile"), "{value}");
    let (mark, value) = disk_to_device(&driver, &cufile, false);
    assert!(mark == "absent" && value.contains("nvidia-fs is not loaded"), "{value}");
    let (mark, value) = disk_to_device(&driver, &fake_cufile::library_without("OLD"), true);
    assert!(mark == "absent" && value.contains("silent"), "{value}");
    let (mark, value) = disk_to_device(&driver, &cufile, true);
    assert!(value.starts_with("cuFile 1.13 with nvidia-fs 2.24"), "{value}");
    let kind = Command::new("stat").args(["-f", "-c", "%t", env!("CARGO_TARGET_TMPDIR")]).output();
    let kind = String::from_utf8(kind.expect("stat").stdout).expect("text");
    match kind.trim() {
        "ef53" | "58465342" => assert_eq!(mark, "good", "{value}"),
        _ => assert!(mark == "limited" && value.contains("the file"), "{value}"),
    }
}
