//! A table of slots with generations, behind handles and op references.
//!
//! A [`Key`] names a slot and a generation. Slots are never unmapped, so a stale key is looked
//! up safely and does not match. [`Slab::pin`] counts a user; the last pin drops a removed value.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr;

use crate::base::status::{Result, Status};
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Bits of a slot index in a key.
pub const SLOT_BITS: u32 = 20;
/// Bits of a generation in a key.
pub const GENERATION_BITS: u32 = 36;
/// Most live objects of one table.
pub const MAX_SLOTS: u32 = 1 << SLOT_BITS;

#[cfg(not(feature = "shuttle"))]
const SEGMENT_SLOTS: u32 = 256;
#[cfg(not(feature = "shuttle"))]
const SEGMENTS: usize = (MAX_SLOTS / SEGMENT_SLOTS) as usize;

// A modelled atomic is large and created anew for every interleaving.
#[cfg(feature = "shuttle")]
const SEGMENT_SLOTS: u32 = 4;
#[cfg(feature = "shuttle")]
const SEGMENTS: usize = 8;
const NIL: u32 = u32::MAX;

// The word of a slot: pins in the low bits, then flags, then the generation.
const PIN_BITS: u32 = 24;
const PINS: u64 = (1 << PIN_BITS) - 1;
const LIVE: u64 = 1 << 24;
const REMOVED: u64 = 1 << 25;
const POISON: u64 = 1 << 26;
const FINAL: u64 = 1 << 27;
const FLAGS: u64 = LIVE | REMOVED | POISON | FINAL;
const GENERATION_SHIFT: u32 = 28;
const MAX_GENERATION: u64 = (1 << GENERATION_BITS) - 1;

/// The slot and generation of one object. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(u64);

impl Key {
    /// The low 56 bits that a handle carries.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// A key from untrusted bits.
    pub fn from_bits(bits: u64) -> Option<Key> {
        let key = Key(bits & ((1 << (SLOT_BITS + GENERATION_BITS)) - 1));
        (key.0 == bits && key.generation() != 0).then_some(key)
    }

    fn new(slot: u32, generation: u64) -> Key {
        Key((generation << SLOT_BITS) | u64::from(slot))
    }

    fn slot(self) -> u32 {
        (self.0 & u64::from(MAX_SLOTS - 1)) as u32
    }

    fn generation(self) -> u64 {
        self.0 >> SLOT_BITS
    }
}

struct Slot<T> {
    word: AtomicU64,
    next_free: AtomicU32,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: the value of a slot is reached through pins only. They share it (T: Sync), and the
// last one drops it (T: Send).
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

struct Free {
    head: u32,
    tail: u32,
    /// Slots that exist; every segment below is mapped.
    grown: u32,
    live: u32,
}

/// A table of objects, usable as a static.
pub struct Slab<T> {
    segments: [AtomicPtr<Slot<T>>; SEGMENTS],
    free: Mutex<Free>,
}

// SAFETY: several threads share references to values (T: Sync), and the thread that unpins last
// drops a value (T: Send). Slot words order the accesses.
unsafe impl<T: Send + Sync> Sync for Slab<T> {}
// SAFETY: as above; the table itself is atomics and a lock.
unsafe impl<T: Send + Sync> Send for Slab<T> {}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab::new()
    }
}

impl<T> Slab<T> {
    /// An empty table.
    #[cfg(not(feature = "shuttle"))]
    pub const fn new() -> Slab<T> {
        Slab {
            segments: [const { AtomicPtr::new(ptr::null_mut()) }; SEGMENTS],
            free: Mutex::new(Free { head: NIL, tail: NIL, grown: 0, live: 0 }),
        }
    }

    /// An empty table.
    #[cfg(feature = "shuttle")]
    pub fn new() -> Slab<T> {
        Slab {
            segments: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            free: Mutex::new(Free { head: NIL, tail: NIL, grown: 0, live: 0 }),
        }
    }

    fn slot(&self, index: u32) -> Option<&Slot<T>> {
        let segment = self.segments.get((index / SEGMENT_SLOTS) as usize)?;
        let base = segment.load(Ordering::Acquire);
        if base.is_null() {
            return None;
        }
        // SAFETY: a published segment has SEGMENT_SLOTS slots and is freed only with the
        // table.
        Some(unsafe { &*base.add((index % SEGMENT_SLOTS) as usize) })
    }

