//! `qos` (also `qos_aware`): evicts low classes first, by another policy within a class, with
//! ageing and with floors for tenants.
//!
//! The class of an object is the priority of the last session that used it, 0 to 2 (higher ones
//! count as 2), or 1 without a session. Every class has an inner policy of its own. A victim is
//! found as follows:
//!
//! 1. Tenants below their floor are protected while another tenant, or objects without one, are not
//!    below. The default floor is 1 / (2 * tenants with resident objects). If no candidate is left
//!    then, no tenant is protected.
//! 2. Every class proposes the first unprotected object in its inner policy's order.
//! 3. The proposal of the lowest class, after ageing, is evicted; among equals, the least recently
//!    used. So a class starves another one only for a while: unused objects of a high class sink,
//!    and a lower class gets their room.
//!
//! The floor is checked before every victim, also within one call, and takes precedence over the
//! class. Protected objects are taken out of the order and kept in queues by class and tenant, in
//! the inner order, so each is visited once. 64 tenants have floors; with more, the latest have
//! none.
//!
//! Batches of columns use the same classes and ageing, and the inner policy's seeds. Rows of
//! tenants that hold less than their floor of all rows' blocks are evicted last. That is decided
//! once per batch.

mod parked;
mod tenants;

use crate::base::spec::describe::Param;
use crate::base::spec::{Reader, Spec};
use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::fail;
use crate::meta::index::Slot;
use crate::meta::objects::{Facts, Objects};
use crate::policy::columns::Columns;
use crate::policy::qos::parked::Parked;
use crate::policy::qos::tenants::Tenants;
use crate::policy::registry::{self, Setting};
use crate::policy::{Hint, Lessons, Policy, Rank};

/// Parameters of `qos`.
pub const PARAMS: &[Param] = &[
    Param::new("inner", "the policy within a class: any but `qos`, `auto` and `custom`")
        .default_is("`lru`"),
    Param::new("strict", "`true`: the class decides, then the inner policy, and nothing else"),
    Param::new(
        "ageing",
        "an object that is not used for this long counts one class lower, after twice as long two \
         classes; 0 = never",
    ),
    Param::new("floor", "share of the resident units below which a tenant is protected; 0 = none")
        .default_is("half of an equal share"),
];

/// Number of classes.
const CLASSES: usize = 3;
/// The class of objects without a session.
const NORMAL: u8 = 1;
/// Inserts between two updates of the inner policies' capacities.
const SHARE_EVERY: u32 = 1024;

/// Bits of `marks` with the class.
const CLASS: u8 = 3;
/// In `marks`: the object is a chosen victim and is not counted.
const OUT: u8 = 4;
/// In `marks`: the object is protected and in a queue.
const PARKED: u8 = 8;

/// Orders by class, then by another policy.
pub struct Qos {
    inner: [Box<dyn Policy>; CLASSES],
    /// Class and marks of each object.
    marks: Zeroed<u8>,
    /// Tenant row of each object.
    row: Zeroed<u8>,
    /// Last use of each object; the stamp belongs to the inner policy.
    used: Zeroed<u64>,
    objects: [u32; CLASSES],
    units: [u64; CLASSES],
    tenants: Tenants,
    parked: Parked,
    ageing_ns: i64,
    floor: Option<f64>,
    strict: bool,
    capacity: u64,
    inserts: u32,
}

/// The proposal of a class.
struct Candidate {
    slot: Slot,
    class: usize,
    parked: bool,
}

