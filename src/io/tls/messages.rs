//! Messages for TLS failures, with advice.

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

/// The server closed the connection before the handshake was complete.
pub const ENDED: &str = "the server closed the connection during the TLS handshake: is this its port for \
                         TLS, and does it accept clients without certificates (cert)?";
/// A message exceeds the protocol's limit.
pub const TOO_LONG: &str = "the server does not speak TLS: a message exceeds the limit";
/// The keys of the connection are used up.
pub const EXHAUSTED: &str = "the keys of the TLS connection are used up: reconnect";
/// Limits: names of a certificate that are shown, and characters of each.
const MAX_NAMES: usize = 4;
const MAX_NAME: usize = 64;

/// Message for an error; `host` is the expected host.
pub fn of(error: &Error, host: &str) -> String {
    match error {
        Error::InvalidCertificate(error) => certificate(error, host),
        Error::InvalidMessage(
            InvalidMessage::InvalidContentType
            | InvalidMessage::UnknownProtocolVersion
            | InvalidMessage::MessageTooLarge
            | InvalidMessage::InvalidEmptyPayload,
        ) => "the server does not speak TLS: use redis:// for a port without TLS, or the \
              server's port for TLS"
            .to_string(),
        Error::AlertReceived(
            AlertDescription::CertificateRequired | AlertDescription::AccessDenied,
        ) => "the server requires a trusted client certificate: name its file and that of its key \
              (cert, cert_key), or disable the requirement (tls-auth-clients no) and use a \
              password"
            .to_string(),
        Error::AlertReceived(alert) if is_of_ours(*alert) => format!(
            "the server rejects the client certificate ({alert:?}): use another (cert), or make the \
             server trust the authority that signed it"
        ),
        Error::AlertReceived(AlertDescription::HandshakeFailure) => {
            "the TLS handshake failed: the server may require a client certificate (cert), or offer only \
             ciphers that are insecure; see its log"
                .to_string()
        }
        Error::AlertReceived(alert) => {
            format!("the server rejects TLS ({alert:?}): see its log")
        }
        Error::PeerIncompatible(why) => {
            format!("the server offers no secure version: TLS 1.2 or 1.3 is needed ({why:?})")
        }
        Error::NoCertificatesPresented => "the server presents no certificate: configure one".to_string(),
        other => shorten(&format!("TLS failed: {other}"), 200),
    }
}

/// Whether the server rejects the client certificate.
fn is_of_ours(alert: AlertDescription) -> bool {
    use AlertDescription as Alert;
    matches!(
        alert,
        Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
    )
}

fn certificate(error: &CertificateError, host: &str) -> String {
    let clock = "or the clock of this machine is wrong";
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("the server's certificate has expired: renew it, {clock}")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("the server's certificate is not valid yet, {clock}")
        }
        CertificateError::UnknownIssuer => {
            "the server's certificate is of no trusted authority: name the file with the \
             certificate of the one that signed it (ca)"
                .to_string()
        }
        CertificateError::NotValidForName => {
            format!("the server's certificate is not for \"{host}\": {}", for_name(&[]))
        }
        CertificateError::NotValidForNameContext { presented, .. } => {
            format!("the server's certificate is not for \"{host}\": {}", for_name(presented))
        }
        CertificateError::Revoked => "the server's certificate is revoked: replace it".to_string(),
        CertificateError::BadSignature => {
            "the server's certificate has a wrong signature: another authority of the same name \
             signed it, or it is forged; name the right file (ca)"
                .to_string()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "the server's certificate is not for servers: issue one with serverAuth".to_string()
        }
        other if format!("{other:?}").contains("CaUsedAsEndEntity") => {
            "the server's certificate is that of an authority (CA:TRUE): sign one for the server with \
             it, and name the authority here (ca)"
                .to_string()
        }
        other => shorten(
            &format!("the server's certificate is rejected ({other:?}): replace it, or name another ca"),
            300,
        ),
    }
}

fn for_name(presented: &[String]) -> String {
    let what_to_do = "connect by one of its names, or issue one with this name";
    if presented.is_empty() {
        return what_to_do.to_string();
    }
    let names: Vec<String> =
        presented.iter().take(MAX_NAMES).map(|name| shorten(name, MAX_NAME)).collect();
    let more = if presented.len() > MAX_NAMES { ", and more" } else { "" };
    format!("its names are {}{more}; {what_to_do}", names.join(", "))
}

/// Plain characters, at most `most`.
fn shorten(text: &str, most: usize) -> String {
    let plain = |c: char| if c.is_ascii_graphic() { c } else { ' ' };
    text.chars().take(most).map(plain).collect()
}
