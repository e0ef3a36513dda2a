//! Redis over TLS. The tests make certificates with the program `openssl`.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier::base::status::Status;
use kvtier::tier::remote::redis::TlsOpts;

use super::*;
use kvtier_testkit::fixtures::redis::{Server, cluster_with, port, wait_until};

/// Folder of a certificate authority with the certificates that it signs.
struct Authority(PathBuf);

/// Names and addresses of this host in certificates.
const HERE: &str = "DNS:localhost,IP:127.0.0.1";
/// Validity of certificates that have neither expired nor lie in the future.
const ALWAYS: (&str, &str) = ("20200101000000Z", "20990101000000Z");

fn is_there() -> bool {
    let there = Command::new("openssl").arg("version").output().is_ok();
    if !there {
        println!("SKIP: openssl is not installed");
    }
    there && kvtier_testkit::fixtures::redis::is_there()
}

impl Authority {
    fn new(name: &str) -> Authority {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("kvt-tls-{}-{number}", std::process::id()));
        drop(std::fs::remove_dir_all(&dir));
        std::fs::create_dir_all(&dir).unwrap();
        let here = Authority(dir);
        let config = "[ca]\ndefault_ca=own\n[own]\ndatabase=index\nserial=serial\nnew_certs_dir=.\n\
                      default_md=sha256\npolicy=any\nunique_subject=no\n[any]\ncommonName=supplied\n\
                      [req]\ndistinguished_name=dn\n[dn]\n[root]\nbasicConstraints=critical,CA:TRUE\n";
        std::fs::write(here.path("conf"), config).unwrap();
        std::fs::write(here.path("index"), "").unwrap();
        std::fs::write(here.path("serial"), "01\n").unwrap();
        here.key("ca");
        let subject = format!("/CN={name}");
        here.openssl(&[
            "req",
            "-x509",
            "-new",
            "-config",
            "conf",
            "-extensions",
            "root",
            "-key",
            "ca.key",
            "-days",
            "3650",
            "-subj",
            &subject,
            "-out",
            "ca.crt",
        ]);
        here
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn openssl(&self, args: &[&str]) {
        let out = Command::new("openssl").args(args).current_dir(&self.0).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }

    fn key(&self, name: &str) {
        let file = format!("{name}.key");
        self.openssl(&[
            "genpkey",
            "-algorithm",
            "EC",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-out",
            &file,
        ]);
    }

    /// Signs a certificate for names.
    fn sign(&self, file: &str, names: &str, (from, to): (&str, &str)) {
        self.key(file);
        let of = |kind: &str| format!("{file}.{kind}");
        self.openssl(&[
            "req",
            "-new",
            "-config",
            "conf",
            "-key",
            &of("key"),
            "-subj",
            "/CN=server",
            "-out",
            &of("csr"),
        ]);
        std::fs::write(self.path(&of("ext")), format!("subjectAltName={names}\n")).unwrap();
        self.openssl(&[
            "ca",
            "-batch",
            "-notext",
            "-config",
            "conf",
            "-cert",
            "ca.crt",
            "-keyfile",
            "ca.key",
            "-startdate",
            from,
            "-enddate",
            to,
            "-extfile",
            &of("ext"),
            "-in",
            &of("csr"),
            "-out",
            &of("crt"),
        ]);
    }

    /// TLS port of a server, and its arguments for presenting a certificate.
    fn args(&self, file: &str) -> (u16, Vec<String>) {
        let port = port();
        let path = |name: String| self.path(&name).display().to_string();
        let args = [
            ("--tls-port", port.to_string()),
            ("--tls-cert-file", path(format!("{file}.crt"))),
            ("--tls-key-file", path(format!("{file}.key"))),
            ("--tls-ca-cert-file", path("ca.crt".to_string())),
            ("--tls-auth-clients", "no".to_string()),
        ];
        (port, args.into_iter().flat_map(|(name, value)| [name.to_string(), value]).collect())
    }

    /// Starts a server that presents a certificate. Returns its TLS port, too.
    fn server(&self, file: &str, more: &[&str]) -> (Server, u16) {
        let (port, args) = self.args(file);
        let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
        (Server::start(&args), port)
    }

