//! Operations of the objects' owners: remove, resize, reference, pin, hint.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::{Facts, MAX_UNITS};
use crate::meta::sessions::Sessions;
use crate::policy::Hint;
use crate::policy::evictor::{Evictor, RequestContext};
use crate::policy::registry;

impl Evictor {
    /// Removes objects that their owner gave up, pinned or not; all or none. Children must be
    /// removed with their parents.
    pub fn remove(&mut self, now: i64, ids: &[u64]) -> Result<()> {
        self.restoring_clock(|this| {
            let now = this.begin(now, ids.len())?;
            this.remove_all(now, ids, false)
        })
    }

    /// Counts, logs and remembers objects that a selection evicted; all or none. Children must be
    /// evicted with their parents. Ids that are not in the table are remembered too, with a size of
    /// one unit.
    pub fn evicted(&mut self, now: i64, ids: &[u64]) -> Result<()> {
        self.restoring_clock(|this| {
            let now = this.begin(now, ids.len())?;
            let (mut known, mut unknown): (Vec<u64>, Vec<u64>) = Default::default();
            for list in [&mut known, &mut unknown] {
                if list.try_reserve_exact(ids.len()).is_err() {
                    fail!(NoMem, "no memory for {} ids", ids.len());
                }
            }
            for &id in ids {
                let is_resident = this.objects.find(id).is_some();
                if is_resident { known.push(id) } else { unknown.push(id) }
            }
            this.remove_all(now, &known, true)?;
            unknown.iter().for_each(|&id| this.history.add(id, 1, 0));
            this.metrics.counts.evictions += unknown.len() as u64;
            this.metrics.counts.evicted_units += unknown.len() as u64;
            Ok(())
        })
    }

    fn remove_all(&mut self, now: i64, ids: &[u64], evicted: bool) -> Result<()> {
        for (i, &id) in ids.iter().enumerate() {
            let checked = self.slot_of(id).and_then(|slot| {
                if self.objects.node(slot).is_chosen() {
                    fail!(Invalid, "object {id} is given twice");
                }
                self.objects.set_chosen(slot, true);
                Ok(())
            });
            if let Err(error) = checked {
                self.unmark(&ids[..i]);
                return Err(error);
            }
        }
        if let Some(id) = self.continued_outside(ids)? {
            self.unmark(ids);
            fail!(State, "object {id} is the parent of others: remove its children with it");
        }
        self.remove_marked(ids, now, evicted);
        Ok(())
    }

    /// A marked object with an unmarked child.
    fn continued_outside(&mut self, ids: &[u64]) -> Result<Option<u64>> {
        let mut parents: Vec<Slot> = Vec::new();
        if parents.try_reserve_exact(ids.len()).is_err() {
            self.unmark(ids);
            fail!(NoMem, "no memory to check {} ids", ids.len());
        }
        let slots = ids.iter().filter_map(|&id| self.objects.find(id));
        parents.extend(slots.map(|slot| self.objects.node(slot).parent));
        parents.sort_unstable();
        Ok(ids.iter().copied().find(|&id| {
            let slot = self.objects.find(id).unwrap_or(NONE);
            let from = parents.partition_point(|&p| p < slot);
            let inside = parents[from..].partition_point(|&p| p == slot);
            inside < self.objects.node(slot).children as usize
        }))
    }

    fn unmark(&mut self, ids: &[u64]) {
        for &id in ids {
            if let Some(slot) = self.objects.find(id) {
                self.objects.set_chosen(slot, false);
            }
        }
    }

    /// Removes the marked objects, children first.
    fn remove_marked(&mut self, ids: &[u64], now: i64, evicted: bool) {
        for &id in ids {
            let mut at = self.objects.find(id).unwrap_or(NONE);
            while at != NONE {
                let node = self.objects.node(at);
                if node.children > 0 || !node.is_chosen() {
                    break;
                }
                let parent = node.parent;
                if evicted {
                    let by = registry::number(self.policy.decided_by());
                    self.note_eviction(at, by, now);
                }
                self.take_out(at, evicted, now);
                at = parent;
            }
        }
    }

