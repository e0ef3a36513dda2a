//! Connections as they are, or with TLS on them: the same to whoever sends and receives. As with
//! links, nothing waits.

use std::net::SocketAddr;

use crate::io::link::{Link, Lost, Pieces, Watch};
use crate::io::tls::{Session, Trust};

/// A connection, or one that is being made.
pub struct Channel {
    link: Link,
    tls: Option<Session>,
}

impl Channel {
    /// Begins a connection; with TLS, if it is told whom to trust and whom to expect.
    pub fn begin(to: &SocketAddr, tls: Option<(&Trust, &str)>) -> Result<Channel, Lost> {
        let tls = tls.map(|(trust, host)| trust.session(host)).transpose()?;
        Ok(Channel { link: Link::begin(to)?, tls })
    }

    /// What became of the connection that was begun. Only after a wait for room to write.
    pub fn made(&self) -> Result<(), Lost> {
        self.link.made()
    }

    /// How long the way to the other side and back takes, as far as the kernel knows.
    pub fn round_trip_ns(&self) -> Option<u64> {
        self.link.round_trip_ns()
    }

    /// Goes on with what has to be said before anything else; whether all of that has been.
    pub fn secure(&mut self) -> Result<bool, Lost> {
        self.tls.as_mut().map_or(Ok(true), |tls| tls.handshake(&self.link))
    }

    /// Whether something is to be sent besides what [`Channel::send`] was given and did not take.
    pub fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(Session::owes)
    }

    /// Sends what there is room for now; None = there is none. What it took may be on its way
    /// still: see [`Channel::owes`].
    ///
    /// # Safety
    /// Every piece can be read.
    pub unsafe fn send(&mut self, pieces: &mut Pieces) -> Result<Option<usize>, Lost> {
        match &mut self.tls {
            // SAFETY: the caller vouches for the pieces.
            Some(tls) => unsafe { tls.send(&self.link, pieces) },
            // SAFETY: the caller vouches for the pieces.
            None => unsafe { self.link.send(pieces) },
        }
    }

    /// Takes what has come, at most as much as the pieces have room for; None = nothing has.
    ///
    /// # Safety
    /// Every piece can be written, by nobody else meanwhile.
    pub unsafe fn receive(&mut self, pieces: &mut Pieces) -> Result<Option<usize>, Lost> {
        match &mut self.tls {
            // SAFETY: the caller vouches for the pieces.
            Some(tls) => unsafe { tls.receive(&self.link, pieces) },
            // SAFETY: the caller vouches for the pieces.
            None => unsafe { self.link.receive(pieces) },
        }
    }

    /// Forgets what was sent last.
    pub fn wipe(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.wipe();
        }
    }

    /// Adds it to what is waited for.
    pub fn watch(&self, watch: &mut Watch, to_read: bool, to_write: bool) {
        watch.add(&self.link, to_read, to_write);
    }
}
