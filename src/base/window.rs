//! A window: a range of addresses as large as a model, of which only parts have memory. It
//! serves engines whose pointers to weights never change. A part gets memory when it is
//! written, and returns it after its use.

use std::ffi::c_void;

use crate::base::fork::{self, page_bytes};
use crate::base::memory::HUGE_PAGE_BYTES;
use crate::base::status::{Error, Result, Status};
use crate::fail;

/// Largest window.
pub const MAX_WINDOW_BYTES: u64 = 1 << 46;
/// Pages that one `mincore` call checks.
const MINCORE_PAGES: usize = 1 << 16;

/// A range of reserved addresses.
pub struct Window {
    start: *mut c_void,
    bytes: u64,
    mapped: usize,
    strict: bool,
}

// SAFETY: a range of addresses. The callers of `take` and `give_back` guarantee the order of
// reads and writes of a part.
unsafe impl Send for Window {}
// SAFETY: as above; the window itself does not change.
unsafe impl Sync for Window {}

impl Window {
    /// Reserves addresses. Parts that were not taken, or were given back, read as zeros.
    pub fn reserve(bytes: u64) -> Result<Window> {
        Window::new(bytes, false)
    }

    /// Reserves addresses of which only taken parts may be touched: any other access faults
    /// (SIGSEGV). For debugging. Each boundary of a taken part is one more mapping of the
    /// process, whose limit is about 65,000.
    pub fn strict(bytes: u64) -> Result<Window> {
        Window::new(bytes, true)
    }

    fn new(bytes: u64, strict: bool) -> Result<Window> {
        fork::arm()?;
        fork::check()?;
        if bytes == 0 || bytes > MAX_WINDOW_BYTES {
            fail!(Invalid, "a window has 1 to {MAX_WINDOW_BYTES} bytes, not {bytes}");
        }
        let page = page_bytes() as u64;
        let mapped = usize::try_from(bytes.next_multiple_of(page)).map_err(|_| Status::NoMem)?;
        let prot = if strict { libc::PROT_NONE } else { libc::PROT_READ | libc::PROT_WRITE };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let slack = if bytes < HUGE_PAGE_BYTES { 0 } else { HUGE_PAGE_BYTES as usize };
        // SAFETY: a fresh private anonymous mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), mapped + slack, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            let os = std::io::Error::last_os_error();
            fail!(
                NoMem,
                "cannot reserve {bytes} bytes of addresses: {os}; raise RLIMIT_AS, or set \
                 vm.overcommit_memory to 0 or 1 if it is 2"
            );
        }
        // SAFETY: the mapping made above, which nothing uses yet.
        let start = if slack == 0 { start } else { unsafe { align_to_huge(start, mapped) } };
        // A huge page would allocate memory for neighbours that were not taken, and giving back
        // a part of it frees nothing. Both hints may fail without harm on old kernels.
        // SAFETY: the mapping made above.
        unsafe {
            libc::madvise(start, mapped, libc::MADV_DONTFORK);
            libc::madvise(start, mapped, libc::MADV_NOHUGEPAGE);
        }
        Ok(Window { start, bytes, mapped, strict })
    }

    /// Requests huge pages for the whole ones inside a range, which must be taken and given back as
    /// a whole. Each range is one more mapping of the process, or two; their limit is about 65,000.
    pub fn prefer_huge(&self, offset: u64, bytes: u64) -> Result<()> {
        self.check(offset, bytes)?;
        let from = offset.next_multiple_of(HUGE_PAGE_BYTES);
        let to = (offset + bytes) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        if from < to {
            // SAFETY: pages of the mapping. The hint changes no content, and fails without harm
            // where it is unknown.
            unsafe {
                let at = self.start.byte_add(from as usize);
                libc::madvise(at, (to - from) as usize, libc::MADV_HUGEPAGE);
            }
        }
        Ok(())
    }

    /// The start, aligned to a page; to a huge page if the window is as large as one.
    pub fn address(&self) -> *mut u8 {
        self.start.cast()
    }

    /// The length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of `offset`, if `bytes` from there lie inside the window.
    pub fn range(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: the range lies inside the mapping, which is below 2^63 bytes.
        (end <= self.bytes).then(|| unsafe { self.address().add(offset as usize) })
    }

    fn check(&self, offset: u64, bytes: u64) -> Result<()> {
        fork::check()?;
        match self.range(offset, bytes) {
            Some(_) => Ok(()),
            None => fail!(
                Invalid,
                "{bytes} bytes at offset {offset} exceed a window of {} bytes",
                self.bytes
            ),
        }
    }

    /// Makes every page that a range touches usable. The first write allocates memory. Does
    /// nothing unless the window is strict.
    pub fn take(&self, offset: u64, bytes: u64) -> Result<()> {
        self.check(offset, bytes)?;
        let page = page_bytes() as u64;
        let from = offset / page * page;
        let to = (offset + bytes).next_multiple_of(page);
        if !self.strict || bytes == 0 {
            return Ok(());
        }
        // SAFETY: pages of the mapping; only their protection changes.
        let rc = unsafe {
            let at = self.start.byte_add(from as usize);
            libc::mprotect(at, (to - from) as usize, libc::PROT_READ | libc::PROT_WRITE)
        };
        if rc == 0 { Ok(()) } else { Err(Error::os("cannot make a part of a window usable")) }
    }

    /// Frees the memory of the pages that lie entirely inside a range; pages shared with a
    /// neighbour are kept. Returns the bytes freed.
    ///
    /// # Safety
    /// The range must not be in use any more: its contents are lost.
    pub unsafe fn give_back(&self, offset: u64, bytes: u64) -> Result<u64> {
        self.check(offset, bytes)?;
        let page = page_bytes() as u64;
        let from = offset.next_multiple_of(page);
        // The last page belongs to the window alone, even if it is only partly used.
        let end = offset + bytes;
        let to = if end == self.bytes { self.mapped as u64 } else { end / page * page };
        if from >= to {
            return Ok(0);
        }
        let len = (to - from) as usize;
        // SAFETY: whole pages of the mapping; the caller guarantees that they are not in use.
        let rc = unsafe {
            let at = self.start.byte_add(from as usize);
            match libc::madvise(at, len, libc::MADV_DONTNEED) {
                0 if self.strict => libc::mprotect(at, len, libc::PROT_NONE),
                rc => rc,
            }
        };
        if rc == 0 { Ok(to - from) } else { Err(Error::os("cannot free a part of a window")) }
    }

    /// Bytes of memory behind the window now, from `mincore`. Time grows with the window.
    pub fn resident_bytes(&self) -> Result<u64> {
        fork::check()?;
        let page = page_bytes();
        let mut seen = vec![0u8; MINCORE_PAGES.min(self.mapped / page)];
        let mut resident = 0u64;
        let step = seen.len() * page;
        for from in (0..self.mapped).step_by(step) {
            let len = step.min(self.mapped - from);
            // SAFETY: a range of the mapping, and a byte for each of its pages.
            let rc = unsafe { libc::mincore(self.start.byte_add(from), len, seen.as_mut_ptr()) };
            if rc != 0 {
                return Err(Error::os("cannot read the resident pages of a window"));
            }
            let pages = seen.iter().take(len / page).filter(|byte| *byte & 1 == 1).count();
            resident += (pages * page) as u64;
        }
        Ok(resident)
    }
}

