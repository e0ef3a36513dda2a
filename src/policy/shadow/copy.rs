//! A policy that decides on metadata alone: what it would have kept, had it been the live one.
//!
//! A copy is notified of what the live side sees, except references and pins: request contexts,
//! facts, sizes, hints. It runs on an evictor of its own, whose session rows follow the live ones
//! at each use. Objects that only the copy has are not resized or hinted: the live side does not
//! know them.
//!
//! It bypasses the evictor's batch calls: every event carries the timestamp of the live side, an
//! object is admitted after room is made for it, and sessions are copied instead of counted.

use crate::base::status::Result;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::{Facts, Objects};
use crate::meta::sessions::Session;
use crate::policy::evictor::{Evictor, NewObject, Options};
use crate::policy::{Hint, Policy};

/// A reference as the live side sees it.
#[derive(Clone, Copy)]
pub struct Reference {
    /// The object.
    pub object: NewObject,
    /// The session that uses it.
    pub session: Option<Session>,
}

/// A policy with a table of its own.
pub struct PolicyCopy {
    evictor: Evictor,
    /// The last session: usually also the next one.
    session: Slot,
    /// Units found in this window.
    found: u64,
    /// Units found in all.
    total: u64,
    /// Hit ratio, smoothed over windows.
    rate: f64,
}

/// Weight of the last window in the hit ratio.
const WEIGHT: f64 = 0.4;

impl PolicyCopy {
    /// A copy for up to `limit` objects.
    pub fn new(policy: Box<dyn Policy>, limit: usize, leaf_first: bool) -> Result<PolicyCopy> {
        let objects = Objects::new(limit, leaf_first, policy.wants_facts())?;
        let options = Options { max_objects: limit, remember: 0, ..Options::default() };
        let evictor = Evictor::with(policy, objects, String::new(), &options)?;
        Ok(PolicyCopy { evictor, session: NONE, found: 0, total: 0, rate: 0.0 })
    }

    /// Continues from another copy of the same policy, without its objects.
    pub fn succeed(&mut self, mut before: PolicyCopy) {
        if let Some(lessons) = before.policy().lessons(false) {
            self.policy().learn(lessons);
        }
        (self.found, self.total, self.rate) = (before.found, before.total, before.rate);
    }

    /// The policy, to take its learned state.
    pub fn policy(&mut self) -> &mut dyn Policy {
        &mut *self.evictor.policy
    }

    /// Bytes used so far, without the evictor's history.
    pub fn used_bytes(&self) -> u64 {
        let Evictor { objects, policy, .. } = &self.evictor;
        objects.used_bytes() + policy.used_bytes(objects)
    }

    /// Changes the capacity.
    pub fn set_capacity(&mut self, units: u64) {
        self.evictor.set_capacity(units);
    }

    /// The smoothed hit ratio.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// Units found in all.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The slot of a session in this table, with the live side's row.
    fn copy_session(&mut self, session: Option<&Session>) -> Slot {
        let Some(known) = session else { return NONE };
        let sessions = &mut self.evictor.objects.sessions;
        if sessions.of(self.session).is_none_or(|row| row.id != known.id) {
            self.session = sessions.get_or_add(known.id);
        }
        sessions.learn(self.session, known);
        self.session
    }

    /// An object was used; it is admitted if it is missing.
    pub fn reference(&mut self, seen: &Reference, now: i64) {
        let NewObject { id, parent, .. } = seen.object;
        if self.lookup(id, seen.session.as_ref(), now).is_none() {
            self.admit(seen, now);
        }
        if let Some(parent) = parent {
            self.set_parent(id, parent);
        }
    }

    /// An id was looked up. Returns its size if the copy has it.
    pub fn lookup(&mut self, id: u64, session: Option<&Session>, now: i64) -> Option<u32> {
        let session = self.copy_session(session);
        let e = &mut self.evictor;
        let Some(slot) = e.objects.find(id) else {
            e.policy.miss(&e.objects, id, now);
            return None;
        };
        let units = e.objects.node(slot).units;
        self.found += u64::from(units);
        self.total += u64::from(units);
        e.use_slot(slot, session, now);
        Some(units)
    }

