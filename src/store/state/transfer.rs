//! Transfers: layers × tokens of a session, moved into or out of the store cell by cell.
//!
//! A job is one cell of one transfer, or a run of cells that follow each other. Its states ([`Step`]):
//!
//! ```text
//!                       .-- no host memory -----> WaitsForMemory -----------.
//!                       |-- another job has it -> Waiting ------------------+--> Fresh
//!  Fresh: route the job-+-- on disk only -------> Reads ---> Reading -------+
//!                       |-- at the remote ------> Fetches -> Fetching ------'
//!                       |-- resident (put: new) -> Copies ---> Copying ------> end
//!                       |                          AfterEvent -^   (a device event fires first)
//!                       `-- resident nowhere ----> end: a miss   (put: end if resident already)
//! ```
//!
//! `Fresh` is also the state of a job that was woken: `route` reads the residency again. Most cells are
//! not routed: a job copies a run of them ([`super::runs`]).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

use smallvec::SmallVec;

use crate::base::budget::Tier;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::{Direction, Event, Memory};
use crate::fail;
use crate::format::codec::Codec;
use crate::meta::chunks::{Arrival, Begin, Cell, Location, Residency};
use crate::meta::index::{NONE, Slot};
use crate::policy::evictor::RequestContext;
use crate::store::job_queues::Queues;
use crate::store::state::batches::{CopyBatch, CopyItem, Decoding, Fill, ReadBatch, Views};
use crate::store::state::chunk_table::note;
use crate::store::state::tier_cache::{cell_of_owner, owner_of};
use crate::store::state::{
    At, CellRange, ChunkTable, Config, DEVICE_MASK, DISK_MASK, HOST_MASK, StoreState,
};
use crate::store::transfer_log::{EndedTransfer, TransferLog};
use crate::tier::device;
use crate::tier::disk::{GetPlane, Spot};
use crate::tier::host::Piece;

// ---------- transfer kind
//
// Kinds of transfers, and when they complete.

/// Kind of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// Copies the engine's tensors into the store.
    Put,
    /// Copies cells of the store into the engine's tensors.
    Get,
    /// Loads cells into host memory before a get requests them.
    Prefetch,
}

/// When a put completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// When its cells are in host memory.
    Ram = 0,
    /// When they are written to disk.
    Disk = 1,
    /// When they are synced: they survive a crash of the machine.
    Durable = 2,
    /// When the remote has confirmed them. Here they are in host memory only.
    Remote = 3,
}

impl Level {
    /// Whether a put of this level must write to the disk.
    pub fn is_on_disk(self) -> bool {
        matches!(self, Level::Disk | Level::Durable)
    }
}

/// Most jobs of one transfer in flight.
const WINDOW: u32 = 1024;
/// Bytes of a get, or of a layer that completes by itself, that exceed the caches.
const LONG_GET_BYTES: u64 = 32 << 20;
/// Most chunks of one transfer.
pub const MAX_TRANSFER_CHUNKS: usize = 1 << 22;

/// A request for a transfer.
pub struct TransferSpec {
    /// Chunk table of its namespace.
    pub table: u32,
    /// Session whose share of the bandwidth it uses.
    pub flow: u32,
    /// Session and tenant that policies are notified with.
    pub context: RequestContext,
    /// Time from now until new chunks end; 0 = they have no end.
    pub ttl_ns: u64,
    /// Urgency; 0 is served first.
    pub lane: usize,
    /// Kind of the transfer.
    pub kind: TransferKind,
    /// When it completes, if it is a put.
    pub level: Level,
    /// Chunks in the order of their tokens. NONE: the chunk has no row, and is not put.
    pub slots: Vec<Slot>,
    /// Reports an outcome for each chunk.
    pub by_chunk: bool,
    /// If a get lacks chunks: policy ids of all chunks it requested, those it lacks among them.
    pub requested: Vec<u64>,
    /// First layer.
    pub first_layer: usize,
    /// Number of layers.
    pub layers: usize,
    /// Each layer completes by itself.
    pub by_layer: bool,
    /// For each layer the first chunk that is needed of it; empty = all chunks are.
    pub needed_from: Vec<u32>,
    /// The engine's tensors; empty for a prefetch.
    pub views: Arc<Views>,
    /// Device event that must complete before the copies begin.
    pub after: Option<Event>,
    /// No job begins before [`StoreState::begin_waiting`] is called with this ticket.
    pub ticket: Option<u64>,
}

/// A part of a transfer that completes by itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    left: u32,
    /// First chunk that failed or was missed.
    bad: u32,
    missed: u32,
    bytes: u64,
    error: Option<Error>,
}

/// A transfer in flight.
pub struct Transfer {
    pub(super) spec: TransferSpec,
    /// The next cell to begin.
    pub(super) cursor: u64,
    /// Jobs in flight.
    pub(super) open_jobs: u32,
    /// Its jobs in flight.
    pub(super) jobs: WaitList,
    parts: SmallVec<[Part; 1]>,
    /// Outcome of each chunk, if the request wants it.
    outcomes: Vec<Status>,
    pub(super) cancelled: Option<Status>,
    /// It is queued in [`Transfers::starting`].
    feeds: bool,
    /// Chunks that must still be written, once all cells are in memory.
    pub(super) pending_writes: u32,
    /// Chunks with all cells in memory that must be written, collected until they fill a batch.
    pub(super) whole: Vec<Slot>,
    /// Ancestors of its chunks that it waits for: they must be on disk, too.
    pub(super) ahead: Vec<Slot>,
    /// When it began: at its submission, or at the engine's ready event.
    pub(super) began_ns: u64,
    /// Some of its cells were on disk only.
    pub(super) was_below: bool,
    /// For a put of level *remote*: chunks whose upload has begun.
    pub(super) upload_begun: Vec<bool>,
    /// It moves nothing and waits for a remote lookup of so many tokens.
    pub(super) locates: Option<u64>,
}

/// A part of a transfer has completed.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Number of the transfer.
    pub number: u32,
    /// Index of the part.
    pub part: u32,
    /// Why it failed; NOT_FOUND = a cell was missing.
    pub error: Option<Error>,
    /// Tokens of the prefix that arrived without a gap.
    pub tokens: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Outcome of each chunk, if the request wants it.
    pub outcomes: Vec<Status>,
    /// The transfer is over and its number may be reused.
    pub last: bool,
}

impl Transfer {
    pub(super) fn new(spec: TransferSpec, now_ns: u64) -> Result<Transfer> {
        let chunks = spec.slots.len() as u32;
        let (parts, left) = match spec.by_layer {
            true => (spec.layers, chunks),
            false => (1, chunks * spec.layers as u32),
        };
        let mut all = SmallVec::new();
        all.try_reserve_exact(parts).map_err(|_| Status::NoMem)?;
        all.extend((0..parts).map(|_| Part { left, bad: u32::MAX, ..Part::default() }));
        let mut outcomes = Vec::new();
        if spec.by_chunk {
            outcomes.try_reserve_exact(chunks as usize).map_err(|_| Status::NoMem)?;
            outcomes.resize(chunks as usize, Status::Ok);
        }
        let mut upload_begun = Vec::new();
        if spec.level == Level::Remote {
            upload_begun.try_reserve_exact(chunks as usize).map_err(|_| Status::NoMem)?;
            upload_begun.resize(chunks as usize, false);
        }
        let (cursor, open_jobs, pending_writes) = (0, 0, 0);
        let (cancelled, feeds, jobs) = (None, false, WaitList::default());
        let (whole, ahead) = (Vec::new(), Vec::new());
        let (parts, began_ns, was_below) = (all, now_ns, false);
        Ok(Transfer {
            spec,
            cursor,
            open_jobs,
            jobs,
            parts,
            outcomes,
            cancelled,
            feeds,
            pending_writes,
            whole,
            ahead,
            began_ns,
            was_below,
            upload_begun,
            locates: None,
        })
    }

    /// Whether no cell is in flight or still to begin.
    pub(super) fn is_over(&self) -> bool {
        self.open_jobs == 0 && self.cursor == self.cells()
    }

    pub(super) fn cells(&self) -> u64 {
        self.spec.slots.len() as u64 * self.spec.layers as u64
    }

    /// Index of the chunk and of the layer of cell `at`. Cells begin layer by layer if each layer
    /// completes by itself, and in prefetches, since early layers are needed first; else chunk by
    /// chunk, as records on disk are laid out.
    pub(super) fn place(&self, at: u64) -> (usize, usize) {
        // check_transfer() keeps the product below 2^32; a division of 32 bits is faster.
        let (at, chunks, layers) =
            (at as u32, self.spec.slots.len() as u32, self.spec.layers as u32);
        match self.is_by_layer() {
            true => ((at % chunks) as usize, (at / chunks) as usize),
            false => ((at / layers) as usize, (at % layers) as usize),
        }
    }

    /// Whether its cells begin layer by layer; else chunk by chunk.
    pub(super) fn is_by_layer(&self) -> bool {
        self.spec.by_layer || self.spec.kind == TransferKind::Prefetch
    }

    /// Direction of its copies.
    pub(super) fn direction(&self) -> Direction {
        if self.spec.kind == TransferKind::Put { Direction::Gather } else { Direction::Scatter }
    }

    /// Whether its copies write around the caches: stored KV is rarely read soon, and the rest of a
    /// long get evicts the first cells before the engine reads them. Its cells have about `bytes`
    /// bytes.
    pub(super) fn is_past_caches(&self, bytes: u64) -> bool {
        let layers = if self.spec.by_layer { 1 } else { self.spec.layers as u64 };
        let cells = self.spec.slots.len() as u64 * layers;
        self.spec.kind == TransferKind::Put || cells.saturating_mul(bytes) >= LONG_GET_BYTES
    }

    /// Whether no cell has failed so far.
    pub(super) fn is_sound(&self) -> bool {
        self.parts.iter().all(|part| part.bad == u32::MAX)
    }

    /// Records that a chunk of a put did not reach its level.
    pub(super) fn note_failure(&mut self, chunk: u32, error: &Error) {
        for part in &mut self.parts {
            part.error.get_or_insert_with(|| error.clone());
            part.bad = part.bad.min(chunk);
        }
        if let Some(outcome) = self.outcomes.get_mut(chunk as usize) {
            note_outcome(outcome, error.status());
        }
    }

    /// Status that its jobs end with, if the transfer was cancelled.
    pub(super) fn stopped(&self) -> Option<Status> {
        self.cancelled
    }
}

/// The error of a get or prefetch that missed cells.
fn missing(cells: u32, tokens: u64) -> Error {
    let text = format!(
        "{cells} cells are in no tier: they were not stored, were evicted, or were damaged; the \
         first {tokens} tokens are complete: compute the others"
    );
    Error::new(Status::NotFound, text)
}

/// Overwrites a miss by any other error: a miss is reported only if nothing worse happened.
fn note_outcome(outcome: &mut Status, status: Status) {
    if matches!(*outcome, Status::Ok | Status::NotFound) {
        *outcome = status;
    }
}

