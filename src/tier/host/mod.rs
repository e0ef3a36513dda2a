//! Memory for cells: slabs of some megabytes, each cut into pieces of one size. Pieces never move,
//! so their addresses are stable, and workers may use them without the lock. Some empty slabs are
//! kept, since memory of new slabs is slow to touch; others are returned to the budget. An empty
//! slab may be cut into pieces of another size.

mod cut;
mod registration;
mod reserve;
mod resize;
pub mod shared;
mod slab;
mod table;

use std::collections::BTreeMap;

use crate::base::account::Account;
use crate::base::memory::{MAX_BUFFER_BYTES, Requirement};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::Device;
use crate::fail;
use crate::meta::index::NONE;
pub use registration::Registration;
use shared::SharedSlabs;
use slab::{MAX_PIECES, Slab};
use table::{Entry, List, Table};

/// Sizes of pieces are multiples of this number, so direct I/O uses pieces in place.
pub const PIECE_ALIGN_BYTES: u64 = 4096;
/// Default length of a slab.
pub const DEFAULT_SLAB_BYTES: u64 = 32 << 20;
/// Longest slab and piece.
pub const MAX_SLAB_BYTES: u64 = 1 << 40;
/// Most slabs. One less than their bits can number, so that no piece is [`NONE`].
pub const MAX_SLABS: u32 = (1 << (32 - INDEX_BITS)) - 1;
/// Most piece sizes at one time.
pub const MAX_CLASSES: usize = 64;

const INDEX_BITS: u32 = MAX_PIECES.trailing_zeros();

/// Number of a piece of memory: its slab, and its index in the slab. Never [`NONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Piece(pub u32);

impl Piece {
    fn new(slab: u32, index: u32) -> Piece {
        Piece(slab << INDEX_BITS | index)
    }

    /// The number of the piece's slab.
    pub fn slab(self) -> u32 {
        self.0 >> INDEX_BITS
    }

    fn index(self) -> u32 {
        self.0 & (MAX_PIECES - 1)
    }
}

/// Options of the tier's memory.
#[derive(Clone, Copy, Debug)]
pub struct HostOpts {
    /// The usual length of a slab; 0 = [`DEFAULT_SLAB_BYTES`].
    pub slab_bytes: u64,
    /// Most bytes of all slabs; 0 = as many as the account has.
    pub max_bytes: u64,
    /// Huge pages.
    pub huge: Requirement,
}

impl Default for HostOpts {
    fn default() -> HostOpts {
        HostOpts { slab_bytes: 0, max_bytes: 0, huge: Requirement::Try }
    }
}

/// Statistics of the tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStats {
    /// Mapped slabs.
    pub slabs: u32,
    /// Slabs without a piece in use.
    pub empty_slabs: u32,
    /// Bytes that the account is charged for slabs and their tables.
    pub cost_bytes: u64,
    /// Pieces in use.
    pub live_pieces: u64,
    /// Bytes of the pieces in use.
    pub live_bytes: u64,
}

/// Statistics of the pieces of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassStats {
    /// The size of a piece.
    pub piece_bytes: u64,
    /// Slabs with pieces of this size.
    pub slabs: u32,
    /// Pieces of these slabs.
    pub pieces: u64,
    /// Pieces in use.
    pub live_pieces: u64,
    /// Bytes charged for these slabs, less those of the pieces in use.
    pub wasted_bytes: u64,
}

/// State of one slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabInfo {
    /// Number of the slab.
    pub number: u32,
    /// The size of its pieces.
    pub piece_bytes: u64,
    /// Number of pieces.
    pub pieces: u32,
    /// Pieces in use.
    pub live_pieces: u32,
    /// Bytes that are freed when the slab is returned.
    pub cost_bytes: u64,
    /// The part of these bytes that counts toward the tier's limit.
    pub mapped_bytes: u64,
    /// The slab allocates no more pieces.
    pub drains: bool,
}

