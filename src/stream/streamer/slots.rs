//! Slots for experts, which become fewer when memory is needed elsewhere, and more again.

use crate::stream::plan::Seat;
use crate::stream::streamer::{Shared, State};

impl State {
    /// Whether there are not yet as many slots for experts as the plan says.
    pub(super) fn slots_change(&self) -> bool {
        let wanted = self.plan.expert_slots;
        self.places.expert_slots() != wanted || self.core.expert_slots() != wanted
    }
}

impl Shared {
    /// Gives the memory of slots back that the plan has no more, as soon as nobody uses them.
    /// Whether some are left.
    pub(super) fn give_slots_back(&self, state: &mut State) -> bool {
        if !state.slots_change() {
            return false;
        }
        let wanted = state.plan.expert_slots;
        let told = (|| {
            let open = wanted.min(state.places.expert_slots());
            if open != state.core.expert_slots() {
                state.core.set_expert_slots(open, self.now_ns())?;
            }
            let in_use = state.core.empty_expert_slots()?.max(wanted);
            let (core, places) = (&mut state.core, &mut state.places);
            // SAFETY: the core says that nobody needs slots from there on, and what the device
            // does with them has ended.
            unsafe { places.drop_expert_slots(in_use, |slot| core.take_dirty(slot)) }
        })();
        if let Err(error) = told {
            state.note = Some(format!("slots for experts stay: {error}"));
        }
        state.places.expert_slots() > wanted
    }

    /// Takes memory for slots that the plan has again. Where there is none, the plan is for those
    /// that there are.
    pub(super) fn take_slots_again(&self, state: &mut State) {
        let seat = state.plan.seat;
        while state.places.expert_slots() < state.plan.expert_slots {
            if state.places.is_leaving() || state.check().is_err() {
                return;
            }
            match state.places.add_expert_slots_later(seat, &self.source()) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    state.note = Some(format!("slots for experts do not come again: {error}"));
                    forget_slots(state);
                }
            }
        }
        let count = state.plan.expert_slots;
        if state.core.expert_slots() != count
            && let Err(error) = state.core.set_expert_slots(count, self.now_ns())
        {
            state.note = Some(format!("slots for experts are not used again: {error}"));
        }
    }
}

/// The plan has no more slots than there are.
fn forget_slots(state: &mut State) {
    let plan = &mut state.plan;
    let less = plan.expert_slots.saturating_sub(state.places.expert_slots());
    let bytes = u64::from(less) * plan.expert_slot_bytes;
    plan.expert_slots -= less;
    match plan.seat {
        Seat::Device => plan.device_bytes -= bytes,
        Seat::Host => plan.host_bytes -= bytes,
    }
}
