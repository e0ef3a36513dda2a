//! Space on disk: eviction from the disk tier, the choice of segments to compact, checkpoints,
//! recovery at opening, and clearing of namespaces.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::base::budget::Tier;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::format::checkpoint::CellEntry;
use crate::format::codec::Codec;
use crate::format::record::{self, Chunk, blocks_of};
use crate::format::segment::BLOCK_BYTES;
use crate::meta::chunks::{Begin, Cell, Dropped, Location, NewChunk, StoredForm};
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;
use crate::meta::layout::Layout;
use crate::store::events::{Event, Kind};
use crate::store::state::batches::WorkerKind;
use crate::store::state::chunk_table::Part;
use crate::store::state::chunk_table::note;
use crate::store::state::namespaces::{NOTE, Noted, PendingClear};
use crate::store::state::tier_cache::Granularity;
use crate::store::state::{At, HOST_MASK, NamespaceOpts, StoreState};
use crate::tier::disk::{CellAt, CellIndex, Cover, DiskTier, Mark, Recovered, SegmentInfo, Spot};

/// Attempts to write a chunk.
const TRIES: u8 = 3;
/// A segment is compacted when at least 1 / 8 of it is dead.
const DEAD_SHARE: u32 = 8;
/// Most victims of one call of the disk policy.
const MOST_VICTIMS: usize = 256;

/// State of disk upkeep: compaction, sweeps, checkpoints, chunks that wait for space.
#[derive(Default)]
pub(super) struct DiskGc {
    /// Segments may be empty.
    sweeps: bool,
    /// Something has changed: upkeep must decide again whether there is work.
    needs_check: bool,
    /// Chunks that wait for space on disk, each with the error that made it wait.
    parked: Vec<(At, Error)>,
    /// The same chunks, for lookup.
    parked_chunks: BTreeSet<At>,
    /// Consecutive failures of each chunk.
    failures: BTreeMap<At, u8>,
    /// Blocks of cells dropped from each segment. The tier's own count of dead blocks includes
    /// headers, which compaction writes anew.
    dropped: BTreeMap<u64, u32>,
    /// Segments from before the store was opened that were not compacted since. Blocks dropped from
    /// them earlier are not known.
    old: BTreeSet<u64>,
    /// Recovered records may never have been synced.
    recovered: bool,
    /// Newest recovered segment, until all recovered records are durable; else 0.
    pub(super) found_until: u64,
    /// A checkpoint was requested.
    pub(super) wants_checkpoint: bool,
    /// Records written since the last checkpoint began.
    pub(super) records: u64,
    /// No write may begin until a checkpoint has recorded its position in the log.
    pub(super) holds_writes: bool,
    /// Chunks whose write was given up.
    pub(super) given_up: u64,
    /// Bytes in use when the last upkeep began.
    used_before: u64,
    checkpoints: CheckpointWait,
}

impl DiskGc {
    pub(super) fn succeeded(&mut self, at: At) {
        self.failures.remove(&at);
    }

    /// Counts a failure of a chunk. Returns false after the last attempt.
    pub(super) fn may_try_again(&mut self, at: At) -> bool {
        let failures = self.failures.entry(at).or_default();
        *failures += 1;
        if *failures < TRIES {
            return true;
        }
        self.failures.remove(&at);
        false
    }

    /// Forgets a chunk table: its number will be used again.
    pub(super) fn forget_table(&mut self, table: u32) {
        self.failures.retain(|at, _| at.table != table);
    }

    /// Whether upkeep may find work.
    pub(super) fn may_have_work(&self) -> bool {
        self.sweeps || self.needs_check || !self.parked.is_empty()
    }

    /// Whether chunks wait for space.
    pub(super) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Whether a chunk waits for space.
    pub(super) fn is_parked(&self, at: At) -> bool {
        self.parked_chunks.contains(&at)
    }

    /// Takes all chunks that wait for space.
    fn take_parked(&mut self) -> Vec<(At, Error)> {
        self.parked_chunks.clear();
        std::mem::take(&mut self.parked)
    }

    /// Describes what upkeep waits for.
    pub(super) fn describe(&self) -> String {
        format!("{} parked, sweeps: {}", self.parked.len(), self.sweeps)
    }

    /// Counts dropped cells.
    pub(super) fn dropped(&mut self, spot: Spot, bytes: u64) {
        let blocks = bytes.div_ceil(BLOCK_BYTES as u64) as u32;
        *self.dropped.entry(spot.segment()).or_default() += blocks;
    }

    /// Records the segments that were recovered.
    pub(super) fn recovered(&mut self, segments: &[SegmentInfo]) {
        self.old = segments.iter().map(|segment| segment.number).collect();
        self.recovered = true;
        self.found_until = segments.iter().map(|segment| segment.number).max().unwrap_or(0);
    }

    /// Bytes that compaction would keep: live cells and headers. For segments from before the
    /// opening, dropped cells are not known, so cells alone count.
    fn retained_bytes(&self, segments: &[SegmentInfo]) -> u64 {
        let retained = segments.iter().map(|s| match self.old.contains(&s.number) {
            true => s.live_blocks,
            false => {
                let dropped = self.dropped.get(&s.number).copied().unwrap_or(0);
                (s.live_blocks + s.dead_blocks).saturating_sub(dropped).max(s.live_blocks)
            }
        });
        retained.map(bytes_of).sum()
    }

