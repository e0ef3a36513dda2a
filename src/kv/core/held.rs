//! What policies are told of who is in use.

use crate::base::budget::Tier;
use crate::kv::core::board::note;
use crate::kv::core::grain::{Grain, cell_id};
use crate::kv::core::{At, Board, Core};
use crate::meta::chunks::Chunk;
use crate::meta::index::Slot;

impl Core {
    /// Whether cells can go nowhere from a tier.
    pub(super) fn is_last(&self, tier: Tier) -> bool {
        tier == if self.disk_shelf.is_some() { Tier::Disk } else { Tier::Host }
    }

    /// Tells the policy of the last tier whether a chunk is in use: it cannot go
    /// anywhere from there.
    pub(super) fn note_held(&mut self, board: u32, slot: Slot) {
        self.note_pinned(board, slot);
        let Some(row) = self.boards[board as usize].chunks.chunk(slot) else { return };
        let is_held = row.refs() > 0 || row.pin().is_some();
        self.tell_held(board, slot, is_held);
    }

    /// Tells it that a chunk which it chose in a tier must stay there: others continue it whose KV
    /// is not in that tier, but in memory that is not written down yet or at a remote, and a policy
    /// knows of those in its own. It is not chosen again until they have left. Whether that holds now.
    pub(super) fn note_continued(&mut self, at: At, tier: Tier) -> bool {
        let is_continued = |row: &Chunk| row.is_blocked() && row.refs() == 0 && row.pin().is_none();
        let row = self.boards[at.board as usize].chunks.chunk(at.slot);
        if !row.is_some_and(is_continued) || !self.is_last(tier) {
            return false;
        }
        self.tell_held(at.board, at.slot, true);
        self.boards[at.board as usize].has(at.slot, note::HELD)
    }

    fn tell_held(&mut self, board: u32, slot: Slot, is_held: bool) {
        let rows = &mut self.boards[board as usize];
        let (shelf, there) = match &mut self.disk_shelf {
            Some(shelf) => (shelf, note::IN_DISK),
            None => (&mut self.host_shelf, note::IN_HOST),
        };
        if is_held == rows.has(slot, note::HELD) || !rows.has(slot, there) {
            return;
        }
        let id = rows.id(slot);
        let is_told = match shelf.grain {
            Grain::Chunk => shelf.hold(id, is_held),
            Grain::Cell => {
                let all = (0..rows.layout.layers()).map(|layer| cell_id(id, layer));
                all.fold(false, |any, id| (shelf.knows(id) && shelf.hold(id, is_held)) | any)
            }
            Grain::Session => {
                shelf.groups.of(At { board, slot }) == Some(id) && shelf.hold(id, is_held)
            }
        };
        if is_told {
            let change = if is_held { Board::set } else { Board::clear };
            change(rows, slot, note::HELD);
        }
    }

    /// Tells the policy of device memory whether a chunk is pinned.
    fn note_pinned(&mut self, board: u32, slot: Slot) {
        let Some(near) = self.near.as_mut() else { return };
        let rows = &mut self.boards[board as usize];
        let Some(row) = rows.chunks.chunk(slot) else { return };
        let is_pinned = row.pin().is_some();
        if !rows.has(slot, note::IN_DEVICE) || is_pinned == rows.has(slot, note::PINNED) {
            return;
        }
        if near.shelf.hold(rows.id(slot), is_pinned) {
            match is_pinned {
                true => rows.set(slot, note::PINNED),
                false => rows.clear(slot, note::PINNED),
            }
        }
    }
}
