//! How fast this store is, learned while it works: copies, reads, and the engine's
//! prefill.

use std::collections::BTreeMap;

use crate::base::status::{Result, Status};
use crate::fail;
use crate::meta::cost::Cost;
use crate::store::calibration::Speed;
use crate::store::job_queues::{LANES, Queues};
use crate::store::plan::{Route, SOURCES};
use crate::store::prefill::Prefill;
use crate::store::state::work::{Outcome, Work, WorkerKind};
use crate::store::state::{ChunkTable, StoreState};

/// What a batch is before any was seen: its delay in ns, and bytes a second.
const COPIES: (f64, f64) = (20_000.0, 8e9);
const READS: (f64, f64) = (150_000.0, 2e9);
/// The same from the remote, which may be far.
const FETCHES: (f64, f64) = (2_000_000.0, 2e8);
/// The same out of device memory.
const REPLICAS: (f64, f64) = (10_000.0, 2e11);

/// What a batch moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Burden {
    /// Bytes of its cells.
    bytes: u64,
    /// Batches of its kind that were under way when it was taken, itself among them.
    beside: u32,
}

/// One way that bytes go.
pub(super) struct Flow {
    pub(super) speed: Speed,
    /// Bytes of batches under way.
    pub(super) under_way: u64,
}

impl Flow {
    fn new((delay_ns, rate): (f64, f64)) -> Flow {
        Flow { speed: Speed::guess(delay_ns, rate), under_way: 0 }
    }
}

/// What was learned.
pub(super) struct Speeds {
    pub(super) copies: Flow,
    pub(super) reads: Flow,
    /// From the remote.
    pub(super) fetches: Flow,
    /// Out of device memory.
    pub(super) replicas: Flow,
    /// By namespace; those of which nothing was seen are not here.
    prefills: BTreeMap<u32, Prefill>,
}

impl Default for Speeds {
    fn default() -> Speeds {
        let [copies, reads, fetches, replicas] = [COPIES, READS, FETCHES, REPLICAS].map(Flow::new);
        Speeds { copies, reads, fetches, replicas, prefills: BTreeMap::new() }
    }
}

impl Speeds {
    /// A namespace is forgotten: its number will be another's.
    pub(super) fn forget_space(&mut self, space: u32) {
        self.prefills.remove(&space);
    }

    /// The way that work takes.
    fn flow(&mut self, work: &Work) -> &mut Flow {
        match work {
            Work::Reads(_) => &mut self.reads,
            Work::Fetches(_) => &mut self.fetches,
            Work::Copies(batch) if batch.uses_device => &mut self.replicas,
            _ => &mut self.copies,
        }
    }
}

impl StoreState {
    /// A batch begins.
    pub(super) fn weigh(&mut self, work: &mut Work) {
        let workers = work.workers();
        let beside = self.under_way[workers as usize];
        if let Work::Fetches(batch) = work {
            let bytes = batch.bytes();
            batch.burden = Burden { bytes, beside };
            self.speeds.fetches.under_way += bytes;
            return;
        }
        let of = |id: &u32| {
            let (table, cell) = self.cell_of(&self.jobs[*id]);
            self.tables[table as usize].planes(cell).bytes()
        };
        let (bytes, burden) = match work {
            Work::Copies(batch) => {
                let bytes = batch.jobs.iter().map(|&id| self.part_bytes(&self.jobs[id]));
                (bytes.sum(), &mut batch.burden)
            }
            Work::Reads(batch) => (batch.jobs.iter().map(of).sum(), &mut batch.burden),
            _ => return,
        };
        *burden = Burden { bytes, beside };
        self.speeds.flow(work).under_way += bytes;
    }

