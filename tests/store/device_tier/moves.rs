//! Puts and gets, and the residency that they leave.

use kvtier::base::budget::Tier;
use kvtier::base::clock::Clock;
use kvtier::device::Memory;
use kvtier::meta::chunks::Pin;
use kvtier::store::plan;
use kvtier::store::state::SessionOpts;
use kvtier::store::state::device_tier::Audited;
use kvtier::store::state::plans::PlanTerms;
use kvtier::store::state::transfer::{Level, TransferKind};

use crate::device_tier::device_store::{CELLS, DeviceStore, KIB, MODEL, RIGHT, TOKENS};
use kvtier_testkit::fixtures::store::{
    Done, Engine, LONG_NS, Model, SHAPES, Scratch, Shape, document, in_memory, marks_of, mix,
    spec_of, with_disk,
};

#[test]
fn put_from_device_memory_leaves_a_device_replica() {
    let store = DeviceStore::open(&spec_of("store(host=8MiB, device=device(capacity=4MiB))"));
    for (number, shape) in SHAPES.into_iter().enumerate() {
        let there = (shape, Memory::Device);
        assert_eq!(
            store.transfer_document(TransferKind::Put, Level::Ram, number as u32, there),
            RIGHT
        );
        assert_eq!(
            store.transfer_document(TransferKind::Get, Level::Ram, number as u32, there),
            RIGHT
        );
        assert_eq!(
            store.transfer_document(
                TransferKind::Get,
                Level::Ram,
                number as u32,
                (shape, Memory::Host)
            ),
            RIGHT
        );
    }
    store.settle();
    let (count, all) = (SHAPES.len() as u64, store.report());
    let counters = all.stats;
    assert_eq!(
        (counters.device_promoted_cells, counters.device_hit_cells),
        (count * CELLS, count * CELLS)
    );
    assert_eq!((counters.host_hit_cells, counters.stored_cells), (count * CELLS, count * CELLS));
    assert_eq!((all.stats.device_cells, all.stats.host_cells), (count * CELLS, count * CELLS));
    assert_eq!(store.audit(), Audited { right: count * CELLS, ..Audited::default() });
    // The measured speed depends on the machine.
    assert_ne!(all.replicas.bytes_per_second, 2e11, "the speed was measured");
    let text = store.handle.with(|core| Ok(core.metrics_text())).expect("open");
    assert!(text.contains(&format!("kvtier_device_hit_cells_total {}\n", count * CELLS)), "{text}");
    store.close();
}

#[test]
fn get_into_device_memory_leaves_a_device_replica() {
    let store = DeviceStore::open(&spec_of("store(host=8MiB, device=device(capacity=4MiB))"));
    store.put_document(1, Memory::Host);
    assert_eq!(store.report().stats.device_promoted_cells, 0, "no get into device memory");
    store.get_document(1, Memory::Host);
    assert_eq!(store.report().stats.device_promoted_cells, 0);
    store.get_document(1, Memory::Device);
    let counters = store.report().stats;
    assert_eq!(
        (counters.device_promoted_cells, counters.host_hit_cells, counters.device_hit_cells),
        (CELLS, 2 * CELLS, 0)
    );
    store.get_document(1, Memory::Device);
    let counters = store.report().stats;
    assert_eq!((counters.device_promoted_cells, counters.device_hit_cells), (CELLS, CELLS));
    assert_eq!(store.device_chunks(1), 4);
    store.close();
}

#[test]
fn plans_and_lookups_report_device_residency() {
    let store = DeviceStore::open(&spec_of("store(host=8MiB, device=device(capacity=4MiB))"));
    let bytes = MODEL.chunk_bytes() * 4;
    let tokens = document(1, TOKENS);
    let session = store.session(store.namespace, &tokens);
    let terms = PlanTerms { cost: None, ..PlanTerms::default() };
    for (memory, from) in [(Memory::Host, [bytes, 0, 0, 0]), (Memory::Device, [0, 0, 0, bytes])] {
        match memory {
            Memory::Host => store.put_document(1, memory),
            Memory::Device => (0..2).for_each(|_| store.get_document(1, memory)),
        }
        let plan = store.handle.with(|core| {
            core.observe_prefill(store.namespace, 0, 1000, 1_000_000_000_000)?;
            core.plan(session, &terms).cloned()
        });
        let steps = plan.expect("a plan").steps;
        assert_eq!(steps.len(), 1);
        assert_eq!((steps[0].kind, steps[0].bytes), (plan::StepKind::Load, from));
        assert!(steps[0].ns > 0.0);
        let look = store.handle.lookup(store.namespace, &tokens).expect("a lookup");
        let tier = if memory == Memory::Device { Tier::Device } else { Tier::Host };
        assert_eq!(look.bytes[tier as usize], bytes);
        assert_eq!(look.ranges[0].farthest, Some(tier as usize));
        assert!(look.load_ns > 0);
    }
    let rows =
        store.handle.with(|core| core.table_snapshot(Some(session), 0, 9)).expect("open").rows;
    assert_eq!(rows, ["GGGG"; MODEL.layers]);
    store.close_session(session);
    store.close();
}

