//! Failed syncs: which puts fail, and which cells must stay durable. The test runs workers and disk
//! step by step.

use kvtier_testkit::fixtures::stepped_store;
use kvtier_testkit::fixtures::store as support;

use kvtier::base::budget::Tier;
use kvtier::base::status::Status;
use kvtier::device::Stream;
use kvtier::format::keys::chain::Chain;
use kvtier::meta::key::Key;
use kvtier::store::state::tier_cache::Granularity;
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{Config, Level, StoreState, TransferKind};
use kvtier::tier::disk::Options;
use kvtier_testkit::disk::plan::Plan;
use kvtier_testkit::disk::{SimFiles, SimOpts};
use stepped_store::{MODEL, Parts, SteppedStore, empty_disk};
use support::{Engine, Shape, document, marks_of};

const ALL: std::ops::Range<usize> = 0..MODEL.layers;

/// A put is durable. A later put of its child fails with its sync: the first one stays durable.
#[test]
fn durable_chunk_survives_a_failed_sync_of_its_child() {
    let store = SteppedStore::open();
    let (short, long) = (document(1, 16), document(1, 32));
    assert_eq!(store.put(&short, ALL, Level::Durable), Status::Ok);
    store.fail_next_sync();
    assert_eq!(store.put(&long, ALL, Level::Durable), Status::Io);
    store.files.set_plan(Plan::default());
    store.with(StoreState::request_checkpoint);
    store.settle();
    let store = store.crash();
    assert!(store.is_stored(&short), "a durable chunk is missing");
}

/// The same for layers of one chunk, which lie in one segment.
#[test]
fn durable_layers_survive_a_failed_sync_of_others() {
    let store = SteppedStore::open();
    let tokens = document(1, 16);
    assert_eq!(store.put(&tokens, 0..1, Level::Durable), Status::Ok);
    store.fail_next_sync();
    assert_eq!(store.put(&tokens, ALL, Level::Durable), Status::Io);
    store.files.set_plan(Plan::default());
    store.with(StoreState::request_checkpoint);
    store.settle();
    let store = store.crash();
    let session = store.session(&tokens);
    let engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
    let what = engine.cell_range(0, 16, 0..1, false);
    assert_eq!(
        store.transfer(session, TransferKind::Get, Level::Ram, what),
        Status::Ok,
        "a durable layer is missing"
    );
}

/// The same for chunks that an earlier process made durable.
#[test]
fn durable_chunks_of_an_earlier_process_survive_a_failed_sync() {
    let store = SteppedStore::open();
    let (short, long) = (document(1, 16), document(1, 32));
    assert_eq!(store.put(&short, ALL, Level::Durable), Status::Ok);
    let store = store.crash();
    store.fail_next_sync();
    assert_eq!(store.put(&long, ALL, Level::Durable), Status::Io);
    store.files.set_plan(Plan::default());
    store.with(StoreState::request_checkpoint);
    store.settle();
    let store = store.crash();
    assert!(store.is_stored(&short), "a durable chunk is missing");
}

/// Two puts of the same chunk wait for a sync. If it fails, either both puts fail or the chunk is
/// on disk.
#[test]
fn failed_sync_fails_all_waiting_puts() {
    let store = SteppedStore::open();
    // The record of the namespace is durable already.
    assert_eq!(store.put(&document(9, 16), ALL, Level::Durable), Status::Ok);
    let tokens = document(1, 16);
    let submit = || {
        let session = store.session(&tokens);
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &tokens));
        let what = engine.whole();
        let put = |core: &mut StoreState| {
            core.submit_cell_range(session, TransferKind::Put, Level::Durable, 0, what)
        };
        (store.with(put).expect("submitted"), engine)
    };
    let (first, _engine) = submit();
    while [WorkerKind::Copy, WorkerKind::Write].into_iter().any(|kind| store.run_batch(kind)) {}
    store.fail_next_sync();
    let mut sync = store.with(|core| core.take(WorkerKind::Sync)).expect("a sync");
    // The second put is submitted during the sync, and finds all its cells on disk.
    let (second, _engine) = submit();
    let mut keeper = store.state.clone();
    // SAFETY: syncs touch no memory.
    let outcome = unsafe { store.tools.work(&mut sync, Stream(0), &mut keeper) };
    store.with(|core| core.done(sync, outcome, 0));
    store.files.set_plan(Plan::default());
    store.settle();
    let ended = store.finished();
    let of = |number| ended.iter().find(|one| one.number == number).expect("the put has ended");
    assert!(of(first).error.is_some(), "{ended:?}");
    let mut keys = Vec::new();
    let chain = Chain::new(Key([1; 32]), MODEL.chunk as u32);
    chain.expect("chunks").extend(&tokens, &[], &mut keys).expect("hashed");
    let mut found = [0];
    store.with(|core| core.exists(store.namespace, &keys, &mut found)).expect("open");
    let is_below = found[0] & 1 << Tier::Disk as u8 != 0;
    assert!(of(second).error.is_some() || is_below, "OK, but the chunk is not on disk: {ended:?}");
    if of(second).error.is_none() {
        let store = store.crash();
        assert!(store.is_stored(&tokens), "a durable chunk is missing");
    }
}

