//! Page boxes and their scores.

use kvtier::attention::{Rows, Scales, pages};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use proptest::prelude::*;

use crate::attention::data::{Data, Random, TYPES, Type};
use crate::attention::prefill::levels;

fn rows<'a>(at: *const u8, pages: usize, heads: usize, dim: usize, dtype: Dtype) -> Rows<'a> {
    let bytes = dim as u64 * u64::from(dtype.bits() / 8);
    let view = View {
        place: Place::At(at as u64),
        tokens: pages as u32,
        heads: heads as u32,
        run_bytes: bytes,
        token_stride_bytes: bytes * heads as u64,
        head_stride_bytes: bytes,
    };
    // SAFETY: callers give so many numbers.
    unsafe { Rows::new(view, dtype, Scales::None) }.expect("sound")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn page_scores_bound_every_key(
        seed in 0_u64..1_000_000,
        n in 1_usize..400,
        cut in 0_usize..400,
        page in 1_usize..40,
        dim in 1_usize..70,
        heads in 1_usize..4,
        group in 1_usize..6,
        queries in 1_usize..5,
    ) {
        let mut random = Random::new(seed);
        let kind = TYPES[seed as usize % 5];
        let k = Data::new(&mut random, (n, heads, dim), kind, 0, 0);
        let query_kind = if seed % 2 == 0 { Type::F32 } else { Type::Bf16 };
        let q = Data::new(&mut random, (queries, heads * group, dim), query_kind, 0, 0);
        let count = n.div_ceil(page);
        let cut = cut.min(n - 1);
        let (mut wide, mut narrow) =
            (vec![f32::NAN; count * heads * 2 * dim], vec![0x7FC0; count * heads * 2 * dim]);
        // In two steps: the second may go on with a page.
        for (from, to) in [(0, cut), (cut, n)] {
            if from < to {
                let part = k.part(from, to - from, dim);
                pages::extend(&mut wide, page as u32, from as u32, &part).expect("room");
                pages::extend_bf16(&mut narrow, page as u32, from as u32, &part).expect("room");
            }
        }
        prop_assert!(pages::extend(&mut wide[1..], page as u32, 0, &k.rows()).is_err());
        prop_assert!(pages::extend(&mut wide, 0, 0, &k.rows()).is_err());
        for p in 0..count {
            for head in 0..heads {
                for d in 0..dim {
                    let of = |token: usize| k.at(token, head)[d] as f32;
                    let tokens = p * page..((p + 1) * page).min(n);
                    let least = tokens.clone().map(of).fold(f32::INFINITY, f32::min);
                    let most = tokens.map(of).fold(f32::NEG_INFINITY, f32::max);
                    let at = (p * heads + head) * 2 * dim + d;
                    prop_assert_eq!((wide[at], wide[at + dim]), (least, most));
                    let half = |at: usize| f32::from_bits(u32::from(narrow[at]) << 16);
                    prop_assert!(half(at) <= least && half(at + dim) >= most);
                    prop_assert!(half(at) >= least - least.abs() / 100.0);
                    prop_assert!(half(at + dim) <= most + most.abs() / 100.0);
                }
            }
        }
        for is_wide in [true, false] {
            let of = match is_wide {
                true => rows(wide.as_ptr().cast(), count, heads, 2 * dim, Dtype::F32),
                false => rows(narrow.as_ptr().cast(), count, heads, 2 * dim, Dtype::Bf16),
            };
            let stored = |i: usize| match is_wide {
                true => f64::from(wide[i]),
                false => f64::from(f32::from_bits(u32::from(narrow[i]) << 16)),
            };
            let mut memory = vec![f32::NAN; pages::scratch(&q.rows())];
            for level in levels() {
                let from = seed as usize % count;
                let span = count - from;
                let mut out = vec![f32::NAN; queries * heads * group * span];
                let range = (from as u32, span as u32);
                pages::scores(level, &of, &q.rows(), range, &mut out, &mut memory).expect("sound");
                for (i, &got) in out.iter().enumerate() {
                    let (p, head) = (from + i % span, i / span % (heads * group));
                    let row = q.at(i / span / (heads * group), head);
                    let at = (p * heads + head / group) * 2 * dim;
                    let want: f64 = row
                        .iter()
                        .enumerate()
                        .map(|(d, x)| (x * stored(at + d)).max(x * stored(at + dim + d)))
                        .sum();
                    let size: f64 = row
                        .iter()
                        .enumerate()
                        .map(|(d, x)| (x * stored(at + d)).abs().max((x * stored(at + dim + d)).abs()))
                        .sum();
                    let slack = (2.0 * dim as f64 + 2.0) * 2f64.powi(-24) * size;
                    prop_assert!((f64::from(got) - want).abs() <= slack, "{} {}", got, want);
                    for token in p * page..((p + 1) * page).min(n) {
                        let key = k.at(token, head / group);
                        let dot: f64 = row.iter().zip(key).map(|(a, b)| a * b).sum();
                        prop_assert!(dot <= f64::from(got) + slack + 1e-6 * size);
                    }
                }
            }
            let mut out = vec![0.0; queries * heads * group * count];
            let range = (0, count as u32 + 1);
            let level = kvtier::attention::Level::best();
            prop_assert!(
                pages::scores(level, &of, &q.rows(), range, &mut out, &mut memory).is_err()
            );
        }
    }
}
