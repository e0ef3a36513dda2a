//! `kvtier doctor --remote`: the server's answer, permissions, latency and bandwidth, and whether
//! the defaults of a store fit. All objects that it writes are removed again.

use std::time::{Duration, Instant};

use kvtier::base::clock::Clock;
use kvtier::base::machine::random_bytes;
use kvtier::base::status::{Error, Status};
use kvtier::store::state::Config;
use kvtier::tier::remote::name::HASH_BYTES;
use kvtier::tier::remote::{Client, Gets, Name, Puts, Queries, RemoteError};

use super::{Finding, Mark};
use crate::human;
use crate::remote::{Opened, RemoteTarget, explain};

/// Timeout of a request.
const TIMEOUT_NS: u64 = 10_000_000_000;
/// Time of each measurement.
const MEASURE_TIME: Duration = Duration::from_millis(500);
/// Most single requests of a measurement.
const SINGLE: usize = 200;
/// Most bytes that are put for each size.
const STOCK_BYTES: usize = 64 << 20;
/// Bytes of a batch.
const BATCH_BYTES: usize = 4 << 20;
/// Sizes of measured objects.
const SIZES: [usize; 2] = [256 << 10, 1 << 20];
/// Bytes of KV of a token of a 70B model with grouped lookups, in 16 bits.
const LARGE_TOKEN_BYTES: f64 = 327_680.0;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Prints the findings; fails if the remote cannot be used at all.
pub fn run(text: &str, json: bool) -> Outcome<()> {
    let target = RemoteTarget::read(text).map_err(explain)?;
    let clock = Clock::real();
    let opened = match target.open(&clock) {
        Ok(opened) => opened,
        Err(error) => {
            unusable(&error).print(json);
            return Err("the remote cannot be used".into());
        }
    };
    server_finding(&opened).print(json);
    let mut doctor = Doctor::new(opened.remote.client(), clock)?;
    let permissions_found = doctor.permissions();
    permissions_found.finding().print(json);
    let measured = match permissions_found.all() {
        true => doctor.measure().map_err(not_measured),
        false => Err(Finding::new(
            "latency",
            Mark::Absent,
            "not measured: the server forbids an operation",
            "measuring needs put, get, lookup and remove",
        )),
    };
    let left = doctor.clean();
    match &measured {
        Ok(measured) => measured.findings(&opened).iter().for_each(|one| one.print(json)),
        Err(finding) => finding.print(json),
    }
    if left > 0 {
        return Err(format!("cannot remove {left} objects of this test").into());
    }
    match permissions_found.is_of_use() && (measured.is_ok() || !permissions_found.all()) {
        true => Ok(()),
        false => Err("the remote cannot be used".into()),
    }
}

/// The finding for a remote that cannot be opened.
fn unusable(error: &Error) -> Finding {
    let message = error.message();
    let is_refused = ["NOAUTH", "WRONGPASS", "denies"].iter().any(|word| message.contains(word));
    let means = match error.status() {
        _ if is_refused => "the credentials are wrong or missing",
        Status::Spec | Status::Unsupported | Status::Limit | Status::Invalid => {
            "the argument does not describe a remote; no server was contacted"
        }
        Status::Timeout => {
            "the server did not answer in time: check that it runs and that no firewall drops requests"
        }
        Status::Again => "the server is not ready: it is loading data or has no leader",
        Status::Corrupt => "the answer is not one of this kind of server",
        _ => "no server answers, or it cannot be used as configured",
    };
    Finding::new("remote", Mark::Absent, message, means)
}

/// The finding for a measurement that failed although all operations are allowed.
fn not_measured(error: RemoteError) -> Finding {
    let most = human((SIZES.len() * STOCK_BYTES) as u64);
    let means = match error {
        RemoteError::Absent | RemoteError::Full => format!(
            "the server may have evicted objects of this test, which puts up to {most}: raise its \
             memory limit (maxmemory)"
        ),
        _ => "a request failed during the measurement".to_string(),
    };
    let value = format!("not measured: {}", Error::from(error).message());
    Finding::new("latency", Mark::Absent, value, &means)
}

