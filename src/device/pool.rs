//! Device memory backed by host memory, for the host device and the simulated one.

use std::collections::{BTreeMap, VecDeque};

use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::{Result, Status};
use crate::base::sync::Mutex;
use crate::device::{DeviceMemory, Memory};
use crate::fail;

/// Limit: freed and poisoned memory that is quarantined. Its addresses are not reused meanwhile, so
/// a use after free finds poison.
const KEPT_BYTES: u64 = 64 << 20;

/// Allocations by number.
pub struct Pool {
    memory: Memory,
    /// Limit in bytes; 0 = none.
    limit: u64,
    /// Fill byte of freed memory; none = memory is unmapped at once.
    poison: Option<u8>,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    last: u64,
    used_bytes: u64,
    allocations: BTreeMap<u64, Buffer>,
    quarantined: VecDeque<Buffer>,
    kept_bytes: u64,
}

impl Pool {
    /// A pool of up to `limit` bytes (0 = no limit) in an address space.
    pub fn new(memory: Memory, limit: u64, poison: Option<u8>) -> Pool {
        Pool { memory, limit, poison, blocks: Mutex::new(Blocks::default()) }
    }

    /// Charges memory that is allocated elsewhere.
    pub fn count(&self, bytes: u64) -> Result<()> {
        let mut blocks = self.blocks.lock();
        let Some(used) = blocks.used_bytes.checked_add(bytes) else {
            fail!(NoMem, "{bytes} bytes of device memory exceed the address space");
        };
        if self.limit != 0 && used > self.limit {
            let free = self.limit.saturating_sub(blocks.used_bytes);
            fail!(
                NoMem,
                "{bytes} bytes of device memory requested, {free} of {} are free",
                self.limit
            );
        }
        blocks.used_bytes = used;
        Ok(())
    }

    /// Undoes [`Pool::count`].
    pub fn discount(&self, bytes: u64) {
        self.blocks.lock().used_bytes -= bytes;
    }

    /// Allocates memory.
    pub fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        self.count(bytes)?;
        let mut blocks = self.blocks.lock();
        blocks.last += 1;
        let number = blocks.last;
        drop(blocks);
        // Outside the lock: mapping may take long.
        let mapped =
            Buffer::map(&AllocationRequest { bytes, ..AllocationRequest::default() }, None);
        let mut blocks = self.blocks.lock();
        let buffer = mapped.inspect_err(|_| blocks.used_bytes -= bytes)?;
        let address = buffer.address().expose_provenance() as u64;
        blocks.allocations.insert(number, buffer);
        Ok(DeviceMemory { address, bytes, memory: self.memory, number })
    }

    /// Frees memory.
    pub fn free(&self, memory: &DeviceMemory) -> Result<()> {
        let mut blocks = self.blocks.lock();
        let ours = |buffer: &Buffer| {
            (buffer.address() as u64, buffer.bytes()) == (memory.address, memory.bytes)
        };
        if !blocks.allocations.get(&memory.number).is_some_and(ours) {
            fail!(
                Handle,
                "no allocation of this size at {:#x}: wrong device, or freed before",
                memory.address
            );
        }
        let Some(buffer) = blocks.allocations.remove(&memory.number) else {
            return Err(Status::Handle.into());
        };
        blocks.used_bytes -= buffer.bytes();
        let Some(poison) = self.poison else {
            drop(blocks);
            drop(buffer);
            return Ok(());
        };
        let bytes = buffer.bytes();
        // SAFETY: the block's own memory, which its owner has freed and no longer uses.
        unsafe { buffer.address().write_bytes(poison, bytes as usize) };
        blocks.kept_bytes += bytes;
        blocks.quarantined.push_back(buffer);
        while blocks.kept_bytes > KEPT_BYTES {
            let Some(oldest) = blocks.quarantined.pop_front() else { break };
            blocks.kept_bytes -= oldest.bytes();
        }
        Ok(())
    }

    /// Allocated bytes.
    pub fn allocated_bytes(&self) -> u64 {
        self.blocks.lock().used_bytes
    }

    /// Free bytes, if there is a limit.
    pub fn free_bytes(&self) -> Option<u64> {
        (self.limit != 0).then(|| self.limit.saturating_sub(self.allocated_bytes()))
    }
}
