//! Builds an index within its limits: head after head, list after list.

use std::ops::Range;

use crate::base::status::Result;
use crate::fail;
use crate::sparse::index::{Head, Index, Kind};
use crate::sparse::numbers::reserve;

/// An index under construction.
#[derive(Default)]
pub struct IndexBuilder {
    index: Index,
    /// Start of the open list.
    begun: usize,
}

/// A row of queries, by positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Index of the row.
    pub at: u32,
    /// Position of its first query.
    pub first: u32,
    /// Position behind its last query.
    pub end: u32,
}

/// The rows of queries from `first` up to `end`.
pub fn rows(first: u32, end: u32, query_block: u32) -> impl Iterator<Item = Row> + Clone {
    let count = end.saturating_sub(first).div_ceil(query_block);
    (0..count).map(move |at| {
        let from = first + at * query_block;
        Row { at, first: from, end: from.saturating_add(query_block).min(end) }
    })
}

impl IndexBuilder {
    /// Reuses the memory of an index, whose contents are dropped.
    pub fn within(index: Index) -> IndexBuilder {
        let mut index = index;
        index.set_dense();
        IndexBuilder { index, begun: 0 }
    }

    /// Adds a head; its lists follow.
    pub fn head(&mut self, head: Head) -> Result<()> {
        let Index { heads, lists } = &mut self.index;
        reserve(heads, 1)?;
        reserve(&mut lists.starts, 1)?;
        if lists.starts.is_empty() {
            lists.starts.push(0);
        }
        heads.push(Head { first: lists.len() as u32, lists: 0, ..head });
        Ok(())
    }

    /// Adds a head that shares the lists of head `at`.
    pub fn again(&mut self, at: usize) -> Result<()> {
        let Some(&head) = self.index.heads.get(at) else {
            fail!(Invalid, "head {at} does not exist, the index has {}", self.index.heads.len());
        };
        reserve(&mut self.index.heads, 1)?;
        self.index.heads.push(head);
        Ok(())
    }

    /// Adds a head that sees all keys.
    pub fn dense(&mut self) -> Result<()> {
        self.head(Head::DENSE)
    }

    /// Begins a head that sees columns and diagonals: one list of each. Its queries from position
    /// `dense_from` on see all keys.
    pub fn lines(&mut self, dense_from: u32) -> Result<()> {
        self.head(Head { kind: Kind::Lines, dense_from, ..Head::DENSE })
    }

    /// Begins a head that sees blocks: one list a row. Its queries from `dense_from` on see all
    /// keys.
    pub fn blocks(&mut self, query_block: u32, key_block: u32, dense_from: u32) -> Result<()> {
        let kind = Kind::Blocks;
        self.head(Head { kind, query_block, key_block, dense_from, ..Head::DENSE })
    }

    /// Begins a head that sees columns and ranges: a list of columns, then one list a row.
    pub fn ranges(&mut self, query_block: u32) -> Result<()> {
        self.head(Head { kind: Kind::Ranges, query_block, ..Head::DENSE })
    }

    /// Adds keys to the list of a row: their range, or the blocks that hold any of them. The keys
    /// of a list ascend.
    pub fn add(&mut self, keys: Range<u32>) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        let block = match self.index.heads.last() {
            Some(head) if head.kind == Kind::Blocks => head.key_block.max(1),
            _ => return self.add_range(keys),
        };
        let last = self.open().last().map_or(0, |last| last + 1);
        self.items(last.max(keys.start / block)..keys.end.div_ceil(block))
    }

    fn add_range(&mut self, keys: Range<u32>) -> Result<()> {
        let begun = self.begun;
        match self.index.lists.items.get_mut(begun..).and_then(|list| list.last_mut()) {
            Some(end) if keys.start <= *end => {
                *end = keys.end.max(*end);
                Ok(())
            }
            _ => self.items([keys.start, keys.end].into_iter()),
        }
    }

    /// Adds one block.
    pub fn add_block(&mut self, block: u32) -> Result<()> {
        let from = self.open().last().map_or(0, |last| last + 1);
        self.items(from.max(block)..block + 1)
    }

    /// Adds a whole list of ascending numbers.
    pub fn list(&mut self, items: impl IntoIterator<Item = u32>) -> Result<()> {
        self.items(items.into_iter())?;
        self.end()
    }

    /// Appends ascending numbers to the open list.
    fn items(&mut self, items: impl Iterator<Item = u32>) -> Result<()> {
        let all = &mut self.index.lists.items;
        for item in items {
            if all.len() == u32::MAX as usize {
                fail!(
                    Limit,
                    "an index of more than {} numbers: pass fewer queries at a time",
                    u32::MAX
                );
            }
            if all.len() == all.capacity() {
                reserve(all, 1)?;
            }
            all.push(item);
        }
        Ok(())
    }

    fn open(&self) -> &[u32] {
        self.index.lists.items.get(self.begun..).unwrap_or_default()
    }

    /// Closes the open list.
    pub fn end(&mut self) -> Result<()> {
        let Index { heads, lists } = &mut self.index;
        reserve(&mut lists.starts, 1)?;
        self.begun = lists.items.len();
        lists.starts.push(self.begun as u32);
        heads.iter_mut().rev().take(1).for_each(|head| head.lists += 1);
        Ok(())
    }

    /// The index. An index that selects all keys has no heads.
    pub fn into_index(self) -> Index {
        let mut index = self.index;
        let sees_all = |head: &Head| head.kind == Kind::Dense || head.dense_from == 0;
        if index.heads.iter().all(sees_all) {
            index.set_dense();
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sparse::index::NO_QUERY;

    #[test]
    fn blocks_with_a_selected_key_are_listed_once() {
        let mut builder = IndexBuilder::default();
        builder.blocks(64, 16, NO_QUERY).expect("room");
        for keys in [0..1, 3..3, 15..17, 31..32, 64..81] {
            builder.add(keys).expect("room");
        }
        builder.end().expect("room");
        builder.add_block(0).expect("room");
        builder.add_block(0).expect("room");
        builder.end().expect("room");
        let index = builder.into_index();
        assert_eq!((index.list(0, 0), index.list(0, 1)), (&[0, 1, 4, 5][..], &[0][..]));
        let all: Vec<Row> = rows(10, 20, 4).collect();
        assert_eq!(all.last(), Some(&Row { at: 2, first: 18, end: 20 }));
        assert_eq!((all.len(), rows(5, 5, 4).count()), (3, 0));
    }

    #[test]
    fn heads_are_appended_and_touching_ranges_merge() {
        let mut builder = IndexBuilder::default();
        builder.dense().expect("room");
        builder.lines(40).expect("room");
        builder.list([1, 9]).expect("room");
        builder.list(0..3).expect("room");
        builder.ranges(64).expect("room");
        builder.list([4]).expect("room");
        for keys in [0..1, 3..5, 5..6, 8..9] {
            builder.add(keys).expect("room");
        }
        builder.end().expect("room");
        let index = builder.into_index();
        assert_eq!(index.heads.iter().map(|h| h.lists).collect::<Vec<u32>>(), [0, 2, 2]);
        assert_eq!((index.list(1, 0), index.list(1, 1)), (&[1, 9][..], &[0, 1, 2][..]));
        assert_eq!((index.list(2, 0), index.list(2, 1)), (&[4][..], &[0, 1, 3, 6, 8, 9][..]));
        assert_eq!(index.head(1).dense_from, 40);
        let mut again = IndexBuilder::within(index);
        again.dense().expect("room");
        assert!(again.into_index().is_dense());
    }
}
