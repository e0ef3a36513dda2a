//! Decode attention, compared with the definition.

use kvtier::attention::keys::NO_QUERY;
use kvtier::attention::{Decode, Head, Keys, Kind, Level, Problem};
use kvtier::base::status::Status;
use proptest::prelude::*;

use crate::attention::data::{Chosen, Data, Random, TYPES, Type, model};
use crate::attention::prefill::{levels, problem, scale, some};

struct Got {
    out: Vec<f32>,
    lse: Vec<f32>,
    by_head: Vec<f32>,
    together: Option<Vec<f32>>,
}

fn run(problem: Problem<'_>, level: Level, keys: usize) -> Got {
    let heads = problem.queries.heads() as usize;
    let rows = problem.queries.tokens() as usize * heads;
    let mut out = vec![f32::NAN; rows * problem.values.dim() as usize];
    let mut lse = vec![f32::NAN; rows];
    let size = Decode::memory(&problem, true).expect("a size");
    let mut memory = vec![f32::NAN; size];
    let job = Decode::new(problem, &mut out, &mut lse, &mut memory, true);
    let mut job = job.expect("sound").with_level(level);
    let mut scratch = vec![f32::NAN; job.scratch()];
    job.all(&mut scratch).expect("enough scratch");
    let mut by_head = vec![0.0; heads * keys];
    job.sums(true, &mut by_head).expect("kept");
    let mut together = vec![0.0; keys];
    let together = job.sums(false, &mut together).is_ok().then_some(together);
    Got { out, lse, by_head, together }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn decode_matches_the_definition(
        seed in 0_u64..1_000_000,
        queries in 1_usize..6,
        n in 1_usize..2500,
        ahead in 0_usize..4,
        group in 1_usize..9,
        key_heads in 1_usize..3,
        dim in 1_usize..100,
        value_dim in 1_usize..100,
        page in 0_usize..40,
        one_in in 1_u64..30,
        key_block in 1_usize..100,
        what in 0_usize..6,
    ) {
        let mut random = Random::new(seed);
        let heads = group * key_heads;
        let kind = TYPES[seed as usize % 5];
        let query_kind = [Type::F32, Type::Bf16][seed as usize / 25 % 2];
        let q = Data::new(&mut random, (queries, heads, dim), query_kind, 0, 0);
        let k = Data::new(&mut random, (n, key_heads, dim), kind, page, 0);
        let v = Data::new(&mut random, (n, key_heads, value_dim), kind, page, 2);
        let first = (n + ahead).saturating_sub(queries);
        let level = levels().nth(seed as usize / 5 % levels().count()).expect("a level");
        let units = [1, key_heads, heads][what % 3];
        let unit = |head: usize| match what % 3 { 0 => 0, 1 => head / group, _ => head };
        let lists: Vec<Vec<u32>> = (0..units)
            .map(|_| match what {
                0..=2 => some(&mut random, n + 3, one_in),
                _ => some(&mut random, n / key_block + 2, one_in.min(5)),
            })
            .collect();
        let is_dense = what == 0 && one_in < 4;
        let mut chosen = match what {
            _ if is_dense => Chosen::default(),
            0..=2 => Chosen::tokens(&lists),
            _ => Chosen::blocks(8, key_block, 1, &lists),
        };
        // A head that sees all, whatever its list says.
        let free = if seed % 7 == 0 { chosen.heads.len().wrapping_sub(1) } else { usize::MAX };
        if let Some(head) = chosen.heads.get_mut(free) {
            head.dense_from = first as u32;
        }
        let select = chosen.keys();
        let sees = |_: usize, head: usize, key: usize| {
            let item = if what < 3 { key } else { key / key_block } as u32;
            is_dense || unit(head) == free || lists[unit(head)].binary_search(&item).is_ok()
        };
        // Sums are indexed by the keys that the last query sees, in the order of selection.
        let snapshot = (first + queries).min(n);
        let order = |head: usize| -> Vec<usize> {
            (0..snapshot).filter(|&key| sees(0, head, key)).collect()
        };
        let most = (0..heads).map(|head| order(head).len()).max().expect("heads");
        let problem = Problem { select, ..problem(&q, &k, &v, first) };
        let got = run(problem, level, most);
        let want = model(&q, &k, (&v, value_dim), first, scale(dim), sees);
        want.check(&got.out, &got.lse, &format!("{level:?} {kind:?} {what}"));
        let mut together = vec![0.0; most];
        for head in 0..heads {
            for (place, key) in order(head).into_iter().enumerate() {
                let sum: f64 =
                    (0..queries).map(|q| want.shares[(q * heads + head) * n + key]).sum();
                let sum_got = f64::from(got.by_head[head * most + place]);
                prop_assert!((sum_got - sum).abs() <= 2e-4 * sum + 1e-9, "{} {}", sum_got, sum);
                together[place] += sum;
            }
            let rest = &got.by_head[head * most + order(head).len()..(head + 1) * most];
            prop_assert!(rest.iter().all(|&x| x == 0.0));
        }
        prop_assert_eq!(got.together.is_some(), is_dense || units == 1);
        for (got, want) in got.together.iter().flatten().zip(&together) {
            prop_assert!((f64::from(*got) - want).abs() <= 2e-4 * want + 1e-9);
        }
    }
}

