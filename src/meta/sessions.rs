//! Sessions that use objects: tenant, priority, statistics, and the engine's hints about their
//! future.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::meta::fairness::Fairness;
use crate::meta::index::{Index, NONE, Slot};

/// Most sessions in a table.
pub const MAX_SESSIONS: usize = 1 << 20;

/// Idle sessions (without objects) that are always remembered.
const LEAST_IDLE: usize = 1 << 14;

/// Idle sessions that are remembered for each session with objects.
const IDLE_EACH: usize = 3;

/// Why a sequence stopped producing tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Stop {
    /// Unknown.
    #[default]
    Unknown = 0,
    /// It waits for a tool and continues soon.
    ToolUse = 1,
    /// The turn ended; a person reads it.
    EndTurn = 2,
    /// The length limit was reached.
    Length = 3,
    /// It was cancelled.
    Cancelled = 4,
}

impl Stop {
    /// Every reason, by code.
    pub const ALL: [Stop; 5] =
        [Stop::Unknown, Stop::ToolUse, Stop::EndTurn, Stop::Length, Stop::Cancelled];

    /// The reason of a code.
    pub fn from_code(code: u64) -> Option<Stop> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }
}

/// A session's row.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Session {
    /// The caller's id.
    pub id: u64,
    /// Tokens found in the cache, over all its requests.
    pub hit_tokens: u64,
    /// Tokens that an unbounded cache would have found.
    pub requested_tokens: u64,
    /// Time of the last activity.
    pub active_ns: i64,
    /// Expected time of the next activity; 0 = unknown.
    pub next_use_ns: i64,
    /// Tokens so far.
    pub length: u32,
    /// Most tokens it can have; 0 = unknown.
    pub max_length: u32,
    /// Resident objects that it used last.
    pub objects: u32,
    /// Requests so far.
    pub turns: u32,
    /// Its tenant.
    pub tenant: u32,
    /// Its priority: 0 is evicted first.
    pub priority: u8,
    /// Why it stopped last; a [`Stop`].
    pub stop: u8,
    /// Confidence of `next_use_ns`, in 1/255.
    pub confidence: u8,
    live: u8,
    /// Neighbours in the list of idle sessions.
    earlier: Slot,
    later: Slot,
}

// SAFETY: integers only.
unsafe impl Zeroable for Session {}

