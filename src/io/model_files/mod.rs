//! The files of a model: opened by path, read in large pieces, and expected not to
//! change. Two kinds: real ones ([`real`]) and simulated ones ([`simulated`]), which
//! have their bytes from a formula and can be slow, broken, cut short and replaced.

use crate::base::status::Result;
use crate::fail;
use crate::io::files::{Access, FileId, MAX_PARTS, Part, Piece};

pub mod file;
pub mod identity;
mod mapped;
pub mod measure;
pub mod real;

/// Most files of a model.
pub const MAX_MODEL_FILES: usize = 4096;
/// How far a piece may reach past the end of its file, less one: files end where they
/// like, direct reads do not.
pub const READ_UNIT_BYTES: u64 = 4096;

/// What tells that a file is still the one that was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// Its length.
    pub bytes: u64,
    /// The file system it is on.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// When its bytes were written last, since 1970. Anybody may set this.
    pub modified_ns: i128,
    /// When anything about it changed last: its bytes, mode, owner, names. Nobody sets it.
    pub changed_ns: i128,
}

/// A file that is open for reads past the page cache, for those who read it by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// What the kernel calls it in this process.
    pub number: i32,
    /// What the kernel calls the kind of its file system.
    pub file_system: u64,
}

/// The files of a model, numbered from 0.
pub trait ModelFiles: Send + Sync {
    /// What offsets, lengths and addresses must be a multiple of: 1 where the page cache
    /// is used, at most [`READ_UNIT_BYTES`].
    fn align_bytes(&self) -> u64;

    /// How they are read, for humans: `io_uring, direct`.
    fn engine(&self) -> &str;

    /// Why a better engine is not used, if one is not.
    fn fallback(&self) -> Option<&str>;

    /// How many there are.
    fn count(&self) -> u32;

    /// How long a file was when it was opened; 0 if there is none of that number.
    fn bytes(&self, file: u32) -> u64 {
        self.stamp(file).bytes
    }

    /// What a file was when it was opened; all zero if there is none of that number.
    fn stamp(&self, file: u32) -> Stamp;

    /// Whether a file is still what was opened. [`crate::base::status::Status::Corrupt`]:
    /// it was cut, made longer or written to, so what was read may be anything.
    /// [`crate::base::status::Status::State`]: another file has its name, or none has, or
    /// its attributes changed; what was read is sound. A change within a tick of the file
    /// system's clock (some ms) after it was opened does not show.
    fn check(&self, file: u32) -> Result<()>;

    /// The descriptor of a file, which is open as long as this is.
    /// [`crate::base::status::Status::Unavailable`]: it goes through the page cache, or there
    /// is none.
    fn descriptor(&self, file: u32) -> Result<Descriptor> {
        fail!(Unavailable, "file {file} is none of the kernel's")
    }

    /// Carries out a batch of reads; each piece says how it went. A piece may reach past
    /// the end of its file by less than [`READ_UNIT_BYTES`]: memory for what is not there is
    /// zeroed. All else that is short is an error
    /// ([`crate::base::status::Status::Io`]): then nobody knows what is in the memory.
    ///
    /// # Safety
    /// The memory of every piece is valid for writes, and nobody else touches it, until
    /// this returns.
    unsafe fn transfer(&self, pieces: &mut [Piece]);
}

/// Checks what all implementations refuse.
pub fn check_piece(files: &dyn ModelFiles, piece: &Piece) -> Result<()> {
    piece.check(files.align_bytes())?;
    let FileId(file) = piece.file;
    if piece.access != Access::Read {
        fail!(Invalid, "the files of a model are not written to");
    }
    if file >= files.count() {
        fail!(Invalid, "file {file} of {}", files.count());
    }
    let (bytes, end) = (files.bytes(file), piece.offset.saturating_add(piece.bytes()));
    if end >= bytes.saturating_add(READ_UNIT_BYTES) {
        fail!(
            Io,
            "a read of {} bytes at {} of file {file}, which has {bytes}",
            piece.bytes(),
            piece.offset
        );
    }
    Ok(())
}

/// Zeroes what of a piece's memory is for bytes past the end of its file.
///
/// # Safety
/// As for [`ModelFiles::transfer`].
pub unsafe fn zero_past(piece: &Piece, file_bytes: u64) {
    let mut at = piece.offset;
    for part in &piece.parts {
        let here = file_bytes.saturating_sub(at).min(part.bytes);
        if here < part.bytes {
            // SAFETY: the rest of the part, whose memory the caller promised.
            unsafe {
                part.address.add(here as usize).write_bytes(0, (part.bytes - here) as usize);
            }
        }
        at = at.saturating_add(part.bytes);
    }
}

/// The parts of a piece, each with where in the file its bytes are, as far as those are
/// before the end.
pub fn inside(piece: &Piece, file_bytes: u64) -> [(u64, Part); MAX_PARTS] {
    let mut at = piece.offset;
    piece.parts.map(|part| {
        let from = at;
        at = at.saturating_add(part.bytes);
        (from, Part { bytes: part.bytes.min(file_bytes.saturating_sub(from)), ..part })
    })
}
