//! Memory that others need, or a smaller store has too much: only whole segments go
//! back, so whoever is in one that drains has to leave, or to go down.

use std::collections::BTreeMap;

use crate::base::budget::Tier;
use crate::meta::chunks::Cell;
use crate::meta::index::Slot;
use crate::store::state::chunk_table::note;
use crate::store::state::eviction::MOST_VICTIMS;
use crate::store::state::granularity::{Granularity, Part, cell_id};
use crate::store::state::{At, StoreState, Write};

const HOST: u8 = 1 << Tier::Host as u8;
const DEVICE: u8 = 1 << Tier::Device as u8;

/// What is owed to others.
#[derive(Default)]
pub(super) struct ReclaimTargets {
    /// Segments that drain for this.
    draining: Vec<u32>,
    /// It is paid when so much has gone back in all.
    until_bytes: u64,
    /// Segments drain, or more of them should.
    is_open: bool,
    /// Something has changed since it was last seen what can be paid.
    looks: bool,
    /// A chunk may leave that could not: other segments can be drained now.
    seeks: bool,
    /// Whose the pieces of a segment are.
    owners: Vec<u64>,
}

impl ReclaimTargets {
    /// Cells have moved, or come free.
    pub(super) fn changed(&mut self) {
        self.looks = self.is_open;
    }

    /// A chunk is held by nobody any more.
    pub(super) fn released(&mut self) {
        (self.looks, self.seeks) = (self.is_open, self.is_open);
    }

    /// Segments may drain.
    pub(super) fn begin(&mut self) {
        (self.is_open, self.looks, self.seeks) = (true, true, true);
    }
}

/// A cell, as the host tier notes it beside a piece.
pub(super) fn owner_of(table: u32, cell: Cell) -> u64 {
    u64::from(table) << 48 | (cell.layer as u64) << 32 | u64::from(cell.chunk)
}

pub(super) fn cell_of_owner(owner: u64) -> (u32, Cell) {
    let layer = (owner >> 32 & 0xFFFF) as usize;
    ((owner >> 48) as u32, Cell { chunk: owner as u32, layer })
}

impl StoreState {
    /// Gives memory back that others need more; how much went, or will. The policy's
    /// choice leaves first, then whoever is left in the emptiest segments.
    pub fn shrink(&mut self, bytes: u64) -> u64 {
        let before = self.host.given_back_bytes();
        let bytes = bytes.min(self.host.stats().cost_bytes);
        self.host.trim();
        let mut left = bytes.saturating_sub(self.host.given_back_bytes() - before);
        let mut victims = Vec::new();
        while left > 0 {
            self.host_cache.choose(self.now_ns, left, MOST_VICTIMS, &mut victims);
            if victims.is_empty() {
                break;
            }
            for victim in victims.drain(..) {
                let Some((at, part)) = self.chosen(victim) else { continue };
                // Its row may go with it.
                let bytes = self.tables[at.table as usize].part_bytes(at.slot, part);
                if self.leave_host(at, part) {
                    left = left.saturating_sub(bytes);
                } else {
                    self.note_continued(at, Tier::Host);
                }
            }
        }
        self.host.trim();
        self.owe_since(before, bytes);
        self.settle();
        let went = self.host.given_back_bytes() - before;
        let goes = self.host.segments().filter(|segment| segment.drains);
        bytes.min(went + goes.map(|segment| segment.cost_bytes).sum::<u64>())
    }

    /// So many bytes more have to go back.
    pub(super) fn owe(&mut self, bytes: u64) {
        self.owe_since(self.host.given_back_bytes(), bytes);
    }

    fn owe_since(&mut self, before: u64, bytes: u64) {
        self.reclaim_targets.until_bytes =
            self.reclaim_targets.until_bytes.max(before).saturating_add(bytes);
        self.reclaim_targets.begin();
    }

    /// What is still owed.
    pub fn reclaim_target_bytes(&self) -> u64 {
        self.reclaim_targets.until_bytes.saturating_sub(self.host.given_back_bytes())
    }

    /// Has cells leave segments that drain; whether something came of it.
    pub(super) fn pay(&mut self) -> bool {
        // What the disk has just refused it would refuse again.
        if !self.reclaim_targets.looks || self.is_vain() {
            return false;
        }
        self.reclaim_targets.looks = false;
        self.drain_to_target();
        let drains = self.host.segments().filter(|segment| segment.drains);
        let numbers: Vec<u32> = drains.map(|segment| segment.number).collect();
        self.reclaim_targets.is_open = !numbers.is_empty() || self.reclaim_target_bytes() > 0;
        let mut came = false;
        let mut owners = std::mem::take(&mut self.reclaim_targets.owners);
        for number in numbers {
            owners.clear();
            owners.extend(self.host.live_pieces(number).map(|(_, owner)| owner));
            for &owner in &owners {
                came |= self.vacate(owner);
            }
        }
        self.reclaim_targets.owners = owners;
        came
    }

