//! Vectors of AVX2 with FMA and F16C.

use std::arch::x86_64::*;

use crate::attention::lanes::Lanes;

/// Eight numbers.
#[derive(Clone, Copy)]
pub struct Avx2(__m256);

/// An instruction of the processor.
macro_rules! cpu {
    ($e:expr) => {
        // SAFETY: the caller of a method of `Lanes` guarantees features and pointers.
        unsafe { $e }
    };
}

// SAFETY: loads and stores are of 8 numbers.
unsafe impl Lanes for Avx2 {
    const N: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Avx2(cpu!(_mm256_set1_ps(x)))
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Avx2(cpu!(_mm256_loadu_ps(from)))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        cpu!(_mm256_storeu_ps(to, self.0))
    }

    #[inline(always)]
    unsafe fn prefetch(place: *const u8) {
        cpu!(_mm_prefetch::<_MM_HINT_T1>(place.cast()))
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Avx2(cpu!(_mm256_add_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Avx2(cpu!(_mm256_sub_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Avx2(cpu!(_mm256_mul_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Avx2(cpu!(_mm256_max_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn fma(self, by: Self, plus: Self) -> Self {
        Avx2(cpu!(_mm256_fmadd_ps(self.0, by.0, plus.0)))
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        Avx2(cpu!(_mm256_round_ps::<NEAREST>(self.0)))
    }

    #[inline(always)]
    unsafe fn scale(self, n: Self) -> Self {
        cpu!({
            let power = _mm256_add_epi32(_mm256_cvtps_epi32(n.0), _mm256_set1_epi32(127));
            Avx2(_mm256_mul_ps(self.0, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(power))))
        })
    }

    #[inline(always)]
    unsafe fn less(self, than: Self, x: Self, y: Self) -> Self {
        cpu!(Avx2(_mm256_blendv_ps(y.0, x.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, than.0))))
    }

    #[inline(always)]
    unsafe fn keep(self, bits: u32) -> Self {
        cpu!({
            let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), lane);
            let set = _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane));
            Avx2(_mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), self.0, set))
        })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        Avx2(cpu!(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        cpu!({
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            Avx2(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
        })
    }

    #[inline(always)]
    unsafe fn pair_bf16(from: *const u16) -> [Self; 2] {
        cpu!({
            let both = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(both, _mm256_set1_epi32(0xFFFF_0000_u32 as i32));
            let even = _mm256_slli_epi32::<16>(both);
            [Avx2(_mm256_castsi256_ps(even)), Avx2(_mm256_castsi256_ps(odd))]
        })
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        cpu!({
            let wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()));
            Avx2(_mm256_cvtepi32_ps(wide))
        })
    }

    #[inline(always)]
    unsafe fn by_sign(self, negative: Self, positive: Self) -> Self {
        Avx2(cpu!(_mm256_blendv_ps(positive.0, negative.0, self.0)))
    }

    #[inline(always)]
    unsafe fn sums(vectors: [Self; 4]) -> [f32; 4] {
        cpu!(quarter(vectors.map(|v| v.0)))
    }
}

/// The sums of four vectors.
///
/// # Safety
/// The processor has AVX.
#[inline(always)]
pub unsafe fn quarter([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
    cpu!({
        let sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        let sign_split = (_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), _mm_add_ps(sign_split.0, sign_split.1));
        out
    })
}
