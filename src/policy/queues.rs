//! Lists with the sums of their sizes. A sum includes objects that are held because they are
//! blocked, but not the chosen victims.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::{Node, Objects};
use crate::policy::lists::Lists;

/// Bit of `Node::freq`: the object is a chosen victim, and not counted.
const TAKEN: u8 = 0x10;
/// Largest counter that fits beside `TAKEN`.
pub const MAX_COUNT: u8 = TAKEN - 1;

/// `N` lists with the sums of their sizes. Every move gives an object a new stamp, later than all
/// before. So a list is in the order of stamps, and a held object returns to its position.
pub struct Queues<const N: usize> {
    lists: Lists<N>,
    units: [u64; N],
    last: i64,
    /// Units that fit; 0 = unknown.
    capacity: u64,
}

/// The policy's counter of an object, up to `MAX_COUNT`.
#[inline]
pub fn count(node: &Node) -> u8 {
    node.freq() & MAX_COUNT
}

/// Sets the counter.
#[inline]
pub fn set_count(node: &mut Node, count: u8) {
    let taken = node.freq() & TAKEN;
    node.set_freq(taken | count.min(MAX_COUNT));
}

impl<const N: usize> Queues<N> {
    /// Empty queues of a table with this capacity in units; 0 = unknown.
    pub fn new(capacity: u64) -> Queues<N> {
        Queues { lists: Lists::default(), units: [0; N], last: i64::MIN, capacity }
    }

    /// The capacity in units; 0 = unknown.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Changes the capacity.
    pub fn set_capacity(&mut self, units: u64) {
        self.capacity = units;
    }

    /// The capacity, or the resident units while the capacity is unknown.
    pub fn fits(&self, objects: &Objects) -> u64 {
        if self.capacity > 0 { self.capacity } else { objects.units() }
    }

    /// A search moves several objects at one time: each gets a stamp of its own.
    #[inline]
    fn stamp(&mut self, now: i64) -> i64 {
        self.last = now.max(self.last.saturating_add(1));
        self.last
    }

    /// Units of a list.
    #[inline]
    pub fn units(&self, list: usize) -> u64 {
        self.units[list]
    }

    /// Units of all lists.
    #[inline]
    pub fn total(&self) -> u64 {
        self.units.iter().sum()
    }

    /// The coldest object of a list, held ones excepted, blocked or not.
    #[inline]
    pub fn tail(&self, list: usize) -> Option<Slot> {
        Some(self.lists.lists[list].tail).filter(|&slot| slot != NONE)
    }

    /// Adds a new object at the hot end of a list.
    #[inline]
    pub fn push(&mut self, objects: &mut Objects, list: usize, slot: Slot, now: i64) {
        let stamp = self.stamp(now);
        let node = objects.node_mut(slot);
        node.stamp = stamp;
        node.set_freq(0);
        self.units[list] += u64::from(node.units);
        self.lists.push_hot(objects, list, slot);
    }

    /// Moves an object, held or not, to the hot end of a list.
    #[inline]
    pub fn move_hot(&mut self, objects: &mut Objects, list: usize, slot: Slot, now: i64) {
        let stamp = self.stamp(now);
        let node = objects.node_mut(slot);
        node.stamp = stamp;
        let units = u64::from(node.units);
        self.units[usize::from(node.tag)] -= units;
        self.units[list] += units;
        self.lists.move_hot(objects, list, slot);
    }

    /// The coldest candidate of a list. Blocked objects before it are held.
    #[inline]
    pub fn coldest(&mut self, objects: &mut Objects, list: usize) -> Option<Slot> {
        self.lists.coldest(objects, list)
    }

    /// Removes the coldest candidate of the first of the given lists that has one, as a victim.
    pub fn victim(
        &mut self,
        objects: &mut Objects,
        order: impl IntoIterator<Item = usize>,
    ) -> Option<Slot> {
        let slot = order.into_iter().find_map(|list| self.lists.coldest(objects, list))?;
        self.take(objects, slot);
        Some(slot)
    }

    /// Prefetches the nodes that the next searches will visit.
    pub fn look_ahead(&mut self, objects: &Objects) {
        self.lists.look_ahead(objects);
    }

    /// A search has visited the coldest object of a list.
    #[inline]
    pub fn passed(&mut self, list: usize) {
        self.lists.passed(list);
    }

    /// Takes a victim out of its list and its sum.
    #[inline]
    pub fn take(&mut self, objects: &mut Objects, slot: Slot) {
        self.lists.hold(objects, slot);
        let node = objects.node_mut(slot);
        node.set_freq(node.freq() | TAKEN);
        self.units[usize::from(node.tag)] -= u64::from(node.units);
    }

    /// Returns a held object or a victim to the position of its stamp.
    pub fn put_back(&mut self, objects: &mut Objects, slot: Slot) {
        let node = objects.node_mut(slot);
        if node.freq() & TAKEN != 0 {
            node.set_freq(count(node));
            self.units[usize::from(node.tag)] += u64::from(node.units);
        }
        self.lists.put_back(objects, slot);
    }

    /// Removes an object; returns the list that it was in.
    #[inline]
    pub fn remove(&mut self, objects: &mut Objects, slot: Slot) -> usize {
        let node = objects.node(slot);
        let list = usize::from(node.tag);
        if node.freq() & TAKEN == 0 {
            self.units[list] -= u64::from(node.units);
        }
        self.lists.remove(objects, slot);
        list
    }

    /// Changes an object's size.
    pub fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        let node = objects.node(slot);
        if node.freq() & TAKEN == 0 {
            let sum = &mut self.units[usize::from(node.tag)];
            *sum = *sum - u64::from(node.units) + u64::from(units);
        }
        self.lists.resize(objects, slot, units);
    }

    /// Checks the lists, their sums and the order of stamps.
    pub fn check(&self, objects: &Objects) -> Result<()> {
        self.lists.check(objects)?;
        let mut units = [0; N];
        for slot in objects.slots() {
            let node = objects.node(slot);
            if node.freq() & TAKEN == 0 {
                units[usize::from(node.tag)] += u64::from(node.units);
            }
        }
        if units != self.units {
            fail!(State, "the queues count {:?} units, have {units:?}", self.units);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::objects::Facts;

    #[test]
    fn held_objects_are_counted_and_victims_are_not() {
        let mut objects = Objects::new(4, false, false).expect("small");
        let mut queues = Queues::<2>::new(0);
        for id in 0..3 {
            let slot = objects.insert(id, NONE, 10, &Facts::default()).expect("room");
            queues.push(&mut objects, 0, slot, 5);
        }
        objects.acquire(0).expect("free");
        assert_eq!(queues.coldest(&mut objects, 0), Some(1));
        assert_eq!((queues.units(0), queues.total()), (30, 30));
        queues.take(&mut objects, 1);
        assert_eq!(queues.units(0), 20);
        queues.check(&objects).expect("sound");
        queues.move_hot(&mut objects, 1, 2, 5);
        assert_eq!((queues.units(0), queues.units(1), queues.tail(0)), (10, 10, None));
        queues.put_back(&mut objects, 1);
        assert!(!objects.release(0).is_ok_and(|free| !free));
        queues.put_back(&mut objects, 0);
        assert_eq!((queues.tail(0), queues.units(0)), (Some(0), 20));
        queues.resize(&mut objects, 0, 3);
        queues.check(&objects).expect("sound");
        assert_eq!((queues.remove(&mut objects, 0), queues.units(0)), (0, 10));
    }
}
