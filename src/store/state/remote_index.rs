//! What was heard of names lately. It may be stale, and a few names may be taken for others:
//! that costs a request, or a miss.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::tier::remote::Name;

/// Names that share a place.
const WAYS: usize = 4;
/// The nanoseconds of a tick: a name's age is counted in these.
const TICK_NS: u64 = 1 << 26;

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Entry {
    tag: u64,
    /// When it was heard, in ticks plus one; 0 = never.
    tick: u32,
    is_there: u32,
}

// SAFETY: integers only.
unsafe impl Zeroable for Entry {}

/// A table of names.
pub(super) struct Known {
    entries: Zeroed<Entry>,
    sets: usize,
}

impl Known {
    /// For about so many names.
    pub fn new(names: usize) -> Result<Known> {
        let sets = (names / WAYS).max(1).next_power_of_two();
        Ok(Known { entries: Zeroed::new(sets * WAYS)?, sets })
    }

    /// Its memory.
    pub fn bytes(&self) -> u64 {
        (self.entries.len() * size_of::<Entry>()) as u64
    }

    /// What was heard of a name not longer ago than that: there, or not.
    pub fn get(&self, name: &Name, now_ns: u64, fresh_ns: u64, absent_ns: u64) -> Option<bool> {
        let (first, tag) = self.place(name);
        let entry = self.entries[first..first + WAYS].iter().find(|one| one.tag == tag)?;
        let heard = u64::from(entry.tick.checked_sub(1)?);
        let age_ns = (now_ns / TICK_NS).saturating_sub(heard) * TICK_NS;
        let is_there = entry.is_there != 0;
        (age_ns <= if is_there { fresh_ns } else { absent_ns }).then_some(is_there)
    }

    /// Whether a name was heard to be there at that time or later.
    pub fn was_there_since(&self, name: &Name, since_ns: u64) -> bool {
        let (first, tag) = self.place(name);
        let entry = self.entries[first..first + WAYS].iter().find(|one| one.tag == tag);
        entry.is_some_and(|one| one.is_there != 0 && u64::from(one.tick) > since_ns / TICK_NS)
    }

    /// Notes what was heard; the oldest of its place is forgotten.
    pub fn put(&mut self, name: &Name, is_there: bool, now_ns: u64) {
        let (first, tag) = self.place(name);
        let set = &mut self.entries[first..first + WAYS];
        let at = match set.iter().position(|one| one.tag == tag) {
            Some(at) => at,
            None => (0..WAYS).min_by_key(|&at| set[at].tick).unwrap_or(0),
        };
        let tick = u32::try_from(now_ns / TICK_NS).unwrap_or(u32::MAX - 1).saturating_add(1);
        set[at] = Entry { tag, tick, is_there: u32::from(is_there) };
    }

    /// The first entry of a name's place, and what stands for it there.
    fn place(&self, name: &Name) -> (usize, u64) {
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&name.hash[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let tag = word(8) ^ name.tenant.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((word(0) as usize & (self.sets - 1)) * WAYS, tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u64) -> Name {
        let mut hash = [0; 20];
        hash[..8].copy_from_slice(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
        hash[8..16].copy_from_slice(&n.to_le_bytes());
        Name { tenant: 0, hash }
    }

    #[test]
    fn what_was_heard_is_known_until_it_is_old() {
        let mut known = Known::new(64).expect("small");
        let (second, fresh, absent) = (1_000_000_000, 60_000_000_000, 5_000_000_000);
        known.put(&name(1), true, second);
        known.put(&name(2), false, second);
        let get = |known: &Known, n, now| known.get(&name(n), now, fresh, absent);
        assert_eq!((get(&known, 1, second), get(&known, 2, second)), (Some(true), Some(false)));
        assert_eq!(get(&known, 3, second), None);
        assert_eq!((get(&known, 1, 10 * second), get(&known, 2, 10 * second)), (Some(true), None));
        assert_eq!(get(&known, 1, 70 * second), None);
        let since = |n, at| known.was_there_since(&name(n), at);
        assert!(since(1, second) && !since(1, 2 * second) && !since(2, 0) && !since(3, 0));
        known.put(&name(1), false, 70 * second);
        assert_eq!(get(&known, 1, 70 * second), Some(false));
        let of_another = Name { tenant: 5, ..name(1) };
        assert_eq!(known.get(&of_another, 70 * second, fresh, absent), None);
    }

    #[test]
    fn the_oldest_is_forgotten() {
        let mut known = Known::new(4).expect("small");
        (0..5).for_each(|n| known.put(&name(n), true, (n + 1) << 30));
        let get = |n| known.get(&name(n), 5 << 30, u64::MAX, 0);
        assert_eq!((get(0), get(1), get(4)), (None, Some(true), Some(true)));
    }
}
