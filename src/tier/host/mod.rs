//! Memory for cells: segments of some megabytes, each cut into pieces of one size.
//! Nothing is moved, so addresses stay as they are, and workers may use them without
//! asking. A segment that is empty goes back to the budget or to another size.

mod cut;
mod registration;
mod reserve;
mod resize;
mod segment;
mod table;

use crate::base::account::Account;
use crate::base::memory::{MAX_BUFFER_BYTES, Wish};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::Device;
use crate::fail;
use crate::meta::index::NONE;
pub use registration::Registration;
use segment::{MAX_PIECES, Segment};
use table::{Entry, List, Table};

/// Sizes of pieces are multiples of this: direct I/O uses them in place.
pub const GRAIN_BYTES: u64 = 4096;
/// The length of a segment when none is asked for.
pub const DEFAULT_SEGMENT_BYTES: u64 = 32 << 20;
/// Longest segment and piece.
pub const MAX_SEGMENT_BYTES: u64 = 1 << 40;
/// Most segments. One less than their bits can number: no piece is [`NONE`].
pub const MAX_SEGMENTS: u32 = (1 << (32 - INDEX_BITS)) - 1;
/// Most sizes at once.
pub const MAX_CLASSES: usize = 64;

const INDEX_BITS: u32 = MAX_PIECES.trailing_zeros();

/// Number of a piece of memory: its segment, and its place there. Never [`NONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Piece(pub u32);

impl Piece {
    fn new(segment: u32, index: u32) -> Piece {
        Piece(segment << INDEX_BITS | index)
    }

    /// The number of its segment.
    pub fn segment(self) -> u32 {
        self.0 >> INDEX_BITS
    }

    fn index(self) -> u32 {
        self.0 & (MAX_PIECES - 1)
    }
}

/// How memory is had.
#[derive(Clone, Copy, Debug)]
pub struct HostOpts {
    /// The usual length of a segment; 0 = [`DEFAULT_SEGMENT_BYTES`].
    pub segment_bytes: u64,
    /// Most bytes of all segments; 0 = as many as the account has.
    pub max_bytes: u64,
    /// Huge pages.
    pub huge: Wish,
}

impl Default for HostOpts {
    fn default() -> HostOpts {
        HostOpts { segment_bytes: 0, max_bytes: 0, huge: Wish::Try }
    }
}

/// What the tier has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStats {
    /// Segments that are mapped.
    pub segments: u32,
    /// Those without a piece in use.
    pub empty_segments: u32,
    /// What segments cost, tables and all: what the account pays.
    pub cost_bytes: u64,
    /// Pieces in use.
    pub live_pieces: u64,
    /// Their bytes.
    pub live_bytes: u64,
}

/// What the tier has of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassStats {
    /// The size of its pieces.
    pub piece_bytes: u64,
    /// Its segments.
    pub segments: u32,
    /// Pieces they have.
    pub pieces: u64,
    /// Those in use.
    pub live_pieces: u64,
    /// What its segments cost beyond the pieces in use.
    pub wasted_bytes: u64,
}

/// What is known of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentFacts {
    /// Its number.
    pub number: u32,
    /// The size of its pieces.
    pub piece_bytes: u64,
    /// Pieces it has.
    pub pieces: u32,
    /// Those in use.
    pub live_pieces: u32,
    /// What comes back when it is given back.
    pub cost_bytes: u64,
    /// What of that counts for the tier's limit.
    pub mapped_bytes: u64,
    /// It gives out no more pieces.
    pub drains: bool,
}

/// Pieces of one size.
#[derive(Clone, Copy)]
struct Class {
    /// 0 = a class that is not used.
    piece_bytes: u64,
    /// How its segments are cut.
    segment_bytes: u64,
    pieces: u32,
    segments: u32,
    /// Segments with a free piece: those that were full first, empty ones last, so
    /// that segments that are nearly empty get there.
    roomy: List,
    /// The empty segment that is kept, or [`NONE`].
    spare: u32,
}

const UNUSED: Class = Class {
    piece_bytes: 0,
    segment_bytes: 0,
    pieces: 0,
    segments: 0,
    roomy: List::EMPTY,
    spare: NONE,
};

