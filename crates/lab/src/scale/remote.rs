//! What all engines share: shards that hold objects by name, each in memory of its own. A full
//! shard evicts as Redis does under `allkeys-lru`: a few keys by chance, the one unused longest
//! of these and of the best found before. Its clock counts seconds.

use crate::scale::cut::Cutting;
use crate::scale::{MAX_OBJECTS, Place, RemoteOpts};
use kvtier::base::status::Result;
use kvtier::fail;
use kvtier::meta::index;
use kvtier::trace::generate::rng::Rng;
use kvtier::trace::requests::Trace;
use kvtier::trace::study::zeros;

/// Keys looked at for a victim: `maxmemory-samples` of Redis.
pub const SAMPLES: usize = 5;
/// Candidates that are remembered between evictions.
const POOL: usize = 16;
const NOWHERE: u32 = u32::MAX;
/// Peaks are means over so long.
const PEAK_NS: i64 = 10_000_000_000;
const SECOND: i64 = 1_000_000_000;

/// A connection, or all of a shard's: bytes one after the other.
#[derive(Clone, Copy, Default)]
pub(super) struct Link {
    bytes_per_second: f64,
    busy_ns: i64,
}

impl Link {
    pub(super) fn new(bytes_per_second: f64) -> Link {
        Link { bytes_per_second, busy_ns: 0 }
    }

    /// How long until so many bytes have passed, behind those that wait.
    pub(super) fn would(&self, now_ns: i64, bytes: u64) -> i64 {
        if self.bytes_per_second <= 0.0 {
            return 0;
        }
        let own = (bytes as f64 * 1e9 / self.bytes_per_second).min(1e18) as i64;
        (self.busy_ns - now_ns).max(0).saturating_add(own)
    }

    /// The same, and they do.
    pub(super) fn take(&mut self, now_ns: i64, bytes: u64) -> i64 {
        let wait = self.would(now_ns, bytes);
        self.busy_ns = self.busy_ns.max(now_ns.saturating_add(wait));
        wait
    }

    /// Bytes that wait.
    pub(super) fn waiting(&self, now_ns: i64) -> f64 {
        (self.busy_ns - now_ns).max(0) as f64 / 1e9 * self.bytes_per_second
    }
}

/// The most that came in 10 seconds, as a rate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Peak {
    /// Gets.
    pub gets_per_second: f64,
    /// Bytes of them.
    pub bytes_per_second: f64,
}

#[derive(Clone, Copy, Default)]
struct Meter {
    stretch: i64,
    gets: u64,
    bytes: u64,
    peak: Peak,
}

impl Meter {
    fn add(&mut self, now_ns: i64, gets: u64, bytes: u64) {
        let stretch = now_ns / PEAK_NS;
        if stretch != self.stretch {
            (self.stretch, self.gets, self.bytes) = (stretch, 0, 0);
        }
        self.gets += gets;
        self.bytes += bytes;
        let rate = |n: u64| n as f64 * SECOND as f64 / PEAK_NS as f64;
        self.peak.gets_per_second = self.peak.gets_per_second.max(rate(self.gets));
        self.peak.bytes_per_second = self.peak.bytes_per_second.max(rate(self.bytes));
    }
}

/// Where objects went, from the first request on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// Objects that were stored, and their bytes.
    pub stored: (u64, u64),
    /// Of these, evicted.
    pub evicted: (u64, u64),
    /// Lost with their shard.
    pub lost: (u64, u64),
    /// There at the end.
    pub resident: (u64, u64),
}

fn add(sum: &mut (u64, u64), bytes: u64) {
    *sum = (sum.0 + 1, sum.1 + bytes);
}

/// What became of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    /// It was stored.
    Stored,
    /// Somebody was first.
    There,
    /// The shard is away.
    Away,
}

#[derive(Clone, Copy, Default)]
struct Object {
    /// Its place among those of its shard.
    at: u32,
    /// When it was used last.
    used_s: u32,
    gets: u32,
    writer: u16,
}

struct Shard {
    residents: Vec<u32>,
    bytes: u64,
    capacity: u64,
    is_away: bool,
    link: Link,
    /// Candidates, the one unused longest last.
    pool: Vec<(u32, u32)>,
    meter: Meter,
    /// Bytes of the fetch that is looked at.
    wanted: u64,
}

/// The shared remote.
pub(super) struct Remote {
    pub(super) cutting: Cutting,
    pub(super) life: Life,
    place: Place,
    rehome: bool,
    seed: u64,
    rng: Rng,
    shards: Vec<Shard>,
    objects: Vec<Object>,
    /// The first chunk of the path of every chunk.
    roots: Vec<u32>,
    away: usize,
    meter: Meter,
    touched: Vec<u32>,
}

