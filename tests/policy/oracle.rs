//! Misses compared with libCacheSim on the same requests, for objects of one unit. Implementations
//! of one definition must be equal; where they differ, the reason stands beside the tolerance.

use std::collections::HashMap;
use std::path::Path;

use kvtier::meta::objects::Facts;
use kvtier::policy::Hint;
use kvtier::policy::evictor::{Evictor, NewObject, Options, RequestContext};

/// xorshift64*, as in libcachesim_misses.py.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
    fn below(&mut self, limit: u64) -> u64 {
        ((self.next() >> 32) * limit) >> 32
    }
}

/// Weights 2^30 / (id + 1) as a table of sums.
struct Zipf(Vec<u64>);

impl Zipf {
    fn new(n: u64) -> Zipf {
        let mut total = 0;
        let sums = (0..n).map(|i| {
            total += (1 << 30) / (i + 1);
            total
        });
        Zipf(sums.collect())
    }
    fn next(&self, random: &mut Random) -> u64 {
        let total = *self.0.last().expect("some ids");
        let at = (random.next() >> 16) % total;
        self.0.partition_point(|&end| end <= at) as u64
    }
}

fn sequence(name: &str, seed: u64, requests: u64) -> Vec<u64> {
    let mut random = Random(seed);
    match name {
        "zipf" => {
            let table = Zipf::new(4000);
            (0..requests).map(|_| table.next(&mut random)).collect()
        }
        "mixed" => {
            let (table, mut fresh) = (Zipf::new(2000), 1_000_000);
            let mut one = |i: u64| match i / 500 % 4 {
                0 => 10_000 + i % 300,
                2 => {
                    fresh += 1;
                    fresh - 1
                }
                phase => table.next(&mut random) + 500 * (phase / 2),
            };
            (0..requests).map(&mut one).collect()
        }
        "drift" => {
            let table = Zipf::new(1500);
            let mut one = |i: u64| match random.below(5) {
                0 => 2_000_000 + i,
                _ => table.next(&mut random) + i / 20,
            };
            (0..requests).map(&mut one).collect()
        }
        _ => panic!("no sequence is called {name}"),
    }
}

/// FNV-1a over the ids.
fn checksum(ids: &[u64]) -> u64 {
    let step = |sum: u64, id: &u64| (sum ^ id).wrapping_mul(0x0000_0100_0000_01B3);
    ids.iter().fold(0xCBF2_9CE4_8422_2325, step)
}

fn next_uses(ids: &[u64]) -> Vec<i64> {
    let mut seen = HashMap::new();
    let mut out = vec![i64::MAX; ids.len()];
    for (at, &id) in ids.iter().enumerate().rev() {
        if let Some(next) = seen.insert(id, at) {
            out[at] = next as i64 + 1;
        }
    }
    out
}

/// Tolerated differences of the misses, as shares of libCacheSim's.
struct Tolerance {
    fewer: f64,
    more: f64,
}

const EXACT: Tolerance = Tolerance { fewer: 0.0, more: 0.0 };

/// The spec that corresponds to libCacheSim's policy, and the tolerance.
fn ours(policy: &str, size: u64) -> (&str, Tolerance) {
    match policy {
        "lfu" => ("lfu(aged=false)", EXACT),
        // If four segments do not divide the size, up to three objects in the lowest segment exceed
        // its share. libCacheSim then evicts on a hit. An evictor evicts only on request.
        "slru" if size & 3 != 0 => ("slru(segments=4)", Tolerance { fewer: 0.002, more: 0.002 }),
        "slru" => ("slru(segments=4)", EXACT),
        // Not the same algorithm. libCacheSim counts inserts, departures from the
        // window and hits in the main part; here every lookup counts once, as in
        // the paper. It halves after 32 lookups an object, here 10. Below 100
        // objects its window has no room and it admits nothing. So: no worse.
        "wtinylfu" => ("wtinylfu", Tolerance { fewer: 1.0, more: 0.05 }),
        same => (same, EXACT),
    }
}

/// Number of misses of `spec` with space for `size` objects.
fn misses(spec: &str, size: u64, ids: &[u64], nexts: &[i64]) -> u64 {
    let options = Options {
        max_objects: size as usize,
        capacity_units: size,
        holes: true,
        remember: 0,
        ..Options::default()
    };
    let mut evictor = Evictor::open(spec, &options).expect("a known policy");
    let (context, foresight) = (RequestContext::default(), spec == "belady");
    let (mut count, mut out) = (0, Vec::new());
    for (at, &id) in ids.iter().enumerate() {
        let now = at as i64 + 1;
        if evictor.lookup(now, &context, &[id], &mut []).expect("a time") == 1 {
            if foresight {
                let hint = Hint { next_use: Some((nexts[at], 1.0)), ..Hint::default() };
                evictor.hint(now, &context, &[id], &hint).expect("a time");
            }
            continue;
        }
        count += 1;
        while evictor.objects().units() + 1 > size {
            out.clear();
            let outcome = evictor.evict(now, 1, &mut out).expect("a time");
            assert_eq!(outcome.shortfall_units, 0, "{spec} finds no victim");
        }
        let facts = Facts { next_use_ns: nexts[at], ..Facts::default() };
        let new = NewObject { id, units: 1, facts, ..NewObject::default() };
        evictor.insert(now, &context, &[new]).expect("room");
    }
    evictor.check().expect("sound");
    count
}

/// Compares the rows of a file. `ids` returns the sequence of a row. Returns the number of rows.
fn compare(text: &str, ids: impl Fn(&[&str]) -> Vec<u64>) -> usize {
    let (mut rows, mut wrong) = (0, Vec::new());
    let (mut sequence, mut nexts) = (Vec::new(), Vec::new());
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["misses", name, policy, size, want] => {
                let (size, want): (u64, u64) = (size.parse().expect(""), want.parse().expect(""));
                let (spec, may) = ours(policy, size);
                let got = misses(spec, size, &sequence, &nexts);
                let off = (got as f64 - want as f64) / want as f64;
                let is_outside = off > may.more || -off > may.fewer;
                if got != want {
                    println!("{name} {spec} {size}: {got} misses, libCacheSim {want}");
                }
                if is_outside {
                    wrong.push(format!("{name} {spec} {size}: {got}, not {want}"));
                }
                rows += 1;
            }
            _ => {
                sequence = ids(&words);
                nexts = next_uses(&sequence);
                let sum = format!("{:016x}", checksum(&sequence));
                assert_eq!(Some(&sum.as_str()), words.last(), "{line}");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    rows
}

#[test]
fn misses_match_libcachesim() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let golden = root.join("ffi-tests/oracles/libcachesim_misses.txt");
    let text = std::fs::read_to_string(golden).expect("the golden file");
    let rows = compare(&text, |words| {
        let number = |i: usize| words[i].parse().expect("a number");
        sequence(words[1], number(2), number(3))
    });
    assert!(rows >= 100, "{rows} rows");
}

/// The block sequences of real traces, as written by `libcachesim_misses.py --traces`.
#[test]
fn misses_on_traces_match_libcachesim() {
    let Some(folder) = std::env::var_os("KVTIER_LIBCACHESIM_DIR") else { return };
    let folder = Path::new(&folder);
    let text = std::fs::read_to_string(folder.join("misses.txt")).expect("misses of traces");
    compare(&text, |words| {
        let file = std::fs::read_to_string(folder.join(format!("{}.ids", words[1])));
        let text = file.expect("the ids of a trace");
        text.lines().map(|id| id.parse().expect("an id")).collect()
    });
}
