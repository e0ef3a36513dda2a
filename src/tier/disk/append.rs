//! Appending records: space is taken under the lock, records are written outside it. Many are in
//! flight while the next one is prepared.

use std::ops::Range;

use crate::base::checksum::checksum;
use crate::base::status::{Error, Result};
use crate::fail;
use crate::format::record::{
    Encoder, Head, Kind, MAX_CELLS, MAX_RECORD_BLOCKS, blocks_of, header_blocks,
};
use crate::format::seal::{Identity, MAX_PLANES, Plane, seal};
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::{Access, FileId, Next, Source};
use crate::tier::disk::batch::{Mark, PutPlane, Puts};
use crate::tier::disk::files::{Pinned, refusal};
use crate::tier::disk::gather::{Gather, in_place, within};
use crate::tier::disk::grow::Rest;
use crate::tier::disk::state::{Front, Grant};
use crate::tier::disk::{DiskTier, Spot, blocks_u32, offset_of};

/// A record in flight.
struct PendingRecord<'a> {
    record: usize,
    header_blocks: u32,
    blocks: u32,
    grant: Grant,
    pinned: Pinned<'a>,
    failed: Option<Error>,
}

/// The position in the last record: its header and some of its cells are queued.
#[derive(Clone, Copy)]
struct Cursor {
    /// Index of the next cell in the batch.
    cell: usize,
    /// Bytes of it that are queued.
    done: u64,
    /// Its first block in the segment; 0 = the header is not queued yet.
    at: u32,
}

/// Records to append, as a source of writes. While earlier records are written, it computes the
/// checksums of the next one and takes space for it.
///
/// The memory of all planes is valid, and no one writes it: the caller's guarantee.
struct Append<'a> {
    tier: &'a DiskTier,
    puts: &'a mut Puts,
    /// Records to begin.
    records: Range<usize>,
    front: Front,
    gather: Gather<'a>,
    /// Records that were begun; their indices are the owners of transfers.
    jobs: Vec<PendingRecord<'a>>,
    cursor: Option<Cursor>,
    /// Rests of segments to void. The first ones, `queued` in number, are queued or in flight. Their
    /// owners count down from `usize::MAX`.
    rests: Vec<(Rest, Pinned<'a>)>,
    queued: usize,
}

impl Source for Append<'_> {
    fn next(&mut self) -> Next {
        loop {
            if let Some(next) = self.gather.next() {
                return next;
            }
            match self.queue_rest() {
                Ok(Some(true)) => continue,
                Ok(Some(false)) => return Next::Wait,
                Ok(None) | Err(_) => {}
            }
            if self.cursor.is_none() && !self.begin_next() {
                return Next::End;
            }
            let Some(cursor) = self.cursor.take() else { continue };
            match self.queue_record(cursor) {
                Ok(None) => {}
                Ok(Some(rest)) => {
                    self.cursor = Some(rest);
                    if !self.gather.has_queued() {
                        return Next::Wait;
                    }
                }
                Err(error) => self.fail(self.jobs.len() - 1, error),
            }
        }
    }

    fn ended(&mut self, owner: usize, result: Result<()>) {
        self.gather.ended();
        if let Some((rest, _)) = self.rests.get(usize::MAX - owner) {
            self.tier.rest_is_void(rest);
        } else if let Err(error) = result {
            self.fail(owner, refusal(error));
        }
    }
}