impl Remote {
    pub(super) fn new(
        opts: &RemoteOpts,
        trace: &Trace,
        token_bytes: u64,
        seed: u64,
    ) -> Result<Remote> {
        let cutting =
            Cutting::new(trace.block_tokens(), token_bytes, opts.layers, opts.object_bytes)?;
        let count = trace.uniques().saturating_mul(cutting.objects());
        if count > MAX_OBJECTS {
            fail!(Limit, "{count} different objects, the limit is {MAX_OBJECTS}: make them longer");
        }
        let capacity = if opts.bytes == 0 { u64::MAX } else { opts.bytes / opts.shards as u64 };
        let longest = cutting.bytes.iter().copied().max().unwrap_or(0);
        if capacity < longest {
            fail!(Limit, "a shard of {capacity} bytes holds no object of {longest}");
        }
        let shard = || Shard {
            residents: Vec::new(),
            bytes: 0,
            capacity,
            is_away: false,
            link: Link::new(opts.shard_bytes_per_second),
            pool: Vec::new(),
            meter: Meter::default(),
            wanted: 0,
        };
        let mut roots: Vec<u32> = zeros(trace.uniques())?;
        for request in trace.requests() {
            let path = trace.dense(request);
            path.iter().for_each(|&chunk| roots[chunk as usize] = path[0]);
        }
        let mut objects: Vec<Object> = zeros(count)?;
        objects.iter_mut().for_each(|object| object.at = NOWHERE);
        Ok(Remote {
            cutting,
            life: Life::default(),
            place: opts.place,
            rehome: opts.rehome && opts.dead.is_some_and(|dead| dead.shards < opts.shards),
            seed: index::hash(seed ^ 0x5AAD),
            rng: Rng::new(seed),
            shards: (0..opts.shards).map(|_| shard()).collect(),
            objects,
            roots,
            away: 0,
            meter: Meter::default(),
            touched: Vec::new(),
        })
    }

    /// The number of an object.
    pub(super) fn object(&self, chunk: u32, run: usize) -> u32 {
        chunk * self.cutting.objects() as u32 + run as u32
    }

    fn run(&self, object: u32) -> usize {
        object as usize % self.cutting.objects()
    }

    fn shard_of(&self, object: u32) -> usize {
        let chunk = object / self.cutting.objects() as u32;
        let key = match self.place {
            Place::Object => object,
            Place::Chunk => chunk,
            Place::Root => self.roots[chunk as usize],
        };
        let mut hash = index::hash(u64::from(key) ^ self.seed);
        loop {
            let shard = ((u128::from(hash) * self.shards.len() as u128) >> 64) as usize;
            if !self.rehome || !self.shards[shard].is_away {
                return shard;
            }
            hash = index::hash(hash);
        }
    }

    /// Whether an object of a chunk is on a shard that is away.
    pub(super) fn is_away(&self, chunk: u32) -> bool {
        let runs = 0..self.cutting.objects();
        self.away > 0
            && runs
                .into_iter()
                .any(|run| self.shards[self.shard_of(self.object(chunk, run))].is_away)
    }

    /// Whether an object is there; that is a use of it.
    pub(super) fn ask(&mut self, object: u32, now_ns: i64) -> bool {
        let row = &mut self.objects[object as usize];
        row.used_s = (now_ns / SECOND) as u32;
        row.at != NOWHERE
    }

    /// Whether an object was there to be fetched.
    pub(super) fn get(&mut self, object: u32, now_ns: i64) -> bool {
        if !self.ask(object, now_ns) {
            return false;
        }
        let bytes = self.cutting.bytes[self.run(object)];
        let shard = self.shard_of(object);
        self.shards[shard].meter.add(now_ns, 1, bytes);
        self.meter.add(now_ns, 1, bytes);
        self.objects[object as usize].gets += 1;
        true
    }

    /// Who wrote an object.
    pub(super) fn writer(&self, object: u32) -> usize {
        usize::from(self.objects[object as usize].writer)
    }

    /// How long the shards take for objects; `taken`: they are fetched now.
    pub(super) fn wait(
        &mut self,
        objects: impl Iterator<Item = u32>,
        now_ns: i64,
        taken: bool,
    ) -> i64 {
        self.touched.clear();
        for object in objects {
            let shard = self.shard_of(object);
            if self.shards[shard].wanted == 0 {
                self.touched.push(shard as u32);
            }
            self.shards[shard].wanted += self.cutting.bytes[self.run(object)];
        }
        let mut longest = 0;
        for &shard in &self.touched {
            let shard = &mut self.shards[shard as usize];
            let bytes = std::mem::take(&mut shard.wanted);
            longest = longest.max(match taken {
                true => shard.link.take(now_ns, bytes),
                false => shard.link.would(now_ns, bytes),
            });
        }
        longest
    }

