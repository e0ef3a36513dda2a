//! Large tables of zeros, straight from the kernel: nothing is touched before
//! it is used, so a table can be sized for its limit at once and never grows.

use std::ffi::c_void;
use std::mem::size_of;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::base::memory::HUGE_PAGE_BYTES;
use crate::base::status::Result;
use crate::fail;

/// A type whose every byte may be zero.
///
/// # Safety
/// All-zero bytes are a valid value, and dropping a value does nothing.
pub unsafe trait Zeroable: Copy {}

// SAFETY: an integer may be zero.
unsafe impl Zeroable for u8 {}
// SAFETY: as above.
unsafe impl Zeroable for u16 {}
// SAFETY: as above.
unsafe impl Zeroable for u32 {}
// SAFETY: as above.
unsafe impl Zeroable for u64 {}

/// Largest sparse table in huge pages.
const SPARSE_HUGE_BYTES: usize = 32 << 20;

/// A slice of fixed length that starts as zeros and costs memory only where it
/// was written.
pub struct Zeroed<T: Zeroable> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its elements like a Box<[T]>.
unsafe impl<T: Zeroable + Send> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Zeroable + Sync> Sync for Zeroed<T> {}

impl<T: Zeroable> Zeroed<T> {
    /// `len` zeros, in huge pages if the table is large: for those that fill from
    /// the front.
    pub fn new(len: usize) -> Result<Zeroed<T>> {
        Zeroed::map(len, usize::MAX)
    }

    /// `len` zeros of a table that is touched here and there from the start. Huge
    /// pages would then make a large one present at once, so only a small one has
    /// them.
    pub fn sparse(len: usize) -> Result<Zeroed<T>> {
        Zeroed::map(len, SPARSE_HUGE_BYTES)
    }

    fn map(len: usize, most_huge_bytes: usize) -> Result<Zeroed<T>> {
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|b| isize::try_from(*b).is_ok())
        else {
            fail!(NoMem, "a table of {len} entries is larger than memory can be");
        };
        if bytes == 0 {
            return Ok(Zeroed { start: NonNull::dangling(), len });
        }
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping; no address is asked for.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            fail!(NoMem, "no memory for a table of {bytes} bytes");
        }
        if bytes as u64 >= 4 * HUGE_PAGE_BYTES && bytes <= most_huge_bytes {
            // Random probes of a large table cost mostly TLB misses. A wish only.
            // SAFETY: the mapping just made.
            unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
        }
        match NonNull::new(start.cast::<T>()) {
            Some(start) => Ok(Zeroed { start, len }),
            None => fail!(NoMem, "the kernel mapped a table at address 0"),
        }
    }
}

impl<T: Zeroable> Deref for Zeroed<T> {
    type Target = [T];
    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements, zero or written since, page-aligned, owned.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Zeroable> DerefMut for Zeroed<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Zeroable> Drop for Zeroed<T> {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<T>();
        if bytes > 0 {
            // SAFETY: the mapping made by `new`, given back once.
            unsafe { libc::munmap(self.start.as_ptr().cast::<c_void>(), bytes) };
        }
    }
}

/// Asks the processor to fetch `slice[at]` soon; nothing happens past the end.
#[inline]
pub fn prefetch<T>(slice: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(item) = slice.get(at) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint; it reads nothing and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(item).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, at);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;

    #[test]
    fn zeros_that_can_be_written() {
        let mut table = Zeroed::<u64>::new(3_000_000).expect("24 MB");
        assert!(table.iter().all(|&x| x == 0));
        table[2_999_999] = 7;
        assert_eq!(table.last(), Some(&7));
        prefetch(&table, 5_000_000);
        assert!(Zeroed::<u64>::new(0).expect("none").is_empty());
    }

    #[test]
    fn a_table_too_large_is_an_error() {
        let error = Zeroed::<u64>::new(usize::MAX / 8).err().expect("too large");
        assert_eq!(error.status(), Status::NoMem);
        assert!(Zeroed::<u64>::new(usize::MAX).is_err());
    }
}
