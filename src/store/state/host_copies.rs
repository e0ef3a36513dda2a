//! Copies between the engine's tensors and the store: what goes into a batch, and what
//! becomes of it. A large cell is copied in parts, so that whoever came meanwhile goes between them.

use crate::base::budget::Tier;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Memory;
use crate::meta::chunks::{Cell, Place};
use crate::store::job_queues::Queues;
use crate::store::state::jobs::Step;
use crate::store::state::transfer::TransferKind;
use crate::store::state::work::{CopyBatch, CopyItem, Fill};
use crate::store::state::{At, Job, StoreState};

/// A cell that is longer than a batch is copied in parts, each one so manyth of a batch.
pub(super) const PARTS: u64 = 4;

/// Where the store has a cell.
struct Side {
    address: usize,
    memory: Memory,
    /// The checksums of its planes, where the device tier has it and they are known.
    sums: Option<[u64; 2]>,
}

impl Side {
    fn on_device(address: usize) -> Side {
        Side { address, memory: Memory::Device, sums: None }
    }
}

impl StoreState {
    /// The queue of copies: out of device memory, or all others.
    pub(super) fn copies_of(&mut self, uses_device: bool) -> &mut Queues {
        match &mut self.replicas {
            Some(replicas) if uses_device => replicas.queue_mut(),
            _ => &mut self.copies,
        }
    }

    /// The next copies, up to a batch. Those out of device memory have their own: that is
    /// another way, with a speed of its own.
    pub(super) fn take_copies(&mut self) -> Option<CopyBatch> {
        let uses_device = self.is_nears_turn();
        let rescued = self.replicas.as_ref().map(|_| Vec::new());
        let (mut batch, mut bytes) =
            (CopyBatch { uses_device, rescued, ..CopyBatch::default() }, 0);
        while batch.jobs.len() < self.config.batch_cells && bytes < self.config.copy_bytes {
            let Some((_, id)) = self.copies_of(uses_device).pop() else { break };
            if self.turn_away(id) {
                continue;
            }
            bytes += self.take_copy(id, self.config.copy_bytes, &mut batch);
        }
        (!batch.jobs.is_empty()).then_some(batch)
    }

    /// A job is copied from now on, or a part of it; how much of a batch that is: a part is all.
    pub(super) fn take_copy(&mut self, id: u32, batch_bytes: u64, batch: &mut CopyBatch) -> u64 {
        self.jobs[id].step = Step::Copying;
        if self.jobs[id].copied == 0 {
            self.jobs[id].replica = self.replica_for(id);
        }
        let is_cut = self.cut(id, batch_bytes);
        self.add_copies(id, batch);
        batch.jobs.push(id);
        if is_cut { batch_bytes } else { self.part_bytes(&self.jobs[id]) }
    }

    /// Chooses which of its tokens a job copies now: of a large cell between places in host memory
    /// so many that others do not wait for long, else all. Whether some are left.
    fn cut(&mut self, id: u32, batch_bytes: u64) -> bool {
        let job = self.jobs[id];
        let (tokens, bytes) = self.extent(&job);
        let left = tokens - job.copied;
        let is_plain = !job.uses_device && job.replica.is_none();
        let part = match is_plain && bytes > batch_bytes {
            true => (u64::from(tokens) * (batch_bytes / PARTS) / bytes).max(1) as u32,
            false => left,
        };
        self.jobs[id].part = part.min(left);
        part < left
    }

    /// Rows of a job's cell, and its bytes: of a state it is one.
    fn extent(&self, job: &Job) -> (u32, u64) {
        let (table, cell) = self.cell_of(job);
        let rows = &self.tables[table as usize];
        let tokens = match rows.is_state(cell.layer) {
            true => 1,
            false => rows.chunks.chunk(cell.chunk).map_or(0, |row| row.valid_tokens()),
        };
        (tokens, rows.planes(cell).bytes())
    }

    /// Bytes of the part of a job's cell that is copied.
    pub(super) fn part_bytes(&self, job: &Job) -> u64 {
        let (tokens, bytes) = self.extent(job);
        bytes / u64::from(tokens.max(1)) * u64::from(job.part)
    }

    /// A part of a cell is copied; whether there is more: then the job waits for its next turn.
    fn goes_on(&mut self, id: u32) -> bool {
        let job = &mut self.jobs[id];
        job.copied += job.part;
        let (number, copied) = (job.number, job.copied);
        let (tokens, bytes) = self.extent(&self.jobs[id]);
        let one = &self.moves[number];
        if copied >= tokens || one.stopped().is_some() {
            return false;
        }
        let (lane, flow) = (one.spec.lane, one.spec.flow);
        let left = bytes / u64::from(tokens) * u64::from(tokens - copied);
        self.jobs[id].step = Step::Copies;
        self.copies.put_back(lane, flow, id, left);
        true
    }

