//! System calls for a directory that several machines share. Every folder is opened relative to its
//! parent, no link is followed, and errors are raw numbers.
//!
//! No call has a deadline: an unresponsive server blocks the caller until it is back, or until the
//! mount gives up (`soft`).

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::io::errno::{last_number, uninterrupted};

/// A system error number.
pub type Number = i32;

const FOLDER: i32 = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
/// Non-blocking: another user may have put a pipe there.
const FILE: i32 = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;

/// An open folder.
pub struct Folder(OwnedFd);

/// An open file.
pub struct SharedFile(OwnedFd);

/// Attributes of a file or folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// A regular file, and no link, folder or device.
    pub regular: bool,
    /// A folder.
    pub folder: bool,
    /// Length.
    pub bytes: u64,
    /// Time of the last write by the server's clock, in seconds.
    pub written_s: i64,
    /// Permissions.
    pub mode: u32,
}

/// File system of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct System {
    /// Kind, by the kernel's number.
    pub kind: i64,
    /// Free bytes for this user.
    pub free_bytes: u64,
}

impl System {
    /// Name of its kind.
    pub fn name(&self) -> &'static str {
        match self.kind {
            0x6969 => "nfs",
            0x0BD0_0BD0 => "lustre",
            0x00C3_6400 => "ceph",
            0x4750_4653 => "gpfs",
            0x1980_0202 => "beegfs",
            0x6573_5546 => "fuse",
            0x0102_1994 => "tmpfs",
            0xEF53 => "ext4",
            0x5846_5342 => "xfs",
            0x9123_683E => "btrfs",
            0x794C_7630 => "overlay",
            _ => "another file system",
        }
    }
}

/// A memory range.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Address.
    pub address: *mut u8,
    /// Length.
    pub bytes: u64,
}

fn text(name: &[u8]) -> Result<CString, Number> {
    CString::new(name).map_err(|_| libc::EINVAL)
}

fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the system has just returned it to the caller, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn stat_of(call: impl Fn(*mut libc::stat) -> i32) -> Result<Facts, Number> {
    // SAFETY: integers only, which may be zero.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    uninterrupted(|| call(&mut stat))?;
    let kind = stat.st_mode & libc::S_IFMT;
    Ok(Facts {
        regular: kind == libc::S_IFREG,
        folder: kind == libc::S_IFDIR,
        bytes: u64::try_from(stat.st_size).unwrap_or(0),
        written_s: stat.st_mtime,
        mode: stat.st_mode & 0o7777,
    })
}

impl Folder {
    /// Opens a folder by its path, following links.
    pub fn root(path: &Path) -> Result<Folder, Number> {
        let path = text(path.as_os_str().as_bytes())?;
        let flags = FOLDER & !libc::O_NOFOLLOW;
        // SAFETY: a NUL-terminated path.
        let fd = uninterrupted(|| unsafe { libc::open(path.as_ptr(), flags) })?;
        Ok(Folder(owned(fd)))
    }

    /// Opens a subfolder.
    pub fn folder(&self, name: &[u8]) -> Result<Folder, Number> {
        let (name, at) = (text(name)?, self.0.as_raw_fd());
        // SAFETY: a NUL-terminated name.
        let fd = uninterrupted(|| unsafe { libc::openat(at, name.as_ptr(), FOLDER) })?;
        Ok(Folder(owned(fd)))
    }

    /// Opens a subfolder, and creates it for this user only if it is absent; durably, if `is_durable`.
    pub fn folder_or_create(&self, name: &[u8], is_durable: bool) -> Result<Folder, Number> {
        match self.folder(name) {
            Err(libc::ENOENT) => {}
            opened => return opened,
        }
        let path = text(name)?;
        // SAFETY: a NUL-terminated name.
        match uninterrupted(|| unsafe { libc::mkdirat(self.0.as_raw_fd(), path.as_ptr(), 0o700) }) {
            // Another process was faster.
            Ok(_) | Err(libc::EEXIST) => {}
            Err(number) => return Err(number),
        }
        if is_durable {
            self.sync()?;
        }
        self.folder(name)
    }

    /// Opens a file for reading.
    pub fn open(&self, name: &[u8]) -> Result<SharedFile, Number> {
        let (name, at) = (text(name)?, self.0.as_raw_fd());
        let flags = FILE | libc::O_RDONLY;
        // SAFETY: a NUL-terminated name.
        let fd = uninterrupted(|| unsafe { libc::openat(at, name.as_ptr(), flags) })?;
        Ok(SharedFile(owned(fd)))
    }

