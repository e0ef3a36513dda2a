//! Stores that share a remote with faults. No byte is wrong and every transfer ends, whatever
//! happens; after recovery everything is found.

use kvtier_testkit::fixtures::store as support;

use std::collections::BTreeSet;
use std::ops::Deref;

use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::format::keys::block::BlockKeys;
use kvtier::meta::key::Key;
use kvtier::store::executor::remote::RemoteExecutor;
use kvtier::store::state::blocks::BlockTransfer;
use kvtier::store::state::work::{Work, WorkerKind};
use kvtier::store::state::{
    Config, Finished, Level, RemoteConfig, RemoteStats, TransferKind, Write,
};
use kvtier::tier::remote::breaker::Direction;
use kvtier::tier::remote::{Queries, Remote, RemoteError};
use kvtier_testkit::fixtures::stepped_store::{Parts, SteppedStore};
use kvtier_testkit::remote::simulated::{Fault, Plan, Simulated};
use support::{Engine, Model, Shape, document, marks_of};

/// Cells of 4 KiB.
const MODEL: Model = Model { layers: 4, heads: 2, run: 64, chunk: 16 };
const SEEDS: u64 = 120;
const STEPS: u32 = 60;
const MINUTE_NS: u64 = 60_000_000_000;

/// A stepped store on a simulated remote.
struct Twin(SteppedStore);

impl Deref for Twin {
    type Target = SteppedStore;

    fn deref(&self) -> &SteppedStore {
        &self.0
    }
}

impl Twin {
    fn open(remote: &Simulated, clock: &Clock, random: &mut Random) -> Twin {
        let batch = 1 + random.below(8) as usize;
        Twin::open_with(remote, clock, random, batch, 256)
    }

    fn open_with(
        remote: &Simulated,
        clock: &Clock,
        random: &mut Random,
        batch: usize,
        rows: usize,
    ) -> Twin {
        Twin::open_as(remote, clock, random, (batch, rows), |_| ())
    }

    fn open_as(
        remote: &Simulated,
        clock: &Clock,
        random: &mut Random,
        (batch, rows): (usize, usize),
        tune: impl FnOnce(&mut RemoteConfig),
    ) -> Twin {
        let mut remote_config = RemoteConfig {
            object_bytes: 8 << 10,
            batch,
            write: [Write::Through, Write::Back, Write::Never][random.below(3) as usize],
            timeout_ns: 20_000_000,
            known: 64,
            absent_ns: 1_000_000,
            seed: random.draw(),
            ..RemoteConfig::default()
        };
        tune(&mut remote_config);
        let config = Config {
            host_bytes: if rows > 1024 { 64 << 20 } else { 1 << 20 },
            max_chunks: rows,
            max_jobs: 16 + random.below(100) as u32,
            batch_cells: 1 + random.below(8) as usize,
            remote: Some(remote_config),
            ..Config::default()
        };
        Twin(SteppedStore::new(Parts {
            config,
            remote: Some(RemoteExecutor::new(Arc::new(remote.clone()), clock.clone())),
            clock: Some(clock.clone()),
            layout: MODEL.layout(),
            key: Key([9; 32]),
            batch_ns: 1000,
            ..Parts::default()
        }))
    }

    /// Runs all batches, those of one kind together.
    fn settle(&self) {
        for _ in 0..10_000 {
            let mut idle = true;
            for kind in WorkerKind::ALL {
                while self.run_batch(kind) {
                    idle = false;
                }
            }
            if idle {
                let waits = self.with(|core| core.describe_waiters());
                assert!(self.with(|core| core.is_idle()), "idle but waiting: {waits}");
                return self.with(|core| core.check()).expect("the tables agree");
            }
        }
        panic!("it never settles: {}", self.with(|core| core.describe_waiters()));
    }

    /// The only transfer that has ended.
    fn only_finished(&self) -> Finished {
        self.settle();
        let mut finished = self.finished();
        let one = finished.pop().expect("it has ended");
        assert!(finished.is_empty());
        one
    }

    /// Status and tokens of the only transfer that has ended.
    fn ended(&self) -> (Status, usize) {
        let one = self.only_finished();
        (one.error.map_or(Status::Ok, |error| error.status()), one.tokens as usize)
    }

    /// Statuses of the blocks of the only transfer that has ended. Checks its totals.
    fn ended_each(&self, names: &[u32]) -> Vec<Status> {
        let one = self.only_finished();
        let well = one.outcomes.iter().take_while(|&&status| status == Status::Ok).count();
        assert_eq!((one.outcomes.len(), one.tokens as usize), (names.len(), 16 * well), "{one:?}");
        assert_eq!(one.error.is_none(), well == names.len(), "{one:?}");
        one.outcomes
    }

