//! Reading cells and verifying their seals; reading single planes by the header of their record.

use std::ops::Range;

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::format::codec::cell;
use crate::format::record::{self, Cell, MAX_HEADER_BLOCKS, MAX_RECORD_BLOCKS, blocks_of};
use crate::format::seal::{Identity, MAX_PLANES, Plane, seal};
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::Access;
use crate::tier::disk::append::sum_of;
use crate::tier::disk::batch::{Get, GetPlane, Gets};
use crate::tier::disk::files::Pinned;
use crate::tier::disk::gather::{self, Gather, in_place, within};
use crate::tier::disk::{DiskTier, Spot, offset_of};

impl DiskTier {
    /// Reads cells into the caller's memory; each has a result.
    ///
    /// # Safety
    /// The memory of every plane is valid, and nothing else uses it during the call; with
    /// `padded`, also the memory after the last plane up to a whole block.
    pub unsafe fn read(&self, gets: &mut Gets) {
        // SAFETY: the caller's guarantee.
        unsafe { self.read_some(gets, 0..gets.len()) }
    }

    /// As [`DiskTier::read`], for some cells of a batch. The planes of an encoded cell get their
    /// positions in its blocks and their lengths.
    ///
    /// # Safety
    /// As there, for the planes and blocks of these cells.
    pub unsafe fn read_some(&self, gets: &mut Gets, which: Range<usize>) {
        let which = which.start..which.end.min(gets.len());
        let mut gather = Gather::new(&*self.files, &self.staging, Access::Read);
        let mut pins = Vec::new();
        for owner in which.clone() {
            // SAFETY: the caller's guarantee, here and below.
            unsafe { gather.make_way() };
            let segment = gets.gets[owner].spot.segment();
            let is_another = pins.last().is_some_and(|pinned: &Pinned| pinned.segment != segment);
            if is_another && self.state.lock().in_use() >= self.options.max_open {
                // The limit of open files is reached: read the collected cells first. SAFETY: as
                // above.
                unsafe { gather.flush() };
                pins.clear();
            }
            // SAFETY: as above.
            let begun = unsafe { self.begin_read(&mut gather, owner, gets, &mut pins) };
            gets.gets[owner].result = begun;
        }
        // SAFETY: as above.
        unsafe { gather.flush() };
        for (owner, error) in gather.failed.drain(..) {
            gets.gets[owner].result = Err(error);
        }
        drop(pins);
        let (mut corrupt, mut failed, mut bytes) = (0, 0, 0);
        let count = which.len() as u64;
        for at in which {
            if gets.gets[at].result.is_err() {
                failed += 1;
                continue;
            }
            // SAFETY: as above: the blocks of an encoded cell were read.
            unsafe { find_planes(gets, at) };
            let (get, planes) = (&gets.gets[at], gets.planes_of(&gets.gets[at]));
            bytes += planes.iter().map(|plane| plane.bytes).sum::<u64>();
            // SAFETY: the caller's guarantee: the planes' memory, written above.
            if self.options.verify && unsafe { sealed(get, planes) } != get.seal {
                corrupt += 1;
                gets.gets[at].result = Err(Error::from(Status::Corrupt));
            }
        }
        let mut state = self.state.lock();
        state.stats.reads += count;
        state.stats.read_bytes += bytes;
        state.stats.corrupt += corrupt;
        state.stats.failed_reads += failed;
    }

