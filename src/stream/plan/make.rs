//! From memory, links and wishes to a plan.

use crate::base::status::Result;
use crate::fail;
use crate::stream::plan::check::{check, chunk_bytes};
use crate::stream::plan::experts::Experts;
use crate::stream::plan::fast::{self, Fast, Ways};
use crate::stream::plan::place::{self, Item};
use crate::stream::plan::room::{Room, filled};
use crate::stream::plan::sizing::{self, Budgets};
use crate::stream::plan::steps::Pass;
use crate::stream::plan::{Home, Inputs, Links, Mode, Plan, Seat, Wishes, predict, slow, taken_by};
use crate::stream::units::Role;

/// Slots where nobody says: one is computed while the next is filled.
const SLOTS: u32 = 2;

/// Links that placements are compared over where it is not the rates that matter.
const GUESS: Links = Links { disk: 4_000_000_000, device: 12_000_000_000, processor: 0 };

/// What a plan is made from, sorted by what can be decided about it.
pub(super) struct Maker<'a> {
    pub inputs: &'a Inputs<'a>,
    pub seat: Seat,
    pub budgets: Budgets,
    pub experts: Experts,
    pub chunk_bytes: u64,
    /// Units that are used in host memory though the engine computes on a device.
    pub in_place: Vec<bool>,
    /// Embeddings that only rows are looked up in, with room in host memory.
    pub looked_up: Vec<bool>,
    /// Host memory that in-place and looked-up units take.
    pub fixed_bytes: u64,
    /// Units that stay or pass through slots.
    pub items: Vec<Item>,
    /// Experts that share slots.
    pub expert_items: Vec<Item>,
    /// Staging that suits most.
    pub staging_bytes: u64,
    /// The plan there is already: who is in host memory there stays if they can.
    pub before: Option<&'a Plan>,
}

impl Plan {
    /// Makes the plan.
    pub fn make(inputs: &Inputs) -> Result<Plan> {
        let maker = Maker::new(inputs)?;
        let mut plan = maker.best()?;
        maker.explain(&mut plan);
        Ok(plan)
    }
}

/// Where the engine computes: where it says, else on the device if there is one.
pub(super) fn seat(inputs: &Inputs) -> Seat {
    let has_device = inputs.memory.device_free_bytes > 0;
    inputs.wishes.seat.unwrap_or(if has_device { Seat::Device } else { Seat::Host })
}

impl Wishes {
    pub(super) fn least_slots(&self) -> u32 {
        if self.slots == 0 { SLOTS } else { self.slots }
    }

    /// Slots are there for memory to be given back.
    pub(super) fn is_lean(&self) -> bool {
        self.shrinks && self.mode == Mode::Tiered
    }
}

/// Plans whose passes differ by less than one part of so many are as good.
pub(super) const NEAR: u64 = 256;

/// How good a plan is: less is better.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    /// What a pass takes, or the bytes that move where links are not known.
    pub pass: u64,
    /// What a pass would take if computing nearly hid transfers: how well they are spread.
    spread_ns: u64,
    /// Bytes that move.
    bytes: u64,
}

/// The best of plans: of those with nearly the shortest pass the one whose transfers are
/// spread best, as nobody knows for certain what computing takes.
fn choose(all: &[(Key, Plan)]) -> Option<usize> {
    let least = all.iter().map(|(key, _)| key.pass).min()?;
    let near = |key: &Key| key.pass <= least.saturating_add(least / NEAR);
    let order = |i: &usize| {
        let key = &all[*i].0;
        (key.spread_ns, key.pass, key.bytes)
    };
    (0..all.len()).filter(|i| near(&all[*i].0)).min_by_key(order)
}

