//! Loads of units, and the jobs that carry them out: reads of files, copies to the device, freeing
//! and mapping of memory.

use std::collections::VecDeque;

use crate::base::status::{Error, Result, Status};
use crate::device::Event;
use crate::stream::plan::{ComputeLocation, Residency};
use crate::stream::scheduler::record::Stage;
use crate::stream::scheduler::{STAGING_SPARE, Scheduler};
use crate::stream::units::{Chunk, NONE};

/// The memory that a load fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Memory where the unit stays.
    Resident,
    /// A slot for units other than experts.
    Slot(u32),
    /// A slot for experts.
    ExpertSlot(u32),
}

/// The path of a unit's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadPath {
    /// From the file to host memory, where the unit is used.
    Direct,
    /// From the file to staging buffers, then to the device.
    Staged,
    /// From the resident copy in host memory to the device.
    Copied,
}

/// Order of loads; the smaller value goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Priority {
    /// A thread waits for the unit.
    Acquired,
    /// The window of the pass contains the unit.
    Next,
    /// A hint named the unit.
    Hinted,
    /// The unit becomes resident, and no thread waits for it.
    Background,
}

/// A load in progress.
pub(super) struct Load {
    pub unit: u32,
    /// None: chunks are read ahead into staging, and the slot is granted later.
    pub target: Option<Target>,
    pub path: LoadPath,
    pub priority: Priority,
    /// Among loads of equal priority the older one goes first.
    pub age: u64,
    /// Number of chunks.
    pub chunks: u32,
    pub next_read: u32,
    pub next_copy: u32,
    /// Chunks that were read and not copied yet: chunk and staging slot.
    pub staged: VecDeque<(u32, u32)>,
    pub reading: u32,
    pub copying: u32,
    /// Copies that were submitted to the device.
    pub issued: u32,
    /// Chunks that the device read into the target itself, without a copy.
    pub read_direct: u32,
    pub done: u32,
    /// The unit whose memory must be freed before this load may fill its own; [`NONE`] = no unit.
    pub clear: u32,
    pub clearing: bool,
    /// No memory is mapped at the unit's addresses yet; and the copier is mapping some.
    pub unmapped: bool,
    pub mapping: bool,
    /// The load is canceled: transfers in flight end, no other begins.
    pub dropped: bool,
    pub failed: Option<Error>,
    /// The device event of the last copy.
    pub event: Option<Event>,
    /// The event after which the slot may be written; the first copy waits for it.
    pub after: Option<Event>,
}

impl Load {
    pub fn new(unit: u32, path: LoadPath, priority: Priority, chunks: u32, age: u64) -> Load {
        Load {
            unit,
            target: None,
            path,
            priority,
            age,
            chunks,
            next_read: 0,
            next_copy: 0,
            staged: VecDeque::new(),
            reading: 0,
            copying: 0,
            issued: 0,
            read_direct: 0,
            done: 0,
            clear: NONE,
            clearing: false,
            unmapped: false,
            mapping: false,
            dropped: false,
            failed: None,
            event: None,
            after: None,
        }
    }

    /// Whether the load begins no more transfers.
    pub fn is_over(&self) -> bool {
        self.dropped || self.failed.is_some()
    }

    /// Whether no transfer of the load is in flight.
    pub fn is_still(&self) -> bool {
        self.reading == 0 && self.copying == 0 && !self.clearing && !self.mapping
    }

    /// Whether the load has a target, and memory must be mapped at its addresses.
    pub fn wants_memory(&self) -> bool {
        self.unmapped && !self.mapping && self.target.is_some() && !self.is_over()
    }

    pub fn wants_read(&self) -> bool {
        let may = match self.path {
            LoadPath::Direct => self.target.is_some() && !self.clearing && self.clear == NONE,
            LoadPath::Staged => true,
            LoadPath::Copied => false,
        };
        may && !self.is_over() && self.next_read < self.chunks
    }

