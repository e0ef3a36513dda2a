//! What the engine asks for: units, and that they are given back.

use crate::base::status::Result;
use crate::device::Event;
use crate::fail;
use crate::stream::core::Core;
use crate::stream::core::load::{Goal, Rank};
use crate::stream::core::record::Stage;
use crate::stream::plan::Home;
use crate::stream::units::NONE;

/// A unit that is there and stays until it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Which.
    pub unit: u32,
    /// Where it is.
    pub place: Goal,
    /// The device's event from which on it is complete; none = it is.
    pub event: Option<Event>,
}

/// Why a unit is not there yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It is being read.
    Read,
    /// It is being copied to the device.
    Copy,
    /// All slots are taken by loads that have to end first.
    Slot,
}

/// What came of asking for a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Here it is.
    Ready(Lease),
    /// It is on its way: ask again when something has arrived.
    Wait(Why),
}

impl Core {
    /// Asks for a unit. May be asked again and again; what it comes to counts once. With
    /// `early`, a unit is given as soon as its last copy is with the device.
    pub fn want(&mut self, unit: u32, early: bool, now_ns: u64) -> Result<Want> {
        let Some(cell) = self.cells.get_mut(unit as usize) else {
            fail!(Invalid, "unit {unit} of {}", self.cells.len());
        };
        if let Some(error) = cell.error.take() {
            return Err(error);
        }
        if cell.seated {
            if !cell.is_home {
                self.want_home(unit)?;
                return Ok(Want::Wait(Why::Read));
            }
            cell.since_ns = now_ns;
            let is_expert = cell.is_expert;
            self.record.served(unit, is_expert);
            return Ok(Want::Ready(Lease { unit, place: Goal::Home, event: None }));
        }
        let issued = early && cell.slot_load != NONE && {
            let load = cell.slot_load;
            self.load(load).is_issued()
        };
        if self.cells[unit as usize].ready || issued {
            return self.serve(unit, issued, now_ns).map(Want::Ready);
        }
        self.fetch(unit, Rank::Wanted, now_ns)?;
        Ok(Want::Wait(self.why(unit)))
    }

    fn serve(&mut self, unit: u32, issued: bool, now_ns: u64) -> Result<Lease> {
        let at = unit as usize;
        let slot = self.cells[at].slot;
        if issued {
            let load = self.cells[at].slot_load;
            self.cells[at].event = self.load(load).event;
        }
        let event = self.cells[at].event;
        self.pool_of(unit).hold(slot)?;
        self.pool_of(unit).touch(slot, now_ns)?;
        let cell = &mut self.cells[at];
        if cell.users == 0 {
            cell.since_ns = now_ns;
        }
        cell.users += 1;
        let is_expert = cell.is_expert;
        let missed = is_expert && std::mem::take(&mut cell.missed);
        let kept = std::mem::take(&mut cell.kept);
        if missed {
            self.record.missed(unit);
        }
        if kept {
            self.pool_of(unit).let_go(slot)?;
        }
        self.leave_window(unit)?;
        self.record.served(unit, is_expert && !missed);
        if is_expert {
            self.note_expert(unit)?;
        }
        self.advance(now_ns)?;
        let place = if is_expert { Goal::Expert(slot) } else { Goal::Line(slot) };
        Ok(Lease { unit, place, event })
    }

    /// Somebody sleeps until a unit is there: nobody else gets its slot before they wake up.
    pub fn wait_begin(&mut self, unit: u32) {
        self.cells[unit as usize].waiters += 1;
    }

    /// They are awake.
    pub fn wait_end(&mut self, unit: u32) -> Result<()> {
        let cell = &mut self.cells[unit as usize];
        cell.waiters -= 1;
        let slot = cell.slot;
        let over = cell.waiters == 0 && std::mem::take(&mut cell.promised);
        if over { self.pool_of(unit).let_go(slot) } else { Ok(()) }
    }

    /// What a unit that is asked for waits for.
    pub fn why(&self, unit: u32) -> Why {
        let cell = &self.cells[unit as usize];
        let Some(load) = self.loads.get(cell.slot_load as usize).and_then(Option::as_ref) else {
            return Why::Read;
        };
        match load.goal {
            None => Why::Slot,
            Some(_) if load.next_read < load.chunks && load.next_copy == 0 => Why::Read,
            Some(_) if load.reading > 0 && load.staged.is_empty() => Why::Read,
            Some(_) => Why::Copy,
        }
    }

