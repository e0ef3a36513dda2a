//! What comes next: the units that a pass will ask for, each with a slot as soon as one is
//! free; on the way to a device, read ahead as far as there is staging.

use crate::base::status::Result;
use crate::stream::core::load::{Goal, Load, Path, Rank};
use crate::stream::core::{Core, MOST_AHEAD, RING_AHEAD};
use crate::stream::plan::{Home, Mode, Seat};
use crate::stream::units::NONE;

impl Core {
    /// Lets the window grow, and gives out slots.
    pub(super) fn advance(&mut self, now_ns: u64) -> Result<()> {
        self.bring_home()?;
        while self.extend()? {
            self.give_slots(now_ns)?;
        }
        self.give_slots(now_ns)
    }

    /// The next unit of the order that has to be brought, and its turn.
    fn upcoming(&self) -> Option<(u32, usize)> {
        let len = self.order.len();
        let last = if self.wrap { self.next + len } else { len };
        (self.next..last).map(|turn| (self.order[turn % len], turn)).find(|&(unit, _)| {
            let cell = &self.cells[unit as usize];
            // One that has just lost its home may be larger than slots.
            !cell.seated && cell.fits
        })
    }

    fn extend(&mut self) -> Result<bool> {
        let most = if self.mode == Mode::Ring { RING_AHEAD } else { MOST_AHEAD };
        if self.window.len() >= most {
            return Ok(false);
        }
        let Some((unit, turn)) = self.upcoming() else { return Ok(false) };
        let cell = &self.cells[unit as usize];
        // What has failed is tried again when it is asked for, not over and over.
        if cell.in_window || cell.error.is_some() {
            return Ok(false);
        }
        if cell.slot != NONE || cell.slot_load != NONE {
            // It is there, or coming, and stays if nothing that is needed before it waits
            // for a slot; a load that was dropped has to end first.
            let slot = cell.slot;
            let near = self.window.iter().all(|&unit| self.cells[unit as usize].slot != NONE);
            if slot == NONE
                || cell.is_spoiled()
                || !near
                || self.window.len() >= self.line.len() as usize
            {
                return Ok(false);
            }
            self.line.hold(slot)?;
        } else if self.may_begin() {
            self.begin_load(unit, Rank::Next)?;
        } else {
            return Ok(false);
        }
        self.cells[unit as usize].in_window = true;
        self.window.push_back(unit);
        let len = self.order.len();
        self.next = if self.wrap { (turn + 1) % len } else { turn + 1 };
        Ok(true)
    }

    /// Whether a load may begin: there is a slot, or it can be read ahead without one.
    fn may_begin(&self) -> bool {
        let waiting = self.loads().filter(|load| load.goal.is_none() && !load.is_over());
        let (mut count, mut bytes) = (0, 0);
        for load in waiting {
            let cell = &self.cells[load.unit as usize];
            count += 1;
            bytes += if cell.home == Home::File { cell.bytes } else { 0 };
        }
        if count == 0 && self.line.has_room() {
            return true;
        }
        let chunk = self.chunks.chunk_bytes();
        let staging = u64::from(self.staging_count) * chunk;
        self.seat == Seat::Device && count < MOST_AHEAD && bytes < staging
    }

    /// Slots for those that wait, in their order.
    fn give_slots(&mut self, now_ns: u64) -> Result<()> {
        for at in 0..self.window.len() {
            let unit = self.window[at];
            let load = self.cells[unit as usize].slot_load;
            if load == NONE || self.load(load).goal.is_some() || self.load(load).is_over() {
                continue;
            }
            if !self.give_slot(unit, now_ns)? {
                break;
            }
        }
        Ok(())
    }

