//! Simulation of many engines on one remote. One engine agrees with a replay, all engines agree
//! with simple models, nothing is lost or counted twice, and runs are repeatable.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;

use kvtier::base::status::Status;
use kvtier::policy::registry;
use kvtier::trace::generate::rng::Rng;
use kvtier::trace::reader::{self, ReadOpts};
use kvtier::trace::replay::{self, Replay, ReplayOpts};
use kvtier::trace::requests::{Builder, Request, Trace};
use kvtier::trace::study::Study;
use kvtier_lab::scale::{
    self, Cutting, LookupUnit, Placement, RemoteOpts, Router, ScaleOpts, ScaleReport, ShardFailure,
    Write,
};
use kvtier_lab::tiers::{self, Machine, Tier};

const KINDS: [&str; 5] = ["chat", "agent", "batch", "multitenant", "burst"];

fn data(kind: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/data/{kind}.kvtrace"))
}

fn made(kind: &str) -> Trace {
    reader::open(&data(kind), &ReadOpts::default()).expect("a committed trace")
}

/// The trace with full blocks only: partial ones are never uploaded.
fn whole(trace: &Trace) -> Trace {
    let mut builder = Builder::new(trace.block_tokens()).expect("tokens");
    for request in trace.requests() {
        let input_tokens = request.blocks * trace.block_tokens();
        builder.push(Request { input_tokens, ..*request }, trace.blocks(request)).expect("room");
    }
    builder.finish().expect("a forest")
}

fn longest(trace: &Trace) -> u64 {
    trace.requests().iter().map(|r| r.len() as u64).max().expect("requests")
}

fn tier(blocks: u64, bytes_per_second: f64) -> Tier {
    Tier { name: "a tier".to_string(), blocks, bytes_per_second }
}

/// Engines without a remote, with free loading and computing.
fn plain(engines: usize, host_blocks: u64) -> ScaleOpts {
    ScaleOpts {
        engines,
        policy: "lru".to_string(),
        host: tier(host_blocks, 0.0),
        disk: None,
        router: Router::Round,
        load_bound: 1.25,
        remote: None,
        machine: Machine { token_bytes: 8192, unit_ns: 0.0 },
        replay: ReplayOpts { timed: false, points: 0, ..ReplayOpts::default() },
        seed: 1,
    }
}

/// A remote without limits, latency or remembered lookups; one object per chunk.
fn ideal() -> RemoteOpts {
    RemoteOpts {
        latency_ns: 0,
        engine_bytes_per_second: 0.0,
        shard_bytes_per_second: 0.0,
        layers: 4,
        write: Write::Through,
        known: 0,
        hints: 0,
        ..RemoteOpts::default()
    }
}

fn run(trace: &Trace, opts: &ScaleOpts) -> ScaleReport {
    let study = Study::of(trace, &opts.replay.cost).expect("memory");
    scale::run(trace, &study, opts, &mut |_| true).expect("a run")
}

#[test]
fn one_engine_without_a_remote_equals_a_replay() {
    for kind in KINDS {
        let trace = made(kind).head(600).expect("memory");
        let study = Study::of(&trace, &ReplayOpts::default().cost).expect("memory");
        let blocks = (trace.uniques() as u64 / 12).max(1);
        for entry in registry::ENTRIES.iter().filter(|e| !["custom", "belady"].contains(&e.name)) {
            let mut opts = ScaleOpts { policy: entry.name.to_string(), ..plain(1, blocks) };
            let (name, replay_opts) = (entry.name, opts.replay);
            let report = replay::run(&trace, &study, name, blocks, &replay_opts, &mut |_| true)
                .expect("runs");
            for router in [Router::Round, Router::Session, Router::Prefix] {
                opts.router = router;
                let scaled = run(&trace, &opts);
                assert_eq!(scaled.counts.host_tokens, report.done.hit_tokens, "{kind}: {name}");
                assert_eq!(scaled.counts.computed_tokens(), report.recomputed_tokens());
                assert_eq!(scaled.floor_tokens, report.floor.hit_tokens);
            }
            opts.disk = Some(tier(3 * blocks, 0.0));
            let both = [tier(blocks, 0.0), tier(3 * blocks, 0.0)];
            let machine = &opts.machine;
            let known =
                tiers::run(&trace, &study, name, &both, machine, &replay_opts, &mut |_| true);
            let known = known.expect("runs").tiers;
            let counts = run(&trace, &opts).counts;
            assert_eq!(counts.host_tokens, known[0].hit_tokens, "{kind}: {name}");
            // A policy may find less in a larger cache; both count the hits of the smaller one.
            assert_eq!(counts.disk_tokens, known[1].hit_tokens, "{kind}: {name}");
        }
    }
}

