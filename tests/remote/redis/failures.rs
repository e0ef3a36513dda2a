//! Servers that stop, die, and lie.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use super::*;
use kvtier_testkit::fixtures::redis::{Server, is_there};

/// Does something that must end by its deadline.
fn in_time<T>(ns: u64, body: impl FnOnce() -> T) -> T {
    let before = own_ns();
    let result = body();
    let took = own_ns().saturating_sub(before);
    assert!(took <= ns + LATE, "{} ms of {}", took / MS, ns / MS);
    result
}

#[test]
fn a_server_that_stops_and_goes_on() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let mut lane = lane(&server.url());
    assert_eq!(put_one(&mut *lane, 1, 300_000), Ok(false));
    server.pause();
    for _ in 0..3 {
        let got = in_time(200 * MS, || get_at(&mut *lane, &[(1, 0, 300_000)], 200 * MS));
        assert!(matches!(got[0], Err(Trouble::Late | Trouble::Gone)), "{got:?}");
    }
    let many: Vec<_> = (10..40).map(|n| (n, bytes_of(n, 1 << 20))).collect();
    let put = in_time(300 * MS, || put_in(&mut *lane, &many, 300 * MS));
    assert!(put.iter().all(|put| matches!(put, Err(Trouble::Late | Trouble::Gone))), "{put:?}");
    let mut fresh = open(&opts(&server.url())).lane();
    let error = in_time(200 * MS, || fresh.greet(at(200 * MS))).unwrap_err();
    assert_eq!(error.status(), kvtier::base::status::Status::Timeout);
    server.go_on();
    let since = Clock::real().now_ns();
    while get_at(&mut *lane, &[(1, 0, 300_000)], 1000 * MS)[0] != Ok(bytes_of(1, 300_000)) {
        assert!(Clock::real().now_ns() - since < 15_000 * MS, "it did not recover");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(get_one(&mut *fresh, 1, 300_000).unwrap(), bytes_of(1, 300_000));
    // One that sleeps while it has half of what is sent.
    let sleeper = std::thread::spawn({
        let port = server.port;
        move || {
            Command::new("redis-cli")
                .args(["-p", &port.to_string(), "debug", "sleep", "2"])
                .output()
        }
    });
    let since = Clock::real().now_ns();
    while get_at(&mut *fresh, &[(1, 0, 300_000)], 100 * MS)[0].is_ok() {
        assert!(Clock::real().now_ns() - since < 15_000 * MS, "it did not fall asleep");
    }
    let put = in_time(150 * MS, || put_in(&mut *lane, &many, 150 * MS));
    assert!(put.contains(&Err(Trouble::Late)), "{put:?}");
    sleeper.join().unwrap().unwrap();
    std::thread::sleep(Duration::from_millis(600));
    // What did not come in time is there or is not, and whole in either case.
    for (n, bytes) in &many {
        let got = get_one(&mut *lane, *n, 1 << 20);
        assert!(got == Err(Trouble::Absent) || got.as_ref() == Ok(bytes), "{n}");
    }
}

/// An attempt to connect that was begun while it stood still, and ran out between two batches, does
/// not stand in the way of the next one.
#[test]
fn a_server_that_goes_on_after_an_attempt_has_run_out() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let remote = open(&RedisOpts { connect_ns: 100 * MS, ..opts(&server.url()) });
    assert_eq!(put_one(&mut *remote.lane(), 1, 1000), Ok(false));
    for _ in 0..3 {
        server.pause();
        let mut lane = open(&RedisOpts { connect_ns: 100 * MS, ..opts(&server.url()) }).lane();
        assert_eq!(get_at(&mut *lane, &[(1, 0, 1000)], 30 * MS), [Err(Trouble::Late)]);
        std::thread::sleep(Duration::from_millis(150));
        server.go_on();
        let got = get_at(&mut *lane, &[(1, 0, 1000)], LONG);
        assert!(got == [Ok(bytes_of(1, 1000))], "{:?}", got[0].as_ref().err());
    }
}

#[test]
fn a_server_that_dies_and_comes_again() {
    if !is_there() {
        return;
    }
    let mut server = Server::start(&[]);
    let mut lane = lane(&server.url());
    assert_eq!(put_one(&mut *lane, 1, 10), Ok(false));
    // A connection that ended while nobody used it costs nothing.
    server.cli(&["client", "kill", "type", "normal"]);
    assert_eq!(get_one(&mut *lane, 1, 10).unwrap(), bytes_of(1, 10));
    server.restart();
    assert_eq!(get_one(&mut *lane, 1, 10), Err(Trouble::Absent));
    // Killed while it works.
    let many: Vec<_> = (0..400).map(|n| (n, bytes_of(n, 1 << 20))).collect();
    let put = std::thread::scope(|scope| {
        let putting = scope.spawn(|| in_time(3000 * MS, || put_in(&mut *lane, &many, 3000 * MS)));
        std::thread::sleep(Duration::from_millis(100));
        server.kill();
        putting.join().unwrap()
    });
    assert!(put.contains(&Err(Trouble::Gone)), "{put:?}");
    let got = in_time(3000 * MS, || get_at(&mut *lane, &[(1, 0, 10)], 3000 * MS));
    assert_eq!(got, [Err(Trouble::Gone)]);
    server.restart();
    let since = Clock::real().now_ns();
    while put_in(&mut *lane, &[(1, bytes_of(1, 10))], 1000 * MS)[0].is_err() {
        assert!(Clock::real().now_ns() - since < 15_000 * MS, "it did not recover");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(get_one(&mut *lane, 1, 10).unwrap(), bytes_of(1, 10));
}

/// A server that greets well, and then says something of its own on every request.
fn liar(say: impl Fn(&mut TcpStream, usize) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let say = std::sync::Arc::new(say);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, say) = (stream.unwrap(), say.clone());
            std::thread::spawn(move || {
                let mut bytes = vec![0; 65536];
                let mut turn = 0;
                while let Ok(count) = stream.read(&mut bytes) {
                    if count == 0 {
                        return;
                    }
                    if bytes[..count].windows(5).any(|word| word == b"HELLO") {
                        stream.write_all(b"%1\r\n+server\r\n+redis\r\n").unwrap();
                    } else {
                        say(&mut stream, turn);
                        turn += 1;
                    }
                }
            });
        }
    });
    url
}