/// Transfers and their jobs.
pub(super) struct Transfers {
    pub(super) table: Table<Transfer>,
    pub(super) jobs: Table<Job>,
    /// Transfers that have cells without a job yet.
    pub(super) starting: VecDeque<u32>,
    /// Jobs whose cell can be looked at again.
    pub(super) woken: Vec<u32>,
    /// Jobs that wait for host memory.
    pub(super) memory_waiters: WaitList,
    pub(super) memory_waiter_bytes: u64,
    /// The job that tries its allocation again now.
    pub(super) retrying: Option<u32>,
    /// The job that may use the reserve.
    pub(super) reserve_owner: Option<u32>,
    /// Jobs that wait for another job's work on a cell.
    pub(super) cell_waiters: BTreeMap<(At, usize), WaitList>,
    pub(super) finished: Vec<Finished>,
    /// Ended transfers, if the log has a reader.
    log: Option<Box<TransferLog>>,
    /// Buffer for pieces of host memory.
    pub(super) pieces: Vec<u32>,
    /// Buffer for the owners of such pieces.
    pub(super) owners: Vec<u64>,
}

impl Transfers {
    pub(super) fn new(config: &Config) -> Transfers {
        Transfers {
            table: Table::new(config.max_transfers as usize),
            jobs: Table::new(config.max_jobs as usize),
            starting: VecDeque::new(),
            woken: Vec::new(),
            memory_waiters: WaitList::default(),
            memory_waiter_bytes: 0,
            retrying: None,
            reserve_owner: None,
            cell_waiters: BTreeMap::new(),
            finished: Vec::new(),
            log: None,
            pieces: Vec::new(),
            owners: Vec::new(),
        }
    }

    /// Chunks that a durable put must sync.
    pub(super) fn chunks_to_sync(&self, number: u32) -> Vec<At> {
        let Transfer { spec: one, ahead, .. } = &self.table[number];
        let at = |&slot: &Slot| At { table: one.table, slot };
        one.slots.iter().chain(ahead).map(at).collect()
    }

    /// Fails if the table of transfers is full.
    pub(super) fn check_room(&self) -> Result<()> {
        if !self.table.has_room() {
            let all = self.table.len();
            fail!(Again, "{all} transfers are in flight, the limit: wait for one of them");
        }
        Ok(())
    }

    /// Routes a job again, without the device tier.
    pub(super) fn restart_job(&mut self, id: u32) {
        let job = &mut self.jobs[id];
        (job.plain, job.step) = (true, Step::Fresh);
        self.woken.push(id);
    }

    /// Chunk table and cell of a job.
    pub(super) fn cell_of(&self, job: &Job) -> (u32, Cell) {
        (self.table[job.number].spec.table, job.cell)
    }

    pub(super) fn start_later(&mut self, number: u32) {
        let transfer = &mut self.table[number];
        if !transfer.feeds {
            transfer.feeds = true;
            self.starting.push_back(number);
        }
    }
}

impl StoreState {
    /// Begins a transfer and returns its number. Its chunks are referenced until it is over.
    pub fn submit(&mut self, spec: TransferSpec) -> Result<u32> {
        self.check_transfer(&spec, spec.slots.len())?;
        let (table, ticket, after) = (spec.table, spec.ticket, spec.after);
        let number = self.transfers.table.add(Transfer::new(spec, self.now_ns)?)?;
        let slots = std::mem::take(&mut self.transfers.table[number].spec.slots);
        let mut begun = self.retain_chunks(table, &slots);
        if begun.is_ok() {
            begun = self.admit_put(number, &slots);
            if begun.is_err() {
                self.release_chunks(table, &slots);
            }
        }
        if let Err(error) = begun {
            self.transfers.table.remove(number);
            return Err(error);
        }
        self.transfers.table[number].spec.slots = slots;
        self.dependencies.join_event(after);
        self.prefetch_begins(number);
        self.note_retention(number);
        self.notify_policies(number);
        match self.transfers.table[number].spec.kind {
            TransferKind::Put => self.counters.puts += 1,
            TransferKind::Get => self.counters.gets += 1,
            TransferKind::Prefetch => self.counters.prefetches += 1,
        }
        match ticket {
            Some(ticket) => self.dependencies.add_ticket(number, ticket),
            None => self.transfers.start_later(number),
        }
        if self.transfers.table[number].cells() == 0 {
            self.end_first_phase(number);
        }
        self.settle();
        Ok(number)
    }

