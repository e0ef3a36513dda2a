//! Ids evicted from a queue of new objects. An object that returns skips that queue.

use crate::base::status::Result;
use crate::policy::ghosts::Ghosts;

/// Most ids that missed in a lookup and were not inserted yet.
const MAX_REQUESTED: usize = 1 << 16;

/// Ghosts in the order of eviction, and those that were looked up since. The latter are kept apart:
/// evictions that make room for these objects must not remove their ghosts.
pub struct Recall {
    evicted: Ghosts,
    requested: Ghosts,
}

impl Recall {
    /// Empty lists for `limit` ids.
    pub fn new(limit: usize) -> Result<Recall> {
        Ok(Recall {
            evicted: Ghosts::new(limit)?,
            requested: Ghosts::new(limit.min(MAX_REQUESTED))?,
        })
    }

    /// Bytes used so far.
    pub fn used_bytes(&self) -> u64 {
        self.evicted.used_bytes() + self.requested.used_bytes()
    }

    /// Units of the ghosts that were not looked up.
    pub fn units(&self) -> u64 {
        self.evicted.units()
    }

    /// Number of those ghosts.
    pub fn len(&self) -> usize {
        self.evicted.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.evicted.is_empty()
    }

    /// Adds an evicted object. The oldest ghosts are removed until all fit into `most` units.
    pub fn add(&mut self, id: u64, units: u32, most: u64) {
        if u64::from(units) <= most && most > 0 {
            self.evicted.add(id, units, 0);
        }
        while self.evicted.units() > most && self.evicted.pop_oldest().is_some() {}
    }

    /// Prefetches the ghost entries of ids into the processor's cache.
    pub fn prefetch(&self, ids: &[u64]) {
        self.evicted.prefetch(ids);
        self.requested.prefetch(ids);
    }

    /// A lookup of `id` missed.
    #[inline]
    pub fn miss(&mut self, id: u64) {
        if let Some((units, _)) = self.evicted.remove(id) {
            self.requested.add(id, units, 0);
        }
    }

    /// An object is inserted; returns whether its id was remembered, and removes the id.
    #[inline]
    pub fn take(&mut self, id: u64) -> bool {
        self.requested.remove(id).or_else(|| self.evicted.remove(id)).is_some()
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
