//! A private directory, held open: mode 0700, and no name in it is followed to the outside.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::errno::{self, uninterrupted};
use crate::io::files::{Entry, check_name};

/// Limit: names in a directory.
pub const MAX_NAMES: usize = 1 << 20;

const FLAGS: i32 = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;

/// An open directory.
pub struct Directory {
    fd: OwnedFd,
    path: PathBuf,
    /// Opening created it.
    is_created: bool,
}

/// Attributes of a file.
#[derive(Clone, Copy)]
pub struct Facts {
    /// A regular file, and no link, directory or device.
    pub regular: bool,
    /// Length.
    pub bytes: u64,
}

fn text(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| Error::new(Status::Invalid, "a path contains a NUL"))
}

fn blank() -> libc::stat {
    // SAFETY: integers only, which may be zero.
    unsafe { std::mem::zeroed() }
}

impl From<libc::stat> for Facts {
    fn from(stat: libc::stat) -> Facts {
        let regular = stat.st_mode & libc::S_IFMT == libc::S_IFREG;
        Facts { regular, bytes: u64::try_from(stat.st_size).unwrap_or(0) }
    }
}

/// Attributes of a descriptor.
fn stat_of(fd: RawFd) -> Result<libc::stat> {
    let mut stat = blank();
    // SAFETY: `stat` is a writable stat.
    let rc = unsafe { libc::fstat(fd, &mut stat) };
    if rc == 0 { Ok(stat) } else { Err(errno::last("fstat")) }
}

/// Attributes of an open file.
pub fn facts_of(fd: &OwnedFd) -> Result<Facts> {
    Ok(stat_of(fd.as_raw_fd())?.into())
}

impl Directory {
    /// Opens a directory, and creates it in an existing parent if it is absent. It must belong to
    /// this user, be no link, and be closed to others.
    pub fn open(path: &Path) -> Result<Directory> {
        // Without a trailing slash, which would make the kernel follow a link.
        let path: PathBuf = path.components().collect();
        let name = text(path.as_os_str().as_bytes())?;
        // SAFETY: a NUL-terminated path.
        let made = unsafe { libc::mkdir(name.as_ptr(), 0o700) } == 0;
        let place = path.display().to_string();
        if !made && errno::last_number() != libc::EEXIST {
            return Err(errno::last(&format!("making {place}")));
        }
        // SAFETY: a NUL-terminated path.
        let fd = uninterrupted(|| unsafe { libc::open(name.as_ptr(), FLAGS) });
        let fd = match fd {
            // SAFETY: a descriptor this call has just created and nothing else owns.
            Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
            Err(libc::ELOOP | libc::ENOTDIR) => {
                fail!(Invalid, "{place} is a link or a file: a directory is needed")
            }
            Err(number) => return Err(errno::error(number, &format!("opening {place}"))),
        };
        let directory = Directory { fd, path, is_created: made };
        if made {
            // Otherwise all of it could be lost in a power failure.
            if let Err(error) = directory.sync_above() {
                // SAFETY: a NUL-terminated path.
                unsafe { libc::rmdir(name.as_ptr()) };
                return Err(error);
            }
        }
        if let Err(error) = directory.require_private(&place) {
            directory.remove_if_created();
            return Err(error);
        }
        Ok(directory)
    }

    /// Removes the directory, if opening created it and it is empty.
    pub fn remove_if_created(&self) {
        let Ok(name) = text(self.path.as_os_str().as_bytes()) else { return };
        // SAFETY: a NUL-terminated path. A directory with entries stays.
        if self.is_created && unsafe { libc::rmdir(name.as_ptr()) } != 0 {
            log::debug!("{} was not removed", self.path.display());
        }
    }

    /// Whether it contains no name except, maybe, one.
    pub fn is_empty_except(&self, name: &str) -> Result<bool> {
        let mut is_bare = true;
        self.each_name(&mut |other| {
            is_bare &= other.to_bytes() == name.as_bytes();
            Ok(())
        })?;
        Ok(is_bare)
    }

