//! A shared directory (NFS, Lustre, CephFS) as a remote. An object is a file,
//! `prefix/v1/ab/cd/rest` by the digits of its name, `prefix/t42/v1/..` for a tenant's own.
//!
//! No lock is taken, and caches are not relied on. A file is written under a unique temporary name
//! and gets its own name once it is complete: a reader sees all of it or nothing. The first writer
//! that links its file wins.
//!
//! The deadline is checked between items and between pieces of 4 MiB. A call to a mount that hangs
//! cannot be interrupted: its client is blocked until the mount is back or gives up (`soft`).

use std::path::{Path, PathBuf};

use crate::base::clock::Clock;
use crate::base::machine::random_bytes;
use crate::base::status::{self, Error};
use crate::fail;
use crate::io::shared_dir::{Folder, Number, SharedFile, Span};
use crate::tier::remote::name::Prefix;
use crate::tier::remote::sweep::Sweep;
use crate::tier::remote::{
    Caps, Client, Gets, Name, Part, Puts, Queries, Remote, RemoteError, Server,
};

/// Bytes that are moved between two checks of the deadline.
const PIECE_BYTES: u64 = 4 << 20;
/// Prefix of temporary files. No object's name begins with it: `t` is no hexadecimal digit.
pub(super) const TEMPORARY: &[u8] = b"tmp-";
/// Attempts to find an unused temporary name.
const TRIES: u32 = 4;

/// Options of a shared directory.
#[derive(Clone)]
pub struct DirOpts {
    /// It must exist: a missing mount is not replaced by a new folder.
    pub path: PathBuf,
    /// Prefix of all names.
    pub prefix: Prefix,
    /// A put succeeds only after the object is on the server's disks.
    pub fsync: bool,
    /// The clock of deadlines.
    pub clock: Clock,
}

/// A shared directory.
pub struct Dir(DirOpts);

impl Dir {
    /// A directory that is opened when it is first used.
    pub fn new(opts: DirOpts) -> Dir {
        Dir(opts)
    }
}

impl Remote for Dir {
    fn caps(&self) -> Caps {
        Caps {
            preferred_bytes: 8 << 20,
            max_bytes: MAX_BYTES,
            batch: 16,
            names: 64,
            ranges: true,
            first_wins: true,
            client_bytes: 64 << 10,
        }
    }

    fn client(&self) -> Box<dyn Client> {
        let sweep = Sweep::default();
        Box::new(DirClient { opts: self.0.clone(), base: None, own: None, written: 0, sweep })
    }
}

struct DirClient {
    opts: DirOpts,
    /// The folder of the version, and its tenant.
    base: Option<(u64, Folder)>,
    /// Random part of its temporary names.
    own: Option<[u8; 12]>,
    /// Temporary files that it created.
    written: u64,
    sweep: Sweep,
}

/// The error of a system call.
fn error_of(number: Number) -> RemoteError {
    match number {
        libc::ENOENT => RemoteError::Absent,
        libc::ENOSPC | libc::EDQUOT => RemoteError::Full,
        libc::EROFS => RemoteError::ReadOnly,
        libc::EACCES | libc::EPERM => RemoteError::Denied,
        libc::EFBIG | libc::ENAMETOOLONG => RemoteError::TooLong,
        libc::ETIMEDOUT => RemoteError::Timeout,
        // The path exists, but no client created it.
        libc::ELOOP | libc::ENOTDIR | libc::EISDIR | libc::ENXIO | libc::EEXIST => {
            RemoteError::Malformed
        }
        libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN | libc::EBUSY => {
            RemoteError::Busy
        }
        _ => RemoteError::Unreachable,
    }
}

/// Whether a call may succeed if it is repeated with folders that are opened anew.
fn is_transient(number: Number) -> bool {
    matches!(number, libc::ESTALE | libc::EINTR | libc::EIO)
}

/// Path of an object's file: its folders, and the file.
struct FilePath {
    folders: [[u8; 2]; 2],
    file: Vec<u8>,
}

impl FilePath {
    fn of(name: &Name) -> FilePath {
        let digits: Vec<u8> = name.hash.iter().flat_map(|byte| hex(*byte)).collect();
        let pair = |at: usize| [digits[at], digits[at + 1]];
        FilePath { folders: [pair(0), pair(2)], file: digits[4..].to_vec() }
    }
}

