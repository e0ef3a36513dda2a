//! A fixed number of lists over the objects' links, the basis of most policies. `Node::tag` is the
//! number of an object's list, or of its last list while it is held.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::list::{List, Prefetcher};
use crate::meta::objects::Objects;
use crate::policy::Rank;

/// `N` lists.
pub struct Lists<const N: usize> {
    /// The lists.
    pub lists: [List; N],
    scouts: [Prefetcher; N],
}

impl<const N: usize> Default for Lists<N> {
    fn default() -> Lists<N> {
        Lists { lists: [List::default(); N], scouts: [Prefetcher::default(); N] }
    }
}

impl<const N: usize> Lists<N> {
    /// Adds an object that is in no list at the hot end of one.
    #[inline]
    pub fn push_hot(&mut self, objects: &mut Objects, list: usize, slot: Slot) {
        let node = objects.node_mut(slot);
        node.tag = list as u8;
        node.set_held(false);
        self.lists[list].push_hot(objects, slot);
    }

    /// Removes an object from its list; a held object is in none.
    #[inline]
    pub fn remove(&mut self, objects: &mut Objects, slot: Slot) {
        let node = objects.node(slot);
        if !node.is_held() {
            self.lists[usize::from(node.tag)].unlink(objects, slot);
        }
    }

    /// Moves an object, held or not, to the hot end of a list.
    #[inline]
    pub fn move_hot(&mut self, objects: &mut Objects, list: usize, slot: Slot) {
        let node = objects.node(slot);
        if !node.is_held() && usize::from(node.tag) == list {
            return self.lists[list].to_hot(objects, slot);
        }
        self.remove(objects, slot);
        self.push_hot(objects, list, slot);
    }

    /// Removes an object from its list and marks it as held. The tag stays.
    #[inline]
    pub fn hold(&mut self, objects: &mut Objects, slot: Slot) {
        self.remove(objects, slot);
        objects.node_mut(slot).set_held(true);
    }

    /// Returns a held object to its list, in the order of stamps.
    pub fn put_back(&mut self, objects: &mut Objects, slot: Slot) {
        let node = objects.node_mut(slot);
        if node.is_held() {
            node.set_held(false);
            let list = usize::from(node.tag);
            self.lists[list].put_back(objects, slot);
        }
    }

    /// The coldest candidate of a list. Blocked objects before it are held.
    #[inline]
    pub fn coldest(&mut self, objects: &mut Objects, list: usize) -> Option<Slot> {
        loop {
            let slot = self.lists[list].tail;
            if slot == NONE {
                return None;
            }
            if !objects.is_blocked(slot) {
                return Some(slot);
            }
            self.hold(objects, slot);
        }
    }

    /// Removes the coldest candidate of the first list that has one, and holds it.
    pub fn victim(&mut self, objects: &mut Objects) -> Option<Slot> {
        let slot = (0..N).find_map(|list| self.coldest(objects, list))?;
        self.passed(usize::from(objects.node(slot).tag));
        self.hold(objects, slot);
        Some(slot)
    }

    /// Prefetches the nodes that the next searches will visit.
    pub fn look_ahead(&mut self, objects: &Objects) {
        for (list, scout) in self.lists.iter().zip(&mut self.scouts) {
            scout.step(objects, list.tail);
        }
    }

    /// A search has visited the coldest object of a list.
    #[inline]
    pub fn passed(&mut self, list: usize) {
        self.scouts[list].passed();
    }

    /// The rank of an object in a single list.
    pub fn rank(&self, objects: &Objects, slot: Slot) -> Rank {
        Rank::time(objects.node(slot).stamp)
    }

    /// Changes an object's size, also in the sum of its list.
    pub fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        let node = objects.node(slot);
        if !node.is_held() {
            let sum = &mut self.lists[usize::from(node.tag)].units;
            *sum = *sum - u64::from(node.units) + u64::from(units);
        }
        objects.set_units(slot, units);
    }

    /// Checks the links, and that every object is in the list of its tag or held.
    pub fn check_links(&self, objects: &Objects) -> Result<()> {
        let mut linked = 0;
        for (i, list) in self.lists.iter().enumerate() {
            list.check(objects)?;
            for slot in list.from_cold(objects) {
                let node = objects.node(slot);
                if usize::from(node.tag) != i || node.is_held() {
                    fail!(
                        State,
                        "list {i} links object {}, which is held or tagged for another list",
                        node.id
                    );
                }
            }
            linked += list.len as usize;
        }
        let held = objects.slots().filter(|&slot| objects.node(slot).is_held()).count();
        if linked + held != objects.len() {
            fail!(State, "{linked} in lists and {held} held of {} objects", objects.len());
        }
        Ok(())
    }

    /// As `check_links`, for lists in the order of their stamps.
    pub fn check(&self, objects: &Objects) -> Result<()> {
        self.check_links(objects)?;
        for (i, list) in self.lists.iter().enumerate() {
            if !list.from_cold(objects).is_sorted_by_key(|slot| objects.node(slot).stamp) {
                fail!(State, "list {i} is not in the order of its stamps");
            }
        }
        Ok(())
    }
}
