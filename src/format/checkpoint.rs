//! Checkpoint files: the disk tier's index at one moment, in frames with a checksum each. A file of
//! any size is read with the memory of one frame. `docs/internals/formats.md` defines the bytes.

use crate::format::fields::{array_at, put, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use crate::format::keys::{Fingerprint, Key};
use crate::format::record::{Chunk, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES};
use crate::format::segment::{BLOCK_BYTES, StoreId, VERSION, is_signed, sign};

/// Bytes of a frame; the largest session entry fits.
pub const FRAME_BYTES: usize = 128 << 10;

const HEADER_MAGIC: &[u8; 4] = b"KVTI";
const FRAME_MAGIC: &[u8; 4] = b"KVTF";
const FRAME_HEAD_BYTES: usize = 32;
const FRAME_END: usize = FRAME_BYTES - 8;
const SEGMENT_BYTES: usize = 40;
const CHUNK_BYTES: usize = 144;
const CELL_ENTRY_BYTES: usize = 32;
const SESSION_BYTES: usize = 32;

/// Most cells of one entry; more cells are in further entries of the chunk.
pub const MAX_CELLS_PER_ENTRY: usize = 1024;

/// The first block of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Id of the store.
    pub store: StoreId,
    /// Number of the checkpoint, as in its name.
    pub number: u64,
    /// Records from this number on may be missing in it.
    pub next_record: u64,
    /// Segments from this number on are not in it.
    pub next_segment: u64,
    /// Number of frames that follow.
    pub frames: u32,
}

/// Entry of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentEntry {
    /// Its number.
    pub number: u64,
    /// Records that start before this block are in the checkpoint or deleted.
    pub blocks: u32,
    /// Number of *forget* records among them.
    pub forgets: u32,
    /// The smallest birth number of its records.
    pub oldest: u64,
    /// The largest number of its records.
    pub newest: u64,
}

/// Entry of a cell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CellEntry {
    /// Segment, block and record, as `tier/disk` packs them.
    pub spot: u64,
    /// The seal of the cell.
    pub seal: u64,
    /// Stored bytes.
    pub stored_bytes: u32,
    /// Its layer.
    pub layer: u32,
    /// Codec of its bytes.
    pub codec: u16,
    /// Number of planes.
    pub planes: u16,
}

/// Entry of a session; without payload, the session was deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session<'a> {
    /// Its name.
    pub name: &'a [u8],
    /// Payload of the store.
    pub payload: &'a [u8],
    /// Number under which it was first written.
    pub born: u64,
    /// Segment of its newest record.
    pub segment: u64,
    /// Blocks of that record.
    pub blocks: u32,
}

/// An entry of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub enum Entry<'a> {
    /// A segment.
    Segment(SegmentEntry),
    /// Some cells of a chunk.
    Chunk(Chunk, CellEntries<'a>),
    /// A session.
    Session(Session<'a>),
}

/// The cells of an entry.
#[derive(Clone, Copy, Debug)]
pub struct CellEntries<'a>(&'a [u8]);

impl<'a> CellEntries<'a> {
    /// All cells.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = CellEntry> + use<'a> {
        self.0.chunks_exact(CELL_ENTRY_BYTES).map(|at| CellEntry {
            spot: u64_at(at, 0),
            seal: u64_at(at, 8),
            stored_bytes: u32_at(at, 16),
            layer: u32_at(at, 20),
            codec: u16_at(at, 24),
            planes: u16_at(at, 26),
        })
    }
}

impl Header {
    /// Encodes it into a block.
    pub fn encode(&self, block: &mut [u8; BLOCK_BYTES]) {
        block.fill(0);
        put(block, 0, HEADER_MAGIC);
        put_u16(block, 4, VERSION);
        put_u32(block, 8, FRAME_BYTES as u32);
        put_u32(block, 12, self.frames);
        put(block, 16, &self.store);
        put_u64(block, 32, self.number);
        put_u64(block, 40, self.next_record);
        put_u64(block, 48, self.next_segment);
        sign(block);
    }

    /// Decodes a block; None if it is damaged or of another version.
    pub fn decode(bytes: &[u8]) -> Option<Header> {
        let block = bytes.get(..BLOCK_BYTES)?;
        let fits = &array_at::<4>(block, 0) == HEADER_MAGIC
            && is_signed(block)
            && u16_at(block, 4) == VERSION
            && u32_at(block, 8) == FRAME_BYTES as u32;
        fits.then(|| Header {
            store: array_at(block, 16),
            number: u64_at(block, 32),
            next_record: u64_at(block, 40),
            next_segment: u64_at(block, 48),
            frames: u32_at(block, 12),
        })
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        BLOCK_BYTES as u64 + u64::from(self.frames) * FRAME_BYTES as u64
    }
}

