//! Homes that become others while the streamer runs: memory is needed elsewhere, or is
//! there again.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::base::sync::atomic::Ordering;
use crate::device::Memory as Where;
use crate::fail;
use crate::stream::core::Goal;
use crate::stream::plan::{Home, Inputs, Plan, Seat, Wishes};
use crate::stream::streamer::{LEAVING, ON_DEVICE, OPEN, Shared, State, Streamer, USERS};
use crate::stream::units::NONE;

impl Streamer {
    /// Makes the homes those of a plan for other memory: `host_bytes` and `device_bytes`
    /// are what weights may have there from now on, none = as it is, `context` the tokens
    /// that KV is kept for. Returns at once: units in use move when they are given back,
    /// the others are brought while passes go on. Slots stay as they are, but for those of
    /// experts, which may become fewer, and again as many as it was opened with.
    pub fn rebalance(
        &self,
        host_bytes: Option<u64>,
        device_bytes: Option<u64>,
        context: Option<u32>,
    ) -> Result<Plan> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        state.check()?;
        let mut wishes = state.wishes.clone();
        wishes.host_ceiling_bytes = host_bytes.or(wishes.host_ceiling_bytes);
        wishes.device_ceiling_bytes = device_bytes.or(wishes.device_ceiling_bytes);
        wishes.context = context.unwrap_or(wishes.context);
        shared.change(&mut state, wishes)?;
        Ok(state.plan.clone())
    }
}

impl Shared {
    pub(super) fn inputs<'a>(&'a self, wishes: &'a Wishes) -> Inputs<'a> {
        Inputs {
            units: &self.units,
            facts: &self.model.facts,
            memory: self.memory,
            links: self.links,
            wishes,
        }
    }

    fn change(&self, state: &mut State, wishes: Wishes) -> Result<()> {
        let before = &state.plan;
        // Slots are there, whoever else has to go; those for experts may be fewer than at first.
        let mut kept = wishes.clone();
        let most = state.core.most_expert_slots();
        if most > 0 {
            kept.expert_slots = Some(most);
        }
        let plan = before.rebalance(&self.inputs(&kept))?;
        let slots =
            |plan: &Plan| (plan.slots, plan.slot_bytes, plan.expert_slot_bytes, plan.staging_bytes);
        let least = before.expert_slots_least.min(before.expert_slots);
        let is_between = (least..=most).contains(&plan.expert_slots);
        if slots(&plan) != slots(before) || !is_between {
            if before.slots + before.expert_slots == 0 {
                fail!(
                    Budget,
                    "units that leave memory would need slots, and it was opened without, since \
                     everything had room: open it with the wish to shrink, or with a budget"
                );
            }
            fail!(
                Budget,
                "{} slots of {} bytes, {least} of {} for experts and {} bytes of staging do not fit \
                 any more: so many stay",
                before.slots,
                before.slot_bytes,
                before.expert_slot_bytes,
                before.staging_bytes
            );
        }
        if state.places.in_window().is_some() && plan.on_processor != before.on_processor {
            fail!(
                Unsupported,
                "units in place are used where they were when the streamer was opened: with that \
                 memory some would move between processor and device"
            );
        }
        self.check_large(state, &plan)?;
        (state.plan, state.wishes) = (plan, wishes);
        self.plan_moves(state);
        self.settle(state);
        Ok(())
    }

    /// Units that no slot holds have to have a home: they are not moved to where the budget has
    /// no room for them, whatever a plan says.
    fn check_large(&self, state: &State, plan: &Plan) -> Result<()> {
        let Some(account) = &self.account else { return Ok(()) };
        for (tier, place) in [(Tier::Host, Home::Host), (Tier::Device, Home::Device)] {
            let (mut come, mut leave) = (0u64, 0u64);
            for (unit, &home) in (0..).zip(&plan.homes) {
                let bytes = plan.taken_by(self.units.units[unit as usize].image_bytes, place);
                let now = state.core.home_of(unit);
                match now.map(|(now, _)| (now == place, home == place)) {
                    Some((false, true)) if !state.core.fits(unit) => come += bytes,
                    Some((true, false)) => leave += bytes,
                    _ => {}
                }
            }
            let lane = account.budget().lane(tier);
            let free = lane.limit_bytes.saturating_sub(lane.reserved_bytes + lane.committed_bytes);
            if come > free.saturating_add(leave) {
                fail!(
                    Budget,
                    "units of {come} bytes, too large for slots, would have to move to where the \
                     budget has {free} free: all stays as it is"
                );
            }
        }
        Ok(())
    }

