//! A min-heap of objects by stamp, through the objects' own links. A recency list uses it for
//! objects that are put back into its middle.
//!
//! No object is older than its parent. The bits of an object's slot, lowest first, select the side
//! at each depth. An object is therefore found without parent links, whatever its stamp is by now.
//! The heap needs no memory of its own. Its depth is at most the bits of a slot, and about log2 of
//! its size if slots are dense.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Objects;

/// A heap of objects by stamp. `Node::prev` and `Node::next` are the children.
#[derive(Clone, Copy, Debug)]
pub struct TimestampHeap {
    top: Slot,
}

impl Default for TimestampHeap {
    fn default() -> TimestampHeap {
        TimestampHeap { top: NONE }
    }
}

/// The side of a slot below its ancestor at `depth`.
#[inline]
fn side(slot: Slot, depth: u32) -> bool {
    slot.wrapping_shr(depth) & 1 == 1
}

#[inline]
fn below(objects: &Objects, slot: Slot, side: bool) -> Slot {
    let node = objects.node(slot);
    if side { node.next } else { node.prev }
}

impl TimestampHeap {
    /// Whether it is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.top == NONE
    }

    /// The oldest, or NONE.
    #[inline]
    pub fn oldest(&self) -> Slot {
        self.top
    }

    /// Sets the child of `above` on a side, or the root if `above` is NONE.
    fn set(&mut self, objects: &mut Objects, above: Slot, side: bool, slot: Slot) {
        match (above, side) {
            (NONE, _) => self.top = slot,
            (above, true) => objects.node_mut(above).next = slot,
            (above, false) => objects.node_mut(above).prev = slot,
        }
    }

    /// Adds an object that is in no list and no heap.
    pub fn add(&mut self, objects: &mut Objects, mut slot: Slot) {
        let (mut above, mut at, mut on) = (NONE, self.top, false);
        for depth in 0..=Slot::BITS {
            if at == NONE {
                break;
            }
            if objects.node(slot).stamp < objects.node(at).stamp {
                // Takes its place; the displaced object moves on down.
                let (prev, next) = (objects.node(at).prev, objects.node(at).next);
                let node = objects.node_mut(slot);
                (node.prev, node.next) = (prev, next);
                self.set(objects, above, on, slot);
                std::mem::swap(&mut slot, &mut at);
            }
            (above, on) = (at, side(slot, depth));
            at = below(objects, at, on);
        }
        debug_assert_eq!(at, NONE, "two objects have one slot");
        let node = objects.node_mut(slot);
        (node.prev, node.next) = (NONE, NONE);
        self.set(objects, above, on, slot);
    }

    /// Removes an object; returns whether it was in the heap.
    pub fn remove(&mut self, objects: &mut Objects, slot: Slot) -> bool {
        let (mut above, mut at, mut on) = (NONE, self.top, false);
        for depth in 0..=Slot::BITS {
            if at == slot || at == NONE {
                break;
            }
            (above, on) = (at, side(slot, depth));
            at = below(objects, at, on);
        }
        if at != slot {
            return false;
        }
        // The older child moves up, and leaves a gap in turn.
        let mut links = [objects.node(slot).prev, objects.node(slot).next];
        loop {
            let stamps = links.map(|s| if s == NONE { i64::MAX } else { objects.node(s).stamp });
            let right = links[0] == NONE || (links[1] != NONE && stamps[1] < stamps[0]);
            let up = links[usize::from(right)];
            self.set(objects, above, on, up);
            if up == NONE {
                return true;
            }
            let node = objects.node_mut(up);
            let under = [node.prev, node.next];
            [node.prev, node.next] = links;
            (above, on, links) = (up, right, under);
        }
    }

    /// All objects, in no particular order.
    pub fn slots<'a>(&self, objects: &'a Objects) -> impl Iterator<Item = Slot> + use<'a> {
        let mut left: Vec<Slot> = [self.top].into_iter().filter(|&slot| slot != NONE).collect();
        std::iter::from_fn(move || {
            let slot = left.pop()?;
            let node = objects.node(slot);
            left.extend([node.prev, node.next].into_iter().filter(|&slot| slot != NONE));
            Some(slot)
        })
    }

    /// Checks the side and order of every object; returns their number.
    pub fn check(&self, objects: &Objects) -> Result<u32> {
        let mut len = 0;
        for slot in self.slots(objects) {
            let (mut at, mut depth) = (self.top, 0);
            while at != slot && at != NONE && depth <= Slot::BITS {
                at = below(objects, at, side(slot, depth));
                depth += 1;
            }
            let node = objects.node(slot);
            if at != slot {
                fail!(State, "object {} is not on the path of its slot", node.id);
            }
            let under = [node.prev, node.next].into_iter().filter(|&slot| slot != NONE);
            if under.into_iter().any(|slot| objects.node(slot).stamp < node.stamp) {
                fail!(State, "object {} is above an older one", node.id);
            }
            len += 1;
        }
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::objects::Facts;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn table(len: u64) -> Objects {
        let mut objects = Objects::new(len as usize, false, false).expect("small");
        for id in 0..len {
            objects.insert(id, NONE, 1, &Facts::default()).expect("room");
        }
        objects
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        /// Slot, stamp, and whether the stamp changes before the removal.
        #[test]
        fn agrees_with_a_sorted_set(calls in prop::collection::vec((0..70u32, -9..9i64, any::<bool>()), 0..400)) {
            let (mut objects, mut heap) = (table(70), TimestampHeap::default());
            let mut model: BTreeSet<(i64, Slot)> = BTreeSet::new();
            for (slot, stamp, changes) in calls {
                let is_in = model.iter().find(|(_, s)| *s == slot).copied();
                if let Some(entry) = is_in {
                    if changes {
                        objects.node_mut(slot).stamp = stamp;
                    }
                    model.remove(&entry);
                    prop_assert!(heap.remove(&mut objects, slot));
                } else {
                    prop_assert!(!heap.remove(&mut objects, slot));
                    objects.node_mut(slot).stamp = stamp;
                    heap.add(&mut objects, slot);
                    model.insert((stamp, slot));
                }
                prop_assert_eq!(heap.check(&objects).expect("sound") as usize, model.len());
                let oldest = Some(heap.oldest()).filter(|&s| s != NONE);
                let stamp = oldest.map(|s| objects.node(s).stamp);
                prop_assert_eq!(stamp, model.first().map(|(stamp, _)| *stamp));
                let slots: BTreeSet<Slot> = heap.slots(&objects).collect();
                prop_assert_eq!(slots, model.iter().map(|(_, s)| *s).collect::<BTreeSet<_>>());
            }
        }
    }

    #[test]
    fn objects_leave_in_order_and_depth_stays_logarithmic() {
        const MANY: u64 = 1 << 14;
        let (mut objects, mut heap) = (table(MANY), TimestampHeap::default());
        for slot in 0..MANY as Slot {
            objects.node_mut(slot).stamp = i64::from(slot.wrapping_mul(0x9E37_79B1));
            heap.add(&mut objects, slot);
        }
        assert_eq!(heap.check(&objects).expect("sound"), MANY as u32);
        for slot in 0..MANY as Slot {
            let (mut at, mut depth) = (heap.oldest(), 0);
            while at != slot {
                at = below(&objects, at, side(slot, depth));
                depth += 1;
            }
            assert!(depth <= 14, "a slot of 14 bits stands {depth} deep");
        }
        let mut last = i64::MIN;
        while !heap.is_empty() {
            let slot = heap.oldest();
            let stamp = objects.node(slot).stamp;
            assert!(stamp > last && heap.remove(&mut objects, slot));
            last = stamp;
        }
    }

    #[test]
    fn check_finds_wrong_order_and_wrong_sides() {
        let (mut objects, mut heap) = (table(4), TimestampHeap::default());
        for slot in 0..4 {
            objects.node_mut(slot).stamp = i64::from(slot);
            heap.add(&mut objects, slot);
        }
        objects.node_mut(3).stamp = -1;
        assert!(heap.check(&objects).is_err());
        objects.node_mut(3).stamp = 3;
        let node = objects.node_mut(0);
        (node.prev, node.next) = (node.next, node.prev);
        assert!(heap.check(&objects).is_err());
    }
}
