//! Which of a few queries see which keys, as bits: for what goes through keys, and asks of
//! each which queries are computed with it.

use crate::attention::keys::{HeadKeys, Kind, Lines};
use crate::attention::panel::TILE;

/// Queries that follow each other, 32 at most: a bit each, that of the first is the lowest.
#[derive(Clone, Copy, Debug)]
pub struct QueryRun {
    /// The first.
    pub query: u32,
    /// How many.
    pub count: u32,
    /// The position of the first query of all.
    pub first_query: u32,
}

/// Sets the bits of distances that are diagonals. The last two words have none, so that two
/// words can be read wherever a distance is.
pub fn mark_diagonals(lines: &Lines<'_>, words: &mut [u32]) {
    words.fill(0);
    for &d in lines.diagonals {
        match words.get_mut(d as usize / 32..) {
            Some([word, _, _, ..]) => *word |= 1 << (d % 32),
            _ => break,
        }
    }
}

/// Which queries from a position on see a key on a diagonal.
fn on_diagonals(words: &[u32], position: u32, key: u32) -> u32 {
    let (back, ahead) = (position.saturating_sub(key), key.saturating_sub(position));
    let Some([low, high, ..]) = words.get(back as usize / 32..) else { return 0 };
    let both = u64::from(*low) | u64::from(*high) << 32;
    (both >> (back % 32)).checked_shl(ahead).unwrap_or(0) as u32
}

/// Which queries see each of some keys by what is said, the first of which is at position
/// `first`: their bits. The causal rule is not in them. `words` are the head's diagonals.
/// Whether any key is seen.
pub fn visible_masks(
    one: &HeadKeys<'_>,
    words: &[u32],
    run: &QueryRun,
    first: u32,
    masks: &mut [u32],
) -> bool {
    masks.fill(0);
    let (mut query, end) = (run.query, run.query.saturating_add(run.count.min(32)));
    while query < end {
        let until = one.until(query, run.first_query).min(end);
        let bits = (u32::MAX >> (32 - (until - query).clamp(1, 32))) << (query - run.query);
        run_masks(one, words, (run, query, until), (first, bits), masks);
        query = until.max(query + 1);
    }
    masks.iter().any(|&mask| mask != 0)
}

/// The same of those up to `until` that have one walk.
fn run_masks(
    one: &HeadKeys<'_>,
    words: &[u32],
    (run, query, until): (&QueryRun, u32, u32),
    (first, bits): (u32, u32),
    masks: &mut [u32],
) {
    let position = run.first_query + query;
    let kind = one.kind(position);
    if kind == Kind::Dense {
        masks.iter_mut().for_each(|mask| *mask |= bits);
        return;
    }
    let mut cursor = one.cursor(query, (position, until - query), (first, masks.len() as u32));
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
    let Some(lines) = one.lines(position) else { return };
    let from = lines.columns.partition_point(|&key| key < first);
    for &key in lines.columns.iter().skip(from) {
        match masks.get_mut((key - first) as usize) {
            Some(mask) => *mask |= bits,
            None => break,
        }
    }
}
