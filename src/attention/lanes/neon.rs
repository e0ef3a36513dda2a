//! Vectors of NEON.

use std::arch::aarch64::*;

use crate::attention::lanes::Lanes;
use crate::base::half::from_f16;

/// Four numbers.
#[derive(Clone, Copy)]
pub struct Neon(float32x4_t);

/// An instruction of the processor.
macro_rules! cpu {
    ($e:expr) => {
        // SAFETY: the caller of a method of `Lanes` guarantees features and pointers.
        unsafe { $e }
    };
}

// SAFETY: loads and stores are of 4 numbers.
unsafe impl Lanes for Neon {
    const N: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Neon(cpu!(vdupq_n_f32(x)))
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Neon(cpu!(vld1q_f32(from)))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        cpu!(vst1q_f32(to, self.0))
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Neon(cpu!(vaddq_f32(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Neon(cpu!(vsubq_f32(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Neon(cpu!(vmulq_f32(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Neon(cpu!(vmaxq_f32(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn fma(self, by: Self, plus: Self) -> Self {
        Neon(cpu!(vfmaq_f32(plus.0, self.0, by.0)))
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Neon(cpu!(vrndnq_f32(self.0)))
    }

    #[inline(always)]
    unsafe fn scale(self, n: Self) -> Self {
        cpu!({
            let power = vaddq_s32(vcvtq_s32_f32(n.0), vdupq_n_s32(127));
            Neon(vmulq_f32(self.0, vreinterpretq_f32_s32(vshlq_n_s32::<23>(power))))
        })
    }

    #[inline(always)]
    unsafe fn less(self, than: Self, x: Self, y: Self) -> Self {
        Neon(cpu!(vbslq_f32(vcltq_f32(self.0, than.0), x.0, y.0)))
    }

    #[inline(always)]
    unsafe fn keep(self, bits: u32) -> Self {
        let lanes: [u32; 4] = [1, 2, 4, 8];
        cpu!({
            let set = vtstq_u32(vdupq_n_u32(bits), vld1q_u32(lanes.as_ptr()));
            Neon(vbslq_f32(set, self.0, vdupq_n_f32(f32::NEG_INFINITY)))
        })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        let sign_split = cpu!(from.cast::<[u16; 4]>().read_unaligned()).map(from_f16);
        Neon(cpu!(vld1q_f32(sign_split.as_ptr())))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        Neon(cpu!(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from)))))
    }

    #[inline(always)]
    unsafe fn pair_bf16(from: *const u16) -> [Self; 2] {
        cpu!({
            let both = vreinterpretq_u32_u16(vld1q_u16(from));
            let odd = vandq_u32(both, vdupq_n_u32(0xFFFF_0000));
            let even = vshlq_n_u32::<16>(both);
            [Neon(vreinterpretq_f32_u32(even)), Neon(vreinterpretq_f32_u32(odd))]
        })
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // A vector load reads eight bytes; only four of them are guaranteed.
        let bytes = cpu!(from.cast::<[i8; 4]>().read_unaligned()).map(i32::from);
        cpu!(Neon(vcvtq_f32_s32(vld1q_s32(bytes.as_ptr()))))
    }

    #[inline(always)]
    unsafe fn by_sign(self, negative: Self, positive: Self) -> Self {
        cpu!({
            let is_negative = vcltzq_s32(vreinterpretq_s32_f32(self.0));
            Neon(vbslq_f32(is_negative, negative.0, positive.0))
        })
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        cpu!(vmaxvq_f32(self.0))
    }

    #[inline(always)]
    unsafe fn sums(vectors: [Self; 4]) -> [f32; 4] {
        vectors.map(|v| cpu!(vaddvq_f32(v.0)))
    }
}
