//! Retention: the share of pins, ends of chunks, quotas of tenants, by a virtual clock.

use std::collections::BTreeMap;

use kvtier::base::budget::Tier;
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::format::keys::Key;
use kvtier::meta::chunks::Pin;
use kvtier::store::state::tier_cache::Granularity;
use kvtier::store::state::{Config, SessionOpts, TransferKind};

use crate::look::world::World;

const EACH: usize = 4;
const SECOND: u64 = 1_000_000_000;
/// Bytes of a chunk of the first namespace: 3 layers, K and V of 2 heads of 40 numbers.
const CHUNK_BYTES: u64 = 3 * 2 * 2 * 40 * 2 * EACH as u64;
/// The same, with each cell in a piece of its own.
const PINNED_BYTES: u64 = 3 * 4096;

fn opts(tenant: u32, ttl_s: u64) -> SessionOpts<'static> {
    SessionOpts { tenant, ttl_ns: ttl_s * SECOND, ..SessionOpts::default() }
}

/// Puts the first chunks of a document by a session of its own. Returns how the put was submitted.
fn put(
    world: &mut World,
    opts: &SessionOpts<'_>,
    document: u32,
    chunks: usize,
) -> Result<(), Status> {
    transfer(world, opts, TransferKind::Put, document, chunks)
}

fn transfer(
    world: &mut World,
    opts: &SessionOpts<'_>,
    kind: TransferKind,
    document: u32,
    chunks: usize,
) -> Result<(), Status> {
    let at = world.open_with(0, opts);
    world.grow(at, document, chunks * EACH);
    let begun = world.try_part(at, kind, 0, 0, chunks * EACH, 0..3).map_err(|error| error.status());
    world.rest(0);
    close(world, at);
    world.core.0.lock().check().expect("sound tables");
    begun
}

fn close(world: &mut World, at: usize) {
    let session = world.sessions.swap_remove(at);
    world.core.0.lock().close_session(session.number).expect("an open session");
}

/// Leading chunks of a document that a lookup finds.
fn found(world: &World, document: u32, chunks: usize) -> usize {
    let tokens: Vec<u32> = (0..(chunks * EACH) as u32).map(|i| document * 1000 + i).collect();
    let mut core = world.core.0.lock();
    let namespace = world.namespaces[0].number;
    core.lookup(namespace, &tokens).expect("an open namespace").reusable_soon_tokens as usize / EACH
}

fn tick(world: &World, seconds: u64) {
    let mut core = world.core.0.lock();
    core.tick(seconds * SECOND);
    core.check().expect("sound tables");
}

/// Puts and pins documents of four chunks until a pin is rejected. Returns the pinned chunks.
fn pin_documents(world: &mut World, most: u32) -> (u64, Option<Status>) {
    let pin = Pin { priority: 0, until_ns: 100 * SECOND };
    for document in 0..most {
        let at = world.open(0, 0);
        world.grow(at, document, 4 * EACH);
        assert!(world.submit_part(at, TransferKind::Put, 0, 0, 4 * EACH, 0..3));
        world.rest(0);
        let number = world.sessions[at].number;
        let result = world.core.0.lock().pin(number, 0, 4 * EACH as u64, pin);
        close(world, at);
        let stats = world.core.0.lock().report().stats;
        let pinned = 4 * u64::from(document + u32::from(result.is_ok()));
        assert_eq!((stats.pins, stats.pinned_bytes), (pinned, pinned * PINNED_BYTES));
        if let Err(error) = result {
            assert!(stats.rejected_pins == 4 && error.message().contains("pins="), "{error}");
            return (pinned, Some(error.status()));
        }
    }
    (4 * u64::from(most), None)
}

#[test]
fn pins_beyond_their_share_are_rejected_and_counted() {
    let host_bytes = 48 * PINNED_BYTES;
    let mut world = World::new(1, host_bytes, 0);
    let (pinned, status) = pin_documents(&mut world, 100);
    assert_eq!((pinned, status), (24, Some(Status::Budget)));
    // When pins end there is room again.
    tick(&world, 100);
    let stats = world.core.0.lock().report().stats;
    assert_eq!((stats.pins, stats.pinned_bytes), (0, 0));
    // A disk has room for more pins than host memory.
    let mut world = World::new(1, host_bytes, 4 << 20);
    assert_eq!(pin_documents(&mut world, 25), (100, None));
    assert!((0..25).all(|document| found(&world, document, 4) == 4));
}

