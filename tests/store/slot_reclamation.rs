//! More namespaces and layouts than the tables hold: unused ones are evicted, their numbers are
//! reused, and no old state is visible under a reused number.

use kvtier_testkit::fixtures::stepped_store;
use kvtier_testkit::fixtures::store as support;

use std::collections::BTreeSet;
use std::path::Path;

use kvtier::base::op::{OpOpts, OpRef};
use kvtier::base::status::{Result, Status};
use kvtier::meta::chunks::Pin;
use kvtier::meta::key::Key;
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{
    Config, Level, MAX_CHUNK_TABLES, MAX_NAMESPACES, NamespaceOpts, RemoteConfig, SessionOpts,
    StoreState, TransferKind,
};
use stepped_store::{MODEL, SteppedStore, empty_disk};
use support::{
    Engine, Model, Scratch, Shape, TestStore, document, marks_of, spec_of, wait, with_disk,
};

/// The key of a namespace.
fn key(number: u32) -> Key {
    let mut key = [9; 32];
    key[..4].copy_from_slice(&number.to_le_bytes());
    Key(key)
}

/// A layout that is unique to this number.
fn model(number: u32) -> Model {
    Model { layers: 1 + number as usize % 3, heads: 1, run: 64, chunk: 16 + number as usize }
}

fn opts(number: u32, model: &Model) -> NamespaceOpts {
    NamespaceOpts { key: key(number), layout: model.layout(), holes: false }
}

/// A store with a disk, in one thread or with threads.
trait AnyStore {
    fn core<R>(&self, act: impl FnOnce(&mut StoreState) -> Result<R>) -> Result<R>;
    fn transfer_all(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        engine: &Engine,
    ) -> Status;

    fn open(&self, number: u32, model: &Model) -> Result<u32> {
        self.core(|core| core.open_namespace(&opts(number, model)))
    }

    fn shut(&self, namespace: u32) {
        let closed = self.core(|core| {
            core.close_namespace(namespace);
            Ok(())
        });
        closed.expect("open");
    }

    fn begin(&self, namespace: u32, tokens: &[u32]) -> u32 {
        let opened = self.core(|core| {
            let session = core.open_session(namespace, &SessionOpts::default())?;
            core.append(session, tokens)?;
            Ok(session)
        });
        opened.expect("room")
    }

    fn end(&self, session: u32) {
        self.core(|core| core.close_session(session)).expect("open");
    }

    /// Stores a chunk whose bytes have this mark.
    fn keep(&self, namespace: u32, model: &Model, mark: u32, level: Level) {
        let tokens = document(1, model.chunk);
        let session = self.begin(namespace, &tokens);
        let mut engine = Engine::new(*model, Shape::Tokens, tokens.len());
        engine.compute(&marks_of(mark, &tokens));
        assert_eq!(self.transfer_all(session, TransferKind::Put, level, &engine), Status::Ok);
        self.end(session);
    }

    /// Whether the chunk is found. If so, checks that its bytes have this mark.
    fn has(&self, namespace: u32, model: &Model, mark: u32) -> bool {
        let tokens = document(1, model.chunk);
        let looked = self.core(|core| core.lookup(namespace, &tokens).cloned()).expect("open");
        let session = self.begin(namespace, &tokens);
        let mut engine = Engine::new(*model, Shape::Heads, tokens.len());
        let status = self.transfer_all(session, TransferKind::Get, Level::Ram, &engine);
        self.end(session);
        let is_there = status == Status::Ok;
        assert_eq!(looked.reusable_soon_tokens > 0, is_there, "{looked:?}");
        if is_there {
            engine.check(&marks_of(mark, &tokens), 0..tokens.len(), 0..model.layers);
        }
        is_there
    }

    /// Drops the chunk.
    fn lose(&self, namespace: u32, model: &Model) {
        let session = self.begin(namespace, &document(1, model.chunk));
        let dropped = self.core(|core| core.drop_range(session, 0, model.chunk as u64));
        assert_eq!(dropped.expect("open").removed, 1);
        self.end(session);
    }

    /// Numbers of namespaces and of their layouts.
    fn known(&self) -> (u64, u64) {
        let report = self.core(|core| Ok(core.report())).expect("open");
        (report.stats.namespaces, report.stats.layouts)
    }
}

