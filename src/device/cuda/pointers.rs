//! What the driver knows of addresses that others name: a wrong one is refused here, where it
//! costs its owner one batch. On the device it would cost everybody the context.

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

/// Most pieces that one range is looked at in: memory that an engine maps bit by bit is known to
/// the driver bit by bit.
const MAX_PIECES: u32 = 4096;
/// Ranges that are remembered while one batch is looked at.
const REMEMBERED: usize = 4;

/// What the driver says of an address.
#[derive(Clone, Copy, Debug, Default)]
pub struct PointerInfo {
    kind: c_uint,
    ordinal: c_int,
    is_managed: c_uint,
    /// Where kernels find it; 0 = nowhere.
    on_device: u64,
    start: u64,
    bytes: usize,
}

impl PointerInfo {
    /// Where the piece of host memory ends that somebody has registered and the address is in, if
    /// the driver says so.
    pub fn pinned_host_end(&self, address: u64) -> Option<u64> {
        let end = self.start.saturating_add(self.bytes as u64);
        let is_inside = (self.start..end).contains(&address);
        (self.kind == KIND_HOST && is_inside).then_some(end)
    }
}

/// Ranges of a batch that were found to be sound, and whose they are.
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

/// MemoryOwner several parts of one side are. What is not all of one device cannot be copied where
/// there is no access to it.
fn merge_owner(found: Option<MemoryOwner>, more: MemoryOwner) -> Result<MemoryOwner> {
    match found {
        Some(before) if before != more && (before.lacks_access() || more.lacks_access()) => {
            fail!(Invalid, "memory of several devices in one copy, without access to all of it")
        }
        _ => Ok(more),
    }
}

impl Cuda {
    /// What the driver knows of an address; nothing, as a kind of 0, if it never heard of it.
    pub(super) fn pointer_info(&self, address: u64) -> Result<PointerInfo> {
        let mut pointer_info = PointerInfo { ordinal: -1, ..PointerInfo::default() };
        let asked = [
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
        let count = asked.len() as c_uint;
        // SAFETY: as many questions as places, each as large as its answer; the driver looks an
        // address up, it does not go there.
        let code = unsafe {
            (self.driver.pointer_attributes)(count, asked.as_ptr(), answers.as_ptr(), address)
        };
        if code == code::INVALID_VALUE {
            return Ok(PointerInfo::default());
        }
        self.driver.check("cuPointerGetAttributes", code).map(|()| pointer_info)
    }

    /// Refuses copies whose device memory is not this device's or a peer's, as far as that can be
    /// known. Which of them have memory that there is no access to.
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
            fail!(Invalid, "{bytes} bytes at {from:#x} lead out of the address space");
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
                        return merge_owner(all, owner); // the driver does not say how far it goes
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

    /// Memory that processors and devices share is everybody's.
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
                    "the memory at {address:#x} is device {}'s, this is {}",
                    pointer_info.ordinal,
                    self.ordinal
                ),
            },
            KIND_HOST => fail!(Invalid, "the memory at {address:#x} is the processor's"),
            _ => fail!(Invalid, "the driver knows no memory at {address:#x}"),
        }
    }

    /// Refuses kernels that would go where the device cannot.
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
                    fail!(Invalid, "{name} of a kernel: there is no access to {address:#x}");
                }
            }
        }
        Ok(())
    }
}
