//! Jobs: one cell of a move, and what it waits for.

use std::collections::btree_map::Entry;

use crate::base::budget::Tier;
use crate::base::status::{Error, Result, Status};
use crate::meta::chunks::{Begin, Cell, Marks, Place};
use crate::store::state::chunk_table::note;
use crate::store::state::reclaim::owner_of;
use crate::store::state::transfer::{Level, TransferKind};
use crate::store::state::wait_list::{Line, Link, Of};
use crate::store::state::{At, StoreState};
use crate::tier::device;
use crate::tier::host::Piece;

const HOST: u8 = 1 << Tier::Host as u8;
const DISK: u8 = 1 << Tier::Disk as u8;
const DEVICE: u8 = 1 << Tier::Device as u8;

/// What a job waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// To be looked at: that is under way, or it stands among those that were woken.
    Fresh,
    /// For memory.
    WaitsForMemory,
    /// For what others do with its cell.
    Waiting,
    /// For its turn to be copied.
    Copies,
    /// For an event that is ahead of the copy.
    Behind,
    /// For the copy.
    Copying,
    /// For its turn to be read.
    Reads,
    /// For the disk.
    Reading,
    /// For its turn to be fetched, with all of its object.
    Fetches,
    /// For the remote.
    Fetching,
}

/// One cell of a move.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// The move.
    pub(super) number: u32,
    /// Which of its cells.
    pub(super) at: u64,
    /// That cell, of the move's board.
    pub(super) cell: Cell,
    /// The cell's memory, while the job fills or reads it.
    pub(super) piece: Option<Piece>,
    pub(super) step: Step,
    pub(super) retries: u8,
    /// It had to be read from disk.
    pub(super) was_below: bool,
    /// It reads the cell's copy in device memory.
    pub(super) uses_device: bool,
    /// Device memory that it fills.
    pub(super) replica: Option<device::Piece>,
    /// Its bytes, if it counts among those that are behind an event.
    pub(super) behind_bytes: u64,
    /// It has nothing to do with device memory any more.
    pub(super) plain: bool,
    /// The remote had nothing for it.
    pub(super) gave_up_remote: bool,
    /// Tokens of it that are copied already, where it is copied in parts.
    pub(super) copied: u32,
    /// Tokens that are being copied.
    pub(super) part: u32,
    /// Its neighbours in the lines that it stands in.
    pub(super) links: [Link; 2],
}

impl Job {
    pub(super) fn new(number: u32, at: u64, cell: Cell) -> Job {
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
            behind_bytes: 0,
            plain: false,
            gave_up_remote: false,
            copied: 0,
            part: 0,
            links,
        }
    }
}

impl StoreState {
    /// Finds out what a job needs next.
    pub(super) fn route(&mut self, id: u32) {
        let Some(job) = self.jobs.get(id).copied() else { return };
        let one = &self.moves[job.number];
        if let Some(status) = one.stopped() {
            return self.end_job(id, 0, Some(status.into()));
        }
        let kind = one.spec.kind;
        let (table, cell) = self.cell_of(&job);
        let marks = self.tables[table as usize].chunks.marks(cell.chunk);
        let marks = marks.and_then(|all| all.get(cell.layer)).copied().unwrap_or_default();
        match kind {
            TransferKind::Put => self.route_put(id, table, cell, marks),
            TransferKind::Get | TransferKind::Prefetch => {
                self.route_get(id, kind, table, cell, marks)
            }
        }
    }

    fn route_put(&mut self, id: u32, table: u32, cell: Cell, marks: Marks) {
        if marks.there() != 0 {
            // A crash may have left a record whose bytes never came: before it is said to be
            // on disk it is read.
            let number = self.jobs[id].number;
            let level = self.moves[number].spec.level;
            let is_above = marks.there() & HOST != 0;
            let is_known = !level.is_on_disk() || is_above;
            if !is_known && self.tables[table as usize].has(cell.chunk, note::UNREAD) {
                return self.bring_up(id, table, cell, marks);
            }
            if level == Level::Remote {
                // It goes from memory there.
                if !is_above && marks.there() & DISK != 0 {
                    return self.bring_up(id, table, cell, marks);
                }
                let (chunk, _) = self.moves[number].place(self.jobs[id].at);
                self.write_ahead(number, chunk as u32, At { table, slot: cell.chunk });
            }
            self.counters.known += 1;
            return self.end_job(id, 0, None);
        }
        if marks.arriving() != 0 || marks.leaving() & HOST != 0 {
            return self.wait_for_cell(id, table, cell);
        }
        let Some(piece) = self.get_memory(id, table, cell) else { return };
        match self.tables[table as usize].chunks.begin_store(cell, Tier::Host) {
            Ok(Begin::Begun) => {
                self.jobs[id].piece = Some(piece);
                self.queue_copy(id, table, cell);
            }
            begun => {
                self.give_back(piece);
                self.end_job(id, 0, Some(unexpected(begun)));
            }
        }
    }

