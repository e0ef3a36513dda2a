//! Records of the disk log: a self-contained header of whole blocks, then the cells of one chunk.
//! `docs/internals/formats.md` defines the bytes.
//!
//! Headers are not trusted: [`decode`] checks checksum, lengths and limits once, and returns a view
//! whose cells can be iterated without errors.

use crate::format::fields::{array_at, put, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use crate::format::keys::{Fingerprint, Key};
use crate::format::seal::{MAX_PLANES, Plane};
use crate::format::segment::{BLOCK_BYTES, StoreId, VERSION, is_signed, sign};

/// Most blocks of a header.
pub const MAX_HEADER_BLOCKS: u32 = 64;
/// Most blocks of a record.
pub const MAX_RECORD_BLOCKS: u32 = u16::MAX as u32;
/// Most cells of a record, and most layers of a *forget*.
pub const MAX_CELLS: usize = 2048;
/// Longest name of a session, in bytes.
pub const MAX_NAME_BYTES: usize = 256;
/// Largest payload of a session record, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 64 << 10;

/// Bytes before the cells of a header.
pub const HEAD_BYTES: usize = 224;
const CELL_BYTES: usize = 32;
const PLANE_BYTES: usize = 24;
const SUM_BYTES: usize = 8;
const MAGIC: &[u8; 4] = b"KVTR";

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// Cells of a chunk.
    Cells = 1,
    /// Cells of a chunk were deleted.
    Forget = 2,
    /// Payload of a session.
    Session = 3,
    /// Empty: unwritten blocks, or the end of a segment.
    Void = 4,
}

/// The chunk of a record's cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Its namespace.
    pub namespace: Key,
    /// The chunk before it; the namespace for the first chunk.
    pub parent: Key,
    /// Its own key.
    pub key: Key,
    /// Fingerprint of its layout.
    pub fingerprint: Fingerprint,
    /// Number of chunks before it.
    pub position: u32,
    /// Valid tokens.
    pub valid_tokens: u32,
}

impl Chunk {
    /// The chunk of records without cells.
    pub const NONE: Chunk = Chunk {
        namespace: Key([0; 32]),
        parent: Key([0; 32]),
        key: Key([0; 32]),
        fingerprint: Fingerprint([0; 32]),
        position: 0,
        valid_tokens: 0,
    };
}

/// Fixed fields of every header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// [`Kind`] as a number; unknown kinds are skipped by their length.
    pub kind: u16,
    /// Blocks of the header.
    pub header_blocks: u32,
    /// Blocks of the whole record.
    pub blocks: u32,
    /// Number of the record; numbers only grow.
    pub number: u64,
    /// Number under which its content was first written; smaller than `number` if compaction moved
    /// it.
    pub born: u64,
    /// Its segment.
    pub segment: u64,
    /// Its first block in the segment.
    pub at: u32,
    /// Number of cells or layers, or bytes of a name.
    pub items: u32,
    /// Id of the store.
    pub store: StoreId,
    /// Chunk of the cells.
    pub chunk: Chunk,
    /// Used bytes of the body.
    pub body_bytes: u32,
    /// *Forget*: content born before this number is deleted.
    pub until: u64,
    /// The segment from which compaction copied it; 0 = first written here.
    pub from: u64,
}

/// A checked header.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Fixed fields.
    pub head: Head,
    body: &'a [u8],
}

/// A cell in a header.
#[derive(Clone, Copy, Debug)]
pub struct Cell<'a> {
    /// Its layer.
    pub layer: u32,
    /// Codec of its bytes.
    pub codec: u16,
    /// Its first block in the record.
    pub block: u32,
    /// Stored bytes.
    pub stored_bytes: u64,
    /// Decoded bytes.
    pub raw_bytes: u64,
    planes: &'a [u8],
}

/// Blocks that hold this many bytes.
pub fn blocks_of(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_BYTES as u64)
}

/// Blocks of a header, if it is within the limits.
pub fn header_blocks(cells: usize, planes: usize) -> Option<u32> {
    let body = cells.checked_mul(CELL_BYTES)?.checked_add(planes.checked_mul(PLANE_BYTES)?)?;
    header_blocks_of(body).filter(|_| cells <= MAX_CELLS)
}

/// Blocks of a header with a body of `bytes`, if it is within the limits.
pub fn header_blocks_of(bytes: usize) -> Option<u32> {
    let all = bytes.checked_add(HEAD_BYTES + SUM_BYTES)?.div_ceil(BLOCK_BYTES);
    u32::try_from(all).ok().filter(|&n| n <= MAX_HEADER_BLOCKS)
}

