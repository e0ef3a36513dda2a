//! Moves: rectangles of the board, tokens by layers, on their way in or out.

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::{Event, Way};
use crate::fail;
use crate::meta::chunks::Cell;
use crate::meta::index::{NONE, Slot};
use crate::policy::evictor::Who;
use crate::store::state::views::Views;
use crate::store::state::wait_list::{Line, Of};
use crate::store::state::{Job, StoreState};

pub use crate::store::state::transfer_kind::{Level, TransferKind};

/// Jobs that one move has under way at once.
const WINDOW: u32 = 1024;
/// Most chunks of one move.
pub const MAX_MOVE_CHUNKS: usize = 1 << 22;

/// What a caller asks for.
pub struct MoveSpec {
    /// The board of its namespace.
    pub table: u32,
    /// Whose turn it takes: a session.
    pub flow: u32,
    /// Whom policies are told of.
    pub who: Who,
    /// Urgency, 0 first.
    pub lane: usize,
    /// What to do.
    pub kind: TransferKind,
    /// When a put has ended.
    pub level: Level,
    /// The chunks, one after the other; NONE where one is not there, and not put.
    pub slots: Vec<Slot>,
    /// Says of each chunk by itself how it went.
    pub by_chunk: bool,
    /// Where not all of a get's are there: what policies call them, also those.
    pub asked: Vec<u64>,
    /// The first layer.
    pub first_layer: usize,
    /// How many.
    pub layers: usize,
    /// One part a layer, each of which ends by itself.
    pub by_layer: bool,
    /// For each layer the first chunk that is wanted of it; empty = all are.
    pub needed_from: Vec<u32>,
    /// Where the engine has them; none for a prefetch.
    pub views: Arc<Views>,
    /// An event of the device that its copies are behind.
    pub after: Option<Event>,
    /// Nothing is begun before [`StoreState::begin_waiting`] of this ticket.
    pub ticket: Option<u64>,
}

/// One result of a move.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    left: u32,
    /// The first chunk that did not come.
    bad: u32,
    missed: u32,
    bytes: u64,
    error: Option<Error>,
}

/// A move under way.
pub struct Move {
    pub(super) spec: MoveSpec,
    cursor: u64,
    pub(super) under_way: u32,
    /// Its jobs.
    pub(super) jobs: Line,
    parts: Vec<Part>,
    /// How each chunk went, where that is asked for.
    outcomes: Vec<Status>,
    cancelled: Option<Status>,
    /// In the line of those that have more cells to begin.
    feeds: bool,
    /// Chunks that are not on disk yet, once all is in memory.
    pub(super) waits: u32,
    /// Chunks that are in memory and have to be on disk, until they are worth a batch.
    pub(super) whole: Vec<Slot>,
    /// Chunks before its own that it waits for to be on disk.
    pub(super) ahead: Vec<Slot>,
    /// When it began: when it came, or the engine gave its word.
    pub(super) began_ns: u64,
    /// Some of its cells were on disk, and not in memory.
    pub(super) was_below: bool,
    /// Of a put that the remote has to have: the chunks that were begun to be sent.
    pub(super) sent: Vec<bool>,
    /// It moves nothing, and waits for what the remote has: tokens that were found.
    pub(super) locates: Option<u64>,
}

/// A part of a move has ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Which move.
    pub number: u32,
    /// Which part.
    pub part: u32,
    /// How it went; NOT_FOUND = something of it was not there.
    pub error: Option<Error>,
    /// Tokens from the start on that came without a gap.
    pub tokens: u64,
    /// Bytes that were moved.
    pub bytes: u64,
    /// How each chunk went, where that was asked for.
    pub outcomes: Vec<Status>,
    /// The number is free again.
    pub last: bool,
}

impl Move {
    pub(super) fn new(spec: MoveSpec, now_ns: u64) -> Result<Move> {
        let chunks = spec.slots.len() as u32;
        let (parts, left) = match spec.by_layer {
            true => (spec.layers, chunks),
            false => (1, chunks * spec.layers as u32),
        };
        let mut all = Vec::new();
        all.try_reserve_exact(parts).map_err(|_| Status::NoMem)?;
        all.resize(parts, Part { left, bad: u32::MAX, ..Part::default() });
        let mut outcomes = Vec::new();
        if spec.by_chunk {
            outcomes.try_reserve_exact(chunks as usize).map_err(|_| Status::NoMem)?;
            outcomes.resize(chunks as usize, Status::Ok);
        }
        let mut sent = Vec::new();
        if spec.level == Level::Remote {
            sent.try_reserve_exact(chunks as usize).map_err(|_| Status::NoMem)?;
            sent.resize(chunks as usize, false);
        }
        let (cursor, under_way, waits) = (0, 0, 0);
        let (cancelled, feeds, jobs) = (None, false, Line::default());
        let (whole, ahead) = (Vec::new(), Vec::new());
        let (parts, began_ns, was_below) = (all, now_ns, false);
        Ok(Move {
            spec,
            cursor,
            under_way,
            jobs,
            parts,
            outcomes,
            cancelled,
            feeds,
            waits,
            whole,
            ahead,
            began_ns,
            was_below,
            sent,
            locates: None,
        })
    }