    /// References the chunks of a transfer: all, or none.
    fn retain_chunks(&mut self, table: u32, slots: &[Slot]) -> Result<()> {
        for (at, &slot) in slots.iter().enumerate().filter(|&(_, &slot)| slot != NONE) {
            match self.tables[table as usize].chunks.retain(slot) {
                // Its session references it, too.
                Ok(references) if references > 1 => {}
                Ok(_) => self.note_held(table, slot),
                Err(error) => {
                    self.release_chunks(table, &slots[..at]);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn release_chunks(&mut self, table: u32, slots: &[Slot]) {
        for &slot in slots.iter().rev().filter(|&&slot| slot != NONE) {
            self.release_chunk(table, slot);
        }
    }

    /// Checks a request for so many chunks. Called before rows are reserved, too, since that may
    /// evict others.
    pub(super) fn check_transfer(&self, spec: &TransferSpec, chunks: usize) -> Result<()> {
        let Some(table) = self.tables.get(spec.table as usize) else {
            fail!(NotFound, "there is no chunk table {}", spec.table);
        };
        let (from, to) = (spec.first_layer, spec.first_layer.saturating_add(spec.layers));
        if spec.layers == 0 || to > table.layout.layers() {
            fail!(Invalid, "layers {from}..{to} of a model with {}", table.layout.layers());
        }
        if chunks > MAX_TRANSFER_CHUNKS
            || chunks.checked_mul(spec.layers).is_none_or(|n| n >> 32 != 0)
        {
            fail!(
                Limit,
                "a transfer of {chunks} chunks: at most {MAX_TRANSFER_CHUNKS}, submit several"
            );
        }
        if spec.level.is_on_disk() && self.disk.is_none() {
            fail!(
                Unavailable,
                "the store has no disk: put with level ram, or open the store with disk="
            );
        }
        if spec.level == Level::Remote && self.remote.is_none() {
            fail!(
                Unavailable,
                "the store has no remote: put with another level, or open the store with remote="
            );
        }
        // Views of another process stay there, and are checked there.
        let is_own = spec.views.origin.is_none();
        if is_own && spec.kind != TransferKind::Prefetch && spec.views.layers.len() != spec.layers {
            fail!(Invalid, "{} views for {} layers", spec.views.layers.len(), spec.layers);
        }
        self.check_after_event(spec)?;
        self.transfers.check_room()
    }

    /// Checks that the views cover so many tokens of so many chunks.
    /// Checks the first layer and the number of layers of a transfer of a session.
    pub fn check_layers(&self, session: u32, (first, count): (usize, usize)) -> Result<()> {
        let namespace = self.session(session)?.namespace();
        let has = self.table_of(namespace).map_or(0, |table| table.layout.layers());
        match first.checked_add(count) {
            Some(end) if count > 0 && end <= has => Ok(()),
            _ => fail!(Invalid, "{count} layers from {first} on: the layout has {has}"),
        }
    }

    pub(super) fn check_views(
        &self,
        (table, kind): (u32, TransferKind),
        views: &Views,
        first_layer: usize,
        tokens: u32,
        chunks: u32,
    ) -> Result<()> {
        let direction = match kind {
            _ if views.origin.is_some() => return Ok(()),
            TransferKind::Prefetch => return Ok(()),
            TransferKind::Put => Direction::Gather,
            TransferKind::Get => Direction::Scatter,
        };
        views.check(&self.tables[table as usize].layout, first_layer, tokens, chunks, direction)
    }

    /// Cancels a transfer: cells that have not begun are skipped. It completes once the cells in
    /// flight have.
    pub fn cancel(&mut self, number: u32, status: Status) {
        let Some(one) = self.transfers.table.get_mut(number) else { return };
        one.cancelled.get_or_insert(status);
        let ticket = one.spec.ticket;
        if self.stop_locating(number, status) {
            return self.settle();
        }
        self.dependencies.stop_waiting(ticket);
        self.withdraw_all(number, status);
        // Skipping takes no jobs, so it can be done at once.
        self.skip_rest(number);
        self.settle();
    }

    /// Turns cells of transfers into jobs while the window and the job table have room. Returns
    /// whether any began.
    pub(super) fn feed(&mut self) -> bool {
        let Some(number) = self.transfers.starting.pop_front() else { return false };
        let Some(one) = self.transfers.table.get_mut(number) else { return true };
        // The transfer may have ended in the queue, and its number may be another one's now.
        if !std::mem::take(&mut one.feeds) {
            return true;
        }
        loop {
            let one = &mut self.transfers.table[number];
            if one.cursor == one.cells() || one.open_jobs >= WINDOW {
                return true;
            }
            if !self.transfers.jobs.has_room() {
                self.transfers.start_later(number);
                return false;
            }
            if self.is_parked(number) {
                return true;
            }
            let one = &mut self.transfers.table[number];
            let at = one.cursor;
            one.cursor += 1;
            one.open_jobs += 1;
            let (chunk, layer) = one.place(at);
            if one.spec.needed_from.get(layer).is_some_and(|&from| chunk < from as usize) {
                self.cells_ended(number, (at, 1), 0, None);
                if self.transfers.table.get(number).is_none() {
                    return true;
                }
                continue;
            }
            let layer = one.spec.first_layer + layer;
            let cell = Cell { chunk: one.spec.slots[chunk], layer };
            if self.begin_run(number, at, cell) {
                continue;
            }
            let rows = &self.tables[self.transfers.table[number].spec.table as usize];
            let (tokens, bytes) = (rows.row_count(cell), rows.planes(cell).bytes());
            let job = self.add_job(Job::new(number, at, cell, tokens, bytes));
            self.begin_after_event(job);
            self.route(job);
            if self.transfers.table.get(number).is_none() {
                return true; // that was its last one
            }
        }
    }

    /// Adds a job to its transfer, which has counted it. The table has room.
    pub(super) fn add_job(&mut self, job: Job) -> u32 {
        let number = job.number;
        let id = self.transfers.jobs.add(job).expect("there is room");
        self.transfers.table[number].jobs.push_back(&mut self.transfers.jobs, Of::Transfer, id);
        id
    }

    /// Skips cells that have not begun.
    fn skip_rest(&mut self, number: u32) {
        let Some(one) = self.transfers.table.get_mut(number) else { return };
        let status = one.cancelled.unwrap_or(Status::Cancelled);
        let (from, to) = (one.cursor, one.cells());
        if from == to {
            return;
        }
        one.cursor = to;
        one.open_jobs += 1; // until all are counted it is not over
        for at in from..to {
            let one = &mut self.transfers.table[number];
            one.open_jobs += 1;
            self.count(number, (at, 1), 0, Some(status.into()));
        }
        let one = &mut self.transfers.table[number];
        one.open_jobs -= 1;
        if one.open_jobs == 0 {
            self.end_first_phase(number);
        }
    }

    /// Counts the outcome of a job: so many cells from the cell `at` on.
    pub(super) fn count(
        &mut self,
        number: u32,
        (at, cells): (u64, u32),
        bytes: u64,
        error: Option<Error>,
    ) {
        let spec = &self.transfers.table[number].spec;
        let (tenant, kind) = (spec.context.tenant, spec.kind);
        self.stats.tenants.count(tenant, kind, (bytes, cells), error.as_ref());
        self.cells_ended(number, (at, cells), bytes, error);
    }

    fn cells_ended(
        &mut self,
        number: u32,
        (at, cells): (u64, u32),
        bytes: u64,
        error: Option<Error>,
    ) {
        let transfer = &mut self.transfers.table[number];
        let (chunk, layer) = transfer.place(at);
        let index = if transfer.spec.by_layer { layer } else { 0 };
        let part = &mut transfer.parts[index];
        part.left -= cells;
        part.bytes += bytes;
        if let Some(error) = error {
            part.bad = part.bad.min(chunk as u32);
            part.missed += if error.status() == Status::NotFound { cells } else { 0 };
            if let Some(outcome) = transfer.outcomes.get_mut(chunk) {
                note_outcome(outcome, error.status());
            }
            // A miss is reported only where nothing else failed.
            if part.error.as_ref().is_none_or(|e| e.status() == Status::NotFound) {
                part.error = Some(error);
            }
        }
        transfer.open_jobs -= 1;
        let ends = part.left == 0 && transfer.spec.level == Level::Ram;
        let over = transfer.open_jobs == 0 && transfer.cursor == transfer.cells();
        let wants_more = transfer.open_jobs < WINDOW / 2 && transfer.cursor < transfer.cells();
        if ends && transfer.spec.by_layer {
            self.complete_part(number, index, false);
        }
        if over {
            self.end_first_phase(number);
        } else if wants_more {
            self.transfers.start_later(number);
        }
    }

    /// All cells are in memory, or have failed. A put continues to its level.
    fn end_first_phase(&mut self, number: u32) {
        if self.transfers.table[number].spec.kind == TransferKind::Put {
            self.write_back_put(number);
            self.queue_upload(number);
        }
        if self.transfers.table[number].pending_writes == 0 {
            self.end_transfer(number);
        }
    }

    /// Fails a put that waits for the disk, for all its chunks.
    pub(super) fn note_failure(&mut self, number: u32, error: &Error) {
        let transfer = &mut self.transfers.table[number];
        transfer.note_failure(0, error);
        transfer.outcomes.iter_mut().for_each(|outcome| note_outcome(outcome, error.status()));
    }

    /// Ends a transfer: completes the parts that are still open.
    pub(super) fn end_transfer(&mut self, number: u32) {
        if self.must_wait_for_sync(number) {
            return;
        }
        self.conclude(number);
    }

    /// Releases a transfer's references and its number.
    pub(super) fn conclude(&mut self, number: u32) {
        let one = &self.transfers.table[number];
        let (table, parts) = (one.spec.table, one.parts.len());
        let reported = one.spec.by_layer && one.spec.level == Level::Ram;
        let is_own = self.is_prefetch(number);
        for part in 0..parts {
            if !reported && !is_own {
                self.complete_part(number, part, part + 1 == parts);
            }
        }
        if reported {
            // The transfer ends because its last part has completed, so this is near the end of the
            // list.
            let last = self.transfers.finished.iter_mut().rev().find(|f| f.number == number);
            debug_assert!(last.is_some(), "a transfer ended without a completion");
            last.into_iter().for_each(|last| last.last = true);
        }
        self.log_ended(number);
        let Some(one) = self.transfers.table.remove(number) else { return };
        self.prefetch_ended(number);
        self.stats.latencies.moved(&one, self.now_ns);
        self.dependencies.stop_waiting(one.spec.ticket);
        self.dependencies.release_event(one.spec.after);
        if one.spec.kind == TransferKind::Put {
            let slots = one.spec.slots.iter().filter(|&&slot| slot != NONE);
            slots.for_each(|&slot| self.put_ended(At { table, slot }));
        }
        self.release_chunks(table, &one.spec.slots);
    }

    fn complete_part(&mut self, number: u32, index: usize, last: bool) {
        let tokens = self.leading_tokens(number, self.transfers.table[number].parts[index].bad);
        let transfer = &mut self.transfers.table[number];
        let part = &mut transfer.parts[index];
        let (error, bytes) = (part.error.clone(), part.bytes);
        let (missed, is_put) = (part.missed, transfer.spec.kind == TransferKind::Put);
        let error = error.map(|error| match error.status() {
            Status::NotFound if !is_put && missed > 0 => missing(missed, tokens),
            _ => error,
        });
        let part = index as u32;
        let outcomes = std::mem::take(&mut transfer.outcomes);
        self.transfers.finished.push(Finished {
            number,
            part,
            error,
            tokens,
            bytes,
            outcomes,
            last,
        });
    }

    /// Tokens of the chunks before chunk `bad`, or of all.
    fn leading_tokens(&self, number: u32, bad: u32) -> u64 {
        let transfer = &self.transfers.table[number];
        let table = &self.tables[transfer.spec.table as usize];
        let whole = (bad as usize).min(transfer.spec.slots.len());
        // All chunks of a path but the last are full. One without a row was not needed.
        let full = table.layout.chunk_tokens();
        let tokens_of =
            |&slot: &Slot| table.chunks.chunk(slot).map_or(full, |row| row.valid_tokens());
        match transfer.spec.slots[..whole].split_last() {
            Some((tail, before)) => {
                before.len() as u64 * u64::from(full) + u64::from(tokens_of(tail))
            }
            None => transfer.locates.unwrap_or(0),
        }
    }

    /// Adds a transfer that ends to the log if the log has a reader.
    fn log_ended(&mut self, number: u32) {
        if self.transfers.log.is_none() {
            return;
        }
        let Some(one) = self.transfers.table.get(number) else { return };
        let first_bad = one.parts.iter().map(|part| part.bad).min().unwrap_or(u32::MAX);
        let error = one.parts.iter().find_map(|part| part.error.as_ref());
        let spec = &one.spec;
        let ended = EndedTransfer {
            number: 0,
            began_ns: one.began_ns,
            ended_ns: self.now_ns.max(one.began_ns),
            session: spec.context.session.unwrap_or(0),
            tokens: self.leading_tokens(number, first_bad),
            bytes: one.parts.iter().map(|part| part.bytes).sum(),
            tenant: spec.context.tenant,
            kind: spec.kind as u8,
            level: spec.level as u8,
            is_lookup: one.locates.is_some().into(),
            read_disk: one.was_below.into(),
            chunks: spec.slots.len() as u32,
            layers: spec.layers as u32,
            missed_cells: one.parts.iter().map(|part| part.missed).sum(),
            status: error.map_or(Status::Ok, Error::status) as i32,
        };
        if let Some(log) = &mut self.transfers.log {
            log.ring.add(|number| EndedTransfer { number, ..ended });
        }
    }

    /// Whether ended transfers are logged: the log has a reader.
    pub fn logs_transfers(&self) -> bool {
        self.transfers.log.is_some()
    }

    /// Ended transfers from number `from` on, up to [`MOST_ENDED`], and how many before them are lost.
    /// The log begins with the first call, and then has this `run`.
    pub fn ended_transfers(&mut self, from: u64, most: usize, run: u64) -> Result<EndedTransfers> {
        let log = match &mut self.transfers.log {
            Some(log) => log,
            none => none.insert(Box::new(TransferLog::new(run)?)),
        };
        let mut all = Vec::new();
        let most = most.min(MOST_ENDED);
        all.try_reserve_exact(most).map_err(|_| Status::NoMem)?;
        all.resize(most, EndedTransfer::default());
        let (count, missed) = log.ring.read(from, &mut all);
        all.truncate(count);
        Ok(EndedTransfers { run: log.run, missed, next: log.ring.next_number(), all })
    }
}

/// Most transfers of one call of [`StoreState::ended_transfers`].
pub const MOST_ENDED: usize = 4096;

/// A part of the log of ended transfers.
#[derive(Clone, Debug)]
pub struct EndedTransfers {
    /// Differs between openings of a store.
    pub run: u64,
    /// Transfers before the first one that were dropped from the log.
    pub missed: u64,
    /// Number of the transfer that ends next.
    pub next: u64,
    /// The transfers.
    pub all: Vec<EndedTransfer>,
}

// ---------- jobs
//
// A job: one cell of a transfer.

/// State of a job; see the diagram at the top.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// To be routed: in [`Transfers::woken`], or by the caller.
    Fresh,
    /// Waits for host memory.
    WaitsForMemory,
    /// Waits for another job's work on the same cell.
    Waiting,
    /// Queued for a copy.
    Copies,
    /// Its copy waits for a device event.
    AfterEvent,
    /// Being copied.
    Copying,
    /// Queued for a disk read.
    Reads,
    /// Being read from disk.
    Reading,
    /// Queued for a remote fetch, together with the other cells of its object.
    Fetches,
    /// Being fetched.
    Fetching,
}

/// One cell of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Number of the transfer.
    pub(super) number: u32,
    /// Index of the cell in its transfer.
    pub(super) at: u64,
    /// The cell, in the transfer's chunk table.
    pub(super) cell: Cell,
    /// Host memory that the job fills or reads.
    pub(super) piece: Option<Piece>,
    pub(super) step: Step,
    pub(super) retries: u8,
    /// The cell had to be read from disk.
    pub(super) was_below: bool,
    /// It reads the cell's replica in device memory.
    pub(super) uses_device: bool,
    /// Device memory that it fills.
    pub(super) replica: Option<device::Piece>,
    /// Bytes it adds to those that wait for device events.
    pub(super) event_bytes: u64,
    /// It does not use the device tier any more.
    pub(super) plain: bool,
    /// The remote did not have the cell.
    pub(super) gave_up_remote: bool,
    /// Tokens already copied, if the cell is copied in parts.
    pub(super) copied: u32,
    /// Tokens of the part that is being copied.
    pub(super) part: u32,
    /// Cells of a run: the job copies so many cells of its transfer from `cell` on; see
    /// [`StoreState::begin_run`]. 0: one cell, which is routed by its residency.
    pub(super) run: u16,
    /// Rows of each of its cells: tokens, or 1 for a state.
    pub(super) rows: u32,
    /// Bytes of its cells.
    pub(super) bytes: u64,
    /// Links in the lists that it stands in, by [`Of`].
    pub(super) links: [Link; 2],
}

impl Job {
    pub(super) fn new(number: u32, at: u64, cell: Cell, rows: u32, bytes: u64) -> Job {
        let (piece, step, links) = (None, Step::Fresh, [Link::NONE; 2]);
        Job {
            number,
            at,
            cell,
            piece,
            step,
            retries: 0,
            was_below: false,
            uses_device: false,
            replica: None,
            event_bytes: 0,
            plain: false,
            gave_up_remote: false,
            copied: 0,
            part: 0,
            run: 0,
            rows,
            bytes,
            links,
        }
    }

    /// Number of its cells.
    pub(super) fn cells(&self) -> u32 {
        u32::from(self.run.max(1))
    }
}

impl StoreState {
    /// Decides what a job needs next, from the residency of its cell.
    pub(super) fn route(&mut self, id: u32) {
        let Some(job) = self.transfers.jobs.get(id).copied() else { return };
        let transfer = &self.transfers.table[job.number];
        if let Some(status) = transfer.stopped() {
            return self.end_job(id, 0, Some(status.into()));
        }
        let kind = transfer.spec.kind;
        let (table, cell) = self.transfers.cell_of(&job);
        let marks = self.tables[table as usize].chunks.marks(cell.chunk);
        let marks = marks.and_then(|all| all.get(cell.layer)).copied().unwrap_or_default();
        match kind {
            TransferKind::Put => self.route_put(id, table, cell, marks),
            TransferKind::Get | TransferKind::Prefetch => {
                self.route_get(id, kind, table, cell, marks)
            }
        }
    }

    fn route_put(&mut self, id: u32, table: u32, cell: Cell, marks: Residency) {
        if marks.resident_tiers() != 0 {
            // After a crash a record may lack its bytes. Read it before the put counts it as
            // stored.
            let number = self.transfers.jobs[id].number;
            let level = self.transfers.table[number].spec.level;
            let is_above = marks.resident_tiers() & HOST_MASK != 0;
            let is_known = !level.is_on_disk() || is_above;
            if !is_known && self.tables[table as usize].has(cell.chunk, note::UNREAD) {
                return self.read_from_disk(id, table, cell, marks);
            }
            if level == Level::Remote {
                // The copy reads host memory.
                if !is_above && marks.resident_tiers() & DISK_MASK != 0 {
                    return self.read_from_disk(id, table, cell, marks);
                }
                let (chunk, _) = self.transfers.table[number].place(self.transfers.jobs[id].at);
                self.write_whole_chunks(number, chunk as u32, At { table, slot: cell.chunk });
            }
            self.counters.known_cells += 1;
            return self.end_job(id, 0, None);
        }
        if marks.arriving() != 0 || marks.leaving() & HOST_MASK != 0 {
            return self.wait_for_cell(id, table, cell);
        }
        let Some(piece) = self.get_memory(id, table, cell) else { return };
        match self.tables[table as usize].chunks.begin_store(cell, Tier::Host) {
            Ok(Begin::Started) => {
                self.transfers.jobs[id].piece = Some(piece);
                self.queue_copy(id, table, cell);
            }
            begun => {
                self.give_back(piece);
                self.end_job(id, 0, Some(unexpected(begun)));
            }
        }
    }

    fn route_get(&mut self, id: u32, kind: TransferKind, table: u32, cell: Cell, marks: Residency) {
        if marks.resident_tiers() & DEVICE_MASK != 0 && self.route_replica(id, kind, table, cell) {
            return;
        }
        if marks.resident_tiers() & HOST_MASK != 0 {
            if kind == TransferKind::Prefetch {
                return self.end_job(id, 0, None);
            }
            return match self.tables[table as usize].chunks.begin_read(cell, Tier::Host) {
                Ok(place) => {
                    // The cell may be evicted meanwhile. The job keeps its piece, the table drops
                    // it.
                    self.transfers.jobs[id].piece = match place {
                        Location::Host(piece) => Some(Piece(piece)),
                        _ => None,
                    };
                    self.queue_copy(id, table, cell);
                }
                Err(error) => self.end_job(id, 0, Some(error)),
            };
        }
        if marks.resident_tiers() & DISK_MASK == 0
            && (marks.arriving() | marks.leaving()) & HOST_MASK == 0
        {
            if !self.transfers.jobs[id].gave_up_remote && self.may_fetch(table, cell) {
                return self.fetch(id, table, cell);
            }
            // A prefetch that finds nothing is no miss.
            self.counters.missed_cells +=
                u64::from(!self.is_prefetch(self.transfers.jobs[id].number));
            return self.end_job(id, 0, Some(Status::NotFound.into()));
        }
        self.read_from_disk(id, table, cell, marks);
    }

    /// Queues a read of a cell that is on disk only.
    fn read_from_disk(&mut self, id: u32, table: u32, cell: Cell, marks: Residency) {
        let number = self.transfers.jobs[id].number;
        self.transfers.table[number].was_below |= marks.resident_tiers() & DISK_MASK != 0;
        if (marks.arriving() | marks.leaving()) & HOST_MASK != 0 {
            return self.wait_for_cell(id, table, cell);
        }
        let Some(piece) = self.get_memory(id, table, cell) else { return };
        match self.tables[table as usize].chunks.begin_copy(cell, Tier::Disk, Tier::Host) {
            Ok(Begin::Started) => {
                let spec = &self.transfers.table[self.transfers.jobs[id].number].spec;
                let (lane, flow) = (spec.lane, spec.flow);
                let bytes = self.tables[table as usize].planes(cell).bytes();
                let job = &mut self.transfers.jobs[id];
                (job.piece, job.step, job.was_below) = (Some(piece), Step::Reads, true);
                self.stages.read.queue.push(lane, flow, id, bytes);
            }
            begun => {
                self.give_back(piece);
                self.end_job(id, 0, Some(unexpected(begun)));
            }
        }
    }

    pub(super) fn queue_copy(&mut self, id: u32, table: u32, cell: Cell) {
        if self.queue_after_event(id) {
            return;
        }
        let spec = &self.transfers.table[self.transfers.jobs[id].number].spec;
        let (lane, flow) = (spec.lane, spec.flow);
        let bytes = self.tables[table as usize].planes(cell).bytes();
        self.transfers.jobs[id].step = Step::Copies;
        self.copies_of(self.transfers.jobs[id].uses_device).push(lane, flow, id, bytes);
    }

    fn wait_for_cell(&mut self, id: u32, table: u32, cell: Cell) {
        let at = At { table, slot: cell.chunk };
        if self.is_hung(at, cell.layer) {
            return self.end_hung(id);
        }
        self.transfers.jobs[id].step = Step::Waiting;
        let list = self.transfers.cell_waiters.entry((at, cell.layer)).or_default();
        list.push_back(&mut self.transfers.jobs, Of::Wait, id);
        self.expedite_fetch(id, at, cell.layer);
    }

    /// The residency of a cell has changed: routes the jobs that wait for it.
    pub(super) fn wake(&mut self, table: u32, cell: Cell) {
        self.eviction.reclaim_targets.changed();
        if self.transfers.cell_waiters.is_empty() {
            return;
        }
        let at = At { table, slot: cell.chunk };
        let Some(mut list) = self.transfers.cell_waiters.remove(&(at, cell.layer)) else { return };
        while let Some(id) = list.pop_back(&mut self.transfers.jobs, Of::Wait) {
            self.transfers.jobs[id].step = Step::Fresh;
            self.transfers.woken.push(id);
        }
    }

    /// Allocates host memory for a job's cell. Without memory the job waits and `None` is returned.
    pub(super) fn get_memory(&mut self, id: u32, table: u32, cell: Cell) -> Option<Piece> {
        let bytes = self.tables[table as usize].planes(cell).bytes();
        // First come, first served: small cells must not overtake a large one forever.
        let is_first =
            self.transfers.memory_waiters.is_empty() || self.transfers.retrying == Some(id);
        if let Some(piece) =
            is_first.then(|| self.host.alloc_for(bytes, owner_of(table, cell)).ok()).flatten()
        {
            self.eviction.refusals = 0;
            return Some(piece);
        }
        if self.transfers.reserve_owner == Some(id)
            && let Some(piece) = self.host.take_reserve(bytes, owner_of(table, cell))
        {
            return Some(piece);
        }
        self.transfers.jobs[id].step = Step::WaitsForMemory;
        self.transfers.memory_waiter_bytes += bytes;
        match is_first {
            true => {
                self.transfers.memory_waiters.push_front(&mut self.transfers.jobs, Of::Wait, id)
            }
            false => {
                self.transfers.memory_waiters.push_back(&mut self.transfers.jobs, Of::Wait, id)
            }
        }
        None
    }

    /// Memory was freed: the oldest waiter tries again. Returns whether it got memory.
    pub(super) fn retry_memory_waiters(&mut self) -> bool {
        let Some(id) = self.transfers.memory_waiters.first() else { return false };
        self.unqueue_memory_waiter(id);
        self.transfers.retrying = Some(id);
        self.route(id);
        self.transfers.retrying = None;
        self.transfers.memory_waiters.first() != Some(id)
    }

    /// Ends the oldest waiter for memory with an error.
    pub(super) fn fail_memory_waiters(&mut self) {
        let Some(id) = self.transfers.memory_waiters.first() else { return };
        self.counters.no_room_cells += 1;
        let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
        let bytes = self.tables[table as usize].planes(cell).bytes();
        let message = format!(
            "no memory for a cell of {bytes} bytes (layer {}), and nothing can be evicted from the {} \
             bytes of host=: all chunks are referenced, pinned or in transfer. Close sessions, or raise host=",
            cell.layer, self.config.host_bytes
        );
        self.unqueue_memory_waiter(id);
        self.end_job(id, 0, Some(Error::new(Status::Budget, message)));
    }

    pub(super) fn unqueue_memory_waiter(&mut self, id: u32) {
        let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
        self.transfers.memory_waiter_bytes -= self.tables[table as usize].planes(cell).bytes();
        self.transfers.jobs[id].step = Step::Fresh;
        self.transfers.memory_waiters.remove(&mut self.transfers.jobs, Of::Wait, id);
    }

    pub(super) fn give_back(&mut self, piece: Piece) {
        if let Err(error) = self.host.free(piece) {
            log::error!("internal: a piece of host memory was freed twice: {error}");
        }
    }

    /// Ends a job that is in no queue and no batch.
    pub(super) fn end_job(&mut self, id: u32, bytes: u64, error: Option<Error>) {
        let Some(number) = self.transfers.jobs.get(id).map(|job| job.number) else { return };
        self.transfers.table[number].jobs.remove(&mut self.transfers.jobs, Of::Transfer, id);
        if let Some(job) = self.transfers.jobs.remove(id) {
            self.end_after_event(&job);
            self.count(job.number, (job.at, job.cells()), bytes, error);
        }
    }

    /// Withdraws all jobs of a transfer.
    pub(super) fn withdraw_all(&mut self, number: u32, status: Status) {
        let mut next = self.transfers.table.get(number).and_then(|one| one.jobs.first());
        while let Some(id) = next {
            // Withdrawing a job ends no other job, so `next` stays valid.
            next = WaitList::after(&self.transfers.jobs, Of::Transfer, id);
            self.withdraw(id, status);
        }
    }

    /// Ends a job that is queued or waits. A job in a batch continues.
    fn withdraw(&mut self, id: u32, status: Status) {
        let Some(job) = self.transfers.jobs.get(id).copied() else { return };
        let (table, cell) = self.transfers.cell_of(&job);
        match job.step {
            // A woken job ends when it is routed, since its transfer is cancelled.
            Step::Fresh | Step::Copying | Step::Reading => return,
            // A remote may take longer than a caller waits, and touches none of the caller's
            // memory.
            Step::Fetching => {
                self.abandon_fetch(id, At { table, slot: cell.chunk }, cell.layer);
            }
            Step::WaitsForMemory => self.unqueue_memory_waiter(id),
            Step::Waiting => {
                let key = (At { table, slot: cell.chunk }, cell.layer);
                if let Entry::Occupied(mut entry) = self.transfers.cell_waiters.entry(key) {
                    entry.get_mut().remove(&mut self.transfers.jobs, Of::Wait, id);
                    if entry.get().is_empty() {
                        entry.remove();
                    }
                }
            }
            Step::Copies => {
                self.copies_of(job.uses_device).remove(id);
                self.end_copying(id, false);
            }
            Step::AfterEvent => {
                self.withdraw_after_event(&job, id);
                self.end_copying(id, false);
            }
            Step::Reads => {
                self.stages.read.queue.remove(id);
                // The read never began, so nothing has failed.
                self.end_reading(&job, table, cell, Err(Status::Again.into()));
            }
            Step::Fetches => {
                self.withdraw_request(id, table, cell);
                self.end_reading(&job, table, cell, Err(Status::Again.into()));
            }
        }
        self.end_job(id, 0, Some(status.into()));
    }
}

fn unexpected(begun: Result<Begin>) -> Error {
    match begun {
        Err(error) => error,
        Ok(begun) => {
            Error::new(Status::State, format!("internal: begin of an idle cell returned {begun:?}"))
        }
    }
}

// ---------- wait list
//
// Linked lists of jobs: those of one transfer, and those that wait for the same thing. A job is in at
// most one list of each kind, and is unlinked in constant time.

/// Kind of a list of jobs.
#[derive(Clone, Copy)]
pub(super) enum Of {
    /// All jobs of a transfer, in the order in which they began.
    Transfer = 0,
    /// Jobs that wait for host memory, or for the same cell.
    Wait = 1,
}

/// Neighbours of a job in a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    before: u32,
    after: u32,
}

/// A list of jobs. The links are in the jobs, so any job is removed in constant time.
#[derive(Debug)]
pub(super) struct WaitList {
    first: u32,
    last: u32,
    count: usize,
}

impl Link {
    /// Links of a job in no list.
    pub const NONE: Link = Link { before: NONE, after: NONE };
}

impl Default for WaitList {
    fn default() -> WaitList {
        WaitList { first: NONE, last: NONE, count: 0 }
    }
}

impl WaitList {
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn first(&self) -> Option<u32> {
        Some(self.first).filter(|&id| id != NONE)
    }

