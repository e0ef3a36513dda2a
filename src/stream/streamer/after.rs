//! Events that come with units that are given back: the device still reads them then, and nobody
//! waits for that but who needs the memory.

use crate::base::status::{Result, Status};
use crate::device::Event;
use crate::fail;
use crate::stream::core::Lease;
use crate::stream::streamer::{Shared, State};

/// Events that are asked for at once: they mostly end in order.
const ASKED: usize = 4;

/// An event after which memory of a unit may be used for another.
#[derive(Clone, Copy)]
pub struct After {
    pub event: Event,
    /// The unit, where it was used at home; in a slot the slot has the event.
    pub home_of: Option<u32>,
}

impl State {
    /// What somebody has to wait for so that homes become others: nobody may call when it comes.
    pub(super) fn awaited(&self) -> Option<Event> {
        let waits = self.is_moving();
        self.taken_over.front().filter(|_| waits).map(|after| after.event)
    }
}

impl Shared {
    /// Takes an event over that comes with a unit at home, before its user goes.
    pub(super) fn use_home_until(&self, unit: u32, event: Event) {
        let mut state = self.state.lock();
        state.home_uses[unit as usize] += 1;
        state.taken_over.push_back(After { event, home_of: Some(unit) });
    }

    /// The same of one in a slot.
    pub(super) fn use_slot_until(&self, state: &mut State, event: Event) {
        state.taken_over.push_back(After { event, home_of: None });
    }

    /// Releases events that have ended. Nothing is asked of the device under a lock; two who do
    /// this at once find the same.
    pub(super) fn let_ended_go(&self) {
        let Some(device) = &self.device else { return };
        loop {
            let oldest: Vec<After> = {
                let state = self.state.lock();
                state.taken_over.iter().take(ASKED).copied().collect()
            };
            // What another has released is unknown to the device, and gone as well.
            let is_gone = |after: &After| {
                let said = device.release(after.event);
                !said.is_err_and(|error| error.status() == Status::Busy)
            };
            let asked = oldest.len();
            let gone: Vec<After> = oldest.into_iter().filter(is_gone).collect();
            if gone.is_empty() {
                return;
            }
            self.let_go(&gone);
            if gone.len() < asked {
                return;
            }
        }
    }

    fn let_go(&self, gone: &[After]) {
        let mut state = self.state.lock();
        let mut is_free = false;
        for after in gone {
            let at = state.taken_over.iter().position(|other| other.event == after.event);
            let Some(at) = at else { continue };
            state.taken_over.remove(at);
            match after.home_of {
                Some(unit) => {
                    let uses = &mut state.home_uses[unit as usize];
                    *uses -= 1;
                    is_free |= *uses == 0;
                }
                None => {
                    state.core.forget_event(after.event);
                    is_free |= state.slots_change();
                }
            }
        }
        if is_free && state.is_moving() {
            self.settle(&mut state);
        }
    }

    /// Waits until the device reads no unit any more that was given back.
    pub(super) fn wait_for_uses(&self, deadline_ns: u64) -> Result<()> {
        let Some(device) = &self.device else { return Ok(()) };
        loop {
            let Some(after) = self.state.lock().taken_over.front().copied() else { return Ok(()) };
            if let Err(error) = device.wait(after.event, deadline_ns) {
                if error.status() == Status::Timeout {
                    fail!(Busy, "the device still reads units that were given back");
                }
                // Whoever failed has read what it was to read.
                log::debug!("an event that came with a unit: {error}");
            }
            self.let_ended_go();
        }
    }

    /// Waits for an earlier user of a slot, who computes at once with another.
    pub(super) fn wait_for_earlier(&self, lease: &Lease, after: Event) {
        let mut state = self.state.lock();
        while let Some(earlier) = state.core.after_of(lease).filter(|&event| event != after) {
            drop(state);
            let waited = self.device.as_ref().map_or(Ok(()), |device| device.wait(earlier, 0));
            if let Err(error) = waited {
                log::debug!("an event that a slot waited for: {error}");
            }
            state = self.state.lock();
            state.core.passed(lease, earlier);
        }
    }
}