/// Size class: the slabs with pieces of one size.
#[derive(Clone, Copy)]
struct Class {
    /// 0 = an unused class.
    piece_bytes: u64,
    /// Length of its slabs.
    slab_bytes: u64,
    pieces: u32,
    slabs: u32,
    /// Slabs with a free piece. Slabs that were full are at the front and empty slabs at the end,
    /// so that nearly empty slabs become empty.
    with_free: List,
    /// Empty slabs: the last ones in `with_free`.
    spares: u32,
}

impl Class {
    /// An empty slab.
    fn spare(&self) -> Option<u32> {
        (self.spares > 0).then_some(self.with_free.last)
    }

    /// Whether so many slabs are empty that one must be returned.
    fn has_too_many_spares(&self) -> bool {
        self.spares > (self.slabs / 2).max(1)
    }
}

const UNUSED: Class =
    Class { piece_bytes: 0, slab_bytes: 0, pieces: 0, slabs: 0, with_free: List::EMPTY, spares: 0 };

/// Memory for cells. Its owner's lock protects it; addresses are valid without the lock.
pub struct HostTier {
    account: Option<Arc<Account>>,
    slab_bytes: u64,
    huge: Requirement,
    classes: [Class; MAX_CLASSES],
    table: Table,
    /// Most bytes that may be mapped.
    max_bytes: u64,
    mapped_bytes: u64,
    live_bytes: u64,
    live_pieces: u64,
    returned_bytes: u64,
    /// The slab of the reserve. It is in no class and does not count toward the limit.
    reserve: Option<u32>,
    /// The device with which all memory is registered.
    device: Option<Arc<dyn Device>>,
    /// Slabs that are not registered yet.
    unregistered: Vec<Arc<Registration>>,
    /// Where slabs lie that other processes map.
    shared: Option<Arc<SharedSlabs>>,
    /// Pieces that a process may still write to, and whether they were freed.
    held: BTreeMap<Piece, bool>,
}

impl HostTier {
    /// A tier without memory. `account` is charged for memory that the tier maps later.
    pub fn new(account: Option<Arc<Account>>, opts: &HostOpts) -> Result<HostTier> {
        let slab_bytes = if opts.slab_bytes == 0 { DEFAULT_SLAB_BYTES } else { opts.slab_bytes };
        if slab_bytes > MAX_SLAB_BYTES {
            fail!(
                Limit,
                "slabs of {slab_bytes} bytes are too long: at most {MAX_SLAB_BYTES} are possible"
            );
        }
        Ok(HostTier {
            account,
            slab_bytes: slab_bytes.next_multiple_of(PIECE_ALIGN_BYTES),
            huge: opts.huge,
            classes: [UNUSED; MAX_CLASSES],
            max_bytes: if opts.max_bytes == 0 { u64::MAX } else { opts.max_bytes },
            mapped_bytes: 0,
            table: Table::new(MAX_SLABS)?,
            live_bytes: 0,
            live_pieces: 0,
            returned_bytes: 0,
            reserve: None,
            device: None,
            unregistered: Vec::new(),
            shared: None,
            held: BTreeMap::new(),
        })
    }

    /// Allocates a piece of at least `bytes` bytes. The piece still has its previous content. A
    /// failure has no effect, except that spare slabs may have been freed.
    pub fn alloc(&mut self, bytes: u64) -> Result<Piece> {
        self.alloc_for(bytes, 0)
    }

    /// Allocates a piece, and records its owner.
    pub fn alloc_for(&mut self, bytes: u64, owner: u64) -> Result<Piece> {
        let class = self.class_for(bytes)?;
        if self.classes[class].with_free.first == NONE
            && let Err(error) = self.grow(class)
        {
            self.forget_if_unused(class);
            return Err(error);
        }
        let number = self.classes[class].with_free.first;
        let Some(slab) = self.table.get_mut(number) else { return Err(Status::NoMem.into()) };
        let was_empty = slab.live() == 0;
        let Some(index) = slab.take(owner) else { return Err(Status::NoMem.into()) };
        let (is_full, piece_bytes) = (slab.live() == slab.pieces(), slab.piece_bytes());
        self.classes[class].spares -= u32::from(was_empty);
        if is_full {
            self.table.unlist(&mut self.classes[class].with_free, number);
        }
        self.live_pieces += 1;
        self.live_bytes += piece_bytes;
        Ok(Piece::new(number, index))
    }

