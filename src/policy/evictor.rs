//! One policy at work on a table of objects: what an engine, a store or the lab
//! calls. Every call is O(1) or O(log n) an object; nothing is scanned.

use crate::base::clock::Clock;
use crate::base::spec::Spec;
use crate::base::status::Result;
use crate::fail;
use crate::meta::cost::Cost;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::{Facts, Objects};
use crate::policy::Policy;
use crate::policy::advice::Advice;
use crate::policy::batch::Scratch;
use crate::policy::evict::Chosen;
use crate::policy::ghosts::Ghosts;
use crate::policy::handover::hand_over;
use crate::policy::log::Log;
use crate::policy::lookup::Sorted;
use crate::policy::metrics::Metrics;
use crate::policy::registry::{self, Setting};

/// Most objects of one evictor.
pub const MAX_OBJECTS: usize = 1 << 28;
/// What the table holds unless told otherwise.
pub const DEFAULT_OBJECTS: usize = 1 << 20;
/// Most ids in one call.
pub const MAX_BATCH: usize = 1 << 24;

/// How to open one.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Most objects at once.
    pub max_objects: usize,
    /// What fits, in units; 0 = not known.
    pub capacity_units: u64,
    /// The engine can use what lies behind a hole: objects leave in any order.
    /// Without it those that continue an object leave before it.
    pub holes: bool,
    /// Evictions that the log keeps.
    pub log_entries: usize,
    /// Evicted ids that are remembered, to tell what is computed again.
    pub remember: usize,
    /// What recomputing costs.
    pub cost: Cost,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            max_objects: DEFAULT_OBJECTS,
            capacity_units: 0,
            holes: false,
            log_entries: 0,
            remember: DEFAULT_OBJECTS,
            cost: Cost::default(),
        }
    }
}

/// Who asks: all optional, zeros are unknown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Who {
    /// The session.
    pub session: Option<u64>,
    /// Its tenant.
    pub tenant: u32,
    /// Its class, 0 leaves first; None = as before, at first 1.
    pub priority: Option<u8>,
    /// Tokens of the whole request.
    pub length: u32,
    /// Tokens it can have.
    pub max_length: u32,
    /// Tokens of one object of its path; the last may have fewer.
    pub tokens_each: u32,
}

/// An object to be inserted.
#[derive(Clone, Copy, Debug, Default)]
pub struct New {
    /// Its id.
    pub id: u64,
    /// The id of the object that it continues; it may come later.
    pub parent: Option<u64>,
    /// Its size.
    pub units: u64,
    /// What some policies want to know.
    pub facts: Facts,
}

impl New {
    /// An object of a table, as it would be inserted into another one.
    pub fn of(objects: &Objects, slot: Slot) -> New {
        let node = objects.node(slot);
        let parent = (node.parent != NONE).then(|| objects.node(node.parent).id);
        New { id: node.id, parent, units: u64::from(node.units), facts: objects.facts(slot) }
    }
}

/// A policy and its table.
pub struct Evictor {
    pub(super) objects: Objects,
    pub(super) policy: Box<dyn Policy>,
    pub(super) history: Ghosts,
    pub(super) options: Options,
    pub(super) clock: Clock,
    pub(super) slots: Vec<Slot>,
    pub(super) sorted: Sorted,
    pub(super) chosen: Vec<Chosen>,
    pub(super) scratch: Scratch,
    spec: String,
    last_ns: i64,
    pub(super) stamp: i64,
    /// What is counted.
    pub metrics: Metrics,
    /// The last evictions.
    pub log: Log,
    /// What a scheduler is advised.
    pub advice: Advice,
}

impl Evictor {
    /// Opens one with the policy that `spec` describes.
    pub fn open(spec: &str, options: &Options) -> Result<Evictor> {
        let parsed = Spec::parse(spec)?;
        if options.max_objects == 0 || options.max_objects > MAX_OBJECTS {
            fail!(Limit, "max_objects is {}, allowed is 1 to {MAX_OBJECTS}", options.max_objects);
        }
        if options.remember > MAX_OBJECTS {
            fail!(Limit, "remember is {}, at most {MAX_OBJECTS} is allowed", options.remember);
        }
        let policy = registry::make(&parsed, &setting(options))?;
        let objects = Objects::new(options.max_objects, !options.holes, policy.wants_facts())?;
        Evictor::with(policy, objects, parsed.to_string(), options)
    }

