//! A device that refuses a batch for one pointer in it: whose pointer it is hears of that, and
//! nobody else.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kvtier::base::status::{Error, Result, Status};
use kvtier::device::simulated::Simulated;
use kvtier::device::{Copy, Device, DeviceMemory, Event, Facts, Memory, State, Stream};
use kvtier::store::executor::Tools;
use kvtier::store::handle::Store;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{CellRange, Finished, SessionOpts, StoreState};

use crate::device_tier::batches::{by_hand, carry_out};
use crate::device_tier::rig::{CELLS, MODEL, RIGHT, TOKENS, in_memory, quick};
use kvtier_testkit::fixtures::store::{
    Done, Engine, Home, LONG_NS, Shape, document, marks_of, runtime, spec_of, wait,
};

/// A device as a driver is: it knows what memory is, and takes nothing of a batch where it does
/// not.
struct Picky {
    inner: Arc<Simulated>,
    unknown: Mutex<Range<u64>>,
    next: Mutex<Next>,
    changed: Condvar,
}

/// What becomes of the next batch.
#[derive(PartialEq)]
enum Next {
    Goes,
    IsHeldUp,
    /// One is.
    Waits,
    Panics,
}

impl Picky {
    fn over(inner: Arc<Simulated>) -> Arc<Picky> {
        let (unknown, next) = (Mutex::new(0..0), Mutex::new(Next::Goes));
        Arc::new(Picky { inner, unknown, next, changed: Condvar::new() })
    }

    fn set_next(&self, next: Next) {
        *self.next.lock().expect("no panic") = next;
        self.changed.notify_all();
    }

    /// Waits, not for ever, until the next is something else.
    fn wait_while(&self, is: Next) {
        let next = self.next.lock().expect("no panic");
        let long = Duration::from_nanos(LONG_NS);
        let waited = self.changed.wait_timeout_while(next, long, |next| *next == is);
        assert!(!waited.expect("no panic").1.timed_out());
    }

    fn pass(&self) {
        let mut next = self.next.lock().expect("no panic");
        if *next == Next::IsHeldUp {
            *next = Next::Waits;
            drop(next);
            self.changed.notify_all();
            let long = Duration::from_nanos(LONG_NS);
            let next = self.next.lock().expect("no panic");
            let goes = self.changed.wait_timeout_while(next, long, |next| *next != Next::Goes);
            drop(goes.expect("no panic"));
        } else if *next == Next::Panics {
            drop(next);
            panic!("a defect that is planted");
        }
    }

    /// The memory of an engine is not known from now on.
    fn forget(&self, engine: &Engine) {
        let memory = engine.bytes().as_ptr_range();
        *self.unknown.lock().expect("no panic") = memory.start as u64..memory.end as u64;
    }
}

impl Device for Picky {
    fn facts(&self) -> Facts {
        self.inner.facts()
    }

    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        self.pass();
        let unknown = self.unknown.lock().expect("no panic").clone();
        let is_known = |copy: &Copy<'_>| {
            copy.tensor.strips().up_to(1).is_none_or(|strip| !unknown.contains(&strip.address))
        };
        if !copies.iter().all(is_known) {
            return Err(Error::new(Status::Invalid, "memory that no driver knows"));
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.submit(stream, after, copies) }
    }

    fn state(&self, event: Event) -> Result<State> {
        self.inner.state(event)
    }

    fn wait(&self, event: Event, deadline_ns: u64) -> Result<()> {
        self.inner.wait(event, deadline_ns)
    }

    fn poll(&self, ended: &mut [Event]) -> usize {
        self.inner.poll(ended)
    }

    fn release(&self, event: Event) -> Result<()> {
        self.inner.release(event)
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        self.inner.allocate(bytes)
    }

    unsafe fn free(&self, memory: &DeviceMemory) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.free(memory) }
    }

    fn create_user_event(&self) -> Result<Event> {
        Device::promise(&*self.inner)
    }

    fn signal_event(&self, event: Event) -> Result<()> {
        Device::keep(&*self.inner, event)
    }

    fn lease_stream(&self) -> Result<Stream> {
        self.inner.lease_stream()
    }

    fn return_stream(&self, stream: Stream) {
        self.inner.return_stream(stream);
    }

    fn close(&self, deadline_ns: u64) -> Result<()> {
        self.inner.close(deadline_ns)
    }
}