    /// The segment with the most dropped blocks, if it is worth compacting. While chunks wait for
    /// space a segment with few is enough, if the dropped blocks of all segments fill one.
    fn next_to_compact(&mut self, segments: &[SegmentInfo]) -> Option<u64> {
        // `segments` is sorted by number.
        let exists = |number: &u64| segments.binary_search_by_key(number, |s| s.number).is_ok();
        self.dropped.retain(|number, _| exists(number));
        let settled = segments.iter().filter(|s| !s.is_front);
        let gain = |s: &SegmentInfo| self.dropped.get(&s.number).copied().unwrap_or(0);
        let best = settled.clone().max_by_key(|s| gain(s))?;
        let all: u64 = settled.clone().map(|s| u64::from(gain(s))).sum();
        let is_urgent = !self.parked.is_empty() && all >= u64::from(best.blocks);
        if gain(best) >= (best.blocks / DEAD_SHARE).max(1) || is_urgent && gain(best) > 0 {
            return Some(best.number);
        }
        let old = settled.filter(|s| self.old.contains(&s.number) && s.dead_blocks > s.blocks / 2);
        Some(old.max_by_key(|s| s.dead_blocks)?.number)
    }

    /// Whether a chunk waits for space that has waited before.
    fn retries_write(&self) -> bool {
        self.parked.iter().any(|(at, _)| self.failures.contains_key(at))
    }

    /// Segments may be empty now.
    pub(super) fn sweep_soon(&mut self) {
        self.sweeps = true;
    }

    pub(super) fn takes_recovered(&mut self) -> bool {
        std::mem::take(&mut self.recovered)
    }

    /// Whether enough records were written since the last checkpoint for a new one.
    pub(super) fn is_checkpoint_due(&self) -> bool {
        self.wants_checkpoint || self.records >= RECORDS
    }

    /// Ends a checkpoint.
    pub(super) fn checkpoint_ends(&mut self, outcome: &Result<()>) {
        let begun = self.checkpoints.begun;
        if begun <= self.checkpoints.lasting {
            return;
        }
        self.checkpoints.has_news = true;
        match outcome {
            Ok(()) => (self.checkpoints.lasting, self.checkpoints.failed) = (begun, None),
            Err(error) => self.checkpoints.failed = Some((begun, error.clone())),
        }
    }

    /// Begins a checkpoint: chunks removed by now are not in it.
    pub(super) fn checkpoint_begins(&mut self) {
        self.checkpoints.begun = self.checkpoints.requested;
    }

    /// Makes a chunk wait for space on disk. It stays referenced.
    pub(super) fn park(&mut self, at: At, error: Error) {
        self.parked_chunks.insert(at);
        self.parked.push((at, error));
    }
}

impl StoreState {
    /// Evicts from the disk if it is nearly full or more chunks wait for space.
    pub(super) fn balance_disk(&mut self) {
        let Some(disk) = self.disk.clone() else { return };
        let stats = disk.stats();
        let full = (stats.budget_bytes as f64 * self.config.high) as u64;
        if self.disk_gc.parked.is_empty() && stats.used_bytes <= full {
            return;
        }
        let segments = disk.segments();
        let longest = segments.iter().map(|s| bytes_of(s.blocks)).max().unwrap_or(0);
        // Space that is kept back, and open segments of callers and of compaction. A recovered
        // segment may be longer than new ones.
        let segment = disk.segment_bytes();
        let beside = 2 * segment + longest.max(segment);
        // Writes fail again although the budget allows them: other programs have filled the disk.
        let is_short =
            self.disk_gc.retries_write() && stats.used_bytes + beside < stats.budget_bytes;
        let all_bytes = if is_short { stats.used_bytes } else { stats.budget_bytes };
        let retained = self.disk_gc.retained_bytes(&segments);
        // Waiting chunks and the kept space must fit as well. Over the budget nothing is freed
        // ahead of need.
        let is_over = stats.used_bytes > all_bytes;
        let part = if is_over { self.config.high } else { self.config.disk_share() };
        let aim = disk_room(all_bytes, part, beside);
        let parked: u64 =
            self.disk_gc.parked.iter().map(|(at, _)| self.only_in_host(*at, Part::All)).sum();
        self.evict_from_disk((retained + parked).saturating_sub(aim));
        self.disk_gc.sweeps = true;
    }

    /// Evicts from the disk until so many bytes are free, or there is no victim. Returns the freed
    /// bytes.
    fn evict_from_disk(&mut self, wanted: u64) -> u64 {
        let (mut over, mut all) = (wanted, 0);
        let mut victims = Vec::new();
        while over > 0 {
            let Some(cache) = &mut self.eviction.disk else { break };
            cache.choose(self.now_ns, over, MOST_VICTIMS, &mut victims);
            if victims.is_empty() {
                break;
            }
            let (mut freed, mut progressed) = (0, false);
            for victim in victims.drain(..) {
                if let Some((at, part)) = self.chosen(victim) {
                    let bytes = self.drop_from_disk(at, part);
                    freed += bytes;
                    progressed |= bytes > 0 || self.note_continued(at, Tier::Disk);
                }
            }
            over = over.saturating_sub(freed);
            all += freed;
            if !progressed {
                break; // the victims are in use: try again later
            }
        }
        all
    }

    /// Drops a part of a chunk from disk. The policy gets back what must stay. Returns the freed
    /// bytes.
    fn drop_from_disk(&mut self, at: At, part: Part) -> u64 {
        let freed = self.take_from_disk(at, part);
        if self.has_cells(at, Tier::Disk) {
            self.enter_cache(at, Tier::Disk, part);
        }
        self.tidy(at.table, at.slot);
        freed
    }

