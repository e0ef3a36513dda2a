//! Units for the engine: asked for, had, given back.

use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::Ordering;
use crate::device::{Event, Memory};
use crate::fail;
use crate::stream::core::{Goal, Lease, Want, Why};
use crate::stream::streamer::{LEAVING, ON_DEVICE, OPEN, Shared, State, Streamer, USERS};

/// How a unit is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct How {
    /// Without waiting: [`Status::Again`] when it is not there.
    pub poll: bool,
    /// As soon as the device has been given all copies: the engine waits for the event.
    pub early: bool,
    /// When waiting ends with [`Status::Timeout`]; 0 = never.
    pub deadline_ns: u64,
}

/// A unit that the engine has until it gives it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// What gives it back.
    pub lease: Lease,
    /// Where its image is.
    pub address: u64,
    /// How long that is.
    pub bytes: u64,
    /// Where the address is valid.
    pub memory: Memory,
    /// When it was asked for.
    pub since_ns: u64,
}

impl Streamer {
    /// Asks for a unit. It is there, and stays, until it is released as often as it was
    /// acquired. [`Status::Busy`] when engines have all slots.
    pub fn acquire(&self, unit: u32, how: How) -> Result<Held> {
        let shared = &self.shared;
        let Some(gate) = shared.gates.get(unit as usize) else {
            fail!(Invalid, "unit {unit} of {}", shared.gates.len());
        };
        if !shared.noted {
            // Nothing to decide where it is at home: one atomic operation, no lock.
            let enter = |word: u32| (word & OPEN != 0 && word & USERS < USERS).then_some(word + 1);
            if gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).is_ok() {
                shared.quick.fetch_add(1, Ordering::Relaxed);
                return Ok(shared.at_home(unit));
            }
        }
        self.acquire_slowly(unit, how)
    }

    fn acquire_slowly(&self, unit: u32, how: How) -> Result<Held> {
        let shared = &self.shared;
        let mut since_ns: Option<u64> = None;
        let mut waiting: Option<(Why, u64)> = None;
        let mut state = shared.state.lock();
        loop {
            state.check()?;
            let now_ns = shared.now_ns();
            if let Some((why, from_ns)) = waiting.take() {
                state.waits[why as usize] += now_ns.saturating_sub(from_ns);
            }
            let want = state.core.want(unit, how.early, now_ns);
            if matches!(want, Ok(Want::Ready(lease)) if lease.place == Goal::Home) {
                // First: a home that is to leave does so when it has no user.
                shared.enter(unit)?;
            }
            shared.settle(&mut state);
            match want? {
                Want::Ready(lease) => {
                    if let Some(since_ns) = since_ns {
                        state.core.waited(unit, since_ns, now_ns);
                    }
                    let at = state.places.at(unit, lease.place)?;
                    if lease.place != Goal::Home {
                        state.leased += 1;
                    }
                    let bytes = shared.units.units[unit as usize].image_bytes;
                    let (address, memory) = (at.address, at.memory);
                    return Ok(Held { lease, address, bytes, memory, since_ns: now_ns });
                }
                Want::Wait(_) if how.poll => return Err(Status::Again.into()),
                Want::Wait(why) => {
                    if since_ns.is_none() {
                        since_ns = Some(now_ns);
                        state.waited += 1;
                    }
                    waiting = Some((why, now_ns));
                    state.core.wait_begin(unit);
                    let waited = shared.wait(&mut state, how.deadline_ns, now_ns);
                    state.core.wait_end(unit)?;
                    waited?;
                }
            }
        }
    }

    /// Gives a unit back. `after`: the device's event after which its memory may be used
    /// for another; none = now. The event is the streamer's from then on, who releases it. When
    /// the unit was given early and a copy has failed since, it is given back all the same, and
    /// the error is that of the copy: what was computed with it is wrong.
    pub fn release(&self, held: &Held, after: Option<Event>) -> Result<()> {
        self.give_back(held, after)?
    }

    /// The same, for those who have to know both: whether it was given back, and whether what
    /// was computed with it is right.
    pub fn give_back(&self, held: &Held, after: Option<Event>) -> Result<Result<()>> {
        let (shared, lease) = (&self.shared, &held.lease);
        let Some(gate) = shared.gates.get(lease.unit as usize) else {
            fail!(Invalid, "unit {} of {}", lease.unit, shared.gates.len());
        };
        if lease.place == Goal::Home {
            let unused = || fail!(State, "unit {} is not in use: it was given back", lease.unit);
            if gate.load(Ordering::Acquire) & USERS == 0 {
                return unused();
            }
            if shared.noted {
                let mut state = shared.state.lock();
                state.core.used_home(lease.unit, held.since_ns, shared.now_ns());
            }
            if let Some(event) = after {
                shared.use_home_until(lease.unit, event);
            }
            let left = shared.leave(lease.unit);
            shared.let_ended_go();
            return if left { Ok(Ok(())) } else { unused() };
        }
        // A slot has one event: of two users who compute at once the first is waited for. Whether
        // it ended well is not asked: it has read what it was to read.
        after.iter().for_each(|event| shared.wait_for_earlier(lease, *event));
        let mut state = shared.state.lock();
        let spoiled = state.core.spoiled(lease.unit);
        state.core.release(lease, after, shared.now_ns())?;
        state.leased = state.leased.saturating_sub(1);
        after.iter().for_each(|event| shared.use_slot_until(&mut state, *event));
        shared.settle(&mut state);
        let spent = state.core.take_spent();
        drop(state);
        shared.release_events(&spent);
        shared.let_ended_go();
        Ok(spoiled.map_or(Ok(()), Err))
    }

    /// The engine will use these units: they are fetched as far as there is room.
    pub fn hint(&self, units: &[u32]) -> Result<()> {
        let mut state = self.shared.state.lock();
        state.check()?;
        let told = state.core.hint(units, self.shared.now_ns());
        self.shared.settle(&mut state);
        told
    }

    /// A pass begins. An error when a file of the model is not what it was.
    pub fn pass_begin(&self) -> Result<()> {
        self.shared.check_files()?;
        let mut state = self.shared.state.lock();
        state.check()?;
        let told = state.core.pass_begin(self.shared.now_ns());
        self.shared.settle(&mut state);
        told
    }

    /// A pass has ended.
    pub fn pass_end(&self) -> Result<()> {
        let mut state = self.shared.state.lock();
        state.check()?;
        let told = state.core.pass_end(self.shared.now_ns());
        self.shared.settle(&mut state);
        told
    }
}