    fn begin_blocks(&self, kind: TransferKind, level: Level, names: &[u32], engine: &Engine) {
        let (keys, views) = (keys_of(names), engine.whole().views);
        let (first_layer, layers, after) = (0, MODEL.layers, None);
        let blocks = BlockTransfer { keys, first_layer, layers, views, after };
        let session = self.session(&[]);
        self.with(|core| core.submit_blocks(session, (kind, level, 0), blocks)).expect("begun");
        self.close_session(session);
    }

    fn put_blocks(&self, names: &[u32], level: Level) -> Vec<Status> {
        let mut engine = Engine::new(MODEL, Shape::Tokens, 16 * names.len());
        engine.compute(&marks_in(names));
        self.begin_blocks(TransferKind::Put, level, names, &engine);
        self.ended_each(names)
    }

    /// Gets blocks and returns their statuses. Checks the bytes of those that succeed.
    fn get_blocks(&self, names: &[u32]) -> Vec<Status> {
        let mut engine = Engine::new(MODEL, Shape::Tokens, 16 * names.len());
        self.begin_blocks(TransferKind::Get, Level::Ram, names, &engine);
        let each = self.ended_each(names);
        for (at, _) in each.iter().enumerate().filter(|(_, status)| **status == Status::Ok) {
            engine.check(&marks_in(names), 16 * at..16 * (at + 1), 0..MODEL.layers);
        }
        each
    }

    fn begin_locating(&self, names: &[u32]) -> (u32, u32) {
        let session = self.session(&[]);
        let begun = self.with(|core| core.locate_blocks(session, keys_of(names)));
        (session, begun.expect("begun"))
    }

    fn locate_blocks(&self, names: &[u32]) -> Vec<Status> {
        let (session, _) = self.begin_locating(names);
        let each = self.ended_each(names);
        self.close_session(session);
        each
    }

    /// Residency of blocks as far as the store knows it without a remote lookup.
    fn exists(&self, names: &[u32]) -> Vec<u8> {
        let mut found = vec![0; names.len()];
        let keys = keys_of(names);
        self.with(|core| core.exists(self.namespace, &keys, &mut found)).expect("open");
        found
    }

    fn put(&self, tokens: &[u32], level: Level) -> Status {
        let session = self.session(tokens);
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(9, tokens));
        let what = engine.whole();
        self.submit(session, TransferKind::Put, level, what);
        let (status, _) = self.ended();
        self.close_session(session);
        status
    }

    /// Number of tokens that a lookup finds, and status of their get. Checks the bytes.
    fn find(&self, tokens: &[u32]) -> (usize, Status) {
        let session = self.session(tokens);
        self.with(|core| core.locate(session)).expect("begun");
        let (status, found) = self.ended();
        assert!(status == Status::Ok && found <= tokens.len(), "{status:?}, {found}");
        let mut got = Status::Ok;
        if found > 0 {
            let mut engine = Engine::new(MODEL, Shape::Heads, found);
            let what = engine.whole();
            self.submit(session, TransferKind::Get, Level::Ram, what);
            let came;
            (got, came) = self.ended();
            engine.check(&marks_of(9, tokens), 0..came, 0..MODEL.layers);
        }
        self.close_session(session);
        (found, got)
    }

    fn remote_counters(&self) -> RemoteStats {
        self.with(|core| core.remote_stats()).expect("a remote")
    }
}

fn keys_of(names: &[u32]) -> Vec<Key> {
    let keys = BlockKeys::new(&Key([9; 32]));
    names.iter().map(|name| keys.key(&name.to_le_bytes()).expect("a name")).collect()
}

