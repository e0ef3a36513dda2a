//! Reading cells and verifying their seals; reading single planes by the header of their record.

use std::ops::Range;

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::format::codec::cell;
use crate::format::record::{self, Cell, MAX_HEADER_BLOCKS, MAX_RECORD_BLOCKS, blocks_of};
use crate::format::seal::{Identity, MAX_PLANES, Plane, seal};
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::{Access, Next, Source};
use crate::tier::disk::append::sum_of;
use crate::tier::disk::batch::{Get, GetPlane, Gets};
use crate::tier::disk::files::Pinned;
use crate::tier::disk::gather::{self, Gather, in_place, within};
use crate::tier::disk::staging::STAGING_BYTES;
use crate::tier::disk::{DiskTier, Spot, offset_of};

#[derive(Default)]
struct Totals {
    cells: u64,
    corrupt: u64,
    failed: u64,
    bytes: u64,
}

/// The cell whose transfers are being queued, and how much of it is.
#[derive(Clone, Copy)]
struct Cursor {
    owner: usize,
    done: u64,
}

/// Supplies batches of cells to read.
pub trait ReadFeed {
    /// The next batch with its number, and which of its cells to read; `None` = none now.
    fn next(&mut self) -> Option<(usize, Gets, Range<usize>)>;

    /// All these cells of a batch have results.
    fn done(&mut self, number: usize, gets: Gets);
}

/// Batches of which cells are being read: while one arrives and is verified, the disk reads the
/// next one.
const MAX_OPEN_BATCHES: usize = 2;

/// A batch of which cells are being read.
struct OpenBatch {
    number: usize,
    gets: Gets,
    /// Owner of transfers of the first cell; the others follow.
    base: usize,
    /// Cells to begin.
    which: Range<usize>,
    /// Transfers of each cell in flight.
    pending: Vec<u32>,
    /// Cells without a final result.
    left: usize,
}

/// Cells to read, as a source of reads. Cells that have arrived are verified while others are read.
///
/// The memory of all planes is valid, and nothing else uses it: the caller's guarantee.
struct Reading<'a> {
    tier: &'a DiskTier,
    feed: &'a mut dyn ReadFeed,
    /// In the order of their bases.
    batches: Vec<OpenBatch>,
    /// Owner of the first cell of the next batch.
    next_base: usize,
    gather: Gather<'a>,
    /// Segments in use, each with the base of the last batch that reads from it.
    pins: Vec<(usize, Pinned<'a>)>,
    cursor: Option<Cursor>,
    totals: Totals,
}

impl Source for Reading<'_> {
    fn next(&mut self) -> Next {
        loop {
            if let Some(next) = self.gather.next() {
                if let Next::Piece(owner, _) = &next {
                    let (at, cell) = self.place(*owner);
                    self.batches[at].pending[cell] += 1;
                }
                return next;
            }
            let Some(mut cursor) = self.cursor.take().or_else(|| self.begin()) else {
                // What is in flight will be verified here.
                return if self.gather.is_busy() { Next::Wait } else { Next::End };
            };
            match self.queue_cell(&mut cursor) {
                Ok(true) => {}
                Ok(false) => {
                    self.cursor = Some(cursor);
                    if !self.gather.has_queued() {
                        return Next::Wait;
                    }
                }
                Err(error) => {
                    self.fail(cursor.owner, error);
                    self.end_if_through(cursor.owner);
                }
            }
        }
    }

    fn ended(&mut self, owner: usize, result: Result<()>) {
        self.gather.ended();
        let (at, cell) = self.place(owner);
        self.batches[at].pending[cell] -= 1;
        if let Err(error) = result {
            self.fail(owner, error);
        }
        self.end_if_through(owner);
    }
}

