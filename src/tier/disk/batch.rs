//! Batches: what is to be written or read, in flat tables that can be used again.

use std::ops::Range as Indices;

use crate::base::status::{Error, Result, Status};
use crate::format::record::Chunk;
use crate::format::seal::Identity;
use crate::tier::disk::gather::Range;
use crate::tier::disk::spot::Spot;

/// A write that returned; [`crate::tier::disk::DiskTier::commit`] makes it durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    pub(super) segment: u64,
    pub(super) write: u64,
}

impl Mark {
    /// What was found in a segment when the store was opened.
    pub fn found(segment: u64) -> Mark {
        // Nothing is appended to such a one: there is one sync to wait for.
        Mark { segment, write: 1 }
    }

    /// All that was written to a segment until it is synced.
    pub fn so_far(segment: u64) -> Mark {
        Mark { segment, write: u64::MAX }
    }

    /// The segment that was written to.
    pub fn segment(self) -> u64 {
        self.segment
    }
}

/// A plane to be written.
#[derive(Clone, Copy, Debug)]
pub struct PutPlane {
    /// As in [`crate::format::seal::Plane`].
    pub kind: u16,
    /// Which one of its kind.
    pub id: u16,
    /// Version of what its content means.
    pub version: u32,
    /// Its length.
    pub bytes: u64,
    /// Its bytes.
    pub address: *const u8,
    /// Its checksum, if it is known.
    pub sum: Option<u64>,
}

/// A cell to be written.
#[derive(Clone, Debug)]
pub struct PutCell {
    /// Its layer.
    pub layer: u32,
    /// How its bytes are coded; 0 = as they are.
    pub codec: u16,
    /// Bytes when decoded; 0 = as many as are stored.
    pub raw_bytes: u64,
    /// The memory behind the last plane up to a whole block may be written too: a
    /// cell of any length then needs no copy.
    pub padded: bool,
    pub(super) planes: Indices<usize>,
    /// Where it is, once written.
    pub spot: Spot,
    /// Its seal, once written.
    pub seal: u64,
    pub(super) stored_bytes: u64,
}

impl PutCell {
    /// Bytes that are stored, once written.
    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }
}

/// A record to be written: cells of one chunk.
#[derive(Clone, Debug)]
pub struct Put {
    /// Whose cells.
    pub chunk: Chunk,
    pub(super) cells: Indices<usize>,
    /// The number under which they were first written; 0 = this record's.
    pub(super) born: u64,
    /// The segment that they are copied from; 0 = none.
    pub(super) from: u64,
    /// How it went: on disk, not yet durable.
    pub result: Result<Mark>,
}

/// Records to be written.
#[derive(Default)]
pub struct Puts {
    pub(super) records: Vec<Put>,
    pub(super) cells: Vec<PutCell>,
    pub(super) planes: Vec<PutPlane>,
}

// SAFETY: the memory of planes is named, not owned; whoever appends the batch
// promises that it is valid then.
unsafe impl Send for Puts {}

impl Puts {
    /// Forgets all; keeps the memory of the tables.
    pub fn clear(&mut self) {
        self.records.clear();
        self.cells.clear();
        self.planes.clear();
    }

    /// Begins a record.
    pub fn record(&mut self, chunk: Chunk) {
        let cells = self.cells.len()..self.cells.len();
        let result = Err(Error::from(Status::Again));
        self.records.push(Put { chunk, cells, born: 0, from: 0, result });
    }

    /// Adds a cell to the last record.
    pub fn cell(&mut self, layer: u32, codec: u16, raw_bytes: u64, padded: bool) {
        let planes = self.planes.len()..self.planes.len();
        let (spot, seal) = (Spot::NONE, 0);
        let cell = PutCell { layer, codec, raw_bytes, padded, planes, spot, seal, stored_bytes: 0 };
        self.cells.push(cell);
        if let Some(record) = self.records.last_mut() {
            record.cells.end = self.cells.len();
        }
    }

    /// Adds a plane to the last cell.
    pub fn plane(&mut self, plane: PutPlane) {
        self.planes.push(plane);
        if let Some(cell) = self.cells.last_mut() {
            cell.planes.end = self.planes.len();
        }
    }

    /// Writes a cell, by its number in the batch, in another form: its planes lie one
    /// after the other from `address` on, up to a whole block, and have these lengths.
    pub fn code(&mut self, cell: usize, codec: u16, address: *const u8, lengths: &[usize]) {
        let Some(cell) = self.cells.get_mut(cell) else { return };
        let planes = self.planes.get_mut(cell.planes.clone()).unwrap_or(&mut []);
        cell.raw_bytes = planes.iter().map(|plane| plane.bytes).sum();
        (cell.codec, cell.padded) = (codec, true);
        let mut at = 0;
        for (plane, &bytes) in planes.iter_mut().zip(lengths) {
            plane.address = address.wrapping_add(at);
            (plane.bytes, plane.sum) = (bytes as u64, None);
            at += bytes;
        }
    }

