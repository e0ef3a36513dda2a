//! A store in one thread, with random puts and gets of sessions.

use kvtier_testkit::fixtures::shared_state;

use std::collections::BTreeSet;

use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::status::{Result, Status};
use kvtier::base::sync::{Arc, Mutex};
use kvtier::device::Stream;
use kvtier::device::host::Host;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout, Rule};
use kvtier::store::executor::Tools;
use kvtier::store::state::blocks::BlockTransfer;
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::work::{Work, WorkerKind};
use kvtier::store::state::{
    CellRange, Config, Level, NamespaceOpts, SessionOpts, StoreState, TransferKind, Wanted,
};
use kvtier::tier::disk::{DiskTier, Options};
use kvtier_testkit::disk::{SimFiles, SimOpts};

use shared_state::SharedState;

const SEGMENT: u64 = 32 * 4096;

/// A session and its expected state.
pub struct Session {
    pub number: u32,
    pub namespace: usize,
    pub tokens: Vec<u32>,
}

/// A namespace.
pub struct Namespace {
    pub number: u32,
    pub key: Key,
    pub layout: Layout,
    pub holes: bool,
}

pub struct World {
    pub core: SharedState,
    pub namespaces: Vec<Namespace>,
    pub sessions: Vec<Session>,
    pub random: Random,
    /// Cells of full chunks whose put has ended well: namespace, prefix, layer.
    pub stored: BTreeSet<(usize, Vec<u32>, usize)>,
    pub batch_cells: usize,
    /// Whether gets request needed cells only.
    pub wanted: Wanted,
    /// Number of transfers that missed cells.
    pub missed: u32,
    tools: Tools,
    clock: Clock,
    pending: Vec<Work>,
    /// The engine's tensors. Their content does not matter here.
    memory: Vec<u64>,
    asked: Vec<(u32, usize, Vec<u32>, std::ops::Range<usize>)>,
}

pub fn layouts() -> Vec<Layout> {
    let gqa = Group::gqa(0..3, 2, 40, Dtype::F16).unwrap();
    let latent = Group::mla_latent([0, 2], 600, Dtype::Bf16).unwrap();
    let window = Group::gqa([1], 1, 64, Dtype::F32).unwrap().window(11);
    let state = Group::state([1], 5000, Dtype::F32);
    let full = Group::gqa([0], 4, 128, Dtype::F16).unwrap();
    let narrow = Group::gqa([0, 1], 4, 64, Dtype::F16).unwrap().window(6);
    vec![
        Layout::new(4, vec![gqa]).unwrap(),
        Layout::new(8, vec![latent, window]).unwrap(),
        Layout::new(4, vec![full, state]).unwrap(),
        Layout::new(4, vec![narrow]).unwrap(),
    ]
}

impl World {
    /// Each layout in two namespaces, one of which allows holes.
    pub fn new(seed: u64, host_bytes: u64, disk_bytes: u64) -> World {
        World::with(seed, host_bytes, disk_bytes, "all")
    }

    /// Same as `new`, with an admission rule for the disk.
    pub fn with(seed: u64, host_bytes: u64, disk_bytes: u64, admission: &str) -> World {
        let admission = admission.into();
        World::of(seed, disk_bytes, Config { host_bytes, admission, ..Config::default() })
    }

