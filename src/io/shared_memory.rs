//! Memory that processes share: sealed files in memory, words that threads of several processes wait
//! on, and the passing of descriptors between them.
//!
//! Whatever another process can write is untrusted: callers copy a value before they check it.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use crate::base::memory::MAX_BUFFER_BYTES;
use crate::base::status::Result;
use crate::fail;
use crate::io::errno::{self, uninterrupted};
use crate::io::socket::Stream;

/// Seals that make a mapping safe: the file never shrinks, so no access faults, and it never grows.
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A file in memory, of fixed length, that is mapped readable and writable. Pages that nobody has
/// touched take no memory.
pub struct SharedMemory {
    fd: OwnedFd,
    address: NonNull<u8>,
    bytes: u64,
}

// SAFETY: a range of memory. Who accesses which part when is the users' contract.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates a file of zeros.
    pub fn create(bytes: u64) -> Result<SharedMemory> {
        if bytes == 0 || bytes > MAX_BUFFER_BYTES {
            fail!(Limit, "shared memory has 1 to {MAX_BUFFER_BYTES} bytes, not {bytes}");
        }
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a NUL-terminated name.
        let fd = match unsafe { libc::memfd_create(c"kvtier".as_ptr(), flags) } {
            -1 => return Err(errno::last("creating shared memory")),
            // SAFETY: a descriptor this call has just created and nothing else owns.
            fd => unsafe { OwnedFd::from_raw_fd(fd) },
        };
        // SAFETY: an open descriptor.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) } != 0 {
            return Err(errno::last(&format!("sizing shared memory to {bytes} bytes")));
        }
        // SAFETY: an open descriptor.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(errno::last("sealing shared memory"));
        }
        SharedMemory::map(fd, bytes)
    }

    /// Maps a file that another process has created. It must be sealed, and not longer than
    /// `most_bytes`.
    pub fn open(fd: OwnedFd, most_bytes: u64) -> Result<SharedMemory> {
        // SAFETY: an open descriptor.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            fail!(Invalid, "the peer's shared memory is not sealed: its seals are {seals:#x}");
        }
        // SAFETY: integers only, which may be zero.
        let mut facts: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: an open descriptor and a writable stat.
        if unsafe { libc::fstat(fd.as_raw_fd(), &mut facts) } != 0 {
            return Err(errno::last("checking shared memory"));
        }
        let bytes = facts.st_size as u64;
        if bytes == 0 || bytes > most_bytes {
            fail!(
                Invalid,
                "the peer's shared memory has {bytes} bytes: 1 to {most_bytes} are possible"
            );
        }
        SharedMemory::map(fd, bytes)
    }

    fn map(fd: OwnedFd, bytes: u64) -> Result<SharedMemory> {
        let (null, at) = (std::ptr::null_mut(), fd.as_raw_fd());
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping of an open file.
        let address = unsafe { libc::mmap(null, bytes as usize, access, flags, at, 0) };
        let Some(address) = NonNull::new(address).filter(|_| address != libc::MAP_FAILED) else {
            return Err(errno::last(&format!("mapping {bytes} bytes of shared memory")));
        };
        // SAFETY: the mapping made above. Without the hint a forked child would have it, too.
        unsafe { libc::madvise(address.as_ptr(), bytes as usize, libc::MADV_DONTFORK) };
        Ok(SharedMemory { fd, address: address.cast(), bytes })
    }

    /// Where it is mapped.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of `offset`, if `bytes` from there lie inside.
    pub fn range(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: the range lies inside the mapping.
        (end <= self.bytes).then(|| unsafe { self.address.as_ptr().add(offset as usize) })
    }

    /// Returns the pages of a range to the system; they read as zeros afterwards, in every process.
    pub fn discard(&self, offset: u64, bytes: u64) -> Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (fd, at, bytes) = (self.fd.as_raw_fd(), offset as libc::off_t, bytes as libc::off_t);
        // SAFETY: an open descriptor; the file checks the range.
        uninterrupted(|| unsafe { libc::fallocate(fd, mode, at, bytes) })
            .map(|_| ())
            .map_err(|number| errno::error(number, "returning shared memory"))
    }

    /// The descriptor, to pass it on.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // A forked child does not have this mapping, but may have another one there.
        if crate::base::fork::check().is_ok() {
            // SAFETY: exactly the range that was mapped; its owner has ended all accesses.
            unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes as usize) };
        }
    }
}

