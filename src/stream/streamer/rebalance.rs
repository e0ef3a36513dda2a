//! Rebalancing: the residency of units changes while the streamer runs, because memory is needed
//! elsewhere or is free again.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::base::sync::atomic::Ordering;
use crate::device::Memory as Where;
use crate::fail;
use crate::stream::plan::{ComputeLocation, Inputs, Plan, PlanOptions, Residency};
use crate::stream::scheduler::Target;
use crate::stream::streamer::{MOVING, ON_DEVICE, OPEN, Shared, State, Streamer, USERS};
use crate::stream::units::NONE;

impl Streamer {
    /// Plans again for other memory. `host_bytes` and `device_bytes` are the limits for weights
    /// from now on, none = unchanged; `context` is the number of tokens that KV is kept for.
    /// Returns at once: leased units are moved when they are released, the others are loaded while
    /// passes go on. Slots stay, except expert slots: their number may fall, and rise again up to
    /// the number at opening.
    pub fn rebalance(
        &self,
        host_bytes: Option<u64>,
        device_bytes: Option<u64>,
        context: Option<u32>,
    ) -> Result<Plan> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        state.check()?;
        let mut plan_options = state.plan_options.clone();
        plan_options.host_ceiling_bytes = host_bytes.or(plan_options.host_ceiling_bytes);
        plan_options.device_ceiling_bytes = device_bytes.or(plan_options.device_ceiling_bytes);
        plan_options.context = context.unwrap_or(plan_options.context);
        shared.apply_options(&mut state, plan_options)?;
        Ok(state.plan.clone())
    }
}

impl Shared {
    pub(super) fn inputs<'a>(&'a self, plan_options: &'a PlanOptions) -> Inputs<'a> {
        Inputs {
            units: &self.units,
            facts: &self.model.facts,
            memory: self.memory,
            links: self.links,
            plan_options,
        }
    }

    fn apply_options(&self, state: &mut State, plan_options: PlanOptions) -> Result<()> {
        let before = &state.plan;
        // Slots stay allocated; expert slots may become fewer than at opening.
        let mut allocated_options = plan_options.clone();
        let most = state.scheduler.max_expert_slots();
        if most > 0 {
            allocated_options.expert_slots = Some(most);
        }
        let plan = before.rebalance(&self.inputs(&allocated_options))?;
        let slots =
            |plan: &Plan| (plan.slots, plan.slot_bytes, plan.expert_slot_bytes, plan.staging_bytes);
        let least = before.expert_slots_least.min(before.expert_slots);
        let is_between = (least..=most).contains(&plan.expert_slots);
        if slots(&plan) != slots(before) || !is_between {
            if before.slots + before.expert_slots == 0 {
                fail!(
                    Budget,
                    "resident units would need slots to leave memory, and the streamer was opened \
                     without slots, since everything fitted: open it with `shrinks`, or with a \
                     budget"
                );
            }
            fail!(
                Budget,
                "{} slots of {} bytes, {least} expert slots of {} bytes and {} bytes of staging \
                 do not fit: give weights more memory",
                before.slots,
                before.slot_bytes,
                before.expert_slot_bytes,
                before.staging_bytes
            );
        }
        if state.weight_memory.device_window().is_some() && plan.on_processor != before.on_processor
        {
            fail!(
                Unsupported,
                "units in place cannot move between processor and device, and this memory would \
                 require that: give the streamer other limits, or open it again"
            );
        }
        self.check_large(state, &plan)?;
        (state.plan, state.plan_options) = (plan, plan_options);
        self.plan_moves(state);
        self.settle(state);
        Ok(())
    }

