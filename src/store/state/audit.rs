//! Whether what is in device memory is what it should be: read back, and held against what
//! host memory has, or against the seal of what is on disk.

use crate::base::budget::Tier;
use crate::base::checksum::checksum;
use crate::base::status::{Result, Status};
use crate::format::seal::{Identity, Plane, seal};
use crate::meta::chunks::{Cell, Coded, Place};
use crate::store::state::reclaim::cell_of_owner;
use crate::store::state::work::WorkerKind;
use crate::store::state::{At, StoreState};
use crate::tier::host::Piece;

/// What an audit has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Audited {
    /// Cells that are what they should be.
    pub right: u64,
    /// Cells that were not, and are forgotten.
    pub wrong: u64,
    /// Cells that nothing could be said of: they are not in host memory, and coded on disk; or
    /// their codec loses something, and host memory may have what came back from there; or they
    /// could not be read back for now.
    pub unknown: u64,
}

/// What a cell must be.
enum Right {
    /// As it is there, in host memory.
    Bytes(usize),
    /// Planes of these kinds and lengths, with this seal.
    Sealed(Identity, u64, Vec<(u16, u64)>),
    Unknown,
}

/// A cell to be looked at. It stays where it is until that is over.
pub struct Audit {
    table: u32,
    cell: Cell,
    /// Host memory is read, too.
    holds_host: bool,
    right: Right,
    /// Where it is on the device.
    pub device: u64,
    /// How long it is.
    pub bytes: u64,
}

impl Audit {
    /// Whether the bytes that were read back are right, if that can be said.
    ///
    /// # Safety
    /// The core that has begun this audit has not ended it yet.
    pub unsafe fn is_right(&self, bytes: &[u8]) -> Option<bool> {
        match &self.right {
            Right::Bytes(address) => {
                let address = *address as *const u8;
                // SAFETY: a piece of host memory that is read until the audit has ended.
                let host = unsafe { std::slice::from_raw_parts(address, bytes.len()) };
                Some(host == bytes)
            }
            Right::Sealed(who, right, kinds) => {
                let mut at = 0;
                let planes: Vec<Plane> = kinds
                    .iter()
                    .map(|&(kind, plane_bytes)| {
                        let end = (at + plane_bytes as usize).min(bytes.len());
                        let sum = checksum(&bytes[at..end]);
                        at = end;
                        Plane { kind, bytes: plane_bytes, sum, ..Plane::default() }
                    })
                    .collect();
                Some(seal(who, planes.into_iter()) == *right)
            }
            Right::Unknown => None,
        }
    }
}

impl StoreState {
    /// The cells that are in device memory now, for [`StoreState::begin_audit`].
    pub fn audit_list(&self) -> Vec<u64> {
        let replicas = self.replicas().filter(|replicas| !replicas.is_lost());
        replicas.map(|replicas| replicas.owners()).unwrap_or_default()
    }

    /// Begins to look at some of these, as far as they are there still. Each must be ended; until
    /// then it stays where it is, so that few are begun at once.
    pub fn begin_audit(&mut self, owners: &[u64]) -> Vec<Audit> {
        let all: Vec<Audit> = owners.iter().filter_map(|&owner| self.begin_one(owner)).collect();
        // Whoever waits for the store to come to rest waits for these, too.
        self.under_way[WorkerKind::Copy as usize] += all.len() as u32;
        all
    }

    /// None: it is being filled, and not there yet.
    fn begin_one(&mut self, owner: u64) -> Option<Audit> {
        let (table, cell) = cell_of_owner(owner);
        let is_lossy = self.codec_of(At { table, slot: cell.chunk }).is_lossy();
        let rows = &mut self.tables[table as usize];
        rows.chunks.begin_read(cell, Tier::Device).ok()?;
        let bytes = rows.planes(cell).bytes();
        let place = rows.chunks.begin_read(cell, Tier::Host);
        let in_host = match place {
            Ok(Place::Host(piece)) => self.host.address(Piece(piece)).ok(),
            _ => None,
        };
        let right = match (in_host, rows.chunks.place(cell, Tier::Disk)) {
            _ if is_lossy => Right::Unknown,
            (Some(address), _) => Right::Bytes(address as usize),
            (_, Ok(Some(Place::Disk { seal, coded: Coded::PLAIN, .. }))) => {
                let who = rows.identity_of(cell, Coded::PLAIN);
                Right::Sealed(who, seal, rows.stored_planes(cell).collect())
            }
            _ => Right::Unknown,
        };
        let device = self.replica_address(table, cell).expect("what is read stays where it is");
        Some(Audit { table, cell, holds_host: in_host.is_some(), right, device, bytes })
    }

    /// Says what came of it. An error: it could not be read back.
    pub fn end_audit(&mut self, one: Audit, found: Result<Option<bool>>, all: &mut Audited) {
        self.under_way[WorkerKind::Copy as usize] -= 1;
        let Audit { table, cell, holds_host, .. } = one;
        let held = holds_host.then_some(Tier::Host);
        for tier in [Some(Tier::Device), held].into_iter().flatten() {
            match self.tables[table as usize].chunks.end_read(cell, tier) {
                Ok(Some(place)) => self.free_place(table, cell, place),
                Ok(None) => {}
                Err(error) => log::error!("an audit could not be ended: {error}"),
            }
        }
        match found {
            Ok(Some(true)) => all.right += 1,
            Ok(Some(false)) => {
                all.wrong += 1;
                self.forget_replica(table, cell);
            }
            Ok(None) => all.unknown += 1,
            Err(error) if error.status() == Status::Unavailable => self.lose_device(),
            Err(_) => drop(self.forget_replica(table, cell)),
        }
        self.wake(table, cell);
        self.tidy(table, cell.chunk);
        self.settle();
    }
}
