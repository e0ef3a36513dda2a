//! The keys that queries are computed with, as a borrowed index.
//!
//! The lists of all heads are in one table of flat arrays: numbers, the start of each list, and for
//! each head how its lists are read.

use crate::attention::key_cursor::{KeyCursor, KeySource};
use crate::base::status::Result;
use crate::fail;

/// Form of a head's selection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// All keys; no list.
    #[default]
    Dense = 0,
    /// Two lists: keys that every query sees, and distances back from a query at which it sees a
    /// key. Exactly these.
    Lines = 1,
    /// A list of blocks of keys for each row of queries.
    Blocks = 2,
    /// A list of keys that every query sees, then a list of ranges for each row of queries. A range
    /// is two numbers: its first key and its end. Ranges do not touch.
    Ranges = 3,
}

/// Marks a head without dense queries.
pub const NO_QUERY: u32 = u32::MAX;

/// How the lists of a head are read. Heads may share lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Head {
    /// Form of the selection.
    pub kind: Kind,
    /// Index of its first list.
    pub first: u32,
    /// Number of its lists.
    pub lists: u32,
    /// Blocks and ranges: queries of a row, counted from the first computed query; 0 = all queries
    /// form one row.
    pub query_block: u32,
    /// Blocks: keys of a block.
    pub key_block: u32,
    /// Queries from this position on see all keys, whatever the lists say.
    pub dense_from: u32,
}

impl Head {
    /// A head that sees all keys.
    pub const DENSE: Head = Head {
        kind: Kind::Dense,
        first: 0,
        lists: 0,
        query_block: 0,
        key_block: 0,
        dense_from: NO_QUERY,
    };

    /// Rows of queries that have lists of their own.
    pub fn rows(&self) -> u32 {
        match self.kind {
            Kind::Dense | Kind::Lines => 0,
            Kind::Blocks => self.lists,
            Kind::Ranges => self.lists.saturating_sub(1),
        }
    }
}

/// An index of selected keys. No query sees keys behind it; keys that are not resident are left
/// out. It has no head (all keys), one head for all, one for each head of keys, or one for each
/// query head.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keys<'a> {
    /// How lists are read.
    pub heads: &'a [Head],
    /// Start of each list in `items`, and the end of the last.
    pub starts: &'a [u32],
    /// Contents of lists, each strictly ascending.
    pub items: &'a [u32],
}

/// Head counts of a problem.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub queries: u32,
    /// Heads of keys.
    pub keys: u32,
}

impl Heads {
    /// The entry of a query head, of `n` entries.
    fn pick(self, head: u32, n: usize) -> usize {
        if n == 1 {
            0
        } else if n == self.keys as usize {
            (head / (self.queries / self.keys)) as usize
        } else {
            head as usize
        }
    }
}

/// A list of a table.
fn list<'a>(starts: &[u32], items: &'a [u32], at: usize) -> &'a [u32] {
    match (starts.get(at), starts.get(at + 1)) {
        (Some(&from), Some(&to)) => items.get(from as usize..to as usize).unwrap_or_default(),
        _ => &[],
    }
}

impl<'a> Keys<'a> {
    /// Selects all keys.
    pub const DENSE: Keys<'static> = Keys { heads: &[], starts: &[], items: &[] };

    /// A list; empty beyond the last.
    pub fn list(&self, at: u32) -> &'a [u32] {
        list(self.starts, self.items, at as usize)
    }

    /// Checks that kernels can follow the index, for `queries` queries from a position on.
    pub fn check(&self, heads: Heads, first_query: u32, queries: u32) -> Result<()> {
        let n = self.heads.len();
        if ![0, 1, heads.keys as usize, heads.queries as usize].contains(&n) {
            let Heads { queries, keys } = heads;
            fail!(
                Invalid,
                "an index of {n} heads: it must have 0, 1, {keys} (heads of keys) or {queries} (query heads)"
            );
        }
        let is_inside = self.starts.last().is_none_or(|&end| end as usize <= self.items.len());
        if !is_inside || !self.starts.is_sorted() {
            fail!(Invalid, "lists of an index end beyond its items or do not ascend");
        }
        let lists = self.starts.len().saturating_sub(1) as u32;
        for at in 0..lists {
            if !self.list(at).is_sorted_by(|a, b| a < b) {
                fail!(Invalid, "list {at} of an index does not strictly ascend");
            }
        }
        let check = |head: &Head| self.check_head(head, lists, first_query, queries);
        self.heads.iter().try_for_each(check)
    }

    fn check_head(&self, head: &Head, lists: u32, first_query: u32, queries: u32) -> Result<()> {
        let Head { kind, first, lists: own, query_block, key_block, dense_from } = *head;
        if first.checked_add(own).is_none_or(|end| end > lists) {
            fail!(Invalid, "{own} lists from list {first} on, the index has {lists}");
        }
        // Dense queries need no row.
        let queries = queries.min(dense_from.saturating_sub(first_query));
        let rows = head.rows();
        let has_rows = match query_block {
            0 => rows > 0 || queries == 0,
            n => u64::from(n) * u64::from(rows) >= u64::from(queries),
        };
        let is_sound = match kind {
            Kind::Dense => true,
            Kind::Lines => own == 2,
            Kind::Blocks => key_block > 0 && has_rows,
            Kind::Ranges => own > 0 && has_rows,
        };
        if !is_sound {
            fail!(
                Invalid,
                "{own} lists of kind {kind:?} (query_block {query_block}, key_block {key_block}) do not serve {queries} queries"
            );
        }
        if kind == Kind::Ranges && (1..own).any(|row| self.list(first + row).len() % 2 != 0) {
            fail!(
                Invalid,
                "a list of ranges has an odd number of items: the last range has no end"
            );
        }
        Ok(())
    }

    /// Whether all heads see all keys.
    pub fn is_dense(&self) -> bool {
        self.heads.iter().all(|head| head.kind == Kind::Dense)
    }

    /// Whether the query heads that share a head of keys share its selection.
    pub fn is_shared(&self, heads: Heads) -> bool {
        self.heads.len() <= 1 || self.heads.len() == heads.keys as usize
    }

    /// The selection of a query head.
    pub fn of(&self, heads: Heads, head: u32) -> HeadKeys<'a> {
        self.at(heads.pick(head, self.heads.len()))
    }

    /// The selection at an index of `heads`.
    pub fn at(&self, at: usize) -> HeadKeys<'a> {
        let head = self.heads.get(at).copied().unwrap_or(Head::DENSE);
        HeadKeys { head, starts: self.starts, items: self.items }
    }
}

