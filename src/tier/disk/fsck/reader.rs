//! Reads files through one buffer that grows.

use crate::base::memory::Buffer;
use crate::base::status::{Error, Result, Status};
use crate::io::files::{Access, FileId, Files, Piece};
use crate::tier::disk::staging::Staging;

/// Reads ranges of files, one at a time.
pub(super) struct FileReader<'a> {
    files: &'a dyn Files,
    staging: Staging,
    buffer: Option<Buffer>,
}

impl<'a> FileReader<'a> {
    pub fn new(files: &'a dyn Files) -> FileReader<'a> {
        FileReader { files, staging: Staging::new(None), buffer: None }
    }

    pub fn open(&self, name: &str) -> Result<FileId> {
        self.files.open(name)
    }

    pub fn close(&self, file: FileId) {
        self.files.close(file);
    }

    /// Reads whole blocks.
    pub fn read(&mut self, file: FileId, offset: u64, bytes: u64) -> Result<&[u8]> {
        if self.buffer.as_ref().is_none_or(|buffer| buffer.bytes() < bytes) {
            // The old buffer is freed first.
            self.buffer = None;
            self.buffer = Some(self.staging.map(bytes)?);
        }
        let address = self.buffer.as_ref().and_then(|buffer| buffer.range(0, bytes));
        let address = address.ok_or_else(|| Error::from(Status::NoMem))?;
        let mut pieces = [Piece::one(file, Access::Read, offset, address, bytes)];
        // SAFETY: this value's own buffer, of at least that length.
        unsafe { self.files.transfer(&mut pieces) };
        let [piece] = pieces;
        piece.result?;
        // SAFETY: as above; no one writes it while it is borrowed.
        Ok(unsafe { std::slice::from_raw_parts(address, bytes as usize) })
    }
}