    /// Drops a part of a chunk from disk that the policy does not have any more. Returns the freed
    /// bytes.
    fn take_from_disk(&mut self, at: At, part: Part) -> u64 {
        if part == Part::All {
            self.tables[at.table as usize].clear(at.slot, note::IN_DISK | note::HELD);
        }
        // A session's object may be chosen although a transfer uses its chunks. A put may wait for
        // them to be durable, which copies in memory are not.
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        let is_held = row.is_some_and(|row| row.refs() > 0 || row.pin().is_some());
        let is_dropped = |layer, _| !is_held && part.has(layer);
        let freed = self.drop_where(at, Tier::Disk as usize, is_dropped);
        match self.has_cells(at, Tier::Disk) {
            true => self.counters.evicted_parts += u64::from(freed > 0),
            false => self.counters.evicted_chunks += u64::from(freed > 0),
        }
        freed
    }

    /// Free rows, which all chunk tables share.
    pub(super) fn free_rows(&self) -> usize {
        let used: usize = self.tables.iter().map(|table| table.chunks.len()).sum();
        self.config.max_chunks.saturating_sub(used)
    }

    /// Frees rows so that so many chunks can be added.
    pub(super) fn reserve_rows(&mut self, chunks: usize) -> Result<()> {
        let missing = chunks.saturating_sub(self.free_rows());
        if missing > 0 {
            // Referenced chunks stay. A request for more rows than the others have must not evict
            // any.
            let held: u64 = self.tables.iter().map(|table| table.chunks.counts().held).sum();
            if chunks <= self.config.max_chunks.saturating_sub(held as usize) {
                self.evict_for_rows(missing);
            }
        }
        if chunks > self.free_rows() {
            let most = self.config.max_chunks;
            fail!(
                Limit,
                "{chunks} more chunks; the store knows {most}, and all of them are held, pinned or \
                 in motion: close sessions, or raise chunks= in its spec"
            );
        }
        self.charge_rows(chunks);
        Ok(())
    }

    /// Frees rows by dropping victims of the policies from all tiers.
    fn evict_for_rows(&mut self, chunks: usize) {
        let aim = self.free_rows() + chunks;
        self.forget_located(aim);
        for tier in [Tier::Disk, Tier::Host] {
            let (mut victims, mut refused) = (Vec::new(), Vec::new());
            while self.free_rows() < aim {
                let most = (aim - self.free_rows()).min(MOST_VICTIMS);
                match (tier, &mut self.eviction.disk) {
                    (Tier::Disk, None) => break,
                    (Tier::Disk, Some(cache)) => {
                        cache.choose(self.now_ns, u64::MAX >> 1, most, &mut victims);
                    }
                    _ => self.eviction.host.choose(self.now_ns, u64::MAX >> 1, most, &mut victims),
                }
                if victims.is_empty() {
                    break;
                }
                for victim in victims.drain(..) {
                    if let Some((at, _)) = self.chosen(victim) {
                        self.drop_from_all_tiers(at, tier);
                        refused.extend(self.has_cells(at, tier).then_some(at));
                    }
                }
            }
            // Until now the policy does not have them, so that it chooses others.
            for at in refused {
                self.enter_cache(at, tier, Part::All);
                self.note_continued(at, tier);
            }
        }
    }

    /// Whether a cell of a chunk is resident in a tier.
    fn has_cells(&self, at: At, tier: Tier) -> bool {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        row.is_some_and(|row| row.cells()[tier as usize] > 0)
    }

    /// Drops what may leave of a chunk that a tier's policy has chosen, from all tiers. What remains
    /// is not in the policy.
    fn drop_from_all_tiers(&mut self, at: At, from: Tier) {
        if from == Tier::Disk {
            self.take_from_disk(at, Part::All);
            self.drop_where(at, Tier::Host as usize, |_, _| true);
            return self.tidy(at.table, at.slot);
        }
        let is_last = self.eviction.disk.is_none();
        let flags = if is_last { note::IN_HOST | note::HELD } else { note::IN_HOST };
        if self.eviction.host.granularity != Granularity::Cell {
            self.tables[at.table as usize].clear(at.slot, flags);
        }
        let all = self.drop_where(at, Tier::Host as usize, |_, tiers| tiers == HOST_MASK);
        self.counters.dropped_chunks += u64::from(all > 0);
        self.tidy(at.table, at.slot);
    }

    /// Takes the next upkeep task; one at a time is in flight.
    pub(super) fn take_upkeep(&mut self) -> Option<Upkeep> {
        if self.stages.in_flight[WorkerKind::Upkeep as usize] > 0 {
            return None;
        }
        let disk = self.disk.clone()?;
        // First: it is short, and writers wait for it.
        if disk.wants_prepare() {
            self.disk_gc.used_before = disk.stats().used_bytes;
            return Some(Upkeep::Prepare);
        }
        if self.disk_gc.is_checkpoint_due() {
            self.disk_gc.holds_writes = self.stages.in_flight[WorkerKind::Write as usize] > 0;
            if self.disk_gc.holds_writes {
                return None;
            }
            return Some(Upkeep::Checkpoint(self.begin_checkpoint(&disk)));
        }
        let stats = disk.stats();
        self.disk_gc.used_before = stats.used_bytes;
        self.disk_gc.needs_check = false;
        if std::mem::take(&mut self.disk_gc.sweeps) {
            return Some(Upkeep::Sweep);
        }
        let full = stats.used_bytes as f64 > stats.budget_bytes as f64 * self.config.high;
        if !full && self.disk_gc.parked.is_empty() {
            return None;
        }
        match self.disk_gc.next_to_compact(&disk.segments()) {
            Some(number) => Some(Upkeep::Compact(number)),
            // Less is known of recovered segments: they had more dead blocks than it seemed.
            None if stats.used_bytes > stats.budget_bytes
                && self.evict_from_disk(disk.segment_bytes()) > 0 =>
            {
                Some(Upkeep::Sweep)
            }
            None => {
                self.give_up_parked();
                None
            }
        }
    }

