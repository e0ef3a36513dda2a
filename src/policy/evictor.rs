//! A policy with its table of objects, as an engine, a store and the lab use it. Every call costs
//! O(1) or O(log n) per object; nothing is scanned.

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
use crate::policy::lookup::Partition;
use crate::policy::metrics::Metrics;
use crate::policy::registry::{self, Setting};

/// Most objects of one evictor.
pub const MAX_OBJECTS: usize = 1 << 28;
/// Default size of the table, in objects.
pub const DEFAULT_OBJECTS: usize = 1 << 20;
/// Most ids in one call.
pub const MAX_BATCH: usize = 1 << 24;

/// Options of [`Evictor::open`].
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Most objects at once.
    pub max_objects: usize,
    /// Capacity in units; 0 = unknown.
    pub capacity_units: u64,
    /// The engine can use KV behind a hole: objects are evicted in any order. Otherwise children
    /// are evicted before their parents.
    pub holes: bool,
    /// Evictions that the log keeps.
    pub log_entries: usize,
    /// Evicted ids that are remembered, to count recomputed objects.
    pub remember: usize,
    /// Model of the recompute cost.
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

/// Context of a request. Every field is optional; 0 = unknown.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestContext {
    /// The session.
    pub session: Option<u64>,
    /// Its tenant.
    pub tenant: u32,
    /// Its class; 0 is evicted first. None = unchanged, at first 1.
    pub priority: Option<u8>,
    /// Tokens of the whole request.
    pub length: u32,
    /// Most tokens that the request can have.
    pub max_length: u32,
    /// Tokens of one object of the path; the last may have fewer.
    pub tokens_each: u32,
}

/// An object to insert.
#[derive(Clone, Copy, Debug, Default)]
pub struct NewObject {
    /// Its id.
    pub id: u64,
    /// Id of the object that it continues; that one may be inserted later.
    pub parent: Option<u64>,
    /// Its size in units.
    pub units: u64,
    /// Facts that some policies use.
    pub facts: Facts,
}

impl NewObject {
    /// An object of a table, as it would be inserted into another one.
    pub fn of(objects: &Objects, slot: Slot) -> NewObject {
        let node = objects.node(slot);
        let parent = (node.parent != NONE).then(|| objects.node(node.parent).id);
        NewObject { id: node.id, parent, units: u64::from(node.units), facts: objects.facts(slot) }
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
    pub(super) partition: Partition,
    pub(super) chosen: Vec<Chosen>,
    pub(super) scratch: Scratch,
    spec: String,
    last_ns: i64,
    pub(super) stamp: i64,
    /// Counters.
    pub metrics: Metrics,
    /// The last evictions.
    pub log: Log,
    /// Batch size advice for a scheduler.
    pub advice: Advice,
}

impl Evictor {
    /// Opens an evictor with the policy that `spec` describes.
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

    /// An evictor with this policy and an empty table.
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
            partition: Partition::default(),
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

    /// Limits the remembered ids to `each` for every object of the table's peak size.
    pub fn bound_history(&mut self, each: usize) {
        self.history.bound(each.saturating_mul(self.objects.most().max(1)));
    }

    /// Bytes of all tables used so far.
    pub fn used_bytes(&self) -> u64 {
        let beside = self.history.used_bytes() + self.policy.used_bytes(&self.objects);
        self.objects.used_bytes() + beside
    }

    /// The table of objects.
    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    /// The policy, read only.
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// Time of the last call that passed one.
    pub fn now_ns(&self) -> i64 {
        self.last_ns
    }

    /// The options of `open`.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Checks the caller's time, or reads the machine's (0). Fails if the time is before an earlier
    /// one. Reserves `count` stamps after the result.
    #[inline]
    pub(super) fn tick(&mut self, now_ns: i64, count: usize) -> Result<i64> {
        let known = now_ns != 0 && now_ns >= self.last_ns && now_ns <= i64::MAX / 2;
        let now = if known && now_ns >= i64::MIN / 2 { now_ns } else { self.machine_time(now_ns)? };
        self.last_ns = now;
        let first = now.max(self.stamp.saturating_add(1));
        self.stamp = first + count as i64;
        self.objects.sessions.current = NONE;
        Ok(first)
    }

