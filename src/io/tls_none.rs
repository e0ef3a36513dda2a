//! In the place of TLS where it is not built in: it cannot be had, and so nothing of it happens.

use std::convert::Infallible;

use crate::base::status::Result;
use crate::fail;
use crate::io::link::{Link, Lost, Pieces};
use crate::io::tls_opts::TlsOpts;

/// Who would be trusted.
pub struct Trust(Infallible);

/// What would be on a connection.
pub struct Session(Infallible);

impl Trust {
    /// UNSUPPORTED.
    pub fn open(_: &TlsOpts) -> Result<Trust> {
        fail!(
            Unsupported,
            "built without tls: use a library that is built with the feature \"tls\", or redis:// over \
             a network or a tunnel that you trust"
        );
    }

    /// Whether a host can be expected.
    pub fn check(&self, _: &str) -> Result<()> {
        match self.0 {}
    }

    /// A session.
    pub fn session(&self, _: &str) -> std::result::Result<Session, Lost> {
        match self.0 {}
    }
}

impl Session {
    /// Whether something is to be sent.
    pub fn owes(&self) -> bool {
        match self.0 {}
    }

    /// Goes on with the handshake.
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

    /// Forgets.
    pub fn wipe(&mut self) {
        match self.0 {}
    }
}
