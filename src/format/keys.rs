//! Keys of chunks: 256 bits by BLAKE3, from the identity of a namespace and all tokens up to the
//! end of the chunk.
//!
//! `docs/internals/keys.md` publishes the derivation, with vectors of an independent program. Other
//! programs and existing files rely on it: a change needs new context strings.

use std::fmt;

pub use crate::meta::key::Key;

pub mod block;
pub mod chain;
mod fields;
mod hashes;
pub mod identity;
pub mod media;
pub mod object;
pub mod private;
pub mod recipe;
mod sparse;

pub use sparse::sparse_key;

/// Most tokens of a chunk.
pub const MAX_CHUNK_TOKENS: u32 = 65_536;
/// Longest field of an identity, and longest name of a session, in bytes.
pub const MAX_FIELD_BYTES: usize = 64 << 10;

/// A 256-bit hash, by BLAKE3 or another function.
pub type Digest = [u8; 32];

/// The fingerprint of a layout. A type of its own, so that it is not confused with a [`Key`].
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub Digest);

impl Fingerprint {
    /// The fingerprint of a layout, from its canonical bytes.
    pub fn of(layout: &[u8]) -> Fingerprint {
        Fingerprint(blake3::derive_key(fields::LAYOUT, layout))
    }
}

fn hex(digest: &Digest, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(&self.0, f)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_shown_in_hexadecimal() {
        let mut bytes = [0; 32];
        (bytes[0], bytes[31]) = (0x0f, 0xa0);
        let text = Key(bytes).to_string();
        assert_eq!(text.len(), 64);
        assert!(text.starts_with("0f00") && text.ends_with("00a0"), "{text}");
        assert_eq!(
            format!("{:?} {}", Fingerprint(bytes), Fingerprint(bytes)),
            format!("{text} {text}")
        );
    }

    #[test]
    fn a_layout_is_not_a_namespace_of_the_same_bytes() {
        let bytes = 0u32.to_le_bytes();
        let key = identity::Identity::default().key().expect("empty");
        assert_eq!(key.0, blake3::derive_key(fields::NAMESPACE, &bytes));
        assert_ne!(key.0, Fingerprint::of(&bytes).0);
        assert_ne!(Fingerprint::of(b""), Fingerprint::of(b"\0"));
    }
}
