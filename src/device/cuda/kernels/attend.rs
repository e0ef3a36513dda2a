//! Validation that all attention kernels share.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::check::{aligned, place};
use crate::fail;

/// Flag of prefill and decode: write results as f32.
pub const OUT_F32: u32 = 1;
/// Limit: tokens of a side.
pub const MAX_TOKENS: u32 = 1 << 30;
/// Limit: heads, a grid dimension.
pub const MAX_HEADS: u32 = 65_535;

/// Checks that addresses are nonzero multiples of `bytes`.
pub fn places(bytes: u64, all: &[(&str, u64)]) -> Result<()> {
    all.iter().try_for_each(|(name, address)| place(name, *address, bytes))
}

/// Checks that strides are multiples of `bytes`.
pub fn strides(bytes: u64, all: &[i64]) -> Result<()> {
    match all.iter().find(|stride| stride.unsigned_abs() % bytes != 0) {
        Some(stride) => fail!(Invalid, "a stride of {stride} bytes is not a multiple of {bytes}"),
        None => Ok(()),
    }
}

/// Checks that strides and addresses of keys and values are multiples of `bytes`; with a page table
/// the addresses are offsets.
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
        fail!(Invalid, "page_tokens is 0, but a page table is given");
    }
    place("table", call.table, 8)?;
    [keys, values].iter().try_for_each(|(name, shift)| aligned(name, *shift, bytes))
}

/// Checks heads, tokens and the scale.
pub fn check_shape(call: &Call) -> Result<()> {
    let (queries, keys) = (call.query_heads, call.key_heads);
    if keys == 0 || queries == 0 || queries % keys != 0 || queries > MAX_HEADS {
        fail!(
            Invalid,
            "{queries} query heads: must be a positive multiple of {keys} key heads, at most {MAX_HEADS}"
        );
    }
    let end = u64::from(call.first) + u64::from(call.query_count);
    if end.max(call.tokens.into()) > u64::from(MAX_TOKENS) {
        fail!(Limit, "queries up to {end} and {} keys: the limit is {MAX_TOKENS}", call.tokens);
    }
    if u64::from(call.query_count) * u64::from(queries) > i32::MAX as u64 {
        fail!(Limit, "{} queries of {queries} heads exceed the limit of rows", call.query_count);
    }
    if !(call.scale.is_finite() && call.scale >= 0.0) {
        fail!(Invalid, "a scale of {}: must be finite and not negative", call.scale);
    }
    Ok(())
}

/// Checks the number of lists: none, one for all, one for each key head, or one for each query
/// head.
pub fn check_lists(call: &Call) -> Result<()> {
    if ![0, 1, call.key_heads, call.query_heads].contains(&call.count) {
        let (queries, keys) = (call.query_heads, call.key_heads);
        fail!(
            Invalid,
            "{} lists for {queries} query heads and {keys} key heads: none, one, or one for each of either",
            call.count
        );
    }
    Ok(())
}

/// Clears the fields that all attention kernels use.
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

/// Clears the fields of values and outputs, too.
pub fn used_results(rest: &mut Call) {
    used(rest);
    (rest.values, rest.value_stride, rest.value_head_stride) = (0, 0, 0);
    (rest.out, rest.out_stride, rest.out_head_stride) = (0, 0, 0);
    (rest.value_dim, rest.more, rest.count) = (0, 0, 0);
}
