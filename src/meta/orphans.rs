//! Those whose parent is not in a table: they wait for it by its name, and continue it as soon
//! as it is added.

use std::collections::{BTreeMap, BTreeSet};

use crate::meta::index::{NONE, Slot};

/// Who waits for whom. `K` is what a table calls its rows.
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
    /// Whether nobody waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.above.is_empty()
    }

    /// A row waits for the one of a name.
    pub fn add(&mut self, slot: Slot, above: K) {
        self.above.insert(slot, above);
        self.behind.insert((above, slot));
    }

    /// A row waits no more.
    pub fn remove(&mut self, slot: Slot) {
        if let Some(above) = self.above.remove(&slot) {
            self.behind.remove(&(above, slot));
        }
    }

    /// The next one that waits for a name, from a slot on.
    pub fn next(&self, above: &K, from: Slot) -> Option<Slot> {
        self.behind.range((*above, from)..=(*above, NONE)).next().map(|&(_, slot)| slot)
    }

    /// Whom a row waits for.
    pub fn above(&self, slot: Slot) -> Option<&K> {
        self.above.get(&slot)
    }

    /// Bytes that this takes, about: nodes of such trees are two thirds full.
    pub fn used_bytes(&self) -> u64 {
        let entry = size_of::<(Slot, K)>() + size_of::<(K, Slot)>();
        (self.above.len() * entry * 3 / 2) as u64
    }
}