    fn trust(&self) -> TlsOpts {
        TlsOpts { ca: Some(self.path("ca.crt")), ..TlsOpts::default() }
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn safe(port: u16, tls: TlsOpts) -> RedisOpts {
    RedisOpts { tls, ..opts(&format!("rediss://127.0.0.1:{port}")) }
}

#[test]
fn objects_round_trip_over_tls() {
    if !is_there() {
        return;
    }
    let authority = Authority::new("one");
    authority.sign("good", HERE, ALWAYS);
    for protocol in ["TLSv1.2", "TLSv1.3"] {
        let more = ["--tls-protocols", protocol, "--requirepass", "hunter2"];
        let (server, port) = authority.server("good", &more);
        let password = secret("hunter2");
        let remote = open(&RedisOpts { password, ..safe(port, authority.trust()) });
        let mut client = remote.client();
        let said = client.greet(at(LONG)).unwrap();
        assert!(!said.warnings.iter().any(|words| words.contains("insecure")), "{said:?}");
        let sizes = [1, 100, 16_383, 16_384, 16_385, 65_537, 300_001, 8 << 20];
        let items: Vec<_> =
            sizes.iter().zip(0..).map(|(&size, n)| (n, bytes_of(n, size))).collect();
        assert!(put_in(&mut *client, &items, LONG).iter().all(|put| *put == Ok(false)));
        let wanted: Vec<_> = items.iter().map(|(n, bytes)| (*n, 0, bytes.len())).collect();
        for (got, (n, bytes)) in get_at(&mut *client, &wanted, LONG).into_iter().zip(&items) {
            assert!(got.as_ref() == Ok(bytes), "{protocol}, {n}: {} bytes", bytes.len());
        }
        let many: Vec<_> = (100..400).map(|n| (n, bytes_of(n, n as usize * 150))).collect();
        assert!(put_in(&mut *client, &many, LONG).iter().all(|put| *put == Ok(false)));
        let wanted: Vec<_> = many.iter().map(|(n, bytes)| (*n, 9, bytes.len())).collect();
        let got = get_at(&mut *client, &wanted, LONG);
        assert!(got.iter().zip(&many).all(|(got, item)| got.as_deref() == Ok(&item.1[9..])));
        // Another client of the remote connects with the same TLS configuration.
        assert_eq!(get_one(&mut *remote.client(), 1, 100).unwrap(), items[1].1);
        // A connection that the server closed while it was idle fails no request.
        let kill = ["-a", "hunter2", "--no-auth-warning", "client", "kill", "type", "normal"];
        server.cli(&kill);
        assert_eq!(get_one(&mut *client, 1, 100).unwrap(), items[1].1);
        assert!(remote.tally().reconnects > 0, "{:?}", remote.tally());
        let mut wrong =
            open(&RedisOpts { password: secret("wrong"), ..safe(port, authority.trust()) })
                .client();
        assert_eq!(wrong.greet(at(LONG)).unwrap_err().status(), Status::Invalid);
        crate::backends::passes(&remote);
    }
}

/// Error message for a server that is not trusted.
fn refusal(opts: &RedisOpts) -> String {
    let mut client = open(opts).client();
    let error = client.greet(at(LONG)).unwrap_err();
    assert_eq!(error.status(), Status::Invalid, "{error}");
    assert!(error.message().contains("no safe connection"), "{error}");
    assert!(!error.message().contains("cannot be reached"), "{error}");
    assert_eq!(put_one(&mut *client, 1, 10), Err(RemoteError::Untrusted));
    assert_eq!(get_one(&mut *client, 1, 10), Err(RemoteError::Untrusted));
    // Every further attempt fails with the same error.
    for _ in 0..12 {
        assert_eq!(client.greet(at(LONG)).unwrap_err().message(), error.message());
    }
    error.message().to_string()
}

#[test]
fn invalid_server_certificate_is_reported() {
    if !is_there() {
        return;
    }
    let authority = Authority::new("one");
    authority.sign("old", HERE, ("20200101000000Z", "20200201000000Z"));
    authority.sign("early", HERE, ("20980101000000Z", "20990101000000Z"));
    authority.sign("other", "DNS:cache.example,IP:10.9.8.7", ALWAYS);
    authority.sign("good", HERE, ALWAYS);
    for (file, words) in [
        ("old", "has expired: renew it"),
        ("early", "not valid yet"),
        ("other", "not for \"127.0.0.1\""),
    ] {
        let (server, port) = authority.server(file, &[]);
        let said = refusal(&safe(port, authority.trust()));
        assert!(said.contains(words) && said.contains(&port.to_string()), "{said}");
        assert_eq!(server.cli(&["dbsize"]), "0");
        // Only `insecure` connects without verification, and the greeting warns of it.
        let anybody = TlsOpts { insecure: true, ..TlsOpts::default() };
        let mut client = open(&safe(port, anybody)).client();
        let warnings = client.greet(at(LONG)).unwrap().warnings;
        assert!(warnings.iter().any(|words| words.contains("insecure=true")), "{warnings:?}");
        assert_eq!(put_one(&mut *client, 1, 10_000), Ok(false));
        assert_eq!(get_one(&mut *client, 1, 10_000).unwrap(), bytes_of(1, 10_000));
    }
    // The server presents the authority's own certificate, a frequent mistake.
    let (_server, port) = authority.server("ca", &[]);
    let said = refusal(&safe(port, authority.trust()));
    assert!(said.contains("that of an authority (CA:TRUE)"), "{said}");
    let (_server, port) = authority.server("good", &[]);
    // Trusted are: another authority, one of the same name with another key, and the system's.
    let said = refusal(&safe(port, Authority::new("two").trust()));
    assert!(said.contains("(ca)"), "{said}");
    let said = refusal(&safe(port, Authority::new("one").trust()));
    assert!(said.contains("(ca)"), "{said}");
    if Path::new("/etc/ssl/certs/ca-certificates.crt").exists() {
        let said = refusal(&safe(port, TlsOpts::default()));
        assert!(said.contains("of no trusted authority"), "{said}");
    }
    // The certificate has this name.
    let named = RedisOpts { tls: authority.trust(), ..opts(&format!("rediss://localhost:{port}")) };
    assert!(open(&named).client().greet(at(LONG)).is_ok());
}

/// Options with a client certificate and its key.
fn shown(authority: &Authority, cert: &str, key: &str) -> TlsOpts {
    let (cert, cert_key) = (Some(authority.path(cert)), Some(authority.path(key)));
    TlsOpts { cert, cert_key, ..authority.trust() }
}

#[test]
fn client_certificate_is_sent_when_the_server_requires_it() {
    if !is_there() {
        return;
    }
    let (authority, other) = (Authority::new("one"), Authority::new("two"));
    authority.sign("good", HERE, ALWAYS);
    authority.sign("client", HERE, ALWAYS);
    authority.sign("old", HERE, ("20200101000000Z", "20200201000000Z"));
    other.sign("client", HERE, ALWAYS);
    let both = [authority.path("client.crt"), authority.path("client.key")];
    let both: Vec<u8> = both.iter().flat_map(|path| std::fs::read(path).unwrap()).collect();
    std::fs::write(authority.path("both.pem"), both).unwrap();
    for protocol in ["TLSv1.2", "TLSv1.3"] {
        let more = ["--tls-auth-clients", "yes", "--tls-protocols", protocol];
        let (_server, port) = authority.server("good", &more);
        let one_file = TlsOpts { cert: Some(authority.path("both.pem")), ..authority.trust() };
        for tls in [shown(&authority, "client.crt", "client.key"), one_file] {
            let mut client = open(&safe(port, tls)).client();
            client.greet(at(LONG)).unwrap();
            assert_eq!(put_one(&mut *client, 1, 100_000).map(drop), Ok(()));
            assert_eq!(get_one(&mut *client, 1, 100_000).unwrap(), bytes_of(1, 100_000));
        }
        let said = refusal(&safe(port, authority.trust()));
        assert!(said.contains("client certificate"), "{protocol}: {said}");
        let strange =
            TlsOpts { ca: authority.trust().ca, ..shown(&other, "client.crt", "client.key") };
        for tls in [strange, shown(&authority, "old.crt", "old.key")] {
            let said = refusal(&safe(port, tls));
            assert!(said.contains("rejects the client certificate"), "{protocol}: {said}");
        }
    }
}

#[test]
fn renewed_client_certificate_is_reloaded() {
    if !is_there() {
        return;
    }
    let authority = Authority::new("one");
    authority.sign("good", HERE, ALWAYS);
    authority.sign("mine", HERE, ("20200101000000Z", "20200201000000Z"));
    let (server, port) = authority.server("good", &["--tls-auth-clients", "yes"]);
    let mine = safe(port, shown(&authority, "mine.crt", "mine.key"));
    let remote = open(&mine);
    let mut client = remote.client();
    assert!(
        client.greet(at(LONG)).unwrap_err().message().contains("rejects the client certificate")
    );
    authority.sign("mine", HERE, ALWAYS);
    client.greet(at(LONG)).unwrap();
    assert_eq!(put_one(&mut *client, 1, 100_000), Ok(false));
    // Incomplete renewal: the key does not match the certificate. The old pair stays in use.
    authority.key("mine");
    server.cli(&["client", "kill", "type", "normal"]);
    assert_eq!(get_one(&mut *remote.client(), 1, 100_000).unwrap(), bytes_of(1, 100_000));
    assert!(open_error(&mine).message().contains("it does not match the certificate"));
    std::fs::remove_file(authority.path("mine.crt")).unwrap();
    server.cli(&["client", "kill", "type", "normal"]);
    assert_eq!(get_one(&mut *client, 1, 100_000).unwrap(), bytes_of(1, 100_000));
    assert!(open_error(&mine).message().contains("No such file"));
    // Files without a certificate or key are rejected before the first connection.
    for (cert, key, words) in [
        ("conf", "good.key", "no certificate"),
        ("good.key", "good.key", "no certificate"),
        ("good.crt", "conf", "no unencrypted key"),
        ("good.crt", "ca.crt", "no unencrypted key"),
    ] {
        let error = open_error(&safe(port, shown(&authority, cert, key)));
        assert!(error.message().contains(words), "{cert}, {key}: {error}");
        assert_eq!(error.status(), Status::Spec);
    }
    let alone = TlsOpts { cert_key: Some(authority.path("good.key")), ..authority.trust() };
    assert!(open_error(&safe(port, alone)).message().contains("cert_key"));
}

fn open_error(opts: &RedisOpts) -> kvtier::base::status::Error {
    Redis::open(opts, Clock::real()).map(drop).unwrap_err()
}

#[test]
fn missing_tls_and_invalid_authority_files_are_reported() {
    if !is_there() {
        return;
    }
    let authority = Authority::new("one");
    authority.sign("good", HERE, ALWAYS);
    let (server, port) = authority.server("good", &[]);
    // TLS to a plain port, and plain text to a TLS port.
    // A server without TLS waits for the end of a line: the connection attempt times out.
    let plain = RedisOpts { connect_ns: 100 * MS, ..safe(server.port, authority.trust()) };
    let mut client = open(&plain).client();
    let error = client.greet(at(LONG)).unwrap_err();
    assert!(error.message().contains("TLS"), "{error}");
    let mut client = crate::redis::client(&format!("redis://127.0.0.1:{port}"));
    let error = client.greet(at(LONG)).unwrap_err();
    assert!(error.message().contains("greeting"), "{error}");
    let http = speaks(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    let said = refusal(&safe(http, authority.trust()));
    assert!(said.contains("does not speak TLS"), "{said}");
    let mut client = crate::redis::client(&format!("redis://127.0.0.1:{http}"));
    let error = client.greet(at(LONG)).unwrap_err();
    assert_eq!(error.status(), Status::Corrupt);
    assert!(error.message().contains("does not speak the Redis protocol"), "{error}");
    // Authority files that are missing or contain no certificate.
    let with = |ca: &Path| {
        let tls = TlsOpts { ca: Some(ca.to_path_buf()), ..TlsOpts::default() };
        Redis::open(&safe(port, tls), Clock::real()).map(drop).unwrap_err()
    };
    for (ca, words) in
        [("nowhere", "No such file"), ("good.key", "no certificate"), ("conf", "no certificate")]
    {
        let error = with(&authority.path(ca));
        assert_eq!(error.status(), Status::Spec);
        assert!(error.message().contains(words), "{error}");
    }
    let both = TlsOpts { insecure: true, ..authority.trust() };
    assert!(Redis::open(&safe(port, both), Clock::real()).is_err());
}

/// Starts a server that sends `words` after the first bytes of each connection. Returns its port.
fn speaks(words: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(words);
                // The client closes the connection first, so that no byte of `words` is lost.
                while stream.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
            });
        }
    });
    port
}

