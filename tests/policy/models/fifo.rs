//! The object that was inserted first.

use std::collections::BTreeMap;

use super::{Model, compare};

#[derive(Default)]
struct Fifo(BTreeMap<u64, i64>);

impl Model for Fifo {
    fn insert(&mut self, id: u64, _units: u64, now: i64) {
        self.0.insert(id, now);
    }
    fn touch(&mut self, _id: u64, _now: i64) {}
    fn remove(&mut self, id: u64, _evicted: bool) {
        self.0.remove(&id);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        self.0.iter().filter(|(id, _)| !blocked(**id)).min_by_key(|(_, at)| **at).map(|(id, _)| *id)
    }
}

#[test]
fn fifo_matches_its_model() {
    compare("fifo", 0, |_| Box::<Fifo>::default());
}