    /// Stores an object, unless it is there.
    pub(super) fn put(&mut self, object: u32, writer: usize, now_ns: i64) -> Result<Put> {
        let number = self.shard_of(object);
        if self.shards[number].is_away {
            return Ok(Put::Away);
        }
        if self.ask(object, now_ns) {
            return Ok(Put::There);
        }
        let bytes = self.cutting.bytes[self.run(object)];
        while self.shards[number].bytes.saturating_add(bytes) > self.shards[number].capacity {
            self.evict(number, now_ns);
        }
        let shard = &mut self.shards[number];
        if shard.residents.try_reserve(1).is_err() {
            fail!(NoMem, "no memory for another object after {}", shard.residents.len());
        }
        let row = &mut self.objects[object as usize];
        (row.at, row.writer) = (shard.residents.len() as u32, writer as u16);
        shard.residents.push(object);
        shard.bytes += bytes;
        add(&mut self.life.stored, bytes);
        add(&mut self.life.resident, bytes);
        Ok(Put::Stored)
    }

    /// Evicts one object of a shard that has some.
    fn evict(&mut self, number: usize, now_ns: i64) {
        let now_s = (now_ns / SECOND) as u32;
        let victim = loop {
            let shard = &mut self.shards[number];
            for _ in 0..SAMPLES {
                let at = self.rng.below(shard.residents.len() as u64) as usize;
                let object = shard.residents[at];
                let idle = now_s.saturating_sub(self.objects[object as usize].used_s);
                enter(&mut shard.pool, idle, object);
            }
            let Some((_, object)) = shard.pool.pop() else { continue };
            if self.objects[object as usize].at != NOWHERE {
                break object;
            }
        };
        let bytes = self.cutting.bytes[self.run(victim)];
        let shard = &mut self.shards[number];
        let at = std::mem::replace(&mut self.objects[victim as usize].at, NOWHERE);
        shard.residents.swap_remove(at as usize);
        if let Some(&moved) = shard.residents.get(at as usize) {
            self.objects[moved as usize].at = at;
        }
        shard.bytes -= bytes;
        add(&mut self.life.evicted, bytes);
        self.life.resident = (self.life.resident.0 - 1, self.life.resident.1 - bytes);
    }

    /// Takes shards away for good, with all that they hold: the first so many.
    pub(super) fn take_away(&mut self, shards: usize) {
        for number in 0..shards.min(self.shards.len()) {
            let residents = std::mem::take(&mut self.shards[number].residents);
            for object in residents {
                self.objects[object as usize].at = NOWHERE;
                let bytes = self.cutting.bytes[self.run(object)];
                add(&mut self.life.lost, bytes);
                self.life.resident = (self.life.resident.0 - 1, self.life.resident.1 - bytes);
            }
            (self.shards[number].is_away, self.shards[number].bytes) = (true, 0);
        }
        self.away = shards;
    }

    /// Starts to count again.
    pub(super) fn count_anew(&mut self) {
        self.objects.iter_mut().for_each(|object| object.gets = 0);
        self.meter = Meter::default();
        self.shards.iter_mut().for_each(|shard| shard.meter = Meter::default());
    }

    /// The peak of all shards together, and of the busiest by each measure.
    pub(super) fn peaks(&self) -> (Peak, Peak) {
        let mut one = Peak::default();
        for shard in &self.shards {
            let peak = shard.meter.peak;
            one.gets_per_second = one.gets_per_second.max(peak.gets_per_second);
            one.bytes_per_second = one.bytes_per_second.max(peak.bytes_per_second);
        }
        (self.meter.peak, one)
    }

    /// The gets of the chunk fetched most, the gets of the 1 % of chunks fetched most, and all.
    pub(super) fn hottest(&self) -> Result<(u64, u64, u64)> {
        let each = self.cutting.objects();
        let mut gets: Vec<u64> = zeros(self.objects.len() / each)?;
        for (sum, objects) in gets.iter_mut().zip(self.objects.chunks_exact(each)) {
            *sum = objects.iter().map(|object| u64::from(object.gets)).sum();
        }
        gets.retain(|&sum| sum > 0);
        gets.sort_unstable_by(|a, b| b.cmp(a));
        let top = gets.len().div_ceil(100);
        let first = gets.first().copied().unwrap_or(0);
        Ok((first, gets.iter().take(top).sum(), gets.iter().sum()))
    }
}

/// Enters a candidate in the order of idleness, if there is room or one that is less idle.
fn enter(pool: &mut Vec<(u32, u32)>, idle: u32, object: u32) {
    if pool.iter().any(|&(_, known)| known == object) {
        return;
    }
    if pool.len() == POOL {
        if pool.first().is_some_and(|&(least, _)| least >= idle) {
            return;
        }
        pool.remove(0);
    }
    let at = pool.partition_point(|&(less, _)| less < idle);
    pool.insert(at, (idle, object));
}
