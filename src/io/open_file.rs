//! An open real file.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Mutex;
use crate::fail;
use crate::io::errno::{self, uninterrupted};

/// An open file, and whether a sync of it has failed.
pub struct OpenFile {
    fd: OwnedFd,
    name: String,
    poison: Poison,
    end: u64,
}

impl AsRawFd for OpenFile {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl OpenFile {
    /// A file that was opened under a name.
    pub fn new(fd: OwnedFd, name: &str) -> OpenFile {
        OpenFile { fd, name: name.to_string(), poison: Poison::default(), end: u64::MAX }
    }

    /// A read-only file that is expected to keep its length.
    pub fn fixed(fd: OwnedFd, name: &str, bytes: u64) -> OpenFile {
        OpenFile { end: bytes, ..OpenFile::new(fd, name) }
    }

    /// Offset at which reads are complete, even before the end of their piece; `u64::MAX` unless
    /// the file is read-only.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Name that it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Descriptor.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Allocates disk space from the start; if the file system cannot, it only sets the length.
    pub fn allocate(&self, bytes: u64) -> Result<()> {
        let Ok(length) = libc::off_t::try_from(bytes) else {
            fail!(Invalid, "{}: {bytes} bytes exceed the maximum length of a file", self.name);
        };
        if bytes == 0 {
            return Ok(());
        }
        let fd = self.as_raw_fd();
        // SAFETY: no memory is involved.
        match uninterrupted(|| unsafe { libc::fallocate(fd, 0, 0, length) }) {
            Ok(_) => return Ok(()),
            Err(libc::EOPNOTSUPP | libc::ENOSYS) => {}
            Err(number) => return Err(self.allocating(number, bytes)),
        }
        // SAFETY: no memory is involved.
        uninterrupted(|| unsafe { libc::ftruncate(fd, length) })
            .map(drop)
            .map_err(|number| self.allocating(number, bytes))
    }

    fn allocating(&self, number: i32, bytes: u64) -> Error {
        errno::error(number, &format!("allocating {bytes} bytes for {}", self.name))
    }

    /// Makes its bytes durable.
    pub fn sync(&self) -> Result<()> {
        // SAFETY: no memory is involved.
        self.poison.sync(&self.name, || unsafe { libc::fdatasync(self.as_raw_fd()) })
    }
}

/// Whether a sync has failed. The kernel reports a failed write-back once and forgets it; this does
/// not.
pub struct Poison(Mutex<bool>);

impl Default for Poison {
    fn default() -> Self {
        Poison(Mutex::new(false))
    }
}

impl Poison {
    /// Syncs, unless an earlier sync failed. One at a time: of two concurrent syncs only one would
    /// see the error.
    pub fn sync(&self, name: &str, call: impl FnMut() -> i32) -> Result<()> {
        let mut poisoned = self.0.lock();
        if *poisoned {
            return Err(poison(name));
        }
        let Err(number) = uninterrupted(call) else { return Ok(()) };
        *poisoned = true;
        drop(poisoned);
        // Every number gives the status Io. ENOSPC and EDQUOT are left out of the error, because
        // callers take them as a request to free space.
        let error = errno::error(number, &format!("syncing {name}"));
        let is_full = matches!(number, libc::ENOSPC | libc::EDQUOT);
        let errno = if is_full { 0 } else { number };
        let error = Error::new(Status::Io, error.message()).with_errno(errno);
        log::error!("{error}; the content of the disk is unknown");
        Err(error)
    }
}

/// Error for a file after a failed sync.
pub fn poison(name: &str) -> Error {
    let text = format!("a sync of {name} failed before: the content of the disk is unknown");
    Error::new(Status::Io, text)
}