/// Blocks of the header that may start here, by its first block alone; checks only that it can be a
/// header.
pub fn peek(block: &[u8]) -> Option<u32> {
    let blocks = u32_at(block, 8);
    let fits = &array_at::<4>(block, 0) == MAGIC
        && u16_at(block, 4) == VERSION
        && (1..=MAX_HEADER_BLOCKS).contains(&blocks);
    fits.then_some(blocks)
}

/// Decodes a header, if `bytes` begin with an intact one.
pub fn decode(bytes: &[u8]) -> Option<Record<'_>> {
    let header_blocks = peek(bytes)?;
    let bytes = bytes.get(..header_blocks as usize * BLOCK_BYTES)?;
    if !is_signed(bytes) {
        return None;
    }
    let head = Head {
        kind: u16_at(bytes, 6),
        header_blocks,
        blocks: u32_at(bytes, 12),
        number: u64_at(bytes, 16),
        born: u64_at(bytes, 24),
        segment: u64_at(bytes, 32),
        at: u32_at(bytes, 40),
        items: u32_at(bytes, 44),
        store: array_at(bytes, 48),
        chunk: Chunk {
            namespace: Key(array_at(bytes, 64)),
            parent: Key(array_at(bytes, 96)),
            key: Key(array_at(bytes, 128)),
            fingerprint: Fingerprint(array_at(bytes, 160)),
            position: u32_at(bytes, 192),
            valid_tokens: u32_at(bytes, 196),
        },
        body_bytes: u32_at(bytes, 200),
        until: u64_at(bytes, 208),
        from: u64_at(bytes, 216),
    };
    let body_end = HEAD_BYTES.checked_add(head.body_bytes as usize)?;
    if body_end > bytes.len() - SUM_BYTES || head.blocks < header_blocks {
        return None;
    }
    let record = Record { head, body: &bytes[HEAD_BYTES..body_end] };
    record.is_sound().then_some(record)
}

impl<'a> Record<'a> {
    fn is_sound(&self) -> bool {
        let Head { kind, blocks, header_blocks, items, .. } = self.head;
        if kind == Kind::Cells as u16 {
            return blocks <= MAX_RECORD_BLOCKS && self.has_sound_cells();
        }
        if kind == Kind::Forget as u16 {
            return items as usize <= MAX_CELLS
                && self.body.len() == items as usize * 4
                && blocks == header_blocks;
        }
        if kind == Kind::Session as u16 {
            let name = items as usize;
            return (1..=MAX_NAME_BYTES).contains(&name)
                && self.body.len() >= name
                && self.body.len() - name <= MAX_PAYLOAD_BYTES
                && blocks == header_blocks;
        }
        true
    }

    fn has_sound_cells(&self) -> bool {
        let mut rest = self.body;
        let mut block = self.head.header_blocks;
        for _ in 0..self.head.items {
            let Some((cell, after)) = Cell::take(rest) else { return false };
            let stored: Option<u64> =
                cell.planes().try_fold(0u64, |sum, plane| sum.checked_add(plane.bytes));
            let end = u64::from(block) + blocks_of(cell.stored_bytes);
            let fits = stored == Some(cell.stored_bytes)
                && cell.stored_bytes > 0
                && cell.block == block
                && end <= u64::from(self.head.blocks);
            if !fits {
                return false;
            }
            block = end as u32;
            rest = after;
        }
        let items = self.head.items as usize;
        (1..=MAX_CELLS).contains(&items) && rest.is_empty() && block == self.head.blocks
    }

    /// The cells of a record of cells.
    pub fn cells(&self) -> impl Iterator<Item = Cell<'a>> + use<'a> {
        let is_cells = self.head.kind == Kind::Cells as u16;
        let mut rest = if is_cells { self.body } else { &[] };
        std::iter::from_fn(move || {
            let (cell, after) = Cell::take(rest)?;
            rest = after;
            Some(cell)
        })
    }

    /// The layers of a *forget*; none = all layers.
    pub fn layers(&self) -> impl Iterator<Item = u32> + use<'a> {
        let is_forget = self.head.kind == Kind::Forget as u16;
        let body = if is_forget { self.body } else { &[] };
        body.chunks_exact(4).map(|layer| u32_at(layer, 0))
    }

    /// Name and payload of a session record.
    pub fn session(&self) -> Option<(&'a [u8], &'a [u8])> {
        if self.head.kind != Kind::Session as u16 {
            return None;
        }
        self.body.split_at_checked(self.head.items as usize)
    }
}

