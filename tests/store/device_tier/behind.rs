//! Transfers with ready events: the store touches no tensor before the event, and other transfers
//! are not delayed.

use kvtier::base::op::{OpOpts, OpRef, RELEASED, RESOLVED};
use kvtier::base::status::Status;
use kvtier::device::simulated::SimulatedOpts;
use kvtier::device::{Copy, Device, Direction, Event, Memory, Stream};
use kvtier::store::ready_event::Ready;
use kvtier::store::state::CellRange;
use kvtier::store::state::transfer::{Level, TransferKind};

use crate::device_tier::device_store::{CELLS, DeviceStore, MODEL, RIGHT, TOKENS};
use kvtier_testkit::fixtures::store::{
    Done, Engine, SHAPES, Scratch, Shape, TestStore, document, in_memory, marks_of, simulated,
    spec_of, until, wait, with_disk,
};

/// A transfer under way, with the engine's memory and its session.
struct Moving {
    engine: Engine,
    session: u32,
    ops: Vec<OpRef>,
    marks: Vec<u64>,
}

impl Moving {
    fn begin(
        store: &DeviceStore,
        kind: TransferKind,
        number: u32,
        there: (Shape, Memory),
        after: Event,
    ) -> Moving {
        let by_layer = number % 2 == 1;
        Moving::with(store, kind, Level::Ram, number, there, |what| CellRange {
            after: Some(after),
            by_layer,
            ..what
        })
    }

    fn with(
        store: &DeviceStore,
        kind: TransferKind,
        level: Level,
        number: u32,
        (shape, memory): (Shape, Memory),
        change: impl FnOnce(CellRange) -> CellRange,
    ) -> Moving {
        let tokens = document(number, TOKENS);
        let session = store.session(store.namespace, &tokens);
        let engine = Engine::new(MODEL, shape, tokens.len());
        let what = change(in_memory(engine.whole(), memory));
        let ops = store.submit(session, kind, level, what).expect("submitted");
        Moving { engine, session, ops, marks: marks_of(0, &tokens) }
    }

    /// Computes the tensors, as the engine's kernels do before the event ends.
    fn compute(&mut self) {
        self.engine.compute(&self.marks);
    }

    fn end(self, store: &DeviceStore) -> Vec<Done> {
        let dones = self.ops.iter().map(wait).collect();
        store.close_session(self.session);
        dones
    }

    /// Ends a get that found all tokens, and compares them.
    fn end_right(mut self, store: &DeviceStore) {
        assert!(self.ops.iter().all(|op| wait(op) == RIGHT), "{:?}", self.ops[0].info());
        self.engine.check(&self.marks, 0..TOKENS, 0..MODEL.layers);
        self.end(store);
    }

    fn is_open(&self) -> bool {
        self.ops.iter().all(|op| op.state() & (RESOLVED | RELEASED) == 0)
    }
}

fn keep(store: &DeviceStore, event: Event) {
    store.device.signal_event(event).expect("a user event");
}

/// Stores documents, so that gets have something to find.
fn fill(store: &DeviceStore, numbers: std::ops::Range<u32>) {
    numbers.for_each(|number| store.put_document(number, Memory::Host));
}