/// Marks of the contents of blocks of these names.
fn marks_in(names: &[u32]) -> Vec<u64> {
    names.iter().flat_map(|&name| marks_of(10, &document(name, 16))).collect()
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

/// Runs in one thread: the uploads and their order are the same on every machine.
#[test]
fn evicted_chunks_return_from_the_remote() {
    const DOCUMENTS: usize = 256;
    let (mut random, clock) = (Random::new(1), Clock::manual(1));
    let remote = Simulated::new(1, Plan::default(), clock.clone());
    let twin = Twin::open_as(&remote, &clock, &mut random, (4, 512), |config| {
        (config.write, config.object_bytes, config.known) = (Write::Back, 16 << 10, 1024);
    });
    // Documents of one chunk each, four times as many as memory holds.
    let documents: Vec<Vec<u32>> = (0..DOCUMENTS).map(|n| document(n as u32, 16)).collect();
    for tokens in &documents {
        assert_eq!(twin.put(tokens, Level::Ram), Status::Ok);
    }
    let counted = twin.remote_counters();
    assert_eq!(counted.failed_uploads, 0, "{counted:?}");
    // An evicted chunk is uploaded, or rejected because too many wait for an upload.
    assert!(
        (counted.uploaded_objects + counted.rejected_chunks) as usize >= DOCUMENTS * 3 / 4,
        "{counted:?}"
    );
    let mut whole = 0;
    for tokens in &documents {
        let (found, got) = twin.find(tokens);
        assert_eq!(got, Status::Ok, "{:?}", twin.remote_counters());
        whole += usize::from(found == tokens.len());
    }
    // Memory holds a quarter of the documents.
    let counted = twin.remote_counters();
    println!("{whole} of {DOCUMENTS} came, {counted:?}");
    assert!(whole > DOCUMENTS / 2, "{whole} of {DOCUMENTS} complete, {counted:?}");
    assert!(whole + counted.rejected_chunks as usize >= DOCUMENTS, "{counted:?}");
}

#[test]
fn hostile_remote_never_yields_wrong_bytes() {
    let mut all = RemoteStats::default();
    let (mut located, mut missed) = (0, 0);
    for seed in 0..SEEDS {
        let (mut random, clock) = (Random::new(seed), Clock::manual(1));
        let remote = Simulated::new(seed, plan(&mut random), clock.clone());
        let mut twins = [0, 1].map(|_| Twin::open(&remote, &clock, &mut random));
        let mut begun = BTreeSet::new();
        for _ in 0..STEPS {
            let at = random.below(2) as usize;
            let tokens = document(random.below(6) as u32, 16 * (1 + random.below(8) as usize));
            let level = [Level::Ram, Level::Remote][random.below(2) as usize];
            let names: Vec<u32> =
                (0..1 + random.below(10)).map(|_| random.below(30) as u32).collect();
            match random.below(18) {
                12..=13 => {
                    begun.extend(names.clone());
                    drop(twins[at].put_blocks(&names, level));
                }
                14..=17 => {
                    let each = twins[at].locate_blocks(&names);
                    let found = names.iter().zip(&each).filter(|(_, one)| **one == Status::Ok);
                    let invented = found.filter(|(name, _)| !begun.contains(name)).count();
                    assert!(invented == 0 || remote.struck(Fault::Reorder) > 0, "seed {seed}");
                    let came = twins[at].get_blocks(&names);
                    located += each.iter().filter(|&&one| one == Status::Ok).count();
                    missed += came.iter().filter(|&&one| one != Status::Ok).count();
                }
                0..=4 => drop(twins[at].put(&tokens, level)),
                5..=9 => drop(twins[at].find(&tokens)),
                10 => {
                    clock.advance(random.below(3_000_000_000));
                    remote.set_plan(plan(&mut random));
                }
                _ => {
                    all.add_counters(&twins[at].remote_counters());
                    twins[at] = Twin::open(&remote, &clock, &mut random);
                }
            }
        }
        twins.iter().for_each(|twin| all.add_counters(&twin.remote_counters()));
        // The remote has recovered: one store gets KV that another one put.
        remote.set_plan(Plan::default());
        clock.advance(2 * MINUTE_NS);
        let tokens = document(100 + seed as u32, 128);
        // The first lookups and puts probe the remote. Its breaker may stay open for some of them.
        let is_well = (0..100).any(|_| {
            twins[0].find(&document(500, 16));
            clock.advance(MINUTE_NS);
            twins[0].put(&tokens, Level::Remote) == Status::Ok
        });
        assert!(is_well, "seed {seed}: {:?}", twins[0].remote_counters());
        let fresh = Twin::open(&remote, &clock, &mut random);
        assert_eq!(
            fresh.find(&tokens),
            (128, Status::Ok),
            "seed {seed}: {:?}",
            fresh.remote_counters()
        );
        assert_eq!(
            (fresh.remote_counters().fetched_cells, fresh.remote_counters().corrupt_objects),
            (32, 0),
            "seed {seed}"
        );
        let names: Vec<u32> = (1000..1001 + random.below(20) as u32).collect();
        assert_eq!(twins[0].put_blocks(&names, Level::Remote), vec![Status::Ok; names.len()]);
        let before = fresh.remote_counters().looked_up_names;
        assert_eq!(fresh.locate_blocks(&names), vec![Status::Ok; names.len()], "seed {seed}");
        assert_eq!(fresh.remote_counters().looked_up_names - before, names.len() as u64);
        assert_eq!(fresh.get_blocks(&names), vec![Status::Ok; names.len()], "seed {seed}");
    }
    assert!(located > SEEDS as usize && missed > SEEDS as usize, "{located}, {missed}");
    // Every counted case occurred.
    for (count, what) in [
        (all.fetched_objects, "fetched"),
        (all.uploaded_objects, "uploaded"),
        (all.corrupt_objects, "corrupt"),
        (all.absent_objects, "absent"),
        (all.late_requests, "late"),
        (all.failed_uploads, "not uploaded"),
        (all.removed_objects, "removed"),
    ] {
        assert!(count > SEEDS, "{count} {what}: {all:?}");
    }
}

#[test]
fn gets_overtake_prefetches_at_the_remote() {
    let clock = Clock::manual(1);
    let remote = Simulated::new(1, Plan::default(), clock.clone());
    let mut random = Random::new(5);
    let one = Twin::open(&remote, &clock, &mut random);
    let other = Twin::open_with(&remote, &clock, &mut random, 1, 256);
    let documents: Vec<Vec<u32>> = (0..6).map(|number| document(number, 16)).collect();
    for tokens in &documents {
        assert_eq!(one.put(tokens, Level::Remote), Status::Ok);
    }
    // Six prefetches wait, each for the objects of its chunk. Then a get needs one of the chunks.
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
            .with(|core| {
                core.submit_cell_range(session, TransferKind::Prefetch, Level::Ram, 1, what)
            })
            .expect("begun");
    }
    let what = engines[5].whole();
    let get = other.submit(sessions[5], TransferKind::Get, Level::Ram, what);
    // The two objects of the get are fetched first, before those of five earlier prefetches.
    for kind in [
        WorkerKind::Fetch,
        WorkerKind::Fetch,
        WorkerKind::Copy,
        WorkerKind::Copy,
        WorkerKind::Copy,
        WorkerKind::Copy,
    ] {
        other.run_batch(kind);
    }
    let ended = other.finished();
    assert!(ended.iter().any(|one| one.number == get), "{ended:?}");
    engines[5].check(&marks_of(9, &documents[5]), 0..16, 0..MODEL.layers);
    other.settle();
}

