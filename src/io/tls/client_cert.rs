//! Who we are: a certificate of our own, for servers that ask their clients for one.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustls::client::ResolvesClientCert;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{InconsistentKeys, SignatureScheme};

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Mutex;
use crate::io::tls::trust::read;

/// Shows a certificate. Those that last for days are renewed under engines that run for months:
/// files that have changed are read again by the next connection.
pub struct Own {
    cert: PathBuf,
    key: PathBuf,
    provider: Arc<CryptoProvider>,
    shown: Mutex<Shown>,
}

/// What is shown, and of when the files are that it was read from.
struct Shown {
    own: Arc<CertifiedKey>,
    of: [Option<SystemTime>; 2],
}

impl fmt::Debug for Own {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Own").field("cert", &self.cert).finish_non_exhaustive()
    }
}

impl Own {
    /// Reads a certificate, those of the authorities between it and what the server trusts, and
    /// its key.
    pub fn open(cert: &Path, key: &Path, provider: Arc<CryptoProvider>) -> Result<Own> {
        let shown = load(cert, key, &provider)?;
        let (cert, key) = (cert.to_path_buf(), key.to_path_buf());
        Ok(Own { cert, key, provider, shown: Mutex::new(shown) })
    }

    /// What is in the files by now; what was in them before where that is nothing.
    fn newest(&self) -> Arc<CertifiedKey> {
        let mut shown = self.shown.lock();
        if shown.of != times(&self.cert, &self.key) {
            match load(&self.cert, &self.key, &self.provider) {
                Ok(newer) => *shown = newer,
                // Between the writing of one file and of the other they do not fit.
                Err(error) => {
                    log::warn!("the certificate that is shown stays the old one: {error}")
                }
            }
        }
        shown.own.clone()
    }
}

impl ResolvesClientCert for Own {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let own = self.newest();
        own.key.choose_scheme(schemes).is_some().then_some(own)
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn times(cert: &Path, key: &Path) -> [Option<SystemTime>; 2] {
    [cert, key].map(|path| std::fs::metadata(path).and_then(|facts| facts.modified()).ok())
}

fn load(cert: &Path, key: &Path, provider: &CryptoProvider) -> Result<Shown> {
    let wrong = |what: &str, path: &Path, why: &str| {
        Error::new(Status::Spec, format!("the file of {what} {}: {why}", path.display()))
    };
    // What is written while it is read is read again.
    let of = times(cert, key);
    let of_cert = |why: &str| wrong("our certificate", cert, why);
    let found = read(cert).map_err(|error| of_cert(&error.to_string()))?;
    let chain: std::result::Result<Vec<CertificateDer<'static>>, _> =
        CertificateDer::pem_slice_iter(&found).collect();
    let chain = chain.map_err(|_| of_cert("it is no PEM"))?;
    if chain.is_empty() {
        return Err(of_cert("it has no certificate (BEGIN CERTIFICATE)"));
    }
    let of_key = |why: &str| wrong("our key", key, why);
    let found = read(key).map_err(|error| of_key(&error.to_string()))?;
    // Which of its bytes are wrong is said to nobody.
    let private = PrivateKeyDer::from_pem_slice(&found).map_err(|_| {
        of_key("it has no key (BEGIN PRIVATE KEY) that can be read without a password")
    })?;
    let own = CertifiedKey::from_der(chain, private, provider).map_err(|error| match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            of_key(&format!("it is not that of the certificate in {}", cert.display()))
        }
        _ => of_key(
            "it is of a kind that is not known: RSA of 2048 bits and more, ECDSA on P-256 \
                     or P-384, or Ed25519, and a certificate for it",
        ),
    })?;
    Ok(Shown { own: Arc::new(own), of })
}
