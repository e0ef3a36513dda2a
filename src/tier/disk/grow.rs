//! Creating segments under the budget, and removing empty ones.

use crate::base::status::Result;
use crate::fail;
use crate::format::segment::{BLOCK_BYTES, SegmentHeader};
use crate::io::files::{Access, FileId};
use crate::tier::disk::files::{refusal, segment as segment_name};
use crate::tier::disk::spot::MAX_SEGMENT;
use crate::tier::disk::state::{Front, Grant, Segment, State};
use crate::tier::disk::{DiskTier, offset_of};

impl DiskTier {
    /// Space for a record at a write position, in a new segment if necessary.
    pub(super) fn room_for(&self, front: Front, blocks: u32, born: u64) -> Result<Grant> {
        if blocks >= self.segment_blocks() {
            fail!(
                Limit,
                "a record of {} bytes is longer than a segment of {}: give the disk a longer \
                 segment=",
                u64::from(blocks) * BLOCK_BYTES as u64,
                self.options.segment_bytes
            );
        }
        if let Some(grant) = self.state.lock().grant(front, blocks, born) {
            return Ok(grant);
        }
        let growth = self.growth.lock();
        // Another thread may have created one while this one waited.
        if let Some(grant) = self.state.lock().grant(front, blocks, born) {
            return Ok(grant);
        }
        self.end(front);
        self.sweep();
        let grant = self.make_segment(front, blocks, born)?;
        drop(growth);
        match grant {
            Some(grant) => Ok(grant),
            None => fail!(Limit, "{blocks} blocks do not fit into a new segment"),
        }
    }

    /// Ends the segment of a write position, and voids its remaining space, so that an opening
    /// skips it.
    pub(super) fn end(&self, front: Front) {
        let ended = self.state.lock().end_front(front);
        let Some((grant, rest)) = ended else { return };
        if let Ok(pinned) = self.pin(grant.segment) {
            let _ = self.write_void(pinned.file, &grant, rest);
        }
        let mut state = self.state.lock();
        if let Some(segment) = state.segments.get_mut(&grant.segment) {
            segment.writing -= 1;
        }
    }

    /// Creates a segment for a write position; returns space in it.
    fn make_segment(&self, front: Front, blocks: u32, born: u64) -> Result<Option<Grant>> {
        let bytes = self.options.segment_bytes;
        let number = {
            let mut state = self.state.lock();
            let spare = if front == Front::Callers { state.held_back(bytes) } else { 0 };
            let number = state.next_segment;
            if number > MAX_SEGMENT {
                fail!(Limit, "all segment numbers are in use");
            }
            let limit = state.limit(front);
            state.take(bytes, spare, limit)?;
            state.next_segment += 1;
            number
        };
        let all = self.segment_blocks();
        let name = segment_name(number);
        let made = self.files.create(&name, bytes);
        let begun = made.and_then(|file| {
            let begun = self.begin_segment(file, number, all);
            if begun.is_err() {
                self.files.close(file);
            }
            begun.map(|()| file)
        });
        match begun {
            Ok(file) => {
                let mut state = self.state.lock();
                let segment = Segment {
                    file: Some(file),
                    blocks: all,
                    next: 1,
                    oldest: u64::MAX,
                    ..Segment::default()
                };
                state.add_segment(number, segment);
                state.open.push(number);
                state.stats.segments_made += 1;
                state.stats.overhead_bytes += BLOCK_BYTES as u64;
                // Under the same lock: otherwise another thread could sweep the empty segment, or
                // fill it.
                state.fronts[front as usize] = Some(number);
                let grant = state.grant(front, blocks, born);
                drop(state);
                self.sync_surplus();
                Ok(grant)
            }
            Err(error) => {
                let error = refusal(error);
                self.state.lock().stats.refused += 1;
                self.unmake(&name, bytes, number);
                Err(error)
            }
        }
    }

    /// Writes the header, and makes the name durable.
    fn begin_segment(&self, file: FileId, number: u64, blocks: u32) -> Result<()> {
        let buffer = self.staging.block()?;
        let mut block = [0; BLOCK_BYTES];
        SegmentHeader { store: self.store, number, blocks }.encode(&mut block);
        // SAFETY: a block of memory that nothing else uses.
        let written = unsafe {
            buffer.address().copy_from_nonoverlapping(block.as_ptr(), BLOCK_BYTES);
            self.transfer_one(file, Access::Write, 0, buffer.address(), BLOCK_BYTES as u64)
        };
        drop(buffer);
        written?;
        self.files.sync_names()
    }

    /// Removes a segment that could not be completed. Its bytes count until the removal is certain.
    fn unmake(&self, name: &str, bytes: u64, number: u64) {
        let removed = match self.files.remove(name) {
            Ok(()) => self.files.sync_names().is_ok(),
            // It may not have been created at all.
            Err(_) => self.files.list().is_ok_and(|all| all.iter().all(|e| e.name != name)),
        };
        let mut state = self.state.lock();
        if removed {
            state.give_back(bytes);
            return;
        }
        let blocks = (bytes / BLOCK_BYTES as u64) as u32;
        let segment = Segment { blocks, next: blocks, oldest: u64::MAX, ..Segment::default() };
        state.add_segment(number, segment);
    }

    /// Removes segments without live cells and users; returns the freed bytes. A segment that
    /// cannot be removed keeps counting, and is tried again.
    pub fn sweep(&self) -> u64 {
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
        if removing.is_empty() {
            return 0;
        }
        removing.retain(|&(number, file, _)| {
            if let Some(file) = file {
                self.files.close(file);
            }
            let removed = self.files.remove(&segment_name(number)).is_ok();
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
            if is_durable {
                state.give_back(bytes);
                freed += bytes;
            } else {
                state.lingering_bytes += bytes;
                let before = state.lingering_oldest.unwrap_or(u64::MAX);
                state.lingering_oldest = Some(before.min(oldest));
            }
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
        self.state.lock().stats.overhead_bytes += BLOCK_BYTES as u64;
        written
    }
}