impl Reading<'_> {
    /// The position of a cell's batch, and the cell's index in it.
    fn place(&self, owner: usize) -> (usize, usize) {
        let at = self.batches.partition_point(|batch| batch.base <= owner) - 1;
        (at, owner - self.batches[at].base)
    }

    /// Begins the next cell, of another batch if there is none in the open ones.
    fn begin(&mut self) -> Option<Cursor> {
        loop {
            if let Some(batch) = self.batches.last_mut()
                && let Some(cell) = batch.which.next()
            {
                batch.gets.gets[cell].result = Err(Error::from(Status::Again));
                return Some(Cursor { owner: batch.base + cell, done: 0 });
            }
            // Others may wait for staging memory that this call uses.
            let is_bound = self.next_base > 0 && self.gather.uses_staging();
            if self.batches.len() >= MAX_OPEN_BATCHES || is_bound {
                return None;
            }
            let (number, gets, which) = self.feed.next()?;
            let which = which.start..which.end.min(gets.len());
            if which.is_empty() {
                self.feed.done(number, gets);
                continue;
            }
            let (base, pending) = (self.next_base, vec![0; gets.len()]);
            self.next_base += gets.len();
            let left = which.len();
            self.totals.cells += left as u64;
            self.batches.push(OpenBatch { number, gets, base, which, pending, left });
        }
    }

    fn fail(&mut self, owner: usize, error: Error) {
        let (at, cell) = self.place(owner);
        let result = &mut self.batches[at].gets.gets[cell].result;
        if result.as_ref().err().is_none_or(|error| error.status() == Status::Again) {
            self.totals.failed += 1;
            *result = Err(error);
        }
    }

    /// Verifies a cell if all of it has arrived, and returns its batch to the feed if that was the last
    /// one.
    fn end_if_through(&mut self, owner: usize) {
        let (at, cell) = self.place(owner);
        let is_begun = self.cursor.is_none_or(|cursor| cursor.owner != owner);
        if self.batches[at].pending[cell] > 0
            || !is_begun
            || self.gather.queued_owner() == Some(owner)
        {
            return;
        }
        if self.batches[at].gets.gets[cell].result.is_ok() {
            self.gather.copy_all_back(|of| of == owner);
            let (tier, totals) = (self.tier, &mut self.totals);
            // SAFETY: the caller's guarantee; all transfers of the cell have ended.
            unsafe { verify(&mut self.batches[at].gets, cell, tier, totals) };
        }
        self.batches[at].left -= 1;
        if self.batches[at].left == 0 {
            let batch = self.batches.remove(at);
            let oldest = self.batches.first().map_or(self.next_base, |batch| batch.base);
            self.pins.retain(|(base, _)| *base >= oldest);
            self.feed.done(batch.number, batch.gets);
        }
    }

    /// Opens the segment of a cell of a batch. False = transfers must end first.
    fn pin(&mut self, segment: u64, base: usize) -> Result<bool> {
        // Cells of a batch are mostly in the same segment.
        if let Some((last, _)) = self.pins.last_mut().filter(|(_, pin)| pin.segment == segment) {
            *last = base;
            return Ok(true);
        }
        let in_use = self.tier.state.lock().in_use();
        if !self.pins.is_empty() && in_use >= self.tier.options.max_open {
            // The limit of open files is reached: close those of the cells that were read.
            if self.gather.is_busy() {
                return Ok(false);
            }
            self.pins.clear();
        }
        self.pins.push((base, self.tier.pin(segment)?));
        Ok(true)
    }

    /// Queues the transfers of a cell, as far as there is staging memory. False = something is left.
    fn queue_cell(&mut self, cursor: &mut Cursor) -> Result<bool> {
        let owner = cursor.owner;
        let (at, cell) = self.place(owner);
        let (spot, base) = (self.batches[at].gets.gets[cell].spot, self.batches[at].base);
        if !self.pin(spot.segment(), base)? {
            return Ok(false);
        }
        let Some((_, pinned)) = self.pins.last() else { return Ok(false) };
        let gets = &mut self.batches[at].gets;
        let get = &gets.gets[cell];
        let (planes, coded) = match get.blocks {
            0 => (gets.planes_of(get), None),
            blocks => (&[][..], Some(blocks_at(get.address, blocks)?)),
        };
        let stored = match coded {
            Some(blocks) => blocks.bytes,
            None => checked_bytes(planes)?,
        };
        check_place(spot, stored, pinned)?;
        let ranges = || {
            let all = planes.iter().map(GetPlane::range).chain(coded);
            all.filter(|range| range.bytes > 0)
        };
        let (block, align) = (BLOCK_BYTES as u64, self.tier.align);
        let whole = blocks_of(stored) * block;
        let (file, offset) = (pinned.file, offset_of(spot.block()));
        if in_place(ranges(), align, get.padded) {
            for range in ranges() {
                let last = cursor.done + range.bytes == stored;
                let pad = if last && stored % align != 0 { whole - stored } else { 0 };
                self.gather.add(
                    owner,
                    file,
                    offset + cursor.done,
                    range.address,
                    range.bytes + pad,
                );
                cursor.done += range.bytes;
            }
            cursor.done = whole;
        }
        while cursor.done < whole {
            let Some((from, bytes)) = self.gather.room(block, whole - cursor.done)? else {
                return Ok(false);
            };
            let bytes = bytes / block * block;
            self.gather.add(owner, file, offset + cursor.done, from, bytes);
            within(ranges(), cursor.done, bytes, |to, place, bytes| {
                self.gather.copy_back(owner, from.wrapping_add(place as usize), to, bytes);
            });
            cursor.done += bytes;
        }
        let result = &mut gets.gets[cell].result;
        if result.as_ref().is_err_and(|error| error.status() == Status::Again) {
            *result = Ok(());
        }
        Ok(true)
    }
}