/// The selected keys of one head.
#[derive(Clone, Copy, Debug)]
pub struct HeadKeys<'a> {
    /// How its lists are read.
    pub head: Head,
    starts: &'a [u32],
    items: &'a [u32],
}

/// Columns and diagonals of a head.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lines<'a> {
    /// Keys that every query sees.
    pub columns: &'a [u32],
    /// Distances back from the query at which it sees a key.
    pub diagonals: &'a [u32],
}

impl<'a> HeadKeys<'a> {
    fn list(&self, at: u32) -> &'a [u32] {
        list(self.starts, self.items, self.head.first as usize + at as usize)
    }

    /// The form for the query at a position.
    pub fn kind(&self, position: u32) -> Kind {
        if position >= self.head.dense_from { Kind::Dense } else { self.head.kind }
    }

    /// End of the run of queries from `query` on that one cursor serves; `first_query` is the
    /// position of query 0. For lines, the cursor names keys that any query of the run sees.
    pub fn until(&self, query: u32, first_query: u32) -> u32 {
        let dense = self.head.dense_from.saturating_sub(first_query);
        if query >= dense {
            return u32::MAX;
        }
        let own = match (self.head.kind, self.head.query_block) {
            (Kind::Blocks | Kind::Ranges, 1..) => {
                let block = self.head.query_block;
                (query - query % block).saturating_add(block)
            }
            _ => u32::MAX,
        };
        own.min(dense)
    }

    /// The columns and diagonals for the query at a position, if it has them.
    pub fn lines(&self, position: u32) -> Option<Lines<'a>> {
        (self.kind(position) == Kind::Lines)
            .then(|| Lines { columns: self.list(0), diagonals: self.list(1) })
    }

    /// A cursor over the keys of `width` queries from `query` on, the first at `position`. It
    /// covers the `end` keys from position `begin` on, counted from there.
    pub fn cursor(
        &self,
        query: u32,
        (position, width): (u32, u32),
        (begin, end): (u32, u32),
    ) -> KeyCursor<'a> {
        let row = query.checked_div(self.head.query_block).unwrap_or(0);
        let source = match self.kind(position) {
            Kind::Dense => KeySource::All,
            Kind::Lines => {
                let (columns, diagonals) = (behind(self.list(0), begin), self.list(1));
                // From farther away no query reaches the first key.
                let reach = position.saturating_add(width).saturating_sub(begin);
                let left = diagonals.partition_point(|&d| d < reach);
                KeySource::Lines { lines: Lines { columns, diagonals }, left, position, width }
            }
            Kind::Blocks => {
                let (blocks, tokens) = (self.list(row), self.head.key_block);
                let is_there = row < self.head.lists;
                let blocks = if is_there { behind(blocks, begin / tokens.max(1)) } else { &[] };
                KeySource::Blocks { blocks, tokens }
            }
            Kind::Ranges => {
                let is_there = row < self.head.rows();
                let ranges = if is_there { self.list(row + 1) } else { &[] };
                // An odd end before the first key begins a range that contains it.
                let before = ranges.len() - behind(ranges, begin.saturating_add(1)).len();
                let ranges = ranges.get(before / 2 * 2..).unwrap_or_default();
                KeySource::Ranges {
                    ranges,
                    columns: behind(self.list(0), begin),
                    column: 0,
                    done: 0,
                }
            }
        };
        KeyCursor::new(source, (begin, end))
    }
}

/// The numbers of a list from `begin` on.
fn behind(list: &[u32], begin: u32) -> &[u32] {
    match begin {
        0 => list,
        _ => list.get(list.partition_point(|&item| item < begin)..).unwrap_or_default(),
    }
}
