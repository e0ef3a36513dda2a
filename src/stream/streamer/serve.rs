//! The threads of a streamer: readers, and one that copies to the device.

use std::collections::VecDeque;

use crate::base::panic;
use crate::base::runtime::Role;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, JoinHandle, spawn};
use crate::device::{Copy as Transfer, Device, Event, State as DeviceState, Stream, Way};
use crate::io::files::{FileId, Piece, Way as FileWay};
use crate::stream::core::{Copied, Copy, From, Read, To};
use crate::stream::streamer::backing::Backed;
use crate::stream::streamer::{Shared, State, Verify};
use crate::stream::units::{Chunk, GRAIN_BYTES};

/// What one request to the disk asks for: several are in flight for a chunk.
const REQUEST_BYTES: u64 = 1 << 20;
/// Copies that the device has at once: while one ends the next begins.
const COPIES: usize = 2;

/// Starts the threads.
pub(super) fn start(shared: &Arc<Shared>, readers: u32) -> Result<Vec<JoinHandle<()>>> {
    let copiers = u32::from(shared.device.is_some());
    let mut threads = Vec::new();
    for number in 0..readers + copiers {
        let is_reader = number < readers;
        let name = if is_reader { "kvt-weights" } else { "kvt-copies" };
        shared.state.lock().threads += 1;
        let own = shared.clone();
        let started = spawn(name.into(), move || {
            own.runtime.greet(Role::Streamer, number);
            let lived = panic::catch(|| if is_reader { own.read_all() } else { own.copy_all() });
            let lived = lived.and_then(|told| told.map_err(|error| error.to_string()));
            if let Err(text) = lived {
                own.state.lock().broken = true;
                own.runtime.poison(&text); // who is told of it asks for the lock
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
    fn read_all(&self) -> Result<()> {
        let mut pieces = Vec::new(); // kept, so that chunks need no memory of their own
        let mut state = self.state.lock();
        while state.check().is_ok() {
            if let Some(note) = state.note.take() {
                drop(state);
                log::warn!("{note}");
                state = self.state.lock();
                continue;
            }
            let Some(read) = state.core.take_read(self.now_ns()) else {
                self.reads.wait(&mut state);
                continue;
            };
            self.reads.notify_one(); // it wakes the next if there is more
            let (address, verify) = match read {
                Read::Clear { .. } => (Ok(0), false),
                Read::Chunk { unit, chunk, to, .. } => {
                    let address = match to {
                        To::Place(goal) => {
                            state.places.at(unit, goal).map(|at| at.address + chunk.at)
                        }
                        To::Staging(slot) => state.places.staging(slot).map(|at| at + lead(&chunk)),
                    };
                    let known = state.verified[unit as usize];
                    (address, self.verify.looks(known))
                }
            };
            let landing = self.landing(&state, &read, verify);
            if let Read::Clear { unit, .. } = read {
                // SAFETY: the core hears of the end of this after it, and lets nobody have
                // that memory before. Under the lock: places do not change meanwhile.
                if let Err(error) = unsafe { state.places.clear(unit) } {
                    state.note = Some(error.to_string());
                }
            }
            drop(state);
            // SAFETY: memory that the core keeps for this chunk until it hears of its end.
            let landed = landing.is_some_and(|place| unsafe { self.land(&read, place) });
            let result = match (read, address) {
                (Read::Clear { .. }, _) => Ok(()),
                _ if landed => Ok(()),
                (_, Err(error)) => Err(error),
                (Read::Chunk { unit, chunk, .. }, Ok(address)) => {
                    // SAFETY: memory that the core keeps for this chunk until it hears of
                    // its end; the whole grains around it belong to the same image.
                    unsafe { self.read(unit, &chunk, address, verify, &mut pieces) }
                }
            };
            state = self.state.lock();
            let told = match landed {
                true => state.core.read_landed(&read, self.now_ns()),
                false => state.core.read_done(&read, result, self.now_ns()),
            };
            state.core.set_lands(self.straight.as_ref().is_some_and(|s| !s.is_off()));
            if let Read::Chunk { unit, .. } = read
                && state.core.is_there(unit)
            {
                state.verified[unit as usize] = true;
            }
            self.settle_chunk(&mut state, !matches!(told, Ok(false)));
            told?; // an error would be a defect of ours
        }
        Ok(())
    }

    /// # Safety
    /// The grains that `address` and the chunk's length lie in are memory that nobody else
    /// touches.
    pub(super) unsafe fn read(
        &self,
        unit: u32,
        chunk: &Chunk,
        address: u64,
        verify: bool,
        pieces: &mut Vec<Piece>,
    ) -> Result<()> {
        let (offset, start) = (chunk.read_offset, address - lead(chunk));
        debug_assert!(start % GRAIN_BYTES == 0, "a chunk lies in its image as in its file");
        let all = chunk.read_bytes;
        pieces.clear();
        pieces.extend((0..all.div_ceil(REQUEST_BYTES)).map(|i| {
            let at = i * REQUEST_BYTES;
            let bytes = REQUEST_BYTES.min(all - at);
            let memory = (start + at) as *mut u8;
            Piece::one(FileId(chunk.file), FileWay::Read, offset + at, memory, bytes)
        }));
        // SAFETY: the caller's promise.
        unsafe { self.files.transfer(pieces) };
        for piece in pieces.drain(..) {
            piece.result.map_err(|error| self.explain(error, chunk))?;
        }
        if verify {
            // SAFETY: just filled, and nobody else's until this returns.
            let bytes =
                unsafe { std::slice::from_raw_parts(address as *const u8, chunk.bytes as usize) };
            let told = self.sums.note(unit, chunk.extent, chunk.offset, bytes);
            told.map_err(|error| self.explain(error, chunk))?;
        }
        Ok(())
    }

    /// A read that fails may have a reason that says more.
    fn explain(&self, error: Error, chunk: &Chunk) -> Error {
        let changed = self.files.check(chunk.file).err();
        let error = changed.filter(|e| e.status() == Status::Corrupt).unwrap_or(error);
        let path = self.model.files.get(chunk.file as usize).map(|file| file.path.display());
        path.map_or(error.clone(), |path| error.within(&path.to_string()))
    }

    fn copy_all(&self) -> Result<()> {
        let Some(device) = &self.device else { return Ok(()) };
        let mut issued: VecDeque<(Copy, Event)> = VecDeque::new();
        let mut state = self.state.lock();
        loop {
            let going = state.check().is_ok();
            let mut backed = Backed::Nothing;
            if going {
                (state, backed) = self.back(&**device, state)?;
            }
            let next = if going && issued.len() < COPIES {
                state.core.take_copy(self.now_ns())
            } else {
                None
            };
            let told = if let Some(copy) = next {
                let lowered = self.lower(&state, &copy);
                drop(state);
                let event =
                    lowered.and_then(|transfer| self.put_copy(&**device, transfer, copy.after));
                // One that failed would fail each copy that waits for it, for ever.
                let ended = |after| device.state(after) != Ok(DeviceState::Pending);
                let has_waited = event.is_err() && copy.after.is_some_and(ended);
                state = self.state.lock();
                if has_waited {
                    state.core.has_waited(&copy);
                }
                let how = match event {
                    Ok(event) => {
                        issued.push_back((copy, event));
                        Copied::Issued(event)
                    }
                    Err(error) => Copied::Done(Err(error)),
                };
                state.core.copied(&copy, how, self.now_ns())
            } else if let Some((copy, event)) = issued.pop_front() {
                drop(state);
                let result = device.wait(event, 0);
                state = self.state.lock();
                let told = state.core.copied(&copy, Copied::Done(result), self.now_ns());
                // What came by way of staging was looked at there, all of it.
                state.verified[copy.unit as usize] |= state.core.is_there(copy.unit);
                if !state.core.keeps(copy.unit, event) {
                    drop(state);
                    self.release_events(&[event]);
                    state = self.state.lock();
                }
                told
            } else if going {
                state = self.rest(&**device, state, backed);
                continue;
            } else {
                return Ok(());
            };
            self.settle_chunk(&mut state, !matches!(told, Ok(false)));
            told?;
        }
    }

    /// Puts a copy on the device, behind an event that may have been released by now: then it
    /// has passed.
    fn put_copy(
        &self,
        device: &dyn Device,
        mut transfer: Transfer<'_>,
        after: Option<Event>,
    ) -> Result<Event> {
        let unknown = |error: &Error| error.status() == Status::Handle;
        let mut put = |after| {
            // SAFETY: the core keeps both sides for this copy until it hears of its end.
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
            said => said,
        }
    }

    /// Gives events back to the device.
    pub(super) fn release_events(&self, events: &[Event]) {
        let Some(device) = self.device.as_ref().filter(|device| device.facts().asynchronous) else {
            return;
        };
        for &event in events {
            if let Err(error) = device.release(event) {
                log::debug!("an event stays with its device: {error}");
            }
        }
    }

    fn lower(&self, state: &State, copy: &Copy) -> Result<Transfer<'static>> {
        let (chunk, places) = (&copy.chunk, &state.places);
        let from = match copy.from {
            From::Staging(slot) => places.staging(slot)? + lead(chunk),
            From::Home => places.at(copy.unit, crate::stream::core::Goal::Home)?.address + chunk.at,
        };
        let to = places.at(copy.unit, copy.to)?;
        let from = from as *mut u8;
        Transfer::bytes(from, to.address + chunk.at, chunk.bytes, Way::Scatter, to.memory)
    }
}

/// How many bytes come before a chunk in its first grain.
fn lead(chunk: &Chunk) -> u64 {
    chunk.offset - chunk.read_offset
}

impl Verify {
    /// Whether a unit's bytes are looked at, of which that is known.
    pub(super) fn looks(self, known: bool) -> bool {
        match self {
            Verify::Never => false,
            Verify::First => !known,
            Verify::Always => true,
        }
    }
}
