//! Hand-made models.

use kvtier::base::status::{Error, Result};
use kvtier::stream::model::Facts;
use kvtier::stream::plan::{
    ComputeLocation, Inputs, Links, Memory, Placement, Plan, PlanOptions, Residency,
};
use kvtier::stream::units::{NONE, Role, Unit, Units};

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// All that a plan is made from.
#[derive(Clone, Debug)]
pub struct Setup {
    pub units: Units,
    pub facts: Facts,
    pub memory: Memory,
    pub links: Links,
    pub plan_options: PlanOptions,
}

pub fn unit(name: String, role: Role, layer: u32, expert: u32, bytes: u64) -> Unit {
    Unit { name, role, layer, expert, extents: Vec::new(), bytes, image_bytes: bytes }
}

pub fn layer(i: usize, bytes: u64) -> Unit {
    unit(format!("layer {i}"), Role::Layer, i as u32, NONE, bytes)
}

impl Setup {
    pub fn of(units: Vec<Unit>) -> Setup {
        let memory = Memory { lockable_bytes: u64::MAX, ..Memory::default() };
        Setup {
            units: Units { units, parts: Vec::new() },
            facts: Facts::default(),
            memory,
            links: Links::default(),
            plan_options: PlanOptions::default(),
        }
    }

    /// Layers of these sizes, and exactly so much memory for weights.
    pub fn layers(sizes: &[u64], device_bytes: u64, host_bytes: u64) -> Setup {
        let units = sizes.iter().enumerate().map(|(i, &bytes)| layer(i, bytes)).collect();
        let mut setup = Setup::of(units);
        setup.room(device_bytes, host_bytes);
        setup
    }

    /// Exactly so much memory for weights.
    pub fn room(&mut self, device_bytes: u64, host_bytes: u64) {
        self.memory.device_free_bytes = device_bytes;
        self.memory.host_free_bytes = host_bytes;
        self.memory.host_total_bytes = host_bytes;
        self.plan_options.device_safety_bytes = Some(0);
        self.plan_options.host_reserve_bytes = Some(0);
    }

    pub fn inputs(&self) -> Inputs<'_> {
        Inputs {
            units: &self.units,
            facts: &self.facts,
            memory: self.memory,
            links: self.links,
            plan_options: &self.plan_options,
        }
    }

    pub fn make(&self) -> Result<Plan> {
        Plan::make(&self.inputs())
    }

    pub fn plan(&self) -> Plan {
        self.make().unwrap()
    }

    pub fn text(&self, plan: &Plan) -> String {
        plan.text(&self.inputs())
    }

    pub fn error(&self) -> Error {
        self.make().unwrap_err()
    }

    pub fn placed(mut self, placement: Placement) -> Setup {
        self.plan_options.placement = placement;
        self
    }
}

/// Units with each home: device, host, file.
pub fn residencies(plan: &Plan) -> (usize, usize, usize) {
    let count = |home| plan.residencies.iter().filter(|one| **one == home).count();
    (count(Residency::Device), count(Residency::Host), count(Residency::File))
}

/// Counts again what a plan takes: of the device, of the host.
pub fn takes(setup: &Setup, plan: &Plan) -> (u64, u64) {
    let bytes = |home| -> u64 {
        let units = setup.units.units.iter().zip(&plan.residencies);
        let these = units.filter(|(_, of)| **of == home).map(|(unit, _)| unit.image_bytes);
        match (home, setup.plan_options.device_granularity_bytes) {
            (Residency::Device, 1..) => these
                .map(|bytes| bytes.next_multiple_of(setup.plan_options.device_granularity_bytes))
                .sum(),
            _ => these.sum(),
        }
    };
    let slots = u64::from(plan.slots) * plan.slot_bytes
        + u64::from(plan.expert_slots) * plan.expert_slot_bytes;
    match plan.compute {
        ComputeLocation::Device => {
            (bytes(Residency::Device) + slots, bytes(Residency::Host) + plan.staging_bytes)
        }
        ComputeLocation::Host => (0, bytes(Residency::Host) + slots),
    }
}

/// Checks the invariants of a plan.
pub fn check(setup: &Setup, plan: &Plan, device_bytes: u64, host_bytes: u64) {
    let (device, host) = takes(setup, plan);
    assert_eq!((device, host), (plan.device_bytes, plan.host_bytes));
    assert!(device <= device_bytes, "{device} of {device_bytes}");
    assert!(host <= host_bytes, "{host} of {host_bytes}");
    assert!(plan.pinned_bytes <= host.min(setup.memory.lockable_bytes));
    figures_add_up(plan);
    for (i, unit) in setup.units.units.iter().enumerate() {
        let here = if plan.compute == ComputeLocation::Device {
            Residency::Device
        } else {
            Residency::Host
        };
        let stays = plan.residencies[i] == here || plan.on_processor[i];
        let slot = match unit.role {
            Role::Expert => plan.expert_slot_bytes,
            _ => plan.slot_bytes,
        };
        assert!(stays || unit.image_bytes <= slot, "unit {i} fits no slot");
        assert!(!plan.on_processor[i] || plan.residencies[i] == Residency::Host);
        assert!(
            plan.compute == ComputeLocation::Device || plan.residencies[i] != Residency::Device
        );
    }
    if let Some(forecast) = plan.forecast {
        assert!(forecast.pass_ns >= forecast.bound_ns);
        let links = [forecast.compute_ns, forecast.device_ns, forecast.disk_ns];
        assert!(links.iter().max() == Some(&forecast.bound_ns));
    }
}

/// Totals are what the figures before them come to; a ceiling may be less.
fn figures_add_up(plan: &Plan) {
    let mut sum = 0u64;
    for figure in &plan.figures {
        assert!(!figure.why.is_empty(), "{figure:?}");
        match (figure.total, figure.takes) {
            (true, _) => {
                assert!(figure.bytes <= sum, "{figure:?} of {sum}");
                assert!(figure.bytes == sum || figure.why.contains("ceiling"), "{figure:?}");
                sum = figure.bytes;
            }
            (_, true) => sum = sum.saturating_sub(figure.bytes),
            _ => sum = figure.bytes,
        }
    }
}
