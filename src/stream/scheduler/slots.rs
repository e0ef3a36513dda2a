//! Slots of one size. When all are taken, a policy of [`policy`](crate::policy) chooses the victim
//! among the units without references.

use crate::base::status::{Result, Status};
use crate::device::Event;
use crate::policy::evict::Victim;
use crate::policy::evictor::{Evictor, NewObject, Options, RequestContext};
use crate::stream::scheduler::Scheduler;
use crate::stream::units::NONE;

/// A slot.
#[derive(Clone, Copy)]
struct Slot {
    /// The unit in the slot, or [`NONE`].
    unit: u32,
    /// References that keep the unit: leases, a load, a position in the window.
    references: u32,
    /// The device event after which the slot may be written.
    after: Option<Event>,
    /// The unit whose bytes were written to the slot last.
    dirty: u32,
}

/// Slots with their eviction policy.
pub(super) struct SlotPool {
    slots: Vec<Slot>,
    /// The first `open` slots take units. A unit in another slot is referenced until it is
    /// evicted.
    open: u32,
    free: Vec<u32>,
    evictor: Option<Evictor>,
    victims: Vec<Victim>,
}

/// A slot that was granted.
pub(super) struct SlotGrant {
    pub slot: u32,
    /// The unit that was evicted for it.
    pub evicted: Option<u32>,
    /// The unit whose bytes were written to the slot last, or [`NONE`].
    pub dirty: u32,
    /// The event after which the slot may be written.
    pub after: Option<Event>,
}

impl SlotPool {
    pub fn new(count: u32, policy: &str) -> Result<SlotPool> {
        let options = Options {
            max_objects: count.max(1) as usize,
            capacity_units: u64::from(count),
            remember: count.max(1) as usize,
            ..Options::default()
        };
        let evictor = if count == 0 { None } else { Some(Evictor::open(policy, &options)?) };
        Ok(SlotPool {
            slots: vec![
                Slot { unit: NONE, references: 0, after: None, dirty: NONE };
                count as usize
            ],
            open: count,
            free: (0..count).rev().collect(),
            evictor,
            victims: Vec::new(),
        })
    }

    /// Number of slots that take units.
    pub fn len(&self) -> u32 {
        self.open
    }

    /// Number of all slots.
    pub fn most(&self) -> u32 {
        self.slots.len() as u32
    }

    /// From now on only the first `count` slots take units.
    pub fn set_len(&mut self, count: u32) -> Result<()> {
        let (before, count) = (self.open, count.min(self.most()));
        self.open = count;
        self.free.retain(|&slot| slot < count);
        for slot in count..before {
            if self.unit_in(slot).is_some() {
                self.add_reference(slot)?;
            }
        }
        for slot in before..count {
            match self.unit_in(slot) {
                Some(_) => self.remove_reference(slot)?,
                None => self.free.push(slot),
            }
        }
        Ok(())
    }

    /// The unit whose bytes were written to a slot last, or [`NONE`].
    pub fn dirty(&self, slot: u32) -> u32 {
        self.slots.get(slot as usize).map_or(NONE, |slot| slot.dirty)
    }

    /// The unit in a slot.
    pub fn unit_in(&self, slot: u32) -> Option<u32> {
        self.slots.get(slot as usize).map(|slot| slot.unit).filter(|&unit| unit != NONE)
    }

    /// Whether a slot could be granted now.
    pub fn has_room(&self) -> bool {
        let mut open = self.slots.iter().take(self.open as usize);
        !self.free.is_empty() || open.any(|slot| slot.references == 0)
    }

    /// Grants a slot with one reference; none while all units have references. `slot_of` returns
    /// the slot of the victim.
    pub fn take(
        &mut self,
        unit: u32,
        now_ns: u64,
        slot_of: impl Fn(u32) -> u32,
    ) -> Result<Option<SlotGrant>> {
        let (Some(evictor), true) = (&mut self.evictor, self.open > 0) else {
            return Ok(None);
        };
        let now = i64::try_from(now_ns).unwrap_or(i64::MAX / 4).max(evictor.now_ns());
        let (slot, evicted) = match self.free.pop() {
            Some(slot) => (slot, None),
            None => {
                self.victims.clear();
                evictor.evict_most(now, 1, 1, &mut self.victims)?;
                let Some(victim) = self.victims.first() else { return Ok(None) };
                let evicted = victim.id as u32;
                (slot_of(evicted), Some(evicted))
            }
        };
        evictor.insert(
            now,
            &RequestContext::default(),
            &[NewObject { id: unit.into(), units: 1, ..NewObject::default() }],
        )?;
        let place = &mut self.slots[slot as usize];
        place.unit = unit;
        let dirty = std::mem::replace(&mut place.dirty, unit);
        let after = place.after.take();
        self.add_reference(slot)?;
        Ok(Some(SlotGrant { slot, evicted, dirty, after }))
    }

