//! Experts that stay: those that are used most have part of the slots for themselves, and
//! the policy sees to the rest. What an order of uses has of skew, the first part keeps;
//! what it has of repetition, the second.

use crate::base::status::{Result, Status};
use crate::stream::core::Core;
use crate::stream::units::NONE;

/// After so many uses for each slot it is looked at again who is used most.
const REVIEW_USES: u64 = 16;
/// Of a hundred slots, those for the most used, where nothing else is said.
pub const PINNED_PERCENT: u32 = 50;

/// Who is used most.
pub(super) struct Favourites {
    /// Most experts that are pinned: `percent` of the slots.
    most: usize,
    percent: u32,
    review: u64,
    uses: u64,
    /// Uses of each unit, of which those of long ago count less.
    counts: Vec<u32>,
    is_favourite: Vec<bool>,
    list: Vec<u32>,
    /// For the choice, so that it does not allocate.
    ranking: Vec<u32>,
}

/// Slots reserved for the experts used most: never all.
fn most_of(slots: u32, percent: u32) -> usize {
    let most = u64::from(slots) * u64::from(percent) / 100;
    most.min(u64::from(slots.saturating_sub(1))) as usize
}

impl Favourites {
    pub fn new(units: usize, slots: u32, percent: u32) -> Result<Favourites> {
        let percent = percent.min(100);
        let units = if most_of(slots, percent) == 0 { 0 } else { units };
        let (mut counts, mut is_favourite, mut ranking) = (Vec::new(), Vec::new(), Vec::new());
        counts.try_reserve_exact(units).map_err(|_| Status::NoMem)?;
        is_favourite.try_reserve_exact(units).map_err(|_| Status::NoMem)?;
        ranking.try_reserve_exact(units).map_err(|_| Status::NoMem)?;
        counts.resize(units, 0);
        is_favourite.resize(units, false);
        let (list, most, review) = (Vec::new(), 0, 1);
        let mut all =
            Favourites { most, percent, review, uses: 0, counts, is_favourite, list, ranking };
        all.set_slots(slots);
        Ok(all)
    }

    /// Sets the number of slots.
    fn set_slots(&mut self, slots: u32) {
        self.most = if self.counts.is_empty() { 0 } else { most_of(slots, self.percent) };
        self.review = REVIEW_USES * u64::from(slots.max(1));
    }

    fn is(&self, unit: u32) -> bool {
        self.is_favourite.get(unit as usize).copied().unwrap_or(false)
    }

    /// A use; true when it is time to look who is used most.
    fn used(&mut self, unit: u32) -> bool {
        let Some(count) = self.counts.get_mut(unit as usize) else { return false };
        *count = count.saturating_add(1);
        self.uses += 1;
        self.uses % self.review == 0
    }

    /// Chooses anew; those that were and are no more.
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
        before.iter().for_each(|&unit| self.is_favourite[unit as usize] = false);
        self.list.iter().for_each(|&unit| self.is_favourite[unit as usize] = true);
        self.counts.iter_mut().for_each(|count| *count /= 2);
        before.into_iter().filter(|&unit| !self.is(unit)).collect()
    }
}

impl Core {
    /// An expert was given to the engine.
    pub(super) fn note_expert(&mut self, unit: u32) -> Result<()> {
        if !self.favourites.used(unit) {
            return Ok(());
        }
        for unit in self.favourites.choose() {
            self.pin(unit, false)?;
        }
        for at in 0..self.favourites.list.len() {
            self.pin(self.favourites.list[at], true)?;
        }
        Ok(())
    }

    /// An expert has got a slot.
    pub(super) fn pin_favourite(&mut self, unit: u32) -> Result<()> {
        if self.favourites.is(unit) { self.pin(unit, true) } else { Ok(()) }
    }

    fn pin(&mut self, unit: u32, pinned: bool) -> Result<()> {
        let slot = self.cells[unit as usize].slot;
        if slot == NONE { Ok(()) } else { self.experts.pin(slot, pinned) }
    }

    /// Number of expert slots in use.
    pub fn expert_slots(&self) -> u32 {
        self.experts.len()
    }

    /// Most expert slots.
    pub fn most_expert_slots(&self) -> u32 {
        self.experts.most()
    }

    /// From now on only the first `count` slots take experts. [`Core::empty_expert_slots`] evicts the
    /// experts in the other slots once they are unused.
    pub fn set_expert_slots(&mut self, count: u32, now_ns: u64) -> Result<()> {
        self.favourites.set_slots(count);
        if self.favourites.list.len() > self.favourites.most {
            self.drop_favourites()?;
        }
        self.experts.set_len(count)?;
        self.advance(now_ns)
    }

    /// Evicts unused experts from slots that take no more. Returns the first slot from which on all
    /// are empty and unused by the device: their memory may be freed.
    pub fn empty_expert_slots(&mut self) -> Result<u32> {
        let mut in_use = self.experts.len();
        for slot in self.experts.len()..self.experts.most() {
            let is_empty = match self.experts.unit_in(slot) {
                None => true,
                Some(unit) => self.quit_slot(unit)?,
            };
            if !is_empty || self.experts.after(slot).is_some() {
                in_use = slot + 1;
            }
        }
        Ok(in_use)
    }

    /// The unit whose memory a closed slot last filled, when units are in place: the caller frees
    /// that memory. Returned once.
    pub fn take_dirty(&mut self, slot: u32) -> Option<u32> {
        let unit = self.experts.dirty(slot);
        self.experts.set_dirty(slot, NONE);
        (unit != NONE && !self.has_memory(unit)).then_some(unit)
    }

    /// Nobody stays for being used much: the engine needs more at once than the rest holds.
    pub(super) fn drop_favourites(&mut self) -> Result<()> {
        for unit in std::mem::take(&mut self.favourites.list) {
            self.favourites.is_favourite[unit as usize] = false;
            self.pin(unit, false)?;
        }
        Ok(())
    }
}
