//! A cursor over selected keys in ascending order, tile by tile.

use crate::attention::keys::Lines;
use crate::attention::panel::TILE;

/// Sources of keys.
#[derive(Clone, Copy, Debug)]
pub enum KeySource<'a> {
    /// All of them.
    All,
    /// Selected blocks of keys.
    Blocks {
        /// Block numbers, ascending.
        blocks: &'a [u32],
        /// Keys of a block.
        tokens: u32,
    },
    /// Ranges, and single columns beside them.
    Ranges {
        /// First key and end of each range, alternating.
        ranges: &'a [u32],
        /// Single keys, ascending.
        columns: &'a [u32],
        /// Index of the next column.
        column: usize,
        /// Keys before this one were returned.
        done: u32,
    },
    /// Keys that any of some queries sees by columns and diagonals.
    Lines {
        /// Columns and diagonals.
        lines: Lines<'a>,
        /// Diagonals that are left; the farthest comes first.
        left: usize,
        /// Position of the first query.
        position: u32,
        /// Number of queries.
        width: u32,
    },
}

/// Iterates over selected keys in ascending order.
#[derive(Clone, Copy, Debug)]
pub struct KeyCursor<'a> {
    source: KeySource<'a>,
    at: usize,
    run: (u32, u32),
    begin: u32,
    end: u32,
}

impl<'a> KeyCursor<'a> {
    /// Keys of a source at the `end` positions from `begin` on, counted from `begin`. The source
    /// names nothing that ends before `begin`.
    pub fn new(source: KeySource<'a>, (begin, end): (u32, u32)) -> KeyCursor<'a> {
        KeyCursor { source, at: 0, run: (0, 0), begin, end }
    }

    /// Number of keys, before the first is taken; 0 for lines and ranges, which are not counted.
    pub fn count(&self) -> usize {
        match self.source {
            KeySource::All => self.end as usize,
            KeySource::Blocks { blocks, tokens } => {
                let first = |id: u32| u64::from(id) * u64::from(tokens);
                let end = u64::from(self.begin) + u64::from(self.end);
                let visible_blocks = blocks.partition_point(|&id| first(id) < end);
                let last = blocks
                    .get(visible_blocks.wrapping_sub(1))
                    .map_or(0, |&id| (end - first(id)).min(u64::from(tokens)) as usize);
                let all = visible_blocks.saturating_sub(1) * tokens as usize + last;
                if visible_blocks > 0 { all - self.lead() } else { 0 }
            }
            KeySource::Ranges { .. } | KeySource::Lines { .. } => 0,
        }
    }

    /// Keys of the first block that lie before `begin`.
    fn lead(&self) -> usize {
        match self.source {
            KeySource::Blocks { blocks: [first, ..], tokens } => {
                let first = u64::from(*first) * u64::from(tokens);
                u64::from(self.begin).saturating_sub(first) as usize
            }
            _ => 0,
        }
    }

    /// Skips the first `n` keys, before the first is taken; does nothing for lines and ranges.
    pub fn skip(&mut self, n: usize) {
        match self.source {
            KeySource::All => {
                self.at = 1;
                self.run = ((n as u32).min(self.end), self.end);
            }
            KeySource::Blocks { tokens, .. } => {
                let from = n + self.lead();
                self.at = from / tokens as usize;
                let inside = if self.at == 0 { n } else { from % tokens as usize };
                self.run = self.next_run().unwrap_or_default();
                self.run.0 = (self.run.0 + inside as u32).min(self.run.1);
            }
            KeySource::Ranges { .. } | KeySource::Lines { .. } => {}
        }
    }

    /// Takes the next keys, up to `most`; returns their number.
    pub fn take(&mut self, tile: &mut [u32; TILE], most: usize) -> usize {
        let mut n = 0;
        while n < most.min(TILE) {
            if self.run.0 >= self.run.1 {
                match self.next_run() {
                    Some(run) => self.run = run,
                    None => break,
                }
            }
            let fits = ((self.run.1 - self.run.0) as usize).min(most.min(TILE) - n);
            for slot in &mut tile[n..n + fits] {
                *slot = self.run.0;
                self.run.0 += 1;
            }
            n += fits;
        }
        n
    }

    fn next_run(&mut self) -> Option<(u32, u32)> {
        let at = self.at;
        let run = match &mut self.source {
            KeySource::All => {
                self.at = 1;
                (self.begin, if at == 0 { self.begin + self.end } else { 0 })
            }
            KeySource::Blocks { blocks, tokens } => {
                self.at += 1;
                let from = u64::from(*blocks.get(at)?) * u64::from(*tokens);
                let end = u64::from(self.begin) + u64::from(self.end);
                let to = (from + u64::from(*tokens)).min(end);
                (from.min(to) as u32, to as u32)
            }
            KeySource::Ranges { ranges, columns, column, done } => {
                let run = next_range(ranges, columns, &mut self.at, column, *done)?;
                *done = run.1;
                run
            }
            KeySource::Lines { lines, left, position, width } => {
                next_band(lines, &mut self.at, left, (*position, *width))?
            }
        };
        let row = |key: u32| key.saturating_sub(self.begin).min(self.end);
        let run = (row(run.0), row(run.1));
        (run.0 < run.1).then_some(run)
    }
}

/// The next range or column that does not lie in what was `done`.
fn next_range(
    ranges: &[u32],
    columns: &[u32],
    at: &mut usize,
    column: &mut usize,
    done: u32,
) -> Option<(u32, u32)> {
    while columns.get(*column).is_some_and(|&key| key < done) {
        *column += 1;
    }
    let range = match ranges.get(*at..) {
        Some([from, to, ..]) => Some((*from, *to)),
        _ => None,
    };
    match columns.get(*column) {
        Some(&key) if range.is_none_or(|range| key < range.0) => {
            *column += 1;
            Some((key, key.saturating_add(1)))
        }
        _ => {
            *at += 2;
            range
        }
    }
}

/// The keys that any of the queries (first, count) sees by the next columns and diagonals that
/// touch.
fn next_band(
    lines: &Lines<'_>,
    column: &mut usize,
    left: &mut usize,
    (first, width): (u32, u32),
) -> Option<(u32, u32)> {
    let mut run: Option<(u32, u32)> = None;
    loop {
        let by_column = lines.columns.get(*column).map(|&c| (c, c.saturating_add(1)));
        // The farthest diagonal comes first, so that keys ascend.
        let by_diagonal = lines.diagonals.get(left.wrapping_sub(1)).map(|&d| {
            let last = first.saturating_add(width);
            (first.saturating_sub(d), last.saturating_sub(d))
        });
        let is_column = match (by_column, by_diagonal) {
            (None, None) => break,
            (Some(c), Some(d)) => c.0 <= d.0,
            (c, _) => c.is_some(),
        };
        let next = if is_column { by_column } else { by_diagonal }.unwrap_or_default();
        match &mut run {
            Some(run) if next.0 > run.1 => break,
            Some(run) => run.1 = run.1.max(next.1),
            // Diagonals that begin behind the first token name no key here.
            None if next.0 < next.1 => run = Some(next),
            None => {}
        }
        if is_column {
            *column += 1;
        } else {
            *left -= 1;
        }
    }
    run
}
