//! Doubly linked lists that live in the objects' own links.

use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Objects;

/// Most steps in search of a place for what comes back.
const MOST_STEPS: usize = 256;

/// A list of objects, hot end first. An object is in one list at most.
#[derive(Clone, Copy, Debug)]
pub struct List {
    /// The hot end.
    pub head: Slot,
    /// The cold end.
    pub tail: Slot,
    /// How many.
    pub len: u32,
    /// The sum of their sizes.
    pub units: u64,
    /// Who was put back last, or a neighbour of it since.
    finger: Slot,
}

impl Default for List {
    fn default() -> List {
        List { head: NONE, tail: NONE, len: 0, units: 0, finger: NONE }
    }
}

/// Walks a list some way ahead of who leaves: the order of a list is no order in
/// memory, so that a search which takes several finds each only after it has
/// waited for the one before. What it says is a guess, and only fetched.
#[derive(Clone, Copy, Debug)]
pub struct Scout {
    at: Slot,
    ahead: u32,
}

impl Default for Scout {
    fn default() -> Scout {
        Scout { at: NONE, ahead: 0 }
    }
}

impl Scout {
    /// As many as one call is likely to take.
    const FAR: u32 = 16;

    /// One step further towards the hot end; from `start` after a search has
    /// caught up.
    #[inline]
    pub fn step(&mut self, objects: &Objects, start: Slot) {
        if self.ahead < Self::FAR {
            let from = if self.ahead == 0 { start } else { self.at };
            self.at = if from == NONE { NONE } else { objects.node(from).prev };
            objects.prefetch(self.at);
            self.ahead += 1;
        }
    }

    /// The search took one.
    #[inline]
    pub fn passed(&mut self) {
        self.ahead = self.ahead.saturating_sub(1);
    }
}

impl List {
    /// Whether it is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts an object at the hot end.
    #[inline]
    pub fn push_hot(&mut self, objects: &mut Objects, slot: Slot) {
        let old = self.head;
        let node = objects.node_mut(slot);
        (node.prev, node.next) = (NONE, old);
        self.units += u64::from(node.units);
        match old {
            NONE => self.tail = slot,
            old => objects.node_mut(old).prev = slot,
        }
        self.head = slot;
        self.len += 1;
    }

    /// Puts an object next to `before`, on its colder side; at the hot end if
    /// that is none.
    pub fn insert_after(&mut self, objects: &mut Objects, before: Slot, slot: Slot) {
        if before == NONE {
            return self.push_hot(objects, slot);
        }
        let after = std::mem::replace(&mut objects.node_mut(before).next, slot);
        let node = objects.node_mut(slot);
        (node.prev, node.next) = (before, after);
        self.units += u64::from(node.units);
        match after {
            NONE => self.tail = slot,
            after => objects.node_mut(after).prev = slot,
        }
        self.len += 1;
    }

    /// Takes an object out.
    #[inline]
    pub fn unlink(&mut self, objects: &mut Objects, slot: Slot) {
        let node = objects.node(slot);
        let (prev, next) = (node.prev, node.next);
        self.units -= u64::from(node.units);
        if self.finger == slot {
            self.finger = if prev != NONE { prev } else { next };
        }
        match prev {
            NONE => self.head = next,
            prev => objects.node_mut(prev).next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => objects.node_mut(next).prev = prev,
        }
        self.len -= 1;
    }

    /// Makes an object of the list its hottest.
    #[inline]
    pub fn to_hot(&mut self, objects: &mut Objects, slot: Slot) {
        if self.head == slot {
            return;
        }
        let old = std::mem::replace(&mut self.head, slot);
        let node = objects.node_mut(slot);
        let (prev, next) = (node.prev, node.next);
        (node.prev, node.next) = (NONE, old);
        objects.node_mut(old).prev = slot;
        // Not the head, so there is a hotter one.
        objects.node_mut(prev).next = next;
        match next {
            NONE => self.tail = prev,
            next => objects.node_mut(next).prev = prev,
        }
        if self.finger == slot {
            self.finger = prev;
        }
    }

    /// Puts an object that had been held back where its stamp belongs.
    pub fn put_back(&mut self, objects: &mut Objects, slot: Slot) {
        let before = self.place(objects, objects.node(slot).stamp);
        self.insert_after(objects, before, slot);
        self.finger = slot;
    }

    /// The coldest object that is not older than `stamp`. Searched from the cold
    /// end, where only objects are passed that had been held too, in turns from the
    /// hot end, for those that never were out of the way, and from where one was put
    /// back last: many that are put back in the order of their stamps, or against
    /// it, cost one step each. In no order they would cost ever more: after some
    /// steps it stays where it has come to, which is among others that came back.
    fn place(&self, objects: &Objects, stamp: i64) -> Slot {
        let older = |slot: Slot| objects.node(slot).stamp < stamp;
        let (mut cold, mut near, mut hot) = (self.tail, self.finger, self.head);
        for _ in 0..MOST_STEPS {
            if cold == NONE || !older(cold) {
                break;
            }
            cold = objects.node(cold).prev;
            if older(hot) {
                return objects.node(hot).prev;
            }
            hot = objects.node(hot).next;
            if near == NONE {
                continue;
            }
            let (up, down) = (objects.node(near).prev, objects.node(near).next);
            let climbs = older(near);
            if climbs && (up == NONE || !older(up)) {
                return up;
            }
            if !climbs && (down == NONE || older(down)) {
                return near;
            }
            near = if climbs { up } else { down };
        }
        cold
    }

    /// The objects from the cold end.
    pub fn from_cold<'a>(&self, objects: &'a Objects) -> impl Iterator<Item = Slot> + use<'a> {
        let mut at = self.tail;
        std::iter::from_fn(move || {
            let slot = at;
            (slot != NONE).then(|| {
                at = objects.node(slot).prev;
                slot
            })
        })
    }
}
