//! Records without cells: forgotten cells, states of sessions, void blocks.

use crate::base::status::Result;
use crate::fail;
use crate::format::keys::Key;
use crate::format::record::{
    Chunk, Encoder, Head, Kind, MAX_CELLS, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES, header_blocks_of,
};
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::Access;
use crate::tier::disk::batch::Mark;
use crate::tier::disk::state::{Front, Grant, Note, Segment};
use crate::tier::disk::{DiskTier, offset_of};

/// A record without cells to write.
pub(super) struct NoteRecord<'a> {
    pub kind: Kind,
    pub key: Key,
    pub items: u32,
    pub body: [&'a [u8]; 2],
    /// Number of the record that first had the content; 0 = the record's own number.
    pub born: u64,
    pub until: u64,
    /// Segment that it is copied from; 0 = none.
    pub from: u64,
}

/// Age and source of a copied record; zeros = it is new.
#[derive(Clone, Copy, Default)]
pub(super) struct Origin {
    pub born: u64,
    pub until: u64,
    pub from: u64,
}

impl DiskTier {
    /// Records that cells of a chunk were removed, of some layers or of all if none is named: an
    /// opening does not find them again. Cells that are stored later are found. The caller drops
    /// the cells themselves.
    pub fn forget(&self, key: Key, layers: &[u32]) -> Result<Mark> {
        if layers.len() > MAX_CELLS {
            fail!(Limit, "{} layers are more than {MAX_CELLS}", layers.len());
        }
        self.note_forget(Front::Callers, key, layers, Origin::default())
    }

    pub(super) fn note_forget(
        &self,
        front: Front,
        key: Key,
        layers: &[u32],
        origin: Origin,
    ) -> Result<Mark> {
        let body: Vec<u8> = layers.iter().flat_map(|layer| layer.to_le_bytes()).collect();
        let items = layers.len() as u32;
        let Origin { born, until, from } = origin;
        let (kind, body) = (Kind::Forget, [&body[..], &[]]);
        let note = NoteRecord { kind, key, items, body, born, until, from };
        self.note(front, &note).map(|(_, mark)| mark)
    }

    /// Writes the state of a session, which replaces the earlier one of that name. An empty payload
    /// removes the session.
    pub fn put_session(&self, name: &[u8], payload: &[u8]) -> Result<Mark> {
        if name.is_empty() || name.len() > MAX_NAME_BYTES || payload.len() > MAX_PAYLOAD_BYTES {
            fail!(
                Limit,
                "a session has a name of 1 to {MAX_NAME_BYTES} bytes and content of up to {MAX_PAYLOAD_BYTES}"
            );
        }
        let _underway = self.set_out();
        let (note, mark) = self.note_session(Front::Callers, name, payload, Origin::default())?;
        self.settle_session(name, note, false);
        Ok(mark)
    }

    /// Drops the state of a session without a record of that: an opening may find it again, unless
    /// a later checkpoint was written.
    pub fn drop_session(&self, name: &[u8]) {
        let mut state = self.state.lock();
        if let Some(note) = state.sessions.remove(name) {
            state.uncount_session(note.segment, false);
        }
    }

    /// The segment with the newest record of a session.
    pub fn segment_of_session(&self, name: &[u8]) -> Option<u64> {
        self.state.lock().sessions.get(name).map(|note| note.segment)
    }

    /// Writes a session's record; returns its place. The segment counts it until
    /// [`DiskTier::settle_session`] or [`crate::tier::disk::state::State::uncount_session`].
    pub(super) fn note_session(
        &self,
        front: Front,
        name: &[u8],
        payload: &[u8],
        origin: Origin,
    ) -> Result<(Note, Mark)> {
        let (kind, items) = (Kind::Session, name.len() as u32);
        let key = Chunk::NONE.key;
        let Origin { born, until, from } = origin;
        let body = [name, payload];
        let record = NoteRecord { kind, key, items, body, born, until, from };
        let (grant, mark) = self.note(front, &record)?;
        let born = if born == 0 { grant.number } else { born };
        let blocks = header_blocks_of(name.len() + payload.len()).unwrap_or(1);
        Ok((Note { payload: payload.into(), born, segment: grant.segment, blocks }, mark))
    }

    /// Makes the written record the newest one of its session, unless a newer one was written
    /// meanwhile: the larger number is the later one.
    pub(super) fn settle_session(&self, name: &[u8], note: Note, lasts: bool) {
        let mut state = self.state.lock();
        // A copy of a session that was dropped meanwhile is useless.
        let is_newest = state.sessions.get(name).map_or(!lasts, |old| old.born <= note.born);
        match is_newest {
            true => state.point_session(name, note, lasts),
            false => state.uncount_session(note.segment, false),
        }
    }

