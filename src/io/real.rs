//! Files of a real directory: O_DIRECT and io_uring where both work, and logged fallbacks where one
//! does not.

use std::path::Path;

use crate::base::fork;
use crate::base::status::Result;
use crate::base::sync::{Arc, Mutex};
use crate::fail;
use crate::io::directory::{Directory, facts_of};
use crate::io::engine::Engine;
use crate::io::files::{Entry, FileId, Files, LOCK_NAME, Next, Piece, Source, check_name};
use crate::io::lock::Lock;
use crate::io::open_file::{OpenFile, Poison};
use crate::io::open_files::OpenFiles;
use crate::io::probe;

/// Default limit of the alignment for O_DIRECT: a block of the store.
pub const MAX_ALIGN_BYTES: u64 = 4096;

/// Options to open a directory.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealOpts {
    /// Use the page cache.
    pub buffered: bool,
    /// Do not use io_uring.
    pub no_uring: bool,
    /// Transfers in flight of one caller; 0 = the maximum.
    pub depth: u32,
    /// Use the page cache if direct transfers need a larger alignment; 0 = [`MAX_ALIGN_BYTES`].
    pub max_align_bytes: u64,
}

/// An open directory.
pub struct RealFiles {
    directory: Directory,
    files: Mutex<OpenFiles<Arc<OpenFile>>>,
    engine: Engine,
    align: u64,
    names_poison: Poison,
    /// Released last: fields are dropped in order of declaration.
    lock: Lock,
}

impl RealFiles {
    /// Opens a directory exclusively, and creates it if it is absent.
    pub fn open(path: &Path, opts: &RealOpts) -> Result<RealFiles> {
        fork::arm()?;
        fork::check()?;
        let directory = Directory::open(path)?;
        let lock = Lock::take(&directory)?;
        let mut reasons: Vec<String> = Vec::new();
        let mut align = 1;
        if !opts.buffered {
            match direct_alignment(&directory, &lock, opts.max_align_bytes) {
                Ok(found) => align = found,
                Err(error) => reasons.push(format!("no direct transfers: {}", error.message())),
            }
        }
        let place = directory.path().display().to_string();
        let engine = Engine::new(&place, opts.no_uring, opts.depth, reasons);
        Ok(RealFiles {
            directory,
            files: Mutex::new(OpenFiles::default()),
            engine,
            align,
            names_poison: Poison::default(),
            lock,
        })
    }

    fn file(&self, id: FileId) -> Result<Arc<OpenFile>> {
        self.files.lock().get(id).cloned()
    }

    fn flags(&self) -> i32 {
        if self.align > 1 { libc::O_DIRECT } else { 0 }
    }
}

impl Drop for RealFiles {
    /// Removes what opening created, if the directory is empty.
    fn drop(&mut self) {
        if !self.lock.is_created() || fork::check().is_err() {
            return;
        }
        // Safe while the lock is held: nothing else has opened the file.
        if matches!(self.directory.is_empty_except(LOCK_NAME), Ok(true))
            && self.directory.remove(LOCK_NAME).is_ok()
        {
            self.directory.remove_if_created();
        }
    }
}

/// Alignment for direct transfers, or why they do not work.
fn direct_alignment(directory: &Directory, lock: &Lock, most: u64) -> Result<u64> {
    let align = match lock.file().map_or(Ok(0), probe::reported_alignment)? {
        0 => probed_alignment(directory)?,
        reported => reported,
    };
    let most = if most == 0 { MAX_ALIGN_BYTES } else { most };
    if align > most || !align.is_power_of_two() {
        fail!(
            Unavailable,
            "O_DIRECT needs an alignment of {align} bytes here, the limit is {most}: open the disk with \
             buffered=true"
        );
    }
    Ok(align)
}

/// Alignment found by trying. Second choice: it needs space on the disk, and what works may be less
/// than what is guaranteed.
fn probed_alignment(directory: &Directory) -> Result<u64> {
    // Remove a probe file of a killed process. It would stay forever, since every process in a
    // container has the same pid.
    let left = format!(".kvt-probe-{}", std::process::id());
    if directory.remove(&left).is_ok() {
        log::info!("removed {left} of an interrupted probe");
    }
    probe::direct_alignment(directory.path())
}

