//! The least frequently used object, with and without ageing.

use std::collections::BTreeMap;

use super::{Model, compare};

#[derive(Default)]
struct Lfu {
    /// Uses, key, last use.
    objects: BTreeMap<u64, (u64, u64, i64)>,
    clock: u64,
    aged: bool,
}

impl Lfu {
    fn used(&mut self, id: u64, uses: u64, now: i64) {
        self.objects.insert(id, (uses, self.clock + uses, now));
    }
}

impl Model for Lfu {
    fn insert(&mut self, id: u64, _units: u64, now: i64) {
        self.used(id, 1, now);
    }
    fn touch(&mut self, id: u64, now: i64) {
        self.used(id, self.objects[&id].0 + 1, now);
    }
    fn remove(&mut self, id: u64, evicted: bool) {
        let (_, key, _) = self.objects.remove(&id).expect("known");
        if evicted && self.aged {
            self.clock = self.clock.max(key);
        }
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        let free = self.objects.iter().filter(|(id, _)| !blocked(**id));
        free.min_by_key(|(_, (_, key, at))| (*key, *at)).map(|(id, _)| *id)
    }
}

#[test]
fn lfu_matches_its_model() {
    compare("lfu", 0, |_| Box::new(Lfu { aged: true, ..Lfu::default() }));
}

#[test]
fn plain_lfu_matches_its_model() {
    compare("lfu(aged=false)", 0, |_| Box::<Lfu>::default());
}
