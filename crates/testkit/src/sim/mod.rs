//! Simulation of a store: one thread, a manual clock, a faulty disk, and a seed that chooses
//! requests, faults and the order in which work ends. A model knows every byte and what is durable.
//! The same seed gives the same run.

mod blocks;
mod callers;
mod content;
mod device_sim;
mod engine_events;
mod extra_requests;
mod lives;
mod remote_sim;
mod world;

use std::fmt;

use kvtier::base::status::Error;
use kvtier::store::state::{RemoteStats, StoreStats};

/// Options of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct SimOpts {
    /// Seed of all choices.
    pub seed: u64,
    /// Number of steps.
    pub steps: u32,
}

/// Result of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Power failures and process deaths.
    pub crashes: u32,
    /// Ended transfers.
    pub moves: u64,
    /// Compared bytes.
    pub checked_bytes: u64,
    /// Durable cells that were found after a restart.
    pub durable_found: u64,
    /// Durable blocks likewise.
    pub kept_blocks: u64,
    /// Chunks of completely cleared namespaces.
    pub cleared: u64,
    /// Device replicas that were read back and right.
    pub audited: u64,
    /// Parts of transfers that waited for a device event.
    pub engine_events: u64,
    /// Remote counters of all lives.
    pub remote: RemoteStats,
    /// Hash of everything that happened: equal for equal seeds.
    pub mark: u64,
    /// Counters of all lives.
    pub counters: StoreStats,
}

/// A failure, and where to find it.
#[derive(Debug)]
pub struct Failure {
    /// Seed.
    pub seed: u64,
    /// Step.
    pub step: u32,
    /// Description.
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
