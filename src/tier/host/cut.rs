//! Division of slabs into pieces of one size.

use crate::tier::host::slab::{MAX_PIECES, Slab};
use crate::tier::host::{Class, HostTier, PIECE_ALIGN_BYTES, UNUSED};

/// A slab of the usual length may lose at most 1 / 16 after its last piece. Sizes that would lose
/// more have slabs of another length.
const TAIL_PART: u64 = 16;

impl HostTier {
    /// Bytes of a slab with pieces of a size.
    pub fn slab_for(&self, bytes: u64) -> u64 {
        self.cut_of(bytes.max(1).next_multiple_of(PIECE_ALIGN_BYTES)).slab_bytes
    }

    /// Bytes of the limit for one piece of a size, including its share of the slab's unused bytes.
    pub fn share_of(&self, bytes: u64) -> f64 {
        let cut = self.cut_of(bytes.max(1).next_multiple_of(PIECE_ALIGN_BYTES));
        let (mapped_bytes, _) = Slab::mapped_for(cut.slab_bytes, self.huge);
        mapped_bytes as f64 / f64::from(cut.pieces.max(1))
    }

    /// An unused class with the slab length and piece count for a size.
    pub(super) fn cut_of(&self, piece_bytes: u64) -> Class {
        let fit = self.slab_bytes / piece_bytes;
        let pieces = fit.clamp(1, u64::from(MAX_PIECES)) as u32;
        let used_bytes = u64::from(pieces) * piece_bytes;
        let is_usual = fit > 0 && self.slab_bytes - used_bytes <= self.slab_bytes / TAIL_PART;
        let slab_bytes = if is_usual { self.slab_bytes } else { used_bytes };
        Class { piece_bytes, slab_bytes, pieces, ..UNUSED }
    }
}