impl<'a> Cell<'a> {
    fn take(bytes: &'a [u8]) -> Option<(Cell<'a>, &'a [u8])> {
        let (entry, rest) = bytes.split_at_checked(CELL_BYTES)?;
        let planes = u16_at(entry, 6) as usize;
        if planes == 0 || planes > MAX_PLANES {
            return None;
        }
        let (planes, rest) = rest.split_at_checked(planes * PLANE_BYTES)?;
        let cell = Cell {
            layer: u32_at(entry, 0),
            codec: u16_at(entry, 4),
            block: u32_at(entry, 8),
            stored_bytes: u64_at(entry, 16),
            raw_bytes: u64_at(entry, 24),
            planes,
        };
        Some((cell, rest))
    }

    /// Its planes, in the order of their bytes.
    pub fn planes(&self) -> impl ExactSizeIterator<Item = Plane> + use<'a> {
        self.planes.chunks_exact(PLANE_BYTES).map(|at| Plane {
            kind: u16_at(at, 0),
            id: u16_at(at, 2),
            version: u32_at(at, 4),
            bytes: u64_at(at, 8),
            sum: u64_at(at, 16),
        })
    }
}

/// Writes a header into zeroed memory of exactly its blocks: the body piece by piece, then the
/// fixed fields. Parts that do not fit are not written, and the header is then invalid; callers
/// size it by [`header_blocks`].
pub struct Encoder<'a> {
    bytes: &'a mut [u8],
    used: usize,
}