#[test]
fn latent_decode_uses_panels_of_heads() {
    let mut random = Random::new(6);
    let n = 1500;
    let q = Data::new(&mut random, (2, 80, 144), Type::F32, 0, 0);
    let rows = Data::new(&mut random, (n, 1, 144), Type::Bf16, 16, 0);
    let latent = Problem { values: rows.part(0, n, 128), ..problem(&q, &rows, &rows, n - 2) };
    let want = model(&q, &rows, (&rows, 128), n - 2, scale(144), |_, _, _| true);
    for level in levels() {
        let got = run(latent, level, n);
        want.check(&got.out, &got.lse, "latent");
        let total: f32 = got.together.expect("one list").iter().sum();
        assert!((total - 160.0).abs() < 0.01, "{total}");
        // The first of the queries does not see the last key, the second does.
        assert!(got.by_head.iter().all(|x| x.is_finite() && *x >= 0.0));
    }
}

#[test]
fn decode_parts_are_bit_identical_and_skip_padding() {
    let mut random = Random::new(7);
    let n = 5000;
    let q = Data::new(&mut random, (1, 8, 64), Type::F32, 0, 0);
    // Padding between and behind rows is NaN.
    let k = Data::new(&mut random, (n, 2, 61), Type::Bf16, 16, 1);
    let v = Data::new(&mut random, (n, 2, 61), Type::F16, 16, 3);
    let dense = Problem { queries: q.part(0, 1, 61), ..problem(&q, &k, &v, n - 1) };
    let want = run(dense, Level::best(), n);
    assert!(want.out.iter().all(|x| x.is_finite()));
    for threads in [1, 2, 4] {
        let (mut out, mut lse) = (vec![0.0; 8 * 61], vec![0.0; 8]);
        let mut memory = vec![f32::NAN; Decode::memory(&dense, false).expect("a size")];
        let job = Decode::new(dense, &mut out, &mut lse, &mut memory, false).expect("sound");
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let job = &job;
                scope.spawn(move || {
                    let mut scratch = vec![f32::NAN; job.scratch()];
                    for part in (0..job.parts()).rev().filter(|i| i % threads == thread) {
                        // SAFETY: each part has one thread.
                        unsafe { job.run(part, &mut scratch) }.expect("a part");
                    }
                });
            }
        });
        for end in (0..job.ends()).rev() {
            // SAFETY: all parts are done.
            unsafe { job.end(end) }.expect("an end");
        }
        assert_eq!((out, lse), (want.out.clone(), want.lse.clone()));
    }
}