    /// Same as `new`, with other parameters.
    pub fn of(seed: u64, disk_bytes: u64, config: Config) -> World {
        let mut random = Random::new(seed);
        let config = Config {
            host_policy: "lru".into(),
            max_chunks: 8192,
            max_sessions: 32,
            max_transfers: 64,
            max_jobs: 64 + random.below(200) as u32,
            events: 256,
            batch_cells: 1 + random.below(8) as usize,
            batch_bytes: 1 << 20,
            ..config
        };
        let batch_cells = config.batch_cells;
        let clock = Clock::manual(1);
        let opts = SimOpts { capacity_bytes: 256 << 20, ..Default::default() };
        let files = SimFiles::new(random.draw(), opts);
        let disk = (disk_bytes > 0).then(|| {
            let options = Options {
                segment_bytes: SEGMENT,
                clock: clock.clone(),
                ..Options::new(disk_bytes, [7; 16])
            };
            Arc::new(DiskTier::open(Arc::new(files), options).unwrap().0)
        });
        let mut core = StoreState::new(config, None, disk.clone()).unwrap();
        core.tick(1);
        let mut namespaces = Vec::new();
        for (i, layout) in layouts().into_iter().enumerate() {
            for holes in [false, true] {
                let key = Key([2 * i as u8 + u8::from(holes) + 1; 32]);
                let opts = NamespaceOpts { key, layout: layout.clone(), holes };
                let number = core.open_namespace(&opts).unwrap();
                namespaces.push(Namespace { number, key, layout: layout.clone(), holes });
            }
        }
        World {
            core: SharedState(Arc::new(Mutex::new(core))),
            namespaces,
            sessions: Vec::new(),
            random,
            stored: BTreeSet::new(),
            batch_cells,
            wanted: Wanted::All,
            missed: 0,
            tools: Tools { device: Arc::new(Host::default()), disk, remote: None },
            clock,
            pending: Vec::new(),
            memory: vec![0; 1 << 19],
            asked: Vec::new(),
        }
    }

    /// Runs one random step.
    pub fn step(&mut self) {
        match self.random.below(20) {
            0..=1 => self.open_session(),
            2..=3 => self.append(),
            4..=6 => self.submit(TransferKind::Put),
            7..=8 => self.submit(TransferKind::Get),
            9 => self.submit(TransferKind::Prefetch),
            10 if self.sessions.len() > 6 => {
                let at = self.random.below(self.sessions.len() as u64) as usize;
                let session = self.sessions.swap_remove(at);
                self.core.0.lock().close_session(session.number).unwrap();
            }
            10..=15 => self.take(),
            _ => self.work(0),
        }
        self.collect();
    }

    pub fn open_session(&mut self) {
        if self.sessions.len() < 12 {
            let namespace = self.random.below(self.namespaces.len() as u64) as usize;
            let tenant = namespace as u32 % 3;
            self.open(namespace, tenant);
            self.append();
        }
    }

    /// Opens a session without tokens.
    pub fn open(&mut self, namespace: usize, tenant: u32) -> usize {
        self.open_with(namespace, &SessionOpts { tenant, ..SessionOpts::default() })
    }

    /// Opens a session without tokens.
    pub fn open_with(&mut self, namespace: usize, opts: &SessionOpts<'_>) -> usize {
        let number =
            self.core.0.lock().open_session(self.namespaces[namespace].number, opts).unwrap();
        self.sessions.push(Session { number, namespace, tokens: Vec::new() });
        self.sessions.len() - 1
    }

    fn append(&mut self) {
        if self.sessions.is_empty() {
            return;
        }
        let at = self.random.below(self.sessions.len() as u64) as usize;
        let count = 1 + self.random.below(24) as usize;
        let document = match self.sessions[at].tokens.first() {
            Some(&first) => first / 1000,
            None => self.random.below(3) as u32,
        };
        self.grow(at, document, count);
    }

    /// Appends tokens of a document to a session.
    pub fn grow(&mut self, at: usize, document: u32, count: usize) {
        let session = &mut self.sessions[at];
        let from = session.tokens.len();
        let tokens: Vec<u32> = (from..from + count).map(|i| document * 1000 + i as u32).collect();
        self.core.0.lock().append(session.number, &tokens).unwrap();
        session.tokens.extend(tokens);
    }