    /// Live objects, including removed ones that are still pinned.
    pub fn live(&self) -> u32 {
        self.free.lock().live
    }

    /// Mapped bytes; the table never shrinks.
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.free.lock().grown) * size_of::<Slot<T>>() as u64
    }

    /// Takes a free slot, or maps another segment. The free list is first in, first out:
    /// generations advance evenly, and a stale key does not match again for long.
    fn take_slot(&self) -> Result<u32> {
        let mut free = self.free.lock();
        if free.head == NIL {
            self.grow(&mut free)?;
        }
        let index = free.head;
        let slot = self.slot(index).ok_or(Status::Limit)?;
        free.head = slot.next_free.load(Ordering::Relaxed);
        if free.head == NIL {
            free.tail = NIL;
        }
        free.live += 1;
        Ok(index)
    }

    fn grow(&self, free: &mut Free) -> Result<()> {
        let first = free.grown;
        let Some(entry) = self.segments.get((first / SEGMENT_SLOTS) as usize) else {
            return Err(Status::Limit.into());
        };
        let mut slots: Vec<Slot<T>> = Vec::new();
        slots.try_reserve_exact(SEGMENT_SLOTS as usize).map_err(|_| Status::NoMem)?;
        for i in 0..SEGMENT_SLOTS {
            let next = if i + 1 < SEGMENT_SLOTS { first + i + 1 } else { NIL };
            slots.push(Slot {
                word: AtomicU64::new(1 << GENERATION_SHIFT),
                next_free: AtomicU32::new(next),
                value: UnsafeCell::new(MaybeUninit::uninit()),
            });
        }
        let base = Box::into_raw(slots.into_boxed_slice()).cast::<Slot<T>>();
        entry.store(base, Ordering::Release);
        free.grown = first + SEGMENT_SLOTS;
        free.head = first;
        free.tail = first + SEGMENT_SLOTS - 1;
        Ok(())
    }

    fn give_slot(&self, index: u32, retire: bool) {
        let mut free = self.free.lock();
        free.live -= 1;
        if retire {
            return; // its generations are used up: the slot is never used again
        }
        if let Some(slot) = self.slot(index) {
            slot.next_free.store(NIL, Ordering::Relaxed);
        }
        match free.tail {
            NIL => free.head = index,
            tail => {
                if let Some(last) = self.slot(tail) {
                    last.next_free.store(index, Ordering::Relaxed);
                }
            }
        }
        free.tail = index;
    }

    /// Inserts a value and returns its key.
    pub fn insert(&self, value: T) -> Result<Key> {
        self.insert_with(|_| value)
    }

    /// Inserts a value that contains its own key.
    pub fn insert_with(&self, make: impl FnOnce(Key) -> T) -> Result<Key> {
        Ok(self.insert_live(make, LIVE)?.0)
    }

    /// Inserts a value that contains its own key, and counts a user of it.
    pub fn insert_pinned(&self, make: impl FnOnce(Key) -> T) -> Result<Pin<'_, T>> {
        let (key, slot) = self.insert_live(make, LIVE + 1)?;
        Ok(Pin { slab: self, slot, index: key.slot() })
    }

    /// Inserts a value and adds `live` to the word of its slot, which is not live.
    fn insert_live(&self, make: impl FnOnce(Key) -> T, live: u64) -> Result<(Key, &Slot<T>)> {
        let index = self.take_slot()?;
        let slot = self.slot(index).ok_or(Status::Limit)?;
        let generation = slot.word.load(Ordering::Acquire) >> GENERATION_SHIFT;
        let key = Key::new(index, generation);
        // SAFETY: the slot came off the free list and is not LIVE, so no other thread reads
        // its value; a stale pin only touches the word.
        unsafe { (*slot.value.get()).write(make(key)) };
        // Pins with stale keys may count in the word meanwhile.
        slot.word.fetch_add(live, Ordering::Release);
        Ok((key, slot))
    }

    /// Counts a user of an object. `None` if the key is stale.
    #[inline]
    pub fn pin(&self, key: Key) -> Option<Pin<'_, T>> {
        let slot = self.slot(key.slot())?;
        let word = slot.word.fetch_add(1, Ordering::Acquire);
        let pin = Pin { slab: self, slot, index: key.slot() };
        let fits =
            word >> GENERATION_SHIFT == key.generation() && word & (LIVE | REMOVED | FINAL) == LIVE;
        fits.then_some(pin) // the drop undoes a pin that does not match
    }

    /// Refuses new pins of an object; the last pin drops it. False if the key is stale.
    pub fn remove(&self, key: Key) -> bool {
        let Some(pin) = self.pin(key) else { return false };
        pin.remove()
    }

    /// Like [`Slab::pin`], for internal use: also pins a removed object that other pins keep
    /// alive.
    pub fn pin_inside(&self, key: Key) -> Option<Pin<'_, T>> {
        let pin = self.pin_any(self.slot(key.slot())?, key.slot())?;
        let generation = pin.slot.word.load(Ordering::Relaxed) >> GENERATION_SHIFT;
        (generation == key.generation()).then_some(pin)
    }

    /// Calls `see` for every live object, including removed ones that are still pinned. Objects
    /// inserted or removed meanwhile may be missed.
    pub fn visit(&self, mut see: impl FnMut(&Pin<'_, T>)) {
        let grown = self.free.lock().grown;
        for index in 0..grown {
            if let Some(pin) = self.slot(index).and_then(|slot| self.pin_any(slot, index)) {
                see(&pin);
            }
        }
    }

    fn pin_any<'a>(&'a self, slot: &'a Slot<T>, index: u32) -> Option<Pin<'a, T>> {
        let mut word = slot.word.load(Ordering::Acquire);
        loop {
            let held = word & REMOVED == 0 || word & PINS > 0;
            if word & (LIVE | FINAL) != LIVE || !held {
                return None;
            }
            match slot.word.compare_exchange(word, word + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Pin { slab: self, slot, index }),
                Err(now) => word = now,
            }
        }
    }

    #[cold]
    fn finish(&self, slot: &Slot<T>, index: u32, word: u64) {
        // Two late unpins may both see zero; one of them wins.
        if slot
            .word
            .compare_exchange(word, word | FINAL, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            return;
        }
        // SAFETY: REMOVED refuses new users, no pins are left, and this thread has set FINAL:
        // it alone owns the value. The value is moved out, then dropped below.
        let value = unsafe { (*slot.value.get()).assume_init_read() };
        let generation = word >> GENERATION_SHIFT;
        let retire = generation >= MAX_GENERATION;
        // Clear the flags and advance the generation; stale pins keep their count.
        let flags = slot.word.load(Ordering::Relaxed) & FLAGS;
        let step: u64 = if retire { 0 } else { 1 << GENERATION_SHIFT };
        slot.word.fetch_add(step.wrapping_sub(flags), Ordering::AcqRel);
        self.give_slot(index, retire);
        drop(value);
    }
}

