//! The world of a simulation: a store, its disk, its callers, and what they expect.

use std::collections::BTreeMap;

use crate::base::clock::Clock;
use crate::base::sync::{Arc, Mutex};
use crate::device::Stream;
use crate::device::host::Host;
use crate::io::simulated::plan::{Fault, Plan};
use crate::io::simulated::random::Random;
use crate::io::simulated::{SimFiles, SimOpts as DiskOpts};
use crate::kv::core::books::{Books, Page};
use crate::kv::core::moves::{Deed, Level};
use crate::kv::core::views::Views;
use crate::kv::core::work::{Hands, Work};
use crate::kv::core::{Config, Core, Counters, Rectangle, SessionOpts, SpaceOpts, Write};
use crate::kv::hands::Tools;
use crate::kv::sim::callers::views_of;
use crate::kv::sim::content::{Planes, prefixes};
use crate::kv::sim::{Failure, Report};
use crate::meta::dtype::Dtype;
use crate::meta::key::Key;
use crate::meta::layout::{Group, Layout};
use crate::tier::disk::{CellAt, DiskTier, Keeper, Options, Spot};

pub(super) type Outcome<T> = std::result::Result<T, Failure>;

pub(super) const SPACES: u32 = 3;
pub(super) const MOST_SESSIONS: u64 = 12;
pub(super) const POISON: u8 = 0xA5;
/// Turns of work after which a store that never rests is a defect.
const MOST_TURNS: u32 = 200_000;

pub(super) fn wrong(words: String) -> Failure {
    Failure { seed: 0, step: 0, words }
}

pub(super) struct Session {
    pub(super) number: u32,
    pub(super) space: u32,
    pub(super) tokens: Vec<u32>,
    pub(super) marks: Vec<u64>,
}

/// A move, with the engine's memory.
pub(super) struct Asked {
    pub(super) deed: Deed,
    pub(super) level: Level,
    pub(super) space: u32,
    pub(super) tokens: Vec<u32>,
    pub(super) marks: Vec<u64>,
    pub(super) first: usize,
    pub(super) first_layer: usize,
    pub(super) layers: usize,
    pub(super) by_layer: bool,
    pub(super) planes: Vec<Planes>,
    pub(super) parts_left: usize,
}

/// A store's core behind the lock that hands and keepers share.
#[derive(Clone)]
pub(super) struct Shared(pub(super) Arc<Mutex<Core>>);

impl Books for Shared {
    fn page(&mut self, from: (u32, u32), page: &mut Page) -> Option<(u32, u32)> {
        self.0.lock().page(from, page)
    }
}