    pub fn wants_copy(&self, is_resident: bool) -> bool {
        let ready = match self.path {
            LoadPath::Direct => false,
            LoadPath::Staged => !self.staged.is_empty(),
            LoadPath::Copied => is_resident && self.next_copy < self.chunks,
        };
        ready && self.target.is_some() && !self.unmapped && !self.is_over()
    }

    /// Whether all copies were submitted to the device, though perhaps not completed.
    pub fn is_issued(&self) -> bool {
        self.path != LoadPath::Direct
            && self.issued + self.read_direct == self.chunks
            && !self.is_over()
    }
}

// Jobs: the scheduler hands them out, and the threads report their outcome.

/// The destination of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadTarget {
    /// The chunk's place in the image of the unit.
    Unit(Target),
    /// A staging slot.
    Staging(u32),
}

/// The source of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopySource {
    /// A staging slot.
    Staging(u32),
    /// The unit's resident copy in host memory.
    Resident,
}

/// A job for a reader thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReadJob {
    /// Read a chunk.
    Chunk {
        /// The load, a number of the scheduler.
        load: u32,
        /// The unit.
        unit: u32,
        /// Index of the chunk in the unit.
        at: u32,
        /// The chunk.
        chunk: Chunk,
        /// The destination.
        to: ReadTarget,
        /// When the job was taken.
        since_ns: u64,
    },
    /// Free the memory of an evicted unit, before the memory of another unit is filled.
    Clear {
        /// The load, a number of the scheduler.
        load: u32,
        /// The evicted unit.
        unit: u32,
    },
}

/// A job for the copier thread: copy a chunk to the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyJob {
    /// The load, a number of the scheduler.
    pub load: u32,
    /// The unit.
    pub unit: u32,
    /// The chunk.
    pub chunk: Chunk,
    /// The source.
    pub from: CopySource,
    /// The destination.
    pub to: Target,
    /// The event that the copy must wait for.
    pub after: Option<Event>,
    /// When the job was taken.
    pub since_ns: u64,
}

/// Progress of a copy.
#[derive(Clone, Debug, PartialEq)]
pub enum CopyProgress {
    /// The device accepted the copy; this event completes it.
    Issued(Event),
    /// The copy ended, with this result.
    Done(Result<()>),
}

impl Scheduler {
    /// The next job of a reader.
    pub fn take_read(&mut self, now_ns: u64) -> Option<ReadJob> {
        let staging = self.staging.len();
        let best = |may: &dyn Fn(&Load) -> bool, loads: &[Option<Load>]| {
            let all = loads.iter().enumerate().filter_map(|(i, l)| Some((i, l.as_ref()?)));
            let able = all.filter(|(_, load)| may(load));
            able.min_by_key(|(_, load)| (load.priority, load.age)).map(|(id, _)| id as u32)
        };
        let clear = |load: &Load| load.clear != NONE && !load.clearing;
        while let Some(id) = best(&clear, &self.loads) {
            let unit = self.load(id).clear;
            if self.has_memory(unit) {
                // The evicted unit got memory again: its memory stays.
                self.load(id).clear = NONE;
                continue;
            }
            self.load(id).clearing = true;
            self.clearing.push(unit);
            return Some(ReadJob::Clear { load: id, unit });
        }
        let clearing = &self.clearing;
        // Loads without a slot leave some staging slots to loads with one, so that those always
        // make progress.
        let may = |load: &Load| {
            let room = match (load.path, load.target) {
                // With direct reads, chunks wait for a slot and are not read into staging ahead.
                (LoadPath::Staged, None) => staging > STAGING_SPARE && !self.reads_direct,
                (LoadPath::Staged, Some(_)) => staging > 0,
                _ => true,
            };
            room && load.wants_read() && !clearing.contains(&load.unit)
        };
        let id = best(&may, &self.loads)?;
        let (path, unit) = (self.load(id).path, self.load(id).unit);
        let to = match (path, self.load(id).target) {
            (LoadPath::Direct, Some(target)) => ReadTarget::Unit(target),
            _ => ReadTarget::Staging(self.staging.pop()?),
        };
        let load = self.load(id);
        let at = load.next_read;
        load.next_read += 1;
        load.reading += 1;
        let chunk = self.chunks.of_unit(unit)[at as usize];
        Some(ReadJob::Chunk { load: id, unit, at, chunk, to, since_ns: now_ns })
    }

