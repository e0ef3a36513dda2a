//! Acquire and release of units by the engine.

use crate::base::status::Result;
use crate::device::Event;
use crate::fail;
use crate::stream::plan::Residency;
use crate::stream::scheduler::Scheduler;
use crate::stream::scheduler::loads::{Priority, Target};
use crate::stream::scheduler::record::Stage;
use crate::stream::units::{NONE, unknown_unit};

/// The right to use a unit until the lease is released. The unit stays where it is meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The unit.
    pub unit: u32,
    /// The memory that the unit is in.
    pub location: Target,
    /// The device event that completes the unit's copies; none = the unit is complete.
    pub event: Option<Event>,
}

/// The reason why a unit cannot be leased yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// A read is in progress.
    Read,
    /// A copy to the device is in progress.
    Copy,
    /// Loads that must end first take all slots.
    Slot,
}

/// The outcome of [`Scheduler::acquire`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// The unit is leased.
    Ready(Lease),
    /// The unit is being loaded: acquire it again when something has arrived.
    Wait(WaitReason),
}

impl Scheduler {
    /// Requests a unit. The call can be repeated: hits and misses are counted once, when the lease
    /// is granted. With `when_issued`, the lease is granted as soon as the unit's last copy was
    /// submitted to the device.
    pub fn acquire(&mut self, unit: u32, when_issued: bool, now_ns: u64) -> Result<Acquired> {
        let Some(state) = self.states.get_mut(unit as usize) else {
            return Err(unknown_unit(unit, self.states.len()));
        };
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        if state.slotless {
            if !state.is_resident {
                self.load_resident_now(unit)?;
                return Ok(Acquired::Wait(WaitReason::Read));
            }
            state.since_ns = now_ns;
            let is_expert = state.is_expert;
            self.record.served(unit, is_expert);
            return Ok(Acquired::Ready(Lease { unit, location: Target::Resident, event: None }));
        }
        let issued = when_issued && state.slot_load != NONE && {
            let load = state.slot_load;
            self.load(load).is_issued()
        };
        if self.states[unit as usize].ready || issued {
            return self.grant_lease(unit, issued, now_ns).map(Acquired::Ready);
        }
        self.fetch(unit, Priority::Acquired, now_ns)?;
        Ok(Acquired::Wait(self.wait_reason(unit)))
    }

    fn grant_lease(&mut self, unit: u32, issued: bool, now_ns: u64) -> Result<Lease> {
        let at = unit as usize;
        let slot = self.states[at].slot;
        if issued {
            let load = self.states[at].slot_load;
            self.states[at].event = self.load(load).event;
        }
        let event = self.states[at].event;
        self.pool_of(unit).add_reference(slot)?;
        self.pool_of(unit).touch(slot, now_ns)?;
        let state = &mut self.states[at];
        if state.users == 0 {
            state.since_ns = now_ns;
        }
        state.users += 1;
        let is_expert = state.is_expert;
        let missed = is_expert && std::mem::take(&mut state.missed);
        let reserved = std::mem::take(&mut state.reserved);
        if missed {
            self.record.missed(unit);
        }
        if reserved {
            self.pool_of(unit).remove_reference(slot)?;
        }
        self.leave_window(unit)?;
        self.record.served(unit, is_expert && !missed);
        if is_expert {
            self.note_expert_use(unit)?;
        }
        self.advance(now_ns)?;
        let location = if is_expert { Target::ExpertSlot(slot) } else { Target::Slot(slot) };
        Ok(Lease { unit, location, event })
    }

    /// A thread begins to wait for a unit. Until it wakes, no other unit gets that unit's slot.
    pub fn wait_begin(&mut self, unit: u32) {
        self.states[unit as usize].waiters += 1;
    }

    /// The thread no longer waits.
    pub fn wait_end(&mut self, unit: u32) -> Result<()> {
        let state = &mut self.states[unit as usize];
        state.waiters -= 1;
        let slot = state.slot;
        let over = state.waiters == 0 && std::mem::take(&mut state.reserved_for_waiter);
        if over { self.pool_of(unit).remove_reference(slot) } else { Ok(()) }
    }

