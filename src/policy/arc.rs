//! `arc`: adaptive replacement cache, which balances recency and frequency (Megiddo and Modha,
//! FAST'03).
//!
//! T1 holds objects used once, T2 all others, both in the order of last use. B1 and B2 are ghost
//! lists: the ids evicted from T1 and from T2. A miss found in B1 means that T1 is too small, a
//! miss found in B2 that T2 is too small. The target `p` for the size of T1 moves by `max(1,
//! |other| / |this|)` times the object's size, between 0 and the capacity. The victim is the
//! coldest object of T1 if T1 is larger than `p`, or as large and the last miss was in B2;
//! otherwise the coldest of T2. T1 and B1 together never exceed the capacity, all four lists never
//! twice the capacity. All sizes are in units. For objects of one unit this is the published
//! algorithm, call by call.
//!
//! `p` moves when a lookup misses, once for each eviction of an id. An id inserted without a lookup
//! moves `p` at the insert. Objects that their owner removes leave no ghost.
//!
//! No parameters. Gauges: `arc_p`, `arc_t1`, `arc_t2`, `arc_b1`, `arc_b2`, all in units.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::fail;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::ghosts::Ghosts;
use crate::policy::queues::Queues;
use crate::policy::registry::Setting;
use crate::policy::{Policy, Rank, order_of_i64};

const T1: usize = 0;
const T2: usize = 1;

/// Note of a ghost: a lookup has already moved the target for it.
const COUNTED: u32 = 1;

/// Adaptive replacement.
pub struct Arc {
    queues: Queues<2>,
    ghosts: [Ghosts; 2],
    /// Target size of T1, in units.
    p: f64,
    /// The last miss was found in B2.
    b2_missed: bool,
}

impl Arc {
    /// Reads `arc`, which has no parameters.
    pub fn read(_: &mut Reader, setting: &Setting) -> Result<Arc> {
        let limit = setting.max_objects;
        Ok(Arc {
            queues: Queues::new(setting.capacity_units),
            ghosts: [Ghosts::new(limit)?, Ghosts::new(limit)?],
            p: 0.0,
            b2_missed: false,
        })
    }

    /// Moves the target for a miss that the ghosts of `list` remember.
    fn adapt(&mut self, list: usize, units: u32, fits: u64) {
        let (this, other) =
            (self.ghosts[list].units() as f64, self.ghosts[1 - list].units() as f64);
        let ratio = if this > 0.0 { (other / this).max(1.0) } else { 1.0 };
        let step = ratio * f64::from(units);
        let target = if list == T1 { self.p + step } else { self.p - step };
        self.p = target.clamp(0.0, fits as f64);
    }

    /// Removes the oldest ghosts until the lists are within their limits.
    fn trim(&mut self, fits: u64) {
        let t1 = self.queues.units(T1);
        while t1 + self.ghosts[T1].units() > fits && self.ghosts[T1].pop_oldest().is_some() {}
        let rest = self.queues.total() + self.ghosts[T1].units();
        let most = fits.saturating_mul(2);
        while rest + self.ghosts[T2].units() > most && self.ghosts[T2].pop_oldest().is_some() {}
    }

    /// The list that provides the next victim.
    fn first(&self) -> usize {
        let t1 = self.queues.units(T1) as f64;
        let over = t1 > self.p || (self.b2_missed && t1 == self.p);
        if t1 > 0.0 && over { T1 } else { T2 }
    }

    fn rank_in(&self, list: usize, stamp: i64) -> Rank {
        Rank { major: u64::from(list != self.first()), minor: order_of_i64(stamp) }
    }
}