/// Some cells of one batch.
struct Once<'a> {
    gets: &'a mut Gets,
    which: Option<Range<usize>>,
}

impl ReadFeed for Once<'_> {
    fn next(&mut self) -> Option<(usize, Gets, Range<usize>)> {
        let which = self.which.take()?;
        Some((0, std::mem::take(self.gets), which))
    }

    fn done(&mut self, _: usize, gets: Gets) {
        *self.gets = gets;
    }
}

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
        // SAFETY: the caller's guarantee.
        unsafe { self.read_all(&mut Once { gets, which: Some(which) }) }
    }

    /// Reads batches of cells until the feed has no more. The next batch begins while the last one
    /// arrives, so that the disk always has work.
    ///
    /// # Safety
    /// As for [`DiskTier::read_some`], for each batch from [`ReadFeed::next`] to [`ReadFeed::done`].
    pub unsafe fn read_all(&self, feed: &mut dyn ReadFeed) {
        // SAFETY: the caller's guarantee.
        while unsafe { self.read_while_free(feed) } {}
    }

    /// The same, until the feed has no more, or staging memory must be returned first. Whether
    /// anything was read.
    ///
    /// # Safety
    /// As there.
    unsafe fn read_while_free(&self, feed: &mut dyn ReadFeed) -> bool {
        let gather = Gather::new(&self.staging, Access::Read);
        let (batches, pins, totals) = (Vec::new(), Vec::new(), Totals::default());
        let (next_base, cursor) = (0, None);
        let mut reading =
            Reading { tier: self, feed, batches, next_base, gather, pins, cursor, totals };
        // SAFETY: pieces name memory of planes, which the caller guarantees, and of the gather.
        unsafe { self.files.stream(&mut reading) };
        // Cells that could not be read to their end are read again: their status is AGAIN.
        while let Some(batch) = reading.batches.pop() {
            reading.feed.done(batch.number, batch.gets);
        }
        let (any, totals) = (reading.next_base > 0, std::mem::take(&mut reading.totals));
        drop(reading);
        let mut state = self.state.lock();
        state.stats.reads += totals.cells;
        state.stats.read_bytes += totals.bytes;
        state.stats.corrupt += totals.corrupt;
        state.stats.failed_reads += totals.failed;
        any
    }

    fn pin_cell(&self, spot: Spot, stored: u64) -> Result<Pinned<'_>> {
        let pinned = self.pin(spot.segment())?;
        check_place(spot, stored, &pinned)?;
        Ok(pinned)
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
        let buffer = self.staging.take()?;
        let (block, end) = (BLOCK_BYTES as u64, start + plane.bytes);
        let mut at = start / block * block;
        while at < end {
            let bytes = (end - at).next_multiple_of(block).min(STAGING_BYTES);
            let (offset, from) = (offset_of(spot.block()) + at, buffer.address());
            // SAFETY: staging memory that nothing else uses.
            unsafe { self.transfer_one(pinned.file, Access::Read, offset, from, bytes)? };
            let (low, high) = (at.max(start), (at + bytes).min(end));
            // SAFETY: from that memory to the plane's, which the caller guarantees.
            unsafe {
                let to = plane.address.add((low - start) as usize);
                to.copy_from_nonoverlapping(from.add((low - at) as usize), (high - low) as usize);
            }
            at += bytes;
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

/// Verifies a cell, all bytes of which were read.
///
/// # Safety
/// The memory of its planes is valid, and was written by the transfers.
unsafe fn verify(gets: &mut Gets, cell: usize, tier: &DiskTier, totals: &mut Totals) {
    // SAFETY: the blocks of an encoded cell were read.
    unsafe { find_planes(gets, cell) };
    let (get, planes) = (&gets.gets[cell], gets.planes_of(&gets.gets[cell]));
    totals.bytes += planes.iter().map(|plane| plane.bytes).sum::<u64>();
    // SAFETY: the caller's guarantee.
    if tier.options.verify && unsafe { sealed(get, planes) } != get.seal {
        totals.corrupt += 1;
        gets.gets[cell].result = Err(Error::from(Status::Corrupt));
    }
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
