//! A submitted copy of the simulated device. It fills its target with poison when it starts, reads
//! its source later, and writes the bytes to the target when it completes. So a program that
//! accesses memory before the event gets wrong bytes.

use crate::base::checksum::checksum;
use crate::base::status::{Result, Status};
use crate::device::strips::{copy_strip, pointer_at};
use crate::device::{Copy, Direction, Memory};
use crate::meta::view::Strip;

/// A [`Copy`] with its page tables resolved to address ranges, so that these tables need not
/// outlive `submit`. Addresses are numbers; the caller of `submit` guarantees that their memory is
/// valid.
pub struct LoweredCopy {
    strips: Vec<Strip>,
    plane: u64,
    direction: Direction,
    /// The bytes read from the source; poison until then.
    pub bytes: Vec<u8>,
    /// Whether the copy crosses the bus: exactly one side is in device memory.
    pub crosses: bool,
    /// Whether to flip one bit on the bus.
    pub spoils: bool,
    /// Whether the target is in device memory. Then the checksum is that of the bytes that arrived
    /// there, otherwise that of the bytes that were read.
    sums_target: bool,
    wants_sum: bool,
    sum: u64,
}

impl LoweredCopy {
    /// Resolves a copy.
    pub fn lower(copy: &Copy<'_>, poison: u8) -> Result<LoweredCopy> {
        let (mut strips, mut bytes) = (Vec::new(), Vec::new());
        let (count, len) = (copy.tensor.strips().count(), copy.tensor.bytes() as usize);
        if strips.try_reserve_exact(count).is_err() || bytes.try_reserve_exact(len).is_err() {
            return Err(Status::NoMem.into());
        }
        strips.extend(copy.tensor.strips());
        bytes.resize(len, poison);
        let plane = copy.plane.expose_provenance() as u64;
        let target =
            if copy.direction == Direction::Gather { copy.plane_memory } else { copy.memory };
        Ok(LoweredCopy {
            strips,
            plane,
            direction: copy.direction,
            bytes,
            crosses: copy.memory != copy.plane_memory,
            spoils: false,
            sums_target: target == Memory::Device,
            wants_sum: copy.wants_sum,
            sum: 0,
        })
    }

    /// Checksum of the bytes on the device's side of the bus, if requested.
    pub fn sum(&self) -> Option<u64> {
        self.wants_sum.then_some(self.sum)
    }

    /// Reads the source, computes the checksum if requested, and flips a bit if configured.
    pub fn read(&mut self) {
        self.read_source();
        if self.wants_sum && !self.sums_target {
            self.sum = checksum(&self.bytes);
        }
        let middle = self.bytes.len() / 2;
        if let (true, Some(byte)) = (self.spoils, self.bytes.get_mut(middle)) {
            *byte ^= 1;
        }
        if self.wants_sum && self.sums_target {
            self.sum = checksum(&self.bytes);
        }
    }

    fn read_source(&mut self) {
        let bytes = self.bytes.as_mut_ptr();
        // SAFETY: the caller of `submit` guarantees valid memory until the event has completed, and
        // it has not. `bytes` is as long as the strips.
        unsafe {
            match self.direction {
                Direction::Gather => self
                    .strips
                    .iter()
                    .for_each(|strip| copy_strip::<true>(strip, bytes.add(strip.at as usize))),
                Direction::Scatter => {
                    std::ptr::copy_nonoverlapping(pointer_at(self.plane), bytes, self.bytes.len());
                }
            }
        }
    }

    /// Writes the bytes to the target.
    pub fn write(&self) {
        // The pointer is mutable only because `copy_strip` requires it: the buffer is only read.
        let bytes = self.bytes.as_ptr().cast_mut();
        // SAFETY: as in `read`.
        unsafe {
            match self.direction {
                Direction::Gather => {
                    std::ptr::copy_nonoverlapping(bytes, pointer_at(self.plane), self.bytes.len());
                }
                Direction::Scatter => self
                    .strips
                    .iter()
                    .for_each(|strip| copy_strip::<false>(strip, bytes.add(strip.at as usize))),
            }
        }
    }

    /// Whether the copy accesses a range of device memory.
    pub fn uses(&self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        self.ranges().any(|(from, to)| from < end && address < to)
    }

    /// Address ranges that the copy reads and writes.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let plane = (self.plane, self.plane.saturating_add(self.bytes.len() as u64));
        let strips = self.strips.iter().map(|strip| {
            let runs = (strip.count.max(1) - 1).saturating_mul(strip.stride_bytes);
            let reach = runs.saturating_add(strip.run_bytes);
            (strip.address, strip.address.saturating_add(reach))
        });
        std::iter::once(plane).chain(strips)
    }
}
