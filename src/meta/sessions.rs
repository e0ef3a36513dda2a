//! Who uses objects: a sequence, its tenant and class, and what the engine said
//! of its future.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::meta::fairness::Fairness;
use crate::meta::index::{Index, NONE, Slot};

/// Most sessions that are known at once.
pub const MAX_SESSIONS: usize = 1 << 20;

/// Sessions without objects that are always remembered.
const LEAST_IDLE: usize = 1 << 14;

/// Sessions without objects that are remembered for each one with objects.
const IDLE_EACH: usize = 3;

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
    /// Neighbours among those without objects: who was left earlier, and later.
    earlier: Slot,
    later: Slot,
}

// SAFETY: integers only.
unsafe impl Zeroable for Session {}

/// The table of sessions. Its size follows the sessions with objects, not the sessions that
/// ever were: it remembers [`IDLE_EACH`] sessions without objects for each with objects, and
/// [`LEAST_IDLE`] in any case. A new session then takes the row of the session without objects
/// that asked least recently. When all rows have objects, a new session gets no row.
pub struct Sessions {
    rows: Zeroed<Session>,
    index: Index,
    fresh: usize,
    /// The ends of the list of those without objects, and how many they are.
    earliest: Slot,
    latest: Slot,
    idle: usize,
    /// How those fared whose rows went to others.
    gone: Fairness,
    /// Who makes the call under way; NONE without a session, or one without a row.
    pub asking: Slot,
}

impl Sessions {
    /// A table for up to `limit` sessions.
    pub fn new(limit: usize) -> Result<Sessions> {
        Ok(Sessions {
            rows: Zeroed::new(limit)?,
            index: Index::new(limit)?,
            fresh: 0,
            earliest: NONE,
            latest: NONE,
            idle: 0,
            gone: Fairness::default(),
            asking: NONE,
        })
    }

    /// Bytes that the table has used so far.
    pub fn used_bytes(&self) -> u64 {
        self.rows.front_bytes(self.fresh) + self.index.bytes()
    }