#[test]
fn chunks_are_removed_from_all_tiers_at_their_end() {
    for disk_bytes in [0, 4 << 20] {
        let mut world = World::new(2, 1 << 20, disk_bytes);
        put(&mut world, &opts(0, 10), 1, 6).expect("room");
        put(&mut world, &opts(0, 0), 2, 6).expect("room");
        tick(&world, 9);
        assert_eq!((found(&world, 1, 6), found(&world, 2, 6)), (6, 6));
        tick(&world, 11);
        assert_eq!((found(&world, 1, 6), found(&world, 2, 6)), (0, 6), "disk of {disk_bytes}");
        let stats = world.core.0.lock().report().stats;
        assert_eq!(stats.expired_chunks, 6);
    }
}

#[test]
fn a_use_moves_the_end_and_never_to_an_earlier_time() {
    let mut world = World::new(3, 1 << 20, 0);
    put(&mut world, &opts(0, 10), 1, 4).expect("room");
    tick(&world, 8);
    transfer(&mut world, &opts(0, 10), TransferKind::Get, 1, 4).expect("a get");
    transfer(&mut world, &opts(0, 1), TransferKind::Get, 1, 4).expect("a get");
    // A get without a TTL changes nothing.
    transfer(&mut world, &opts(0, 0), TransferKind::Get, 1, 4).expect("a get");
    tick(&world, 17);
    assert_eq!(found(&world, 1, 4), 4);
    tick(&world, 19);
    assert_eq!(found(&world, 1, 4), 0);
}

#[test]
fn kv_stored_without_an_end_keeps_none() {
    let mut world = World::new(4, 1 << 20, 0);
    put(&mut world, &opts(0, 0), 1, 4).expect("room");
    put(&mut world, &opts(0, 1), 1, 6).expect("room");
    // The end of chunks that another session puts without a TTL is removed.
    put(&mut world, &opts(0, 1), 2, 6).expect("room");
    put(&mut world, &opts(0, 0), 2, 3).expect("room");
    tick(&world, 5);
    assert_eq!((found(&world, 1, 6), found(&world, 2, 6)), (4, 3));
}

#[test]
fn chunks_that_are_used_at_their_end_are_removed_later() {
    let mut world = World::new(5, 1 << 20, 0);
    put(&mut world, &opts(0, 1), 1, 4).expect("room");
    let reader = world.open(0, 0);
    world.grow(reader, 1, 2 * EACH);
    tick(&world, 5);
    assert_eq!(found(&world, 1, 4), 2, "the session references two");
    close(&mut world, reader);
    tick(&world, 5);
    assert_eq!(found(&world, 1, 4), 0, "removed as soon as nothing holds them");
}

#[test]
fn a_use_of_a_chunk_that_was_held_at_its_end_gives_it_a_new_end() {
    let mut world = World::new(5, 1 << 20, 0);
    put(&mut world, &opts(0, 1), 1, 2).expect("room");
    let reader = world.open_with(0, &opts(0, 3));
    world.grow(reader, 1, 2 * EACH);
    tick(&world, 5);
    assert!(world.submit_part(reader, TransferKind::Get, 0, 0, 2 * EACH, 0..3));
    world.rest(0);
    close(&mut world, reader);
    tick(&world, 7);
    assert_eq!(found(&world, 1, 2), 2);
    tick(&world, 9);
    assert_eq!(found(&world, 1, 2), 0);
}

#[test]
fn one_tick_removes_a_bounded_number_of_chunks() {
    let mut world = World::new(9, 16 << 20, 0);
    put(&mut world, &opts(0, 10), 1, 1200).expect("room");
    for expired in [512, 1024, 1200, 1200] {
        tick(&world, 11);
        assert_eq!(world.core.0.lock().report().stats.expired_chunks, expired);
    }
    assert_eq!(found(&world, 1, 1200), 0);
}

/// Submits a put that is cancelled before it stores anything. Returns its open session.
fn cancelled_put(world: &mut World, opts: &SessionOpts<'_>, document: u32, chunks: usize) -> usize {
    let at = world.open_with(0, opts);
    world.grow(at, document, chunks * EACH);
    assert!(world.submit_part(at, TransferKind::Put, 0, 0, chunks * EACH, 0..3));
    world.cancel_last();
    world.rest(0);
    assert_eq!(found(world, document, chunks), 0, "nothing was stored");
    at
}

#[test]
fn a_put_that_is_repeated_gives_an_end() {
    for seconds in [0, 5] {
        let mut world = World::new(10, 1 << 20, 0);
        let at = cancelled_put(&mut world, &opts(0, 1), 1, 4);
        tick(&world, seconds);
        assert!(world.submit_part(at, TransferKind::Put, 0, 0, 4 * EACH, 0..3));
        world.rest(0);
        close(&mut world, at);
        assert_eq!(found(&world, 1, 4), 4);
        tick(&world, 10);
        assert_eq!(found(&world, 1, 4), 0, "repeated after {seconds} s");
    }
}

