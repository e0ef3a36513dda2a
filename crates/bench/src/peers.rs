//! Group `cache`: lookups and inserts with eviction at a million entries, beside other caches in the
//! same run. The peers need the feature `peers`.

use std::hint::black_box;

use kvtier::meta::index::hash;
use kvtier::policy::evict::Victim;
use kvtier::policy::evictor::{Evictor, NewObject, Options, RequestContext};

use super::fixtures::thread_ns;
use super::{Bar, median};

const ENTRIES: usize = 1_000_000;
/// Distinct keys of lookups, all resident.
const RESIDENT: usize = 900_000;
/// Distinct keys of the mix, in which a miss inserts and usually evicts.
const MIXED: usize = 4_000_000;
const BATCH: usize = 64;
const SPECS: [&str; 4] = ["lru", "sieve", "s3fifo", "fifo"];

/// The workload of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Load {
    /// Every id is resident.
    Get,
    /// Missing ids are inserted.
    Mix,
}

/// A cache to compare.
trait Runner {
    fn name(&self) -> &'static str;
    /// Serves ids; returns the number of hits.
    fn run(&mut self, ids: &[u64], load: Load) -> usize;
    /// A slow cache serves only 1/`part` of the ids.
    fn part(&self) -> usize {
        1
    }
}

/// Ids with a Zipf distribution: the frequency falls as 1/rank. Ranks are hashed to ids.
pub struct Zipf {
    ends: Vec<f64>,
    state: u64,
}

impl Zipf {
    /// A distribution over `keys` ids.
    pub fn new(keys: usize) -> Zipf {
        let mut sum = 0.0;
        let weights = (1..=keys).map(|rank| 1.0 / rank as f64);
        let ends = weights.map(|weight| {
            sum += weight;
            sum
        });
        Zipf { ends: ends.collect(), state: 88_172_645_463_325_252 }
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let total = self.ends.last().copied().unwrap_or(1.0);
        let at = (self.state >> 11) as f64 / (1u64 << 53) as f64 * total;
        hash(self.ends.partition_point(|&end| end <= at) as u64)
    }

    /// The next ids.
    pub fn draw(&mut self, count: usize) -> Vec<u64> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// The missing ids of a batch. A duplicate id misses twice and is inserted once.
pub fn gather_new(ids: &[u64], found: &[u8], new: &mut Vec<NewObject>) {
    new.clear();
    // Ids whose bit is not set are no duplicates.
    let mut seen = [0u64; 32];
    for (&id, _) in ids.iter().zip(found).filter(|(_, found)| **found == 0) {
        let bit = hash(id) % (64 * seen.len() as u64);
        let (word, bit) = (&mut seen[(bit / 64) as usize], 1 << (bit % 64));
        if *word & bit == 0 || !new.iter().any(|one| one.id == id) {
            new.push(NewObject { id, units: 1, ..NewObject::default() });
        }
        *word |= bit;
    }
}

/// An evictor of kvtier, called in batches.
struct Ours {
    name: &'static str,
    evictor: Evictor,
    batch: usize,
    now: i64,
    found: [u8; BATCH],
    new: Vec<NewObject>,
    victims: Vec<Victim>,
}

impl Ours {
    fn open(spec: &'static str, batch: usize) -> Ours {
        let options = Options {
            max_objects: ENTRIES,
            capacity_units: ENTRIES as u64,
            holes: true,
            remember: 0,
            ..Options::default()
        };
        Ours {
            name: spec,
            evictor: Evictor::open(spec, &options).expect("a known policy"),
            batch,
            now: 1 << 40,
            found: [0; BATCH],
            new: Vec::with_capacity(BATCH),
            victims: Vec::with_capacity(BATCH),
        }
    }

    fn insert(&mut self, ids: &[u64]) {
        gather_new(ids, &self.found[..ids.len()], &mut self.new);
        if self.new.is_empty() {
            return;
        }
        let (context, need) =
            (RequestContext::default(), self.evictor.objects().len() + self.new.len());
        if need > ENTRIES {
            self.victims.clear();
            let evicted = self.evictor.evict(self.now, (need - ENTRIES) as u64, &mut self.victims);
            evicted.expect("a time");
        }
        self.evictor.insert(self.now, &context, &self.new).expect("room was made");
    }
}

impl Runner for Ours {
    fn name(&self) -> &'static str {
        self.name
    }

    fn run(&mut self, ids: &[u64], load: Load) -> usize {
        let mut hits = 0;
        let context = RequestContext::default();
        for ids in ids.chunks(self.batch) {
            self.now += 4 * BATCH as i64;
            let before = self.evictor.metrics.counts.hits;
            let found = &mut self.found[..ids.len()];
            self.evictor.lookup(self.now, &context, ids, found).expect("a time");
            let present = (self.evictor.metrics.counts.hits - before) as usize;
            hits += present;
            if load == Load::Mix && present < ids.len() {
                self.insert(ids);
            }
        }
        hits
    }
}