/// A model with sets of blocks: engines that keep everything, and one set of all uploads.
#[derive(Default)]
struct Sets {
    host: u64,
    others: u64,
    lookups: u64,
    batches: u64,
}

impl Sets {
    fn of(trace: &Trace, engines: usize) -> Sets {
        let mut out = Sets::default();
        let each = u64::from(trace.block_tokens());
        let mut own: Vec<HashSet<u64>> = vec![HashSet::new(); engines];
        let mut all: HashMap<u64, usize> = HashMap::new();
        for (at, request) in trace.requests().iter().enumerate() {
            let engine = at % engines;
            let path = trace.blocks(request);
            let host = path.iter().take_while(|&id| own[engine].contains(id)).count();
            let rest = &path[host..];
            let found = rest.iter().take_while(|&id| all.contains_key(id)).count();
            out.host += host as u64 * each;
            assert!(rest[..found].iter().all(|id| all[id] != engine), "it would be in the host");
            out.others += found as u64 * each;
            for window in rest.chunks(64) {
                out.lookups += window.len() as u64;
                out.batches += 1;
                if window.iter().all(|id| !all.contains_key(id)) {
                    break;
                }
            }
            for &id in path {
                own[engine].insert(id);
                all.entry(id).or_insert(engine);
            }
        }
        out
    }
}

#[test]
fn an_unlimited_remote_makes_all_engines_one_cache() {
    for kind in KINDS {
        let trace = whole(&made(kind));
        let study = Study::of(&trace, &ReplayOpts::default().cost).expect("memory");
        // One infinite cache, as a set.
        let (mut seen, mut hits) = (HashSet::<u64>::new(), 0);
        for request in trace.requests() {
            let path = trace.blocks(request);
            hits += path.iter().take_while(|&id| seen.contains(id)).count();
            seen.extend(path);
        }
        let infinite = hits as u64 * u64::from(trace.block_tokens());
        assert_eq!(infinite, study.floor.hit_tokens);
        for (engines, router) in
            [(1, Router::Round), (7, Router::Round), (16, Router::Session), (5, Router::Prefix)]
        {
            // Small hosts, which hold at least one request.
            let small =
                ScaleOpts { router, remote: Some(ideal()), ..plain(engines, longest(&trace)) };
            let c = run(&trace, &small).counts;
            assert_eq!(c.host_tokens + c.remote_tokens(), infinite, "{kind} on {engines}");
            assert!(c.remote_tokens() > 0 && (engines > 1 || c.other_tokens == 0), "{kind}");
            assert_eq!((c.declined_tokens, c.stale, c.dropped_sends), (0, 0, 0));
            assert_eq!(c.stored, trace.uniques() as u64, "{kind}: each is stored once");
        }
        // Hosts that keep everything: origin of the hits, and number of lookups.
        for engines in [1, 2, 9] {
            let large =
                ScaleOpts { remote: Some(ideal()), ..plain(engines, trace.uniques() as u64) };
            let (c, sets) = (run(&trace, &large).counts, Sets::of(&trace, engines));
            assert_eq!((c.host_tokens, c.own_tokens, c.other_tokens), (sets.host, 0, sets.others));
            assert_eq!(
                (c.lookups, c.lookup_batches),
                (sets.lookups, sets.batches),
                "{kind} on {engines}"
            );
        }
    }
}

