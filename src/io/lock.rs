//! One user per directory: a record lock on its file `LOCK` excludes other processes. Record locks
//! do not exclude the own process, and closing any descriptor of the file releases the lock.
//! Therefore a table of the process is checked first, and only the holder opens the file.

use std::os::fd::{AsRawFd, OwnedFd};

use once_cell::sync::Lazy;

use crate::base::status::{Result, Status};
use crate::base::sync::Mutex;
use crate::fail;
use crate::io::directory::Directory;
use crate::io::errno;
use crate::io::files::LOCK_NAME;

type Identity = (u64, u64);

/// Limit: retries when a previous holder removes the lock file.
const TRIES: usize = 100;

/// Directories that this process has open.
static HELD: Lazy<Mutex<Vec<Identity>>> = Lazy::new(|| Mutex::new(Vec::new()));

/// An exclusively opened directory.
pub struct Lock {
    /// None only while it is dropped.
    file: Option<OwnedFd>,
    identity: Identity,
    /// Opening created the lock file.
    is_created: bool,
}

impl Lock {
    /// Locks a directory; an error names the holder.
    pub fn take(directory: &Directory) -> Result<Lock> {
        let place = directory.path().display();
        let identity = directory.identity()?;
        let mut held = HELD.lock();
        if held.contains(&identity) {
            drop(held);
            fail!(Busy, "{place} is open already in this process");
        }
        held.try_reserve(1).map_err(|_| Status::NoMem)?;
        held.push(identity);
        drop(held);
        // From here on dropping it undoes earlier steps.
        let mut lock = Lock { file: None, identity, is_created: true };
        for _ in 0..TRIES {
            let file = match directory.open_file(LOCK_NAME, libc::O_CREAT | libc::O_EXCL) {
                Ok(file) => file,
                Err(_) => {
                    lock.is_created = false;
                    directory.open_file(LOCK_NAME, libc::O_CREAT)?
                }
            };
            lock_file(&file, &place.to_string())?;
            // The previous holder may have removed the file after it was opened here; such a lock
            // excludes no one.
            if directory.names_file(LOCK_NAME, &file)? {
                lock.file = Some(file);
                return Ok(lock);
            }
            lock.is_created = true;
        }
        fail!(Busy, "{place}: other processes keep opening and closing it, try again")
    }

    /// Whether the holder created the lock file.
    pub fn is_created(&self) -> bool {
        self.is_created
    }

    /// The lock file, an ordinary file of its directory.
    pub fn file(&self) -> Option<&OwnedFd> {
        self.file.as_ref()
    }
}

/// Locks the file of a directory; an error names the holder.
fn lock_file(file: &OwnedFd, place: &str) -> Result<()> {
    let mut request = whole_file();
    // SAFETY: a valid flock.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &request) };
    if rc == 0 {
        return Ok(());
    }
    let number = errno::last_number();
    if !matches!(number, libc::EAGAIN | libc::EACCES) {
        return Err(errno::error(number, &format!("locking {place}")));
    }
    // SAFETY: a valid, writable flock.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &mut request) };
    if rc == 0 && request.l_type != libc::F_UNLCK as libc::c_short && request.l_pid > 0 {
        fail!(Busy, "{place} is open already in process {}", request.l_pid);
    }
    fail!(Busy, "{place} is open already in another process")
}

fn whole_file() -> libc::flock {
    // SAFETY: integers only, which may be zero. A start and a length of 0 cover the whole file.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = libc::F_WRLCK as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    request
}

