//! Servers that stop, die, refuse, or send wrong replies.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvtier::base::status::Status;

use super::*;
use kvtier_testkit::fixtures::s3::{error, reply};

/// Starts a bucket that answers its first `times` requests with `fault`. Returns the number of
/// requests, too.
fn faulty(
    times: usize,
    fault: impl Fn(&Req, &mut TcpStream) -> bool + Send + Sync + 'static,
) -> (Server, Arc<AtomicUsize>) {
    let (bucket, count) = (Bucket::new(Quirks::default()), Arc::new(AtomicUsize::new(0)));
    let counted = count.clone();
    let server = Server::start(move |req, stream| match counted.fetch_add(1, Ordering::SeqCst) {
        n if n < times => fault(req, stream),
        _ => bucket.answer(req, stream),
    });
    (server, count)
}

/// Checks that an error is retried after a pause, and at most twice.
fn passes(status: &'static str, code: &'static str) {
    let (server, count) = faulty(2, move |_, stream| error(stream, status, code, ""));
    let mut client = narrow(&server.url());
    let since = Instant::now();
    assert_eq!(put_one(&mut *client, 1, 100), Ok(false), "{status} {code}");
    assert_eq!(count.load(Ordering::SeqCst), 3, "{status} {code}");
    assert!(since.elapsed() >= Duration::from_millis(100), "it waits before a retry");
    assert_eq!(get_one(&mut *client, 1, 100).unwrap(), bytes_of(1, 100));
    let (server, count) = faulty(99, move |_, stream| error(stream, status, code, ""));
    let mut client = narrow(&server.url());
    assert_eq!(put_one(&mut *client, 1, 100), Err(RemoteError::Busy), "{status} {code}");
    assert_eq!(count.load(Ordering::SeqCst), 3);
}

#[test]
fn transient_errors_are_retried() {
    std::thread::scope(|scope| {
        for (status, code) in [
            ("500 No", "InternalError"),
            ("503 No", "SlowDown"),
            ("503 No", "ServiceUnavailable"),
            ("429 No", "TooManyRequests"),
            ("408 No", "RequestTimeout"),
            ("400 No", "RequestTimeout"),
            ("409 No", "ConditionalRequestConflict"),
            ("502 No", ""),
            // Some servers send 200 before they know the result.
            ("200 OK", "InternalError"),
            ("200 OK", "SlowDown"),
        ] {
            scope.spawn(move || passes(status, code));
        }
    });
    // The clock stands still: no request is late, and no pause fits into the deadline.
    let clock = Clock::manual(1);
    let (server, count) = faulty(99, |_, stream| error(stream, "500 No", "", ""));
    let mut client = S3::open(&opts(&server.url()), clock.clone()).expect("opened").client();
    for turn in 1..=2 {
        let by = || clock.now_ns() + 45 * MS;
        let got = ends(|| get_by(&mut *client, &[(1, 0, 9), (2, 0, 9)], by));
        assert!(got.iter().all(|got| got.is_err()), "{got:?}");
        assert_eq!(count.load(Ordering::SeqCst), 2 * turn, "each was sent once");
    }
}

#[test]
fn slow_down_error_pauses_all_requests() {
    let times = Arc::new(Mutex::new(Vec::new()));
    let (noted, bucket) = (times.clone(), Bucket::new(Quirks::default()));
    let server = Server::start(move |req, stream| {
        let mut noted = noted.lock().unwrap();
        noted.push(Instant::now());
        if noted.len() == 1 {
            error(stream, "503 No", "SlowDown", "")
        } else {
            bucket.answer(req, stream)
        }
    });
    let mut client = narrow(&server.url());
    let many: Vec<_> = (0..10).map(|n| (n, bytes_of(n, 10))).collect();
    let put = put_in(&mut *client, &many, LONG);
    assert!(put.iter().all(|put| *put == Ok(false)), "{put:?}");
    let times = times.lock().unwrap();
    let pause = times[1] - times[0];
    assert!(pause >= Duration::from_millis(50), "{pause:?} before all others");
    assert_eq!(times.len(), 11);
}