    /// The reason why a requested unit is not leased yet.
    pub fn wait_reason(&self, unit: u32) -> WaitReason {
        let state = &self.states[unit as usize];
        let Some(load) = self.loads.get(state.slot_load as usize).and_then(Option::as_ref) else {
            return WaitReason::Read;
        };
        match load.target {
            None => WaitReason::Slot,
            Some(_) if load.next_read < load.chunks && load.next_copy == 0 => WaitReason::Read,
            Some(_) if load.reading > 0 && load.staged.is_empty() => WaitReason::Read,
            Some(_) => WaitReason::Copy,
        }
    }

    /// Starts to load a unit into a slot, or raises the priority of its load.
    fn fetch(&mut self, unit: u32, priority: Priority, now_ns: u64) -> Result<()> {
        let state = &self.states[unit as usize];
        if state.is_incomplete() {
            fail!(
                Busy,
                "unit {unit} is incomplete, because a copy failed, and is still leased: release \
                 it first"
            );
        }
        if !state.fits {
            fail!(
                Budget,
                "unit {unit} takes {} bytes, is not resident any more and fits in no slot: \
                 rebalance when memory is free",
                state.bytes
            );
        }
        if state.residency == Residency::Host && !state.is_resident {
            self.load_resident_now(unit)?;
        }
        let load = self.states[unit as usize].slot_load;
        if load != NONE && self.load(load).is_over() {
            // The load was dropped, and a transfer of it is still in flight.
            return Ok(());
        }
        if load == NONE {
            if self.states[unit as usize].is_expert {
                self.states[unit as usize].missed = true;
                self.begin_load(unit, priority)?;
            } else {
                self.jump_to(unit, priority)?;
            }
        } else {
            if priority < self.load(load).priority {
                self.load(load).priority = priority;
                self.skip_to(unit)?;
            }
            let state = &self.states[unit as usize];
            let passed_over = !state.in_window && !state.is_expert;
            if passed_over && self.load(load).target.is_none() {
                // Another thread acquired a different unit meanwhile, and slots are granted in the
                // order of the window.
                self.jump_to(unit, priority)?;
            }
        }
        self.advance(now_ns)?;
        let load = self.states[unit as usize].slot_load;
        if load == NONE || self.load(load).target.is_some() {
            return Ok(());
        }
        self.grant_slot(unit, now_ns)?;
        let load = self.states[unit as usize].slot_load;
        if load != NONE && self.load(load).target.is_none() && self.all_used(unit) {
            self.drop_load(load)?;
            let count = self.pool_of(unit).len();
            fail!(
                Busy,
                "all {count} slots are leased: release a unit before you acquire unit {unit}, or \
                 open the streamer with more slots"
            );
        }
        Ok(())
    }

    /// Whether leases hold all slots, so that no load can end the wait.
    fn all_used(&self, unit: u32) -> bool {
        let is_expert = self.states[unit as usize].is_expert;
        let pool = if is_expert { &self.expert_slots } else { &self.slots };
        let used =
            |slot: u32| pool.unit_in(slot).is_some_and(|unit| self.states[unit as usize].users > 0);
        (0..pool.len()).all(used)
    }

    /// Releases a lease. `after`: the device event after which the slot may be written.
    pub fn release(&mut self, lease: &Lease, after: Option<Event>, now_ns: u64) -> Result<()> {
        let slot = match lease.location {
            Target::Resident => return Ok(()),
            Target::Slot(slot) | Target::ExpertSlot(slot) => slot,
        };
        let state = self.states.get_mut(lease.unit as usize);
        let Some(state) = state.filter(|state| state.slot == slot && state.users > 0) else {
            fail!(
                State,
                "unit {} is not leased from that slot: it was released before",
                lease.unit
            );
        };
        state.users -= 1;
        let (since_ns, over) = (state.since_ns, state.users == 0);
        let pool = self.pool_of(lease.unit);
        pool.remove_reference(slot)?;
        if after.is_some() {
            pool.set_after(slot, after);
        }
        if over {
            self.record.used(lease.unit, since_ns, now_ns);
            self.end_last_use(lease.unit)?;
        }
        self.advance(now_ns)
    }

    /// The event after which a slot may be written. Another user of the unit left it on release.
    pub fn event_of(&self, slot: Target) -> Option<Event> {
        match slot {
            Target::Resident => None,
            Target::Slot(slot) => self.slots.after(slot),
            Target::ExpertSlot(slot) => self.expert_slots.after(slot),
        }
    }

