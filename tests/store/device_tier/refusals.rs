//! A device that refuses a batch because of one pointer in it: only the transfer with that pointer
//! fails.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kvtier::base::status::{Error, Result, Status};
use kvtier::device::simulated::Simulated;
use kvtier::device::{Copy, Device, Memory};
use kvtier::store::state::CellRange;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::WorkerKind;

use crate::device_tier::batches::with_document;
use crate::device_tier::device_store::{CELLS, MODEL, RIGHT, TOKENS, quick};
use kvtier_testkit::fixtures::device_hooks::{Hooked, Hooks};
use kvtier_testkit::fixtures::store::{
    Engine, LONG_NS, Shape, TestStore, document, in_memory, marks_of, spec_of, until, wait,
};

/// Checks addresses as a driver does: a batch with unknown memory is refused.
struct Picky {
    unknown: Mutex<Range<u64>>,
    next: Mutex<Next>,
    changed: Condvar,
}

/// Behaviour of the next batch.
#[derive(PartialEq)]
enum Next {
    Goes,
    IsHeldUp,
    /// A batch is being held up.
    Waits,
    Panics,
}

fn picky(inner: Arc<Simulated>) -> Arc<Hooked<Picky, Simulated>> {
    let (unknown, next) = (Mutex::new(0..0), Mutex::new(Next::Goes));
    Arc::new(Hooked { inner, hooks: Picky { unknown, next, changed: Condvar::new() } })
}

impl Picky {
    fn set_next(&self, next: Next) {
        *self.next.lock().expect("no panic") = next;
        self.changed.notify_all();
    }

    /// Waits until the next batch behaves differently.
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
            panic!("an injected panic");
        }
    }

    /// The driver no longer knows the memory of this engine.
    fn unregister(&self, engine: &Engine) {
        let memory = engine.bytes().as_ptr_range();
        *self.unknown.lock().expect("no panic") = memory.start as u64..memory.end as u64;
    }
}

impl Hooks for Picky {
    fn before_submit(&self, copies: &[Copy<'_>]) -> Result<()> {
        self.pass();
        let unknown = self.unknown.lock().expect("no panic").clone();
        let is_known = |copy: &Copy<'_>| {
            copy.tensor.strips().up_to(1).is_none_or(|strip| !unknown.contains(&strip.address))
        };
        match copies.iter().all(is_known) {
            true => Ok(()),
            false => Err(Error::new(Status::Invalid, "memory that no driver knows")),
        }
    }
}

#[test]
fn bad_pointer_fails_only_its_transfer() {
    let inner = quick();
    let (mut store, session, mut engine) = with_document(&inner, Memory::Device, Level::Ram);
    let device = picky(inner);
    store.tools.device = device.clone();
    assert_eq!(store.lock().device_cells(), CELLS);
    let other = store.session(&document(1, TOKENS));
    let bad = Engine::new(MODEL, Shape::Tokens, TOKENS);
    device.unregister(&bad);
    let cells = in_memory(engine.whole(), Memory::Device);
    let good = store.submit(session, TransferKind::Get, Level::Ram, cells);
    store.submit(other, TransferKind::Get, Level::Ram, in_memory(bad.whole(), Memory::Device));
    store.run_all(WorkerKind::Copy);
    let ended = store.finished();
    let last = ended.iter().filter(|one| one.last);
    let how = last.map(|one| (one.number == good, one.error.as_ref().map(Error::status)));
    let mut how: Vec<_> = how.collect();
    how.sort_by_key(|(is_good, _)| !is_good);
    assert_eq!(how, [(true, None), (false, Some(Status::Invalid))]);
    engine.check(&marks_of(0, &document(1, TOKENS)), 0..TOKENS, 0..MODEL.layers);
    assert!(bad.is_untouched());
    // The device tier is unchanged.
    store.with(|state| {
        assert_eq!((state.device_cells(), state.counters.device_lost_cells), (CELLS, 0));
        state.check().expect("consistent tables");
    });
}

