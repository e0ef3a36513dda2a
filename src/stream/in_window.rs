//! Units in place on a device: each has addresses of its own in one window, and memory is put
//! behind them while it is their turn. A slot is memory that moves from unit to unit.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::window::{Piece, Window};
use crate::fail;
use crate::stream::core::Goal;
use crate::stream::plan::{Home, Plan};
use crate::stream::units::NONE;

/// Largest grain of a device that units are put in whole multiples of.
pub const MAX_GRAIN_BYTES: u64 = 1 << 30;

/// Memory that moves from unit to unit.
struct Slot {
    piece: Piece,
    /// Behind whose addresses it may be: of more than one where putting it elsewhere failed.
    units: Vec<u32>,
}

/// Memory that is to be given back, by who maps.
pub struct Leaving {
    window: Arc<dyn Window>,
    /// Whose home it was, or [`NONE`]: it was a slot.
    unit: u32,
    /// Behind whose addresses it may be.
    units: Vec<u32>,
    piece: Piece,
    /// What of it is paid for.
    pub bytes: u64,
}

/// What is to be done to put memory behind a unit's addresses. It names the device's memory and
/// nothing else, so that it is done without the streamer's lock.
pub struct Work {
    window: Arc<dyn Window>,
    /// Slots that are there still and go first.
    others: Vec<Piece>,
    /// The same of what the device did not take back.
    stuck: Vec<Piece>,
    piece: Piece,
    at: u64,
}

/// The addresses, and the memory.
pub struct InWindow {
    window: Arc<dyn Window>,
    /// Where each unit begins in it.
    offsets: Vec<u64>,
    images: Vec<u64>,
    grain_bytes: u64,
    slots: Vec<Slot>,
    /// How many of them are of the line; the others are for experts.
    line: u32,
    /// What one costs, of each kind.
    slot_bytes: [u64; 2],
    homes: Vec<Option<Piece>>,
    leaving: Vec<Leaving>,
    /// What left and is not paid back yet.
    leaving_bytes: u64,
    /// What the device did not take back: it is tried again before the unit has memory.
    stuck: Vec<Leaving>,
    account: Option<Arc<Account>>,
}

impl Work {
    /// Does it.
    ///
    /// # Safety
    /// Nobody uses the addresses of the unit, nor those where the memory is now, and no work
    /// under way does.
    pub unsafe fn carry_out(&self) -> Result<()> {
        for &other in &self.others {
            // SAFETY: the caller's promise.
            unsafe { self.window.take(other)? };
        }
        for &other in &self.stuck {
            // SAFETY: as above.
            match unsafe { self.window.destroy(other) } {
                Err(error) if error.status() == Status::Handle => {} // it went the last time
                said => said?,
            }
        }
        // SAFETY: as above.
        unsafe { self.window.put(self.piece, self.at) }
    }
}

impl Leaving {
    /// Gives it back.
    ///
    /// # Safety
    /// Nobody uses it, and no work under way does.
    pub unsafe fn destroy(&self) -> Result<()> {
        // SAFETY: the caller's promise.
        let destroyed = unsafe { self.window.destroy(self.piece) };
        let words = || format!("{} bytes of units in place stay taken", self.bytes);
        destroyed.map_err(|error| error.within(&words()))
    }
}

