//! Columns and diagonals as kernels with tiles compute them: for each block of 64 queries
//! whole blocks of keys, and single columns beside them.
//!
//! In the block of queries that ends before position `e`, a diagonal at distance d becomes
//! the 64 keys that end before `e - d` (or the first 64). Blocks that touch or overlap grow
//! together in steps of 64. So every query of the block sees at least what its diagonals and
//! columns say. This is what MInference's index conversion does; where its rows end with the
//! prompt, ours end there too.

use std::ops::Range;

use crate::base::status::Result;
use crate::sparse::numbers::reserve;

/// Queries and keys of a block.
pub const BLOCK: u32 = 64;

/// Columns and diagonals of one head, each ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// Keys that every query sees.
    pub columns: Vec<u32>,
    /// Distances at which each query sees a key.
    pub diagonals: Vec<u32>,
}

/// Puts the ranges of keys into `out` that diagonals become in the block of queries which ends
/// before position `end`. They ascend and do not touch; columns stay what they are.
pub fn inflate(diagonals: &[u32], end: u32, out: &mut Vec<Range<u32>>) -> Result<()> {
    out.clear();
    reserve(out, diagonals.len())?;
    let ends = diagonals.iter().rev().filter(|&&d| d < end);
    for there in ends.map(|d| (end - d).max(BLOCK)) {
        match out.last_mut() {
            Some(range) if there <= range.end => {}
            Some(range) if there <= range.end + BLOCK => range.end += BLOCK,
            _ => out.push(there - BLOCK..there),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn found(diagonals: &[u32], end: u32) -> Vec<(u32, u32)> {
        let mut out = Vec::new();
        // What was there before is forgotten.
        inflate(&[0], 300, &mut out).expect("memory");
        inflate(diagonals, end, &mut out).expect("memory");
        out.into_iter().map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn blocks_end_at_the_diagonal_and_grow_together() {
        assert_eq!(found(&[0, 10, 200], 320), [(56, 120), (246, 374)]);
        assert_eq!(found(&[70, 1000], 128), [(0, 64)], "the first 64, not less");
        assert_eq!(found(&[0, 64, 127], 300), [(109, 301)], "they touch");
    }

    proptest! {
        #[test]
        fn every_query_of_the_block_sees_its_diagonals(
            diagonals in proptest::collection::btree_set(0u32..400, 0..20),
            end in 1u32..400,
        ) {
            let diagonals: Vec<u32> = diagonals.into_iter().collect();
            let got = found(&diagonals, end);
            prop_assert!(got.windows(2).all(|two| two[0].1 < two[1].0), "{got:?}");
            for query in end.saturating_sub(BLOCK)..end {
                for key in diagonals.iter().filter_map(|d| query.checked_sub(*d)) {
                    prop_assert!(got.iter().any(|range| (range.0..range.1).contains(&key)), "{query} {key}");
                }
            }
        }
    }
}