/// The hexadecimal digits of a byte.
pub(super) fn hex(byte: u8) -> [u8; 2] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]
}

/// Whether missing folders are created, and whether they must survive a power failure.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Absent,
    Made { synced_names: bool },
}

fn open(above: &Folder, name: &[u8], missing: Missing) -> Result<Folder, Number> {
    match missing {
        Missing::Absent => above.folder(name),
        Missing::Made { synced_names } => above.folder_or_create(name, synced_names),
    }
}

impl DirClient {
    /// The folder of an object's file.
    fn folder(&mut self, name: &Name, missing: Missing) -> Result<(Folder, Vec<u8>), Number> {
        let places = FilePath::of(name);
        let base = self.base(name.tenant, missing)?;
        let [first, second] = places.folders;
        let opened = open(base, &first, missing).and_then(|f| open(&f, &second, missing));
        if opened.is_err() {
            // Another process may have created the prefix again.
            self.base = None;
        }
        Ok((opened?, places.file))
    }

    /// The folder of the version.
    fn base(&mut self, tenant: u64, missing: Missing) -> Result<&Folder, Number> {
        let known = self.base.take().filter(|(of, _)| *of == tenant);
        let folder = match known {
            Some((_, folder)) => folder,
            None => {
                let mut path = Vec::new();
                self.opts.prefix.write(&Name { tenant, hash: [0; 20] }, &mut path);
                let mut folder = Folder::root(&self.opts.path)?;
                let mut names: Vec<&[u8]> = path.split(|&byte| byte == b'/').collect();
                names.pop();
                for name in names {
                    folder = open(&folder, name, missing)?;
                }
                folder
            }
        };
        Ok(&self.base.insert((tenant, folder)).1)
    }

    /// Runs `call`; repeats it once if that may help.
    fn with_retry<T>(
        &mut self,
        mut call: impl FnMut(&mut DirClient) -> Result<T, Failure>,
    ) -> Result<T, RemoteError> {
        let mut result = call(self);
        if let Err(Failure::Number(number)) = result
            && is_transient(number)
        {
            self.base = None;
            result = call(self);
        }
        result.map_err(|failure| match failure {
            Failure::Number(number) => error_of(number),
            Failure::RemoteError(error) => error,
        })
    }

    fn has_expired(&self, deadline_ns: u64) -> bool {
        self.opts.clock.now_ns() >= deadline_ns
    }

    fn check(&self, deadline_ns: u64) -> Result<(), Failure> {
        if self.has_expired(deadline_ns) { Err(RemoteError::Timeout.into()) } else { Ok(()) }
    }

    /// # Safety
    /// The memory of the parts is valid, and no other thread uses it during the call.
    unsafe fn get_one(
        &mut self,
        name: &Name,
        offset: u64,
        parts: &[Part],
        deadline_ns: u64,
    ) -> Result<u64, Failure> {
        self.check(deadline_ns)?;
        let (folder, file) = self.folder(name, Missing::Absent)?;
        let file = folder.open(&file)?;
        let facts = file.facts()?;
        if !facts.regular {
            return Err(RemoteError::Malformed.into());
        }
        let mut left = facts.bytes.saturating_sub(offset);
        let mut at = offset;
        for part in parts {
            let mut done = 0;
            while done < part.bytes && left > 0 {
                self.check(deadline_ns)?;
                let bytes = (part.bytes - done).min(left).min(PIECE_BYTES);
                let span = Span { address: part.address.wrapping_add(done as usize), bytes };
                // SAFETY: the caller's guarantee; a piece of the part.
                let got = unsafe { file.read(span, at) }?;
                if got == 0 {
                    // The file was longer when it was opened.
                    return Err(RemoteError::Malformed.into());
                }
                (done, at, left) = (done + got, at + got, left - got);
            }
        }
        Ok(at - offset)
    }

