//! World of a simulation: a store, its disk, its callers, and their expectations.

use std::collections::BTreeMap;

use crate::disk::plan::{Fault, Plan};
use crate::disk::{SimFiles, SimOpts as DiskOpts};
use crate::sim::blocks::Blocks;
use crate::sim::content::Planes;
use crate::sim::device_sim::DeviceSim;
use crate::sim::engine_events::EngineEvents;
use crate::sim::extra_requests::ExtraRequests;
use crate::sim::lives::{FEW_CHUNKS, SEGMENT, device, open_store, plan};
use crate::sim::remote_sim::RemoteSim;
use crate::sim::{Failure, Report};
use kvtier::base::budget::Tier;
use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::sync::{Arc, Mutex};
use kvtier::device::{Event, Stream};
use kvtier::format::codec::Codec;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::store::executor::Tools;
use kvtier::store::state::disk_gc::{CheckpointWriter, Page};
use kvtier::store::state::tier_cache::Granularity;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::{Work, WorkerKind};
use kvtier::store::state::{Config, NamespaceOpts, StoreState, StoreStats, Write};
use kvtier::tier::disk::{CellAt, CellIndex, Spot};

pub(super) type Outcome<T> = std::result::Result<T, Failure>;

pub(super) const SPACES: u32 = 3;
pub(super) const MAX_SESSIONS: u64 = 12;
pub(super) const POISON: u8 = 0xA5;
const POLICIES: [&str; 6] = ["lru", "sieve", "horizon", "s3fifo", "gdsf", "arc"];

const WRITES: [Write; 4] = [Write::Through, Write::Back, Write::Never, Write::Behind];
/// Limit: work steps until a store must be idle.
const MAX_TURNS: u32 = 200_000;

pub(super) fn wrong(words: String) -> Failure {
    Failure { seed: 0, step: 0, words }
}

pub(super) struct Session {
    pub(super) number: u32,
    pub(super) namespace: u32,
    pub(super) tokens: Vec<u32>,
    pub(super) marks: Vec<u64>,
}

/// A transfer with the engine's memory.
pub(super) struct Submitted {
    pub(super) kind: TransferKind,
    pub(super) level: Level,
    pub(super) namespace: u32,
    pub(super) tokens: Vec<u32>,
    pub(super) marks: Vec<u64>,
    pub(super) first: usize,
    pub(super) first_layer: usize,
    pub(super) layers: usize,
    pub(super) by_layer: bool,
    pub(super) planes: Vec<Planes>,
    pub(super) parts_left: usize,
    /// The event that it waits for, and the content of its tensors after that.
    pub(super) after: Option<Event>,
    pub(super) hidden: Vec<Planes>,
}

/// A store's state behind the lock that workers and compaction share.
#[derive(Clone)]
pub(super) struct Shared(pub(super) Arc<Mutex<StoreState>>);

impl CheckpointWriter for Shared {
    fn page(&mut self, from: (u32, u32), page: &mut Page) -> Option<(u32, u32)> {
        self.0.lock().page(from, page)
    }
}

impl CellIndex for Shared {
    fn is_live(&mut self, cell: &CellAt) -> bool {
        self.0.lock().is_live(cell)
    }

    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool {
        self.0.lock().moved(cell, to)
    }

    fn lost(&mut self, cell: &CellAt) -> bool {
        self.0.lock().lost(cell)
    }
}

pub(super) struct World {
    pub(super) random: Random,
    /// Chooses the wanted chunks of a get.
    pub(super) picks: Random,
    pub(super) files: SimFiles,
    pub(super) disk_bytes: u64,
    pub(super) config: Config,
    pub(super) core: Shared,
    pub(super) tools: Tools,
    pub(super) clock: Clock,
    pub(super) layouts: Vec<Layout>,
    /// Codec of each namespace's recipe.
    pub(super) codecs: [Option<Codec>; SPACES as usize],
    pub(super) namespaces: Vec<u32>,
    pub(super) sessions: Vec<Session>,
    pub(super) submitted: BTreeMap<u32, Submitted>,
    /// Work that was taken and not executed.
    pub(super) pending: Vec<Work>,
    /// Durable chunks and layers: the tokens up to the chunk's end, by its hash.
    pub(super) durable_cells: BTreeMap<(u32, u64, usize), Vec<u32>>,
    /// Durable data may be missing because of faults or eviction.
    pub(super) forgets: bool,
    /// The disk may have lied: durable data may be missing, and removed data may return.
    pub(super) is_rotten: bool,
    /// A sync failed and only the process died. Unsynced data is still visible, no later sync makes
    /// it durable, and the next life cannot know.
    pub(super) has_unsynced: bool,
    pub(super) extra_requests: Option<ExtraRequests>,
    pub(super) blocks: Option<Blocks>,
    pub(super) device_sim: Option<DeviceSim>,
    pub(super) engine_events: Option<EngineEvents>,
    pub(super) remote_sim: Option<RemoteSim>,
    pub(super) report: Report,
}

