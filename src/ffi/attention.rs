//! What a model's attention is, where in a sequence a question is asked, and rows of numbers.

use crate::attention::{Rows, Scales};
use crate::base::status::Result;
use crate::device::Memory;
use crate::fail;
use crate::ffi::abi::{Plain, read};
use crate::ffi::policy_use::numbers;
use crate::ffi::view::{kvt_view_t, plane_alone};
use crate::meta::dtype::Dtype;
use crate::sparse::{Context, Kind, Shape};
use crate::store::state::session::PlaneView;

/// Keys and values apart, by head.
pub const KVT_ATTENTION_SPLIT: u32 = 0;
/// One row a token for all heads, of which values are the first part (MLA's latent).
pub const KVT_ATTENTION_LATENT: u32 = 1;

/// What a model's attention is.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_attention_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Layers, at most 2,048.
    pub layers: u32,
    /// Heads of queries, at most 1,024.
    pub query_heads: u32,
    /// Heads of keys; groups of query heads share one.
    pub key_heads: u32,
    /// Numbers of a query's and a key's head, at most 2,048.
    pub key_dim: u32,
    /// Numbers of a value's head.
    pub value_dim: u32,
    /// KVT_ATTENTION_*.
    pub kind: u32,
    /// Tokens of a block, which is loaded or moved as a whole: those of a chunk.
    pub block_tokens: u32,
    /// Most tokens of a sequence.
    pub max_tokens: u32,
    /// What products of queries and keys are multiplied with; 0 = 1 / sqrt(key_dim).
    pub scale: f32,
    /// Always 0.
    pub reserved: u32,
}

/// Where in a sequence a question is asked.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_context_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// 1 = the prompt is being computed; 0 = text is written.
    pub is_prefill: u32,
    /// Which part of the prompt it is, where it is computed in parts.
    pub part: u32,
    /// How many parts; 0 = 1.
    pub parts: u32,
    /// The position of the first query.
    pub first_query: u32,
    /// Tokens that the sequence has, with those of the queries.
    pub tokens: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Numbers are what they are.
pub const KVT_SCALES_NONE: u32 = 0;
/// One scale for each token and head, heads innermost.
pub const KVT_SCALES_TOKEN: u32 = 1;
/// One scale for each head and number, numbers innermost.
pub const KVT_SCALES_CHANNEL: u32 = 2;

/// Queries, keys or values that the library reads during a call: a view, and what its
/// numbers are.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_rows_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Where they are; heads and the bytes of one say what a row is. In host memory.
    pub view: kvt_view_t,
    /// KVT_DTYPE_*: f32, f16, bf16 or int8.
    pub dtype: u32,
    /// KVT_SCALES_*, for int8.
    pub scaling: u32,
    /// The scales; null without.
    pub scales: *const f32,
    /// How many.
    pub scale_count: u64,
}

/// # Safety
/// `given` is null or valid for the size it states.
pub(crate) unsafe fn shape_of(given: *const kvt_attention_t) -> Result<Shape> {
    if given.is_null() {
        fail!(Invalid, "attention is null");
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(given)? };
    let kind = match given.kind {
        KVT_ATTENTION_SPLIT => Kind::Split,
        KVT_ATTENTION_LATENT => Kind::Latent,
        other => fail!(Invalid, "kind {other} is none of KVT_ATTENTION_*"),
    };
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
    let shape = Shape {
        layers: given.layers,
        query_heads: given.query_heads,
        key_heads: given.key_heads,
        key_dim: given.key_dim,
        value_dim: given.value_dim,
        scale: given.scale,
        kind,
        block_tokens: given.block_tokens,
        max_tokens: given.max_tokens,
    };
    shape.check()?;
    Ok(shape)
}

/// # Safety
/// `given` is null or valid for the size it states.
pub(crate) unsafe fn context_of(given: *const kvt_sparse_context_t) -> Result<Context> {
    if given.is_null() {
        fail!(Invalid, "context is null");
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(given)? };
    if given.is_prefill > 1 || given.reserved != 0 {
        fail!(Invalid, "is_prefill is {}, reserved {}", given.is_prefill, given.reserved);
    }
    let parts = given.parts.max(1);
    if given.part >= parts || given.first_query > given.tokens {
        fail!(
            Invalid,
            "part {} of {parts}, queries from {} on of {} tokens",
            given.part,
            given.first_query,
            given.tokens
        );
    }
    let is_prefill = given.is_prefill == 1;
    let (part, first_query, tokens) = (given.part, given.first_query, given.tokens);
    Ok(Context { is_prefill, part, parts, first_query, tokens })
}

/// Rows as the caller gave them, with what was copied of a table of pages.
pub(crate) struct GivenRows<'a> {
    plane: PlaneView,
    dtype: Dtype,
    scales: Scales<'a>,
}

impl<'a> GivenRows<'a> {
    /// Reads what stands in a struct.
    ///
    /// # Safety
    /// Arrays that it leads to can be read, and nobody writes them, as long as this lives.
    pub(crate) unsafe fn new(what: &str, given: &kvt_rows_t) -> Result<GivenRows<'a>> {
        let Some(dtype) = Dtype::from_code(given.dtype) else {
            fail!(Invalid, "{what}: dtype {} is none of KVT_DTYPE_*", given.dtype);
        };
        // SAFETY: the caller's promise.
        let plane = unsafe { plane_alone(&given.view).map_err(|error| error.within(what))? };
        if plane.memory != Memory::Host {
            fail!(Unavailable, "{what} are not in host memory");
        }
        // SAFETY: the caller's promise.
        let scales = unsafe { numbers(given.scales, given.scale_count, 1 << 28)? };
        let scales = match given.scaling {
            KVT_SCALES_NONE if scales.is_empty() => Scales::None,
            KVT_SCALES_TOKEN => Scales::Token(scales),
            KVT_SCALES_CHANNEL => Scales::Channel(scales),
            other => fail!(Invalid, "{what}: scaling {other} with {} scales", scales.len()),
        };
        Ok(GivenRows { plane, dtype, scales })
    }

    /// The rows, checked.
    ///
    /// # Safety
    /// What the view leads to can be read, and nobody writes it, as long as they live.
    pub(crate) unsafe fn rows(&self, what: &str) -> Result<Rows<'_>> {
        // SAFETY: the caller's promise.
        let rows = unsafe { Rows::new(self.plane.view(), self.dtype, self.scales) };
        rows.map_err(|error| error.within(what))
    }
}

/// Calls `body` with rows; null = there are none.
///
/// # Safety
/// `given` is null or valid for the size it states; what it leads to can be read, and nobody
/// writes it, during the call.
pub(crate) unsafe fn with_rows<R>(
    what: &str,
    given: *const kvt_rows_t,
    body: impl FnOnce(Option<&Rows<'_>>) -> Result<R>,
) -> Result<R> {
    if given.is_null() {
        return body(None);
    }
    // SAFETY: the caller's promise.
    unsafe {
        let given = GivenRows::new(what, &read(given)?)?;
        body(Some(&given.rows(what)?))
    }
}