impl<T> Drop for Slab<T> {
    fn drop(&mut self) {
        for segment in &self.segments {
            let base = segment.load(Ordering::Acquire);
            if base.is_null() {
                continue;
            }
            // SAFETY: exclusive access (drop); the pointer came from a boxed slice
            // of exactly this length; LIVE says which values are initialised.
            unsafe {
                for i in 0..SEGMENT_SLOTS as usize {
                    let slot = &mut *base.add(i);
                    if slot.word.load(Ordering::Acquire) & LIVE != 0 {
                        slot.value.get_mut().assume_init_drop();
                    }
                }
                let slice = ptr::slice_from_raw_parts_mut(base, SEGMENT_SLOTS as usize);
                drop(Box::from_raw(slice));
            }
        }
    }
}

/// A counted use of an object in a [`Slab`].
pub struct Pin<'a, T> {
    slab: &'a Slab<T>,
    slot: &'a Slot<T>,
    index: u32,
}

impl<T> Pin<'_, T> {
    /// Whether a panic has damaged the object.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.slot.word.load(Ordering::Relaxed) & POISON != 0
    }

    /// Marks the object as damaged by a panic.
    pub fn poison(&self) {
        self.slot.word.fetch_or(POISON, Ordering::AcqRel);
    }

    /// Refuses new pins; the last pin drops the object. False if it was removed before.
    pub fn remove(&self) -> bool {
        self.slot.word.fetch_or(REMOVED, Ordering::AcqRel) & REMOVED == 0
    }
}

impl<T> Clone for Pin<'_, T> {
    fn clone(&self) -> Self {
        let word = self.slot.word.fetch_add(1, Ordering::Relaxed);
        assert!(word & PINS < PINS / 2, "pin count of a slot ran away");
        Pin { slab: self.slab, slot: self.slot, index: self.index }
    }
}

