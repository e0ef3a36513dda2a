//! Opening a file of a model, and seeing whether it is still the same.

use std::fs::{File, Metadata, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::base::memory::Buffer;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::io::errno::{self, uninterrupted};
use crate::io::model_files::{Descriptor, READ_UNIT_BYTES, Stamp};
use crate::io::open_file::OpenFile;
use crate::io::probe;

/// A file of a model.
pub struct ModelFile {
    /// Its descriptor.
    pub file: Arc<OpenFile>,
    /// Its path.
    pub path: PathBuf,
    /// What it was when it was opened.
    pub stamp: Stamp,
}

fn os(error: &std::io::Error, place: &str) -> Error {
    match error.raw_os_error() {
        Some(number) => errno::error(number, place),
        None => Error::new(Status::Io, format!("{place}: {error}")),
    }
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

/// What an open file is now.
fn stamp_of(file: &OpenFile, place: &str) -> Result<Stamp> {
    // A descriptor of its own for the moment: `File` closes what it has.
    let file = file.fd().try_clone().map(File::from).map_err(|e| os(&e, place))?;
    file.metadata().map(|facts| Stamp::from(&facts)).map_err(|e| os(&e, place))
}

impl ModelFile {
    /// Opens a regular file, also behind links: that is how models are kept.
    pub fn open(path: &Path) -> Result<ModelFile> {
        let place = path.display().to_string();
        // Asked before, since opening a device may do something, and asked again below, of
        // what was opened. Without waiting: a pipe may have nobody at its other end.
        let regular = |facts: Metadata| match facts.is_file() {
            true => Ok(facts),
            false => fail!(Invalid, "{place} is a directory, device, pipe or socket, not a file"),
        };
        std::fs::metadata(path).map_err(|e| os(&e, &place)).and_then(regular)?;
        let flags = libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(|e| os(&e, &place))?;
        let facts = file.metadata().map_err(|e| os(&e, &place)).and_then(regular)?;
        let stamp = Stamp::from(&facts);
        if i64::try_from(stamp.bytes.saturating_add(READ_UNIT_BYTES)).is_err() {
            fail!(Limit, "{place} has {} bytes", stamp.bytes);
        }
        let file = OpenFile::fixed(OwnedFd::from(file), &place, stamp.bytes);
        let opened = ModelFile { file: Arc::new(file), path: path.to_path_buf(), stamp };
        // io_uring would give up with EAGAIN where it ought to wait.
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

    /// Has it read past the page cache from now on; what reads must be aligned to. After an
    /// error it may be either way: [`ModelFile::through_cache`] is to be called.
    pub fn go_direct(&self, scratch: &Buffer) -> Result<u64> {
        let told = probe::reported_alignment(&*self.file)?;
        if told > READ_UNIT_BYTES || (told != 0 && !told.is_power_of_two()) {
            fail!(Unavailable, "O_DIRECT wants multiples of {told} bytes, not {READ_UNIT_BYTES}");
        }
        self.set_flags(libc::O_DIRECT)?;
        // What the kernel says is tried as well: layered file systems promise much.
        let least = if told == 0 { 512 } else { told };
        let tried = std::iter::successors(Some(least), |align| Some(align * 2))
            .take_while(|align| *align <= READ_UNIT_BYTES)
            .find(|align| self.reads_at(scratch, *align));
        tried.ok_or_else(|| {
            Error::new(Status::Unavailable, format!("no O_DIRECT read of {} works", self.name()))
        })
    }

    /// Whether direct reads work that are aligned to so much and no more.
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

    /// What the kernel calls it, and what it is on.
    pub fn descriptor(&self) -> Result<Descriptor> {
        let number = self.file.as_raw_fd();
        let mut facts = std::mem::MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: a place for the answer.
        match uninterrupted(|| unsafe { libc::fstatfs(number, facts.as_mut_ptr()) }) {
            Ok(_) => {
                // SAFETY: filled, as the call said.
                let file_system = unsafe { facts.assume_init() }.f_type as u64;
                Ok(Descriptor { number, file_system })
            }
            Err(failed) => Err(errno::error(failed, self.name())),
        }
    }

    /// Has it read through the page cache.
    pub fn through_cache(&self) -> Result<()> {
        self.set_flags(0)
    }

    /// Its name, for humans.
    pub fn name(&self) -> &str {
        self.file.name()
    }

    /// Whether it is still what was opened.
    pub fn check(&self) -> Result<()> {
        let (name, now) = (self.name(), stamp_of(&self.file, self.name())?);
        let by_path = std::fs::metadata(&self.path).map(|facts| Stamp::from(&facts));
        let by_path = by_path.map_err(|error| os(&error, name));
        compare(&self.stamp, &now, by_path).map_err(|error| error.within(name))
    }

    /// That it is not shorter than it was.
    pub fn check_bytes(&self) -> Result<()> {
        let now = stamp_of(&self.file, self.name())?.bytes;
        if now < self.stamp.bytes {
            fail!(Io, "{} was cut short, from {} to {now} bytes", self.name(), self.stamp.bytes);
        }
        Ok(())
    }

    /// Gives back what the page cache has of a range. What is read stays in memory of our
    /// own: a second copy in the cache would take from the same RAM, and in a cgroup from
    /// the same limit. Best effort; others who read the file read it again.
    pub fn forget(&self, offset: u64, bytes: u64) {
        let (offset, bytes) = (offset as libc::off_t, bytes as libc::off_t);
        // SAFETY: no memory is involved.
        unsafe {
            libc::posix_fadvise(self.file.as_raw_fd(), offset, bytes, libc::POSIX_FADV_DONTNEED);
        }
    }
}

/// What has changed about a file; `by_path` is what has its name now.
pub fn compare(then: &Stamp, now: &Stamp, by_path: Result<Stamp>) -> Result<()> {
    const AGAIN: &str = "open the model again";
    if now.bytes != then.bytes {
        let how = if now.bytes < then.bytes { "cut short" } else { "made longer" };
        let (then, now) = (then.bytes, now.bytes);
        fail!(Corrupt, "it was {how} while open, from {then} to {now} bytes: {AGAIN}");
    }
    if now.modified_ns != then.modified_ns {
        fail!(Corrupt, "it was written to while open: {AGAIN}");
    }
    match by_path {
        Err(error) if error.status() == Status::NotFound => {
            fail!(State, "it was removed or moved away; what was opened can still be read")
        }
        Err(error) => return Err(error),
        Ok(other) if (other.device, other.inode) != (then.device, then.inode) => {
            fail!(State, "another file took its place: {AGAIN} to use that one")
        }
        Ok(_) => {}
    }
    if now.changed_ns != then.changed_ns {
        fail!(
            State,
            "its mode, owner or names changed, or its bytes and then its time: {AGAIN} to be sure"
        );
    }
    Ok(())
}
