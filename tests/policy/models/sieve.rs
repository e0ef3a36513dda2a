//! SIEVE: a hand over a queue.

use std::collections::BTreeSet;

use crate::models::Model;
use crate::models::holding::{Holder, compare_holding};

/// Oldest first; `hand` is the index that is examined next.
#[derive(Default)]
struct Sieve {
    queue: Vec<u64>,
    hand: usize,
    used: BTreeSet<u64>,
    held: BTreeSet<u64>,
}

impl Sieve {
    fn take(&mut self, at: usize) {
        self.queue.remove(at);
        self.hand -= usize::from(at < self.hand);
    }
}

impl Model for Sieve {
    fn insert(&mut self, id: u64, _units: u64, _now: i64) {
        // A hand past the youngest object continues with the oldest one, not with the new object.
        if self.hand == self.queue.len() {
            self.hand = 0;
        }
        self.queue.push(id);
    }
    fn touch(&mut self, id: u64, _now: i64) {
        self.used.insert(id);
    }
    fn remove(&mut self, id: u64, _evicted: bool) {
        self.used.remove(&id);
        self.held.remove(&id);
        if let Some(at) = self.queue.iter().position(|&x| x == id) {
            self.take(at);
        }
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        loop {
            if self.hand >= self.queue.len() {
                self.hand = 0;
            }
            let id = *self.queue.get(self.hand)?;
            if blocked(id) {
                self.take(self.hand);
                self.held.insert(id);
            } else if self.used.remove(&id) {
                self.hand += 1;
            } else {
                return Some(id);
            }
        }
    }
}

impl Holder for Sieve {
    fn freed(&mut self, id: u64) {
        if self.held.remove(&id) {
            let at = if self.hand >= self.queue.len() { 0 } else { self.hand };
            self.queue.insert(at, id);
            self.hand = at;
        }
    }
}

#[test]
fn sieve_matches_its_model() {
    compare_holding("sieve", 0, |_| Sieve::default());
}
