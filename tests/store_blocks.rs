//! Blocks that an engine names itself: what comes back is what was stored under the name, or it
//! is said to be missing, block by block.

mod support {
    pub mod store;
}

use std::collections::BTreeSet;
use std::sync::Arc;

use kvtier::base::op::{OpOpts, OpRef, RELEASED};
use kvtier::base::status::{Result, Status};
use kvtier::device::Memory;
use kvtier::format::keys::Key;
use kvtier::format::keys::block::BlockKeys;
use kvtier::kv::core::blocks::{BlockMove, MAX_BLOCKS};
use kvtier::kv::core::moves::{Deed, Level};
use kvtier::kv::core::views::{LayerViews, PlaneView, Tokens, Views};
use kvtier::kv::core::{SessionOpts, SpaceOpts};
use kvtier::meta::chunks::WHOLE;
use proptest::prelude::*;
use support::store::{
    Engine, Home, LONG_NS, Model, POISON, Scratch, Shape, document, marks_of, mix, spec_of,
    with_disk,
};

const MODEL: Model = Model { layers: 3, heads: 2, run: 24, chunk: 4 };

/// Room for blocks at an engine's: a block lies together, K before V, layer after layer.
struct Pool {
    memory: Vec<u8>,
}

/// What is to be in a block of a name.
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

    /// Views of some of its blocks, in that order.
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
        Views((0..MODEL.layers).map(layer).collect())
    }
}

struct Engineer {
    home: Home,
    space: u32,
    session: u32,
    keys: BlockKeys,
}

impl Engineer {
    fn new(spec: &str) -> Engineer {
        Engineer::on(Home::open(&spec_of(spec)), 1)
    }

    fn on(home: Home, number: u8) -> Engineer {
        let opts = SpaceOpts { key: Key([number; 32]), layout: MODEL.layout(), holes: true };
        let space = home.store.with(|core| core.open_space(&opts)).expect("opened");
        let session = home.store.with(|core| core.open_session(space, &SessionOpts::default()));
        let session = session.expect("a session");
        Engineer { home, space, session, keys: BlockKeys::new(&Key([number; 32])) }
    }

    fn keys(&self, names: &[u32]) -> Vec<Key> {
        names.iter().map(|name| self.keys.key(&name.to_le_bytes()).expect("a name")).collect()
    }

    fn begin(&self, deed: Deed, level: Level, names: &[u32], views: Views) -> Result<OpRef> {
        let blocks = BlockMove {
            keys: self.keys(names),
            first_layer: 0,
            layers: MODEL.layers,
            views: Arc::new(views),
            after: None,
        };
        let opts = OpOpts::default();
        let ops = self.home.store.submit_blocks(self.session, (deed, level), blocks, &opts, None);
        Ok(ops?.remove(0))
    }

    /// The op's own end, and that of each block.
    fn end(&self, op: &OpRef) -> (Status, Vec<Status>) {
        op.wait(RELEASED, self.home.now_ns() + LONG_NS).expect("every op ends");
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
        let op = self.begin(Deed::Put, level, names, pool.views(&order)).expect("submitted");
        self.end(&op)
    }

    /// Which came, every byte of them compared; what did not come is not wrong either.
    fn get(&self, names: &[u32]) -> Vec<bool> {
        // The last name first in memory: blocks lie in no order.
        let (pool, order): (Pool, Vec<usize>) =
            (Pool::new(names.len()), (0..names.len()).rev().collect());
        let op = self.begin(Deed::Get, Level::Ram, names, pool.views(&order)).expect("submitted");
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
        let asked = self.home.store.look(|core| core.exists(self.space, &keys, &mut found));
        asked.and_then(|asked| asked).expect("open");
        found.iter().map(|&one| one & WHOLE != 0).collect()
    }

    fn close(self) {
        self.home.end(self.session);
        self.home.rest();
        self.home.close();
    }
}

#[test]
fn blocks_come_back_in_any_order_and_by_themselves() {
    let all = Engineer::new("store(host=16MiB)");
    let names: Vec<u32> = (0..300).collect();
    assert_eq!(all.put(Level::Ram, &names).0, Status::Ok);
    let mixed: Vec<u32> = (0..400).map(|i| i * 37 % 400).collect();
    let there: Vec<bool> = mixed.iter().map(|&name| name < 300).collect();
    assert_eq!(all.get(&mixed), there);
    assert_eq!(all.exists(&mixed), there);
    // What is there is not stored again.
    assert_eq!(all.put(Level::Ram, &mixed[..50]).0, Status::Ok);
    let more = mixed[..50].iter().filter(|&&name| name >= 300).count() as u64;
    assert_eq!(all.home.counters().stored, (300 + more) * MODEL.layers as u64);
    all.close();
}