/// The same with a ready event, in batches with cells of several sessions.
#[test]
fn bad_pointer_behind_an_event_fails_only_its_transfer() {
    let device = picky(quick());
    let store = TestStore::on_device(&spec_of("store(host=8MiB, copiers=1)"), device.clone());
    let namespace = store.namespace(1, &MODEL);
    let tokens = document(1, TOKENS);
    let sessions = [store.session(namespace, &tokens), store.session(namespace, &tokens)];
    let mut engines = [(); 2].map(|()| Engine::new(MODEL, Shape::Tokens, TOKENS));
    engines[0].compute(&marks_of(0, &tokens));
    assert_eq!(store.put(sessions[0], Level::Ram, &engines[0]), RIGHT);
    engines[0] = Engine::new(MODEL, Shape::Tokens, TOKENS);
    device.unregister(&engines[1]);
    let event = device.create_user_event().expect("a user event");
    let after = |engine: &Engine| CellRange {
        after: Some(event),
        ..in_memory(engine.whole(), Memory::Device)
    };
    // Both transfers at once, so that they share a batch.
    let begun = store.handle.with(|core| {
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
    until("it was submitted", || {
        store.handle.inspect(|core| core.cells_after_event() == 0) == Ok(true)
    });
    assert!(engines[0].is_untouched());
    device.signal_event(event).expect("a user event");
    store.settle();
    assert_eq!(begun.len(), 2);
    engines[0].check(&marks_of(0, &tokens), 0..TOKENS, 0..MODEL.layers);
    assert!(engines[1].is_untouched());
    device.release(event).expect("the event has ended");
    sessions.into_iter().for_each(|session| store.close_session(session));
    store.close();
}

/// The device is released even while ops are kept.
#[test]
fn closed_store_releases_its_device() {
    let device = picky(quick());
    let store = TestStore::on_device(
        &spec_of("store(host=8MiB, device=device(capacity=1MiB))"),
        device.clone(),
    );
    let namespace = store.namespace(1, &MODEL);
    let session = store.session(namespace, &document(1, TOKENS));
    let engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
    let what = in_memory(engine.whole(), Memory::Device);
    let ops = store.submit(session, TransferKind::Put, Level::Ram, what).expect("submitted");
    assert_eq!(wait(&ops[0]), RIGHT);
    assert!(Arc::strong_count(&device) > 1);
    store.handle.close(0).expect("closed");
    assert_eq!(Arc::strong_count(&device), 1);
    assert_eq!(device.inner.allocated_bytes(), 0);
    assert_eq!(store.handle.audit_device().map_err(|e| e.status()), Err(Status::Closed));
    drop(ops);
}

/// Cells that the device cannot read back count as unknown, and stay.
#[test]
fn failed_audit_drops_nothing() {
    let device = picky(quick());
    let store = TestStore::on_device(
        &spec_of("store(host=8MiB, device=device(capacity=1MiB))"),
        device.clone(),
    );
    let namespace = store.namespace(1, &MODEL);
    for number in 0..5 {
        let session = store.session(namespace, &document(number, TOKENS));
        let engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
        let what = in_memory(engine.whole(), Memory::Device);
        let done = store.transfer(session, TransferKind::Put, Level::Ram, what);
        assert_eq!(done, RIGHT);
        store.close_session(session);
    }
    let cells = || store.handle.inspect(|core| core.device_cells()).expect("open");
    assert_eq!(cells(), 5 * CELLS);
    let right = store.handle.audit_device().expect("open");
    assert_eq!((right.right, right.wrong, right.unknown), (5 * CELLS, 0, 0));
    *device.unknown.lock().expect("no panic") = 0..u64::MAX;
    let found = store.handle.audit_device().expect("open");
    assert_eq!((found.right, found.wrong, found.unknown, cells()), (0, 0, 5 * CELLS, 5 * CELLS));
    store.close();
}

/// A close after a panic does not wait for workers, but keeps memory that an audit reads until
/// the audit ends.
#[test]
fn audit_survives_a_worker_panic() {
    let device = picky(quick());
    let store = TestStore::on_device(
        &spec_of("store(host=8MiB, copiers=1, device=device(capacity=1MiB))"),
        device.clone(),
    );
    let namespace = store.namespace(1, &MODEL);
    let session = store.session(namespace, &document(1, TOKENS));
    let engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
    let put = |engine: &Engine| {
        let what = in_memory(engine.whole(), Memory::Device);
        store.submit(session, TransferKind::Put, Level::Ram, what).expect("submitted")
    };
    assert_eq!(wait(&put(&engine)[0]), RIGHT);
    device.set_next(Next::IsHeldUp);
    std::thread::scope(|scope| {
        let audit = scope.spawn(|| store.handle.audit_device());
        device.wait_while(Next::IsHeldUp);
        device.set_next(Next::Panics);
        let other = store.session(namespace, &document(3, TOKENS));
        let what = in_memory(engine.whole(), Memory::Device);
        let done = store.transfer(other, TransferKind::Put, Level::Ram, what);
        assert_eq!(done.status, Status::Panic);
        let (sender, receiver) = std::sync::mpsc::channel();
        let store = &store.handle;
        scope.spawn(move || sender.send(store.close(0).is_ok()));
        // The close may wait for the audit, or it keeps the memory that the audit needs.
        let _ = receiver.recv_timeout(Duration::from_secs(1));
        device.set_next(Next::Goes);
        audit.join().expect("no panic").expect("an audit begun before the close");
    });
    assert_eq!(device.inner.allocated_bytes(), 0);
}
