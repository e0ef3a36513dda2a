//! Ids of evicted objects in the order of eviction: 24 bytes each, plus the index.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed, prefetch};
use crate::meta::index::{Index, NONE, Slot};

#[derive(Clone, Copy)]
#[repr(C)]
struct Ghost {
    id: u64,
    /// The older neighbour, or the next free entry.
    older: Slot,
    newer: Slot,
    units: u32,
    data: u32,
}

// SAFETY: integers only.
unsafe impl Zeroable for Ghost {}

/// Most ids that one call of [`Ghosts::bound`] removes.
const PRUNED: usize = 16;

/// Ids in the order of insertion, up to a limit.
pub struct Ghosts {
    ghosts: Zeroed<Ghost>,
    index: Index,
    free: Slot,
    fresh: Slot,
    newest: Slot,
    oldest: Slot,
    units: u64,
    /// The current limit, and the greatest one.
    most: usize,
    limit: usize,
}

impl Ghosts {
    /// An empty list for at most `limit` ids.
    pub fn new(limit: usize) -> Result<Ghosts> {
        // An id is added before the oldest one is removed.
        let entries = if limit > 0 { limit + 1 } else { 0 };
        Ok(Ghosts {
            ghosts: Zeroed::new(entries)?,
            index: Index::new(entries)?,
            free: NONE,
            fresh: 0,
            newest: NONE,
            oldest: NONE,
            units: 0,
            most: limit,
            limit,
        })
    }

    /// Limits the list to `most` ids, at least 1. Excess ids are removed gradually, oldest first.
    /// If few objects fit, old ids say little and would use more memory than the objects.
    pub fn bound(&mut self, most: usize) {
        self.most = most.clamp(1, self.limit.max(1));
        for _ in 0..PRUNED.min(self.len().saturating_sub(self.most)) {
            self.pop_oldest();
        }
    }

    /// Bytes used so far.
    pub fn used_bytes(&self) -> u64 {
        self.ghosts.front_bytes(self.fresh as usize) + self.index.bytes()
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there are no ids.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Sum of their sizes.
    pub fn units(&self) -> u64 {
        self.units
    }

    #[inline]
    fn find(&self, id: u64) -> Option<Slot> {
        if self.is_empty() {
            return None;
        }
        self.index.find(id, |slot| self.ghosts[slot as usize].id == id)
    }

    /// Prefetches the entries of ids.
    pub fn prefetch(&self, ids: &[u64]) {
        if self.is_empty() {
            return;
        }
        ids.iter().for_each(|&id| self.index.prefetch(id));
        // For a single id this would wait for the index now.
        if ids.len() > 1 {
            for &id in ids {
                prefetch(&self.ghosts, self.index.guess(id) as usize);
            }
        }
    }

    /// The note of an id.
    #[inline]
    pub fn get(&self, id: u64) -> Option<u32> {
        self.find(id).map(|slot| self.ghosts[slot as usize].data)
    }

    /// Adds an id as the newest, with its size and a note. Removes the oldest if the list is full.
    pub fn add(&mut self, id: u64, units: u32, data: u32) {
        if self.ghosts.is_empty() {
            return;
        }
        let recycled = self.free != NONE;
        let vacant = if recycled { self.free } else { self.fresh };
        let Ghosts { index, ghosts, .. } = self;
        let slot = match index.insert_new(id, vacant, |slot| ghosts[slot as usize].id == id) {
            Ok(()) => {
                match recycled {
                    true => self.free = self.ghosts[vacant as usize].older,
                    false => self.fresh += 1,
                }
                vacant
            }
            Err(slot) => {
                assert!(slot != NONE, "one more id than the limit fits");
                self.unlink(slot);
                slot
            }
        };
        self.ghosts[slot as usize] = Ghost { id, older: self.newest, newer: NONE, units, data };
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.ghosts[newest as usize].newer = slot,
        }
        self.newest = slot;
        self.units += u64::from(units);
        if self.len() > self.most {
            self.pop_oldest();
        }
    }

    /// Removes an id; returns its size and note.
    pub fn remove(&mut self, id: u64) -> Option<(u32, u32)> {
        let slot = self.find(id)?;
        Some(self.take(slot))
    }

    /// Removes the oldest id.
    pub fn pop_oldest(&mut self) -> Option<u64> {
        let slot = self.oldest;
        if slot == NONE {
            return None;
        }
        let id = self.ghosts[slot as usize].id;
        self.take(slot);
        // Usually the next id to be removed, some calls later.
        if let Some(next) = self.ghosts.get(self.oldest as usize) {
            self.index.prefetch(next.id);
        }
        Some(id)
    }

    /// Takes an entry out of the order; returns what it was.
    #[inline]
    fn unlink(&mut self, slot: Slot) -> Ghost {
        let ghost = self.ghosts[slot as usize];
        let Ghost { older, newer, units, .. } = ghost;
        match newer {
            NONE => self.newest = older,
            newer => self.ghosts[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.ghosts[older as usize].newer = newer,
        }
        self.units -= u64::from(units);
        ghost
    }

    fn take(&mut self, slot: Slot) -> (u32, u32) {
        let Ghost { id, units, data, .. } = self.unlink(slot);
        self.index.remove(id, |s| s == slot);
        self.ghosts[slot as usize].older = std::mem::replace(&mut self.free, slot);
        (units, data)
    }

    /// Removes all ids.
    pub fn clear(&mut self) {
        while self.pop_oldest().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn a_bound_keeps_the_newest() {
        let mut ghosts = Ghosts::new(1000).expect("small");
        ghosts.bound(10);
        (0..500).for_each(|id| ghosts.add(id, 1, 0));
        assert_eq!((ghosts.len(), ghosts.get(489), ghosts.get(490)), (10, None, Some(0)));
        assert!(ghosts.used_bytes() < Ghosts::new(0).expect("none").index.bytes() + (1 << 17));
        ghosts.bound(5000);
        (500..2000).for_each(|id| ghosts.add(id, 1, 0));
        assert_eq!(ghosts.len(), 1000, "there is room for no more");
        (0..100).for_each(|_| ghosts.bound(0));
        assert_eq!((ghosts.len(), ghosts.get(1999)), (1, Some(0)));
    }

    #[test]
    fn agrees_with_a_queue_over_random_calls() {
        let mut ghosts = Ghosts::new(37).expect("small");
        let mut model: VecDeque<(u64, u32, u32)> = VecDeque::new();
        let mut state = 9u64;
        for step in 0..40_000u32 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let id = (state >> 33) % 90;
            let at = model.iter().position(|g| g.0 == id);
            assert_eq!(ghosts.get(id), at.map(|i| model[i].2));
            match state >> 61 {
                0 => {
                    assert_eq!(ghosts.remove(id), at.map(|i| (model[i].1, model[i].2)));
                    at.map(|i| model.remove(i));
                }
                1 => assert_eq!(ghosts.pop_oldest(), model.pop_front().map(|g| g.0)),
                _ => {
                    at.map(|i| model.remove(i));
                    if model.len() == 37 {
                        model.pop_front();
                    }
                    model.push_back((id, step % 7, step));
                    ghosts.add(id, step % 7, step);
                }
            }
            assert_eq!(ghosts.len(), model.len());
            assert_eq!(ghosts.units(), model.iter().map(|g| u64::from(g.1)).sum::<u64>());
        }
    }
}
