//! The cell table: for each cell the tiers in which it is resident, its location in each, and its
//! readers. [`CELL_BYTES`] a cell, in columns, so that a lookup reads the residency only.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::fail;

/// Tiers that a cell can be in: the first ones of [`Tier`], the fastest first.
pub const TIERS: usize = 4;

/// Bytes for each cell.
pub const CELL_BYTES: usize = size_of::<Residency>()
    + 1
    + size_of::<Readers>()
    + size_of::<u32>()
    + 2 * size_of::<u64>()
    + size_of::<StoredForm>();

const LOADING: u32 = 4;
const STORING: u32 = 8;
const LEAVING: u32 = 12;

/// The remote's bit. A remote hint is no residency: the object may have been evicted.
const REMOTE_BIT: u8 = 1 << Tier::Remote as u8;

/// Four bits for each tier: the cell is resident; it is being copied there from another tier; it is
/// being stored there from outside; it is leaving once the last reader is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Residency(u16);

// SAFETY: an integer.
unsafe impl Zeroable for Residency {}

impl Residency {
    #[inline]
    fn bits(self, from: u32) -> u8 {
        (self.0 >> from & 0xF) as u8
    }

    /// The tiers of this store in which it is resident; bit 0 is the device.
    #[inline]
    pub fn resident_tiers(self) -> u8 {
        self.bits(0) & !REMOTE_BIT
    }

    /// Whether the remote is believed to have it.
    #[inline]
    pub fn is_remote(self) -> bool {
        self.bits(0) & REMOTE_BIT != 0
    }

    /// Whether it is being uploaded to the remote.
    #[inline]
    pub fn is_uploading(self) -> bool {
        self.bits(LOADING) & REMOTE_BIT != 0
    }

    /// Whether it is resident in a tier, by the tier's bit; for the remote, whether it is believed
    /// to be there.
    #[inline]
    pub(super) fn has(self, tier: usize) -> bool {
        self.bits(0) & 1 << tier != 0
    }

    /// The tiers to which it is being copied from another, the remote included.
    #[inline]
    pub fn loading(self) -> u8 {
        self.bits(LOADING)
    }

    /// The tiers in which it is being stored from outside.
    #[inline]
    pub fn storing(self) -> u8 {
        self.bits(STORING)
    }

    /// The tiers of this store in which it will be resident if the transition succeeds.
    #[inline]
    pub fn arriving(self) -> u8 {
        (self.loading() | self.storing()) & !REMOTE_BIT
    }

    /// The tiers that dropped it while it was read: its memory there is still in use.
    #[inline]
    pub fn leaving(self) -> u8 {
        self.bits(LEAVING)
    }

    /// Whether it is in no tier of this store, nor on the way to one or out of host memory: it can be
    /// stored in host memory.
    #[inline]
    pub fn is_nowhere(self) -> bool {
        self.resident_tiers() | self.arriving() | self.leaving() & 1 << Tier::Host as u8 == 0
    }

    /// The fastest tier of this store in which it is resident.
    #[inline]
    pub fn nearest(self) -> Option<usize> {
        let tier = self.resident_tiers().trailing_zeros() as usize;
        (tier < TIERS).then_some(tier)
    }
}

/// Readers of a cell in each tier.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct Readers([u16; TIERS]);

// SAFETY: integers only.
unsafe impl Zeroable for Readers {}

/// How a cell is stored: plain, or coded by a codec (13 bits of blocks minus one, 3 bits of codec).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct StoredForm(u16);

// SAFETY: an integer.
unsafe impl Zeroable for StoredForm {}

impl StoredForm {
    /// Plain: not coded.
    pub const PLAIN: StoredForm = StoredForm(0);
    /// Most blocks of a coded cell: one less than the largest cell.
    pub const MAX_BLOCKS: u64 = 1 << 13;
    /// Largest number of a codec.
    pub const MAX_CODEC: u16 = 7;