impl<'a> Maker<'a> {
    pub fn new(inputs: &'a Inputs<'a>) -> Result<Maker<'a>> {
        let seat = seat(inputs);
        check(inputs, seat)?;
        let budgets = sizing::budgets(inputs, seat)?;
        let in_place = in_place(inputs)?;
        let len = inputs.units.units.len();
        let mut maker = Maker {
            inputs,
            seat,
            budgets,
            experts: Experts::of(inputs, seat, &in_place),
            chunk_bytes: chunk_bytes(inputs),
            in_place,
            looked_up: filled(false, len)?,
            fixed_bytes: 0,
            items: Vec::with_room(len)?,
            expert_items: Vec::new(),
            staging_bytes: 0,
            before: None,
        };
        let (said, least) = (maker.least_expert_slots(), maker.experts.least_slots());
        if said < least {
            fail!(Budget, "{said} slots for experts, a layer needs at least {least}");
        }
        maker.fix_processor()?;
        maker.fix_embedding()?;
        maker.sort()?;
        Ok(maker)
    }

    /// Units that the processor computes have to be in host memory.
    fn fix_processor(&mut self) -> Result<()> {
        let units = self.inputs.units.units.iter().zip(&self.in_place);
        self.fixed_bytes = units.filter(|(_, there)| **there).map(|(u, _)| u.image_bytes).sum();
        let (has, needs) = (self.budgets.host_bytes, self.fixed_bytes);
        if needs > has {
            fail!(
                Budget,
                "the processor's layers need {needs} bytes of host memory, it has {has}: ask for \
                 fewer processor_layers, raise the ceiling or lower the reserve"
            );
        }
        let room = has - needs;
        self.staging_bytes = slow::staging(self.inputs, self.seat, self.chunk_bytes, room)?;
        Ok(())
    }

    /// An embedding is not read whole in a pass, unless it is the head too: host memory is
    /// all it needs, and it goes there before layers do.
    fn fix_embedding(&mut self) -> Result<()> {
        let units = &self.inputs.units.units;
        if self.inputs.wishes.mode == Mode::Ring && self.seat == Seat::Host
            || !units.iter().any(|unit| unit.role == Role::Head)
        {
            return Ok(());
        }
        for (i, unit) in units.iter().enumerate() {
            let taken = self.fixed_bytes + self.staging_bytes;
            let room = self.budgets.host_bytes.saturating_sub(taken);
            if unit.role != Role::Embedding || unit.image_bytes > room {
                continue;
            }
            self.looked_up[i] = true;
            self.fixed_bytes += unit.image_bytes;
            // Where all share one memory, the slots come first.
            if self.seat == Seat::Host {
                self.sort()?;
                if let Ways::TooSmall { .. } = self.ways()? {
                    self.looked_up[i] = false;
                    self.fixed_bytes -= unit.image_bytes;
                }
            }
        }
        Ok(())
    }

    fn sort(&mut self) -> Result<()> {
        self.items.clear();
        self.expert_items.clear();
        let units = &self.inputs.units.units;
        if self.expert_items.try_reserve(self.experts.count as usize).is_err() {
            fail!(NoMem, "no memory for {} experts", self.experts.count);
        }
        for (unit, one) in units.iter().enumerate() {
            let item = Item { unit, bytes: self.taken_by(one.image_bytes, self.seat.home()) };
            match one.role {
                _ if self.in_place[unit] || self.looked_up[unit] => {}
                Role::Expert => self.expert_items.push(item),
                _ => self.items.push(item),
            }
        }
        Ok(())
    }

    /// What a unit takes where its home is.
    pub fn taken_by(&self, image_bytes: u64, home: Home) -> u64 {
        taken_by(image_bytes, home, self.inputs.wishes.device_grain_bytes)
    }

    /// Bytes for weights where the engine computes.
    pub fn fast_bytes(&self) -> u64 {
        match self.seat {
            Seat::Device => self.budgets.device_bytes,
            Seat::Host => self.budgets.host_bytes.saturating_sub(self.fixed_bytes),
        }
    }

    /// All experts stay: there is room for them and all else. Where memory is to be given
    /// back, only if slots for them would be no less.
    fn experts_stay(&self) -> bool {
        let wishes = self.inputs.wishes;
        if wishes.is_lean() {
            let slots = self.experts.least_slots().saturating_mul(self.experts.slot_bytes);
            return wishes.expert_slots.is_none() && self.experts.bytes <= slots;
        }
        let all = place::sum(&self.items) + self.experts.bytes;
        wishes.mode == Mode::Tiered && wishes.expert_slots.is_none() && all <= self.fast_bytes()
    }

    /// Slots that experts have before anything else is placed.
    pub fn least_expert_slots(&self) -> u64 {
        let least = self.experts.least_slots();
        self.inputs
            .wishes
            .expert_slots
            .map_or(least, |said| u64::from(said).min(self.experts.count))
    }

    /// What experts take before anything else is placed.
    fn expert_bytes(&self) -> u64 {
        match self.experts_stay() {
            true => self.experts.bytes,
            false => self.least_expert_slots().saturating_mul(self.experts.slot_bytes),
        }
    }

    /// Bytes for all else; none where experts alone need more than there is.
    pub fn dense_room(&self) -> Option<u64> {
        self.fast_bytes().checked_sub(self.expert_bytes())
    }

    /// The ways to use the memory where the engine computes.
    fn ways(&self) -> Result<Ways> {
        let wishes = self.inputs.wishes;
        let expert_bytes = self.expert_bytes();
        let room = self.dense_room();
        let (slots, only) = (wishes.least_slots(), self.lean_slot()?);
        let (room_bytes, how) = (room.unwrap_or(0), wishes.placement);
        let ways = fast::ways(&self.items, room_bytes, slots, wishes.mode, how, only)?;
        Ok(match ways {
            Ways::These(these) if room.is_some() => Ways::These(these),
            Ways::These(_) => Ways::TooSmall { needs_bytes: expert_bytes },
            Ways::TooSmall { needs_bytes } => {
                Ways::TooSmall { needs_bytes: needs_bytes.saturating_add(expert_bytes) }
            }
        })
    }

    /// The best of all ways.
    pub fn best(&self) -> Result<Plan> {
        let ways = match self.ways()? {
            Ways::These(ways) => ways,
            Ways::TooSmall { needs_bytes } => return self.too_small(needs_bytes),
        };
        let mut all: Vec<(Key, Plan)> = Vec::with_room(ways.len())?;
        for fast in &ways {
            all.push(self.finish(fast, self.staging_bytes)?);
        }
        let Some(first) = choose(&all) else {
            fail!(Invalid, "there is no way to place the units")
        };
        // Where nobody knows the links, nobody knows what staging is worth.
        let open = self.inputs.wishes.staging_bytes == 0 && self.seat == Seat::Device;
        if open && all[first].1.forecast.is_some() {
            let room = self.budgets.host_bytes - self.fixed_bytes;
            let (slot, usual) = (ways[first].slot_bytes, self.staging_bytes);
            // Only what is clearly better: the usual one smooths a disk that stutters.
            let mut least = all[first].0.pass - all[first].0.pass / NEAR;
            for staging in slow::others(slot, self.chunk_bytes, usual, room) {
                let other = self.finish(&ways[first], staging)?;
                if other.0.pass < least {
                    least = other.0.pass;
                    all[first] = other;
                }
            }
        }
        Ok(all.swap_remove(first).1)
    }

    fn too_small<T>(&self, needs: u64) -> Result<T> {
        let place = if self.seat == Seat::Device { "the device" } else { "host memory" };
        let (has, free) = (self.fast_bytes(), self.budgets.seat_free_bytes);
        let slots = self.inputs.wishes.least_slots();
        let more = needs.saturating_sub(has).saturating_add(self.budgets.seat_short_bytes);
        fail!(
            Budget,
            "{place} has {has} bytes for weights (of {free} free) and needs at least {needs} for \
             {slots} slots and what cannot pass through them: free {more} more, raise the ceiling, \
             lower the context (KV), workspace, safety or reserve, or ask for fewer slots"
        )
    }

    /// The plan of one way, and how good it is.
    pub fn finish(&self, fast: &Fast, staging_bytes: u64) -> Result<(Key, Plan)> {
        let mut homes = filled(Home::File, self.inputs.units.units.len())?;
        let here = self.seat.home();
        let mut used = u64::from(fast.slots) * fast.slot_bytes;
        for (item, stays) in self.items.iter().zip(&fast.stays) {
            if *stays {
                homes[item.unit] = here;
                used += item.bytes;
            }
        }
        for (unit, home) in homes.iter_mut().enumerate() {
            if self.in_place[unit] || self.looked_up[unit] {
                *home = Home::Host;
            }
        }
        let (expert_slots, expert_bytes) = self.place_experts(used, &mut homes)?;
        used += expert_bytes;
        let mut host_bytes = self.fixed_bytes;
        match self.seat {
            Seat::Host => host_bytes += used,
            Seat::Device => {
                let room = self.budgets.host_bytes - self.fixed_bytes - staging_bytes;
                host_bytes += staging_bytes + self.host_homes(&mut homes, room)?;
            }
        }
        let on_device = self.seat == Seat::Device;
        let mut on_processor = filled(false, homes.len())?;
        for (i, there) in on_processor.iter_mut().enumerate() {
            *there = on_device && (self.in_place[i] || self.looked_up[i]);
        }
        let lockable = self.inputs.memory.lockable_bytes;
        let (expert_slots_least, expert_slots_step) = self.least_and_step(expert_slots);
        let mut plan = Plan {
            seat: self.seat,
            mode: self.inputs.wishes.mode,
            homes,
            on_processor,
            slots: fast.slots,
            slot_bytes: fast.slot_bytes,
            expert_slots,
            expert_slots_least,
            expert_slots_step,
            expert_slot_bytes: if expert_slots > 0 { self.experts.slot_bytes } else { 0 },
            staging_bytes,
            chunk_bytes: self.chunk_bytes,
            device_grain_bytes: self.inputs.wishes.device_grain_bytes,
            device_bytes: if on_device { used } else { 0 },
            host_bytes,
            pinned_bytes: if on_device { host_bytes.min(lockable) } else { 0 },
            figures: Vec::new(),
            forecast: None,
        };
        let key = self.judge(&mut plan)?;
        Ok((key, plan))
    }

    /// Slots for experts, or their homes, or both, where so much is taken by others. How many
    /// slots, and what all takes.
    fn place_experts(&self, used: u64, homes: &mut [Home]) -> Result<(u32, u64)> {
        let here = self.seat.home();
        if self.experts_stay() {
            self.expert_items.iter().for_each(|item| homes[item.unit] = here);
            return Ok((0, self.experts.bytes));
        }
        if self.experts.count == 0 {
            return Ok((0, 0));
        }
        let wishes = self.inputs.wishes;
        let room = self.fast_bytes() - used;
        let fit = room / self.experts.slot_bytes.max(1);
        let most = if wishes.is_lean() { self.experts.least_slots() } else { fit };
        let wished = wishes.expert_slots.map_or(most, u64::from);
        let slots = wished.min(fit).min(self.experts.count);
        let mut bytes = slots * self.experts.slot_bytes;
        if wishes.is_lean() {
            // Homes can be given back one by one: the rest is for them.
            bytes += self.settle(&self.expert_items, here, room - bytes, homes)?;
        }
        Ok((slots as u32, bytes))
    }

    /// How many slots for experts always stay, and how many come and go together: as in the plan
    /// before, which has their memory.
    fn least_and_step(&self, slots: u32) -> (u32, u32) {
        match self.before {
            Some(before) if before.expert_slots > 0 => {
                (before.expert_slots_least, before.expert_slots_step)
            }
            _ => self.experts.least_and_step(slots, self.inputs.wishes.device_grain_bytes),
        }
    }

    /// Forecasts it.
    fn judge(&self, plan: &mut Plan) -> Result<Key> {
        let mut pass = Pass::of(plan, self.inputs, &self.experts)?;
        plan.forecast = predict::forecast(&pass, &self.inputs.links)?;
        let (device, disk) = predict::moved(&pass);
        let bytes = device.saturating_add(disk);
        pass.compute_nearly_hides(&GUESS);
        let spread = predict::forecast(&pass, &GUESS)?;
        Ok(Key {
            pass: plan.forecast.map_or(bytes, |forecast| forecast.pass_ns),
            spread_ns: spread.map_or(0, |forecast| forecast.pass_ns),
            bytes,
        })
    }
}

/// The last layers that the processor computes, with their experts.
fn in_place(inputs: &Inputs) -> Result<Vec<bool>> {
    let units = &inputs.units.units;
    let mut there = filled(false, units.len())?;
    let mut left = inputs.wishes.processor_layers;
    for (i, unit) in units.iter().enumerate().rev() {
        // Experts follow their layer: going backwards they come first.
        match unit.role {
            Role::Layer if left > 0 => {
                left -= 1;
                there[i] = true;
            }
            Role::Expert if left > 0 => there[i] = true,
            _ => {}
        }
    }
    Ok(there)
}