/// The table of sessions. Its size follows the sessions with objects, not all sessions ever seen.
/// It remembers [`IDLE_EACH`] idle sessions for each session with objects, and [`LEAST_IDLE`] in
/// any case. A new session then takes the row of the idle session with the oldest request. When all
/// rows have objects, a new session gets no row.
pub struct Sessions {
    rows: Zeroed<Session>,
    index: Index,
    fresh: usize,
    /// Ends and length of the list of idle sessions.
    earliest: Slot,
    latest: Slot,
    idle: usize,
    /// Fairness of sessions whose rows were reused.
    removed: Fairness,
    /// The session of the current call; NONE without a session or row.
    pub current: Slot,
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
            removed: Fairness::default(),
            current: NONE,
        })
    }

    /// Bytes in use.
    pub fn used_bytes(&self) -> u64 {
        self.rows.front_bytes(self.fresh) + self.index.bytes()
    }

    /// The most sessions at any time.
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

    /// A session's row, mutable.
    #[inline]
    pub fn of_mut(&mut self, slot: Slot) -> Option<&mut Session> {
        self.rows.get_mut(slot as usize)
    }

    /// The slot of a session, which is added if possible; else NONE.
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
            let Session { id: before, hit_tokens, requested_tokens, .. } = self.rows[slot as usize];
            self.removed.add(hit_tokens, requested_tokens);
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

    /// Whether the limit of idle sessions is reached.
    fn remembers_enough(&self) -> bool {
        self.idle >= LEAST_IDLE.max(IDLE_EACH * (self.fresh - self.idle))
    }

    /// Appends a session to the list of idle sessions.
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

    /// Counts one more object of a session.
    #[inline]
    pub fn join(&mut self, slot: Slot) {
        if let Some(row) = self.rows.get_mut(slot as usize) {
            row.objects += 1;
            if row.objects == 1 {
                self.unlink(slot);
            }
        }
    }

    /// Counts one object less of a session.
    #[inline]
    pub fn leave(&mut self, slot: Slot) {
        if let Some(row) = self.rows.get_mut(slot as usize) {
            row.objects -= 1;
            if row.objects == 0 {
                self.link(slot);
            }
        }
    }

    /// Copies another table's knowledge of a session, except its objects.
    pub fn learn(&mut self, slot: Slot, from: &Session) {
        if let Some(row) = self.of_mut(slot) {
            let Session { id, objects, live, earlier, later, .. } = *row;
            *row = Session { id, objects, live, earlier, later, ..*from };
        }
    }

    /// Fairness over known sessions and those whose rows were reused. A session that returns after
    /// that counts as a new one.
    pub fn fairness(&self) -> Fairness {
        let mut all = self.removed;
        self.known().for_each(|(_, row)| all.add(row.hit_tokens, row.requested_tokens));
        all
    }

    /// All known sessions.
    pub fn known(&self) -> impl Iterator<Item = (Slot, &Session)> {
        let row = |(at, row): (usize, _)| (at as Slot, row);
        self.rows.iter().take(self.fresh).enumerate().filter(|(_, row)| row.live != 0).map(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fairness_counts_sessions_whose_rows_were_reused() {
        let mut sessions = Sessions::new(4).expect("small");
        let mut all = Fairness::default();
        for id in 0..1000u64 {
            let slot = sessions.get_or_add(id);
            let row = sessions.of_mut(slot).expect("a row");
            (row.hit_tokens, row.requested_tokens) = (id % 7, 7 * (id % 3));
            all.add(id % 7, 7 * (id % 3));
        }
        let (index, exact) = (sessions.fairness().index(), all.index());
        assert!((index - exact).abs() < 1e-9 && exact < 0.9, "{index} for {exact}");
    }

    #[test]
    fn learn_copies_everything_but_the_objects() {
        let mut sessions = Sessions::new(4).expect("small");
        let (a, b) = (sessions.get_or_add(1), sessions.get_or_add(2));
        sessions.join(a);
        let other = Session { id: 9, tenant: 5, priority: 2, objects: 77, ..Session::default() };
        sessions.learn(a, &other);
        sessions.learn(NONE, &other);
        let row = *sessions.of(a).expect("a row");
        assert_eq!((row.id, row.tenant, row.priority, row.objects), (1, 5, 2, 1));
        // The list of idle sessions is intact: 2 is reused first, then 1.
        sessions.leave(a);
        assert_eq!((sessions.earliest, sessions.latest), (b, a));
        assert_eq!(sessions.known().count(), 2);
    }

    #[test]
    fn the_table_size_follows_sessions_with_objects() {
        const WITH: usize = 10_000;
        let mut sessions = Sessions::new(MAX_SESSIONS).expect("virtual memory");
        let mut stored = std::collections::VecDeque::new();
        for id in 0..500_000u64 {
            // A session with regular requests stays, though it has no object.
            let querying = sessions.get_or_add(u64::MAX);
            sessions.of_mut(querying).expect("a row").turns += 1;
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
        let querying = sessions.find(u64::MAX).expect("it made a request in every turn");
        assert_eq!(sessions.of(querying).expect("a row").turns, 500_000);
        // All become idle: the latest ones are remembered.
        stored.into_iter().for_each(|slot| sessions.leave(slot));
        assert!(sessions.find(499_999).is_some() && sessions.find(0).is_none());
        assert_eq!(sessions.known().count(), sessions.most());
    }

    #[test]
    fn a_full_table_reuses_rows_of_idle_sessions() {
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
        // One object a session, as many sessions as rows: every session gets a row.
        let mut sessions = Sessions::new(100).expect("small");
        for id in 0..10_000u64 {
            let slot = sessions.get_or_add(id);
            assert_ne!(slot, NONE, "{id}");
            sessions.join(slot);
            if id >= 99 {
                // Sessions end in another order than they began: 7 and 100 are coprime.
                let leaves = id - 99 + 7 * id % 50;
                let row = sessions
                    .find(leaves)
                    .filter(|&s| sessions.of(s).is_some_and(|s| s.objects > 0));
                sessions.leave(row.unwrap_or(slot));
            }
        }
    }
}