    fn submit(&mut self, kind: TransferKind) {
        if self.sessions.is_empty() {
            return;
        }
        let at = self.random.below(self.sessions.len() as u64) as usize;
        let session = &self.sessions[at];
        let layout = &self.namespaces[session.namespace].layout;
        let (each, all) = (layout.chunk_tokens() as usize, session.tokens.len());
        let first = self.random.below((all / each + 1) as u64) as usize / 3 * each;
        let tokens = match self.random.below(3) {
            0 => all - first,
            1 => (all - first) / each * each,
            _ => (1 + self.random.below(4) as usize) * each,
        };
        let layers = match self.random.below(5) {
            0 => {
                let layer = self.random.below(layout.layers() as u64) as usize;
                layer..layer + 1
            }
            _ => 0..layout.layers(),
        };
        let lane = self.random.below(3) as usize;
        if first < all && tokens > 0 && first + tokens <= all {
            self.submit_part(at, kind, lane, first, tokens, layers);
        }
    }

    /// Submits a transfer. Returns false when the store has too many transfers.
    pub fn submit_part(
        &mut self,
        at: usize,
        kind: TransferKind,
        lane: usize,
        first: usize,
        tokens: usize,
        layers: std::ops::Range<usize>,
    ) -> bool {
        let begun = self.try_part(at, kind, lane, first, tokens, layers);
        if let Err(error) = &begun {
            assert!(matches!(error.status(), Status::Again | Status::Limit), "{error}");
        }
        begun.is_ok()
    }

    /// Submits a transfer.
    pub fn try_part(
        &mut self,
        at: usize,
        kind: TransferKind,
        lane: usize,
        first: usize,
        tokens: usize,
        layers: std::ops::Range<usize>,
    ) -> Result<()> {
        let session = &self.sessions[at];
        let layout = &self.namespaces[session.namespace].layout;
        let views = layers.clone().map(|layer| self.views(layout, layer, tokens));
        let cell_range = CellRange {
            first_token: first as u64,
            tokens: tokens as u64,
            first_layer: layers.start,
            layers: layers.len(),
            by_layer: false,
            wanted: self.wanted.clone(),
            views: Arc::new(Views::from(views.collect::<Vec<_>>())),
            after: None,
        };
        let mut core = self.core.0.lock();
        let number = core.submit_cell_range(session.number, kind, Level::Ram, lane, cell_range)?;
        // The first chunk is identified by its own prefix, and each later chunk by a longer one.
        let tokens = session.tokens[..first + tokens].to_vec();
        let from = if kind == TransferKind::Put { first } else { tokens.len() };
        let asked = [&[from as u32], &tokens[..]].concat();
        self.asked.push((number, session.namespace, asked, layers));
        Ok(())
    }

    /// Submits a transfer of blocks in all layers.
    pub fn submit_blocks(&mut self, at: usize, kind: TransferKind, keys: &[Key]) {
        let session = &self.sessions[at];
        let layout = &self.namespaces[session.namespace].layout;
        let tokens = keys.len() * layout.chunk_tokens() as usize;
        let views = (0..layout.layers()).map(|layer| self.views(layout, layer, tokens));
        let blocks = BlockTransfer {
            keys: keys.to_vec(),
            first_layer: 0,
            layers: layout.layers(),
            views: Arc::new(Views::from(views.collect::<Vec<_>>())),
            after: None,
        };
        let terms = (kind, Level::Ram, 0);
        let number = self.core.0.lock().submit_blocks(session.number, terms, blocks).unwrap();
        self.asked.push((number, session.namespace, vec![0], 0..0));
    }

    /// Cancels the transfer that was submitted last.
    pub fn cancel_last(&mut self) {
        let number = self.asked.last().expect("a transfer").0;
        self.core.0.lock().cancel(number, Status::Cancelled);
        self.collect();
    }

