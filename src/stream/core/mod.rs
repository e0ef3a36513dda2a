//! What decides: which unit is read and copied next, which slot it gets, who has to leave.
//!
//! A state machine: calls tell it what happened and when, and take from it what is to be
//! done ([`Core::take_read`], [`Core::take_copy`]); it has no threads, no clock, no memory.
//! So one order of calls is one run, and a simulation can ask it what a pass takes.

mod backing;
mod chunks;
mod experts;
mod homes;
mod jobs;
mod load;
mod pool;
mod record;
mod want;
mod window;

pub use backing::Backing;
pub use chunks::{CHUNK_GRAIN_BYTES, MAX_CHUNK_BYTES};
pub use experts::PINNED_PERCENT;
pub use jobs::{Copied, Copy, From, Read, To};
pub use load::Goal;
pub use record::{LayerCount, Mark, Stage, Stats};
pub use want::{Lease, Want, Why};

use std::collections::VecDeque;

use crate::base::status::{Error, Result, Status};
use crate::device::Event;
use crate::fail;
use crate::stream::core::chunks::Chunks;
use crate::stream::core::experts::Favourites;
use crate::stream::core::load::Load;
use crate::stream::core::pool::Pool;
use crate::stream::core::record::Record;
use crate::stream::plan::{Home, Mode, Plan, Seat};
use crate::stream::units::{NONE, Role, Units};

/// What a core is made of.
pub struct Setup<'a> {
    /// The units.
    pub units: &'a Units,
    /// Where they live.
    pub plan: &'a Plan,
    /// In which order a pass uses those that are not experts; none = that of the units.
    pub order: Option<&'a [u32]>,
    /// After a pass comes another: its first units are fetched while the last are used.
    pub wrap: bool,
    /// Every unit has an address of its own, and memory only while it is there.
    pub in_place: bool,
    /// Who leaves the slots of the line ([`Mode::Ring`]; else the order says it).
    pub policy: &'a str,
    /// Who leaves the slots for experts.
    pub expert_policy: &'a str,
    /// Of a hundred slots for experts, those that the most used have for themselves.
    pub pinned_percent: u32,
    /// How many marks of what happened are kept.
    pub marks: usize,
}

/// How many units are fetched ahead where nothing but slots is.
const RING_AHEAD: usize = 2;
/// Staging that is kept for units that have a slot.
const STAGING_SPARE: usize = 2;
/// Most units that are fetched ahead.
const MOST_AHEAD: usize = 64;

/// What is known of a unit.
struct Cell {
    home: Home,
    /// Its home is where it is used.
    seated: bool,
    /// Host memory would be such a home, although the engine computes on a device.
    on_processor: bool,
    /// Its bytes are at home, where that is memory.
    is_home: bool,
    is_expert: bool,
    bytes: u64,
    /// Slots are as large as it is; else it is used at home or not at all.
    fits: bool,
    /// Its slot, or [`NONE`].
    slot: u32,
    /// Its bytes are in that slot.
    ready: bool,
    /// Who uses it there.
    users: u32,
    /// It stays there until somebody has used it.
    kept: bool,
    /// Who sleeps until it is there; and it stays until they have woken up.
    waiters: u32,
    promised: bool,
    /// It had to be brought, and nobody has had it since.
    missed: bool,
    in_window: bool,
    /// Loads to its home and to its slot, or [`NONE`].
    home_load: u32,
    slot_load: u32,
    /// Of the last copy to its slot, while somebody has it who was given it early.
    event: Option<Event>,
    /// Its place in the order, or [`NONE`].
    turn: u32,
    /// When its first user came.
    since_ns: u64,
    /// Why its last load failed.
    error: Option<Error>,
}

/// The state machine.
pub struct Core {
    seat: Seat,
    mode: Mode,
    wrap: bool,
    in_place: bool,
    cells: Vec<Cell>,
    chunks: Chunks,
    line: Pool,
    experts: Pool,
    loads: Vec<Option<Load>>,
    spare_loads: Vec<u32>,
    age: u64,
    /// Units that the pass comes to, each with a hold on its slot if it has one.
    window: VecDeque<u32>,
    order: Vec<u32>,
    /// What the window is extended with next.
    next: usize,
    staging: Vec<u32>,
    staging_count: u32,
    /// Files are read to where units belong on the device, where that can be.
    lands: bool,
    /// Units that have to be brought home.
    homecoming: VecDeque<u32>,
    /// Units whose memory is being given back.
    clearing: Vec<u32>,
    /// Units that have come home where they are used.
    opened: Vec<u32>,
    /// Experts that stay until they are used.
    kept: Vec<u32>,
    /// Experts that stay because they are used much.
    favourites: Favourites,
    /// Events that nobody waits for any more.
    spent: Vec<Event>,
    record: Record,
}

