//! Names of objects: a hash of everything that the content depends on. Stores with the same chunk
//! request the same object, and there is no directory.

use crate::base::status::Result;
use crate::fail;
use crate::format::codec::Codec;
use crate::format::keys::Key;
use crate::format::keys::object::{LayerRange, ObjectKeys};

/// Longest prefix.
pub const MAX_PREFIX_BYTES: usize = 64;
/// Bytes of a name's hash.
pub const HASH_BYTES: usize = 20;
/// Version of names and objects; part of every name.
pub const VERSION: u32 = 1;

/// Name of an object, without the prefix of its remote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// Tenant, where tenants have names of their own; 0 = shared.
    pub tenant: u64,
    /// Hash of the content's identity.
    pub hash: [u8; HASH_BYTES],
}

/// Derives the names of a namespace's objects.
pub struct Names {
    keys: ObjectKeys,
    tenant: u64,
    codec: Codec,
    sealed: bool,
}

impl Names {
    /// `keys` derive the hashes; `codec`: what cells may be encoded with; `sealed`: whether objects
    /// are encrypted.
    pub fn new(keys: ObjectKeys, tenant: u64, codec: Codec, sealed: bool) -> Names {
        Names { keys, tenant, codec, sealed }
    }

    /// The name of a part of a chunk.
    pub fn name(&self, chunk: &Key, cut: &LayerRange) -> Name {
        let key = self.keys.key(chunk, cut, self.codec as u8, self.sealed);
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&key[..HASH_BYTES]);
        Name { tenant: self.tenant, hash }
    }
}

/// Prefix of all names of a store at its remote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix(String);

impl Prefix {
    /// Letters, digits, `.`, `_` and `-`, which every server, path and access rule accepts
    /// unescaped.
    pub fn new(text: &str) -> Result<Prefix> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let is_path = text == "." || text == "..";
        if text.is_empty()
            || text.len() > MAX_PREFIX_BYTES
            || !text.bytes().all(is_plain)
            || is_path
        {
            fail!(
                Spec,
                "a prefix has 1 to {MAX_PREFIX_BYTES} letters, digits, '.', '_' and '-', and is \
                 not '.' or '..'"
            );
        }
        Ok(Prefix(text.to_string()))
    }

    /// Writes a name as servers know it: `prefix/v1/hash`, or `prefix/t42/v1/hash`.
    pub fn write(&self, name: &Name, out: &mut Vec<u8>) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        out.extend_from_slice(self.0.as_bytes());
        if name.tenant != 0 {
            out.extend_from_slice(format!("/t{}", name.tenant).as_bytes());
        }
        out.extend_from_slice(format!("/v{VERSION}/").as_bytes());
        for byte in name.hash {
            out.push(DIGITS[usize::from(byte >> 4)]);
            out.push(DIGITS[usize::from(byte & 15)]);
        }
    }

    /// Writes the name of the stream of events: `prefix/events`.
    pub fn write_stream(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.0.as_bytes());
        out.extend_from_slice(b"/events");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::keys::Fingerprint;

    #[test]
    fn a_name_is_the_prefix_of_its_key() {
        let keys = || ObjectKeys::new(&Key([1; 32]), &Fingerprint([2; 32]), Some(b"secret"));
        let cut = LayerRange { object_bytes: 1 << 20, first: 0, layers: 4 };
        let name = Names::new(keys(), 7, Codec::Lz4, true).name(&Key([3; 32]), &cut);
        let key = keys().key(&Key([3; 32]), &cut, 1, true);
        assert_eq!((name.tenant, &name.hash[..]), (7, &key[..20]));
    }

    #[test]
    fn names_are_ascii_and_prefixes_are_checked() {
        let mut out = Vec::new();
        let name = Name { tenant: 0, hash: [0xa5; HASH_BYTES] };
        Prefix::new("prod").unwrap().write(&name, &mut out);
        assert_eq!(out, format!("prod/v1/{}", "a5".repeat(20)).into_bytes());
        out.clear();
        Prefix::new("a.b_c-1").unwrap().write(&Name { tenant: u64::MAX, ..name }, &mut out);
        assert!(out.starts_with(b"a.b_c-1/t18446744073709551615/v1/a5"));
        for bad in ["", ".", "..", "a/b", "ü", "a b", "{x}", &"x".repeat(65)] {
            assert!(Prefix::new(bad).is_err(), "{bad}");
        }
    }
}
