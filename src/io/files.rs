//! Files of one directory, as the disk tier uses them. Implementations: real files (`io/real`), and
//! simulated files (`crates/testkit`) with torn writes, lost syncs and crashes.
//!
//! Calls block, and may be made from any thread. A batch of pieces is executed concurrently by
//! io_uring, or sequentially without it. Each piece has its own result.

use crate::base::status::{Error, Result, Status};

/// An open file of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId(pub u32);

/// Limit: open files.
pub const MAX_FILES: usize = 1 << 16;
/// Limit: bytes of a name. Names consist of letters, digits, `-`, `_` and `.`, and do not begin
/// with a dot.
pub const MAX_NAME_BYTES: usize = 64;
/// Name of the lock file, which is not available for other files.
pub const LOCK_NAME: &str = "LOCK";
/// Limit: memory ranges of a piece.
pub const MAX_PARTS: usize = 4;
/// Limit: bytes of a piece.
pub const MAX_PIECE_BYTES: u64 = 1 << 30;

/// Entry of a directory listing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Name.
    pub name: String,
    /// Length.
    pub bytes: u64,
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

/// A memory range of a piece.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Start, aligned to [`Files::align_bytes`].
    pub address: *mut u8,
    /// Length.
    pub bytes: u64,
}

/// A transfer between a range of a file and up to [`MAX_PARTS`] memory ranges, in order.
pub struct Piece {
    /// File.
    pub file: FileId,
    /// Direction.
    pub access: Access,
    /// Offset in the file.
    pub offset: u64,
    /// Memory ranges; ranges of length 0 are skipped.
    pub parts: [Part; MAX_PARTS],
    /// Result. A read past the end, and any transfer that ends early for good, is an error
    /// ([`Status::Io`]), never a partial success.
    pub result: Result<()>,
}

// SAFETY: the memory is named, not owned. The code that builds a piece guarantees that it stays
// valid, and that nothing else accesses it, until `transfer` returns.
unsafe impl Send for Piece {}

impl Part {
    /// An empty range.
    pub const NONE: Part = Part { address: std::ptr::null_mut(), bytes: 0 };
}

impl Piece {
    /// A transfer of one range.
    pub fn one(file: FileId, access: Access, offset: u64, address: *mut u8, bytes: u64) -> Piece {
        let parts = [Part { address, bytes }, Part::NONE, Part::NONE, Part::NONE];
        Piece { file, access, offset, parts, result: Err(Error::from(Status::Again)) }
    }

    /// Length.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, part| sum.saturating_add(part.bytes))
    }

    /// The same transfer, not executed yet.
    pub fn anew(&self) -> Piece {
        let Piece { file, access, offset, parts, .. } = *self;
        Piece { file, access, offset, parts, result: Err(Error::from(Status::Again)) }
    }

    /// Marks a piece that was checked as not transferred yet, or stores why it is invalid.
    pub fn begin(&mut self, checked: Result<()>) {
        self.result = checked.and(Err(Status::Again.into()));
    }

    /// Whether it is still to be transferred.
    pub fn is_open(&self) -> bool {
        matches!(&self.result, Err(error) if error.status() == Status::Again)
    }

    /// Checks ranges and alignment.
    pub fn check(&self, align: u64) -> Result<()> {
        let bytes = self.bytes();
        let end = self.offset.checked_add(bytes).filter(|end| i64::try_from(*end).is_ok());
        if bytes > MAX_PIECE_BYTES || end.is_none() {
            crate::fail!(
                Invalid,
                "{bytes} bytes at {} are out of range: at most {MAX_PIECE_BYTES} below 2^63",
                self.offset
            );
        }
        let crooked = |x: u64| x % align.max(1) != 0;
        for part in self.parts.iter().filter(|part| part.bytes > 0) {
            if part.address.is_null() {
                crate::fail!(Invalid, "{} bytes of a piece have a null address", part.bytes);
            }
            if crooked(self.offset) || crooked(part.bytes) || crooked(part.address as u64) {
                let Part { address, bytes } = *part;
                crate::fail!(
                    Invalid,
                    "{bytes} bytes from {address:p} for offset {}: all must be multiples of {align}",
                    self.offset
                );
            }
        }
        Ok(())
    }
}

/// Limit: pieces that [`Files::stream`] collects where it cannot transfer while it collects.
const MAX_COLLECTED: usize = 64;

/// Files of one directory.
///
/// Errors: [`Status::NotFound`], no regular file of that name; [`Status::State`], the file exists;
/// [`Status::Closed`], the file or the directory is closed; [`Status::Forked`], a parent process
/// opened it; [`Status::Budget`], disk or quota full; [`Status::Busy`], another user has the
/// directory open; [`Status::Invalid`], invalid call; [`Status::Io`], any other failure.
pub trait Files: Send + Sync {
    /// Alignment of offsets, lengths and addresses; 1 with the page cache.
    fn align_bytes(&self) -> u64;