fn lies(bytes: &'static [u8]) -> String {
    liar(move |stream, _| drop(stream.write_all(bytes)))
}

#[test]
fn servers_that_speak_nonsense() {
    for bytes in [
        &b"hello\r\n"[..],
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\0\0\0\0\r\n",
        b":12\r\n",
        b"+OK\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"$2000000000\r\nxxxxxxxxxxxxxxx",
        b"$101\r\n",
        b"$-5\r\n",
        b"$3\r\nabcdef",
        b"%1\r\n+a\r\n+b\r\n",
        b"-WHATEVER it means\r\n",
    ] {
        let mut lane = lane(&lies(bytes));
        let got = in_time(1000 * MS, || get_at(&mut *lane, &[(1, 0, 100)], 1000 * MS));
        assert_eq!(got, [Err(Trouble::Nonsense)], "{:?}", String::from_utf8_lossy(bytes));
        assert!(in_time(1000 * MS, || lane.greet(at(1000 * MS))).is_err());
    }
    // One that answers before it was asked enough: what it says counts for nobody else.
    let mut lane = lane(&lies(b"$3\r\nabc\r\n$3\r\ndef\r\n"));
    for turn in 0..3 {
        let got = in_time(1000 * MS, || get_at(&mut *lane, &[(1, 0, 100)], 1000 * MS));
        assert!(got == [Ok(b"abc".to_vec())] || got == [Err(Trouble::Nonsense)], "{turn}: {got:?}");
    }
    // Yes to a put that it has not read.
    let mut lane = crate::redis::lane(&lies(b"+OK\r\n+OK\r\n+OK\r\n+OK\r\n"));
    let many: Vec<_> = (0..8).map(|n| (n, bytes_of(n, 1 << 20))).collect();
    in_time(1000 * MS, || put_in(&mut *lane, &many, 1000 * MS));
    in_time(1000 * MS, || put_in(&mut *lane, &many, 1000 * MS));
    // It repeats a password.
    let mut lane = open(&RedisOpts {
        password: secret("hunter2"),
        ..opts(&lies(b"-ERR who is hunter2?\r\n"))
    })
    .lane();
    let error = lane.greet(at(1000 * MS)).unwrap_err();
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

#[test]
fn servers_that_are_slow_on_purpose() {
    let drip = |bytes: &'static [u8], each: u64| {
        liar(move |stream, _| {
            for byte in bytes.iter().cycle() {
                if stream.write_all(&[*byte]).is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(each));
            }
        })
    };
    for url in [
        drip(b"$90\r\n0123456789", 20),
        drip(b">1\r\n+x\r\n", 1),
        drip(b"+xxxxxxxx", 3),
        liar(|_, _| {}),
        // It sends messages that nobody asked for as fast as it can.
        liar(|stream, _| while stream.write_all(&b">1\r\n+x\r\n".repeat(1000)).is_ok() {}),
    ] {
        let mut lane = lane(&url);
        for _ in 0..2 {
            let got = in_time(300 * MS, || get_at(&mut *lane, &[(1, 0, 100)], 300 * MS));
            assert!(matches!(got[0], Err(Trouble::Late | Trouble::Gone)), "{url}: {got:?}");
        }
        let many: Vec<_> = (0..20).map(|n| (n, bytes_of(n, 1 << 20))).collect();
        in_time(300 * MS, || put_in(&mut *lane, &many, 300 * MS));
    }
    // One that ends every connection.
    let mut lane = lane(&liar(|stream, _| drop(stream.shutdown(std::net::Shutdown::Both))));
    for _ in 0..3 {
        let got = in_time(500 * MS, || get_at(&mut *lane, &[(1, 0, 9); 100], 500 * MS));
        assert!(got.iter().all(|got| matches!(got, Err(Trouble::Gone | Trouble::Late))), "{got:?}");
    }
    // Nobody is there; nobody has that name.
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut lane = crate::redis::lane(&format!("redis://{gone}"));
    let error = in_time(3000 * MS, || lane.greet(at(3000 * MS))).unwrap_err();
    assert!(error.message().contains("refused"), "{error}");
    let mut lane = crate::redis::lane("redis://no-such-host.invalid");
    assert!(lane.greet(at(10_000 * MS)).is_err());
}