    /// Coded in this many blocks; None if a number is out of range.
    pub fn new(codec: u16, blocks: u64) -> Option<StoredForm> {
        let fits =
            (1..=Self::MAX_CODEC).contains(&codec) && (1..=Self::MAX_BLOCKS).contains(&blocks);
        fits.then(|| StoredForm(codec << 13 | (blocks - 1) as u16))
    }

    /// The codec; 0 = plain.
    #[inline]
    pub fn codec(self) -> u16 {
        self.0 >> 13
    }

    /// Blocks of a coded cell.
    #[inline]
    pub fn blocks(self) -> Option<u64> {
        (self != Self::PLAIN).then_some(u64::from(self.0 & 0x1FFF) + 1)
    }
}

/// Location of a cell in a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// On the device, in the engine's memory.
    Device,
    /// A piece of the host tier.
    Host(u32),
    /// A spot of the disk tier, with the seal of its contents.
    Disk {
        /// Segment, block and record, as `tier/disk` packs them.
        spot: u64,
        /// The expected seal.
        seal: u64,
        /// The stored form.
        coded: StoredForm,
    },
    /// At the remote, under its key.
    Remote,
}

impl Location {
    /// The tier of the location.
    #[inline]
    pub fn tier(self) -> Tier {
        match self {
            Location::Device => Tier::Device,
            Location::Host(_) => Tier::Host,
            Location::Disk { .. } => Tier::Disk,
            Location::Remote => Tier::Remote,
        }
    }
}

/// The bit of a tier. Pinned memory is host memory, not a tier of its own.
#[inline]
pub fn bit_of(tier: Tier) -> Result<usize> {
    let at = tier as usize;
    if at >= TIERS {
        fail!(Invalid, "a cell cannot be resident in tier {}", tier.name());
    }
    Ok(at)
}

/// The columns, indexed by cell number. The chunk table maps chunks to cells and decides whether a
/// change is allowed; these methods only assert.
pub(super) struct Cells {
    marks: Zeroed<Residency>,
    /// Two bits for each tier: the source of a copy to it.
    sources: Zeroed<u8>,
    readers: Zeroed<Readers>,
    pieces: Zeroed<u32>,
    spots: Zeroed<u64>,
    seals: Zeroed<u64>,
    /// Uses no memory until a cell is coded.
    codeds: Zeroed<StoredForm>,
}

impl Cells {
    pub(super) fn new(limit: usize) -> Result<Cells> {
        Ok(Cells {
            marks: Zeroed::new(limit)?,
            sources: Zeroed::new(limit)?,
            readers: Zeroed::new(limit)?,
            pieces: Zeroed::new(limit)?,
            spots: Zeroed::new(limit)?,
            seals: Zeroed::new(limit)?,
            codeds: Zeroed::new(limit)?,
        })
    }

    /// Bytes that the columns use for the first `cells` cells.
    pub(super) fn used_bytes(&self, cells: usize) -> u64 {
        let narrow = self.marks.front_bytes(cells) + self.sources.front_bytes(cells);
        let wide = self.readers.front_bytes(cells) + self.pieces.front_bytes(cells);
        let disk = self.spots.front_bytes(cells) + self.seals.front_bytes(cells);
        narrow + wide + disk + self.codeds.front_bytes(cells)
    }

    #[inline]
    pub(super) fn marks(&self) -> &[Residency] {
        &self.marks
    }

    /// Readers of a cell in a tier.
    #[inline]
    pub(super) fn readers(&self, at: usize, tier: usize) -> u16 {
        self.readers[at].0[tier]
    }

    /// Marks a cell as in flight into a tier, from another tier or from outside.
    #[inline]
    pub(super) fn expect(&mut self, at: usize, tier: usize, source: Option<usize>) {
        let Residency(bits) = &mut self.marks[at];
        let taken = |from: u32| *bits & 1 << (from + tier as u32) != 0;
        let free = ![0, LOADING, STORING, LEAVING].into_iter().any(taken);
        assert!(
            free && source != Some(tier),
            "the cell is already in the tier, in flight or leaving"
        );
        *bits |= 1 << (source.map_or(STORING, |_| LOADING) + tier as u32);
        if let Some(from) = source {
            let sources = &mut self.sources[at];
            *sources = *sources & !(3 << (2 * tier)) | (from as u8) << (2 * tier);
        }
    }

