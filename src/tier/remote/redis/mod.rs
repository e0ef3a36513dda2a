//! Redis and Valkey, alone or as a cluster: objects are strings under their names.
//!
//! Batches are pipelined; values move between the socket and the memory of their parts without a
//! copy here. The first writer of a name wins (`SET ... NX`). The server removes objects: by its
//! `maxmemory`, or after a time to live. An object without bytes counts as absent.
//!
//! In a cluster a batch is split by node. All nodes are served at the same time, so that a node
//! which is unreachable costs only its own objects.

mod client;
mod command;
mod connection;
mod errors;
mod info;
mod node;
mod operation;
pub mod resp;
pub mod slots;
pub mod url;

use crate::base::clock::Clock;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::fail;
use crate::io::tls::Trust;
use crate::io::tls_opts::TLS_BYTES;
pub use crate::io::tls_opts::TlsOpts;
use crate::tier::remote::name::Prefix;
use crate::tier::remote::redis::client::RedisClient;
use crate::tier::remote::redis::slots::SlotCache;
use crate::tier::remote::redis::url::{Address, Url};
use crate::tier::remote::secret::Secret;
use crate::tier::remote::url::trust;
use crate::tier::remote::{Caps, Client, Publish, Remote, Tally};

/// Longest object.
const MAX_BYTES: u64 = 8 << 20;
/// Length of objects that servers handle fast.
const PREFERRED_BYTES: u64 = 1 << 20;
/// Approximate memory of a connection: encoded commands and received replies.
const CONN_BYTES: u64 = 64 << 10;
/// Nodes for which memory is counted in a cluster: their number is not known at that time.
const SOME_NODES: u64 = 8;
/// Objects of a batch; a larger batch is no faster.
const BATCH: usize = 64;
/// Names of a lookup: their commands fit in the memory of a connection.
const NAMES: usize = 512;
/// Most replicas to wait for.
const MAX_WAIT: u32 = 16;
/// Longest time to live: ten years.
const MAX_TTL_S: u64 = 10 * 366 * 86400;

/// Address of a server, and its use.
#[derive(Clone, Debug)]
pub struct RedisOpts {
    /// `redis://[user@]host[:port][/db]`; for a cluster, several hosts separated by commas.
    /// `rediss://` adds TLS.
    pub url: String,
    /// User name, unless the URL has one.
    pub user: Option<String>,
    /// Prefix of all names.
    pub prefix: Prefix,
    /// The user's password.
    pub password: Option<Secret>,
    /// Whether the server is a cluster.
    pub cluster: bool,
    /// Whether replicas are read, too. The master is queried for an object that its replica does not
    /// have.
    pub replicas: bool,
    /// Time to live of objects, in seconds; 0 = until the server needs the memory.
    pub ttl_s: u64,
    /// Replicas that must have an object before the put succeeds; at most 16.
    pub wait: u32,
    /// Longest time until a connection is ready.
    pub connect_ns: u64,
    /// Certificates and verification, for `rediss://`.
    pub tls: TlsOpts,
}

impl RedisOpts {
    /// Usual options: no cluster, no password, no time to live.
    pub fn new(url: &str, prefix: Prefix) -> RedisOpts {
        RedisOpts {
            url: url.to_string(),
            user: None,
            prefix,
            password: None,
            cluster: false,
            replicas: false,
            ttl_s: 0,
            wait: 0,
            connect_ns: 1_000_000_000,
            tls: TlsOpts::default(),
        }
    }
}

/// A server or a cluster.
pub struct Redis(Arc<Shared>);

/// State that all clients share.
struct Shared {
    settings: Settings,
    clock: Clock,
    map: SlotCache,
    tally: Counts,
}

/// Counters of all clients.
#[derive(Default)]
struct Counts {
    connections: AtomicU64,
    reconnects: AtomicU64,
    redirects: AtomicU64,
    refreshes: AtomicU64,
    retries: AtomicU64,
}