    /// Whether nothing of it is under way, or still to begin.
    pub(super) fn is_over(&self) -> bool {
        self.under_way == 0 && self.cursor == self.cells()
    }

    fn cells(&self) -> u64 {
        self.spec.slots.len() as u64 * self.spec.layers as u64
    }

    /// The chunk (of the move) and the layer (of the move) of its cells, in the order
    /// in which they are begun: by layers where a result waits for each, else by
    /// chunks, as records on disk are.
    pub(super) fn place(&self, at: u64) -> (usize, usize) {
        // Fewer than 2^32, as moves are checked: that is faster to divide.
        let (at, chunks, layers) =
            (at as u32, self.spec.slots.len() as u32, self.spec.layers as u32);
        match self.spec.by_layer || self.spec.kind != TransferKind::Put {
            true => ((at % chunks) as usize, (at / chunks) as usize),
            false => ((at / layers) as usize, (at % layers) as usize),
        }
    }

    /// Which way its copies go.
    pub(super) fn way(&self) -> Way {
        if self.spec.kind == TransferKind::Put { Way::Gather } else { Way::Scatter }
    }

    /// Whether nothing has gone wrong with any of its cells so far.
    pub(super) fn is_sound(&self) -> bool {
        self.parts.iter().all(|part| part.bad == u32::MAX)
    }

    /// A chunk of a put did not get where it was to be.
    pub(super) fn blame(&mut self, chunk: u32, error: &Error) {
        for part in &mut self.parts {
            part.error.get_or_insert_with(|| error.clone());
            part.bad = part.bad.min(chunk);
        }
        if let Some(outcome) = self.outcomes.get_mut(chunk as usize) {
            note_outcome(outcome, error.status());
        }
    }

    /// What its jobs end with, if it was given up.
    pub(super) fn stopped(&self) -> Option<Status> {
        self.cancelled
    }
}

/// A miss is the mildest of what may go wrong: it is said where nothing else did.
fn note_outcome(outcome: &mut Status, status: Status) {
    if matches!(*outcome, Status::Ok | Status::NotFound) {
        *outcome = status;
    }
}

impl StoreState {
    /// Begins a move; its number. Its chunks stay until it has ended.
    pub fn submit(&mut self, spec: MoveSpec) -> Result<u32> {
        self.check_move(&spec, spec.slots.len())?;
        let slots: Vec<Slot> = spec.slots.iter().copied().filter(|&slot| slot != NONE).collect();
        let (table, ticket, after) = (spec.table, spec.ticket, spec.after);
        let number = self.moves.add(Move::new(spec, self.now_ns)?)?;
        for (held, &slot) in slots.iter().enumerate() {
            if let Err(error) = self.tables[table as usize].chunks.retain(slot) {
                for &slot in &slots[..held] {
                    self.let_go(table, slot);
                }
                self.moves.remove(number);
                return Err(error);
            }
            self.note_held(table, slot);
        }
        self.join_behind(after);
        self.prefetch_begins(number);
        self.notify_policies(number);
        self.counters.moves[self.moves[number].spec.kind as usize] += 1;
        match ticket {
            Some(ticket) => self.hold_back(number, ticket),
            None => self.feed_later(number),
        }
        if self.moves[number].cells() == 0 {
            self.end_first_phase(number);
        }
        self.settle();
        Ok(number)
    }

