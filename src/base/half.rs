//! Conversion between half and single precision, rounded to nearest, ties to even. No branch
//! depends on the number, so that the compiler can vectorise.

/// A binary16 as a binary32; exact.
#[inline(always)]
pub fn from_f16(half: u16) -> f32 {
    let bits = u32::from(half);
    let (sign, rest) = ((bits & 0x8000) << 16, (bits & 0x7FFF) << 13);
    // The exponent bias is 15 in binary16 and 127 in binary32. A factor of 2^112 corrects it,
    // also for subnormal numbers.
    let scaled = (f32::from_bits(rest) * f32::from_bits(0x7780_0000)).to_bits();
    let special = if rest >= 0x0F80_0000 { 0x7F80_0000 } else { 0 };
    f32::from_bits(sign | scaled | special)
}

/// The nearest binary16.
#[inline(always)]
pub fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, rest) = (((bits >> 16) & 0x8000) as u16, bits & 0x7FFF_FFFF);
    let even = (rest >> 13) & 1;
    let normal = (rest.wrapping_add(0xFFF + even).wrapping_sub(0x3800_0000)) >> 13;
    // Adding 0.5 makes the processor shift and round subnormal results.
    let small = (f32::from_bits(rest) + 0.5).to_bits().wrapping_sub(0x3F00_0000);
    let special = if rest > 0x7F80_0000 { 0x7E00 } else { 0x7C00 };
    let half = if rest < 0x3880_0000 { small } else { normal };
    sign | (if rest >= 0x4780_0000 { special } else { half }) as u16
}

/// A bfloat16 as a binary32; exact.
#[inline(always)]
pub fn from_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// The nearest bfloat16.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    (if x.is_nan() { (bits >> 16) | 0x40 } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value by the definition of the format.
    fn defined(half: u16) -> f64 {
        let (exponent, fraction) = (i32::from(half >> 10 & 31), f64::from(half & 1023));
        let size = match exponent {
            0 => fraction / 1024.0 * 2f64.powi(-14),
            31 if fraction == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            e => (1.0 + fraction / 1024.0) * 2f64.powi(e - 15),
        };
        if half & 0x8000 == 0 { size } else { -size }
    }

    #[test]
    fn every_half_converts_exactly_and_round_trips() {
        for half in 0..=u16::MAX {
            let (got, want) = (f64::from(from_f16(half)), defined(half));
            assert!(got == want || (got.is_nan() && want.is_nan()), "{half:#x}: {got} {want}");
            if !want.is_nan() {
                assert_eq!(to_f16(got as f32), half);
            }
            let wide = from_bf16(half);
            if !wide.is_nan() {
                assert_eq!(to_bf16(wide), half);
            }
        }
        assert!(from_f16(to_f16(f32::NAN)).is_nan() && from_bf16(to_bf16(f32::NAN)).is_nan());
    }

    #[test]
    fn rounding_is_to_nearest_with_ties_to_even() {
        for half in (0..0x7BFFu16).step_by(3) {
            let (low, high) = (defined(half), defined(half + 1));
            let even = if half & 1 == 0 { half } else { half + 1 };
            assert_eq!(to_f16(((low + high) / 2.0) as f32), even, "{half:#x}");
            assert_eq!(to_f16((low + 0.49 * (high - low)) as f32), half);
            assert_eq!(to_f16((low + 0.51 * (high - low)) as f32), half + 1);
        }
        assert_eq!((to_f16(65_519.9), to_f16(65_520.0), to_f16(-1e9)), (0x7BFF, 0x7C00, 0xFC00));
        assert_eq!(to_bf16(1.0 + 1.0 / 256.0), 0x3F80, "a tie");
        assert_eq!(to_bf16(1.0 + 3.0 / 256.0), 0x3F82, "a tie");
        assert_eq!(to_bf16(f32::MAX), 0x7F80);
    }
}