    /// The piece of host memory of each cell. A piece is valid while its cell is stored there or read.
    #[inline]
    pub(super) fn pieces(&self) -> &[u32] {
        &self.pieces
    }

    /// Sets the piece of a cell that is being stored in memory.
    #[inline]
    pub(super) fn set_piece(&mut self, at: usize, piece: u32) {
        self.pieces[at] = piece;
    }

    /// The source tier of a copy to `tier`.
    #[inline]
    pub(super) fn source(&self, at: usize, tier: usize) -> Option<usize> {
        let loading = self.marks[at].loading() & 1 << tier != 0;
        loading.then(|| usize::from(self.sources[at] >> (2 * tier) & 3))
    }

    /// Readers of a cell in a tier, without the copies to other tiers.
    #[inline]
    pub(super) fn plain_readers(&self, at: usize, tier: usize) -> usize {
        let copies = (0..TIERS).filter(|&to| self.source(at, to) == Some(tier)).count();
        usize::from(self.readers(at, tier)) - copies
    }

    /// Clears the in-flight marks of a tier.
    #[inline]
    pub(super) fn end_storing(&mut self, at: usize, tier: usize) {
        let Residency(bits) = &mut self.marks[at];
        *bits &= !(1 << (LOADING + tier as u32) | 1 << (STORING + tier as u32));
    }

    /// Records a location. Returns whether the cell was not resident in this store before and is
    /// now.
    #[inline]
    pub(super) fn place(&mut self, at: usize, place: Location) -> bool {
        match place {
            Location::Host(piece) => self.pieces[at] = piece,
            Location::Disk { spot, seal, coded } => {
                (self.spots[at], self.seals[at]) = (spot, seal);
                // Does not touch pages that hold plain cells only.
                if self.codeds[at] != coded {
                    self.codeds[at] = coded;
                }
            }
            Location::Device | Location::Remote => {}
        }
        let marks = &mut self.marks[at];
        let was = marks.resident_tiers();
        marks.0 |= 1 << place.tier() as u32;
        was == 0 && marks.resident_tiers() != 0
    }

    /// The location of a cell in a tier, also after it left.
    #[inline]
    pub(super) fn place_in(&self, at: usize, tier: usize) -> Location {
        match tier {
            0 => Location::Device,
            1 => Location::Host(self.pieces[at]),
            2 => Location::Disk {
                spot: self.spots[at],
                seal: self.seals[at],
                coded: self.codeds[at],
            },
            _ => Location::Remote,
        }
    }

    /// Moves a cell to another spot on disk.
    #[inline]
    pub(super) fn set_spot(&mut self, at: usize, spot: u64) {
        self.spots[at] = spot;
    }

    /// Removes a cell from a tier. Returns whether it has left this store, and whether its memory
    /// in the tier is free. Otherwise it is leaving.
    #[inline]
    pub(super) fn take(&mut self, at: usize, tier: usize) -> (bool, bool) {
        let free = self.readers(at, tier) == 0;
        let marks = &mut self.marks[at];
        assert!(marks.has(tier), "the cell is not resident in the tier");
        let was = marks.resident_tiers();
        marks.0 &= !(1 << tier);
        if !free {
            marks.0 |= 1 << (LEAVING + tier as u32);
        }
        (was != 0 && marks.resident_tiers() == 0, free)
    }

    /// Adds a reader; false if the counter is full.
    #[inline]
    pub(super) fn read(&mut self, at: usize, tier: usize) -> bool {
        let readers = &mut self.readers[at].0[tier];
        let more = readers.checked_add(1);
        *readers = more.unwrap_or(*readers);
        more.is_some()
    }

