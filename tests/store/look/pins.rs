//! Pins: which one is revoked first when there is no other candidate.

use kvtier::meta::chunks::Pin;
use kvtier::store::state::TransferKind;

use crate::look::world::World;

const CHUNKS: usize = 6;
const TOKENS: usize = CHUNKS * 4;
const SECOND: u64 = 1_000_000_000;

/// Stores and pins a document, then closes its session.
fn pinned(world: &mut World, document: u32, pin: Pin) {
    let at = world.open(0, 0);
    world.grow(at, document, TOKENS);
    assert!(world.submit_part(at, TransferKind::Put, 0, 0, TOKENS, 0..3));
    world.rest(0);
    let session = world.sessions.swap_remove(at);
    let mut core = world.core.0.lock();
    core.pin(session.number, 0, TOKENS as u64, pin).expect("room for a pin");
    core.close_session(session.number).expect("an open session");
}

/// Number of leading chunks of a document that are resident. Chunks behind a gap do not count.
fn left(world: &mut World, document: u32) -> usize {
    let at = world.open(0, 0);
    world.grow(at, document, TOKENS);
    let session = world.sessions.swap_remove(at);
    let mut core = world.core.0.lock();
    let table = core.table_snapshot(Some(session.number), 0, CHUNKS).expect("an open session");
    core.close_session(session.number).expect("an open session");
    let row = &table.rows[0];
    let count = row.chars().take_while(|&cell| cell == 'M').count();
    assert_eq!(row.matches('M').count(), count, "a path is evicted from its end: {row}");
    count
}

#[test]
fn pin_that_expires_first_is_revoked_first() {
    // Half of it has room for all pins.
    let mut world = World::new(3, 900 << 10, 0);
    let now_ns = world.core.0.lock().now_ns();
    let pin = |priority, seconds: u64| {
        let until_ns = if seconds == 0 { u64::MAX } else { now_ns + seconds * SECOND };
        Pin { priority, until_ns }
    };
    // The order of setting the pins must not matter.
    let pins = [pin(1, 0), pin(0, 0), pin(0, 500), pin(1, 100), pin(0, 900), pin(0, 100)];
    for (document, &pin) in pins.iter().enumerate() {
        pinned(&mut world, document as u32, pin);
    }
    // The pin of document 5 is extended: the later end applies.
    pinned(&mut world, 5, pin(0, 700));
    // An open session that grows takes their memory.
    let held = world.open(0, 0);
    let mut order: Vec<usize> = Vec::new();
    for chunk in 0..100 {
        world.grow(held, 100, 4);
        assert!(world.submit_part(held, TransferKind::Put, 0, chunk * 4, 4, 0..3));
        world.rest(0);
        let all: Vec<usize> = (0..pins.len() as u32).map(|n| left(&mut world, n)).collect();
        let now: Vec<usize> = (0..pins.len()).filter(|&n| all[n] < CHUNKS).collect();
        let begun: Vec<usize> = now.into_iter().filter(|n| !order.contains(n)).collect();
        for next in begun {
            let is_over = order.last().is_none_or(|&before| all[before] == 0);
            assert!(is_over, "{next} was revoked before {order:?}: {all:?}");
            order.push(next);
        }
        let count: usize = all.iter().sum();
        assert_eq!(world.core.0.lock().report().stats.pins, count as u64, "{all:?}");
        if count == 0 {
            break;
        }
        assert_eq!(world.core.0.lock().counters.no_room_cells, 0, "no memory while pins are left");
    }
    assert_eq!(order, [2, 5, 4, 1, 3, 0]);
}

#[test]
fn extended_pin_ends_at_its_new_time() {
    let mut world = World::new(4, 600 << 10, 0);
    for seconds in [10, 20, 20, 5] {
        pinned(&mut world, 1, Pin { priority: 0, until_ns: seconds * SECOND });
    }
    let pins = |world: &World, now_ns| {
        let mut core = world.core.0.lock();
        core.tick(now_ns);
        core.report().stats.pins
    };
    assert_eq!(pins(&world, 20 * SECOND - 1), CHUNKS as u64);
    assert_eq!(pins(&world, 20 * SECOND), 0);
}
