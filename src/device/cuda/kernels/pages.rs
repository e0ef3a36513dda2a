//! `Kind::PageBoxes` and `Kind::PageScores`: bounding boxes of pages and their scores.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::check::{
    FULL, Rows, aligned, blocks, dtype, is_even, number, only, place,
};
use crate::device::cuda::kernels::{Steps, module};
use crate::fail;
use crate::meta::dtype::Dtype;

const KEYS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const BOXES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];
/// Limit: elements of a head.
const MAX_DIM: u32 = 1024;
/// Limit: heads, a grid dimension.
const MAX_HEADS: u32 = 65_535;
/// Flag: blocks of a page table are aligned.
const EVEN: u32 = 1;
/// Threads of a scoring block, and shared memory of every device.
const SCORERS: u32 = 128;
const SHARED_BYTES: u32 = 48 << 10;

fn bytes(dtype: Dtype) -> u64 {
    u64::from(dtype.bits() / 8)
}

/// The launches that extend boxes.
pub fn boxes(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    only(call, |rest| {
        (rest.dtype, rest.other_dtype, rest.flags) = (0, 0, 0);
        (rest.keys, rest.key_stride, rest.key_head_stride) = (0, 0, 0);
        (rest.out, rest.out_stride, rest.out_head_stride) = (0, 0, 0);
        (rest.first, rest.count, rest.page_tokens) = (0, 0, 0);
        (rest.key_heads, rest.key_dim) = (0, 0);
        if rest.table != 0 {
            (rest.table, rest.tokens) = (0, 0);
        }
    })?;
    let key = dtype("keys", call.dtype, &KEYS)?;
    let put = dtype("boxes", call.other_dtype, &BOXES)?;
    number("keys", call.count, u32::MAX)?;
    number("tokens of a page", call.page_tokens, u32::MAX)?;
    number("heads", call.key_heads, MAX_HEADS)?;
    number("numbers of a head", call.key_dim, MAX_DIM)?;
    let is_table = check_table(call)?;
    let (heads, tokens) = (u64::from(call.key_heads), if is_table { 1 } else { call.count });
    Rows {
        name: "keys",
        // With a table: an offset into a block, which is added to the block's address.
        address: if is_table { (1 << 62) + call.keys % (1 << 62) } else { call.keys },
        size: bytes(key),
        numbers: call.key_dim.into(),
        steps: [(tokens.into(), call.key_stride), (heads, call.key_head_stride)],
    }
    .check()?;
    let each = u64::from(call.page_tokens);
    let end = (u64::from(call.first) + u64::from(call.count)).div_ceil(each);
    Rows {
        name: "boxes",
        address: call.out,
        size: bytes(put),
        numbers: 2 * u64::from(call.key_dim),
        steps: [(end, call.out_stride), (heads, call.out_head_stride)],
    }
    .check_written()?;
    let read = [call.keys, call.key_stride as u64, call.key_head_stride as u64];
    let written = [call.out, call.out_stride as u64, call.out_head_stride as u64];
    let is_whole = u64::from(call.key_dim) * bytes(key) % 16 == 0;
    let is_whole = is_whole && is_even(&read) && is_even(&written);
    let is_whole = is_whole && (!is_table || call.flags & EVEN != 0);
    let at_once = if is_whole { 16 / bytes(key) } else { 1 };
    let name = if is_whole { "page_boxes" } else { "page_boxes_odd" };
    let pages = end - u64::from(call.first) / each;
    let work = pages * heads * u64::from(call.key_dim) / at_once;
    // Pages are long: many small blocks balance better than a few large ones.
    let blocks = work.div_ceil(256).clamp(1, 8 * u64::from(FULL)) as u32;
    steps.add(module::PAGES, name, [blocks, 1, 1], 256)
}

/// Validates the block table; whether keys are in blocks.
fn check_table(call: &Call) -> Result<bool> {
    if call.flags & !EVEN != 0 || (call.table == 0 && call.flags != 0) {
        fail!(Invalid, "flags {:#x} of page boxes: only 1, with a block table", call.flags);
    }
    if call.tokens % call.page_tokens != 0 {
        fail!(
            Invalid,
            "blocks of {} tokens: must be a multiple of {} page tokens",
            call.tokens,
            call.page_tokens
        );
    }
    aligned("blocks", call.table, 8)?;
    Ok(call.table != 0)
}

