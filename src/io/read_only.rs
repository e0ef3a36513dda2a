//! Read-only access to a store's directory. It creates, changes and locks nothing, so the process
//! that has the store open is not disturbed.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::fail;
use crate::io::errno::of_io;
use crate::io::files::{Access, Entry, FileId, Files, Piece, check_name};
use crate::io::open_files::OpenFiles;

/// A directory that is only read.
pub struct ReadOnlyFiles {
    path: PathBuf,
    files: Mutex<OpenFiles<Arc<File>>>,
}

fn refused<T>() -> Result<T> {
    fail!(Unsupported, "the directory is open read-only")
}

impl ReadOnlyFiles {
    /// Opens an existing directory.
    pub fn open(path: &Path) -> Result<ReadOnlyFiles> {
        let files = ReadOnlyFiles { path: path.into(), files: Mutex::new(OpenFiles::default()) };
        files.list()?;
        Ok(files)
    }

    fn file(&self, id: FileId) -> Result<Arc<File>> {
        self.files.lock().get(id).cloned()
    }

    /// # Safety
    /// As for [`Files::transfer`].
    unsafe fn read(&self, piece: &Piece) -> Result<()> {
        piece.check(1)?;
        if piece.access == Access::Write {
            return refused();
        }
        let file = self.file(piece.file)?;
        let mut at = piece.offset;
        for part in piece.parts.iter().filter(|part| part.bytes > 0) {
            let bytes = part.bytes as usize;
            // SAFETY: the caller's promise: memory of that length, which nothing else accesses.
            let memory = unsafe { std::slice::from_raw_parts_mut(part.address, bytes) };
            file.read_exact_at(memory, at).map_err(|e| of_io(&e, "a read"))?;
            at = at.saturating_add(part.bytes);
        }
        Ok(())
    }
}

impl Files for ReadOnlyFiles {
    fn align_bytes(&self) -> u64 {
        1
    }

    fn engine(&self) -> &str {
        "read only"
    }

    fn fallback(&self) -> Option<&str> {
        None
    }

    fn list(&self) -> Result<Vec<Entry>> {
        let place = self.path.display().to_string();
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(|e| of_io(&e, &place))? {
            let entry = entry.map_err(|e| of_io(&e, &place))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            // Skip a file that was removed concurrently.
            let Ok(facts) = entry.metadata() else { continue };
            if facts.is_file() && check_name(&name).is_ok() {
                entries.try_reserve(1).map_err(|_| Status::NoMem)?;
                entries.push(Entry { name, bytes: facts.len() });
            }
        }
        entries.sort_unstable();
        Ok(entries)
    }

    fn create(&self, _: &str, _: u64) -> Result<FileId> {
        refused()
    }

    fn open(&self, name: &str) -> Result<FileId> {
        check_name(name)?;
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(self.path.join(name));
        let file = opened.map_err(|e| of_io(&e, name))?;
        if !file.metadata().is_ok_and(|facts| facts.is_file()) {
            fail!(NotFound, "{name} is not a regular file");
        }
        self.files.lock().add(Arc::new(file))
    }

    fn len(&self, file: FileId) -> Result<u64> {
        let facts = self.file(file)?.metadata().map_err(|e| of_io(&e, "reading the length"))?;
        Ok(facts.len())
    }

    fn close(&self, file: FileId) {
        let file = self.files.lock().remove(file);
        drop(file);
    }

    fn rename(&self, _: &str, _: &str) -> Result<()> {
        refused()
    }

    fn remove(&self, _: &str) -> Result<()> {
        refused()
    }

    fn sync_names(&self) -> Result<()> {
        refused()
    }

    fn sync(&self, _: FileId) -> Result<()> {
        refused()
    }

    unsafe fn transfer(&self, pieces: &mut [Piece]) {
        for piece in pieces {
            // SAFETY: the caller's promise.
            piece.result = unsafe { self.read(piece) };
        }
    }

    fn free_bytes(&self) -> Result<u64> {
        refused()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::io::real::{RealFiles, RealOpts};
    use crate::io::scratch::Scratch;

    #[test]
    fn files_of_an_open_store_are_read_and_never_written() {
        let scratch = Scratch::new();
        let real = RealFiles::open(&scratch.0, &RealOpts { buffered: true, ..RealOpts::default() })
            .expect("a directory");
        let made = real.create("a", 5).expect("room");
        let mut bytes = *b"hello";
        let mut pieces = [Piece::one(made, Access::Write, 0, bytes.as_mut_ptr(), 5)];
        // SAFETY: the test's own array, here and below.
        unsafe { real.transfer(&mut pieces) };
        assert!(pieces[0].result.is_ok());

        std::os::unix::fs::symlink("a", scratch.0.join("link")).expect("made");
        let files = ReadOnlyFiles::open(&scratch.0).expect("found");
        assert_eq!(files.list(), Ok(vec![Entry { name: "a".into(), bytes: 5 }]));
        let file = files.open("a").expect("found");
        assert_eq!(files.len(file), Ok(5));
        let mut found = [0u8; 6];
        let at = found.as_mut_ptr();
        let mut pieces = [
            Piece::one(file, Access::Read, 1, at, 4),
            Piece::one(file, Access::Read, 4, at.wrapping_add(4), 2),
            Piece::one(file, Access::Write, 0, at, 1),
        ];
        // SAFETY: as above.
        unsafe { files.transfer(&mut pieces) };
        let how = pieces.map(|piece| piece.result.is_ok());
        assert_eq!((&found[..4], how), (&b"ello"[..], [true, false, false]));
        for name in ["link", "b", "../a", "LOCK"] {
            assert!(files.open(name).is_err(), "{name}");
        }
        assert!(files.create("c", 1).is_err() && files.remove("a").is_err());
        assert!(files.rename("a", "b").is_err() && files.sync(file).is_err());
        files.close(file);
        assert_eq!(files.len(file).map_err(|e| e.status()), Err(Status::Closed));
        assert!(ReadOnlyFiles::open(&scratch.0.join("nowhere")).is_err());
    }
}
