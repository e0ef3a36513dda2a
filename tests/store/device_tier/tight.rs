//! Stepped stores with little memory: who waits, what is evicted, and what is counted.

use kvtier::base::status::{Error, Status};
use kvtier::device::{Event, Memory};
use kvtier::meta::chunks::Pin;
use kvtier::store::state::CellRange;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::WorkerKind;

use crate::device_tier::batches::{stepped, take, with_document};
use crate::device_tier::device_store::{CELLS, MODEL, TOKENS, quick};
use kvtier_testkit::fixtures::stepped_store::SteppedStore;
use kvtier_testkit::fixtures::store::{Engine, Model, Shape, document, in_memory};

/// A stepped store, and the engines of its transfers.
struct Store {
    store: SteppedStore,
    engines: Vec<Engine>,
}

impl Store {
    fn new(spec: &str) -> Store {
        let store = stepped(spec, quick(), None);
        store.lock().tick(5_000_000_000);
        Store { store, engines: Vec::new() }
    }

    fn session(&self, namespace: u32, number: u32) -> u32 {
        self.store.session_in(namespace, &document(number, TOKENS))
    }

    /// Begins a transfer of a whole document in device memory.
    fn begin(&mut self, session: u32, kind: TransferKind, model: Model, after: Option<Event>) {
        let engine = Engine::new(model, Shape::Tokens, TOKENS);
        let cells = CellRange { after, ..in_memory(engine.whole(), Memory::Device) };
        self.engines.push(engine);
        self.store.submit(session, kind, Level::Ram, cells);
    }

    fn put(&mut self, session: u32, model: Model) {
        self.begin(session, TransferKind::Put, model, None);
        self.copy();
        assert_eq!(self.ended(), [Status::Ok]);
    }

    fn copy(&self) {
        self.store.run_all(WorkerKind::Copy);
    }

    /// How transfers have ended since the last call.
    fn ended(&self) -> Vec<Status> {
        let finished = self.store.finished().into_iter().filter(|one| one.last);
        finished.map(|one| one.error.as_ref().map_or(Status::Ok, Error::status)).collect()
    }

    /// How transfers have ended, and how many cells found no memory.
    fn ended_and_failed(&self) -> (Vec<Status>, u64) {
        (self.ended(), self.store.lock().counters.no_room_cells)
    }

    fn device_cells(&self) -> u64 {
        self.store.lock().device_cells()
    }

    fn check(&self) {
        self.store.lock().check().expect("consistent tables");
    }
}

/// Copies out of device memory that have not begun count as transfers under way.
#[test]
fn put_waits_for_copies_out_of_the_device() {
    let mut store = Store::new("store(host=256KiB, device=device(capacity=1MiB))");
    let namespace = store.store.namespace;
    let sessions = [1, 2, 3].map(|number| store.session(namespace, number));
    sessions[..2].iter().for_each(|&session| store.put(session, MODEL));
    assert_eq!(store.device_cells(), 2 * CELLS);
    for &session in &sessions[..2] {
        store.begin(session, TransferKind::Get, MODEL, None);
        store.store.close_session(session);
    }
    store.begin(sessions[2], TransferKind::Put, MODEL, None);
    assert_eq!(store.ended_and_failed(), (vec![], 0));
    store.copy();
    assert_eq!(store.ended(), [Status::Ok; 3]);
    store.check();
}

#[test]
fn put_waits_for_copies_behind_a_signalled_event() {
    let mut store = Store::new("store(host=256KiB)");
    let namespace = store.store.namespace;
    let sessions = [1, 2, 3].map(|number| store.session(namespace, number));
    sessions[..2].iter().for_each(|&session| store.put(session, MODEL));
    let event = Event(77);
    store.begin(sessions[0], TransferKind::Get, MODEL, Some(event));
    store.store.close_session(sessions[0]);
    let batch = store.store.lock().take_after_event(event).expect("copies");
    assert!(store.store.lock().take_after_event(event).is_none(), "one batch has all copies");
    store.store.lock().event_ended(event, Ok(()));
    store.copy();
    // The memory is freed when the batch has ended; the second document is held.
    store.begin(sessions[2], TransferKind::Put, MODEL, None);
    store.copy();
    assert_eq!(store.ended_and_failed(), (vec![], 0));
    store.store.lock().done_after_event(batch, &Ok(()), false);
    store.copy();
    assert_eq!(store.ended(), [Status::Ok; 2]);
    store.check();
}

/// Cells of another size take over a slab from time to time, and evict nothing in between.
#[test]
fn cell_of_another_size_causes_no_useless_eviction() {
    for pins in [false, true] {
        let mut store = Store::new("store(host=8MiB, device=device(capacity=256KiB, policy=lru))");
        let small = Model { run: 32, ..MODEL };
        let namespaces = [store.store.namespace, store.store.open_namespace(2, &small)];
        for number in [1, 2] {
            let session = store.session(namespaces[0], number);
            let pin = Pin { priority: 1, until_ns: u64::MAX };
            for chunk in [0, 2].into_iter().filter(|_| pins) {
                let each = MODEL.chunk as u64;
                store.store.lock().pin(session, chunk * each, each, pin).expect("pinned");
            }
            store.put(session, MODEL);
        }
        let before = store.device_cells();
        assert_eq!(before, 2 * CELLS, "the tier is full");
        for number in 3..7 {
            let session = store.session(namespaces[1], number);
            store.put(session, small);
        }
        let cells = store.device_cells();
        let counters = store.store.lock().counters;
        let evicted = counters.device_evicted_chunks;
        println!("pins {pins}: {before} cells, then {cells}; {evicted} chunks sent away");
        if pins {
            assert_eq!((cells, evicted), (before, 0));
        } else {
            assert!(counters.device_promoted_cells > 2 * CELLS, "a slab was taken over");
        }
        store.check();
    }
}

/// A cell whose copy failed and was retried counts as one hit.
#[test]
fn retried_cell_counts_one_hit() {
    let (store, session, engine) = with_document(&quick(), Memory::Host, Level::Ram);
    let cells = in_memory(engine.whole(), Memory::Device);
    store.submit(session, TransferKind::Get, Level::Ram, cells);
    let work = take(&store).expect("a get");
    store.lock().done(work, Err(Status::Io.into()), 1);
    store.run_all(WorkerKind::Copy);
    let counters = store.lock().counters;
    let hits = [counters.host_hit_cells, counters.device_hit_cells, counters.disk_hit_cells];
    assert_eq!(hits, [CELLS, 0, 0]);
}
