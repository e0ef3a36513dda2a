//! A hash index from 64-bit ids to slots. Open addressing in buckets of one cache line, with 32
//! bits of the hash beside each slot, so that a probe reads the other table only for a match.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed, prefetch};
use crate::fail;

/// Row number in a table.
pub type Slot = u32;

/// No slot.
pub const NONE: Slot = u32::MAX;

/// Result of [`Index::guess`] if only a search can decide; no slot.
pub const UNSURE: Slot = u32::MAX - 1;

/// Most entries of an index.
pub const MAX_ENTRIES: usize = 1 << 30;

const WIDTH: usize = 8;

/// A cache line. All its tags are compared at once: a loop over cells ends at an unpredictable cell
/// and costs a branch miss.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    /// 0 = empty cell.
    tags: [u32; WIDTH],
    slots: [Slot; WIDTH],
}

// SAFETY: integers only.
unsafe impl Zeroable for Bucket {}

impl Bucket {
    /// A bit for each cell with this tag.
    #[inline]
    #[cfg(target_arch = "x86_64")]
    fn with(&self, tag: u32) -> u32 {
        use std::arch::x86_64::*;
        let [a, b, c, d, e, f, g, h] = self.tags.map(u32::cast_signed);
        // SAFETY: SSE2 is part of x86-64; only registers are used.
        unsafe {
            let wanted = _mm_set1_epi32(tag.cast_signed());
            let low = _mm_cmpeq_epi32(_mm_set_epi32(d, c, b, a), wanted);
            let high = _mm_cmpeq_epi32(_mm_set_epi32(h, g, f, e), wanted);
            let lanes = _mm_packs_epi32(low, high);
            _mm_movemask_epi8(_mm_packs_epi16(lanes, _mm_setzero_si128())).cast_unsigned()
        }
    }

    /// A bit for each cell with this tag.
    #[inline]
    #[cfg(not(target_arch = "x86_64"))]
    fn with(&self, tag: u32) -> u32 {
        let bit = |(lane, &t): (usize, &u32)| u32::from(t == tag) << lane;
        self.tags.iter().enumerate().map(bit).fold(0, |bits, bit| bits | bit)
    }

    #[inline]
    fn has_room(&self) -> bool {
        self.with(0) != 0
    }
}

/// Initial capacity, in entries.
const FIRST_ENTRIES: usize = 1 << 12;

/// Maps ids to slots. Doubles as it fills: probes are spread over all of it, so all of it becomes
/// resident. Hashing has no randomness, so runs repeat.
pub struct Index {
    buckets: Zeroed<Bucket>,
    live: usize,
    limit: usize,
    /// Number of entries at which it grows.
    grows_at: usize,
}

/// Buckets for this many entries: half of the cells stay empty. Few ids are then outside their home
/// bucket, and at least one cell is always empty.
fn buckets_for(entries: usize) -> usize {
    (entries / (WIDTH / 2)).max(1)
}

/// Hashes an id to 64 bits.
#[inline]
pub fn hash(id: u64) -> u64 {
    let wide = u128::from(id ^ 0x9E37_79B9_7F4A_7C15) * 0xD6E8_FEB8_6659_FD93_u128;
    let folded = (wide as u64) ^ ((wide >> 64) as u64);
    folded.wrapping_mul(0xA076_1D64_78BD_642F)
}

/// The tag of an id; it also determines the home bucket.
#[inline]
fn tag_of(id: u64) -> u32 {
    ((hash(id) >> 32) as u32).max(1)
}

impl Index {
    /// An index for up to `limit` ids.
    pub fn new(limit: usize) -> Result<Index> {
        if limit > MAX_ENTRIES {
            fail!(Limit, "{limit} objects exceed the limit of {MAX_ENTRIES}");
        }
        let buckets = Zeroed::dense(buckets_for(limit.min(FIRST_ENTRIES)))?;
        let grows_at = if limit > FIRST_ENTRIES { FIRST_ENTRIES } else { usize::MAX };
        Ok(Index { buckets, live: 0, limit, grows_at })
    }

