//! Objects: cells of one chunk as one record of `docs/internals/formats.md`, with 0 in all fields
//! that place it in a segment. The same cells are the same bytes, whichever store writes them.
//!
//! A remote is not trusted. An object must have the length, the header and the cells that the
//! layout determines before its checksum is considered; then every plane is verified by its
//! checksum. Only the padding of blocks is not verified: nothing uses it. Checksums find damage and
//! mistakes; they do not stop a forger.

use std::ops::Range;

use crate::base::checksum::checksum;
use crate::base::status;
use crate::fail;
use crate::format::codec::{Codec, cell};
use crate::format::fields::u32_at;
use crate::format::record::{
    Cell, Chunk, Encoder, Head, Kind, Record, blocks_of, decode, header_blocks,
};
use crate::format::seal::Plane;
use crate::format::segment::BLOCK_BYTES;
use crate::tier::remote::shape::{CellShape, Shape};
use crate::tier::remote::{Gets, Name, Puts, RemoteError};

/// Padding of blocks.
static ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// A plane of a cell to store.
#[derive(Clone, Copy, Debug)]
pub struct PlaneSource {
    /// First byte of the memory.
    pub address: *const u8,
    /// Length by the layout, unless the cell is encoded.
    pub bytes: u64,
    /// Its checksum, if known.
    pub sum: Option<u64>,
}

/// A cell to store.
#[derive(Clone, Copy, Debug)]
pub struct CellSource<'a> {
    /// Its encoding.
    pub codec: Codec,
    /// As many as the layout has; of an encoded cell, as [`cell`] encodes them.
    pub planes: &'a [PlaneSource],
}

impl CellSource<'_> {
    fn bytes(&self) -> u64 {
        self.planes.iter().map(|plane| plane.bytes).sum()
    }
}

/// Memory that a cell is fetched into.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Address of each plane; null = the cell is not wanted.
    pub planes: [*mut u8; 2],
}

impl Place {
    /// A cell that is not wanted.
    pub const NOWHERE: Place = Place { planes: [std::ptr::null_mut(); 2] };

    fn is_wanted(&self, planes: usize) -> bool {
        self.planes.iter().take(planes).all(|plane| !plane.is_null())
    }
}

/// Memory for bytes that are not wanted. Its content is undefined.
#[derive(Clone, Copy, Debug)]
pub struct Sink {
    /// First byte of the memory.
    pub address: *mut u8,
    /// At least a block. The longer it is, the fewer parts an unwanted cell has.
    pub bytes: u64,
}

/// Result of a cell of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte is right.
    Sound,
    /// The cell differs from the stored one; its memory has no valid content.
    Damaged,
    /// The cell was not wanted.
    Unwanted,
}

/// A sound cell in an object that was fetched as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its encoding.
    pub codec: Codec,
    planes: [Range<usize>; 2],
    count: usize,
}

impl Found {
    /// Ranges of its stored planes in the object.
    pub fn planes(&self) -> &[Range<usize>] {
        &self.planes[..self.count]
    }
}

/// The form that an object must have.
#[derive(Clone, Copy, Debug)]
pub struct Object<'a> {
    cells: &'a [CellShape],
    first: u32,
    chunk: Chunk,
    codec: Codec,
    header_blocks: u32,
    /// Blocks without any encoded cell.
    blocks: u32,
    planes: usize,
}