    /// Creates a file for this user only; EEXIST if the name exists.
    pub fn create(&self, name: &[u8]) -> Result<SharedFile, Number> {
        let (name, at) = (text(name)?, self.0.as_raw_fd());
        let flags = FILE | libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        let mode: libc::c_uint = 0o600;
        // SAFETY: a NUL-terminated name; the mode is used since a file is created.
        let fd = uninterrupted(|| unsafe { libc::openat(at, name.as_ptr(), flags, mode) })?;
        Ok(SharedFile(owned(fd)))
    }

    /// Attributes of a name; of a link itself, not of its target.
    pub fn facts(&self, name: &[u8]) -> Result<Facts, Number> {
        let (name, at) = (text(name)?, self.0.as_raw_fd());
        let flags = libc::AT_SYMLINK_NOFOLLOW;
        // SAFETY: a NUL-terminated name and a writable stat.
        stat_of(|stat| unsafe { libc::fstatat(at, name.as_ptr(), stat, flags) })
    }

    /// Attributes of this folder.
    pub fn own_facts(&self) -> Result<Facts, Number> {
        // SAFETY: a writable stat.
        stat_of(|stat| unsafe { libc::fstat(self.0.as_raw_fd(), stat) })
    }

    /// Adds a second name to a file; EEXIST if the name exists.
    pub fn link(&self, from: &[u8], to: &[u8]) -> Result<(), Number> {
        let (from, to, at) = (text(from)?, text(to)?, self.0.as_raw_fd());
        // SAFETY: NUL-terminated names.
        uninterrupted(|| unsafe { libc::linkat(at, from.as_ptr(), at, to.as_ptr(), 0) })?;
        Ok(())
    }

    /// Renames a file. With `no_replace` it fails with EEXIST if the target exists, or EINVAL if the file
    /// system cannot do that. Without, the target is replaced.
    pub fn rename(&self, from: &[u8], to: &[u8], no_replace: bool) -> Result<(), Number> {
        let (from, to, at) = (text(from)?, text(to)?, self.0.as_raw_fd());
        let flags = if no_replace { libc::RENAME_NOREPLACE } else { 0 };
        // SAFETY: NUL-terminated names. By number, since not every C library has the call.
        uninterrupted(|| unsafe {
            libc::syscall(libc::SYS_renameat2, at, from.as_ptr(), at, to.as_ptr(), flags)
        })?;
        Ok(())
    }

    /// Removes a name of a file.
    pub fn remove(&self, name: &[u8]) -> Result<(), Number> {
        let (name, at) = (text(name)?, self.0.as_raw_fd());
        // SAFETY: a NUL-terminated name.
        uninterrupted(|| unsafe { libc::unlinkat(at, name.as_ptr(), 0) })?;
        Ok(())
    }

    /// Makes names durable, if the file system supports that.
    pub fn sync(&self) -> Result<(), Number> {
        // SAFETY: no memory is involved.
        match uninterrupted(|| unsafe { libc::fsync(self.0.as_raw_fd()) }) {
            // Some file systems do not support this call for folders, and do not need it.
            Ok(_) | Err(libc::EINVAL) => Ok(()),
            Err(number) => Err(number),
        }
    }

    /// Its file system.
    pub fn system(&self) -> Result<System, Number> {
        // SAFETY: integers only, which may be zero.
        let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: a writable statfs.
        uninterrupted(|| unsafe { libc::fstatfs(self.0.as_raw_fd(), &mut stat) })?;
        let unit = u64::try_from(stat.f_bsize).unwrap_or(0);
        let free_bytes = stat.f_bavail.saturating_mul(unit);
        Ok(System { kind: stat.f_type & 0xFFFF_FFFF, free_bytes })
    }

    /// Visits the names, in any order, until `visit` returns false.
    pub fn each_name(&self, mut visit: impl FnMut(&[u8]) -> bool) -> Result<(), Number> {
        let at = self.0.as_raw_fd();
        // A separate descriptor, because the read position belongs to one caller. SAFETY: a
        // NUL-terminated name.
        let fd = uninterrupted(|| unsafe { libc::openat(at, c".".as_ptr(), FOLDER) })?;
        let fd = owned(fd);
        // SAFETY: an open descriptor of a folder; on success the stream owns it.
        let stream = unsafe { libc::fdopendir(fd.as_raw_fd()) };
        if stream.is_null() {
            return Err(last_number());
        }
        let _ = fd.into_raw_fd();
        let mut done = Ok(());
        loop {
            // SAFETY: this thread's own errno, which alone distinguishes the end from an error. The
            // stream is open and belongs to this call.
            let entry = unsafe {
                *libc::__errno_location() = 0;
                libc::readdir(stream)
            };
            if entry.is_null() {
                if last_number() != 0 {
                    done = Err(last_number());
                }
                break;
            }
            // SAFETY: the kernel's name, NUL-terminated, inside the entry, valid until the next.
            let name = unsafe { CStr::from_ptr((*entry).d_name.as_ptr()) }.to_bytes();
            if name != b"." && name != b".." && !visit(name) {
                break;
            }
        }
        // SAFETY: opened above, closed once.
        unsafe { libc::closedir(stream) };
        done
    }
}

