//! Executes batches of work: copies, disk reads and writes, syncs, compaction, remote requests.
//! Workers call it without the store's lock.

pub mod remote;

use std::collections::VecDeque;
use std::ops::Range;

use crate::base::checksum::checksum;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::host::copy_now;
use crate::device::{Copy, Device, Direction, Event, MAX_COPIES, Memory, State, Stream};
use crate::fail;
use crate::format::codec::cell::{self, Plane};
use crate::format::codec::{Codec, Shape};
use crate::format::segment::BLOCK_BYTES;
use crate::store::executor::remote::RemoteExecutor;
use crate::store::state::StoreState;
use crate::store::state::device_tier::Audit;
use crate::store::state::disk_gc::CheckpointWriter;
use crate::store::state::work::{
    CopyBatch, CopyItem, Decoding, ReadBatch, SyncBatch, Upkeep, Work, WriteBatch,
};
use crate::tier::disk::{DiskTier, GetPlane, PutPlane, StagingGuard};

/// Why copies failed.
pub(super) struct Failed {
    pub error: Error,
    /// The device refused them and touched no memory.
    pub is_refused: bool,
}

impl Failed {
    pub fn refused(error: Error) -> Failed {
        Failed { error, is_refused: true }
    }

    pub fn is_lost(&self) -> bool {
        self.error.status() == Status::Unavailable
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { error, is_refused: false }
    }
}

/// Devices and tiers that execute work.
#[derive(Clone)]
pub struct Tools {
    /// The device for copies.
    pub device: Arc<dyn Device>,
    /// The disk, if there is one.
    pub disk: Option<Arc<DiskTier>>,
    /// The remote, if there is one.
    pub remote: Option<RemoteExecutor>,
}

impl Tools {
    /// Executes work. Returns its outcome, unless the work carries one itself. `stream` is a stream
    /// of the device for copies; `checkpoint_writer` serves upkeep.
    ///
    /// # Safety
    /// The work has not been handed back to the state, and the engine's memory is what its
    /// views say.
    pub unsafe fn work(
        &self,
        work: &mut Work,
        stream: Stream,
        checkpoint_writer: &mut dyn CheckpointWriter,
    ) -> Result<()> {
        match (work, &self.disk) {
            (Work::Fetches(batch), _) => {
                if let Some(remote) = &self.remote {
                    // SAFETY: pieces of memory that the core keeps for these fetches.
                    unsafe { remote.fetch(batch) };
                }
                Ok(())
            }
            (Work::Uploads(batch), _) => {
                if let Some(remote) = &self.remote {
                    // SAFETY: cells that the core has read until it hears of the end.
                    unsafe { remote.upload(batch) };
                }
                Ok(())
            }
            (Work::Lookups(batch), _) => {
                if let Some(remote) = &self.remote {
                    remote.lookup(batch);
                }
                Ok(())
            }
            // SAFETY: the caller's promise.
            (Work::Copies(batch), _) => unsafe { self.copy(batch, stream) },
            (Work::Unregistered(memory), _) => {
                memory.iter().for_each(|memory| memory.register());
                Ok(())
            }
            (Work::Slabs(slabs), _) => {
                slabs.carry_out(&self.device);
                Ok(())
            }
            (Work::Reads(batch), Some(disk)) => {
                // SAFETY: pieces of memory that the core keeps for these reads.
                unsafe { read_and_decode(batch, disk) };
                Ok(())
            }
            (Work::Writes(batch), Some(disk)) => {
                // Recovery must find the namespaces before their chunks.
                if batch.write_notes(|name, content| disk.put_session(name, content)) {
                    // SAFETY: pieces of memory that the core keeps as they are meanwhile.
                    unsafe { encode_and_write(batch, disk) };
                }
                Ok(())
            }
            (Work::Syncs(batch), Some(disk)) => {
                sync(batch, disk);
                Ok(())
            }
            (Work::Upkeep(upkeep), Some(disk)) => run_upkeep(upkeep, disk, checkpoint_writer),
            (_, None) => Ok(()), // a core without a disk has no such work
        }
    }

