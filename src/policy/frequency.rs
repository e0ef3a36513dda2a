//! Approximate recent use counts of ids in constant space: a count-min sketch of 4-bit counters
//! that are halved periodically. An id needs one cache line.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed, prefetch};
use crate::meta::index::hash;

/// Largest count.
pub const MAX_FREQUENCY: u8 = 15;

/// Objects for one block of counters.
const OBJECTS_PER_BLOCK: usize = 8;
const MIN_BLOCKS: usize = 64;
const WORDS: usize = 7;
const ROWS: usize = 4;
/// Counters in a row; a word holds 16.
const ROW: u64 = (WORDS * 16 / ROWS) as u64;

/// Four rows of counters, and the halvings applied to them.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Block {
    words: [u64; WORDS],
    halvings: u64,
}

// SAFETY: integers only.
unsafe impl Zeroable for Block {}

/// The sketch.
pub struct Frequency {
    blocks: Zeroed<Block>,
    halvings: u64,
    /// Additions since the last halving, plus half of those before.
    seen: u64,
}

/// Halves sixteen counters `times` times.
#[inline]
fn halved(word: u64, times: u64) -> u64 {
    if times > 3 {
        return 0;
    }
    let mask = 0x1111_1111_1111_1111 * (15 >> times);
    (word >> times) & mask
}

#[inline]
fn counter(words: &[u64; WORDS], place: u64) -> u8 {
    ((words[(place / 16) as usize] >> (place % 16 * 4)) & 15) as u8
}

impl Frequency {
    /// A sketch for tables of `max_objects`: 8 bytes for each.
    pub fn new(max_objects: usize) -> Result<Frequency> {
        let blocks = (max_objects / OBJECTS_PER_BLOCK).max(MIN_BLOCKS);
        Ok(Frequency { blocks: Zeroed::dense(blocks)?, halvings: 0, seen: 0 })
    }

    /// Bytes of the table: ids are spread over all of it.
    pub fn used_bytes(&self) -> u64 {
        self.blocks.front_bytes(usize::MAX)
    }

    /// The block of an id, and its counter in each row.
    #[inline]
    fn places(&self, id: u64) -> (usize, [u64; ROWS]) {
        let hash = hash(id);
        let block = ((hash >> 32) * self.blocks.len() as u64) >> 32;
        let place = |row: usize| row as u64 * ROW + ((((hash >> (8 * row)) & 0xFF) * ROW) >> 8);
        (block as usize, std::array::from_fn(place))
    }

    /// Prefetches the counters of an id.
    #[inline]
    pub fn prefetch(&self, id: u64) {
        prefetch(&self.blocks, self.places(id).0);
    }

    /// Lower bound of an id's recent count.
    #[inline]
    pub fn of(&self, id: u64) -> u8 {
        let (block, places) = self.places(id);
        let Block { words, halvings } = &self.blocks[block];
        let least = places.iter().map(|&place| counter(words, place)).min().unwrap_or(0);
        let times = self.halvings - halvings;
        if times > 3 { 0 } else { least >> times }
    }

    /// Counts an id. After every `period` calls all counters are halved; a block is updated at its
    /// next use.
    pub fn add(&mut self, id: u64, period: u64) {
        let (block, places) = self.places(id);
        let Block { words, halvings } = &mut self.blocks[block];
        let times = self.halvings - *halvings;
        if times > 0 {
            words.iter_mut().for_each(|word| *word = halved(*word, times));
            *halvings = self.halvings;
        }
        let least = places.iter().map(|&place| counter(words, place)).min().unwrap_or(0);
        if least < MAX_FREQUENCY {
            // Only the lowest counters are accurate, so only those grow.
            for place in places {
                let grows = u64::from(counter(words, place) == least);
                words[(place / 16) as usize] += grows << (place % 16 * 4);
            }
        }
        self.seen += 1;
        if self.seen >= period {
            self.halvings += 1;
            self.seen /= 2;
        }
    }

    /// Halvings so far.
    pub fn halvings(&self) -> u64 {
        self.halvings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_saturate_and_are_halved() {
        let mut sketch = Frequency::new(100).expect("small");
        (0..5).for_each(|_| sketch.add(7, 1000));
        assert_eq!((sketch.of(7), sketch.of(8)), (5, 0));
        (0..40).for_each(|_| sketch.add(8, 1000));
        assert_eq!(sketch.of(8), MAX_FREQUENCY);
        sketch.add(7, 46);
        assert_eq!((sketch.of(7), sketch.of(8), sketch.halvings()), (3, 7, 1));
        sketch.add(7, 24);
        assert_eq!((sketch.of(7), sketch.of(8), sketch.halvings()), (2, 3, 2));
        (0..6).for_each(|_| sketch.add(9, 1));
        assert_eq!((sketch.of(7), sketch.of(9)), (0, 0));
    }

    #[test]
    fn counters_of_a_word_do_not_leak_into_each_other() {
        assert_eq!(halved(0xF000_0000_0000_0F31, 1), 0x7000_0000_0000_0710);
        assert_eq!(halved(u64::MAX, 3), 0x1111_1111_1111_1111);
        assert_eq!((halved(u64::MAX, 0), halved(u64::MAX, 4)), (u64::MAX, 0));
    }

    #[test]
    fn seldom_overestimates_and_never_underestimates() {
        let mut sketch = Frequency::new(4096).expect("small");
        for id in 0..4096u64 {
            (0..=id % 8).for_each(|_| sketch.add(id, u64::MAX));
        }
        let over = (0..4096u64).filter(|&id| {
            let (got, expected) = (u64::from(sketch.of(id)), id % 8 + 1);
            assert!(got >= expected, "{id}: {got} of {expected}");
            got > expected
        });
        assert!(over.count() < 120);
    }
}
