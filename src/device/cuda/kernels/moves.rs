//! `Kind::Move`: plans parts of pieces, then copies part by part.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::check::{FULL, number, only, place, scratch};
use crate::device::cuda::kernels::{Steps, module};

/// Threads of the planning block: `PLANNERS` of `plan.h`.
pub const PLANNERS: u32 = 1024;

/// The launches of a call.
pub fn steps(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    only(call, |rest| {
        (rest.table, rest.count, rest.keep) = (0, 0, 0);
        (rest.scratch, rest.scratch_bytes) = (0, 0);
    })?;
    place("pieces", call.table, 8)?;
    number("pieces", call.count, u32::MAX)?;
    scratch(call, Some(8 * (u64::from(call.count) + 1)))?;
    let blocks = if call.keep == 0 { FULL } else { call.keep.min(FULL) };
    steps.add(module::MOVE, "move_plan", [1, 1, 1], PLANNERS)?;
    steps.add(module::MOVE, "move_parts", [blocks, 1, 1], 256)
}