    /// Reads a replica back and compares it. `None` if there is no memory for that, or the device
    /// refuses the copy.
    ///
    /// # Safety
    /// The audit has not been ended.
    pub unsafe fn audit(&self, one: &Audit, stream: Stream) -> Result<Option<bool>> {
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(one.bytes as usize).is_err() {
            return Ok(None);
        }
        bytes.resize(one.bytes as usize, 0u8);
        let (direction, memory) = (Direction::Gather, Memory::Device);
        // Damage on the bus says nothing about the replica.
        for _ in 0..2 {
            let back = Copy::bytes(bytes.as_mut_ptr(), one.device, one.bytes, direction, memory)?;
            // SAFETY: a piece that is read until the audit has ended, and memory of this call.
            let result = unsafe { copy_one(self, back, stream) };
            match result {
                // SAFETY: as above.
                Ok(true) => return Ok(unsafe { one.is_right(&bytes) }),
                Ok(false) => {}
                Err(failed) if failed.is_refused && !failed.is_lost() => return Ok(None),
                Err(failed) => return Err(failed.error),
            }
        }
        Ok(None)
    }

    /// # Safety
    /// As [`Tools::work`].
    unsafe fn copy(&self, batch: &mut CopyBatch, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        let outcome = unsafe { copy(self, batch, stream) };
        let is_lost = outcome.as_ref().is_err_and(|e| e.status() == Status::Unavailable);
        if is_lost && batch.rescued.is_some() {
            // SAFETY: the caller's promise; a lost device touches nothing any more.
            let done = unsafe { copy_without(batch) };
            batch.rescued = Some(done?);
        }
        outcome
    }

