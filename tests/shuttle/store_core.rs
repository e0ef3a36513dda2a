//! The state of a store under a model checker that picks the interleavings of its workers and a
//! caller: residency and references of chunks, jobs, eviction and promotion: `cargo test --features
//! shuttle --test shuttle store_core`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier::base::clock::Clock;
use kvtier::base::status::Status;
use kvtier::base::sync::{Condvar, Mutex};
use kvtier::device::Stream;
use kvtier::device::host::Host;
use kvtier::meta::chunks::Pin;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::store::executor::Tools;
use kvtier::store::state::disk_gc::{CheckpointWriter, Page};
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{
    CellRange, Config, Finished, Level, NamespaceOpts, SessionOpts, StoreState, TransferKind,
    Wanted, Write,
};
use kvtier::tier::disk::{CellAt, CellIndex, DiskTier, Options, Spot};
use kvtier_testkit::disk::{SimFiles, SimOpts};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::thread;

const ROUNDS: usize = 1500;
const CHUNK: usize = 4;
const LAYERS: usize = 2;
/// Bytes of K, and of V, per token.
const TOKEN: usize = 16;
const SEGMENT: u64 = 16 * 4096;

/// Totals over all schedules: cells read from disk, and puts that were cancelled in time. Not part
/// of the model.
static FROM_DISK: AtomicU64 = AtomicU64::new(0);
static GIVEN_UP: AtomicU64 = AtomicU64::new(0);

/// The store's state, shared by workers and callers.
struct Running {
    core: StoreState,
    /// Results of finished transfers by ticket. Transfer numbers are reused, tickets are not.
    finished: BTreeMap<usize, Finished>,
    /// The ticket of the latest transfer with each number.
    tickets: BTreeMap<u32, usize>,
    stop: bool,
}

struct Shared {
    state: Mutex<Running>,
    changed: Condvar,
    tools: Tools,
}

#[derive(Clone)]
struct Asker(Arc<Shared>);

impl CheckpointWriter for Asker {
    fn page(&mut self, from: (u32, u32), page: &mut Page) -> Option<(u32, u32)> {
        self.0.state.lock().core.page(from, page)
    }
}

impl CellIndex for Asker {
    fn is_live(&mut self, cell: &CellAt) -> bool {
        self.0.state.lock().core.is_live(cell)
    }

    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool {
        self.0.state.lock().core.moved(cell, to)
    }

    fn lost(&mut self, cell: &CellAt) -> bool {
        panic!("nothing was damaged, and {cell:?} is")
    }
}

impl Shared {
    /// A store whose memory has room for 16 cells.
    fn open() -> Arc<Shared> {
        Shared::on(&SimFiles::new(3, SimOpts::default()), 40, Config::default())
    }

    /// Same as `open`, on a disk of `segments` segments.
    fn on(files: &SimFiles, segments: u64, config: Config) -> Arc<Shared> {
        let host_bytes = if config.host_bytes < 1 << 20 { config.host_bytes } else { 64 << 10 };
        let config = Config {
            host_bytes,
            host_policy: "lru".into(),
            write: Write::Back,
            max_chunks: 64,
            max_sessions: 8,
            max_transfers: 16,
            max_jobs: 12,
            events: 16,
            batch_cells: 3,
            ..config
        };
        let clock = Clock::manual(1);
        let options =
            Options { segment_bytes: SEGMENT, clock, ..Options::new(segments * SEGMENT, [7; 16]) };
        let opened = DiskTier::open(Arc::new(files.clone()), options);
        let (disk, found, _) = opened.expect("a sound store");
        let disk = Arc::new(disk);
        let mut core = StoreState::new(config, None, Some(disk.clone())).expect("memory");
        core.tick(1);
        core.adopt(&found).expect("memory");
        let group =
            Group::gqa(0..LAYERS as u16, 1, (TOKEN / 2) as u32, Dtype::F16).expect("a group");
        let layout = Layout::new(CHUNK as u32, vec![group]).expect("a layout");
        core.open_namespace(&NamespaceOpts { key: Key([1; 32]), layout, holes: false })
            .expect("room");
        let tools = Tools { device: Arc::new(Host::default()), disk: Some(disk), remote: None };
        let (finished, tickets) = (BTreeMap::new(), BTreeMap::new());
        let state = Mutex::new(Running { core, finished, tickets, stop: false });
        Arc::new(Shared { state, changed: Condvar::new(), tools })
    }

