//! Identity of a model file, independent of its path: cached data about its bytes is tied to it.

use crate::base::checksum::xxh3;
use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::Result;
use crate::io::files::{Access, FileId, Piece};
use crate::io::model_files::{ModelFiles, READ_UNIT_BYTES};

/// Bytes of each end that count: the headers of models differ in the first.
const END_BYTES: u64 = 16 * READ_UNIT_BYTES;

/// Identity of a file under any path on any machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Length.
    pub bytes: u64,
    /// Time of the last write.
    pub modified_ns: i128,
    /// Checksum (XXH3-64) of its first and last 64 KiB.
    pub ends: u64,
}

/// Reads the ends of every file.
pub fn identities(files: &dyn ModelFiles) -> Result<Vec<Identity>> {
    let stock = Buffer::map(
        &AllocationRequest { bytes: 2 * END_BYTES, ..AllocationRequest::default() },
        None,
    )?;
    (0..files.count()).map(|file| identity(files, file, &stock)).collect()
}

fn identity(files: &dyn ModelFiles, file: u32, stock: &Buffer) -> Result<Identity> {
    let stamp = files.stamp(file);
    let rounded_bytes = stamp.bytes.next_multiple_of(READ_UNIT_BYTES);
    let head = rounded_bytes.min(END_BYTES);
    let tail = (rounded_bytes - head).min(END_BYTES);
    let id = FileId(file);
    let mut pieces = [
        Piece::one(id, Access::Read, 0, stock.address(), head),
        Piece::one(
            id,
            Access::Read,
            rounded_bytes - tail,
            stock.address().wrapping_add(head as usize),
            tail,
        ),
    ];
    // SAFETY: two ranges of the buffer, which belongs to this call and is as long as both.
    unsafe { files.transfer(&mut pieces) };
    for piece in pieces {
        piece.result?;
    }
    // SAFETY: read just now, with zeros past the end; nothing writes it any more.
    let ends = unsafe { std::slice::from_raw_parts(stock.address(), (head + tail) as usize) };
    Ok(Identity { bytes: stamp.bytes, modified_ns: stamp.modified_ns, ends: xxh3(ends) })
}
