//! Plans that can shrink while they are used: slots are there also where everything fits,
//! and as large as lets most memory be given back.

use crate::base::status::Result;
use crate::stream::plan::fast;
use crate::stream::plan::make::Maker;
use crate::stream::plan::place::Item;
use crate::stream::plan::room::Room;
use crate::stream::plan::{Plan, Seat};
use crate::stream::units::{Role, Unit, Units};

/// The least that a plan takes of each memory once all have left that may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Floor {
    /// Of the device.
    pub device_bytes: u64,
    /// Of host memory.
    pub host_bytes: u64,
}

impl Plan {
    /// Bytes of the slots that are never freed.
    fn least_slots_bytes(&self) -> u64 {
        let experts = self.expert_slots_least.min(self.expert_slots);
        u64::from(self.slots) * self.slot_bytes + u64::from(experts) * self.expert_slot_bytes
    }

    /// What it can shrink to with the slots that it has. Larger units stay, and what the
    /// processor uses beside a device.
    pub fn floor(&self, units: &Units) -> Floor {
        let (mut here, mut beside) = (self.least_slots_bytes(), self.staging_bytes);
        for (i, unit) in units.units.iter().enumerate() {
            if self.on_processor.get(i) == Some(&true) {
                beside = beside.saturating_add(unit.image_bytes);
            } else if unit.image_bytes > self.slot_for(unit) {
                here = here.saturating_add(self.taken_by(unit.image_bytes, self.seat.home()));
            }
        }
        match self.seat {
            Seat::Device => Floor { device_bytes: here, host_bytes: beside },
            Seat::Host => Floor { device_bytes: 0, host_bytes: here.saturating_add(beside) },
        }
    }

    /// The size of the slots that a unit passes through.
    fn slot_for(&self, unit: &Unit) -> u64 {
        if unit.role == Role::Expert { self.expert_slot_bytes } else { self.slot_bytes }
    }
}

impl Maker<'_> {
    /// The size that slots have where memory is to be given back. It depends on no budget,
    /// so that a plan for another one has the same.
    pub fn lean_slot(&self) -> Result<Option<u64>> {
        let wishes = self.inputs.wishes;
        if !wishes.is_lean() {
            return Ok(None);
        }
        let units = &self.inputs.units.units;
        let mut passing: Vec<Item> = Vec::with_room(units.len())?;
        for (unit, one) in units.iter().enumerate() {
            // Where all share one memory, an embedding leaves it, too, when nothing else can.
            let beside = self.in_place[unit] || self.looked_up[unit] && self.seat == Seat::Device;
            if one.role != Role::Expert && !beside {
                let bytes = self.taken_by(one.image_bytes, self.seat.home());
                passing.push(Item { unit, bytes });
            }
        }
        fast::leanest(&passing, wishes.least_slots()).map(Some)
    }
}