    /// Executes `first`, then `then`, which may read what `first` wrote. Nothing is in flight when
    /// this returns.
    ///
    /// # Safety
    /// As [`Device::submit`].
    pub(super) unsafe fn submit_all(
        &self,
        stream: Stream,
        first: &mut [Copy<'_>],
        then: &mut [Copy<'_>],
    ) -> std::result::Result<(), Failed> {
        if first.is_empty() {
            // SAFETY: the caller's promise.
            return unsafe { self.submit_parts(stream, None, then) };
        }
        // SAFETY: the caller's promise. Fewer than a batch of cells: one part.
        let filled = unsafe { self.device.submit(stream, None, first).map_err(Failed::refused)? };
        // SAFETY: the same.
        let copied = unsafe { self.submit_parts(stream, Some(filled), then) };
        let ended = self.end(filled, first);
        copied.and(ended.map_err(Failed::from))
    }

    /// # Safety
    /// As [`Device::submit`].
    pub(super) unsafe fn submit_parts(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> std::result::Result<(), Failed> {
        for part in copies.chunks_mut(crate::device::MAX_COPIES) {
            // SAFETY: the caller's promise.
            let event = unsafe { self.device.submit(stream, after, part) };
            let event = event.map_err(Failed::refused)?;
            self.end(event, part)?;
        }
        Ok(())
    }

    /// Waits for a batch, takes over its checksums, and releases its event.
    pub(super) fn end(&self, event: Event, copies: &mut [Copy<'_>]) -> Result<()> {
        let mut ended = self.device.wait(event, 0);
        if self.device.facts().asynchronous {
            if ended.is_ok() {
                ended = take_sums(&*self.device, event, copies);
            }
            self.device.release(event)?;
        }
        ended
    }
}

/// Executes the jobs of a batch between host addresses by the processor. Returns which were done.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy_without(batch: &CopyBatch) -> Result<Vec<bool>> {
    let mut all: Vec<Vec<Copy<'_>>> = batch.jobs().map(|_| Vec::new()).collect();
    let mut is_in_host = vec![true; all.len()];
    for item in &batch.items {
        let copy = copy_of(batch, item)?;
        is_in_host[item.job] &= [copy.memory, copy.plane_memory] == [Memory::Host; 2];
        all[item.job].push(copy);
    }
    for (copies, is_in_host) in all.iter_mut().zip(&is_in_host) {
        if *is_in_host {
            // SAFETY: the caller's promise; such copies are done when this returns.
            unsafe { copy_now(copies)? };
        }
    }
    Ok(is_in_host)
}

/// Executes a batch of copies between host addresses by the calling thread.
///
/// # Safety
/// As [`Tools::work`].
pub unsafe fn copy_inline(batch: &CopyBatch) -> Result<()> {
    for item in &batch.items {
        // SAFETY: the caller's promise; the copy is done when this returns.
        unsafe { copy_now(&mut [copy_of(batch, item)?])? };
    }
    Ok(())
}

pub(super) fn copy_of<'a>(batch: &'a CopyBatch, item: &CopyItem) -> Result<Copy<'a>> {
    let layer = &batch.views[item.views].layers[item.layer];
    let plane = match (&layer.v, item.is_v) {
        (Some(v), true) => v,
        _ => &layer.k,
    };
    let address = item.address as *mut u8;
    let mut copy = Copy::new(&plane.view(), item.first, item.tokens, address, item.direction)?;
    (copy.memory, copy.plane_memory) = (plane.memory, item.memory);
    copy.past_caches = item.past_caches;
    Ok(copy)
}

fn sync(batch: &mut SyncBatch, disk: &DiskTier) {
    if let Some(result) = &mut batch.everything {
        *result = disk.commit_all();
    }
    for (_, mark, result) in &mut batch.marks {
        *result = disk.commit(*mark);
    }
}

fn run_upkeep(
    upkeep: &Upkeep,
    disk: &Arc<DiskTier>,
    checkpoint_writer: &mut dyn CheckpointWriter,
) -> Result<()> {
    match upkeep {
        Upkeep::Sweep => {
            disk.sweep();
            Ok(())
        }
        Upkeep::Prepare => {
            disk.prepare();
            Ok(())
        }
        Upkeep::Compact(number) => disk.compact(*number, checkpoint_writer).map(|_| ()),
        Upkeep::Checkpoint(checkpoint) => checkpoint.write(disk, checkpoint_writer),
    }
}

// ---------- encoding
//
// Encodes cells before disk writes and decodes them after disk reads, in scratch memory of the
// disk tier: many records or cells at once, or a single one when memory is short.

/// Most bytes of scratch memory used at once, unless one record or cell needs more.
const MAX_SCRATCH_BYTES: u64 = 12 << 20;

/// Encodes the cells of a batch and writes it. A record for which there is no scratch memory is
/// written without encoding.
///
/// # Safety
/// As [`DiskTier::append`].
unsafe fn encode_and_write(batch: &mut WriteBatch, disk: &DiskTier) {
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
pub unsafe fn read_and_decode(batch: &mut ReadBatch, disk: &DiskTier) {
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

// ---------- asynchronous device batches
//
// Device copies that wait for device events. Batches are submitted behind the event on streams
// that nothing else uses; one thread polls all of them.

/// Access to the state behind its lock.
pub trait StateAccess {
    /// Runs `act` on the state.
    fn with(&mut self, act: &mut dyn FnMut(&mut StoreState));
}

/// A submitted batch.
struct Begun {
    batch: CopyBatch,
    after: Event,
    /// Events of its parts that are pending, each with the number of checksums that the device
    /// computes.
    parts: VecDeque<(Event, usize)>,
    /// Planes of these checksums, in order.
    summed: VecDeque<Summed>,
    /// Results of their comparison.
    held: Vec<Held>,
    outcome: Result<()>,
    /// It is submitted when its event has completed; the device would block this thread until then.
    is_parked: bool,
}

/// Copies that depend on device events, of one store.
pub struct EventCopies {
    tools: Tools,
    /// Borrowed streams, each with the event that everything on it waits for.
    streams: Vec<(Event, Stream)>,
    begun: Vec<Begun>,
}

impl EventCopies {
    /// Without batches.
    pub fn new(tools: Tools) -> EventCopies {
        EventCopies { tools, streams: Vec::new(), begun: Vec::new() }
    }

    /// Whether no batch is in flight.
    pub fn is_idle(&self) -> bool {
        self.begun.is_empty()
    }

    /// Reports ended batches to the state and begins new ones. Returns whether there were any.
    /// Never waits.
    ///
    /// # Safety
    /// The engine's memory is what the views of the transfers say until they have ended,
    /// and the store's memory is valid until their end is reported here.
    pub unsafe fn advance(&mut self, state: &mut dyn StateAccess) -> bool {
        // SAFETY: the caller's promise.
        let mut ended = unsafe { self.ended() };
        let mut ahead = Vec::new();
        let mut did = !ended.is_empty();
        state.with(&mut |core| {
            for (batch, outcome, is_spent) in ended.drain(..) {
                core.done_after_event(batch, &outcome, is_spent);
            }
            core.events_ahead(&mut ahead);
        });
        let mut outcomes = Vec::new();
        let mut ready = Vec::new();
        for &(event, has_copies) in &ahead {
            match self.tools.device.state(event) {
                Ok(State::Done) => outcomes.push((event, Ok(()))),
                Ok(State::Pending) if has_copies => {
                    ready.extend(self.stream_for(event).map(|stream| (event, stream)));
                }
                Ok(State::Pending) => {}
                Err(error) => outcomes.push((event, Err(error.status()))),
            }
        }
        let mut taken = Vec::new();
        state.with(&mut |core| {
            outcomes.iter().for_each(|&(event, outcome)| core.event_ended(event, outcome));
            for &(event, stream) in &ready {
                while let Some(batch) = core.take_after_event(event) {
                    taken.push((batch, event, stream));
                }
            }
        });
        did |= !outcomes.is_empty() || !taken.is_empty();
        for (batch, event, stream) in taken {
            // SAFETY: the caller's promise.
            unsafe { self.begin(batch, event, stream) };
        }
        self.return_streams(&ahead);
        did
    }

    /// Waits until the first batch has ended, or for a deadline.
    pub fn rest(&self, deadline_ns: u64) {
        let next = |one: &Begun| match one.is_parked {
            true => Some(one.after),
            false => one.parts.front().map(|(event, _)| *event),
        };
        if let Some(event) = self.begun.iter().find_map(next) {
            let _ = self.tools.device.wait(event, deadline_ns); // the outcome is queried again
        }
    }

    /// Waits until no batch touches memory any more, without reporting.
    pub fn finish(&mut self) {
        for one in self.begun.drain(..) {
            for (event, _) in one.parts {
                let _ = self.tools.end(event, &mut []); // no caller is left to notify
            }
        }
    }

    /// Ended batches with their outcome, and whether their event failed.
    ///
    /// # Safety
    /// As [`EventCopies::advance`].
    unsafe fn ended(&mut self) -> Vec<(CopyBatch, Result<()>, bool)> {
        let mut ended = Vec::new();
        let mut at = 0;
        while at < self.begun.len() {
            if self.begun[at].is_parked {
                let after = self.begun[at].after;
                if matches!(self.tools.device.state(after), Ok(State::Pending)) {
                    at += 1;
                    continue;
                }
                let Begun { batch, .. } = self.begun.remove(at);
                let stream = self.stream_for(after).unwrap_or(Stream(0));
                // SAFETY: the caller's promise.
                unsafe { self.begin(batch, after, stream) };
                continue;
            }
            // SAFETY: the caller's promise.
            if !unsafe { self.begun[at].has_ended(&self.tools) } {
                at += 1;
                continue;
            }
            let Begun { mut batch, after, mut outcome, held, .. } = self.begun.remove(at);
            let bad = note_damage(&mut batch, &held);
            let failure = self.failed(after);
            if failure.is_none() && fails_together(&batch, &outcome) {
                // SAFETY: the caller's promise.
                unsafe { self.begin_alone(batch, after) };
                continue;
            }
            if failure.is_none() && outcome.is_ok() && !bad.is_empty() {
                // Its event has completed, so a repeated copy waits for nothing.
                let stream = self.streams.iter().find(|(of, _)| *of == after);
                let stream = stream.map_or(Stream(0), |(_, stream)| *stream);
                // SAFETY: the caller's promise.
                outcome = unsafe { copy_again(&self.tools, &mut batch, stream, bad) };
            }
            let (outcome, is_spent) = match failure {
                Some(error) => (Err(error), true),
                None => (outcome, false),
            };
            ended.push((batch, outcome, is_spent));
        }
        ended
    }

    /// The error of an event. An event that its owner has released has completed if a copy behind
    /// it has.
    fn failed(&self, event: Event) -> Option<Error> {
        self.tools.device.state(event).err().filter(|error| error.status() != Status::Handle)
    }

    /// The stream of an event, which nothing else uses.
    fn stream_for(&mut self, event: Event) -> Option<Stream> {
        if let Some((_, stream)) = self.streams.iter().find(|(of, _)| *of == event) {
            return Some(*stream);
        }
        // Without a stream its copies begin when it has completed.
        let stream = self.tools.device.lease_stream().ok()?;
        self.streams.push((event, stream));
        Some(stream)
    }

    /// Returns idle streams of events that no copy will wait for any more.
    fn return_streams(&mut self, ahead: &[(Event, bool)]) {
        let (begun, device) = (&self.begun, &self.tools.device);
        self.streams.retain(|(event, stream)| {
            let is_used = begun.iter().any(|one| one.after == *event)
                || ahead.iter().any(|(other, has)| other == event && *has);
            if !is_used {
                device.return_stream(*stream);
            }
            is_used
        });
    }

    /// Begins the jobs of a batch one by one, since one that is refused or fails may belong to
    /// another caller.
    ///
    /// # Safety
    /// As [`EventCopies::advance`].
    unsafe fn begin_alone(&mut self, batch: CopyBatch, after: Event) {
        let stream = self.stream_for(after).unwrap_or(Stream(0));
        for one in batch.split() {
            // SAFETY: the caller's promise.
            unsafe { self.begin(one, after, stream) };
        }
    }

    /// # Safety
    /// As [`EventCopies::advance`].
    unsafe fn begin(&mut self, mut batch: CopyBatch, after: Event, stream: Stream) {
        let (mut parts, mut summed) = (VecDeque::new(), VecDeque::new());
        // A completed event may have been released.
        let state = self.tools.device.state(after);
        let is_known = !state.as_ref().is_err_and(|error| error.status() == Status::Handle);
        let is_ahead = matches!(state, Ok(State::Pending));
        let mut is_parked = false;
        let behind = Some(after).filter(|_| is_known);
        let outcome = Made::of(&self.tools, &batch, None).and_then(|mut made| {
            is_parked = is_ahead && self.tools.device.may_block_submit(&made.copies);
            if is_parked {
                return Ok(());
            }
            summed.extend(made.summed());
            // Fills of the device tier may run at once, since they do not touch the engine's
            // memory. Copies that read the filled pieces follow on the same stream.
            // SAFETY: the caller's promise; planes are pieces that are kept for this.
            unsafe {
                self.submit(stream, None, &mut made.fills, &mut parts)?;
                self.submit(stream, behind, &mut made.copies, &mut parts)
            }
        });
        if outcome.is_err() {
            batch.refused.extend(0..batch.jobs().count());
        }
        self.begun.push(Begun {
            batch,
            after,
            parts,
            summed,
            held: Vec::new(),
            outcome,
            is_parked,
        });
    }

    /// # Safety
    /// As [`crate::device::Device::submit`].
    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
        parts: &mut VecDeque<(Event, usize)>,
    ) -> Result<()> {
        for part in copies.chunks_mut(MAX_COPIES) {
            // SAFETY: the caller's promise.
            let event = unsafe { self.tools.device.submit(stream, after, part)? };
            parts.push_back((event, part.iter().filter(|copy| copy.wants_sum).count()));
        }
        Ok(())
    }
}

/// Whether jobs of a failed batch may succeed alone.
fn fails_together(batch: &CopyBatch, outcome: &Result<()>) -> bool {
    let is_notified = |error: &Error| error.status() != Status::Unavailable;
    batch.jobs().nth(1).is_some() && outcome.as_ref().is_err_and(is_notified)
}

impl Drop for EventCopies {
    fn drop(&mut self) {
        self.finish();
        self.streams.drain(..).for_each(|(_, stream)| self.tools.device.return_stream(stream));
    }
}

impl Begun {
    /// Whether all parts have ended; their outcome is noted.
    ///
    /// # Safety
    /// As [`EventCopies::advance`].
    unsafe fn has_ended(&mut self, tools: &Tools) -> bool {
        while let Some(&(part, sums)) = self.parts.front() {
            if matches!(tools.device.state(part), Ok(State::Pending)) {
                return false;
            }
            self.parts.pop_front();
            let reported = match tools.device.state(part) {
                Ok(_) => sums_of(&*tools.device, part, sums),
                Err(error) => Err(error),
            };
            let ended = tools.end(part, &mut []);
            let summed = self.summed.drain(..sums.min(self.summed.len()));
            match reported.and_then(|sums| ended.map(|()| sums)) {
                // SAFETY: the caller's promise: the batch has ended, its core was not notified yet.
                Ok(sums) => unsafe {
                    self.held.extend(summed.zip(sums).map(|(one, sum)| one.hold(sum)));
                },
                Err(error) if self.outcome.is_ok() => self.outcome = Err(error),
                Err(_) => {}
            }
        }
        true
    }
}

// ---------- verification
//
// Verification of device copies. A device may compute checksums of what it copies; they are
// compared with checksums of the same bytes in host memory, so that a byte that changes on the
// link is neither stored nor delivered.

/// Job and plane of a copy, and the expected checksum if it is known.
#[derive(Clone, Copy)]
struct Of {
    job: usize,
    is_v: bool,
    sum: Option<u64>,
}

/// Executes copies. If the device computes checksums, damaged copies are repeated once, and jobs
/// that are damaged again are noted. A batch that fails is executed job by job, since its jobs may
/// belong to different callers; each outcome is noted.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy(tools: &Tools, batch: &mut CopyBatch, stream: Stream) -> Result<()> {
    // SAFETY: the caller's promise.
    let Err(failed) = (unsafe { copy_jobs(tools, batch, stream, None) }) else { return Ok(()) };
    let jobs = batch.jobs().count();
    if failed.is_lost() {
        return Err(failed.error);
    }
    if jobs <= 1 {
        batch.refused.extend(failed.is_refused.then_some(0));
        return Err(failed.error);
    }
    log::warn!("a batch of {jobs} copies failed and is retried one by one: {}", failed.error);
    let mut alone = Vec::new();
    alone.try_reserve_exact(jobs).map_err(|_| Status::NoMem)?;
    for at in 0..jobs {
        // SAFETY: the caller's promise.
        let copied = unsafe { copy_jobs(tools, batch, stream, Some(&[at])) };
        alone.push(match copied {
            Err(failed) if failed.is_lost() => return Err(failed.error),
            Err(failed) => {
                batch.refused.extend(failed.is_refused.then_some(at));
                Err(failed.error)
            }
            Ok(()) => Ok(()),
        });
    }
    batch.alone = alone;
    Ok(())
}

/// Copies all jobs of a batch, or some, and repeats damaged copies once.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy_jobs(
    tools: &Tools,
    batch: &mut CopyBatch,
    stream: Stream,
    only: Option<&[usize]>,
) -> std::result::Result<(), Failed> {
    // SAFETY: the caller's promise.
    unsafe {
        let bad = copy_some(tools, batch, stream, only)?;
        copy_again(tools, batch, stream, bad).map_err(Failed::from)
    }
}