    /// # Safety
    /// The memory of the parts is valid, and no one writes it.
    unsafe fn put_one(
        &mut self,
        name: &Name,
        parts: &[Part],
        deadline_ns: u64,
    ) -> Result<bool, Failure> {
        self.check(deadline_ns)?;
        let synced_names = self.opts.fsync;
        let (folder, file) = self.folder(name, Missing::Made { synced_names })?;
        match folder.facts(&file) {
            Ok(facts) if facts.regular => {
                // Its writer may not have synced it.
                let synced = || folder.open(&file)?.sync().and_then(|()| folder.sync());
                return Ok(if synced_names { synced().map(|()| true)? } else { true });
            }
            Ok(_) => return Err(RemoteError::Malformed.into()),
            Err(libc::ENOENT) => {}
            Err(number) => return Err(number.into()),
        }
        let (temporary, open) = self.create(&folder)?;
        // SAFETY: the caller's guarantee.
        let written = unsafe { self.write(open, parts, deadline_ns) };
        let done = written.and_then(|()| publish(&folder, &temporary, &file));
        // A rename left no temporary file; a link left one that is no longer needed.
        let _ = folder.remove(&temporary);
        let existed = done?;
        if synced_names {
            folder.sync()?;
        }
        Ok(existed)
    }

    /// Creates a file under a unique temporary name.
    fn create(&mut self, folder: &Folder) -> Result<(Vec<u8>, SharedFile), Failure> {
        let own = match self.own {
            Some(own) => own,
            None => random_bytes().map_err(|_| RemoteError::Busy)?,
        };
        self.own = Some(own);
        let mut number = libc::EEXIST;
        for _ in 0..TRIES {
            self.written += 1;
            let mut name = TEMPORARY.to_vec();
            name.extend(own.iter().flat_map(|&byte| hex(byte)));
            name.extend(self.written.to_be_bytes().iter().flat_map(|&byte| hex(byte)));
            match folder.create(&name) {
                Ok(file) => return Ok((name, file)),
                Err(libc::EEXIST) => {}
                Err(other) => {
                    number = other;
                    break;
                }
            }
        }
        // The folder existed a moment ago.
        Err(if number == libc::ENOENT { RemoteError::Busy.into() } else { number.into() })
    }

    /// # Safety
    /// As [`DirClient::put_one`].
    unsafe fn write(
        &self,
        file: SharedFile,
        parts: &[Part],
        deadline_ns: u64,
    ) -> Result<(), Failure> {
        let mut at = 0;
        for part in parts {
            let mut done = 0;
            while done < part.bytes {
                self.check(deadline_ns)?;
                let bytes = (part.bytes - done).min(PIECE_BYTES);
                let span = Span { address: part.address.wrapping_add(done as usize), bytes };
                // SAFETY: the caller's guarantee; a piece of the part.
                let count = unsafe { file.write(span, at) }?;
                if count == 0 {
                    return Err(RemoteError::Full.into());
                }
                (done, at) = (done + count, at + count);
            }
        }
        if self.opts.fsync {
            file.sync()?;
        }
        file.close()?;
        Ok(())
    }

    fn lookup_one(&mut self, name: &Name, deadline_ns: u64) -> Result<u64, Failure> {
        self.check(deadline_ns)?;
        let (folder, file) = self.folder(name, Missing::Absent)?;
        let facts = folder.facts(&file)?;
        if facts.regular { Ok(facts.bytes) } else { Err(RemoteError::Malformed.into()) }
    }

    fn remove_one(&mut self, name: &Name, deadline_ns: u64) -> Result<u64, Failure> {
        self.check(deadline_ns)?;
        let removed = self.folder(name, Missing::Absent).and_then(|(f, file)| f.remove(&file));
        match removed {
            Ok(()) | Err(libc::ENOENT) => Ok(0),
            Err(number) => Err(number.into()),
        }
    }

