//! The object whose k-th last use is the oldest.

use std::collections::BTreeMap;

use super::{Model, compare};

struct LruK {
    /// Times of all uses, the latest first.
    objects: BTreeMap<u64, Vec<i64>>,
    /// Use times of recently evicted objects, the latest eviction last.
    gone: Vec<(u64, Vec<i64>)>,
    k: usize,
    history: usize,
}

impl Model for LruK {
    fn insert(&mut self, id: u64, _units: u64, now: i64) {
        let at = self.gone.iter().position(|(gone, _)| *gone == id);
        // The entry keeps its place in the history.
        let mut uses = at.map_or(Vec::new(), |at| {
            let (_, uses) = std::mem::replace(&mut self.gone[at], (u64::MAX, Vec::new()));
            uses
        });
        uses.insert(0, now);
        self.objects.insert(id, uses);
    }
    fn touch(&mut self, id: u64, now: i64) {
        self.objects.entry(id).and_modify(|uses| uses.insert(0, now));
    }
    fn remove(&mut self, id: u64, evicted: bool) {
        let uses = self.objects.remove(&id).expect("known");
        if evicted {
            self.gone.push((id, uses));
            if self.gone.len() > self.history {
                self.gone.remove(0);
            }
        }
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        let free = self.objects.iter().filter(|(id, _)| !blocked(**id));
        let rank = |uses: &Vec<i64>| (uses.get(self.k - 1).copied(), uses[0]);
        free.min_by_key(|(_, uses)| rank(uses)).map(|(id, _)| *id)
    }
}

#[test]
fn lru_k_matches_its_model() {
    for (spec, k, history) in [
        ("lru-k", 2, 64),
        ("lru-k(k=1)", 1, 0),
        ("lru-k(k=3,history=7)", 3, 7),
        ("lru-k(k=4,history=0)", 4, 0),
        ("lru-k(history=1)", 2, 1),
    ] {
        compare(spec, 0, |_| {
            Box::new(LruK { objects: BTreeMap::new(), gone: Vec::new(), k, history })
        });
    }
}
