//! Random calls for policies that use more than accesses: objects have facts, sessions have
//! tenants, classes and lengths, engines give hints.

use std::collections::{BTreeMap, BTreeSet};

use kvtier::meta::objects::Facts;
use kvtier::policy::Hint;
use kvtier::policy::evictor::{Evictor, NewObject, Options, RequestContext};
use proptest::prelude::*;

/// State of a session in the table.
#[derive(Clone, Copy, Debug, Default)]
pub struct User {
    pub tenant: u32,
    pub priority: u8,
    pub length: u32,
    pub max_length: u32,
    pub turns: u32,
    pub active_ns: i64,
    pub next_use: Option<(i64, f32)>,
}

impl User {
    /// Updates the session from the context of a call.
    fn note(&mut self, request: &RequestContext) {
        self.tenant = request.tenant;
        self.priority = request.priority.unwrap_or(self.priority);
        self.length = self.length.max(request.length);
        self.max_length = self.max_length.max(request.max_length);
    }
}

pub type Users = BTreeMap<u64, User>;

/// Facts of an object.
#[derive(Clone, Copy, Debug, Default)]
pub struct Object {
    pub units: u64,
    pub facts: Facts,
    pub session: Option<u64>,
    pub used: i64,
    pub refs: u32,
}

pub type Objects = BTreeMap<u64, Object>;

/// Complete state of sessions and objects, kept by the harness.
#[derive(Default)]
pub struct State {
    pub users: Users,
    pub objects: Objects,
    pub now: i64,
}

impl State {
    pub fn user(&self, id: u64) -> Option<&User> {
        self.users.get(&self.objects[&id].session?)
    }

    /// Candidates for eviction.
    pub fn free(&self) -> impl Iterator<Item = (u64, &Object)> {
        self.objects.iter().filter(|(_, o)| o.refs == 0).map(|(&id, o)| (id, o))
    }
}

/// Reference model of a policy. Its methods run after the state changed, except `removed`, which
/// runs before.
pub trait Model {
    fn inserted(&mut self, _state: &State, _id: u64) {}
    /// `before` is the object before the change.
    fn touched(&mut self, _state: &State, _id: u64, _before: &Object) {}
    fn removed(&mut self, _state: &State, _id: u64, _evicted: bool) {}
    fn resized(&mut self, _state: &State, _id: u64) {}
    fn hinted(&mut self, _state: &State, _id: u64, _hint: &Hint) {}
    /// Returns an error if `got` is not an acceptable victim. `by` is the name of the policy that
    /// chose it.
    fn judge(&mut self, state: &State, got: Option<u64>, by: &str) -> Result<(), String>;
}

/// A model for `compare`. It accepts any victim, but requires one if there is a candidate.
#[derive(Default)]
pub struct Anyone(BTreeSet<u64>);

impl crate::models::Model for Anyone {
    fn insert(&mut self, id: u64, _units: u64, _now: i64) {
        self.0.insert(id);
    }
    fn touch(&mut self, _id: u64, _now: i64) {}
    fn remove(&mut self, id: u64, _evicted: bool) {
        self.0.remove(&id);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        self.0.iter().copied().find(|id| !blocked(*id))
    }
    fn judge(
        &mut self,
        got: Option<u64>,
        blocked: &dyn Fn(u64) -> bool,
        now: i64,
    ) -> Result<(), String> {
        let any = self.victim(blocked, now).is_some();
        if got.is_some() == any { Ok(()) } else { Err(format!("{got:?}, and there is {any}")) }
    }
}

/// A model for `compare`: the least recently used object.
#[derive(Default)]
pub struct Recent(BTreeMap<u64, i64>);

impl crate::models::Model for Recent {
    fn insert(&mut self, id: u64, _units: u64, now: i64) {
        self.0.insert(id, now);
    }
    fn touch(&mut self, id: u64, now: i64) {
        self.0.insert(id, now);
    }
    fn remove(&mut self, id: u64, _evicted: bool) {
        self.0.remove(&id);
    }
    fn victim(&mut self, blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        let free = self.0.iter().filter(|(id, _)| !blocked(**id));
        free.min_by_key(|(_, at)| **at).map(|(id, _)| *id)
    }
}

