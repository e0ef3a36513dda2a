//! Plans: the residency of each unit, the slots, the memory they need, and a forecast of a pass.

mod budgets;
mod forecast;
mod links;
mod placement;
mod planner;
mod report;

pub use budgets::{DEFAULT_CONTEXT, DEVICE_SAFETY_BYTES, HOST_RESERVE_BYTES};
pub use forecast::ProcessorHint;
pub use planner::Floor;

use crate::base::status::Result;
use crate::fail;
use crate::stream::units::{Role, Units};

/// Where a unit stays between its uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// In device memory. Not if the engine computes on the processor.
    Device,
    /// In host memory. If the engine computes on the processor, the unit is used there.
    Host,
    /// Only in the file.
    File,
}

/// Where the engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeLocation {
    /// On the processor: units are read from the file to where they are used.
    Host,
    /// On a device: units are copied through host memory.
    Device,
}

impl ComputeLocation {
    /// The residency of units that stay where they are used.
    pub fn residency(self) -> Residency {
        if self == ComputeLocation::Device { Residency::Device } else { Residency::Host }
    }
}

/// Rates of the links, in bytes a second; 0 = not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// From the file to host memory.
    pub disk: u64,
    /// From host memory to the device.
    pub device: u64,
    /// Rate at which the processor computes with weights in host memory.
    pub processor: u64,
}

/// Available memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Free on the device.
    pub device_free_bytes: u64,
    /// Host memory that this process may still use: the headroom of its cgroup, or the available
    /// memory, whichever is less.
    pub host_free_bytes: u64,
    /// RAM of the machine, or the limit of the cgroup if that is less.
    pub host_total_bytes: u64,
    /// Whether that is the limit of a cgroup, and the limit decides: other programs take no memory
    /// of it.
    pub host_is_limited: bool,
    /// Memory that may be locked; `u64::MAX` = no limit.
    pub lockable_bytes: u64,
}

/// Choice of resident units if not all units fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// At equal distances: transfers hide behind the units between them.
    #[default]
    Interleaved,
    /// The first units.
    First,
    /// The last units.
    Last,
}

/// How memory is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Some units are resident, the others pass through a few slots.
    #[default]
    Tiered,
    /// No unit is resident: all memory is slots, and a policy chooses the victim. For unknown
    /// orders; slower than `Tiered` if the order is known.
    Ring,
}

/// Options of a plan. 0 = the default, if nothing else is said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanOptions {
    /// Where the engine computes; none = on the device, if it has memory.
    pub compute: Option<ComputeLocation>,
    /// How memory is used.
    pub mode: Mode,
    /// Choice of resident units.
    pub placement: Placement,
    /// Most device memory for weights; none = the computed budget.
    pub device_ceiling_bytes: Option<u64>,
    /// Most host memory for weights, slots and staging; none = the computed budget.
    pub host_ceiling_bytes: Option<u64>,
    /// Kept free on the device; none = 256 MiB.
    pub device_safety_bytes: Option<u64>,
    /// Kept free of host memory; none = 6 GiB, less on small machines and in
    /// cgroups.
    pub host_reserve_bytes: Option<u64>,
    /// Tokens of context that KV is reserved for where the engine computes; 0 = the model's, at
    /// most 4096.
    pub context: u32,
    /// Concurrent sequences; 0 = 1.
    pub sequences: u32,
    /// Bytes of a KV element; 0 = 2.
    pub kv_element_bytes: u32,
    /// Bytes of KV; none = computed from the context.
    pub kv_bytes: Option<u64>,
    /// Bytes of the engine's workspace.
    pub workspace_bytes: u64,
    /// Bytes of buffers for hidden states.
    pub hidden_bytes: u64,
    /// Slots for units that are not resident; 0 = 2. In [`Mode::Ring`], the least number.
    pub slots: u32,
    /// Slots for experts; none = as many as fit.
    pub expert_slots: Option<u32>,
    /// The plan must be able to give memory back later ([`Plan::rebalance`]). Then slots exist
    /// even if all units fit, of the size that returns most memory, and with no more expert
    /// slots than a layer needs, unless their number is set. No effect in [`Mode::Ring`].
    pub shrinks: bool,
    /// Bytes of the staging buffer in host memory for a device; 0 = chosen.
    pub staging_bytes: u64,
    /// Bytes of one read or copy; 0 = 4 MiB.
    pub chunk_bytes: u64,
    /// Device memory of a unit is a multiple of this, for units in place there; 0 = no rounding.
    pub device_granularity_bytes: u64,
    /// Compute time of a layer, in nanoseconds.
    pub layer_compute_ns: u64,
    /// Number of last layers that the processor computes. Host memory is the residency of these
    /// layers and of their experts. Only if the engine computes on a device.
    pub processor_layers: u32,
}

