//! Eviction policies for the experts of a model, on a recorded routing trace.
//!
//! The plugin for stock llama.cpp writes such a trace (`KVTIER_ROUTING_TRACE`). All experts of all
//! layers share one cache. A use is one layer's choice in one batch: each of its experts is read at
//! most once for it.

use std::collections::{BTreeSet, HashMap};

use kvtier::base::status::Result;
use kvtier::fail;
use kvtier::policy::evictor::{Evictor, NewObject, Options, RequestContext};

/// First line of a trace.
const HEAD: &str = "kvtier-routing 1";
/// Most experts of all layers together.
const MOST_EXPERTS: u64 = 1 << 24;

/// A layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Number of its experts.
    pub experts: u64,
    /// Bytes of one of them.
    pub bytes: u64,
    /// Id of its first expert; the others follow.
    first: u64,
}

/// One layer's choice in one batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// Ids of the experts, each once.
    pub used: Vec<u64>,
    /// Ids that were predicted before, the likeliest first.
    pub guessed: Vec<u64>,
}

/// A routing trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routing {
    /// Layers in the order of the file.
    pub layers: Vec<Layer>,
    /// Uses in the order of time.
    pub uses: Vec<Use>,
}

impl Routing {
    /// Reads a trace: a head line, `layer MODEL LAYER EXPERTS BYTES` before a layer's first use, and
    /// `use MODEL LAYER TOKENS USED [GUESSED]` with numbers of experts separated by commas.
    pub fn read(text: &str) -> Result<Routing> {
        let mut routing = Routing::default();
        let mut layers = HashMap::new();
        let mut first = 0;
        for (at, line) in text.lines().enumerate() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |i: usize| words.get(i).and_then(|word| word.parse::<u64>().ok());
            match (at, words.first().copied()) {
                (0, _) if line == HEAD => {}
                (0, _) => {
                    fail!(Corrupt, "the first line is not {HEAD:?}: this is no routing trace")
                }
                (_, Some("layer")) => {
                    let (Some(experts), Some(bytes)) = (number(3), number(4)) else {
                        fail!(Corrupt, "line {}: a layer has 4 numbers", at + 1);
                    };
                    if experts == 0 || experts > MOST_EXPERTS - first {
                        fail!(
                            Limit,
                            "line {}: {experts} experts, at most {MOST_EXPERTS} in all",
                            at + 1
                        );
                    }
                    layers.insert((number(1), number(2)), routing.layers.len());
                    routing.layers.push(Layer { experts, bytes, first });
                    first += experts;
                }
                (_, Some("use")) => {
                    let Some(&layer) = layers.get(&(number(1), number(2))) else {
                        fail!(Corrupt, "line {}: no such layer before this line", at + 1);
                    };
                    let layer = routing.layers[layer];
                    let ids = |i| ids(layer, words.get(i).copied().unwrap_or(""), at + 1);
                    routing.uses.push(Use { used: ids(4)?, guessed: ids(5)? });
                }
                _ => fail!(Corrupt, "line {}: neither a layer nor a use", at + 1),
            }
        }
        Ok(routing)
    }

    /// Number of experts of all layers.
    pub fn experts(&self) -> u64 {
        self.layers.iter().map(|layer| layer.experts).sum()
    }

    /// Bytes of all experts.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.experts.saturating_mul(layer.bytes)).sum()
    }
}

fn ids(layer: Layer, text: &str, line: usize) -> Result<Vec<u64>> {
    let mut out = Vec::new();
    for word in text.split(',').filter(|word| !word.is_empty()) {
        match word.parse::<u64>() {
            Ok(expert) if expert < layer.experts => out.push(layer.first + expert),
            _ => fail!(Corrupt, "line {line}: {word:?} is no expert below {}", layer.experts),
        }
    }
    Ok(out)
}

/// Counts of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Experts that were used.
    pub uses: u64,
    /// Of those, how many were in the cache.
    pub hits: u64,
    /// Of the others, how many were being read because they were guessed.
    pub covered: u64,
    /// Experts that were read because they were guessed, and then not used.
    pub wasted: u64,
}

impl Counts {
    /// Share of uses that were in the cache.
    pub fn hit_ratio(&self) -> f64 {
        self.hits as f64 / self.uses.max(1) as f64
    }

    /// Share of the misses that guesses covered.
    pub fn coverage(&self) -> f64 {
        self.covered as f64 / (self.uses - self.hits).max(1) as f64
    }

