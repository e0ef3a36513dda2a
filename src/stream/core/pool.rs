//! Slots of one size, and who leaves when all are taken: a policy of [`policy`](crate::policy)
//! chooses among those that nobody holds.

use crate::base::status::Result;
use crate::device::Event;
use crate::policy::evict::Victim;
use crate::policy::evictor::{Evictor, New, Options, Who};
use crate::stream::units::NONE;

/// A slot.
#[derive(Clone, Copy)]
struct Slot {
    /// Who is in it, or [`NONE`].
    unit: u32,
    /// Why it must stay: users, a load, a place in the window.
    holds: u32,
    /// The device's event after which it may be written.
    after: Option<Event>,
    /// Whose bytes were the last to come here.
    dirty: u32,
}

/// Slots, and a policy.
pub(super) struct Pool {
    slots: Vec<Slot>,
    /// The first `open` slots take units. A unit in another slot is held until it is evicted.
    open: u32,
    free: Vec<u32>,
    evictor: Option<Evictor>,
    victims: Vec<Victim>,
}

/// A slot that was taken.
pub(super) struct Taken {
    pub slot: u32,
    /// Who had to leave for it.
    pub left: Option<u32>,
    /// Whose bytes were the last to come there, or [`NONE`].
    pub dirty: u32,
    /// The event after which it may be written.
    pub after: Option<Event>,
}

impl Pool {
    pub fn new(count: u32, policy: &str) -> Result<Pool> {
        let options = Options {
            max_objects: count.max(1) as usize,
            capacity_units: u64::from(count),
            remember: count.max(1) as usize,
            ..Options::default()
        };
        let evictor = if count == 0 { None } else { Some(Evictor::open(policy, &options)?) };
        Ok(Pool {
            slots: vec![Slot { unit: NONE, holds: 0, after: None, dirty: NONE }; count as usize],
            open: count,
            free: (0..count).rev().collect(),
            evictor,
            victims: Vec::new(),
        })
    }

    /// Slots that take units.
    pub fn len(&self) -> u32 {
        self.open
    }

    /// All slots.
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
                self.hold(slot)?;
            }
        }
        for slot in before..count {
            match self.unit_in(slot) {
                Some(_) => self.let_go(slot)?,
                None => self.free.push(slot),
            }
        }
        Ok(())
    }

    /// The unit whose bytes a slot last received, or [`NONE`].
    pub fn dirty(&self, slot: u32) -> u32 {
        self.slots.get(slot as usize).map_or(NONE, |slot| slot.dirty)
    }

    /// Who is in a slot.
    pub fn unit_in(&self, slot: u32) -> Option<u32> {
        self.slots.get(slot as usize).map(|slot| slot.unit).filter(|&unit| unit != NONE)
    }

    /// Whether a slot could be taken now.
    pub fn has_room(&self) -> bool {
        let mut open = self.slots.iter().take(self.open as usize);
        !self.free.is_empty() || open.any(|slot| slot.holds == 0)
    }

    /// A slot for a unit, held once; none while all are held. `slot_of` says which slot
    /// whoever leaves has.
    pub fn take(
        &mut self,
        unit: u32,
        now_ns: u64,
        slot_of: impl Fn(u32) -> u32,
    ) -> Result<Option<Taken>> {
        let (Some(evictor), true) = (&mut self.evictor, self.open > 0) else {
            return Ok(None);
        };
        let now = i64::try_from(now_ns).unwrap_or(i64::MAX / 4).max(evictor.now_ns());
        let (slot, left) = match self.free.pop() {
            Some(slot) => (slot, None),
            None => {
                self.victims.clear();
                evictor.evict_most(now, 1, 1, &mut self.victims)?;
                let Some(victim) = self.victims.first() else { return Ok(None) };
                let left = victim.id as u32;
                (slot_of(left), Some(left))
            }
        };
        evictor.insert(
            now,
            &Who::default(),
            &[New { id: unit.into(), units: 1, ..New::default() }],
        )?;
        let place = &mut self.slots[slot as usize];
        place.unit = unit;
        let dirty = std::mem::replace(&mut place.dirty, unit);
        let after = place.after.take();
        self.hold(slot)?;
        Ok(Some(Taken { slot, left, dirty, after }))
    }

    /// It must stay.
    pub fn hold(&mut self, slot: u32) -> Result<()> {
        let place = &mut self.slots[slot as usize];
        place.holds += 1;
        match (&mut self.evictor, place.holds) {
            (Some(evictor), 1) => evictor.acquire(&[place.unit.into()]),
            _ => Ok(()),
        }
    }

    /// One reason less why it must.
    pub fn let_go(&mut self, slot: u32) -> Result<()> {
        let place = &mut self.slots[slot as usize];
        debug_assert!(place.holds > 0, "a slot was let go more often than held");
        place.holds -= 1;
        match (&mut self.evictor, place.holds) {
            (Some(evictor), 0) => evictor.release(&[place.unit.into()]),
            _ => Ok(()),
        }
    }

    /// A use of who is in it.
    pub fn touch(&mut self, slot: u32, now_ns: u64) -> Result<()> {
        let unit = self.slots[slot as usize].unit;
        if let Some(evictor) = &mut self.evictor {
            let now = i64::try_from(now_ns).unwrap_or(i64::MAX / 4).max(evictor.now_ns());
            evictor.touch(now, &Who::default(), &[unit.into()])?;
        }
        Ok(())
    }

    /// Keeps who is in it whatever the policy says, or does not any more.
    pub fn pin(&mut self, slot: u32, pinned: bool) -> Result<()> {
        let unit = self.slots[slot as usize].unit;
        self.evictor.as_mut().map_or(Ok(()), |evictor| evictor.pin(&[unit.into()], pinned))
    }

    /// Who was in it leaves, whoever holds it: what it has is not what it should be.
    pub fn empty(&mut self, slot: u32) -> Result<()> {
        let place = &mut self.slots[slot as usize];
        let unit = std::mem::replace(&mut place.unit, NONE);
        let held = std::mem::take(&mut place.holds) > 0;
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

    /// Whose bytes were the last to come there.
    pub fn set_dirty(&mut self, slot: u32, unit: u32) {
        self.slots[slot as usize].dirty = unit;
    }

    /// The event after which it may be written.
    pub fn after(&self, slot: u32) -> Option<Event> {
        self.slots.get(slot as usize).and_then(|slot| slot.after)
    }

    /// This event has passed: nothing is behind it any more.
    pub fn forget(&mut self, event: Event) {
        for slot in self.slots.iter_mut().filter(|slot| slot.after == Some(event)) {
            slot.after = None;
        }
    }

    /// It may be written after this event.
    pub fn set_after(&mut self, slot: u32, after: Option<Event>) {
        self.slots[slot as usize].after = after;
    }
}
