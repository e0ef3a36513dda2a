//! `belady`: evicts the object whose next use is farthest in the future (Belady, 1966).
//!
//! It needs to know the future, so it serves the lab as the bound for policies without foresight.
//! The next use of an object is a fact of the object, or a hint after each use. `i64::MAX`, or no
//! value, means never. Among equals the object with the most tokens before it is evicted first, so
//! a path is evicted from its end.
//!
//! No parameters.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::meta::index::Slot;
use crate::meta::objects::{Facts, Objects};
use crate::policy::columns::Columns;
use crate::policy::heap::Heap;
use crate::policy::registry::Setting;
use crate::policy::{Hint, Policy, Rank, order_of_i64};

/// The optimum, with foresight.
pub struct Belady {
    heap: Heap,
}

impl Belady {
    /// Reads `belady`, which has no parameters.
    pub fn read(_: &mut Reader, setting: &Setting) -> Result<Belady> {
        Ok(Belady { heap: Heap::new(setting.max_objects)? })
    }

    fn rank_of(facts: &Facts) -> Rank {
        let next = if facts.next_use_ns == 0 { i64::MAX } else { facts.next_use_ns };
        Rank { major: !order_of_i64(next), minor: !u64::from(facts.context) }
    }

    /// Puts an object at the rank of its facts, unless it is held.
    fn place(&mut self, objects: &mut Objects, slot: Slot) {
        if !objects.node(slot).is_held() {
            let rank = Self::rank_of(&objects.facts(slot));
            self.heap.update(objects, slot, rank);
        }
    }
}

impl Policy for Belady {
    fn name(&self) -> &'static str {
        "belady"
    }

    forward!(heap: remove, victim, check);

    fn used_bytes(&self, objects: &Objects) -> u64 {
        self.heap.used_bytes(objects.most())
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
        let rank = Self::rank_of(&objects.facts(slot));
        self.heap.push(objects, slot, rank);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, _now: i64) {
        objects.node_mut(slot).set_held(false);
        self.place(objects, slot);
    }

    fn hint(&mut self, objects: &mut Objects, slot: Slot, hint: &Hint, _now: i64) {
        let next = if hint.done { Some(i64::MAX) } else { hint.next_use.map(|(ns, _)| ns) };
        if let (Some(next), Some(facts)) = (next, objects.facts_mut(slot)) {
            facts.next_use_ns = next;
        }
        self.place(objects, slot);
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        Self::rank_of(&objects.facts(slot))
    }

    fn seed(&self, columns: &Columns, now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            let ns = columns.lifetime_ns(row);
            let next_use_ns = if ns < 0 { i64::MAX } else { now.saturating_add(ns) };
            let context = columns.context(row).min(u64::from(u32::MAX)) as u32;
            *rank = Self::rank_of(&Facts { next_use_ns, context, ..Facts::default() });
        }
    }

    fn score(&self, objects: &Objects, slot: Slot, _now: i64) -> f64 {
        let next = objects.facts(slot).next_use_ns;
        -(if next == 0 { i64::MAX } else { next } as f64)
    }

    fn wants_facts(&self) -> bool {
        true
    }

    fn facts_changed(&mut self, objects: &mut Objects, slot: Slot, _old: &Facts, _now: i64) {
        self.place(objects, slot);
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::Hint;
    use crate::policy::evictor::{Evictor, NewObject, Options, RequestContext};
    use crate::policy::testing::Cache;

    #[test]
    fn evicts_the_farthest_next_use_and_the_deepest_among_equals() {
        let options = Options { max_objects: 8, holes: true, ..Options::default() };
        let mut e = Evictor::open("belady", &options).expect("a known policy");
        let request = RequestContext::default();
        for (id, next_use_ns, context) in
            [(1, 50, 0), (2, i64::MAX, 0), (3, i64::MAX, 9), (4, 70, 0), (5, 0, 5), (6, 60, 0)]
        {
            let mut new = NewObject { id, units: 1, ..NewObject::default() };
            (new.facts.next_use_ns, new.facts.context) = (next_use_ns, context);
            e.insert(1, &request, &[new]).expect("room");
        }
        let hint = Hint { next_use: Some((10, 1.0)), ..Hint::default() };
        assert_eq!(e.hint(2, &request, &[4, 99], &hint).expect("a time"), 1);
        let done = Hint { done: true, ..Hint::default() };
        e.hint(3, &request, &[6], &done).expect("a time");
        let mut out = Vec::new();
        e.evict(4, 6, &mut out).expect("a time");
        let ids: Vec<u64> = out.iter().map(|v| v.id).collect();
        assert_eq!(ids, [3, 5, 2, 6, 1, 4]);
    }

    #[test]
    fn works_without_next_uses() {
        let mut cache = Cache::new("belady", 3);
        assert_eq!(cache.get(1..6).len(), 2);
    }
}
