//! Prefetch: the window of units that a pass needs next. Each gets a slot as soon as one is free.
//! On the way to a device, units are read ahead as far as staging slots are free.

use crate::base::status::Result;
use crate::stream::plan::{ComputeLocation, Mode, Residency};
use crate::stream::scheduler::loads::{Load, LoadPath, Priority, Target};
use crate::stream::scheduler::{MAX_PREFETCH, RING_PREFETCH, Scheduler, is_slotless};
use crate::stream::units::{NONE, unknown_unit};

impl Scheduler {
    /// Extends the window, and grants slots.
    pub(super) fn advance(&mut self, now_ns: u64) -> Result<()> {
        self.load_residents()?;
        while self.extend_window()? {
            self.grant_slots(now_ns)?;
        }
        self.grant_slots(now_ns)
    }

    /// The next unit of the order that must be loaded, and its position.
    fn upcoming(&self) -> Option<(u32, usize)> {
        let len = self.order.len();
        let last = if self.wrap { self.next + len } else { len };
        (self.next..last).map(|turn| (self.order[turn % len], turn)).find(|&(unit, _)| {
            let state = &self.states[unit as usize];
            // A unit that just lost its residency may be larger than slots.
            !state.slotless && state.fits
        })
    }

    fn extend_window(&mut self) -> Result<bool> {
        let most = if self.mode == Mode::Ring { RING_PREFETCH } else { MAX_PREFETCH };
        if self.window.len() >= most {
            return Ok(false);
        }
        let Some((unit, turn)) = self.upcoming() else { return Ok(false) };
        let state = &self.states[unit as usize];
        // A failed load is retried when the unit is acquired, not in a loop.
        if state.in_window || state.error.is_some() {
            return Ok(false);
        }
        if state.slot != NONE || state.slot_load != NONE {
            // A unit in a slot stays there if all units before it have slots. A canceled load must
            // end first.
            let slot = state.slot;
            let all_have_slots =
                self.window.iter().all(|&unit| self.states[unit as usize].slot != NONE);
            if slot == NONE
                || state.is_incomplete()
                || !all_have_slots
                || self.window.len() >= self.slots.len() as usize
            {
                return Ok(false);
            }
            self.slots.add_reference(slot)?;
        } else if self.may_begin() {
            self.begin_load(unit, Priority::Next)?;
        } else {
            return Ok(false);
        }
        self.states[unit as usize].in_window = true;
        self.window.push_back(unit);
        let len = self.order.len();
        self.next = if self.wrap { (turn + 1) % len } else { turn + 1 };
        Ok(true)
    }

    /// Whether a load may begin: a slot is free, or its chunks can be read ahead without one.
    fn may_begin(&self) -> bool {
        let waiting = self.loads().filter(|load| load.target.is_none() && !load.is_over());
        let (mut count, mut bytes) = (0, 0);
        for load in waiting {
            let state = &self.states[load.unit as usize];
            count += 1;
            bytes += if state.residency == Residency::File { state.bytes } else { 0 };
        }
        if count == 0 && self.slots.has_room() {
            return true;
        }
        let chunk = self.chunks.chunk_bytes();
        let staging = u64::from(self.staging_count) * chunk;
        self.compute == ComputeLocation::Device && count < MAX_PREFETCH && bytes < staging
    }

    /// Grants slots to the loads of the window, in order.
    fn grant_slots(&mut self, now_ns: u64) -> Result<()> {
        for at in 0..self.window.len() {
            let unit = self.window[at];
            let load = self.states[unit as usize].slot_load;
            if load == NONE || self.load(load).target.is_some() || self.load(load).is_over() {
                continue;
            }
            if !self.grant_slot(unit, now_ns)? {
                break;
            }
        }
        Ok(())
    }