    /// The cells of a record, by their numbers in the batch.
    pub fn cells_of(&self, record: usize) -> Indices<usize> {
        self.records.get(record).map_or(0..0, |put| put.cells.clone())
    }

    /// The planes of a cell, by its number in the batch.
    pub fn planes_at(&self, cell: usize) -> &[PutPlane] {
        self.cells.get(cell).map_or(&[], |cell| self.planes_of(cell))
    }

    /// The records and their cells.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Put, &[PutCell])> {
        self.records.iter().map(|put| (put, self.cells.get(put.cells.clone()).unwrap_or(&[])))
    }

    /// How many records there are.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub(super) fn planes_of(&self, cell: &PutCell) -> &[PutPlane] {
        self.planes.get(cell.planes.clone()).unwrap_or(&[])
    }
}

impl PutPlane {
    pub(super) fn range(&self) -> Range {
        Range { address: self.address.cast_mut(), bytes: self.bytes }
    }
}

/// A plane to be read.
#[derive(Clone, Copy, Debug)]
pub struct GetPlane {
    /// As in [`crate::format::seal::Plane`].
    pub kind: u16,
    /// Which one of its kind.
    pub id: u16,
    /// Version of what its content means.
    pub version: u32,
    /// Its length.
    pub bytes: u64,
    /// Where its bytes go.
    pub address: *mut u8,
}

/// A cell to be read.
#[derive(Clone, Debug)]
pub struct Get {
    /// Where it is.
    pub spot: Spot,
    /// Who it must be.
    pub who: Identity,
    /// The seal it must have.
    pub seal: u64,
    /// The memory behind the last plane up to a whole block may be overwritten: a
    /// cell of any length then needs no copy.
    pub padded: bool,
    /// The blocks of a coded cell, which go to `address` as they are stored; 0 = its
    /// planes go where they say.
    pub blocks: u32,
    /// Memory for those blocks.
    pub address: *mut u8,
    pub(super) planes: Indices<usize>,
    /// OK only if every byte is right. Else what the memory holds means nothing:
    /// NOT_FOUND (the segment is gone), CORRUPT (not what was expected), or an
    /// error of the system.
    pub result: Result<()>,
}

/// Cells to be read.
#[derive(Default)]
pub struct Gets {
    pub(super) gets: Vec<Get>,
    pub(super) planes: Vec<GetPlane>,
}

// SAFETY: as for `Puts`.
unsafe impl Send for Gets {}

impl Gets {
    /// Forgets all; keeps the memory of the tables.
    pub fn clear(&mut self) {
        self.gets.clear();
        self.planes.clear();
    }

    /// Adds a cell; its planes follow.
    pub fn cell(&mut self, spot: Spot, who: Identity, seal: u64, padded: bool) {
        let planes = self.planes.len()..self.planes.len();
        let result = Err(Error::from(Status::Again));
        let (blocks, address) = (0, std::ptr::null_mut());
        self.gets.push(Get { spot, who, seal, padded, blocks, address, planes, result });
    }

    /// Adds a coded cell; its planes follow, and say no more than what they are: where
    /// in its blocks they lie is found when those are read. Before that it needs
    /// [`Gets::set_address`].
    pub fn coded(&mut self, spot: Spot, who: Identity, seal: u64, blocks: u32) {
        self.cell(spot, who, seal, true);
        if let Some(get) = self.gets.last_mut() {
            get.blocks = blocks;
        }
    }

    /// Memory for the blocks of a coded cell, by its number in the batch.
    pub fn set_address(&mut self, get: usize, address: *mut u8) {
        if let Some(get) = self.gets.get_mut(get) {
            get.address = address;
        }
    }

    /// A cell did not come.
    pub fn fail(&mut self, get: usize, error: Error) {
        if let Some(get) = self.gets.get_mut(get) {
            get.result = Err(error);
        }
    }

    /// How many cells there are.
    pub fn len(&self) -> usize {
        self.gets.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.gets.is_empty()
    }

    /// A cell, by its number in the batch.
    pub fn get(&self, get: usize) -> Option<&Get> {
        self.gets.get(get)
    }

    /// Adds a plane to the last cell.
    pub fn plane(&mut self, plane: GetPlane) {
        self.planes.push(plane);
        if let Some(get) = self.gets.last_mut() {
            get.planes.end = self.planes.len();
        }
    }

    /// The cells.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Get> {
        self.gets.iter()
    }

    /// The planes of a cell.
    pub fn planes_of(&self, get: &Get) -> &[GetPlane] {
        self.planes.get(get.planes.clone()).unwrap_or(&[])
    }
}

impl GetPlane {
    pub(super) fn range(&self) -> Range {
        Range { address: self.address, bytes: self.bytes }
    }
}