    /// Units that fit in no slot must be resident: they are not moved to a tier whose budget has
    /// no room for them, whatever the plan says.
    fn check_large(&self, state: &State, plan: &Plan) -> Result<()> {
        let Some(account) = &self.account else { return Ok(()) };
        for (tier, place) in [(Tier::Host, Residency::Host), (Tier::Device, Residency::Device)] {
            let (mut arriving, mut leaving) = (0u64, 0u64);
            for (unit, &residency) in (0..).zip(&plan.residencies) {
                let bytes =
                    plan.footprint_bytes(self.units.units[unit as usize].image_bytes, place);
                let now = state.scheduler.residency_of(unit);
                match now.map(|(now, _)| (now == place, residency == place)) {
                    Some((false, true)) if !state.scheduler.fits(unit) => arriving += bytes,
                    Some((true, false)) => leaving += bytes,
                    _ => {}
                }
            }
            let tier_budget = account.budget().usage(tier);
            let free_bytes = tier_budget
                .limit_bytes
                .saturating_sub(tier_budget.reserved_bytes + tier_budget.committed_bytes);
            if arriving > free_bytes.saturating_add(leaving) {
                fail!(
                    Budget,
                    "units of {arriving} bytes that fit in no slot would have to move, and the budget \
                     has {free_bytes} bytes free there: nothing was changed"
                );
            }
        }
        Ok(())
    }

    /// Determines the moves from the current residency: earlier moves may not be complete.
    fn plan_moves(&self, state: &mut State) {
        let (mut leaving, mut arriving) = (Vec::new(), Vec::new());
        for (unit, &residency) in (0..).zip(&state.plan.residencies) {
            let Some((current, is_resident)) = state.scheduler.residency_of(unit) else { continue };
            let gate = &self.gates[unit as usize];
            let was_leaving = gate.load(Ordering::Acquire) & MOVING != 0;
            if current == residency && (is_resident || !was_leaving) {
                gate.fetch_and(!MOVING, Ordering::AcqRel);
                if was_leaving && state.scheduler.is_usable_resident(unit) {
                    self.open_gate(unit);
                }
                continue;
            }
            gate.fetch_or(MOVING, Ordering::AcqRel);
            gate.fetch_and(!OPEN, Ordering::AcqRel);
            if residency == Residency::File {
                leaving.push((unit, residency))
            } else {
                arriving.push((unit, residency))
            }
        }
        // Units that give memory up come first, since the others need that memory.
        leaving.append(&mut arriving);
        state.moves = leaving;
    }

    /// Makes the moves that are possible now.
    pub(super) fn move_units(&self, state: &mut State) {
        let State { moves, weight_memory, plan, .. } = state;
        let needs_slots = plan.expert_slots > weight_memory.expert_slots();
        weight_memory.cancel_requests(|unit| match unit {
            NONE => needs_slots,
            unit => moves.contains(&(unit, Residency::Device)),
        });
        let mut blocked = self.free_extra_slots(state);
        let mut moves = std::mem::take(&mut state.moves);
        moves.retain(|&(unit, residency)| {
            let moved = match self.move_unit(state, unit, residency, blocked) {
                Ok(moved) => moved,
                Err(error) => {
                    state.note = Some(format!("unit {unit} could not be moved: {error}"));
                    true
                }
            };
            blocked |= !moved && residency == Residency::File;
            !moved
        });
        state.moves.extend(moves);
        if state.moves.is_empty() {
            self.add_missing_slots(state);
        }
    }