impl Files for RealFiles {
    fn align_bytes(&self) -> u64 {
        self.align
    }

    fn engine(&self) -> &str {
        self.engine.name(self.align > 1)
    }

    fn fallback(&self) -> Option<&str> {
        self.engine.fallback()
    }

    fn list(&self) -> Result<Vec<Entry>> {
        fork::check()?;
        self.directory.list()
    }

    fn create(&self, name: &str, bytes: u64) -> Result<FileId> {
        fork::check()?;
        check_name(name)?;
        let flags = self.flags() | libc::O_CREAT | libc::O_EXCL;
        let file = OpenFile::new(self.directory.open_file(name, flags)?, name);
        let added = file.allocate(bytes).and_then(|()| self.files.lock().add(Arc::new(file)));
        if added.is_err() {
            // A partly allocated file is useless.
            if let Err(error) = self.directory.remove(name) {
                log::warn!("removing a file that could not be allocated failed: {error}");
            }
        }
        added
    }

    fn open(&self, name: &str) -> Result<FileId> {
        fork::check()?;
        check_name(name)?;
        let file = OpenFile::new(self.directory.open_file(name, self.flags())?, name);
        self.files.lock().add(Arc::new(file))
    }

    fn len(&self, file: FileId) -> Result<u64> {
        fork::check()?;
        let file = self.file(file)?;
        Ok(facts_of(file.fd())?.bytes)
    }

    fn close(&self, file: FileId) {
        if fork::check().is_ok() {
            let file = self.files.lock().remove(file);
            drop(file); // outside the lock: closing may write
        }
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        fork::check()?;
        check_name(from)?;
        check_name(to)?;
        self.directory.rename(from, to)
    }

    fn remove(&self, name: &str) -> Result<()> {
        fork::check()?;
        check_name(name)?;
        self.directory.remove(name)
    }

    fn sync_names(&self) -> Result<()> {
        fork::check()?;
        self.names_poison.sync("the directory", || self.directory.sync())?;
        self.directory.check_there()
    }

    fn sync(&self, file: FileId) -> Result<()> {
        fork::check()?;
        self.file(file)?.sync()?;
        self.directory.check_there()
    }

    unsafe fn transfer(&self, pieces: &mut [Piece]) {
        let forked = fork::check();
        for piece in pieces.iter_mut() {
            piece.begin(forked.clone().and_then(|()| piece.check(self.align)));
        }
        // SAFETY: the caller's promise.
        unsafe { self.engine.transfer(pieces, self.align, &|file| self.file(file)) };
    }

    unsafe fn stream(&self, source: &mut dyn Source) {
        let mut checked = Checked { source, align: self.align, forked: fork::check() };
        // SAFETY: the caller's promise.
        unsafe { self.engine.stream(&mut checked, self.align, &|file| self.file(file)) };
    }

    fn free_bytes(&self) -> Result<u64> {
        fork::check()?;
        self.directory.free_bytes()
    }
}

/// The valid pieces of a source; the others end with an error.
struct Checked<'a> {
    source: &'a mut dyn Source,
    align: u64,
    forked: Result<()>,
}