    /// Makes the directory's own name durable.
    fn sync_above(&self) -> Result<()> {
        let above = match self.path.parent() {
            Some(above) if !above.as_os_str().is_empty() => above,
            _ => Path::new("."),
        };
        let place = above.display();
        let (path, flags) = (text(above.as_os_str().as_bytes())?, FLAGS & !libc::O_NOFOLLOW);
        // SAFETY: a NUL-terminated path.
        let fd = uninterrupted(|| unsafe { libc::open(path.as_ptr(), flags) })
            .map_err(|number| errno::error(number, &format!("opening {place} to sync it")))?;
        // SAFETY: a descriptor this call has just created and nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: no memory is involved.
        match uninterrupted(|| unsafe { libc::fsync(fd.as_raw_fd()) }) {
            // Some file systems do not support this call for directories, and do not need it.
            Ok(_) | Err(libc::EINVAL) => Ok(()),
            Err(number) => Err(errno::error(number, &format!("syncing {place}"))),
        }
    }

    fn require_private(&self, place: &str) -> Result<()> {
        let stat = stat_of(self.fd.as_raw_fd())?;
        // SAFETY: it has no preconditions.
        let us = unsafe { libc::geteuid() };
        if stat.st_uid != us {
            fail!(Invalid, "{place} belongs to user {}, not to user {us}", stat.st_uid);
        }
        let mode = stat.st_mode & 0o777;
        if mode & 0o077 == 0 {
            return Ok(());
        }
        let mut names = 0;
        self.each_name(&mut |_| {
            names += 1;
            Ok(())
        })?;
        if names > 0 {
            fail!(Invalid, "{place} is accessible to others (mode {mode:o}): chmod 700 it");
        }
        // SAFETY: no memory is involved.
        match unsafe { libc::fchmod(self.fd.as_raw_fd(), 0o700) } {
            0 => Ok(()),
            _ => Err(errno::last(&format!("making {place} private"))),
        }
    }

    /// Path, as it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device and inode of the directory.
    pub fn identity(&self) -> Result<(u64, u64)> {
        let stat = stat_of(self.fd.as_raw_fd())?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Opens a regular file for reading and writing, with more flags. Without `O_CREAT` it must
    /// exist. The name is not validated.
    pub fn open_file(&self, name: &str, flags: i32) -> Result<OwnedFd> {
        // Checked before, because opening a device may have side effects, and again below for the
        // opened file.
        let path = match flags & libc::O_CREAT {
            0 => self.regular(name)?,
            _ => text(name.as_bytes())?,
        };
        let flags = flags | libc::O_RDWR | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let at = self.fd.as_raw_fd();
        let mode: libc::c_uint = 0o600;
        // SAFETY: a NUL-terminated path; the mode is used when a file is created.
        let fd = uninterrupted(|| unsafe { libc::openat(at, path.as_ptr(), flags, mode) })
            .map_err(|number| match number {
                libc::ELOOP => Error::new(Status::NotFound, format!("{name} is a link")),
                _ => errno::error(number, &format!("opening {name}")),
            })?;
        // SAFETY: a descriptor this call has just created and nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if !facts_of(&fd)?.regular {
            fail!(NotFound, "{name} is not a regular file");
        }
        Ok(fd)
    }

    fn stat(&self, path: &CStr) -> Result<libc::stat> {
        let mut stat = blank();
        let (at, flags) = (self.fd.as_raw_fd(), libc::AT_SYMLINK_NOFOLLOW);
        // SAFETY: a NUL-terminated path and a writable stat.
        match unsafe { libc::fstatat(at, path.as_ptr(), &mut stat, flags) } {
            0 => Ok(stat),
            _ => Err(errno::last(&path.to_string_lossy())),
        }
    }

    fn facts(&self, path: &CStr) -> Result<Facts> {
        Ok(self.stat(path)?.into())
    }