#[test]
fn permanent_errors_are_not_retried() {
    for (status, code, put, get) in [
        ("403 No", "AccessDenied", RemoteError::Denied, RemoteError::Denied),
        ("400 No", "ExpiredToken", RemoteError::Denied, RemoteError::Denied),
        ("400 No", "BadDigest", RemoteError::Malformed, RemoteError::Malformed),
        ("404 No", "NoSuchBucket", RemoteError::Unreachable, RemoteError::Unreachable),
        ("404 No", "", RemoteError::Unreachable, RemoteError::Absent),
        ("405 No", "MethodNotAllowed", RemoteError::Denied, RemoteError::Denied),
        ("413 No", "EntityTooLarge", RemoteError::TooLong, RemoteError::TooLong),
        ("507 No", "XMinioStorageFull", RemoteError::Full, RemoteError::Full),
        ("418 No", "Teapot", RemoteError::Malformed, RemoteError::Malformed),
    ] {
        let (server, count) = faulty(99, move |_, stream| error(stream, status, code, ""));
        let remote = open(&S3Opts { connections: 1, ..opts(&server.url()) });
        let mut client = remote.client();
        assert_eq!(put_one(&mut *client, 1, 100), Err(put), "{status} {code}");
        assert_eq!(get_one(&mut *client, 1, 100), Err(get), "{status} {code}");
        assert_eq!(count.load(Ordering::SeqCst), 2);
        assert!(remote.caps().first_wins, "no error concerns conditions");
        assert_eq!(server.connections(), 1);
    }
}

#[test]
fn redirections_are_not_followed() {
    let (other, others) = faulty(0, |_, _| true);
    let location =
        format!("Location: {}/kv-test\r\nx-amz-bucket-region: eu-west-1\r\n", other.url());
    for (status, trouble) in [
        ("301 Moved Permanently", RemoteError::Denied),
        ("302 Found", RemoteError::Denied),
        ("307 Temporary Redirect", RemoteError::Busy),
        ("308 Permanent Redirect", RemoteError::Denied),
    ] {
        let location = location.clone();
        let server = always(move |req, stream| match req.method.as_str() {
            "HEAD" => {
                let head = format!("HTTP/1.1 {status}\r\n{location}\r\n");
                stream.write_all(head.as_bytes()).is_ok()
            }
            _ => {
                let body = b"<Error><Code>PermanentRedirect</Code><Message>other</Message>\
                             <Endpoint>kv.example</Endpoint></Error>";
                reply(stream, status, &location, body)
            }
        });
        let mut client = client(&server.url());
        assert_eq!(get_one(&mut *client, 1, 10), Err(trouble));
        assert_eq!(put_one(&mut *client, 1, 10), Err(trouble));
        assert_eq!(lookup(&mut *client, &[1], LONG), [Err(trouble)]);
        let error = client.greet(at(LONG)).unwrap_err().to_string();
        assert!(error.contains("region eu-west-1") && error.contains("kv.example"), "{error}");
    }
    assert_eq!(others.load(Ordering::SeqCst) as u64 + other.connections(), 0);
}

#[test]
fn clock_skew_is_reported() {
    let skewed = |req: &Req, stream: &mut TcpStream| {
        let date = "Date: Fri, 24 May 2013 00:00:00 GMT\r\n";
        if req.method == "HEAD" {
            let head = format!("HTTP/1.1 403 Forbidden\r\n{date}\r\n");
            return stream.write_all(head.as_bytes()).is_ok();
        }
        let body = b"<Error><Code>RequestTimeTooSkewed</Code><Message>too large</Message></Error>";
        reply(stream, "403 Forbidden", date, body)
    };
    let server = always(skewed);
    let error = client(&server.url()).greet(at(LONG)).unwrap_err().to_string();
    assert!(error.contains("RequestTimeTooSkewed") && error.contains("s ahead"), "{error}");
    let server =
        says(b"HTTP/1.1 200 OK\r\nDate: Sun, 24 May 2099 00:00:00 GMT\r\nServer: x\r\n\r\n");
    let said = client(&server.url()).greet(at(LONG)).unwrap();
    assert!(said.words.starts_with("x at 127.0.0.1"), "{said:?}");
    assert!(said.warnings.iter().any(|warning| warning.contains("s behind")), "{said:?}");
    assert!(said.warnings.iter().any(|warning| warning.contains("not encrypted")), "{said:?}");
    // A server that permits to list the prefix only.
    let server = always(|req, stream| match req.target.contains("list-type=2") {
        true => {
            assert!(req.target.ends_with("max-keys=1&prefix=test%2F"), "{}", req.target);
            reply(stream, "200 OK", "", b"<ListBucketResult></ListBucketResult>")
        }
        false => stream.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n").is_ok(),
    });
    assert!(client(&server.url()).greet(at(LONG)).is_ok());
}

