//! `kvtier doctor --remote`: who is there, what may be done there, how long that takes, and what
//! a store would make of it. All that is put there for that is taken away again.

use std::time::{Duration, Instant};

use kvtier::base::clock::Clock;
use kvtier::base::machine::random_bytes;
use kvtier::base::status::{Error, Status};
use kvtier::store::state::Config;
use kvtier::tier::remote::name::HASH_BYTES;
use kvtier::tier::remote::{Client, Gets, Name, Puts, Queries, RemoteError};

use super::{Finding, Mark};
use crate::human;
use crate::remote::{Opened, Place, explain};

/// How long a request may take before it is given up.
const PATIENCE_NS: u64 = 10_000_000_000;
/// How long each thing is measured.
const WHILE: Duration = Duration::from_millis(500);
/// Requests after which there are enough of them, one at a time.
const SINGLE: usize = 200;
/// Bytes that are put of each size, at most.
const STOCK_BYTES: usize = 64 << 20;
/// Bytes of a batch.
const BATCH_BYTES: usize = 4 << 20;
/// Sizes of objects.
const SIZES: [usize; 2] = [256 << 10, 1 << 20];
/// Bytes of a token of a model of 70B with grouped queries, in 16 bits.
const LARGE_TOKEN_BYTES: f64 = 327_680.0;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Prints the findings; what cannot be used at all is an error.
pub fn run(text: &str, json: bool) -> Outcome<()> {
    let place = Place::read(text).map_err(explain)?;
    let clock = Clock::real();
    let opened = match place.open(&clock) {
        Ok(opened) => opened,
        Err(error) => {
            nobody(&error).print(json);
            return Err("the remote cannot be used".into());
        }
    };
    who(&opened).print(json);
    let mut doctor = Doctor::new(opened.remote.client(), clock)?;
    let may = doctor.permissions();
    may.finding().print(json);
    let measured = match may.all() {
        true => doctor.measure(),
        false => Err("not measured: what that takes is forbidden".to_string()),
    };
    let left = doctor.clean();
    match &measured {
        Ok(measured) => measured.findings(&opened).iter().for_each(|one| one.print(json)),
        Err(why) => {
            Finding::new("latency", Mark::Absent, why, "put, get, ask and remove are needed")
                .print(json)
        }
    }
    if left > 0 {
        return Err(format!("{left} objects could not be taken away again").into());
    }
    match may.is_of_use() && (measured.is_ok() || !may.all()) {
        true => Ok(()),
        false => Err("the remote cannot be used".into()),
    }
}

/// What it means that it was not opened.
fn nobody(error: &Error) -> Finding {
    let message = error.message();
    let is_refused = ["NOAUTH", "WRONGPASS", "forbids"].iter().any(|word| message.contains(word));
    let means = match error.status() {
        _ if is_refused => "the credentials are wrong, or missing",
        Status::Spec | Status::Unsupported | Status::Limit | Status::Invalid => {
            "it is not described as a remote is: nobody was asked"
        }
        Status::Timeout => {
            "nobody answered in time: is it there, and is nothing between that drops requests?"
        }
        Status::Again => "it answers, and cannot do anything now: it loads, or is without a leader",
        Status::Corrupt => "somebody answers, and not as such a server does",
        _ => "nobody is there, or it cannot be used as it is",
    };
    Finding::new("remote", Mark::Absent, message, means)
}

fn who(opened: &Opened) -> Finding {
    let (mark, means) = match opened.server.warnings.as_slice() {
        [] => (Mark::Good, "it answers, and there is nothing to be said against it".to_string()),
        warnings => (Mark::Limited, warnings.join("; ")),
    };
    Finding::new("remote", mark, opened.server.words.clone(), &means)
}

