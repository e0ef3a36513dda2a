//! Acquire and release of units, and the device events that are passed on release.

use crate::base::status::{Result, Status};
use crate::base::sync::atomic::Ordering;
use crate::device::{Event, Memory};
use crate::fail;
use crate::stream::scheduler::{Acquired, Lease, Scheduler, Target, WaitReason};
use crate::stream::streamer::{MOVING, ON_DEVICE, OPEN, Shared, State, Streamer, USERS};
use crate::stream::units::unknown_unit;

/// Options of an acquire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcquireOpts {
    /// Do not wait: [`Status::Again`] when the unit is not loaded.
    pub poll: bool,
    /// Return as soon as all copies were submitted to the device; the engine waits for the lease's
    /// event.
    pub when_issued: bool,
    /// When waiting ends with [`Status::Timeout`], in nanoseconds; 0 = never.
    pub deadline_ns: u64,
}

/// A lease of a unit, with the unit's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitLease {
    /// The lease; identifies what is released.
    pub lease: Lease,
    /// Address of the unit's image.
    pub address: u64,
    /// Length of the image.
    pub bytes: u64,
    /// Memory in which the address is valid.
    pub memory: Memory,
    /// When the lease was granted.
    pub since_ns: u64,
}

impl Streamer {
    /// Acquires a unit. The unit stays loaded until it was released as often as it was acquired.
    /// [`Status::Busy`] when leases hold all slots.
    pub fn acquire(&self, unit: u32, opts: AcquireOpts) -> Result<UnitLease> {
        let shared = &self.shared;
        let Some(gate) = shared.gates.get(unit as usize) else {
            return Err(unknown_unit(unit, shared.gates.len()));
        };
        if !shared.has_marks {
            // A resident unit needs no decision: one atomic operation, no lock.
            let add_user =
                |word: u32| (word & OPEN != 0 && word & USERS < USERS).then_some(word + 1);
            if gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, add_user).is_ok() {
                shared.fast_acquires.fetch_add(1, Ordering::Relaxed);
                return Ok(shared.resident_lease(unit));
            }
        }
        self.acquire_locked(unit, opts)
    }

    fn acquire_locked(&self, unit: u32, opts: AcquireOpts) -> Result<UnitLease> {
        let shared = &self.shared;
        let mut since_ns: Option<u64> = None;
        let mut waiting: Option<(WaitReason, u64)> = None;
        let mut state = shared.state.lock();
        loop {
            state.check()?;
            let now_ns = shared.now_ns();
            if let Some((why, from_ns)) = waiting.take() {
                state.waits[why as usize] += now_ns.saturating_sub(from_ns);
            }
            let acquired = state.scheduler.acquire(unit, opts.when_issued, now_ns);
            if matches!(acquired, Ok(Acquired::Ready(lease)) if lease.location == Target::Resident)
            {
                // Before settling: a unit that is to be moved is moved when it has no user.
                shared.add_user(unit)?;
            }
            shared.settle(&mut state);
            match acquired? {
                Acquired::Ready(lease) => {
                    if let Some(since_ns) = since_ns {
                        state.scheduler.note_wait(unit, since_ns, now_ns);
                    }
                    let at = state.weight_memory.at(unit, lease.location)?;
                    if lease.location != Target::Resident {
                        state.leased += 1;
                    }
                    let bytes = shared.units.units[unit as usize].image_bytes;
                    let (address, memory) = (at.address, at.memory);
                    return Ok(UnitLease { lease, address, bytes, memory, since_ns: now_ns });
                }
                Acquired::Wait(_) if opts.poll => return Err(Status::Again.into()),
                Acquired::Wait(why) => {
                    if since_ns.is_none() {
                        since_ns = Some(now_ns);
                        state.wait_count += 1;
                    }
                    waiting = Some((why, now_ns));
                    state.scheduler.wait_begin(unit);
                    let in_time = shared.wait(&mut state, opts.deadline_ns);
                    state.scheduler.wait_end(unit)?;
                    if !in_time {
                        fail!(Timeout, "the unit was not loaded before the deadline");
                    }
                }
            }
        }
    }

    /// Releases a lease. `after`: the device event after which the unit's memory may be reused;
    /// none = now. The streamer takes the event over and releases it. If the lease was granted
    /// early and a copy failed since, the lease is released and the copy's error is returned:
    /// results computed with the unit are wrong.
    pub fn release(&self, held: &UnitLease, after: Option<Event>) -> Result<()> {
        self.give_back(held, after)?
    }

    /// The same with separate results: the outer one says whether the lease was released, the
    /// inner one whether the unit was complete.
    pub fn give_back(&self, held: &UnitLease, after: Option<Event>) -> Result<Result<()>> {
        let (shared, lease) = (&self.shared, &held.lease);
        let Some(gate) = shared.gates.get(lease.unit as usize) else {
            return Err(unknown_unit(lease.unit, shared.gates.len()));
        };
        if lease.location == Target::Resident {
            let unused =
                || fail!(State, "unit {} is not leased: it was released before", lease.unit);
            if gate.load(Ordering::Acquire) & USERS == 0 {
                return unused();
            }
            if shared.has_marks {
                let mut state = shared.state.lock();
                state.scheduler.note_resident_use(lease.unit, held.since_ns, shared.now_ns());
            }
            if let Some(event) = after {
                shared.resident_used_until(lease.unit, event);
            }
            let left = shared.remove_user(lease.unit);
            shared.release_ended_events();
            return if left { Ok(Ok(())) } else { unused() };
        }
        // A slot has one event, so an earlier event of another user is waited for. An error of
        // that event does not matter: the user's reads have ended.
        after.iter().for_each(|event| shared.wait_for_earlier_user(lease, *event));
        let mut state = shared.state.lock();
        let incomplete = state.scheduler.incomplete_error(lease.unit);
        state.scheduler.release(lease, after, shared.now_ns())?;
        state.leased = state.leased.saturating_sub(1);
        after.iter().for_each(|event| shared.slot_used_until(&mut state, *event));
        shared.settle(&mut state);
        let spent = state.scheduler.take_done_events();
        drop(state);
        shared.release_events(&spent);
        shared.release_ended_events();
        Ok(incomplete.map_or(Ok(()), Err))
    }

    /// Prefetches units that the engine will use, as far as slots are free.
    pub fn hint(&self, units: &[u32]) -> Result<()> {
        self.shared.report(|scheduler, now_ns| scheduler.hint(units, now_ns))
    }

    /// Begins a pass. Fails if a file of the model changed.
    pub fn pass_begin(&self) -> Result<()> {
        self.shared.check_files()?;
        self.shared.report(Scheduler::pass_begin)
    }

    /// Ends a pass.
    pub fn pass_end(&self) -> Result<()> {
        self.shared.report(Scheduler::pass_end)
    }
}

