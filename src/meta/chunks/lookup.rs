//! From keys to chunks, many at a time: the memory of several is fetched at once.

use crate::base::budget::Tier;
use crate::base::zeroed::prefetch;
use crate::meta::chunks::{Chunks, TIERS, id_of};
use crate::meta::index::{NONE, Slot, UNSURE};
use crate::meta::key::Key;

/// Keys whose memory is on its way together: as many as a core can wait for.
const GROUP: usize = 32;

/// Set by [`Chunks::exists_many`] when every cell of a chunk is in some tier.
pub const WHOLE: u8 = 1 << TIERS;

impl Chunks {
    /// The slot of a key.
    #[inline]
    pub fn find(&self, key: &Key) -> Option<Slot> {
        self.index.find(id_of(key), |slot| self.keys[slot as usize].0 == *key)
    }

    /// What policies call a chunk: the first bytes of its key.
    #[inline]
    pub fn id(&self, slot: Slot) -> u64 {
        self.keys.get(slot as usize).map_or(0, |row| id_of(&row.0))
    }

    /// A chunk that policies call so.
    pub fn find_id(&self, id: u64) -> Option<Slot> {
        self.index.find(id, |slot| id_of(&self.keys[slot as usize].0) == id)
    }

    /// The slots of many keys, NONE where one is not in the table.
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
            // Who looks for a chunk looks at it next.
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

    /// For many keys, the tiers that have every cell of the chunk (bit 0 the
    /// device), and [`WHOLE`] if every cell is in some tier.
    pub fn exists_many(&self, keys: &[Key], found: &mut [u8]) {
        let mut slots = [NONE; GROUP];
        for (keys, found) in keys.chunks(GROUP).zip(found.chunks_mut(GROUP)) {
            self.find_group(keys, &mut slots[..keys.len()]);
            for (found, &slot) in found.iter_mut().zip(&slots) {
                *found = self.tiers_of(slot);
            }
        }
    }

    /// The same, with what the remote is said to have only where that is believed.
    pub fn trusted_tiers(&self, slot: Slot) -> u8 {
        let doubted = u8::from(!self.counts_remote()) << Tier::Remote as u8;
        self.tiers_of(slot) & !doubted
    }

    /// The tiers that have every cell of a chunk, and [`WHOLE`]; 0 where there is none.
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
