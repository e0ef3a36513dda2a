//! Compaction: the live cells of a segment are written again elsewhere and made durable, then the
//! segment can be removed.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::format::keys::Key;
use crate::format::record::{Chunk, Kind, Record, blocks_of};
use crate::format::seal::{Identity, Plane, seal};
use crate::format::segment::BLOCK_BYTES;
use crate::tier::disk::batch::{GetPlane, Gets, Mark, PutPlane, Puts};
use crate::tier::disk::note::Origin;
use crate::tier::disk::staging::StagingGuard;
use crate::tier::disk::state::{Front, Note, Segment};
use crate::tier::disk::{DiskTier, Spot};

/// Bytes that are moved at once, if there is memory for it and no cell is longer.
const BATCH_BYTES: u64 = 8 << 20;

/// A cell and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellAt {
    /// The chunk.
    pub chunk: Chunk,
    /// The layer.
    pub layer: u32,
    /// Its place.
    pub spot: Spot,
    /// Its seal: the same at every place.
    pub seal: u64,
    /// Stored length.
    pub stored_bytes: u64,
}

/// The owner of the index of live cells. It is never called under a lock of the tier.
pub trait CellIndex {
    /// Whether the index has the cell at this place.
    fn is_live(&mut self, cell: &CellAt) -> bool;

    /// A cell is at a new place. It is durable there if it was durable, or could be made so, at the
    /// old place. True: the index has the new place from now on, and the tier drops the old one.
    /// False: the cell was dropped meanwhile, and the tier drops the new place.
    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool;

    /// A wanted cell is damaged. True: the index drops it, and so does the tier. False: it was
    /// dropped meanwhile.
    fn lost(&mut self, cell: &CellAt) -> bool;
}

/// Result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Cells that were moved.
    pub moved: u64,
    /// Wanted cells that were damaged.
    pub lost: u64,
    /// Blocks of live cells whose headers were not found: the segment stays until they are dropped.
    pub left_blocks: u32,
    /// Bytes freed.
    pub freed_bytes: u64,
}

/// A cell of the segment, and its record.
struct Old {
    cell: CellAt,
    born: u64,
    codec: u16,
    raw_bytes: u64,
    planes: std::ops::Range<usize>,
}

/// Content of a segment, by its headers.
#[derive(Default)]
struct Content {
    cells: Vec<Old>,
    planes: Vec<Plane>,
    forgets: Vec<(Key, Vec<u32>, u64, u64)>,
}

impl Content {
    fn add(&mut self, record: &Record<'_>) {
        let head = &record.head;
        if head.kind == Kind::Forget as u16 {
            let layers = record.layers().collect();
            self.forgets.push((head.chunk.key, layers, head.born, head.until));
        }
        for cell in record.cells() {
            let first = self.planes.len();
            self.planes.extend(cell.planes());
            let identity = identity_of(&head.chunk, cell.layer, cell.codec);
            let at = CellAt {
                chunk: head.chunk,
                layer: cell.layer,
                spot: Spot::new(head.segment, head.at + cell.block, cell.block),
                seal: seal(&identity, cell.planes()),
                stored_bytes: cell.stored_bytes,
            };
            let planes = first..self.planes.len();
            let (born, codec, raw_bytes) = (head.born, cell.codec, cell.raw_bytes);
            self.cells.push(Old { cell: at, born, codec, raw_bytes, planes });
        }
    }
}

fn identity_of(chunk: &Chunk, layer: u32, codec: u16) -> Identity {
    let Chunk { key, fingerprint, valid_tokens, .. } = *chunk;
    Identity { key, fingerprint, layer, valid_tokens, codec }
}

impl DiskTier {
    /// Moves the live cells of a segment elsewhere, and removes the segment. BUSY = it is being
    /// written or compacted. After another failure some cells were moved, and the others stay.
    pub fn compact(&self, number: u64, index: &mut dyn CellIndex) -> Result<Compacted> {
        self.begin_cleaning(number)?;
        let compacted = self.compact_begun(number, index);
        let mut state = self.state.lock();
        state.stats.compactions += 1;
        let left = state.segments.get_mut(&number).map_or(0, |segment| {
            segment.compacting = false;
            segment.live
        });
        drop(state);
        let mut compacted = compacted?;
        compacted.left_blocks = left;
        compacted.freed_bytes = self.sweep();
        Ok(compacted)
    }

