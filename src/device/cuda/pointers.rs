//! What the driver knows of addresses that others name: a wrong one is refused here, where it
//! costs its owner one batch. On the device it would cost everybody the context.

use std::ffi::{c_int, c_uint, c_void};

use crate::base::status::Result;
use crate::device::call::Call;
use crate::device::cuda::known::addresses;
use crate::device::cuda::words::{
    KIND_DEVICE, KIND_HOST, POINTER_BYTES, POINTER_KIND, POINTER_MANAGED, POINTER_ON_DEVICE,
    POINTER_ORDINAL, POINTER_START, code,
};
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
pub struct About {
    kind: c_uint,
    ordinal: c_int,
    is_managed: c_uint,
    /// Where kernels find it; 0 = nowhere.
    on_device: u64,
    start: u64,
    bytes: usize,
}

impl About {
    /// Whether it is host memory that somebody has registered.
    pub fn is_pinned_host(&self) -> bool {
        self.kind == KIND_HOST
    }
}

/// Ranges of a batch that were found to be the device's.
#[derive(Default)]
pub struct Seen {
    ranges: [(u64, u64); REMEMBERED],
    next: usize,
}

impl Seen {
    fn end_of(&self, address: u64) -> Option<u64> {
        let inside = |range: &&(u64, u64)| (range.0..range.1).contains(&address);
        self.ranges.iter().find(inside).map(|range| range.1)
    }

    fn add(&mut self, from: u64, to: u64) {
        self.ranges[self.next] = (from, to);
        self.next = (self.next + 1) % REMEMBERED;
    }
}

impl Cuda {
    /// What the driver knows of an address; nothing, as a kind of 0, if it never heard of it.
    pub(super) fn about(&self, address: u64) -> Result<About> {
        let mut about = About { ordinal: -1, ..About::default() };
        let asked = [
            POINTER_KIND,
            POINTER_ORDINAL,
            POINTER_MANAGED,
            POINTER_ON_DEVICE,
            POINTER_START,
            POINTER_BYTES,
        ];
        let answers: [*mut c_void; 6] = [
            (&raw mut about.kind).cast(),
            (&raw mut about.ordinal).cast(),
            (&raw mut about.is_managed).cast(),
            (&raw mut about.on_device).cast(),
            (&raw mut about.start).cast(),
            (&raw mut about.bytes).cast(),
        ];
        let count = asked.len() as c_uint;
        // SAFETY: as many questions as places, each as large as its answer; the driver looks an
        // address up, it does not go there.
        let code = unsafe {
            (self.driver.about_pointer)(count, asked.as_ptr(), answers.as_ptr(), address)
        };
        if code == code::INVALID_VALUE {
            return Ok(About::default());
        }
        self.driver.check("cuPointerGetAttributes", code).map(|()| about)
    }

    /// Refuses copies whose device memory is not this device's, as far as that can be known.
    pub(super) fn check_copies(&self, inner: &Inner, copies: &[Copy<'_>]) -> Result<()> {
        let mut seen = Seen::default();
        for copy in copies {
            if copy.plane_memory == Memory::Device {
                let plane = copy.plane as u64;
                self.check_range(inner, &mut seen, plane, copy.tensor.bytes())?;
            }
            if copy.memory == Memory::Device {
                for strip in copy.tensor.strips() {
                    let runs = (strip.count.max(1) - 1).saturating_mul(strip.stride_bytes);
                    let reach = runs.saturating_add(strip.run_bytes);
                    self.check_range(inner, &mut seen, strip.address, reach)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_range(
        &self,
        inner: &Inner,
        seen: &mut Seen,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let Some(end) = from.checked_add(bytes) else {
            fail!(Invalid, "{bytes} bytes at {from:#x} lead out of the address space");
        };
        let mut at = from;
        for _ in 0..MAX_PIECES {
            at = match seen.end_of(at).or_else(|| inner.given_end(at)) {
                Some(known) => known,
                None => {
                    let about = self.about(at)?;
                    self.check_device(at, &about)?;
                    let to = about.start.saturating_add(about.bytes as u64);
                    if !(about.start..to).contains(&at) {
                        return Ok(()); // the driver does not say how far it goes
                    }
                    seen.add(about.start, to);
                    to
                }
            };
            if at >= end {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Memory that processors and devices share is everybody's.
    fn check_device(&self, address: u64, about: &About) -> Result<()> {
        if about.is_managed != 0 || (about.kind == KIND_DEVICE && about.ordinal == self.ordinal) {
            return Ok(());
        }
        match about.kind {
            KIND_DEVICE => fail!(
                Invalid,
                "the memory at {address:#x} is device {}'s, this is {}",
                about.ordinal,
                self.ordinal
            ),
            KIND_HOST => fail!(Invalid, "the memory at {address:#x} is the processor's"),
            _ => fail!(Invalid, "the driver knows no memory at {address:#x}"),
        }
    }

    /// Refuses kernels that would go where the device cannot.
    pub(super) fn check_calls(&self, inner: &Inner, calls: &[Call]) -> Result<()> {
        for (name, address) in calls.iter().flat_map(addresses) {
            if address == 0 || inner.given_end(address).is_some() {
                continue;
            }
            let about = self.about(address)?;
            let is_here = about.kind == KIND_HOST && about.on_device == address;
            let is_reached = about.kind == 0 && self.reaches_pageable;
            if !is_here && !is_reached {
                let checked = self.check_device(address, &about);
                checked.map_err(|error| error.within(&format!("{name} of a kernel")))?;
            }
        }
        Ok(())
    }
}