    pub(super) fn done_upkeep(&mut self, upkeep: &Upkeep, outcome: Result<()>) {
        match (upkeep, &outcome) {
            (Upkeep::Checkpoint(_), Err(error)) => {
                log::info!("the checkpoint was not written: {error}");
            }
            (Upkeep::Compact(number), _) => {
                // A segment that a sweep has removed meanwhile is no error.
                if let Err(error) = &outcome
                    && error.status() != Status::NotFound
                {
                    log::warn!("segment {number} could not be compacted: {error}");
                }
                // The segment is compacted again only after more cells were dropped from it.
                self.disk_gc.dropped.remove(number);
                self.disk_gc.old.remove(number);
            }
            _ => {}
        }
        let used = self.disk.as_ref().map_or(0, |disk| disk.stats().used_bytes);
        self.disk_gc.needs_check = true;
        if used < self.disk_gc.used_before {
            for (at, _) in self.disk_gc.take_parked() {
                self.release_after(at, |core| core.queue_chunk(at));
            }
        }
    }

    /// Fails chunks that wait for space: none can be freed.
    fn give_up_parked(&mut self) {
        for (at, error) in self.disk_gc.take_parked() {
            match self.disk_gc.may_try_again(at) {
                true => self.release_after(at, |core| core.queue_chunk(at)),
                false => self.release_after(at, |core| core.fail_writeback(at, &error)),
            }
        }
    }

    /// Whether a cell that compaction found is live at this place.
    pub fn is_live(&self, cell: &CellAt) -> bool {
        self.find_cell(cell).is_some_and(|(table, which)| {
            let place = self.tables[table as usize].chunks.place(which, Tier::Disk);
            matches!(place, Ok(Some(Location::Disk { spot, .. })) if spot == cell.spot.0)
        })
    }

    /// Compaction has moved a cell. Returns whether the cell was still live.
    pub fn moved(&mut self, cell: &CellAt, to: Spot) -> bool {
        let Some((table, which)) = self.find_cell(cell) else { return false };
        let chunks = &mut self.tables[table as usize].chunks;
        chunks.relocate(which, cell.spot.0, to.0).unwrap_or(false)
    }

    /// Compaction has found a damaged cell. Returns whether the cell was still live.
    pub fn lost(&mut self, cell: &CellAt) -> bool {
        if !self.is_live(cell) {
            return false;
        }
        let Some((table, which)) = self.find_cell(cell) else { return false };
        self.counters.corrupt_cells += 1;
        let dropped = self.tables[table as usize].chunks.lose(which, Tier::Disk);
        self.note_removed(table, which, Tier::Disk);
        self.forget_if_alone(table, which);
        self.wake(table, which);
        self.tidy(table, which.chunk);
        // A cell that is being read is dropped when the read ends.
        matches!(dropped, Ok(Dropped::Freed(_)))
    }

    fn find_cell(&self, cell: &CellAt) -> Option<(u32, Cell)> {
        let namespace = self.find_namespace(&cell.chunk.namespace)?;
        let table = self.namespaces.get(namespace as usize)?.table;
        let slot = self.tables[table as usize].chunks.find(&cell.chunk.key)?;
        Some((table, Cell { chunk: slot, layer: cell.layer as usize }))
    }
}

/// Bytes that cells and headers may use after an eviction: `share` of the disk, without open
/// segments and kept space.
pub fn disk_room(bytes: u64, share: f64, beside: u64) -> u64 {
    ((bytes as f64 * share) as u64).saturating_sub(beside)
}

fn bytes_of(blocks: u32) -> u64 {
    u64::from(blocks) * BLOCK_BYTES as u64
}

// ---------- clear
//
// Clearing: removes all chunks of a namespace, or of a part of a session.

/// Outcome of a removal, in chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// In no tier any more.
    pub removed: u64,
    /// Kept: sessions, transfers or pins reference them, or chunks that stay continue them.
    pub held: u64,
    /// Kept: a transfer or write was in flight. A later call may remove them.
    pub moving: u64,
}

/// Removes the chunks of a namespace, some at a time.
pub struct Clearing {
    namespace: u32,
    /// Serial of the namespace, since its number may be another one's later.
    serial: u64,
    table: u32,
    /// Its chunks, the last of each path first, with the generation of the row.
    chunks: Vec<(Slot, u32)>,
    at: usize,
    /// Outcome so far.
    pub cleared: Cleared,
}

impl Clearing {
    /// Starts again with the chunks that stayed. Removed chunks stay counted.
    pub fn again(&mut self) {
        self.at = 0;
        self.cleared = Cleared { removed: self.cleared.removed, ..Cleared::default() };
    }
}

/// Outcome of a removal for one chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It was in no tier.
    Nothing,
    Dropped,
    Held,
    Moving,
}

/// Callers that wait until a removal survives a restart, which needs a checkpoint that begins after
/// the removal. Each caller gets a number.
#[derive(Default)]
struct CheckpointWait {
    requested: u64,
    /// The number up to which the checkpoint in flight will be valid.
    begun: u64,
    lasting: u64,
    /// The number up to which a checkpoint failed, and its error.
    failed: Option<(u64, Error)>,
    /// Waiters must look again.
    has_news: bool,
}