    /// Writes sessions again whose records are in doubtful segments and may be lost, before their
    /// earlier records are removed or a checkpoint covers them.
    pub(super) fn save_sessions(
        &self,
        sessions: &mut [(Box<[u8]>, Note)],
        doubtful: &dyn Fn(&Segment) -> bool,
    ) -> Result<()> {
        let _underway = self.set_out();
        let mut written = Vec::new();
        let mut lasts = Ok(());
        for (at, (name, note)) in sessions.iter().enumerate() {
            if !self.state.lock().segments.get(&note.segment).is_some_and(doubtful) {
                continue;
            }
            let origin = Origin { born: note.born, until: 0, from: note.segment };
            match self.note_session(Front::Compaction, name, &note.payload, origin) {
                Ok((note, mark)) => written.push((at, note, mark)),
                Err(error) => lasts = Err(error),
            }
        }
        let marks = written.iter().map(|(.., mark)| *mark);
        let lasts =
            lasts.and_then(|()| marks.map(|mark| self.commit(mark)).fold(Ok(()), Result::and));
        for (at, note, _) in written {
            let Some((name, old)) = sessions.get_mut(at) else { continue };
            if lasts.is_ok() {
                self.settle_session(name, note.clone(), true);
                *old = note;
            } else {
                self.state.lock().uncount_session(note.segment, false);
            }
        }
        lasts
    }

    fn note(&self, front: Front, note: &NoteRecord<'_>) -> Result<(Grant, Mark)> {
        let length = note.body.iter().map(|part| part.len()).sum();
        let Some(blocks) = header_blocks_of(length) else {
            fail!(Limit, "a record of {length} bytes is too long");
        };
        let grant = self.room_for(front, blocks, note.born)?;
        let written = self.write_note(&grant, blocks, note);
        let mut state = self.state.lock();
        if written.is_err() {
            state.leave_front(grant.segment);
            state.stats.failed_records += 1;
        } else {
            state.stats.records += 1;
            state.stats.overhead_bytes += u64::from(blocks) * BLOCK_BYTES as u64;
        }
        let mut mark = Mark { segment: grant.segment, write: 0 };
        if let Some(segment) = state.segments.get_mut(&grant.segment) {
            segment.writing -= 1;
            segment.dirty += 1;
            mark.write = segment.dirty;
            // Counted before another thread can find the segment empty and remove it.
            segment.forgets += u32::from(written.is_ok() && note.kind == Kind::Forget);
            segment.sessions += u32::from(written.is_ok() && note.kind == Kind::Session);
        }
        written.map(|()| (grant, mark))
    }

    fn write_note(&self, grant: &Grant, blocks: u32, note: &NoteRecord<'_>) -> Result<()> {
        let pinned = self.pin(grant.segment)?;
        let buffer = self.staging.take()?;
        let address = buffer.address();
        let bytes = blocks as usize * BLOCK_BYTES;
        // SAFETY: a staging buffer is longer than any header, and nothing else uses it.
        let header = unsafe { std::slice::from_raw_parts_mut(address, bytes) };
        let mut encoder = Encoder::new(header);
        note.body.iter().for_each(|part| encoder.bytes(part));
        encoder.finish(&Head {
            kind: note.kind as u16,
            items: note.items,
            born: if note.born == 0 { grant.number } else { note.born },
            until: if note.until == 0 { grant.number } else { note.until },
            from: note.from,
            chunk: Chunk { key: note.key, ..Chunk::NONE },
            ..self.plain_head(grant, blocks)
        });
        let (file, offset) = (pinned.file, offset_of(grant.at));
        // SAFETY: as above.
        let written =
            unsafe { self.transfer_one(file, Access::Write, offset, address, bytes as u64) };
        drop(buffer);
        if written.is_err() {
            let _ = self.write_void(file, grant, blocks);
        }
        written.map_err(crate::tier::disk::files::refusal)
    }

    /// The header of void blocks.
    pub(super) fn encode_void(&self, bytes: &mut [u8], grant: &Grant, blocks: u32) {
        Encoder::new(bytes).finish(&self.plain_head(grant, blocks));
    }

    fn plain_head(&self, grant: &Grant, blocks: u32) -> Head {
        Head {
            kind: Kind::Void as u16,
            header_blocks: 1,
            blocks,
            number: grant.number,
            born: grant.number,
            segment: grant.segment,
            at: grant.at,
            items: 0,
            store: self.store,
            chunk: Chunk::NONE,
            body_bytes: 0,
            until: 0,
            from: 0,
        }
    }
}
