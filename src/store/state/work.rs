//! Batches of work for the workers: [`StoreState::take`] hands one out, [`StoreState::done`] takes
//! its outcome.

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::{Memory, Way};
use crate::format::codec::int8::Quality;
use crate::format::codec::{Codec, Shape};
use crate::meta::layout::Planes;
use crate::store::state::device_tier::SlabWork;
use crate::store::state::disk_gc::Checkpoint;
use crate::store::state::remote::RemoteTier;
use crate::store::state::remote_fetch::FetchBatch;
use crate::store::state::remote_lookup::AskBatch;
use crate::store::state::remote_upload::SendBatch;
use crate::store::state::session::Views;
use crate::store::state::stage::{Load, Stage};
use crate::store::state::{At, StoreState};
use crate::tier::disk::{Gets, Mark, Puts};
use crate::tier::host::Registration;

/// Kinds of work: each has its own hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerKind {
    /// Copies between tensors and memory.
    Copy = 0,
    /// Reads of the disk.
    Read = 1,
    /// Writes to it.
    Write = 2,
    /// Syncs.
    Sync = 3,
    /// Cleaning, sweeping, checkpoints.
    Upkeep = 4,
    /// Fetches of objects from the remote.
    Fetch = 5,
    /// What goes there.
    Send = 6,
    /// Questions what it has.
    Ask = 7,
}

/// How many kinds there are.
pub const KINDS: usize = 8;

impl WorkerKind {
    /// All of them.
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

/// A plane to be copied.
pub struct CopyItem {
    /// The engine's side: which of the batch's.
    pub views: usize,
    /// Which layer of them.
    pub layer: usize,
    /// Which plane of that.
    pub is_v: bool,
    /// The first token.
    pub first: u32,
    /// How many.
    pub tokens: u32,
    /// The store's side.
    pub address: usize,
    /// Where that is.
    pub memory: Memory,
    /// Which job of the batch it is of.
    pub job: usize,
    /// Which way.
    pub way: Way,
    /// What the plane's checksum is, where the device tier has it and that is known.
    pub sum: Option<u64>,
}

/// A cell to be copied from host to device memory.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    /// Where it is.
    pub host: usize,
    /// Where it goes.
    pub device: u64,
    /// How long it is.
    pub bytes: u64,
    /// How long the first of its planes is.
    pub k_bytes: u64,
    /// Which job of the batch it is of.
    pub job: usize,
}

/// What a device said of copies over the bus, where it sums.
#[derive(Debug, Default)]
pub struct Damage {
    /// Copies that came with other bytes than were sent.
    pub seen: u64,
    /// Jobs of the batch that were no better the second time.
    pub jobs: Vec<usize>,
}

/// Copies.
#[derive(Default)]
pub struct CopyBatch {
    pub(super) jobs: Vec<u32>,
    /// They are out of the device tier.
    pub(super) uses_device: bool,
    /// The event that they are behind will never come.
    pub(super) is_spent: bool,
    /// What is copied into the device tier before anything else: `items` may read it there.
    pub fills: Vec<Fill>,
    /// The device may be lost and the store go on: jobs between places in host memory are
    /// then done without it, and noted here.
    pub rescued: Option<Vec<bool>>,
    /// How each job went, where they were done one by one: together they were refused, or failed.
    pub alone: Vec<Result<()>>,
    /// Jobs that the device has refused before it touched anything.
    pub refused: Vec<usize>,
    /// What came damaged over the bus.
    pub damage: Damage,
    /// The checksums of its jobs' planes, where the device sums.
    pub sums: Vec<[u64; 2]>,
    pub(super) load: Load,
    /// The engine's side of its moves.
    pub views: Vec<Arc<Views>>,
    /// What to copy.
    pub items: Vec<CopyItem>,
}

impl CopyBatch {
    /// Its jobs.
    pub fn jobs(&self) -> impl Iterator<Item = u32> + '_ {
        self.jobs.iter().copied()
    }

    /// A batch for each job.
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