#[test]
fn invalid_decode_calls_are_rejected() {
    let mut random = Random::new(8);
    let q = Data::new(&mut random, (2, 4, 16), Type::F32, 0, 0);
    let odd = Data::new(&mut random, (2, 3, 16), Type::F32, 0, 0);
    let k = Data::new(&mut random, (9, 2, 16), Type::F32, 0, 0);
    let thin = Data::new(&mut random, (9, 2, 15), Type::F32, 0, 0);
    let short = Data::new(&mut random, (8, 2, 16), Type::F32, 0, 0);
    let good = problem(&q, &k, &k, 7);
    let head = |kind, first, lists, query_block, key_block| Head {
        kind,
        first,
        lists,
        query_block,
        key_block,
        dense_from: NO_QUERY,
    };
    let (starts, items) = ([0, 2, 2, 5], [0, 1, 3, 5, 9]);
    let of = |head: &Head| {
        let heads = [*head];
        let select = Keys { heads: &heads, starts: &starts, items: &items };
        let problem = Problem { select, ..good };
        problem.check().map_err(|error| error.status())
    };
    for bad in [
        head(Kind::Lines, 0, 1, 0, 0),
        head(Kind::Lines, 0, 3, 0, 0),
        head(Kind::Lines, 2, 2, 0, 0),
        head(Kind::Blocks, 0, 1, 64, 0),
        head(Kind::Blocks, 0, 0, 64, 64),
        head(Kind::Blocks, 0, 1, 1, 64),
        head(Kind::Blocks, 3, 1, 64, 64),
        head(Kind::Blocks, u32::MAX, 2, 64, 64),
        head(Kind::Ranges, 0, 0, 64, 0),
        head(Kind::Ranges, 0, 1, 64, 0),
        head(Kind::Ranges, 1, 2, 64, 0),
        head(Kind::Ranges, 0, 2, 1, 0),
    ] {
        assert_eq!(of(&bad), Err(Status::Invalid), "{bad:?}");
    }
    assert_eq!(of(&head(Kind::Blocks, 2, 1, 2, 1)), Ok(()));
    let blocks = [head(Kind::Blocks, 0, 1, 0, 64); 3];
    let keys = |heads, starts, items| Keys { heads, starts, items };
    let bad = [
        problem(&odd, &k, &k, 7),
        problem(&q, &thin, &k, 7),
        problem(&q, &k, &short, 7),
        Problem { scale: f32::NAN, ..good },
        Problem { scale: -1.0, ..good },
        Problem { first_query: u32::MAX, ..good },
        Problem { select: keys(&blocks, &[0, 1], &[0]), ..good },
        Problem { select: keys(&blocks[..1], &[0, 2], &[5, 4]), ..good },
        Problem { select: keys(&blocks[..1], &[0, 2], &[4, 4]), ..good },
        Problem { select: keys(&blocks[..1], &[0, 3], &[4, 5]), ..good },
        Problem { select: keys(&blocks[..1], &[2, 0], &[4, 5]), ..good },
        Problem { select: keys(&blocks[..1], &[], &[]), ..good },
    ];
    for problem in bad {
        let status = problem.check().expect_err("refused").status();
        assert!(matches!(status, Status::Invalid | Status::Limit), "{problem:?}");
        assert!(Decode::memory(&problem, false).is_err());
    }
    // Selections that prefill accepts and decode rejects.
    for (head, lists) in [
        (Head { kind: Kind::Lines, ..Head::DENSE }, vec![vec![1], vec![0]]),
        (Head { kind: Kind::Ranges, ..Head::DENSE }, vec![vec![1], vec![2, 3]]),
        (
            Head { kind: Kind::Blocks, query_block: 1, key_block: 4, ..Head::DENSE },
            vec![vec![0]; 2],
        ),
        (Head { kind: Kind::Blocks, key_block: 4, dense_from: 8, ..Head::DENSE }, vec![vec![0]]),
    ] {
        let chosen = Chosen::default().head(head, &lists);
        let problem = Problem { select: chosen.keys(), ..good };
        problem.check().expect("sound");
        let error = Decode::memory(&problem, false).expect_err("not in decode");
        assert_eq!(error.status(), Status::Unsupported);
    }
    let (mut out, mut lse, mut memory) = (vec![0.0; 128], vec![0.0; 8], vec![0.0; 1000]);
    assert!(Decode::new(good, &mut out[..127], &mut lse, &mut memory, false).is_err());
    assert!(Decode::new(good, &mut out, &mut lse[..7], &mut memory, false).is_err());
    assert!(Decode::new(good, &mut out, &mut lse, &mut memory[..9], false).is_err());
    let mut job = Decode::new(good, &mut out, &mut lse, &mut memory, false).expect("sound");
    assert!(job.all(&mut [0.0; 9]).is_err());
    // SAFETY: there is one thread.
    assert!(unsafe { job.run(job.parts(), &mut [0.0; 9000]) }.is_err());
    // SAFETY: as above.
    assert!(unsafe { job.end(job.ends()) }.is_err());
}