    /// Who has to move, from where they are: not all that was planned before has happened.
    fn plan_moves(&self, state: &mut State) {
        let (mut leave, mut come) = (Vec::new(), Vec::new());
        for (unit, &home) in (0..).zip(&state.plan.homes) {
            let Some((now, there)) = state.core.home_of(unit) else { continue };
            let gate = &self.gates[unit as usize];
            let was_leaving = gate.load(Ordering::Acquire) & LEAVING != 0;
            if now == home && (there || !was_leaving) {
                gate.fetch_and(!LEAVING, Ordering::AcqRel);
                if was_leaving && state.core.is_seated(unit) {
                    self.open_gate(unit);
                }
                continue;
            }
            gate.fetch_or(LEAVING, Ordering::AcqRel);
            gate.fetch_and(!OPEN, Ordering::AcqRel);
            if home == Home::File { leave.push((unit, home)) } else { come.push((unit, home)) }
        }
        // Who leaves comes first: its memory is for who comes.
        leave.append(&mut come);
        state.moves = leave;
    }

    /// Moves what can move now.
    pub(super) fn move_homes(&self, state: &mut State) {
        let State { moves, places, plan, .. } = state;
        let want_slots = plan.expert_slots > places.expert_slots();
        places.forget_made(|unit| match unit {
            NONE => want_slots,
            unit => moves.contains(&(unit, Home::Device)),
        });
        let mut blocked = self.give_slots_back(state);
        let mut moves = std::mem::take(&mut state.moves);
        moves.retain(|&(unit, home)| {
            let moved = match self.move_home(state, unit, home, blocked) {
                Ok(moved) => moved,
                Err(error) => {
                    state.note = Some(format!("unit {unit} has not got its new home: {error}"));
                    true
                }
            };
            blocked |= !moved && home == Home::File;
            !moved
        });
        state.moves.extend(moves);
        if state.moves.is_empty() {
            self.take_slots_again(state);
        }
    }

    /// False: not yet. `blocked`: memory that is needed has not been given back.
    fn move_home(&self, state: &mut State, unit: u32, home: Home, blocked: bool) -> Result<bool> {
        let gate = &self.gates[unit as usize];
        let blocked = blocked || state.places.is_leaving();
        if (blocked && home != Home::File) || gate.load(Ordering::Acquire) & USERS > 0 {
            return Ok(false);
        }
        if state.home_uses[unit as usize] > 0 {
            return Ok(false); // the device still reads it
        }
        if home == Home::Device && !state.places.has_memory_for(unit) {
            return Ok(false); // the copier asks for some
        }
        let now_ns = self.now_ns();
        if state.places.range().is_some() && !state.core.quit_slot(unit)? {
            // Its own memory is in use as a slot.
            return Ok(false);
        }
        let (was, _) = state.core.home_of(unit).unwrap_or((Home::File, false));
        let was_on_processor = state.core.is_on_processor(unit);
        if was != Home::File && !state.core.set_home(unit, Home::File, now_ns)? {
            return Ok(false);
        }
        // SAFETY: nobody uses it there: the gate is closed and has no users; the core has
        // nothing under way to or from it, and in place it is in no slot.
        if let Err(error) = unsafe { state.places.free_home(unit) } {
            state.note = Some(error.to_string());
        }
        gate.fetch_and(!LEAVING, Ordering::AcqRel);
        if home == Home::Device && state.places.in_window().is_some() {
            // Since it lost its home it may be on its way to a slot, whose memory would come to
            // where that of its home is to be.
            if !state.core.quit_slot(unit)? {
                return Ok(false);
            }
        }
        if home != Home::File {
            let made = state.places.make_home(unit, home, state.plan.seat, &self.source());
            if let Err(error) = made {
                self.forget_home(&mut state.plan, unit);
                self.go_back(state, unit, (was, was_on_processor))?;
                return Err(error);
            }
            self.settle_in(state, unit, home)?;
        }
        Ok(true)
    }

