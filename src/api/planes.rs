//! The engine's memory of a transfer: slices, with the order of tokens and heads in them.

use std::ops::{Deref, DerefMut};

use crate::base::status::Result;
use crate::device::Memory;
use crate::fail;
use crate::store::state::batches::{PlaneView, Tokens};

/// Where the heads of each token are in a slice: head `h` of token `t` begins at byte
/// `t * token_stride_bytes + h * head_stride_bytes`, and has `head_bytes` bytes without gaps.
///
/// ```
/// use kvtier::api::Strides;
///
/// /// A contiguous tensor `[heads, capacity, dim]` of numbers of 4 bytes.
/// fn heads_first(heads: u32, capacity: u64, dim: u64) -> Strides {
///     Strides {
///         heads,
///         head_bytes: dim * 4,
///         token_stride_bytes: dim * 4,
///         head_stride_bytes: capacity * dim * 4,
///     }
/// }
/// # heads_first(1, 1, 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// Heads of a token.
    pub heads: u32,
    /// Bytes of a head of a token.
    pub head_bytes: u64,
    /// Bytes from a token to the next.
    pub token_stride_bytes: u64,
    /// Bytes from a head to the next.
    pub head_stride_bytes: u64,
}

impl Strides {
    /// The number of whole tokens in a slice.
    fn tokens_in(&self, len: usize) -> Result<u32> {
        let heads = u64::from(self.heads.saturating_sub(1)).checked_mul(self.head_stride_bytes);
        let one = heads.and_then(|bytes| bytes.checked_add(self.head_bytes));
        let rest = one.and_then(|bytes| (len as u64).checked_sub(bytes));
        let (Some(rest), false) = (rest, self.token_stride_bytes == 0 || self.head_bytes == 0)
        else {
            fail!(
                Invalid,
                "a slice of {len} bytes has no token with {self:?}: a token of all heads must fit, and \
                 head_bytes and token_stride_bytes must not be 0"
            );
        };
        Ok(u32::try_from(rest / self.token_stride_bytes + 1).unwrap_or(u32::MAX))
    }
}

/// One plane, K or V, that a put reads. `From<&[u8]>` makes one of a slice with the tokens in order,
/// each with its heads in order, without gaps.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    bytes: &'a [u8],
    strides: Option<Strides>,
}

impl<'a> Source<'a> {
    /// A plane in another order.
    pub fn strided(bytes: &'a [u8], strides: Strides) -> Source<'a> {
        Source { bytes, strides: Some(strides) }
    }
}

impl<'a> From<&'a [u8]> for Source<'a> {
    fn from(bytes: &'a [u8]) -> Source<'a> {
        Source { bytes, strides: None }
    }
}

impl Deref for Source<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

/// One plane, K or V, that a get writes. `From<&mut [u8]>` makes one of a slice in the order of
/// [`Source`].
#[derive(Debug)]
pub struct Target<'a> {
    bytes: &'a mut [u8],
    strides: Option<Strides>,
}

impl<'a> Target<'a> {
    /// A plane in another order. Bytes between the heads are not written.
    pub fn strided(bytes: &'a mut [u8], strides: Strides) -> Target<'a> {
        Target { bytes, strides: Some(strides) }
    }

    /// The slice.
    pub fn into_inner(self) -> &'a mut [u8] {
        self.bytes
    }
}

impl<'a> From<&'a mut [u8]> for Target<'a> {
    fn from(bytes: &'a mut [u8]) -> Target<'a> {
        Target { bytes, strides: None }
    }
}

impl Deref for Target<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl DerefMut for Target<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

/// The planes of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Layer<P> {
    /// K, the latent, or the states.
    pub k: P,
    /// V, if the layout has it.
    pub v: Option<P>,
}

impl<P> Layer<P> {
    /// A layer with K and V.
    pub fn kv(k: impl Into<P>, v: impl Into<P>) -> Layer<P> {
        Layer { k: k.into(), v: Some(v.into()) }
    }

    /// A layer with one plane: a latent, or the states at the ends of the chunks.
    pub fn single(k: impl Into<P>) -> Layer<P> {
        Layer { k: k.into(), v: None }
    }
}

/// A plane as the store sees it.
pub(super) trait Plane {
    /// Address and length of the memory, from a pointer that may be used as the plane is used.
    fn memory(&mut self) -> (u64, usize);
    fn strides(&self) -> Option<Strides>;

    /// A view that ends within the slice, whatever the transfer asks for. `token_bytes` is what the
    /// layout says.
    fn view(&mut self, token_bytes: u64) -> Result<PlaneView> {
        let (address, len) = self.memory();
        let in_order = Strides {
            heads: 1,
            head_bytes: token_bytes,
            token_stride_bytes: token_bytes,
            head_stride_bytes: token_bytes,
        };
        let strides = self.strides().unwrap_or(in_order);
        Ok(PlaneView {
            place: Tokens::At(address),
            tokens: strides.tokens_in(len)?,
            heads: strides.heads,
            run_bytes: strides.head_bytes,
            token_stride_bytes: strides.token_stride_bytes,
            head_stride_bytes: strides.head_stride_bytes,
            memory: Memory::Host,
        })
    }
}

// The library's threads use these addresses as pointers without provenance of their own: `expose`
// lets them.

impl Plane for Source<'_> {
    fn memory(&mut self) -> (u64, usize) {
        (self.bytes.as_ptr().expose_provenance() as u64, self.bytes.len())
    }

    fn strides(&self) -> Option<Strides> {
        self.strides
    }
}

impl Plane for Target<'_> {
    fn memory(&mut self) -> (u64, usize) {
        (self.bytes.as_mut_ptr().expose_provenance() as u64, self.bytes.len())
    }

    fn strides(&self) -> Option<Strides> {
        self.strides
    }
}
