//! Runs: cells that one job copies between the engine's tensors and host memory. They follow each
//! other in the order of their transfer: layers of a chunk, and of the chunks after it. Nothing else
//! concerns these cells: they need no device memory, no other tier, no event, and no other transfer
//! moves them. All other cells have a job each.

use crate::base::budget::Tier;
use crate::base::status::Error;
use crate::device::Memory;
use crate::meta::chunks::{Cell, Location, Residency};
use crate::meta::index::Slot;
use crate::store::state::batches::{CopyBatch, CopyItem};
use crate::store::state::chunk_table::Part;
use crate::store::state::tier_cache::{Granularity, owner_of};
use crate::store::state::transfer::{Job, PARTS, Step, Transfer, TransferKind};
use crate::store::state::{At, HOST_MASK, StoreState};
use crate::tier::host::Piece;

/// Cells that one job copies.
#[derive(Clone, Copy, Default)]
struct Run {
    cells: usize,
    bytes: u64,
}

/// Cells of a run that belong to one chunk: consecutive layers.
struct Stretch {
    /// Index of the chunk in its transfer.
    chunk: usize,
    first: Cell,
    cells: usize,
}

impl Stretch {
    fn cells(&self) -> impl Iterator<Item = Cell> + use<> {
        let Cell { chunk, layer } = self.first;
        (layer..layer + self.cells).map(move |layer| Cell { chunk, layer })
    }
}

/// The stretches of a number of cells, in their order.
#[derive(Clone, Copy)]
struct Stretches {
    chunk: usize,
    layer: usize,
    /// Layers of each chunk: from this one, so many.
    layers: (usize, usize),
    left: usize,
}

impl Stretches {
    /// Those of so many cells of a transfer from the cell `at` on.
    fn new(transfer: &Transfer, at: u64, cells: usize) -> Stretches {
        let (chunk, layer) = transfer.place(at);
        let (first, spec) = (transfer.spec.first_layer, &transfer.spec);
        let layers = if transfer.is_by_layer() { (first + layer, 1) } else { (first, spec.layers) };
        Stretches { chunk, layer: first + layer, layers, left: cells }
    }

    /// Those from the cell `at` on that one job may copy: they belong to one part of the transfer,
    /// and to one chunk where each chunk has an outcome.
    fn rest(transfer: &Transfer, at: u64) -> Stretches {
        let (all, spec) = (Stretches::new(transfer, at, 1), &transfer.spec);
        let cells = match (transfer.is_by_layer(), spec.by_chunk) {
            _ if !spec.needed_from.is_empty() => 1,
            (false, false) => (transfer.cells() - at) as usize,
            (false, true) => all.layers.0 + all.layers.1 - all.layer,
            (true, false) => spec.slots.len() - all.chunk,
            (true, true) => 1,
        };
        all.first(cells)
    }

    /// The first so many cells of them.
    fn first(self, cells: usize) -> Stretches {
        Stretches { left: cells, ..self }
    }

    /// The next one; `slots` are the chunks of the transfer.
    fn next(&mut self, slots: &[Slot]) -> Option<Stretch> {
        if self.left == 0 {
            return None;
        }
        let (first_layer, layers) = self.layers;
        let cells = self.left.min(first_layer + layers - self.layer);
        let (chunk, first) = (self.chunk, Cell { chunk: slots[self.chunk], layer: self.layer });
        (self.chunk, self.layer, self.left) = (chunk + 1, first_layer, self.left - cells);
        Some(Stretch { chunk, first, cells })
    }
}

impl StoreState {
    /// Begins a job for the next cells of a transfer, from the cell `at` on, which it has begun
    /// already. Returns false if that cell cannot be part of a run: it must be routed.
    pub(super) fn begin_run(&mut self, number: u32, at: u64, cell: Cell) -> bool {
        let transfer = &self.transfers.table[number];
        let all = Stretches::rest(transfer, at);
        let Some(run) = self.next_run(transfer, all) else { return false };
        let (spec, all) = (&transfer.spec, all.first(run.cells));
        let (table, lane, flow) = (spec.table, spec.lane, spec.flow);
        let begun = match spec.kind {
            TransferKind::Put => self.store_run(number, all),
            _ => self.read_run(number, all),
        };
        if begun == 0 {
            return false;
        }
        let bytes = match begun < run.cells {
            true => self.run_bytes(number, all.first(begun)),
            false => run.bytes,
        };
        self.transfers.table[number].cursor += begun as u64 - 1;
        let rows = self.tables[table as usize].row_count(cell);
        let mut job = Job::new(number, at, cell, rows, bytes);
        (job.run, job.step) = (begun as u16, Step::Copies);
        let id = self.add_job(job);
        self.stages.copy.queue.push_run(lane, flow, id, (begun as u16, bytes));
        true
    }

