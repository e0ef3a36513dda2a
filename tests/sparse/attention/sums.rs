//! Column sums of attention, and non-finite numbers.

use kvtier::attention::{
    ColumnSums, Head, Keys, Kind, Level, Prefill, Problem, check_finite, merge,
};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use proptest::prelude::*;

use crate::attention::data::{Chosen, Data, Random, TYPES, Type, model};
use crate::attention::prefill::{any_head, levels, problem, run, scale};

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn attention_sums_match_the_probabilities(
        seed in 0_u64..1_000_000,
        s in 1_usize..120,
        before in 0_usize..600,
        missing in 0_usize..20,
        group in 1_usize..4,
        from in 0_usize..100,
        page in 0_usize..20,
    ) {
        let mut random = Random::new(seed);
        let (heads, dim) = (2 * group, 24);
        let n = (before + s).saturating_sub(missing).max(1);
        let kind = TYPES[seed as usize % 5];
        let q = Data::new(&mut random, (s, heads, dim), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, 2, dim), kind, page, 0);
        let v = Data::new(&mut random, (n, 2, 8), kind, page, 0);
        let want = model(&q, &k, (&v, 8), before, scale(dim), |_, _, _| true);
        let from = from.min(s);
        for level in levels() {
            let dense = problem(&q, &k, &v, before);
            let (_, lse) = run(dense, level);
            let mut together = vec![0.0; n];
            for is_by_head in [true, false] {
                let mut sums = vec![f32::NAN; if is_by_head { heads * n } else { n }];
                let job = ColumnSums::new(dense, &lse, from as u32, is_by_head, &mut sums);
                let mut job = job.expect("sound").with_level(level);
                let mut memory = vec![f32::NAN; job.scratch()];
                job.all(&mut memory).expect("enough scratch");
                for (place, &got) in sums.iter().enumerate() {
                    let want = if is_by_head {
                        let share = |q: usize| want.shares[q * heads * n + place];
                        let sum: f64 = (from..s).map(share).sum();
                        together[place % n] += sum;
                        sum
                    } else {
                        together[place]
                    };
                    let is_close = (f64::from(got) - want).abs() <= 1e-4 * want + 1e-9;
                    prop_assert!(is_close, "{} {} {:?} {}", got, want, level, place);
                }
            }
        }
    }
}