/// Repeats the copies that arrived damaged, once.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy_again(
    tools: &Tools,
    batch: &mut CopyBatch,
    stream: Stream,
    mut bad: Vec<usize>,
) -> Result<()> {
    if bad.is_empty() {
        return Ok(());
    }
    let mut seen = bad.len() as u64;
    log::warn!("{seen} copies over a device's bus arrived damaged and are repeated");
    sort(&mut bad);
    // SAFETY: the caller's promise.
    let worse = unsafe { copy_some(tools, batch, stream, Some(&bad)) };
    let mut worse = worse.map_err(|failed| failed.error)?;
    seen += worse.len() as u64;
    if !worse.is_empty() {
        log::error!(
            "{} copies over a device's bus arrived damaged twice; their transfers fail",
            worse.len()
        );
    }
    sort(&mut worse);
    batch.damage.seen += seen;
    batch.damage.jobs.append(&mut worse);
    Ok(())
}

fn sort(jobs: &mut Vec<usize>) {
    jobs.sort_unstable();
    jobs.dedup();
}

/// The copies of a batch.
#[derive(Default)]
struct Made<'a> {
    /// Copies into the device tier.
    pub fills: Vec<Copy<'static>>,
    /// Copies that may read what those wrote.
    pub copies: Vec<Copy<'a>>,
    of_fills: Vec<Of>,
    of_copies: Vec<Of>,
}

