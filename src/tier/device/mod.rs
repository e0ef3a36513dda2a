//! Device memory for copies of cells: a few slabs, each cut into pieces of one size. The tables of
//! pieces are in host memory, so allocating a piece does not call the device. Pieces never move. A
//! slab without a piece in use is cut into pieces of another size, or is returned to the device.

mod pieces;
mod slab;

pub use slab::Slab;

use crate::base::account::Account;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use pieces::Pieces;

/// Sizes of pieces are multiples of this number, so that pieces begin at full memory lines.
pub const PIECE_ALIGN_BYTES: u64 = 256;
/// Slabs of a tier at its limit. To make room for another piece size, at most one slab is emptied.
const SLABS: u64 = 32;
const LEAST_SLAB_BYTES: u64 = 64 << 10;
/// Most bytes of a tier.
const MOST_BYTES: u64 = 1 << 48;
const INDEX_BITS: u32 = 20;
const MOST_PIECES: u64 = 1 << INDEX_BITS;
const MOST_SLABS: usize = 1 << (32 - INDEX_BITS);

/// Number of a piece: its slab, and its index in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece(pub u32);

impl Piece {
    fn new(slab: usize, index: u32) -> Piece {
        Piece((slab as u32) << INDEX_BITS | index)
    }

    fn slab(self) -> usize {
        (self.0 >> INDEX_BITS) as usize
    }

    fn index(self) -> u32 {
        self.0 & (MOST_PIECES as u32 - 1)
    }
}

/// Statistics of the tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Most bytes of slabs.
    pub limit_bytes: u64,
    /// Slabs.
    pub slabs: u32,
    /// Bytes of the slabs.
    pub slab_bytes: u64,
    /// Pieces in use.
    pub live_pieces: u64,
    /// Bytes of the pieces in use.
    pub live_bytes: u64,
}

/// A slab of the tier.
struct Row {
    slab: Slab,
    /// The pieces of the slab; none until the first piece is allocated.
    pieces: Option<Pieces>,
    /// The slab allocates no more pieces, and is returned once it is empty.
    drains: bool,
}

impl Row {
    fn live(&self) -> u32 {
        self.pieces.as_ref().map_or(0, Pieces::live)
    }

    fn live_bytes(&self) -> u64 {
        self.pieces.as_ref().map_or(0, |p| u64::from(p.live()) * p.piece_bytes())
    }
}

/// Memory of a device for cells. Its owner's lock protects it; addresses are valid without that
/// lock.
pub struct DeviceTier {
    account: Option<Arc<Account>>,
    limit_bytes: u64,
    bytes_per_slab: u64,
    rows: Vec<Option<Row>>,
    held_bytes: u64,
    live_bytes: u64,
    live_pieces: u64,
    /// Empty slabs, to be returned to the device.
    returning: Vec<Slab>,
}

impl DeviceTier {
    /// A tier without memory, limited to `limit_bytes`. The account is charged for its tables.
    pub fn new(account: Option<Arc<Account>>, limit_bytes: u64) -> Result<DeviceTier> {
        check(limit_bytes)?;
        let each = (limit_bytes / SLABS).max(LEAST_SLAB_BYTES).min(limit_bytes);
        Ok(DeviceTier {
            account,
            limit_bytes,
            bytes_per_slab: each / PIECE_ALIGN_BYTES * PIECE_ALIGN_BYTES,
            rows: Vec::new(),
            held_bytes: 0,
            live_bytes: 0,
            live_pieces: 0,
            returning: Vec::new(),
        })
    }

    /// Length of a slab, and of the longest piece.
    pub fn bytes_per_slab(&self) -> u64 {
        self.bytes_per_slab
    }

    /// Number of slabs that the tier may still add.
    pub fn missing_slabs(&self) -> u64 {
        let room = MOST_SLABS.saturating_sub(self.rows.iter().flatten().count()) as u64;
        (self.limit_bytes.saturating_sub(self.held_bytes) / self.bytes_per_slab).min(room)
    }

