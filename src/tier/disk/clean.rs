//! Cleaning: what lives in a segment is written again elsewhere, made durable,
//! and then the segment can go.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::format::keys::Key;
use crate::format::record::{Chunk, Kind, Record, blocks_of};
use crate::format::seal::{Identity, Plane, seal};
use crate::format::segment::BLOCK_BYTES;
use crate::tier::disk::batch::{GetPlane, Gets, Mark, PutPlane, Puts};
use crate::tier::disk::note::Origin;
use crate::tier::disk::staging::Lent;
use crate::tier::disk::state::{Front, Note, Segment};
use crate::tier::disk::{DiskTier, Spot};

/// Bytes that are moved at once, if there is memory for it and no cell is longer.
const BATCH_BYTES: u64 = 8 << 20;

/// A cell and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellAt {
    /// Whose it is.
    pub chunk: Chunk,
    /// Its layer.
    pub layer: u32,
    /// Where it is.
    pub spot: Spot,
    /// Its seal: the same wherever it is.
    pub seal: u64,
    /// Bytes that are stored.
    pub stored_bytes: u64,
}

/// Who knows which cells live. It is never called under a lock of the tier.
pub trait Keeper {
    /// Whether a cell at this place is still wanted.
    fn wants(&mut self, cell: &CellAt) -> bool;

    /// A cell is at a new place, and is durable there if it was, or could be made so,
    /// at the old one. True: the caller points there from now on,
    /// and the tier drops the old place. False: it was dropped at the old place
    /// meanwhile, and the tier drops the new one.
    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool;

    /// The bytes of a cell that was wanted are not what they were. True: the caller
    /// forgets it, and the tier drops it. False: it was dropped meanwhile.
    fn lost(&mut self, cell: &CellAt) -> bool;
}

/// What cleaning came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Cells that were moved.
    pub moved: u64,
    /// Cells that were wanted and lost.
    pub lost: u64,
    /// Blocks of cells that live and whose headers were not found: the segment
    /// stays until they are dropped.
    pub left_blocks: u32,
    /// Bytes that came free.
    pub freed_bytes: u64,
}

/// A cell of the segment, and of which record.
struct Old {
    cell: CellAt,
    born: u64,
    codec: u16,
    raw_bytes: u64,
    planes: std::ops::Range<usize>,
}

/// What the headers of a segment say.
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
            let who = identity(&head.chunk, cell.layer, cell.codec);
            let at = CellAt {
                chunk: head.chunk,
                layer: cell.layer,
                spot: Spot::new(head.segment, head.at + cell.block, cell.block),
                seal: seal(&who, cell.planes()),
                stored_bytes: cell.stored_bytes,
            };
            let planes = first..self.planes.len();
            let (born, codec, raw_bytes) = (head.born, cell.codec, cell.raw_bytes);
            self.cells.push(Old { cell: at, born, codec, raw_bytes, planes });
        }
    }
}

fn identity(chunk: &Chunk, layer: u32, codec: u16) -> Identity {
    let Chunk { key, fingerprint, valid_tokens, .. } = *chunk;
    Identity { key, fingerprint, layer, valid_tokens, codec }
}

impl DiskTier {
    /// Moves what lives in a segment elsewhere and removes it. BUSY = it is being
    /// written or cleaned. After another failure what was moved is moved, the rest
    /// is where it was.
    pub fn clean(&self, number: u64, keeper: &mut dyn Keeper) -> Result<Cleaned> {
        self.begin_cleaning(number)?;
        let cleaned = self.clean_begun(number, keeper);
        let mut state = self.state.lock();
        state.stats.cleanings += 1;
        let left = state.segments.get_mut(&number).map_or(0, |segment| {
            segment.cleaning = false;
            segment.live
        });
        drop(state);
        let mut cleaned = cleaned?;
        cleaned.left_blocks = left;
        cleaned.freed_bytes = self.sweep();
        Ok(cleaned)
    }

    fn begin_cleaning(&self, number: u64) -> Result<()> {
        let growth = self.growth.lock();
        for front in [Front::Callers, Front::Cleaning] {
            if self.state.lock().fronts[front as usize] == Some(number) {
                self.end(front);
            }
        }
        drop(growth);
        let mut state = self.state.lock();
        let Some(segment) = state.segments.get_mut(&number) else {
            fail!(NotFound, "segment {number} is not there");
        };
        if segment.writing > 0 || segment.cleaning || segment.leaving {
            fail!(Busy, "segment {number} is in use");
        }
        segment.cleaning = true;
        Ok(())
    }

    /// Changes a segment, which may be empty afterwards.
    fn change(&self, number: u64, change: impl FnOnce(&mut Segment)) {
        let mut state = self.state.lock();
        if let Some(segment) = state.segments.get_mut(&number) {
            change(segment);
        }
        state.may_be_empty(number);
    }

