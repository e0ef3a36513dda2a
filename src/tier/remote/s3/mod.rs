//! Amazon S3 and compatible servers (MinIO, Ceph, SeaweedFS, Garage, ...): an object is an object
//! of a bucket, under its name.
//!
//! A client has a few connections with one request at a time each: S3 has no pipelining. Objects
//! move between the socket and the memory of their parts. The first writer of a name wins
//! (`If-None-Match: *`). The bucket's lifecycle rules remove objects.
//!
//! The HTTP client is our own (`http`, `connection`). It receives a reply while it sends the
//! request, into given memory, from several connections at once, by one deadline.

mod client;
mod connection;
mod date;
mod errors;
pub mod http;
mod operation;
mod probe;
mod request;
mod sign;
mod url;
pub mod xml;

use crate::base::clock::{Clock, wall_s};
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::fail;
use crate::io::tls_opts::TLS_BYTES;
pub use crate::io::tls_opts::TlsOpts;
use crate::tier::remote::name::Prefix;
use crate::tier::remote::s3::client::S3Client;
use crate::tier::remote::s3::connection::Reply;
use crate::tier::remote::s3::request::Settings;
use crate::tier::remote::s3::url::Endpoint;
use crate::tier::remote::secret::Secret;
use crate::tier::remote::url::trust;
use crate::tier::remote::{Caps, Client, Remote};

pub use crate::tier::remote::s3::url::Style;

/// Longest object. A put may have 5 GiB, but far less before a deadline.
const MAX_BYTES: u64 = 64 << 20;
/// Length of objects that servers handle fast.
const PREFERRED_BYTES: u64 = 8 << 20;
/// Approximate memory of a connection: the head of a request, and a reply with its error text.
const CONN_BYTES: u64 = 96 << 10;
/// Most connections of a client.
pub const MAX_CONNECTIONS: u32 = 64;
const MAX_KEY_BYTES: usize = 128;

/// Address of a bucket, and its use.
#[derive(Clone, Debug)]
pub struct S3Opts {
    /// `https://host[:port]` of the endpoint, without the bucket.
    pub url: String,
    /// The bucket; it must exist.
    pub bucket: String,
    /// Its region, for signatures; `us-east-1` for servers that ignore it.
    pub region: String,
    /// Where URLs have the bucket.
    pub style: Style,
    /// Prefix of all names.
    pub prefix: Prefix,
    /// Access key id; None = requests are not signed.
    pub key: Option<Secret>,
    /// Secret access key.
    pub secret: Option<Secret>,
    /// Session token of temporary keys.
    pub token: Option<Secret>,
    /// Longest time until a connection is open.
    pub connect_ns: u64,
    /// Most connections of a client, 1 to [`MAX_CONNECTIONS`].
    pub connections: u32,
    /// Certificates and verification, for `https://`.
    pub tls: TlsOpts,
}

/// A bucket.
pub struct S3(Arc<Shared>);

/// State that all clients share.
struct Shared {
    settings: Settings,
    clock: Clock,
    /// Whether the server has rejected a conditional put.
    is_unconditional: AtomicBool,
}

impl Shared {
    /// Message for a reply, without secrets.
    fn words(&self, reply: &Reply) -> String {
        let Settings { key, token, .. } = &self.settings;
        let mut secrets: Vec<&[u8]> = token.iter().map(Secret::bytes).collect();
        if let Some((name, key)) = key {
            secrets.extend([name.as_bytes(), key.bytes()]);
        }
        errors::words(reply, wall_s(), &secrets)
    }
}

impl S3 {
    /// A remote without connections. SPEC, UNSUPPORTED, LIMIT = an option is not possible.
    pub fn open(opts: &S3Opts, clock: Clock) -> Result<S3> {
        let endpoint = Endpoint::new(&opts.url, &opts.bucket, opts.style)?;
        url::check_region(&opts.region)?;
        if opts.connections == 0 || opts.connections > MAX_CONNECTIONS {
            fail!(
                Limit,
                "{} connections per client: 1 to {MAX_CONNECTIONS} are possible",
                opts.connections
            );
        }
        let hosts = std::iter::once(endpoint.host.as_str());
        let trust = trust(endpoint.is_tls, hosts, &opts.tls, ["https", "http"])?;
        let key = match (&opts.key, &opts.secret) {
            (Some(key), Some(secret)) => Some((plain(key, "access key")?, secret.clone())),
            (None, None) => None,
            _ => fail!(
                Spec,
                "an access key and a secret key are needed together: provide both as secrets"
            ),
        };
        if let Some(token) = &opts.token {
            plain(token, "session token")?;
            if key.is_none() {
                fail!(
                    Spec,
                    "a session token needs an access key and a secret key: provide them as secrets"
                );
            }
        }
        let settings = Settings {
            endpoint,
            trust,
            is_insecure: opts.tls.insecure,
            bucket: opts.bucket.clone(),
            region: opts.region.clone(),
            prefix: opts.prefix.clone(),
            key,
            token: opts.token.clone(),
            connect_ns: opts.connect_ns,
            connections: opts.connections as usize,
        };
        Ok(S3(Arc::new(Shared { settings, clock, is_unconditional: AtomicBool::new(false) })))
    }
}

/// Checks a secret that is sent in a header.
fn plain(secret: &Secret, what: &str) -> Result<String> {
    let bytes = secret.bytes();
    let most = if what == "access key" { MAX_KEY_BYTES } else { usize::MAX };
    let is_plain = !bytes.is_empty() && bytes.iter().all(u8::is_ascii_graphic);
    if bytes.len() > most || !is_plain || (what == "access key" && bytes.contains(&b'/')) {
        fail!(Spec, "the {what} has invalid characters: is there a line break at its end?");
    }
    Ok(String::from_utf8_lossy(bytes).into_owned())
}

impl Remote for S3 {
    fn caps(&self) -> Caps {
        let is_tls = self.0.settings.trust.is_some();
        let conn_bytes = CONN_BYTES + if is_tls { TLS_BYTES } else { 0 };
        Caps {
            preferred_bytes: PREFERRED_BYTES,
            max_bytes: MAX_BYTES,
            batch: 2 * self.0.settings.connections,
            names: 64,
            ranges: true,
            first_wins: !self.0.is_unconditional.load(Ordering::Relaxed),
            client_bytes: self.0.settings.connections as u64 * conn_bytes,
        }
    }

    fn client(&self) -> Box<dyn Client> {
        Box::new(S3Client::new(self.0.clone()))
    }
}
