//! Moves that wait for the engine's word: nothing of them is begun before it is given.
//! They hold their chunks meanwhile, and no memory.

use std::collections::BTreeMap;

use crate::base::status::{Result, Status};
use crate::store::state::transfer::{Level, TransferKind};
use crate::store::state::{CellRange, StoreState};

/// Moves that wait, by ticket: numbers of moves are used again, tickets are not.
#[derive(Default)]
pub(super) struct Waits {
    tickets: u64,
    moves: BTreeMap<u64, u32>,
}

impl StoreState {
    /// As [`StoreState::submit_cell_range`], but that nothing begins before
    /// [`StoreState::begin_waiting`]; the move's number, and the ticket for that.
    pub fn submit_waiting(
        &mut self,
        at: u32,
        kind: TransferKind,
        level: Level,
        lane: usize,
        cell_range: CellRange,
    ) -> Result<(u32, u64)> {
        let ticket = self.next_ticket();
        let number = self.begin_cell_range(at, (kind, level, lane), cell_range, Some(ticket))?;
        Ok((number, ticket))
    }

    pub(super) fn next_ticket(&mut self) -> u64 {
        self.waits.tickets += 1;
        self.waits.tickets
    }

    /// A move waits from now on.
    pub(super) fn hold_back(&mut self, number: u32, ticket: u64) {
        self.waits.moves.insert(ticket, number);
    }

    /// A move waits no more, or has ended.
    pub(super) fn stop_waiting(&mut self, ticket: Option<u64>) {
        if let Some(ticket) = ticket {
            self.waits.moves.remove(&ticket);
        }
    }

    /// The word is given: the move begins. One that has ended meanwhile does not.
    pub fn begin_waiting(&mut self, ticket: u64) {
        if let Some(number) = self.waits.moves.remove(&ticket) {
            self.moves[number].began_ns = self.now_ns;
            self.feed_later(number);
            self.settle();
        }
    }

    /// The word will never be given: the move ends with this status.
    pub fn give_up_waiting(&mut self, ticket: u64, status: Status) {
        if let Some(&number) = self.waits.moves.get(&ticket) {
            self.cancel(number, status);
        }
    }

    /// Whether the move of a ticket waits still.
    pub fn is_waiting(&self, ticket: u64) -> bool {
        self.waits.moves.contains_key(&ticket)
    }

    /// Moves that wait.
    pub fn waiting_moves(&self) -> usize {
        self.waits.moves.len()
    }
}
