//! SLRU: segments by use.

use std::collections::{BTreeMap, BTreeSet};

use crate::models::Model;
use crate::models::holding::{Holder, compare_holding};

/// Segments with the coldest first.
struct Slru {
    segments: Vec<Vec<u64>>,
    units: BTreeMap<u64, u64>,
    held: BTreeSet<u64>,
    /// Time of the last move, which determines the list position of held objects.
    moved: BTreeMap<u64, u64>,
    moves: u64,
    capacity: u64,
    equal: bool,
}

impl Slru {
    fn new(segments: usize, equal: bool, capacity: u64) -> Slru {
        Slru {
            segments: vec![Vec::new(); segments],
            units: BTreeMap::new(),
            held: BTreeSet::new(),
            moved: BTreeMap::new(),
            moves: 0,
            capacity,
            equal,
        }
    }
    fn most(&self) -> u64 {
        let resident: u64 = self.units.values().sum();
        let fits = if self.capacity > 0 { self.capacity } else { resident };
        if self.equal { fits / self.segments.len() as u64 } else { fits * 8 / 10 }
    }
    fn size(&self, segment: usize) -> u64 {
        self.segments[segment].iter().map(|id| self.units[id]).sum()
    }
    fn to(&mut self, segment: usize, id: u64) {
        self.segments.iter_mut().for_each(|s| s.retain(|&x| x != id));
        self.segments[segment].push(id);
        self.held.remove(&id);
        self.moves += 1;
        self.moved.insert(id, self.moves);
    }
}

impl Model for Slru {
    fn insert(&mut self, id: u64, units: u64, _now: i64) {
        self.units.insert(id, units);
        let most = self.most();
        let room = |&s: &usize| self.size(s) + units <= most;
        let found = (0..self.segments.len()).find(room).unwrap_or(0);
        self.to(if self.equal { found } else { 0 }, id);
    }
    fn touch(&mut self, id: u64, _now: i64) {
        let top = self.segments.len() - 1;
        let from = self.segments.iter().position(|s| s.contains(&id)).expect("there");
        self.to((from + 1).min(top), id);
        for s in (1..=(from + 1).min(top)).rev().filter(|_| from < top) {
            while self.size(s) > self.most() {
                let linked = self.segments[s].iter().find(|id| !self.held.contains(id));
                let Some(&coldest) = linked else { break };
                self.to(s - 1, coldest);
            }
        }
    }
    fn remove(&mut self, id: u64, _evicted: bool) {
        self.segments.iter_mut().for_each(|s| s.retain(|&x| x != id));
        self.units.remove(&id);
        self.held.remove(&id);
    }
    fn resize(&mut self, id: u64, units: u64) {
        self.units.insert(id, units);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        for segment in &mut self.segments {
            segment.sort_by_key(|id| self.moved[id]);
            for &id in segment.iter() {
                if !blocked(id) {
                    return Some(id);
                }
                self.held.insert(id);
            }
        }
        None
    }
}

impl Holder for Slru {
    fn freed(&mut self, id: u64) {
        self.held.remove(&id);
    }
}

#[test]
fn slru_with_two_segments_matches_its_model() {
    compare_holding("slru", 20, |capacity| Slru::new(2, false, capacity));
}

#[test]
fn slru_with_equal_segments_matches_its_model() {
    compare_holding("slru(segments=4)", 20, |capacity| Slru::new(4, true, capacity));
    compare_holding("slru(segments=3)", 0, |capacity| Slru::new(3, true, capacity));
}