#[test]
fn full_device_tier_evicts_and_stays_exact() {
    let device = "device=device(capacity=512KiB, policy=lru)";
    let store = DeviceStore::open(&spec_of(&format!("store(host=16MiB, {device})")));
    for number in 0..40 {
        store.put_document(number, Memory::Device);
        let stats = store.report().stats;
        assert!(
            stats.device_used_bytes <= 512 * KIB
                && stats.device_live_bytes <= stats.device_used_bytes,
            "{stats:?}"
        );
    }
    for turn in 0..200 {
        store.get_document(mix(turn) as u32 % 40, Memory::Device);
    }
    store.settle();
    let counters = store.report().stats;
    assert!(counters.device_hit_cells > 0 && counters.device_evicted_chunks > 40, "{counters:?}");
    assert_eq!(counters.device_hit_cells + counters.host_hit_cells, 200 * CELLS);
    assert_eq!((store.audit().wrong, store.report().stats.missed_cells), (0, 0));
    store.close();
}

#[test]
fn scan_does_not_evict_frequently_used_chunks() {
    // Memory for 8 documents of 4 chunks.
    let store = DeviceStore::open(&spec_of("store(host=64MiB, device=device(capacity=1MiB))"));
    (0..3).for_each(|number| store.put_document(number, Memory::Device));
    for _ in 0..4 {
        (0..3).for_each(|number| store.get_document(number, Memory::Device));
    }
    // A scan: each document once, half of them put from host memory.
    for number in 100..160 {
        store.put_document(number, if number % 2 == 0 { Memory::Device } else { Memory::Host });
        store.get_document(number, Memory::Device);
    }
    let before = store.report().stats.device_hit_cells;
    (0..3).for_each(|number| store.get_document(number, Memory::Device));
    let hits = store.report().stats.device_hit_cells - before;
    assert!(hits >= 2 * CELLS, "{hits} of {} are left after a scan", 3 * CELLS);
    store.close();
}

#[test]
fn pinned_chunks_stay_on_the_device() {
    let device = "device=device(capacity=512KiB, policy=lru)";
    let store = DeviceStore::open(&spec_of(&format!("store(host=16MiB, {device})")));
    let session = store.session(store.namespace, &document(0, TOKENS));
    store.put_document(0, Memory::Device);
    let until_ns = store.now_ns() + 1000 * LONG_NS;
    let pin = Pin { priority: 1, until_ns };
    store.handle.with(|core| core.pin(session, 0, TOKENS as u64, pin)).expect("pinned");
    for number in 1..30 {
        store.put_document(number, Memory::Device);
        assert_eq!(store.device_chunks(0), 4, "after {number}");
    }
    store.handle.with(|core| core.unpin_range(session, 0, TOKENS as u64)).expect("unpinned");
    (30..60).for_each(|number| store.put_document(number, Memory::Device));
    assert_eq!(store.device_chunks(0), 0);
    store.close_session(session);
    store.close();
}

#[test]
fn device_tier_is_empty_after_restart_and_fills_from_disk() {
    let scratch = Scratch::new("device");
    let spec =
        with_disk(&scratch.0, "bytes=64MiB,segment=1MiB", "host=8MiB,device=device(capacity=4MiB)");
    let store = DeviceStore::open(&spec);
    let there = (Shape::Tokens, Memory::Device);
    assert_eq!(store.transfer_document(TransferKind::Put, Level::Durable, 1, there), RIGHT);
    assert_eq!(store.device_chunks(1), 4);
    store.close();
    let store = DeviceStore::open(&spec);
    assert_eq!((store.device_chunks(1), store.report().stats.disk_cells), (0, CELLS));
    store.get_document(1, Memory::Device);
    let counters = store.report().stats;
    assert_eq!(
        (counters.disk_hit_cells, counters.device_promoted_cells, counters.device_hit_cells),
        (CELLS, CELLS, 0)
    );
    // The demotion drops the device replicas as well, as the engine requested.
    store.get_document(1, Memory::Device);
    assert_eq!(store.report().stats.device_hit_cells, CELLS);
    let session = store.session(store.namespace, &document(1, TOKENS));
    let demoted = store.handle.with(|core| core.demote_range(session, 0, TOKENS as u64));
    assert_eq!(demoted.expect("open").freed, 4);
    assert_eq!((store.device_chunks(1), store.report().stats.host_cells), (0, 0));
    store.close_session(session);
    store.close();
}

