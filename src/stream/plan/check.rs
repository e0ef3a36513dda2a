//! What a plan refuses before it is begun: numbers that no machine has.

use crate::base::status::Result;
use crate::fail;
use crate::stream::core::{CHUNK_GRAIN_BYTES, MAX_CHUNK_BYTES};
use crate::stream::plan::{Inputs, Seat};
use crate::stream::units::{GRAIN_BYTES, MAX_UNITS, Role};

/// Most bytes of all units; sums of them stay far from where numbers end.
const MAX_MODEL_BYTES: u64 = 1 << 60;
/// Most slots that can be asked for.
pub const MAX_SLOTS: u32 = 1 << 16;
/// What one read or copy moves where nobody says: a disk gives its full rate for a few of them
/// at once, and who asks out of turn waits for no more than these.
const CHUNK_BYTES: u64 = 4 << 20;

/// Fails on what no plan can be made from.
pub(super) fn check(inputs: &Inputs, seat: Seat) -> Result<()> {
    let units = &inputs.units.units;
    if units.is_empty() {
        fail!(Invalid, "the model has no units: there is nothing to place");
    }
    if units.len() > MAX_UNITS {
        fail!(Limit, "a model of {} units, the limit is {MAX_UNITS}", units.len());
    }
    let mut sum = 0u64;
    for unit in units {
        sum = match sum.checked_add(unit.image_bytes) {
            Some(sum) if sum <= MAX_MODEL_BYTES => sum,
            _ => fail!(Limit, "the units have more than {MAX_MODEL_BYTES} bytes"),
        };
    }
    let wishes = inputs.wishes;
    if wishes.slots > MAX_SLOTS {
        fail!(Limit, "{} slots, the limit is {MAX_SLOTS}", wishes.slots);
    }
    if wishes.chunk_bytes > MAX_CHUNK_BYTES {
        fail!(Limit, "chunks of {} bytes, the limit is {MAX_CHUNK_BYTES}", wishes.chunk_bytes);
    }
    let layers = units.iter().filter(|unit| unit.role == Role::Layer).count();
    if wishes.processor_layers as usize > layers {
        let asked = wishes.processor_layers;
        fail!(Invalid, "{asked} layers for the processor, the model has {layers}");
    }
    if wishes.processor_layers > 0 && seat == Seat::Host {
        fail!(Invalid, "the processor computes all layers: processor_layers needs a device seat");
    }
    Ok(())
}

/// Rounded up to whole grains.
pub(super) fn grains(bytes: u64) -> u64 {
    bytes.div_ceil(GRAIN_BYTES).saturating_mul(GRAIN_BYTES)
}

/// Rounded up to what chunks are multiples of.
fn whole(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK_GRAIN_BYTES).saturating_mul(CHUNK_GRAIN_BYTES)
}

/// What one read or copy moves: as wished, else as usual, but not more than the largest
/// unit has.
pub(super) fn chunk_bytes(inputs: &Inputs) -> u64 {
    let largest = inputs.units.units.iter().map(|unit| unit.image_bytes).max().unwrap_or(0);
    match inputs.wishes.chunk_bytes {
        0 => CHUNK_BYTES.min(whole(largest.max(1))),
        said => whole(said),
    }
}