    /// Its jobs, from the first to the last.
    pub fn all(&self, jobs: &Table<Job>, of: Of) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first(), move |&id| WaitList::after(jobs, of, id))
    }

    /// The job after `id`.
    pub fn after(jobs: &Table<Job>, of: Of, id: u32) -> Option<u32> {
        Some(jobs[id].links[of as usize].after).filter(|&id| id != NONE)
    }

    pub fn push_back(&mut self, jobs: &mut Table<Job>, of: Of, id: u32) {
        self.put(jobs, of, id, Link { before: self.last, after: NONE });
    }

    pub fn push_front(&mut self, jobs: &mut Table<Job>, of: Of, id: u32) {
        self.put(jobs, of, id, Link { before: NONE, after: self.first });
    }

    fn put(&mut self, jobs: &mut Table<Job>, of: Of, id: u32, link: Link) {
        jobs[id].links[of as usize] = link;
        self.join(jobs, of, link, Link { before: id, after: id });
        self.count += 1;
    }

    /// Removes a job, which must be in the list.
    pub fn remove(&mut self, jobs: &mut Table<Job>, of: Of, id: u32) {
        let link = std::mem::replace(&mut jobs[id].links[of as usize], Link::NONE);
        self.join(jobs, of, link, Link { before: link.before, after: link.after });
        self.count -= 1;
    }

    pub fn pop_back(&mut self, jobs: &mut Table<Job>, of: Of) -> Option<u32> {
        let id = Some(self.last).filter(|&id| id != NONE)?;
        self.remove(jobs, of, id);
        Some(id)
    }

    /// Makes the neighbours of `at` point to `to`: the one before to `to.after`, the one after to
    /// `to.before`.
    fn join(&mut self, jobs: &mut Table<Job>, of: Of, at: Link, to: Link) {
        match at.before {
            NONE => self.first = to.after,
            before => jobs[before].links[of as usize].after = to.after,
        }
        match at.after {
            NONE => self.last = to.before,
            after => jobs[after].links[of as usize].before = to.before,
        }
    }
}

