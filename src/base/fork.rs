//! Fork detection by one word that the kernel zeroes in a child.
//!
//! Threads do not survive a fork, and lost threads may hold locks. A child of a process that
//! used the library must therefore not call it.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use once_cell::sync::OnceCell;

use crate::base::status::{Error, Result, Status};

const ALIVE: u32 = 0x6b76_7431;

/// The word on kernels without MADV_WIPEONFORK; a pthread_atfork handler clears it.
static FALLBACK: AtomicU32 = AtomicU32::new(ALIVE);
static WORD: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
static ARMED: OnceCell<bool> = OnceCell::new();

extern "C" fn in_child() {
    FALLBACK.store(0, Ordering::Relaxed);
}

/// Arms the detection; the first object that is opened calls it. Returns whether the kernel
/// clears the word; otherwise an atfork handler does.
pub fn arm() -> Result<bool> {
    ARMED
        .get_or_try_init(|| {
            if let Some(word) = wiped_page() {
                WORD.store(word, Ordering::Release);
                return Ok(true);
            }
            // SAFETY: the handler only stores to a static, which is async-signal-safe, and the
            // library is never unloaded (linked with nodelete).
            if unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0 {
                return Err(Error::new(Status::NoMem, "pthread_atfork failed"));
            }
            WORD.store((&raw const FALLBACK).cast_mut(), Ordering::Release);
            Ok(false)
        })
        .copied()
}

/// Whether the kernel supports MADV_WIPEONFORK. Does not arm the detection.
pub fn kernel_wipes() -> bool {
    let Some(page) = wiped_page() else { return false };
    // SAFETY: the page mapped above, which no other code uses.
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

/// The size of a memory page.
pub fn page_bytes() -> usize {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Fails in a forked child of a process that has armed the detection.
#[inline]
pub fn check() -> Result<()> {
    let word = WORD.load(Ordering::Acquire);
    if word.is_null() {
        return Ok(()); // no object was opened before a fork
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
    fn check_fails_in_a_child_only() {
        arm().expect("arming works on linux");
        assert!(check().is_ok());
        assert_eq!(child_sees(), 1);
        assert!(check().is_ok(), "the parent continues");
    }
}