/// A plane whose checksum the device computes.
struct Summed {
    of: Of,
    plane: u64,
    bytes: u64,
}

/// Result for one plane.
struct Held {
    of: Of,
    right: u64,
    is_damaged: bool,
}

impl<'a> Made<'a> {
    /// The copies of all jobs of a batch, or of some.
    pub fn of(tools: &Tools, batch: &'a CopyBatch, only: Option<&[usize]>) -> Result<Made<'a>> {
        let facts = tools.device.facts();
        let verifies = facts.sums && facts.asynchronous;
        let is_due = |job| only.is_none_or(|jobs| jobs.binary_search(&job).is_ok());
        let mut made = Made::default();
        made.copies.reserve(if only.is_none() { batch.items.len() } else { 0 });
        for item in batch.items.iter().filter(|item| is_due(item.job)) {
            let mut copy = copy_of(batch, item)?;
            copy.wants_sum = verifies && (crosses(&copy) || item.sum.is_some());
            made.copies.push(copy);
            made.of_copies.push(Of { job: item.job, is_v: item.is_v, sum: item.sum });
        }
        for fill in batch.fills.iter().filter(|fill| is_due(fill.job)) {
            // A checksum is of a plane. Without checksums a cell is one copy.
            let k_bytes = if verifies { fill.k_bytes } else { fill.bytes };
            let parts = [(false, 0, k_bytes), (true, k_bytes, fill.bytes - k_bytes)];
            for (is_v, at, bytes) in parts.into_iter().filter(|(.., bytes)| *bytes > 0) {
                let (host, to) = ((fill.host + at as usize) as *mut u8, fill.device + at);
                let copy = Copy::bytes(host, to, bytes, Direction::Scatter, Memory::Device)?;
                made.fills.push(Copy { wants_sum: verifies && crosses(&copy), ..copy });
                made.of_fills.push(Of { job: fill.job, is_v, sum: None });
            }
        }
        Ok(made)
    }

    /// Planes whose checksum the device computes, in the order of submission.
    pub fn summed(&self) -> Vec<Summed> {
        let fills = self.fills.iter().zip(&self.of_fills);
        let all = fills.chain(self.copies.iter().zip(&self.of_copies));
        let count = all.filter(|(copy, _)| copy.wants_sum);
        count.map(|(copy, of)| Summed::of(copy, *of)).collect()
    }

    fn sums(&self) -> impl Iterator<Item = u64> {
        self.fills.iter().chain(&self.copies).filter(|copy| copy.wants_sum).map(|copy| copy.sum)
    }
}

impl Summed {
    fn of(copy: &Copy<'_>, of: Of) -> Summed {
        let plane = copy.plane.expose_provenance() as u64;
        Summed { of, plane, bytes: copy.tensor.bytes() }
    }

