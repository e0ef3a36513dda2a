//! Waits in progress, of resident and of evicted objects, so that the learned data do not depend on
//! evictions. If there are more waits than fit, this is a sample.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::meta::index::{Index, NONE, Slot, hash};
use crate::policy::horizon::hazard::{AGES, Hazards, age_bucket, age_start_ns};

#[derive(Clone, Copy)]
#[repr(C)]
struct Wait {
    id: u64,
    start_ns: i64,
    older: Slot,
    newer: Slot,
    class: u16,
    bucket: u16,
    reserved: u32,
}

// SAFETY: integers only.
unsafe impl Zeroable for Wait {}

/// The waits, listed in the order in which they began. Waits of one bucket (of about equal age) are
/// neighbours.
pub struct Watch {
    waits: Zeroed<Wait>,
    index: Index,
    /// The longest wait of each bucket.
    first: [Slot; AGES],
    oldest: Slot,
    newest: Slot,
    free: Slot,
    fresh: Slot,
    /// An id is watched if this many low bits of its hash are 0. The high bits determine its
    /// position in the index.
    shift: u32,
    hand: usize,
}

/// Most waits moved to the next bucket in one call.
const MOVES: usize = 24;

impl Watch {
    /// An empty watch for `limit` waits.
    pub fn new(limit: usize) -> Result<Watch> {
        Ok(Watch {
            waits: Zeroed::new(limit)?,
            index: Index::new(limit)?,
            first: [NONE; AGES],
            oldest: NONE,
            newest: NONE,
            free: NONE,
            fresh: 0,
            shift: 0,
            hand: 0,
        })
    }

    /// Bytes used so far.
    pub fn used_bytes(&self) -> u64 {
        self.waits.front_bytes(self.fresh as usize) + self.index.bytes()
    }

    /// Most waits.
    pub fn limit(&self) -> usize {
        self.waits.len()
    }

    /// Whether an id is watched.
    pub fn has(&self, id: u64) -> bool {
        self.find(id).is_some()
    }

    /// Removes the waits in progress from the counts. A policy that continues from these counts
    /// watches anew, and would count them twice.
    pub fn withdraw(&self, hazards: &mut Hazards) {
        let mut slot = self.newest;
        while slot != NONE {
            let wait = self.waits[slot as usize];
            (0..=wait.bucket).for_each(|b| hazards.leave(wait.class, usize::from(b)));
            slot = wait.older;
        }
    }

    /// Number of watched ids.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Adjusts the sample so that four times the resident objects would fit.
    pub fn sample_for(&mut self, residents: usize) {
        let room = (self.waits.len() / 4).max(1);
        while self.shift < 20 && residents >> self.shift > room {
            self.shift += 1;
        }
    }

    #[inline]
    fn is_sampled(&self, id: u64) -> bool {
        hash(id) & ((1 << self.shift) - 1) == 0
    }

    fn find(&self, id: u64) -> Option<Slot> {
        self.index.find(id, |slot| self.waits[slot as usize].id == id)
    }

    /// Prefetches the index buckets of ids.
    pub fn prefetch(&self, ids: &[u64]) {
        ids.iter().for_each(|&id| self.index.prefetch(id));
    }

    /// The next shorter wait of the same bucket.
    #[inline]
    fn next(&self, wait: &Wait) -> Slot {
        match self.waits.get(wait.newer as usize) {
            Some(newer) if newer.bucket == wait.bucket => wait.newer,
            _ => NONE,
        }
    }

    fn unlink(&mut self, slot: Slot) {
        let wait = self.waits[slot as usize];
        let first = &mut self.first[usize::from(wait.bucket)];
        if *first == slot {
            self.first[usize::from(wait.bucket)] = self.next(&wait);
        }
        match wait.newer {
            NONE => self.newest = wait.older,
            newer => self.waits[newer as usize].older = wait.older,
        }
        match wait.older {
            NONE => self.oldest = wait.newer,
            older => self.waits[older as usize].newer = wait.newer,
        }
    }

    fn drop_wait(&mut self, slot: Slot) {
        self.unlink(slot);
        let id = self.waits[slot as usize].id;
        self.index.remove(id, |s| s == slot);
        self.waits[slot as usize].older = std::mem::replace(&mut self.free, slot);
    }

    /// Starts the wait of an object that is used, and ends the one before.
    pub fn begin(&mut self, hazards: &mut Hazards, id: u64, class: u16, now: i64) {
        let before = self.find(id);
        if let Some(slot) = before {
            self.count_end(hazards, slot, now);
        }
        let watches = self.is_sampled(id) && !self.waits.is_empty();
        let slot = match before {
            Some(slot) if watches => {
                self.unlink(slot);
                slot
            }
            Some(slot) => return self.drop_wait(slot),
            None if watches => {
                let slot = self.vacant();
                let fits = self.index.insert(id, slot);
                assert!(fits, "room was made");
                slot
            }
            None => return,
        };
        let older = std::mem::replace(&mut self.newest, slot);
        self.waits[slot as usize] =
            Wait { id, start_ns: now, older, newer: NONE, class, bucket: 0, reserved: 0 };
        match older {
            NONE => self.oldest = slot,
            older => self.waits[older as usize].newer = slot,
        }
        if self.first[0] == NONE {
            self.first[0] = slot;
        }
        hazards.enter(class, 0, 1);
    }

