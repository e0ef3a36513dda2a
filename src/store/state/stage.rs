//! A stage: the queue of jobs of one kind, what its batches carry now, and its measured bandwidth.
//! Copies, disk reads, remote fetches and copies from the device tier each have one.

use crate::base::status::Result;
use crate::store::job_queues::{LANES, Queues};
use crate::store::plan::Speed;
use crate::store::state::Config;
use crate::store::state::batches::{KINDS, WorkerKind};

/// What a stage is believed to do before its first batch: the delay of a batch in ns, and bytes a
/// second.
#[derive(Clone, Copy)]
pub(super) struct Guess(f64, f64);

pub(super) const COPIES: Guess = Guess(20_000.0, 8e9);
pub(super) const READS: Guess = Guess(150_000.0, 2e9);
/// A remote may be far away.
pub(super) const FETCHES: Guess = Guess(2_000_000.0, 2e8);
/// Copies from device memory.
pub(super) const REPLICAS: Guess = Guess(10_000.0, 2e11);

/// What a batch carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    /// Bytes of its cells.
    pub bytes: u64,
    /// Batches of its kind in flight when it was taken, itself among them.
    pub beside: u32,
}

/// Jobs of one kind in transfer through the workers.
pub(super) struct Stage {
    /// Jobs that wait for a worker, by urgency and session.
    pub queue: Queues,
    /// Bytes of the batches in flight.
    pub in_flight_bytes: u64,
    pub bandwidth: Speed,
}

impl Stage {
    pub fn new(config: &Config, Guess(delay_ns, bytes_per_second): Guess) -> Result<Stage> {
        Ok(Stage {
            queue: Queues::new(config.max_jobs, config.max_sessions + 1)?,
            in_flight_bytes: 0,
            bandwidth: Speed::guess(delay_ns, bytes_per_second),
        })
    }

    /// Whether jobs wait for a worker.
    pub fn has_queued(&self) -> bool {
        (0..LANES).any(|lane| self.queue.waiting(lane).0 > 0)
    }

    pub fn begins(&mut self, load: Load) {
        self.in_flight_bytes += load.bytes;
    }

    /// A batch has ended. Its time counts for the bandwidth where `is_sound` says that all bytes
    /// were moved. `in_flight` batches of its kind are in flight now, this one among them: those
    /// beside it had their part of the bandwidth.
    pub fn ends(&mut self, load: Load, in_flight: u32, is_sound: bool, elapsed_ns: u64) {
        self.in_flight_bytes -= load.bytes;
        if is_sound {
            let beside = (u64::from(load.beside) + u64::from(in_flight)).max(2);
            self.bandwidth.observe(load.bytes, 1, elapsed_ns.saturating_mul(2) / beside);
        }
    }
}

/// Work in flight, and the stages that every store has. Those of the remote and of the device tier
/// stand with them.
pub(super) struct Stages {
    pub copy: Stage,
    pub read: Stage,
    /// Batches in flight, by [`WorkerKind`].
    pub in_flight: [u32; KINDS],
}

impl Stages {
    /// Stages whose copies of long cells are made in parts of `part_bytes`.
    pub fn new(config: &Config, part_bytes: u64) -> Result<Stages> {
        let mut copy = Stage::new(config, COPIES)?;
        copy.queue.in_parts_of(part_bytes);
        Ok(Stages { copy, read: Stage::new(config, READS)?, in_flight: [0; KINDS] })
    }

    /// Batches of one kind in flight.
    pub fn in_flight(&self, workers: WorkerKind) -> u32 {
        self.in_flight[workers as usize]
    }

    pub fn is_idle(&self) -> bool {
        self.in_flight.iter().all(|&batches| batches == 0)
    }
}
