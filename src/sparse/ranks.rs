//! The highest and the lowest of many scores. Between equal scores the lower index comes first, for
//! selection and for eviction alike. Scores may be infinite but not NaN.

use crate::base::status::Result;
use crate::fail;
use crate::sparse::numbers::reserve;

/// Up to this many are found by scans that compare many scores at a time.
const FEW: usize = 32;
/// Scores that a scan compares together; more than it ever selects.
const LANES: usize = 64;

/// Finds them; keeps its memory for the next call.
#[derive(Clone, Debug, Default)]
pub struct Ranks {
    keys: Vec<u64>,
}

/// Order and index of a score in one number: the greater comes first.
fn key<const HIGH: bool>(score: f32, at: usize) -> u64 {
    // Minus zero equals zero.
    let bits = (score + 0.0).to_bits();
    let ascending = bits ^ (((bits as i32) >> 31) as u32 | 0x8000_0000);
    let order = if HIGH { ascending } else { !ascending };
    u64::from(order) << 32 | u64::from(!(at as u32))
}

fn index(key: u64) -> u32 {
    !(key as u32)
}

fn is_better<const HIGH: bool>(score: f32, than: f32) -> bool {
    if HIGH { score > than } else { score < than }
}

/// The index of the best score, the lowest of equal ones. Compares `LANES` scores at a time.
fn best<const HIGH: bool>(scores: &[f32]) -> usize {
    let (mut found, mut bar) = (0, scores.first().copied().unwrap_or_default());
    for (part, chunk) in scores.chunks(LANES).enumerate() {
        if !chunk.iter().fold(false, |any, &score| any | is_better::<HIGH>(score, bar)) {
            continue;
        }
        for (at, &score) in (part * LANES..).zip(chunk) {
            if is_better::<HIGH>(score, bar) {
                (found, bar) = (at, score);
            }
        }
    }
    found
}

impl Ranks {
    /// Adds the indices of the `count` highest scores to `out`, ascending.
    pub fn top(&mut self, scores: &[f32], count: usize, out: &mut Vec<u32>) -> Result<()> {
        self.pick::<true>(scores, count, out)
    }

    /// Adds the indices of the `count` lowest scores to `out`, ascending.
    pub fn bottom(&mut self, scores: &[f32], count: usize, out: &mut Vec<u32>) -> Result<()> {
        self.pick::<false>(scores, count, out)
    }

    /// All indices, the highest score first.
    pub fn descending(&mut self, scores: &[f32]) -> Result<impl Iterator<Item = u32>> {
        self.fill::<true>(scores)?;
        self.keys.sort_unstable();
        Ok(self.keys.iter().rev().map(|&key| index(key)))
    }

    /// Least number of highest scores whose sum exceeds `sum`; the number of scores plus 1 if the
    /// sum of all does not.
    pub fn cover(&mut self, scores: &[f32], sum: f64) -> Result<usize> {
        let mut reached = 0.0;
        let score_of = |at: u32| scores.get(at as usize).copied().map_or(0.0, f64::from);
        let within = self.descending(scores)?.take_while(|&at| {
            reached += score_of(at);
            reached <= sum
        });
        Ok(within.count() + 1)
    }

    /// As few of the highest as together reach `sum`, the highest first; all if they do not.
    pub fn reach(&mut self, scores: &[f32], sum: f64) -> Result<impl Iterator<Item = u32>> {
        let mut reached = 0.0;
        let score_of = |at: u32| scores.get(at as usize).copied().map_or(0.0, f64::from);
        let all = self.descending(scores)?;
        Ok(all.take_while(move |&at| {
            let is_short = reached < sum;
            reached += score_of(at);
            is_short
        }))
    }

    /// Puts all scores into `keys`.
    fn fill<const HIGH: bool>(&mut self, scores: &[f32]) -> Result<()> {
        if scores.len() > u32::MAX as usize {
            fail!(Limit, "{} scores at once, at most {}", scores.len(), u32::MAX);
        }
        self.keys.clear();
        reserve(&mut self.keys, scores.len())?;
        self.keys.extend(scores.iter().enumerate().map(|(at, &score)| key::<HIGH>(score, at)));
        Ok(())
    }

