//! BLAKE3 of the tokens of many chunks, several at a time.
//!
//! Chunks are independent, and too short for BLAKE3 to use the whole width of the processor inside
//! one of them. So the same part of several chunks is hashed at once, by the function that BLAKE3
//! itself uses. The crate does not guarantee that function: tests compare every size with the
//! public one.

use blake3::IncrementCounter;
use blake3::platform::Platform;

use super::{Digest, Key};

/// Chunks hashed at once; processors do 4 or 8.
const LANES: usize = 16;
/// Bytes of BLAKE3's own chunks, the leaves of its tree.
const LEAF_BYTES: usize = 1024;
/// With more leaves BLAKE3 uses the whole width by itself.
const MOST_LEAVES: usize = 8;
const PAIR_BYTES: usize = 64;

const IV: [u32; 8] = [
    0x6A09_E667,
    0xBB67_AE85,
    0x3C6E_F372,
    0xA54F_F53A,
    0x510E_527F,
    0x9B05_688C,
    0x1F83_D9AB,
    0x5BE0_CD19,
];
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const PARENT: u8 = 4;
const ROOT: u8 = 8;

/// Flags of all blocks of an input, of its first block and of its last.
#[derive(Clone, Copy)]
struct Flags {
    all: u8,
    first: u8,
    last: u8,
}

const WHOLE: Flags = Flags { all: 0, first: CHUNK_START, last: CHUNK_END | ROOT };
const LEAF: Flags = Flags { all: 0, first: CHUNK_START, last: CHUNK_END };
const NODE: Flags = Flags { all: PARENT, first: 0, last: 0 };
const TOP: Flags = Flags { all: PARENT, first: 0, last: ROOT };

/// Tokens as bytes in memory.
fn bytes_of(tokens: &[u32]) -> &[u8] {
    // SAFETY: the same memory, for the same lifetime. Integers have no padding, any byte is a valid
    // u8, and u8 needs no alignment.
    unsafe { std::slice::from_raw_parts(tokens.as_ptr().cast(), size_of_val(tokens)) }
}

/// The hash of tokens as u32 little-endian, on any machine.
pub fn hash_tokens(tokens: &[u32]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = [[0u8; 4]; 256];
    for tokens in tokens.chunks(bytes.len()) {
        for (bytes, token) in bytes.iter_mut().zip(tokens) {
            *bytes = token.to_le_bytes();
        }
        hasher.update(bytes.as_flattened().split_at(size_of_val(tokens)).0);
    }
    *hasher.finalize().as_bytes()
}

/// Passes the hash of each full chunk of `each` tokens to `take`, in order.
pub fn hash_chunks(tokens: &[u32], each: usize, mut take: impl FnMut(&Digest)) {
    if cfg!(target_endian = "big") {
        tokens.chunks_exact(each).for_each(|chunk| take(&hash_tokens(chunk)));
        return;
    }
    let platform = Platform::detect();
    let mut hashes = [[0; 32]; LANES];
    for group in tokens.chunks(each * LANES) {
        let hashes = hashes.split_at_mut(group.len() / each).0;
        hash_group(platform, bytes_of(group), each * size_of::<u32>(), hashes);
        hashes.iter().for_each(&mut take);
    }
}

/// The hashes of adjacent chunks of `each` bytes.
fn hash_group(platform: Platform, bytes: &[u8], each: usize, hashes: &mut [Digest]) {
    let chunks = bytes.chunks_exact(each);
    let leaves = each / LEAF_BYTES;
    match each {
        64 => many::<64>(platform, starts(chunks), 0, WHOLE, hashes),
        128 => many::<128>(platform, starts(chunks), 0, WHOLE, hashes),
        256 => many::<256>(platform, starts(chunks), 0, WHOLE, hashes),
        512 => many::<512>(platform, starts(chunks), 0, WHOLE, hashes),
        LEAF_BYTES => many::<LEAF_BYTES>(platform, starts(chunks), 0, WHOLE, hashes),
        // With few chunks, hashing each chunk along its leaves is faster.
        _ if each % LEAF_BYTES == 0 && leaves <= MOST_LEAVES && leaves < hashes.len() => {
            hash_trees(platform, bytes, each, hashes);
        }
        _ => {
            for (hash, chunk) in hashes.iter_mut().zip(chunks) {
                *hash = *blake3::hash(chunk).as_bytes();
            }
        }
    }
}

