//! The store through its public interface: real threads, real files, small budgets, and every byte
//! compared.

use kvtier_testkit::fixtures::store as support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use kvtier::base::budget::Tier;
use kvtier::base::op::{OpOpts, RELEASED, RESOLVED};
use kvtier::base::status::Status;
use kvtier::store::state::transfer::{Level, TransferKind};
use support::{
    Done, Engine, LONG_NS, Model, POISON, SHAPES, Scratch, Shape, TestStore, budget, document,
    marks_of, mix, runtime, spec_of, wait, with_disk,
};

const SMALL: Model = Model { layers: 4, heads: 2, run: 64, chunk: 16 };
/// Cells of 8 KiB: two planes of a block each.
const WIDE: Model = Model { layers: 6, heads: 4, run: 64, chunk: 16 };
const ROOMY: &str = "bytes=256MiB,segment=4MiB";

fn ok(tokens: usize) -> Done {
    Done { status: Status::Ok, tokens }
}

#[test]
fn every_tensor_shape_reads_every_other() {
    let store = TestStore::open(&spec_of("store(host=16MiB,chunks=4096)"));
    let namespace = store.namespace(1, &SMALL);
    for (number, from) in SHAPES.into_iter().enumerate() {
        // Not whole chunks: the session has a tail of its own.
        let tokens = document(number as u32, 16 * 5 + 11);
        let marks = marks_of(0, &tokens);
        let session = store.session(namespace, &tokens);
        let mut engine = Engine::computed(SMALL, from, &marks);
        assert_eq!(store.put(session, Level::Ram, &engine), ok(tokens.len()));
        engine.check(&marks, 0..tokens.len(), 0..SMALL.layers);
        assert!(engine.is_untouched(), "padding was written");
        for to in SHAPES {
            let mut engine = Engine::new(SMALL, to, tokens.len());
            assert_eq!(store.get(session, &engine), ok(tokens.len()), "{from:?} to {to:?}");
            engine.check(&marks, 0..tokens.len(), 0..SMALL.layers);
            assert!(engine.is_untouched(), "{from:?} to {to:?}: more was written");
            // A part of the session: chunks 1 to 3 of layers 1 and 2.
            let part = engine.cell_range(16, 48, 1..3, false);
            let done = store.transfer(session, TransferKind::Get, Level::Ram, part);
            assert_eq!(done, ok(48));
            engine.check(&marks, 16..64, 1..3);
            assert!(engine.is_untouched(), "{from:?} to {to:?}: more was written");
        }
        store.close_session(session);
    }
    store.settle();
    store.close();
}

#[test]
fn small_transfers_are_copied_before_the_call_returns() {
    let tokens = document(1, 16 * 4 + 3);
    let marks = marks_of(0, &tokens);
    let engine = Engine::computed(SMALL, Shape::Tokens, &marks);
    let bytes = SMALL.layers * 5 * 4096;
    for (limit, expected) in [(bytes, RELEASED), (bytes - 1, 0)] {
        let store =
            TestStore::open(&spec_of(&format!("store(host=16MiB,chunks=64,inline={limit}B)")));
        let namespace = store.namespace(1, &SMALL);
        let session = store.session(namespace, &tokens);
        for (kind, by_layer) in [(TransferKind::Put, false), (TransferKind::Get, true)] {
            let mut back = Engine::new(SMALL, Shape::Tokens, tokens.len());
            let tensors = if kind == TransferKind::Put { &engine } else { &back };
            let cells = tensors.cell_range(0, tokens.len(), 0..SMALL.layers, by_layer);
            let opts = OpOpts::default();
            let ops = store.handle.submit(session, kind, Level::Ram, cells, &opts).expect("room");
            assert_eq!(ops.len(), if by_layer { SMALL.layers } else { 1 });
            for op in ops {
                // Above the limit a worker copies, which may be as fast.
                assert!(expected == 0 || op.state() & expected != 0, "{kind:?}");
                op.wait(RELEASED, 0).expect("no deadline");
                assert_eq!(op.info().status.and_then(Status::from_code), Some(Status::Ok));
                op.remove();
            }
            if kind == TransferKind::Get {
                back.check(&marks, 0..tokens.len(), 0..SMALL.layers);
            }
        }
        store.close_session(session);
        store.settle();
        store.close();
    }
}

