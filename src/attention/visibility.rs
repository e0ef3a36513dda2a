//! Visibility of keys to the queries of a run, as bit masks. Column sums use it to pass over keys
//! and find the queries of each.

use crate::attention::keys::{HeadKeys, Kind, Lines};
use crate::attention::panel::TILE;

/// A run of up to 32 queries: bit 0 is the first.
#[derive(Clone, Copy, Debug)]
pub struct QueryRun {
    /// Index of the first query.
    pub query: u32,
    /// Number of queries.
    pub count: u32,
    /// Position of query 0.
    pub first_query: u32,
}

/// Sets the bits of distances that are diagonals. The last two words stay zero, so that two words
/// can be read at every distance.
pub fn mark_diagonals(lines: &Lines<'_>, words: &mut [u32]) {
    words.fill(0);
    for &d in lines.diagonals {
        match words.get_mut(d as usize / 32..) {
            Some([word, _, _, ..]) => *word |= 1 << (d % 32),
            _ => break,
        }
    }
}

/// Queries, from a position on, that see a key on a diagonal.
fn on_diagonals(words: &[u32], position: u32, key: u32) -> u32 {
    let (back, ahead) = (position.saturating_sub(key), key.saturating_sub(position));
    let Some([low, high, ..]) = words.get(back as usize / 32..) else { return 0 };
    let pair = u64::from(*low) | u64::from(*high) << 32;
    (pair >> (back % 32)).checked_shl(ahead).unwrap_or(0) as u32
}

/// Fills the masks of keys, the first of which is at position `first`: the queries that select each
/// key. The causal rule is not applied. `words` are the head's diagonals. Returns whether any key
/// is selected.
pub fn visible_masks(
    head_keys: &HeadKeys<'_>,
    words: &[u32],
    run: &QueryRun,
    first: u32,
    masks: &mut [u32],
) -> bool {
    masks.fill(0);
    let (mut query, end) = (run.query, run.query.saturating_add(run.count.min(32)));
    while query < end {
        let until = head_keys.until(query, run.first_query).min(end);
        let bits = (u32::MAX >> (32 - (until - query).clamp(1, 32))) << (query - run.query);
        run_masks(head_keys, words, (run, query, until), (first, bits), masks);
        query = until.max(query + 1);
    }
    masks.iter().any(|&mask| mask != 0)
}

/// The same for queries up to `until`, which share one cursor.
fn run_masks(
    head_keys: &HeadKeys<'_>,
    words: &[u32],
    (run, query, until): (&QueryRun, u32, u32),
    (first, bits): (u32, u32),
    masks: &mut [u32],
) {
    let position = run.first_query + query;
    let kind = head_keys.kind(position);
    if kind == Kind::Dense {
        masks.iter_mut().for_each(|mask| *mask |= bits);
        return;
    }
    let mut cursor =
        head_keys.cursor(query, (position, until - query), (first, masks.len() as u32));
    let mut tile = [0; TILE];
    loop {
        let n = cursor.take(&mut tile, TILE);
        for &at in tile.iter().take(n) {
            let Some(mask) = masks.get_mut(at as usize) else { continue };
            *mask |= match kind {
                Kind::Lines => bits & on_diagonals(words, run.first_query + run.query, first + at),
                _ => bits,
            };
        }
        if n == 0 {
            break;
        }
    }
    let Some(lines) = head_keys.lines(position) else { return };
    let from = lines.columns.partition_point(|&key| key < first);
    for &key in lines.columns.iter().skip(from) {
        match masks.get_mut((key - first) as usize) {
            Some(mask) => *mask |= bits,
            None => break,
        }
    }
}
