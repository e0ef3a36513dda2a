//! Stores that come and go, and share a remote that does what remotes do on bad days: whatever
//! happens there, no byte is wrong and every move ends; once it is well again all is found.

#![cfg(not(feature = "shuttle"))]

#[path = "support/shared_core.rs"]
mod shared_core;
#[path = "support/store.rs"]
mod support;

use kvtier::base::clock::Clock;
use kvtier::base::status::Status;
use kvtier::base::sync::{Arc, Mutex};
use kvtier::device::Stream;
use kvtier::device::host::Host;
use kvtier::io::simulated::random::Random;
use kvtier::kv::core::work::Hands;
use kvtier::kv::core::{
    Config, Core, Deed, FarConfig, FarCounters, Level, SessionOpts, SpaceOpts, Write,
};
use kvtier::kv::errands::Errands;
use kvtier::kv::hands::Tools;
use kvtier::meta::key::Key;
use kvtier::tier::remote::simulated::{Fault, Plan, Simulated};
use shared_core::Shared;
use support::{Engine, Model, Shape, document, marks_of};

/// Cells of 4 KiB.
const MODEL: Model = Model { layers: 4, heads: 2, run: 64, chunk: 16 };
const SEEDS: u64 = 120;
const STEPS: u32 = 60;
const MINUTE_NS: u64 = 60_000_000_000;

struct Twin {
    core: Shared,
    tools: Tools,
    space: u32,
    clock: Clock,
}

impl Twin {
    fn open(remote: &Simulated, clock: &Clock, random: &mut Random) -> Twin {
        let batch = 1 + random.below(8) as usize;
        Twin::open_with(remote, clock, random, batch)
    }

    fn open_with(remote: &Simulated, clock: &Clock, random: &mut Random, batch: usize) -> Twin {
        let far = FarConfig {
            object_bytes: 8 << 10,
            batch,
            write: [Write::Through, Write::Back, Write::Never][random.below(3) as usize],
            timeout_ns: 20_000_000,
            known: 64,
            absent_ns: 1_000_000,
            seed: random.draw(),
            ..FarConfig::default()
        };
        let config = Config {
            host_bytes: 1 << 20,
            max_chunks: 256,
            max_jobs: 16 + random.below(100) as u32,
            batch_cells: 1 + random.below(8) as usize,
            far: Some(far),
            ..Config::default()
        };
        let mut core = Core::new(config, None, None).expect("opened");
        core.tick(clock.now_ns());
        let opts = SpaceOpts { key: Key([9; 32]), layout: MODEL.layout(), holes: false };
        let space = core.open_space(&opts).expect("opened");
        let far = Some(Errands::new(Arc::new(remote.clone()), clock.clone()));
        let tools = Tools { device: Arc::new(Host::default()), disk: None, far };
        let core = Shared(Arc::new(Mutex::new(core)));
        Twin { core, tools, space, clock: clock.clone() }
    }

    fn with<R>(&self, act: impl FnOnce(&mut Core) -> R) -> R {
        let mut core = self.core.0.lock();
        core.tick(self.clock.now_ns());
        act(&mut core)
    }

    fn rest(&self) {
        for _ in 0..10_000 {
            let mut idle = true;
            for hands in Hands::ALL {
                while let Some(mut work) = self.with(|core| core.take(hands)) {
                    idle = false;
                    let mut keeper = self.core.clone();
                    // SAFETY: engines outlive this call, and nobody else has the stores' memory.
                    let outcome = unsafe { self.tools.work(&mut work, Stream(0), &mut keeper) };
                    self.with(|core| core.done(work, outcome, 1000));
                }
            }
            if idle {
                let waits = self.with(|core| core.what_waits());
                assert!(self.with(|core| core.is_idle()), "it waits for nothing: {waits}");
                return self.with(|core| core.check()).expect("the tables agree");
            }
        }
        panic!("it never rests: {}", self.with(|core| core.what_waits()));
    }

    fn session(&self, tokens: &[u32]) -> u32 {
        self.with(|core| {
            let number = core.open_session(self.space, &SessionOpts::default()).expect("room");
            core.append(number, tokens).expect("room");
            number
        })
    }

    /// The end of a move: how, and its tokens.
    fn ended(&self) -> (Status, usize) {
        self.rest();
        let mut finished = Vec::new();
        self.with(|core| core.finished(&mut finished));
        let one = finished.pop().expect("it has ended");
        assert!(finished.is_empty());
        (one.error.map_or(Status::Ok, |error| error.status()), one.tokens as usize)
    }

    fn put(&self, tokens: &[u32], level: Level) -> Status {
        let session = self.session(tokens);
        let mut engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
        engine.compute(&marks_of(9, tokens));
        let what = engine.whole();
        self.with(|core| core.submit_rectangle(session, Deed::Put, level, 0, what)).expect("begun");
        let (status, _) = self.ended();
        self.with(|core| core.close_session(session)).expect("open");
        status
    }

    /// How many tokens are found, and whether those then come; whatever comes is right.
    fn find(&self, tokens: &[u32]) -> (usize, Status) {
        let session = self.session(tokens);
        self.with(|core| core.locate(session)).expect("begun");
        let (status, found) = self.ended();
        assert!(status == Status::Ok && found <= tokens.len(), "{status:?}, {found}");
        let mut got = Status::Ok;
        if found > 0 {
            let mut engine = Engine::new(MODEL, Shape::Heads, found);
            let what = engine.whole();
            self.with(|core| core.submit_rectangle(session, Deed::Get, Level::Ram, 0, what))
                .expect("begun");
            let came;
            (got, came) = self.ended();
            engine.check(&marks_of(9, tokens), 0..came, 0..MODEL.layers);
        }
        self.with(|core| core.close_session(session)).expect("open");
        (found, got)
    }

