//! `Kind::Decode`: attention of the next token, or of a few.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::attend::{self, MAX_HEADS, MAX_TOKENS, OUT_F32};
use crate::device::cuda::kernels::check::{aligned, dtype, only, place, scratch};
use crate::device::cuda::kernels::{Steps, module};
use crate::fail;
use crate::meta::dtype::Dtype;

/// Flags: write the weight of each key, for each query head, for each key head, or summed.
const SUMS: u32 = 6;
const SUMS_BY_QUERY_HEAD: u32 = 2;
const SUMS_BY_KEY_HEAD: u32 = 4;
/// Keys of a part, and the number of keys above which parts are long.
const SHORT_PART: u32 = 128;
const LONG_PART: u32 = 512;
const LONG_FROM: u32 = 16_384;
const THREADS: u32 = 128;
/// Limit: elements of a head.
const MAX_DIM: u32 = 1024;
/// Limit: rows of a thread block.
const ROWS: u32 = 8;

/// Partition of a decode: `cut` of attend_decode.cu.
struct Cut {
    keys: u32,
    part: u32,
    parts: u32,
    groups: u32,
    rows: u32,
}

fn cut(call: &Call) -> Result<Cut> {
    let chosen = u64::from(call.keep) * u64::from(call.recent);
    let keys = if call.count == 0 { call.tokens.into() } else { chosen };
    if keys > MAX_TOKENS.into() {
        fail!(Limit, "a list of {keys} keys: the limit is {MAX_TOKENS}");
    }
    let keys = keys as u32;
    let part = if keys > LONG_FROM { LONG_PART } else { SHORT_PART };
    let is_shared = call.count <= 1 || call.count == call.key_heads;
    let group = if is_shared { call.query_heads / call.key_heads } else { 1 };
    let rows = u64::from(call.query_count) * u64::from(group);
    if rows.div_ceil(ROWS.into()) > MAX_HEADS.into() {
        fail!(Limit, "{rows} rows share keys: too many");
    }
    let parts = keys.div_ceil(part).max(1);
    Ok(Cut { keys, part, parts, groups: call.query_heads / group, rows: rows as u32 })
}

/// Scratch bytes of a call: `results` of attend_decode.cu.
fn results(call: &Call, cut: &Cut) -> Option<u64> {
    let rows = u64::from(call.query_count) * u64::from(call.query_heads);
    let parts = u64::from(cut.parts) * (u64::from(call.value_dim) + 2);
    let products = if call.flags & SUMS == 0 { 0 } else { u64::from(cut.keys) };
    rows.checked_mul(4 * (parts + 1 + products))
}

/// Checks types; returns the alignment of rows of keys and values.
fn check_types(call: &Call) -> Result<u64> {
    const KNOWN: [Dtype; 4] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8];
    let of = dtype("keys", call.dtype, &KNOWN)?;
    dtype("queries", call.other_dtype, &KNOWN[..3])?;
    match (call.scaling, of) {
        (0, _) => {}
        (1 | 2, Dtype::I8) => place("scales", call.scales, 4)?,
        (scaling, _) => fail!(
            Invalid,
            "scaling {scaling} of {of:?}: only I8 has scales, by token (1) or by channel (2)"
        ),
    }
    for (name, dim) in [("keys", call.key_dim), ("values", call.value_dim)] {
        if dim == 0 || dim > MAX_DIM || dim % 8 != 0 {
            fail!(
                Unsupported,
                "decode of {name} of {dim} elements: a multiple of 8 up to {MAX_DIM} is supported"
            );
        }
    }
    Ok(if of == Dtype::I8 { 8 } else { 16 })
}

fn check_chosen(call: &Call) -> Result<()> {
    attend::check_lists(call)?;
    if call.count == 0 {
        return Ok(());
    }
    if call.keep == 0 || call.recent == 0 {
        fail!(
            Invalid,
            "lists of {} blocks of {} tokens: both must be positive",
            call.keep,
            call.recent
        );
    }
    attend::places(4, &[("index", call.index), ("counts", call.counts)])
}

fn check_sums(call: &Call) -> Result<()> {
    let is_shared = call.count <= 1 || call.count == call.key_heads;
    match call.flags & SUMS {
        0 => return Ok(()),
        SUMS_BY_QUERY_HEAD => {}
        SUMS_BY_KEY_HEAD if is_shared => {}
        SUMS if call.count <= 1 => {}
        _ => fail!(Invalid, "weights cannot be summed over heads with different lists"),
    }
    place("numbers", call.numbers, 4)
}

