//! Classes, ageing and floors, then the last use.

use std::collections::{BTreeMap, BTreeSet};

use crate::models::compare;
use crate::models::rich::{Anyone, Model, Object, Recent, State, compare_rich, must_be};

#[derive(Clone, Copy)]
struct Rules {
    strict: bool,
    ageing_ns: i64,
    floor: Option<f64>,
}

/// Class and tenant of each object, as of its last use.
struct Qos {
    rules: Rules,
    standing: BTreeMap<u64, (i64, Option<u32>)>,
}

impl Qos {
    fn place(&mut self, state: &State, id: u64) {
        let standing = match state.user(id) {
            Some(user) => (i64::from(user.priority.min(2)), Some(user.tenant)),
            None => (1, None),
        };
        self.standing.insert(id, standing);
    }

    /// Tenants below the floor while another tenant is not below it.
    fn protected(&self, state: &State) -> BTreeSet<u32> {
        let mut held: BTreeMap<Option<u32>, u64> = BTreeMap::new();
        for (id, object) in &state.objects {
            *held.entry(self.standing[id].1).or_default() += object.units;
        }
        let total: u64 = held.values().sum();
        let active = held.keys().flatten().count();
        let share = self.rules.floor.unwrap_or(0.5 / active as f64);
        let below = |(tenant, units): (&Option<u32>, &u64)| {
            tenant.filter(|_| (*units as f64) < share * total as f64)
        };
        let short: BTreeSet<u32> = held.iter().filter_map(below).collect();
        if short.len() == held.len() || self.rules.strict { BTreeSet::new() } else { short }
    }

    fn victim(&self, state: &State, passed: &BTreeSet<u32>) -> Option<u64> {
        let open = |id: &u64| self.standing[id].1.is_none_or(|t| !passed.contains(&t));
        // The candidate of each class is its least recently used object.
        let put_up = |class| {
            let of = state.free().filter(|(id, _)| self.standing[id].0 == class && open(id));
            of.min_by_key(|(_, o)| o.used)
        };
        let aged = |id: &u64, o: &Object| {
            let class = self.standing[id].0;
            if self.rules.strict || self.rules.ageing_ns == 0 {
                return class;
            }
            (class - (state.now - o.used) / self.rules.ageing_ns).max(0)
        };
        let best = (0..3).filter_map(put_up).min_by_key(|(id, o)| (aged(id, o), o.used));
        best.map(|(id, _)| id)
    }
}

impl Model for Qos {
    fn inserted(&mut self, state: &State, id: u64) {
        self.place(state, id);
    }
    fn touched(&mut self, state: &State, id: u64, _before: &Object) {
        self.place(state, id);
    }
    fn removed(&mut self, _state: &State, id: u64, _evicted: bool) {
        self.standing.remove(&id);
    }
    fn judge(&mut self, state: &State, got: Option<u64>, _by: &str) -> Result<(), String> {
        let passed = self.protected(state);
        let first = self.victim(state, &passed);
        must_be(first.or_else(|| self.victim(state, &BTreeSet::new())), got)
    }
}

#[test]
fn qos_matches_its_model() {
    let rules =
        |strict, ageing_s: i64, floor| Rules { strict, ageing_ns: ageing_s * 1_000_000_000, floor };
    for (spec, rules) in [
        ("qos", rules(false, 60, None)),
        ("qos(ageing=5s,floor=20%)", rules(false, 5, Some(0.2))),
        ("qos_aware(ageing=0,floor=0)", rules(false, 0, Some(0.0))),
        ("qos(floor=0.45)", rules(false, 60, Some(0.45))),
        ("qos(strict=true)", rules(true, 0, None)),
    ] {
        compare_rich(spec, || Qos { rules, standing: BTreeMap::new() });
    }
}

/// The order within a class is that of the inner policy, so the victim is not checked. The test
/// checks that invariants hold and that no blocked object is a victim.
struct Sound;

impl Model for Sound {
    fn judge(&mut self, state: &State, got: Option<u64>, _by: &str) -> Result<(), String> {
        let any = state.free().next().is_some();
        if got.is_some() == any { Ok(()) } else { Err(format!("{got:?}, and there is {any}")) }
    }
}

#[test]
fn qos_over_other_policies_keeps_its_invariants() {
    for inner in ["fifo", "lfu", "lru-k", "gdsf", "pensieve", "predictive", "tlru"] {
        compare_rich(&format!("qos(inner={inner},floor=30%)"), || Sound);
    }
}

/// Without sessions there is one class and no floor.
#[test]
fn qos_without_sessions_matches_its_model() {
    compare("qos", 0, |_| Box::<Recent>::default());
    for inner in ["arc", "s3fifo", "sieve", "wtinylfu", "slru", "2q"] {
        compare(&format!("qos(inner={inner})"), 10, |_| Box::<Anyone>::default());
    }
}