    /// Whether a unit's own memory is in use, where each unit has its own addresses.
    pub(super) fn has_memory(&self, unit: u32) -> bool {
        let state = &self.states[unit as usize];
        state.slot != NONE || state.residency != Residency::File
    }

    /// The place of a chunk that is about to be read into staging, if the unit has memory there;
    /// and the event after which that memory may be written.
    pub fn direct_target(&self, read: &ReadJob) -> Option<(Target, Option<Event>)> {
        let ReadJob::Chunk { load, to: ReadTarget::Staging(_), .. } = *read else { return None };
        let load = self.loads.get(load as usize)?.as_ref()?;
        // Chunks go through staging as long as no memory is mapped at the addresses.
        load.target.filter(|_| !load.unmapped).map(|target| (target, load.after))
    }

    /// The device read a chunk into its place, not into staging. Returns true when waiting threads
    /// should acquire again.
    pub fn direct_read_done(&mut self, read: &ReadJob, now_ns: u64) -> Result<bool> {
        let ReadJob::Chunk {
            load: id, unit, chunk, to: ReadTarget::Staging(slot), since_ns, ..
        } = *read
        else {
            return Err(Status::Invalid.into());
        };
        self.staging.push(slot);
        let load = self.load(id);
        load.reading -= 1;
        load.read_direct += 1;
        load.done += 1;
        // With `when_issued`, a thread may have waited for this chunk alone.
        let issued = load.is_issued();
        self.record.moved(Stage::Read, unit, chunk.bytes, since_ns, now_ns, true);
        self.settle(id, now_ns).map(|news| news || issued)
    }

    /// A read has ended. Returns true when waiting threads should acquire again.
    pub fn read_done(&mut self, read: &ReadJob, result: Result<()>, now_ns: u64) -> Result<bool> {
        let (id, at, bytes, to, since_ns) = match *read {
            ReadJob::Chunk { load, at, chunk, to, since_ns, .. } => {
                (load, at, chunk.bytes, to, since_ns)
            }
            ReadJob::Clear { load: id, unit } => {
                self.clearing.retain(|&other| other != unit);
                let load = self.load(id);
                (load.clearing, load.clear) = (false, NONE);
                return self.settle(id, now_ns);
            }
        };
        let load = self.load(id);
        load.reading -= 1;
        let (unit, over) = (load.unit, load.is_over());
        let fine = result.is_ok();
        if let Err(error) = result {
            load.failed.get_or_insert(error);
        } else if let (ReadTarget::Staging(slot), false) = (to, over) {
            load.staged.push_back((at, slot));
        } else {
            load.done += 1;
        }
        if let (ReadTarget::Staging(slot), true) = (to, over || !fine) {
            self.staging.push(slot);
        }
        self.record.moved(Stage::Read, unit, bytes, since_ns, now_ns, fine);
        self.settle(id, now_ns)
    }

    /// The next job of the copier.
    pub fn take_copy(&mut self, now_ns: u64) -> Option<CopyJob> {
        let able = self.loads.iter().enumerate().filter_map(|(id, load)| {
            let load = load.as_ref()?;
            let is_resident = self.states[load.unit as usize].is_resident;
            load.wants_copy(is_resident).then_some((load.priority, load.age, id as u32))
        });
        let (_, _, id) = able.min()?;
        let load = self.load(id);
        let unit = load.unit;
        let to = load.target?;
        let (at, from) = match load.path {
            LoadPath::Staged => {
                let (at, slot) = load.staged.pop_front()?;
                (at, CopySource::Staging(slot))
            }
            _ => (load.next_copy, CopySource::Resident),
        };
        // Each copy waits for the one before it, so the last event fails if any copy failed.
        let after = match (load.copying, load.issued) {
            (0, 0) => load.after,
            (0, _) => None,
            _ => load.event,
        };
        load.next_copy += 1;
        load.copying += 1;
        let chunk = self.chunks.of_unit(unit)[at as usize];
        Some(CopyJob { load: id, unit, chunk, from, to, after, since_ns: now_ns })
    }

