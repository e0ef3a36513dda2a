//! Pins: chunks that stay although nobody uses them, as long as the budget allows. A pin
//! holds less the less time it has left: where nothing else may leave, that of the lowest
//! class that ends first is given up, and one without an end is the last of its class.

use std::cmp::Reverse;

use crate::base::status::Result;
use crate::meta::chunks::{Chunks, Pin};
use crate::store::state::{At, StoreState};

/// How firmly a pin holds: its class, when it ends, and where the chunk stands. Of those
/// that are alike the last one of a path goes first: without it the others are of use.
pub(super) type Hold = (u8, u64, Reverse<u32>, At);

/// The pin of a chunk.
fn hold_of(chunks: &Chunks, at: At) -> Option<Hold> {
    let row = chunks.chunk(at.slot)?;
    row.pin().map(|pin| (pin.priority, pin.until_ns, Reverse(row.position()), at))
}

impl StoreState {
    /// Keeps the chunks of a range of tokens, as long as the budget allows, until a
    /// time. Those that are to come are kept, too, if the table has room for all of them.
    pub fn pin(&mut self, at: u32, first: u64, tokens: u64, pin: Pin) -> Result<()> {
        let slots = self.rows_if_free(at, first, tokens)?;
        let table = self.spaces[self.session(at)?.space as usize].table;
        for slot in slots {
            let chunks = &mut self.tables[table as usize].chunks;
            let place = At { table, slot };
            let old = hold_of(chunks, place);
            chunks.pin(slot, pin)?;
            let new = hold_of(chunks, place);
            if let Some(old) = old {
                self.pins.remove(&old);
                self.ends.remove(&(old.1, old.0, place));
            }
            if let Some(new) = new {
                self.pins.insert(new);
                self.ends.insert((new.1, new.0, place));
            }
            self.note_held(table, slot);
        }
        Ok(())
    }

    /// Takes the pins of the chunks of a range of tokens away, whoever has set them.
    pub fn unpin_range(&mut self, at: u32, first: u64, tokens: u64) -> Result<()> {
        for At { table, slot } in self.known_chunks(at, first, tokens)? {
            let place = At { table, slot };
            if let Some(hold) = hold_of(&self.tables[table as usize].chunks, place) {
                self.pins.remove(&hold);
                self.ends.remove(&(hold.1, hold.0, place));
                self.unpin(place);
            }
        }
        self.settle();
        Ok(())
    }

    /// Ends pins whose time has come.
    pub(super) fn end_pins(&mut self) {
        while let Some(&(until, _, at)) = self.ends.first() {
            if until > self.now_ns {
                return;
            }
            self.ends.pop_first();
            if let Some(hold) = hold_of(&self.tables[at.table as usize].chunks, at) {
                self.pins.remove(&hold);
                self.unpin(at);
            }
        }
    }

    /// Gives up the weakest pin, when nothing else may leave: of the lowest class that which
    /// ends first, since a pin holds less the less time it has left. One without an end is
    /// the last of its class.
    pub(super) fn drop_weakest_pin(&mut self) -> bool {
        let Some((priority, until, _, at)) = self.pins.pop_first() else { return false };
        self.ends.remove(&(until, priority, at));
        self.unpin(at);
        true
    }

    fn unpin(&mut self, at: At) {
        if let Err(error) = self.tables[at.table as usize].chunks.unpin(at.slot) {
            log::error!("a pinned chunk is gone: {error}");
        }
        self.reclaim_targets.released();
        self.note_held(at.table, at.slot);
        self.tidy(at.table, at.slot);
    }
}
