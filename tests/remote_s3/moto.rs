//! moto's server, and botocore's signatures: what others made of the same protocol.
//! `KVTIER_MOTO` names a directory with programs of its own (`bin` of a virtual environment) in which
//! `moto_server` and a `python3` with botocore are; else those of the system are used.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvtier::tier::remote::conformance::{self, conform};

use crate::s3::{Bucket, Quirks, Req};
use crate::*;

/// A program of moto's environment.
fn program(name: &str) -> Command {
    match std::env::var_os("KVTIER_MOTO") {
        Some(folder) => Command::new(PathBuf::from(folder).join(name)),
        None => Command::new(name),
    }
}

/// Whether what the tests need is here; says what is missing.
pub fn is_there(module: &str) -> bool {
    let found = program("python3")
        .args(["-c", &format!("import {module}")])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !found {
        println!("SKIP: {module} is not here (pip install 'moto[server]'; KVTIER_MOTO=its bin)");
        assert!(std::env::var_os("CI").is_none() || std::env::var_os("KVTIER_MOTO").is_none());
    }
    found
}

/// A server of moto's.
pub struct Moto {
    port: u16,
    child: Child,
    scheme: &'static str,
    env: Vec<(String, String)>,
}

impl Moto {
    pub fn start(port: u16, env: &[(&str, &str)]) -> Moto {
        Moto::start_with(port, env, &[])
    }

    /// With TLS, if there are more arguments.
    pub fn start_with(port: u16, env: &[(&str, &str)], args: &[&str]) -> Moto {
        let port = match port {
            0 => TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port(),
            port => port,
        };
        let child = program("python3")
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()])
            .args(args)
            .envs(env.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("moto's server");
        let env = env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let scheme = if args.is_empty() { "http" } else { "https" };
        let moto = Moto { port, child, scheme, env };
        let since = Clock::real().now_ns();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Clock::real().now_ns() - since < 60_000 * MS, "moto's server does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        moto
    }

    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.port)
    }

    /// Has botocore do something with it, with its own keys; what that prints.
    pub fn client(&self, code: &str) -> String {
        let code = format!(
            "import boto3\ns3 = boto3.client('s3', endpoint_url='{}', region_name='us-east-1', \
             aws_access_key_id='{KEY}', aws_secret_access_key='{SECRET}')\n{code}",
            self.url()
        );
        let mut python = program("python3");
        let done = python.args(["-c", &code]).envs(self.env.iter().cloned()).output();
        let done = done.expect("python");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).expect("plain text")
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The tool, with keys where S3's own tools look for them.
#[cfg(feature = "tool")]
fn tool(args: &[&str], key: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    command.env_remove("RUST_LOG").args(args).env("KVTIER_REMOTE_S3_SECRET", SECRET);
    let done = command.env("AWS_ACCESS_KEY_ID", key).output().expect("the tool");
    let said = [done.stdout, done.stderr].concat();
    let said = String::from_utf8(said).expect("plain text");
    assert!(!said.contains(SECRET), "{said}");
    (done.status.success(), said)
}