    /// The machine's time, or the error of the caller's.
    #[cold]
    fn machine_time(&self, now_ns: i64) -> Result<i64> {
        if now_ns == 0 {
            let machine = i64::try_from(self.clock.now_ns()).unwrap_or(i64::MAX / 2);
            return Ok(machine.min(i64::MAX / 2).max(self.last_ns));
        }
        self.check_time(now_ns)?;
        fail!(Limit, "now_ns is {now_ns}, allowed is -2^62 to 2^62 - 1");
    }

    /// Whether the caller's time would be accepted.
    pub fn check_time(&self, now_ns: i64) -> Result<()> {
        if now_ns != 0 && now_ns < self.last_ns {
            let by = self.last_ns.abs_diff(now_ns);
            fail!(
                Invalid,
                "now_ns is {now_ns}, {by} ns before an earlier call: time must not go back"
            );
        }
        Ok(())
    }

    /// The caller's time, or the last known one if that is later.
    pub(super) fn at_least_last(&self, now_ns: i64) -> i64 {
        if now_ns == 0 { 0 } else { now_ns.max(self.last_ns) }
    }

    /// Runs a change. If it fails, the clock is reset, as if the call had not happened.
    pub(super) fn restoring_clock<R>(
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
            || !self.partition.reserve(ids)
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

    /// Prefetches the memory in which the next calls will look ids up.
    #[inline]
    pub fn prefetch(&self, ids: &[u64]) {
        ids.iter().for_each(|&id| self.objects.prefetch_id(id));
    }

    /// Fills `slots`; returns the number of leading ids that are in the table.
    pub(super) fn find_all(&mut self, ids: &[u64]) -> usize {
        self.slots.clear();
        self.slots.resize(ids.len(), NONE);
        self.objects.find_many(ids, &mut self.slots);
        self.slots.iter().position(|&slot| slot == NONE).unwrap_or(ids.len())
    }

    /// Records the session of a call; returns its slot.
    pub(super) fn note_session(&mut self, now: i64, context: &RequestContext) -> Slot {
        let Some(id) = context.session else { return NONE };
        let slot = self.objects.sessions.get_or_add(id);
        self.objects.sessions.current = slot;
        self.note_who(slot, context);
        if let Some(row) = self.objects.sessions.of_mut(slot) {
            row.active_ns = now;
            row.turns = row.turns.saturating_add(1);
        }
        slot
    }

    /// Inserts objects, all or none, parents first. The first one counts as used last, as in a
    /// lookup, so that no object is younger than its parent.
    pub fn insert(&mut self, now: i64, context: &RequestContext, new: &[NewObject]) -> Result<()> {
        self.restoring_clock(|this| this.insert_all(now, context, new))
    }

    /// The same, with a reference to each object.
    pub fn insert_held(
        &mut self,
        now: i64,
        context: &RequestContext,
        new: &[NewObject],
    ) -> Result<()> {
        self.insert(now, context, new)?;
        self.slots.iter().try_for_each(|&slot| self.objects.acquire(slot))
    }

    fn insert_all(&mut self, now: i64, context: &RequestContext, new: &[NewObject]) -> Result<()> {
        let stamp = self.begin(now, new.len())?;
        self.slots.clear();
        for object in new {
            match self.enter_next(object) {
                Ok(slot) => self.slots.push(slot),
                Err(error) => {
                    let entered = self.slots.iter().rev();
                    entered.for_each(|&slot| self.objects.remove(slot));
                    return Err(error);
                }
            }
        }
        // Only after all inserts succeeded: an adoption cannot be undone.
        for &slot in &self.slots {
            self.objects.link_orphans(slot);
        }
        let session = self.find_session(context);
        for (i, slot) in self.slots.iter().rev().enumerate() {
            if session != NONE {
                self.objects.set_session(*slot, session);
            }
            self.policy.insert(&mut self.objects, *slot, stamp + i as i64);
        }
        self.metrics.counts.inserts += new.len() as u64;
        if !self.history.is_empty() {
            for object in new {
                self.history.remove(object.id);
            }
        }
        Ok(())
    }

    fn note_who(&mut self, slot: Slot, context: &RequestContext) {
        if let Some(row) = self.objects.sessions.of_mut(slot) {
            row.tenant = context.tenant;
            row.priority = context.priority.unwrap_or(row.priority);
            row.length = context.length.max(row.length);
            row.max_length = context.max_length.max(row.max_length);
        }
    }

    /// The slot of a session, without counting a turn if the session is known.
    pub(super) fn find_session(&mut self, context: &RequestContext) -> Slot {
        let Some(id) = context.session else { return NONE };
        match self.objects.sessions.find(id) {
            Some(slot) => {
                self.objects.sessions.current = slot;
                self.note_who(slot, context);
                slot
            }
            None => self.note_session(self.last_ns, context),
        }
    }

    /// Adds the next object of a batch to the table. On a path, its parent was added just before.
    fn enter_next(&mut self, new: &NewObject) -> Result<Slot> {
        match self.slots.last() {
            Some(&above) if new.parent == Some(self.objects.node(above).id) => {
                self.objects.insert(new.id, above, new.units, &new.facts)
            }
            _ => self.enter(new),
        }
    }

    /// Adds an object to the table, without notifying the policy.
    #[inline]
    fn enter(&mut self, new: &NewObject) -> Result<Slot> {
        self.objects.insert_with_parent_id(new.id, new.parent, new.units, &new.facts)
    }

    pub(super) fn insert_one(&mut self, new: &NewObject, session: Slot, stamp: i64) -> Result<()> {
        let slot = self.enter(new)?;
        self.objects.set_session(slot, session);
        self.objects.link_orphans(slot);
        self.policy.insert(&mut self.objects, slot, stamp);
        Ok(())
    }

    /// Replaces the facts of an object where facts are kept.
    pub(super) fn set_facts(&mut self, slot: Slot, facts: &Facts, now: i64) {
        if let Some(known) = self.objects.facts_mut(slot) {
            let old = std::mem::replace(known, *facts);
            self.policy.facts_changed(&mut self.objects, slot, &old, now);
        }
    }

    /// Removes an object from policy and table.
    pub(super) fn take_out(&mut self, slot: Slot, evicted: bool, now: i64) {
        let parent = self.objects.detach(slot);
        self.policy.remove(&mut self.objects, slot, evicted, now);
        self.objects.remove(slot);
        if let Some(parent) = parent {
            self.freed(parent, now);
        }
    }

    /// An object is no longer blocked: it returns to the order if it was held.
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

    /// Changes the capacity.
    pub fn set_capacity(&mut self, units: u64) {
        self.options.capacity_units = units;
        self.policy.set_capacity(units);
    }

    /// Switches to another policy. It adopts every object with its last use and number of uses, and
    /// the old policy's learned state if both are of one kind.
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
            let new = NewObject { id, parent, units: 1, ..NewObject::default() };
            e.insert(1, &RequestContext::default(), &[new]).expect("room");
        }
        e
    }

