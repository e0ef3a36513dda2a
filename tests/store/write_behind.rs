//! Write-behind: cells of puts are written to disk in time without a request. The test moves the
//! clock and runs the workers.

use kvtier_testkit::fixtures::stepped_store;
use kvtier_testkit::fixtures::store as support;

use kvtier::base::status::Status;
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{Config, Level, TransferKind, Write};
use stepped_store::{MODEL, SteppedStore, empty_disk};
use support::{Engine, Shape, document};

const ALL: std::ops::Range<usize> = 0..MODEL.layers;
const AGE_NS: u64 = 1000;

fn config() -> Config {
    let host_bytes = 8 << 20;
    Config { host_bytes, write: Write::Behind, write_age_ns: AGE_NS, ..SteppedStore::config() }
}

fn store(config: Config) -> SteppedStore {
    SteppedStore::on_disk(empty_disk(), config, None)
}

/// Number of written chunks, and of unwritten chunks.
fn written(store: &SteppedStore) -> (u64, u64) {
    store.with(|core| {
        let (bytes, _) = core.unwritten();
        (core.counters.written_cells / MODEL.layers as u64, bytes / MODEL.chunk_bytes())
    })
}

fn at(store: &SteppedStore, now_ns: u64) {
    store.with(|core| core.tick(now_ns));
    store.settle();
}

/// Kills the process, and opens the store in another one.
fn killed(store: SteppedStore) -> SteppedStore {
    let files = store.files.clone();
    drop(store);
    SteppedStore::on_disk(files.reopen(), config(), None)
}

#[test]
fn put_is_on_disk_within_a_fraction_of_the_age() {
    let store = store(config());
    let tokens = document(1, 64);
    assert_eq!(store.put(&tokens, ALL, Level::Ram), Status::Ok);
    assert_eq!(written(&store), (0, 4));
    at(&store, AGE_NS / 4);
    assert_eq!(written(&store), (0, 4), "the put was at time 1");
    at(&store, AGE_NS / 4 + 1);
    assert_eq!(written(&store), (4, 0));
    let store = killed(store);
    assert!(store.is_stored(&tokens), "the chunk was written before the kill");
}

#[test]
fn disk_reads_have_priority_for_half_the_age() {
    let first = store(config());
    let (old, new) = (document(1, 32), document(2, 32));
    assert_eq!(first.put(&old, ALL, Level::Disk), Status::Ok);
    let store = killed(first);
    assert_eq!(store.put(&new, ALL, Level::Ram), Status::Ok);
    let session = store.session(&old);
    let engine = Engine::new(MODEL, Shape::Tokens, old.len());
    let what = engine.whole();
    store.submit(session, TransferKind::Get, Level::Ram, what);
    let read = store.with(|core| core.take(WorkerKind::Read)).expect("a read");
    let is_due = |now_ns| {
        store.with(|core| {
            core.tick(now_ns);
            core.has_work(WorkerKind::Write)
        })
    };
    assert!(!is_due(AGE_NS / 2), "a read is under way");
    assert!(is_due(AGE_NS / 2 + 1), "half of the age is over");
    let (mut read, mut keeper) = (read, store.state.clone());
    // SAFETY: the engine's memory outlives the work.
    let outcome = unsafe { store.tools.work(&mut read, kvtier::device::Stream(0), &mut keeper) };
    store.with(|core| core.done(read, outcome, 0));
    store.settle();
    assert_eq!(written(&store), (2, 0));
}

#[test]
fn unwritten_bytes_above_the_limit_are_written_at_once() {
    let store = store(Config { unwritten_bytes: 2 * MODEL.chunk_bytes(), ..config() });
    assert_eq!(store.put(&document(1, 32), ALL, Level::Ram), Status::Ok);
    assert_eq!(written(&store), (0, 2));
    assert_eq!(store.put(&document(2, 48), ALL, Level::Ram), Status::Ok);
    assert_eq!(written(&store), (3, 2), "the oldest chunks are written first");
}

#[test]
fn unreachable_chunks_are_not_written() {
    let store = store(config());
    assert_eq!(store.put(&document(1, 24), ALL, Level::Ram), Status::Ok);
    assert_eq!(written(&store), (0, 1), "a partial chunk is usable by its session only");
    store.with(|core| {
        let mut clearing = core.begin_clear(store.namespace).expect("open");
        while core.clear_more(&mut clearing, 16) {}
    });
    at(&store, 2 * AGE_NS);
    assert_eq!(written(&store), (0, 0), "the chunk was cleared before it was due");
}

#[test]
fn chunk_put_by_layers_is_written_as_one_record() {
    let store = store(config());
    let tokens = document(1, 16);
    for layer in ALL {
        assert_eq!(store.put(&tokens, layer..layer + 1, Level::Ram), Status::Ok);
    }
    at(&store, AGE_NS);
    assert_eq!(written(&store), (1, 0));
    assert!(killed(store).is_stored(&tokens));
}

#[test]
fn write_queue_does_not_grow_with_evicted_chunks() {
    let store = store(Config { unwritten_bytes: u64::MAX, ..config() });
    for number in 0..5000 {
        assert_eq!(store.put(&document(number, 16), ALL, Level::Ram), Status::Ok);
        store.with(|core| {
            let mut clearing = core.begin_clear(store.namespace).expect("open");
            while core.clear_more(&mut clearing, 16) {}
        });
        assert!(written(&store).1 <= 1024, "{:?} after {number}", written(&store));
    }
}