/// A figure of a plan, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Name: `device free`, `kv`, `slots`.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// The figure is subtracted.
    pub takes: bool,
    /// The figure is the sum of those before it.
    pub total: bool,
    /// The reason for the number.
    pub why: String,
}

/// The resource that limits a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// Computing.
    Compute,
    /// The link to the device.
    Device,
    /// The disk.
    Disk,
}

/// Forecast of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// Duration of a steady pass. Experts count with their expected bytes, all equally likely. The
    /// embedding counts if it is also the head, or does not fit in memory.
    pub pass_ns: u64,
    /// Duration of the first pass, without prefetched units.
    pub first_ns: u64,
    /// Lower bound: the longest of computing, device link and disk.
    pub bound_ns: u64,
    /// Time of computing alone.
    pub compute_ns: u64,
    /// Time of the device link alone.
    pub device_ns: u64,
    /// Time of the disk alone.
    pub disk_ns: u64,
    /// Bytes that cross the device link in a pass.
    pub device_bytes: u64,
    /// Bytes that are read in a pass.
    pub disk_bytes: u64,
    /// The resource that limits the pass.
    pub binding: Binding,
}

/// A plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Where the engine computes.
    pub compute: ComputeLocation,
    /// How memory is used.
    pub mode: Mode,
    /// The residency of each unit.
    pub residencies: Vec<Residency>,
    /// Units that are used in host memory, though the engine computes on a device: layers of the
    /// processor, and the embedding if only rows are looked up in it.
    pub on_processor: Vec<bool>,
    /// Slots for units that are not resident where they are used.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Slots for experts.
    pub expert_slots: u32,
    /// Expert slots that are never freed.
    pub expert_slots_least: u32,
    /// Expert slots that are added and freed together.
    pub expert_slots_step: u32,
    /// Bytes of an expert slot.
    pub expert_slot_bytes: u64,
    /// Bytes of the staging buffer in host memory.
    pub staging_bytes: u64,
    /// Bytes of one read or copy.
    pub chunk_bytes: u64,
    /// Device memory of units and slots is a multiple of this; 0 = no rounding.
    pub device_granularity_bytes: u64,
    /// Device memory that the plan uses.
    pub device_bytes: u64,
    /// Host memory that the plan uses.
    pub host_bytes: u64,
    /// Host memory of these that is locked.
    pub pinned_bytes: u64,
    /// How the budgets and the plan were computed.
    pub figures: Vec<Figure>,
    /// The forecast; none if link rates are not known.
    pub forecast: Option<Forecast>,
}

impl Plan {
    /// Memory that a unit with an image of so many bytes needs for a residency.
    pub fn footprint_bytes(&self, image_bytes: u64, residency: Residency) -> u64 {
        footprint_bytes(image_bytes, residency, self.device_granularity_bytes)
    }
}

/// The same for a given granularity of device memory.
fn footprint_bytes(image_bytes: u64, residency: Residency, granularity_bytes: u64) -> u64 {
    match (residency, granularity_bytes) {
        (Residency::Device, 1..) => {
            image_bytes.div_ceil(granularity_bytes).saturating_mul(granularity_bytes)
        }
        _ => image_bytes,
    }
}

/// Number and bytes of units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UnitCount {
    pub units: u64,
    pub bytes: u64,
}

impl Plan {
    /// Number of units of a residency; of experts or of all others.
    pub(super) fn count(&self, inputs: &Inputs, residency: Residency, experts: bool) -> UnitCount {
        let units = inputs.units.units.iter().zip(&self.residencies);
        let these =
            units.filter(|(unit, of)| **of == residency && (unit.role == Role::Expert) == experts);
        these.fold(UnitCount::default(), |count, (unit, _)| UnitCount {
            units: count.units + 1,
            bytes: count.bytes + self.footprint_bytes(unit.image_bytes, residency),
        })
    }
}

/// Bytes as text, with three digits or more.
pub fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut scaled = bytes as f64;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < units.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{scaled:.2} {}", units[unit]) }
}

/// Inputs of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The units of the model.
    pub units: &'a Units,
    /// Properties of the model, for the size of its KV.
    pub facts: &'a crate::stream::model::Facts,
    /// Available memory.
    pub memory: Memory,
    /// Rates of the links.
    pub links: Links,
    /// The options.
    pub plan_options: &'a PlanOptions,
}

// Lists whose length comes from outside: their allocation may fail.

/// An empty list with room for `len` elements.
/// [`Status::NoMem`](crate::base::status::Status::NoMem) if there is no memory for it.
pub(super) fn reserved<T>(len: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    if list.try_reserve_exact(len).is_err() {
        fail!(NoMem, "no memory for a plan of {len} units");
    }
    Ok(list)
}

/// A list of `len` equal elements.
pub(super) fn filled<T: Clone>(value: T, len: usize) -> Result<Vec<T>> {
    let mut list = reserved(len)?;
    list.resize(len, value);
    Ok(list)
}
