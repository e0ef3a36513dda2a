//! The scheduler: decides which unit is read and copied next, which slot it gets, and which unit
//! is evicted.
//!
//! The scheduler is a state machine without threads, clock and memory. Calls report events with
//! their time, and take jobs from it ([`Scheduler::take_read`], [`Scheduler::take_copy`]). The
//! same sequence of calls gives the same decisions, so a simulation can measure a pass.

mod acquire;
mod loads;
mod prefetch;
mod record;
mod slots;

use std::collections::VecDeque;

pub use acquire::{Acquired, Lease, WaitReason};
pub use loads::{CopyJob, CopyProgress, CopySource, MapJob, ReadJob, ReadTarget, Target};
pub use record::{LayerCount, Mark, Stage, Stats};
pub use slots::PINNED_PERCENT;

use crate::base::status::{Error, Result, Status};
use crate::device::Event;
use crate::fail;
use crate::stream::plan::{ComputeLocation, Mode, Plan, Residency};
use crate::stream::scheduler::loads::Load;
use crate::stream::scheduler::record::Record;
use crate::stream::scheduler::slots::{PinnedExperts, SlotPool};
use crate::stream::units::{ChunkTable, NONE, Role, Units};

/// The inputs of a scheduler.
pub struct Setup<'a> {
    /// The units of the model.
    pub units: &'a Units,
    /// The residency of each unit, and the slots.
    pub plan: &'a Plan,
    /// The order in which a pass uses units other than experts; none = the order of the units.
    pub order: Option<&'a [u32]>,
    /// Another pass follows: its first units are prefetched while the last units are used.
    pub wrap: bool,
    /// Each unit has fixed addresses, and memory only while it is loaded.
    pub in_place: bool,
    /// The eviction policy of the slots for units other than experts, for [`Mode::Ring`].
    /// Otherwise the order of the pass decides.
    pub policy: &'a str,
    /// The eviction policy of the expert slots.
    pub expert_policy: &'a str,
    /// Share of the expert slots that is reserved for the most used experts, in percent.
    pub pinned_percent: u32,
    /// Most marks (spans of time) that are recorded.
    pub marks: usize,
}

/// Units that are prefetched in [`Mode::Ring`].
const RING_PREFETCH: usize = 2;
/// Staging slots that are reserved for units with a slot.
const STAGING_SPARE: usize = 2;
/// Most units that are prefetched.
const MAX_PREFETCH: usize = 64;

/// State of a unit.
struct UnitState {
    residency: Residency,
    /// The unit is used where it is resident, and needs no slot.
    slotless: bool,
    /// The processor uses the unit in host memory, although the engine computes on a device.
    on_processor: bool,
    /// The resident copy in memory is complete.
    is_resident: bool,
    is_expert: bool,
    bytes: u64,
    /// The unit fits in a slot; otherwise it is used where it is resident or not at all.
    fits: bool,
    /// The slot of the unit, or [`NONE`].
    slot: u32,
    /// The bytes in the slot are complete.
    ready: bool,
    /// Leases of the unit in its slot.
    users: u32,
    /// The unit stays in its slot until it was leased.
    reserved: bool,
    /// Threads that wait for the unit; and whether the unit stays in its slot until they woke up.
    waiters: u32,
    reserved_for_waiter: bool,
    /// The unit had to be loaded, and was not leased since.
    missed: bool,
    in_window: bool,
    /// Loads to the residency and to the slot, or [`NONE`].
    resident_load: u32,
    slot_load: u32,
    /// The event of the last copy to the slot, while a lease exists that was granted early.
    event: Option<Event>,
    /// Position in the order of the pass, or [`NONE`].
    turn: u32,
    /// When the first lease began.
    since_ns: u64,
    /// Why the last load failed.
    error: Option<Error>,
}

/// The state machine; see the module.
pub struct Scheduler {
    compute: ComputeLocation,
    mode: Mode,
    wrap: bool,
    in_place: bool,
    states: Vec<UnitState>,
    chunks: ChunkTable,
    slots: SlotPool,
    expert_slots: SlotPool,
    loads: Vec<Option<Load>>,
    spare_loads: Vec<u32>,
    age: u64,
    /// Units that the pass needs next, each with a reference on its slot if it has one.
    window: VecDeque<u32>,
    order: Vec<u32>,
    /// Position in the order that the window is extended with next.
    next: usize,
    staging: Vec<u32>,
    staging_count: u32,
    /// The device reads files into slots itself, where that is possible.
    reads_direct: bool,
    /// Units that are to be loaded because they are resident.
    pending_residents: VecDeque<u32>,
    /// Units whose memory is being freed.
    clearing: Vec<u32>,
    /// Units that became resident where they are used.
    new_residents: Vec<u32>,
    /// Experts that stay until they were leased.
    reserved: Vec<u32>,
    /// Experts that stay because they are used most.
    pinned_experts: PinnedExperts,
    /// Events that no lease refers to any more.
    done_events: Vec<Event>,
    record: Record,
}