/// The remote as one cache with exact LRU eviction, beside one engine.
fn exact_lru(trace: &Trace, opts: &ScaleOpts, capacity: usize) -> u64 {
    let study = Study::of(trace, &opts.replay.cost).expect("memory");
    let mut host =
        Replay::open(trace, &study, "lru", opts.host.blocks, &opts.replay).expect("a policy");
    let mut used: HashMap<u64, u64> = HashMap::new();
    let mut order: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut clock, mut found) = (0u64, 0u64);
    for request in trace.requests() {
        let step = host.step().expect("a step").expect("a request");
        let path = trace.blocks(request);
        let rest = &path[step.hits..];
        let resident = rest.iter().take_while(|&id| used.contains_key(id)).count();
        found += resident as u64 * u64::from(trace.block_tokens());
        for id in rest {
            clock += 1;
            if let Some(before) = used.insert(*id, clock) {
                order.remove(&before);
            }
            order.insert(clock, *id);
        }
        while used.len() > capacity {
            let (_, id) = order.pop_first().expect("some");
            used.remove(&id);
        }
    }
    found
}

#[test]
fn sampled_eviction_is_close_to_exact_lru() {
    for kind in ["chat", "multitenant"] {
        let trace = whole(&made(kind));
        let mut opts = plain(1, longest(&trace));
        let cutting =
            Cutting::new(trace.block_tokens(), opts.machine.token_bytes, 4, 64 << 20).expect("cut");
        assert_eq!(cutting.objects(), 1);
        for part in [4, 10] {
            let capacity = trace.uniques() / part;
            let bytes = cutting.chunk_bytes * capacity as u64;
            opts.remote = Some(RemoteOpts { bytes, shards: 1, object_bytes: 64 << 20, ..ideal() });
            let report = run(&trace, &opts);
            let (exact, sampled) = (exact_lru(&trace, &opts, capacity), report.counts.own_tokens);
            assert!(report.life.evicted.0 > 0 && exact > 0);
            assert!(report.life.resident.0 <= capacity as u64);
            let difference = sampled.abs_diff(exact) as f64 / exact as f64;
            assert!(difference < 0.15, "{kind}: {sampled} by samples, {exact} exactly");
        }
    }
}

/// Invariants of every run, from the first request on.
fn lawful(trace: &Trace, opts: &ScaleOpts) -> ScaleReport {
    let r = run(trace, opts);
    let c = &r.counts;
    let tokens: u64 = trace.requests().iter().map(|r| u64::from(r.input_tokens)).sum();
    let parts = c.host_tokens + c.disk_tokens + c.own_tokens + c.other_tokens;
    assert_eq!((c.requests, c.tokens), (trace.requests().len() as u64, tokens), "{opts:?}");
    assert_eq!(parts + c.computed_tokens(), tokens);
    assert!(parts <= r.floor_tokens, "more than an unbounded cache: {opts:?}");
    // The remote never changes what engines keep.
    let alone = run(trace, &ScaleOpts { remote: None, ..opts.clone() });
    if opts.router != Router::Prefix {
        let own = |r: &ScaleReport| (r.counts.host_tokens, r.counts.disk_tokens);
        assert_eq!(own(&r), own(&alone), "{opts:?}");
        assert_eq!(r.local_ttft_ns, alone.ttft_ns);
    }
    let remote = opts.remote.as_ref().expect("a remote");
    assert_eq!(c.puts, c.stored + c.duplicates, "{opts:?}");
    let life = &r.life;
    assert_eq!((c.stored, c.put_bytes), (life.stored.0, life.stored.1 + c.duplicate_bytes));
    assert_eq!(life.stored.0, life.evicted.0 + life.lost.0 + life.resident.0, "{opts:?}");
    assert_eq!(life.stored.1, life.evicted.1 + life.lost.1 + life.resident.1, "{opts:?}");
    assert!(remote.bytes == 0 || life.resident.1 <= remote.bytes);
    assert!(c.stale <= c.gets && c.absent_lookups <= c.lookups && c.put_lookups <= c.lookups);
    assert!(c.spared_sends + c.dropped_sends <= c.sends);
    let objects = r.chunk_objects as u64;
    assert!(c.puts + c.away_puts <= objects * (c.sends - c.spared_sends - c.dropped_sends));
    let sum = |of: fn(&scale::EngineShare) -> u64| r.shares.iter().map(of).sum::<u64>();
    assert_eq!(sum(|s| s.requests), c.requests);
    let moved = (sum(|s| s.lookups), sum(|s| s.get_bytes), sum(|s| s.put_bytes));
    assert_eq!(moved, (c.lookups, c.get_bytes, c.put_bytes));
    // Whole chunks were loaded, except for the wasted ones.
    let each = u64::from(trace.block_tokens());
    assert_eq!((c.own_tokens + c.other_tokens) % each, 0);
    let loaded = (c.own_tokens + c.other_tokens) / each * r.chunk_bytes;
    assert_eq!(c.get_bytes, loaded + c.wasted_bytes, "{opts:?}");
    assert!(c.stale > 0 || r.slower == 0, "loading made a request slower: {opts:?}");
    assert!(remote.cap == 0 || r.chunk_peak <= u64::from(remote.cap), "{opts:?}");
    assert_eq!(run(trace, opts), r, "another run, another outcome: {opts:?}");
    r
}