    /// Compares a reported checksum with the known one, or with the plane in host memory.
    ///
    /// # Safety
    /// Unless its checksum is known, the plane is in host memory and does not change.
    pub unsafe fn hold(&self, reported: u64) -> Held {
        let right = self.of.sum.unwrap_or_else(|| {
            let plane = std::ptr::with_exposed_provenance(self.plane as usize);
            // SAFETY: the caller's promise: a plane is as long as its tensor's tokens.
            let plane: &[u8] = unsafe { std::slice::from_raw_parts(plane, self.bytes as usize) };
            checksum(plane)
        });
        Held { of: self.of, right, is_damaged: right != reported }
    }
}

/// Copies all jobs of a batch, or some. Returns the damaged ones, once for each damaged copy.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy_some(
    tools: &Tools,
    batch: &mut CopyBatch,
    stream: Stream,
    only: Option<&[usize]>,
) -> std::result::Result<Vec<usize>, Failed> {
    let mut made = Made::of(tools, batch, only).map_err(Failed::refused)?;
    // SAFETY: the caller's promise; planes are pieces that are kept for this.
    unsafe { tools.submit_all(stream, &mut made.fills, &mut made.copies)? };
    let summed = made.summed();
    // SAFETY: as above; nothing is in flight any more.
    let hold = |(one, sum): (&Summed, u64)| unsafe { one.hold(sum) };
    let held: Vec<Held> = summed.iter().zip(made.sums()).map(hold).collect();
    drop(made);
    Ok(note_damage(batch, &held))
}