    #[test]
    fn children_are_evicted_before_parents_in_any_order_of_inserts() {
        for entry in registry::ENTRIES {
            let options = Options { max_objects: 64, remember: 64, ..Options::default() };
            let mut e = Evictor::open(entry.name, &options).expect("a known policy");
            // The end of a path first, then its beginning, then the object between.
            for (id, parent) in [(3, Some(2)), (4, Some(3)), (1, None), (2, Some(1))] {
                let new = NewObject { id, parent, units: 1, ..NewObject::default() };
                e.insert(1, &RequestContext::default(), &[new]).expect("room");
                e.check().expect("sound");
            }
            assert_eq!(evict(&mut e, 9, 3), [4, 3, 2], "{}", entry.name);
            assert_eq!(evict(&mut e, 9, 3), [1], "{}", entry.name);
        }
    }

    #[test]
    fn a_rejected_batch_leaves_waiting_children_unchanged() {
        let options = Options { max_objects: 8, remember: 8, ..Options::default() };
        let mut e = Evictor::open("lru", &options).expect("a known policy");
        let new = |id, parent| NewObject { id, parent, units: 1, ..NewObject::default() };
        e.insert(1, &RequestContext::default(), &[new(2, Some(1))]).expect("room");
        e.insert(1, &RequestContext::default(), &[new(1, None), new(2, None)])
            .expect_err("2 exists");
        assert!(e.objects().find(1).is_none());
        e.insert(1, &RequestContext::default(), &[new(1, None)]).expect("room");
        assert_eq!(evict(&mut e, 9, 1), [2]);
    }

