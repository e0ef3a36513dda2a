//! Redis and Valkey, alone or as a cluster: objects are strings under their names.
//!
//! Batches are pipelined; values go from and to the memory of their parts without being copied
//! here. The first writer of a name wins (`SET ... NX`). When objects go is the server's: its
//! `maxmemory`, or a time to live. An object without bytes counts as none.
//!
//! In a cluster a batch is split by node; all nodes are talked to at the same time, so that one
//! which is gone costs its own objects alone.

mod command;
mod errors;
mod greeting;
mod lane;
mod node;
mod resp;
mod slots;
mod url;
mod wire;
mod work;

use crate::base::clock::Clock;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::tier::remote::name::Prefix;
use crate::tier::remote::redis::lane::RedisLane;
use crate::tier::remote::redis::slots::Map;
use crate::tier::remote::redis::url::{Address, Url};
use crate::tier::remote::secret::Secret;
use crate::tier::remote::{Caps, Lane, Remote};

/// Most bytes of an object.
const MAX_BYTES: u64 = 8 << 20;
/// Bytes of an object that servers are quick with.
const PREFERRED_BYTES: u64 = 1 << 20;
/// Objects of a batch after which more of them make it no faster.
const BATCH: usize = 64;
/// Most replicas that are waited for.
const MAX_WAIT: u32 = 16;
/// Longest time to live: ten years.
const MAX_TTL_S: u64 = 10 * 366 * 86400;

/// How to reach a server, and how to use it.
#[derive(Clone, Debug)]
pub struct RedisOpts {
    /// `redis://[user@]host[:port][/db]`; of a cluster, several hosts with commas between them.
    pub url: String,
    /// What stands before all names.
    pub prefix: Prefix,
    /// The user's password, if the server wants one.
    pub password: Option<Secret>,
    /// It is a cluster.
    pub cluster: bool,
    /// Seconds after which objects go; 0 = when the server needs the room.
    pub ttl_s: u64,
    /// Replicas that must have an object before it counts as stored.
    pub wait: u32,
    /// Longest time until a connection can be used.
    pub connect_ns: u64,
}

/// A server, or a cluster of them.
pub struct Redis(Arc<Shared>);

/// What all lanes know.
struct Shared {
    settings: Settings,
    clock: Clock,
    map: Map,
}

/// What was asked for, checked.
struct Settings {
    prefix: Prefix,
    seeds: Vec<Address>,
    user: Option<String>,
    password: Option<Secret>,
    db: u32,
    is_cluster: bool,
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
    /// A server that is not connected to yet. SPEC, UNSUPPORTED, LIMIT = it cannot be as asked.
    pub fn open(opts: &RedisOpts, clock: Clock) -> Result<Redis> {
        let url = Url::parse(&opts.url)?;
        if url.seeds.len() > 1 && !opts.cluster {
            fail!(Spec, "the URL names several hosts: that is for clusters (cluster=true)");
        }
        if url.db > 0 && opts.cluster {
            fail!(Spec, "a cluster has one database, 0");
        }
        if url.user.is_some() && opts.password.is_none() {
            fail!(Spec, "the URL names a user: give the password as a secret");
        }
        if opts.wait > MAX_WAIT {
            fail!(Limit, "{} replicas to wait for, {MAX_WAIT} can be", opts.wait);
        }
        if opts.ttl_s > MAX_TTL_S {
            fail!(Limit, "objects that live {} s, {MAX_TTL_S} can be", opts.ttl_s);
        }
        let settings = Settings {
            prefix: opts.prefix.clone(),
            seeds: url.seeds,
            user: url.user,
            password: opts.password.clone(),
            db: url.db,
            is_cluster: opts.cluster,
            ttl_s: opts.ttl_s,
            wait: opts.wait,
            connect_ns: opts.connect_ns,
        };
        Ok(Redis(Arc::new(Shared { settings, clock, map: Map::default() })))
    }
}

impl Remote for Redis {
    fn caps(&self) -> Caps {
        Caps {
            preferred_bytes: PREFERRED_BYTES,
            max_bytes: MAX_BYTES,
            batch: BATCH,
            ranges: true,
            first_wins: true,
        }
    }

    fn lane(&self) -> Box<dyn Lane> {
        Box::new(RedisLane::new(self.0.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opts(url: &str) -> RedisOpts {
        RedisOpts {
            url: url.to_string(),
            prefix: Prefix::new("p").unwrap(),
            password: None,
            cluster: false,
            ttl_s: 0,
            wait: 0,
            connect_ns: 1,
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refused = |opts: RedisOpts| Redis::open(&opts, Clock::real()).err().expect("refused");
        refused(opts("redis://a:1,b:2"));
        refused(RedisOpts { cluster: true, ..opts("redis://a/1") });
        refused(RedisOpts { wait: MAX_WAIT + 1, ..opts("redis://a") });
        refused(RedisOpts { ttl_s: MAX_TTL_S + 1, ..opts("redis://a") });
        let error = refused(opts("redis://kv@a"));
        assert!(error.message().contains("as a secret"), "{error}");
        let password = Some(Secret::new(b"hunter2").unwrap());
        let good = RedisOpts { password, ..opts("redis://kv@a") };
        assert!(!format!("{good:?}").contains("hunter2"));
        assert!(Redis::open(&good, Clock::real()).is_ok());
        let many = RedisOpts { cluster: true, ..opts("redis://a:1,b:2") };
        assert_eq!(Redis::open(&many, Clock::real()).unwrap().caps().max_bytes, MAX_BYTES);
    }
}
