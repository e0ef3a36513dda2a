//! Lives of a simulated store: how one ends, and what the next must find.

use crate::disk::SimFiles;
use crate::disk::plan::{Fault, Plan};
use crate::sim::blocks::Blocks;
use crate::sim::callers::views_of;
use crate::sim::content::{Planes, prefixes};
use crate::sim::engine_events::EngineEvents;
use crate::sim::world::{Outcome, POISON, Shared, Submitted, World, evictions, wrong};
use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::sync::{Arc, Mutex};
use kvtier::device::host::Host;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Device, Memory};
use kvtier::store::executor::Tools;
use kvtier::store::state::session::Views;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::{CellRange, Config, SessionOpts, StoreState, Wanted};
use kvtier::tier::disk::{DiskTier, Options};

impl World {
    /// A power failure, or the death of the process.
    pub(super) fn crash(&mut self) -> Outcome<()> {
        let power = self.random.coin();
        self.restart(power)
    }

    pub(super) fn restart(&mut self, power: bool) -> Outcome<()> {
        if power {
            self.files.crash()?;
        }
        let failed_syncs = self.tools.disk.as_ref().map_or(0, |disk| disk.stats().failed_syncs);
        self.forgets |= self.has_unsynced;
        self.report.crashes += 1;
        self.add_counters();
        self.pending.clear();
        self.end_engine_events()?;
        self.submitted.clear();
        self.blocks.iter_mut().for_each(Blocks::forget);
        self.sessions.clear();
        let again = self.files.reopen();
        let plan = plan(&mut self.random);
        // Opening meets no new faults, but the disk may hold damage.
        again.set_plan(Plan::default());
        let device = self.next_device()?;
        let (core, mut tools, dropped) =
            open_store(&again, &self.config, self.disk_bytes, &self.clock, device)?;
        tools.remote = self.remote_sim.as_ref().map(|remote_sim| remote_sim.executor(&self.clock));
        (self.files, self.core, self.tools) = (again, core, tools);
        self.engine_events = EngineEvents::of(self.report.crashes.into(), &self.tools);
        // The disk may hold more than a small table has rows for.
        self.forgets |= dropped > 0 && self.config.max_chunks == FEW_CHUNKS;
        self.open_namespaces()?;
        self.core.0.lock().check()?;
        self.check_cleared()?;
        self.check_durable_blocks()?;
        self.check_all_durable()?;
        self.has_unsynced = !power && (self.has_unsynced || failed_syncs > 0);
        for fault in [Fault::LostSync, Fault::BitRot, Fault::Misdirected] {
            self.forgets |= plan.per_million[fault as usize] > 0;
            self.is_rotten |= plan.per_million[fault as usize] > 0;
        }
        self.files.set_plan(plan);
        Ok(())
    }

    fn add_counters(&mut self) {
        let remote = self.core.0.lock().remote_stats();
        self.report.remote.add_counters(&remote.unwrap_or_default());
        let now = self.core.0.lock().stats_now();
        self.report.counters.add_counters(&now);
        // Evicted and unreadable chunks may be missing.
        self.forgets |= evictions(&now) + now.corrupt_cells > 0;
    }

    /// Reads all durable cells.
    fn check_all_durable(&mut self) -> Outcome<()> {
        if self.forgets {
            self.durable_cells.clear();
            self.forgets = false;
            return Ok(());
        }
        let all: Vec<_> =
            self.durable_cells.iter().map(|(&key, tokens)| (key, tokens.clone())).collect();
        for ((namespace, _, layer), tokens) in all {
            let marks = prefixes(namespace, &tokens);
            self.check_durable(namespace, layer, &tokens, &marks)?;
            if self.forgets {
                self.durable_cells.clear();
                self.forgets = false;
                break;
            }
        }
        Ok(())
    }

