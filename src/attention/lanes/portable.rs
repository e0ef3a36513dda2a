//! Vectors for any processor: arrays that compilers vectorize.

use crate::attention::lanes::Lanes;
use crate::base::half::from_f16;

const N: usize = 8;

/// Eight numbers.
#[derive(Clone, Copy)]
pub struct Portable([f32; N]);

/// Applies an expression to each lane.
macro_rules! each {
    (|$i:ident| $e:expr) => {{
        let mut out = [0.0; N];
        let mut $i = 0;
        while $i < N {
            out[$i] = $e;
            $i += 1;
        }
        Portable(out)
    }};
}

/// Reads memory that the caller of a method guarantees.
macro_rules! read {
    ($e:expr) => {
        // SAFETY: guaranteed by the caller of a method of `Lanes`.
        unsafe { $e.read_unaligned() }
    };
}

// SAFETY: it reads and writes N numbers, and needs no features.
unsafe impl Lanes for Portable {
    const N: usize = N;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Portable([x; N])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Portable(read!(from.cast::<[f32; N]>()))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<[f32; N]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        each!(|i| self.0[i] + other.0[i])
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        each!(|i| self.0[i] - other.0[i])
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        each!(|i| self.0[i] * other.0[i])
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        each!(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] })
    }

    #[inline(always)]
    unsafe fn fma(self, by: Self, plus: Self) -> Self {
        // Rounds twice: without an FMA instruction, a single rounding costs a function call a
        // number.
        each!(|i| self.0[i] * by.0[i] + plus.0[i])
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        // Adding 1.5 * 2^23 removes the fraction; valid for magnitudes below 2^22.
        const SHIFT: f32 = 12_582_912.0;
        each!(|i| (self.0[i] + SHIFT) - SHIFT)
    }

    #[inline(always)]
    unsafe fn scale(self, n: Self) -> Self {
        // 2^n itself may be the smallest normal number, so the product is rounded correctly.
        each!(|i| self.0[i] * f32::from_bits(((n.0[i] as i32 + 127) << 23) as u32))
    }

    #[inline(always)]
    unsafe fn less(self, than: Self, x: Self, y: Self) -> Self {
        each!(|i| if self.0[i] < than.0[i] { x.0[i] } else { y.0[i] })
    }

    #[inline(always)]
    unsafe fn keep(self, bits: u32) -> Self {
        each!(|i| if bits >> i & 1 == 1 { self.0[i] } else { f32::NEG_INFINITY })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        let sign_split = read!(from.cast::<[u16; N]>());
        each!(|i| from_f16(sign_split[i]))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        let sign_split = read!(from.cast::<[u16; N]>());
        each!(|i| f32::from_bits(u32::from(sign_split[i]) << 16))
    }

    #[inline(always)]
    unsafe fn pair_bf16(from: *const u16) -> [Self; 2] {
        let both = read!(from.cast::<[[u16; 2]; N]>());
        let half = |x: u16| f32::from_bits(u32::from(x) << 16);
        [each!(|i| half(both[i][0])), each!(|i| half(both[i][1]))]
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        let bytes = read!(from.cast::<[i8; N]>());
        each!(|i| f32::from(bytes[i]))
    }

    #[inline(always)]
    unsafe fn by_sign(self, negative: Self, positive: Self) -> Self {
        each!(|i| if self.0[i].is_sign_negative() { negative.0[i] } else { positive.0[i] })
    }

    #[inline(always)]
    unsafe fn sums(vectors: [Self; 4]) -> [f32; 4] {
        vectors.map(|v| {
            let [a, b, c, d, e, f, g, h] = v.0;
            ((a + e) + (c + g)) + ((b + f) + (d + h))
        })
    }
}