#[test]
fn tampering_on_the_connection_is_detected() {
    if !is_there() {
        return;
    }
    let authority = Authority::new("one");
    authority.sign("good", HERE, ALWAYS);
    let (_server, port) = authority.server("good", &[]);
    let whole = bytes_of(1, 200_000);
    assert_eq!(put_one(&mut *open(&safe(port, authority.trust())).client(), 1, 200_000), Ok(false));
    let seen = Arc::new(AtomicU64::new(0));
    let spy: Fate = Arc::new({
        let (seen, text) = (seen.clone(), whole[50_000..50_016].to_vec());
        move |_, _, bytes: &mut Vec<u8>| {
            let is_plain = bytes
                .windows(16)
                .any(|window| window == text || window == b"$5\r\nHELLO\r\n$1\r\n3");
            seen.fetch_add(if is_plain { 1 << 32 } else { 1 }, Ordering::Relaxed);
            true
        }
    });
    let mut client = open(&safe(between(port, spy), authority.trust())).client();
    assert!(get_one(&mut *client, 1, 200_000).as_ref() == Ok(&whole));
    assert!((10..1 << 32).contains(&seen.load(Ordering::Relaxed)));
    // One byte is changed, at many offsets in both directions.
    let mut refused = 0;
    for at in [0, 5, 60, 300, 700, 900, 1100, 1500, 2000, 5000, 20_000, 100_000, 190_000] {
        for side in [false, true] {
            let flip: Fate = Arc::new(move |back, gone, bytes: &mut Vec<u8>| {
                let count = bytes.len() as u64;
                if back == side && (gone..gone + count).contains(&at) {
                    bytes[(at - gone) as usize] ^= 0x20;
                }
                true
            });
            let mut client = open(&safe(between(port, flip), authority.trust())).client();
            let got = get_at(&mut *client, &[(1, 0, 200_000)], 2000 * MS).remove(0);
            assert!(got.is_err() || got.as_ref() == Ok(&whole), "byte {at}");
            refused += u32::from(got.is_err());
        }
    }
    // Requests are shorter than the largest offsets: those changes have no effect.
    assert!(refused >= 15, "{refused}");
    // The connection is cut at several offsets.
    for at in [1, 400, 1200, 3000, 50_000] {
        let cut: Fate = Arc::new(move |back, gone, bytes: &mut Vec<u8>| {
            !back || gone + (bytes.len() as u64) < at
        });
        let mut client = open(&safe(between(port, cut), authority.trust())).client();
        let got = get_at(&mut *client, &[(1, 0, 200_000)], LONG).remove(0);
        assert!(
            matches!(got, Err(RemoteError::Unreachable | RemoteError::Untrusted)),
            "cut at {at}: {got:.60?}"
        );
    }
}

