//! `Kind::Top`: joins rows that share a list, then finds the largest scores of each.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::kernels::check::{Rows, aligned, blocks, number, only, place, scratch};
use crate::device::cuda::kernels::{Steps, module};
use crate::fail;

const BY_KEY_HEAD: u32 = 1;
const BY_ALL: u32 = 2;
const BY_MEAN: u32 = 4;
const OF_ALL_QUERIES: u32 = 8;

/// Limit: lists, one for each thread block.
const MAX_LISTS: u64 = (1 << 31) - 1;

/// The launches of a call.
pub fn steps(call: &Call, steps: &mut Steps<'_>) -> Result<()> {
    let lists = check(call)?;
    if is_joined(call) {
        let columns = lists.checked_mul(call.count.into());
        scratch(call, columns.and_then(|n| n.checked_mul(4)))?;
        let all = columns.unwrap_or_default();
        steps.add(module::TOP, "top_join", [blocks(all, 256), 1, 1], 256)?;
    }
    steps.add(module::TOP, "top_pick", [lists as u32, 1, 1], 1024)
}

fn is_joined(call: &Call) -> bool {
    call.flags & (BY_KEY_HEAD | BY_ALL | OF_ALL_QUERIES) != 0
}

/// Validates a call; returns the number of its lists.
fn check(call: &Call) -> Result<u64> {
    only(call, |rest| {
        (rest.numbers, rest.query_count, rest.query_heads, rest.count) = (0, 0, 0, 0);
        (rest.keep, rest.sinks, rest.recent, rest.flags) = (0, 0, 0, 0);
        (rest.index, rest.out_stride, rest.counts) = (0, 0, 0);
        if is_joined(call) {
            (rest.scratch, rest.scratch_bytes) = (0, 0);
        }
        if call.flags & BY_KEY_HEAD != 0 {
            rest.key_heads = 0;
        }
    })?;
    number("queries", call.query_count, u32::MAX)?;
    number("heads of queries", call.query_heads, u32::MAX)?;
    number("scores of a row", call.count, u32::MAX)?;
    number("places of a list", call.keep, u32::MAX)?;
    if u64::from(call.sinks) + u64::from(call.recent) > call.keep.into() {
        let (first, last) = (call.sinks, call.recent);
        fail!(Invalid, "{first} first and {last} last entries exceed the {} to choose", call.keep);
    }
    let lists = lists(call)?;
    let rows = u64::from(call.query_count) * u64::from(call.query_heads);
    if rows.checked_mul(call.count.into()).and_then(|n| n.checked_mul(4)).is_none() {
        fail!(Limit, "{rows} rows of {} scores exceed the address space", call.count);
    }
    place("scores", call.numbers, 4)?;
    aligned("lengths of lists", call.counts, 4)?;
    Rows {
        name: "lists",
        address: call.index,
        size: 4,
        numbers: call.keep.into(),
        steps: [(lists, call.out_stride), (1, 0)],
    }
    .check_written()?;
    if lists > 1 && call.out_stride.unsigned_abs() < 4 * u64::from(call.keep) {
        fail!(
            Invalid,
            "lists of {} entries overlap with a stride of {} bytes",
            call.keep,
            call.out_stride
        );
    }
    Ok(lists)
}

fn lists(call: &Call) -> Result<u64> {
    if call.flags & !15 != 0 || call.flags & 3 == 3 {
        fail!(Invalid, "flags {:#x} of lists: a subset of 15, not both 1 and 2", call.flags);
    }
    if call.flags & BY_MEAN != 0 && call.flags & (BY_KEY_HEAD | BY_ALL) == 0 {
        fail!(Invalid, "the mean flag (4) needs rows that are joined over heads (1 or 2)");
    }
    let mut each = call.query_heads;
    if call.flags & BY_KEY_HEAD != 0 {
        number("heads of keys", call.key_heads, call.query_heads)?;
        if call.query_heads % call.key_heads != 0 {
            fail!(
                Invalid,
                "{} query heads: must be a multiple of {} key heads",
                call.query_heads,
                call.key_heads
            );
        }
        each = call.key_heads;
    } else if call.flags & BY_ALL != 0 {
        each = 1;
    }
    let queries = if call.flags & OF_ALL_QUERIES != 0 { 1 } else { call.query_count };
    let lists = u64::from(queries) * u64::from(each);
    if lists > MAX_LISTS {
        fail!(Limit, "{lists} lists: at most {MAX_LISTS}");
    }
    Ok(lists)
}