impl Qos {
    /// Reads `qos` and its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<Qos> {
        let default = Spec::parse("lru")?;
        let spec = reader.spec("inner")?.unwrap_or(&default);
        // `auto` hands all objects of the table to the winner, also those of other classes.
        let inner = registry::find(&spec.name).map_or("", |entry| entry.name);
        if matches!(inner, "qos" | "auto" | "custom") {
            fail!(
                Spec,
                "'inner' of qos is {inner}, allowed is any policy but qos, auto and custom"
            );
        }
        let strict = reader.bool("strict", false)?;
        let ageing = reader.duration_ns("ageing", 60_000_000_000)?;
        // The default is outside of the range, so that it is distinguishable.
        let floor = Some(reader.f64("floor", -1.0, 0.0..=1.0)?).filter(|f| *f >= 0.0);
        // Inner policies receive a share of the capacity, not all of it.
        let part = Setting { capacity_units: 0, ..*setting };
        let make = || registry::make(spec, &part);
        Ok(Qos {
            inner: [make()?, make()?, make()?],
            marks: Zeroed::new(setting.max_objects)?,
            row: Zeroed::new(setting.max_objects)?,
            used: Zeroed::new(setting.max_objects)?,
            objects: [0; CLASSES],
            units: [0; CLASSES],
            tenants: Tenants::new(floor),
            parked: Parked::new(setting.max_objects)?,
            ageing_ns: i64::try_from(ageing).unwrap_or(i64::MAX),
            floor,
            strict,
            capacity: 0,
            inserts: 0,
        })
    }

    fn class(&self, slot: Slot) -> usize {
        usize::from(self.marks[slot as usize] & CLASS)
    }

    fn is(&self, slot: Slot, mark: u8) -> bool {
        self.marks[slot as usize] & mark != 0
    }

    /// Class and tenant of an object, by its session.
    fn standing(objects: &Objects, slot: Slot) -> (u8, Option<u32>) {
        match objects.sessions.of(objects.node(slot).session) {
            Some(row) => (row.priority.min(CLASSES as u8 - 1), Some(row.tenant)),
            None => (NORMAL, None),
        }
    }

    /// A class after ageing.
    fn aged(&self, class: usize, used: i64, now: i64) -> usize {
        if self.strict || self.ageing_ns == 0 {
            return class;
        }
        // Whole ageing periods, up to the number of steps.
        let (age, once) = (now.saturating_sub(used), self.ageing_ns);
        let steps = usize::from(age >= once) + usize::from(age >= once.saturating_mul(2));
        class.saturating_sub(steps)
    }

    /// Joins protection, class and the inner policy's rank into one rank.
    fn join(protected: bool, class: usize, inner: Rank) -> Rank {
        let rank = (u128::from(inner.major) << 64) | u128::from(inner.minor);
        let rank = (u128::from(protected) << 127) | ((class as u128) << 125) | (rank >> 3);
        Rank { major: (rank >> 64) as u64, minor: rank as u64 }
    }

    fn count_in(&mut self, objects: &Objects, slot: Slot, class: u8, tenant: Option<u32>) {
        let units = objects.node(slot).units;
        self.marks[slot as usize] = class;
        self.row[slot as usize] = self.tenants.join(tenant, units);
        self.objects[usize::from(class)] += 1;
        self.units[usize::from(class)] += u64::from(units);
    }

    fn count_out(&mut self, objects: &Objects, slot: Slot) {
        let (class, units) = (self.class(slot), objects.node(slot).units);
        self.objects[class] -= 1;
        self.units[class] -= u64::from(units);
        if !self.is(slot, OUT) {
            self.tenants.leave(self.row[slot as usize], units);
        }
    }

    /// Removes an object from its queue, if it is in one. It stays held.
    fn unpark(&mut self, slot: Slot) {
        if self.is(slot, PARKED) {
            self.marks[slot as usize] &= !PARKED;
            self.parked.remove(self.class(slot), self.row[slot as usize], slot);
        }
    }

    /// Returns a protected object to its inner policy, which may give it another position.
    fn give_back(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        if self.is(slot, PARKED) {
            self.unpark(slot);
            self.inner[self.class(slot)].put_back(objects, slot, now);
        }
    }

    /// The first queued object of a class in the inner order.
    fn first_queued(
        &mut self,
        objects: &mut Objects,
        class: usize,
        protected: u128,
        now: i64,
    ) -> Option<(Rank, Slot)> {
        let mut best = None;
        let mut rows = self.parked.used(class) & !protected;
        while rows != 0 {
            let row = rows.trailing_zeros() as u8;
            let slot = self.parked.first(class, row);
            if objects.is_blocked(slot) {
                // Held as any blocked object; the next one in its queue follows.
                self.give_back(objects, slot, now);
                rows &= self.parked.used(class);
                continue;
            }
            rows &= rows - 1;
            let own = (self.inner[class].rank(objects, slot, now), slot);
            best = Some(best.map_or(own, |best| own.min(best)));
        }
        best
    }

    /// The proposal of a class, held.
    fn propose(
        &mut self,
        objects: &mut Objects,
        class: usize,
        protected: u128,
        now: i64,
    ) -> Option<Candidate> {
        if self.objects[class] == 0 {
            return None;
        }
        let fresh = loop {
            let Some(slot) = self.inner[class].victim(objects, now) else { break None };
            let row = self.row[slot as usize];
            if protected >> row & 1 == 0 {
                break Some(slot);
            }
            self.marks[slot as usize] |= PARKED;
            let inner = &self.inner[class];
            self.parked.add(class, row, slot, |slot| inner.rank(objects, slot, now));
        };
        let waiting = self.first_queued(objects, class, protected, now);
        let (slot, parked) = match (fresh, waiting) {
            (Some(slot), Some((rank, first))) => {
                if (self.inner[class].rank(objects, slot, now), slot) <= (rank, first) {
                    (slot, false)
                } else {
                    self.inner[class].put_back(objects, slot, now);
                    (first, true)
                }
            }
            (Some(slot), None) => (slot, false),
            (None, waiting) => (waiting?.1, true),
        };
        Some(Candidate { slot, class, parked })
    }

    fn choose(&mut self, objects: &mut Objects, protected: u128, now: i64) -> Option<Slot> {
        let mut best: Option<(usize, i64, Candidate)> = None;
        for class in 0..CLASSES {
            let Some(next) = self.propose(objects, class, protected, now) else { continue };
            let used = self.used[next.slot as usize] as i64;
            let standing = self.aged(class, used, now);
            let better = best.as_ref().is_none_or(|(s, u, _)| (standing, used) < (*s, *u));
            let loser = if better {
                best.replace((standing, used, next)).map(|(_, _, loser)| loser)
            } else {
                Some(next)
            };
            if let Some(loser) = loser.filter(|loser| !loser.parked) {
                self.inner[loser.class].put_back(objects, loser.slot, now);
            }
            if self.strict {
                break;
            }
        }
        let (_, _, chosen) = best?;
        self.unpark(chosen.slot);
        Some(chosen.slot)
    }

    /// Gives every inner policy the capacity share of its class.
    fn share_capacity(&mut self) {
        let all: u64 = self.units.iter().sum();
        for (inner, &units) in self.inner.iter_mut().zip(&self.units) {
            let part = u128::from(self.capacity) * u128::from(units) / u128::from(all.max(1));
            inner.set_capacity(part as u64);
        }
    }
}

