//! Objects that are protected because their tenant holds too little: a queue for each class and
//! tenant, in the order of the inner policy.

use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::policy::Rank;
use crate::policy::qos::CLASSES;
use crate::policy::qos::tenants::MAX_TENANTS;

/// Most steps that a new entry is moved back. Entries arrive in order except for those that had
/// been blocked, so a step or two is common.
const MOST_STEPS: usize = 64;

#[derive(Clone, Copy)]
struct Ends {
    first: Slot,
    last: Slot,
}

/// The queues.
pub struct Parked {
    ends: [[Ends; MAX_TENANTS + 1]; CLASSES],
    /// Bit sets of the tenant rows with a non-empty queue, by class.
    used: [u128; CLASSES],
    /// Neighbours; the objects' own links belong to the inner policy.
    before: Zeroed<u32>,
    after: Zeroed<u32>,
    len: usize,
}

impl Parked {
    /// Empty queues for `max_objects`.
    pub fn new(max_objects: usize) -> Result<Parked> {
        Ok(Parked {
            ends: [[Ends { first: NONE, last: NONE }; MAX_TENANTS + 1]; CLASSES],
            used: [0; CLASSES],
            before: Zeroed::new(max_objects)?,
            after: Zeroed::new(max_objects)?,
            len: 0,
        })
    }

    /// Bytes used, for a table with this peak number of objects.
    pub fn used_bytes(&self, objects: usize) -> u64 {
        self.before.front_bytes(objects) + self.after.front_bytes(objects)
    }

    /// Number of queued objects.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bit set of the tenant rows with queued objects of a class.
    #[inline]
    pub fn used(&self, class: usize) -> u128 {
        self.used[class]
    }

    /// The first object of a queue that is not empty.
    #[inline]
    pub fn first(&self, class: usize, row: u8) -> Slot {
        self.ends[class][usize::from(row)].first
    }

    /// Adds an object behind those that are evicted before it.
    pub fn add(&mut self, class: usize, row: u8, slot: Slot, rank: impl Fn(Slot) -> Rank) {
        let mut before = self.ends[class][usize::from(row)].last;
        let own = rank(slot);
        for _ in 0..MOST_STEPS {
            if before == NONE || rank(before) <= own {
                break;
            }
            before = self.before[before as usize];
        }
        let ends = &mut self.ends[class][usize::from(row)];
        let after = match before {
            NONE => std::mem::replace(&mut ends.first, slot),
            before => std::mem::replace(&mut self.after[before as usize], slot),
        };
        match after {
            NONE => ends.last = slot,
            after => self.before[after as usize] = slot,
        }
        (self.before[slot as usize], self.after[slot as usize]) = (before, after);
        self.used[class] |= 1 << row;
        self.len += 1;
    }

    /// Removes an object from its queue.
    pub fn remove(&mut self, class: usize, row: u8, slot: Slot) {
        let (before, after) = (self.before[slot as usize], self.after[slot as usize]);
        let ends = &mut self.ends[class][usize::from(row)];
        match before {
            NONE => ends.first = after,
            before => self.after[before as usize] = after,
        }
        match after {
            NONE => ends.last = before,
            after => self.before[after as usize] = before,
        }
        if ends.first == NONE {
            self.used[class] &= !(1 << row);
        }
        self.len -= 1;
    }

    /// Checks that every queue is consistent, and that `is` holds for its objects.
    pub fn check(&self, is: impl Fn(usize, u8, Slot) -> bool) -> Result<()> {
        let mut seen = 0;
        for class in 0..CLASSES {
            for row in 0..=MAX_TENANTS as u8 {
                let Ends { first, last } = self.ends[class][usize::from(row)];
                let (mut at, mut before) = (first, NONE);
                while at != NONE {
                    if self.before[at as usize] != before || !is(class, row, at) {
                        fail!(State, "slot {at} is linked in the wrong queue");
                    }
                    (before, at, seen) = (at, self.after[at as usize], seen + 1);
                }
                if before != last || (self.used[class] >> row & 1 == 1) != (first != NONE) {
                    fail!(State, "queue {row} of class {class} has wrong ends");
                }
            }
        }
        if seen != self.len {
            fail!(State, "{seen} objects are queued, {} are counted", self.len);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_entry_is_moved_to_its_position() {
        let mut parked = Parked::new(8).expect("small");
        let rank = |slot: Slot| Rank { major: slot.into(), minor: 0 };
        [2, 5, 3, 1, 7].into_iter().for_each(|slot| parked.add(1, 4, slot, rank));
        parked.check(|class, row, _| (class, row) == (1, 4)).expect("sound");
        assert_eq!((parked.len(), parked.used(1), parked.used(0)), (5, 1 << 4, 0));
        parked.remove(1, 4, 5);
        let mut order = Vec::new();
        while parked.used(1) != 0 {
            let first = parked.first(1, 4);
            order.push(first);
            parked.remove(1, 4, first);
        }
        assert_eq!(order, [1, 2, 3, 7]);
        assert_eq!(parked.len(), 0);
    }
}
