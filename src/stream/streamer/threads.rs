//! The threads of a streamer: readers, and one copier for the device.

use std::collections::VecDeque;

use crate::base::panic;
use crate::base::runtime::Role;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Guard, JoinHandle, spawn};
use crate::device::{Copy as Transfer, Device, Direction, Event, State as DeviceState, Stream};
use crate::io::files::{Access, FileId, Piece};
use crate::stream::memory::device_window::FreeJob;
use crate::stream::memory::{FreedBlock, allocate_on_device};
use crate::stream::scheduler::{CopyJob, CopyProgress, CopySource, MapJob, ReadJob, ReadTarget};
use crate::stream::streamer::{Shared, State, Verify};
use crate::stream::units::{ALIGN_BYTES, Chunk};

/// Bytes of one request to the disk; several requests of a chunk are in flight.
const REQUEST_BYTES: u64 = 1 << 20;
/// Copies that are submitted to the device at once, so that the next one begins when one ends.
const COPIES: usize = 2;

/// Starts the threads.
pub(super) fn start_threads(shared: &Arc<Shared>, readers: u32) -> Result<Vec<JoinHandle<()>>> {
    let copiers = u32::from(shared.device.is_some());
    let mut threads = Vec::new();
    for number in 0..readers + copiers {
        let is_reader = number < readers;
        let name = if is_reader { "kvt-weights" } else { "kvt-copies" };
        shared.state.lock().threads += 1;
        let own = shared.clone();
        let started = spawn(name.into(), move || {
            own.runtime.thread_started(Role::Streamer, number);
            let lived =
                panic::catch(|| if is_reader { own.run_reader() } else { own.run_copier() });
            let lived = lived.and_then(|settled| settled.map_err(|error| error.to_string()));
            if let Err(text) = lived {
                own.state.lock().broken = true;
                own.runtime.poison(&text); // the handler takes the lock
            }
            own.state.lock().threads -= 1;
            own.end(Status::Closed);
        });
        match started {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                shared.state.lock().threads -= 1;
                shared.end(Status::Closed);
                threads.into_iter().for_each(|thread: JoinHandle<()>| drop(thread.join()));
                return Err(error);
            }
        }
    }
    Ok(threads)
}

impl Shared {
    fn run_reader(&self) -> Result<()> {
        let mut pieces = Vec::new(); // reused, so that chunks allocate nothing
        let mut state = self.state.lock();
        while state.check().is_ok() {
            if let Some(note) = state.note.take() {
                drop(state);
                log::warn!("{note}");
                state = self.state.lock();
                continue;
            }
            let Some(read) = state.scheduler.take_read(self.now_ns()) else {
                self.reads.wait(&mut state);
                continue;
            };
            self.reads.notify_one(); // the woken thread wakes the next one
            let (address, verify) = match read {
                ReadJob::Clear { .. } => (Ok(0), false),
                ReadJob::Chunk { unit, chunk, to, .. } => {
                    let address = match to {
                        ReadTarget::Unit(target) => {
                            state.weight_memory.at(unit, target).map(|at| at.address + chunk.at)
                        }
                        ReadTarget::Staging(slot) => {
                            state.weight_memory.staging(slot).map(|at| at + lead(&chunk))
                        }
                    };
                    let known = state.verified[unit as usize];
                    (address, self.verify.checks(known))
                }
            };
            let direct_target = self.direct_target(&state, &read, verify);
            if let ReadJob::Clear { unit, .. } = read {
                // SAFETY: the scheduler assigns that memory to no unit until it learns of the end
                // of this job. The lock is held, so the memory does not change meanwhile.
                if let Err(error) = unsafe { state.weight_memory.clear(unit) } {
                    state.note = Some(error.to_string());
                }
            }
            drop(state);
            // SAFETY: the scheduler reserves the memory for this chunk until it learns of the
            // read's end.
            let read_direct =
                direct_target.is_some_and(|place| unsafe { self.read_direct(&read, place) });
            let result = match (read, address) {
                (ReadJob::Clear { .. }, _) => Ok(()),
                _ if read_direct => Ok(()),
                (_, Err(error)) => Err(error),
                (ReadJob::Chunk { unit, chunk, .. }, Ok(address)) => {
                    // SAFETY: the scheduler reserves the memory for this chunk until it learns of
                    // the read's end; the alignment bytes around it belong to the same image.
                    unsafe { self.read(unit, &chunk, address, verify, &mut pieces) }
                }
            };
            state = self.state.lock();
            let settled = match read_direct {
                true => state.scheduler.direct_read_done(&read, self.now_ns()),
                false => state.scheduler.read_done(&read, result, self.now_ns()),
            };
            state
                .scheduler
                .set_direct_reads(self.direct_reader.as_ref().is_some_and(|s| !s.is_off()));
            if let ReadJob::Chunk { unit, .. } = read
                && state.scheduler.is_in_memory(unit)
            {
                state.verified[unit as usize] = true;
            }
            self.settle_chunk(&mut state, !matches!(settled, Ok(false)));
            settled?; // an error is a defect of the scheduler
        }
        Ok(())
    }

