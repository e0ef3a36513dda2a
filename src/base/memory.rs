//! Buffers: aligned, pinned or huge-page memory from the kernel, or memory of the engine. Every
//! operation works on [`Buffer`]s.

use std::ffi::c_void;

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::fault::{Faults, Site};
use crate::base::fork::page_bytes;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::fail;

/// Largest buffer.
pub const MAX_BUFFER_BYTES: u64 = 1 << 46;
/// Largest alignment.
pub const MAX_ALIGN_BYTES: u64 = 1 << 30;
/// Size of a huge page of x86-64 and, with 4 KiB base pages, aarch64.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Whether an allocation must have a property.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Requirement {
    /// Not requested.
    #[default]
    No,
    /// Requested; the allocation succeeds without it.
    Try,
    /// Required; the allocation fails without it.
    Must,
}

/// The kind of pages behind a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Pages {
    /// The machine's normal pages.
    #[default]
    Normal = 0,
    /// Normal pages that the kernel may merge into huge ones.
    Transparent = 1,
    /// Explicit huge pages from the reserved pool.
    HugeTlb = 2,
    /// The caller's memory; its pages are unknown.
    Foreign = 3,
}

/// A request for memory with properties.
#[derive(Clone, Default)]
pub struct AllocationRequest {
    /// Size in bytes.
    pub bytes: u64,
    /// Alignment in bytes, a power of two; 0 = one page.
    pub align_bytes: u64,
    /// Locked in RAM.
    pub pin: Requirement,
    /// Huge pages: transparent ones with `Try`, reserved ones with `Must`.
    pub huge: Requirement,
    /// Transparent huge pages where whole ones fit; the size is not rounded up to them. Direct
    /// reads from disk into such memory are up to twice as fast.
    pub prefer_huge: bool,
    /// The account that is charged.
    pub account: Option<Arc<Account>>,
}

/// Marks a freed buffer in its count of operations.
const FREED: u64 = 1 << 63;

/// The owner of a buffer's memory.
enum Backing {
    Mapping { start: *mut c_void, bytes: usize },
    Foreign { _guard: Box<dyn Send + Sync> },
}

/// A range of host memory that operations may read and write.
pub struct Buffer {
    address: *mut u8,
    bytes: u64,
    charged_bytes: u64,
    pinned: bool,
    pages: Pages,
    in_flight: AtomicU64,
    account: Option<Arc<Account>>,
    backing: Backing,
}

