//! The objects that a policy chooses among: a table of slots, and the prefix tree of its objects.
//! An object is a block, a chunk, a cell, a session, or the caller's own unit.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed, prefetch};
use crate::fail;
use crate::meta::index::{Index, NONE, Slot, UNSURE};
use crate::meta::orphans::Orphans;
use crate::meta::sessions::{MAX_SESSIONS, Sessions};

/// Largest size of one object.
pub const MAX_UNITS: u64 = u32::MAX as u64;
/// Most references to one object.
pub const MAX_REFS: u32 = PINNED - 1;

const PINNED: u32 = 1 << 31;
const LIVE: u8 = 0x80;
const HELD: u8 = 0x40;
const CHOSEN: u8 = 0x20;
/// Largest value of [`Node::freq`].
pub const MAX_FREQ: u8 = 0x1F;

/// Metadata of every object: 48 bytes. The fields that a use changes are first.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Node {
    /// The caller's id.
    pub id: u64,
    /// When the policy last moved it, in ns of the caller's clock. Stamps are unique, so they
    /// define an order.
    pub stamp: i64,
    /// Hotter neighbour; owned by the policy.
    pub prev: Slot,
    /// Colder neighbour; owned by the policy.
    pub next: Slot,
    /// The session that used it last.
    pub session: Slot,
    /// Uses since it was inserted, saturating.
    pub hits: u16,
    /// The policy's list that it is in; owned by the policy.
    pub tag: u8,
    marks: u8,
    /// The object that it continues, or NONE.
    pub parent: Slot,
    /// Resident objects that continue it.
    pub children: u32,
    /// Its size.
    pub units: u32,
    /// References, and the pin bit.
    refs: u32,
}

const _: () = assert!(std::mem::size_of::<Node>() == 48);

// SAFETY: integers only.
unsafe impl Zeroable for Node {}

impl Node {
    /// A counter of the policy, up to MAX_FREQ.
    #[inline]
    pub fn freq(&self) -> u8 {
        self.marks & MAX_FREQ
    }

    /// Sets the policy's counter.
    #[inline]
    pub fn set_freq(&mut self, freq: u8) {
        self.marks = (self.marks & !MAX_FREQ) | freq.min(MAX_FREQ);
    }

    /// Whether the policy must keep it out of its lists.
    #[inline]
    pub fn is_held(&self) -> bool {
        self.marks & HELD != 0
    }

    /// Marks it as out of the policy's lists, or in them.
    #[inline]
    pub fn set_held(&mut self, held: bool) {
        self.marks = if held { self.marks | HELD } else { self.marks & !HELD };
    }

    /// Whether it is among the victims being chosen.
    #[inline]
    pub fn is_chosen(&self) -> bool {
        self.marks & CHOSEN != 0
    }

    /// Whether it is pinned.
    #[inline]
    pub fn is_pinned(&self) -> bool {
        self.refs & PINNED != 0
    }

    /// The number of references.
    #[inline]
    pub fn ref_count(&self) -> u32 {
        self.refs & !PINNED
    }
}

/// Metadata that only some policies need; allocated if one does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Facts {
    /// Tokens before it.
    pub context: u32,
    /// Tokens in it.
    pub tokens: u32,
    /// Its layer, if the object is a cell.
    pub layer: u16,
    /// Layers of the model; 0 = the object has all layers.
    pub layers: u16,
    /// Index of its chunk in the sequence.
    pub chunk: u32,
    /// Chunks of that sequence.
    pub chunks: u32,
    /// Recompute cost from the caller; 0 = computed from the tokens.
    pub cost: f32,
    /// Expected time of the next use, from the caller; 0 = unknown.
    pub next_use_ns: i64,
}

// SAFETY: numbers only.
unsafe impl Zeroable for Facts {}

/// The table of objects.
pub struct Objects {
    nodes: Zeroed<Node>,
    facts: Zeroed<Facts>,
    index: Index,
    /// First free slot, chained through `next`. Slots from `fresh` on were never used.
    free: Slot,
    fresh: Slot,
    units: u64,
    leaf_first: bool,
    /// Objects that were inserted before their parent, by the parent's id.
    orphans: Orphans<u64>,
    /// The sessions that use the objects.
    pub sessions: Sessions,
}

