//! Experts of a model: how many share the slots, and how often one is expected to be read.

use std::collections::BTreeMap;

use crate::stream::plan::{Home, Inputs, Plan, Seat, taken_by};
use crate::stream::units::{Role, Unit};

/// Expert slots are freed in blocks of so many bytes, or of one part in [`STEPS`] of all slots.
const STEP_BYTES: u64 = 64 << 20;
const STEPS: u32 = 16;

/// What is known of experts before any was used: nobody says which are popular, so all
/// are as likely.
#[derive(Clone, Debug, Default)]
pub(super) struct Experts {
    /// Those that share slots.
    pub count: u64,
    /// The largest of them.
    pub slot_bytes: u64,
    /// All of them.
    pub bytes: u64,
    /// How many a token uses of a layer.
    pub used: u32,
    /// How many each layer has.
    layers: BTreeMap<u32, u32>,
}

impl Experts {
    /// Those of a model; `in_place` are not streamed.
    pub fn of(inputs: &Inputs, seat: Seat, in_place: &[bool]) -> Experts {
        let grain_bytes = inputs.wishes.device_grain_bytes;
        let mut all = Experts { used: inputs.facts.experts_used.max(1), ..Experts::default() };
        for (unit, in_place) in inputs.units.units.iter().zip(in_place) {
            if unit.role != Role::Expert {
                continue;
            }
            *all.layers.entry(unit.layer).or_default() += 1;
            if !in_place {
                all.count += 1;
                let bytes = taken_by(unit.image_bytes, seat.home(), grain_bytes);
                all.bytes += bytes;
                all.slot_bytes = all.slot_bytes.max(bytes);
            }
        }
        all
    }

    /// The share of passes in which an expert is used.
    pub fn use_of(&self, unit: &Unit) -> f64 {
        let of = self.layers.get(&unit.layer).copied().unwrap_or(1).max(1);
        f64::from(self.used.min(of)) / f64::from(of)
    }

    /// Of `slots` expert slots: how many are never freed, and how many are added and freed together.
    /// Slots share allocations, because a device rounds each one up and a process has a limited
    /// number of mappings.
    pub fn least_and_step(&self, slots: u32, grain_bytes: u64) -> (u32, u32) {
        let at_once = STEP_BYTES / self.slot_bytes.max(1);
        let step = match grain_bytes {
            0 => (at_once as u32).min(slots / STEPS).max(1),
            _ => 1, // each has memory of its own
        };
        let least = self.least_slots().next_multiple_of(step.into()).min(slots.into());
        (least as u32, step)
    }

    /// Slots without which a layer cannot be computed while the next expert comes.
    pub fn least_slots(&self) -> u64 {
        (u64::from(self.used) + 1).min(self.count)
    }
}

impl Plan {
    /// How likely an expert that is not at home where it is used is in no slot either when
    /// it is asked for.
    pub(super) fn expert_miss(&self, inputs: &Inputs, experts: &Experts) -> f64 {
        let here = if self.seat == Seat::Device { Home::Device } else { Home::Host };
        let units = inputs.units.units.iter().zip(&self.homes);
        let at_home = units.filter(|(unit, home)| unit.role == Role::Expert && **home == here);
        let away = experts.count.saturating_sub(at_home.count() as u64);
        1.0 - (f64::from(self.expert_slots) / away.max(1) as f64).min(1.0)
    }
}
