//! A cache that holds nothing: what a policy would have kept, had it decided.

use crate::base::status::Result;
use crate::meta::index::NONE;
use crate::meta::objects::{Facts, Objects};
use crate::policy::{Hint, Policy};

/// A reference as the live side saw it.
#[derive(Clone, Copy)]
pub struct Seen {
    /// Who.
    pub id: u64,
    /// What it continues, if that is known.
    pub parent: Option<u64>,
    /// Its size.
    pub units: u32,
    /// What is known of it.
    pub facts: Facts,
}

/// One policy with a table of its own.
pub struct Copy {
    policy: Box<dyn Policy>,
    objects: Objects,
    capacity: u64,
    /// Units asked for and found in this window.
    asked: u64,
    found: u64,
    /// Share found, over windows.
    rate: f64,
}

/// What a window weighs in the share over windows.
const WEIGHT: f64 = 0.4;

impl Copy {
    /// A copy for up to `limit` objects.
    pub fn new(policy: Box<dyn Policy>, limit: usize, leaf_first: bool) -> Result<Copy> {
        let objects = Objects::new(limit, leaf_first, policy.wants_facts())?;
        Ok(Copy { policy, objects, capacity: 0, asked: 0, found: 0, rate: 0.0 })
    }

    /// What fits.
    pub fn set_capacity(&mut self, units: u64) {
        self.capacity = units;
        self.policy.set_capacity(units);
    }

    /// The share found.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// An id was asked for. Whether the copy has it.
    pub fn ask(&mut self, id: u64, units: u32, now: i64) -> bool {
        self.asked += u64::from(units);
        match self.objects.find(id) {
            Some(slot) => {
                self.found += u64::from(units);
                let node = self.objects.node_mut(slot);
                node.hits = node.hits.saturating_add(1);
                self.policy.touch(&mut self.objects, slot, now);
                true
            }
            None => {
                self.policy.miss(&self.objects, id, now);
                false
            }
        }
    }

    /// Takes in what it does not have, making room.
    pub fn admit(&mut self, seen: &Seen, now: i64) {
        if self.objects.find(seen.id).is_some() || u64::from(seen.units) > self.capacity {
            return;
        }
        let parent = seen.parent.and_then(|id| self.objects.find(id)).unwrap_or(NONE);
        // The prefix that it continues is in use, and must not make room for it.
        let used = parent != NONE && self.objects.acquire(parent).is_ok();
        while self.objects.units() + u64::from(seen.units) > self.capacity
            || self.objects.len() == self.objects.limit()
        {
            if !self.evict(now) {
                break;
            }
        }
        if used {
            // Was taken above, so it is there to give back.
            let free = self.objects.release(parent).unwrap_or(false);
            if free && self.objects.node(parent).is_held() {
                self.policy.put_back(&mut self.objects, parent, now);
            }
        }
        let fits = self.objects.units() + u64::from(seen.units) <= self.capacity;
        if !fits || self.objects.len() == self.objects.limit() {
            return;
        }
        let units = u64::from(seen.units);
        if let Ok(slot) = self.objects.insert(seen.id, parent, units, &seen.facts) {
            self.policy.insert(&mut self.objects, slot, now);
        }
    }

    fn evict(&mut self, now: i64) -> bool {
        let Some(slot) = self.policy.victim(&mut self.objects, now) else { return false };
        self.drop_slot(slot, true, now);
        true
    }

    fn drop_slot(&mut self, slot: u32, evicted: bool, now: i64) {
        let parent = self.objects.detach(slot);
        self.policy.remove(&mut self.objects, slot, evicted, now);
        self.objects.remove(slot);
        if let Some(parent) = parent.filter(|&p| self.objects.node(p).is_held()) {
            self.policy.put_back(&mut self.objects, parent, now);
        }
    }

    /// Its owner gave an object up.
    pub fn forget(&mut self, id: u64, now: i64) {
        if let Some(slot) = self.objects.find(id) {
            if self.objects.node(slot).children == 0 {
                self.drop_slot(slot, false, now);
            }
        }
    }

    /// The engine said something of an object.
    pub fn hint(&mut self, id: u64, hint: &Hint, now: i64) {
        if let Some(slot) = self.objects.find(id) {
            self.policy.hint(&mut self.objects, slot, hint, now);
        }
    }

    /// Ends a window; the share found over windows.
    pub fn close_window(&mut self) -> f64 {
        let share = self.found as f64 / self.asked.max(1) as f64;
        let first = self.rate == 0.0;
        self.rate = if first { share } else { self.rate + WEIGHT * (share - self.rate) };
        (self.asked, self.found) = (0, 0);
        self.rate
    }

    /// How many objects it holds.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Checks its structures; for tests.
    pub fn check(&self) -> Result<()> {
        self.policy.check(&self.objects)
    }
}
