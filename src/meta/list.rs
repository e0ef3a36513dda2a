//! Doubly linked lists through the links of the objects, ordered by recency.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Objects;
use crate::meta::timestamp_heap::TimestampHeap;

/// Most steps of a search for a place in the list; beyond that, the heap is as fast.
const MOST_STEPS: usize = 8;

/// A list of objects, hot end first. An object is in at most one list.
///
/// An object that is put back, and whose place is not found in a few steps, waits in a heap until
/// it is the oldest of all. So `tail` is always the next victim, though not every object can be
/// reached from it.
#[derive(Clone, Copy, Debug)]
pub struct List {
    /// The hot end.
    pub head: Slot,
    /// The cold end.
    pub tail: Slot,
    /// Number of objects, those in the heap included.
    pub len: u32,
    /// The sum of their sizes.
    pub units: u64,
    /// The object that was put back last, or a neighbour of it since.
    finger: Slot,
    /// Objects that were put back into the middle; all are younger than the tail.
    heap: TimestampHeap,
}

impl Default for List {
    fn default() -> List {
        let (head, tail, finger) = (NONE, NONE, NONE);
        List { head, tail, len: 0, units: 0, finger, heap: TimestampHeap::default() }
    }
}

/// Prefetches nodes ahead of a search for victims. List order is not memory order, so a search that
/// takes several objects would wait for each. The position is a guess, and is only prefetched.
#[derive(Clone, Copy, Debug)]
pub struct Prefetcher {
    at: Slot,
    ahead: u32,
}

impl Default for Prefetcher {
    fn default() -> Prefetcher {
        Prefetcher { at: NONE, ahead: 0 }
    }
}

impl Prefetcher {
    /// Nodes ahead: as many as one call is likely to take.
    const DISTANCE: u32 = 16;

    /// Advances one step towards the hot end; restarts from `start` when the search has caught up.
    #[inline]
    pub fn step(&mut self, objects: &Objects, start: Slot) {
        if self.ahead < Self::DISTANCE {
            let from = if self.ahead == 0 { start } else { self.at };
            self.at = if from == NONE { NONE } else { objects.node(from).prev };
            objects.prefetch(self.at);
            self.ahead += 1;
        }
    }

    /// Records that the search took a node.
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

    /// Whether objects that were put back wait in the heap. A change of their stamps must be
    /// followed by a move at once.
    #[inline]
    pub fn has_heap(&self) -> bool {
        !self.heap.is_empty()
    }

    /// Inserts an object at the hot end.
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

    /// Inserts an object on the colder side of `before`, or at the hot end if that is NONE.
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

    /// Removes an object.
    #[inline]
    pub fn unlink(&mut self, objects: &mut Objects, slot: Slot) {
        let node = objects.node(slot);
        let (prev, next) = (node.prev, node.next);
        self.units -= u64::from(node.units);
        self.len -= 1;
        if !self.heap.is_empty() && self.remove_from_heap(objects, slot) {
            return;
        }
        if self.finger == slot {
            self.finger = if prev != NONE { prev } else { next };
        }
        match prev {
            NONE => self.head = next,
            prev => objects.node_mut(prev).next = next,
        }
        match next {
            NONE => {
                self.tail = prev;
                self.take_oldest(objects);
            }
            next => objects.node_mut(next).prev = prev,
        }
    }

    /// Moves an object of the list to the hot end.
    #[inline]
    pub fn to_hot(&mut self, objects: &mut Objects, slot: Slot) {
        if self.head == slot {
            if self.tail == slot {
                // The only linked object is younger than those in the heap now.
                self.take_oldest(objects);
            }
            return;
        }
        if !self.heap.is_empty() && self.remove_from_heap(objects, slot) {
            self.len -= 1;
            self.units -= u64::from(objects.node(slot).units);
            return self.push_hot(objects, slot);
        }
        let old = std::mem::replace(&mut self.head, slot);
        let node = objects.node_mut(slot);
        let (prev, next) = (node.prev, node.next);
        (node.prev, node.next) = (NONE, old);
        objects.node_mut(old).prev = slot;
        // It is not the head, so there is a hotter one.
        objects.node_mut(prev).next = next;
        match next {
            NONE => self.tail = prev,
            next => objects.node_mut(next).prev = prev,
        }
        if self.finger == slot {
            self.finger = prev;
        }
        if next == NONE {
            self.take_oldest(objects);
        }
    }

    /// Whether an object of the list is in the heap. A linked object is named by its hotter
    /// neighbour. The link of a heap node leads down to another heap node, whose own links never
    /// lead up.
    #[inline]
    fn is_in_heap(&self, objects: &Objects, slot: Slot) -> bool {
        match objects.node(slot).prev {
            NONE => self.head != slot,
            prev => objects.node(prev).next != slot,
        }
    }

    /// Removes an object from the heap; returns whether it was in.
    #[cold]
    fn remove_from_heap(&mut self, objects: &mut Objects, slot: Slot) -> bool {
        self.is_in_heap(objects, slot) && self.heap.remove(objects, slot)
    }

