//! What an engine remembers of the remote: names, and when it heard of each. Wrong for a while
//! at worst, and as large as it was made.

use kvtier::base::status::Result;
use kvtier::meta::index;
use kvtier::trace::study::zeros;

const WAYS: usize = 8;
/// A tick is about a millisecond; ages are told apart over 26 days.
const TICK_BITS: u32 = 20;

/// A set-associative table: of a full set the entry that was told first leaves.
pub struct Known {
    /// Number + 1 in the upper half, ticks in the lower; 0 = free.
    entries: Vec<u64>,
}

fn tick(ns: i64) -> u64 {
    (ns.max(0) as u64 >> TICK_BITS) & u64::from(u32::MAX)
}

impl Known {
    /// Remembers about so many; none if there are fewer than a set has.
    pub fn new(entries: usize) -> Result<Known> {
        Ok(Known { entries: zeros(entries / WAYS * WAYS)? })
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

    /// Whether it was told of this number, and not `age_ns` ago.
    pub fn is_fresh(&mut self, number: u32, now_ns: i64, age_ns: i64) -> bool {
        let least = tick(now_ns.saturating_sub(age_ns));
        self.find(number).is_some_and(|entry| {
            let told = *entry & u64::from(u32::MAX);
            age_ns > 0 && (told > least || now_ns < age_ns)
        })
    }

    /// Whether it was told of it at all.
    pub fn has(&mut self, number: u32) -> bool {
        self.find(number).is_some()
    }

    /// Remembers a number.
    pub fn tell(&mut self, number: u32, now_ns: i64) {
        let entry = (u64::from(number) + 1) << 32 | tick(now_ns);
        if let Some(old) = self.find(number) {
            *old = entry;
            return;
        }
        // A free entry has the least tick of all.
        let told = |entry: &u64| (*entry != 0, *entry & u64::from(u32::MAX));
        if let Some(oldest) = self.set(number).iter_mut().min_by_key(|entry| told(entry)) {
            *oldest = entry;
        }
    }

    /// Forgets a number.
    pub fn forget(&mut self, number: u32) {
        if let Some(entry) = self.find(number) {
            *entry = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_ages_and_leaves() {
        let second = 1_000_000_000;
        let mut known = Known::new(64).expect("memory");
        known.tell(7, second);
        assert!(
            known.is_fresh(7, second, second / 100) && known.is_fresh(7, 5 * second, 5 * second)
        );
        assert!(!known.is_fresh(7, 6 * second, 5 * second) && known.has(7));
        assert!(!known.is_fresh(7, second, 0) && !known.has(8));
        known.tell(7, 6 * second);
        assert!(known.is_fresh(7, 7 * second, 5 * second));
        known.forget(7);
        assert!(!known.has(7));
        for number in 0..1000 {
            known.tell(number, i64::from(number) * second);
            assert!(known.has(number));
        }
        let left = (0..1000).filter(|&n| known.has(n)).count();
        assert!(left <= 64 && left > 48, "{left}");
        let mut none = Known::new(7).expect("memory");
        none.tell(1, 0);
        assert!(!none.has(1));
    }
}
