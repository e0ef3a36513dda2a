//! Order of copies: a large cell is copied in parts, and transfers that arrive meanwhile get their
//! turn between the parts.

use kvtier::base::status::Status;
use kvtier::meta::key::Key;
use kvtier::store::state::work::{CopyBatch, Work, WorkerKind};
use kvtier::store::state::{Config, Level, TransferKind};
use kvtier_testkit::fixtures::stepped_store::{Parts, SteppedStore};
use kvtier_testkit::fixtures::store::{Engine, Model, Shape, document, marks_of};

/// Cells of 4 KiB.
const SMALL: Model = Model { layers: 1, heads: 2, run: 64, chunk: 16 };
/// Cells of 256 KiB.
const LARGE: Model = Model { layers: 2, heads: 2, run: 64, chunk: 1024 };
/// Bytes of a batch of copies.
const BATCH: u64 = 64 << 10;

/// A store in host memory whose copies run one batch at a time.
pub fn in_memory(host_bytes: u64) -> SteppedStore {
    let host_policy = "lru".into();
    let config = Config { host_bytes, copy_bytes: BATCH, host_policy, ..Config::default() };
    // The first namespace is not used: tests open their own with smaller keys.
    SteppedStore::new(Parts { config, key: Key([255; 32]), ..Parts::default() })
}

/// Opens a namespace, and a session with these tokens in it.
pub fn session(store: &SteppedStore, number: u8, model: &Model, tokens: &[u32]) -> u32 {
    store.session_in(store.open_namespace(number, model), tokens)
}

/// Submits a transfer of all of an engine's cells.
pub fn submit(store: &SteppedStore, session: u32, kind: TransferKind, engine: &Engine) -> u32 {
    store.submit(session, kind, Level::Ram, engine.whole())
}

/// Runs one batch of copies. Returns the tokens and the layer of each K in it.
fn copy(store: &SteppedStore) -> Option<Vec<(u32, usize)>> {
    let work = store.with(|state| state.take(WorkerKind::Copy))?;
    let copied = match &work {
        Work::Copies(batch) => parts(batch),
        _ => Vec::new(),
    };
    store.run(work);
    Some(copied)
}

pub fn copy_all(store: &SteppedStore) {
    store.run_all(WorkerKind::Copy);
    store.with(|state| {
        assert!(state.is_idle());
        state.check().expect("the tables agree");
    });
}

fn parts(batch: &CopyBatch) -> Vec<(u32, usize)> {
    let keys = batch.items.iter().filter(|item| !item.is_v);
    keys.map(|item| (item.tokens, item.layer)).collect()
}

#[test]
fn small_get_runs_between_parts_of_a_large_put() {
    let store = in_memory(64 << 20);
    let (few, many) = (document(1, 16), document(2, 1024));
    let small = session(&store, 1, &SMALL, &few);
    let large = session(&store, 2, &LARGE, &many);
    let (from_small, from_large) = (
        Engine::computed(SMALL, Shape::Tokens, &marks_of(1, &few)),
        Engine::computed(LARGE, Shape::Tokens, &marks_of(2, &many)),
    );
    submit(&store, small, TransferKind::Put, &from_small);
    copy_all(&store);
    submit(&store, large, TransferKind::Put, &from_large);
    // Parts of a quarter of a batch: 64 of 1,024 tokens.
    assert_eq!(copy(&store), Some(vec![(64, 0)]));
    assert_eq!(copy(&store), Some(vec![(64, 0)]));
    let mut to_small = Engine::new(SMALL, Shape::Heads, few.len());
    submit(&store, small, TransferKind::Get, &to_small);
    // At most one part runs before the get.
    let mut before = 0;
    while !copy(&store).expect("a pending copy").contains(&(16, 0)) {
        before += 1;
    }
    assert!(before <= 1, "{before} parts ran first");
    to_small.check(&marks_of(1, &few), 0..16, 0..1);
    // The first cell continues where it stopped, so that the first layer, for which an engine
    // waits, completes first.
    let mut layers = Vec::new();
    while let Some(made) = copy(&store) {
        layers.extend(made.iter().map(|one| one.1));
    }
    assert!(layers.is_sorted() && layers.len() >= 29, "{layers:?}");
    let mut to_large = Engine::new(LARGE, Shape::Heads, many.len());
    submit(&store, large, TransferKind::Get, &to_large);
    copy_all(&store);
    to_large.check(&marks_of(2, &many), 0..1024, 0..2);
}

#[test]
fn small_cells_of_several_chunks_are_one_job() {
    let store = in_memory(1 << 20);
    // Five full chunks and a partial one. A batch of 64 KiB has jobs of up to 16 KiB.
    let tokens = document(1, 86);
    let session = session(&store, 1, &SMALL, &tokens);
    let from = Engine::computed(SMALL, Shape::Tokens, &marks_of(1, &tokens));
    let mut to = Engine::new(SMALL, Shape::Heads, tokens.len());
    for (kind, engine) in [(TransferKind::Put, &from), (TransferKind::Get, &to)] {
        submit(&store, session, kind, engine);
        let work = store.with(|state| state.take(WorkerKind::Copy)).expect("copies");
        let Work::Copies(batch) = &work else { panic!("no copies") };
        let cells = parts(batch);
        assert_eq!(cells, [(16, 0), (16, 0), (16, 0), (16, 0), (16, 0), (6, 0)]);
        assert!(batch.jobs().count() < cells.len(), "a job has several cells");
        store.run(work);
        copy_all(&store);
    }
    to.check(&marks_of(1, &tokens), 0..86, 0..1);
}

#[test]
fn put_cancelled_between_parts_stores_nothing() {
    let store = in_memory(64 << 20);
    let many = document(2, 1024);
    let session = session(&store, 2, &LARGE, &many);
    let from = Engine::computed(LARGE, Shape::Tokens, &marks_of(2, &many));
    for parts in [1, 5, 17] {
        let number = submit(&store, session, TransferKind::Put, &from);
        (0..parts).for_each(|_| assert!(copy(&store).is_some()));
        store.lock().cancel(number, Status::Cancelled);
        copy_all(&store);
        let there = store.lock().host().stats().live_bytes;
        assert_eq!(
            there,
            u64::from(parts > 16) * (256 << 10),
            "{parts} parts: a whole cell, or none"
        );
    }
    // A later put succeeds as if nothing had been submitted before.
    submit(&store, session, TransferKind::Put, &from);
    copy_all(&store);
    let mut to = Engine::new(LARGE, Shape::Heads, many.len());
    submit(&store, session, TransferKind::Get, &to);
    copy_all(&store);
    to.check(&marks_of(2, &many), 0..1024, 0..2);
}
