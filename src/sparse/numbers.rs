//! Numbers of rows as f32, whatever their type in memory, and fallible allocation.

use crate::attention::{Rows, Scales};
use crate::base::half::{from_bf16, from_f16};
use crate::base::status::{Result, Status};
use crate::fail;
use crate::meta::dtype::Dtype;

/// All exponent bits set: infinity or NaN.
const EXPONENT: u32 = 0x7F80_0000;

/// Whether all numbers are finite. Reads all of them, so that the loop vectorizes.
pub fn all_finite(numbers: &[f32]) -> bool {
    !numbers.iter().fold(false, |bad, x| bad | (x.to_bits() & EXPONENT == EXPONENT))
}

/// Reads the row of a token and head into `out`, which has the row's length. Returns false if the
/// row does not exist or a number is not finite.
pub fn read(rows: &Rows<'_>, token: u32, head: u32, out: &mut [f32]) -> bool {
    fill(rows, token, head, out) && all_finite(out)
}

/// The same for any numbers. Returns false if the row does not exist.
pub fn fill(rows: &Rows<'_>, token: u32, head: u32, out: &mut [f32]) -> bool {
    let dim = rows.dim() as usize;
    if token >= rows.tokens() || head >= rows.heads() || out.len() != dim {
        return false;
    }
    let at = rows.row(token, head);
    match rows.dtype() {
        Dtype::F32 => {
            // SAFETY: the row of this token and head exists; the creator of `rows` guaranteed that
            // it is readable and aligned.
            out.copy_from_slice(unsafe { std::slice::from_raw_parts(at.cast::<f32>(), dim) });
        }
        Dtype::F16 | Dtype::Bf16 => {
            // SAFETY: as above.
            let halves = unsafe { std::slice::from_raw_parts(at.cast::<u16>(), dim) };
            if rows.dtype() == Dtype::F16 {
                out.iter_mut().zip(halves).for_each(|(o, &half)| *o = from_f16(half));
            } else {
                out.iter_mut().zip(halves).for_each(|(o, &half)| *o = from_bf16(half));
            }
        }
        Dtype::I8 => {
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(at.cast::<i8>(), dim) };
            read_bytes(rows, token, head, bytes, out);
        }
        _ => return false,
    }
    true
}

fn read_bytes(rows: &Rows<'_>, token: u32, head: u32, bytes: &[i8], out: &mut [f32]) {
    let all = out.iter_mut().zip(bytes);
    match rows.scales() {
        Scales::None => all.for_each(|(o, &byte)| *o = f32::from(byte)),
        Scales::Token(scales) => {
            let at = token as usize * rows.heads() as usize + head as usize;
            let scale = scales.get(at).copied().unwrap_or(f32::NAN);
            all.for_each(|(o, &byte)| *o = f32::from(byte) * scale);
        }
        Scales::Channel(scales) => {
            let scales = scales.get(head as usize * bytes.len()..).unwrap_or_default();
            all.zip(scales).for_each(|((o, &byte), scale)| *o = f32::from(byte) * scale);
        }
    }
}

/// The Euclidean norm of a row, summed in binary64.
pub fn norm(row: &[f32]) -> f64 {
    row.iter().map(|&number| f64::from(number) * f64::from(number)).sum::<f64>().sqrt()
}

/// Fails with `Invalid` if a number is not finite.
pub fn check(name: &str, numbers: &[f32]) -> Result<()> {
    if !all_finite(numbers) {
        fail!(Invalid, "{name} are not all finite numbers");
    }
    Ok(())
}

/// Fails with `Invalid` if a row has a number that is not finite.
pub fn check_rows(name: &str, rows: &Rows<'_>) -> Result<()> {
    let mut row = Vec::new();
    zeros(&mut row, rows.dim() as usize)?;
    for token in 0..rows.tokens() {
        for head in 0..rows.heads() {
            if !read(rows, token, head, &mut row) {
                fail!(Invalid, "{name} of row {token}, head {head} are not finite numbers");
            }
        }
    }
    Ok(())
}

/// Extends a table to `len` entries, if memory allows; never shortens it.
pub fn grow<T: Clone>(table: &mut Vec<T>, len: usize, fill: T) -> Result<()> {
    let more = len.saturating_sub(table.len());
    reserve(table, more)?;
    table.resize(table.len() + more, fill);
    Ok(())
}

