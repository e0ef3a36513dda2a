//! Room on disk: who leaves it, which segment is cleaned, and what waits for that.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::budget::Tier;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::format::segment::BLOCK_BYTES;
use crate::meta::chunks::{Cell, Gone};
use crate::store::state::chunk_table::note;
use crate::store::state::granularity::{Granularity, Part};
use crate::store::state::work::{self, WorkerKind};
use crate::store::state::{At, StoreState};
use crate::tier::disk::{CellAt, SegmentInfo, Spot};

const HOST: u8 = 1 << Tier::Host as u8;
/// How often a chunk is written again after a failure.
const TRIES: u8 = 3;
/// A segment is cleaned when at least this part of it is dead.
const DEAD_PART: u32 = 8;
/// Most chunks that leave the disk at once.
const MOST_VICTIMS: usize = 256;

/// What keeps the disk in order.
#[derive(Default)]
pub(super) struct Upkeep {
    /// Empty segments may be there.
    sweeps: bool,
    /// Something has changed: it is to be seen whether more has to be done.
    looks: bool,
    /// Chunks that wait for room, and why.
    parked: Vec<(At, Error)>,
    /// The same, to be found by.
    parked_chunks: BTreeSet<At>,
    /// Failures of chunks in a row.
    failures: BTreeMap<At, u8>,
    /// Blocks of cells that were dropped from each segment. The tier counts headers as
    /// dead, too, and moving cells makes new ones.
    dropped: BTreeMap<u64, u32>,
    /// Segments of earlier lives, of which that is not known, and that were not
    /// cleaned yet.
    old: BTreeSet<u64>,
    /// What was found at the start may never have been synced.
    recovered: bool,
    /// The newest segment of earlier lives, until all that was found is durable; else 0.
    pub(super) found_until: u64,
    /// A checkpoint is asked for.
    pub(super) wants_checkpoint: bool,
    /// Records written since the last one was begun.
    pub(super) records: u64,
    /// No write is begun until a checkpoint has taken its point of the log.
    pub(super) holds_writes: bool,
    /// Chunks that could not be written, in the end.
    pub(super) given_up: u64,
    /// What was used when the last turn of upkeep began.
    used_before: u64,
}

impl Upkeep {
    pub(super) fn succeeded(&mut self, at: At) {
        self.failures.remove(&at);
    }

    /// Counts a failure of a chunk; false when there were enough.
    pub(super) fn may_try_again(&mut self, at: At) -> bool {
        let failures = self.failures.entry(at).or_default();
        *failures += 1;
        if *failures < TRIES {
            return true;
        }
        self.failures.remove(&at);
        false
    }

    /// A board will be another layout's.
    pub(super) fn forget_table(&mut self, table: u32) {
        self.failures.retain(|at, _| at.table != table);
    }

    /// Whether something has to be done, or is nearly full.
    pub(super) fn wants(&self) -> bool {
        self.sweeps || self.looks || !self.parked.is_empty()
    }

    /// Whether chunks wait for room.
    pub(super) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Whether a chunk does.
    pub(super) fn is_parked(&self, at: At) -> bool {
        self.parked_chunks.contains(&at)
    }

    /// Those that wait for room do no more.
    fn take_parked(&mut self) -> Vec<(At, Error)> {
        self.parked_chunks.clear();
        std::mem::take(&mut self.parked)
    }

    /// What it waits for, in words.
    pub(super) fn words(&self) -> String {
        format!("{} parked, sweeps: {}", self.parked.len(), self.sweeps)
    }

    /// Cells were dropped.
    pub(super) fn dropped(&mut self, spot: Spot, bytes: u64) {
        let blocks = bytes.div_ceil(BLOCK_BYTES as u64) as u32;
        *self.dropped.entry(spot.segment()).or_default() += blocks;
    }

    /// What was on disk at the start.
    pub(super) fn recovered(&mut self, segments: &[SegmentInfo]) {
        self.old = segments.iter().map(|segment| segment.number).collect();
        self.recovered = true;
        self.found_until = segments.iter().map(|segment| segment.number).max().unwrap_or(0);
    }

    /// Bytes that cleaning would write again: cells that live, and headers. Of segments
    /// of earlier lives it is not known what was dropped: there, cells alone.
    fn kept_bytes(&self, segments: &[SegmentInfo]) -> u64 {
        let kept = segments.iter().map(|s| match self.old.contains(&s.number) {
            true => s.live_blocks,
            false => {
                let dropped = self.dropped.get(&s.number).copied().unwrap_or(0);
                (s.live_blocks + s.dead_blocks).saturating_sub(dropped).max(s.live_blocks)
            }
        });
        kept.map(bytes_of).sum()
    }