/// The most frames for this many segments, chunks and cells, and `sessions` bytes of session
/// entries, by [`session_bytes`]. None if a file cannot have as many.
pub fn frames_for(segments: usize, chunks: usize, cells: usize, sessions: usize) -> Option<u32> {
    let cells = cells.checked_mul(CELL_ENTRY_BYTES + CHUNK_BYTES / 64)?;
    let plain = segments
        .checked_mul(SEGMENT_BYTES)?
        .checked_add(chunks.checked_mul(CHUNK_BYTES)?)?
        .checked_add(cells)?;
    // A frame ends when the next entry does not fit, so it wastes at most the longest entry.
    let room = FRAME_END - FRAME_HEAD_BYTES - CHUNK_BYTES - CELL_ENTRY_BYTES * MAX_CELLS_PER_ENTRY;
    let session_room =
        FRAME_END - FRAME_HEAD_BYTES - session_bytes(MAX_NAME_BYTES, MAX_PAYLOAD_BYTES);
    let frames = plain.div_ceil(room).checked_add(sessions.div_ceil(session_room))?;
    u32::try_from(frames.checked_add(1)?).ok()
}

/// Bytes of the entry of a session.
pub fn session_bytes(name: usize, payload: usize) -> usize {
    (SESSION_BYTES + 8 + name + payload).next_multiple_of(8)
}

/// Writes one frame.
pub struct FrameWriter<'a> {
    frame: &'a mut [u8],
    used: usize,
}

impl<'a> FrameWriter<'a> {
    /// An empty frame in `frame`, of [`FRAME_BYTES`].
    pub fn new(frame: &'a mut [u8]) -> FrameWriter<'a> {
        frame.fill(0);
        FrameWriter { frame, used: FRAME_HEAD_BYTES }
    }

    /// Continues a frame with [`FrameWriter::used`] bytes.
    pub fn resume(frame: &'a mut [u8], used: usize) -> FrameWriter<'a> {
        FrameWriter { frame, used: used.max(FRAME_HEAD_BYTES) }
    }

    /// Bytes used so far.
    pub fn used(&self) -> usize {
        self.used
    }

    fn take(&mut self, kind: u32, bytes: usize) -> Option<usize> {
        let at = self.used;
        let end = at.checked_add(bytes.checked_next_multiple_of(8)?)?;
        if end > FRAME_END.min(self.frame.len()) {
            return None;
        }
        put_u32(self.frame, at, kind);
        put_u32(self.frame, at + 4, (end - at) as u32);
        self.used = end;
        Some(at)
    }

    /// Adds a segment; false if it does not fit.
    pub fn segment(&mut self, segment: &SegmentEntry) -> bool {
        let Some(at) = self.take(1, SEGMENT_BYTES) else { return false };
        put_u64(self.frame, at + 8, segment.number);
        put_u32(self.frame, at + 16, segment.blocks);
        put_u32(self.frame, at + 20, segment.forgets);
        put_u64(self.frame, at + 24, segment.oldest);
        put_u64(self.frame, at + 32, segment.newest);
        true
    }

    /// Adds cells of a chunk, up to [`MAX_CELLS_PER_ENTRY`]; false if they do not fit.
    pub fn chunk(&mut self, chunk: &Chunk, cells: &[CellEntry]) -> bool {
        if cells.len() > MAX_CELLS_PER_ENTRY {
            return false;
        }
        let Some(at) = self.take(2, CHUNK_BYTES + cells.len() * CELL_ENTRY_BYTES) else {
            return false;
        };
        put(self.frame, at + 8, &chunk.namespace.0);
        put(self.frame, at + 40, &chunk.parent.0);
        put(self.frame, at + 72, &chunk.key.0);
        put(self.frame, at + 104, &chunk.fingerprint.0);
        put_u32(self.frame, at + 136, chunk.position);
        put_u32(self.frame, at + 140, chunk.valid_tokens);
        for (i, place) in cells.iter().enumerate() {
            let at = at + CHUNK_BYTES + i * CELL_ENTRY_BYTES;
            put_u64(self.frame, at, place.spot);
            put_u64(self.frame, at + 8, place.seal);
            put_u32(self.frame, at + 16, place.stored_bytes);
            put_u32(self.frame, at + 20, place.layer);
            put_u16(self.frame, at + 24, place.codec);
            put_u16(self.frame, at + 26, place.planes);
        }
        true
    }

    /// Adds a session; false if it does not fit, or name or payload is too long.
    pub fn session(&mut self, session: &Session<'_>) -> bool {
        let (name, payload) = (session.name, session.payload);
        if name.len() > MAX_NAME_BYTES || payload.len() > MAX_PAYLOAD_BYTES {
            return false;
        }
        let Some(at) = self.take(3, session_bytes(name.len(), payload.len())) else {
            return false;
        };
        put_u32(self.frame, at + 8, name.len() as u32);
        put_u32(self.frame, at + 12, payload.len() as u32);
        put_u64(self.frame, at + 16, session.born);
        put_u64(self.frame, at + 24, session.segment);
        put_u32(self.frame, at + 32, session.blocks);
        put(self.frame, at + 40, name);
        put(self.frame, at + 40 + name.len(), payload);
        true
    }

    /// Writes header and checksum: the frame is number `index` of checkpoint `number`.
    pub fn finish(self, store: &StoreId, number: u64, index: u32) {
        put(self.frame, 0, FRAME_MAGIC);
        put_u32(self.frame, 4, index);
        put(self.frame, 8, &store[..8]);
        put_u64(self.frame, 16, number);
        put_u32(self.frame, 24, self.used as u32);
        sign(self.frame);
    }
}

/// The entries of a frame of [`FRAME_BYTES`], if it is intact and the expected one. Entries of
/// unknown kinds are skipped; a None among them means malformed.
pub fn entries<'a>(
    frame: &'a [u8],
    header: &Header,
    index: u32,
) -> Option<impl Iterator<Item = Option<Entry<'a>>> + use<'a>> {
    let used = u32_at(frame, 24) as usize;
    let fits = frame.len() == FRAME_BYTES
        && &array_at::<4>(frame, 0) == FRAME_MAGIC
        && is_signed(frame)
        && u32_at(frame, 4) == index
        && array_at::<8>(frame, 8) == array_at::<8>(&header.store, 0)
        && u64_at(frame, 16) == header.number
        && (FRAME_HEAD_BYTES..=FRAME_END).contains(&used);
    if !fits {
        return None;
    }
    let mut rest = &frame[FRAME_HEAD_BYTES..used];
    Some(std::iter::from_fn(move || {
        while !rest.is_empty() {
            let bytes = u32_at(rest, 4) as usize;
            if bytes < 8 {
                rest = &[];
                return Some(None);
            }
            let Some((entry, after)) = rest.split_at_checked(bytes) else {
                rest = &[];
                return Some(None);
            };
            rest = after;
            match u32_at(entry, 0) {
                1 => return Some(segment(entry)),
                2 => return Some(chunk(entry)),
                3 => return Some(session(entry)),
                _ => {}
            }
        }
        None
    }))
}

fn segment(entry: &[u8]) -> Option<Entry<'_>> {
    (entry.len() >= SEGMENT_BYTES).then(|| {
        Entry::Segment(SegmentEntry {
            number: u64_at(entry, 8),
            blocks: u32_at(entry, 16),
            forgets: u32_at(entry, 20),
            oldest: u64_at(entry, 24),
            newest: u64_at(entry, 32),
        })
    })
}