    /// # Safety
    /// The aligned memory around `address` and the chunk's length is used by nothing else.
    pub(super) unsafe fn read(
        &self,
        unit: u32,
        chunk: &Chunk,
        address: u64,
        verify: bool,
        pieces: &mut Vec<Piece>,
    ) -> Result<()> {
        let (offset, start) = (chunk.read_offset, address - lead(chunk));
        debug_assert!(
            start % ALIGN_BYTES == 0,
            "a chunk has the same alignment in its image as in its file"
        );
        let all = chunk.read_bytes;
        pieces.clear();
        pieces.extend((0..all.div_ceil(REQUEST_BYTES)).map(|i| {
            let at = i * REQUEST_BYTES;
            let bytes = REQUEST_BYTES.min(all - at);
            let memory = (start + at) as *mut u8;
            Piece::one(FileId(chunk.file), Access::Read, offset + at, memory, bytes)
        }));
        // SAFETY: the caller's promise.
        unsafe { self.files.transfer(pieces) };
        for piece in pieces.drain(..) {
            piece.result.map_err(|error| self.explain(error, chunk))?;
        }
        if verify {
            // SAFETY: just filled, and reserved for this read until it returns.
            let bytes =
                unsafe { std::slice::from_raw_parts(address as *const u8, chunk.bytes as usize) };
            let settled = self.sums.note(unit, chunk.extent, chunk.offset, bytes);
            settled.map_err(|error| self.explain(error, chunk))?;
        }
        Ok(())
    }

    /// The error of a failed read, replaced by the reason if the file changed.
    fn explain(&self, error: Error, chunk: &Chunk) -> Error {
        let changed = self.files.check(chunk.file).err();
        let error = changed.filter(|e| e.status() == Status::Corrupt).unwrap_or(error);
        let path = self.model.files.get(chunk.file as usize).map(|file| file.path.display());
        path.map_or(error.clone(), |path| error.within(&path.to_string()))
    }

    fn run_copier(&self) -> Result<()> {
        let Some(device) = &self.device else { return Ok(()) };
        let mut issued: VecDeque<(CopyJob, Event)> = VecDeque::new();
        let mut state = self.state.lock();
        loop {
            let is_running = state.check().is_ok();
            let mut progress = MapProgress::Nothing;
            if is_running {
                (state, progress) = self.map_memory(&**device, state)?;
            }
            let next = if is_running && issued.len() < COPIES {
                state.scheduler.take_copy(self.now_ns())
            } else {
                None
            };
            let settled = if let Some(copy) = next {
                let lowered = self.transfer_of(&state, &copy);
                drop(state);
                let event =
                    lowered.and_then(|transfer| self.put_copy(&**device, transfer, copy.after));
                // A copy that waits for a failed event would fail at each attempt.
                let ended = |after| device.state(after) != Ok(DeviceState::Pending);
                let note_waited = event.is_err() && copy.after.is_some_and(ended);
                state = self.state.lock();
                if note_waited {
                    state.scheduler.note_waited(&copy);
                }
                let progress = match event {
                    Ok(event) => {
                        issued.push_back((copy, event));
                        CopyProgress::Issued(event)
                    }
                    Err(error) => CopyProgress::Done(Err(error)),
                };
                state.scheduler.copied(&copy, progress, self.now_ns())
            } else if let Some((copy, event)) = issued.pop_front() {
                drop(state);
                let result = device.wait(event, 0);
                state = self.state.lock();
                let settled =
                    state.scheduler.copied(&copy, CopyProgress::Done(result), self.now_ns());
                // Chunks that passed through staging were verified there, all of them.
                state.verified[copy.unit as usize] |= state.scheduler.is_in_memory(copy.unit);
                if !state.scheduler.holds_event(copy.unit, event) {
                    drop(state);
                    self.release_events(&[event]);
                    state = self.state.lock();
                }
                settled
            } else if is_running {
                state = self.wait_for_work(&**device, state, progress);
                continue;
            } else {
                return Ok(());
            };
            self.settle_chunk(&mut state, !matches!(settled, Ok(false)));
            settled?;
        }
    }