#[test]
fn a_put_that_stores_nothing_does_not_count_against_the_quota() {
    let mut world = World::new(11, 1 << 20, 0);
    world.core.0.lock().set_quota(1, Tier::Host, 4 * CHUNK_BYTES).expect("a quota");
    let at = cancelled_put(&mut world, &opts(1, 0), 1, 4);
    assert_eq!(usage(&world, 1).0, 0);
    put(&mut world, &opts(1, 0), 2, 4).expect("the quota is not used");
    // A repeated put counts as the first one did.
    assert!(world.submit_part(at, TransferKind::Put, 0, 0, 4 * EACH, 0..3));
    world.rest(0);
    assert_eq!(usage(&world, 1).0, 4 * CHUNK_BYTES);
    assert_eq!((found(&world, 1, 4), found(&world, 2, 4)), (4, 0));
}

#[test]
fn blocks_count_in_host_memory_when_they_arrive() {
    let config = Config {
        host_bytes: 1 << 20,
        granularity: Granularity::Session,
        quota: [4 * CHUNK_BYTES, 0],
        ..Config::default()
    };
    let mut world = World::of(14, 4 << 20, config);
    let at = world.open_with(1, &opts(1, 0));
    let names = |first: u8| [0, 1, 2, 3].map(|i| Key([first + i; 32]));
    for first in [10, 20] {
        world.submit_blocks(at, TransferKind::Put, &names(first));
        world.rest(0);
    }
    let evicted = |world: &World| world.core.0.lock().report().stats.quota_evicted_chunks;
    assert_eq!(evicted(&world), 4, "the first ones are on disk only");
    world.submit_blocks(at, TransferKind::Get, &names(10));
    world.cancel_last();
    world.rest(0);
    world.core.0.lock().check().expect("sound tables");
    assert_eq!((usage(&world, 1).0, evicted(&world)), (4 * CHUNK_BYTES, 4));
    world.submit_blocks(at, TransferKind::Get, &names(10));
    world.rest(0);
    assert_eq!((usage(&world, 1).0, evicted(&world)), (4 * CHUNK_BYTES, 8));
}

#[test]
fn a_tenant_whose_oldest_chunks_are_in_use_can_put() {
    const HELD: usize = 4150;
    let mut world = World::new(12, 64 << 20, 0);
    let quota = (HELD + 50) as u64 * CHUNK_BYTES;
    world.core.0.lock().set_quota(1, Tier::Host, quota).expect("a quota");
    let at = world.open_with(0, &opts(1, 0));
    world.grow(at, 1, HELD * EACH);
    assert!(world.submit_part(at, TransferKind::Put, 0, 0, HELD * EACH, 0..3));
    world.rest(0);
    put(&mut world, &opts(1, 0), 100, 50).expect("within the quota");
    // One call tries a bounded number of chunks; the next one continues.
    let puts = [101, 102].map(|document| put(&mut world, &opts(1, 0), document, 20));
    assert_eq!(puts[1], Ok(()), "{puts:?}");
    assert!(usage(&world, 1).0 <= quota);
}

#[test]
fn a_quota_is_enforced_however_many_chunks_are_beyond_it() {
    let mut world = World::new(13, 64 << 20, 0);
    world.core.0.lock().set_quota(1, Tier::Host, 5000 * CHUNK_BYTES).expect("a quota");
    put(&mut world, &opts(1, 0), 1, 4200).expect("room");
    world.core.0.lock().set_quota(1, Tier::Host, 10 * CHUNK_BYTES).expect("a quota");
    tick(&world, 1);
    assert_eq!(usage(&world, 1).0, 10 * CHUNK_BYTES);
}

/// A tenant's bytes in host memory, and its quota.
fn usage(world: &World, tenant: u32) -> (u64, u64) {
    let used = world.core.0.lock().tenant_uses();
    used.get(&tenant).map_or((0, 0), |used| (used.bytes[0], used.quota[0]))
}

#[test]
fn a_quota_evicts_the_tenants_own_chunks_and_no_others() {
    for disk_bytes in [0, 4 << 20] {
        let mut world = World::new(6, 1 << 20, disk_bytes);
        let quota = 10 * CHUNK_BYTES;
        world.core.0.lock().set_quota(1, Tier::Host, quota).expect("a quota");
        put(&mut world, &opts(2, 0), 50, 8).expect("room");
        for document in 0..6 {
            put(&mut world, &opts(1, 0), document, 4).expect("others of the tenant are evicted");
            assert!(usage(&world, 1).0 <= quota);
        }
        let all: Vec<usize> = (0..6).map(|document| found(&world, document, 4)).collect();
        match disk_bytes {
            0 => assert_eq!(
                all,
                [0, 0, 0, 2, 4, 4],
                "the least recently used are evicted, from the end"
            ),
            _ => assert_eq!(all, [4; 6], "they are on disk"),
        }
        assert_eq!(found(&world, 50, 8), 8);
        let stats = world.core.0.lock().report().stats;
        assert_eq!((stats.quota_evicted_chunks, stats.quota_rejected_puts), (14, 0));
    }
}

