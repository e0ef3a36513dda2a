//! State of the tier's segments. Nothing here is per cell.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::FileId;
use crate::tier::disk::stats::Stats;

/// Up to this number of segments, debug builds compare [`State::maybe_empty`] with all segments.
const MANY: usize = 1 << 10;

/// Write positions. Each has a segment of its own, so that moved cells, which are old, are not
/// mixed with new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Front {
    /// Appends of callers.
    Callers = 0,
    /// Compaction; it may use the segment that is kept back.
    Compaction = 1,
}

/// One segment.
#[derive(Clone, Debug, Default)]
pub(super) struct Segment {
    /// The file, if it is open.
    pub file: Option<FileId>,
    /// Calls that use the file now.
    pub users: u32,
    /// Number of the last use.
    pub touched: u64,
    /// Blocks, the header included.
    pub blocks: u32,
    /// First free block.
    pub next: u32,
    /// Blocks of live cells.
    pub live: u32,
    /// Records of kind *forget*, and newest records of sessions.
    pub forgets: u32,
    pub sessions: u32,
    /// A newer record of a session or cell here may not be durable yet.
    pub superseded: bool,
    /// It has an older state of a session than a record that was found at opening. If a sync of the
    /// newer record had failed, nothing else would have the state. The segment stays until a
    /// checkpoint has the session, or the session is written again.
    pub held: bool,
    /// Records being written.
    pub writing: u32,
    /// Smallest number under which a record in it was first written.
    pub oldest: u64,
    /// Largest number of its records.
    pub newest: u64,
    /// Completed writes; the first ones, `clean` in number, are synced.
    pub dirty: u64,
    pub clean: u64,
    pub syncing: bool,
    /// A sync failed.
    pub poisoned: bool,
    /// Being compacted: no one else removes it.
    pub compacting: bool,
    /// Being removed: no one opens it any more.
    pub leaving: bool,
    /// From before the store was opened: nothing more is written to it.
    pub old: bool,
    /// It could not be read completely at opening: its live cells are not all known.
    pub unread: bool,
    /// Places that should be records and are not.
    pub damaged: u32,
}

impl Segment {
    pub fn file_bytes(&self) -> u64 {
        u64::from(self.blocks) * BLOCK_BYTES as u64
    }

    fn room(&self) -> u32 {
        self.blocks - self.next
    }

    pub fn is_idle(&self) -> bool {
        self.users == 0 && self.writing == 0 && !self.syncing && !self.leaving && !self.compacting
    }

    /// Whether its file may become that of another segment: nothing of it may still fail.
    pub fn is_clean(&self) -> bool {
        !self.poisoned && self.clean >= self.dirty
    }

    pub fn is_empty(&self) -> bool {
        self.live == 0 && self.forgets == 0 && self.sessions == 0 && !self.unread && !self.held
    }

    pub fn note_record(&mut self, number: u64, born: u64) {
        self.oldest = self.oldest.min(born);
        self.newest = self.newest.max(number);
    }
}

/// A session's newest record.
#[derive(Clone, Debug)]
pub(super) struct Note {
    pub payload: Arc<[u8]>,
    pub born: u64,
    pub segment: u64,
    pub blocks: u32,
}

/// A segment that is on disk, and has no record yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    pub number: u64,
    pub file: FileId,
}

/// Space in a segment for one record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grant {
    pub segment: u64,
    pub at: u32,
    pub number: u64,
}

/// State under the tier's lock.
#[derive(Default)]
pub(super) struct State {
    pub segments: BTreeMap<u64, Segment>,
    /// A superset of the empty segments. A large disk has too many segments to scan all of them for
    /// each new one.
    pub maybe_empty: BTreeSet<u64>,
    pub fronts: [Option<u64>; 2],
    /// Removed segments with a failed sync, and the number of their durable writes.
    pub lost: BTreeMap<u64, u64>,
    pub next_record: u64,
    /// First record numbers of the tier's own records that nothing references yet.
    pub underway: Vec<u64>,
    pub next_segment: u64,
    pub next_checkpoint: u64,
    /// Bytes of all files.
    pub used_bytes: u64,
    /// Files of removed segments, by the number of that segment, and segments without records: the
    /// next ones. All have the length of new segments.
    pub spares: Vec<u64>,
    pub ready: VecDeque<Ready>,
    /// Bytes of these files.
    pub spare_bytes: u64,
    pub budget_bytes: u64,
    /// The budget before it shrank, until `shrink_room` bytes are free under the new one; else 0.
    pub shrinks_from: u64,
    pub shrink_room: u64,
    /// Bytes of removed files whose names may reappear after a crash.
    pub lingering_bytes: u64,
    /// Smallest number under which a record of theirs was first written.
    pub lingering_oldest: Option<u64>,
    pub sessions: BTreeMap<Box<[u8]>, Note>,
    /// Existing checkpoints, with their lengths.
    pub checkpoints: BTreeMap<u64, u64>,
    pub checkpointing: bool,
    /// Estimated length of the next checkpoint; 0 = unknown.
    pub checkpoint_bytes: u64,
    /// Segments whose files are open: few, however many segments there are.
    pub open: Vec<u64>,
    pub uses: u64,
    pub stats: Stats,
}