    /// Wasted reads for each useful one.
    pub fn waste(&self) -> f64 {
        self.wasted as f64 / self.covered.max(1) as f64
    }
}

/// A cache of experts with a policy.
struct Cache {
    evictor: Evictor,
    resident: BTreeSet<u64>,
    capacity: usize,
    now: i64,
}

impl Cache {
    fn open(spec: &str, capacity: u64) -> Result<Cache> {
        let capacity = usize::try_from(capacity.max(1)).unwrap_or(usize::MAX);
        let options = Options {
            max_objects: capacity,
            capacity_units: capacity as u64,
            remember: capacity,
            ..Options::default()
        };
        let evictor = Evictor::open(spec, &options)?;
        Ok(Cache { evictor, resident: BTreeSet::new(), capacity, now: 0 })
    }

    fn touch(&mut self, id: u64) -> Result<()> {
        self.now += 1;
        self.evictor.touch(self.now, &RequestContext::default(), &[id])?;
        Ok(())
    }

    /// Reads an expert, in place of a victim that is not in use. False if all are.
    fn read(&mut self, id: u64) -> Result<bool> {
        self.now += 1;
        if self.resident.len() >= self.capacity {
            let mut victims = Vec::new();
            self.evictor.evict_most(self.now, 1, 1, &mut victims)?;
            let Some(victim) = victims.first() else { return Ok(false) };
            self.resident.remove(&victim.id);
        }
        let object = NewObject { id, units: 1, ..NewObject::default() };
        self.evictor.insert(self.now, &RequestContext::default(), &[object])?;
        self.resident.insert(id);
        Ok(true)
    }
}

/// Replays a trace with a policy. With `guesses`, predicted experts are read before their use.
pub fn replay(routing: &Routing, spec: &str, capacity: u64, guesses: bool) -> Result<Counts> {
    let mut cache = Cache::open(spec, capacity)?;
    let mut counts = Counts::default();
    for one in &routing.uses {
        let mut ahead = BTreeSet::new();
        for &id in one.guessed.iter().filter(|_| guesses) {
            if cache.resident.contains(&id) {
                cache.touch(id)?;
            } else if cache.read(id)? {
                ahead.insert(id);
            }
        }
        serve(&mut cache, one, &ahead, &mut counts)?;
    }
    Ok(counts)
}

/// Serves a use. Its experts stay until all were read, as far as they fit.
fn serve(cache: &mut Cache, one: &Use, ahead: &BTreeSet<u64>, counts: &mut Counts) -> Result<()> {
    let mut held = Vec::new();
    let (here, away): (Vec<u64>, Vec<u64>) =
        one.used.iter().partition(|&id| cache.resident.contains(id));
    for &id in &here {
        cache.touch(id)?;
        cache.evictor.acquire(&[id])?;
        held.push(id);
        match ahead.contains(&id) {
            true => counts.covered += 1,
            false => counts.hits += 1,
        }
    }
    for &id in &away {
        if !cache.read(id)? {
            cache.evictor.release(&held)?;
            held.clear();
            cache.read(id)?;
        }
        cache.evictor.acquire(&[id])?;
        held.push(id);
    }
    cache.evictor.release(&held)?;
    counts.uses += one.used.len() as u64;
    counts.wasted += ahead.iter().filter(|id| !one.used.contains(id)).count() as u64;
    Ok(())
}

/// Replays a trace with the policy that knows the future: the victim's next use is the farthest.
pub fn optimum(routing: &Routing, capacity: u64) -> Counts {
    let all: Vec<u64> = routing.uses.iter().flat_map(|one| one.used.iter().copied()).collect();
    let mut next_of = HashMap::new();
    let mut next = vec![usize::MAX; all.len()];
    for (at, id) in all.iter().enumerate().rev() {
        if let Some(later) = next_of.insert(*id, at) {
            next[at] = later;
        }
    }
    let mut counts = Counts { uses: all.len() as u64, ..Counts::default() };
    // Resident experts by their next use. Those that are not used again are all alike.
    let mut by_use: BTreeSet<(usize, u64)> = BTreeSet::new();
    for (at, &id) in all.iter().enumerate() {
        if by_use.remove(&(at, id)) {
            counts.hits += 1;
        } else if by_use.len() as u64 >= capacity.max(1) {
            by_use.pop_last();
        }
        by_use.insert((next[at], id));
    }
    counts
}
