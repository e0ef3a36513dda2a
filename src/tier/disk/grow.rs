//! Space for records under the budget, and removing empty segments.

use crate::base::status::Result;
use crate::base::sync::atomic::Ordering;
use crate::fail;
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::{Access, FileId};
use crate::tier::disk::files::segment as segment_name;
use crate::tier::disk::state::{Front, Grant, State};
use crate::tier::disk::{DiskTier, offset_of};

/// The rest of a segment that no record is written to.
pub(super) struct Rest {
    pub grant: Grant,
    pub blocks: u32,
}

impl DiskTier {
    /// Space for a record at a write position, in a new segment if necessary.
    pub(super) fn room_for(&self, front: Front, blocks: u32, born: u64) -> Result<Grant> {
        let (grant, ended) = self.room_and_rest(front, blocks, born)?;
        self.void_rest(ended);
        Ok(grant)
    }

    /// The same; also the rest of the segment before, which the caller voids.
    pub(super) fn room_and_rest(
        &self,
        front: Front,
        blocks: u32,
        born: u64,
    ) -> Result<(Grant, Option<Rest>)> {
        if blocks >= self.segment_blocks() {
            fail!(
                Limit,
                "a record of {} bytes is longer than a segment of {}: give the disk a longer \
                 segment=",
                u64::from(blocks) * BLOCK_BYTES as u64,
                self.options.segment_bytes
            );
        }
        if let Some(granted) = self.grant(front, blocks, born) {
            return Ok(granted);
        }
        let _growth = self.growth.lock();
        loop {
            // Another thread may have created one while this one waited, or taken it.
            if let Some(granted) = self.grant(front, blocks, born) {
                return Ok(granted);
            }
            self.end(front);
            self.sweep();
            self.make_ready(front, 1)?;
            self.sync_surplus();
        }
    }

    /// Space in the segment of a write position, or in the next segment if that is ready.
    fn grant(&self, front: Front, blocks: u32, born: u64) -> Option<(Grant, Option<Rest>)> {
        let bytes = self.options.segment_bytes;
        let mut state = self.state.lock();
        if let Some(grant) = state.grant(front, blocks, born) {
            return Some((grant, None));
        }
        let kept = state.kept_by(front, bytes);
        if state.ready.is_empty() || !state.has_room(bytes, kept, state.limit(front)) {
            return None;
        }
        // Under the same lock: otherwise another thread could sweep the empty segment, or fill it.
        let ended = state.end_front(front).map(|(grant, blocks)| Rest { grant, blocks });
        state.begin_ready(front, self.segment_blocks());
        let grant = state.grant(front, blocks, born);
        if state.lacks_ready(bytes) {
            self.wants_prepare.store(true, Ordering::Release);
        }
        Some((grant?, ended))
    }

    /// Ends the segment of a write position, and voids its remaining space, so that an opening
    /// skips it.
    pub(super) fn end(&self, front: Front) {
        let ended = self.state.lock().end_front(front);
        self.void_rest(ended.map(|(grant, blocks)| Rest { grant, blocks }));
    }

    fn void_rest(&self, ended: Option<Rest>) {
        let Some(rest) = ended else { return };
        if let Ok(pinned) = self.pin(rest.grant.segment) {
            let _ = self.write_void(pinned.file, &rest.grant, rest.blocks);
        }
        self.rest_is_void(&rest);
    }

    /// The rest of a segment was voided, or not: an opening skips it without that, only slower.
    pub(super) fn rest_is_void(&self, rest: &Rest) {
        let mut state = self.state.lock();
        state.stats.overhead_bytes += BLOCK_BYTES as u64;
        if let Some(segment) = state.segments.get_mut(&rest.grant.segment) {
            segment.writing -= 1;
        }
    }

    /// Segments that a sweep removes from here on, with their files and lengths.
    fn begin_sweep(&self) -> Vec<(u64, Option<FileId>, u64)> {
        // The newer copies of its records must be durable first.
        let superseded = |state: &State, number: &u64| {
            state.segments.get(number).is_some_and(|segment| segment.superseded)
        };
        let mut lasting = {
            let mut state = self.state.lock();
            let mut removable = state.removable();
            removable.retain(|number| superseded(&state, number));
            removable
        };
        if !lasting.is_empty() && self.commit_all().is_err() {
            lasting.clear();
        }
        let mut removing = Vec::new();
        {
            let mut state = self.state.lock();
            for number in state.removable() {
                if superseded(&state, &number) && !lasting.contains(&number) {
                    continue;
                }
                if let Some(segment) = state.segments.get_mut(&number) {
                    segment.leaving = true;
                    removing.push((number, segment.file.take(), segment.file_bytes()));
                }
            }
            state.open.retain(|open| !removing.iter().any(|(number, ..)| number == open));
        }
        removing
    }

    /// Removes segments without live cells and users; returns the freed bytes. A segment that
    /// cannot be removed keeps counting, and is tried again.
    pub fn sweep(&self) -> u64 {
        let mut removing = self.begin_sweep();
        if removing.is_empty() {
            return 0;
        }
        let mut spares = Vec::new();
        removing.retain(|&(number, file, _)| {
            if let Some(file) = file {
                self.files.close(file);
            }
            let is_spare = self.make_spare(number);
            spares.extend(is_spare.then_some(number));
            let removed = is_spare || self.files.remove(&segment_name(number)).is_ok();
            if !removed {
                self.keep(number);
            }
            removed
        });
        // A name that reappears after a crash would exceed the budget.
        let is_durable = self.files.sync_names().is_ok();
        let mut state = self.state.lock();
        let mut freed = 0;
        for (number, _, bytes) in removing {
            let Some(segment) = state.segments.remove(&number) else { continue };
            let oldest = segment.oldest;
            if segment.poisoned && segment.dirty > segment.clean {
                state.lost.insert(number, segment.clean);
            }
            state.stats.segments_removed += 1;
            // Another thread may have taken it already.
            let is_spare = spares.contains(&number);
            if !is_durable {
                state.lingering_bytes += if is_spare { 0 } else { bytes };
                let before = state.lingering_oldest.unwrap_or(u64::MAX);
                state.lingering_oldest = Some(before.min(oldest));
                continue;
            }
            if !is_spare {
                state.give_back(bytes);
            }
            freed += bytes;
        }
        if is_durable {
            state.lingering_oldest = None;
            let lingering = std::mem::take(&mut state.lingering_bytes);
            state.give_back(lingering);
            freed += lingering;
        }
        drop(state);
        self.pay_less();
        freed
    }

    fn keep(&self, number: u64) {
        if let Some(segment) = self.state.lock().segments.get_mut(&number) {
            segment.leaving = false;
        }
    }

    /// Marks blocks of a segment as void.
    pub(super) fn write_void(&self, file: FileId, grant: &Grant, blocks: u32) -> Result<()> {
        let buffer = self.staging.block()?;
        let address = buffer.address();
        // SAFETY: a block of memory that nothing else uses.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address, BLOCK_BYTES) };
        self.encode_void(bytes, grant, blocks);
        let offset = offset_of(grant.at);
        // SAFETY: as above.
        let written =
            unsafe { self.transfer_one(file, Access::Write, offset, address, BLOCK_BYTES as u64) };
        drop(buffer);
        written
    }
}
