//! A bounded, lossy set of numbers with a time each: what an engine remembers of the remote.

use kvtier::base::status::Result;
use kvtier::meta::index;
use kvtier::trace::study::zeros;

const WAYS: usize = 8;
/// A tick is about a millisecond; ages are distinguishable over 26 days.
const TICK_BITS: u32 = 20;

/// A set-associative table. In a full set the oldest entry is replaced.
pub struct TimedSet {
    /// Number + 1 in the upper half, ticks in the lower; 0 = free.
    entries: Vec<u64>,
}

fn tick(ns: i64) -> u64 {
    (ns.max(0) as u64 >> TICK_BITS) & u64::from(u32::MAX)
}

impl TimedSet {
    /// A table of about this many entries; none below the size of one set.
    pub fn new(entries: usize) -> Result<TimedSet> {
        Ok(TimedSet { entries: zeros(entries / WAYS * WAYS)? })
    }

    fn set(&mut self, number: u32) -> &mut [u64] {
        let sets = self.entries.len() / WAYS;
        let set = (u128::from(index::hash(u64::from(number))) * sets as u128) >> 64;
        let first = set as usize * WAYS;
        self.entries.get_mut(first..first + WAYS).unwrap_or(&mut [])
    }

    fn find(&mut self, number: u32) -> Option<&mut u64> {
        let name = u64::from(number) + 1;
        self.set(number).iter_mut().find(|entry| **entry >> 32 == name)
    }

    /// Whether a number was inserted less than `age_ns` ago.
    pub fn is_fresh(&mut self, number: u32, now_ns: i64, age_ns: i64) -> bool {
        let least = tick(now_ns.saturating_sub(age_ns));
        self.find(number).is_some_and(|entry| {
            let time = *entry & u64::from(u32::MAX);
            age_ns > 0 && (time > least || now_ns < age_ns)
        })
    }

    /// Whether a number is in the table.
    pub fn contains(&mut self, number: u32) -> bool {
        self.find(number).is_some()
    }

    /// Inserts a number, or updates its time.
    pub fn insert(&mut self, number: u32, now_ns: i64) {
        let entry = (u64::from(number) + 1) << 32 | tick(now_ns);
        if let Some(old) = self.find(number) {
            *old = entry;
            return;
        }
        // A free entry has the lowest tick.
        let age = |entry: &u64| (*entry != 0, *entry & u64::from(u32::MAX));
        if let Some(oldest) = self.set(number).iter_mut().min_by_key(|entry| age(entry)) {
            *oldest = entry;
        }
    }

    /// Removes a number.
    pub fn remove(&mut self, number: u32) {
        if let Some(entry) = self.find(number) {
            *entry = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_age_and_the_oldest_are_replaced() {
        let second = 1_000_000_000;
        let mut set = TimedSet::new(64).expect("memory");
        set.insert(7, second);
        assert!(set.is_fresh(7, second, second / 100) && set.is_fresh(7, 5 * second, 5 * second));
        assert!(!set.is_fresh(7, 6 * second, 5 * second) && set.contains(7));
        assert!(!set.is_fresh(7, second, 0) && !set.contains(8));
        set.insert(7, 6 * second);
        assert!(set.is_fresh(7, 7 * second, 5 * second));
        set.remove(7);
        assert!(!set.contains(7));
        for number in 0..1000 {
            set.insert(number, i64::from(number) * second);
            assert!(set.contains(number));
        }
        let left = (0..1000).filter(|&n| set.contains(n)).count();
        assert!(left <= 64 && left > 48, "{left}");
        let mut none = TimedSet::new(7).expect("memory");
        none.insert(1, 0);
        assert!(!none.contains(1));
    }
}