    /// The event that a copy had to wait for has ended, with or without an error: no other copy
    /// waits for it.
    pub fn note_waited(&mut self, copy: &CopyJob) {
        let load = self.load(copy.load);
        if load.after == copy.after {
            load.after = None;
        }
    }

    /// A copy made progress. Returns true when waiting threads should acquire again.
    pub fn copied(&mut self, copy: &CopyJob, progress: CopyProgress, now_ns: u64) -> Result<bool> {
        let id = copy.load;
        let result = match progress {
            CopyProgress::Issued(event) => {
                let load = self.load(id);
                load.event = Some(event);
                load.issued += 1;
                return Ok(load.is_issued());
            }
            CopyProgress::Done(result) => result,
        };
        let load = self.load(id);
        load.copying -= 1;
        let fine = result.is_ok();
        match result {
            Ok(()) => load.done += 1,
            Err(error) => drop(load.failed.get_or_insert(error)),
        }
        if let CopySource::Staging(slot) = copy.from {
            self.staging.push(slot);
        }
        let bytes = copy.chunk.bytes;
        self.record.moved(Stage::Copy, copy.unit, bytes, copy.since_ns, now_ns, fine);
        self.settle(id, now_ns)
    }

    /// Ends a load if its last transfer has ended.
    pub(super) fn settle(&mut self, id: u32, now_ns: u64) -> Result<bool> {
        let load = self.load(id);
        let news = if load.is_over() {
            while let Some((_, slot)) = self.load(id).staged.pop_front() {
                self.staging.push(slot);
            }
            if !self.load(id).is_still() {
                return Ok(false);
            }
            self.end_failed(id)?;
            true
        } else if load.done == load.chunks && load.is_still() {
            self.arrive(id)?;
            true
        } else {
            false
        };
        self.advance(now_ns)?;
        Ok(news)
    }

    fn arrive(&mut self, id: u32) -> Result<()> {
        let Some(load) = self.end_load(id) else { return Ok(()) };
        let state = &mut self.states[load.unit as usize];
        if load.target == Some(Target::Resident) {
            (state.resident_load, state.is_resident) = (NONE, true);
            if state.slotless {
                self.new_residents.push(load.unit);
            }
            return Ok(());
        }
        (state.slot_load, state.ready) = (NONE, true);
        let (slot, used) = (state.slot, state.users > 0);
        if !used && state.waiters > 0 {
            state.reserved_for_waiter = true;
            return Ok(());
        }
        if state.is_expert && !used {
            // The expert stays until the thread that requested it has leased it.
            state.reserved = true;
            self.reserved.push(load.unit);
            return Ok(());
        }
        self.pool_of(load.unit).remove_reference(slot)
    }

    /// Ends a load that failed or was canceled, after its last transfer.
    fn end_failed(&mut self, id: u32) -> Result<()> {
        let Some(load) = self.end_load(id) else { return Ok(()) };
        let state = &mut self.states[load.unit as usize];
        if load.target == Some(Target::Resident) {
            state.resident_load = NONE;
            let waiting = state.slot_load;
            if waiting != NONE && self.load(waiting).path == LoadPath::Copied {
                // The resident copy that this load would read does not exist.
                self.load(waiting).failed = load.failed.clone();
                self.drop_load(waiting)?;
            }
        } else {
            self.release_slot(&load)?;
        }
        self.record.note_waste(&load);
        if let Some(error) = load.failed {
            self.states[load.unit as usize].error = Some(error);
        }
        Ok(())
    }

