//! Names of the disk tier's files, and the table of open segment files.

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::files::{Access, FileId, Files, Piece};
use crate::tier::disk::DiskTier;
use crate::tier::disk::batch::Mark;
use crate::tier::disk::state::Segment;

/// The file that identifies the store.
pub(super) const STORE: &str = "store.kvt";

/// Kind of a file, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    Segment(u64),
    Checkpoint(u64),
    /// A file whose creation was interrupted.
    Unfinished,
    Other,
}

pub(super) fn segment(number: u64) -> String {
    format!("seg-{number:016x}.kvt")
}

pub(super) fn checkpoint(number: u64) -> String {
    format!("index-{number:016x}.kvt")
}

/// The name of a file until it is complete.
pub(super) fn unfinished(name: &str) -> String {
    format!("new-{name}")
}

pub(super) fn parse(name: &str) -> Name {
    if name.starts_with("new-") && name.ends_with(".kvt") {
        return Name::Unfinished;
    }
    let number = |prefix: &str| {
        let digits = name.strip_prefix(prefix)?.strip_suffix(".kvt")?;
        let plain = digits.len() == 16
            && digits.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
        if plain { u64::from_str_radix(digits, 16).ok() } else { None }
    };
    match (number("seg-"), number("index-")) {
        (Some(number), _) => Name::Segment(number),
        (_, Some(number)) => Name::Checkpoint(number),
        _ => Name::Other,
    }
}

impl DiskTier {
    /// The file interface of the tier.
    pub fn files(&self) -> &dyn Files {
        &*self.files
    }
}

/// An open segment file. It stays open until this guard is dropped.
pub(super) struct Pinned<'a> {
    tier: &'a DiskTier,
    pub segment: u64,
    pub file: FileId,
    pub blocks: u32,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        let mut state = self.tier.state.lock();
        if let Some(segment) = state.segments.get_mut(&self.segment) {
            segment.users -= 1;
        }
    }
}

impl DiskTier {
    /// Opens a segment's file if it is not open, and keeps it open until the guard is dropped.
    pub(super) fn pin(&self, number: u64) -> Result<Pinned<'_>> {
        let blocks = {
            let mut state = self.state.lock();
            state.uses += 1;
            let uses = state.uses;
            let existing = state.segments.get_mut(&number).filter(|segment| !segment.leaving);
            let Some(segment) = existing else {
                fail!(NotFound, "there is no segment {number}");
            };
            segment.users += 1;
            segment.touched = uses;
            if let Some(file) = segment.file {
                return Ok(Pinned { tier: self, segment: number, file, blocks: segment.blocks });
            }
            segment.blocks
        };
        // The user count keeps the segment from removal while the lock is released.
        let opened = self.files.open(&self::segment(number));
        let mut state = self.state.lock();
        let Some(segment) = state.segments.get_mut(&number) else {
            fail!(NotFound, "there is no segment {number}");
        };
        let file = match (opened, segment.file) {
            (Ok(opened), None) => {
                segment.file = Some(opened);
                state.open.push(number);
                opened
            }
            (Ok(opened), Some(cached)) => {
                self.files.close(opened);
                cached
            }
            (Err(_), Some(cached)) => cached,
            (Err(error), None) => {
                segment.users -= 1;
                return Err(error);
            }
        };
        drop(state);
        self.close_surplus();
        Ok(Pinned { tier: self, segment: number, file, blocks })
    }

    /// Closes the least recently used files when too many are open. A file with unsynced writes
    /// stays open: the system reports a failed write only to a process that has the file open.
    fn close_surplus(&self) {
        let mut state = self.state.lock();
        while state.open.len() > self.options.max_open {
            let Some(number) = state.longest_unused(|s| s.old || s.dirty == s.clean) else {
                return;
            };
            state.open.retain(|&other| other != number);
            let file = state.segments.get_mut(&number).and_then(|segment| segment.file.take());
            if let Some(file) = file {
                self.files.close(file);
            }
        }
    }

    /// Closes files as [`Self::close_surplus`] does; if that is not enough, syncs files with
    /// unsynced writes and closes them. Blocks, so only threads that may wait call it.
    pub(super) fn sync_surplus(&self) {
        self.close_surplus();
        for _ in 0..self.options.max_open {
            let mark = {
                let state = self.state.lock();
                if state.open.len() <= self.options.max_open {
                    return;
                }
                let fronts = state.fronts;
                let can_sync = |s: &Segment| !s.poisoned && !s.syncing;
                let unsynced =
                    state.longest_unused(can_sync).filter(|&n| !fronts.contains(&Some(n)));
                let Some(segment) = unsynced else { return };
                let write = state.segments.get(&segment).map_or(0, |s| s.dirty);
                Mark { segment, write }
            };
            if self.commit(mark).is_err() {
                return; // the failed sync poisons the segment and fails the ops that wait for it
            }
            self.close_surplus();
        }
    }

    /// Reads or writes one range of memory.
    ///
    /// # Safety
    /// The memory is valid, and nothing else uses it during the call.
    pub(super) unsafe fn transfer_one(
        &self,
        file: FileId,
        access: Access,
        offset: u64,
        address: *mut u8,
        bytes: u64,
    ) -> Result<()> {
        let mut pieces = [Piece::one(file, access, offset, address, bytes)];
        // SAFETY: the caller's guarantee.
        unsafe { self.files.transfer(&mut pieces) };
        let [piece] = pieces;
        piece.result
    }
}

/// Maps an error for the caller: a full disk is reported as an exceeded budget.
pub(super) fn refusal(error: Error) -> Error {
    let errno = error.detail().map_or(0, |detail| detail.os_errno);
    if errno == libc::ENOSPC || errno == libc::EDQUOT {
        return Error::new(Status::Budget, error.message()).with_errno(errno);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_round_trip_and_foreign_names_are_ignored() {
        for number in [0, 1, 0xABCDEF, u64::MAX] {
            assert_eq!(parse(&segment(number)), Name::Segment(number));
            assert_eq!(parse(&checkpoint(number)), Name::Checkpoint(number));
            assert_eq!(parse(&unfinished(&segment(number))), Name::Unfinished);
            assert!(crate::io::files::check_name(&unfinished(&checkpoint(number))).is_ok());
        }
        for name in ["LOCK", STORE, "seg-1.kvt", "seg-000000000000000G.kvt", "seg-", "x"] {
            assert_eq!(parse(name), Name::Other, "{name}");
        }
        assert_eq!(parse("seg-+00000000000001a.kvt"), Name::Other);
        assert_eq!(parse("seg-000000000000001A.kvt"), Name::Other);
    }

    #[test]
    fn a_full_disk_is_reported_as_an_exceeded_budget() {
        for (errno, status) in [
            (libc::ENOSPC, Status::Budget),
            (libc::EDQUOT, Status::Budget),
            (libc::EIO, Status::Io),
        ] {
            // SAFETY: this thread's own errno.
            unsafe { *libc::__errno_location() = errno };
            assert_eq!(refusal(Error::os("a write")).status(), status);
        }
    }
}
