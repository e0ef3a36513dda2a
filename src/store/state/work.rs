//! Batches of jobs for the workers. A worker takes a batch with [`StoreState::take`], executes it
//! without the lock, and reports the outcome with [`StoreState::done`].

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::{Direction, Memory};
use crate::format::codec::int8::Quality;
use crate::format::codec::{Codec, Shape};
use crate::meta::layout::Planes;
use crate::store::state::device_tier::SlabWork;
use crate::store::state::disk_gc::Checkpoint;
use crate::store::state::remote::RemoteTier;
use crate::store::state::remote_fetch::FetchBatch;
use crate::store::state::remote_lookup::LookupBatch;
use crate::store::state::remote_upload::UploadBatch;
use crate::store::state::session::Views;
use crate::store::state::stage::{Load, Stage};
use crate::store::state::{At, StoreState};
use crate::tier::disk::{Gets, Mark, Puts};
use crate::tier::host::Registration;

/// Kinds of workers. Each kind has its own threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerKind {
    /// Copies between the engine's tensors, host and device memory.
    Copy = 0,
    /// Disk reads.
    Read = 1,
    /// Disk writes.
    Write = 2,
    /// Syncs.
    Sync = 3,
    /// Compaction, removal of empty segments, checkpoints.
    Upkeep = 4,
    /// Remote reads.
    Fetch = 5,
    /// Remote writes.
    Send = 6,
    /// Remote lookups.
    Ask = 7,
}

/// Number of kinds.
pub const KINDS: usize = 8;

impl WorkerKind {
    /// All kinds.
    pub const ALL: [WorkerKind; KINDS] = [
        WorkerKind::Copy,
        WorkerKind::Read,
        WorkerKind::Write,
        WorkerKind::Sync,
        WorkerKind::Upkeep,
        WorkerKind::Fetch,
        WorkerKind::Send,
        WorkerKind::Ask,
    ];
}

/// A copy of one plane of a cell.
pub struct CopyItem {
    /// Index of the engine's views in the batch.
    pub views: usize,
    /// Index of the layer in these views.
    pub layer: usize,
    /// True: the V plane. False: the K plane.
    pub is_v: bool,
    /// First token.
    pub first: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Address in the store.
    pub address: usize,
    /// Kind of memory of that address.
    pub memory: Memory,
    /// Index of its job in the batch.
    pub job: usize,
    /// Direction.
    pub way: Direction,
    /// Checksum of the plane, if the device tier has stored it.
    pub sum: Option<u64>,
}

/// A copy of a cell from host to device memory.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    /// Address in host memory.
    pub host: usize,
    /// Address in device memory.
    pub device: u64,
    /// Bytes of the cell.
    pub bytes: u64,
    /// Bytes of its first plane.
    pub k_bytes: u64,
    /// Index of its job in the batch.
    pub job: usize,
}

/// Damage on a device's bus, found by checksums.
#[derive(Debug, Default)]
pub struct Damage {
    /// Copies that arrived with wrong bytes.
    pub seen: u64,
    /// Jobs of the batch whose repeated copy was damaged, too.
    pub jobs: Vec<usize>,
}

/// A batch of copies.
#[derive(Default)]
pub struct CopyBatch {
    pub(super) jobs: Vec<u32>,
    /// Whether the copies read from the device tier.
    pub(super) uses_device: bool,
    /// Whether the event that the copies wait for can no longer complete.
    pub(super) is_spent: bool,
    /// Copies into the device tier, to be executed before `items`, which may read their results.
    pub fills: Vec<Fill>,
    /// If the device is lost: for each job, whether the host has executed it instead. `None`: a
    /// lost device fails the whole batch.
    pub rescued: Option<Vec<bool>>,
    /// Outcome of each job, if the jobs were executed one by one after the batch had failed.
    pub alone: Vec<Result<()>>,
    /// Jobs that the device rejected before it accessed memory.
    pub refused: Vec<usize>,
    /// Damage found on the bus.
    pub damage: Damage,
    /// Checksums of each job's planes, if the device computes them.
    pub sums: Vec<[u64; 2]>,
    pub(super) load: Load,
    /// Views of the engine's tensors, one for each transfer of the batch.
    pub views: Vec<Arc<Views>>,
    /// Copies to execute.
    pub items: Vec<CopyItem>,
}