    /// Runs `act` on the state, then wakes all waiting threads.
    fn with<R>(&self, act: impl FnOnce(&mut StoreState) -> R) -> R {
        let mut state = self.state.lock();
        let result = act(&mut state.core);
        state.collect();
        drop(state);
        self.changed.notify_all();
        result
    }

    /// Submits a transfer of a whole session. Returns its ticket.
    fn submit(&self, session: u32, kind: TransferKind, level: Level, engine: &mut Engine) -> usize {
        self.submit_from(session, kind, level, engine, 0)
    }

    /// Same as `submit`, from token `first` on.
    fn submit_from(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        engine: &mut Engine,
        first: usize,
    ) -> usize {
        let cell_range = engine.cells_from(first);
        let mut state = self.state.lock();
        let number = state.core.submit_cell_range(session, kind, level, 0, cell_range);
        let ticket = state.tickets.len() + state.finished.len();
        let before = state.tickets.insert(number.expect("room for a transfer"), ticket);
        assert!(before.is_none(), "the number of a pending transfer was reused");
        state.collect();
        drop(state);
        self.changed.notify_all();
        ticket
    }

    /// Loop of a worker thread.
    fn serve(self: &Arc<Shared>, kinds: &[WorkerKind]) {
        let mut keeper = Asker(self.clone());
        loop {
            let take = |core: &mut StoreState| kinds.iter().find_map(|&kind| core.take(kind));
            let Some(mut work) = self.with(take) else {
                let mut state = self.state.lock();
                if state.stop {
                    return;
                }
                if !kinds.iter().any(|&kind| state.core.has_work(kind)) {
                    self.changed.wait(&mut state);
                }
                continue;
            };
            // SAFETY: the state waits for this work, and callers keep their memory until their
            // transfers have ended.
            let outcome = unsafe { self.tools.work(&mut work, Stream(0), &mut keeper) };
            self.with(|core| core.done(work, outcome, 0));
        }
    }

    /// Cancels a transfer, unless it has ended.
    fn cancel(&self, ticket: usize) {
        let mut state = self.state.lock();
        let number = state.tickets.iter().find(|(_, of)| **of == ticket).map(|(&number, _)| number);
        if let Some(number) = number {
            state.core.cancel(number, Status::Cancelled);
        }
        state.collect();
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until `holds` returns true.
    fn wait(&self, holds: impl Fn(&Running) -> bool) {
        let mut state = self.state.lock();
        while !holds(&state) {
            self.changed.wait(&mut state);
        }
    }

    /// Waits until a transfer has ended, and returns its result.
    fn end_of(&self, ticket: usize) -> Finished {
        self.wait(|state| state.finished.contains_key(&ticket));
        let state = self.state.lock();
        let one = &state.finished[&ticket];
        one.clone()
    }
}

impl Running {
    fn collect(&mut self) {
        let mut ended = Vec::new();
        self.core.finished(&mut ended);
        for one in ended {
            let ticket = self.tickets.remove(&one.number).expect("the transfer was submitted");
            assert!(self.finished.insert(ticket, one).is_none(), "one completion per transfer");
        }
    }
}

/// Content of a token in a plane. It depends on all tokens up to this one.
fn content(tokens: &[u32], plane: usize) -> Vec<u8> {
    let mut mark = plane as u32 + 1;
    let bytes = tokens.iter().flat_map(|&token| {
        mark = mark.wrapping_mul(0x9E37_79B1).wrapping_add(token);
        [(mark >> 13) as u8 & 0x3B; TOKEN]
    });
    bytes.collect()
}

/// The tensors of a caller: K and V of each layer.
struct Engine {
    planes: Vec<Vec<u8>>,
}

impl Engine {
    fn new(tokens: &[u32], is_full: bool) -> Engine {
        let plane = |n| match is_full {
            true => content(tokens, n),
            false => vec![0xA5; tokens.len() * TOKEN],
        };
        Engine { planes: (0..2 * LAYERS).map(plane).collect() }
    }

