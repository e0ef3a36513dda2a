//! GDSF: clock, uses, cost and size.

use std::collections::BTreeMap;

use super::{Model, compare};
use crate::models::rich::{self, Object, State, compare_rich, must_be};

/// Number of uses, and the clock at the last use.
#[derive(Clone, Copy)]
struct Entry {
    uses: u32,
    clock: f64,
}

#[derive(Default)]
struct Gdsf {
    entries: BTreeMap<u64, Entry>,
    clock: f64,
}

impl Gdsf {
    fn value(&self, object: &Object, id: u64) -> f64 {
        let facts = object.facts;
        let (l, n) = (f64::from(facts.context), f64::from(facts.tokens));
        let cost = match facts.cost {
            own if own > 0.0 => f64::from(own),
            _ if n > 0.0 => n * 2.0 + 0.5 * (n * l + n * n / 2.0),
            _ => 1.0,
        };
        let Entry { uses, clock } = self.entries[&id];
        clock + f64::from(uses) * cost / object.units as f64
    }
}

impl rich::Model for Gdsf {
    fn inserted(&mut self, _state: &State, id: u64) {
        self.entries.insert(id, Entry { uses: 1, clock: self.clock });
    }
    fn touched(&mut self, _state: &State, id: u64, _before: &Object) {
        let clock = self.clock;
        self.entries.entry(id).and_modify(|e| *e = Entry { uses: e.uses + 1, clock });
    }
    fn removed(&mut self, state: &State, id: u64, evicted: bool) {
        if evicted {
            self.clock = self.clock.max(self.value(&state.objects[&id], id));
        }
        self.entries.remove(&id);
    }
    fn judge(&mut self, state: &State, got: Option<u64>, _by: &str) -> Result<(), String> {
        let value = |(id, o): &(u64, &Object)| (self.value(o, *id), o.used);
        let least = state.free().min_by(|a, b| value(a).partial_cmp(&value(b)).expect("numbers"));
        must_be(least.map(|(id, _)| id), got)
    }
}

#[test]
fn gdsf_with_facts_matches_its_model() {
    compare_rich("gdsf(alpha=0.5,beta=2)", Gdsf::default);
}

/// Without facts every cost is 1.
#[derive(Default)]
struct Plain {
    objects: BTreeMap<u64, (u32, f64, u64, i64)>,
    clock: f64,
}

impl Plain {
    fn value(&self, id: u64) -> (f64, i64) {
        let (uses, clock, units, at) = self.objects[&id];
        (clock + f64::from(uses) / units as f64, at)
    }
}

impl Model for Plain {
    fn insert(&mut self, id: u64, units: u64, now: i64) {
        self.objects.insert(id, (1, self.clock, units, now));
    }
    fn touch(&mut self, id: u64, now: i64) {
        let clock = self.clock;
        self.objects.entry(id).and_modify(|o| *o = (o.0 + 1, clock, o.2, now));
    }
    fn remove(&mut self, id: u64, evicted: bool) {
        if evicted {
            self.clock = self.clock.max(self.value(id).0);
        }
        self.objects.remove(&id);
    }
    fn resize(&mut self, id: u64, units: u64) {
        self.objects.entry(id).and_modify(|o| o.2 = units);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        let free = self.objects.keys().copied().filter(|id| !blocked(*id));
        free.min_by(|a, b| self.value(*a).partial_cmp(&self.value(*b)).expect("numbers"))
    }
}

#[test]
fn gdsf_matches_its_model() {
    compare("gdsf", 0, |_| Box::<Plain>::default());
}