    /// Adds the copies of a job to a batch.
    fn add_copies(&self, id: u32, batch: &mut CopyBatch) {
        let job = &self.jobs[id];
        let one = &self.moves[job.number];
        let (table, cell) = self.cell_of(job);
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
            // Over the link once: on the device it is passed on.
            Some(device) if one.spec.kind == TransferKind::Get => {
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

    /// Adds the copies between the engine's planes of a job's cell and one place of it.
    fn add_planes(&self, id: u32, side: &Side, batch: &mut CopyBatch) {
        let job = &self.jobs[id];
        let one = &self.moves[job.number];
        let (table, cell) = self.cell_of(job);
        let rows = &self.tables[table as usize];
        let planes = rows.planes(cell);
        let all = u64::from(self.extent(job).0);
        let (chunk, layer) = one.place(job.at);
        let (copied, tokens) = (job.copied, job.part);
        let first = match rows.is_state(cell.layer) {
            true => chunk as u32,
            false => chunk as u32 * rows.layout.chunk_tokens() + copied,
        };
        let before = |plane_bytes: u64| plane_bytes / all.max(1) * u64::from(copied);
        // One after the other they are of one move, mostly.
        if batch.views.last().is_none_or(|last| !Arc::ptr_eq(last, &one.spec.views)) {
            batch.views.push(one.spec.views.clone());
        }
        let (views, job) = (batch.views.len() - 1, batch.jobs.len());
        let (memory, way) = (side.memory, one.way());
        let mut add = |is_v: bool, offset: u64| {
            let address = side.address.wrapping_add(offset as usize);
            let sum = side.sums.map(|sums| sums[usize::from(is_v)]);
            let item =
                CopyItem { views, layer, is_v, first, tokens, address, memory, job, way, sum };
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
        self.counters.damaged += batch.damage.seen;
        let damaged = Err(Status::Corrupt.into());
        for (at, &id) in batch.jobs.iter().enumerate() {
            let result = batch.alone.get(at).unwrap_or(result);
            let result = if batch.damage.jobs.contains(&at) { &damaged } else { result };
            let is_rescued = batch.rescued.as_ref().and_then(|all| all.get(at)) == Some(&true);
            let job = self.jobs[id];
            let (table, cell) = self.cell_of(&job);
            let bytes = self.tables[table as usize].planes(cell).bytes();
            let came = result.is_ok() || is_rescued;
            if came && self.goes_on(id) {
                continue;
            }
            // One that was given up meanwhile ends between two parts.
            let is_whole = self.jobs[id].copied >= self.extent(&job).0;
            let given_up = self.moves[job.number].stopped().filter(|_| came && !is_whole);
            let given_up = given_up.map(|status| Err(status.into()));
            let (result, came) = (given_up.as_ref().unwrap_or(result), came && is_whole);
            if let (Some(piece), Some(sums)) = (job.replica, batch.sums.get(at)) {
                self.note_replica_sums(piece, *sums);
            }
            self.end_copying(id, came);
            match result {
                Err(_)
                    if !came && !batch.is_spent && (job.uses_device || job.replica.is_some()) =>
                {
                    // What is there may be no good; it is elsewhere, too. What the device has
                    // refused it has not touched.
                    if job.uses_device && !batch.refused.contains(&at) {
                        self.counters.device_lost += u64::from(self.forget_replica(table, cell));
                    }
                    self.look_again(id);
                }
                Err(error) if !came => self.end_job(id, 0, Some(error.clone())),
                _ => self.end_job(id, bytes, None),
            }
        }
    }

    /// A copy has ended, or does not begin.
    pub(super) fn end_copying(&mut self, id: u32, came: bool) {
        let job = self.jobs[id];
        let (table, cell) = self.cell_of(&job);
        let kind = self.moves[job.number].spec.kind;
        (self.jobs[id].uses_device, self.jobs[id].replica, self.jobs[id].copied) = (false, None, 0);
        let filled = job.replica.map(|piece| (piece, came));
        if kind != TransferKind::Put {
            let tier = if job.uses_device { Tier::Device } else { Tier::Host };
            let counter = match (job.uses_device, job.was_below) {
                (true, _) => &mut self.counters.device_hits,
                (false, true) => &mut self.counters.disk_hits,
                (false, false) => &mut self.counters.host_hits,
            };
            *counter += u64::from(came); // one that is tried again is counted then
            if let Some(filled) = filled {
                self.end_filling(table, cell, kind, filled);
            }
            let mut is_news = filled.is_some();
            match self.tables[table as usize].chunks.end_read(cell, tier) {
                Ok(Some(place)) => {
                    self.free_place(table, cell, place);
                    is_news = true;
                }
                Ok(None) => {}
                Err(error) => log::error!("a read could not be ended: {error}"),
            }
            self.end_reserved(self.jobs[id].piece.filter(|_| !job.uses_device), table, cell);
            if is_news {
                self.wake(table, cell);
            }
            return;
        }
        if let Some(piece) = self.jobs[id].piece.take() {
            self.end_storing(id, table, cell, came.then_some(Place::Host(piece.0)));
            if !came {
                self.give_back(piece);
            }
        }
        if let Some(filled) = filled {
            self.end_filling(table, cell, kind, filled);
        }
        self.wake(table, cell);
    }

    /// A put's cell is in host memory, or will not be.
    fn end_storing(&mut self, id: u32, table: u32, cell: Cell, place: Option<Place>) {
        let chunks = &mut self.tables[table as usize].chunks;
        if let Err(error) = chunks.end_store(cell, Tier::Host, place) {
            log::error!("a store could not be ended: {error}");
        }
        if place.is_some() {
            self.counters.stored += 1;
            self.arrived(table, cell, Tier::Host);
            let (number, at) = (self.jobs[id].number, self.jobs[id].at);
            let (chunk, _) = self.moves[number].place(at);
            self.write_ahead(number, chunk as u32, At { table, slot: cell.chunk });
        }
    }
}