impl State {
    /// The least recently used open segment that no one uses or writes to.
    pub fn longest_unused(&self, which: impl Fn(&Segment) -> bool) -> Option<u64> {
        let open =
            self.open.iter().filter_map(|number| Some((*number, self.segments.get(number)?)));
        let idle = open.filter(|(_, s)| s.users == 0 && s.writing == 0 && which(s));
        idle.min_by_key(|(_, s)| s.touched).map(|(number, _)| number)
    }

    /// Space for a record in the segment of `front`, if there is enough.
    pub fn grant(&mut self, front: Front, blocks: u32, born: u64) -> Option<Grant> {
        let segment = self.fronts[front as usize]?;
        let entry = self.segments.get_mut(&segment)?;
        if entry.room() < blocks || entry.poisoned {
            return None;
        }
        let number = self.next_record;
        self.next_record += 1;
        let at = entry.next;
        entry.next += blocks;
        entry.writing += 1;
        entry.note_record(number, if born == 0 { number } else { born });
        Some(Grant { segment, at, number })
    }

    /// Ends the segment of a front; returns its remaining space if that is to be voided.
    pub fn end_front(&mut self, front: Front) -> Option<(Grant, u32)> {
        let segment = self.fronts[front as usize]?;
        let rest = self.segments.get(&segment).map_or(0, Segment::room);
        let grant = if rest > 0 { self.grant(front, rest, 0) } else { None };
        self.fronts[front as usize] = None;
        grant.map(|grant| (grant, rest))
    }

    /// Ends writing to a segment.
    pub fn leave_front(&mut self, segment: u64) {
        self.fronts.iter_mut().filter(|f| **f == Some(segment)).for_each(|f| *f = None);
    }

    /// Lets a write position continue in the next segment.
    pub fn begin_ready(&mut self, front: Front, blocks: u32) -> Option<()> {
        let Ready { number, file } = self.ready.pop_front()?;
        self.spare_bytes -= u64::from(blocks) * BLOCK_BYTES as u64;
        let (file, oldest) = (Some(file), u64::MAX);
        self.add_segment(number, Segment { file, blocks, next: 1, oldest, ..Segment::default() });
        self.open.push(number);
        self.fronts[front as usize] = Some(number);
        Some(())
    }

    /// Adds a segment.
    pub fn add_segment(&mut self, number: u64, segment: Segment) {
        self.segments.insert(number, segment);
        self.maybe_empty.insert(number);
    }

    /// Records that a segment may have become empty.
    pub fn may_be_empty(&mut self, number: u64) {
        if self.segments.get(&number).is_some_and(Segment::is_empty) {
            self.maybe_empty.insert(number);
        }
    }

    /// Segments without live cells and users.
    pub fn removable(&mut self) -> Vec<u64> {
        let State { segments, maybe_empty, fronts, .. } = self;
        debug_assert!(
            segments.len() > MANY
                || segments.iter().all(|(number, s)| !s.is_empty() || maybe_empty.contains(number)),
            "an empty segment was not noted"
        );
        maybe_empty.retain(|number| segments.get(number).is_some_and(Segment::is_empty));
        let removable =
            |number: &&u64| segments[number].is_idle() && !fronts.contains(&Some(**number));
        maybe_empty.iter().filter(removable).copied().collect()
    }

    /// A checkpoint has all sessions: no segment is held for their older records.
    pub fn release_held(&mut self) {
        let held = self.segments.iter_mut().filter(|(_, segment)| segment.held);
        let numbers = held.map(|(&number, segment)| {
            segment.held = false;
            number
        });
        self.maybe_empty.extend(numbers);
    }