    /// The number of ids.
    #[inline]
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether there is no id.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        (self.buckets.len() * size_of::<Bucket>()) as u64
    }

    /// Bytes of a full index.
    pub fn full_bytes(limit: usize) -> u64 {
        (buckets_for(limit) * size_of::<Bucket>()) as u64
    }

    /// Doubles the index. Without memory for that, it gets slower, and is full when its cells are.
    #[cold]
    fn grow(&mut self) {
        let most = buckets_for(self.limit);
        let count = (self.buckets.len() * 2).min(most);
        let Ok(wider) = Zeroed::dense(count) else {
            self.grows_at += self.buckets.len();
            return;
        };
        let narrow = std::mem::replace(&mut self.buckets, wider);
        for bucket in narrow.iter() {
            for (&tag, &slot) in bucket.tags.iter().zip(&bucket.slots).filter(|(tag, _)| **tag != 0)
            {
                self.enter(tag, slot);
            }
        }
        self.grows_at = if count < most { count * (WIDTH / 2) } else { usize::MAX };
    }

    /// Puts an entry into the first empty cell from its home on.
    fn enter(&mut self, tag: u32, slot: Slot) {
        let mut at = self.home(tag);
        while !self.buckets[at].has_room() {
            at = self.after(at);
        }
        let bucket = &mut self.buckets[at];
        let lane = bucket.with(0).trailing_zeros() as usize % WIDTH;
        (bucket.tags[lane], bucket.slots[lane]) = (tag, slot);
    }

    #[inline]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }

    /// Buckets from one to another, in probe order.
    #[inline]
    fn steps(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.buckets.len() - from }
    }

    /// Prefetches the home bucket of an id.
    #[inline]
    pub fn prefetch(&self, id: u64) {
        prefetch(&self.buckets, self.home(tag_of(id)));
    }

    /// The slot that probably holds an id, for prefetching; NONE if the id is absent, UNSURE if
    /// only a search can decide.
    #[inline]
    pub fn guess(&self, id: u64) -> Slot {
        let tag = tag_of(id);
        let bucket = &self.buckets[self.home(tag)];
        let lanes = bucket.with(tag);
        // Branch-free: whether an id is present is unpredictable.
        let candidate = bucket.slots[lanes.trailing_zeros() as usize % WIDTH];
        let absent = if bucket.has_room() { NONE } else { UNSURE };
        if lanes != 0 { candidate } else { absent }
    }

    /// The slot of an id; `is` tells whether a slot holds it.
    #[inline]
    pub fn find(&self, id: u64, is: impl Fn(Slot) -> bool) -> Option<Slot> {
        self.search(id, is).map(|(at, lane)| self.buckets[at].slots[lane])
    }

    #[inline]
    fn search(&self, id: u64, is: impl Fn(Slot) -> bool) -> Option<(usize, usize)> {
        let tag = tag_of(id);
        let mut at = self.home(tag);
        loop {
            let bucket = &self.buckets[at];
            let mut lanes = bucket.with(tag);
            while lanes != 0 {
                let lane = lanes.trailing_zeros() as usize % WIDTH;
                if is(bucket.slots[lane]) {
                    return Some((at, lane));
                }
                lanes &= lanes - 1;
            }
            if bucket.has_room() {
                return None;
            }
            at = self.after(at);
        }
    }

    /// Adds an id that is not present. Returns false if the index is full.
    #[inline]
    pub fn insert(&mut self, id: u64, slot: Slot) -> bool {
        self.insert_new(id, slot, |_| false).is_ok()
    }

    /// Adds an id unless it is present. Fails with its slot, or with NONE if there is no room.
    #[inline]
    pub fn insert_new(
        &mut self,
        id: u64,
        slot: Slot,
        is: impl Fn(Slot) -> bool,
    ) -> std::result::Result<(), Slot> {
        debug_assert!(slot != NONE);
        if self.live >= self.grows_at {
            self.grow();
        }
        let tag = tag_of(id);
        let mut at = self.home(tag);
        let lane = loop {
            let bucket = &self.buckets[at];
            let mut lanes = bucket.with(tag);
            while lanes != 0 {
                let candidate = bucket.slots[lanes.trailing_zeros() as usize % WIDTH];
                if is(candidate) {
                    return Err(candidate);
                }
                lanes &= lanes - 1;
            }
            let empty = bucket.with(0);
            if empty != 0 {
                break empty.trailing_zeros() as usize % WIDTH;
            }
            at = self.after(at);
        };
        // One cell stays empty, so that searches end.
        if self.live == self.limit || self.live + 1 == self.buckets.len() * WIDTH {
            return Err(NONE);
        }
        self.buckets[at].tags[lane] = tag;
        self.buckets[at].slots[lane] = slot;
        self.live += 1;
        Ok(())
    }

    /// Removes an id; returns its slot, if it was present.
    #[inline]
    pub fn remove(&mut self, id: u64, is: impl Fn(Slot) -> bool) -> Option<Slot> {
        let (at, lane) = self.search(id, is)?;
        let slot = self.buckets[at].slots[lane];
        self.live -= 1;
        let was_full = !self.buckets[at].has_room();
        self.buckets[at].tags[lane] = 0;
        if was_full {
            self.close_gap(at, lane);
        }
        Some(slot)
    }

    /// Searches pass full buckets only. A bucket that was full takes back an entry that had
    /// overflowed, and so on from where that was.
    #[cold]
    fn close_gap(&mut self, mut gap: usize, mut empty: usize) {
        let mut at = self.after(gap);
        while at != gap {
            let bucket = self.buckets[at];
            let distance = self.steps(gap, at);
            let passed = |tag: u32| {
                let home = self.home(tag);
                tag != 0 && home != at && (distance == 1 || self.steps(home, at) >= distance)
            };
            let mover = bucket.tags.iter().position(|&tag| passed(tag));
            if let Some(lane) = mover {
                self.buckets[gap].tags[empty] = bucket.tags[lane];
                self.buckets[gap].slots[empty] = bucket.slots[lane];
                self.buckets[at].tags[lane] = 0;
                (gap, empty) = (at, lane);
            }
            if bucket.has_room() {
                return;
            }
            at = self.after(at);
        }
    }

    /// Removes all ids.
    pub fn clear(&mut self) {
        self.buckets.fill(Bucket { tags: [0; WIDTH], slots: [0; WIDTH] });
        self.live = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn index_agrees_with_a_map_over_random_calls() {
        for (limit, ids) in [(1, 3), (7, 20), (500, 700), (4000, 4200), (20_001, 30_000)] {
            let mut index = Index::new(limit).expect("small");
            let mut slots: Vec<u64> = vec![0; 1 << 20];
            let mut model: HashMap<u64, Slot> = HashMap::new();
            let mut state = 1u64;
            for step in 0..(60_000 + 8 * limit as u32) {
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
    fn index_grows_as_it_fills() {
        let mut index = Index::new(1 << 20).expect("small at first");
        let first = index.bytes();
        assert!(first <= 1 << 17, "{first}");
        let mut before = first;
        for id in 0..1u64 << 20 {
            assert!(index.insert(id, id as Slot));
            let bytes = index.bytes();
            assert!(bytes == before || bytes == 2 * before, "{before} to {bytes}");
            assert!(bytes <= first.max(32 * (id + 1)), "{bytes} for {id}");
            before = bytes;
        }
        assert_eq!(before, Index::full_bytes(1 << 20));
        assert!(!index.insert(1 << 20, 7), "it is full");
        let found = |id: u64| index.find(id, |slot| u64::from(slot) == id) == Some(id as Slot);
        assert!((0..1 << 20).all(found));
    }

    #[test]
    fn neighbouring_ids_spread() {
        let mut counts = vec![0u32; 1024];
        for id in 0..102_400u64 {
            counts[(((hash(id) >> 32) * 1024) >> 32) as usize] += 1;
        }
        assert!(counts.iter().all(|&n| (40..180).contains(&n)), "{counts:?}");
    }

    #[test]
    fn limits_above_the_maximum_are_rejected() {
        assert!(Index::new(MAX_ENTRIES + 1).is_err());
    }
}
