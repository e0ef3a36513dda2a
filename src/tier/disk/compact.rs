//! Compaction: copies the live cells of a segment to other segments and makes the copies durable.
//! Then the old segment can be removed.

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

/// Bytes of a batch of cells, unless memory is short or one cell is longer.
const BATCH_BYTES: u64 = 8 << 20;

/// A cell and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellAt {
    /// The chunk.
    pub chunk: Chunk,
    /// The layer.
    pub layer: u32,
    /// Its place on disk.
    pub spot: Spot,
    /// Its seal. It does not depend on the place.
    pub seal: u64,
    /// Stored length.
    pub stored_bytes: u64,
}

/// The index of live cells, which decides whether a cell is copied. Never called under a lock of
/// the tier.
pub trait CellIndex {
    /// Whether the cell is live: the index has it at this place.
    fn wants(&mut self, cell: &CellAt) -> bool;

    /// Reports that a cell was copied to a new place. The copy is durable if the cell was durable
    /// at the old place, or could be made durable there. True: the index has switched to the new
    /// place, and the tier frees the old one. False: the cell was dropped meanwhile, and the tier
    /// frees the new place.
    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool;

    /// Reports that a live cell is damaged. True: the index has dropped it, and the tier frees its
    /// place. False: it was dropped meanwhile.
    fn lost(&mut self, cell: &CellAt) -> bool;
}

/// Result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Cells that were moved.
    pub moved: u64,
    /// Live cells that were damaged.
    pub lost: u64,
    /// Blocks of live cells whose record headers were not found. The segment stays until these
    /// cells are dropped.
    pub left_blocks: u32,
    /// Bytes freed.
    pub freed_bytes: u64,
}

/// A cell of the segment that is compacted, with fields of its record.
struct SourceCell {
    cell: CellAt,
    born: u64,
    codec: u16,
    raw_bytes: u64,
    planes: std::ops::Range<usize>,
}

/// Content of a segment, by its headers.
#[derive(Default)]
struct Content {
    cells: Vec<SourceCell>,
    planes: Vec<Plane>,
    /// Forget records: key, layers, `born` and `until`.
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
            self.cells.push(SourceCell { cell: at, born, codec, raw_bytes, planes });
        }
    }
}

fn identity_of(chunk: &Chunk, layer: u32, codec: u16) -> Identity {
    let Chunk { key, fingerprint, valid_tokens, .. } = *chunk;
    Identity { key, fingerprint, layer, valid_tokens, codec }
}

impl DiskTier {
    /// Moves the live cells of a segment to other segments, and removes it. `Busy`: the segment is
    /// being written, compacted or removed. After another error, some cells have been moved and the
    /// others are still in the segment.
    pub fn compact(&self, number: u64, index: &mut dyn CellIndex) -> Result<Compacted> {
        self.begin_compaction(number)?;
        let result = self.compact_begun(number, index);
        let mut state = self.state.lock();
        state.stats.compactions += 1;
        let live_blocks = state.segments.get_mut(&number).map_or(0, |segment| {
            segment.compacting = false;
            segment.live
        });
        drop(state);
        let mut compacted = result?;
        compacted.left_blocks = live_blocks;
        compacted.freed_bytes = self.sweep();
        Ok(compacted)
    }

