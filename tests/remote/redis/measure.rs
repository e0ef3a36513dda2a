//! Throughput against redis-benchmark and a bare socket. Prints results, asserts no speed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Instant;

use super::*;

const BYTES: usize = 256 << 10;
const COUNT: u64 = 512;
const DEPTH: u64 = 64;

/// Requests per second of redis-benchmark.
fn benchmark(port: u16, what: &str, count: u64, keys: &str) -> f64 {
    let (port, bytes, count) = (port.to_string(), BYTES.to_string(), count.to_string());
    let args = ["-p", &port, "-t", what, "-d", &bytes, "-n", &count, "-c", "1", "-P", "16", "-r"];
    let out = Command::new("redis-benchmark").args(args).args([keys, "--csv"]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let last = text.lines().last().unwrap_or_default();
    last.split(',').nth(1).and_then(|n| n.trim_matches('"').parse().ok()).expect(&text)
}

#[test]
#[ignore = "a measurement"]
fn throughput_against_redis_benchmark() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let mut client = client(&server.url());
    let value = bytes_of(1, BYTES);
    let mut rooms = vec![vec![0u8; BYTES]; DEPTH as usize];
    let mut ratios = [Vec::new(), Vec::new()];
    let mut rates = [Vec::new(), Vec::new()];
    for turn in 0..7 {
        server.cli(&["flushall"]);
        // New keys, as in our puts: the server allocates memory for both.
        let theirs = benchmark(server.port, "set", COUNT, "1000000000");
        server.cli(&["flushall"]);
        let mut took = 0.0;
        for batch in 0..COUNT / DEPTH {
            let mut puts = Puts::default();
            for n in 0..DEPTH {
                puts.object(name(batch * DEPTH + n));
                puts.part(value.as_ptr(), BYTES as u64);
            }
            let since = Instant::now();
            // SAFETY: the value outlives the call, and nothing writes to it.
            unsafe { client.put(&mut puts, at(LONG)) };
            took += since.elapsed().as_secs_f64();
            assert!(puts.items.iter().all(|put| put.result == Ok(false)));
        }
        let ours = COUNT as f64 / took;
        rates[0].push(ours);
        ratios[0].push(ours / theirs);
        let mut took = 0.0;
        for batch in 0..COUNT / DEPTH {
            let mut gets = Gets::default();
            for (n, room) in rooms.iter_mut().enumerate() {
                gets.object(name(batch * DEPTH + n as u64), 0);
                gets.part(room.as_mut_ptr(), BYTES as u64);
            }
            let since = Instant::now();
            // SAFETY: the rooms outlive the call, and nothing else accesses them.
            unsafe { client.get(&mut gets, at(LONG)) };
            took += since.elapsed().as_secs_f64();
            assert!(gets.items.iter().all(|get| get.result == Ok(BYTES as u64)));
        }
        assert!(rooms.iter().all(|room| *room == value));
        let ours = COUNT as f64 / took;
        // Stores the keys that redis-benchmark reads, so that its GETs are hits.
        benchmark(server.port, "set", COUNT * 4, "512");
        let theirs = benchmark(server.port, "get", COUNT, "512");
        rates[1].push(ours);
        ratios[1].push(ours / theirs);
        println!("turn {turn}: SET {:.2} GET {:.2}", ratios[0][turn], ratios[1][turn]);
    }
    for (what, (ratio, rate)) in ["SET", "GET"].iter().zip(ratios.into_iter().zip(rates)) {
        let rate = median(rate) * BYTES as f64 / f64::from(1 << 30);
        println!("{what} of 256 KiB: {:.2} of redis-benchmark ({rate:.2} GiB/s)", median(ratio));
    }
    existence(&server, &mut *client);
}

/// Compares a lookup of 1,000 names with a bare socket that sends the same requests at once.
fn existence(server: &Server, client: &mut dyn Client) {
    let mut request = String::new();
    for n in 0..1000 {
        let key = key(n);
        request += &format!("*2\r\n$6\r\nSTRLEN\r\n${}\r\n{key}\r\n", key.len());
    }
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    stream.set_nodelay(true).unwrap();
    let mut ratios = Vec::new();
    let mut micros = Vec::new();
    for _ in 0..51 {
        let since = Instant::now();
        stream.write_all(request.as_bytes()).unwrap();
        let (mut lines, mut bytes) = (0, [0; 16384]);
        while lines < 1000 {
            let count = stream.read(&mut bytes).unwrap();
            lines += bytes[..count].iter().filter(|&&byte| byte == b'\n').count();
        }
        let bare = since.elapsed().as_secs_f64();
        let mut queries = Queries::default();
        (0..1000).for_each(|n| queries.name(name(n)));
        let since = Instant::now();
        client.lookup(&mut queries, at(LONG));
        let ours = since.elapsed().as_secs_f64();
        assert_eq!(queries.items.iter().filter(|ask| ask.result.is_ok()).count(), 512);
        ratios.push(ours / bare);
        micros.push(ours * 1e6);
    }
    println!("ask of 1,000: {:.2} of a bare round trip ({:.0} us)", median(ratios), median(micros));
}