/// Reserves memory for `more` entries, or fails with `NoMem`.
pub fn reserve<T>(table: &mut Vec<T>, more: usize) -> Result<()> {
    table.try_reserve(more).map_err(|_| Status::NoMem.into())
}

/// Makes `out` hold `len` zeros.
pub fn zeros<T: Copy + Default>(out: &mut Vec<T>, len: usize) -> Result<()> {
    out.clear();
    out.try_reserve_exact(len).map_err(|_| Status::NoMem)?;
    out.resize(len, T::default());
    Ok(())
}

#[cfg(test)]
#[allow(missing_docs)]
pub mod testing {
    use super::*;
    use crate::meta::view::{Place, View};

    /// Rows of f32 in memory, tokens outermost.
    pub fn rows(numbers: &[f32], heads: u32, dim: u32) -> Rows<'_> {
        let run_bytes = u64::from(dim) * 4;
        let view = View {
            place: Place::At(numbers.as_ptr() as u64),
            tokens: (numbers.len() / (heads * dim) as usize) as u32,
            heads,
            run_bytes,
            token_stride_bytes: run_bytes * u64::from(heads),
            head_stride_bytes: run_bytes,
        };
        // SAFETY: the view covers `numbers`, which the rows borrow.
        unsafe { Rows::new(view, Dtype::F32, Scales::None) }.expect("sound")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::half::{to_bf16, to_f16};
    use crate::meta::view::{Place, View};

    fn made(at: *const u8, bytes: u64, dtype: Dtype, scales: Scales<'_>) -> Vec<f32> {
        let view = View {
            place: Place::At(at as u64),
            tokens: 2,
            heads: 2,
            run_bytes: 3 * bytes,
            token_stride_bytes: 6 * bytes,
            head_stride_bytes: 3 * bytes,
        };
        // SAFETY: the view covers the twelve numbers of the test.
        let rows = unsafe { Rows::new(view, dtype, scales) }.expect("sound");
        let mut all = Vec::new();
        for (token, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut row = [0.0; 3];
            assert!(read(&rows, token, head, &mut row));
            all.extend(row);
        }
        assert!(!read(&rows, 2, 0, &mut [0.0; 3]) && !read(&rows, 0, 2, &mut [0.0; 3]));
        assert!(!read(&rows, 0, 0, &mut [0.0; 2]));
        all
    }

    #[test]
    fn every_dtype_is_read() {
        let expected: Vec<f32> = (0..12).map(|n| n as f32 - 5.5).collect();
        assert_eq!(made(expected.as_ptr().cast(), 4, Dtype::F32, Scales::None), expected);
        let halves: Vec<u16> = expected.iter().map(|&x| to_f16(x)).collect();
        assert_eq!(made(halves.as_ptr().cast(), 2, Dtype::F16, Scales::None), expected);
        let halves: Vec<u16> = expected.iter().map(|&x| to_bf16(x)).collect();
        assert_eq!(made(halves.as_ptr().cast(), 2, Dtype::Bf16, Scales::None), expected);
        let bytes: Vec<i8> = (0..12).map(|n| n - 6).collect();
        let plain: Vec<f32> = bytes.iter().map(|&b| f32::from(b)).collect();
        assert_eq!(made(bytes.as_ptr().cast(), 1, Dtype::I8, Scales::None), plain);
        let token = [1.0, 2.0, 3.0, 4.0];
        let expected: Vec<f32> = plain.iter().enumerate().map(|(i, x)| x * token[i / 3]).collect();
        assert_eq!(made(bytes.as_ptr().cast(), 1, Dtype::I8, Scales::Token(&token)), expected);
        let channel = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let expected: Vec<f32> =
            plain.iter().enumerate().map(|(i, x)| x * channel[i % 6]).collect();
        assert_eq!(made(bytes.as_ptr().cast(), 1, Dtype::I8, Scales::Channel(&channel)), expected);
    }

    #[test]
    fn numbers_that_are_not_finite_are_errors() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let numbers = [0.0, 1.0, bad, f32::MAX];
            let rows = testing::rows(&numbers, 1, 2);
            assert!(read(&rows, 0, 0, &mut [0.0; 2]) && !read(&rows, 1, 0, &mut [0.0; 2]));
            assert!(check_rows("keys", &rows).is_err() && check("keys", &numbers).is_err());
            assert!(check("keys", &numbers[..2]).is_ok());
        }
    }
}