    /// Submits a copy after an event. An event that the device does not know was released before,
    /// so it has completed.
    fn put_copy(
        &self,
        device: &dyn Device,
        mut transfer: Transfer<'_>,
        after: Option<Event>,
    ) -> Result<Event> {
        let unknown = |error: &Error| error.status() == Status::Handle;
        let mut put = |after| {
            // SAFETY: the scheduler reserves both sides for this copy until it learns of its end.
            unsafe { device.submit(Stream(0), after, std::slice::from_mut(&mut transfer)) }
        };
        match put(after) {
            Err(error)
                if unknown(&error)
                    && after.is_some_and(|after| {
                        device.state(after).is_err_and(|error| unknown(&error))
                    }) =>
            {
                put(None)
            }
            outcome => outcome,
        }
    }

    /// Releases events of the device.
    pub(super) fn release_events(&self, events: &[Event]) {
        let Some(device) = self.device.as_ref().filter(|device| device.facts().asynchronous) else {
            return;
        };
        for &event in events {
            if let Err(error) = device.release(event) {
                log::debug!("an event could not be released: {error}");
            }
        }
    }

    fn transfer_of(&self, state: &State, copy: &CopyJob) -> Result<Transfer<'static>> {
        let (chunk, weight_memory) = (&copy.chunk, &state.weight_memory);
        let from = match copy.from {
            CopySource::Staging(slot) => weight_memory.staging(slot)? + lead(chunk),
            CopySource::Resident => {
                weight_memory.at(copy.unit, crate::stream::scheduler::Target::Resident)?.address
                    + chunk.at
            }
        };
        let to = weight_memory.at(copy.unit, copy.to)?;
        let from = from as *mut u8;
        Transfer::bytes(from, to.address + chunk.at, chunk.bytes, Direction::Scatter, to.memory)
    }
}

/// Bytes before a chunk in its first alignment block.
fn lead(chunk: &Chunk) -> u64 {
    chunk.offset - chunk.read_offset
}

impl Verify {
    /// Whether a unit is to be compared, given whether it was before.
    pub(super) fn checks(self, known: bool) -> bool {
        match self {
            Verify::Never => false,
            Verify::First => !known,
            Verify::Always => true,
        }
    }
}

// Mapping and freeing of device memory: done by the copier without a lock, since drivers are slow.

/// Longest sleep of the copier while it waits for an event of the engine.
const MAX_NAP_NS: u64 = 1_000_000;

/// The outcome of a search for mapping work.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum MapProgress {
    /// No work.
    Nothing,
    /// Work was done, and there may be more.
    Something,
    /// The device uses the memory to be mapped until this event.
    Wait(Event),
}

