//! The products of [`dot`](super::dot) for queries and rows of bf16, by instructions that multiply
//! pairs of bf16 and add them in f32: half of the work of converting and multiplying f32. Numbers
//! below the smallest normal one count as 0.

#[cfg(not(target_arch = "x86_64"))]
use crate::attention::dot::Quad;
use crate::attention::level::Level;
use crate::attention::rows::Rows;
use crate::meta::dtype::Dtype;

/// Whether [`dot_rows_bf16`] multiplies these queries with these rows.
pub fn applies(level: Level, queries: &Rows<'_>, rows: &Rows<'_>) -> bool {
    level == Level::Avx512Bf16 && queries.dtype() == Dtype::Bf16 && rows.dtype() == Dtype::Bf16
}

/// As [`dot_rows`](super::dot::dot_rows); queries have no order of their own, and nothing is read
/// behind them.
///
/// # Safety
/// As of `dot_rows`; [`applies`] is true.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn dot_rows_bf16<const BOX: bool>(_: Quad, _: (*const u16, usize, usize), _: *mut f32) {
    unreachable!("this processor has no Level::Avx512Bf16");
}

#[cfg(target_arch = "x86_64")]
pub use x86::dot_rows_bf16;

#[cfg(target_arch = "x86_64")]
#[clippy::msrv = "1.89"] // when these instructions became stable
mod x86 {
    use std::arch::x86_64::*;

    use crate::attention::dot::{Quad, prefetch};
    use crate::attention::lanes::Lanes;
    use crate::attention::lanes::avx512::Avx512;
    use crate::attention::panel::TILE;

    /// Numbers of a vector.
    const WIDTH: usize = 32;

    /// As [`dot_rows`](crate::attention::dot::dot_rows); queries have no order of their own, and
    /// nothing is read behind them.
    ///
    /// # Safety
    /// As of `dot_rows`; [`applies`](super::applies) is true.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub unsafe fn dot_rows_bf16<const BOX: bool>(
        mut quad: Quad,
        (queries, count, step): (*const u16, usize, usize),
        out: *mut f32,
    ) {
        let mut r = 0;
        while r < count {
            // SAFETY: guaranteed by the caller; out has TILE places a query.
            unsafe {
                let (queries, out) = (queries.add(r * step), out.add(r * TILE));
                r += match count - r {
                    4.. => block::<4, BOX>(quad, queries, step, out),
                    2.. => block::<2, BOX>(quad, queries, step, out),
                    _ => block::<1, BOX>(quad, queries, step, out),
                };
            }
            quad.upcoming = quad.rows;
        }
    }

    /// Multiplies Q queries; returns Q.
    ///
    /// # Safety
    /// As of [`dot_rows_bf16`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn block<const Q: usize, const BOX: bool>(
        Quad { rows, upcoming, dim }: Quad,
        queries: *const u16,
        step: usize,
        out: *mut f32,
    ) -> usize {
        let mut sums = [[Avx512::from(_mm512_setzero_ps()); 4]; Q];
        for at in (0..dim).step_by(WIDTH) {
            let mask = u32::MAX >> (WIDTH - (dim - at).min(WIDTH));
            // SAFETY: guaranteed by the caller; the mask excludes what is behind a row.
            unsafe {
                let load = |from: *const u8| _mm512_maskz_loadu_epi16(mask, from.cast());
                let mut query = [_mm512_setzero_si512(); Q];
                for (r, query) in query.iter_mut().enumerate() {
                    *query = load(queries.add(r * step + at).cast());
                }
                for (j, (row, upcoming)) in rows.into_iter().zip(upcoming).enumerate() {
                    prefetch::<Avx512>(upcoming.wrapping_add(2 * at), 2 * WIDTH);
                    let x = load(row.add(2 * at));
                    let mut y = x;
                    if BOX {
                        prefetch::<Avx512>(upcoming.wrapping_add(2 * (dim + at)), 2 * WIDTH);
                        y = load(row.add(2 * (dim + at)));
                    }
                    for (sums, &query) in sums.iter_mut().zip(&query) {
                        let is_negative = _mm512_movepi16_mask(query);
                        let number =
                            if BOX { _mm512_mask_blend_epi16(is_negative, y, x) } else { x };
                        // Both types are 64 bytes, all of which are valid.
                        let number = std::mem::transmute::<__m512i, __m512bh>(number);
                        let query = std::mem::transmute::<__m512i, __m512bh>(query);
                        sums[j] = _mm512_dpbf16_ps(sums[j].into(), number, query).into();
                    }
                }
            }
        }
        // SAFETY: guaranteed by the caller.
        unsafe { Avx512::store_sums(sums, out, TILE) };
        Q
    }
}