impl Core {
    /// A core in which nothing is loaded; units with a home in memory are on their way there.
    pub fn new(setup: &Setup) -> Result<Core> {
        let (units, plan) = (&setup.units.units, setup.plan);
        if plan.homes.len() != units.len() {
            fail!(Invalid, "a plan for {} units, there are {}", plan.homes.len(), units.len());
        }
        let chunks = Chunks::of(setup.units, plan.chunk_bytes)?;
        let mut cells = Vec::new();
        for (number, unit) in units.iter().enumerate() {
            let on_processor = plan.on_processor.get(number).copied().unwrap_or(false);
            let home = plan.homes[number];
            let is_expert = unit.role == Role::Expert;
            let mut cell = Cell::new(home, is_expert, unit.bytes);
            cell.on_processor = on_processor;
            cell.seated = is_seated(plan.seat, home, on_processor);
            let limit = if is_expert { plan.expert_slot_bytes } else { plan.slot_bytes };
            cell.fits = unit.image_bytes <= limit;
            if !cell.seated && !cell.fits {
                fail!(
                    Invalid,
                    "{} takes {} bytes and has no home where it is used; slots have {limit}",
                    unit.name,
                    unit.image_bytes
                );
            }
            cells.push(cell);
        }
        let order = order_of(setup, &mut cells)?;
        let staging_count = u32::try_from(plan.staging_bytes / plan.chunk_bytes).unwrap_or(1 << 16);
        if plan.seat == Seat::Device && staging_count == 0 {
            fail!(Invalid, "a device is reached through staging: at least {}", plan.chunk_bytes);
        }
        let homecoming: VecDeque<u32> =
            (0..cells.len() as u32).filter(|&u| plan.homes[u as usize] != Home::File).collect();
        let policy = if plan.mode == Mode::Ring { setup.policy } else { "fifo" };
        let percent = setup.pinned_percent;
        let favourites = Favourites::new(cells.len(), plan.expert_slots, percent)?;
        let mut core = Core {
            seat: plan.seat,
            mode: plan.mode,
            wrap: setup.wrap,
            in_place: setup.in_place,
            cells,
            chunks,
            line: Pool::new(plan.slots, policy)?,
            experts: Pool::new(plan.expert_slots, setup.expert_policy)?,
            loads: Vec::new(),
            spare_loads: Vec::new(),
            age: 0,
            window: VecDeque::new(),
            order,
            next: 0,
            staging: (0..staging_count).rev().collect(),
            staging_count,
            lands: false,
            homecoming,
            clearing: Vec::new(),
            opened: Vec::new(),
            kept: Vec::new(),
            favourites,
            spent: Vec::new(),
            record: Record::new(units, setup.marks)?,
        };
        core.advance(0)?;
        Ok(core)
    }

    /// Whether files are read to where units belong on the device, where that can be: units are
    /// not read ahead into staging then.
    pub fn set_lands(&mut self, lands: bool) {
        self.lands = lands;
    }