impl Scheduler {
    /// A scheduler with no unit loaded. The loads of resident units begin at once.
    pub fn new(setup: &Setup) -> Result<Scheduler> {
        let (units, plan) = (&setup.units.units, setup.plan);
        if plan.residencies.len() != units.len() {
            fail!(
                Invalid,
                "the plan is for {} units, the model has {}: make a plan for this model",
                plan.residencies.len(),
                units.len()
            );
        }
        let chunks = ChunkTable::of(setup.units, plan.chunk_bytes)?;
        let mut states = states_of(setup)?;
        let order = order_of(setup, &mut states)?;
        let staging_count = u32::try_from(plan.staging_bytes / plan.chunk_bytes).unwrap_or(1 << 16);
        if plan.compute == ComputeLocation::Device && staging_count == 0 {
            fail!(
                Invalid,
                "a device needs a staging buffer of at least {} bytes (one chunk)",
                plan.chunk_bytes
            );
        }
        let pending_residents: VecDeque<u32> = (0..states.len() as u32)
            .filter(|&u| plan.residencies[u as usize] != Residency::File)
            .collect();
        let policy = if plan.mode == Mode::Ring { setup.policy } else { "fifo" };
        let percent = setup.pinned_percent;
        let pinned_experts = PinnedExperts::new(states.len(), plan.expert_slots, percent)?;
        let mut scheduler = Scheduler {
            compute: plan.compute,
            mode: plan.mode,
            wrap: setup.wrap,
            in_place: setup.in_place,
            states,
            chunks,
            slots: SlotPool::new(plan.slots, policy)?,
            expert_slots: SlotPool::new(plan.expert_slots, setup.expert_policy)?,
            loads: Vec::new(),
            spare_loads: Vec::new(),
            age: 0,
            window: VecDeque::new(),
            order,
            next: 0,
            staging: (0..staging_count).rev().collect(),
            staging_count,
            reads_direct: false,
            pending_residents,
            clearing: Vec::new(),
            new_residents: Vec::new(),
            reserved: Vec::new(),
            pinned_experts,
            done_events: Vec::new(),
            record: Record::new(units, setup.marks)?,
        };
        scheduler.advance(0)?;
        Ok(scheduler)
    }

    /// Whether the device reads files into slots itself. Then units are not read ahead into
    /// staging.
    pub fn set_direct_reads(&mut self, reads_direct: bool) {
        self.reads_direct = reads_direct;
    }

    /// Units that became resident where they are used since the last call.
    pub fn take_new_residents(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.new_residents)
    }

    /// Events whose leases were released since the last call: the caller may release them.
    pub fn take_done_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.done_events)
    }

    /// Whether a lease may still refer to this event of the unit's last copy.
    pub fn holds_event(&self, unit: u32, event: Event) -> bool {
        let state = self.states.get(unit as usize);
        state.is_some_and(|state| state.users > 0 && state.event == Some(event))
    }

    /// The error of a unit whose lease was granted early and whose copies then failed.
    pub fn incomplete_error(&self, unit: u32) -> Option<Error> {
        let state = self.states.get(unit as usize).filter(|state| state.is_incomplete())?;
        let note_waste = || Error::new(Status::Io, "a copy of the unit failed");
        Some(state.error.clone().unwrap_or_else(note_waste))
    }

    /// The residency of a unit, and whether its resident copy is complete.
    pub fn residency_of(&self, unit: u32) -> Option<(Residency, bool)> {
        self.states.get(unit as usize).map(|state| (state.residency, state.is_resident))
    }

    /// Whether a unit is resident where it is used.
    pub fn is_usable_resident(&self, unit: u32) -> bool {
        self.states.get(unit as usize).is_some_and(|state| state.slotless && state.is_resident)
    }

    /// Number of units that are planned to be resident and are not yet.
    pub fn missing_residents(&self) -> usize {
        self.pending_residents.len()
            + self.loads().filter(|load| load.target == Some(Target::Resident)).count()
    }

    /// Why a unit could not be made resident; reported once.
    pub fn resident_error(&mut self) -> Option<Error> {
        let is_missing =
            |state: &&mut UnitState| state.residency != Residency::File && !state.is_resident;
        self.states.iter_mut().filter(is_missing).find_map(|state| state.error.take())
    }

    /// Whether a unit is complete in memory.
    pub fn is_in_memory(&self, unit: u32) -> bool {
        self.states.get(unit as usize).is_some_and(|state| state.ready || state.is_resident)
    }

    /// Number of staging slots.
    pub fn staging_count(&self) -> u32 {
        self.staging_count
    }

    /// Number of empty staging slots.
    pub fn free_staging(&self) -> u32 {
        self.staging.len() as u32
    }

    /// Number of staging slots that hold chunks of loads without a slot.
    pub fn staged(&self) -> u32 {
        self.loads().map(|load| load.staged.len() as u32).sum()
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        &self.record.stats
    }

    /// Hits, misses and bytes of experts by layer.
    pub fn layers(&self) -> &[LayerCount] {
        &self.record.layers
    }

    /// The recorded marks, the oldest first.
    pub fn marks(&self) -> Vec<Mark> {
        self.record.marks()
    }

    fn loads(&self) -> impl Iterator<Item = &Load> {
        self.loads.iter().flatten()
    }

    fn load(&mut self, id: u32) -> &mut Load {
        self.loads[id as usize].as_mut().expect("a load that a unit or a job names exists")
    }

    fn pool_of(&mut self, unit: u32) -> &mut SlotPool {
        if self.states[unit as usize].is_expert { &mut self.expert_slots } else { &mut self.slots }
    }
}