    /// Writes, reads and removes a file; returns the time of the write by the server's clock.
    fn try_out(&mut self, warnings: &mut Vec<String>) -> Result<i64, Failure> {
        self.base = None;
        self.base(0, Missing::Made { synced_names: false })?;
        let Some((_, base)) = self.base.take() else { return Err(RemoteError::Unreachable.into()) };
        let (name, file) = self.create(&base)?;
        let mut word = *b"kvtier";
        let span = Span { address: word.as_mut_ptr(), bytes: word.len() as u64 };
        // SAFETY: a local array.
        let tried = unsafe { file.write(span, 0) }
            .and_then(|_| file.close())
            .and_then(|()| base.open(&name))
            .and_then(|file| {
                // SAFETY: as above.
                unsafe { file.read(span, 0) }?;
                file.facts()
            });
        let mut second = name.clone();
        second.push(b'2');
        if tried.is_ok() && base.link(&name, &second).is_err() {
            warnings.push(
                "the file system has no hard links: if two stores write the same object at once, \
                the last write may win"
                    .to_string(),
            );
        }
        let _ = base.remove(&second);
        let _ = base.remove(&name);
        self.base = Some((0, base));
        let facts = tried?;
        if facts.bytes != word.len() as u64 || word != *b"kvtier" {
            warnings.push("a file that was written could not be read back unchanged".to_string());
        }
        Ok(facts.written_s)
    }
}

/// Gives a complete file its object's name; whether the name existed.
fn publish(folder: &Folder, temporary: &[u8], file: &[u8]) -> Result<bool, Failure> {
    match folder.link(temporary, file) {
        Ok(()) => return Ok(false),
        Err(libc::EEXIST) => return Ok(true),
        Err(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS | libc::EMLINK | libc::EINVAL) => {}
        Err(number) => return Err(number.into()),
    }
    // Some file systems have no hard links.
    match folder.rename(temporary, file, true) {
        Ok(()) => Ok(false),
        Err(libc::EEXIST) => Ok(true),
        // Nor a rename that keeps an existing file. Of two writers at the same moment the last one
        // wins then. That does no harm: either file is complete.
        Err(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP) => {
            folder.rename(temporary, file, false)?;
            Ok(false)
        }
        Err(number) => Err(number.into()),
    }
}

/// Why a call failed.
enum Failure {
    Number(Number),
    RemoteError(RemoteError),
}

impl From<Number> for Failure {
    fn from(number: Number) -> Failure {
        Failure::Number(number)
    }
}

impl From<RemoteError> for Failure {
    fn from(error: RemoteError) -> Failure {
        Failure::RemoteError(error)
    }
}

/// Describes the directory; adds warnings about its permissions.
fn describe(path: &Path, warnings: &mut Vec<String>) -> status::Result<String> {
    let place = path.display();
    let failed = |number: Number| {
        let cause = std::io::Error::from_raw_os_error(number);
        Error::new(error_of(number).status(), format!("{place}: {cause}"))
    };
    let root = Folder::root(path).map_err(failed)?;
    let (facts, system) = (root.own_facts().map_err(failed)?, root.system().map_err(failed)?);
    if facts.mode & 0o002 != 0 && facts.mode & 0o1000 == 0 {
        warnings.push(format!("every user may rename files in {place}: set the sticky bit or remove the write permission"));
    }
    Ok(format!("directory {place} ({}, {} MiB free)", system.name(), system.free_bytes >> 20))
}

impl Client for DirClient {
    fn greet(&mut self, deadline_ns: u64) -> status::Result<Server> {
        if self.has_expired(deadline_ns) {
            return Err(RemoteError::Timeout.into());
        }
        let mut warnings = Vec::new();
        let words = describe(&self.opts.path, &mut warnings)?;
        match self.with_retry(|client| client.try_out(&mut warnings)) {
            Ok(now_s) => {
                if let Some((_, base)) = &self.base {
                    let late = || self.opts.clock.now_ns() >= deadline_ns;
                    self.sweep.step(base, now_s, late);
                }
            }
            // Existing objects can still be read.
            Err(error @ (RemoteError::Full | RemoteError::ReadOnly | RemoteError::Denied)) => {
                warnings.push(format!("nothing can be stored: {}", Error::from(error)));
            }
            Err(error) => fail!(Unavailable, "{words}: {}", Error::from(error)),
        }
        warnings.dedup();
        Ok(Server { words, warnings })
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        for at in 0..gets.items.len() {
            let (name, offset) = (gets.items[at].name, gets.items[at].offset);
            let parts = gets.parts_of(at);
            // SAFETY: the caller's guarantee.
            let result = self
                .with_retry(|client| unsafe { client.get_one(&name, offset, parts, deadline_ns) });
            gets.items[at].result = result;
        }
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        for at in 0..puts.items.len() {
            let name = puts.items[at].name;
            let parts = puts.parts_of(at);
            let result = match puts.bytes_of(at) {
                bytes if bytes > MAX_BYTES => Err(RemoteError::TooLong),
                // SAFETY: the caller's guarantee.
                _ => self.with_retry(|client| unsafe { client.put_one(&name, parts, deadline_ns) }),
            };
            puts.items[at].result = result.map_err(|error| match error {
                // The folder was removed while the object was written: someone tidies.
                RemoteError::Absent => RemoteError::Busy,
                other => other,
            });
        }
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        for item in &mut queries.items {
            item.result = self.with_retry(|client| client.lookup_one(&item.name, deadline_ns));
        }
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        for item in &mut queries.items {
            item.result = self.with_retry(|client| client.remove_one(&item.name, deadline_ns));
        }
    }
}

