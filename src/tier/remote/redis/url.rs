//! URLs of servers: `redis://[user@]host[:port][,host[:port]...][/db]`, `rediss://` with TLS.

use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::tier::remote::url::{host_and_port, is_host};

const PORT: u16 = 6379;
/// Most hosts that a URL names.
pub const MAX_SEEDS: usize = 8;
const MAX_USER_BYTES: usize = 128;
const MAX_DB: u32 = 65535;

/// Host and port of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// A name, or an address without brackets.
    pub host: Arc<str>,
    /// Port of the server.
    pub port: u16,
}

/// A parsed URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// With TLS.
    pub is_tls: bool,
    /// User name; None = the default user.
    pub user: Option<String>,
    /// The hosts of the URL: one, or several nodes of a cluster.
    pub seeds: Vec<Address>,
    /// Number of the database.
    pub db: u32,
}

impl Address {
    /// An address as cluster nodes write it: the last colon precedes the port. A missing host is
    /// the host of the node that wrote it. None = it is no address.
    pub fn of_node(text: &[u8], peer: &Address) -> Option<Address> {
        let text = std::str::from_utf8(text).ok()?;
        let (host, port) = text.rsplit_once(':')?;
        let host = if host.is_empty() || host == "?" { &*peer.host } else { host };
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        let port = port.parse().ok().filter(|&port: &u16| port != 0)?;
        is_host(host).then(|| Address { host: host.into(), port })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl Url {
    /// Parses a URL. Error messages do not repeat the part before an `@`, which may be a password.
    pub fn parse(text: &str) -> Result<Url> {
        let (is_tls, rest) = match text.split_once("://") {
            Some(("redis", rest)) => (false, rest),
            Some(("rediss", rest)) => (true, rest),
            Some(_) => {
                fail!(Spec, "the URL of a Redis server begins with redis://, with TLS rediss://")
            }
            None => fail!(Spec, "a URL looks like redis://host:6379"),
        };
        let (user, rest) = match rest.rsplit_once('@') {
            Some((user, rest)) => (Some(user_of(user)?), rest),
            None => (None, rest),
        };
        let (hosts, db) = match rest.split_once('/') {
            Some((hosts, db)) => (hosts, db_of(db)?),
            None => (rest, 0),
        };
        if hosts.contains(['?', '#']) {
            fail!(Spec, "the URL of a Redis server must not contain '?' or '#'");
        }
        let seeds: Vec<Address> =
            hosts.split(',').take(MAX_SEEDS + 1).map(address).collect::<Result<_>>()?;
        if seeds.len() > MAX_SEEDS {
            fail!(Limit, "the URL names more than {MAX_SEEDS} hosts");
        }
        Ok(Url { is_tls, user, seeds, db })
    }
}

/// Checks the name of a user.
pub fn user_of(text: &str) -> Result<String> {
    if text.contains(':') {
        fail!(
            Spec,
            "the URL has a password: provide it as a secret, not in the URL, which is shown and logged"
        );
    }
    if text.is_empty() || text.len() > MAX_USER_BYTES || !text.bytes().all(|b| b.is_ascii_graphic())
    {
        fail!(Spec, "a user name must have 1 to {MAX_USER_BYTES} printable ASCII characters");
    }
    Ok(text.to_string())
}

fn db_of(text: &str) -> Result<u32> {
    if text.is_empty() {
        return Ok(0);
    }
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(db) if is_number && db <= MAX_DB => Ok(db),
        _ => fail!(Spec, "the path of a Redis URL must be the number of a database, 0 to {MAX_DB}"),
    }
}

fn address(text: &str) -> Result<Address> {
    let (host, port) = host_and_port(text, "a Redis server")?;
    Ok(Address { host: host.into(), port: port.unwrap_or(PORT) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_parsed() {
        let of = |text: &str| Url::parse(text).map_err(|error| error.message().to_string());
        let at = |host: &str, port| Address { host: host.into(), port };
        let url = of("redis://cache-0").unwrap();
        assert_eq!(url, Url { is_tls: false, user: None, seeds: vec![at("cache-0", 6379)], db: 0 });
        let url = of("redis://kv@10.0.0.1:7000/3").unwrap();
        assert_eq!(url.user.as_deref(), Some("kv"));
        assert_eq!((url.seeds, url.db), (vec![at("10.0.0.1", 7000)], 3));
        assert_eq!(of("redis://[::1]:7000/").unwrap().seeds, [at("::1", 7000)]);
        assert_eq!(of("redis://[fe80::1]").unwrap().seeds[0].to_string(), "[fe80::1]:6379");
        assert_eq!(of("redis://a:1,b:2").unwrap().seeds, [at("a", 1), at("b", 2)]);
        for bad in [
            "",
            "redis",
            "redis://",
            "http://a",
            "redis://a:0",
            "redis://a:65536",
            "redis://a:x",
            "redis://::1",
            "redis://[::1",
            "redis://[::1]x",
            "redis://[a]",
            "redis://a/x",
            "redis://a/-1",
            "redis://a/99999",
            "redis://a b",
            "redis://@a",
            "redis://a?x=1",
            "redis://a,,b",
            "redis://a:+",
            "redis://\u{e4}",
        ] {
            assert!(of(bad).is_err(), "{bad}");
        }
        assert!(of(&format!("redis://{}", ["a"; MAX_SEEDS + 1].join(","))).is_err());
    }

    #[test]
    fn a_password_in_a_url_is_rejected_and_not_repeated() {
        for text in ["redis://kv:hunter2@a", "redis://:hunter2@a", "redis://x:hunter2@b@a"] {
            let error = Url::parse(text).unwrap_err();
            assert!(error.message().contains("as a secret"), "{error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
        assert!(Url::parse("rediss://kv@a").unwrap().is_tls);
    }
}
