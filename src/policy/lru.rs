//! `lru`: the one used longest ago leaves first.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::meta::index::Slot;
use crate::meta::list::Scout;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::lists::Lists;
use crate::policy::{Policy, Rank, touch_each};

/// Least recently used.
#[derive(Default)]
pub struct Lru {
    lists: Lists<1>,
    scout: Scout,
}

impl Lru {
    /// Reads `lru`, which has no parameters.
    pub fn read(_: &mut Reader) -> Result<Lru> {
        Ok(Lru::default())
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
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
        // Whoever moves leaves two neighbours that change too.
        if slots.len() > 1 {
            objects.prefetch_neighbours(slots);
        }
        touch_each(self, objects, slots, session, now)
    }

    fn look_ahead(&mut self, objects: &Objects) {
        self.scout.step(objects, self.lists.0[0].tail);
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, _evicted: bool, _now: i64) {
        self.lists.unlink(objects, slot);
    }

    fn victim(&mut self, objects: &mut Objects, _now: i64) -> Option<Slot> {
        let slot = self.lists.coldest(objects, 0)?;
        self.lists.hold(objects, slot);
        self.scout.passed();
        Some(slot)
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, _now: i64) {
        self.lists.put_back(objects, slot);
    }

    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        self.lists.resize(objects, slot, units);
    }

    fn leaves_by_links(&self) -> bool {
        true
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        Rank::time(objects.node(slot).stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            *rank = Rank::time(columns.last_access_ns(row));
        }
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        self.lists.check_in_order(objects)
    }
}
