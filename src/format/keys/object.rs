//! Keys of remote objects: 256 bits, from everything that their content depends on.

use super::{Digest, Fingerprint, Key, fields};

const NAMESPACE: u32 = 1;
const LAYOUT: u32 = 2;
const CHUNK: u32 = 3;
const SHAPE: u32 = 4;
const CODEC: u32 = 5;
const SEALED: u32 = 6;
const FIELDS: u32 = 6;

/// The layers of a chunk that an object holds, and how the chunk was divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRange {
    /// Target size of objects, in bytes, by which layers were combined.
    pub object_bytes: u64,
    /// Its first layer.
    pub first: u32,
    /// Number of its layers.
    pub layers: u32,
}

/// Derives the keys of a namespace's objects.
pub struct ObjectKeys {
    /// Hash state of their common prefix.
    prefix: blake3::Hasher,
}

impl ObjectKeys {
    /// For the chunks of a namespace, stored under a layout. With a secret, an object's key reveals
    /// nothing about its content to others.
    pub fn new(namespace: &Key, layout: &Fingerprint, secret: Option<&[u8]>) -> ObjectKeys {
        let mut prefix = match secret {
            None => blake3::Hasher::new_derive_key(fields::OBJECT),
            Some(secret) => {
                let key = blake3::derive_key(fields::OBJECT_SECRET, secret);
                blake3::Hasher::new_keyed(&key)
            }
        };
        prefix.update(&FIELDS.to_le_bytes());
        fields::put(&mut prefix, NAMESPACE, &namespace.0);
        fields::put(&mut prefix, LAYOUT, &layout.0);
        ObjectKeys { prefix }
    }

    /// The key of an object with cells of a chunk. `codec` is the codec that they may be encoded
    /// with.
    pub fn key(&self, chunk: &Key, cut: &LayerRange, codec: u8, sealed: bool) -> Digest {
        let mut shape = [0; 16];
        shape[..8].copy_from_slice(&cut.object_bytes.to_le_bytes());
        shape[8..12].copy_from_slice(&cut.first.to_le_bytes());
        shape[12..].copy_from_slice(&cut.layers.to_le_bytes());
        let mut hasher = self.prefix.clone();
        fields::put(&mut hasher, CHUNK, &chunk.0);
        fields::put(&mut hasher, SHAPE, &shape);
        fields::put(&mut hasher, CODEC, &[codec]);
        fields::put(&mut hasher, SEALED, &[u8::from(sealed)]);
        *hasher.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUT: LayerRange = LayerRange { object_bytes: 1 << 20, first: 3, layers: 2 };

    #[test]
    fn a_key_is_the_hash_of_its_fields() {
        let keys = ObjectKeys::new(&Key([1; 32]), &Fingerprint([2; 32]), None);
        let shape = [0, 0, 16, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0];
        let own: [(u32, &[u8]); 6] = [
            (NAMESPACE, &[1; 32]),
            (LAYOUT, &[2; 32]),
            (CHUNK, &[3; 32]),
            (SHAPE, &shape),
            (CODEC, &[1]),
            (SEALED, &[0]),
        ];
        let hash = fields::derive(fields::OBJECT, own.into_iter());
        assert_eq!(keys.key(&Key([3; 32]), &CUT, 1, false), hash);
    }

    #[test]
    fn every_part_changes_the_key() {
        let of = |space: u8, layout: u8, secret: Option<&[u8]>| {
            ObjectKeys::new(&Key([space; 32]), &Fingerprint([layout; 32]), secret)
        };
        let plain = of(1, 2, None);
        let chunk = Key([3; 32]);
        let mut all = vec![
            plain.key(&chunk, &CUT, 0, false),
            plain.key(&Key([4; 32]), &CUT, 0, false),
            plain.key(&chunk, &LayerRange { object_bytes: 1 << 21, ..CUT }, 0, false),
            plain.key(&chunk, &LayerRange { first: 2, ..CUT }, 0, false),
            plain.key(&chunk, &LayerRange { layers: 3, ..CUT }, 0, false),
            plain.key(&chunk, &CUT, 1, false),
            plain.key(&chunk, &CUT, 0, true),
        ];
        for keys in [of(2, 2, None), of(1, 1, None), of(1, 2, Some(b"")), of(1, 2, Some(b"s"))] {
            all.push(keys.key(&chunk, &CUT, 0, false));
        }
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
