//! Which file it is, wherever it lies: what a note about its bytes is tied to.

use crate::base::checksum::xxh3;
use crate::base::memory::{Buffer, MemoryWish};
use crate::base::status::Result;
use crate::io::files::{Access, FileId, Piece};
use crate::io::model_files::{ModelFiles, READ_UNIT_BYTES};

/// How much of each end counts: headers of models differ in the first.
const END_BYTES: u64 = 16 * READ_UNIT_BYTES;

/// What a file is known by, under whatever path, on whatever machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Its length.
    pub bytes: u64,
    /// When it was written last.
    pub modified_ns: i128,
    /// The checksum (XXH3-64) of its first and last 64 KiB.
    pub ends: u64,
}

/// Looks at every file; reads little.
pub fn identities(files: &dyn ModelFiles) -> Result<Vec<Identity>> {
    let stock = Buffer::map(&MemoryWish { bytes: 2 * END_BYTES, ..MemoryWish::default() }, None)?;
    (0..files.count()).map(|file| identity(files, file, &stock)).collect()
}

fn identity(files: &dyn ModelFiles, file: u32, stock: &Buffer) -> Result<Identity> {
    let stamp = files.stamp(file);
    let grains = stamp.bytes.next_multiple_of(READ_UNIT_BYTES);
    let head = grains.min(END_BYTES);
    let tail = (grains - head).min(END_BYTES);
    let id = FileId(file);
    let mut pieces = [
        Piece::one(id, Access::Read, 0, stock.address(), head),
        Piece::one(
            id,
            Access::Read,
            grains - tail,
            stock.address().wrapping_add(head as usize),
            tail,
        ),
    ];
    // SAFETY: two ranges of the stock, which is this call's alone and as long as both.
    unsafe { files.transfer(&mut pieces) };
    for piece in pieces {
        piece.result?;
    }
    // SAFETY: what was read just now, with zeros behind the end; nobody writes it any more.
    let both = unsafe { std::slice::from_raw_parts(stock.address(), (head + tail) as usize) };
    Ok(Identity { bytes: stamp.bytes, modified_ns: stamp.modified_ns, ends: xxh3(both) })
}