impl StoreState {
    /// Checks that each job is in exactly the lists that its state requires.
    pub(super) fn check_wait_lists(&self) -> Result<()> {
        let (mut found, mut waiting) = (0, 0);
        for (number, one) in self.transfers.table.iter() {
            let is_its =
                |id: &u32| self.transfers.jobs.get(*id).is_some_and(|job| job.number == number);
            let count = one.jobs.all(&self.transfers.jobs, Of::Transfer).filter(is_its).count();
            if count != one.jobs.len() || count != one.open_jobs as usize {
                fail!(
                    State,
                    "transfer {number} has {} cells in flight, {count} jobs",
                    one.open_jobs
                );
            }
            found += count;
        }
        let behind = self.dependencies.events.wait_lists().map(|list| (list, Step::AfterEvent));
        let lists = self.transfers.cell_waiters.values().map(|list| (list, Step::Waiting));
        for (list, step) in
            lists.chain([(&self.transfers.memory_waiters, Step::WaitsForMemory)]).chain(behind)
        {
            let is_so = |id: &u32| self.transfers.jobs.get(*id).is_some_and(|job| job.step == step);
            let count = list.all(&self.transfers.jobs, Of::Wait).filter(is_so).count();
            if count != list.len() {
                fail!(State, "{} jobs are {step:?}, {count} of them are listed", list.len());
            }
            waiting += count;
        }
        let waits =
            |job: &Job| matches!(job.step, Step::Waiting | Step::WaitsForMemory | Step::AfterEvent);
        let wait = self.transfers.jobs.iter().filter(|(_, job)| waits(job)).count();
        if (found, waiting) != (self.transfers.jobs.len(), wait) {
            fail!(
                State,
                "{found} of {} jobs are in their transfer's list, {waiting} of {wait} in a wait list",
                self.transfers.jobs.len()
            );
        }
        Ok(())
    }
}

// ---------- host copies
//
// Copies between the engine's tensors and the store: batches, and their outcome. A large cell is copied
// in parts, so that other sessions are served in between.

/// A cell longer than a batch is copied in parts of one `PARTS`th of a batch.
pub(super) const PARTS: u64 = 4;

/// A place of a cell in the store.
struct Side {
    address: usize,
    memory: Memory,
    /// Checksums of its planes, if the device tier has them.
    sums: Option<[u64; 2]>,
}

impl Side {
    fn on_device(address: usize) -> Side {
        Side { address, memory: Memory::Device, sums: None }
    }
}

impl StoreState {
    /// The queue of copies: from device memory, or all others.
    pub(super) fn copies_of(&mut self, uses_device: bool) -> &mut Queues {
        match &mut self.replicas {
            Some(replicas) if uses_device => &mut replicas.stage.queue,
            _ => &mut self.stages.copy.queue,
        }
    }

    /// Takes the next copies, up to a batch. Copies from device memory have batches of their own,
    /// since they use another link.
    pub(super) fn take_copies(&mut self) -> Option<Box<CopyBatch>> {
        let uses_device = self.is_replica_next();
        let mut batch = self.stages.empty_batches.pop().unwrap_or_default();
        batch.uses_device = uses_device;
        batch.rescued = self.replicas.as_ref().map(|_| Vec::new());
        let (mut cells, mut bytes) = (0, 0);
        while cells < self.config.batch_cells && bytes < self.config.copy_bytes {
            let Some((_, id)) = self.copies_of(uses_device).pop() else { break };
            if self.reroute_lost(id) {
                continue;
            }
            let job = &self.transfers.jobs[id];
            let spec = &self.transfers.table[job.number].spec;
            if !batch.fits(&spec.views) {
                let (lane, flow, rest) = (spec.lane, spec.flow, (job.cells() as u16, job.bytes));
                self.copies_of(uses_device).put_back(lane, flow, id, rest);
                break;
            }
            cells += job.cells() as usize;
            bytes += self.take_copy(id, self.config.copy_bytes, &mut batch);
        }
        if batch.jobs.is_empty() {
            self.stages.recycle(batch);
            return None;
        }
        Some(batch)
    }

    /// Moves a job, or the next part of it, from its queue to the batch. Returns the bytes it takes
    /// of the batch; a part takes all of it.
    pub(super) fn take_copy(&mut self, id: u32, batch_bytes: u64, batch: &mut CopyBatch) -> u64 {
        self.transfers.jobs[id].step = Step::Copying;
        if self.transfers.jobs[id].run > 0 {
            return self.take_run(id, batch);
        }
        if self.transfers.jobs[id].copied == 0 {
            self.transfers.jobs[id].replica = self.replica_for(id);
        }
        let is_cut = self.cut(id, batch_bytes);
        self.add_copies(id, batch);
        batch.jobs.push(id);
        let bytes = self.part_bytes(&self.transfers.jobs[id]);
        batch.load.bytes += bytes;
        if is_cut { batch_bytes } else { bytes }
    }

    /// Chooses how many tokens a job copies now. A large cell between host addresses is cut, so
    /// that other copies do not wait long. Returns whether tokens are left.
    fn cut(&mut self, id: u32, batch_bytes: u64) -> bool {
        let job = &self.transfers.jobs[id];
        let (tokens, bytes) = (job.rows, job.bytes);
        let left = tokens - job.copied;
        let is_plain = !job.uses_device && job.replica.is_none();
        let part = match is_plain && bytes > batch_bytes {
            true => (u64::from(tokens) * (batch_bytes / PARTS) / bytes).max(1) as u32,
            false => left,
        };
        self.transfers.jobs[id].part = part.min(left);
        part < left
    }

    /// Bytes of the part of a job's cell that is being copied.
    fn part_bytes(&self, job: &Job) -> u64 {
        if job.part == job.rows {
            return job.bytes;
        }
        job.bytes / u64::from(job.rows.max(1)) * u64::from(job.part)
    }

    /// Ends a part of a cell. Returns whether more parts follow; then the job is queued again.
    fn continue_copy(&mut self, id: u32) -> bool {
        let job = &mut self.transfers.jobs[id];
        job.copied += job.part;
        let (number, copied) = (job.number, job.copied);
        let (tokens, bytes) = (job.rows, job.bytes);
        let transfer = &self.transfers.table[number];
        if copied >= tokens || transfer.stopped().is_some() {
            return false;
        }
        let (lane, flow) = (transfer.spec.lane, transfer.spec.flow);
        let left = bytes / u64::from(tokens) * u64::from(tokens - copied);
        self.transfers.jobs[id].step = Step::Copies;
        self.stages.copy.queue.put_back(lane, flow, id, (1, left));
        true
    }

    /// Adds the copies of a job to a batch.
    fn add_copies(&self, id: u32, batch: &mut CopyBatch) {
        let job = &self.transfers.jobs[id];
        let transfer = &self.transfers.table[job.number];
        let (table, cell) = self.transfers.cell_of(job);
        let planes = self.tables[table as usize].planes(cell);
        let (bytes, k_bytes) = (planes.bytes(), planes.k_bytes);
        let replica = job.replica.and_then(|piece| self.replicas.as_ref()?.address(piece).ok());
        if job.uses_device {
            let address = self.replica_address(table, cell);
            let address = address.expect("what is read stays where it is") as usize;
            let sums = self.replica_sums(table, cell);
            return self.add_planes(id, &Side { sums, ..Side::on_device(address) }, batch);
        }
        let address = job.piece.and_then(|piece| self.host.address(piece).ok());
        let host = address.expect("a copy has its memory from when it was queued") as usize;
        let in_host = Side { address: host, memory: Memory::Host, sums: None };
        match replica {
            // Crosses the bus once; the copy to the engine's tensors is made on the device.
            Some(device) if transfer.spec.kind == TransferKind::Get => {
                batch.fills.push(Fill { host, device, bytes, k_bytes, job: batch.jobs.len() });
                self.add_planes(id, &Side::on_device(device as usize), batch);
            }
            Some(device) => {
                self.add_planes(id, &in_host, batch);
                self.add_planes(id, &Side::on_device(device as usize), batch);
            }
            None => self.add_planes(id, &in_host, batch),
        }
    }

