//! Eviction policies: one file a policy. [`registry`] lists them; an [`evictor`](evictor::Evictor)
//! is a policy with a table of objects.
//!
//! A policy orders objects; it does not own them. It is notified of every insert, touch and
//! removal. It keeps its order in the objects' links and in structures of its own. To evict, it
//! takes the next victim out of that order. Blocked objects (referenced, pinned, or parents of
//! others) are visited once and *held* outside the order until they are free again, so that they
//! are never scanned twice.

#[macro_use]
mod forward;

pub mod advice;
pub mod arc;
pub mod batch;
pub mod belady;
pub mod columns;
pub mod custom;
pub mod evict;
pub mod evictor;
pub mod fifo;
pub mod frequency;
pub mod gdsf;
pub mod ghosts;
pub mod handover;
pub mod heap;
pub mod horizon;
pub mod lfu;
pub mod lists;
pub mod log;
pub mod lookup;
pub mod lru;
pub mod lru_k;
pub mod metrics;
pub mod pensieve;
pub mod pick;
pub mod predictive;
pub mod qos;
pub mod queues;
pub mod recall;
pub mod registry;
pub mod s3fifo;
pub mod shadow;
pub mod share;
pub mod sieve;
pub mod slru;
pub mod tlru;
pub mod two_q;
pub mod upkeep;
pub mod wtinylfu;

use std::any::Any;

use crate::base::status::Result;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::{Facts, Objects};
use crate::meta::sessions::Stop;
use crate::policy::columns::Columns;

/// An eviction order: the lowest rank is evicted first. A time breaks ties of a score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// Primary key.
    pub major: u64,
    /// Breaks ties.
    pub minor: u64,
}

impl Rank {
    /// By a time: the earliest is evicted first.
    #[inline]
    pub fn time(ns: i64) -> Rank {
        Rank { major: order_of_i64(ns), minor: 0 }
    }

    /// By a score (not NaN), then by a time.
    #[inline]
    pub fn score(score: f64, ns: i64) -> Rank {
        Rank { major: order_of_f64(score), minor: order_of_i64(ns) }
    }

    /// By a count or a class, then by a time.
    #[inline]
    pub fn count(count: u64, ns: i64) -> Rank {
        Rank { major: count, minor: order_of_i64(ns) }
    }
}

/// An order-preserving map.
#[inline]
pub fn order_of_i64(x: i64) -> u64 {
    (x as u64) ^ (1 << 63)
}

/// An order-preserving map; -0 and 0 are equal.
#[inline]
pub fn order_of_f64(x: f64) -> u64 {
    let bits = (x + 0.0).to_bits();
    if bits >> 63 == 0 { bits | (1 << 63) } else { !bits }
}

/// The engine's statement about the future of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hint {
    /// Why the request that used it stopped.
    pub stop: Option<Stop>,
    /// Expected time of the next use, and its confidence (0 to 1).
    pub next_use: Option<(i64, f32)>,
    /// The object will not be used again.
    pub done: bool,
}

/// State that a policy has learned, for another policy of its kind.
pub type Lessons = Box<dyn Any>;

/// Most uses of an object that a policy replays when it takes over, unless it counts further. These
/// few matter to every policy that considers uses.
const REPLAYED_USES: u16 = 3;

/// Uses between two calls of `look_ahead`: about the latency of memory.
const LOOK_AHEAD: usize = 8;

/// The default of [`Policy::touch_all`].
#[inline]
pub fn touch_each<P: Policy + ?Sized>(
    policy: &mut P,
    objects: &mut Objects,
    slots: &[Slot],
    session: Slot,
    now: i64,
) -> i64 {
    let mut stamp = now;
    for (i, &slot) in slots.iter().rev().enumerate() {
        if i % LOOK_AHEAD == 1 {
            policy.look_ahead(objects);
        }
        if slot != NONE {
            objects.count_use(slot, session);
            policy.touch(objects, slot, stamp);
            stamp += 1;
        }
    }
    stamp
}

/// An eviction policy for whole objects. `now` is the caller's clock in ns, made strictly
/// increasing: no two calls pass the same value.
pub trait Policy: Send {
    /// Name in specs.
    fn name(&self) -> &'static str;