fn random(rng: &mut Rng, trace: &Trace) -> ScaleOpts {
    let one = |rng: &mut Rng, all: &[u64]| all[rng.below(all.len() as u64) as usize];
    let engines = one(rng, &[1, 2, 3, 8]) as usize;
    let token_bytes = one(rng, &[4096, 40_960, 327_680]);
    let chunk_bytes = token_bytes * u64::from(trace.block_tokens());
    let shards = one(rng, &[1, 4, 16]);
    let routers = [Router::Round, Router::Session, Router::Prefix];
    let least = shards * (chunk_bytes + (1 << 20));
    let bytes = (trace.uniques() as u64 * chunk_bytes / one(rng, &[2, 5, 20])).max(least);
    let times = [0, 1_000_000, 5_000_000_000, 60_000_000_000];
    let remote = RemoteOpts {
        bytes: if rng.chance(0.7) { bytes } else { 0 },
        shards: shards as usize,
        place: [Placement::Object, Placement::Chunk, Placement::Root][rng.below(3) as usize],
        latency_ns: one(rng, &[0, 500_000, 50_000_000]) as i64,
        engine_bytes_per_second: one(rng, &[0, 100_000_000, 5_000_000_000]) as f64,
        shard_bytes_per_second: one(rng, &[0, 100_000_000, 2_500_000_000]) as f64,
        object_bytes: one(rng, &[1 << 20, 8 << 20, 64 << 20]),
        layers: one(rng, &[16, 32, 64]) as u16,
        write: [Write::Back, Write::Through, Write::Through, Write::Never][rng.below(4) as usize],
        hits: rng.below(3) as u16,
        lookup_unit: if rng.chance(0.5) { LookupUnit::Object } else { LookupUnit::Chunk },
        lookup_before_put: rng.chance(0.3),
        known: one(rng, &[0, 64, 4096]) as usize,
        hints: one(rng, &[0, 64, 4096]) as usize,
        fresh_ns: one(rng, &times) as i64,
        absent_ns: one(rng, &times) as i64,
        cap: if rng.chance(0.3) { 1 } else { 0 },
        dead: rng
            .chance(0.3)
            .then(|| ShardFailure { shards: shards as usize / 2, at_ns: trace.duration_ns() / 2 }),
        rehome: rng.chance(0.5),
    };
    let blocks = one(rng, &[longest(trace), trace.uniques() as u64 / 10]);
    ScaleOpts {
        policy: ["lru", "arc", "horizon"][rng.below(3) as usize].to_string(),
        disk: rng.chance(0.3).then(|| tier(2 * blocks, 2e9)),
        host: tier(blocks, 25e9),
        router: routers[rng.below(3) as usize],
        remote: Some(remote),
        machine: Machine { token_bytes, unit_ns: one(rng, &[0, 20_000, 100_000]) as f64 },
        seed: rng.next_u64(),
        ..plain(engines, blocks)
    }
}

