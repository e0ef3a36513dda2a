//! Attention over some blocks and a tail, with an index that names positions.

use std::collections::BTreeMap;

use kvtier::attention::keys::Heads;
use kvtier::attention::{ColumnSums, Decode, Head, Keys, Kind, Level, Problem};
use kvtier::base::status::Status;
use kvtier::sparse::placement::positions_of;
use kvtier::sparse::{BlockPlacement, Index, ResidentTokens, RetainedTokens};
use proptest::prelude::*;

use crate::attention::data::{Chosen, Data, Random, Type, model};
use crate::attention::prefill::{any_head, problem, run, scale, some};

/// Some blocks of a text, and its tail if that is loaded.
struct Loaded {
    blocks: Vec<u32>,
    block_tokens: u32,
    tail: (u32, u32),
}

impl Loaded {
    /// The queries are the tokens `first..n`: all of them are loaded, or none.
    fn new(random: &mut Random, (first, n): (usize, usize), block: usize) -> Loaded {
        let (own, block_tokens) = (random.below(2) == 0, block as u32);
        // The tail begins anywhere behind blocks that are full.
        let full = random.below((first / block) as u64 + 1) as usize;
        let begin = full * block + random.below((first - full * block) as u64 + 1) as usize;
        let behind = first - begin;
        let tokens = if own { n - begin } else { random.below(behind as u64 + 1) as usize };
        let blocks = some(random, full, 3);
        let blocks = if random.below(3) == 0 { (0..full as u32).collect() } else { blocks };
        Loaded { blocks, block_tokens, tail: (begin as u32, tokens as u32) }
    }

    fn placed(&self) -> BlockPlacement<'_> {
        let (tail_first, tail_tokens) = self.tail;
        BlockPlacement {
            blocks: &self.blocks,
            block_tokens: self.block_tokens,
            tail_first,
            tail_tokens,
        }
    }

    /// Positions by their definition.
    fn positions(&self) -> Vec<u32> {
        let size = self.block_tokens;
        let blocks = self.blocks.iter().flat_map(|&id| id * size..(id + 1) * size);
        blocks.chain(self.tail.0..self.tail.0 + self.tail.1).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn placed_rows_attend_by_position(
        seed in 0_u64..1_000_000,
        s in prop_oneof![Just(1_usize), 2_usize..60],
        first in 1_usize..200,
        block in 1_usize..40,
        group in 1_usize..4,
        query_block in 1_usize..70,
        key_block in 1_usize..50,
        one_in in 1_u64..20,
        per in 0_usize..3,
    ) {
        let mut random = Random::new(seed);
        let (heads, dim, n) = (2 * group, 24, first + s);
        let loaded = Loaded::new(&mut random, (first, n), block);
        let (placed, positions) = (loaded.placed(), loaded.positions());
        placed.check().expect("sound");
        // Nothing loaded is nothing to compute with.
        prop_assume!(!positions.is_empty());
        let rows: BTreeMap<u32, u32> = positions.iter().copied().zip(0..).collect();
        let mut found = vec![9];
        positions_of(&placed, &mut found).expect("memory");
        prop_assert_eq!(&found, &positions);
        prop_assert_eq!(placed.rows() as usize, positions.len());
        for at in 0..n as u32 + 50 {
            prop_assert_eq!(placed.row_of(at), rows.get(&at).copied());
            prop_assert_eq!(placed.position_of(at), positions.get(at as usize).copied());
        }
        let units = [1, 2, heads][per];
        let unit = |head: usize| match per { 0 => 0, 1 => head / group, _ => head };
        let mut chosen = Chosen::default();
        for _ in 0..units {
            // Some heads have the same lists.
            if let (Some(&head), 0) = (chosen.heads.first(), random.below(4)) {
                chosen.heads.push(head);
                continue;
            }
            let (head, lists) =
                any_head(&mut random, (first, s, n), (query_block, key_block), one_in);
            chosen = chosen.head(head, &lists);
        }
        let of = Heads { queries: heads as u32, keys: 2 };
        let mut index = Index::default();
        let asked = (first as u32, s as u32);
        let row = placed.index(&chosen.keys(), of, asked, &mut index).expect("sound");
        prop_assert_eq!(row as usize, positions.partition_point(|&at| at < first as u32));
        index.keys().check(of, row, s as u32).expect("kernels follow it");
        // Everywhere, by the definitions of both.
        for at in 0..index.heads.len() {
            for query in 0..s {
                for (key, &position) in (0..).zip(&positions) {
                    let of = row + query as u32;
                    let is_before = position as usize <= first + query;
                    let want = is_before && chosen.sees(at, first, query, position as usize);
                    prop_assert_eq!(index.sees(at as u32, row, of, key), want, "{:?}", chosen.heads);
                }
            }
        }
        // And by kernels.
        let q = Data::new(&mut random, (s, heads, dim), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, 2, dim), Type::F32, 0, 0);
        let v = Data::new(&mut random, (n, 2, 20), Type::F32, 0, 0);
        let sees = |query: usize, head: usize, key: usize| {
            rows.contains_key(&(key as u32)) && chosen.sees(unit(head), first, query, key)
        };
        let want = model(&q, &k, (&v, 20), first, scale(dim), sees);
        let (keys, values) = (k.picked(&positions), v.picked(&positions));
        let here = problem(&q, &keys, &values, row as usize);
        let here = Problem { select: index.keys(), ..here };
        let (out, lse) = run(here, Level::best());
        want.check(&out, &lse, &format!("{:?}", chosen.heads));
        let mut there = vec![0.0; heads * n];
        let all = ResidentTokens { retained: None, from: 0, tokens: n as u32, heads: of };
        let mut sums = vec![0.0; heads * positions.len()];
        let mut job = ColumnSums::new(here, &lse, 0, true, &mut sums).expect("sound");
        job.all(&mut vec![0.0; job.scratch()]).expect("enough scratch");
        all.add(&sums, &positions, &mut there).expect("all are loaded");
        let check_close = |got: &[f32]| {
            for head in 0..heads {
                for key in 0..n {
                    let sum: f64 = (0..s).map(|q| want.shares[(q * heads + head) * n + key]).sum();
                    let got = f64::from(got[head * n + key]);
                    prop_assert!((got - sum).abs() <= 2e-4 * sum + 1e-9, "{} {}", got, sum);
                }
            }
            Ok(())
        };
        check_close(&there)?;
        if s == 1 {
            let (mut out, mut lse) = (vec![0.0; heads * 20], vec![0.0; heads]);
            let mut memory = vec![0.0; Decode::memory(&here, true).expect("decode follows it")];
            let mut job = Decode::new(here, &mut out, &mut lse, &mut memory, true).expect("sound");
            job.all(&mut vec![0.0; job.scratch()]).expect("enough scratch");
            let count = |head: usize| positions.iter().filter(|&&at| sees(0, head, at as usize)).count();
            let most = (0..heads).map(count).max().expect("heads");
            let mut sums = vec![0.0; heads * most];
            job.sums(true, &mut sums).expect("kept");
            there.fill(0.0);
            let asked = (&index.keys(), row, 1);
            all.add_selected(&sums, asked, &placed, &mut there).expect("all are loaded");
            check_close(&there)?;
            // Only what was seen has stayed, and the query's own token.
            let mut keep = RetainedTokens::default();
            let seen: Vec<Vec<u32>> = (0..heads)
                .map(|head| (0..first as u32).filter(|&at| sees(0, head, at as usize)).collect())
                .collect();
            let same = seen.iter().map(Vec::len).min().unwrap_or(0);
            if seen.iter().all(|list| list.len() == same) {
                seen.iter().for_each(|list| keep.heads.push(list.iter().copied()));
                let kept = ResidentTokens { retained: Some(&keep), from: first as u32, ..all };
                let mut found = vec![0.0; heads * (same + 1)];
                kept.add_selected(&sums, asked, &placed, &mut found).expect("all are loaded");
                for (head, (found, list)) in found.chunks(same + 1).zip(&seen).enumerate() {
                    let at = list.iter().map(|&at| there[head * n + at as usize]);
                    prop_assert!(at.chain([there[head * n + first]]).eq(found.iter().copied()));
                }
            }
            want.check(&out, &lse, "decode");
        }
    }
}