    /// Number of open segments in use.
    pub fn in_use(&self) -> usize {
        let used = |number: &&u64| self.segments.get(number).is_some_and(|s| s.users > 0);
        self.open.iter().filter(used).count()
    }

    pub fn is_front(&self, segment: u64) -> bool {
        self.fronts.contains(&Some(segment))
    }

    /// Records that cells of so many blocks were dropped.
    pub fn drop_blocks(&mut self, segment: u64, blocks: u32) {
        if let Some(entry) = self.segments.get_mut(&segment) {
            debug_assert!(entry.live >= blocks, "a cell was dropped twice");
            entry.live = entry.live.saturating_sub(blocks);
        }
        self.may_be_empty(segment);
    }

    /// Bytes that callers leave free when they create a segment: one segment, so that compaction
    /// can always proceed, and the space that two checkpoints still need. One is written while the
    /// other exists.
    pub fn held_back(&self, segment_bytes: u64) -> u64 {
        let used = self.checkpoints.values().copied().fold(0, u64::saturating_add);
        let reserved = self.checkpoint_bytes.saturating_mul(2);
        let room = if self.checkpointing { 0 } else { reserved.saturating_sub(used) };
        segment_bytes.saturating_add(room)
    }

    /// Bytes that a write position leaves free when it needs a segment.
    pub fn kept_by(&self, front: Front, segment_bytes: u64) -> u64 {
        if front == Front::Callers { self.held_back(segment_bytes) } else { 0 }
    }

    /// Whether `bytes` bytes are free, spare files included, and `kept` more.
    pub fn has_room(&self, bytes: u64, kept: u64, budget: u64) -> bool {
        let used = self.used_bytes.saturating_sub(self.spare_bytes);
        used.saturating_add(bytes).saturating_add(kept) <= budget
    }

    /// The same; an error if not.
    pub fn check_room(&mut self, bytes: u64, kept: u64, budget: u64) -> Result<()> {
        if self.has_room(bytes, kept, budget) {
            return Ok(());
        }
        self.stats.refused += 1;
        fail!(
            Budget,
            "the disk is full: {} of {budget} bytes are used, {kept} more are reserved for \
             compaction and checkpoints, and {bytes} are needed",
            self.used_bytes - self.spare_bytes
        );
    }

    /// Takes bytes of the budget, of which `kept` must stay free. False = spare files must be
    /// removed first.
    pub fn take(&mut self, bytes: u64, kept: u64, budget: u64) -> Result<bool> {
        self.check_room(bytes, kept, budget)?;
        if self.spare_bytes > 0 && self.used_bytes.saturating_add(bytes) > budget {
            return Ok(false);
        }
        self.used_bytes += bytes;
        self.stats.most_used_bytes = self.stats.most_used_bytes.max(self.used_bytes);
        Ok(true)
    }

    pub fn give_back(&mut self, bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(bytes);
        self.end_shrinking();
    }

    /// A session's newest record is at another place now, which counts it already; `lasts`: whether
    /// it is durable there.
    pub fn point_session(&mut self, name: &[u8], note: Note, lasts: bool) {
        if let Some(old) = self.sessions.insert(name.into(), note) {
            self.uncount_session(old.segment, !lasts);
        }
    }

    /// A session's record no longer counts; `superseded` = the newer record may not be durable yet.
    pub fn uncount_session(&mut self, segment: u64, superseded: bool) {
        if let Some(entry) = self.segments.get_mut(&segment) {
            entry.sessions = entry.sessions.saturating_sub(1);
            entry.superseded |= superseded;
        }
        self.may_be_empty(segment);
    }

    /// The newest records of all sessions.
    pub fn noted(&self) -> Result<Vec<(Box<[u8]>, Note)>> {
        let mut all = Vec::new();
        all.try_reserve_exact(self.sessions.len()).map_err(|_| Status::NoMem)?;
        all.extend(self.sessions.iter().map(|(name, note)| (name.clone(), note.clone())));
        Ok(all)
    }

    /// Records that a newer copy of something in a segment may not be durable yet.
    pub fn supersede(&mut self, segment: u64) {
        if let Some(entry) = self.segments.get_mut(&segment) {
            entry.superseded = true;
        }
    }
}
