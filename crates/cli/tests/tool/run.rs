//! `kvtier run`: what it passes to the program, and what it refuses.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use kvtier_testkit::fixtures::scratch::Scratch;

/// Runs the tool; the status, the standard output and the errors.
fn run(args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .arg("run")
        .args(args)
        .env_remove("KVTIER_RUN_LIBRARY")
        .output()
        .expect("it starts");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (status.code().expect("it ends"), text(stdout), text(stderr))
}

/// A file that stands for the library: the loader says that it cannot preload it, and goes on.
fn library(scratch: &Scratch) -> String {
    let path = scratch.0.join("libkvtier-run.so");
    fs::write(&path, "").expect("written");
    path.canonicalize().expect("found").to_str().expect("text").to_string()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

#[test]
fn the_program_gets_the_store_and_the_library() {
    let scratch = Scratch::created("run");
    let library = library(&scratch);
    let disk = scratch.0.join("a \"disk\"");
    let stats = scratch.0.join("stats");
    let options = [
        "--library",
        &library,
        "--disk",
        text(&disk),
        "--disk-size",
        "2GiB",
        "--host",
        "64M",
        "--policy",
        "s3fifo",
        "--remote",
        "dir:/srv/kv",
        "--salt",
        "me",
        "--quiet",
        "--stats",
        text(&stats),
        "--",
        "env",
    ];
    let (code, out, error) = run(&options);
    assert_eq!(code, 0, "{error}");
    let value = |name: &str| {
        let line = out.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.unwrap_or_else(|| panic!("{name} is in {out}")).to_string()
    };
    let path = disk.join("kv").to_str().expect("text").replace('"', "\\\"");
    let store = format!(
        "store(host=67108864,disk=disk(path=\"{path}\",bytes=2147483648),policy=s3fifo,\
         remote=dir(path=\"/srv/kv\"),inline=33554432)"
    );
    assert_eq!(value("KVTIER_RUN_STORE"), store);
    assert_eq!(value("LD_PRELOAD"), library);
    assert_eq!(value("KVTIER_RUN_SALT"), "me");
    assert_eq!(value("KVTIER_RUN_QUIET"), "1");
    assert_eq!(value("KVTIER_RUN_STATS"), text(&stats));
    assert_eq!(fs::metadata(&disk).expect("made").permissions().mode() & 0o777, 0o700);

    let spec = ["--library", &library, "--store", "store(host=1MiB)", "--", "env"];
    assert!(run(&spec).1.contains("KVTIER_RUN_STORE=store(host=1MiB)\n"));
}

#[test]
#[cfg(feature = "s3")]
fn keys_of_s3_tools_reach_the_library() {
    let scratch = Scratch::created("run-keys");
    let library = library(&scratch);
    let remote = "s3(url=\"http://127.0.0.1:1\",bucket=\"kv\")";
    let output = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .args(["run", "--library", &library, "--remote", remote, "--", "env"])
        .env("AWS_ACCESS_KEY_ID", "a key")
        .env("AWS_SECRET_ACCESS_KEY", "a secret")
        .output()
        .expect("it starts");
    let out = String::from_utf8(output.stdout).expect("text");
    assert!(out.contains("KVTIER_REMOTE_S3_KEY=a key\n"), "{out}");
    assert!(out.contains("KVTIER_REMOTE_S3_SECRET=a secret\n"), "{out}");
}

#[test]
fn the_exit_status_is_the_programs() {
    let scratch = Scratch::created("run-status");
    let library = library(&scratch);
    assert_eq!(run(&["--library", &library, "--", "sh", "-c", "exit 41"]).0, 41);
}

#[test]
fn mistakes_are_explained() {
    let scratch = Scratch::created("run-mistakes");
    let library = library(&scratch);
    // The head of a program without a dynamic loader.
    let fixed = scratch.0.join("fixed");
    let mut head = vec![0u8; 64];
    head[..6].copy_from_slice(b"\x7fELF\x02\x01");
    fs::write(&fixed, head).expect("written");
    fs::set_permissions(&fixed, fs::Permissions::from_mode(0o755)).expect("set");

    let cases: [(&[&str], &str); 6] = [
        (&["--", "env"], "libkvtier-run.so is not beside"),
        (&["--library", "/nowhere/lib.so", "--", "env"], "/nowhere/lib.so: No such file"),
        (&["--library", &library, "--", "no-such-program"], "no program no-such-program in PATH"),
        (&["--library", &library, "--", text(&scratch.0)], "is not a program"),
        (&["--library", &library, "--", text(&fixed)], "is linked statically"),
        (&["--library", &library, "--policy", "nothing", "--", "env"], "nothing"),
    ];
    for (args, expected) in cases {
        let (code, out, error) = run(args);
        assert_eq!((code, out.as_str()), (1, ""), "{args:?}");
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    let (code, _, error) = run(&["--store", "store(host=1MiB)", "--host", "1MiB", "--", "env"]);
    assert!(code == 2 && error.contains("cannot be used with"), "{code} {error}");
}
