//! The files of one directory, as the disk tier sees them. Two kinds: real ones
//! (`io/real`) and simulated ones (`crates/testkit`)
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
/// The one name that is not for files: who holds the directory has it locked.
pub const LOCK_NAME: &str = "LOCK";
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
pub enum Access {
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
    pub access: Access,
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
    pub fn one(file: FileId, access: Access, offset: u64, address: *mut u8, bytes: u64) -> Piece {
        let parts = [Part { address, bytes }, Part::NONE, Part::NONE, Part::NONE];
        Piece { file, access, offset, parts, result: Err(Error::from(Status::Again)) }
    }

    /// How long it is.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, part| sum.saturating_add(part.bytes))
    }

    /// Whether it can be carried out where everything is a multiple of `align`.
    pub fn check(&self, align: u64) -> Result<()> {
        let bytes = self.bytes();
        let end = self.offset.checked_add(bytes).filter(|end| i64::try_from(*end).is_ok());
        if bytes > MAX_PIECE_BYTES || end.is_none() {
            crate::fail!(Invalid, "{bytes} bytes at {} are out of range", self.offset);
        }
        let crooked = |x: u64| x % align.max(1) != 0;
        for part in self.parts.iter().filter(|part| part.bytes > 0) {
            if part.address.is_null() {
                crate::fail!(Invalid, "{} bytes of a piece are nowhere in memory", part.bytes);
            }
            if crooked(self.offset) || crooked(part.bytes) || crooked(part.address as u64) {
                let Part { address, bytes } = *part;
                crate::fail!(
                    Invalid,
                    "{bytes} bytes from {address:p} for offset {} are not multiples of {align}",
                    self.offset
                );
            }
        }
        Ok(())
    }
}

/// The files of one directory.
///
/// What errors mean: [`Status::NotFound`], there is no regular file of that name;
/// [`Status::State`], there is one already; [`Status::Closed`], the file is not
/// open any more, or nothing is; [`Status::Forked`], a parent process has it open;
/// [`Status::Budget`], the disk or a quota is full; [`Status::Busy`], somebody else
/// has the directory open; [`Status::Invalid`], the call is wrong; [`Status::Io`],
/// all else that went wrong outside.
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
    /// failure ([`Status::Io`], whatever the reason) nobody knows what is on the
    /// disk: it is not tried again.
    fn sync(&self, file: FileId) -> Result<()>;

    /// Carries out a batch; each piece says how it went. A write past the end makes
    /// the file longer. After an error nobody knows what is in the memory, or in the
    /// stretch of the file. In which order pieces of a batch run is not said.
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
    if name == LOCK_NAME {
        crate::fail!(Invalid, "{name} is the lock of the directory");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside() {
        for bad in ["", ".", "..", ".x", "a/b", "a\0", "a b", LOCK_NAME, &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_name("seg-00000001.kvt").is_ok());
    }

    #[test]
    fn a_piece_is_as_long_as_its_parts() {
        let mut piece = Piece::one(FileId(0), Access::Read, 0, std::ptr::null_mut(), 5);
        piece.parts[2].bytes = 7;
        assert_eq!((piece.bytes(), piece.result.is_err()), (12, true));
        piece.parts[1].bytes = u64::MAX;
        assert_eq!(piece.bytes(), u64::MAX);
    }

    #[test]
    fn a_piece_is_checked() {
        let at = |address: usize, offset, bytes| {
            Piece::one(FileId(0), Access::Read, offset, address as *mut u8, bytes)
        };
        let fine = |piece: Piece, align| piece.check(align).is_ok();
        assert!(fine(at(4096, 0, 512), 512) && fine(at(4097, 1, 1), 1) && fine(at(0, 3, 0), 512));
        assert!(!fine(at(4097, 0, 512), 512) && !fine(at(4096, 1, 512), 512));
        assert!(!fine(at(4096, 0, 511), 512) && !fine(at(0, 0, 512), 512));
        assert!(!fine(at(4096, u64::MAX, 512), 1) && !fine(at(4096, i64::MAX as u64, 1), 1));
        assert!(fine(at(4096, 0, MAX_PIECE_BYTES), 1));
        assert!(!fine(at(4096, 0, MAX_PIECE_BYTES + 1), 1));
    }
}
