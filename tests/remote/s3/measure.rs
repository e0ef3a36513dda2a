//! Throughput against curl and Python's client on the same server, and over moto. Prints results,
//! asserts no speed.

use std::process::{Command, Stdio};
use std::time::Instant;

use super::*;
use kvtier_testkit::fixtures::moto::{Moto, is_there};
use kvtier_testkit::fixtures::s3::reply;

/// A server with one object for all names, which discards uploads: the measured time is that of
/// the client.
fn trivial(bytes: usize) -> Server {
    let object = Arc::new(bytes_of(7, bytes));
    Server::start(move |req: &Req, stream: &mut TcpStream| match req.method.as_str() {
        "GET" => {
            let range = format!("Content-Range: bytes 0-{}/{}\r\n", object.len() - 1, object.len());
            let head = format!(
                "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\n{range}\r\n",
                object.len()
            );
            stream.write_all(head.as_bytes()).is_ok() && stream.write_all(&object).is_ok()
        }
        _ => reply(stream, "200 OK", "", b""),
    })
}

/// Objects per second of a client.
fn ours(remote: &S3, bytes: usize, count: usize, is_put: bool, from: u64) -> f64 {
    let mut client = remote.client();
    let value = bytes_of(7, bytes);
    let mut rooms = vec![vec![0u8; bytes]; count.min(16)];
    let mut took = 0.0;
    for batch in 0..count / rooms.len() {
        let first = from + (batch * rooms.len()) as u64;
        let since = Instant::now();
        if is_put {
            let mut puts = Puts::default();
            for n in 0..rooms.len() as u64 {
                puts.object(name(first + n));
                puts.part(value.as_ptr(), bytes as u64);
            }
            // SAFETY: the value outlives the call, and nothing writes to it.
            unsafe { client.put(&mut puts, at(LONG * 6)) };
            assert!(puts.items.iter().all(|put| put.result == Ok(false)));
        } else {
            let mut gets = Gets::default();
            for (n, room) in rooms.iter_mut().enumerate() {
                gets.object(name(first + n as u64), 0);
                gets.part(room.as_mut_ptr(), bytes as u64);
            }
            // SAFETY: the rooms outlive the call, and nothing else accesses them.
            unsafe { client.get(&mut gets, at(LONG * 6)) };
            assert!(gets.items.iter().all(|get| get.result == Ok(bytes as u64)));
        }
        took += since.elapsed().as_secs_f64();
    }
    count as f64 / took
}

/// Objects per second of Python's client on one persistent connection.
const CLIENT: &str = r#"
import http.client, sys, time
port, size, count, method = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
value, room = bytes(size), bytearray(size)
conn = http.client.HTTPConnection("127.0.0.1", port)
conn.connect()
since = time.monotonic()
for n in range(count):
    conn.request(method, f"/kv-test/{n}", body=value if method == "PUT" else None)
    reply = conn.getresponse()
    got = 0
    while method == "GET" and got < size:
        got += reply.readinto(memoryview(room)[got:])
    reply.read()
print(count / (time.monotonic() - since))
"#;

fn python(port: u16, bytes: usize, count: usize, method: &str) -> f64 {
    let args = [port.to_string(), bytes.to_string(), count.to_string(), method.to_string()];
    let out = Command::new("python3").args(["-c", CLIENT]).args(args).output().expect("python3");
    String::from_utf8_lossy(&out.stdout).trim().parse().expect("a number")
}

/// Objects per second of curl on one persistent connection, without its time to start.
fn curl(port: u16, bytes: usize, count: usize, method: &str) -> f64 {
    let run = |count: usize| {
        let mut args = vec!["-s".to_string(), "-S".into()];
        let file = std::env::temp_dir().join(format!("kvtier-s3-{}", std::process::id()));
        std::fs::write(&file, bytes_of(7, bytes)).unwrap();
        for n in 0..count {
            if method == "PUT" {
                args.extend([
                    "-H".into(),
                    "Expect:".into(),
                    "-T".into(),
                    file.display().to_string(),
                ]);
            }
            args.extend(["-o".into(), "/dev/null".into()]);
            args.push(format!("http://127.0.0.1:{port}/kv-test/{n}"));
        }
        let since = Instant::now();
        let done = Command::new("curl").args(&args).stdout(Stdio::null()).status().expect("curl");
        assert!(done.success());
        std::fs::remove_file(&file).unwrap();
        since.elapsed().as_secs_f64()
    };
    (count - 1) as f64 / (run(count) - run(1)).max(1e-6)
}

#[test]
#[ignore = "a measurement"]
fn throughput_against_curl_and_python() {
    for (bytes, count) in [(256 << 10, 512), (8 << 20, 48)] {
        let server = trivial(bytes);
        let (one, four) = (S3Opts { connections: 1, ..opts(&server.url()) }, opts(&server.url()));
        for method in ["PUT", "GET"] {
            let mut all = [Vec::new(), Vec::new(), Vec::new(), Vec::new()];
            for _ in 0..7 {
                all[0].push(ours(&open(&one), bytes, count, method == "PUT", 0));
                all[1].push(ours(&open(&four), bytes, count, method == "PUT", 0));
                all[2].push(curl(server.port, bytes, count, method));
                all[3].push(python(server.port, bytes, count, method));
            }
            let ratio = |a: usize, b: usize| {
                median(all[a].iter().zip(&all[b]).map(|(a, b)| a / b).collect())
            };
            println!(
                "{method} of {} KiB: one connection {:.2} of curl, {:.2} of python; four {:.2} of curl \
                 ({:.2} GiB/s with one)",
                bytes >> 10,
                ratio(0, 2),
                ratio(0, 3),
                ratio(1, 2),
                median(all[0].clone()) * bytes as f64 / f64::from(1 << 30),
            );
        }
    }
    questions();
    over_moto();
}

/// Time of 64 lookups by the number of connections. The server takes 5 ms for each.
fn questions() {
    let bucket = Bucket::new(Quirks::default());
    let server = Server::start(move |req, stream| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        bucket.answer(req, stream)
    });
    for connections in [1, 4, 16] {
        let mut client = open(&S3Opts { connections, ..opts(&server.url()) }).client();
        lookup(&mut *client, &[0], LONG)[0].unwrap_err();
        let numbers: Vec<u64> = (0..64).collect();
        let since = Instant::now();
        assert!(
            lookup(&mut *client, &numbers, LONG).iter().all(|it| *it == Err(RemoteError::Absent))
        );
        let took = since.elapsed().as_secs_f64() * 1e3;
        println!("64 questions at 5 ms each by {connections} connections: {took:.0} ms");
    }
}

fn over_moto() {
    if !is_there("moto.server") {
        return;
    }
    let moto = Moto::start(0, &[]);
    moto.client("s3.create_bucket(Bucket='kv-test')");
    let remote = open(&opts(&moto.url()));
    for (bytes, count, from) in [(256 << 10, 64, 0), (8 << 20, 16, 1000)] {
        for method in ["PUT", "GET"] {
            let rate = ours(&remote, bytes, count, method == "PUT", from);
            let mib = rate * bytes as f64 / f64::from(1 << 20);
            println!("moto: {method} of {} KiB: {rate:.0} a second, {mib:.0} MiB/s", bytes >> 10);
        }
    }
}