    /// Brings a unit to a slot, or makes haste where it is on its way.
    fn fetch(&mut self, unit: u32, rank: Rank, now_ns: u64) -> Result<()> {
        let cell = &self.cells[unit as usize];
        if cell.is_spoiled() {
            fail!(Busy, "unit {unit} has not come whole and is in use: give it back first");
        }
        if !cell.fits {
            fail!(
                Budget,
                "unit {unit} takes {} bytes and has lost its home, and slots are smaller: rebalance \
                 when there is memory for it",
                cell.bytes
            );
        }
        if cell.home == Home::Host && !cell.is_home {
            self.want_home(unit)?;
        }
        let load = self.cells[unit as usize].slot_load;
        if load != NONE && self.load(load).is_over() {
            // It was dropped, and still has something under way.
            return Ok(());
        }
        if load == NONE {
            if self.cells[unit as usize].is_expert {
                self.cells[unit as usize].missed = true;
                self.begin_load(unit, rank)?;
            } else {
                self.jump(unit, rank)?;
            }
        } else {
            if rank < self.load(load).rank {
                self.load(load).rank = rank;
                self.skip_to(unit)?;
            }
            let cell = &self.cells[unit as usize];
            let passed_over = !cell.in_window && !cell.is_expert;
            if passed_over && self.load(load).goal.is_none() {
                // Somebody else asked for another unit meanwhile, and slots follow the window.
                self.jump(unit, rank)?;
            }
        }
        self.advance(now_ns)?;
        let load = self.cells[unit as usize].slot_load;
        if load == NONE || self.load(load).goal.is_some() {
            return Ok(());
        }
        self.give_slot(unit, now_ns)?;
        let load = self.cells[unit as usize].slot_load;
        if load != NONE && self.load(load).goal.is_none() && self.all_used(unit) {
            self.drop_load(load)?;
            let count = self.pool_of(unit).len();
            fail!(
                Busy,
                "all {count} slots are in use: give a unit back before unit {unit} is asked for, \
                 or open with more slots"
            );
        }
        Ok(())
    }

    /// Whether engines have all slots, so that waiting is for them alone.
    fn all_used(&self, unit: u32) -> bool {
        let is_expert = self.cells[unit as usize].is_expert;
        let pool = if is_expert { &self.experts } else { &self.line };
        let used =
            |slot: u32| pool.unit_in(slot).is_some_and(|unit| self.cells[unit as usize].users > 0);
        (0..pool.len()).all(used)
    }

    /// Takes a unit back. `after`: the device's event after which its slot may be written.
    pub fn release(&mut self, lease: &Lease, after: Option<Event>, now_ns: u64) -> Result<()> {
        let slot = match lease.place {
            Goal::Home => return Ok(()),
            Goal::Line(slot) | Goal::Expert(slot) => slot,
        };
        let cell = self.cells.get_mut(lease.unit as usize);
        let Some(cell) = cell.filter(|cell| cell.slot == slot && cell.users > 0) else {
            fail!(State, "unit {} is not in use there: it was given back before", lease.unit);
        };
        cell.users -= 1;
        let (since_ns, over) = (cell.since_ns, cell.users == 0);
        let pool = self.pool_of(lease.unit);
        pool.let_go(slot)?;
        if after.is_some() {
            pool.set_after(slot, after);
        }
        if over {
            self.record.used(lease.unit, since_ns, now_ns);
            self.last_left(lease.unit)?;
        }
        self.advance(now_ns)
    }

    /// The event after which the slot of a unit in use may be written, of another user who
    /// has given it back.
    pub fn after_of(&self, lease: &Lease) -> Option<Event> {
        match lease.place {
            Goal::Home => None,
            Goal::Line(slot) => self.line.after(slot),
            Goal::Expert(slot) => self.experts.after(slot),
        }
    }

