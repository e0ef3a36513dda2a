//! The files of one directory, as the disk tier sees them. Two kinds: real ones
//! (`io/real`) and simulated ones (`io/simulated`)
//! with torn writes, lost syncs and crashes.
//!
//! Calls block, and may come from any thread. A batch of pieces is carried out as
//! the engine can: all at once by io_uring, one after the other without. Each
//! piece has a result of its own.

use crate::base::status::{Error, Result, Status};

/// An open file of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId(pub u32);

/// Most files that are open at once.
pub const MAX_FILES: usize = 1 << 16;
/// Longest name: letters, digits, `-`, `_` and `.`, not first a dot.
pub const MAX_NAME_BYTES: usize = 64;
/// Most ranges of memory in one piece.
pub const MAX_PARTS: usize = 4;
/// Most bytes of one piece.
pub const MAX_PIECE_BYTES: u64 = 1 << 30;

/// What a directory lists.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

/// A range of memory that a piece reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its start; aligned as [`Files::align_bytes`] says.
    pub address: *mut u8,
    /// Its length.
    pub bytes: u64,
}

/// One transfer between a stretch of a file and up to [`MAX_PARTS`] ranges of
/// memory, one after the other.
pub struct Piece {
    /// Which file.
    pub file: FileId,
    /// Which way.
    pub way: Way,
    /// Where in the file.
    pub offset: u64,
    /// The ranges; those of length 0 do not count.
    pub parts: [Part; MAX_PARTS],
    /// How it went. A read past the end, and any transfer that is cut short
    /// for good, is an error ([`Status::Io`]), never a smaller success.
    pub result: Result<()>,
}

// SAFETY: the memory is named, not owned: whoever builds a piece promises that
// it stays valid, and is not touched by others, until `transfer` returns.
unsafe impl Send for Piece {}

impl Part {
    /// No memory.
    pub const NONE: Part = Part { address: std::ptr::null_mut(), bytes: 0 };
}

impl Piece {
    /// A transfer of one range.
    pub fn one(file: FileId, way: Way, offset: u64, address: *mut u8, bytes: u64) -> Piece {
        let parts = [Part { address, bytes }, Part::NONE, Part::NONE, Part::NONE];
        Piece { file, way, offset, parts, result: Err(Error::from(Status::Again)) }
    }

    /// How long it is.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

/// The files of one directory.
pub trait Files: Send + Sync {
    /// What offsets, lengths and addresses must be a multiple of; 1 where the
    /// page cache is used.
    fn align_bytes(&self) -> u64;

    /// How transfers are made, for humans: `io_uring, direct`.
    fn engine(&self) -> &str;

    /// Why a better engine is not used, if one is not.
    fn fallback(&self) -> Option<&str>;

    /// What is there, by name.
    fn list(&self) -> Result<Vec<Entry>>;

    /// Makes a file that must not exist, of `bytes` bytes that are allocated as
    /// far as the file system can.
    fn create(&self, name: &str, bytes: u64) -> Result<FileId>;

    /// Opens a file that exists.
    fn open(&self, name: &str) -> Result<FileId>;

    /// How long a file is.
    fn len(&self, file: FileId) -> Result<u64>;

    /// Closes a file. No transfer of it may be under way.
    fn close(&self, file: FileId);

    /// Gives a file another name, in place of what had that name: at every moment,
    /// also after a crash, the name leads to one of the two.
    fn rename(&self, from: &str, to: &str) -> Result<()>;

    /// Removes a file.
    fn remove(&self, name: &str) -> Result<()>;

    /// Makes names durable: what was created, renamed and removed before.
    fn sync_names(&self) -> Result<()>;

    /// Makes a file's bytes durable: all writes that returned before. After a
    /// failure nobody knows what is on the disk: it is not tried again.
    fn sync(&self, file: FileId) -> Result<()>;

    /// Carries out a batch; each piece says how it went.
    ///
    /// # Safety
    /// The memory of every piece is valid for its way, and nobody else touches it,
    /// until this returns.
    unsafe fn transfer(&self, pieces: &mut [Piece]);

    /// What the file system has left.
    fn free_bytes(&self) -> Result<u64>;
}

/// Checks a name: nothing that leads out of the directory gets through.
pub fn check_name(name: &str) -> Result<()> {
    let fine = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.starts_with('.') {
        crate::fail!(
            Invalid,
            "{name:?} is no name of 1 to {MAX_NAME_BYTES} bytes without a dot first"
        );
    }
    if !name.bytes().all(fine) {
        crate::fail!(Invalid, "{name:?} has more than letters, digits, '-', '_' and '.'");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside() {
        for bad in ["", ".", "..", ".x", "a/b", "a\0", "a b", &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_name("seg-00000001.kvt").is_ok());
    }

    #[test]
    fn a_piece_is_as_long_as_its_parts() {
        let mut piece = Piece::one(FileId(0), Way::Read, 0, std::ptr::null_mut(), 5);
        piece.parts[2].bytes = 7;
        assert_eq!((piece.bytes(), piece.result.is_err()), (12, true));
    }
}