/// Longest object.
const MAX_BYTES: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;
    use std::time::{Duration, SystemTime};

    use super::*;

    const DISTANT_FUTURE: u64 = u64::MAX;

    /// A directory for a test, removed when it is dropped.
    struct Place(PathBuf);

    impl Place {
        fn new(what: &str) -> Place {
            let name = format!("kvtier-dir-{what}-{}", std::process::id());
            let place = Place(std::env::temp_dir().join(name));
            let _ = fs::remove_dir_all(&place.0);
            fs::create_dir(&place.0).unwrap();
            place
        }

        /// A file system of `bytes` bytes; None = mounting is not allowed.
        fn mounted(what: &str, bytes: u64) -> Option<Place> {
            let place = Place::new(what);
            let size = format!("size={bytes}");
            let mut mount = Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&place.0);
            let mounted = mount.stderr(std::process::Stdio::null()).status();
            if mounted.is_ok_and(|status| status.success()) {
                return Some(place);
            }
            println!("SKIP {what}: no file system may be mounted here");
            None
        }

        fn remote(&self) -> Dir {
            let prefix = Prefix::new("pre").unwrap();
            Dir::new(DirOpts { path: self.0.clone(), prefix, fsync: false, clock: Clock::real() })
        }

        fn file(&self, name: &Name) -> PathBuf {
            let mut path = self.0.join("pre");
            if name.tenant != 0 {
                path = path.join(format!("t{}", name.tenant));
            }
            let digits: String = name.hash.iter().map(|byte| format!("{byte:02x}")).collect();
            path.join("v1").join(&digits[..2]).join(&digits[2..4]).join(&digits[4..])
        }

        /// All files.
        fn files(&self) -> Vec<PathBuf> {
            let (mut files, mut folders) = (Vec::new(), vec![self.0.clone()]);
            while let Some(folder) = folders.pop() {
                for entry in fs::read_dir(folder).unwrap() {
                    let path = entry.unwrap().path();
                    let kind = fs::symlink_metadata(&path).unwrap();
                    if kind.is_dir() { folders.push(path) } else { files.push(path) }
                }
            }
            files
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ =
                Command::new("umount").arg(&self.0).stderr(std::process::Stdio::null()).status();
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn name(number: u8) -> Name {
        Name { tenant: 0, hash: [number; 20] }
    }

    fn put(client: &mut dyn Client, name: Name, bytes: &[u8]) -> Result<bool, RemoteError> {
        let mut puts = Puts::default();
        puts.object(name);
        puts.part(bytes.as_ptr(), bytes.len() as u64);
        // SAFETY: the bytes are borrowed until the call returns.
        unsafe { client.put(&mut puts, DISTANT_FUTURE) };
        puts.items[0].result
    }

    fn get(client: &mut dyn Client, name: Name, room: usize) -> Result<Vec<u8>, RemoteError> {
        let (mut gets, mut bytes) = (Gets::default(), vec![0; room]);
        gets.object(name, 0);
        gets.part(bytes.as_mut_ptr(), room as u64);
        // SAFETY: no one reads the bytes before the call returns.
        unsafe { client.get(&mut gets, DISTANT_FUTURE) };
        let arrived_bytes = gets.items[0].result?;
        bytes.truncate(arrived_bytes as usize);
        Ok(bytes)
    }

    fn lookup(client: &mut dyn Client, name: Name) -> Result<u64, RemoteError> {
        let mut queries = Queries::default();
        queries.name(name);
        client.lookup(&mut queries, DISTANT_FUTURE);
        queries.items[0].result
    }

    fn remove(client: &mut dyn Client, name: Name) -> Result<u64, RemoteError> {
        let mut queries = Queries::default();
        queries.name(name);
        client.remove(&mut queries, DISTANT_FUTURE);
        queries.items[0].result
    }

    #[test]
    fn files_have_the_documented_paths_and_private_modes() {
        let place = Place::new("private");
        let mut client = place.remote().client();
        for name in [name(0xAB), Name { tenant: 42, ..name(0xAB) }] {
            assert_eq!(put(&mut *client, name, b"object"), Ok(false));
            let mut path = place.file(&name);
            assert_eq!(fs::read(&path).unwrap(), b"object");
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            while path.pop() && path != place.0 {
                let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
                assert_eq!(mode, 0o700, "{}", path.display());
            }
        }
        assert_eq!(place.files().len(), 2);
    }

    #[test]
    fn truncated_files_are_short_and_empty_files_exist() {
        let place = Place::new("short");
        let mut client = place.remote().client();
        put(&mut *client, name(1), &[7; 10_000]).unwrap();
        let file = fs::OpenOptions::new().write(true).open(place.file(&name(1))).unwrap();
        file.set_len(6000).unwrap();
        assert_eq!(get(&mut *client, name(1), 10_001), Ok(vec![7; 6000]));
        file.set_len(0).unwrap();
        assert_eq!(get(&mut *client, name(1), 10_001), Ok(vec![]));
        assert_eq!(lookup(&mut *client, name(1)), Ok(0));
        fs::write(place.file(&name(1)), b"garbage").unwrap();
        assert_eq!(get(&mut *client, name(1), 10_001), Ok(b"garbage".to_vec()));
    }

    #[test]
    fn a_recreated_directory_is_found_again() {
        let place = Place::new("gone");
        let mut client = place.remote().client();
        put(&mut *client, name(1), b"one").unwrap();
        fs::remove_dir_all(place.0.join("pre")).unwrap();
        assert_eq!(get(&mut *client, name(1), 9), Err(RemoteError::Absent));
        put(&mut *place.remote().client(), name(1), b"two").unwrap();
        let _ = get(&mut *client, name(1), 9);
        assert_eq!(get(&mut *client, name(1), 9), Ok(b"two".to_vec()));
        fs::remove_dir_all(&place.0).unwrap();
        let mut client = place.remote().client();
        assert!(client.greet(DISTANT_FUTURE).is_err() && put(&mut *client, name(1), b"x").is_err());
        assert!(!place.0.exists(), "a mount that is missing is not made up for");
    }

    /// Writes the same names as other writers, and reads the objects.
    fn compete(remote: &Dir, writer: u8) {
        let mut client = remote.client();
        for number in 0..40 {
            // All bytes of an object are from one writer.
            let bytes = vec![writer; 200_000 + usize::from(number)];
            put(&mut *client, name(number), &bytes).unwrap();
            let found = get(&mut *client, name(number), 300_000).unwrap();
            assert_eq!(found.len(), bytes.len());
            assert!(found.iter().all(|byte| *byte == found[0]), "torn");
        }
    }

    #[test]
    fn the_first_of_many_writers_wins_and_no_read_is_torn() {
        if let Ok(path) = std::env::var("KVTIER_TEST_DIR") {
            let place = Place(PathBuf::from(path));
            compete(&place.remote(), b'c');
            return std::mem::forget(place);
        }
        let place = Place::new("many");
        let this = "tier::remote::dir::tests::the_first_of_many_writers_wins_and_no_read_is_torn";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", this]).env("KVTIER_TEST_DIR", &place.0);
        let mut child = child.stdout(std::process::Stdio::null()).spawn().unwrap();
        std::thread::scope(|scope| {
            for writer in [b'a', b'b'] {
                let remote = place.remote();
                scope.spawn(move || compete(&remote, writer));
            }
        });
        assert!(child.wait().unwrap().success());
        let mut client = place.remote().client();
        let before: Vec<_> =
            (0..40).map(|n| get(&mut *client, name(n), 300_000).unwrap()).collect();
        compete(&place.remote(), b'd');
        for (number, before) in (0..).zip(before) {
            assert!(get(&mut *client, name(number), 300_000).unwrap() == before, "{number}");
        }
        assert_eq!(place.files().len(), 40, "no file is left that is no object");
    }

    #[test]
    fn a_full_directory_reports_full_and_recovers() {
        let Some(place) = Place::mounted("full", 1 << 20) else { return };
        let mut client = place.remote().client();
        let bytes = vec![3; 300_000];
        let results: Vec<_> =
            (0..5).map(|number| put(&mut *client, name(number), &bytes)).collect();
        let full = Err(RemoteError::Full);
        assert_eq!(results, [Ok(false), Ok(false), Ok(false), full, full]);
        assert_eq!(place.files().len(), 3, "objects that did not fit were removed");
        assert!(get(&mut *client, name(2), 400_000).unwrap() == bytes);
        assert!(client.greet(DISTANT_FUTURE).is_ok());
        remove(&mut *client, name(0)).unwrap();
        assert_eq!(put(&mut *client, name(3), &bytes), Ok(false));
    }

    #[test]
    fn a_read_only_directory_is_read() {
        let Some(place) = Place::mounted("read-only", 1 << 20) else { return };
        let mut client = place.remote().client();
        put(&mut *client, name(1), b"object").unwrap();
        let remount = Command::new("mount").args(["-o", "remount,ro"]).arg(&place.0).status();
        assert!(remount.unwrap().success());
        for client in [&mut *client, &mut *place.remote().client()] {
            assert_eq!(put(client, name(2), b"object"), Err(RemoteError::ReadOnly));
            assert_eq!(put(client, name(1), b"object"), Ok(true));
            assert_eq!(get(client, name(1), 9), Ok(b"object".to_vec()));
            assert_eq!(remove(client, name(1)), Err(RemoteError::ReadOnly));
            let server = client.greet(DISTANT_FUTURE).unwrap();
            assert!(server.warnings.iter().any(|w| w.contains("read-only")), "{server:?}");
        }
    }

    #[test]
    fn missing_permission_is_denied() {
        // SAFETY: it has no preconditions.
        if unsafe { libc::geteuid() } == 0 {
            println!("SKIP what_is_forbidden_is_denied: nothing is forbidden to root");
            return;
        }
        let place = Place::new("denied");
        let mut client = place.remote().client();
        put(&mut *client, name(1), b"object").unwrap();
        let folder = place.file(&name(1)).parent().unwrap().to_path_buf();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o500)).unwrap();
        assert_eq!(remove(&mut *client, name(1)), Err(RemoteError::Denied));
        assert_eq!(get(&mut *client, name(1), 9), Ok(b"object".to_vec()));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
    }

    #[test]
    fn errno_values_map_to_remote_errors() {
        for (number, wanted) in [
            (libc::ENOENT, RemoteError::Absent),
            (libc::ENOSPC, RemoteError::Full),
            (libc::EDQUOT, RemoteError::Full),
            (libc::EROFS, RemoteError::ReadOnly),
            (libc::EACCES, RemoteError::Denied),
            (libc::EPERM, RemoteError::Denied),
            (libc::ELOOP, RemoteError::Malformed),
            (libc::ESTALE, RemoteError::Unreachable),
            (libc::EIO, RemoteError::Unreachable),
            (libc::EMFILE, RemoteError::Busy),
        ] {
            assert_eq!(error_of(number), wanted, "{number}");
        }
        assert!([libc::ESTALE, libc::EIO, libc::EINTR].into_iter().all(is_transient));
        assert!(!is_transient(libc::ENOENT) && !is_transient(libc::ENOSPC));
    }

    #[test]
    fn foreign_links_pipes_and_folders_are_not_followed() {
        let place = Place::new("hostile");
        let outside = Place::new("hostile-outside");
        let mut client = place.remote().client();
        put(&mut *client, name(1), b"object").unwrap();
        let secret = outside.0.join("secret");
        fs::write(&secret, b"not to be read").unwrap();
        let beside = |number: u8| {
            let file = place.file(&name(number));
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            file
        };
        symlink(&secret, beside(2)).unwrap();
        fs::create_dir(beside(3)).unwrap();
        let pipe = std::ffi::CString::new(beside(4).into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        let _socket = std::os::unix::net::UnixListener::bind_addr(
            &std::os::unix::net::SocketAddr::from_pathname(outside.0.join("s")).unwrap(),
        );
        fs::rename(outside.0.join("s"), beside(5)).unwrap();
        symlink(outside.0.join("nowhere"), beside(6)).unwrap();
        for number in 2..=6 {
            let bad = Err(RemoteError::Malformed);
            assert_eq!(
                get(&mut *client, name(number), 100).map(drop),
                bad.map(drop::<u64>),
                "{number}"
            );
            assert_eq!(lookup(&mut *client, name(number)), bad, "{number}");
            assert_eq!(put(&mut *client, name(number), b"x").map(drop), bad.map(drop), "{number}");
        }
        // Removing a link removes the name only.
        assert_eq!(remove(&mut *client, name(2)), Ok(0));
        assert_eq!(remove(&mut *client, name(3)), Err(RemoteError::Malformed));
        assert_eq!(fs::read(&secret).unwrap(), b"not to be read");
        // Links to folders are not followed either.
        let leaf = beside(7).parent().unwrap().to_path_buf();
        fs::remove_dir(&leaf).unwrap();
        symlink(&outside.0, &leaf).unwrap();
        symlink(&outside.0, place.0.join("pre").join("t9")).unwrap();
        for name in [name(7), Name { tenant: 9, ..name(1) }] {
            assert_eq!(put(&mut *client, name, b"x"), Err(RemoteError::Malformed));
            assert_eq!(get(&mut *client, name, 9), Err(RemoteError::Malformed));
            assert_eq!(lookup(&mut *client, name), Err(RemoteError::Malformed));
            assert!(remove(&mut *client, name).is_err());
        }
        assert_eq!(outside.files(), [secret]);
        // A link to the directory itself is the administrator's choice.
        let link = outside.0.join("link");
        symlink(&place.0, &link).unwrap();
        let remote = Dir(DirOpts { path: link, ..place.remote().0 });
        assert_eq!(get(&mut *remote.client(), name(1), 9), Ok(b"object".to_vec()));
    }

    #[test]
    fn temporary_files_of_dead_writers_are_swept_in_steps() {
        let place = Place::new("sweep");
        let mut client = place.remote().client();
        let old = SystemTime::now() - Duration::from_secs(25 * 3600);
        let mut left = Vec::new();
        for number in 0..200u8 {
            put(&mut *client, name(number), b"object").unwrap();
            let folder = place.file(&name(number)).parent().unwrap().to_path_buf();
            for (what, is_old) in [("tmp-", true), ("tmp-", false), ("mine-", true)] {
                let digits = if is_old { "a" } else { "b" };
                let file = folder.join(format!("{what}{}", digits.repeat(40)));
                fs::write(&file, b"half").unwrap();
                if is_old {
                    fs::File::options().write(true).open(&file).unwrap().set_modified(old).unwrap();
                }
                left.push((file, what == "tmp-" && is_old));
            }
        }
        let outside = Place::new("sweep-outside");
        let target = outside.0.join("file");
        fs::write(&target, b"x").unwrap();
        fs::File::options().write(true).open(&target).unwrap().set_modified(old).unwrap();
        let link = place.file(&name(0)).with_file_name(format!("tmp-{}", "c".repeat(40)));
        symlink(&target, &link).unwrap();
        let is_stale = |left: &[(PathBuf, bool)]| {
            left.iter().filter(|(f, is_stale)| *is_stale && f.exists()).count()
        };
        client.greet(DISTANT_FUTURE).unwrap();
        let after_one = is_stale(&left);
        assert!((100..200).contains(&after_one), "{after_one} are left");
        (0..12).for_each(|_| drop(client.greet(DISTANT_FUTURE).unwrap()));
        assert_eq!(is_stale(&left), 0);
        assert!(left.iter().all(|(file, is_stale)| *is_stale || file.exists()));
        assert!(target.exists() && fs::symlink_metadata(link).is_ok());
        assert_eq!(lookup(&mut *client, name(199)), Ok(6));
        // A greeting after its deadline fails.
        assert!(client.greet(1).is_err());
    }
}