impl Policy for Qos {
    fn name(&self) -> &'static str {
        "qos"
    }

    fn used_bytes(&self, objects: &Objects) -> u64 {
        let most = objects.most();
        let own = [self.marks.front_bytes(most), self.row.front_bytes(most)];
        let own = own.iter().sum::<u64>() + self.used.front_bytes(most);
        let inner = self.inner.iter().map(|inner| inner.used_bytes(objects));
        own + self.parked.used_bytes(most) + inner.sum::<u64>()
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let (class, tenant) = Self::standing(objects, slot);
        self.count_in(objects, slot, class, tenant);
        self.used[slot as usize] = now as u64;
        self.inner[usize::from(class)].insert(objects, slot, now);
        self.inserts = self.inserts.wrapping_add(1);
        if self.capacity > 0 && self.inserts % SHARE_EVERY == 1 {
            self.share_capacity();
        }
    }

    fn adopt(&mut self, objects: &mut Objects, slot: Slot, uses: u16, now: i64) {
        let (class, tenant) = Self::standing(objects, slot);
        self.count_in(objects, slot, class, tenant);
        self.used[slot as usize] = now as u64;
        self.inner[usize::from(class)].adopt(objects, slot, uses, now);
    }

    /// Only state that holds for the whole class: an object may be in another one now.
    fn lessons(&mut self, _leaving: bool) -> Option<Lessons> {
        let lessons: [Option<Lessons>; CLASSES] =
            std::array::from_fn(|class| self.inner[class].lessons(false));
        Some(Box::new(lessons))
    }

    fn learn(&mut self, lessons: Lessons) {
        let Ok(lessons) = lessons.downcast::<[Option<Lessons>; CLASSES]>() else { return };
        for (inner, lessons) in self.inner.iter_mut().zip(*lessons) {
            lessons.into_iter().for_each(|lessons| inner.learn(lessons));
        }
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.used[slot as usize] = now as u64;
        // First into the inner order: not every policy moves an object that is used.
        self.give_back(objects, slot, now);
        let (class, tenant) = Self::standing(objects, slot);
        let old = self.class(slot);
        if self.is(slot, OUT)
            || usize::from(class) != old
            || tenant != self.tenants.tenant(self.row[slot as usize])
        {
            self.count_out(objects, slot);
            self.count_in(objects, slot, class, tenant);
        }
        if usize::from(class) == old {
            return self.inner[old].touch(objects, slot, now);
        }
        self.inner[old].remove(objects, slot, false, now);
        let node = objects.node_mut(slot);
        node.tag = 0;
        node.set_freq(0);
        node.set_held(false);
        self.inner[usize::from(class)].insert(objects, slot, now);
    }

    fn prefetch(&self, ids: &[u64]) {
        self.inner.iter().for_each(|inner| inner.prefetch(ids));
    }

    fn miss(&mut self, objects: &Objects, id: u64, now: i64) {
        self.inner.iter_mut().for_each(|inner| inner.miss(objects, id, now));
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, now: i64) {
        self.unpark(slot);
        self.count_out(objects, slot);
        self.inner[self.class(slot)].remove(objects, slot, evicted, now);
    }

    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot> {
        let protected = if self.strict { 0 } else { self.tenants.protected() };
        let mut found = self.choose(objects, protected, now);
        if found.is_none() && protected != 0 {
            found = self.choose(objects, 0, now);
        }
        let slot = found?;
        // Not counted from now on, so that floors hold within a call, too.
        self.marks[slot as usize] |= OUT;
        self.tenants.leave(self.row[slot as usize], objects.node(slot).units);
        Some(slot)
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.unpark(slot);
        if self.is(slot, OUT) {
            // The inner policy's class stays until the next use.
            let class = self.class(slot) as u8;
            let (_, tenant) = Self::standing(objects, slot);
            self.count_out(objects, slot);
            self.count_in(objects, slot, class, tenant);
        }
        self.inner[self.class(slot)].put_back(objects, slot, now);
    }

    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        let (class, old) = (self.class(slot), objects.node(slot).units);
        self.units[class] = self.units[class] - u64::from(old) + u64::from(units);
        if !self.is(slot, OUT) {
            self.tenants.resize(self.row[slot as usize], old, units);
        }
        self.inner[class].resize(objects, slot, units);
    }

    fn hint(&mut self, objects: &mut Objects, slot: Slot, hint: &Hint, now: i64) {
        self.give_back(objects, slot, now);
        self.inner[self.class(slot)].hint(objects, slot, hint, now);
    }

    fn set_capacity(&mut self, units: u64) {
        self.capacity = units;
        self.share_capacity();
    }

    fn rank(&self, objects: &Objects, slot: Slot, now: i64) -> Rank {
        let class = self.class(slot);
        let standing = self.aged(class, self.used[slot as usize] as i64, now);
        let protected =
            !self.strict && self.tenants.protected() >> self.row[slot as usize] & 1 == 1;
        Self::join(protected, standing, self.inner[class].rank(objects, slot, now))
    }

    fn seed(&self, columns: &Columns, now: i64, ranks: &mut [Rank]) {
        self.inner[usize::from(NORMAL)].seed(columns, now, ranks);
        let mut tenants = Tenants::new(self.floor);
        let floors = !self.strict && !columns.tenant.is_empty();
        if floors {
            for row in 0..ranks.len() {
                // Columns with more blocks than this are rejected.
                tenants.join(Some(columns.tenant(row)), columns.blocks(row) as u32);
            }
        }
        let protected = tenants.protected();
        for (row, rank) in ranks.iter_mut().enumerate() {
            let class = usize::from(columns.priority(row)).min(CLASSES - 1);
            let standing = self.aged(class, columns.last_access_ns(row), now);
            let short = protected != 0 && protected >> tenants.row(columns.tenant(row)) & 1 == 1;
            *rank = Self::join(short, standing, *rank);
        }
    }

    fn score(&self, objects: &Objects, slot: Slot, now: i64) -> f64 {
        self.inner[self.class(slot)].score(objects, slot, now)
    }

    fn wants_facts(&self) -> bool {
        self.inner[0].wants_facts()
    }

    fn facts_changed(&mut self, objects: &mut Objects, slot: Slot, old: &Facts, now: i64) {
        self.give_back(objects, slot, now);
        self.inner[self.class(slot)].facts_changed(objects, slot, old, now);
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        let names = ["class_0_units", "class_1_units", "class_2_units"];
        names.into_iter().zip(self.units).for_each(|(name, units)| out(name, units as f64));
        out("tenants", f64::from(self.tenants.active()));
        out("tenants_below_floor", f64::from(self.tenants.protected().count_ones()));
        out("passed_over", self.parked.len() as f64);
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        let (mut counts, mut units) = ([0; CLASSES], [0; CLASSES]);
        let mut rows: Vec<u64> = self.tenants.units().map(|_| 0).collect();
        for slot in objects.slots() {
            let (class, node) = (self.class(slot), objects.node(slot));
            counts[class] += 1;
            units[class] += u64::from(node.units);
            if !self.is(slot, OUT) {
                rows[usize::from(self.row[slot as usize])] += u64::from(node.units);
            }
            if self.is(slot, PARKED) && !node.is_held() {
                fail!(State, "object {} is queued as protected and in the inner order", node.id);
            }
        }
        if (counts, units) != (self.objects, self.units) || !self.tenants.units().eq(rows) {
            fail!(State, "{counts:?} objects of {units:?} units by class, not as counted");
        }
        let is = |class, row, slot: Slot| {
            self.is(slot, PARKED) && self.class(slot) == class && self.row[slot as usize] == row
        };
        self.parked.check(is)?;
        // An inner policy checks all objects, so it can check only if it has all of them.
        match counts.iter().position(|&n| n as usize == objects.len()) {
            Some(class) => self.inner[class].check(objects),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use crate::policy::evictor::{Evictor, Options, RequestContext};
    use crate::policy::testing::{self, evict, open};

    const S: i64 = 1_000_000_000;

    fn context(tenant: u32, priority: u8) -> RequestContext {
        let session = Some(u64::from(tenant) * 10 + u64::from(priority));
        RequestContext { session, tenant, priority: Some(priority), ..RequestContext::default() }
    }

    fn insert(e: &mut Evictor, now: i64, context: &RequestContext, ids: std::ops::Range<u64>) {
        ids.for_each(|id| testing::insert(e, now, context, id));
    }

    #[test]
    fn low_classes_are_evicted_first_and_idle_objects_sink() {
        for (spec, now, order) in [
            ("qos", 10 * S, [3, 2, 1]),
            // 1 was used at 1 s, 2 at 2 s, 3 at 3 s. After 61 s object 1 is in class 1 and older
            // than 2; after 122 s all are in class 0.
            ("qos", 61 * S, [3, 1, 2]),
            ("qos", 123 * S, [1, 2, 3]),
            ("qos(ageing=0)", 1000 * S, [3, 2, 1]),
            ("qos(ageing=10s)", 30 * S, [1, 2, 3]),
            ("qos(strict=true)", 1000 * S, [3, 2, 1]),
        ] {
            let mut e = open(spec);
            insert(&mut e, S, &context(0, 2), 1..2);
            insert(&mut e, 2 * S, &context(0, 1), 2..3);
            insert(&mut e, 3 * S, &context(0, 0), 3..4);
            assert_eq!(evict(&mut e, now, 3), order, "{spec} at {now}");
        }
    }

    #[test]
    fn a_low_class_is_not_starved_by_an_idle_high_one() {
        let mut e = open("qos(ageing=10s)");
        insert(&mut e, S, &context(0, 2), 0..10);
        // One new object of the lowest class arrives per second; ten fit.
        for now in 2..60 {
            evict(&mut e, now * S, 1);
            insert(&mut e, now * S, &context(1, 0), 100 + now as u64..101 + now as u64);
        }
        let low = e.objects().slots().filter(|&s| e.objects().node(s).id >= 100).count();
        assert!(low >= 5, "{low}");
    }

    #[test]
    fn one_call_does_not_empty_a_tenant_below_its_floor() {
        let mut e = open("qos(ageing=0)");
        insert(&mut e, S, &context(1, 0), 0..20);
        insert(&mut e, 2 * S, &context(2, 2), 100..180);
        // The low class of tenant 1 is evicted until it holds a quarter of the rest; then both
        // tenants are.
        let victims = evict(&mut e, 3 * S, 60);
        let of_one = victims.iter().filter(|id| **id < 100).count();
        let held = 20 - of_one;
        assert!((9..=11).contains(&held), "{held} left of tenant 1");
        let mut e = open("qos(strict=true)");
        insert(&mut e, S, &context(1, 0), 0..20);
        insert(&mut e, 2 * S, &context(2, 2), 100..180);
        assert!(evict(&mut e, 3 * S, 20).iter().all(|id| *id < 20));
    }

    #[test]
    fn a_preview_and_references_leave_the_order_as_it_was() {
        let mut e = open("qos(floor=45%,ageing=0)");
        insert(&mut e, S, &context(1, 1), 0..4);
        insert(&mut e, 2 * S, &context(2, 1), 10..16);
        let mut seen = Vec::new();
        e.preview(3 * S, 7, &mut seen).expect("a time");
        e.check().expect("sound");
        let seen: Vec<u64> = seen.iter().map(|v| v.id).collect();
        // Tenant 1 holds 4 of 10, then 4 of 9 and of 8; then it is not protected any more.
        assert_eq!(seen[..3], [10, 11, 0]);
        e.acquire(&[0]).expect("found");
        e.preview(3 * S, 7, &mut Vec::new()).expect("a time");
        e.release(&[0]).expect("held");
        assert_eq!(evict(&mut e, 4 * S, 7), seen);
    }

    #[test]
    fn an_object_follows_the_session_that_used_it_last() {
        let mut e = open("qos(inner=lfu)");
        insert(&mut e, S, &context(1, 2), 1..2);
        insert(&mut e, S, &context(1, 1), 2..3);
        e.lookup(2 * S, &context(1, 0), &[1], &mut []).expect("a time");
        assert_eq!(evict(&mut e, 3 * S, 1), [1]);
    }

    #[test]
    fn rows_are_ranked_by_floor_class_and_inner_policy() {
        let e = open("qos(inner=lfu)");
        let columns = Columns {
            ids: &[0, 1, 2, 3, 4],
            blocks: &[1, 5, 5, 5, 5],
            tenant: &[7, 8, 8, 8, 8],
            priority: &[0, 2, 1, 1, 9],
            count: &[1, 1, 4, 3, 1],
            last_access_ns: &[S, S, S, S, S - 130 * S],
            ..Columns::default()
        };
        let mut ranks = [Rank::default(); 5];
        e.policy().seed(&columns, 2 * S, &mut ranks);
        let mut order = [0, 1, 2, 3, 4];
        order.sort_by_key(|&row: &usize| ranks[row]);
        assert_eq!(order, [4, 3, 2, 1, 0]);
    }

    #[test]
    fn invalid_inner_specs_are_rejected() {
        for spec in ["qos(inner=qos)", "qos(inner=qos_aware)", "qos(inner=lur)", "qos(innr=lru)"] {
            let error = Evictor::open(spec, &Options::default()).err().expect("wrong");
            assert_eq!(error.status(), Status::Spec, "{spec}");
        }
        assert_eq!(open("qos_aware(inner=lru-k(k=3))").name(), "qos");
    }
}