/// Memory for cells. Under its owner's lock; addresses are valid without it.
pub struct HostTier {
    account: Option<Arc<Account>>,
    segment_bytes: u64,
    huge: Wish,
    classes: [Class; MAX_CLASSES],
    table: Table,
    /// Most bytes that may be mapped.
    max_bytes: u64,
    mapped_bytes: u64,
    live_bytes: u64,
    live_pieces: u64,
    given_back_bytes: u64,
    /// The segment of the reserve: in no class, and beyond the limit.
    reserve: Option<u32>,
    /// Who is to know of all memory.
    device: Option<Arc<dyn Device>>,
    /// Segments that it was not told of.
    unregistered: Vec<Arc<Registration>>,
}

impl HostTier {
    /// A tier without memory; what it takes later, `account` pays.
    pub fn new(account: Option<Arc<Account>>, opts: &HostOpts) -> Result<HostTier> {
        let asked =
            if opts.segment_bytes == 0 { DEFAULT_SEGMENT_BYTES } else { opts.segment_bytes };
        if asked > MAX_SEGMENT_BYTES {
            fail!(Limit, "segments of {asked} bytes, {MAX_SEGMENT_BYTES} can be");
        }
        Ok(HostTier {
            account,
            segment_bytes: asked.next_multiple_of(GRAIN_BYTES),
            huge: opts.huge,
            classes: [UNUSED; MAX_CLASSES],
            max_bytes: if opts.max_bytes == 0 { u64::MAX } else { opts.max_bytes },
            mapped_bytes: 0,
            table: Table::new(MAX_SEGMENTS)?,
            live_bytes: 0,
            live_pieces: 0,
            given_back_bytes: 0,
            reserve: None,
            device: None,
            unregistered: Vec::new(),
        })
    }

    /// Takes a piece of at least `bytes` bytes. What it held before is still in it.
    /// When that fails nothing has changed, but that spare segments may be gone.
    pub fn alloc(&mut self, bytes: u64) -> Result<Piece> {
        self.alloc_for(bytes, 0)
    }

    /// Takes a piece, and remembers whose it is.
    pub fn alloc_for(&mut self, bytes: u64, owner: u64) -> Result<Piece> {
        let class = self.class_for(bytes)?;
        if self.classes[class].roomy.first == NONE
            && let Err(error) = self.grow(class)
        {
            self.forget_if_unused(class);
            return Err(error);
        }
        let number = self.classes[class].roomy.first;
        let Some(segment) = self.table.get_mut(number) else { return Err(Status::NoMem.into()) };
        let Some(index) = segment.take(owner) else { return Err(Status::NoMem.into()) };
        let (is_full, piece_bytes) = (segment.live() == segment.pieces(), segment.piece_bytes());
        if self.classes[class].spare == number {
            self.classes[class].spare = NONE;
        }
        if is_full {
            self.table.unlist(&mut self.classes[class].roomy, number);
        }
        self.live_pieces += 1;
        self.live_bytes += piece_bytes;
        Ok(Piece::new(number, index))
    }

    /// Gives a piece back.
    pub fn free(&mut self, piece: Piece) -> Result<()> {
        let number = piece.segment();
        let (entry, segment) = self.find(piece)?;
        let (class, drains) = (entry.class, entry.drains);
        let piece_bytes = segment.piece_bytes();
        self.live_pieces -= 1;
        self.live_bytes -= piece_bytes;
        let Some(segment) = self.table.get_mut(number) else { return Err(stale(piece)) };
        let was_full = segment.live() == segment.pieces();
        segment.give_back(piece.index());
        if self.reserve == Some(number) {
            return Ok(());
        }
        let is_empty = segment.live() == 0;
        if is_empty && (drains || self.classes[class].spare != NONE) {
            self.drop_segment(number);
        } else if is_empty {
            self.classes[class].spare = number;
            self.table.unlist(&mut self.classes[class].roomy, number);
            self.table.list_last(&mut self.classes[class].roomy, number);
        } else if was_full && !drains {
            self.table.list_first(&mut self.classes[class].roomy, number);
        }
        Ok(())
    }

    /// Where a piece is; valid until it is freed.
    pub fn address(&self, piece: Piece) -> Result<*mut u8> {
        let (_, segment) = self.find(piece)?;
        segment.address(piece.index()).ok_or_else(|| stale(piece))
    }

    /// The size of a piece.
    pub fn bytes(&self, piece: Piece) -> Result<u64> {
        self.find(piece).map(|(_, segment)| segment.piece_bytes())
    }