    /// Removes a reader. Returns true if it was the last one of a leaving cell, whose memory is
    /// free now.
    #[inline]
    pub(super) fn end_read(&mut self, at: usize, tier: usize) -> bool {
        let readers = &mut self.readers[at].0[tier];
        assert!(*readers > 0, "the cell has no reader in the tier");
        *readers -= 1;
        let Residency(bits) = &mut self.marks[at];
        let leaving = 1 << (LEAVING + tier as u32);
        let freed = *readers == 0 && *bits & leaving != 0;
        if freed {
            *bits &= !leaving;
        }
        freed
    }

    /// Clears a range of cells that have no readers and are not in flight.
    pub(super) fn clear(&mut self, from: usize, count: usize) {
        for marks in &mut self.marks[from..from + count] {
            assert_eq!(marks.0 >> LOADING, 0, "a cell is in flight or leaving");
            *marks = Residency(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_bytes_is_33() {
        assert_eq!(CELL_BYTES, 33);
    }

    #[test]
    fn remote_hints_are_no_residency() {
        let mut cells = Cells::new(1).expect("small");
        cells.expect(0, 1, None);
        cells.end_storing(0, 1);
        assert!(cells.place(0, Location::Host(1)));
        cells.expect(0, 3, Some(1));
        assert!(cells.marks()[0].is_uploading() && cells.marks()[0].arriving() == 0);
        cells.end_storing(0, 3);
        assert!(!cells.place(0, Location::Remote));
        assert!(cells.marks()[0].is_remote() && cells.marks()[0].resident_tiers() == 2);
        assert_eq!(cells.take(0, 1), (true, true));
        assert_eq!((cells.marks()[0].resident_tiers(), cells.marks()[0].nearest()), (0, None));
        assert_eq!(cells.take(0, 3), (false, true));
        assert!(!cells.place(0, Location::Remote) && cells.place(0, Location::Host(1)));
    }

    #[test]
    fn stored_forms_round_trip_in_sixteen_bits() {
        assert_eq!((StoredForm::PLAIN.codec(), StoredForm::PLAIN.blocks()), (0, None));
        for (codec, blocks) in [(1, 1), (1, 8192), (7, 1), (7, 8192), (2, 77)] {
            let coded = StoredForm::new(codec, blocks).expect("it fits");
            assert_eq!((coded.codec(), coded.blocks()), (codec, Some(blocks)));
        }
        for (codec, blocks) in [(0, 1), (8, 1), (1, 0), (1, 8193)] {
            assert_eq!(StoredForm::new(codec, blocks), None);
        }
    }

    #[test]
    fn residency_bits_of_tiers_are_independent() {
        let mut cells = Cells::new(2).expect("small");
        cells.expect(1, 1, None);
        cells.expect(1, 0, Some(3));
        assert_eq!((cells.source(1, 0), cells.source(1, 1)), (Some(3), None));
        let marks = cells.marks()[1];
        assert_eq!((marks.storing(), marks.loading(), marks.arriving()), (2, 1, 3));
        cells.end_storing(1, 1);
        assert!(cells.place(1, Location::Host(7)));
        assert!(!cells.place(1, Location::Disk { spot: 8, seal: 9, coded: StoredForm::PLAIN }));
        assert_eq!((cells.marks()[1].resident_tiers(), cells.marks()[1].nearest()), (6, Some(1)));
        assert!(cells.read(1, 1) && cells.read(1, 1));
        assert_eq!(cells.take(1, 1), (false, false));
        assert_eq!((cells.marks()[1].leaving(), cells.marks()[1].nearest()), (2, Some(2)));
        assert!(!cells.end_read(1, 1) && cells.end_read(1, 1));
        assert_eq!(cells.place_in(1, 1), Location::Host(7));
        assert_eq!(cells.take(1, 2), (true, true));
        assert_eq!((cells.marks()[1].nearest(), cells.marks()[0]), (None, Residency(0)));
    }
}
