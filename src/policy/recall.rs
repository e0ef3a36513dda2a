//! Ids evicted from a queue of new objects. An object that returns skips that queue.

use crate::base::status::Result;
use crate::policy::ghosts::Ghosts;

/// Most ids that missed in a lookup and were not inserted yet.
const MAX_WANTED: usize = 1 << 16;

/// Ghosts in the order of eviction, and those that were looked up since. The latter are kept apart:
/// evictions that make room for these objects must not remove their ghosts.
pub struct Recall {
    left: Ghosts,
    wanted: Ghosts,
}

impl Recall {
    /// Empty lists for `limit` ids.
    pub fn new(limit: usize) -> Result<Recall> {
        Ok(Recall { left: Ghosts::new(limit)?, wanted: Ghosts::new(limit.min(MAX_WANTED))? })
    }

    /// Bytes used so far.
    pub fn used_bytes(&self) -> u64 {
        self.left.used_bytes() + self.wanted.used_bytes()
    }

    /// Units of the ghosts that were not looked up.
    pub fn units(&self) -> u64 {
        self.left.units()
    }

    /// Number of those ghosts.
    pub fn len(&self) -> usize {
        self.left.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// Adds an evicted object. The oldest ghosts are removed until all fit into `most` units.
    pub fn add(&mut self, id: u64, units: u32, most: u64) {
        if u64::from(units) <= most && most > 0 {
            self.left.add(id, units, 0);
        }
        while self.left.units() > most && self.left.pop_oldest().is_some() {}
    }

    /// Prefetches what is remembered of ids.
    pub fn prefetch(&self, ids: &[u64]) {
        self.left.prefetch(ids);
        self.wanted.prefetch(ids);
    }

    /// A lookup of `id` missed.
    #[inline]
    pub fn miss(&mut self, id: u64) {
        if let Some((units, _)) = self.left.remove(id) {
            self.wanted.add(id, units, 0);
        }
    }

    /// An object is inserted; returns whether its id was remembered, and removes the id.
    #[inline]
    pub fn take(&mut self, id: u64) -> bool {
        self.wanted.remove(id).or_else(|| self.left.remove(id)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ghosts_are_bounded_and_looked_up_ones_are_kept_apart() {
        let mut recall = Recall::new(8).expect("small");
        (1..=4).for_each(|id| recall.add(id, 2, 6));
        assert_eq!((recall.units(), recall.len()), (6, 3));
        recall.miss(2);
        (5..=8).for_each(|id| recall.add(id, 2, 6));
        assert!(recall.take(2) && !recall.take(2) && !recall.take(3));
        recall.add(9, 7, 6);
        assert!(!recall.take(9) && recall.take(8) && !recall.is_empty());
    }
}
