//! Selects the first few of many entries in order, without sorting the rest. Entries are
//! distributed to buckets by the leading part of their rank, and only the buckets needed are
//! sorted.

use crate::base::status::Result;
use crate::fail;
use crate::policy::Rank;

/// A candidate row, ordered by eviction. The id distinguishes equal ranks, so that the order of
/// rows does not matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Its rank.
    pub rank: Rank,
    /// Its id.
    pub id: u64,
    /// Its row.
    pub row: u32,
    /// Most blocks that it frees.
    pub blocks: u32,
}

/// Fewer entries are sorted directly.
const SMALL: usize = 24;

/// Reserves memory for `len` elements in a vector that is kept from call to call.
pub fn reserve<T>(vec: &mut Vec<T>, len: usize) -> Result<()> {
    if vec.try_reserve(len.saturating_sub(vec.len())).is_err() {
        fail!(NoMem, "no memory for {len} candidates");
    }
    Ok(())
}

/// The greatest rank.
const LAST: Rank = Rank { major: u64::MAX, minor: u64::MAX };

/// Both keys as one number, compared without a branch.
#[inline]
fn wide(rank: &Rank) -> u128 {
    u128::from(rank.major) << 64 | u128::from(rank.minor)
}

/// Filters the rows that can be among the first.
#[derive(Default)]
pub struct Front {
    sample: Vec<(Rank, u32)>,
    rows: Vec<u32>,
}

impl Front {
    /// Gathers into `out` the entries that can be among the first whose blocks reach `required`,
    /// and a few more, unordered. Rows of weight 0 are excluded.
    pub fn gather(
        &mut self,
        ranks: &[Rank],
        ids: &[u64],
        weights: &[u32],
        required: u64,
        out: &mut Vec<Entry>,
    ) -> Result<()> {
        let total: u64 = weights.iter().map(|&w| u64::from(w)).sum();
        let mut bound = self.guess(ranks, weights, total, required);
        if self.rows.len() < ranks.len() {
            reserve(&mut self.rows, ranks.len())?;
            self.rows.resize(ranks.len(), 0);
        }
        let rows = loop {
            // No branch that the processor would have to predict.
            let (mut count, mut sum) = (0, 0);
            for (row, (rank, &weight)) in ranks.iter().zip(weights).enumerate() {
                let inside = (wide(rank) <= wide(&bound)) & (weight > 0);
                self.rows[count] = row as u32;
                count += usize::from(inside);
                sum += u64::from(weight) * u64::from(inside);
            }
            if sum >= required || bound == LAST {
                break &self.rows[..count];
            }
            bound = LAST;
        };
        out.clear();
        reserve(out, rows.len())?;
        out.extend(rows.iter().map(|&row| {
            let at = row as usize;
            Entry { rank: ranks[at], id: ids[at], row, blocks: weights[at] }
        }));
        Ok(())
    }

    /// A rank below which the rows probably suffice, estimated from a sample: the required share
    /// plus twice its standard error.
    fn guess(&mut self, ranks: &[Rank], weights: &[u32], total: u64, required: u64) -> Rank {
        let step = (ranks.len() / 1024).max(16);
        if total <= required || ranks.len() < 4 * step {
            return LAST;
        }
        self.sample.clear();
        let rows = (step / 2..ranks.len()).step_by(step);
        if self.sample.try_reserve(rows.len()).is_err() {
            return LAST;
        }
        self.sample.extend(rows.map(|row| (ranks[row], weights[row])));
        self.sample.sort_unstable();
        let (share, n) = (required as f64 / total as f64, self.sample.len() as f64);
        let target = share + 2.0 * (share * (1.0 - share) / n).sqrt() + 2.0 / n;
        let all: u64 = self.sample.iter().map(|&(_, w)| u64::from(w)).sum();
        let (target, mut sum) = (target * all as f64, 0);
        for &(rank, weight) in &self.sample {
            sum += u64::from(weight);
            if sum as f64 > target {
                return rank;
            }
        }
        LAST
    }
}

fn part(entry: &Entry, which: u32) -> u64 {
    match which {
        0 => entry.rank.major,
        1 => entry.rank.minor,
        _ => entry.id,
    }
}

/// The first key in which entries differ, with its lowest value and its span.
fn differ(entries: &[Entry]) -> Option<(u32, u64, u64)> {
    (0..3).find_map(|which| {
        let (mut low, mut high) = (u64::MAX, 0);
        for entry in entries {
            low = low.min(part(entry, which));
            high = high.max(part(entry, which));
        }
        (high > low).then(|| (which, low, high - low))
    })
}

/// Visits entries in order until `visit` returns false. The visited entries are at the front
/// afterwards, in order. `spare` is as long as `entries`. Returns whether all were visited.
pub fn in_order(
    entries: &mut [Entry],
    spare: &mut [Entry],
    visit: &mut dyn FnMut(&Entry) -> bool,
) -> bool {
    if entries.len() <= SMALL {
        entries.sort_unstable();
        return entries.iter().all(visit);
    }
    match entries.len() {
        0..=255 => by_bucket::<4, 16>(entries, spare, visit),
        256..=4095 => by_bucket::<7, 128>(entries, spare, visit),
        _ => by_bucket::<11, 2048>(entries, spare, visit),
    }
}