impl AnyStore for TestStore {
    fn core<R>(&self, act: impl FnOnce(&mut StoreState) -> Result<R>) -> Result<R> {
        self.handle.with(act)
    }

    fn transfer_all(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        engine: &Engine,
    ) -> Status {
        self.transfer(session, kind, level, engine.whole()).status
    }
}

impl AnyStore for SteppedStore {
    fn core<R>(&self, act: impl FnOnce(&mut StoreState) -> Result<R>) -> Result<R> {
        self.with(act)
    }

    fn transfer_all(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        engine: &Engine,
    ) -> Status {
        self.transfer(session, kind, level, engine.whole())
    }
}

fn open_store(dir: &Path) -> TestStore {
    TestStore::open(&with_disk(dir, "bytes=64MiB,segment=256KiB", "host=8MiB,chunks=4096"))
}

/// A store with small limits of namespaces and layouts.
fn few(namespaces: usize, layouts: usize) -> SteppedStore {
    SteppedStore::on_disk(empty_disk(), config(namespaces, layouts), None)
}

fn config(max_namespaces: usize, max_layouts: usize) -> Config {
    Config { host_bytes: 8 << 20, max_namespaces, max_layouts, ..SteppedStore::config() }
}

/// Closes the store's own namespace, so that its number and layout can be reused.
fn leave_own(store: &SteppedStore) {
    store.shut(store.namespace);
}

#[test]
fn chunk_tables_of_closed_layouts_are_reused() {
    let scratch = Scratch::new("layouts");
    let mut store = open_store(&scratch.0);
    for number in 0..4 * MAX_CHUNK_TABLES as u32 {
        let model = model(number);
        let namespace = store.open(number, &model).expect("one at a time");
        if number % 2 == 0 {
            let level = if number % 4 == 0 { Level::Durable } else { Level::Ram };
            store.keep(namespace, &model, number, level);
            assert!(store.has(namespace, &model, number));
            store.lose(namespace, &model);
        }
        assert!(!store.has(namespace, &model, number));
        store.shut(namespace);
        if number % 50 == 49 {
            store.settle();
            let (namespaces, layouts) = store.known();
            assert!(
                namespaces <= 2 && layouts <= 2,
                "{namespaces} namespaces of {layouts} layouts"
            );
            store.close();
            store = open_store(&scratch.0);
        }
    }
    store.close();
}

/// All layouts have chunks and none is open: the least recently used ones are evicted.
#[test]
fn unused_layouts_are_evicted() {
    let scratch = Scratch::new("layouts-way");
    let mut store = open_store(&scratch.0);
    let mut open = store.open(0, &model(0)).expect("the first");
    store.keep(open, &model(0), 0, Level::Durable);
    let last = 2 * MAX_CHUNK_TABLES as u32 + 7;
    for number in 1..=last {
        let namespace = store.open(number, &model(number)).expect("others are evicted");
        store.keep(namespace, &model(number), number, Level::Durable);
        store.shut(namespace);
        if number == MAX_CHUNK_TABLES as u32 + 20 {
            store.settle();
            store.close();
            store = open_store(&scratch.0);
            open = store.open(0, &model(0)).expect("known");
        }
    }
    store.settle();
    let there = |store: &TestStore, number: u32| {
        let namespace = store.core(|core| Ok(core.find_namespace(&key(number)))).expect("open");
        namespace.is_some_and(|namespace| store.has(namespace, &model(number), number))
    };
    assert_eq!(store.known().1, MAX_CHUNK_TABLES as u64);
    // The layouts that were adopted at the reopen may have been evicted in any order.
    let since = MAX_CHUNK_TABLES as u32 + 21;
    let kept: Vec<u32> = (0..=last).filter(|&number| there(&store, number)).collect();
    assert_eq!((kept[0], kept.len()), (0, MAX_CHUNK_TABLES), "{kept:?}");
    assert!(kept.ends_with(&(since..=last).collect::<Vec<u32>>()), "{kept:?}");
    store.shut(open);
    store.close();
    // Evicted namespaces may be found again on disk. The maximum of adopted ones holds.
    let store = open_store(&scratch.0);
    assert!(store.handle.opened.adopted.namespaces <= MAX_CHUNK_TABLES as u64);
    assert!((since..=last).all(|number| there(&store, number)));
    store.settle();
    store.close();
}

