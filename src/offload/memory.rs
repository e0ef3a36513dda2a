//! Memory of an offload's ring and tails: host memory, or memory of the store's device.

use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::Memory;
use crate::fail;
use crate::store::handle::Store;
use crate::tier::device::{PIECE_ALIGN_BYTES, Slab};

/// The memory to use for the ring and the tails.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum RingPlacement {
    /// Host memory, charged to the store's account.
    #[default]
    Host,
    /// Memory that the store's device allocates, charged to the account's device tier.
    Device,
    /// Memory of that device that the engine lends; not charged.
    Lent(LentMemory),
}

/// Device memory that an engine lends.
#[derive(Debug, PartialEq, Eq)]
pub struct LentMemory {
    address: u64,
    bytes: u64,
}

impl LentMemory {
    /// `bytes` bytes from `address` on.
    ///
    /// # Safety
    /// The store's device can access the memory, and nothing else uses it until the offload is
    /// closed.
    pub unsafe fn new(address: u64, bytes: u64) -> LentMemory {
        LentMemory { address, bytes }
    }
}

/// Memory that an offload owns.
pub(super) enum OwnedMemory {
    Host(Buffer),
    Device(Slab),
    Lent(LentMemory),
}

impl OwnedMemory {
    /// Takes `bytes` bytes. UNAVAILABLE = the store has no device with memory; TOO_SMALL = less is
    /// lent.
    pub fn take(store: &Arc<Store>, placement: RingPlacement, bytes: u64) -> Result<OwnedMemory> {
        if placement != RingPlacement::Host && !store.reaches_device() {
            fail!(
                Unavailable,
                "the ring cannot be in device memory, since the store has no device that reaches \
                 it: open the store with one, or the offload in host memory"
            );
        }
        match placement {
            RingPlacement::Host => OwnedMemory::map(store, bytes),
            RingPlacement::Device => {
                let slab = Slab::take(&store.device(), store.account(), bytes);
                let advice = "device memory for the ring and the tails (an engine can lend it)";
                Ok(OwnedMemory::Device(slab.map_err(|error| error.within(advice))?))
            }
            RingPlacement::Lent(lent) => {
                check_lent(&lent, bytes)?;
                Ok(OwnedMemory::Lent(lent))
            }
        }
    }

    /// Allocates host memory.
    pub fn map(store: &Arc<Store>, bytes: u64) -> Result<OwnedMemory> {
        let account = store.account().cloned();
        let request = AllocationRequest { bytes, account, ..Default::default() };
        Ok(OwnedMemory::Host(Buffer::map(&request, None)?))
    }

    /// Memory in which the addresses are valid.
    pub fn memory(&self) -> Memory {
        if matches!(self, OwnedMemory::Host(_)) { Memory::Host } else { Memory::Device }
    }

    /// The placement for a copy of this memory: lent memory is not used twice.
    pub fn like(&self) -> RingPlacement {
        if matches!(self, OwnedMemory::Host(_)) {
            RingPlacement::Host
        } else {
            RingPlacement::Device
        }
    }

    /// Address and length.
    pub fn whole(&self) -> (u64, u64) {
        match self {
            OwnedMemory::Host(buffer) => {
                (buffer.address().expose_provenance() as u64, buffer.bytes())
            }
            OwnedMemory::Device(slab) => (slab.address(), slab.bytes()),
            OwnedMemory::Lent(lent) => (lent.address, lent.bytes),
        }
    }

    /// The address at an offset, if the range is inside the memory.
    pub fn range(&self, at: u64, bytes: u64) -> Result<u64> {
        let (address, all) = self.whole();
        let inside = at.checked_add(bytes).is_some_and(|end| end <= all);
        inside.then(|| address + at).ok_or_else(|| Error::from(Status::Invalid))
    }
}

fn check_lent(lent: &LentMemory, bytes: u64) -> Result<()> {
    let LentMemory { address, bytes: has } = *lent;
    if address == 0 || address % PIECE_ALIGN_BYTES != 0 || address.checked_add(has).is_none() {
        fail!(
            Invalid,
            "lent memory at {address:#x}: its address must be a multiple of {PIECE_ALIGN_BYTES}"
        );
    }
    if has < bytes {
        fail!(TooSmall, "{has} bytes of device memory are lent, and {bytes} are needed");
    }
    Ok(())
}