impl InWindow {
    /// Reserves addresses for all units, and takes the memory of all slots. Each unit that may
    /// come to a slot has addresses for all of it: a slot is put there as a whole.
    pub fn new(
        images: &[u64],
        is_expert: &[bool],
        plan: &Plan,
        reserve: impl FnOnce(u64) -> Result<Arc<dyn Window>>,
        account: Option<&Arc<Account>>,
    ) -> Result<InWindow> {
        let mut offsets = Vec::new();
        let mut homes = Vec::new();
        let tried = offsets.try_reserve_exact(images.len());
        tried.and_then(|()| homes.try_reserve_exact(images.len())).map_err(|_| Status::NoMem)?;
        homes.resize(images.len(), None);
        let grain_bytes = plan.device_grain_bytes;
        let slot_bytes = [plan.slot_bytes, plan.expert_slot_bytes];
        let mut end = 0u64;
        for (&image, &is_expert) in images.iter().zip(is_expert) {
            offsets.push(end);
            let slot = slot_bytes[usize::from(is_expert)];
            let own = plan.taken_by(image, Home::Device);
            let reach = if image <= slot { own.max(slot) } else { own };
            end = end.checked_add(reach).ok_or(Status::Limit)?;
        }
        let window = reserve(end)?;
        let account = account.cloned();
        let mut all = InWindow {
            window,
            offsets,
            images: images.to_vec(),
            grain_bytes,
            slots: Vec::new(),
            line: plan.slots,
            slot_bytes,
            homes,
            leaving: Vec::new(),
            leaving_bytes: 0,
            stuck: Vec::new(),
            account,
        };
        (0..plan.slots).try_for_each(|_| all.add_slot(plan.slot_bytes))?;
        Ok(all)
    }

    fn add_slot(&mut self, bytes: u64) -> Result<()> {
        self.slots.try_reserve(1).map_err(|_| Status::NoMem)?;
        let piece = self.create(bytes)?;
        self.slots.push(Slot { piece, units: Vec::new() });
        Ok(())
    }

    /// Adds an expert slot.
    pub fn add_expert_slot(&mut self) -> Result<()> {
        self.add_slot(self.slot_bytes[1])
    }

    /// Removes the last expert slot, which is unused. The thread that maps memory frees it.
    pub fn drop_expert_slot(&mut self) {
        let last = self.slots.len().checked_sub(1).filter(|&last| last >= self.line as usize);
        let Some(slot) = last.and_then(|last| self.slots.drain(last..).next()) else { return };
        self.leave(NONE, slot.units, slot.piece, self.slot_bytes[1]);
    }

    /// Memory that is paid for.
    fn create(&self, bytes: u64) -> Result<Piece> {
        if let Some(account) = &self.account {
            account.take(Tier::Device, bytes)?;
        }
        self.window.create(bytes).inspect_err(|_| self.pay_back(bytes))
    }

    fn pay_back(&self, bytes: u64) {
        if let Some(account) = &self.account {
            account.give_back(Tier::Device, bytes);
        }
    }

    fn taken_by(&self, unit: u32) -> u64 {
        self.images[unit as usize].next_multiple_of(self.grain_bytes.max(1))
    }

    /// Where a unit is while it has memory.
    pub fn address(&self, unit: u32) -> u64 {
        self.window.address() + self.offsets[unit as usize]
    }

    /// All addresses.
    pub fn range(&self) -> (u64, u64) {
        (self.window.address(), self.window.bytes())
    }

    /// Memory for a unit's home; it is put there when the unit is brought.
    pub fn make_home(&mut self, unit: u32) -> Result<()> {
        if let Some(at) = self.leaving.iter().position(|one| one.unit == unit) {
            // It has not left yet.
            let one = self.leaving.swap_remove(at);
            self.leaving_bytes -= one.bytes;
            self.homes[unit as usize] = Some(one.piece);
            return Ok(());
        }
        let piece = self.create(self.taken_by(unit))?;
        self.homes[unit as usize] = Some(piece);
        Ok(())
    }

    /// Lets a home go: whoever maps gives it back.
    pub fn free_home(&mut self, unit: u32) {
        let Some(piece) = self.homes[unit as usize].take() else { return };
        let bytes = self.taken_by(unit);
        self.leave(unit, vec![unit], piece, bytes);
    }

    fn leave(&mut self, unit: u32, units: Vec<u32>, piece: Piece, bytes: u64) {
        self.leaving.push(Leaving { window: self.window.clone(), unit, units, piece, bytes });
        self.leaving_bytes += bytes;
    }