    /// Gives back what is kept empty; how much that was.
    pub fn trim(&mut self) -> u64 {
        let mut bytes = 0;
        for class in 0..MAX_CLASSES {
            let spare = self.classes[class].spare;
            if spare != NONE {
                bytes += self.drop_segment(spare);
            }
        }
        bytes
    }

    /// Has a segment give out no more pieces and go back once it is empty; or no
    /// longer.
    pub fn drain(&mut self, number: u32, drains: bool) -> Result<()> {
        let Some((entry, segment)) = self.table.get(number) else {
            fail!(NotFound, "segment {number} is not mapped");
        };
        let (is_empty, is_full) = (segment.live() == 0, segment.live() == segment.pieces());
        let class = entry.class;
        if entry.drains == drains {
            return Ok(());
        }
        if drains && is_empty {
            self.drop_segment(number);
            return Ok(());
        }
        self.table.entry_mut(number).drains = drains;
        let roomy = &mut self.classes[class].roomy;
        match drains {
            true => self.table.unlist(roomy, number),
            false if !is_full => self.table.list_first(roomy, number),
            false => {}
        }
        Ok(())
    }

    /// The segments, by number, without the reserve's.
    pub fn segments(&self) -> impl Iterator<Item = SegmentFacts> + '_ {
        let all = (0..self.table.len()).filter(|&number| self.reserve != Some(number));
        all.filter_map(|number| {
            let (entry, segment) = self.table.get(number)?;
            Some(SegmentFacts {
                number,
                piece_bytes: segment.piece_bytes(),
                pieces: segment.pieces(),
                live_pieces: segment.live(),
                cost_bytes: segment.cost_bytes(),
                mapped_bytes: segment.mapped_bytes(),
                drains: entry.drains,
            })
        })
    }

    /// The segment that has the fewest bytes in use and does not drain: the one to
    /// empty when memory has to go.
    pub fn emptiest(&self) -> Option<SegmentFacts> {
        let in_use = |segment: &SegmentFacts| u64::from(segment.live_pieces) * segment.piece_bytes;
        self.segments().filter(|segment| !segment.drains).min_by_key(in_use)
    }

    /// The pieces of a segment that are in use, in order, and whose they are.
    pub fn live_pieces(&self, number: u32) -> impl Iterator<Item = (Piece, u64)> + '_ {
        let segment = self.table.get(number).map(|(_, segment)| segment);
        segment.into_iter().flat_map(move |segment| {
            let piece = move |index| (Piece::new(number, index), segment.owner(index));
            segment.live_pieces().map(piece)
        })
    }

    /// What segments that went back have cost, since the start.
    pub fn given_back_bytes(&self) -> u64 {
        self.given_back_bytes
    }

    /// Bytes of the pieces in use.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// What it has.
    pub fn stats(&self) -> HostStats {
        let reserve = self.reserve.and_then(|number| self.table.get(number));
        let mut stats = HostStats {
            live_pieces: self.live_pieces,
            live_bytes: self.live_bytes,
            cost_bytes: reserve.map_or(0, |(_, segment)| segment.cost_bytes()),
            ..HostStats::default()
        };
        for segment in self.segments() {
            stats.segments += 1;
            stats.empty_segments += u32::from(segment.live_pieces == 0);
            stats.cost_bytes += segment.cost_bytes;
        }
        stats
    }

    /// What it has of each size.
    pub fn classes(&self) -> impl Iterator<Item = ClassStats> + '_ {
        let used = self.classes.iter().filter(|class| class.piece_bytes != 0);
        used.map(|class| {
            let piece_bytes = class.piece_bytes;
            let mut stats = ClassStats { piece_bytes, ..ClassStats::default() };
            for segment in self.segments().filter(|segment| segment.piece_bytes == piece_bytes) {
                let live_bytes = u64::from(segment.live_pieces) * piece_bytes;
                stats.segments += 1;
                stats.pieces += u64::from(segment.pieces);
                stats.live_pieces += u64::from(segment.live_pieces);
                stats.wasted_bytes += segment.cost_bytes - live_bytes;
            }
            stats
        })
    }
}

/// A piece that is not in use: freed twice, or never given out.
#[cold]
fn stale(piece: Piece) -> Error {
    debug_assert!(false, "piece {:#x} is not in use", piece.0);
    Error::new(Status::Invalid, format!("piece {:#x} is not in use", piece.0))
}

