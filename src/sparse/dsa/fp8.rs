//! 8-bit floating-point numbers: 4 bits of exponent, 3 of mantissa, no infinity (E4M3).

/// The largest finite number.
pub const MOST: f32 = 448.0;
/// The code of NaN, without its sign.
pub const NAN: u8 = 0x7F;

/// The nearest code of a finite number, ties to even; larger magnitudes saturate.
pub fn encode(x: f32) -> u8 {
    let (sign, size) = ((x.to_bits() >> 24) as u8 & 0x80, x.abs());
    if size >= MOST {
        return sign | 0x7E;
    }
    if size < 1.0 / 64.0 {
        // Subnormals are multiples of 2^-9; the eighth is the first normal number.
        return sign | (size * 512.0).round_ties_even() as u8;
    }
    let bits = size.to_bits();
    let rounded = (bits + 0x7_FFFF + (bits >> 20 & 1)) >> 20;
    sign | (rounded - ((127 - 7) << 3)) as u8
}

/// The number of a code; exact.
pub fn decode(code: u8) -> f32 {
    let (exponent, fraction) = (u32::from(code >> 3 & 15), u32::from(code & 7));
    let size = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        (0, _) => fraction as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | fraction << 20),
    };
    if code & 0x80 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_numbers_round_to_nearest() {
        for code in 0..=255u8 {
            if code & 0x7F != NAN {
                assert_eq!(encode(decode(code)), code, "{code:#x}");
            }
        }
        assert_eq!((decode(0x7E), decode(0x38), decode(1)), (448.0, 1.0, 1.0 / 512.0));
        assert!(decode(0xFF).is_nan());
        assert_eq!((encode(1e9), encode(-460.0), encode(465.0)), (0x7E, 0xFE, 0x7E));
        for code in 0..0x7Du8 {
            let (low, high) = (decode(code), decode(code + 1));
            let even = if code & 1 == 0 { code } else { code + 1 };
            assert_eq!(encode((low + high) / 2.0), even, "{code:#x}");
            assert_eq!(encode(low + 0.49 * (high - low)), code);
            assert_eq!(encode(-(low + 0.51 * (high - low))), 0x80 | (code + 1));
        }
    }
}
