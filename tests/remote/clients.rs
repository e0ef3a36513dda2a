//! Helpers of the tests of all backends: names, contents, and calls of a client.

use kvtier::base::clock::Clock;
use kvtier::tier::remote::name::{HASH_BYTES, Prefix};
use kvtier::tier::remote::secret::Secret;
use kvtier::tier::remote::{Client, Gets, Name, Puts, Queries, RemoteError};

pub const MS: u64 = 1_000_000;
/// Deadline of requests that must be answered, however slow the machine is.
pub const LONG: u64 = 240_000 * MS;
/// A call that takes longer hangs.
pub const PATIENCE: u64 = 300_000 * MS;

pub fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text.as_bytes()).unwrap())
}

pub fn at(ns: u64) -> u64 {
    Clock::real().now_ns() + ns
}

pub fn name(number: u64) -> Name {
    let mut hash = [0x5a; HASH_BYTES];
    hash[..8].copy_from_slice(&number.to_le_bytes());
    Name { tenant: 0, hash }
}

pub fn key(number: u64) -> String {
    let mut out = Vec::new();
    Prefix::new("test").unwrap().write(&name(number), &mut out);
    String::from_utf8(out).unwrap()
}

/// Bytes that a number determines.
pub fn bytes_of(number: u64, bytes: usize) -> Vec<u8> {
    let mut x = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// Cuts `bytes` bytes into pieces, some of them empty.
pub fn cuts(number: u64, bytes: usize, pieces: usize) -> Vec<(usize, usize)> {
    let mut ends: Vec<usize> = bytes_of(number ^ 77, pieces * 8)
        .chunks(8)
        .map(|x| u64::from_le_bytes(x.try_into().unwrap()) as usize % (bytes + 1))
        .collect();
    ends.push(bytes);
    ends.sort_unstable();
    let mut from = 0;
    let cut = |end| (std::mem::replace(&mut from, end), end);
    ends.into_iter().map(cut).collect()
}

pub fn put_in(
    client: &mut dyn Client,
    items: &[(u64, Vec<u8>)],
    ns: u64,
) -> Vec<Result<bool, RemoteError>> {
    put_by(client, items, || at(ns))
}

/// Like [`put_in`], with a deadline by any clock.
pub fn put_by(
    client: &mut dyn Client,
    items: &[(u64, Vec<u8>)],
    deadline_ns: impl FnOnce() -> u64,
) -> Vec<Result<bool, RemoteError>> {
    let mut puts = Puts::default();
    for (number, bytes) in items {
        puts.object(name(*number));
        for (from, to) in cuts(*number, bytes.len(), (*number % 5) as usize * 30) {
            puts.part(bytes[from..].as_ptr(), (to - from) as u64);
        }
    }
    // SAFETY: the bytes outlive the call, and no other thread writes to them.
    unsafe { client.put(&mut puts, deadline_ns()) };
    puts.items.iter().map(|put| put.result).collect()
}

/// Gets parts of objects: number, first byte, and room of each.
pub fn get_at(
    client: &mut dyn Client,
    items: &[(u64, u64, usize)],
    ns: u64,
) -> Vec<Result<Vec<u8>, RemoteError>> {
    get_by(client, items, || at(ns))
}

/// Like [`get_at`], with a deadline by any clock.
pub fn get_by(
    client: &mut dyn Client,
    items: &[(u64, u64, usize)],
    deadline_ns: impl FnOnce() -> u64,
) -> Vec<Result<Vec<u8>, RemoteError>> {
    let mut rooms: Vec<Vec<u8>> = items.iter().map(|&(_, _, room)| vec![0xee; room]).collect();
    let mut gets = Gets::default();
    for (&(number, offset, room), memory) in items.iter().zip(&mut rooms) {
        gets.object(name(number), offset);
        let base = memory.as_mut_ptr();
        for (from, to) in cuts(number ^ offset, room, (number % 7) as usize * 20) {
            gets.part(base.wrapping_add(from), (to - from) as u64);
        }
    }
    // SAFETY: the rooms outlive the call, and nothing else accesses them.
    unsafe { client.get(&mut gets, deadline_ns()) };
    let done = gets.items.iter().zip(rooms);
    done.map(|(get, room)| {
        let bytes = get.result? as usize;
        assert!(room[bytes..].iter().all(|&byte| byte == 0xee), "written past the end");
        Ok(room[..bytes].to_vec())
    })
    .collect()
}

pub fn lookup(client: &mut dyn Client, numbers: &[u64], ns: u64) -> Vec<Result<u64, RemoteError>> {
    let mut queries = Queries::default();
    numbers.iter().for_each(|&number| queries.name(name(number)));
    client.lookup(&mut queries, at(ns));
    queries.items.iter().map(|query| query.result).collect()
}

pub fn put_one(client: &mut dyn Client, number: u64, bytes: usize) -> Result<bool, RemoteError> {
    put_in(client, &[(number, bytes_of(number, bytes))], LONG)[0]
}

pub fn get_one(client: &mut dyn Client, number: u64, bytes: usize) -> Result<Vec<u8>, RemoteError> {
    get_at(client, &[(number, 0, bytes)], LONG).remove(0)
}

/// Runs `body`, which must end within [`PATIENCE`].
pub fn ends<T>(body: impl FnOnce() -> T) -> T {
    let before = Clock::real().now_ns();
    let result = body();
    let took = Clock::real().now_ns() - before;
    assert!(took < PATIENCE, "it took {} ms", took / MS);
    result
}

/// Runs `body`, which only its deadline ends, `ns` after its begin: without the deadline it would
/// hang.
pub fn ends_at_deadline<T>(ns: u64, body: impl FnOnce() -> T) -> T {
    let before = Clock::real().now_ns();
    let result = ends(body);
    let took = Clock::real().now_ns() - before;
    assert!(took >= ns, "{} ms of {}", took / MS, ns / MS);
    result
}

pub fn remove(client: &mut dyn Client, numbers: &[u64], ns: u64) -> Vec<Result<u64, RemoteError>> {
    let mut queries = Queries::default();
    numbers.iter().for_each(|&number| queries.name(name(number)));
    client.remove(&mut queries, at(ns));
    queries.items.iter().map(|query| query.result).collect()
}

pub fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}