/// Sessions of one thread that share prefixes: each is put and read back. Returns the number of
/// tokens found.
fn talk(store: &TestStore, namespace: u32, thread: u32, turns: u32, may_miss: bool) -> u64 {
    let mut found = 0;
    for turn in 0..turns {
        let chance = mix(u64::from(thread) << 32 | u64::from(turn));
        let shared = (chance % 5) as usize * 32;
        let own = 16 + (chance >> 8) as usize % 90;
        let mut tokens = document((chance >> 20) as u32 % 3, shared);
        tokens.extend(document(100 + thread * 1000 + turn, own));
        let marks = marks_of(0, &tokens);
        let shape = SHAPES[(chance >> 30) as usize % SHAPES.len()];
        let session = store.session(namespace, &tokens);
        let mut engine = Engine::computed(WIDE, shape, &marks);
        let put = store.put(session, Level::Ram, &engine);
        assert_eq!(put, ok(tokens.len()), "turn {turn} of {thread}");
        engine.check(&marks, 0..tokens.len(), 0..WIDE.layers);
        // Documents that this thread has put before, possibly evicted by others.
        for back in 0..4.min(turn) {
            let chance = mix(u64::from(thread) << 32 | u64::from(turn - back));
            let (shared, own) = ((chance % 5) as usize * 32, 16 + (chance >> 8) as usize % 90);
            let mut tokens = document((chance >> 20) as u32 % 3, shared);
            tokens.extend(document(100 + thread * 1000 + turn - back, own));
            // The tail of an ended session ended with it.
            tokens.truncate(if back == 0 { tokens.len() } else { tokens.len() / 16 * 16 });
            let marks = marks_of(0, &tokens);
            let reader = if back == 0 { session } else { store.session(namespace, &tokens) };
            let mut engine = Engine::new(WIDE, shape, tokens.len());
            let done = store.get(reader, &engine);
            if may_miss {
                assert!(matches!(done.status, Status::Ok | Status::NotFound), "{done:?}");
            } else {
                assert_eq!(done, ok(tokens.len()), "turn {turn} of {thread}, {back} back");
            }
            engine.check(&marks, 0..done.tokens, 0..WIDE.layers);
            engine.check_written(&marks);
            assert!(engine.is_untouched());
            found += done.tokens as u64;
            if back > 0 {
                store.close_session(reader);
            }
        }
        store.close_session(session);
    }
    found
}

fn many_talk(store: &TestStore, namespace: u32, turns: u32, may_miss: bool) -> u64 {
    let found = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let found = &found;
            scope.spawn(move || {
                let part = talk(store, namespace, thread, turns, may_miss);
                found.fetch_add(part, Ordering::Relaxed);
            });
        }
    });
    found.into_inner()
}

#[test]
fn concurrent_sessions_read_exact_bytes_from_memory() {
    // Four threads that put and read back hold up to 4.2 MiB, in pieces of several sizes.
    let store = TestStore::open(&spec_of("store(host=6MiB,policy=lru,chunks=4096,copiers=3)"));
    let namespace = store.namespace(1, &WIDE);
    let found = many_talk(&store, namespace, 30, true);
    store.settle();
    let counters = store.counters();
    assert!(found > 0 && counters.dropped_chunks > 0, "{counters:?}");
    assert_eq!((counters.corrupt_cells, counters.no_room_cells), (0, 0), "{counters:?}");
    store.close();
}

#[test]
fn concurrent_sessions_read_exact_bytes_from_disk() {
    for write in ["back", "through"] {
        let scratch = Scratch::new("talk");
        let rest = format!("host=2MiB,write={write},chunks=8192,copiers=2,readers=3");
        let store = TestStore::open(&with_disk(&scratch.0, ROOMY, &rest));
        let namespace = store.namespace(1, &WIDE);
        let found = many_talk(&store, namespace, 25, false);
        store.settle();
        let counters = store.counters();
        assert!(
            found > 0 && counters.disk_hit_cells > 0 && counters.demoted_chunks > 0,
            "{counters:?}"
        );
        let lost = (
            counters.corrupt_cells,
            counters.dropped_chunks,
            counters.evicted_chunks,
            counters.missed_cells,
        );
        assert_eq!(lost, (0, 0, 0, 0), "{counters:?}");
        store.close();
    }
}

