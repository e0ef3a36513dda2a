//! The shared remote: shards that hold objects by name, each with its own memory. A full shard
//! evicts as Redis does under `allkeys-lru`: it samples a few keys and evicts the least recently
//! used of these and of earlier candidates. Its clock counts seconds.

use crate::scale::cut::Cutting;
use crate::scale::{MAX_OBJECTS, Placement, RemoteOpts};
use kvtier::base::status::Result;
use kvtier::fail;
use kvtier::meta::index;
use kvtier::trace::generate::rng::Rng;
use kvtier::trace::requests::Trace;
use kvtier::trace::study::zeros;

/// Keys sampled per eviction: `maxmemory-samples` of Redis.
pub const SAMPLES: usize = 5;
/// Candidates kept between evictions.
const POOL: usize = 16;
const NOWHERE: u32 = u32::MAX;
/// Time over which peaks are averaged.
const PEAK_NS: i64 = 10_000_000_000;
const SECOND: i64 = 1_000_000_000;

/// A link of an engine or of a shard, which transfers bytes in sequence.
#[derive(Clone, Copy, Default)]
pub(super) struct Link {
    bytes_per_second: f64,
    busy_ns: i64,
}

impl Link {
    pub(super) fn new(bytes_per_second: f64) -> Link {
        Link { bytes_per_second, busy_ns: 0 }
    }

    /// Time until `bytes` more are transferred, after those queued.
    pub(super) fn estimate(&self, now_ns: i64, bytes: u64) -> i64 {
        if self.bytes_per_second <= 0.0 {
            return 0;
        }
        let own = (bytes as f64 * 1e9 / self.bytes_per_second).min(1e18) as i64;
        (self.busy_ns - now_ns).max(0).saturating_add(own)
    }

    /// Queues `bytes`; returns the time until they are transferred.
    pub(super) fn enqueue(&mut self, now_ns: i64, bytes: u64) -> i64 {
        let wait = self.estimate(now_ns, bytes);
        self.busy_ns = self.busy_ns.max(now_ns.saturating_add(wait));
        wait
    }

    /// Bytes queued.
    pub(super) fn waiting(&self, now_ns: i64) -> f64 {
        (self.busy_ns - now_ns).max(0) as f64 / 1e9 * self.bytes_per_second
    }
}

/// The highest rate over 10 seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Peak {
    /// Gets.
    pub gets_per_second: f64,
    /// Bytes of the gets.
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

/// Objects and bytes by fate, from the first request on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// Stored.
    pub stored: (u64, u64),
    /// Evicted.
    pub evicted: (u64, u64),
    /// Lost with their shard.
    pub lost: (u64, u64),
    /// Resident at the end.
    pub resident: (u64, u64),
}

fn add(sum: &mut (u64, u64), bytes: u64) {
    *sum = (sum.0 + 1, sum.1 + bytes);
}

/// Result of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    /// The object was stored.
    Stored,
    /// The object existed.
    Exists,
    /// The shard has failed.
    Failed,
}

#[derive(Clone, Copy, Default)]
struct Object {
    /// Index among the objects of its shard.
    at: u32,
    /// Second of the last use.
    used_s: u32,
    gets: u32,
    writer: u16,
}

struct Shard {
    residents: Vec<u32>,
    bytes: u64,
    capacity: u64,
    has_failed: bool,
    link: Link,
    /// Eviction candidates, the least recently used last.
    pool: Vec<(u32, u32)>,
    meter: Meter,
    /// Bytes of the fetch under consideration.
    requested_bytes: u64,
}