#[test]
fn open_and_pinned_layouts_are_kept() {
    let store = few(64, 4);
    let mut namespaces = Vec::new();
    for number in 1..4 {
        let namespace = store.open(number, &model(number)).expect("room");
        store.keep(namespace, &model(number), number, Level::Ram);
        namespaces.push(namespace);
    }
    let refused = |number| store.open(number, &model(number)).expect_err("none is free").status();
    assert_eq!(refused(9), Status::Limit);
    // One layout is pinned, one has a session.
    let session = store.begin(namespaces[0], &document(1, model(1).chunk));
    let pin = Pin { priority: 1, until_ns: u64::MAX };
    store.core(|core| core.pin(session, 0, model(1).chunk as u64, pin)).expect("a chunk");
    store.end(session);
    let session = store.begin(namespaces[1], &document(1, model(2).chunk));
    store.shut(namespaces[0]);
    store.shut(namespaces[1]);
    assert_eq!(refused(9), Status::Limit);
    assert!(store.has(namespaces[0], &model(1), 1) && store.has(namespaces[2], &model(3), 3));
    // Another namespace of a known layout needs no chunk table.
    assert!(store.open(10, &model(3)).is_ok());
    store.end(session);
    let namespace = store.open(9, &model(9)).expect("the second layout is evicted");
    assert!(!store.has(namespace, &model(9), 9));
    assert_eq!(store.core(|core| Ok(core.find_namespace(&key(2)))).expect("open"), None);
    assert!(store.has(namespaces[0], &model(1), 1) && store.has(namespaces[2], &model(3), 3));
    store.settle();
}

/// One namespace for each of many requests, most of which store nothing.
#[test]
fn namespaces_of_many_salts_are_reclaimed() {
    let scratch = Scratch::new("salts-many");
    let mut store = open_store(&scratch.0);
    let model = model(0);
    let tokens = document(1, model.chunk);
    for number in 0..MAX_NAMESPACES as u32 + 4000 {
        let namespace = store.open(number, &model).expect("one at a time");
        if number % 2000 == 0 {
            store.keep(namespace, &model, number, Level::Durable);
            assert!(store.has(namespace, &model, number));
        } else {
            let session = store.begin(namespace, &tokens);
            let looked = store.core(|core| core.lookup(namespace, &tokens).cloned()).expect("open");
            assert_eq!(looked.reusable_soon_tokens, 0);
            store.close_session(session);
        }
        store.shut(namespace);
        if number == 40_000 {
            store.close();
            store = open_store(&scratch.0);
            assert_eq!(store.handle.opened.adopted.namespaces, 21);
        }
    }
    store.settle();
    let (namespaces, layouts) = store.known();
    assert!(namespaces < 2000 && layouts == 1, "{namespaces} namespaces of {layouts} layouts");
    for number in (0..MAX_NAMESPACES as u32).step_by(2000) {
        let namespace = store.open(number, &model).expect("known");
        assert!(store.has(namespace, &model, number), "salt {number}");
        store.shut(namespace);
    }
    store.close();
}

/// All namespaces have chunks and none is open: old ones are evicted.
#[test]
fn unused_namespaces_are_evicted() {
    let mut store = few(40, 4);
    for number in 0..200 {
        let namespace = store.open(number, &MODEL).expect("others are evicted");
        store.keep(namespace, &MODEL, number, Level::Durable);
        store.shut(namespace);
        assert!(store.known().0 <= 40);
    }
    let there = |store: &SteppedStore| -> BTreeSet<u32> {
        let find = |number| store.core(|core| Ok(core.find_namespace(&key(number)))).expect("open");
        let has = |&number: &u32| find(number).is_some_and(|at| store.has(at, &MODEL, number));
        (0..200).filter(has).collect()
    };
    let before = there(&store);
    assert!(before.contains(&199) && before.len() > 30, "{before:?}");
    store.settle();
    // No checkpoint lists the evictions. Evicted namespaces are found again, but not more than the
    // maximum.
    store.files.crash().expect("memory");
    store = SteppedStore::on_disk(store.files.reopen(), config(40, 4), None);
    assert!(store.known().0 <= 40);
    let after = there(&store);
    assert!(after.contains(&199) && after.len() > 30, "{after:?}");
    for number in 300..400 {
        let namespace = store.open(number, &MODEL).expect("others are evicted");
        assert!(!store.has(namespace, &MODEL, number));
        store.shut(namespace);
    }
    store.settle();
}