impl SharedFile {
    /// Attributes of the file.
    pub fn facts(&self) -> Result<Facts, Number> {
        // SAFETY: a writable stat.
        stat_of(|stat| unsafe { libc::fstat(self.0.as_raw_fd(), stat) })
    }

    /// Reads at an offset; returns the number of bytes, 0 at the end.
    ///
    /// # Safety
    /// The memory is valid, and nothing else accesses it.
    pub unsafe fn read(&self, span: Span, offset: u64) -> Result<u64, Number> {
        let offset = i64::try_from(offset).map_err(|_| libc::EINVAL)?;
        let fd = self.0.as_raw_fd();
        // SAFETY: the caller's promise.
        let got = uninterrupted(|| unsafe {
            libc::pread(fd, span.address.cast(), span.bytes as usize, offset)
        })?;
        Ok(got as u64)
    }

    /// Writes at an offset; returns the number of bytes.
    ///
    /// # Safety
    /// The memory is valid, and nothing writes it.
    pub unsafe fn write(&self, span: Span, offset: u64) -> Result<u64, Number> {
        let offset = i64::try_from(offset).map_err(|_| libc::EINVAL)?;
        let fd = self.0.as_raw_fd();
        // SAFETY: the caller's promise.
        let written = uninterrupted(|| unsafe {
            libc::pwrite(fd, span.address.cast(), span.bytes as usize, offset)
        })?;
        Ok(written as u64)
    }

    /// Makes its bytes durable.
    pub fn sync(&self) -> Result<(), Number> {
        // SAFETY: no memory is involved.
        uninterrupted(|| unsafe { libc::fsync(self.0.as_raw_fd()) })?;
        Ok(())
    }

    /// Closes it. Some servers report only then that there was no space.
    pub fn close(self) -> Result<(), Number> {
        // SAFETY: it owned the descriptor, which is closed once in any case.
        match unsafe { libc::close(self.0.into_raw_fd()) } {
            0 => Ok(()),
            // It is closed, and the server has the data.
            _ if last_number() == libc::EINTR => Ok(()),
            _ => Err(last_number()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_have_names() {
        let system = |kind| System { kind, free_bytes: 0 }.name();
        assert_eq!(
            (system(0x6969), system(0x0BD0_0BD0), system(0x00C3_6400)),
            ("nfs", "lustre", "ceph")
        );
        assert_eq!(system(77), "another file system");
    }

    #[test]
    fn names_with_a_nul_are_rejected() {
        let root = Folder::root(&std::env::temp_dir()).unwrap();
        assert_eq!(root.open(b"a\0b").err(), Some(libc::EINVAL));
        assert_eq!(root.folder(b"\0").err(), Some(libc::EINVAL));
        assert!(root.own_facts().unwrap().folder && root.system().is_ok());
    }

    #[test]
    fn links_are_not_followed() {
        let dir = std::env::temp_dir().join(format!("kvtier-shared-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        let root = Folder::root(&dir).unwrap();
        let file = root.create(b"file").unwrap();
        assert_eq!(root.create(b"file").err(), Some(libc::EEXIST));
        file.close().unwrap();
        assert_eq!(root.facts(b"file").unwrap().mode, 0o600);
        assert_eq!(
            root.folder_or_create(b"folder", true).unwrap().own_facts().unwrap().mode,
            0o700
        );
        std::os::unix::fs::symlink("file", dir.join("to-file")).unwrap();
        std::os::unix::fs::symlink("folder", dir.join("to-folder")).unwrap();
        assert_eq!(root.open(b"to-file").err(), Some(libc::ELOOP));
        assert!(
            root.folder(b"to-folder").is_err()
                && root.folder_or_create(b"to-folder", false).is_err()
        );
        assert!(!root.facts(b"to-file").unwrap().regular);
        assert_eq!(root.link(b"file", b"to-folder").err(), Some(libc::EEXIST));
        root.link(b"file", b"second").unwrap();
        root.rename(b"second", b"third", false).unwrap();
        let mut names = Vec::new();
        root.each_name(|name| {
            names.push(String::from_utf8_lossy(name).into_owned());
            true
        })
        .unwrap();
        names.sort();
        assert_eq!(names, ["file", "folder", "third", "to-file", "to-folder"]);
        root.remove(b"to-file").unwrap();
        assert!(root.facts(b"file").unwrap().regular);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
