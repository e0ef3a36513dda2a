//! `lru`: evicts the least recently used object.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::fail;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::custom;
use crate::policy::lists::Lists;
use crate::policy::{Policy, Rank, touch_each};

/// Most used objects whose move is delayed.
const DELAYED: usize = 32;

/// Least recently used.
///
/// A used object gets its stamp at once, and moves to the hot end later: a move changes two
/// neighbours, which the processor fetches meanwhile. All delayed moves are made before the order
/// matters.
#[derive(Default)]
pub struct Lru {
    lists: Lists<1>,
    /// Objects to be moved, in the order of their uses; the first `delayed` entries count.
    used: [Slot; DELAYED],
    delayed: usize,
    /// The policy is `custom`: it keeps facts for the caller's scorer.
    scored: bool,
}

impl Lru {
    /// Reads `lru`, which has no parameters.
    pub fn read(_: &mut Reader) -> Result<Lru> {
        Ok(Lru::default())
    }

    /// Reads `custom`, which has no parameters. Without a scorer its order is LRU.
    pub fn read_custom(_: &mut Reader) -> Result<Lru> {
        Ok(Lru { scored: true, ..Lru::default() })
    }

    /// Makes the delayed moves.
    #[inline]
    fn settle(&mut self, objects: &mut Objects) {
        if self.delayed > 0 {
            self.move_used(objects);
        }
    }

    #[inline(never)]
    fn move_used(&mut self, objects: &mut Objects) {
        for &slot in &self.used[..std::mem::take(&mut self.delayed)] {
            self.lists.move_hot(objects, 0, slot);
        }
    }
}

impl Policy for Lru {
    forward!(lists: look_ahead, resize, rank);

    fn name(&self) -> &'static str {
        if self.scored { custom::NAME } else { "lru" }
    }

    /// Also under the name `custom`, decisions of this order are LRU.
    fn decided_by(&self) -> &'static str {
        "lru"
    }

    fn wants_facts(&self) -> bool {
        self.scored
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.settle(objects);
        objects.node_mut(slot).stamp = now;
        self.lists.push_hot(objects, 0, slot);
    }

    #[inline]
    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let node = objects.node_mut(slot);
        node.stamp = now;
        let (prev, next) = (node.prev, node.next);
        if self.lists.lists[0].has_heap() {
            // Objects in the heap are ordered by their stamps, so they move at once.
            return self.lists.move_hot(objects, 0, slot);
        }
        objects.prefetch_links(prev);
        objects.prefetch_links(next);
        self.used[self.delayed] = slot;
        self.delayed += 1;
        if self.delayed == DELAYED {
            self.move_used(objects);
        }
    }

    fn touch_all(&mut self, objects: &mut Objects, slots: &[Slot], session: Slot, now: i64) -> i64 {
        touch_each(self, objects, slots, session, now)
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, _evicted: bool, _now: i64) {
        self.settle(objects);
        self.lists.remove(objects, slot);
    }

    fn victim(&mut self, objects: &mut Objects, _now: i64) -> Option<Slot> {
        self.settle(objects);
        self.lists.victim(objects)
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, _now: i64) {
        self.settle(objects);
        self.lists.put_back(objects, slot);
    }

    fn evicts_by_links(&self) -> bool {
        true
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            *rank = Rank::time(columns.last_access_ns(row));
        }
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        let used = &self.used[..self.delayed];
        if used.is_empty() {
            return self.lists.check(objects);
        }
        self.lists.check_links(objects)?;
        let others = self.lists.lists[0].from_cold(objects).filter(|slot| !used.contains(slot));
        if self.lists.lists[0].has_heap() || !others.is_sorted_by_key(|s| objects.node(s).stamp) {
            fail!(
                State,
                "objects whose moves are not delayed are not in the order of their stamps"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::DELAYED;
    use crate::policy::evictor::RequestContext;
    use crate::policy::testing::{Cache, evict, insert, open};

    #[test]
    fn delayed_moves_keep_the_order_of_uses() {
        let all = 3 * DELAYED as u64;
        let mut cache = Cache::new("lru", all);
        cache.get(0..all);
        // More uses than are delayed, and several of one object.
        cache.get((0..all / 2).chain([7, 3, 7]));
        let expected = (all / 2..all).chain((0..all / 2).filter(|id| ![3, 7].contains(id)));
        assert_eq!(cache.order(), expected.chain([3, 7]).collect::<Vec<_>>());
    }

    #[test]
    fn objects_behind_the_heap_move_at_once() {
        let (mut e, context) = (open("lru"), RequestContext::default());
        (0..100).for_each(|id| insert(&mut e, id as i64 + 1, &context, id));
        let ids: Vec<u64> = (10..90).collect();
        e.pin(&ids, true).expect("found");
        assert_eq!(evict(&mut e, 200, 10), (0..10).collect::<Vec<_>>());
        assert_eq!(evict(&mut e, 200, 1), [90], "the pinned ones are held");
        // Objects return in an order that no few steps find, and two are used meanwhile.
        for i in 0..80u64 {
            e.pin(&[10 + i * 37 % 80], false).expect("found");
            e.check().expect("sound");
        }
        for id in [40, 20] {
            assert_eq!(e.lookup(300, &context, &[id], &mut []).expect("a time"), 1);
            e.check().expect("sound");
        }
        let others = (10..100).filter(|id| ![20, 40, 90].contains(id));
        assert_eq!(evict(&mut e, 400, 100), others.chain([40, 20]).collect::<Vec<_>>());
    }
}