    /// All cells of a session from token `first` on.
    fn cells_from(&mut self, first: usize) -> CellRange {
        let count = self.planes[0].len() / TOKEN - first;
        let mut views = Vec::new();
        for layer in self.planes.chunks_mut(2) {
            let view = |plane: &mut Vec<u8>| {
                let address = plane.as_mut_ptr() as u64 + (first * TOKEN) as u64;
                PlaneView::canonical(address, count as u32, TOKEN as u64)
            };
            let [k, v] = layer else { unreachable!("two planes") };
            views.push(LayerViews { k: view(k), v: Some(view(v)) });
        }
        CellRange {
            first_token: first as u64,
            tokens: count as u64,
            first_layer: 0,
            layers: LAYERS,
            by_layer: false,
            wanted: Wanted::All,
            views: kvtier::base::sync::Arc::new(Views::from(views)),
            after: None,
        }
    }

    fn check(&self, tokens: &[u32], count: usize) {
        for (n, plane) in self.planes.iter().enumerate() {
            let right = content(tokens, n);
            assert!(plane[..count * TOKEN] == right[..count * TOKEN], "plane {n} is wrong");
        }
    }
}

/// A session with these tokens.
fn session(shared: &Shared, tokens: &[u32]) -> u32 {
    shared.with(|core| {
        let number = core.open_session(0, &SessionOpts::default()).expect("room");
        core.append(number, tokens).expect("room");
        number
    })
}

/// Calls of one caller: sessions that share a prefix, a put that is cancelled while another put
/// waits for its cells, a get concurrent with the put it depends on, and then more data than memory
/// holds. Returns whether the put was cancelled in time.
fn call(shared: &Shared) -> bool {
    let a: Vec<u32> = (0..14).collect();
    let b: Vec<u32> = (0..8).chain(50..56).collect();
    let c: Vec<u32> = (100..120).collect();
    let (first, second) = (session(shared, &a), session(shared, &b));
    let mut puts = [Engine::new(&a, true), Engine::new(&b, true)];
    let mut back = Engine::new(&a, false);
    let beside = shared.submit(second, TransferKind::Put, Level::Ram, &mut puts[1]);
    let put = shared.submit(first, TransferKind::Put, Level::Disk, &mut puts[0]);
    let get = shared.submit(first, TransferKind::Get, Level::Ram, &mut back);
    shared.cancel(beside);
    shared.with(|core| {
        core.pin(first, 0, 4, Pin { priority: 1, until_ns: u64::MAX }).expect("room for a pin");
    });
    let (put, beside, get) = (shared.end_of(put), shared.end_of(beside), shared.end_of(get));
    assert!(put.error.is_none(), "{put:?}");
    let status = beside.error.as_ref().map(|error| error.status());
    assert!(matches!(status, None | Some(Status::Cancelled)), "{beside:?}");
    // The get may have run before the put had begun some cells; those cells are misses.
    back.check(&a, get.tokens as usize);
    shared.with(|core| {
        core.close_session(first).expect("the session is open");
        core.truncate(second, 8).expect("the session is open");
        core.request_checkpoint();
    });
    let third = session(shared, &c);
    let mut last = Engine::new(&c, true);
    let put = shared.submit(third, TransferKind::Put, Level::Durable, &mut last);
    let again = session(shared, &a);
    let mut back = Engine::new(&a, false);
    let get = shared.submit(again, TransferKind::Get, Level::Ram, &mut back);
    let put = shared.end_of(put);
    assert!(put.error.is_none(), "{put:?}");
    let get = shared.end_of(get);
    // Full chunks were on disk, so they are found in whichever tier they are.
    assert!(get.tokens >= 12, "{get:?}");
    back.check(&a, get.tokens as usize);
    for session in [second, third, again] {
        shared.with(|core| core.close_session(session)).expect("the session is open");
    }
    status.is_some()
}

fn run() {
    let shared = Shared::open();
    let workers: Vec<_> = [
        &[WorkerKind::Copy, WorkerKind::Read][..],
        &[WorkerKind::Write, WorkerKind::Sync, WorkerKind::Upkeep],
    ]
    .into_iter()
    .map(|kinds| {
        let shared = shared.clone();
        thread::spawn(move || shared.serve(kinds))
    })
    .collect();
    let was_given_up = call(&shared);
    shared.with(StoreState::write_back_all);
    shared.wait(|state| state.core.is_quiet());
    shared.state.lock().stop = true;
    shared.changed.notify_all();
    workers.into_iter().for_each(|worker| worker.join().expect("no panic"));
    let state = shared.state.lock();
    assert_eq!((state.finished.len(), state.tickets.len()), (5, 0));
    state.core.check().expect("tables are consistent with each other and with the tiers");
    state.core.check_prefixes().expect("no chunk without its ancestors");
    let report = state.core.report();
    let stats = report.stats;
    let open = [stats.sessions, stats.transfers, stats.transfer_cells, stats.memory_waiters];
    assert_eq!(open, [0; 4]);
    let counters = report.stats;
    FROM_DISK.fetch_add(counters.disk_hit_cells, Ordering::Relaxed);
    GIVEN_UP.fetch_add(u64::from(was_given_up), Ordering::Relaxed);
    assert_eq!((counters.corrupt_cells, counters.failed_reads, counters.failed_writes), (0, 0, 0));
}

fn check(scheduler: impl Scheduler + 'static) {
    let mut config = shuttle::Config::new();
    // A state is some 50 KiB, and is moved when it is created.
    config.stack_size = 1 << 20;
    shuttle::Runner::new(scheduler, config).run(run);
    let seen = [&FROM_DISK, &GIVEN_UP].map(|count| count.load(Ordering::Relaxed));
    assert!(seen.iter().all(|&count| count > 0), "no schedule reached one of the cases: {seen:?}");
}

/// In every schedule: cells on disk are found, bytes are exact, no call waits forever, and the
/// tables are consistent at the end.
#[test]
fn workers_and_a_caller_agree() {
    check(RandomScheduler::new(ROUNDS));
}

/// The same for defects that need few thread switches.
#[test]
fn workers_and_a_caller_agree_with_few_switches() {
    check(PctScheduler::new(3, ROUNDS));
}

/// Totals over all schedules: cells moved by compaction, and checkpoints written.
static MOVED: AtomicU64 = AtomicU64::new(0);
static CHECKED: AtomicU64 = AtomicU64::new(0);
static CHECKPOINTS: AtomicU64 = AtomicU64::new(0);

/// Puts a whole session with these tokens, then closes the session.
fn store(shared: &Shared, tokens: &[u32], level: Level) -> Finished {
    store_from(shared, tokens, level, 0)
}

fn store_from(shared: &Shared, tokens: &[u32], level: Level, first: usize) -> Finished {
    let number = session(shared, tokens);
    let mut engine = Engine::new(tokens, true);
    let put = shared.submit_from(number, TransferKind::Put, level, &mut engine, first);
    let put = shared.end_of(put);
    shared.with(|core| core.close_session(number)).expect("the session is open");
    put
}

/// Stores cells that need not be durable, drops them, and requests checkpoints.
fn disturb(shared: &Shared) {
    for turn in 0..3u32 {
        let tokens: Vec<u32> = (1000 + 100 * turn..1012 + 100 * turn).collect();
        store(shared, &tokens, Level::Disk);
        let number = session(shared, &tokens);
        shared.with(|core| {
            let _ = core.drop_range(number, 0, 12);
            core.close_session(number).expect("the session is open");
            core.request_checkpoint();
        });
    }
}

fn power_fails() {
    let files = SimFiles::new(5, SimOpts::default());
    // No chunk has to be evicted from memory: the ancestors of a chunk stay until a put needs
    // memory.
    let config = Config { host_bytes: 256 << 10, high: 0.3, low: 0.3, ..Config::default() };
    let shared = Shared::on(&files, 14, config.clone());
    let kinds = [
        &[WorkerKind::Copy, WorkerKind::Read][..],
        &[WorkerKind::Write],
        &[WorkerKind::Sync],
        &[WorkerKind::Upkeep],
    ];
    let workers = kinds.into_iter().map(|kinds| {
        let shared = shared.clone();
        thread::spawn(move || shared.serve(kinds))
    });
    let workers: Vec<_> = workers.collect();
    let other = shared.clone();
    let other = thread::spawn(move || disturb(&other));
    let a: Vec<u32> = (0..12).collect();
    let b: Vec<u32> = (0..8).chain(50..58).collect();
    assert!(store(&shared, &b[..12], Level::Ram).error.is_none());
    let durable = [(&a, 0), (&b, 12)]
        .map(|(tokens, first)| store_from(&shared, tokens, Level::Durable, first).error.is_none());
    shared.with(|core| core.request_checkpoint());
    let last: Vec<u32> = (0..8).chain(80..84).collect();
    let durable = [durable[0], durable[1], store(&shared, &last, Level::Durable).error.is_none()];
    let stats = shared.tools.disk.as_ref().expect("a disk").stats();
    let image = files.durable().is_ok();
    // In one critical section: a chunk evicted from the disk after the count and before the power
    // failure is no longer durable.
    let (evicted, stopped) = shared.with(|core| (core.counters.evicted_chunks, files.crash()));
    assert!(image && stopped.is_ok());
    MOVED.fetch_add(stats.compacted_bytes, Ordering::Relaxed);
    CHECKPOINTS.fetch_add(stats.checkpoints, Ordering::Relaxed);
    // Threads that are at work find the files closed.
    other.join().expect("no panic");
    shared.state.lock().stop = true;
    shared.changed.notify_all();
    workers.into_iter().for_each(|worker| worker.join().expect("no panic"));
    let again = files.reopen();
    let shared = Shared::on(&again, 14, config);
    let mut keeper = Asker(shared.clone());
    for (tokens, lasts) in [&a, &b, &last].into_iter().zip(durable) {
        if !lasts || evicted > 0 {
            continue;
        }
        let number = session(&shared, tokens);
        let mut back = Engine::new(tokens, false);
        let get = shared.submit(number, TransferKind::Get, Level::Ram, &mut back);
        while let Some(mut work) =
            shared.with(|core| WorkerKind::ALL.into_iter().find_map(|kind| core.take(kind)))
        {
            // SAFETY: same as in `serve`.
            let outcome = unsafe { shared.tools.work(&mut work, Stream(0), &mut keeper) };
            shared.with(|core| core.done(work, outcome, 0));
        }
        let get = shared.end_of(get);
        CHECKED.fetch_add(1, Ordering::Relaxed);
        assert!(get.error.is_none(), "{tokens:?} is durable: {get:?}");
        back.check(tokens, get.tokens as usize);
        shared.with(|core| core.close_session(number)).expect("the session is open");
    }
}

/// The power fails at any time. Durable cells are found, whatever was dropped, moved and listed
/// meanwhile.
#[test]
fn durable_cells_survive_power_failure() {
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 20;
    shuttle::Runner::new(PctScheduler::new(3, ROUNDS / 4), config.clone()).run(power_fails);
    shuttle::Runner::new(RandomScheduler::new(ROUNDS / 4), config).run(power_fails);
    let seen = [&MOVED, &CHECKPOINTS, &CHECKED].map(|count| count.load(Ordering::Relaxed));
    assert!(seen.iter().all(|&count| count > 0), "no schedule reached one of the cases: {seen:?}");
    println!("{seen:?}");
}
