//! W-TinyLFU: a window, a segmented main part, and counts with halving. The counts are exact: a
//! sketch of so few ids has no collisions.

use std::collections::{BTreeMap, BTreeSet};

use crate::models::Model;
use crate::models::holding::{Holder, compare_holding};

const WINDOW: usize = 0;
const PROBATION: usize = 1;
const PROTECTED: usize = 2;

/// Lists with the coldest first.
#[derive(Default)]
struct WTinyLfu {
    lists: [Vec<u64>; 3],
    units: BTreeMap<u64, u64>,
    held: BTreeSet<u64>,
    counts: BTreeMap<u64, u64>,
    seen: u64,
    capacity: u64,
}

impl WTinyLfu {
    fn window(&self) -> u64 {
        (self.capacity / 10).max(1)
    }
    fn main(&self) -> u64 {
        self.capacity - self.window()
    }
    fn size(&self, list: usize) -> u64 {
        self.lists[list].iter().map(|id| self.units[id]).sum()
    }
    fn to(&mut self, list: usize, id: u64) {
        self.lists.iter_mut().for_each(|l| l.retain(|&x| x != id));
        self.lists[list].push(id);
        self.held.remove(&id);
    }
    fn linked(&self, list: usize) -> Option<u64> {
        self.lists[list].iter().copied().find(|id| !self.held.contains(id))
    }
    fn see(&mut self, id: u64) {
        let count = self.counts.entry(id).or_default();
        *count = (*count + 1).min(15);
        self.seen += 1;
        if self.seen >= 3 * (self.units.len() as u64).max(16) {
            self.seen /= 2;
            self.counts.values_mut().for_each(|c| *c /= 2);
        }
    }
    fn count(&self, id: u64) -> u64 {
        self.counts.get(&id).copied().unwrap_or(0)
    }
    fn overflow(&mut self) {
        while self.size(WINDOW) > self.window() {
            let Some(id) = self.linked(WINDOW) else { break };
            if self.size(PROBATION) + self.size(PROTECTED) + self.units[&id] > self.main() {
                break;
            }
            self.to(PROBATION, id);
        }
    }
    fn coldest(&mut self, list: usize, blocked: &dyn Fn(u64) -> bool) -> Option<u64> {
        for &id in &self.lists[list] {
            if !blocked(id) {
                return Some(id);
            }
            self.held.insert(id);
        }
        None
    }
}

impl Model for WTinyLfu {
    fn insert(&mut self, id: u64, units: u64, _now: i64) {
        self.units.insert(id, units);
        if self.count(id) == 0 {
            self.see(id);
        }
        self.to(WINDOW, id);
        self.overflow();
    }
    fn touch(&mut self, id: u64, _now: i64) {
        self.see(id);
        if self.lists[WINDOW].contains(&id) {
            return self.to(WINDOW, id);
        }
        self.to(PROTECTED, id);
        while self.size(PROTECTED) > self.main() * 8 / 10 {
            let Some(id) = self.linked(PROTECTED) else { break };
            self.to(PROBATION, id);
        }
    }
    fn miss(&mut self, id: u64, _now: i64) {
        self.see(id);
    }
    fn remove(&mut self, id: u64, _evicted: bool) {
        self.lists.iter_mut().for_each(|l| l.retain(|&x| x != id));
        self.units.remove(&id);
        self.held.remove(&id);
    }
    fn resize(&mut self, id: u64, units: u64) {
        self.units.insert(id, units);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        self.overflow();
        let new = self.coldest(WINDOW, blocked);
        let old = self.coldest(PROBATION, blocked);
        let old = old.or_else(|| self.coldest(PROTECTED, blocked));
        if let (Some(new), Some(old)) = (new, old) {
            if self.count(new) <= self.count(old) {
                return Some(new);
            }
            self.to(PROBATION, new);
            return Some(old);
        }
        new.or(old)
    }
}

impl Holder for WTinyLfu {
    fn freed(&mut self, id: u64) {
        self.held.remove(&id);
    }
}

#[test]
fn wtinylfu_matches_its_model() {
    compare_holding("wtinylfu(window=10%, sample=3)", 20, |capacity| WTinyLfu {
        capacity,
        ..WTinyLfu::default()
    });
}
