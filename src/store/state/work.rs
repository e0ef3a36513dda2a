//! Batches of jobs for the workers. A worker takes a batch with [`StoreState::take`], executes it
//! without the lock, and ends it with [`StoreState::done`].

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::store::state::StoreState;
pub use crate::store::state::batches::{
    Coding, CopyBatch, CopyItem, Damage, Decoding, Fill, KINDS, ReadBatch, SyncBatch, WorkerKind,
    WriteBatch,
};
use crate::store::state::batches::{Load, Stage};
use crate::store::state::device_tier::SlabWork;
pub use crate::store::state::disk_gc::Upkeep;
use crate::store::state::remote::RemoteTier;
use crate::store::state::remote_fetch::FetchBatch;
use crate::store::state::remote_lookup::LookupBatch;
use crate::store::state::remote_upload::UploadBatch;
use crate::store::state::transfer::{Of, Step, WaitList};
use crate::tier::host::Registration;

/// Work for a worker.
pub enum Work {
    /// Copies.
    Copies(Box<CopyBatch>),
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

    /// Bytes that it fetches from the remote.
    pub fn fetched_bytes(&self) -> u64 {
        if let Work::Fetches(batch) = self { batch.bytes() } else { 0 }
    }

    /// Bytes that it copies.
    pub fn copied_bytes(&self) -> u64 {
        if let Work::Copies(batch) = self { batch.load.bytes } else { 0 }
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
            self.begin_work(work);
            if work.is_checkpoint() {
                self.disk_gc.checkpoint_begins();
            }
        }
        // Taking work may have ended jobs that need no worker, which lets other jobs continue.
        self.settle();
        work
    }

    /// Takes the copies of a transfer for the thread that has submitted it: all of its cells are in
    /// runs that wait for a copy, of at most `most` bytes. [`StoreState::done`] ends them.
    pub fn take_own(&mut self, number: u32, most: u64) -> Option<Work> {
        let transfer = self.transfers.table.get(number)?;
        if transfer.open_jobs == 0 || transfer.cursor < transfer.cells() {
            return None;
        }
        let mut bytes = 0;
        for id in transfer.jobs.all(&self.transfers.jobs, Of::Transfer) {
            let job = &self.transfers.jobs[id];
            bytes += job.bytes;
            if job.run == 0 || job.step != Step::Copies || bytes > most {
                return None;
            }
        }
        let mut batch = self.stages.empty_batches.pop().unwrap_or_default();
        let mut next = self.transfers.table[number].jobs.first();
        while let Some(id) = next {
            next = WaitList::after(&self.transfers.jobs, Of::Transfer, id);
            self.stages.copy.queue.remove(id);
            self.transfers.jobs[id].step = Step::Copying;
            self.take_run(id, &mut batch);
        }
        let mut work = Work::Copies(batch);
        self.begin_work(&mut work);
        Some(work)
    }

    /// Counts work that is taken.
    pub(super) fn begin_work(&mut self, work: &mut Work) {
        self.stages.in_flight[work.workers() as usize] += 1;
        self.batch_begins(work);
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
                    && (self.disk_gc.may_have_work()
                        || self.disk_gc.is_checkpoint_due()
                        || self.disk.as_ref().is_some_and(|disk| disk.wants_prepare()))
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
        if work.is_checkpoint() {
            self.disk_gc.checkpoint_ends(&outcome);
        }
        self.stages.in_flight[work.workers() as usize] -= 1;
        match work {
            Work::Copies(batch) => {
                self.done_copies(&batch, &outcome);
                self.stages.recycle(batch);
            }
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
            Work::Copies(batch) => (batch.load.bytes, &mut batch.load),
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