#[test]
fn deadlines_hold_over_tls() {
    if !is_there() {
        return;
    }
    let authority = Authority::new("one");
    authority.sign("good", HERE, ALWAYS);
    let (server, port) = authority.server("good", &[]);
    let mut used = open(&safe(port, authority.trust())).client();
    assert_eq!(put_one(&mut *used, 1, 300_000), Ok(false));
    // Replies take 1 ms for each byte: a handshake has some thousands.
    let drip: Fate = Arc::new(|back, _, bytes: &mut Vec<u8>| {
        if back {
            std::thread::sleep(Duration::from_millis(bytes.len() as u64));
        }
        true
    });
    let slow = between(port, drip);
    ends_at_deadline(300 * MS, || {
        let mut client = open(&safe(slow, authority.trust())).client();
        let got = get_at(&mut *client, &[(1, 0, 300_000)], 300 * MS);
        assert!(matches!(got[0], Err(RemoteError::Timeout)), "{:.60?}", got[0]);
    });
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = safe(mute.local_addr().unwrap().port(), authority.trust());
    ends_at_deadline(200 * MS, || {
        let error = open(&silent).client().greet(at(200 * MS)).unwrap_err();
        assert_eq!(error.status(), Status::Timeout);
    });
    // A connection attempt has its own timeout, which ends long before the deadline.
    ends(|| {
        let hasty = RedisOpts { connect_ns: 100 * MS, ..silent.clone() };
        let error = open(&hasty).client().greet(at(LONG)).unwrap_err();
        assert!(error.message().contains("no TLS handshake in time"), "{error}");
    });
    // The server pauses during requests, and continues.
    server.pause();
    let many: Vec<_> = (10..40).map(|n| (n, bytes_of(n, 1 << 20))).collect();
    ends(|| {
        let put = put_in(&mut *used, &many, 300 * MS);
        assert!(
            put.iter()
                .all(|put| matches!(put, Err(RemoteError::Timeout | RemoteError::Unreachable))),
            "{put:?}"
        );
    });
    server.go_on();
    wait_until("the client has recovered", || {
        get_at(&mut *used, &[(1, 0, 300_000)], LONG)[0] == Ok(bytes_of(1, 300_000))
    });
}

#[test]
fn cluster_conforms_over_tls() {
    if !is_there() {
        return;
    }
    let authority = Authority::new("one");
    authority.sign("good", HERE, ALWAYS);
    let ports = std::cell::RefCell::new(Vec::new());
    let nodes = cluster_with(|| {
        let (port, mut args) = authority.args("good");
        ports.borrow_mut().push(port);
        args.extend(["--tls-cluster", "yes", "--tls-replication", "yes"].map(String::from));
        args
    });
    let seed = ports.borrow()[2];
    let remote = open(&RedisOpts { cluster: true, wait: 1, ..safe(seed, authority.trust()) });
    crate::backends::passes(&remote);
    // All nodes were reached by their TLS ports.
    assert!(remote.tally().connections >= 6, "{:?}", remote.tally());
    let plain = |node: &Server| node.cli(&["client", "list"]).lines().count();
    assert!(nodes.iter().all(|node| plain(node) >= 1));
}
