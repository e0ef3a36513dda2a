//! Changes of the limit while cells are in memory.

use crate::base::status::Result;
use crate::fail;
use crate::tier::host::HostTier;

/// Most bytes of a tier.
const MAX_BYTES: u64 = 1 << 48;

impl HostTier {
    /// The usual length of a slab.
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Changes the most bytes of all slabs, 1 to 2^48. Under a smaller limit the slabs with the
    /// fewest bytes in use drain: they allocate no more pieces and are returned once they are
    /// empty. Under a larger limit draining slabs are used again.
    pub fn set_max_bytes(&mut self, most: u64) -> Result<()> {
        if most == 0 || most > MAX_BYTES {
            fail!(Limit, "{most} bytes of memory: 1 to {MAX_BYTES} are possible");
        }
        self.max_bytes = most;
        if self.mapped_bytes > most {
            self.trim();
        }
        let mut slabs: Vec<_> = self.slabs().collect();
        let in_use = |s: &super::SlabInfo| u64::from(s.live_pieces) * s.piece_bytes;
        // The fullest slabs come first, because they are kept.
        slabs.sort_by_key(|slab| (std::cmp::Reverse(in_use(slab)), slab.number));
        let mut kept = 0;
        for slab in slabs {
            let drains = kept + slab.mapped_bytes > most;
            kept += if drains { 0 } else { slab.mapped_bytes };
            self.drain(slab.number, drains)?;
        }
        Ok(())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::base::memory::Requirement;
    use crate::tier::host::{HostOpts, Piece};

    const PIECE: u64 = 4096;

    fn fill(tier: &mut HostTier) -> Vec<Piece> {
        std::iter::from_fn(|| tier.alloc(PIECE).ok()).collect()
    }

    #[test]
    fn slabs_beyond_a_smaller_limit_are_returned_when_empty() {
        let opts = HostOpts { slab_bytes: 4 * PIECE, max_bytes: 16 * PIECE, huge: Requirement::No };
        let mut tier = HostTier::new(None, &opts).expect("small");
        let mut pieces = fill(&mut tier);
        assert_eq!(pieces.len(), 16);
        tier.set_max_bytes(24 * PIECE).expect("more");
        pieces.extend(fill(&mut tier));
        assert_eq!(pieces.len(), 24);
        // Slabs 1 and 4 have one piece in use, slab 0 has none.
        pieces.retain(|&piece| {
            let stays = match piece.slab() {
                0 => false,
                1 | 4 => piece.index() == 0,
                _ => true,
            };
            stays || tier.free(piece).is_err()
        });
        tier.set_max_bytes(12 * PIECE).expect("fewer");
        let drains: Vec<u32> = tier.slabs().filter(|s| s.drains).map(|s| s.number).collect();
        assert_eq!((drains, tier.stats().slabs), (vec![1, 4], 5), "the empty slab was returned");
        assert_eq!(fill(&mut tier).len(), 0, "draining slabs allocate nothing");
        pieces.retain(|&piece| !matches!(piece.slab(), 1) || tier.free(piece).is_err());
        assert_eq!((tier.stats().slabs, fill(&mut tier).len()), (4, 0));
        // Under a larger limit the draining slab is used before a new one is mapped.
        tier.set_max_bytes(20 * PIECE).expect("more");
        assert_eq!(tier.slabs().filter(|s| s.drains).count(), 0);
        let more = fill(&mut tier);
        assert_eq!((more.len(), tier.stats().slabs), (3 + 4, 5));
        for piece in pieces.into_iter().chain(more) {
            tier.free(piece).expect("in use");
        }
        tier.trim();
        assert_eq!(tier.stats().slabs, 0);
        tier.set_max_bytes(4 * PIECE).expect("fewer than there were");
        assert_eq!(fill(&mut tier).len(), 4);
        assert!(tier.set_max_bytes(0).is_err());
    }
}