impl StoreState {
    /// Begins to clear a namespace of the chunks that it has now.
    pub fn begin_clear(&self, namespace: u32) -> Result<Clearing> {
        let Some(entry) = self.namespace(namespace) else {
            fail!(NotFound, "there is no namespace {namespace}");
        };
        let chunks = &self.tables[entry.table as usize].chunks;
        let mut rows: Vec<(u32, Slot, u32)> = Vec::new();
        for slot in chunks.slots() {
            let Some(row) = chunks.chunk(slot).filter(|row| row.namespace() == namespace) else {
                continue;
            };
            if rows.try_reserve(1).is_err() {
                fail!(NoMem, "no memory to clear {} chunks", rows.len());
            }
            rows.push((row.position(), slot, row.generation()));
        }
        rows.sort_unstable_by_key(|&(position, slot, _)| (std::cmp::Reverse(position), slot));
        let chunks = rows.into_iter().map(|(_, slot, generation)| (slot, generation)).collect();
        let (serial, table, cleared) = (entry.serial, entry.table, Cleared::default());
        Ok(Clearing { namespace, serial, table, chunks, at: 0, cleared })
    }

    /// Cells written so far, failures included; None = nothing is queued or in flight.
    pub fn writes_so_far(&self) -> Option<u64> {
        let is_writing = self.stages.in_flight[WorkerKind::Write as usize] > 0
            || !self.writeback.queue.is_empty();
        is_writing.then_some(self.counters.written_cells + self.counters.failed_writes)
    }

    /// Removes up to `most` more chunks. Returns whether some are left.
    pub fn clear_more(&mut self, clearing: &mut Clearing, most: usize) -> bool {
        let table = clearing.table;
        if self
            .namespace(clearing.namespace)
            .is_none_or(|namespace| namespace.serial != clearing.serial)
        {
            return false; // nothing was left of it
        }
        let end = clearing.chunks.len().min(clearing.at.saturating_add(most));
        let rows = &self.tables[table as usize].chunks;
        let same = |&&(slot, generation): &&(Slot, u32)| rows.chunk_of(slot, generation).is_some();
        let part = &clearing.chunks[clearing.at..end];
        let slots: Vec<Slot> = part.iter().filter(same).map(|&(slot, _)| slot).collect();
        clearing.cleared = self.remove_chunks(table, &slots, clearing.cleared);
        clearing.at = end;
        let is_over = end == clearing.chunks.len();
        if is_over && self.namespaces[clearing.namespace as usize].rows == 0 {
            self.publish_cleared(clearing.namespace);
        }
        self.settle();
        !is_over
    }

    /// Removes the chunks of a range of a session's tokens from all tiers, if nothing else
    /// references them.
    pub fn drop_range(&mut self, at: u32, first: u64, tokens: u64) -> Result<Cleared> {
        let (first, end, tail) = self.chunks_of(at, first, tokens)?;
        let slots = self.release_range(at, first..end, tail)?;
        let table = self.namespaces[self.session(at)?.namespace as usize].table;
        let cleared = self.remove_chunks(table, &slots, Cleared::default());
        self.settle();
        Ok(cleared)
    }

    /// Removes chunks; each stands after its ancestors in `slots`.
    pub(super) fn remove_chunks(&mut self, table: u32, slots: &[Slot], before: Cleared) -> Cleared {
        self.take_all(table, slots, before, StoreState::drop_remote)
    }

    /// As [`StoreState::remove_chunks`], for an eviction: the remote keeps its objects.
    pub(super) fn drop_chunks_locally(&mut self, table: u32, slots: &[Slot]) -> Cleared {
        self.take_all(table, slots, Cleared::default(), StoreState::forget_remote)
    }

    fn take_all(
        &mut self,
        table: u32,
        slots: &[Slot],
        before: Cleared,
        remote: fn(&mut StoreState, At),
    ) -> Cleared {
        let mut cleared = before;
        let stopped = self.cancel_writebacks(table, slots);
        for &slot in slots {
            match self.drop_one_chunk(At { table, slot }, remote) {
                Fate::Nothing => {}
                Fate::Dropped => cleared.removed += 1,
                Fate::Held => cleared.held += 1,
                Fate::Moving => cleared.moving += 1,
            }
        }
        for at in stopped {
            let row = self.tables[table as usize].chunks.chunk(at.slot);
            if row.is_some_and(|row| row.cells()[Tier::Host as usize] > 0) {
                self.enter_cache(at, Tier::Host, Part::All);
            }
        }
        cleared
    }

    /// Takes chunks out of the write queue if nothing but the queue references them and they are to
    /// be removed.
    fn cancel_writebacks(&mut self, table: u32, slots: &[Slot]) -> BTreeSet<At> {
        let mut own = BTreeSet::new();
        // For each chunk, how many of its children are to be removed.
        let mut behind: BTreeMap<Slot, u32> = BTreeMap::new();
        let rows = &self.tables[table as usize];
        for &slot in slots {
            let Some(row) = rows.chunks.chunk(slot) else { continue };
            let is_queued = rows.has(slot, note::QUEUED);
            let is_free = row.refs() == u32::from(is_queued)
                && row.pin().is_none()
                // A put may wait for this chunk as an ancestor, and would never be woken.
                && !self.writeback.chunk_waiters.contains_key(&At { table, slot });
            let holes = self.namespace(row.namespace()).is_some_and(|namespace| namespace.holes);
            let is_last = row.children() == behind.get(&slot).copied().unwrap_or(0);
            if !is_free || row.is_moving() || !(is_last || holes) {
                continue;
            }
            if let Some(parent) = rows.chunks.parent(slot) {
                *behind.entry(parent).or_default() += 1;
            }
            if is_queued {
                own.insert(At { table, slot });
            }
        }
        if own.is_empty() {
            return own;
        }
        self.writeback.queue.retain(|at| !own.contains(at));
        for &at in &own {
            let rows = &mut self.tables[table as usize];
            rows.clear(at.slot, note::QUEUED | note::FORCED);
            if let Err(error) = rows.chunks.release(at.slot) {
                log::error!("internal: a queued chunk was not referenced: {error}");
            }
            self.cancel_demotion(at);
        }
        own
    }

