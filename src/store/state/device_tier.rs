//! Device replicas: copies of cells in device memory, which save a crossing of the link.
//!
//! A replica is never the only copy: host memory or the disk has the cell, too. So eviction of a
//! replica drops it, and a lost device costs bandwidth only.

use std::collections::HashMap;

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::checksum::checksum;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::{Device, Memory};
use crate::fail;
use crate::format::seal::{Identity, Plane, seal};
use crate::meta::chunks::{Arrival, Begin, Cell, Dropped, Location, StoredForm};
use crate::store::admission::{Admission, Candidate};
use crate::store::state::batches::WorkerKind;
use crate::store::state::batches::{REPLICAS, Stage};
use crate::store::state::chunk_table::note;
use crate::store::state::tier_cache::{Granularity, TierCache, cell_of_owner, owner_of};
use crate::store::state::transfer::{Job, PARTS, TransferKind};
use crate::store::state::{At, Config, DEVICE_MASK, HOST_MASK, StoreState};
use crate::tier::device::{DeviceStats, DeviceTier, Piece, Slab};
use crate::tier::host::Piece as HostPiece;

// ---------- device replicas

/// Most victims for one cell. If that is not enough, the cell gets no replica.
const MOST_VICTIMS: u32 = 8;
/// Least time between two slabs that are emptied for cells of another size.
const VACATE_NS: u64 = 1_000_000_000;

/// The device tier: replicas, their policy, and copies from them.
pub struct Replicas {
    pub(super) tier: DeviceTier,
    /// Its policy, which chooses chunks in any order.
    pub(super) cache: TierCache,
    admission: Admission,
    /// Copies from device memory.
    pub(super) stage: Stage,
    pub(super) account: Option<Arc<Account>>,
    /// The device is lost: no replica is made any more.
    is_lost: bool,
    /// Slabs are being allocated.
    pub(super) is_taking: bool,
    /// No slab is allocated before this time.
    pub(super) retry_ns: u64,
    /// When a slab was last emptied for another size.
    vacated_ns: u64,
    /// The last batch of copies was from device memory.
    was_replica_batch: bool,
    /// Checksums of each piece's planes, if the device computes them.
    sums: HashMap<u32, [u64; 2]>,
}

impl Replicas {
    /// Opens the device tier without memory, if the store is to have one.
    pub(super) fn open(
        config: &Config,
        account: Option<Arc<Account>>,
    ) -> Result<Option<Box<Replicas>>> {
        let device = &config.device;
        if device.bytes == 0 {
            return Ok(None);
        }
        let objects = config.chunk_objects();
        Ok(Some(Box::new(Replicas {
            tier: DeviceTier::new(account.clone(), device.bytes)?,
            cache: TierCache::open(
                &device.policy,
                Granularity::Chunk,
                objects,
                device.bytes,
                true,
            )?,
            admission: Admission::open(&device.admission, 0)?,
            stage: Stage::new(config, REPLICAS)?,
            account,
            is_lost: false,
            is_taking: false,
            retry_ns: 0,
            vacated_ns: 0,
            was_replica_batch: false,
            sums: HashMap::new(),
        })))
    }

    /// Statistics of its memory.
    pub fn stats(&self) -> DeviceStats {
        self.tier.stats()
    }

    /// Owners of the pieces in use.
    pub(super) fn owners(&self) -> Vec<u64> {
        self.tier.owners().collect()
    }

    /// Whether its device is lost.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Address of a piece.
    pub(super) fn address(&self, piece: Piece) -> Result<u64> {
        self.tier.address(piece)
    }

    /// Frees a piece.
    pub(super) fn free(&mut self, piece: Piece) -> Result<()> {
        self.sums.remove(&piece.0);
        self.tier.free(piece)
    }

    pub(super) fn needs_slabs(&self, now_ns: u64) -> bool {
        !self.is_lost && !self.is_taking && now_ns >= self.retry_ns && self.tier.missing_slabs() > 0
    }

    pub(super) fn waiting(&self) -> bool {
        self.stage.has_queued()
    }
}

