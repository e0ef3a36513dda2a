//! Scratch memory of the largest job suffices for all jobs.

use kvtier::attention::{ColumnSums, Decode, Limits, Prefill, Problem};
use proptest::prelude::*;

use crate::attention::data::{Chosen, Data, Random, TYPES, Type};
use crate::attention::prefill::{any_head, problem};

/// Requirements of a problem: memory of a decode, and scratch of all three.
fn needed(problem: Problem<'_>, keeps_scores: bool) -> (Option<(usize, usize)>, usize, usize) {
    let rows = (problem.queries.tokens() * problem.queries.heads()) as usize;
    let mut out = vec![0.0; rows * problem.values.dim() as usize];
    let mut lse = vec![0.0; rows];
    let mut sums = vec![0.0; problem.keys.tokens() as usize];
    let prefill = Prefill::new(problem, &mut out, None).expect("sound").scratch();
    let columns = ColumnSums::new(problem, &lse, 0, false, &mut sums).expect("sound").scratch();
    // Not all forms are a decode's.
    let decode = Decode::memory(&problem, keeps_scores).ok().map(|size| {
        let mut memory = vec![0.0; size];
        let job = Decode::new(problem, &mut out, &mut lse, &mut memory, keeps_scores);
        (size, job.expect("sound").scratch())
    });
    (decode, prefill, columns)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn scratch_of_the_largest_job_suffices_for_all(
        seed in 0_u64..1_000_000,
        most in (1_u32..40, 1_u32..2500, 1_u32..20, 1_u32..40, 1_u32..40, 0_u32..3000),
        what in 0_usize..4,
    ) {
        let mut random = Random::new(seed);
        let (queries, keys, query_heads, dim, value_dim, ahead) = most;
        let tokens = queries.max(keys) + ahead;
        let keeps_scores = seed % 2 == 0;
        let limits = Limits { queries, keys, tokens, query_heads, dim, value_dim, keeps_scores };
        let mut up_to = |most: u32| match random.below(3) {
            0 => most as usize,
            _ => 1 + random.below(most.into()) as usize,
        };
        let (s, n, dim, value_dim) = (up_to(queries), up_to(keys), up_to(dim), up_to(value_dim));
        let key_heads = up_to(query_heads);
        let group = up_to(query_heads / key_heads as u32);
        let heads = key_heads * group;
        let first = up_to(tokens - s as u32 + 1) - 1;
        let kind = TYPES[seed as usize % 5];
        let q = Data::new(&mut random, (s, heads, dim), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, key_heads, dim), kind, 0, 0);
        let v = Data::new(&mut random, (n, key_heads, value_dim), kind, 0, 0);
        let units = [0, 1, key_heads, heads][what];
        let mut chosen = Chosen::default();
        for _ in 0..units {
            let blocks = (1 + random.below(60) as usize, 1 + random.below(60) as usize);
            let (head, lists) = any_head(&mut random, (first, s, n), blocks, 30);
            chosen = chosen.head(head, &lists);
        }
        let small = Problem { select: chosen.keys(), ..problem(&q, &k, &v, first) };
        let decode = Decode::workspace(&limits).expect("sound");
        let prefill = Prefill::workspace(&limits).expect("sound");
        let columns = ColumnSums::workspace(&limits).expect("sound");
        prop_assert_eq!((prefill.memory, columns.memory), (0, 0));
        let needed = needed(small, keeps_scores);
        let (memory, scratch) = needed.0.unwrap_or_default();
        prop_assert!(memory <= decode.memory && scratch <= decode.scratch, "{:?}", limits);
        prop_assert!(needed.1 <= prefill.scratch && needed.2 <= columns.scratch, "{:?}", limits);
    }
}

#[test]
fn largest_job_needs_all_its_scratch() {
    let mut random = Random::new(3);
    let (s, n, dim) = (3, 2100, 40);
    let limits = Limits {
        queries: s as u32,
        keys: n as u32,
        tokens: n as u32,
        query_heads: 4,
        dim: dim as u32,
        value_dim: dim as u32,
        keeps_scores: true,
    };
    let q = Data::new(&mut random, (s, 4, dim), Type::F32, 0, 0);
    let k = Data::new(&mut random, (n, 4, dim), Type::F32, 0, 0);
    let dense = problem(&q, &k, &k, n - s);
    let (decode, ..) = needed(dense, true);
    let got = Decode::workspace(&limits).expect("sound");
    assert_eq!(decode.expect("a decode").0, got.memory);
    let lines = Chosen::lines(&[[vec![0], vec![0]]]);
    let (_, prefill, columns) = needed(Problem { select: lines.keys(), ..dense }, true);
    assert_eq!(prefill, Prefill::workspace(&limits).expect("sound").scratch);
    assert_eq!(columns, ColumnSums::workspace(&limits).expect("sound").scratch);
    let without = Decode::workspace(&Limits { keeps_scores: false, ..limits }).expect("sound");
    assert_eq!(needed(dense, false).0.expect("a decode").0, without.memory);
    for bad in [
        Limits { queries: 0, ..limits },
        Limits { keys: 0, ..limits },
        Limits { tokens: 2, ..limits },
        Limits { tokens: (1 << 30) + 1, ..limits },
        Limits { query_heads: 0, ..limits },
        Limits { query_heads: u32::MAX / 3 + 1, ..limits },
        Limits { dim: 2049, ..limits },
        Limits { value_dim: 0, ..limits },
    ] {
        assert!(Decode::workspace(&bad).is_err() && Prefill::workspace(&bad).is_err(), "{bad:?}");
        assert!(ColumnSums::workspace(&bad).is_err());
    }
    // More than there is memory, but no more than can be counted.
    let huge =
        Limits { queries: 1 << 20, keys: 1 << 30, tokens: 1 << 30, query_heads: 64, ..limits };
    let got = Decode::workspace(&huge).map(|got| got.memory as u64);
    assert!(got.is_ok_and(|got| got > 1 << 55));
    let more = Limits { queries: 1 << 24, query_heads: 255, dim: 2048, value_dim: 2048, ..huge };
    assert!(Decode::workspace(&more).is_err());
}