    /// Has as many segments drain as are owed, those first that have least in use.
    fn drain_to_target(&mut self) {
        let reclaim_target = self.reclaim_target_bytes();
        let still = |number: &u32| self.host.segments().any(|s| s.number == *number && s.drains);
        self.reclaim_targets.draining.retain(still);
        if reclaim_target == 0 {
            for number in std::mem::take(&mut self.reclaim_targets.draining) {
                if let Err(error) = self.host.drain(number, false) {
                    log::error!("a segment could not be used again: {error}");
                }
            }
            return;
        }
        if !std::mem::take(&mut self.reclaim_targets.seeks) {
            return;
        }
        // Where that is not enough, those too that others elsewhere continue.
        for clears in [false, true] {
            let drains = self.host.segments().filter(|segment| segment.drains);
            let mut goes: u64 = drains.map(|segment| segment.cost_bytes).sum();
            let mut others: Vec<_> = self.host.segments().filter(|s| !s.drains).collect();
            others.sort_by_key(|s| (u64::from(s.live_pieces) * s.piece_bytes, s.number));
            if clears {
                // Little continues what stands at the ends of paths.
                others.sort_by_key(|s| std::cmp::Reverse(self.first_position(s.number)));
            }
            for segment in others {
                if goes >= reclaim_target {
                    return;
                }
                if clears {
                    self.clear_paths(segment.number);
                }
                let mut all = self.host.live_pieces(segment.number);
                let may_empty = all.all(|(_, owner)| self.may_vacate(owner));
                drop(all);
                if may_empty && self.host.drain(segment.number, true).is_ok() {
                    self.reclaim_targets.draining.push(segment.number);
                    goes += segment.cost_bytes;
                }
            }
        }
    }

    /// How many chunks are before the first one that has something in a segment.
    fn first_position(&self, segment: u32) -> u32 {
        let owners = self.host.live_pieces(segment).map(|(_, owner)| cell_of_owner(owner));
        let rows = owners.map(|(table, cell)| self.tables[table as usize].chunks.chunk(cell.chunk));
        rows.map(|row| row.map_or(0, |row| row.position())).min().unwrap_or(u32::MAX)
    }

    /// The chunks of a segment and what continues them leave memory, from the ends on, if all of
    /// them may.
    fn clear_paths(&mut self, segment: u32) {
        let mut first: BTreeMap<u32, Vec<Slot>> = BTreeMap::new();
        for (_, owner) in self.host.live_pieces(segment) {
            let (table, cell) = cell_of_owner(owner);
            let row = self.tables[table as usize].chunks.chunk(cell.chunk);
            if row.is_none_or(|row| row.refs() > 0 || row.pin().is_some()) {
                return;
            }
            first.entry(table).or_default().push(cell.chunk);
        }
        for (table, slots) in first {
            let behind = self.tables[table as usize].chunks.with_behind(&slots);
            let rows = &self.tables[table as usize].chunks;
            let is_free = |slot: &Slot| rows.chunk(*slot).is_some_and(|row| row.is_free());
            if !behind.iter().all(is_free) {
                return;
            }
            let layers = self.tables[table as usize].layout.layers();
            for (chunk, layer) in behind.iter().flat_map(|&s| (0..layers).map(move |l| (s, l))) {
                self.vacate(owner_of(table, Cell { chunk, layer }));
            }
        }
    }

    /// Whether a cell can leave memory, sooner or later.
    fn may_vacate(&self, owner: u64) -> bool {
        let (table, cell) = cell_of_owner(owner);
        let rows = &self.tables[table as usize].chunks;
        let is_blocked = rows.chunk(cell.chunk).is_some_and(|row| row.is_blocked());
        let there = rows.marks(cell.chunk).and_then(|all| all.get(cell.layer));
        let is_below = there.is_some_and(|marks| marks.there() & !(HOST | DEVICE) != 0);
        !is_blocked || is_below || self.disk.is_some() && self.config.write != Write::Never
    }

    /// A cell leaves memory, and the rest of its chunk with it where policies choose chunks.
    fn vacate(&mut self, owner: u64) -> bool {
        let (table, cell) = cell_of_owner(owner);
        let at = At { table, slot: cell.chunk };
        let rows = &self.tables[table as usize];
        let marks = rows.chunks.marks(cell.chunk).and_then(|all| all.get(cell.layer));
        // One that is coming or going is seen again when it has.
        let is_there = marks.is_some_and(|marks| marks.there() & HOST != 0);
        let leaves = self.leaving.get(&at).is_some_and(|leave| leave.has(cell.layer));
        if !is_there || leaves || !self.may_vacate(owner) {
            return false;
        }
        let id = rows.id(at.slot);
        let part = match self.host_cache.granularity {
            Granularity::Chunk => {
                if rows.has(at.slot, note::IN_HOST) {
                    self.host_cache.remove(self.now_ns, id);
                }
                Part::All
            }
            Granularity::Cell => {
                self.host_cache.remove(self.now_ns, cell_id(id, cell.layer));
                Part::Layer(cell.layer)
            }
            Granularity::Session => {
                self.host_cache.leave(self.now_ns, at);
                Part::All
            }
        };
        self.leave_host(at, part)
    }
}