#[test]
fn unordered_placement_is_rejected() {
    let good = BlockPlacement { blocks: &[1, 4], block_tokens: 16, tail_first: 80, tail_tokens: 9 };
    let heads = Heads { queries: 2, keys: 1 };
    let ask = |placed: &BlockPlacement<'_>, first: u32| {
        let mut index = Index::default();
        placed.index(&Keys::DENSE, heads, (first, 3), &mut index).map_err(|error| error.status())
    };
    assert_eq!((ask(&good, 86), ask(&good, 89), ask(&good, 500)), (Ok(38), Ok(41), Ok(41)));
    // From its block on nothing is missing.
    assert_eq!((ask(&good, 64), ask(&good, 70), ask(&good, 80)), (Ok(16), Ok(22), Ok(32)));
    assert_eq!((ask(&good, 63), ask(&good, 20)), (Err(Status::Invalid), Err(Status::Invalid)));
    let big = 1 << 30;
    for (bad, status) in [
        (BlockPlacement { blocks: &[4, 1], ..good }, Status::Invalid),
        (BlockPlacement { blocks: &[4, 4], ..good }, Status::Invalid),
        (BlockPlacement { block_tokens: 0, ..good }, Status::Invalid),
        (BlockPlacement { tail_first: 79, ..good }, Status::Invalid),
        (BlockPlacement { tail_first: big, ..good }, Status::Limit),
        (BlockPlacement { tail_first: u32::MAX, tail_tokens: u32::MAX, ..good }, Status::Limit),
        (BlockPlacement { blocks: &[u32::MAX], tail_tokens: 0, ..good }, Status::Limit),
        (
            BlockPlacement { blocks: &[1], block_tokens: u32::MAX, tail_tokens: 0, ..good },
            Status::Limit,
        ),
    ] {
        assert_eq!(ask(&bad, 86), Err(status), "{bad:?}");
    }
    // Lists that are none.
    let head = [Head { kind: Kind::Blocks, lists: 1, key_block: 4, ..Head::DENSE }];
    let mut index = Index::default();
    let bad = Keys { heads: &head, starts: &[0, 2], items: &[5, 5] };
    assert!(good.index(&bad, heads, (86, 3), &mut index).is_err());
}
