//! The hands of a store: they carry out what the core decides. No lock is held while
//! they work.

use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::device::{Copy, Device, Stream};
use crate::kv::coder;
use crate::kv::core::books::Books;
use crate::kv::core::work::{CopyBatch, CopyItem, SyncBatch, Upkeep, Work};
use crate::tier::disk::DiskTier;

/// What work is done with.
#[derive(Clone)]
pub struct Tools {
    /// Who copies.
    pub device: Arc<dyn Device>,
    /// The disk, if the store has one.
    pub disk: Option<Arc<DiskTier>>,
}

impl Tools {
    /// Carries work out; how it went, where the work does not say so itself. `stream`
    /// is the device's, for copies; `books` are asked by upkeep.
    ///
    /// # Safety
    /// The core that gave the work has not heard yet that it is done, and the engine's
    /// memory is what its views say.
    pub unsafe fn work(
        &self,
        work: &mut Work,
        stream: Stream,
        books: &mut dyn Books,
    ) -> Result<()> {
        match (work, &self.disk) {
            // SAFETY: the caller's promise.
            (Work::Copies(batch), _) => unsafe { self.copy(batch, stream) },
            (Work::Reads(batch), Some(disk)) => {
                // SAFETY: pieces of memory that the core keeps for these reads.
                unsafe { coder::read(batch, disk) };
                Ok(())
            }
            (Work::Writes(batch), Some(disk)) => {
                // What an opening has to know of the chunks is there before them.
                if batch.write_notes(|name, content| disk.put_session(name, content)) {
                    // SAFETY: pieces of memory that the core keeps as they are meanwhile.
                    unsafe { coder::write(batch, disk) };
                }
                Ok(())
            }
            (Work::Syncs(batch), Some(disk)) => {
                sync(batch, disk);
                Ok(())
            }
            (Work::Upkeep(upkeep), Some(disk)) => keep_up(upkeep, disk, books),
            (_, None) => Ok(()), // a core without a disk has no such work
        }
    }

    /// # Safety
    /// As [`Tools::work`].
    unsafe fn copy(&self, batch: &CopyBatch, stream: Stream) -> Result<()> {
        let mut copies = Vec::with_capacity(batch.items.len());
        for item in &batch.items {
            copies.push(copy_of(batch, item)?);
        }
        for part in copies.chunks_mut(crate::device::MAX_COPIES) {
            // SAFETY: the caller's promise; planes are pieces that are kept for this.
            let event = unsafe { self.device.submit(stream, None, part)? };
            let ended = self.device.wait(event, 0);
            if self.device.facts().asynchronous {
                self.device.release(event)?;
            }
            ended?;
        }
        Ok(())
    }
}

fn copy_of<'a>(batch: &'a CopyBatch, item: &CopyItem) -> Result<Copy<'a>> {
    let layer = &batch.views[item.views].0[item.layer];
    let plane = match (&layer.v, item.is_v) {
        (Some(v), true) => v,
        _ => &layer.k,
    };
    let address = item.address as *mut u8;
    let mut copy = Copy::new(&plane.view(), item.first, item.tokens, address, item.way)?;
    copy.memory = plane.memory;
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

fn keep_up(upkeep: &Upkeep, disk: &Arc<DiskTier>, books: &mut dyn Books) -> Result<()> {
    match upkeep {
        Upkeep::Sweep => {
            disk.sweep();
            Ok(())
        }
        Upkeep::Clean(number) => disk.clean(*number, books).map(|_| ()),
        Upkeep::Checkpoint(checkpoint) => checkpoint.write(disk, books),
    }
}