impl StoreState {
    /// Forgets the replica of a cell; the cell is resident elsewhere. Returns whether it had one.
    pub(super) fn forget_replica(&mut self, table: u32, cell: Cell) -> bool {
        match self.tables[table as usize].chunks.begin_drop(cell, Tier::Device) {
            Ok(Dropped::Freed(place)) => self.free_place(table, cell, place),
            Ok(Dropped::Deferred) => {}
            Ok(Dropped::Absent) | Err(_) => return false,
        }
        self.note_removed(table, cell, Tier::Device);
        true
    }

    /// Forgets the replica of a cell that was found to be resident nowhere else.
    pub(super) fn forget_if_alone(&mut self, table: u32, cell: Cell) {
        let marks = self.tables[table as usize].chunks.marks(cell.chunk);
        let resident =
            marks.and_then(|all| all.get(cell.layer)).map_or(0, |marks| marks.resident_tiers());
        if resident != DEVICE_MASK {
            return;
        }
        if let Ok(Dropped::Freed(place)) =
            self.tables[table as usize].chunks.lose(cell, Tier::Device)
        {
            self.free_place(table, cell, place);
        }
        self.note_removed(table, cell, Tier::Device);
    }

    /// The device is lost: forgets all replicas, and makes no more.
    pub(super) fn lose_device(&mut self) {
        let Some(replicas) = self.replicas.as_mut().filter(|replicas| !replicas.is_lost) else {
            return;
        };
        replicas.is_lost = true;
        let owners = replicas.owners();
        let before = self.device_cells();
        self.vacate_replica(&owners);
        if let Some(replicas) = self.replicas.as_mut() {
            replicas.tier.drain(u64::MAX);
        }
        self.counters.device_lost_cells += before - self.device_cells();
        log::warn!("the device has failed: its tier is closed, {before} replicas are lost");
    }

    /// Cells with a replica.
    pub fn device_cells(&self) -> u64 {
        let counts = self.tables.iter().map(|table| table.chunks.counts());
        counts.map(|counts| counts.cells[Tier::Device as usize]).sum()
    }

    /// Whether a job may use replicas: the engine's tensors of its layer are on the device.
    fn may_use_replica(&self, job: &Job) -> bool {
        let filled = &self.transfers.table[job.number].spec;
        let layer = filled.views.layers.get(job.cell.layer.wrapping_sub(filled.first_layer));
        let on_device = layer.is_some_and(|layer| {
            layer.k.memory == Memory::Device
                && layer.v.as_ref().is_none_or(|v| v.memory == Memory::Device)
        });
        on_device && !job.plain && self.replicas.as_ref().is_some_and(|replicas| !replicas.is_lost)
    }

    /// Queues a get's copy from the replica, if there is one that may be used. A prefetch of such a
    /// cell ends. Returns whether this was done.
    pub(super) fn route_replica(
        &mut self,
        id: u32,
        kind: TransferKind,
        table: u32,
        cell: Cell,
    ) -> bool {
        if kind == TransferKind::Prefetch {
            self.end_job(id, 0, None);
            return true;
        }
        if !self.may_use_replica(&self.transfers.jobs[id]) {
            return false;
        }
        if self.tables[table as usize].chunks.begin_read(cell, Tier::Device).is_err() {
            return false;
        }
        self.transfers.jobs[id].uses_device = true;
        self.queue_copy(id, table, cell);
        true
    }

    /// Whether the next batch is of copies from device memory. They alternate with the others.
    pub(super) fn is_replica_next(&mut self) -> bool {
        let has_others = self.stages.copy.has_queued();
        let Some(replicas) = self.replicas.as_mut() else { return false };
        let is = replicas.waiting() && !(has_others && replicas.was_replica_batch);
        replicas.was_replica_batch = is;
        is
    }

    /// Routes a job again whose copy would read a lost device. Returns whether it did.
    pub(super) fn reroute_lost(&mut self, id: u32) -> bool {
        let is_lost = self.replicas.as_ref().is_some_and(|replicas| replicas.is_lost);
        if is_lost && self.transfers.jobs[id].uses_device {
            self.end_copying(id, false);
            self.transfers.restart_job(id);
            return true;
        }
        false
    }

