//! Memory that is put behind the addresses of units, where these are in place on a device: by the
//! thread that copies and under no lock, since drivers take their time for it.

use crate::base::status::{Result, Status};
use crate::base::sync::Guard;
use crate::device::{Device, Event, State as DeviceState};
use crate::stream::core::Backing;
use crate::stream::in_window::Leaving;
use crate::stream::places::{Spent, on_device};
use crate::stream::streamer::{Shared, State};

/// How long the copier sleeps at most while it waits for what the engine computes.
const NAP_NS: u64 = 1_000_000;

/// What the copier found to do.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Backed {
    /// Nothing.
    Nothing,
    /// Something, which it did: there may be more.
    Something,
    /// The device uses what is to be put elsewhere until this event.
    After(Event),
}

impl Shared {
    /// Gives back what has left, or puts memory behind the addresses of one unit: the first for
    /// which no event has to be waited for. Copies go on between one and the next.
    pub(super) fn back<'a>(
        &'a self,
        device: &dyn Device,
        mut state: Guard<'a, State>,
    ) -> Result<(Guard<'a, State>, Backed)> {
        let leaving = state.places.in_window().map(|in_window| in_window.take_leaving());
        if let Some(leaving) = leaving.filter(|leaving| !leaving.is_empty()) {
            return Ok((self.give_up(state, leaving), Backed::Something));
        }
        let spent = state.places.take_spent();
        if !spent.is_empty() {
            return Ok((self.free(state, spent), Backed::Something));
        }
        if let Some((unit, bytes)) = state.places.take_wanted() {
            drop(state);
            let made = on_device(bytes, &self.source());
            state = self.state.lock();
            state.places.made(unit, made);
            self.settle(&mut state);
            return Ok((state, Backed::Something));
        }
        let mut found = Backed::Nothing;
        for job in state.core.take_backings() {
            let said = if found == Backed::Something {
                Ok(false) // the next time
            } else {
                let said;
                (state, said) = self.back_one(device, state, &job);
                match said {
                    Ok(Some(event)) => found = Backed::After(event),
                    _ => found = Backed::Something,
                }
                said.map(|waits| waits.is_none())
            };
            let told = state.core.backed(&job, said, self.now_ns());
            self.settle_chunk(&mut state, !matches!(told, Ok(false)));
            told?;
        }
        Ok((state, found))
    }

    /// The same where homes have memory of their own.
    fn free<'a>(&'a self, state: Guard<'a, State>, spent: Vec<Spent>) -> Guard<'a, State> {
        drop(state);
        let count = spent.len();
        for one in spent {
            // SAFETY: homes are spent when nobody uses them, and nothing under way does.
            let freed = unsafe { one.free() };
            freed.unwrap_or_else(|error| log::warn!("{error}"));
        }
        let mut state = self.state.lock();
        state.places.freed(count);
        self.settle(&mut state);
        state
    }

    /// Memory of homes that nobody uses any more goes back to the device.
    fn give_up<'a>(&'a self, state: Guard<'a, State>, leaving: Vec<Leaving>) -> Guard<'a, State> {
        drop(state);
        let give_up = |one: Leaving| {
            // SAFETY: homes are let go when nobody uses them, and nothing under way does.
            let destroyed = unsafe { one.destroy() };
            let is_stuck = destroyed.is_err();
            destroyed.unwrap_or_else(|error| log::warn!("{error}"));
            (one, is_stuck)
        };
        let gone: Vec<_> = leaving.into_iter().map(give_up).collect();
        let mut state = self.state.lock();
        if let Some(in_window) = state.places.in_window() {
            gone.into_iter().for_each(|(one, is_stuck)| in_window.left(one, is_stuck));
        }
        self.settle(&mut state);
        state
    }

    /// Puts memory behind the addresses of a unit; or says after which event that can be done.
    fn back_one<'a>(
        &'a self,
        device: &dyn Device,
        mut state: Guard<'a, State>,
        job: &Backing,
    ) -> (Guard<'a, State>, Result<Option<Event>>) {
        let in_window = state.places.in_window().ok_or(Status::State.into());
        let (work, slots) = match in_window.and_then(|all| all.work(job.unit, job.to)) {
            Ok(planned) => planned,
            Err(error) => return (state, Err(error)),
        };
        let of_slots = slots.iter().filter_map(|&slot| state.core.slot_event(slot));
        let events: Vec<Event> = of_slots.chain(job.after).collect();
        drop(state);
        // An event that failed has come, too, and one that is unknown was released.
        let is_open = |event: &Event| device.state(*event) == Ok(DeviceState::Pending);
        let said = match events.into_iter().find(is_open) {
            Some(event) => Ok(Some(event)),
            // SAFETY: the last users of the memory and of the addresses have given them back, and
            // what they had the device do has ended; only this thread copies to either.
            None => unsafe { work.carry_out() }.map(|()| None),
        };
        let mut state = self.state.lock();
        match (&said, state.places.in_window()) {
            (Ok(None), Some(in_window)) => in_window.worked(job.unit, job.to),
            (Err(_), Some(in_window)) => in_window.failed(job.unit, job.to),
            _ => {}
        }
        (state, said)
    }

    /// What the copier does where nothing is to be copied.
    pub(super) fn rest<'a>(
        &'a self,
        device: &dyn Device,
        mut state: Guard<'a, State>,
        found: Backed,
    ) -> Guard<'a, State> {
        let event = match found {
            Backed::Something => return state,
            Backed::Nothing => state.awaited(),
            Backed::After(event) => Some(event),
        };
        let Some(event) = event else {
            self.copies.wait(&mut state);
            return state;
        };
        drop(state);
        // Not for longer: there may be something to copy meanwhile, or to end.
        let waited = device.wait(event, self.now_ns().saturating_add(NAP_NS));
        waited.unwrap_or_else(|error| log::trace!("an event of a user: {error}"));
        self.let_ended_go();
        self.state.lock()
    }
}
