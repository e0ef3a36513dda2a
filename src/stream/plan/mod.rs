//! Who lives where, and why; what a pass will take.

mod check;
mod experts;
mod explain;
mod fast;
mod hint;
mod json;
mod lean;
mod links;
mod make;
mod place;
mod predict;
mod rebalance;
mod room;
mod runs;
mod show;
mod sizing;
mod slow;
mod staging;
mod steps;
mod subset;
mod what_if;

pub use hint::Hint;
pub use lean::Floor;
pub use show::size;
pub use sizing::{DEFAULT_CONTEXT, DEVICE_SAFETY_BYTES, HOST_RESERVE_BYTES};

use crate::stream::units::Units;

/// Where a unit is between the times it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// Memory of the device. Not where the processor computes.
    Device,
    /// Host memory. Where the processor computes, that is where it is used.
    Host,
    /// The file alone.
    File,
}

/// Where the engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seat {
    /// On the processor: units come from the file to where they are used.
    Host,
    /// On a device: they cross host memory.
    Device,
}

impl Seat {
    /// The home of units that stay where they are used.
    pub fn home(self) -> Home {
        if self == Seat::Device { Home::Device } else { Home::Host }
    }
}

/// How fast bytes get where; 0 = not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// From the file into host memory, in bytes a second.
    pub disk: u64,
    /// From host memory to the device.
    pub device: u64,
    /// How fast the processor computes with weights in host memory.
    pub processor: u64,
}

/// What memory there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Free on the device.
    pub device_free_bytes: u64,
    /// What this process may still take of host memory: the headroom of its cgroup, or what
    /// is available, whichever is less.
    pub host_free_bytes: u64,
    /// RAM of the machine, or of the cgroup if that is less.
    pub host_total_bytes: u64,
    /// What may be locked; `u64::MAX` = as much as there is.
    pub lockable_bytes: u64,
}

/// How residents are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// At equal distances: transfers hide behind what lies between.
    #[default]
    Interleaved,
    /// The first ones.
    First,
    /// The last ones.
    Last,
}

/// How slots are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Residents stay, the others pass through a few slots.
    #[default]
    Tiered,
    /// Nothing stays: all memory is slots, and a policy says who leaves. For orders that
    /// nobody knows; slower than `Tiered` where the order is known.
    Ring,
}

/// What the caller decides. 0 = the default, unless it says otherwise.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wishes {
    /// Where the engine computes; none = on the device, if it has memory.
    pub seat: Option<Seat>,
    /// Residents and slots.
    pub mode: Mode,
    /// Which units stay.
    pub placement: Placement,
    /// Most device memory for weights; wins over what was computed if less.
    pub device_ceiling_bytes: Option<u64>,
    /// Most host memory for weights, slots and staging.
    pub host_ceiling_bytes: Option<u64>,
    /// Kept free on the device; the default is 256 MiB.
    pub device_safety_bytes: Option<u64>,
    /// Kept free of host memory; the default is 6 GiB, less on small machines.
    pub host_reserve_bytes: Option<u64>,
    /// Tokens of context, for the KV that is to be held where the engine computes; 0 = the
    /// model's, at most 4096.
    pub context: u32,
    /// Sequences at once; 0 = 1.
    pub sequences: u32,
    /// Bytes of a number of KV; 0 = 2.
    pub kv_number_bytes: u32,
    /// KV, if not computed from the context.
    pub kv_bytes: Option<u64>,
    /// Memory that the engine computes in.
    pub workspace_bytes: u64,
    /// Buffers for hidden states.
    pub hidden_bytes: u64,
    /// Slots that units pass through; 0 = 2. In a ring, the least there may be.
    pub slots: u32,
    /// Slots for experts; none = as many as there is room for.
    pub expert_slots: Option<u32>,
    /// Memory is to be given back while it is used ([`Plan::rebalance`]): slots are there
    /// also where everything fits, as large as lets it shrink most, and no more of them for
    /// experts than a layer needs, where not said. A ring has nothing to give back.
    pub shrinks: bool,
    /// Host memory that reads go to on their way to a device; 0 = chosen.
    pub staging_bytes: u64,
    /// How much one read or copy moves; 0 = 4 MiB.
    pub chunk_bytes: u64,
    /// What a unit takes of the device is a multiple of this, where units are in place there;
    /// 0 = it takes what it has.
    pub device_grain_bytes: u64,
    /// What computing a unit takes: the same for all layers.
    pub layer_compute_ns: u64,
    /// The last layers are computed by the processor, so many; host memory is their home,
    /// and that of their experts. Only where the seat is a device.
    pub processor_layers: u32,
}

