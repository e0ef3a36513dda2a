//! Transitions of cells between tiers. Each has a beginning and an end. Between them the worker
//! touches the bytes, and the table keeps the memory reserved.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::meta::chunks::{Cell, Chunks, Location, TIERS, bit_of};
use crate::meta::index::Slot;

/// Result of a request to bring a cell into a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// Started: the caller must end it.
    Started,
    /// Nothing to do: the cell is resident there; for a store from outside, in any tier.
    Resident,
    /// Nothing to do: a transition into the tier is in progress.
    InFlight,
    /// Not now: the cell was dropped there but is still read. Its memory is free after the last
    /// read.
    Leaving,
}

/// Outcome of a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The cell is resident there now.
    Arrived(Location),
    /// Nothing arrived; the source is intact.
    Failed,
    /// Nothing arrived, because the source is lost or damaged.
    BadSource,
}

/// Result of a drop from a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// The memory is free.
    Freed(Location),
    /// The cell is read: the end of the last read returns its memory.
    Deferred,
    /// The cell was not resident there.
    Absent,
}

impl Chunks {
    /// Begins to store a cell in a tier from outside. The first writer wins: a cell that is
    /// resident or in flight in any tier is not written again.
    pub fn begin_store(&mut self, cell: Cell, tier: Tier) -> Result<Begin> {
        let (at, bit) = (self.at(cell)?, bit_of(tier)?);
        let marks = self.cells.marks()[at];
        if marks.resident_tiers() != 0 || marks.has(bit) {
            return Ok(Begin::Resident);
        }
        if marks.arriving() != 0 || (marks.loading() | marks.storing()) & 1 << bit != 0 {
            return Ok(Begin::InFlight);
        }
        Ok(self.begin_transition(cell.chunk, at, bit, None))
    }

    /// Ends a store. Memory that was allocated for a cell that did not arrive stays the caller's.
    pub fn end_store(&mut self, cell: Cell, tier: Tier, place: Option<Location>) -> Result<()> {
        let (at, bit) = (self.at(cell)?, bit_of(tier)?);
        if self.cells.marks()[at].storing() & 1 << bit == 0 {
            fail!(
                State,
                "layer {} of chunk {} is not being stored in the tier",
                cell.layer,
                cell.chunk
            );
        }
        self.check_place(tier, place)?;
        self.end_transition(cell.chunk, at, bit, place);
        Ok(())
    }

    /// Begins to copy a cell between tiers, for a promotion or a demotion. The copy counts as a
    /// reader of the source until it ends.
    pub fn begin_copy(&mut self, cell: Cell, from: Tier, to: Tier) -> Result<Begin> {
        let (at, source, target) = (self.at(cell)?, bit_of(from)?, bit_of(to)?);
        let marks = self.cells.marks()[at];
        if marks.has(target) {
            return Ok(Begin::Resident);
        }
        if (marks.loading() | marks.storing()) & 1 << target != 0 {
            return Ok(Begin::InFlight);
        }
        if marks.leaving() & 1 << target != 0 {
            return Ok(Begin::Leaving);
        }
        self.begin_read(cell, from)?;
        Ok(self.begin_transition(cell.chunk, at, target, Some(source)))
    }

    /// Ends a copy. Returns the location of the source, if it is free now.
    pub fn end_copy(&mut self, cell: Cell, to: Tier, arrival: Arrival) -> Result<Option<Location>> {
        let (at, target) = (self.at(cell)?, bit_of(to)?);
        let Some(source) = self.cells.source(at, target) else {
            fail!(
                State,
                "layer {} of chunk {} is not being copied to the tier",
                cell.layer,
                cell.chunk
            );
        };
        let place = match arrival {
            Arrival::Arrived(place) => Some(place),
            Arrival::Failed | Arrival::BadSource => None,
        };
        self.check_place(to, place)?;
        self.end_transition(cell.chunk, at, target, place);
        if arrival == Arrival::BadSource && self.cells.marks()[at].has(source) {
            self.counts.lost[source] += 1;
            let dropped = self.take(cell.chunk, at, source);
            debug_assert_eq!(dropped, Dropped::Deferred, "this copy still reads it");
        }
        Ok(self.stop_reading(cell.chunk, at, source))
    }