/// A store with a document on disk, and nothing in memory.
fn on_disk(scratch: &Scratch, rest: &str, tokens: &[u32]) -> TestStore {
    let spec = with_disk(&scratch.0, ROOMY, rest);
    let store = TestStore::open(&spec);
    let namespace = store.namespace(1, &WIDE);
    let session = store.session(namespace, tokens);
    let engine = Engine::computed(WIDE, Shape::Tokens, &marks_of(0, tokens));
    assert_eq!(store.put(session, Level::Durable, &engine), ok(tokens.len()));
    store.close();
    TestStore::open(&spec)
}

#[test]
fn layer_ops_end_in_order() {
    let scratch = Scratch::new("layers");
    let tokens = document(7, 16 * 40);
    let marks = marks_of(0, &tokens);
    let store = on_disk(&scratch, "host=32MiB,chunks=4096", &tokens);
    let namespace = store.namespace(1, &WIDE);
    let session = store.session(namespace, &tokens);
    // First from disk, then from memory.
    for _ in 0..3 {
        let mut engine = Engine::new(WIDE, Shape::Paged, tokens.len());
        let what = engine.cell_range(0, tokens.len(), 0..WIDE.layers, true);
        let ops = store.submit(session, TransferKind::Get, Level::Ram, what).unwrap();
        assert_eq!(ops.len(), WIDE.layers);
        for (layer, op) in ops.iter().enumerate() {
            op.wait(RELEASED, store.now_ns() + LONG_NS).unwrap();
            // Other layers may still be loading; this layer is complete.
            engine.check(&marks, 0..tokens.len(), layer..layer + 1);
            assert_eq!(wait(op), ok(tokens.len()));
        }
        assert!(engine.is_untouched());
    }
    store.close_session(session);
    store.settle();
    store.close();
}

#[test]
fn missing_layer_is_a_miss_of_its_own() {
    let store = TestStore::open(&spec_of("store(host=16MiB,chunks=4096)"));
    let namespace = store.namespace(1, &WIDE);
    let tokens = document(3, 64);
    let marks = marks_of(0, &tokens);
    let session = store.session(namespace, &tokens);
    let engine = Engine::computed(WIDE, Shape::Heads, &marks);
    let what = engine.cell_range(0, 64, 0..WIDE.layers - 1, true);
    let ops = store.submit(session, TransferKind::Put, Level::Ram, what).unwrap();
    ops.iter().for_each(|op| assert_eq!(wait(op), ok(64)));
    let mut engine = Engine::new(WIDE, Shape::Interleaved, tokens.len());
    let what = engine.cell_range(0, 64, 0..WIDE.layers, true);
    let ops = store.submit(session, TransferKind::Get, Level::Ram, what).unwrap();
    for (layer, op) in ops.iter().enumerate() {
        let missing = Done { status: Status::NotFound, tokens: 0 };
        let is_last = layer + 1 == WIDE.layers;
        assert_eq!(wait(op), if is_last { missing } else { ok(64) });
    }
    engine.check(&marks, 0..64, 0..WIDE.layers - 1);
    assert!(engine.is_untouched());
    store.close_session(session);
    store.settle();
    store.close();
}

#[test]
fn released_op_no_longer_writes_caller_memory() {
    let scratch = Scratch::new("late");
    let tokens = document(9, 16 * 200);
    let marks = marks_of(0, &tokens);
    let store = on_disk(&scratch, "host=12MiB,chunks=4096", &tokens);
    let namespace = store.namespace(1, &WIDE);
    let session = store.session(namespace, &tokens);
    let mut seen = BTreeMap::<&str, u32>::new();
    for turn in 0..24u64 {
        let mut engine = Engine::new(WIDE, Shape::Tokens, tokens.len());
        let by_layer = turn % 3 == 2;
        let what = engine.cell_range(0, tokens.len(), 0..WIDE.layers, by_layer);
        let late = turn % 2 == 0;
        let deadline_ns = if late { store.now_ns() + turn * 200_000 } else { 0 };
        let opts = OpOpts { deadline_ns, ..OpOpts::default() };
        let ops = store.handle.submit(session, TransferKind::Get, Level::Ram, what, &opts).unwrap();
        if !late {
            // Cancels at an arbitrary point of the transfer.
            (0..turn * 2_000).for_each(|_| std::hint::spin_loop());
            ops.iter().for_each(|op| op.cancel());
        }
        for op in &ops {
            op.wait(RESOLVED, store.now_ns() + LONG_NS).unwrap();
        }
        let done: Vec<Done> = ops.iter().map(wait).collect();
        let before = engine.bytes().to_vec();
        for one in &done {
            *seen.entry(one.status.name()).or_default() += 1;
            let right = if late { Status::Timeout } else { Status::Cancelled };
            assert!(one.status == Status::Ok || one.status == right, "turn {turn}: {one:?}");
        }
        store.handle.settle(store.now_ns() + LONG_NS).unwrap();
        assert!(before == engine.bytes(), "turn {turn}: written after its release");
        engine.check_written(&marks);
    }
    assert!(seen.len() >= 2, "{seen:?}");
    // Nothing is left of the cancelled ops.
    let mut engine = Engine::new(WIDE, Shape::Tokens, tokens.len());
    assert_eq!(store.get(session, &engine), ok(tokens.len()));
    engine.check(&marks, 0..tokens.len(), 0..WIDE.layers);
    store.close_session(session);
    store.settle();
    store.close();
}

