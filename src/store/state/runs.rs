//! Runs: cells of consecutive layers of one chunk that one job copies between the engine's tensors
//! and host memory. Nothing else concerns these cells: they need no device memory, no other tier, no
//! event, and no other transfer moves them. All other cells have a job each.

use crate::base::budget::Tier;
use crate::base::status::Error;
use crate::device::Memory;
use crate::meta::chunks::{Cell, Location, Residency};
use crate::store::state::batches::{CopyBatch, CopyItem};
use crate::store::state::chunk_table::Part;
use crate::store::state::tier_cache::{Granularity, owner_of};
use crate::store::state::transfer::{Job, PARTS, Step, TransferKind};
use crate::store::state::{At, HOST_MASK, StoreState};
use crate::tier::host::Piece;

/// Cells that one job copies.
struct Run {
    cells: usize,
    /// Rows of each cell.
    rows: u32,
    bytes: u64,
}

impl StoreState {
    /// Begins a job for the next cells of a transfer, from `cell` on, which it has begun already.
    /// Returns false if the cell cannot be part of a run: it must be routed.
    pub(super) fn begin_run(&mut self, number: u32, at: u64, cell: Cell) -> bool {
        let Some(mut run) = self.next_run(number, cell) else { return false };
        let spec = &self.transfers.table[number].spec;
        let (table, lane, flow) = (spec.table, spec.lane, spec.flow);
        let begun = match spec.kind {
            TransferKind::Put => self.store_run(table, cell, &run),
            _ => {
                let chunks = &mut self.tables[table as usize].chunks;
                chunks.begin_read_run(cell, run.cells).unwrap_or(0)
            }
        };
        if begun == 0 {
            return false;
        }
        if begun < run.cells {
            let rows = &self.tables[table as usize];
            let layers = cell.layer..cell.layer + begun;
            run.cells = begun;
            run.bytes = layers.map(|layer| rows.planes(Cell { layer, ..cell }).bytes()).sum();
        }
        self.transfers.table[number].cursor += begun as u64 - 1;
        let mut job = Job::new(number, at, cell, run.rows, run.bytes);
        (job.run, job.step) = (begun as u16, Step::Copies);
        let id = self.add_job(job);
        self.stages.copy.queue.push_run(lane, flow, id, (begun as u16, run.bytes));
        true
    }

    /// Finds the cells from `cell` on that one job can copy. A put can store cells that are resident in
    /// no tier; a get can read cells in host memory. None if `cell` is neither, or is copied in parts.
    fn next_run(&self, number: u32, cell: Cell) -> Option<Run> {
        let transfer = &self.transfers.table[number];
        let spec = &transfer.spec;
        let is_plain = spec.kind != TransferKind::Prefetch
            && spec.after.is_none()
            && transfer.cancelled.is_none()
            && self.replicas.is_none()
            && self.transfers.memory_waiters.is_empty();
        if !is_plain {
            return None;
        }
        let is_ready = |marks: Residency| match spec.kind {
            TransferKind::Put => marks.is_nowhere(),
            _ => marks.resident_tiers() & HOST_MASK != 0,
        };
        let rows = &self.tables[spec.table as usize];
        let marks = rows.chunks.marks(cell.chunk)?;
        // In a transfer by layers, the next cell belongs to another chunk.
        let end = match spec.by_layer || !spec.needed_from.is_empty() {
            true => cell.layer + 1,
            false => spec.first_layer + spec.layers,
        };
        // States and tokens have different rows in their tensors.
        let is_state = rows.is_state(cell.layer);
        let mut run = Run { cells: 0, rows: rows.row_count(cell), bytes: 0 };
        for (layer, &marks) in (cell.layer..end).zip(&marks[cell.layer..]) {
            let bytes = rows.planes(Cell { layer, ..cell }).bytes();
            let most = self.config.copy_bytes / if run.cells == 0 { 1 } else { PARTS };
            let fits = run.bytes + bytes <= most && rows.is_state(layer) == is_state;
            if !fits || !is_ready(marks) {
                break;
            }
            run.cells += 1;
            run.bytes += bytes;
        }
        (run.cells > 0).then_some(run)
    }

    /// Allocates host memory for cells of a put and begins to store them. Returns how many have
    /// memory.
    fn store_run(&mut self, table: u32, cell: Cell, run: &Run) -> usize {
        let mut pieces = std::mem::take(&mut self.transfers.pieces);
        pieces.clear();
        let (mut layer, end) = (cell.layer, cell.layer + run.cells);
        while layer < end && pieces.len() == layer - cell.layer {
            let (next, rows) = (Cell { layer, ..cell }, &self.tables[table as usize]);
            let bytes_of = |layer| rows.planes(Cell { layer, ..cell }).bytes();
            let bytes = bytes_of(layer);
            let equal = (layer..end).take_while(|&layer| bytes_of(layer) == bytes).count();
            let owner = |i| owner_of(table, Cell { layer: next.layer + i, ..next });
            self.host.alloc_many(bytes, equal, owner, &mut pieces);
            layer += equal;
        }
        let mut begun = pieces.len();
        if begun > 0
            && let Err(error) = self.tables[table as usize].chunks.begin_store_run(cell, &pieces)
        {
            log::error!("internal: the store of cells could not begin: {error}");
            pieces.iter().for_each(|&piece| self.give_back(Piece(piece)));
            begun = 0;
        }
        if begun > 0 {
            self.eviction.refusals = 0;
        }
        self.transfers.pieces = pieces;
        begun
    }

