//! A pass as the forecast sees it: what each unit needs before it is computed.

use crate::base::status::Result;
use crate::stream::plan::experts::Experts;
use crate::stream::plan::room::Room;
use crate::stream::plan::{Home, Inputs, Links, Mode, Plan, Seat};
use crate::stream::units::{Role, Unit};

/// How a unit comes to where it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// It is there.
    Stays,
    /// From host memory to the device.
    FromHost,
    /// From the file.
    FromFile,
}

/// A unit of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// How it comes.
    pub way: Way,
    /// How large it is.
    pub bytes: f64,
    /// What computing it takes, where no rate of the processor says so.
    pub compute_ns: f64,
    /// Bytes that the processor goes through in host memory.
    pub processor_bytes: f64,
    /// Expected bytes of its experts that cross the device link.
    pub asks_device: f64,
    /// Expected bytes of its experts that are read.
    pub asks_disk: f64,
}

/// A pass, and what it passes through.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    pub steps: Vec<Step>,
    pub seat: Seat,
    pub slots: u32,
    pub staging_bytes: u64,
    pub chunk_bytes: u64,
    /// A ring with a slot for each unit: only the first pass moves anything.
    pub ends_resident: bool,
}

impl Pass {
    /// The pass of a plan.
    pub fn of(plan: &Plan, inputs: &Inputs, experts: &Experts) -> Result<Pass> {
        let units = &inputs.units.units;
        let mut steps: Vec<Step> = Vec::with_room(units.len())?;
        let miss = plan.expert_miss(inputs, experts);
        for (i, unit) in units.iter().enumerate() {
            if unit.role != Role::Expert {
                steps.push(step(plan, inputs, i, unit));
                continue;
            }
            // The layer that experts belong to is the last one before them.
            let Some(last) = steps.last_mut() else { continue };
            if plan.on_processor.get(i) == Some(&true) {
                last.processor_bytes += experts.use_of(unit) * unit.image_bytes as f64;
                continue;
            }
            let bytes = experts.use_of(unit) * miss * unit.image_bytes as f64;
            match (plan.seat, plan.homes.get(i)) {
                (Seat::Device, Some(Home::Device)) | (Seat::Host, Some(Home::Host)) => {}
                (Seat::Device, Some(Home::Host)) => last.asks_device += bytes,
                (Seat::Device, _) => {
                    last.asks_device += bytes;
                    last.asks_disk += bytes;
                }
                (Seat::Host, _) => last.asks_disk += bytes,
            }
        }
        let streamed = steps.iter().filter(|step| step.way != Way::Stays).count();
        Ok(Pass {
            steps,
            seat: plan.seat,
            slots: plan.slots,
            staging_bytes: plan.staging_bytes,
            chunk_bytes: plan.chunk_bytes,
            ends_resident: plan.mode == Mode::Ring && plan.slots as usize >= streamed,
        })
    }

    /// Sets what computing takes to somewhat less than what moving does, where it matters
    /// most how transfers are spread.
    pub fn compute_nearly_hides(&mut self, links: &Links) {
        let moved: f64 = self.steps.iter().filter(|s| s.way != Way::Stays).map(|s| s.bytes).sum();
        let rate = if self.seat == Seat::Device { links.device } else { links.disk };
        let each_ns = 0.9 * moved * 1e9 / rate as f64 / self.steps.len().max(1) as f64;
        for step in &mut self.steps {
            step.compute_ns = each_ns;
            step.processor_bytes = 0.0;
        }
    }

    /// The same when all that moves has come to stay.
    pub fn settled(mut self) -> Pass {
        self.steps.iter_mut().for_each(|step| step.way = Way::Stays);
        self
    }
}

fn step(plan: &Plan, inputs: &Inputs, i: usize, unit: &Unit) -> Step {
    let on_processor = plan.on_processor.get(i) == Some(&true);
    let way = match (plan.seat, plan.homes.get(i)) {
        _ if on_processor => Way::Stays,
        (Seat::Device, Some(Home::Device)) | (Seat::Host, Some(Home::Host)) => Way::Stays,
        (Seat::Device, Some(Home::Host)) => Way::FromHost,
        _ => Way::FromFile,
    };
    let is_layer = unit.role == Role::Layer;
    let bytes = unit.image_bytes as f64;
    Step {
        way,
        bytes,
        compute_ns: if is_layer { inputs.wishes.layer_compute_ns as f64 } else { 0.0 },
        processor_bytes: if on_processor && is_layer { bytes } else { 0.0 },
        asks_device: 0.0,
        asks_disk: 0.0,
    }
}