    fn pick<const HIGH: bool>(
        &mut self,
        scores: &[f32],
        count: usize,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        reserve(out, count.min(scores.len()))?;
        if count >= scores.len() {
            out.extend(0..scores.len() as u32);
        } else if count == 1 {
            out.push(best::<HIGH>(scores) as u32);
        } else if count > FEW {
            self.split::<HIGH>(scores, count, out)?;
        } else if count > 0 {
            let from = out.len();
            out.extend(self.scan::<HIGH>(scores, count)?.iter().map(|&key| index(key)));
            out.get_mut(from..).unwrap_or_default().sort_unstable();
        }
        Ok(())
    }

    /// A few of many. Finds the best score of each of `LANES` lanes. Scores worse than the
    /// `count`-th best lane cannot be selected, so few candidates are left in any order of scores.
    fn scan<const HIGH: bool>(&mut self, scores: &[f32], count: usize) -> Result<&[u64]> {
        let mut best = [if HIGH { f32::NEG_INFINITY } else { f32::INFINITY }; LANES];
        for part in scores.chunks(LANES) {
            for (best, &score) in best.iter_mut().zip(part) {
                *best = if is_better::<HIGH>(score, *best) { score } else { *best };
            }
        }
        let order = |a: &f32, b: &f32| if HIGH { b.total_cmp(a) } else { a.total_cmp(b) };
        let (_, &mut bar, _) = best.select_nth_unstable_by(count - 1, order);
        let counts = |score: f32| !is_better::<HIGH>(bar, score);
        self.keys.clear();
        for (part, chunk) in scores.chunks(LANES).enumerate() {
            if !chunk.iter().fold(false, |any, &score| any | counts(score)) {
                continue;
            }
            reserve(&mut self.keys, chunk.len())?;
            let found = (part * LANES..).zip(chunk).filter(|&(_, &score)| counts(score));
            self.keys.extend(found.map(|(at, &score)| key::<HIGH>(score, at)));
        }
        let more = self.keys.len().saturating_sub(count);
        if more > 0 {
            self.keys.select_nth_unstable(more);
        }
        Ok(self.keys.get(more..).unwrap_or_default())
    }

    /// Many of many: finds the last selected score, then all up to it in one pass.
    fn split<const HIGH: bool>(
        &mut self,
        scores: &[f32],
        count: usize,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        self.fill::<HIGH>(scores)?;
        let (_, &mut last, _) = self.keys.select_nth_unstable(scores.len() - count);
        let counts = |&(at, &score): &(usize, &f32)| key::<HIGH>(score, at) >= last;
        out.extend(scores.iter().enumerate().filter(counts).map(|(at, _)| at as u32));
        Ok(())
    }
}

/// Appends `list` without the elements at `places`, which ascend.
pub fn without<T: Copy>(list: &[T], places: &[u32], out: &mut Vec<T>) -> Result<()> {
    reserve(out, list.len())?;
    let mut from = 0;
    for &place in places {
        out.extend_from_slice(list.get(from..place as usize).unwrap_or_default());
        from = place as usize + 1;
    }
    out.extend_from_slice(list.get(from..).unwrap_or_default());
    Ok(())
}

