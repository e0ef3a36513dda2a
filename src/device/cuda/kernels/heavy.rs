//! `Kind::Add`, `Kind::Keep` and `Kind::Compact`: accumulate weights of tokens, choose the tokens
//! to keep, and compact their rows.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::attend::{self, MAX_HEADS, MAX_TOKENS};
use crate::device::cuda::kernels::check::{aligned, dtype, number, only, place};
use crate::device::cuda::kernels::{Steps, module};
use crate::fail;
use crate::meta::dtype::Dtype;

/// Threads of a block that adds or moves, and of one that chooses.
const THREADS: u32 = 256;
const KEEP_THREADS: u32 = 1024;
/// Bytes of a row that one thread block moves.
const SLICE: u32 = 64;
/// Limit: bytes of a row.
const MAX_ROW: u64 = 1 << 30;

fn check_scores(call: &Call, lists: u32) -> Result<()> {
    number("lists", lists, MAX_HEADS)?;
    if call.tokens > MAX_TOKENS {
        fail!(Limit, "{} tokens: the limit is {MAX_TOKENS}", call.tokens);
    }
    let bytes = 4 * u64::from(call.tokens);
    if lists > 1 && call.out_head_stride.unsigned_abs() < bytes {
        fail!(
            Invalid,
            "score lists of {bytes} bytes overlap with a stride of {}",
            call.out_head_stride
        );
    }
    attend::strides(4, &[call.out_head_stride])?;
    place("numbers", call.numbers, 4)
}

fn check_lists(call: &Call, lists: u32, most: u64) -> Result<()> {
    if lists > 1 && call.out_stride.unsigned_abs() < 4 * most {
        fail!(
            Invalid,
            "lists of up to {most} entries overlap with a stride of {} bytes",
            call.out_stride
        );
    }
    attend::strides(4, &[call.out_stride])?;
    attend::places(4, &[("index", call.index), ("counts", call.counts)])
}

/// The launches that add weights.
pub fn add(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    only(call, |rest| {
        (rest.numbers, rest.out_head_stride, rest.key_heads, rest.tokens) = (0, 0, 0, 0);
        (rest.more, rest.query_head_stride, rest.query_heads) = (0, 0, 0);
    })?;
    let (rows, lists) = (call.query_heads, call.key_heads);
    check_scores(call, lists)?;
    if rows == 0 || rows % lists != 0 {
        fail!(Invalid, "{rows} rows of sums: must be a positive multiple of {lists} lists");
    }
    attend::strides(4, &[call.query_head_stride])?;
    place("more", call.more, 4)?;
    match call.tokens {
        0 => Ok(()),
        n => steps.add(module::HEAVY, "heavy_add", [n.div_ceil(THREADS), lists, 1], THREADS),
    }
}

/// The launches that choose tokens.
pub fn keep(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    only(call, |rest| {
        (rest.numbers, rest.out_head_stride, rest.key_heads, rest.tokens) = (0, 0, 0, 0);
        (rest.index, rest.out_stride, rest.counts) = (0, 0, 0);
        (rest.sinks, rest.recent, rest.keep) = (0, 0, 0);
    })?;
    let lists = call.key_heads;
    check_scores(call, lists)?;
    let most = u64::from(call.sinks) + u64::from(call.recent) + u64::from(call.keep);
    check_lists(call, lists, most.min(call.tokens.into()))?;
    steps.add(module::HEAVY, "heavy_keep", [lists, 1, 1], KEEP_THREADS)
}

/// Bytes of a row.
fn row_bytes(of: Dtype, dim: u32) -> Result<u32> {
    let bytes = if of == Dtype::Bytes { Some(dim.into()) } else { of.bytes_of(dim.into()) };
    match bytes {
        Some(bytes @ 1..=MAX_ROW) => Ok(bytes as u32),
        _ => fail!(
            Invalid,
            "rows of {dim} elements of {of:?}: 1 to {MAX_ROW} whole bytes are accepted"
        ),
    }
}

/// Checks the addresses of rows; with a page table they are offsets.
fn check_rows(call: &Call, has_values: bool) -> Result<()> {
    if call.table == 0 {
        place("keys", call.keys, 1)?;
        return if has_values { place("values", call.values, 1) } else { Ok(()) };
    }
    aligned("table", call.table, 8)?;
    number("tokens of a page", call.page_tokens, MAX_TOKENS)
}

/// The launches that compact rows.
pub fn compact(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    only(call, |rest| {
        attend::used(rest);
        (rest.values, rest.value_stride, rest.value_head_stride, rest.value_dim) = (0, 0, 0, 0);
        (rest.index, rest.out_stride, rest.counts, rest.count) = (0, 0, 0, 0);
        (rest.numbers, rest.out_head_stride) = (0, 0);
    })?;
    let of = dtype("rows", call.dtype, &Dtype::ALL)?;
    let (heads, lists) = (call.key_heads, call.count);
    number("heads", heads, MAX_HEADS)?;
    if lists != 1 && lists != heads {
        fail!(Invalid, "{lists} lists for {heads} heads: one for all, or one for each");
    }
    check_lists(call, lists, 0)?;
    let has_values = call.value_dim > 0;
    check_rows(call, has_values)?;
    if has_values && call.values == call.keys {
        fail!(Invalid, "keys and values have the same address: they would move twice");
    }
    let keys = row_bytes(of, call.key_dim)?;
    let values = if has_values { row_bytes(of, call.value_dim)? } else { 0 };
    let mut all = call.keys | call.key_stride as u64 | call.key_head_stride as u64;
    all |= u64::from(keys | values);
    if has_values {
        all |= call.values | call.value_stride as u64 | call.value_head_stride as u64;
    }
    let name = match all % 16 {
        0 => "heavy_compact_16",
        4 | 8 | 12 => "heavy_compact_4",
        _ => "heavy_compact_1",
    };
    let slices = keys.max(values).div_ceil(SLICE);
    let grid = [slices, heads, 1 + u32::from(has_values)];
    steps.add(module::HEAVY, name, grid, THREADS)?;
    if call.numbers == 0 {
        return Ok(());
    }
    check_scores(call, lists)?;
    steps.add(module::HEAVY, "heavy_compact_scores", [lists, 1, 1], THREADS)
}
