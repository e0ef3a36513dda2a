//! Checkpoints: the index as a file, so that opening need not read every header.

use std::ops::Bound::{Excluded, Unbounded};

use crate::base::memory::Buffer;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::format::checkpoint::{
    Covered, FRAME_BYTES, FrameWriter, Header, Item, MAX_PLACES, Place, Session, frames_for, items,
    session_bytes,
};
use crate::format::record::Chunk;
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::{FileId, Way};
use crate::tier::disk::DiskTier;
use crate::tier::disk::files::{checkpoint as checkpoint_name, refusal, unfinished};
use crate::tier::disk::recovered::Finder;
use crate::tier::disk::staging::STAGING_BYTES;

/// A moment of the log: everything whose room was taken before it.
pub struct Cover {
    next_record: u64,
    next_segment: u64,
    segments: Vec<Covered>,
}

/// Takes the entries of a checkpoint.
pub struct Sink<'a> {
    tier: &'a DiskTier,
    file: FileId,
    number: u64,
    frame: Buffer,
    /// Frames that are written, and how many there may be.
    frames: u32,
    most_frames: u32,
    /// Bytes of the frame that are filled.
    used: usize,
}

impl Sink<'_> {
    /// Adds cells of a chunk.
    pub fn chunk(&mut self, chunk: &Chunk, cells: &[Place]) -> Result<()> {
        cells
            .chunks(MAX_PLACES)
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
        // SAFETY: the sink's own buffer of that length.
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
            fail!(Limit, "the checkpoint is longer than was said");
        }
        let address = self.frame.address();
        // SAFETY: the sink's own buffer of that length.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address, FRAME_BYTES) };
        FrameWriter::resume(bytes, self.used).finish(&self.tier.store, self.number, self.frames);
        let offset = BLOCK_BYTES as u64 + u64::from(self.frames) * FRAME_BYTES as u64;
        // SAFETY: as above; nobody else has the buffer.
        unsafe {
            self.tier.transfer_one(self.file, Way::Write, offset, address, FRAME_BYTES as u64)?;
        }
        self.frames += 1;
        self.used = 0;
        Ok(())
    }
}

