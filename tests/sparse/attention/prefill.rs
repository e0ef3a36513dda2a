//! Prefill attention, dense and sparse, compared with the definition.

use kvtier::attention::{Head, Keys, Kind, Level, Prefill, Problem, merge};
use proptest::prelude::*;

use crate::attention::data::{Chosen, Data, Random, TYPES, Type, model};

/// Result of a prefill at a level.
pub fn run(problem: Problem<'_>, level: Level) -> (Vec<f32>, Vec<f32>) {
    let rows = (problem.queries.tokens() * problem.queries.heads()) as usize;
    let mut out = vec![f32::NAN; rows * problem.values.dim() as usize];
    let mut lse = vec![f32::NAN; rows];
    let mut job = Prefill::new(problem, &mut out, Some(&mut lse)).expect("sound").with_level(level);
    let mut memory = vec![f32::NAN; job.scratch()];
    job.all(&mut memory).expect("enough scratch");
    (out, lse)
}

pub fn levels() -> impl Iterator<Item = Level> {
    Level::ALL.into_iter().filter(|level| level.is_supported())
}

pub fn problem<'a>(q: &'a Data, k: &'a Data, v: &'a Data, first_query: usize) -> Problem<'a> {
    Problem {
        queries: q.rows(),
        keys: k.rows(),
        values: v.rows(),
        first_key: 0,
        first_query: first_query as u32,
        scale: 0.0,
        select: Keys::DENSE,
    }
}

pub fn scale(dim: usize) -> f64 {
    1.0 / (dim as f64).sqrt()
}

#[test]
fn dense_prefill_matches_the_definition() {
    let mut random = Random::new(1);
    // queries, first, keys, query heads, key heads, D, Dv, page
    let sizes = [
        (1, 0, 1, 1, 1, 8, 8, 0),
        (70, 0, 70, 4, 2, 64, 64, 16),
        (33, 100, 133, 2, 1, 128, 128, 7),
        (65, 3, 200, 3, 3, 33, 17, 0),
        (20, 50, 30, 2, 2, 80, 40, 5),
        (5, 300, 305, 6, 2, 1, 3, 0),
    ];
    for (s, first, n, heads, key_heads, dim, value_dim, page) in sizes {
        for kind in TYPES {
            let q_kind = if kind == Type::Bf16 { Type::Bf16 } else { Type::F32 };
            let q = Data::new(&mut random, (s, heads, dim), q_kind, 0, 3);
            let k = Data::new(&mut random, (n, key_heads, dim), kind, page, 0);
            let v = Data::new(&mut random, (n, key_heads, value_dim), kind, page, 1);
            let want = model(&q, &k, (&v, value_dim), first, scale(dim), |_, _, _| true);
            for level in levels() {
                let (out, lse) = run(problem(&q, &k, &v, first), level);
                want.check(&out, &lse, &format!("{kind:?} {level:?} {s}x{n} D {dim}"));
            }
        }
    }
}

#[test]
fn latent_rows_equal_separate_values() {
    let mut random = Random::new(2);
    for page in [0, 16] {
        let q = Data::new(&mut random, (40, 8, 72), Type::F32, 0, 0);
        let rows = Data::new(&mut random, (90, 1, 72), Type::Bf16, page, 0);
        let latent = Problem { values: rows.part(0, 90, 64), ..problem(&q, &rows, &rows, 50) };
        assert!(latent.is_latent());
        let want = model(&q, &rows, (&rows, 64), 50, scale(72), |_, _, _| true);
        for level in levels() {
            let (out, lse) = run(latent, level);
            let dim = 64;
            assert_eq!(out.len(), 40 * 8 * dim);
            want.check(&out, &lse, "latent");
        }
    }
}

#[test]
fn prompt_parts_are_bit_identical_and_key_parts_within_rounding() {
    let mut random = Random::new(3);
    let (n, heads, dim) = (300, 4, 64);
    let q = Data::new(&mut random, (n, heads, dim), Type::F32, 0, 0);
    let k = Data::new(&mut random, (n, 2, dim), Type::F16, 0, 0);
    let v = Data::new(&mut random, (n, 2, dim), Type::F16, 0, 0);
    let want = model(&q, &k, (&v, dim), 0, scale(dim), |_, _, _| true);
    for level in levels() {
        let (whole, whole_lse) = run(problem(&q, &k, &v, 0), level);
        for (from, to) in [(0, 100), (100, 101), (101, 300)] {
            let part =
                Problem { queries: q.part(from, to - from, dim), ..problem(&q, &k, &v, from) };
            let (out, lse) = run(part, level);
            assert_eq!(out, whole[from * heads * dim..to * heads * dim], "{level:?}");
            assert_eq!(lse, whole_lse[from * heads..to * heads]);
        }
        // Keys in two parts; only the queries behind the first see all of it.
        let (second, cut) = (200, 150);
        let queries = q.part(second, n - second, dim);
        let part = |from: usize, to: usize| Problem {
            queries,
            keys: k.part(from, to - from, dim),
            values: v.part(from, to - from, dim),
            ..problem(&q, &k, &v, second - from)
        };
        let (mut out, mut lse) = run(part(0, cut), level);
        let (other, other_lse) = run(part(cut, n), level);
        merge(&mut out, &mut lse, &other, &other_lse).expect("same sizes");
        for (i, (got, want)) in lse.iter().zip(&want.lse[second * heads..]).enumerate() {
            let bound = want.abs() * 2f64.powi(-22) + 2.0 * 1e-4;
            assert!((f64::from(*got) - want).abs() <= bound, "{i}");
        }
        for (got, want) in out.iter().zip(&want.out[second * heads * dim..]) {
            assert!((f64::from(*got) - want).abs() <= 2e-5 * 2.0);
        }
    }
}