    /// An evictor of this policy over an empty table.
    pub(super) fn with(
        policy: Box<dyn Policy>,
        objects: Objects,
        spec: String,
        options: &Options,
    ) -> Result<Evictor> {
        Ok(Evictor {
            objects,
            policy,
            history: Ghosts::new(options.remember)?,
            options: *options,
            clock: Clock::real(),
            slots: Vec::new(),
            sorted: Sorted::default(),
            chosen: Vec::new(),
            scratch: Scratch::default(),
            spec,
            last_ns: i64::MIN,
            stamp: i64::MIN,
            metrics: Metrics::default(),
            log: Log::new(options.log_entries)?,
            advice: Advice::default(),
        })
    }

    /// The spec, in canonical form.
    pub fn spec(&self) -> &str {
        &self.spec
    }

    /// The policy's name.
    pub fn name(&self) -> &'static str {
        self.policy.name()
    }

    /// Remembers so many evicted ids for each object that there ever was at once, and no more.
    pub fn bound_history(&mut self, each: usize) {
        self.history.bound(each.saturating_mul(self.objects.most().max(1)));
    }

    /// Bytes of all its tables that were used so far.
    pub fn used_bytes(&self) -> u64 {
        let beside = self.history.used_bytes() + self.policy.used_bytes(&self.objects);
        self.objects.used_bytes() + beside
    }

    /// The table.
    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    /// The policy, to be looked at.
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// The time of the last call that gave one.
    pub fn now_ns(&self) -> i64 {
        self.last_ns
    }

    /// What it was opened with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Accepts the caller's time, or takes the machine's (0). An error when it
    /// lies before an earlier one; `count` stamps after the result are taken.
    #[inline]
    pub(super) fn tick(&mut self, now_ns: i64, count: usize) -> Result<i64> {
        let known = now_ns != 0 && now_ns >= self.last_ns && now_ns <= i64::MAX / 2;
        let now = if known && now_ns >= i64::MIN / 2 { now_ns } else { self.odd_time(now_ns)? };
        self.last_ns = now;
        let first = now.max(self.stamp.saturating_add(1));
        self.stamp = first + count as i64;
        self.objects.sessions.asking = NONE;
        Ok(first)
    }

    /// The machine's time, or what is wrong with the caller's.
    #[cold]
    fn odd_time(&self, now_ns: i64) -> Result<i64> {
        if now_ns == 0 {
            let machine = i64::try_from(self.clock.now_ns()).unwrap_or(i64::MAX / 2);
            return Ok(machine.min(i64::MAX / 2).max(self.last_ns));
        }
        self.check_time(now_ns)?;
        fail!(Limit, "now_ns is {now_ns}, beyond what can be counted on from");
    }

    /// Whether the caller's time would be accepted.
    pub fn check_time(&self, now_ns: i64) -> Result<()> {
        if now_ns != 0 && now_ns < self.last_ns {
            let by = self.last_ns.abs_diff(now_ns);
            fail!(Invalid, "the clock went back by {by} ns: now_ns is {now_ns}");
        }
        Ok(())
    }

    /// The caller's time, or the last one told if that is later.
    pub(super) fn not_before(&self, now_ns: i64) -> i64 {
        if now_ns == 0 { 0 } else { now_ns.max(self.last_ns) }
    }

    /// Makes a change; when it fails the time is what it was before, as if the
    /// call had never come.
    pub(super) fn in_time<R>(
        &mut self,
        change: impl FnOnce(&mut Evictor) -> Result<R>,
    ) -> Result<R> {
        let before = (self.last_ns, self.stamp);
        let done = change(self);
        if done.is_err() {
            (self.last_ns, self.stamp) = before;
        }
        done
    }

    pub(super) fn begin(&mut self, now: i64, ids: usize) -> Result<i64> {
        if ids > MAX_BATCH {
            fail!(Limit, "{ids} ids in one call, the limit is {MAX_BATCH}");
        }
        if self.slots.try_reserve(ids.saturating_sub(self.slots.len())).is_err()
            || !self.sorted.reserve(ids)
        {
            fail!(NoMem, "no memory for a batch of {ids} ids");
        }
        self.tick(now, ids)
    }

    #[inline]
    pub(super) fn use_slot(&mut self, slot: Slot, session: Slot, stamp: i64) {
        self.objects.count_use(slot, session);
        self.policy.touch(&mut self.objects, slot, stamp);
    }

    /// Fills `slots`; how many from the start on are there.
    pub(super) fn find_all(&mut self, ids: &[u64]) -> usize {
        self.slots.clear();
        self.slots.resize(ids.len(), NONE);
        self.objects.find_many(ids, &mut self.slots);
        self.slots.iter().position(|&slot| slot == NONE).unwrap_or(ids.len())
    }

    /// Notes the session of a call; its slot.
    pub(super) fn see_session(&mut self, now: i64, who: &Who) -> Slot {
        let Some(id) = who.session else { return NONE };
        let slot = self.objects.sessions.get_or_add(id);
        self.objects.sessions.asking = slot;
        self.note_who(slot, who);
        if let Some(row) = self.objects.sessions.of_mut(slot) {
            row.active_ns = now;
            row.turns = row.turns.saturating_add(1);
        }
        slot
    }

    /// Inserts objects, all or none, each after the one that it continues. The
    /// first counts as used last, as in a lookup: what continues an object is
    /// never younger.
    pub fn insert(&mut self, now: i64, who: &Who, new: &[New]) -> Result<()> {
        self.in_time(|this| this.insert_all(now, who, new))
    }

    fn insert_all(&mut self, now: i64, who: &Who, new: &[New]) -> Result<()> {
        let stamp = self.begin(now, new.len())?;
        self.slots.clear();
        for one in new {
            match self.enter(one, NONE) {
                Ok(slot) => self.slots.push(slot),
                Err(error) => {
                    let entered = self.slots.iter().rev();
                    entered.for_each(|&slot| self.objects.remove(slot));
                    return Err(error);
                }
            }
        }
        // Not before all are in: what is adopted cannot be taken back.
        for &slot in &self.slots {
            self.objects.adopt(slot);
        }
        let session = self.see_session_quietly(who);
        for (i, slot) in self.slots.iter().rev().enumerate() {
            self.objects.set_session(*slot, session);
            self.policy.insert(&mut self.objects, *slot, stamp + i as i64);
        }
        self.metrics.counts.inserts += new.len() as u64;
        if !self.history.is_empty() {
            for one in new {
                self.history.remove(one.id);
            }
        }
        Ok(())
    }

    fn note_who(&mut self, slot: Slot, who: &Who) {
        if let Some(row) = self.objects.sessions.of_mut(slot) {
            row.tenant = who.tenant;
            row.priority = who.priority.unwrap_or(row.priority);
            row.length = who.length.max(row.length);
            row.max_length = who.max_length.max(row.max_length);
        }
    }

    /// The slot of a session that may not have been looked up with. This is no turn
    /// of one that is known.
    pub(super) fn see_session_quietly(&mut self, who: &Who) -> Slot {
        let Some(id) = who.session else { return NONE };
        match self.objects.sessions.find(id) {
            Some(slot) => {
                self.objects.sessions.asking = slot;
                self.note_who(slot, who);
                slot
            }
            None => self.see_session(self.last_ns, who),
        }
    }

    /// Adds an object to the table; the policy is not told yet.
    fn enter(&mut self, new: &New, session: Slot) -> Result<Slot> {
        let slot = self.objects.insert_behind(new.id, new.parent, new.units, &new.facts)?;
        self.objects.set_session(slot, session);
        Ok(slot)
    }

    pub(super) fn insert_one(&mut self, new: &New, session: Slot, stamp: i64) -> Result<()> {
        let slot = self.enter(new, session)?;
        self.objects.adopt(slot);
        self.policy.insert(&mut self.objects, slot, stamp);
        Ok(())
    }

    /// Replaces the facts of an object where they are kept.
    pub(super) fn set_facts(&mut self, slot: Slot, facts: &Facts, now: i64) {
        if let Some(known) = self.objects.facts_mut(slot) {
            let old = std::mem::replace(known, *facts);
            self.policy.facts_changed(&mut self.objects, slot, &old, now);
        }
    }

    /// Takes an object out of policy and table.
    pub(super) fn take_out(&mut self, slot: Slot, evicted: bool, now: i64) {
        let parent = self.objects.detach(slot);
        self.policy.remove(&mut self.objects, slot, evicted, now);
        self.objects.remove(slot);
        if let Some(parent) = parent {
            self.freed(parent, now);
        }
    }

    /// An object may leave that could not: back into the order, if it was out.
    pub(super) fn freed(&mut self, slot: Slot, now: i64) {
        let node = self.objects.node(slot);
        if node.is_held() && !node.is_chosen() {
            self.policy.put_back(&mut self.objects, slot, now);
        }
    }

    pub(super) fn slot_of(&self, id: u64) -> Result<Slot> {
        match self.objects.find(id) {
            Some(slot) => Ok(slot),
            None => fail!(NotFound, "object {id} is not in the table"),
        }
    }

    /// Changes what fits.
    pub fn set_capacity(&mut self, units: u64) {
        self.options.capacity_units = units;
        self.policy.set_capacity(units);
    }

    /// Goes on with another policy, which is told of every object with its last
    /// use and its uses, and of what the one before learned if it is of its kind.
    pub fn switch(&mut self, spec: &str) -> Result<()> {
        let parsed = Spec::parse(spec)?;
        let mut policy = registry::make(&parsed, &setting(&self.options))?;
        if policy.wants_facts() {
            self.objects.keep_facts()?;
        }
        hand_over(&mut self.objects, &mut *self.policy, true, &mut *policy, self.stamp)?;
        self.policy = policy;
        self.spec = parsed.to_string();
        Ok(())
    }

    /// Checks tables and the policy's structures; for tests.
    pub fn check(&self) -> Result<()> {
        let units: u64 = self.objects.slots().map(|s| u64::from(self.objects.node(s).units)).sum();
        if units != self.objects.units() || self.objects.slots().count() != self.objects.len() {
            fail!(State, "the table counts {} units, has {units}", self.objects.units());
        }
        self.policy.check(&self.objects)
    }
}

