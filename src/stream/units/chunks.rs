//! Chunks: the aligned pieces in which a unit is read and copied.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::units::{ALIGN_BYTES, Extent, Unit, Units, ceil, floor};

/// Largest piece: its offsets cannot overflow.
const MAX_PIECE_BYTES: u64 = 1 << 40;

/// A piece of an extent, moved by one read or copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the extent in the unit.
    pub extent: u32,
    /// Index of the file.
    pub file: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
    /// Offset in the image.
    pub at: u64,
    /// The aligned range that is read instead: offset in the file. The last aligned block may
    /// reach beyond the end of the file.
    pub read_offset: u64,
    /// Length of the aligned range.
    pub read_bytes: u64,
    /// Offset of the aligned range in the image; ranges do not overlap.
    pub read_at: u64,
}

/// Iterator over the chunks of a unit.
#[derive(Clone, Debug)]
pub struct ChunkIter<'a> {
    extents: &'a [Extent],
    chunk_bytes: u64,
    /// Index of the current extent.
    number: usize,
    /// Bytes of the extent that were returned, from its aligned start.
    done: u64,
}

impl Unit {
    /// The chunks of the unit, of so many bytes, rounded up to [`ALIGN_BYTES`].
    pub fn chunks(&self, chunk_bytes: u64) -> ChunkIter<'_> {
        let chunk_bytes = ceil(chunk_bytes.clamp(1, MAX_PIECE_BYTES));
        ChunkIter { extents: &self.extents, chunk_bytes, number: 0, done: 0 }
    }

    /// The number of these chunks.
    pub fn chunk_count(&self, chunk_bytes: u64) -> u64 {
        let chunk_bytes = ceil(chunk_bytes.clamp(1, MAX_PIECE_BYTES));
        let of = |e: &Extent| (ceil(e.offset + e.bytes) - floor(e.offset)).div_ceil(chunk_bytes);
        self.extents.iter().map(of).sum()
    }
}

impl Iterator for ChunkIter<'_> {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        let extent = self.extents.get(self.number)?;
        let (first, end) = (floor(extent.offset), extent.offset + extent.bytes);
        let read_offset = first + self.done;
        let read_end = ceil(end).min(read_offset + self.chunk_bytes);
        let (from, to) = (extent.offset.max(read_offset), end.min(read_end));
        let piece = Chunk {
            extent: self.number as u32,
            file: extent.file,
            offset: from,
            bytes: to - from,
            at: extent.at + (from - extent.offset),
            read_offset,
            read_bytes: read_end - read_offset,
            read_at: extent.at - extent.offset % ALIGN_BYTES + self.done,
        };
        match read_end < end {
            true => self.done += self.chunk_bytes,
            false => (self.number, self.done) = (self.number + 1, 0),
        }
        Some(piece)
    }
}

// The chunks of all units of a model.

/// Smallest chunk, and alignment of chunk sizes: a block of the checksums.
pub const CHUNK_ALIGN_BYTES: u64 = 1 << 20;
/// Largest chunk.
pub const MAX_CHUNK_BYTES: u64 = 1 << 30;
/// Most chunks of a model.
const MAX_CHUNKS: usize = 1 << 26;

/// The chunks of all units.
pub struct ChunkTable {
    chunk_bytes: u64,
    pieces: Vec<Chunk>,
    /// Index of each unit's first chunk; one more at the end.
    first: Vec<u32>,
}

impl ChunkTable {
    /// Divides all units into chunks.
    pub fn of(units: &Units, chunk_bytes: u64) -> Result<ChunkTable> {
        let fits = (CHUNK_ALIGN_BYTES..=MAX_CHUNK_BYTES).contains(&chunk_bytes);
        if !fits || chunk_bytes % CHUNK_ALIGN_BYTES != 0 {
            fail!(
                Invalid,
                "chunk_bytes is {chunk_bytes}: accepted are multiples of {CHUNK_ALIGN_BYTES} up \
                 to {MAX_CHUNK_BYTES}"
            );
        }
        let (mut pieces, mut first) = (Vec::new(), Vec::new());
        first.try_reserve_exact(units.units.len() + 1).map_err(|_| Status::NoMem)?;
        for unit in &units.units {
            first.push(pieces.len() as u32);
            for piece in unit.chunks(chunk_bytes) {
                if pieces.len() == MAX_CHUNKS {
                    fail!(Limit, "more than {MAX_CHUNKS} chunks: set larger chunks");
                }
                pieces.try_reserve(1).map_err(|_| Status::NoMem)?;
                pieces.push(piece);
            }
        }
        first.push(pieces.len() as u32);
        Ok(ChunkTable { chunk_bytes, pieces, first })
    }

    /// Size of a chunk; the last one of an extent may be shorter.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// The chunks of a unit.
    pub fn of_unit(&self, unit: u32) -> &[Chunk] {
        let (from, to) = (self.first[unit as usize], self.first[unit as usize + 1]);
        &self.pieces[from as usize..to as usize]
    }
}
