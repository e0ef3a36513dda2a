//! Blocks under names of the engine: a get returns what was stored under the name or reports a
//! miss, block by block.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvtier::base::op::{OpOpts, OpRef, RELEASED};
use kvtier::base::status::{Result, Status};
use kvtier::device::Memory;
use kvtier::format::keys::Key;
use kvtier::format::keys::block::BlockKeys;
use kvtier::meta::chunks::WHOLE;
use kvtier::policy::Hint;
use kvtier::store::state::blocks::MAX_HOLDS;
use kvtier::store::state::blocks::{BlockTransfer, MAX_BLOCKS};
use kvtier::store::state::session::{LayerViews, PlaneView, Tokens, Views};
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::{NamespaceOpts, SessionOpts};
use kvtier_testkit::fixtures::store::{
    Engine, LONG_NS, Model, POISON, Scratch, Shape, TestStore, document, marks_of, mix, spec_of,
    with_disk,
};
use proptest::prelude::*;

const MODEL: Model = Model { layers: 3, heads: 2, run: 24, chunk: 4 };

/// The engine's memory for blocks: a block is contiguous, K before V, layer after layer.
struct Pool {
    memory: Vec<u8>,
}

/// Expected content of the block with this name.
fn content(name: u32) -> Vec<u8> {
    let mut state = mix(u64::from(name) + 77);
    let byte = |_| {
        state = mix(state);
        state as u8
    };
    (0..MODEL.chunk_bytes()).map(byte).collect()
}

impl Pool {
    fn new(blocks: usize) -> Pool {
        Pool { memory: vec![POISON; blocks * MODEL.chunk_bytes() as usize] }
    }

    fn of(names: &[u32]) -> Pool {
        Pool { memory: names.iter().flat_map(|&name| content(name)).collect() }
    }

    fn block(&self, at: usize) -> &[u8] {
        let each = MODEL.chunk_bytes() as usize;
        &self.memory[at * each..][..each]
    }

    /// Views of some blocks, in this order.
    fn views(&self, order: &[usize]) -> Views {
        let base = self.memory.as_ptr().expose_provenance() as u64;
        let addresses = order.iter().map(|&at| base + at as u64 * MODEL.chunk_bytes());
        let addresses: Arc<Vec<u64>> = Arc::new(addresses.collect());
        let plane_bytes = MODEL.token_bytes() * MODEL.chunk;
        let plane = |number: usize| PlaneView {
            place: Tokens::Pages {
                addresses: addresses.clone(),
                page_tokens: MODEL.chunk as u32,
                shift_bytes: (number * plane_bytes) as i64,
            },
            tokens: (order.len() * MODEL.chunk) as u32,
            heads: 1,
            run_bytes: MODEL.token_bytes() as u64,
            token_stride_bytes: MODEL.token_bytes() as u64,
            head_stride_bytes: MODEL.token_bytes() as u64,
            memory: Memory::Host,
        };
        let layer = |at| LayerViews { k: plane(2 * at), v: Some(plane(2 * at + 1)) };
        Views::from((0..MODEL.layers).map(layer).collect::<Vec<_>>())
    }
}

struct Engineer {
    store: TestStore,
    namespace: u32,
    session: u32,
    keys: BlockKeys,
}

impl Engineer {
    fn new(spec: &str) -> Engineer {
        Engineer::on(TestStore::open(&spec_of(spec)), 1)
    }

    fn on(store: TestStore, number: u8) -> Engineer {
        let opts = NamespaceOpts { key: Key([number; 32]), layout: MODEL.layout(), holes: true };
        let namespace = store.handle.with(|core| core.open_namespace(&opts)).expect("opened");
        let session =
            store.handle.with(|core| core.open_session(namespace, &SessionOpts::default()));
        let session = session.expect("a session");
        Engineer { store, namespace, session, keys: BlockKeys::new(&Key([number; 32])) }
    }

    fn keys(&self, names: &[u32]) -> Vec<Key> {
        names.iter().map(|name| self.keys.key(&name.to_le_bytes()).expect("a name")).collect()
    }

    fn begin(
        &self,
        kind: TransferKind,
        level: Level,
        names: &[u32],
        views: Views,
    ) -> Result<OpRef> {
        let blocks = BlockTransfer {
            keys: self.keys(names),
            first_layer: 0,
            layers: MODEL.layers,
            views: Arc::new(views),
            after: None,
        };
        let opts = OpOpts::default();
        let ops = self.store.handle.submit_blocks(self.session, (kind, level), blocks, &opts, None);
        Ok(ops?.remove(0))
    }

    /// Statuses of the op and of each block.
    fn end(&self, op: &OpRef) -> (Status, Vec<Status>) {
        op.wait(RELEASED, self.store.now_ns() + LONG_NS).expect("every op ends");
        let status = |code: Option<i32>| Status::from_code(code.expect("ended")).expect("known");
        let each: Vec<Status> = op.items().iter().map(|item| status(item.outcome().0)).collect();
        let info = op.info();
        let failed = each.iter().filter(|&&one| one != Status::Ok).count() as u32;
        assert_eq!((info.items, info.items_done), (each.len() as u32, each.len() as u32));
        assert_eq!(info.items_failed, failed);
        let own = status(info.status);
        assert_eq!(own == Status::Ok, failed == 0, "{own:?} of {each:?}");
        op.remove();
        (own, each)
    }

    fn put(&self, level: Level, names: &[u32]) -> (Status, Vec<Status>) {
        let (pool, order): (Pool, Vec<usize>) = (Pool::of(names), (0..names.len()).collect());
        let op =
            self.begin(TransferKind::Put, level, names, pool.views(&order)).expect("submitted");
        self.end(&op)
    }