#[test]
fn transfers_touch_no_memory_before_the_ready_event() {
    let specs = ["store(host=8MiB)", "store(host=8MiB, device=device(capacity=4MiB))"];
    for (spec, memory) in specs
        .into_iter()
        .flat_map(|spec| [Memory::Host, Memory::Device].map(|memory| (spec, memory)))
    {
        let store = DeviceStore::open(&spec_of(spec));
        for (number, shape) in (0u32..).zip(SHAPES) {
            let event = store.device.create_user_event().expect("a user event");
            let mut put = Moving::begin(&store, TransferKind::Put, number, (shape, memory), event);
            until("it was submitted", || {
                store.handle.inspect(|core| core.cells_after_event() == 0) == Ok(true)
            });
            // The put must not have read these bytes before the event.
            put.compute();
            assert!(put.is_open());
            keep(&store, event);
            assert!(put.end(&store).iter().all(|done| *done == RIGHT));
            store.device.release(event).expect("the event has ended");

            // Twice: from host memory, and from the device tier if there is one.
            for _ in 0..2 {
                let event = store.device.create_user_event().expect("a user event");
                let get = Moving::begin(&store, TransferKind::Get, number, (shape, memory), event);
                // Other transfers are not delayed.
                store.get_document(number, Memory::Host);
                store.put_document(100 + number, Memory::Device);
                assert!(get.is_open() && get.engine.is_untouched());
                keep(&store, event);
                get.end_right(&store);
                store.device.release(event).expect("the event has ended");
            }
        }
        store.settle();
        assert_eq!(store.audit().wrong, 0);
        if spec.contains("device(") && memory == Memory::Device {
            assert!(store.report().stats.device_hit_cells > 0);
        }
        store.close();
    }
}

#[test]
fn failed_event_fails_only_its_transfers() {
    // The first batches are those of the put; the later ones fail.
    let opts =
        SimulatedOpts { latency_ns: 1000, fail_at: (2..40).collect(), ..SimulatedOpts::default() };
    let store = DeviceStore::on(&spec_of("store(host=8MiB, copiers=1)"), simulated(opts), None);
    store.put_document(1, Memory::Device);
    let promise = store.device.create_user_event().expect("a user event");
    let (mut host, mut there) = ([7u8; 64], [9u8; 64]);
    let address = there.as_mut_ptr().expose_provenance() as u64;
    let copy = Copy::bytes(host.as_mut_ptr(), address, 64, Direction::Scatter, Memory::Device);
    // SAFETY: the memory belongs to this test, which does not touch it until the event.
    let event =
        unsafe { store.device.submit(Stream(0), Some(promise), &mut [copy.expect("sound")]) };
    let event = event.expect("taken");
    let there = (Shape::Tokens, Memory::Device);
    let get = Moving::begin(&store, TransferKind::Get, 1, there, event);
    let mut put = Moving::begin(&store, TransferKind::Put, 2, there, event);
    put.compute();
    keep(&store, promise);
    let failed = |done: &Done| assert_eq!((done.status, done.tokens), (Status::Io, 0));
    get.ops.iter().for_each(|op| failed(&wait(op)));
    assert!(get.engine.is_untouched());
    get.end(&store);
    put.end(&store).iter().for_each(failed);
    assert_eq!(store.device.state(event).unwrap_err().status(), Status::Io);
    // A transfer that names the failed event now fails, too.
    let late = Moving::begin(&store, TransferKind::Put, 2, there, event);
    late.end(&store).iter().for_each(failed);
    store.settle();
    assert_eq!(store.report().stats.host_cells, CELLS, "only the earlier put is resident");
    let missed = store.handle.with(|core| Ok(core.counters.missed_cells)).expect("open");
    assert_eq!(missed, 0);
    for event in [promise, event] {
        store.device.release(event).expect("it has ended");
    }
    store.close();
}

#[test]
fn invalid_ready_events_are_rejected() {
    let store = DeviceStore::open(&spec_of("store(host=8MiB)"));
    let tokens = document(1, TOKENS);
    let session = store.session(store.namespace, &tokens);
    let engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
    let event = store.device.create_user_event().expect("a user event");
    let refused = |store: &TestStore, session, kind, after| {
        let what = CellRange { after: Some(after), ..engine.whole() };
        store.submit(session, kind, Level::Ram, what).map(|_| ()).unwrap_err().status()
    };
    assert_eq!(refused(&store, session, TransferKind::Prefetch, event), Status::Invalid);
    assert_eq!(refused(&store, session, TransferKind::Get, Event(12345)), Status::Handle);
    keep(&store, event);
    store.device.release(event).expect("an open event");
    assert_eq!(refused(&store, session, TransferKind::Put, event), Status::Handle);
    store.close_session(session);
    store.close();
    // A store that was opened without a device knows none of the device's events.
    let store = TestStore::open(&spec_of("store(host=8MiB)"));
    let namespace = store.namespace(1, &MODEL);
    let session = store.session(namespace, &tokens);
    assert_eq!(refused(&store, session, TransferKind::Get, Event(1)), Status::Unavailable);
    store.close_session(session);
    store.close();
}

