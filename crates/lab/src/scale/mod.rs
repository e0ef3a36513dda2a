//! Simulation of many engines on one remote. A trace is routed to engines with a host tier (and a
//! disk) each under one policy; they share a remote tier as `docs/internals/remote.md` describes it.
//!
//! An engine's own tiers are a [`Replay`](kvtier::trace::replay::Replay). The remote changes the
//! source of a block, never the inserted blocks, so an engine's own hits are the same without a
//! remote. After its own leading blocks an engine looks chunks up in the remote, window by window.
//! It fetches the hits if that is faster than computing them, and uploads victims of the host tier,
//! or the chunks that it computed.

pub mod copies;
mod cut;
mod engine;
mod fleet;
mod remote;
mod report;
mod router;
mod timed_set;
mod traffic;

use crate::tiers::{Machine, Tier};
use kvtier::base::spec::Spec;
use kvtier::base::status::Result;
use kvtier::fail;
use kvtier::policy::custom;
use kvtier::trace::replay::ReplayOpts;

pub use cut::Cutting;
pub use fleet::run;
pub use remote::{Life, Peak, SAMPLES};
pub use report::{Bill, Counts, EngineShare, Prices, ScaleReport};
pub use router::Router;
pub use timed_set::TimedSet;

/// Most engines.
pub const MAX_ENGINES: usize = 4096;
/// Most blocks of all engines together.
pub const MAX_LOCAL_BLOCKS: u64 = 1 << 26;
/// Most shards of a remote.
pub const MAX_SHARDS: usize = 4096;
/// Most distinct objects of a trace.
pub const MAX_OBJECTS: usize = 1 << 28;
/// Most entries of remote hints of all engines together.
pub const MAX_KNOWN: usize = 1 << 29;
/// Longest trace: ages are kept in 31 bits of a millisecond each.
pub const MAX_DURATION_NS: i64 = 20 * 86_400 * 1_000_000_000;
/// Objects per lookup.
pub const WINDOW: usize = 64;

/// The key that selects an object's shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The object's name: objects of a chunk are on any shards.
    Object,
    /// Its chunk.
    Chunk,
    /// The first chunk of its path.
    Root,
}

/// When chunks are uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// When the host evicts them.
    Back,
    /// When they were computed.
    Through,
    /// Never.
    Never,
}

/// The unit of a remote lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupUnit {
    /// Every object.
    Object,
    /// The first object of a chunk, which stands for the others.
    Chunk,
}

/// A failure of shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardFailure {
    /// Number of failed shards.
    pub shards: usize,
    /// Time of the failure, from the first request on.
    pub at_ns: i64,
}

/// Options of the shared remote.
#[derive(Clone, Debug)]
pub struct RemoteOpts {
    /// Capacity of all shards; 0 = unlimited.
    pub bytes: u64,
    /// Servers, or parts of one.
    pub shards: usize,
    /// Placement of objects on shards.
    pub place: Placement,
    /// Time from a request to the first byte of its answer.
    pub latency_ns: i64,
    /// Bandwidth of an engine in each direction; 0 = unlimited.
    pub engine_bytes_per_second: f64,
    /// Read bandwidth of a shard; 0 = unlimited.
    pub shard_bytes_per_second: f64,
    /// Largest object, unless a layer is larger.
    pub object_bytes: u64,
    /// Layers of the model.
    pub layers: u16,
    /// When chunks are uploaded.
    pub write: Write,
    /// Fewest uses in the host of a chunk that is uploaded.
    pub hits: u16,
    /// The unit of a lookup.
    pub lookup_unit: LookupUnit,
    /// Look up before an upload: then only absent chunks are uploaded.
    pub lookup_before_put: bool,
    /// Absent objects that an engine remembers.
    pub known: usize,
    /// Remote hints per engine.
    pub hints: usize,
    /// Age at which a hint is looked up again.
    pub fresh_ns: i64,
    /// Age at which an absent object is looked up again.
    pub absent_ns: i64,
    /// Most gets of one chunk per second; 0 = unlimited.
    pub cap: u32,
    /// A failure of shards.
    pub dead: Option<ShardFailure>,
    /// Objects of failed shards are placed on others from then on.
    pub rehome: bool,
}

