//! `Kind::Estimate`: attention weights that keys and distances get from the last queries.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::attend;
use crate::device::cuda::kernels::check::{dtype, only, scratch};
use crate::device::cuda::kernels::{Steps, module};
use crate::fail;
use crate::meta::dtype::Dtype;

/// Limit: queries; also keys of a tile.
const ROWS: u32 = 64;
/// Keys of a split.
const SPLIT: u32 = 1024;
const DISTANCES: u32 = SPLIT + ROWS;
const THREADS: u32 = 128;
/// Threads that sum distances.
const WIDE: u32 = 256;

/// The two kernels for a type and head size.
fn kernels(call: &Call) -> Result<[&'static str; 2]> {
    const NAMES: [(Dtype, u32, [&str; 2]); 6] = [
        (Dtype::F16, 64, ["estimate_rows_f16_64", "estimate_sums_f16_64"]),
        (Dtype::F16, 128, ["estimate_rows_f16_128", "estimate_sums_f16_128"]),
        (Dtype::F16, 576, ["estimate_rows_f16_576", "estimate_sums_f16_576"]),
        (Dtype::Bf16, 64, ["estimate_rows_bf16_64", "estimate_sums_bf16_64"]),
        (Dtype::Bf16, 128, ["estimate_rows_bf16_128", "estimate_sums_bf16_128"]),
        (Dtype::Bf16, 576, ["estimate_rows_bf16_576", "estimate_sums_bf16_576"]),
    ];
    let of = dtype("keys", call.dtype, &[Dtype::F16, Dtype::Bf16])?;
    if call.other_dtype != call.dtype {
        fail!(Invalid, "queries of another type than keys: the types must be equal");
    }
    match NAMES.iter().find(|(known, dim, _)| (*known, *dim) == (of, call.key_dim)) {
        Some((_, _, names)) => Ok(*names),
        None => fail!(
            Unsupported,
            "estimates with keys of {} elements of {of:?}: 64, 128 and 576 are supported",
            call.key_dim
        ),
    }
}

/// Scratch bytes: `results` of estimate.cu.
fn results(call: &Call) -> u64 {
    let splits = u64::from(call.tokens.div_ceil(SPLIT));
    let row = u64::from(ROWS);
    4 * u64::from(call.query_heads) * (splits * (2 * row + u64::from(DISTANCES)) + row)
}

fn check(call: &Call) -> Result<()> {
    only(call, |rest| {
        attend::used(rest);
        (rest.numbers, rest.more, rest.out_head_stride) = (0, 0, 0);
    })?;
    attend::check_shape(call)?;
    if call.query_count == 0 || call.query_count > ROWS {
        fail!(Invalid, "estimates with {} queries: 1 to {ROWS} are accepted", call.query_count);
    }
    if call.first + call.query_count != call.tokens {
        let (first, count) = (call.first, call.query_count);
        fail!(
            Invalid,
            "{count} queries from {first} on are not the last of {} tokens",
            call.tokens
        );
    }
    attend::places(16, &[("queries", call.queries)])?;
    attend::strides(16, &[call.query_stride, call.query_head_stride])?;
    // There are no values: check keys twice.
    attend::check_rows(&Call { values: call.keys, ..*call }, 16)?;
    attend::places(4, &[("numbers", call.numbers), ("more", call.more)])?;
    attend::strides(4, &[call.out_head_stride])?;
    if call.query_heads > 1 && call.out_head_stride.abs() < 4 * i64::from(call.tokens) {
        fail!(
            Invalid,
            "rows of {} sums overlap with a stride of {} bytes",
            call.tokens,
            call.out_head_stride
        );
    }
    scratch(call, Some(results(call)))
}

/// The launches of a call.
pub fn steps(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    let [rows, sums] = kernels(call)?;
    check(call)?;
    let dim = call.key_dim;
    // Queries; keys, and weights with a pitch of 72; distances; positions of keys.
    let shared = ROWS * dim * 2 + (ROWS * dim * 2).max(ROWS * 72 * 4) + DISTANCES * 4 + ROWS * 8;
    let (place, heads) = (module::ESTIMATE, call.query_heads);
    let splits = [call.tokens.div_ceil(SPLIT), heads, 1];
    steps.add_with(place, rows, splits, THREADS, shared)?;
    steps.add(place, "estimate_join", [heads, 1, 1], ROWS)?;
    steps.add_with(place, sums, splits, THREADS, shared)?;
    steps.add(place, "estimate_distances", [call.tokens.div_ceil(WIDE), heads, 1], WIDE)
}
