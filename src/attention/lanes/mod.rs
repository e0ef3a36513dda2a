//! SIMD vectors of each kind of processor. Kernels are written once over [`Lanes`] and compiled for
//! each [`Level`](crate::attention::level::Level).

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
#[clippy::msrv = "1.89"] // when these instructions became stable
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod portable;

/// Most lanes of two vectors.
pub const MAX_WIDTH: usize = 32;

/// A vector of f32.
///
/// # Safety
/// For every method, the processor supports the type's instructions, and pointers lead to as many
/// numbers as are read or written ([`Lanes::N`] unless stated otherwise), aligned or not. Methods
/// are slow unless they are inlined into a function with these features enabled.
#[allow(clippy::missing_safety_doc)] // said once, above
pub unsafe trait Lanes: Copy {
    /// Numbers of a vector.
    const N: usize;
    /// Numbers of two vectors.
    const WIDTH: usize = 2 * Self::N;

    /// The same number in all lanes.
    unsafe fn splat(x: f32) -> Self;
    /// Loads from memory.
    unsafe fn load(from: *const f32) -> Self;
    /// Stores to memory.
    unsafe fn store(self, to: *mut f32);
    /// Sum.
    unsafe fn add(self, other: Self) -> Self;
    /// Difference.
    unsafe fn sub(self, other: Self) -> Self;
    /// Product.
    unsafe fn mul(self, other: Self) -> Self;
    /// The larger of two.
    unsafe fn max(self, other: Self) -> Self;
    /// `self * by + plus`, rounded once where the processor can.
    unsafe fn fma(self, by: Self, plus: Self) -> Self;
    /// The nearest integer.
    unsafe fn round(self) -> Self;
    /// `self * 2^n` for integers n from -126 to 0 and `self` from 0.5 to 2.
    unsafe fn scale(self, n: Self) -> Self;
    /// Lanes where `self < than` become `x`, others `y`.
    unsafe fn less(self, than: Self, x: Self, y: Self) -> Self;
    /// Lanes whose bit is not set become -inf.
    unsafe fn keep(self, bits: u32) -> Self;
    /// Loads binary16.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Loads upper halves of binary32.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Loads two vectors from upper halves of binary32: even places, then odd places.
    unsafe fn pair_bf16(from: *const u16) -> [Self; 2];
    /// Loads signed bytes.
    unsafe fn load_i8(from: *const i8) -> Self;
    /// Lanes whose sign bit is set take `negative`, others `positive`.
    unsafe fn by_sign(self, negative: Self, positive: Self) -> Self;
    /// The sum of all lanes of each vector.
    unsafe fn sums(vectors: [Self; 4]) -> [f32; 4];