impl Shared {
    fn resident_lease(&self, unit: u32) -> UnitLease {
        let word = self.resident_addresses[unit as usize].load(Ordering::Acquire);
        let (address, memory) = match word & ON_DEVICE {
            0 => (word, Memory::Host),
            _ => (word & !ON_DEVICE, Memory::Device),
        };
        UnitLease {
            lease: Lease { unit, location: Target::Resident, event: None },
            address,
            bytes: self.units.units[unit as usize].image_bytes,
            memory,
            since_ns: 0,
        }
    }

    /// Adds a user of a resident unit, under the lock.
    fn add_user(&self, unit: u32) -> Result<()> {
        let more = |word: u32| (word & USERS < USERS).then_some(word + 1);
        match self.gates[unit as usize].fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(()),
            Err(_) => {
                fail!(Limit, "unit {unit} has {USERS} leases, the most possible: release some")
            }
        }
    }

    /// Removes a user of a resident unit; false: it had none. The last user lets the unit be
    /// moved, if that is planned.
    fn remove_user(&self, unit: u32) -> bool {
        let less = |word: u32| (word & USERS > 0).then(|| word - 1);
        let gate = &self.gates[unit as usize];
        let Ok(before) = gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) else {
            return false;
        };
        if before & MOVING != 0 && before & USERS == 1 {
            let mut state = self.state.lock();
            self.settle(&mut state);
        }
        true
    }

    /// Reports to the scheduler, unless the streamer is closed.
    fn report(&self, report: impl FnOnce(&mut Scheduler, u64) -> Result<()>) -> Result<()> {
        let mut state = self.state.lock();
        state.check()?;
        let reported = report(&mut state.scheduler, self.now_ns());
        self.settle(&mut state);
        reported
    }

    fn check_files(&self) -> Result<()> {
        for file in 0..self.files.count() {
            match self.files.check(file) {
                Err(error) if error.status() != Status::State => {
                    let path = self.model.files[file as usize].path.display().to_string();
                    return Err(error.within(&path));
                }
                _ => {} // the open file is valid, even if another file has its name now
            }
        }
        Ok(())
    }
}