    fn begin_cleaning(&self, number: u64) -> Result<()> {
        let growth = self.growth.lock();
        for front in [Front::Callers, Front::Compaction] {
            if self.state.lock().fronts[front as usize] == Some(number) {
                self.end(front);
            }
        }
        drop(growth);
        let mut state = self.state.lock();
        let Some(segment) = state.segments.get_mut(&number) else {
            fail!(NotFound, "there is no segment {number}");
        };
        if segment.writing > 0 || segment.compacting || segment.leaving {
            fail!(Busy, "segment {number} is in use");
        }
        segment.compacting = true;
        Ok(())
    }

    /// Changes a segment, which may become empty by it.
    fn change(&self, number: u64, change: impl FnOnce(&mut Segment)) {
        let mut state = self.state.lock();
        if let Some(segment) = state.segments.get_mut(&number) {
            change(segment);
        }
        state.may_be_empty(number);
    }

    fn compact_begun(&self, number: u64, index: &mut dyn CellIndex) -> Result<Compacted> {
        let mut content = Content::default();
        let found = self.scan(&[(number, 1)], &mut |record| {
            content.add(record);
            Ok(())
        })?;
        if found.iter().any(|found| found.errors > 0) {
            fail!(Io, "segment {number} cannot be read completely");
        }
        self.change(number, |segment| segment.unread = false);
        self.release_sessions(number)?;
        // An opening that finds both copies takes the old one: it must be durable. After a failed
        // sync no caller was notified that it is.
        let written = self.state.lock().segments.get(&number).map_or(0, |s| s.dirty);
        let _ = self.commit(Mark { segment: number, write: written });
        let mut compacted = Compacted::default();
        let longest = content.cells.iter().map(|old| padded(&old.cell)).max().unwrap_or(0);
        let mut cells = content.cells.iter().peekable();
        while cells.peek().is_some() {
            // For each batch anew: other threads may wait for the same memory.
            let buffer = &self.staging.scratch(longest, longest.max(BATCH_BYTES))?;
            let mut batch = Vec::new();
            let mut bytes = 0;
            while let Some(old) = cells.next_if(|old| bytes + padded(&old.cell) <= buffer.bytes()) {
                if index.is_live(&old.cell) {
                    batch.push((old, bytes));
                    bytes += padded(&old.cell);
                }
            }
            self.move_batch(&content, &batch, buffer, index, &mut compacted)?;
        }
        self.move_notes(number, &content)?;
        Ok(compacted)
    }

    /// Older records of sessions may be removed once the sessions were written since the store was
    /// opened.
    fn release_sessions(&self, number: u64) -> Result<()> {
        let state = self.state.lock();
        let held = state.segments.get(&number).is_some_and(|segment| segment.held);
        let mut sessions = if held { state.noted()? } else { Vec::new() };
        drop(state);
        self.save_sessions(&mut sessions, &|segment| segment.old && segment.dirty > 0)?;
        self.change(number, |segment| segment.held = false);
        Ok(())
    }

    /// Reads cells, writes them again, makes them durable, and reports them to the index.
    fn move_batch(
        &self,
        content: &Content,
        batch: &[(&Old, u64)],
        buffer: &StagingGuard<'_>,
        index: &mut dyn CellIndex,
        compacted: &mut Compacted,
    ) -> Result<()> {
        let mut gets = Gets::default();
        let address = |at: u64, bytes: u64| buffer.range(at, bytes);
        for (old, at) in batch {
            let identity = identity_of(&old.cell.chunk, old.cell.layer, old.codec);
            gets.cell(old.cell.spot, identity, old.cell.seal, true);
            let mut at = *at;
            for plane in content.planes.get(old.planes.clone()).unwrap_or(&[]) {
                let Plane { kind, id, version, bytes, .. } = *plane;
                let Some(address) = address(at, bytes) else { continue };
                gets.plane(GetPlane { kind, id, version, bytes, address });
                at += bytes;
            }
        }
        // SAFETY: each cell has a part of the buffer, up to whole blocks, that nothing else uses.
        unsafe { self.read(&mut gets) };
        let mut puts = Puts::default();
        let mut rewritten = Vec::new();
        let mut last = None;
        for ((old, at), get) in batch.iter().zip(gets.iter()) {
            match &get.result {
                Ok(()) => {}
                Err(error) if error.status() == Status::Corrupt => {
                    self.lose(old, index, compacted);
                    continue;
                }
                Err(error) => return Err(error.clone()),
            }
            // Cells of one record stay together.
            let record = old.cell.spot.record();
            if last != Some(record) {
                puts.record(old.cell.chunk);
                last = Some(record);
            }
            if let Some(put) = puts.records.last_mut() {
                put.born = old.born;
                put.from = old.cell.spot.segment();
            }
            puts.cell(old.cell.layer, old.codec, old.raw_bytes, true);
            let mut at = *at;
            for plane in content.planes.get(old.planes.clone()).unwrap_or(&[]) {
                let Plane { kind, id, version, bytes, sum } = *plane;
                let Some(address) = address(at, bytes) else { continue };
                let (address, sum) = (address.cast_const(), Some(sum));
                puts.plane(PutPlane { kind, id, version, bytes, address, sum });
                at += bytes;
            }
            rewritten.push(*old);
        }
        let _underway = self.set_out();
        // SAFETY: as above; the buffer is only read from here on.
        unsafe { self.append_at(&mut puts, 0..usize::MAX, Front::Compaction) };
        self.report_moved(&puts, &rewritten, index, compacted)
    }

