//! The plan for other budgets, which moves no more than it must.

use crate::base::status::{Result, Status};
use crate::stream::plan::fast::Fast;
use crate::stream::plan::make::{Key, Maker, NEAR};
use crate::stream::plan::place::{self, Item, Spread};
use crate::stream::plan::room::Room;
use crate::stream::plan::{Inputs, Mode, Plan, Wishes};

/// Numbers of expert slots that are tried, beside the least one.
const TRIED: u32 = 8;

impl Plan {
    /// The plan for what memory there is now: who stays where this plan has them is chosen
    /// first, and slots are as they are, but for those of experts. Of these there are as many as
    /// make a pass shortest, up to [`Wishes::expert_slots`]. Where that is impossible it is a new
    /// plan.
    pub fn rebalance(&self, inputs_now: &Inputs) -> Result<Plan> {
        self.fits(inputs_now)?;
        let mut best: Option<(Key, Plan)> = None;
        for slots in self.slot_counts(inputs_now.wishes) {
            let wishes = Wishes { expert_slots: slots, ..inputs_now.wishes.clone() };
            let inputs = Inputs { wishes: &wishes, ..*inputs_now };
            let Some(one) = self.with_slots_kept(&inputs)? else { continue };
            // The largest is the first: slots adapt to the experts in use, so a smaller number
            // must be clearly better.
            let is_better = |(key, _): &(Key, Plan)| one.0.pass < key.pass - key.pass / NEAR;
            if best.as_ref().is_none_or(is_better) {
                best = Some(one);
            }
        }
        if let Some((_, plan)) = best {
            return Ok(plan);
        }
        let mut maker = Maker::new(inputs_now)?;
        maker.before = Some(self);
        let mut plan = maker.best()?;
        maker.explain(&mut plan);
        Ok(plan)
    }

    /// Numbers of expert slots to try, the largest first; the wished one if it cannot change.
    fn slot_counts(&self, wishes: &Wishes) -> Vec<Option<u32>> {
        let (least, step) = (self.expert_slots_least, self.expert_slots_step.max(1));
        let may_change = |most: &u32| self.expert_slots > 0 && *most > least;
        let Some(most) = wishes.expert_slots.filter(may_change) else {
            return vec![wishes.expert_slots];
        };
        let part_of = |part: u32| {
            let more = u64::from(most - least) * u64::from(part) / u64::from(TRIED);
            (least + more as u32).next_multiple_of(step).min(most)
        };
        (0..=TRIED).rev().map(part_of).map(Some).collect()
    }

    /// The plan with the same slots; none where they have to change.
    fn with_slots_kept(&self, inputs: &Inputs) -> Result<Option<(Key, Plan)>> {
        let mut maker = match Maker::new(inputs) {
            Err(error) if error.status() == Status::Budget => return Ok(None),
            maker => maker?,
        };
        maker.before = Some(self);
        let Some(fast) = maker.kept(self)? else { return Ok(None) };
        let room = maker.budgets.host_bytes.saturating_sub(maker.fixed_bytes);
        let same = self.chunk_bytes == maker.chunk_bytes && self.staging_bytes <= room;
        let staging = if same { self.staging_bytes } else { maker.staging_bytes };
        let (key, mut plan) = maker.finish(&fast, staging)?;
        maker.explain(&mut plan);
        Ok(Some((key, plan)))
    }
}

impl Maker<'_> {
    /// The same slots, and of the residents all that still fit; then who else fits. None
    /// where slots have to change.
    fn kept(&self, before: &Plan) -> Result<Option<Fast>> {
        if before.seat != self.seat || before.mode != Mode::Tiered {
            return Ok(None);
        }
        if self.inputs.wishes.mode != Mode::Tiered {
            return Ok(None);
        }
        if before.slots == 0 && self.lean_slot()? != Some(0) {
            return Ok(None);
        }
        let slots_bytes = u64::from(before.slots).saturating_mul(before.slot_bytes);
        let room = self.dense_room().and_then(|room| room.checked_sub(slots_bytes));
        let Some(mut left) = room else { return Ok(None) };
        let here = self.seat.home();
        let mut stays = place::none(&self.items)?;
        for (item, stays) in self.items.iter().zip(&mut stays) {
            if item.bytes > before.slot_bytes {
                let Some(less) = left.checked_sub(item.bytes) else { return Ok(None) };
                left = less;
                *stays = true;
            }
        }
        for was in [true, false] {
            let mut these: Vec<Item> = Vec::with_room(self.items.len())?;
            let open = self
                .items
                .iter()
                .enumerate()
                .filter(|(i, item)| !stays[*i] && (before.homes[item.unit] == here) == was);
            these.extend(open.map(|(i, item)| Item { unit: i, bytes: item.bytes }));
            let chosen = place::place(&these, left, self.inputs.wishes.placement, Spread::Full)?;
            for (item, _) in these.iter().zip(chosen).filter(|(_, chosen)| *chosen) {
                left -= item.bytes;
                stays[item.unit] = true;
            }
        }
        Ok(Some(Fast { stays, slots: before.slots, slot_bytes: before.slot_bytes }))
    }
}
