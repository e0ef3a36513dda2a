//! TLS options.

use std::path::PathBuf;

use crate::base::status::Result;
use crate::fail;

/// Approximate memory of a TLS connection beside that of a plain one: received and outgoing
/// records, and decrypted bytes that were not taken yet.
pub const TLS_BYTES: u64 = 256 << 10;

/// Trusted servers, and the client certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOpts {
    /// PEM file with certificates of authorities; none = the system's.
    pub ca: Option<PathBuf>,
    /// Accept any certificate: anyone who controls the network can then read and change the data.
    pub insecure: bool,
    /// PEM file with the client certificate, for servers that require one.
    pub cert: Option<PathBuf>,
    /// PEM file with its key; none = in the same file.
    pub cert_key: Option<PathBuf>,
}

impl TlsOpts {
    /// Rejects contradicting options.
    pub fn check(&self) -> Result<()> {
        if self.insecure && self.ca.is_some() {
            fail!(Spec, "insecure and ca contradict each other: remove one of them");
        }
        if self.cert_key.is_some() && self.cert.is_none() {
            fail!(Spec, "cert_key needs cert: name the file of the certificate, too");
        }
        Ok(())
    }
}
