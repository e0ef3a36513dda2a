//! Keys of chunks that only one session may use.

use super::hashes::hash_tokens;
use super::{Digest, Key, MAX_CHUNK_TOKENS, MAX_FIELD_BYTES, fields};
use crate::base::status::Result;
use crate::fail;

const PARENT: u32 = 1;
const SESSION: u32 = 2;
const TOKENS: u32 = 3;
const EXTRA: u32 = 4;

/// The key of a chunk that is private to a session: its incomplete tail, or KV without some tokens
/// that it was computed with. `parent` is the key of the chunk before it, or of the namespace. The
/// tokens are hashed, too, so a tail that was truncated and rewritten never matches the old one.
/// `extra` stands for everything else that the KV depends on: media in it, or the retained tokens.
pub fn private_key(
    parent: &Key,
    session: &[u8],
    tokens: &[u32],
    extra: Option<&Digest>,
) -> Result<Key> {
    if session.is_empty() || session.len() > MAX_FIELD_BYTES {
        fail!(Limit, "a session's name has 1 to {MAX_FIELD_BYTES} bytes, not {}", session.len());
    }
    if tokens.is_empty() || tokens.len() > MAX_CHUNK_TOKENS as usize {
        fail!(Limit, "a private chunk has 1 to {MAX_CHUNK_TOKENS} tokens, not {}", tokens.len());
    }
    let hash = hash_tokens(tokens);
    let own = [(PARENT, parent.0.as_slice()), (SESSION, session), (TOKENS, &hash)];
    let extra = extra.map(|extra| (EXTRA, extra.as_slice()));
    Ok(Key(fields::derive(fields::PRIVATE, own.into_iter().chain(extra))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use crate::format::keys::chain::Chain;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_part_changes_the_key(
            parents in (0u8..2, 0u8..2),
            sessions in (proptest::collection::vec(0u8..2, 1..3), proptest::collection::vec(0u8..2, 1..3)),
            tokens in (proptest::collection::vec(0u32..2, 1..4), proptest::collection::vec(0u32..2, 1..4)),
            extras in (proptest::option::of(0u8..2), proptest::option::of(0u8..2)),
        ) {
            let key = |parent: u8, session: &[u8], tokens: &[u32], extra: Option<u8>| {
                let extra = extra.map(|byte| [byte; 32]);
                private_key(&Key([parent; 32]), session, tokens, extra.as_ref()).expect("valid")
            };
            let a = key(parents.0, &sessions.0, &tokens.0, extras.0);
            let b = key(parents.1, &sessions.1, &tokens.1, extras.1);
            let same = parents.0 == parents.1
                && sessions.0 == sessions.1
                && tokens.0 == tokens.1
                && extras.0 == extras.1;
            prop_assert_eq!(a == b, same);
            // Full or not, it is not the shared key of the same tokens.
            let mut shared = Vec::new();
            let mut chain = Chain::new(Key([parents.0; 32]), tokens.0.len() as u32).expect("a size");
            chain.extend(&tokens.0, &[], &mut shared).expect("room");
            prop_assert_ne!(a, shared[0]);
        }
    }

    #[test]
    fn names_and_tokens_beyond_the_limits_are_rejected() {
        let status = |session: &[u8], tokens: &[u32]| {
            private_key(&Key([0; 32]), session, tokens, None).err().map(|e| e.status())
        };
        let (bytes, tokens) = (vec![1; MAX_FIELD_BYTES + 1], vec![1; 65_537]);
        assert_eq!(status(b"", &[1]), Some(Status::Limit));
        assert_eq!(status(b"s", &[]), Some(Status::Limit));
        assert_eq!(status(&bytes, &[1]), Some(Status::Limit));
        assert_eq!(status(b"s", &tokens), Some(Status::Limit));
        assert_eq!(status(&bytes[1..], &tokens[1..]), None);
    }
}