    /// Changes sizes; all or none.
    pub fn resize(&mut self, ids: &[u64], units: &[u64]) -> Result<()> {
        if ids.len() != units.len() {
            fail!(Invalid, "{} sizes for {} ids", units.len(), ids.len());
        }
        if let Some(row) = units.iter().position(|&u| u > MAX_UNITS) {
            fail!(Limit, "size {} of object {} exceeds {MAX_UNITS}", units[row], ids[row]);
        }
        ids.iter().try_for_each(|&id| self.slot_of(id).map(drop))?;
        for (&id, &units) in ids.iter().zip(units) {
            let slot = self.slot_of(id)?;
            self.policy.resize(&mut self.objects, slot, units as u32);
        }
        Ok(())
    }

    /// Sets the size of an object that grew or shrank, and its facts, which count from the next use
    /// on.
    pub fn describe(&mut self, id: u64, units: u64, facts: &Facts) -> Result<()> {
        self.resize(&[id], &[units])?;
        let slot = self.slot_of(id)?;
        if let Some(row) = self.objects.facts_mut(slot) {
            *row = *facts;
        }
        Ok(())
    }

    /// Adds a reference to each object; all or none.
    pub fn acquire(&mut self, ids: &[u64]) -> Result<()> {
        for (i, &id) in ids.iter().enumerate() {
            let taken = self.slot_of(id).and_then(|slot| self.objects.acquire(slot));
            if let Err(error) = taken {
                let now = self.stamp;
                ids[..i].iter().for_each(|&id| drop(self.release_one(id, now)));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Removes a reference from each object; all or none.
    pub fn release(&mut self, ids: &[u64]) -> Result<()> {
        let now = self.stamp;
        for (i, &id) in ids.iter().enumerate() {
            if let Err(error) = self.release_one(id, now) {
                self.acquire(&ids[..i])?;
                return Err(error);
            }
        }
        Ok(())
    }

    fn release_one(&mut self, id: u64, now: i64) -> Result<()> {
        let slot = self.slot_of(id)?;
        if self.objects.release(slot)? {
            self.freed(slot, now);
        }
        Ok(())
    }

    /// Pins or unpins; all or none.
    pub fn pin(&mut self, ids: &[u64], pinned: bool) -> Result<()> {
        ids.iter().try_for_each(|&id| self.slot_of(id).map(drop))?;
        for &id in ids {
            let slot = self.slot_of(id)?;
            if self.objects.set_pinned(slot, pinned) {
                self.freed(slot, self.stamp);
            }
        }
        Ok(())
    }

    /// Passes on the engine's hint about objects, usually the path of a finished request. Unknown
    /// ids are skipped; returns the number of known ones.
    pub fn hint(
        &mut self,
        now: i64,
        context: &RequestContext,
        ids: &[u64],
        hint: &Hint,
    ) -> Result<usize> {
        let now = self.begin(now, ids.len())?;
        let session = self.find_session(context);
        note_hint(&mut self.objects.sessions, session, hint);
        self.find_all(ids);
        let mut known = 0;
        for i in 0..ids.len() {
            let slot = self.slots[i];
            if slot != NONE {
                self.hint_slot(slot, hint, now + i as i64);
                known += 1;
            }
        }
        Ok(known)
    }

    /// Passes a hint on to the policy.
    pub(super) fn hint_slot(&mut self, slot: Slot, hint: &Hint, now: i64) {
        // Stored at any confidence; a policy that requires more resets it.
        if let (Some(facts), Some((ns, _))) = (self.objects.facts_mut(slot), hint.next_use) {
            facts.next_use_ns = ns;
        }
        self.policy.hint(&mut self.objects, slot, hint, now);
    }
}

fn note_hint(sessions: &mut Sessions, session: Slot, hint: &Hint) {
    let Some(row) = sessions.of_mut(session) else { return };
    if let Some(stop) = hint.stop {
        row.stop = stop as u8;
    }
    if let Some((ns, confidence)) = hint.next_use {
        row.next_use_ns = ns;
        row.confidence = (confidence.clamp(0.0, 1.0) * 255.0) as u8;
    }
}
