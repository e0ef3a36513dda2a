//! The bandwidth model of a store.

use kvtier::base::sync::Arc;
use kvtier::store::state::TransferKind;
use kvtier::store::state::plans::LookupResult;
use kvtier::store::state::work::{Work, WorkerKind};

use crate::look::world::World;

/// Puts and gets a session, with `elapsed_ns` as the time of each batch.
fn rounds(world: &mut World, at: usize, count: usize, elapsed_ns: u64) {
    for _ in 0..count {
        assert!(world.submit_part(at, TransferKind::Get, 0, 0, 96, 0..3));
        world.rest(elapsed_ns);
    }
}

fn whole(world: &mut World) -> usize {
    let at = world.open(0, 0);
    world.grow(at, 1, 96);
    assert!(world.submit_part(at, TransferKind::Put, 0, 0, 96, 0..3));
    world.rest(0);
    at
}

#[test]
fn bandwidth_model_converges_to_measurements() {
    let mut world = World::new(5, 4 << 20, 0);
    let at = whole(&mut world);
    let first = world.core.0.lock().report().copies;
    rounds(&mut world, at, 30, 0);
    assert_eq!(world.core.0.lock().report().copies, first, "an unknown time changed the estimate");
    for elapsed_ns in [1_000_000, 50_000, 9_000_000] {
        rounds(&mut world, at, 60, elapsed_ns);
        let core = world.core.0.lock();
        let namespace = &world.namespaces[0];
        let route = core.routes(namespace.number, 0).unwrap()[0];
        assert_eq!(route.queued_ns, 0.0);
        // Batches are equal: as many cells each, run one at a time.
        let cells = 24.0 * 3.0;
        let batches = (cells / world.batch_cells as f64).ceil();
        let bytes = namespace.layout.chunk_bytes(4);
        let want = batches * elapsed_ns as f64;
        let got = route.speed.ns(24 * bytes, 24);
        assert!((got - want).abs() < 0.25 * want, "{got} for {want}");
        assert_eq!(core.report().reads, first_reads(), "nothing was read");
    }
}

fn first_reads() -> kvtier::store::state::stats::QueueGauge {
    World::new(1, 1 << 20, 0).core.0.lock().report().reads
}

#[test]
fn plan_includes_queued_and_running_work() {
    let mut world = World::new(6, 4 << 20, 0);
    let at = whole(&mut world);
    let number = world.sessions[at].number;
    let look = |world: &World| -> LookupResult {
        world.core.0.lock().lookup_session(number).unwrap().clone()
    };
    let alone = look(&world).load_ns;
    assert!(alone > 0);
    for (lane, counts) in [(0, true), (2, false)] {
        assert!(world.submit_part(at, TransferKind::Get, lane, 0, 96, 0..3));
        let report = world.core.0.lock().report();
        let bytes = 24 * world.namespaces[0].layout.chunk_bytes(4);
        assert_eq!((report.copies.bytes[lane], report.copies.cells[lane]), (bytes, 72));
        assert_eq!(look(&world).load_ns > alone, counts, "lane {lane}");
        let taken = world.core.0.lock().take(WorkerKind::Copy).unwrap();
        let under_way = world.core.0.lock().report().copies;
        assert_eq!(under_way.batches, 1);
        assert_eq!(under_way.batch_bytes + under_way.bytes[lane], bytes);
        assert!(look(&world).load_ns > alone, "running work counts for every lane");
        assert!(matches!(taken, Work::Copies(_)));
        world.core.0.lock().done(taken, Ok(()), 0);
        world.rest(0);
        assert_eq!(world.core.0.lock().report().copies.batch_bytes, 0);
        assert_eq!(look(&world).load_ns, alone);
    }
}

/// Two concurrent batches count as one batch in half the time.
#[test]
fn concurrent_batches_share_bandwidth() {
    let learned = |together: usize, elapsed_ns: u64| {
        let mut world = World::new(7, 4 << 20, 0);
        let at = whole(&mut world);
        for _ in 0..80 {
            assert!(world.submit_part(at, TransferKind::Get, 0, 0, 96, 0..3));
            let core = Arc::clone(&world.core.0);
            loop {
                let taken: Vec<Work> =
                    (0..together).map_while(|_| core.lock().take(WorkerKind::Copy)).collect();
                if taken.is_empty() {
                    break;
                }
                let shared = if taken.len() == together { elapsed_ns } else { 0 };
                taken.into_iter().for_each(|work| core.lock().done(work, Ok(()), shared));
            }
            world.rest(0);
        }
        let bytes = world.namespaces[0].layout.chunk_bytes(4);
        let namespace = world.namespaces[0].number;
        world.core.0.lock().routes(namespace, 0).unwrap()[0].speed.ns(bytes, 1)
    };
    let (one, four) = (learned(1, 1_000_000), learned(4, 4_000_000));
    // The first and the last batches had fewer concurrent ones.
    assert!((0.9..1.7).contains(&(four / one)), "{four} for {one}");
}

#[test]
fn bandwidth_model_measures_disk_reads() {
    // Little memory: most gets read from disk.
    let mut world = World::new(8, 256 << 10, 60 * 131_072);
    let sessions: Vec<usize> = (0..6).map(|_| world.open(0, 0)).collect();
    for (i, &at) in sessions.iter().enumerate() {
        world.grow(at, 1 + i as u32, 96);
        assert!(world.submit_part(at, TransferKind::Put, 0, 0, 96, 0..3));
        world.rest(0);
    }
    let before = world.core.0.lock().report();
    let mut batches = 0;
    for _ in 0..20 {
        for &at in &sessions {
            assert!(world.submit_part(at, TransferKind::Get, 0, 0, 96, 0..3));
            batches += world.rest_reading(700_000);
        }
    }
    let report = world.core.0.lock().report();
    assert!(report.stats.disk_hit_cells > 1000, "{:?}", report.stats);
    assert_eq!(report.copies, before.copies);
    let bytes = (report.stats.loaded_bytes - before.stats.loaded_bytes) / batches;
    let ns = report.reads.delay_ns + bytes as f64 * 1e9 / report.reads.bytes_per_second;
    assert!((600_000.0..800_000.0).contains(&ns), "{ns}");
}
