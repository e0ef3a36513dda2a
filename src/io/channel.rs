//! Connections with or without TLS, behind one interface. As with links, no call waits.

use std::net::SocketAddr;

use crate::io::link::{Link, Lost, Pieces, Watch};
use crate::io::tls::{Session, Trust};

/// A connection, established or in progress.
pub struct Channel {
    link: Link,
    tls: Option<Session>,
}

impl Channel {
    /// Begins to connect; `tls` is the trust configuration and the expected host.
    pub fn begin(to: &SocketAddr, tls: Option<(&Trust, &str)>) -> Result<Channel, Lost> {
        let tls = tls.map(|(trust, host)| trust.session(host)).transpose()?;
        Ok(Channel { link: Link::begin(to)?, tls })
    }

    /// The result of connecting. Call it only after a wait for room to write.
    pub fn made(&self) -> Result<(), Lost> {
        self.link.made()
    }

    /// Round-trip time, if the kernel knows it.
    pub fn round_trip_ns(&self) -> Option<u64> {
        self.link.round_trip_ns()
    }

    /// Continues the TLS handshake; true once it is complete.
    pub fn secure(&mut self) -> Result<bool, Lost> {
        self.tls.as_mut().map_or(Ok(true), |tls| tls.handshake(&self.link))
    }

    /// Whether encrypted bytes that [`Channel::send`] took are still to be sent.
    pub fn wants_write(&self) -> bool {
        self.tls.as_ref().is_some_and(Session::wants_write)
    }

    /// Sends as much as there is room for now; None = no room. Bytes that it took may not be sent
    /// yet: see [`Channel::wants_write`].
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

    /// Receives what has arrived, as far as the pieces have room; None = nothing has.
    ///
    /// # Safety
    /// Every piece can be written, and nothing else accesses it meanwhile.
    pub unsafe fn receive(&mut self, pieces: &mut Pieces) -> Result<Option<usize>, Lost> {
        match &mut self.tls {
            // SAFETY: the caller vouches for the pieces.
            Some(tls) => unsafe { tls.receive(&self.link, pieces) },
            // SAFETY: the caller vouches for the pieces.
            None => unsafe { self.link.receive(pieces) },
        }
    }

    /// Overwrites copies of the bytes that were sent last.
    pub fn wipe(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.wipe();
        }
    }

    /// Adds the connection to a set to wait for.
    pub fn watch(&self, watch: &mut Watch, to_read: bool, to_write: bool) {
        watch.add(&self.link, to_read, to_write);
    }
}