    fn pin_cell(&self, spot: Spot, stored: u64) -> Result<Pinned<'_>> {
        let pinned = self.pin(spot.segment())?;
        check_place(spot, stored, &pinned)?;
        Ok(pinned)
    }

    unsafe fn begin_read<'a>(
        &'a self,
        gather: &mut Gather<'_>,
        owner: usize,
        gets: &Gets,
        pins: &mut Vec<Pinned<'a>>,
    ) -> Result<()> {
        let Some(get) = gets.gets.get(owner) else { return Ok(()) };
        let (planes, coded) = match get.blocks {
            0 => (gets.planes_of(get), None),
            blocks => (&[][..], Some(blocks_at(get.address, blocks)?)),
        };
        let stored = match coded {
            Some(blocks) => blocks.bytes,
            None => checked_bytes(planes)?,
        };
        // Cells of a batch are mostly in the same segment.
        if pins.last().is_none_or(|pinned| pinned.segment != get.spot.segment()) {
            pins.push(self.pin(get.spot.segment())?);
        }
        let Some(pinned) = pins.last() else { return Ok(()) };
        check_place(get.spot, stored, pinned)?;
        let ranges = || {
            let all = planes.iter().map(GetPlane::range).chain(coded);
            all.filter(|range| range.bytes > 0)
        };
        let whole = blocks_of(stored) * BLOCK_BYTES as u64;
        let (file, offset) = (pinned.file, offset_of(get.spot.block()));
        let mut done = 0;
        if in_place(ranges(), self.align, get.padded) {
            for range in ranges() {
                let last = done + range.bytes == stored;
                let pad = if last && stored % self.align != 0 { whole - stored } else { 0 };
                gather.add(owner, file, offset + done, range.address, range.bytes + pad);
                done += range.bytes;
            }
            return Ok(());
        }
        while done < whole {
            // SAFETY: the caller's guarantee.
            let (from, bytes) = unsafe { gather.room(BLOCK_BYTES as u64, whole - done)? };
            let bytes = bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            gather.add(owner, file, offset + done, from, bytes);
            within(ranges(), done, bytes, |to, place, bytes| {
                gather.copy_back(from.wrapping_add(place as usize), to, bytes);
            });
            done += bytes;
        }
        Ok(())
    }

    /// The planes of a cell, from the header of its record; their combined seal must be `seal`.
    pub fn planes(&self, spot: Spot, identity: &Identity, seal: u64) -> Result<Vec<Plane>> {
        self.with_header(spot, identity, seal, |cell| Ok(cell.planes().collect()))
    }

    /// Reads one plane of a cell, selected by `plane.kind` and `plane.id`.
    ///
    /// # Safety
    /// The memory of the plane is valid, and nothing else uses it during the call.
    pub unsafe fn read_plane(
        &self,
        spot: Spot,
        identity: &Identity,
        seal: u64,
        plane: &GetPlane,
    ) -> Result<()> {
        let (start, found, stored) = self.with_header(spot, identity, seal, |cell| {
            let mut start = 0;
            for found in cell.planes() {
                if (found.kind, found.id) == (plane.kind, plane.id) {
                    return Ok((start, found, cell.stored_bytes));
                }
                start += found.bytes;
            }
            Err(Error::from(Status::NotFound))
        })?;
        if (found.bytes, found.version) != (plane.bytes, plane.version) {
            fail!(Corrupt, "the plane has {} bytes, version {}", found.bytes, found.version);
        }
        let pinned = self.pin_cell(spot, stored)?;
        let mut gather = Gather::new(&*self.files, &self.staging, Access::Read);
        let block = BLOCK_BYTES as u64;
        let mut at = start / block * block;
        while at < start + plane.bytes {
            let left = (start + plane.bytes - at).next_multiple_of(block);
            // SAFETY: the caller's guarantee, here and below.
            let (from, bytes) = unsafe { gather.room(block, left)? };
            let bytes = bytes / block * block;
            gather.add(0, pinned.file, offset_of(spot.block()) + at, from, bytes);
            let (low, high) = (at.max(start), (at + bytes).min(start + plane.bytes));
            let to = plane.address.wrapping_add((low - start) as usize);
            gather.copy_back(from.wrapping_add((low - at) as usize), to, high - low);
            at += bytes;
        }
        // SAFETY: as above.
        unsafe { gather.flush() };
        if let Some((_, error)) = gather.failed.pop() {
            return Err(error);
        }
        // SAFETY: the plane's memory, written above.
        if unsafe { sum_of(plane.address, plane.bytes) } != found.sum {
            self.state.lock().stats.corrupt += 1;
            return Err(Error::from(Status::Corrupt));
        }
        Ok(())
    }

    /// Reads the header of a cell's record, and finds the cell in it if the identity matches.
    fn with_header<T>(
        &self,
        spot: Spot,
        identity: &Identity,
        expected: u64,
        then: impl FnOnce(&Cell<'_>) -> Result<T>,
    ) -> Result<T> {
        let pinned = self.pin(spot.segment())?;
        let Some(at) = spot.record() else { fail!(NotFound, "the place of the cell is invalid") };
        let back = spot.block() - at;
        let blocks = back.min(MAX_HEADER_BLOCKS);
        if u64::from(at) + u64::from(blocks) > u64::from(pinned.blocks) || blocks == 0 {
            fail!(NotFound, "the place of the cell is outside its segment");
        }
        let buffer = self.staging.take()?;
        let bytes = u64::from(blocks) * BLOCK_BYTES as u64;
        // SAFETY: a staging buffer is longer than any header, and nothing else uses it.
        let read = unsafe {
            self.transfer_one(pinned.file, Access::Read, offset_of(at), buffer.address(), bytes)
        };
        // SAFETY: as above; written by the transfer, or zeros.
        let header = unsafe { std::slice::from_raw_parts(buffer.address(), bytes as usize) };
        read.and_then(|()| {
            let record = record::decode(header).filter(|record| {
                let head = &record.head;
                (head.store, head.segment, head.at) == (self.store, spot.segment(), at)
                    && (head.chunk.key, head.chunk.fingerprint)
                        == (identity.key, identity.fingerprint)
                    && head.chunk.valid_tokens == identity.valid_tokens
            });
            let cell = record.and_then(|record| record.cells().find(|cell| cell.block == back));
            let is_it = |cell: &Cell<'_>| {
                (cell.layer, cell.codec) == (identity.layer, identity.codec)
                    && seal(identity, cell.planes()) == expected
            };
            let Some(cell) = cell.filter(is_it) else {
                self.state.lock().stats.corrupt += 1;
                return Err(Error::from(Status::Corrupt));
            };
            then(&cell)
        })
    }
}