#[test]
fn every_block_is_counted_exactly_once() {
    let traces: Vec<Trace> =
        KINDS.iter().map(|kind| made(kind).head(300).expect("memory")).collect();
    let mut rng = Rng::new(20);
    // Every failure must have occurred at least once.
    let mut seen = [0u64; 8];
    for number in 0..120 {
        let trace = &traces[number % traces.len()];
        let opts = random(&mut rng, trace);
        let r = lawful(trace, &opts);
        let c = &r.counts;
        let now = [
            c.stale,
            c.duplicates,
            c.dropped_sends,
            c.declined_tokens,
            c.away_puts,
            c.own_tokens,
            c.other_tokens,
            r.life.evicted.0,
        ];
        seen.iter_mut().zip(now).for_each(|(sum, more)| *sum += more);
    }
    assert!(seen.iter().all(|&sum| sum > 0), "{seen:?}");
}

/// Ten engines request the same prompt in one second; an eleventh has uploaded it before.
#[test]
fn a_cap_holds_for_all_engines_together() {
    let mut builder = Builder::new(512).expect("tokens");
    for at_ns in [0].into_iter().chain((0..10).map(|n| 60_000_000_000 + n * 1_000_000)) {
        let request = Request { at_ns, input_tokens: 4 * 512, ..Request::default() };
        builder.push(request, &[1, 2, 3, 4]).expect("room");
    }
    let trace = builder.finish().expect("a forest");
    let opts = with(&usual(11, &trace), |remote| {
        (remote.engine_bytes_per_second, remote.shard_bytes_per_second) = (0.0, 0.0);
    });
    let free = lawful(&trace, &opts);
    assert_eq!((free.chunk_peak, free.counts.other_tokens), (10, 10 * 4 * 512));
    assert_eq!((free.hottest_share, free.counts.stale), (0.25, 0));
    for cap in [1, 3] {
        let capped = lawful(&trace, &with(&opts, |remote| remote.cap = cap));
        let loaded = u64::from(cap) * 4 * 512;
        assert_eq!((capped.chunk_peak, capped.counts.other_tokens), (u64::from(cap), loaded));
        assert_eq!(capped.counts.capped_tokens, 10 * 4 * 512 - loaded);
        assert!(capped.ttft_ns[0] > free.ttft_ns[0]);
    }
}

fn usual(engines: usize, trace: &Trace) -> ScaleOpts {
    let remote = RemoteOpts { layers: 64, write: Write::Through, ..RemoteOpts::default() };
    ScaleOpts {
        host: tier(longest(trace), 25e9),
        remote: Some(remote),
        machine: Machine { token_bytes: 65_536, unit_ns: 100_000.0 },
        ..plain(engines, 1)
    }
}

fn with(opts: &ScaleOpts, change: impl FnOnce(&mut RemoteOpts)) -> ScaleOpts {
    let mut opts = opts.clone();
    change(opts.remote.as_mut().expect("a remote"));
    opts
}

#[test]
fn chunks_that_are_faster_to_compute_are_not_loaded() {
    let trace = made("agent");
    let opts = usual(4, &trace);
    let fast = lawful(&trace, &opts);
    assert!(fast.counts.remote_tokens() > 0 && fast.ttft_ns[0] < fast.local_ttft_ns[0]);
    let slow = lawful(&trace, &with(&opts, |remote| remote.engine_bytes_per_second = 1e6));
    assert_eq!((slow.counts.remote_tokens(), slow.counts.gets), (0, 0));
    assert!(slow.counts.declined_tokens > 0);
    assert_eq!(slow.ttft_ns, slow.local_ttft_ns);
    // A slow shard limits as much as a slow link.
    let slow = lawful(&trace, &with(&opts, |remote| remote.shard_bytes_per_second = 1e5));
    assert_eq!(slow.counts.remote_tokens(), 0);
    let distant = lawful(&trace, &with(&opts, |remote| remote.latency_ns = 3_600_000_000_000));
    assert_eq!(distant.counts.remote_tokens(), 0);
}

