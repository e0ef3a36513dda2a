//! Batches of jobs for the workers. A worker takes a batch with [`StoreState::take`], executes it
//! without the lock, and ends it with [`StoreState::done`].

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

/// Kinds of workers. Each kind has threads of its own.
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
    Upload = 6,
    /// Remote lookups.
    Lookup = 7,
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
        WorkerKind::Upload,
        WorkerKind::Lookup,
    ];
}

/// A copy of one plane of a cell.
pub struct CopyItem {
    /// Index of the engine's views in the batch.
    pub views: usize,
    /// Index of the layer in these views.
    pub layer: usize,
    /// Copies the V plane; else the K plane.
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
    pub direction: Direction,
    /// Checksum of the plane, if the device tier has it.
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
    /// Jobs of the batch whose second copy was wrong, too.
    pub jobs: Vec<usize>,
}

/// A batch of copies.
#[derive(Default)]
pub struct CopyBatch {
    pub(super) jobs: Vec<u32>,
    /// They read the device tier.
    pub(super) uses_device: bool,
    /// The event that they wait for will never complete.
    pub(super) is_spent: bool,
    /// Copies into the device tier that are made first: `items` may read what they wrote.
    pub fills: Vec<Fill>,
    /// For each job, whether it was done without the device. `None` if a lost device fails the
    /// batch.
    pub rescued: Option<Vec<bool>>,
    /// Outcome of each job, if they were executed one by one after the batch had failed.
    pub alone: Vec<Result<()>>,
    /// Jobs that the device refused before it touched memory.
    pub refused: Vec<usize>,
    /// Damage found on the bus.
    pub damage: Damage,
    /// Checksums of each job's planes, if the device computes them.
    pub sums: Vec<[u64; 2]>,
    pub(super) load: Load,
    /// The engine's tensors of its transfers.
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
    /// How to decode coded cells, in the order of `gets`.
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

// SAFETY: the memory is named, not owned; the reader of the batch guarantees that it is
// valid then.
unsafe impl Send for Decoding {}

/// A batch of disk writes.
#[derive(Default)]
pub struct WriteBatch {
    pub(super) chunks: Vec<At>,
    /// Writes to execute, and their outcomes.
    pub puts: Puts,
    /// How to encode each cell of `puts`.
    pub codings: Vec<Coding>,
    /// Records of namespaces that must be written first.
    pub(super) notes: Vec<SpaceNote>,
    /// Why the batch was not written.
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
    pub(super) transfers: Vec<u32>,
    /// Segments to sync for each transfer, with the outcome.
    pub marks: Vec<(u32, Mark, Result<()>)>,
    /// Syncs all segments first: recovered records may never have been synced.
    pub everything: Option<Result<()>>,
}

/// A task that keeps the disk in order.
pub enum Upkeep {
    /// Removes empty segments.
    Sweep,
    /// Moves the live cells of a segment elsewhere.
    Compact(u64),
    /// Writes a checkpoint.
    Checkpoint(Checkpoint),
}

/// Work for a worker.
pub enum Work {
    /// Copies.
    Copies(CopyBatch),
    /// Allocation or release of device memory.
    Slabs(SlabWork),
    /// Host memory to be unregistered from the device.
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
    Uploads(UploadBatch),
    /// Remote lookups.
    Lookups(LookupBatch),
}

/// Outcome of a batch. Batches that carry an outcome for each job ignore it.
pub type Outcome = Result<()>;

impl Work {
    /// Kind of worker that executes it.
    pub fn workers(&self) -> WorkerKind {
        match self {
            Work::Copies(_) | Work::Slabs(_) | Work::Unregistered(_) => WorkerKind::Copy,
            Work::Reads(_) => WorkerKind::Read,
            Work::Writes(_) => WorkerKind::Write,
            Work::Syncs(_) => WorkerKind::Sync,
            Work::Upkeep(_) => WorkerKind::Upkeep,
            Work::Fetches(_) => WorkerKind::Fetch,
            Work::Uploads(_) => WorkerKind::Upload,
            Work::Lookups(_) => WorkerKind::Lookup,
        }
    }

    /// Whether it writes a checkpoint.
    pub(super) fn is_checkpoint(&self) -> bool {
        matches!(self, Work::Upkeep(Upkeep::Checkpoint(_)))
    }
}

impl StoreState {
    /// Takes work for a kind of worker, if there is any.
    pub fn take(&mut self, workers: WorkerKind) -> Option<Work> {
        let mut work = self.take_once(workers);
        // Copies that a lost device was to make have turned into other jobs, and so may reads of
        // cells that were evicted meanwhile. No other thread would wake this worker.
        let may_retry =
            !matches!(workers, WorkerKind::Write | WorkerKind::Sync | WorkerKind::Upkeep);
        while work.is_none() && may_retry && self.has_work(workers) {
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
            WorkerKind::Upload => self.take_uploads().map(Work::Uploads),
            WorkerKind::Lookup => self.take_lookups().map(Work::Lookups),
        };
        if let Some(work) = &mut work {
            self.stages.in_flight[workers as usize] += 1;
            self.batch_begins(work);
            self.disk_gc.checkpoint_begins(work);
        }
        // Taking work may have ended jobs that need no worker, which lets other jobs continue.
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
                    && (self.disk_gc.may_have_work() || self.disk_gc.is_checkpoint_due())
            }
            WorkerKind::Fetch => {
                self.remote.as_ref().is_some_and(|remote| !remote.is_quiet_to_fetch())
            }
            WorkerKind::Upload => self.remote.as_deref().is_some_and(RemoteTier::has_to_send),
            WorkerKind::Lookup => {
                self.remote.as_ref().is_some_and(|remote| remote.lookups.has_queued())
            }
        }
    }

    /// Ends a batch with its outcome. `elapsed_ns` = 0: unknown.
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
            Work::Uploads(batch) => self.done_uploads(&batch),
            Work::Lookups(batch) => self.done_lookups(&batch),
        }
        self.settle();
    }

    /// The stage that work passes through, if it has one.
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

    /// Notes what a batch carries. It counts as in flight already.
    fn batch_begins(&mut self, work: &mut Work) {
        let beside = self.stages.in_flight(work.workers());
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
        let noted = Load { bytes, beside };
        *load = noted;
        if let Some(stage) = self.stage(work) {
            stage.begins(noted);
        }
    }

    /// Takes over how long a batch took. It still counts as in flight.
    fn batch_ends(&mut self, work: &Work, outcome: &Outcome, elapsed_ns: u64) {
        if matches!(work, Work::Slabs(_) | Work::Unregistered(_)) {
            return;
        }
        let workers = work.workers();
        self.stats.latencies.batch(workers as usize, elapsed_ns);
        let (load, is_sound) = match work {
            Work::Copies(batch) => (batch.load, outcome.is_ok()),
            // A failed read says nothing about the bandwidth; a read of wrong bytes does.
            Work::Reads(batch) => (batch.load, batch.gets.iter().all(|get| was_read(&get.result))),
            Work::Fetches(batch) => (batch.load, batch.all_arrived()),
            _ => return,
        };
        let in_flight = self.stages.in_flight(workers);
        if let Some(stage) = self.stage(work) {
            stage.ends(load, in_flight, is_sound, elapsed_ns);
        }
    }
}

fn was_read(result: &Result<()>) -> bool {
    let status = result.as_ref().map_or_else(|error| error.status(), |()| Status::Ok);
    matches!(status, Status::Ok | Status::Corrupt | Status::NotFound)
}
