//! The state machine of a store. It decides which cell is resident where, what moves next, and what
//! is evicted. It touches no bytes and never blocks.
//!
//! A worker takes a batch with [`StoreState::take`], executes it without the lock, and reports the
//! outcome with [`StoreState::done`]. One thread can drive the state machine as well as many, so a
//! simulation chooses the order by a seed. The states of a cell's transfer are drawn at the top of
//! [`transfer`].

pub mod batches;
pub mod blocks;
mod check;
pub mod chunk_table;
mod config;
pub mod device_tier;
pub mod disk_gc;
pub mod eviction;
mod namespaces;
pub mod plans;
pub mod quotas;
pub mod remote;
pub mod remote_fetch;
pub mod remote_lookup;
pub mod remote_upload;
mod retention;
mod runs;
pub mod session;
pub mod shadow;
pub mod snapshot;
pub mod stats;
pub mod tier_cache;
pub mod transfer;
pub mod work;
pub mod writeback;

pub use crate::store::counters::{RemoteStats, StoreStats};
pub use chunk_table::ChunkTable;
pub use config::{
    Config, DeviceConfig, LEAST_HOST_BYTES, MAX_CHUNK_TABLES, MAX_NAMESPACES, RemoteConfig, Write,
};
pub use disk_gc::Adopted;
pub use disk_gc::disk_room;
pub use namespaces::{Namespace, NamespaceOpts};
pub use session::{CellRange, TO_THE_END, Wanted};
pub use session::{SessionOpts, Truncated};
pub use stats::BESIDE_BYTES as ROW_BESIDE_BYTES;
pub use transfer::Job;
pub use transfer::{Finished, Level, TransferKind, TransferSpec};
pub use writeback::RECORD_CELLS;

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::device::Direction;
use crate::format::keys::Key;
use crate::format::record;
use crate::meta::chunks::{Cell, Location};
use crate::meta::index::Slot;
use crate::store::events::{Event, Events, Kind};
use crate::store::state::batches::{CopyBatch, Stages};
use crate::store::state::chunk_table::note;
use crate::store::state::eviction::Eviction;
use crate::store::state::namespaces::Namespaces;
use crate::store::state::session::Session;
use crate::store::state::transfer::Table;
use crate::store::state::transfer::Transfers;
use crate::store::state::work::WorkerKind;
use crate::tier::disk::{DiskTier, Spot};
use crate::tier::host::shared::SharedSlabs;
use crate::tier::host::{HostTier, Piece};

/// Tiers as indices of arrays, and as bits of a mask.
pub(crate) const HOST: usize = Tier::Host as usize;
pub(crate) const DISK: usize = Tier::Disk as usize;
pub(crate) const DEVICE: usize = Tier::Device as usize;
pub(crate) const REMOTE: usize = Tier::Remote as usize;
pub(crate) const HOST_MASK: u8 = 1 << Tier::Host as u8;
pub(crate) const DISK_MASK: u8 = 1 << Tier::Disk as u8;
pub(crate) const DEVICE_MASK: u8 = 1 << Tier::Device as u8;

/// A chunk: its table and its row there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct At {
    pub table: u32,
    pub slot: Slot,
}

/// The state of a store. Each part below owns what its module decides about.
pub struct StoreState {
    pub(super) config: Config,
    pub(super) now_ns: u64,
    pub(super) host: HostTier,
    pub(super) disk: Option<Arc<DiskTier>>,
    /// Copies of cells in device memory.
    pub(super) replicas: Option<Box<device_tier::Replicas>>,
    remote: Option<Box<remote::RemoteTier>>,
    pub(super) tables: Vec<ChunkTable>,
    namespaces: Namespaces,
    pub(super) sessions: Table<Session>,
    /// Sessions opened so far.
    session_serial: u64,
    transfers: Transfers,
    dependencies: transfer::Dependencies,
    stages: Stages,
    eviction: Eviction,
    retention: retention::Retention,
    quotas: quotas::Quotas,
    writeback: writeback::Writeback,
    disk_gc: disk_gc::DiskGc,
    plans: plans::Plans,
    stats: stats::Stats,
    /// Counters since the store was opened. The gauges are 0 here; `stats_now` fills them in.
    pub counters: StoreStats,
    /// Events of residency, for routers.
    pub events: Events,
}