    /// Called when the tail changed: links the oldest of the heap if it is older than the tail.
    #[inline]
    fn take_oldest(&mut self, objects: &mut Objects) {
        if !self.heap.is_empty() {
            self.take_oldest_slow(objects);
        }
    }

    #[cold]
    fn take_oldest_slow(&mut self, objects: &mut Objects) {
        let (slot, last) = (self.heap.oldest(), self.tail);
        if last != NONE && objects.node(last).stamp <= objects.node(slot).stamp {
            return;
        }
        self.heap.remove(objects, slot);
        self.len -= 1;
        self.units -= u64::from(objects.node(slot).units);
        self.insert_after(objects, last, slot);
    }

    /// Puts back an object that was held, where its stamp belongs.
    pub fn put_back(&mut self, objects: &mut Objects, slot: Slot) {
        let node = objects.node(slot);
        match self.place(objects, node.stamp) {
            Some(before) => {
                self.insert_after(objects, before, slot);
                self.finger = slot;
            }
            None => {
                self.len += 1;
                self.units += u64::from(node.units);
                self.heap.add(objects, slot);
            }
        }
    }

    /// The coldest object that is not older than `stamp`, or NONE; None if a few steps do not find
    /// it. Searches in turns from three places. From the cold end it passes only objects that were
    /// held, too. From the hot end it finds objects that were held briefly. From the last put-back
    /// it takes one step for each of many objects that come in the order of their stamps, or in
    /// reverse.
    fn place(&self, objects: &Objects, stamp: i64) -> Option<Slot> {
        let older = |slot: Slot| objects.node(slot).stamp < stamp;
        let (mut cold, mut finger, mut hot) = (self.tail, self.finger, self.head);
        for _ in 0..MOST_STEPS {
            if cold == NONE || !older(cold) {
                return Some(cold);
            }
            cold = objects.node(cold).prev;
            if older(hot) {
                return Some(objects.node(hot).prev);
            }
            hot = objects.node(hot).next;
            if finger == NONE {
                continue;
            }
            let (up, down) = (objects.node(finger).prev, objects.node(finger).next);
            let climbs = older(finger);
            if climbs && (up == NONE || !older(up)) {
                return Some(up);
            }
            if !climbs && (down == NONE || older(down)) {
                return Some(finger);
            }
            finger = if climbs { up } else { down };
        }
        None
    }

