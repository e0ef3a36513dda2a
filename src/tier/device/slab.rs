//! One slab of a device's memory, and the account that is charged for it.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::{Device, DeviceMemory};
use crate::fail;

/// Memory of a device, until it is dropped: then it is returned. Taking and dropping it may
/// keep the caller waiting.
pub struct Slab {
    device: Arc<dyn Device>,
    memory: DeviceMemory,
    account: Option<Arc<Account>>,
}

impl Slab {
    /// Takes memory, after the account has paid for it.
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

    /// Where it starts.
    pub fn address(&self) -> u64 {
        self.memory.address
    }

    /// How long it is.
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
                return; // it is there still, and stays paid for
            }
        }
        if let Some(account) = &self.account {
            account.give_back(Tier::Device, self.memory.bytes);
        }
    }
}