    /// Adds the copies between the engine's planes and one place of a job's cell.
    fn add_planes(&self, id: u32, side: &Side, batch: &mut CopyBatch) {
        let job = &self.transfers.jobs[id];
        let one = &self.transfers.table[job.number];
        let (table, cell) = self.transfers.cell_of(job);
        let rows = &self.tables[table as usize];
        let planes = rows.planes(cell);
        let all = u64::from(job.rows);
        let (chunk, layer) = one.place(job.at);
        let (copied, tokens) = (job.copied, job.part);
        let first = match rows.is_state(cell.layer) {
            true => chunk as u32,
            false => chunk as u32 * rows.layout.chunk_tokens() + copied,
        };
        let before = |plane_bytes: u64| plane_bytes / all.max(1) * u64::from(copied);
        let (views, job) = (batch.view_index(&one.spec.views), batch.jobs.len());
        let (memory, direction) = (side.memory, one.direction());
        let past_caches = one.is_past_caches(planes.bytes());
        let mut add = |is_v: bool, offset: u64| {
            let address = side.address.wrapping_add(offset as usize);
            let sum = side.sums.map(|sums| sums[usize::from(is_v)]);
            let item = CopyItem {
                views,
                layer,
                is_v,
                first,
                tokens,
                address,
                memory,
                job,
                direction,
                past_caches,
                sum,
            };
            batch.items.push(item);
        };
        if planes.k_bytes > 0 {
            add(false, before(planes.k_bytes));
        }
        if planes.v_bytes > 0 {
            add(true, planes.k_bytes + before(planes.v_bytes));
        }
    }

    pub(super) fn done_copies(&mut self, batch: &CopyBatch, result: &Result<()>) {
        if result.as_ref().is_err_and(|error| error.status() == Status::Unavailable) {
            self.lose_device();
        }
        self.counters.damaged_copies += batch.damage.seen;
        let damaged = Err(Status::Corrupt.into());
        for (at, &id) in batch.jobs.iter().enumerate() {
            let result = batch.alone.get(at).unwrap_or(result);
            let result = if batch.damage.jobs.contains(&at) { &damaged } else { result };
            if self.transfers.jobs[id].run > 0 {
                self.end_run(id, result.as_ref().err());
                continue;
            }
            let is_rescued = batch.rescued.as_ref().and_then(|all| all.get(at)) == Some(&true);
            let job = self.transfers.jobs[id];
            let (table, cell) = self.transfers.cell_of(&job);
            let bytes = job.bytes;
            let succeeded = result.is_ok() || is_rescued;
            if succeeded && self.continue_copy(id) {
                continue;
            }
            // A cancelled cell ends between two parts.
            let is_whole = self.transfers.jobs[id].copied >= job.rows;
            let stopped_status =
                self.transfers.table[job.number].stopped().filter(|_| succeeded && !is_whole);
            let stopped_status = stopped_status.map(|status| Err(status.into()));
            let (result, succeeded) =
                (stopped_status.as_ref().unwrap_or(result), succeeded && is_whole);
            if let (Some(piece), Some(sums)) = (job.replica, batch.sums.get(at)) {
                self.note_replica_sums(piece, *sums);
            }
            self.end_copying(id, succeeded);
            match result {
                Err(_)
                    if !succeeded
                        && !batch.is_spent
                        && (job.uses_device || job.replica.is_some()) =>
                {
                    // The replica may be damaged, but the cell is resident elsewhere. A refused job
                    // has touched nothing.
                    if job.uses_device && !batch.refused.contains(&at) {
                        self.counters.device_lost_cells +=
                            u64::from(self.forget_replica(table, cell));
                    }
                    self.transfers.restart_job(id);
                }
                Err(error) if !succeeded => self.end_job(id, 0, Some(error.clone())),
                _ => self.end_job(id, bytes, None),
            }
        }
    }

    /// Ends a copy, or one that never began (`succeeded` is false).
    pub(super) fn end_copying(&mut self, id: u32, succeeded: bool) {
        if self.transfers.jobs[id].run > 0 {
            return self.end_copying_run(id, succeeded);
        }
        let job = self.transfers.jobs[id];
        let (table, cell) = self.transfers.cell_of(&job);
        let kind = self.transfers.table[job.number].spec.kind;
        (
            self.transfers.jobs[id].uses_device,
            self.transfers.jobs[id].replica,
            self.transfers.jobs[id].copied,
        ) = (false, None, 0);
        let filled = job.replica.map(|piece| (piece, succeeded));
        if kind != TransferKind::Put {
            let tier = if job.uses_device { Tier::Device } else { Tier::Host };
            let counter = match (job.uses_device, job.was_below) {
                (true, _) => &mut self.counters.device_hit_cells,
                (false, true) => &mut self.counters.disk_hit_cells,
                (false, false) => &mut self.counters.host_hit_cells,
            };
            *counter += u64::from(succeeded); // one that is tried again is counted then
            if let Some(filled) = filled {
                self.end_filling(table, cell, kind, filled);
            }
            let mut is_changed = filled.is_some();
            match self.tables[table as usize].chunks.end_read(cell, tier) {
                Ok(Some(place)) => {
                    self.free_place(table, cell, place);
                    is_changed = true;
                }
                Ok(None) => {}
                Err(error) => {
                    log::error!("internal: a read of host memory could not be ended: {error}")
                }
            }
            self.end_reserved(
                self.transfers.jobs[id].piece.filter(|_| !job.uses_device),
                table,
                cell,
            );
            if is_changed {
                self.wake(table, cell);
            }
            return;
        }
        if let Some(piece) = self.transfers.jobs[id].piece.take() {
            self.end_storing(id, table, cell, succeeded.then_some(Location::Host(piece.0)));
            if !succeeded {
                self.give_back(piece);
            }
        }
        if let Some(filled) = filled {
            self.end_filling(table, cell, kind, filled);
        }
        self.wake(table, cell);
    }

    /// Ends the host copy of a put's cell; `place` is `None` if it failed.
    fn end_storing(&mut self, id: u32, table: u32, cell: Cell, place: Option<Location>) {
        let chunks = &mut self.tables[table as usize].chunks;
        if let Err(error) = chunks.end_store(cell, Tier::Host, place) {
            log::error!("internal: the store of a cell could not be ended: {error}");
        }
        if place.is_some() {
            self.counters.stored_cells += 1;
            self.arrived(table, cell, Tier::Host);
            let (number, at) = (self.transfers.jobs[id].number, self.transfers.jobs[id].at);
            let (chunk, _) = self.transfers.table[number].place(at);
            self.write_whole_chunks(number, chunk as u32, At { table, slot: cell.chunk });
        }
    }
}

// ---------- disk reads
//
// Reads from disk: batches, and what becomes of cells that cannot be read.

/// Retries of a cell after a failed disk read.
const RETRIES: u8 = 2;

impl StoreState {
    /// Takes the next disk reads, up to a batch.
    pub(super) fn take_reads(&mut self) -> Option<ReadBatch> {
        let (mut batch, mut bytes) = (ReadBatch::default(), 0);
        while batch.jobs.len() < self.config.batch_cells && bytes < self.config.batch_bytes {
            let Some((_, id)) = self.stages.read.queue.pop() else { break };
            let job = &mut self.transfers.jobs[id];
            job.step = Step::Reading;
            let piece = job.piece;
            let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
            let rows = &self.tables[table as usize];
            // A cell that is being read stays where it is until the read ends.
            let place = rows.chunks.place(cell, Tier::Disk);
            let address = piece.and_then(|piece| self.host.address(piece).ok());
            let (Ok(Some(place)), Some(address)) = (place, address) else {
                // It was evicted from the disk while it was queued.
                let job = self.transfers.jobs[id];
                self.end_reading(&job, table, cell, Err(Status::Again.into()));
                let job = &mut self.transfers.jobs[id];
                (job.piece, job.step) = (None, Step::Fresh);
                self.transfers.woken.push(id);
                continue;
            };
            add_read(rows, cell, place, address, &mut batch);
            bytes += rows.planes(cell).bytes();
            batch.jobs.push(id);
        }
        (!batch.jobs.is_empty()).then_some(batch)
    }

    pub(super) fn done_reads(&mut self, batch: &ReadBatch) {
        for (&id, get) in batch.jobs.iter().zip(batch.gets.iter()) {
            let job = self.transfers.jobs[id];
            let (table, cell) = self.transfers.cell_of(&job);
            let place = self.tables[table as usize].chunks.place(cell, Tier::Disk);
            let has_moved =
                !matches!(place, Ok(Some(Location::Disk { spot, .. })) if spot == get.spot.0);
            let result = match &get.result {
                // Compaction has moved the cell meanwhile.
                Err(_) if has_moved => Err(Status::Again.into()),
                result => result.clone(),
            };
            let status = result.as_ref().err().map(|error| error.status());
            self.end_reading(&job, table, cell, result);
            let job = &mut self.transfers.jobs[id];
            (job.piece, job.step) = (None, Step::Fresh);
            match status {
                None | Some(Status::Corrupt | Status::NotFound | Status::Again) => {
                    self.transfers.woken.push(id);
                }
                Some(_) if job.retries < RETRIES => {
                    job.retries += 1;
                    self.transfers.woken.push(id);
                }
                Some(status) => {
                    let words = "the disk could not be read, again and again";
                    self.end_job(id, 0, Some(Error::new(status, words)));
                }
            }
        }
    }

    /// Logs a damaged record: the first hundred, then each thousandth.
    fn warn_of_damage(&self, table: u32, cell: Cell, status: Status) {
        let count = self.counters.corrupt_cells;
        if count > 100 && count % 1000 != 0 {
            return;
        }
        let cause = match status {
            Status::Corrupt => "does not match its checksum",
            _ => "is not where it was written",
        };
        log::warn!(
            "a cell of layer {} on disk {cause} (chunk {} of table {table}): it is dropped, gets \
             miss it; {count} since the open. Check the device; kvtier fsck lists damage",
            cell.layer,
            cell.chunk
        );
    }

    /// Ends the read of a cell from disk.
    pub(super) fn end_reading(&mut self, job: &Job, table: u32, cell: Cell, result: Result<()>) {
        let Some(piece) = job.piece else { return };
        let bytes = self.tables[table as usize].planes(cell).bytes();
        let arrival = match result.map_err(|error| error.status()) {
            Ok(()) => Arrival::Arrived(Location::Host(piece.0)),
            Err(status @ (Status::Corrupt | Status::NotFound)) => {
                self.counters.corrupt_cells += 1;
                self.warn_of_damage(table, cell, status);
                Arrival::BadSource
            }
            Err(Status::Again) => Arrival::Failed,
            Err(_) => {
                self.counters.failed_reads += 1;
                Arrival::Failed
            }
        };
        let has_arrived = matches!(arrival, Arrival::Arrived(_));
        match self.tables[table as usize].chunks.end_copy(cell, Tier::Host, arrival) {
            Ok(Some(place)) => self.free_place(table, cell, place),
            Ok(None) => {}
            Err(error) => log::error!("internal: the read of a cell could not be ended: {error}"),
        }
        if has_arrived {
            self.counters.loaded_bytes += bytes;
            self.arrived(table, cell, Tier::Host);
        } else {
            self.give_back(piece);
            if arrival == Arrival::BadSource {
                self.note_removed(table, cell, Tier::Disk);
                self.forget_if_alone(table, cell);
            }
        }
        self.wake(table, cell);
    }
}