    /// Allocates device memory for a job's cell, if it is to get a replica.
    pub(super) fn replica_for(&mut self, id: u32) -> Option<Piece> {
        let job = self.transfers.jobs[id];
        if !self.may_use_replica(&job) {
            return None;
        }
        let (table, cell) = self.transfers.cell_of(&job);
        let is_put = self.transfers.table[job.number].spec.kind == TransferKind::Put;
        let marks = *self.tables[table as usize].chunks.marks(cell.chunk)?.get(cell.layer)?;
        let is_free =
            (marks.resident_tiers() | marks.arriving() | marks.leaving()) & DEVICE_MASK == 0;
        if !is_free || !is_put && marks.resident_tiers() & HOST_MASK == 0 {
            return None;
        }
        let piece = self.find_replica_piece(table, cell)?;
        let chunks = &mut self.tables[table as usize].chunks;
        if !is_put
            && !matches!(chunks.begin_copy(cell, Tier::Host, Tier::Device), Ok(Begin::Started))
        {
            self.free_replica(piece);
            return None;
        }
        Some(piece)
    }

    /// Finds a piece for a cell, if it is admitted, by evicting others.
    fn find_replica_piece(&mut self, table: u32, cell: Cell) -> Option<Piece> {
        let rows = &self.tables[table as usize];
        let bytes = rows.full_bytes(cell.layer);
        let filled = Candidate {
            bytes,
            hits: u32::from(rows.uses[cell.chunk as usize]),
            priority: rows.classes[cell.chunk as usize],
        };
        let now_ns = self.now_ns;
        let replicas = self.replicas.as_mut()?;
        let stats = replicas.tier.stats();
        let free = 1.0 - stats.live_bytes as f64 / stats.slab_bytes.max(1) as f64;
        if bytes > replicas.tier.bytes_per_slab()
            || replicas.admission.admit(&filled, free, now_ns).is_err()
        {
            return None;
        }
        for _ in 0..MOST_VICTIMS {
            let replicas = self.replicas.as_mut()?;
            if let Some(piece) = replicas.tier.alloc(bytes, owner_of(table, cell)) {
                return Some(piece);
            }
            if replicas.tier.has_empty() {
                return None; // no host memory for the table of its pieces
            }
            if replicas.tier.has_size(bytes) {
                if !self.evict_replicas(bytes) {
                    return None;
                }
            } else if now_ns >= replicas.vacated_ns + VACATE_NS {
                self.vacate_emptiest();
            } else {
                return None; // evicting others frees no piece of this size
            }
        }
        None
    }

    /// Empties the slab with the fewest cells, unless one of them is pinned.
    fn vacate_emptiest(&mut self) {
        let now_ns = self.now_ns;
        let Some(replicas) = self.replicas.as_mut() else { return };
        replicas.vacated_ns = now_ns;
        let slab = replicas.tier.emptiest();
        let owners: Vec<u64> =
            slab.into_iter().flat_map(|at| replicas.tier.owners_in(at)).collect();
        let is_pinned = owners.iter().any(|&owner| {
            let (table, cell) = cell_of_owner(owner);
            let row = self.tables[table as usize].chunks.chunk(cell.chunk);
            row.is_some_and(|row| row.pin().is_some())
        });
        if !is_pinned {
            self.vacate_replica(&owners);
        }
    }

    /// Evicts the chunk that the policy chooses. Returns whether there was one.
    fn evict_replicas(&mut self, bytes: u64) -> bool {
        let now_ns = self.now_ns;
        let Some(replicas) = self.replicas.as_mut() else { return false };
        let mut victims = Vec::new();
        replicas.cache.choose(now_ns, bytes, 1, &mut victims);
        for &victim in &victims {
            let Some((at, _)) = self.chosen(victim) else { continue };
            self.tables[at.table as usize].clear(at.slot, note::IN_DEVICE | note::PINNED);
            let freed = self.drop_where(at, Tier::Device as usize, |_, _| true);
            self.counters.device_evicted_chunks += u64::from(freed > 0);
        }
        !victims.is_empty()
    }