#[test]
fn cancelled_put_is_not_reported_durable() {
    let scratch = Scratch::new("given-up");
    let spec = with_disk(&scratch.0, ROOMY, "host=16MiB,chunks=4096");
    let store = TestStore::open(&spec);
    let namespace = store.namespace(1, &WIDE);
    for turn in 0..60u64 {
        let tokens = document(turn as u32, 64);
        let session = store.session(namespace, &tokens);
        let engine = Engine::computed(WIDE, Shape::Tokens, &marks_of(0, &tokens));
        let before = store.handle.disk().unwrap().stats().syncs;
        let ops = store.submit(session, TransferKind::Put, Level::Durable, engine.whole()).unwrap();
        (0..turn * 3_000).for_each(|_| std::hint::spin_loop());
        ops[0].cancel();
        let done = wait(&ops[0]);
        store.handle.settle(store.now_ns() + LONG_NS).unwrap();
        let syncs = store.handle.disk().unwrap().stats().syncs - before;
        assert!(done.status == Status::Cancelled || done == ok(64), "{done:?}");
        assert!(done.status != Status::Ok || syncs > 0, "turn {turn}: OK, and nothing was synced");
        store.close_session(session);
    }
    store.settle();
    store.close();
}

#[test]
fn closing_a_busy_store_ends_every_op_once() {
    let scratch = Scratch::new("close");
    let tokens = document(5, 16 * 100);
    for by_close in [true, false] {
        let store = on_disk(&scratch, "host=12MiB,chunks=4096", &tokens);
        let namespace = store.namespace(1, &WIDE);
        let sessions: Vec<u32> = (0..6).map(|_| store.session(namespace, &tokens)).collect();
        let mut engines = Vec::new();
        let mut ops = Vec::new();
        for (i, &session) in sessions.iter().enumerate() {
            let engine = Engine::new(WIDE, SHAPES[i % SHAPES.len()], tokens.len());
            let what = engine.cell_range(0, tokens.len(), 0..WIDE.layers, i % 2 == 0);
            ops.extend(store.submit(session, TransferKind::Get, Level::Ram, what).unwrap());
            engines.push(engine);
        }
        if by_close {
            // The deadline has passed: BUSY, unless the store happens to be idle.
            match store.handle.close(1) {
                Ok(()) => {}
                Err(error) => assert_eq!(error.status(), Status::Busy),
            }
            store.handle.close(store.now_ns() + LONG_NS).unwrap();
            store.handle.close(0).unwrap();
            let again =
                store.submit(sessions[0], TransferKind::Get, Level::Ram, engines[0].whole());
            assert_eq!(again.err().map(|e| e.status()), Some(Status::Closed));
            assert_eq!(store.handle.with(|_| Ok(())).unwrap_err().status(), Status::Closed);
        } else {
            let TestStore { handle: store, runtime } = store;
            drop(store);
            runtime.close(0).unwrap();
        }
        for op in &ops {
            let status = wait(op).status;
            assert!(
                matches!(status, Status::Ok | Status::Cancelled | Status::Closed),
                "{status:?}"
            );
        }
        engines.iter_mut().for_each(|engine| engine.check_written(&marks_of(0, &tokens)));
    }
}