impl Append<'_> {
    /// Queues the next void. None = there is none; false = transfers must end first.
    fn queue_rest(&mut self) -> Result<Option<bool>> {
        let Some((rest, pinned)) = self.rests.get(self.queued) else { return Ok(None) };
        let block = BLOCK_BYTES as u64;
        let Some((address, _)) = self.gather.room(block, block)? else { return Ok(Some(false)) };
        // SAFETY: a block of staging memory, for this gather only.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address, BLOCK_BYTES) };
        self.tier.encode_void(bytes, &rest.grant, rest.blocks);
        let (owner, offset) = (usize::MAX - self.queued, offset_of(rest.grant.at));
        self.gather.add(owner, pinned.file, offset, address, block);
        self.queued += 1;
        Ok(Some(true))
    }

    /// Begins a record, or stores why it cannot be written. False = there is none.
    fn begin_next(&mut self) -> bool {
        let Some(record) = self.records.next() else { return false };
        // SAFETY: the caller's guarantee.
        let begun = unsafe { measure(self.puts, record) }.and_then(|(header, blocks)| {
            self.tier.begin(self.puts, record, header, blocks, self.front)
        });
        match begun {
            Ok((job, rest)) => {
                if let Some(rest) = rest {
                    match self.tier.pin(rest.grant.segment) {
                        Ok(pinned) => self.rests.push((rest, pinned)),
                        Err(_) => self.tier.rest_is_void(&rest),
                    }
                }
                self.jobs.push(job);
                let cell = self.puts.cells_of(record).start;
                self.cursor = Some(Cursor { cell, done: 0, at: 0 });
            }
            Err(error) => self.puts.records[record].result = Err(error),
        }
        true
    }

    fn fail(&mut self, owner: usize, error: Error) {
        if let Some(job) = self.jobs.get_mut(owner) {
            job.failed.get_or_insert(error);
        }
    }

    /// Queues the transfers of the last record, as far as there is staging memory; returns the rest.
    fn queue_record(&mut self, mut cursor: Cursor) -> Result<Option<Cursor>> {
        let owner = self.jobs.len() - 1;
        let job = &self.jobs[owner];
        let (file, record, grant) = (job.pinned.file, job.record, job.grant);
        if cursor.at == 0 {
            let bytes = u64::from(job.header_blocks) * BLOCK_BYTES as u64;
            let Some((header, _)) = self.gather.room(bytes, bytes)? else {
                return Ok(Some(cursor));
            };
            // SAFETY: staging memory of that length, for this gather only.
            let header_bytes = unsafe { std::slice::from_raw_parts_mut(header, bytes as usize) };
            self.tier.encode(header_bytes, self.puts, job);
            self.gather.add(owner, file, offset_of(grant.at), header, bytes);
            cursor.at = grant.at + job.header_blocks;
        }
        while cursor.cell < self.puts.cells_of(record).end {
            if !self.queue_cell(owner, file, &mut cursor)? {
                return Ok(Some(cursor));
            }
            cursor.at += blocks_u32(self.puts.cells[cursor.cell].stored_bytes);
            (cursor.cell, cursor.done) = (cursor.cell + 1, 0);
        }
        Ok(None)
    }

    /// The same for a cell; false = something is left.
    fn queue_cell(&mut self, owner: usize, file: FileId, cursor: &mut Cursor) -> Result<bool> {
        let cell = &self.puts.cells[cursor.cell];
        let planes = self.puts.planes_of(cell);
        let (offset, stored) = (offset_of(cursor.at), cell.stored_bytes);
        let whole = blocks_of(stored) * BLOCK_BYTES as u64;
        let ranges = || planes.iter().map(PutPlane::range).filter(|range| range.bytes > 0);
        if in_place(ranges(), self.tier.align, cell.padded) {
            let mut done = 0;
            for range in ranges() {
                let last = done + range.bytes == stored;
                // Without alignment the padding of a block is not written.
                let pad = if last && cell.padded { whole - stored } else { 0 };
                self.gather.add(owner, file, offset + done, range.address, range.bytes + pad);
                done += range.bytes;
            }
            return Ok(true);
        }
        while cursor.done < whole {
            let block = BLOCK_BYTES as u64;
            let Some((to, bytes)) = self.gather.room(block, whole - cursor.done)? else {
                return Ok(false);
            };
            let bytes = bytes / block * block;
            let filled = bytes.min(stored - cursor.done);
            within(ranges(), cursor.done, filled, |from, place, bytes| {
                // SAFETY: a part of a plane, into staging memory that has room for it.
                unsafe { to.add(place as usize).copy_from_nonoverlapping(from, bytes as usize) };
            });
            // SAFETY: the rest of the same staging memory.
            unsafe { to.add(filled as usize).write_bytes(0, (bytes - filled) as usize) };
            self.gather.add(owner, file, offset + cursor.done, to, bytes);
            cursor.done += bytes;
        }
        Ok(true)
    }
}

impl DiskTier {
    /// Writes records; each has a result, and its cells get their places. A failed record takes no
    /// space from others and may be tried again. BUDGET = there is no space: drop cells and
    /// compact; LIMIT = the record is longer than a segment.
    ///
    /// # Safety
    /// The memory of every plane is valid, and no one writes it during the call.
    pub unsafe fn append(&self, puts: &mut Puts) {
        // SAFETY: the caller's guarantee.
        unsafe { self.append_at(puts, 0..puts.len(), Front::Callers) }
    }

