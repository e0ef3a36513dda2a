//! Workers in an order that a test chooses: waiting puts, charged tables, namespace records.

use kvtier_testkit::fixtures::stepped_store;
use kvtier_testkit::fixtures::store as support;

use std::time::Instant;

use kvtier::base::budget::Tier;
use kvtier::base::op::OpOpts;
use kvtier::base::status::Status;
use kvtier::meta::key::Key;
use kvtier::store::ready_event::Ready;
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{Config, Level, NamespaceOpts, SessionOpts, StoreState, TransferKind};
use kvtier::tier::disk::Options;
use kvtier_testkit::disk::plan::{Fault, Plan};
use kvtier_testkit::disk::{SimFiles, SimOpts};
use stepped_store::{MODEL, Parts, SteppedStore, empty_disk};
use support::{Engine, Shape, TestStore, budget, document, marks_of, runtime, spec_of, wait};

/// A put waits for its prefix to be on disk. Reopening the namespace with holes and clearing it
/// meanwhile must not block the put forever.
#[test]
fn put_waiting_for_its_prefix_ends_after_clear() {
    let store = SteppedStore::open();
    let tokens = document(1, 32);
    assert_eq!(store.put(&tokens[..16], 0..2, Level::Ram), Status::Ok);
    let session = store.session(&tokens);
    let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &tokens));
    let what = engine.cell_range(16, 16, 0..2, false);
    store.submit(session, TransferKind::Put, Level::Disk, what);
    // The chunk is in memory, and nothing was written yet.
    store.run_all(WorkerKind::Copy);
    store.with(|core| {
        core.close_session(session).expect("open");
        core.close_namespace(store.namespace);
        let opts = NamespaceOpts { key: Key([1; 32]), layout: MODEL.layout(), holes: true };
        core.open_namespace(&opts).expect("a namespace without open handles");
        let mut clearing = core.begin_clear(store.namespace).expect("open");
        while core.clear_more(&mut clearing, 8) {}
    });
    while WorkerKind::ALL.into_iter().any(|kind| store.run_batch(kind)) {}
    let finished = store.finished();
    assert_eq!(finished.len(), 1, "{}", store.with(|core| core.describe_waiters()));
    store.settle();
}

/// Tables that grow while memory for them is reclaimed are charged in the end.
#[test]
fn tables_growing_during_eviction_are_charged() {
    const MIB: u64 = 1 << 20;
    let runtime = runtime();
    let budget = budget(&runtime, &[(Tier::Host, 6 * MIB)]);
    let account = budget.account("store", 0, None).expect("an account");
    let config = Config {
        host_bytes: 8 * MIB,
        max_chunks: 1 << 16,
        batch_bytes: 64 << 10,
        high: 1.0,
        low: 1.0,
        ..Config::default()
    };
    let store = SteppedStore::on_disk(empty_disk(), config, Some(account.clone()));
    // Cells take all of the memory.
    let mut number = 0;
    let free = || {
        let lane = budget.usage(Tier::Host);
        lane.limit_bytes - lane.committed_bytes - lane.reserved_bytes
    };
    while free() > MIB / 2 {
        number += 1;
        assert_eq!(store.put(&document(number, 64 * 16), 0..2, Level::Ram), Status::Ok);
    }
    // Puts whose tensors are not ready need rows, but no memory for cells.
    let rows = |number: u32, chunks: usize| {
        let tokens = document(number, chunks * 16);
        let session = store.session(&tokens);
        let mut engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
        let what = engine.whole();
        let waits =
            store.with(|core| core.submit_waiting(session, TransferKind::Put, Level::Ram, 0, what));
        engine.compute(&[]);
        (waits.expect("submitted").1, session, engine)
    };
    let first = rows(1000, 1600);
    let back = || store.with(|core| core.host().returned_bytes());
    let before = back();
    while back() == before && store.run_batch(WorkerKind::Write) {}
    let second = rows(1001, 3200);
    while WorkerKind::ALL.into_iter().any(|kind| store.run_batch(kind)) {}
    let (paid, tables) = store.with(|core| (core.paid_table_bytes(), core.table_bytes()));
    assert!(paid >= tables, "{paid} paid for {tables}, and {} are free", free());
    for (ticket, session, _engine) in [first, second] {
        store.with(|core| {
            core.give_up_waiting(ticket, Status::Cancelled);
            core.close_session(session).expect("open");
        });
    }
    store.settle();
}

