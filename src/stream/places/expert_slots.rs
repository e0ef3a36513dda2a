//! Memory of the expert slots. Slots are added and freed at the end.

use crate::base::budget::Tier;
use crate::base::status::{Result, Status};
use crate::stream::places::{Block, Places, Source, Spent, slots};
use crate::stream::plan::{Plan, Seat};
use crate::stream::units::NONE;

/// Slots of one size, in blocks of `step` slots that are freed as a whole. When units are in place,
/// slots have no addresses of their own, and there are no blocks.
#[derive(Default)]
pub(super) struct ExpertSlots {
    pub blocks: Vec<Block>,
    slot_bytes: u64,
    count: u32,
    /// Most slots, and slots of a block.
    most: u32,
    step: u32,
}

impl ExpertSlots {
    pub fn of(plan: &Plan) -> ExpertSlots {
        ExpertSlots {
            blocks: Vec::new(),
            slot_bytes: plan.expert_slot_bytes,
            count: 0,
            most: plan.expert_slots,
            step: plan.expert_slots_step.max(1),
        }
    }

    /// Slots of the next block; the last block may be smaller.
    fn next(&self) -> u32 {
        (self.most - self.count).min(self.step)
    }

    /// Bytes of the next block.
    pub fn next_bytes(&self) -> u64 {
        u64::from(self.next()) * self.slot_bytes
    }

    /// The block of a slot, and the offset of the slot in it.
    pub fn at(&self, slot: u32) -> (Option<&Block>, u64) {
        let step = self.step.max(1);
        (self.blocks.get((slot / step) as usize), u64::from(slot % step) * self.slot_bytes)
    }
}

impl Places {
    /// Expert slots with memory.
    pub fn expert_slots(&self) -> u32 {
        self.experts.count
    }

    /// Allocates one more block.
    pub fn add_expert_slots(&mut self, seat: Seat, source: &Source) -> Result<bool> {
        let (more, bytes) = (self.experts.next(), self.experts.next_bytes());
        if let Some(in_place) = &mut self.in_place {
            if let Some(account) = &in_place.account {
                account.take(Tier::Host, bytes)?;
            }
            in_place.slots_bytes += bytes;
        } else if let Some(in_window) = &mut self.in_window {
            (0..more).try_for_each(|_| in_window.add_expert_slot())?;
        } else {
            self.experts.blocks.try_reserve(1).map_err(|_| Status::NoMem)?;
            let block = match self.made.take_if(|made| made.0 == NONE) {
                Some((_, made)) => Block::Device(made?),
                None => slots(seat, bytes, source)?,
            };
            self.experts.blocks.push(block);
        }
        self.experts.count += more;
        Ok(true)
    }

    /// Allocates one more block of an open streamer. Returns false while the copier thread, which
    /// holds no lock, still asks the device for the memory.
    pub fn add_expert_slots_later(&mut self, seat: Seat, source: &Source) -> Result<bool> {
        let is_ready = seat == Seat::Host || self.has_memory_for(NONE);
        if is_ready { self.add_expert_slots(seat, source) } else { Ok(false) }
    }

    /// Frees slots from the end, except the first `count` and slots that share a block with one of
    /// these. `dirty` names the unit whose memory a slot last filled, when units are in place.
    ///
    /// # Safety
    /// The freed slots are unused, and no read or copy to or from them is in flight.
    pub unsafe fn drop_expert_slots(
        &mut self,
        count: u32,
        mut dirty: impl FnMut(u32) -> Option<u32>,
    ) -> Result<()> {
        let mut cleared = Ok(());
        while self.experts.count > count {
            let last = (self.experts.count - 1) % self.experts.step + 1;
            if self.experts.count - last < count {
                break;
            }
            let bytes = u64::from(last) * self.experts.slot_bytes;
            self.experts.count -= last;
            let first = self.experts.count;
            if self.in_place.is_some() {
                for unit in (first..first + last).filter_map(&mut dirty) {
                    // SAFETY: the caller's promise.
                    cleared = cleared.and(unsafe { self.clear(unit) });
                }
                if let Some(in_place) = &mut self.in_place {
                    in_place.slots_bytes -= bytes;
                    if let Some(account) = &in_place.account {
                        account.give_back(Tier::Host, bytes);
                    }
                }
            } else if let Some(in_window) = &mut self.in_window {
                (0..last).for_each(|_| in_window.drop_expert_slot());
            } else if let Some(Block::Device(on)) = self.experts.blocks.pop() {
                self.spent.push(Spent { unit: NONE, on });
            }
        }
        cleared
    }
}
