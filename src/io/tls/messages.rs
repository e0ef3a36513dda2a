//! What is wrong with a TLS connection, in words that say what to do.

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

/// The other side ended a connection before it was safe.
pub const ENDED: &str = "it ended the connection before TLS was agreed on: is this its port for \
                         TLS, and does it take clients without certificates (cert)?";
/// A message that is longer than any.
pub const TOO_LONG: &str = "what answers there does not speak TLS: a message has no end";
/// So much was sent that keys are used up.
pub const EXHAUSTED: &str = "so much was sent that the keys of the connection are used up";
/// Most names of a certificate that are shown, and most characters of each.
const MAX_NAMES: usize = 4;
const MAX_NAME: usize = 64;

/// What an error means, and what to do; `host` is who was expected.
pub fn of(error: &Error, host: &str) -> String {
    match error {
        Error::InvalidCertificate(error) => certificate(error, host),
        Error::InvalidMessage(
            InvalidMessage::InvalidContentType
            | InvalidMessage::UnknownProtocolVersion
            | InvalidMessage::MessageTooLarge
            | InvalidMessage::InvalidEmptyPayload,
        ) => "what answers there does not speak TLS: use redis:// for a port without it, or the \
              server's port for TLS"
            .to_string(),
        Error::AlertReceived(
            AlertDescription::CertificateRequired | AlertDescription::AccessDenied,
        ) => "it wants a certificate of its clients that it trusts: name the files of one and of \
              its key (cert, cert_key), or tell it to do without (tls-auth-clients no) and to ask \
              for a password"
            .to_string(),
        Error::AlertReceived(alert) if is_of_ours(*alert) => format!(
            "it does not take the certificate that it is shown ({alert:?}): give another (cert), or \
             tell it of the authority that signed it"
        ),
        Error::AlertReceived(AlertDescription::HandshakeFailure) => {
            "it agrees to no TLS with us: it may want a certificate of its clients (cert), or only \
             ciphers that are not safe any more; its log may say which"
                .to_string()
        }
        Error::AlertReceived(alert) => {
            format!("it refuses TLS with us ({alert:?}): its log may say why")
        }
        Error::PeerIncompatible(why) => {
            format!("it offers no TLS that is safe: TLS 1.2 or 1.3 is needed ({why:?})")
        }
        Error::NoCertificatesPresented => "it shows no certificate: give it one".to_string(),
        other => shorten(&format!("TLS with it failed: {other}"), 200),
    }
}

/// Whether it is a certificate of ours that a server does not like.
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
            format!("its certificate has expired: renew it, {clock}")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("its certificate is not valid yet: it is for later, {clock}")
        }
        CertificateError::UnknownIssuer => {
            "its certificate is of no authority that is trusted here: name the file with the \
             certificate of the one that signed it (ca)"
                .to_string()
        }
        CertificateError::NotValidForName => {
            format!("its certificate is not for \"{host}\": {}", for_name(&[]))
        }
        CertificateError::NotValidForNameContext { presented, .. } => {
            format!("its certificate is not for \"{host}\": {}", for_name(presented))
        }
        CertificateError::Revoked => "its certificate is revoked: give it another".to_string(),
        CertificateError::BadSignature => {
            "its certificate has a signature that is wrong: another authority of the same name \
             signed it, or somebody forges; name the right file (ca)"
                .to_string()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its certificate is not one of a server: issue one with serverAuth".to_string()
        }
        other if format!("{other:?}").contains("CaUsedAsEndEntity") => {
            "its certificate is that of an authority (CA:TRUE): sign another with it for the server, \
             and name this one here (ca)"
                .to_string()
        }
        other => shorten(
            &format!("its certificate is refused ({other:?}): give it another, or another ca"),
            300,
        ),
    }
}

fn for_name(presented: &[String]) -> String {
    let what_to_do = "connect by a name that it has, or issue one with this name";
    if presented.is_empty() {
        return what_to_do.to_string();
    }
    let names: Vec<String> =
        presented.iter().take(MAX_NAMES).map(|name| shorten(name, MAX_NAME)).collect();
    let more = if presented.len() > MAX_NAMES { ", and more" } else { "" };
    format!("it has {}{more}; {what_to_do}", names.join(", "))
}

/// As it may be shown: plain, and not long.
fn shorten(text: &str, most: usize) -> String {
    let plain = |c: char| if c.is_ascii_graphic() { c } else { ' ' };
    text.chars().take(most).map(plain).collect()
}
