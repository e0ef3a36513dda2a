//! `fifo`: the one that came first leaves first.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::meta::index::Slot;
use crate::meta::list::Scout;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::lists::Lists;
use crate::policy::{Policy, Rank};

/// First in, first out.
#[derive(Default)]
pub struct Fifo {
    lists: Lists<1>,
    scout: Scout,
}

impl Fifo {
    /// Reads `fifo`, which has no parameters.
    pub fn read(_: &mut Reader) -> Result<Fifo> {
        Ok(Fifo::default())
    }
}

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
        self.lists.push_hot(objects, 0, slot);
    }

    fn touch(&mut self, _objects: &mut Objects, _slot: Slot, _now: i64) {}

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
            *rank = Rank::time(columns.created_ns(row));
        }
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        self.lists.check_in_order(objects)
    }
}
