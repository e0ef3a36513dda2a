//! 2Q: A1in, A1out and Am.

use std::collections::{BTreeMap, BTreeSet};

use super::{Model, compare};

/// Queues with the next victim first.
#[derive(Default)]
struct TwoQ {
    newcomers: Vec<u64>,
    main: Vec<u64>,
    out: Vec<(u64, u64)>,
    wanted: BTreeSet<u64>,
    units: BTreeMap<u64, u64>,
    capacity: u64,
}

impl Model for TwoQ {
    fn insert(&mut self, id: u64, units: u64, now: i64) {
        self.miss(id, now);
        let known = self.wanted.remove(&id);
        if known { &mut self.main } else { &mut self.newcomers }.push(id);
        self.units.insert(id, units);
    }
    fn touch(&mut self, id: u64, _now: i64) {
        if let Some(at) = self.main.iter().position(|&x| x == id) {
            self.main.remove(at);
            self.main.push(id);
        }
    }
    fn miss(&mut self, id: u64, _now: i64) {
        if self.out.iter().any(|o| o.0 == id) {
            self.out.retain(|o| o.0 != id);
            self.wanted.insert(id);
        }
    }
    fn remove(&mut self, id: u64, evicted: bool) {
        let (units, most) = (self.units[&id], self.capacity / 2);
        if evicted && self.newcomers.contains(&id) && units <= most {
            self.out.push((id, units));
            while self.out.iter().map(|o| o.1).sum::<u64>() > most {
                self.out.remove(0);
            }
        }
        self.newcomers.retain(|&x| x != id);
        self.main.retain(|&x| x != id);
        self.units.remove(&id);
    }
    fn resize(&mut self, id: u64, units: u64) {
        self.units.insert(id, units);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        let newcomers: u64 = self.newcomers.iter().map(|id| self.units[id]).sum();
        let order = match newcomers > self.capacity / 4 {
            true => [&self.newcomers, &self.main],
            false => [&self.main, &self.newcomers],
        };
        order.into_iter().flatten().copied().find(|&id| !blocked(id))
    }
}

#[test]
fn two_q_matches_its_model() {
    compare("2q", 20, |capacity| Box::new(TwoQ { capacity, ..TwoQ::default() }));
}
