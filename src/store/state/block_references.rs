//! Holds: blocks that a session keeps from leaving, by their names, until it lets them go. A
//! hold is a reference as those of paths and moves are, so what is held may go from one tier
//! to another, and is in some all the time.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::status::Result;
use crate::fail;
use crate::format::keys::Key;
use crate::meta::chunks::WHOLE;
use crate::meta::index::{NONE, Slot};
use crate::store::state::StoreState;
use crate::store::state::blocks::MAX_BLOCKS;

/// Most holds of a session; a block that is held twice has two.
pub const MAX_HOLDS: usize = 1 << 20;

/// What a session holds by name.
#[derive(Default)]
pub(super) struct Holds {
    /// How often each. All of these are one reference.
    times: BTreeMap<Slot, u32>,
    /// All together.
    count: usize,
}

impl Holds {
    /// The blocks.
    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.times.keys().copied()
    }

    fn times(&self, slot: Slot) -> u32 {
        self.times.get(&slot).copied().unwrap_or(0)
    }
}

impl StoreState {
    /// Holds those of some blocks that are there, once more each; `found` says which, as
    /// [`StoreState::exists`] does. Nothing changes on failure.
    pub fn hold_names(&mut self, at: u32, keys: &[Key], found: &mut [u8]) -> Result<()> {
        let (table, mut slots) = self.named(at, keys)?;
        let chunks = &mut self.tables[table as usize].chunks;
        for (slot, found) in slots.iter_mut().zip(found) {
            *found = chunks.tiers_believed(*slot);
            if *found & WHOLE == 0 {
                (*slot, *found) = (NONE, 0);
            }
        }
        slots.retain(|&slot| slot != NONE);
        let holds = &self.sessions[at].holds;
        if holds.count + slots.len() > MAX_HOLDS {
            let more = slots.len();
            fail!(Limit, "{more} holds and {} before; a session has {MAX_HOLDS}", holds.count);
        }
        let new: BTreeSet<Slot> =
            slots.iter().copied().filter(|&slot| holds.times(slot) == 0).collect();
        for (held, &slot) in new.iter().enumerate() {
            if let Err(error) = chunks.retain(slot) {
                new.iter().take(held).for_each(|&slot| self.let_go(table, slot));
                return Err(error);
            }
        }
        new.iter().for_each(|&slot| self.note_held(table, slot));
        let holds = &mut self.sessions[at].holds;
        holds.count += slots.len();
        slots.iter().for_each(|&slot| *holds.times.entry(slot).or_default() += 1);
        Ok(())
    }

    /// Takes one hold of each back: INVALID where the session has none, and then nothing
    /// changes. Who lets go what others in his program hold would let it leave under them.
    pub fn release_names(&mut self, at: u32, keys: &[Key]) -> Result<()> {
        let (table, slots) = self.named(at, keys)?;
        let mut less: BTreeMap<Slot, u32> = BTreeMap::new();
        for (i, &slot) in slots.iter().enumerate() {
            let (less, held) = (less.entry(slot).or_default(), self.sessions[at].holds.times(slot));
            *less += 1;
            if *less > held {
                fail!(Invalid, "block {i} is held {held} times by this session, not {less}");
            }
        }
        for (slot, less) in less {
            let holds = &mut self.sessions[at].holds;
            holds.count -= less as usize;
            let left = holds.times(slot) - less;
            if left == 0 {
                holds.times.remove(&slot);
                self.let_go(table, slot);
            } else {
                holds.times.insert(slot, left);
            }
        }
        self.settle();
        Ok(())
    }

    /// Lets all go that a session held by name.
    pub(super) fn end_holds(&mut self, table: u32, holds: Holds) {
        holds.slots().for_each(|slot| self.let_go(table, slot));
    }

    /// The board of a session and the rows of blocks there, NONE for those that have none.
    pub(super) fn named(&self, at: u32, keys: &[Key]) -> Result<(u32, Vec<Slot>)> {
        let space = self.session(at)?.space;
        if keys.len() > MAX_BLOCKS {
            fail!(Limit, "{} blocks; a call has at most {MAX_BLOCKS}", keys.len());
        }
        Ok((self.spaces[space as usize].table, self.find_blocks(space, keys)?))
    }

    /// That what sessions hold by name is there to be held.
    pub(super) fn check_holds(&self) -> Result<()> {
        let mut refs: BTreeMap<(u32, Slot), u32> = BTreeMap::new();
        for (number, session) in self.sessions.iter() {
            let Holds { times, count } = &session.holds;
            let all: usize = times.values().map(|&times| times as usize).sum();
            if all != *count || times.values().any(|&times| times == 0) {
                fail!(State, "session {number} counts {count} holds and has {all}");
            }
            let table = self.spaces[session.space as usize].table;
            for slot in session.path.slots().iter().copied().chain(session.holds.slots()) {
                *refs.entry((table, slot)).or_default() += u32::from(slot != NONE);
            }
        }
        for ((table, slot), refs) in refs.into_iter().filter(|&(_, refs)| refs > 0) {
            let held = self.tables[table as usize].chunks.chunk(slot).map_or(0, |row| row.refs());
            if held < refs {
                fail!(
                    State,
                    "sessions hold chunk {slot} of board {table} {refs} times, not {held}"
                );
            }
        }
        Ok(())
    }
}