    /// Ends appends to a segment, and marks it as being compacted.
    fn begin_compaction(&self, number: u64) -> Result<()> {
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

    /// Updates the state of a segment, which may make it empty.
    fn update(&self, number: u64, update: impl FnOnce(&mut Segment)) {
        let mut state = self.state.lock();
        if let Some(segment) = state.segments.get_mut(&number) {
            update(segment);
        }
        state.may_be_empty(number);
    }

    /// Compacts a segment that is marked as being compacted.
    fn compact_begun(&self, number: u64, index: &mut dyn CellIndex) -> Result<Compacted> {
        let mut content = Content::default();
        let found = self.scan(&[(number, 1)], &mut |record| {
            content.add(record);
            Ok(())
        })?;
        if found.iter().any(|found| found.errors > 0) {
            fail!(Io, "segment {number} cannot be read completely");
        }
        self.update(number, |segment| segment.unread = false);
        self.release_old_sessions(number)?;
        // If an opening after a crash finds both copies, it uses the old one, so that must be
        // durable. The result is ignored: if the sync fails, no unsynced cell was acknowledged as
        // durable.
        let written = self.state.lock().segments.get(&number).map_or(0, |s| s.dirty);
        let _ = self.commit(Mark { segment: number, write: written });
        let mut compacted = Compacted::default();
        let longest = content.cells.iter().map(|old| padded(&old.cell)).max().unwrap_or(0);
        let mut cells = content.cells.iter().peekable();
        while cells.peek().is_some() {
            // Staging memory is returned after each batch, because other threads may wait for it.
            let buffer = &self.staging.scratch(longest, longest.max(BATCH_BYTES))?;
            let mut batch = Vec::new();
            let mut bytes = 0;
            while let Some(old) = cells.next_if(|old| bytes + padded(&old.cell) <= buffer.bytes()) {
                if index.wants(&old.cell) {
                    batch.push((old, bytes));
                    bytes += padded(&old.cell);
                }
            }
            self.move_batch(&content, &batch, buffer, index, &mut compacted)?;
        }
        self.move_other_records(number, &content)?;
        Ok(compacted)
    }

    /// Allows the removal of a segment that has session records from before this opening: writes
    /// these sessions again first.
    fn release_old_sessions(&self, number: u64) -> Result<()> {
        let state = self.state.lock();
        let held = state.segments.get(&number).is_some_and(|segment| segment.held);
        let mut sessions = if held { state.noted()? } else { Vec::new() };
        drop(state);
        self.save_sessions(&mut sessions, &|segment| segment.old && segment.dirty > 0)?;
        self.update(number, |segment| segment.held = false);
        Ok(())
    }

    /// Reads a batch of cells, appends copies, makes them durable, and reports them to the index.
    fn move_batch(
        &self,
        content: &Content,
        batch: &[(&SourceCell, u64)],
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
        // SAFETY: each cell has its own part of the buffer, rounded up to whole blocks.
        unsafe { self.read(&mut gets) };
        let mut puts = Puts::default();
        let mut kept = Vec::new();
        let mut last = None;
        for ((old, at), get) in batch.iter().zip(gets.iter()) {
            match &get.result {
                Ok(()) => {}
                Err(error) if error.status() == Status::Corrupt => {
                    self.report_lost(old, index, compacted);
                    continue;
                }
                Err(error) => return Err(error.clone()),
            }
            // Cells of one old record are written to one new record.
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
            kept.push(*old);
        }
        let _underway = self.set_out();
        // SAFETY: as above; the buffer is only read from here on.
        unsafe { self.append_at(&mut puts, 0..usize::MAX, Front::Compaction) };
        self.report_moved(&puts, &kept, index, compacted)
    }

    /// Makes copied cells durable, and reports them to the index.
    fn report_moved(
        &self,
        puts: &Puts,
        kept: &[&SourceCell],
        index: &mut dyn CellIndex,
        compacted: &mut Compacted,
    ) -> Result<()> {
        let mut sources = kept.iter();
        let mut result: Result<()> = Ok(());
        for (put, cells) in puts.iter() {
            let durable = put.result.clone().and_then(|mark: Mark| self.commit(mark));
            for (new, old) in cells.iter().zip(sources.by_ref()) {
                if let Err(error) = &durable {
                    // The index does not reference the copy.
                    if put.result.is_ok() {
                        self.drop_cells([(new.spot, old.cell.stored_bytes)]);
                    }
                    result = result.and(Err(error.clone()));
                    continue;
                }
                let is_switched = index.moved(&old.cell, new.spot);
                let unused = if is_switched { old.cell.spot } else { new.spot };
                self.drop_cells([(unused, old.cell.stored_bytes)]);
                compacted.moved += u64::from(is_switched);
            }
        }
        result
    }

    fn report_lost(&self, old: &SourceCell, index: &mut dyn CellIndex, compacted: &mut Compacted) {
        if index.lost(&old.cell) {
            self.drop_cells([(old.cell.spot, old.cell.stored_bytes)]);
        }
        compacted.lost += 1;
    }

    /// Moves records without cells that still have an effect: sessions and forget records.
    fn move_other_records(&self, number: u64, content: &Content) -> Result<()> {
        let _underway = self.set_out();
        let (mut marks, mut moved) = (Vec::new(), Vec::new());
        let written = self.copy_other_records(number, content, &mut marks, &mut moved);
        let durable =
            written.and_then(|()| marks.into_iter().try_for_each(|mark| self.commit(mark)));
        for (name, note) in moved {
            match durable {
                Ok(()) => self.settle_session(&name, note, true),
                // Nothing references the copied record.
                Err(_) => self.state.lock().uncount_session(note.segment, false),
            }
        }
        durable?;
        self.update(number, |segment| segment.forgets = 0);
        Ok(())
    }

    fn copy_other_records(
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
            let here = state.sessions.iter().filter(|(_, note)| note.segment == number);
            here.map(|(name, note)| (name.clone(), note.clone())).collect()
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
                // Keep it if it was written to another segment meanwhile.
                if state.sessions.get(&name).is_some_and(|now| now.segment == number) {
                    state.sessions.remove(&name);
                    state.uncount_session(number, false);
                }
            }
        }
        Ok(())
    }

    /// Whether another segment may have records first written before `until`. It may also be a
    /// removed segment whose file name may reappear after a crash.
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