    fn drop_one_chunk(&mut self, at: At, remote: fn(&mut StoreState, At)) -> Fate {
        let rows = &self.tables[at.table as usize];
        // A row without cells may have been removed together with its children.
        let Some(row) = rows.chunks.chunk(at.slot) else { return Fate::Nothing };
        let on_its_way = note::QUEUED | note::FORCED | note::LEAVES;
        if row.is_moving() || rows.has(at.slot, on_its_way) {
            return Fate::Moving;
        }
        if row.is_blocked() {
            return Fate::Held;
        }
        let fate = if row.cells_somewhere() == 0 { Fate::Nothing } else { Fate::Dropped };
        remote(self, at);
        self.drop_where(at, Tier::Host as usize, |_, _| true);
        self.drop_where(at, Tier::Disk as usize, |_, _| true);
        self.tidy(at.table, at.slot);
        fate
    }

    fn publish_cleared(&mut self, namespace: u32) {
        let Some(key) = self.namespace(namespace).map(|namespace| namespace.key.0) else { return };
        let at_ns = self.now_ns;
        self.events.add(|number| Event {
            number,
            at_ns,
            kind: Kind::Cleared as u32,
            parent: key,
            namespace: key,
            ..Event::default()
        });
    }

    /// Requests that all removals so far survive a restart. Returns the number to wait for with
    /// [`StoreState::durability`]. Removed cells are still in the log; only a checkpoint excludes them.
    pub fn request_durability(&mut self) -> u64 {
        if self.disk.is_none() {
            return 0;
        }
        self.disk_gc.checkpoints.requested += 1;
        self.disk_gc.sweep_soon();
        self.request_checkpoint();
        self.disk_gc.checkpoints.requested
    }

    /// The same for a cleared namespace. If nothing was removed since an earlier call that did not
    /// wait to the end, its number is returned.
    pub fn request_durable_clear(&mut self, clearing: &mut Clearing) -> u64 {
        let removed = clearing.cleared.removed;
        let namespace = self.namespaces.get_mut(clearing.namespace as usize);
        let Some(namespace) = namespace.filter(|namespace| namespace.serial == clearing.serial)
        else {
            return self.request_durability();
        };
        let before = std::mem::take(&mut namespace.pending_clear);
        clearing.cleared.removed += before.removed;
        let failed = matches!(self.durability(before.turn), Some(Err(_)));
        let turn = match removed == 0 && before.turn > 0 && !failed {
            true => before.turn,
            false => self.request_durability(),
        };
        if let Some(namespace) = self.namespaces.get_mut(clearing.namespace as usize) {
            namespace.pending_clear = PendingClear { turn, removed: clearing.cleared.removed };
        }
        turn
    }

    /// The caller of a clear knows whether it is durable.
    pub fn end_clear(&mut self, clearing: &Clearing) {
        let namespace = self.namespaces.get_mut(clearing.namespace as usize);
        if let Some(namespace) = namespace.filter(|namespace| namespace.serial == clearing.serial) {
            namespace.pending_clear = PendingClear::default();
        }
    }

    /// Whether the removals before a number survive a restart; `None` = not known yet.
    pub fn durability(&self, turn: u64) -> Option<Result<()>> {
        if turn <= self.disk_gc.checkpoints.lasting {
            return Some(Ok(()));
        }
        let failed = self.disk_gc.checkpoints.failed.as_ref().filter(|(until, _)| turn <= *until);
        failed.map(|(_, error)| Err(error.clone()))
    }

    /// Whether the answer of [`StoreState::durability`] may have changed since the last call.
    pub fn has_durability_news(&mut self) -> bool {
        std::mem::take(&mut self.disk_gc.checkpoints.has_news)
    }
}

// ---------- checkpoint writer
//
// Contents of a checkpoint: the cells on disk, page by page, so that the lock is held for short times
// only.

/// Chunks of a page.
const PAGE_CHUNKS: usize = 256;
/// Records after which a checkpoint is written.
const RECORDS: u64 = 1 << 15;

/// Queries of upkeep to the store's state.
pub trait CheckpointWriter: CellIndex {
    /// Fills a page from `from` on. Returns where the next page begins.
    fn page(&mut self, from: (u32, u32), page: &mut Page) -> Option<(u32, u32)>;
}

/// Chunks and their cells for a checkpoint.
#[derive(Default)]
pub struct Page {
    chunks: Vec<(Chunk, usize)>,
    cells: Vec<CellEntry>,
}

/// A task that keeps the disk in order.
pub enum Upkeep {
    /// Makes the next segments.
    Prepare,
    /// Removes empty segments.
    Sweep,
    /// Moves the live cells of a segment elsewhere.
    Compact(u64),
    /// Writes a checkpoint.
    Checkpoint(Checkpoint),
}

/// A checkpoint to be written.
pub struct Checkpoint {
    cover: Cover,
    chunks: usize,
    cells: usize,
}

impl Checkpoint {
    /// Writes it.
    pub fn write(
        &self,
        disk: &Arc<DiskTier>,
        checkpoint_writer: &mut dyn CheckpointWriter,
    ) -> Result<()> {
        disk.checkpoint(&self.cover, self.chunks, self.cells, &mut |sink| {
            let (mut page, mut next) = (Page::default(), Some((0, 0)));
            while let Some(from) = next {
                next = checkpoint_writer.page(from, &mut page);
                let mut first = 0;
                for (chunk, cells) in &page.chunks {
                    sink.chunk(chunk, &page.cells[first..first + cells])?;
                    first += cells;
                }
            }
            Ok(())
        })
    }
}

impl StoreState {
    /// Requests a checkpoint, which makes the next opening faster.
    pub fn request_checkpoint(&mut self) {
        self.disk_gc.wants_checkpoint = true;
        self.settle();
    }