/// The shared remote.
pub(super) struct Remote {
    pub(super) cutting: Cutting,
    pub(super) life: Life,
    place: Placement,
    rehome: bool,
    seed: u64,
    rng: Rng,
    shards: Vec<Shard>,
    objects: Vec<Object>,
    /// The root chunk of every chunk.
    roots: Vec<u32>,
    failed_shards: usize,
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
            fail!(
                Limit,
                "{count} distinct objects, the limit is {MAX_OBJECTS}: raise object_bytes"
            );
        }
        let capacity = if opts.bytes == 0 { u64::MAX } else { opts.bytes / opts.shards as u64 };
        let longest = cutting.bytes.iter().copied().max().unwrap_or(0);
        if capacity < longest {
            fail!(
                Limit,
                "a shard of {capacity} bytes is too small for an object of {longest} bytes"
            );
        }
        let shard = || Shard {
            residents: Vec::new(),
            bytes: 0,
            capacity,
            has_failed: false,
            link: Link::new(opts.shard_bytes_per_second),
            pool: Vec::new(),
            meter: Meter::default(),
            requested_bytes: 0,
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
            failed_shards: 0,
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
            Placement::Object => object,
            Placement::Chunk => chunk,
            Placement::Root => self.roots[chunk as usize],
        };
        let mut hash = index::hash(u64::from(key) ^ self.seed);
        loop {
            let shard = ((u128::from(hash) * self.shards.len() as u128) >> 64) as usize;
            if !self.rehome || !self.shards[shard].has_failed {
                return shard;
            }
            hash = index::hash(hash);
        }
    }

    /// Whether an object of a chunk is on a failed shard.
    pub(super) fn has_failed(&self, chunk: u32) -> bool {
        let runs = 0..self.cutting.objects();
        self.failed_shards > 0
            && runs
                .into_iter()
                .any(|run| self.shards[self.shard_of(self.object(chunk, run))].has_failed)
    }

    /// Looks an object up, which counts as a use; returns whether it exists.
    pub(super) fn lookup(&mut self, object: u32, now_ns: i64) -> bool {
        let row = &mut self.objects[object as usize];
        row.used_s = (now_ns / SECOND) as u32;
        row.at != NOWHERE
    }

    /// Fetches an object; returns whether it existed.
    pub(super) fn get(&mut self, object: u32, now_ns: i64) -> bool {
        if !self.lookup(object, now_ns) {
            return false;
        }
        let bytes = self.cutting.bytes[self.run(object)];
        let shard = self.shard_of(object);
        self.shards[shard].meter.add(now_ns, 1, bytes);
        self.meter.add(now_ns, 1, bytes);
        self.objects[object as usize].gets += 1;
        true
    }

    /// The engine that stored an object.
    pub(super) fn writer(&self, object: u32) -> usize {
        usize::from(self.objects[object as usize].writer)
    }

    /// Time of the shards to transfer objects. With `taken` the transfer is queued.
    pub(super) fn wait(
        &mut self,
        objects: impl Iterator<Item = u32>,
        now_ns: i64,
        taken: bool,
    ) -> i64 {
        self.touched.clear();
        for object in objects {
            let shard = self.shard_of(object);
            if self.shards[shard].requested_bytes == 0 {
                self.touched.push(shard as u32);
            }
            self.shards[shard].requested_bytes += self.cutting.bytes[self.run(object)];
        }
        let mut longest = 0;
        for &shard in &self.touched {
            let shard = &mut self.shards[shard as usize];
            let bytes = std::mem::take(&mut shard.requested_bytes);
            longest = longest.max(match taken {
                true => shard.link.enqueue(now_ns, bytes),
                false => shard.link.estimate(now_ns, bytes),
            });
        }
        longest
    }

    /// Stores an object unless it exists.
    pub(super) fn put(&mut self, object: u32, writer: usize, now_ns: i64) -> Result<Put> {
        let number = self.shard_of(object);
        if self.shards[number].has_failed {
            return Ok(Put::Failed);
        }
        if self.lookup(object, now_ns) {
            return Ok(Put::Exists);
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

    /// Evicts one object of a shard that is not empty.
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

    /// Removes the first `shards` shards with all their objects.
    pub(super) fn fail_shards(&mut self, shards: usize) {
        for number in 0..shards.min(self.shards.len()) {
            let residents = std::mem::take(&mut self.shards[number].residents);
            for object in residents {
                self.objects[object as usize].at = NOWHERE;
                let bytes = self.cutting.bytes[self.run(object)];
                add(&mut self.life.lost, bytes);
                self.life.resident = (self.life.resident.0 - 1, self.life.resident.1 - bytes);
            }
            (self.shards[number].has_failed, self.shards[number].bytes) = (true, 0);
        }
        self.failed_shards = shards;
    }

    /// Resets the counters.
    pub(super) fn reset_counts(&mut self) {
        self.objects.iter_mut().for_each(|object| object.gets = 0);
        self.meter = Meter::default();
        self.shards.iter_mut().for_each(|shard| shard.meter = Meter::default());
    }

    /// The peak of all shards together, and of the busiest by each measure.
    pub(super) fn peaks(&self) -> (Peak, Peak) {
        let mut busiest = Peak::default();
        for shard in &self.shards {
            let peak = shard.meter.peak;
            busiest.gets_per_second = busiest.gets_per_second.max(peak.gets_per_second);
            busiest.bytes_per_second = busiest.bytes_per_second.max(peak.bytes_per_second);
        }
        (self.meter.peak, busiest)
    }

    /// Gets of the most fetched chunk, of the 1 % most fetched chunks, and of all.
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

/// Adds a candidate in the order of idle time, if there is room or a less idle one.
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
