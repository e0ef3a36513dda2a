//! Stub without the `tls` feature: [`Trust::open`] returns UNSUPPORTED, so no other function can be
//! called.

use std::convert::Infallible;

use crate::base::status::Result;
use crate::fail;
use crate::io::link::{Link, Lost, Pieces};
use crate::io::tls_opts::TlsOpts;

/// Trust configuration.
pub struct Trust(Infallible);

/// A TLS session.
pub struct Session(Infallible);

impl Trust {
    /// Returns UNSUPPORTED.
    pub fn open(_: &TlsOpts) -> Result<Trust> {
        fail!(
            Unsupported,
            "built without tls: use a library that is built with the feature \"tls\", or redis:// over \
             a network or a tunnel that you trust"
        );
    }

    /// Validates a host.
    pub fn check(&self, _: &str) -> Result<()> {
        match self.0 {}
    }

    /// Begins a session.
    pub fn session(&self, _: &str) -> std::result::Result<Session, Lost> {
        match self.0 {}
    }
}

impl Session {
    /// Whether bytes are to be sent.
    pub fn wants_write(&self) -> bool {
        match self.0 {}
    }

    /// Continues the handshake.
    pub fn handshake(&mut self, _: &Link) -> std::result::Result<bool, Lost> {
        match self.0 {}
    }

    /// Sends.
    ///
    /// # Safety
    /// Every piece can be read.
    pub unsafe fn send(
        &mut self,
        _: &Link,
        _: &Pieces,
    ) -> std::result::Result<Option<usize>, Lost> {
        match self.0 {}
    }

    /// Receives.
    ///
    /// # Safety
    /// Every piece can be written.
    pub unsafe fn receive(
        &mut self,
        _: &Link,
        _: &Pieces,
    ) -> std::result::Result<Option<usize>, Lost> {
        match self.0 {}
    }

    /// Overwrites copies of sent bytes.
    pub fn wipe(&mut self) {
        match self.0 {}
    }
}