    /// Allocates a piece of at least `bytes` bytes for each of `owners`: fewer when memory runs out.
    /// Appends them to `out`.
    pub fn alloc_many(&mut self, bytes: u64, owners: &[u64], out: &mut Vec<u32>) {
        let mut owners = owners.iter();
        while let Some(&owner) = owners.next() {
            // The first piece of a slab is taken as a single one is.
            let Ok(piece) = self.alloc_for(bytes, owner) else { return };
            out.push(piece.0);
            let number = piece.slab();
            let Some((entry, _)) = self.table.get(number) else { return };
            let class = entry.class;
            let Some(slab) = self.table.get_mut(number) else { return };
            let free = (slab.pieces() - slab.live()) as usize;
            let mut more = 0;
            for &owner in owners.by_ref().take(free) {
                let Some(index) = slab.take(owner) else { break };
                out.push(Piece::new(number, index).0);
                more += 1;
            }
            let is_full = slab.live() == slab.pieces();
            self.live_pieces += more;
            self.live_bytes += more * slab.piece_bytes();
            if more > 0 && is_full {
                self.table.unlist(&mut self.classes[class].with_free, number);
            }
        }
    }

    /// Frees a piece.
    pub fn free(&mut self, piece: Piece) -> Result<()> {
        let number = piece.slab();
        let Some((class, drains, slab)) = self.table.find_mut(number) else {
            return Err(stale(piece));
        };
        if !slab.is_live(piece.index()) {
            return Err(stale(piece));
        }
        if let Some(is_freed) = self.held.get_mut(&piece) {
            *is_freed = true;
            return Ok(());
        }
        self.live_pieces -= 1;
        self.live_bytes -= slab.piece_bytes();
        let was_full = slab.live() == slab.pieces();
        slab.give_back(piece.index());
        let is_empty = slab.live() == 0;
        if self.reserve == Some(number) {
            return Ok(());
        }
        if is_empty && drains {
            self.drop_slab(number);
        } else if is_empty {
            self.table.unlist(&mut self.classes[class].with_free, number);
            self.table.list_last(&mut self.classes[class].with_free, number);
            self.classes[class].spares += 1;
        } else if was_full && !drains {
            self.table.list_first(&mut self.classes[class].with_free, number);
        }
        while self.classes[class].has_too_many_spares()
            && let Some(spare) = self.classes[class].spare()
        {
            self.drop_slab(spare);
        }
        Ok(())
    }

    /// The address of a piece; valid until the piece is freed.
    pub fn address(&self, piece: Piece) -> Result<*mut u8> {
        let (_, slab) = self.find(piece)?;
        slab.address(piece.index()).ok_or_else(|| stale(piece))
    }

    /// The size of a piece.
    pub fn bytes(&self, piece: Piece) -> Result<u64> {
        self.find(piece).map(|(_, slab)| slab.piece_bytes())
    }

    /// Returns the empty slabs to the budget. The result is the number of bytes freed.
    pub fn trim(&mut self) -> u64 {
        let mut bytes = 0;
        for class in 0..MAX_CLASSES {
            while let Some(spare) = self.classes[class].spare() {
                bytes += self.drop_slab(spare);
            }
        }
        bytes
    }

    /// Sets whether a slab drains: whether it allocates no more pieces and is returned once it is
    /// empty.
    pub fn drain(&mut self, number: u32, drains: bool) -> Result<()> {
        let Some((entry, slab)) = self.table.get(number) else {
            fail!(NotFound, "slab {number} is not mapped");
        };
        let (is_empty, is_full) = (slab.live() == 0, slab.live() == slab.pieces());
        let class = entry.class;
        if entry.drains == drains {
            return Ok(());
        }
        if drains && is_empty {
            self.drop_slab(number);
            return Ok(());
        }
        self.table.entry_mut(number).drains = drains;
        let with_free = &mut self.classes[class].with_free;
        match drains {
            true => self.table.unlist(with_free, number),
            false if !is_full => self.table.list_first(with_free, number),
            false => {}
        }
        Ok(())
    }

