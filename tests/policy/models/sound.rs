//! Invariants of every registered policy: blocked objects are never victims, a victim is found
//! while there is a candidate, and the data structures stay sound.

use std::collections::BTreeSet;

use kvtier::policy::registry::ENTRIES;

use super::{Model, compare_cases};

#[derive(Default)]
struct Any(BTreeSet<u64>);

impl Model for Any {
    fn insert(&mut self, id: u64, _units: u64, _now: i64) {
        self.0.insert(id);
    }
    fn touch(&mut self, _id: u64, _now: i64) {}
    fn remove(&mut self, id: u64, _evicted: bool) {
        self.0.remove(&id);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        self.0.iter().copied().find(|&id| !blocked(id))
    }
    fn judge(
        &mut self,
        got: Option<u64>,
        blocked: &dyn Fn(u64) -> bool,
        now: i64,
    ) -> Result<(), String> {
        match (got, self.victim(blocked, now)) {
            (Some(id), _) if !blocked(id) => Ok(()),
            (None, None) => Ok(()),
            (got, could) => Err(format!("got {got:?} where {could:?} could leave")),
        }
    }
}

#[test]
fn every_policy_evicts_only_candidates() {
    let specs = ENTRIES.iter().map(|e| e.name).filter(|name| *name != "custom");
    let more = [
        "horizon(objective=cost)",
        "horizon(watch=64,history=0)",
        "auto(of=any(lru,arc,s3fifo,qos),window=16,patience=1,margin=0)",
    ];
    for spec in specs.chain(more) {
        compare_cases(spec, 20, 48, |_| Box::<Any>::default());
    }
}