#[test]
fn empty_selection_is_zero_and_neutral_in_merge() {
    let mut random = Random::new(4);
    let q = Data::new(&mut random, (3, 2, 16), Type::F32, 0, 0);
    let k = Data::new(&mut random, (9, 1, 16), Type::F32, 0, 0);
    let v = Data::new(&mut random, (9, 1, 16), Type::F32, 0, 0);
    let dense = problem(&q, &k, &v, 6);
    let none = vec![vec![]];
    for select in [
        Chosen::tokens(&none),
        Chosen::lines(&[[vec![], vec![]]]),
        Chosen::blocks(64, 64, 1, &none),
        Chosen::default().head(Head { kind: Kind::Ranges, ..Head::DENSE }, &[vec![], vec![]]),
        // Behind all queries.
        Chosen::tokens(&[vec![9, 4_000_000_000]]),
        Chosen::blocks(64, u32::MAX as usize, 1, &[vec![1, u32::MAX]]),
        Chosen::default().head(
            Head { kind: Kind::Ranges, ..Head::DENSE },
            &[vec![10, u32::MAX], vec![9, u32::MAX]],
        ),
    ] {
        let select = select.keys();
        for level in levels() {
            let (mut out, mut lse) = run(Problem { select, ..dense }, level);
            assert!(out.iter().all(|&x| x == 0.0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));
            let (mut full, mut full_lse) = run(dense, level);
            let kept = (full.clone(), full_lse.clone());
            merge(&mut full, &mut full_lse, &out, &lse).expect("same sizes");
            assert_eq!((&full, &full_lse), (&kept.0, &kept.1));
            merge(&mut out, &mut lse, &full, &full_lse).expect("same sizes");
            assert_eq!((out, lse), kept);
        }
    }
}

#[test]
fn prefill_items_are_bit_identical_in_any_order() {
    let mut random = Random::new(5);
    let q = Data::new(&mut random, (200, 4, 64), Type::F32, 0, 0);
    let k = Data::new(&mut random, (200, 2, 64), Type::Bf16, 16, 0);
    let v = Data::new(&mut random, (200, 2, 64), Type::Bf16, 16, 0);
    let (want, _) = run(problem(&q, &k, &v, 0), Level::best());
    for threads in [1, 2, 4] {
        let mut out = vec![f32::NAN; want.len()];
        let job = Prefill::new(problem(&q, &k, &v, 0), &mut out, None).expect("sound");
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let job = &job;
                scope.spawn(move || {
                    let mut memory = vec![f32::NAN; job.scratch()];
                    for item in (0..job.items()).rev().filter(|i| i % threads == thread) {
                        // SAFETY: each item has one thread.
                        unsafe { job.run(item, &mut memory) }.expect("an item");
                    }
                });
            }
        });
        assert_eq!(out, want);
    }
}

/// Lists of numbers below `n`, each taken with a chance of one in `one_in`.
pub fn some(random: &mut Random, n: usize, one_in: u64) -> Vec<u32> {
    (0..n as u32).filter(|_| random.below(one_in) == 0).collect()
}

/// Ranges that do not touch.
fn ranges(random: &mut Random, n: usize, one_in: u64) -> Vec<u32> {
    let mut ends = some(random, n, one_in);
    ends.truncate(ends.len() / 2 * 2);
    ends
}

