//! Servers that pause, die, or send wrong replies.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use kvtier_testkit::fixtures::redis::wait_until;

#[test]
fn client_recovers_when_a_paused_server_continues() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let mut client = client(&server.url());
    assert_eq!(put_one(&mut *client, 1, 300_000), Ok(false));
    server.pause();
    for _ in 0..3 {
        let got = ends(|| get_at(&mut *client, &[(1, 0, 300_000)], 200 * MS));
        assert!(matches!(got[0], Err(RemoteError::Timeout | RemoteError::Unreachable)), "{got:?}");
    }
    let many: Vec<_> = (10..40).map(|n| (n, bytes_of(n, 1 << 20))).collect();
    let put = ends(|| put_in(&mut *client, &many, 300 * MS));
    assert!(
        put.iter().all(|put| matches!(put, Err(RemoteError::Timeout | RemoteError::Unreachable))),
        "{put:?}"
    );
    let mut fresh = open(&opts(&server.url())).client();
    let error = ends_at_deadline(200 * MS, || fresh.greet(at(200 * MS))).unwrap_err();
    assert_eq!(error.status(), kvtier::base::status::Status::Timeout);
    server.go_on();
    wait_until("the client has recovered", || {
        get_at(&mut *client, &[(1, 0, 300_000)], LONG)[0] == Ok(bytes_of(1, 300_000))
    });
    assert_eq!(get_one(&mut *fresh, 1, 300_000).unwrap(), bytes_of(1, 300_000));
    // The server pauses on a working connection after it has received a part of the batch.
    server.pause();
    let put = ends_at_deadline(150 * MS, || put_in(&mut *client, &many, 150 * MS));
    assert_eq!(put, vec![Err(RemoteError::Timeout); many.len()]);
    server.go_on();
    // The server has read that part once it has closed the connection. The connections of
    // `fresh` and redis-cli remain.
    wait_until("the server has read that part", || {
        server.cli(&["client", "list"]).lines().count() == 2
    });
    // An object that was not acknowledged in time is absent or complete.
    for (n, bytes) in &many {
        let got = get_one(&mut *client, *n, 1 << 20);
        assert!(got == Err(RemoteError::Absent) || got.as_ref() == Ok(bytes), "{n}");
    }
}

/// A connection attempt began while the server was paused, and expired between two batches.
/// It does not delay the next batch.
#[test]
fn expired_connection_attempt_does_not_delay_the_next_batch() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    // Only the test advances the clock: no request that must succeed times out.
    let clock = Clock::manual(1);
    let is_stopped = Arc::new(AtomicBool::new(false));
    // The deadline passes when a request has been sent to the paused server.
    let fate: Fate = Arc::new({
        let (clock, is_stopped) = (clock.clone(), is_stopped.clone());
        move |back, _, _| {
            if !back && is_stopped.load(Ordering::SeqCst) {
                clock.advance(30 * MS);
            }
            true
        }
    });
    let url = format!("redis://127.0.0.1:{}", between(server.port, fate));
    let opts = RedisOpts { connect_ns: 100 * MS, ..opts(&url) };
    let remote = || Redis::open(&opts, clock.clone()).expect("opened");
    let by = |ns: u64| clock.now_ns() + ns;
    assert_eq!(
        put_by(&mut *remote().client(), &[(1, bytes_of(1, 1000))], || by(LONG)),
        [Ok(false)]
    );
    for _ in 0..3 {
        server.pause();
        is_stopped.store(true, Ordering::SeqCst);
        let mut client = remote().client();
        let got = ends(|| get_by(&mut *client, &[(1, 0, 1000)], || by(30 * MS)));
        assert_eq!(got, [Err(RemoteError::Timeout)]);
        is_stopped.store(false, Ordering::SeqCst);
        clock.advance(150 * MS);
        server.go_on();
        let got = ends(|| get_by(&mut *client, &[(1, 0, 1000)], || by(LONG)));
        assert!(got == [Ok(bytes_of(1, 1000))], "{:?}", got[0].as_ref().err());
    }
}

