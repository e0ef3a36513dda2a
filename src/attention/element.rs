//! Conversion of rows to f32, from every type that kernels read.

use crate::attention::lanes::{Lanes, MAX_WIDTH};
use crate::attention::rows::{Rows, Scales};
use crate::base::half::{from_bf16, from_f16};
use crate::meta::dtype::Dtype;

/// A type of numbers that kernels read.
///
/// # Safety
/// Every method requires the contract of [`Lanes`]; `from` points to as many numbers as are read.
#[allow(clippy::missing_safety_doc)] // said once, above
pub unsafe trait Element {
    /// Bytes of a number.
    const BYTES: usize;
    /// Whether [`Element::pair`] returns the numbers at even places first.
    const IS_SPLIT: bool = false;

    /// Reads one number.
    unsafe fn load_one(from: *const u8) -> f32;
    /// Reads a vector.
    unsafe fn load<L: Lanes>(from: *const u8) -> L;

    /// Reads two vectors, in the order that is fastest.
    #[inline(always)]
    unsafe fn pair<L: Lanes>(from: *const u8) -> [L; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { [Self::load(from), Self::load(from.add(L::N * Self::BYTES))] }
    }

    /// The place of number `i` after [`Element::pair`].
    #[inline(always)]
    fn place<L: Lanes>(i: usize) -> usize {
        let (start, i) = (i - i % L::WIDTH, i % L::WIDTH);
        start + if Self::IS_SPLIT { i / 2 + i % 2 * L::N } else { i }
    }
}

/// binary32.
pub struct F32;
/// binary16.
pub struct F16;
/// The upper half of a binary32.
pub struct Bf16;
/// Signed bytes.
pub struct I8;

// SAFETY: it reads exactly the numbers that it names.
unsafe impl Element for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load_one(from: *const u8) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { from.cast::<f32>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L {
        // SAFETY: guaranteed by the caller.
        unsafe { L::load(from.cast()) }
    }
}

// SAFETY: it reads exactly the numbers that it names.
unsafe impl Element for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load_one(from: *const u8) -> f32 {
        // SAFETY: guaranteed by the caller.
        from_f16(unsafe { from.cast::<u16>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L {
        // SAFETY: guaranteed by the caller.
        unsafe { L::load_f16(from.cast()) }
    }
}

// SAFETY: it reads exactly the numbers that it names.
unsafe impl Element for Bf16 {
    const BYTES: usize = 2;
    const IS_SPLIT: bool = true;

    #[inline(always)]
    unsafe fn load_one(from: *const u8) -> f32 {
        // SAFETY: guaranteed by the caller.
        from_bf16(unsafe { from.cast::<u16>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L {
        // SAFETY: guaranteed by the caller.
        unsafe { L::load_bf16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn pair<L: Lanes>(from: *const u8) -> [L; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { L::pair_bf16(from.cast()) }
    }
}

// SAFETY: it reads exactly the numbers that it names.
unsafe impl Element for I8 {
    const BYTES: usize = 1;

    #[inline(always)]
    unsafe fn load_one(from: *const u8) -> f32 {
        // SAFETY: guaranteed by the caller.
        f32::from(unsafe { from.cast::<i8>().read() })
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L {
        // SAFETY: guaranteed by the caller.
        unsafe { L::load_i8(from.cast()) }
    }
}

/// Reads two vectors of which only the first `n` numbers exist; the others are 0.
///
/// # Safety
/// `from` points to n numbers, n up to [`Lanes::WIDTH`].
#[inline(always)]
pub unsafe fn part<L: Lanes, E: Element>(from: *const u8, n: usize) -> [L; 2] {
    let mut all = [0_u8; 4 * MAX_WIDTH];
    // SAFETY: n numbers exist, and `all` has room for the widest of them.
    unsafe {
        std::ptr::copy_nonoverlapping(from, all.as_mut_ptr(), n * E::BYTES);
        E::pair(all.as_ptr())
    }
}

/// Reads the rows of tokens of a head as f32, scaled, one after the other.
///
/// # Safety
/// As of [`Lanes`]; tokens and head exist, `to` has room for their rows.
#[inline(always)]
pub unsafe fn read<L: Lanes>(rows: &Rows<'_>, head: u32, tokens: &[u32], to: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match rows.dtype() {
            Dtype::F16 => read_as::<L, F16>(rows, head, tokens, to),
            Dtype::Bf16 => read_as::<L, Bf16>(rows, head, tokens, to),
            Dtype::I8 => read_as::<L, I8>(rows, head, tokens, to),
            _ => read_as::<L, F32>(rows, head, tokens, to),
        }
    }
}

/// # Safety
/// As of [`read`]; E is the type of the rows.
#[inline(always)]
unsafe fn read_as<L: Lanes, E: Element>(rows: &Rows<'_>, head: u32, tokens: &[u32], to: *mut f32) {
    let dim = rows.dim() as usize;
    for (i, &token) in tokens.iter().enumerate() {
        // SAFETY: a row has `dim` numbers, as has its place in `to`.
        unsafe {
            let (from, to) = (rows.row(token, head), to.add(i * dim));
            let mut at = 0;
            while at + L::N <= dim {
                E::load::<L>(from.add(at * E::BYTES)).store(to.add(at));
                at += L::N;
            }
            while at < dim {
                to.add(at).write(E::load_one(from.add(at * E::BYTES)));
                at += 1;
            }
            match rows.scales() {
                Scales::None => {}
                Scales::Token(all) => {
                    let scale = all[token as usize * rows.heads() as usize + head as usize];
                    (0..dim).for_each(|d| *to.add(d) *= scale);
                }
                Scales::Channel(all) => {
                    let scales = &all[head as usize * dim..(head as usize + 1) * dim];
                    scales.iter().enumerate().for_each(|(d, scale)| *to.add(d) *= scale);
                }
            }
        }
    }
}