#[test]
fn a_put_beyond_the_quota_is_rejected_with_the_numbers() {
    let mut world = World::new(7, 1 << 20, 0);
    world.core.0.lock().set_quota(1, Tier::Host, 10 * CHUNK_BYTES).expect("a quota");
    assert_eq!(put(&mut world, &opts(1, 0), 1, 11), Err(Status::Budget));
    put(&mut world, &opts(2, 0), 1, 11).expect("another tenant has no quota");
    // An open session holds what it has stored.
    let at = world.open_with(0, &opts(1, 0));
    world.grow(at, 2, 8 * EACH);
    assert!(world.submit_part(at, TransferKind::Put, 0, 0, 8 * EACH, 0..3));
    world.rest(0);
    assert_eq!(put(&mut world, &opts(1, 0), 3, 4), Err(Status::Budget));
    assert_eq!(put(&mut world, &opts(1, 0), 1, 11), Ok(()), "stored by another tenant already");
    close(&mut world, at);
    put(&mut world, &opts(1, 0), 3, 4).expect("the session is closed");
    assert_eq!(usage(&world, 1), (10 * CHUNK_BYTES, 10 * CHUNK_BYTES));
    let core = world.core.0.lock();
    let row = *core.tenants().iter().find(|row| row.id == 1).expect("counted");
    assert_eq!((row.rejected_puts, core.report().stats.quota_rejected_puts), (2, 2));
}

#[test]
fn quotas_of_the_spec_hold_for_all_tenants_without_one() {
    let mut world = World::new(8, 1 << 20, 4 << 20);
    {
        let mut core = world.core.0.lock();
        assert_eq!(
            core.set_quota(0, Tier::Host, 1).expect_err("no tenant").status(),
            Status::Invalid
        );
        let error = core.set_quota(1, Tier::Remote, 1).expect_err("no quota of remotes");
        assert_eq!(error.status(), Status::Unsupported);
        core.set_quota(3, Tier::Disk, 4 * CHUNK_BYTES).expect("a quota");
    }
    let error = World::new(8, 1 << 20, 0).core.0.lock().set_quota(3, Tier::Disk, 1);
    assert_eq!(error.map_err(|error| error.status()), Err(Status::Unsupported), "no disk");
    put(&mut world, &opts(3, 0), 1, 4).expect("room");
    put(&mut world, &opts(3, 0), 2, 4).expect("room");
    put(&mut world, &opts(4, 0), 3, 4).expect("room");
    tick(&world, 10);
    world.rest(0);
    let has = |tenant| world.core.0.lock().tenant_uses().get(&tenant).map(|used| used.bytes[1]);
    assert_eq!((has(3), has(4)), (Some(4 * CHUNK_BYTES), None));
    // A smaller quota, and none.
    world.core.0.lock().set_quota(3, Tier::Disk, 2 * CHUNK_BYTES).expect("a quota");
    assert_eq!(has(3), Some(2 * CHUNK_BYTES));
    world.core.0.lock().set_quota(3, Tier::Disk, 0).expect("no quota");
    assert_eq!(has(3), None);
    world.core.0.lock().check().expect("sound tables");
}

/// Random tenants against a naive model: chunks by tenant, in the order of their last use.
#[test]
fn random_puts_and_gets_stay_within_quotas() {
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let mut world = World::new(seed, 1 << 20, 0);
        let quotas: BTreeMap<u32, u64> =
            (1..4).map(|id| (id, (2 + random.below(9)) * CHUNK_BYTES)).collect();
        for (&tenant, &quota) in &quotas {
            world.core.0.lock().set_quota(tenant, Tier::Host, quota).expect("a quota");
        }
        // Documents of one chunk: the naive model need not know of prefixes.
        let mut model: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for step in 0..120 {
            let document = random.below(40) as u32;
            let tenant = 1 + random.below(3) as u32;
            let owner = model.iter().find(|(_, all)| all.contains(&document)).map(|(&id, _)| id);
            let is_get = owner.is_some() && random.below(2) == 0;
            let kind = if is_get { TransferKind::Get } else { TransferKind::Put };
            transfer(&mut world, &opts(tenant, 0), kind, document, 1).expect("a chunk fits");
            let owner = owner.unwrap_or(tenant);
            let all = model.entry(owner).or_default();
            all.retain(|&known| known != document);
            all.push(document);
            if all.len() as u64 * CHUNK_BYTES > quotas[&owner] {
                all.remove(0);
            }
            for document in 0..40 {
                let expected = model.values().any(|all| all.contains(&document));
                assert_eq!(
                    found(&world, document, 1) == 1,
                    expected,
                    "seed {seed}, step {step}: {document}"
                );
            }
        }
    }
}
