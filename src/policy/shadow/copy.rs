//! A cache that holds nothing: what a policy would have kept, had it decided.
//!
//! It sees what the live side sees, less references and pins: who asks (session,
//! tenant, class, lengths, what is expected), facts, sizes, hints. Of its own it
//! has a table of objects and one of sessions, whose rows follow the live ones at
//! each use. What it holds and the live side does not, is not resized or hinted
//! at: nobody says so of what is not there.

use crate::base::status::Result;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::{Facts, Objects};
use crate::meta::sessions::Session;
use crate::policy::{Hint, Policy};

/// A reference as the live side saw it.
#[derive(Clone, Copy)]
pub struct Seen {
    /// What.
    pub id: u64,
    /// What it continues, if that is known.
    pub parent: Option<u64>,
    /// Its size.
    pub units: u32,
    /// What is known of it.
    pub facts: Facts,
    /// Who asks.
    pub session: Option<Session>,
}

/// One policy with a table of its own.
pub struct Copy {
    policy: Box<dyn Policy>,
    objects: Objects,
    capacity: u64,
    /// The session that was seen last: mostly the next one too.
    session: Slot,
    /// Units found in this window.
    found: u64,
    /// Units found since it was made.
    total: u64,
    /// Share found, over windows.
    rate: f64,
}

/// What a window weighs in the share over windows.
const WEIGHT: f64 = 0.4;

impl Copy {
    /// A copy for up to `limit` objects.
    pub fn new(policy: Box<dyn Policy>, limit: usize, leaf_first: bool) -> Result<Copy> {
        let objects = Objects::new(limit, leaf_first, policy.wants_facts())?;
        let session = NONE;
        Ok(Copy { policy, objects, capacity: 0, session, found: 0, total: 0, rate: 0.0 })
    }

    /// Goes on where another of the same policy was, but for its objects.
    pub fn succeed(&mut self, mut before: Copy) {
        if let Some(lessons) = before.policy.lessons(false) {
            self.policy.learn(lessons);
        }
        (self.found, self.total, self.rate) = (before.found, before.total, before.rate);
    }

    /// Its policy, to be asked for what it learned.
    pub fn policy(&mut self) -> &mut dyn Policy {
        &mut *self.policy
    }

    /// Bytes that it has used so far.
    pub fn used_bytes(&self) -> u64 {
        self.objects.used_bytes() + self.policy.used_bytes(&self.objects)
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

    /// Units found since it was made.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The slot that a session has here, its row as the live side's.
    fn know(&mut self, session: Option<&Session>) -> Slot {
        let Some(known) = session else { return NONE };
        let sessions = &mut self.objects.sessions;
        if sessions.of(self.session).is_none_or(|row| row.id != known.id) {
            self.session = sessions.get_or_add(known.id);
        }
        sessions.learn(self.session, known);
        self.session
    }

    /// An object was used; a copy that does not have it takes it in.
    pub fn see(&mut self, seen: &Seen, now: i64) {
        if self.ask(seen.id, seen.session.as_ref(), now).is_none() {
            self.admit(seen, now);
        }
        if let Some(parent) = seen.parent {
            self.continues(seen.id, parent);
        }
    }

    /// An id was asked for. Its size, if the copy has it.
    pub fn ask(&mut self, id: u64, session: Option<&Session>, now: i64) -> Option<u32> {
        let session = self.know(session);
        let Some(slot) = self.objects.find(id) else {
            self.policy.miss(&self.objects, id, now);
            return None;
        };
        let units = self.objects.node(slot).units;
        self.found += u64::from(units);
        self.total += u64::from(units);
        self.objects.count_use(slot, session);
        self.policy.touch(&mut self.objects, slot, now);
        Some(units)
    }

    /// Takes in what it does not have, making room; of what it has, notes what is
    /// told of it now.
    pub fn admit(&mut self, seen: &Seen, now: i64) {
        if self.objects.find(seen.id).is_some() {
            self.resize(seen.id, seen.units);
            return self.facts_changed(seen.id, &seen.facts, now);
        }
        let Some(slot) = self.enter(seen, now) else { return };
        self.policy.insert(&mut self.objects, slot, now);
    }

    /// Takes in what the live side has, with its uses.
    pub fn adopt(&mut self, seen: &Seen, uses: u16, now: i64) {
        let Some(slot) = self.enter(seen, now) else { return };
        self.objects.node_mut(slot).hits = uses;
        self.policy.adopt(&mut self.objects, slot, uses, now);
    }

    /// One object continues another, which may have come after it: a path is used
    /// from its end on.
    pub fn continues(&mut self, id: u64, parent: u64) {
        if !self.objects.leaf_first() {
            return;
        }
        let Some(slot) = self.objects.find(id) else { return };
        if self.objects.node(slot).parent == NONE {
            let parent = self.objects.find(parent).unwrap_or(NONE);
            self.objects.attach(slot, parent);
        }
    }

    /// Room for an object that is not there, and its slot; the policy is not told
    /// yet.
    fn enter(&mut self, seen: &Seen, now: i64) -> Option<Slot> {
        let units = u64::from(seen.units);
        if units > self.capacity {
            return None;
        }
        let parent = seen.parent.and_then(|id| self.objects.find(id)).unwrap_or(NONE);
        // The prefix that it continues is in use, and must not make room for it.
        let used = parent != NONE && self.objects.acquire(parent).is_ok();
        while self.objects.units() + units > self.capacity
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
        if self.objects.units() + units > self.capacity {
            return None;
        }
        let slot = self.objects.insert(seen.id, parent, units, &seen.facts).ok()?;
        let session = self.know(seen.session.as_ref());
        self.objects.set_session(slot, session);
        Some(slot)
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
        if let Some(slot) = self.objects.find(id)
            && self.objects.node(slot).children == 0
        {
            self.drop_slot(slot, false, now);
        }
    }

    /// An object's size changed. What is too much by that leaves when the next
    /// one comes.
    pub fn resize(&mut self, id: u64, units: u32) {
        let Some(slot) = self.objects.find(id) else { return };
        if self.objects.node(slot).units != units {
            self.policy.resize(&mut self.objects, slot, units);
        }
    }

    /// Facts of an object are these now.
    pub fn facts_changed(&mut self, id: u64, facts: &Facts, now: i64) {
        let Some(slot) = self.objects.find(id) else { return };
        let Some(known) = self.objects.facts_mut(slot).filter(|known| **known != *facts) else {
            return;
        };
        let old = std::mem::replace(known, *facts);
        self.policy.facts_changed(&mut self.objects, slot, &old, now);
    }

    /// The engine said something of an object, for a session.
    pub fn hint(&mut self, id: u64, session: Option<&Session>, hint: &Hint, now: i64) {
        self.know(session);
        let Some(slot) = self.objects.find(id) else { return };
        // As the live side notes it.
        if let (Some(facts), Some((ns, _))) = (self.objects.facts_mut(slot), hint.next_use) {
            facts.next_use_ns = ns;
        }
        self.policy.hint(&mut self.objects, slot, hint, now);
    }

    /// Ends a window in which so many units were asked for; the share found over
    /// windows.
    pub fn close_window(&mut self, asked: u64) -> f64 {
        let share = self.found as f64 / asked.max(1) as f64;
        let first = self.rate == 0.0;
        self.rate = if first { share } else { self.rate + WEIGHT * (share - self.rate) };
        self.found = 0;
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