    /// Gets blocks, and returns which were found. Compares every byte of found blocks, and checks
    /// that a missing block has no wrong bytes.
    fn get(&self, names: &[u32]) -> Vec<bool> {
        // The last name is first in memory, so that blocks are in no particular order.
        let (pool, order): (Pool, Vec<usize>) =
            (Pool::new(names.len()), (0..names.len()).rev().collect());
        let op = self
            .begin(TransferKind::Get, Level::Ram, names, pool.views(&order))
            .expect("submitted");
        let (_, each) = self.end(&op);
        for ((&name, &at), &status) in names.iter().zip(&order).zip(&each) {
            let (got, right) = (pool.block(at), content(name));
            match status {
                Status::Ok => assert!(got == right, "wrong bytes in block {name}"),
                Status::NotFound => {
                    let plane_bytes = MODEL.token_bytes() * MODEL.chunk;
                    for (got, right) in got.chunks(plane_bytes).zip(right.chunks(plane_bytes)) {
                        assert!(got == right || got.iter().all(|&byte| byte == POISON), "{name}");
                    }
                }
                other => panic!("a get of block {name} ended with {other:?}"),
            }
        }
        each.iter().map(|&status| status == Status::Ok).collect()
    }

    fn exists(&self, names: &[u32]) -> Vec<bool> {
        let (keys, mut found) = (self.keys(names), vec![0; names.len()]);
        let asked =
            self.store.handle.inspect(|core| core.exists(self.namespace, &keys, &mut found));
        asked.and_then(|asked| asked).expect("open");
        found.iter().map(|&one| one & WHOLE != 0).collect()
    }

    /// Holds blocks, and returns which of them were held.
    fn hold(&self, names: &[u32]) -> Vec<bool> {
        let (keys, mut found) = (self.keys(names), vec![9; names.len()]);
        self.store
            .handle
            .with(|core| core.hold_names(self.session, &keys, &mut found))
            .expect("few");
        assert!(found.iter().all(|&one| (one == 0) == (one & WHOLE == 0)));
        found.iter().map(|&one| one != 0).collect()
    }

    fn release(&self, names: &[u32]) -> Status {
        let keys = self.keys(names);
        let released = self.store.handle.with(|core| core.release_names(self.session, &keys));
        released.map_or_else(|error| error.status(), |()| Status::Ok)
    }

    fn drop_blocks(&self, names: &[u32]) -> (u64, u64) {
        self.store.settle();
        let keys = self.keys(names);
        let cleared = self.store.handle.with(|core| core.drop_blocks(self.session, &keys));
        let cleared = cleared.expect("open");
        assert_eq!(cleared.moving, 0);
        (cleared.removed, cleared.held)
    }

    fn close(self) {
        self.store.close_session(self.session);
        self.store.settle();
        self.store.close();
    }
}

#[test]
fn blocks_are_read_independently_in_any_order() {
    let all = Engineer::new("store(host=16MiB)");
    let names: Vec<u32> = (0..300).collect();
    assert_eq!(all.put(Level::Ram, &names).0, Status::Ok);
    let mixed: Vec<u32> = (0..400).map(|i| i * 37 % 400).collect();
    let there: Vec<bool> = mixed.iter().map(|&name| name < 300).collect();
    assert_eq!(all.get(&mixed), there);
    assert_eq!(all.exists(&mixed), there);
    // Blocks that are resident are not stored again.
    assert_eq!(all.put(Level::Ram, &mixed[..50]).0, Status::Ok);
    let more = mixed[..50].iter().filter(|&&name| name >= 300).count() as u64;
    assert_eq!(all.store.counters().stored_cells, (300 + more) * MODEL.layers as u64);
    all.close();
}

#[test]
fn repeated_names_are_transferred_each_time() {
    let all = Engineer::new("store(host=16MiB)");
    let names = [5, 6, 5, 5, 7, 6];
    assert_eq!(all.put(Level::Ram, &names).0, Status::Ok);
    assert_eq!(all.get(&names), [true; 6]);
    assert_eq!(all.get(&[8, 8, 5, 8]), [false, false, true, false]);
    assert_eq!(all.store.counters().stored_cells, 3 * MODEL.layers as u64);
    all.close();
}

#[test]
fn namespaces_and_sequences_do_not_share_blocks() {
    let first = Engineer::new("store(host=16MiB)");
    let opts = NamespaceOpts { key: Key([2; 32]), layout: MODEL.layout(), holes: false };
    let (other, tokens) =
        (first.store.handle.with(|core| core.open_namespace(&opts)), document(1, 20));
    let other = other.expect("opened");
    assert_eq!(first.put(Level::Ram, &[1, 2, 3]).0, Status::Ok);
    let keys = first.keys(&[1, 2, 3]);
    let mut found = [9; 3];
    first
        .store
        .handle
        .inspect(|core| core.exists(other, &keys, &mut found))
        .expect("open")
        .expect("ok");
    assert_eq!(found, [0; 3]);
    // A sequence in the same namespace, and one in the other namespace.
    for namespace in [first.namespace, other] {
        let marks = marks_of(namespace, &tokens);
        let session = first.store.session(namespace, &tokens);
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks);
        assert_eq!(first.store.put(session, Level::Ram, &engine).status, Status::Ok);
        let mut back = Engine::new(MODEL, Shape::Paged, tokens.len());
        assert_eq!(first.store.get(session, &back).status, Status::Ok);
        back.check(&marks, 0..tokens.len(), 0..MODEL.layers);
        first.store.close_session(session);
    }
    assert_eq!(first.get(&[1, 2, 3]), [true; 3]);
    first.close();
}