fn check(call: &Call) -> Result<()> {
    only(call, |rest| {
        attend::used_results(rest);
        rest.flags &= !(OUT_F32 | SUMS);
        if call.count > 0 {
            (rest.index, rest.counts, rest.keep, rest.recent) = (0, 0, 0, 0);
        }
        if call.flags & SUMS != 0 {
            rest.numbers = 0;
        }
        if call.scaling != 0 {
            (rest.scaling, rest.scales) = (0, 0);
        }
    })?;
    let bytes = check_types(call)?;
    attend::check_shape(call)?;
    check_chosen(call)?;
    check_sums(call)?;
    aligned("more", call.more, 4)?;
    // Results are written in pairs.
    attend::places(8, &[("queries", call.queries), ("out", call.out)])?;
    attend::strides(8, &[call.query_stride, call.query_head_stride])?;
    attend::strides(8, &[call.out_stride, call.out_head_stride])?;
    attend::check_rows(call, bytes)
}

/// From this many rows that share latent rows on, products use tensor-core tiles.
const TILE_ROWS: u32 = 16;

/// Rows of a thread block that uses tiles, its kernel, and its shared memory; `latent_decode.cu`.
/// Conditions: many heads share latent rows of the queries' type, and weights are not requested.
fn tiles(call: &Call, cut: &Cut, shared_bytes: u32) -> Option<(u32, &'static str, u32)> {
    let of_type = [Dtype::F16, Dtype::Bf16].iter().position(|known| *known as u32 == call.dtype)?;
    let is_latent = (call.key_dim, call.value_dim) == (576, 512)
        && (call.keys, call.key_stride, call.key_head_stride)
            == (call.values, call.value_stride, call.value_head_stride);
    let strides = call.query_stride | call.query_head_stride;
    let is_even = call.queries % 16 == 0 && strides % 16 == 0;
    if !(is_latent && is_even && call.dtype == call.other_dtype) {
        return None;
    }
    if call.flags & SUMS != 0 || cut.rows < TILE_ROWS {
        return None;
    }
    const NAMES: [(u32, [&str; 2]); 2] = [
        (64, ["latent_decode_f16", "latent_decode_bf16"]),
        (32, ["latent_decode_small_f16", "latent_decode_small_bf16"]),
    ];
    // Queries, keys of half tiles, weights twice, exchange between rows, and two tiles.
    let bytes = |rows: u32| rows * 1152 + rows / 32 * 36_864 + rows * 128 + rows * 20 + 2 * 1792;
    let fits =
        |(rows, _): &&(u32, _)| bytes(*rows) <= shared_bytes && (*rows == 32 || cut.rows > 32);
    NAMES.iter().find(fits).map(|(rows, names)| (*rows, names[of_type], bytes(*rows)))
}

/// The kernel for a number of rows.
fn kernel(dtype: u32, rows: u32) -> &'static str {
    const NAMES: [[&str; 3]; 4] = [
        ["decode_f32_1", "decode_f32_4", "decode_f32_8"],
        ["decode_f16_1", "decode_f16_4", "decode_f16_8"],
        ["decode_bf16_1", "decode_bf16_4", "decode_bf16_8"],
        ["decode_i8_1", "decode_i8_4", "decode_i8_8"],
    ];
    let types = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8];
    let at = types.iter().position(|known| *known as u32 == dtype).unwrap_or(0);
    NAMES[at][[1, 4, 8].iter().position(|most| rows <= *most).unwrap_or(2)]
}

/// The launches of a call.
pub fn steps(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    check(call)?;
    let cut = cut(call)?;
    if call.query_count == 0 {
        return Ok(());
    }
    scratch(call, results(call, &cut))?;
    let place = module::ATTEND_DECODE;
    if let Some((rows, name, shared)) = tiles(call, &cut, steps.shared_bytes) {
        let grid = [cut.parts, cut.groups, cut.rows.div_ceil(rows)];
        steps.add_with(module::LATENT_DECODE, name, grid, rows * 4, shared)?;
    } else {
        let rows = match cut.rows {
            1 => 1,
            2..=4 => 4,
            _ => ROWS,
        };
        let dim = call.key_dim.max(call.value_dim).next_multiple_of(64);
        // Queries and weights of rows, positions of keys and values, and exchange between warps.
        let shared = rows * (dim + cut.part) * 4 + cut.part * 20 + 4 * rows * 4;
        let grid = [cut.parts, cut.groups, cut.rows.div_ceil(rows)];
        steps.add_with(place, kernel(call.dtype, rows), grid, THREADS, shared)?;
    }
    steps.add(place, "decode_join", [call.query_count * call.query_heads, 1, 1], THREADS)?;
    let lines = match call.flags & SUMS {
        SUMS_BY_QUERY_HEAD => call.query_heads,
        SUMS_BY_KEY_HEAD => call.key_heads,
        SUMS => 1,
        _ => return Ok(()),
    };
    match cut.keys {
        0 => Ok(()),
        keys => steps.add(place, "decode_sums", [keys.div_ceil(THREADS), lines, 1], THREADS),
    }
}
