//! Puts and gets, and where what they bring rests.

use kvtier::base::budget::Tier;
use kvtier::base::clock::Clock;
use kvtier::base::status::Status;
use kvtier::device::Memory;
use kvtier::meta::chunks::Pin;
use kvtier::store::plan;
use kvtier::store::state::SessionOpts;
use kvtier::store::state::device_tier::Audited;
use kvtier::store::state::plans::PlanTerms;
use kvtier::store::state::transfer::{Level, TransferKind};

use crate::device_tier::rig::{CELLS, KIB, MODEL, RIGHT, Rig, TOKENS, in_memory};
use kvtier_testkit::fixtures::store::{
    Done, Engine, LONG_NS, Model, SHAPES, Scratch, Shape, document, marks_of, mix, spec_of, wait,
    with_disk,
};

#[test]
fn what_is_put_from_the_device_comes_back_without_the_link() {
    let rig = Rig::open(&spec_of("store(host=8MiB, device=device(capacity=4MiB))"));
    for (number, shape) in SHAPES.into_iter().enumerate() {
        let there = (shape, Memory::Device);
        assert_eq!(rig.go(TransferKind::Put, Level::Ram, number as u32, there), RIGHT);
        assert_eq!(rig.go(TransferKind::Get, Level::Ram, number as u32, there), RIGHT);
        assert_eq!(
            rig.go(TransferKind::Get, Level::Ram, number as u32, (shape, Memory::Host)),
            RIGHT
        );
    }
    rig.home.rest();
    let (count, all) = (SHAPES.len() as u64, rig.report());
    let counters = all.counters;
    assert_eq!((counters.promoted, counters.device_hits), (count * CELLS, count * CELLS));
    assert_eq!((counters.host_hits, counters.stored), (count * CELLS, count * CELLS));
    assert_eq!((all.device_cells, all.host_cells), (count * CELLS, count * CELLS));
    assert_eq!(rig.audit(), Audited { right: count * CELLS, ..Audited::default() });
    // How fast it was is the machine's affair.
    assert_ne!(all.replicas.bytes_per_second, 2e11, "its speed was seen, and is no guess any more");
    let text = rig.home.store.with(|core| Ok(core.metrics_text())).expect("open");
    assert!(text.contains(&format!("kvtier_device_hits_total {}\n", count * CELLS)), "{text}");
    rig.close();
}

#[test]
fn a_get_into_device_memory_leaves_a_copy_there_for_the_next() {
    let rig = Rig::open(&spec_of("store(host=8MiB, device=device(capacity=4MiB))"));
    rig.put(1, Memory::Host);
    assert_eq!(rig.report().counters.promoted, 0, "nobody has asked for it there");
    rig.get(1, Memory::Host);
    assert_eq!(rig.report().counters.promoted, 0);
    rig.get(1, Memory::Device);
    let counters = rig.report().counters;
    assert_eq!(
        (counters.promoted, counters.host_hits, counters.device_hits),
        (CELLS, 2 * CELLS, 0)
    );
    rig.get(1, Memory::Device);
    let counters = rig.report().counters;
    assert_eq!((counters.promoted, counters.device_hits), (CELLS, CELLS));
    assert_eq!(rig.chunks_near(1), 4);
    rig.close();
}

#[test]
fn plans_and_lookups_tell_of_the_device() {
    let rig = Rig::open(&spec_of("store(host=8MiB, device=device(capacity=4MiB))"));
    let bytes = MODEL.chunk_bytes() * 4;
    let tokens = document(1, TOKENS);
    let session = rig.home.session(rig.space, &tokens);
    let terms = PlanTerms { cost: None, ..PlanTerms::default() };
    for (memory, from) in [(Memory::Host, [bytes, 0, 0, 0]), (Memory::Device, [0, 0, 0, bytes])] {
        match memory {
            Memory::Host => rig.put(1, memory),
            Memory::Device => (0..2).for_each(|_| rig.get(1, memory)),
        }
        let plan = rig.home.store.with(|core| {
            core.observe_prefill(rig.space, 0, 1000, 1_000_000_000_000)?;
            core.plan(session, &terms).cloned()
        });
        let legs = plan.expect("a plan").legs;
        assert_eq!(legs.len(), 1);
        assert_eq!((legs[0].kind, legs[0].bytes), (plan::StepKind::Load, from));
        assert!(legs[0].ns > 0.0);
        let look = rig.home.store.lookup(rig.space, &tokens).expect("a look");
        let tier = if memory == Memory::Device { Tier::Device } else { Tier::Host };
        assert_eq!(look.bytes[tier as usize], bytes);
        assert_eq!(look.ranges[0].farthest, Some(tier as usize));
        assert!(look.load_ns > 0);
    }
    let rows =
        rig.home.store.with(|core| core.table_snapshot(Some(session), 0, 9)).expect("open").rows;
    assert_eq!(rows, ["GGGG"; MODEL.layers]);
    rig.home.end(session);
    rig.close();
}