#[test]
fn truncated_body_is_retried_then_malformed() {
    let cut = |_: &Req, stream: &mut TcpStream| {
        let head =
            "HTTP/1.1 206 P\r\nContent-Length: 1000\r\nContent-Range: bytes 0-999/1000\r\n\r\n";
        let _ = stream.write_all(&[head.as_bytes(), &[7; 500]].concat());
        false
    };
    let (server, count) = faulty(99, cut);
    assert_eq!(get_one(&mut *narrow(&server.url()), 1, 2000), Err(RemoteError::Malformed));
    assert_eq!(count.load(Ordering::SeqCst), 3);
    // The connection is cut once only.
    let bucket = Bucket::new(Quirks::default());
    let (served, turn) = (bucket.clone(), AtomicU64::new(0));
    let server = Server::start(move |req, stream| {
        if req.method == "GET" && turn.fetch_add(1, Ordering::SeqCst) == 0 {
            return cut(req, stream);
        }
        served.answer(req, stream)
    });
    let mut client = narrow(&server.url());
    put_one(&mut *client, 1, 1000).unwrap();
    assert_eq!(get_one(&mut *client, 1, 2000).unwrap(), bytes_of(1, 1000));
    // A server that closes every connection before a reply.
    let server = always(|_, _| false);
    let mut client = crate::s3::client(&server.url());
    let got = ends(|| get_at(&mut *client, &[(1, 0, 9); 3], LONG));
    assert!(got.iter().all(|got| *got == Err(RemoteError::Unreachable)), "{got:?}");
}

#[test]
fn bytes_around_a_reply_are_not_matched_to_another_request() {
    // An unsolicited reply is discarded, and its connection is closed.
    let server = says(
        b"HTTP/1.1 206 P\r\nContent-Length: 3\r\nContent-Range: bytes 0-2/3\r\n\r\nabc\
          HTTP/1.1 206 P\r\nContent-Length: 3\r\nContent-Range: bytes 0-2/3\r\n\r\ndef",
    );
    let mut client = narrow(&server.url());
    for turn in 0..3 {
        assert_eq!(get_one(&mut *client, 1, 100).unwrap(), b"abc", "{turn}");
    }
    assert_eq!(server.connections(), 3);
    // Informational responses before the reply.
    let server = says(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n\
          HTTP/1.1 206 P\r\nContent-Length: 3\r\nContent-Range: bytes 0-2/3\r\n\r\nabc",
    );
    assert_eq!(get_one(&mut *narrow(&server.url()), 1, 100).unwrap(), b"abc");
    // An endless error body is not read to its end.
    let written = Arc::new(AtomicU64::new(0));
    let counted = written.clone();
    let server = always(move |_, stream| {
        let head =
            b"HTTP/1.1 404 No\r\nContent-Length: 4000000000\r\n\r\n<Error><Code>NoSuchKey</Code>";
        let mut is_well = stream.write_all(head).is_ok();
        while is_well {
            is_well = stream.write_all(&[b'x'; 65536]).is_ok();
            counted.fetch_add(u64::from(is_well) << 16, Ordering::SeqCst);
        }
        false
    });
    let got = ends(|| get_at(&mut *narrow(&server.url()), &[(1, 0, 9)], LONG));
    assert_eq!(got, [Err(RemoteError::Absent)]);
    assert!(written.load(Ordering::SeqCst) < 64 << 20);
}

#[test]
fn server_that_neither_reads_nor_replies_costs_the_deadline() {
    let server = drip(b"", b"", 0, 0);
    let silent = server.url();
    let error = ends_at_deadline(200 * MS, || client(&silent).greet(at(200 * MS))).unwrap_err();
    assert_eq!(error.status(), Status::Timeout);
    // The server does not read.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let big = [(1, vec![1; 32 << 20])];
    let put = ends_at_deadline(300 * MS, || put_in(&mut *client(&url), &big, 300 * MS));
    assert_eq!(put, [Err(RemoteError::Timeout)]);
    drop(listener);
}

/// The server replies before it has read the whole object, and reads no more.
#[test]
fn early_reply_during_an_upload_is_its_result() {
    for (status, trouble) in [
        ("403 Forbidden", Err(RemoteError::Denied)),
        ("412 Precondition Failed", Ok(true)),
        ("507 Insufficient Storage", Err(RemoteError::Full)),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (has_ended, ended) = std::sync::mpsc::channel();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut bytes = [0; 2000];
            stream.read_exact(&mut bytes).unwrap();
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
            stream.write_all(head.as_bytes()).unwrap();
            // Closing with unread bytes would reset the connection, and the reply would be lost.
            ended.recv().unwrap();
        });
        let mut client = narrow(&url);
        let put = ends(|| put_in(&mut *client, &[(1, vec![1; 16 << 20])], LONG));
        has_ended.send(()).unwrap();
        assert_eq!(put, [trouble], "{status}");
        server.join().unwrap();
    }
}