fn server_finding(opened: &Opened) -> Finding {
    let (mark, means) = match opened.server.warnings.as_slice() {
        [] => (Mark::Good, "the server answers, without warnings".to_string()),
        warnings => (Mark::Limited, warnings.join("; ")),
    };
    Finding::new("remote", mark, opened.server.words.clone(), &means)
}

/// The result of each operation that a store uses.
struct Permissions(Vec<(&'static str, Result<(), RemoteError>)>);

impl Permissions {
    fn all(&self) -> bool {
        self.0.iter().all(|(_, result)| result.is_ok())
    }

    fn is_of_use(&self) -> bool {
        self.can("put") || self.can("lookup") && self.can("get")
    }

    fn can(&self, operation: &str) -> bool {
        self.0.iter().any(|(name, result)| *name == operation && result.is_ok())
    }

    fn finding(&self) -> Finding {
        let word = |(name, result): &(&str, Result<(), RemoteError>)| match result {
            Ok(()) => format!("{name}: yes"),
            Err(error) => format!("{name}: no, {}", Error::from(*error).message()),
        };
        let words: Vec<String> = self.0.iter().map(word).collect();
        let (mark, means) = match (
            self.can("lookup") && self.can("get"),
            self.can("put"),
            self.all(),
        ) {
            (_, _, true) => (Mark::Good, "all operations of a store are allowed"),
            (true, true, _) => (
                Mark::Limited,
                "a store can share KV; damaged or dropped objects stay until the server expires them",
            ),
            (true, false, _) => {
                (Mark::Limited, "a store can read objects of others, but not write")
            }
            (false, true, _) => {
                (Mark::Limited, "a store can write objects for others, but not read any")
            }
            (false, false, _) => (Mark::Absent, "a store can neither read nor write objects"),
        };
        Finding::new("permissions", mark, words.join("; "), means)
    }
}

/// Latencies of single requests in seconds, sorted.
struct Latencies(Vec<f64>);

impl Latencies {
    fn at(&self, part: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        self.0.get((last as f64 * part).round() as usize).copied().unwrap_or(f64::NAN)
    }

    fn words(&self) -> String {
        format!(
            "p50 {:.2} ms, p99 {:.2} ms of {} requests",
            self.at(0.5) * 1e3,
            self.at(0.99) * 1e3,
            self.0.len()
        )
    }
}

/// The measurements.
struct Measured {
    lookups: Latencies,
    gets: Latencies,
    /// Bytes a second of batches of each size: of puts and of gets.
    rates: [(f64, f64); 2],
}

impl Measured {
    fn findings(&self, opened: &Opened) -> Vec<Finding> {
        let words = |(put, get): (f64, f64)| {
            format!("put {}/s, get {}/s", human(put as u64), human(get as u64))
        };
        let mut all = vec![
            Finding::new(
                "lookup",
                Mark::Good,
                self.lookups.words(),
                "lookups of one object, one at a time",
            ),
            Finding::new("get of 256 KiB", Mark::Good, self.gets.words(), "gets, one at a time"),
        ];
        let names = ["256 KiB, batched", "1 MiB, batched"];
        for (name, &rates) in names.into_iter().zip(&self.rates) {
            let means = format!("one connection, {} a batch", human(BATCH_BYTES as u64));
            all.push(Finding::new(name, Mark::Good, words(rates), &means));
        }
        all.push(self.defaults(opened));
        let tokens = self.rates[1].1 / LARGE_TOKEN_BYTES;
        all.push(Finding::new(
            "plans",
            Mark::Good,
            format!("{tokens:.0} tokens a second for a model with 320 KiB of KV a token"),
            "an engine that computes faster recomputes instead: plans choose the faster way",
        ));
        all
    }

    /// Whether the default timeout of a store fits.
    fn defaults(&self, opened: &Opened) -> Finding {
        let config = &opened.config;
        let most = (config.batch as u64).saturating_mul(config.object_bytes);
        // The last object of a batch is not split.
        let bytes = most.min(Config::default().batch_bytes + config.object_bytes);
        let (put, get) = self.rates[1];
        let takes = |rate: f64| self.lookups.at(0.99) + bytes as f64 / rate.max(1.0);
        let longest = takes(put.min(get)) * 1e3;
        let timeout = config.timeout_ns as f64 / 1e6;
        let value =
            format!("a batch of {} takes {longest:.0} ms, timeout={timeout:.0}", human(bytes),);
        if longest * 2.0 <= timeout {
            let means = "requests of a store take at most half of the timeout";
            return Finding::new("defaults", Mark::Good, value, means);
        }
        let means = format!(
            "requests may time out: set timeout={:.0}",
            (longest * 3.0 / 50.0).ceil() * 50.0
        );
        Finding::new("defaults", Mark::Limited, value, &means)
    }
}

/// Tests a remote under random names.
struct Doctor {
    client: Box<dyn Client>,
    clock: Clock,
    hash: [u8; HASH_BYTES],
    next: u64,
    /// Objects that must be removed again.
    stored: Vec<Name>,
}

impl Doctor {
    fn new(client: Box<dyn Client>, clock: Clock) -> Outcome<Doctor> {
        Ok(Doctor { client, clock, hash: random_bytes()?, next: 0, stored: Vec::new() })
    }

    fn name(&mut self) -> Name {
        self.next += 1;
        let mut hash = self.hash;
        hash[..8].iter_mut().zip(self.next.to_le_bytes()).for_each(|(byte, n)| *byte ^= n);
        Name { tenant: 0, hash }
    }

    fn deadline_ns(&self) -> u64 {
        self.clock.now_ns() + TIMEOUT_NS
    }

    /// Puts objects with the same bytes. They are removed later even if the put failed.
    fn put(&mut self, names: &[Name], bytes: &[u8]) -> Result<(), RemoteError> {
        let mut puts = Puts::default();
        for name in names {
            puts.object(*name);
            puts.part(bytes.as_ptr(), bytes.len() as u64);
        }
        let deadline_ns = self.deadline_ns();
        self.stored.extend(names);
        // SAFETY: the bytes outlive the call, and no code writes to them.
        unsafe { self.client.put(&mut puts, deadline_ns) };
        puts.items.iter().try_for_each(|put| put.result.map(|_| ()))
    }

    /// Gets objects into consecutive parts of `room`; each must have the length of its part.
    fn get(&mut self, names: &[Name], room: &mut [u8]) -> Result<(), RemoteError> {
        let each = room.len() / names.len().max(1);
        let mut gets = Gets::default();
        for (name, part) in names.iter().zip(room.chunks_mut(each.max(1))) {
            gets.object(*name, 0);
            gets.part(part.as_mut_ptr(), part.len() as u64);
        }
        let deadline_ns = self.deadline_ns();
        // SAFETY: `room` outlives the call and is borrowed exclusively.
        unsafe { self.client.get(&mut gets, deadline_ns) };
        gets.items.iter().try_for_each(|get| match get.result? == each as u64 {
            true => Ok(()),
            false => Err(RemoteError::Malformed),
        })
    }

    fn lookup(&mut self, name: Name) -> Result<u64, RemoteError> {
        let mut lookups = Queries::default();
        lookups.name(name);
        let deadline_ns = self.deadline_ns();
        self.client.lookup(&mut lookups, deadline_ns);
        lookups.items[0].result
    }

    fn remove(&mut self, names: &[Name]) -> Result<(), RemoteError> {
        let mut lookups = Queries::default();
        names.iter().for_each(|name| lookups.name(*name));
        let deadline_ns = self.deadline_ns();
        self.client.remove(&mut lookups, deadline_ns);
        lookups.items.iter().try_for_each(|lookup| lookup.result.map(|_| ()))
    }

    /// Tries each operation once. After a failed put, "absent" is a valid answer of the others.
    fn permissions(&mut self) -> Permissions {
        const BYTES: usize = 4096;
        let (name, mut room) = (self.name(), vec![0; BYTES]);
        let bytes: Vec<u8> = (0..BYTES).map(|i| (i * 7) as u8).collect();
        let put = self.put(&[name], &bytes);
        let or_absent = |result, is_right: bool| match result {
            Err(RemoteError::Absent) if put.is_err() => Ok(()),
            Ok(()) if !is_right => Err(RemoteError::Malformed),
            result => result,
        };
        let length = self.lookup(name);
        let lookup = or_absent(length.map(|_| ()), length == Ok(BYTES as u64));
        let got = self.get(&[name], &mut room);
        let get = or_absent(got, room == bytes);
        let removed = self.remove(&[name]);
        let is_gone = lookup.is_err() || self.lookup(name) == Err(RemoteError::Absent);
        let remove = or_absent(removed, is_gone);
        if remove.is_ok() || put.is_err() {
            self.stored.clear();
        }
        Permissions(vec![("put", put), ("get", get), ("lookup", lookup), ("remove", remove)])
    }

    fn measure(&mut self) -> Result<Measured, RemoteError> {
        let stock = vec![0xA5; SIZES[1]];
        let name = self.name();
        self.put(&[name], &stock[..SIZES[0]])?;
        let lookups = self.latencies(|doctor| doctor.lookup(name).map(|_| ()))?;
        let mut room = vec![0; SIZES[0]];
        let gets = self.latencies(|doctor| doctor.get(&[name], &mut room))?;
        let [small, large] = SIZES.map(|bytes| self.rate(&stock[..bytes]));
        Ok(Measured { lookups, gets, rates: [small?, large?] })
    }

    /// Measures single requests, one after the other.
    fn latencies(
        &mut self,
        mut request: impl FnMut(&mut Doctor) -> Result<(), RemoteError>,
    ) -> Result<Latencies, RemoteError> {
        let (since, mut latencies) = (Instant::now(), Vec::new());
        while latencies.is_empty() || latencies.len() < SINGLE && since.elapsed() < MEASURE_TIME {
            let start = Instant::now();
            request(self)?;
            latencies.push(start.elapsed().as_secs_f64());
        }
        latencies.sort_by(f64::total_cmp);
        Ok(Latencies(latencies))
    }

    /// Measures puts and gets of batches under fresh names, in bytes a second.
    fn rate(&mut self, bytes: &[u8]) -> Result<(f64, f64), RemoteError> {
        let each = BATCH_BYTES / bytes.len();
        let (since, mut batches) = (Instant::now(), Vec::new());
        while batches.is_empty()
            || batches.len() * BATCH_BYTES < STOCK_BYTES && since.elapsed() < MEASURE_TIME
        {
            let names: Vec<Name> = (0..each).map(|_| self.name()).collect();
            self.put(&names, bytes)?;
            batches.push(names);
        }
        let rate = |count: usize, since: Instant| {
            (count * BATCH_BYTES) as f64 / since.elapsed().as_secs_f64().max(1e-9)
        };
        let put = rate(batches.len(), since);
        let mut room = vec![0; BATCH_BYTES];
        let (since, mut count) = (Instant::now(), 0);
        for names in &batches {
            self.get(names, &mut room)?;
            count += 1;
            if since.elapsed() >= MEASURE_TIME {
                break;
            }
        }
        Ok((put, rate(count, since)))
    }

    /// Removes all objects; returns how many may be left.
    fn clean(&mut self) -> usize {
        let stored = std::mem::take(&mut self.stored);
        stored.chunks(64).filter(|names| self.remove(names).is_err()).map(<[Name]>::len).sum()
    }
}
