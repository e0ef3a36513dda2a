//! Group `policy`: the cost of choosing victims, in the caller's tables and among a million objects
//! of an evictor; the cost of a put beside that with `lru`; and how costs grow with the number of
//! objects.

use std::hint::black_box;
use std::time::Instant;

use kvtier::meta::objects::Facts;
use kvtier::policy::batch::{SelectOptions, Selection};
use kvtier::policy::columns::Columns;
use kvtier::policy::evict::Victim;
use kvtier::policy::evictor::{Evictor, NewObject, Options, RequestContext};
use kvtier::policy::registry::ENTRIES;

use super::fixtures::thread_ns;
use super::{Bar, allocations, median};

/// Policies made of lists only, which have the tightest goals.
const LISTS: [&str; 8] = ["2q", "arc", "fifo", "lru", "s3fifo", "sieve", "slru", "wtinylfu"];
/// Policies without a goal: `belady` looks ahead, the others call the caller or run copies.
const EXEMPT: [&str; 3] = ["auto", "belady", "custom"];
/// Policies that keep state of unknown rows.
const STATEFUL: [&str; 1] = ["horizon"];
/// One policy of each structure: a list, queues with ghosts, a heap, cohorts.
const STRUCTURES: [&str; 4] = ["lru", "s3fifo", "gdsf", "horizon"];
const MILLION: u64 = 1_000_000;
/// Objects of a session of [`Puts`].
const PATH: u64 = 64;
/// Objects in the tables of [`churn`].
const CHURN_OBJECTS: u64 = 20_000;

/// A name with static lifetime.
fn named(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

struct Table {
    ids: Vec<u64>,
    blocks: Vec<u64>,
    created: Vec<i64>,
    last: Vec<i64>,
    count: Vec<u64>,
    priority: Vec<u8>,
    lifetime: Vec<i64>,
    length: Vec<u64>,
    max_length: Vec<u64>,
}

impl Table {
    fn random(rows: usize) -> Table {
        let mut seed = 88_172_645_463_325_252;
        let mut column =
            |below: u64| -> Vec<u64> { (0..rows).map(|_| random(&mut seed) % below).collect() };
        let signed = |column: Vec<u64>| column.into_iter().map(|x| x as i64).collect();
        let created = column(1_000_000_000_000);
        let ages = column(1_000_000_000);
        Table {
            ids: column(u64::MAX),
            blocks: column(64).into_iter().map(|b| b + 1).collect(),
            last: created.iter().zip(ages).map(|(c, a)| (c + a) as i64).collect(),
            created: signed(created),
            count: column(100),
            priority: column(3).into_iter().map(|p| p as u8).collect(),
            lifetime: signed(column(60_000_000_000)),
            length: column(8192),
            max_length: column(16_384).into_iter().map(|n| n + 8192).collect(),
        }
    }

    fn columns(&self) -> Columns<'_> {
        Columns {
            ids: &self.ids,
            blocks: &self.blocks,
            created_ns: &self.created,
            last_access_ns: &self.last,
            count: &self.count,
            priority: &self.priority,
            lifetime_ns: &self.lifetime,
            length: &self.length,
            max_length: &self.max_length,
            ..Columns::default()
        }
    }

    /// The baseline of a simple engine: sorts all rows by last use.
    fn sorted(&self, required: u64) -> u64 {
        let mut rows: Vec<usize> = (0..self.ids.len()).collect();
        rows.sort_unstable_by_key(|&row| self.last[row]);
        let mut freed = 0;
        for row in rows {
            if freed >= required {
                break;
            }
            freed += self.blocks[row];
        }
        freed
    }
}

fn open(spec: &str, objects: u64) -> Result<Evictor, String> {
    let options = Options {
        max_objects: objects as usize,
        capacity_units: objects,
        holes: true,
        remember: objects as usize,
        ..Options::default()
    };
    Evictor::open(spec, &options).map_err(|error| error.to_string())
}

fn micros(mut body: impl FnMut() -> u64) -> f64 {
    let start = Instant::now();
    black_box(body());
    start.elapsed().as_nanos() as f64 / 1000.0
}

/// A selection of a tenth of all blocks among `rows` candidates.
fn select(spec: &str, rows: usize, known: bool, rounds: usize, goal: f64) -> Bar {
    let of = if rows >= 1000 { format!("{}k", rows / 1000) } else { rows.to_string() };
    let mut bar =
        Bar::lower(named(format!("select_{of}{}_{spec}", if known { "_known" } else { "" })), "us")
            .baseline("sorting all by last use")
            .goal((!EXEMPT.contains(&spec)).then_some(goal));
    let mut evictor = match open(spec, 2 * rows as u64) {
        Ok(evictor) => evictor,
        Err(why) => return Bar { note: why, ..bar },
    };
    let table = Table::random(rows);
    let now = 2_000_000_000_000;
    if known {
        let recorded = evictor.record(now, &RequestContext::default(), &table.ids, &table.blocks);
        recorded.expect("a table twice as large");
    }
    let required = table.blocks.iter().sum::<u64>() / 10;
    let mut out = Selection::default();
    let (mut times, mut sorting) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        sorting.push(micros(|| table.sorted(required)));
        times.push(micros(|| {
            let options = SelectOptions::default();
            let done = evictor.select(now, &table.columns(), required, &options, &mut out);
            done.expect("a sound table");
            out.freed_blocks
        }));
        assert!(out.freed_blocks >= required || EXEMPT.contains(&spec), "{spec}");
    }
    bar.value = Some(median(&mut times));
    bar.baseline_value = Some(median(&mut sorting));
    bar
}

