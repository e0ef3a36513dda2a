//! Consistency checks for tests and simulations: what holds whenever no work is in flight.

use std::collections::BTreeMap;

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::format::segment::BLOCK_BYTES;
use crate::meta::chunks::{Cell, Location};
use crate::store::state::tier_cache::flag_of;
use crate::store::state::tier_cache::{Granularity, cell_id};
use crate::store::state::{At, StoreState};

impl StoreState {
    /// Describes what is in flight or queued.
    pub fn describe_waiters(&self) -> String {
        format!(
            "{} transfers, {} jobs, {} waiting for memory, {} awaited cells, {} chunks to write back, \
             {} demoting, {} cells waiting for events, {:?} batches, {} to sync, {}, {}",
            self.transfers.table.len(),
            self.transfers.jobs.len(),
            self.transfers.memory_waiters.len(),
            self.transfers.cell_waiters.len(),
            self.writeback.queue.len(),
            self.writeback.demoting.len(),
            self.cells_after_event(),
            self.stages.in_flight,
            self.writeback.sync_waiters.len(),
            self.disk_gc.describe(),
            self.remote.as_ref().map_or("no remote".into(), |remote| remote.describe()),
        )
    }

    /// Checks the tables against each other and against the tiers.
    pub fn check(&self) -> Result<()> {
        self.check_wait_lists()?;
        self.check_replicas()?;
        self.check_holds()?;
        self.check_namespaces()?;
        self.check_retention()?;
        self.check_quotas()?;
        let (mut pieces, mut blocks) = (0, 0);
        for (number, table) in self.tables.iter().enumerate() {
            let (p, b) = self.check_table(number)?;
            (pieces, blocks) = (pieces + p, blocks + b);
            if self.is_idle() && table.chunks.counts().moving != 0 {
                fail!(
                    State,
                    "{} cells of table {number} are still in motion",
                    table.chunks.counts().moving
                );
            }
        }
        if !self.is_idle() {
            return Ok(());
        }
        let stats = self.host.stats();
        if stats.live_pieces != pieces + self.host.held_pieces() {
            fail!(
                State,
                "{} pieces of host memory are in use, {pieces} cells are resident there",
                stats.live_pieces
            );
        }
        if let Some(disk) = &self.disk {
            let live: u64 = disk.segments().iter().map(|s| u64::from(s.live_blocks)).sum();
            if live != blocks {
                fail!(State, "{live} blocks of the disk are live, resident cells have {blocks}");
            }
        }
        self.dependencies.check_nothing_after()?;
        if let Some(remote) = self.remote.as_ref().filter(|remote| !remote.is_bare()) {
            fail!(State, "the remote is not at rest: {}", remote.describe());
        }
        let waits = (
            self.transfers.jobs.len(),
            self.transfers.memory_waiters.len(),
            self.transfers.cell_waiters.len(),
            self.transfers.woken.len(),
        );
        if waits != (0, 0, 0, 0) || self.transfers.memory_waiter_bytes != 0 {
            fail!(
                State,
                "jobs {waits:?} are left, for {} bytes",
                self.transfers.memory_waiter_bytes
            );
        }
        if !self.writeback.demoting.is_empty()
            || self.writeback.demoting_bytes != 0
            || !self.writeback.chunk_waiters.is_empty()
        {
            fail!(State, "{} demotions never ended", self.writeback.demoting.len());
        }
        Ok(())
    }

