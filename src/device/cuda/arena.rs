//! Suballocates device memory that the engine provides, without calls of the driver.

use std::collections::BTreeMap;

use crate::base::status::{Result, Status};
use crate::fail;

/// Alignment of allocations.
const ALIGN: u64 = 256;

/// A range of memory with its free parts.
pub struct Arena {
    bytes: u64,
    /// Length of each free range by its start. No two adjoin.
    free: BTreeMap<u64, u64>,
}

impl Arena {
    /// An arena that is entirely free.
    pub fn new(address: u64, bytes: u64) -> Result<Arena> {
        let begins = address.checked_next_multiple_of(ALIGN);
        let ends = address.checked_add(bytes).map(|end| end / ALIGN * ALIGN);
        match begins.zip(ends) {
            Some((from, to)) if address != 0 && from < to => {
                Ok(Arena { bytes: to - from, free: BTreeMap::from([(from, to - from)]) })
            }
            _ => fail!(
                Invalid,
                "an arena of {bytes} bytes at {address:#x} holds no aligned 256 bytes"
            ),
        }
    }

    /// Free bytes, possibly fragmented.
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }

    /// Allocates from the first free range that fits.
    pub fn take(&mut self, bytes: u64) -> Result<u64> {
        let padded = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or(Status::Limit)?;
        let fits = self.free.iter().find(|(_, free)| **free >= padded);
        let Some((&at, &free)) = fits else {
            let (left, all) = (self.free_bytes(), self.bytes);
            fail!(
                NoMem,
                "{bytes} bytes of device memory requested: {left} of {all} are free, perhaps fragmented"
            );
        };
        self.free.remove(&at);
        if free > padded {
            self.free.insert(at + padded, free - padded);
        }
        Ok(at)
    }

    /// Frees an allocation.
    pub fn free_range(&mut self, at: u64, bytes: u64) {
        let padded = bytes.max(1).next_multiple_of(ALIGN);
        let (mut from, mut to) = (at, at + padded);
        if let Some(behind) = self.free.remove(&to) {
            to += behind;
        }
        let before = self.free.range(..from).next_back().map(|(&at, &free)| (at, at + free));
        if let Some((begins, _)) = before.filter(|&(_, ends)| ends == from) {
            from = begins;
        }
        self.free.insert(from, to - from);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn unusable_arenas_are_rejected() {
        for (address, bytes) in [(0, 4096), (256, 0), (256, 255), (1, 300), (u64::MAX - 10, 100)] {
            assert!(Arena::new(address, bytes).is_err(), "{address} {bytes}");
        }
        let mut arena = Arena::new(1, 1023).expect("256 to 1024");
        assert_eq!(arena.free_bytes(), 768);
        assert_eq!(arena.take(769).map_err(|error| error.status()), Err(Status::NoMem));
        assert_eq!(arena.take(u64::MAX).map_err(|error| error.status()), Err(Status::Limit));
        assert_eq!(arena.take(768), Ok(256));
        assert!(arena.take(1).is_err());
    }

    proptest! {
        /// Compares with a flag for each unit of memory.
        #[test]
        fn allocations_never_overlap_and_frees_are_complete(
            steps in proptest::collection::vec((any::<bool>(), 0u64..3000, 0usize..64), 1..200),
        ) {
            let (base, units) = (0x10_0000u64, 64u64);
            let mut arena = Arena::new(base, units * ALIGN).unwrap();
            let mut taken = vec![false; units as usize];
            let mut have: Vec<(u64, u64)> = Vec::new();
            for (takes, bytes, which) in steps {
                if takes {
                    let needed = bytes.max(1).div_ceil(ALIGN) as usize;
                    let place = taken.windows(needed).position(|run| !run.contains(&true));
                    let got = arena.take(bytes).ok();
                    prop_assert_eq!(got, place.map(|at| base + at as u64 * ALIGN));
                    if let (Some(at), Some(place)) = (got, place) {
                        taken[place..place + needed].fill(true);
                        have.push((at, bytes));
                    }
                } else if !have.is_empty() {
                    let (at, bytes) = have.swap_remove(which % have.len());
                    arena.free_range(at, bytes);
                    let place = ((at - base) / ALIGN) as usize;
                    let needed = bytes.max(1).div_ceil(ALIGN) as usize;
                    taken[place..place + needed].fill(false);
                }
                let free = taken.iter().filter(|&&is| !is).count() as u64 * ALIGN;
                prop_assert_eq!(arena.free_bytes(), free);
            }
        }
    }
}