/// One eviction and one insert at a time among a million objects, with skewed accesses.
fn victims(spec: &str, turns: u64) -> Vec<Bar> {
    let bar = |what: &str, unit, goal| {
        Bar::lower(named(format!("{what}_{spec}")), unit).baseline("reading the clock").goal(goal)
    };
    let list = LISTS.contains(&spec);
    let bound = !EXEMPT.contains(&spec);
    let p50 = bar("victim_p50", "ns", list.then_some(100.0));
    let p99 = bar("victim_p99", "ns", bound.then_some(10_000.0));
    let bytes = bar("bytes", "B/object", list.then_some(64.0));
    let mut evictor = match open(spec, MILLION + 1) {
        Ok(evictor) => evictor,
        Err(why) => return vec![Bar { note: why, ..p50 }],
    };
    let (context, mut seed) = (RequestContext::default(), 7_u64);
    let mut now = 1_000_000_000;
    let new = |id: u64| NewObject { id, units: 1, ..NewObject::default() };
    for id in 0..MILLION {
        now += 1000;
        evictor.insert(now, &context, &[new(id)]).expect("room");
    }
    let (mut times, mut clock) = (Vec::new(), Vec::new());
    let mut out: Vec<Victim> = Vec::with_capacity(4);
    for turn in 0..turns {
        // The square of a random number favours low ids.
        let x = (random(&mut seed) >> 11) as f64 / (1u64 << 53) as f64;
        let id = (x * x * (MILLION + turn) as f64) as u64;
        now += 1000;
        evictor.lookup(now, &context, &[id], &mut []).expect("a time");
        out.clear();
        let start = Instant::now();
        let empty = start.elapsed();
        let start = Instant::now();
        evictor.evict(now, 1, &mut out).expect("a time");
        let took = start.elapsed();
        clock.push(empty.as_nanos() as f64);
        times.push(took.as_nanos() as f64);
        evictor.insert(now, &context, &[new(MILLION + turn)]).expect("room");
    }
    let reading = median(&mut clock);
    let middle = median(&mut times);
    let late = times[times.len() * 99 / 100];
    let measured = |bar: Bar, value: f64| Bar {
        value: Some((value - reading).max(0.0)),
        baseline_value: Some(reading),
        ..bar
    };
    let size = evictor.objects().bytes_per_object();
    vec![
        measured(p50, middle),
        measured(p99, late),
        Bar { value: Some(size), baseline: "", ..bytes },
    ]
}

/// Allocations of selections, lookups and evictions after the warm-up.
fn steady_allocations() -> Bar {
    let mut evictor = open("lru", 4096).expect("a known policy");
    let table = Table::random(1000);
    let (mut chosen, mut out) = (Selection::default(), Vec::new());
    let (context, mut now) = (RequestContext::default(), 2_000_000_000_000);
    let mut turn = || {
        now += 1000;
        out.clear();
        evictor.record(now, &context, &table.ids, &table.blocks).expect("room");
        evictor.lookup(now, &context, &table.ids, &mut []).expect("a time");
        let options = SelectOptions { allow_tail: true, room: None };
        evictor.select(now, &table.columns(), 5000, &options, &mut chosen).expect("sound");
        evictor.evict(now, 5000, &mut out).expect("a time");
    };
    (0..3).for_each(|_| turn());
    let before = allocations();
    (0..100).for_each(|_| turn());
    Bar::lower("steady_allocations", "in 400").goal(0.0).value((allocations() - before) as f64)
}

/// A full table in which an engine's sessions store their paths, one object a call: each put evicts
/// an object and inserts one.
struct Puts {
    evictor: Evictor,
    objects: u64,
    next: u64,
    now: i64,
    seed: u64,
    out: Vec<Victim>,
}

impl Puts {
    fn open(spec: &str, objects: u64) -> Result<Puts, String> {
        let options = Options {
            max_objects: objects as usize,
            capacity_units: objects,
            remember: objects as usize,
            ..Options::default()
        };
        let evictor = Evictor::open(spec, &options).map_err(|error| error.to_string())?;
        let out = Vec::with_capacity(4);
        let mut puts = Puts { evictor, objects, next: 0, now: 1 << 40, seed: 7, out };
        puts.put(objects + objects / 4);
        Ok(puts)
    }

    fn put(&mut self, count: u64) {
        for id in self.next..self.next + count {
            self.now += 1000;
            if self.evictor.objects().len() as u64 == self.objects {
                self.out.clear();
                self.evictor.evict(self.now, 1, &mut self.out).expect("a time");
            }
            let at = id % PATH;
            let request =
                RequestContext { session: Some(id / PATH), tokens_each: 16, ..Default::default() };
            let facts = Facts { tokens: 16, context: at as u32 * 16, ..Facts::default() };
            let parent = (at > 0).then(|| id - 1);
            let new = NewObject { id, parent, units: 1, facts };
            self.evictor.insert(self.now, &request, &[new]).expect("room was made");
        }
        self.next += count;
    }

