//! Vectors of AVX-512 (F, BW, DQ, VL).

use std::arch::x86_64::*;

use crate::attention::lanes::Lanes;
use crate::attention::lanes::avx2::quarter;

/// Sixteen numbers.
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

impl From<__m512> for Avx512 {
    #[inline(always)]
    fn from(vector: __m512) -> Avx512 {
        Avx512(vector)
    }
}

impl From<Avx512> for __m512 {
    #[inline(always)]
    fn from(vector: Avx512) -> __m512 {
        vector.0
    }
}

/// An instruction of the processor.
macro_rules! cpu {
    ($e:expr) => {
        // SAFETY: the caller of a method of `Lanes` guarantees features and pointers.
        unsafe { $e }
    };
}

// SAFETY: loads and stores are of 16 numbers.
unsafe impl Lanes for Avx512 {
    const N: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Avx512(cpu!(_mm512_set1_ps(x)))
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Avx512(cpu!(_mm512_loadu_ps(from)))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        cpu!(_mm512_storeu_ps(to, self.0))
    }

    #[inline(always)]
    unsafe fn prefetch(place: *const u8) {
        cpu!(_mm_prefetch::<_MM_HINT_T1>(place.cast()))
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Avx512(cpu!(_mm512_add_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Avx512(cpu!(_mm512_sub_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Avx512(cpu!(_mm512_mul_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Avx512(cpu!(_mm512_max_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn fma(self, by: Self, plus: Self) -> Self {
        Avx512(cpu!(_mm512_fmadd_ps(self.0, by.0, plus.0)))
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Avx512(cpu!(_mm512_roundscale_ps::<0>(self.0)))
    }

    #[inline(always)]
    unsafe fn scale(self, n: Self) -> Self {
        Avx512(cpu!(_mm512_scalef_ps(self.0, n.0)))
    }

    #[inline(always)]
    unsafe fn less(self, than: Self, x: Self, y: Self) -> Self {
        cpu!(Avx512(_mm512_mask_blend_ps(
            _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, than.0),
            y.0,
            x.0
        )))
    }

    #[inline(always)]
    unsafe fn keep(self, bits: u32) -> Self {
        let none = f32::NEG_INFINITY;
        Avx512(cpu!(_mm512_mask_blend_ps(bits as u16, _mm512_set1_ps(none), self.0)))
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        Avx512(cpu!(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        cpu!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        })
    }

    #[inline(always)]
    unsafe fn pair_bf16(from: *const u16) -> [Self; 2] {
        cpu!({
            let both = _mm512_loadu_si512(from.cast());
            let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xFFFF_0000_u32 as i32));
            let even = _mm512_slli_epi32::<16>(both);
            [Avx512(_mm512_castsi512_ps(even)), Avx512(_mm512_castsi512_ps(odd))]
        })
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        cpu!({
            let wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()));
            Avx512(_mm512_cvtepi32_ps(wide))
        })
    }

    #[inline(always)]
    unsafe fn by_sign(self, negative: Self, positive: Self) -> Self {
        cpu!({
            let is_negative = _mm512_movepi32_mask(_mm512_castps_si512(self.0));
            Avx512(_mm512_mask_blend_ps(is_negative, positive.0, negative.0))
        })
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        cpu!(_mm512_reduce_max_ps(self.0))
    }

    #[inline(always)]
    unsafe fn sums(vectors: [Self; 4]) -> [f32; 4] {
        cpu!({
            let [a, b, c, d] = vectors.map(|v| v.0);
            quarter([half(a), half(b), half(c), half(d)])
        })
    }

    #[inline(always)]
    unsafe fn store_sums<const Q: usize>(rows: [[Self; 4]; Q], out: *mut f32, step: usize) {
        cpu!({
            // No closures: they would be compiled without these features.
            let (a, b) = (quarters(rows[0]), quarters(rows[1 % Q]));
            let (c, d) = (quarters(rows[2 % Q]), quarters(rows[3 % Q]));
            let all = join(join(a, b), join(c, d));
            _mm_storeu_ps(out, _mm512_castps512_ps128(all));
            if Q > 1 {
                _mm_storeu_ps(out.add(step), _mm512_extractf32x4_ps::<1>(all));
            }
            if Q > 2 {
                _mm_storeu_ps(out.add(2 * step), _mm512_extractf32x4_ps::<2>(all));
                _mm_storeu_ps(out.add(3 * step), _mm512_extractf32x4_ps::<3>(all));
            }
        })
    }
}

/// A transposed sum: number j of each quarter is the sum of that quarter of vector j.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
pub unsafe fn quarters([a, b, c, d]: [Avx512; 4]) -> __m512 {
    cpu!({
        let x = _mm512_add_ps(_mm512_unpacklo_ps(a.0, b.0), _mm512_unpackhi_ps(a.0, b.0));
        let y = _mm512_add_ps(_mm512_unpacklo_ps(c.0, d.0), _mm512_unpackhi_ps(c.0, d.0));
        let (x, y) = (_mm512_castps_pd(x), _mm512_castps_pd(y));
        let (low, high) = (_mm512_unpacklo_pd(x, y), _mm512_unpackhi_pd(x, y));
        _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
    })
}

/// The sums of adjacent quarters of x, then those of y.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
pub unsafe fn join(x: __m512, y: __m512) -> __m512 {
    cpu!(_mm512_add_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(x, y),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(x, y)
    ))
}

/// The sum of both halves.
///
/// # Safety
/// The processor has AVX-512 DQ.
#[inline(always)]
unsafe fn half(v: __m512) -> __m256 {
    cpu!(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))
}