/// Increments a counter.
fn add(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

/// Checked options.
struct Settings {
    prefix: Prefix,
    seeds: Vec<Address>,
    user: Option<String>,
    password: Option<Secret>,
    db: u32,
    is_cluster: bool,
    reads_replicas: bool,
    trust: Option<Trust>,
    is_insecure: bool,
    ttl_s: u64,
    wait: u32,
    connect_ns: u64,
}

impl Settings {
    fn secret(&self) -> Option<&[u8]> {
        self.password.as_ref().map(Secret::bytes)
    }
}

impl Redis {
    /// A remote without connections. SPEC, UNSUPPORTED, LIMIT = an option is not possible.
    pub fn open(opts: &RedisOpts, clock: Clock) -> Result<Redis> {
        let url = Url::parse(&opts.url)?;
        if url.seeds.len() > 1 && !opts.cluster {
            fail!(Spec, "the URL names several hosts: only clusters have several (cluster=true)");
        }
        if url.db > 0 && opts.cluster {
            fail!(Spec, "a cluster has one database, 0");
        }
        let user = match (&url.user, &opts.user) {
            (Some(one), Some(other)) if one != other => {
                fail!(Spec, "the URL names one user, and \"user\" another one");
            }
            (None, Some(user)) => Some(url::user_of(user)?),
            (user, _) => user.clone(),
        };
        if user.is_some() && opts.password.is_none() {
            fail!(Spec, "a user needs a password: provide it as a secret");
        }
        if opts.replicas && !opts.cluster {
            fail!(Spec, "reading replicas needs a cluster (cluster=true)");
        }
        let hosts = url.seeds.iter().map(|seed| &*seed.host);
        let trust = trust(url.is_tls, hosts, &opts.tls, ["rediss", "redis"])?;
        if opts.wait > MAX_WAIT {
            fail!(Limit, "cannot wait for {} replicas: at most {MAX_WAIT} are possible", opts.wait);
        }
        if opts.ttl_s > MAX_TTL_S {
            fail!(
                Limit,
                "a time to live of {} s is too long: at most {MAX_TTL_S} s are possible",
                opts.ttl_s
            );
        }
        let settings = Settings {
            prefix: opts.prefix.clone(),
            seeds: url.seeds,
            user,
            password: opts.password.clone(),
            db: url.db,
            is_cluster: opts.cluster,
            reads_replicas: opts.replicas,
            trust,
            is_insecure: opts.tls.insecure,
            ttl_s: opts.ttl_s,
            wait: opts.wait,
            connect_ns: opts.connect_ns,
        };
        let (map, tally) = (SlotCache::default(), Counts::default());
        Ok(Redis(Arc::new(Shared { settings, clock, map, tally })))
    }

    /// A function that appends entries to the stream of events, each by a deadline. The stream
    /// keeps about `most` entries.
    pub fn publisher(&self, most: u64) -> Publish {
        let mut client = RedisClient::new(self.0.clone());
        Box::new(move |fields, deadline_ns| client.publish(fields, most, deadline_ns))
    }
}

impl Remote for Redis {
    fn caps(&self) -> Caps {
        let settings = &self.0.settings;
        let nodes = if settings.is_cluster { SOME_NODES } else { 1 };
        let conn_bytes = CONN_BYTES + if settings.trust.is_some() { TLS_BYTES } else { 0 };
        Caps {
            preferred_bytes: PREFERRED_BYTES,
            max_bytes: MAX_BYTES,
            batch: BATCH,
            names: NAMES,
            ranges: true,
            first_wins: true,
            client_bytes: nodes * conn_bytes,
        }
    }

    fn client(&self) -> Box<dyn Client> {
        Box::new(RedisClient::new(self.0.clone()))
    }

    fn tally(&self) -> Tally {
        let tally = &self.0.tally;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Tally {
            connections: of(&tally.connections),
            reconnects: of(&tally.reconnects),
            redirects: of(&tally.redirects),
            refreshes: of(&tally.refreshes),
            retries: of(&tally.retries),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;

    fn opts(url: &str) -> RedisOpts {
        RedisOpts::new(url, Prefix::new("p").unwrap())
    }

    #[test]
    fn impossible_options_are_rejected() {
        let refused = |opts: RedisOpts| Redis::open(&opts, Clock::real()).err().expect("refused");
        refused(opts("redis://a:1,b:2"));
        refused(RedisOpts { cluster: true, ..opts("redis://a/1") });
        refused(RedisOpts { wait: MAX_WAIT + 1, ..opts("redis://a") });
        refused(RedisOpts { ttl_s: MAX_TTL_S + 1, ..opts("redis://a") });
        refused(RedisOpts { replicas: true, ..opts("redis://a") });
        let error = refused(opts("redis://kv@a"));
        assert!(error.message().contains("as a secret"), "{error}");
        let user = |url: &str, user: &str| {
            let password = Some(Secret::new(b"hunter2").unwrap());
            RedisOpts { user: Some(user.to_string()), password, ..opts(url) }
        };
        refused(user("redis://kv@a", "another"));
        refused(user("redis://a", "a b"));
        refused(RedisOpts { password: None, ..user("redis://a", "kv") });
        assert!(Redis::open(&user("redis://a", "kv"), Clock::real()).is_ok());
        assert!(Redis::open(&user("redis://kv@a", "kv"), Clock::real()).is_ok());
        let insecure = TlsOpts { insecure: true, ..TlsOpts::default() };
        let error = refused(RedisOpts { tls: insecure.clone(), ..opts("redis://a") });
        assert!(error.message().contains("rediss://"), "{error}");
        let safe = RedisOpts { tls: insecure, ..opts("rediss://a") };
        match cfg!(feature = "tls") {
            true => assert!(Redis::open(&safe, Clock::real()).is_ok()),
            false => assert_eq!(refused(safe).status(), Status::Unsupported),
        }
        let password = Some(Secret::new(b"hunter2").unwrap());
        let good = RedisOpts { password, ..opts("redis://kv@a") };
        assert!(!format!("{good:?}").contains("hunter2"));
        assert!(Redis::open(&good, Clock::real()).is_ok());
        let many = RedisOpts { cluster: true, ..opts("redis://a:1,b:2") };
        assert_eq!(Redis::open(&many, Clock::real()).unwrap().caps().max_bytes, MAX_BYTES);
    }
}