/// The launches that score pages.
pub fn scores(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    let (box_bytes, rows) = check_scores(call)?;
    let heads = call.key_heads;
    let numbers = 2 * u64::from(call.key_dim);
    let strides = [call.numbers, call.key_stride as u64, call.key_head_stride as u64];
    if numbers * box_bytes % 16 != 0 || !is_even(&strides) {
        let all = rows * u64::from(heads) * u64::from(call.count);
        return steps.add(module::PAGES, "page_scores_odd", [blocks(all, 8), 1, 1], 256);
    }
    // For each query, every lane of a warp reads 16 bytes of numbers.
    let line = 32 * 16 / box_bytes;
    let row_bytes = 4 * numbers.next_multiple_of(line) as u32;
    let (name, at_once, pages) = match rows {
        5.. if 8 * row_bytes <= SHARED_BYTES => ("page_scores_8", 8, 4),
        2.. => ("page_scores_4", 4, 8),
        _ => ("page_scores_1", 1, 8),
    };
    let parts = blocks(rows, at_once);
    let few = (FULL / heads.saturating_mul(parts).max(1)).max(1);
    let across = u64::from(call.count).div_ceil(pages * u64::from(SCORERS / 32)) as u32;
    let shared = at_once as u32 * row_bytes;
    steps.add_with(module::PAGES, name, [across.min(few), heads, parts], SCORERS, shared)
}

/// Validates a call; returns the bytes of a box element and the query rows of a key head.
fn check_scores(call: &Call) -> Result<(u64, u64)> {
    only(call, |rest| {
        (rest.dtype, rest.other_dtype) = (0, 0);
        (rest.queries, rest.query_stride, rest.query_head_stride) = (0, 0, 0);
        (rest.numbers, rest.key_stride, rest.key_head_stride) = (0, 0, 0);
        (rest.out, rest.index, rest.first, rest.count) = (0, 0, 0, 0);
        (rest.query_count, rest.query_heads) = (0, 0);
        (rest.key_heads, rest.key_dim) = (0, 0);
    })?;
    let (put, query) =
        (dtype("boxes", call.dtype, &BOXES)?, dtype("queries", call.other_dtype, &KEYS)?);
    number("pages", call.count, u32::MAX)?;
    number("heads of keys", call.key_heads, MAX_HEADS)?;
    number("numbers of a head", call.key_dim, MAX_DIM)?;
    number("queries", call.query_count, u32::MAX)?;
    number("heads of queries", call.query_heads, u32::MAX)?;
    let (heads, key_heads) = (u64::from(call.query_heads), u64::from(call.key_heads));
    if heads % key_heads != 0 {
        fail!(Invalid, "{heads} query heads: must be a multiple of {key_heads} key heads");
    }
    let rows = u64::from(call.query_count) * heads;
    if rows > u64::from(u32::MAX) {
        fail!(Limit, "{} queries of {heads} heads exceed the limit of rows", call.query_count);
    }
    if call.first.checked_add(call.count).is_none() || (call.index != 0 && call.first != 0) {
        fail!(
            Invalid,
            "pages from {} on, {} of them: out of range, or combined with a list",
            call.first,
            call.count
        );
    }
    aligned("numbers of pages", call.index, 4)?;
    place("scores", call.out, 4)?;
    if (rows * u64::from(call.count)).checked_mul(4).and_then(|n| n.checked_add(call.out)).is_none()
    {
        fail!(Invalid, "scores exceed the address space");
    }
    let pages = if call.index != 0 { 1 } else { u64::from(call.first) + u64::from(call.count) };
    Rows {
        name: "boxes",
        address: call.numbers,
        size: bytes(put),
        numbers: 2 * u64::from(call.key_dim),
        steps: [(pages, call.key_stride), (key_heads, call.key_head_stride)],
    }
    .check()?;
    Rows {
        name: "queries",
        address: call.queries,
        size: bytes(query),
        numbers: call.key_dim.into(),
        steps: [(call.query_count.into(), call.query_stride), (heads, call.query_head_stride)],
    }
    .check()?;
    Ok((bytes(put), rows / key_heads))
}