/// Column sums of all queries from one on.
fn sums(
    problem: Problem<'_>,
    lse: &[f32],
    (from, by_head): (usize, bool),
    level: Level,
) -> Vec<f32> {
    let heads = if by_head { problem.queries.heads() as usize } else { 1 };
    let mut sums = vec![f32::NAN; heads * problem.keys.tokens() as usize];
    let job = ColumnSums::new(problem, lse, from as u32, by_head, &mut sums);
    let mut job = job.expect("sound").with_level(level);
    let mut memory = vec![f32::NAN; job.scratch()];
    job.all(&mut memory).expect("enough scratch");
    sums
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Each head has its own selection.
    #[test]
    fn sparse_attention_sums_match_its_probabilities(
        seed in 0_u64..1_000_000,
        s in 1_usize..150,
        first in 0_usize..500,
        missing in 0_usize..20,
        group in 1_usize..4,
        query_block in 1_usize..150,
        key_block in 1_usize..100,
        one_in in 1_u64..40,
        from in 0_usize..100,
        per in 0_usize..3,
    ) {
        let mut random = Random::new(seed);
        let (heads, from) = (2 * group, from.min(s));
        let (n, dim) = ((first + s).saturating_sub(missing).max(1), 24);
        let kind = TYPES[seed as usize % 5];
        let q = Data::new(&mut random, (s, heads, dim), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, 2, dim), kind, 16, 0);
        let v = Data::new(&mut random, (n, 2, 8), kind, 16, 0);
        let units = [1, 2, heads][per];
        let unit = |head: usize| match per { 0 => 0, 1 => head / group, _ => head };
        let mut chosen = Chosen::default();
        for _ in 0..units {
            let (head, lists) =
                any_head(&mut random, (first, s, n), (query_block, key_block), one_in);
            chosen = chosen.head(head, &lists);
        }
        let sees = |query: usize, head: usize, key: usize| chosen.sees(unit(head), first, query, key);
        let want = model(&q, &k, (&v, 8), first, scale(dim), sees);
        let level = levels().nth(seed as usize / 5 % levels().count()).expect("a level");
        let sparse = Problem { select: chosen.keys(), ..problem(&q, &k, &v, first) };
        let (_, lse) = run(sparse, level);
        let by_head = sums(sparse, &lse, (from, true), level);
        let together = sums(sparse, &lse, (from, false), level);
        for key in 0..n {
            let mut all = 0.0;
            for head in 0..heads {
                let got = f64::from(by_head[head * n + key]);
                let sum: f64 = (from..s).map(|q| want.shares[(q * heads + head) * n + key]).sum();
                prop_assert!((got - sum).abs() <= 1e-4 * sum + 1e-9, "{} {} {}", got, sum, key);
                all += sum;
            }
            let got = f64::from(together[key]);
            prop_assert!((got - all).abs() <= 1e-4 * all + 1e-9, "{} {} {}", got, all, key);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn sums_of_full_selection_are_bit_identical_to_dense(
        seed in 0_u64..1_000_000,
        s in 1_usize..150,
        first in 0_usize..400,
        key_block in 1_usize..100,
        query_block in 1_usize..100,
        cut in 0_usize..400,
    ) {
        let mut random = Random::new(seed);
        let n = first + s;
        let q = Data::new(&mut random, (s, 2, 32), Type::F32, 0, 0);
        let k = Data::new(&mut random, (n, 2, 32), Type::F32, 0, 0);
        let dense = problem(&q, &k, &k, first);
        let all: Vec<u32> = (0..n as u32).collect();
        let rows = s.div_ceil(query_block);
        let blocks = vec![(0..n.div_ceil(key_block) as u32).collect(); rows];
        let cut = cut.min(n) as u32;
        let before = if cut > 0 { vec![0, cut] } else { vec![] };
        let two = [(cut..n as u32).collect(), before];
        let none = Head { kind: Kind::Lines, dense_from: first as u32, ..Head::DENSE };
        for level in levels() {
            let (_, lse) = run(dense, level);
            let want = sums(dense, &lse, (0, true), level);
            for chosen in [
                Chosen::tokens(std::slice::from_ref(&all)),
                Chosen::blocks(query_block, key_block, rows, &blocks),
                Chosen::lines(&[[all.clone(), vec![]]]),
                Chosen::lines(&[[vec![], all.clone()]]),
                Chosen::default().head(Head { kind: Kind::Ranges, ..Head::DENSE }, &two),
                Chosen::default().head(none, &[vec![], vec![]]),
            ] {
                let sparse = Problem { select: chosen.keys(), ..dense };
                prop_assert_eq!(&sums(sparse, &lse, (0, true), level), &want);
            }
        }
    }
}

#[test]
fn sum_items_are_bit_identical_in_any_order() {
    let mut random = Random::new(9);
    let q = Data::new(&mut random, (90, 4, 32), Type::F32, 0, 0);
    let k = Data::new(&mut random, (700, 2, 32), Type::F16, 0, 0);
    let dense = problem(&q, &k, &k, 610);
    let (_, lse) = run(dense, kvtier::attention::Level::best());
    let mut want = vec![0.0; 700];
    let mut job = ColumnSums::new(dense, &lse, 0, false, &mut want).expect("sound");
    let mut memory = vec![f32::NAN; job.scratch()];
    job.all(&mut memory).expect("enough");
    let mut got = vec![0.0; 700];
    let job = ColumnSums::new(dense, &lse, 0, false, &mut got).expect("sound");
    assert_eq!(job.items(), 3);
    for item in [2, 0, 1] {
        // SAFETY: there is one thread.
        unsafe { job.run(item, &mut memory) }.expect("an item");
    }
    // SAFETY: as above.
    assert!(unsafe { job.run(3, &mut memory) }.is_err());
    assert_eq!(got, want);
    let mut short = vec![0.0; 699];
    assert!(ColumnSums::new(dense, &lse, 0, false, &mut short).is_err());
    assert!(ColumnSums::new(dense, &lse[1..], 0, false, &mut got).is_err());
    assert!(ColumnSums::new(dense, &lse, 91, false, &mut got).is_err());
    let some = Chosen::tokens(&[vec![0]]);
    let bad = Problem { select: Keys { starts: &[0], ..some.keys() }, ..dense };
    assert!(ColumnSums::new(bad, &lse, 0, false, &mut got).is_err());
    let (mut out, mut small) = (vec![0.0; 90 * 4 * 32], vec![0.0; 359]);
    assert!(Prefill::new(dense, &mut out, Some(&mut small)).is_err());
    assert!(Prefill::new(dense, &mut out[1..], None).is_err());
}

#[test]
fn non_finite_values_are_located() {
    let mut numbers = vec![1.0_f32; 5 * 3 * 70];
    let view = View {
        place: Place::At(numbers.as_ptr() as u64),
        tokens: 5,
        heads: 3,
        run_bytes: 280,
        token_stride_bytes: 840,
        head_stride_bytes: 280,
    };
    let rows = |scales| {
        // SAFETY: it is `numbers`, which stay.
        unsafe { kvtier::attention::Rows::new(view, Dtype::F32, scales) }.expect("sound")
    };
    let plain = || rows(kvtier::attention::Scales::None);
    assert!(check_finite("queries", &plain()).is_ok());
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        numbers[(4 * 3 + 1) * 70 + 69] = bad;
        let error = check_finite("queries", &plain()).expect_err("not finite");
        assert!(error.message().contains("token 4, head 1"), "{}", error.message());
    }
}

#[test]
fn merge_checks_sizes_and_matches_the_definition() {
    let mut out = vec![1.0, 2.0, 3.0, 4.0];
    let mut lse = vec![0.0, f32::NEG_INFINITY];
    let other = [3.0, 0.0, 7.0, 8.0];
    merge(&mut out, &mut lse, &other, &[3.0_f32.ln(), 2.0]).expect("two rows");
    assert!((out[0] - 2.5).abs() < 1e-6 && (out[1] - 0.5).abs() < 1e-6);
    assert_eq!((&out[2..], lse[1]), (&[7.0, 8.0][..], 2.0));
    assert!((lse[0] - 4.0_f32.ln()).abs() < 1e-6);
    assert!(merge(&mut out, &mut lse, &other[..3], &[0.0, 0.0]).is_err());
    assert!(merge(&mut out, &mut lse, &other, &[0.0]).is_err());
    assert!(merge(&mut out[..3], &mut lse, &other[..3], &[0.0, 0.0]).is_err());
    assert!(merge(&mut [], &mut [], &[], &[]).is_ok());
}
