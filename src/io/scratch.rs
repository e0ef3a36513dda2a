//! Shared tools of file unit tests: temporary directories, memory, whole transfers.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::Result;
use crate::io::files::{Access, FileId, Files, Piece};

/// A directory that is removed after its test.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvtier-io-{}-{n}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Page-aligned memory.
pub fn memory(bytes: u64) -> Buffer {
    Buffer::map(&AllocationRequest { bytes, ..AllocationRequest::default() }, None).expect("memory")
}

#[allow(clippy::mut_from_ref)] // of memory that a buffer only names
pub fn bytes_of(buffer: &Buffer) -> &mut [u8] {
    // SAFETY: the buffer belongs to one test, and nothing is in flight.
    unsafe { std::slice::from_raw_parts_mut(buffer.address(), buffer.bytes() as usize) }
}

fn transfer(files: &dyn Files, piece: Piece) -> Result<()> {
    let mut pieces = [piece];
    // SAFETY: the memory is a test's own.
    unsafe { files.transfer(&mut pieces) };
    let [piece] = pieces;
    piece.result
}

pub fn whole(file: FileId, access: Access, offset: u64, buffer: &Buffer) -> Piece {
    Piece::one(file, access, offset, buffer.address(), buffer.bytes())
}

pub fn write(files: &dyn Files, file: FileId, offset: u64, fill: u8, bytes: u64) -> Result<()> {
    let buffer = memory(bytes);
    bytes_of(&buffer).fill(fill);
    transfer(files, whole(file, Access::Write, offset, &buffer))
}

pub fn read(files: &dyn Files, file: FileId, offset: u64, bytes: u64) -> Result<Vec<u8>> {
    let buffer = memory(bytes);
    transfer(files, whole(file, Access::Read, offset, &buffer))?;
    Ok(bytes_of(&buffer).to_vec())
}