impl Default for RemoteOpts {
    /// A cluster in the local network. `known`, `fresh` and `absent` are the defaults of a store.
    fn default() -> RemoteOpts {
        RemoteOpts {
            bytes: 0,
            shards: 16,
            place: Placement::Object,
            latency_ns: 500_000,
            engine_bytes_per_second: 5e9,
            shard_bytes_per_second: 2.5e9,
            object_bytes: 8 << 20,
            layers: 80,
            write: Write::Back,
            hits: 0,
            lookup_unit: LookupUnit::Object,
            lookup_before_put: false,
            known: 1 << 16,
            hints: 1 << 16,
            fresh_ns: 60_000_000_000,
            absent_ns: 5_000_000_000,
            cap: 0,
            dead: None,
            rehome: false,
        }
    }
}

/// Options of a simulation.
#[derive(Clone, Debug)]
pub struct ScaleOpts {
    /// Number of engines.
    pub engines: usize,
    /// The policy of the engines' tiers.
    pub policy: String,
    /// The host tier of each engine.
    pub host: Tier,
    /// The disk of each engine.
    pub disk: Option<Tier>,
    /// The router of requests.
    pub router: Router,
    /// An engine receives no request while its load exceeds the mean by this factor.
    pub load_bound: f64,
    /// The shared remote.
    pub remote: Option<RemoteOpts>,
    /// Cost of computation.
    pub machine: Machine,
    /// Options of the replays; `warm_up` requests are not counted.
    pub replay: ReplayOpts,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl ScaleOpts {
    /// Checks the options.
    pub fn check(&self) -> Result<()> {
        let spec = Spec::parse(&self.policy)?;
        custom::refuse(&spec, "a replay")?;
        if spec.name == "belady" {
            fail!(
                Invalid,
                "belady needs the future of one cache; it cannot run on one of many engines"
            );
        }
        if self.replay.holes || self.replay.layers != 1 {
            fail!(Invalid, "holes and layers are not supported here: use holes off and layers 1");
        }
        if self.engines == 0 || self.engines > MAX_ENGINES {
            fail!(Limit, "{} engines, allowed are 1 to {MAX_ENGINES}", self.engines);
        }
        if !(1.0..=1e6).contains(&self.load_bound) {
            fail!(Limit, "a load bound of {}, allowed is 1 to 1000000", self.load_bound);
        }
        if !(0.0..=1e12).contains(&self.machine.unit_ns) {
            fail!(Limit, "{} ns per unit of cost, allowed is 0 to 10^12", self.machine.unit_ns);
        }
        match &self.remote {
            Some(remote) => remote.check(self.engines),
            None => Ok(()),
        }
    }
}

impl RemoteOpts {
    fn check(&self, engines: usize) -> Result<()> {
        if self.shards == 0 || self.shards > MAX_SHARDS {
            fail!(Limit, "{} shards, allowed are 1 to {MAX_SHARDS}", self.shards);
        }
        for entries in [self.known, self.hints] {
            if entries.saturating_mul(engines) > MAX_KNOWN {
                fail!(
                    Limit,
                    "{engines} engines that remember {entries} each; the limit is {MAX_KNOWN} in all"
                );
            }
        }
        for ns in [self.latency_ns, self.fresh_ns, self.absent_ns] {
            if !(0..=MAX_DURATION_NS).contains(&ns) {
                fail!(Limit, "a time of {ns} ns, allowed is 0 to {MAX_DURATION_NS}");
            }
        }
        let speeds = [self.engine_bytes_per_second, self.shard_bytes_per_second];
        if speeds.iter().any(|speed| !(0.0..=1e18).contains(speed)) {
            fail!(Limit, "{speeds:?} bytes per second, allowed is 0 to 10^18");
        }
        match self.dead {
            Some(dead) if dead.shards > self.shards => {
                fail!(Invalid, "{} failed shards, the remote has {}", dead.shards, self.shards)
            }
            Some(dead) if dead.at_ns < 0 => {
                fail!(Limit, "shards fail at {} ns, allowed is 0 or later", dead.at_ns)
            }
            _ => Ok(()),
        }
    }
}
