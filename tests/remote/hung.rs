//! A remote that hangs in a call: waiting callers continue after twice the request timeout, and the
//! store recovers when the call has ended. The clock is manual.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvtier::base::clock::Clock;
use kvtier::base::op::{OpOpts, OpRef, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::{Result, Status};
use kvtier::store::spec::CustomRemote;
use kvtier::store::state::{Level, TransferKind};
use kvtier::tier::remote::{Caps, Client, Gets, Puts, Queries, Remote, Server};
use kvtier_testkit::fixtures::store::{
    Engine, Model, Shape, TestStore, document, marks_of, spec_of, wait,
};
use kvtier_testkit::remote::simulated::{Plan, Simulated};

const MODEL: Model = Model { layers: 4, heads: 2, run: 64, chunk: 16 };
/// Timeout of a request.
const TIMEOUT_NS: u64 = 200_000_000;
const MINUTES: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Get = 0,
    Put = 1,
    Query = 2,
}

/// State of a gate: which calls hang, and how many calls are in it now.
#[derive(Default)]
struct Gate {
    state: Mutex<([bool; 3], [usize; 3])>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self, call: Call) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.1[call as usize] += 1;
        self.changed.notify_all();
        while state.0[call as usize] {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.1[call as usize] -= 1;
    }

    fn set(&self, call: Call, hangs: bool) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0[call as usize] = hangs;
        self.changed.notify_all();
    }

    /// Waits until `count` calls hang.
    fn until(&self, call: Call, count: usize) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_less = |state: &mut ([bool; 3], [usize; 3])| state.1[call as usize] < count;
        let waited = self.changed.wait_timeout_while(state, MINUTES, is_less);
        assert!(!waited.unwrap_or_else(PoisonError::into_inner).1.timed_out(), "no call came");
    }
}

/// A remote with a gate before it.
#[derive(Clone)]
struct Gated(Simulated, Arc<Gate>);

struct GatedLane(Box<dyn Client>, Arc<Gate>);

impl Remote for Gated {
    fn caps(&self) -> Caps {
        self.0.caps()
    }

    fn client(&self) -> Box<dyn Client> {
        Box::new(GatedLane(self.0.client(), self.1.clone()))
    }
}

impl Client for GatedLane {
    fn greet(&mut self, deadline_ns: u64) -> Result<Server> {
        self.0.greet(deadline_ns)
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        self.1.pass(Call::Get);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.0.get(gets, deadline_ns) }
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        self.1.pass(Call::Put);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.0.put(puts, deadline_ns) }
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.1.pass(Call::Query);
        self.0.lookup(queries, deadline_ns);
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.0.remove(queries, deadline_ns);
    }
}

/// Opens a store with such a remote and this clock.
fn open(remote: &Gated, clock: &Clock) -> TestStore {
    let mut spec = spec_of(&format!(
        "store(host=8MiB, remote=custom(object=16KiB, fetchers=1, uploaders=1, lookup=explicit, \
         timeout={}))",
        TIMEOUT_NS / 1_000_000
    ));
    let remote = remote.clone();
    spec.custom_remote = Some(CustomRemote(Arc::new(move |_| Box::new(remote.clone()))));
    let opts = RuntimeOpts { workers: 1, clock: clock.clone(), ..RuntimeOpts::default() };
    let runtime = Runtime::open(opts).expect("opened");
    TestStore::open_with(runtime, &spec, None, None)
}

/// Advances the clock until an op has ended. Returns its status.
fn ended(clock: &Clock, op: &OpRef) -> Status {
    let begun = Instant::now();
    while op.state() & RELEASED == 0 {
        assert!(begun.elapsed() < MINUTES, "it waits for a call that hangs");
        clock.advance(TIMEOUT_NS / 4);
        std::thread::sleep(Duration::from_millis(1));
    }
    wait(op).status
}

fn engine(tokens: &[u32]) -> Engine {
    Engine::computed(MODEL, Shape::Tokens, &marks_of(1, tokens))
}

/// A store with a gated remote, to which another store has uploaded documents.
struct World {
    // First field: the gate opens before the store is dropped, which waits for hung calls.
    gate: Open,
    clock: Clock,
    store: TestStore,
}

/// Opens the gate for all calls on drop, also after a failure.
struct Open(Arc<Gate>);

impl Drop for Open {
    fn drop(&mut self) {
        for call in [Call::Get, Call::Put, Call::Query] {
            self.0.set(call, false);
        }
    }
}