    /// Units that have come home where they are used, since this was asked last.
    pub fn take_opened(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.opened)
    }

    /// Events that were given to somebody who has given the unit back: they may be released.
    pub fn take_spent(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.spent)
    }

    /// Whether somebody who has a unit may still wait for this event of its last copy.
    pub fn keeps(&self, unit: u32, event: Event) -> bool {
        let cell = self.cells.get(unit as usize);
        cell.is_some_and(|cell| cell.users > 0 && cell.event == Some(event))
    }

    /// Why a unit that was given early has not come whole after all.
    pub fn spoiled(&self, unit: u32) -> Option<Error> {
        let cell = self.cells.get(unit as usize).filter(|cell| cell.is_spoiled())?;
        let lost = || Error::new(Status::Io, "a copy of the unit has failed");
        Some(cell.error.clone().unwrap_or_else(lost))
    }

    /// Where a unit lives, and whether it is there.
    pub fn home_of(&self, unit: u32) -> Option<(Home, bool)> {
        self.cells.get(unit as usize).map(|cell| (cell.home, cell.is_home))
    }

    /// Whether a unit is at home where it is used.
    pub fn is_seated(&self, unit: u32) -> bool {
        self.cells.get(unit as usize).is_some_and(|cell| cell.seated && cell.is_home)
    }

    /// Whether all units with a home in memory are there; how many are not.
    pub fn missing_homes(&self) -> usize {
        self.homecoming.len() + self.loads().filter(|load| load.goal == Some(Goal::Home)).count()
    }

    /// Why a unit could not be brought home, told once.
    pub fn home_error(&mut self) -> Option<Error> {
        let away = |cell: &&mut Cell| cell.home != Home::File && !cell.is_home;
        self.cells.iter_mut().filter(away).find_map(|cell| cell.error.take())
    }

    /// Whether all of a unit is in memory.
    pub fn is_there(&self, unit: u32) -> bool {
        self.cells.get(unit as usize).is_some_and(|cell| cell.ready || cell.is_home)
    }

    /// Staging slots.
    pub fn staging_count(&self) -> u32 {
        self.staging_count
    }

    /// Of them, those that nothing is in.
    pub fn free_staging(&self) -> u32 {
        self.staging.len() as u32
    }

    /// Those that something is in which has no slot yet.
    pub fn staged(&self) -> u32 {
        self.loads().map(|load| load.staged.len() as u32).sum()
    }

    /// What has happened.
    pub fn stats(&self) -> &Stats {
        &self.record.stats
    }

    /// Hits, misses and bytes of experts by layer.
    pub fn layers(&self) -> &[LayerCount] {
        &self.record.layers
    }

    /// The last marks, the oldest first.
    pub fn marks(&self) -> Vec<Mark> {
        self.record.marks()
    }

    fn loads(&self) -> impl Iterator<Item = &Load> {
        self.loads.iter().flatten()
    }

    fn load(&mut self, id: u32) -> &mut Load {
        self.loads[id as usize].as_mut().expect("a load that a cell or a job names is there")
    }

    fn pool_of(&mut self, unit: u32) -> &mut Pool {
        if self.cells[unit as usize].is_expert { &mut self.experts } else { &mut self.line }
    }
}

impl Cell {
    fn new(home: Home, is_expert: bool, bytes: u64) -> Cell {
        Cell {
            home,
            seated: false,
            on_processor: false,
            is_home: false,
            is_expert,
            bytes,
            fits: true,
            slot: NONE,
            ready: false,
            users: 0,
            kept: false,
            waiters: 0,
            promised: false,
            missed: false,
            in_window: false,
            home_load: NONE,
            slot_load: NONE,
            event: None,
            turn: NONE,
            since_ns: 0,
            error: None,
        }
    }
}

impl Cell {
    /// It was given early, its load failed, and who has it has not given it back.
    fn is_spoiled(&self) -> bool {
        self.slot != NONE && !self.ready && self.slot_load == NONE
    }
}

/// Whether a home is where the unit is used.
fn is_seated(seat: Seat, home: Home, on_processor: bool) -> bool {
    match home {
        Home::Device => seat == Seat::Device,
        Home::Host => seat == Seat::Host || on_processor,
        Home::File => false,
    }
}

/// The order of a pass, and in the cells each one's turn.
fn order_of(setup: &Setup, cells: &mut [Cell]) -> Result<Vec<u32>> {
    let all = 0..cells.len() as u32;
    let order: Vec<u32> = match setup.order {
        Some(order) => order.to_vec(),
        None => all.filter(|&u| !cells[u as usize].is_expert).collect(),
    };
    for (turn, &unit) in order.iter().enumerate() {
        let Some(cell) = cells.get_mut(unit as usize) else {
            fail!(Invalid, "unit {unit} of the order: there are {}", setup.units.units.len());
        };
        if cell.turn != NONE || cell.is_expert {
            let what = if cell.is_expert { "an expert" } else { "there twice" };
            fail!(Invalid, "unit {unit} of the order is {what}");
        }
        cell.turn = turn as u32;
    }
    Ok(order)
}