impl<T> std::ops::Deref for Pin<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this pin was taken while the slot was LIVE and prevents `finish`, so the
        // value is initialised and may be shared.
        unsafe { (*self.slot.value.get()).assume_init_ref() }
    }
}

impl<T> Drop for Pin<'_, T> {
    #[inline]
    fn drop(&mut self) {
        let word = self.slot.word.fetch_sub(1, Ordering::AcqRel) - 1;
        if word & (PINS | REMOVED | FINAL | LIVE) == REMOVED | LIVE {
            self.slab.finish(self.slot, self.index, word);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::base::sync::Arc;

    #[test]
    fn a_key_matches_until_its_object_is_removed() {
        let slab = Slab::new();
        let key = slab.insert(7).unwrap();
        assert_eq!(*slab.pin(key).unwrap(), 7);
        assert!(slab.remove(key));
        assert!(!slab.remove(key));
        assert!(slab.pin(key).is_none());
        assert_eq!(slab.live(), 0);
    }

    #[test]
    fn reuse_changes_the_generation() {
        let slab = Slab::new();
        let keys: Vec<_> = (0..SEGMENT_SLOTS).map(|i| slab.insert(i).unwrap()).collect();
        keys.iter().for_each(|k| assert!(slab.remove(*k)));
        let again = slab.insert(1).unwrap();
        assert_eq!(again.slot(), keys[0].slot());
        assert_ne!(again, keys[0]);
        assert!(slab.pin(keys[0]).is_none());
    }

    #[test]
    fn a_removed_value_lives_until_its_last_pin_drops() {
        let slab = Slab::new();
        let probe = Arc::new(());
        let key = slab.insert(probe.clone()).unwrap();
        let pin = slab.pin(key).unwrap();
        let second = pin.clone();
        assert!(slab.remove(key));
        drop(pin);
        assert_eq!(Arc::strong_count(&probe), 2);
        drop(second);
        assert_eq!(Arc::strong_count(&probe), 1);
    }

    #[test]
    fn poison_ends_with_the_object() {
        let slab = Slab::new();
        let key = slab.insert(()).unwrap();
        slab.pin(key).unwrap().poison();
        assert!(slab.pin(key).unwrap().is_poisoned());
        slab.remove(key);
        let keys: Vec<_> = (0..SEGMENT_SLOTS).map(|_| slab.insert(()).unwrap()).collect();
        assert!(keys.iter().all(|k| !slab.pin(*k).unwrap().is_poisoned()));
    }

    #[test]
    fn a_full_table_returns_limit() {
        let slab = Slab::new();
        for _ in 0..MAX_SLOTS {
            slab.insert(()).unwrap();
        }
        assert_eq!(slab.insert(()).unwrap_err().status(), Status::Limit);
    }

    #[test]
    fn a_slot_without_generations_is_not_reused() {
        let slab: Slab<u8> = Slab::new();
        let first = slab.insert(1).unwrap();
        slab.remove(first);
        let slot = slab.slot(0).unwrap();
        slot.word.store(MAX_GENERATION << GENERATION_SHIFT, Ordering::SeqCst);
        let last: Vec<_> = (0..SEGMENT_SLOTS).map(|_| slab.insert(2).unwrap()).collect();
        let key = last.into_iter().find(|k| k.slot() == 0).unwrap();
        slab.remove(key);
        let later: Vec<_> = (0..SEGMENT_SLOTS).map(|_| slab.insert(3).unwrap()).collect();
        assert!(later.iter().all(|k| k.slot() != 0));
        assert!(slab.pin(key).is_none());
    }

    #[test]
    fn untrusted_bits_do_not_match() {
        assert!(Key::from_bits(0).is_none());
        assert!(Key::from_bits(u64::MAX).is_none());
        let slab: Slab<u8> = Slab::new();
        let unmapped = Key::from_bits((1 << SLOT_BITS) | 12345).unwrap();
        assert!(slab.pin(unmapped).is_none());
    }

    #[test]
    fn threads_pin_and_remove_without_loss() {
        static SLAB: Slab<Arc<()>> = Slab::new();
        let probe = Arc::new(());
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..2_000 {
                        let key = SLAB.insert(probe.clone()).unwrap();
                        let pin = SLAB.pin(key).unwrap();
                        std::thread::scope(|inner| {
                            inner.spawn(|| SLAB.remove(key));
                        });
                        drop(pin);
                    }
                });
            }
        });
        assert_eq!(Arc::strong_count(&probe), 1);
        assert_eq!(SLAB.live(), 0);
    }
}
