//! Lookups against the rules.

use kvtier::base::budget::Tier;
use kvtier::base::status::Status;
use kvtier::format::keys::chain::Chain;
use kvtier::meta::chunks::TIERS;
use kvtier::meta::reuse::State;
use kvtier::store::plan::Route;
use kvtier::store::state::plans::LookupResult;

use crate::look::naive::{Chosen, Rows};
use crate::look::world::World;

const HOST: usize = Tier::Host as usize;
const DISK: usize = Tier::Disk as usize;

/// Load time of chunks over all routes.
fn load_ns(routes: &[Route], chunks: &[Chosen], queued: bool) -> u64 {
    let sum = |bytes: &dyn Fn(&Chosen) -> u64| {
        let all = chunks.iter().map(bytes).sum::<u64>();
        (all, chunks.iter().filter(|chunk| bytes(chunk) > 0).count() as u64)
    };
    let copied = sum(&|one| one.bytes[HOST] + one.bytes[DISK] + one.pending_bytes);
    let read = sum(&|one| one.bytes[DISK]);
    let mut most: f64 = 0.0;
    for (route, (bytes, count)) in routes.iter().zip([copied, read]) {
        if bytes > 0 {
            let waits = if queued { route.queued_ns } else { 0.0 };
            most = most.max(route.speed.ns(bytes, count) + waits);
        }
    }
    most as u64
}

/// Checks that a lookup agrees with the rows of the naive model.
pub fn compare(look: &LookupResult, rows: &Rows, holes: bool, routes: &[Route]) {
    let (now, soon) = (rows.reach(false), rows.reach(true));
    assert_eq!(look.tokens, rows.tokens.iter().sum::<u64>());
    assert_eq!((look.now_tokens, look.reusable_soon_tokens), (rows.start(now), rows.start(soon)));
    let until = if holes { rows.tokens.len() } else { soon };
    let chosen = rows.choose(until, true, |_| false);
    let (mut at, mut chunk) = (0, 0);
    let mut last: Option<(State, Option<usize>)> = None;
    for range in &look.ranges {
        assert_eq!(range.first_token, at);
        let from = chunk;
        while chunk < chosen.len() && rows.start(chunk + 1) <= at + range.tokens {
            chunk += 1;
        }
        assert_eq!(rows.start(chunk), at + range.tokens, "a range ends inside of a chunk");
        let mut bytes = [0; TIERS];
        let mut pending = 0;
        for one in &chosen[from..chunk] {
            assert_eq!(one.state, range.state);
            assert_eq!(one.bytes.iter().rposition(|&b| b > 0), range.farthest);
            bytes.iter_mut().zip(one.bytes).for_each(|(sum, b)| *sum += b);
            pending += one.pending_bytes;
        }
        assert_eq!((bytes, pending), (range.bytes, range.pending_bytes));
        assert_eq!(range.load_ns, load_ns(routes, &chosen[from..chunk], false));
        assert_ne!(last, Some((range.state, range.farthest)), "two ranges of a kind");
        last = Some((range.state, range.farthest));
        at += range.tokens;
    }
    assert_eq!(at, look.tokens);
    let sum = |tier: usize| chosen.iter().map(|one| one.bytes[tier]).sum::<u64>();
    assert_eq!(look.bytes, std::array::from_fn(sum));
    assert_eq!(look.pending_bytes, chosen.iter().map(|one| one.pending_bytes).sum::<u64>());
    assert_eq!(look.load_ns, load_ns(routes, &chosen, true));
}

