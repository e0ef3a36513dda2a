//! What left a queue of newcomers and may come back: such an object skips that
//! queue.

use crate::base::status::Result;
use crate::policy::ghosts::Ghosts;

/// Most ids that were asked for again and have not come yet.
const MAX_WANTED: usize = 1 << 16;

/// Ids that left, oldest first out, and those of them that were looked up since.
/// The latter are kept apart, so that what leaves to make room for them does not
/// push them out.
pub struct Recall {
    left: Ghosts,
    wanted: Ghosts,
}

impl Recall {
    /// Room for `limit` ids.
    pub fn new(limit: usize) -> Result<Recall> {
        Ok(Recall { left: Ghosts::new(limit)?, wanted: Ghosts::new(limit.min(MAX_WANTED))? })
    }

    /// Bytes that it has used so far.
    pub fn used_bytes(&self) -> u64 {
        self.left.used_bytes() + self.wanted.used_bytes()
    }

    /// The size of what left and was not asked for.
    pub fn units(&self) -> u64 {
        self.left.units()
    }

    /// How many ids that is.
    pub fn len(&self) -> usize {
        self.left.len()
    }

    /// Whether it is none.
    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// An object left: the oldest are forgotten until all fit into `most` units.
    pub fn add(&mut self, id: u64, units: u32, most: u64) {
        if u64::from(units) <= most && most > 0 {
            self.left.add(id, units, 0);
        }
        while self.left.units() > most && self.left.pop_oldest().is_some() {}
    }

    /// Has what is remembered of ids fetched.
    pub fn prefetch(&self, ids: &[u64]) {
        self.left.prefetch(ids);
        self.wanted.prefetch(ids);
    }

    /// An object that is not there was looked up.
    #[inline]
    pub fn miss(&mut self, id: u64) {
        if let Some((units, _)) = self.left.remove(id) {
            self.wanted.add(id, units, 0);
        }
    }

    /// An object comes: whether it was remembered.
    #[inline]
    pub fn take(&mut self, id: u64) -> bool {
        self.wanted.remove(id).or_else(|| self.left.remove(id)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_up_to_a_size_and_keeps_what_was_asked_for() {
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
