//! T-LRU: tokens that the next turn does not need, then the rest.

use std::collections::BTreeMap;

use crate::models::compare;
use crate::models::rich::{Model, Object, Recent, State, compare_rich, must_be};

const THRESHOLD: i64 = 1500;
const TURN: i64 = 100;

/// Whether each object was needed at its last use.
#[derive(Default)]
struct Tlru(BTreeMap<u64, bool>);

impl Tlru {
    fn place(&mut self, state: &State, id: u64) {
        let needed = state.user(id).is_none_or(|user| {
            let facts = state.objects[&id].facts;
            let history = i64::from(user.length).max(i64::from(facts.context + facts.tokens));
            i64::from(facts.context) < (history + TURN - THRESHOLD).max(0)
        });
        self.0.insert(id, needed);
    }
}

impl Model for Tlru {
    fn inserted(&mut self, state: &State, id: u64) {
        self.place(state, id);
    }
    fn touched(&mut self, state: &State, id: u64, _before: &Object) {
        self.place(state, id);
    }
    fn judge(&mut self, state: &State, got: Option<u64>, _by: &str) -> Result<(), String> {
        let least = state.free().min_by_key(|(id, o)| (self.0[id], o.used));
        must_be(least.map(|(id, _)| id), got)
    }
}

#[test]
fn tlru_matches_its_model() {
    compare_rich("tlru(threshold=1500,turn=100)", Tlru::default);
}

/// Without sessions no token is known to be unneeded.
#[test]
fn tlru_without_sessions_matches_its_model() {
    compare("tlru", 0, |_| Box::<Recent>::default());
}