impl Shared {
    /// Frees memory, or maps memory at the addresses of one unit: the first whose event has
    /// completed. Copies go on in between.
    pub(super) fn map_memory<'a>(
        &'a self,
        device: &dyn Device,
        mut state: Guard<'a, State>,
    ) -> Result<(Guard<'a, State>, MapProgress)> {
        let leaving = state.weight_memory.device_window().map(|window| window.take_freeing());
        if let Some(leaving) = leaving.filter(|leaving| !leaving.is_empty()) {
            return Ok((self.free_window_memory(state, leaving), MapProgress::Something));
        }
        let spent = state.weight_memory.take_freed_blocks();
        if !spent.is_empty() {
            return Ok((self.free_blocks(state, spent), MapProgress::Something));
        }
        if let Some((unit, bytes)) = state.weight_memory.take_request() {
            drop(state);
            let made = allocate_on_device(bytes, &self.source());
            state = self.state.lock();
            state.weight_memory.note_allocated(unit, made);
            self.settle(&mut state);
            return Ok((state, MapProgress::Something));
        }
        let mut found = MapProgress::Nothing;
        for job in state.scheduler.take_map_jobs() {
            let outcome = if found == MapProgress::Something {
                Ok(false) // in a later call
            } else {
                let outcome;
                (state, outcome) = self.map_one(device, state, &job);
                match outcome {
                    Ok(Some(event)) => found = MapProgress::Wait(event),
                    _ => found = MapProgress::Something,
                }
                outcome.map(|waits| waits.is_none())
            };
            let settled = state.scheduler.note_mapped(&job, outcome, self.now_ns());
            self.settle_chunk(&mut state, !matches!(settled, Ok(false)));
            settled?;
        }
        Ok((state, found))
    }

    /// Frees blocks of device memory.
    fn free_blocks<'a>(
        &'a self,
        state: Guard<'a, State>,
        spent: Vec<FreedBlock>,
    ) -> Guard<'a, State> {
        drop(state);
        let count = spent.len();
        for block in spent {
            // SAFETY: blocks are queued when nothing uses them, and no work in flight does.
            let outcome = unsafe { block.free() };
            outcome.unwrap_or_else(|error| log::warn!("{error}"));
        }
        let mut state = self.state.lock();
        state.weight_memory.note_freed(count);
        self.settle(&mut state);
        state
    }

    /// Frees memory of units in place.
    fn free_window_memory<'a>(
        &'a self,
        state: Guard<'a, State>,
        leaving: Vec<FreeJob>,
    ) -> Guard<'a, State> {
        drop(state);
        let free_window_memory = |job: FreeJob| {
            // SAFETY: memory is queued when nothing uses it, and no work in flight does.
            let destroyed = unsafe { job.destroy() };
            let is_stuck = destroyed.is_err();
            destroyed.unwrap_or_else(|error| log::warn!("{error}"));
            (job, is_stuck)
        };
        let destroyed_jobs: Vec<_> = leaving.into_iter().map(free_window_memory).collect();
        let mut state = self.state.lock();
        if let Some(window) = state.weight_memory.device_window() {
            destroyed_jobs.into_iter().for_each(|(job, is_stuck)| window.note_freed(job, is_stuck));
        }
        self.settle(&mut state);
        state
    }

    /// Maps memory at the addresses of a unit. Some(event): possible only after that event.
    fn map_one<'a>(
        &'a self,
        device: &dyn Device,
        mut state: Guard<'a, State>,
        job: &MapJob,
    ) -> (Guard<'a, State>, Result<Option<Event>>) {
        let window = state.weight_memory.device_window().ok_or(Status::State.into());
        let (work, slots) = match window.and_then(|all| all.map_work(job.unit, job.to)) {
            Ok(planned) => planned,
            Err(error) => return (state, Err(error)),
        };
        let of_slots = slots.iter().filter_map(|&slot| state.scheduler.slot_event(slot));
        let events: Vec<Event> = of_slots.chain(job.after).collect();
        drop(state);
        // A failed event has completed, too; an unknown one was released.
        let is_open = |event: &Event| device.state(*event) == Ok(DeviceState::Pending);
        let outcome = match events.into_iter().find(is_open) {
            Some(event) => Ok(Some(event)),
            // SAFETY: the last users of the memory and of the addresses have released them, and
            // their device work has ended; only this thread copies to either.
            None => unsafe { work.run() }.map(|()| None),
        };
        let mut state = self.state.lock();
        match (&outcome, state.weight_memory.device_window()) {
            (Ok(None), Some(window)) => window.note_mapped(job.unit, job.to),
            (Err(_), Some(window)) => window.note_map_failed(job.unit, job.to),
            _ => {}
        }
        (state, outcome)
    }

    /// Waits for work of the copier.
    pub(super) fn wait_for_work<'a>(
        &'a self,
        device: &dyn Device,
        mut state: Guard<'a, State>,
        found: MapProgress,
    ) -> Guard<'a, State> {
        let event = match found {
            MapProgress::Something => return state,
            MapProgress::Nothing => state.event_to_wait_for(),
            MapProgress::Wait(event) => Some(event),
        };
        let Some(event) = event else {
            self.copies.wait(&mut state);
            return state;
        };
        drop(state);
        // The wait is bounded: a copy may be added or end meanwhile.
        let waited = device.wait(event, self.now_ns().saturating_add(MAX_NAP_NS));
        waited.unwrap_or_else(|error| log::trace!("an event of the engine failed: {error}"));
        self.release_ended_events();
        self.state.lock()
    }
}