    /// Releases the slot of a load that ended before the unit was complete.
    fn release_slot(&mut self, load: &Load) -> Result<()> {
        let state = &mut self.states[load.unit as usize];
        state.slot_load = NONE;
        let (slot, in_window) = (state.slot, std::mem::take(&mut state.in_window));
        let used = state.users > 0;
        if !used {
            (state.slot, state.event) = (NONE, None);
        }
        if in_window {
            self.window.retain(|&unit| unit != load.unit);
        }
        if slot == NONE {
            return Ok(());
        }
        let pool = self.pool_of(load.unit);
        if load.clear != NONE {
            // No byte was written yet, and the evicted unit's memory still has to be freed.
            pool.set_dirty(slot, load.clear);
        }
        if load.issued == 0 {
            // The next load of the slot must wait for the same event.
            pool.set_after(slot, load.after);
        }
        if !used {
            return pool.empty(slot);
        }
        // The lease that was granted early keeps the slot until it is released.
        if in_window {
            pool.remove_reference(slot)?;
        }
        pool.remove_reference(slot)
    }

    fn end_load(&mut self, id: u32) -> Option<Load> {
        let load = self.loads[id as usize].take();
        self.spare_loads.push(id);
        load
    }

    /// Cancels a load.
    pub(super) fn drop_load(&mut self, id: u32) -> Result<()> {
        let load = self.load(id);
        if load.is_issued() {
            // All copies were submitted, and a lease may exist: the load ends by itself.
            return Ok(());
        }
        load.dropped = true;
        while let Some((_, slot)) = self.load(id).staged.pop_front() {
            self.staging.push(slot);
        }
        if self.load(id).is_still() { self.end_failed(id) } else { Ok(()) }
    }
}

// Mapping: where units have fixed addresses on a device, the copier maps memory at the addresses
// of a unit before it copies.

/// A job for the copier thread: map memory at the addresses of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapJob {
    /// The load, a number of the scheduler.
    pub load: u32,
    /// The unit.
    pub unit: u32,
    /// The memory to map: of a slot, or where the unit stays.
    pub to: Target,
    /// The event after which that memory is unused.
    pub after: Option<Event>,
}

impl Scheduler {
    /// Whether units have memory of the device only while they are loaded.
    pub(super) fn is_mapped(&self) -> bool {
        self.in_place && self.compute == ComputeLocation::Device
    }

    /// Loads that wait for memory, the most urgent first. Each job is to be reported with
    /// [`Scheduler::note_mapped`].
    pub fn take_map_jobs(&mut self) -> Vec<MapJob> {
        if !self.is_mapped() {
            return Vec::new();
        }
        let mut found = Vec::new();
        for (id, load) in (0..).zip(&mut self.loads) {
            let Some(load) = load.as_mut().filter(|load| load.wants_memory()) else { continue };
            let Some(to) = load.target else { continue };
            load.mapping = true;
            let job = MapJob { load: id, unit: load.unit, to, after: load.after };
            found.push((load.priority, load.age, job));
        }
        found.sort_unstable_by_key(|(priority, age, _)| (*priority, *age));
        found.into_iter().map(|(_, _, job)| job).collect()
    }

    /// Outcome of a map job: memory is mapped, the job must be tried again (false), or it failed.
    /// Returns true when waiting threads should acquire again.
    pub fn note_mapped(&mut self, job: &MapJob, result: Result<bool>, now_ns: u64) -> Result<bool> {
        let load = self.load(job.load);
        load.mapping = false;
        match result {
            Ok(true) => (load.unmapped, load.after) = (false, None),
            Ok(false) => {}
            Err(error) => drop(load.failed.get_or_insert(error)),
        }
        if load.is_over() { self.settle(job.load, now_ns) } else { Ok(false) }
    }

    /// The event after which the memory of a slot is unused, also when the slot was granted to a
    /// load that has not begun.
    pub fn slot_event(&self, slot: Target) -> Option<Event> {
        let of_load = self.loads().find(|load| load.target == Some(slot) && load.unmapped);
        self.event_of(slot).or(of_load.and_then(|load| load.after))
    }
}
