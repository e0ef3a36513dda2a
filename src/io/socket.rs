//! Local sockets for introspection of a running program, at a path that only its owner can access.
//! Only [`wait`] waits.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::errno::{self, uninterrupted};

/// Backlog of connections.
const BACKLOG: i32 = 16;
/// Tries, and milliseconds between them, to lock the directory against concurrent binds.
const LOCK_TRIES: u32 = 100;
const LOCK_RETRY_MS: i32 = 10;
/// Limit: descriptors of a wait.
pub const MAX_WATCHED: usize = 32;

const KIND: i32 = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

/// A listening socket at a path with mode 0600. Dropping it removes the path.
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    name: CString,
    /// Device and inode of the path, which others may replace.
    identity: (u64, u64),
}

/// A connection.
pub struct Stream(OwnedFd);

/// Ends a [`wait`] from another thread.
pub struct Waker(OwnedFd);

/// A descriptor to wait for.
pub struct Watched {
    fd: RawFd,
    events: libc::c_short,
    /// The descriptor is ready, perhaps only to report its end.
    pub ready: bool,
}

/// Held while a path is checked and bound: one process at a time in a directory.
struct DirectoryLock(#[allow(dead_code)] OwnedFd);

impl Listener {
    /// Listens at a path. A stale socket, on which no process listens, is replaced; anything else
    /// stays. BUSY = another process listens there. STATE = no socket, or another user's.
    pub fn bind(path: &Path) -> Result<Listener> {
        let path = std::path::absolute(path)
            .map_err(|error| Error::new(Status::Invalid, format!("a socket's path: {error}")))?;
        let address = address_of(&path)?;
        let name = text(path.as_os_str().as_bytes())?;
        let lock = DirectoryLock::take(&path)?;
        clear_stale(&path, &name, &address)?;
        let fd = socket()?;
        let place = path.display().to_string();
        // On Linux the mode of an unbound socket becomes the mode of its path. SAFETY: an open
        // descriptor.
        if unsafe { libc::fchmod(fd.as_raw_fd(), 0o600) } != 0 {
            return Err(errno::last(&format!("{place}: setting its mode")));
        }
        let (at, bytes) = ((&raw const address).cast(), size_of::<libc::sockaddr_un>() as u32);
        // SAFETY: an open descriptor, and a whole address.
        if unsafe { libc::bind(fd.as_raw_fd(), at, bytes) } != 0 {
            return Err(errno::last(&format!("binding {place}")));
        }
        let facts = lstat(&name).map_err(|number| errno::error(number, &place))?;
        let identity = (facts.st_dev, facts.st_ino);
        let listener = Listener { fd, path, name, identity };
        if facts.st_mode & 0o177 != 0 {
            fail!(Unavailable, "{place}: this file system does not enforce the socket's mode");
        }
        // SAFETY: an open descriptor.
        if unsafe { libc::listen(listener.fd.as_raw_fd(), BACKLOG) } != 0 {
            return Err(errno::last(&format!("listening on {place}")));
        }
        drop(lock);
        Ok(listener)
    }

    /// Path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts a connection, if there is one. Connections of other users are closed; the path
    /// excludes them unless its mode was changed.
    pub fn accept(&self) -> Result<Option<Stream>> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let (at, null) = (self.fd.as_raw_fd(), std::ptr::null_mut());
        // SAFETY: an open descriptor; the address is not requested.
        let fd = uninterrupted(|| unsafe { libc::accept4(at, null, null.cast(), flags) });
        let stream = match fd {
            // SAFETY: a descriptor this call has just created and nothing else owns.
            Ok(fd) => Stream(unsafe { OwnedFd::from_raw_fd(fd) }),
            Err(libc::EAGAIN | libc::ECONNABORTED) => return Ok(None),
            Err(number) => return Err(errno::error(number, "accepting a connection")),
        };
        Ok(stream.is_of_owner().then_some(stream))
    }

    /// Readiness to accept.
    pub fn watched(&self) -> Watched {
        Watched { fd: self.fd.as_raw_fd(), events: libc::POLLIN, ready: false }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The path belongs to the process that created it, not to its forks.
        if crate::base::fork::check().is_err() {
            return;
        }
        let is_ours = |facts: libc::stat| (facts.st_dev, facts.st_ino) == self.identity;
        if lstat(&self.name).is_ok_and(is_ours) {
            // SAFETY: a NUL-terminated path.
            if unsafe { libc::unlink(self.name.as_ptr()) } != 0 {
                log::warn!("{}", errno::last(&format!("removing {}", self.path.display())));
            }
        }
    }
}