impl Shared {
    fn at_home(&self, unit: u32) -> Held {
        let word = self.home_addresses[unit as usize].load(Ordering::Acquire);
        let (address, memory) = match word & ON_DEVICE {
            0 => (word, Memory::Host),
            _ => (word & !ON_DEVICE, Memory::Device),
        };
        Held {
            lease: Lease { unit, place: Goal::Home, event: None },
            address,
            bytes: self.units.units[unit as usize].image_bytes,
            memory,
            since_ns: 0,
        }
    }

    /// A user of a home more, under the lock.
    fn enter(&self, unit: u32) -> Result<()> {
        let more = |word: u32| (word & USERS < USERS).then_some(word + 1);
        match self.gates[unit as usize].fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(()),
            Err(_) => fail!(Limit, "unit {unit} has {USERS} users: give it back"),
        }
    }

    /// A user of a home less; false: it had none. The last one lets the home move, if it is to.
    fn leave(&self, unit: u32) -> bool {
        let less = |word: u32| (word & USERS > 0).then(|| word - 1);
        let gate = &self.gates[unit as usize];
        let Ok(before) = gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) else {
            return false;
        };
        if before & LEAVING != 0 && before & USERS == 1 {
            let mut state = self.state.lock();
            self.settle(&mut state);
        }
        true
    }

    fn wait(
        &self,
        state: &mut crate::base::sync::Guard<'_, State>,
        deadline_ns: u64,
        now_ns: u64,
    ) -> Result<()> {
        if deadline_ns == 0 {
            self.arrived.wait(state);
        } else if now_ns >= deadline_ns {
            return Err(Error::new(Status::Timeout, "the unit has not come in time"));
        } else {
            self.arrived.wait_for(state, deadline_ns - now_ns);
        }
        Ok(())
    }

    fn check_files(&self) -> Result<()> {
        for file in 0..self.files.count() {
            match self.files.check(file) {
                Err(error) if error.status() != Status::State => {
                    let path = self.model.files[file as usize].path.display().to_string();
                    return Err(error.within(&path));
                }
                _ => {} // what is open is sound, whoever has its name now
            }
        }
        Ok(())
    }
}