    /// Grants a slot to a load. False: no slot is free.
    pub(super) fn grant_slot(&mut self, unit: u32, now_ns: u64) -> Result<bool> {
        let is_expert = self.states[unit as usize].is_expert;
        let states = &self.states;
        let pool = if is_expert { &mut self.expert_slots } else { &mut self.slots };
        let mut grant = pool.take(unit, now_ns, |evicted| states[evicted as usize].slot)?;
        let id = self.states[unit as usize].slot_load;
        let acquired = is_expert && self.load(id).priority == Priority::Acquired;
        if grant.is_none() && acquired {
            // An acquired expert takes the slot of a reserved one, then that of a pinned one.
            self.release_reserved(&[])?;
            let states = &self.states;
            grant =
                self.expert_slots.take(unit, now_ns, |evicted| states[evicted as usize].slot)?;
        }
        if grant.is_none() && acquired {
            self.unpin_experts()?;
            let states = &self.states;
            grant =
                self.expert_slots.take(unit, now_ns, |evicted| states[evicted as usize].slot)?;
        }
        let Some(grant) = grant else { return Ok(false) };
        if let Some(evicted) = grant.evicted {
            let state = &mut self.states[evicted as usize];
            (state.slot, state.ready, state.event) = (NONE, false, None);
        }
        let target =
            if is_expert { Target::ExpertSlot(grant.slot) } else { Target::Slot(grant.slot) };
        let (in_place, on_device) = (self.in_place, self.is_mapped());
        let state = &mut self.states[unit as usize];
        state.slot = grant.slot;
        // The position in the window is a reference of its own.
        let (in_window, id) = (state.in_window, state.slot_load);
        let load = self.load(id);
        (load.target, load.after) = (Some(target), grant.after);
        load.unmapped = on_device;
        if in_place && !on_device && grant.dirty != NONE && grant.dirty != unit {
            load.clear = grant.dirty;
        }
        if in_window {
            self.slots.add_reference(grant.slot)?;
        }
        if is_expert {
            self.pin_if_popular(unit)?;
        }
        Ok(true)
    }

    /// Begins a load to a slot that is granted later.
    pub(super) fn begin_load(&mut self, unit: u32, priority: Priority) -> Result<()> {
        debug_assert!(self.states[unit as usize].fits, "a unit must fit in its slot");
        let path = match (self.compute, self.states[unit as usize].residency) {
            (ComputeLocation::Device, Residency::Host) => LoadPath::Copied,
            (ComputeLocation::Device, _) => LoadPath::Staged,
            (ComputeLocation::Host, _) => LoadPath::Direct,
        };
        let id = self.add_load(unit, path, priority);
        let state = &mut self.states[unit as usize];
        state.slot_load = id;
        if path == LoadPath::Copied && !state.is_resident && state.resident_load == NONE {
            self.begin_resident_load(unit, priority);
        }
        Ok(())
    }

    pub(super) fn add_load(&mut self, unit: u32, path: LoadPath, priority: Priority) -> u32 {
        let chunks = self.chunks.of_unit(unit).len() as u32;
        self.age += 1;
        let load = Load::new(unit, path, priority, chunks, self.age);
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

    /// The engine acquired a unit out of order: the window continues from there.
    pub(super) fn jump_to(&mut self, unit: u32, priority: Priority) -> Result<()> {
        let turn = self.states[unit as usize].turn;
        if turn != NONE {
            while let Some(other) = self.window.pop_front() {
                self.drop_from_window(other)?;
            }
            let len = self.order.len();
            let next = turn as usize + 1;
            self.next = if self.wrap { next % len } else { next };
        }
        if self.states[unit as usize].slot_load == NONE {
            self.begin_load(unit, priority)?;
        }
        self.states[unit as usize].in_window = true;
        self.window.push_front(unit);
        Ok(())
    }

    /// A unit was leased: it and the units before it leave the window.
    pub(super) fn leave_window(&mut self, unit: u32) -> Result<()> {
        if !self.states[unit as usize].in_window {
            return Ok(());
        }
        self.skip_to(unit)?;
        self.window.pop_front();
        self.states[unit as usize].in_window = false;
        let slot = self.states[unit as usize].slot;
        self.slots.remove_reference(slot)
    }

    /// Drops the units of the window before this one.
    pub(super) fn skip_to(&mut self, unit: u32) -> Result<()> {
        if !self.states[unit as usize].in_window {
            return Ok(());
        }
        while self.window.front().is_some_and(|&first| first != unit) {
            if let Some(other) = self.window.pop_front() {
                self.drop_from_window(other)?;
            }
        }
        Ok(())
    }

    /// Drops a unit from the window.
    fn drop_from_window(&mut self, unit: u32) -> Result<()> {
        let state = &mut self.states[unit as usize];
        state.in_window = false;
        let (slot, load) = (state.slot, state.slot_load);
        if slot != NONE {
            self.slots.remove_reference(slot)?;
        }
        if load != NONE && self.load(load).priority != Priority::Acquired {
            self.drop_load(load)?;
        }
        Ok(())
    }
}

// Residency: units are loaded into memory where they stay, and give that memory up when it is
// needed elsewhere.

/// Units that are made resident at once while no thread waits for them.
const BACKGROUND_LOADS: usize = 2;

impl Scheduler {
    /// Begins to load resident units, as long as none is waited for.
    pub(super) fn load_residents(&mut self) -> Result<()> {
        let background = |load: &&Load| {
            load.target == Some(Target::Resident)
                && load.priority == Priority::Background
                && !load.is_over()
        };
        while self.loads().filter(background).count() < BACKGROUND_LOADS {
            let Some(unit) = self.pending_residents.pop_front() else { return Ok(()) };
            let state = &self.states[unit as usize];
            if state.residency != Residency::File
                && !state.is_resident
                && state.resident_load == NONE
            {
                self.begin_resident_load(unit, Priority::Background);
            }
        }
        Ok(())
    }