#[test]
fn a_failed_shard_loses_the_objects_placed_on_it() {
    let trace = made("chat");
    // Eight objects per chunk, on eight shards.
    let opts = with(&usual(4, &trace), |remote| {
        (remote.object_bytes, remote.shards) = (4 << 20, 8);
    });
    let warm_up = trace.requests().len() / 2;
    let at_ns = trace.requests()[warm_up].at_ns - trace.requests()[0].at_ns;
    let after = |place: Placement, shards: usize, rehome: bool| {
        let mut opts = with(&opts, |remote| {
            (remote.place, remote.rehome) = (place, rehome);
            remote.dead = (shards > 0).then_some(ShardFailure { shards, at_ns });
        });
        opts.replay.warm_up = warm_up;
        let report = run(&trace, &opts);
        assert_eq!(report.chunk_objects, 8);
        report.counts.remote_tokens()
    };
    let all = after(Placement::Object, 0, false);
    let (object, chunk) = (after(Placement::Object, 1, false), after(Placement::Chunk, 1, false));
    assert!(all > chunk && chunk > object, "{all} {chunk} {object}");
    assert!(chunk > all / 4, "one of eight shards took more than three quarters");
    for place in [Placement::Object, Placement::Chunk, Placement::Root] {
        assert_eq!(after(place, 8, true), 0, "{place:?}");
    }
    // Recomputed chunks are stored again where a shard is left.
    for place in [Placement::Object, Placement::Chunk] {
        let (stays, again) = (after(place, 1, false), after(place, 1, true));
        assert!(again > stays && again < all, "{place:?}: {again} of {all}, {stays} without");
    }
}

#[test]
fn remembered_objects_are_not_looked_up_again() {
    let trace = made("multitenant");
    let opts = usual(4, &trace);
    let lookups = |fresh_s: i64, absent_s: i64, entries: usize| {
        let opts = with(&opts, |remote| {
            (remote.known, remote.hints) = (entries, entries);
            (remote.fresh_ns, remote.absent_ns) =
                (fresh_s * 1_000_000_000, absent_s * 1_000_000_000);
        });
        let r = lawful(&trace, &opts);
        (
            r.counts.lookups,
            r.counts.hinted_present,
            r.counts.hinted_absent,
            r.counts.remote_tokens(),
        )
    };
    let (all, present, absent, best) = lookups(0, 0, 1 << 16);
    assert_eq!((present, absent), (0, 0));
    let (fewer, present, absent, _) = lookups(60, 0, 1 << 16);
    assert!(fewer < all && present > 0 && absent == 0);
    let (few, _, absent, worse) = lookups(60, 300, 1 << 16);
    assert!(
        few < fewer && absent > 0 && worse < best,
        "remembering absent objects for long costs hits"
    );
    let (none, present, absent, _) = lookups(60, 300, 0);
    assert!(none > few && (present, absent) == (0, 0));
    // The first object of a chunk stands for all of them.
    let chunk = lawful(&trace, &with(&opts, |remote| remote.lookup_unit = LookupUnit::Chunk));
    let object = lawful(&trace, &opts);
    assert!(chunk.chunk_objects > 1 && chunk.counts.lookups < object.counts.lookups);
}