/// Puts the list into `out`, ascending. Fails if a number is in it twice.
pub fn ascending(list: &[u32], out: &mut Vec<u32>) -> Result<()> {
    out.clear();
    reserve(out, list.len())?;
    out.extend_from_slice(list);
    out.sort_unstable();
    match out.windows(2).find(|pair| pair.first() == pair.last()) {
        None => Ok(()),
        Some(pair) => {
            let text = format!("{} is named twice", pair.first().copied().unwrap_or_default());
            out.clear();
            Err(crate::base::status::Error::new(crate::base::status::Status::Invalid, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn naive(scores: &[f32], count: usize, high: bool) -> Vec<u32> {
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        // A stable sort keeps equal scores in the order of their indices.
        order.sort_by(|&a, &b| {
            let (a, b) = (scores[a as usize], scores[b as usize]);
            let (a, b) = if high { (b, a) } else { (a, b) };
            a.partial_cmp(&b).expect("no NaN")
        });
        order.truncate(count);
        order.sort_unstable();
        order
    }

    proptest! {
        #[test]
        fn top_and_bottom_agree_with_a_stable_sort(
            numbers in prop::collection::vec(-6i32..6, 0..400),
            share in 0usize..=400,
            fine in any::<bool>(),
        ) {
            let number = |(at, &n): (usize, &i32)| match fine {
                true => (n * 1000 + at as i32 * 7919 % 1000) as f32,
                // Both zeros are the same score.
                false => n as f32 * if at % 2 == 0 { -1.0 } else { -0.5 },
            };
            let scores: Vec<f32> = numbers.iter().enumerate().map(number).collect();
            let mut ranks = Ranks::default();
            for count in [share, 0, 1, 8, FEW, FEW + 1, scores.len()] {
                let (mut top, mut bottom) = (Vec::new(), Vec::new());
                ranks.top(&scores, count, &mut top).expect("memory");
                ranks.bottom(&scores, count, &mut bottom).expect("memory");
                prop_assert_eq!(&top, &naive(&scores, count, true));
                prop_assert_eq!(&bottom, &naive(&scores, count, false));
                let mut left = Vec::new();
                without(&scores, &bottom, &mut left).expect("memory");
                prop_assert_eq!(left.len(), scores.len() - bottom.len());
            }
        }
    }

    #[test]
    fn scans_find_the_best_in_any_order() {
        let mut ranks = Ranks::default();
        let of = |score: &dyn Fn(usize) -> f32| (0..2000).map(score).collect::<Vec<f32>>();
        for scores in [
            of(&|at| at as f32),
            of(&|at| -(at as f32)),
            // The best scores are as far apart as the lanes of a scan.
            of(&|at| if at % LANES == 7 { 5000.0 - at as f32 } else { (at % 100) as f32 }),
            of(&|_| 3.5),
            of(&|at| [f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0][at * 7 % 4]),
            of(&|_| f32::NEG_INFINITY),
        ] {
            for (count, high) in [1, 3, 8, FEW].into_iter().flat_map(|n| [(n, true), (n, false)]) {
                let mut got = Vec::new();
                match high {
                    true => ranks.top(&scores, count, &mut got).expect("memory"),
                    false => ranks.bottom(&scores, count, &mut got).expect("memory"),
                }
                assert_eq!(got, naive(&scores, count, high), "{count} {high}");
            }
        }
    }

    #[test]
    fn cover_and_reach_follow_their_definition() {
        let scores = [0.125, 0.5, 0.25, 0.125];
        let mut ranks = Ranks::default();
        for (sum, covered, reached) in [
            (0.0, 1, vec![]),
            (0.3, 1, vec![1]),
            (0.5, 2, vec![1]),
            (0.74, 2, vec![1, 2]),
            (0.75, 3, vec![1, 2]),
            (0.8, 3, vec![1, 2, 0]),
            (1.0, 5, vec![1, 2, 0, 3]),
            (2.0, 5, vec![1, 2, 0, 3]),
        ] {
            assert_eq!(ranks.cover(&scores, sum).expect("memory"), covered, "{sum}");
            let got: Vec<u32> = ranks.reach(&scores, sum).expect("memory").collect();
            assert_eq!(got, reached, "{sum}");
        }
        let scores = [0.0, -0.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, 1.0, -0.0];
        let all: Vec<u32> = ranks.descending(&scores).expect("memory").collect();
        assert_eq!(all, [3, 5, 0, 1, 6, 2, 4], "both zeros are the same score");
    }

    #[test]
    fn without_removes_indices_and_ascending_finds_duplicates() {
        let mut out = vec![9];
        without(&[1, 2, 3, 4, 5], &[0, 3, 4], &mut out).expect("memory");
        assert_eq!(out, [9, 2, 3]);
        assert!(ascending(&[3, 1, 3], &mut out).is_err_and(|e| e.message().contains("3")));
        ascending(&[3, 1, 2], &mut out).expect("distinct");
        assert_eq!(out, [1, 2, 3]);
    }
}