    /// Makes moved cells durable, and reports them to the index.
    fn report_moved(
        &self,
        puts: &Puts,
        rewritten: &[&Old],
        index: &mut dyn CellIndex,
        compacted: &mut Compacted,
    ) -> Result<()> {
        let mut olds = rewritten.iter();
        let mut result: Result<()> = Ok(());
        for (put, cells) in puts.iter() {
            let committed = put.result.clone().and_then(|mark: Mark| self.commit(mark));
            for (new, old) in cells.iter().zip(olds.by_ref()) {
                if let Err(error) = &committed {
                    // Nothing references what was written.
                    if put.result.is_ok() {
                        self.drop_cells([(new.spot, old.cell.stored_bytes)]);
                    }
                    result = result.and(Err(error.clone()));
                    continue;
                }
                let is_live = index.moved(&old.cell, new.spot);
                let stale = if is_live { old.cell.spot } else { new.spot };
                self.drop_cells([(stale, old.cell.stored_bytes)]);
                compacted.moved += u64::from(is_live);
            }
        }
        result
    }

    fn lose(&self, old: &Old, index: &mut dyn CellIndex, compacted: &mut Compacted) {
        if index.lost(&old.cell) {
            self.drop_cells([(old.cell.spot, old.cell.stored_bytes)]);
        }
        compacted.lost += 1;
    }

    /// Moves records without cells that still have an effect.
    fn move_notes(&self, number: u64, content: &Content) -> Result<()> {
        let _underway = self.set_out();
        let (mut marks, mut moved) = (Vec::new(), Vec::new());
        let written = self.copy_notes(number, content, &mut marks, &mut moved);
        let committed =
            written.and_then(|()| marks.into_iter().try_for_each(|mark| self.commit(mark)));
        for (name, note) in moved {
            match committed {
                Ok(()) => self.settle_session(&name, note, true),
                // Nothing references what was written.
                Err(_) => self.state.lock().uncount_session(note.segment, false),
            }
        }
        committed?;
        self.change(number, |segment| segment.forgets = 0);
        Ok(())
    }

    fn copy_notes(
        &self,
        number: u64,
        content: &Content,
        marks: &mut Vec<Mark>,
        moved: &mut Vec<(Box<[u8]>, Note)>,
    ) -> Result<()> {
        let from = number;
        for &(key, ref layers, born, until) in &content.forgets {
            if self.has_older(number, until) {
                let origin = Origin { born, until, from };
                marks.push(self.note_forget(Front::Compaction, key, layers, origin)?);
            }
        }
        let sessions: Vec<(Box<[u8]>, Note)> = {
            let state = self.state.lock();
            let notes = state.sessions.iter().filter(|(_, note)| note.segment == number);
            notes.map(|(name, note)| (name.clone(), note.clone())).collect()
        };
        for (name, note) in sessions {
            if !note.payload.is_empty() || self.has_older(number, note.born) {
                let origin = Origin { born: note.born, until: 0, from };
                let (note, mark) =
                    self.note_session(Front::Compaction, &name, &note.payload, origin)?;
                moved.push((name, note));
                marks.push(mark);
            } else {
                let mut state = self.state.lock();
                // Unless it was written again meanwhile.
                if state.sessions.get(&name).is_some_and(|now| now.segment == number) {
                    state.sessions.remove(&name);
                    state.uncount_session(number, false);
                }
            }
        }
        Ok(())
    }

    /// Whether another segment may have records first written before `until`: an existing one, or a
    /// removed one whose name may reappear after a crash.
    fn has_older(&self, number: u64, until: u64) -> bool {
        let state = self.state.lock();
        let older = |segment: &Segment| segment.unread || segment.oldest < until;
        state.lingering_oldest.is_some_and(|oldest| oldest < until)
            || state.segments.iter().any(|(&other, segment)| other != number && older(segment))
    }
}

fn padded(cell: &CellAt) -> u64 {
    blocks_of(cell.stored_bytes) * BLOCK_BYTES as u64
}