    fn views(&self, layout: &Layout, layer: usize, tokens: usize) -> LayerViews {
        let group = layout.group(layer).unwrap();
        let each = layout.chunk_tokens() as usize;
        let address = self.memory.as_ptr() as u64;
        let view = |count: usize, token_bytes: u64| {
            assert!(count as u64 * token_bytes <= self.memory.len() as u64 * 8);
            PlaneView::canonical(address, count as u32, token_bytes)
        };
        if group.rule == Rule::State {
            return LayerViews { k: view(tokens.div_ceil(each), group.state_bytes), v: None };
        }
        let v = (group.v_bytes > 0).then(|| view(tokens, group.v_bytes));
        LayerViews { k: view(tokens, group.k_bytes), v }
    }

    /// Takes work without running it.
    pub fn take(&mut self) {
        let kind = WorkerKind::ALL[self.random.below(WorkerKind::ALL.len() as u64) as usize];
        let work = self.core.0.lock().take(kind);
        self.pending.extend(work);
    }

    /// Runs some work, with `elapsed_ns` as its time.
    pub fn work(&mut self, elapsed_ns: u64) {
        if self.pending.is_empty() {
            return self.take();
        }
        let at = self.random.below(self.pending.len() as u64) as usize;
        let work = self.pending.swap_remove(at);
        self.carry_out(work, elapsed_ns);
    }

    pub fn carry_out(&mut self, mut work: Work, elapsed_ns: u64) {
        let mut keeper = self.core.clone();
        // SAFETY: the state waits for this work. All views are of `memory`, which only this thread
        // uses.
        let outcome = unsafe { self.tools.work(&mut work, Stream(0), &mut keeper) };
        self.clock.advance(1000);
        let mut core = self.core.0.lock();
        core.tick(self.clock.now_ns());
        core.done(work, outcome, elapsed_ns);
    }

    fn collect(&mut self) {
        let mut finished = Vec::new();
        self.core.0.lock().finished(&mut finished);
        for one in finished {
            let at = self.asked.iter().position(|asked| asked.0 == one.number).unwrap();
            let (_, namespace, tokens, layers) = self.asked.swap_remove(at);
            let (from, tokens) = (tokens[0] as usize, &tokens[1..]);
            let each = self.namespaces[namespace].layout.chunk_tokens() as usize;
            if let Some(error) = one.error {
                self.missed += u32::from(error.status() == Status::NotFound);
                continue;
            }
            for end in (from + each..=tokens.len()).step_by(each) {
                for layer in layers.clone() {
                    self.stored.insert((namespace, tokens[..end].to_vec(), layer));
                }
            }
        }
    }

    /// Runs all work.
    pub fn rest(&mut self, elapsed_ns: u64) {
        for _ in 0..100_000 {
            for kind in WorkerKind::ALL {
                let work = self.core.0.lock().take(kind);
                self.pending.extend(work);
            }
            self.collect();
            let core = self.core.0.lock();
            if self.pending.is_empty() && WorkerKind::ALL.iter().all(|&kind| !core.has_work(kind)) {
                assert!(core.is_idle(), "{}", core.describe_waiters());
                return;
            }
            drop(core);
            self.work(elapsed_ns);
        }
        panic!("the store never becomes idle");
    }

    /// Runs all work, one batch at a time, with `read_ns` as the time of each read. Returns the
    /// number of reads.
    pub fn rest_reading(&mut self, read_ns: u64) -> u64 {
        let mut reads = 0;
        loop {
            let mut idle = true;
            for kind in WorkerKind::ALL {
                let Some(work) = self.core.0.lock().take(kind) else { continue };
                let is_read = matches!(work, Work::Reads(_));
                reads += u64::from(is_read);
                self.carry_out(work, if is_read { read_ns } else { 0 });
                idle = false;
            }
            self.collect();
            if idle {
                return reads;
            }
        }
    }

    /// A prompt: the beginning of a document, then other tokens.
    pub fn prompt(&mut self) -> Vec<u32> {
        let document = self.random.below(3) as u32;
        let (known, more) = (self.random.below(90), self.random.below(20));
        let known = (0..known as u32).map(|i| document * 1000 + i);
        known.chain((0..more as u32).map(|i| 900_000 + i)).collect()
    }
}