/// Two stores with a remote without faults.
fn well(max_chunks: usize) -> (Twin, Twin, Simulated, Clock) {
    let (mut random, clock) = (Random::new(5), Clock::manual(1));
    let remote = Simulated::new(5, Plan::default(), clock.clone());
    let one = Twin::open(&remote, &clock, &mut random);
    let other = Twin::open_with(&remote, &clock, &mut random, 4, max_chunks);
    (one, other, remote, clock)
}

const OK: Status = Status::Ok;
const NOT_FOUND: Status = Status::NotFound;

#[test]
fn stores_share_named_blocks() {
    let (one, other, _, _) = well(256);
    assert_eq!(one.put_blocks(&[1, 2, 3], Level::Remote), [OK; 3]);
    assert_eq!(other.get_blocks(&[1, 2]), [NOT_FOUND; 2]);
    let names = [1, 9, 1, 3, 9];
    assert_eq!(other.locate_blocks(&names), [OK, NOT_FOUND, OK, OK, NOT_FOUND]);
    // A name that occurs twice is looked up once.
    assert_eq!(
        (other.remote_counters().looked_up_names, other.remote_counters().found_names),
        (3, 2)
    );
    // The blocks are at the remote only.
    assert_eq!(other.exists(&names), [8, 0, 8, 8, 0]);
    assert_eq!(other.get_blocks(&names), [OK, NOT_FOUND, OK, OK, NOT_FOUND]);
    assert_eq!(
        (other.remote_counters().fetched_objects, other.remote_counters().fetched_cells),
        (4, 8)
    );
    // The blocks are resident here now: no lookup is sent.
    assert_eq!(other.exists(&[1, 3]), [8 | 2 | 16; 2]);
    assert_eq!(other.locate_blocks(&[1, 3]), [OK; 2]);
    assert_eq!(other.remote_counters().looked_up_names, 3);
    // A miss is remembered for a while, then looked up again.
    assert_eq!(other.locate_blocks(&[9]), [NOT_FOUND]);
    assert_eq!(other.remote_counters().looked_up_names, 3);
    other.clock.as_ref().expect("a clock").advance(MINUTE_NS);
    assert_eq!(one.put_blocks(&[9], Level::Remote), [OK]);
    assert_eq!(other.locate_blocks(&[9, 2]), [OK; 2]);
    assert_eq!(other.remote_counters().looked_up_names, 5);
    // A store finds its own blocks without the remote.
    assert_eq!(one.locate_blocks(&[1, 2, 3, 9]), [OK; 4]);
    assert_eq!(one.remote_counters().looked_up_names, 0);
    // A dropped block is also removed from the remote, and its row is freed.
    let session = other.session(&[]);
    other.with(|core| core.drop_blocks(session, &keys_of(&[2]))).expect("open");
    other.settle();
    assert_eq!((other.exists(&[2]), other.locate_blocks(&[2])), (vec![0], vec![NOT_FOUND]));
}