    /// Adds a slab. A slab beyond the current limit is returned to the device.
    pub fn add(&mut self, slab: Slab) {
        if self.missing_slabs() == 0 {
            return self.returning.push(slab);
        }
        self.held_bytes += slab.bytes();
        let row = Some(Row { slab, pieces: None, drains: false });
        match self.rows.iter().position(Option::is_none) {
            Some(at) => self.rows[at] = row,
            None => self.rows.push(row),
        }
    }

    /// Allocates a piece of at least `bytes` bytes, and records its owner. None if no slab has a
    /// free piece of that size and no slab is empty.
    pub fn alloc(&mut self, bytes: u64, owner: u64) -> Option<Piece> {
        let piece_bytes = bytes.max(1).next_multiple_of(PIECE_ALIGN_BYTES);
        let at = self.row_for(piece_bytes)?;
        let row = self.rows[at].as_mut()?;
        if row.live() == 0 && row.pieces.as_ref().is_none_or(|p| p.piece_bytes() != piece_bytes) {
            let count = (row.slab.bytes() / piece_bytes).min(MOST_PIECES) as u32;
            row.pieces = Some(Pieces::new(self.account.as_ref(), piece_bytes, count).ok()?);
        }
        let index = row.pieces.as_mut()?.take(owner)?;
        self.live_pieces += 1;
        self.live_bytes += piece_bytes;
        Some(Piece::new(at, index))
    }

    /// The slab in which to allocate a piece of a size: the fullest slab with pieces of that size,
    /// so that other slabs become empty.
    fn row_for(&self, piece_bytes: u64) -> Option<usize> {
        let rows = self.rows.iter().enumerate().filter_map(|(at, row)| Some((at, row.as_ref()?)));
        let may_give = |(at, row): (usize, &Row)| {
            let fits = match &row.pieces {
                Some(pieces) if pieces.live() > 0 => {
                    pieces.piece_bytes() == piece_bytes && !pieces.is_full()
                }
                _ => piece_bytes <= row.slab.bytes(),
            };
            (fits && !row.drains).then_some((row.live(), std::cmp::Reverse(at)))
        };
        rows.filter_map(may_give).max().map(|(_, std::cmp::Reverse(at))| at)
    }

    /// Frees a piece.
    pub fn free(&mut self, piece: Piece) -> Result<()> {
        let at = piece.slab();
        let pieces = self.rows.get_mut(at).and_then(|row| row.as_mut()?.pieces.as_mut());
        let Some(pieces) = pieces.filter(|pieces| pieces.is_live(piece.index())) else {
            return Err(stale(piece));
        };
        pieces.give_back(piece.index());
        self.live_pieces -= 1;
        self.live_bytes -= pieces.piece_bytes();
        self.let_go_if_empty(at);
        Ok(())
    }

    fn let_go_if_empty(&mut self, at: usize) {
        if !self.rows[at].as_ref().is_some_and(|row| row.drains && row.live() == 0) {
            return;
        }
        if let Some(row) = self.rows[at].take() {
            self.held_bytes -= row.slab.bytes();
            self.returning.push(row.slab);
        }
    }

    /// The address of a piece; valid until the piece is freed.
    pub fn address(&self, piece: Piece) -> Result<u64> {
        let row = self.rows.get(piece.slab()).and_then(Option::as_ref);
        let pieces = row.and_then(|row| row.pieces.as_ref());
        match (row, pieces.filter(|pieces| pieces.is_live(piece.index()))) {
            (Some(row), Some(pieces)) => {
                Ok(row.slab.address() + u64::from(piece.index()) * pieces.piece_bytes())
            }
            _ => Err(stale(piece)),
        }
    }