    /// As [`DiskTier::append`], for some records of a batch.
    ///
    /// # Safety
    /// As there, for the planes of these records.
    pub unsafe fn append_some(&self, puts: &mut Puts, records: Range<usize>) {
        // SAFETY: the caller's guarantee.
        unsafe { self.append_at(puts, records, Front::Callers) }
    }

    /// The same, at one of the write positions.
    pub(super) unsafe fn append_at(&self, puts: &mut Puts, records: Range<usize>, front: Front) {
        let records = records.start..records.end.min(puts.len());
        let mut jobs = Vec::new();
        if let Err(error) = jobs.try_reserve_exact(records.len()) {
            let error = Error::new(crate::base::status::Status::NoMem, error.to_string());
            let puts = puts.records.get_mut(records).unwrap_or(&mut []);
            puts.iter_mut().for_each(|put| put.result = Err(error.clone()));
            return;
        }
        let gather = Gather::new(&self.staging, Access::Write);
        let (cursor, rests, queued) = (None, Vec::new(), 0);
        let mut append =
            Append { tier: self, puts, records, front, gather, jobs, cursor, rests, queued };
        // SAFETY: pieces name memory of planes, which the caller guarantees, and of the gather.
        unsafe { self.files.stream(&mut append) };
        // What could not be queued is left without a void.
        append.rests.iter().skip(append.queued).for_each(|(rest, _)| self.rest_is_void(rest));
        let Append { puts, mut jobs, gather, rests, .. } = append;
        // Their memory is needed for voids.
        drop((gather, rests));
        for job in jobs.iter().filter(|job| job.failed.is_some()) {
            // Best effort: an opening also skips a hole without it, only slower.
            let _ = self.write_void(job.pinned.file, &job.grant, job.blocks);
        }
        self.finish(puts, &mut jobs, front);
    }

    /// Takes space for one record, and opens its segment's file.
    fn begin(
        &self,
        puts: &Puts,
        record: usize,
        header_blocks: u32,
        blocks: u32,
        front: Front,
    ) -> Result<(PendingRecord<'_>, Option<Rest>)> {
        let (grant, rest) = self.room_and_rest(front, blocks, puts.records[record].born)?;
        let cells = blocks - header_blocks;
        match self.pin(grant.segment) {
            Ok(pinned) => {
                let mut state = self.state.lock();
                if let Some(segment) = state.segments.get_mut(&grant.segment) {
                    segment.live += cells;
                }
                drop(state);
                let failed = None;
                let job = PendingRecord { record, header_blocks, blocks, grant, pinned, failed };
                Ok((job, rest))
            }
            Err(error) => {
                rest.iter().for_each(|rest| self.rest_is_void(rest));
                let mut state = self.state.lock();
                state.leave_front(grant.segment);
                if let Some(segment) = state.segments.get_mut(&grant.segment) {
                    segment.writing -= 1;
                }
                Err(error)
            }
        }
    }

    fn encode(&self, bytes: &mut [u8], puts: &mut Puts, job: &PendingRecord<'_>) {
        let Some(put) = puts.records.get(job.record) else { return };
        let Grant { segment, at, number } = job.grant;
        let mut encoder = Encoder::new(bytes);
        let mut block = job.header_blocks;
        for cell in puts.cells.get_mut(put.cells.clone()).unwrap_or(&mut []) {
            let planes = puts.planes.get(cell.planes.clone()).unwrap_or(&[]);
            let lengths = [cell.stored_bytes, cell.raw_bytes];
            encoder.cell(cell.layer, cell.codec, planes.len() as u16, block, lengths);
            planes.iter().for_each(|plane| encoder.plane(&described(plane)));
            cell.spot = Spot::new(segment, at + block, block);
            block += blocks_u32(cell.stored_bytes);
        }
        encoder.finish(&Head {
            kind: Kind::Cells as u16,
            header_blocks: job.header_blocks,
            blocks: job.blocks,
            number,
            born: if put.born == 0 { number } else { put.born },
            segment,
            at,
            items: put.cells.len() as u32,
            store: self.store,
            chunk: put.chunk,
            body_bytes: 0,
            until: 0,
            from: put.from,
        });
    }

