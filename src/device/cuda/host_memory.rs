//! Registration of host memory. Several threads fault it in, then the driver pins it. Memory that
//! cannot be pinned is counted, and copied as pageable memory, which is slower.

use std::ffi::c_void;
use std::ops::Bound;

use crate::base::status::{Error, Result};
use crate::base::sync::{cores, spawn};
use crate::device::cuda::abi::{Code, HOST_MAPPED, HOST_PORTABLE, code, is_sticky};
use crate::device::cuda::{Cuda, Inner};
use crate::fail;

/// Minimum share of a thread.
const SHARE_BYTES: usize = 64 << 20;
/// Limit: threads.
const MAX_THREADS: usize = 8;
/// Alignment of shares: a huge page, so that no page has two writers.
const SHARE_ALIGN: usize = 2 << 20;

/// Limit: parts in which others may have registered a range.
const MAX_PIECES: u32 = 4096;

/// Owner of the registration of a range of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registration {
    /// This device.
    Ours,
    /// Another user in the process.
    Theirs,
    /// Not registered.
    Pageable,
}

/// A registered range of host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostRange {
    pub bytes: u64,
    pub registration: Registration,
    /// Kernels use the same address as the processor. Unknown for ranges that others registered,
    /// perhaps in parts.
    pub is_mapped: bool,
}

impl Inner {
    /// The range that contains an address.
    pub fn host_range(&self, address: u64) -> Option<(u64, HostRange)> {
        let (&start, &range) = self.hosts.range(..=address).next_back()?;
        (address - start < range.bytes).then_some((start, range))
    }

    fn overlaps_host_range(&self, from: u64, bytes: u64) -> bool {
        let after = (Bound::Included(from), Bound::Excluded(from + bytes));
        self.host_range(from).is_some() || self.hosts.range(after).next().is_some()
    }
}

impl Cuda {
    /// Implements [`crate::device::Device::register_host`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn register_host_range(&self, address: *mut u8, bytes: u64) -> Result<()> {
        let from = address.expose_provenance() as u64;
        if from == 0 || bytes == 0 || from.checked_add(bytes).is_none() {
            fail!(Invalid, "{bytes} bytes of host memory at {from:#x} are no valid range");
        }
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        if inner.overlaps_host_range(from, bytes) {
            fail!(Invalid, "{bytes} bytes at {from:#x} overlap memory that is registered already");
        }
        let range = HostRange { bytes, registration: Registration::Pageable, is_mapped: false };
        inner.hosts.insert(from, range);
        drop(inner); // registering may take long
        populate(from as usize, bytes as usize);
        let found = self.register(address, bytes);
        let mut inner = self.inner.lock();
        match (found, inner.hosts.get_mut(&from)) {
            (Ok(found), Some(range)) => *range = found,
            (Ok(HostRange { registration: Registration::Ours, .. }), None) => {
                // Unregistered concurrently, against the contract: undo the registration.
                drop(inner);
                self.unregister(from)?;
            }
            (Err(error), _) => {
                inner.hosts.remove(&from);
                return Err(error);
            }
            _ => {}
        }
        Ok(())
    }

    /// Pins a range, if possible. An error means that the device is lost.
    fn register(&self, address: *mut u8, bytes: u64) -> Result<HostRange> {
        let pageable = HostRange { bytes, registration: Registration::Pageable, is_mapped: false };
        let _guard = self.enter()?;
        let place: *mut c_void = address.cast();
        // SAFETY: the caller's memory, which stays mapped until it is unregistered.
        let code = unsafe {
            (self.driver.register_host)(place, bytes as usize, HOST_PORTABLE | HOST_MAPPED)
        };
        match code {
            0 => {}
            code::ALREADY_REGISTERED if self.is_pinned(address as u64, bytes)? => {
                return Ok(HostRange { registration: Registration::Theirs, ..pageable });
            }
            code => {
                let error = self.driver.error("cuMemHostRegister", code);
                if is_sticky(code) {
                    self.lose(&mut self.inner.lock(), &error);
                    return Err(error);
                }
                let text = error.message();
                log::warn!("{bytes} bytes of host memory stay pageable, copies are slower: {text}");
                return Ok(pageable);
            }
        }
        let mut device_address = 0;
        // SAFETY: a place for an address, and memory that is registered.
        let code = unsafe { (self.driver.host_on_device)(&mut device_address, place, 0) };
        let is_mapped = code == 0 && device_address == address as u64;
        Ok(HostRange { bytes, registration: Registration::Ours, is_mapped })
    }

    /// Whether all parts of a range are pinned.
    fn is_pinned(&self, from: u64, bytes: u64) -> Result<bool> {
        let mut at = from;
        for _ in 0..MAX_PIECES {
            let Some(next) = self.pointer_info(at)?.pinned_host_end(at) else { return Ok(false) };
            if next - from >= bytes {
                return Ok(true);
            }
            at = next;
        }
        Ok(false)
    }

    fn unregister(&self, address: u64) -> Result<()> {
        let _guard = self.enter()?;
        self.driver.check("cuMemHostUnregister", self.unregister_raw(address))
    }

    /// Unregisters in the current context.
    pub(super) fn unregister_raw(&self, address: u64) -> Code {
        let place: *mut c_void = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: memory that this device registered, and unregisters once.
        unsafe { (self.driver.unregister_host)(place) }
    }

    /// Implements [`crate::device::Device::unregister_host`].
    pub(super) fn unregister_host_range(&self, address: *mut u8) -> Result<()> {
        let at = address as u64;
        let Some(range) = self.inner.lock().hosts.remove(&at) else {
            fail!(Handle, "no host memory is registered at {at:#x}");
        };
        if range.registration == Registration::Ours { self.unregister(at) } else { Ok(()) }
    }
}

/// Faults in pages, with several threads for large ranges. If the kernel cannot, the driver will.
fn populate(from: usize, bytes: usize) {
    let threads = (bytes / SHARE_BYTES).clamp(1, MAX_THREADS.min(cores().max(1)));
    let share = (bytes / threads).next_multiple_of(SHARE_ALIGN);
    let end = from + bytes;
    let mut helpers = Vec::new();
    let mut at = from;
    while at < end {
        let to = (at + share) / SHARE_ALIGN * SHARE_ALIGN;
        let (first, last) = (at, if to <= at { end } else { to.min(end) });
        at = last;
        let mut helper = Err(Error::from(crate::base::status::Status::Again));
        if last < end {
            helper = spawn("kvt-populate".into(), move || advise(first, last));
        }
        match helper {
            Ok(helper) => helpers.push(helper),
            Err(_) => advise(first, last),
        }
    }
    for helper in helpers {
        let _ = helper.join(); // it only advises the kernel
    }
}

/// Asks the kernel to fault in a range for writing; its content does not change.
fn advise(from: usize, to: usize) {
    let page = crate::base::fork::page_bytes();
    let start = from / page * page;
    let place: *mut c_void = std::ptr::with_exposed_provenance_mut(start);
    // SAFETY: pages of the caller. A kernel that rejects the call changes nothing either.
    unsafe { libc::madvise(place, to - start, libc::MADV_POPULATE_WRITE) };
}
