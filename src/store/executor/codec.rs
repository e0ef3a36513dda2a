//! Encodes cells before disk writes and decodes them after disk reads, in scratch memory of the
//! disk tier: many records or cells at once, or a single one when memory is short.

use std::ops::Range;

use crate::base::status::Result;
use crate::format::codec::cell::{self, Plane};
use crate::format::codec::{Codec, Shape};
use crate::format::segment::BLOCK_BYTES;
use crate::store::state::work::{Decoding, ReadBatch, WriteBatch};
use crate::tier::disk::{DiskTier, GetPlane, PutPlane, StagingGuard};

/// Most bytes of scratch memory used at once, unless one record or cell needs more.
const MAX_SCRATCH_BYTES: u64 = 12 << 20;

/// Encodes the cells of a batch and writes it. A record for which there is no scratch memory is
/// written without encoding.
///
/// # Safety
/// As [`DiskTier::append`].
pub(super) unsafe fn write(batch: &mut WriteBatch, disk: &DiskTier) {
    let (mut next, all) = (0, batch.puts.len());
    while next < all {
        let need =
            |record| batch.puts.cells_of(record).map(|cell| scratch_bytes(batch, cell)).sum();
        let (mut records, bytes) = portion(next, all, MAX_SCRATCH_BYTES, need);
        let scratch = match bytes {
            0 => None,
            _ => disk
                .scratch(0, bytes)
                .inspect_err(|error| log::debug!("a record is written without encoding: {error}"))
                .ok(),
        };
        if let Some(scratch) = scratch.as_ref().filter(|scratch| scratch.bytes() < bytes) {
            records = portion(next, all, scratch.bytes(), need).0;
        }
        next = records.end;
        if let Some(scratch) = &scratch {
            let mut used = 0;
            for record in records.clone() {
                for cell in batch.puts.cells_of(record) {
                    // SAFETY: the caller's promise.
                    used += unsafe { encode(batch, cell, scratch, used) };
                }
            }
        }
        // SAFETY: the caller's promise; encoded cells are in scratch memory that only this call
        // uses.
        unsafe { disk.append_some(&mut batch.puts, records) };
    }
}

/// The largest range that begins at `next` and needs at most `most` bytes, at least one element;
/// and the bytes that it needs.
fn portion(next: usize, all: usize, most: u64, need: impl Fn(usize) -> u64) -> (Range<usize>, u64) {
    let (mut end, mut bytes) = (next, 0u64);
    while end < all {
        let more = need(end);
        if end > next && bytes.saturating_add(more) > most {
            break;
        }
        (end, bytes) = (end + 1, bytes.saturating_add(more));
    }
    (next..end, bytes)
}

/// Bytes of scratch memory needed to encode a cell, in whole blocks; 0 if it is not encoded.
fn scratch_bytes(batch: &WriteBatch, cell: usize) -> u64 {
    let coding = batch.codings.get(cell).filter(|coding| coding.codec != Codec::None);
    let Some(coding) = coding else { return 0 };
    let planes = batch.puts.planes_at(cell).iter().zip(&coding.shapes);
    let room = |(plane, shape): (&PutPlane, &Shape)| {
        cell::room(coding.codec, shape, plane.bytes as usize) as u64
    };
    planes.map(room).sum::<u64>().next_multiple_of(BLOCK_BYTES as u64)
}

/// Encodes a cell into scratch memory at offset `used`, unless that would not make it smaller.
/// Returns the bytes of scratch memory that the encoded cell occupies.
///
/// # Safety
/// As [`write`].
unsafe fn encode(
    batch: &mut WriteBatch,
    cell: usize,
    scratch: &StagingGuard<'_>,
    used: u64,
) -> u64 {
    let room = scratch_bytes(batch, cell);
    let (Some(coding), Some(address)) = (batch.codings.get_mut(cell), scratch.range(used, room))
    else {
        return 0;
    };
    let planes = batch.puts.planes_at(cell);
    if room == 0 || planes.len() > coding.shapes.len() {
        return 0;
    }
    let plane = |(plane, &shape): (&PutPlane, &Shape)| Plane {
        shape,
        // SAFETY: the caller's promise: planes are valid and not written.
        bytes: unsafe { std::slice::from_raw_parts(plane.address, plane.bytes as usize) },
    };
    let raw: Vec<Plane<'_>> = planes.iter().zip(&coding.shapes).map(plane).collect();
    // SAFETY: this part of the scratch memory is not used by other cells.
    let out = unsafe { std::slice::from_raw_parts_mut(address, room as usize) };
    let mut lengths = [0; 2];
    let Some(lost) = cell::encode(coding.codec, &raw, out, &mut lengths) else { return 0 };
    coding.lost = lost;
    let stored: usize = lengths[..raw.len()].iter().sum();
    let whole = stored.next_multiple_of(BLOCK_BYTES);
    // Clear bytes of cells that used this memory before.
    out[stored..whole].fill(0);
    let (codec, count) = (coding.codec as u16, raw.len());
    batch.puts.code(cell, codec, address, &lengths[..count]);
    whole as u64
}