    /// The objects from the cold end, those of the heap in the order of their stamps.
    pub fn from_cold<'a>(&self, objects: &'a Objects) -> impl Iterator<Item = Slot> + use<'a> {
        let mut at = self.tail;
        let mut waiting: Vec<Slot> = self.heap.slots(objects).collect();
        waiting.sort_unstable_by_key(|&slot| std::cmp::Reverse(objects.node(slot).stamp));
        std::iter::from_fn(move || {
            let next =
                |slot: &mut Slot| at == NONE || objects.node(*slot).stamp < objects.node(at).stamp;
            waiting.pop_if(next).or_else(|| {
                let slot = at;
                (slot != NONE).then(|| {
                    at = objects.node(slot).prev;
                    slot
                })
            })
        })
    }

    /// Checks links and counts, and that no object of the heap is the oldest.
    pub fn check(&self, objects: &Objects) -> Result<()> {
        let (mut len, mut units, mut at, mut next) =
            (self.heap.check(objects)?, 0, self.tail, NONE);
        while at != NONE {
            let node = objects.node(at);
            if node.next != next || len >= self.len {
                fail!(State, "object {} is in a list but not linked", node.id);
            }
            (len, next, at) = (len + 1, at, node.prev);
        }
        for slot in self.heap.slots(objects) {
            let (node, last) = (objects.node(slot), self.tail);
            if last == NONE
                || node.stamp < objects.node(last).stamp
                || !self.is_in_heap(objects, slot)
            {
                fail!(State, "object {} is in the heap but is the oldest", node.id);
            }
        }
        self.from_cold(objects).for_each(|slot| units += u64::from(objects.node(slot).units));
        if (len, units, next) != (self.len, self.units, self.head) {
            fail!(State, "a list counts {} objects, has {len}", self.len);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::objects::Facts;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Copy, Debug)]
    enum Call {
        Use(Slot),
        UseAndMove(Slot),
        TakeOut(Slot),
        PutBack(Slot),
        TakeLast,
    }

    const MANY: Slot = 100;

    fn call() -> impl Strategy<Value = Call> {
        let slot = 0..MANY;
        prop_oneof![
            1 => slot.clone().prop_map(Call::Use),
            1 => slot.clone().prop_map(Call::UseAndMove),
            3 => slot.clone().prop_map(Call::TakeOut),
            9 => slot.prop_map(Call::PutBack),
            2 => Just(Call::TakeLast),
        ]
    }

    /// A list, its model by stamp, and the last stamp.
    struct World {
        objects: Objects,
        list: List,
        model: BTreeMap<i64, Slot>,
        last: i64,
    }

    impl World {
        fn new() -> World {
            let mut objects = Objects::new(MANY as usize, false, false).expect("small");
            let (mut list, mut model) = (List::default(), BTreeMap::new());
            for id in 0..MANY {
                let units = u64::from(id % 5);
                let slot = objects.insert(id.into(), NONE, units, &Facts::default()).expect("room");
                objects.node_mut(slot).stamp = id.into();
                list.push_hot(&mut objects, slot);
                model.insert(id.into(), slot);
            }
            World { objects, list, model, last: MANY.into() }
        }

        fn used(&mut self, slot: Slot) -> bool {
            let stamp = std::mem::replace(&mut self.objects.node_mut(slot).stamp, self.last + 1);
            let was_in = self.model.remove(&stamp).is_some();
            self.last += 1;
            self.model.insert(self.last, slot);
            was_in
        }

        fn step(&mut self, call: Call) {
            match call {
                Call::Use(slot) => match self.used(slot) {
                    true => self.list.to_hot(&mut self.objects, slot),
                    false => self.list.push_hot(&mut self.objects, slot),
                },
                Call::UseAndMove(slot) => {
                    if self.used(slot) {
                        self.list.unlink(&mut self.objects, slot);
                    }
                    self.list.push_hot(&mut self.objects, slot);
                }
                Call::TakeOut(slot) => {
                    if self.model.remove(&self.objects.node(slot).stamp).is_some() {
                        self.list.unlink(&mut self.objects, slot);
                    }
                }
                Call::PutBack(slot) => {
                    if self.model.insert(self.objects.node(slot).stamp, slot).is_none() {
                        self.list.put_back(&mut self.objects, slot);
                    }
                }
                Call::TakeLast => {
                    let oldest = self.model.pop_first().map_or(NONE, |(_, slot)| slot);
                    assert_eq!(self.list.tail, oldest);
                    if oldest != NONE {
                        self.list.unlink(&mut self.objects, oldest);
                    }
                }
            }
        }

        fn check(&self) {
            self.list.check(&self.objects).expect("sound");
            assert!(self.list.from_cold(&self.objects).eq(self.model.values().copied()));
            let units = self.model.values().map(|&slot| u64::from(slot % 5)).sum::<u64>();
            assert_eq!((self.list.len as usize, self.list.units), (self.model.len(), units));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn objects_that_are_put_back_are_ordered_by_stamp(
            calls in prop::collection::vec(call(), 0..250),
            empty in any::<bool>(),
        ) {
            let mut world = World::new();
            for slot in (0..MANY).filter(|slot| empty || slot % 5 > 0) {
                world.step(Call::TakeOut(slot));
            }
            for call in calls {
                world.step(call);
                world.check();
            }
        }
    }

    #[test]
    fn objects_put_back_in_random_order_go_to_the_heap() {
        let mut world = World::new();
        (0..MANY).for_each(|slot| world.step(Call::TakeOut(slot)));
        (0..MANY).for_each(|i| world.step(Call::PutBack(i * 37 % MANY)));
        world.check();
        assert!(world.list.heap.slots(&world.objects).count() > 50);
        (0..MANY).for_each(|_| world.step(Call::TakeLast));
        assert!(world.list.is_empty() && world.list.heap.is_empty());
    }

    #[test]
    fn objects_put_back_in_order_or_reverse_avoid_the_heap() {
        for step in [1, MANY - 1] {
            let mut world = World::new();
            (5..MANY - 5).for_each(|slot| world.step(Call::TakeOut(slot)));
            (0..MANY).map(|i| (i + 1) * step % MANY).for_each(|s| world.step(Call::PutBack(s)));
            world.check();
            assert!(world.list.heap.slots(&world.objects).count() < 4);
        }
    }

    #[test]
    fn a_use_of_the_only_linked_object_takes_the_oldest_of_the_heap() {
        let mut world = World::new();
        (0..MANY).for_each(|slot| world.step(Call::TakeOut(slot)));
        (0..MANY).for_each(|i| world.step(Call::PutBack(i * 37 % MANY)));
        let last = world.list.tail;
        while world.list.head != last {
            world.step(Call::TakeOut(world.list.head));
        }
        assert!(!world.list.heap.is_empty());
        world.step(Call::Use(last));
        world.check();
        (0..MANY).for_each(|_| world.step(Call::TakeLast));
    }

    #[test]
    fn check_finds_an_object_of_the_heap_that_is_the_oldest() {
        let mut world = World::new();
        (0..MANY).for_each(|slot| world.step(Call::TakeOut(slot)));
        (0..MANY).for_each(|i| world.step(Call::PutBack(i * 37 % MANY)));
        let oldest = world.list.heap.oldest();
        world.objects.node_mut(oldest).stamp = -1;
        assert!(world.list.check(&world.objects).is_err());
    }
}
