//! Opens a model file, and detects changes of it.

use std::fs::{File, Metadata, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::base::memory::Buffer;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::io::errno::{self, of_io, uninterrupted};
use crate::io::model_files::{Descriptor, READ_UNIT_BYTES, Stamp};
use crate::io::open_file::OpenFile;
use crate::io::probe;

/// An open model file.
pub struct ModelFile {
    /// Descriptor.
    pub file: Arc<OpenFile>,
    /// Path.
    pub path: PathBuf,
    /// Attributes when it was opened.
    pub stamp: Stamp,
}

impl From<&Metadata> for Stamp {
    fn from(facts: &Metadata) -> Stamp {
        let time = |s: i64, ns: i64| i128::from(s) * 1_000_000_000 + i128::from(ns);
        Stamp {
            bytes: facts.len(),
            device: facts.dev(),
            inode: facts.ino(),
            modified_ns: time(facts.mtime(), facts.mtime_nsec()),
            changed_ns: time(facts.ctime(), facts.ctime_nsec()),
        }
    }
}

/// Current attributes of an open file.
fn stamp_of(file: &OpenFile, place: &str) -> Result<Stamp> {
    // A duplicate: `File` closes its descriptor.
    let file = file.fd().try_clone().map(File::from).map_err(|e| of_io(&e, place))?;
    file.metadata().map(|facts| Stamp::from(&facts)).map_err(|e| of_io(&e, place))
}

impl ModelFile {
    /// Opens a regular file, following links: model caches consist of them.
    pub fn open(path: &Path) -> Result<ModelFile> {
        let place = path.display().to_string();
        // Checked before, because opening a device may have side effects, and again below for the
        // opened file. Non-blocking: a pipe may have no writer.
        let regular = |facts: Metadata| match facts.is_file() {
            true => Ok(facts),
            false => fail!(
                Invalid,
                "{place} is a directory, device, pipe or socket: a regular file is needed"
            ),
        };
        std::fs::metadata(path).map_err(|e| of_io(&e, &place)).and_then(regular)?;
        let flags = libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(|e| of_io(&e, &place))?;
        let facts = file.metadata().map_err(|e| of_io(&e, &place)).and_then(regular)?;
        let stamp = Stamp::from(&facts);
        if i64::try_from(stamp.bytes.saturating_add(READ_UNIT_BYTES)).is_err() {
            fail!(Limit, "{place} has {} bytes, which exceeds the limit", stamp.bytes);
        }
        let file = OpenFile::fixed(OwnedFd::from(file), &place, stamp.bytes);
        let opened = ModelFile { file: Arc::new(file), path: path.to_path_buf(), stamp };
        // With O_NONBLOCK io_uring would return EAGAIN instead of waiting.
        opened.set_flags(0)?;
        Ok(opened)
    }

    fn set_flags(&self, flags: i32) -> Result<()> {
        let fd = self.file.as_raw_fd();
        // SAFETY: no memory is involved.
        match uninterrupted(|| unsafe { libc::fcntl(fd, libc::F_SETFL, flags) }) {
            Ok(_) => Ok(()),
            Err(number) => Err(errno::error(number, self.file.name())),
        }
    }

    /// Switches to direct reads; returns their alignment. After an error the mode is undefined:
    /// call [`ModelFile::use_page_cache`].
    pub fn use_direct_reads(&self, scratch: &Buffer) -> Result<u64> {
        let reported = probe::reported_alignment(&*self.file)?;
        if reported > READ_UNIT_BYTES || (reported != 0 && !reported.is_power_of_two()) {
            fail!(
                Unavailable,
                "O_DIRECT needs an alignment of {reported} bytes, the limit is {READ_UNIT_BYTES}"
            );
        }
        self.set_flags(libc::O_DIRECT)?;
        // The reported alignment is tried as well: layered file systems overstate their support.
        let least = if reported == 0 { 512 } else { reported };
        let tried = std::iter::successors(Some(least), |align| Some(align * 2))
            .take_while(|align| *align <= READ_UNIT_BYTES)
            .find(|align| self.reads_at(scratch, *align));
        tried.ok_or_else(|| {
            Error::new(Status::Unavailable, format!("O_DIRECT reads of {} fail", self.name()))
        })
    }

    /// Whether direct reads work with exactly this alignment.
    fn reads_at(&self, scratch: &Buffer, align: u64) -> bool {
        let Some(address) = scratch.range(align, align) else { return false };
        let offset = if self.stamp.bytes > align { align } else { 0 };
        let want = (self.stamp.bytes - offset).min(align);
        let fd = self.file.as_raw_fd();
        // SAFETY: `align` bytes inside the buffer.
        let got = uninterrupted(|| unsafe {
            libc::pread(fd, address.cast(), align as usize, offset as libc::off_t)
        });
        got.is_ok_and(|got| got as u64 == want)
    }

    /// Descriptor and file system.
    pub fn descriptor(&self) -> Result<Descriptor> {
        let number = self.file.as_raw_fd();
        let mut facts = std::mem::MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: a place for the result.
        match uninterrupted(|| unsafe { libc::fstatfs(number, facts.as_mut_ptr()) }) {
            Ok(_) => {
                // SAFETY: filled, since the call succeeded.
                let file_system = unsafe { facts.assume_init() }.f_type as u64;
                Ok(Descriptor { number, file_system })
            }
            Err(failed) => Err(errno::error(failed, self.name())),
        }
    }

    /// Switches to reads through the page cache.
    pub fn use_page_cache(&self) -> Result<()> {
        self.set_flags(0)
    }

    /// Name for people.
    pub fn name(&self) -> &str {
        self.file.name()
    }

    /// Checks that the file is unchanged.
    pub fn check(&self) -> Result<()> {
        let (name, now) = (self.name(), stamp_of(&self.file, self.name())?);
        let by_path = std::fs::metadata(&self.path).map(|facts| Stamp::from(&facts));
        let by_path = by_path.map_err(|error| of_io(&error, name));
        compare(&self.stamp, &now, by_path).map_err(|error| error.within(name))
    }

    /// Checks that it was not truncated.
    pub fn check_bytes(&self) -> Result<()> {
        let now = stamp_of(&self.file, self.name())?.bytes;
        if now < self.stamp.bytes {
            fail!(Io, "{} was truncated from {} to {now} bytes", self.name(), self.stamp.bytes);
        }
        Ok(())
    }

    /// Drops a range from the page cache, best effort. The bytes read are in the caller's memory; a
    /// second copy would use the same RAM, and count against the same cgroup limit. Other readers
    /// of the file read it again.
    pub fn forget(&self, offset: u64, bytes: u64) {
        let (offset, bytes) = (offset as libc::off_t, bytes as libc::off_t);
        // SAFETY: no memory is involved.
        unsafe {
            libc::posix_fadvise(self.file.as_raw_fd(), offset, bytes, libc::POSIX_FADV_DONTNEED);
        }
    }
}

/// Compares attributes; `by_path` are those of the file that has its name now.
pub fn compare(then: &Stamp, now: &Stamp, by_path: Result<Stamp>) -> Result<()> {
    const AGAIN: &str = "open the model again";
    if now.bytes != then.bytes {
        let how = if now.bytes < then.bytes { "truncated" } else { "extended" };
        let (then, now) = (then.bytes, now.bytes);
        fail!(Corrupt, "it was {how} from {then} to {now} bytes while it was open: {AGAIN}");
    }
    if now.modified_ns != then.modified_ns {
        fail!(Corrupt, "it was written to while it was open: {AGAIN}");
    }
    match by_path {
        Err(error) if error.status() == Status::NotFound => {
            fail!(State, "it was removed or renamed; the open file can still be read")
        }
        Err(error) => return Err(error),
        Ok(other) if (other.device, other.inode) != (then.device, then.inode) => {
            fail!(State, "another file has its name: {AGAIN} to use that one")
        }
        Ok(_) => {}
    }
    if now.changed_ns != then.changed_ns {
        fail!(
            State,
            "its mode, owner or names changed, or its bytes and then its time: {AGAIN} to be safe"
        );
    }
    Ok(())
}
