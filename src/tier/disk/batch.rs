//! Batches: what is to be written or read, in flat tables that can be used again.

use std::ops::Range as Indices;

use crate::base::status::{Error, Result, Status};
use crate::format::record::Chunk;
use crate::format::seal::Identity;
use crate::tier::disk::spot::Spot;
use crate::tier::disk::staging::Range;

/// A write that returned; [`crate::tier::disk::DiskTier::commit`] makes it durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    pub(super) segment: u64,
    pub(super) write: u64,
}

impl Mark {
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
        self.gets.push(Get { spot, who, seal, padded, planes, result });
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

    pub(super) fn planes_of(&self, get: &Get) -> &[GetPlane] {
        self.planes.get(get.planes.clone()).unwrap_or(&[])
    }
}

impl GetPlane {
    pub(super) fn range(&self) -> Range {
        Range { address: self.address, bytes: self.bytes }
    }
}
