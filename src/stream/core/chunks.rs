//! Chunks: how much of a unit one read or copy moves.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::units::{Chunk, Units};

/// Least size of a chunk, and what chunks are multiples of: a block of the checksums.
pub const CHUNK_GRAIN_BYTES: u64 = 1 << 20;
/// Largest size of a chunk.
pub const MAX_CHUNK_BYTES: u64 = 1 << 30;
/// Most chunks of a model.
const MAX_CHUNKS: usize = 1 << 26;

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
            for piece in unit.chunks(chunk_bytes) {
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