    /// The object in `slot` is new. If its id was looked up before and missed, `miss` was called
    /// for it.
    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64);

    /// Another policy handed over the object in `slot`. Its last use was at `now`; it had `uses`
    /// uses since its insert.
    fn adopt(&mut self, objects: &mut Objects, slot: Slot, uses: u16, now: i64) {
        self.insert(objects, slot, now);
        (0..uses.min(REPLAYED_USES)).for_each(|_| self.touch(objects, slot, now));
    }

    /// The learned state, for a policy of its kind that takes over. With `leaving` the policy is
    /// not used again, and includes state about the same objects and sessions. Otherwise it
    /// continues, and passes on only state that holds elsewhere.
    fn lessons(&mut self, _leaving: bool) -> Option<Lessons> {
        None
    }

    /// Continues from another policy's state, before it adopts objects. State of another kind is
    /// ignored.
    fn learn(&mut self, _lessons: Lessons) {}

    /// The object in `slot` was used.
    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64);

    /// The objects in `slots` were used by `session`, the last one first; NONE is skipped. Returns
    /// the time after that of the last use.
    fn touch_all(&mut self, objects: &mut Objects, slots: &[Slot], session: Slot, now: i64) -> i64 {
        touch_each(self, objects, slots, session, now)
    }

    /// Prefetches memory that a search for a victim will need.
    #[inline]
    fn look_ahead(&mut self, _objects: &Objects) {}

    /// Prefetches the ghost entries of ids that will soon be missed or evicted into the processor's
    /// cache.
    fn prefetch(&self, _ids: &[u64]) {}

    /// A lookup of `id` missed.
    fn miss(&mut self, _objects: &Objects, _id: u64, _now: i64) {}

    /// The object in `slot` is evicted, or removed by its owner. It may be held.
    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, now: i64);

    /// Takes the next victim out of the order; it is then held. Blocked objects before it are held,
    /// too.
    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot>;

    /// Returns a held object to the order: it is no longer blocked, or was a victim that stays. Its
    /// position is as if it had never been held.
    fn put_back(&mut self, objects: &mut Objects, slot: Slot, now: i64);

    /// Changes an object's size. The implementation calls `Objects::set_units`, after it has
    /// updated its own sums.
    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        objects.set_units(slot, units);
    }

    /// The engine gave a hint about the object in `slot`.
    fn hint(&mut self, _objects: &mut Objects, _slot: Slot, _hint: &Hint, _now: i64) {}

    /// Sets the capacity in units, at the start and when it changes. Until then, policies with
    /// shares use the resident units.
    fn set_capacity(&mut self, _units: u64) {}

    /// The rank of an object of the table, without changing anything. Exact for policies with a
    /// static order. Queues that move objects while they search (arc, s3fifo, sieve, wtinylfu)
    /// answer by queue and position.
    fn rank(&self, objects: &Objects, slot: Slot, now: i64) -> Rank;

    /// The ranks of objects that are not in the table, computed from the caller's columns: one a
    /// row.
    fn seed(&self, columns: &Columns, now: i64, ranks: &mut [Rank]);

    /// The score in the policy's order, as a number for humans and logs; the lowest is evicted
    /// first. By default the stamp.
    fn score(&self, objects: &Objects, slot: Slot, _now: i64) -> f64 {
        objects.node(slot).stamp as f64
    }

    /// Name of the policy that decided last; another one where this policy delegates.
    fn decided_by(&self) -> &'static str {
        self.name()
    }

    /// Bytes of the policy's tables used so far, without the table of objects.
    fn used_bytes(&self, _objects: &Objects) -> u64 {
        0
    }

    /// Whether `Node::prev` of a victim is probably the next victim: its memory is then prefetched.
    fn evicts_by_links(&self) -> bool {
        false
    }

    /// Whether the policy uses [`Facts`] of objects.
    fn wants_facts(&self) -> bool {
        false
    }

    /// The facts of an object changed.
    fn facts_changed(&mut self, _objects: &mut Objects, _slot: Slot, _old: &Facts, _now: i64) {}

    /// The policy's gauges, by name.
    fn gauges(&self, _objects: &Objects, _out: &mut dyn FnMut(&'static str, f64)) {}

    /// Checks the policy's structures; for tests.
    fn check(&self, _objects: &Objects) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod testing;