#[test]
fn located_blocks_take_no_rows_from_others() {
    let (one, other, _, _) = well(40);
    let names: Vec<u32> = (0..100).collect();
    for some in names.chunks(20) {
        assert_eq!(one.put_blocks(some, Level::Remote), [OK; 20]);
    }
    // More blocks than rows: the last ones have rows.
    let each = other.locate_blocks(&names);
    assert_eq!(each, [[NOT_FOUND; 60].as_slice(), [OK; 40].as_slice()].concat());
    assert_eq!(other.get_blocks(&[99]), [OK]);
    // Puts need all other rows.
    let own: Vec<u32> = (500..539).collect();
    assert_eq!(other.put_blocks(&own, Level::Ram), [OK; 39]);
    assert_eq!(other.exists(&names).iter().filter(|&&one| one != 0).count(), 1);
    assert_eq!(other.get_blocks(&own), [OK; 39]);
    // No resident block is evicted for a hint.
    assert_eq!(other.locate_blocks(&[0, 99]), [NOT_FOUND, OK]);
    assert_eq!(other.get_blocks(&own), [OK; 39]);
}

#[test]
fn block_hints_are_bounded() {
    let (one, other, _, _) = well(256);
    let names: Vec<u32> = (0..100).collect();
    for some in names.chunks(20) {
        assert_eq!(one.put_blocks(some, Level::Remote), [OK; 20]);
    }
    let each = other.locate_blocks(&names);
    assert_eq!(each.iter().filter(|&&one| one == OK).count(), 64);
    assert_eq!(other.exists(&names).iter().filter(|&&one| one == 8).count(), 64);
}

#[test]
fn block_lookups_always_end() {
    let (one, other, remote, clock) = well(256);
    let names: Vec<u32> = (0..100).collect();
    assert_eq!(one.put_blocks(&names[..60], Level::Remote), [OK; 60]);
    // Cancelled before its lookup is sent; and while its lookup runs.
    let (session, number) = other.begin_locating(&names);
    other.with(|core| core.cancel(number, Status::Timeout));
    assert_eq!(other.ended_each(&names), [Status::Timeout; 100]);
    let (again, number) = other.begin_locating(&names);
    let work = other.with(|core| core.take(WorkerKind::Lookup)).expect("a question");
    other.with(|core| core.cancel(number, Status::Cancelled));
    // Another lookup reuses the number: the old answer does not apply to it.
    let (_, next) = other.begin_locating(&names[50..]);
    assert_eq!(number, next);
    let finished = other.finished();
    assert_eq!((finished.len(), finished[0].outcomes.clone()), (1, vec![Status::Cancelled; 100]));
    other.with(|core| core.done(work, Ok(()), 1000));
    // A lookup continues after its session is closed.
    other.close_session(session);
    other.close_session(again);
    assert_eq!(other.ended_each(&names[50..]), [[OK; 10].as_slice(), &[NOT_FOUND; 40]].concat());
    // The connection is lost in the middle: answers received before count.
    clock.advance(2 * MINUTE_NS);
    other.begin_locating(&names[..60]);
    remote.set_plan(Plan::default().often(Fault::Lost, 1_000_000));
    let each = other.ended_each(&names[..60]);
    assert_eq!(each, [[NOT_FOUND; 50].as_slice(), &[OK; 10]].concat());
    // The breaker is open: no lookup is sent, and remote hints do not count.
    (0..5).for_each(|_| drop(other.locate_blocks(&names[..50])));
    let asked = other.remote_counters().looked_up_names;
    assert_eq!(other.locate_blocks(&names[50..60]), [NOT_FOUND; 10]);
    assert_eq!(
        (other.exists(&names[50..60]), other.remote_counters().looked_up_names),
        (vec![0; 10], asked)
    );
    assert_eq!(other.put_blocks(&[50], Level::Ram), [OK]);
    assert_eq!(other.locate_blocks(&[50, 51]), [OK, NOT_FOUND]);
    // The remote has recovered.
    remote.set_plan(Plan::default());
    clock.advance(2 * MINUTE_NS);
    other.find(&document(500, 16));
    assert_eq!(other.locate_blocks(&names[..60]), [OK; 60]);
    assert_eq!(other.get_blocks(&names[..60]), [OK; 60]);
}

#[test]
fn invalid_lookups_are_rejected() {
    let (_, other, _, _) = well(256);
    let session = other.session(&[]);
    let ask = |blocks: usize| {
        let keys = keys_of(&vec![7; blocks]);
        other.with(|core| core.locate_blocks(session, keys)).map_err(|error| error.status())
    };
    assert_eq!((ask(0), ask(65_537)), (Err(Status::Limit), Err(Status::Limit)));
    assert!((0..16).all(|_| ask(65_536).is_ok()));
    assert_eq!(ask(1), Err(Status::Again));
    other.settle();
    let finished = other.finished();
    assert_eq!((finished.len(), other.remote_counters().looked_up_names), (16, 1));
    assert!(ask(1).is_ok());
    other.settle();
}

