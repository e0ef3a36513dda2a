//! Reading the headers of segments, several segments at a time.
//!
//! Where a header is expected and missing, the next one is searched for block by block. A record
//! has its store, its place and a checksum: a record after a hole is as good as any. A hole is what
//! a crash left between writes, or damage. A file that was another segment before has records of
//! that one: they name it, and no number is used twice.

use crate::base::status::Result;
use crate::format::record::{MAX_HEADER_BLOCKS, Record, decode, peek};
use crate::format::segment::{BLOCK_BYTES, HeaderError, SegmentHeader, StoreId};
use crate::io::files::{Access, Piece};
use crate::tier::disk::files::Pinned;
use crate::tier::disk::{DiskTier, offset_of};

/// Segments that are read at once.
const CONCURRENT_READS: usize = 16;
const WINDOW_BLOCKS: u32 = MAX_HEADER_BLOCKS;
const WINDOW_BYTES: usize = WINDOW_BLOCKS as usize * BLOCK_BYTES;
/// Blocks that are read where a header is expected.
const HEADER_GUESS_BLOCKS: u32 = 8;
/// Unreadable blocks before a segment is given up.
const MAX_ERRORS: u32 = 64;

/// Result of reading a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub segment: u64,
    /// The block after its last record.
    pub end: u32,
    pub records: u64,
    /// Holes before other records.
    pub damaged: u32,
    /// Data that is no record follows the last record.
    pub torn: bool,
    /// Unreadable blocks.
    pub errors: u32,
    /// Its header names another store.
    pub foreign: bool,
    /// Its header is not sound.
    pub damaged_header: bool,
    /// It is shorter than its header says.
    pub cut: bool,
}

/// One segment being read.
pub(super) struct Walk {
    store: StoreId,
    blocks: u32,
    /// The block that it begins at. If that is not the first one, the segment's header only says
    /// whether the file is reused.
    from: u32,
    at: u32,
    last: u64,
    /// Data that is no record was seen since the last record.
    in_hole: bool,
    dirty_hole: bool,
    /// Unwritten blocks have the bytes of an earlier segment: they say nothing.
    is_reused: bool,
    found: Found,
}

/// The next read: its first block, and the number of blocks.
pub(super) type Need = Option<(u32, u32)>;

impl Walk {
    pub fn new(store: StoreId, segment: u64, blocks: u32, from: u32) -> Walk {
        let found = Found { segment, end: from.max(1), ..Found::default() };
        let at = if from < blocks { 0 } else { from };
        let (in_hole, dirty_hole, is_reused) = (false, false, false);
        Walk { store, blocks, from, at, last: 0, in_hole, dirty_hole, is_reused, found }
    }

    /// The next read.
    pub fn need(&self) -> Need {
        if self.peeks() {
            return Some((0, 1));
        }
        let guess = if self.in_hole { WINDOW_BLOCKS } else { HEADER_GUESS_BLOCKS };
        let left = self.blocks.saturating_sub(self.at);
        (left > 0).then(|| (self.at, guess.min(left)))
    }

    /// Whether the segment's header is read before the first record.
    fn peeks(&self) -> bool {
        self.at == 0 && self.from > 0
    }