fn copies(core: &mut StoreState, tools: &Tools) -> Vec<Finished> {
    while let Some(work) = core.take(WorkerKind::Copy) {
        carry_out(core, tools, work);
    }
    let mut finished = Vec::new();
    core.finished(&mut finished);
    finished
}

#[test]
fn one_bad_pointer_fails_its_own_move_alone() {
    let inner = quick();
    let (mut core, mut tools, session, mut engine) = by_hand(&inner, Memory::Device, Level::Ram);
    let device = Picky::over(inner);
    tools.device = device.clone();
    assert_eq!(core.device_cells(), CELLS);
    let other = core.open_session(0, &SessionOpts::default()).expect("opened");
    core.append(other, &document(1, TOKENS)).expect("room");
    let bad = Engine::new(MODEL, Shape::Tokens, TOKENS);
    device.forget(&bad);
    copies(&mut core, &tools);
    let what = in_memory(engine.whole(), Memory::Device);
    let good =
        core.submit_cell_range(session, TransferKind::Get, Level::Ram, 0, what).expect("taken");
    let what = in_memory(bad.whole(), Memory::Device);
    core.submit_cell_range(other, TransferKind::Get, Level::Ram, 0, what).expect("taken");
    let ended = copies(&mut core, &tools);
    let last = ended.iter().filter(|one| one.last);
    let how = last.map(|one| (one.number == good, one.error.as_ref().map(Error::status)));
    let mut how: Vec<_> = how.collect();
    how.sort_by_key(|(is_good, _)| !is_good);
    assert_eq!(how, [(true, None), (false, Some(Status::Invalid))]);
    engine.check(&marks_of(0, &document(1, TOKENS)), 0..TOKENS, 0..MODEL.layers);
    assert!(bad.is_untouched());
    // Nothing was tried with what is on the device: it is as good as before.
    assert_eq!((core.device_cells(), core.counters.device_lost), (CELLS, 0));
    core.check().expect("the tables agree");
}

/// The same behind an event, in batches that mix sessions.
#[test]
fn one_bad_pointer_behind_an_event_fails_its_own_move_alone() {
    let device = Picky::over(quick());
    let runtime = runtime();
    let spec = spec_of("store(host=8MiB, copiers=1)");
    let store = Store::open_with(runtime.core(), None, &spec, device.clone()).expect("opened");
    let home = Home { store, runtime };
    let space = home.space(1, &MODEL);
    let tokens = document(1, TOKENS);
    let sessions = [home.session(space, &tokens), home.session(space, &tokens)];
    let mut engines = [(); 2].map(|()| Engine::new(MODEL, Shape::Tokens, TOKENS));
    engines[0].compute(&marks_of(0, &tokens));
    assert_eq!(home.put(sessions[0], Level::Ram, &engines[0]), RIGHT);
    engines[0] = Engine::new(MODEL, Shape::Tokens, TOKENS);
    device.forget(&engines[1]);
    let event = Device::promise(&*device).expect("one");
    let after = |engine: &Engine| CellRange {
        after: Some(event),
        ..in_memory(engine.whole(), Memory::Device)
    };
    // Both at once, so that one batch has both.
    let begun = home.store.with(|core| {
        let all = [0, 1].map(|at| {
            core.submit_cell_range(
                sessions[at],
                TransferKind::Get,
                Level::Ram,
                0,
                after(&engines[at]),
            )
        });
        all.into_iter().collect::<Result<Vec<u32>>>()
    });
    let begun = begun.expect("submitted");
    crate::device_tier::rig::until("it was submitted", || {
        home.store.look(|core| core.cells_behind() == 0) == Ok(true)
    });
    assert!(engines[0].is_untouched());
    Device::keep(&*device, event).expect("a promise");
    home.rest();
    assert_eq!(begun.len(), 2);
    engines[0].check(&marks_of(0, &tokens), 0..TOKENS, 0..MODEL.layers);
    assert!(engines[1].is_untouched());
    device.release(event).expect("it has come");
    sessions.into_iter().for_each(|session| home.end(session));
    home.close();
}

