//! Media in a sequence: their placeholder tokens do not identify them, so chunks with media get
//! extra digests.

use super::Digest;
use super::chain::Media;
use crate::base::status::Result;
use crate::fail;

/// An image or a sound, by the position of its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Medium {
    /// Position of its first token in the sequence.
    pub token: u64,
    /// Digest of its content.
    pub digest: Digest,
}

/// Checks that media start inside a range of tokens and ascend, one at each token.
pub fn check(media: &[Medium], tokens: std::ops::Range<u64>) -> Result<()> {
    if let Some(one) = media.iter().find(|one| !tokens.contains(&one.token)) {
        let at = one.token.wrapping_sub(tokens.start);
        fail!(
            Invalid,
            "media at token {at}, but there are {} tokens",
            tokens.end.saturating_sub(tokens.start)
        );
    }
    if !media.is_sorted_by(|a, b| a.token < b.token) {
        fail!(Invalid, "media must ascend by their tokens, at most one at each");
    }
    Ok(())
}

/// The extra digest of the chunk that begins with token `first`, from the media that start in it;
/// None without media.
pub fn extra(media: &[Medium], first: u64) -> Option<Digest> {
    match media {
        [] => None,
        [one] => Some(one.digest),
        many => {
            let mut hasher = blake3::Hasher::new();
            for one in many {
                // The offset fits: a chunk has fewer than 2^32 tokens.
                hasher.update(&(one.token.wrapping_sub(first) as u32).to_le_bytes());
                hasher.update(&one.digest);
            }
            Some(*hasher.finalize().as_bytes())
        }
    }
}

/// The extra digests of all chunks in which media start. Media ascend by their tokens.
pub fn extras(media: &[Medium], chunk_tokens: u32) -> Result<Vec<Media>> {
    let each = u64::from(chunk_tokens.max(1));
    let mut all = Vec::new();
    for part in media.chunk_by(|a, b| a.token / each == b.token / each) {
        let chunk = part.first().map_or(0, |one| one.token / each);
        let Some(digest) = extra(part, chunk * each) else { continue };
        if all.try_reserve(1).is_err() {
            fail!(NoMem, "no memory for {} extra digests", all.len());
        }
        all.push(Media { chunk, digest });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// The definition of `docs/internals/keys.md`, implemented again.
        #[test]
        fn extra_digests_agree_with_their_definition(
            media in proptest::collection::btree_map(0u64..60, any::<[u8; 32]>(), 0..20),
            each in 1u32..20,
        ) {
            let list: Vec<Medium> =
                media.iter().map(|(&token, &digest)| Medium { token, digest }).collect();
            let mut chunks: BTreeMap<u64, Vec<(u64, Digest)>> = BTreeMap::new();
            for (token, digest) in media {
                let each = u64::from(each);
                chunks.entry(token / each).or_default().push((token % each, digest));
            }
            let wanted: Vec<Media> = chunks
                .into_iter()
                .map(|(chunk, parts)| {
                    let words = parts.iter().flat_map(|(place, digest)| {
                        [&(*place as u32).to_le_bytes()[..], &digest[..]].concat()
                    });
                    let words: Vec<u8> = words.collect();
                    let digest = match parts.as_slice() {
                        [(_, digest)] => *digest,
                        _ => *blake3::hash(&words).as_bytes(),
                    };
                    Media { chunk, digest }
                })
                .collect();
            prop_assert_eq!(extras(&list, each).expect("few"), wanted);
        }
    }
}
