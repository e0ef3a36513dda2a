//! Memory that a device sets aside, where host memory stands in for it.

use std::collections::{BTreeMap, VecDeque};

use crate::base::memory::{Buffer, MemoryWish};
use crate::base::status::{Result, Status};
use crate::base::sync::Mutex;
use crate::device::{DeviceMemory, Memory};
use crate::fail;

/// What is kept of memory that was freed and poisoned. While it is kept its addresses are
/// not given out again, so that who uses it still finds poison and nothing else.
const KEPT_BYTES: u64 = 64 << 20;

/// Blocks of memory, by number.
pub struct Pool {
    memory: Memory,
    /// 0 = no limit.
    limit: u64,
    /// What freed memory is filled with, if it is.
    poison: Option<u8>,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    last: u64,
    used_bytes: u64,
    allocations: BTreeMap<u64, Buffer>,
    kept: VecDeque<Buffer>,
    kept_bytes: u64,
}

impl Pool {
    /// Up to `limit` bytes (0 = no limit) that are valid where `memory` says.
    pub fn new(memory: Memory, limit: u64, poison: Option<u8>) -> Pool {
        Pool { memory, limit, poison, blocks: Mutex::new(Blocks::default()) }
    }

    /// Counts memory that somebody sets aside elsewhere.
    pub fn count(&self, bytes: u64) -> Result<()> {
        let mut blocks = self.blocks.lock();
        let Some(used) = blocks.used_bytes.checked_add(bytes) else {
            fail!(NoMem, "{bytes} bytes of device memory");
        };
        if self.limit != 0 && used > self.limit {
            let free = self.limit.saturating_sub(blocks.used_bytes);
            fail!(NoMem, "{bytes} bytes of device memory, {free} of {} are free", self.limit);
        }
        blocks.used_bytes = used;
        Ok(())
    }

    /// Takes that back.
    pub fn discount(&self, bytes: u64) {
        self.blocks.lock().used_bytes -= bytes;
    }

    /// Sets memory aside.
    pub fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        self.count(bytes)?;
        let mut blocks = self.blocks.lock();
        blocks.last += 1;
        let number = blocks.last;
        drop(blocks);
        // Outside the lock: mapping may take its time.
        let mapped = Buffer::map(&MemoryWish { bytes, ..MemoryWish::default() }, None);
        let mut blocks = self.blocks.lock();
        let buffer = mapped.inspect_err(|_| blocks.used_bytes -= bytes)?;
        let address = buffer.address().expose_provenance() as u64;
        blocks.allocations.insert(number, buffer);
        Ok(DeviceMemory { address, bytes, memory: self.memory, number })
    }

    /// Takes memory back.
    pub fn free(&self, memory: &DeviceMemory) -> Result<()> {
        let mut blocks = self.blocks.lock();
        let ours = |buffer: &Buffer| {
            (buffer.address() as u64, buffer.bytes()) == (memory.address, memory.bytes)
        };
        if !blocks.allocations.get(&memory.number).is_some_and(ours) {
            fail!(Handle, "the memory at {:#x} is not the device's, or free", memory.address);
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
        // SAFETY: the block's own memory, which whoever freed it does not use any more.
        unsafe { buffer.address().write_bytes(poison, bytes as usize) };
        blocks.kept_bytes += bytes;
        blocks.kept.push_back(buffer);
        while blocks.kept_bytes > KEPT_BYTES {
            let Some(oldest) = blocks.kept.pop_front() else { break };
            blocks.kept_bytes -= oldest.bytes();
        }
        Ok(())
    }

    /// What is given out.
    pub fn allocated_bytes(&self) -> u64 {
        self.blocks.lock().used_bytes
    }

    /// What is left, where there is a limit.
    pub fn free_bytes(&self) -> Option<u64> {
        (self.limit != 0).then(|| self.limit.saturating_sub(self.allocated_bytes()))
    }
}
