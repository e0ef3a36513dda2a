//! Read-only model files: opened by path, read in large pieces, and expected not to change.
//! Implementations: real files ([`real`]), and simulated ones (`crates/testkit`) whose bytes follow
//! from a formula, and which can be slow, broken, truncated and replaced.

use crate::base::status::Result;
use crate::fail;
use crate::io::files::{Access, FileId, MAX_PARTS, Part, Piece};

pub mod file;
pub mod identity;
mod mapped;
pub mod measure;
pub mod real;

/// Limit: files of a model.
pub const MAX_MODEL_FILES: usize = 4096;
/// Unit of reads. A piece may reach past the end of its file by less than this: lengths of files
/// are arbitrary, direct reads are aligned.
pub const READ_UNIT_BYTES: u64 = 4096;

/// Attributes that show whether a file has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// Length.
    pub bytes: u64,
    /// Device of its file system.
    pub device: u64,
    /// Inode.
    pub inode: u64,
    /// Time of the last write since 1970. Users can set it.
    pub modified_ns: i128,
    /// Time of the last change of bytes, mode, owner or names. Users cannot set it.
    pub changed_ns: i128,
}

/// A file that is open for direct reads, for users that read it by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// File descriptor in this process.
    pub number: i32,
    /// Kernel's number of its file system.
    pub file_system: u64,
}

/// Files of a model, numbered from 0.
pub trait ModelFiles: Send + Sync {
    /// Alignment of offsets, lengths and addresses: 1 with the page cache, at most
    /// [`READ_UNIT_BYTES`].
    fn align_bytes(&self) -> u64;

    /// How files are read, for people: `io_uring, direct`.
    fn engine(&self) -> &str;

    /// Why a better engine is not used, if it is not.
    fn fallback(&self) -> Option<&str>;

    /// Number of files.
    fn count(&self) -> u32;

    /// Length of a file when it was opened; 0 if the number is invalid.
    fn bytes(&self, file: u32) -> u64 {
        self.stamp(file).bytes
    }

    /// Attributes of a file when it was opened; all zero if the number is invalid.
    fn stamp(&self, file: u32) -> Stamp;

    /// Whether a file is unchanged. [`crate::base::status::Status::Corrupt`]: it was truncated,
    /// extended or written to, so the bytes read are undefined.
    /// [`crate::base::status::Status::State`]: its name refers to another file or to none, or its
    /// attributes changed; the bytes read are sound. A change within a tick of the file system's
    /// clock (some ms) after opening is not noticed.
    fn check(&self, file: u32) -> Result<()>;

    /// Descriptor of a file, open as long as this is. [`crate::base::status::Status::Unavailable`]:
    /// the file is read through the page cache, or has no descriptor.
    fn descriptor(&self, file: u32) -> Result<Descriptor> {
        fail!(Unavailable, "file {file} has no descriptor")
    }

    /// Executes a batch of reads; each piece stores its result. A piece may reach past the end of
    /// its file by less than [`READ_UNIT_BYTES`]; memory past the end is zeroed. Any other short
    /// read is an error ([`crate::base::status::Status::Io`]), after which the content of the
    /// memory is undefined.
    ///
    /// # Safety
    /// The memory of every piece is valid for writes, and nothing else accesses it, until this
    /// returns.
    unsafe fn transfer(&self, pieces: &mut [Piece]);
}

/// Checks that all implementations share.
pub fn check_piece(files: &dyn ModelFiles, piece: &Piece) -> Result<()> {
    piece.check(files.align_bytes())?;
    let FileId(file) = piece.file;
    if piece.access != Access::Read {
        fail!(Invalid, "model files are read-only");
    }
    if file >= files.count() {
        fail!(Invalid, "file {file}: the model has {} files", files.count());
    }
    let (bytes, end) = (files.bytes(file), piece.offset.saturating_add(piece.bytes()));
    if end >= bytes.saturating_add(READ_UNIT_BYTES) {
        fail!(
            Io,
            "a read of {} bytes at {} exceeds the {bytes} bytes of file {file}",
            piece.bytes(),
            piece.offset
        );
    }
    Ok(())
}

/// Zeroes a piece's memory past the end of its file.
///
/// # Safety
/// As for [`ModelFiles::transfer`].
pub unsafe fn zero_past(piece: &Piece, file_bytes: u64) {
    let mut at = piece.offset;
    for part in &piece.parts {
        let available = file_bytes.saturating_sub(at).min(part.bytes);
        if available < part.bytes {
            // SAFETY: the rest of the part, whose memory the caller guarantees.
            unsafe {
                part.address
                    .add(available as usize)
                    .write_bytes(0, (part.bytes - available) as usize);
            }
        }
        at = at.saturating_add(part.bytes);
    }
}

/// The parts of a piece with their offsets in the file, clipped at its end.
pub fn inside(piece: &Piece, file_bytes: u64) -> [(u64, Part); MAX_PARTS] {
    let mut at = piece.offset;
    piece.parts.map(|part| {
        let from = at;
        at = at.saturating_add(part.bytes);
        (from, Part { bytes: part.bytes.min(file_bytes.saturating_sub(from)), ..part })
    })
}