impl UnitState {
    fn new(residency: Residency, is_expert: bool, bytes: u64) -> UnitState {
        UnitState {
            residency,
            slotless: false,
            on_processor: false,
            is_resident: false,
            is_expert,
            bytes,
            fits: true,
            slot: NONE,
            ready: false,
            users: 0,
            reserved: false,
            waiters: 0,
            reserved_for_waiter: false,
            missed: false,
            in_window: false,
            resident_load: NONE,
            slot_load: NONE,
            event: None,
            turn: NONE,
            since_ns: 0,
            error: None,
        }
    }

    /// The lease was granted early, the load failed, and the lease was not released yet.
    fn is_incomplete(&self) -> bool {
        self.slot != NONE && !self.ready && self.slot_load == NONE
    }
}

/// Whether a unit with this residency is used there, without a slot.
fn is_slotless(compute: ComputeLocation, residency: Residency, on_processor: bool) -> bool {
    match residency {
        Residency::Device => compute == ComputeLocation::Device,
        Residency::Host => compute == ComputeLocation::Host || on_processor,
        Residency::File => false,
    }
}

/// The state of each unit before any load.
fn states_of(setup: &Setup) -> Result<Vec<UnitState>> {
    let plan = setup.plan;
    let mut states = Vec::new();
    for (number, unit) in setup.units.units.iter().enumerate() {
        let on_processor = plan.on_processor.get(number).copied().unwrap_or(false);
        let residency = plan.residencies[number];
        let is_expert = unit.role == Role::Expert;
        let mut state = UnitState::new(residency, is_expert, unit.bytes);
        state.on_processor = on_processor;
        state.slotless = is_slotless(plan.compute, residency, on_processor);
        let limit = if is_expert { plan.expert_slot_bytes } else { plan.slot_bytes };
        state.fits = unit.image_bytes <= limit;
        if !state.slotless && !state.fits {
            fail!(
                Invalid,
                "{} takes {} bytes, is not resident where it is used, and slots have {limit} \
                 bytes: plan larger slots",
                unit.name,
                unit.image_bytes
            );
        }
        states.push(state);
    }
    Ok(states)
}

/// The order of a pass. Stores each unit's position in its state.
fn order_of(setup: &Setup, states: &mut [UnitState]) -> Result<Vec<u32>> {
    let all = 0..states.len() as u32;
    let order: Vec<u32> = match setup.order {
        Some(order) => order.to_vec(),
        None => all.filter(|&u| !states[u as usize].is_expert).collect(),
    };
    for (turn, &unit) in order.iter().enumerate() {
        let Some(state) = states.get_mut(unit as usize) else {
            fail!(
                Invalid,
                "the order names unit {unit}: the model has {} units",
                setup.units.units.len()
            );
        };
        if state.turn != NONE || state.is_expert {
            let what = if state.is_expert {
                "is an expert, which has no position"
            } else {
                "has two positions"
            };
            fail!(Invalid, "unit {unit} of the order {what}");
        }
        state.turn = turn as u32;
    }
    Ok(order)
}