/// Runs one batch with changed results.
fn run_changed(twin: &Twin, kind: WorkerKind, change: impl FnOnce(&mut Work)) {
    let work = twin.with(|core| core.take(kind)).expect("there is work");
    twin.run_changed(work, change);
}

#[test]
fn truncated_fetch_keeps_the_remote_object() {
    let (one, other, remote, _) = well(256);
    let tokens = document(1, 64);
    assert_eq!(one.put(&tokens, Level::Remote), OK);
    let names = remote.names();
    assert_eq!(names.len(), 8);
    // A malformed reply says nothing about the object.
    let session = other.session(&tokens);
    other.with(|core| core.locate(session)).expect("begun");
    assert_eq!(other.ended(), (OK, 64));
    let engine = Engine::new(MODEL, Shape::Tokens, 64);
    let what = engine.whole();
    other.submit(session, TransferKind::Get, Level::Ram, what);
    run_changed(&other, WorkerKind::Fetch, |work| {
        let Work::Fetches(batch) = work else { panic!("no fetches") };
        batch.fetches.iter_mut().for_each(|one| one.result = Err(RemoteError::Malformed));
    });
    assert_eq!(other.ended().1, 0);
    other.close_session(session);
    assert_eq!((remote.names(), other.remote_counters().removed_objects), (names.clone(), 0));
    assert!(other.remote_counters().corrupt_objects > 0);
    assert_eq!(other.find(&tokens), (64, OK));

    // A complete but corrupt object is removed, and the breaker opens.
    for name in &names {
        let mut bytes = remote.object(name).expect("there");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        remote.plant(*name, bytes);
    }
    let (_, mut third, _, clock) = well(256);
    third.0.tools.remote = Some(RemoteExecutor::new(Arc::new(remote.clone()), clock));
    assert_eq!(third.find(&tokens).0, 64);
    assert!(third.remote_counters().corrupt_objects >= 8, "{:?}", third.remote_counters());
    let opened = third.with(|core| core.remote_breaker().map(|breaker| breaker.opened()));
    assert_eq!(opened, Some(1));
    assert_eq!((remote.names(), third.remote_counters().removed_objects), (vec![], 8));
    // The store that has the chunks uploads them again.
    assert_eq!(one.put(&tokens, Level::Remote), OK);
    assert_eq!(remote.names(), names);
}

/// All wanted names have hints. The recovery is found only if a lookup is sent all the same.
#[test]
fn recovered_remote_is_probed_although_hints_are_complete() {
    let (one, other, remote, clock) = well(256);
    let (tokens, names) = (document(1, 64), [1, 2, 3]);
    assert_eq!(one.put(&tokens, Level::Remote), OK);
    assert_eq!(one.put_blocks(&names, Level::Remote), [OK; 3]);
    let locate = || {
        let session = other.session(&tokens);
        other.with(|core| core.locate(session)).expect("begun");
        let (status, found) = other.ended();
        other.close_session(session);
        assert_eq!(status, OK);
        found
    };
    for of_blocks in [false, true] {
        assert_eq!((other.locate_blocks(&names), locate()), (vec![OK; 3], 64));
        remote.set_plan(Plan::default().often(Fault::Lost, 1_000_000));
        (0..5).for_each(|n| drop(other.locate_blocks(&[100 + n])));
        assert!(other.with(|core| !core.remote_breaker().expect("one").is_closed(Direction::Read)));
        assert_eq!((other.locate_blocks(&names), locate()), (vec![NOT_FOUND; 3], 0));
        remote.set_plan(Plan::default());
        clock.advance(5_000_000_000);
        match of_blocks {
            true => assert_eq!(other.locate_blocks(&names), [OK; 3]),
            false => assert_eq!(locate(), 64),
        }
        assert!(other.with(|core| core.remote_breaker().expect("one").is_closed(Direction::Read)));
    }
}

#[test]
fn removals_have_separate_batches() {
    let (one, _, remote, _) = well(256);
    let names: Vec<u32> = (0..60).collect();
    for some in names.chunks(20) {
        assert_eq!(one.put_blocks(some, Level::Remote), [OK; 20]);
    }
    assert_eq!(remote.names().len(), 120);
    let session = one.session(&[]);
    one.with(|core| core.drop_blocks(session, &keys_of(&names))).expect("open");
    one.begin_blocks(
        TransferKind::Put,
        Level::Remote,
        &[500],
        &Engine::new(MODEL, Shape::Tokens, 16),
    );
    let (mut gone, mut batches) = (0, 0);
    while gone < 120 {
        run_changed(&one, WorkerKind::Upload, |work| {
            let Work::Uploads(batch) = work else { panic!("no sends") };
            assert!(batch.uploads.is_empty() && (1..=32).contains(&batch.removals.len()));
            // A part of one batch came too late.
            if batches == 0 && batch.removals.len() > 1 {
                let late = batch.removals[1];
                remote.plant(late, vec![0; 4096]);
                batch.late.push(late);
                (batch.removed, batch.removal_error) =
                    (batch.removed - 1, Some(RemoteError::Timeout));
            }
            gone += batch.removed as usize;
            batches += 1;
        });
    }
    assert_eq!((remote.names(), one.remote_counters().removed_objects), (vec![], 120));
    assert!(one.with(|core| core.remote_breaker().expect("one").is_closed(Direction::Write)));
    one.settle();
    assert_eq!(remote.names().len(), 2);
}

