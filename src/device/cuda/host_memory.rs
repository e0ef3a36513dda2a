//! Host memory that the device is told of: it is made present by several threads, then registered
//! with the driver. What cannot be registered is copied as any memory is, only slower, and counted.

use std::ffi::c_void;
use std::ops::Bound;

use crate::base::status::{Error, Result};
use crate::base::sync::{cores, spawn};
use crate::device::cuda::abi::{Code, HOST_MAPPED, HOST_PORTABLE, code, is_sticky};
use crate::device::cuda::{Cuda, Inner};
use crate::fail;

/// What one thread makes present at least: less is not worth it.
const SHARE_BYTES: usize = 64 << 20;
/// Most threads that do it.
const MAX_THREADS: usize = 8;
/// Where shares begin: on a huge page, so that none has two writers.
const SHARE_ALIGN: usize = 2 << 20;

/// Most pieces that memory of somebody else's may be registered in.
const MAX_PIECES: u32 = 4096;

/// How the device reaches a range of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registration {
    /// This device has registered it.
    Ours,
    /// Somebody else has.
    Theirs,
    /// Nobody has, or not yet.
    Pageable,
}

/// A range of host memory that the device was told of.
#[derive(Clone, Copy, Debug)]
pub struct HostRange {
    pub bytes: u64,
    pub registration: Registration,
    /// Kernels find it where the processor does. Of what others have registered, perhaps in
    /// pieces, that is not known.
    pub is_mapped: bool,
}

impl Inner {
    /// The range that an address is in.
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
    /// What [`crate::device::Device::register_host`] says.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn register_host_range(&self, address: *mut u8, bytes: u64) -> Result<()> {
        let from = address.expose_provenance() as u64;
        if from == 0 || bytes == 0 || from.checked_add(bytes).is_none() {
            fail!(Invalid, "{bytes} bytes of host memory at {from:#x}");
        }
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        if inner.overlaps_host_range(from, bytes) {
            fail!(Invalid, "{bytes} bytes at {from:#x} overlap what the device was told of");
        }
        let range = HostRange { bytes, registration: Registration::Pageable, is_mapped: false };
        inner.hosts.insert(from, range);
        drop(inner); // registering takes its time
        populate(from as usize, bytes as usize);
        let found = self.register(address, bytes);
        let mut inner = self.inner.lock();
        match (found, inner.hosts.get_mut(&from)) {
            (Ok(found), Some(range)) => *range = found,
            (Ok(HostRange { registration: Registration::Ours, .. }), None) => {
                // Taken back meanwhile, against the rules: nothing of it stays.
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

    /// Registers a range, if it can be. An error is the device's end.
    fn register(&self, address: *mut u8, bytes: u64) -> Result<HostRange> {
        let pageable = HostRange { bytes, registration: Registration::Pageable, is_mapped: false };
        let _guard = self.enter()?;
        let place: *mut c_void = address.cast();
        // SAFETY: the caller's memory, which stays until it is taken back.
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
                log::warn!("{bytes} bytes of host memory stay as they are, and slow: {text}");
                return Ok(pageable);
            }
        }
        let mut there = 0;
        // SAFETY: a place for an address, and memory that is registered.
        let code = unsafe { (self.driver.host_on_device)(&mut there, place, 0) };
        let is_mapped = code == 0 && there == address as u64;
        Ok(HostRange { bytes, registration: Registration::Ours, is_mapped })
    }

    /// Whether all of a range is registered, piece by piece.
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

    /// In the context already.
    pub(super) fn unregister_raw(&self, address: u64) -> Code {
        let place: *mut c_void = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: what this device has registered, and takes back once.
        unsafe { (self.driver.unregister_host)(place) }
    }

    /// What [`crate::device::Device::unregister_host`] says.
    pub(super) fn unregister_host_range(&self, address: *mut u8) -> Result<()> {
        let at = address as u64;
        let Some(range) = self.inner.lock().hosts.remove(&at) else {
            fail!(Handle, "the device was told of no host memory at {at:#x}");
        };
        if range.registration == Registration::Ours { self.unregister(at) } else { Ok(()) }
    }
}

/// Makes pages present, by several threads where there are many. A kernel that does not know how
/// leaves it to the driver.
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
        let _ = helper.join(); // it only advises
    }
}

/// Asks the kernel for the pages of a range, to be written; nothing in them changes.
fn advise(from: usize, to: usize) {
    let page = crate::base::fork::page_bytes();
    let start = from / page * page;
    let place: *mut c_void = std::ptr::with_exposed_provenance_mut(start);
    // SAFETY: pages of the caller's; a kernel that refuses changes nothing either.
    unsafe { libc::madvise(place, to - start, libc::MADV_POPULATE_WRITE) };
}