    /// Finds how many of the next cells of a transfer one job can copy. A put can store cells that
    /// are resident in no tier; a get can read cells in host memory. None if the first cell is
    /// neither, or is copied in parts.
    fn next_run(&self, transfer: &Transfer, mut all: Stretches) -> Option<Run> {
        let spec = &transfer.spec;
        let is_plain = spec.kind != TransferKind::Prefetch
            && spec.after.is_none()
            && transfer.cancelled.is_none()
            && self.replicas.is_none()
            && self.transfers.memory_waiters.is_empty();
        if !is_plain {
            return None;
        }
        let is_put = spec.kind == TransferKind::Put;
        let is_ready = |marks: Residency| match is_put {
            true => marks.is_nowhere(),
            false => marks.resident_tiers() & HOST_MASK != 0,
        };
        let rows = &self.tables[spec.table as usize];
        // States and tokens have different rows in their tensors.
        let is_state = rows.is_state(all.layer);
        let mut run = Run::default();
        'run: while run.cells < self.config.batch_cells
            && let Some(stretch) = all.next(&spec.slots)
        {
            let Some(marks) = rows.chunks.marks(stretch.first.chunk) else { break };
            let tokens = rows.valid_tokens(stretch.first.chunk);
            for cell in stretch.cells() {
                let bytes = rows.planes_of(cell.layer, tokens).bytes();
                let most = self.config.copy_bytes / if run.cells == 0 { 1 } else { PARTS };
                let fits = run.bytes + bytes <= most && rows.is_state(cell.layer) == is_state;
                if !fits || !is_ready(marks[cell.layer]) {
                    break 'run;
                }
                run.cells += 1;
                run.bytes += bytes;
            }
        }
        (run.cells > 0).then_some(run)
    }

    /// Bytes of cells of a transfer.
    fn run_bytes(&self, number: u32, mut all: Stretches) -> u64 {
        let transfer = &self.transfers.table[number];
        let rows = &self.tables[transfer.spec.table as usize];
        let mut bytes = 0;
        while let Some(stretch) = all.next(&transfer.spec.slots) {
            bytes += stretch.cells().map(|cell| rows.planes(cell).bytes()).sum::<u64>();
        }
        bytes
    }

    /// Adds a reader to the cells of a run. Returns how many got one.
    fn read_run(&mut self, number: u32, mut all: Stretches) -> usize {
        let transfer = &self.transfers.table[number];
        let chunks = &mut self.tables[transfer.spec.table as usize].chunks;
        let mut begun = 0;
        while let Some(Stretch { first, cells, .. }) = all.next(&transfer.spec.slots) {
            let read = chunks.begin_read_run(first, cells).unwrap_or(0);
            begun += read;
            if read < cells {
                break;
            }
        }
        begun
    }

    /// Allocates host memory for cells of a put and begins to store them. Returns how many have
    /// memory.
    fn store_run(&mut self, number: u32, all: Stretches) -> usize {
        let mut pieces = std::mem::take(&mut self.transfers.pieces);
        pieces.clear();
        self.alloc_run(number, all, &mut pieces);
        let transfer = &self.transfers.table[number];
        let chunks = &mut self.tables[transfer.spec.table as usize].chunks;
        let (mut all, mut begun) = (all.first(pieces.len()), 0);
        while let Some(Stretch { first, cells, .. }) = all.next(&transfer.spec.slots) {
            if let Err(error) = chunks.begin_store_run(first, &pieces[begun..begun + cells]) {
                log::error!("internal: the store of cells could not begin: {error}");
                break;
            }
            begun += cells;
        }
        for &piece in &pieces[begun..] {
            self.give_back(Piece(piece));
        }
        if begun > 0 {
            self.eviction.refusals = 0;
        }
        self.transfers.pieces = pieces;
        begun
    }

