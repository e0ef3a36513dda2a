//! Memory for writing to disk and reading back is charged to the store's account: it never exceeds
//! a small budget, and always suffices to make progress.

use kvtier_testkit::fixtures::store as support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvtier::base::budget::{Budget, Tier};
use kvtier::base::op::OpOpts;
use kvtier::base::status::Status;
use kvtier::store::handle::Store;
use kvtier::store::state::transfer::Level;
use kvtier::tier::disk::RESERVE_BYTES;
use support::{
    Done, Engine, LONG_NS, Model, Scratch, Shape, TestStore, budget, document, marks_of, mix,
    runtime, wait, with_disk,
};

const MIB: u64 = 1 << 20;
const DISK: &str = "bytes=512MiB,segment=8MiB";
/// Chunks of 1 MiB, cells of 128 KiB.
const MODEL: Model = Model { layers: 8, heads: 4, run: 256, chunk: 64 };
/// One cell of 4 MiB, longer than the staging memory that is kept for it.
const LONG: Model = Model { layers: 1, heads: 8, run: 256, chunk: 1024 };

/// A store that is limited by its budget only.
fn open(dir: &Path, limit: u64, rest: &str) -> (TestStore, Arc<Budget>) {
    let runtime = runtime();
    let budget = budget(&runtime, &[(Tier::Host, limit)]);
    let spec = with_disk(dir, DISK, &format!("host=64MiB,chunks=4096,{rest}"));
    (TestStore::on_budget(runtime, &budget, &spec), budget)
}

/// Marks in which every `each`-th token repeats the one before it, so that little can be
/// compressed.
fn alike(tokens: &[u32], each: usize) -> Vec<u64> {
    let mut marks = marks_of(0, tokens);
    for at in (each - 1..marks.len()).step_by(each) {
        marks[at] = marks[at - 1];
    }
    marks
}

/// Stores a document.
fn put(store: &TestStore, namespace: u32, model: Model, number: u32, each: usize, level: Level) {
    let tokens = document(number, model.chunk);
    let session = store.session(namespace, &tokens);
    let mut engine = Engine::new(model, Shape::Tokens, tokens.len());
    engine.compute(&alike(&tokens, each));
    let right = Done::ok(model.chunk);
    assert_eq!(store.put(session, level, &engine), right, "{number}");
    store.close_session(session);
}

/// Loads a document, and compares every byte.
fn get(store: &TestStore, namespace: u32, model: Model, number: u32, each: usize) {
    let tokens = document(number, model.chunk);
    let session = store.session(namespace, &tokens);
    let mut engine = Engine::new(model, Shape::Tokens, tokens.len());
    let right = Done::ok(model.chunk);
    assert_eq!(store.get(session, &engine), right, "{number}");
    engine.check(&alike(&tokens, each), 0..tokens.len(), 0..model.layers);
    store.close_session(session);
}

/// At rest the account pays for segments, staging memory and tables only.
fn all_is_counted(store: &TestStore, budget: &Budget, limit: u64) {
    store.settle();
    let (cells, paid, tables) = store
        .handle
        .with(|core| {
            let tables = (core.paid_table_bytes(), core.table_bytes());
            Ok((core.host().stats().cost_bytes, tables.0, tables.1))
        })
        .expect("open");
    assert!(paid >= tables && paid <= tables + 2 * MIB, "{paid} paid for {tables}");
    let staging = store.handle.disk().expect("a disk").stats().staging_bytes;
    let held = store.handle.account().expect("an account").held(Tier::Host);
    assert_eq!((held.committed_bytes, held.reserved_bytes), (cells + staging + paid, 0));
    assert!(staging >= RESERVE_BYTES);
    let lane = budget.usage(Tier::Host);
    assert!(lane.peak_bytes <= limit, "{lane:?}");
}

#[test]
fn small_budget_holds_with_a_codec() {
    for limit in [20 * MIB, 48 * MIB] {
        let scratch = Scratch::new("coded");
        let (store, budget) = open(&scratch.0, limit, "codec=lz4,readers=3");
        let namespace = store.namespace(1, &MODEL);
        let next = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for caller in 0..3u64 {
                let (store, budget, next) = (&store, &budget, &next);
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    for turn in 0..24 {
                        mine.push(next.fetch_add(1, Ordering::Relaxed));
                        let level = if turn % 3 == 0 { Level::Disk } else { Level::Ram };
                        put(store, namespace, MODEL, mine[turn], 2, level);
                        let back = mix(caller << 32 | turn as u64) as usize % mine.len();
                        get(store, namespace, MODEL, mine[back], 2);
                        let lane = budget.usage(Tier::Host);
                        assert!(lane.reserved_bytes + lane.committed_bytes <= limit, "{lane:?}");
                    }
                });
            }
        });
        all_is_counted(&store, &budget, limit);
        let counters = store.counters();
        assert!(counters.coded_cells > 300 && counters.disk_hit_cells > 20, "{counters:?}");
        // Half of each cell repeats the other half. Cells are coded even with little memory.
        assert!(counters.coded_cells * 10 > counters.written_cells * 9, "{counters:?}");
        let (dropped, no_room) = (counters.dropped_chunks, counters.no_room_cells);
        assert_eq!((dropped, no_room, counters.failed_reads, counters.corrupt_cells), (0, 0, 0, 0));
        store.handle.close(store.now_ns() + LONG_NS).expect("closed");
        assert_eq!((budget.usage(Tier::Host).committed_bytes, budget.accounts()), (0, 0));
    }
}