    /// Owners of the pieces in use, slab by slab.
    pub fn owners(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.rows.len()).flat_map(|at| self.owners_in(at))
    }

    /// Owners of the pieces in use of one slab.
    pub fn owners_in(&self, slab: usize) -> impl Iterator<Item = u64> + '_ {
        let row = self.rows.get(slab).and_then(Option::as_ref);
        row.and_then(|row| row.pieces.as_ref()).into_iter().flat_map(Pieces::owners)
    }

    /// Whether the slab of a piece drains.
    pub fn drains(&self, piece: Piece) -> bool {
        self.rows.get(piece.slab()).and_then(Option::as_ref).is_none_or(|row| row.drains)
    }

    /// Whether a slab is empty and does not drain.
    pub fn has_empty(&self) -> bool {
        self.rows.iter().flatten().any(|row| row.live() == 0 && !row.drains)
    }

    /// Whether a slab has pieces of a size, or is empty and can be cut into such pieces. Otherwise
    /// a slab must be emptied before a piece of that size can be allocated.
    pub fn has_size(&self, bytes: u64) -> bool {
        let piece_bytes = bytes.max(1).next_multiple_of(PIECE_ALIGN_BYTES);
        let of_it = |row: &Row| {
            let pieces = row.pieces.as_ref().filter(|pieces| pieces.live() > 0);
            !row.drains && pieces.is_none_or(|pieces| pieces.piece_bytes() == piece_bytes)
        };
        self.rows.iter().flatten().any(of_it)
    }

    /// The slab with the fewest bytes in use among those that do not drain.
    pub fn emptiest(&self) -> Option<usize> {
        let rows = self.rows.iter().enumerate().filter_map(|(at, row)| Some((at, row.as_ref()?)));
        let stay = rows.filter(|(_, row)| !row.drains);
        stay.min_by_key(|(at, row)| (row.live_bytes(), *at)).map(|(at, _)| at)
    }

    /// Drains slabs of at least `bytes` bytes, the emptiest first. Returns the owners of pieces to
    /// be evicted, and the number of bytes that will be freed.
    pub fn drain(&mut self, bytes: u64) -> (Vec<u64>, u64) {
        let (mut owners, mut freed_bytes) = (Vec::new(), 0);
        while freed_bytes < bytes {
            let Some(at) = self.emptiest() else { break };
            let Some(row) = self.rows[at].as_mut() else { break };
            row.drains = true;
            freed_bytes += row.slab.bytes();
            owners.extend(self.owners_in(at));
            self.let_go_if_empty(at);
        }
        (owners, freed_bytes)
    }

    /// Changes the most bytes of all slabs. Under a smaller limit the emptiest slabs drain. Returns
    /// the owners of pieces to be evicted.
    pub fn set_limit(&mut self, bytes: u64) -> Result<Vec<u64>> {
        if bytes > 0 {
            check(bytes)?;
        }
        self.limit_bytes = bytes;
        let stays = self.rows.iter().flatten().filter(|row| !row.drains);
        let stays: u64 = stays.map(|row| row.slab.bytes()).sum();
        Ok(self.drain(stays.saturating_sub(bytes)).0)
    }

    /// Whether empty slabs wait to be returned to the device.
    pub fn has_returning(&self) -> bool {
        !self.returning.is_empty()
    }

    /// Takes the empty slabs to be returned; dropping them frees their memory.
    pub fn take_returning(&mut self) -> Vec<Slab> {
        std::mem::take(&mut self.returning)
    }

    /// Statistics of the tier.
    pub fn stats(&self) -> DeviceStats {
        DeviceStats {
            limit_bytes: self.limit_bytes,
            slabs: self.rows.iter().flatten().count() as u32,
            slab_bytes: self.held_bytes,
            live_pieces: self.live_pieces,
            live_bytes: self.live_bytes,
        }
    }
}

fn check(bytes: u64) -> Result<()> {
    if !(LEAST_SLAB_BYTES..=MOST_BYTES).contains(&bytes) {
        fail!(
            Limit,
            "{bytes} bytes of device memory: {LEAST_SLAB_BYTES} to {MOST_BYTES} are possible"
        );
    }
    Ok(())
}

/// Error for a piece that is not in use: freed twice, or never allocated.
#[cold]
fn stale(piece: Piece) -> Error {
    debug_assert!(false, "piece {:#x} of the device is not in use", piece.0);
    Error::new(Status::Invalid, format!("piece {:#x} of the device is not in use", piece.0))
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "tests.rs"]
mod tests;