impl Objects {
    /// A table for up to `limit` objects. With `leaf_first`, an object may not be evicted before
    /// its children.
    pub fn new(limit: usize, leaf_first: bool, facts: bool) -> Result<Objects> {
        Ok(Objects {
            nodes: Zeroed::new(limit)?,
            facts: Zeroed::new(if facts { limit } else { 0 })?,
            index: Index::new(limit)?,
            free: NONE,
            fresh: 0,
            units: 0,
            leaf_first,
            orphans: Orphans::default(),
            sessions: Sessions::new(limit.min(MAX_SESSIONS))?,
        })
    }

    /// The number of objects.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there is no object.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// The most objects it can hold.
    pub fn limit(&self) -> usize {
        self.nodes.len()
    }

    /// The sum of their sizes.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Whether children are evicted before their parents.
    pub fn leaf_first(&self) -> bool {
        self.leaf_first
    }

    /// Bytes of metadata for each object of a full table.
    pub fn bytes_per_object(&self) -> f64 {
        let limit = self.limit().max(1);
        let facts = if self.facts.is_empty() { 0 } else { size_of::<Facts>() };
        (size_of::<Node>() + facts) as f64 + Index::full_bytes(limit) as f64 / limit as f64
    }

    /// The most objects at any time.
    pub fn most(&self) -> usize {
        self.fresh as usize
    }

    /// Bytes in use.
    pub fn used_bytes(&self) -> u64 {
        let rows = self.nodes.front_bytes(self.most()) + self.facts.front_bytes(self.most());
        rows + self.index.bytes() + self.orphans.used_bytes() + self.sessions.used_bytes()
    }

    /// An object's node.
    #[inline]
    pub fn node(&self, slot: Slot) -> &Node {
        &self.nodes[slot as usize]
    }

    /// An object's node.
    #[inline]
    pub fn node_mut(&mut self, slot: Slot) -> &mut Node {
        &mut self.nodes[slot as usize]
    }

    /// Whether facts are stored.
    pub fn has_facts(&self) -> bool {
        !self.facts.is_empty()
    }

    /// An object's facts; defaults if none are stored.
    pub fn facts(&self, slot: Slot) -> Facts {
        self.facts.get(slot as usize).copied().unwrap_or_default()
    }

    /// An object's facts, mutable, if they are stored.
    pub fn facts_mut(&mut self, slot: Slot) -> Option<&mut Facts> {
        self.facts.get_mut(slot as usize)
    }

    /// Begins to store facts; those of existing objects are unknown.
    pub fn keep_facts(&mut self) -> Result<()> {
        if self.facts.is_empty() {
            self.facts = Zeroed::new(self.limit())?;
        }
        Ok(())
    }

    /// The slot of an id.
    #[inline]
    pub fn find(&self, id: u64) -> Option<Slot> {
        self.index.find(id, |slot| self.nodes[slot as usize].id == id)
    }

    /// The slots of many ids, NONE for absent ones. Prefetches the memory of several ids together.
    pub fn find_many(&self, ids: &[u64], slots: &mut [Slot]) {
        const GROUP: usize = 64;
        if let ([id], [slot]) = (ids, &mut *slots) {
            *slot = self.find(*id).unwrap_or(NONE);
            return;
        }
        let Some(last) = self.nodes.len().checked_sub(1) else { return slots.fill(NONE) };
        // Branch-free: which ids are present is unpredictable. Whether the index guesses right is
        // predictable.
        let last = last as Slot;
        for (ids, slots) in ids.chunks(GROUP).zip(slots.chunks_mut(GROUP)) {
            ids.iter().for_each(|&id| self.index.prefetch(id));
            for (slot, &id) in slots.iter_mut().zip(ids) {
                *slot = self.index.guess(id);
                self.prefetch((*slot).min(last));
            }
            for (slot, &id) in slots.iter_mut().zip(ids) {
                let other = self.nodes[(*slot).min(last) as usize].id != id;
                if (other | (*slot == UNSURE)) & (*slot != NONE) {
                    *slot = self.find(id).unwrap_or(NONE);
                }
            }
        }
    }

    /// Prefetches a node; does nothing for NONE.
    #[inline]
    pub fn prefetch(&self, slot: Slot) {
        if let Some(node) = self.nodes.get(slot as usize) {
            // It may span two cache lines.
            prefetch(std::slice::from_ref(&node.id), 0);
            prefetch(std::slice::from_ref(&node.marks), 0);
        }
    }