    /// The slabs in order of number, without the slab of the reserve.
    pub fn slabs(&self) -> impl Iterator<Item = SlabInfo> + '_ {
        let all = (0..self.table.len()).filter(|&number| self.reserve != Some(number));
        all.filter_map(|number| {
            let (entry, slab) = self.table.get(number)?;
            Some(SlabInfo {
                number,
                piece_bytes: slab.piece_bytes(),
                pieces: slab.pieces(),
                live_pieces: slab.live(),
                cost_bytes: slab.cost_bytes(),
                mapped_bytes: slab.mapped_bytes(),
                drains: entry.drains,
            })
        })
    }

    /// The slab with the fewest bytes in use among those that do not drain: the first to empty when
    /// memory must be returned.
    pub fn emptiest(&self) -> Option<SlabInfo> {
        let in_use = |slab: &SlabInfo| u64::from(slab.live_pieces) * slab.piece_bytes;
        self.slabs().filter(|slab| !slab.drains).min_by_key(in_use)
    }

    /// The pieces of a slab that are in use, in order, and their owners.
    pub fn live_pieces(&self, number: u32) -> impl Iterator<Item = (Piece, u64)> + '_ {
        let slab = self.table.get(number).map(|(_, slab)| slab);
        slab.into_iter().flat_map(move |slab| {
            let piece = move |index| (Piece::new(number, index), slab.owner(index));
            slab.live_pieces().map(piece)
        })
    }

    /// Bytes of all slabs returned since the start.
    pub fn returned_bytes(&self) -> u64 {
        self.returned_bytes
    }

    /// Bytes of the pieces in use.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Statistics of the tier.
    pub fn stats(&self) -> HostStats {
        let reserve = self.reserve.and_then(|number| self.table.get(number));
        let mut stats = HostStats {
            live_pieces: self.live_pieces,
            live_bytes: self.live_bytes,
            cost_bytes: reserve.map_or(0, |(_, slab)| slab.cost_bytes()),
            ..HostStats::default()
        };
        for slab in self.slabs() {
            stats.slabs += 1;
            stats.empty_slabs += u32::from(slab.live_pieces == 0);
            stats.cost_bytes += slab.cost_bytes;
        }
        stats
    }

    /// Statistics of each piece size.
    pub fn classes(&self) -> impl Iterator<Item = ClassStats> + '_ {
        let used = self.classes.iter().filter(|class| class.piece_bytes != 0);
        used.map(|class| {
            let piece_bytes = class.piece_bytes;
            let mut stats = ClassStats { piece_bytes, ..ClassStats::default() };
            for slab in self.slabs().filter(|slab| slab.piece_bytes == piece_bytes) {
                let live_bytes = u64::from(slab.live_pieces) * piece_bytes;
                stats.slabs += 1;
                stats.pieces += u64::from(slab.pieces);
                stats.live_pieces += u64::from(slab.live_pieces);
                stats.wasted_bytes += slab.cost_bytes - live_bytes;
            }
            stats
        })
    }
}

/// Error for a piece that is not in use: freed twice, or never allocated.
#[cold]
fn stale(piece: Piece) -> Error {
    debug_assert!(false, "piece {:#x} is not in use", piece.0);
    Error::new(Status::Invalid, format!("piece {:#x} is not in use", piece.0))
}

impl HostTier {
    fn find(&self, piece: Piece) -> Result<(&Entry, &Slab)> {
        match self.table.get(piece.slab()) {
            Some(found) if found.1.is_live(piece.index()) => Ok(found),
            _ => Err(stale(piece)),
        }
    }