    /// A unit has memory for a new home: it is brought there.
    fn settle_in(&self, state: &mut State, unit: u32, home: Home) -> Result<()> {
        self.note_home(state, unit)?;
        state.core.set_processor(unit, state.plan.on_processor[unit as usize]);
        state.core.set_home(unit, home, self.now_ns()).map(|_| ())
    }

    /// There is no memory where a unit was to go: it goes back to where it was, which is free
    /// just now, if it may. It may be larger than slots, and then can be nowhere else.
    fn go_back(
        &self,
        state: &mut State,
        unit: u32,
        (was, on_processor): (Home, bool),
    ) -> Result<()> {
        let bytes = state.plan.taken_by(self.units.units[unit as usize].image_bytes, was);
        let (plan, wishes) = (&state.plan, &state.wishes);
        let (used, ceiling) = match was {
            Home::Device => (plan.device_bytes, wishes.device_ceiling_bytes),
            _ => (plan.host_bytes, wishes.host_ceiling_bytes),
        };
        if was == Home::File
            || ceiling.is_some_and(|ceiling| used.saturating_add(bytes) > ceiling)
            || state.places.make_home(unit, was, state.plan.seat, &self.source()).is_err()
        {
            return Ok(());
        }
        let at = unit as usize;
        (state.plan.homes[at], state.plan.on_processor[at]) = (was, on_processor);
        match was {
            Home::Device => state.plan.device_bytes += bytes,
            _ => state.plan.host_bytes += bytes,
        }
        self.settle_in(state, unit, was)
    }

    /// A unit has not got the home that was planned: it has the file alone.
    fn forget_home(&self, plan: &mut Plan, unit: u32) {
        let was = std::mem::replace(&mut plan.homes[unit as usize], Home::File);
        let bytes = plan.taken_by(self.units.units[unit as usize].image_bytes, was);
        match was {
            Home::Device => plan.device_bytes -= bytes,
            Home::Host => plan.host_bytes -= bytes,
            Home::File => {}
        }
    }

    /// Notes where a home is, for those who come without the lock.
    pub(super) fn note_home(&self, state: &State, unit: u32) -> Result<()> {
        let at = state.places.at(unit, Goal::Home)?;
        let mark = if at.memory == Where::Device { ON_DEVICE } else { 0 };
        self.home_addresses[unit as usize].store(at.address | mark, Ordering::Release);
        Ok(())
    }

    /// Units that are used at home.
    pub(super) fn used_homes(&self) -> u64 {
        let used =
            |gate: &crate::base::sync::atomic::AtomicU32| gate.load(Ordering::Acquire) & USERS > 0;
        self.gates.iter().filter(|gate| used(gate)).count() as u64
    }

    /// The budget asks for bytes: residents go back to the file. How many bytes will come.
    pub(super) fn reclaim(self: &Arc<Shared>, tier: Tier, bytes: u64) -> u64 {
        self.let_ended_go();
        let mut state = self.state.lock();
        if state.check().is_err() {
            return 0;
        }
        let (plan, floor) = (&state.plan, state.plan.floor(&self.units));
        let mut wishes = state.wishes.clone();
        let (now, least, ceiling) = match tier {
            Tier::Host => (plan.host_bytes, floor.host_bytes, &mut wishes.host_ceiling_bytes),
            Tier::Device if plan.seat == Seat::Device => {
                (plan.device_bytes, floor.device_bytes, &mut wishes.device_ceiling_bytes)
            }
            _ => return 0,
        };
        // What cannot be given is not what the rest is kept for.
        *ceiling = Some(now.saturating_sub(bytes).max(least));
        match self.change(&mut state, wishes) {
            Ok(()) => {
                let after = match tier {
                    Tier::Host => state.plan.host_bytes,
                    _ => state.plan.device_bytes,
                };
                now.saturating_sub(after)
            }
            Err(error) => {
                drop(state); // whoever is told may call
                log::debug!("no weights leave for {bytes} bytes: {error}");
                0
            }
        }
    }
}