/// More events than streams, completed in reverse order.
#[test]
fn late_event_delays_only_its_transfers() {
    const COUNT: u32 = 40;
    let store = DeviceStore::open(&spec_of("store(host=32MiB, copiers=1)"));
    fill(&store, 0..COUNT);
    let events: Vec<Event> =
        (0..COUNT).map(|_| store.device.create_user_event().expect("a user event")).collect();
    let mut gets: Vec<Option<Moving>> = (0..COUNT)
        .map(|number| {
            let there = (Shape::Heads, Memory::Device);
            Some(Moving::begin(&store, TransferKind::Get, number, there, events[number as usize]))
        })
        .collect();
    fill(&store, 100..104);
    for at in (0..COUNT as usize).rev() {
        assert!(gets.iter().flatten().all(Moving::is_open));
        keep(&store, events[at]);
        gets[at].take().expect("once each").end_right(&store);
        store.device.release(events[at]).expect("the event has ended");
    }
    store.close();
}

/// Waiting transfers may take a part of the memory only.
#[test]
fn waiting_transfers_leave_memory_for_others() {
    let scratch = Scratch::new("behind");
    let spec = with_disk(&scratch.0, "bytes=64MiB,segment=1MiB", "host=1MiB,write=through");
    let store = DeviceStore::open(&spec);
    let event = store.device.create_user_event().expect("a user event");
    // Twice as much as fits in memory.
    let mut puts: Vec<Moving> = (0..16)
        .map(|number| {
            Moving::begin(&store, TransferKind::Put, number, (Shape::Tokens, Memory::Device), event)
        })
        .collect();
    for number in 100..116 {
        store.put_document(number, Memory::Host);
        store.get_document(number, Memory::Device);
    }
    assert!(puts.iter().all(Moving::is_open));
    puts.iter_mut().for_each(Moving::compute);
    keep(&store, event);
    for put in puts {
        assert!(put.end(&store).iter().all(|done| *done == RIGHT));
    }
    (0..16).for_each(|number| store.get_document(number, Memory::Host));
    store.device.release(event).expect("the event has ended");
    store.close();
}

#[test]
fn disk_reads_proceed_before_the_ready_event() {
    let scratch = Scratch::new("behind");
    let spec = with_disk(&scratch.0, "bytes=64MiB,segment=1MiB", "host=4MiB,write=through");
    let store = DeviceStore::open(&spec);
    fill(&store, 1..2);
    store.close();
    let store = DeviceStore::open(&spec);
    assert_eq!(store.report().stats.host_cells, 0);
    let event = store.device.create_user_event().expect("a user event");
    let get = Moving::begin(&store, TransferKind::Get, 1, (Shape::Tokens, Memory::Device), event);
    until("it was read", || store.report().stats.host_cells == CELLS);
    assert!(get.is_open() && get.engine.is_untouched());
    keep(&store, event);
    get.end_right(&store);
    store.device.release(event).expect("the event has ended");
    store.close();
}