#[test]
fn closing_a_runtime_ends_ops_of_its_stores() {
    let scratch = Scratch::new("runtime");
    let tokens = document(5, 16 * 100);
    let store = on_disk(&scratch, "host=12MiB,chunks=4096", &tokens);
    let namespace = store.namespace(1, &WIDE);
    let session = store.session(namespace, &tokens);
    let mut engine = Engine::new(WIDE, Shape::Paged, tokens.len());
    let ops = store.submit(session, TransferKind::Get, Level::Ram, engine.whole()).unwrap();
    store.runtime.close(store.now_ns() + LONG_NS).unwrap();
    let status = wait(&ops[0]).status;
    assert!(matches!(status, Status::Ok | Status::Cancelled), "{status:?}");
    engine.check_written(&marks_of(0, &tokens));
    store.handle.close(0).unwrap();
}

#[test]
fn disk_cells_are_exact_after_reopening() {
    let scratch = Scratch::new("reopen");
    let spec = with_disk(&scratch.0, ROOMY, "host=4MiB,chunks=8192,write=never");
    let all: Vec<Vec<u32>> = (0..20).map(|i| document(i, 16 * (1 + i as usize % 7))).collect();
    let levels = [Level::Disk, Level::Durable];
    let mut cells = 0;
    for life in 0..3 {
        let store = TestStore::open(&spec);
        assert_eq!(store.handle.opened.adopted.cells, cells);
        assert_eq!(store.handle.opened.adopted.dropped, 0);
        for number in 0..2u8 {
            let namespace = store.namespace(number, &WIDE);
            // Documents that were put by earlier processes, and by this one.
            for (i, tokens) in all.iter().enumerate() {
                let marks = marks_of(u32::from(number), tokens);
                let session = store.session(namespace, tokens);
                let mut engine = Engine::new(WIDE, SHAPES[i % SHAPES.len()], tokens.len());
                if i % 3 == life {
                    engine.compute(&marks);
                    let level = levels[i % 2];
                    assert_eq!(store.put(session, level, &engine), ok(tokens.len()));
                    cells += (tokens.len() / 16 * WIDE.layers) as u64;
                    engine.check(&marks, 0..tokens.len(), 0..WIDE.layers);
                }
                let done = store.get(session, &engine);
                if i % 3 <= life {
                    assert_eq!(done, ok(tokens.len()), "life {life}, {i}");
                } else {
                    assert_eq!(done, Done { status: Status::NotFound, tokens: 0 });
                }
                engine.check(&marks, 0..done.tokens, 0..WIDE.layers);
                assert!(engine.is_untouched());
                store.close_session(session);
            }
        }
        store.settle();
        assert_eq!(store.counters().corrupt_cells, 0);
        store.close();
    }
}

fn rss_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("RssAnon:"));
    let word = line.and_then(|line| line.split_whitespace().nth(1));
    word.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Ends a loop of another thread, also when the code beside it fails. The failure is then reported
/// without waiting for the loop.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn reclaimed_memory_goes_to_the_waiting_account() {
    const LIMIT: u64 = 32 << 20;
    let runtime = runtime();
    let budget = budget(&runtime, &[(Tier::Host, LIMIT)]);
    let scratch = Scratch::new("budget");
    // The store's configured memory exceeds the budget, so the budget is the limit.
    let spec = with_disk(&scratch.0, ROOMY, "host=64MiB,chunks=4096");
    let store = TestStore::on_budget(runtime, &budget, &spec);
    let other = budget.account("other", 1, None).unwrap();

    let namespace = store.namespace(1, &WIDE);
    let (stop, asked) = (AtomicBool::new(false), AtomicU32::new(0));
    let before = rss_bytes();
    std::thread::scope(|scope| {
        let (store, stop, asked, other, budget) = (&store, &stop, &asked, &other, &budget);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let bytes = (4 + asked.load(Ordering::Relaxed) as u64 % 3 * 8) << 20;
                // One reservation each time. It must be granted, however busy the store is.
                let deadline_ns = store.now_ns() + LONG_NS;
                let opts = OpOpts { deadline_ns, ..OpOpts::default() };
                let op = other.reserve_later(Tier::Host, bytes, &opts).unwrap();
                assert_eq!(wait(&op).status, Status::Ok, "{bytes} bytes were not returned");
                let lane = budget.usage(Tier::Host);
                assert!(lane.reserved_bytes + lane.committed_bytes <= LIMIT, "{lane:?}");
                other.commit(Tier::Host, bytes, bytes).unwrap();
                other.release(Tier::Host, bytes).unwrap();
                asked.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _stops = Stops(stop);
        for turn in 0..120u32 {
            let tokens = document(turn, 16 * 8);
            let marks = marks_of(0, &tokens);
            let session = store.session(namespace, &tokens);
            let mut engine = Engine::computed(WIDE, Shape::Tokens, &marks);
            assert_eq!(store.put(session, Level::Ram, &engine), ok(tokens.len()), "{turn}");
            engine.check(&marks, 0..tokens.len(), 0..WIDE.layers);
            store.close_session(session);
            let tokens = document(turn / 2, 16 * 8);
            let session = store.session(namespace, &tokens);
            assert_eq!(store.get(session, &engine), ok(tokens.len()), "{turn}");
            engine.check(&marks_of(0, &tokens), 0..tokens.len(), 0..WIDE.layers);
            store.close_session(session);
        }
    });
    store.settle();
    assert!(asked.into_inner() > 3);
    assert!(budget.usage(Tier::Host).peak_bytes <= LIMIT);
    let held = store.handle.account().unwrap().held(Tier::Host);
    let host = store.handle.with(|core| Ok(core.host().stats())).unwrap();
    assert!(held.committed_bytes >= host.live_bytes, "{held:?} {host:?}");
    let grown = rss_bytes().saturating_sub(before);
    assert!(grown < LIMIT + (24 << 20), "{} MiB more are resident", grown >> 20);
    store.handle.close(store.now_ns() + LONG_NS).unwrap();
}