fn chunk(entry: &[u8]) -> Option<Entry<'_>> {
    let (_, cells) = entry.split_at_checked(CHUNK_BYTES)?;
    if cells.is_empty() || cells.len() % CELL_ENTRY_BYTES != 0 {
        return None;
    }
    let chunk = Chunk {
        namespace: Key(array_at(entry, 8)),
        parent: Key(array_at(entry, 40)),
        key: Key(array_at(entry, 72)),
        fingerprint: Fingerprint(array_at(entry, 104)),
        position: u32_at(entry, 136),
        valid_tokens: u32_at(entry, 140),
    };
    Some(Entry::Chunk(chunk, CellEntries(cells)))
}

fn session(entry: &[u8]) -> Option<Entry<'_>> {
    let (name, payload) = (u32_at(entry, 8) as usize, u32_at(entry, 12) as usize);
    if name > MAX_NAME_BYTES || payload > MAX_PAYLOAD_BYTES {
        return None;
    }
    let rest = entry.get(SESSION_BYTES + 8..)?.get(..name + payload)?;
    let (name, payload) = rest.split_at_checked(name)?;
    let (born, segment) = (u64_at(entry, 16), u64_at(entry, 24));
    Some(Entry::Session(Session { name, payload, born, segment, blocks: u32_at(entry, 32) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header { store: [5; 16], number: 3, next_record: 100, next_segment: 9, frames: 1 }
    }

    fn place(i: u64) -> CellEntry {
        CellEntry {
            spot: i << 40,
            seal: !i,
            stored_bytes: 77,
            layer: i as u32,
            codec: 1,
            planes: 2,
        }
    }

    fn some_chunk() -> Chunk {
        Chunk { key: Key([3; 32]), position: 4, valid_tokens: 256, ..Chunk::NONE }
    }

    fn filled() -> Vec<u8> {
        let mut frame = vec![0xEE; FRAME_BYTES];
        let mut writer = FrameWriter::new(&mut frame);
        assert_eq!(writer.used(), FRAME_HEAD_BYTES);
        let covered = SegmentEntry { number: 8, blocks: 700, forgets: 1, oldest: 5, newest: 90 };
        assert!(writer.segment(&covered));
        assert!(writer.chunk(&some_chunk(), &[place(1), place(2)]));
        let session = Session { name: b"me", payload: b"12345", born: 4, segment: 8, blocks: 1 };
        assert!(writer.session(&session));
        writer.finish(&header().store, 3, 0);
        frame
    }

    #[test]
    fn entries_round_trip() {
        let frame = filled();
        let all: Vec<_> = entries(&frame, &header(), 0).expect("sound").collect();
        assert_eq!(all.len(), 3);
        let Some(Entry::Segment(covered)) = all[0] else { panic!("a segment") };
        assert_eq!((covered.number, covered.blocks, covered.newest), (8, 700, 90));
        let Some(Entry::Chunk(chunk, cells)) = all[1] else { panic!("a chunk") };
        assert_eq!(chunk, some_chunk());
        assert_eq!(cells.iter().collect::<Vec<_>>(), [place(1), place(2)]);
        let Some(Entry::Session(session)) = all[2] else { panic!("a session") };
        assert_eq!((session.name, session.payload, session.born), (&b"me"[..], &b"12345"[..], 4));
        let mut block = [0; BLOCK_BYTES];
        header().encode(&mut block);
        assert_eq!(Header::decode(&block), Some(header()));
    }

    #[test]
    fn damaged_and_misplaced_frames_are_rejected() {
        let mut frame = filled();
        assert!(entries(&frame, &header(), 1).is_none());
        assert!(entries(&frame, &Header { number: 4, ..header() }, 0).is_none());
        assert!(entries(&frame, &Header { store: [6; 16], ..header() }, 0).is_none());
        assert!(entries(&frame[..FRAME_BYTES - 1], &header(), 0).is_none());
        for bit in (0..256).chain((256..FRAME_BYTES * 8).step_by(9001)) {
            frame[bit / 8] ^= 1 << (bit % 8);
            assert!(entries(&frame, &header(), 0).is_none(), "bit {bit}");
            frame[bit / 8] ^= 1 << (bit % 8);
        }
        let mut block = [0; BLOCK_BYTES];
        header().encode(&mut block);
        for bit in (0..BLOCK_BYTES * 8).step_by(3) {
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&block), None, "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn frames_for_is_sufficient() {
        for (segments, chunks, cells_each, sessions) in
            [(0, 0, 0, 0), (5000, 1, 1, 0), (3, 900, 1000, 0), (1, 4000, 3, 40), (0, 0, 0, 300)]
        {
            let bytes = sessions * session_bytes(256, MAX_PAYLOAD_BYTES);
            let limit = frames_for(segments, chunks, chunks * cells_each, bytes);
            let mut frame = vec![0; FRAME_BYTES];
            let mut frames = 1u32;
            let mut writer = FrameWriter::new(&mut frame);
            let mut used = FRAME_HEAD_BYTES;
            let mut add = |add: &dyn Fn(&mut FrameWriter<'_>) -> bool| {
                writer.used = used;
                if !add(&mut writer) {
                    frames += 1;
                    writer.used = FRAME_HEAD_BYTES;
                    assert!(add(&mut writer));
                }
                used = writer.used;
            };
            let cells = vec![place(1); cells_each.max(1)];
            let payload = vec![7; MAX_PAYLOAD_BYTES];
            let session =
                Session { name: &[1; 256], payload: &payload, born: 0, segment: 0, blocks: 1 };
            (0..segments).for_each(|_| add(&|w| w.segment(&SegmentEntry::default())));
            (0..chunks).for_each(|_| add(&|w| w.chunk(&some_chunk(), &cells)));
            (0..sessions).for_each(|_| add(&|w| w.session(&session)));
            assert!(Some(frames) <= limit, "{frames} {limit:?}");
        }
        assert_eq!(frames_for(0, 0, usize::MAX / 8, 0), None);
    }

    proptest! {
        #[test]
        fn signed_random_changes_do_not_panic(
            edits in proptest::collection::vec((24usize..500, any::<u8>()), 0..12)
        ) {
            let mut frame = filled();
            edits.iter().for_each(|&(at, value)| frame[at] = value);
            sign(&mut frame);
            if let Some(all) = entries(&frame, &header(), 0) {
                for item in all.flatten() {
                    if let Entry::Chunk(_, cells) = item {
                        cells.iter().for_each(drop);
                    }
                }
            }
        }
    }
}