    /// A batch has ended, and is still counted as under way.
    pub(super) fn observe(&mut self, work: &Work, outcome: &Outcome, elapsed_ns: u64) {
        let workers = work.workers();
        if matches!(work, Work::Slabs(_) | Work::Unregistered(_)) {
            return;
        }
        self.times.batch(workers as usize, elapsed_ns);
        let (burden, sound) = match work {
            Work::Copies(batch) => (batch.burden, outcome.is_ok()),
            // One that failed says nothing of the speed; one whose bytes were wrong does.
            Work::Reads(batch) => {
                (batch.burden, batch.gets.iter().all(|get| has_come(&get.result)))
            }
            Work::Fetches(batch) => (batch.burden, batch.all_came()),
            _ => return,
        };
        // Those that went beside it had their part of the way.
        let beside =
            (u64::from(burden.beside) + u64::from(self.under_way[workers as usize])).max(2);
        let flow = self.speeds.flow(work);
        flow.under_way -= burden.bytes;
        if sound {
            flow.speed.observe(burden.bytes, 1, elapsed_ns.saturating_mul(2) / beside);
        }
    }

    /// The engine computed `tokens` after `context` in `ns`.
    pub fn observe_prefill(
        &mut self,
        space: u32,
        context: u64,
        tokens: u64,
        ns: u64,
    ) -> Result<()> {
        self.prefill_mut(space)?.observe(context, tokens, ns)
    }

    /// Goes by this prefill cost, in ns, whatever is observed; `None`: by what is.
    pub fn fix_prefill(&mut self, space: u32, cost: Option<Cost>) -> Result<()> {
        self.prefill_mut(space)?.fix(cost)
    }

    fn prefill_mut(&mut self, space: u32) -> Result<&mut Prefill> {
        if self.spaces.get(space as usize).is_none() {
            fail!(NotFound, "there is no namespace {space}");
        }
        Ok(self.speeds.prefills.entry(space).or_default())
    }

    /// What computing costs in a namespace.
    pub fn prefill(&self, space: u32) -> Prefill {
        self.speeds.prefills.get(&space).copied().unwrap_or_default()
    }

    /// The ways that chunks of a namespace come: everything is copied from memory, and
    /// what is on disk is read before. Their speeds are those of whole chunks. Waits of
    /// lanes that are less urgent than `lane` do not count.
    pub fn routes(&self, space: u32, lane: usize) -> Result<[Route; SOURCES]> {
        let Some(table) = self.table_of(space) else {
            fail!(NotFound, "there is no namespace {space}");
        };
        let [copying, reading, fetching] = [WorkerKind::Copy, WorkerKind::Read, WorkerKind::Fetch]
            .map(|h| self.under_way[h as usize]);
        let copies = self.route_of((&self.speeds.copies, &self.copies), copying, table, lane);
        let reads = self.route_of((&self.speeds.reads, &self.reads), reading, table, lane);
        let replicas = self.replicas.as_ref().map_or(copies, |replicas| {
            self.route_of((&self.speeds.replicas, replicas.queue()), copying, table, lane)
        });
        let fetches = self.remote.as_ref().map_or(reads, |remote| {
            self.route_of((&self.speeds.fetches, &remote.fetches), fetching, table, lane)
        });
        Ok([copies, reads, fetches, replicas])
    }

    fn route_of(
        &self,
        (flow, queues): (&Flow, &Queues),
        begun: u32,
        table: &ChunkTable,
        lane: usize,
    ) -> Route {
        let layout = &table.layout;
        let share = self.batches(layout.layers() as f64, layout.chunk_bytes(layout.chunk_tokens()));
        let speed = Speed::guess(flow.speed.ns(0, 1) * share, flow.speed.bytes_per_second());
        let (mut cells, mut bytes) = (0, flow.under_way);
        for lane in 0..=lane.min(LANES - 1) {
            let waiting = queues.waiting(lane);
            (cells, bytes) = (cells + u64::from(waiting.0), bytes + waiting.1);
        }
        let batches = self.batches(cells as f64, bytes).ceil() as u64 + u64::from(begun);
        let queued_ns = if bytes > 0 { flow.speed.ns(bytes, batches) } else { 0.0 };
        Route { speed, queued_ns }
    }

    /// How many batches cells are.
    fn batches(&self, cells: f64, bytes: u64) -> f64 {
        let by_cells = cells / self.config.batch_cells as f64;
        by_cells.max(bytes as f64 / self.config.batch_bytes.max(1) as f64)
    }
}

fn has_come(result: &Result<()>) -> bool {
    let status = result.as_ref().map_or_else(|error| error.status(), |()| Status::Ok);
    matches!(status, Status::Ok | Status::Corrupt | Status::NotFound)
}