    fn far(&self) -> FarCounters {
        self.with(|core| core.far_counters()).expect("a remote")
    }
}

fn plan(random: &mut Random) -> Plan {
    let plan = Plan { down: 1 + random.below(30) as u32, ..Plan::default() };
    match random.below(7) {
        0 => plan,
        1 => plan.often(Fault::Lost, 100_000).often(Fault::Late, 50_000),
        2 => plan.often(Fault::Flip, 200_000).often(Fault::Truncate, 50_000),
        3 => plan.often(Fault::Reorder, 200_000).often(Fault::Extend, 50_000),
        4 => plan.often(Fault::Stale, 200_000).often(Fault::Forget, 100_000),
        5 => plan.often(Fault::Full, 200_000).often(Fault::Failover, 50_000),
        _ => plan.hostile(30_000),
    }
}

#[test]
fn whatever_the_remote_does_no_byte_is_wrong() {
    let mut all = FarCounters::default();
    for seed in 0..SEEDS {
        let (mut random, clock) = (Random::new(seed), Clock::manual(1));
        let remote = Simulated::new(seed, plan(&mut random), clock.clone());
        let mut twins = [0, 1].map(|_| Twin::open(&remote, &clock, &mut random));
        for _ in 0..STEPS {
            let at = random.below(2) as usize;
            let tokens = document(random.below(6) as u32, 16 * (1 + random.below(8) as usize));
            let level = [Level::Ram, Level::Remote][random.below(2) as usize];
            match random.below(12) {
                0..=4 => drop(twins[at].put(&tokens, level)),
                5..=9 => drop(twins[at].find(&tokens)),
                10 => {
                    clock.advance(random.below(3_000_000_000));
                    remote.set_plan(plan(&mut random));
                }
                _ => {
                    all.add(&twins[at].far());
                    twins[at] = Twin::open(&remote, &clock, &mut random);
                }
            }
        }
        twins.iter().for_each(|twin| all.add(&twin.far()));
        // It is well again: what one puts another one gets.
        remote.set_plan(Plan::default());
        clock.advance(2 * MINUTE_NS);
        let tokens = document(100 + seed as u32, 128);
        // The first questions and puts see whether it is well; it may stay away for some.
        let is_well = (0..100).any(|_| {
            twins[0].find(&document(500, 16));
            clock.advance(MINUTE_NS);
            twins[0].put(&tokens, Level::Remote) == Status::Ok
        });
        assert!(is_well, "seed {seed}: {:?}", twins[0].far());
        let fresh = Twin::open(&remote, &clock, &mut random);
        assert_eq!(fresh.find(&tokens), (128, Status::Ok), "seed {seed}: {:?}", fresh.far());
        assert_eq!((fresh.far().cells, fresh.far().corrupt), (32, 0), "seed {seed}");
    }
    // All of it happened.
    let FarCounters { fetched, sent, corrupt, absent, late, failed_sends, removed, .. } = all;
    for (count, what) in [
        (fetched, "fetched"),
        (sent, "sent"),
        (corrupt, "corrupt"),
        (absent, "absent"),
        (late, "late"),
        (failed_sends, "not sent"),
        (removed, "removed"),
    ] {
        assert!(count > SEEDS, "{count} {what}: {all:?}");
    }
}

#[test]
fn who_is_in_a_hurry_does_not_wait_where_a_prefetch_waits() {
    let clock = Clock::manual(1);
    let remote = Simulated::new(1, Plan::default(), clock.clone());
    let mut random = Random::new(5);
    let one = Twin::open(&remote, &clock, &mut random);
    let other = Twin::open_with(&remote, &clock, &mut random, 1);
    let documents: Vec<Vec<u32>> = (0..6).map(|number| document(number, 16)).collect();
    for tokens in &documents {
        assert_eq!(one.put(tokens, Level::Remote), Status::Ok);
    }
    // Six prefetches wait, each for the objects of its chunk; then one is wanted at once.
    let sessions: Vec<u32> = documents.iter().map(|tokens| other.session(tokens)).collect();
    for &session in &sessions {
        other.with(|core| core.locate(session)).expect("begun");
        assert_eq!(other.ended(), (Status::Ok, 16));
    }
    let mut engines: Vec<Engine> = (0..6).map(|_| Engine::new(MODEL, Shape::Heads, 16)).collect();
    for (engine, &session) in engines.iter_mut().zip(&sessions) {
        let mut what = engine.whole();
        what.views = Default::default();
        other
            .with(|core| core.submit_rectangle(session, Deed::Prefetch, Level::Ram, 1, what))
            .expect("begun");
    }
    let what = engines[5].whole();
    let get = other
        .with(|core| core.submit_rectangle(sessions[5], Deed::Get, Level::Ram, 0, what))
        .expect("begun");
    // Its two objects are the first that are fetched, though five others were wanted before.
    for hands in [Hands::Fetch, Hands::Fetch, Hands::Copy, Hands::Copy, Hands::Copy, Hands::Copy] {
        let Some(mut work) = other.with(|core| core.take(hands)) else { continue };
        let mut keeper = other.core.clone();
        // SAFETY: engines outlive this call, and nobody else has the stores' memory.
        let outcome = unsafe { other.tools.work(&mut work, Stream(0), &mut keeper) };
        other.with(|core| core.done(work, outcome, 1000));
    }
    let mut ended = Vec::new();
    other.with(|core| core.finished(&mut ended));
    assert!(ended.iter().any(|one| one.number == get), "{ended:?}");
    engines[5].check(&marks_of(9, &documents[5]), 0..16, 0..MODEL.layers);
    other.rest();
}
