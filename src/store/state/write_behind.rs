//! Write-behind: chunks of puts are written to the disk a bounded time after they came, so that
//! a process that is killed loses little.
//!
//! A chunk is written after a quarter of the configured age while no read of the disk is under
//! way, and after half of it in any case: the other half is the disk's time. When more bytes wait
//! than the configuration allows, the oldest are written at once. What is truncated, cleared or
//! evicted before that costs the disk nothing.

use std::collections::VecDeque;

use crate::store::job_queues::LANES;
use crate::store::state::chunk_table::note;
use crate::store::state::granularity::Part;
use crate::store::state::work::WorkerKind;
use crate::store::state::{At, StoreState, Write};

/// Without a limit of its own, unwritten bytes may take one part in so many of host memory.
const HOST_SHARE: u64 = 8;
/// The line is swept of chunks that have left when it is at least so long.
const LEAST_SWEEP: usize = 1024;

/// A chunk that waits for its time.
struct Unwritten {
    at: At,
    generation: u32,
    since_ns: u64,
    bytes: u64,
}

/// Chunks that wait to be written, the oldest first.
#[derive(Default)]
pub(super) struct WriteBehind {
    line: VecDeque<Unwritten>,
    bytes: u64,
    sweep_at: usize,
}

impl WriteBehind {
    fn pop(&mut self) -> Option<Unwritten> {
        let first = self.line.pop_front()?;
        self.bytes -= first.bytes;
        Some(first)
    }
}

impl StoreState {
    /// A chunk of a put is in memory: it is written in time, if it can be found after a restart.
    pub(super) fn write_later(&mut self, at: At) {
        if !self.is_full(at) {
            return;
        }
        let rows = &mut self.tables[at.table as usize];
        let bytes = rows.chunk_bytes(at.slot);
        let Some(row) = rows.chunks.chunk(at.slot) else { return };
        if row.owner().is_some() || rows.has(at.slot, note::UNWRITTEN) {
            return;
        }
        let (generation, since_ns) = (row.generation(), self.now_ns);
        rows.set(at.slot, note::UNWRITTEN);
        self.sweep_unwritten();
        self.write_behind.line.push_back(Unwritten { at, generation, since_ns, bytes });
        self.write_behind.bytes += bytes;
    }

    /// Queues the oldest chunk that is due; false when none is.
    pub(super) fn queue_due(&mut self) -> bool {
        while self.has_due() {
            let Some(one) = self.write_behind.pop() else { break };
            if !self.is_unwritten_still(&one) {
                continue;
            }
            self.tables[one.at.table as usize].clear(one.at.slot, note::UNWRITTEN);
            let bytes = self.only_in_host(one.at, Part::All);
            if bytes > 0 && self.may_go_down(one.at, bytes, false) {
                self.queue_down(one.at);
                return true;
            }
        }
        false
    }

    /// Whether the oldest chunk is to be written now.
    pub(super) fn has_due(&self) -> bool {
        let limit = match self.config.unwritten_bytes {
            0 => self.config.host_bytes / HOST_SHARE,
            bytes => bytes,
        };
        self.write_behind.bytes > limit || self.due_ns().is_some_and(|due| due <= self.now_ns)
    }

    /// When the hands that write have to look again although nothing happens.
    pub fn due_ns(&self) -> Option<u64> {
        let first = self.write_behind.line.front()?;
        let is_reading = self.under_way[WorkerKind::Read as usize] > 0
            || (0..LANES).any(|lane| self.reads.waiting(lane).0 > 0);
        let wait_ns = self.config.write_age_ns / if is_reading { 2 } else { 4 };
        Some(first.since_ns.saturating_add(wait_ns))
    }

    /// Bytes that wait for their time to be written, and for how long the oldest has waited.
    pub fn unwritten(&self) -> (u64, u64) {
        let first = self.write_behind.line.front();
        let age_ns = first.map_or(0, |one| self.now_ns.saturating_sub(one.since_ns));
        (self.write_behind.bytes, age_ns)
    }

    /// Whether a chunk is still the one that was to be written.
    fn is_unwritten_still(&self, one: &Unwritten) -> bool {
        self.tables.get(one.at.table as usize).is_some_and(|rows| {
            rows.has(one.at.slot, note::UNWRITTEN)
                && rows.chunks.chunk_of(one.at.slot, one.generation).is_some()
        })
    }

    /// Takes chunks out of the line that have left, once they may be half of it.
    fn sweep_unwritten(&mut self) {
        let length = self.write_behind.line.len();
        if length < self.write_behind.sweep_at.max(LEAST_SWEEP) {
            return;
        }
        let mut line = std::mem::take(&mut self.write_behind.line);
        line.retain(|one| self.is_unwritten_still(one));
        self.write_behind.bytes = line.iter().map(|one| one.bytes).sum();
        self.write_behind.sweep_at = 2 * line.len();
        self.write_behind.line = line;
    }
}

impl Write {
    /// Whether what is put goes to the disk although its memory is not needed.
    pub(super) fn is_eager(self) -> bool {
        matches!(self, Write::Through | Write::Behind)
    }
}
