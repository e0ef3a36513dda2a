//! Group `remote`: bandwidth of a connection beside the server's own benchmark, lookups beside one
//! round trip of a bare socket, and the cost of a remote for the callers of a store.
//!
//! The server is the one at `--url`, or one that the group starts.

use std::time::Instant;

use kvtier::base::clock::Clock;
use kvtier::base::machine::random_bytes;
use kvtier::base::memory::Buffer;
use kvtier::tier::remote::name::{HASH_BYTES, Prefix};
use kvtier::tier::remote::redis::{Redis, RedisOpts};
use kvtier::tier::remote::secret::Secret;
use kvtier::tier::remote::{Client, Gets, Name, Puts, Queries, Remote};

use super::disk::{self, in_turn, part_of_raw};
use super::fixtures::{Outcome, memory, say};
use super::remote_server::{BYTES, KEYS, Raw, Server};
use super::remote_store;
use super::{Bar, median};

/// Timeout of a batch.
const TIMEOUT_NS: u64 = 20_000_000_000;
/// Objects of a batch.
const BATCH: u64 = 64;
/// Concurrent requests of the server's own benchmark.
const DEPTH: u64 = 16;
/// Names of a lookup: as many as a long prompt has chunks, and more than a client has in flight.
const LOOKUPS: [(&str, u64); 2] = [("remote_lookup_1000", 1000), ("remote_lookup_20000", 20_000)];
/// Prefix of all names.
const PREFIX: &str = "kvtbench";

/// Random names of this run.
#[derive(Clone, Copy)]
struct BenchNames([u8; HASH_BYTES]);

impl BenchNames {
    fn name(self, number: u64) -> Name {
        let mut hash = self.0;
        hash[..8].copy_from_slice(&number.to_le_bytes());
        Name { tenant: 0, hash }
    }
}

fn prefix() -> Outcome<Prefix> {
    Prefix::new(PREFIX).map_err(say)
}

/// A connection to the server.
struct Connection {
    client: Box<dyn Client>,
    clock: Clock,
    names: BenchNames,
}

impl Connection {
    fn open(server: &Server) -> Outcome<Connection> {
        let password = server.password.as_deref().map(Secret::new).transpose().map_err(say)?;
        let opts = RedisOpts {
            password,
            connect_ns: TIMEOUT_NS,
            ..RedisOpts::new(&server.url, prefix()?)
        };
        let clock = Clock::real();
        let mut client = Redis::open(&opts, clock.clone()).map_err(say)?.client();
        client.greet(clock.now_ns() + TIMEOUT_NS).map_err(say)?;
        Ok(Connection { client, clock, names: BenchNames(random_bytes().map_err(say)?) })
    }

    fn deadline_ns(&self) -> u64 {
        self.clock.now_ns() + TIMEOUT_NS
    }

    /// Seconds of putting `count` objects in batches.
    fn put(&mut self, first: u64, count: u64, stock: &Buffer) -> Outcome<f64> {
        let mut puts = Puts::default();
        let mut took = 0.0;
        for from in (0..count).step_by(BATCH as usize) {
            puts.clear();
            for number in from..(from + BATCH).min(count) {
                puts.object(self.names.name(first + number));
                let part = stock.range((number % BATCH) * BYTES as u64, BYTES as u64);
                puts.part(part.unwrap_or(stock.address()), BYTES as u64);
            }
            let deadline_ns = self.deadline_ns();
            let start = Instant::now();
            // SAFETY: the buffer outlives the call, and no code writes to it.
            unsafe { self.client.put(&mut puts, deadline_ns) };
            took += start.elapsed().as_secs_f64();
            if puts.items.iter().any(|put| put.result != Ok(false)) {
                return Err("not all objects were put".to_string());
            }
        }
        Ok(took)
    }

    /// Seconds of getting `count` objects in batches.
    fn get(&mut self, first: u64, count: u64, stock: &Buffer) -> Outcome<f64> {
        let mut gets = Gets::default();
        let mut took = 0.0;
        for from in (0..count).step_by(BATCH as usize) {
            gets.clear();
            for number in from..(from + BATCH).min(count) {
                gets.object(self.names.name(first + number), 0);
                let part = stock.range((number % BATCH) * BYTES as u64, BYTES as u64);
                gets.part(part.unwrap_or(stock.address()), BYTES as u64);
            }
            let deadline_ns = self.deadline_ns();
            let start = Instant::now();
            // SAFETY: the buffer outlives the call, and no other code uses it.
            unsafe { self.client.get(&mut gets, deadline_ns) };
            took += start.elapsed().as_secs_f64();
            if gets.items.iter().any(|get| get.result != Ok(BYTES as u64)) {
                return Err("not all objects were loaded".to_string());
            }
        }
        Ok(took)
    }

    fn queries(&self, first: u64, count: u64) -> Queries {
        let mut queries = Queries::default();
        (first..first + count).for_each(|number| queries.name(self.names.name(number)));
        queries
    }

    fn remove(&mut self, first: u64, count: u64) {
        let mut queries = self.queries(first, count);
        let deadline_ns = self.deadline_ns();
        self.client.remove(&mut queries, deadline_ns);
    }
}

