//! Buckets of S3: doctor and the demo of a remote over moto's server.
#![cfg(feature = "s3")]

use std::process::Command;

use kvtier_testkit::fixtures::moto::{KEY, Moto, SECRET, is_there};

/// The tool, with keys where S3's own tools look for them.
fn tool(args: &[&str], key: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    command.env_remove("RUST_LOG").args(args).env("KVTIER_REMOTE_S3_SECRET", SECRET);
    let done = command.env("AWS_ACCESS_KEY_ID", key).output().expect("the tool");
    let said = [done.stdout, done.stderr].concat();
    let said = String::from_utf8(said).expect("plain text");
    assert!(!said.contains(SECRET), "{said}");
    (done.status.success(), said)
}

#[test]
fn demo_and_doctor_work_with_a_bucket() {
    if !is_there("moto.server") {
        return;
    }
    let moto = Moto::start(0, &[]);
    moto.client("s3.create_bucket(Bucket='kv-test')");
    let bucket = format!("s3(url=\"{}\",bucket=\"kv-test\",timeout=20000)", moto.url());
    let (well, said) = tool(&["doctor", "--remote", &bucket], KEY);
    assert!(well && said.contains("bucket kv-test") && said.contains("p99"), "{said}");
    let (well, said) = tool(&["demo", "--remote", &bucket], KEY);
    assert!(well && said.contains("0 wrong"), "{said}");
    // Both have taken away what they had put.
    let left = "print(s3.list_objects_v2(Bucket='kv-test')['KeyCount'])";
    assert_eq!(moto.client(left).trim(), "0");
    let other = bucket.replace("kv-test", "none");
    let (well, said) = tool(&["doctor", "--remote", &other], KEY);
    assert!(!well && said.contains("no bucket 'none'"), "{said}");
}