/// Adds the read of a cell to a batch. A coded cell is read into the worker's buffer and decoded
/// from there.
fn add_read(
    rows: &ChunkTable,
    cell: Cell,
    place: Location,
    address: *mut u8,
    batch: &mut ReadBatch,
) {
    let Location::Disk { spot, seal, coded } = place else { return };
    let (spot, context) = (Spot(spot), rows.identity_of(cell, coded));
    let (id, version) = (0, 0);
    match coded.blocks() {
        None => batch.gets.cell(spot, context, seal, true),
        Some(blocks) => {
            batch.decodings.push(Decoding {
                get: batch.gets.len(),
                codec: Codec::from_code(coded.codec() as u8).unwrap_or_default(),
                shapes: rows.shapes(cell.layer),
                planes: rows.planes(cell),
                address,
            });
            batch.gets.coded(spot, context, seal, blocks as u32);
        }
    }
    let mut offset = 0;
    for (kind, plane_bytes) in rows.stored_planes(cell) {
        let (address, bytes) = match coded.blocks() {
            None => (address.wrapping_add(offset as usize), plane_bytes),
            Some(_) => (std::ptr::null_mut(), 0),
        };
        batch.gets.plane(GetPlane { kind, id, version, bytes, address });
        offset += plane_bytes;
    }
}

// ---------- read reserve
//
// The read reserve of one cell: disk reads can go on while all other memory is referenced. Such reads
// are slow, one cell after the other, but they complete.

impl StoreState {
    /// Keeps a reserve for the largest cell of a chunk table, if there is a disk to read it from.
    pub(super) fn keep_reserve(&mut self, table: usize) {
        if self.disk.is_none() {
            return;
        }
        let rows = &self.tables[table];
        let all = (0..rows.layout.layers()).map(|layer| rows.full_bytes(layer));
        if let Err(error) = self.host.keep_reserve(all.max().unwrap_or(0)) {
            log::debug!("no read reserve yet; it is allocated when needed: {error}");
        }
    }

    /// Gives the reserve to the oldest waiter for memory if it is a get of a cell on disk.
    /// Some(false) = the reserve is in use and will be freed; None = the reserve does not help this
    /// job.
    pub(super) fn serve_from_reserve(&mut self) -> Option<bool> {
        let id = self.transfers.memory_waiters.first()?;
        let job = self.transfers.jobs[id];
        let (table, cell) = self.transfers.cell_of(&job);
        let rows = &self.tables[table as usize];
        let marks = rows.chunks.marks(cell.chunk).and_then(|all| all.get(cell.layer));
        let is_below = marks
            .is_some_and(|marks| marks.resident_tiers() & (HOST_MASK | DISK_MASK) == DISK_MASK);
        let is_get = self.transfers.table[job.number].spec.kind == TransferKind::Get;
        // A copy that depends on a device event might occupy the reserve for long.
        if !is_get || !is_below || self.event_of(job.number).is_some() {
            return None;
        }
        let bytes = rows.planes(cell).bytes();
        if let Some(owner) = self.host.reserve_owner() {
            let (table, other) = cell_of_owner(owner);
            self.drop_reserved(table, other);
            if self.host.reserve_owner().is_some() {
                let row = self.tables[table as usize].chunks.chunk(other.chunk);
                return row.is_some_and(|row| row.is_moving()).then_some(false);
            }
        }
        if let Err(error) = self.host.keep_reserve(bytes) {
            log::debug!("no read reserve: {error}");
            return None;
        }
        self.unqueue_memory_waiter(id);
        (self.transfers.retrying, self.transfers.reserve_owner) = (Some(id), Some(id));
        self.route(id);
        (self.transfers.retrying, self.transfers.reserve_owner) = (None, None);
        (self.transfers.memory_waiters.first() != Some(id)).then_some(true)
    }

    /// A job has read its cell into `piece`. A cell in the reserve is dropped from memory at once.
    pub(super) fn end_reserved(&mut self, piece: Option<Piece>, table: u32, cell: Cell) {
        if piece.is_some_and(|piece| self.host.is_reserve(piece)) {
            self.drop_reserved(table, cell);
        }
    }

    fn drop_reserved(&mut self, table: u32, cell: Cell) {
        self.drop_copies(At { table, slot: cell.chunk }, |layer| layer == cell.layer);
    }
}

// ---------- slots
//
// Rows with small numbers that are reused: transfers, jobs, sessions.

/// A table with a fixed limit of rows.
pub struct Table<T> {
    rows: Vec<Option<T>>,
    free: Vec<u32>,
    limit: usize,
}

impl<T> Table<T> {
    /// An empty table.
    pub fn new(limit: usize) -> Table<T> {
        Table { rows: Vec::new(), free: Vec::new(), limit }
    }

    /// Rows in use.
    pub fn len(&self) -> usize {
        self.rows.len() - self.free.len()
    }

    /// Whether no row is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether one more row fits.
    pub fn has_room(&self) -> bool {
        self.len() < self.limit
    }

    /// Number of the next row.
    pub fn vacant(&self) -> u32 {
        self.free.last().copied().unwrap_or(self.rows.len() as u32)
    }

    /// Adds a row. Fails with AGAIN if the table is full.
    pub fn add(&mut self, row: T) -> Result<u32> {
        if let Some(at) = self.free.pop() {
            self.rows[at as usize] = Some(row);
            return Ok(at);
        }
        if self.rows.len() >= self.limit {
            return Err(Status::Again.into());
        }
        if self.rows.len() == self.rows.capacity() {
            let more = self.rows.len().max(64).min(self.limit - self.rows.len());
            self.rows.try_reserve(more).map_err(|_| Status::NoMem)?;
            // Reserved now, since removing must not allocate.
            self.free.try_reserve(self.rows.capacity()).map_err(|_| Status::NoMem)?;
        }
        self.rows.push(Some(row));
        Ok(self.rows.len() as u32 - 1)
    }

    /// A row.
    pub fn get(&self, at: u32) -> Option<&T> {
        self.rows.get(at as usize)?.as_ref()
    }

    /// A row, mutable.
    pub fn get_mut(&mut self, at: u32) -> Option<&mut T> {
        self.rows.get_mut(at as usize)?.as_mut()
    }

    /// Removes a row and returns it.
    pub fn remove(&mut self, at: u32) -> Option<T> {
        let row = self.rows.get_mut(at as usize)?.take()?;
        self.free.push(at);
        Some(row)
    }

    /// The rows in use, by number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let number = |(at, row): (usize, &'_ Option<T>)| (at as u32, row.is_some());
        let numbers = self.rows.iter().enumerate().map(number);
        numbers.zip(&self.rows).filter_map(|((at, _), row)| Some((at, row.as_ref()?)))
    }
}

impl<T> std::ops::Index<u32> for Table<T> {
    type Output = T;

    fn index(&self, at: u32) -> &T {
        self.rows[at as usize].as_ref().expect("a row in use")
    }
}

impl<T> std::ops::IndexMut<u32> for Table<T> {
    fn index_mut(&mut self, at: u32) -> &mut T {
        self.rows[at as usize].as_mut().expect("a row in use")
    }
}

// ---------- dependencies
//
// Transfers that wait for a ready event or a device event. They reference their chunks and hold no
// memory.

// ---------- ready waits

/// Dependencies of transfers: tickets and device events.
#[derive(Default)]
pub(super) struct Dependencies {
    pub(super) tickets: Tickets,
    pub(super) events: DeviceEvents,
}

impl Dependencies {
    /// Checks that nothing waits, for [`StoreState::check`] of an idle store.
    pub(super) fn check_nothing_after(&self) -> Result<()> {
        let DeviceEvents { events, jobs, bytes, .. } = &self.events;
        if !events.is_empty() || *jobs + *bytes != 0 {
            fail!(State, "{} events without transfers, {jobs} jobs, {bytes} bytes", events.len());
        }
        Ok(())
    }

    pub(super) fn first_after_event(&self, event: u64) -> Option<u32> {
        self.events.events.get(&event)?.waiting.first()
    }

    /// A transfer with an event has ended.
    pub(super) fn release_event(&mut self, event: Option<Event>) {
        let Some(event) = event else { return };
        if let Some(dependents) = self.events.events.get_mut(&event.0) {
            dependents.transfers -= 1;
            if dependents.transfers == 0 {
                self.events.events.remove(&event.0);
            }
        }
    }

    /// A transfer depends on an event.
    pub(super) fn join_event(&mut self, event: Option<Event>) {
        if let Some(event) = event {
            self.events.events.entry(event.0).or_default().transfers += 1;
        }
    }

    /// Whether memory will be freed by copies whose event has completed. A pending event may fire
    /// after the very transfers that wait for memory, so none waits for copies that depend on it.
    pub(super) fn is_ending_after_event(&self) -> bool {
        self.events.events.values().any(|dependents| dependents.has_ended && dependents.taken > 0)
    }

    /// A transfer waits no more, or has ended.
    pub(super) fn stop_waiting(&mut self, ticket: Option<u64>) {
        if let Some(ticket) = ticket {
            self.tickets.transfers.remove(&ticket);
        }
    }

    /// Makes a transfer wait for its ticket.
    pub(super) fn add_ticket(&mut self, number: u32, ticket: u64) {
        self.tickets.transfers.insert(ticket, number);
    }

    pub(super) fn next_ticket(&mut self) -> u64 {
        self.tickets.tickets += 1;
        self.tickets.tickets
    }
}

/// Transfers that wait for a ready event, by ticket. Numbers of transfers are reused, tickets are
/// not.
#[derive(Default)]
pub(super) struct Tickets {
    tickets: u64,
    transfers: BTreeMap<u64, u32>,
}

impl StoreState {
    /// As [`StoreState::submit_cell_range`], but no cell begins before
    /// [`StoreState::begin_waiting`]. Returns the number of the transfer and its ticket.
    pub fn submit_waiting(
        &mut self,
        at: u32,
        kind: TransferKind,
        level: Level,
        lane: usize,
        cell_range: CellRange,
    ) -> Result<(u32, u64)> {
        let ticket = self.dependencies.next_ticket();
        let number = self.begin_cell_range(at, (kind, level, lane), cell_range, Some(ticket))?;
        Ok((number, ticket))
    }

    /// The ready event is signalled: the transfer begins, unless it has ended.
    pub fn begin_waiting(&mut self, ticket: u64) {
        if let Some(number) = self.dependencies.tickets.transfers.remove(&ticket) {
            self.transfers.table[number].began_ns = self.now_ns;
            self.transfers.start_later(number);
            self.settle();
        }
    }

    /// The ready event will never be signalled: the transfer ends with this status.
    pub fn give_up_waiting(&mut self, ticket: u64, status: Status) {
        if let Some(&number) = self.dependencies.tickets.transfers.get(&ticket) {
            self.cancel(number, status);
        }
    }

    /// Whether the transfer of a ticket still waits.
    pub fn is_waiting(&self, ticket: u64) -> bool {
        self.dependencies.tickets.transfers.contains_key(&ticket)
    }

