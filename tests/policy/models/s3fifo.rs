//! S3-FIFO: three queues.

use std::collections::{BTreeMap, BTreeSet};

use super::{Model, compare};

const SMALL: usize = 0;
const MAIN: usize = 1;

/// Queues with the oldest first.
#[derive(Default)]
struct S3Fifo {
    queues: [Vec<u64>; 2],
    units: BTreeMap<u64, u64>,
    uses: BTreeMap<u64, u32>,
    ghost: Vec<(u64, u64)>,
    wanted: BTreeSet<u64>,
    capacity: u64,
    has_evicted: bool,
}

impl S3Fifo {
    fn size(&self, queue: usize) -> u64 {
        self.queues[queue].iter().map(|id| self.units[id]).sum()
    }
    fn forget(&mut self, id: u64) -> bool {
        let known = self.ghost.iter().any(|g| g.0 == id);
        self.ghost.retain(|g| g.0 != id);
        known
    }
    fn move_main(&mut self, id: u64, uses: u32) {
        self.queues.iter_mut().for_each(|q| q.retain(|&x| x != id));
        self.queues[MAIN].push(id);
        self.uses.insert(id, uses);
    }
}

impl Model for S3Fifo {
    fn insert(&mut self, id: u64, units: u64, _now: i64) {
        let known = self.wanted.remove(&id) | self.forget(id);
        let filling = !self.has_evicted && self.size(SMALL) >= self.capacity / 10;
        self.queues[if known || filling { MAIN } else { SMALL }].push(id);
        self.units.insert(id, units);
        self.uses.insert(id, 0);
    }
    fn touch(&mut self, id: u64, _now: i64) {
        self.uses.entry(id).and_modify(|u| *u = (*u + 1).min(3));
    }
    fn miss(&mut self, id: u64, _now: i64) {
        if self.forget(id) {
            self.wanted.insert(id);
        }
    }
    fn remove(&mut self, id: u64, evicted: bool) {
        let most = self.capacity * 9 / 10;
        let units = self.units[&id];
        if evicted && self.queues[SMALL].contains(&id) && units <= most {
            self.ghost.push((id, units));
            while self.ghost.iter().map(|g| g.1).sum::<u64>() > most {
                self.ghost.remove(0);
            }
        }
        self.queues.iter_mut().for_each(|q| q.retain(|&x| x != id));
        self.units.remove(&id);
    }
    fn resize(&mut self, id: u64, units: u64) {
        self.units.insert(id, units);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        self.has_evicted = true;
        let main_most = self.capacity - self.capacity / 10;
        let main = self.size(MAIN) > main_most || self.size(SMALL) == 0;
        for queue in if main { [MAIN, SMALL] } else { [SMALL, MAIN] } {
            while let Some(&id) = self.queues[queue].iter().find(|id| !blocked(**id)) {
                match (queue, self.uses[&id]) {
                    (SMALL, 2..) => self.move_main(id, 0),
                    (MAIN, uses @ 1..) => self.move_main(id, uses - 1),
                    _ => return Some(id),
                }
            }
        }
        None
    }
}

#[test]
fn s3fifo_matches_its_model() {
    compare("s3fifo", 20, |capacity| Box::new(S3Fifo { capacity, ..S3Fifo::default() }));
}