/// Cells to be read.
#[derive(Default)]
pub struct ReadBatch {
    pub(super) jobs: Vec<u32>,
    pub(super) load: Load,
    /// What to read, and how it went.
    pub gets: Gets,
    /// How cells that are coded become what they were, in the order of `gets`.
    pub decodings: Vec<Decoding>,
}

/// A cell that is to be coded.
#[derive(Clone, Copy)]
pub struct Coding {
    /// How.
    pub codec: Codec,
    /// What its planes are.
    pub shapes: [Shape; 2],
    /// What was lost.
    pub lost: Quality,
}

/// A coded cell that is to be read.
#[derive(Clone, Copy)]
pub struct Decoding {
    /// Its number among the cells to be read.
    pub get: usize,
    /// How it is coded.
    pub codec: Codec,
    /// What its planes are.
    pub shapes: [Shape; 2],
    /// Their lengths.
    pub planes: Planes,
    /// Where they go, one after the other.
    pub address: *mut u8,
}

// SAFETY: the memory is named, not owned; whoever reads the batch promises that it is
// valid then.
unsafe impl Send for Decoding {}

/// Cells to be written.
#[derive(Default)]
pub struct WriteBatch {
    pub(super) chunks: Vec<At>,
    /// What to write, and how it went.
    pub puts: Puts,
    /// How each cell of `puts` is to be coded.
    pub codings: Vec<Coding>,
    /// What is to be written before.
    pub(super) notes: Vec<SpaceNote>,
    /// Why nothing was written.
    pub(super) refused: Option<Error>,
}

/// What a namespace is, to be noted on disk.
pub(super) struct SpaceNote {
    pub(super) space: u32,
    pub(super) name: Vec<u8>,
    pub(super) content: Vec<u8>,
    /// Once it is written.
    pub(super) mark: Option<Mark>,
}

/// Writes to be made durable.
#[derive(Default)]
pub struct SyncBatch {
    pub(super) moves: Vec<u32>,
    /// For each of these, how it went.
    pub marks: Vec<(u32, Mark, Result<()>)>,
    /// Everything first: what was found at the start may never have been synced.
    pub everything: Option<Result<()>>,
}

/// What keeps the disk in order.
pub enum Upkeep {
    /// Remove empty segments.
    Sweep,
    /// Move what lives in a segment elsewhere.
    Clean(u64),
    /// Write a checkpoint.
    Checkpoint(Checkpoint),
}

/// Work.
pub enum Work {
    /// Copies.
    Copies(CopyBatch),
    /// Device memory.
    Slabs(SlabWork),
    /// Memory that the device is to be told of.
    Unregistered(Vec<Arc<Registration>>),
    /// Reads.
    Reads(ReadBatch),
    /// Writes.
    Writes(WriteBatch),
    /// Syncs.
    Syncs(SyncBatch),
    /// Upkeep.
    Upkeep(Upkeep),
    /// Fetches.
    Fetches(FetchBatch),
    /// Sends.
    Sends(SendBatch),
    /// Questions.
    Asks(AskBatch),
}

/// How work went; batches that say so themselves say nothing here.
pub type Outcome = Result<()>;

impl Work {
    /// Whose work it is.
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

    /// Whether it is a checkpoint that is to be written.
    pub(super) fn is_checkpoint(&self) -> bool {
        matches!(self, Work::Upkeep(Upkeep::Checkpoint(_)))
    }
}

impl StoreState {
    /// Work for some hands, if there is any.
    pub fn take(&mut self, workers: WorkerKind) -> Option<Work> {
        let mut work = self.take_once(workers);
        // Copies that a lost device was to make have become others, and so may reads of cells that
        // have left the disk. Who sleeps now is woken by nobody.
        let comes_again =
            !matches!(workers, WorkerKind::Write | WorkerKind::Sync | WorkerKind::Upkeep);
        while work.is_none() && comes_again && self.has_work(workers) {
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
        // Looking for work ends what needs none, and that may let others go on.
        self.settle();
        work
    }

    /// Whether [`StoreState::take`] may have something for some hands. Taking for one kind
    /// may make work for another.
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

    /// Says how work went, and how long it took; 0 = not known.
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
            Work::Fetches(batch) => (batch.load, batch.all_came()),
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
