//! What is known of an event.

use crate::base::status::{Result, Status};
use crate::device::cuda::driver::{Driver, EVENT_FLAGS, Handle};
use crate::device::{Copy, DeviceMemory, Memory};

/// An event of the driver's, and what it is for.
pub struct Known {
    /// The driver's handle.
    pub event: usize,
    /// How the batch ended, if it has.
    pub outcome: Option<std::result::Result<(), Status>>,
    /// Device memory that the batch uses, as addresses from and to.
    pub uses: Vec<(u64, u64)>,
}

impl Known {
    /// A new event of the current context.
    pub fn new(driver: &Driver) -> Result<Known> {
        let mut event: Handle = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        let code = unsafe { (driver.create_event)(&mut event, EVENT_FLAGS) };
        driver.check("cuEventCreate", code)?;
        Ok(Known { event: event as usize, outcome: None, uses: Vec::new() })
    }

    /// Notes which device memory copies use.
    pub fn note(&mut self, copies: &[Copy<'_>]) -> Result<()> {
        (self.outcome, self.uses) = (None, std::mem::take(&mut self.uses));
        self.uses.clear();
        for copy in copies.iter().filter(|copy| copy.memory == Memory::Device) {
            for strip in copy.tensor.strips() {
                let runs = strip.count.max(1) - 1;
                let reach = runs.saturating_mul(strip.stride_bytes).saturating_add(strip.run_bytes);
                let (from, to) = (strip.address, strip.address.saturating_add(reach));
                match self.uses.last_mut() {
                    Some((_, end)) if *end == from => *end = to,
                    _ => {
                        self.uses.try_reserve(1).map_err(|_| Status::NoMem)?;
                        self.uses.push((from, to));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether it is under way and uses that memory.
    pub fn uses(&self, memory: &DeviceMemory) -> bool {
        let end = memory.address.saturating_add(memory.bytes);
        let overlaps = |&(from, to): &(u64, u64)| from < end && memory.address < to;
        self.outcome.is_none() && self.uses.iter().any(overlaps)
    }
}