    /// The segment from which most was dropped, if it is worth cleaning. While chunks wait
    /// for room little is enough, if all of that together makes a segment.
    fn next_to_clean(&mut self, segments: &[SegmentInfo]) -> Option<u64> {
        // They are in the order of their numbers.
        let is_there = |number: &u64| segments.binary_search_by_key(number, |s| s.number).is_ok();
        self.dropped.retain(|number, _| is_there(number));
        let settled = segments.iter().filter(|s| !s.is_front);
        let gain = |s: &SegmentInfo| self.dropped.get(&s.number).copied().unwrap_or(0);
        let best = settled.clone().max_by_key(|s| gain(s))?;
        let all: u64 = settled.clone().map(|s| u64::from(gain(s))).sum();
        let is_wanted = !self.parked.is_empty() && all >= u64::from(best.blocks);
        if gain(best) >= (best.blocks / DEAD_PART).max(1) || is_wanted && gain(best) > 0 {
            return Some(best.number);
        }
        let old = settled.filter(|s| self.old.contains(&s.number) && s.dead_blocks > s.blocks / 2);
        Some(old.max_by_key(|s| s.dead_blocks)?.number)
    }

    /// Whether a chunk that waits for room has waited before.
    fn is_refused_again(&self) -> bool {
        self.parked.iter().any(|(at, _)| self.failures.contains_key(at))
    }

    /// Segments may be empty now.
    pub(super) fn sweep_soon(&mut self) {
        self.sweeps = true;
    }

    pub(super) fn takes_recovered(&mut self) -> bool {
        std::mem::take(&mut self.recovered)
    }
}

impl StoreState {
    /// A chunk waits until there is room on disk. It stays held.
    pub(super) fn park(&mut self, at: At, error: Error) {
        self.upkeep.parked_chunks.insert(at);
        self.upkeep.parked.push((at, error));
    }

    /// Has chunks leave the disk when it is nearly full, or more wants to come.
    pub(super) fn look_at_disk(&mut self) {
        let Some(disk) = self.disk.clone() else { return };
        let stats = disk.stats();
        let full = (stats.budget_bytes as f64 * self.config.high) as u64;
        if self.upkeep.parked.is_empty() && stats.used_bytes <= full {
            return;
        }
        let segments = disk.segments();
        let longest = segments.iter().map(|s| bytes_of(s.blocks)).max().unwrap_or(0);
        // Kept back, and written to by callers and by cleaning; one that is cleaned may be
        // longer than those that are made now.
        let segment = disk.segment_bytes();
        let beside = 2 * segment + longest.max(segment);
        // Refused again and again within the budget: others have filled the disk.
        let is_short =
            self.upkeep.is_refused_again() && stats.used_bytes + beside < stats.budget_bytes;
        let all_bytes = if is_short { stats.used_bytes } else { stats.budget_bytes };
        let kept = self.upkeep.kept_bytes(&segments);
        // That and what is parked need room as well. Beyond the budget no room is made ahead.
        let is_over = stats.used_bytes > all_bytes;
        let part = if is_over { self.config.high } else { self.config.disk_share() };
        let aim = disk_room(all_bytes, part, beside);
        let parked: u64 =
            self.upkeep.parked.iter().map(|(at, _)| self.only_in_host(*at, Part::All)).sum();
        self.evict_from_disk((kept + parked).saturating_sub(aim));
        self.upkeep.sweeps = true;
    }

    /// Has chunks leave the disk until so many bytes are free, or nobody can; how many are.
    fn evict_from_disk(&mut self, wanted: u64) -> u64 {
        let (mut over, mut all) = (wanted, 0);
        let mut victims = Vec::new();
        while over > 0 {
            let Some(cache) = &mut self.disk_cache else { break };
            cache.choose(self.now_ns, over, MOST_VICTIMS, &mut victims);
            if victims.is_empty() {
                break;
            }
            let (mut freed, mut came) = (0, false);
            for victim in victims.drain(..) {
                if let Some((at, part)) = self.chosen(victim) {
                    let bytes = self.leave_disk(at, part);
                    freed += bytes;
                    came |= bytes > 0 || self.note_continued(at, Tier::Disk);
                }
            }
            over = over.saturating_sub(freed);
            all += freed;
            if !came {
                break; // what was chosen is in use: later
            }
        }
        all
    }