    /// Allocates host memory for the cells of a run, as long as there is some.
    fn alloc_run(&mut self, number: u32, mut all: Stretches, pieces: &mut Vec<u32>) {
        let mut owners = std::mem::take(&mut self.transfers.owners);
        owners.clear();
        let transfer = &self.transfers.table[number];
        let (table, rows) = (transfer.spec.table, &self.tables[transfer.spec.table as usize]);
        // Cells of equal length are allocated together.
        let mut bytes = 0;
        'run: while let Some(stretch) = all.next(&transfer.spec.slots) {
            let tokens = rows.valid_tokens(stretch.first.chunk);
            for cell in stretch.cells() {
                let cell_bytes = rows.planes_of(cell.layer, tokens).bytes();
                if cell_bytes != bytes {
                    self.host.alloc_many(bytes, &owners[pieces.len()..], pieces);
                    if pieces.len() < owners.len() {
                        break 'run;
                    }
                    bytes = cell_bytes;
                }
                owners.push(owner_of(table, cell));
            }
        }
        self.host.alloc_many(bytes, &owners[pieces.len()..], pieces);
        self.transfers.owners = owners;
    }

    /// Moves a job from its queue to a batch. Returns its bytes.
    pub(super) fn take_run(&mut self, id: u32, batch: &mut CopyBatch) -> u64 {
        let job = &self.transfers.jobs[id];
        let transfer = &self.transfers.table[job.number];
        let (rows, direction) = (&self.tables[transfer.spec.table as usize], transfer.direction());
        let views = batch.view_index(&transfer.spec.views);
        let is_state = rows.is_state(job.cell.layer);
        let chunk_rows = if is_state { 1 } else { rows.layout.chunk_tokens() };
        let mut stretches = Stretches::new(transfer, job.at, job.cells() as usize);
        while let Some(stretch) = stretches.next(&transfer.spec.slots) {
            let pieces = rows.chunks.run_pieces(stretch.first, stretch.cells);
            let valid = rows.valid_tokens(stretch.first.chunk);
            let tokens = if is_state { 1 } else { valid };
            for (cell, &piece) in stretch.cells().zip(pieces.expect("the cells exist")) {
                let address = self.host.address(Piece(piece)).expect("a copy has its memory");
                let (planes, address) = (rows.planes_of(cell.layer, valid), address as usize);
                let item = CopyItem {
                    views,
                    layer: cell.layer - transfer.spec.first_layer,
                    is_v: false,
                    first: stretch.chunk as u32 * chunk_rows,
                    tokens,
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
        let transfer = &self.transfers.table[job.number];
        let (table, is_put) = (transfer.spec.table, transfer.spec.kind == TransferKind::Put);
        let mut stretches = Stretches::new(transfer, job.at, job.cells() as usize);
        self.eviction.reclaim_targets.changed();
        while let Some(stretch) = stretches.next(&self.transfers.table[job.number].spec.slots) {
            match is_put {
                true => self.end_storing_run(job.number, table, &stretch, succeeded),
                false => self.end_reading_run(table, &stretch, succeeded),
            }
            if !self.transfers.cell_waiters.is_empty() {
                stretch.cells().for_each(|cell| self.wake(table, cell));
            }
        }
    }

    fn end_storing_run(&mut self, number: u32, table: u32, run: &Stretch, succeeded: bool) {
        let &Stretch { chunk, first, cells } = run;
        let chunks = &mut self.tables[table as usize].chunks;
        if let Err(error) = chunks.end_store_run(first, cells, succeeded) {
            return log::error!("internal: the store of cells could not be ended: {error}");
        }
        if !succeeded {
            let pieces = self.tables[table as usize].chunks.run_pieces(first, cells);
            for piece in pieces.map(<[u32]>::to_vec).unwrap_or_default() {
                self.give_back(Piece(piece));
            }
            return;
        }
        self.counters.stored_cells += cells as u64;
        self.run_arrived(table, first, cells);
        self.write_whole_chunks(number, chunk as u32, At { table, slot: first.chunk });
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

    fn end_reading_run(&mut self, table: u32, run: &Stretch, succeeded: bool) {
        let &Stretch { first, cells, .. } = run;
        self.counters.host_hit_cells += if succeeded { cells as u64 } else { 0 };
        let mut freed = std::mem::take(&mut self.transfers.pieces);
        freed.clear();
        let chunks = &mut self.tables[table as usize].chunks;
        let ended = chunks.end_read_run(first, cells, |_, piece| freed.push(piece));
        if let Err(error) = ended {
            log::error!("internal: a read of host memory could not be ended: {error}");
        }
        freed.iter().for_each(|&piece| self.give_back(Piece(piece)));
        self.transfers.pieces = freed;
        if self.host.reserve_owner().is_some() {
            for cell in run.cells() {
                let place = self.tables[table as usize].chunks.place(cell, Tier::Host);
                if let Ok(Some(Location::Host(piece))) = place {
                    self.end_reserved(Some(Piece(piece)), table, cell);
                }
            }
        }
    }
}
