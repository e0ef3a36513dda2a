//! A place in the header of a GGUF file, of which only the start may have been read.

use crate::base::status::{Error, Status};

/// Why reading stops before the end of a header.
#[derive(Debug)]
pub enum Stop {
    /// The header goes on: at least so many bytes of the file are needed.
    More(u64),
    /// What is there cannot be accepted.
    Bad(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Bad(error)
    }
}

/// An error about a place in a header.
pub fn corrupt(at: u64, what: impl std::fmt::Display) -> Stop {
    Stop::Bad(Error::new(Status::Corrupt, format!("{what}, at byte {at}")))
}

/// A place in a header.
pub struct Cursor<'a> {
    head: &'a [u8],
    file_bytes: u64,
    at: u64,
}

impl<'a> Cursor<'a> {
    /// The start of a file of a length, of which `head` has been read.
    pub fn new(head: &'a [u8], file_bytes: u64) -> Cursor<'a> {
        Cursor { head, file_bytes, at: 0 }
    }

    /// Where it is.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// What is left of the file.
    pub fn left(&self) -> u64 {
        self.file_bytes.saturating_sub(self.at)
    }

    /// The next bytes.
    pub fn take(&mut self, bytes: u64) -> Result<&'a [u8], Stop> {
        let end = self.at.checked_add(bytes).filter(|end| *end <= self.file_bytes);
        let Some(end) = end else {
            let what = format!("the file ends at {}, where its header needs", self.file_bytes);
            return Err(corrupt(self.at, format_args!("{what} {bytes} bytes more")));
        };
        let range = usize::try_from(self.at).ok().zip(usize::try_from(end).ok());
        match range.and_then(|(from, to)| self.head.get(from..to)) {
            Some(found) => {
                self.at = end;
                Ok(found)
            }
            None => Err(Stop::More(end)),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    /// The next number of 32 bits.
    pub fn u32(&mut self) -> Result<u32, Stop> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// The next number of 64 bits.
    pub fn u64(&mut self) -> Result<u64, Stop> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// The next string, which has its length before it.
    pub fn bytes(&mut self) -> Result<&'a [u8], Stop> {
        let bytes = self.u64()?;
        self.take(bytes)
    }

    /// The next string, as text.
    pub fn text(&mut self) -> Result<&'a str, Stop> {
        let at = self.at;
        std::str::from_utf8(self.bytes()?).map_err(|_| corrupt(at, "a name that is not UTF-8"))
    }
}
