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
use crate::policy::evictor::{Evictor, New, Options};
use crate::policy::{Hint, Policy};

/// A reference as the live side saw it.
#[derive(Clone, Copy)]
pub struct Seen {
    /// The object.
    pub object: New,
    /// Who asks.
    pub session: Option<Session>,
}

/// One policy with a table of its own.
pub struct Copy {
    evictor: Evictor,
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
        let options = Options { max_objects: limit, remember: 0, ..Options::default() };
        let evictor = Evictor::with(policy, objects, String::new(), &options)?;
        Ok(Copy { evictor, session: NONE, found: 0, total: 0, rate: 0.0 })
    }

    /// Goes on where another of the same policy was, but for its objects.
    pub fn succeed(&mut self, mut before: Copy) {
        if let Some(lessons) = before.policy().lessons(false) {
            self.policy().learn(lessons);
        }
        (self.found, self.total, self.rate) = (before.found, before.total, before.rate);
    }

    /// Its policy, to be asked for what it learned.
    pub fn policy(&mut self) -> &mut dyn Policy {
        &mut *self.evictor.policy
    }

    /// Bytes that it has used so far.
    pub fn used_bytes(&self) -> u64 {
        let Evictor { objects, policy, .. } = &self.evictor;
        objects.used_bytes() + policy.used_bytes(objects)
    }

    /// What fits.
    pub fn set_capacity(&mut self, units: u64) {
        self.evictor.set_capacity(units);
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
        let sessions = &mut self.evictor.objects.sessions;
        if sessions.of(self.session).is_none_or(|row| row.id != known.id) {
            self.session = sessions.get_or_add(known.id);
        }
        sessions.learn(self.session, known);
        self.session
    }

    /// An object was used; a copy that does not have it takes it in.
    pub fn see(&mut self, seen: &Seen, now: i64) {
        let New { id, parent, .. } = seen.object;
        if self.ask(id, seen.session.as_ref(), now).is_none() {
            self.admit(seen, now);
        }
        if let Some(parent) = parent {
            self.continues(id, parent);
        }
    }

    /// An id was asked for. Its size, if the copy has it.
    pub fn ask(&mut self, id: u64, session: Option<&Session>, now: i64) -> Option<u32> {
        let session = self.know(session);
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

    /// Takes in what it does not have, making room; of what it has, notes what is
    /// told of it now.
    pub fn admit(&mut self, seen: &Seen, now: i64) {
        let New { id, units, facts, .. } = seen.object;
        if self.evictor.objects.find(id).is_some() {
            self.resize(id, units as u32);
            return self.facts_changed(id, &facts, now);
        }
        let Some(slot) = self.enter(seen, now) else { return };
        self.evictor.policy.insert(&mut self.evictor.objects, slot, now);
    }

    /// Takes in what the live side has, with its uses.
    pub fn adopt(&mut self, seen: &Seen, uses: u16, now: i64) {
        let Some(slot) = self.enter(seen, now) else { return };
        self.evictor.objects.node_mut(slot).hits = uses;
        self.evictor.policy.adopt(&mut self.evictor.objects, slot, uses, now);
    }

    /// One object continues another, which may have come after it: a path is used
    /// from its end on.
    pub fn continues(&mut self, id: u64, parent: u64) {
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

    /// Room for an object that is not there, and its slot; the policy is not told
    /// yet.
    fn enter(&mut self, seen: &Seen, now: i64) -> Option<Slot> {
        let New { id, parent, units, facts } = seen.object;
        let e = &mut self.evictor;
        let capacity = e.options.capacity_units;
        if units > capacity {
            return None;
        }
        let parent = parent.and_then(|id| e.objects.find(id)).unwrap_or(NONE);
        // The prefix that it continues is in use, and must not make room for it.
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
        let session = self.know(seen.session.as_ref());
        self.evictor.objects.set_session(slot, session);
        Some(slot)
    }

    /// Its owner gave an object up.
    pub fn forget(&mut self, id: u64, now: i64) {
        if let Some(slot) = self.evictor.objects.find(id)
            && self.evictor.objects.node(slot).children == 0
        {
            self.evictor.take_out(slot, false, now);
        }
    }

    /// An object's size changed. What is too much by that leaves when the next
    /// one comes.
    pub fn resize(&mut self, id: u64, units: u32) {
        let e = &mut self.evictor;
        let Some(slot) = e.objects.find(id) else { return };
        if e.objects.node(slot).units != units {
            e.policy.resize(&mut e.objects, slot, units);
        }
    }

    /// Facts of an object are these now.
    pub fn facts_changed(&mut self, id: u64, facts: &Facts, now: i64) {
        let Some(slot) = self.evictor.objects.find(id) else { return };
        if self.evictor.objects.facts(slot) != *facts {
            self.evictor.set_facts(slot, facts, now);
        }
    }

    /// The engine said something of an object, for a session.
    pub fn hint(&mut self, id: u64, session: Option<&Session>, hint: &Hint, now: i64) {
        self.know(session);
        if let Some(slot) = self.evictor.objects.find(id) {
            self.evictor.hint_slot(slot, hint, now);
        }
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
        self.evictor.objects.len()
    }

    /// Checks its structures; for tests.
    pub fn check(&self) -> Result<()> {
        self.evictor.check()
    }
}
