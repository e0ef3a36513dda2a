//! Chunk keys of a sequence. Each is the hash of the key before it and the chunk's tokens, so a key
//! stands for the whole prefix.

use super::hashes::{Links, hash_chunks};
use super::{Digest, Key, MAX_CHUNK_TOKENS};
use crate::base::status::Result;
use crate::fail;

/// Extra input of a chunk beside its tokens, for example an image that starts in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Media {
    /// Index of the chunk in the sequence.
    pub chunk: u64,
    /// Digest of the input.
    pub digest: Digest,
}

/// The key chain of a sequence at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    key: Key,
    position: u64,
    chunk_tokens: u32,
}

impl Chain {
    /// The start of a sequence in a namespace.
    pub fn new(namespace: Key, chunk_tokens: u32) -> Result<Chain> {
        Chain::after(namespace, 0, chunk_tokens)
    }

    /// A sequence that continues after `position` chunks, the last of which has this key.
    pub fn after(key: Key, position: u64, chunk_tokens: u32) -> Result<Chain> {
        if chunk_tokens == 0 || chunk_tokens > MAX_CHUNK_TOKENS {
            fail!(Limit, "a chunk has 1 to {MAX_CHUNK_TOKENS} tokens, not {chunk_tokens}");
        }
        Ok(Chain { key, position, chunk_tokens })
    }