#[test]
fn full_memory_keeps_some_blocks_and_reports_each() {
    // Memory for some 40 blocks.
    let all = Engineer::new(&format!("store(host={},policy=lru)", 512 << 10));
    let mut lost = 0;
    for round in 0..20u32 {
        let names: Vec<u32> = (round * 50..round * 50 + 100).collect();
        let (_, each) = all.put(Level::Ram, &names);
        let stored: Vec<u32> =
            names.iter().zip(&each).filter(|(_, s)| **s == Status::Ok).map(|(n, _)| *n).collect();
        let there = all.exists(&names);
        let came = all.get(&names);
        assert_eq!(there, came, "residency changed without a call");
        lost += came.iter().filter(|&&came| !came).count();
        assert!(names.iter().zip(&came).all(|(name, came)| !came || stored.contains(name)));
    }
    let counters = all.store.counters();
    assert!(lost > 0 && counters.dropped_chunks > 0, "{lost} of {counters:?}");
    all.close();
}

#[test]
fn durable_blocks_survive_a_restart() {
    let scratch = Scratch::new("blocks");
    let spec = with_disk(&scratch.0, "bytes=64MiB,segment=1MiB,buffered=true", "host=8MiB");
    let names: Vec<u32> = (0..200).collect();
    for life in 0..3u32 {
        let all = Engineer::on(TestStore::open(&spec), 1);
        let before: Vec<bool> = names.iter().map(|name| *name < life * 50).collect();
        assert_eq!(all.get(&names), before);
        let own: Vec<u32> = (life * 50..life * 50 + 50).collect();
        let (_, each) = all.put(Level::Durable, &own);
        assert_eq!(each, [Status::Ok; 50]);
        // Prefetched blocks are resident in memory, and missing blocks are reported.
        let op =
            all.begin(TransferKind::Prefetch, Level::Ram, &names, Views::default()).expect("begun");
        let (_, each) = all.end(&op);
        assert!(each.iter().zip(&names).all(|(s, n)| (*s == Status::Ok) == (*n < life * 50 + 50)));
        all.close();
    }
}

#[test]
fn dropped_blocks_can_be_put_again() {
    let all = Engineer::new("store(host=16MiB)");
    assert_eq!(all.put(Level::Ram, &[1, 2, 3, 4]).0, Status::Ok);
    let keys = all.keys(&[2, 4, 4, 9]);
    let cleared = all.store.handle.with(|core| core.drop_blocks(all.session, &keys)).expect("open");
    assert_eq!((cleared.removed, cleared.held, cleared.moving), (2, 0, 0));
    assert_eq!(all.get(&[1, 2, 3, 4]), [true, false, true, false]);
    assert_eq!(all.put(Level::Ram, &[4]).0, Status::Ok);
    assert_eq!(all.exists(&[2, 4]), [false, true]);
    all.close();
}

#[test]
fn invalid_block_transfers_leave_nothing() {
    let all = Engineer::new("store(host=16MiB)");
    let refused = |kind, level, names: &[u32], views| {
        all.begin(kind, level, names, views).map(|_| ()).unwrap_err().status()
    };
    let (pool, many) = (Pool::new(2), vec![1; MAX_BLOCKS + 1]);
    assert_eq!(refused(TransferKind::Prefetch, Level::Ram, &[], Views::default()), Status::Limit);
    assert_eq!(refused(TransferKind::Prefetch, Level::Ram, &many, Views::default()), Status::Limit);
    // A view of too few blocks, views of too few layers, and a level that needs a disk.
    assert_eq!(
        refused(TransferKind::Put, Level::Ram, &[1, 2, 3], pool.views(&[0, 1])),
        Status::Invalid
    );
    let mut one = pool.views(&[0, 1]);
    one.layers.pop();
    assert_eq!(refused(TransferKind::Get, Level::Ram, &[1, 2], one), Status::Invalid);
    let both = pool.views(&[0, 1]);
    assert_eq!(refused(TransferKind::Put, Level::Durable, &[1, 2], both), Status::Unavailable);
    assert_eq!((all.store.counters().stored_cells, all.exists(&[1, 2, 3])), (0, vec![false; 3]));
    all.close();
}

#[test]
fn full_table_evicts_only_other_blocks() {
    // The table has fewer rows than a batch has blocks, and fewer rows are free than that.
    let all = Engineer::new("store(host=16MiB,chunks=64,policy=lru)");
    let first: Vec<u32> = (0..60).collect();
    assert_eq!(all.put(Level::Ram, &first).0, Status::Ok);
    // The 30 oldest resident blocks and 30 new ones: the 30 old blocks stay.
    let both: Vec<u32> = (0..30).chain(100..130).collect();
    assert_eq!(all.put(Level::Ram, &both).0, Status::Ok);
    assert_eq!(all.get(&both), [true; 60]);
    let too_many: Vec<u32> = (200..300).collect();
    let (pool, order): (Pool, Vec<usize>) = (Pool::of(&too_many), (0..100).collect());
    let refused = all.begin(TransferKind::Put, Level::Ram, &too_many, pool.views(&order));
    assert_eq!(refused.map(|_| ()).unwrap_err().status(), Status::Limit);
    all.close();
}