impl CopyBatch {
    /// Jobs of the batch.
    pub fn jobs(&self) -> impl Iterator<Item = u32> + '_ {
        self.jobs.iter().copied()
    }

    /// Splits the batch into one batch for each job.
    pub fn split(self) -> Vec<CopyBatch> {
        let mut parts: Vec<CopyBatch> = Vec::with_capacity(self.jobs.len());
        parts.extend(self.jobs.iter().map(|&id| CopyBatch {
            jobs: vec![id],
            uses_device: self.uses_device,
            rescued: self.rescued.clone(),
            views: self.views.clone(),
            ..CopyBatch::default()
        }));
        for item in self.items {
            parts[item.job].items.push(CopyItem { job: 0, ..item });
        }
        for fill in self.fills {
            parts[fill.job].fills.push(Fill { job: 0, ..fill });
        }
        parts
    }
}

/// A batch of disk reads.
#[derive(Default)]
pub struct ReadBatch {
    pub(super) jobs: Vec<u32>,
    pub(super) load: Load,
    /// Reads to execute, and their outcomes.
    pub gets: Gets,
    /// How to decode encoded cells, in the order of `gets`.
    pub decodings: Vec<Decoding>,
}

/// How to encode a cell.
#[derive(Clone, Copy)]
pub struct Coding {
    /// Codec.
    pub codec: Codec,
    /// Shapes of its planes.
    pub shapes: [Shape; 2],
    /// Loss of precision, filled in by the encoder.
    pub lost: Quality,
}

/// How to decode a cell.
#[derive(Clone, Copy)]
pub struct Decoding {
    /// Index among the reads of the batch.
    pub get: usize,
    /// Codec.
    pub codec: Codec,
    /// Shapes of its planes.
    pub shapes: [Shape; 2],
    /// Lengths of its planes.
    pub planes: Planes,
    /// Address of the first plane; the second follows it.
    pub address: *mut u8,
}

// SAFETY: the address is not dereferenced here; the caller that executes the read guarantees that
// it is valid.
unsafe impl Send for Decoding {}

/// A batch of disk writes.
#[derive(Default)]
pub struct WriteBatch {
    pub(super) chunks: Vec<At>,
    /// Writes to execute, and their outcomes.
    pub puts: Puts,
    /// How to encode each cell of `puts`.
    pub codings: Vec<Coding>,
    /// Records of namespaces, to be written before `puts`.
    pub(super) notes: Vec<SpaceNote>,
    /// The error, if the batch was not written.
    pub(super) refused: Option<Error>,
}

/// The record of a namespace.
pub(super) struct SpaceNote {
    pub(super) namespace: u32,
    pub(super) name: Vec<u8>,
    pub(super) content: Vec<u8>,
    /// Position of the record, once it is written.
    pub(super) mark: Option<Mark>,
}

/// A sync of the disk.
#[derive(Default)]
pub struct SyncBatch {
    pub(super) moves: Vec<u32>,
    /// Segments to sync for each transfer, with the outcome.
    pub marks: Vec<(u32, Mark, Result<()>)>,
    /// Outcome of a sync of all segments, if one is needed first: recovered records may never have
    /// been synced.
    pub everything: Option<Result<()>>,
}

/// A maintenance task of the disk tier.
pub enum Upkeep {
    /// Removes empty segments.
    Sweep,
    /// Moves the live cells of a segment elsewhere.
    Clean(u64),
    /// Writes a checkpoint.
    Checkpoint(Checkpoint),
}

/// Work for a worker.
pub enum Work {
    /// Copies.
    Copies(CopyBatch),
    /// Allocation or release of device memory.
    Slabs(SlabWork),
    /// Host memory that is not registered with the device yet: the worker registers it.
    Unregistered(Vec<Arc<Registration>>),
    /// Disk reads.
    Reads(ReadBatch),
    /// Disk writes.
    Writes(WriteBatch),
    /// A sync.
    Syncs(SyncBatch),
    /// Upkeep of the disk.
    Upkeep(Upkeep),
    /// Remote reads.
    Fetches(FetchBatch),
    /// Remote writes.
    Sends(UploadBatch),
    /// Remote lookups.
    Asks(LookupBatch),
}

