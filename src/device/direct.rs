//! Direct reads from files into device memory (GPUDirect Storage). No bytes pass through host
//! memory.

use crate::base::status::Result;

/// Alignment of memory, offsets and lengths.
pub const DIRECT_ALIGN_BYTES: u64 = 4096;

/// A file of one device that is open for direct reads. Numbers are not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectFile(pub(crate) u64);

/// Direct reads from files into a device's memory. Any thread may call; calls return when they are
/// done.
pub trait Direct {
    /// Description for people.
    fn describe(&self) -> String;

    /// Adds a file, by its descriptor and the kernel's number of its file system (`statfs.f_type`).
    /// [`crate::base::status::Status::Unavailable`] says why its bytes would, or might, pass
    /// through host memory.
    ///
    /// # Safety
    /// The descriptor is open for reads past the page cache until [`Direct::remove_file`] or the
    /// end of the device.
    unsafe fn add_file(&self, descriptor: i32, file_system: u64) -> Result<DirectFile>;

    /// Removes a file.
    ///
    /// # Safety
    /// No read of the file is in flight.
    unsafe fn remove_file(&self, file: DirectFile) -> Result<()>;

    /// Adds device memory as a target of reads, starting at a multiple of [`DIRECT_ALIGN_BYTES`].
    ///
    /// # Safety
    /// The memory stays allocated until [`Direct::remove_memory`].
    unsafe fn add_memory(&self, address: u64, bytes: u64) -> Result<()>;

    /// Removes memory, before it is freed.
    ///
    /// # Safety
    /// No read into it is in flight.
    unsafe fn remove_memory(&self, address: u64) -> Result<()>;

    /// Reads bytes of the file into memory that was added. Offset, length and address are multiples
    /// of [`DIRECT_ALIGN_BYTES`]. After an error the content of the memory is undefined.
    ///
    /// # Safety
    /// No other thread and no batch of the device uses the memory until this returns.
    unsafe fn read(&self, file: DirectFile, offset: u64, address: u64, bytes: u64) -> Result<()>;
}