    /// Ends the copy of a cell into device memory. A put's replica is recorded when its cell is in
    /// host memory.
    pub(super) fn end_filling(
        &mut self,
        table: u32,
        cell: Cell,
        kind: TransferKind,
        filled: (Piece, bool),
    ) {
        let (piece, mut has_arrived) = filled;
        let stays = self
            .replicas
            .as_ref()
            .is_some_and(|replicas| !replicas.is_lost && !replicas.tier.drains(piece));
        let chunks = &mut self.tables[table as usize].chunks;
        if kind == TransferKind::Put {
            let begun = chunks.begin_copy(cell, Tier::Host, Tier::Device);
            if !has_arrived || !matches!(begun, Ok(Begin::Started)) {
                return self.free_replica(piece);
            }
        }
        // The cell may have left host memory meanwhile, and be resident nowhere else.
        let marks = chunks.marks(cell.chunk).and_then(|all| all.get(cell.layer));
        let is_elsewhere = marks.is_some_and(|marks| marks.resident_tiers() & !DEVICE_MASK != 0);
        has_arrived &= is_elsewhere && stays;
        let arrival =
            if has_arrived { Arrival::Arrived(Location::Device) } else { Arrival::Failed };
        match chunks.end_copy(cell, Tier::Device, arrival) {
            Ok(Some(place)) => self.free_place(table, cell, place),
            Ok(None) => {}
            Err(error) => log::error!(
                "internal: the copy of a cell to the device could not be ended: {error}"
            ),
        }
        if !has_arrived {
            return self.free_replica(piece);
        }
        self.tables[table as usize].set_piece(cell, piece);
        self.counters.device_promoted_cells += 1;
        self.arrived(table, cell, Tier::Device);
    }

    /// Records the checksums of a piece's planes.
    pub(super) fn note_replica_sums(&mut self, piece: Piece, sums: [u64; 2]) {
        if let Some(replicas) = self.replicas.as_mut()
            && replicas.sums.try_reserve(1).is_ok()
        {
            replicas.sums.insert(piece.0, sums);
        }
    }

    /// Checksums of a replica, if they are known.
    pub(super) fn replica_sums(&self, table: u32, cell: Cell) -> Option<[u64; 2]> {
        let piece = self.tables[table as usize].piece(cell);
        self.replicas.as_ref()?.sums.get(&piece.0).copied()
    }

    /// Address of a replica.
    pub(super) fn replica_address(&self, table: u32, cell: Cell) -> Result<u64> {
        match &self.replicas {
            Some(replicas) => replicas.address(self.tables[table as usize].piece(cell)),
            None => Err(Status::NotFound.into()),
        }
    }

    /// Checks replicas against the tables, for [`StoreState::check`].
    pub fn check_replicas(&self) -> Result<()> {
        let Some(replicas) = &self.replicas else { return Ok(()) };
        let (cells, stats) = (self.device_cells(), replicas.tier.stats());
        if self.is_idle() && stats.live_pieces != cells {
            fail!(State, "{} pieces of device memory for {cells} cells", stats.live_pieces);
        }
        if self.is_idle() && replicas.is_lost && stats.slabs > 0 {
            fail!(State, "{} slabs of a device that is lost", stats.slabs);
        }
        for (number, table) in self.tables.iter().enumerate() {
            for slot in table.chunks.slots() {
                let marks = table.chunks.marks(slot).unwrap_or_default();
                if let Some(layer) =
                    marks.iter().position(|marks| marks.resident_tiers() == DEVICE_MASK)
                {
                    let at = At { table: number as u32, slot };
                    fail!(State, "layer {layer} of {at:?} is resident on the device only");
                }
            }
        }
        Ok(())
    }
}

// ---------- device slabs
//
// Memory of the device tier: slabs are allocated, cut, and given back.

/// After a refusal or a reclaim no memory is allocated for so long.
const PAUSE_NS: u64 = 10_000_000_000;

/// Device memory to be allocated or freed.
#[derive(Default)]
pub struct SlabWork {
    count: u64,
    bytes: u64,
    account: Option<Arc<Account>>,
    taken: Vec<Slab>,
    returned: Vec<Slab>,
    refused: Option<Error>,
}

