//! Hosts and ports in the URLs of servers, and TLS for them.

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::tls::Trust;
use crate::io::tls_opts::TlsOpts;

/// Longest host name, in bytes.
const MAX_HOST_BYTES: usize = 253;

/// Reads `host[:port]` or `[IPv6][:port]`: the host without brackets, and the port. `server` names
/// the kind of server in error messages. They never repeat the text, which may hold a secret.
pub fn host_and_port<'a>(text: &'a str, server: &str) -> Result<(&'a str, Option<u16>)> {
    let wrong = |what: &str| Error::new(Status::Spec, format!("the URL of {server}: {what}"));
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) =
                rest.split_once(']').ok_or_else(|| wrong("a '[' has no ']'; write [IPv6]:port"))?;
            if host.parse::<std::net::Ipv6Addr>().is_err() {
                return Err(wrong("the text between '[' and ']' is no IPv6 address"));
            }
            match rest.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if rest.is_empty() => (host, None),
                None => return Err(wrong("only a port can follow ']'; write [IPv6]:port")),
            }
        }
        None => match text.split_once(':') {
            Some((_, port)) if port.contains(':') => {
                return Err(wrong("write an IPv6 address in '[' and ']'"));
            }
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if !is_host(host) {
        return Err(wrong("the host is missing or has characters that no host has"));
    }
    let port = match port.map(|port| (port, port.parse())) {
        None => None,
        Some((port, Ok(number))) if number != 0 && port.bytes().all(|b| b.is_ascii_digit()) => {
            Some(number)
        }
        Some(_) => return Err(wrong("the port is no number from 1 to 65535")),
    };
    Ok((host, port))
}

/// Whether a text can be the name or the address of a host.
pub fn is_host(host: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%".contains(&byte);
    !host.is_empty() && host.len() <= MAX_HOST_BYTES && host.bytes().all(is_plain)
}

/// The certificates that servers are checked against; None = connections are not encrypted.
/// `schemes`: the schemes of a URL with and without TLS.
pub fn trust<'a>(
    is_tls: bool,
    mut hosts: impl Iterator<Item = &'a str>,
    opts: &TlsOpts,
    schemes: [&str; 2],
) -> Result<Option<Trust>> {
    if !is_tls {
        if *opts != TlsOpts::default() {
            let [tls, plain] = schemes;
            fail!(Spec, "TLS options need a URL with {tls}://, and the URL begins with {plain}://");
        }
        return Ok(None);
    }
    let trust = Trust::open(opts)?;
    hosts.try_for_each(|host| trust.check(host))?;
    Ok(Some(trust))
}