fn layouts() -> Outcome<Vec<Layout>> {
    let gqa = Group::gqa(0..3, 2, 40, Dtype::F16)?;
    let latent = Group::mla_latent([0, 2], 600, Dtype::Bf16)?;
    let window = Group::gqa([1], 1, 64, Dtype::F32)?.window(8);
    let state = Group::state([1], 5000, Dtype::F32);
    let full = Group::gqa([0], 4, 128, Dtype::F16)?;
    Ok(vec![
        Layout::new(4, vec![gqa])?,
        Layout::new(8, vec![latent, window])?,
        Layout::new(4, vec![full, state])?,
    ])
}

/// Granularity of eviction, and whether single cells are dropped.
fn granularity(seed: u64) -> (Granularity, bool) {
    match Random::new(seed ^ 0x6AA1).below(6) {
        0 => (Granularity::Cell, false),
        1 => (Granularity::Cell, true),
        2 => (Granularity::Session, false),
        _ => (Granularity::Chunk, false),
    }
}

/// Codec of the store and of its namespaces.
fn codecs(seed: u64) -> (Codec, [Option<Codec>; SPACES as usize]) {
    let mut random = Random::new(seed ^ 0xC0DEC);
    let mut one_of = |all: &[Option<Codec>]| all[random.below(all.len() as u64) as usize];
    let (none, lz4, int8) = (Some(Codec::None), Some(Codec::Lz4), Some(Codec::Int8));
    let store = one_of(&[none, lz4]).unwrap_or_default();
    (store, [None, one_of(&[None, lz4, int8, int8]), one_of(&[None, none, lz4])])
}

/// Number of chunks that the store removed on its own: by eviction, at their end, or for a quota.
pub(super) fn evictions(counters: &StoreStats) -> u64 {
    counters.evicted_chunks
        + counters.evicted_parts
        + counters.expired_chunks
        + counters.quota_evicted_chunks
}

/// Quotas of host memory and of the disk.
fn quota(seed: u64) -> [u64; 2] {
    match seed % 5 {
        3 => [(1 + seed / 5 % 7) << 16, [0, 96 << 10, 1 << 20][seed as usize / 35 % 3]],
        _ => [0; 2],
    }
}

/// Configuration of the store.
fn config(
    seed: u64,
    random: &mut Random,
    (device_sim, remote_sim): (&Option<DeviceSim>, &Option<RemoteSim>),
    codec: Codec,
) -> Config {
    let (granularity, drop_cells) = granularity(seed);
    Config {
        device: device_sim.as_ref().map(DeviceSim::config).unwrap_or_default(),
        remote: remote_sim.as_ref().map(RemoteSim::config),
        host_bytes: (4 + random.below(40)) << 16,
        host_policy: POLICIES[random.below(6) as usize].into(),
        disk_policy: POLICIES[random.below(6) as usize].into(),
        write: match WRITES[random.below(WRITES.len() as u64) as usize] {
            // Chunks that leave memory and are on no disk are for the remote.
            _ if remote_sim.is_some() && seed % 2 == 0 => Write::Never,
            write => write,
        },
        write_age_ns: [0, 1_000_000, 1_000_000_000][seed as usize % 3],
        unwritten_bytes: [0, 64 << 10, u64::MAX][seed as usize / 3 % 3],
        admission: "all".into(),
        pins: [0.5, 1.0, 0.05][seed as usize / 7 % 3],
        quota: quota(seed),
        granularity,
        drop_cells,
        codec,
        max_chunks: [4096, FEW_CHUNKS][random.below(2) as usize],
        max_sessions: 32,
        max_transfers: 64,
        max_jobs: 16 + random.below(200) as u32,
        events: 256,
        batch_cells: 1 + random.below(16) as usize,
        batch_bytes: 1 << 20,
        copy_bytes: [1 << 20, 2048, 600][seed as usize / 5 % 3],
        ..Config::default()
    }
}

