//! Keys in pieces, each with its first position.

use kvtier::attention::{ColumnSums, Decode, Level, Prefill, Problem, merge};
use proptest::prelude::*;

use crate::attention::data::{Chosen, Data, Model, Random, TYPES, Type, model};
use crate::attention::prefill::{any_head, levels, problem, run, scale, some};

/// The keys from one on, before another, as a piece.
fn piece<'a>(whole: &Problem<'a>, k: &'a Data, v: &'a Data, from: usize, to: usize) -> Problem<'a> {
    Problem {
        keys: k.part(from, to - from, k.dim),
        values: v.part(from, to - from, v.dim),
        first_key: from as u32,
        ..*whole
    }
}

/// Where pieces begin, and the end.
fn cuts(random: &mut Random, n: usize, most: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = (0..most).map(|_| random.below(n as u64 + 1) as usize).collect();
    cuts.extend([0, n]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// Merging adds to the bound what parts have.
fn wider(mut want: Model, pieces: usize) -> Model {
    want.bound.iter_mut().for_each(|bound| *bound *= 1.0 + pieces as f64);
    want
}

fn sums(problem: Problem<'_>, lse: &[f32], level: Level) -> Vec<f32> {
    let numbers = problem.queries.heads() as usize * problem.keys.tokens() as usize;
    let mut sums = vec![f32::NAN; numbers];
    let mut job =
        ColumnSums::new(problem, lse, 0, true, &mut sums).expect("sound").with_level(level);
    let mut memory = vec![f32::NAN; job.scratch()];
    job.all(&mut memory).expect("enough scratch");
    sums
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn merged_key_pieces_match_the_definition(
        seed in 0_u64..1_000_000,
        s in 1_usize..150,
        first in 0_usize..200,
        behind in 0_usize..40,
        missing in 0_usize..20,
        group in 1_usize..4,
        query_block in 1_usize..150,
        key_block in 1_usize..100,
        one_in in 1_u64..40,
        per in 0_usize..3,
        most in 0_usize..6,
    ) {
        let mut random = Random::new(seed);
        let heads = group * 2;
        // Keys may end before the last query, or begin behind the first.
        let (n, dim) = ((first + s + behind).saturating_sub(missing).max(1), 24);
        let kind = TYPES[seed as usize % 5];
        let q = Data::new(&mut random, (s, heads, dim), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, 2, dim), kind, 0, 0);
        let v = Data::new(&mut random, (n, 2, 20), kind, 0, 0);
        let units = [1, 2, heads][per];
        let unit = |head: usize| match per { 0 => 0, 1 => head / group, _ => head };
        let level = levels().nth(seed as usize / 5 % levels().count()).expect("a level");
        let mut chosen = Chosen::default();
        for _ in 0..units {
            let (head, lists) =
                any_head(&mut random, (first, s, n), (query_block, key_block), one_in);
            chosen = chosen.head(head, &lists);
        }
        let whole = Problem { select: chosen.keys(), ..problem(&q, &k, &v, first) };
        let cuts = cuts(&mut random, n, most);
        let pieces: Vec<Problem<'_>> =
            cuts.windows(2).map(|cut| piece(&whole, &k, &v, cut[0], cut[1])).collect();
        let (mut out, mut lse) = run(pieces[0], level);
        for (other, cut) in pieces[1..].iter().zip(&cuts[1..]) {
            let (other, of) = run(*other, level);
            let before = cut.saturating_sub(first).min(s) * heads;
            prop_assert!(of[..before].iter().all(|&x| x == f32::NEG_INFINITY));
            prop_assert!(other[..before * 20].iter().all(|&x| x == 0.0));
            merge(&mut out, &mut lse, &other, &of).expect("same sizes");
        }
        let sees = |query: usize, head: usize, key: usize| chosen.sees(unit(head), first, query, key);
        let want = model(&q, &k, (&v, 20), first, scale(dim), sees);
        let want = wider(want, pieces.len() - 1);
        want.check(&out, &lse, &format!("{:?} {cuts:?}", chosen.heads));
        // By the merged log-sum-exps each piece says what its keys got of all.
        let got: Vec<Vec<f32>> = pieces.iter().map(|p| sums(*p, &lse, level)).collect();
        for head in 0..heads {
            for (got, cut) in got.iter().zip(cuts.windows(2)) {
                let keys = cut[1] - cut[0];
                for key in cut[0]..cut[1] {
                    let got = f64::from(got[head * keys + key - cut[0]]);
                    let share = |q: usize| want.shares[(q * heads + head) * n + key];
                    let sum: f64 = (0..s).map(share).sum();
                    prop_assert!((got - sum).abs() <= 1e-4 * sum + 1e-9, "{} {} {}", got, sum, key);
                }
            }
        }
    }

    /// Pieces begin anywhere inside blocks and inside the parts of a decode.
    #[test]
    fn merged_decode_pieces_match_the_definition(
        seed in 0_u64..1_000_000,
        queries in 1_usize..4,
        n in 1_usize..3000,
        group in prop_oneof![Just(1_usize), Just(4), Just(40)],
        one_in in 1_u64..20,
        key_block in 1_usize..300,
        most in 0_usize..4,
    ) {
        let mut random = Random::new(seed);
        let (heads, dim) = (group, 20);
        let kind = TYPES[seed as usize % 5];
        let q = Data::new(&mut random, (queries, heads, dim), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, 1, dim), kind, 0, 0);
        let v = Data::new(&mut random, (n, 1, 12), kind, 0, 0);
        let first = n.saturating_sub(queries);
        let level = levels().nth(seed as usize / 5 % levels().count()).expect("a level");
        let list = some(&mut random, n / key_block + 2, one_in.min(6));
        let is_dense = seed % 6 == 0;
        let chosen = Chosen::blocks(0, key_block, 1, std::slice::from_ref(&list));
        let select = if is_dense { Chosen::default() } else { chosen };
        let sees = |key: usize| is_dense || list.binary_search(&((key / key_block) as u32)).is_ok();
        let whole = Problem { select: select.keys(), ..problem(&q, &k, &v, first) };
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        let mut got: Vec<Vec<(f32, f32)>> = vec![Vec::new(); heads];
        let cuts = cuts(&mut random, n, most);
        for cut in cuts.windows(2) {
            let piece = piece(&whole, &k, &v, cut[0], cut[1]);
            let (mut a, mut b) = (vec![f32::NAN; queries * heads * 12], vec![f32::NAN; queries * heads]);
            let mut memory = vec![f32::NAN; Decode::memory(&piece, true).expect("a size")];
            let job = Decode::new(piece, &mut a, &mut b, &mut memory, true);
            let mut job = job.expect("sound").with_level(level);
            let mut scratch = vec![f32::NAN; job.scratch()];
            job.all(&mut scratch).expect("enough scratch");
            let end = cut[1].min(first + queries).max(cut[0]);
            let keys = (cut[0]..end).filter(|&key| sees(key)).count();
            let mut shares = vec![0.0; heads * keys];
            job.sums(true, &mut shares).expect("as many as are seen");
            for (head, got) in got.iter_mut().enumerate() {
                got.extend(shares[head * keys..][..keys].iter().map(|&share| (share, b[head])));
            }
            if out.is_empty() {
                (out, lse) = (a, b);
            } else {
                merge(&mut out, &mut lse, &a, &b).expect("same sizes");
            }
        }
        let want = model(&q, &k, (&v, 12), first, scale(dim), |_, _, key| sees(key));
        let want = wider(want, cuts.len() - 2);
        want.check(&out, &lse, &format!("{cuts:?}"));
        if queries == 1 {
            for (head, got) in got.iter().enumerate() {
                let keys: Vec<usize> = (0..n).filter(|&key| sees(key)).collect();
                prop_assert_eq!(got.len(), keys.len());
                for (&(share, of), key) in got.iter().zip(keys) {
                    let got = f64::from(share) * (f64::from(of) - f64::from(lse[head])).exp();
                    let want = want.shares[head * n + key];
                    prop_assert!((got - want).abs() <= 2e-4 * want + 1e-9, "{} {}", got, want);
                }
            }
        }
    }

    /// A piece equals a whole of which nothing before the piece is selected, and a shorter
    /// text if all is selected.
    #[test]
    fn key_piece_is_bit_identical_to_a_whole(
        seed in 0_u64..1_000_000,
        s in 1_usize..150,
        before in 0_usize..150,
        cut in 1_usize..200,
        one_in in 1_u64..6,
        query_block in 1_usize..100,
    ) {
        let mut random = Random::new(seed);
        let (first, n) = (cut + before, cut + before + s);
        let q = Data::new(&mut random, (s, 2, 32), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, 2, 32), Type::Bf16, 0, 0);
        let v = Data::new(&mut random, (n, 2, 32), Type::Bf16, 0, 0);
        let dense = problem(&q, &k, &v, first);
        let rows = s.div_ceil(query_block);
        let lists: Vec<Vec<u32>> = (0..rows).map(|_| some(&mut random, n, one_in)).collect();
        let local: Vec<Vec<u32>> = lists
            .iter()
            .map(|list| list.iter().copied().filter(|&key| key >= cut as u32).collect())
            .collect();
        let all = Chosen::blocks(query_block, 1, rows, &lists);
        let local = Chosen::blocks(query_block, 1, rows, &local);
        for level in levels() {
            let part = piece(&dense, &k, &v, cut, n);
            let alone = Problem { first_key: 0, first_query: before as u32, ..part };
            let got = run(part, level);
            prop_assert_eq!(&got, &run(alone, level));
            prop_assert_eq!(sums(part, &got.1, level), sums(alone, &got.1, level));
            let got = run(Problem { select: all.keys(), ..part }, level);
            let whole = Problem { select: local.keys(), ..dense };
            prop_assert_eq!(&got, &run(whole, level));
            let all = sums(Problem { select: all.keys(), ..part }, &got.1, level);
            let whole = sums(whole, &got.1, level);
            for head in 0..2 {
                let local = |key: usize| f64::from(whole[head * n + cut + key]);
                for key in 0..n - cut {
                    let got = f64::from(all[head * (n - cut) + key]);
                    prop_assert!((got - local(key)).abs() <= 1e-4 * local(key), "{}", got);
                }
            }
        }
    }
}

#[test]
fn key_pieces_end_at_valid_positions() {
    let mut random = Random::new(11);
    let q = Data::new(&mut random, (2, 2, 16), Type::F32, 0, 0);
    let k = Data::new(&mut random, (8, 2, 16), Type::F32, 0, 0);
    let last = Problem { first_key: (1 << 30) - 8, ..problem(&q, &k, &k, (1 << 30) - 2) };
    last.check().expect("the last that there may be");
    let (out, lse) = run(last, Level::best());
    let (want, of) = run(problem(&q, &k, &k, 6), Level::best());
    assert_eq!((out, lse), (want, of));
    for first_key in [(1 << 30) - 7, u32::MAX] {
        let mut out = [0.0; 64];
        assert!(Prefill::new(Problem { first_key, ..last }, &mut out, None).is_err());
    }
}
