//! Helpers for the unit tests of policies: an evictor, and a cache of objects of one unit.

use crate::policy::evictor::{Evictor, NewObject, Options, RequestContext};

/// An evictor for up to 256 objects, without prefix order, of unknown capacity.
pub(crate) fn open(spec: &str) -> Evictor {
    let options = Options { max_objects: 256, holes: true, ..Options::default() };
    Evictor::open(spec, &options).expect("a known policy")
}

pub(crate) fn new(id: u64) -> NewObject {
    NewObject { id, units: 1, ..NewObject::default() }
}

pub(crate) fn insert(e: &mut Evictor, now: i64, context: &RequestContext, id: u64) {
    e.insert(now, context, &[new(id)]).expect("room");
}

/// Evicts so many units, and checks the tables; the ids of the victims.
pub(crate) fn evict(e: &mut Evictor, now: i64, required: u64) -> Vec<u64> {
    let mut out = Vec::new();
    e.evict(now, required, &mut out).expect("a time");
    e.check().expect("sound");
    out.iter().map(|v| v.id).collect()
}

/// A gauge of the policy; NaN where it has none of that name.
pub(crate) fn gauge(e: &Evictor, requested: &str) -> f64 {
    let mut found = f64::NAN;
    e.policy().gauges(e.objects(), &mut |name, value| {
        found = if name == requested { value } else { found };
    });
    found
}

pub(crate) struct Cache {
    pub(crate) evictor: Evictor,
    capacity: u64,
    now: i64,
}

impl Cache {
    pub(crate) fn new(spec: &str, capacity: u64) -> Cache {
        let mut evictor = open(spec);
        evictor.set_capacity(capacity);
        Cache { evictor, capacity, now: 0 }
    }

    /// Looks each id up, and inserts it after a miss; the ids evicted for that.
    pub(crate) fn get(&mut self, ids: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let (mut out, context) = (Vec::new(), RequestContext::default());
        for id in ids {
            self.now += 1;
            let e = &mut self.evictor;
            if e.lookup(self.now, &context, &[id], &mut []).expect("a time") == 0 {
                while e.objects().units() >= self.capacity {
                    out.extend(evict(e, self.now, 1));
                }
                insert(e, self.now, &context, id);
            }
            e.check().expect("sound");
        }
        out
    }

    /// Evicts everything; the order of eviction.
    pub(crate) fn order(&mut self) -> Vec<u64> {
        evict(&mut self.evictor, self.now, u64::MAX)
    }

    pub(crate) fn gauge(&self, name: &str) -> f64 {
        gauge(&self.evictor, name)
    }
}