    /// Begins a checkpoint. No write may be in flight, so that everything in the log is in the
    /// tables.
    pub(super) fn begin_checkpoint(&mut self, disk: &Arc<DiskTier>) -> Checkpoint {
        self.disk_gc.wants_checkpoint = false;
        self.disk_gc.records = 0;
        let counts = self.tables.iter().map(|table| table.chunks.counts());
        let (mut chunks, mut cells) = (0, 0);
        for count in counts {
            chunks += count.chunks as usize;
            cells += count.cells[Tier::Disk as usize] as usize;
        }
        // Records written meanwhile are in the log after the checkpoint, and may be in both.
        let more = |n: usize| n + n / 8 + 256;
        Checkpoint { cover: disk.cover(), chunks: more(chunks), cells: more(cells) }
    }

    /// Fills a page of a checkpoint from a position (table, row) on. Returns the position of the
    /// next page.
    pub fn page(&self, from: (u32, u32), page: &mut Page) -> Option<(u32, u32)> {
        page.chunks.clear();
        page.cells.clear();
        let (number, first) = from;
        let table = self.tables.get(number as usize)?;
        for slot in table.chunks.slots_from(first) {
            if page.chunks.len() == PAGE_CHUNKS {
                return Some((number, slot));
            }
            let before = page.cells.len();
            for layer in 0..table.layout.layers() {
                let cell = Cell { chunk: slot, layer };
                let place = table.chunks.place(cell, Tier::Disk);
                let Ok(Some(Location::Disk { spot, seal, coded })) = place else { continue };
                let planes = table.stored_planes(cell).count() as u16;
                let stored_bytes = table.disk_bytes(cell, coded) as u32;
                let (layer, codec) = (layer as u32, coded.codec());
                page.cells.push(CellEntry { spot, seal, stored_bytes, layer, codec, planes });
            }
            let cells = page.cells.len() - before;
            if cells > 0 {
                page.chunks.push((self.record_of(At { table: number, slot }), cells));
            }
        }
        Some((number + 1, 0))
    }
}

// ---------- recovery
//
// Recovery: cells that an opening finds on disk become rows again.

const VERSION: u8 = 1;

/// Outcome of a recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Namespaces recovered.
    pub namespaces: u64,
    /// Chunks recovered.
    pub chunks: u64,
    /// Cells recovered.
    pub cells: u64,
    /// Cells of no use: of unknown namespaces, of partial chunks, duplicates, or beyond the limit.
    pub dropped: u64,
}

impl StoreState {
    /// Takes over what the disk tier has recovered. Must be called before anything else.
    pub fn adopt(&mut self, recovered: &Recovered) -> Result<Adopted> {
        self.check_limits(recovered)?;
        let namespaces = self.adopt_namespaces(recovered)?;
        let mut adopted = Adopted { namespaces: namespaces.len() as u64, ..Adopted::default() };
        let mut unwanted: Vec<(Spot, u64)> = Vec::new();
        for (chunk, cells) in oldest_first(recovered, self.free_rows()) {
            let added = self.adopt_chunk(chunk);
            for place in cells {
                let layer = place.layer as usize;
                let was_added = added.is_some_and(|(table, slot)| {
                    let cell = Cell { chunk: slot, layer };
                    let bytes = self.tables[table as usize].planes(cell).bytes();
                    let (spot, seal) = (place.spot, place.seal);
                    form_of(place, bytes).is_some_and(|coded| {
                        self.adopt_cell(table, cell, Location::Disk { spot, seal, coded })
                    })
                });
                match was_added {
                    true => adopted.cells += 1,
                    false => unwanted.push((Spot(place.spot), u64::from(place.stored_bytes))),
                }
            }
            if let Some((table, slot)) = added {
                adopted.chunks += 1;
                self.note_needed_on_disk(At { table, slot });
                self.tidy(table, slot);
            }
        }
        adopted.dropped = unwanted.len() as u64;
        self.counters.recovered_chunks = adopted.chunks;
        self.counters.recovered_cells = adopted.cells;
        self.counters.recovered_unusable_cells = adopted.dropped;
        // Namespaces without a usable chunk.
        self.list_unused_namespaces(&namespaces);
        self.charge_rows(0);
        if let Some(disk) = &self.disk {
            disk.drop_cells(unwanted);
            self.disk_gc.recovered(&disk.segments());
        }
        // The disk may be smaller than before.
        self.balance_disk();
        Ok(adopted)
    }

    /// Takes over recovered namespaces and returns their numbers. If there are too many, those with
    /// the latest writes win; the records of the others are dropped.
    fn adopt_namespaces(&mut self, recovered: &Recovered) -> Result<Vec<u32>> {
        let (mut unknown, mut first) = (0, None);
        let (mut fit, mut layouts) = (Vec::new(), BTreeSet::new());
        for (newest, at, key) in newest_first(recovered) {
            let session = &recovered.sessions[at];
            if newest == 0 {
                self.drop_found_note(&session.name);
                continue;
            }
            let opts = match read_note(key, &session.payload) {
                Ok(opts) => opts,
                Err(error) => {
                    (unknown, first) = (unknown + 1, first.or(Some(error)));
                    continue;
                }
            };
            // A namespace that was given up may have been opened again since.
            let layout = opts.layout.encode();
            let is_new = !layouts.contains(&layout);
            if fit.len() >= self.config.max_namespaces
                || is_new && layouts.len() >= self.config.max_layouts
            {
                self.drop_found_note(&session.name);
                continue;
            }
            layouts.insert(layout);
            fit.push((at, fit.len(), opts));
        }
        // In the order of their names, so that their numbers do not depend on the order on disk.
        fit.sort_unstable_by_key(|&(at, ..)| at);
        let mut numbers = vec![0; fit.len()];
        for (at, age, opts) in &fit {
            let number = self.add_namespace(opts)?;
            numbers[*age] = number;
            let disk = self.disk.as_ref();
            let name = &recovered.sessions[*at].name;
            let mark = disk.and_then(|disk| disk.segment_of_session(name)).map(Mark::found);
            self.namespaces[number as usize].below.noted = mark.map_or(Noted::No, Noted::Written);
        }
        if let Some(error) = first {
            log::warn!(
                "{unknown} namespace records on disk cannot be read, and their chunks are dropped: {error}"
            );
        }
        Ok(numbers)
    }

