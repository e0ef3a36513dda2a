//! For policies in which the moment matters at which a skipped object is returned: the model is
//! notified of it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvtier::policy::evictor::{Evictor, Options};
use proptest::prelude::*;

use super::{Model, World, call};

/// A model that keeps skipped objects aside until `freed` returns them.
pub trait Holder: Model {
    /// The object is no longer blocked.
    fn freed(&mut self, id: u64);
}

/// The same model, shared by the world and the caller of `freed`.
struct Shared<H>(Rc<RefCell<H>>);

impl<H: Holder> Model for Shared<H> {
    fn insert(&mut self, id: u64, units: u64, now: i64) {
        self.0.borrow_mut().insert(id, units, now);
    }
    fn touch(&mut self, id: u64, now: i64) {
        self.0.borrow_mut().touch(id, now);
    }
    fn miss(&mut self, id: u64, now: i64) {
        self.0.borrow_mut().miss(id, now);
    }
    fn remove(&mut self, id: u64, evicted: bool) {
        self.0.borrow_mut().remove(id, evicted);
    }
    fn resize(&mut self, id: u64, units: u64) {
        self.0.borrow_mut().resize(id, units);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, now: i64) -> Option<u64> {
        self.0.borrow_mut().victim(blocked, now)
    }
}

/// Same as `compare`, for a model that is notified when an object is no longer blocked.
pub fn compare_holding<H: Holder>(spec: &str, capacity: u64, make: impl Fn(u64) -> H) {
    for leaf_first in [false, true] {
        let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
        proptest!(config, |(calls in prop::collection::vec(call(), 1..300))| {
            let options = Options {
                max_objects: 64,
                capacity_units: capacity,
                holes: !leaf_first,
                remember: 64,
                ..Options::default()
            };
            let evictor = Evictor::open(spec, &options).expect("a known policy");
            let shared = Rc::new(RefCell::new(make(capacity)));
            let mut model = Shared(Rc::clone(&shared));
            let facts = BTreeMap::new();
            let model = &mut model;
            let mut world = World { evictor, model, facts, now: 1_000, leaf_first };
            for call in calls {
                let ids = world.facts.keys().copied();
                let blocked: BTreeSet<u64> = ids.filter(|&id| world.blocked(id)).collect();
                world.step(call)?;
                for id in blocked {
                    if world.facts.contains_key(&id) && !world.blocked(id) {
                        shared.borrow_mut().freed(id);
                    }
                }
            }
        });
    }
}