    fn check_durable(
        &mut self,
        namespace: u32,
        layer: usize,
        tokens: &[u32],
        marks: &[u64],
    ) -> Outcome<()> {
        let layout = self.layouts[namespace as usize].clone();
        let each = layout.chunk_tokens() as usize;
        let first = tokens.len() - each;
        let number = self
            .core
            .0
            .lock()
            .open_session(self.namespaces[namespace as usize], &SessionOpts::default())?;
        self.core.0.lock().append(number, tokens)?;
        let Some(group) = layout.group(layer) else { return Ok(()) };
        let (k, v) = Planes::lengths(group, each, each);
        let mut planes = Planes { k: vec![POISON; k], v: vec![POISON; v] };
        let views =
            Arc::new(Views::from(vec![views_of(group, &mut planes, each, each, Memory::Host)]));
        let cell_range = CellRange {
            first_token: first as u64,
            tokens: each as u64,
            first_layer: layer,
            layers: 1,
            by_layer: false,
            wanted: Wanted::All,
            views,
            after: None,
        };
        let ram = Level::Ram;
        let number_of_move =
            self.core.0.lock().submit_cell_range(number, TransferKind::Get, ram, 0, cell_range)?;
        let submitted = Submitted {
            kind: TransferKind::Get,
            level: ram,
            namespace,
            tokens: tokens.to_vec(),
            marks: marks.to_vec(),
            first,
            first_layer: layer,
            layers: 1,
            by_layer: false,
            planes: vec![planes],
            parts_left: 1,
            after: None,
            hidden: Vec::new(),
        };
        self.submitted.insert(number_of_move, submitted);
        let before = self.core.0.lock().counters.missed_cells;
        self.drain()?;
        let after = self.core.0.lock().counters.missed_cells;
        self.core.0.lock().close_session(number)?;
        let counters = self.core.0.lock().counters;
        if evictions(&counters) > 0 {
            self.forgets = true; // the disk is nearly full: evicted cells may be missing
            return Ok(());
        }
        if after > before {
            let end = tokens.len();
            return Err(wrong(format!(
                "tokens {first}..{end} of namespace {namespace}, layer {layer}, were durable and are lost"
            )));
        }
        self.report.durable_found += 1;
        Ok(())
    }
}

pub(super) const SEGMENT: u64 = 32 * 4096;
/// A small chunk table that fills up.
pub(super) const FEW_CHUNKS: usize = 96;

pub(super) fn open_store(
    files: &SimFiles,
    config: &Config,
    disk_bytes: u64,
    clock: &Clock,
    device: Arc<dyn Device>,
) -> Outcome<(Shared, Tools, u64)> {
    let options = Options {
        segment_bytes: SEGMENT,
        clock: clock.clone(),
        ..Options::new(disk_bytes, [7; 16])
    };
    let (disk, recovered, _) = DiskTier::open(Arc::new(files.clone()), options)?;
    let disk = Arc::new(disk);
    let mut core = StoreState::new(config.clone(), None, Some(disk.clone()))?;
    core.tick(clock.now_ns());
    let adopted = core.adopt(&recovered)?;
    let tools = Tools { device, disk: Some(disk), remote: None };
    Ok((Shared(Arc::new(Mutex::new(core))), tools, adopted.dropped))
}

/// The copying device. Every second seed has an asynchronous one, which poisons targets until it is
/// done, and sometimes fails.
pub(super) fn device(seed: u64, clock: &Clock) -> Outcome<Arc<dyn Device>> {
    if seed % 2 == 1 {
        return Ok(Arc::new(Host::default()));
    }
    let mut random = Random::new(seed ^ 0xDE71CE);
    let failures = random.below(2) * random.below(6);
    let opts = SimulatedOpts {
        seed,
        fail_at: (0..failures).map(|_| 1 + random.below(300)).collect(),
        ..SimulatedOpts::default()
    };
    Ok(Arc::new(Simulated::new(clock.clone(), opts)?))
}

/// Faults of a life.
pub(super) fn plan(random: &mut Random) -> Plan {
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