    /// Host bytes and disk blocks of a table's cells.
    fn check_table(&self, number: usize) -> Result<(u64, u64)> {
        let table = &self.tables[number];
        let (mut pieces, mut blocks) = (0, 0);
        let is_held = |&slot: &u32| table.chunks.chunk(slot).is_some_and(|row| row.refs() > 0);
        let (held, counted) = (table.chunks.slots().filter(is_held), table.chunks.counts().held);
        let held = held.count() as u64;
        if held != counted {
            fail!(State, "{held} chunks of table {number} are referenced, {counted} are counted");
        }
        for slot in table.chunks.slots() {
            for layer in 0..table.layout.layers() {
                let cell = Cell { chunk: slot, layer };
                pieces += u64::from(table.chunks.place(cell, Tier::Host)?.is_some());
                if let Some(Location::Disk { coded, .. }) = table.chunks.place(cell, Tier::Disk)? {
                    blocks += table.disk_bytes(cell, coded).div_ceil(BLOCK_BYTES as u64);
                }
            }
            let Some(row) = table.chunks.chunk(slot) else { continue };
            let is_kept = self.is_held_by_hint(At { table: number as u32, slot });
            if row.cells_somewhere() == 0 && table.chunks.is_removable(slot) && !is_kept {
                fail!(State, "chunk {slot} of table {number} has no cells and no references");
            }
            for tier in [Tier::Device, Tier::Host, Tier::Disk] {
                if row.cells()[tier as usize] > 0 {
                    self.check_known(At { table: number as u32, slot }, tier)?;
                }
            }
        }
        Ok((pieces, blocks))
    }

    /// Checks the counts of namespaces.
    fn check_namespaces(&self) -> Result<()> {
        let (mut rows, mut tables) = (BTreeMap::new(), vec![0; self.tables.len()]);
        for (number, table) in (0u32..).zip(&self.tables) {
            for row in table.chunks.slots().filter_map(|slot| table.chunks.chunk(slot)) {
                *rows.entry((row.namespace(), number)).or_insert(0u32) += 1;
            }
        }
        let mut sessions: BTreeMap<u32, u32> = BTreeMap::new();
        for (_, session) in self.sessions.iter() {
            *sessions.entry(session.namespace).or_default() += 1;
        }
        let mut known = 0;
        for (at, namespace) in self.namespaces.known() {
            known += 1;
            tables[namespace.table as usize] += 1;
            let has = rows.remove(&(at, namespace.table)).unwrap_or(0);
            let open = sessions.remove(&at).unwrap_or(0);
            if (has, open) != (namespace.rows, namespace.sessions) {
                fail!(State, "namespace {at} has {has} chunks and {open} sessions: {namespace:?}");
            }
            if self.namespaces.find(&namespace.key) != Some(at)
                || namespace.is_bare() && !namespace.is_listed
            {
                fail!(State, "namespace {at} is unused and not listed: {namespace:?}");
            }
        }
        if !rows.is_empty() || !sessions.is_empty() {
            fail!(State, "chunks {rows:?}, sessions {sessions:?} of no namespace");
        }
        let counted = self.tables.iter().map(|table| table.namespaces);
        if known != self.namespaces.len() || !counted.eq(tables) {
            fail!(State, "{known} namespaces, and {} by their keys", self.namespaces.len());
        }
        Ok(())
    }

    /// Checks that a tier's policy has a chunk if a cell of the chunk is resident in the tier and
    /// is not being evicted.
    fn check_known(&self, at: At, tier: Tier) -> Result<()> {
        let table = &self.tables[at.table as usize];
        let cache = match tier {
            Tier::Host => Some(&self.eviction.host),
            Tier::Device => self.replicas.as_ref().map(|replicas| &replicas.cache),
            _ => self.eviction.disk.as_ref(),
        };
        let Some(cache) = cache else { return Ok(()) };
        let is_known = table.has(at.slot, flag_of(tier));
        let in_its_granularity = |layer| match cache.granularity {
            Granularity::Chunk => is_known,
            Granularity::Cell => is_known && cache.knows(cell_id(table.id(at.slot), layer)),
            Granularity::Session => {
                is_known && cache.groups.of(at).is_some_and(|id| cache.knows(id))
            }
        };
        for (layer, marks) in table.chunks.marks(at.slot).unwrap_or_default().iter().enumerate() {
            let is_resident = marks.resident_tiers() & 1 << tier as u8 != 0;
            let leaves = tier != Tier::Device
                && self.writeback.demoting.get(&at).is_some_and(|leave| leave.has(layer));
            if is_resident && !leaves && !in_its_granularity(layer) {
                fail!(
                    State,
                    "layer {layer} of {at:?} is resident in {}, but its policy does not have it",
                    tier.name()
                );
            }
        }
        Ok(())
    }
}
