//! Numbers in memory by the definitions of their formats: the reference for kernels.

use kvtier::base::half::{from_bf16, from_f16, to_bf16, to_f16};
use kvtier::meta::dtype::Dtype;

pub fn size(dtype: Dtype) -> usize {
    dtype.bits() as usize / 8
}

/// A number of 8 bits with so many of exponent, which counts from `bias`.
fn small(code: u8, mantissa: i32, bias: i32) -> f64 {
    let (exponent, fraction) = (i32::from(code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1));
    let fraction = f64::from(fraction) / f64::from(1 << mantissa);
    let size = match exponent {
        0 => fraction * 2_f64.powi(1 - bias),
        e => (1.0 + fraction) * 2_f64.powi(e - bias),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// The number of a code of 8 bits.
pub fn of_code(dtype: Dtype, code: u8) -> f32 {
    let rest = code & 0x7F;
    (match dtype {
        Dtype::F8E4m3 if rest == 0x7F => f64::NAN,
        Dtype::F8E4m3 => small(code, 3, 7),
        Dtype::F8E5m2 if rest > 0x7C => f64::NAN,
        Dtype::F8E5m2 if rest == 0x7C => f64::INFINITY.copysign(f64::from(code.cast_signed())),
        Dtype::F8E5m2 => small(code, 2, 15),
        _ => f64::from(code.cast_signed()),
    }) as f32
}

/// The greatest number of a code.
pub fn greatest(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F8E4m3 => 448.0,
        Dtype::F8E5m2 => 57_344.0,
        _ => 127.0,
    }
}

/// The nearest code: of two as near the even one; beyond the greatest the greatest.
pub fn to_code(dtype: Dtype, x: f32) -> u8 {
    if dtype == Dtype::I8 {
        return if x.is_nan() { 0 } else { x.clamp(-127.0, 127.0).round_ties_even() as i8 as u8 };
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7F;
    }
    let size = x.abs().min(greatest(dtype));
    let most = if dtype == Dtype::F8E4m3 { 0x7E } else { 0x7B };
    let above = (0..=most).find(|&code| of_code(dtype, code) >= size).expect("the greatest");
    let (high, code) = (of_code(dtype, above), above.saturating_sub(1));
    let low = of_code(dtype, code);
    let (down, up) = (f64::from(size) - f64::from(low), f64::from(high) - f64::from(size));
    let is_up = up < down || (up == down && above % 2 == 0);
    sign | if is_up { above } else { code }
}

/// Reads a number.
pub fn read(dtype: Dtype, bytes: &[u8]) -> f32 {
    let half = || u16::from_le_bytes([bytes[0], bytes[1]]);
    match dtype {
        Dtype::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        Dtype::F16 => from_f16(half()),
        Dtype::Bf16 => from_bf16(half()),
        _ => of_code(dtype, bytes[0]),
    }
}

/// Writes a number.
pub fn write(dtype: Dtype, x: f32, bytes: &mut [u8]) {
    match dtype {
        Dtype::F32 => bytes[..4].copy_from_slice(&x.to_le_bytes()),
        Dtype::F16 => bytes[..2].copy_from_slice(&to_f16(x).to_le_bytes()),
        Dtype::Bf16 => bytes[..2].copy_from_slice(&to_bf16(x).to_le_bytes()),
        _ => bytes[0] = to_code(dtype, x),
    }
}
