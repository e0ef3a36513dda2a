//! Counters, and a bounded record of spans of time (marks).

use std::collections::VecDeque;

use crate::base::status::{Result, Status};
use crate::stream::scheduler::loads::Load;
use crate::stream::units::{Role, Unit};

/// Most marks that are recorded.
pub const MAX_MARKS: usize = 1 << 20;

/// Kinds of spans of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Stage {
    /// A chunk was read.
    Read = 1,
    /// A chunk was copied to the device.
    Copy = 2,
    /// The engine leased a unit.
    Use = 3,
    /// The engine waited for a unit.
    Wait = 4,
}

/// A span of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Its kind.
    pub stage: Stage,
    /// The unit.
    pub unit: u32,
    /// Begin, in nanoseconds.
    pub begin_ns: u64,
    /// End, in nanoseconds.
    pub end_ns: u64,
}

/// Counters of a streamer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Passes that have ended.
    pub passes: u64,
    /// Duration of the last pass.
    pub pass_ns: u64,
    /// Units that were acquired.
    pub acquires: u64,
    /// Acquired units that had to be waited for.
    pub waited: u64,
    /// Time that the engine waited for reads.
    pub wait_read_ns: u64,
    /// Time that the engine waited for copies to the device.
    pub wait_copy_ns: u64,
    /// Time that the engine waited for slots.
    pub wait_slot_ns: u64,
    /// Time that leases lasted: the engine computed with the units.
    pub use_ns: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Sum of the durations of reads.
    pub read_ns: u64,
    /// Bytes that were copied to the device.
    pub copied_bytes: u64,
    /// Sum of the durations of copies.
    pub copy_ns: u64,
    /// Bytes that were loaded and never used.
    pub wasted_bytes: u64,
    /// Reads and copies that failed.
    pub failed: u64,
    /// Acquired experts that were in a slot.
    pub expert_hits: u64,
    /// Acquired experts that had to be loaded.
    pub expert_misses: u64,
    /// Bytes of the reads that the device did itself.
    pub direct_bytes: u64,
    /// Direct reads of the device that failed, and were replaced by reads into staging.
    pub direct_failed: u64,
}

/// Counters of the experts of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCount {
    /// The layer.
    pub layer: u32,
    /// Acquired experts that were in a slot.
    pub hits: u64,
    /// Acquired experts that had to be loaded.
    pub misses: u64,
    /// Bytes that were loaded.
    pub bytes: u64,
}

/// Counters and marks of a scheduler.
pub(super) struct Record {
    pub stats: Stats,
    pub layers: Vec<LayerCount>,
    /// Index in `layers` of each unit.
    layer_of: Vec<u32>,
    bytes: Vec<u64>,
    marks: VecDeque<Mark>,
    limit: usize,
    pass_since_ns: u64,
}

impl Record {
    pub fn new(units: &[Unit], limit: usize) -> Result<Record> {
        // The units of a table have any order.
        let (mut numbers, mut layer_of) = (Vec::new(), Vec::new());
        numbers.try_reserve_exact(units.len()).map_err(|_| Status::NoMem)?;
        layer_of.try_reserve_exact(units.len()).map_err(|_| Status::NoMem)?;
        let experts = units.iter().filter(|unit| unit.role == Role::Expert);
        numbers.extend(experts.map(|unit| unit.layer));
        numbers.sort_unstable();
        numbers.dedup();
        layer_of.extend(units.iter().map(|unit| match unit.role {
            Role::Expert => numbers.partition_point(|&layer| layer < unit.layer) as u32,
            _ => u32::MAX,
        }));
        let count = |layer: u32| LayerCount { layer, ..LayerCount::default() };
        let layers = numbers.into_iter().map(count).collect();
        Ok(Record {
            stats: Stats::default(),
            layers,
            layer_of,
            bytes: units.iter().map(|unit| unit.bytes).collect(),
            marks: VecDeque::new(),
            limit: limit.min(MAX_MARKS),
            pass_since_ns: 0,
        })
    }

    pub fn marks(&self) -> Vec<Mark> {
        self.marks.iter().copied().collect()
    }

    pub fn mark(&mut self, stage: Stage, unit: u32, begin_ns: u64, end_ns: u64) {
        if self.limit == 0 {
            return;
        }
        if self.marks.len() == self.limit {
            self.marks.pop_front();
        }
        self.marks.push_back(Mark { stage, unit, begin_ns, end_ns });
    }

    pub fn moved(
        &mut self,
        stage: Stage,
        unit: u32,
        bytes: u64,
        begin_ns: u64,
        end_ns: u64,
        fine: bool,
    ) {
        let took = end_ns.saturating_sub(begin_ns);
        let stats = &mut self.stats;
        match (fine, stage) {
            (false, _) => stats.failed += 1,
            (true, Stage::Read) => {
                stats.read_bytes += bytes;
                stats.read_ns += took;
            }
            (true, _) => {
                stats.copied_bytes += bytes;
                stats.copy_ns += took;
            }
        }
        self.mark(stage, unit, begin_ns, end_ns);
    }

    fn layer(&mut self, unit: u32) -> Option<&mut LayerCount> {
        let at = self.layer_of.get(unit as usize)?;
        self.layers.get_mut(*at as usize)
    }

    /// A unit was leased. `hit`: it is an expert that was in a slot.
    pub fn served(&mut self, unit: u32, hit: bool) {
        self.stats.acquires += 1;
        if hit {
            self.stats.expert_hits += 1;
            if let Some(layer) = self.layer(unit) {
                layer.hits += 1;
            }
        }
    }

    /// An expert was leased that had to be loaded, by this acquire or by a hint.
    pub fn missed(&mut self, unit: u32) {
        let bytes = self.bytes.get(unit as usize).copied().unwrap_or(0);
        self.stats.expert_misses += 1;
        if let Some(layer) = self.layer(unit) {
            layer.misses += 1;
            layer.bytes += bytes;
        }
    }

    /// A load ended before the unit was leased.
    pub fn note_waste(&mut self, load: &Load) {
        let chunk = self.bytes.get(load.unit as usize).copied().unwrap_or(0);
        let parts = u64::from(load.chunks.max(1));
        self.stats.wasted_bytes += chunk / parts * u64::from(load.done);
    }

    pub fn used(&mut self, unit: u32, begin_ns: u64, end_ns: u64) {
        self.stats.use_ns += end_ns.saturating_sub(begin_ns);
        self.mark(Stage::Use, unit, begin_ns, end_ns);
    }

    pub fn pass_begin(&mut self, now_ns: u64) {
        self.pass_since_ns = now_ns;
    }

    pub fn pass_end(&mut self, now_ns: u64) {
        self.stats.passes += 1;
        self.stats.pass_ns = now_ns.saturating_sub(self.pass_since_ns);
    }
}
