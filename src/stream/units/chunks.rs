//! How a unit is read: in pieces of a size, which begin and end on the grain.

use crate::stream::units::image::{ceil, floor};
use crate::stream::units::{Extent, GRAIN_BYTES, Unit};

/// Largest pieces: their offsets cannot overflow.
const MAX_CHUNK_BYTES: u64 = 1 << 40;

/// A piece of an extent, read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which extent of the unit.
    pub extent: u32,
    /// Which file.
    pub file: u32,
    /// Where in the file.
    pub offset: u64,
    /// How long.
    pub bytes: u64,
    /// Where in the image.
    pub at: u64,
    /// What is read instead, in whole grains: from where in the file. The last grain may
    /// reach beyond the end of the file.
    pub read_offset: u64,
    /// How much is read.
    pub read_bytes: u64,
    /// Where in the image that goes; no other piece reads to there.
    pub read_at: u64,
}

/// The pieces of a unit.
#[derive(Clone, Debug)]
pub struct Chunks<'a> {
    extents: &'a [Extent],
    chunk_bytes: u64,
    /// Which extent is next.
    number: usize,
    /// How much of it has been given, from the grain on which it begins.
    done: u64,
}

impl Unit {
    /// How it is read: pieces of so many bytes, rounded up to whole grains.
    pub fn chunks(&self, chunk_bytes: u64) -> Chunks<'_> {
        let chunk_bytes = ceil(chunk_bytes.clamp(1, MAX_CHUNK_BYTES));
        Chunks { extents: &self.extents, chunk_bytes, number: 0, done: 0 }
    }

    /// How many pieces that makes.
    pub fn chunk_count(&self, chunk_bytes: u64) -> u64 {
        let chunk_bytes = ceil(chunk_bytes.clamp(1, MAX_CHUNK_BYTES));
        let of = |e: &Extent| (ceil(e.offset + e.bytes) - floor(e.offset)).div_ceil(chunk_bytes);
        self.extents.iter().map(of).sum()
    }
}

impl Iterator for Chunks<'_> {
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
            read_at: extent.at - extent.offset % GRAIN_BYTES + self.done,
        };
        match read_end < end {
            true => self.done += self.chunk_bytes,
            false => (self.number, self.done) = (self.number + 1, 0),
        }
        Some(piece)
    }
}