    /// How transfers are executed, for people: `io_uring, direct`.
    fn engine(&self) -> &str;

    /// Why a better engine is not used, if it is not.
    fn fallback(&self) -> Option<&str>;

    /// Lists the files, sorted by name.
    fn list(&self) -> Result<Vec<Entry>>;

    /// Creates a file that must not exist, and allocates `bytes` bytes if the file system can.
    fn create(&self, name: &str, bytes: u64) -> Result<FileId>;

    /// Opens an existing file.
    fn open(&self, name: &str) -> Result<FileId>;

    /// Length of a file.
    fn len(&self, file: FileId) -> Result<u64>;

    /// Closes a file. No transfer of it may be in flight.
    fn close(&self, file: FileId);

    /// Renames a file and atomically replaces an existing one: at any time, also after a crash, the
    /// name refers to one of the two.
    fn rename(&self, from: &str, to: &str) -> Result<()>;

    /// Removes a file.
    fn remove(&self, name: &str) -> Result<()>;

    /// Makes earlier creates, renames and removes durable.
    fn sync_names(&self) -> Result<()>;

    /// Makes the file's completed writes durable. After a failure ([`Status::Io`] for any reason)
    /// the content of the disk is unknown, and later syncs fail.
    fn sync(&self, file: FileId) -> Result<()>;

    /// Executes a batch; each piece stores its result. A write past the end extends the file. After
    /// an error the content of the memory, or of the file range, is undefined. The order of pieces
    /// is undefined.
    ///
    /// # Safety
    /// The memory of every piece is valid for its direction, and nothing else accesses it, until
    /// this returns.
    unsafe fn transfer(&self, pieces: &mut [Piece]);

    /// Executes the pieces of a source, and keeps many in flight: it requests the next piece as soon
    /// as there is room for it. When this returns every piece has ended. By default in batches.
    ///
    /// # Safety
    /// As [`Files::transfer`], for the memory of each piece from [`Source::next`] to
    /// [`Source::ended`].
    unsafe fn stream(&self, source: &mut dyn Source) {
        loop {
            let (mut keys, mut pieces) = (Vec::new(), Vec::new());
            while keys.len() < MAX_COLLECTED
                && let Next::Piece(key, piece) = source.next()
            {
                keys.push(key);
                pieces.push(piece);
            }
            if keys.is_empty() {
                return;
            }
            // SAFETY: the caller's promise.
            unsafe { self.transfer(&mut pieces) };
            for (key, piece) in keys.into_iter().zip(pieces) {
                source.ended(key, piece.result);
            }
        }
    }

    /// Free bytes of the file system.
    fn free_bytes(&self) -> Result<u64>;
}

/// The next piece of a [`Source`].
pub enum Next {
    /// A piece, and the key by which the source knows it.
    Piece(usize, Piece),
    /// There is none until a piece in flight has ended.
    Wait,
    /// There are no more.
    End,
}

/// Supplies the pieces of a [`Files::stream`], and takes their results. It prepares pieces, and
/// uses the results of others, while the device transfers.
pub trait Source {
    /// The next piece. [`Next::Wait`] only while a piece is in flight.
    fn next(&mut self) -> Next;

    /// A piece has ended: nothing uses its memory any more.
    fn ended(&mut self, key: usize, result: Result<()>);
}

/// Validates a name; names that lead out of the directory are rejected.
pub fn check_name(name: &str) -> Result<()> {
    let fine = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.starts_with('.') {
        crate::fail!(
            Invalid,
            "{name:?}: a name has 1 to {MAX_NAME_BYTES} bytes and does not begin with a dot"
        );
    }
    if !name.bytes().all(fine) {
        crate::fail!(Invalid, "{name:?}: a name consists of letters, digits, '-', '_' and '.'");
    }
    if name == LOCK_NAME {
        crate::fail!(Invalid, "{name} is reserved for the lock of the directory");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_the_directory() {
        for bad in ["", ".", "..", ".x", "a/b", "a\0", "a b", LOCK_NAME, &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_name("seg-00000001.kvt").is_ok());
    }

    #[test]
    fn piece_length_is_the_sum_of_its_parts() {
        let mut piece = Piece::one(FileId(0), Access::Read, 0, std::ptr::null_mut(), 5);
        piece.parts[2].bytes = 7;
        assert_eq!((piece.bytes(), piece.result.is_err()), (12, true));
        piece.parts[1].bytes = u64::MAX;
        assert_eq!(piece.bytes(), u64::MAX);
    }

    #[test]
    fn misaligned_and_oversized_pieces_are_rejected() {
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
