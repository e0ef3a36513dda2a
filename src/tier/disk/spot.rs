//! The place of a cell in one word.

/// Most blocks of a segment.
pub const MAX_SEGMENT_BLOCKS: u32 = 1 << 18;
/// Largest number of a segment.
pub const MAX_SEGMENT: u64 = (1 << 28) - 1;

/// A cell's place: segment (28 bits), block of the segment (20 bits), and number of blocks from the
/// start of its record (16 bits). Segments count from 1, so 0 is no place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spot(pub u64);

impl Spot {
    /// No place.
    pub const NONE: Spot = Spot(0);

    /// Packs a place; callers respect the limits.
    pub(super) fn new(segment: u64, block: u32, back: u32) -> Spot {
        debug_assert!(segment <= MAX_SEGMENT && block < 1 << 20 && back < 1 << 16);
        Spot(segment << 36 | u64::from(block) << 16 | u64::from(back))
    }

    /// The segment.
    pub fn segment(self) -> u64 {
        self.0 >> 36
    }

    /// Block of the segment at which the cell starts.
    pub fn block(self) -> u32 {
        (self.0 >> 16) as u32 & ((1 << 20) - 1)
    }

    /// Block of the segment at which its record starts; None = the place is invalid.
    pub fn record(self) -> Option<u32> {
        self.block().checked_sub(self.0 as u32 & 0xFFFF).filter(|&at| at > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spots_round_trip() {
        for (segment, block, back) in [(1, 2, 1), (MAX_SEGMENT, (1 << 20) - 1, 65535), (7, 9, 3)] {
            let spot = Spot::new(segment, block, back);
            assert_eq!((spot.segment(), spot.block()), (segment, block));
            assert_eq!(spot.record(), Some(block - back));
        }
        assert_eq!(Spot::new(1, 3, 3).record(), None);
        assert_eq!(Spot::new(1, 3, 4).record(), None);
        assert_eq!(Spot::NONE.segment(), 0);
    }
}