impl Keeper for Shared {
    fn wants(&mut self, cell: &CellAt) -> bool {
        self.0.lock().wants(cell)
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
    pub(super) files: SimFiles,
    pub(super) disk_bytes: u64,
    pub(super) config: Config,
    pub(super) core: Shared,
    pub(super) tools: Tools,
    pub(super) clock: Clock,
    pub(super) layouts: Vec<Layout>,
    pub(super) spaces: Vec<u32>,
    pub(super) sessions: Vec<Session>,
    pub(super) asked: BTreeMap<u32, Asked>,
    /// Taken, and not yet carried out.
    pub(super) pending: Vec<Work>,
    /// Chunks and layers that last: the tokens up to the chunk's end, by its mark.
    pub(super) lasting: BTreeMap<(u32, u64, usize), Vec<u32>>,
    /// Faults that may cost what lasts, or the store's own choice of who leaves.
    pub(super) forgets: bool,
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

impl World {
    pub fn open(seed: u64) -> Outcome<World> {
        let mut random = Random::new(seed);
        let plan = plan(&mut random);
        let opts =
            DiskOpts { capacity_bytes: 64 << 20, plan: Plan::default(), ..Default::default() };
        let files = SimFiles::new(random.draw(), opts);
        let disk_bytes = (8 + random.below(40)) * SEGMENT + 400_000;
        let policies = ["lru", "sieve", "horizon", "s3fifo", "gdsf", "arc"];
        let config = Config {
            host_bytes: (4 + random.below(40)) << 16,
            host_policy: policies[random.below(6) as usize].into(),
            disk_policy: policies[random.below(6) as usize].into(),
            write: [Write::Through, Write::Back, Write::Never][random.below(3) as usize],
            admission: "all".into(),
            max_chunks: [4096, FEW_CHUNKS][random.below(2) as usize],
            max_sessions: 32,
            max_moves: 64,
            max_jobs: 16 + random.below(200) as u32,
            events: 256,
            batch_cells: 1 + random.below(16) as usize,
            batch_bytes: 1 << 20,
            ..Config::default()
        };
        let clock = Clock::manual(1);
        let (core, tools, _) = open_store(&files, &config, disk_bytes, &clock)?;
        let forgets = plan.per_million[Fault::LostSync as usize] > 0
            || plan.per_million[Fault::BitRot as usize] > 0
            || plan.per_million[Fault::Misdirected as usize] > 0;
        files.set_plan(plan);
        let mut world = World {
            random,
            files,
            disk_bytes,
            config,
            core,
            tools,
            clock,
            layouts: layouts()?,
            spaces: Vec::new(),
            sessions: Vec::new(),
            asked: BTreeMap::new(),
            pending: Vec::new(),
            lasting: BTreeMap::new(),
            forgets,
            report: Report::default(),
        };
        world.open_spaces()?;
        Ok(world)
    }

    fn open_spaces(&mut self) -> Outcome<()> {
        self.spaces.clear();
        for (i, layout) in self.layouts.iter().enumerate() {
            let key = Key([i as u8 + 1; 32]);
            let opts = SpaceOpts { key, layout: layout.clone(), holes: i == 1 };
            let space = self.core.0.lock().open_space(&opts)?;
            self.spaces.push(space);
        }
        Ok(())
    }

    /// One thing happens.
    pub fn step(&mut self) -> Outcome<()> {
        let what = self.random.below(100);
        match what {
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
            55 if self.random.coin() => self.core.0.lock().ask_for_checkpoint(),
            55 if self.random.coin() => self.core.0.lock().write_all_down(),
            56 if self.random.below(4) == 0 => self.crash()?,
            57 if self.random.below(4) == 0 => self.rest()?,
            58..=75 => self.take(),
            _ => self.work(),
        }
        self.collect()?;
        self.report.mark = Random::new(self.report.mark ^ what ^ self.pending.len() as u64).draw();
        if self.files.is_closed() {
            self.restart(false)?; // the plan had the power fail
        }
        Ok(())
    }

    /// Some hands take work, and will carry it out later.
    fn take(&mut self) {
        let hands = Hands::ALL[self.random.below(Hands::ALL.len() as u64) as usize];
        let work = self.core.0.lock().take(hands);
        self.pending.extend(work);
    }

    /// Some work that was taken is carried out.
    fn work(&mut self) {
        let count = self.pending.len() as u64;
        if count == 0 {
            return self.take();
        }
        let at = self.random.below(count) as usize;
        let mut work = self.pending.swap_remove(at);
        let mut keeper = self.core.clone();
        // SAFETY: the core waits for this work; views are of memory in `asked`, kept
        // until the last part of its move was reported.
        let outcome = unsafe { self.tools.work(&mut work, Stream(0), &mut keeper) };
        let elapsed_ns = self.files.take_cost_ns().min(1 << 30);
        self.clock.advance(elapsed_ns);
        let mut core = self.core.0.lock();
        core.tick(self.clock.now_ns());
        core.done(work, outcome, elapsed_ns);
    }

    /// Carries everything out.
    fn rest(&mut self) -> Outcome<()> {
        for _ in 0..MOST_TURNS {
            for hands in Hands::ALL {
                let work = self.core.0.lock().take(hands);
                self.pending.extend(work);
            }
            if self.pending.is_empty()
                && Hands::ALL.iter().all(|&h| !self.core.0.lock().has_work(h))
            {
                self.collect()?;
                let core = self.core.0.lock();
                if !core.is_idle() || !self.asked.is_empty() {
                    return Err(wrong(format!(
                        "{} moves wait for nothing: {}",
                        self.asked.len(),
                        core.what_waits()
                    )));
                }
                core.check()?;
                return Ok(());
            }
            self.work();
            self.collect()?;
            if self.files.is_closed() {
                return Ok(());
            }
        }
        Err(wrong(format!("the store never rests: {}", self.core.0.lock().what_waits())))
    }

    /// The power fails, or the process dies.
    fn crash(&mut self) -> Outcome<()> {
        let power = self.random.coin();
        self.restart(power)
    }

    fn restart(&mut self, power: bool) -> Outcome<()> {
        if power {
            self.files.crash()?;
        }
        self.report.crashes += 1;
        self.add_counters();
        self.pending.clear();
        self.asked.clear();
        self.sessions.clear();
        let again = self.files.reopen();
        let plan = plan(&mut self.random);
        // What opens a store finds the disk in order; what it finds there is not.
        again.set_plan(Plan::default());
        let (core, tools, dropped) =
            open_store(&again, &self.config, self.disk_bytes, &self.clock)?;
        (self.files, self.core, self.tools) = (again, core, tools);
        // More may be found than a small table has rows for.
        self.forgets |= dropped > 0 && self.config.max_chunks == FEW_CHUNKS;
        self.open_spaces()?;
        self.core.0.lock().check()?;
        self.all_that_lasts_is_there()?;
        for fault in [Fault::LostSync, Fault::BitRot, Fault::Misdirected] {
            self.forgets |= plan.per_million[fault as usize] > 0;
        }
        self.files.set_plan(plan);
        Ok(())
    }

    fn add_counters(&mut self) {
        let now = self.core.0.lock().counters;
        let all = &mut self.report.counters;
        let sums = |a: &mut Counters, b: &Counters| {
            a.stored += b.stored;
            a.known += b.known;
            a.host_hits += b.host_hits;
            a.disk_hits += b.disk_hits;
            a.misses += b.misses;
            a.corrupt += b.corrupt;
            a.written += b.written;
            a.demoted += b.demoted;
            a.dropped += b.dropped;
            a.disk_evicted += b.disk_evicted;
            a.refused += b.refused;
            a.no_room += b.no_room;
            a.failed_writes += b.failed_writes;
            a.failed_reads += b.failed_reads;
        };
        sums(all, &now);
        // Whom the policy has sent away, or nobody could read, is not missed.
        self.forgets |= now.disk_evicted + now.corrupt > 0;
    }

    /// Reads what was promised to last.
    fn all_that_lasts_is_there(&mut self) -> Outcome<()> {
        if self.forgets {
            self.lasting.clear();
            self.forgets = false;
            return Ok(());
        }
        let all: Vec<_> = self.lasting.iter().map(|(&key, tokens)| (key, tokens.clone())).collect();
        for ((space, _, layer), tokens) in all {
            let layout = self.layouts[space as usize].clone();
            let each = layout.chunk_tokens() as usize;
            let marks = prefixes(space, &tokens);
            // Without holes a chunk is of use only behind those before it.
            let whole = (each..=tokens.len()).step_by(each);
            let known = |&end: &usize| {
                (0..layout.layers()).any(|l| self.lasting.contains_key(&(space, marks[end - 1], l)))
            };
            if space != 1 && !whole.clone().all(|end| known(&end)) {
                continue;
            }
            self.read_lasting(space, layer, &tokens, &marks)?;
            if self.forgets {
                self.lasting.clear();
                self.forgets = false;
                break;
            }
        }
        Ok(())
    }

    fn read_lasting(
        &mut self,
        space: u32,
        layer: usize,
        tokens: &[u32],
        marks: &[u64],
    ) -> Outcome<()> {
        let layout = self.layouts[space as usize].clone();
        let each = layout.chunk_tokens() as usize;
        let first = tokens.len() - each;
        let number = self
            .core
            .0
            .lock()
            .open_session(self.spaces[space as usize], &SessionOpts::default())?;
        self.core.0.lock().append(number, tokens)?;
        let Some(group) = layout.group(layer) else { return Ok(()) };
        let (k, v) = Planes::lengths(group, each, each);
        let mut planes = Planes { k: vec![POISON; k], v: vec![POISON; v] };
        let views = Arc::new(Views(vec![views_of(group, &mut planes, each, each)]));
        let rectangle = Rectangle {
            first_token: first as u64,
            tokens: each as u64,
            first_layer: layer,
            layers: 1,
            by_layer: false,
            views,
        };
        let ram = Level::Ram;
        let number_of_move =
            self.core.0.lock().submit_rectangle(number, Deed::Get, ram, 0, rectangle)?;
        let asked = Asked {
            deed: Deed::Get,
            level: ram,
            space,
            tokens: tokens.to_vec(),
            marks: marks.to_vec(),
            first,
            first_layer: layer,
            layers: 1,
            by_layer: false,
            planes: vec![planes],
            parts_left: 1,
        };
        self.asked.insert(number_of_move, asked);
        let before = self.core.0.lock().counters.misses;
        self.rest()?;
        let after = self.core.0.lock().counters.misses;
        self.core.0.lock().close_session(number)?;
        if self.core.0.lock().counters.disk_evicted > 0 {
            self.forgets = true; // the disk is nearly full: whom it sent away is not missed
            return Ok(());
        }
        if after > before {
            let end = tokens.len();
            return Err(wrong(format!(
                "tokens {first}..{end} of namespace {space}, layer {layer}, were durable and are gone"
            )));
        }
        self.report.kept += 1;
        Ok(())
    }

    /// The end: everything comes to rest.
    pub fn end(mut self) -> Outcome<Report> {
        self.rest()?;
        if self.files.is_closed() {
            self.restart(false)?;
        }
        self.restart(true)?;
        Ok(self.report)
    }
}

const SEGMENT: u64 = 32 * 4096;
/// A table that fills.
const FEW_CHUNKS: usize = 96;

fn open_store(
    files: &SimFiles,
    config: &Config,
    disk_bytes: u64,
    clock: &Clock,
) -> Outcome<(Shared, Tools, u64)> {
    let options = Options {
        segment_bytes: SEGMENT,
        clock: clock.clone(),
        ..Options::new(disk_bytes, [7; 16])
    };
    let (disk, recovered, _) = DiskTier::open(Arc::new(files.clone()), options)?;
    let disk = Arc::new(disk);
    let mut core = Core::new(config.clone(), None, Some(disk.clone()))?;
    core.tick(clock.now_ns());
    let adopted = core.adopt(&recovered)?;
    let tools = Tools { device: Arc::new(Host::default()), disk: Some(disk) };
    Ok((Shared(Arc::new(Mutex::new(core))), tools, adopted.dropped))
}

/// What goes wrong in this life.
fn plan(random: &mut Random) -> Plan {
    let plan = Plan::default();
    match random.below(8) {
        0 | 1 => plan,
        2 => plan.often(Fault::ReadError, 20_000).often(Fault::ShortRead, 5_000),
        3 => plan.often(Fault::WriteError, 20_000).often(Fault::ShortWrite, 5_000),
        4 => plan.often(Fault::SyncError, 30_000).often(Fault::NameError, 3_000),
        5 => plan.often(Fault::Full, 30_000).often(Fault::WriteError, 3_000),
        6 => plan.often(Fault::BitRot, 10_000).often(Fault::Misdirected, 3_000),
        _ => plan
            .crash(1 + random.below(2_000))
            .often(Fault::LostSync, 10_000 * random.below(2) as u32),
    }
}