    /// Moves a unit. False: not yet possible. `blocked`: memory that the move needs was not freed
    /// yet.
    fn move_unit(
        &self,
        state: &mut State,
        unit: u32,
        residency: Residency,
        blocked: bool,
    ) -> Result<bool> {
        let gate = &self.gates[unit as usize];
        let blocked = blocked || state.weight_memory.is_freeing();
        if (blocked && residency != Residency::File) || gate.load(Ordering::Acquire) & USERS > 0 {
            return Ok(false);
        }
        if state.resident_uses[unit as usize] > 0 {
            return Ok(false); // the device still reads the unit
        }
        if residency == Residency::Device && !state.weight_memory.has_device_memory_for(unit) {
            return Ok(false); // the copier allocates the memory
        }
        let now_ns = self.now_ns();
        if state.weight_memory.range().is_some() && !state.scheduler.evict_from_slot(unit)? {
            // The unit's own memory is in use as a slot.
            return Ok(false);
        }
        let (was, _) = state.scheduler.residency_of(unit).unwrap_or((Residency::File, false));
        let was_on_processor = state.scheduler.is_on_processor(unit);
        if was != Residency::File
            && !state.scheduler.set_residency(unit, Residency::File, now_ns)?
        {
            return Ok(false);
        }
        // SAFETY: nothing uses the memory: the gate is closed and has no users, the scheduler has
        // no transfer of the unit in flight, and in place the unit is in no slot.
        if let Err(error) = unsafe { state.weight_memory.free_resident(unit) } {
            state.note = Some(error.to_string());
        }
        gate.fetch_and(!MOVING, Ordering::AcqRel);
        if residency == Residency::Device && state.weight_memory.device_window().is_some() {
            // Since its residency was dropped, the unit may be on its way to a slot, whose memory
            // would be mapped at the addresses of its resident copy.
            if !state.scheduler.evict_from_slot(unit)? {
                return Ok(false);
            }
        }
        if residency != Residency::File {
            let made = state.weight_memory.allocate_resident(
                unit,
                residency,
                state.plan.compute,
                &self.source(),
            );
            if let Err(error) = made {
                self.drop_residency(&mut state.plan, unit);
                self.restore_residency(state, unit, (was, was_on_processor))?;
                return Err(error);
            }
            self.begin_residency(state, unit, residency)?;
        }
        Ok(true)
    }

    /// Memory for a unit is allocated: the unit is loaded there.
    fn begin_residency(&self, state: &mut State, unit: u32, residency: Residency) -> Result<()> {
        self.publish_address(state, unit)?;
        state.scheduler.set_processor(unit, state.plan.on_processor[unit as usize]);
        state.scheduler.set_residency(unit, residency, self.now_ns()).map(|_| ())
    }

    /// Called if no memory is available at the destination of a unit. The unit returns to its
    /// former memory, which was just freed, if the limits allow it. A unit larger than slots has no
    /// other place.
    fn restore_residency(
        &self,
        state: &mut State,
        unit: u32,
        (was, on_processor): (Residency, bool),
    ) -> Result<()> {
        let bytes = state.plan.footprint_bytes(self.units.units[unit as usize].image_bytes, was);
        let (plan, plan_options) = (&state.plan, &state.plan_options);
        let (used, ceiling) = match was {
            Residency::Device => (plan.device_bytes, plan_options.device_ceiling_bytes),
            _ => (plan.host_bytes, plan_options.host_ceiling_bytes),
        };
        if was == Residency::File
            || ceiling.is_some_and(|ceiling| used.saturating_add(bytes) > ceiling)
            || state
                .weight_memory
                .allocate_resident(unit, was, state.plan.compute, &self.source())
                .is_err()
        {
            return Ok(());
        }
        let at = unit as usize;
        (state.plan.residencies[at], state.plan.on_processor[at]) = (was, on_processor);
        match was {
            Residency::Device => state.plan.device_bytes += bytes,
            _ => state.plan.host_bytes += bytes,
        }
        self.begin_residency(state, unit, was)
    }

    /// A unit did not get its planned memory: only the file has it.
    fn drop_residency(&self, plan: &mut Plan, unit: u32) {
        let was = std::mem::replace(&mut plan.residencies[unit as usize], Residency::File);
        let bytes = plan.footprint_bytes(self.units.units[unit as usize].image_bytes, was);
        match was {
            Residency::Device => plan.device_bytes -= bytes,
            Residency::Host => plan.host_bytes -= bytes,
            Residency::File => {}
        }
    }

    /// Stores the address of a resident unit for acquires without the lock.
    pub(super) fn publish_address(&self, state: &State, unit: u32) -> Result<()> {
        let at = state.weight_memory.at(unit, Target::Resident)?;
        let mark = if at.memory == Where::Device { ON_DEVICE } else { 0 };
        self.resident_addresses[unit as usize].store(at.address | mark, Ordering::Release);
        Ok(())
    }

    /// Number of resident units that are leased.
    pub(super) fn used_residents(&self) -> u64 {
        let used =
            |gate: &crate::base::sync::atomic::AtomicU32| gate.load(Ordering::Acquire) & USERS > 0;
        self.gates.iter().filter(|gate| used(gate)).count() as u64
    }