/// Unmaps one huge page in total around `bytes` bytes, so that their start is aligned to a huge page.
///
/// # Safety
/// `start` is a mapping of `bytes` + [`HUGE_PAGE_BYTES`], and nothing uses it.
unsafe fn align_to_huge(start: *mut c_void, bytes: usize) -> *mut c_void {
    let huge = HUGE_PAGE_BYTES as usize;
    let skip = (start as usize).next_multiple_of(huge) - start as usize;
    // SAFETY: the caller's promise; both ranges lie in the mapping, before and behind the rest.
    unsafe {
        if skip > 0 {
            libc::munmap(start, skip);
        }
        let aligned = start.byte_add(skip);
        libc::munmap(aligned.byte_add(bytes), huge - skip);
        aligned
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // A forked child has no mapping of the window: other memory may lie there.
        if fork::check().is_ok() {
            // SAFETY: exactly the range that was mapped, and it is not in use any more.
            unsafe { libc::munmap(self.start, self.mapped) };
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page() -> u64 {
        page_bytes() as u64
    }

    fn fill(window: &Window, offset: u64, bytes: u64, with: u8) {
        let at = window.range(offset, bytes).expect("inside");
        // SAFETY: a range that this test has taken.
        unsafe { at.write_bytes(with, bytes as usize) };
    }

    fn at(window: &Window, offset: u64) -> u8 {
        // SAFETY: as above.
        unsafe { window.range(offset, 1).expect("inside").read_volatile() }
    }

    fn give_back(window: &Window, offset: u64, bytes: u64) -> u64 {
        // SAFETY: tests read a part that they gave back only to see zeros.
        unsafe { window.give_back(offset, bytes) }.expect("freed")
    }

    #[test]
    fn terabytes_of_addresses_take_no_memory() {
        let window = Window::reserve(3 << 40).expect("addresses");
        let last = (3 << 40) - 100;
        for offset in [0, 1 << 40, last] {
            fill(&window, offset, 100, 7);
            assert_eq!(at(&window, offset + 99), 7);
        }
        assert_eq!(give_back(&window, last, 100), 0, "the range has no whole page");
        assert_eq!(give_back(&window, (3 << 40) - page(), page()), page());
        assert_eq!((at(&window, last), at(&window, 0)), (0, 7));
    }

    #[test]
    fn huge_pages_stay_inside_their_range() {
        const HUGE: u64 = HUGE_PAGE_BYTES;
        let window = Window::reserve(4 * HUGE).expect("addresses");
        assert_eq!(window.address() as u64 % HUGE, 0);
        let (offset, bytes) = (HUGE - page(), HUGE + 3 * page());
        window.prefer_huge(offset, bytes).expect("inside");
        for at in [offset, HUGE, 2 * HUGE, 2 * HUGE + page()] {
            fill(&window, at, 1, 7);
        }
        // One huge page at most, and a small one before and two behind.
        let resident = window.resident_bytes().expect("pages");
        assert!((4 * page()..=HUGE + 3 * page()).contains(&resident), "{resident}");
        assert_eq!(give_back(&window, offset, bytes), bytes);
        assert_eq!(window.resident_bytes().expect("pages"), 0);
        assert!(window.prefer_huge(3 * HUGE, 2 * HUGE).is_err());
    }

    #[test]
    fn invalid_ranges_are_refused() {
        let status = |bytes| Window::reserve(bytes).err().map(|error| error.status());
        assert_eq!(status(0), Some(Status::Invalid));
        assert_eq!(status(u64::MAX), Some(Status::Invalid));
        let window = Window::strict(10_000).expect("addresses");
        assert_eq!((window.bytes(), window.resident_bytes()), (10_000, Ok(0)));
        for (offset, bytes) in [(0, 10_001), (u64::MAX, 2), (10_001, 0)] {
            assert!(window.take(offset, bytes).is_err() && window.range(offset, bytes).is_none());
            // SAFETY: refused.
            assert!(unsafe { window.give_back(offset, bytes) }.is_err());
        }
        assert_eq!(window.take(10_000, 0), Ok(()));
    }

    /// Whether an access to an address faults. A write from there into a pipe fails, while a
    /// plain read would end the process.
    fn faults(address: *mut u8) -> bool {
        // SAFETY: descriptors of this test; the kernel checks the address.
        unsafe {
            let mut ends = [0; 2];
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            let wrote = libc::write(ends[1], address.cast(), 1);
            ends.iter().for_each(|fd| assert_eq!(libc::close(*fd), 0));
            wrote != 1
        }
    }

    #[test]
    fn a_strict_window_faults_outside_of_taken_parts() {
        let window = Window::strict(16 * page()).expect("addresses");
        assert!(faults(window.address()));
        window.take(2 * page() + 5, page()).expect("taken");
        let open = |n: u64| !faults(window.range(n * page(), 1).expect("inside"));
        assert_eq!([1, 2, 3, 4].map(open), [false, true, true, false]);
        fill(&window, 2 * page(), 2 * page(), 9);
        assert_eq!(give_back(&window, 2 * page() + 5, 2 * page()), page());
        assert_eq!([1, 2, 3, 4].map(open), [false, true, false, false]);
        assert_eq!(at(&window, 2 * page()), 9);
        window.take(3 * page(), 1).expect("taken");
        assert_eq!((at(&window, 3 * page()), window.resident_bytes().is_ok()), (0, true));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn memory_is_allocated_and_freed_by_whole_pages(
            bytes in 1u64..40 * 4096,
            strict in any::<bool>(),
            steps in proptest::collection::vec((any::<bool>(), any::<u64>(), any::<u64>()), 1..20),
        ) {
            let window = Window::new(bytes, strict).expect("addresses");
            let pages = bytes.div_ceil(page());
            let mut model = vec![false; pages as usize];
            for (take, a, b) in steps {
                let offset = a % bytes;
                let len = 1 + b % (bytes - offset);
                let end = offset + len;
                if take {
                    prop_assert_eq!(window.take(offset, len), Ok(()));
                    fill(&window, offset, len, 3);
                    (offset / page()..end.div_ceil(page())).for_each(|n| model[n as usize] = true);
                } else {
                    let whole = |n: &u64| {
                        n * page() >= offset && ((n + 1) * page() <= end || end == bytes)
                    };
                    let freed: Vec<u64> = (0..pages).filter(whole).collect();
                    let expected = freed.len() as u64 * page();
                    prop_assert_eq!(give_back(&window, offset, len), expected);
                    freed.iter().for_each(|n| model[*n as usize] = false);
                }
                let resident = model.iter().filter(|page| **page).count() as u64 * page();
                prop_assert_eq!(window.resident_bytes(), Ok(resident));
            }
        }
    }
}
