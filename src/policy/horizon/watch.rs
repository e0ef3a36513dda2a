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

#[derive(Clone, Copy)]
struct Queue {
    oldest: Slot,
    newest: Slot,
}

/// The waits, in queues by how long they have lasted.
pub struct Watch {
    waits: Zeroed<Wait>,
    index: Index,
    queues: [Queue; AGES],
    /// A bit for each queue that is not empty.
    occupied: u64,
    free: Slot,
    fresh: Slot,
    /// An id is watched if this many low bits of its hash are 0. The high bits determine its
    /// position in the index.
    shift: u32,
    hand: usize,
}

/// Most waits moved to the next bucket in one call.
const MOVES: usize = 24;

const _: () = assert!(AGES <= u64::BITS as usize);

impl Watch {
    /// An empty watch for `limit` waits.
    pub fn new(limit: usize) -> Result<Watch> {
        Ok(Watch {
            waits: Zeroed::new(limit)?,
            index: Index::new(limit)?,
            queues: [Queue { oldest: NONE, newest: NONE }; AGES],
            occupied: 0,
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
        for (bucket, queue) in self.queues.iter().enumerate() {
            let mut slot = queue.oldest;
            while slot != NONE {
                let wait = self.waits[slot as usize];
                (0..=bucket).for_each(|b| hazards.leave(wait.class, b));
                slot = wait.newer;
            }
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

    fn push(&mut self, slot: Slot, bucket: usize) {
        let queue = &mut self.queues[bucket];
        let newest = std::mem::replace(&mut queue.newest, slot);
        if newest == NONE {
            queue.oldest = slot;
            self.occupied |= 1 << bucket;
        } else {
            self.waits[newest as usize].newer = slot;
        }
        let wait = &mut self.waits[slot as usize];
        (wait.older, wait.newer, wait.bucket) = (newest, NONE, bucket as u16);
    }

    fn unlink(&mut self, slot: Slot) {
        let Wait { older, newer, bucket, .. } = self.waits[slot as usize];
        let queue = &mut self.queues[usize::from(bucket)];
        match newer {
            NONE => queue.newest = older,
            newer => self.waits[newer as usize].older = older,
        }
        match older {
            NONE => queue.oldest = newer,
            older => self.waits[older as usize].newer = newer,
        }
        if newer == NONE && older == NONE {
            self.occupied &= !(1 << bucket);
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
        self.waits[slot as usize] =
            Wait { id, start_ns: now, older: NONE, newer: NONE, class, bucket: 0, reserved: 0 };
        self.push(slot, 0);
        hazards.enter(class, 0);
    }

    /// A slot for a new wait: that of the longest wait if all are in use.
    #[inline]
    fn vacant(&mut self) -> Slot {
        if self.len() == self.waits.len() {
            let slot = self.queues[self.occupied.ilog2() as usize].oldest;
            self.unlink(slot);
            let id = self.waits[slot as usize].id;
            self.index.remove(id, |s| s == slot);
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
            hazards.enter(class, 0);
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
        (usize::from(bucket) + 1..=last).for_each(|b| hazards.enter(class, b));
        hazards.end(class, last);
    }

    /// Moves some waits to the next bucket, one bucket per call.
    pub fn age(&mut self, hazards: &mut Hazards, now: i64) {
        let bucket = self.hand;
        self.hand = if bucket + 2 == AGES { 0 } else { bucket + 1 };
        if self.occupied & 1 << bucket == 0 {
            return;
        }
        let limit = age_start_ns(bucket + 1);
        for _ in 0..MOVES {
            let slot = self.queues[bucket].oldest;
            if slot == NONE || now - self.waits[slot as usize].start_ns < limit {
                break;
            }
            self.unlink(slot);
            self.push(slot, bucket + 1);
            hazards.enter(self.waits[slot as usize].class, bucket + 1);
        }
    }
}
