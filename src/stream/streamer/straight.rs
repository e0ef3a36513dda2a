//! Chunks that are read straight into slots in device memory, past staging.

use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Mutex};
use crate::device::direct::{DIRECT_GRAIN_BYTES, DirectFile};
use crate::device::{Device, Event, State as DeviceState};
use crate::fail;
use crate::io::fixed::FixedFiles;
use crate::stream::core::{Goal, Read};
use crate::stream::places::Places;
use crate::stream::streamer::{Opts, Shared, State, Verify};
use crate::stream::units::Chunk;

/// Reads that fail one after the other until no more are tried.
const MOST_FAILURES: u32 = 3;

/// What a device reads by itself.
pub struct Straight {
    device: Arc<dyn Device>,
    files: Vec<DirectFile>,
    /// Slots that are read into: from and to.
    slots: Vec<(u64, u64)>,
    is_over: Mutex<bool>,
    /// It has failed too often.
    is_off: AtomicBool,
    in_a_row: AtomicU32,
    bytes: AtomicU64,
    failed: AtomicU64,
}

impl Straight {
    /// Tells a device of files and slots. [`Status::Unavailable`] and why, where it cannot read
    /// them by itself.
    pub fn open(files: &dyn FixedFiles, places: &Places, opts: &Opts) -> Result<Straight> {
        let Some(device) = &opts.device else {
            fail!(Invalid, "direct reads go to a device, and none was given");
        };
        if opts.in_place {
            fail!(Unsupported, "direct reads go to slots, and units in place have none");
        }
        if opts.verify == Verify::Always {
            fail!(
                Unsupported,
                "direct reads and checksums of all that is read: sums are made in host memory, \
                 which direct reads pass by"
            );
        }
        let direct = device.direct()?;
        let mut straight = Straight {
            device: device.clone(),
            files: Vec::new(),
            slots: Vec::new(),
            is_over: Mutex::new(false),
            is_off: AtomicBool::new(false),
            in_a_row: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        };
        straight.files.try_reserve_exact(files.count() as usize).map_err(|_| Status::NoMem)?;
        // What was told before one fails is taken back when this is dropped.
        for file in 0..files.count() {
            let of = files.descriptor(file)?;
            // SAFETY: the streamer has the files until after this has been closed.
            straight.files.push(unsafe { direct.add_file(of.number, of.file_system)? });
        }
        for (address, bytes) in places.slots_on_device() {
            // SAFETY: slots stay until after this has been closed.
            unsafe { direct.add_memory(address, bytes) }.map_err(|error| {
                let text = format!("slots of {bytes} bytes: {}", error.message());
                Error::new(Status::Unavailable, text)
            })?;
            straight.slots.push((address, address + bytes));
        }
        log::info!("slots are read into by {}", direct.describe());
        Ok(straight)
    }

    /// Whether a chunk can be read by itself to an address: whole grains, which the file has to
    /// the last, into a slot. What is not so goes by way of staging: the end of a file, which
    /// seldom is on a grain, and homes, which are read once and would have to be pinned for it.
    fn takes(&self, chunk: &Chunk, file_bytes: u64, start: u64) -> bool {
        let (from, bytes) = (chunk.read_offset, chunk.read_bytes);
        let on_grain = [from, bytes, start].iter().all(|n| n % DIRECT_GRAIN_BYTES == 0);
        let has_all = from.checked_add(bytes).is_some_and(|end| end <= file_bytes);
        let in_slot = |&(first, end): &(u64, u64)| first <= start && end - start.min(end) >= bytes;
        on_grain && has_all && self.slots.iter().any(in_slot)
    }

    /// Reads a chunk. False: it could not, and goes by way of staging.
    ///
    /// # Safety
    /// Nobody else uses the grains there until this returns, also nothing that the device does.
    pub unsafe fn read(&self, chunk: &Chunk, start: u64) -> bool {
        let read = self.device.direct().and_then(|direct| {
            let file = *self.files.get(chunk.file as usize).ok_or(Status::Invalid)?;
            // SAFETY: the caller's promise.
            unsafe { direct.read(file, chunk.read_offset, start, chunk.read_bytes) }
        });
        match read {
            Ok(()) => {
                self.in_a_row.store(0, Ordering::Relaxed);
                self.bytes.fetch_add(chunk.bytes, Ordering::Relaxed);
                true
            }
            Err(error) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                let in_a_row = self.in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
                log::warn!("a direct read failed, it goes by way of host memory: {error}");
                if in_a_row >= MOST_FAILURES && !self.is_off.swap(true, Ordering::AcqRel) {
                    log::warn!("direct reads failed {in_a_row} times in a row: no more are tried");
                }
                false
            }
        }
    }

    /// It has failed too often.
    pub fn is_off(&self) -> bool {
        self.is_off.load(Ordering::Acquire)
    }

    /// Bytes that were read, and reads that failed.
    pub fn counts(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }

    /// Takes back what the device was told. No read is under way, and none is begun any more.
    pub fn close(&self) {
        if std::mem::replace(&mut *self.is_over.lock(), true) {
            return;
        }
        let Ok(direct) = self.device.direct() else { return };
        for &(address, _) in &self.slots {
            // SAFETY: told of once; no read is under way.
            if let Err(error) = unsafe { direct.remove_memory(address) } {
                log::warn!("memory for direct reads stays known: {error}");
            }
        }
        for &file in &self.files {
            // SAFETY: as above.
            if let Err(error) = unsafe { direct.remove_file(file) } {
                log::warn!("a file for direct reads stays known: {error}");
            }
        }
    }
}

impl Drop for Straight {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Where a chunk can be read to straight: the grains around it, and the event after which
    /// they may be written. Not where a checksum of the bytes is wanted.
    pub(super) fn landing(
        &self,
        state: &State,
        read: &Read,
        verify: bool,
    ) -> Option<(u64, Option<Event>)> {
        let straight = self.straight.as_ref().filter(|straight| !straight.is_off() && !verify)?;
        let Read::Chunk { unit, chunk, .. } = read else { return None };
        let (goal, after) = state.core.landing(read)?;
        if goal == Goal::Home {
            return None;
        }
        let start = state.places.at(*unit, goal).ok()?.address.checked_add(chunk.read_at)?;
        straight.takes(chunk, self.files.bytes(chunk.file), start).then_some((start, after))
    }

    /// Reads a chunk to there, unless the device still uses the slot: then it goes into staging
    /// meanwhile. Whether it has been read.
    ///
    /// # Safety
    /// The grains are memory that the core keeps for this chunk.
    pub(super) unsafe fn land(&self, read: &Read, (start, after): (u64, Option<Event>)) -> bool {
        let (Some(straight), Read::Chunk { chunk, .. }) = (&self.straight, read) else {
            return false;
        };
        // SAFETY: the caller's promise; what the device did there before has ended.
        self.has_passed(after) && unsafe { straight.read(chunk, start) }
    }

    /// Whether an event has come. One that the device does not know any more has; one that failed
    /// is for whoever copies behind it.
    fn has_passed(&self, event: Option<Event>) -> bool {
        let (Some(event), Some(device)) = (event, &self.device) else { return true };
        match device.state(event) {
            Ok(state) => state == DeviceState::Done,
            Err(error) => error.status() == Status::Handle,
        }
    }
}