impl<'a> Object<'a> {
    /// An object of a chunk, by its index. A partial chunk has no objects.
    pub fn new(
        shape: &'a Shape,
        object: usize,
        chunk: Chunk,
        codec: Codec,
    ) -> status::Result<Object<'a>> {
        let cells = shape.cells(object);
        if cells.is_empty() {
            fail!(Invalid, "a chunk has {} objects, and no object {object}", shape.objects());
        }
        if chunk.valid_tokens != shape.chunk_tokens() {
            let tokens = shape.chunk_tokens();
            fail!(
                Invalid,
                "a chunk of {} tokens is partial: only chunks of {tokens} tokens have objects",
                chunk.valid_tokens
            );
        }
        let planes = cells.iter().map(|cell| cell.planes().len()).sum();
        let all: u64 = cells.iter().map(|cell| blocks_of(cell.bytes())).sum();
        // No shape is longer, and no layout has empty cells.
        let (Some(header_blocks), Ok(all)) = (header_blocks(cells.len(), planes), all.try_into())
        else {
            fail!(Limit, "an object of {} cells is too long for a record", cells.len());
        };
        let blocks: u32 = all;
        let first = shape.layers(object).start;
        let blocks = blocks.saturating_add(header_blocks);
        Ok(Object { cells, first, chunk, codec, header_blocks, blocks, planes })
    }

    /// Bytes of its header.
    pub fn header_bytes(&self) -> usize {
        self.header_blocks as usize * BLOCK_BYTES
    }

    /// Its length; with a codec, its longest possible length.
    pub fn bytes(&self) -> u64 {
        u64::from(self.blocks) * BLOCK_BYTES as u64
    }

    /// Adds the object to a batch. Its cells stay where they are; `header` has
    /// [`Object::header_bytes`]. Both must stay unchanged until the batch is stored. Returns the
    /// object's length.
    ///
    /// # Safety
    /// The memory of every plane is valid, and no one writes it until then.
    pub unsafe fn put(
        &self,
        name: Name,
        cells: &[CellSource<'_>],
        header: &mut [u8],
        puts: &mut Puts,
    ) -> status::Result<u64> {
        let bytes = self.add(name, cells, header, puts)?;
        // SAFETY: the caller's guarantee.
        unsafe { self.seal(cells, header)? };
        Ok(bytes)
    }

    /// Adds the object to a batch as [`Object::put`] does, without a header: [`Object::seal`] must
    /// write it to the same memory before the object is sent.
    pub fn add(
        &self,
        name: Name,
        cells: &[CellSource<'_>],
        header: &mut [u8],
        puts: &mut Puts,
    ) -> status::Result<u64> {
        self.check(cells, header)?;
        puts.object(name);
        puts.part(header.as_mut_ptr(), header.len() as u64);
        for from in cells {
            for plane in from.planes {
                puts.part(plane.address, plane.bytes);
            }
            match pad_of(from.bytes()) {
                0 => {}
                pad => puts.part(ZEROS.as_ptr(), pad),
            }
        }
        Ok(u64::from(self.blocks_of(cells)) * BLOCK_BYTES as u64)
    }

    /// Computes the checksums of the cells, and writes the header.
    ///
    /// # Safety
    /// The memory of every plane is valid, and no one writes it meanwhile.
    pub unsafe fn seal(&self, cells: &[CellSource<'_>], header: &mut [u8]) -> status::Result<()> {
        self.check(cells, header)?;
        let mut encoder = Encoder::new(header);
        let mut block = self.header_blocks;
        for ((layer, shape), from) in (self.first..).zip(self.cells).zip(cells) {
            let count = from.planes.len() as u16;
            let codec = from.codec as u16;
            encoder.cell(layer, codec, count, block, [from.bytes(), shape.bytes()]);
            for (&(kind, _), plane) in shape.planes().iter().zip(from.planes) {
                // SAFETY: the caller's guarantee.
                let sum =
                    plane.sum.unwrap_or_else(|| unsafe { sum_of(plane.address, plane.bytes) });
                encoder.plane(&Plane { kind, id: 0, version: 0, bytes: plane.bytes, sum });
            }
            block += blocks_of(from.bytes()) as u32;
        }
        encoder.finish(&self.head(block));
        Ok(())
    }

    fn blocks_of(&self, cells: &[CellSource<'_>]) -> u32 {
        cells.iter().fold(self.header_blocks, |sum, cell| sum + blocks_of(cell.bytes()) as u32)
    }

    /// Checks that the cells are those of the object.
    fn check(&self, cells: &[CellSource<'_>], header: &[u8]) -> status::Result<()> {
        if header.len() != self.header_bytes() || cells.len() != self.cells.len() {
            let (wanted, bytes) = (self.cells.len(), self.header_bytes());
            fail!(Invalid, "an object has {wanted} cells, and {bytes} bytes of header");
        }
        for ((layer, shape), from) in (self.first..).zip(self.cells).zip(cells) {
            let planes = || from.planes.iter().map(|plane| plane.bytes);
            let as_shaped = match from.codec {
                Codec::None => planes().eq(shape.planes().iter().map(|&(_, bytes)| bytes)),
                codec => codec == self.codec && self.may_be_coded(shape, planes()),
            };
            if !as_shaped || from.planes.iter().any(|plane| plane.address.is_null()) {
                fail!(Invalid, "the cell of layer {layer} does not match its layout");
            }
        }
        Ok(())
    }

    /// Whether an encoded cell can have planes of these lengths.
    fn may_be_coded(&self, shape: &CellShape, planes: impl Iterator<Item = u64> + Clone) -> bool {
        let stored = planes.clone().try_fold(0u64, u64::checked_add);
        planes.clone().count() == shape.planes().len()
            && planes.clone().all(|bytes| bytes > cell::HEAD_BYTES as u64)
            && stored.is_some_and(|bytes| blocks_of(bytes) < blocks_of(shape.bytes()))
    }

    fn head(&self, blocks: u32) -> Head {
        Head {
            kind: Kind::Cells as u16,
            header_blocks: self.header_blocks,
            blocks,
            number: 0,
            born: 0,
            segment: 0,
            at: 0,
            items: self.cells.len() as u32,
            store: [0; 16],
            chunk: self.chunk,
            body_bytes: (self.cells.len() * CELL_BYTES + self.planes * PLANE_BYTES) as u32,
            until: 0,
            from: 0,
        }
    }

    /// Adds the object to a batch. Its header is written to `header`, of [`Object::header_bytes`], each
    /// cell to its place, one for every layer. Only without a codec: otherwise the header says
    /// where cells are. [`Object::verify`] verifies what arrived.
    pub fn get(
        &self,
        name: Name,
        header: *mut u8,
        places: &[Place],
        sink: Sink,
        gets: &mut Gets,
    ) -> status::Result<()> {
        if self.codec != Codec::None || places.len() != self.cells.len() {
            fail!(
                Invalid,
                "the object may have encoded cells, or {} places were given for {} cells",
                places.len(),
                self.cells.len()
            );
        }
        if sink.bytes < BLOCK_BYTES as u64 {
            fail!(Invalid, "a sink of {} bytes is too short: it needs a block", sink.bytes);
        }
        gets.object(name, 0);
        gets.part(header, self.header_bytes() as u64);
        for (shape, place) in self.cells.iter().zip(places) {
            let bytes = shape.bytes();
            let mut unwanted = bytes + pad_of(bytes);
            if place.is_wanted(shape.planes().len()) {
                for (&(_, bytes), &address) in shape.planes().iter().zip(&place.planes) {
                    gets.part(address, bytes);
                }
                unwanted = pad_of(bytes);
            }
            while unwanted > 0 {
                let bytes = unwanted.min(sink.bytes);
                gets.part(sink.address, bytes);
                unwanted -= bytes;
            }
        }
        // One byte more: it reveals an object that is too long.
        gets.part(sink.address, 1);
        Ok(())
    }

    /// Verifies an object that was fetched with [`Object::get`]: `arrived_bytes` bytes, the first of them in
    /// `header`. Damaged = no cell can be used; otherwise each cell has its verdict.
    ///
    /// # Safety
    /// The memory of every place is valid, and no one writes it.
    pub unsafe fn verify(
        &self,
        header: &[u8],
        arrived_bytes: u64,
        places: &[Place],
        verdicts: &mut Vec<Verdict>,
    ) -> Result<(), RemoteError> {
        verdicts.clear();
        if self.codec != Codec::None
            || places.len() != self.cells.len()
            || arrived_bytes != self.bytes()
        {
            return Err(RemoteError::Damaged);
        }
        let record = self.record(header, arrived_bytes)?;
        for (cell, place) in record.cells().zip(places) {
            if !place.is_wanted(cell.planes().len()) {
                verdicts.push(Verdict::Unwanted);
                continue;
            }
            let mut planes = cell.planes().zip(&place.planes);
            // SAFETY: the caller's guarantee; the record has planes as the layout says.
            let sound = planes.all(|(plane, &at)| unsafe { sum_of(at, plane.bytes) } == plane.sum);
            verdicts.push(if sound { Verdict::Sound } else { Verdict::Damaged });
        }
        Ok(())
    }

    /// Adds the object to a batch. All of it is written to `staging`, of [`Object::bytes`], and the
    /// excess of a longer one to the sink. [`Object::verify_whole`] verifies what arrived.
    pub fn get_whole(&self, name: Name, staging: *mut u8, sink: Sink, gets: &mut Gets) {
        gets.object(name, 0);
        gets.part(staging, self.bytes());
        gets.part(sink.address, 1.min(sink.bytes));
    }

    /// Verifies an object that was fetched as a whole: `arrived_bytes` bytes, as many of them as fit in
    /// `staging`. Damaged = no cell can be used; otherwise sound cells are found, in the order of
    /// the layers. A sound cell must still decode to the length by the layout.
    pub fn verify_whole(
        &self,
        staging: &[u8],
        arrived_bytes: u64,
        found: &mut Vec<Option<Found>>,
    ) -> Result<(), RemoteError> {
        found.clear();
        let whole = usize::try_from(arrived_bytes)
            .ok()
            .and_then(|arrived_bytes| staging.get(..arrived_bytes));
        let whole = whole.ok_or(RemoteError::Damaged)?;
        let record = self.record(whole, arrived_bytes)?;
        found.extend(record.cells().map(|cell| find(whole, &cell)));
        Ok(())
    }

    /// Decodes the header; fails unless it belongs to this object of `arrived_bytes` bytes.
    fn record<'b>(&self, bytes: &'b [u8], arrived_bytes: u64) -> Result<Record<'b>, RemoteError> {
        let record = decode(bytes).ok_or(RemoteError::Damaged)?;
        let blocks = record.head.blocks;
        let length_fits = arrived_bytes == u64::from(blocks) * BLOCK_BYTES as u64
            && (blocks == self.blocks || self.codec != Codec::None && blocks < self.blocks);
        if !length_fits || record.head != self.head(blocks) {
            return Err(RemoteError::Damaged);
        }
        let mut cells = (self.first..).zip(self.cells).zip(record.cells());
        let all_fit = cells.all(|((layer, shape), cell)| self.fits(layer, shape, &cell));
        if all_fit { Ok(record) } else { Err(RemoteError::Damaged) }
    }

    /// Whether a cell in the header is what the layout says.
    fn fits(&self, layer: u32, shape: &CellShape, cell: &Cell<'_>) -> bool {
        let wanted = shape.planes().iter();
        let same_kinds = cell
            .planes()
            .map(|plane| (plane.kind, plane.id, plane.version))
            .eq(wanted.clone().map(|&(kind, _)| (kind, 0, 0)));
        let lengths = cell.planes().map(|plane| plane.bytes);
        let lengths_fit = match cell.codec {
            0 => lengths.eq(wanted.map(|&(_, bytes)| bytes)),
            codec => {
                codec == self.codec as u16 && {
                    let all: [u64; 2] = pair(lengths);
                    self.may_be_coded(shape, all.into_iter().take(shape.planes().len()))
                }
            }
        };
        cell.layer == layer && cell.raw_bytes == shape.bytes() && same_kinds && lengths_fit
    }
}

/// Bytes of a cell and of a plane in the header.
const CELL_BYTES: usize = 32;
const PLANE_BYTES: usize = 24;

/// The first two of some numbers.
fn pair(numbers: impl Iterator<Item = u64>) -> [u64; 2] {
    let mut pair = [0; 2];
    pair.iter_mut().zip(numbers).for_each(|(to, number)| *to = number);
    pair
}

/// Bytes of padding after `bytes` bytes.
fn pad_of(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES as u64) - bytes
}

/// A cell in its object, if every byte of it is right.
fn find(object: &[u8], cell: &Cell<'_>) -> Option<Found> {
    let codec = Codec::from_code(u8::try_from(cell.codec).ok()?)?;
    let mut found = Found { codec, planes: [0..0, 0..0], count: 0 };
    let mut at = cell.block as usize * BLOCK_BYTES;
    for (plane, range) in cell.planes().zip(&mut found.planes) {
        let bytes = object.get(at..at.checked_add(usize::try_from(plane.bytes).ok()?)?)?;
        let says_its_length =
            || u64::from(u32_at(bytes, 0)) + cell::HEAD_BYTES as u64 == plane.bytes;
        if checksum(bytes) != plane.sum || codec != Codec::None && !says_its_length() {
            return None;
        }
        *range = at..at + bytes.len();
        found.count += 1;
        at += bytes.len();
    }
    Some(found)
}

/// The checksum of a plane.
///
/// # Safety
/// `bytes` bytes at `address` are valid and not written during the call.
unsafe fn sum_of(address: *const u8, bytes: u64) -> u64 {
    // SAFETY: the caller's guarantee; no plane is empty or without an address.
    checksum(unsafe { std::slice::from_raw_parts(address, bytes as usize) })
}

#[cfg(test)]
#[path = "object_tests.rs"]
mod tests;
