//! Orphans: recovered chunks whose parent was not recovered. They are registered by the parent's
//! key, and linked as soon as it is added.

use crate::base::status::Result;
use crate::meta::chunks::{Added, Chunks, NewChunk};
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;

impl Chunks {
    /// Adds or finds a chunk as [`Chunks::add`] does; the parent is named by its key. The parent
    /// need not be in the table: the chunk is linked when the parent is added. `new.parent` is
    /// ignored.
    pub fn add_with_parent_key(&mut self, new: &NewChunk, above: &Key) -> Result<Added> {
        let parent = if new.position == 0 { NONE } else { self.find(above).unwrap_or(NONE) };
        let new = NewChunk { parent, ..*new };
        if parent != NONE || new.position == 0 {
            return self.add(&new);
        }
        if let Some(existing) = self.known(&new)? {
            return Ok(Added::Existing(existing));
        }
        self.check_tokens(&new)?;
        let slot = self.insert(&new)?;
        self.orphans.add(slot, *above);
        Ok(Added::New(slot))
    }

    /// Links a chunk without parent to the chunk before it, if `parent` is that chunk. Returns
    /// whether it is linked now.
    pub fn join(&mut self, slot: Slot, parent: Slot) -> bool {
        let (Some(row), Some(above)) = (self.chunk(slot), self.chunk(parent)) else { return false };
        if let Some(old) = self.parent(slot) {
            return old == parent;
        }
        let fits = above.namespace == row.namespace
            && above.position.checked_add(1) == Some(row.position)
            && above.valid_tokens() == self.shape.chunk_tokens
            && (above.owner == NONE || above.owner == row.owner);
        if !fits {
            return false;
        }
        let generation = above.generation;
        let row = &mut self.rows[slot as usize];
        (row.parent, row.parent_generation) = (parent, generation);
        let above = &mut self.rows[parent as usize];
        above.children += 1;
        above.set_rejoined();
        self.orphans.remove(slot);
        true
    }

    /// Links the orphans of a chunk that was added.
    pub(super) fn join_orphans(&mut self, parent: Slot) {
        let Some(&key) = self.key(parent).filter(|_| !self.orphans.is_empty()) else {
            return;
        };
        let mut from = 0;
        while let Some(slot) = self.orphans.next(&key, from) {
            self.join(slot, parent);
            from = slot + 1;
        }
    }

    /// The key of a chunk's parent, if known; the parent need not be in the table.
    pub fn parent_key(&self, slot: Slot) -> Option<&Key> {
        match self.parent(slot) {
            Some(above) => self.key(above),
            None => self.orphans.above(slot),
        }
    }
}