#[cfg(feature = "peers")]
mod others {
    use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
    use std::num::NonZeroUsize;

    use super::{ENTRIES, Load, Runner};

    /// An identity hash: ids are uniformly distributed, as the block hashes of an engine.
    #[derive(Default)]
    struct Same(u64);

    impl Hasher for Same {
        fn finish(&self) -> u64 {
            self.0
        }

        fn write(&mut self, bytes: &[u8]) {
            bytes.iter().for_each(|&b| self.0 = self.0.rotate_left(8) ^ u64::from(b));
        }

        fn write_u64(&mut self, id: u64) {
            self.0 = id;
        }
    }

    type Identity = BuildHasherDefault<Same>;

    /// A bounded map.
    trait Peer {
        const PART: usize = 1;
        fn get(&mut self, id: u64) -> Option<u64>;
        fn put(&mut self, id: u64);
    }

    struct Named<P>(&'static str, P);

    impl<P: Peer> Runner for Named<P> {
        fn name(&self) -> &'static str {
            self.0
        }

        fn run(&mut self, ids: &[u64], load: Load) -> usize {
            let (mut hits, mut sum) = (0, 0u64);
            for &id in ids {
                match self.1.get(id) {
                    Some(value) => {
                        hits += 1;
                        sum = sum.wrapping_add(value);
                    }
                    None if load == Load::Mix => self.1.put(id),
                    None => {}
                }
            }
            std::hint::black_box(sum);
            hits
        }

        fn part(&self) -> usize {
            P::PART
        }
    }

    impl<S: BuildHasher> Peer for lru::LruCache<u64, u64, S> {
        fn get(&mut self, id: u64) -> Option<u64> {
            lru::LruCache::get(self, &id).copied()
        }

        fn put(&mut self, id: u64) {
            lru::LruCache::put(self, id, id);
        }
    }

    impl<S: BuildHasher> Peer for schnellru::LruMap<u64, u64, schnellru::ByLength, S> {
        fn get(&mut self, id: u64) -> Option<u64> {
            schnellru::LruMap::get(self, &id).copied()
        }

        fn put(&mut self, id: u64) {
            self.insert(id, id);
        }
    }

    impl<S: BuildHasher> Peer for quick_cache::unsync::Cache<u64, u64, quick_cache::UnitWeighter, S> {
        fn get(&mut self, id: u64) -> Option<u64> {
            quick_cache::unsync::Cache::get(self, &id).copied()
        }

        fn put(&mut self, id: u64) {
            self.insert(id, id);
        }
    }

    impl<S: BuildHasher + Clone + Send + Sync + 'static> Peer for moka::sync::Cache<u64, u64, S> {
        const PART: usize = 16;

        fn get(&mut self, id: u64) -> Option<u64> {
            moka::sync::Cache::get(self, &id)
        }

        fn put(&mut self, id: u64) {
            self.insert(id, id);
        }
    }

    impl<S: BuildHasher + Send + Sync + 'static> Peer for foyer_memory::Cache<u64, u64, S> {
        const PART: usize = 4;

        fn get(&mut self, id: u64) -> Option<u64> {
            foyer_memory::Cache::get(self, &id).map(|entry| *entry.value())
        }

        fn put(&mut self, id: u64) {
            self.insert(id, id);
        }
    }

    /// One shard, as one thread uses it.
    fn foyer<S: BuildHasher + Send + Sync + 'static>(hasher: S) -> impl Peer + 'static {
        let builder = foyer_memory::CacheBuilder::new(ENTRIES).with_shards(1);
        let builder = builder.with_eviction_config(foyer_memory::LruConfig::default());
        let cache: foyer_memory::Cache<u64, u64, S> = builder.with_hash_builder(hasher).build();
        cache
    }

    /// The single-threaded form without locks.
    fn quick<S: BuildHasher + 'static>(hasher: S) -> impl Peer + 'static {
        let (weighter, life) = (quick_cache::UnitWeighter, Default::default());
        quick_cache::unsync::Cache::with(ENTRIES, ENTRIES as u64, weighter, hasher, life)
    }

    /// All peers, with their own hashers and with the identity hash.
    pub fn all() -> Vec<Box<dyn Runner>> {
        let entries = NonZeroUsize::new(ENTRIES).unwrap_or(NonZeroUsize::MIN);
        let length = || schnellru::ByLength::new(ENTRIES as u32);
        let same = Identity::default;
        let moka = || moka::sync::Cache::builder().max_capacity(ENTRIES as u64);
        vec![
            Box::new(Named("quick_cache", quick(quick_cache::DefaultHashBuilder::default()))),
            Box::new(Named("quick_cache, ids as hashes", quick(same()))),
            Box::new(Named(
                "schnellru",
                schnellru::LruMap::<u64, u64>::with_seed(length(), [1, 2, 3, 4]),
            )),
            Box::new(Named(
                "schnellru, ids as hashes",
                schnellru::LruMap::<u64, u64, _, _>::with_hasher(length(), same()),
            )),
            Box::new(Named("lru", lru::LruCache::<u64, u64>::new(entries))),
            Box::new(Named(
                "lru, ids as hashes",
                lru::LruCache::<u64, u64, _>::with_hasher(entries, same()),
            )),
            Box::new(Named("foyer lru", foyer(RandomState::new()))),
            Box::new(Named("foyer lru, ids as hashes", foyer(same()))),
            Box::new(Named("moka", moka().build())),
            Box::new(Named("moka, ids as hashes", moka().build_with_hasher(same()))),
        ]
    }
}

