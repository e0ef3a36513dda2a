//! Columns and diagonals as tiled kernels compute them: whole blocks of keys for each block of 64
//! queries, and single columns beside them.
//!
//! For the block of queries that ends before position `e`, a diagonal at distance d becomes the 64
//! keys that end before `e - d` (or the first 64). Blocks that touch or overlap are merged in steps
//! of 64. Every query of the block sees at least its diagonals and columns. MInference's index
//! conversion does the same; rows end with the prompt in both.

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

/// Puts the ranges of keys that diagonals become into `out`, for the block of queries that ends
/// before position `end`. Ranges ascend and do not touch; columns stay as they are.
pub fn inflate(diagonals: &[u32], end: u32, out: &mut Vec<Range<u32>>) -> Result<()> {
    out.clear();
    reserve(out, diagonals.len())?;
    let ends = diagonals.iter().rev().filter(|&&d| d < end);
    for block_end in ends.map(|d| (end - d).max(BLOCK)) {
        match out.last_mut() {
            Some(range) if block_end <= range.end => {}
            Some(range) if block_end <= range.end + BLOCK => range.end += BLOCK,
            _ => out.push(block_end - BLOCK..block_end),
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
        // Earlier contents are dropped.
        inflate(&[0], 300, &mut out).expect("memory");
        inflate(diagonals, end, &mut out).expect("memory");
        out.into_iter().map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn diagonals_become_blocks_that_merge() {
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
