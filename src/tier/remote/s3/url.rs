//! The endpoint of a bucket: host, port, and path.

use crate::base::status::Result;
use crate::fail;
use crate::tier::remote::url::host_and_port;

/// Where URLs have the bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// `http://host/bucket/name`: every server accepts it.
    #[default]
    Path,
    /// `http://bucket.host/name`: Amazon prefers it.
    Virtual,
}

/// The server and the common part of all requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Whether connections have TLS.
    pub is_tls: bool,
    /// Without brackets.
    pub host: String,
    pub port: u16,
    /// The value of `Host:`.
    pub authority: String,
    /// Path of the bucket; names follow after a `/`.
    pub path: String,
}

impl Endpoint {
    /// Parses `http[s]://host[:port]`. Error messages do not repeat a part that may be a secret.
    pub fn new(url: &str, bucket: &str, style: Style) -> Result<Endpoint> {
        check_bucket(bucket)?;
        let (is_tls, rest) = match url.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            _ => fail!(Spec, "the URL of an S3 endpoint begins with https:// or http://"),
        };
        if rest.contains('@') {
            fail!(
                Spec,
                "the URL has a user: provide keys as secrets, not in the URL, which is shown and logged"
            );
        }
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#', '%']) {
            fail!(
                Spec,
                "the URL of an S3 endpoint must be a host and a port: give the bucket as bucket="
            );
        }
        let (host, port) = host_and_port(rest, "an S3 endpoint")?;
        let host = host.to_ascii_lowercase();
        if style == Style::Virtual && host.parse::<std::net::IpAddr>().is_ok() {
            fail!(Spec, "a bucket's name cannot precede an IP address in a host: use style=path");
        }
        if style == Style::Virtual && is_tls && bucket.contains('.') {
            fail!(
                Spec,
                "no certificate is good for a bucket with dots in its name as a part of the host: \
                 use style=path"
            );
        }
        let usual = if is_tls { 443 } else { 80 };
        let shown = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let port = port.unwrap_or(usual);
        let mut authority = if port == usual { shown } else { format!("{shown}:{port}") };
        let (mut path, mut host) = (format!("/{bucket}"), host);
        if style == Style::Virtual {
            path.clear();
            authority = format!("{bucket}.{authority}");
            host = format!("{bucket}.{host}");
        }
        Ok(Endpoint { is_tls, host, port, authority, path })
    }
}

/// Checks the name of a bucket by Amazon's rules, with the `_` that other servers accept.
fn check_bucket(bucket: &str) -> Result<()> {
    let is_plain =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-_".contains(&byte);
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !(3..=63).contains(&bucket.len())
        || !bucket.bytes().all(is_plain)
        || !is_end(bucket.bytes().next())
        || !is_end(bucket.bytes().last())
        || bucket.contains("..")
        || bucket.parse::<std::net::Ipv4Addr>().is_ok()
    {
        fail!(
            Spec,
            "a bucket has 3 to 63 small letters, digits, '-' and '.', begins and ends with a letter \
             or a digit, and looks unlike an address"
        );
    }
    Ok(())
}

/// Checks the name of a region.
pub fn check_region(region: &str) -> Result<()> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if region.is_empty() || region.len() > 64 || !region.bytes().all(is_plain) {
        fail!(Spec, "a region has 1 to 64 letters, digits and '-', such as us-east-1");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_parsed() {
        let of = |url: &str, style| Endpoint::new(url, "kv-1", style).unwrap();
        let it = of("http://minio:9000/", Style::Path);
        assert_eq!((it.is_tls, it.host.as_str(), it.port), (false, "minio", 9000));
        assert_eq!((it.authority.as_str(), it.path.as_str()), ("minio:9000", "/kv-1"));
        let it = of("https://s3.eu-west-1.amazonaws.com", Style::Virtual);
        assert_eq!((it.is_tls, it.port, it.path.as_str()), (true, 443, ""));
        assert_eq!(it.host, "kv-1.s3.eu-west-1.amazonaws.com");
        assert_eq!(it.authority, it.host);
        let it = of("http://[::1]:80", Style::Path);
        assert_eq!((it.host.as_str(), it.authority.as_str()), ("::1", "[::1]"));
        assert_eq!(of("https://[::1]:80", Style::Path).authority, "[::1]:80");
        assert_eq!(of("http://A.b:8080", Style::Virtual).authority, "kv-1.a.b:8080");
    }

    #[test]
    fn invalid_urls_are_rejected() {
        for url in [
            "",
            "minio:9000",
            "s3://bucket",
            "http://",
            "http:///",
            "http://:80",
            "http://a:",
            "http://a:0",
            "http://a:65536",
            "http://a:+80",
            "http://a/b",
            "http://a?x",
            "http://a#x",
            "http://a b",
            "http://\u{e4}",
            "http://::1",
            "http://[::1",
            "http://[a]",
            "http://[::1]x",
            "http://a\r\nHost:b",
        ] {
            assert!(Endpoint::new(url, "kv-1", Style::Path).is_err(), "{url}");
        }
        assert!(Endpoint::new("http://10.0.0.1", "kv-1", Style::Virtual).is_err());
        assert!(Endpoint::new("https://a", "kv.1", Style::Virtual).is_err());
        assert!(Endpoint::new("http://a", "kv.1", Style::Virtual).is_ok());
        let error = Endpoint::new("https://AKIA:hunter2@a", "kv-1", Style::Path).unwrap_err();
        assert!(error.message().contains("as secrets"), "{error}");
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }

    #[test]
    fn bucket_and_region_names_are_checked() {
        for bad in [
            "",
            "ab",
            "Abc",
            "a_",
            "-ab",
            "ab-",
            "a..b",
            "a/b",
            "192.168.0.1",
            "a b",
            &"a".repeat(64),
        ] {
            assert!(Endpoint::new("http://a", bad, Style::Path).is_err(), "{bad}");
        }
        assert!(["abc", "a.b-c_d", &"a".repeat(63)].iter().all(|good| check_bucket(good).is_ok()));
        assert!(["", "a/b", "a\n", &"a".repeat(65)].iter().all(|bad| check_region(bad).is_err()));
        assert!(["us-east-1", "auto", "garage"].iter().all(|good| check_region(good).is_ok()));
    }
}