/// Sleeps while `word` has the value `asleep`, until [`wake_all`], at most so long. May return early.
pub fn sleep_on(word: &AtomicU32, asleep: u32, most_ns: u64) {
    let time = libc::timespec {
        tv_sec: (most_ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (most_ns % 1_000_000_000) as libc::c_long,
    };
    let at: *const AtomicU32 = word;
    // SAFETY: a mapped word, and a time. Not private: threads of several processes wait.
    unsafe {
        libc::syscall(libc::SYS_futex, at, libc::FUTEX_WAIT, asleep, &raw const time, 0usize, 0)
    };
}

/// Wakes the threads that sleep on a word.
pub fn wake_all(word: &AtomicU32) {
    let at: *const AtomicU32 = word;
    // SAFETY: a mapped word.
    unsafe { libc::syscall(libc::SYS_futex, at, libc::FUTEX_WAKE, i32::MAX, 0usize, 0usize, 0) };
}

/// Most descriptors of one message.
const MAX_PASSED: usize = 4;
/// Bytes for their control message: a header, and the descriptors, aligned.
const CONTROL_WORDS: usize = 8;

impl Stream {
    /// Sends bytes with descriptors. Fails if the socket has no room for all of them.
    pub fn pass(&self, bytes: &[u8], fds: &[RawFd]) -> Result<()> {
        if fds.len() > MAX_PASSED || bytes.is_empty() {
            fail!(Limit, "{} descriptors with {} bytes are passed", fds.len(), bytes.len());
        }
        let mut control = [0u64; CONTROL_WORDS];
        let mut part = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
        // SAFETY: integers and pointers, which may be zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        if !fds.is_empty() {
            let count = size_of_val(fds) as u32;
            // SAFETY: computes only.
            let (space, length) = unsafe { (libc::CMSG_SPACE(count), libc::CMSG_LEN(count)) };
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = space as _;
            // SAFETY: the control buffer has room for one header and the descriptors.
            unsafe {
                let header = libc::CMSG_FIRSTHDR(&message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = length as _;
                let to = libc::CMSG_DATA(header).cast();
                std::ptr::copy_nonoverlapping(fds.as_ptr(), to, fds.len());
            }
        }
        let (fd, flags) = (self.raw(), libc::MSG_NOSIGNAL);
        // SAFETY: an open descriptor, and a message whose parts live until this returns.
        let sent = uninterrupted(|| unsafe { libc::sendmsg(fd, &message, flags) })
            .map_err(|number| errno::error(number, "passing descriptors"))?;
        if sent as usize != bytes.len() {
            fail!(Io, "passing descriptors: {sent} of {} bytes were sent", bytes.len());
        }
        Ok(())
    }

    /// Receives bytes with the descriptors that came with them; None = nothing yet. Descriptors
    /// beyond [`MAX_PASSED`] are an error.
    pub fn take_passed(&self, into: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>)>> {
        let mut control = [0u64; CONTROL_WORDS];
        let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        // SAFETY: integers and pointers, which may be zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        let (fd, flags) = (self.raw(), libc::MSG_CMSG_CLOEXEC);
        // SAFETY: an open descriptor, and a message whose parts are writable until this returns.
        let got = match uninterrupted(|| unsafe { libc::recvmsg(fd, &mut message, flags) }) {
            Ok(got) => got as usize,
            Err(libc::EAGAIN) => return Ok(None),
            Err(number) => return Err(errno::error(number, "receiving descriptors")),
        };
        let mut fds = Vec::new();
        // SAFETY: the kernel has filled in the headers; each descriptor is new, and owned by none.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(&message);
            while let Some(one) = header.as_ref() {
                if one.cmsg_level == libc::SOL_SOCKET && one.cmsg_type == libc::SCM_RIGHTS {
                    #[allow(clippy::unnecessary_cast)] // other C libraries have another type
                    let bytes = one.cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    let data: *const RawFd = libc::CMSG_DATA(header).cast();
                    for at in 0..bytes / size_of::<RawFd>() {
                        fds.push(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
                    }
                }
                header = libc::CMSG_NXTHDR(&message, header);
            }
        }
        if message.msg_flags & libc::MSG_CTRUNC != 0 || fds.len() > MAX_PASSED {
            fail!(Invalid, "the peer passed more than {MAX_PASSED} descriptors");
        }
        Ok(Some((got, fds)))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use crate::base::sync::spawn;
    use std::sync::atomic::Ordering;

    #[test]
    fn memory_is_sealed_shared_and_returned() {
        let own = SharedMemory::create(1 << 20).expect("memory");
        // SAFETY: an open descriptor.
        let copy = unsafe { OwnedFd::from_raw_fd(libc::dup(own.fd())) };
        // SAFETY: as above; it is sealed.
        assert_eq!(unsafe { libc::ftruncate(copy.as_raw_fd(), 1) }, -1);
        let other = SharedMemory::open(copy, 1 << 20).expect("sealed");
        let (to, from) = (own.range(4096, 8).expect("in"), other.range(4096, 8).expect("in"));
        assert!(own.range(u64::MAX, 2).is_none() && own.range(1 << 20, 1).is_none());
        // SAFETY: both are mapped, and no other thread has them.
        unsafe {
            to.write(7);
            assert_eq!(from.read(), 7);
            own.discard(0, 8192).expect("a hole");
            assert_eq!(from.read(), 0);
        }
        let plain = std::fs::File::open("/proc/self/exe").expect("it runs");
        let error = SharedMemory::open(plain.into(), 1 << 40).err().expect("not sealed");
        assert_eq!(error.status(), Status::Invalid);
        assert_eq!(SharedMemory::create(0).err().map(|e| e.status()), Some(Status::Limit));
    }

    #[test]
    fn a_sleeper_is_woken() {
        let memory = crate::base::sync::Arc::new(SharedMemory::create(4096).expect("memory"));
        let word = |memory: &SharedMemory| -> &'static AtomicU32 {
            // SAFETY: zeros, mapped until the end of the test.
            unsafe { &*memory.address().cast::<AtomicU32>() }
        };
        let other = memory.clone();
        let thread = spawn("waker".into(), move || {
            word(&other).store(1, Ordering::SeqCst);
            wake_all(word(&other));
        });
        while word(&memory).load(Ordering::SeqCst) == 0 {
            sleep_on(word(&memory), 0, 60_000_000_000);
        }
        thread.expect("spawned").join().expect("ended");
    }
}
