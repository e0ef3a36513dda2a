//! `sieve`: a hand moves from the oldest to the youngest object and evicts the first one not used
//! since its last pass (Zhang et al., NSDI'24).
//!
//! Objects stay in the order of insertion. The hand clears the use bit of each object that it
//! visits and stops at the first one without the bit, the victim. After the youngest it continues
//! at the oldest. Blocked objects are held when the hand visits them; once free, they return to the
//! hand's next position.
//!
//! No parameters.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::list::Prefetcher;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::lists::Lists;
use crate::policy::{Policy, Rank, order_of_i64};

/// A queue and a hand.
pub struct Sieve {
    lists: Lists<1>,
    /// The next object that the hand visits; NONE = the oldest.
    hand: Slot,
    prefetcher: Prefetcher,
}

impl Sieve {
    /// Reads `sieve`, which has no parameters.
    pub fn read(_: &mut Reader) -> Result<Sieve> {
        Ok(Sieve { lists: Lists::default(), hand: NONE, prefetcher: Prefetcher::default() })
    }

    /// Objects ahead of the hand come before those behind it.
    fn rank_at(&self, objects: Option<&Objects>, used: bool, stamp: i64) -> Rank {
        let start = match objects {
            Some(objects) if self.hand != NONE => order_of_i64(objects.node(self.hand).stamp),
            _ => 0,
        };
        Rank { major: u64::from(used), minor: order_of_i64(stamp).wrapping_sub(start) }
    }
}

impl Policy for Sieve {
    fn name(&self) -> &'static str {
        "sieve"
    }

    forward!(lists: resize);

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let node = objects.node_mut(slot);
        node.stamp = now;
        node.set_freq(0);
        self.lists.push_hot(objects, 0, slot);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, _now: i64) {
        objects.node_mut(slot).set_freq(1);
    }

    fn look_ahead(&mut self, objects: &Objects) {
        let start = if self.hand == NONE { self.lists.lists[0].tail } else { self.hand };
        self.prefetcher.step(objects, start);
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, _evicted: bool, _now: i64) {
        if self.hand == slot {
            self.hand = objects.node(slot).prev;
        }
        self.lists.remove(objects, slot);
    }

    fn victim(&mut self, objects: &mut Objects, _now: i64) -> Option<Slot> {
        loop {
            let slot = if self.hand == NONE { self.lists.lists[0].tail } else { self.hand };
            if slot == NONE {
                return None;
            }
            self.hand = objects.node(slot).prev;
            self.prefetcher.passed();
            if objects.is_blocked(slot) {
                self.lists.hold(objects, slot);
            } else if objects.node(slot).freq() > 0 {
                objects.node_mut(slot).set_freq(0);
            } else {
                self.lists.hold(objects, slot);
                return Some(slot);
            }
        }
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, _now: i64) {
        if !objects.node(slot).is_held() {
            return;
        }
        let list = &mut self.lists.lists[0];
        let at_start = self.hand == NONE;
        let before = if at_start { list.tail } else { self.hand };
        objects.node_mut(slot).set_held(false);
        list.insert_after(objects, before, slot);
        if !at_start {
            self.hand = slot;
        }
    }

    fn evicts_by_links(&self) -> bool {
        true
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        let node = objects.node(slot);
        self.rank_at(Some(objects), node.freq() > 0, node.stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            *rank = self.rank_at(None, columns.count(row) > 1, columns.created_ns(row));
        }
    }

    fn score(&self, objects: &Objects, slot: Slot, _now: i64) -> f64 {
        f64::from(objects.node(slot).freq())
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        if self.hand != NONE && !self.lists.lists[0].from_cold(objects).any(|s| s == self.hand) {
            fail!(State, "the hand points to slot {}, which is not in the queue", self.hand);
        }
        self.lists.check_links(objects)
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::testing::Cache;

    #[test]
    fn the_hand_skips_used_objects_and_wraps_around() {
        let mut cache = Cache::new("sieve", 4);
        cache.get([1, 2, 3, 4, 1, 3]);
        assert_eq!(cache.get([5]), [2]);
        assert_eq!(cache.get([6]), [4], "the hand went on from 3");
        assert_eq!(cache.get([6, 7]), [5]);
        assert_eq!(cache.get([8]), [7], "6 was used");
        assert_eq!(
            cache.order(),
            [1, 3, 6, 8],
            "after the newest object the hand wraps to the oldest"
        );
    }

    #[test]
    fn unblocked_objects_return_to_the_next_position_of_the_hand() {
        let mut cache = Cache::new("sieve", 4);
        cache.get([1, 2, 3, 4]);
        cache.evictor.acquire(&[1, 2]).expect("found");
        assert_eq!(cache.get([5]), [3]);
        cache.evictor.release(&[1]).expect("held");
        cache.evictor.release(&[2]).expect("held");
        assert_eq!(cache.order(), [2, 1, 4, 5]);
    }
}
