//! Many engines on one remote: a trace is routed to engines that have a host tier (and a disk)
//! each under one of the policies, and share a remote tier as `docs/remote.md` has it.
//!
//! What an engine keeps by itself is [`Replay`](kvtier::trace::replay::Replay): a remote changes
//! where a block comes from, never what is inserted, so an engine's own hits are those that it
//! has without a remote. Behind its own leading blocks an engine asks the remote, window by
//! window, fetches what it found if that is sooner than computing it, and sends what leaves the
//! host, or what it has computed.

pub mod copies;
mod cut;
mod engine;
mod fleet;
mod known;
mod remote;
mod report;
mod router;
mod traffic;

use crate::tiers::{Machine, Tier};
use kvtier::base::spec::Spec;
use kvtier::base::status::Result;
use kvtier::fail;
use kvtier::policy::custom;
use kvtier::trace::replay::ReplayOpts;

pub use cut::Cutting;
pub use fleet::run;
pub use known::Known;
pub use remote::{Life, Peak, SAMPLES};
pub use report::{Bill, Counts, EngineShare, Prices, ScaleReport};
pub use router::Router;

/// Most engines.
pub const MAX_ENGINES: usize = 4096;
/// Most blocks that all engines can keep together.
pub const MAX_LOCAL_BLOCKS: u64 = 1 << 26;
/// Most shards of a remote.
pub const MAX_SHARDS: usize = 4096;
/// Most different objects of a trace.
pub const MAX_OBJECTS: usize = 1 << 28;
/// Most entries of what all engines know of the remote.
pub const MAX_KNOWN: usize = 1 << 29;
/// Longest trace: ages are kept in 31 bits of a millisecond each.
pub const MAX_DURATION_NS: i64 = 20 * 86_400 * 1_000_000_000;
/// Objects that are asked for together.
pub const WINDOW: usize = 64;

/// What decides on which shard an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Its own name: the objects of a chunk are anywhere.
    Object,
    /// Its chunk.
    Chunk,
    /// The first chunk of its path.
    Root,
}

/// When chunks are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// When they leave the host.
    Back,
    /// When they were computed.
    Through,
    /// Never.
    Never,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Every object.
    Object,
    /// The first object of a chunk, which stands for the others.
    Chunk,
}

/// Shards that go away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dead {
    /// So many.
    pub shards: usize,
    /// When, from the first request on.
    pub at_ns: i64,
}

/// The shared remote.
#[derive(Clone, Debug)]
pub struct RemoteOpts {
    /// What fits, over all shards; 0 = no bound.
    pub bytes: u64,
    /// Servers, or parts of one.
    pub shards: usize,
    /// Where objects are.
    pub place: Place,
    /// From a request to the first byte of its answer.
    pub latency_ns: i64,
    /// What an engine gets in a second, and sends; 0 = no bound.
    pub engine_bytes_per_second: f64,
    /// What a shard gives in a second; 0 = no bound.
    pub shard_bytes_per_second: f64,
    /// Longest object, unless a layer is longer.
    pub object_bytes: u64,
    /// Layers of the model.
    pub layers: u16,
    /// When chunks are sent.
    pub write: Write,
    /// Only those that were used so often since they came to the host.
    pub hits: u16,
    /// What is asked for.
    pub ask: Ask,
    /// Also before sending: then only what is absent is sent.
    pub ask_before_put: bool,
    /// Absent objects that an engine remembers.
    pub known: usize,
    /// Chunks that an engine remembers to be there.
    pub hints: usize,
    /// Age at which what is there is asked for again.
    pub fresh_ns: i64,
    /// Age at which what is absent is asked for again.
    pub absent_ns: i64,
    /// Most gets of one chunk in a second; 0 = no bound.
    pub cap: u32,
    /// Shards that go away.
    pub dead: Option<Dead>,
    /// What was on them has its place on others from then on.
    pub rehome: bool,
}

impl Default for RemoteOpts {
    /// A cluster in one's own network, and the defaults of `docs/remote.md`.
    fn default() -> RemoteOpts {
        RemoteOpts {
            bytes: 0,
            shards: 16,
            place: Place::Object,
            latency_ns: 500_000,
            engine_bytes_per_second: 5e9,
            shard_bytes_per_second: 2.5e9,
            object_bytes: 8 << 20,
            layers: 80,
            write: Write::Back,
            hits: 0,
            ask: Ask::Object,
            ask_before_put: false,
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

/// What to run.
#[derive(Clone, Debug)]
pub struct ScaleOpts {
    /// How many engines.
    pub engines: usize,
    /// The policy of their tiers.
    pub policy: String,
    /// The host tier of each.
    pub host: Tier,
    /// The disk of each.
    pub disk: Option<Tier>,
    /// Who gets a request.
    pub router: Router,
    /// An engine gets no more when its work is so many times the mean.
    pub load_bound: f64,
    /// What they share.
    pub remote: Option<RemoteOpts>,
    /// What work takes.
    pub machine: Machine,
    /// How engines replay; `warm_up` requests are not counted.
    pub replay: ReplayOpts,
    /// Everything random comes from it.
    pub seed: u64,
}

impl ScaleOpts {
    /// Refuses what is out of bounds.
    pub fn check(&self) -> Result<()> {
        let spec = Spec::parse(&self.policy)?;
        custom::refuse(&spec, "a replay")?;
        if spec.name == "belady" {
            fail!(Invalid, "belady knows the future of one cache, not that of one of many engines");
        }
        if self.replay.holes || self.replay.layers != 1 {
            fail!(Invalid, "engines use leading blocks, and whole ones");
        }
        if self.engines == 0 || self.engines > MAX_ENGINES {
            fail!(Limit, "{} engines, allowed are 1 to {MAX_ENGINES}", self.engines);
        }
        if !(1.0..=1e6).contains(&self.load_bound) {
            fail!(Limit, "a load bound of {}, allowed is 1 to 1000000", self.load_bound);
        }
        if !(0.0..=1e12).contains(&self.machine.unit_ns) {
            fail!(Limit, "{} ns for a token", self.machine.unit_ns);
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
            fail!(Limit, "{speeds:?} bytes in a second");
        }
        match self.dead {
            Some(dead) if dead.shards > self.shards => {
                fail!(Invalid, "{} of {} shards cannot go away", dead.shards, self.shards)
            }
            Some(dead) if dead.at_ns < 0 => fail!(Limit, "shards that go away before the start"),
            _ => Ok(()),
        }
    }
}