/// Puts and gets, pairs of seconds with those of the server's own benchmark.
fn moves(server: &Server, quick: bool) -> Outcome<[Vec<(f64, f64)>; 2]> {
    server.is_measurable()?;
    server.check()?;
    let (rounds, count) = (if quick { 3 } else { 9 }, KEYS);
    let stock = memory(BATCH * BYTES as u64).map_err(say)?;
    let mut connection = Connection::open(server)?;
    let mut pairs = [Vec::new(), Vec::new()];
    for turn in 0..rounds {
        let first = u64::from(turn) * count;
        server.empty()?;
        let redis = || {
            let took = server.benchmark("set", count, DEPTH)?;
            server.empty().map(|()| took)
        };
        pairs[0].push(in_turn(turn, || connection.put(first, count, &stock), redis)?);
        // The server may have evicted objects during its benchmark.
        connection.remove(first, count);
        connection.put(first, count, &stock)?;
        server.stock()?;
        let redis = || server.benchmark("get", count, DEPTH);
        pairs[1].push(in_turn(turn, || connection.get(first, count, &stock), redis)?);
        connection.remove(first, count);
    }
    Ok(pairs)
}

/// Seconds of a lookup of `count` names, half of which exist, and of the same lengths over a bare
/// socket.
fn queries(server: &Server, count: u64, quick: bool) -> Outcome<Vec<(f64, f64)>> {
    let mut raw = server.raw()?;
    let mut connection = Connection::open(server)?;
    let stock = memory(BATCH * BYTES as u64).map_err(say)?;
    let present = count / 2;
    // The contents do not matter for a lookup.
    let mut puts = Puts::default();
    for number in 0..present {
        puts.object(connection.names.name(number));
        puts.part(stock.address(), 64);
    }
    let deadline_ns = connection.deadline_ns();
    // SAFETY: the buffer outlives the call, and no code writes to it.
    unsafe { connection.client.put(&mut puts, deadline_ns) };
    let prefix = prefix()?;
    let key = |number| {
        let mut out = Vec::new();
        prefix.write(&connection.names.name(number), &mut out);
        String::from_utf8_lossy(&out).into_owned()
    };
    let keys: Vec<String> = (0..count).map(key).collect();
    let lines: Vec<[&str; 2]> = keys.iter().map(|key| ["STRLEN", key]).collect();
    let request = Raw::request(&lines.iter().map(|line| &line[..]).collect::<Vec<_>>());
    let mut pairs = Vec::new();
    let rounds = if quick { 51 } else { 201 } * 1000 / count.max(1000);
    for turn in 0..rounds.max(11) as u32 {
        let bare = || {
            let start = Instant::now();
            let lengths = raw.round_trip(&request, count as usize)?;
            let took = start.elapsed().as_secs_f64();
            match lengths.iter().filter(|length| **length == 64).count() as u64 == present {
                true => Ok(took),
                false => Err("the bare socket received other lengths".to_string()),
            }
        };
        let ours = || {
            let mut queries = connection.queries(0, count);
            let deadline_ns = connection.deadline_ns();
            let start = Instant::now();
            connection.client.lookup(&mut queries, deadline_ns);
            let took = start.elapsed().as_secs_f64();
            match queries.items.iter().filter(|query| query.result == Ok(64)).count() as u64
                == present
            {
                true => Ok(took),
                false => Err("not all lookups were answered".to_string()),
            }
        };
        pairs.push(in_turn(turn, ours, bare)?);
    }
    connection.remove(0, present);
    Ok(pairs)
}

fn move_bars(server: &Outcome<Server>, quick: bool) -> Vec<Bar> {
    let redis = "redis-benchmark -c 1 -P 16 -d 262144, a process of its own";
    let bar = |name| Bar { unit: "of theirs", ..part_of_raw(name, redis, Some(0.85)) };
    let mut bars = [bar("remote_put_256KiB"), bar("remote_get_256KiB")];
    match server.as_ref().map_err(Clone::clone).and_then(|server| moves(server, quick)) {
        Ok(pairs) => {
            let filled = bars.iter_mut().zip(&pairs);
            filled.for_each(|(bar, pairs)| disk::fill(bar, pairs, KEYS * BYTES as u64));
        }
        Err(why) => bars.iter_mut().for_each(|bar| bar.note.clone_from(&why)),
    }
    bars.into()
}

fn lookup_bar(server: &Outcome<Server>, (name, count): (&'static str, u64), quick: bool) -> Bar {
    let mut bar = Bar::lower(name, "of bare")
        .baseline("as many STRLEN in one write of a bare socket")
        .goal(1.3);
    match server.as_ref().map_err(Clone::clone).and_then(|server| queries(server, count, quick)) {
        Ok(pairs) => {
            let mut parts: Vec<f64> = pairs.iter().map(|(ours, bare)| ours / bare).collect();
            let mut ours: Vec<f64> = pairs.iter().map(|(ours, _)| ours * 1e6).collect();
            let mut bare: Vec<f64> = pairs.iter().map(|(_, bare)| bare * 1e6).collect();
            (bar.value, bar.baseline_value) = (Some(median(&mut parts)), Some(1.0));
            bar.note = format!("({:.0} against {:.0} us)", median(&mut ours), median(&mut bare));
        }
        Err(why) => bar.note = why,
    }
    bar
}

/// Measures every bar of the group with a server that it starts.
pub fn run(quick: bool) -> Vec<Bar> {
    run_at(quick, None)
}

/// Measures every bar of the group with the server at `url`, if given.
pub fn run_at(quick: bool, url: Option<&str>) -> Vec<Bar> {
    let server = match url {
        Some(url) => Ok(Server::at(url)),
        None => Server::start(),
    };
    let mut bars = move_bars(&server, quick);
    bars.extend(LOOKUPS.map(|names| lookup_bar(&server, names, quick)));
    bars.extend(remote_store::bars(&server, quick));
    bars
}
