//! The memory of the device tier: how it is had, and goes back.

use crate::base::account::Account;
use crate::base::status::{Error, Result};
use crate::base::sync::Arc;
use crate::device::Device;
use crate::fail;
use crate::store::state::StoreState;
use crate::store::state::device_replicas::Replicas;
use crate::store::state::host_copies::PARTS;
use crate::store::state::reclaim::cell_of_owner;
use crate::tier::device::{Piece, Slab};

/// After memory was refused, or others wanted it, no more is asked for so long.
const PAUSE_NS: u64 = 10_000_000_000;

/// Device memory to be taken, or to be given back.
#[derive(Default)]
pub struct SlabWork {
    count: u64,
    bytes: u64,
    account: Option<Arc<Account>>,
    taken: Vec<Slab>,
    gone: Vec<Slab>,
    refused: Option<Error>,
}

impl SlabWork {
    /// Does it.
    pub fn carry_out(&mut self, device: &Arc<dyn Device>) {
        self.gone.clear();
        while self.refused.is_none() && (self.taken.len() as u64) < self.count {
            match Slab::take(device, self.account.as_ref(), self.bytes) {
                Ok(slab) => self.taken.push(slab),
                Err(error) => self.refused = Some(error),
            }
        }
    }
}

impl StoreState {
    /// The device tier, to be looked at.
    pub fn replicas(&self) -> Option<&Replicas> {
        self.replicas.as_deref()
    }

    /// Begins with a device: takes the memory of the device tier, where there is to be one, and
    /// tells the device of all memory of cells, if it wants that; before anything else is done. As much as can be had: an error only where that is none.
    pub fn begin_device(&mut self, device: &Arc<dyn Device>) -> Result<()> {
        if device.facts().asynchronous {
            // It is told of many copies at once, and each time costs.
            self.config.copy_bytes = self.config.batch_bytes;
            self.copies.in_parts_of(self.config.copy_bytes / PARTS);
        }
        if device.facts().wants_pinned {
            self.host.make_known_to(device.clone());
        }
        let Some(mut work) = self.take_slabs() else { return Ok(()) };
        work.carry_out(device);
        let refused = work.refused.clone();
        self.done_slabs(work);
        let has = self.replicas.as_ref().map_or(0, |replicas| replicas.tier.stats().slab_bytes);
        match refused {
            Some(error) if has == 0 => Err(error.within("the device tier")),
            Some(error) => {
                log::warn!("the device tier has {has} bytes, and no more: {error}");
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Whether hands that copy may find something here.
    pub(super) fn has_device_work(&self) -> bool {
        self.replicas.as_ref().is_some_and(|replicas| {
            replicas.waiting() || replicas.tier.has_leaving() || replicas.wants_slabs(self.now_ns)
        })
    }

    pub(super) fn take_slabs(&mut self) -> Option<SlabWork> {
        let now_ns = self.now_ns;
        let replicas = self.replicas.as_mut()?;
        let takes = replicas.wants_slabs(now_ns);
        if !takes && !replicas.tier.has_leaving() {
            return None;
        }
        replicas.is_taking |= takes;
        Some(SlabWork {
            count: if takes { replicas.tier.missing_slabs() } else { 0 },
            bytes: replicas.tier.each_bytes(),
            account: replicas.account.clone(),
            gone: replicas.tier.take_leaving(),
            ..SlabWork::default()
        })
    }

    pub(super) fn done_slabs(&mut self, work: SlabWork) {
        let now_ns = self.now_ns;
        let Some(replicas) = self.replicas.as_mut() else { return };
        if work.count > 0 {
            replicas.is_taking = false;
        }
        if work.refused.is_some() {
            replicas.asks_ns = now_ns.saturating_add(PAUSE_NS);
        }
        work.taken.into_iter().for_each(|slab| replicas.tier.add(slab));
        if replicas.is_lost() {
            replicas.tier.drain(u64::MAX);
        }
    }

    /// Gives device memory back that others need more; how much went, or will: as soon as
    /// copies from there have ended.
    pub fn shrink_device(&mut self, bytes: u64) -> u64 {
        let now_ns = self.now_ns;
        let Some(replicas) = self.replicas.as_mut() else { return 0 };
        replicas.asks_ns = now_ns.saturating_add(PAUSE_NS);
        let (owners, goes) = replicas.tier.drain(bytes);
        self.vacate_replica(&owners);
        self.settle();
        goes
    }

    /// Changes how many bytes of device memory cells may have; 0 = none. What is more than
    /// that is forgotten at once, and goes back when copies from there have ended.
    pub fn set_device_bytes(&mut self, bytes: u64) -> Result<()> {
        let high = self.config.high;
        let Some(replicas) = self.replicas.as_mut() else {
            fail!(NotFound, "this store has no device tier");
        };
        let owners = replicas.tier.set_limit(bytes)?;
        replicas.cache.set_bytes(bytes, high);
        replicas.asks_ns = 0;
        self.config.device.bytes = bytes;
        self.vacate_replica(&owners);
        self.settle();
        Ok(())
    }

    /// Whoever is in some pieces is forgotten.
    pub(super) fn vacate_replica(&mut self, owners: &[u64]) {
        for &owner in owners {
            let (table, cell) = cell_of_owner(owner);
            self.forget_replica(table, cell);
        }
    }

    pub(super) fn free_replica(&mut self, piece: Piece) {
        let Some(replicas) = self.replicas.as_mut() else { return };
        if let Err(error) = replicas.free(piece) {
            log::error!("a piece of device memory was not in use: {error}");
        }
    }
}
