//! Trusted certificate authorities: those of a file, the system's, or, on request, any certificate;
//! and the client certificate.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::link::Lost;
use crate::io::tls::Session;
use crate::io::tls::client_cert::ClientCert;
use crate::io::tls_opts::TlsOpts;

/// Where systems keep the trusted authorities.
const SYSTEM: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/usr/local/share/certs/ca-root-nss.crt",
];
/// Limit: bytes of a file of authorities.
const MAX_FILE_BYTES: u64 = 8 << 20;

/// Trust configuration.
pub struct Trust(Arc<ClientConfig>);

impl Trust {
    /// Loads the trusted authorities of a file, or of the system, or accepts any certificate.
    pub fn open(opts: &TlsOpts) -> Result<Trust> {
        opts.check()?;
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::new(Status::Unsupported, format!("TLS: {error}")))?;
        let builder = if opts.insecure {
            let verifier = Arc::new(AcceptAny(provider.clone()));
            builder.dangerous().with_custom_certificate_verifier(verifier)
        } else {
            let roots = match &opts.ca {
                Some(path) => of_file(path)?,
                None => of_system()?,
            };
            builder.with_root_certificates(roots)
        };
        let config = match &opts.cert {
            Some(cert) => {
                let own = ClientCert::open(cert, opts.cert_key.as_ref().unwrap_or(cert), provider)?;
                builder.with_client_cert_resolver(Arc::new(own))
            }
            None => builder.with_no_client_auth(),
        };
        Ok(Trust(Arc::new(config)))
    }

    /// Validates a host name.
    pub fn check(&self, host: &str) -> Result<()> {
        match ServerName::try_from(host) {
            Ok(_) => Ok(()),
            Err(_) => fail!(Spec, "\"{host}\" is no valid host name for a certificate"),
        }
    }

    /// Begins a session with a host.
    pub fn session(&self, host: &str) -> std::result::Result<Session, Lost> {
        let name = ServerName::try_from(host.to_string()).map_err(|_| {
            Lost::Unsafe(format!("\"{host}\" is no valid host name for a certificate"))
        })?;
        let conn = UnbufferedClientConnection::new(self.0.clone(), name)
            .map_err(|error| Lost::Unsafe(format!("TLS: {error}")))?;
        Ok(Session::new(conn, host))
    }
}

fn of_file(path: &Path) -> Result<RootCertStore> {
    let wrong =
        |what: String| Error::new(Status::Spec, format!("the ca file {}: {what}", path.display()));
    let found = read(path).map_err(|error| wrong(error.to_string()))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&found) {
        let certificate = certificate.map_err(|_| wrong("it is not PEM".to_string()))?;
        roots.add(certificate).map_err(|error| wrong(format!("{error}")))?;
    }
    if roots.is_empty() {
        return Err(wrong("it contains no certificate (BEGIN CERTIFICATE)".to_string()));
    }
    Ok(roots)
}

fn of_system() -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for path in SYSTEM {
        let Ok(found) = read(Path::new(path)) else { continue };
        let good = CertificateDer::pem_slice_iter(&found).flatten();
        // Skip certificates that cannot be parsed, which some systems keep.
        roots.add_parsable_certificates(good);
        if !roots.is_empty() {
            return Ok(roots);
        }
    }
    fail!(
        Unavailable,
        "this system has no trusted certificate authorities: install ca-certificates, or name a file (ca)"
    );
}

pub(super) fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(std::io::Error::other("it is longer than the limit of 8 MiB"));
    }
    Ok(bytes)
}

/// Accepts any certificate, but verifies that the server has its key.
#[derive(Debug)]
struct AcceptAny(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAny {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
