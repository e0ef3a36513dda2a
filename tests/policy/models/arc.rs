//! T1, T2, B1, B2 and the target, as in the paper.

use std::collections::{BTreeMap, BTreeSet};

use super::{Model, compare};

/// Lists with the coldest first: T1, T2 and their ghosts, with sizes.
#[derive(Default)]
struct Arc {
    lists: [Vec<(u64, u64)>; 2],
    ghosts: [Vec<(u64, u64)>; 2],
    /// Ghosts that moved the target already.
    counted: BTreeSet<u64>,
    p: f64,
    capacity: u64,
    b2_missed: bool,
}

fn sum(list: &[(u64, u64)]) -> u64 {
    list.iter().map(|x| x.1).sum()
}

fn take(list: &mut Vec<(u64, u64)>, id: u64) -> Option<u64> {
    let at = list.iter().position(|x| x.0 == id)?;
    Some(list.remove(at).1)
}

impl Arc {
    fn fits(&self) -> u64 {
        let resident = sum(&self.lists[0]) + sum(&self.lists[1]);
        if self.capacity > 0 { self.capacity } else { resident }
    }
    fn adapt(&mut self, id: u64, list: usize, units: u64, fits: u64) {
        if !self.counted.insert(id) {
            return;
        }
        let (this, other) = (sum(&self.ghosts[list]) as f64, sum(&self.ghosts[1 - list]) as f64);
        let step = (other / this).max(1.0) * units as f64;
        let to = if list == 0 { self.p + step } else { self.p - step };
        self.p = to.clamp(0.0, fits as f64);
    }
    fn trim(&mut self) {
        let fits = self.fits();
        let [t1, t2] = [sum(&self.lists[0]), sum(&self.lists[1])];
        while t1 + sum(&self.ghosts[0]) > fits && !self.ghosts[0].is_empty() {
            self.ghosts[0].remove(0);
        }
        let rest = t1 + t2 + sum(&self.ghosts[0]);
        while rest + sum(&self.ghosts[1]) > 2 * fits && !self.ghosts[1].is_empty() {
            self.ghosts[1].remove(0);
        }
    }
}

impl Model for Arc {
    fn insert(&mut self, id: u64, units: u64, _now: i64) {
        let fits = if self.capacity > 0 { self.capacity } else { self.fits() + units };
        let known = (0..2).find(|&i| self.ghosts[i].iter().any(|x| x.0 == id));
        if let Some(list) = known {
            self.adapt(id, list, units, fits);
            take(&mut self.ghosts[list], id);
        }
        self.counted.remove(&id);
        self.lists[usize::from(known.is_some())].push((id, units));
        self.b2_missed = false;
        self.trim();
    }
    fn touch(&mut self, id: u64, _now: i64) {
        let units = (0..2).find_map(|i| take(&mut self.lists[i], id)).expect("there");
        self.lists[1].push((id, units));
    }
    fn miss(&mut self, id: u64, _now: i64) {
        self.b2_missed = false;
        for list in 0..2 {
            let Some(units) = take(&mut self.ghosts[list], id) else { continue };
            self.ghosts[list].push((id, units));
            self.adapt(id, list, units, self.fits());
            self.b2_missed = list == 1;
        }
    }
    fn remove(&mut self, id: u64, evicted: bool) {
        for list in 0..2 {
            let Some(units) = take(&mut self.lists[list], id) else { continue };
            if evicted {
                self.ghosts[list].push((id, units));
                self.counted.remove(&id);
            }
        }
        if evicted && self.capacity > 0 {
            self.trim();
        }
    }
    fn resize(&mut self, id: u64, units: u64) {
        let before: BTreeMap<u64, u64> = self.lists.iter().flatten().copied().collect();
        assert!(before.contains_key(&id));
        for x in self.lists.iter_mut().flatten().filter(|x| x.0 == id) {
            x.1 = units;
        }
        self.trim();
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        let t1 = sum(&self.lists[0]) as f64;
        let from_t1 = t1 > 0.0 && (t1 > self.p || (self.b2_missed && t1 == self.p));
        let order = if from_t1 { [0, 1] } else { [1, 0] };
        let mut all = order.iter().flat_map(|&i| &self.lists[i]);
        all.find(|x| !blocked(x.0)).map(|x| x.0)
    }
}

#[test]
fn arc_matches_its_model() {
    for capacity in [20, 0] {
        compare("arc", capacity, |capacity| Box::new(Arc { capacity, ..Arc::default() }));
    }
}
