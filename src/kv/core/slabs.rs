//! The memory of the device tier: how it is had, and goes back.

use crate::base::account::Account;
use crate::base::status::{Error, Result};
use crate::base::sync::Arc;
use crate::device::Device;
use crate::fail;
use crate::kv::core::Core;
use crate::kv::core::copies::PARTS;
use crate::kv::core::debt::cell_of_owner;
use crate::kv::core::replicas::Replicas;
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

impl Core {
    /// The device tier, to be looked at.
    pub fn near(&self) -> Option<&Replicas> {
        self.near.as_deref()
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
        let has = self.near.as_ref().map_or(0, |near| near.tier.stats().slab_bytes);
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
    pub(super) fn has_near_work(&self) -> bool {
        self.near.as_ref().is_some_and(|near| {
            near.waiting() || near.tier.has_leaving() || near.wants_slabs(self.now_ns)
        })
    }

    pub(super) fn take_slabs(&mut self) -> Option<SlabWork> {
        let now_ns = self.now_ns;
        let near = self.near.as_mut()?;
        let takes = near.wants_slabs(now_ns);
        if !takes && !near.tier.has_leaving() {
            return None;
        }
        near.is_taking |= takes;
        Some(SlabWork {
            count: if takes { near.tier.missing_slabs() } else { 0 },
            bytes: near.tier.each_bytes(),
            account: near.account.clone(),
            gone: near.tier.take_leaving(),
            ..SlabWork::default()
        })
    }

    pub(super) fn done_slabs(&mut self, work: SlabWork) {
        let now_ns = self.now_ns;
        let Some(near) = self.near.as_mut() else { return };
        if work.count > 0 {
            near.is_taking = false;
        }
        if work.refused.is_some() {
            near.asks_ns = now_ns.saturating_add(PAUSE_NS);
        }
        work.taken.into_iter().for_each(|slab| near.tier.add(slab));
        if near.is_lost() {
            near.tier.drain(u64::MAX);
        }
    }

    /// Gives device memory back that others need more; how much went, or will: as soon as
    /// copies from there have ended.
    pub fn shrink_device(&mut self, bytes: u64) -> u64 {
        let now_ns = self.now_ns;
        let Some(near) = self.near.as_mut() else { return 0 };
        near.asks_ns = now_ns.saturating_add(PAUSE_NS);
        let (owners, goes) = near.tier.drain(bytes);
        self.vacate_near(&owners);
        self.settle();
        goes
    }

    /// Changes how many bytes of device memory cells may have; 0 = none. What is more than
    /// that is forgotten at once, and goes back when copies from there have ended.
    pub fn set_device_bytes(&mut self, bytes: u64) -> Result<()> {
        let high = self.config.high;
        let Some(near) = self.near.as_mut() else {
            fail!(NotFound, "this store has no device tier");
        };
        let owners = near.tier.set_limit(bytes)?;
        near.shelf.set_bytes(bytes, high);
        near.asks_ns = 0;
        self.config.device.bytes = bytes;
        self.vacate_near(&owners);
        self.settle();
        Ok(())
    }

    /// Whoever is in some pieces is forgotten.
    pub(super) fn vacate_near(&mut self, owners: &[u64]) {
        for &owner in owners {
            let (board, cell) = cell_of_owner(owner);
            self.forget_replica(board, cell);
        }
    }

    pub(super) fn free_near(&mut self, piece: Piece) {
        let Some(near) = self.near.as_mut() else { return };
        if let Err(error) = near.free(piece) {
            log::error!("a piece of device memory was not in use: {error}");
        }
    }
}
