//! Segments that are made before they are needed, from files of removed segments if there are any.
//!
//! Creating a file, allocating it and syncing its name takes longer than filling a small segment. And
//! blocks that were written once are written again in half the time of fresh ones, which the file
//! system must first note as written. So a removed segment's file is renamed, not removed: a *spare*.
//! Spares, and segments that are *ready*, count as free: whatever needs their space removes them.
//!
//! Records of a file's former segments are never taken for records of the present one. Each record
//! names its segment. A number is used once: it is larger than that of every file in the directory,
//! and a file gets records only once its name is durable, so none in it has a larger number than its
//! name. An opening removes spares, and sweeps segments without records.

use crate::base::status::{Error, Result};
use crate::base::sync::atomic::Ordering;
use crate::fail;
use crate::format::segment::{BLOCK_BYTES, SegmentHeader};
use crate::io::files::{Access, FileId};
use crate::tier::disk::DiskTier;
use crate::tier::disk::files::{refusal, segment as segment_name, unfinished};
use crate::tier::disk::spot::MAX_SEGMENT;
use crate::tier::disk::state::{Front, Ready, Segment, State};

/// Limit: segments that are made ahead. Many at once, since syncing their names makes the file system
/// commit its journal, and writes of fresh blocks wait for that.
const MAX_READY: u64 = 16;
/// Limit: bytes of segments that are made ahead, but one segment at least.
const MAX_READY_BYTES: u64 = 256 << 20;
/// The same, as a part of the budget: 1 / 32.
const READY_PART: u64 = 32;
/// Limit: bytes of spare files, but one file at least.
const MAX_SPARE_BYTES: u64 = 256 << 20;
/// The same, as a part of the budget: 1 / 4.
const SPARE_PART: u64 = 4;

/// A segment being made, of the file of a removed one if there is any.
struct Begun {
    number: u64,
    spare: Option<u64>,
}

fn spare_name(number: u64) -> String {
    unfinished(&segment_name(number))
}

impl State {
    /// Number of segments to make ahead.
    fn most_ready(&self, segment_bytes: u64) -> u64 {
        let bytes = MAX_READY_BYTES.min(self.budget_bytes / READY_PART);
        (bytes / segment_bytes).clamp(1, MAX_READY)
    }

    /// Whether few of them are left.
    pub fn lacks_ready(&self, segment_bytes: u64) -> bool {
        2 * (self.ready.len() as u64) < self.most_ready(segment_bytes)
    }
}

impl DiskTier {
    /// Whether [`DiskTier::prepare`] has something to do.
    pub fn wants_prepare(&self) -> bool {
        self.wants_prepare.load(Ordering::Acquire)
    }

    /// Makes the next segments, as far as there is space, so that callers of [`DiskTier::append`] do
    /// not wait for them. Failures are reported to the calls that need a segment.
    pub fn prepare(&self) {
        self.wants_prepare.store(false, Ordering::Release);
        self.discard(|state| state.used_bytes > state.budget_bytes);
        let growth = self.growth.lock();
        let count = self.missing();
        if let Err(error) = self.make_ready(Front::Callers, count) {
            log::debug!("fewer than {count} segments could be made ahead: {error}");
        }
        drop(growth);
        self.sync_surplus();
    }

    /// Segments to make ahead for which there is space.
    fn missing(&self) -> u64 {
        let bytes = self.options.segment_bytes;
        let state = self.state.lock();
        let kept = state.kept_by(Front::Callers, bytes);
        let most = state.most_ready(bytes);
        let fit = |all: &u64| state.has_room(bytes * all, kept, state.limit(Front::Callers));
        let all = (1..=most).rev().find(fit).unwrap_or(0);
        all.saturating_sub(state.ready.len() as u64)
    }

