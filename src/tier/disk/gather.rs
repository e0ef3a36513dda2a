//! Collects the transfers of records and cells, in place or through staging memory.

use std::collections::VecDeque;

use crate::base::status::Result;
use crate::io::files::{Access, FileId, Next, Part, Piece};
use crate::tier::disk::staging::{STAGING_BYTES, Staging, StagingGuard};

/// A copy to make once an owner's transfers have ended.
struct Back {
    owner: usize,
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

/// Collects transfers, each for an owner, and counts those in flight.
pub(super) struct Gather<'a> {
    staging: &'a Staging,
    access: Access,
    buffer: Option<StagingGuard<'a>>,
    /// Bytes of the buffer in use. They become free when nothing is in flight.
    used: u64,
    queue: VecDeque<(usize, Piece)>,
    in_flight: usize,
    backs: Vec<Back>,
}

impl<'a> Gather<'a> {
    pub fn new(staging: &'a Staging, access: Access) -> Gather<'a> {
        let (buffer, queue, backs) = (None, VecDeque::new(), Vec::new());
        Gather { staging, access, buffer, used: 0, queue, in_flight: 0, backs }
    }

    /// Staging memory of at most `bytes` bytes and at least `least`. None = transfers that are queued
    /// or in flight must end first.
    pub fn room(&mut self, least: u64, bytes: u64) -> Result<Option<(*mut u8, u64)>> {
        if self.buffer.is_none() {
            self.buffer = Some(self.staging.take()?);
        }
        if STAGING_BYTES - self.used < least {
            if self.is_busy() {
                return Ok(None);
            }
            self.copy_all_back(|_| true);
            self.used = 0;
        }
        let bytes = bytes.min(STAGING_BYTES - self.used);
        let address = self.buffer.as_ref().and_then(|b| b.range(self.used, bytes));
        let Some(address) = address.filter(|_| bytes >= least) else {
            crate::fail!(Limit, "{least} bytes do not fit in a staging buffer");
        };
        self.used += bytes;
        Ok(Some((address, bytes)))
    }

    /// Whether it has taken staging memory, which it keeps to its end.
    pub fn uses_staging(&self) -> bool {
        self.buffer.is_some()
    }

    /// Adds a transfer of an owner; its memory stays valid until it has ended.
    pub fn add(&mut self, owner: usize, file: FileId, offset: u64, address: *mut u8, bytes: u64) {
        if let Some((by, last)) = self.queue.back_mut() {
            let follows = last.file == file && last.offset + last.bytes() == offset;
            if *by == owner && follows && extend(last, address, bytes) {
                return;
            }
        }
        self.queue.push_back((owner, Piece::one(file, self.access, offset, address, bytes)));
    }

    /// Once the transfers of an owner have ended, `bytes` bytes of staging memory are copied from
    /// `from` to `to`: memory that is valid, and that nothing else uses, until then.
    pub fn copy_back(&mut self, owner: usize, from: *const u8, to: *mut u8, bytes: u64) {
        self.backs.push(Back { owner, from, to, bytes: bytes as usize });
    }

    /// Begins the next queued transfer.
    pub fn next(&mut self) -> Option<Next> {
        let (owner, piece) = self.queue.pop_front()?;
        self.in_flight += 1;
        Some(Next::Piece(owner, piece))
    }

    /// A transfer has ended.
    pub fn ended(&mut self) {
        self.in_flight -= 1;
    }

    /// Whether transfers wait to begin.
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The owner of the transfers that wait to begin.
    pub fn queued_owner(&self) -> Option<usize> {
        self.queue.front().map(|(owner, _)| *owner)
    }

    /// Whether transfers are queued or in flight.
    pub fn is_busy(&self) -> bool {
        self.in_flight > 0 || self.has_queued()
    }

    /// Makes the copies of some owners. Their transfers have ended.
    pub fn copy_all_back(&mut self, of: impl Fn(usize) -> bool) {
        for back in self.backs.extract_if(.., |back| of(back.owner)) {
            // SAFETY: from staging memory, which only this gather uses, to the reader's memory, both
            // of `bytes` bytes.
            unsafe { std::ptr::copy_nonoverlapping(back.from, back.to, back.bytes) };
        }
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