    #[test]
    fn a_prefix_is_evicted_from_its_end() {
        let mut e = chain("lru", 10..14);
        assert_eq!(evict(&mut e, 2, 2), [13, 12]);
        assert_eq!(
            e.lookup(3, &RequestContext::default(), &[10, 11, 12, 13], &mut []).expect("ids"),
            2
        );
        assert_eq!(e.metrics.counts.evicted_references, 2);
        assert_eq!(evict(&mut e, 4, 0), [] as [u64; 0]);
    }

    #[test]
    fn referenced_or_pinned_objects_stay_and_the_shortfall_is_reported() {
        let mut e = chain("lru", 1..4);
        e.acquire(&[2]).expect("found");
        e.pin(&[3], true).expect("found");
        let mut out = Vec::new();
        let outcome = e.evict(2, 5, &mut out).expect("a time");
        assert_eq!((out.len(), outcome.freed_units, outcome.shortfall_units), (0, 0, 5));
        e.pin(&[3], false).expect("found");
        assert_eq!(evict(&mut e, 3, 5), [3]);
        e.release(&[2]).expect("held");
        assert_eq!(evict(&mut e, 4, 5), [2, 1]);
    }

    #[test]
    fn no_victim_is_superfluous() {
        let options = Options { max_objects: 8, ..Options::default() };
        let mut e = Evictor::open("lru", &options).expect("a known policy");
        for (id, units) in [(1, 1), (2, 1), (3, 10), (4, 1)] {
            e.insert(
                id as i64,
                &RequestContext::default(),
                &[NewObject { id, units, ..NewObject::default() }],
            )
            .expect("");
        }
        let mut seen = Vec::new();
        e.preview(8, 10, &mut seen).expect("a time");
        assert_eq!(seen, [crate::policy::evict::Victim { id: 3, units: 10 }]);
        assert_eq!(evict(&mut e, 9, 10), [3]);
        assert_eq!(evict(&mut e, 9, 3), [1, 2, 4]);
    }

    #[test]
    fn errors_have_no_effect() {
        let mut e = chain("fifo", 1..4);
        let context = RequestContext::default();
        let new = |id| NewObject { id, units: 1, ..NewObject::default() };
        assert!(e.insert(5, &context, &[new(7), new(8), new(2)]).is_err());
        assert_eq!((e.objects().len(), e.objects().find(7)), (3, None));
        // The clock did not advance either.
        assert_eq!(e.lookup(4, &context, &[1], &mut []).expect("a time"), 1);
        assert_eq!(
            e.lookup(3, &context, &[1], &mut []).expect_err("back").status(),
            Status::Invalid
        );
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
            e.insert(
                2,
                &RequestContext::default(),
                &[NewObject { id, units: 1, ..NewObject::default() }],
            )
            .expect("room");
        }
        e.touch(3, &RequestContext::default(), &[10]).expect("found");
        e.switch("fifo").expect("known");
        assert_eq!(e.name(), "fifo");
        assert_eq!(evict(&mut e, 4, 6), [1, 11, 12, 13, 14, 10]);
    }
}