    /// Whether memory is being given back that who comes may need.
    pub fn is_leaving(&self) -> bool {
        self.leaving_bytes > 0
    }

    /// What is to be given back.
    pub fn take_leaving(&mut self) -> Vec<Leaving> {
        std::mem::take(&mut self.leaving)
    }

    /// It was, or the device did not take it: it counts as given back all the same.
    pub fn left(&mut self, one: Leaving, is_stuck: bool) {
        self.leaving_bytes -= one.bytes;
        self.pay_back(one.bytes);
        if is_stuck && !one.units.is_empty() {
            self.stuck.push(one);
        }
    }

    fn number(&self, goal: Goal) -> Option<usize> {
        match goal {
            Goal::Home => None,
            Goal::Line(slot) => Some(slot as usize),
            Goal::Expert(slot) => Some(self.line as usize + slot as usize),
        }
    }

    fn goal(&self, number: usize) -> Goal {
        match u32::try_from(number).unwrap_or(NONE) {
            slot if slot < self.line => Goal::Line(slot),
            slot => Goal::Expert(slot - self.line),
        }
    }

    /// What puts memory behind a unit's addresses, and of which slots that is there still.
    pub fn work(&self, unit: u32, goal: Goal) -> Result<(Work, Vec<Goal>)> {
        let own = self.number(goal);
        let piece = match own {
            None => self.homes[unit as usize],
            Some(number) => self.slots.get(number).map(|slot| slot.piece),
        };
        let Some(piece) = piece else {
            fail!(State, "unit {unit} has no memory that could be put behind it");
        };
        let (mut others, mut goals) = (Vec::new(), Vec::new());
        for (number, slot) in self.slots.iter().enumerate() {
            if slot.units.contains(&unit) && Some(number) != own {
                others.push(slot.piece);
                goals.push(self.goal(number));
            }
        }
        let of_unit = self.stuck.iter().filter(|one| one.units.contains(&unit));
        let stuck = of_unit.map(|one| one.piece).collect();
        let (window, at) = (self.window.clone(), self.offsets[unit as usize]);
        Ok((Work { window, others, stuck, piece, at }, goals))
    }

    /// It was done.
    pub fn worked(&mut self, unit: u32, goal: Goal) {
        let there = self.slots.iter_mut().filter(|slot| slot.units.contains(&unit));
        there.for_each(|slot| slot.units.clear());
        self.stuck.retain(|one| !one.units.contains(&unit));
        if let Some(number) = self.number(goal) {
            self.slots[number].units.clear();
            self.slots[number].units.push(unit);
        }
    }

    /// It was not: a slot is where it was, or where it was to be, or nowhere.
    pub fn failed(&mut self, unit: u32, goal: Goal) {
        if let Some(number) = self.number(goal) {
            let units = &mut self.slots[number].units;
            units.retain(|&other| other != unit);
            units.push(unit);
        }
    }

    /// Gives all memory back; the first error, if there was any.
    ///
    /// # Safety
    /// Nobody uses any of it, and no work under way does.
    pub unsafe fn free_all(&mut self) -> Result<()> {
        (0..self.homes.len()).for_each(|unit| self.free_home(unit as u32));
        let line = self.line as usize;
        for (number, slot) in std::mem::take(&mut self.slots).into_iter().enumerate() {
            let bytes = self.slot_bytes[usize::from(number >= line)];
            self.leave(NONE, Vec::new(), slot.piece, bytes);
        }
        let mut freed = Ok(());
        for one in self.take_leaving() {
            // SAFETY: the caller's promise.
            let destroyed = unsafe { one.destroy() };
            self.left(one, false);
            freed = freed.and(destroyed);
        }
        freed
    }
}

impl Drop for InWindow {
    fn drop(&mut self) {
        // SAFETY: the last of those who had it, as for all places.
        if let Err(error) = unsafe { self.free_all() } {
            log::warn!("{error}");
        }
    }
}
