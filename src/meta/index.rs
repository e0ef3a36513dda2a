//! From a 64-bit id to a slot: open addressing, 8 bytes a cell, 32 bits of the
//! hash in each cell so that a probe touches another table only for a match.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroed, prefetch};
use crate::fail;

/// Number of an object in its table.
pub type Slot = u32;

/// No slot.
pub const NONE: Slot = u32::MAX;

/// Most entries of an index.
pub const MAX_ENTRIES: usize = 1 << 30;

/// Maps ids to slots. Fixed size; no randomness, so runs repeat.
pub struct Index {
    /// `hash << 32 | slot + 1`; 0 = empty.
    cells: Zeroed<u64>,
    live: usize,
    limit: usize,
}

/// Spreads an id over 64 bits.
#[inline]
pub fn hash(id: u64) -> u64 {
    let wide = u128::from(id ^ 0x9E37_79B9_7F4A_7C15) * 0xD6E8_FEB8_6659_FD93_u128;
    let folded = (wide as u64) ^ ((wide >> 64) as u64);
    folded.wrapping_mul(0xA076_1D64_78BD_642F)
}

impl Index {
    /// An index for up to `limit` ids.
    pub fn new(limit: usize) -> Result<Index> {
        if limit > MAX_ENTRIES {
            fail!(Limit, "{limit} objects are more than the limit of {MAX_ENTRIES}");
        }
        // Four cells of five in use at most: a search then takes some three
        // neighbouring cells.
        let cells = limit + limit / 4 + 8;
        Ok(Index { cells: Zeroed::new(cells)?, live: 0, limit })
    }

    /// How many ids are in it.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Bytes of a full index.
    pub fn bytes(&self) -> usize {
        self.cells.len() * 8
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.cells.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.cells.len() { 0 } else { at + 1 }
    }

    /// Has the cells of an id fetched.
    #[inline]
    pub fn prefetch(&self, id: u64) {
        prefetch(&self.cells, self.home(hash(id)));
    }

    /// The slot that probably holds an id, for prefetching what it names.
    #[inline]
    pub fn guess(&self, id: u64) -> Option<Slot> {
        let hash = hash(id);
        let cell = self.cells[self.home(hash)];
        (cell >> 32 == hash >> 32 && cell != 0).then(|| (cell as u32).wrapping_sub(1))
    }

    /// The slot of an id; `is` says whether a slot holds it.
    #[inline]
    pub fn find(&self, id: u64, is: impl Fn(Slot) -> bool) -> Option<Slot> {
        self.search(id, is).map(|at| (self.cells[at] as u32).wrapping_sub(1))
    }

    #[inline]
    fn search(&self, id: u64, is: impl Fn(Slot) -> bool) -> Option<usize> {
        let hash = hash(id);
        let mut at = self.home(hash);
        loop {
            let cell = self.cells[at];
            if cell == 0 {
                return None;
            }
            if cell >> 32 == hash >> 32 && is((cell as u32).wrapping_sub(1)) {
                return Some(at);
            }
            at = self.after(at);
        }
    }

    /// Adds an id that is not in it. False when it is full.
    #[inline]
    pub fn insert(&mut self, id: u64, slot: Slot) -> bool {
        debug_assert!(slot != NONE);
        if self.live == self.limit {
            return false;
        }
        let hash = hash(id);
        let mut at = self.home(hash);
        while self.cells[at] != 0 {
            at = self.after(at);
        }
        self.cells[at] = (hash >> 32 << 32) | u64::from(slot + 1);
        self.live += 1;
        true
    }

    /// Takes an id out; its slot, if it was in.
    pub fn remove(&mut self, id: u64, is: impl Fn(Slot) -> bool) -> Option<Slot> {
        let mut hole = self.search(id, is)?;
        let slot = (self.cells[hole] as u32).wrapping_sub(1);
        self.live -= 1;
        // Entries behind the hole move up unless that would put them before
        // their home; so there are no tombstones.
        let mut at = hole;
        loop {
            at = self.after(at);
            let cell = self.cells[at];
            if cell == 0 {
                break;
            }
            let home = self.home(cell);
            let reach = if at >= home { at - home } else { at + self.cells.len() - home };
            let gap = if at >= hole { at - hole } else { at + self.cells.len() - hole };
            if reach >= gap {
                self.cells[hole] = cell;
                hole = at;
            }
        }
        self.cells[hole] = 0;
        Some(slot)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.cells.fill(0);
        self.live = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn agrees_with_a_map_over_random_calls() {
        for (limit, ids) in [(1, 3), (7, 20), (500, 700), (4000, 4200)] {
            let mut index = Index::new(limit).expect("small");
            let mut slots: Vec<u64> = vec![0; 1 << 20];
            let mut model: HashMap<u64, Slot> = HashMap::new();
            let mut state = 1u64;
            for step in 0..60_000u32 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let id = (state >> 33) % ids;
                let is = |s: Slot| slots[s as usize] == id;
                assert_eq!(index.find(id, is), model.get(&id).copied());
                if state >> 62 == 0 {
                    assert_eq!(index.remove(id, is), model.remove(&id));
                } else if !model.contains_key(&id) {
                    let slot = step;
                    slots[slot as usize] = id;
                    let room = model.len() < limit;
                    assert_eq!(index.insert(id, slot), room);
                    if room {
                        model.insert(id, slot);
                    }
                }
                assert_eq!(index.len(), model.len());
            }
        }
    }

    #[test]
    fn neighbouring_ids_spread() {
        let mut homes = vec![0u32; 1024];
        for id in 0..102_400u64 {
            homes[(((hash(id) >> 32) * 1024) >> 32) as usize] += 1;
        }
        assert!(homes.iter().all(|&n| (40..180).contains(&n)), "{homes:?}");
    }

    #[test]
    fn too_many_is_refused() {
        assert!(Index::new(MAX_ENTRIES + 1).is_err());
    }
}
