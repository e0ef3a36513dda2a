//! Streams whose reads and writes end at a deadline, however slowly bytes arrive.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use socket2::SockRef;

/// The time until a deadline; an error once it is over.
pub fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    // A timeout of less than a microsecond would be set as none.
    if left.is_zero() {
        Err(ErrorKind::TimedOut.into())
    } else {
        Ok(left.max(Duration::from_micros(1)))
    }
}

/// A connected socket with a deadline.
pub struct Timed<S> {
    /// The socket.
    pub stream: S,
    /// The deadline.
    pub until: Instant,
}

impl<S: AsFd + Read> Read for Timed<S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        SockRef::from(&self.stream).set_read_timeout(Some(left(self.until)?))?;
        self.stream.read(into)
    }
}

impl<S: AsFd + Write> Write for Timed<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        SockRef::from(&self.stream).set_write_timeout(Some(left(self.until)?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