/// A head of any kind for so many rows of queries, with its lists.
pub fn any_head(
    random: &mut Random,
    (first, s, n): (usize, usize, usize),
    (query_block, key_block): (usize, usize),
    one_in: u64,
) -> (Head, Vec<Vec<u32>>) {
    let head = Head {
        query_block: query_block as u32,
        key_block: key_block as u32,
        dense_from: match random.below(3) {
            0 => (first as u64 + random.below(s as u64 + 2)) as u32,
            _ => Head::DENSE.dense_from,
        },
        ..Head::DENSE
    };
    // Rows that see all need no list.
    let needed = s.min((head.dense_from as usize).saturating_sub(first));
    let rows = needed.div_ceil(query_block) as u64;
    match random.below(5) {
        0 => (Head::DENSE, vec![]),
        1 => {
            let lines = vec![some(random, n + 5, one_in), some(random, first + s + 50, one_in)];
            (Head { kind: Kind::Lines, ..head }, lines)
        }
        2 => {
            let blocks = (0..rows).map(|_| some(random, (n + 100) / key_block, one_in.min(4)));
            (Head { kind: Kind::Blocks, ..head }, blocks.collect())
        }
        3 => {
            let tokens = vec![some(random, n + 5, one_in)];
            (Head { kind: Kind::Blocks, query_block: 0, key_block: 1, ..head }, tokens)
        }
        _ => {
            let mut lists = vec![some(random, n + 5, one_in)];
            lists.extend((0..rows).map(|_| ranges(random, n + 5, one_in)));
            (Head { kind: Kind::Ranges, ..head }, lists)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Each head has its own selection.
    #[test]
    fn sparse_prefill_matches_the_definition(
        seed in 0_u64..1_000_000,
        s in 1_usize..150,
        first in 0_usize..200,
        missing in 0_usize..20,
        group in 1_usize..4,
        key_heads in 1_usize..3,
        query_block in 1_usize..150,
        key_block in 1_usize..100,
        one_in in 1_u64..40,
        per in 0_usize..3,
    ) {
        let mut random = Random::new(seed);
        let heads = group * key_heads;
        let (n, dim) = ((first + s).saturating_sub(missing).max(1), 24);
        let kind = TYPES[seed as usize % 5];
        let q = Data::new(&mut random, (s, heads, dim), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, key_heads, dim), kind, 16, 0);
        let v = Data::new(&mut random, (n, key_heads, 20), kind, 16, 0);
        let units = [1, key_heads, heads][per];
        let unit = |head: usize| match per { 0 => 0, 1 => head / group, _ => head };
        let level = levels().nth(seed as usize / 5 % levels().count()).expect("a level");
        let mut chosen = Chosen::default();
        for _ in 0..units {
            let (head, lists) =
                any_head(&mut random, (first, s, n), (query_block, key_block), one_in);
            chosen = chosen.head(head, &lists);
        }
        let (out, lse) = run(Problem { select: chosen.keys(), ..problem(&q, &k, &v, first) }, level);
        let sees = |query: usize, head: usize, key: usize| chosen.sees(unit(head), first, query, key);
        let want = model(&q, &k, (&v, 20), first, scale(dim), sees);
        want.check(&out, &lse, &format!("{:?}", chosen.heads));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The tiles are the same, so the bits are.
    #[test]
    fn full_selection_is_bit_identical_to_dense(
        seed in 0_u64..1_000_000,
        s in 1_usize..150,
        first in 0_usize..200,
        key_block in 1_usize..100,
        query_block in 1_usize..100,
        cut in 0_usize..400,
    ) {
        let mut random = Random::new(seed);
        let n = first + s;
        let q = Data::new(&mut random, (s, 2, 32), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, 2, 32), Type::F32, 0, 0);
        let v = Data::new(&mut random, (n, 2, 32), Type::F32, 0, 0);
        let dense = problem(&q, &k, &v, first);
        let all: Vec<u32> = (0..n as u32).collect();
        let rows = s.div_ceil(query_block);
        let blocks = vec![(0..n.div_ceil(key_block) as u32).collect(); rows];
        // Up to the cut by ranges, behind it by columns; some rows see all whatever is said.
        let cut = cut.min(n) as u32;
        let behind: Vec<u32> = (cut..n as u32).collect();
        let before = if cut > 0 { vec![0, cut] } else { vec![] };
        let two = [behind, before];
        let dense_from = (first + s / 2) as u32;
        let none = Head { kind: Kind::Lines, dense_from, ..Head::DENSE };
        for level in levels() {
            let want = run(dense, level);
            for chosen in [
                Chosen::tokens(std::slice::from_ref(&all)),
                Chosen::blocks(query_block, key_block, rows, &blocks),
                Chosen::lines(&[[all.clone(), vec![]]]),
                Chosen::lines(&[[vec![], all.clone()]]),
                Chosen::default().head(Head { kind: Kind::Ranges, ..Head::DENSE }, &two),
            ] {
                prop_assert_eq!(&run(Problem { select: chosen.keys(), ..dense }, level), &want);
            }
            let nothing = Chosen::default().head(none, &[vec![], vec![]]);
            let got = run(Problem { select: nothing.keys(), ..dense }, level);
            let from = s / 2 * 2;
            prop_assert_eq!(&got.0[from * 32..], &want.0[from * 32..]);
            prop_assert!(got.0[..from * 32].iter().all(|&x| x == 0.0));
        }
    }
}