/// More layouts on disk than the maximum: the latest written ones are adopted.
#[test]
fn open_adopts_at_most_the_maximum_of_layouts() {
    let store = few(64, 16);
    for number in 0..12 {
        let namespace = store.open(number, &model(number)).expect("room");
        store.keep(namespace, &model(number), number, Level::Durable);
        store.shut(namespace);
    }
    store.settle();
    store.files.crash().expect("memory");
    let store = SteppedStore::on_disk(store.files.reopen(), config(64, 4), None);
    // One of them is the store's own, which was written later.
    assert_eq!(store.known(), (4, 4));
    let find = |number| store.core(|core| Ok(core.find_namespace(&key(number)))).expect("open");
    let known: Vec<u32> = (0..12).filter(|&number| find(number).is_some()).collect();
    assert_eq!(known.len(), 3);
    assert!(known.iter().all(|&at| store.has(find(at).expect("known"), &model(at), at)));
    store.settle();
}

#[test]
fn reused_namespace_number_shows_no_old_state() {
    for (namespaces, layouts) in [(2, 4), (8, 2)] {
        let store = few(namespaces, layouts);
        leave_own(&store);
        let (first, other) = (model(1), model(2));
        let old = store.open(1, &first).expect("room");
        store.core(|core| core.observe_prefill(old, 0, 100, 1_000_000)).expect("open");
        store.core(|core| core.set_tenant(old, 7)).expect("open");
        store.keep(old, &first, 1, Level::Disk);
        let table = store.core(|core| Ok(core.namespace(old).expect("open").table)).expect("open");
        let (mut early, mut late) =
            store.core(|core| Ok((core.begin_clear(old)?, core.begin_clear(old)?))).expect("open");
        assert!(!store.core(|core| Ok(core.clear_more(&mut early, 8))).expect("open"));
        assert_eq!(early.cleared.removed, 1);
        store.shut(old);
        // Both numbers are reused: first the store's own, then that of the closed namespace.
        let (kept, again) = (store.open(3, &other), store.open(4, &model(4)));
        let (kept, again) = (kept.expect("room"), again.expect("room"));
        assert!([kept, again].contains(&old), "{kept} and {again}, not {old}");
        let (at, of, mark) = if kept == old { (kept, other, 3) } else { (again, model(4), 4) };
        let namespace = store.core(|core| Ok(*core.namespace(at).expect("open"))).expect("open");
        assert_eq!((namespace.key, namespace.tenant, namespace.handles), (key(mark), 0, 1));
        assert_eq!(namespace.table, table);
        assert_eq!(store.core(|core| Ok(core.prefill(at).observed())).expect("open"), 0);
        assert!(!store.has(at, &of, mark));
        store.keep(at, &of, mark, Level::Disk);
        // A clear of the old namespace removes nothing.
        assert!(!store.core(|core| Ok(core.clear_more(&mut late, 8))).expect("open"));
        assert_eq!(late.cleared.removed, 0);
        assert!(store.has(at, &of, mark));
        // The old namespace does not find the new chunks either.
        store.shut(kept);
        store.shut(again);
        let back = store.open(1, &first).expect("others are evicted");
        assert!(!store.has(back, &first, 1));
        store.settle();
    }
}

/// Pending work in a closed namespace keeps the number of the namespace.
#[test]
fn pending_work_keeps_its_namespace() {
    let store = few(2, 2);
    leave_own(&store);
    let namespace = store.open(1, &MODEL).expect("room");
    let session = store.begin(namespace, &document(1, 16));
    let mut engine = Engine::new(MODEL, Shape::Tokens, 16);
    let what = engine.whole();
    let waits =
        store.core(|core| core.submit_waiting(session, TransferKind::Get, Level::Ram, 0, what));
    let (_, ticket) = waits.expect("submitted");
    store.end(session);
    store.shut(namespace);
    // A transfer keeps the first layout. The store's own layout is unused.
    let other = store.open(2, &model(2)).expect("room");
    let another = store.open(3, &model(3)).map(|_| ()).map_err(|error| error.status());
    assert_eq!(another, Err(Status::Limit));
    store
        .core(|core| {
            core.begin_waiting(ticket);
            Ok(())
        })
        .expect("open");
    store.settle();
    let another = store.open(3, &model(3)).expect("the transfer has ended");
    assert!(!store.has(another, &model(3), 3) && !store.has(other, &model(2), 2));
    engine.compute(&[]);
    store.settle();
}