impl HostTier {
    fn find(&self, piece: Piece) -> Result<(&Entry, &Segment)> {
        match self.table.get(piece.segment()) {
            Some(found) if found.1.is_live(piece.index()) => Ok(found),
            _ => Err(stale(piece)),
        }
    }

    /// The class of a size; when there is no room for one more, that of a larger.
    fn class_for(&mut self, bytes: u64) -> Result<usize> {
        if bytes == 0 || bytes > MAX_SEGMENT_BYTES.min(MAX_BUFFER_BYTES) {
            fail!(Invalid, "a piece has 1 to {MAX_SEGMENT_BYTES} bytes, not {bytes}");
        }
        let piece_bytes = bytes.next_multiple_of(GRAIN_BYTES);
        let has = |class: &Class| class.piece_bytes == piece_bytes;
        if let Some(class) = self.classes.iter().position(has) {
            return Ok(class);
        }
        let is_unused = |class: &Class| class.piece_bytes == 0;
        if !self.classes.iter().any(is_unused) {
            self.trim(); // classes that have only a spare go
        }
        if let Some(class) = self.classes.iter().position(is_unused) {
            self.classes[class] = self.cut_of(piece_bytes);
            return Ok(class);
        }
        let larger = self.classes.iter().enumerate().filter(|(_, c)| c.piece_bytes > piece_bytes);
        match larger.min_by_key(|(_, class)| class.piece_bytes) {
            Some((class, _)) => Ok(class),
            None => fail!(Limit, "pieces of more than {MAX_CLASSES} sizes"),
        }
    }

    fn forget_if_unused(&mut self, class: usize) {
        if self.classes[class].segments == 0 {
            self.classes[class] = UNUSED;
        }
    }

    /// Gives a class one more segment: another's spare, or a new one.
    fn grow(&mut self, class: usize) -> Result<()> {
        let bytes = self.classes[class].segment_bytes;
        let fits = |other: &Class| other.spare != NONE && other.segment_bytes == bytes;
        let spare = self.classes.iter().find(|other| fits(other)).map(|other| other.spare);
        if let Some(number) = spare {
            self.leave_class(number);
            self.join_class(number, class);
            return Ok(());
        }
        let mut mapped = self.map(bytes);
        if mapped.is_err() && self.trim() > 0 {
            mapped = self.map(bytes);
        }
        let mut segment = mapped?;
        if let Some(device) = &self.device {
            self.unregistered.push(segment.register(device));
        }
        self.mapped_bytes += segment.mapped_bytes();
        let number = self.table.enter(segment);
        self.join_class(number, class);
        Ok(())
    }

    fn map(&self, bytes: u64) -> Result<Segment> {
        if self.table.is_full() {
            fail!(Limit, "{} segments are all there may be", self.table.len());
        }
        // The last one may fit where it is not rounded up to huge pages.
        let left = self.max_bytes.saturating_sub(self.mapped_bytes);
        let fits = |huge: &Wish| Segment::mapped_for(bytes, *huge).0 <= left;
        let Some(huge) = [self.huge, Wish::No].into_iter().find(fits) else {
            fail!(Limit, "{bytes} bytes more; {left} of {} are free", self.max_bytes);
        };
        Segment::map(self.account.as_ref(), bytes, GRAIN_BYTES, huge)
    }

    fn join_class(&mut self, number: u32, class: usize) {
        let Class { piece_bytes, pieces, .. } = self.classes[class];
        if let Some(segment) = self.table.get_mut(number) {
            segment.cut(piece_bytes, pieces);
        }
        self.table.entry_mut(number).class = class;
        self.classes[class].segments += 1;
        self.table.list_last(&mut self.classes[class].roomy, number);
    }

    fn leave_class(&mut self, number: u32) {
        let class = self.table.entry_mut(number).class;
        let from = &mut self.classes[class];
        self.table.unlist(&mut from.roomy, number);
        if from.spare == number {
            from.spare = NONE;
        }
        from.segments -= 1;
        self.forget_if_unused(class);
    }

    /// Gives an empty segment back to the budget; how much that is.
    fn drop_segment(&mut self, number: u32) -> u64 {
        self.leave_class(number);
        let segment = self.table.remove(number);
        debug_assert!(segment.as_ref().is_some_and(|s| s.live() == 0), "it was in use");
        let Some(segment) = segment else { return 0 };
        self.mapped_bytes -= segment.mapped_bytes();
        let bytes = segment.cost_bytes();
        self.given_back_bytes += bytes;
        bytes
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "tests.rs"]
mod tests;