#[test]
fn more_than_fits_is_sent_away_and_never_wrong() {
    let device = "device=device(capacity=512KiB, policy=lru)";
    let rig = Rig::open(&spec_of(&format!("store(host=16MiB, {device})")));
    for number in 0..40 {
        rig.put(number, Memory::Device);
        let near = rig.report().device;
        assert!(near.used_bytes <= 512 * KIB && near.live_bytes <= near.used_bytes, "{near:?}");
    }
    for turn in 0..200 {
        rig.get(mix(turn) as u32 % 40, Memory::Device);
    }
    rig.home.rest();
    let counters = rig.report().counters;
    assert!(counters.device_hits > 0 && counters.device_evicted > 40, "{counters:?}");
    assert_eq!(counters.device_hits + counters.host_hits, 200 * CELLS);
    assert_eq!((rig.audit().wrong, rig.report().counters.misses), (0, 0));
    rig.close();
}

#[test]
fn a_scan_leaves_what_is_used_again_and_again() {
    // Room for 8 documents of 4 chunks.
    let rig = Rig::open(&spec_of("store(host=64MiB, device=device(capacity=1MiB))"));
    (0..3).for_each(|number| rig.put(number, Memory::Device));
    for _ in 0..4 {
        (0..3).for_each(|number| rig.get(number, Memory::Device));
    }
    // Each once, also what was put from elsewhere.
    for number in 100..160 {
        rig.put(number, if number % 2 == 0 { Memory::Device } else { Memory::Host });
        rig.get(number, Memory::Device);
    }
    let before = rig.report().counters.device_hits;
    (0..3).for_each(|number| rig.get(number, Memory::Device));
    let hits = rig.report().counters.device_hits - before;
    assert!(hits >= 2 * CELLS, "{hits} of {} are left after a scan", 3 * CELLS);
    rig.close();
}

#[test]
fn what_is_pinned_stays_on_the_device() {
    let device = "device=device(capacity=512KiB, policy=lru)";
    let rig = Rig::open(&spec_of(&format!("store(host=16MiB, {device})")));
    let session = rig.home.session(rig.space, &document(0, TOKENS));
    rig.put(0, Memory::Device);
    let until_ns = rig.home.now_ns() + 1000 * LONG_NS;
    let pin = Pin { priority: 1, until_ns };
    rig.home.store.with(|core| core.pin(session, 0, TOKENS as u64, pin)).expect("pinned");
    for number in 1..30 {
        rig.put(number, Memory::Device);
        assert_eq!(rig.chunks_near(0), 4, "after {number}");
    }
    rig.home.store.with(|core| core.unpin_range(session, 0, TOKENS as u64)).expect("unpinned");
    (30..60).for_each(|number| rig.put(number, Memory::Device));
    assert_eq!(rig.chunks_near(0), 0);
    rig.home.end(session);
    rig.close();
}

#[test]
fn after_a_restart_the_device_is_empty_and_fills_from_disk() {
    let scratch = Scratch::new("device");
    let spec =
        with_disk(&scratch.0, "bytes=64MiB,segment=1MiB", "host=8MiB,device=device(capacity=4MiB)");
    let rig = Rig::open(&spec);
    let there = (Shape::Tokens, Memory::Device);
    assert_eq!(rig.go(TransferKind::Put, Level::Durable, 1, there), RIGHT);
    assert_eq!(rig.chunks_near(1), 4);
    rig.close();
    let rig = Rig::open(&spec);
    assert_eq!((rig.chunks_near(1), rig.report().disk_cells), (0, CELLS));
    rig.get(1, Memory::Device);
    let counters = rig.report().counters;
    assert_eq!((counters.disk_hits, counters.promoted, counters.device_hits), (CELLS, CELLS, 0));
    // It leaves host memory; what is on the device goes too, as the engine has asked.
    rig.get(1, Memory::Device);
    assert_eq!(rig.report().counters.device_hits, CELLS);
    let session = rig.home.session(rig.space, &document(1, TOKENS));
    let demoted = rig.home.store.with(|core| core.demote_range(session, 0, TOKENS as u64));
    assert_eq!(demoted.expect("open").freed, 4);
    assert_eq!((rig.chunks_near(1), rig.report().host_cells), (0, 0));
    rig.home.end(session);
    rig.close();
}

