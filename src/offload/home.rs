//! Where an offload's ring and tails are: in host memory, or where only the store's device
//! reaches them.

use crate::base::memory::{Buffer, MemoryWish};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::Memory;
use crate::fail;
use crate::store::handle::Store;
use crate::tier::device::{PIECE_ALIGN_BYTES, Slab};

/// What is said of that when one is opened.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Home {
    /// In host memory, which the store's account pays for.
    #[default]
    Host,
    /// In memory that the store's device gives; the account pays at the tier of devices.
    Device,
    /// In memory of that device that the engine lends, and pays for itself.
    Lent(Lent),
}

/// Memory of a device that an engine lends.
#[derive(Debug, PartialEq, Eq)]
pub struct Lent {
    address: u64,
    bytes: u64,
}

impl Lent {
    /// So many bytes from an address on.
    ///
    /// # Safety
    /// It is memory that the store's device reaches, and the offload's alone until that is
    /// closed.
    pub unsafe fn new(address: u64, bytes: u64) -> Lent {
        Lent { address, bytes }
    }
}

/// Memory of an offload's own.
pub(super) enum Own {
    Host(Buffer),
    Device(Slab),
    Lent(Lent),
}

impl Own {
    /// So many bytes. UNAVAILABLE = the store has no device that has memory; TOO_SMALL = less
    /// is lent.
    pub fn take(store: &Arc<Store>, home: Home, bytes: u64) -> Result<Own> {
        if home != Home::Host && !store.reaches_device() {
            fail!(
                Unavailable,
                "the ring is to be in device memory, and the store was opened with no device that \
                 reaches it: open it with one, or the offload in host memory"
            );
        }
        match home {
            Home::Host => Own::map(store, bytes),
            Home::Device => {
                let slab = Slab::take(&store.device(), store.account(), bytes);
                let advice = "device memory for the ring and the tails (an engine can lend it)";
                Ok(Own::Device(slab.map_err(|error| error.within(advice))?))
            }
            Home::Lent(lent) => {
                check_lent(&lent, bytes)?;
                Ok(Own::Lent(lent))
            }
        }
    }

    /// The same in host memory.
    pub fn map(store: &Arc<Store>, bytes: u64) -> Result<Own> {
        let account = store.account().cloned();
        let wish = MemoryWish { bytes, account, ..Default::default() };
        Ok(Own::Host(Buffer::map(&wish, None)?))
    }

    /// Who reaches it.
    pub fn memory(&self) -> Memory {
        if matches!(self, Own::Host(_)) { Memory::Host } else { Memory::Device }
    }

    /// Where what is like it is taken from: memory is not lent twice.
    pub fn like(&self) -> Home {
        if matches!(self, Own::Host(_)) { Home::Host } else { Home::Device }
    }

    /// Where it starts, and how long it is.
    pub fn whole(&self) -> (u64, u64) {
        match self {
            Own::Host(buffer) => (buffer.address().expose_provenance() as u64, buffer.bytes()),
            Own::Device(slab) => (slab.address(), slab.bytes()),
            Own::Lent(lent) => (lent.address, lent.bytes),
        }
    }

    /// The address of a place in it, if so many bytes from there on lie inside.
    pub fn range(&self, at: u64, bytes: u64) -> Result<u64> {
        let (address, all) = self.whole();
        let inside = at.checked_add(bytes).is_some_and(|end| end <= all);
        inside.then(|| address + at).ok_or_else(|| Error::from(Status::Invalid))
    }
}

fn check_lent(lent: &Lent, bytes: u64) -> Result<()> {
    let Lent { address, bytes: has } = *lent;
    if address == 0 || address % PIECE_ALIGN_BYTES != 0 || address.checked_add(has).is_none() {
        fail!(Invalid, "memory at {address:#x}: it begins at a multiple of {PIECE_ALIGN_BYTES}");
    }
    if has < bytes {
        fail!(TooSmall, "{has} bytes of device memory are lent, {bytes} are needed");
    }
    Ok(())
}
