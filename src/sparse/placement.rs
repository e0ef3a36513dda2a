//! The placement of loaded tokens in a buffer: blocks one after the other, then the tail.
//! Translates an index of positions into one of buffer rows, which kernels follow.

use std::ops::Range;

use crate::attention::key_cursor::{KeyCursor, KeySource};
use crate::attention::keys::{Heads, Keys, Lines};
use crate::attention::panel::TILE;
use crate::attention::problem::MAX_TOKENS;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::index::{Head, Index, Kind, NO_QUERY};
use crate::sparse::index_builder::IndexBuilder;
use crate::sparse::numbers::reserve;

/// Tokens in a buffer, in the order of their positions.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockPlacement<'a> {
    /// Blocks of the sequence, ascending and full. An incomplete block is the tail.
    pub blocks: &'a [u32],
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Position of the first token of the tail, behind the last block.
    pub tail_first: u32,
    /// Tokens of the tail.
    pub tail_tokens: u32,
}

/// The queries of an index.
#[derive(Clone, Copy)]
struct QueryRange {
    /// Position of the first.
    first: u32,
    /// Number of queries.
    count: u32,
    /// Buffer row of the first query; the number of rows if its key is not in the buffer.
    row: u32,
}

impl BlockPlacement<'_> {
    /// Checks order and limits.
    pub fn check(&self) -> Result<()> {
        let BlockPlacement { blocks, block_tokens, tail_first, tail_tokens } = *self;
        if block_tokens == 0 || !blocks.is_sorted_by(|a, b| a < b) {
            fail!(Invalid, "blocks must ascend and have at least one token, not {block_tokens}");
        }
        let last = blocks.last().map_or(0, |&id| self.begin(id) + u64::from(block_tokens));
        let tail = u64::from(tail_first)..u64::from(tail_first) + u64::from(tail_tokens);
        if !tail.is_empty() && tail.start < last {
            fail!(
                Invalid,
                "the tail starts at {tail_first}, before the end of the blocks at {last}"
            );
        }
        if last.max(tail.end) > u64::from(MAX_TOKENS) {
            fail!(Limit, "tokens reach position {}, the limit is {MAX_TOKENS}", last.max(tail.end));
        }
        Ok(())
    }

    /// Rows of the buffer.
    pub fn rows(&self) -> u32 {
        self.tail_row() + self.tail_tokens
    }

    /// The position of a row.
    pub fn position_of(&self, row: u32) -> Option<u32> {
        match self.blocks.get(row.checked_div(self.block_tokens)? as usize) {
            Some(id) => Some(id * self.block_tokens + row % self.block_tokens),
            None if row < self.rows() => Some(self.tail_first + (row - self.tail_row())),
            None => None,
        }
    }

    /// The row of a position, if the token is in the buffer.
    pub fn row_of(&self, position: u32) -> Option<u32> {
        self.runs(position..position.saturating_add(1)).next().map(|run| run.start)
    }

    /// Translates `keys` from positions to rows, for queries at `first` and the `count - 1`
    /// positions after it. Tokens that are not in the buffer are left out. Returns the row that is
    /// the `first_query` of a problem over these rows, whose `first_key` is 0. If the queries' own
    /// keys are in the buffer, they are the last rows.
    ///
    /// The index for one query consists of blocks, as decode requires. For more queries, diagonals
    /// become ranges of every query. Where no token is missing between two, it costs less to set
    /// the problem's first position instead. After an error the contents of `out` are undefined.
    pub fn index(
        &self,
        keys: &Keys<'_>,
        heads: Heads,
        (first, count): (u32, u32),
        out: &mut Index,
    ) -> Result<u32> {
        self.check()?;
        keys.check(heads, first, count)?;
        let queries = QueryRange { first, count, row: self.first_row(first)? };
        let mut builder = IndexBuilder::within(std::mem::take(out));
        for (at, head) in keys.heads.iter().enumerate() {
            match keys.heads.iter().take(at).position(|earlier| earlier == head) {
                Some(same) => builder.again(same)?,
                None => self.head(keys, at, &queries, &mut builder)?,
            }
        }
        *out = builder.into_index();
        Ok(queries.row)
    }

    fn begin(&self, id: u32) -> u64 {
        u64::from(id) * u64::from(self.block_tokens)
    }

    fn tail_row(&self) -> u32 {
        self.blocks.len() as u32 * self.block_tokens
    }

    /// The row of the query at a position. Only the queries' own keys may follow it, so that the
    /// causal rule holds in rows, too.
    fn first_row(&self, first: u32) -> Result<u32> {
        let row = self.runs(0..first).last().map_or(0, |run| run.end);
        let behind = self.rows() - row;
        let last = behind.checked_sub(1).and_then(|more| self.position_of(row + more));
        if last.is_some_and(|last| last - first != behind - 1) {
            fail!(
                Invalid,
                "tokens are missing between the query at {first} and the last token at {last:?}"
            );
        }
        Ok(row)
    }

    /// The rows of a range of positions, as ascending runs.
    fn runs(&self, keys: Range<u32>) -> impl Iterator<Item = Range<u32>> {
        let placed = *self;
        let (start, end) = (u64::from(keys.start), u64::from(keys.end));
        let size = u64::from(placed.block_tokens);
        let from = placed.blocks.partition_point(|&id| placed.begin(id) + size <= start);
        let blocks = (from as u32..).zip(placed.blocks.iter().skip(from));
        let blocks = blocks.map_while(move |(at, &id)| {
            let begin = placed.begin(id);
            let (from, to) = (start.max(begin), end.min(begin + size));
            let row = |key: u64| at * placed.block_tokens + (key - begin) as u32;
            (from < to).then(|| row(from)..row(to))
        });
        let first = placed.tail_first;
        let (from, to) = (keys.start.max(first), keys.end.min(first + placed.tail_tokens));
        let row = move |key: u32| placed.tail_row() + (key - first);
        blocks.chain((from < to).then(|| row(from)..row(to)))
    }

    /// The rows of ascending positions.
    fn each<'a>(
        &'a self,
        positions: impl Iterator<Item = u32> + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        let mut at = 0;
        positions.filter_map(move |position| {
            let id = position / self.block_tokens.max(1);
            while self.blocks.get(at).is_some_and(|&has| has < id) {
                at += 1;
            }
            if self.blocks.get(at) == Some(&id) {
                return Some(at as u32 * self.block_tokens + position % self.block_tokens);
            }
            let inside = position.checked_sub(self.tail_first)?;
            (inside < self.tail_tokens).then(|| self.tail_row() + inside)
        })
    }

    /// Adds a head.
    fn head(
        &self,
        keys: &Keys<'_>,
        at: usize,
        queries: &QueryRange,
        builder: &mut IndexBuilder,
    ) -> Result<()> {
        let head = keys.at(at).head;
        if head.kind == Kind::Dense || head.dense_from <= queries.first {
            return builder.dense();
        }
        let dense_from = match head.dense_from {
            NO_QUERY => NO_QUERY,
            from => queries.row.saturating_add(from - queries.first),
        };
        match head.kind {
            Kind::Dense => builder.dense(),
            Kind::Blocks => self.blocks(keys, &Head { dense_from, ..head }, builder),
            _ if queries.count <= 1 => {
                builder.blocks(0, 1, NO_QUERY)?;
                let end = queries.first.saturating_add(1);
                let cursor = keys.at(at).cursor(0, (queries.first, 1), (0, end));
                builder.list(self.each(positions(cursor)))
            }
            Kind::Lines => self.lines(keys, &Head { dense_from, ..head }, queries, builder),
            Kind::Ranges => self.ranges(keys, &Head { dense_from, ..head }, builder),
        }
    }

    /// Blocks stay blocks. Their new size divides the old one, the loaded blocks' and the start of
    /// the tail.
    fn blocks(&self, keys: &Keys<'_>, head: &Head, builder: &mut IndexBuilder) -> Result<()> {
        let tail = if self.tail_tokens > 0 { self.tail_first } else { 0 };
        let unit = common(common(head.key_block, self.block_tokens), tail).max(1);
        builder.blocks(head.query_block, unit, head.dense_from)?;
        for list in 0..head.lists {
            for &id in keys.list(head.first + list) {
                let behind = |id: u64| (id * u64::from(head.key_block)).min(MAX_TOKENS.into());
                let positions = behind(id.into()) as u32..behind(u64::from(id) + 1) as u32;
                self.runs(positions).try_for_each(|rows| builder.add(rows))?;
            }
            builder.end()?;
        }
        Ok(())
    }

    /// Columns stay columns; diagonals become ranges of each query.
    fn lines(
        &self,
        keys: &Keys<'_>,
        head: &Head,
        queries: &QueryRange,
        builder: &mut IndexBuilder,
    ) -> Result<()> {
        let (columns, diagonals) = (keys.list(head.first), keys.list(head.first + 1));
        self.columns(columns, (1, head.dense_from), builder)?;
        // Dense queries have no list.
        let count = queries.count.min(head.dense_from.saturating_sub(queries.row));
        for position in (queries.first..).take(count as usize) {
            let lines = Lines { columns: &[], diagonals };
            let left = diagonals.partition_point(|&d| d <= position);
            let source = KeySource::Lines { lines, left, position, width: 1 };
            let cursor = KeyCursor::new(source, (0, position.saturating_add(1)));
            let rows = self.each(positions(cursor));
            rows.into_iter().try_for_each(|row| builder.add(row..row + 1))?;
            builder.end()?;
        }
        Ok(())
    }

    fn ranges(&self, keys: &Keys<'_>, head: &Head, builder: &mut IndexBuilder) -> Result<()> {
        self.columns(keys.list(head.first), (head.query_block, head.dense_from), builder)?;
        for list in 1..head.lists {
            for range in keys.list(head.first + list).chunks_exact(2) {
                if let [from, to] = *range {
                    self.runs(from..to).try_for_each(|rows| builder.add(rows))?;
                }
            }
            builder.end()?;
        }
        Ok(())
    }

    /// Begins a head of columns and ranges.
    fn columns(
        &self,
        columns: &[u32],
        (query_block, dense_from): (u32, u32),
        builder: &mut IndexBuilder,
    ) -> Result<()> {
        builder.head(Head { kind: Kind::Ranges, query_block, dense_from, ..Head::DENSE })?;
        builder.list(self.each(columns.iter().copied()))
    }
}

/// All keys of a cursor.
fn positions(mut cursor: KeyCursor<'_>) -> impl Iterator<Item = u32> {
    let (mut tile, mut at, mut count) = ([0; TILE], 0, 0);
    std::iter::from_fn(move || {
        if at == count {
            (at, count) = (0, cursor.take(&mut tile, TILE));
        }
        at += 1;
        tile.get(at - 1).copied().filter(|_| at <= count)
    })
}

/// The greatest common divisor.
fn common(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common(b, a % b) }
}

/// Puts the positions of all rows into `out`, ascending.
pub fn positions_of(placed: &BlockPlacement<'_>, out: &mut Vec<u32>) -> Result<()> {
    placed.check()?;
    out.clear();
    reserve(out, placed.rows() as usize)?;
    out.extend((0..placed.rows()).filter_map(|row| placed.position_of(row)));
    Ok(())
}
