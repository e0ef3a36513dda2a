//! Buckets of S3: doctor and the demo of a remote over moto's server.
#![cfg(feature = "s3")]

use std::process::Command;

use kvtier_testkit::fixtures::moto::{KEY, Moto, SECRET, is_there};

/// The tool, with keys in the environment variables of S3 tools.
fn tool(args: &[&str], key: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    command.env_remove("RUST_LOG").args(args).env("KVTIER_REMOTE_S3_SECRET", SECRET);
    let done = command.env("AWS_ACCESS_KEY_ID", key).output().expect("the tool");
    let output = [done.stdout, done.stderr].concat();
    let output = String::from_utf8(output).expect("plain text");
    assert!(!output.contains(SECRET), "{output}");
    (done.status.success(), output)
}

#[test]
fn demo_and_doctor_work_with_a_bucket() {
    if !is_there("moto.server") {
        return;
    }
    let moto = Moto::start(0, &[]);
    moto.client("s3.create_bucket(Bucket='kv-test')");
    let bucket = format!("s3(url=\"{}\",bucket=\"kv-test\",timeout=20000)", moto.url());
    let (well, output) = tool(&["doctor", "--remote", &bucket], KEY);
    assert!(well && output.contains("bucket kv-test") && output.contains("p99"), "{output}");
    let (well, output) = tool(&["demo", "--remote", &bucket], KEY);
    assert!(well && output.contains("0 wrong"), "{output}");
    // Both removed their objects.
    let left = "print(s3.list_objects_v2(Bucket='kv-test')['KeyCount'])";
    assert_eq!(moto.client(left).trim(), "0");
    let other = bucket.replace("kv-test", "none");
    let (well, output) = tool(&["doctor", "--remote", &other], KEY);
    assert!(!well && output.contains("no bucket 'none'"), "{output}");
}