    pub(super) fn begin_resident_load(&mut self, unit: u32, priority: Priority) {
        let staged = self.compute == ComputeLocation::Device
            && self.states[unit as usize].residency == Residency::Device;
        let path = if staged { LoadPath::Staged } else { LoadPath::Direct };
        let id = self.add_load(unit, path, priority);
        self.load(id).target = Some(Target::Resident);
        self.load(id).unmapped = staged && self.in_place;
        self.states[unit as usize].resident_load = id;
    }

    /// A thread waits for a unit to become resident.
    pub(super) fn load_resident_now(&mut self, unit: u32) -> Result<()> {
        let load = self.states[unit as usize].resident_load;
        if load == NONE {
            self.begin_resident_load(unit, Priority::Acquired);
        } else {
            self.load(load).priority = Priority::Acquired;
        }
        Ok(())
    }

    /// Evicts a unit from its slot. False: a lease or a thread needs the unit there, or a load is
    /// in flight; try again when that has ended.
    pub fn evict_from_slot(&mut self, unit: u32) -> Result<bool> {
        let Some(state) = self.states.get(unit as usize) else {
            return Err(unknown_unit(unit, self.states.len()));
        };
        let load = state.slot_load;
        if load != NONE
            && self.load(load).target.is_none()
            && self.load(load).priority != Priority::Acquired
        {
            // The unit was read ahead: it might wait for a slot until the pass continues.
            self.drop_load(load)?;
        }
        let state = &mut self.states[unit as usize];
        // Threads that wait for the resident copy do not count: the unit may have to move for
        // them.
        if state.users > 0 || state.reserved_for_waiter || state.slot_load != NONE {
            return Ok(false);
        }
        let slot = std::mem::replace(&mut state.slot, NONE);
        if slot == NONE {
            return Ok(true);
        }
        (state.ready, state.reserved) = (false, false);
        if std::mem::take(&mut state.in_window) {
            self.window.retain(|&other| other != unit);
        }
        self.pool_of(unit).empty(slot)?;
        Ok(true)
    }

    /// Changes the residency of a unit. To memory: the unit is loaded there. To the file: when
    /// this returns true, the memory may be reused. False: a load is in flight; try again when
    /// something has arrived. The caller must know that no lease of the resident copy exists.
    pub fn set_residency(&mut self, unit: u32, residency: Residency, now_ns: u64) -> Result<bool> {
        let Some(state) = self.states.get(unit as usize) else {
            return Err(unknown_unit(unit, self.states.len()));
        };
        let load = state.resident_load;
        if load != NONE {
            self.drop_load(load)?;
            if self.states[unit as usize].resident_load != NONE {
                return Ok(false);
            }
        }
        let load = self.states[unit as usize].slot_load;
        if load != NONE && self.load(load).path == LoadPath::Copied {
            // The load copies from the resident copy.
            self.drop_load(load)?;
            if self.states[unit as usize].slot_load != NONE {
                return Ok(false);
            }
        }
        let compute = self.compute;
        let state = &mut self.states[unit as usize];
        (state.residency, state.is_resident) = (residency, false);
        state.slotless = is_slotless(compute, residency, state.on_processor);
        if residency != Residency::File {
            self.pending_residents.push_back(unit);
        }
        self.advance(now_ns)?;
        Ok(true)
    }

    /// Whether a unit fits in a slot.
    pub fn fits(&self, unit: u32) -> bool {
        self.states.get(unit as usize).is_some_and(|state| state.fits)
    }

    /// Whether the processor uses a unit that is resident in host memory, although the engine
    /// computes on a device.
    pub fn is_on_processor(&self, unit: u32) -> bool {
        self.states.get(unit as usize).is_some_and(|state| state.on_processor)
    }

    /// Sets that; to be called before the residency is set.
    pub fn set_processor(&mut self, unit: u32, on_processor: bool) {
        if let Some(state) = self.states.get_mut(unit as usize) {
            state.on_processor = on_processor;
        }
    }
}
