//! Reads from files into memory of a device that do not pass through host memory.

use crate::base::status::Result;

/// What memory, offsets and lengths are multiples of.
pub const DIRECT_ALIGN_BYTES: u64 = 4096;

/// A file that is read like that, of one device. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectFile(pub(crate) u64);

/// What reads files straight into a device's memory. Any thread may call, and calls wait until
/// they have ended.
pub trait Direct {
    /// What it is, for people.
    fn describe(&self) -> String;

    /// A file, by its descriptor and the kernel's number of its file system.
    /// [`crate::base::status::Status::Unavailable`] and why, where its bytes would pass
    /// through host memory, or nobody can tell.
    ///
    /// # Safety
    /// The descriptor is open, for reads past the page cache, until
    /// [`Direct::remove_file`] or the end of the device.
    unsafe fn add_file(&self, descriptor: i32, file_system: u64) -> Result<DirectFile>;

    /// Takes that back.
    ///
    /// # Safety
    /// No read of the file is under way.
    unsafe fn remove_file(&self, file: DirectFile) -> Result<()>;

    /// Memory of the device that is read into: from a multiple of [`DIRECT_ALIGN_BYTES`].
    ///
    /// # Safety
    /// It stays the device's until [`Direct::remove_memory`].
    unsafe fn add_memory(&self, address: u64, bytes: u64) -> Result<()>;

    /// Takes that back, before the memory is given back.
    ///
    /// # Safety
    /// No read into it is under way.
    unsafe fn remove_memory(&self, address: u64) -> Result<()>;

    /// Reads bytes that the file has into memory that was added: offset, length and address are
    /// multiples of [`DIRECT_ALIGN_BYTES`]. After an error nobody knows what is in the memory.
    ///
    /// # Safety
    /// Nobody else uses the memory until this returns: also no batch of the device.
    unsafe fn read(&self, file: DirectFile, offset: u64, address: u64, bytes: u64) -> Result<()>;
}
