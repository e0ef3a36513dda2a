//! Which keys queries are computed with, borrowed from whoever has decided it.
//!
//! All heads have their lists in one table, so that it can be told as flat arrays: numbers,
//! where each list begins in them, and for each head how its lists are meant.

use crate::attention::key_cursor::{KeyCursor, KeySource};
use crate::base::status::Result;
use crate::fail;

/// How the keys of a head are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// All. No list.
    #[default]
    Dense = 0,
    /// Two lists: keys that every query sees, and distances back from a query at which it
    /// sees a key. Exactly these.
    Lines = 1,
    /// For each row of queries a list of blocks of keys.
    Blocks = 2,
    /// A list of keys that every query sees; then for each row of queries a list of ranges,
    /// each two numbers: its first key, and the one behind its last. Ranges do not touch.
    Ranges = 3,
}

/// No query sees all keys.
pub const NO_QUERY: u32 = u32::MAX;

/// How the lists of a head are meant. Heads may have the same lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Head {
    /// How keys are told.
    pub kind: Kind,
    /// The first of its lists.
    pub first: u32,
    /// How many lists it has.
    pub lists: u32,
    /// Blocks and ranges: queries of a row, counted from the first that is computed; 0 = all
    /// of them are one row.
    pub query_block: u32,
    /// Blocks: keys of a block.
    pub key_block: u32,
    /// Queries at this position and behind it see all keys, whatever lists say.
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

/// Which keys queries are computed with; no query sees keys behind it, and keys that are not
/// there are left out. There is no head (all keys), one for all, one for each head of keys,
/// or one for each query head.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keys<'a> {
    /// How lists are meant.
    pub heads: &'a [Head],
    /// Where each list begins in `items`, and where the last ends.
    pub starts: &'a [u32],
    /// What is in lists, each ascending without repetitions.
    pub items: &'a [u32],
}

/// Heads of a problem.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Of queries.
    pub queries: u32,
    /// Of keys.
    pub keys: u32,
}

impl Heads {
    /// Which of `n` a query head has.
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
    /// All keys.
    pub const DENSE: Keys<'static> = Keys { heads: &[], starts: &[], items: &[] };

    /// A list; none beyond the last.
    pub fn list(&self, at: u32) -> &'a [u32] {
        list(self.starts, self.items, at as usize)
    }

    /// Whether kernels can follow it, for so many queries from a position on.
    pub fn check(&self, heads: Heads, first_query: u32, queries: u32) -> Result<()> {
        let n = self.heads.len();
        if ![0, 1, heads.keys as usize, heads.queries as usize].contains(&n) {
            let Heads { queries, keys } = heads;
            fail!(
                Invalid,
                "an index of {n} heads, the model has {queries} of queries, {keys} of keys"
            );
        }
        let is_inside = self.starts.last().is_none_or(|&end| end as usize <= self.items.len());
        if !is_inside || !self.starts.is_sorted() {
            fail!(Invalid, "lists of an index lie outside of its items");
        }
        let lists = self.starts.len().saturating_sub(1) as u32;
        for at in 0..lists {
            if !self.list(at).is_sorted_by(|a, b| a < b) {
                fail!(Invalid, "list {at} of an index does not ascend, or names a number twice");
            }
        }
        let check = |head: &Head| self.check_head(head, lists, first_query, queries);
        self.heads.iter().try_for_each(check)
    }

    fn check_head(&self, head: &Head, lists: u32, first_query: u32, queries: u32) -> Result<()> {
        let Head { kind, first, lists: own, query_block, key_block, dense_from } = *head;
        if first.checked_add(own).is_none_or(|end| end > lists) {
            fail!(Invalid, "{own} lists from {first} on, an index has {lists}");
        }
        // Those that see all need no row.
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
                "{own} lists of {kind:?} of {query_block} queries and {key_block} keys for {queries}"
            );
        }
        if kind == Kind::Ranges && (1..own).any(|row| self.list(first + row).len() % 2 != 0) {
            fail!(Invalid, "a range that has no end");
        }
        Ok(())
    }

    /// Whether all see all keys.
    pub fn is_dense(&self) -> bool {
        self.heads.iter().all(|head| head.kind == Kind::Dense)
    }

    /// Whether all query heads that share a head of keys share what is said.
    pub fn is_shared(&self, heads: Heads) -> bool {
        self.heads.len() <= 1 || self.heads.len() == heads.keys as usize
    }

    /// What is said for a query head.
    pub fn of(&self, heads: Heads, head: u32) -> HeadKeys<'a> {
        self.at(heads.pick(head, self.heads.len()))
    }

    /// What is said at a place of `heads`.
    pub fn at(&self, at: usize) -> HeadKeys<'a> {
        let head = self.heads.get(at).copied().unwrap_or(Head::DENSE);
        HeadKeys { head, starts: self.starts, items: self.items }
    }
}

/// Which keys the queries of one head are computed with.
#[derive(Clone, Copy, Debug)]
pub struct HeadKeys<'a> {
    /// How its lists are meant.
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

    /// How keys are told for the query at a position.
    pub fn kind(&self, position: u32) -> Kind {
        if position >= self.head.dense_from { Kind::Dense } else { self.head.kind }
    }

    /// Up to which query, from `query` on, one walk serves, where the first is at a position.
    /// For lines it names what one of the queries sees.
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

    /// The columns and diagonals for the query at a position, where it has them.
    pub fn lines(&self, position: u32) -> Option<Lines<'a>> {
        (self.kind(position) == Kind::Lines)
            .then(|| Lines { columns: self.list(0), diagonals: self.list(1) })
    }

    /// The keys of `width` queries from `query` on, the first of which is at `position`: of
    /// those from position `begin` on, counted from there, the first `end`.
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
                // An odd end before the first key begins a range that it lies in.
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
