//! The plan for other budgets, which moves no more than it must.

use crate::base::status::Result;
use crate::stream::plan::fast::Fast;
use crate::stream::plan::make::Maker;
use crate::stream::plan::place::{self, Item, Spread};
use crate::stream::plan::room::Room;
use crate::stream::plan::{Inputs, Mode, Plan};

impl Plan {
    /// The plan for what memory there is now: who stays where this plan has them is chosen
    /// first, and slots are as they are. Where that is impossible it is a new plan.
    pub fn rebalance(&self, inputs_now: &Inputs) -> Result<Plan> {
        self.fits(inputs_now)?;
        let mut maker = Maker::new(inputs_now)?;
        maker.before = Some(self);
        let mut plan = match maker.kept(self)? {
            None => maker.best()?,
            Some(fast) => {
                let room = maker.budgets.host_bytes.saturating_sub(maker.fixed_bytes);
                let same = self.chunk_bytes == maker.chunk_bytes && self.staging_bytes <= room;
                let staging = if same { self.staging_bytes } else { maker.staging_bytes };
                maker.finish(&fast, staging)?.1
            }
        };
        maker.explain(&mut plan);
        Ok(plan)
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
