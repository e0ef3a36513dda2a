//! `Kind::Convert`: converts rows of numbers. Scales by channel are computed first.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::check::{Rows, aligned, blocks, dtype, number, only, place};
use crate::device::cuda::kernels::{Steps, module};
use crate::fail;
use crate::meta::dtype::Dtype;

const KNOWN: [Dtype; 6] =
    [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F8E4m3, Dtype::F8E5m2, Dtype::I8];
/// One scale for each token and head.
const BY_TOKEN: u32 = 1;
/// One scale for each head and element.
const BY_CHANNEL: u32 = 2;
/// Flag: scales are given.
const GIVEN: u32 = 1;
/// Elements that a warp compares at a time to find the largest.
const LINE: u64 = 128;

/// The launches of a call.
pub fn steps(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    let is_found = check(call)?;
    let (heads, dim) = (u64::from(call.key_heads), u64::from(call.key_dim));
    let rows = u64::from(call.count) * heads;
    if is_found {
        let of_scales = [blocks(heads * dim, 256), 1, 1];
        // Warps beyond a whole number of lines stay idle.
        let columns = heads * dim.div_ceil(LINE);
        let lines =
            [blocks(columns * u64::from(call.count), 8).max(columns.div_ceil(8) as u32), 1, 1];
        steps.add(module::CONVERT, "convert_clear", of_scales, 256)?;
        steps.add(module::CONVERT, "convert_largest", lines, 256)?;
        steps.add(module::CONVERT, "convert_divide", of_scales, 256)?;
    }
    steps.add(module::CONVERT, "convert_rows", [blocks(rows, 8), 1, 1], 256)
}

/// Validates a call; whether scales by channel are computed.
fn check(call: &Call) -> Result<bool> {
    only(call, |rest| {
        (rest.dtype, rest.other_dtype, rest.scaling, rest.scales) = (0, 0, 0, 0);
        (rest.keys, rest.key_stride, rest.key_head_stride) = (0, 0, 0);
        (rest.out, rest.out_stride, rest.out_head_stride) = (0, 0, 0);
        (rest.count, rest.key_heads, rest.key_dim, rest.flags) = (0, 0, 0, 0);
        if rest.table != 0 {
            (rest.table, rest.page_tokens, rest.first) = (0, 0, 0);
        }
    })?;
    let from = dtype("the input", call.dtype, &KNOWN)?;
    let to = dtype("the output", call.other_dtype, &KNOWN)?;
    number("tokens", call.count, u32::MAX)?;
    number("heads", call.key_heads, 1 << 16)?;
    number("numbers of a head", call.key_dim, 1 << 16)?;
    let heads = (u64::from(call.key_heads), call.key_head_stride);
    let mut read = Rows {
        name: "numbers",
        address: call.keys,
        size: u64::from(from.bits() / 8),
        numbers: call.key_dim.into(),
        steps: [(call.count.into(), call.key_stride), heads],
    };
    if call.table != 0 {
        aligned("blocks", call.table, 8)?;
        number("tokens of a block", call.page_tokens, u32::MAX)?;
        read.steps[0].0 = call.page_tokens.into();
        // An offset into a block, which is added to the block's address.
        read.address = (1 << 62) + call.keys % (1 << 62);
    }
    read.check()?;
    let heads = (u64::from(call.key_heads), call.out_head_stride);
    Rows {
        name: "the output",
        address: call.out,
        size: u64::from(to.bits() / 8),
        numbers: call.key_dim.into(),
        steps: [(call.count.into(), call.out_stride), heads],
    }
    .check_written()?;
    check_scales(call, from, to)
}

fn check_scales(call: &Call, from: Dtype, to: Dtype) -> Result<bool> {
    let (is_to_narrow, is_from_narrow) = (to.bits() == 8, from.bits() == 8);
    if call.scaling > BY_CHANNEL {
        fail!(Invalid, "scaling {}: 0 none, 1 by token, 2 by channel", call.scaling);
    }
    if call.scaling == 0 {
        if call.scales != 0 || call.flags != 0 {
            fail!(Invalid, "scales or flags are set, but scaling is 0");
        }
        return Ok(false);
    }
    if is_to_narrow == is_from_narrow {
        fail!(
            Invalid,
            "scaling from {} to {}: exactly one of them must have 8 bits",
            from.name(),
            to.name()
        );
    }
    place("scales", call.scales, 4)?;
    if call.flags & !GIVEN != 0 || (call.flags != 0 && is_from_narrow) {
        fail!(
            Invalid,
            "flags {:#x} of a conversion to {}: only 1 (scales given), when quantizing",
            call.flags,
            to.name()
        );
    }
    debug_assert!([BY_TOKEN, BY_CHANNEL].contains(&call.scaling));
    Ok(call.scaling == BY_CHANNEL && is_to_narrow && call.flags & GIVEN == 0)
}
