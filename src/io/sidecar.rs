//! Small files beside others, read as a whole and replaced atomically.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::status::{Result, Status};
use crate::fail;
use crate::io::errno::of_io;

/// Content of a file of at most `limit` bytes. Links are not followed: a sidecar belongs to the
/// file beside it.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(|e| of_io(&e, path.display()))?;
    let facts = file.metadata().map_err(|e| of_io(&e, path.display()))?;
    if !facts.is_file() {
        fail!(Invalid, "{} is not a regular file", path.display());
    }
    let mut out = Vec::new();
    let expected = facts.len().min(limit) as usize;
    out.try_reserve_exact(expected).map_err(|_| Status::NoMem)?;
    // One byte more than the limit, to detect longer files.
    file.take(limit.saturating_add(1))
        .read_to_end(&mut out)
        .map_err(|e| of_io(&e, path.display()))?;
    if out.len() as u64 > limit {
        fail!(Limit, "{} is longer than the limit of {limit} bytes", path.display());
    }
    Ok(out)
}

/// Replaces a file atomically: a reader finds the old bytes or the new ones, also after a crash.
/// Only this user may read it.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let Some(name) = path.file_name() else {
        fail!(Invalid, "{} has no file name", path.display());
    };
    let mut draft = OsString::from(".");
    draft.push(name);
    draft.push(format!(".{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let draft = path.with_file_name(draft);
    let made = fill(&draft, bytes)
        .and_then(|()| std::fs::rename(&draft, path).map_err(|error| (error, true)));
    if let Err((error, ours)) = made {
        // A draft of another process stays: it was not created here.
        if ours {
            let _ = std::fs::remove_file(&draft);
        }
        return Err(of_io(&error, path.display()));
    }
    sync_above(path)
}

/// Writes a draft durably; an error says whether the draft is ours to remove.
fn fill(draft: &Path, bytes: &[u8]) -> std::result::Result<(), (std::io::Error, bool)> {
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).custom_flags(flags);
    let mut file = options.open(draft).map_err(|error| (error, false))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|error| (error, true))
}

fn sync_above(path: &Path) -> Result<()> {
    let above = match path.parent() {
        Some(above) if !above.as_os_str().is_empty() => above,
        _ => Path::new("."),
    };
    match File::open(above).and_then(|file| file.sync_all()) {
        // Some file systems do not support this call for directories, and do not need it.
        Err(error) if error.raw_os_error() != Some(libc::EINVAL) => {
            Err(of_io(&error, above.display()))
        }
        _ => Ok(()),
    }
}

/// Path of a file's sidecar with a suffix.
pub fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::io::scratch::Scratch;
    use std::os::unix::fs::{MetadataExt, symlink};

    #[test]
    fn writes_are_atomic_and_private() {
        let scratch = Scratch::new();
        std::fs::create_dir(&scratch.0).expect("made");
        let path = beside(&scratch.0.join("m.gguf"), ".x");
        assert_eq!(path, scratch.0.join("m.gguf.x"));
        assert_eq!(read(&path, 9).map_err(|e| e.status()), Err(Status::NotFound));
        for text in [&b"first"[..], b"", b"a second one"] {
            assert_eq!(write(&path, text), Ok(()));
            assert_eq!(read(&path, 12).as_deref(), Ok(text));
        }
        assert_eq!(read(&path, 11).map_err(|e| e.status()), Err(Status::Limit));
        assert_eq!(std::fs::metadata(&path).expect("found").mode() & 0o777, 0o600);
        // A rename that fails keeps the old file and leaves no draft.
        let busy = scratch.0.join("busy");
        std::fs::create_dir_all(busy.join("full")).expect("made");
        assert!(write(&busy, b"x").is_err());
        assert!(write(&scratch.0.join("no/where"), b"x").is_err());
        assert!(write(Path::new("/"), b"x").is_err() && write(Path::new(".."), b"x").is_err());
        let mut names: Vec<_> = std::fs::read_dir(&scratch.0)
            .expect("found")
            .map(|entry| entry.expect("entry").file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["busy", "m.gguf.x"]);
    }

    #[test]
    fn only_files_are_read_and_no_link_is_followed() {
        let scratch = Scratch::new();
        std::fs::create_dir(&scratch.0).expect("made");
        let (real, link) = (scratch.0.join("real"), scratch.0.join("link"));
        write(&real, b"text").expect("written");
        symlink(&real, &link).expect("linked");
        assert!(read(&link, 9).is_err() && read(&scratch.0, 9).is_err());
        let pipe = std::ffi::CString::new(scratch.0.join("pipe").to_str().expect("text"));
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(pipe.expect("text").as_ptr(), 0o600) }, 0);
        assert!(
            read(&scratch.0.join("pipe"), 9).is_err(),
            "and the call does not wait for a writer"
        );
        assert_eq!(write(&link, b"new"), Ok(()), "the link is replaced, not its target");
        assert_eq!(read(&real, 9).as_deref(), Ok(&b"text"[..]));
        assert_eq!(read(&link, 9).as_deref(), Ok(&b"new"[..]));
    }
}