impl Source for Checked<'_> {
    fn next(&mut self) -> Next {
        loop {
            let (key, piece) = match self.source.next() {
                Next::Piece(key, piece) => (key, piece),
                other => return other,
            };
            match self.forked.clone().and_then(|()| piece.check(self.align)) {
                Ok(()) => return Next::Piece(key, piece),
                Err(error) => self.source.ended(key, Err(error)),
            }
        }
    }

    fn ended(&mut self, key: usize, result: Result<()>) {
        self.source.ended(key, result);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use crate::io::files::Access;
    use crate::io::scratch::{Scratch, bytes_of, memory, read, write};
    use crate::io::uring::Damage;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn open(path: &Path) -> Result<RealFiles> {
        RealFiles::open(path, &RealOpts::default())
    }

    fn refused(path: &Path, status: Status, words: &str) {
        let error = open(path).err().expect("refused");
        assert_eq!(error.status(), status, "{error}");
        assert!(error.message().contains(words), "{error}");
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).expect("found").mode() & 0o777
    }

    fn chmod(path: &Path, mode: u32) {
        let wanted = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(path, wanted).expect("changed");
    }

    #[test]
    fn directory_and_files_are_private() {
        let scratch = Scratch::new();
        let files = open(&scratch.0).expect("made");
        files.create("x", 4096).expect("created");
        assert_eq!(mode(&scratch.0), 0o700);
        assert_eq!(mode(&scratch.0.join("x")), 0o600);
        assert_eq!(mode(&scratch.0.join(LOCK_NAME)), 0o600);
        drop(files);
        chmod(&scratch.0, 0o750);
        refused(&scratch.0, Status::Invalid, "chmod 700");
        chmod(&scratch.0, 0o700);
        assert!(open(&scratch.0).is_ok());
        let empty = Scratch::new();
        std::fs::create_dir(&empty.0).expect("made");
        chmod(&empty.0, 0o755);
        assert!(open(&empty.0).is_ok(), "nothing is in it yet: it becomes private");
        assert_eq!(mode(&empty.0), 0o700);
    }

    #[test]
    fn links_are_not_followed_and_only_regular_files_are_opened() {
        let (scratch, outside) = (Scratch::new(), Scratch::new());
        let files = open(&scratch.0).expect("made");
        std::fs::create_dir(&outside.0).expect("made");
        let inside = |name: &str| scratch.0.join(name);
        std::fs::write(outside.0.join("secret"), "secret").expect("written");
        symlink(outside.0.join("secret"), inside("link")).expect("linked");
        std::fs::create_dir(inside("directory")).expect("made");
        std::fs::write(inside(".hidden"), "").expect("written");
        std::fs::write(inside("no name"), "").expect("written");
        let pipe = std::ffi::CString::new(inside("pipe").to_str().expect("text")).expect("text");
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        assert_eq!(files.list(), Ok(vec![]));
        files.create("x", 1).expect("created");
        for name in ["link", "directory", "pipe"] {
            let status = |result: Result<FileId>| result.map_err(|error| error.status());
            assert_eq!(status(files.open(name)), Err(Status::NotFound), "{name}");
            assert_eq!(status(files.create(name, 1)), Err(Status::State), "{name}");
            assert!(files.remove(name).is_err() && files.rename(name, "y").is_err(), "{name}");
        }
        assert_eq!(files.rename("x", "link"), Ok(()), "the link is replaced, not its target");
        assert_eq!(std::fs::read(outside.0.join("secret")).expect("found"), b"secret");
        drop(files);
        let link = Scratch::new();
        symlink(&scratch.0, &link.0).expect("linked");
        refused(&link.0, Status::Invalid, "link");
        let slash = format!("{}/", link.0.display());
        refused(Path::new(&slash), Status::Invalid, "link");
        refused(&link.0.join("."), Status::Invalid, "link");
        std::fs::remove_file(&link.0).expect("removed");
        refused(&outside.0.join("secret"), Status::Invalid, "a directory is needed");
        refused(&outside.0.join("no/such"), Status::NotFound, "no/such");
        std::fs::remove_file(inside(LOCK_NAME)).expect("removed");
        symlink(outside.0.join("secret"), inside(LOCK_NAME)).expect("linked");
        refused(&scratch.0, Status::NotFound, LOCK_NAME);
    }

    #[test]
    fn a_directory_of_another_user_is_rejected() {
        let scratch = Scratch::new();
        std::fs::create_dir(&scratch.0).expect("made");
        if std::os::unix::fs::chown(&scratch.0, Some(12_345), None).is_err() {
            return; // only root can give things away
        }
        refused(&scratch.0, Status::Invalid, "12345");
    }

    #[test]
    fn a_failed_sync_poisons_the_file() {
        let scratch = Scratch::new();
        let files = open(&scratch.0).expect("made");
        let (x, y) = (files.create("x", 4096), files.create("y", 4096));
        let (x, y) = (x.expect("created"), y.expect("created"));
        let open_x = files.file(x).expect("open");
        assert_eq!((files.sync(x), files.sync(y)), (Ok(()), Ok(())));
        // A pipe cannot be synced: it stands in for a disk that fails.
        let mut ends = [0; 2];
        // SAFETY: descriptors of this test; `kept` is restored below.
        unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            let kept = libc::dup(open_x.as_raw_fd());
            assert!(kept >= 0 && libc::dup2(ends[0], open_x.as_raw_fd()) >= 0);
            assert!(files.sync(x).is_err());
            assert!(libc::dup2(kept, open_x.as_raw_fd()) >= 0);
            [kept, ends[0], ends[1]].iter().for_each(|fd| assert_eq!(libc::close(*fd), 0));
        }
        let error = files.sync(x).expect_err("the disk works again, but who knows what is on it");
        assert!(error.status() == Status::Io && error.message().contains("failed before"));
        assert_eq!(files.sync(y), Ok(()), "another file is another matter");
    }

    #[test]
    fn a_full_disk_is_a_budget_error() {
        let shm = Path::new("/dev/shm");
        let scratch = Scratch(shm.join(format!("kvtier-io-full-{}", std::process::id())));
        let Ok(files) = open(&scratch.0) else { return };
        // tmpfs rejects the size at once, without filling up.
        let error = files.create("x", 1 << 50).expect_err("too large");
        assert_eq!(error.status(), Status::Budget, "{error}");
        assert_eq!(files.list(), Ok(vec![]));
        let x = files.create("x", 8192).expect("created");
        assert_eq!(write(&files, x, 0, 5, 4096), Ok(()));
        assert_eq!(read(&files, x, 0, 4096).expect("read"), [5; 4096]);
    }

    /// Pieces of a stream, of which at most three may be in flight.
    struct Stream {
        all: Vec<Piece>,
        at: usize,
        in_flight: usize,
        results: Vec<Option<Result<()>>>,
    }

    impl Source for Stream {
        fn next(&mut self) -> Next {
            let Some(piece) = self.all.get(self.at) else { return Next::End };
            if self.in_flight == 3 {
                return Next::Wait;
            }
            (self.at, self.in_flight) = (self.at + 1, self.in_flight + 1);
            Next::Piece(self.at - 1, piece.anew())
        }

        fn ended(&mut self, key: usize, result: Result<()>) {
            self.in_flight -= 1;
            assert!(self.results[key].replace(result).is_none(), "it ended before");
        }
    }

    #[test]
    fn every_piece_of_a_stream_ends_once() {
        for (no_uring, breaks) in [
            (false, None),
            (true, None),
            (false, Some(Damage::Cut)),
            (false, Some(Damage::Restricted)),
        ] {
            let scratch = Scratch::new();
            let opts = RealOpts { no_uring, depth: 2, ..RealOpts::default() };
            let files = RealFiles::open(&scratch.0, &opts).expect("made");
            let file = files.create("x", 64 << 12).expect("created");
            let stock = memory(64 << 12);
            bytes_of(&stock).chunks_mut(1 << 12).zip(1..).for_each(|(b, i)| b.fill(i));
            for access in [Access::Write, Access::Read] {
                let piece = |i: u64| {
                    let address = stock.range(i << 12, 1 << 12).expect("inside");
                    Piece::one(file, access, i << 12, address, 1 << 12)
                };
                let mut all: Vec<Piece> = (0..64).map(piece).collect();
                all[9].parts[0].address = std::ptr::null_mut();
                all[11].file = FileId(u32::MAX);
                all[63].parts[0].bytes = 0;
                let results = (0..64).map(|_| None).collect();
                let mut source = Stream { all, at: 0, in_flight: 0, results };
                if let (Some(how), Some(rings)) = (breaks, files.engine.rings()) {
                    rings.damage(how);
                }
                // SAFETY: the memory is this test's own.
                unsafe { files.stream(&mut source) };
                for (at, result) in source.results.iter().enumerate() {
                    let is_bad = at == 9 || at == 11;
                    let result = result.as_ref().expect("it has ended");
                    assert_eq!(result.is_err(), is_bad, "{at}: {result:?}");
                }
                if access == Access::Write {
                    bytes_of(&stock).fill(0);
                }
            }
            for (at, bytes) in bytes_of(&stock).chunks(1 << 12).enumerate() {
                let right = if [9, 11, 63].contains(&at) { 0 } else { at as u8 + 1 };
                assert!(bytes.iter().all(|byte| *byte == right), "piece {at}");
            }
        }
    }

    /// Writes and reads a batch; returns the engine's name.
    fn batch(files: &RealFiles, file: FileId, fill: u8) -> String {
        let stock = memory(32 << 12);
        for access in [Access::Write, Access::Read] {
            bytes_of(&stock).fill(if access == Access::Write { fill } else { 0 });
            let piece = |i: u64| {
                let address = stock.range(i << 12, 1 << 12).expect("inside");
                Piece::one(file, access, i << 12, address, 1 << 12)
            };
            let mut pieces: Vec<Piece> = (0..32).map(piece).collect();
            // SAFETY: the memory is this test's own.
            unsafe { files.transfer(&mut pieces) };
            assert!(pieces.iter().all(|piece| piece.result == Ok(())));
        }
        assert!(bytes_of(&stock).iter().all(|byte| *byte == fill));
        files.engine().to_string()
    }

    #[test]
    fn broken_rings_fall_back_to_threads() {
        for how in [Damage::Cut, Damage::Restricted] {
            let scratch = Scratch::new();
            let files = open(&scratch.0).expect("made");
            let Some(rings) = files.engine.rings() else { return };
            let file = files.create("x", 32 << 12).expect("created");
            assert!(batch(&files, file, 1).starts_with("io_uring"));
            rings.damage(how);
            let after = batch(&files, file, 2);
            // A ring that was cut is replaced by a sound one.
            let expected = if matches!(how, Damage::Cut) { "io_uring" } else { "threads" };
            assert!(after.starts_with(expected), "{how:?}: {after}");
            rings.damage(how);
            assert!(batch(&files, file, 3).starts_with("threads"), "{how:?}");
            assert!(files.fallback().expect("a reason").contains("no io_uring any more"));
            assert!(batch(&files, file, 4).starts_with("threads"));
        }
    }

    #[test]
    fn many_threads_share_the_rings() {
        let scratch = Scratch::new();
        let files = open(&scratch.0).expect("made");
        let ids: Vec<FileId> =
            (0..24).map(|i| files.create(&format!("f{i}"), 32 << 12).expect("created")).collect();
        std::thread::scope(|scope| {
            for (i, file) in ids.iter().enumerate() {
                let files = &files;
                scope.spawn(move || (0..20).for_each(|n| drop(batch(files, *file, (i + n) as u8))));
            }
        });
        let said = files.fallback().unwrap_or("").to_string();
        assert!(!said.contains("any more"), "{said}");
    }

    #[test]
    fn alignment_above_the_limit_uses_the_page_cache() {
        let scratch = Scratch::new();
        let files =
            RealFiles::open(&scratch.0, &RealOpts { max_align_bytes: 1, ..RealOpts::default() })
                .expect("made");
        assert_eq!(files.align_bytes(), 1);
        assert!(files.engine().ends_with("buffered"));
        assert!(files.fallback().expect("a reason").contains("no direct transfers"));
    }

    #[test]
    fn the_reported_alignment_works_and_so_does_probing() {
        let scratch = Scratch::new();
        let directory = Directory::open(&scratch.0).expect("made");
        // Left by a process that was killed while it probed.
        let left = scratch.0.join(format!(".kvt-probe-{}", std::process::id()));
        std::fs::write(&left, "").expect("written");
        let tried = probed_alignment(&directory);
        assert!(!left.exists() && directory.list() == Ok(vec![]));
        let lock = Lock::take(&directory).expect("free");
        let reported = lock.file().map_or(Ok(0), probe::reported_alignment);
        if let (Ok(tried), Ok(reported)) = (&tried, &reported) {
            // Less may work than is guaranteed, never more.
            assert!(*reported == 0 || tried <= reported, "tried {tried}, reported {reported}");
        }
        println!("tried {tried:?}, reported {reported:?}");
    }
}