    /// Whether a move of so many chunks may begin; asked also before its rows are made, since
    /// others have to leave for those.
    pub(super) fn check_move(&self, spec: &MoveSpec, chunks: usize) -> Result<()> {
        let Some(table) = self.tables.get(spec.table as usize) else {
            fail!(NotFound, "there is no board {}", spec.table);
        };
        let (from, to) = (spec.first_layer, spec.first_layer.saturating_add(spec.layers));
        if spec.layers == 0 || to > table.layout.layers() {
            fail!(Invalid, "layers {from}..{to} of a model with {}", table.layout.layers());
        }
        if chunks > MAX_MOVE_CHUNKS || chunks.checked_mul(spec.layers).is_none_or(|n| n >> 32 != 0)
        {
            fail!(Limit, "a move of {chunks} chunks; {MAX_MOVE_CHUNKS} can be: make two");
        }
        if spec.level.is_on_disk() && self.disk.is_none() {
            fail!(Unavailable, "the store has no disk: put at level ram, or open it with disk=");
        }
        if spec.level == Level::Remote && self.remote.is_none() {
            fail!(Unavailable, "the store has no remote (remote=...): nothing can be put there");
        }
        if spec.kind != TransferKind::Prefetch && spec.views.0.len() != spec.layers {
            fail!(Invalid, "{} views for {} layers", spec.views.0.len(), spec.layers);
        }
        self.check_behind(spec)?;
        self.has_room_for_move()
    }

    /// Whether views of a move say where so many tokens of so many chunks are.
    pub(super) fn check_views(
        &self,
        (table, kind): (u32, TransferKind),
        views: &Views,
        first_layer: usize,
        tokens: u32,
        chunks: u32,
    ) -> Result<()> {
        let way = match kind {
            TransferKind::Prefetch => return Ok(()),
            TransferKind::Put => Way::Gather,
            TransferKind::Get => Way::Scatter,
        };
        views.check(&self.tables[table as usize].layout, first_layer, tokens, chunks, way)
    }

    /// Gives a move up: what has not begun does not begin. It ends when what is
    /// under way has.
    pub fn cancel(&mut self, number: u32, status: Status) {
        let Some(one) = self.moves.get_mut(number) else { return };
        one.cancelled.get_or_insert(status);
        let ticket = one.spec.ticket;
        if self.stop_locating(number, status) {
            return self.settle();
        }
        self.stop_waiting(ticket);
        self.withdraw_all(number, status);
        // What did not begin needs no room among the jobs to end.
        self.skip_rest(number);
        self.settle();
    }

    pub(super) fn feed_later(&mut self, number: u32) {
        let one = &mut self.moves[number];
        if !one.feeds {
            one.feeds = true;
            self.feeding.push_back(number);
        }
    }

    /// Begins cells of moves that have room for them under way; whether any was begun.
    pub(super) fn feed(&mut self) -> bool {
        let Some(number) = self.feeding.pop_front() else { return false };
        let Some(one) = self.moves.get_mut(number) else { return true };
        // It may have ended while it stood in line, and another one have its number.
        if !std::mem::take(&mut one.feeds) {
            return true;
        }
        loop {
            let one = &mut self.moves[number];
            if one.cursor == one.cells() || one.under_way >= WINDOW {
                return true;
            }
            if !self.jobs.has_room() {
                self.feed_later(number);
                return false;
            }
            if self.is_parked(number) {
                return true;
            }
            let one = &mut self.moves[number];
            let at = one.cursor;
            one.cursor += 1;
            one.under_way += 1;
            let (chunk, layer) = one.place(at);
            if one.spec.needed_from.get(layer).is_some_and(|&from| chunk < from as usize) {
                self.end_cell(number, at, 0, None);
                if self.moves.get(number).is_none() {
                    return true;
                }
                continue;
            }
            let layer = one.spec.first_layer + layer;
            let cell = Cell { chunk: one.spec.slots[chunk], layer };
            let job = self.jobs.add(Job::new(number, at, cell)).expect("there is room");
            self.moves[number].jobs.push_back(&mut self.jobs, Of::Move, job);
            self.begin_behind(job);
            self.route(job);
            if self.moves.get(number).is_none() {
                return true; // that was its last one
            }
        }
    }

    /// Ends cells that were not begun.
    fn skip_rest(&mut self, number: u32) {
        let Some(one) = self.moves.get_mut(number) else { return };
        let status = one.cancelled.unwrap_or(Status::Cancelled);
        let (from, to) = (one.cursor, one.cells());
        if from == to {
            return;
        }
        one.cursor = to;
        one.under_way += 1; // until all are counted it is not over
        for at in from..to {
            let one = &mut self.moves[number];
            one.under_way += 1;
            self.count(number, at, 0, Some(status.into()));
        }
        let one = &mut self.moves[number];
        one.under_way -= 1;
        if one.under_way == 0 {
            self.end_first_phase(number);
        }
    }

