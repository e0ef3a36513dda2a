//! Group `lab`: requests of a trace that one thread replays in a second.
//!
//! `KVTIER_BENCH_TRACE` names a file of libCacheSim's oracleGeneral records and
//! `KVTIER_BENCH_OBJECTS` the capacity, `KVTIER_BENCH_SPEC` the policy (`lru`) and
//! `KVTIER_BENCH_WARM` how many records are served before the clock starts;
//! `ffi-tests/oracles/throughput.py` and `cache.py` set them, and have libCacheSim
//! serve the same file in turn.

use std::ops::Range;

use kvtier::policy::evict::Victim;
use kvtier::policy::evictor::{Evictor, NewObject, Options, RequestContext};

use super::fixtures::thread_ns;
use super::peers::{Zipf, gather_new};
use super::{Bar, median};

/// Seconds, id, size, next use: 4, 8, 4 and 8 bytes.
const RECORD: usize = 24;
const BATCH: usize = 64;
/// Requests, after those of the present call, whose memory is prefetched.
const AHEAD: usize = 16;

fn record(bytes: &[u8]) -> u64 {
    bytes.get(4..12).and_then(|id| id.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// The trace, the policy and its capacity.
struct Source {
    records: Vec<u8>,
    objects: usize,
    spec: String,
    /// Records of the warm-up.
    warm: usize,
}

impl Source {
    /// The ids of records, as far as there are such.
    fn ids(&self, records: Range<usize>) -> impl Iterator<Item = u64> {
        let end = (records.end * RECORD).min(self.records.len());
        let bytes = self.records.get(records.start * RECORD..end).unwrap_or_default();
        bytes.chunks_exact(RECORD).map(record)
    }
}

/// Replays every record; returns the misses and the nanoseconds after the warm-up.
fn replay(source: &Source, batch: usize) -> Result<(usize, f64), String> {
    let Source { records, objects, spec, warm } = source;
    let objects = *objects;
    let options = Options {
        max_objects: objects,
        capacity_units: objects as u64,
        holes: true,
        remember: 0,
        ..Options::default()
    };
    let say = |error: kvtier::base::status::Error| error.to_string();
    let mut evictor = Evictor::open(spec, &options).map_err(say)?;
    let (context, mut now, mut misses) = (RequestContext::default(), 1 << 40, 0);
    let (mut ids, mut found) = (Vec::<u64>::with_capacity(batch), vec![0u8; batch]);
    let (mut new, mut victims) = (Vec::<NewObject>::new(), Vec::<Victim>::new());
    let mut start = thread_ns();
    for (number, records) in records.chunks(batch * RECORD).enumerate() {
        if number > 0 && number * batch <= *warm {
            (start, misses) = (thread_ns(), 0);
        }
        now += 4 * batch as i64;
        // The trace is known: the memory of later requests arrives meanwhile.
        let next = (number + 1) * batch + AHEAD.saturating_sub(batch);
        source.ids(next..next + batch).for_each(|id| evictor.prefetch(&[id]));
        ids.clear();
        ids.extend(records.chunks_exact(RECORD).map(record));
        let found = &mut found[..ids.len()];
        evictor.lookup(now, &context, &ids, found).map_err(say)?;
        gather_new(&ids, found, &mut new);
        if new.is_empty() {
            continue;
        }
        misses += new.len();
        let over = (evictor.objects().len() + new.len()).saturating_sub(objects);
        if over > 0 {
            victims.clear();
            evictor.evict(now, over as u64, &mut victims).map_err(say)?;
        }
        evictor.insert(now, &context, &new).map_err(say)?;
    }
    Ok((misses, thread_ns() - start))
}

fn number(name: &str, usual: usize) -> Result<usize, String> {
    match std::env::var(name) {
        Ok(text) => text.parse().map_err(|_| format!("{name}={text} is no number")),
        Err(_) => Ok(usual),
    }
}

/// The requests to replay, and the size of the cache.
fn source(quick: bool) -> Result<Source, String> {
    let objects = number("KVTIER_BENCH_OBJECTS", 100_000)?.max(BATCH);
    let warm = number("KVTIER_BENCH_WARM", 0)?;
    let spec = std::env::var("KVTIER_BENCH_SPEC").unwrap_or_else(|_| "lru".to_string());
    let Some(path) = std::env::var_os("KVTIER_BENCH_TRACE") else {
        let ids = Zipf::new(1_000_000).draw(if quick { 1_000_000 } else { 4_000_000 });
        let records = ids.iter().flat_map(|id| {
            let mut record = [0; RECORD];
            record[4..12].copy_from_slice(&id.to_le_bytes());
            record
        });
        return Ok(Source { records: records.collect(), objects, spec, warm: 0 });
    };
    let mut bytes = std::fs::read(&path)
        .map_err(|e| format!("{}: {e}", std::path::Path::new(&path).display()))?;
    bytes.truncate(bytes.len() / RECORD * RECORD);
    if warm >= bytes.len() / RECORD {
        return Err(format!("KVTIER_BENCH_WARM={warm} leaves nothing to be timed"));
    }
    Ok(Source { records: bytes, objects, spec, warm })
}

fn measure(bar: &mut Bar, source: &Source, batch: usize, rounds: u32) -> Result<(), String> {
    let (mut times, mut misses) = (Vec::new(), 0);
    for _ in 0..rounds {
        let (missed, took) = replay(source, batch)?;
        misses = missed;
        times.push(took);
    }
    let requests = source.records.len() / RECORD - source.warm;
    bar.value = Some(requests as f64 * 1e3 / median(&mut times));
    bar.note = format!("(of {requests} requests {misses} missed)");
    if source.spec != "lru" {
        bar.note = format!("{}: {}", source.spec, bar.note);
    }
    Ok(())
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let source = source(quick);
    let of = |(name, batch): (&'static str, usize)| {
        let mut bar =
            Bar::higher(name, "M/s").baseline("libCacheSim: by ffi-tests/oracles/throughput.py");
        let done = source.as_ref().map_err(String::clone);
        let rounds = if quick { 3 } else { 7 };
        if let Err(why) = done.and_then(|source| measure(&mut bar, source, batch, rounds)) {
            bar.note = why;
        }
        bar
    };
    [("replay_lru", 1), ("replay_lru_by_64", BATCH)].map(of).into()
}
