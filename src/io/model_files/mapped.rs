//! Memory-mapped reads, for comparison: every first touch of a page faults, and the kernel chooses
//! the readahead. Truncation of the file by another process raises SIGBUS, so this is used on
//! explicit request only.

use std::os::fd::AsRawFd;

use crate::base::fork;
use crate::base::status::{Error, Result, Status};
use crate::io::files::Piece;
use crate::io::model_files::file::ModelFile;
use crate::io::model_files::inside;

/// The mapped pages of a file.
pub struct Map {
    start: *mut libc::c_void,
    bytes: usize,
}

// SAFETY: pages that nothing writes through this.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps a whole file.
    pub fn new(opened: &ModelFile) -> Result<Map> {
        let Ok(bytes) = usize::try_from(opened.stamp.bytes) else {
            return Err(Error::new(Status::NoMem, "the file exceeds the address space"));
        };
        if bytes == 0 {
            return Ok(Map { start: std::ptr::null_mut(), bytes });
        }
        let (fd, flags) = (opened.file.as_raw_fd(), libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, flags, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::os("mapping a file").within(opened.name()));
        }
        // A child does not need it, and copying its page tables would cost time. SAFETY: the
        // mapping created above.
        unsafe { libc::madvise(start, bytes, libc::MADV_DONTFORK) };
        Ok(Map { start, bytes })
    }

    /// Copies the bytes of a piece, up to the end of the file.
    ///
    /// # Safety
    /// As for [`crate::io::model_files::ModelFiles::transfer`].
    pub unsafe fn read(&self, piece: &Piece) {
        for (at, part) in inside(piece, self.bytes as u64) {
            if part.bytes > 0 {
                // SAFETY: `inside` ends where the mapping does; the caller guarantees the memory.
                unsafe {
                    let from = self.start.byte_add(at as usize).cast::<u8>();
                    std::ptr::copy_nonoverlapping(from, part.address, part.bytes as usize);
                }
            }
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // A forked child does not inherit the mapping: other memory may be there now.
        if self.bytes > 0 && fork::check().is_ok() {
            // SAFETY: exactly what was mapped.
            unsafe { libc::munmap(self.start, self.bytes) };
        }
    }
}