/// A namespace record that was written beside a failed one is removed if no cell of its namespace
/// reaches the disk.
#[test]
fn namespace_record_of_a_failed_batch_is_removed() {
    let store = SteppedStore::open();
    // A segment exists, so that records are written to it.
    assert_eq!(store.put(&document(9, 16), 0..2, Level::Disk), Status::Ok);
    let mut sessions = Vec::new();
    let mut engines = Vec::new();
    for salt in [2, 3] {
        let tokens = document(u32::from(salt), 16);
        let session = store.with(|core| {
            let opts = NamespaceOpts { key: Key([salt; 32]), layout: MODEL.layout(), holes: false };
            let namespace = core.open_namespace(&opts).expect("opened");
            let number = core.open_session(namespace, &SessionOpts::default()).expect("room");
            core.append(number, &tokens).expect("room");
            number
        });
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &tokens));
        let what = engine.whole();
        store.submit(session, TransferKind::Put, Level::Disk, what);
        sessions.push(session);
        engines.push(engine);
    }
    store.run_all(WorkerKind::Copy);
    // The second record fails each time. After a failed write a new segment begins; it was made ahead,
    // so its header is no write of the batch.
    for _ in 0..3 {
        store.files.set_plan(Plan::default().once(Fault::WriteError, 2));
        assert!(store.run_batch(WorkerKind::Write));
    }
    store.files.set_plan(Plan::default());
    store.settle();
    let finished = store.finished();
    assert_eq!(finished.len(), 2);
    assert!(finished.iter().all(|one| one.error.is_some()), "{finished:?}");
    let disk = store.tools.disk.clone().expect("a disk");
    for salt in [2u8, 3] {
        let name = [b"namespace ".as_slice(), &[salt; 32]].concat();
        assert_eq!(disk.segment_of_session(&name), None, "namespace {salt} has nothing on disk");
    }
}

/// Measures how long the store's lock is held after the sync of a put of many chunks.
#[test]
#[ignore = "a measurement"]
fn measure_sync_completion() {
    for chunks in [4_000usize, 8_000, 16_000] {
        let config = Config {
            host_bytes: 1 << 30,
            max_chunks: 1 << 16,
            batch_cells: 4096,
            batch_bytes: 64 << 20,
            ..Config::default()
        };
        let files = SimFiles::new(1, SimOpts { capacity_bytes: 2 << 30, ..SimOpts::default() });
        let options = Options { segment_bytes: 16 << 20, ..Options::new(1 << 30, [7; 16]) };
        let disk = Some((files, options));
        let store = SteppedStore::new(Parts { config, disk, ..Parts::default() });
        let tokens = document(1, chunks * 16);
        let session = store.session(&tokens);
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &tokens));
        let what = engine.whole();
        store.submit(session, TransferKind::Put, Level::Durable, what);
        while store.run_batch(WorkerKind::Copy) || store.run_batch(WorkerKind::Write) {}
        let work = store.with(|core| core.take(WorkerKind::Sync)).expect("a sync");
        let began = Instant::now();
        store.with(|core: &mut StoreState| core.done(work, Ok(()), 0));
        println!("{chunks} chunks: {:?} under the lock", began.elapsed());
    }
}

/// Measures the cancellation of many transfers, one op after the other.
#[test]
#[ignore = "a measurement"]
fn measure_cancellation() {
    for moves in [1000u32, 2000, 4000] {
        let store = TestStore::open(&spec_of("store(host=64MiB,chunks=65536,sessions=8192)"));
        let namespace = store.namespace(1, &MODEL);
        let ready = Ready::default();
        let (mut ops, mut engines) = (Vec::new(), Vec::new());
        for number in 0..moves {
            let tokens = document(number, 16);
            let session = store.session(namespace, &tokens);
            let engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
            let what = engine.cell_range(0, 16, 0..2, true);
            let opts = OpOpts::default();
            let begun = store.handle.submit_after(
                session,
                TransferKind::Put,
                Level::Ram,
                what,
                &opts,
                Some(&ready),
            );
            ops.extend(begun.expect("submitted"));
            engines.push(engine);
        }
        let began = Instant::now();
        ops.iter().for_each(|op| op.cancel());
        println!("{moves} moves of two ops: {:?}", began.elapsed());
        ops.iter().for_each(|op| _ = wait(op));
        store.close();
    }
}
