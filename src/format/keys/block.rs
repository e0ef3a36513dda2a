//! Keys of blocks, which have names of the engine's own.

use super::{Key, MAX_FIELD_BYTES, fields};
use crate::base::status::{Result, Status};
use crate::fail;

const NAMESPACE: u32 = 1;
const NAME: u32 = 2;

/// Derives the keys of a namespace's blocks.
pub struct BlockKeys {
    /// Hash state of their common prefix.
    prefix: blake3::Hasher,
}

impl BlockKeys {
    /// For the blocks of a namespace.
    pub fn new(namespace: &Key) -> BlockKeys {
        let mut prefix = blake3::Hasher::new_derive_key(fields::BLOCK);
        prefix.update(&2u32.to_le_bytes());
        fields::put(&mut prefix, NAMESPACE, &namespace.0);
        BlockKeys { prefix }
    }

    /// The key of the block with a name.
    pub fn key(&self, name: &[u8]) -> Result<Key> {
        if name.is_empty() || name.len() > MAX_FIELD_BYTES {
            fail!(Limit, "a block's name has 1 to {MAX_FIELD_BYTES} bytes, not {}", name.len());
        }
        let mut hasher = self.prefix.clone();
        fields::put(&mut hasher, NAME, name);
        Ok(Key(*hasher.finalize().as_bytes()))
    }

    /// The keys of many names.
    pub fn all<'a>(&self, names: impl ExactSizeIterator<Item = &'a [u8]>) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        keys.try_reserve_exact(names.len()).map_err(|_| Status::NoMem)?;
        for name in names {
            keys.push(self.key(name)?);
        }
        Ok(keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_key_is_the_hash_of_its_fields(space in 0u8..4, name in proptest::collection::vec(0u8..3, 1..80)) {
            let space = Key([space; 32]);
            let own = [(NAMESPACE, space.0.as_slice()), (NAME, name.as_slice())];
            let hash = fields::derive(fields::BLOCK, own.into_iter());
            prop_assert_eq!(BlockKeys::new(&space).key(&name).expect("a name").0, hash);
        }
    }

    #[test]
    fn names_beyond_the_limits_are_rejected() {
        let keys = BlockKeys::new(&Key([7; 32]));
        let status = |name: &[u8]| keys.key(name).err().map(|e| e.status());
        let long = vec![1; MAX_FIELD_BYTES + 1];
        assert_eq!((status(b""), status(&long)), (Some(Status::Limit), Some(Status::Limit)));
        assert_eq!(status(&long[1..]), None);
        let names: [&[u8]; 2] = [b"a", b""];
        assert!(keys.all(names.into_iter()).is_err());
    }
}
