//! Large zeroed tables from the kernel. Pages are allocated on first touch, so a table is
//! mapped for its limit at once and never grows.

use std::ffi::c_void;
use std::mem::size_of;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::base::memory::HUGE_PAGE_BYTES;
use crate::base::status::Result;
use crate::fail;

/// A type for which all-zero bytes are a valid value.
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

/// Smallest table that gets huge pages.
const LEAST_HUGE_BYTES: usize = 8 << 20;
/// The first bytes of a table that fills from the front, kept in normal pages: most stores use
/// no more.
const PLAIN_BYTES: usize = 4 << 20;
const PAGE_BYTES: u64 = 4096;

/// A slice of fixed length that starts as zeros and uses memory only where it was written.
pub struct Zeroed<T: Zeroable> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its elements like a Box<[T]>.
unsafe impl<T: Zeroable + Send> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Zeroable + Sync> Sync for Zeroed<T> {}

impl<T: Zeroable> Zeroed<T> {
    /// `len` zeros of a table that fills from the front. A large table gets huge pages behind
    /// its first part.
    pub fn new(len: usize) -> Result<Zeroed<T>> {
        Zeroed::map(len, PLAIN_BYTES)
    }

    /// `len` zeros of a table that is soon used everywhere. A large table gets huge pages.
    pub fn dense(len: usize) -> Result<Zeroed<T>> {
        Zeroed::map(len, 0)
    }

    /// Maps `len` zeros; the first `plain_bytes` get normal pages.
    fn map(len: usize, plain_bytes: usize) -> Result<Zeroed<T>> {
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|b| isize::try_from(*b).is_ok())
        else {
            fail!(NoMem, "a table of {len} entries exceeds the address space");
        };
        if bytes == 0 {
            return Ok(Zeroed { start: NonNull::dangling(), len });
        }
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping; no address is requested.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            fail!(NoMem, "cannot map a table of {bytes} bytes");
        }
        if bytes >= LEAST_HUGE_BYTES {
            // Random probes of a large table cost mostly TLB misses. Only hints; the first one
            // matters where the kernel uses huge pages by default.
            let (plain, huge) = (plain_bytes, bytes - plain_bytes);
            // SAFETY: the mapping made above, split at a page.
            unsafe {
                libc::madvise(start, plain, libc::MADV_NOHUGEPAGE);
                libc::madvise(start.byte_add(plain), huge, libc::MADV_HUGEPAGE);
            }
        } else {
            // SAFETY: as above.
            unsafe { libc::madvise(start, bytes, libc::MADV_NOHUGEPAGE) };
        }
        match NonNull::new(start.cast::<T>()) {
            Some(start) => Ok(Zeroed { start, len }),
            None => fail!(NoMem, "the kernel mapped a table at address 0"),
        }
    }
}

impl<T: Zeroable> Zeroed<T> {
    /// Bytes of memory that the first `elements` use, in whole pages, in a table that fills
    /// from the front.
    pub fn front_bytes(&self, elements: usize) -> u64 {
        let all = self.len * size_of::<T>();
        let bytes = self.len.min(elements) * size_of::<T>();
        let is_huge = all >= LEAST_HUGE_BYTES && bytes > PLAIN_BYTES;
        let page_bytes = if is_huge { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let all = (all as u64).next_multiple_of(PAGE_BYTES);
        (bytes as u64).next_multiple_of(page_bytes).min(all)
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
            // SAFETY: the mapping made by `map`, unmapped once.
            unsafe { libc::munmap(self.start.as_ptr().cast::<c_void>(), bytes) };
        }
    }
}

/// Prefetches `slice[at]` into the cache; does nothing past the end.
#[inline]
pub fn prefetch<T>(slice: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(item) = slice.get(at) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint that cannot fault.
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
    fn a_table_starts_as_zeros_and_can_be_written() {
        let mut table = Zeroed::<u64>::new(3_000_000).expect("24 MB");
        assert!(table.iter().all(|&x| x == 0));
        table[2_999_999] = 7;
        assert_eq!(table.last(), Some(&7));
        prefetch(&table, 5_000_000);
        assert!(Zeroed::<u64>::new(0).expect("none").is_empty());
    }

    #[test]
    fn a_table_beyond_the_address_space_is_an_error() {
        let error = Zeroed::<u64>::new(usize::MAX / 8).err().expect("too large");
        assert_eq!(error.status(), Status::NoMem);
        assert!(Zeroed::<u64>::new(usize::MAX).is_err());
    }
}
