//! The reserve for reads: cells on disk can be read while all memory is taken by cells that must
//! stay, and nothing can be written.

use kvtier_testkit::fixtures::stepped_store;
use kvtier_testkit::fixtures::store as support;

use kvtier::base::status::Status;
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{Config, Level, TransferKind};
use kvtier_testkit::disk::plan::{Fault, Plan};
use stepped_store::{MODEL, SteppedStore, empty_disk};
use support::{Engine, Shape, document, marks_of};

const ALL: std::ops::Range<usize> = 0..MODEL.layers;
/// Cells that fit in memory.
const CELLS: usize = 16;

fn config() -> Config {
    Config { host_bytes: CELLS as u64 * 4096, ..SteppedStore::config() }
}

/// A store with a document on disk, and memory full of chunks of another document, which a session
/// references. The disk has failed. Returns the store, the tokens of the first document, and that
/// session.
fn full() -> (SteppedStore, Vec<u32>, u32) {
    let store = SteppedStore::on_disk(empty_disk(), config(), None);
    let old = document(1, 64);
    assert_eq!(store.put(&old, ALL, Level::Disk), Status::Ok);
    let files = store.files.clone();
    drop(store);
    let store = SteppedStore::on_disk(files.reopen(), config(), None);
    store.files.set_plan(Plan::default().often(Fault::WriteError, 1_000_000));
    let new = document(2, MODEL.chunk * CELLS / MODEL.layers);
    let session = store.session(&new);
    let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &new));
    assert_eq!(store.transfer(session, TransferKind::Put, Level::Ram, engine.whole()), Status::Ok);
    (store, old, session)
}

#[test]
fn disk_cells_are_read_while_memory_is_full() {
    let (store, old, session) = full();
    for _ in 0..3 {
        assert!(store.is_stored(&old), "the reserve serves one cell after the other");
    }
    let report = store.with(|core| core.report());
    assert_eq!((report.stats.no_room_cells, report.stats.host_cells), (0, CELLS as u64));
    store.close_session(session);
    assert!(store.is_stored(&old));
}

#[test]
fn put_without_memory_fails_with_budget() {
    let (store, old, _) = full();
    assert_eq!(store.put(&document(3, 32), ALL, Level::Ram), Status::Budget);
    assert!(store.is_stored(&old), "reads go on");
}

#[test]
fn cancelled_read_frees_the_reserve() {
    let (store, old, _) = full();
    let session = store.session(&old);
    let engine = Engine::new(MODEL, Shape::Tokens, old.len());
    let what = engine.whole();
    let number = store.with(|core| {
        core.submit_cell_range(session, TransferKind::Get, Level::Ram, 0, what).expect("room")
    });
    for kind in kvtier::store::state::work::WorkerKind::ALL {
        while store.run_batch(kind) {
            let cells = store.with(|core| core.report()).stats.host_cells;
            assert!(cells <= CELLS as u64 + 1, "{cells} cells");
            if cells > CELLS as u64 {
                break;
            }
        }
    }
    store.with(|core| core.cancel(number, Status::Cancelled));
    store.settle();
    assert!(store.is_stored(&old));
}

/// The policy's next victims may be the ancestors of chunks that are being written. Others are
/// dropped in their place.
#[test]
fn rows_are_freed_while_the_first_victims_must_stay() {
    for policy in ["lru", "horizon", "fifo"] {
        let (host_policy, max_chunks) = (policy.into(), 64);
        // As many rows as memory has chunks.
        let host_bytes = (max_chunks * MODEL.layers) as u64 * 4096;
        let config = Config { host_bytes, host_policy, max_chunks, ..Config::default() };
        let store = SteppedStore::on_disk(empty_disk(), config, None);
        for number in 0..100 {
            let tokens = document(number, 8 * MODEL.chunk);
            let session = store.session(&tokens);
            let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &tokens));
            store.submit(session, TransferKind::Put, Level::Ram, engine.whole());
            // No write is ever carried out: what is demoted stays in motion.
            store.run_all(WorkerKind::Copy);
            store.close_session(session);
        }
        assert!(store.is_stored(&document(99, 8 * MODEL.chunk)), "{policy}");
    }
}