#[test]
fn uploads_follow_the_write_mode_and_are_not_repeated() {
    let trace = made("batch");
    let opts = usual(4, &trace);
    let stored = |write: Write, hits: u16| {
        let r = lawful(&trace, &with(&opts, |remote| (remote.write, remote.hits) = (write, hits)));
        r.counts.stored
    };
    assert_eq!(stored(Write::Never, 0), 0);
    for write in [Write::Back, Write::Through] {
        let [all, some, few] = [0, 1, 3].map(|hits| stored(write, hits));
        assert!(all > some && some >= few && few > 0, "{write:?}: {all} {some} {few}");
    }
    let blind = lawful(&trace, &with(&opts, |remote| remote.hints = 0));
    let with_lookup = with(&opts, |remote| (remote.hints, remote.lookup_before_put) = (0, true));
    let with_lookup = lawful(&trace, &with_lookup);
    assert!(with_lookup.counts.put_lookups > 0 && blind.counts.put_lookups == 0);
    assert!(with_lookup.counts.duplicates < blind.counts.duplicates);
    let slow = lawful(&trace, &with(&opts, |remote| remote.engine_bytes_per_second = 1e7));
    assert!(slow.counts.dropped_sends > 0);
}

#[test]
fn routers_keep_sessions_together_and_balance_load() {
    let trace = made("chat");
    let share = |router: Router, load_bound: f64| {
        let opts = ScaleOpts { router, load_bound, ..usual(8, &trace) };
        let r = lawful(&trace, &opts);
        (r.share(r.counts.host_tokens), r.imbalance())
    };
    let (round, even) = share(Router::Round, 1.25);
    let (session, _) = share(Router::Session, 1.25);
    let (bound, balanced) = share(Router::Prefix, 1.25);
    let (free, _) = share(Router::Prefix, 1e6);
    assert!(session > round && free > round && bound > round, "{round} {session} {bound} {free}");
    assert!(even < 2.0 && balanced < 2.0, "{even} {balanced}");
}

#[test]
fn invalid_options_are_rejected() {
    let trace = made("burst").head(50).expect("memory");
    let study = Study::of(&trace, &ReplayOpts::default().cost).expect("memory");
    let fails = |opts: &ScaleOpts| {
        let run = scale::run(&trace, &study, opts, &mut |_| true);
        run.err().map(|error| error.status())
    };
    let opts = usual(2, &trace);
    assert_eq!(fails(&opts), None);
    let name = |policy: &str| ScaleOpts { policy: policy.to_string(), ..opts.clone() };
    assert_eq!(fails(&name("lur")), Some(Status::Spec));
    assert_eq!(fails(&name("custom")), Some(Status::Invalid));
    assert_eq!(fails(&name("belady")), Some(Status::Invalid));
    for engines in [0, scale::MAX_ENGINES + 1] {
        assert_eq!(fails(&ScaleOpts { engines, ..opts.clone() }), Some(Status::Limit));
    }
    for load_bound in [0.5, f64::NAN, f64::INFINITY] {
        assert_eq!(fails(&ScaleOpts { load_bound, ..opts.clone() }), Some(Status::Limit));
    }
    let limit = |change: fn(&mut RemoteOpts)| fails(&with(&opts, change)) == Some(Status::Limit);
    assert!(limit(|remote| remote.shards = 0));
    assert!(limit(|remote| remote.shards = scale::MAX_SHARDS + 1));
    assert!(limit(|remote| remote.bytes = 1 << 20));
    assert!(limit(|remote| remote.known = usize::MAX));
    assert!(limit(|remote| remote.latency_ns = -1));
    assert!(limit(|remote| remote.engine_bytes_per_second = f64::NAN));
    assert!(limit(|remote| remote.object_bytes = 1));
    let dead =
        |shards, at_ns| with(&opts, |remote| remote.dead = Some(ShardFailure { shards, at_ns }));
    assert_eq!(fails(&dead(17, 0)), Some(Status::Invalid));
    assert_eq!(fails(&dead(1, -1)), Some(Status::Limit));
    assert_eq!(fails(&with(&opts, |remote| remote.layers = 7)), Some(Status::Invalid));
    let stopped = scale::run(&trace, &study, &opts, &mut |_| false);
    assert_eq!(stopped.err().map(|error| error.status()), Some(Status::Cancelled));
}