    fn drop_found_note(&mut self, name: &[u8]) {
        if let Some(disk) = &self.disk {
            disk.drop_session(name);
            self.disk_gc.sweep_soon();
        }
    }

    fn adopt_chunk(&mut self, chunk: &record::Chunk) -> Option<(u32, Slot)> {
        let number = self.find_namespace(&chunk.namespace)?;
        let namespace = self.namespaces[number as usize];
        let is_known = self.tables[namespace.table as usize].chunks.find(&chunk.key).is_some();
        if !is_known && self.free_rows() == 0 {
            return None;
        }
        let rows = &mut self.tables[namespace.table as usize];
        // A partial chunk belongs to a session, which no longer exists.
        if rows.fingerprint != chunk.fingerprint || chunk.valid_tokens != rows.layout.chunk_tokens()
        {
            return None;
        }
        let new = NewChunk {
            key: chunk.key,
            namespace: number,
            parent: NONE,
            position: chunk.position,
            valid_tokens: chunk.valid_tokens,
            owner: NONE,
            holes: namespace.holes,
        };
        // Its parent may have been in memory only, and may be stored again.
        let added = rows.chunks.add_with_parent_key(&new, &chunk.parent).ok()?;
        self.namespaces.row_added(number, added);
        Some((namespace.table, added.slot()))
    }

    fn adopt_cell(&mut self, table: u32, cell: Cell, place: Location) -> bool {
        let chunks = &mut self.tables[table as usize].chunks;
        if !matches!(chunks.begin_store(cell, Tier::Disk), Ok(Begin::Started)) {
            return false;
        }
        let is_stored = chunks.end_store(cell, Tier::Disk, Some(place)).is_ok();
        if is_stored {
            self.tables[table as usize].set(cell.chunk, note::UNREAD);
            self.arrived(table, cell, Tier::Disk);
        }
        is_stored
    }

    /// Name and content of a namespace's record.
    pub(super) fn namespace_note(&self, at: u32) -> (Vec<u8>, Vec<u8>) {
        let namespace = &self.namespaces[at as usize];
        let name = [NOTE, &namespace.key.0].concat();
        let layout = self.tables[namespace.table as usize].layout.encode();
        (name, [&[VERSION, u8::from(namespace.holes)], layout.as_slice()].concat())
    }
}

/// Recovered namespace records, by index and key, those with the latest write first; 0 = no chunk
/// of it is on disk.
fn newest_first(recovered: &Recovered) -> Vec<(u64, usize, &[u8])> {
    let mut newest: BTreeMap<Key, u64> = BTreeMap::new();
    for (chunk, cells) in recovered.chunks() {
        // Places in the log grow with the segment and the block.
        let spots = cells.iter().map(|place| place.spot.saturating_add(1));
        let last = newest.entry(chunk.namespace).or_default();
        *last = spots.fold(*last, u64::max);
    }
    let of = |key| <[u8; 32]>::try_from(key).ok().and_then(|key| newest.get(&Key(key)).copied());
    let notes = recovered.sessions.iter().enumerate().filter_map(|(at, session)| {
        let key = session.name.strip_prefix(NOTE)?;
        Some((of(key).unwrap_or(0), at, key))
    });
    let mut notes: Vec<(u64, usize, &[u8])> = notes.collect();
    notes.sort_by_key(|&(newest, ..)| Reverse(newest));
    notes
}

/// Recovered chunks, each after its ancestors and in the order in which they were written, so that
/// policies see the latest last. If there are too many, the newest are kept.
fn oldest_first(recovered: &Recovered, rows: usize) -> Vec<(&record::Chunk, &[CellEntry])> {
    let mut all: Vec<(&record::Chunk, &[CellEntry])> = recovered.chunks().collect();
    // They are sorted by position; of equal positions the newest is first.
    let fit = all.len().min(rows);
    all[..fit].chunk_by_mut(|a, b| a.0.position == b.0.position).for_each(<[_]>::reverse);
    all
}

/// Coding of a cell of `raw_bytes` at a place, if it is valid.
fn form_of(place: &CellEntry, raw_bytes: u64) -> Option<StoredForm> {
    let (stored, codec) = (u64::from(place.stored_bytes), place.codec);
    if codec == 0 {
        return (stored == raw_bytes).then_some(StoredForm::PLAIN);
    }
    let is_known = u8::try_from(codec).ok().and_then(Codec::from_code).is_some();
    let is_shorter = blocks_of(stored) < blocks_of(raw_bytes);
    StoredForm::new(codec, blocks_of(stored)).filter(|_| is_known && is_shorter)
}

fn read_note(key: &[u8], content: &[u8]) -> Result<NamespaceOpts> {
    let (Ok(key), [VERSION, holes, layout @ ..]) = (<[u8; 32]>::try_from(key), content) else {
        fail!(Unsupported, "a namespace record of {} bytes is not valid", content.len());
    };
    if *holes > 1 {
        return Err(Status::Corrupt.into());
    }
    Ok(NamespaceOpts { key: Key(key), layout: Layout::decode(layout)?, holes: *holes == 1 })
}