#[test]
fn names_that_come_twice_are_moved_twice() {
    let all = Engineer::new("store(host=16MiB)");
    let names = [5, 6, 5, 5, 7, 6];
    assert_eq!(all.put(Level::Ram, &names).0, Status::Ok);
    assert_eq!(all.get(&names), [true; 6]);
    assert_eq!(all.get(&[8, 8, 5, 8]), [false, false, true, false]);
    assert_eq!(all.home.counters().stored, 3 * MODEL.layers as u64);
    all.close();
}

#[test]
fn namespaces_do_not_share_and_tokens_are_none_of_their_business() {
    let first = Engineer::new("store(host=16MiB)");
    let opts = SpaceOpts { key: Key([2; 32]), layout: MODEL.layout(), holes: false };
    let (other, tokens) = (first.home.store.with(|core| core.open_space(&opts)), document(1, 20));
    let other = other.expect("opened");
    assert_eq!(first.put(Level::Ram, &[1, 2, 3]).0, Status::Ok);
    let keys = first.keys(&[1, 2, 3]);
    let mut found = [9; 3];
    first.home.store.look(|core| core.exists(other, &keys, &mut found)).expect("open").expect("ok");
    assert_eq!(found, [0; 3]);
    // A sequence beside them, in the same namespace, and the other one.
    for space in [first.space, other] {
        let marks = marks_of(space, &tokens);
        let session = first.home.session(space, &tokens);
        let mut engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
        engine.compute(&marks);
        assert_eq!(first.home.put(session, Level::Ram, &engine).status, Status::Ok);
        let mut back = Engine::new(MODEL, Shape::Paged, tokens.len());
        assert_eq!(first.home.get(session, &back).status, Status::Ok);
        back.check(&marks, 0..tokens.len(), 0..MODEL.layers);
        first.home.end(session);
    }
    assert_eq!(first.get(&[1, 2, 3]), [true; 3]);
    first.close();
}

#[test]
fn memory_that_is_full_keeps_some_and_says_which() {
    // Room for some forty.
    let all = Engineer::new(&format!("store(host={},policy=lru)", 512 << 10));
    let mut lost = 0;
    for round in 0..20u32 {
        let names: Vec<u32> = (round * 50..round * 50 + 100).collect();
        let (_, each) = all.put(Level::Ram, &names);
        let stored: Vec<u32> =
            names.iter().zip(&each).filter(|(_, s)| **s == Status::Ok).map(|(n, _)| *n).collect();
        let there = all.exists(&names);
        let came = all.get(&names);
        assert_eq!(there, came, "nothing happens in between");
        lost += came.iter().filter(|&&came| !came).count();
        assert!(names.iter().zip(&came).all(|(name, came)| !came || stored.contains(name)));
    }
    let counters = all.home.counters();
    assert!(lost > 0 && counters.dropped > 0, "{lost} of {counters:?}");
    all.close();
}

#[test]
fn what_was_acknowledged_on_disk_is_there_after_a_restart() {
    let scratch = Scratch::new("blocks");
    let spec = with_disk(&scratch.0, "bytes=64MiB,segment=1MiB,buffered=true", "host=8MiB");
    let names: Vec<u32> = (0..200).collect();
    for life in 0..3u32 {
        let all = Engineer::on(Home::open(&spec), 1);
        let before: Vec<bool> = names.iter().map(|name| *name < life * 50).collect();
        assert_eq!(all.get(&names), before);
        let own: Vec<u32> = (life * 50..life * 50 + 50).collect();
        let (_, each) = all.put(Level::Durable, &own);
        assert_eq!(each, [Status::Ok; 50]);
        // Prefetched ones are in memory, and those that are not there are named.
        let op = all.begin(Deed::Prefetch, Level::Ram, &names, Views::default()).expect("begun");
        let (_, each) = all.end(&op);
        assert!(each.iter().zip(&names).all(|(s, n)| (*s == Status::Ok) == (*n < life * 50 + 50)));
        all.close();
    }
}

#[test]
fn dropped_blocks_are_gone_and_can_come_again() {
    let all = Engineer::new("store(host=16MiB)");
    assert_eq!(all.put(Level::Ram, &[1, 2, 3, 4]).0, Status::Ok);
    let keys = all.keys(&[2, 4, 4, 9]);
    let cleared = all.home.store.with(|core| core.drop_blocks(all.session, &keys)).expect("open");
    assert_eq!((cleared.gone, cleared.held, cleared.moving), (2, 0, 0));
    assert_eq!(all.get(&[1, 2, 3, 4]), [true, false, true, false]);
    assert_eq!(all.put(Level::Ram, &[4]).0, Status::Ok);
    assert_eq!(all.exists(&[2, 4]), [false, true]);
    all.close();
}