#[test]
fn device_replica_serves_gets_after_host_eviction() {
    let scratch = Scratch::new("device");
    let spec = with_disk(
        &scratch.0,
        "bytes=64MiB,segment=1MiB",
        "host=512KiB,write=through,policy=lru,device=device(capacity=4MiB,policy=lru)",
    );
    let store = DeviceStore::open(&spec);
    // Four times what fits in host memory, and all of it on the device.
    for number in 0..16 {
        store.put_document(number, Memory::Device);
        store.settle();
    }
    let all = store.report();
    assert!(all.stats.host_cells < 16 * CELLS && all.stats.disk_cells == 16 * CELLS, "{all:?}");
    assert_eq!(all.stats.device_cells, 16 * CELLS);
    let before = all.stats;
    (0..16).for_each(|number| store.get_document(number, Memory::Device));
    let after = store.report().stats;
    assert_eq!(after.device_hit_cells - before.device_hit_cells, 16 * CELLS);
    assert_eq!(after.disk_hit_cells, before.disk_hit_cells, "nothing was read");
    assert_eq!(store.audit(), Audited { right: 16 * CELLS, ..Audited::default() });
    store.close();
}

#[test]
fn partial_chunk_is_read_from_the_device() {
    let store = DeviceStore::open(&spec_of("store(host=8MiB, device=device(capacity=4MiB))"));
    let tokens = document(5, TOKENS - 7);
    let session = store.session(store.namespace, &tokens);
    let mut engine = Engine::computed(MODEL, Shape::Heads, &marks_of(0, &tokens));
    for kind in [TransferKind::Put, TransferKind::Get] {
        let what = in_memory(engine.whole(), Memory::Device);
        let done = store.transfer(session, kind, Level::Ram, what);
        assert_eq!(done, Done::ok(tokens.len()));
        engine.check(&marks_of(0, &tokens), 0..tokens.len(), 0..MODEL.layers);
    }
    assert_eq!(store.report().stats.device_hit_cells, CELLS);
    let none = SessionOpts::default();
    let other = store.handle.with(|core| core.fork(session, &none)).expect("a fork");
    store.close_session(session);
    store.settle();
    assert_eq!(
        (store.report().stats.device_cells, store.report().stats.host_cells),
        (CELLS, CELLS)
    );
    assert_eq!(store.audit(), Audited { right: CELLS, ..Audited::default() });
    store.close_session(other);
    store.close();
}

/// All slabs are full of cells of one size: cells of another size get one.
#[test]
fn cells_of_another_size_get_a_slab() {
    let store = DeviceStore::open(&spec_of("store(host=64MiB, device=device(capacity=1MiB))"));
    (0..12).for_each(|number| store.put_document(number, Memory::Device));
    let other = Model { layers: 2, heads: 8, run: 64, chunk: 16 };
    let namespace = store.namespace(2, &other);
    let clock = Clock::real();
    let late_ns = clock.now_ns() + LONG_NS;
    let mut number = 0;
    // One slab per second; the first is allocated at once.
    while store.report().stats.device_hit_cells == 0 {
        assert!(clock.now_ns() < late_ns, "no slab was taken over");
        number += 1;
        let tokens = document(1000 + number, TOKENS);
        let session = store.session(namespace, &tokens);
        let mut engine = Engine::computed(other, Shape::Tokens, &marks_of(0, &tokens));
        for kind in [TransferKind::Put, TransferKind::Get] {
            let what = in_memory(engine.whole(), Memory::Device);
            let done = store.transfer(session, kind, Level::Ram, what);
            assert_eq!(done, RIGHT);
            engine.check(&marks_of(0, &tokens), 0..TOKENS, 0..other.layers);
        }
        store.close_session(session);
    }
    store.settle();
    assert_eq!(store.audit().wrong, 0);
    store.close();
}
