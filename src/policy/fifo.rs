//! `fifo`: evicts the object that was inserted first.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::lists::Lists;
use crate::policy::{Policy, Rank};

/// First in, first out.
#[derive(Default)]
pub struct Fifo {
    lists: Lists<1>,
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

    forward!(lists: look_ahead, remove, victim, put_back, resize, rank, check);

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
        self.lists.push_hot(objects, 0, slot);
    }

    fn touch(&mut self, _objects: &mut Objects, _slot: Slot, _now: i64) {}

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            *rank = Rank::time(columns.created_ns(row));
        }
    }
}