/// The put that completes the chunk uploads it.
#[test]
fn chunk_put_by_layers_is_uploaded_once() {
    let (one, other, remote, _) = well(256);
    let tokens = document(1, 64);
    let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(9, &tokens));
    let put = |session: u32, layers: std::ops::Range<usize>| {
        let what = engine.cell_range(0, 64, layers, false);
        one.submit(session, TransferKind::Put, Level::Remote, what);
        one.ended().0
    };
    let session = one.session(&tokens);
    assert_eq!(put(session, 0..2), OK);
    assert_eq!(remote.names().len(), 0);
    assert_eq!(put(session, 2..4), OK);
    assert_eq!(remote.names().len(), 8);
    assert_eq!(other.find(&tokens), (64, OK));
    one.close_session(session);
    // The layers may arrive in any order.
    let session = one.session(&document(2, 64));
    assert_eq!(put(session, 2..4), OK);
    assert_eq!(remote.names().len(), 8);
    assert_eq!(put(session, 0..2), OK);
    assert_eq!(remote.names().len(), 16);
    one.close_session(session);
}

/// The object that a lookup probes exists, but another one of the chunk is missing. The get misses,
/// and the store remembers the miss for a while. The next store that computes the chunk uploads
/// it again.
#[test]
fn chunk_with_a_missing_object_is_uploaded_again() {
    let mut lacked = 0;
    for lost in 0..2 {
        let (one, _, remote, clock) = well(256);
        let other = Twin::open_as(&remote, &clock, &mut Random::new(1), (4, 256), |config| {
            config.write = Write::Through;
        });
        let tokens = document(1, 16);
        assert_eq!(one.put(&tokens, Level::Remote), OK);
        let names = remote.names();
        assert_eq!(names.len(), 2);
        let mut gone = Queries::default();
        gone.name(names[lost]);
        remote.client().remove(&mut gone, u64::MAX);
        assert_eq!(remote.names().len(), 1);
        let locate = || {
            let session = other.session(&tokens);
            other.with(|core| core.locate(session)).expect("begun");
            let (status, found) = other.ended();
            other.close_session(session);
            assert_eq!(status, OK);
            found
        };
        if locate() == 0 {
            continue; // this is the object that a lookup probes
        }
        lacked += 1;
        let session = other.session(&tokens);
        let mut engine = Engine::new(MODEL, Shape::Tokens, 16);
        let what = engine.whole();
        other.submit(session, TransferKind::Get, Level::Ram, what);
        assert_eq!(other.ended().1, 0, "{:?}", other.remote_counters());
        assert_eq!((locate(), other.remote_counters().absent_objects), (0, 1));
        clock.advance(1_000_000_000);
        // The miss has expired: a lookup reports the chunk again before it is recomputed.
        assert_eq!(locate(), 16);
        engine.compute(&marks_of(9, &tokens));
        let what = engine.whole();
        other.submit(session, TransferKind::Put, Level::Ram, what);
        assert_eq!(other.ended().0, OK);
        assert_eq!(remote.names(), names);
        assert_eq!(
            (other.remote_counters().uploaded_objects, other.remote_counters().known_objects),
            (1, 1),
            "{:?}",
            other.remote_counters()
        );
        // The chunk is complete, and is not uploaded again.
        assert_eq!(other.put(&tokens, Level::Ram), OK);
        assert_eq!(
            (other.remote_counters().uploaded_objects, other.remote_counters().known_objects),
            (1, 1)
        );
        other.close_session(session);
    }
    assert_eq!(lacked, 1);
}

/// A cancel ends at once although the remote does not answer. Fetched cells serve other
/// transfers.
#[test]
fn cancel_does_not_wait_for_the_remote() {
    let (one, other, _, _) = well(256);
    let tokens = document(1, 16);
    assert_eq!(one.put(&tokens, Level::Remote), OK);
    let session = other.session(&tokens);
    other.with(|core| core.locate(session)).expect("begun");
    assert_eq!(other.ended(), (OK, 16));
    let mut engines = [0, 1].map(|_| Engine::new(MODEL, Shape::Tokens, 16));
    let get = |at: usize| {
        let what = engines[at].whole();
        other.submit(session, TransferKind::Get, Level::Ram, what)
    };
    let (first, second) = (get(0), get(1));
    let work = other.with(|core| core.take(WorkerKind::Fetch)).expect("there is work");
    other.with(|core| core.cancel(first, Status::Cancelled));
    let ended = other.finished();
    let status = |one: &Finished| one.error.as_ref().map(|error| error.status());
    assert_eq!(ended.iter().map(status).collect::<Vec<_>>(), [Some(Status::Cancelled)]);
    assert_eq!((ended[0].number, ended[0].last), (first, true));
    other.run(work);
    let one = other.only_finished();
    assert_eq!((one.number, one.tokens, status(&one)), (second, 16, None));
    engines[1].check(&marks_of(9, &tokens), 0..16, 0..MODEL.layers);
    assert_eq!(other.remote_counters().fetched_cells, 4);
    other.close_session(session);
    other.settle();
}

