//! What has happened: counters, and marks for a picture of it.

use std::collections::VecDeque;

use crate::base::status::{Result, Status};
use crate::stream::core::load::Load;
use crate::stream::units::{Role, Unit};

/// Most marks that are kept.
pub const MAX_MARKS: usize = 1 << 20;

/// Where time goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Stage {
    /// A chunk was read.
    Read = 1,
    /// A chunk was copied to the device.
    Copy = 2,
    /// The engine had a unit.
    Use = 3,
    /// The engine waited for a unit.
    Wait = 4,
}

/// Something that took time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// What.
    pub stage: Stage,
    /// Which unit.
    pub unit: u32,
    /// From when.
    pub begin_ns: u64,
    /// Until when.
    pub end_ns: u64,
}

/// Counters of a streamer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Passes that have ended.
    pub passes: u64,
    /// How long the last one took.
    pub pass_ns: u64,
    /// Units that were asked for.
    pub acquires: u64,
    /// Of them, those that had to be waited for.
    pub waited: u64,
    /// How long the engine waited: for reads, for copies, for slots.
    pub wait_read_ns: u64,
    /// For copies to the device.
    pub wait_copy_ns: u64,
    /// For slots.
    pub wait_slot_ns: u64,
    /// How long the engine had units: what it took to compute with them.
    pub use_ns: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// How long reads took, added up.
    pub read_ns: u64,
    /// Bytes that were copied to the device.
    pub copied_bytes: u64,
    /// How long copies took, added up.
    pub copy_ns: u64,
    /// Bytes that were brought and never used.
    pub wasted_bytes: u64,
    /// Reads and copies that failed.
    pub failed: u64,
    /// Experts that were asked for and there.
    pub expert_hits: u64,
    /// Experts that had to be brought.
    pub expert_misses: u64,
    /// Bytes that the device read by itself, of those that were read.
    pub direct_bytes: u64,
    /// Reads of the device's that failed, and were made up for.
    pub direct_failed: u64,
}

/// What became of the experts of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCount {
    /// The layer.
    pub layer: u32,
    /// Experts that were asked for and there.
    pub hits: u64,
    /// Those that had to be brought.
    pub misses: u64,
    /// Bytes that were brought.
    pub bytes: u64,
}

/// What a core notes.
pub(super) struct Record {
    pub stats: Stats,
    pub layers: Vec<LayerCount>,
    /// Which of `layers` a unit belongs to.
    layer_of: Vec<u32>,
    bytes: Vec<u64>,
    marks: VecDeque<Mark>,
    limit: usize,
    pass_since_ns: u64,
}

impl Record {
    pub fn new(units: &[Unit], limit: usize) -> Result<Record> {
        // Units of a table come in any order.
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

    /// A unit was asked for, and given. `hit`: an expert that was there.
    pub fn served(&mut self, unit: u32, hit: bool) {
        self.stats.acquires += 1;
        if hit {
            self.stats.expert_hits += 1;
            if let Some(layer) = self.layer(unit) {
                layer.hits += 1;
            }
        }
    }

    /// An expert was given that had to be brought, for whoever has it or by a hint.
    pub fn missed(&mut self, unit: u32) {
        let bytes = self.bytes.get(unit as usize).copied().unwrap_or(0);
        self.stats.expert_misses += 1;
        if let Some(layer) = self.layer(unit) {
            layer.misses += 1;
            layer.bytes += bytes;
        }
    }

    /// A load ended without anybody having had the unit.
    pub fn lost(&mut self, load: &Load) {
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