/// Accepts this victim only.
pub fn must_be(want: Option<u64>, got: Option<u64>) -> Result<(), String> {
    if want == got { Ok(()) } else { Err(format!("the model says {want:?}, not {got:?}")) }
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Lookup(u64, Option<u64>, u32),
    Insert(u64, Option<u64>, u64, Facts),
    Remove(u64),
    Resize(u64, u64),
    Acquire(u64),
    Release(u64),
    Evict(u64),
    Hint(u64, i64, f32, bool),
    Jump(i64),
}

fn facts() -> impl Strategy<Value = Facts> {
    let figures = (0..2000u32, 0..600u32, 0..5u16, 0..5u16, 0..6u32, 0..6u32);
    let cost = prop_oneof![3 => Just(0.0f32), 1 => 0.0..50.0f32, 1 => Just(f32::NAN)];
    (figures, cost, prop_oneof![4 => Just(0i64), 1 => 0..400_000_000_000i64]).prop_map(
        |((context, tokens, layer, layers, chunk, chunks), cost, next_use_ns)| Facts {
            context,
            tokens,
            layer,
            layers,
            chunk,
            chunks,
            cost,
            next_use_ns,
        },
    )
}

fn call() -> impl Strategy<Value = Call> {
    let id = 0..40u64;
    let session = || prop::option::weighted(0.8, 0..9u64);
    prop_oneof![
        8 => (id.clone(), session(), 0..4000u32)
            .prop_map(|(id, session, length)| Call::Lookup(id, session, length)),
        8 => (id.clone(), session(), 1..4u64, facts())
            .prop_map(|(id, session, units, facts)| Call::Insert(id, session, units, facts)),
        1 => id.clone().prop_map(Call::Remove),
        1 => (id.clone(), 1..5u64).prop_map(|(id, units)| Call::Resize(id, units)),
        1 => id.clone().prop_map(Call::Acquire),
        1 => id.clone().prop_map(Call::Release),
        5 => (0..9u64).prop_map(Call::Evict),
        1 => (id, 0..400_000_000_000i64, 0.5..1.0f32, prop::bool::weighted(0.1))
            .prop_map(|(id, ahead, sure, done)| Call::Hint(id, ahead, sure, done)),
        2 => (1..40_000_000_000i64).prop_map(Call::Jump),
        1 => Just(Call::Jump(10_000_000_000)),
    ]
}

/// Request context of a session: three tenants, three classes, and one class above the highest.
fn request(session: Option<u64>, length: u32) -> RequestContext {
    let Some(id) = session else { return RequestContext::default() };
    RequestContext {
        session,
        tenant: (id % 3) as u32,
        priority: (id < 8).then_some((id % 4) as u8),
        length,
        max_length: 4000,
        ..RequestContext::default()
    }
}

struct World<'a> {
    evictor: Evictor,
    model: &'a mut dyn Model,
    state: State,
}