/// Outcome of a batch. Batches that carry an outcome for each job ignore it.
pub type Outcome = Result<()>;

impl Work {
    /// Kind of worker that executes this work.
    pub fn workers(&self) -> WorkerKind {
        match self {
            Work::Copies(_) | Work::Slabs(_) | Work::Unregistered(_) => WorkerKind::Copy,
            Work::Reads(_) => WorkerKind::Read,
            Work::Writes(_) => WorkerKind::Write,
            Work::Syncs(_) => WorkerKind::Sync,
            Work::Upkeep(_) => WorkerKind::Upkeep,
            Work::Fetches(_) => WorkerKind::Fetch,
            Work::Sends(_) => WorkerKind::Send,
            Work::Asks(_) => WorkerKind::Ask,
        }
    }

    /// Whether this work writes a checkpoint.
    pub(super) fn is_checkpoint(&self) -> bool {
        matches!(self, Work::Upkeep(Upkeep::Checkpoint(_)))
    }
}

impl StoreState {
    /// Takes work for a kind of worker, if there is any.
    pub fn take(&mut self, workers: WorkerKind) -> Option<Work> {
        let mut work = self.take_once(workers);
        // The first attempt may have taken only jobs that no longer need this kind of worker:
        // copies of a lost device, or reads of cells that were evicted meanwhile. Further jobs may
        // be queued, and no other thread would wake this worker for them.
        let retries = !matches!(workers, WorkerKind::Write | WorkerKind::Sync | WorkerKind::Upkeep);
        while work.is_none() && retries && self.has_work(workers) {
            work = self.take_once(workers);
        }
        work
    }

    fn take_once(&mut self, workers: WorkerKind) -> Option<Work> {
        let mut work = match workers {
            WorkerKind::Copy => {
                let unregistered = self.host.take_unregistered();
                let unregistered =
                    (!unregistered.is_empty()).then_some(Work::Unregistered(unregistered));
                let slabs = unregistered.or_else(|| self.take_slabs().map(Work::Slabs));
                slabs.or_else(|| self.take_copies().map(Work::Copies))
            }
            WorkerKind::Read => self.take_reads().map(Work::Reads),
            WorkerKind::Write => self.take_writes().map(Work::Writes),
            WorkerKind::Sync => self.take_syncs().map(Work::Syncs),
            WorkerKind::Upkeep => self.take_upkeep().map(Work::Upkeep),
            WorkerKind::Fetch => self.take_fetches().map(Work::Fetches),
            WorkerKind::Send => self.take_uploads().map(Work::Sends),
            WorkerKind::Ask => self.take_lookups().map(Work::Asks),
        };
        if let Some(work) = &mut work {
            self.stages.in_flight[workers as usize] += 1;
            self.batch_begins(work);
            self.disk_gc.checkpoint_begins(work);
        }
        // Taking work may have ended jobs that need no worker, which unblocks other jobs.
        self.settle();
        work
    }

    /// Whether [`StoreState::take`] may find work for a kind of worker. Taking work of one kind may
    /// create work of another.
    pub fn has_work(&self, workers: WorkerKind) -> bool {
        match workers {
            WorkerKind::Copy => {
                self.stages.copy.has_queued()
                    || self.has_device_work()
                    || self.host.has_unregistered()
            }
            WorkerKind::Read => self.stages.read.has_queued(),
            WorkerKind::Write => {
                (!self.writeback.queue.is_empty() || self.has_due()) && !self.disk_gc.holds_writes
            }
            WorkerKind::Sync => {
                !self.writeback.sync_waiters.is_empty()
                    || self.writeback.unsynced.len() >= self.writeback.sync_at
            }
            WorkerKind::Upkeep => {
                let is_held = self.disk_gc.holds_writes
                    && self.stages.in_flight[WorkerKind::Write as usize] > 0;
                self.stages.in_flight[workers as usize] == 0
                    && self.disk.is_some()
                    && !is_held
                    && (self.disk_gc.wants() || self.disk_gc.is_checkpoint_due())
            }
            WorkerKind::Fetch => {
                self.remote.as_ref().is_some_and(|remote| !remote.is_quiet_to_fetch())
            }
            WorkerKind::Send => self.remote.as_deref().is_some_and(RemoteTier::has_to_send),
            WorkerKind::Ask => self.remote.as_ref().is_some_and(|remote| remote.asking.waits()),
        }
    }

