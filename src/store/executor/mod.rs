//! Executes batches of work: copies, disk reads and writes, syncs, compaction, remote requests.
//! Workers call it without the store's lock.

mod codec;
pub mod device_batches;
pub mod remote;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::host::Host;
use crate::device::{Copy, Device, Direction, Event, Memory, Stream};
use crate::store::executor::remote::RemoteExecutor;
use crate::store::state::device_tier::Audit;
use crate::store::state::disk_gc::CheckpointWriter;
use crate::store::state::work::{CopyBatch, CopyItem, SyncBatch, Upkeep, Work};

use crate::tier::disk::DiskTier;

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

/// What work is executed with.
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
                unsafe { codec::read(batch, disk) };
                Ok(())
            }
            (Work::Writes(batch), Some(disk)) => {
                // Recovery must find the namespaces before their chunks.
                if batch.write_notes(|name, content| disk.put_session(name, content)) {
                    // SAFETY: pieces of memory that the core keeps as they are meanwhile.
                    unsafe { codec::write(batch, disk) };
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
            let result = unsafe { device_batches::copy_one(self, back, stream) };
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
        let outcome = unsafe { device_batches::copy(self, batch, stream) };
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
                ended = device_batches::take_sums(&*self.device, event, copies);
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
    let host = Host::default();
    for (copies, is_in_host) in all.iter_mut().zip(&is_in_host) {
        if *is_in_host {
            // SAFETY: the caller's promise; such copies are done when this returns.
            unsafe { host.submit(Stream(0), None, copies)? };
        }
    }
    Ok(is_in_host)
}

pub(super) fn copy_of<'a>(batch: &'a CopyBatch, item: &CopyItem) -> Result<Copy<'a>> {
    let layer = &batch.views[item.views].0[item.layer];
    let plane = match (&layer.v, item.is_v) {
        (Some(v), true) => v,
        _ => &layer.k,
    };
    let address = item.address as *mut u8;
    let mut copy = Copy::new(&plane.view(), item.first, item.tokens, address, item.direction)?;
    (copy.memory, copy.plane_memory) = (plane.memory, item.memory);
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
        Upkeep::Compact(number) => disk.compact(*number, checkpoint_writer).map(|_| ()),
        Upkeep::Checkpoint(checkpoint) => checkpoint.write(disk, checkpoint_writer),
    }
}
