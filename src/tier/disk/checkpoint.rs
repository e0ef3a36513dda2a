//! Checkpoints: the index in a file, so that opening need not read every header.

use crate::base::status::Result;
use crate::fail;
use crate::format::checkpoint::{
    CellEntry, Entry, FRAME_BYTES, FrameWriter, Header, MAX_CELLS_PER_ENTRY, SegmentEntry, Session,
    entries, frames_for, session_bytes,
};
use crate::format::record::Chunk;
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::{Access, FileId};
use crate::tier::disk::files::{checkpoint as checkpoint_name, refusal, unfinished};
use crate::tier::disk::recovered::Finder;
use crate::tier::disk::staging::StagingGuard;
use crate::tier::disk::state::{Note, Segment};
use crate::tier::disk::{DiskTier, least_bytes};

/// Bytes of a checkpoint that are read at once, if there is memory for it.
const LOAD_BYTES: u64 = 16 * FRAME_BYTES as u64;

/// A position in the log: all records whose space was taken before it.
pub struct Cover {
    next_record: u64,
    next_segment: u64,
    segments: Vec<SegmentEntry>,
}

/// A checkpoint to write, and its sessions.
struct Draft {
    header: Header,
    sessions: Vec<(Box<[u8]>, Note)>,
}

/// Takes the entries of a checkpoint.
pub struct Sink<'a> {
    tier: &'a DiskTier,
    file: FileId,
    number: u64,
    frame: StagingGuard<'a>,
    /// Frames written, and the most frames.
    frames: u32,
    most_frames: u32,
    /// Bytes of the frame in use.
    used: usize,
}