    /// Prefetches the memory that the removal of an object needs, and its hotter neighbour. Returns
    /// the object's id, if the slot exists.
    pub fn prefetch_victim(&self, slot: Slot) -> Option<u64> {
        let node = self.nodes.get(slot as usize)?;
        self.index.prefetch(node.id);
        prefetch(&self.nodes, node.prev as usize);
        Some(node.id)
    }

    /// Prefetches the links of an object; does nothing for NONE.
    #[inline]
    pub fn prefetch_links(&self, slot: Slot) {
        if let Some(node) = self.nodes.get(slot as usize) {
            prefetch(std::slice::from_ref(&node.prev), 0);
        }
    }

    /// Prefetches the index bucket of an id.
    #[inline]
    pub fn prefetch_id(&self, id: u64) {
        self.index.prefetch(id);
    }

    /// Adds an object. Fails if it is in the table. The parent is linked only with `leaf_first`.
    pub fn insert(&mut self, id: u64, parent: Slot, units: u64, facts: &Facts) -> Result<Slot> {
        if units > MAX_UNITS {
            fail!(Limit, "object {id} has a size of {units}, the limit is {MAX_UNITS}");
        }
        let recycled = self.free != NONE;
        let slot = if recycled { self.free } else { self.fresh };
        let Objects { index, nodes, .. } = self;
        match index.insert_new(id, slot, |s| nodes[s as usize].id == id) {
            Ok(()) => {}
            Err(NONE) => fail!(Limit, "the table is full: it holds {} objects", nodes.len()),
            Err(_) => fail!(Invalid, "object {id} is in the table already"),
        }
        match recycled {
            true => self.free = self.nodes[slot as usize].next,
            false => self.fresh += 1,
        }
        self.nodes[slot as usize] = Node {
            id,
            stamp: 0,
            prev: NONE,
            next: NONE,
            parent: NONE,
            children: 0,
            units: units as u32,
            refs: 0,
            session: NONE,
            hits: 0,
            tag: 0,
            marks: LIVE,
        };
        self.units += units;
        if let Some(known) = self.facts.get_mut(slot as usize) {
            *known = *facts;
        }
        if self.leaf_first {
            self.attach(slot, parent);
        }
        Ok(slot)
    }

    /// The same with the parent's id; the parent may be inserted later.
    pub fn insert_with_parent_id(
        &mut self,
        id: u64,
        parent: Option<u64>,
        units: u64,
        facts: &Facts,
    ) -> Result<Slot> {
        let found = parent.and_then(|parent| self.find(parent)).unwrap_or(NONE);
        let slot = self.insert(id, found, units, facts)?;
        if let Some(parent) = parent.filter(|_| self.leaf_first && found == NONE) {
            self.orphans.add(slot, parent);
        }
        Ok(slot)
    }

    /// Links the orphans of an object that was inserted.
    #[inline]
    pub fn link_orphans(&mut self, slot: Slot) {
        if !self.orphans.is_empty() {
            self.link_orphans_of(slot);
        }
    }

    #[cold]
    fn link_orphans_of(&mut self, slot: Slot) {
        let id = self.node(slot).id;
        let mut from = 0;
        while let Some(child) = self.orphans.next(&id, from) {
            from = child + 1;
            if !self.is_descendant(slot, child) {
                self.orphans.remove(child);
                self.attach(child, slot);
            }
        }
    }

    /// Whether `slot` is `above` or a descendant of it.
    fn is_descendant(&self, slot: Slot, above: Slot) -> bool {
        let up = |&at: &Slot| Some(self.node(at).parent).filter(|&at| at != NONE);
        std::iter::successors(Some(slot), up).any(|at| at == above)
    }

    /// Removes an object without children and frees its slot.
    pub fn remove(&mut self, slot: Slot) {
        self.detach(slot);
        if !self.orphans.is_empty() {
            self.orphans.remove(slot);
        }
        let Node { id, units, children, session, .. } = self.nodes[slot as usize];
        assert_eq!(children, 0, "object {id} has children");
        let removed = self.index.remove(id, |s| s == slot);
        assert_eq!(removed, Some(slot), "the index lost object {id}");
        self.units -= u64::from(units);
        self.sessions.leave(session);
        let node = &mut self.nodes[slot as usize];
        node.marks = 0;
        node.next = std::mem::replace(&mut self.free, slot);
    }