    /// That event has come to pass.
    pub fn passed(&mut self, lease: &Lease, event: Event) {
        let (slot, pool) = match lease.place {
            Goal::Home => return,
            Goal::Line(slot) => (slot, &mut self.line),
            Goal::Expert(slot) => (slot, &mut self.experts),
        };
        if pool.after(slot) == Some(event) {
            pool.set_after(slot, None);
        }
    }

    /// Somebody waited for a unit, for the record.
    pub fn waited(&mut self, unit: u32, begin_ns: u64, end_ns: u64) {
        self.record.mark(Stage::Wait, unit, begin_ns, end_ns);
    }

    /// An event after which slots may be written has passed, and its number means nothing any
    /// more. A copy on its way to the device may name it still; it is tried again without.
    pub fn forget_event(&mut self, event: Event) {
        self.line.forget(event);
        self.experts.forget(event);
        for load in self.loads.iter_mut().flatten().filter(|load| load.after == Some(event)) {
            load.after = None;
        }
    }

    /// The last user of a unit in a slot has gone.
    fn last_left(&mut self, unit: u32) -> Result<()> {
        let cell = &mut self.cells[unit as usize];
        let event = cell.event.take();
        if cell.slot_load != NONE {
            return Ok(()); // who copies looks after the event
        }
        let (slot, spoiled) = (cell.slot, cell.is_spoiled());
        if spoiled {
            cell.slot = NONE;
        }
        self.spent.extend(event);
        if spoiled { self.pool_of(unit).empty(slot) } else { Ok(()) }
    }

    /// A unit that was used at home, for the record.
    pub fn used_home(&mut self, unit: u32, since_ns: u64, now_ns: u64) {
        self.record.used(unit, since_ns, now_ns);
    }

    /// The engine will use these experts: they are fetched as far as there are slots that
    /// nobody needs. What was hinted before and has not been used may leave.
    pub fn hint(&mut self, units: &[u32], now_ns: u64) -> Result<()> {
        let count = self.cells.len();
        if let Some(unit) = units.iter().find(|&&unit| unit as usize >= count) {
            fail!(Invalid, "unit {unit} of {count}");
        }
        self.let_go_kept(units)?;
        for &unit in units {
            let cell = &mut self.cells[unit as usize];
            if cell.seated || !cell.fits || cell.slot_load != NONE || cell.is_spoiled() {
                continue;
            }
            if cell.ready {
                if cell.is_expert && !std::mem::replace(&mut cell.kept, true) {
                    let slot = cell.slot;
                    self.kept.push(unit);
                    self.experts.hold(slot)?;
                }
                continue;
            }
            let pool = if cell.is_expert { &self.experts } else { &self.line };
            if !pool.has_room() {
                continue;
            }
            cell.error = None;
            cell.missed = cell.is_expert;
            self.begin_load(unit, Rank::Hinted)?;
            self.give_slot(unit, now_ns)?;
            let load = self.cells[unit as usize].slot_load;
            if load != NONE && self.load(load).goal.is_none() {
                self.drop_load(load)?;
            }
        }
        Ok(())
    }

    /// Experts that stayed for somebody who has not come may leave, but for these.
    pub(super) fn let_go_kept(&mut self, but: &[u32]) -> Result<()> {
        let mut kept = std::mem::take(&mut self.kept);
        kept.retain(|&unit| self.cells[unit as usize].kept);
        for &unit in kept.iter().filter(|unit| !but.contains(unit)) {
            let cell = &mut self.cells[unit as usize];
            // One that was had, and came again, is there twice.
            if std::mem::take(&mut cell.kept) {
                let slot = cell.slot;
                self.experts.let_go(slot)?;
            }
        }
        kept.retain(|unit| but.contains(unit));
        self.kept = kept;
        Ok(())
    }

    /// A pass begins: what follows is expected from the start of the order on.
    pub fn pass_begin(&mut self, now_ns: u64) -> Result<()> {
        self.record.pass_begin(now_ns);
        if !self.wrap && self.window.is_empty() {
            self.next = 0;
        }
        self.advance(now_ns)
    }

    /// A pass has ended.
    pub fn pass_end(&mut self, now_ns: u64) -> Result<()> {
        self.record.pass_end(now_ns);
        self.let_go_kept(&[])
    }
}
