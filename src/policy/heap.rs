//! A min-heap of objects by rank. The index of each object is stored in one of the object's links,
//! so that any object can be moved or removed.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Objects;
use crate::policy::Rank;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
struct Entry {
    rank: Rank,
    /// Last, so that equal ranks have an order that does not depend on history.
    slot: Slot,
}

// SAFETY: integers only.
unsafe impl Zeroable for Entry {}

/// Four children: half the depth of a binary heap, and siblings share a cache line or two.
const ARITY: usize = 4;

/// A heap allocated for its limit. The index of an object is in `Node::prev`, or in `Node::next`
/// with `NEXT`: an object can be in one heap of each kind.
pub struct Heap<const NEXT: bool = false> {
    entries: Zeroed<Entry>,
    len: usize,
}

impl<const NEXT: bool> Heap<NEXT> {
    /// An empty heap for `max_objects`.
    pub fn new(max_objects: usize) -> Result<Heap<NEXT>> {
        Ok(Heap { entries: Zeroed::new(max_objects)?, len: 0 })
    }

    /// Bytes used, for a table with this peak number of objects.
    pub fn used_bytes(&self, objects: usize) -> u64 {
        self.entries.front_bytes(objects)
    }

    /// Number of objects in the heap.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the heap is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    fn index(objects: &Objects, slot: Slot) -> usize {
        let node = objects.node(slot);
        (if NEXT { node.next } else { node.prev }) as usize
    }

    #[inline]
    fn set(&mut self, objects: &mut Objects, at: usize, entry: Entry) {
        self.entries[at] = entry;
        let node = objects.node_mut(entry.slot);
        *(if NEXT { &mut node.next } else { &mut node.prev }) = at as Slot;
    }

    /// Whether an object is in the heap.
    #[inline]
    pub fn contains(&self, objects: &Objects, slot: Slot) -> bool {
        let at = Self::index(objects, slot);
        at < self.len && self.entries[at].slot == slot
    }

    /// The rank of an object in the heap.
    pub fn rank(&self, objects: &Objects, slot: Slot) -> Option<Rank> {
        self.contains(objects, slot).then(|| self.entries[Self::index(objects, slot)].rank)
    }

    /// The object with the lowest rank.
    #[inline]
    pub fn peek(&self) -> Option<(Rank, Slot)> {
        let entry = self.entries.first()?;
        (self.len > 0).then_some((entry.rank, entry.slot))
    }

    /// Adds an object that is not in the heap, and clears its held mark.
    pub fn push(&mut self, objects: &mut Objects, slot: Slot, rank: Rank) {
        objects.node_mut(slot).set_held(false);
        let at = self.len;
        self.len += 1;
        self.rise(objects, at, Entry { rank, slot });
    }

    /// Changes the rank of an object, or adds it.
    pub fn update(&mut self, objects: &mut Objects, slot: Slot, rank: Rank) {
        if !self.contains(objects, slot) {
            return self.push(objects, slot, rank);
        }
        let at = Self::index(objects, slot);
        let entry = Entry { rank, slot };
        if entry < self.entries[at] {
            self.rise(objects, at, entry);
        } else {
            self.sink(objects, at, entry);
        }
    }

    /// Removes an object; returns its rank if it was in the heap.
    pub fn remove(&mut self, objects: &mut Objects, slot: Slot) -> Option<Rank> {
        let rank = self.rank(objects, slot)?;
        let at = Self::index(objects, slot);
        self.len -= 1;
        let last = self.entries[self.len];
        if at < self.len {
            if last < self.entries[at] {
                self.rise(objects, at, last);
            } else {
                self.sink(objects, at, last);
            }
        }
        let node = objects.node_mut(slot);
        *(if NEXT { &mut node.next } else { &mut node.prev }) = NONE;
        Some(rank)
    }

    /// Removes the object with the lowest rank.
    pub fn pop_min(&mut self, objects: &mut Objects) -> Option<(Rank, Slot)> {
        let (rank, slot) = self.peek()?;
        self.remove(objects, slot);
        Some((rank, slot))
    }

    /// Removes an object and marks it as held.
    pub fn hold(&mut self, objects: &mut Objects, slot: Slot) {
        self.remove(objects, slot);
        objects.node_mut(slot).set_held(true);
    }

    /// Gives an object its rank, or holds it if it is blocked. Its parent becomes blocked and is
    /// held, too. So inner nodes of a prefix tree cost nothing: an object enters the heap when it
    /// has no child any more.
    pub fn place(&mut self, objects: &mut Objects, slot: Slot, rank: Rank) {
        if objects.is_blocked(slot) {
            return self.hold(objects, slot);
        }
        self.update(objects, slot, rank);
        let parent = objects.node(slot).parent;
        if parent != NONE && self.contains(objects, parent) {
            self.hold(objects, parent);
        }
    }

    /// The candidate with the lowest rank. Blocked objects above it are held, so that each is
    /// visited once.
    pub fn least(&mut self, objects: &mut Objects) -> Option<(Rank, Slot)> {
        loop {
            let (rank, slot) = self.peek()?;
            if !objects.is_blocked(slot) {
                return Some((rank, slot));
            }
            self.hold(objects, slot);
        }
    }

    /// Removes the candidate with the lowest rank, and holds it.
    pub fn victim(&mut self, objects: &mut Objects) -> Option<Slot> {
        let (_, slot) = self.least(objects)?;
        self.hold(objects, slot);
        Some(slot)
    }

    /// Moves `entry` from the hole at `at` up to its position.
    fn rise(&mut self, objects: &mut Objects, mut at: usize, entry: Entry) {
        while at > 0 {
            let above = (at - 1) / ARITY;
            if self.entries[above] <= entry {
                break;
            }
            self.set(objects, at, self.entries[above]);
            at = above;
        }
        self.set(objects, at, entry);
    }

    /// Moves `entry` from the hole at `at` down to its position.
    fn sink(&mut self, objects: &mut Objects, mut at: usize, entry: Entry) {
        loop {
            let first = at * ARITY + 1;
            let below = &self.entries[first.min(self.len)..(first + ARITY).min(self.len)];
            let Some((i, &least)) = below.iter().enumerate().min_by_key(|(_, e)| **e) else {
                break;
            };
            if entry <= least {
                break;
            }
            self.set(objects, at, least);
            at = first + i;
        }
        self.set(objects, at, entry);
    }

    /// Checks the heap property and the indices.
    pub fn check_order(&self, objects: &Objects) -> Result<()> {
        for at in 0..self.len {
            let Entry { slot, .. } = self.entries[at];
            if Self::index(objects, slot) != at {
                fail!(
                    State,
                    "the link of object {} is not its heap index {at}",
                    objects.node(slot).id
                );
            }
            if at > 0 && self.entries[at] < self.entries[(at - 1) / ARITY] {
                fail!(State, "object {} is below a greater one", objects.node(slot).id);
            }
        }
        Ok(())
    }

    /// As `check_order`, for a policy whose objects are all in this heap or held.
    pub fn check(&self, objects: &Objects) -> Result<()> {
        self.check_order(objects)?;
        let held = objects.slots().filter(|&slot| objects.node(slot).is_held()).count();
        if self.len + held != objects.len() {
            fail!(State, "{} in the heap and {held} held of {}", self.len, objects.len());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::objects::Facts;
    use std::collections::BTreeMap;

    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *state >> 33
    }

    #[test]
    fn agrees_with_a_sorted_map_over_random_calls() {
        let mut objects = Objects::new(60, false, false).expect("small");
        let slots: Vec<Slot> = (0..60)
            .map(|id| objects.insert(id, NONE, 1, &Facts::default()).expect("room"))
            .collect();
        let mut up = Heap::<false>::new(60).expect("small");
        let mut down = Heap::<true>::new(60).expect("small");
        let mut model: BTreeMap<Slot, Rank> = BTreeMap::new();
        let mut state = 3;
        for _ in 0..30_000 {
            let slot = slots[next(&mut state) as usize % slots.len()];
            let rank = Rank { major: next(&mut state) % 8, minor: next(&mut state) % 8 };
            let turned = Rank { major: !rank.major, minor: !rank.minor };
            assert_eq!(up.rank(&objects, slot), model.get(&slot).copied());
            match next(&mut state) % 4 {
                0 => {
                    assert_eq!(up.remove(&mut objects, slot), model.remove(&slot));
                    down.remove(&mut objects, slot);
                }
                1 => {
                    let least = model.iter().map(|(&slot, &rank)| (rank, slot)).min();
                    assert_eq!(up.pop_min(&mut objects), least);
                    if let Some((_, slot)) = least {
                        model.remove(&slot);
                        assert!(down.remove(&mut objects, slot).is_some());
                    }
                }
                _ => {
                    up.update(&mut objects, slot, rank);
                    down.update(&mut objects, slot, turned);
                    model.insert(slot, rank);
                }
            }
            assert_eq!((up.len(), down.len()), (model.len(), model.len()));
            let greatest = model.values().max().map(|r| !r.major);
            assert_eq!(down.peek().map(|(r, _)| r.major), greatest);
        }
        up.check_order(&objects).expect("sound");
        down.check_order(&objects).expect("sound");
    }

    #[test]
    fn blocked_objects_are_visited_once_and_held() {
        let mut objects = Objects::new(3, false, false).expect("small");
        let mut heap = Heap::<false>::new(3).expect("small");
        for id in 0..3 {
            let slot = objects.insert(id, NONE, 1, &Facts::default()).expect("room");
            heap.push(&mut objects, slot, Rank::count(id, 0));
        }
        objects.acquire(0).expect("room");
        assert_eq!(heap.least(&mut objects).map(|(_, slot)| slot), Some(1));
        assert!(objects.node(0).is_held() && !heap.contains(&objects, 0));
        assert_eq!(heap.len(), 2);
        heap.check(&objects).expect("sound");
        assert!(heap.remove(&mut objects, 0).is_none());
    }
}