    fn route_get(&mut self, id: u32, kind: TransferKind, table: u32, cell: Cell, marks: Marks) {
        if marks.there() & DEVICE != 0 && self.route_replica(id, kind, table, cell) {
            return;
        }
        if marks.there() & HOST != 0 {
            if kind == TransferKind::Prefetch {
                return self.end_job(id, 0, None);
            }
            return match self.tables[table as usize].chunks.begin_read(cell, Tier::Host) {
                Ok(place) => {
                    // It may leave meanwhile: then the table names it no more.
                    self.jobs[id].piece = match place {
                        Place::Host(piece) => Some(Piece(piece)),
                        _ => None,
                    };
                    self.queue_copy(id, table, cell);
                }
                Err(error) => self.end_job(id, 0, Some(error)),
            };
        }
        if marks.there() & DISK == 0 && (marks.arriving() | marks.leaving()) & HOST == 0 {
            if !self.jobs[id].gave_up_remote && self.may_fetch(table, cell) {
                return self.fetch(id, table, cell);
            }
            // What nobody asked for is missed by nobody.
            self.counters.misses += u64::from(!self.is_prefetch(self.jobs[id].number));
            return self.end_job(id, 0, Some(Status::NotFound.into()));
        }
        self.bring_up(id, table, cell, marks);
    }

    /// Has a cell that is not in memory read from disk.
    fn bring_up(&mut self, id: u32, table: u32, cell: Cell, marks: Marks) {
        let number = self.jobs[id].number;
        self.moves[number].was_below |= marks.there() & DISK != 0;
        if (marks.arriving() | marks.leaving()) & HOST != 0 {
            return self.wait_for_cell(id, table, cell);
        }
        let Some(piece) = self.get_memory(id, table, cell) else { return };
        match self.tables[table as usize].chunks.begin_copy(cell, Tier::Disk, Tier::Host) {
            Ok(Begin::Begun) => {
                let one = &self.moves[self.jobs[id].number].spec;
                let (lane, flow) = (one.lane, one.flow);
                let bytes = self.tables[table as usize].planes(cell).bytes();
                let job = &mut self.jobs[id];
                (job.piece, job.step, job.was_below) = (Some(piece), Step::Reads, true);
                self.reads.push(lane, flow, id, bytes);
            }
            begun => {
                self.give_back(piece);
                self.end_job(id, 0, Some(unexpected(begun)));
            }
        }
    }

    pub(super) fn queue_copy(&mut self, id: u32, table: u32, cell: Cell) {
        if self.queue_behind(id) {
            return;
        }
        let one = &self.moves[self.jobs[id].number].spec;
        let (lane, flow) = (one.lane, one.flow);
        let bytes = self.tables[table as usize].planes(cell).bytes();
        self.jobs[id].step = Step::Copies;
        self.copies_of(self.jobs[id].uses_device).push(lane, flow, id, bytes);
    }

    fn wait_for_cell(&mut self, id: u32, table: u32, cell: Cell) {
        let at = At { table, slot: cell.chunk };
        if self.is_hung(at, cell.layer) {
            return self.end_hung(id);
        }
        self.jobs[id].step = Step::Waiting;
        let line = self.waiting.entry((at, cell.layer)).or_default();
        line.push_back(&mut self.jobs, Of::Wait, id);
        self.hurry_fetch(id, at, cell.layer);
    }

    /// Something has become of a cell: whoever waits for it looks again.
    pub(super) fn wake(&mut self, table: u32, cell: Cell) {
        self.reclaim_targets.changed();
        if self.waiting.is_empty() {
            return;
        }
        let at = At { table, slot: cell.chunk };
        let Some(mut line) = self.waiting.remove(&(at, cell.layer)) else { return };
        while let Some(id) = line.pop_back(&mut self.jobs, Of::Wait) {
            self.jobs[id].step = Step::Fresh;
            self.woken.push(id);
        }
    }

    /// Memory for a job's cell; where there is none the job waits for it.
    pub(super) fn get_memory(&mut self, id: u32, table: u32, cell: Cell) -> Option<Piece> {
        let bytes = self.tables[table as usize].planes(cell).bytes();
        // Who came first is served first: a large cell is not passed by small ones.
        let is_first = self.memory_waiters.is_empty() || self.served == Some(id);
        if let Some(piece) =
            is_first.then(|| self.host.alloc_for(bytes, owner_of(table, cell)).ok()).flatten()
        {
            self.refusals = 0;
            return Some(piece);
        }
        if self.reserved == Some(id)
            && let Some(piece) = self.host.take_reserve(bytes, owner_of(table, cell))
        {
            return Some(piece);
        }
        self.jobs[id].step = Step::WaitsForMemory;
        self.memory_waiter_bytes += bytes;
        match is_first {
            true => self.memory_waiters.push_front(&mut self.jobs, Of::Wait, id),
            false => self.memory_waiters.push_back(&mut self.jobs, Of::Wait, id),
        }
        None
    }