    /// A part of a chunk leaves the disk; what was freed there.
    fn leave_disk(&mut self, at: At, part: Part) -> u64 {
        if part == Part::All {
            self.tables[at.table as usize].clear(at.slot, note::IN_DISK | note::HELD);
        }
        // A session's object is chosen also while somebody uses its chunks: who puts them may
        // wait for them to last, and copies in memory do not.
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        let is_held = row.is_some_and(|row| row.refs() > 0 || row.pin().is_some());
        let goes = |layer, _| !is_held && part.has(layer);
        let freed = self.drop_where(at, Tier::Disk as usize, goes);
        let rows = &self.tables[at.table as usize];
        let row = rows.chunks.chunk(at.slot);
        let is_left = row.is_some_and(|row| row.cells()[Tier::Disk as usize] > 0);
        if is_left {
            self.enter_cache(at, Tier::Disk, part);
        }
        match is_left {
            true => self.counters.disk_parted += u64::from(freed > 0),
            false => self.counters.disk_evicted += u64::from(freed > 0),
        }
        self.tidy(at.table, at.slot);
        freed
    }

    /// Rows that are free: the boards share them.
    pub(super) fn free_rows(&self) -> usize {
        let used: usize = self.tables.iter().map(|table| table.chunks.len()).sum();
        self.config.max_chunks.saturating_sub(used)
    }