impl StoreState {
    /// Opens the state of a store without namespaces.
    pub fn new(
        config: Config,
        account: Option<Arc<Account>>,
        disk: Option<Arc<DiskTier>>,
    ) -> Result<StoreState> {
        config.check()?;
        let disk_bytes = disk.as_deref().map(|disk| disk.stats().budget_bytes);
        Ok(StoreState {
            now_ns: 0,
            host: HostTier::new(account.clone(), &config.host_opts())?,
            replicas: device_tier::Replicas::open(&config, account.clone())?,
            remote: remote::RemoteTier::open(&config)?,
            tables: Vec::new(),
            namespaces: Namespaces::default(),
            sessions: Table::new(config.max_sessions as usize),
            session_serial: 0,
            transfers: Transfers::new(&config),
            dependencies: transfer::Dependencies::default(),
            stages: Stages::new(&config, config.copy_bytes / transfer::PARTS)?,
            eviction: Eviction::open(&config, disk_bytes)?,
            retention: retention::Retention::default(),
            quotas: quotas::Quotas::new(config.quota),
            writeback: writeback::Writeback::default(),
            disk_gc: disk_gc::DiskGc::default(),
            plans: plans::Plans::default(),
            stats: stats::Stats::new(account),
            counters: StoreStats::default(),
            events: Events::new(config.events)?,
            disk,
            config,
        })
    }

    /// Advances the clock to `now_ns`; it never decreases. Ends pins and chunks that are due.
    pub fn tick(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        self.end_pins();
        self.end_chunks();
        self.resume_quotas();
        self.abandon_overdue();
        self.settle();
    }

    /// Makes memory for cells from now on memory that other processes can map.
    pub fn share_host(&mut self) -> Result<Arc<SharedSlabs>> {
        let slabs = Arc::new(SharedSlabs::create(self.config.host_bytes)?);
        self.host.share(slabs.clone());
        Ok(slabs)
    }

    /// Keeps the memory that a process writes for its puts from being used again, until
    /// [`StoreState::let_go`].
    pub fn hold_for(&mut self, batch: &CopyBatch) -> Vec<Piece> {
        let puts = batch.items.iter().filter(|item| item.direction == Direction::Gather);
        self.host.hold(puts.map(|item| item.address))
    }

    /// Ends [`StoreState::hold_for`]: the process is gone.
    pub fn let_go(&mut self, pieces: &[Piece]) {
        if let Err(error) = self.host.let_go(pieces) {
            log::error!("internal: memory of a process that is gone was freed twice: {error}");
        }
        self.settle();
    }

    /// The host tier.
    pub fn host(&self) -> &HostTier {
        &self.host
    }

    /// Takes the completions since the last call.
    pub fn finished(&mut self, out: &mut Vec<Finished>) {
        out.append(&mut self.transfers.finished);
    }

    /// Whether no transfer, batch, write-back or upload is in flight or queued.
    pub fn is_idle(&self) -> bool {
        let has_no_writeback = self.writeback.queue.is_empty() && !self.disk_gc.has_parked();
        let has_no_upload = self.remote.as_ref().is_none_or(|remote| remote.is_quiet());
        self.transfers.table.is_empty()
            && self.stages.is_idle()
            && has_no_writeback
            && has_no_upload
    }

    /// Whether, in addition, no worker would find work.
    pub fn is_quiet(&self) -> bool {
        self.is_idle() && WorkerKind::ALL.iter().all(|&workers| !self.has_work(workers))
    }

    /// Runs until nothing more can be done without a worker: routes woken jobs, begins cells,
    /// retries allocations, evicts, reclaims.
    pub(super) fn settle(&mut self) {
        self.abandon_queues();
        for turn in 0u64.. {
            debug_assert!(turn < 1 << 22, "the store never settles: {}", self.describe_waiters());
            if let Some(job) = self.transfers.woken.pop() {
                self.route(job);
                continue;
            }
            self.charge_grown_tables();
            if !self.feed()
                && !self.retry_memory_waiters()
                && !self.make_room()
                && !self.enforce_quotas()
                && !self.pay()
                && !self.fetch_ahead()
            {
                break;
            }
        }
    }