    /// Memory came free: the first that waits for some tries again.
    pub(super) fn feed_memory_waiters(&mut self) -> bool {
        let Some(id) = self.memory_waiters.first() else { return false };
        self.unqueue_memory_waiter(id);
        self.served = Some(id);
        self.route(id);
        self.served = None;
        self.memory_waiters.first() != Some(id)
    }

    /// The first that waits for memory will not get any.
    pub(super) fn fail_memory_waiters(&mut self) {
        let Some(id) = self.memory_waiters.first() else { return };
        self.counters.no_room += 1;
        let (table, cell) = self.cell_of(&self.jobs[id]);
        let bytes = self.tables[table as usize].planes(cell).bytes();
        let message = format!(
            "no memory for a cell of {bytes} bytes (layer {}), and nothing may leave the {} bytes of \
             host=: all is held, pinned or in motion. Close sessions, or give the store more",
            cell.layer, self.config.host_bytes
        );
        self.unqueue_memory_waiter(id);
        self.end_job(id, 0, Some(Error::new(Status::Budget, message)));
    }

    pub(super) fn unqueue_memory_waiter(&mut self, id: u32) {
        let (table, cell) = self.cell_of(&self.jobs[id]);
        self.memory_waiter_bytes -= self.tables[table as usize].planes(cell).bytes();
        self.jobs[id].step = Step::Fresh;
        self.memory_waiters.remove(&mut self.jobs, Of::Wait, id);
    }

    pub(super) fn give_back(&mut self, piece: Piece) {
        if let Err(error) = self.host.free(piece) {
            log::error!("a piece of memory was not in use: {error}");
        }
    }

    /// Ends a job that is nowhere any more.
    pub(super) fn end_job(&mut self, id: u32, bytes: u64, error: Option<Error>) {
        let Some(number) = self.jobs.get(id).map(|job| job.number) else { return };
        self.moves[number].jobs.remove(&mut self.jobs, Of::Move, id);
        if let Some(job) = self.jobs.remove(id) {
            self.end_behind(&job);
            self.count(job.number, job.at, bytes, error);
        }
    }

    /// Withdraws all jobs of a move.
    pub(super) fn withdraw_all(&mut self, number: u32, status: Status) {
        let mut next = self.moves.get(number).and_then(|one| one.jobs.first());
        while let Some(id) = next {
            // A job that is withdrawn ends no other.
            next = Line::after(&self.jobs, Of::Move, id);
            self.withdraw(id, status);
        }
    }

    /// Takes a job out of whatever it waits in; what is under way goes on.
    fn withdraw(&mut self, id: u32, status: Status) {
        let Some(job) = self.jobs.get(id).copied() else { return };
        let (table, cell) = self.cell_of(&job);
        match job.step {
            // One that was woken ends when it is looked at, as its move was given up.
            Step::Fresh | Step::Copying | Step::Reading => return,
            // A remote may take longer than anybody waits, and has none of the caller's memory.
            Step::Fetching => {
                self.leave_fetch(id, At { table, slot: cell.chunk }, cell.layer);
            }
            Step::WaitsForMemory => self.unqueue_memory_waiter(id),
            Step::Waiting => {
                let key = (At { table, slot: cell.chunk }, cell.layer);
                if let Entry::Occupied(mut entry) = self.waiting.entry(key) {
                    entry.get_mut().remove(&mut self.jobs, Of::Wait, id);
                    if entry.get().is_empty() {
                        entry.remove();
                    }
                }
            }
            Step::Copies => {
                self.copies_of(job.uses_device).remove(id);
                self.end_copying(id, false);
            }
            Step::Behind => {
                self.withdraw_behind(&job, id);
                self.end_copying(id, false);
            }
            Step::Reads => {
                self.reads.remove(id);
                // Nothing was tried, so nothing has failed.
                self.end_reading(&job, table, cell, Err(Status::Again.into()));
            }
            Step::Fetches => {
                self.unwant(id, table, cell);
                self.end_reading(&job, table, cell, Err(Status::Again.into()));
            }
        }
        self.end_job(id, 0, Some(status.into()));
    }
}

fn unexpected(begun: Result<Begin>) -> Error {
    match begun {
        Err(error) => error,
        Ok(begun) => Error::new(Status::State, format!("a way that was free is {begun:?}")),
    }
}
