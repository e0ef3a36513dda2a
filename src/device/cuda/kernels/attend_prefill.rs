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
/// Bytes of what is told of two tiles, and of keys in line: `tile` and `queue` of attend_walk.h.
const TILES: u32 = 2 * 1792;
const QUEUE: u32 = 4552;
/// Queries that have blocks of threads of their own where there are lists.
const LISTED_ROWS: u32 = 64;

/// Kernels of a shape.
struct Shape {
    dtype: Dtype,
    dims: (u32, u32),
    /// Of all keys, and by lists.
    names: [&'static str; 2],
    module: usize,
    /// Queries and threads of a block, of all keys.
    rows: u32,
    threads: u32,
    /// The same by lists; where lists are of other numbers, blocks have more than one each.
    listed_rows: u32,
    /// Shared memory of a block, beside what tiles and lists take.
    bytes: [u32; 2],
}

/// Keys and values of a tile, and queries: 128, or by lists 64.
const fn whole(dtype: Dtype, dim: u32, names: [&'static str; 2]) -> Shape {
    let tile = 2 * KEYS * dim * 2;
    let (module, bytes) =
        (module::ATTEND_PREFILL, [tile + 128 * dim * 2, tile + LISTED_ROWS * dim * 2]);
    let (rows, listed_rows, threads) = (128, LISTED_ROWS, 128);
    Shape { dtype, dims: (dim, dim), names, module, rows, listed_rows, threads, bytes }
}

/// Queries, keys of half tiles, one for each 32 queries, weights, and what rows tell each other.
const fn latent(dtype: Dtype, rows: u32, names: [&'static str; 2]) -> Shape {
    let halves = rows / 32 * (KEYS / 2) * 576 * 2;
    let bytes = [rows * 576 * 2 + halves + rows * 32 * 2 + 5 * rows * 4; 2];
    let (module, dims, threads) = (module::ATTEND_LATENT, (576, 512), rows * 4);
    Shape { dtype, dims, names, module, rows, listed_rows: rows, threads, bytes }
}

/// Of two of a kind the first that a device has shared memory for is taken.
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
    /// Shared memory of a block, by lists or not.
    fn shared(&self, is_listed: bool) -> u32 {
        let lists = if is_listed { QUEUE } else { 0 };
        self.bytes[usize::from(is_listed)] + TILES + lists
    }
}

/// The kernels of a call; those that take the least where none fits.
fn find(call: &Call, shared_bytes: u32) -> Result<&'static Shape> {
    let of = dtype("keys", call.dtype, &[Dtype::F16, Dtype::Bf16])?;
    if call.other_dtype != call.dtype {
        fail!(Invalid, "queries of type {}, keys of {of:?}", call.other_dtype);
    }
    let dims = (call.key_dim, call.value_dim);
    let mut all = SHAPES.iter().filter(|shape| shape.dims == dims && shape.dtype == of);
    let last = all.clone().next_back();
    match all.find(|shape| shape.shared(call.count > 0) <= shared_bytes).or(last) {
        Some(shape) => Ok(shape),
        None => fail!(Unsupported, "prefill of keys of {} numbers, values of {}", dims.0, dims.1),
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
        fail!(Unsupported, "values that are not the first numbers of latent rows");
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