#[test]
fn a_copy_on_the_device_serves_when_host_memory_has_none() {
    let scratch = Scratch::new("device");
    let spec = with_disk(
        &scratch.0,
        "bytes=64MiB,segment=1MiB",
        "host=512KiB,write=through,policy=lru,device=device(capacity=4MiB,policy=lru)",
    );
    let rig = Rig::open(&spec);
    // Four times what host memory has, and all of it on the device.
    for number in 0..16 {
        rig.put(number, Memory::Device);
        rig.home.rest();
    }
    let all = rig.report();
    assert!(all.host_cells < 16 * CELLS && all.disk_cells == 16 * CELLS, "{all:?}");
    assert_eq!(all.device_cells, 16 * CELLS);
    let before = all.counters;
    (0..16).for_each(|number| rig.get(number, Memory::Device));
    let after = rig.report().counters;
    assert_eq!(after.device_hits - before.device_hits, 16 * CELLS);
    assert_eq!(after.disk_hits, before.disk_hits, "nothing was read");
    assert_eq!(rig.audit(), Audited { right: 16 * CELLS, ..Audited::default() });
    rig.close();
}

/// A session's chunk that is not full is copied and told apart like any other.
#[test]
fn a_partial_chunk_comes_back_from_the_device() {
    let rig = Rig::open(&spec_of("store(host=8MiB, device=device(capacity=4MiB))"));
    let tokens = document(5, TOKENS - 7);
    let session = rig.home.session(rig.space, &tokens);
    let mut engine = Engine::new(MODEL, Shape::Heads, tokens.len());
    engine.compute(&marks_of(0, &tokens));
    for kind in [TransferKind::Put, TransferKind::Get] {
        let what = in_memory(engine.whole(), Memory::Device);
        let ops = rig.home.submit(session, kind, Level::Ram, what).expect("submitted");
        assert_eq!(wait(&ops[0]), Done { status: Status::Ok, tokens: tokens.len() });
        engine.check(&marks_of(0, &tokens), 0..tokens.len(), 0..MODEL.layers);
    }
    assert_eq!(rig.report().counters.device_hits, CELLS);
    let none = SessionOpts::default();
    let other = rig.home.store.with(|core| core.fork(session, &none)).expect("a fork");
    rig.home.end(session);
    rig.home.rest();
    assert_eq!((rig.report().device_cells, rig.report().host_cells), (CELLS, CELLS));
    assert_eq!(rig.audit(), Audited { right: CELLS, ..Audited::default() });
    rig.home.end(other);
    rig.close();
}

/// Cells of another size find slabs full of others, and get one.
#[test]
fn a_second_model_finds_room() {
    let rig = Rig::open(&spec_of("store(host=64MiB, device=device(capacity=1MiB))"));
    (0..12).for_each(|number| rig.put(number, Memory::Device));
    let other = Model { layers: 2, heads: 8, run: 64, chunk: 16 };
    let space = rig.home.space(2, &other);
    let clock = Clock::real();
    let late_ns = clock.now_ns() + LONG_NS;
    let mut number = 0;
    // One slab a second: the first is had at once.
    while rig.report().counters.device_hits == 0 {
        assert!(clock.now_ns() < late_ns, "it never gets room");
        number += 1;
        let tokens = document(1000 + number, TOKENS);
        let session = rig.home.session(space, &tokens);
        let mut engine = Engine::new(other, Shape::Tokens, tokens.len());
        engine.compute(&marks_of(0, &tokens));
        for kind in [TransferKind::Put, TransferKind::Get] {
            let what = in_memory(engine.whole(), Memory::Device);
            let ops = rig.home.submit(session, kind, Level::Ram, what).expect("submitted");
            assert_eq!(wait(&ops[0]), RIGHT);
            engine.check(&marks_of(0, &tokens), 0..TOKENS, 0..other.layers);
        }
        rig.home.end(session);
    }
    rig.home.rest();
    assert_eq!(rig.audit().wrong, 0);
    rig.close();
}