    /// Moves a job from its queue to a batch. Returns its bytes.
    pub(super) fn take_run(&mut self, id: u32, batch: &mut CopyBatch) -> u64 {
        let job = &self.transfers.jobs[id];
        let transfer = &self.transfers.table[job.number];
        let (rows, direction) = (&self.tables[transfer.spec.table as usize], transfer.direction());
        let views = batch.add_views(&transfer.spec.views);
        let (chunk, first_layer) = transfer.place(job.at);
        let first = match rows.is_state(job.cell.layer) {
            true => chunk as u32,
            false => chunk as u32 * rows.layout.chunk_tokens(),
        };
        let pieces = rows.chunks.run_pieces(job.cell, job.cells() as usize);
        for (i, &piece) in pieces.expect("the cells exist").iter().enumerate() {
            let planes = rows.planes(Cell { layer: job.cell.layer + i, ..job.cell });
            let address = self.host.address(Piece(piece)).expect("a copy has its memory") as usize;
            let item = CopyItem {
                views,
                layer: first_layer + i,
                is_v: false,
                first,
                tokens: job.rows,
                address,
                memory: Memory::Host,
                job: batch.jobs.len(),
                direction,
                past_caches: transfer.is_past_caches(planes.bytes()),
                sum: None,
            };
            if planes.k_bytes > 0 {
                batch.items.push(item);
            }
            if planes.v_bytes > 0 {
                let address = address.wrapping_add(planes.k_bytes as usize);
                batch.items.push(CopyItem { is_v: true, address, ..item });
            }
        }
        batch.jobs.push(id);
        batch.load.bytes += job.bytes;
        job.bytes
    }

    /// Ends a job whose copies were made, or have failed.
    pub(super) fn end_run(&mut self, id: u32, error: Option<&Error>) {
        self.end_copying_run(id, error.is_none());
        let bytes = if error.is_none() { self.transfers.jobs[id].bytes } else { 0 };
        self.end_job(id, bytes, error.cloned());
    }

    /// Ends the copies of a run. `succeeded` is false if they failed, or never began.
    pub(super) fn end_copying_run(&mut self, id: u32, succeeded: bool) {
        let job = self.transfers.jobs[id];
        let table = self.transfers.cell_of(&job).0;
        match self.transfers.table[job.number].spec.kind {
            TransferKind::Put => self.end_storing_run(&job, table, succeeded),
            _ => self.end_reading_run(&job, table, succeeded),
        }
        self.eviction.reclaim_targets.changed();
        if !self.transfers.cell_waiters.is_empty() {
            for i in 0..job.cells() as usize {
                self.wake(table, Cell { layer: job.cell.layer + i, ..job.cell });
            }
        }
    }

    fn end_storing_run(&mut self, job: &Job, table: u32, succeeded: bool) {
        let (cell, cells) = (job.cell, job.cells() as usize);
        let chunks = &mut self.tables[table as usize].chunks;
        if let Err(error) = chunks.end_store_run(cell, cells, succeeded) {
            return log::error!("internal: the store of cells could not be ended: {error}");
        }
        if !succeeded {
            let pieces = self.tables[table as usize].chunks.run_pieces(cell, cells);
            for piece in pieces.map(<[u32]>::to_vec).unwrap_or_default() {
                self.give_back(Piece(piece));
            }
            return;
        }
        self.counters.stored_cells += cells as u64;
        self.run_arrived(table, cell, cells);
        let (chunk, _) = self.transfers.table[job.number].place(job.at);
        self.write_whole_chunks(job.number, chunk as u32, At { table, slot: cell.chunk });
    }

    /// Cells are in host memory now.
    fn run_arrived(&mut self, table: u32, cell: Cell, cells: usize) {
        if self.eviction.host.granularity == Granularity::Cell {
            for layer in cell.layer + 1..cell.layer + cells {
                let at = At { table, slot: cell.chunk };
                self.enter_cache(at, Tier::Host, Part::Layer(layer));
            }
        }
        self.arrived(table, cell, Tier::Host);
    }

    fn end_reading_run(&mut self, job: &Job, table: u32, succeeded: bool) {
        let (cell, cells) = (job.cell, job.cells() as usize);
        self.counters.host_hit_cells += if succeeded { cells as u64 } else { 0 };
        let mut freed = std::mem::take(&mut self.transfers.pieces);
        freed.clear();
        let chunks = &mut self.tables[table as usize].chunks;
        let ended = chunks.end_read_run(cell, cells, |_, piece| freed.push(piece));
        if let Err(error) = ended {
            log::error!("internal: a read of host memory could not be ended: {error}");
        }
        freed.iter().for_each(|&piece| self.give_back(Piece(piece)));
        self.transfers.pieces = freed;
        if self.host.reserve_owner().is_some() {
            for layer in cell.layer..cell.layer + cells {
                let cell = Cell { layer, ..cell };
                let place = self.tables[table as usize].chunks.place(cell, Tier::Host);
                if let Ok(Some(Location::Host(piece))) = place {
                    self.end_reserved(Some(Piece(piece)), table, cell);
                }
            }
        }
    }
}