    /// The key of the last chunk; that of the namespace if there is none.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Number of chunks so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Appends the keys of the chunks that `tokens` fill. Returns how many tokens they have; the
    /// caller passes the rest at the front of the next call. `media` ascend by chunk. Entries of
    /// other chunks are ignored, so the list of the whole sequence can be passed with every part of
    /// it. On failure nothing changes.
    pub fn extend(
        &mut self,
        tokens: &[u32],
        media: &[Media],
        keys: &mut Vec<Key>,
    ) -> Result<usize> {
        let each = self.chunk_tokens as usize;
        let count = tokens.len() / each;
        if self.position.checked_add(count as u64).is_none() {
            fail!(Limit, "the sequence exceeds 2^64 - 1 chunks");
        }
        if !media.is_sorted_by(|a, b| a.chunk < b.chunk) {
            fail!(Invalid, "media must ascend by chunk, one digest for each");
        }
        if keys.try_reserve(count).is_err() {
            fail!(NoMem, "no memory for {count} keys");
        }
        let links = Links::new();
        let mut media = media.iter().skip_while(|m| m.chunk < self.position).peekable();
        let Chain { mut key, mut position, .. } = *self;
        hash_chunks(tokens, each, |hash| {
            let extra = media.next_if(|m| m.chunk == position).map(|m| &m.digest);
            key = links.next(&key, hash, extra);
            position += 1;
            keys.push(key);
        });
        (self.key, self.position) = (key, position);
        Ok(count * each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const NAMESPACE: Key = Key([9; 32]);

    /// The definition, without optimizations.
    fn plain(tokens: &[u32], each: usize, media: &BTreeMap<u64, Digest>) -> Vec<Key> {
        let mut key = NAMESPACE.0;
        let link = |(i, chunk): (usize, &[u32])| {
            let bytes: Vec<u8> = chunk.iter().flat_map(|token| token.to_le_bytes()).collect();
            let mut link = [key, *blake3::hash(&bytes).as_bytes()].concat();
            link.extend(media.get(&(i as u64)).into_iter().flatten());
            key = *blake3::hash(&link).as_bytes();
            Key(key)
        };
        tokens.chunks_exact(each).enumerate().map(link).collect()
    }

    fn list(media: &BTreeMap<u64, Digest>) -> Vec<Media> {
        media.iter().map(|(&chunk, &digest)| Media { chunk, digest }).collect()
    }

    fn sizes() -> impl Strategy<Value = u32> {
        prop_oneof![1u32..40, Just(64), Just(128), 250u32..260, Just(512), Just(768), Just(1280)]
    }

    proptest! {
        #[test]
        fn keys_of_pieces_are_those_of_the_whole(
            each in sizes(),
            chunks in 0usize..24,
            rest in 0usize..40,
            seed in any::<u32>(),
            media in proptest::collection::btree_map(0u64..26, any::<[u8; 32]>(), 0..6),
            cuts in proptest::collection::vec(any::<usize>(), 0..5),
        ) {
            let count = chunks * each as usize + rest;
            let tokens: Vec<u32> = (0..count as u32).map(|i| i.wrapping_mul(seed) >> 7).collect();
            let (wanted, media) = (plain(&tokens, each as usize, &media), list(&media));

            let mut chain = Chain::new(NAMESPACE, each).expect("a size");
            let mut keys = vec![NAMESPACE];
            let used = chain.extend(&tokens, &media, &mut keys).expect("room");
            prop_assert_eq!(&keys[1..], &wanted);
            prop_assert_eq!(used, wanted.len() * each as usize);
            prop_assert_eq!(chain.position(), wanted.len() as u64);
            prop_assert_eq!(chain.key(), keys.last().copied().unwrap_or(NAMESPACE));

            // Cut anywhere: tokens that do not fill a chunk are passed again.
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (count + 1)).collect();
            cuts.push(count);
            cuts.sort_unstable();
            let (mut pieces, mut keys, mut at) =
                (Chain::new(NAMESPACE, each).expect("a size"), Vec::new(), 0);
            for cut in cuts {
                if cut > at {
                    at += pieces.extend(&tokens[at..cut], &media, &mut keys).expect("room");
                    pieces = Chain::after(pieces.key(), pieces.position(), each).expect("a size");
                }
            }
            prop_assert_eq!(&keys, &wanted);
            prop_assert_eq!(pieces, chain);
        }

        #[test]
        fn a_token_or_digest_changes_its_key_and_all_after(
            each in 1u32..20,
            at in 0usize..100,
            bit in 0u32..32,
            media in any::<bool>(),
        ) {
            let mut tokens = vec![3u32; 100];
            let (mut before, mut after) = (Vec::new(), Vec::new());
            let chain = Chain::new(NAMESPACE, each).expect("a size");
            { chain }.extend(&tokens, &[], &mut before).expect("room");
            let chunk = at as u64 / u64::from(each);
            let mut list = vec![];
            if media {
                list.push(Media { chunk, digest: [0; 32] });
            } else {
                tokens[at] ^= 1 << bit;
            }
            { chain }.extend(&tokens, &list, &mut after).expect("room");
            for (i, (before, after)) in before.iter().zip(&after).enumerate() {
                prop_assert_eq!(before == after, (i as u64) < chunk);
            }
        }
    }

    #[test]
    fn chunk_sizes_and_namespaces_change_keys() {
        let tokens: Vec<u32> = (0..64).collect();
        let mut all = Vec::new();
        for each in [16, 32, 64] {
            for namespace in [NAMESPACE, Key([0; 32])] {
                let mut chain = Chain::new(namespace, each).expect("a size");
                chain.extend(&tokens, &[], &mut all).expect("room");
            }
        }
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!((count, all.len()), (14, 14));
    }

    #[test]
    fn invalid_input_is_rejected_and_changes_nothing() {
        for wrong in [0, MAX_CHUNK_TOKENS + 1, u32::MAX] {
            let error = Chain::new(NAMESPACE, wrong).expect_err("not a size");
            assert_eq!(error.status(), Status::Limit);
        }
        let mut keys = Vec::new();
        let mut chain = Chain::after(NAMESPACE, u64::MAX - 1, 2).expect("a size");
        let before = chain;
        let error = chain.extend(&[1, 2, 3, 4], &[], &mut keys).expect_err("too far");
        assert_eq!((error.status(), chain, keys.len()), (Status::Limit, before, 0));
        assert_eq!(chain.extend(&[1, 2], &[], &mut keys), Ok(2));

        let mut chain = Chain::new(NAMESPACE, 1).expect("a size");
        let media = |chunk| Media { chunk, digest: [1; 32] };
        for wrong in [[media(1), media(0)], [media(2), media(2)]] {
            let error = chain.extend(&[1, 2, 3], &wrong, &mut keys).expect_err("not sorted");
            assert_eq!((error.status(), chain.position(), keys.len()), (Status::Invalid, 0, 1));
        }
    }
}
