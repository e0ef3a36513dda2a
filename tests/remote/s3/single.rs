//! A bucket without faults, with the differences that occur between servers.

use kvtier_testkit::remote::conformance::{self, conform};

use super::*;

#[test]
fn backend_conforms_to_the_trait() {
    for (quirks, first_wins) in [
        (Quirks::default(), true),
        (Quirks { chunks: 1000, ..Quirks::default() }, true),
        (Quirks { closes: true, ..Quirks::default() }, true),
        (Quirks { no_ranges: true, ..Quirks::default() }, true),
        (Quirks { no_conditions: 501, ..Quirks::default() }, false),
        (Quirks { no_conditions: 400, ..Quirks::default() }, false),
    ] {
        let bucket = Bucket::new(quirks);
        let server = bucket.serve();
        // The first put discovers whether the server supports conditions.
        let remote = open(&opts(&server.url()));
        assert_eq!(put_one(&mut *remote.client(), 1, 10), Ok(false));
        assert_eq!(remote.caps().first_wins, first_wins, "{quirks:?}");
        let opts = conformance::Opts { largest_bytes: 9 << 20, ..conformance::Opts::default() };
        // A get of a part of an object needs ranges.
        let passed = conform(&remote, &opts);
        match quirks.no_ranges {
            false => assert_eq!(passed.expect("it conforms").len(), 12, "{quirks:?}"),
            true => assert!(passed.unwrap_err().message().contains("Malformed")),
        }
        if !quirks.no_ranges {
            let left: Vec<String> = bucket.objects.lock().unwrap().keys().cloned().collect();
            assert_eq!(left.len(), 1, "{left:?}");
        }
    }
}

#[test]
fn requests_have_the_expected_headers() {
    let bucket = Bucket::new(Quirks::default());
    let server = bucket.serve();
    let mut client = narrow(&server.url());
    put_one(&mut *client, 1, 5000).unwrap();
    get_at(&mut *client, &[(1, 100, 200)], LONG).remove(0).unwrap();
    assert_eq!(
        get_at(&mut *client, &[(1, 5000, 9), (1, 7, 0), (2, 0, 0)], LONG),
        [Ok(vec![]), Ok(vec![]), Err(RemoteError::Absent)]
    );
    lookup(&mut *client, &[1], LONG)[0].unwrap();
    let seen: Vec<Req> = std::mem::take(&mut *bucket.seen.lock().unwrap());
    let methods: Vec<&str> = seen.iter().map(|req| req.method.as_str()).collect();
    assert_eq!(methods, ["PUT", "GET", "GET", "HEAD", "HEAD", "HEAD"]);
    assert!(seen[0].target.starts_with("/kv-test/test/v1/01000000"), "{}", seen[0].target);
    assert_eq!(seen[0].header("if-none-match"), Some("*"));
    assert_eq!(seen[0].header("content-length"), Some("5000"));
    assert_eq!(seen[0].header("x-amz-content-sha256"), Some("UNSIGNED-PAYLOAD"));
    assert_eq!(seen[1].header("range"), Some("bytes=100-299"));
    assert!(
        seen[1].header("if-none-match").is_none() && seen[1].header("content-length").is_none()
    );
    assert_eq!(server.connections(), 1, "the connection is reused");
    // A client without a key does not sign.
    let mut nobody = open(&S3Opts { key: None, secret: None, ..opts(&server.url()) }).client();
    assert_eq!(get_one(&mut *nobody, 1, 5000).unwrap(), bytes_of(1, 5000));
    let last = bucket.seen.lock().unwrap().pop().unwrap();
    assert!(!last.head.to_lowercase().contains("x-amz") && last.header("authorization").is_none());
}

#[test]
fn batch_uses_several_connections() {
    let bucket = Bucket::new(Quirks::default());
    let server = bucket.serve();
    let mut client = client(&server.url());
    let many: Vec<_> = (0..40).map(|n| (n, bytes_of(n, 50_000 * (n as usize % 3) + 1))).collect();
    assert!(put_in(&mut *client, &many, LONG).iter().all(|put| *put == Ok(false)));
    assert!(put_in(&mut *client, &many, LONG).iter().all(|put| *put == Ok(true)));
    let wanted: Vec<_> = many.iter().map(|(n, bytes)| (*n, 0, bytes.len())).collect();
    for ((n, bytes), got) in many.iter().zip(get_at(&mut *client, &wanted, LONG)) {
        assert!(got.as_ref() == Ok(bytes), "{n}");
    }
    assert_eq!(server.connections(), 4);
    assert_eq!((bucket.count("PUT"), bucket.count("GET")), (80, 40));
    // The server closes idle connections: no request fails or waits.
    server.hang_up();
    let got = ends(|| get_at(&mut *client, &wanted, LONG));
    assert!(got.iter().all(Result::is_ok), "{got:.300?}");
}

#[test]
fn secrets_are_not_printed() {
    let given = S3Opts { token: secret("tok-en"), ..opts("http://127.0.0.1:1") };
    let shown = format!("{given:?}");
    assert!(!shown.contains("tok-en") && !shown.contains(KEY) && !shown.contains("bPxRf"));
    let remote = open(&given);
    let error = remote.client().greet(at(500 * MS)).unwrap_err().to_string();
    assert!(!error.contains("tok-en") && !error.contains(KEY) && !error.contains("bPxRf"));
    let refused = |opts: S3Opts| S3::open(&opts, Clock::real()).err().expect("refused").to_string();
    let good = || opts("http://a");
    for (bad, word) in [
        (S3Opts { secret: None, ..good() }, "needed together"),
        (S3Opts { key: None, ..good() }, "needed together"),
        (S3Opts { key: None, secret: None, token: secret("x"), ..good() }, "session token needs"),
        (S3Opts { key: secret("a/b"), ..good() }, "access key"),
        (S3Opts { token: secret("tok\n"), ..good() }, "line break"),
        (S3Opts { region: String::new(), ..good() }, "region"),
        (S3Opts { connections: 0, ..good() }, "connections"),
        (S3Opts { connections: 65, ..good() }, "connections"),
        (S3Opts { bucket: "A".into(), ..good() }, "bucket"),
    ] {
        let error = refused(bad);
        assert!(error.contains(word) && !error.contains("tok\n"), "{error}");
    }
}