/// A number of a plan, and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// What it is: `device free`, `kv`, `slots`.
    pub name: &'static str,
    /// How much; what is taken away has `takes`.
    pub bytes: u64,
    /// It is subtracted.
    pub takes: bool,
    /// It is what the ones before it come to.
    pub total: bool,
    /// Why it is as much as it is.
    pub why: String,
}

/// What limits a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// Computing.
    Compute,
    /// The way to the device.
    Device,
    /// The disk.
    Disk,
}

/// What a pass will take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// A pass in the steady state. Experts count with what is expected where all are as
    /// likely; the embedding counts where it is also the head, or has no room in memory.
    pub pass_ns: u64,
    /// The first one: nothing was fetched ahead.
    pub first_ns: u64,
    /// No pass can take less: the most of computing, device link and disk.
    pub bound_ns: u64,
    /// Computing alone.
    pub compute_ns: u64,
    /// The device link alone.
    pub device_ns: u64,
    /// The disk alone.
    pub disk_ns: u64,
    /// Bytes that cross the device link in a pass.
    pub device_bytes: u64,
    /// Bytes that are read in a pass.
    pub disk_bytes: u64,
    /// What limits it.
    pub binding: Binding,
}

/// Who lives where.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Where the engine computes.
    pub seat: Seat,
    /// Residents and slots.
    pub mode: Mode,
    /// The home of each unit.
    pub homes: Vec<Home>,
    /// Units that are used in host memory, though the engine computes on a device: what the
    /// processor computes, and the embedding where only rows are looked up in it.
    pub on_processor: Vec<bool>,
    /// Slots that units without a home where they are used pass through.
    pub slots: u32,
    /// The size of one.
    pub slot_bytes: u64,
    /// Slots for experts.
    pub expert_slots: u32,
    /// Expert slots that are never freed.
    pub expert_slots_least: u32,
    /// Expert slots that are added and freed together.
    pub expert_slots_step: u32,
    /// The size of one.
    pub expert_slot_bytes: u64,
    /// Staging in host memory.
    pub staging_bytes: u64,
    /// How much one read or copy moves.
    pub chunk_bytes: u64,
    /// What units and slots on the device are multiples of; 0 = they take what they have.
    pub device_grain_bytes: u64,
    /// What it takes of the device.
    pub device_bytes: u64,
    /// What it takes of host memory.
    pub host_bytes: u64,
    /// How much of that is locked.
    pub pinned_bytes: u64,
    /// How it was computed.
    pub figures: Vec<Figure>,
    /// What a pass will take; nothing where links are not known.
    pub forecast: Option<Forecast>,
}

impl Plan {
    /// What a unit with an image of so many bytes takes where its home is.
    pub fn taken_by(&self, image_bytes: u64, home: Home) -> u64 {
        taken_by(image_bytes, home, self.device_grain_bytes)
    }
}

/// The same with what units on the device are multiples of.
fn taken_by(image_bytes: u64, home: Home, grain_bytes: u64) -> u64 {
    match (home, grain_bytes) {
        (Home::Device, 1..) => image_bytes.div_ceil(grain_bytes).saturating_mul(grain_bytes),
        _ => image_bytes,
    }
}

/// All that a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The units.
    pub units: &'a Units,
    /// What the model is, for its KV.
    pub facts: &'a crate::stream::model::Facts,
    /// What memory there is.
    pub memory: Memory,
    /// How fast bytes get where.
    pub links: Links,
    /// What the caller decides.
    pub wishes: &'a Wishes,
}