impl Stream {
    /// Reads available bytes; 0 = the peer will send no more, None = nothing yet.
    pub fn read(&self, into: &mut [u8]) -> Result<Option<usize>> {
        let (at, room) = (into.as_mut_ptr().cast(), into.len());
        // SAFETY: an open descriptor, and memory that this call may write.
        let got = uninterrupted(|| unsafe { libc::recv(self.0.as_raw_fd(), at, room, 0) });
        passed(got, "reading from a socket")
    }

    /// Writes as much as there is room for; None = no room now.
    pub fn write(&self, bytes: &[u8]) -> Result<Option<usize>> {
        let (at, count, flags) = (bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL);
        // SAFETY: an open descriptor, and readable memory.
        let sent = uninterrupted(|| unsafe { libc::send(self.0.as_raw_fd(), at, count, flags) });
        passed(sent, "writing to a socket")
    }

    /// Readiness to read, or to write.
    pub fn watched(&self, to_write: bool) -> Watched {
        let events = if to_write { libc::POLLOUT } else { libc::POLLIN };
        Watched { fd: self.0.as_raw_fd(), events, ready: false }
    }

    /// Process, user and group of the peer.
    pub fn peer(&self) -> (i32, u32, u32) {
        let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
        let at = (&raw mut peer).cast();
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        // SAFETY: an open descriptor, and a ucred of the stated length.
        match unsafe { libc::getsockopt(self.raw(), level, option, at, &raw mut bytes) } {
            0 => (peer.pid, peer.uid, peer.gid),
            _ => (0, u32::MAX, u32::MAX),
        }
    }

    /// A descriptor that is ready once the peer's process has ended, also if another process still
    /// has the socket. None where the kernel has no such descriptors.
    pub fn peer_process(&self) -> Option<OwnedFd> {
        let (pid, flags) = (self.peer().0, 0);
        // SAFETY: no memory is involved.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) };
        // SAFETY: a descriptor this call has just created and nothing else owns.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
    }

    /// Readiness of another descriptor to be read.
    pub fn watched_fd(fd: &OwnedFd) -> Watched {
        Watched { fd: fd.as_raw_fd(), events: libc::POLLIN, ready: false }
    }

    /// Ends the connection, also for processes that have inherited it.
    pub fn shut(&self) {
        // SAFETY: an open descriptor.
        unsafe { libc::shutdown(self.raw(), libc::SHUT_RDWR) };
    }

    /// Connects to a socket of this user.
    pub fn connect(path: &Path) -> Result<Stream> {
        let address = address_of(path)?;
        let stream = Stream(socket()?);
        let (at, bytes) = ((&raw const address).cast(), size_of_val(&address) as u32);
        // SAFETY: an open descriptor, and a whole address.
        match uninterrupted(|| unsafe { libc::connect(stream.raw(), at, bytes) }) {
            Ok(_) => {}
            Err(libc::ECONNREFUSED) => fail!(
                Unavailable,
                "no process listens at {}: is the server running?",
                path.display()
            ),
            Err(number) => {
                return Err(errno::error(number, &format!("connecting to {}", path.display())));
            }
        }
        if !stream.is_of_owner() {
            fail!(Unavailable, "{} belongs to a process of another user", path.display());
        }
        Ok(stream)
    }

    /// Its descriptor.
    pub(super) fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    fn is_of_owner(&self) -> bool {
        let (_, peer, _) = self.peer();
        peer == user() || peer == 0
    }
}

impl Waker {
    /// A waker that is not set.
    pub fn new() -> Result<Waker> {
        // SAFETY: no memory is involved.
        match unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) } {
            -1 => Err(errno::last("creating an eventfd")),
            // SAFETY: a descriptor this call has just created and nothing else owns.
            fd => Ok(Waker(unsafe { OwnedFd::from_raw_fd(fd) })),
        }
    }

    /// Sets the waker, for good.
    pub fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: an open descriptor, and eight bytes. It fails only if it is set already.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Readiness of a set waker.
    pub fn watched(&self) -> Watched {
        Watched { fd: self.0.as_raw_fd(), events: libc::POLLIN, ready: false }
    }
}