/// Copies a tensor in device memory to a plane in host memory. Returns whether it arrived
/// undamaged, as far as the device reports.
///
/// # Safety
/// As [`Device::submit`].
unsafe fn copy_one(
    tools: &Tools,
    copy: Copy<'_>,
    stream: Stream,
) -> std::result::Result<bool, Failed> {
    let facts = tools.device.facts();
    let mut copies = [Copy { wants_sum: facts.sums && facts.asynchronous, ..copy }];
    // SAFETY: the caller's promise; nothing is in flight any more then.
    unsafe {
        tools.submit_parts(stream, None, &mut copies)?;
        let [copy] = &copies;
        let of = Of { job: 0, is_v: false, sum: None };
        Ok(!copy.wants_sum || !Summed::of(copy, of).hold(copy.sum).is_damaged)
    }
}

/// Records the checksums of planes that get a replica. Returns the damaged jobs, once for each
/// damaged copy.
fn note_damage(batch: &mut CopyBatch, held: &[Held]) -> Vec<usize> {
    if !held.is_empty() && batch.rescued.is_some() {
        let jobs = batch.jobs().count();
        batch.sums.resize(jobs, [0; 2]);
        for one in held {
            batch.sums[one.of.job][usize::from(one.of.is_v)] = one.right;
        }
    }
    held.iter().filter(|one| one.is_damaged).map(|one| one.of.job).collect()
}

/// Whether a copy crosses the bus, between a plane in host memory and a tensor in device memory.
fn crosses(copy: &Copy<'_>) -> bool {
    copy.memory == Memory::Device && copy.plane_memory == Memory::Host
}

/// Takes the checksums of an ended batch into its copies.
fn take_sums(device: &dyn Device, event: Event, copies: &mut [Copy<'_>]) -> Result<()> {
    let count = copies.iter().filter(|copy| copy.wants_sum).count();
    if count == 0 {
        return Ok(());
    }
    let sums = sums_of(device, event, count)?;
    let wants = copies.iter_mut().filter(|copy| copy.wants_sum);
    wants.zip(sums).for_each(|(copy, sum)| copy.sum = sum);
    Ok(())
}

/// `count` checksums of an ended batch.
fn sums_of(device: &dyn Device, event: Event, count: usize) -> Result<Vec<u64>> {
    let mut sums = Vec::new();
    sums.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
    sums.resize(count, 0);
    let reported = if count == 0 { 0 } else { device.sums(event, &mut sums)? };
    if reported != count {
        fail!(Io, "the device reported {reported} of {count} checksums");
    }
    Ok(sums)
}