#[test]
fn small_disk_loses_only_counted_chunks() {
    let chunk = WIDE.chunk_bytes();
    for level in [Level::Disk, Level::Durable] {
        let scratch = Scratch::new("spill");
        // 600 chunks of 96 KiB, and room for fewer than half of them.
        let spec = with_disk(&scratch.0, "bytes=32MiB,segment=1MiB", "host=2MiB,chunks=4096");
        let store = TestStore::open(&spec);
        let namespace = store.namespace(1, &WIDE);
        let mut kept = Vec::new();
        let mut refused = 0;
        for number in 0..600u32 {
            let tokens = document(number, WIDE.chunk);
            let session = store.session(namespace, &tokens);
            let engine = Engine::computed(WIDE, Shape::Tokens, &marks_of(0, &tokens));
            match store.put(session, level, &engine) {
                done if done == ok(WIDE.chunk) => kept.push(number),
                done => {
                    assert!(matches!(done.status, Status::Budget | Status::Io), "{done:?}");
                    refused += 1;
                }
            }
            store.close_session(session);
        }
        store.settle();
        let stats = store.handle.disk().unwrap().stats();
        assert!(stats.most_used_bytes <= 32 << 20, "{stats:?}");
        let found = audit(&store, namespace, &kept, &stats);
        assert!(found * chunk > 8 << 20, "only {found} chunks were found; {refused} were rejected");
        let counters = store.counters();
        store.close();
        // Also after a restart.
        let store = TestStore::open(&spec);
        let namespace = store.namespace(1, &WIDE);
        let gone = kept.len() as u64 - present(&store, namespace, &kept);
        let evicted = counters.evicted_chunks + store.counters().evicted_chunks;
        assert!(gone <= evicted, "{gone} are missing, {evicted} were evicted");
        store.settle();
        store.close();
    }
}

/// Reads all documents. Returns the number of chunks found; every found byte must be exact.
fn present(store: &TestStore, namespace: u32, kept: &[u32]) -> u64 {
    let mut found = 0;
    for &number in kept {
        let tokens = document(number, WIDE.chunk);
        let marks = marks_of(0, &tokens);
        let session = store.session(namespace, &tokens);
        let mut engine = Engine::new(WIDE, Shape::Padded, tokens.len());
        let done = store.get(session, &engine);
        assert!(matches!(done.status, Status::Ok | Status::NotFound), "{number}: {done:?}");
        engine.check(&marks, 0..done.tokens, 0..WIDE.layers);
        engine.check_written(&marks);
        assert!(engine.bytes().iter().all(|&b| b == POISON));
        found += u64::from(done.tokens > 0);
        store.close_session(session);
    }
    found
}

fn audit(store: &TestStore, namespace: u32, kept: &[u32], stats: &impl std::fmt::Debug) -> u64 {
    let before = store.counters();
    let found = present(store, namespace, kept);
    let after = store.counters();
    let gone = kept.len() as u64 - found;
    assert!(
        gone <= after.evicted_chunks,
        "{gone} of {} are missing: {before:?} {stats:?}",
        kept.len()
    );
    assert_eq!(after.corrupt_cells, 0);
    found
}
