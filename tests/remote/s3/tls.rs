//! A bucket behind TLS.
#![cfg(feature = "tls")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kvtier::base::status::Status;
use kvtier_testkit::remote::conformance::{self, conform};

use super::*;
use kvtier_testkit::fixtures::moto::{Moto, is_there};

/// Makes a self-signed certificate of 127.0.0.1, and its key.
fn certificate(folder: &Path) -> (PathBuf, PathBuf) {
    let (cert, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    let done = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=kvtier",
        ])
        .args([
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
        ])
        .arg(&key)
        .arg("-out")
        .arg(&cert)
        .stderr(Stdio::null())
        .status();
    assert!(done.expect("openssl").success());
    (cert, key)
}

#[test]
fn moto_conforms_over_tls() {
    if !is_there("moto.server") {
        return;
    }
    let folder = std::env::temp_dir().join(format!("kvtier-s3-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (cert, key) = certificate(&folder);
    let moto = Moto::start_with(
        0,
        &[("AWS_CA_BUNDLE", cert.to_str().unwrap())],
        &["-c", cert.to_str().unwrap(), "-k", key.to_str().unwrap()],
    );
    moto.client("s3.create_bucket(Bucket='kv-test')");
    let url = moto.url();
    assert!(url.starts_with("https://"));
    let tls = TlsOpts { ca: Some(cert), ..TlsOpts::default() };
    let remote = open(&S3Opts { tls, ..opts(&url) });
    let said = remote.client().greet(at(LONG)).unwrap();
    assert_eq!(said.warnings, [""; 0]);
    let wanted = conformance::Opts { patience_ns: LONG, ..conformance::Opts::default() };
    assert_eq!(conform(&remote, &wanted).expect("it conforms").len(), 12);
    // The system trusts no authority that signed this certificate.
    let error = client(&url).greet(at(LONG)).unwrap_err();
    assert_eq!(error.status(), Status::Invalid, "{error}");
    assert_eq!(put_one(&mut *client(&url), 1, 10), Err(RemoteError::Untrusted));
    let tls = TlsOpts { insecure: true, ..TlsOpts::default() };
    let said = open(&S3Opts { tls, ..opts(&url) }).client().greet(at(LONG)).unwrap();
    assert!(said.warnings[0].contains("insecure"), "{said:?}");
    // Plain text to a TLS port, and TLS to a plain port.
    let plain = url.replace("https://", "http://");
    assert!(client(&plain).greet(at(2000 * MS)).is_err());
    let bucket =
        kvtier_testkit::fixtures::s3::Bucket::new(kvtier_testkit::fixtures::s3::Quirks::default());
    let server = bucket.serve();
    let mut client = client(&server.url().replace("http://", "https://"));
    assert!(ends(|| client.greet(at(1000 * MS))).is_err());
    std::fs::remove_dir_all(&folder).unwrap();
}