/// Waits until a descriptor is ready, at most `timeout_ms` milliseconds (-1 = forever). It may
/// return early. LIMIT = more than [`MAX_WATCHED`].
pub fn wait(watched: &mut [Watched], timeout_ms: i32) -> Result<()> {
    if watched.len() > MAX_WATCHED {
        fail!(Limit, "{} descriptors to wait for: the limit is {MAX_WATCHED}", watched.len());
    }
    let mut polled = [libc::pollfd { fd: -1, events: 0, revents: 0 }; MAX_WATCHED];
    for (polled, one) in polled.iter_mut().zip(watched.iter()) {
        (polled.fd, polled.events) = (one.fd, one.events);
    }
    // SAFETY: as many pollfds as stated; a closed descriptor is only reported.
    let rc = unsafe { libc::poll(polled.as_mut_ptr(), watched.len() as libc::nfds_t, timeout_ms) };
    if rc < 0 && errno::last_number() != libc::EINTR {
        return Err(errno::last("waiting for sockets"));
    }
    for (polled, one) in polled.iter().zip(watched.iter_mut()) {
        one.ready = rc > 0 && polled.revents != 0;
    }
    Ok(())
}

impl DirectoryLock {
    /// Locks the directory of a path until the descriptor is closed. The holder must not wait.
    fn take(path: &Path) -> Result<DirectoryLock> {
        let above = path.parent().unwrap_or(Path::new("/"));
        let name = text(above.as_os_str().as_bytes())?;
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: a NUL-terminated path.
        let fd = uninterrupted(|| unsafe { libc::open(name.as_ptr(), flags) })
            .map_err(|number| errno::error(number, &format!("opening {}", above.display())))?;
        // SAFETY: a descriptor this call has just created and nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        for _ in 0..LOCK_TRIES {
            // SAFETY: an open descriptor.
            if unsafe { libc::flock(fd.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                return Ok(DirectoryLock(fd));
            }
            let number = errno::last_number();
            if !errno::is_passing(number) {
                return Err(errno::error(number, &format!("locking {}", above.display())));
            }
            wait(&mut [], LOCK_RETRY_MS)?;
        }
        fail!(Busy, "{} is locked by another process", above.display())
    }
}

/// Removes a stale socket of this user; fails for anything else at the path.
fn clear_stale(path: &Path, name: &CString, address: &libc::sockaddr_un) -> Result<()> {
    let place = path.display();
    let facts = match lstat(name) {
        Err(libc::ENOENT) => return Ok(()),
        Err(number) => return Err(errno::error(number, &format!("checking {place}"))),
        Ok(facts) => facts,
    };
    if facts.st_mode & libc::S_IFMT != libc::S_IFSOCK {
        fail!(State, "{place} exists and is not a socket");
    }
    if facts.st_uid != user() {
        fail!(State, "{place} exists and belongs to another user");
    }
    let probe = socket()?;
    let (at, bytes) = ((address as *const libc::sockaddr_un).cast(), size_of_val(address) as u32);
    // SAFETY: an open descriptor, and a whole address.
    match uninterrupted(|| unsafe { libc::connect(probe.as_raw_fd(), at, bytes) }) {
        Err(libc::ECONNREFUSED) => {}
        Err(libc::ENOENT) => return Ok(()),
        // A full backlog has a listener, too.
        Ok(_) | Err(libc::EAGAIN) => {
            fail!(Busy, "{place} is in use: another process listens there")
        }
        Err(number) => return Err(errno::error(number, &format!("connecting to {place}"))),
    }
    // SAFETY: a NUL-terminated path.
    match unsafe { libc::unlink(name.as_ptr()) } {
        0 => Ok(()),
        _ => Err(errno::last(&format!("removing {place}"))),
    }
}

fn passed(done: std::result::Result<isize, i32>, what: &str) -> Result<Option<usize>> {
    match done {
        Ok(bytes) => Ok(Some(usize::try_from(bytes).unwrap_or(0))),
        Err(libc::EAGAIN) => Ok(None),
        Err(number) => Err(errno::error(number, what)),
    }
}

fn socket() -> Result<OwnedFd> {
    // SAFETY: no memory is involved.
    match unsafe { libc::socket(libc::AF_UNIX, KIND, 0) } {
        -1 => Err(errno::last("creating a socket")),
        // SAFETY: a descriptor this call has just created and nothing else owns.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

fn text(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| Error::new(Status::Invalid, "a path contains a NUL"))
}

fn address_of(path: &Path) -> Result<libc::sockaddr_un> {
    // SAFETY: integers only, which may be zero.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        let most = address.sun_path.len() - 1;
        fail!(Limit, "a socket's path has at most {most} bytes: {}", path.display());
    }
    for (to, &from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from as libc::c_char;
    }
    Ok(address)
}

