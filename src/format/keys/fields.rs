//! Hashes of tagged, length-prefixed fields: different lists of fields have different bytes.

use super::Digest;

/// Context of namespace keys.
pub const NAMESPACE: &str = "kvtier 2026-11-21 v1 namespace";
/// Context of layout fingerprints.
pub const LAYOUT: &str = "kvtier 2026-11-21 v1 layout";
/// Context of private keys.
pub const PRIVATE: &str = "kvtier 2026-11-21 v1 private";

/// Context of the keys of blocks that engines name.
pub const BLOCK: &str = "kvtier 2026-11-23 v1 block";

/// Context of the keys of objects.
pub const OBJECT: &str = "kvtier 2026-11-23 v1 object";
/// Context of the key that a secret derives for the keys of objects.
pub const OBJECT_SECRET: &str = "kvtier 2026-11-23 v1 object secret";
/// Context of namespaces for the state of sparse policies.
pub const SPARSE: &str = "kvtier 2026-11-22 v1 sparse";

/// The hash of fields in a context. Tags must ascend.
pub fn derive<'a>(context: &str, fields: impl Iterator<Item = (u32, &'a [u8])> + Clone) -> Digest {
    debug_assert!(fields.clone().map(|(tag, _)| tag).is_sorted_by(|a, b| a < b));
    let mut hasher = blake3::Hasher::new_derive_key(context);
    hasher.update(&(fields.clone().count() as u32).to_le_bytes());
    for (tag, value) in fields {
        put(&mut hasher, tag, value);
    }
    *hasher.finalize().as_bytes()
}

/// Hashes one more field.
pub fn put(hasher: &mut blake3::Hasher, tag: u32, value: &[u8]) {
    hasher.update(&tag.to_le_bytes());
    hasher.update(&(value.len() as u64).to_le_bytes());
    hasher.update(value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fields() -> impl Strategy<Value = Vec<(u32, Vec<u8>)>> {
        let field = (0u32..6, proptest::collection::vec(0u8..3, 0..5));
        proptest::collection::vec(field, 0..5).prop_map(|mut fields| {
            fields.sort();
            fields.dedup_by_key(|f| f.0);
            fields
        })
    }

    fn hash(fields: &[(u32, Vec<u8>)]) -> Digest {
        derive("test", fields.iter().map(|(tag, value)| (*tag, value.as_slice())))
    }

    #[test]
    fn values_cannot_pretend_to_be_fields() {
        let (two, three) = (&2u32.to_le_bytes()[..], &3u32.to_le_bytes()[..]);
        let a = [(1, [b"a", two, b"b"].concat()), (3, b"c".to_vec())];
        let b = [(1, b"a".to_vec()), (2, [b"b", three, b"c"].concat())];
        assert_ne!(hash(&a), hash(&b));
    }

    proptest! {
        // Few tags and byte values, so that lists that could be confused are frequent.
        #[test]
        fn lists_that_differ_hash_differently(a in fields(), b in fields()) {
            prop_assert_eq!(a == b, hash(&a) == hash(&b));
        }
    }
}
