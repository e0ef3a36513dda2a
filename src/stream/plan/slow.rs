//! Host memory behind a device: staging, what is used where it is, and homes of units
//! that cross to the device; and homes of those that have none yet.

use crate::base::status::Result;
use crate::fail;
use crate::stream::plan::check::grains;
use crate::stream::plan::make::Maker;
use crate::stream::plan::place::{self, Item, Spread};
use crate::stream::plan::room::Room;
use crate::stream::plan::{Home, Inputs, Seat};

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

impl Maker<'_> {
    /// Homes in host memory for those without one on the device, layers before experts;
    /// what they take.
    pub fn host_homes(&self, homes: &mut [Home], room: u64) -> Result<u64> {
        let used = self.settle(&self.items, Home::Host, room, homes)?;
        Ok(used + self.settle(&self.expert_items, Home::Host, room - used, homes)?)
    }

    /// A home within `room` bytes for those that have none; what they take. Who had it in
    /// the plan there is already comes first.
    pub fn settle(&self, items: &[Item], home: Home, room: u64, homes: &mut [Home]) -> Result<u64> {
        let had = |unit: usize| self.before.is_some_and(|plan| plan.homes.get(unit) == Some(&home));
        let mut used = 0;
        for was in [true, false] {
            let mut rest: Vec<Item> = Vec::with_room(items.len())?;
            let open = |item: &&Item| homes[item.unit] == Home::File && had(item.unit) == was;
            rest.extend(items.iter().filter(open).map(|item| {
                let image_bytes = self.inputs.units.units[item.unit].image_bytes;
                Item { bytes: self.taken_by(image_bytes, home), ..*item }
            }));
            let how = self.inputs.wishes.placement;
            let stays = place::place(&rest, room - used, how, Spread::Full)?;
            for (item, _) in rest.iter().zip(stays).filter(|(_, stays)| *stays) {
                homes[item.unit] = home;
                used += item.bytes;
            }
        }
        Ok(used)
    }
}
