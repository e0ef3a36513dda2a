//! `lru`: evicts the least recently used object.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::custom;
use crate::policy::lists::Lists;
use crate::policy::{Policy, Rank, touch_each};

/// Least recently used.
#[derive(Default)]
pub struct Lru {
    lists: Lists<1>,
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
}

impl Policy for Lru {
    forward!(lists: look_ahead, remove, victim, put_back, resize, rank, check);

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
        objects.node_mut(slot).stamp = now;
        self.lists.push_hot(objects, 0, slot);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
        self.lists.move_hot(objects, 0, slot);
    }

    fn touch_all(&mut self, objects: &mut Objects, slots: &[Slot], session: Slot, now: i64) -> i64 {
        // Each object that moves changes two neighbours, too.
        if slots.len() > 1 {
            objects.prefetch_neighbours(slots);
        }
        touch_each(self, objects, slots, session, now)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            *rank = Rank::time(columns.last_access_ns(row));
        }
    }
}