impl SlabWork {
    /// Executes it.
    pub fn carry_out(&mut self, device: &Arc<dyn Device>) {
        self.returned.clear();
        while self.refused.is_none() && (self.taken.len() as u64) < self.count {
            match Slab::take(device, self.account.as_ref(), self.bytes) {
                Ok(slab) => self.taken.push(slab),
                Err(error) => self.refused = Some(error),
            }
        }
    }
}

impl StoreState {
    /// The device tier, if the store has one.
    pub fn replicas(&self) -> Option<&Replicas> {
        self.replicas.as_deref()
    }

    /// Attaches a device: allocates memory of the device tier and, if the device wants that,
    /// registers host memory of cells. Called before anything else. Allocates as much as it can,
    /// and fails only if that is nothing.
    pub fn begin_device(&mut self, device: &Arc<dyn Device>) -> Result<()> {
        if device.facts().asynchronous {
            // Each submission to such a device has a cost, so it gets many copies at once.
            self.config.copy_bytes = self.config.batch_bytes;
            self.stages.copy.queue.in_parts_of(self.config.copy_bytes / PARTS);
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
                log::warn!("the device tier got {has} bytes, less than configured: {error}");
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Whether a copy worker may find device work.
    pub(super) fn has_device_work(&self) -> bool {
        self.replicas.as_ref().is_some_and(|replicas| {
            replicas.waiting() || replicas.tier.has_returning() || replicas.needs_slabs(self.now_ns)
        })
    }

    pub(super) fn take_slabs(&mut self) -> Option<SlabWork> {
        let now_ns = self.now_ns;
        let replicas = self.replicas.as_mut()?;
        let takes = replicas.needs_slabs(now_ns);
        if !takes && !replicas.tier.has_returning() {
            return None;
        }
        replicas.is_taking |= takes;
        Some(SlabWork {
            count: if takes { replicas.tier.missing_slabs() } else { 0 },
            bytes: replicas.tier.bytes_per_slab(),
            account: replicas.account.clone(),
            returned: replicas.tier.take_returning(),
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
            replicas.retry_ns = now_ns.saturating_add(PAUSE_NS);
        }
        work.taken.into_iter().for_each(|slab| replicas.tier.add(slab));
        if replicas.is_lost() {
            replicas.tier.drain(u64::MAX);
        }
    }

    /// Returns device memory that other owners need; how much is or will be freed, once copies from
    /// it have ended.
    pub fn shrink_device(&mut self, bytes: u64) -> u64 {
        let now_ns = self.now_ns;
        let Some(replicas) = self.replicas.as_mut() else { return 0 };
        replicas.retry_ns = now_ns.saturating_add(PAUSE_NS);
        let (owners, draining_bytes) = replicas.tier.drain(bytes);
        self.vacate_replica(&owners);
        self.settle();
        draining_bytes
    }

    /// Sets the limit of the device tier in bytes; 0 = none. Replicas beyond it are forgotten at
    /// once; their memory is freed when copies from it have ended.
    pub fn set_device_bytes(&mut self, bytes: u64) -> Result<()> {
        let high = self.config.high;
        let Some(replicas) = self.replicas.as_mut() else {
            fail!(NotFound, "this store has no device tier");
        };
        let owners = replicas.tier.set_limit(bytes)?;
        replicas.cache.set_bytes(bytes, high);
        replicas.retry_ns = 0;
        self.config.device.bytes = bytes;
        self.vacate_replica(&owners);
        self.settle();
        Ok(())
    }

    /// Forgets the replicas in some pieces.
    pub(super) fn vacate_replica(&mut self, owners: &[u64]) {
        for &owner in owners {
            let (table, cell) = cell_of_owner(owner);
            self.forget_replica(table, cell);
        }
    }

    pub(super) fn free_replica(&mut self, piece: Piece) {
        let Some(replicas) = self.replicas.as_mut() else { return };
        if let Err(error) = replicas.free(piece) {
            log::error!("internal: a piece of device memory was freed twice: {error}");
        }
    }
}

// ---------- audit
//
// Audits read replicas back and compare them with the cells in host memory, or with the seals on disk.

/// Outcome of an audit, in cells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Audited {
    /// Equal to the cell elsewhere.
    pub right: u64,
    /// Different; the replica was forgotten.
    pub wrong: u64,
    /// Not decided: the cell is not in host memory and is coded on disk, or a lossy codec makes
    /// host memory no reference, or the replica could not be read back.
    pub unknown: u64,
}

/// Expected content of a replica.
enum Right {
    /// The bytes at this host address.
    Bytes(usize),
    /// Planes of these kinds and lengths, with this seal.
    Sealed(Identity, u64, Vec<(u16, u64)>),
    Unknown,
}

/// A replica under audit. It is kept until the audit ends.
pub struct Audit {
    table: u32,
    cell: Cell,
    /// It reads host memory, too.
    holds_host: bool,
    right: Right,
    /// Address on the device.
    pub device: u64,
    /// Its length.
    pub bytes: u64,
}

impl Audit {
    /// Whether the bytes read back are right; `None` = not decided.
    ///
    /// # Safety
    /// This audit has not been ended with [`StoreState::end_audit`].
    pub unsafe fn is_right(&self, bytes: &[u8]) -> Option<bool> {
        match &self.right {
            Right::Bytes(address) => {
                let address = *address as *const u8;
                // SAFETY: a piece of host memory that is read until the audit has ended.
                let host = unsafe { std::slice::from_raw_parts(address, bytes.len()) };
                Some(host == bytes)
            }
            Right::Sealed(context, right, kinds) => {
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
                Some(seal(context, planes.into_iter()) == *right)
            }
            Right::Unknown => None,
        }
    }
}

impl StoreState {
    /// Owners of all replicas, for [`StoreState::begin_audit`].
    pub fn audit_list(&self) -> Vec<u64> {
        let replicas = self.replicas().filter(|replicas| !replicas.is_lost());
        replicas.map(|replicas| replicas.owners()).unwrap_or_default()
    }

    /// Begins to audit the replicas of some owners that are still there. Each must be ended. They
    /// are kept until then, so few should be begun at once.
    pub fn begin_audit(&mut self, owners: &[u64]) -> Vec<Audit> {
        let all: Vec<Audit> = owners.iter().filter_map(|&owner| self.begin_one(owner)).collect();
        // A caller that waits for an idle store waits for audits, too.
        self.stages.in_flight[WorkerKind::Copy as usize] += all.len() as u32;
        all
    }

    /// `None`: the replica is being filled.
    fn begin_one(&mut self, owner: u64) -> Option<Audit> {
        let (table, cell) = cell_of_owner(owner);
        let is_lossy = self.codec_of(At { table, slot: cell.chunk }).is_lossy();
        let rows = &mut self.tables[table as usize];
        rows.chunks.begin_read(cell, Tier::Device).ok()?;
        let bytes = rows.planes(cell).bytes();
        let place = rows.chunks.begin_read(cell, Tier::Host);
        let in_host = match place {
            Ok(Location::Host(piece)) => self.host.address(HostPiece(piece)).ok(),
            _ => None,
        };
        let right = match (in_host, rows.chunks.place(cell, Tier::Disk)) {
            _ if is_lossy => Right::Unknown,
            (Some(address), _) => Right::Bytes(address as usize),
            (_, Ok(Some(Location::Disk { seal, coded: StoredForm::PLAIN, .. }))) => {
                let context = rows.identity_of(cell, StoredForm::PLAIN);
                Right::Sealed(context, seal, rows.stored_planes(cell).collect())
            }
            _ => Right::Unknown,
        };
        let device = self.replica_address(table, cell).expect("what is read stays where it is");
        Some(Audit { table, cell, holds_host: in_host.is_some(), right, device, bytes })
    }

    /// Ends an audit. An error says that the replica could not be read back.
    pub fn end_audit(&mut self, filled: Audit, found: Result<Option<bool>>, all: &mut Audited) {
        self.stages.in_flight[WorkerKind::Copy as usize] -= 1;
        let Audit { table, cell, holds_host, .. } = filled;
        let held = holds_host.then_some(Tier::Host);
        for tier in [Some(Tier::Device), held].into_iter().flatten() {
            match self.tables[table as usize].chunks.end_read(cell, tier) {
                Ok(Some(place)) => self.free_place(table, cell, place),
                Ok(None) => {}
                Err(error) => log::error!("internal: an audit could not be ended: {error}"),
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
