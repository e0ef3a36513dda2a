//! The keys that queries are computed with: policies produce an index, kernels follow it.

use crate::attention::keys::Keys;
pub use crate::attention::keys::{Head, Kind, NO_QUERY};
use crate::base::status::Result;
use crate::sparse::lists::Lists;
use crate::sparse::numbers::reserve;

/// The call's place in a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// True while the prompt is computed, false in decode.
    pub is_prefill: bool,
    /// Index of this part, where the prompt is computed in parts.
    pub part: u32,
    /// Number of parts.
    pub parts: u32,
    /// Position of the first query.
    pub first_query: u32,
    /// Tokens of the sequence, those of the queries included.
    pub tokens: u32,
}

/// The keys that queries are computed with. Kernels add the causal rule: a query sees no key behind
/// it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// How the lists of each query head are read. One entry serves all heads; none means all keys.
    pub heads: Vec<Head>,
    /// Lists of all heads.
    pub lists: Lists,
}

impl Index {
    /// Selects all keys.
    pub fn set_dense(&mut self) {
        self.heads.clear();
        self.lists.clear();
    }

    /// Copies an index that others made. Kernels check its contents.
    pub fn copy(&mut self, keys: &Keys<'_>) -> Result<()> {
        let Index { heads, lists } = self;
        reserve(heads, keys.heads.len())?;
        reserve(&mut lists.starts, keys.starts.len())?;
        reserve(&mut lists.items, keys.items.len())?;
        heads.clear();
        heads.extend_from_slice(keys.heads);
        lists.clear();
        lists.starts.extend_from_slice(keys.starts);
        lists.items.extend_from_slice(keys.items);
        Ok(())
    }

    /// Whether all keys are selected.
    pub fn is_dense(&self) -> bool {
        self.heads.is_empty()
    }

    /// The view that kernels take.
    pub fn keys(&self) -> Keys<'_> {
        Keys { heads: &self.heads, starts: &self.lists.starts, items: &self.lists.items }
    }

    /// How the lists of a head are read.
    pub fn head(&self, head: u32) -> Head {
        let at = if self.heads.len() == 1 { 0 } else { head as usize };
        self.heads.get(at).copied().unwrap_or(Head::DENSE)
    }

    /// A list of a head; empty beyond its last.
    pub fn list(&self, head: u32, at: u32) -> &[u32] {
        let head = self.head(head);
        if at < head.lists { self.lists.get((head.first + at) as usize) } else { &[] }
    }

    /// Whether a query head sees a key. Slow: for tests and audits.
    pub fn sees(&self, head: u32, first_query: u32, query: u32, key: u32) -> bool {
        let of = self.head(head);
        if key > query || query >= of.dense_from {
            return key <= query;
        }
        let row = (query - first_query).checked_div(of.query_block).unwrap_or(0);
        let has = |at: u32, item: u32| self.list(head, at).binary_search(&item).is_ok();
        match of.kind {
            Kind::Dense => true,
            Kind::Lines => has(0, key) || has(1, query - key),
            Kind::Blocks => has(row, key / of.key_block.max(1)),
            // Inside a range the next number is its end, which has an odd index.
            Kind::Ranges => {
                let ends = self.list(head, row + 1).partition_point(|&end| end <= key);
                has(0, key) || ends % 2 == 1
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(head: Head, lists: &[&[u32]]) -> Index {
        let mut index = Index::default();
        lists.iter().for_each(|list| index.lists.push(list.iter().copied()));
        index.heads.push(Head { lists: lists.len() as u32, ..head });
        index
    }

    fn seen(index: &Index, first: u32, query: u32) -> Vec<u32> {
        (0..20).filter(|&key| index.sees(3, first, query, key)).collect()
    }

    #[test]
    fn sees_follows_the_lists_of_each_kind() {
        assert_eq!(seen(&Index::default(), 0, 3), [0, 1, 2, 3]);
        let lines = Head { kind: Kind::Lines, dense_from: 9, ..Head::DENSE };
        let lines = index(lines, &[&[0, 5], &[0, 1]]);
        assert_eq!(seen(&lines, 0, 8), [0, 5, 7, 8]);
        assert_eq!(seen(&lines, 0, 9).len(), 10);
        let blocks = Head { kind: Kind::Blocks, query_block: 4, key_block: 4, ..Head::DENSE };
        let blocks = index(blocks, &[&[0], &[0, 2]]);
        assert_eq!(seen(&blocks, 4, 5), [0, 1, 2, 3]);
        assert_eq!(seen(&blocks, 4, 9), [0, 1, 2, 3, 8, 9]);
        let tokens = Head { kind: Kind::Blocks, key_block: 1, ..Head::DENSE };
        assert_eq!(seen(&index(tokens, &[&[1, 3]]), 0, 9), [1, 3]);
        let ranges = Head { kind: Kind::Ranges, query_block: 8, ..Head::DENSE };
        let ranges = index(ranges, &[&[0, 4, 9], &[], &[3, 6, 8, 9]]);
        assert_eq!(seen(&ranges, 0, 7), [0, 4]);
        assert_eq!(seen(&ranges, 0, 15), [0, 3, 4, 5, 8, 9]);
    }

    #[test]
    fn a_head_has_its_own_lists_or_the_shared_ones() {
        let mut shared =
            index(Head { kind: Kind::Blocks, key_block: 1, ..Head::DENSE }, &[&[1], &[2]]);
        shared.heads = vec![Head { lists: 1, ..shared.heads[0] }; 2];
        shared.heads[1].first = 1;
        assert_eq!((shared.list(0, 0), shared.list(1, 0)), (&[1][..], &[2][..]));
        assert!(shared.list(0, 1).is_empty(), "it is another head's");
        assert_eq!(shared.head(2), Head::DENSE);
        shared.set_dense();
        assert!(shared.is_dense() && shared.keys().is_dense());
    }
}
