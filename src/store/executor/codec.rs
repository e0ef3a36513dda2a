//! Encodes cells in transfer to disk and decodes them in transfer back, in scratch memory that
//! the disk tier provides: a batch at a time, or a single record or cell when memory is short.

use std::ops::Range;

use crate::base::status::Result;
use crate::format::codec::cell::{self, Plane};
use crate::format::codec::{Codec, Shape};
use crate::format::segment::BLOCK_BYTES;
use crate::store::state::work::{Decoding, ReadBatch, WriteBatch};
use crate::tier::disk::{DiskTier, GetPlane, PutPlane, StagingGuard};

/// Bytes encoded at once, if there is memory for it and no record or cell is longer.
const MOST_BYTES: u64 = 12 << 20;

/// Writes a batch. Cells are encoded first; records without memory for that are written as they
/// are.
///
/// # Safety
/// As [`DiskTier::append`].
pub(super) unsafe fn write(batch: &mut WriteBatch, disk: &DiskTier) {
    let (mut next, all) = (0, batch.puts.len());
    while next < all {
        let need = |record| batch.puts.cells_of(record).map(|cell| room_of(batch, cell)).sum();
        let (mut records, bytes) = portion(next, all, MOST_BYTES, need);
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
                    used += unsafe { code(batch, cell, scratch, used) };
                }
            }
        }
        // SAFETY: the caller's promise; what is coded is memory of this call's own.
        unsafe { disk.append_some(&mut batch.puts, records) };
    }
}

/// The largest run from `next` on that needs at most `most`, one element at least, and what it
/// needs.
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

/// Memory for encoding a cell, in whole blocks; 0 if it is not to be encoded.
fn room_of(batch: &WriteBatch, cell: usize) -> u64 {
    let coding = batch.codings.get(cell).filter(|coding| coding.codec != Codec::None);
    let Some(coding) = coding else { return 0 };
    let planes = batch.puts.planes_at(cell).iter().zip(&coding.shapes);
    let room = |(plane, shape): (&PutPlane, &Shape)| {
        cell::room(coding.codec, shape, plane.bytes as usize) as u64
    };
    planes.map(room).sum::<u64>().next_multiple_of(BLOCK_BYTES as u64)
}

/// Encodes a cell into free scratch memory, if that makes it smaller. Returns the bytes used.
///
/// # Safety
/// As [`write`].
unsafe fn code(batch: &mut WriteBatch, cell: usize, scratch: &StagingGuard<'_>, used: u64) -> u64 {
    let room = room_of(batch, cell);
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
        // SAFETY: the caller's promise: planes are valid, and nothing writes them.
        bytes: unsafe { std::slice::from_raw_parts(plane.address, plane.bytes as usize) },
    };
    let raw: Vec<Plane<'_>> = planes.iter().zip(&coding.shapes).map(plane).collect();
    // SAFETY: a part of the scratch memory that nothing else uses.
    let out = unsafe { std::slice::from_raw_parts_mut(address, room as usize) };
    let mut lengths = [0; 2];
    let Some(lost) = cell::encode(coding.codec, &raw, out, &mut lengths) else { return 0 };
    coding.lost = lost;
    let stored: usize = lengths[..raw.len()].iter().sum();
    let whole = stored.next_multiple_of(BLOCK_BYTES);
    // Clears bytes of earlier cells.
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
    let (mut next, mut coded, all) = (0, 0, batch.gets.len());
    while next < all {
        let need = |get| bytes_of(batch, get);
        let (mut cells, bytes) = portion(next, all, MOST_BYTES, need);
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
        let rest = batch.decodings.get(coded..).unwrap_or(&[]);
        let count = rest.iter().take_while(|decoding| decoding.get < cells.end).count();
        let these = coded..coded + count;
        coded = these.end;
        match scratch {
            Err(error) if first > 0 => batch.gets.fail(cells.start, error),
            // SAFETY: the caller's promise.
            scratch => unsafe {
                read_portion(batch, disk, cells, these, scratch.ok().flatten().as_ref());
            },
        }
    }
}

/// Bytes of the blocks of an encoded cell; 0 for others.
fn bytes_of(batch: &ReadBatch, get: usize) -> u64 {
    batch.gets.get(get).map_or(0, |get| u64::from(get.blocks) * BLOCK_BYTES as u64)
}

/// # Safety
/// As [`read`].
unsafe fn read_portion(
    batch: &mut ReadBatch,
    disk: &DiskTier,
    cells: Range<usize>,
    coded: Range<usize>,
    scratch: Option<&StagingGuard<'_>>,
) {
    let decodings = batch.decodings.get(coded).unwrap_or(&[]);
    if let Some(scratch) = scratch {
        let mut used = 0;
        for decoding in decodings {
            let bytes = bytes_of(batch, decoding.get);
            let Some(address) = scratch.range(used, bytes) else { continue };
            batch.gets.set_address(decoding.get, address);
            used += bytes;
        }
    }
    // SAFETY: the caller's promise, and scratch memory of this call's own.
    unsafe { disk.read_some(&mut batch.gets, cells) };
    for decoding in decodings {
        let Some(get) = batch.gets.get(decoding.get) else { continue };
        if get.result.is_err() {
            continue;
        }
        // SAFETY: the cell was read and its seal was right; its memory is the caller's
        // promise.
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