    /// Number of transfers that wait.
    pub fn waiting_transfers(&self) -> usize {
        self.dependencies.tickets.transfers.len()
    }
}

// ---------- device events
//
// Transfers that depend on a device event: none of their copies between the engine's tensors and the store run
// before the event fires. Reads from disk continue meanwhile. Their copies are queued by event, apart from
// all others, so that they can be submitted behind it; once the event has fired they are ordinary.
//
// These transfers hold memory while they wait. They get a limited part of it, so that an event that
// fires only after other transfers does not block those.

/// Cells that wait for device events may take 1 / 4 of host memory and of the job table.
const SHARE: u64 = 4;

/// Transfers and jobs that depend on one event.
#[derive(Default)]
pub(super) struct EventDependents {
    /// Transfers that name it.
    transfers: u32,
    /// Jobs that wait to be submitted.
    pub(super) waiting: WaitList,
    has_fired: bool,
    /// Jobs in submitted batches.
    taken: usize,
    /// It has completed, or failed.
    has_ended: bool,
}

/// All device events that transfers depend on.
#[derive(Default)]
pub(super) struct DeviceEvents {
    events: BTreeMap<u64, EventDependents>,
    /// Jobs whose event was pending when they began, and their bytes.
    jobs: u64,
    bytes: u64,
    /// Transfers that begin no more cells until such jobs have ended.
    parked: Vec<u32>,
}

impl DeviceEvents {
    /// The lists of jobs that wait, one for each event.
    pub(super) fn wait_lists(&self) -> impl Iterator<Item = &WaitList> {
        self.events.values().map(|dependents| &dependents.waiting)
    }

    fn is_open(&self, event: u64) -> bool {
        self.events.get(&event).is_some_and(|dependents| !dependents.has_fired)
    }
}

impl StoreState {
    /// Adds the pending events to `out`, each with whether jobs wait to be submitted behind it.
    pub fn events_ahead(&self, out: &mut Vec<(Event, bool)>) {
        let open =
            self.dependencies.events.events.iter().filter(|(_, dependents)| !dependents.has_fired);
        out.extend(open.map(|(&event, dependents)| (Event(event), !dependents.waiting.is_empty())));
    }

    /// Whether events are pending.
    pub fn has_events_ahead(&self) -> bool {
        self.dependencies.events.events.values().any(|dependents| !dependents.has_fired)
    }

    /// An event has completed, or never will: then its transfers fail.
    pub fn event_ended(&mut self, event: Event, outcome: std::result::Result<(), Status>) {
        if let Some(dependents) = self.dependencies.events.events.get_mut(&event.0) {
            dependents.has_ended = true;
        }
        match outcome {
            Ok(()) => self.event_fired(event.0),
            Err(status) => {
                let is_its = |spec: &TransferSpec| spec.after == Some(event);
                let all = self.transfers.table.iter().filter(|(_, one)| is_its(&one.spec));
                let numbers: Vec<u32> = all.map(|(number, _)| number).collect();
                numbers.into_iter().for_each(|number| self.cancel(number, status));
            }
        }
        self.settle();
    }

    fn event_fired(&mut self, event: u64) {
        let Some(dependents) = self.dependencies.events.events.get_mut(&event) else { return };
        dependents.has_fired = true;
        while let Some(id) = self.dependencies.first_after_event(event) {
            self.unqueue_after_event(event, id);
            self.count_after_event(id, 0);
            let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
            self.queue_copy(id, table, cell);
        }
        self.retry_parked();
    }

    /// Takes copies to be submitted behind an event, up to a batch.
    pub fn take_after_event(&mut self, event: Event) -> Option<CopyBatch> {
        let (mut batch, mut bytes) = (CopyBatch::default(), 0);
        while batch.jobs.len() < self.config.batch_cells && bytes < self.config.batch_bytes {
            let Some(id) = self.dependencies.first_after_event(event.0) else { break };
            self.unqueue_after_event(event.0, id);
            if !self.reroute_lost(id) {
                bytes += self.take_copy(id, u64::MAX, &mut batch);
            }
        }
        if let Some(dependents) = self.dependencies.events.events.get_mut(&event.0) {
            dependents.taken += batch.jobs.len();
        }
        // A job that was routed again may need a read, or may be a miss.
        self.settle();
        (!batch.jobs.is_empty()).then_some(batch)
    }

    /// Ends such a batch. `is_spent`: it failed because its event will never complete.
    pub fn done_after_event(&mut self, mut batch: CopyBatch, outcome: &Result<()>, is_spent: bool) {
        batch.is_spent = is_spent;
        let event = batch
            .jobs
            .first()
            .and_then(|&id| self.transfers.table[self.transfers.jobs[id].number].spec.after);
        if let Some(dependents) =
            event.and_then(|event| self.dependencies.events.events.get_mut(&event.0))
        {
            dependents.taken -= batch.jobs.len();
        }
        self.done_copies(&batch, outcome);
        self.settle();
    }

    /// Checks the requirements of a transfer with an event.
    pub(super) fn check_after_event(&self, spec: &TransferSpec) -> Result<()> {
        if spec.after.is_some() && spec.kind == TransferKind::Prefetch {
            fail!(Invalid, "a prefetch has no tensors, so it takes no device event");
        }
        Ok(())
    }

    /// The event that copies of a transfer still depend on.
    pub(super) fn event_of(&self, number: u32) -> Option<u64> {
        let event = self.transfers.table[number].spec.after?.0;
        self.dependencies.events.is_open(event).then_some(event)
    }

    /// Whether a transfer must not begin more cells for now. It is woken when it may.
    pub(super) fn is_parked(&mut self, number: u32) -> bool {
        let most_jobs = u64::from(self.config.max_jobs) / SHARE;
        let most_bytes = self.config.host_bytes / SHARE;
        let DeviceEvents { jobs, bytes, .. } = self.dependencies.events;
        let is_full = jobs > 0 && (jobs >= most_jobs || bytes >= most_bytes);
        let parks = is_full && self.event_of(number).is_some();
        if parks {
            self.dependencies.events.parked.push(number);
        }
        parks
    }

    /// Counts a job that begins while its event is pending.
    pub(super) fn begin_after_event(&mut self, id: u32) {
        if self.event_of(self.transfers.jobs[id].number).is_some() {
            let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
            self.count_after_event(id, self.tables[table as usize].planes(cell).bytes());
        }
    }

    /// Sets the bytes with which a job counts; 0 = not any more.
    fn count_after_event(&mut self, id: u32, bytes: u64) {
        let before = std::mem::replace(&mut self.transfers.jobs[id].event_bytes, bytes);
        let count = |bytes: u64| u64::from(bytes > 0);
        self.dependencies.events.jobs =
            self.dependencies.events.jobs + count(bytes) - count(before);
        self.dependencies.events.bytes = self.dependencies.events.bytes + bytes - before;
    }

    /// Ends the count of a job.
    pub(super) fn end_after_event(&mut self, job: &Job) {
        if job.event_bytes > 0 {
            self.dependencies.events.jobs -= 1;
            self.dependencies.events.bytes -= job.event_bytes;
            self.retry_parked();
        }
    }

    fn retry_parked(&mut self) {
        for number in std::mem::take(&mut self.dependencies.events.parked) {
            // The transfer may have ended, and its number may be another one's. Then this does
            // nothing.
            if self.transfers.table.get(number).is_some() {
                self.transfers.start_later(number);
            }
        }
    }

    /// Makes a job wait for its transfer's event, if that is pending. Returns whether it waits.
    pub(super) fn queue_after_event(&mut self, id: u32) -> bool {
        let Some(event) = self.event_of(self.transfers.jobs[id].number) else { return false };
        let Some(dependents) = self.dependencies.events.events.get_mut(&event) else {
            return false;
        };
        self.transfers.jobs[id].step = Step::AfterEvent;
        dependents.waiting.push_back(&mut self.transfers.jobs, Of::Wait, id);
        true
    }

    /// Removes a job from the waiters for its event.
    pub(super) fn withdraw_after_event(&mut self, job: &Job, id: u32) {
        if let Some(event) = self.transfers.table[job.number].spec.after {
            self.unqueue_after_event(event.0, id);
        }
    }

    fn unqueue_after_event(&mut self, event: u64, id: u32) {
        if let Some(dependents) = self.dependencies.events.events.get_mut(&event) {
            dependents.waiting.remove(&mut self.transfers.jobs, Of::Wait, id);
            self.transfers.jobs[id].step = Step::Fresh;
        }
    }

    /// Cells that wait to be submitted behind an event.
    pub fn cells_after_event(&self) -> usize {
        self.dependencies.events.wait_lists().map(WaitList::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::chunks::Cell;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        /// Random operations on two kinds of lists over the same jobs, against `VecDeque`s.
        #[test]
        fn wait_lists_agree_with_queues_under_random_removals(
            steps in prop::collection::vec((0..4u8, 0..3usize, any::<u16>()), 1..400),
        ) {
            const OF: [Of; 3] = [Of::Wait, Of::Wait, Of::Transfer];
            let mut jobs = Table::new(64);
            for number in 0..64 {
                jobs.add(Job::new(0, number, Cell { chunk: 0, layer: 0 }, 1, 1)).unwrap();
            }
            let mut lists: [WaitList; 3] = Default::default();
            let mut queues: [VecDeque<u32>; 3] = Default::default();
            for (operation, at, choice) in steps {
                let (of, list) = (OF[at], &mut lists[at]);
                let id = u32::from(choice) % 64;
                let others = if at == 2 { 2..3 } else { 0..2 };
                let is_free = queues[others].iter().all(|queue| !queue.contains(&id));
                let queue = &mut queues[at];
                match operation {
                    0 if is_free => {
                        list.push_back(&mut jobs, of, id);
                        queue.push_back(id);
                    }
                    1 if is_free => {
                        list.push_front(&mut jobs, of, id);
                        queue.push_front(id);
                    }
                    2 if !queue.is_empty() => {
                        let id = queue.remove(usize::from(choice) % queue.len()).unwrap();
                        list.remove(&mut jobs, of, id);
                    }
                    _ => prop_assert_eq!(list.pop_back(&mut jobs, of), queue.pop_back()),
                }
                for ((list, queue), of) in lists.iter().zip(&queues).zip(OF) {
                    let all: Vec<u32> = list.all(&jobs, of).collect();
                    prop_assert_eq!(queue, &all);
                    prop_assert_eq!((list.len(), list.is_empty()), (queue.len(), queue.is_empty()));
                }
            }
        }
    }
}

#[cfg(test)]
mod slots_tests {
    use super::*;

    #[test]
    fn slots_are_reused_up_to_the_limit() {
        let mut table = Table::new(3);
        let numbers: Vec<u32> = (0..3).map(|i| table.add(i).unwrap()).collect();
        assert_eq!(numbers, [0, 1, 2]);
        assert_eq!(table.add(3).unwrap_err().status(), Status::Again);
        assert_eq!((table.remove(1), table.remove(1)), (Some(1), None));
        assert_eq!((table.len(), table.has_room()), (2, true));
        assert_eq!(table.add(7).unwrap(), 1);
        assert_eq!(
            table.iter().map(|(at, &row)| (at, row)).collect::<Vec<_>>(),
            [(0, 0), (1, 7), (2, 2)]
        );
        assert_eq!((table[1], table.get(5)), (7, None));
    }
}
