//! Collects transfers and executes them in batches, in place or through staging memory.

use crate::base::status::Result;
use crate::io::files::{Access, FileId, Files, Part, Piece};
use crate::tier::disk::staging::{STAGING_BYTES, Staging, StagingGuard};

/// Most pieces of a batch, so that a large batch does not wait for its last header.
const MAX_PIECES: usize = 256;

/// A copy to make once a batch was read.
struct Back {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

/// Collects transfers, each for an owner, and executes them in batches.
pub(super) struct Gather<'a> {
    files: &'a dyn Files,
    staging: &'a Staging,
    access: Access,
    buffer: Option<StagingGuard<'a>>,
    used: u64,
    pieces: Vec<Piece>,
    owners: Vec<usize>,
    backs: Vec<Back>,
    /// Owners of failed transfers, with the errors.
    pub failed: Vec<(usize, crate::base::status::Error)>,
}

impl<'a> Gather<'a> {
    pub fn new(files: &'a dyn Files, staging: &'a Staging, access: Access) -> Gather<'a> {
        Gather {
            files,
            staging,
            access,
            buffer: None,
            used: 0,
            pieces: Vec::new(),
            owners: Vec::new(),
            backs: Vec::new(),
            failed: Vec::new(),
        }
    }

    /// Staging memory of at most `bytes` bytes and at least `least`; executes the batch first if
    /// too little is left.
    ///
    /// # Safety
    /// As [`Gather::flush`].
    pub unsafe fn room(&mut self, least: u64, bytes: u64) -> Result<(*mut u8, u64)> {
        if self.buffer.is_none() {
            self.buffer = Some(self.staging.take()?);
        }
        if STAGING_BYTES - self.used < least {
            // SAFETY: the caller's guarantee.
            unsafe { self.flush() };
        }
        let bytes = bytes.min(STAGING_BYTES - self.used);
        let address = self.buffer.as_ref().and_then(|b| b.range(self.used, bytes));
        let Some(address) = address.filter(|_| bytes >= least) else {
            crate::fail!(Limit, "{least} bytes do not fit in a staging buffer");
        };
        self.used += bytes;
        Ok((address, bytes))
    }

    /// Executes the batch if it is full, before memory for further pieces is requested.
    ///
    /// # Safety
    /// As [`Gather::flush`].
    pub unsafe fn make_way(&mut self) {
        if self.pieces.len() >= MAX_PIECES {
            // SAFETY: the caller's guarantee.
            unsafe { self.flush() };
        }
    }

    /// Adds a transfer of an owner; its memory stays valid until the next flush.
    pub fn add(&mut self, owner: usize, file: FileId, offset: u64, address: *mut u8, bytes: u64) {
        if let (Some(last), Some(&by)) = (self.pieces.last_mut(), self.owners.last()) {
            let follows = last.file == file && last.offset + last.bytes() == offset;
            if by == owner && follows && extend(last, address, bytes) {
                return;
            }
        }
        self.pieces.push(Piece::one(file, self.access, offset, address, bytes));
        self.owners.push(owner);
    }

    /// After the batch, copies `bytes` bytes of staging memory from `from` to `to`.
    pub fn copy_back(&mut self, from: *const u8, to: *mut u8, bytes: u64) {
        self.backs.push(Back { from, to, bytes: bytes as usize });
    }

    /// Executes the collected transfers.
    ///
    /// # Safety
    /// The memory of all added transfers is valid, and nothing else uses it.
    pub unsafe fn flush(&mut self) {
        if !self.pieces.is_empty() {
            // SAFETY: the caller's guarantee; staging memory belongs to this gather only.
            unsafe { self.files.transfer(&mut self.pieces) };
        }
        for (piece, owner) in self.pieces.drain(..).zip(self.owners.drain(..)) {
            if let Err(error) = piece.result {
                self.failed.push((owner, error));
            }
        }
        for back in self.backs.drain(..) {
            // SAFETY: from staging memory to the reader's memory, both of `bytes` bytes; no one
            // else uses a staging buffer.
            unsafe { std::ptr::copy_nonoverlapping(back.from, back.to, back.bytes) };
        }
        self.used = 0;
    }
}

/// Extends a piece, if it has room for another part.
fn extend(piece: &mut Piece, address: *mut u8, bytes: u64) -> bool {
    if piece.bytes() + bytes > crate::io::files::MAX_PIECE_BYTES {
        return false;
    }
    let used = piece.parts.iter().take_while(|part| part.bytes > 0).count();
    if let Some(part) = used.checked_sub(1).and_then(|i| piece.parts.get_mut(i))
        && part.address.wrapping_add(part.bytes as usize) == address
    {
        part.bytes += bytes;
        return true;
    }
    match piece.parts.get_mut(used) {
        Some(part) => *part = Part { address, bytes },
        None => return false,
    }
    true
}

/// Memory of a plane.
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub address: *mut u8,
    pub bytes: u64,
}

/// Whether consecutive ranges can be transferred in place; `padded`: the memory after the last one
/// is free up to a whole block.
pub(super) fn in_place(ranges: impl Iterator<Item = Range>, align: u64, padded: bool) -> bool {
    let mut end: *mut u8 = std::ptr::null_mut();
    let mut run = 0;
    for range in ranges.filter(|range| range.bytes > 0) {
        if range.address != end {
            if run % align != 0 || range.address as u64 % align != 0 {
                return false;
            }
            run = 0;
        }
        run += range.bytes;
        end = range.address.wrapping_add(range.bytes as usize);
    }
    padded || run % align == 0
}

/// Calls `each` for every part of `ranges` within `from..from + bytes` of their concatenation:
/// address, position in the stretch, length.
pub(super) fn within(
    ranges: impl Iterator<Item = Range>,
    from: u64,
    bytes: u64,
    mut each: impl FnMut(*mut u8, u64, u64),
) {
    let mut start = 0;
    for range in ranges {
        let (low, high) = (start.max(from), (start + range.bytes).min(from + bytes));
        if low < high {
            let address = range.address.wrapping_add((low - start) as usize);
            each(address, low - from, high - low);
        }
        start += range.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(address: usize, bytes: u64) -> Range {
        Range { address: address as *mut u8, bytes }
    }

    #[test]
    fn only_aligned_ranges_are_transferred_in_place() {
        let is_in_place = |ranges: &[Range], padded| in_place(ranges.iter().copied(), 4096, padded);
        assert!(is_in_place(&[range(4096, 4096), range(81920, 8192)], false));
        assert!(is_in_place(&[range(4096, 1000), range(5096, 3096)], false));
        assert!(!is_in_place(&[range(4096, 1000), range(5096, 3000)], false));
        assert!(is_in_place(&[range(4096, 1000), range(5096, 3000)], true));
        assert!(!is_in_place(&[range(4096, 1000), range(81920, 3096)], true));
        assert!(!is_in_place(&[range(4100, 4096)], true));
        assert!(in_place([range(3, 5), range(77, 1)].into_iter(), 1, false));
    }

    #[test]
    fn a_transfer_is_split_at_the_ends_of_ranges() {
        let ranges = [range(1000, 10), range(2000, 0), range(3000, 5)];
        let mut all = Vec::new();
        within(ranges.into_iter(), 8, 6, |at, place, bytes| all.push((at as usize, place, bytes)));
        assert_eq!(all, [(1008, 0, 2), (3000, 2, 4)]);
    }
}
