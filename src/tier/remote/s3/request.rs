//! Heads of requests, signed where there is a key.

use crate::io::tls::Trust;
use crate::tier::remote::Name;
use crate::tier::remote::name::Prefix;
use crate::tier::remote::s3::date;
use crate::tier::remote::s3::sign::{self, Signed, Signer};
use crate::tier::remote::s3::url::Endpoint;
use crate::tier::remote::secret::Secret;

/// Checked options.
pub struct Settings {
    /// The server and the bucket.
    pub endpoint: Endpoint,
    /// Accepted certificates; None = no TLS.
    pub trust: Option<Trust>,
    /// Certificates are not verified.
    pub is_insecure: bool,
    pub bucket: String,
    /// Its region, for signatures.
    pub region: String,
    /// Prefix of all names.
    pub prefix: Prefix,
    /// Access key id and secret key; None = requests are not signed.
    pub key: Option<(String, Secret)>,
    /// Session token of temporary keys.
    pub token: Option<Secret>,
    /// Longest time until a connection is open.
    pub connect_ns: u64,
    /// Most connections of a client.
    pub connections: usize,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    pub method: &'static str,
    /// The object; None = the bucket.
    pub name: Option<&'a Name>,
    /// Query of the URL, escaped and sorted.
    pub query: &'a str,
    /// First byte, and number of bytes.
    pub range: Option<(u64, u64)>,
    /// `If-None-Match: *`.
    pub if_absent: bool,
    /// Length of the body.
    pub length: Option<u64>,
}

impl Settings {
    /// A signer for one client.
    pub fn signer(&self) -> Option<Signer> {
        let (key, secret) = self.key.as_ref()?;
        Some(Signer::new(key, secret, &self.region))
    }

    /// Writes the head of a request.
    pub fn write(
        &self,
        request: &Request,
        signer: Option<&mut Signer>,
        wall_s: u64,
        out: &mut Vec<u8>,
    ) {
        let Request { method, name, query, range, if_absent, length } = request;
        let path = self.path(*name);
        let target = if query.is_empty() { path.clone() } else { format!("{path}?{query}") };
        let range = range.map(|(first, bytes)| {
            let last = first.saturating_add(bytes.saturating_sub(1));
            format!("bytes={first}-{last}")
        });
        out.extend_from_slice(format!("{method} {target} HTTP/1.1\r\n").as_bytes());
        let mut add = |name: &str, value: &[u8]| {
            [name.as_bytes(), b": ", value, b"\r\n"].iter().for_each(|bytes| out.extend(*bytes));
        };
        add("Host", self.endpoint.authority.as_bytes());
        add("User-Agent", concat!("kvtier/", env!("CARGO_PKG_VERSION")).as_bytes());
        add("Accept-Encoding", b"identity");
        if let Some(length) = length {
            add("Content-Length", length.to_string().as_bytes());
        }
        if *if_absent {
            add("If-None-Match", b"*");
        }
        if let Some(range) = &range {
            add("Range", range.as_bytes());
        }
        if let Some(signer) = signer {
            let stamp = date::stamp(wall_s);
            let payload = if length.is_some() { sign::UNSIGNED } else { sign::NO_BODY };
            // A token that is no text was rejected when the remote was opened.
            let token = self.token.as_ref().map(|token| std::str::from_utf8(token.bytes()));
            let token = token.and_then(|token| token.ok());
            let mut headers = vec![("host", self.endpoint.authority.as_str())];
            headers.extend(if_absent.then_some(("if-none-match", "*")));
            headers.extend(range.as_ref().map(|range| ("range", range.as_str())));
            headers.push(("x-amz-content-sha256", payload));
            headers.push(("x-amz-date", &stamp));
            headers.extend(token.map(|token| ("x-amz-security-token", token)));
            let signed = Signed { method, path: &path, query, headers: &headers, payload };
            add("Authorization", signer.authorization(&signed, &stamp).as_bytes());
            let own = headers.iter().filter(|header| header.0.starts_with("x-amz-"));
            own.for_each(|(name, value)| add(name, value.as_bytes()));
        }
        out.extend_from_slice(b"\r\n");
    }

    fn path(&self, name: Option<&Name>) -> String {
        let mut path = self.endpoint.path.clone().into_bytes();
        if let Some(name) = name {
            path.push(b'/');
            self.prefix.write(name, &mut path);
        }
        if path.is_empty() {
            path.push(b'/');
        }
        // Prefixes and bucket names are ASCII.
        String::from_utf8_lossy(&path).into_owned()
    }
}