fn look_around(world: &mut World) -> [u64; 4] {
    let mut seen = [0; 4];
    let tokens = world.prompt();
    let mut core = world.core.0.lock();
    let before = core.report();
    for namespace in &world.namespaces {
        let rows = Rows::of(&core, namespace, &tokens, None);
        let routes = core.routes(namespace.number, 0).unwrap();
        let look = core.lookup(namespace.number, &tokens).unwrap();
        compare(look, &rows, namespace.holes, &routes);
        look.ranges.iter().for_each(|range| seen[range.state as usize] += 1);
        let by_tokens = look.clone();
        let mut keys = Vec::new();
        let each = namespace.layout.chunk_tokens();
        Chain::new(namespace.key, each).unwrap().extend(&tokens, &[], &mut keys).unwrap();
        let by_keys = core.lookup_keys(namespace.number, &keys, tokens.len() as u64).unwrap();
        assert_eq!(*by_keys, by_tokens);
        // Nothing is stored in another namespace, even with the same layout.
        let other = world
            .namespaces
            .iter()
            .find(|s| s.layout == namespace.layout && s.key != namespace.key);
        let number = other.unwrap().number;
        let nothing = core.lookup_keys(number, &keys, tokens.len() as u64).unwrap();
        assert_eq!((nothing.reusable_soon_tokens, nothing.bytes), (0, [0; TIERS]));
        assert!(nothing.ranges.iter().all(|range| range.state == State::Miss));
    }
    for session in &world.sessions {
        let namespace = &world.namespaces[session.namespace];
        let tail = core.session(session.number).unwrap().path().tail();
        let rows = Rows::of(&core, namespace, &session.tokens, tail);
        let routes = core.routes(namespace.number, 0).unwrap();
        compare(core.lookup_session(session.number).unwrap(), &rows, namespace.holes, &routes);
    }
    assert_eq!(core.report(), before, "a lookup counted as a use");
    seen
}

#[test]
fn lookups_match_the_naive_model() {
    let (mut seen, mut disk, mut both) = ([0; 4], 0, 0);
    for seed in 0..12 {
        // Little memory, so that many chunks are on disk, and a disk that becomes full.
        let mut world = World::new(seed, (4 + seed) << 16, (10 + seed) * 131_072 + 400_000);
        for step in 0..400 {
            world.step();
            if step % 5 == 0 {
                let more = look_around(&mut world);
                seen.iter_mut().zip(more).for_each(|(sum, n)| *sum += n);
            }
        }
        world.rest(0);
        look_around(&mut world);
        let report = world.core.0.lock().report();
        disk += report.stats.disk_cells;
        both += report.stats.demoted_chunks;
    }
    let enough = seen.iter().all(|&n| n > 50);
    assert!(enough && disk > 0 && both > 0, "a case was not reached: {seen:?}, {disk}, {both}");
}

/// With memory for all chunks.
#[test]
fn stored_prefixes_are_found() {
    for seed in 100..108 {
        let mut world = World::new(seed, 64 << 20, 0);
        for _ in 0..40 {
            (0..20).for_each(|_| world.step());
            world.rest(0);
            let tokens = world.prompt();
            let mut core = world.core.0.lock();
            for (at, namespace) in world.namespaces.iter().enumerate() {
                let mut rows = Rows::of(&core, namespace, &tokens, None);
                let each = namespace.layout.chunk_tokens() as usize;
                let full = tokens.len() / each;
                for chunk in 0..full {
                    let prefix = tokens[..(chunk + 1) * each].to_vec();
                    for layer in 0..namespace.layout.layers() {
                        let there = world.stored.contains(&(at, prefix.clone(), layer));
                        rows.cells[chunk][layer] = (there.then_some(HOST), false);
                    }
                }
                let routes = core.routes(namespace.number, 0).unwrap();
                compare(
                    core.lookup(namespace.number, &tokens).unwrap(),
                    &rows,
                    namespace.holes,
                    &routes,
                );
            }
        }
        assert!(world.stored.len() > 200, "too little was stored");
    }
}

#[test]
fn invalid_lookups_are_rejected() {
    let world = World::new(1, 1 << 20, 0);
    let mut core = world.core.0.lock();
    let none = core.lookup(99, &[1, 2, 3]).unwrap_err();
    assert_eq!(none.status(), Status::NotFound);
    assert_eq!(core.lookup_session(0).unwrap_err().status(), Status::NotFound);
    let number = world.namespaces[0].number;
    let keys = [world.namespaces[0].key];
    assert_eq!(core.lookup_keys(number, &keys, 8).unwrap_err().status(), Status::Invalid);
    assert_eq!(core.lookup_keys(number, &[], 1 << 40).unwrap_err().status(), Status::Invalid);
    let look = core.lookup(number, &[]).unwrap();
    assert_eq!((look.tokens, look.ranges.len(), look.load_ns), (0, 0, 0));
    let look = core.lookup(number, &[1, 2]).unwrap();
    assert_eq!((look.tokens, look.ranges.len(), look.ranges[0].state), (2, 1, State::Miss));
}
