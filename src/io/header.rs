//! Bounded reads of regular files, for headers of model files whose stated lengths cannot be
//! trusted.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::base::status::{Result, Status};
use crate::fail;
use crate::io::errno::of_io;

/// Limit: files of a directory.
pub const MAX_NAMES: usize = 1 << 16;

/// A regular file for reading.
pub struct Header {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl Header {
    /// Opens a file. Links are followed, since model caches consist of them. Directories, devices
    /// and pipes are rejected before they are opened.
    pub fn open(path: &Path) -> Result<Header> {
        let facts = std::fs::metadata(path).map_err(|e| of_io(&e, path.display()))?;
        refuse(path, facts.file_type())?;
        // Non-blocking: it may have become a pipe meanwhile.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path)
            .map_err(|e| of_io(&e, path.display()))?;
        let facts = file.metadata().map_err(|e| of_io(&e, path.display()))?;
        refuse(path, facts.file_type())?;
        Ok(Header { file, path: path.into(), bytes: facts.len() })
    }

    /// Length when it was opened.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads `bytes` bytes at `offset`. A range beyond the end is rejected before memory is
    /// allocated.
    pub fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let place = self.path.display();
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            fail!(
                Corrupt,
                "{place}: {bytes} bytes at {offset} exceed its length of {} bytes",
                self.bytes
            );
        }
        let mut out = Vec::new();
        let count = usize::try_from(bytes).map_err(|_| Status::NoMem)?;
        if out.try_reserve_exact(count).is_err() {
            fail!(NoMem, "{place}: no memory for {bytes} bytes of its header");
        }
        out.resize(count, 0);
        match self.file.read_exact_at(&mut out, offset) {
            Ok(()) => Ok(out),
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
                fail!(Corrupt, "{place}: truncated while it was read")
            }
            Err(e) => Err(of_io(&e, self.path.display())),
        }
    }
}

fn refuse(path: &Path, kind: std::fs::FileType) -> Result<()> {
    if !kind.is_file() {
        let what = if kind.is_dir() { "a directory" } else { "a device, pipe or socket" };
        fail!(Invalid, "{}: {what}, a regular file is needed", path.display());
    }
    Ok(())
}

/// Whether a path is a directory; an absent path is an error.
pub fn is_directory(path: &Path) -> Result<bool> {
    std::fs::metadata(path).map(|facts| facts.is_dir()).map_err(|e| of_io(&e, path.display()))
}

/// Sorted names of a directory's regular files and of links to such. Names that are not UTF-8 are
/// skipped.
pub fn names(directory: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(|e| of_io(&e, directory.display()))? {
        let entry = entry.map_err(|e| of_io(&e, directory.display()))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        // A link may be dangling, and a file may be removed concurrently.
        if !std::fs::metadata(entry.path()).is_ok_and(|facts| facts.is_file()) {
            continue;
        }
        if found.len() == MAX_NAMES {
            fail!(Limit, "{}: more than {MAX_NAMES} files", directory.display());
        }
        found.try_reserve(1).map_err(|_| Status::NoMem)?;
        found.push(name);
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranges_of_regular_files_are_read() {
        let dir = std::env::temp_dir().join(format!("kvtier-header-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&dir));
        std::fs::create_dir(&dir).expect("a directory");
        std::fs::write(dir.join("b"), b"hello").expect("written");
        std::os::unix::fs::symlink("b", dir.join("a")).expect("a link");
        std::os::unix::fs::symlink("nowhere", dir.join("c")).expect("a link");
        std::fs::create_dir(dir.join("d")).expect("a directory");
        let pipe = std::ffi::CString::new(dir.join("e").to_string_lossy().as_bytes());
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(pipe.expect("a name").as_ptr(), 0o600) }, 0);

        assert_eq!(names(&dir), Ok(vec!["a".into(), "b".into()]));
        assert_eq!((is_directory(&dir), is_directory(&dir.join("a"))), (Ok(true), Ok(false)));
        let file = Header::open(&dir.join("a")).expect("a link to a file");
        assert_eq!((file.bytes(), file.read(1, 3)), (5, Ok(b"ell".to_vec())));
        for (offset, bytes) in [(1, 5), (6, 0), (u64::MAX, 2), (0, u64::MAX)] {
            let error = file.read(offset, bytes).expect_err("beyond the end");
            assert_eq!(error.status(), Status::Corrupt, "{error}");
        }
        // A file that was truncated after opening is an error.
        std::fs::write(dir.join("b"), b"hel").expect("written");
        assert_eq!(file.read(0, 5).map_err(|e| e.status()), Err(Status::Corrupt));
        for (name, status) in
            [("c", Status::NotFound), ("d", Status::Invalid), ("e", Status::Invalid)]
        {
            let error = Header::open(&dir.join(name)).err().expect("no file");
            assert_eq!(error.status(), status, "{error}");
            assert!(error.message().contains(&format!("/{name}: ")), "{error}");
        }
        assert_eq!(is_directory(&dir.join("f")).map_err(|e| e.status()), Err(Status::NotFound));
        std::fs::remove_dir_all(&dir).expect("ours");
    }
}