    /// Admits a missing object, evicting for it; updates size and facts of a present one.
    pub fn admit(&mut self, seen: &Reference, now: i64) {
        let NewObject { id, units, facts, .. } = seen.object;
        if self.evictor.objects.find(id).is_some() {
            self.resize(id, units as u32);
            return self.facts_changed(id, &facts, now);
        }
        let Some(slot) = self.make_room(seen, now) else { return };
        self.evictor.policy.insert(&mut self.evictor.objects, slot, now);
    }

    /// Takes over a resident object with its uses.
    pub fn adopt(&mut self, seen: &Reference, uses: u16, now: i64) {
        let Some(slot) = self.make_room(seen, now) else { return };
        self.evictor.objects.node_mut(slot).hits = uses;
        self.evictor.policy.adopt(&mut self.evictor.objects, slot, uses, now);
    }

    /// Sets the parent of an object. The parent may be inserted later: a path is used from its end
    /// on.
    pub fn set_parent(&mut self, id: u64, parent: u64) {
        let objects = &mut self.evictor.objects;
        if !objects.leaf_first() {
            return;
        }
        let Some(slot) = objects.find(id) else { return };
        if objects.node(slot).parent == NONE {
            let parent = objects.find(parent).unwrap_or(NONE);
            objects.attach(slot, parent);
        }
    }

    /// Makes room for a missing object and returns its slot, without notifying the policy.
    fn make_room(&mut self, seen: &Reference, now: i64) -> Option<Slot> {
        let NewObject { id, parent, units, facts } = seen.object;
        let e = &mut self.evictor;
        let capacity = e.options.capacity_units;
        if units > capacity {
            return None;
        }
        let parent = parent.and_then(|id| e.objects.find(id)).unwrap_or(NONE);
        // The parent is in use, and must not be evicted for its child.
        let used = parent != NONE && e.objects.acquire(parent).is_ok();
        while e.objects.units() + units > capacity || e.objects.len() == e.objects.limit() {
            let Some(slot) = e.policy.victim(&mut e.objects, now) else { break };
            e.take_out(slot, true, now);
        }
        // It was acquired above, so it is still there to be released.
        if used && e.objects.release(parent).unwrap_or(false) {
            e.freed(parent, now);
        }
        if e.objects.units() + units > capacity {
            return None;
        }
        let slot = e.objects.insert(id, parent, units, &facts).ok()?;
        let session = self.copy_session(seen.session.as_ref());
        self.evictor.objects.set_session(slot, session);
        Some(slot)
    }

    /// The owner removed an object.
    pub fn remove(&mut self, id: u64, now: i64) {
        if let Some(slot) = self.evictor.objects.find(id)
            && self.evictor.objects.node(slot).children == 0
        {
            self.evictor.take_out(slot, false, now);
        }
    }

    /// Changes an object's size. An excess is evicted at the next insert.
    pub fn resize(&mut self, id: u64, units: u32) {
        let e = &mut self.evictor;
        let Some(slot) = e.objects.find(id) else { return };
        if e.objects.node(slot).units != units {
            e.policy.resize(&mut e.objects, slot, units);
        }
    }

    /// Replaces the facts of an object.
    pub fn facts_changed(&mut self, id: u64, facts: &Facts, now: i64) {
        let Some(slot) = self.evictor.objects.find(id) else { return };
        if self.evictor.objects.facts(slot) != *facts {
            self.evictor.set_facts(slot, facts, now);
        }
    }

    /// The engine gave a hint about an object, for a session.
    pub fn hint(&mut self, id: u64, session: Option<&Session>, hint: &Hint, now: i64) {
        self.copy_session(session);
        if let Some(slot) = self.evictor.objects.find(id) {
            self.evictor.hint_slot(slot, hint, now);
        }
    }

    /// Ends a window in which `looked_up` units were looked up; returns the smoothed hit ratio.
    pub fn close_window(&mut self, looked_up: u64) -> f64 {
        let share = self.found as f64 / looked_up.max(1) as f64;
        let first = self.rate == 0.0;
        self.rate = if first { share } else { self.rate + WEIGHT * (share - self.rate) };
        self.found = 0;
        self.rate
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.evictor.objects.len()
    }

    /// Checks the evictor; for tests.
    pub fn check(&self) -> Result<()> {
        self.evictor.check()
    }
}
