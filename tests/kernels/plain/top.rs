//! The largest numbers of each row.

use kvtier::device::call::{Call, Kind};
use kvtier::sparse::ranks::Ranks;
use proptest::prelude::*;

use super::{Chance, at, run, to};

const NONE: u32 = u32::MAX;

/// Rows of scores, and what is wanted of them.
#[derive(Clone, Debug)]
struct Asked {
    queries: usize,
    heads: usize,
    key_heads: usize,
    count: usize,
    keep: usize,
    sinks: usize,
    recent: usize,
    flags: u32,
}

impl Asked {
    fn lists(&self) -> (usize, usize) {
        let each = match self.flags & 3 {
            1 => self.key_heads,
            2 => 1,
            _ => self.heads,
        };
        (if self.flags & 8 != 0 { 1 } else { self.queries }, each)
    }

    fn find(&self, scores: &[f32]) -> (Vec<Vec<u32>>, Vec<u32>) {
        let (queries, each) = self.lists();
        let lists = queries * each;
        let step = self.keep + 3;
        let (mut index, mut counts) = (vec![7_u32; lists * step], vec![7_u32; lists]);
        let mut scratch = vec![0.0_f32; lists * self.count + 1];
        // At a multiple of 8.
        let place = to(&mut scratch).next_multiple_of(8);
        let is_joined = self.flags & 11 != 0;
        run(&Call {
            kind: Kind::Top as u32,
            numbers: at(scores),
            query_count: self.queries as u32,
            query_heads: self.heads as u32,
            key_heads: if self.flags & 1 != 0 { self.key_heads as u32 } else { 0 },
            count: self.count as u32,
            keep: self.keep as u32,
            sinks: self.sinks as u32,
            recent: self.recent as u32,
            flags: self.flags,
            index: to(&mut index),
            out_stride: 4 * step as i64,
            counts: to(&mut counts),
            scratch: if is_joined { place } else { 0 },
            scratch_bytes: if is_joined { 4 * (lists * self.count) as u64 } else { 0 },
            ..Call::default()
        });
        let lists = index.chunks_exact(step).map(|list| {
            assert_eq!(list[self.keep..], [7; 3], "behind a list");
            list[..self.keep].to_vec()
        });
        (lists.collect(), counts)
    }

    /// Scores of the lists.
    fn joined(&self, scores: &[f32]) -> Vec<Vec<f32>> {
        let (_, each) = self.lists();
        let group = self.heads / each;
        let higher = |a: f32, b: f32| if b > a || a.is_nan() { b } else { a };
        let of = |query: usize, list: usize, column: usize| {
            let head =
                |h: usize| scores[(query * self.heads + list * group + h) * self.count + column];
            let first = head(0);
            match self.flags & 4 {
                0 => (1..group).map(head).fold(first, higher),
                _ => (1..group).map(head).fold(first, |a, b| a + b) / group as f32,
            }
        };
        let rows = |query: usize| {
            (0..each).map(move |list| (0..self.count).map(|c| of(query, list, c)).collect())
        };
        let all = (0..self.queries).map(|query| rows(query).collect::<Vec<Vec<f32>>>());
        if self.flags & 8 == 0 {
            return all.flatten().collect();
        }
        all.reduce(|a, b| {
            let both = |(a, b): (Vec<f32>, Vec<f32>)| {
                a.into_iter().zip(b).map(|(a, b)| higher(a, b)).collect()
            };
            a.into_iter().zip(b).map(both).collect()
        })
        .expect("a query")
    }

    fn wanted(&self, row: &[f32]) -> Vec<u32> {
        let mut order: Vec<u32> = (0..row.len() as u32).collect();
        let rank = |&i: &u32| {
            let i = i as usize;
            match () {
                () if i < self.sinks || i + self.recent >= row.len() => (0, 0.0),
                () if row[i].is_nan() => (2, 0.0),
                () => (1, -row[i]),
            }
        };
        // A stable sort leaves equal ones in their order.
        order.sort_by(|a, b| rank(a).partial_cmp(&rank(b)).expect("numbers"));
        order.truncate(self.keep);
        order.sort_unstable();
        order.resize(self.keep, NONE);
        order
    }

    fn check(&self, scores: &[f32]) {
        let (lists, counts) = self.find(scores);
        let rows = self.joined(scores);
        assert_eq!(lists.len(), rows.len());
        for ((list, row), count) in lists.iter().zip(rows).zip(counts) {
            assert_eq!(*list, self.wanted(&row), "{self:?}");
            assert_eq!(count as usize, self.keep.min(self.count));
        }
    }
}

fn one_row(count: usize, keep: usize) -> Asked {
    Asked { queries: 1, heads: 1, key_heads: 1, count, keep, sinks: 0, recent: 0, flags: 0 }
}

fn asked() -> impl Strategy<Value = Asked> {
    let heads = (1_usize..4, 1_usize..4);
    let flags = prop::sample::select(vec![0_u32, 1, 2, 5, 6, 8, 9, 10, 13, 14]);
    let count = prop_oneof![1_usize..40, 1_usize..700, 4000_usize..9000];
    (1_usize..4, heads, count, 1_usize..300, 0_usize..4, 0_usize..4, flags).prop_map(
        |(queries, (key_heads, group), count, keep, sinks, recent, flags)| {
            let keep = keep.max(sinks + recent);
            Asked {
                queries,
                heads: key_heads * group,
                key_heads,
                count,
                keep,
                sinks,
                recent,
                flags,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn top_k_of_random_rows(asked in asked(), kinds in 1_u64..5, seed in any::<u64>()) {
        let mut chance = Chance::new(seed);
        let special = [f32::NAN, 0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1e-40, 2.5];
        let scores: Vec<f32> = (0..asked.queries * asked.heads * asked.count)
            .map(|_| match (kinds, chance.word() % 8) {
                (1, _) => chance.number(),
                (2, _) => (chance.word() % 5) as f32 - 2.0,
                (3, 0) => special[(chance.word() % 7) as usize],
                (3, _) => 1.0 + chance.number() / 1e6,
                _ => 1.5,
            })
            .collect();
        asked.check(&scores);
    }
}

#[test]
fn top_k_matches_the_cpu() {
    let mut chance = Chance::new(3);
    for (count, keep) in [(100_000, 5000), (70_000, 65_536), (4096, 4096), (4097, 4096), (5, 9)] {
        // Many are equal, and zeros of both signs are among those that are left out.
        let zero = [0.0, -0.0];
        let mut scores: Vec<f32> =
            (0..count).map(|_| (chance.number() * 3000.0).round() / 8.0).collect();
        if count == 100_000 {
            scores
                .iter_mut()
                .for_each(|x| *x = if *x > 374.0 { *x } else { zero[chance.word() as usize % 2] });
        }
        let mut wanted = Vec::new();
        Ranks::default().top(&scores, keep, &mut wanted).expect("memory");
        wanted.resize(keep, NONE);
        let (lists, _) = one_row(count, keep).find(&scores);
        assert_eq!(lists, [wanted], "{keep} of {count}");
    }
}
