//! Independent implementations of the protocol: moto's server, and botocore's signatures.

use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use kvtier_testkit::fixtures::moto::{Moto, is_there, program};
use kvtier_testkit::remote::conformance::{self, conform};

use kvtier::tier::remote::Queries;

use super::*;

#[test]
fn moto_conforms() {
    if !is_there("moto.server") {
        return;
    }
    let mut moto = Moto::start(0, &[]);
    let remote = open(&opts(&moto.url()));
    let mut client = remote.client();
    let error = client.greet(at(LONG)).unwrap_err().to_string();
    assert!(error.contains("no bucket 'kv-test'") && error.contains("NoSuchBucket"), "{error}");
    assert_eq!(put_one(&mut *client, 1, 10), Err(RemoteError::Unreachable));
    assert_eq!(get_one(&mut *client, 1, 10), Err(RemoteError::Unreachable));
    moto.client("s3.create_bucket(Bucket='kv-test')");
    let said = client.greet(at(LONG)).unwrap();
    assert!(said.words.contains("bucket kv-test") && said.warnings.len() == 1, "{said:?}");
    let wanted = conformance::Opts { patience_ns: LONG, ..conformance::Opts::default() };
    assert_eq!(conform(&remote, &wanted).expect("it conforms").len(), 12);
    assert!(remote.caps().first_wins);
    // botocore reads our object, and we read an object that botocore stored.
    assert_eq!(put_one(&mut *client, 5, 100_000), Ok(false));
    let path = path_of(5);
    moto.client(&format!(
        "got = s3.get_object(Bucket='kv-test', Key='{path}')['Body'].read()\n\
         assert len(got) == 100000\n\
         s3.put_object(Bucket='kv-test', Key='{path}', Body=got[::-1])"
    ));
    let mut turned = bytes_of(5, 100_000);
    turned.reverse();
    assert!(get_one(&mut *client, 5, 100_000).unwrap() == turned);
    // The server dies and restarts without objects.
    let port = moto.port();
    moto.kill();
    let got = ends(|| get_at(&mut *client, &[(5, 0, 100)], LONG));
    assert_eq!(got, [Err(RemoteError::Unreachable)]);
    drop(moto);
    let moto = Moto::start(port, &[]);
    moto.client("s3.create_bucket(Bucket='kv-test')");
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(get_one(&mut *client, 5, 100), Err(RemoteError::Absent));
    assert_eq!(put_one(&mut *client, 5, 100), Ok(false));
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
fn signatures_match_botocore() {
    if !is_there("botocore") {
        return;
    }
    let bucket = Bucket::new(Quirks::default());
    let server = bucket.serve();
    let plain = opts(&server.url());
    let other = S3Opts { token: secret("a/b+c=="), region: "eu-west-1".into(), ..plain.clone() };
    for opts in [plain, other] {
        bucket.seen.lock().unwrap().clear();
        let mut client = open(&opts).client();
        client.greet(at(LONG)).unwrap();
        put_one(&mut *client, 1, 3000).unwrap();
        get_at(&mut *client, &[(1, 17, 99)], LONG)[0].as_ref().unwrap();
        lookup(&mut *client, &[1], LONG)[0].unwrap();
        let mut queries = Queries::default();
        queries.name(name(1));
        client.remove(&mut queries, at(LONG));
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
fn wrong_keys_are_denied_by_moto() {
    if !is_there("moto.server") {
        return;
    }
    // From the fifth request on, moto checks signatures and permissions as IAM does.
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
    let mut client = open(&good).client();
    client.greet(at(LONG)).expect("the key is good");
    assert_eq!(put_one(&mut *client, 1, 10), Ok(false));
    assert_eq!(get_one(&mut *client, 1, 10).unwrap(), bytes_of(1, 10));
    let mut stranger = crate::s3::client(&moto.url());
    let error = stranger.greet(at(LONG)).unwrap_err().to_string();
    assert!(error.contains("InvalidAccessKeyId"), "{error}");
    assert_eq!(put_one(&mut *stranger, 1, 10), Err(RemoteError::Denied));
    let mut forger = open(&S3Opts { secret: secret(SECRET), ..good }).client();
    let error = forger.greet(at(LONG)).unwrap_err().to_string();
    assert!(error.contains("SignatureDoesNotMatch") && error.contains("secret key"), "{error}");
    assert!(!error.contains(SECRET), "{error}");
    assert_eq!(get_one(&mut *forger, 1, 10), Err(RemoteError::Denied));
    assert_eq!(lookup(&mut *forger, &[1], LONG), [Err(RemoteError::Denied)]);
}
