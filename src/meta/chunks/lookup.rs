//! Lookup of chunks by key, many at a time: the memory of several is prefetched together.

use crate::base::budget::Tier;
use crate::base::zeroed::prefetch;
use crate::meta::chunks::{Chunks, TIERS, id_of};
use crate::meta::index::{NONE, Slot, UNSURE};
use crate::meta::key::Key;

/// Keys that are prefetched together: as many misses as a core has in flight.
const GROUP: usize = 32;

/// Bit of [`Chunks::exists_many`]: every cell of the chunk is in some tier.
pub const WHOLE: u8 = 1 << TIERS;

impl Chunks {
    /// The slot of a key.
    #[inline]
    pub fn find(&self, key: &Key) -> Option<Slot> {
        self.index.find(id_of(key), |slot| self.keys[slot as usize].0 == *key)
    }

    /// The id of a chunk in policies: the first bytes of its key.
    #[inline]
    pub fn id(&self, slot: Slot) -> u64 {
        self.keys.get(slot as usize).map_or(0, |row| id_of(&row.0))
    }

    /// The chunk of a policy id.
    pub fn find_id(&self, id: u64) -> Option<Slot> {
        self.index.find(id, |slot| id_of(&self.keys[slot as usize].0) == id)
    }

    /// The slots of many keys; NONE for keys that are not in the table.
    pub fn find_many(&self, keys: &[Key], slots: &mut [Slot]) {
        for (keys, slots) in keys.chunks(GROUP).zip(slots.chunks_mut(GROUP)) {
            self.find_group(keys, slots);
        }
    }

    fn find_group(&self, keys: &[Key], slots: &mut [Slot]) {
        keys.iter().for_each(|key| self.index.prefetch(id_of(key)));
        for (slot, key) in slots.iter_mut().zip(keys) {
            *slot = self.index.guess(id_of(key));
            prefetch(&self.keys, *slot as usize);
            // The caller reads the row next.
            prefetch(&self.rows, *slot as usize);
        }
        for (slot, key) in slots.iter_mut().zip(keys) {
            let is = self.keys.get(*slot as usize).is_some_and(|row| row.0 == *key);
            if !is && *slot != NONE {
                *slot = self.find(key).unwrap_or(NONE);
            }
        }
        debug_assert!(!slots.contains(&UNSURE));
    }

    /// For each key the tiers that have every cell of the chunk (bit 0 is the device), and
    /// [`WHOLE`] if every cell is in some tier.
    pub fn exists_many(&self, keys: &[Key], found: &mut [u8]) {
        let mut slots = [NONE; GROUP];
        for (keys, found) in keys.chunks(GROUP).zip(found.chunks_mut(GROUP)) {
            self.find_group(keys, &mut slots[..keys.len()]);
            for (found, &slot) in found.iter_mut().zip(&slots) {
                *found = self.tiers_of(slot);
            }
        }
    }

    /// The same, without remote hints if lookups do not trust them.
    pub fn trusted_tiers(&self, slot: Slot) -> u8 {
        let doubted = u8::from(!self.counts_remote()) << Tier::Remote as u8;
        self.tiers_of(slot) & !doubted
    }

    /// The tiers that have every cell of a chunk, and [`WHOLE`]; 0 for an empty slot.
    #[inline]
    pub fn tiers_of(&self, slot: Slot) -> u8 {
        let layers = self.shape.layers;
        self.chunk(slot).map_or(0, |row| {
            let bit = |(tier, &n): (usize, &u16)| u8::from(usize::from(n) == layers) << tier;
            let whole = u8::from(usize::from(row.cells_somewhere) == layers) * WHOLE;
            row.cells.iter().enumerate().map(bit).fold(whole, |bits, bit| bits | bit)
        })
    }
}