    /// The budget reclaims bytes: resident units go back to the file. Returns the number of bytes
    /// that will be freed.
    pub(super) fn reclaim(self: &Arc<Shared>, tier: Tier, bytes: u64) -> u64 {
        self.release_ended_events();
        let mut state = self.state.lock();
        if state.check().is_err() {
            return 0;
        }
        let (plan, floor) = (&state.plan, state.plan.floor(&self.units));
        let mut plan_options = state.plan_options.clone();
        let (now, least, ceiling) = match tier {
            Tier::Host => (plan.host_bytes, floor.host_bytes, &mut plan_options.host_ceiling_bytes),
            Tier::Device if plan.compute == ComputeLocation::Device => {
                (plan.device_bytes, floor.device_bytes, &mut plan_options.device_ceiling_bytes)
            }
            _ => return 0,
        };
        // Bytes beyond the floor cannot be freed; the rest is freed all the same.
        *ceiling = Some(now.saturating_sub(bytes).max(least));
        match self.apply_options(&mut state, plan_options) {
            Ok(()) => {
                let after = match tier {
                    Tier::Host => state.plan.host_bytes,
                    _ => state.plan.device_bytes,
                };
                now.saturating_sub(after)
            }
            Err(error) => {
                drop(state); // the log target may call back
                log::debug!("no weights can be freed for {bytes} bytes: {error}");
                0
            }
        }
    }
}

// Expert slots: fewer when another owner needs memory, more when memory is free again.

impl State {
    /// Whether the number of expert slots differs from the plan.
    pub(super) fn slots_change(&self) -> bool {
        let target = self.plan.expert_slots;
        self.weight_memory.expert_slots() != target || self.scheduler.expert_slots() != target
    }
}

impl Shared {
    /// Frees slots beyond those of the plan, as soon as they are unused. Returns whether some are
    /// still in use.
    pub(super) fn free_extra_slots(&self, state: &mut State) -> bool {
        if !state.slots_change() {
            return false;
        }
        let target = state.plan.expert_slots;
        let freed = (|| {
            let open = target.min(state.weight_memory.expert_slots());
            if open != state.scheduler.expert_slots() {
                state.scheduler.set_expert_slots(open, self.now_ns())?;
            }
            let in_use = state.scheduler.empty_expert_slots()?.max(target);
            let (scheduler, weight_memory) = (&mut state.scheduler, &mut state.weight_memory);
            // SAFETY: from `in_use` on, the scheduler has emptied all slots, no load uses them,
            // and the device events of their users have completed.
            unsafe { weight_memory.drop_expert_slots(in_use, |slot| scheduler.take_dirty(slot)) }
        })();
        if let Err(error) = freed {
            state.note = Some(format!("expert slots were not freed: {error}"));
        }
        state.weight_memory.expert_slots() > target
    }

    /// Allocates slots up to the number of the plan. When memory is missing, the plan is reduced to
    /// the slots that exist.
    pub(super) fn add_missing_slots(&self, state: &mut State) {
        let compute = state.plan.compute;
        while state.weight_memory.expert_slots() < state.plan.expert_slots {
            if state.weight_memory.is_freeing() || state.check().is_err() {
                return;
            }
            match state.weight_memory.add_expert_slots_later(compute, &self.source()) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    state.note = Some(format!("no memory for more expert slots: {error}"));
                    limit_plan_to_slots(state);
                }
            }
        }
        let count = state.plan.expert_slots;
        if state.scheduler.expert_slots() != count
            && let Err(error) = state.scheduler.set_expert_slots(count, self.now_ns())
        {
            state.note = Some(format!("new expert slots are not used: {error}"));
        }
    }
}

/// Reduces the plan to the slots that exist.
fn limit_plan_to_slots(state: &mut State) {
    let plan = &mut state.plan;
    let less = plan.expert_slots.saturating_sub(state.weight_memory.expert_slots());
    let bytes = u64::from(less) * plan.expert_slot_bytes;
    plan.expert_slots -= less;
    match plan.compute {
        ComputeLocation::Device => plan.device_bytes -= bytes,
        ComputeLocation::Host => plan.host_bytes -= bytes,
    }
}
