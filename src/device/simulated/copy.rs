//! A copy of the simulated device, between its start and its event.

use crate::base::checksum::checksum;
use crate::base::status::{Result, Status};
use crate::device::strips::{copy_strip, there};
use crate::device::{Copy, Direction, Memory};
use crate::meta::view::Strip;

/// A copy, lowered: the caller's tables need not outlive `submit`. Addresses are
/// numbers: the memory behind them is the caller's promise.
pub struct LoweredCopy {
    strips: Vec<Strip>,
    plane: u64,
    direction: Direction,
    /// Poison at first, then what was read from the source.
    pub bytes: Vec<u8>,
    /// It goes over the bus: one side is the device's, the other is not.
    pub crosses: bool,
    /// A bit of it changes there.
    pub spoils: bool,
    /// The target is in the device's memory: what is summed is what came there.
    sums_target: bool,
    wants_sum: bool,
    sum: u64,
}

impl LoweredCopy {
    /// Notes what a copy moves; until that is read it holds poison.
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

    /// The sum of what the device has of it, if that was wanted.
    pub fn sum(&self) -> Option<u64> {
        self.wants_sum.then_some(self.sum)
    }

    /// Takes the source as it is now, over the bus if it is on the other side.
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
        // SAFETY: `submit` was promised that the memory is valid until the event has
        // ended, and it has not; `bytes` are as long as the strips.
        unsafe {
            match self.direction {
                Direction::Gather => self
                    .strips
                    .iter()
                    .for_each(|strip| copy_strip::<true>(strip, bytes.add(strip.at as usize))),
                Direction::Scatter => {
                    std::ptr::copy_nonoverlapping(there(self.plane), bytes, self.bytes.len());
                }
            }
        }
    }

    /// Puts what it holds into the target.
    pub fn write(&self) {
        // Only read on this way.
        let bytes = self.bytes.as_ptr().cast_mut();
        // SAFETY: as in `read`.
        unsafe {
            match self.direction {
                Direction::Gather => {
                    std::ptr::copy_nonoverlapping(bytes, there(self.plane), self.bytes.len());
                }
                Direction::Scatter => self
                    .strips
                    .iter()
                    .for_each(|strip| copy_strip::<false>(strip, bytes.add(strip.at as usize))),
            }
        }
    }

    /// Whether it goes to or from a range of device memory.
    pub fn uses(&self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        self.ranges().any(|(from, to)| from < end && address < to)
    }

    /// From where to where the ranges go that it reads and writes.
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