    /// Makes segments for a write position. The caller holds `growth`. After an error some may have
    /// been made.
    pub(super) fn make_ready(&self, front: Front, count: u64) -> Result<()> {
        let (mut named, mut result) = (Vec::new(), Ok(()));
        for _ in 0..count {
            match self.name_next(front) {
                Ok(begun) => named.push(begun),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        if named.is_empty() {
            return result;
        }
        // Before anything is written under the new numbers.
        let written = self.files.sync_names().and_then(|()| self.write_headers(&named));
        let written = written.unwrap_or_else(|error| vec![Err(error); named.len()]);
        for ((begun, file), written) in named.into_iter().zip(written) {
            if let Err(error) = written {
                self.files.close(file);
                result = result.and(Err(self.unmake(&begun, error)));
                continue;
            }
            let mut state = self.state.lock();
            state.ready.push_back(Ready { number: begun.number, file });
            state.stats.segments_made += 1;
            state.stats.segments_reused += u64::from(begun.spare.is_some());
            state.stats.overhead_bytes += BLOCK_BYTES as u64;
        }
        result
    }

    /// Takes space for a segment, and creates or renames its file.
    fn name_next(&self, front: Front) -> Result<(Begun, FileId)> {
        let bytes = self.options.segment_bytes;
        let begun = {
            let mut state = self.state.lock();
            let number = state.next_segment;
            if number > MAX_SEGMENT {
                fail!(Limit, "all segment numbers are in use");
            }
            let (kept, limit) = (state.kept_by(front, bytes), state.limit(front));
            state.check_room(bytes, kept, limit)?;
            let spare = state.spares.pop();
            if spare.is_none() {
                if !state.take(bytes, kept, limit)? {
                    fail!(Budget, "the disk is full of segments that were made ahead");
                }
                state.spare_bytes += bytes;
            }
            state.next_segment += 1;
            Begun { number, spare }
        };
        let name = segment_name(begun.number);
        let file = match begun.spare {
            None => self.files.create(&name, bytes),
            Some(spare) => {
                let renamed = self.files.rename(&spare_name(spare), &name);
                renamed.and_then(|()| self.files.open(&name))
            }
        };
        match file {
            Ok(file) => Ok((begun, file)),
            Err(error) => Err(self.unmake(&begun, error)),
        }
    }

    /// Writes the headers of segments.
    fn write_headers(&self, all: &[(Begun, FileId)]) -> Result<Vec<Result<()>>> {
        let (buffer, blocks) = (self.staging.block()?, self.segment_blocks());
        let mut results = Vec::new();
        for (begun, file) in all {
            let (store, number, is_reused) = (self.store, begun.number, begun.spare.is_some());
            let mut block = [0; BLOCK_BYTES];
            SegmentHeader { store, number, blocks, is_reused }.encode(&mut block);
            // SAFETY: a block of memory that nothing else uses.
            results.push(unsafe {
                buffer.address().copy_from_nonoverlapping(block.as_ptr(), BLOCK_BYTES);
                self.transfer_one(*file, Access::Write, 0, buffer.address(), BLOCK_BYTES as u64)
            });
        }
        Ok(results)
    }

    /// Removes a segment that could not be completed; returns the error for the caller. Its bytes
    /// count until the removal is certain.
    fn unmake(&self, begun: &Begun, error: Error) -> Error {
        let gone = |name: &str| match self.files.remove(name) {
            Ok(()) => self.files.sync_names().is_ok(),
            // It may not have that name.
            Err(_) => self.files.list().is_ok_and(|all| all.iter().all(|e| e.name != name)),
        };
        let removed = gone(&segment_name(begun.number))
            && begun.spare.is_none_or(|spare| gone(&spare_name(spare)));
        let bytes = self.options.segment_bytes;
        let mut state = self.state.lock();
        state.stats.refused += 1;
        state.spare_bytes -= bytes;
        if removed {
            state.give_back(bytes);
        } else {
            let blocks = self.segment_blocks();
            let segment = Segment { blocks, next: blocks, oldest: u64::MAX, ..Segment::default() };
            state.add_segment(begun.number, segment);
        }
        refusal(error)
    }

    /// Keeps the file of a segment that is being removed, and is closed, as a spare.
    pub(super) fn make_spare(&self, number: u64) -> bool {
        let bytes = self.options.segment_bytes;
        {
            let state = self.state.lock();
            let most = MAX_SPARE_BYTES.min(state.budget_bytes / SPARE_PART) / bytes;
            let is_fit = state.segments.get(&number).is_some_and(|segment| {
                segment.file_bytes() == bytes && segment.dirty > 0 && segment.is_clean()
            });
            let is_full = state.spares.len() as u64 >= most.max(1);
            if !is_fit || is_full || state.used_bytes > state.budget_bytes {
                return false;
            }
        }
        if self.files.rename(&segment_name(number), &spare_name(number)).is_err() {
            return false;
        }
        let mut state = self.state.lock();
        state.spares.push(number);
        state.spare_bytes += bytes;
        true
    }

    /// Removes spares, then segments that are ready, while `is_wanted`.
    pub(super) fn discard(&self, is_wanted: impl Fn(&State) -> bool) {
        let bytes = self.options.segment_bytes;
        loop {
            let (name, file) = {
                let mut state = self.state.lock();
                if !is_wanted(&state) {
                    break;
                }
                let one = match state.spares.pop() {
                    Some(spare) => (spare_name(spare), None),
                    None => match state.ready.pop_back() {
                        Some(Ready { number, file }) => (segment_name(number), Some(file)),
                        None => break,
                    },
                };
                state.spare_bytes -= bytes;
                one
            };
            if let Some(file) = file {
                self.files.close(file);
            }
            let removed = self.files.remove(&name).is_ok();
            let is_durable = removed && self.files.sync_names().is_ok();
            let mut state = self.state.lock();
            match (removed, is_durable) {
                (_, true) => state.give_back(bytes),
                (true, false) => state.lingering_bytes += bytes,
                // It stays, and counts, until the store is opened again.
                (false, false) => {}
            }
        }
        self.pay_less();
    }
}