    /// Adds a reader of a cell in a tier; its memory there stays reserved until the end.
    pub fn begin_read(&mut self, cell: Cell, tier: Tier) -> Result<Location> {
        let (at, bit) = (self.at(cell)?, bit_of(tier)?);
        if !self.cells.marks()[at].has(bit) {
            fail!(
                NotFound,
                "layer {} of chunk {} is not resident in the tier",
                cell.layer,
                cell.chunk
            );
        }
        if !self.cells.read(at, bit) {
            fail!(
                Again,
                "layer {} of chunk {} has the most readers possible: try again",
                cell.layer,
                cell.chunk
            );
        }
        self.start(cell.chunk);
        Ok(self.cells.place_in(at, bit))
    }

    /// Removes a reader. Returns the location, if it is free now.
    pub fn end_read(&mut self, cell: Cell, tier: Tier) -> Result<Option<Location>> {
        let (at, bit) = (self.at(cell)?, bit_of(tier)?);
        if self.cells.plain_readers(at, bit) == 0 {
            fail!(State, "layer {} of chunk {} has no reader in the tier", cell.layer, cell.chunk);
        }
        Ok(self.stop_reading(cell.chunk, at, bit))
    }

    /// Records a remote hint for a cell.
    pub fn hint(&mut self, cell: Cell) -> Result<()> {
        let (at, bit) = (self.at(cell)?, bit_of(Tier::Remote)?);
        let marks = self.cells.marks()[at];
        let is_known = marks.has(bit) || (marks.loading() | marks.leaving()) & 1 << bit != 0;
        if !is_known {
            self.put(cell.chunk, at, Location::Remote);
        }
        Ok(())
    }

    /// Drops a cell from a tier. A referenced or pinned chunk, or one with dependent children,
    /// keeps the last location of its cells in this store.
    pub fn begin_drop(&mut self, cell: Cell, tier: Tier) -> Result<Dropped> {
        let (at, bit) = (self.at(cell)?, bit_of(tier)?);
        let last = self.cells.marks()[at].resident_tiers() == 1 << bit;
        if last && self.chunk(cell.chunk).is_some_and(|row| row.is_blocked()) {
            fail!(Busy, "chunk {} is referenced, pinned or continued", cell.chunk);
        }
        Ok(self.take(cell.chunk, at, bit))
    }

    /// Drops the cells of a chunk from a tier where `may(layer, tiers)` allows it, unless they must
    /// stay: if the chunk is referenced, pinned or has dependent children, copies in device memory
    /// alone are not enough. Appends them to `out`.
    pub fn drop_cells(
        &mut self,
        slot: Slot,
        tier: Tier,
        may: impl Fn(usize, u8) -> bool,
        out: &mut Vec<(Cell, Dropped)>,
    ) {
        let Some(row) = self.chunk(slot) else { return };
        let (bit, is_blocked) = (tier as usize, row.is_blocked());
        let from = slot as usize * self.shape.layers;
        for layer in 0..self.shape.layers {
            let tiers = self.cells.marks()[from + layer].resident_tiers();
            let is_last = tiers & !(1 << Tier::Device as u8) == 1 << bit;
            if tiers & 1 << bit != 0 && !(is_last && is_blocked) && may(layer, tiers) {
                let dropped = self.take(slot, from + layer, bit);
                out.push((Cell { chunk: slot, layer }, dropped));
            }
        }
    }

    /// Drops a cell from a tier where it was found lost or damaged, even if it is referenced.
    pub fn lose(&mut self, cell: Cell, tier: Tier) -> Result<Dropped> {
        let (at, bit) = (self.at(cell)?, bit_of(tier)?);
        let dropped = self.take(cell.chunk, at, bit);
        self.counts.lost[bit] += u64::from(dropped != Dropped::Absent);
        Ok(dropped)
    }