    /// Frees a place that a cell has left.
    pub(super) fn free_place(&mut self, table: u32, cell: Cell, place: Location) {
        match place {
            Location::Host(piece) => {
                if let Err(error) = self.host.free(Piece(piece)) {
                    log::error!("internal: a piece of host memory was freed twice: {error}");
                }
            }
            Location::Disk { spot, coded, .. } => {
                let bytes = self.tables[table as usize].disk_bytes(cell, coded);
                if let Some(disk) = &self.disk {
                    disk.drop_cells([(Spot(spot), bytes)]);
                    self.disk_gc.dropped(Spot(spot), bytes);
                }
            }
            Location::Device => {
                let piece = self.tables[table as usize].piece(cell);
                self.free_replica(piece);
            }
            Location::Remote => {}
        }
    }

    /// Releases a reference to a chunk, and removes its row if nothing needs it.
    pub(super) fn release_chunk(&mut self, table: u32, slot: Slot) {
        let chunks = &mut self.tables[table as usize].chunks;
        let released = chunks.release(slot);
        debug_assert!(released.is_ok(), "{released:?}");
        self.eviction.reclaim_targets.released();
        if chunks.chunk(slot).is_some_and(|row| row.refs() == 0) {
            self.note_held(table, slot);
            self.tidy(table, slot);
        }
    }

    /// Removes a row without cells and references, then its ancestors for which the same holds.
    pub(super) fn tidy(&mut self, table: u32, slot: Slot) {
        let mut next = Some(slot);
        while let Some(slot) = next.take() {
            let chunks = &self.tables[table as usize].chunks;
            let Some(row) = chunks.chunk(slot) else { return };
            let (is_bare, namespace) = (row.cells_somewhere() == 0, row.namespace());
            let at = At { table, slot };
            if !is_bare || !chunks.is_removable(slot) || self.is_held_by_hint(at) {
                return;
            }
            self.forget_chunk(at);
            let removed = self.tables[table as usize].chunks.remove(slot, |_, _| ());
            next = self.row_removed(table, namespace, removed);
        }
    }

    /// Counts a row that was removed. Returns its parent, if that may be removed, too.
    pub(super) fn row_removed(
        &mut self,
        table: u32,
        namespace: u32,
        removed: Result<Option<Slot>>,
    ) -> Option<Slot> {
        let above = removed
            .inspect_err(|error| log::error!("internal: a row could not be removed: {error}"))
            .ok()?;
        self.namespaces.row_removed(namespace);
        // It has no children any more: it may be a victim now.
        above.into_iter().for_each(|above| self.note_held(table, above));
        above
    }

    /// Forgets all that is noted of a chunk.
    fn forget_chunk(&mut self, at: At) {
        const IN_POLICY: u16 = note::IN_HOST | note::IN_DISK | note::IN_DEVICE;
        if self.tables[at.table as usize].has(at.slot, IN_POLICY) {
            for tier in [Tier::Host, Tier::Disk, Tier::Device] {
                self.remove_from_policy(at, tier);
            }
        }
        self.forget_retention(at);
        self.tables[at.table as usize].forget(at.slot);
        if self.disk.is_some() {
            self.writeback.unsynced.remove(&at);
            self.cancel_demotion(at);
        }
    }

    /// Publishes an event.
    pub(super) fn publish(&mut self, kind: Kind, tier: Tier, at: At) {
        if let Some(event) = self.residency_event(kind, tier, at) {
            self.events.add(|number| Event { number, ..event });
        }
    }

    /// The event of a chunk, with the number of the next event.
    pub(super) fn residency_event(&self, kind: Kind, tier: Tier, at: At) -> Option<Event> {
        let (row, key, above) = self.tables.get(at.table as usize)?.chunks.named(at.slot)?;
        let namespace = &self.namespaces[row.namespace() as usize].key;
        Some(Event {
            number: self.events.next_number(),
            at_ns: self.now_ns,
            kind: kind as u32,
            tier: tier as u32,
            tokens: row.valid_tokens(),
            position: row.position(),
            key: key.0,
            parent: above.unwrap_or(namespace).0,
            namespace: namespace.0,
        })
    }

    /// The header of a chunk's records.
    pub(super) fn record_of(&self, at: At) -> record::Chunk {
        let table = &self.tables[at.table as usize];
        let row = table.chunks.chunk(at.slot);
        let namespace = row.and_then(|row| self.namespaces.get(row.namespace() as usize));
        table.record_of(at.slot, namespace.map_or(Key::default(), |namespace| namespace.key))
    }
}
