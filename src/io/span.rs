//! The rest of a piece, in the form of system calls.

use std::os::fd::{AsRawFd, RawFd};

use crate::base::status::{Error, Result};
use crate::fail;
use crate::io::errno;
use crate::io::files::{Access, MAX_PARTS, Piece};

/// Limit: consecutive calls without progress before the transfer fails.
const MAX_IDLE_CALLS: u32 = 10_000;

/// A range of a file and its memory ranges.
#[derive(Clone, Copy)]
pub struct Span {
    fd: RawFd,
    access: Access,
    offset: u64,
    left: u64,
    /// End of the file, if known: a read that reaches it is complete.
    end: u64,
    parts: [libc::iovec; MAX_PARTS],
}

// SAFETY: it names memory as a piece does, under the same contract.
unsafe impl Send for Span {}

const NOWHERE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

impl Span {
    /// An empty transfer.
    pub const NONE: Span = Span {
        fd: -1,
        access: Access::Read,
        offset: 0,
        left: 0,
        end: u64::MAX,
        parts: [NOWHERE; MAX_PARTS],
    };

    /// All of a piece that was checked.
    pub fn new(piece: &Piece, fd: &impl AsRawFd) -> Span {
        let parts = piece.parts.map(|part| libc::iovec {
            iov_base: part.address.cast(),
            iov_len: part.bytes as usize, // at most MAX_PIECE_BYTES
        });
        let (access, offset) = (piece.access, piece.offset);
        Span { fd: fd.as_raw_fd(), access, offset, left: piece.bytes(), end: u64::MAX, parts }
    }

    /// The same transfer, complete at the end of a file of `end` bytes.
    pub fn until(self, end: u64) -> Span {
        Span { end, ..self }
    }

    /// Whether nothing is left.
    pub fn is_done(&self) -> bool {
        self.left == 0 || self.offset >= self.end
    }

    /// Descriptor, direction, offset and memory ranges of the rest.
    pub fn rest(&self) -> (RawFd, Access, u64, &[libc::iovec; MAX_PARTS]) {
        (self.fd, self.access, self.offset, &self.parts)
    }

    /// Records transferred bytes; an error if no more will follow.
    pub fn moved(&mut self, bytes: u64, align: u64) -> Result<()> {
        if bytes == 0 {
            fail!(
                Io,
                "{} of {} bytes at {} is past the end of the file",
                self.verb(),
                self.left,
                self.offset
            );
        }
        let mut on = bytes.min(self.left);
        self.left -= on;
        self.offset += on;
        for part in &mut self.parts {
            let step = on.min(part.iov_len as u64);
            // SAFETY: at most to the end of the range.
            part.iov_base = unsafe { part.iov_base.byte_add(step as usize) };
            part.iov_len -= step as usize;
            on -= step;
        }
        if !self.is_done() && bytes % align.max(1) != 0 {
            // Only the end of a file is unaligned.
            fail!(Io, "{} ended at {}, {} bytes too early", self.verb(), self.offset, self.left);
        }
        Ok(())
    }

    /// Error of a call for the rest.
    pub fn failed(&self, number: i32) -> Error {
        let text = format!("{} of {} bytes at {}", self.verb(), self.left, self.offset);
        errno::error(number, &text)
    }