    /// That event has completed.
    pub fn event_passed(&mut self, slot: Target, event: Event) {
        let (slot, pool) = match slot {
            Target::Resident => return,
            Target::Slot(slot) => (slot, &mut self.slots),
            Target::ExpertSlot(slot) => (slot, &mut self.expert_slots),
        };
        if pool.after(slot) == Some(event) {
            pool.set_after(slot, None);
        }
    }

    /// Records that a thread waited for a unit.
    pub fn note_wait(&mut self, unit: u32, begin_ns: u64, end_ns: u64) {
        self.record.mark(Stage::Wait, unit, begin_ns, end_ns);
    }

    /// Forgets a completed event: its number may be reused. A copy in submission may still name
    /// the event; it is submitted again without.
    pub fn forget_event(&mut self, event: Event) {
        self.slots.forget_event(event);
        self.expert_slots.forget_event(event);
        for load in self.loads.iter_mut().flatten().filter(|load| load.after == Some(event)) {
            load.after = None;
        }
    }

    /// Ends the last lease of a unit in a slot.
    fn end_last_use(&mut self, unit: u32) -> Result<()> {
        let state = &mut self.states[unit as usize];
        let event = state.event.take();
        if state.slot_load != NONE {
            return Ok(()); // the copier releases the event
        }
        let (slot, incomplete) = (state.slot, state.is_incomplete());
        if incomplete {
            state.slot = NONE;
        }
        self.done_events.extend(event);
        if incomplete { self.pool_of(unit).empty(slot) } else { Ok(()) }
    }

    /// Records the use of a resident unit.
    pub fn note_resident_use(&mut self, unit: u32, since_ns: u64, now_ns: u64) {
        self.record.used(unit, since_ns, now_ns);
    }

    /// Prefetches units that the engine will use, as far as slots are free. Experts of earlier
    /// hints that were not used may be evicted.
    pub fn hint(&mut self, units: &[u32], now_ns: u64) -> Result<()> {
        let count = self.states.len();
        if let Some(&unit) = units.iter().find(|&&unit| unit as usize >= count) {
            return Err(unknown_unit(unit, count));
        }
        self.release_reserved(units)?;
        for &unit in units {
            let state = &mut self.states[unit as usize];
            if state.slotless || !state.fits || state.slot_load != NONE || state.is_incomplete() {
                continue;
            }
            if state.ready {
                if state.is_expert && !std::mem::replace(&mut state.reserved, true) {
                    let slot = state.slot;
                    self.reserved.push(unit);
                    self.expert_slots.add_reference(slot)?;
                }
                continue;
            }
            let pool = if state.is_expert { &self.expert_slots } else { &self.slots };
            if !pool.has_room() {
                continue;
            }
            state.error = None;
            state.missed = state.is_expert;
            self.begin_load(unit, Priority::Hinted)?;
            self.grant_slot(unit, now_ns)?;
            let load = self.states[unit as usize].slot_load;
            if load != NONE && self.load(load).target.is_none() {
                self.drop_load(load)?;
            }
        }
        Ok(())
    }

    /// Allows the eviction of reserved experts, except these.
    pub(super) fn release_reserved(&mut self, except: &[u32]) -> Result<()> {
        let mut reserved = std::mem::take(&mut self.reserved);
        reserved.retain(|&unit| self.states[unit as usize].reserved);
        for &unit in reserved.iter().filter(|unit| !except.contains(unit)) {
            let state = &mut self.states[unit as usize];
            // An expert that was leased and reserved again is in the list twice.
            if std::mem::take(&mut state.reserved) {
                let slot = state.slot;
                self.expert_slots.remove_reference(slot)?;
            }
        }
        reserved.retain(|unit| except.contains(unit));
        self.reserved = reserved;
        Ok(())
    }

    /// Begins a pass. The window starts at the beginning of the order.
    pub fn pass_begin(&mut self, now_ns: u64) -> Result<()> {
        self.record.pass_begin(now_ns);
        if !self.wrap && self.window.is_empty() {
            self.next = 0;
        }
        self.advance(now_ns)
    }

    /// Ends a pass.
    pub fn pass_end(&mut self, now_ns: u64) -> Result<()> {
        self.record.pass_end(now_ns);
        self.release_reserved(&[])
    }
}