fn by_bucket<const BITS: u32, const BUCKETS: usize>(
    entries: &mut [Entry],
    spare: &mut [Entry],
    visit: &mut dyn FnMut(&Entry) -> bool,
) -> bool {
    let Some((which, low, span)) = differ(entries) else {
        return entries.iter().all(visit);
    };
    let shift = (u64::BITS - span.leading_zeros()).saturating_sub(BITS);
    let bucket = |entry: &Entry| ((part(entry, which) - low) >> shift) as usize & (BUCKETS - 1);
    let mut ends = [0u32; BUCKETS];
    for entry in entries.iter() {
        ends[bucket(entry)] += 1;
    }
    let mut start = 0;
    for end in &mut ends {
        start += std::mem::replace(end, start);
    }
    for entry in entries.iter() {
        let at = &mut ends[bucket(entry)];
        spare[*at as usize] = *entry;
        *at += 1;
    }
    let len = entries.len();
    entries.copy_from_slice(&spare[..len]);
    let mut start = 0;
    for end in ends {
        let end = end as usize;
        if end > start && !in_order(&mut entries[start..end], spare, visit) {
            return false;
        }
        start = end;
    }
    true
}

/// Finds duplicate ids exactly: a bit per hash finds the ids that can be equal, and only those are
/// compared.
#[derive(Default)]
pub struct Duplicates {
    seen: Vec<u64>,
    /// Bits of hashes that met a set bit, folded into a small map.
    again: Vec<u64>,
    suspects: Vec<u64>,
}

/// Words of the small map.
const AGAIN: usize = 1024;

impl Duplicates {
    /// Returns an id that occurs twice in `ids`.
    pub fn find(&mut self, ids: &[u64]) -> Result<Option<u64>> {
        if ids.is_sorted_by(|a, b| a < b) {
            return Ok(None);
        }
        // 16 to 32 bits per id: one id in about 40 meets a set bit.
        let bits = (ids.len().ilog2() + 5).max(6);
        let words = 1usize << (bits - 6);
        reserve(&mut self.seen, words)?;
        self.seen.clear();
        self.seen.resize(words, 0);
        let small = words.min(AGAIN);
        reserve(&mut self.again, small)?;
        self.again.clear();
        self.again.resize(small, 0);
        let (seen, again) = (&mut self.seen[..words], &mut self.again[..small]);
        let hash = |id: u64| id.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - bits);
        for &id in ids {
            let hash = hash(id);
            let (word, bit) = (&mut seen[(hash >> 6) as usize & (words - 1)], 1 << (hash & 63));
            again[(hash >> 6) as usize & (small - 1)] |= *word & bit;
            *word |= bit;
        }
        self.suspects.clear();
        for &id in ids {
            let hash = hash(id);
            if again[(hash >> 6) as usize & (small - 1)] >> (hash & 63) & 1 != 0 {
                if self.suspects.try_reserve(1).is_err() {
                    fail!(NoMem, "no memory to compare {} ids", ids.len());
                }
                self.suspects.push(id);
            }
        }
        self.suspects.sort_unstable();
        Ok(self.suspects.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        // Narrow, wide and equal keys.
        let part = prop_oneof![Just(7u64), 0..4u64, any::<u64>()];
        prop::collection::vec((part.clone(), part, any::<u64>(), 0..9u32), 0..600).prop_map(|all| {
            let entry = |(row, (major, minor, id, blocks))| {
                let row = row as u32;
                Entry { rank: Rank { major, minor }, id, row, blocks }
            };
            all.into_iter().enumerate().map(entry).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn entries_are_visited_in_order(mut all in entries(), most in 0..700usize) {
            let mut expected = all.clone();
            expected.sort();
            let (mut spare, mut seen) = (vec![Entry::default(); all.len()], Vec::new());
            in_order(&mut all, &mut spare, &mut |e| {
                seen.push(*e);
                seen.len() < most
            });
            expected.truncate(most.max(1));
            prop_assert_eq!(&seen, &expected);
            prop_assert_eq!(&all[..seen.len()], &expected[..]);
        }

        #[test]
        fn no_candidate_is_left_out(all in entries(), required in 0..3000u64) {
            let ranks: Vec<Rank> = all.iter().map(|e| e.rank).collect();
            let ids: Vec<u64> = all.iter().map(|e| e.id).collect();
            let weights: Vec<u32> = all.iter().map(|e| e.blocks).collect();
            let mut got = Vec::new();
            Front::default().gather(&ranks, &ids, &weights, required, &mut got).expect("memory");
            let mut expected: Vec<Entry> = all.iter().copied().filter(|e| e.blocks > 0).collect();
            expected.sort();
            got.sort();
            let mut sum = 0;
            for (i, entry) in expected.iter().enumerate() {
                if sum >= required {
                    break;
                }
                prop_assert_eq!(got.get(i), Some(entry));
                sum += u64::from(entry.blocks);
            }
        }

        #[test]
        fn duplicate_ids_are_found(mut ids in prop::collection::vec(0..5000u64, 1..300)) {
            let mut sorted = ids.clone();
            sorted.sort();
            let twice = sorted.windows(2).any(|pair| pair[0] == pair[1]);
            let mut twins = Duplicates::default();
            let found = twins.find(&ids).expect("memory");
            prop_assert_eq!(found.is_some(), twice);
            sorted.dedup();
            sorted.reverse();
            prop_assert_eq!(twins.find(&sorted).expect("memory"), None);
            ids.push(ids[0]);
            prop_assert!(twins.find(&ids).expect("memory").is_some());
        }
    }
}
