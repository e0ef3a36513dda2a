//! Chunks: how much of a unit one read or copy moves.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::units::{GRAIN_BYTES, Unit, Units};

/// Least size of a chunk, and what chunks are multiples of: a block of the checksums.
pub const CHUNK_GRAIN_BYTES: u64 = 1 << 20;
/// Largest size of a chunk.
pub const MAX_CHUNK_BYTES: u64 = 1 << 28;
/// Most chunks of a model.
const MAX_CHUNKS: usize = 1 << 26;

/// A piece of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which extent of the unit.
    pub extent: u32,
    /// Which file of the model.
    pub file: u32,
    /// Where in the file.
    pub offset: u64,
    /// How long.
    pub bytes: u64,
    /// Where in the image of the unit.
    pub at: u64,
}

impl Chunk {
    /// How many bytes come before it in its first grain.
    pub fn lead_bytes(&self) -> u64 {
        self.offset % GRAIN_BYTES
    }

    /// The whole grains that it lies in: what is read.
    pub fn read_bytes(&self) -> u64 {
        (self.lead_bytes() + self.bytes).next_multiple_of(GRAIN_BYTES)
    }
}

/// Cuts a unit: each extent at multiples of a chunk, counted from its first grain, so that
/// no two chunks share a grain.
fn cut(unit: &Unit, chunk_bytes: u64) -> impl Iterator<Item = Chunk> + '_ {
    unit.extents.iter().enumerate().flat_map(move |(number, extent)| {
        let start = extent.offset / GRAIN_BYTES * GRAIN_BYTES;
        let end = extent.offset + extent.bytes;
        (0..(end - start).div_ceil(chunk_bytes)).map(move |i| {
            let offset = (start + i * chunk_bytes).max(extent.offset);
            let bytes = (start + (i + 1) * chunk_bytes).min(end) - offset;
            let at = extent.at + (offset - extent.offset);
            Chunk { extent: number as u32, file: extent.file, offset, bytes, at }
        })
    })
}

/// The chunks of all units.
pub struct Chunks {
    chunk_bytes: u64,
    pieces: Vec<Chunk>,
    /// Where those of a unit begin; one more at the end.
    first: Vec<u32>,
}

impl Chunks {
    /// Cuts all units.
    pub fn of(units: &Units, chunk_bytes: u64) -> Result<Chunks> {
        let fits = (CHUNK_GRAIN_BYTES..=MAX_CHUNK_BYTES).contains(&chunk_bytes);
        if !fits || chunk_bytes % CHUNK_GRAIN_BYTES != 0 {
            fail!(
                Invalid,
                "chunks of {chunk_bytes} bytes: they have {CHUNK_GRAIN_BYTES} to \
                 {MAX_CHUNK_BYTES}, in multiples of {CHUNK_GRAIN_BYTES}"
            );
        }
        let (mut pieces, mut first) = (Vec::new(), Vec::new());
        first.try_reserve_exact(units.units.len() + 1).map_err(|_| Status::NoMem)?;
        for unit in &units.units {
            first.push(pieces.len() as u32);
            for piece in cut(unit, chunk_bytes) {
                if pieces.len() == MAX_CHUNKS {
                    fail!(Limit, "more than {MAX_CHUNKS} chunks: take larger ones");
                }
                pieces.try_reserve(1).map_err(|_| Status::NoMem)?;
                pieces.push(piece);
            }
        }
        first.push(pieces.len() as u32);
        Ok(Chunks { chunk_bytes, pieces, first })
    }

    /// The size of most of them.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Those of a unit.
    pub fn of_unit(&self, unit: u32) -> &[Chunk] {
        let (from, to) = (self.first[unit as usize], self.first[unit as usize + 1]);
        &self.pieces[from as usize..to as usize]
    }
}
