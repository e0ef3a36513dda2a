//! Content of a file, in memory up to the last byte that was written.

use kvtier::base::status::{Result, Status};

/// Unit of an atomic write.
pub const SECTOR_BYTES: u64 = 512;

/// Bytes with a length; bytes after the last written one are zero and take no memory.
#[derive(Clone, Debug, Default)]
pub struct Content {
    len: u64,
    bytes: Vec<u8>,
}

impl Content {
    /// Length.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Extends with zeros, or truncates.
    pub fn set_len(&mut self, len: u64) {
        self.len = len;
        self.bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
    }

    /// Reads at an offset; zeros past the end.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.bytes.len());
        let known = self.bytes.get(start..).unwrap_or_default();
        let n = known.len().min(out.len());
        let (front, back) = out.split_at_mut(n);
        front.copy_from_slice(&known[..n]);
        back.fill(0);
    }

    /// Writes at an offset, and extends if needed.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let end = offset.checked_add(data.len() as u64).ok_or(Status::Invalid)?;
        let (Ok(start), Ok(stop)) = (usize::try_from(offset), usize::try_from(end)) else {
            return Err(Status::NoMem.into());
        };
        if data.is_empty() {
            return Ok(());
        }
        if stop > self.bytes.len() {
            let more = stop - self.bytes.len();
            self.bytes.try_reserve(more).map_err(|_| Status::NoMem)?;
            self.bytes.resize(stop, 0);
        }
        if let Some(place) = self.bytes.get_mut(start..stop) {
            place.copy_from_slice(data);
        }
        self.len = self.len.max(end);
        Ok(())
    }

    /// Flips a bit; does nothing past the end.
    pub fn flip(&mut self, bit: u64) -> Result<()> {
        let mut byte = [0];
        if bit / 8 >= self.len {
            return Ok(());
        }
        self.read(bit / 8, &mut byte);
        byte[0] ^= 1 << (bit % 8);
        self.write(bit / 8, &byte)
    }

    /// The whole content.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        let len = usize::try_from(self.len).map_err(|_| Status::NoMem)?;
        all.try_reserve_exact(len).map_err(|_| Status::NoMem)?;
        all.extend_from_slice(&self.bytes);
        all.resize(len, 0);
        Ok(all)
    }
}