impl World {
    pub fn open(seed: u64) -> Outcome<World> {
        let mut random = Random::new(seed);
        let plan = plan(&mut random);
        let opts =
            DiskOpts { capacity_bytes: 64 << 20, plan: Plan::default(), ..Default::default() };
        let files = SimFiles::new(random.draw(), opts);
        let disk_bytes = (8 + random.below(40)) * SEGMENT + 400_000;
        let (codec, codecs) = codecs(seed);
        let device_sim = DeviceSim::of(seed);
        let clock = Clock::manual(1);
        let remote_sim = RemoteSim::of(seed, &clock);
        let config = config(seed, &mut random, (&device_sim, &remote_sim), codec);
        let device = match &device_sim {
            Some(device_sim) => device_sim.device(&clock)?,
            None => device(seed, &clock)?,
        };
        let (core, mut tools, _) = open_store(&files, &config, disk_bytes, &clock, device)?;
        tools.remote = remote_sim.as_ref().map(|remote_sim| remote_sim.executor(&clock));
        let forgets = plan.per_million[Fault::LostSync as usize] > 0
            || plan.per_million[Fault::BitRot as usize] > 0
            || plan.per_million[Fault::Misdirected as usize] > 0;
        files.set_plan(plan);
        let engine_events = EngineEvents::of(seed, &tools);
        let mut world = World {
            random,
            picks: Random::new(seed ^ 0x91C5),
            files,
            disk_bytes,
            config,
            core,
            tools,
            clock,
            layouts: layouts()?,
            codecs,
            namespaces: Vec::new(),
            sessions: Vec::new(),
            submitted: BTreeMap::new(),
            pending: Vec::new(),
            durable_cells: BTreeMap::new(),
            forgets,
            is_rotten: forgets,
            has_unsynced: false,
            extra_requests: ExtraRequests::of(seed),
            blocks: Blocks::of(seed),
            device_sim,
            engine_events,
            remote_sim,
            report: Report::default(),
        };
        world.open_namespaces()?;
        Ok(world)
    }

    pub(super) fn open_namespaces(&mut self) -> Outcome<()> {
        self.namespaces.clear();
        for (i, layout) in self.layouts.iter().enumerate() {
            let key = Key([i as u8 + 1; 32]);
            let opts = NamespaceOpts { key, layout: layout.clone(), holes: i == 1 };
            let mut core = self.core.0.lock();
            let namespace = core.open_namespace(&opts)?;
            core.set_codec(namespace, self.codecs[i]);
            self.namespaces.push(namespace);
        }
        Ok(())
    }

    /// One random step.
    pub fn step(&mut self) -> Outcome<()> {
        let choice = self.random.below(100);
        match choice {
            0..=9 => self.open_session()?,
            10..=19 => self.append()?,
            20..=34 => self.put()?,
            35..=46 => self.get()?,
            47..=48 => self.close_session()?,
            49..=50 => self.truncate()?,
            51 => self.fork()?,
            52 => self.pin()?,
            53 => self.cancel(),
            54 => {
                self.clock.advance(self.random.below(3_000_000_000));
                self.core.0.lock().tick(self.clock.now_ns());
            }
            55 if self.random.coin() => self.core.0.lock().request_checkpoint(),
            55 if self.random.coin() => self.core.0.lock().write_back_all(),
            55 => self.change_limits()?,
            56 if self.random.below(4) == 0 => self.crash()?,
            57 if self.random.below(4) == 0 => self.drain()?,
            58..=75 => self.take(),
            _ => self.work(),
        }
        self.extra_request()?;
        self.device_step()?;
        self.block_step()?;
        self.remote_step()?;
        self.step_engine_events()?;
        self.collect()?;
        self.report.mark =
            Random::new(self.report.mark ^ choice ^ self.pending.len() as u64).draw();
        if self.files.is_closed() {
            self.restart(false)?; // planned power failure
        }
        Ok(())
    }

