//! The checksum of data: XXH3-64 of every 4 KiB block, and one XXH3-64 over the block sums
//! (little-endian).
//!
//! Block sums let a reader name the damaged block and verify a part. Hashing block by block
//! also sums a copy while it is still in cache.

use std::hash::Hasher;

use twox_hash::XxHash3_64;
use twox_hash::xxhash3_64::{RawHasher, SecretBuffer};

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 4096;

/// Block sums that are collected before they are hashed.
const COLLECTED: usize = 64;

/// XXH3-64 with seed 0, using the widest instructions of the processor.
pub fn xxh3(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// XXH3-64 with seed 0 of bytes that arrive in parts.
pub struct Xxh3(RawHasher<&'static [u8; SECRET_BYTES]>);

/// Bytes of the default secret of XXH3.
const SECRET_BYTES: usize = 192;

impl Default for Xxh3 {
    fn default() -> Xxh3 {
        Xxh3(RawHasher::new(SecretBuffer::default()))
    }
}

impl Xxh3 {
    /// Adds a part.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The hash of all parts.
    pub fn finish(&self) -> u64 {
        self.0.finish()
    }
}

/// Computes the checksum block by block. Every block but the last must be whole.
pub struct Summer {
    sums: [u8; COLLECTED * 8],
    used: usize,
    /// Created only for more blocks than are collected: its state is large.
    long: Option<Xxh3>,
}

impl Default for Summer {
    fn default() -> Self {
        Summer { sums: [0; COLLECTED * 8], used: 0, long: None }
    }
}

impl Summer {
    /// Adds one block.
    pub fn block(&mut self, block: &[u8]) {
        debug_assert!(block.len() <= BLOCK_BYTES);
        if self.used == self.sums.len() {
            self.long.get_or_insert_default().update(&self.sums);
            self.used = 0;
        }
        self.sums[self.used..self.used + 8].copy_from_slice(&xxh3(block).to_le_bytes());
        self.used += 8;
    }

    /// The checksum of all blocks.
    pub fn finish(self) -> u64 {
        let rest = &self.sums[..self.used];
        match self.long {
            None => xxh3(rest),
            Some(mut long) => {
                long.update(rest);
                long.finish()
            }
        }
    }
}

/// The checksum of `bytes`.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut summer = Summer::default();
    bytes.chunks(BLOCK_BYTES).for_each(|block| summer.block(block));
    summer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    // An independent implementation.
    use xxhash_rust::xxh3::xxh3_64;

    fn plain(bytes: &[u8]) -> u64 {
        let sums: Vec<u8> =
            bytes.chunks(BLOCK_BYTES).flat_map(|b| xxh3_64(b).to_le_bytes()).collect();
        xxh3_64(&sums)
    }

    #[test]
    fn published_vectors_match() {
        // XXH3-64 of no bytes, from the test table of the algorithm.
        assert_eq!(checksum(&[]), 0x2d06_8005_38d3_94c2);
        let ramp: Vec<u8> = (0..10_000u32).map(|i| (i % 251) as u8).collect();
        assert_eq!(checksum(&ramp), plain(&ramp));
    }

    proptest! {
        #[test]
        fn checksum_matches_its_definition(len in 0usize..1_200_000, seed in any::<u8>()) {
            let bytes: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(seed)).collect();
            prop_assert_eq!(checksum(&bytes), plain(&bytes));
        }

        #[test]
        fn streaming_and_one_shot_hashes_match_an_independent_implementation(
            lengths in proptest::collection::vec(0usize..1500, 0..12),
            seed in any::<u8>(),
        ) {
            let (mut all, mut parts) = (Vec::new(), Xxh3::default());
            for length in lengths {
                let from = all.len();
                all.extend((from..from + length).map(|i| (i as u8).wrapping_mul(seed) ^ (i >> 8) as u8));
                parts.update(&all[from..]);
                prop_assert_eq!(parts.finish(), xxh3_64(&all));
            }
            prop_assert_eq!(xxh3(&all), xxh3_64(&all));
        }

        #[test]
        fn any_flipped_bit_changes_the_checksum(len in 1usize..20_000, bit in any::<usize>()) {
            let mut bytes = vec![0x5au8; len];
            let before = checksum(&bytes);
            let bit = bit % (len * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(before, checksum(&bytes));
        }
    }
}