    /// Adds a reference: the unit stays.
    pub fn add_reference(&mut self, slot: u32) -> Result<()> {
        let place = &mut self.slots[slot as usize];
        place.references += 1;
        match (&mut self.evictor, place.references) {
            (Some(evictor), 1) => evictor.acquire(&[place.unit.into()]),
            _ => Ok(()),
        }
    }

    /// Removes a reference.
    pub fn remove_reference(&mut self, slot: u32) -> Result<()> {
        let place = &mut self.slots[slot as usize];
        debug_assert!(place.references > 0, "a slot has a reference to remove");
        place.references -= 1;
        match (&mut self.evictor, place.references) {
            (Some(evictor), 0) => evictor.release(&[place.unit.into()]),
            _ => Ok(()),
        }
    }

    /// Reports an access to the policy.
    pub fn touch(&mut self, slot: u32, now_ns: u64) -> Result<()> {
        let unit = self.slots[slot as usize].unit;
        if let Some(evictor) = &mut self.evictor {
            let now = i64::try_from(now_ns).unwrap_or(i64::MAX / 4).max(evictor.now_ns());
            evictor.touch(now, &RequestContext::default(), &[unit.into()])?;
        }
        Ok(())
    }

    /// Pins the unit against eviction, or unpins it.
    pub fn pin(&mut self, slot: u32, pinned: bool) -> Result<()> {
        let unit = self.slots[slot as usize].unit;
        self.evictor.as_mut().map_or(Ok(()), |evictor| evictor.pin(&[unit.into()], pinned))
    }

    /// Removes the unit whatever references it has: its bytes are not valid.
    pub fn empty(&mut self, slot: u32) -> Result<()> {
        let place = &mut self.slots[slot as usize];
        let unit = std::mem::replace(&mut place.unit, NONE);
        let held = std::mem::take(&mut place.references) > 0;
        if let Some(evictor) = &mut self.evictor {
            if held {
                evictor.release(&[unit.into()])?;
            }
            evictor.remove(evictor.now_ns().max(1), &[unit.into()])?;
        }
        if slot < self.open {
            self.free.push(slot);
        }
        Ok(())
    }

    /// Sets the unit whose bytes were written to a slot last.
    pub fn set_dirty(&mut self, slot: u32, unit: u32) {
        self.slots[slot as usize].dirty = unit;
    }

    /// The event after which a slot may be written.
    pub fn after(&self, slot: u32) -> Option<Event> {
        self.slots.get(slot as usize).and_then(|slot| slot.after)
    }

    /// Forgets a completed event.
    pub fn forget_event(&mut self, event: Event) {
        for slot in self.slots.iter_mut().filter(|slot| slot.after == Some(event)) {
            slot.after = None;
        }
    }

    /// Sets the event after which a slot may be written.
    pub fn set_after(&mut self, slot: u32, after: Option<Event>) {
        self.slots[slot as usize].after = after;
    }
}

// Pinned experts: the most used experts keep a part of the expert slots, and the policy manages
// the rest. Pinning serves skewed use, the policy serves repeated use.

/// Uses for each slot after which the most used experts are determined again.
const REVIEW_USES: u64 = 16;
/// Default share of the expert slots for the most used experts, in percent.
pub const PINNED_PERCENT: u32 = 50;

/// The most used experts.
pub(super) struct PinnedExperts {
    /// Most experts that are pinned: `percent` of the slots.
    most: usize,
    percent: u32,
    review: u64,
    uses: u64,
    /// Uses of each unit, halved at each review.
    counts: Vec<u32>,
    is_pinned: Vec<bool>,
    list: Vec<u32>,
    /// Working memory of the choice, so that it does not allocate.
    ranking: Vec<u32>,
}

/// Slots for the most used experts; never all slots.
fn most_of(slots: u32, percent: u32) -> usize {
    let most = u64::from(slots) * u64::from(percent) / 100;
    most.min(u64::from(slots.saturating_sub(1))) as usize
}

impl PinnedExperts {
    pub fn new(units: usize, slots: u32, percent: u32) -> Result<PinnedExperts> {
        let percent = percent.min(100);
        let units = if most_of(slots, percent) == 0 { 0 } else { units };
        let (mut counts, mut is_pinned, mut ranking) = (Vec::new(), Vec::new(), Vec::new());
        counts.try_reserve_exact(units).map_err(|_| Status::NoMem)?;
        is_pinned.try_reserve_exact(units).map_err(|_| Status::NoMem)?;
        ranking.try_reserve_exact(units).map_err(|_| Status::NoMem)?;
        counts.resize(units, 0);
        is_pinned.resize(units, false);
        let (list, most, review) = (Vec::new(), 0, 1);
        let mut all =
            PinnedExperts { most, percent, review, uses: 0, counts, is_pinned, list, ranking };
        all.set_slots(slots);
        Ok(all)
    }

