//! A real file that is open.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Mutex;
use crate::fail;
use crate::io::errno::{self, uninterrupted};

/// An open file, with what went wrong with it.
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

    /// A file that is only read, and expected to keep its length.
    pub fn fixed(fd: OwnedFd, name: &str, bytes: u64) -> OpenFile {
        OpenFile { end: bytes, ..OpenFile::new(fd, name) }
    }

    /// Where reads may end before their piece does: nowhere, unless it is fixed.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The name under which it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its descriptor.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Has the file system set bytes aside from its start on; where it cannot, the
    /// file only gets its length.
    pub fn allocate(&self, bytes: u64) -> Result<()> {
        let Ok(length) = libc::off_t::try_from(bytes) else {
            fail!(Invalid, "{} of {bytes} bytes is too long", self.name);
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

/// Whether a sync has failed. The kernel reports once that it could not write what
/// it had, and forgets it; this does not.
pub struct Poison(Mutex<bool>);

impl Default for Poison {
    fn default() -> Self {
        Poison(Mutex::new(false))
    }
}

impl Poison {
    /// Syncs, unless that has failed before. One sync at a time: of two at once only
    /// one would be told of the error.
    pub fn sync(&self, name: &str, call: impl FnMut() -> i32) -> Result<()> {
        let mut poisoned = self.0.lock();
        if *poisoned {
            return Err(poison(name));
        }
        let Err(number) = uninterrupted(call) else { return Ok(()) };
        *poisoned = true;
        drop(poisoned);
        // Whatever the number: a full disk at this point is no request to make room.
        let error = errno::error(number, &format!("syncing {name}"));
        let error = Error::new(Status::Io, error.message());
        log::error!("{error}; what is on the disk is not known any more");
        Err(error)
    }
}

/// What is said of a file that could not be made durable.
pub fn poison(name: &str) -> Error {
    let text = format!("a sync of {name} failed before: nobody knows what is on the disk");
    Error::new(Status::Io, text)
}