    fn verb(&self) -> &'static str {
        match self.access {
            Access::Read => "a read",
            Access::Write => "a write",
        }
    }

    /// Executes the rest, call by call.
    ///
    /// # Safety
    /// The memory is valid for its direction, and nothing else accesses it meanwhile.
    pub unsafe fn carry_out(&mut self, align: u64) -> Result<()> {
        let mut idle = 0;
        while !self.is_done() {
            let (fd, access, offset, parts) = self.rest();
            let (at, count) = (offset as libc::off_t, MAX_PARTS as libc::c_int);
            // SAFETY: the caller's promise; empty ranges are not accessed.
            let got = unsafe {
                match access {
                    Access::Read => libc::preadv(fd, parts.as_ptr(), count, at),
                    Access::Write => libc::pwritev(fd, parts.as_ptr(), count, at),
                }
            };
            match u64::try_from(got) {
                Ok(bytes) => self.moved(bytes, align)?,
                Err(_) => {
                    let number = errno::last_number();
                    idle += 1;
                    if !errno::is_passing(number) || idle > MAX_IDLE_CALLS {
                        return Err(self.failed(number));
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use crate::io::files::{FileId, Part};
    use std::os::fd::OwnedFd;

    fn piece(memory: &mut [u8], cuts: [u64; 3]) -> Piece {
        let mut piece = Piece::one(FileId(0), Access::Write, 100, memory.as_mut_ptr(), 0);
        let mut from = 0;
        for (part, to) in piece.parts.iter_mut().zip([cuts[0], cuts[1], cuts[2], 64]) {
            // SAFETY: inside the slice.
            let address = unsafe { memory.as_mut_ptr().add(from as usize) };
            *part = Part { address, bytes: to - from };
            from = to;
        }
        piece
    }

    fn null() -> OwnedFd {
        std::fs::File::open("/dev/null").expect("the null device").into()
    }

    #[test]
    fn a_short_transfer_leaves_the_right_rest() {
        let mut memory = [0u8; 64];
        for cuts in [[16, 32, 48], [0, 1, 1], [64, 64, 64], [0, 0, 63]] {
            for first in 1..64u64 {
                let mut span = Span::new(&piece(&mut memory, cuts), &null());
                assert_eq!(span.moved(first, 1), Ok(()));
                let (_, _, offset, parts) = span.rest();
                assert_eq!((offset, span.left), (100 + first, 64 - first));
                let ranges = parts.iter().filter(|part| part.iov_len > 0);
                let bytes: Vec<usize> = ranges
                    .flat_map(|p| (0..p.iov_len).map(|i| p.iov_base as usize + i))
                    .map(|at| at - memory.as_ptr() as usize)
                    .collect();
                assert_eq!(bytes, (first as usize..64).collect::<Vec<_>>());
                assert_eq!(span.moved(64 - first, 1), Ok(()));
                assert!(span.is_done());
            }
        }
    }

    #[test]
    fn a_read_is_complete_only_at_the_known_end() {
        let mut memory = [0u8; 64];
        let span = Span::new(&piece(&mut memory, [16, 32, 48]), &null()).until(137);
        let moved = |steps: &[u64]| {
            let mut span = span;
            let all: Result<()> = steps.iter().try_for_each(|bytes| span.moved(*bytes, 8));
            all.map(|()| span.is_done()).map_err(|error| error.status())
        };
        assert_eq!(moved(&[37]), Ok(true));
        assert_eq!(moved(&[32, 5]), Ok(true));
        assert_eq!(moved(&[64]), Ok(true), "it became longer");
        assert_eq!(moved(&[32]), Ok(false));
        assert_eq!(moved(&[32, 0]), Err(Status::Io));
        assert_eq!(moved(&[36]), Err(Status::Io));
        assert!(span.until(100).is_done(), "all of it is behind the end");
    }

    #[test]
    fn no_progress_and_unaligned_ends_are_errors() {
        let mut memory = [0u8; 64];
        let span = Span::new(&piece(&mut memory, [16, 32, 48]), &null());
        let status = |bytes, align| {
            let mut span = span;
            span.moved(bytes, align).map_err(|error| error.status())
        };
        assert_eq!(status(0, 1), Err(Status::Io));
        assert_eq!(status(5, 4), Err(Status::Io));
        assert_eq!(status(8, 4), Ok(()));
        assert_eq!(status(64, 128), Ok(()), "all of it is never too short");
        assert_eq!(status(1000, 1), Ok(()), "no more than all is ever moved");
    }
}
