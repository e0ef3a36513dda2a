//! Appending records: space is taken under the lock, records are written outside it.

use std::ops::Range;

use crate::base::checksum::checksum;
use crate::base::status::{Error, Result};
use crate::fail;
use crate::format::record::{
    Encoder, Head, Kind, MAX_CELLS, MAX_RECORD_BLOCKS, blocks_of, header_blocks,
};
use crate::format::seal::{Identity, MAX_PLANES, Plane, seal};
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::{Access, FileId};
use crate::tier::disk::batch::{Mark, PutCell, PutPlane, Puts};
use crate::tier::disk::files::{Pinned, refusal};
use crate::tier::disk::gather::{Gather, in_place, within};
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
        for record in records {
            // SAFETY: the caller's guarantee.
            let job = unsafe { measure(puts, record) }
                .and_then(|(header, blocks)| self.begin(puts, record, header, blocks, front));
            match job {
                Ok(job) => jobs.push(job),
                Err(error) => puts.records[record].result = Err(error),
            }
        }
        // SAFETY: the caller's guarantee.
        unsafe { self.write(puts, &mut jobs) };
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
    ) -> Result<PendingRecord<'_>> {
        let grant = self.room_for(front, blocks, puts.records[record].born)?;
        let cells = blocks - header_blocks;
        match self.pin(grant.segment) {
            Ok(pinned) => {
                let mut state = self.state.lock();
                if let Some(segment) = state.segments.get_mut(&grant.segment) {
                    segment.live += cells;
                }
                Ok(PendingRecord { record, header_blocks, blocks, grant, pinned, failed: None })
            }
            Err(error) => {
                let mut state = self.state.lock();
                state.leave_front(grant.segment);
                if let Some(segment) = state.segments.get_mut(&grant.segment) {
                    segment.writing -= 1;
                }
                Err(error)
            }
        }
    }

    unsafe fn write(&self, puts: &mut Puts, jobs: &mut [PendingRecord<'_>]) {
        let mut gather = Gather::new(&*self.files, &self.staging, Access::Write);
        for (owner, job) in jobs.iter_mut().enumerate() {
            // SAFETY: the caller's guarantee, here and below: flushed memory belongs to planes or
            // to the gather itself.
            unsafe { gather.make_way() };
            // SAFETY: as above.
            if let Err(error) = unsafe { self.write_record(&mut gather, owner, puts, job) } {
                job.failed = Some(error);
            }
        }
        // SAFETY: as above.
        unsafe { gather.flush() };
        for (owner, error) in gather.failed.drain(..) {
            if let Some(job) = jobs.get_mut(owner) {
                job.failed = Some(refusal(error));
            }
        }
    }

    unsafe fn write_record(
        &self,
        gather: &mut Gather<'_>,
        owner: usize,
        puts: &mut Puts,
        job: &PendingRecord<'_>,
    ) -> Result<()> {
        let bytes = u64::from(job.header_blocks) * BLOCK_BYTES as u64;
        // SAFETY: the caller's guarantee.
        let (header, _) = unsafe { gather.room(bytes, bytes)? };
        // SAFETY: staging memory of that length, for this gather only.
        let header_bytes = unsafe { std::slice::from_raw_parts_mut(header, bytes as usize) };
        self.encode(header_bytes, puts, job);
        let file = job.pinned.file;
        gather.add(owner, file, offset_of(job.grant.at), header, bytes);
        let Some(put) = puts.records.get(job.record) else { return Ok(()) };
        let mut at = job.grant.at + job.header_blocks;
        for cell in puts.cells.get(put.cells.clone()).unwrap_or(&[]) {
            let planes = puts.planes_of(cell);
            // SAFETY: the caller's guarantee.
            unsafe { self.write_cell(gather, owner, (file, offset_of(at)), cell, planes)? };
            at += blocks_u32(cell.stored_bytes);
        }
        Ok(())
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

    unsafe fn write_cell(
        &self,
        gather: &mut Gather<'_>,
        owner: usize,
        to: (FileId, u64),
        cell: &PutCell,
        planes: &[PutPlane],
    ) -> Result<()> {
        let (file, offset) = to;
        let whole = blocks_of(cell.stored_bytes) * BLOCK_BYTES as u64;
        let ranges = || planes.iter().map(PutPlane::range).filter(|range| range.bytes > 0);
        if in_place(ranges(), self.align, cell.padded) {
            let mut done = 0;
            for range in ranges() {
                let last = done + range.bytes == cell.stored_bytes;
                // Without alignment the padding of a block is not written.
                let pad = if last && cell.padded { whole - cell.stored_bytes } else { 0 };
                gather.add(owner, file, offset + done, range.address, range.bytes + pad);
                done += range.bytes;
            }
            return Ok(());
        }
        let mut done = 0;
        while done < whole {
            // SAFETY: the caller's guarantee.
            let (to, bytes) = unsafe { gather.room(BLOCK_BYTES as u64, whole - done)? };
            let bytes = bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            let filled = bytes.min(cell.stored_bytes - done);
            within(ranges(), done, filled, |from, place, bytes| {
                // SAFETY: a part of a plane, into staging memory that has room for it.
                unsafe { to.add(place as usize).copy_from_nonoverlapping(from, bytes as usize) };
            });
            // SAFETY: the rest of the same staging memory.
            unsafe { to.add(filled as usize).write_bytes(0, (bytes - filled) as usize) };
            gather.add(owner, file, offset + done, to, bytes);
            done += bytes;
        }
        Ok(())
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
