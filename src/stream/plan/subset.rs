//! How many of each size fill a room best.

/// Items of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// How large each is, or the largest where sizes were joined.
    pub bytes: u64,
    /// How many there are.
    pub count: u64,
}

/// Mixes that are looked at: exact for few sizes, near for many.
const MAX_TRIES: u32 = 4_000;

struct Search<'a> {
    kinds: &'a [Kind],
    /// All bytes of this size and the smaller ones.
    after: Vec<u64>,
    now: Vec<u64>,
    best: Vec<u64>,
    best_bytes: u64,
    room: u64,
    tries: u32,
}

impl Search<'_> {
    fn look(&mut self, at: usize, used: u64) {
        self.tries += 1;
        if used > self.best_bytes {
            self.best_bytes = used;
            self.best.copy_from_slice(&self.now);
        }
        let left = self.room - used;
        let Some(kind) = self.kinds.get(at) else { return };
        // Even all that comes would not be better.
        if self.after[at].min(left) <= self.best_bytes - used {
            return;
        }
        let most = left.checked_div(kind.bytes).map_or(kind.count, |fit| fit.min(kind.count));
        for count in (0..=most).rev() {
            if self.tries >= MAX_TRIES || self.best_bytes == self.room {
                break;
            }
            self.now[at] = count;
            self.look(at + 1, used + count * kind.bytes);
        }
        self.now[at] = 0;
    }
}

/// How many of each kind, and how many bytes they are: the most that `room` holds.
pub(super) fn most(kinds: &[Kind], room: u64) -> (Vec<u64>, u64) {
    let mut after: Vec<u64> =
        kinds.iter().map(|kind| kind.bytes.saturating_mul(kind.count)).collect();
    for i in (1..after.len()).rev() {
        after[i - 1] = after[i - 1].saturating_add(after[i]);
    }
    let none = vec![0; kinds.len()];
    let mut search =
        Search { kinds, after, now: none.clone(), best: none, best_bytes: 0, room, tries: 0 };
    search.look(0, 0);
    (search.best, search.best_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_mix_is_fuller(
            sizes in proptest::collection::vec((1u64..60, 0u64..4), 1..5), room in 0u64..300,
        ) {
            let mut kinds: Vec<Kind> =
                sizes.iter().map(|&(bytes, count)| Kind { bytes, count }).collect();
            kinds.sort_unstable_by_key(|kind| std::cmp::Reverse(kind.bytes));
            let (counts, bytes) = most(&kinds, room);
            let sum: u64 = counts.iter().zip(&kinds).map(|(n, kind)| n * kind.bytes).sum();
            prop_assert_eq!(sum, bytes);
            prop_assert!(counts.iter().zip(&kinds).all(|(n, kind)| *n <= kind.count));
            let mut reach = vec![false; room as usize + 1];
            reach[0] = true;
            for kind in &kinds {
                for _ in 0..kind.count {
                    for to in (kind.bytes as usize..reach.len()).rev() {
                        reach[to] |= reach[to - kind.bytes as usize];
                    }
                }
            }
            prop_assert_eq!(reach.iter().rposition(|&r| r).unwrap_or(0) as u64, bytes);
        }
    }
}