/// Also a session without tokens keeps its namespace.
#[test]
fn session_keeps_its_namespace() {
    let store = few(2, 2);
    let namespace = store.open(1, &MODEL).expect("room");
    let session = store.begin(namespace, &[]);
    store.shut(namespace);
    let other = store.open(2, &MODEL).map_err(|error| error.status());
    assert_eq!(other, Err(Status::Limit));
    let kept = store.core(|core| Ok(core.find_namespace(&key(1)))).expect("open");
    assert_eq!(kept, Some(namespace));
    store.end(session);
    assert_eq!(store.open(2, &MODEL).expect("the session has ended"), namespace);
    store.settle();
}

/// Lookups continue after their session was closed.
#[test]
fn block_lookups_keep_their_namespace() {
    let files = empty_disk();
    let config = Config { remote: Some(RemoteConfig::default()), ..config(2, 2) };
    let store = SteppedStore::on_disk(files, config, None);
    let namespace = store.open(1, &MODEL).expect("room");
    let session = store.begin(namespace, &[]);
    let number = store.core(|core| core.locate_blocks(session, vec![key(77)])).expect("begun");
    store.end(session);
    store.shut(namespace);
    assert!(store.with(|core| core.has_work(WorkerKind::Lookup)));
    let other = store.open(2, &MODEL).map_err(|error| error.status());
    assert_eq!(other, Err(Status::Limit));
    store
        .core(|core| {
            core.cancel(number, Status::Cancelled);
            Ok(())
        })
        .expect("open");
    assert_eq!(store.open(2, &MODEL).expect("the lookup has ended"), namespace);
    store.settle();
}

/// Evicted namespaces are still at the remote. Their cells are exact after a fetch, whatever
/// layouts used the chunk table meanwhile; also blocks located by name.
#[test]
fn evicted_namespaces_return_from_the_remote() {
    let scratch = Scratch::new("slot-reclamation-remote");
    std::fs::create_dir_all(&scratch.0).expect("made");
    let remote =
        format!("remote=dir(path=\"{}\", object=4KiB, timeout=20000)", scratch.0.display());
    let spec = spec_of(&format!("store(host=8MiB, chunks=4096, {remote})"));
    let (one, other) = (TestStore::open(&spec), TestStore::open(&spec));
    let last = MAX_CHUNK_TABLES as u32 + 40;
    let ends = |op: Result<OpRef>| assert_eq!(wait(&op.expect("begun")).status, Status::Ok);
    for number in 0..last {
        let (model, tokens) = (model(number), document(1, model(number).chunk));
        let namespace = one.open(number, &model).expect("others are evicted");
        one.keep(namespace, &model, number, Level::Remote);
        one.shut(namespace);
        let namespace = other.open(number, &model).expect("others are evicted");
        let session = other.begin(namespace, &[]);
        let keys = other.handle.chunk_keys(namespace, &tokens, &[]).expect("open");
        ends(other.handle.locate_blocks(session, keys, &OpOpts::default()));
        other.end(session);
        other.shut(namespace);
    }
    one.settle();
    other.settle();
    for store in [&one, &other] {
        for number in (0..last).rev() {
            let model = model(number);
            let namespace = store.open(number, &model).expect("others are evicted");
            let session = store.begin(namespace, &document(1, model.chunk));
            ends(store.handle.locate(session, &OpOpts::default()));
            assert!(store.has(namespace, &model, number), "layout {number}");
            store.close_session(session);
            store.shut(namespace);
        }
        store.settle();
        let remote = store.core(|core| Ok(core.remote_stats())).expect("open").expect("a remote");
        assert_eq!(
            (remote.removed_objects, remote.corrupt_objects, remote.absent_objects),
            (0, 0, 0),
            "{remote:?}"
        );
    }
    one.close();
    other.close();
}