/// Reads a batch and decodes encoded cells.
///
/// # Safety
/// As [`DiskTier::read`], for the memory of the cells.
pub(super) unsafe fn read(batch: &mut ReadBatch, disk: &DiskTier) {
    let (mut next, mut next_decoding, all) = (0, 0, batch.gets.len());
    while next < all {
        let need = |get| read_scratch_bytes(batch, get);
        let (mut cells, bytes) = portion(next, all, MAX_SCRATCH_BYTES, need);
        let first = need(next);
        let scratch = if bytes > 0 { disk.scratch(first, bytes).map(Some) } else { Ok(None) };
        match &scratch {
            Ok(Some(scratch)) if scratch.bytes() < bytes => {
                cells = portion(next, all, scratch.bytes(), need).0;
            }
            Err(_) => cells.end = next + 1,
            Ok(_) => {}
        }
        next = cells.end;
        let rest = batch.decodings.get(next_decoding..).unwrap_or(&[]);
        let count = rest.iter().take_while(|decoding| decoding.get < cells.end).count();
        let decodings = next_decoding..next_decoding + count;
        next_decoding = decodings.end;
        match scratch {
            Err(error) if first > 0 => batch.gets.fail(cells.start, error),
            // SAFETY: the caller's promise.
            scratch => unsafe {
                read_portion(batch, disk, cells, decodings, scratch.ok().flatten().as_ref());
            },
        }
    }
}

/// Bytes of scratch memory needed to read an encoded cell, in whole blocks; 0 for other cells.
fn read_scratch_bytes(batch: &ReadBatch, get: usize) -> u64 {
    batch.gets.get(get).map_or(0, |get| u64::from(get.blocks) * BLOCK_BYTES as u64)
}

/// # Safety
/// As [`read`].
unsafe fn read_portion(
    batch: &mut ReadBatch,
    disk: &DiskTier,
    cells: Range<usize>,
    decodings: Range<usize>,
    scratch: Option<&StagingGuard<'_>>,
) {
    let decodings = batch.decodings.get(decodings).unwrap_or(&[]);
    if let Some(scratch) = scratch {
        let mut used = 0;
        for decoding in decodings {
            let bytes = read_scratch_bytes(batch, decoding.get);
            let Some(address) = scratch.range(used, bytes) else { continue };
            batch.gets.set_address(decoding.get, address);
            used += bytes;
        }
    }
    // SAFETY: the caller's promise; the scratch memory is used by this call only.
    unsafe { disk.read_some(&mut batch.gets, cells) };
    for decoding in decodings {
        let Some(get) = batch.gets.get(decoding.get) else { continue };
        if get.result.is_err() {
            continue;
        }
        // SAFETY: the cell was read and its seal matches; the caller guarantees the memory of the
        // cell.
        if let Err(error) = unsafe { decode(decoding, batch.gets.planes_of(get)) } {
            batch.gets.fail(decoding.get, error);
        }
    }
}

/// # Safety
/// The planes are valid. The destination is valid and not shared.
unsafe fn decode(decoding: &Decoding, planes: &[GetPlane]) -> Result<()> {
    let mut to = decoding.address;
    let lengths = [decoding.planes.k_bytes, decoding.planes.v_bytes];
    let lengths = lengths.into_iter().filter(|&bytes| bytes > 0);
    for ((plane, raw_bytes), shape) in planes.iter().zip(lengths).zip(&decoding.shapes) {
        // SAFETY: the caller's promise.
        let (stored, out) = unsafe {
            (
                std::slice::from_raw_parts(plane.address.cast_const(), plane.bytes as usize),
                std::slice::from_raw_parts_mut(to, raw_bytes as usize),
            )
        };
        cell::decode(decoding.codec, shape, stored, out)?;
        to = to.wrapping_add(raw_bytes as usize);
    }
    Ok(())
}