// Device events passed on release: the device still reads the unit until then. Only threads that
// need the memory wait for them.

/// Events that are polled at once: they mostly end in order.
const ASKED: usize = 4;

/// An event after which the memory of a unit may be reused.
#[derive(Clone, Copy)]
pub struct PendingEvent {
    pub event: Event,
    /// The unit, if it was used where it is resident. In a slot, the slot has the event.
    pub resident_unit: Option<u32>,
}

impl State {
    /// The event that a move of units waits for. Perhaps no call follows it, so the copier
    /// waits for it.
    pub(super) fn event_to_wait_for(&self) -> Option<Event> {
        let waits = self.is_moving();
        self.pending_events.front().filter(|_| waits).map(|after| after.event)
    }
}

impl Shared {
    /// Takes over the event of a resident unit, before its user is removed.
    pub(super) fn resident_used_until(&self, unit: u32, event: Event) {
        let mut state = self.state.lock();
        state.resident_uses[unit as usize] += 1;
        state.pending_events.push_back(PendingEvent { event, resident_unit: Some(unit) });
    }

    /// Takes over the event of a unit in a slot.
    pub(super) fn slot_used_until(&self, state: &mut State, event: Event) {
        state.pending_events.push_back(PendingEvent { event, resident_unit: None });
    }

    /// Releases completed events. The device is not called under a lock; two threads that do this
    /// at once find the same.
    pub(super) fn release_ended_events(&self) {
        let Some(device) = &self.device else { return };
        loop {
            let oldest: Vec<PendingEvent> = {
                let state = self.state.lock();
                state.pending_events.iter().take(ASKED).copied().collect()
            };
            // An event that another thread released is unknown to the device, and has completed.
            let is_gone = |after: &PendingEvent| {
                let released = device.release(after.event);
                !released.is_err_and(|error| error.status() == Status::Busy)
            };
            let count = oldest.len();
            let completed: Vec<PendingEvent> = oldest.into_iter().filter(is_gone).collect();
            if completed.is_empty() {
                return;
            }
            self.forget_events(&completed);
            if completed.len() < count {
                return;
            }
        }
    }

    fn forget_events(&self, completed: &[PendingEvent]) {
        let mut state = self.state.lock();
        let mut is_free = false;
        for after in completed {
            let at = state.pending_events.iter().position(|other| other.event == after.event);
            let Some(at) = at else { continue };
            state.pending_events.remove(at);
            match after.resident_unit {
                Some(unit) => {
                    let uses = &mut state.resident_uses[unit as usize];
                    *uses -= 1;
                    is_free |= *uses == 0;
                }
                None => {
                    state.scheduler.forget_event(after.event);
                    is_free |= state.slots_change();
                }
            }
        }
        if is_free && state.is_moving() {
            self.settle(&mut state);
        }
    }

    /// Waits until the device reads none of the released units any more.
    pub(super) fn wait_for_events(&self, deadline_ns: u64) -> Result<()> {
        let Some(device) = &self.device else { return Ok(()) };
        loop {
            let Some(after) = self.state.lock().pending_events.front().copied() else {
                return Ok(());
            };
            if let Err(error) = device.wait(after.event, deadline_ns) {
                if error.status() == Status::Timeout {
                    fail!(
                        Busy,
                        "the device still reads units that were released: wait and close again"
                    );
                }
                // The reads that precede a failed event have ended, too.
                log::debug!("an event passed on release failed: {error}");
            }
            self.release_ended_events();
        }
    }

    /// Waits for the event of an earlier user of the same slot.
    pub(super) fn wait_for_earlier_user(&self, lease: &Lease, after: Event) {
        let mut state = self.state.lock();
        while let Some(earlier) =
            state.scheduler.event_of(lease.location).filter(|&event| event != after)
        {
            drop(state);
            let waited = self.device.as_ref().map_or(Ok(()), |device| device.wait(earlier, 0));
            if let Err(error) = waited {
                log::debug!("an event of an earlier user of a slot failed: {error}");
            }
            state = self.state.lock();
            state.scheduler.event_passed(lease.location, earlier);
        }
    }
}
