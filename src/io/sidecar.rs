//! A small file beside others: read as a whole, written so that it is there as a whole or
//! not at all.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::errno;

fn os(error: &std::io::Error, path: &Path) -> Error {
    let place = path.display().to_string();
    match error.raw_os_error() {
        Some(number) => errno::error(number, &place),
        None => Error::new(Status::Io, format!("{place}: {error}")),
    }
}

/// All of a file that has at most `limit` bytes. No links are followed: what is beside a
/// file belongs to it.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(|e| os(&e, path))?;
    let facts = file.metadata().map_err(|e| os(&e, path))?;
    if !facts.is_file() {
        fail!(Invalid, "{} is no regular file", path.display());
    }
    let mut out = Vec::new();
    let expected = facts.len().min(limit) as usize;
    out.try_reserve_exact(expected).map_err(|_| Status::NoMem)?;
    // One more than may be, to see whether there is.
    file.take(limit.saturating_add(1)).read_to_end(&mut out).map_err(|e| os(&e, path))?;
    if out.len() as u64 > limit {
        fail!(Limit, "{} has more than {limit} bytes", path.display());
    }
    Ok(out)
}

/// Writes a file, in place of what had its name: a reader finds the old bytes or the new
/// ones, also after a crash. Nobody but this user may read it.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let Some(name) = path.file_name() else {
        fail!(Invalid, "{} has no name", path.display());
    };
    let mut draft = OsString::from(".");
    draft.push(name);
    draft.push(format!(".{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let draft = path.with_file_name(draft);
    let made = fill(&draft, bytes)
        .and_then(|()| std::fs::rename(&draft, path).map_err(|error| (error, true)));
    if let Err((error, ours)) = made {
        // A draft of somebody else stays: it was not made here.
        if ours {
            let _ = std::fs::remove_file(&draft);
        }
        return Err(os(&error, path));
    }
    sync_above(path)
}

/// Makes a draft durable; with an error, whether the draft is ours to remove.
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
        // Some file systems have no such call for directories, and no need of it.
        Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(os(&error, above)),
        _ => Ok(()),
    }
}

/// Where the sidecar of a file is, with a suffix of its own.
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
    fn all_or_nothing_and_private() {
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
        assert_eq!(std::fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        // In the way of a rename: the old stays, and no draft does.
        let busy = scratch.0.join("busy");
        std::fs::create_dir_all(busy.join("full")).expect("made");
        assert!(write(&busy, b"x").is_err());
        assert!(write(&scratch.0.join("no/where"), b"x").is_err());
        assert!(write(Path::new("/"), b"x").is_err() && write(Path::new(".."), b"x").is_err());
        let mut names: Vec<_> = std::fs::read_dir(&scratch.0)
            .expect("there")
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
        assert!(read(&scratch.0.join("pipe"), 9).is_err(), "and nobody waits for a writer");
        assert_eq!(write(&link, b"new"), Ok(()), "the link goes, not what it leads to");
        assert_eq!(read(&real, 9).as_deref(), Ok(&b"text"[..]));
        assert_eq!(read(&link, 9).as_deref(), Ok(&b"new"[..]));
    }
}
