//! Whether a layer is better computed where it is than sent to where others are.

use crate::stream::plan::{Home, Inputs, Links, Plan, Seat};
use crate::stream::units::Role;

/// What a layer of host memory would take either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// Which unit.
    pub unit: u32,
    /// Computed by the processor, where it is.
    pub in_place_ns: u64,
    /// Sent to the device.
    pub send_ns: u64,
    /// Computing it where it is takes less.
    pub in_place: bool,
}

fn takes_ns(bytes: u64, rate: u64) -> u64 {
    (bytes as f64 * 1e9 / rate.max(1) as f64) as u64
}

impl Plan {
    /// For each layer that crosses from host memory to the device, whether the processor
    /// would be done sooner; empty where the rate of either is not known. Only the sending
    /// counts there: it is what a pass waits for.
    pub fn processor_hint(&self, inputs: &Inputs) -> Vec<Hint> {
        let Links { device, processor, .. } = inputs.links;
        if self.seat == Seat::Host || device == 0 || processor == 0 {
            return Vec::new();
        }
        let crosses = |i: usize| {
            self.homes.get(i) == Some(&Home::Host) && self.on_processor.get(i) == Some(&false)
        };
        let units = inputs.units.units.iter().enumerate();
        units
            .filter(|(i, unit)| unit.role == Role::Layer && crosses(*i))
            .map(|(i, unit)| {
                let in_place_ns = takes_ns(unit.image_bytes, processor);
                let send_ns = takes_ns(unit.image_bytes, device);
                let in_place = in_place_ns < send_ns;
                Hint { unit: i as u32, in_place_ns, send_ns, in_place }
            })
            .collect()
    }
}
