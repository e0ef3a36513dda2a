//! Queries, keys or values as kernels read them: a view with a type of numbers.

use crate::base::status::Result;
use crate::fail;
use crate::meta::dtype::Dtype;
use crate::meta::view::{Place, Side, View};

/// Most numbers of a head.
pub const MAX_DIM: u32 = 2048;

/// Scales of int8 rows.
#[derive(Clone, Copy, Debug, Default)]
pub enum Scales<'a> {
    /// No scales.
    #[default]
    None,
    /// One for each token and head, heads innermost.
    Token(&'a [f32]),
    /// One for each head and number, numbers innermost.
    Channel(&'a [f32]),
}

/// Rows of `dim` numbers, one for each token and head. They borrow memory that must not change
/// while it is read; the creator guarantees that.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    view: View<'a>,
    dtype: Dtype,
    dim: u32,
    scales: Scales<'a>,
}

impl<'a> Rows<'a> {
    /// Rows of a view, checked.
    ///
    /// # Safety
    /// All memory of the view is readable, and is not written, as long as this lives. Addresses are
    /// aligned for the type, and strides are multiples of its size.
    pub unsafe fn new(view: View<'a>, dtype: Dtype, scales: Scales<'a>) -> Result<Rows<'a>> {
        let known = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8];
        if !known.contains(&dtype) {
            fail!(Unsupported, "kernels read f32, f16, bf16 and int8, not {dtype:?}");
        }
        let bytes = u64::from(dtype.bits() / 8);
        let dim = view.run_bytes / bytes;
        if dim == 0 || dim > u64::from(MAX_DIM) || view.run_bytes % bytes != 0 {
            fail!(
                Invalid,
                "rows of {} bytes: they must be 1 to {MAX_DIM} whole {dtype:?} numbers",
                view.run_bytes
            );
        }
        let aligned = |n: u64| n % bytes == 0;
        let is_aligned = match view.place {
            Place::At(address) => aligned(address),
            Place::Pages { addresses, shift_bytes, .. } => {
                addresses.iter().all(|&a| aligned(a.wrapping_add_signed(shift_bytes)))
            }
        };
        if !is_aligned || !aligned(view.token_stride_bytes) || !aligned(view.head_stride_bytes) {
            fail!(Invalid, "addresses and strides of {dtype:?} rows must be multiples of its size");
        }
        view.span(0, view.tokens, Side::Source)?;
        let numbers = match scales {
            Scales::None => return Ok(Rows { view, dtype, dim: dim as u32, scales }),
            Scales::Token(all) => (all.len() as u64, u64::from(view.tokens)),
            Scales::Channel(all) => (all.len() as u64, dim),
        };
        if dtype != Dtype::I8 || numbers.0 != numbers.1 * u64::from(view.heads) {
            fail!(Invalid, "{} scales do not fit {dtype:?} rows: only int8 has scales", numbers.0);
        }
        Ok(Rows { view, dtype, dim: dim as u32, scales })
    }

    /// Rows without memory, of which only sizes may be read.
    ///
    /// # Safety
    /// No row is read.
    pub(super) unsafe fn unmapped(tokens: u32, heads: u32, dim: u32) -> Rows<'static> {
        let view = View {
            place: Place::At(0),
            tokens,
            heads,
            run_bytes: 0,
            token_stride_bytes: 0,
            head_stride_bytes: 0,
        };
        Rows { view, dtype: Dtype::F32, dim, scales: Scales::None }
    }

    /// Tokens.
    pub fn tokens(&self) -> u32 {
        self.view.tokens
    }

    /// Heads of a token.
    pub fn heads(&self) -> u32 {
        self.view.heads
    }

    /// Numbers of a head.
    pub fn dim(&self) -> u32 {
        self.dim
    }

    /// Type of the numbers.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Scales of the numbers.
    pub fn scales(&self) -> Scales<'a> {
        self.scales
    }

    /// The view.
    pub fn view(&self) -> &View<'a> {
        &self.view
    }

    /// Address of the row of a token and head. Both must exist.
    #[inline]
    pub fn row(&self, token: u32, head: u32) -> *const u8 {
        debug_assert!(token < self.view.tokens && head < self.view.heads);
        let (base, token) = match self.view.place {
            Place::At(address) => (address, token),
            Place::Pages { addresses, page_tokens, shift_bytes } => {
                let page = addresses[(token / page_tokens) as usize];
                (page.wrapping_add_signed(shift_bytes), token % page_tokens)
            }
        };
        let at = u64::from(token) * self.view.token_stride_bytes
            + u64::from(head) * self.view.head_stride_bytes;
        (base + at) as *const u8
    }

    /// Addresses of the rows of tokens of a head, which must exist.
    #[inline]
    pub fn addresses<const N: usize>(&self, tokens: &[u32; N], head: u32) -> [*const u8; N] {
        match self.view.place {
            // One multiplication and one addition each, of several at once.
            Place::At(address) => {
                let base = address + u64::from(head) * self.view.head_stride_bytes;
                tokens.map(|token| {
                    (base + u64::from(token) * self.view.token_stride_bytes) as *const u8
                })
            }
            Place::Pages { .. } => tokens.map(|token| self.row(token, head)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_addresses_follow_the_view() {
        let memory: Vec<f32> = (0..2 * 3 * 4).map(|n| n as f32).collect();
        let view = View {
            place: Place::At(memory.as_ptr() as u64),
            tokens: 2,
            heads: 3,
            run_bytes: 16,
            token_stride_bytes: 48,
            head_stride_bytes: 16,
        };
        // SAFETY: the view covers `memory`, which stays alive.
        let rows = unsafe { Rows::new(view, Dtype::F32, Scales::None) }.expect("sound");
        assert_eq!((rows.tokens(), rows.heads(), rows.dim()), (2, 3, 4));
        // SAFETY: a row of `memory`.
        assert_eq!(unsafe { *rows.row(1, 2).cast::<f32>() }, 20.0);
        let bad = |view, dtype, scales| {
            // SAFETY: rejected before anything is read.
            unsafe { Rows::new(view, dtype, scales) }.is_err()
        };
        assert!(bad(view, Dtype::I4, Scales::None));
        assert!(bad(View { run_bytes: 6, ..view }, Dtype::F32, Scales::None));
        assert!(bad(View { token_stride_bytes: 50, ..view }, Dtype::F32, Scales::None));
        assert!(bad(view, Dtype::F32, Scales::Token(&[1.0; 6])));
        assert!(bad(view, Dtype::I8, Scales::Token(&[1.0; 5])));
    }
}