    /// Reports the outcome of a batch. `elapsed_ns` = 0: unknown.
    pub fn done(&mut self, work: Work, outcome: Outcome, elapsed_ns: u64) {
        self.batch_ends(&work, &outcome, elapsed_ns);
        self.disk_gc.checkpoint_ends(&work, &outcome);
        self.stages.in_flight[work.workers() as usize] -= 1;
        match work {
            Work::Copies(batch) => self.done_copies(&batch, &outcome),
            Work::Slabs(slabs) => self.done_slabs(slabs),
            Work::Unregistered(_) => {}
            Work::Reads(batch) => self.done_reads(&batch),
            Work::Writes(batch) => self.done_writes(&batch),
            Work::Syncs(batch) => self.done_syncs(&batch),
            Work::Upkeep(upkeep) => self.done_upkeep(&upkeep, outcome),
            Work::Fetches(batch) => self.done_fetches(&batch),
            Work::Sends(batch) => self.done_uploads(&batch),
            Work::Asks(batch) => self.done_lookups(&batch),
        }
        self.settle();
    }

    /// The bandwidth measurement that this work belongs to, if there is one.
    fn stage(&mut self, work: &Work) -> Option<&mut Stage> {
        match work {
            Work::Copies(batch) => match &mut self.replicas {
                Some(replicas) if batch.uses_device => Some(&mut replicas.stage),
                _ => Some(&mut self.stages.copy),
            },
            Work::Reads(_) => Some(&mut self.stages.read),
            Work::Fetches(_) => self.remote.as_mut().map(|remote| &mut remote.fetch),
            _ => None,
        }
    }

    /// Records the load of a batch: its bytes, and the number of batches in flight, this one
    /// included.
    fn batch_begins(&mut self, work: &mut Work) {
        let in_flight = self.stages.in_flight(work.workers());
        let cell_bytes = |id: &u32| {
            let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[*id]);
            self.tables[table as usize].planes(cell).bytes()
        };
        let (bytes, load) = match work {
            Work::Copies(batch) => {
                let bytes = batch.jobs.iter().map(|&id| self.part_bytes(&self.transfers.jobs[id]));
                (bytes.sum(), &mut batch.load)
            }
            Work::Reads(batch) => (batch.jobs.iter().map(cell_bytes).sum(), &mut batch.load),
            Work::Fetches(batch) => (batch.bytes(), &mut batch.load),
            _ => return,
        };
        let new_load = Load { bytes, beside: in_flight };
        *load = new_load;
        if let Some(stage) = self.stage(work) {
            stage.begins(new_load);
        }
    }

    /// Records the duration of a batch, which still counts as in flight.
    fn batch_ends(&mut self, work: &Work, outcome: &Outcome, elapsed_ns: u64) {
        if matches!(work, Work::Slabs(_) | Work::Unregistered(_)) {
            return;
        }
        let workers = work.workers();
        self.stats.latencies.batch(workers as usize, elapsed_ns);
        let (load, is_measured) = match work {
            Work::Copies(batch) => (batch.load, outcome.is_ok()),
            // The duration of a failed read is no measurement of the bandwidth; that of a read of
            // damaged bytes is one.
            Work::Reads(batch) => {
                (batch.load, batch.gets.iter().all(|get| has_read_bytes(&get.result)))
            }
            Work::Fetches(batch) => (batch.load, batch.all_came()),
            _ => return,
        };
        let in_flight = self.stages.in_flight(workers);
        if let Some(stage) = self.stage(work) {
            stage.ends(load, in_flight, is_measured, elapsed_ns);
        }
    }
}

fn has_read_bytes(result: &Result<()>) -> bool {
    let status = result.as_ref().map_or_else(|error| error.status(), |()| Status::Ok);
    matches!(status, Status::Ok | Status::Corrupt | Status::NotFound)
}