    /// The most sessions that were known at once.
    pub fn most(&self) -> usize {
        self.fresh
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
            if self.rows[slot as usize].objects == 0 {
                self.unlink(slot);
                self.link(slot);
            }
            return slot;
        }
        let full = self.fresh == self.rows.len();
        let slot = if !full && !self.remembers_enough() {
            self.fresh += 1;
            (self.fresh - 1) as Slot
        } else if self.earliest != NONE {
            let slot = self.earliest;
            self.unlink(slot);
            let Session { id: before, hit_tokens, wanted_tokens, .. } = self.rows[slot as usize];
            self.gone.add(hit_tokens, wanted_tokens);
            self.index.remove(before, |s| s == slot);
            slot
        } else {
            return NONE;
        };
        self.rows[slot as usize] = Session { id, priority: 1, live: 1, ..Session::default() };
        let fits = self.index.insert(id, slot);
        assert!(fits, "as many ids as rows");
        self.link(slot);
        slot
    }

    /// Whether no more sessions without objects may be remembered.
    fn remembers_enough(&self) -> bool {
        self.idle >= LEAST_IDLE.max(IDLE_EACH * (self.fresh - self.idle))
    }

    /// Adds a session to those without objects, as the latest.
    fn link(&mut self, slot: Slot) {
        self.idle += 1;
        let earlier = std::mem::replace(&mut self.latest, slot);
        match earlier {
            NONE => self.earliest = slot,
            earlier => self.rows[earlier as usize].later = slot,
        }
        let row = &mut self.rows[slot as usize];
        (row.earlier, row.later) = (earlier, NONE);
    }

    fn unlink(&mut self, slot: Slot) {
        self.idle -= 1;
        let Session { earlier, later, .. } = self.rows[slot as usize];
        match earlier {
            NONE => self.earliest = later,
            earlier => self.rows[earlier as usize].later = later,
        }
        match later {
            NONE => self.latest = earlier,
            later => self.rows[later as usize].earlier = earlier,
        }
    }

    /// One object more is a session's.
    #[inline]
    pub fn join(&mut self, slot: Slot) {
        if let Some(row) = self.rows.get_mut(slot as usize) {
            row.objects += 1;
            if row.objects == 1 {
                self.unlink(slot);
            }
        }
    }

    /// One object less is a session's.
    #[inline]
    pub fn leave(&mut self, slot: Slot) {
        if let Some(row) = self.rows.get_mut(slot as usize) {
            row.objects -= 1;
            if row.objects == 0 {
                self.link(slot);
            }
        }
    }

    /// Notes what another table knows of a session: all but its objects, which are
    /// others here.
    pub fn learn(&mut self, slot: Slot, from: &Session) {
        if let Some(row) = self.of_mut(slot) {
            let Session { id, objects, live, earlier, later, .. } = *row;
            *row = Session { id, objects, live, earlier, later, ..*from };
        }
    }

    /// How evenly all have fared so far: those known, and those whose rows went. One
    /// that comes back after that counts as another.
    pub fn fairness(&self) -> Fairness {
        let mut all = self.gone;
        self.known().for_each(|(_, row)| all.add(row.hit_tokens, row.wanted_tokens));
        all
    }

    /// Those known.
    pub fn known(&self) -> impl Iterator<Item = (Slot, &Session)> {
        let row = |(at, row): (usize, _)| (at as Slot, row);
        self.rows.iter().take(self.fresh).enumerate().filter(|(_, row)| row.live != 0).map(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_whose_rows_went_count_in_fairness() {
        let mut sessions = Sessions::new(4).expect("small");
        let mut all = Fairness::default();
        for id in 0..1000u64 {
            let slot = sessions.get_or_add(id);
            let row = sessions.of_mut(slot).expect("a row");
            (row.hit_tokens, row.wanted_tokens) = (id % 7, 7 * (id % 3));
            all.add(id % 7, 7 * (id % 3));
        }
        let (index, exact) = (sessions.fairness().index(), all.index());
        assert!((index - exact).abs() < 1e-9 && exact < 0.9, "{index} for {exact}");
    }

    #[test]
    fn what_another_table_knows_is_noted_without_its_objects() {
        let mut sessions = Sessions::new(4).expect("small");
        let (a, b) = (sessions.get_or_add(1), sessions.get_or_add(2));
        sessions.join(a);
        let other = Session { id: 9, tenant: 5, priority: 2, objects: 77, ..Session::default() };
        sessions.learn(a, &other);
        sessions.learn(NONE, &other);
        let row = *sessions.of(a).expect("a row");
        assert_eq!((row.id, row.tenant, row.priority, row.objects), (1, 5, 2, 1));
        // The list of those without objects is whole: 2 leaves first, then 1.
        sessions.leave(a);
        assert_eq!((sessions.earliest, sessions.latest), (b, a));
        assert_eq!(sessions.known().count(), 2);
    }

    #[test]
    fn a_table_is_as_large_as_what_has_objects() {
        const WITH: usize = 10_000;
        let mut sessions = Sessions::new(MAX_SESSIONS).expect("virtual memory");
        let mut stored = std::collections::VecDeque::new();
        for id in 0..500_000u64 {
            // One that keeps asking stays, without an object.
            let asks = sessions.get_or_add(u64::MAX);
            sessions.of_mut(asks).expect("a row").turns += 1;
            let slot = sessions.get_or_add(id);
            assert_ne!(slot, NONE, "{id}");
            sessions.join(slot);
            stored.push_back(slot);
            if stored.len() > WITH {
                sessions.leave(stored.pop_front().expect("more than none"));
            }
            let idle = sessions.most() - stored.len();
            assert!(idle <= LEAST_IDLE.max(IDLE_EACH * WITH) + 1, "{idle} at {id}");
        }
        let asks = sessions.find(u64::MAX).expect("it asked in every turn");
        assert_eq!(sessions.of(asks).expect("a row").turns, 500_000);
        // All leave: those that came last are remembered.
        stored.into_iter().for_each(|slot| sessions.leave(slot));
        assert!(sessions.find(499_999).is_some() && sessions.find(0).is_none());
        assert_eq!(sessions.known().count(), sessions.most());
    }

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
        // One object a session, as many sessions as rows: none goes unknown.
        let mut sessions = Sessions::new(100).expect("small");
        for id in 0..10_000u64 {
            let slot = sessions.get_or_add(id);
            assert_ne!(slot, NONE, "{id}");
            sessions.join(slot);
            if id >= 99 {
                // Not in the order of coming: 7 and 100 have no common divisor.
                let leaves = id - 99 + 7 * id % 50;
                let row = sessions
                    .find(leaves)
                    .filter(|&s| sessions.of(s).is_some_and(|s| s.objects > 0));
                sessions.leave(row.unwrap_or(slot));
            }
        }
    }
}
