//! `Kind::Sum`: sums blocks of 4 KiB, then combines their sums.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::check::{FULL, blocks, number, only, place, scratch};
use crate::device::cuda::kernels::moves::PLANNERS;
use crate::device::cuda::kernels::{Steps, module};

/// The launches of a call.
pub fn steps(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    only(call, |rest| {
        (rest.table, rest.count, rest.out) = (0, 0, 0);
        (rest.scratch, rest.scratch_bytes) = (0, 0);
    })?;
    place("ranges", call.table, 8)?;
    place("sums", call.out, 8)?;
    number("ranges", call.count, u32::MAX)?;
    // Lengths of ranges are known on the device only; the kernel checks them.
    scratch(call, Some(8 * (u64::from(call.count) + 1)))?;
    steps.add(module::SUM, "sum_plan", [1, 1, 1], PLANNERS)?;
    steps.add(module::SUM, "sum_blocks", [FULL, 1, 1], 256)?;
    steps.add(module::SUM, "sum_ranges", [blocks(call.count.into(), 8), 1, 1], 256)
}