fn starts<'a, const N: usize>(
    inputs: impl Iterator<Item = &'a [u8]>,
) -> impl Iterator<Item = &'a [u8; N]> {
    inputs.filter_map(|input| input.first_chunk())
}

/// Compresses up to [`LANES`] inputs of one length at once.
fn many<'a, const N: usize>(
    platform: Platform,
    from: impl Iterator<Item = &'a [u8; N]>,
    counter: u64,
    flags: Flags,
    hashes: &mut [Digest],
) {
    const { assert!(N % blake3::BLOCK_LEN == 0, "whole blocks only") };
    let mut inputs = [const { &[0; N] }; LANES];
    let slots = inputs.iter_mut().zip(from).map(|(slot, input)| *slot = input);
    let count = slots.count();
    debug_assert_eq!(count, hashes.len());
    let (inputs, fixed) = (inputs.split_at(count).0, IncrementCounter::No);
    let Flags { all, first, last } = flags;
    let hashes = hashes.as_flattened_mut();
    platform.hash_many(inputs, &IV, counter, fixed, all, first, last, hashes);
}

/// Chunks of several whole leaves: hashes leaf by leaf across the chunks, then the parents
/// likewise. BLAKE3's tree pairs neighbours level by level; an odd node moves up unchanged.
fn hash_trees(platform: Platform, bytes: &[u8], each: usize, hashes: &mut [Digest]) {
    let mut nodes = [[[0; 32]; MOST_LEAVES]; LANES];
    let nodes = nodes.split_at_mut(hashes.len()).0;
    let mut width = each / LEAF_BYTES;
    for leaf in 0..width {
        let inputs = bytes.chunks_exact(each).filter_map(|c| c.get(leaf * LEAF_BYTES..));
        many::<LEAF_BYTES>(platform, starts(inputs), leaf as u64, LEAF, hashes);
        nodes.iter_mut().zip(&*hashes).for_each(|(nodes, hash)| nodes[leaf] = *hash);
    }
    while width > 1 {
        let flags = if width == 2 { TOP } else { NODE };
        for pair in 0..width / 2 {
            let inputs = nodes.iter().filter_map(|n| n.as_flattened().get(pair * PAIR_BYTES..));
            many::<PAIR_BYTES>(platform, starts(inputs), 0, flags, hashes);
            nodes.iter_mut().zip(&*hashes).for_each(|(nodes, hash)| nodes[pair] = *hash);
        }
        if width % 2 == 1 {
            nodes.iter_mut().for_each(|nodes| nodes[width / 2] = nodes[width - 1]);
        }
        width = width.div_ceil(2);
    }
}

/// Hashes a key, a hash of tokens and an optional digest: a link of a chain. Compresses the blocks
/// directly: a chain is sequential, so the general function's overhead is significant.
pub struct Links(Platform);

impl Links {
    /// For this machine.
    pub fn new() -> Links {
        Links(Platform::detect())
    }

    /// BLAKE3 of 64 bytes, or of 96.
    #[inline]
    pub fn next(&self, key: &Key, hash: &Digest, extra: Option<&Digest>) -> Key {
        let mut words = IV;
        let mut pair = [key.0, *hash];
        if let Some(extra) = extra {
            self.compress(&mut words, &pair, 64, CHUNK_START);
            pair = [*extra, [0; 32]];
            self.compress(&mut words, &pair, 32, CHUNK_END | ROOT);
        } else {
            self.compress(&mut words, &pair, 64, CHUNK_START | CHUNK_END | ROOT);
        }
        let mut key = [[0; 4]; 8];
        for (bytes, word) in key.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(key.as_flattened());
        Key(digest)
    }