impl World {
    fn new(documents: &[Vec<u32>]) -> World {
        let (clock, gate) = (Clock::manual(1), Arc::new(Gate::default()));
        let remote = Gated(Simulated::new(1, Plan::default(), clock.clone()), gate.clone());
        let other = open(&remote, &clock);
        for tokens in documents {
            let session = other.session(other.namespace(1, &MODEL), tokens);
            assert_eq!(other.put(session, Level::Remote, &engine(tokens)).status, Status::Ok);
            other.close_session(session);
        }
        other.close();
        World { gate: Open(gate), store: open(&remote, &clock), clock }
    }

    fn session(&self, tokens: &[u32]) -> u32 {
        self.store.session(self.store.namespace(1, &MODEL), tokens)
    }

    fn submit(&self, session: u32, kind: TransferKind, level: Level, engine: &Engine) -> OpRef {
        self.store.submit(session, kind, level, engine.whole()).expect("submitted").remove(0)
    }

    fn close(self) {
        self.store.close();
    }

    /// Starts a remote lookup of a session.
    fn locate(&self, session: u32) -> OpRef {
        self.store.handle.locate(session, &OpOpts::default()).expect("begun")
    }
}

#[test]
fn hung_fetch_is_a_miss() {
    let documents = [document(1, 64), document(2, 64)];
    let world = World::new(&documents);
    let sessions = documents.each_ref().map(|tokens| world.session(tokens));
    for session in sessions {
        let op = world.locate(session);
        assert_eq!(wait(&op).tokens, 64);
    }
    world.gate.0.set(Call::Get, true);
    let engines = [0, 1].map(|_| Engine::new(MODEL, Shape::Heads, 64));
    let first = world.submit(sessions[0], TransferKind::Get, Level::Ram, &engines[0]);
    world.gate.0.until(Call::Get, 1);
    // One get waits for the same cells, and another one is queued behind them.
    let same = world.submit(sessions[0], TransferKind::Get, Level::Ram, &engines[0]);
    let other = world.submit(sessions[1], TransferKind::Get, Level::Ram, &engines[1]);
    assert_eq!(first.state() & RELEASED, 0, "its timeout has not passed");
    for op in [&first, &same, &other] {
        assert_eq!(ended(&world.clock, op), Status::NotFound);
    }
    // A later get does not wait either, and a put of such a cell fails as unavailable.
    let later = world.submit(sessions[0], TransferKind::Get, Level::Ram, &engines[0]);
    assert_eq!(wait(&later).status, Status::NotFound);
    let from = engine(&documents[0]);
    let put = world.submit(sessions[0], TransferKind::Put, Level::Ram, &from);
    assert_eq!(wait(&put).status, Status::Unavailable);
    let counted = world.store.handle.with(|core| Ok(core.remote_stats())).expect("open");
    assert_eq!(counted.expect("a remote").hung_requests, 1, "{counted:?}");
    // When the call continues, the store recovers.
    world.gate.0.set(Call::Get, false);
    world.store.settle();
    for ((session, tokens), mut engine) in sessions.iter().zip(&documents).zip(engines) {
        let op = world.submit(*session, TransferKind::Get, Level::Ram, &engine);
        assert_eq!(wait(&op).status, Status::Ok);
        engine.check(&marks_of(1, tokens), 0..64, 0..MODEL.layers);
        world.store.close_session(*session);
    }
    world.close();
}

#[test]
fn hung_lookup_finds_nothing() {
    let world = World::new(&[document(1, 64)]);
    let session = world.session(&document(1, 64));
    world.gate.0.set(Call::Query, true);
    let first = world.locate(session);
    world.gate.0.until(Call::Query, 1);
    assert_eq!(ended(&world.clock, &first), Status::Ok);
    // No worker is left for another lookup.
    let later = world.locate(session);
    assert_eq!(wait(&later).tokens, 0);
    world.gate.0.set(Call::Query, false);
    world.store.settle();
    let again = world.locate(session);
    assert_eq!(wait(&again).tokens, 64);
    world.store.close_session(session);
    world.close();
}

#[test]
fn hung_upload_ends_its_put() {
    let world = World::new(&[]);
    let tokens = document(1, 64);
    let session = world.session(&tokens);
    world.gate.0.set(Call::Put, true);
    let from = engine(&tokens);
    let op = world.submit(session, TransferKind::Put, Level::Remote, &from);
    world.gate.0.until(Call::Put, 1);
    assert_eq!(ended(&world.clock, &op), Status::Timeout);
    // Resident KV is not affected.
    let mut engine = Engine::new(MODEL, Shape::Heads, 64);
    let get = world.submit(session, TransferKind::Get, Level::Ram, &engine);
    assert_eq!(wait(&get).status, Status::Ok);
    engine.check(&marks_of(1, &tokens), 0..64, 0..MODEL.layers);
    world.gate.0.set(Call::Put, false);
    world.store.close_session(session);
    world.store.settle();
    world.close();
}