    /// Sets the number of slots.
    fn set_slots(&mut self, slots: u32) {
        self.most = if self.counts.is_empty() { 0 } else { most_of(slots, self.percent) };
        self.review = REVIEW_USES * u64::from(slots.max(1));
    }

    fn is(&self, unit: u32) -> bool {
        self.is_pinned.get(unit as usize).copied().unwrap_or(false)
    }

    /// Counts a use. Returns true when the choice is due.
    fn used(&mut self, unit: u32) -> bool {
        let Some(count) = self.counts.get_mut(unit as usize) else { return false };
        *count = count.saturating_add(1);
        self.uses += 1;
        self.uses % self.review == 0
    }

    /// Chooses again. Returns the experts that are no longer pinned.
    fn choose(&mut self) -> Vec<u32> {
        let counts = &self.counts;
        self.ranking.clear();
        self.ranking.extend((0..counts.len() as u32).filter(|&unit| counts[unit as usize] > 1));
        let key = |unit: &u32| (std::cmp::Reverse(counts[*unit as usize]), *unit);
        if self.ranking.len() > self.most {
            self.ranking.select_nth_unstable_by_key(self.most, key);
            self.ranking.truncate(self.most);
        }
        let before = std::mem::replace(&mut self.list, self.ranking.clone());
        before.iter().for_each(|&unit| self.is_pinned[unit as usize] = false);
        self.list.iter().for_each(|&unit| self.is_pinned[unit as usize] = true);
        self.counts.iter_mut().for_each(|count| *count /= 2);
        before.into_iter().filter(|&unit| !self.is(unit)).collect()
    }
}

impl Scheduler {
    /// An expert was leased.
    pub(super) fn note_expert_use(&mut self, unit: u32) -> Result<()> {
        if !self.pinned_experts.used(unit) {
            return Ok(());
        }
        for unit in self.pinned_experts.choose() {
            self.pin(unit, false)?;
        }
        for at in 0..self.pinned_experts.list.len() {
            self.pin(self.pinned_experts.list[at], true)?;
        }
        Ok(())
    }

    /// An expert got a slot.
    pub(super) fn pin_if_popular(&mut self, unit: u32) -> Result<()> {
        if self.pinned_experts.is(unit) { self.pin(unit, true) } else { Ok(()) }
    }

    fn pin(&mut self, unit: u32, pinned: bool) -> Result<()> {
        let slot = self.states[unit as usize].slot;
        if slot == NONE { Ok(()) } else { self.expert_slots.pin(slot, pinned) }
    }

    /// Number of expert slots in use.
    pub fn expert_slots(&self) -> u32 {
        self.expert_slots.len()
    }

    /// Most expert slots.
    pub fn max_expert_slots(&self) -> u32 {
        self.expert_slots.most()
    }

    /// From now on only the first `count` slots take experts. [`Scheduler::empty_expert_slots`]
    /// evicts the experts in the other slots once they are unused.
    pub fn set_expert_slots(&mut self, count: u32, now_ns: u64) -> Result<()> {
        self.pinned_experts.set_slots(count);
        if self.pinned_experts.list.len() > self.pinned_experts.most {
            self.unpin_experts()?;
        }
        self.expert_slots.set_len(count)?;
        self.advance(now_ns)
    }

    /// Evicts unused experts from slots that take no more. Returns the first slot from which on
    /// all are empty and unused by the device: their memory may be freed.
    pub fn empty_expert_slots(&mut self) -> Result<u32> {
        let mut in_use = self.expert_slots.len();
        for slot in self.expert_slots.len()..self.expert_slots.most() {
            let is_empty = match self.expert_slots.unit_in(slot) {
                None => true,
                Some(unit) => self.evict_from_slot(unit)?,
            };
            if !is_empty || self.expert_slots.after(slot).is_some() {
                in_use = slot + 1;
            }
        }
        Ok(in_use)
    }

    /// The unit whose memory a closed slot last filled, when units are in place: the caller frees
    /// that memory. Returned once.
    pub fn take_dirty(&mut self, slot: u32) -> Option<u32> {
        let unit = self.expert_slots.dirty(slot);
        self.expert_slots.set_dirty(slot, NONE);
        (unit != NONE && !self.has_memory(unit)).then_some(unit)
    }

    /// Unpins all experts: the engine needs more of them at once than the other slots hold.
    pub(super) fn unpin_experts(&mut self) -> Result<()> {
        for unit in std::mem::take(&mut self.pinned_experts.list) {
            self.pinned_experts.is_pinned[unit as usize] = false;
            self.pin(unit, false)?;
        }
        Ok(())
    }
}
