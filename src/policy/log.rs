//! The last evictions: who, why, how it stood, what was freed.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};

/// Most entries that are kept.
pub const MAX_ENTRIES: usize = 1 << 20;

/// One eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Entry {
    /// Counts evictions from 1; a gap means that entries were overwritten.
    pub number: u64,
    /// When, by the caller's clock.
    pub at_ns: i64,
    /// Who.
    pub id: u64,
    /// Its session; meaningful when `has_session` is not 0.
    pub session: u64,
    /// When it was used last, as far as the policy noted.
    pub stamp_ns: i64,
    /// What counted in the policy's order: the less, the earlier it leaves.
    pub score: f64,
    /// Its size.
    pub units: u32,
    /// Uses since it was inserted.
    pub hits: u32,
    /// Which of the policy's queues it came from.
    pub queue: u32,
    /// Not 0: `session` is known.
    pub has_session: u32,
    /// The policy that decided, as its number in the registry.
    pub policy: u32,
    /// Not used yet.
    pub reserved: u32,
}

// SAFETY: numbers only.
unsafe impl Zeroable for Entry {}

/// A bounded ring of them.
pub struct Log {
    entries: Zeroed<Entry>,
    next: u64,
}

impl Log {
    /// Keeps the last `limit`.
    pub fn new(limit: usize) -> Result<Log> {
        Ok(Log { entries: Zeroed::new(limit.min(MAX_ENTRIES))?, next: 1 })
    }

    /// Whether anything is kept.
    #[inline]
    pub fn is_on(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Adds one; its number is set here.
    pub fn add(&mut self, entry: Entry) {
        if self.is_on() {
            let at = (self.next % self.entries.len() as u64) as usize;
            self.entries[at] = Entry { number: self.next, ..entry };
        }
        self.next += 1;
    }

    /// Those from number `from` on that are still there, oldest first.
    pub fn since(&self, from: u64) -> impl Iterator<Item = &Entry> {
        let len = self.entries.len() as u64;
        let oldest = self.next.saturating_sub(len).max(1).max(from);
        let end = if len == 0 { oldest } else { self.next };
        (oldest..end).map(move |n| &self.entries[(n % len) as usize])
    }

    /// The number the next one will have.
    pub fn next_number(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_kept_in_order() {
        let mut log = Log::new(4).expect("small");
        assert_eq!(log.since(0).count(), 0);
        (0..10).for_each(|id| log.add(Entry { id, ..Entry::default() }));
        let ids = |from| log.since(from).map(|e| (e.number, e.id)).collect::<Vec<_>>();
        assert_eq!(ids(0), [(7, 6), (8, 7), (9, 8), (10, 9)]);
        assert_eq!(ids(9), [(9, 8), (10, 9)]);
        assert_eq!(ids(11), []);
        assert!(!Log::new(0).expect("none").is_on());
    }
}