/// Hints of very long sessions are recorded in steps, completely in the end.
#[test]
fn hints_of_very_long_sessions_are_complete() {
    const CHUNKS: usize = 2200;
    let (mut random, clock) = (Random::new(5), Clock::manual(1));
    let remote = Simulated::new(5, Plan::default(), clock.clone());
    let mut open = || {
        Twin::open_as(&remote, &clock, &mut random, (32, 2 * CHUNKS), |config| {
            config.known = 16_384
        })
    };
    let (one, other) = (open(), open());
    let tokens = document(1, 16 * CHUNKS);
    let session = one.session(&tokens);
    let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(9, &tokens));
    for first in (0..tokens.len()).step_by(320) {
        let count = 320.min(tokens.len() - first);
        let what = engine.cell_range(first, count, 0..MODEL.layers, false);
        one.submit(session, TransferKind::Put, Level::Remote, what);
        assert_eq!(one.ended().0, OK);
    }
    one.close_session(session);
    let locate = |begins: bool| {
        let session = other.session(&tokens);
        let asked = other.remote_counters().looked_up_names;
        if begins {
            other.settle(); // the new session starts a lookup itself
        } else {
            other.with(|core| core.locate(session)).expect("begun");
            assert_eq!(other.ended(), (OK, tokens.len()));
        }
        let found = other.with(|core| core.lookup(other.namespace, &tokens).expect("sound").tokens);
        other.close_session(session);
        (found as usize, other.remote_counters().looked_up_names - asked)
    };
    assert_eq!(locate(false), (tokens.len(), CHUNKS as u64));
    // All hints are kept, more than one step can record: hardly any lookup is sent.
    for begins in [false, true] {
        let (found, asked) = locate(begins);
        // A few names were evicted from the remote index by others.
        assert!(found == tokens.len() && asked < 50, "{found}, {asked}");
    }
    assert!(
        other.remote_counters().cached_names > 2 * CHUNKS as u64 - 100,
        "{:?}",
        other.remote_counters()
    );
}

/// Batches from a remote end in any order, so policies learn of chunks after their children.
/// Chunks that cannot be evicted for that reason must not be chosen forever.
#[test]
fn chunks_fetched_out_of_order_can_be_evicted() {
    const TOKENS: usize = 40 * 16;
    for seed in 0..40 {
        let (mut random, clock) = (Random::new(seed), Clock::manual(1));
        let remote = Simulated::new(5, Plan::default(), clock.clone());
        let one = Twin::open(&remote, &clock, &mut random);
        let batch = 1 + random.below(16) as usize;
        let other = Twin::open_with(&remote, &clock, &mut random, batch, 106);
        let documents: Vec<Vec<u32>> = (1..8).map(|number| document(number, TOKENS)).collect();
        for tokens in &documents {
            assert_eq!(one.put(tokens, Level::Remote), OK);
        }
        for tokens in &documents {
            let session = other.session(tokens);
            other.with(|core| core.locate(session)).expect("begun");
            assert_eq!(other.ended(), (OK, TOKENS));
            let mut engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
            let what = engine.whole();
            other.submit(session, TransferKind::Get, Level::Ram, what);
            loop {
                let take = || other.with(|core| core.take(WorkerKind::Fetch));
                let mut batches: Vec<Work> = std::iter::from_fn(take).collect();
                if batches.is_empty() {
                    break;
                }
                while !batches.is_empty() {
                    let work = batches.swap_remove(random.below(batches.len() as u64) as usize);

                    other.run(work);
                }
            }
            assert_eq!(other.ended(), (OK, TOKENS), "{seed}");
            engine.check(&marks_of(9, tokens), 0..TOKENS, 0..MODEL.layers);
            other.close_session(session);
        }
        // Such chunks hold back neither rows nor memory that other chunks need.
        assert_eq!(other.put(&document(99, 60 * 16), Level::Ram), OK, "{seed}");
        other.with(|core| core.shrink(1 << 20));
        other.settle();
        assert_eq!(other.find(&documents[0]), (TOKENS, OK), "{seed}");
    }
}
