//! What is asked of all calls of attention.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::check::{aligned, place};
use crate::fail;

/// What is written is f32, whatever queries are: a flag of prefill and decode.
pub const OUT_F32: u32 = 1;
/// Most tokens of a side.
pub const MAX_TOKENS: u32 = 1 << 30;
/// Most heads: a dimension of a grid.
pub const MAX_HEADS: u32 = 65_535;

/// Refuses addresses that are none, or not multiples of `bytes`.
pub fn places(bytes: u64, all: &[(&str, u64)]) -> Result<()> {
    all.iter().try_for_each(|(name, address)| place(name, *address, bytes))
}

/// Refuses distances that are not multiples of `bytes`.
pub fn strides(bytes: u64, all: &[i64]) -> Result<()> {
    match all.iter().find(|stride| stride.unsigned_abs() % bytes != 0) {
        Some(stride) => fail!(Invalid, "rows {stride} bytes apart: not a multiple of {bytes}"),
        None => Ok(()),
    }
}

/// Where keys and values are: their distances are multiples of `bytes`, and so are their
/// addresses, or what is added to those of pages.
pub fn check_rows(call: &Call, bytes: u64) -> Result<()> {
    let [keys, values] = [("keys", call.keys), ("values", call.values)];
    strides(
        bytes,
        &[call.key_stride, call.key_head_stride, call.value_stride, call.value_head_stride],
    )?;
    if call.table == 0 {
        return places(bytes, &[keys, values]);
    }
    if call.page_tokens == 0 {
        fail!(Invalid, "pages of no tokens");
    }
    place("table", call.table, 8)?;
    [keys, values].iter().try_for_each(|(name, shift)| aligned(name, *shift, bytes))
}

/// Heads, tokens and the scale of attention.
pub fn check_shape(call: &Call) -> Result<()> {
    let (queries, keys) = (call.query_heads, call.key_heads);
    if keys == 0 || queries == 0 || queries % keys != 0 || queries > MAX_HEADS {
        fail!(Invalid, "{queries} query heads cannot share {keys} of keys");
    }
    let end = u64::from(call.first) + u64::from(call.query_count);
    if end.max(call.tokens.into()) > u64::from(MAX_TOKENS) {
        fail!(Limit, "queries up to {end}, {} keys, {MAX_TOKENS} at most", call.tokens);
    }
    if u64::from(call.query_count) * u64::from(queries) > i32::MAX as u64 {
        fail!(Limit, "{} queries of {queries} heads", call.query_count);
    }
    if !(call.scale.is_finite() && call.scale >= 0.0) {
        fail!(Invalid, "a scale of {}", call.scale);
    }
    Ok(())
}

/// So many lists: none, one for all, one for each head of keys, or one for each of queries.
pub fn check_lists(call: &Call) -> Result<()> {
    if ![0, 1, call.key_heads, call.query_heads].contains(&call.count) {
        let (queries, keys) = (call.query_heads, call.key_heads);
        fail!(Invalid, "{} lists for {queries} heads of queries, {keys} of keys", call.count);
    }
    Ok(())
}

/// Takes away what all calls of attention use.
pub fn used(rest: &mut Call) {
    (rest.dtype, rest.other_dtype, rest.scale) = (0, 0, 0.0);
    (rest.queries, rest.query_stride, rest.query_head_stride) = (0, 0, 0);
    (rest.keys, rest.key_stride, rest.key_head_stride) = (0, 0, 0);
    (rest.query_count, rest.query_heads, rest.first) = (0, 0, 0);
    (rest.key_heads, rest.key_dim, rest.tokens) = (0, 0, 0);
    (rest.scratch, rest.scratch_bytes) = (0, 0);
    if rest.table != 0 {
        (rest.table, rest.page_tokens) = (0, 0);
    }
}

/// Takes away what is used of values and of what is written.
pub fn used_results(rest: &mut Call) {
    used(rest);
    (rest.values, rest.value_stride, rest.value_head_stride) = (0, 0, 0);
    (rest.out, rest.out_stride, rest.out_head_stride) = (0, 0, 0);
    (rest.value_dim, rest.more, rest.count) = (0, 0, 0);
}
