//! Orphans: rows whose parent is not in a table. They are registered by the parent's name, and
//! linked as soon as it is added.

use std::collections::{BTreeMap, BTreeSet};

use crate::meta::index::{NONE, Slot};

/// Orphans by the name of their parent; `K` is the type of names.
pub struct Orphans<K> {
    above: BTreeMap<Slot, K>,
    behind: BTreeSet<(K, Slot)>,
}

impl<K> Default for Orphans<K> {
    fn default() -> Self {
        Orphans { above: BTreeMap::new(), behind: BTreeSet::new() }
    }
}

impl<K: Copy + Ord> Orphans<K> {
    /// Whether there is no orphan.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.above.is_empty()
    }

    /// Registers a row by its parent's name.
    pub fn add(&mut self, slot: Slot, above: K) {
        self.above.insert(slot, above);
        self.behind.insert((above, slot));
    }

    /// Removes a row.
    pub fn remove(&mut self, slot: Slot) {
        if let Some(above) = self.above.remove(&slot) {
            self.behind.remove(&(above, slot));
        }
    }

    /// The next orphan of a parent, from a slot on.
    pub fn next(&self, above: &K, from: Slot) -> Option<Slot> {
        self.behind.range((*above, from)..=(*above, NONE)).next().map(|&(_, slot)| slot)
    }

    /// The parent's name of a row.
    pub fn above(&self, slot: Slot) -> Option<&K> {
        self.above.get(&slot)
    }

    /// Estimated bytes: tree nodes are two thirds full.
    pub fn used_bytes(&self) -> u64 {
        let entry = size_of::<(Slot, K)>() + size_of::<(K, Slot)>();
        (self.above.len() * entry * 3 / 2) as u64
    }
}