impl<'a> Encoder<'a> {
    /// A header in `bytes`, which are zeroed.
    pub fn new(bytes: &'a mut [u8]) -> Encoder<'a> {
        bytes.fill(0);
        Encoder { bytes, used: HEAD_BYTES }
    }

    /// Adds a cell; `planes` planes must follow.
    pub fn cell(&mut self, layer: u32, codec: u16, planes: u16, block: u32, lengths: [u64; 2]) {
        let at = self.used;
        put_u32(self.bytes, at, layer);
        put_u16(self.bytes, at + 4, codec);
        put_u16(self.bytes, at + 6, planes);
        put_u32(self.bytes, at + 8, block);
        put_u64(self.bytes, at + 16, lengths[0]);
        put_u64(self.bytes, at + 24, lengths[1]);
        self.used += CELL_BYTES;
    }

    /// Adds a plane of the last cell.
    pub fn plane(&mut self, plane: &Plane) {
        let at = self.used;
        put_u16(self.bytes, at, plane.kind);
        put_u16(self.bytes, at + 2, plane.id);
        put_u32(self.bytes, at + 4, plane.version);
        put_u64(self.bytes, at + 8, plane.bytes);
        put_u64(self.bytes, at + 16, plane.sum);
        self.used += PLANE_BYTES;
    }

    /// Adds bytes to the body.
    pub fn bytes(&mut self, body: &[u8]) {
        put(self.bytes, self.used, body);
        self.used += body.len();
    }

    /// Writes the fixed fields (lengths follow from the memory) and the checksum.
    pub fn finish(self, head: &Head) {
        let bytes = self.bytes;
        put(bytes, 0, MAGIC);
        put_u16(bytes, 4, VERSION);
        put_u16(bytes, 6, head.kind);
        put_u32(bytes, 8, (bytes.len() / BLOCK_BYTES) as u32);
        put_u32(bytes, 12, head.blocks);
        put_u64(bytes, 16, head.number);
        put_u64(bytes, 24, head.born);
        put_u64(bytes, 32, head.segment);
        put_u32(bytes, 40, head.at);
        put_u32(bytes, 44, head.items);
        put(bytes, 48, &head.store);
        put(bytes, 64, &head.chunk.namespace.0);
        put(bytes, 96, &head.chunk.parent.0);
        put(bytes, 128, &head.chunk.key.0);
        put(bytes, 160, &head.chunk.fingerprint.0);
        put_u32(bytes, 192, head.chunk.position);
        put_u32(bytes, 196, head.chunk.valid_tokens);
        put_u32(bytes, 200, (self.used - HEAD_BYTES) as u32);
        put_u64(bytes, 208, head.until);
        put_u64(bytes, 216, head.from);
        sign(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(kind: Kind, blocks: u32, items: u32) -> Head {
        Head {
            kind: kind as u16,
            header_blocks: 1,
            blocks,
            number: 11,
            born: 10,
            segment: 3,
            at: 5,
            items,
            store: [4; 16],
            chunk: Chunk {
                namespace: Key([1; 32]),
                parent: Key([2; 32]),
                key: Key([3; 32]),
                fingerprint: Fingerprint([15; 32]),
                position: 9,
                valid_tokens: 256,
            },
            body_bytes: 0,
            until: 0,
            from: 2,
        }
    }

    fn plane(bytes: u64) -> Plane {
        Plane { kind: 1, id: 2, version: 3, bytes, sum: bytes ^ 0xABCD }
    }

    fn two_cells() -> Vec<u8> {
        let mut bytes = vec![0xFF; BLOCK_BYTES];
        let mut encoder = Encoder::new(&mut bytes);
        encoder.cell(7, 0, 2, 1, [5000, 5000]);
        encoder.plane(&plane(4000));
        encoder.plane(&plane(1000));
        encoder.cell(8, 1, 1, 3, [10, 99]);
        encoder.plane(&plane(10));
        encoder.finish(&head(Kind::Cells, 4, 2));
        bytes
    }

    #[test]
    fn cells_round_trip() {
        let bytes = two_cells();
        let record = decode(&bytes).expect("sound");
        let expected = Head { body_bytes: 136, ..head(Kind::Cells, 4, 2) };
        assert_eq!(record.head, expected);
        let cells: Vec<_> = record.cells().collect();
        assert_eq!((cells[0].layer, cells[0].block, cells[0].stored_bytes), (7, 1, 5000));
        assert_eq!((cells[1].layer, cells[1].codec, cells[1].raw_bytes), (8, 1, 99));
        assert_eq!(cells[0].planes().collect::<Vec<_>>(), [plane(4000), plane(1000)]);
        assert_eq!(cells.len(), 2);
        assert_eq!(record.layers().count(), 0);
        assert!(record.session().is_none());
    }

    #[test]
    fn sessions_and_forgets_round_trip_and_unknown_kinds_have_a_length() {
        let mut bytes = vec![0; BLOCK_BYTES];
        let mut encoder = Encoder::new(&mut bytes);
        encoder.bytes(&5u32.to_le_bytes());
        encoder.finish(&Head { until: 99, ..head(Kind::Forget, 1, 1) });
        let record = decode(&bytes).expect("sound");
        assert_eq!((record.head.until, record.layers().collect::<Vec<_>>()), (99, vec![5]));

        let mut encoder = Encoder::new(&mut bytes);
        encoder.bytes(b"namecontent");
        encoder.finish(&head(Kind::Session, 1, 4));
        let record = decode(&bytes).expect("sound");
        assert_eq!(record.session(), Some((&b"name"[..], &b"content"[..])));

        let mut encoder = Encoder::new(&mut bytes);
        encoder.bytes(b"of a later version");
        encoder.finish(&Head { kind: 900, ..head(Kind::Void, 33, 7) });
        assert_eq!(decode(&bytes).expect("sound").head.blocks, 33);
    }

    #[test]
    fn every_flipped_bit_is_detected() {
        let mut bytes = two_cells();
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&bytes).is_none(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        for n in 0..bytes.len() {
            assert!(decode(&bytes[..n]).is_none());
        }
    }

    #[test]
    fn contradicting_lengths_are_rejected() {
        for (at, value) in
            [(12, 3u32), (12, 5), (12, 0), (44, 1), (44, 3), (44, 0), (200, 135), (200, 4000)]
        {
            let mut bytes = two_cells();
            put_u32(&mut bytes, at, value);
            sign(&mut bytes);
            assert!(decode(&bytes).is_none(), "{value} at {at}");
        }
        assert_eq!(header_blocks(MAX_CELLS + 1, 1), None);
        assert_eq!(header_blocks(MAX_CELLS, usize::MAX), None);
        assert_eq!(header_blocks(1, 2), Some(1));
    }

    proptest! {
        /// Signed random changes: no panic, and every listed cell lies inside the record.
        #[test]
        fn signed_random_changes_do_not_panic(
            edits in proptest::collection::vec((0usize..390, any::<u8>()), 0..12)
        ) {
            let mut bytes = two_cells();
            edits.iter().for_each(|&(at, value)| bytes[at] = value);
            put_u32(&mut bytes, 8, 1);
            sign(&mut bytes);
            if let Some(record) = decode(&bytes) {
                for cell in record.cells() {
                    let end = u64::from(cell.block) + blocks_of(cell.stored_bytes);
                    prop_assert!(end <= u64::from(record.head.blocks));
                    prop_assert_eq!(cell.planes().map(|p| p.bytes).sum::<u64>(), cell.stored_bytes);
                }
                record.layers().for_each(drop);
                record.session();
            }
        }
    }
}