fn setting(options: &Options) -> Setting {
    Setting {
        max_objects: options.max_objects,
        capacity_units: options.capacity_units,
        holes: options.holes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use crate::policy::testing::evict;

    fn chain(spec: &str, ids: std::ops::Range<u64>) -> Evictor {
        let options = Options { max_objects: 64, remember: 64, ..Options::default() };
        let mut e = Evictor::open(spec, &options).expect("a known policy");
        for id in ids.clone() {
            let parent = (id > ids.start).then(|| id - 1);
            let new = New { id, parent, units: 1, ..New::default() };
            e.insert(1, &Who::default(), &[new]).expect("room");
        }
        e
    }

    #[test]
    fn what_continues_an_object_leaves_first_whichever_came_first() {
        for entry in registry::ENTRIES {
            let options = Options { max_objects: 64, remember: 64, ..Options::default() };
            let mut e = Evictor::open(entry.name, &options).expect("a known policy");
            // The end of a path first, then its beginning, then what joins them.
            for (id, parent) in [(3, Some(2)), (4, Some(3)), (1, None), (2, Some(1))] {
                let new = New { id, parent, units: 1, ..New::default() };
                e.insert(1, &Who::default(), &[new]).expect("room");
                e.check().expect("sound");
            }
            assert_eq!(evict(&mut e, 9, 3), [4, 3, 2], "{}", entry.name);
            assert_eq!(evict(&mut e, 9, 3), [1], "{}", entry.name);
        }
    }

    #[test]
    fn a_batch_that_is_refused_leaves_who_waits_for_it_as_it_was() {
        let options = Options { max_objects: 8, remember: 8, ..Options::default() };
        let mut e = Evictor::open("lru", &options).expect("a known policy");
        let new = |id, parent| New { id, parent, units: 1, ..New::default() };
        e.insert(1, &Who::default(), &[new(2, Some(1))]).expect("room");
        e.insert(1, &Who::default(), &[new(1, None), new(2, None)]).expect_err("2 is there");
        assert!(e.objects().find(1).is_none());
        e.insert(1, &Who::default(), &[new(1, None)]).expect("room");
        assert_eq!(evict(&mut e, 9, 1), [2]);
    }

    #[test]
    fn a_prefix_leaves_from_its_end() {
        let mut e = chain("lru", 10..14);
        assert_eq!(evict(&mut e, 2, 2), [13, 12]);
        assert_eq!(e.lookup(3, &Who::default(), &[10, 11, 12, 13], &mut []).expect("ids"), 2);
        assert_eq!(e.metrics.counts.evicted_references, 2);
        assert_eq!(evict(&mut e, 4, 0), [] as [u64; 0]);
    }

    #[test]
    fn what_is_held_or_pinned_stays_and_a_shortfall_is_told() {
        let mut e = chain("lru", 1..4);
        e.acquire(&[2]).expect("there");
        e.pin(&[3], true).expect("there");
        let mut out = Vec::new();
        let outcome = e.evict(2, 5, &mut out).expect("a time");
        assert_eq!((out.len(), outcome.freed_units, outcome.shortfall_units), (0, 0, 5));
        e.pin(&[3], false).expect("there");
        assert_eq!(evict(&mut e, 3, 5), [3]);
        e.release(&[2]).expect("held");
        assert_eq!(evict(&mut e, 4, 5), [2, 1]);
    }

    #[test]
    fn no_victim_is_superfluous() {
        let options = Options { max_objects: 8, ..Options::default() };
        let mut e = Evictor::open("lru", &options).expect("a known policy");
        for (id, units) in [(1, 1), (2, 1), (3, 10), (4, 1)] {
            e.insert(id as i64, &Who::default(), &[New { id, units, ..New::default() }]).expect("");
        }
        let mut seen = Vec::new();
        e.preview(8, 10, &mut seen).expect("a time");
        assert_eq!(seen, [crate::policy::evict::Victim { id: 3, units: 10 }]);
        assert_eq!(evict(&mut e, 9, 10), [3]);
        assert_eq!(evict(&mut e, 9, 3), [1, 2, 4]);
    }

    #[test]
    fn errors_change_nothing() {
        let mut e = chain("fifo", 1..4);
        let who = Who::default();
        let new = |id| New { id, units: 1, ..New::default() };
        assert!(e.insert(5, &who, &[new(7), new(8), new(2)]).is_err());
        assert_eq!((e.objects().len(), e.objects().find(7)), (3, None));
        // Neither did the time go on.
        assert_eq!(e.lookup(4, &who, &[1], &mut []).expect("a time"), 1);
        assert_eq!(e.lookup(3, &who, &[1], &mut []).expect_err("back").status(), Status::Invalid);
        assert_eq!(e.remove(5, &[2]).expect_err("has 3").status(), Status::State);
        assert_eq!(e.remove(5, &[3, 9]).expect_err("no 9").status(), Status::NotFound);
        assert_eq!(e.remove(5, &[3, 3]).expect_err("twice").status(), Status::Invalid);
        e.remove(4, &[2, 3]).expect("a tail");
        assert_eq!(e.acquire(&[1, 99]).expect_err("no 99").status(), Status::NotFound);
        assert_eq!(evict(&mut e, 7, 1), [1]);
        assert_eq!(
            Evictor::open("lur", &Options::default()).err().map(|e| e.status()),
            Some(Status::Spec)
        );
    }

    #[test]
    fn switching_keeps_the_order() {
        let mut e = chain("lru", 1..2);
        for id in 10..15 {
            e.insert(2, &Who::default(), &[New { id, units: 1, ..New::default() }]).expect("room");
        }
        e.touch(3, &Who::default(), &[10]).expect("there");
        e.switch("fifo").expect("known");
        assert_eq!(e.name(), "fifo");
        assert_eq!(evict(&mut e, 4, 6), [1, 11, 12, 13, 14, 10]);
    }
}