    fn clean_begun(&self, number: u64, keeper: &mut dyn Keeper) -> Result<Cleaned> {
        let mut content = Content::default();
        let found = self.scan(&[(number, 1)], &mut |record| {
            content.add(record);
            Ok(())
        })?;
        if found.iter().any(|found| found.errors > 0) {
            fail!(Io, "segment {number} cannot be read in full");
        }
        self.change(number, |segment| segment.unread = false);
        self.let_go(number)?;
        // An opening that finds a cell twice takes the one that was not moved: that
        // must be as good. Where a sync failed nobody was told that it lasts.
        let written = self.state.lock().segments.get(&number).map_or(0, |s| s.dirty);
        let _ = self.commit(Mark { segment: number, write: written });
        let mut cleaned = Cleaned::default();
        let longest = content.cells.iter().map(|old| padded(&old.cell)).max().unwrap_or(0);
        let mut cells = content.cells.iter().peekable();
        while cells.peek().is_some() {
            // Anew for each batch: others may wait for the same memory.
            let buffer = &self.staging.scratch(longest, longest.max(BATCH_BYTES))?;
            let mut batch = Vec::new();
            let mut bytes = 0;
            while let Some(old) = cells.next_if(|old| bytes + padded(&old.cell) <= buffer.bytes()) {
                if keeper.wants(&old.cell) {
                    batch.push((old, bytes));
                    bytes += padded(&old.cell);
                }
            }
            self.move_batch(&content, &batch, buffer, keeper, &mut cleaned)?;
        }
        self.move_notes(number, &content)?;
        Ok(cleaned)
    }

    /// What sessions were may go once what they are was written since the store was
    /// opened.
    fn let_go(&self, number: u64) -> Result<()> {
        let state = self.state.lock();
        let held = state.segments.get(&number).is_some_and(|segment| segment.held);
        let mut sessions = if held { state.noted()? } else { Vec::new() };
        drop(state);
        self.save_sessions(&mut sessions, &|segment| segment.old && segment.dirty > 0)?;
        self.change(number, |segment| segment.held = false);
        Ok(())
    }

    /// Reads cells, writes them again, makes them durable, says so.
    fn move_batch(
        &self,
        content: &Content,
        batch: &[(&Old, u64)],
        buffer: &Lent<'_>,
        keeper: &mut dyn Keeper,
        cleaned: &mut Cleaned,
    ) -> Result<()> {
        let mut gets = Gets::default();
        let address = |at: u64, bytes: u64| buffer.range(at, bytes);
        for (old, at) in batch {
            let who = identity(&old.cell.chunk, old.cell.layer, old.codec);
            gets.cell(old.cell.spot, who, old.cell.seal, true);
            let mut at = *at;
            for plane in content.planes.get(old.planes.clone()).unwrap_or(&[]) {
                let Plane { kind, id, version, bytes, .. } = *plane;
                let Some(address) = address(at, bytes) else { continue };
                gets.plane(GetPlane { kind, id, version, bytes, address });
                at += bytes;
            }
        }
        // SAFETY: each cell has a part of the buffer, up to whole blocks, that is
        // nobody else's.
        unsafe { self.read(&mut gets) };
        let mut puts = Puts::default();
        let mut kept = Vec::new();
        let mut last = None;
        for ((old, at), get) in batch.iter().zip(gets.iter()) {
            match &get.result {
                Ok(()) => {}
                Err(error) if error.status() == Status::Corrupt => {
                    self.lose(old, keeper, cleaned);
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
            kept.push(*old);
        }
        let _underway = self.set_out();
        // SAFETY: as above; the buffer is only read from here on.
        unsafe { self.append_at(&mut puts, 0..usize::MAX, Front::Cleaning) };
        self.tell(&puts, &kept, keeper, cleaned)
    }

    /// Makes what was moved durable and has the keeper point there.
    fn tell(
        &self,
        puts: &Puts,
        kept: &[&Old],
        keeper: &mut dyn Keeper,
        cleaned: &mut Cleaned,
    ) -> Result<()> {
        let mut olds = kept.iter();
        let mut result: Result<()> = Ok(());
        for (put, cells) in puts.iter() {
            let lasts = put.result.clone().and_then(|mark: Mark| self.commit(mark));
            for (new, old) in cells.iter().zip(olds.by_ref()) {
                if let Err(error) = &lasts {
                    // Nobody points to what was written, if it was.
                    if put.result.is_ok() {
                        self.drop_cells([(new.spot, old.cell.stored_bytes)]);
                    }
                    result = result.and(Err(error.clone()));
                    continue;
                }
                let wanted = keeper.moved(&old.cell, new.spot);
                let gone = if wanted { old.cell.spot } else { new.spot };
                self.drop_cells([(gone, old.cell.stored_bytes)]);
                cleaned.moved += u64::from(wanted);
            }
        }
        result
    }

    fn lose(&self, old: &Old, keeper: &mut dyn Keeper, cleaned: &mut Cleaned) {
        if keeper.lost(&old.cell) {
            self.drop_cells([(old.cell.spot, old.cell.stored_bytes)]);
        }
        cleaned.lost += 1;
    }

    /// Moves records without cells that still say something.
    fn move_notes(&self, number: u64, content: &Content) -> Result<()> {
        let _underway = self.set_out();
        let (mut marks, mut moved) = (Vec::new(), Vec::new());
        let written = self.copy_notes(number, content, &mut marks, &mut moved);
        let lasts = written.and_then(|()| marks.into_iter().try_for_each(|mark| self.commit(mark)));
        for (name, note) in moved {
            match lasts {
                Ok(()) => self.settle_session(&name, note, true),
                // Nobody points to what was written.
                Err(_) => self.state.lock().uncount_session(note.segment, false),
            }
        }
        lasts?;
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
                marks.push(self.note_forget(Front::Cleaning, key, layers, origin)?);
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
                    self.note_session(Front::Cleaning, &name, &note.payload, origin)?;
                moved.push((name, note));
                marks.push(mark);
            } else {
                let mut state = self.state.lock();
                // Unless it was noted anew meanwhile.
                if state.sessions.get(&name).is_some_and(|now| now.segment == number) {
                    state.sessions.remove(&name);
                    state.uncount_session(number, false);
                }
            }
        }
        Ok(())
    }

    /// Whether another segment may have records that were born before `until`: one
    /// that is there, or one whose name may come back after a crash.
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