impl Sink<'_> {
    /// Adds cells of a chunk.
    pub fn chunk(&mut self, chunk: &Chunk, cells: &[CellEntry]) -> Result<()> {
        cells
            .chunks(MAX_CELLS_PER_ENTRY)
            .try_for_each(|places| self.add(&|frame| frame.chunk(chunk, places)))
    }

    fn add(&mut self, add: &dyn Fn(&mut FrameWriter<'_>) -> bool) -> Result<()> {
        if self.try_add(add) {
            return Ok(());
        }
        self.write_frame()?;
        if !self.try_add(add) {
            fail!(Limit, "an entry does not fit in a frame");
        }
        Ok(())
    }

    fn try_add(&mut self, add: &dyn Fn(&mut FrameWriter<'_>) -> bool) -> bool {
        // SAFETY: the sink's own buffer, which is longer.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.frame.address(), FRAME_BYTES) };
        let mut writer = match self.used {
            0 => FrameWriter::new(bytes),
            used => FrameWriter::resume(bytes, used),
        };
        let added = add(&mut writer);
        self.used = writer.used();
        added
    }

    fn write_frame(&mut self) -> Result<()> {
        if self.frames == self.most_frames {
            fail!(Limit, "the checkpoint has more entries than announced");
        }
        let address = self.frame.address();
        // SAFETY: the sink's own buffer, which is longer.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address, FRAME_BYTES) };
        FrameWriter::resume(bytes, self.used).finish(&self.tier.store, self.number, self.frames);
        let offset = BLOCK_BYTES as u64 + u64::from(self.frames) * FRAME_BYTES as u64;
        // SAFETY: as above; nothing else uses the buffer.
        unsafe {
            self.tier.transfer_one(
                self.file,
                Access::Write,
                offset,
                address,
                FRAME_BYTES as u64,
            )?;
        }
        self.frames += 1;
        self.used = 0;
        Ok(())
    }
}

impl DiskTier {
    /// The present position of the log. A checkpoint that covers it must have every cell whose
    /// append began before, unless it was dropped. The caller waits for those appends, then walks
    /// its index, which may change meanwhile. [`DiskTier::checkpoint`] waits for records that the
    /// tier writes itself: sessions, and cells that compaction moves.
    pub fn cover(&self) -> Cover {
        let state = self.state.lock();
        let covered = |(&number, segment): (&u64, &Segment)| SegmentEntry {
            number,
            blocks: segment.next,
            forgets: segment.forgets,
            oldest: segment.oldest,
            newest: segment.newest,
        };
        Cover {
            next_record: state.next_record,
            next_segment: state.next_segment,
            segments: state.segments.iter().map(covered).collect(),
        }
    }

    /// Writes a checkpoint of at most `chunks` calls of [`Sink::chunk`] with `cells` cells in
    /// total, which `source` makes. The previous checkpoint stays until this one is durable: there
    /// must be space for both, and for one segment. BUDGET = there is not: nothing was written or
    /// removed. From then on callers leave space for it, so that it fits once a segment was
    /// removed; until then opening the store takes longer. BUSY = another one is being written.
    ///
    /// It waits for compaction, so the caller must hold no lock that a [`CellIndex`] takes.
    ///
    /// [`CellIndex`]: crate::tier::disk::CellIndex
    pub fn checkpoint(
        &self,
        cover: &Cover,
        chunks: usize,
        cells: usize,
        source: &mut dyn FnMut(&mut Sink<'_>) -> Result<()>,
    ) -> Result<()> {
        self.wait_for_older(cover.next_record);
        let draft = self.begin_checkpoint(cover, chunks, cells)?;
        let result = self.make_checkpoint(cover, draft, source);
        self.state.lock().checkpointing = false;
        result
    }

    /// Takes space for the largest possible checkpoint.
    fn begin_checkpoint(&self, cover: &Cover, chunks: usize, cells: usize) -> Result<Draft> {
        loop {
            if let Some(draft) = self.try_begin_checkpoint(cover, chunks, cells)? {
                return Ok(draft);
            }
            self.discard(|_| true);
        }
    }

    /// The same; None = spare files must be removed first.
    fn try_begin_checkpoint(
        &self,
        cover: &Cover,
        chunks: usize,
        cells: usize,
    ) -> Result<Option<Draft>> {
        let mut state = self.state.lock();
        if state.checkpointing {
            fail!(Busy, "another checkpoint is being written");
        }
        let sessions = state.noted()?;
        let sizes = sessions.iter().map(|(name, note)| (name.len(), note.payload.len()));
        let bytes = sizes.map(|(name, payload)| session_bytes(name, payload)).sum();
        let Some(frames) = frames_for(cover.segments.len(), chunks, cells, bytes) else {
            fail!(Limit, "a checkpoint of {cells} cells is too long");
        };
        let header = Header {
            store: self.store,
            number: state.next_checkpoint,
            next_record: cover.next_record,
            next_segment: cover.next_segment,
            frames,
        };
        let (bytes, budget) = (header.file_bytes(), state.budget_bytes);
        state.checkpoint_bytes = self.next_checkpoint_bytes(bytes, budget);
        if !state.take(bytes, self.options.segment_bytes, budget)? {
            return Ok(None);
        }
        state.next_checkpoint += 1;
        state.checkpointing = true;
        Ok(Some(Draft { header, sessions }))
    }

    /// Estimated length of a checkpoint after one of `bytes` bytes, with a margin; 0 if two of them
    /// never fit.
    pub(super) fn next_checkpoint_bytes(&self, bytes: u64, budget: u64) -> u64 {
        let most = budget.saturating_sub(least_bytes(&self.options)) / 2;
        let longer = bytes.saturating_add(bytes / 8).saturating_add(FRAME_BYTES as u64);
        [longer, bytes].into_iter().find(|&bytes| bytes <= most).unwrap_or(0)
    }

    fn make_checkpoint(
        &self,
        cover: &Cover,
        mut draft: Draft,
        source: &mut dyn FnMut(&mut Sink<'_>) -> Result<()>,
    ) -> Result<()> {
        let number = draft.header.number;
        let bytes = draft.header.file_bytes();
        let name = checkpoint_name(number);
        let unfinished = unfinished(&name);
        // Cells that it lists should be durable. If a sync failed, the seals of cells show it.
        let _ = self.commit_all();
        let saved = self.save_sessions(&mut draft.sessions, &|segment| segment.poisoned);
        let written = saved.and_then(|()| self.files.create(&unfinished, bytes)).and_then(|file| {
            let written = self.write_checkpoint(file, cover, &draft, source);
            self.files.close(file);
            written
        });
        let is_durable = written
            .and_then(|()| self.files.rename(&unfinished, &name))
            .and_then(|()| self.files.sync_names());
        if let Err(error) = is_durable {
            // It may have either name.
            let _ = self.files.remove(&unfinished);
            let _ = self.files.remove(&name);
            self.release(bytes, &[unfinished, name]);
            // Another program may have filled the disk.
            self.discard(|_| true);
            return Err(refusal(error));
        }
        let mut state = self.state.lock();
        state.stats.checkpoints += 1;
        state.stats.overhead_bytes += bytes;
        state.checkpoints.insert(number, bytes);
        // It has the sessions.
        state.release_held();
        drop(state);
        self.remove_checkpoints(|other| other < number);
        Ok(())
    }

    fn write_checkpoint(
        &self,
        file: FileId,
        cover: &Cover,
        draft: &Draft,
        source: &mut dyn FnMut(&mut Sink<'_>) -> Result<()>,
    ) -> Result<()> {
        let frame = self.staging.take()?;
        let Header { number, frames: most_frames, .. } = draft.header;
        let mut sink = Sink { tier: self, file, number, frame, frames: 0, most_frames, used: 0 };
        for segment in &cover.segments {
            sink.add(&|frame| frame.segment(segment))?;
        }
        for (name, note) in &draft.sessions {
            let (payload, born) = (&note.payload[..], note.born);
            let (segment, blocks) = (note.segment, note.blocks);
            sink.add(&|frame| frame.session(&Session { name, payload, born, segment, blocks }))?;
        }
        source(&mut sink)?;
        if sink.used > 0 {
            sink.write_frame()?;
        }
        let mut block = [0; BLOCK_BYTES];
        Header { frames: sink.frames, ..draft.header }.encode(&mut block);
        let address = sink.frame.address();
        // SAFETY: the sink's own buffer, longer than a block.
        unsafe {
            address.copy_from_nonoverlapping(block.as_ptr(), BLOCK_BYTES);
            self.transfer_one(file, Access::Write, 0, address, BLOCK_BYTES as u64)?;
        }
        self.files.sync(file)
    }

    /// Removes checkpoints.
    pub(super) fn remove_checkpoints(&self, old: impl Fn(u64) -> bool) {
        let all: Vec<(u64, u64)> = {
            let state = self.state.lock();
            let old = state.checkpoints.iter().filter(|&(&number, _)| old(number));
            old.map(|(&number, &bytes)| (number, bytes)).collect()
        };
        for (number, bytes) in all {
            let name = checkpoint_name(number);
            if self.files.remove(&name).is_ok() {
                self.state.lock().checkpoints.remove(&number);
                self.release(bytes, &[name]);
            }
        }
    }

    /// Frees the bytes of removed files once the removal is durable.
    fn release(&self, bytes: u64, names: &[String]) {
        let is_durable = self.files.sync_names().is_ok();
        let removed =
            self.files.list().is_ok_and(|all| all.iter().all(|entry| !names.contains(&entry.name)));
        let mut state = self.state.lock();
        match (removed, is_durable) {
            (true, true) => state.give_back(bytes),
            (true, false) => state.lingering_bytes += bytes,
            // It stays, and counts, until the store is opened again.
            (false, _) => {}
        }
    }

    /// Reads a checkpoint into `finder`; returns what it covers. None = it is not sound.
    pub(super) fn load(
        &self,
        number: u64,
        bytes: u64,
        finder: &mut Finder,
    ) -> Result<Option<(Header, Vec<SegmentEntry>)>> {
        let Ok(file) = self.files.open(&checkpoint_name(number)) else { return Ok(None) };
        let loaded = self.load_file(file, number, bytes, finder);
        self.files.close(file);
        loaded
    }

    fn load_file(
        &self,
        file: FileId,
        number: u64,
        bytes: u64,
        finder: &mut Finder,
    ) -> Result<Option<(Header, Vec<SegmentEntry>)>> {
        let buffer = self.staging.scratch(FRAME_BYTES as u64, LOAD_BYTES)?;
        let address = buffer.address();
        let whole = |frames: u32| frames as usize * FRAME_BYTES;
        // SAFETY: a local buffer, here and below.
        let read = unsafe { self.transfer_one(file, Access::Read, 0, address, BLOCK_BYTES as u64) };
        // SAFETY: as above.
        let block = unsafe { std::slice::from_raw_parts(address, BLOCK_BYTES) };
        let header = Header::decode(block).filter(|header| {
            header.store == self.store && header.number == number && header.file_bytes() <= bytes
        });
        let (Ok(()), Some(header)) = (read, header) else { return Ok(None) };
        finder.covered = Some(header.next_record);
        let mut segments = Vec::new();
        let at_once = (buffer.bytes() / FRAME_BYTES as u64) as u32;
        let mut index = 0;
        while index < header.frames {
            let frames = at_once.min(header.frames - index);
            let offset = BLOCK_BYTES as u64 + whole(index) as u64;
            let length = whole(frames) as u64;
            // SAFETY: as above.
            if unsafe { self.transfer_one(file, Access::Read, offset, address, length) }.is_err() {
                return Ok(None);
            }
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(address, whole(frames)) };
            for frame in bytes.chunks(FRAME_BYTES) {
                if !take_frame(frame, &header, index, finder, &mut segments)? {
                    return Ok(None);
                }
                index += 1;
            }
        }
        Ok(Some((header, segments)))
    }
}

/// Decodes a frame; false = it is not sound.
pub(super) fn take_frame(
    frame: &[u8],
    header: &Header,
    index: u32,
    finder: &mut Finder,
    segments: &mut Vec<SegmentEntry>,
) -> Result<bool> {
    let Some(entries) = entries(frame, header, index) else { return Ok(false) };
    for item in entries {
        match item {
            Some(Entry::Segment(covered)) => segments.push(covered),
            Some(Entry::Chunk(chunk, places)) => finder.listed(&chunk, places.iter())?,
            Some(Entry::Session(session)) => finder.session(&session, 0, 0),
            None => return Ok(false),
        }
    }
    Ok(true)
}