/// Attributes of a path; links are not followed.
fn lstat(name: &CString) -> std::result::Result<libc::stat, i32> {
    // SAFETY: integers only, which may be zero.
    let mut facts: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a NUL-terminated path and a writable stat.
    uninterrupted(|| unsafe { libc::lstat(name.as_ptr(), &mut facts) }).map(|_| facts)
}

fn user() -> libc::uid_t {
    // SAFETY: it has no preconditions.
    unsafe { libc::geteuid() }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::io::scratch::Scratch;
    use std::io::{Read, Write};
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    use std::os::unix::net::{UnixListener, UnixStream};

    fn refused(path: &Path) -> Status {
        Listener::bind(path).err().expect("refused").status()
    }

    fn placed() -> (Scratch, PathBuf) {
        let scratch = Scratch::new();
        std::fs::create_dir_all(&scratch.0).expect("a directory");
        let path = scratch.0.join("control");
        (scratch, path)
    }

    fn taken(listener: &Listener) -> Stream {
        wait(&mut [listener.watched()], 10_000).expect("polled");
        listener.accept().expect("sound").expect("a client connects")
    }

    #[test]
    fn the_path_is_private_and_removed_with_the_listener() {
        let (_scratch, path) = placed();
        let listener = Listener::bind(&path).expect("free");
        let facts = std::fs::symlink_metadata(&path).expect("found");
        assert!(facts.file_type().is_socket());
        assert_eq!(facts.permissions().mode() & 0o777, 0o600);
        assert_eq!(refused(&path), Status::Busy);
        let mut other = UnixStream::connect(&path).expect("it listens");
        drop(taken(&listener)); // the probe of the one that was refused
        let stream = taken(&listener);
        assert_eq!(stream.read(&mut [0; 4]), Ok(None));
        other.write_all(b"abc").expect("sent");
        wait(&mut [stream.watched(false)], 10_000).expect("polled");
        let mut got = [0; 4];
        assert_eq!((stream.read(&mut got), &got[..3]), (Ok(Some(3)), &b"abc"[..]));
        assert_eq!(stream.write(b"de"), Ok(Some(2)));
        other.read_exact(&mut got[..2]).expect("sent");
        drop(other);
        wait(&mut [stream.watched(false)], 10_000).expect("polled");
        assert_eq!(stream.read(&mut got), Ok(Some(0)));
        assert_eq!(stream.write(b"x").map_err(|e| e.status()), Err(Status::Io), "no signal");
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn only_a_stale_socket_is_replaced() {
        let (scratch, path) = placed();
        // As after a killed process.
        drop(UnixListener::bind(&path).expect("free"));
        drop(Listener::bind(&path).expect("it was stale"));
        std::fs::write(&path, "a file").expect("written");
        assert_eq!(refused(&path), Status::State);
        assert_eq!(std::fs::read(&path).expect("still there"), b"a file");
        std::fs::remove_file(&path).expect("removed");
        let elsewhere = scratch.0.join("elsewhere");
        drop(UnixListener::bind(&elsewhere).expect("free"));
        std::os::unix::fs::symlink(&elsewhere, &path).expect("linked");
        assert_eq!(refused(&path), Status::State, "a link to a stale socket");
        assert!(elsewhere.exists() || std::fs::symlink_metadata(&elsewhere).is_ok());
        assert_eq!(refused(&scratch.0.join("not there/x")), Status::NotFound);
        assert_eq!(refused(&scratch.0.join("x".repeat(120))), Status::Limit);
    }

    #[test]
    fn a_replaced_path_is_not_removed() {
        let (_scratch, path) = placed();
        let listener = Listener::bind(&path).expect("free");
        std::fs::remove_file(&path).expect("removed");
        std::fs::write(&path, "mine").expect("written");
        drop(listener);
        assert_eq!(std::fs::read(&path).expect("still there"), b"mine");
    }

    #[test]
    fn a_waker_ends_a_wait_and_stays_set() {
        let waker = crate::base::sync::Arc::new(Waker::new().expect("made"));
        let mut watched = [waker.watched()];
        wait(&mut watched, 0).expect("polled");
        assert!(!watched[0].ready);
        let other = waker.clone();
        let thread = crate::base::sync::spawn("ringer".into(), move || other.wake()).expect("ok");
        wait(&mut watched, -1).expect("polled");
        thread.join().expect("rang");
        wait(&mut watched, 0).expect("polled");
        assert!(watched[0].ready);
        let mut many: Vec<Watched> = (0..=MAX_WATCHED).map(|_| waker.watched()).collect();
        assert_eq!(wait(&mut many, 0).map_err(|e| e.status()), Err(Status::Limit));
    }
}
