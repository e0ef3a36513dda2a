//! Secrets: passwords and keys that only the remote's server may see.

use std::sync::atomic::{Ordering, compiler_fence};

use crate::base::status::Result;
use crate::fail;

/// Longest secret.
pub const MAX_SECRET_BYTES: usize = 4096;

/// Bytes that are never printed, and wiped when they are dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Copies the bytes; LIMIT = more than [`MAX_SECRET_BYTES`].
    pub fn new(bytes: &[u8]) -> Result<Secret> {
        if bytes.len() > MAX_SECRET_BYTES {
            fail!(
                Limit,
                "a secret of {} bytes is too long: at most {MAX_SECRET_BYTES} are possible",
                bytes.len()
            );
        }
        Ok(Secret(bytes.to_vec()))
    }

    /// The bytes, for the server only.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        wipe(&mut self.0);
    }
}

/// Overwrites bytes in a way that the compiler does not remove.
pub fn wipe(bytes: &mut [u8]) {
    for byte in bytes.iter_mut() {
        // SAFETY: a byte of our own.
        unsafe { std::ptr::write_volatile(byte, 0) };
    }
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_printed() {
        let secret = Secret::new(b"hunter2").unwrap();
        assert_eq!(format!("{secret:?}"), "***");
        assert_eq!(secret.bytes(), b"hunter2");
        assert!(Secret::new(&[0; MAX_SECRET_BYTES + 1]).is_err());
        let mut bytes = *b"abc";
        wipe(&mut bytes);
        assert_eq!(bytes, [0; 3]);
    }
}