/// A chunk that was lost from the disk is written again, because its children are useless without
/// it.
#[test]
fn chunk_lost_with_its_segment_is_written_again() {
    let store = SteppedStore::open();
    let prefix = document(1, 32);
    let branch = [prefix.clone(), document(7, 16)].concat();
    assert_eq!(store.put(&branch, ALL, Level::Disk), Status::Ok);
    store.fail_next_sync();
    assert_eq!(store.put(&prefix[..16], ALL, Level::Durable), Status::Io);
    store.files.set_plan(Plan::default());
    store.settle();
    // Another branch is durable. Its ancestors are on disk, but perhaps not synced.
    let branch = [prefix, document(8, 16)].concat();
    let session = store.session(&branch);
    let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &branch));
    let what = engine.cell_range(32, 16, ALL, false);
    assert_eq!(store.transfer(session, TransferKind::Put, Level::Durable, what), Status::Ok);
    let mut keys = Vec::new();
    let chain = Chain::new(Key([1; 32]), MODEL.chunk as u32);
    chain.expect("chunks").extend(&branch, &[], &mut keys).expect("hashed");
    let mut found = [0; 3];
    store.with(|core| core.exists(store.namespace, &keys, &mut found)).expect("open");
    assert!(found.iter().all(|tiers| tiers & 1 << Tier::Disk as u8 != 0), "{found:?}");
    store.with(|core| core.check_prefixes()).expect("no chunk on disk without its ancestors");
}

/// A chunk whose sync failed is written to another segment, and can become durable there.
#[test]
fn rewritten_chunk_becomes_durable() {
    let store = SteppedStore::open();
    let tokens = document(1, 16);
    assert_eq!(store.put(&tokens, 0..1, Level::Disk), Status::Ok);
    // The segment is full before the other layer is put.
    for other in 2..6 {
        assert_eq!(store.put(&document(other, 16), ALL, Level::Disk), Status::Ok);
    }
    assert_eq!(store.put(&tokens, 1..2, Level::Disk), Status::Ok);
    store.fail_next_sync();
    assert_eq!(store.put(&tokens, ALL, Level::Durable), Status::Io);
    store.files.set_plan(Plan::default());
    let again: Vec<Status> = (0..3).map(|_| store.put(&tokens, ALL, Level::Durable)).collect();
    assert_eq!(again, [Status::Ok; 3]);
    let store = store.crash();
    assert!(store.is_stored(&tokens), "a durable chunk is missing");
}

/// Compaction moved a chunk whose sync had failed, and made it durable.
#[test]
fn compacted_chunk_becomes_durable() {
    let kept = (1..9).filter(|&seed| compacted_chunk_is_kept(seed)).count();
    assert!(kept > 0, "every failed sync lost the bytes");
}

/// Whether the failed sync lost no bytes.
fn compacted_chunk_is_kept(seed: u64) -> bool {
    let config = Config { host_bytes: 8 << 20, ..SteppedStore::config() };
    let files = SimFiles::new(seed, SimOpts { capacity_bytes: 64 << 20, ..SimOpts::default() });
    let store = SteppedStore::on_disk(files, config, None);
    let tokens = document(1, 16);
    assert_eq!(store.put(&tokens, ALL, Level::Disk), Status::Ok);
    // The chunk is on disk only.
    let session = store.session(&tokens);
    store.with(|core| core.demote_range(session, 0, 16)).expect("a stored range");
    store.settle();
    store.close_session(session);
    store.fail_next_sync();
    assert_eq!(store.put(&tokens, ALL, Level::Durable), Status::Io);
    store.files.set_plan(Plan::default());
    let disk = store.tools.disk.clone().expect("a disk");
    let bad = disk.segments().into_iter().find(|segment| segment.poisoned).expect("one");
    match disk.compact(bad.number, &mut store.state.clone()) {
        // It lost the header of the record.
        Ok(compacted) if compacted.left_blocks > 0 => return false,
        Ok(_) => {}
        // It lost the end of the file.
        Err(error) if error.status() == Status::Io => return false,
        Err(error) => panic!("{error}"),
    }
    let counters = store.with(|core| core.counters);
    if counters.corrupt_cells > 0 {
        return false;
    }
    assert_eq!(store.put(&tokens, ALL, Level::Durable), Status::Ok);
    let store = store.crash();
    assert!(store.is_stored(&tokens), "a durable chunk is missing");
    true
}

/// With every granularity of eviction.
#[test]
fn durable_put_larger_than_the_disk_fails() {
    for grain in [Granularity::Chunk, Granularity::Cell, Granularity::Session] {
        let config = Config { host_bytes: 8 << 20, granularity: grain, ..SteppedStore::config() };
        let files = empty_disk();
        let store = {
            let options =
                Options { segment_bytes: 16 * 4096, ..Options::new(12 * 16 * 4096, [7; 16]) };
            SteppedStore::new(Parts { config, disk: Some((files, options)), ..Parts::default() })
        };
        let tokens = document(1, 100 * 16);
        let status = store.put(&tokens, ALL, Level::Durable);
        let mut keys = Vec::new();
        let chain = Chain::new(Key([1; 32]), MODEL.chunk as u32);
        chain.expect("chunks").extend(&tokens, &[], &mut keys).expect("hashed");
        let mut found = vec![0; keys.len()];
        store.with(|core| core.exists(store.namespace, &keys, &mut found)).expect("open");
        let below = found.iter().filter(|&&tiers| tiers & 1 << Tier::Disk as u8 != 0).count();
        println!("{grain:?}: {status:?}, {below} of {} on disk", keys.len());
        assert!(status != Status::Ok || below == keys.len(), "{grain:?}: {below} on disk");
    }
}
