//! Moves that wait for the engine's word: nothing of them is begun before it is given.
//! They hold their chunks meanwhile, and no memory.

use std::collections::BTreeMap;

use crate::base::status::{Result, Status};
use crate::kv::core::moves::{Deed, Level};
use crate::kv::core::{Core, Rectangle};

/// Moves that wait, by ticket: numbers of moves are used again, tickets are not.
#[derive(Default)]
pub(super) struct Waits {
    tickets: u64,
    moves: BTreeMap<u64, u32>,
}

impl Core {
    /// As [`Core::submit_rectangle`], but that nothing begins before
    /// [`Core::begin_waiting`]; the move's number, and the ticket for that.
    pub fn submit_waiting(
        &mut self,
        at: u32,
        deed: Deed,
        level: Level,
        lane: usize,
        rectangle: Rectangle,
    ) -> Result<(u32, u64)> {
        let ticket = self.next_ticket();
        let number = self.begin_rectangle(at, (deed, level, lane), rectangle, Some(ticket))?;
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
