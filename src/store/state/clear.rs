//! What leaves at the engine's wish: everything of a namespace, or a part of a
//! session.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::budget::Tier;
use crate::base::status::{Error, Result};
use crate::fail;
use crate::meta::index::Slot;
use crate::store::events::{Event, Kind};
use crate::store::state::chunk_table::note;
use crate::store::state::granularity::Part;
use crate::store::state::namespaces::Unsure;
use crate::store::state::work::{Work, WorkerKind};
use crate::store::state::{At, StoreState};

/// What became of chunks that were to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// They are in no tier any more.
    pub gone: u64,
    /// They stay: sessions, moves or pins hold them, or others that stay continue them.
    pub held: u64,
    /// They stay: the store was at them. Later they can be asked for again.
    pub moving: u64,
}

/// What clears a namespace, some chunks at a time.
pub struct Clearing {
    space: u32,
    /// Which namespace that is: the number may be another's by then.
    serial: u64,
    table: u32,
    /// The chunks, those behind others first, and which use of its slot each is.
    chunks: Vec<(Slot, u32)>,
    at: usize,
    /// What became of them so far.
    pub cleared: Cleared,
}

impl Clearing {
    /// Begins anew with those that stayed; what has gone counts.
    pub fn again(&mut self) {
        self.at = 0;
        self.cleared = Cleared { gone: self.cleared.gone, ..Cleared::default() };
    }
}

/// What became of one chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It was nowhere.
    Nothing,
    Gone,
    Held,
    Moving,
}

/// Who waits for what left to stay away: for a checkpoint that was begun after it.
#[derive(Default)]
pub(super) struct Turns {
    asked: u64,
    /// What the checkpoint that is being written will do.
    begun: u64,
    lasting: u64,
    /// Up to which turn it failed, and how.
    failed: Option<(u64, Error)>,
    /// Who waits has to look again.
    news: bool,
}

impl StoreState {
    /// Begins to clear a namespace of the chunks that it has now.
    pub fn begin_clear(&self, space: u32) -> Result<Clearing> {
        let Some(home) = self.space(space) else {
            fail!(NotFound, "there is no namespace {space}");
        };
        let chunks = &self.tables[home.table as usize].chunks;
        let mut rows: Vec<(u32, Slot, u32)> = Vec::new();
        for slot in chunks.slots() {
            let Some(row) = chunks.chunk(slot).filter(|row| row.namespace() == space) else {
                continue;
            };
            if rows.try_reserve(1).is_err() {
                fail!(NoMem, "no memory to clear {} chunks", rows.len());
            }
            rows.push((row.position(), slot, row.generation()));
        }
        rows.sort_unstable_by_key(|&(position, slot, _)| (std::cmp::Reverse(position), slot));
        let chunks = rows.into_iter().map(|(_, slot, generation)| (slot, generation)).collect();
        let (serial, table, cleared) = (home.serial, home.table, Cleared::default());
        Ok(Clearing { space, serial, table, chunks, at: 0, cleared })
    }

    /// How many cells were written so far, or could not be; None = none is on its way down.
    pub fn writes_so_far(&self) -> Option<u64> {
        let is_writing =
            self.under_way[WorkerKind::Write as usize] > 0 || !self.writebacks.is_empty();
        is_writing.then_some(self.counters.written + self.counters.failed_writes)
    }

    /// Clears up to `most` chunks more; whether some are left.
    pub fn clear_more(&mut self, clearing: &mut Clearing, most: usize) -> bool {
        let table = clearing.table;
        if self.space(clearing.space).is_none_or(|space| space.serial != clearing.serial) {
            return false; // nothing was left of it
        }
        let end = clearing.chunks.len().min(clearing.at.saturating_add(most));
        let rows = &self.tables[table as usize].chunks;
        let same = |&&(slot, generation): &&(Slot, u32)| rows.chunk_of(slot, generation).is_some();
        let part = &clearing.chunks[clearing.at..end];
        let slots: Vec<Slot> = part.iter().filter(same).map(|&(slot, _)| slot).collect();
        clearing.cleared = self.take_away(table, &slots, clearing.cleared);
        clearing.at = end;
        let is_over = end == clearing.chunks.len();
        if is_over && self.spaces[clearing.space as usize].rows == 0 {
            self.say_cleared(clearing.space);
        }
        self.settle();
        !is_over
    }

