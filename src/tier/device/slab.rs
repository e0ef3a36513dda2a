//! One slab of a device's memory, and the account that is charged for it.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::{Device, DeviceMemory};
use crate::fail;

/// Memory of a device. Dropping the slab frees it. Allocating and freeing may block the caller.
pub struct Slab {
    device: Arc<dyn Device>,
    memory: DeviceMemory,
    account: Option<Arc<Account>>,
}

impl Slab {
    /// Allocates memory, after charging the account for it.
    pub fn take(
        device: &Arc<dyn Device>,
        account: Option<&Arc<Account>>,
        bytes: u64,
    ) -> Result<Slab> {
        if !device.facts().reaches_device {
            let name = device.facts().name;
            fail!(Unsupported, "a device tier needs a device with memory of its own, not {name}");
        }
        if let Some(account) = account {
            account.take(Tier::Device, bytes)?;
        }
        match device.allocate(bytes) {
            Ok(memory) => Ok(Slab { device: device.clone(), memory, account: account.cloned() }),
            Err(error) => {
                if let Some(account) = account {
                    account.give_back(Tier::Device, bytes);
                }
                Err(error)
            }
        }
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.memory.address
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the tier drops a slab when none of its pieces is in use, and is dropped
        // itself when all work has ended; pieces are in use until copies of them have ended.
        let freed = unsafe { self.device.free(&self.memory) };
        if let Err(error) = freed {
            log::warn!("device memory could not be returned: {error}");
            if error.status() == Status::Busy {
                return; // the memory is still allocated and stays charged
            }
        }
        if let Some(account) = &self.account {
            account.give_back(Tier::Device, self.memory.bytes);
        }
    }
}