    /// Unlinks an object from its parent. Returns the parent, if that may be evicted now.
    pub fn detach(&mut self, slot: Slot) -> Option<Slot> {
        let node = &mut self.nodes[slot as usize];
        let parent = std::mem::replace(&mut node.parent, NONE);
        if parent == NONE {
            return None;
        }
        let above = &mut self.nodes[parent as usize];
        above.children -= 1;
        (above.children == 0 && above.refs == 0).then_some(parent)
    }

    /// Undoes `detach`.
    pub fn attach(&mut self, slot: Slot, parent: Slot) {
        if parent != NONE {
            self.nodes[slot as usize].parent = parent;
            self.nodes[parent as usize].children += 1;
        }
    }

    /// Sets the session that used an object last.
    #[inline]
    pub fn set_session(&mut self, slot: Slot, session: Slot) {
        let node = &mut self.nodes[slot as usize];
        if node.session != session {
            let before = std::mem::replace(&mut node.session, session);
            self.sessions.leave(before);
            self.sessions.join(session);
        }
    }

    /// Counts a use of an object, by a session if there is one.
    #[inline]
    pub fn count_use(&mut self, slot: Slot, session: Slot) {
        let node = &mut self.nodes[slot as usize];
        node.hits = node.hits.saturating_add(1);
        if session != NONE {
            self.set_session(slot, session);
        }
    }

    /// Marks an object as a chosen victim, or clears the mark.
    pub fn set_chosen(&mut self, slot: Slot, chosen: bool) {
        let marks = &mut self.nodes[slot as usize].marks;
        *marks = if chosen { *marks | CHOSEN } else { *marks & !CHOSEN };
    }

    /// Whether an object must stay: referenced, pinned, or with children.
    #[inline]
    pub fn is_blocked(&self, slot: Slot) -> bool {
        let node = &self.nodes[slot as usize];
        node.refs != 0 || (self.leaf_first && node.children != 0)
    }

    /// Adds a reference.
    pub fn acquire(&mut self, slot: Slot) -> Result<()> {
        let node = &mut self.nodes[slot as usize];
        if node.ref_count() == MAX_REFS {
            fail!(Limit, "object {} has {MAX_REFS} references, the limit", node.id);
        }
        node.refs += 1;
        Ok(())
    }

    /// Removes a reference; returns whether the object may be evicted now.
    pub fn release(&mut self, slot: Slot) -> Result<bool> {
        let node = &mut self.nodes[slot as usize];
        if node.ref_count() == 0 {
            fail!(State, "object {} has no reference to release", node.id);
        }
        node.refs -= 1;
        Ok(!self.is_blocked(slot))
    }

    /// Pins or unpins; returns whether the object may be evicted now and could not before.
    pub fn set_pinned(&mut self, slot: Slot, pinned: bool) -> bool {
        let node = &mut self.nodes[slot as usize];
        let was = node.is_pinned();
        node.refs = if pinned { node.refs | PINNED } else { node.refs & !PINNED };
        was && !pinned && !self.is_blocked(slot)
    }

    /// Changes the size in the table. Lists with sums of sizes must be updated first.
    pub fn set_units(&mut self, slot: Slot, units: u32) {
        let node = &mut self.nodes[slot as usize];
        self.units = self.units - u64::from(node.units) + u64::from(units);
        node.units = units;
    }

    /// All slots in use, in no particular order.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        (0..self.fresh).filter(|&slot| self.nodes[slot as usize].marks & LIVE != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;

    fn table(limit: usize) -> Objects {
        Objects::new(limit, true, true).expect("small")
    }