    /// Changes limits of memory and tiers, or a policy.
    fn change_limits(&mut self) -> Outcome<()> {
        let mut core = self.core.0.lock();
        let host_bytes = (4 + self.random.below(40)) << 16;
        let disk_bytes = (8 + self.random.below(40)) * SEGMENT + 400_000;
        let policy = POLICIES[self.random.below(POLICIES.len() as u64) as usize];
        match self.random.below(5) {
            0 => core.set_host_bytes(host_bytes)?,
            1 => core.set_disk_bytes(disk_bytes)?,
            2 => core.set_policy(Tier::Host, policy)?,
            3 => core.set_policy(Tier::Disk, policy)?,
            _ => {
                let bytes = self.random.below(self.config.host_bytes);
                core.shrink(bytes);
            }
        }
        Ok(())
    }

    /// Takes work of some kind, to be executed later.
    fn take(&mut self) {
        // The last kinds are for stores with a remote.
        let kinds = if self.remote_sim.is_some() {
            WorkerKind::ALL.len()
        } else {
            WorkerKind::Fetch as usize
        };
        let kind = WorkerKind::ALL[self.random.below(kinds as u64) as usize];
        let work = self.core.0.lock().take(kind);
        self.pending.extend(work);
    }

    /// Executes some taken work.
    fn work(&mut self) {
        let count = self.pending.len() as u64;
        if count == 0 {
            return self.take();
        }
        let at = self.random.below(count) as usize;
        let mut work = self.pending.swap_remove(at);
        let mut keeper = self.core.clone();
        let began_ns = self.clock.now_ns();
        // SAFETY: the state waits for this work; views are of memory in `submitted`, kept until the
        // last part of the transfer was reported.
        let outcome = unsafe { self.tools.work(&mut work, Stream(0), &mut keeper) };
        self.clock.advance(self.files.take_cost_ns().min(1 << 30));
        let elapsed_ns = self.clock.now_ns() - began_ns;
        let mut core = self.core.0.lock();
        core.tick(self.clock.now_ns());
        core.done(work, outcome, elapsed_ns);
    }

    /// Executes all work.
    pub(super) fn drain(&mut self) -> Outcome<()> {
        self.begin_all_waiting();
        self.signal_all_events()?;
        for _ in 0..MAX_TURNS {
            for kind in WorkerKind::ALL {
                let work = self.core.0.lock().take(kind);
                self.pending.extend(work);
            }
            let has_engine_work = self.drain_engine_events();
            if self.pending.is_empty()
                && !has_engine_work
                && WorkerKind::ALL.iter().all(|&h| !self.core.0.lock().has_work(h))
            {
                self.collect()?;
                let core = self.core.0.lock();
                let none_left =
                    self.submitted.is_empty() && self.blocks.as_ref().is_none_or(Blocks::is_idle);
                if !core.is_idle() || !none_left {
                    return Err(wrong(format!(
                        "{} transfers are stuck: {}",
                        self.submitted.len(),
                        core.describe_waiters()
                    )));
                }
                core.check()?;
                drop(core);
                self.forget_events()?;
                self.report.audited += self.audit()?;
                let core = self.core.0.lock();
                if self.all_went_well(&core) {
                    core.check_prefixes()?;
                }
                return Ok(());
            }
            self.work();
            self.collect()?;
            if self.files.is_closed() {
                return Ok(());
            }
        }
        Err(wrong(format!(
            "the store never becomes idle: {}",
            self.core.0.lock().describe_waiters()
        )))
    }

    /// Whether nothing prevented writes to the disk or evicted from it.
    fn all_went_well(&self, core: &StoreState) -> bool {
        let counters = core.counters;
        let failures = counters.failed_writes + counters.disk_full_chunks + counters.corrupt_cells;
        let stats = self.tools.disk.as_ref().map(|disk| disk.stats()).unwrap_or_default();
        failures + evictions(&counters) + stats.refused + stats.failed_syncs == 0
            && self.config.write != Write::Never
    }

    /// The end: executes all work, and restarts.
    pub fn end(mut self) -> Outcome<Report> {
        self.drain()?;
        if self.files.is_closed() {
            self.restart(false)?;
        }
        self.restart(true)?;
        Ok(self.report)
    }
}