    /// The sum of all lanes.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::sums([self; 4])[0] }
    }

    /// Stores the sums of all lanes of up to four rows of vectors; rows of `out` are `step` numbers
    /// apart.
    #[inline(always)]
    unsafe fn store_sums<const Q: usize>(rows: [[Self; 4]; Q], out: *mut f32, step: usize) {
        for (r, row) in rows.into_iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            unsafe { out.add(r * step).cast::<[f32; 4]>().write_unaligned(Self::sums(row)) };
        }
    }

    /// Prefetches the cache line of an address, which need not be mapped.
    #[inline(always)]
    unsafe fn prefetch(place: *const u8) {
        let _ = place;
    }

    /// The first lane.
    #[inline(always)]
    unsafe fn first(self) -> f32 {
        let mut all = [0.0; MAX_WIDTH];
        // SAFETY: guaranteed by the caller; `all` has room for any vector.
        unsafe { self.store(all.as_mut_ptr()) };
        all[0]
    }

    /// The largest lane.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let mut all = [f32::MIN; MAX_WIDTH];
        // SAFETY: guaranteed by the caller; `all` has room for any vector.
        unsafe { self.store(all.as_mut_ptr()) };
        // Pairs instead of a chain, in which each step would wait for the one before it.
        let mut n = Self::N;
        while n > 1 {
            n /= 2;
            for i in 0..n {
                all[i] = if all[n + i] > all[i] { all[n + i] } else { all[i] };
            }
        }
        all[0]
    }

    /// `2^self` for numbers up to about 1, exact to two units in the last place; 0 below -126.
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let least = Self::splat(-126.0);
            let x = self.max(least);
            let whole = x.round();
            let f = x.sub(whole);
            let mut p = Self::splat(1.535_336_2e-4);
            for c in
                [1.339_887_4e-3, 9.618_437e-3, 5.550_332_6e-2, 2.402_264_7e-1, 6.931_472e-1, 1.0]
            {
                p = p.fma(f, Self::splat(c));
            }
            self.less(least, Self::splat(0.0), p.scale(whole))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::level::{Level, levels};

    levels! {
        /// Powers of two of all numbers.
        powers = each_power(numbers: &mut [f32])
    }

    /// # Safety
    /// As of [`Lanes`]; the length is a multiple of [`Lanes::N`].
    #[inline(always)]
    unsafe fn each_power<L: Lanes, const R: usize>(numbers: &mut [f32]) {
        for part in numbers.chunks_exact_mut(L::N) {
            // SAFETY: a part is a vector.
            unsafe { L::load(part.as_ptr()).exp2().store(part.as_mut_ptr()) };
        }
    }

    levels! {
        /// Converts halves, alone and in pairs.
        halves = each_half(from: &[u16], f16: &mut [f32], bf16: &mut [f32], pairs: &mut [f32])
    }

    /// # Safety
    /// As of [`Lanes`]; lengths are equal, and a multiple of [`Lanes::WIDTH`].
    #[inline(always)]
    unsafe fn each_half<L: Lanes, const R: usize>(
        from: &[u16],
        f16: &mut [f32],
        bf16: &mut [f32],
        pairs: &mut [f32],
    ) {
        for at in (0..from.len()).step_by(L::WIDTH) {
            // SAFETY: two vectors are inside the slices.
            unsafe {
                for half in [at, at + L::N] {
                    L::load_f16(from.as_ptr().add(half)).store(f16.as_mut_ptr().add(half));
                    L::load_bf16(from.as_ptr().add(half)).store(bf16.as_mut_ptr().add(half));
                }
                let [even, odd] = L::pair_bf16(from.as_ptr().add(at));
                for i in 0..L::N {
                    let (mut x, mut y) = ([0.0; MAX_WIDTH], [0.0; MAX_WIDTH]);
                    even.store(x.as_mut_ptr());
                    odd.store(y.as_mut_ptr());
                    (pairs[at + 2 * i], pairs[at + 2 * i + 1]) = (x[i], y[i]);
                }
            }
        }
    }

    #[test]
    fn exp2_is_exact_to_two_units_in_the_last_place() {
        let count = 1 << 18;
        for level in Level::ALL.into_iter().filter(|level| level.is_supported()) {
            let from: Vec<f32> = (0..count).map(|i| i as f32 * -127.0 / count as f32).collect();
            let mut to = from.clone();
            // SAFETY: the level is supported.
            unsafe { powers(level, &mut to) };
            for (x, got) in from.into_iter().zip(to) {
                let expected = f64::from(x).exp2();
                if x < -126.0 {
                    assert_eq!(got, 0.0, "{level:?} {x}");
                } else {
                    let unit = expected * 2f64.powi(-23);
                    assert!((f64::from(got) - expected).abs() <= 2.0 * unit, "{level:?} {x} {got}");
                }
            }
            let mut ends = [f32::NEG_INFINITY, f32::MIN, 0.0, -1.0].repeat(8);
            // SAFETY: as above.
            unsafe { powers(level, &mut ends) };
            assert_eq!(ends, [0.0, 0.0, 1.0, 0.5].repeat(8), "{level:?}");
        }
    }

    #[test]
    fn every_half_converts_as_its_format_defines() {
        let from: Vec<u16> = (0..=u16::MAX).collect();
        for level in Level::ALL.into_iter().filter(|level| level.is_supported()) {
            let [mut f16, mut bf16, mut pairs] = [(); 3].map(|()| vec![0.0_f32; from.len()]);
            // SAFETY: the level is supported.
            unsafe { halves(level, &from, &mut f16, &mut bf16, &mut pairs) };
            for (i, half) in from.iter().enumerate() {
                let (exponent, fraction) = (i32::from(half >> 10 & 31), f64::from(half & 1023));
                let size = match exponent {
                    0 => fraction / 1024.0 * 2f64.powi(-14),
                    31 if fraction == 0.0 => f64::INFINITY,
                    31 => f64::NAN,
                    e => (1.0 + fraction / 1024.0) * 2f64.powi(e - 15),
                };
                let expected = if half & 0x8000 == 0 { size } else { -size };
                let got = f64::from(f16[i]);
                assert!(
                    got == expected || (got.is_nan() && expected.is_nan()),
                    "{level:?} {half:#x}"
                );
                let expected = u32::from(*half) << 16;
                assert_eq!(
                    (bf16[i].to_bits(), pairs[i].to_bits()),
                    (expected, expected),
                    "{level:?}"
                );
            }
        }
    }
}
