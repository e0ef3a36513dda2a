//! Windows: reserved device addresses with memory mapped into parts of them. Pointers into a window
//! stay valid while the memory behind them changes.

use std::collections::BTreeMap;

use crate::base::status::Result;
use crate::fail;

/// Physical memory of a window, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece(pub u64);

/// A range of device addresses of which only some are backed by memory. Dropping it frees its
/// remaining memory.
pub trait Window: Send + Sync {
    /// Start address.
    fn address(&self) -> u64;

    /// Length.
    fn bytes(&self) -> u64;

    /// Granularity of positions and lengths.
    fn granularity_bytes(&self) -> u64;

    /// Allocates device memory that is not mapped yet. `NoMem`: not enough is free.
    fn create(&self, bytes: u64) -> Result<Piece>;

    /// Maps a piece at offset `at`, and unmaps it from its previous offset. A piece at that offset
    /// already is not remapped. The content is undefined. After a failure the piece is unmapped, or
    /// mapped where it was.
    ///
    /// # Safety
    /// No thread and no work in flight uses the addresses of the piece.
    unsafe fn put(&self, piece: Piece, at: u64) -> Result<()>;

    /// Unmaps a piece, if it is mapped.
    ///
    /// # Safety
    /// As for [`Window::put`].
    unsafe fn take(&self, piece: Piece) -> Result<()>;

    /// Frees a piece. If that fails, dropping the window frees it.
    ///
    /// # Safety
    /// As for [`Window::put`].
    unsafe fn destroy(&self, piece: Piece) -> Result<()>;
}

/// A piece, with the device's own state for it.
#[derive(Clone, Copy)]
pub struct PieceState<T> {
    /// State of the device.
    pub own: T,
    /// Length.
    pub bytes: u64,
    /// Offset where the piece is mapped.
    pub at: Option<u64>,
}

/// The pieces of a window and where they are mapped.
pub struct Pieces<T> {
    bytes: u64,
    granularity_bytes: u64,
    last: u64,
    known: BTreeMap<u64, PieceState<T>>,
    /// Mapped ranges: start, end.
    placed: BTreeMap<u64, u64>,
}

impl<T: Copy> Pieces<T> {
    /// An empty table for a window of `bytes`.
    pub fn new(bytes: u64, granularity_bytes: u64) -> Pieces<T> {
        let (known, placed) = (BTreeMap::new(), BTreeMap::new());
        Pieces { bytes, granularity_bytes, last: 0, known, placed }
    }

    /// Checks the length of a piece.
    pub fn check_length(&self, bytes: u64) -> Result<()> {
        if bytes == 0 || bytes % self.granularity_bytes != 0 {
            fail!(
                Invalid,
                "a piece of {bytes} bytes: the window needs positive multiples of {}",
                self.granularity_bytes
            );
        }
        Ok(())
    }

    /// Adds a piece.
    pub fn add(&mut self, own: T, bytes: u64) -> Piece {
        self.last += 1;
        self.known.insert(self.last, PieceState { own, bytes, at: None });
        Piece(self.last)
    }

    /// State of a piece.
    pub fn get(&self, piece: Piece) -> Result<PieceState<T>> {
        let Some(known) = self.known.get(&piece.0) else {
            fail!(Handle, "piece {} is not of this window, or was freed", piece.0);
        };
        Ok(*known)
    }

    /// Checks that a piece can be mapped at `at`.
    pub fn check_place(&self, piece: Piece, at: u64) -> Result<()> {
        let known = self.get(piece)?;
        let end = at.checked_add(known.bytes).filter(|end| *end <= self.bytes);
        let (Some(end), 0) = (end, at % self.granularity_bytes) else {
            let (bytes, granularity) = (known.bytes, self.granularity_bytes);
            fail!(
                Invalid,
                "{bytes} bytes at {at} do not fit a window of {} bytes with granularity {granularity}",
                self.bytes
            );
        };
        let others = self.placed.range(..end).rev().filter(|(from, _)| Some(**from) != known.at);
        match others.into_iter().next() {
            Some((from, to)) if *to > at => {
                fail!(Invalid, "offset {from} of the window is mapped already")
            }
            _ => Ok(()),
        }
    }

    /// Records where a piece is mapped; none = unmapped.
    pub fn set(&mut self, piece: Piece, own: T, at: Option<u64>) {
        let Some(known) = self.known.get_mut(&piece.0) else { return };
        if let Some(from) = known.at {
            self.placed.remove(&from);
        }
        (known.own, known.at) = (own, at);
        if let Some(from) = at {
            self.placed.insert(from, from + known.bytes);
        }
    }

    /// Removes a piece.
    pub fn remove(&mut self, piece: Piece) {
        if let Some(PieceState { at: Some(from), .. }) = self.known.remove(&piece.0) {
            self.placed.remove(&from);
        }
    }

    /// All pieces.
    pub fn all(&self) -> Vec<Piece> {
        self.known.keys().map(|number| Piece(*number)).collect()
    }

    /// Mapped bytes.
    pub fn placed_bytes(&self) -> u64 {
        self.placed.iter().map(|(from, to)| to - from).sum()
    }

    /// Whether a whole range is mapped.
    pub fn covers(&self, from: u64, to: u64) -> bool {
        let mut at = from;
        while at < to {
            match self.placed.range(..=at).next_back() {
                Some((_, end)) if *end > at => at = *end,
                _ => return false,
            }
        }
        true
    }
}