/// What came of each thing that a store does.
struct May(Vec<(&'static str, Result<(), RemoteError>)>);

impl May {
    fn all(&self) -> bool {
        self.0.iter().all(|(_, result)| result.is_ok())
    }

    fn is_of_use(&self) -> bool {
        self.can("put") || self.can("ask") && self.can("get")
    }

    fn can(&self, what: &str) -> bool {
        self.0.iter().any(|(name, result)| *name == what && result.is_ok())
    }

    fn finding(&self) -> Finding {
        let word = |(name, result): &(&str, Result<(), RemoteError>)| match result {
            Ok(()) => format!("{name}: yes"),
            Err(trouble) => format!("{name}: no, {}", Error::from(*trouble).message()),
        };
        let words: Vec<String> = self.0.iter().map(word).collect();
        let (mark, means) = match (self.can("ask") && self.can("get"), self.can("put"), self.all())
        {
            (_, _, true) => (Mark::Good, "all that a store does is allowed"),
            (true, true, _) => (
                Mark::Limited,
                "a store can share; what is damaged or dropped stays there until the server lets it go",
            ),
            (true, false, _) => {
                (Mark::Limited, "a store finds what others put there, and adds nothing")
            }
            (false, true, _) => {
                (Mark::Limited, "a store puts objects there and finds none: of use to others")
            }
            (false, false, _) => (Mark::Absent, "a store has no use of it"),
        };
        Finding::new("permissions", mark, words.join("; "), means)
    }
}

/// Time of single requests, in seconds.
struct Times(Vec<f64>);

impl Times {
    fn at(&self, part: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        self.0.get((last as f64 * part).round() as usize).copied().unwrap_or(f64::NAN)
    }

    fn words(&self) -> String {
        format!(
            "p50 {:.2} ms, p99 {:.2} ms of {}",
            self.at(0.5) * 1e3,
            self.at(0.99) * 1e3,
            self.0.len()
        )
    }
}

/// What was measured.
struct Measured {
    queries: Times,
    gets: Times,
    /// Bytes a second of batches of each size: put, and got.
    rates: [(f64, f64); 2],
}

impl Measured {
    fn findings(&self, opened: &Opened) -> Vec<Finding> {
        let words = |(put, get): (f64, f64)| {
            format!("put {}/s, get {}/s", human(put as u64), human(get as u64))
        };
        let mut all = vec![
            Finding::new(
                "ask",
                Mark::Good,
                self.queries.words(),
                "whether an object is there, one at a time",
            ),
            Finding::new("get of 256 KiB", Mark::Good, self.gets.words(), "one at a time"),
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
            format!("{tokens:.0} tokens a second of a model with 320 KiB a token"),
            "an engine that computes faster than that computes: plans load only what is sooner there",
        ));
        all
    }

    /// Whether requests of a store end in time.
    fn defaults(&self, opened: &Opened) -> Finding {
        let config = &opened.config;
        let most = (config.batch as u64).saturating_mul(config.object_bytes);
        // The last object is taken whole.
        let bytes = most.min(Config::default().batch_bytes + config.object_bytes);
        let (put, get) = self.rates[1];
        let takes = |rate: f64| self.queries.at(0.99) + bytes as f64 / rate.max(1.0);
        let longest = takes(put.min(get)) * 1e3;
        let timeout = config.timeout_ns as f64 / 1e6;
        let value =
            format!("a batch of {} takes {longest:.0} ms, timeout={timeout:.0}", human(bytes),);
        if longest * 2.0 <= timeout {
            let means = "requests end in time, with as much again to spare: objects of \
                         the size that the remote likes";
            return Finding::new("defaults", Mark::Good, value, means);
        }
        let means = format!(
            "requests may be given up before they end: timeout={:.0} would do",
            (longest * 3.0 / 50.0).ceil() * 50.0
        );
        Finding::new("defaults", Mark::Limited, value, &means)
    }
}

/// Tries a remote out, under names that nobody else has.
struct Doctor {
    client: Box<dyn Client>,
    clock: Clock,
    hash: [u8; HASH_BYTES],
    next: u64,
    /// What was put, and has to go.
    there: Vec<Name>,
}

impl Doctor {
    fn new(client: Box<dyn Client>, clock: Clock) -> Outcome<Doctor> {
        Ok(Doctor { client, clock, hash: random_bytes()?, next: 0, there: Vec::new() })
    }

    fn name(&mut self) -> Name {
        self.next += 1;
        let mut hash = self.hash;
        hash[..8].iter_mut().zip(self.next.to_le_bytes()).for_each(|(byte, n)| *byte ^= n);
        Name { tenant: 0, hash }
    }

    fn deadline_ns(&self) -> u64 {
        self.clock.now_ns() + PATIENCE_NS
    }

    /// Puts objects with the same bytes; they are to go even if nobody said that they are there.
    fn put(&mut self, names: &[Name], bytes: &[u8]) -> Result<(), RemoteError> {
        let mut puts = Puts::default();
        for name in names {
            puts.object(*name);
            puts.part(bytes.as_ptr(), bytes.len() as u64);
        }
        let deadline_ns = self.deadline_ns();
        self.there.extend(names);
        // SAFETY: the bytes live, and nobody writes to them.
        unsafe { self.client.put(&mut puts, deadline_ns) };
        puts.items.iter().try_for_each(|put| put.result.map(|_| ()))
    }

    /// Gets objects one behind the other; each must be as long as its room.
    fn get(&mut self, names: &[Name], room: &mut [u8]) -> Result<(), RemoteError> {
        let each = room.len() / names.len().max(1);
        let mut gets = Gets::default();
        for (name, part) in names.iter().zip(room.chunks_mut(each.max(1))) {
            gets.object(*name, 0);
            gets.part(part.as_mut_ptr(), part.len() as u64);
        }
        let deadline_ns = self.deadline_ns();
        // SAFETY: the room lives, and nobody else has it.
        unsafe { self.client.get(&mut gets, deadline_ns) };
        gets.items.iter().try_for_each(|get| match get.result? == each as u64 {
            true => Ok(()),
            false => Err(RemoteError::Malformed),
        })
    }

    fn ask(&mut self, name: Name) -> Result<u64, RemoteError> {
        let mut queries = Queries::default();
        queries.name(name);
        let deadline_ns = self.deadline_ns();
        self.client.lookup(&mut queries, deadline_ns);
        queries.items[0].result
    }

    fn remove(&mut self, names: &[Name]) -> Result<(), RemoteError> {
        let mut queries = Queries::default();
        names.iter().for_each(|name| queries.name(*name));
        let deadline_ns = self.deadline_ns();
        self.client.remove(&mut queries, deadline_ns);
        queries.items.iter().try_for_each(|ask| ask.result.map(|_| ()))
    }

    /// Does each thing once. What was not put is not there, which is an answer, too.
    fn permissions(&mut self) -> May {
        const BYTES: usize = 4096;
        let (name, mut room) = (self.name(), vec![0; BYTES]);
        let bytes: Vec<u8> = (0..BYTES).map(|i| (i * 7) as u8).collect();
        let put = self.put(&[name], &bytes);
        let or_absent = |result, is_right: bool| match result {
            Err(RemoteError::Absent) if put.is_err() => Ok(()),
            Ok(()) if !is_right => Err(RemoteError::Malformed),
            result => result,
        };
        let length = self.ask(name);
        let ask = or_absent(length.map(|_| ()), length == Ok(BYTES as u64));
        let got = self.get(&[name], &mut room);
        let get = or_absent(got, room == bytes);
        let removed = self.remove(&[name]);
        let is_gone = ask.is_err() || self.ask(name) == Err(RemoteError::Absent);
        let remove = or_absent(removed, is_gone);
        if remove.is_ok() || put.is_err() {
            self.there.clear();
        }
        May(vec![("put", put), ("get", get), ("ask", ask), ("remove", remove)])
    }

    fn measure(&mut self) -> Result<Measured, String> {
        let said =
            |trouble: RemoteError| format!("not measured: {}", Error::from(trouble).message());
        let stock = vec![0xA5; SIZES[1]];
        let name = self.name();
        self.put(&[name], &stock[..SIZES[0]]).map_err(said)?;
        let queries = self.times(|doctor| doctor.ask(name).map(|_| ())).map_err(said)?;
        let mut room = vec![0; SIZES[0]];
        let gets = self.times(|doctor| doctor.get(&[name], &mut room)).map_err(said)?;
        let rates = SIZES.map(|bytes| self.rate(&stock[..bytes]));
        let [small, large] = rates;
        Ok(Measured { queries, gets, rates: [small.map_err(said)?, large.map_err(said)?] })
    }

    /// One request after the other.
    fn times(
        &mut self,
        mut one: impl FnMut(&mut Doctor) -> Result<(), RemoteError>,
    ) -> Result<Times, RemoteError> {
        let (since, mut times) = (Instant::now(), Vec::new());
        while times.is_empty() || times.len() < SINGLE && since.elapsed() < WHILE {
            let start = Instant::now();
            one(self)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(Times(times))
    }

    /// Bytes a second of batches: put under names of their own, and got.
    fn rate(&mut self, bytes: &[u8]) -> Result<(f64, f64), RemoteError> {
        let each = BATCH_BYTES / bytes.len();
        let (since, mut batches) = (Instant::now(), Vec::new());
        while batches.is_empty()
            || batches.len() * BATCH_BYTES < STOCK_BYTES && since.elapsed() < WHILE
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
            if since.elapsed() >= WHILE {
                break;
            }
        }
        Ok((put, rate(count, since)))
    }

    /// Takes away what was put; how many may be left.
    fn clean(&mut self) -> usize {
        let there = std::mem::take(&mut self.there);
        there.chunks(64).filter(|names| self.remove(names).is_err()).map(<[Name]>::len).sum()
    }
}
