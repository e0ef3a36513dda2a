//! Addresses of a device that stay, and memory that is put behind parts of them: whoever has
//! pointers into a window keeps them while the memory behind them comes and goes.

use std::collections::BTreeMap;

use crate::base::status::Result;
use crate::fail;

/// Memory of a window, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece(pub u64);

/// A range of a device's addresses, of which only some have memory. What was not given back goes
/// with it.
pub trait Window: Send + Sync {
    /// Where it starts.
    fn address(&self) -> u64;

    /// How long it is.
    fn bytes(&self) -> u64;

    /// What places and lengths are multiples of.
    fn granularity_bytes(&self) -> u64;

    /// Memory of the device, behind no addresses yet. `NoMem` when there is not so
    /// much.
    fn create(&self, bytes: u64) -> Result<Piece>;

    /// Puts a piece behind the addresses from `at` on, wherever it was before; nothing is to be
    /// done where it is there. What is in it is not said. Where this fails it is behind no
    /// addresses, or where it was.
    ///
    /// # Safety
    /// Nobody uses the addresses where it is, and no work under way does.
    unsafe fn put(&self, piece: Piece, at: u64) -> Result<()>;

    /// Takes a piece from its addresses, if it has any.
    ///
    /// # Safety
    /// As for [`Window::put`].
    unsafe fn take(&self, piece: Piece) -> Result<()>;

    /// Gives a piece back. Where this fails it goes with the window.
    ///
    /// # Safety
    /// As for [`Window::put`].
    unsafe fn destroy(&self, piece: Piece) -> Result<()>;
}

/// A piece, and what its device knows of it.
#[derive(Clone, Copy)]
pub struct PieceState<T> {
    /// What its device knows.
    pub own: T,
    /// How long it is.
    pub bytes: u64,
    /// Behind which addresses it is.
    pub at: Option<u64>,
}

/// The pieces of a window, and where they are.
pub struct Pieces<T> {
    bytes: u64,
    granularity_bytes: u64,
    last: u64,
    known: BTreeMap<u64, PieceState<T>>,
    /// Of those that have addresses: from where to where.
    placed: BTreeMap<u64, u64>,
}

impl<T: Copy> Pieces<T> {
    /// None, of a window of so many bytes.
    pub fn new(bytes: u64, granularity_bytes: u64) -> Pieces<T> {
        let (known, placed) = (BTreeMap::new(), BTreeMap::new());
        Pieces { bytes, granularity_bytes, last: 0, known, placed }
    }

    /// Whether a piece may be so long.
    pub fn check_length(&self, bytes: u64) -> Result<()> {
        if bytes == 0 || bytes % self.granularity_bytes != 0 {
            fail!(Invalid, "{bytes} bytes for a window, by {}", self.granularity_bytes);
        }
        Ok(())
    }

    /// One more.
    pub fn add(&mut self, own: T, bytes: u64) -> Piece {
        self.last += 1;
        self.known.insert(self.last, PieceState { own, bytes, at: None });
        Piece(self.last)
    }

    /// What is known of one.
    pub fn get(&self, piece: Piece) -> Result<PieceState<T>> {
        let Some(known) = self.known.get(&piece.0) else {
            fail!(Handle, "piece {} is none of this window, or was given back", piece.0);
        };
        Ok(*known)
    }

    /// Fails where a piece cannot be put, or another is.
    pub fn check_place(&self, piece: Piece, at: u64) -> Result<()> {
        let known = self.get(piece)?;
        let end = at.checked_add(known.bytes).filter(|end| *end <= self.bytes);
        let (Some(end), 0) = (end, at % self.granularity_bytes) else {
            let (bytes, granularity) = (known.bytes, self.granularity_bytes);
            fail!(Invalid, "{bytes} bytes at {at} of a window of {}, by {granularity}", self.bytes);
        };
        let others = self.placed.range(..end).rev().filter(|(from, _)| Some(**from) != known.at);
        match others.into_iter().next() {
            Some((from, to)) if *to > at => {
                fail!(Invalid, "there is memory at {from} of a window already")
            }
            _ => Ok(()),
        }
    }

    /// A piece is behind these addresses from now on, or behind none.
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

    /// One less.
    pub fn remove(&mut self, piece: Piece) {
        if let Some(PieceState { at: Some(from), .. }) = self.known.remove(&piece.0) {
            self.placed.remove(&from);
        }
    }

    /// All that there are.
    pub fn all(&self) -> Vec<Piece> {
        self.known.keys().map(|number| Piece(*number)).collect()
    }

    /// Bytes of addresses that have memory.
    pub fn placed_bytes(&self) -> u64 {
        self.placed.iter().map(|(from, to)| to - from).sum()
    }

    /// Whether there is memory behind a whole range.
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