// SAFETY: the buffer is a range of memory. The contract of operations orders reads and writes:
// a buffer in flight belongs to the library until it is released.
unsafe impl Send for Buffer {}
// SAFETY: as above; the counters are atomics.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Maps memory.
    pub fn map(request: &AllocationRequest, faults: Option<&Faults>) -> Result<Buffer> {
        let page = page_bytes() as u64;
        if request.bytes == 0 || request.bytes > MAX_BUFFER_BYTES {
            fail!(Invalid, "a buffer has 1 to {MAX_BUFFER_BYTES} bytes, not {}", request.bytes);
        }
        let requested = request.align_bytes;
        let align = requested.max(page);
        if (requested != 0 && !requested.is_power_of_two()) || align > MAX_ALIGN_BYTES {
            fail!(Invalid, "alignment {requested} is not a power of two up to {MAX_ALIGN_BYTES}");
        }
        let unit = if request.huge == Requirement::No { page } else { HUGE_PAGE_BYTES };
        let mapped_bytes = request.bytes.next_multiple_of(unit);
        let charge = Charge::take(request.account.as_ref(), mapped_bytes, request.pin)?;
        let mapping = Mapping::new(mapped_bytes, align, request.huge, faults)?;
        if request.prefer_huge {
            mapping.prefer_huge();
        }
        let pinned = mapping.pin(request.pin, charge.pinned, faults)?;
        charge.commit(pinned);
        Ok(Buffer {
            address: mapping.aligned.cast(),
            bytes: request.bytes,
            charged_bytes: mapped_bytes,
            pinned,
            pages: mapping.pages,
            in_flight: AtomicU64::new(0),
            account: request.account.clone(),
            backing: mapping.into_backing(),
        })
    }

    /// Wraps memory of the caller. `guard` is dropped when the buffer is freed and its last
    /// operation is released.
    ///
    /// # Safety
    /// `address` must stay valid for reads and writes of `bytes` until then.
    pub unsafe fn wrap(
        address: *mut u8,
        bytes: u64,
        guard: Box<dyn Send + Sync>,
    ) -> Result<Buffer> {
        if address.is_null() || bytes == 0 || bytes > MAX_BUFFER_BYTES {
            fail!(
                Invalid,
                "wrapped memory needs an address and 1 to {MAX_BUFFER_BYTES} bytes, not {bytes} \
                 bytes at {address:p}"
            );
        }
        if (address as u64).checked_add(bytes).is_none() {
            fail!(Invalid, "{bytes} bytes at {address:p} wrap around the address space");
        }
        Ok(Buffer {
            address,
            bytes,
            charged_bytes: 0,
            pinned: false,
            pages: Pages::Foreign,
            in_flight: AtomicU64::new(0),
            account: None,
            backing: Backing::Foreign { _guard: guard },
        })
    }

    /// The start of the buffer.
    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// The usable size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes charged to the account.
    pub fn charged_bytes(&self) -> u64 {
        self.charged_bytes
    }

    /// Whether the memory is locked in RAM.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// The kind of pages behind the buffer.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Operations submitted and not yet released.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Acquire) & !FREED
    }

    /// Refuses new operations from now on; false while an operation is in flight.
    pub fn retire(&self) -> bool {
        self.in_flight.compare_exchange(0, FREED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Whether the buffer refuses operations: one that entered late must leave.
    pub fn is_retired(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) & FREED != 0
    }

    /// Counts an operation that begins to use the buffer.
    pub fn enter(&self) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts an operation that has released the buffer.
    pub fn leave(&self) {
        let before = self.in_flight.fetch_sub(1, Ordering::Release);
        debug_assert!(before & !FREED > 0, "a buffer was left more often than entered");
    }

    /// The address of `offset`, if `bytes` from there lie inside the buffer.
    pub fn range(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: the range lies inside the allocation, which is below 2^63 bytes.
        (end <= self.bytes).then(|| unsafe { self.address.add(offset as usize) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        debug_assert_eq!(self.in_flight(), 0, "a buffer in flight was freed");
        if let Backing::Mapping { start, bytes } = self.backing {
            // SAFETY: exactly the range that was mapped. No operation uses it any more: every
            // one holds a reference until it is released.
            unsafe { libc::munmap(start, bytes) };
        }
        if let Some(account) = &self.account {
            account.give_back(Tier::Host, self.charged_bytes);
            if self.pinned {
                account.give_back(Tier::Pinned, self.charged_bytes);
            }
        }
    }
}

/// Bytes charged to an account; the drop releases them unless they were kept.
struct Charge<'a> {
    account: Option<&'a Arc<Account>>,
    bytes: u64,
    pinned: bool,
    committed: bool,
}

impl<'a> Charge<'a> {
    fn take(account: Option<&'a Arc<Account>>, bytes: u64, pin: Requirement) -> Result<Charge<'a>> {
        let mut pinned = pin != Requirement::No;
        if let Some(account) = account {
            // The drop of a `Charge` releases both tiers, so it is created last.
            account.take(Tier::Host, bytes)?;
            match if pinned { account.take(Tier::Pinned, bytes) } else { Ok(()) } {
                Ok(()) => {}
                Err(_) if pin == Requirement::Try => pinned = false,
                Err(error) => {
                    account.give_back(Tier::Host, bytes);
                    return Err(error);
                }
            }
        }
        Ok(Charge { account, bytes, pinned, committed: false })
    }

    fn commit(mut self, pinned: bool) {
        if let (Some(account), true, false) = (self.account, self.pinned, pinned) {
            account.give_back(Tier::Pinned, self.bytes);
        }
        self.committed = true;
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        let (Some(account), false) = (self.account, self.committed) else { return };
        account.give_back(Tier::Host, self.bytes);
        if self.pinned {
            account.give_back(Tier::Pinned, self.bytes);
        }
    }
}

/// An anonymous mapping; the drop unmaps it unless a buffer took it over.
struct Mapping {
    start: *mut c_void,
    mapped: usize,
    aligned: *mut c_void,
    bytes: usize,
    pages: Pages,
}

impl Mapping {
    fn new(bytes: u64, align: u64, huge: Requirement, faults: Option<&Faults>) -> Result<Mapping> {
        if let Some(faults) = faults {
            faults.pass(Site::Map)?;
        }
        let bytes = usize::try_from(bytes).map_err(|_| Status::NoMem)?;
        if huge == Requirement::Must {
            return Mapping::reserved(bytes, align);
        }
        let align =
            if huge == Requirement::Try { align.max(HUGE_PAGE_BYTES) } else { align } as usize;
        let slack = if align > page_bytes() { align } else { 0 };
        let mut mapping = Mapping::anonymous(bytes + slack, 0)?;
        let address = mapping.start as usize;
        let skip = address.next_multiple_of(align) - address;
        // SAFETY: `skip` < `align` <= slack, so the aligned start lies in the mapping.
        mapping.aligned = unsafe { mapping.start.byte_add(skip) };
        mapping.bytes = bytes;
        // SAFETY: the ranges lie in the mapping made above. Both calls may fail on old kernels
        // without harm: they are only hints.
        unsafe {
            libc::madvise(mapping.start, mapping.mapped, libc::MADV_DONTFORK);
            if huge == Requirement::Try
                && libc::madvise(mapping.aligned, bytes, libc::MADV_HUGEPAGE) == 0
            {
                mapping.pages = Pages::Transparent;
            }
        }
        Ok(mapping)
    }

    /// Requests transparent huge pages. Must precede the first touch: touched pages stay small.
    fn prefer_huge(&self) {
        // SAFETY: the pages of this mapping, which no other code has yet. The hint changes no
        // content, and fails without harm where it is unknown.
        unsafe { libc::madvise(self.aligned, self.bytes, libc::MADV_HUGEPAGE) };
    }

    fn reserved(bytes: usize, align: u64) -> Result<Mapping> {
        if align > HUGE_PAGE_BYTES {
            fail!(
                Invalid,
                "alignment {align} is above {HUGE_PAGE_BYTES} bytes, the largest of reserved \
                 huge pages"
            );
        }
        let flags = libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        let mut mapping = Mapping::anonymous(bytes, flags).map_err(|_| {
            let need = bytes as u64 / HUGE_PAGE_BYTES;
            let text = format!("fewer than {need} huge pages are free; raise vm.nr_hugepages");
            Error::new(Status::Unavailable, text)
        })?;
        mapping.pages = Pages::HugeTlb;
        // SAFETY: the whole mapping made above.
        unsafe { libc::madvise(mapping.start, mapping.mapped, libc::MADV_DONTFORK) };
        Ok(mapping)
    }

    fn anonymous(bytes: usize, flags: i32) -> Result<Mapping> {
        // SAFETY: a fresh private anonymous mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(Error::os(&format!("cannot map {bytes} bytes")));
        }
        Ok(Mapping { start, mapped: bytes, aligned: start, bytes, pages: Pages::Normal })
    }

    fn pin(&self, pin: Requirement, allowed: bool, faults: Option<&Faults>) -> Result<bool> {
        if pin == Requirement::No || !allowed {
            return Ok(false);
        }
        let injected = faults.map_or(Ok(()), |f| f.pass(Site::Pin));
        // SAFETY: a range of the mapping made above.
        let rc = injected.map(|()| unsafe { libc::mlock(self.aligned, self.bytes) });
        match (rc, pin) {
            (Ok(0), _) => Ok(true),
            (_, Requirement::Try) => Ok(false),
            _ => {
                let os = std::io::Error::last_os_error();
                let text = format!("cannot lock {} bytes: {os}; raise RLIMIT_MEMLOCK", self.bytes);
                Err(Error::new(Status::PinQuota, text))
            }
        }
    }

    fn into_backing(self) -> Backing {
        let this = std::mem::ManuallyDrop::new(self);
        Backing::Mapping { start: this.start, bytes: this.mapped }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped; no buffer took it over.
        unsafe { libc::munmap(self.start, self.mapped) };
    }
}

/// Makes the pages of a range present and writable, and huge where the kernel provides them.
/// The contents are kept.
///
/// # Safety
/// The range must be mapped and writable, and no other thread may write to it meanwhile.
pub unsafe fn prefault(address: *mut u8, bytes: u64) {
    let page = page_bytes();
    let start = (address as usize) / page * page;
    let end = (address as usize + bytes as usize).next_multiple_of(page);
    // SAFETY: the pages that hold the caller's range; populating changes no content.
    let rc = unsafe { libc::madvise(start as *mut c_void, end - start, libc::MADV_POPULATE_WRITE) };
    if rc == 0 {
        return;
    }
    // Kernels before 5.14: touch every page.
    for offset in (0..bytes as usize).step_by(page) {
        // SAFETY: inside the caller's range; volatile, so that the compiler keeps the access.
        unsafe {
            let at = address.add(offset);
            at.write_volatile(at.read_volatile());
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn request(bytes: u64) -> AllocationRequest {
        AllocationRequest { bytes, ..AllocationRequest::default() }
    }

    #[test]
    fn buffers_are_aligned_and_writable_to_the_last_byte() {
        for align in [0, 4096, 1 << 16, 1 << 21, 1 << 24] {
            let buffer =
                Buffer::map(&AllocationRequest { align_bytes: align, ..request(100_001) }, None)
                    .unwrap();
            assert_eq!(buffer.address() as u64 % align.max(4096), 0);
            // SAFETY: the buffer is this test's alone.
            unsafe {
                prefault(buffer.address(), buffer.bytes());
                buffer.address().add(100_000).write(7);
                assert_eq!(buffer.address().add(100_000).read(), 7);
            }
        }
    }

    #[test]
    fn ranges_do_not_leave_the_buffer() {
        let buffer = Buffer::map(&request(10), None).unwrap();
        assert!(buffer.range(0, 10).is_some());
        assert!(buffer.range(10, 0).is_some());
        assert!(buffer.range(1, 10).is_none());
        assert!(buffer.range(u64::MAX, 2).is_none());
    }

    #[test]
    fn invalid_sizes_and_alignments_are_refused() {
        let status = |w: &AllocationRequest| Buffer::map(w, None).err().unwrap().status();
        assert_eq!(status(&request(0)), Status::Invalid);
        assert_eq!(status(&request(u64::MAX)), Status::Invalid);
        assert_eq!(
            status(&AllocationRequest { align_bytes: 3 << 12, ..request(1) }),
            Status::Invalid
        );
        assert_eq!(status(&AllocationRequest { align_bytes: 3, ..request(1) }), Status::Invalid);
        assert_eq!(
            status(&AllocationRequest { align_bytes: 1 << 40, ..request(1) }),
            Status::Invalid
        );
    }

    #[test]
    fn an_injected_pin_failure_is_a_quota_error_or_a_fallback() {
        let faults = Faults::parse("faults(pin=at(fail=1))").unwrap();
        let must = AllocationRequest { pin: Requirement::Must, ..request(4096) };
        assert_eq!(Buffer::map(&must, Some(&faults)).err().unwrap().status(), Status::PinQuota);
        let faults = Faults::parse("faults(pin=at(fail=1))").unwrap();
        let soft = AllocationRequest { pin: Requirement::Try, ..request(4096) };
        assert!(!Buffer::map(&soft, Some(&faults)).unwrap().is_pinned());
    }

    #[test]
    fn transparent_huge_pages_are_aligned() {
        let huge = AllocationRequest { huge: Requirement::Try, ..request(3 << 20) };
        let buffer = Buffer::map(&huge, None).unwrap();
        assert_eq!(buffer.address() as u64 % HUGE_PAGE_BYTES, 0);
        assert_eq!(buffer.charged_bytes(), 4 << 20);
    }
}
