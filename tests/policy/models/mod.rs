//! Every incremental policy against a brute-force model of it, under random
//! sequences of calls: lookups, inserts into prefix trees, references, pins,
//! removals, resizes, clock jumps, evictions. A model is a plain O(n) reading of
//! the algorithm's definition; one file each.

mod arc;
mod belady;
mod fifo;
mod gdsf;
mod holding;
mod horizon;
mod lfu;
mod lru;
mod lru_k;
mod pensieve;
mod predictive;
mod qos;
mod rich;
mod s3fifo;
mod sieve;
mod slru;
mod sound;
mod switching;
mod tlru;
mod two_q;
mod wtinylfu;

use std::collections::BTreeMap;

use kvtier::base::status::Status;
use kvtier::policy::evictor::{Evictor, NewObject, Options, RequestContext};
use proptest::prelude::*;

/// Reference model of a policy. `now` is strictly increasing, as the policy sees it.
pub trait Model {
    fn insert(&mut self, id: u64, units: u64, now: i64);
    fn touch(&mut self, id: u64, now: i64);
    fn miss(&mut self, _id: u64, _now: i64) {}
    fn remove(&mut self, id: u64, evicted: bool);
    fn resize(&mut self, _id: u64, _units: u64) {}
    /// The next victim among the objects that are not blocked. The search may change the model
    /// (hands, promotions); the caller removes the victim.
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, now: i64) -> Option<u64>;
    /// Returns an error if `got` is not an acceptable victim. Policies with time-varying scores
    /// accept victims within 5 % of the lowest score.
    fn judge(
        &mut self,
        got: Option<u64>,
        blocked: &dyn Fn(u64) -> bool,
        now: i64,
    ) -> Result<(), String> {
        let want = self.victim(blocked, now);
        if want == got { Ok(()) } else { Err(format!("the model says {want:?}, not {got:?}")) }
    }
}

/// One call.
#[derive(Clone, Copy, Debug)]
enum Call {
    Lookup(u64),
    Insert { id: u64, parent: u64, units: u64 },
    Remove(u64),
    Resize(u64, u64),
    Acquire(u64),
    Release(u64),
    Pin(u64, bool),
    Evict,
    Jump(i64),
}

fn call() -> impl Strategy<Value = Call> {
    let id = 0..40u64;
    prop_oneof![
        6 => id.clone().prop_map(Call::Lookup),
        5 => (id.clone(), 0..80u64, 1..4u64)
            .prop_map(|(id, parent, units)| Call::Insert { id, parent, units }),
        1 => id.clone().prop_map(Call::Remove),
        1 => (id.clone(), 1..5u64).prop_map(|(id, units)| Call::Resize(id, units)),
        1 => id.clone().prop_map(Call::Acquire),
        2 => id.clone().prop_map(Call::Release),
        1 => (id, any::<bool>()).prop_map(|(id, on)| Call::Pin(id, on)),
        3 => Just(Call::Evict),
        1 => (1..4_000_000_000_000i64).prop_map(Call::Jump),
    ]
}

#[derive(Default)]
struct Fact {
    parent: Option<u64>,
    children: u32,
    refs: u32,
    pinned: bool,
}

/// The evictor, its model, and the facts of the objects.
struct World<'a> {
    evictor: Evictor,
    model: &'a mut dyn Model,
    facts: BTreeMap<u64, Fact>,
    now: i64,
    leaf_first: bool,
}

const WHO: RequestContext = RequestContext {
    session: None,
    tenant: 0,
    priority: None,
    length: 0,
    max_length: 0,
    tokens_each: 0,
};

