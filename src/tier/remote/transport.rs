//! A TCP connection, with TLS if the URL requires it, from the first packet on. Nothing here
//! blocks.

use std::net::SocketAddr;

use crate::io::channel::Channel;
use crate::io::link::{Lost, Pieces, Watch};
use crate::io::tls::Trust;
use crate::tier::remote::fault::Fault;

/// Most reads, or writes, of one connection before other connections are served.
pub const TURNS: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Connecting,
    Securing,
    Open,
}

/// A connection that is open, or is being established.
pub struct Transport {
    channel: Channel,
    phase: Phase,
    /// There may be bytes to read.
    pub can_read: bool,
    /// The kernel may accept bytes.
    pub can_write: bool,
    /// Deadline for the connection to be ready.
    pub ready_by_ns: u64,
}

impl Transport {
    /// Begins to connect. `tls`: the accepted certificates, and the expected host.
    pub fn begin(
        to: &SocketAddr,
        tls: Option<(&Trust, &str)>,
        ready_by_ns: u64,
    ) -> Result<Transport, Fault> {
        let channel = Channel::begin(to, tls)?;
        let phase = Phase::Connecting;
        Ok(Transport { channel, phase, can_read: false, can_write: false, ready_by_ns })
    }

    /// Continues to establish the connection; whether it is open.
    pub fn establish(&mut self) -> Result<bool, Fault> {
        if self.phase == Phase::Connecting {
            if !self.can_write {
                return Ok(false);
            }
            self.channel.made()?;
            self.phase = Phase::Securing;
        }
        if self.phase == Phase::Securing {
            if !self.channel.secure()? {
                return Ok(false);
            }
            self.phase = Phase::Open;
            (self.can_read, self.can_write) = (true, true);
        }
        Ok(true)
    }

    /// Whether requests can be sent.
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Whether there is no TCP connection yet.
    pub fn is_connecting(&self) -> bool {
        self.phase == Phase::Connecting
    }

    /// The message for a connection that was not open by its deadline.
    pub fn timeout_message(&self) -> &'static str {
        match self.phase {
            Phase::Connecting => "no connection in time",
            _ => "no TLS handshake in time: is this the server's port for TLS?",
        }
    }

    /// Adds the connection to `watch`. `to_read`, `to_write`: what an open connection waits for.
    /// False = it waits for nothing.
    pub fn watch(&self, watch: &mut Watch, to_read: bool, to_write: bool) -> bool {
        let (to_read, to_write) = match self.phase {
            Phase::Connecting => (false, true),
            Phase::Securing => (true, self.channel.wants_write()),
            Phase::Open => (to_read, to_write || self.channel.wants_write()),
        };
        if to_read || to_write {
            self.channel.watch(watch, to_read, to_write);
        }
        to_read || to_write
    }

    /// Records readiness that a wait reported.
    pub fn woke(&mut self, (can_read, can_write): (bool, bool)) {
        self.can_read |= can_read;
        self.can_write |= can_write;
    }

    /// Whether TLS has bytes to send that [`Transport::send`] already accepted.
    pub fn wants_write(&self) -> bool {
        self.channel.wants_write()
    }

    /// Round-trip time as measured by the kernel.
    pub fn round_trip_ns(&self) -> Option<u64> {
        self.channel.round_trip_ns()
    }

    /// Sends; None = the kernel accepts nothing now.
    ///
    /// # Safety
    /// Every piece can be read.
    pub unsafe fn send(&mut self, pieces: &mut Pieces) -> Result<Option<usize>, Lost> {
        // SAFETY: the caller's guarantee.
        let sent = unsafe { self.channel.send(pieces) }?;
        self.can_write &= sent.is_some();
        Ok(sent)
    }

    /// Receives; None = there is nothing to read.
    ///
    /// # Safety
    /// Every piece can be written, and nothing else accesses it during the call.
    pub unsafe fn receive(&mut self, pieces: &mut Pieces) -> Result<Option<usize>, Lost> {
        // SAFETY: the caller's guarantee.
        let received = unsafe { self.channel.receive(pieces) }?;
        self.can_read &= received.is_some();
        Ok(received)
    }

    /// Overwrites the copy that TLS keeps of the bytes sent last.
    pub fn wipe(&mut self) {
        self.channel.wipe();
    }
}
