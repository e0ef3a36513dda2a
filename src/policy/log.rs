//! Log of the last evictions.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};

/// Most entries kept.
pub const MAX_ENTRIES: usize = 1 << 20;

/// One eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Entry {
    /// Counts evictions from 1; a gap means that entries were overwritten.
    pub number: u64,
    /// Time of the eviction, by the caller's clock.
    pub at_ns: i64,
    /// Id of the object.
    pub id: u64,
    /// Its session; valid if `has_session` is not 0.
    pub session: u64,
    /// Time of the last use, as far as the policy knows it.
    pub stamp_ns: i64,
    /// Score in the policy's order; the lowest is evicted first.
    pub score: f64,
    /// Its size in units.
    pub units: u32,
    /// Uses since it was inserted.
    pub hits: u32,
    /// The policy's queue that it was in.
    pub queue: u32,
    /// Not 0: `session` is known.
    pub has_session: u32,
    /// Number in the registry of the policy that decided.
    pub policy: u32,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: numbers only.
unsafe impl Zeroable for Entry {}

/// A bounded ring of entries.
pub struct Log {
    entries: Zeroed<Entry>,
    next: u64,
}

impl Log {
    /// A log that keeps the last `limit` entries.
    pub fn new(limit: usize) -> Result<Log> {
        Ok(Log { entries: Zeroed::new(limit.min(MAX_ENTRIES))?, next: 1 })
    }

    /// Whether entries are kept.
    #[inline]
    pub fn is_on(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Adds an entry and sets its number.
    pub fn add(&mut self, entry: Entry) {
        if self.is_on() {
            let at = (self.next % self.entries.len() as u64) as usize;
            self.entries[at] = Entry { number: self.next, ..entry };
        }
        self.next += 1;
    }

    /// Entries from number `from` on that are still kept, oldest first.
    pub fn since(&self, from: u64) -> impl Iterator<Item = &Entry> {
        let len = self.entries.len() as u64;
        let oldest = self.next.saturating_sub(len).max(1).max(from);
        let end = if len == 0 { oldest } else { self.next };
        (oldest..end).map(move |n| &self.entries[(n % len) as usize])
    }

    /// Number of the next entry.
    pub fn next_number(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_entries_are_kept_in_order() {
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
