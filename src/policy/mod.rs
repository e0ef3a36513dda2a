//! Who leaves first. One file a policy; [`registry`] names them all; an
//! [`evictor`](evictor::Evictor) is one at work on a table of objects.
//!
//! A policy orders objects; it does not own them. It is told of every insert,
//! touch and removal, keeps its order in the objects' links and in structures of
//! its own, and when asked takes the one that should leave first out of that
//! order. Objects that must stay (referenced, pinned, continued by another) are
//! passed over once and *held* out of the order until they are free again, so
//! that they are never scanned twice.

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
#[cfg(test)]
mod testing;
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

/// An order of leaving: the least leaves first. Two parts, so that ties of a
/// score are broken by a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// What counts.
    pub major: u64,
    /// What breaks ties.
    pub minor: u64,
}

impl Rank {
    /// By a time alone: the earliest leaves first.
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

/// Maps so that the order is kept.
#[inline]
pub fn order_of_i64(x: i64) -> u64 {
    (x as u64) ^ (1 << 63)
}

/// Maps so that the order is kept; -0 and 0 are equal.
#[inline]
pub fn order_of_f64(x: f64) -> u64 {
    let bits = (x + 0.0).to_bits();
    if bits >> 63 == 0 { bits | (1 << 63) } else { !bits }
}

/// What the engine says of an object's future.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hint {
    /// Why the request that used it stopped.
    pub stop: Option<Stop>,
    /// When it is expected to be used next, and how sure that is (0 to 1).
    pub next_use: Option<(i64, f32)>,
    /// It will not be used again.
    pub done: bool,
}

/// What a policy has learned, for another of its kind.
pub type Lessons = Box<dyn Any>;

/// Uses of an object that a policy is told of when it takes over, unless it counts
/// further: those count in every policy that looks at uses.
const TOLD_USES: u16 = 3;

/// A policy looks ahead once in so many uses: about the time that memory takes.
const LOOK_AHEAD: usize = 8;

/// What [`Policy::touch_all`] does unless told otherwise.
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

/// A whole-object eviction policy. `now` is the caller's clock in ns, made
/// strictly increasing: no two calls see the same.
pub trait Policy: Send {
    /// Its name, as in specs.
    fn name(&self) -> &'static str;

    /// The object in `slot` is new. An id that was looked up before in vain had
    /// `miss` called for it.
    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64);

    /// The object in `slot` was another policy's; it was used last at `now`, and
    /// `uses` times since it came.
    fn adopt(&mut self, objects: &mut Objects, slot: Slot, uses: u16, now: i64) {
        self.insert(objects, slot, now);
        (0..uses.min(TOLD_USES)).for_each(|_| self.touch(objects, slot, now));
    }

    /// What it has learned, for one of its kind that takes over. One that is
    /// `leaving` is not asked anything after it, and gives what it has of the same
    /// objects and sessions too; one that goes on gives what holds elsewhere.
    fn lessons(&mut self, _leaving: bool) -> Option<Lessons> {
        None
    }

    /// Goes on from what another learned, before it adopts objects. It passes over
    /// what is not of its kind.
    fn learn(&mut self, _lessons: Lessons) {}

    /// The object in `slot` was used.
    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64);

    /// The objects in `slots` were used, the last first, by `session`; those that
    /// are NONE are passed over. The time after that of the last use.
    fn touch_all(&mut self, objects: &mut Objects, slots: &[Slot], session: Slot, now: i64) -> i64 {
        touch_each(self, objects, slots, session, now)
    }

    /// Time to fetch what a search for a victim will need.
    #[inline]
    fn look_ahead(&mut self, _objects: &Objects) {}

    /// Soon these are missed, or leave: time to fetch what is remembered of them.
    fn prefetch(&self, _ids: &[u64]) {}

    /// `id` was looked up and is not there.
    fn miss(&mut self, _objects: &Objects, _id: u64, _now: i64) {}

    /// The object in `slot` goes, evicted or taken away by its owner. It may be
    /// held.
    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, now: i64);

    /// Takes the object that should leave first out of the order: it is held
    /// when this returns. Blocked ones met on the way are held as well.
    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot>;

    /// A held object is in the order again: it is not blocked any more, or was
    /// a victim that may stay. Its place is as if it had never been held.
    fn put_back(&mut self, objects: &mut Objects, slot: Slot, now: i64);

    /// The object's size changes; the table's own count is changed in here
    /// (`Objects::set_units`), after sums of sizes.
    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        objects.set_units(slot, units);
    }

    /// The engine said something of the object in `slot`.
    fn hint(&mut self, _objects: &mut Objects, _slot: Slot, _hint: &Hint, _now: i64) {}

    /// How much fits, in units; told at the start and when it changes. Before
    /// that, policies with shares go by what is resident.
    fn set_capacity(&mut self, _units: u64) {}

    /// Where an object of the table stands, without changing anything. Exact for
    /// policies with a static order; queues that move objects while they search
    /// (arc, s3fifo, sieve, wtinylfu) answer by queue and position.
    fn rank(&self, objects: &Objects, slot: Slot, now: i64) -> Rank;

    /// Where objects that are not in the table would stand, by what the caller's
    /// columns say of them: one rank a row.
    fn seed(&self, columns: &Columns, now: i64, ranks: &mut [Rank]);

    /// What counts in its order, as a number for humans and logs: the less, the
    /// earlier it leaves. By default the stamp.
    fn score(&self, objects: &Objects, slot: Slot, _now: i64) -> f64 {
        objects.node(slot).stamp as f64
    }

    /// Who decided last: a name other than its own where it delegates.
    fn decided_by(&self) -> &'static str {
        self.name()
    }

    /// Bytes of tables that it has used so far, beside the table of objects.
    fn used_bytes(&self, _objects: &Objects) -> u64 {
        0
    }

    /// Whether `Node::prev` of an object names one that probably leaves soon after
    /// it: its data is then fetched ahead.
    fn evicts_by_links(&self) -> bool {
        false
    }

    /// Whether it needs [`Facts`] of objects.
    fn wants_facts(&self) -> bool {
        false
    }

    /// Facts of an object changed.
    fn facts_changed(&mut self, _objects: &mut Objects, _slot: Slot, _old: &Facts, _now: i64) {}

    /// Numbers of its own for the metrics, by name.
    fn gauges(&self, _objects: &Objects, _out: &mut dyn FnMut(&'static str, f64)) {}

    /// Checks what it can of its own structures; for tests.
    fn check(&self, _objects: &Objects) -> Result<()> {
        Ok(())
    }
}
