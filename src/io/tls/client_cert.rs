//! The client certificate, for servers that require one.

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

/// Presents a client certificate. Short-lived certificates are renewed while engines run, so
/// changed files are reloaded by the next connection.
pub struct ClientCert {
    cert: PathBuf,
    key: PathBuf,
    provider: Arc<CryptoProvider>,
    shown: Mutex<Loaded>,
}

/// The loaded certificate, and the modification times of its files.
struct Loaded {
    own: Arc<CertifiedKey>,
    of: [Option<SystemTime>; 2],
}

impl fmt::Debug for ClientCert {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Own").field("cert", &self.cert).finish_non_exhaustive()
    }
}

impl ClientCert {
    /// Reads a certificate with its intermediate authorities, and its key.
    pub fn open(cert: &Path, key: &Path, provider: Arc<CryptoProvider>) -> Result<ClientCert> {
        let shown = load(cert, key, &provider)?;
        let (cert, key) = (cert.to_path_buf(), key.to_path_buf());
        Ok(ClientCert { cert, key, provider, shown: Mutex::new(shown) })
    }

    /// The current content of the files; the previous one if they cannot be loaded.
    fn newest(&self) -> Arc<CertifiedKey> {
        let mut shown = self.shown.lock();
        if shown.of != times(&self.cert, &self.key) {
            match load(&self.cert, &self.key, &self.provider) {
                Ok(newer) => *shown = newer,
                // Between the updates of the two files they do not match.
                Err(error) => {
                    log::warn!("the previous client certificate stays in use: {error}")
                }
            }
        }
        shown.own.clone()
    }
}

impl ResolvesClientCert for ClientCert {
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

fn load(cert: &Path, key: &Path, provider: &CryptoProvider) -> Result<Loaded> {
    let wrong = |what: &str, path: &Path, why: &str| {
        Error::new(Status::Spec, format!("{what} {}: {why}", path.display()))
    };
    // Taken before reading: files that change during the read are read again.
    let of = times(cert, key);
    let of_cert = |why: &str| wrong("client certificate", cert, why);
    let found = read(cert).map_err(|error| of_cert(&error.to_string()))?;
    let chain: std::result::Result<Vec<CertificateDer<'static>>, _> =
        CertificateDer::pem_slice_iter(&found).collect();
    let chain = chain.map_err(|_| of_cert("it is not PEM"))?;
    if chain.is_empty() {
        return Err(of_cert("it contains no certificate (BEGIN CERTIFICATE)"));
    }
    let of_key = |why: &str| wrong("client key", key, why);
    let found = read(key).map_err(|error| of_key(&error.to_string()))?;
    // The message must not reveal bytes of the key.
    let private = PrivateKeyDer::from_pem_slice(&found)
        .map_err(|_| of_key("it contains no unencrypted key (BEGIN PRIVATE KEY)"))?;
    let own = CertifiedKey::from_der(chain, private, provider).map_err(|error| match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            of_key(&format!("it does not match the certificate in {}", cert.display()))
        }
        _ => of_key(
            "it is of an unsupported kind: use RSA of at least 2048 bits, ECDSA on \
                     P-256 or P-384, or Ed25519, and a certificate for it",
        ),
    })?;
    Ok(Loaded { own: Arc::new(own), of })
}
