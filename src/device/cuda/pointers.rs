//! Validates addresses with the driver. A wrong address is rejected here and costs one batch; on
//! the device it would destroy the context for everybody.

use std::ffi::{c_int, c_uint, c_void};

use crate::base::status::{Result, Status};
use crate::device::call::Call;
use crate::device::cuda::abi::{
    KIND_DEVICE, KIND_HOST, POINTER_BYTES, POINTER_KIND, POINTER_MANAGED, POINTER_ON_DEVICE,
    POINTER_ORDINAL, POINTER_START, code,
};
use crate::device::cuda::events::addresses;
use crate::device::cuda::peers::{MemoryOwner, PeerCopy};
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Copy, Memory};
use crate::fail;

/// Limit: mapped parts of one range.
const MAX_PIECES: u32 = 4096;
/// Ranges remembered while one batch is checked.
const REMEMBERED: usize = 4;

/// The driver's attributes of an address.
#[derive(Clone, Copy, Debug, Default)]
pub struct PointerInfo {
    kind: c_uint,
    ordinal: c_int,
    is_managed: c_uint,
    /// Address for kernels; 0 = not accessible.
    on_device: u64,
    start: u64,
    bytes: usize,
}

impl PointerInfo {
    /// End of the pinned host memory that contains an address.
    pub fn pinned_host_end(&self, address: u64) -> Option<u64> {
        let end = self.start.saturating_add(self.bytes as u64);
        let is_inside = (self.start..end).contains(&address);
        (self.kind == KIND_HOST && is_inside).then_some(end)
    }
}

/// Valid ranges found so far, with their owners.
#[derive(Default)]
pub struct CheckedRanges {
    ranges: [(u64, u64, MemoryOwner); REMEMBERED],
    next: usize,
}

impl CheckedRanges {
    fn end_of(&self, address: u64) -> Option<(u64, MemoryOwner)> {
        let inside = |range: &&(u64, u64, MemoryOwner)| (range.0..range.1).contains(&address);
        self.ranges.iter().find(inside).map(|range| (range.1, range.2))
    }

    fn add(&mut self, from: u64, to: u64, owner: MemoryOwner) {
        self.ranges[self.next] = (from, to, owner);
        self.next = (self.next + 1) % REMEMBERED;
    }
}

/// Merges the owners of the parts of one side. Memory of several devices in one copy requires
/// access to all of it.
fn merge_owner(found: Option<MemoryOwner>, more: MemoryOwner) -> Result<MemoryOwner> {
    match found {
        Some(before) if before != more && (before.lacks_access() || more.lacks_access()) => {
            fail!(
                Invalid,
                "one copy names memory of several devices without access to all of it: split it"
            )
        }
        _ => Ok(more),
    }
}

impl Cuda {
    /// Attributes of an address; kind 0 if the driver does not know it.
    pub(super) fn pointer_info(&self, address: u64) -> Result<PointerInfo> {
        let mut pointer_info = PointerInfo { ordinal: -1, ..PointerInfo::default() };
        let attributes = [
            POINTER_KIND,
            POINTER_ORDINAL,
            POINTER_MANAGED,
            POINTER_ON_DEVICE,
            POINTER_START,
            POINTER_BYTES,
        ];
        let answers: [*mut c_void; 6] = [
            (&raw mut pointer_info.kind).cast(),
            (&raw mut pointer_info.ordinal).cast(),
            (&raw mut pointer_info.is_managed).cast(),
            (&raw mut pointer_info.on_device).cast(),
            (&raw mut pointer_info.start).cast(),
            (&raw mut pointer_info.bytes).cast(),
        ];
        let count = attributes.len() as c_uint;
        // SAFETY: as many attributes as places, each of the size of its value. The driver looks the
        // address up without accessing it.
        let code = unsafe {
            (self.driver.pointer_attributes)(count, attributes.as_ptr(), answers.as_ptr(), address)
        };
        if code == code::INVALID_VALUE {
            return Ok(PointerInfo::default());
        }
        self.driver.check("cuPointerGetAttributes", code).map(|()| pointer_info)
    }