    /// Moves a cell to another spot on disk. Returns false if the cell is not at the old spot: the
    /// new spot then stays the caller's. Readers of the old spot may miss, and must look it up
    /// again.
    pub fn relocate(&mut self, cell: Cell, from: u64, to: u64) -> Result<bool> {
        let (at, bit) = (self.at(cell)?, bit_of(Tier::Disk)?);
        let is_resident = self.cells.marks()[at].resident_tiers() & 1 << bit != 0;
        let Location::Disk { spot, .. } = self.cells.place_in(at, bit) else { return Ok(false) };
        if !is_resident || spot != from {
            return Ok(false);
        }
        self.cells.set_spot(at, to);
        Ok(true)
    }

    fn check_place(&self, tier: Tier, place: Option<Location>) -> Result<()> {
        match place {
            Some(place) if place.tier() != tier => {
                fail!(
                    Invalid,
                    "a location in {} for a transition to {}",
                    place.tier().name(),
                    tier.name()
                )
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn begin_transition(
        &mut self,
        slot: Slot,
        at: usize,
        tier: usize,
        source: Option<usize>,
    ) -> Begin {
        if self.cells.marks()[at].leaving() & 1 << tier != 0 {
            return Begin::Leaving;
        }
        self.cells.expect(at, tier, source);
        self.start(slot);
        Begin::Started
    }

    #[inline]
    fn end_transition(&mut self, slot: Slot, at: usize, tier: usize, place: Option<Location>) {
        self.cells.end_storing(at, tier);
        self.stop(slot);
        let Some(place) = place else {
            self.counts.failed[tier] += 1;
            return;
        };
        self.put(slot, at, place);
    }

    #[inline]
    fn put(&mut self, slot: Slot, at: usize, place: Location) {
        let (first, tier) = (self.cells.place(at, place), place.tier() as usize);
        let row = &mut self.rows[slot as usize];
        row.cells[tier] += 1;
        row.cells_somewhere += u16::from(first);
        self.counts.cells[tier] += 1;
        self.counts.cells_somewhere += u64::from(first);
    }

    #[inline]
    fn take(&mut self, slot: Slot, at: usize, tier: usize) -> Dropped {
        if !self.cells.marks()[at].has(tier) {
            return Dropped::Absent;
        }
        let (nowhere, free) = self.cells.take(at, tier);
        let row = &mut self.rows[slot as usize];
        row.cells[tier] -= 1;
        row.cells_somewhere -= u16::from(nowhere);
        self.counts.cells[tier] -= 1;
        self.counts.cells_somewhere -= u64::from(nowhere);
        if free {
            return Dropped::Freed(self.cells.place_in(at, tier));
        }
        Dropped::Deferred
    }

    #[inline]
    fn stop_reading(&mut self, slot: Slot, at: usize, tier: usize) -> Option<Location> {
        self.stop(slot);
        self.cells.end_read(at, tier).then(|| self.cells.place_in(at, tier))
    }

    /// Counts an activity of a chunk. A leaving cell has readers, and is counted by them.
    #[inline]
    fn start(&mut self, slot: Slot) {
        self.start_many(slot, 1);
    }

    #[inline]
    fn stop(&mut self, slot: Slot) {
        self.stop_many(slot, 1);
    }

    #[inline]
    pub(super) fn start_many(&mut self, slot: Slot, cells: usize) {
        self.rows[slot as usize].moving += cells as u32;
        self.counts.moving += cells as u64;
    }

    #[inline]
    pub(super) fn stop_many(&mut self, slot: Slot, cells: usize) {
        let moving = &mut self.rows[slot as usize].moving;
        assert!(*moving as usize >= cells, "no activity is in progress");
        *moving -= cells as u32;
        self.counts.moving -= cells as u64;
    }
}

const _: () = assert!(TIERS <= 4, "a nibble of marks");