impl World<'_> {
    fn see(&mut self, request: &RequestContext) {
        let Some(id) = request.session else { return };
        let fresh = User { priority: 1, ..User::default() };
        let user = self.state.users.entry(id).or_insert(fresh);
        user.note(request);
        user.turns += 1;
        user.active_ns = self.state.now;
    }

    fn lookup(&mut self, id: u64, session: Option<u64>, length: u32) {
        let request = request(session, length);
        let now = self.state.now;
        let found = self.evictor.lookup(now, &request, &[id], &mut []).expect("a time") == 1;
        assert_eq!(found, self.state.objects.contains_key(&id));
        self.see(&request);
        if found {
            let object = self.state.objects.get_mut(&id).expect("found");
            let before = *object;
            object.session = session.or(object.session);
            object.used = now;
            self.model.touched(&self.state, id, &before);
        }
    }

    fn insert(&mut self, id: u64, session: Option<u64>, units: u64, facts: Facts) {
        if self.state.objects.contains_key(&id) {
            return;
        }
        let (now, request) = (self.state.now, request(session, 500));
        let new = NewObject { id, parent: None, units, facts };
        self.evictor.insert(now, &request, &[new]).expect("room");
        match session.and_then(|id| self.state.users.get_mut(&id)) {
            Some(user) => user.note(&request),
            None => self.see(&request),
        }
        let object = Object { units, facts, session, used: now, refs: 0 };
        self.state.objects.insert(id, object);
        self.model.inserted(&self.state, id);
    }

    fn evict(&mut self, ahead: u64) -> Result<(), TestCaseError> {
        let mut out = Vec::new();
        // A preview has no side effects.
        self.evictor.preview(self.state.now, ahead, &mut out).expect("a time");
        let sound = self.evictor.check();
        prop_assert!(sound.is_ok(), "{:?}", sound.err());
        self.state.now += 4;
        out.clear();
        let outcome = self.evictor.evict(self.state.now, 1, &mut out).expect("a time");
        prop_assert!(out.len() <= 1);
        let got = out.first().map(|v| v.id);
        if let Some(id) = got {
            prop_assert_eq!(self.state.objects[&id].refs, 0, "{} is blocked", id);
        }
        let judged = self.model.judge(&self.state, got, outcome.decided_by);
        prop_assert!(judged.is_ok(), "{}", judged.unwrap_err());
        if let Some(id) = got {
            self.model.removed(&self.state, id, true);
            self.state.objects.remove(&id);
        }
        Ok(())
    }

    fn hint(&mut self, id: u64, hint: &Hint) {
        let Some(object) = self.state.objects.get_mut(&id) else { return };
        let request = request(object.session, 0);
        self.evictor.hint(self.state.now, &request, &[id], hint).expect("a time");
        if let (Some(user), Some(next)) = (request.session, hint.next_use) {
            self.state.users.entry(user).and_modify(|user| user.next_use = Some(next));
        }
        self.model.hinted(&self.state, id, hint);
    }

    fn step(&mut self, call: Call) -> Result<(), TestCaseError> {
        // Advances the clock by more than the stamps that a call takes, so that the policy sees
        // this time.
        self.state.now += 4;
        match call {
            Call::Lookup(id, session, length) => self.lookup(id, session, length),
            Call::Insert(id, session, units, facts) => self.insert(id, session, units, facts),
            Call::Evict(ahead) => self.evict(ahead)?,
            Call::Jump(by) => self.state.now += by,
            Call::Remove(id) if self.state.objects.contains_key(&id) => {
                self.evictor.remove(self.state.now, &[id]).expect("there");
                self.model.removed(&self.state, id, false);
                self.state.objects.remove(&id);
            }
            Call::Resize(id, units) => {
                if let Some(object) = self.state.objects.get_mut(&id) {
                    object.units = units;
                    self.evictor.resize(&[id], &[units]).expect("there");
                    self.model.resized(&self.state, id);
                }
            }
            Call::Acquire(id) => {
                if let Some(object) = self.state.objects.get_mut(&id) {
                    object.refs += 1;
                    self.evictor.acquire(&[id]).expect("there");
                }
            }
            Call::Release(id) => {
                if let Some(o) = self.state.objects.get_mut(&id).filter(|o| o.refs > 0) {
                    o.refs -= 1;
                    self.evictor.release(&[id]).expect("held");
                }
            }
            Call::Hint(id, ahead, sure, done) => {
                let next_use = Some((self.state.now + ahead, sure));
                self.hint(id, &Hint { next_use, done, ..Hint::default() });
            }
            Call::Remove(_) => {}
        }
        let sound = self.evictor.check();
        prop_assert!(sound.is_ok(), "{:?}", sound.err());
        Ok(())
    }
}

/// Compares the policy `spec` with the model that `model` makes, with holes allowed.
pub fn compare_rich<M: Model>(spec: &str, model: impl Fn() -> M) {
    let config = ProptestConfig { failure_persistence: None, cases: 100, ..Default::default() };
    proptest!(config, |(calls in prop::collection::vec(call(), 1..300))| {
        let options = Options { max_objects: 64, holes: true, remember: 64, ..Options::default() };
        let evictor = Evictor::open(spec, &options).expect("a known policy");
        let mut model = model();
        let state = State { now: 1_000_000_000, ..State::default() };
        let mut world = World { evictor, model: &mut model, state };
        for call in calls {
            world.step(call)?;
        }
    });
}