    /// Lets the chunks of a range of a session's tokens go; those that nobody else
    /// holds leave all tiers.
    pub fn drop_range(&mut self, at: u32, first: u64, tokens: u64) -> Result<Cleared> {
        let (first, end, tail) = self.chunks_of(at, first, tokens)?;
        let slots = self.let_go_range(at, first..end, tail)?;
        let table = self.spaces[self.session(at)?.space as usize].table;
        let cleared = self.take_away(table, &slots, Cleared::default());
        self.settle();
        Ok(cleared)
    }

    /// Takes chunks away, those that continue others before them.
    pub(super) fn take_away(&mut self, table: u32, slots: &[Slot], before: Cleared) -> Cleared {
        self.take_all(table, slots, before, StoreState::drop_remote)
    }

    /// The same where they leave for others: the remote keeps what it has.
    pub(super) fn send_all_away(&mut self, table: u32, slots: &[Slot]) -> Cleared {
        self.take_all(table, slots, Cleared::default(), StoreState::forget_remote)
    }

    fn take_all(
        &mut self,
        table: u32,
        slots: &[Slot],
        before: Cleared,
        remote: fn(&mut StoreState, At),
    ) -> Cleared {
        let mut cleared = before;
        let stopped = self.stop_on_the_way_down(table, slots);
        for &slot in slots {
            match self.take_one_away(At { table, slot }, remote) {
                Fate::Nothing => {}
                Fate::Gone => cleared.gone += 1,
                Fate::Held => cleared.held += 1,
                Fate::Moving => cleared.moving += 1,
            }
        }
        for at in stopped {
            let row = self.tables[table as usize].chunks.chunk(at.slot);
            if row.is_some_and(|row| row.cells()[Tier::Host as usize] > 0) {
                self.enter_cache(at, Tier::Host, Part::All);
            }
        }
        cleared
    }

    /// Chunks that the store alone holds, for their turn to be written, need not be if
    /// they will go.
    fn stop_on_the_way_down(&mut self, table: u32, slots: &[Slot]) -> BTreeSet<At> {
        let mut own = BTreeSet::new();
        // How many of those that continue a chunk go.
        let mut behind: BTreeMap<Slot, u32> = BTreeMap::new();
        let rows = &self.tables[table as usize];
        for &slot in slots {
            let Some(row) = rows.chunks.chunk(slot) else { continue };
            let is_queued = rows.has(slot, note::QUEUED);
            let is_free = row.refs() == u32::from(is_queued)
                && row.pin().is_none()
                // A put that goes on from here may wait for it, and hears of its end alone.
                && !self.chunk_waits.contains_key(&At { table, slot });
            let holes = self.space(row.namespace()).is_some_and(|space| space.holes);
            let is_last = row.children() == behind.get(&slot).copied().unwrap_or(0);
            if !is_free || row.is_moving() || !(is_last || holes) {
                continue;
            }
            if let Some(parent) = rows.chunks.parent(slot) {
                *behind.entry(parent).or_default() += 1;
            }
            if is_queued {
                own.insert(At { table, slot });
            }
        }
        if own.is_empty() {
            return own;
        }
        self.writebacks.retain(|at| !own.contains(at));
        for &at in &own {
            let rows = &mut self.tables[table as usize];
            rows.clear(at.slot, note::QUEUED | note::FORCED);
            if let Err(error) = rows.chunks.release(at.slot) {
                log::error!("a chunk that waited to be written was not held: {error}");
            }
            self.stop_leaving(at);
        }
        own
    }

