//! What TLS is to be like.

use std::path::PathBuf;

use crate::base::status::Result;
use crate::fail;

/// Memory that a connection with TLS takes beside what one without does, about: records that came
/// and that are to go, and what of the plain ones nobody has taken yet.
pub const TLS_BYTES: u64 = 256 << 10;

/// Who is trusted to be the server, and who we are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOpts {
    /// A file with certificates of authorities, in PEM; none = those that the system trusts.
    pub ca: Option<PathBuf>,
    /// Anybody is. What is sent can then be read, and changed, by whoever is on the way.
    pub insecure: bool,
    /// A file with a certificate to show to servers that ask for one, in PEM.
    pub cert: Option<PathBuf>,
    /// The file of its key; none = it is in the same one.
    pub cert_key: Option<PathBuf>,
}

impl TlsOpts {
    /// What makes no sense, whatever there is in files.
    pub fn check(&self) -> Result<()> {
        if self.insecure && self.ca.is_some() {
            fail!(Spec, "TLS that trusts everybody needs no ca: leave one of the two out");
        }
        if self.cert_key.is_some() && self.cert.is_none() {
            fail!(Spec, "a key (cert_key) is for a certificate: name its file, too (cert)");
        }
        Ok(())
    }
}
