//! Host memory behind a device: staging, what is used where it is, and homes of units
//! that cross to the device.

use crate::base::status::Result;
use crate::fail;
use crate::stream::plan::check::grains;
use crate::stream::plan::{Inputs, Seat};

/// Chunks of staging where nothing says that more is better.
const CHUNKS: u64 = 16;
/// With fewer nothing would be read while something is copied.
const LEAST_CHUNKS: u64 = 2;

/// The size of staging that suits most. `room` is what host memory has for it.
pub(super) fn staging(inputs: &Inputs, seat: Seat, chunk_bytes: u64, room: u64) -> Result<u64> {
    if seat == Seat::Host {
        return Ok(0);
    }
    let least = LEAST_CHUNKS * chunk_bytes;
    let whole = |bytes: u64| bytes.div_ceil(chunk_bytes).saturating_mul(chunk_bytes).max(least);
    let asked = inputs.wishes.staging_bytes;
    let needs = if asked == 0 { least } else { whole(asked) };
    if needs > room {
        fail!(
            Budget,
            "host memory has {room} bytes for staging and needs at least {needs}: raise the \
             ceiling, lower the reserve, or ask for less staging or smaller chunks"
        );
    }
    if asked > 0 {
        return Ok(needs);
    }
    let all: u64 = inputs.units.units.iter().map(|unit| unit.image_bytes).sum();
    let usual = (CHUNKS * chunk_bytes).min(whole(grains(all)));
    Ok(usual.min(room / chunk_bytes * chunk_bytes))
}

/// Other sizes that are worth a try: larger ones let the disk read while units of host
/// memory cross the link, smaller ones leave more room for homes.
pub(super) fn others(slot_bytes: u64, chunk_bytes: u64, usual: u64, room: u64) -> Vec<u64> {
    let unit = slot_bytes.div_ceil(chunk_bytes);
    let chunks = [unit, 2 * unit, CHUNKS / 2, LEAST_CHUNKS];
    let sizes = chunks.map(|n| n.max(LEAST_CHUNKS) * chunk_bytes);
    sizes.into_iter().filter(|&bytes| bytes != usual && bytes <= room).collect()
}