    fn take_one_away(&mut self, at: At, remote: fn(&mut StoreState, At)) -> Fate {
        let rows = &self.tables[at.table as usize];
        // One without cells may have gone with those behind it.
        let Some(row) = rows.chunks.chunk(at.slot) else { return Fate::Nothing };
        let on_its_way = note::QUEUED | note::FORCED | note::LEAVES;
        if row.is_moving() || rows.has(at.slot, on_its_way) {
            return Fate::Moving;
        }
        if row.is_blocked() {
            return Fate::Held;
        }
        let fate = if row.cells_somewhere() == 0 { Fate::Nothing } else { Fate::Gone };
        remote(self, at);
        self.drop_where(at, Tier::Host as usize, |_, _| true);
        self.drop_where(at, Tier::Disk as usize, |_, _| true);
        self.tidy(at.table, at.slot);
        fate
    }

    fn say_cleared(&mut self, space: u32) {
        let Some(key) = self.space(space).map(|space| space.key.0) else { return };
        self.events.add(Event {
            at_ns: self.now_ns,
            kind: Kind::Cleared as u32,
            parent: key,
            namespace: key,
            ..Event::default()
        });
    }

    /// Asks that what has left so far stays away when the store is opened again; the
    /// turn to wait for. The cells are in the log still: a checkpoint says that they
    /// do not count.
    pub fn ask_to_last(&mut self) -> u64 {
        if self.disk.is_none() {
            return 0;
        }
        self.turns.asked += 1;
        self.upkeep.sweep_soon();
        self.ask_for_checkpoint();
        self.turns.asked
    }

    /// The same for a namespace that was cleared. Where nothing left that an earlier call did
    /// not wait for to the end, its turn is waited for.
    pub fn ask_to_last_cleared(&mut self, clearing: &mut Clearing) -> u64 {
        let gone = clearing.cleared.gone;
        let space = self.spaces.get_mut(clearing.space as usize);
        let Some(space) = space.filter(|space| space.serial == clearing.serial) else {
            return self.ask_to_last();
        };
        let before = std::mem::take(&mut space.unsure);
        clearing.cleared.gone += before.gone;
        let failed = matches!(self.lasts(before.turn), Some(Err(_)));
        let turn = match gone == 0 && before.turn > 0 && !failed {
            true => before.turn,
            false => self.ask_to_last(),
        };
        if let Some(space) = self.spaces.get_mut(clearing.space as usize) {
            space.unsure = Unsure { turn, gone: clearing.cleared.gone };
        }
        turn
    }

    /// Its caller knows that what was cleared stays away, or that this cannot be had.
    pub fn end_clear(&mut self, clearing: &Clearing) {
        let space = self.spaces.get_mut(clearing.space as usize);
        if let Some(space) = space.filter(|space| space.serial == clearing.serial) {
            space.unsure = Unsure::default();
        }
    }

    /// Whether what had left when a turn was given stays away; `None` = that is not
    /// known yet.
    pub fn lasts(&self, turn: u64) -> Option<Result<()>> {
        if turn <= self.turns.lasting {
            return Some(Ok(()));
        }
        let failed = self.turns.failed.as_ref().filter(|(until, _)| turn <= *until);
        failed.map(|(_, error)| Err(error.clone()))
    }

    /// Whether more is known of turns than when this was last asked.
    pub fn turn_has_come(&mut self) -> bool {
        std::mem::take(&mut self.turns.news)
    }

    /// A checkpoint begins: what has left by now is not in it.
    pub(super) fn turn_begins(&mut self, work: &Work) {
        if work.is_checkpoint() {
            self.turns.begun = self.turns.asked;
        }
    }

    /// A checkpoint is written, or not.
    pub(super) fn turn_ends(&mut self, work: &Work, outcome: &Result<()>) {
        let begun = self.turns.begun;
        if !work.is_checkpoint() || begun <= self.turns.lasting {
            return;
        }
        self.turns.news = true;
        match outcome {
            Ok(()) => (self.turns.lasting, self.turns.failed) = (begun, None),
            Err(error) => self.turns.failed = Some((begun, error.clone())),
        }
    }
}