/// A store that is closed lets its device go, whatever of it is kept.
#[test]
fn a_closed_store_keeps_no_device() {
    let device = Picky::over(quick());
    let runtime = runtime();
    let spec = spec_of("store(host=8MiB, device=device(capacity=1MiB))");
    let store = Store::open_with(runtime.core(), None, &spec, device.clone()).expect("opened");
    let home = Home { store, runtime };
    let space = home.space(1, &MODEL);
    let session = home.session(space, &document(1, TOKENS));
    let engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
    let what = in_memory(engine.whole(), Memory::Device);
    let ops = home.submit(session, TransferKind::Put, Level::Ram, what).expect("submitted");
    assert_eq!(wait(&ops[0]), Done { status: Status::Ok, tokens: TOKENS });
    assert!(Arc::strong_count(&device) > 1);
    home.store.close(0).expect("closed");
    assert_eq!(Arc::strong_count(&device), 1);
    assert_eq!(device.inner.allocated_bytes(), 0);
    assert_eq!(home.store.audit_device().map_err(|e| e.status()), Err(Status::Closed));
    drop(ops);
}

/// Of what the device does not read back nothing can be said: it stays.
#[test]
fn an_audit_that_is_refused_forgets_nothing() {
    let device = Picky::over(quick());
    let runtime = runtime();
    let spec = spec_of("store(host=8MiB, device=device(capacity=1MiB))");
    let store = Store::open_with(runtime.core(), None, &spec, device.clone()).expect("opened");
    let home = Home { store, runtime };
    let space = home.space(1, &MODEL);
    for number in 0..5 {
        let session = home.session(space, &document(number, TOKENS));
        let engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
        let what = in_memory(engine.whole(), Memory::Device);
        let ops = home.submit(session, TransferKind::Put, Level::Ram, what).expect("submitted");
        assert_eq!(wait(&ops[0]), RIGHT);
        home.end(session);
    }
    let cells = || home.store.look(|core| core.device_cells()).expect("open");
    assert_eq!(cells(), 5 * CELLS);
    let right = home.store.audit_device().expect("open");
    assert_eq!((right.right, right.wrong, right.unknown), (5 * CELLS, 0, 0));
    *device.unknown.lock().expect("no panic") = 0..u64::MAX;
    let found = home.store.audit_device().expect("open");
    assert_eq!((found.right, found.wrong, found.unknown, cells()), (0, 0, 5 * CELLS, 5 * CELLS));
    home.close();
}

/// A close after a defect waits for no work, but an audit has what it looks at until its end.
#[test]
fn an_audit_outlives_a_defect() {
    let device = Picky::over(quick());
    let runtime = runtime();
    let spec = spec_of("store(host=8MiB, copiers=1, device=device(capacity=1MiB))");
    let store = Store::open_with(runtime.core(), None, &spec, device.clone()).expect("opened");
    let home = Home { store, runtime };
    let space = home.space(1, &MODEL);
    let session = home.session(space, &document(1, TOKENS));
    let engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
    let put = |engine: &Engine| {
        let what = in_memory(engine.whole(), Memory::Device);
        home.submit(session, TransferKind::Put, Level::Ram, what).expect("submitted")
    };
    assert_eq!(wait(&put(&engine)[0]), RIGHT);
    device.set_next(Next::IsHeldUp);
    std::thread::scope(|scope| {
        let audit = scope.spawn(|| home.store.audit_device());
        device.wait_while(Next::IsHeldUp);
        device.set_next(Next::Panics);
        let other = home.session(space, &document(3, TOKENS));
        let what = in_memory(engine.whole(), Memory::Device);
        let ops = home.submit(other, TransferKind::Put, Level::Ram, what).expect("submitted");
        assert_eq!(wait(&ops[0]).status, Status::Panic);
        let (told, hears) = std::sync::mpsc::channel();
        let store = &home.store;
        scope.spawn(move || told.send(store.close(0).is_ok()));
        // It may wait for the audit, or must have left it what it needs.
        let _ = hears.recv_timeout(Duration::from_secs(1));
        device.set_next(Next::Goes);
        audit.join().expect("no panic").expect("it was begun before");
    });
    assert_eq!(device.inner.allocated_bytes(), 0);
}