    #[test]
    fn slots_are_reused_and_limits_hold() {
        let mut objects = table(2);
        let a = objects.insert(10, NONE, 3, &Facts::default()).expect("room");
        let b = objects.insert(11, a, 4, &Facts { tokens: 9, ..Facts::default() }).expect("room");
        let full = objects.insert(12, NONE, 1, &Facts::default()).expect_err("full");
        assert_eq!(full.status(), Status::Limit);
        assert_eq!((objects.len(), objects.units()), (2, 7));
        assert!(objects.is_blocked(a) && !objects.is_blocked(b));
        assert_eq!(objects.facts(b).tokens, 9);
        assert_eq!(objects.detach(b), Some(a));
        objects.remove(b);
        assert_eq!(objects.find(11), None);
        let c = objects.insert(12, a, 1, &Facts::default()).expect("room again");
        assert_eq!((c, objects.units()), (b, 4));
        assert!(objects.insert(13, NONE, MAX_UNITS + 1, &Facts::default()).is_err());
    }

    #[test]
    fn orphans_are_linked_when_their_parent_is_inserted() {
        let mut objects = table(4);
        let child = objects.insert_with_parent_id(2, Some(1), 1, &Facts::default()).expect("room");
        let removed =
            objects.insert_with_parent_id(3, Some(1), 1, &Facts::default()).expect("room");
        objects.remove(removed);
        let parent = objects.insert_with_parent_id(1, None, 1, &Facts::default()).expect("room");
        objects.link_orphans(parent);
        assert!(objects.is_blocked(parent) && !objects.is_blocked(child));
        assert_eq!(objects.detach(child), Some(parent));
        objects.remove(child);
        assert!(!objects.is_blocked(parent) && objects.orphans.is_empty());
    }

    #[test]
    fn cycles_of_parents_are_not_linked() {
        let mut objects = table(4);
        let all = [(1, 2), (2, 3), (3, 1), (4, 4)].map(|(id, parent)| {
            let facts = Facts::default();
            let slot = objects.insert_with_parent_id(id, Some(parent), 1, &facts).expect("room");
            objects.link_orphans(slot);
            slot
        });
        let blocked = all.map(|slot| objects.is_blocked(slot));
        assert_eq!(blocked, [true, true, false, false], "c has the end of the path");
    }

    #[test]
    fn references_and_pins_are_counted_apart() {
        let mut objects = table(1);
        let a = objects.insert(1, NONE, 1, &Facts::default()).expect("room");
        assert_eq!(objects.release(a).expect_err("none").status(), Status::State);
        objects.acquire(a).expect("one");
        assert!(!objects.set_pinned(a, true));
        assert!(!objects.release(a).expect("one"), "still pinned");
        assert!(objects.set_pinned(a, false));
        assert!(!objects.set_pinned(a, false), "was not pinned");
    }

    #[test]
    fn without_leaf_first_children_do_not_block_a_parent() {
        let mut objects = Objects::new(3, false, false).expect("small");
        let a = objects.insert(1, NONE, 1, &Facts::default()).expect("room");
        let b = objects.insert(2, a, 1, &Facts::default()).expect("room");
        assert!(!objects.is_blocked(a));
        objects.remove(a);
        assert_eq!(objects.slots().collect::<Vec<_>>(), [b]);
    }

    #[test]
    fn find_many_agrees_with_find() {
        let mut objects = table(1000);
        for id in 0..1000 {
            objects.insert(id * 3, NONE, 1, &Facts::default()).expect("room");
        }
        for len in [0, 1, 2, 64, 65, 3000] {
            let ids: Vec<u64> = (0..len).map(|i| (i * 7) % 3001).collect();
            let mut slots = vec![7; ids.len()];
            objects.find_many(&ids, &mut slots);
            let alone = |&id: &u64| objects.find(id).unwrap_or(NONE);
            assert_eq!(slots, ids.iter().map(alone).collect::<Vec<_>>());
        }
        assert!(objects.insert(3, NONE, 1, &Facts::default()).is_err(), "there already");
    }

    #[test]
    fn objects_are_counted_for_the_session_that_used_them_last() {
        let mut objects = table(2);
        let a = objects.insert(1, NONE, 1, &Facts::default()).expect("room");
        let first = objects.sessions.get_or_add(7);
        let second = objects.sessions.get_or_add(8);
        objects.set_session(a, first);
        objects.set_session(a, second);
        assert_eq!(objects.sessions.of(first).map(|s| s.objects), Some(0));
        assert_eq!(objects.sessions.of(second).map(|s| s.objects), Some(1));
        objects.remove(a);
        assert_eq!(objects.sessions.of(second).map(|s| s.objects), Some(0));
    }
}
