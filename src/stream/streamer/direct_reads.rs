//! Direct reads: the device reads chunks from files into its slots itself, without staging.

use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Mutex};
use crate::device::direct::{DIRECT_ALIGN_BYTES, DirectFile};
use crate::device::{Device, Event, State as DeviceState};
use crate::fail;
use crate::io::model_files::ModelFiles;
use crate::stream::memory::WeightMemory;
use crate::stream::scheduler::{ReadJob, Target};
use crate::stream::streamer::{Opts, Shared, State, Verify};
use crate::stream::units::Chunk;

/// Consecutive failures after which direct reads are turned off.
const MOST_FAILURES: u32 = 3;

/// The files and slots that are registered with a device for direct reads.
pub struct DirectReader {
    device: Arc<dyn Device>,
    files: Vec<DirectFile>,
    /// Slots that can be read into: start and end.
    slots: Vec<(u64, u64)>,
    is_over: Mutex<bool>,
    /// Direct reads failed too often, and are turned off.
    is_off: AtomicBool,
    in_a_row: AtomicU32,
    bytes: AtomicU64,
    failed: AtomicU64,
}

impl DirectReader {
    /// Registers files and slots with a device. [`Status::Unavailable`] with the reason, if the
    /// device cannot read them.
    pub fn open(
        files: &dyn ModelFiles,
        weight_memory: &WeightMemory,
        opts: &Opts,
    ) -> Result<DirectReader> {
        let Some(device) = &opts.device else {
            fail!(Invalid, "direct reads need a device, and none was given: set `device`");
        };
        if opts.in_place {
            fail!(
                Unsupported,
                "direct reads need slots, and units in place have none: turn off `direct` or \
                 `in_place`"
            );
        }
        if opts.verify == Verify::Always {
            fail!(
                Unsupported,
                "direct reads cannot be verified always, since checksums are computed in host \
                 memory: use `verify` never or first, or turn off `direct`"
            );
        }
        let direct = device.direct()?;
        let mut reader = DirectReader {
            device: device.clone(),
            files: Vec::new(),
            slots: Vec::new(),
            is_over: Mutex::new(false),
            is_off: AtomicBool::new(false),
            in_a_row: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        };
        reader.files.try_reserve_exact(files.count() as usize).map_err(|_| Status::NoMem)?;
        // Registrations before a failed one are undone when the reader is dropped.
        for file in 0..files.count() {
            let of = files.descriptor(file)?;
            // SAFETY: the streamer keeps the files open until this was closed.
            reader.files.push(unsafe { direct.add_file(of.number, of.file_system)? });
        }
        for (address, bytes) in weight_memory.device_slots() {
            // SAFETY: slots stay allocated until this was closed.
            unsafe { direct.add_memory(address, bytes) }.map_err(|error| {
                let text = format!("slots of {bytes} bytes: {}", error.message());
                Error::new(Status::Unavailable, text)
            })?;
            reader.slots.push((address, address + bytes));
        }
        log::info!("direct reads into slots by {}", direct.describe());
        Ok(reader)
    }

    /// Whether a chunk can be read directly to an address: aligned, all of it in the file, into a
    /// slot. Other chunks go through staging: the end of a file, which is seldom aligned, and
    /// resident units, which are read once and would have to be registered.
    fn takes(&self, chunk: &Chunk, file_bytes: u64, start: u64) -> bool {
        let (from, bytes) = (chunk.read_offset, chunk.read_bytes);
        let is_aligned = [from, bytes, start].iter().all(|n| n % DIRECT_ALIGN_BYTES == 0);
        let has_all = from.checked_add(bytes).is_some_and(|end| end <= file_bytes);
        let in_slot = |&(first, end): &(u64, u64)| first <= start && end - start.min(end) >= bytes;
        is_aligned && has_all && self.slots.iter().any(in_slot)
    }

    /// Reads a chunk. False: the read failed, and the chunk must go through staging.
    ///
    /// # Safety
    /// Nothing else uses the aligned memory until this returns, on the device neither.
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
                log::warn!("a direct read failed, the chunk is read through host memory: {error}");
                if in_a_row >= MOST_FAILURES && !self.is_off.swap(true, Ordering::AcqRel) {
                    log::warn!(
                        "{in_a_row} direct reads failed in a row: direct reads are turned off"
                    );
                }
                false
            }
        }
    }

    /// Whether direct reads were turned off after failures.
    pub fn is_off(&self) -> bool {
        self.is_off.load(Ordering::Acquire)
    }

    /// Bytes that were read, and reads that failed.
    pub fn counts(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }

    /// Unregisters slots and files. No read is in flight, and none begins later.
    pub fn close(&self) {
        if std::mem::replace(&mut *self.is_over.lock(), true) {
            return;
        }
        let Ok(direct) = self.device.direct() else { return };
        for &(address, _) in &self.slots {
            // SAFETY: registered once; no read is in flight.
            if let Err(error) = unsafe { direct.remove_memory(address) } {
                log::warn!("slots stay registered for direct reads: {error}");
            }
        }
        for &file in &self.files {
            // SAFETY: as above.
            if let Err(error) = unsafe { direct.remove_file(file) } {
                log::warn!("a file stays registered for direct reads: {error}");
            }
        }
    }
}

impl Drop for DirectReader {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// The address for a direct read of a chunk, and the event after which that memory may be
    /// written. None where the chunk must be verified.
    pub(super) fn direct_target(
        &self,
        state: &State,
        read: &ReadJob,
        verify: bool,
    ) -> Option<(u64, Option<Event>)> {
        let reader = self
            .direct_reader
            .as_ref()
            .filter(|direct_reader| !direct_reader.is_off() && !verify)?;
        let ReadJob::Chunk { unit, chunk, .. } = read else { return None };
        let (target, after) = state.scheduler.direct_target(read)?;
        if target == Target::Resident {
            return None;
        }
        let start =
            state.weight_memory.at(*unit, target).ok()?.address.checked_add(chunk.read_at)?;
        reader.takes(chunk, self.files.bytes(chunk.file), start).then_some((start, after))
    }

    /// Reads a chunk directly, unless the device still uses the slot: then it is read into staging
    /// meanwhile. Returns whether it was read.
    ///
    /// # Safety
    /// The memory at the address is reserved for this chunk by the scheduler.
    pub(super) unsafe fn read_direct(
        &self,
        read: &ReadJob,
        (start, after): (u64, Option<Event>),
    ) -> bool {
        let (Some(reader), ReadJob::Chunk { chunk, .. }) = (&self.direct_reader, read) else {
            return false;
        };
        // SAFETY: the caller's promise; work of the device on that memory has ended.
        self.has_passed(after) && unsafe { reader.read(chunk, start) }
    }

    /// Whether an event has completed. An event that the device does not know was released before.
    /// The copy that follows handles a failed event.
    fn has_passed(&self, event: Option<Event>) -> bool {
        let (Some(event), Some(device)) = (event, &self.device) else { return true };
        match device.state(event) {
            Ok(state) => state == DeviceState::Done,
            Err(error) => error.status() == Status::Handle,
        }
    }
}