/// Total length of planes to read.
fn checked_bytes(planes: &[GetPlane]) -> Result<u64> {
    let sum = |all: u64, plane: &GetPlane| all.checked_add(plane.bytes);
    let stored = planes.iter().try_fold(0u64, sum).filter(|&n| n > 0 && n <= u32::MAX.into());
    let Some(stored) = stored.filter(|_| planes.len() <= MAX_PLANES) else {
        fail!(Invalid, "a cell has 1 to {MAX_PLANES} planes and 1 to 2^32 bytes");
    };
    if planes.iter().any(|plane| plane.bytes > 0 && plane.address.is_null()) {
        fail!(Invalid, "a plane has no address");
    }
    Ok(stored)
}

/// The memory for the blocks of an encoded cell.
fn blocks_at(address: *mut u8, blocks: u32) -> Result<gather::Range> {
    if address.is_null() || blocks > MAX_RECORD_BLOCKS {
        fail!(Invalid, "an encoded cell needs an address and at most {MAX_RECORD_BLOCKS} blocks");
    }
    Ok(gather::Range { address, bytes: u64::from(blocks) * BLOCK_BYTES as u64 })
}

/// Sets the positions of the planes of an encoded cell. If they cannot be found the planes get no
/// bytes: no seal matches that.
///
/// # Safety
/// Its blocks were read.
unsafe fn find_planes(gets: &mut Gets, at: usize) {
    let Some(Get { blocks: blocks @ 1.., address, planes, .. }) = gets.gets.get(at) else { return };
    let planes = gets.planes.get_mut(planes.clone()).unwrap_or(&mut []);
    let bytes = *blocks as usize * BLOCK_BYTES;
    // SAFETY: the caller's guarantee.
    let cell = unsafe { std::slice::from_raw_parts(*address, bytes) };
    let (mut offset, count) = (0, planes.len());
    let found = cell::find(
        cell,
        |plane, bytes| {
            if let Some(plane) = planes.get_mut(plane) {
                (plane.address, plane.bytes) = (address.wrapping_add(offset), bytes);
            }
            offset += bytes as usize;
        },
        count,
    );
    if !found {
        planes.iter_mut().for_each(|plane| plane.bytes = 0);
    }
}

/// Checks that a cell can be at a place.
fn check_place(spot: Spot, stored: u64, pinned: &Pinned<'_>) -> Result<()> {
    let end = u64::from(spot.block()) + blocks_of(stored);
    if spot.block() == 0 || end > u64::from(pinned.blocks) {
        fail!(NotFound, "a cell of {stored} bytes does not fit at its place");
    }
    Ok(())
}

/// The seal of a cell that was read.
unsafe fn sealed(get: &Get, planes: &[GetPlane]) -> u64 {
    let summed = planes.iter().map(|plane| Plane {
        kind: plane.kind,
        id: plane.id,
        version: plane.version,
        bytes: plane.bytes,
        // SAFETY: the caller's guarantee: the planes' memory is valid.
        sum: unsafe { sum_of(plane.address, plane.bytes) },
    });
    seal(&get.identity, summed)
}
