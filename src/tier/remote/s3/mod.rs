//! Amazon S3, and what speaks as it does (MinIO, Ceph, SeaweedFS, Garage, ...): an object is an
//! object of a bucket, under its name.
//!
//! A lane has a few connections, each with one request at a time: S3 has no pipelines. Objects go
//! from and to the memory of their parts. The first writer of a name wins (`If-None-Match: *`).
//! When objects go is the bucket's: its lifecycle rules.
//!
//! The client is our own (`http`, `connection`), since a reply is to be taken while a request is still
//! being sent, into memory that is given, from several connections at once, and by one deadline.

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

/// Most bytes of an object: a put takes 5 GiB at once, and a deadline far less.
const MAX_BYTES: u64 = 64 << 20;
/// Bytes of an object that servers are quick with.
const PREFERRED_BYTES: u64 = 8 << 20;
/// Memory of a connection, about: a request's head, and a reply's with what explains errors.
const CONN_BYTES: u64 = 96 << 10;
/// Most connections of a lane.
pub const MAX_CONNECTIONS: u32 = 64;
const MAX_KEY_BYTES: usize = 128;

/// How to reach a bucket, and how to use it.
#[derive(Clone, Debug)]
pub struct S3Opts {
    /// `https://host[:port]` of the endpoint, without the bucket.
    pub url: String,
    /// The bucket. It must be there.
    pub bucket: String,
    /// Where it is, as signatures say it: `us-east-1` where servers do not care.
    pub region: String,
    /// Where its name stands.
    pub style: Style,
    /// What stands before all names.
    pub prefix: Prefix,
    /// The identifier of the key that requests are signed with; none = they are not signed.
    pub key: Option<Secret>,
    /// The key.
    pub secret: Option<Secret>,
    /// What goes with keys that are good for some hours.
    pub token: Option<Secret>,
    /// Longest time until a connection is made.
    pub connect_ns: u64,
    /// Most connections of a lane, 1 to [`MAX_CONNECTIONS`].
    pub connections: u32,
    /// Who is trusted to be the server, where the URL is `https://`.
    pub tls: TlsOpts,
}

/// A bucket.
pub struct S3(Arc<Shared>);

/// What all lanes know.
struct Shared {
    settings: Settings,
    clock: Clock,
    /// The server cannot store what is new only: this came up.
    is_unconditional: AtomicBool,
}

impl Shared {
    /// What there is to be told of a reply.
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
    /// A bucket that nobody is connected to yet. SPEC, UNSUPPORTED, LIMIT = it cannot be as asked.
    pub fn open(opts: &S3Opts, clock: Clock) -> Result<S3> {
        let endpoint = Endpoint::new(&opts.url, &opts.bucket, opts.style)?;
        url::check_region(&opts.region)?;
        if opts.connections == 0 || opts.connections > MAX_CONNECTIONS {
            fail!(
                Limit,
                "{} connections of a lane, 1 to {MAX_CONNECTIONS} can be",
                opts.connections
            );
        }
        let hosts = std::iter::once(endpoint.host.as_str());
        let trust = trust(endpoint.is_tls, hosts, &opts.tls, ["https", "http"])?;
        let key = match (&opts.key, &opts.secret) {
            (Some(key), Some(secret)) => Some((plain(key, "access key")?, secret.clone())),
            (None, None) => None,
            _ => fail!(Spec, "an access key and a secret key go together: give both as secrets"),
        };
        if let Some(token) = &opts.token {
            plain(token, "session token")?;
            if key.is_none() {
                fail!(Spec, "a session token goes with an access key and a secret key");
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

/// A secret that goes into a header.
fn plain(secret: &Secret, what: &str) -> Result<String> {
    let bytes = secret.bytes();
    let most = if what == "access key" { MAX_KEY_BYTES } else { usize::MAX };
    let is_plain = !bytes.is_empty() && bytes.iter().all(u8::is_ascii_graphic);
    if bytes.len() > most || !is_plain || (what == "access key" && bytes.contains(&b'/')) {
        fail!(Spec, "the {what} has characters that none has: is there a line break at its end?");
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
            ranges: true,
            first_wins: !self.0.is_unconditional.load(Ordering::Relaxed),
            client_bytes: self.0.settings.connections as u64 * conn_bytes,
        }
    }

    fn client(&self) -> Box<dyn Client> {
        Box::new(S3Client::new(self.0.clone()))
    }
}