    /// Rejects copies of device memory that belongs neither to this device nor to a peer, as far as
    /// the driver knows. Returns the copies of memory without access.
    pub(super) fn check_copies(&self, inner: &Inner, copies: &[Copy<'_>]) -> Result<Vec<PeerCopy>> {
        let (mut seen, mut no_access) = (CheckedRanges::default(), Vec::new());
        for (at, copy) in copies.iter().enumerate() {
            let (mut tensor, mut plane) = (None, MemoryOwner::Own);
            if copy.plane_memory == Memory::Device {
                let address = copy.plane as u64;
                plane = self.check_range(inner, &mut seen, address, copy.tensor.bytes())?;
            }
            if copy.memory == Memory::Device {
                for strip in copy.tensor.strips() {
                    let runs = (strip.count.max(1) - 1).saturating_mul(strip.stride_bytes);
                    let reach = runs.saturating_add(strip.run_bytes);
                    let owner = self.check_range(inner, &mut seen, strip.address, reach)?;
                    tensor = Some(merge_owner(tensor, owner)?);
                }
            }
            let tensor = tensor.unwrap_or_default();
            if tensor.lacks_access() || plane.lacks_access() {
                no_access.try_reserve(1).map_err(|_| Status::NoMem)?;
                no_access.push(PeerCopy { copy: at, tensor, plane });
            }
        }
        Ok(no_access)
    }

    pub(super) fn check_range(
        &self,
        inner: &Inner,
        seen: &mut CheckedRanges,
        from: u64,
        bytes: u64,
    ) -> Result<MemoryOwner> {
        let Some(end) = from.checked_add(bytes) else {
            fail!(Invalid, "{bytes} bytes at {from:#x} exceed the address space");
        };
        let (mut at, mut all) = (from, None);
        for _ in 0..MAX_PIECES {
            let allocations = || inner.allocation_end(at).map(|end| (end, MemoryOwner::Own));
            let (next, owner) = match seen.end_of(at).or_else(allocations) {
                Some(known) => known,
                None => {
                    let pointer_info = self.pointer_info(at)?;
                    let owner = self.check_device(at, &pointer_info)?;
                    let to = pointer_info.start.saturating_add(pointer_info.bytes as u64);
                    if !(pointer_info.start..to).contains(&at) {
                        return merge_owner(all, owner); // the driver does not report its length
                    }
                    seen.add(pointer_info.start, to, owner);
                    (to, owner)
                }
            };
            all = Some(merge_owner(all, owner)?);
            at = next;
            if at >= end {
                break;
            }
        }
        Ok(all.unwrap_or_default())
    }

    /// Managed memory is shared by all.
    fn check_device(&self, address: u64, pointer_info: &PointerInfo) -> Result<MemoryOwner> {
        if pointer_info.is_managed != 0
            || (pointer_info.kind == KIND_DEVICE && pointer_info.ordinal == self.ordinal)
        {
            return Ok(MemoryOwner::Own);
        }
        match pointer_info.kind {
            KIND_DEVICE => match self.owner(address, pointer_info.ordinal)? {
                Some(owner) => Ok(owner),
                None => fail!(
                    Invalid,
                    "the memory at {address:#x} is on device {}, this is device {}",
                    pointer_info.ordinal,
                    self.ordinal
                ),
            },
            KIND_HOST => fail!(Invalid, "the memory at {address:#x} is host memory"),
            _ => fail!(Invalid, "the driver knows no memory at {address:#x}"),
        }
    }

    /// Rejects kernels that would access invalid addresses.
    pub(super) fn check_calls(&self, inner: &Inner, calls: &[Call]) -> Result<()> {
        for (name, address) in calls.iter().flat_map(addresses) {
            if address == 0 || inner.allocation_end(address).is_some() {
                continue;
            }
            let pointer_info = self.pointer_info(address)?;
            let is_here = pointer_info.kind == KIND_HOST && pointer_info.on_device == address;
            let is_reached = pointer_info.kind == 0 && self.reaches_pageable;
            if !is_here && !is_reached {
                let checked = self.check_device(address, &pointer_info);
                let owner =
                    checked.map_err(|error| error.within(&format!("{name} of a kernel")))?;
                if owner.lacks_access() {
                    fail!(Invalid, "{name} of a kernel: no peer access to {address:#x}");
                }
            }
        }
        Ok(())
    }
}
