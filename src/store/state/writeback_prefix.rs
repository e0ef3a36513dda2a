//! What goes down takes along what is before it: where holes cannot be computed it is of
//! no use without that when the store is opened again.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::store::state::chunk_table::note;
use crate::store::state::granularity::Part;
use crate::store::state::{At, StoreState, Write};

const HOST: u8 = 1 << Tier::Host as u8;
const DISK: u8 = 1 << Tier::Disk as u8;
const DEVICE: u8 = 1 << Tier::Device as u8;

impl StoreState {
    /// Queues a chunk to be written down, behind those before it that are in memory only.
    /// Those stay where they are, too.
    pub(super) fn queue_down(&mut self, at: At) {
        let rows = &self.tables[at.table as usize];
        if rows.has(at.slot, note::QUEUED) {
            return;
        }
        // Where nothing is written of itself all that goes down was asked for, but what has
        // to make room.
        if self.config.write != Write::Never || rows.has(at.slot, note::FORCED) {
            self.queue_before(at);
        }
        self.queue_one(at);
    }

    fn queue_before(&mut self, at: At) {
        for slot in self.up_before(at).into_iter().rev() {
            // No rule of admission counts: it goes for the sake of another.
            self.tables[at.table as usize].set(slot, note::FORCED);
            self.queue_one(At { slot, ..at });
        }
    }

    /// Queues a chunk alone: one whose turn has come before, with all before it.
    pub(super) fn queue_one(&mut self, at: At) {
        let rows = &mut self.tables[at.table as usize];
        if !rows.has(at.slot, note::QUEUED) {
            rows.set(at.slot, note::QUEUED);
            // Queued chunks stay where they are until their turn.
            if rows.chunks.retain(at.slot).is_ok() {
                self.writebacks.push_back(at);
            } else {
                rows.clear(at.slot, note::QUEUED);
            }
        }
    }

    /// Whether a chunk needs those before it when the store is opened again. A session's own
    /// is of use to nobody then.
    fn needs_all_before(&self, at: At) -> bool {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        row.is_some_and(|row| {
            let space = self.spaces.get(row.namespace() as usize);
            row.owner().is_none() && space.is_some_and(|space| !space.holes)
        })
    }

    /// Chunks before one that have something in memory only, and do not go down yet; the
    /// nearest first. What is noted of them ends the search next time: each chunk is found
    /// once, and its cells that come later go down as well.
    fn up_before(&mut self, at: At) -> Vec<Slot> {
        let mut found = Vec::new();
        if !self.needs_all_before(at) {
            return found;
        }
        let mut next = self.tables[at.table as usize].chunks.parent(at.slot);
        while let Some(slot) = next {
            let rows = &self.tables[at.table as usize];
            let (one, is_known) = (At { slot, ..at }, rows.has(slot, note::BELOW));
            let is_up = !rows.has(slot, note::QUEUED) && self.is_unwritten(one);
            if is_known && !is_up {
                break;
            }
            if is_up {
                found.push(slot);
            }
            let rows = &mut self.tables[at.table as usize];
            rows.set(slot, note::BELOW);
            next = rows.chunks.parent(slot);
        }
        found
    }

    /// Whether a chunk has something that is in memory only, and in no batch.
    fn is_unwritten(&self, at: At) -> bool {
        let marks = self.tables[at.table as usize].chunks.marks(at.slot).unwrap_or_default();
        marks.iter().any(|marks| marks.there() & !DEVICE == HOST && marks.arriving() & DISK == 0)
    }

    fn is_up_only(&self, at: At) -> bool {
        self.only_in_host(at, Part::All) > 0
    }

    /// Whether what continues a chunk is on disk or goes there: what comes of it goes there,
    /// too.
    pub(super) fn is_wanted_below(&self, at: At) -> bool {
        let rows = &self.tables[at.table as usize];
        let is_rejoined = rows.chunks.chunk(at.slot).is_some_and(|row| row.is_rejoined());
        let is_wanted = rows.has(at.slot, note::BELOW)
            // That was not asked for in this life.
            || is_rejoined && self.config.write != Write::Never;
        is_wanted && self.needs_all_before(at)
    }

    /// A chunk was found on disk: so much is known of the one before it.
    pub(super) fn note_below(&mut self, at: At) {
        if let Some(parent) = self.tables[at.table as usize].chunks.parent(at.slot) {
            self.tables[at.table as usize].set(parent, note::BELOW);
        }
    }

    /// A put that has to be on disk waits for those before its chunks, too.
    pub(super) fn wait_for_those_before(&mut self, number: u32) {
        let one = &self.moves[number].spec;
        let Some(&first) = one.slots.first() else { return };
        let at = At { table: one.table, slot: first };
        if !self.needs_all_before(at) {
            return;
        }
        // Its own may be on disk already.
        self.queue_before(at);
        let mut next = self.tables[at.table as usize].chunks.parent(first);
        while let Some(slot) = next {
            let one = At { slot, ..at };
            if !self.is_up_only(one) {
                break;
            }
            self.tables[at.table as usize].set(slot, note::FORCED);
            self.queue_one(one);
            self.chunk_waits.entry(one).or_default().push((number, NONE));
            let waiting = &mut self.moves[number];
            waiting.waits += 1;
            waiting.ahead.push(slot);
            next = self.tables[at.table as usize].chunks.parent(slot);
        }
    }

    /// Checks that what is on disk has what is before it there, unless that is nowhere, or
    /// something could not be written. For tests and simulations in which nobody has left
    /// the disk.
    pub fn check_prefixes(&self) -> Result<()> {
        if self.upkeep.given_up > 0 {
            return Ok(());
        }
        for (number, rows) in self.tables.iter().enumerate() {
            for slot in rows.chunks.slots() {
                let at = At { table: number as u32, slot };
                let row = rows.chunks.chunk(slot);
                let is_below = row.is_some_and(|row| row.cells()[Tier::Disk as usize] > 0);
                let Some(parent) = rows.chunks.parent(slot).filter(|_| is_below) else { continue };
                if self.needs_all_before(at) && self.is_up_only(At { slot: parent, ..at }) {
                    fail!(State, "chunk {slot} is on disk, and {parent} before it is not");
                }
            }
        }
        Ok(())
    }
}
