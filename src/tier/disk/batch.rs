//! Batches of cells to write or to read, in flat tables that can be reused.

use std::ops::Range as Indices;

use crate::base::status::{Error, Result, Status};
use crate::format::record::Chunk;
use crate::format::seal::Identity;
use crate::tier::disk::gather::Range;
use crate::tier::disk::spot::Spot;

/// A completed write; [`crate::tier::disk::DiskTier::commit`] makes it durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    pub(super) segment: u64,
    pub(super) write: u64,
}

impl Mark {
    /// The records that opening found in a segment.
    pub fn found(segment: u64) -> Mark {
        // Nothing is appended to such a segment: one sync covers all its records.
        Mark { segment, write: 1 }
    }

    /// All writes to a segment up to its next sync.
    pub fn so_far(segment: u64) -> Mark {
        Mark { segment, write: u64::MAX }
    }

    /// The segment of the write.
    pub fn segment(self) -> u64 {
        self.segment
    }
}

/// A plane to write.
#[derive(Clone, Copy, Debug)]
pub struct PutPlane {
    /// As in [`crate::format::seal::Plane`].
    pub kind: u16,
    /// Number among the planes of its kind.
    pub id: u16,
    /// Version of the meaning of its content.
    pub version: u32,
    /// Length in bytes.
    pub bytes: u64,
    /// First byte of the memory.
    pub address: *const u8,
    /// Its checksum, if known.
    pub sum: Option<u64>,
}

/// A cell to write.
#[derive(Clone, Debug)]
pub struct PutCell {
    /// The layer.
    pub layer: u32,
    /// Encoding of the bytes; 0 = none.
    pub codec: u16,
    /// Length when decoded; 0 = the stored length.
    pub raw_bytes: u64,
    /// The memory after the last plane may be read up to a whole block: then a cell of any length
    /// needs no copy.
    pub padded: bool,
    pub(super) planes: Indices<usize>,
    /// Its place, once written.
    pub spot: Spot,
    /// Its seal, once written.
    pub seal: u64,
    pub(super) stored_bytes: u64,
}

impl PutCell {
    /// Stored length, once written.
    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }
}

/// A record to write: cells of one chunk.
#[derive(Clone, Debug)]
pub struct Put {
    /// The chunk.
    pub chunk: Chunk,
    pub(super) cells: Indices<usize>,
    /// Number of the record that first contained the cells; 0 = this record.
    pub(super) born: u64,
    /// Segment that they are copied from; 0 = none.
    pub(super) from: u64,
    /// OK = on disk, not yet durable.
    pub result: Result<Mark>,
}

/// Records to write.
#[derive(Default)]
pub struct Puts {
    pub(super) records: Vec<Put>,
    pub(super) cells: Vec<PutCell>,
    pub(super) planes: Vec<PutPlane>,
}

// SAFETY: planes only name memory; the caller that appends the batch guarantees that it is valid
// then.
unsafe impl Send for Puts {}

impl Puts {
    /// Removes all items; keeps the memory of the tables.
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

    /// Replaces the bytes of a cell, by its index: its planes are consecutive from `address` on, up
    /// to a whole block, with these lengths.
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

    /// The cells of a record, by their indices in the batch.
    pub fn cells_of(&self, record: usize) -> Indices<usize> {
        self.records.get(record).map_or(0..0, |put| put.cells.clone())
    }

    /// The planes of a cell, by its index in the batch.
    pub fn planes_at(&self, cell: usize) -> &[PutPlane] {
        self.cells.get(cell).map_or(&[], |cell| self.planes_of(cell))
    }

    /// Records and their cells.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Put, &[PutCell])> {
        self.records.iter().map(|put| (put, self.cells.get(put.cells.clone()).unwrap_or(&[])))
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are no records.
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

/// A plane to read.
#[derive(Clone, Copy, Debug)]
pub struct GetPlane {
    /// As in [`crate::format::seal::Plane`].
    pub kind: u16,
    /// Number among the planes of its kind.
    pub id: u16,
    /// Version of the meaning of its content.
    pub version: u32,
    /// Length in bytes.
    pub bytes: u64,
    /// Destination of its bytes.
    pub address: *mut u8,
}

/// A cell to read.
#[derive(Clone, Debug)]
pub struct Get {
    /// Its place.
    pub spot: Spot,
    /// Expected identity.
    pub identity: Identity,
    /// Expected seal.
    pub seal: u64,
    /// The memory after the last plane may be overwritten up to a whole block: then a cell of any
    /// length needs no copy.
    pub padded: bool,
    /// Blocks of an encoded cell, which are read to `address` as they are stored; 0 = the planes
    /// have destinations.
    pub blocks: u32,
    /// Memory for those blocks.
    pub address: *mut u8,
    pub(super) planes: Indices<usize>,
    /// OK = every byte is right. Otherwise the memory has no valid content: NOT_FOUND (the segment
    /// was removed), CORRUPT (the seal does not match), or a system error.
    pub result: Result<()>,
}

/// Cells to read.
#[derive(Default)]
pub struct Gets {
    pub(super) gets: Vec<Get>,
    pub(super) planes: Vec<GetPlane>,
}

// SAFETY: as for `Puts`.
unsafe impl Send for Gets {}

impl Gets {
    /// Removes all items; keeps the memory of the tables.
    pub fn clear(&mut self) {
        self.gets.clear();
        self.planes.clear();
    }

    /// Adds a cell; its planes follow.
    pub fn cell(&mut self, spot: Spot, identity: Identity, seal: u64, padded: bool) {
        let planes = self.planes.len()..self.planes.len();
        let result = Err(Error::from(Status::Again));
        let (blocks, address) = (0, std::ptr::null_mut());
        self.gets.push(Get { spot, identity, seal, padded, blocks, address, planes, result });
    }

    /// Adds an encoded cell; its planes follow, with kinds only. Reading the blocks finds the
    /// planes in them. The cell needs [`Gets::set_address`] before.
    pub fn coded(&mut self, spot: Spot, identity: Identity, seal: u64, blocks: u32) {
        self.cell(spot, identity, seal, true);
        if let Some(get) = self.gets.last_mut() {
            get.blocks = blocks;
        }
    }

    /// Sets the memory for the blocks of an encoded cell, by its index in the batch.
    pub fn set_address(&mut self, get: usize, address: *mut u8) {
        if let Some(get) = self.gets.get_mut(get) {
            get.address = address;
        }
    }

    /// Sets the result of a cell to an error.
    pub fn fail(&mut self, get: usize, error: Error) {
        if let Some(get) = self.gets.get_mut(get) {
            get.result = Err(error);
        }
    }

    /// Number of cells.
    pub fn len(&self) -> usize {
        self.gets.len()
    }

    /// Whether there are no cells.
    pub fn is_empty(&self) -> bool {
        self.gets.is_empty()
    }

    /// A cell, by its index in the batch.
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