impl World<'_> {
    fn blocked(&self, id: u64) -> bool {
        let fact = &self.facts[&id];
        fact.refs > 0 || fact.pinned || (self.leaf_first && fact.children > 0)
    }

    fn gone(&mut self, id: u64, evicted: bool) {
        self.model.remove(id, evicted);
        if let Some(Fact { parent: Some(parent), .. }) = self.facts.remove(&id)
            && let Some(above) = self.facts.get_mut(&parent)
        {
            above.children -= 1;
        }
    }

    fn lookup(&mut self, id: u64) {
        let found = self.evictor.lookup(self.now, &WHO, &[id], &mut []).expect("a time");
        assert_eq!(found == 1, self.facts.contains_key(&id), "{id}");
        match found {
            1 => self.model.touch(id, self.now),
            _ => self.model.miss(id, self.now),
        }
    }

    fn insert(&mut self, id: u64, parent: u64, units: u64) {
        let parent = Some(parent).filter(|p| self.facts.contains_key(p) && *p != id);
        let new = NewObject { id, parent, units, ..NewObject::default() };
        let done = self.evictor.insert(self.now, &WHO, &[new]);
        if self.facts.contains_key(&id) {
            assert_eq!(done.expect_err("a duplicate").status(), Status::Invalid);
            return;
        }
        done.expect("room");
        let parent = parent.filter(|_| self.leaf_first);
        if let Some(above) = parent.and_then(|p| self.facts.get_mut(&p)) {
            above.children += 1;
        }
        self.facts.insert(id, Fact { parent, ..Fact::default() });
        self.model.insert(id, units, self.now);
    }

    fn evict(&mut self) -> Result<(), TestCaseError> {
        let mut out = Vec::new();
        let outcome = self.evictor.evict(self.now, 1, &mut out).expect("a time");
        prop_assert!(out.len() <= 1 && outcome.shortfall_units == u64::from(out.is_empty()));
        let got = out.first().map(|v| v.id);
        let blocked: BTreeMap<u64, bool> =
            self.facts.keys().map(|&id| (id, self.blocked(id))).collect();
        if let Some(id) = got {
            prop_assert!(!blocked[&id], "{id} is blocked");
        }
        let judged = self.model.judge(got, &|id| blocked[&id], self.now);
        prop_assert!(judged.is_ok(), "{}", judged.unwrap_err());
        if let Some(id) = got {
            self.gone(id, true);
        }
        Ok(())
    }

    fn step(&mut self, call: Call) -> Result<(), TestCaseError> {
        self.now += 1;
        let known = |id: u64| self.facts.contains_key(&id);
        match call {
            Call::Lookup(id) => self.lookup(id),
            Call::Insert { id, parent, units } => self.insert(id, parent, units),
            Call::Remove(id) => {
                let done = self.evictor.remove(self.now, &[id]);
                let may = self.facts.get(&id).is_some_and(|f| f.children == 0);
                prop_assert_eq!(done.is_ok(), may);
                if may {
                    self.gone(id, false);
                }
            }
            Call::Resize(id, units) => {
                prop_assert_eq!(self.evictor.resize(&[id], &[units]).is_ok(), known(id));
                if known(id) {
                    self.model.resize(id, units);
                }
            }
            Call::Acquire(id) => {
                prop_assert_eq!(self.evictor.acquire(&[id]).is_ok(), known(id));
                self.facts.entry(id).and_modify(|f| f.refs += 1);
            }
            Call::Release(id) => {
                let may = self.facts.get(&id).is_some_and(|f| f.refs > 0);
                prop_assert_eq!(self.evictor.release(&[id]).is_ok(), may);
                if may {
                    self.facts.entry(id).and_modify(|f| f.refs -= 1);
                }
            }
            Call::Pin(id, on) => {
                prop_assert_eq!(self.evictor.pin(&[id], on).is_ok(), known(id));
                self.facts.entry(id).and_modify(|f| f.pinned = on);
            }
            Call::Evict => self.evict()?,
            Call::Jump(by) => self.now += by,
        }
        let sound = self.evictor.check();
        prop_assert!(sound.is_ok(), "{:?}", sound.err());
        Ok(())
    }
}

/// Compares the policy `spec` with the model that `model` makes, with prefixes and with holes. Both
/// get the same `capacity`, in units.
pub fn compare(spec: &str, capacity: u64, model: impl Fn(u64) -> Box<dyn Model>) {
    compare_cases(spec, capacity, 256, model);
}

/// Same as `compare`, with a given number of sequences.
pub fn compare_cases(spec: &str, capacity: u64, cases: u32, model: impl Fn(u64) -> Box<dyn Model>) {
    for leaf_first in [false, true] {
        let config =
            ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
        proptest!(config, |(calls in prop::collection::vec(call(), 1..300))| {
            let options = Options {
                max_objects: 64,
                capacity_units: capacity,
                holes: !leaf_first,
                log_entries: 8,
                remember: 64,
                ..Options::default()
            };
            let evictor = Evictor::open(spec, &options).expect("a known policy");
            let mut model = model(capacity);
            let facts = BTreeMap::new();
            let model = &mut *model;
            let mut world = World { evictor, model, facts, now: 1_000, leaf_first };
            for call in calls {
                world.step(call)?;
            }
        });
    }
}
