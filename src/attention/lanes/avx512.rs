//! Vectors of AVX-512 (F, BW, DQ, VL).

use std::arch::x86_64::*;

use crate::attention::lanes::Lanes;
use crate::attention::lanes::avx2::quarter;

/// Sixteen numbers.
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

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
    unsafe fn sums(vectors: [Self; 4]) -> [f32; 4] {
        cpu!({
            let [a, b, c, d] = vectors.map(|v| v.0);
            quarter([half(a), half(b), half(c), half(d)])
        })
    }
}

/// The sum of both halves.
///
/// # Safety
/// The processor has AVX-512 DQ.
#[inline(always)]
unsafe fn half(v: __m512) -> __m256 {
    cpu!(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))
}
