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

/// Queries whose numbers stand together: two in a vector.
const BLOCK: usize = 4;
/// Numbers of a query that stand together.
const RUN: usize = 16;

/// Numbers of bf16 that [`pack_bf16`] writes for `count` queries.
pub const fn packed(count: usize, dim: usize) -> usize {
    count.next_multiple_of(BLOCK) * dim.next_multiple_of(RUN)
}

/// Packs queries for [`dot_rows_bf16`]: sixteen numbers of each of four queries, then the next
/// sixteen; zeros where there is no number. `row` returns the address of a query.
///
/// # Safety
/// The queries exist, and `to` has room for [`packed`] numbers.
pub unsafe fn pack_bf16(
    row: impl Fn(usize) -> *const u16,
    (count, dim): (usize, usize),
    to: *mut u16,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        to.write_bytes(0, packed(count, dim));
        for r in 0..count {
            let (from, to) = (row(r), to.add(packed(r - r % BLOCK, dim) + r % BLOCK * RUN));
            for at in (0..dim).step_by(RUN) {
                let to = to.add(at * BLOCK);
                std::ptr::copy_nonoverlapping(from.add(at), to, (dim - at).min(RUN));
            }
        }
    }
}

/// As [`dot_rows`](super::dot::dot_rows), with queries that [`pack_bf16`] packed.
///
/// # Safety
/// As of `dot_rows`; [`applies`] is true.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn dot_rows_bf16<const BOX: bool>(_: Quad, _: (*const u16, usize), _: *mut f32) {
    unreachable!("this processor has no Level::Avx512Bf16");
}

#[cfg(target_arch = "x86_64")]
pub use x86::dot_rows_bf16;

#[cfg(target_arch = "x86_64")]
#[clippy::msrv = "1.89"] // when these instructions became stable
#[allow(clippy::needless_range_loop)] // as in `dot`
mod x86 {
    use std::arch::x86_64::*;

    use crate::attention::dot::{Quad, prefetch};
    use crate::attention::dot_bf16::{BLOCK, RUN, packed};
    use crate::attention::lanes::avx512::{Avx512, join, quarters};
    use crate::attention::panel::TILE;

    /// As [`dot_rows`](crate::attention::dot::dot_rows), with queries that
    /// [`pack_bf16`](super::pack_bf16) packed.
    ///
    /// # Safety
    /// As of `dot_rows`; [`applies`](super::applies) is true.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub unsafe fn dot_rows_bf16<const BOX: bool>(
        mut quad: Quad,
        (queries, count): (*const u16, usize),
        out: *mut f32,
    ) {
        for r in (0..count).step_by(BLOCK) {
            // SAFETY: guaranteed by the caller; out has TILE places a query.
            unsafe {
                let (queries, out) = (queries.add(packed(r, quad.dim)), out.add(r * TILE));
                let sums = match count - r {
                    1 | 2 => block::<1, BOX>(quad, queries),
                    _ => block::<2, BOX>(quad, queries),
                };
                _mm_storeu_ps(out, _mm512_castps512_ps128(sums));
                if count - r > 1 {
                    _mm_storeu_ps(out.add(TILE), _mm512_extractf32x4_ps::<1>(sums));
                }
                if count - r > 2 {
                    _mm_storeu_ps(out.add(2 * TILE), _mm512_extractf32x4_ps::<2>(sums));
                }
                if count - r > 3 {
                    _mm_storeu_ps(out.add(3 * TILE), _mm512_extractf32x4_ps::<3>(sums));
                }
            }
            quad.upcoming = quad.rows;
        }
    }

    /// The products of four rows with each of P pairs of queries: four numbers a query. Half of a
    /// line is loaded into both halves of a vector and meets two queries, so that half as many sums
    /// have to be added across lanes as with one query in a vector.
    ///
    /// # Safety
    /// As of [`dot_rows_bf16`].
    #[inline(always)]
    unsafe fn block<const P: usize, const BOX: bool>(quad: Quad, queries: *const u16) -> __m512 {
        let Quad { upcoming, dim, .. } = quad;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut sums = [[Avx512::from(_mm512_setzero_ps()); 4]; P];
            let mut at = 0;
            while at + 2 * RUN <= dim {
                for j in 0..4 {
                    prefetch::<Avx512>(upcoming[j].wrapping_add(2 * at), 4 * RUN);
                    if BOX {
                        prefetch::<Avx512>(upcoming[j].wrapping_add(2 * (dim + at)), 4 * RUN);
                    }
                }
                add_products::<P, BOX>(&quad, (at, u16::MAX), queries, &mut sums);
                add_products::<P, BOX>(&quad, (at + RUN, u16::MAX), queries, &mut sums);
                at += 2 * RUN;
            }
            while at < dim {
                let mask = u16::MAX >> (RUN - (dim - at).min(RUN));
                add_products::<P, BOX>(&quad, (at, mask), queries, &mut sums);
                at += RUN;
            }
            join(quarters(sums[0]), quarters(sums[P - 1]))
        }
    }

    /// Adds the products of the numbers from `at` on, as many as the mask has bits.
    ///
    /// # Safety
    /// As of [`dot_rows_bf16`].
    #[inline(always)]
    unsafe fn add_products<const P: usize, const BOX: bool>(
        quad: &Quad,
        (at, mask): (usize, u16),
        queries: *const u16,
        sums: &mut [[Avx512; 4]; P],
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut pairs = [_mm512_setzero_si512(); P];
            for p in 0..P {
                pairs[p] = _mm512_loadu_si512(queries.add(at * BLOCK + 2 * p * RUN).cast());
            }
            for j in 0..4 {
                let least = twice(quad.rows[j].add(2 * at), mask);
                let mut most = least;
                if BOX {
                    most = twice(quad.rows[j].add(2 * (quad.dim + at)), mask);
                }
                for p in 0..P {
                    let mut x = least;
                    if BOX {
                        x = _mm512_mask_blend_epi16(_mm512_movepi16_mask(pairs[p]), most, least);
                    }
                    // Both types are 64 bytes, all of which are valid.
                    let x = std::mem::transmute::<__m512i, __m512bh>(x);
                    let pair = std::mem::transmute::<__m512i, __m512bh>(pairs[p]);
                    sums[p][j] = _mm512_dpbf16_ps(sums[p][j].into(), x, pair).into();
                }
            }
        }
    }

    /// The same sixteen numbers in both halves of a vector; 0 where the mask has no bit.
    ///
    /// # Safety
    /// As of [`dot_rows_bf16`].
    #[inline(always)]
    unsafe fn twice(from: *const u8, mask: u16) -> __m512i {
        // SAFETY: guaranteed by the caller; a full mask lets the whole be read.
        unsafe {
            match mask {
                u16::MAX => _mm512_broadcast_i64x4(_mm256_loadu_si256(from.cast())),
                _ => _mm512_broadcast_i64x4(_mm256_maskz_loadu_epi16(mask, from.cast())),
            }
        }
    }
}
