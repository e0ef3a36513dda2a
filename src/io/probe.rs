//! Probes of io_uring, O_DIRECT alignment and optional features.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::base::fork;
use crate::base::library::{CUDA_DRIVER, LEAST_CUDA, cuda_version};
use crate::base::machine::MemoryFacts;
use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::{Error, Result, Status};
use crate::fail;

/// An optional feature: whether it is built in, and whether this machine supports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Name.
    pub name: &'static str,
    /// Purpose.
    pub note: &'static str,
    /// The library contains it.
    pub built: bool,
    /// This machine supports it.
    pub present: bool,
}

/// Names and purposes of all features.
pub const FEATURES: [(&str, &str); 12] = [
    ("cuda", "copies to and from NVIDIA devices; the driver is loaded at run time\0"),
    ("dir", "a remote tier in a directory that machines share\0"),
    ("faults", "faults can be injected into a runtime, for tests of error paths\0"),
    ("hugetlb", "explicit huge pages from the reserved pool\0"),
    ("io_uring", "asynchronous file I/O without a thread per request\0"),
    ("mlock", "memory can be locked in RAM\0"),
    ("redis", "a remote tier on servers that speak its protocol\0"),
    ("s3", "a remote tier in buckets of S3 and of servers with its protocol\0"),
    ("seal", "objects of a remote tier are encrypted and authenticated\0"),
    ("thp", "transparent huge pages\0"),
    ("tls", "encrypted connections of a remote tier\0"),
    ("wipeonfork", "the kernel identifies a forked child at no cost\0"),
];

/// The feature at an index of the list.
pub fn feature(index: usize) -> Option<Feature> {
    let (name, note) = *FEATURES.get(index)?;
    let facts = MemoryFacts::probe;
    let (built, present) = match name {
        "cuda" => (true, has_cuda()),
        // These need nothing of the machine.
        "dir" => (cfg!(feature = "dir"), cfg!(feature = "dir")),
        "redis" => (cfg!(feature = "redis"), cfg!(feature = "redis")),
        "s3" => (cfg!(feature = "s3"), cfg!(feature = "s3")),
        "seal" => (cfg!(feature = "seal"), cfg!(feature = "seal")),
        "tls" => (cfg!(feature = "tls"), cfg!(feature = "tls")),
        "faults" => (true, true),
        "hugetlb" => (true, facts().hugetlb_free_pages > 0),
        "io_uring" => (true, io_uring().is_ok()),
        "mlock" => (true, facts().lockable_bytes() > 0),
        "thp" => (true, matches!(facts().thp_mode.as_str(), "always" | "madvise")),
        "wipeonfork" => (true, fork::kernel_wipes()),
        _ => (false, false),
    };
    Some(Feature { name, note: note.trim_end_matches('\0'), built, present })
}

/// Sets up a small ring and closes it: the kernel and its seccomp filter decide.
pub fn io_uring() -> Result<()> {
    let mut params = [0u8; 120]; // struct io_uring_params
    // SAFETY: the kernel reads and writes 120 bytes at `params`, and returns a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 2u32, params.as_mut_ptr()) };
    if fd < 0 {
        return Err(Error::os("io_uring_setup"));
    }
    // SAFETY: a descriptor this call has just created and nothing else owns.
    drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
    Ok(())
}

/// Whether the machine has a CUDA driver that the device can use.
fn has_cuda() -> bool {
    cuda_version(Path::new(CUDA_DRIVER)).is_ok_and(|version| version >= LEAST_CUDA)
}

/// The smallest alignment that O_DIRECT reads support on a directory's file system.
pub fn direct_alignment(directory: &Path) -> Result<u64> {
    let name = directory.join(format!(".kvt-probe-{}", std::process::id()));
    let path = CString::new(name.as_os_str().as_encoded_bytes())
        .map_err(|_| Error::new(Status::Invalid, "the path contains a NUL"))?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: a NUL-terminated path; the result is checked.
    let fd = unsafe { libc::open(path.as_ptr(), flags | libc::O_DIRECT, 0o600) };
    if fd < 0 {
        return Err(Error::os(&format!("O_DIRECT in {}", directory.display())));
    }
    // SAFETY: a descriptor this call has just created and nothing else owns.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the path opened above; the file lives on through its descriptor.
    unsafe { libc::unlink(path.as_ptr()) };
    let buffer =
        Buffer::map(&AllocationRequest { bytes: 128 << 10, ..AllocationRequest::default() }, None)?;
    // SAFETY: 64 KiB inside the buffer.
    let wrote = unsafe { libc::pwrite(file.as_raw_fd(), buffer.address().cast(), 64 << 10, 0) };
    if wrote != 64 << 10 {
        return Err(Error::os(&format!("writing with O_DIRECT in {}", directory.display())));
    }
    let works = |align: usize| {
        // SAFETY: `align` bytes at offset `align` inside the buffer.
        let got = unsafe {
            let at = buffer.address().add(align).cast();
            libc::pread(file.as_raw_fd(), at, align, align as i64)
        };
        got == align as isize
    };
    (9..=16)
        .map(|bits| 1usize << bits)
        .find(|align| works(*align))
        .map(|align| align as u64)
        .ok_or_else(|| {
            Error::new(
                Status::Unavailable,
                "O_DIRECT works with no alignment up to 64 KiB: open the disk with buffered=true",
            )
        })
}

/// Alignment that the kernel reports for a file (since Linux 6.1); 0 = unknown.
pub fn reported_alignment(file: &impl AsRawFd) -> Result<u64> {
    // SAFETY: integers only, which may be zero.
    let mut facts: libc::statx = unsafe { std::mem::zeroed() };
    let (fd, flags) = (file.as_raw_fd(), libc::AT_EMPTY_PATH);
    // SAFETY: an empty path means the descriptor; `facts` is a writable statx.
    let rc = unsafe { libc::statx(fd, c"".as_ptr(), flags, libc::STATX_DIOALIGN, &mut facts) };
    if rc != 0 || facts.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Ok(0);
    }
    let (memory, offset) = (facts.stx_dio_mem_align, facts.stx_dio_offset_align);
    if memory == 0 || offset == 0 {
        fail!(
            Unavailable,
            "this file system does not support O_DIRECT: open the disk with buffered=true"
        );
    }
    Ok(u64::from(memory.max(offset)))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn features_are_sorted_and_known() {
        assert!(FEATURES.windows(2).all(|w| w[0].0 < w[1].0));
        assert!((0..FEATURES.len()).all(|i| feature(i).is_some_and(|f| !f.note.is_empty())));
        assert!(feature(FEATURES.len()).is_none());
        let built = |name: &str| {
            let all = (0..FEATURES.len()).filter_map(feature);
            all.filter(|feature| feature.name == name)
                .any(|feature| feature.built && feature.present)
        };
        assert_eq!(built("redis"), cfg!(feature = "redis"));
        assert_eq!(built("tls"), cfg!(feature = "tls"));
        assert_eq!(built("seal"), cfg!(feature = "seal"));
        assert_eq!(built("s3"), cfg!(feature = "s3"));
        assert_eq!(built("dir"), cfg!(feature = "dir"));
    }

    #[test]
    fn direct_alignment_is_a_power_of_two_or_an_error() {
        if let Ok(align) = direct_alignment(&std::env::temp_dir()) {
            assert!(align.is_power_of_two() && (512..=65_536).contains(&align));
        }
        assert!(direct_alignment(Path::new("/nonexistent")).is_err());
    }
}