impl Policy for Arc {
    fn name(&self) -> &'static str {
        "arc"
    }

    forward!(queues: put_back);

    fn victim(&mut self, objects: &mut Objects, _now: i64) -> Option<Slot> {
        let first = self.first();
        self.queues.victim(objects, [first, 1 - first])
    }

    fn used_bytes(&self, _: &Objects) -> u64 {
        self.ghosts.iter().map(Ghosts::used_bytes).sum()
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let node = objects.node(slot);
        let (id, units, fits) = (node.id, node.units, self.queues.fits(objects));
        let known = [T1, T2].into_iter().find_map(|list| Some((list, self.ghosts[list].get(id)?)));
        if let Some((list, note)) = known {
            if note != COUNTED {
                self.adapt(list, units, fits);
            }
            self.ghosts[list].remove(id);
        }
        let list = if known.is_some() { T2 } else { T1 };
        self.queues.push(objects, list, slot, now);
        self.b2_missed = false;
        self.trim(fits);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.queues.move_hot(objects, T2, slot, now);
    }

    fn prefetch(&self, ids: &[u64]) {
        self.ghosts.iter().for_each(|ghosts| ghosts.prefetch(ids));
    }

    fn miss(&mut self, objects: &Objects, id: u64, _now: i64) {
        let fits = self.queues.fits(objects);
        self.b2_missed = false;
        for list in [T1, T2] {
            let Some((units, note)) = self.ghosts[list].remove(id) else { continue };
            // The id becomes the youngest ghost, so that it is still known at its insert.
            self.ghosts[list].add(id, units, COUNTED);
            if note != COUNTED {
                self.adapt(list, units, fits);
            }
            self.b2_missed = list == T2;
        }
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, _now: i64) {
        let list = self.queues.remove(objects, slot);
        if evicted {
            let node = objects.node(slot);
            self.ghosts[list].add(node.id, node.units, 0);
            if self.queues.capacity() > 0 {
                self.trim(self.queues.capacity());
            }
        }
    }

    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        self.queues.resize(objects, slot, units);
        self.trim(self.queues.fits(objects));
    }

    fn set_capacity(&mut self, units: u64) {
        self.queues.set_capacity(units);
        if units > 0 {
            self.p = self.p.min(units as f64);
            self.trim(units);
        }
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        let node = objects.node(slot);
        self.rank_in(usize::from(node.tag), node.stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            let list = if columns.count(row) > 1 { T2 } else { T1 };
            *rank = self.rank_in(list, columns.last_access_ns(row));
        }
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("arc_p", self.p);
        out("arc_t1", self.queues.units(T1) as f64);
        out("arc_t2", self.queues.units(T2) as f64);
        out("arc_b1", self.ghosts[T1].units() as f64);
        out("arc_b2", self.ghosts[T2].units() as f64);
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        self.queues.check(objects)?;
        let capacity = self.queues.capacity();
        if capacity == 0 {
            return Ok(());
        }
        let (t1, all) = (self.queues.units(T1), self.queues.total());
        let (b1, b2) = (self.ghosts[T1].units(), self.ghosts[T2].units());
        if b1 > 0 && t1 + b1 > capacity {
            fail!(State, "T1 {t1} and B1 {b1} exceed the capacity of {capacity}");
        }
        if b2 > 0 && all + b1 + b2 > capacity.saturating_mul(2) {
            fail!(State, "the directory of {} exceeds twice the capacity", all + b1 + b2);
        }
        if !(0.0..=capacity as f64).contains(&self.p) {
            fail!(State, "the target is {}, not 0 to {capacity}", self.p);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::testing::Cache;

    #[test]
    fn the_target_follows_the_ghosts() {
        let mut cache = Cache::new("arc", 2);
        assert_eq!(cache.get([1, 2, 1, 3]), [2], "T1 is over its target of 0");
        assert_eq!((cache.gauge("arc_b1"), cache.gauge("arc_p")), (1.0, 0.0));
        assert_eq!(cache.get([2]), [1], "B1 knew 2, T1 may have one");
        assert_eq!((cache.gauge("arc_b2"), cache.gauge("arc_p")), (1.0, 1.0));
        assert_eq!(cache.get([1]), [3], "B2 knew 1, T1 shall be empty");
        assert_eq!((cache.gauge("arc_t2"), cache.gauge("arc_p")), (2.0, 0.0));
        assert_eq!(cache.order(), [2, 1]);
    }

    #[test]
    fn a_miss_in_b2_breaks_the_tie_against_t1() {
        let mut cache = Cache::new("arc", 3);
        assert_eq!(cache.get([1, 1, 2, 2, 3, 4, 3, 5, 6, 4]), [3, 1, 2, 4, 3]);
        assert_eq!((cache.gauge("arc_t1"), cache.gauge("arc_p")), (2.0, 3.0));
        assert_eq!((cache.get([1]), cache.gauge("arc_p")), (vec![5], 2.0));
    }

    #[test]
    fn a_scan_does_not_evict_reused_objects() {
        let mut cache = Cache::new("arc", 8);
        cache.get([1, 2, 3, 1, 2, 3]);
        cache.get(100..140);
        assert_eq!(cache.get([1, 2, 3]), []);
    }

    #[test]
    fn removals_leave_no_ghost_and_inserts_alone_move_the_target() {
        use crate::policy::evictor::{NewObject, RequestContext};
        let mut cache = Cache::new("arc", 2);
        cache.get([1, 2]);
        cache.evictor.remove(2, &[1]).expect("found");
        assert_eq!(cache.gauge("arc_b1"), 0.0);
        assert_eq!(cache.order(), [2]);
        let new = NewObject { id: 2, units: 1, ..NewObject::default() };
        cache.evictor.insert(2, &RequestContext::default(), &[new]).expect("room");
        assert_eq!((cache.gauge("arc_t2"), cache.gauge("arc_p")), (1.0, 1.0));
    }
}