#[test]
fn client_recovers_when_a_killed_server_restarts() {
    const HALF: u64 = 10 << 20;
    if !is_there() {
        return;
    }
    let mut server = Server::start(&[]);
    // The server is killed during a put: the relay holds the rest of the data until then.
    let ((tell, has_half), (killed, is_dead)) = (channel(), channel());
    let (tell, is_dead) = (Mutex::new(Some(tell)), Mutex::new(is_dead));
    let fate: Fate = Arc::new(move |back, gone, _| {
        let is_half = !back && gone > HALF;
        let tell = tell.lock().unwrap().take_if(|_| is_half);
        if let Some(tell) = tell {
            tell.send(()).unwrap();
            is_dead.lock().unwrap().recv().unwrap();
        }
        true
    });
    let mut client = client(&format!("redis://127.0.0.1:{}", between(server.port, fate)));
    let mut direct = crate::redis::client(&server.url());
    assert_eq!(put_one(&mut *client, 1, 10), Ok(false));
    assert_eq!(get_one(&mut *direct, 1, 10).unwrap(), bytes_of(1, 10));
    // A connection that the server closed while it was idle fails no request.
    server.cli(&["client", "kill", "type", "normal"]);
    assert_eq!(get_one(&mut *client, 1, 10).unwrap(), bytes_of(1, 10));
    assert_eq!(get_one(&mut *direct, 1, 10).unwrap(), bytes_of(1, 10));
    server.restart();
    assert_eq!(get_one(&mut *client, 1, 10), Err(RemoteError::Absent));
    assert_eq!(get_one(&mut *direct, 1, 10), Err(RemoteError::Absent));
    let many: Vec<_> = (0..400).map(|n| (n, bytes_of(n, 1 << 20))).collect();
    let put = std::thread::scope(|scope| {
        let putting = scope.spawn(|| ends(|| put_in(&mut *client, &many, LONG)));
        has_half.recv_timeout(Duration::from_nanos(PATIENCE)).expect("half was sent");
        server.kill();
        killed.send(()).unwrap();
        putting.join().unwrap()
    });
    assert!(put.contains(&Err(RemoteError::Unreachable)), "{put:?}");
    for client in [&mut client, &mut direct] {
        let got = ends(|| get_at(&mut **client, &[(1, 0, 10)], LONG));
        assert_eq!(got, [Err(RemoteError::Unreachable)]);
    }
    server.restart();
    for client in [&mut client, &mut direct] {
        wait_until("the client has recovered", || {
            put_in(&mut **client, &[(1, bytes_of(1, 10))], LONG)[0].is_ok()
        });
        assert_eq!(get_one(&mut **client, 1, 10).unwrap(), bytes_of(1, 10));
    }
}

#[test]
fn unsolicited_reply_is_not_matched_to_another_request() {
    let mut client = client(&lies(b"$3\r\nabc\r\n$3\r\ndef\r\n"));
    for turn in 0..3 {
        let got = ends(|| get_at(&mut *client, &[(1, 0, 100)], LONG));
        assert!(
            got == [Ok(b"abc".to_vec())] || got == [Err(RemoteError::Malformed)],
            "{turn}: {got:?}"
        );
    }
    // The server acknowledges puts that it has not read.
    let mut client = crate::redis::client(&lies(b"+OK\r\n+OK\r\n+OK\r\n+OK\r\n"));
    let many: Vec<_> = (0..8).map(|n| (n, bytes_of(n, 1 << 20))).collect();
    ends(|| put_in(&mut *client, &many, 1000 * MS));
    ends(|| put_in(&mut *client, &many, 1000 * MS));
    // The server repeats the password in its error.
    let mut client = open(&RedisOpts {
        password: secret("hunter2"),
        ..opts(&lies(b"-ERR who is hunter2?\r\n"))
    })
    .client();
    let error = client.greet(at(LONG)).unwrap_err();
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

#[test]
fn a_server_that_ends_every_connection_fails_each_batch() {
    let mut client = client(&liar(|stream, _| drop(stream.shutdown(std::net::Shutdown::Both))));
    for _ in 0..3 {
        let got = ends(|| get_at(&mut *client, &[(1, 0, 9); 100], 500 * MS));
        assert!(
            got.iter()
                .all(|got| matches!(got, Err(RemoteError::Unreachable | RemoteError::Timeout))),
            "{got:?}"
        );
    }
}