    /// The class of a size; if all classes are used, the class of the next larger size.
    fn class_for(&mut self, bytes: u64) -> Result<usize> {
        if bytes == 0 || bytes > MAX_SLAB_BYTES.min(MAX_BUFFER_BYTES) {
            fail!(Invalid, "a piece has 1 to {MAX_SLAB_BYTES} bytes, not {bytes}");
        }
        let piece_bytes = bytes.next_multiple_of(PIECE_ALIGN_BYTES);
        let has = |class: &Class| class.piece_bytes == piece_bytes;
        if let Some(class) = self.classes.iter().position(has) {
            return Ok(class);
        }
        let is_unused = |class: &Class| class.piece_bytes == 0;
        if !self.classes.iter().any(is_unused) {
            self.trim(); // frees classes that have only spares
        }
        if let Some(class) = self.classes.iter().position(is_unused) {
            self.classes[class] = self.cut_of(piece_bytes);
            return Ok(class);
        }
        let larger = self.classes.iter().enumerate().filter(|(_, c)| c.piece_bytes > piece_bytes);
        match larger.min_by_key(|(_, class)| class.piece_bytes) {
            Some((class, _)) => Ok(class),
            None => fail!(Limit, "pieces have more than {MAX_CLASSES} sizes"),
        }
    }

    fn forget_if_unused(&mut self, class: usize) {
        if self.classes[class].slabs == 0 {
            self.classes[class] = UNUSED;
        }
    }

    /// Adds a slab to a class: the spare of another class, or a new one.
    fn grow(&mut self, class: usize) -> Result<()> {
        let bytes = self.classes[class].slab_bytes;
        let fits = |other: &&Class| other.spares > 0 && other.slab_bytes == bytes;
        if let Some(number) = self.classes.iter().find(fits).and_then(Class::spare) {
            self.leave_class(number);
            self.join_class(number, class);
            return Ok(());
        }
        let mut mapped = self.map(bytes);
        if mapped.is_err() && self.trim() > 0 {
            mapped = self.map(bytes);
        }
        let mut slab = mapped?;
        if let Some(device) = &self.device {
            self.unregistered.push(slab.register(device));
        }
        self.mapped_bytes += slab.mapped_bytes();
        let number = self.table.enter(slab);
        self.join_class(number, class);
        Ok(())
    }

    fn map(&self, bytes: u64) -> Result<Slab> {
        if self.table.is_full() {
            fail!(Limit, "the limit of {} slabs is reached", self.table.len());
        }
        // The last slab may fit if its length is not rounded up to huge pages.
        let left = self.max_bytes.saturating_sub(self.mapped_bytes);
        let fits = |huge: &Requirement| Slab::mapped_for(bytes, *huge).0 <= left;
        let Some(huge) = [self.huge, Requirement::No].into_iter().find(fits) else {
            fail!(Limit, "{bytes} bytes more; {left} of {} are free", self.max_bytes);
        };
        let source = (self.account.as_ref(), self.shared.as_ref());
        Slab::map(source, bytes, PIECE_ALIGN_BYTES, huge)
    }

    fn join_class(&mut self, number: u32, class: usize) {
        let Class { piece_bytes, pieces, .. } = self.classes[class];
        if let Some(slab) = self.table.get_mut(number) {
            slab.cut(piece_bytes, pieces);
        }
        self.table.entry_mut(number).class = class;
        self.classes[class].slabs += 1;
        self.classes[class].spares += 1;
        self.table.list_last(&mut self.classes[class].with_free, number);
    }

    fn leave_class(&mut self, number: u32) {
        let Some((entry, slab)) = self.table.get(number) else { return };
        let (class, is_spare) = (entry.class, slab.live() == 0 && !entry.drains);
        let from = &mut self.classes[class];
        self.table.unlist(&mut from.with_free, number);
        from.spares -= u32::from(is_spare);
        from.slabs -= 1;
        self.forget_if_unused(class);
    }

    /// Returns an empty slab to the budget. The result is the number of bytes freed.
    fn drop_slab(&mut self, number: u32) -> u64 {
        self.leave_class(number);
        let slab = self.table.remove(number);
        debug_assert!(slab.as_ref().is_some_and(|s| s.live() == 0), "a slab in use is dropped");
        let Some(slab) = slab else { return 0 };
        self.mapped_bytes -= slab.mapped_bytes();
        let bytes = slab.cost_bytes();
        self.returned_bytes += bytes;
        bytes
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "tests.rs"]
mod tests;
