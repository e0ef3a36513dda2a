//! What policies are told of who is in use.

use crate::base::budget::Tier;
use crate::meta::chunks::Chunk;
use crate::meta::index::Slot;
use crate::store::state::chunk_table::note;
use crate::store::state::granularity::{Granularity, cell_id};
use crate::store::state::{At, ChunkTable, StoreState};

impl StoreState {
    /// Whether cells can go nowhere from a tier.
    pub(super) fn is_last(&self, tier: Tier) -> bool {
        tier == if self.disk_cache.is_some() { Tier::Disk } else { Tier::Host }
    }

    /// Tells the policy of the last tier whether a chunk is in use: it cannot go
    /// anywhere from there.
    pub(super) fn note_held(&mut self, table: u32, slot: Slot) {
        self.note_pinned(table, slot);
        let Some(row) = self.tables[table as usize].chunks.chunk(slot) else { return };
        let is_held = row.refs() > 0 || row.pin().is_some();
        self.notify_held(table, slot, is_held);
    }

    /// Tells it that a chunk which it chose in a tier must stay there: others continue it whose KV
    /// is not in that tier, but in memory that is not written down yet or at a remote, and a policy
    /// knows of those in its own. It is not chosen again until they have left. Whether that holds now.
    pub(super) fn note_continued(&mut self, at: At, tier: Tier) -> bool {
        let is_continued = |row: &Chunk| row.is_blocked() && row.refs() == 0 && row.pin().is_none();
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        if !row.is_some_and(is_continued) || !self.is_last(tier) {
            return false;
        }
        self.notify_held(at.table, at.slot, true);
        self.tables[at.table as usize].has(at.slot, note::HELD)
    }

    fn notify_held(&mut self, table: u32, slot: Slot, is_held: bool) {
        let rows = &mut self.tables[table as usize];
        let (cache, there) = match &mut self.disk_cache {
            Some(cache) => (cache, note::IN_DISK),
            None => (&mut self.host_cache, note::IN_HOST),
        };
        if is_held == rows.has(slot, note::HELD) || !rows.has(slot, there) {
            return;
        }
        let id = rows.id(slot);
        let is_notified = match cache.granularity {
            Granularity::Chunk => cache.hold(id, is_held),
            Granularity::Cell => {
                let all = (0..rows.layout.layers()).map(|layer| cell_id(id, layer));
                all.fold(false, |any, id| (cache.knows(id) && cache.hold(id, is_held)) | any)
            }
            Granularity::Session => {
                cache.groups.of(At { table, slot }) == Some(id) && cache.hold(id, is_held)
            }
        };
        if is_notified {
            let change = if is_held { ChunkTable::set } else { ChunkTable::clear };
            change(rows, slot, note::HELD);
        }
    }

    /// Tells the policy of device memory whether a chunk is pinned.
    fn note_pinned(&mut self, table: u32, slot: Slot) {
        let Some(replicas) = self.replicas.as_mut() else { return };
        let rows = &mut self.tables[table as usize];
        let Some(row) = rows.chunks.chunk(slot) else { return };
        let is_pinned = row.pin().is_some();
        if !rows.has(slot, note::IN_DEVICE) || is_pinned == rows.has(slot, note::PINNED) {
            return;
        }
        if replicas.cache.hold(rows.id(slot), is_pinned) {
            match is_pinned {
                true => rows.set(slot, note::PINNED),
                false => rows.clear(slot, note::PINNED),
            }
        }
    }
}