    /// Decodes a window that starts at the requested block.
    pub fn read(
        &mut self,
        window: &[u8],
        each: &mut dyn FnMut(&Record<'_>) -> Result<()>,
    ) -> Result<Need> {
        if self.peeks() {
            let header = SegmentHeader::decode(window).ok();
            self.is_reused = header.is_some_and(|h| h.store == self.store && self.names_reuse(&h));
            self.at = self.from;
            return Ok(self.need());
        }
        let start = self.at;
        loop {
            let from = (self.at - start) as usize * BLOCK_BYTES;
            let Some(bytes) = window.get(from..).filter(|bytes| bytes.len() >= BLOCK_BYTES) else {
                return Ok(self.need());
            };
            if self.at >= self.blocks {
                return Ok(None);
            }
            if self.at == 0 {
                if !self.read_first(bytes) {
                    return Ok(None);
                }
                continue;
            }
            let wanted = peek(bytes).filter(|&n| n <= self.blocks - self.at);
            if let Some(wanted) = wanted {
                if wanted as usize * BLOCK_BYTES > bytes.len() {
                    return Ok(Some((self.at, wanted)));
                }
                if let Some(record) = decode(bytes).filter(|record| self.fits(record)) {
                    each(&record)?;
                    self.take(&record);
                    continue;
                }
            }
            self.pass(bytes.get(..BLOCK_BYTES) != Some(&[0; BLOCK_BYTES]));
        }
    }

    fn names_reuse(&self, header: &SegmentHeader) -> bool {
        header.is_reused || header.number < self.found.segment
    }

    /// Decodes the segment's header; false = it names another store.
    fn read_first(&mut self, bytes: &[u8]) -> bool {
        match SegmentHeader::decode(bytes) {
            Ok(header) => {
                // A file gets its new name before its new header: with a smaller number the header is
                // that of the segment before.
                let ours = header.store == self.store && header.number <= self.found.segment;
                self.found.foreign = !ours;
                self.found.cut = ours && header.blocks > self.blocks;
                self.is_reused = self.names_reuse(&header);
            }
            Err(HeaderError::Version(_)) => self.found.foreign = true,
            Err(HeaderError::Damaged) => self.found.damaged_header = true,
        }
        self.at = 1;
        !self.found.foreign
    }

    fn fits(&self, record: &Record<'_>) -> bool {
        let head = &record.head;
        head.store == self.store
            && head.segment == self.found.segment
            && head.at == self.at
            && head.number > self.last
            && head.blocks <= self.blocks - self.at
    }

    fn take(&mut self, record: &Record<'_>) {
        if std::mem::take(&mut self.in_hole) {
            self.found.damaged += 1;
        }
        self.dirty_hole = false;
        self.last = record.head.number;
        self.at += record.head.blocks;
        self.found.end = self.at;
        self.found.records += 1;
    }

    /// Skips a block that is no header.
    fn pass(&mut self, dirty: bool) {
        self.in_hole = true;
        self.dirty_hole |= dirty;
        self.at += 1;
    }

    /// Handles a failed read: block by block then, and past unreadable blocks.
    pub fn fail(&mut self, blocks: u32) -> Need {
        if self.peeks() {
            self.at = self.from;
            return self.need();
        }
        if blocks > 1 {
            return Some((self.at, 1));
        }
        self.found.errors += 1;
        if self.at == 0 {
            self.found.damaged_header = true;
        }
        self.pass(true);
        if self.found.errors >= MAX_ERRORS {
            self.at = self.blocks;
        }
        self.need()
    }

    pub fn end(mut self) -> Found {
        self.found.torn = self.in_hole && self.dirty_hole && !self.is_reused;
        self.found.damaged_header |= self.blocks == 0;
        self.found
    }
}

/// A segment being read, and its window.
struct SegmentRead<'a> {
    walk: Walk,
    pinned: Pinned<'a>,
    need: (u32, u32),
}

impl DiskTier {
    /// Reads the headers of segments from some block on; 0 = the segment's own header too. `each`
    /// gets every sound record, those of one segment in order.
    pub(super) fn scan(
        &self,
        starts: &[(u64, u32)],
        each: &mut dyn FnMut(&Record<'_>) -> Result<()>,
    ) -> Result<Vec<Found>> {
        let mut all = Vec::new();
        let width = CONCURRENT_READS.min(starts.len()).max(1);
        let buffer = self.staging.scratch(WINDOW_BYTES as u64, (width * WINDOW_BYTES) as u64)?;
        let width = width.min(buffer.bytes() as usize / WINDOW_BYTES);
        let mut reads: Vec<Option<SegmentRead<'_>>> = (0..width).map(|_| None).collect();
        let mut waiting = starts.iter();
        loop {
            for read in reads.iter_mut().filter(|read| read.is_none()) {
                *read = self.next_lane(&mut waiting, &mut all);
            }
            let mut pieces = Vec::new();
            for (read, i) in reads.iter().zip(0u64..) {
                let window = buffer.range(i * WINDOW_BYTES as u64, WINDOW_BYTES as u64);
                let (Some(read), Some(window)) = (read, window) else { continue };
                let (at, blocks) = read.need;
                let (file, bytes) = (read.pinned.file, offset_of(blocks));
                pieces.push(Piece::one(file, Access::Read, offset_of(at), window, bytes));
            }
            if pieces.is_empty() {
                return Ok(all);
            }
            // SAFETY: every piece has a window of its own in the buffer created above.
            unsafe { self.files.transfer(&mut pieces) };
            let busy = reads.iter_mut().filter(|read| read.is_some());
            for (slot, piece) in busy.zip(&pieces) {
                let Some(read) = slot else { continue };
                let need = if piece.result.is_ok() {
                    let [part, ..] = piece.parts;
                    // SAFETY: the window that was just read, which no one writes now.
                    let window =
                        unsafe { std::slice::from_raw_parts(part.address, part.bytes as usize) };
                    read.walk.read(window, each)?
                } else {
                    read.walk.fail(read.need.1)
                };
                match need {
                    Some(need) => read.need = need,
                    None => all.extend(slot.take().map(|read| read.walk.end())),
                }
            }
        }
    }

    fn next_lane(
        &self,
        waiting: &mut std::slice::Iter<'_, (u64, u32)>,
        all: &mut Vec<Found>,
    ) -> Option<SegmentRead<'_>> {
        for &(segment, from) in waiting {
            let Ok(pinned) = self.pin(segment) else {
                all.push(Found { segment, end: from.max(1), errors: 1, ..Found::default() });
                continue;
            };
            let walk = Walk::new(self.store, segment, pinned.blocks, from);
            match walk.need() {
                Some(need) => return Some(SegmentRead { walk, pinned, need }),
                None => all.push(walk.end()),
            }
        }
        None
    }
}