impl DiskTier {
    /// The log as it is now. A checkpoint that covers it must have every cell whose
    /// append began before, unless it was dropped: the caller waits for those, then
    /// goes through its index, which may change meanwhile.
    pub fn cover(&self) -> Cover {
        let state = self.state.lock();
        let covered = |(&number, segment): (&u64, &crate::tier::disk::state::Segment)| Covered {
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

    /// Writes a checkpoint of up to `chunks` calls of [`Sink::chunk`] with `cells`
    /// cells together, which `source` makes. The one before stays until this one
    /// lasts. BUDGET = no room for it: the store goes on, opening takes longer.
    pub fn checkpoint(
        &self,
        cover: &Cover,
        chunks: usize,
        cells: usize,
        source: &mut dyn FnMut(&mut Sink<'_>) -> Result<()>,
    ) -> Result<()> {
        let (number, sessions) = {
            let mut state = self.state.lock();
            if state.checkpointing {
                fail!(Busy, "another checkpoint is being written");
            }
            state.checkpointing = true;
            state.next_checkpoint += 1;
            let sizes = state.sessions.iter();
            let bytes =
                sizes.map(|(name, note)| session_bytes(name.len(), note.payload.len())).sum();
            (state.next_checkpoint - 1, bytes)
        };
        // What it names should be there. Where a sync failed the seals show it.
        let _ = self.commit_all();
        let segments = cover.segments.len();
        let result = match frames_for(segments, chunks, cells, sessions) {
            Some(frames) => {
                let header = Header {
                    store: self.store,
                    number,
                    next_record: cover.next_record,
                    next_segment: cover.next_segment,
                    frames,
                };
                self.make_checkpoint(cover, header, source)
            }
            None => Err(Status::Limit.into()),
        };
        self.state.lock().checkpointing = false;
        result
    }

    fn make_checkpoint(
        &self,
        cover: &Cover,
        header: Header,
        source: &mut dyn FnMut(&mut Sink<'_>) -> Result<()>,
    ) -> Result<()> {
        let bytes = header.file_bytes();
        let budget = self.options.budget_bytes;
        self.state.lock().take(bytes, self.options.segment_bytes, budget)?;
        let name = checkpoint_name(header.number);
        let draft = unfinished(&name);
        let written = self.files.create(&draft, bytes).and_then(|file| {
            let written = self.write_checkpoint(file, cover, header, source);
            self.files.close(file);
            written
        });
        let lasts = written
            .and_then(|()| self.files.rename(&draft, &name))
            .and_then(|()| self.files.sync_names());
        if let Err(error) = lasts {
            // It may have either name.
            let _ = self.files.remove(&draft);
            let _ = self.files.remove(&name);
            self.release(bytes, &[draft, name]);
            return Err(refusal(error));
        }
        let mut state = self.state.lock();
        state.stats.checkpoints += 1;
        state.stats.overhead_bytes += bytes;
        state.checkpoints.insert(header.number, bytes);
        drop(state);
        self.remove_checkpoints(|number| number < header.number);
        Ok(())
    }

    fn write_checkpoint(
        &self,
        file: FileId,
        cover: &Cover,
        mut header: Header,
        source: &mut dyn FnMut(&mut Sink<'_>) -> Result<()>,
    ) -> Result<()> {
        let frame = self.staging.map(FRAME_BYTES as u64)?;
        let most_frames = header.frames;
        let number = header.number;
        let mut sink = Sink { tier: self, file, number, frame, frames: 0, most_frames, used: 0 };
        for segment in &cover.segments {
            sink.add(&|frame| frame.segment(segment))?;
        }
        self.write_sessions(&mut sink)?;
        source(&mut sink)?;
        if sink.used > 0 {
            sink.write_frame()?;
        }
        header.frames = sink.frames;
        let mut block = [0; BLOCK_BYTES];
        header.encode(&mut block);
        let address = sink.frame.address();
        // SAFETY: the sink's own buffer, longer than a block.
        unsafe {
            address.copy_from_nonoverlapping(block.as_ptr(), BLOCK_BYTES);
            self.transfer_one(file, Way::Write, 0, address, BLOCK_BYTES as u64)?;
        }
        self.files.sync(file)
    }

    /// One session at a time: what they are may be long, and the lock is not held
    /// while it is written.
    fn write_sessions(&self, sink: &mut Sink<'_>) -> Result<()> {
        let mut last: Option<Box<[u8]>> = None;
        loop {
            let next = {
                let state = self.state.lock();
                let from = last.as_deref().map_or(Unbounded, Excluded);
                let mut rest = state.sessions.range::<[u8], _>((from, Unbounded));
                rest.next().map(|(name, note)| (name.clone(), note.clone()))
            };
            let Some((name, note)) = next else { return Ok(()) };
            sink.add(&|frame| {
                frame.session(&Session {
                    name: &name,
                    payload: &note.payload,
                    born: note.born,
                    segment: note.segment,
                    blocks: note.blocks,
                })
            })?;
            last = Some(name);
        }
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

    /// Gives back bytes of files that were removed, once that lasts.
    fn release(&self, bytes: u64, names: &[String]) {
        let lasts = self.files.sync_names().is_ok();
        let gone =
            self.files.list().is_ok_and(|all| all.iter().all(|entry| !names.contains(&entry.name)));
        let mut state = self.state.lock();
        match (gone, lasts) {
            (true, true) => state.give_back(bytes),
            (true, false) => state.lingering_bytes += bytes,
            // It stays, and counts, until the store is opened again.
            (false, _) => {}
        }
    }

    /// Reads a checkpoint into `finder`; what it covers, or None if it is not sound.
    pub(super) fn load(
        &self,
        number: u64,
        bytes: u64,
        finder: &mut Finder,
    ) -> Result<Option<(Header, Vec<Covered>)>> {
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
    ) -> Result<Option<(Header, Vec<Covered>)>> {
        let buffer = self.staging.map(STAGING_BYTES)?;
        let address = buffer.address();
        let whole = |frames: u32| frames as usize * FRAME_BYTES;
        // SAFETY: this call's own buffer, here and below.
        let read = unsafe { self.transfer_one(file, Way::Read, 0, address, BLOCK_BYTES as u64) };
        // SAFETY: as above.
        let block = unsafe { std::slice::from_raw_parts(address, BLOCK_BYTES) };
        let header = Header::decode(block).filter(|header| {
            header.store == self.store && header.number == number && header.file_bytes() <= bytes
        });
        let (Ok(()), Some(header)) = (read, header) else { return Ok(None) };
        finder.covered = Some(header.next_record);
        let mut segments = Vec::new();
        let at_once = (STAGING_BYTES as usize / FRAME_BYTES) as u32;
        let mut index = 0;
        while index < header.frames {
            let frames = at_once.min(header.frames - index);
            let offset = BLOCK_BYTES as u64 + whole(index) as u64;
            let length = whole(frames) as u64;
            // SAFETY: as above.
            if unsafe { self.transfer_one(file, Way::Read, offset, address, length) }.is_err() {
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

/// False if a frame is not sound.
fn take_frame(
    frame: &[u8],
    header: &Header,
    index: u32,
    finder: &mut Finder,
    segments: &mut Vec<Covered>,
) -> Result<bool> {
    let Some(items) = items(frame, header, index) else { return Ok(false) };
    for item in items {
        match item {
            Some(Item::Segment(covered)) => segments.push(covered),
            Some(Item::Chunk(chunk, places)) => finder.listed(&chunk, places.iter())?,
            Some(Item::Session(session)) => finder.session(&session),
            None => return Ok(false),
        }
    }
    Ok(true)
}
