//! The reserve: one piece beyond the tier's limit, for a read that finds no other memory.

use crate::base::memory::Requirement;
use crate::base::status::Result;
use crate::fail;
use crate::tier::host::slab::Slab;
use crate::tier::host::{HostTier, PIECE_ALIGN_BYTES, Piece};

impl HostTier {
    /// Makes the reserve at least `bytes` long and charges the account for it. Fails with `Busy` if
    /// the reserve is too small but in use.
    pub fn keep_reserve(&mut self, bytes: u64) -> Result<()> {
        let piece_bytes = bytes.max(1).next_multiple_of(PIECE_ALIGN_BYTES);
        if let Some((_, slab)) = self.reserve.and_then(|number| self.table.get(number)) {
            if slab.piece_bytes() >= piece_bytes {
                return Ok(());
            }
            if slab.live() > 0 {
                let has = slab.piece_bytes();
                fail!(Busy, "the reserve of {has} bytes is in use, {piece_bytes} are needed");
            }
        }
        if self.table.is_full() {
            fail!(Limit, "the limit of {} slabs is reached", self.table.len());
        }
        let source = (self.account.as_ref(), self.shared.as_ref());
        let mut slab = Slab::map(source, piece_bytes, piece_bytes, Requirement::No)?;
        slab.cut(piece_bytes, 1);
        if let Some(device) = &self.device {
            self.unregistered.push(slab.register(device));
        }
        let number = self.table.enter(slab);
        if let Some(old) = self.reserve.replace(number) {
            self.table.remove(old);
        }
        Ok(())
    }

    /// Allocates the reserve, if it is free and long enough.
    pub fn take_reserve(&mut self, bytes: u64, owner: u64) -> Option<Piece> {
        let number = self.reserve?;
        let slab = self.table.get_mut(number)?;
        let piece_bytes = slab.piece_bytes();
        if piece_bytes < bytes || slab.live() > 0 {
            return None;
        }
        let index = slab.take(owner)?;
        self.live_pieces += 1;
        self.live_bytes += piece_bytes;
        Some(Piece::new(number, index))
    }

    /// The owner of the reserve, if it is in use.
    pub fn reserve_owner(&self) -> Option<u64> {
        let (_, slab) = self.table.get(self.reserve?)?;
        (slab.live() > 0).then(|| slab.owner(0))
    }

    /// Whether a piece is the reserve.
    pub fn is_reserve(&self, piece: Piece) -> bool {
        self.reserve == Some(piece.slab())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::tier::host::HostOpts;

    const PIECE: u64 = 4096;

    #[test]
    fn the_reserve_is_beyond_the_limit_and_reusable() {
        let opts = HostOpts { slab_bytes: 4 * PIECE, max_bytes: 4 * PIECE, huge: Requirement::No };
        let mut tier = HostTier::new(None, &opts).expect("small");
        assert!(tier.take_reserve(1, 1).is_none(), "there is no reserve");
        tier.keep_reserve(2 * PIECE - 1).expect("memory");
        let all: Vec<Piece> = std::iter::from_fn(|| tier.alloc(PIECE).ok()).collect();
        assert_eq!((all.len(), tier.slabs().count()), (4, 1));
        assert!(tier.take_reserve(2 * PIECE + 1, 7).is_none(), "the reserve is shorter");
        let one = tier.take_reserve(PIECE, 7).expect("free");
        assert!(tier.is_reserve(one) && !tier.is_reserve(all[0]));
        assert_eq!((tier.reserve_owner(), tier.stats().live_pieces), (Some(7), 5));
        assert!(tier.take_reserve(PIECE, 8).is_none(), "the reserve is in use");
        assert!(tier.keep_reserve(3 * PIECE).is_err(), "the reserve is in use");
        tier.address(one).expect("mapped");
        tier.free(one).expect("in use");
        assert_eq!((tier.reserve_owner(), tier.stats().live_pieces), (None, 4));
        let before = tier.stats().cost_bytes;
        tier.keep_reserve(3 * PIECE).expect("memory");
        assert_eq!(tier.stats().cost_bytes, before + PIECE, "the old reserve was freed");
        tier.keep_reserve(PIECE).expect("it is long enough");
        assert_eq!(tier.stats().cost_bytes, before + PIECE);
        tier.set_max_bytes(PIECE).expect("less");
        assert!(tier.take_reserve(3 * PIECE, 1).is_some(), "the reserve has no limit");
    }
}