#[cfg(feature = "tool")]
#[test]
fn the_tool_takes_buckets() {
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

#[test]
fn moto_conforms() {
    if !is_there("moto.server") {
        return;
    }
    let mut moto = Moto::start(0, &[]);
    let remote = open(&opts(&moto.url()));
    let mut lane = remote.lane();
    let error = lane.greet(at(LONG)).unwrap_err().to_string();
    assert!(error.contains("no bucket 'kv-test'") && error.contains("NoSuchBucket"), "{error}");
    assert_eq!(put_one(&mut *lane, 1, 10), Err(Trouble::Gone));
    assert_eq!(get_one(&mut *lane, 1, 10), Err(Trouble::Gone));
    moto.client("s3.create_bucket(Bucket='kv-test')");
    let said = lane.greet(at(LONG)).unwrap();
    assert!(said.words.contains("bucket kv-test") && said.warnings.len() == 1, "{said:?}");
    let wanted = conformance::Opts { patience_ns: 120_000 * MS, ..conformance::Opts::default() };
    assert_eq!(conform(&remote, &wanted).expect("it conforms").len(), 12);
    assert!(remote.caps().first_wins);
    // What botocore stored is read, and the other way round.
    assert_eq!(put_one(&mut *lane, 5, 100_000), Ok(false));
    let path = path_of(5);
    moto.client(&format!(
        "got = s3.get_object(Bucket='kv-test', Key='{path}')['Body'].read()\n\
         assert len(got) == 100000\n\
         s3.put_object(Bucket='kv-test', Key='{path}', Body=got[::-1])"
    ));
    let mut turned = bytes_of(5, 100_000);
    turned.reverse();
    assert!(get_one(&mut *lane, 5, 100_000).unwrap() == turned);
    // It dies, and comes again with nothing.
    let port = moto.port;
    moto.child.kill().unwrap();
    moto.child.wait().unwrap();
    let got = in_time(1000 * MS, || get_at(&mut *lane, &[(5, 0, 100)], 1000 * MS));
    assert_eq!(got, [Err(Trouble::Gone)]);
    drop(moto);
    let moto = Moto::start(port, &[]);
    moto.client("s3.create_bucket(Bucket='kv-test')");
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(get_one(&mut *lane, 5, 100), Err(Trouble::Absent));
    assert_eq!(put_one(&mut *lane, 5, 100), Ok(false));
}

fn path_of(number: u64) -> String {
    let mut out = Vec::new();
    Prefix::new("test").unwrap().write(&name(number), &mut out);
    String::from_utf8(out).unwrap()
}

/// Signs requests as botocore does: a line each, with tabs between a method, what is asked for, the
/// host, the time, what stands for the body, a token, and other headers.
const SIGNER: &str = r#"
import sys
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
key, secret, region = sys.argv[1:4]
for line in sys.stdin:
    method, target, host, stamp, payload, token, *headers = line.rstrip("\n").split("\t")
    headers = dict(header.split("=", 1) for header in headers)
    request = AWSRequest(method=method, url=f"http://{host}{target}", headers=headers)
    request.context["timestamp"] = stamp
    auth = S3SigV4Auth(Credentials(key, secret, token or None), "s3", region)
    auth._should_sha256_sign_payload = lambda request: payload != "UNSIGNED-PAYLOAD"
    auth._modify_request_before_signing(request)
    canonical = auth.canonical_request(request)
    signature = auth.signature(auth.string_to_sign(request, canonical), request)
    auth._inject_signature_to_request(request, signature)
    print(request.headers["Authorization"])
"#;

#[test]
fn signatures_are_those_of_botocore() {
    if !is_there("botocore") {
        return;
    }
    let bucket = Bucket::new(Quirks::default());
    let server = bucket.serve();
    let plain = opts(&server.url());
    let other = S3Opts { token: secret("a/b+c=="), region: "eu-west-1".into(), ..plain.clone() };
    for opts in [plain, other] {
        bucket.seen.lock().unwrap().clear();
        let mut lane = open(&opts).lane();
        lane.greet(at(LONG)).unwrap();
        put_one(&mut *lane, 1, 3000).unwrap();
        get_at(&mut *lane, &[(1, 17, 99)], LONG)[0].as_ref().unwrap();
        ask(&mut *lane, &[1], LONG)[0].unwrap();
        let mut asks = Asks::default();
        asks.name(name(1));
        lane.remove(&mut asks, at(LONG));
        let seen: Vec<Req> = std::mem::take(&mut *bucket.seen.lock().unwrap());
        assert_eq!(seen.len(), 5);
        let mut lines = String::new();
        for req in &seen {
            let of = |name: &str| req.header(name).unwrap_or_default().to_string();
            let start = [&req.method, &req.target, &of("host"), &of("x-amz-date")];
            lines += &start.map(String::as_str).join("\t");
            lines += &format!("\t{}\t{}", of("x-amz-content-sha256"), of("x-amz-security-token"));
            for name in ["range", "if-none-match"] {
                if let Some(value) = req.header(name) {
                    lines += &format!("\t{name}={value}");
                }
            }
            lines.push('\n');
        }
        let mut child = program("python3")
            .args(["-c", SIGNER, KEY, SECRET, &opts.region])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        let theirs = String::from_utf8(out.stdout).unwrap();
        let ours: Vec<&str> =
            seen.iter().map(|req| req.header("authorization").expect("signed")).collect();
        assert_eq!(ours, theirs.lines().collect::<Vec<_>>());
    }
}

#[test]
fn keys_are_checked_by_moto() {
    if !is_there("moto.server") {
        return;
    }
    // Requests are checked as IAM would from the fifth on, with signatures and all.
    let moto = Moto::start(0, &[("INITIAL_NO_AUTH_ACTION_COUNT", "4")]);
    let made = moto.client(
        "import json\n\
         iam = boto3.client('iam', endpoint_url=s3.meta.endpoint_url, region_name='us-east-1', \
         aws_access_key_id='x', aws_secret_access_key='y')\n\
         s3.create_bucket(Bucket='kv-test')\n\
         iam.create_user(UserName='kv')\n\
         rules = [{'Effect': 'Allow', 'Action': 's3:*', 'Resource': '*'}]\n\
         rules = json.dumps({'Version': '2012-10-17', 'Statement': rules})\n\
         iam.put_user_policy(UserName='kv', PolicyName='p', PolicyDocument=rules)\n\
         key = iam.create_access_key(UserName='kv')['AccessKey']\n\
         print(key['AccessKeyId'], key['SecretAccessKey'])",
    );
    let (id, key) = made.trim().split_once(' ').expect("a key");
    let good = S3Opts { key: secret(id), secret: secret(key), ..opts(&moto.url()) };
    let mut lane = open(&good).lane();
    lane.greet(at(LONG)).expect("the key is good");
    assert_eq!(put_one(&mut *lane, 1, 10), Ok(false));
    assert_eq!(get_one(&mut *lane, 1, 10).unwrap(), bytes_of(1, 10));
    let mut stranger = crate::lane(&moto.url());
    let error = stranger.greet(at(LONG)).unwrap_err().to_string();
    assert!(error.contains("InvalidAccessKeyId"), "{error}");
    assert_eq!(put_one(&mut *stranger, 1, 10), Err(Trouble::Denied));
    let mut forger = open(&S3Opts { secret: secret(SECRET), ..good }).lane();
    let error = forger.greet(at(LONG)).unwrap_err().to_string();
    assert!(error.contains("SignatureDoesNotMatch") && error.contains("secret key"), "{error}");
    assert!(!error.contains(SECRET), "{error}");
    assert_eq!(get_one(&mut *forger, 1, 10), Err(Trouble::Denied));
    assert_eq!(ask(&mut *forger, &[1], LONG), [Err(Trouble::Denied)]);
}
