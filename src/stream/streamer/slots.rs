//! Changes the number of expert slots: fewer when another owner needs memory, more when memory is
//! free again.

use crate::stream::plan::Seat;
use crate::stream::streamer::{Shared, State};

impl State {
    /// Whether the number of expert slots differs from the plan.
    pub(super) fn slots_change(&self) -> bool {
        let wanted = self.plan.expert_slots;
        self.places.expert_slots() != wanted || self.core.expert_slots() != wanted
    }
}

impl Shared {
    /// Frees slots beyond those of the plan, as soon as they are unused. Returns whether some are
    /// still in use.
    pub(super) fn give_slots_back(&self, state: &mut State) -> bool {
        if !state.slots_change() {
            return false;
        }
        let wanted = state.plan.expert_slots;
        let freed = (|| {
            let open = wanted.min(state.places.expert_slots());
            if open != state.core.expert_slots() {
                state.core.set_expert_slots(open, self.now_ns())?;
            }
            let in_use = state.core.empty_expert_slots()?.max(wanted);
            let (core, places) = (&mut state.core, &mut state.places);
            // SAFETY: from `in_use` on the core has emptied all slots, no load uses them, and the
            // device events behind which they were used have passed.
            unsafe { places.drop_expert_slots(in_use, |slot| core.take_dirty(slot)) }
        })();
        if let Err(error) = freed {
            state.note = Some(format!("expert slots were not freed: {error}"));
        }
        state.places.expert_slots() > wanted
    }

    /// Allocates slots up to the number of the plan. When memory is missing, the plan is reduced to
    /// the slots that exist.
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
                    state.note = Some(format!("no memory for more expert slots: {error}"));
                    forget_slots(state);
                }
            }
        }
        let count = state.plan.expert_slots;
        if state.core.expert_slots() != count
            && let Err(error) = state.core.set_expert_slots(count, self.now_ns())
        {
            state.note = Some(format!("new expert slots are not used: {error}"));
        }
    }
}

/// Reduces the plan to the slots that exist.
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
