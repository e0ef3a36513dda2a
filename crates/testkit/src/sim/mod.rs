//! A store in a simulation: one thread, a clock that is moved by hand, a disk that
//! fails, and a seed that chooses what is asked for, what goes wrong and which work
//! ends next. A model knows what every byte must be and what was promised to last.
//! The same seed does the same again.

mod ahead;
mod blocks;
mod callers;
mod content;
mod device_sim;
mod lives;
mod remote_sim;
mod wishes;
mod world;

use std::fmt;

use kvtier::base::status::Error;
use kvtier::store::state::{Counters, RemoteCounters};

/// How a simulation is run.
#[derive(Clone, Copy, Debug)]
pub struct SimOpts {
    /// Chooses everything.
    pub seed: u64,
    /// Steps.
    pub steps: u32,
}

/// What a simulation did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Power failures.
    pub crashes: u32,
    /// Moves that ended.
    pub moves: u64,
    /// Bytes that were compared.
    pub checked_bytes: u64,
    /// Cells that had to be there after a power failure, and were.
    pub kept: u64,
    /// Blocks likewise.
    pub kept_blocks: u64,
    /// Chunks of namespaces that were cleared as a whole.
    pub cleared: u64,
    /// Cells in device memory that were read back and right.
    pub audited: u64,
    /// Parts of moves that came behind an event of the device.
    pub behind: u64,
    /// What the stores counted of their remotes, all together.
    pub remote: RemoteCounters,
    /// A mark of everything that happened: equal for equal seeds.
    pub mark: u64,
    /// What the stores counted, all together.
    pub counters: Counters,
}

/// What was wrong, and where to find it again.
#[derive(Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The step.
    pub step: u32,
    /// In words.
    pub words: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, step {}: {}", self.seed, self.step, self.words)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { seed: 0, step: 0, words: error.to_string() }
    }
}

/// Runs a simulation.
pub fn run(opts: &SimOpts) -> Result<Report, Failure> {
    let mut world = world::World::open(opts.seed).map_err(|f| Failure { seed: opts.seed, ..f })?;
    for step in 0..opts.steps {
        world.step().map_err(|f| Failure { seed: opts.seed, step, ..f })?;
    }
    let end = |f: Failure| Failure { seed: opts.seed, step: opts.steps, ..f };
    world.end().map_err(end)
}
