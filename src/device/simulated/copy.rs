//! A copy of the simulated device, from its start to its event.

use crate::base::checksum::checksum;
use crate::base::status::{Result, Status};
use crate::device::strips::{copy_strip, pointer_at};
use crate::device::{Copy, Direction, Memory};
use crate::meta::view::Strip;

/// A lowered copy, so that the caller's tables need not outlive `submit`. Addresses are numbers;
/// the caller of `submit` guarantees the memory behind them.
pub struct LoweredCopy {
    strips: Vec<Strip>,
    plane: u64,
    direction: Direction,
    /// Poison at first, then the bytes that were read from the source.
    pub bytes: Vec<u8>,
    /// The copy crosses the bus: exactly one side is in device memory.
    pub crosses: bool,
    /// One bit is flipped on the bus.
    pub spoils: bool,
    /// The target is in device memory: the checksum is of the bytes that arrived there.
    sums_target: bool,
    wants_sum: bool,
    sum: u64,
}

impl LoweredCopy {
    /// Lowers a copy. Its bytes are poison until the source is read.
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

    /// Checksum of the device's side, if requested.
    pub fn sum(&self) -> Option<u64> {
        self.wants_sum.then_some(self.sum)
    }

    /// Reads the source now, over the bus if it is on the other side.
    pub fn read(&mut self) {
        self.take();
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

    fn take(&mut self) {
        let bytes = self.bytes.as_mut_ptr();
        // SAFETY: the caller of `submit` guarantees valid memory until the event has ended, and it
        // has not. `bytes` is as long as the strips.
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

    /// Writes its bytes to the target.
    pub fn write(&self) {
        // Only read in this direction.
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