    fn finish(&self, puts: &mut Puts, jobs: &mut [PendingRecord<'_>], front: Front) {
        let mut state = self.state.lock();
        for job in jobs {
            let cells = job.blocks - job.header_blocks;
            let cell_bytes = u64::from(cells) * BLOCK_BYTES as u64;
            let mut mark = Mark { segment: job.grant.segment, write: 0 };
            if job.failed.is_some() {
                // A place that failed is not written again.
                state.leave_front(job.grant.segment);
                state.drop_blocks(job.grant.segment, cells);
                state.stats.failed_records += 1;
            } else {
                state.stats.records += 1;
                state.stats.overhead_bytes += u64::from(job.header_blocks) * BLOCK_BYTES as u64;
                match front {
                    Front::Callers => state.stats.appended_bytes += cell_bytes,
                    Front::Compaction => state.stats.compacted_bytes += cell_bytes,
                }
            }
            if let Some(segment) = state.segments.get_mut(&job.grant.segment) {
                segment.writing -= 1;
                segment.dirty += 1;
                mark.write = segment.dirty;
            }
            let Some(put) = puts.records.get_mut(job.record) else { continue };
            put.result = job.failed.take().map_or(Ok(mark), Err);
            if put.result.is_err() {
                let cells = puts.cells.get_mut(put.cells.clone()).unwrap_or(&mut []);
                cells.iter_mut().for_each(|cell| cell.spot = Spot::NONE);
            }
        }
    }
}

fn described(plane: &PutPlane) -> Plane {
    let PutPlane { kind, id, version, bytes, sum, .. } = *plane;
    Plane { kind, id, version, bytes, sum: sum.unwrap_or(0) }
}

/// Checks a record, computes sums and seals of its cells; returns the blocks of its header and of
/// the record.
unsafe fn measure(puts: &mut Puts, record: usize) -> Result<(u32, u32)> {
    let Some(put) = puts.records.get(record) else { fail!(Invalid, "no such record") };
    let cells = puts.cells.get_mut(put.cells.clone()).unwrap_or(&mut []);
    if cells.is_empty() || cells.len() > MAX_CELLS {
        fail!(Invalid, "a record has 1 to {MAX_CELLS} cells, not {}", cells.len());
    }
    let mut blocks = 0u64;
    let mut all_planes = 0;
    for cell in cells.iter_mut() {
        let planes = puts.planes.get_mut(cell.planes.clone()).unwrap_or(&mut []);
        if planes.is_empty() || planes.len() > MAX_PLANES {
            fail!(Invalid, "a cell has 1 to {MAX_PLANES} planes, not {}", planes.len());
        }
        if planes.iter().any(|plane| plane.bytes > 0 && plane.address.is_null()) {
            fail!(Invalid, "a plane of layer {} has no address", cell.layer);
        }
        let sum = |all: u64, plane: &PutPlane| all.checked_add(plane.bytes);
        let stored = planes.iter().try_fold(0, sum).filter(|&n| n > 0 && n <= u32::MAX.into());
        let Some(stored) = stored else {
            fail!(Limit, "a cell of layer {} has no bytes, or too many", cell.layer);
        };
        cell.stored_bytes = stored;
        if cell.raw_bytes == 0 {
            cell.raw_bytes = stored;
        }
        blocks += blocks_of(stored);
        all_planes += planes.len();
    }
    let header = header_blocks(cells.len(), all_planes);
    let all = header.map(|header| blocks + u64::from(header));
    let (Some(header), Some(all)) = (header, all.filter(|&n| n <= MAX_RECORD_BLOCKS.into())) else {
        fail!(Limit, "a record is longer than {MAX_RECORD_BLOCKS} blocks");
    };
    for cell in cells {
        let planes = puts.planes.get_mut(cell.planes.clone()).unwrap_or(&mut []);
        for plane in planes.iter_mut().filter(|plane| plane.sum.is_none()) {
            // SAFETY: the caller's guarantee: the plane's memory is valid.
            plane.sum = Some(unsafe { sum_of(plane.address, plane.bytes) });
        }
        let identity = Identity {
            key: put.chunk.key,
            fingerprint: put.chunk.fingerprint,
            layer: cell.layer,
            valid_tokens: put.chunk.valid_tokens,
            codec: cell.codec,
        };
        cell.seal = seal(&identity, planes.iter().map(described));
    }
    Ok((header, all as u32))
}

/// The checksum of a plane.
///
/// # Safety
/// `bytes` bytes at `address` are valid and not written during the call.
pub(super) unsafe fn sum_of(address: *const u8, bytes: u64) -> u64 {
    if bytes == 0 {
        return checksum(&[]);
    }
    // SAFETY: the caller's guarantee.
    checksum(unsafe { std::slice::from_raw_parts(address, bytes as usize) })
}