    #[inline]
    fn compress(&self, words: &mut [u32; 8], pair: &[Digest; 2], bytes: u8, flags: u8) {
        if let Some(block) = pair.as_flattened().first_chunk() {
            self.0.compress_in_place(words, block, bytes, 0, flags);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn some_tokens(count: usize, seed: u32) -> Vec<u32> {
        let mut state = seed;
        let step = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state ^ (state >> 15)
        };
        (0..count).map(step).collect()
    }

    /// The public function, on bytes made one by one.
    fn plain(tokens: &[u32]) -> Digest {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        *blake3::hash(&bytes).as_bytes()
    }

    fn check(tokens: &[u32], each: usize) {
        let mut hashes = Vec::new();
        hash_chunks(tokens, each, |hash| hashes.push(*hash));
        let wanted: Vec<Digest> = tokens.chunks_exact(each).map(plain).collect();
        assert_eq!(hashes, wanted, "{} tokens in chunks of {each}", tokens.len());
    }

    #[test]
    fn every_size_agrees_with_the_public_function() {
        let tokens = some_tokens(2 * 1040, 1);
        (1..=1040).for_each(|each| check(&tokens[..2 * each], each));
    }

    #[test]
    fn every_number_of_chunks_and_leaves_agrees() {
        let tokens = some_tokens(36 * 512, 2);
        for each in [16, 32, 64, 128, 256, 512] {
            (0..=35).for_each(|count| check(&tokens[..each * count + each / 2], each));
        }
        let tokens = some_tokens(17 * 10 * 256, 3);
        for leaves in 1..=10 {
            (0..=17).for_each(|count| check(&tokens[..leaves * 256 * count], leaves * 256));
        }
    }

    #[test]
    fn the_largest_chunks_agree() {
        let tokens = some_tokens(2 * 65_536 + 5, 4);
        check(&tokens, 65_536);
        check(&tokens, 65_535);
        check(&tokens[1..], 40_000);
        assert_eq!(hash_tokens(&tokens), plain(&tokens));
    }

    #[test]
    fn every_instruction_set_agrees() {
        let tokens = some_tokens(16 * 3 * 256, 5);
        #[cfg(target_arch = "x86_64")]
        let others = [Platform::sse2(), Platform::sse41(), Platform::avx2()];
        #[cfg(not(target_arch = "x86_64"))]
        let others: [Option<Platform>; 0] = [];
        for platform in others.into_iter().flatten().chain([Platform::portable()]) {
            for each in [16, 32, 64, 128, 256, 512, 768] {
                let tokens = &tokens[..each * 16];
                let mut bytes = Vec::new();
                tokens.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
                let mut hashes = [[0; 32]; 16];
                hash_group(platform, &bytes, each * 4, &mut hashes);
                let wanted: Vec<Digest> = tokens.chunks_exact(each).map(plain).collect();
                assert_eq!(hashes.as_slice(), wanted, "{platform:?} {each}");
            }
            let key = Links(platform).next(&Key([7; 32]), &[8; 32], None);
            assert_eq!(key, Links::new().next(&Key([7; 32]), &[8; 32], None), "{platform:?}");
        }
    }

    proptest! {
        #[test]
        fn conversion_agrees_with_the_view(tokens in proptest::collection::vec(any::<u32>(), 0..900)) {
            prop_assert_eq!(hash_tokens(&tokens), plain(&tokens));
        }

        #[test]
        fn a_link_is_the_public_hash(key: [u8; 32], hash: [u8; 32], extra: [u8; 32]) {
            let links = Links::new();
            let two = [key, hash];
            let wanted = *blake3::hash(two.as_flattened()).as_bytes();
            prop_assert_eq!(links.next(&Key(key), &hash, None).0, wanted);
            let three = [key, hash, extra];
            let wanted = *blake3::hash(three.as_flattened()).as_bytes();
            prop_assert_eq!(links.next(&Key(key), &hash, Some(&extra)).0, wanted);
        }
    }
}