#[test]
fn transfer_waits_for_host_signal_and_device_event() {
    let store = DeviceStore::open(&spec_of("store(host=8MiB)"));
    fill(&store, 1..2);
    for word_first in [false, true] {
        let (event, word) = (store.device.create_user_event().expect("an event"), Ready::default());
        let session = store.session(store.namespace, &document(1, TOKENS));
        let mut engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
        let whole = in_memory(engine.whole(), Memory::Device);
        let what = CellRange { after: Some(event), ..whole };
        let opts = OpOpts::default();
        let ram = Level::Ram;
        let ops =
            store.handle.submit_after(session, TransferKind::Get, ram, what, &opts, Some(&word));
        let op = ops.expect("submitted").remove(0);
        for step in [word_first, !word_first] {
            assert!(engine.is_untouched() && op.state() & RESOLVED == 0);
            if step {
                word.signal()
            } else {
                keep(&store, event)
            }
            store.get_document(1, Memory::Host);
        }
        assert_eq!(wait(&op), RIGHT);
        engine.check(&marks_of(0, &document(1, TOKENS)), 0..TOKENS, 0..MODEL.layers);
        store.close_session(session);
        store.device.release(event).expect("the event has ended");
    }
    store.close();
}

/// A cancelled transfer resolves at once. It releases the caller's memory when no copy touches that
/// memory any more.
#[test]
fn cancelled_transfer_releases_memory_after_the_event() {
    let store = DeviceStore::open(&spec_of("store(host=8MiB)"));
    fill(&store, 1..2);
    let event = store.device.create_user_event().expect("a user event");
    let tokens = document(1, TOKENS);
    let session = store.session(store.namespace, &tokens);
    let engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
    let submit = |opts: &OpOpts| {
        let whole = in_memory(engine.whole(), Memory::Device);
        let what = CellRange { after: Some(event), ..whole };
        let ops = store.handle.submit(session, TransferKind::Get, Level::Ram, what, opts);
        ops.expect("submitted").remove(0)
    };
    let all_submitted = || store.handle.inspect(|core| core.cells_after_event() == 0) == Ok(true);
    // The deadline must pass after the device has all copies. A slow machine needs a later
    // deadline.
    let mut patience_ns = 200_000_000;
    let late = loop {
        let deadline_ns = store.now_ns() + patience_ns;
        let late = submit(&OpOpts { deadline_ns, ..OpOpts::default() });
        until("it was submitted, or is late", all_submitted);
        if late.state() & RELEASED == 0 {
            break late;
        }
        assert_eq!(wait(&late).status, Status::Timeout);
        patience_ns *= 2;
    };
    let given_up = submit(&OpOpts::default());
    until("all were submitted", all_submitted);
    given_up.cancel();
    store.close_session(session);
    until("the deadline", || late.state() & RESOLVED != 0);
    assert_eq!([&late, &given_up].map(|op| op.state() & RELEASED), [0, 0]);
    let busy = store.handle.close(store.now_ns() + 5_000_000).unwrap_err();
    assert_eq!(busy.status(), Status::Busy);
    assert!(engine.is_untouched());
    keep(&store, event);
    // The cancellation came too late: all cells were stored.
    let ends = [(late, Status::Timeout), (given_up, Status::Ok)];
    for (op, status) in ends {
        assert_eq!(wait(&op).status, status);
    }
    store.device.release(event).expect("the event has ended");
    store.store.close();
}

/// Cancelled transfers do not wait for the ready signal.
#[test]
fn cancelled_transfers_free_memory_before_the_signal() {
    const MOST: u32 = 1 << 16;
    let store = DeviceStore::open(&spec_of("store(host=8MiB)"));
    let session = store.session(store.namespace, &document(1, TOKENS));
    let engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
    let ready = Ready::default();
    let submit = || {
        let opts = OpOpts::default();
        let store = &store.handle;
        store.submit_after(
            session,
            TransferKind::Put,
            Level::Ram,
            engine.whole(),
            &opts,
            Some(&ready),
        )
    };
    let kept = submit().expect("submitted");
    for _ in 0..=MOST {
        let ops = submit().expect("places of cancelled transfers");
        ops[0].cancel();
        assert_eq!(wait(&ops[0]).status, Status::Cancelled);
    }
    ready.signal();
    assert_eq!(wait(&kept[0]), RIGHT);
    store.close_session(session);
    store.close();
}
