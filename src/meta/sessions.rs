//! Who uses objects: a sequence, its tenant and class, and what the engine said
//! of its future.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::meta::index::{Index, NONE, Slot};

/// Most sessions that are known at once.
pub const MAX_SESSIONS: usize = 1 << 20;

/// Why a sequence stopped producing tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Stop {
    /// Not said.
    #[default]
    Unknown = 0,
    /// It waits for a tool and goes on soon.
    ToolUse = 1,
    /// The turn ended; a person reads it.
    EndTurn = 2,
    /// The length limit was reached.
    Length = 3,
    /// It was cancelled.
    Cancelled = 4,
}

impl Stop {
    /// Every reason, in the order of the numbers.
    pub const ALL: [Stop; 5] =
        [Stop::Unknown, Stop::ToolUse, Stop::EndTurn, Stop::Length, Stop::Cancelled];

    /// The reason with a number.
    pub fn from_code(code: u64) -> Option<Stop> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }
}

/// What is known of a session.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Session {
    /// The caller's number for it.
    pub id: u64,
    /// Tokens found again, over all its requests.
    pub hit_tokens: u64,
    /// Tokens that an unbounded cache would have found.
    pub wanted_tokens: u64,
    /// When it was active last.
    pub active_ns: i64,
    /// When it is expected to be active again; 0 = unknown.
    pub next_use_ns: i64,
    /// Tokens so far.
    pub length: u32,
    /// Tokens it can have; 0 = unknown.
    pub max_length: u32,
    /// Resident objects that it used last.
    pub objects: u32,
    /// Requests so far.
    pub turns: u32,
    /// Whose it is.
    pub tenant: u32,
    /// Its class: 0 leaves first.
    pub priority: u8,
    /// Why it stopped last.
    pub stop: u8,
    /// How sure the engine is of `next_use_ns`, in 1/255.
    pub confidence: u8,
    live: u8,
}

// SAFETY: integers only.
unsafe impl Zeroable for Session {}

/// The table of sessions. When it is full, one without objects makes room; when
/// there is none, a newcomer goes unknown.
pub struct Sessions {
    rows: Zeroed<Session>,
    index: Index,
    hand: usize,
}

/// How far the search for a session without objects goes.
const PROBES: usize = 64;

impl Sessions {
    /// A table for up to `limit` sessions.
    pub fn new(limit: usize) -> Result<Sessions> {
        Ok(Sessions { rows: Zeroed::new(limit)?, index: Index::new(limit)?, hand: 0 })
    }

    /// The slot of a session.
    #[inline]
    pub fn find(&self, id: u64) -> Option<Slot> {
        self.index.find(id, |slot| self.rows[slot as usize].id == id)
    }

    /// A session's row.
    #[inline]
    pub fn of(&self, slot: Slot) -> Option<&Session> {
        self.rows.get(slot as usize)
    }

    /// A session's row, to be changed.
    #[inline]
    pub fn of_mut(&mut self, slot: Slot) -> Option<&mut Session> {
        self.rows.get_mut(slot as usize)
    }

    /// The slot of a session, known from now on if it can be; else NONE.
    pub fn get_or_add(&mut self, id: u64) -> Slot {
        if let Some(slot) = self.find(id) {
            return slot;
        }
        for _ in 0..PROBES.min(self.rows.len()) {
            let at = self.hand;
            self.hand = if at + 1 == self.rows.len() { 0 } else { at + 1 };
            let row = self.rows[at];
            if row.objects > 0 {
                continue;
            }
            if row.live != 0 {
                self.index.remove(row.id, |slot| slot as usize == at);
            }
            self.rows[at] = Session { id, priority: 1, live: 1, ..Session::default() };
            let fits = self.index.insert(id, at as Slot);
            assert!(fits, "as many ids as rows");
            return at as Slot;
        }
        NONE
    }

    /// One object more is a session's.
    #[inline]
    pub fn join(&mut self, slot: Slot) {
        if let Some(row) = self.rows.get_mut(slot as usize) {
            row.objects += 1;
        }
    }

    /// One object less is a session's.
    #[inline]
    pub fn leave(&mut self, slot: Slot) {
        if let Some(row) = self.rows.get_mut(slot as usize) {
            row.objects -= 1;
        }
    }

    /// Those known.
    pub fn known(&self) -> impl Iterator<Item = (Slot, &Session)> {
        let row = |(at, row): (usize, _)| (at as Slot, row);
        self.rows.iter().enumerate().filter(|(_, row)| row.live != 0).map(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_table_gives_the_row_of_one_without_objects() {
        let mut sessions = Sessions::new(2).expect("small");
        let (a, b) = (sessions.get_or_add(100), sessions.get_or_add(200));
        sessions.join(a);
        sessions.join(b);
        assert_eq!(sessions.get_or_add(300), NONE);
        sessions.leave(a);
        assert_eq!(sessions.get_or_add(300), a);
        assert_eq!((sessions.find(100), sessions.find(300)), (None, Some(a)));
        assert_eq!(sessions.known().count(), 2);
        sessions.leave(NONE);
    }
}