#[test]
fn budget_below_the_reserve_is_rejected() {
    let scratch = Scratch::new("refused");
    let runtime = runtime();
    let spec = with_disk(&scratch.0, DISK, "host=64MiB,chunks=1024");
    let budget = budget(&runtime, &[(Tier::Host, RESERVE_BYTES - 1)]);
    let error = Store::open(runtime.core(), Some(&budget), &spec).err().expect("too little");
    assert_eq!(error.status(), Status::Budget, "{error}");
    for words in [&scratch.0.display().to_string()[..], "raise its limit", "without a disk"] {
        assert!(error.message().contains(words), "{error}");
    }
    // The rejected store leaves nothing charged, and a larger budget suffices.
    assert_eq!((budget.accounts(), budget.usage(Tier::Host).committed_bytes), (0, 0));
    budget.resize(Tier::Host, RESERVE_BYTES + 16 * MIB).expect("a budget");
    let store = TestStore::on_budget(runtime, &budget, &spec);

    let namespace = store.namespace(1, &MODEL);
    (0..40).for_each(|number| put(&store, namespace, MODEL, number, 2, Level::Ram));
    (0..40).for_each(|number| get(&store, namespace, MODEL, number, 2));
    all_is_counted(&store, &budget, RESERVE_BYTES + 16 * MIB);
    store.close();
}

#[test]
fn cell_larger_than_the_reserve_is_read_when_memory_is_full() {
    const LIMIT: u64 = 96 * MIB;
    let scratch = Scratch::new("long");
    let (store, budget) = open(&scratch.0, LIMIT, "codec=lz4,readers=2");
    let namespace = store.namespace(1, &LONG);
    // There is free memory, so the cells are coded.
    for number in 0..8 {
        put(&store, namespace, LONG, number, 8, Level::Disk);
    }
    store.settle();
    assert_eq!(store.counters().coded_cells, 8);
    // Then another account takes most of the memory, and cells take the rest.
    let other = budget.account("other", 1, None).expect("an account");
    let deadline_ns = store.now_ns() + LONG_NS;
    let opts = OpOpts { deadline_ns, ..OpOpts::default() };
    let op = other.reserve_later(Tier::Host, LIMIT - 32 * MIB, &opts).expect("asked");
    assert_eq!(wait(&op).status, Status::Ok);
    for number in 100..116 {
        put(&store, namespace, LONG, number, 8, Level::Ram);
    }
    store.settle();
    let asked = budget.usage(Tier::Host).reclaim_requested_bytes;
    std::thread::scope(|scope| {
        for caller in 0..2 {
            let store = &store;
            scope.spawn(move || {
                (0..16).for_each(|turn| get(store, namespace, LONG, (turn * 3 + caller) % 8, 8));
            });
        }
    });
    let counters = store.counters();
    assert!(counters.disk_hit_cells > 8, "{counters:?}");
    let lane = budget.usage(Tier::Host);
    assert!(lane.reclaim_requested_bytes > asked, "no cells were reclaimed: {lane:?}");
    assert_eq!((counters.no_room_cells, counters.failed_reads, counters.corrupt_cells), (0, 0, 0));
    store.settle();
    assert!(budget.usage(Tier::Host).peak_bytes <= LIMIT);
    other.commit(Tier::Host, LIMIT - 32 * MIB, 0).expect("reserved");
    all_is_counted(&store, &budget, LIMIT);
    store.close();
}

/// Memory of the remote's threads and of the remote index is charged with the tables.
#[test]
#[cfg(feature = "dir")]
fn remote_memory_is_charged_to_the_budget() {
    let (scratch, shared) = (Scratch::new("near"), Scratch::new("far"));
    std::fs::create_dir_all(&shared.0).expect("a directory");
    let remote = |more: &str| format!("remote=dir(path=\"{}\",{more})", shared.0.display());
    let tables = |more: &str| {
        let (store, budget) = open(&scratch.0, 48 * MIB, more);
        let namespace = store.namespace(1, &MODEL);
        (0..40).for_each(|number| put(&store, namespace, MODEL, number, 2, Level::Disk));
        (0..40).for_each(|number| get(&store, namespace, MODEL, number, 2));
        all_is_counted(&store, &budget, 48 * MIB);
        let bytes = store.handle.with(|core| Ok(core.table_bytes())).expect("open");
        store.handle.close(store.now_ns() + LONG_NS).expect("closed");
        assert_eq!((budget.usage(Tier::Host).committed_bytes, budget.accounts()), (0, 0));
        drop(store);
        std::fs::remove_dir_all(&scratch.0).expect("the store's own");
        bytes
    };
    let without = tables("remote=none");
    let few = tables(&remote("known=4096,fetchers=1,uploaders=1"));
    let many = tables(&remote("known=262144,fetchers=4,uploaders=2"));
    // Names of 16 bytes each, and thread stacks.
    assert!(few >= without + (4096 << 4) + 3 * (256 << 10), "{few} {without}");
    assert!(many - few >= (258_048 << 4) + 4 * (256 << 10), "{many} {few}");
}