#[test]
fn what_cannot_be_is_refused_and_leaves_nothing() {
    let all = Engineer::new("store(host=16MiB)");
    let refused = |deed, level, names: &[u32], views| {
        all.begin(deed, level, names, views).map(|_| ()).unwrap_err().status()
    };
    let (pool, many) = (Pool::new(2), vec![1; MAX_BLOCKS + 1]);
    assert_eq!(refused(Deed::Prefetch, Level::Ram, &[], Views::default()), Status::Limit);
    assert_eq!(refused(Deed::Prefetch, Level::Ram, &many, Views::default()), Status::Limit);
    // A view of too few blocks, views of too few layers, a level that needs a disk.
    assert_eq!(refused(Deed::Put, Level::Ram, &[1, 2, 3], pool.views(&[0, 1])), Status::Invalid);
    let mut one = pool.views(&[0, 1]);
    one.0.pop();
    assert_eq!(refused(Deed::Get, Level::Ram, &[1, 2], one), Status::Invalid);
    let both = pool.views(&[0, 1]);
    assert_eq!(refused(Deed::Put, Level::Durable, &[1, 2], both), Status::Unavailable);
    assert_eq!((all.home.counters().stored, all.exists(&[1, 2, 3])), (0, vec![false; 3]));
    all.close();
}

#[test]
fn a_table_that_is_full_makes_room_for_others_only() {
    // Fewer rows than a batch has, and more than that are there already.
    let all = Engineer::new("store(host=16MiB,chunks=64,policy=lru)");
    let first: Vec<u32> = (0..60).collect();
    assert_eq!(all.put(Level::Ram, &first).0, Status::Ok);
    // Thirty that are there, the oldest, and thirty new ones: the old thirty stay.
    let both: Vec<u32> = (0..30).chain(100..130).collect();
    assert_eq!(all.put(Level::Ram, &both).0, Status::Ok);
    assert_eq!(all.get(&both), [true; 60]);
    let too_many: Vec<u32> = (200..300).collect();
    let (pool, order): (Pool, Vec<usize>) = (Pool::of(&too_many), (0..100).collect());
    let refused = all.begin(Deed::Put, Level::Ram, &too_many, pool.views(&order));
    assert_eq!(refused.map(|_| ()).unwrap_err().status(), Status::Limit);
    all.close();
}

#[derive(Clone, Debug)]
enum Step {
    Put(Vec<u32>, bool),
    Get(Vec<u32>),
    Drop(Vec<u32>),
    Cancel(Vec<u32>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let names = || proptest::collection::vec(0u32..60, 1..30);
    let step = prop_oneof![
        4 => (names(), any::<bool>()).prop_map(|(names, disk)| Step::Put(names, disk)),
        4 => names().prop_map(Step::Get),
        1 => names().prop_map(Step::Drop),
        1 => names().prop_map(Step::Cancel),
    ];
    proptest::collection::vec(step, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// Whatever is asked for, in whatever order: no wrong byte, nothing that was never put,
    /// nothing on disk is lost, and each block's status is its own.
    #[test]
    fn every_answer_is_right(steps in steps(), host_kib in 300u32..1200) {
        let scratch = Scratch::new("blocks-any");
        let disk = "bytes=32MiB,segment=1MiB,buffered=true";
        let spec = with_disk(&scratch.0, disk, &format!("host={host_kib}KiB,write=back"));
        let all = Engineer::on(Home::open(&spec), 1);
        // What was acknowledged on disk and not dropped since, and what was ever put.
        let (mut known, mut ever) = (BTreeSet::new(), BTreeSet::new());
        for step in &steps {
            match step {
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
                    all.home.rest();
                    all.home.store.with(|core| core.drop_blocks(all.session, &keys)).expect("open");
                    known.retain(|name| !names.contains(name));
                }
                Step::Cancel(names) => {
                    let (pool, order): (Pool, Vec<usize>) =
                        (Pool::of(names), (0..names.len()).collect());
                    let op = all.begin(Deed::Put, Level::Ram, names, pool.views(&order));
                    let op = op.expect("begun");
                    op.cancel();
                    let (_, each) = all.end(&op);
                    let fair = |s: &Status| matches!(s, Status::Ok | Status::Cancelled | Status::Budget);
                    prop_assert!(each.iter().all(fair), "{:?}", each);
                    ever.extend(names.iter().copied());
                }
            }
        }
        all.close();
    }
}