#[derive(Clone, Debug)]
enum Step {
    Put(Vec<u32>, bool),
    Get(Vec<u32>),
    Drop(Vec<u32>),
    Cancel(Vec<u32>),
    Hold(Vec<u32>),
    Release(Vec<u32>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let names = || proptest::collection::vec(0u32..60, 1..30);
    let step = prop_oneof![
        4 => (names(), any::<bool>()).prop_map(|(names, disk)| Step::Put(names, disk)),
        4 => names().prop_map(Step::Get),
        1 => names().prop_map(Step::Drop),
        1 => names().prop_map(Step::Cancel),
        1 => names().prop_map(Step::Hold),
        1 => names().prop_map(Step::Release),
    ];
    proptest::collection::vec(step, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// In any order: no wrong byte, no block that was never put, no durable block is lost, and each
    /// block has its own status.
    #[test]
    fn random_block_transfers_match_a_model(steps in steps(), host_kib in 300u32..1200) {
        let scratch = Scratch::new("blocks-any");
        let disk = "bytes=32MiB,segment=1MiB,buffered=true";
        let spec = with_disk(&scratch.0, disk, &format!("host={host_kib}KiB,write=back"));
        let all = Engineer::on(TestStore::open(&spec), 1);
        // Blocks acknowledged on disk and not dropped since, and all blocks ever put.
        let (mut known, mut ever) = (BTreeSet::new(), BTreeSet::new());
        let mut held: BTreeMap<u32, u32> = BTreeMap::new();
        for step in &steps {
            match step {
                Step::Hold(names) => {
                    for (&name, came) in names.iter().zip(all.hold(names)) {
                        prop_assert!(!came || ever.contains(&name));
                        *held.entry(name).or_default() += u32::from(came);
                    }
                }
                Step::Release(names) => {
                    let mut rest = held.clone();
                    let mut take = |name: &u32| match rest.get_mut(name) {
                        Some(times) if *times > 0 => {
                            *times -= 1;
                            true
                        }
                        _ => false,
                    };
                    let own: Vec<u32> = names.iter().copied().filter(|name| take(name)).collect();
                    let status = if own.len() < names.len() { Status::Invalid } else { Status::Ok };
                    prop_assert_eq!(all.release(names), status);
                    if status != Status::Ok {
                        prop_assert_eq!(all.release(&own), Status::Ok);
                    }
                    held = rest;
                }
                Step::Put(names, disk) => {
                    let level = if *disk { Level::Disk } else { Level::Ram };
                    let (_, each) = all.put(level, names);
                    for (&name, status) in names.iter().zip(each) {
                        ever.insert(name);
                        if *disk && status == Status::Ok {
                            known.insert(name);
                        }
                    }
                }
                Step::Get(names) => {
                    for (name, came) in names.iter().zip(all.get(names)) {
                        prop_assert!(!came || ever.contains(name));
                        prop_assert!(came || !known.contains(name), "block {} was on disk", name);
                    }
                }
                Step::Drop(names) => {
                    let keys = all.keys(names);
                    all.store.settle();
                    let cleared = all.store.handle.with(|core| core.drop_blocks(all.session, &keys));
                    let of_them: BTreeSet<u32> = names.iter().copied().collect();
                    let times = |name: &&u32| held.get(*name).is_some_and(|times| *times > 0);
                    let stay = of_them.iter().filter(times).count() as u64;
                    prop_assert_eq!(cleared.expect("open").held, stay);
                    known.retain(|name| !names.contains(name));
                }
                Step::Cancel(names) => {
                    let (pool, order): (Pool, Vec<usize>) =
                        (Pool::of(names), (0..names.len()).collect());
                    let op = all.begin(TransferKind::Put, Level::Ram, names, pool.views(&order));
                    let op = op.expect("begun");
                    op.cancel();
                    let (_, each) = all.end(&op);
                    let fair = |s: &Status| matches!(s, Status::Ok | Status::Cancelled | Status::Budget);
                    prop_assert!(each.iter().all(fair), "{:?}", each);
                    ever.extend(names.iter().copied());
                }
            }
            let kept: Vec<u32> = held.iter().filter(|(_, n)| **n > 0).map(|(name, _)| *name).collect();
            prop_assert!(all.exists(&kept).iter().all(|&there| there), "{:?} are held", kept);
        }
        all.close();
    }
}

fn lru_case(first_missing: bool) -> usize {
    // Memory for some 40 blocks.
    let all = Engineer::new(&format!("store(host={},policy=lru)", 512 << 10));
    assert_eq!(all.put(Level::Ram, &(0..30).collect::<Vec<u32>>()).0, Status::Ok);
    // The last blocks of the batch are the first victims.
    let hot: Vec<u32> = (15..30).collect();
    let mut asked = hot.clone();
    if first_missing {
        asked.insert(0, 999);
    }
    assert_eq!(all.get(&asked).iter().filter(|came| **came).count(), 15);
    all.put(Level::Ram, &(100..120).collect::<Vec<u32>>());
    let left = all.exists(&hot).iter().filter(|one| **one).count();
    all.close();
    left
}

#[test]
fn blocks_after_a_missing_one_count_as_used() {
    assert_eq!(lru_case(false), 15, "without a missing one");
    assert_eq!(lru_case(true), 15, "behind a missing one");
}

#[test]
fn repeated_name_takes_one_row() {
    let all = Engineer::new("store(host=16MiB,chunks=64,policy=lru)");
    let first: Vec<u32> = (0..60).collect();
    assert_eq!(all.put(Level::Ram, &first).0, Status::Ok);
    assert_eq!(all.put(Level::Ram, &[200; 50]).0, Status::Ok);
    let there = all.exists(&first).iter().filter(|one| **one).count();
    assert_eq!(there, 60, "61 of 64 rows are needed");
    let often = [300; 100];
    let (pool, order): (Pool, Vec<usize>) = (Pool::of(&often), (0..100).collect());
    let op = all.begin(TransferKind::Put, Level::Ram, &often, pool.views(&order)).expect("one row");
    assert_eq!(all.end(&op).0, Status::Ok);
    all.close();
}

#[test]
fn full_disk_fails_only_blocks_without_space() {
    let scratch = Scratch::new("blocks-full");
    let spec = with_disk(&scratch.0, "bytes=4MiB,segment=1MiB,buffered=true", "host=64MiB");
    let all = Engineer::on(TestStore::open(&spec), 1);
    let names: Vec<u32> = (0..600).collect();
    let (_, each) = all.put(Level::Disk, &names);
    let well = each.iter().filter(|&&one| one == Status::Ok).count();
    let written = all.store.counters().written_cells / MODEL.layers as u64;
    all.close();
    assert!(written < 600 && well as u64 >= written / 2, "{well} well of {written} written");
}

fn first_layers(dup: bool) -> usize {
    let all =
        Engineer::new(&format!("store(host={},policy=lru,granularity=cell,drop=cell)", 512 << 10));
    let mut names: Vec<u32> = (0..30).collect();
    if dup {
        names.push(0);
    }
    assert_eq!(all.put(Level::Ram, &names).0, Status::Ok);
    all.put(Level::Ram, &(100..120).collect::<Vec<u32>>());
    let (pool, order): (Pool, Vec<usize>) = (Pool::new(30), (0..30).collect());
    let mut views = pool.views(&order);
    views.layers.truncate(1);
    let blocks = BlockTransfer {
        keys: all.keys(&names[..30]),
        first_layer: 0,
        layers: 1,
        views: Arc::new(views),
        after: None,
    };
    let opts = OpOpts::default();
    let how = (TransferKind::Get, Level::Ram);
    let op = all.store.handle.submit_blocks(all.session, how, blocks, &opts, None);
    let (_, each) = all.end(&op.expect("begun").remove(0));
    all.close();
    each.iter().filter(|&&one| one == Status::Ok).count()
}

#[test]
fn policies_see_repeated_names_like_single_ones() {
    let (once, twice) = (first_layers(false), first_layers(true));
    assert_eq!(once, twice, "resident first layers");
}

#[test]
fn session_granularity_evicts_blocks_one_by_one() {
    let all = Engineer::new(&format!("store(host={},policy=lru,granularity=session)", 512 << 10));
    assert_eq!(all.put(Level::Ram, &(0..30).collect::<Vec<u32>>()).0, Status::Ok);
    all.put(Level::Ram, &(100..112).collect::<Vec<u32>>());
    let left = all.exists(&(0..30).collect::<Vec<u32>>()).iter().filter(|one| **one).count();
    all.close();
    assert!(left >= 15, "{left} of 30 blocks are resident after 12 more were put");
}

#[test]
fn rejected_block_put_evicts_nothing() {
    let all = Engineer::new("store(host=16MiB,chunks=64,policy=lru)");
    let first: Vec<u32> = (0..60).collect();
    assert_eq!(all.put(Level::Ram, &first).0, Status::Ok);
    let (more, order): (Vec<u32>, Vec<usize>) = ((200..250).collect(), (0..50).collect());
    let refused = all.begin(TransferKind::Put, Level::Disk, &more, Pool::of(&more).views(&order));
    assert_eq!(refused.map(|_| ()).unwrap_err().status(), Status::Unavailable);
    assert_eq!(all.exists(&first).iter().filter(|one| **one).count(), 60);
    all.close();
}

#[test]
fn held_blocks_are_not_evicted() {
    for rest in ["", ",granularity=cell", ",granularity=cell,drop=cell", ",granularity=session"] {
        // Memory for some 40 blocks.
        let all = Engineer::new(&format!("store(host={},policy=lru{rest})", 512 << 10));
        assert_eq!(all.put(Level::Ram, &(0..30).collect::<Vec<u32>>()).0, Status::Ok);
        let (own, others): (Vec<u32>, Vec<u32>) = ((0..10).collect(), (10..30).collect());
        // Missing blocks are not held, and do not make the call fail.
        assert_eq!(all.hold(&[&own[..], &[999]].concat()), [vec![true; 10], vec![false]].concat());
        for round in 0..10u32 {
            all.put(Level::Ram, &(100 + round * 30..130 + round * 30).collect::<Vec<u32>>());
        }
        assert_eq!(all.get(&own), [true; 10], "{rest}");
        assert!(all.exists(&others).iter().any(|there| !there), "{rest}: no block was evicted");
        assert_eq!(all.drop_blocks(&[&own[..], &[5, 999]].concat()), (0, 10));
        assert_eq!(all.release(&own), Status::Ok);
        assert_eq!(all.drop_blocks(&own[5..]), (5, 0));
        for round in 0..10u32 {
            all.put(Level::Ram, &(500 + round * 30..530 + round * 30).collect::<Vec<u32>>());
        }
        assert_eq!(all.exists(&own), [false; 10], "{rest}: released blocks were not evicted");
        all.close();
    }
}

#[test]
fn holds_are_counted_and_excess_release_is_ignored() {
    let all = Engineer::new("store(host=16MiB)");
    assert_eq!(all.put(Level::Ram, &[1, 2, 3]).0, Status::Ok);
    assert_eq!(all.hold(&[1, 1, 2]), [true; 3]);
    assert_eq!(all.hold(&[2]), [true]);
    // Blocks 1 and 2 are held twice each, block 3 not at all. A missing block cannot be held.
    for wrong in [&[3][..], &[1, 3], &[1, 1, 1], &[2, 1, 2, 2], &[9], &[1, 9]] {
        assert_eq!(all.release(wrong), Status::Invalid, "{wrong:?}");
    }
    assert_eq!(all.release(&[1, 2, 2]), Status::Ok);
    assert_eq!(all.drop_blocks(&[1, 2]), (1, 1));
    assert_eq!(all.release(&[2]), Status::Invalid);
    assert_eq!(all.exists(&[1, 2]), [true, false]);
    // Another session has holds of its own; a closed session holds nothing.
    let other =
        all.store.handle.with(|core| core.open_session(all.namespace, &SessionOpts::default()));
    let (other, keys) = (other.expect("a session"), all.keys(&[1, 3]));
    let held = all.store.handle.with(|core| core.hold_names(other, &keys, &mut [0; 2]));
    held.expect("resident blocks");
    assert_eq!(all.release(&[1]), Status::Ok);
    assert_eq!(all.release(&[3]), Status::Invalid);
    let fork = all.store.handle.with(|core| core.fork(other, &SessionOpts::default()));
    let fork = fork.expect("a fork");
    assert_eq!(all.drop_blocks(&[1, 3]), (0, 2));
    all.store.close_session(other);
    assert_eq!(all.drop_blocks(&[1, 3]), (2, 0));
    all.store.close_session(fork);
    all.close();
}

#[test]
fn blocks_being_put_cannot_be_held() {
    let all = Engineer::new("store(host=16MiB)");
    let pool = Pool::of(&[7]);
    let blocks = BlockTransfer {
        keys: all.keys(&[7]),
        first_layer: 0,
        layers: MODEL.layers,
        views: Arc::new(pool.views(&[0])),
        after: None,
    };
    let (ready, how) =
        (Arc::new(kvtier::store::ready_event::Ready::default()), (TransferKind::Put, Level::Ram));
    let opts = OpOpts::default();
    let op = all.store.handle.submit_blocks(all.session, how, blocks, &opts, Some(&*ready));
    let op = op.expect("begun").remove(0);
    assert_eq!(all.hold(&[7]), [false]);
    ready.signal();
    assert_eq!(all.end(&op).0, Status::Ok);
    assert_eq!(all.release(&[7]), Status::Invalid);
    assert_eq!(all.hold(&[7]), [true]);
    all.close();
}

#[test]
fn holds_per_session_are_limited() {
    let all = Engineer::new("store(host=16MiB)");
    assert_eq!(all.put(Level::Ram, &[1, 2]).0, Status::Ok);
    let (mut keys, mut found) = (all.keys(&[1]), vec![0; MAX_BLOCKS]);
    keys.resize(MAX_BLOCKS, keys[0]);
    all.store
        .handle
        .with(|core| {
            for _ in 0..MAX_HOLDS / MAX_BLOCKS {
                core.hold_names(all.session, &keys, &mut found)?;
            }
            Ok(())
        })
        .expect("as many as may be");
    let hold = |names: &[u32]| {
        let keys = all.keys(names);
        let held = all.store.handle.with(|core| core.hold_names(all.session, &keys, &mut [0; 2]));
        held.map_err(|error| error.status())
    };
    assert_eq!(hold(&[9, 2]), Err(Status::Limit));
    assert_eq!(hold(&[9, 8]), Ok(()), "missing blocks");
    assert_eq!(all.drop_blocks(&[2]), (1, 0), "a rejected call holds nothing");
    keys.push(keys[0]);
    let too_many = all.store.handle.with(|core| core.release_names(all.session, &keys));
    assert_eq!(too_many.unwrap_err().status(), Status::Limit);
    all.close();
}

#[test]
fn puts_fail_when_all_blocks_are_held() {
    // Memory for some 40 blocks; then 50 rows in the table.
    for (host, rows) in [("512KiB", ""), ("16MiB", ",chunks=50")] {
        let all = Engineer::new(&format!("store(host={host},policy=lru{rows})"));
        let mut own = Vec::new();
        for name in 0..60 {
            let (pool, order) = (Pool::of(&[name]), [0]);
            let ended = match all.begin(TransferKind::Put, Level::Ram, &[name], pool.views(&order))
            {
                Ok(op) => all.end(&op).0,
                Err(error) => error.status(),
            };
            let full = if rows.is_empty() { Status::Budget } else { Status::Limit };
            assert!([Status::Ok, full].contains(&ended), "{host}{rows}: {ended:?}");
            // The new block, which is not held yet, may be the only candidate for eviction.
            if all.hold(&[name]) == [true] {
                own.push(name);
            }
        }
        assert!((20..=50).contains(&own.len()), "{host}{rows}: {} are held", own.len());
        assert_eq!(all.get(&own), vec![true; own.len()]);
        assert_eq!(all.release(&own[..5]), Status::Ok);
        assert_eq!(all.put(Level::Ram, &[99]).0, Status::Ok);
        assert!(all.exists(&own[5..]).iter().all(|&there| there));
        assert_eq!(all.release(&own[5..]), Status::Ok);
        assert_eq!(all.put(Level::Ram, &(100..120).collect::<Vec<u32>>()).0, Status::Ok);
        all.close();
    }
}

/// A rejected put does not evict the candidates, which are too few.
#[test]
fn put_without_enough_free_rows_evicts_nothing() {
    let all = Engineer::new("store(host=16MiB,policy=lru,chunks=50)");
    let names: Vec<u32> = (0..50).collect();
    assert_eq!(all.put(Level::Ram, &names).0, Status::Ok);
    assert_eq!(all.hold(&names[..30]), [true; 30]);
    let put = |names: &[u32]| {
        let (pool, order): (Pool, Vec<usize>) = (Pool::of(names), (0..names.len()).collect());
        let op = all.begin(TransferKind::Put, Level::Ram, names, pool.views(&order));
        op.map(|op| all.end(&op).0).map_err(|error| error.status())
    };
    assert_eq!(put(&(100..121).collect::<Vec<u32>>()), Err(Status::Limit));
    assert!(all.exists(&names).iter().all(|&there| there), "a rejected put evicted a block");
    // Three of the blocks in the batch are resident and cannot be evicted for the others.
    assert_eq!(put(&(47..68).collect::<Vec<u32>>()), Err(Status::Limit));
    assert!(all.exists(&names).iter().all(|&there| there), "a rejected put evicted a block");
    assert_eq!(put(&(100..120).collect::<Vec<u32>>()), Ok(Status::Ok));
    assert!(all.exists(&names[..30]).iter().all(|&there| there));
    assert_eq!(all.release(&names[..30]), Status::Ok);
    all.close();
}

#[test]
fn maximum_blocks_are_held_and_hinted_at_once() {
    for rest in ["", ",granularity=cell", ",granularity=session"] {
        let all = Engineer::new(&format!("store(host=64MiB,policy=predictive{rest})"));
        let names: Vec<u32> = (0..1000).collect();
        assert_eq!(all.put(Level::Ram, &names).0, Status::Ok);
        let again: Vec<u32> = (0..MAX_BLOCKS as u32).map(|i| i % 1000).collect();
        assert!(all.hold(&again).iter().all(|&held| held));
        let keys = all.keys(&again);
        // A time in the past is valid as well.
        let hint = Hint { next_use: Some((1, 0.5)), ..Hint::default() };
        all.store.handle.with(|core| core.hint_blocks(all.session, &keys, &hint)).expect("hinted");
        assert_eq!(all.drop_blocks(&names), (0, 1000));
        assert_eq!(all.release(&again), Status::Ok);
        assert_eq!(all.drop_blocks(&names), (1000, 0));
        all.close();
    }
}

/// A block may have more cells than a policy takes in one batch.
#[test]
fn models_of_many_layers_are_hinted_cell_by_cell() {
    let model = Model { layers: 300, heads: 1, run: 8, chunk: 4 };
    let store = TestStore::open(&spec_of("store(host=64MiB,policy=predictive,granularity=cell)"));
    let namespace = store.namespace(1, &model);
    let tokens = document(1, 4);
    let session = store.session(namespace, &tokens);
    let engine = Engine::computed(model, Shape::Tokens, &marks_of(0, &tokens));
    assert_eq!(store.put(session, Level::Ram, &engine).status, Status::Ok);
    let hint = Hint { done: true, ..Hint::default() };
    let hinted = store.handle.with(|core| {
        let table = core.table_of(namespace).expect("an open namespace");
        let slot = table.chunks.slots().next().expect("a chunk");
        let keys = vec![*table.chunks.key(slot).expect("an occupied row"); MAX_BLOCKS];
        core.hint_blocks(session, &keys, &hint)
    });
    assert_eq!(hinted.map_err(|error| error.status()), Ok(()));
    store.close_session(session);
    store.settle();
    store.close();
}

#[test]
fn held_blocks_may_be_demoted_to_disk() {
    let scratch = Scratch::new("blocks-held");
    let disk = "bytes=32MiB,segment=1MiB,buffered=true";
    // With `write=never`, blocks reach the disk only by eviction.
    let spec = with_disk(&scratch.0, disk, "host=512KiB,write=never,policy=lru");
    let all = Engineer::on(TestStore::open(&spec), 1);
    let names: Vec<u32> = (0..30).collect();
    assert_eq!(all.put(Level::Ram, &names).0, Status::Ok);
    assert_eq!(all.hold(&names[..20]), [true; 20]);
    for round in 0..10u32 {
        let others: Vec<u32> = (100 + round * 30..130 + round * 30).collect();
        assert_eq!(all.put(Level::Ram, &others).0, Status::Ok, "all held blocks can be demoted");
    }
    let left = all.get(&names);
    assert_eq!(left[..20], [true; 20]);
    assert!(left[20..].iter().any(|there| !there), "no block was evicted");
    assert_eq!(all.release(&names[..20]), Status::Ok);
    all.close();
}

/// Number of the first 15 of 30 blocks that are still resident after more blocks were put, with an
/// optional hint for some blocks.
fn left_after(rest: &str, said: Option<(std::ops::Range<u32>, Hint)>) -> usize {
    // Memory for some 40 blocks.
    let all = Engineer::new(&format!("store(host={},policy=predictive{rest})", 512 << 10));
    let first: Vec<u32> = (0..15).collect();
    assert_eq!(all.put(Level::Ram, &first).0, Status::Ok);
    assert_eq!(all.put(Level::Ram, &(15..30).collect::<Vec<u32>>()).0, Status::Ok);
    if let Some((names, hint)) = said {
        let again = names.start;
        let keys = all.keys(&names.chain([999, again]).collect::<Vec<u32>>());
        all.store
            .handle
            .with(|core| core.hint_blocks(all.session, &keys, &hint))
            .expect("valid hints");
    }
    all.put(Level::Ram, &(100..120).collect::<Vec<u32>>());
    let left = all.exists(&first).iter().filter(|one| **one).count();
    all.close();
    left
}

#[test]
fn policies_use_block_hints() {
    let now_ns = kvtier::base::clock::Clock::real().now_ns() as i64;
    let late = Hint { next_use: Some((now_ns + 1_000_000_000_000, 1.0)), ..Hint::default() };
    let never = Hint { done: true, ..Hint::default() };
    for rest in ["", ",granularity=cell,drop=cell", ",granularity=session"] {
        let silent = left_after(rest, None);
        assert!(silent < 15, "{rest}: {silent} blocks stay without a hint");
        for hint in [late, never] {
            let others = left_after(rest, Some((15..30, hint)));
            assert_eq!(others, 15, "{rest}: a hinted block was kept before another one");
        }
    }
}

/// Rounds of each thread of a storm.
const ROUNDS: u64 = 600;

/// Threads put, get, prefetch, drop, hold and cancel, with deadlines, repeated names, all levels,
/// and hints that are set or withdrawn. Found blocks are exact, items add up, and the tables are
/// consistent at the end.
fn storm(
    spec: &kvtier::store::spec::StoreSpec,
    seed: u64,
    rounds: u64,
    drops: bool,
) -> BTreeSet<u32> {
    let acknowledged = Arc::new(std::sync::Mutex::new(BTreeSet::new()));
    let all = Arc::new(Engineer::on(TestStore::open(spec), 1));
    let threads: Vec<_> = (0..4u64)
        .map(|thread| {
            let (all, acknowledged) = (all.clone(), acknowledged.clone());
            std::thread::spawn(move || {
                let mut state = mix(seed * 31 + thread);
                let mut next = move |below: u64| {
                    state = mix(state);
                    state % below
                };
                for _ in 0..rounds {
                    let names: Vec<u32> = (0..1 + next(40)).map(|_| next(120) as u32).collect();
                    let what = next(11);
                    if what == 9 && !drops {
                        continue;
                    }
                    if what == 10 {
                        let held = all.hold(&names);
                        let own = names.iter().zip(held).filter(|(_, held)| *held);
                        let own: Vec<u32> = own.map(|(name, _)| *name).collect();
                        std::thread::sleep(std::time::Duration::from_micros(next(2000)));
                        assert!(all.exists(&own).iter().all(|&there| there), "{own:?} are held");
                        assert_eq!(all.release(&own), Status::Ok);
                        continue;
                    }
                    if what == 9 {
                        let keys = all.keys(&names);
                        all.store
                            .handle
                            .with(|core| core.drop_blocks(all.session, &keys))
                            .expect("ok");
                        continue;
                    }
                    let kind = match what {
                        0..4 => TransferKind::Put,
                        4..8 => TransferKind::Get,
                        _ => TransferKind::Prefetch,
                    };
                    let level = match (kind, next(4)) {
                        (TransferKind::Put, 1) => Level::Disk,
                        (TransferKind::Put, 2) => Level::Durable,
                        _ => Level::Ram,
                    };
                    let order: Vec<usize> = (0..names.len()).collect();
                    let pool = if kind == TransferKind::Put {
                        Pool::of(&names)
                    } else {
                        Pool::new(names.len())
                    };
                    let views = if kind == TransferKind::Prefetch {
                        Views::default()
                    } else {
                        pool.views(&order)
                    };
                    let blocks = BlockTransfer {
                        keys: all.keys(&names),
                        first_layer: 0,
                        layers: MODEL.layers,
                        views: Arc::new(views),
                        after: None,
                    };
                    let deadline_ns =
                        if next(3) == 0 { all.store.now_ns() + next(400_000) } else { 0 };
                    let opts = OpOpts { deadline_ns, ..OpOpts::default() };
                    let ready = (next(3) == 0)
                        .then(|| Arc::new(kvtier::store::ready_event::Ready::default()));
                    let ops = all.store.handle.submit_blocks(
                        all.session,
                        (kind, level),
                        blocks,
                        &opts,
                        ready.as_deref(),
                    );
                    let op = match ops {
                        Ok(mut ops) => ops.remove(0),
                        Err(error) => {
                            assert!(
                                matches!(
                                    error.status(),
                                    Status::Limit | Status::Again | Status::Unavailable
                                ),
                                "{error}"
                            );
                            continue;
                        }
                    };
                    if next(4) == 0 {
                        op.cancel();
                    }
                    if let Some(ready) = &ready {
                        if next(5) == 0 {
                            ready.cancel();
                        } else {
                            ready.signal();
                        }
                    }
                    if next(4) == 0 {
                        op.cancel();
                    }
                    op.wait(RELEASED, all.store.now_ns() + LONG_NS).expect("every op ends");
                    let info = op.info();
                    let each: Vec<i32> =
                        op.items().iter().map(|i| i.outcome().0.expect("ended")).collect();
                    let failed = each.iter().filter(|&&one| one != 0).count() as u32;
                    assert_eq!(
                        (info.items, info.items_done, info.items_failed),
                        (each.len() as u32, each.len() as u32, failed)
                    );
                    let own = info.status.expect("ended");
                    assert!(own != 0 || failed == 0, "{own} of {each:?}");
                    if kind == TransferKind::Get {
                        for (at, (&name, &status)) in names.iter().zip(&each).enumerate() {
                            assert!(
                                status != 0 || pool.block(at) == content(name),
                                "wrong bytes in {name}"
                            );
                        }
                    }
                    if level > Level::Ram {
                        let well = names.iter().zip(&each).filter(|(_, s)| **s == 0);
                        acknowledged.lock().unwrap().extend(well.map(|(n, _)| *n));
                    }
                    op.remove();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("sound"));
    all.store.settle();
    Arc::into_inner(all).expect("alone").close();
    Arc::into_inner(acknowledged).unwrap().into_inner().unwrap()
}

#[test]
fn concurrent_block_transfers_are_exact() {
    for (seed, rest) in [
        (1, "host=600KiB"),
        (2, "host=600KiB,write=back"),
        (3, "host=2MiB,chunks=90,policy=lru"),
        (4, "host=600KiB,granularity=cell"),
        (5, "host=600KiB,granularity=session,write=through"),
        (6, "host=600KiB,granularity=cell,drop=cell"),
    ] {
        let scratch = Scratch::new("blocks-storm");
        let disk = if seed % 2 == 0 {
            "bytes=32MiB,segment=1MiB,buffered=true"
        } else {
            "bytes=4MiB,segment=1MiB,buffered=true"
        };
        storm(&with_disk(&scratch.0, disk, rest), seed, ROUNDS, true);
    }
    storm(&spec_of("store(host=600KiB,chunks=100)"), 7, ROUNDS, true);
    storm(&spec_of("store(host=600KiB,chunks=100,granularity=cell,drop=cell)"), 8, ROUNDS, true);
}

#[test]
fn acknowledged_blocks_survive_under_concurrent_load() {
    for seed in 20..22u64 {
        let scratch = Scratch::new("blocks-acknowledged");
        let disk = "bytes=64MiB,segment=1MiB,buffered=true";
        let rest = if seed % 2 == 0 { "host=600KiB" } else { "host=600KiB,write=never" };
        let spec = with_disk(&scratch.0, disk, rest);
        let acknowledged: Vec<u32> = storm(&spec, seed, ROUNDS, false).into_iter().collect();
        let all = Engineer::on(TestStore::open(&spec), 1);
        assert!(all.get(&acknowledged).iter().all(|&came| came));
        all.close();
    }
}