impl Drop for Lock {
    fn drop(&mut self) {
        // In this order: once the table entry is removed, another thread may open the file, and
        // closing ours would release its lock.
        drop(self.file.take());
        // A forked child has a copy of the table, whose mutex may be locked forever.
        if crate::base::fork::check().is_ok() {
            HELD.lock().retain(|other| *other != self.identity);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::io::real::{RealFiles, RealOpts};
    use crate::io::scratch::Scratch;
    use std::ffi::CString;
    use std::path::PathBuf;

    const CHILD: &str = "KVTIER_TEST_LOCK";

    fn open(scratch: &Scratch) -> Result<RealFiles> {
        RealFiles::open(&scratch.0, &RealOpts::default())
    }

    /// Opens a directory and leaves a file in it, so that it stays.
    fn add_file(scratch: &Scratch) {
        let files = open(scratch).expect("free");
        std::fs::write(scratch.0.join("kept"), b"").expect("written");
        drop(files);
    }

    /// Run by the tests below in a process of its own.
    #[test]
    fn child_opens_given_directory() {
        let Some(path) = std::env::var_os(CHILD) else { return };
        let opened = RealFiles::open(&PathBuf::from(path), &RealOpts::default());
        std::process::exit(match opened {
            Ok(_) => 40,
            Err(error) if error.status() == Status::Busy => {
                let parent = format!("in process {}", std::os::unix::process::parent_id());
                if error.message().contains(&parent) { 41 } else { 42 }
            }
            Err(_) => 43,
        });
    }

    fn child(scratch: &Scratch) -> Option<i32> {
        let test = "io::lock::tests::child_opens_given_directory";
        let exe = std::env::current_exe().expect("this test");
        let mut command = std::process::Command::new(exe);
        command.args(["--exact", test]).env(CHILD, &scratch.0);
        command.output().expect("started").status.code()
    }

    #[test]
    fn a_second_opener_is_rejected() {
        let scratch = Scratch::new();
        let first = open(&scratch).expect("free");
        // Failed attempts do not release the lock.
        for _ in 0..3 {
            let error = open(&scratch).err().expect("held");
            assert_eq!(error.status(), Status::Busy);
            assert!(error.message().contains("in this process"), "{error}");
            assert_eq!(child(&scratch), Some(41), "another process learns who holds the lock");
        }
        let elsewhere = Scratch::new();
        assert!(open(&elsewhere).is_ok(), "another directory is free");
        drop(first);
        assert_eq!(child(&scratch), Some(40));
        drop(open(&scratch).expect("free again"));
        assert_eq!(child(&scratch), Some(40));
    }

    #[test]
    fn another_path_of_the_directory_is_rejected() {
        let scratch = Scratch::new();
        let _first = open(&scratch).expect("free");
        let name = scratch.0.file_name().expect("a name");
        let other = scratch.0.join("..").join(name);
        let error = RealFiles::open(&other, &RealOpts::default()).err().expect("held");
        assert_eq!(error.status(), Status::Busy);
    }

    /// Forks a child that takes the lock, reports it, and holds it until it is signalled to exit.
    fn holder(scratch: &Scratch) -> (i32, [i32; 2]) {
        let path = CString::new(scratch.0.join(LOCK_NAME).to_str().expect("text")).expect("text");
        let (mut reports, mut quit) = ([0; 2], [0; 2]);
        let request = whole_file();
        // SAFETY: the child makes system calls only, and ends in `_exit`.
        unsafe {
            assert_eq!((libc::pipe(reports.as_mut_ptr()), libc::pipe(quit.as_mut_ptr())), (0, 0));
            let pid = libc::fork();
            if pid == 0 {
                let fd = libc::open(path.as_ptr(), libc::O_RDWR);
                let held = libc::fcntl(fd, libc::F_SETLK, &request) == 0;
                let mut word = u8::from(held);
                libc::write(reports[1], (&raw const word).cast(), 1);
                libc::close(quit[1]);
                libc::read(quit[0], (&raw mut word).cast(), 1);
                libc::_exit(0);
            }
            let mut word = 0u8;
            assert_eq!(libc::read(reports[0], (&raw mut word).cast(), 1), 1);
            assert_eq!(word, 1, "the child holds the lock");
            libc::close(reports[0]);
            libc::close(reports[1]);
            (pid, quit)
        }
    }

    #[test]
    fn closing_an_empty_directory_removes_it_if_opening_created_it() {
        let scratch = Scratch::new();
        drop(open(&scratch).expect("made"));
        assert!(!scratch.0.exists());
        add_file(&scratch);
        assert!(scratch.0.join(LOCK_NAME).exists() && scratch.0.join("kept").exists());
        // Files that existed before stay.
        std::fs::remove_file(scratch.0.join("kept")).expect("removed");
        drop(open(&scratch).expect("free"));
        assert!(scratch.0.join(LOCK_NAME).exists());
    }

    #[test]
    fn a_killed_process_releases_the_lock() {
        let scratch = Scratch::new();
        add_file(&scratch);
        let (pid, quit) = holder(&scratch);
        let error = open(&scratch).err().expect("held");
        assert_eq!(error.status(), Status::Busy);
        assert!(error.message().contains(&format!("in process {pid}")), "{error}");
        // SAFETY: the child created above, and its pipe.
        unsafe {
            assert_eq!(libc::kill(pid, libc::SIGKILL), 0);
            assert_eq!(libc::waitpid(pid, std::ptr::null_mut(), 0), pid);
            libc::close(quit[0]);
            libc::close(quit[1]);
        }
        assert!(open(&scratch).is_ok());
    }

    #[test]
    fn a_forked_child_is_rejected_and_releases_nothing() {
        let scratch = Scratch::new();
        let files = open(&scratch).expect("free");
        // SAFETY: the child queries, drops its copies and ends in `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            use crate::io::files::Files;
            let forked = |status| status == Status::Forked;
            let refused = files.list().is_err_and(|e| forked(e.status()))
                && files.create("x", 1).is_err_and(|e| forked(e.status()))
                && open(&scratch).is_err_and(|e| forked(e.status()));
            drop(files);
            // SAFETY: ends the child without the parent's destructors.
            unsafe { libc::_exit(i32::from(refused)) };
        }
        let mut status = 0;
        // SAFETY: the child created above.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(libc::WEXITSTATUS(status), 1);
        assert_eq!(child(&scratch), Some(41), "the lock is still held");
        assert_eq!(crate::io::files::Files::list(&files), Ok(vec![]));
    }
}
