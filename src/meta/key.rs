//! Keys of namespaces and chunks.

use std::fmt;

/// The key of a namespace or chunk: a hash of everything that its KV depends on. The default, all
/// zeros, is not used.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Key(pub [u8; 32]);

impl Key {
    /// Reads bytes as consecutive keys; an incomplete last key is left out.
    pub fn list(bytes: &[u8]) -> &[Key] {
        let count = bytes.len() / size_of::<Key>();
        // SAFETY: a key is 32 bytes of any value, and `count` of them are inside the slice.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), count) }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_written_first_byte_first() {
        let mut key = Key::default();
        (key.0[0], key.0[31]) = (0xA1, 2);
        assert_eq!(key.to_string(), format!("a1{}02", "0".repeat(60)));
        assert_eq!(format!("{key:?}"), key.to_string());
    }
}
