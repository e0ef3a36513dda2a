//! `Kind::Prefill`: attention of a prompt, or of a part of one.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::attend::{self, OUT_F32};
use crate::device::cuda::kernels::check::{aligned, dtype, only, scratch};
use crate::device::cuda::kernels::{Steps, module};
use crate::fail;
use crate::meta::dtype::Dtype;

/// Keys of a tile.
const KEYS: u32 = 64;
/// Bytes of the descriptions of two tiles, and of the key queue: `tile` and `queue` of
/// attend_walk.h.
const TILES: u32 = 2 * 1792;
const QUEUE: u32 = 4552;
/// Queries of a thread block, if there are lists.
const LISTED_ROWS: u32 = 64;

/// Kernels of a shape.
struct Shape {
    dtype: Dtype,
    dims: (u32, u32),
    /// Kernel over all keys, and kernel by lists.
    names: [&'static str; 2],
    module: usize,
    /// Queries and threads of a block, over all keys.
    rows: u32,
    threads: u32,
    /// Queries of a block, by lists.
    listed_rows: u32,
    /// Shared memory of a block, without tiles and lists.
    bytes: [u32; 2],
}

/// Shared memory: keys and values of a tile, and 128 queries, or 64 by lists.
const fn whole(dtype: Dtype, dim: u32, names: [&'static str; 2]) -> Shape {
    let tile = 2 * KEYS * dim * 2;
    let (module, bytes) =
        (module::ATTEND_PREFILL, [tile + 128 * dim * 2, tile + LISTED_ROWS * dim * 2]);
    let (rows, listed_rows, threads) = (128, LISTED_ROWS, 128);
    Shape { dtype, dims: (dim, dim), names, module, rows, listed_rows, threads, bytes }
}

/// Shared memory: queries, keys of half tiles (one for each 32 queries), weights, and exchange
/// between rows.
const fn latent(dtype: Dtype, rows: u32, names: [&'static str; 2]) -> Shape {
    let halves = rows / 32 * (KEYS / 2) * 576 * 2;
    let bytes = [rows * 576 * 2 + halves + rows * 32 * 2 + 5 * rows * 4; 2];
    let (module, dims, threads) = (module::ATTEND_LATENT, (576, 512), rows * 4);
    Shape { dtype, dims, names, module, rows, listed_rows: rows, threads, bytes }
}

/// Shapes of the kernels. The first shape of a kind that fits the device's shared memory is used.
const SHAPES: [Shape; 8] = [
    whole(Dtype::F16, 64, ["prefill_f16_64", "prefill_listed_f16_64"]),
    whole(Dtype::F16, 128, ["prefill_f16_128", "prefill_listed_f16_128"]),
    whole(Dtype::Bf16, 64, ["prefill_bf16_64", "prefill_listed_bf16_64"]),
    whole(Dtype::Bf16, 128, ["prefill_bf16_128", "prefill_listed_bf16_128"]),
    latent(Dtype::F16, 64, ["latent_f16", "latent_listed_f16"]),
    latent(Dtype::Bf16, 64, ["latent_bf16", "latent_listed_bf16"]),
    latent(Dtype::F16, 32, ["latent_small_f16", "latent_small_listed_f16"]),
    latent(Dtype::Bf16, 32, ["latent_small_bf16", "latent_small_listed_bf16"]),
];

impl Shape {
    /// Shared memory of a block.
    fn shared(&self, is_listed: bool) -> u32 {
        let lists = if is_listed { QUEUE } else { 0 };
        self.bytes[usize::from(is_listed)] + TILES + lists
    }
}

/// The kernels of a call; the smallest if none fits.
fn find(call: &Call, shared_bytes: u32) -> Result<&'static Shape> {
    let of = dtype("keys", call.dtype, &[Dtype::F16, Dtype::Bf16])?;
    if call.other_dtype != call.dtype {
        fail!(
            Invalid,
            "queries of type {} with keys of {of:?}: the types must be equal",
            call.other_dtype
        );
    }
    let dims = (call.key_dim, call.value_dim);
    let mut all = SHAPES.iter().filter(|shape| shape.dims == dims && shape.dtype == of);
    let last = all.clone().next_back();
    match all.find(|shape| shape.shared(call.count > 0) <= shared_bytes).or(last) {
        Some(shape) => Ok(shape),
        None => fail!(
            Unsupported,
            "prefill of keys of {} elements and values of {}: 64 and 64, 128 and 128, or 576 and 512 are supported",
            dims.0,
            dims.1
        ),
    }
}

fn check(call: &Call, shape: &Shape) -> Result<()> {
    only(call, |rest| {
        attend::used_results(rest);
        rest.flags &= !OUT_F32;
        if call.count > 0 {
            (rest.index, rest.counts, rest.numbers) = (0, 0, 0);
        }
    })?;
    attend::check_shape(call)?;
    attend::check_lists(call)?;
    attend::places(16, &[("queries", call.queries), ("out", call.out)])?;
    attend::strides(16, &[call.query_stride, call.query_head_stride])?;
    attend::strides(16, &[call.out_stride, call.out_head_stride])?;
    attend::check_rows(call, 16)?;
    aligned("more", call.more, 4)?;
    let [keys, values] = [
        (call.keys, call.key_stride, call.key_head_stride),
        (call.values, call.value_stride, call.value_head_stride),
    ];
    if shape.module == module::ATTEND_LATENT && keys != values {
        fail!(
            Unsupported,
            "latent attention with separate values: values must be the first 512 elements of keys"
        );
    }
    if call.count == 0 {
        return Ok(());
    }
    let lists = [("index", call.index), ("counts", call.counts), ("numbers", call.numbers)];
    attend::places(4, &lists)?;
    scratch(call, Some(call.line_bytes()))
}

/// The launches of a call.
pub fn steps(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    let shape = find(call, steps.shared_bytes)?;
    check(call, shape)?;
    if call.query_count == 0 {
        return Ok(());
    }
    let Shape { names: [dense, listed], module: place, threads, .. } = *shape;
    let shared = shape.shared(call.count > 0);
    if call.count == 0 {
        let grid = [call.query_count.div_ceil(shape.rows), call.query_heads, 1];
        return steps.add_with(place, dense, grid, threads, shared);
    }
    let grid = [call.query_count.div_ceil(shape.listed_rows) + 1, call.query_heads, 1];
    steps.add(module::ATTEND_PREFILL, "prefill_lines", [call.count, 1, 1], 256)?;
    steps.add_with(place, listed, grid, threads, shared)
}
