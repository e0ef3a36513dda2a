//! Fork detection: one word that the kernel zeroes in a child.
//!
//! Threads do not survive a fork and locks may be held by ones that did not,
//! so a child of a process that opened the library must not enter it.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use once_cell::sync::OnceCell;

use crate::base::status::{Error, Result, Status};

const ALIVE: u32 = 0x6b76_7431;

/// Kernels without MADV_WIPEONFORK use this, cleared by a pthread_atfork handler.
static FALLBACK: AtomicU32 = AtomicU32::new(ALIVE);
static WORD: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
static ARMED: OnceCell<bool> = OnceCell::new();

extern "C" fn in_child() {
    FALLBACK.store(0, Ordering::Relaxed);
}

/// Arms the detection; called by whatever is opened first. Returns whether the
/// kernel does the wiping (else an atfork handler does).
pub fn arm() -> Result<bool> {
    ARMED
        .get_or_try_init(|| {
            if let Some(word) = wiped_page() {
                WORD.store(word, Ordering::Release);
                return Ok(true);
            }
            // SAFETY: the handler only stores to a static, which is async-signal-safe,
            // and this library is never unloaded (linked nodelete).
            if unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0 {
                return Err(Error::new(Status::NoMem, "pthread_atfork failed"));
            }
            WORD.store((&raw const FALLBACK).cast_mut(), Ordering::Release);
            Ok(false)
        })
        .copied()
}

/// Whether the kernel does the wiping. Asking arms nothing.
pub fn kernel_wipes() -> bool {
    let Some(page) = wiped_page() else { return false };
    // SAFETY: the page mapped just now, which nobody else knows.
    unsafe { libc::munmap(page.cast(), page_bytes()) };
    true
}

fn wiped_page() -> Option<*mut AtomicU32> {
    let bytes = page_bytes();
    // SAFETY: a fresh private anonymous mapping; checked before use, never unmapped.
    unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if page == libc::MAP_FAILED {
            return None;
        }
        if libc::madvise(page, bytes, libc::MADV_WIPEONFORK) != 0 {
            libc::munmap(page, bytes);
            return None;
        }
        let word = page.cast::<AtomicU32>();
        (*word).store(ALIVE, Ordering::Release);
        Some(word)
    }
}

/// The size of a page of memory.
pub fn page_bytes() -> usize {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Fails in a forked child of a process that had armed the detection.
#[inline]
pub fn check() -> Result<()> {
    let word = WORD.load(Ordering::Acquire);
    if word.is_null() {
        return Ok(()); // nothing was opened, so nothing can be broken
    }
    // SAFETY: set once by `arm` to memory that is never unmapped.
    if unsafe { (*word).load(Ordering::Relaxed) } == ALIVE {
        Ok(())
    } else {
        Err(Status::Forked.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn child_sees() -> i32 {
        // SAFETY: the child calls nothing but `check` and `_exit`.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::_exit(check().is_err() as i32);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
            libc::WEXITSTATUS(status)
        }
    }

    #[test]
    fn a_child_is_told() {
        arm().expect("arming works on linux");
        assert!(check().is_ok());
        assert_eq!(child_sees(), 1);
        assert!(check().is_ok(), "the parent goes on");
    }
}