    /// Puts, each after a lookup of an id that is probably resident.
    fn mixed(&mut self, count: u64) {
        for _ in 0..count {
            let id = self.next - 1 - random(&mut self.seed) % self.objects;
            self.now += 1000;
            let context = RequestContext::default();
            self.evictor.lookup(self.now, &context, &[id], &mut []).expect("a time");
            self.put(1);
        }
    }
}

/// Nanoseconds of the thread per step.
fn steps(count: u64, body: impl FnOnce(u64)) -> f64 {
    let start = thread_ns();
    body(count);
    (thread_ns() - start) / count as f64
}

/// A put under each policy, beside one under `lru` in the same round.
fn churn(rounds: usize) -> Vec<Bar> {
    let bar = |spec: &str| {
        Bar::lower(named(format!("churn_{spec}")), "x")
            .baseline("lru")
            .baseline_value(1.0)
            .goal(STATEFUL.contains(&spec).then_some(1.5))
    };
    let mut lru = Puts::open("lru", CHURN_OBJECTS).expect("a known policy");
    let specs = ENTRIES.iter().map(|entry| entry.name).filter(|&name| name != "lru");
    let measure = |spec| {
        let mut puts = match Puts::open(spec, CHURN_OBJECTS) {
            Ok(puts) => puts,
            Err(why) => return bar(spec).note(why),
        };
        let (mut ratios, mut times) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let baseline = steps(CHURN_OBJECTS, |count| lru.put(count));
            times.push(steps(CHURN_OBJECTS, |count| puts.put(count)));
            ratios.push(times[times.len() - 1] / baseline);
        }
        bar(spec).value(median(&mut ratios)).note(format!("({:.0} ns)", median(&mut times)))
    };
    specs.map(measure).collect()
}

/// Nanoseconds of a random read from a table of `objects` entries of 96 bytes.
fn random_read(objects: u64) -> f64 {
    let (len, mut at) = (objects as usize * 12, 0);
    let table: Vec<u64> = (0..len as u64).map(|x| x.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
    let ns = steps(MILLION, |count| {
        for i in 0..count {
            at = (table[at].wrapping_add(i) % len as u64) as usize;
        }
    });
    black_box(at);
    ns
}

/// How the time of a put with a lookup grows with the number of objects: by the last decade,
/// relative to the growth of a random read of memory. Its goal is the growth of the logarithm.
fn growth(quick: bool) -> Vec<Bar> {
    let sizes: &[u64] = if quick { &[10_000, 100_000] } else { &[10_000, MILLION, 10 * MILLION] };
    let last = |times: &[f64]| times[times.len() - 1] / times[times.len() - 2];
    let reads: Vec<f64> = sizes.iter().map(|&size| random_read(size)).collect();
    let logs: Vec<f64> = sizes.iter().map(|&size| (size as f64).ln()).collect();
    let listed = |times: &[f64]| {
        let texts = times.iter().map(|ns| format!("{ns:.0}"));
        texts.collect::<Vec<_>>().join(", ")
    };
    let measure = |spec| {
        let bar = Bar::lower(named(format!("growth_{spec}")), "x/decade")
            .baseline("a random read of memory")
            .baseline_value(1.0)
            .goal(last(&logs));
        let times: Result<Vec<f64>, String> = sizes.iter().map(|&size| grown(spec, size)).collect();
        match times {
            Ok(times) => bar.value(last(&times) / last(&reads)).note(format!(
                "(ns at {sizes:?} objects: {}; random reads {})",
                listed(&times),
                listed(&reads)
            )),
            Err(why) => bar.note(why),
        }
    };
    STRUCTURES.map(measure).into()
}

/// Nanoseconds of a put with a lookup among so many objects.
fn grown(spec: &str, objects: u64) -> Result<f64, String> {
    const STEPS: u64 = 100_000;
    let mut puts = Puts::open(spec, objects)?;
    let mut times: Vec<f64> = (0..7).map(|_| steps(STEPS, |count| puts.mixed(count))).collect();
    Ok(median(&mut times))
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let (rounds, large, turns) = if quick { (51, 7, 50_000) } else { (1001, 31, 500_000) };
    let mut bars = vec![steady_allocations()];
    for entry in ENTRIES {
        let (small_us, large_us) =
            if STATEFUL.contains(&entry.name) { (60.0, 8000.0) } else { (10.0, 1000.0) };
        bars.push(select(entry.name, 1000, false, rounds, small_us));
        bars.push(select(entry.name, 1000, true, rounds, 60.0));
        bars.push(select(entry.name, 100_000, false, large, large_us));
        bars.push(select(entry.name, 100_000, true, large, 8000.0));
        bars.extend(victims(entry.name, turns));
    }
    bars.extend(churn(if quick { 5 } else { 21 }));
    bars.extend(growth(quick));
    bars
}