    /// Whether a name still refers to a file that was opened by it.
    pub fn names_file(&self, name: &str, file: &OwnedFd) -> Result<bool> {
        let opened = stat_of(file.as_raw_fd())?;
        match self.stat(&text(name.as_bytes())?) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)),
            Err(error) if error.status() == Status::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn regular(&self, name: &str) -> Result<CString> {
        let path = text(name.as_bytes())?;
        if !self.facts(&path)?.regular {
            fail!(NotFound, "{name} is not a regular file");
        }
        Ok(path)
    }

    /// Lists the regular files, sorted by name. Names that [`check_name`] rejects are skipped.
    pub fn list(&self) -> Result<Vec<Entry>> {
        let mut entries: Vec<Entry> = Vec::new();
        self.each_name(&mut |path| {
            let Some(name) = path.to_str().ok().filter(|name| check_name(name).is_ok()) else {
                return Ok(());
            };
            let facts = match self.facts(path) {
                Err(error) if error.status() == Status::NotFound => return Ok(()),
                facts => facts?,
            };
            if facts.regular {
                entries.try_reserve(1).map_err(|_| Status::NoMem)?;
                entries.push(Entry { name: name.to_string(), bytes: facts.bytes });
            }
            Ok(())
        })?;
        entries.sort_unstable();
        Ok(entries)
    }

    fn each_name(&self, visit: &mut dyn FnMut(&CStr) -> Result<()>) -> Result<()> {
        let at = self.fd.as_raw_fd();
        // A separate descriptor, because the read position belongs to one caller. SAFETY: a
        // NUL-terminated path.
        let fd = uninterrupted(|| unsafe { libc::openat(at, c".".as_ptr(), FLAGS) })
            .map_err(|number| errno::error(number, "opening the directory to list it"))?;
        let listing = Listing::new(fd)?;
        for _ in 0..MAX_NAMES {
            let Some(name) = listing.next()? else { return Ok(()) };
            if name != c"." && name != c".." {
                visit(name)?;
            }
        }
        fail!(Limit, "{} has more than {MAX_NAMES} names", self.path.display())
    }

    /// Renames a regular file.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        let (source, target, at) = (self.regular(from)?, text(to.as_bytes())?, self.fd.as_raw_fd());
        // SAFETY: NUL-terminated paths.
        match unsafe { libc::renameat(at, source.as_ptr(), at, target.as_ptr()) } {
            0 => Ok(()),
            _ => Err(errno::last(&format!("renaming {from} to {to}"))),
        }
    }

    /// Removes a regular file.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = self.regular(name)?;
        self.unlink(&path, name)
    }

    fn unlink(&self, path: &CStr, name: &str) -> Result<()> {
        // SAFETY: a NUL-terminated path.
        match unsafe { libc::unlinkat(self.fd.as_raw_fd(), path.as_ptr(), 0) } {
            0 => Ok(()),
            _ => Err(errno::last(&format!("removing {name}"))),
        }
    }

    /// Makes names durable; -1 on failure.
    pub fn sync(&self) -> i32 {
        // SAFETY: no memory is involved.
        unsafe { libc::fsync(self.fd.as_raw_fd()) }
    }

    /// Checks that the directory still has a name. Syncs in a removed directory succeed, but
    /// nothing is durable.
    pub fn check_there(&self) -> Result<()> {
        // SAFETY: integers only, which may be zero.
        let mut facts: libc::stat = unsafe { std::mem::zeroed() };
        let place = self.path.display();
        // SAFETY: an open descriptor and a writable stat.
        if unsafe { libc::fstat(self.fd.as_raw_fd(), &mut facts) } != 0 {
            return Err(errno::last(&format!("looking at {place}")));
        }
        if facts.st_nlink == 0 {
            fail!(Io, "{place} was removed while it was in use: nothing in it is durable");
        }
        Ok(())
    }

    /// Free bytes of the file system for this user.
    pub fn free_bytes(&self) -> Result<u64> {
        // SAFETY: integers only, which may be zero.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: a writable statvfs.
        uninterrupted(|| unsafe { libc::fstatvfs(self.fd.as_raw_fd(), &mut stat) })
            .map_err(|number| errno::error(number, "reading the free space"))?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}

/// Iterates over the names of a directory.
struct Listing(*mut libc::DIR);

impl Listing {
    fn new(fd: RawFd) -> Result<Listing> {
        // SAFETY: an open descriptor of a directory; the stream owns it from now on.
        let stream = unsafe { libc::fdopendir(fd) };
        if !stream.is_null() {
            return Ok(Listing(stream));
        }
        let error = errno::last("listing the directory");
        // SAFETY: the stream did not take it over.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        Err(error)
    }

    /// The next name; valid until the following call.
    fn next(&self) -> Result<Option<&CStr>> {
        // SAFETY: this thread's own errno, which alone distinguishes the end from an error. The
        // stream is open, and used by this value's only owner.
        let entry = unsafe {
            *libc::__errno_location() = 0;
            libc::readdir(self.0)
        };
        if entry.is_null() {
            return match errno::last_number() {
                0 => Ok(None),
                number => Err(errno::error(number, "listing the directory")),
            };
        }
        // SAFETY: the kernel's name, NUL-terminated, inside the entry.
        Ok(Some(unsafe { CStr::from_ptr((*entry).d_name.as_ptr()) }))
    }
}

impl Drop for Listing {
    fn drop(&mut self) {
        // SAFETY: opened by `new`, closed once.
        unsafe { libc::closedir(self.0) };
    }
}
