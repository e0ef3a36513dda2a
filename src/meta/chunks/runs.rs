//! Runs of cells: consecutive layers of one chunk that are stored in host memory, or read there,
//! together.

use std::ops::Range;

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::meta::chunks::{Cell, Chunks, Location};

const HOST: usize = Tier::Host as usize;

impl Chunks {
    /// Numbers of so many cells of a chunk. Fails if one does not exist.
    fn run(&self, first: Cell, cells: usize) -> Result<Range<usize>> {
        let at = self.at(first)?;
        if cells > self.shape.layers - first.layer {
            fail!(NotFound, "layer {} of chunk {} does not exist", self.shape.layers, first.chunk);
        }
        Ok(at..at + cells)
    }

    /// Pieces of host memory of a run that is being stored there or read there.
    pub fn run_pieces(&self, first: Cell, cells: usize) -> Result<&[u32]> {
        Ok(&self.cells.pieces()[self.run(first, cells)?])
    }

    /// Begins to store a run in these pieces of host memory, from outside. Fails if one of the cells
    /// is in a tier of this store, or in motion.
    pub fn begin_store_run(&mut self, first: Cell, pieces: &[u32]) -> Result<()> {
        let run = self.run(first, pieces.len())?;
        let all = &self.cells.marks()[run.clone()];
        if let Some(layer) = all.iter().position(|marks| !marks.is_nowhere()) {
            fail!(State, "layer {} of chunk {} is not idle", first.layer + layer, first.chunk);
        }
        for (at, &piece) in run.zip(pieces) {
            self.cells.expect(at, HOST, None);
            self.cells.set_piece(at, piece);
        }
        self.start_many(first.chunk, pieces.len());
        Ok(())
    }

    /// Ends the store of a run. The pieces of a run that did not arrive are the caller's again.
    pub fn end_store_run(&mut self, first: Cell, cells: usize, has_arrived: bool) -> Result<()> {
        let run = self.run(first, cells)?;
        let is_stored = |at: usize| self.cells.marks()[at].storing() & 1 << HOST != 0;
        if let Some(at) = run.clone().find(|&at| !is_stored(at)) {
            let layer = first.layer + at - run.start;
            fail!(State, "layer {layer} of chunk {} is not being stored", first.chunk);
        }
        let mut new = 0;
        for at in run {
            self.cells.end_storing(at, HOST);
            if has_arrived {
                let piece = self.cells.pieces()[at];
                new += usize::from(self.cells.place(at, Location::Host(piece)));
            }
        }
        self.stop_many(first.chunk, cells);
        if !has_arrived {
            self.counts.failed[HOST] += cells as u64;
            return Ok(());
        }
        let row = &mut self.rows[first.chunk as usize];
        row.cells[HOST] += cells as u16;
        row.cells_somewhere += new as u16;
        self.counts.cells[HOST] += cells as u64;
        self.counts.cells_somewhere += new as u64;
        Ok(())
    }

    /// Adds a reader to the cells of a run in host memory. Stops at a cell that is not resident there or
    /// has the most readers possible. Returns the number of cells that got a reader.
    pub fn begin_read_run(&mut self, first: Cell, cells: usize) -> Result<usize> {
        let run = self.run(first, cells)?;
        let mut read = 0;
        for at in run {
            if !self.cells.marks()[at].has(HOST) || !self.cells.read(at, HOST) {
                break;
            }
            read += 1;
        }
        self.start_many(first.chunk, read);
        Ok(read)
    }

    /// Removes a reader from each cell of a run. `freed` is called with pieces that are free now,
    /// and their layers.
    pub fn end_read_run(
        &mut self,
        first: Cell,
        cells: usize,
        mut freed: impl FnMut(usize, u32),
    ) -> Result<()> {
        let run = self.run(first, cells)?;
        if let Some(at) = run.clone().find(|&at| self.cells.readers(at, HOST) == 0) {
            let layer = first.layer + at - run.start;
            fail!(State, "layer {layer} of chunk {} has no reader in host memory", first.chunk);
        }
        for (layer, at) in (first.layer..).zip(run) {
            if self.cells.end_read(at, HOST) {
                freed(layer, self.cells.pieces()[at]);
            }
        }
        self.stop_many(first.chunk, cells);
        Ok(())
    }
}