    /// A slot for a unit that is being loaded; false when there is none.
    pub(super) fn give_slot(&mut self, unit: u32, now_ns: u64) -> Result<bool> {
        let is_expert = self.cells[unit as usize].is_expert;
        let cells = &self.cells;
        let pool = if is_expert { &mut self.experts } else { &mut self.line };
        let mut taken = pool.take(unit, now_ns, |left| cells[left as usize].slot)?;
        let id = self.cells[unit as usize].slot_load;
        let wanted = is_expert && self.load(id).rank == Rank::Wanted;
        if taken.is_none() && wanted {
            // Whoever is asked for goes before who may be, and before who often is.
            self.let_go_kept(&[])?;
            let cells = &self.cells;
            taken = self.experts.take(unit, now_ns, |left| cells[left as usize].slot)?;
        }
        if taken.is_none() && wanted {
            self.drop_favourites()?;
            let cells = &self.cells;
            taken = self.experts.take(unit, now_ns, |left| cells[left as usize].slot)?;
        }
        let Some(taken) = taken else { return Ok(false) };
        if let Some(left) = taken.left {
            let cell = &mut self.cells[left as usize];
            (cell.slot, cell.ready, cell.event) = (NONE, false, None);
        }
        let goal = if is_expert { Goal::Expert(taken.slot) } else { Goal::Line(taken.slot) };
        let (in_place, on_device) = (self.in_place, self.is_backed());
        let cell = &mut self.cells[unit as usize];
        cell.slot = taken.slot;
        // Its place in the window is a reason of its own to stay.
        let (in_window, id) = (cell.in_window, cell.slot_load);
        let load = self.load(id);
        (load.goal, load.after) = (Some(goal), taken.after);
        load.unbacked = on_device;
        if in_place && !on_device && taken.dirty != NONE && taken.dirty != unit {
            load.clear = taken.dirty;
        }
        if in_window {
            self.line.hold(taken.slot)?;
        }
        if is_expert {
            self.pin_favourite(unit)?;
        }
        Ok(true)
    }

    /// A load to a slot that it does not have yet.
    pub(super) fn begin_load(&mut self, unit: u32, rank: Rank) -> Result<()> {
        debug_assert!(self.cells[unit as usize].fits, "a unit is larger than slots");
        let path = match (self.seat, self.cells[unit as usize].home) {
            (Seat::Device, Home::Host) => Path::Copied,
            (Seat::Device, _) => Path::Staged,
            (Seat::Host, _) => Path::Direct,
        };
        let id = self.add_load(unit, path, rank);
        let cell = &mut self.cells[unit as usize];
        cell.slot_load = id;
        if path == Path::Copied && !cell.is_home && cell.home_load == NONE {
            self.begin_home(unit, rank);
        }
        Ok(())
    }

    pub(super) fn add_load(&mut self, unit: u32, path: Path, rank: Rank) -> u32 {
        let chunks = self.chunks.of_unit(unit).len() as u32;
        self.age += 1;
        let load = Load::new(unit, path, rank, chunks, self.age);
        match self.spare_loads.pop() {
            Some(id) => {
                self.loads[id as usize] = Some(load);
                id
            }
            None => {
                self.loads.push(Some(load));
                self.loads.len() as u32 - 1
            }
        }
    }

    /// The engine asks for a unit that was not expected: the pass goes on from there.
    pub(super) fn jump(&mut self, unit: u32, rank: Rank) -> Result<()> {
        let turn = self.cells[unit as usize].turn;
        if turn != NONE {
            while let Some(other) = self.window.pop_front() {
                self.forget(other)?;
            }
            let len = self.order.len();
            let next = turn as usize + 1;
            self.next = if self.wrap { next % len } else { next };
        }
        if self.cells[unit as usize].slot_load == NONE {
            self.begin_load(unit, rank)?;
        }
        self.cells[unit as usize].in_window = true;
        self.window.push_front(unit);
        Ok(())
    }

    /// The engine has a unit: it and what should have come before leave the window.
    pub(super) fn leave_window(&mut self, unit: u32) -> Result<()> {
        if !self.cells[unit as usize].in_window {
            return Ok(());
        }
        self.skip_to(unit)?;
        self.window.pop_front();
        self.cells[unit as usize].in_window = false;
        let slot = self.cells[unit as usize].slot;
        self.line.let_go(slot)
    }

    /// What should have come before a unit of the window is passed over.
    pub(super) fn skip_to(&mut self, unit: u32) -> Result<()> {
        if !self.cells[unit as usize].in_window {
            return Ok(());
        }
        while self.window.front().is_some_and(|&first| first != unit) {
            if let Some(other) = self.window.pop_front() {
                self.forget(other)?;
            }
        }
        Ok(())
    }

    /// A unit of the window is not expected any more.
    fn forget(&mut self, unit: u32) -> Result<()> {
        let cell = &mut self.cells[unit as usize];
        cell.in_window = false;
        let (slot, load) = (cell.slot, cell.slot_load);
        if slot != NONE {
            self.line.let_go(slot)?;
        }
        if load != NONE && self.load(load).rank != Rank::Wanted {
            self.drop_load(load)?;
        }
        Ok(())
    }
}