    /// A slot for a new wait: that of the longest wait if all are in use.
    #[inline]
    fn vacant(&mut self) -> Slot {
        if self.len() == self.waits.len() {
            let slot = self.oldest;
            self.unlink(slot);
            let id = self.waits[slot as usize].id;
            self.index.remove(id, |s| s == slot);
            if let Some(next) = self.waits.get(self.oldest as usize) {
                self.index.prefetch(next.id);
            }
            return slot;
        }
        if self.free == NONE {
            self.fresh += 1;
            return self.fresh - 1;
        }
        let slot = self.free;
        self.free = self.waits[slot as usize].older;
        slot
    }

    /// Changes the class of a wait shortly after its start.
    pub fn reclass(&mut self, hazards: &mut Hazards, id: u64, class: u16) {
        let Some(slot) = self.find(id) else { return };
        let wait = &mut self.waits[slot as usize];
        if wait.bucket == 0 && wait.class != class {
            hazards.leave(wait.class, 0);
            wait.class = class;
            hazards.enter(class, 0, 1);
        }
    }

    /// Ends the wait of an object that is requested, if it is watched.
    pub fn end(&mut self, hazards: &mut Hazards, id: u64, now: i64) {
        let Some(slot) = self.find(id) else { return };
        self.count_end(hazards, slot, now);
        self.drop_wait(slot);
    }

    fn count_end(&self, hazards: &mut Hazards, slot: Slot, now: i64) {
        let Wait { start_ns, class, bucket, .. } = self.waits[slot as usize];
        let last = age_bucket(now - start_ns);
        (usize::from(bucket) + 1..=last).for_each(|b| hazards.enter(class, b, 1));
        hazards.end(class, last);
    }

    /// Moves some waits to the next bucket, one bucket per call.
    pub fn age(&mut self, hazards: &mut Hazards, now: i64) {
        let bucket = self.hand;
        self.hand = if bucket + 2 == AGES { 0 } else { bucket + 1 };
        let latest = now - age_start_ns(bucket + 1);
        let (mut class, mut count) = (0, 0);
        for _ in 0..MOVES {
            let slot = self.first[bucket];
            let Some(&wait) = self.waits.get(slot as usize) else { break };
            if wait.start_ns > latest {
                break;
            }
            self.first[bucket] = self.next(&wait);
            self.waits[slot as usize].bucket = bucket as u16 + 1;
            if self.first[bucket + 1] == NONE {
                self.first[bucket + 1] = slot;
            }
            if wait.class != class {
                hazards.enter(class, bucket + 1, std::mem::take(&mut count));
                class = wait.class;
            }
            count += 1;
        }
        hazards.enter(class, bucket + 1, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// The waits by id, from the longest on: start and bucket.
    fn waits(watch: &Watch) -> Vec<(u64, i64, u16)> {
        let (mut all, mut at, mut bucket) = (Vec::new(), watch.oldest, u16::MAX);
        while at != NONE {
            let wait = watch.waits[at as usize];
            assert!(wait.bucket <= bucket, "a wait is in a higher bucket than a longer one");
            let is_first = wait.bucket < bucket;
            assert_eq!(watch.first[usize::from(wait.bucket)] == at, is_first);
            all.push((wait.id, wait.start_ns, wait.bucket));
            (at, bucket) = (wait.newer, wait.bucket);
        }
        let used = all.iter().map(|one| one.2).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(watch.first.iter().filter(|&&slot| slot != NONE).count(), used.len());
        all
    }

    #[test]
    fn waits_stay_in_the_order_of_their_start_over_random_calls() {
        let (mut watch, mut hazards) = (Watch::new(50).expect("small"), Hazards::new());
        let mut model: VecDeque<(u64, i64)> = VecDeque::new();
        let (mut now, mut state, mut moved) = (0, 5u64, false);
        for _ in 0..20_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (id, class) = ((state >> 33) % 90, (state >> 50) as u16 % 7);
            now += (state >> 40) as i64 % 40_000_000;
            match state >> 61 {
                0 => {
                    watch.end(&mut hazards, id, now);
                    model.retain(|one| one.0 != id);
                }
                1 => (0..AGES).for_each(|_| watch.age(&mut hazards, now)),
                _ => {
                    watch.begin(&mut hazards, id, class, now);
                    model.retain(|one| one.0 != id);
                    if model.len() == 50 {
                        model.pop_front();
                    }
                    model.push_back((id, now));
                }
            }
            let all = waits(&watch);
            assert!(all.iter().map(|&(id, start, _)| (id, start)).eq(model.iter().copied()));
            assert!(all.iter().all(|one| usize::from(one.2) <= age_bucket(now - one.1)));
            assert_eq!(watch.len(), model.len());
            moved |= all.iter().any(|one| one.2 > 1);
        }
        assert!(moved, "no wait reached the next buckets");
        watch.withdraw(&mut hazards);
    }
}