    /// A cell of a move has ended.
    pub(super) fn count(&mut self, number: u32, at: u64, bytes: u64, error: Option<Error>) {
        let one = &self.moves[number].spec;
        self.tenants.count(one.who.tenant, one.kind, bytes, error.as_ref());
        self.end_cell(number, at, bytes, error);
    }

    fn end_cell(&mut self, number: u32, at: u64, bytes: u64, error: Option<Error>) {
        let one = &mut self.moves[number];
        let (chunk, layer) = one.place(at);
        let index = if one.spec.by_layer { layer } else { 0 };
        let part = &mut one.parts[index];
        part.left -= 1;
        part.bytes += bytes;
        if let Some(error) = error {
            part.bad = part.bad.min(chunk as u32);
            part.missed += u32::from(error.status() == Status::NotFound);
            if let Some(outcome) = one.outcomes.get_mut(chunk) {
                note_outcome(outcome, error.status());
            }
            // A miss is the mildest of all: it is named where nothing else went wrong.
            if part.error.as_ref().is_none_or(|e| e.status() == Status::NotFound) {
                part.error = Some(error);
            }
        }
        one.under_way -= 1;
        let ends = part.left == 0 && one.spec.level == Level::Ram;
        let over = one.under_way == 0 && one.cursor == one.cells();
        let wants_more = one.under_way < WINDOW / 2 && one.cursor < one.cells();
        if ends && one.spec.by_layer {
            self.notify(number, index, false);
        }
        if over {
            self.end_first_phase(number);
        } else if wants_more {
            self.feed_later(number);
        }
    }

    /// All cells of a move are where they should be, or will not be.
    fn end_first_phase(&mut self, number: u32) {
        if self.moves[number].spec.kind == TransferKind::Put {
            self.write_down(number);
            self.send_out(number);
        }
        if self.moves[number].waits == 0 {
            self.end_move(number);
        }
    }

    /// A put that waits for the disk fails, as a whole.
    pub(super) fn blame(&mut self, number: u32, error: &Error) {
        let one = &mut self.moves[number];
        one.blame(0, error);
        one.outcomes.iter_mut().for_each(|outcome| note_outcome(outcome, error.status()));
    }

    /// A move has ended: what was not reported is.
    pub(super) fn end_move(&mut self, number: u32) {
        if self.commits_before_end(number) {
            return;
        }
        self.conclude(number);
    }

    /// The very end of a move.
    pub(super) fn conclude(&mut self, number: u32) {
        let one = &self.moves[number];
        let (table, parts) = (one.spec.table, one.parts.len());
        let reported = one.spec.by_layer && one.spec.level == Level::Ram;
        let is_own = self.is_prefetch(number);
        for part in 0..parts {
            if !reported && !is_own {
                self.notify(number, part, part + 1 == parts);
            }
        }
        if reported {
            // Its last part was reported a moment ago: that is why it ends.
            let last = self.finished.iter_mut().rev().find(|f| f.number == number);
            debug_assert!(last.is_some(), "a move ended without a word");
            last.into_iter().for_each(|last| last.last = true);
        }
        let Some(one) = self.moves.remove(number) else { return };
        self.prefetch_ended(number);
        self.times.moved(&one, self.now_ns);
        self.stop_waiting(one.spec.ticket);
        self.leave_behind(one.spec.after);
        for &slot in one.spec.slots.iter().rev().filter(|&&slot| slot != NONE) {
            self.let_go(table, slot);
        }
    }

    fn notify(&mut self, number: u32, index: usize, last: bool) {
        let one = &mut self.moves[number];
        let table = &self.tables[one.spec.table as usize];
        let part = &mut one.parts[index];
        let whole = (part.bad as usize).min(one.spec.slots.len());
        // All but the last of a path are full; one that is not there was not needed.
        let full = table.layout.chunk_tokens();
        let tokens_of =
            |&slot: &Slot| table.chunks.chunk(slot).map_or(full, |row| row.valid_tokens());
        let each = u64::from(full);
        let tokens = match one.spec.slots[..whole].split_last() {
            Some((tail, full)) => full.len() as u64 * each + u64::from(tokens_of(tail)),
            None => one.locates.unwrap_or(0),
        };
        let (error, bytes) = (part.error.take(), part.bytes);
        let part = index as u32;
        let outcomes = std::mem::take(&mut one.outcomes);
        self.finished.push(Finished { number, part, error, tokens, bytes, outcomes, last });
    }

    /// The cell of a job.
    pub(super) fn cell_of(&self, job: &Job) -> (u32, Cell) {
        (self.moves[job.number].spec.table, job.cell)
    }
}