#[cfg(feature = "peers")]
use others::all as peers;

#[cfg(not(feature = "peers"))]
fn peers() -> Vec<Box<dyn Runner>> {
    Vec::new()
}

fn bar(name: String) -> Bar {
    Bar::lower(Box::leak(name.into_boxed_str()), "x")
        .baseline("the fastest peer")
        .baseline_value(1.0)
        .goal(1.0)
        .note("built without the feature `peers`".to_string())
}

/// Runs kvtier and the peers in turn over the same ids. The values are medians of the ratio to the
/// fastest peer.
fn contest(load: Load, rounds: usize, stretch: usize) -> Vec<Bar> {
    let (what, keys) = match load {
        Load::Get => ("get", RESIDENT),
        Load::Mix => ("mix", MIXED),
    };
    let mut bars = Vec::new();
    let mut ours: Vec<Ours> =
        SPECS.iter().flat_map(|spec| [BATCH, 1].map(|batch| Ours::open(spec, batch))).collect();
    let mut peers = peers();
    if peers.is_empty() {
        let name = |runner: &Ours| bar(format!("{what}_{}_by_{}", runner.name, runner.batch));
        return ours.iter().map(name).collect();
    }
    let mut zipf = Zipf::new(keys);
    let warm = match load {
        // Inserted in the order of ids, which is not the order of ranks.
        Load::Get => {
            let mut ids: Vec<u64> = (0..keys as u64).map(hash).collect();
            ids.sort_unstable();
            ids
        }
        Load::Mix => zipf.draw(MIXED),
    };
    let mut all: Vec<&mut dyn Runner> = Vec::new();
    all.extend(ours.iter_mut().map(|runner| runner as &mut dyn Runner));
    all.extend(peers.iter_mut().map(|runner| &mut **runner as &mut dyn Runner));
    for runner in &mut all {
        black_box(runner.run(&warm, Load::Mix));
    }
    let mut times = vec![Vec::new(); all.len()];
    for _ in 0..rounds {
        let ids = zipf.draw(stretch);
        for (runner, times) in all.iter_mut().zip(&mut times) {
            let ids = &ids[..stretch / runner.part()];
            let start = thread_ns();
            let hits = black_box(runner.run(ids, load));
            times.push((thread_ns() - start) / ids.len() as f64);
            assert!(load == Load::Mix || hits == ids.len() || runner.part() > 1, "all are hits");
        }
    }
    let names: Vec<&str> = all.iter().map(|runner| runner.name()).collect();
    let middle: Vec<f64> = times.iter().map(|t| median(&mut t.clone())).collect();
    let first = SPECS.len() * 2;
    let best = (first..names.len()).min_by(|&a, &b| middle[a].total_cmp(&middle[b]));
    let best = best.unwrap_or(first);
    let rivals: Vec<String> =
        (first..names.len()).map(|i| format!("{} {:.0}", names[i], middle[i])).collect();
    for i in 0..first {
        let batch = if i % 2 == 0 { BATCH } else { 1 };
        let mut ratios: Vec<f64> = times[i].iter().zip(&times[best]).map(|(a, b)| a / b).collect();
        let mut bar = bar(format!("{what}_{}_by_{batch}", names[i]));
        bar.value = Some(median(&mut ratios));
        bar.baseline = names[best];
        bar.note = format!("({:.0} ns against {})", middle[i], rivals.join(", "));
        bars.push(bar);
    }
    bars
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let (rounds, stretch) = if quick { (5, 300_000) } else { (15, 1_000_000) };
    let mut bars = contest(Load::Get, rounds, stretch);
    bars.extend(contest(Load::Mix, rounds, stretch));
    bars
}
