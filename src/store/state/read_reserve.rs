//! The reserve of host memory: what is on disk can be read although all other memory is taken by
//! what has to stay. It holds one cell, which leaves when it was read; so such reads are slow, one
//! cell after the other, and end.

use crate::base::budget::Tier;
use crate::meta::chunks::Cell;
use crate::store::state::reclaim::cell_of_owner;
use crate::store::state::transfer::TransferKind;
use crate::store::state::{At, StoreState};
use crate::tier::host::Piece;

const HOST: u8 = 1 << Tier::Host as u8;
const DISK: u8 = 1 << Tier::Disk as u8;

impl StoreState {
    /// Keeps a reserve for the largest cell of a board, if there is a disk to read it from.
    pub(super) fn keep_reserve(&mut self, table: usize) {
        if self.disk.is_none() {
            return;
        }
        let rows = &self.tables[table];
        let all = (0..rows.layout.layers()).map(|layer| rows.full_bytes(layer));
        if let Err(error) = self.host.keep_reserve(all.max().unwrap_or(0)) {
            log::debug!("there is no reserve for reads until it is needed: {error}");
        }
    }

    /// No memory can be had for the first job that waits for some: where it gets a cell that is
    /// on disk it takes the reserve. Some(false) = the reserve is in use, and comes free; None =
    /// it is of no use to the job.
    pub(super) fn serve_from_reserve(&mut self) -> Option<bool> {
        let id = self.memory_waiters.first()?;
        let job = self.jobs[id];
        let (table, cell) = self.cell_of(&job);
        let rows = &self.tables[table as usize];
        let marks = rows.chunks.marks(cell.chunk).and_then(|all| all.get(cell.layer));
        let is_below = marks.is_some_and(|marks| marks.there() & (HOST | DISK) == DISK);
        let is_get = self.moves[job.number].spec.kind == TransferKind::Get;
        // What is behind an event may keep its memory for long.
        if !is_get || !is_below || self.event_of(job.number).is_some() {
            return None;
        }
        let bytes = rows.planes(cell).bytes();
        if let Some(owner) = self.host.reserve_owner() {
            let (table, other) = cell_of_owner(owner);
            self.leave_reserve(table, other);
            if self.host.reserve_owner().is_some() {
                let row = self.tables[table as usize].chunks.chunk(other.chunk);
                return row.is_some_and(|row| row.is_moving()).then_some(false);
            }
        }
        if let Err(error) = self.host.keep_reserve(bytes) {
            log::debug!("there is no reserve for a read: {error}");
            return None;
        }
        self.unqueue_memory_waiter(id);
        (self.served, self.reserved) = (Some(id), Some(id));
        self.route(id);
        (self.served, self.reserved) = (None, None);
        (self.memory_waiters.first() != Some(id)).then_some(true)
    }

    /// A job has read its cell in this memory: from the reserve it leaves at once.
    pub(super) fn end_reserved(&mut self, piece: Option<Piece>, table: u32, cell: Cell) {
        if piece.is_some_and(|piece| self.host.is_reserve(piece)) {
            self.leave_reserve(table, cell);
        }
    }

    fn leave_reserve(&mut self, table: u32, cell: Cell) {
        self.drop_copies(At { table, slot: cell.chunk }, |layer| layer == cell.layer);
    }
}