    /// Sees to it that so many chunks can be added.
    pub(super) fn rows_for(&mut self, chunks: usize) -> Result<()> {
        let missing = chunks.saturating_sub(self.free_rows());
        if missing > 0 {
            // Those that are held stay: for more than the others nobody has to leave.
            let held: u64 = self.tables.iter().map(|table| table.chunks.counts().held).sum();
            if chunks <= self.config.max_chunks.saturating_sub(held as usize) {
                self.make_rows(missing);
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
        self.pay_for_rows(chunks);
        Ok(())
    }

    /// Makes rows free: the chunks whom the policies choose are gone from all tiers.
    fn make_rows(&mut self, chunks: usize) {
        let aim = self.free_rows() + chunks;
        self.forget_located(aim);
        for tier in [Tier::Disk, Tier::Host] {
            let mut victims = Vec::new();
            let cache = match tier {
                Tier::Disk => self.disk_cache.as_ref(),
                _ => Some(&self.host_cache),
            };
            // Who cannot go is the last to be chosen again: each is asked for once. Parts of a
            // chunk that is in both tiers are continued by others that are in one of them.
            let mut left = cache.map_or(0, |cache| cache.evictor.objects().len());
            while self.free_rows() < aim {
                let before = self.free_rows();
                let most = (aim - before).min(MOST_VICTIMS);
                match (tier, &mut self.disk_cache) {
                    (Tier::Disk, None) => break,
                    (Tier::Disk, Some(cache)) => {
                        cache.choose(self.now_ns, u64::MAX >> 1, most, &mut victims);
                    }
                    _ => self.host_cache.choose(self.now_ns, u64::MAX >> 1, most, &mut victims),
                }
                let (mut came, is_none) = (false, victims.is_empty());
                for victim in victims.drain(..) {
                    if let Some((at, _)) = self.chosen(victim) {
                        // One that others continue may have left the disk alone.
                        came |= self.leave_all(at, tier) || self.note_continued(at, tier);
                    }
                }
                if self.free_rows() == before && !came {
                    left = left.saturating_sub(most);
                    if is_none || left == 0 {
                        break;
                    }
                }
            }
        }
    }

    /// A chunk is gone from all tiers, if it may; whether something of it went.
    fn leave_all(&mut self, at: At, from: Tier) -> bool {
        if from == Tier::Disk {
            let below = self.leave_disk(at, Part::All);
            let above = self.drop_where(at, Tier::Host as usize, |_, _| true);
            self.tidy(at.table, at.slot);
            return below + above > 0;
        }
        let is_last = self.disk_cache.is_none();
        let gone = if is_last { note::IN_HOST | note::HELD } else { note::IN_HOST };
        if self.host_cache.granularity != Granularity::Cell {
            self.tables[at.table as usize].clear(at.slot, gone);
        }
        let all = self.drop_where(at, Tier::Host as usize, |_, there| there == HOST);
        if self.is_in_host(at, Part::All) {
            self.enter_cache(at, Tier::Host, Part::All);
        }
        self.counters.dropped += u64::from(all > 0);
        self.tidy(at.table, at.slot);
        all > 0
    }

    /// The next thing to be done for the disk; one at a time.
    pub(super) fn take_upkeep(&mut self) -> Option<work::Upkeep> {
        if self.under_way[WorkerKind::Upkeep as usize] > 0 {
            return None;
        }
        let disk = self.disk.clone()?;
        if self.is_checkpoint_due() {
            self.upkeep.holds_writes = self.under_way[WorkerKind::Write as usize] > 0;
            if self.upkeep.holds_writes {
                return None;
            }
            return Some(work::Upkeep::Checkpoint(self.begin_checkpoint(&disk)));
        }
        let stats = disk.stats();
        self.upkeep.used_before = stats.used_bytes;
        self.upkeep.looks = false;
        if std::mem::take(&mut self.upkeep.sweeps) {
            return Some(work::Upkeep::Sweep);
        }
        let full = stats.used_bytes as f64 > stats.budget_bytes as f64 * self.config.high;
        if !full && self.upkeep.parked.is_empty() {
            return None;
        }
        match self.upkeep.next_to_clean(&disk.segments()) {
            Some(number) => Some(work::Upkeep::Clean(number)),
            // Of earlier lives less is known: more was there than it seemed.
            None if stats.used_bytes > stats.budget_bytes
                && self.evict_from_disk(disk.segment_bytes()) > 0 =>
            {
                Some(work::Upkeep::Sweep)
            }
            None => {
                self.give_up_parked();
                None
            }
        }
    }

    pub(super) fn done_upkeep(&mut self, upkeep: &work::Upkeep, outcome: Result<()>) {
        match (upkeep, &outcome) {
            (work::Upkeep::Checkpoint(_), Err(error)) => {
                log::info!("no checkpoint was written: {error}");
            }
            (work::Upkeep::Clean(number), _) => {
                // One that is gone was swept away meanwhile: that is as good.
                if let Err(error) = &outcome
                    && error.status() != Status::NotFound
                {
                    log::warn!("segment {number} could not be cleaned: {error}");
                }
                // Once is enough, until more is dropped from it.
                self.upkeep.dropped.remove(number);
                self.upkeep.old.remove(number);
            }
            _ => {}
        }
        let used = self.disk.as_ref().map_or(0, |disk| disk.stats().used_bytes);
        self.upkeep.looks = true;
        if used < self.upkeep.used_before {
            for (at, _) in self.upkeep.take_parked() {
                self.let_go_after(at, |core| core.queue_one(at));
            }
        }
    }

    /// There is no more room to be had for chunks that wait for some.
    fn give_up_parked(&mut self) {
        for (at, error) in self.upkeep.take_parked() {
            match self.upkeep.may_try_again(at) {
                true => self.let_go_after(at, |core| core.queue_one(at)),
                false => self.let_go_after(at, |core| core.stays_up(at, &error)),
            }
        }
    }

    /// Whether a cell that cleaning found is still wanted where it is.
    pub fn wants(&self, cell: &CellAt) -> bool {
        self.find_cell(cell).is_some_and(|(table, which)| {
            let place = self.tables[table as usize].chunks.place(which, Tier::Disk);
            matches!(place, Ok(Some(crate::meta::chunks::Place::Disk { spot, .. })) if spot == cell.spot.0)
        })
    }

    /// Cleaning has moved a cell.
    pub fn moved(&mut self, cell: &CellAt, to: Spot) -> bool {
        let Some((table, which)) = self.find_cell(cell) else { return false };
        let chunks = &mut self.tables[table as usize].chunks;
        chunks.relocate(which, cell.spot.0, to.0).unwrap_or(false)
    }

    /// Cleaning has found the bytes of a cell damaged.
    pub fn lost(&mut self, cell: &CellAt) -> bool {
        if !self.wants(cell) {
            return false;
        }
        let Some((table, which)) = self.find_cell(cell) else { return false };
        self.counters.corrupt += 1;
        let gone = self.tables[table as usize].chunks.lose(which, Tier::Disk);
        self.departed(table, which, Tier::Disk);
        self.forget_if_alone(table, which);
        self.wake(table, which);
        self.tidy(table, which.chunk);
        // One that is read is dropped when that has ended.
        matches!(gone, Ok(Gone::Now(_)))
    }

    fn find_cell(&self, cell: &CellAt) -> Option<(u32, Cell)> {
        let space = self.find_space(&cell.chunk.namespace)?;
        let table = self.spaces.get(space as usize)?.table;
        let slot = self.tables[table as usize].chunks.find(&cell.chunk.key)?;
        Some((table, Cell { chunk: slot, layer: cell.layer as usize }))
    }
}

/// What cells and their headers may have of a disk once room was made: a share of it, without what
/// is kept back and written to.
pub fn disk_room(bytes: u64, share: f64, beside: u64) -> u64 {
    ((bytes as f64 * share) as u64).saturating_sub(beside)
}

fn bytes_of(blocks: u32) -> u64 {
    u64::from(blocks) * BLOCK_BYTES as u64
}
