//! A full chunk table: lookups and gets evict nothing.

use kvtier_testkit::fixtures::store as support;

use kvtier::base::status::Status;
use kvtier::meta::chunks::Pin;
use kvtier::store::state::transfer::{Level, TransferKind};
use support::{
    Done, Engine, Model, Scratch, Shape, TestStore, document, marks_of, spec_of, wait, with_disk,
};

const MODEL: Model = Model { layers: 2, heads: 2, run: 64, chunk: 16 };
const ROWS: usize = 100;
const MISS: Done = Done { status: Status::NotFound, tokens: 0 };

/// A store with five documents of 20 chunks, which no session references: the table is full.
fn full(scratch: &Scratch) -> (TestStore, u32) {
    let rest = format!("host=8MiB,chunks={ROWS}");
    filled(
        TestStore::open(&with_disk(&scratch.0, "bytes=64MiB,segment=1MiB", &rest)),
        Level::Durable,
    )
}

fn filled(store: TestStore, level: Level) -> (TestStore, u32) {
    let namespace = store.namespace(1, &MODEL);
    for number in 0..5 {
        let tokens = document(number, 20 * 16);
        let done = store.put_tokens((namespace, 0), &MODEL, &tokens, level);
        assert_eq!(done, Done::ok(tokens.len()));
    }
    store.settle();
    (store, namespace)
}

fn all_are_there(store: &TestStore, namespace: u32) {
    for number in 0..5 {
        let tokens = document(number, 20 * 16);
        let done = store.get_tokens((namespace, 0), &MODEL, &tokens);
        assert_eq!(done, Done::ok(tokens.len()), "document {number}");
    }
    assert_eq!(store.counters().evicted_chunks, 0);
}

#[test]
fn reads_evict_nothing_from_a_full_table() {
    let scratch = Scratch::new("table");
    let (store, namespace) = full(&scratch);
    // A sequence with a tail, and one that is longer than the table.
    for chunks in [90, ROWS + 50] {
        let tokens = document(9, chunks * 16 + 5);
        let session = store.session(namespace, &tokens);
        let engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
        assert_eq!(store.get(session, &engine), MISS);
        assert!(engine.is_untouched());
        let ops = store.submit(session, TransferKind::Prefetch, Level::Ram, engine.whole());
        assert_eq!(wait(&ops.expect("submitted")[0]), MISS);
        let pin = Pin { priority: 2, until_ns: u64::MAX };
        let pinned = store.handle.with(|core| core.pin(session, 0, tokens.len() as u64, pin));
        pinned.expect("nothing to pin");
        store.close_session(session);
        store.settle();
        all_are_there(&store, namespace);
    }
    // A sequence that begins like a stored document is found as far as they are equal.
    let tokens = [document(3, 20 * 16), document(9, 40 * 16)].concat();
    let session = store.session(namespace, &tokens);
    let mut engine = Engine::new(MODEL, Shape::Padded, tokens.len());
    let done = store.get(session, &engine);
    assert_eq!(done, Done { status: Status::NotFound, tokens: 20 * 16 });
    engine.check(&marks_of(0, &tokens), 0..20 * 16, 0..MODEL.layers);
    store.close_session(session);
    store.settle();
    all_are_there(&store, namespace);
    store.close();
}

#[test]
fn put_evicts_rows_from_a_full_table() {
    let scratch = Scratch::new("table-put");
    let (store, namespace) = full(&scratch);
    let tokens = document(9, 90 * 16);
    let session = store.session(namespace, &tokens);
    let mut engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
    assert_eq!(store.get(session, &engine), MISS);
    engine.compute(&marks_of(0, &tokens));
    let all = Done::ok(tokens.len());
    assert_eq!(store.put(session, Level::Ram, &engine), all);
    assert_eq!(store.get(session, &engine), all);
    engine.check(&marks_of(0, &tokens), 0..tokens.len(), 0..MODEL.layers);
    store.close_session(session);
    store.settle();
    store.close();
}

#[test]
fn rejected_put_evicts_nothing() {
    // A level that needs a disk, and more chunks than the table has rows.
    let store = spec_of(&format!("store(host=8MiB,chunks={ROWS})"));
    let (store, namespace) = filled(TestStore::open(&store), Level::Ram);
    for (chunks, level, status) in [
        (40, Level::Disk, Status::Unavailable),
        (40, Level::Durable, Status::Unavailable),
        (ROWS + 50, Level::Ram, Status::Limit),
    ] {
        let tokens = document(9, chunks * 16 + 5);
        let session = store.session(namespace, &tokens);
        let engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
        let refused = store.submit(session, TransferKind::Put, level, engine.whole());
        assert_eq!(refused.map(|_| ()).unwrap_err().status(), status);
        store.close_session(session);
        store.settle();
        all_are_there(&store, namespace);
    }
    store.close();
}

/// Referenced chunks stay. If the rest is too few, the rest stays as well.
#[test]
fn put_without_enough_unreferenced_rows_evicts_nothing() {
    let store = spec_of(&format!("store(host=8MiB,chunks={ROWS})"));
    let (store, namespace) = filled(TestStore::open(&store), Level::Ram);
    // Three of the five documents.
    let open: Vec<u32> = (0..3)
        .map(|number| {
            let tokens = document(number, 20 * 16);
            let session = store.session(namespace, &tokens);
            let mut engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
            assert_eq!(store.get(session, &engine).status, Status::Ok);
            engine.check(&marks_of(0, &tokens), 0..tokens.len(), 0..MODEL.layers);
            session
        })
        .collect();
    let put = |chunks: usize| {
        let tokens = document(9, chunks * 16);
        let session = store.session(namespace, &tokens);
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &tokens));
        let put = store.submit(session, TransferKind::Put, Level::Ram, engine.whole());
        let put = put.map(|ops| wait(&ops[0]).status).map_err(|error| error.status());
        store.close_session(session);
        store.settle();
        put
    };
    assert_eq!(put(41), Err(Status::Limit));
    all_are_there(&store, namespace);
    assert_eq!(put(40), Ok(Status::Ok), "as many as can be evicted");
    open.iter().for_each(|&session| store.close_session(session));
    assert_eq!(put(ROWS), Ok(Status::Ok));
    store.close();
}

/// A pin before a put pins the chunks when they arrive, if the table has rows for them.
#[test]
fn chunks_can_be_pinned_before_their_put() {
    let scratch = Scratch::new("table-pin");
    let store = TestStore::open(&with_disk(&scratch.0, "bytes=64MiB,segment=1MiB", "host=8MiB"));
    let namespace = store.namespace(1, &MODEL);
    let tokens = document(1, 4 * 16);
    let session = store.session(namespace, &tokens);
    let pin = Pin { priority: 2, until_ns: u64::MAX };
    let pins = |core: &mut kvtier::store::state::StoreState| {
        core.pin(session, 0, 64, pin)?;
        let table = core.table_of(namespace).expect("an open namespace");
        Ok(table.chunks.slots().filter(|&s| table.chunks.chunk(s).unwrap().pin().is_some()).count())
    };
    assert_eq!(store.handle.with(pins).expect("room"), 4);
    store.close_session(session);
    store.close();
}
