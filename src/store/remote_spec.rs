//! How a store's remote is described, and opened.
//!
//! | remote | |
//! |---|---|
//! | `redis(url="redis://host:6379", ...)` | a Redis or Valkey server |
//! | `s3(url="https://host", bucket="...", ...)` | a bucket of S3, or of what speaks as it does |
//! | `dir(path="...", ...)` | a directory that machines share |
//! | `custom(...)` | the engine's own, given beside the spec |
//! | `none` | |
//!
//! | parameter of all | default | meaning |
//! |---|---|---|
//! | `prefix` | `kvt` | what all names begin with |
//! | `object` | as the remote likes | bytes up to which layers of a chunk are put together |
//! | `write` | `through` | `through`: sent when a put has ended; `back`: when it leaves memory; `never`: only when a put asks for it |
//! | `admission` | `all` | what is sent: `all`, `none`, `select(...)` |
//! | `timeout` | 250, 2000 with S3 | milliseconds that a request may take, and one more for every 16 KiB that it moves |
//! | `connect` | 1000 | milliseconds until a connection can be used |
//! | `ask` | `append` | sessions ask as soon as they have tokens; `fetch`: and fetch what comes sooner than it is computed; `locate`: when they are told to |
//! | `fresh`, `absent` | 60000, 5000 | milliseconds for which an answer counts: it was there; it was not |
//! | `known` | 65536 | names of which the answer is remembered |
//! | `fetchers`, `senders` | 2, 1 | threads |
//! | `require` | false | a store is not opened while its remote cannot be reached |
//! | `ca`, `insecure` | none, false | with TLS: a file of authorities (PEM), else the system's; nobody is asked who he is |
//! | `cert`, `cert_key` | none, as `cert` | files (PEM) of a certificate that servers are shown which ask for one, and of its key |
//!
//! | parameter of `redis` | default | meaning |
//! |---|---|---|
//! | `url` | | `redis://[user@]host[:port][/db]`, several hosts of a cluster with commas between; `rediss://` with TLS |
//! | `user` | none | whom to connect as, unless the URL says so |
//! | `cluster` | false | it is a cluster |
//! | `replicas` | `never` | `read`: nodes that follow others are read, too |
//! | `ttl` | 0 | seconds after which objects go; 0: when the server needs the room |
//! | `wait` | 0 | replicas that must have an object before it counts as stored |
//! | `events` | none | what changes is told in the stream `prefix/events`, under this name of the engine's |
//! | `events_kept` | 10000 | about so many entries are kept there, of up to 256 events each |
//!
//! | parameter of `s3` | default | meaning |
//! |---|---|---|
//! | `url`, `bucket` | | the endpoint without the bucket, and that |
//! | `region` | `us-east-1` | where it is, as signatures say it |
//! | `style` | `path` | where the bucket's name stands: `path`, or `virtual` |
//! | `connections` | 4 | of each thread |
//!
//! | parameter of `dir` | default | meaning |
//! |---|---|---|
//! | `path` | | where it is; it must be there |
//! | `fsync` | false | objects are on the server's disks before they count as stored |
//!
//! Passwords are no part of a spec, which is shown to who asks: they are given beside it, as
//! secrets: `password` of Redis, `s3.key`, `s3.secret` and `s3.token` of S3, and `seal`, with which
//! objects are sealed and names keyed.

use std::path::PathBuf;

use crate::base::clock::Clock;
use crate::base::spec::{Reader, Spec};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::io::tls_opts::TlsOpts;
use crate::store::executor::remote::RemoteExecutor;
use crate::store::remote_open;
use crate::store::spec::CustomRemote;
use crate::store::state::{RemoteConfig, Write};
use crate::tier::remote::name::Prefix;
use crate::tier::remote::secret::Secret;
use crate::tier::remote::shape::{MAX_OBJECT_BYTES, MIN_OBJECT_BYTES};
use crate::tier::remote::{Publish, Remote, Server};

const MS: u64 = 1_000_000;
/// Longest name of an engine in a stream of events.
const MAX_NODE_BYTES: usize = 128;

/// What nobody but the remote's server is to see, by name.
#[derive(Clone, Debug, Default)]
pub struct Secrets(Vec<(String, Secret)>);

impl Secrets {
    /// Names of secrets that are known.
    pub const NAMES: [&'static str; 5] = ["password", "s3.key", "s3.secret", "s3.token", "seal"];

    /// Adds one; INVALID = nobody wants one of that name, or it is there already.
    pub fn add(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if !Self::NAMES.contains(&name) {
            let all = Self::NAMES.join(", ");
            // What it says may be the secret itself, by mistake.
            fail!(Invalid, "a secret has a name that nobody asks for: there are {all}");
        }
        if self.get(name).is_some() {
            fail!(Invalid, "the secret '{name}' is given twice");
        }
        self.0.push((name.to_string(), Secret::new(bytes)?));
        Ok(())
    }

    /// One of them.
    pub fn get(&self, name: &str) -> Option<Secret> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, secret)| secret.clone())
    }
}

/// What kind it is.
// What is not built in is read all the same: mistakes are found, and it is said what is missing.
#[cfg_attr(not(all(feature = "redis", feature = "s3", feature = "dir")), allow(dead_code))]
#[derive(Clone, Debug)]
pub(super) enum Kind {
    Redis {
        url: String,
        user: Option<String>,
        cluster: bool,
        replicas: bool,
        ttl_s: u64,
        wait: u32,
        events: Option<String>,
        events_kept: u64,
    },
    S3 {
        url: String,
        bucket: String,
        region: String,
        is_virtual: bool,
        connections: u32,
    },
    Dir {
        path: PathBuf,
        fsync: bool,
    },
    Custom,
}

/// A remote as described.
// What is not built in is read all the same: mistakes are found, and it is said what is missing.
#[cfg_attr(not(all(feature = "redis", feature = "s3", feature = "dir")), allow(dead_code))]
#[derive(Clone, Debug)]
pub struct RemoteSpec {
    pub(super) kind: Kind,
    pub(super) prefix: Prefix,
    pub(super) tls: TlsOpts,
    pub(super) connect_ns: u64,
    object_bytes: u64,
    require: bool,
    /// What the store decides by; sizes are the remote's, once it is open.
    pub config: RemoteConfig,
    /// Threads that fetch.
    pub fetchers: u32,
    /// Threads that send.
    pub senders: u32,
}

impl RemoteSpec {
    /// Reads one; none where the spec is `none`.
    pub fn read(spec: &Spec) -> Result<Option<RemoteSpec>> {
        let mut reader = Reader::new(spec);
        let Some(kind) = read_kind(spec, &mut reader)? else {
            return reader.finish().map(|()| None);
        };
        let tls = TlsOpts {
            ca: reader.text("ca")?.map(PathBuf::from),
            insecure: reader.bool("insecure", false)?,
            cert: reader.text("cert")?.map(PathBuf::from),
            cert_key: reader.text("cert_key")?.map(PathBuf::from),
        };
        let usual = RemoteConfig::default();
        let prefix = reader.text("prefix")?;
        let object_bytes = reader.bytes("object", 0)?;
        if object_bytes != 0 && !(MIN_OBJECT_BYTES..=MAX_OBJECT_BYTES).contains(&object_bytes) {
            fail!(Spec, "object={object_bytes}: {MIN_OBJECT_BYTES} to {MAX_OBJECT_BYTES} can be");
        }
        let write = reader.choice("write", &["through", "back", "never"])?;
        let ask = reader.choice("ask", &["append", "locate", "fetch"])?;
        // Objects there are long, and come from afar.
        let usual_ms = if matches!(kind, Kind::S3 { .. }) { 2000 } else { 250 };
        let mut ms = |key, usual| reader.u64(key, usual, 1..=86_400_000).map(|ms: u64| ms * MS);
        let (timeout_ns, connect_ns) = (ms("timeout", usual_ms)?, ms("connect", 1000)?);
        let (fresh_ns, absent_ns) = (ms("fresh", 60_000)?, ms("absent", 5000)?);
        let config = RemoteConfig {
            write: match write {
                Some(1) => Write::Back,
                Some(2) => Write::Never,
                _ => Write::Through,
            },
            admission: reader
                .spec("admission")?
                .map_or_else(|| usual.admission.clone(), |spec| spec.to_string()),
            timeout_ns,
            fresh_ns,
            absent_ns,
            known: reader.u64("known", usual.known as u64, 4..=1 << 24)? as usize,
            asks: ask != Some(1),
            fetches: ask == Some(2),
            ..usual
        };
        let (fetchers, senders) =
            (reader.u64("fetchers", 2, 1..=64)? as u32, reader.u64("senders", 1, 1..=64)? as u32);
        let require = reader.bool("require", false)?;
        reader.finish()?;
        let prefix = Prefix::new(prefix.unwrap_or("kvt"))?;
        Ok(Some(RemoteSpec {
            kind,
            prefix,
            tls,
            connect_ns,
            object_bytes,
            require,
            config,
            fetchers,
            senders,
        }))
    }

    /// Whether it is the engine's own.
    pub fn is_custom(&self) -> bool {
        matches!(self.kind, Kind::Custom)
    }

    /// As whom, and by what, it is told what changes in a store, if it is. It is not connected yet.
    pub fn publisher(&self, secrets: &Secrets, clock: &Clock) -> Result<Option<(String, Publish)>> {
        let Kind::Redis { events: Some(node), .. } = &self.kind else { return Ok(None) };
        if secrets.get("seal").is_some() {
            fail!(
                Spec,
                "events=\"...\" tells the server what chunks are called, and seal keeps that from \
                 it: one or the other"
            );
        }
        Ok(Some((node.clone(), remote_open::publisher(self, secrets, clock)?)))
    }

    /// Opens it, and asks who is there. One that cannot be reached is none of the store's
    /// troubles, unless it is required; one that refuses us is.
    pub fn open(
        &self,
        secrets: &Secrets,
        custom: Option<&CustomRemote>,
        clock: &Clock,
    ) -> Result<(Arc<dyn Remote>, RemoteConfig, Option<Server>)> {
        let remote = remote_open::open(self, secrets, custom, clock)?;
        let caps = remote.caps();
        // Room for headers, and for cells that begin at whole blocks.
        let most = (caps.max_bytes - caps.max_bytes / 16).clamp(MIN_OBJECT_BYTES, MAX_OBJECT_BYTES);
        let object_bytes = match self.object_bytes {
            0 => caps.preferred_bytes.clamp(MIN_OBJECT_BYTES, most),
            bytes if bytes > most => {
                fail!(Spec, "object={bytes}: up to {most} fit into what this remote takes")
            }
            bytes => bytes,
        };
        let seed = crate::base::machine::random_bytes()?;
        let config = RemoteConfig {
            object_bytes,
            max_bytes: caps.max_bytes,
            batch: caps.batch.max(1),
            fetchers: self.fetchers,
            secret: secrets.get("seal"),
            seed: u64::from_le_bytes(seed),
            // And one who asks.
            beside_bytes: u64::from(self.fetchers + self.senders + 1)
                * RemoteExecutor::bytes_of(&*remote),
            ..self.config.clone()
        };
        let deadline_ns = clock.now_ns() + self.connect_ns + self.config.timeout_ns;
        let server = match remote.lane().greet(deadline_ns) {
            Ok(server) => {
                for warning in &server.warnings {
                    log::warn!("the remote ({}): {warning}", server.words);
                }
                Some(server)
            }
            Err(error) if self.require || !is_passing(&error) => {
                return Err(error.within("the remote"));
            }
            Err(error) => {
                log::warn!("the remote cannot be reached, and is tried again later: {error}");
                None
            }
        };
        Ok((remote, config, server))
    }
}

/// What kind a spec names; none = there is no remote.
fn read_kind(spec: &Spec, reader: &mut Reader) -> Result<Option<Kind>> {
    Ok(Some(match spec.name.as_str() {
        "none" => return Ok(None),
        "redis" => Kind::Redis {
            url: text(reader, "url", "redis(...) needs url=\"redis://host:6379\"")?,
            user: reader.text("user")?.map(str::to_string),
            cluster: reader.bool("cluster", false)?,
            replicas: reader.choice("replicas", &["never", "read"])? == Some(1),
            ttl_s: reader.u64("ttl", 0, 0..=u64::from(u32::MAX))?,
            wait: reader.u64("wait", 0, 0..=64)? as u32,
            events: events(reader)?,
            events_kept: reader.u64("events_kept", 10_000, 1..=1 << 32)?,
        },
        "s3" => Kind::S3 {
            url: text(reader, "url", "s3(...) needs url=\"https://host\": the endpoint")?,
            bucket: text(reader, "bucket", "s3(...) needs bucket=\"...\"")?,
            region: reader.text("region")?.unwrap_or("us-east-1").to_string(),
            is_virtual: reader.choice("style", &["path", "virtual"])? == Some(1),
            connections: reader.u64("connections", 4, 1..=64)? as u32,
        },
        "dir" => Kind::Dir {
            path: text(reader, "path", "dir(...) needs path=\"...\": a directory")?.into(),
            fsync: reader.bool("fsync", false)?,
        },
        "custom" => Kind::Custom,
        _ => return Err(spec.unknown_name(&["redis", "s3", "dir", "custom", "none"])),
    }))
}

/// As whom events are told.
fn events(reader: &mut Reader) -> Result<Option<String>> {
    let Some(node) = reader.text("events")?.filter(|node| !node.is_empty()) else {
        return Ok(None);
    };
    if node.len() > MAX_NODE_BYTES || !node.bytes().all(|byte| byte.is_ascii_graphic()) {
        fail!(
            Spec,
            "events=\"...\" is a name, or an address, of 1 to {MAX_NODE_BYTES} plain characters"
        );
    }
    Ok(Some(node.to_string()))
}

/// Whether it may go well at another time.
fn is_passing(error: &Error) -> bool {
    matches!(error.status(), Status::Timeout | Status::Unavailable | Status::Again)
}

/// A text that must be there.
fn text(reader: &mut Reader, key: &'static str, missing: &str) -> Result<String> {
    match reader.text(key)?.filter(|text| !text.is_empty()) {
        Some(text) => Ok(text.to_string()),
        None => Err(Error::new(Status::Spec, missing)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<RemoteSpec>> {
        RemoteSpec::read(&Spec::parse(text).unwrap())
    }

    #[test]
    fn a_remote_is_described() {
        let text =
            "redis(url=\"redis://a:1\", write=through, timeout=100, ask=locate, prefix=\"p\")";
        let spec = read(text).unwrap().unwrap();
        assert_eq!((spec.config.write, spec.config.timeout_ns), (Write::Through, 100 * MS));
        assert!(!spec.config.asks && !spec.require && spec.fetchers == 2);
        let spec = read("dir(path=\"x\", fetchers=3, object=64KiB)").unwrap().unwrap();
        assert_eq!((spec.fetchers, spec.object_bytes), (3, 64 << 10));
        assert!(read("none").unwrap().is_none());
        for (bad, word) in [
            ("redis()", "url="),
            ("dir()", "path="),
            ("rediss(url=\"x\")", "redis"),
            ("redis(url=\"redis://a\", ur=1)", "url"),
            ("dir(path=\"x\", prefix=\"a/b\")", "prefix"),
            ("dir(path=\"x\", object=1KiB)", "object="),
            ("dir(path=\"x\", write=thru)", "through"),
            ("dir(path=\"x\", timeout=0)", "timeout"),
            ("redis(url=\"redis://a\", events=\"a b\")", "events="),
            ("dir(path=\"x\", events=\"a\")", "events"),
        ] {
            let error = read(bad).unwrap_err();
            assert!(error.message().contains(word), "{bad}: {error}");
        }
    }

    #[test]
    fn secrets_have_names() {
        let mut secrets = Secrets::default();
        secrets.add("password", b"hunter2").unwrap();
        assert!(!format!("{secrets:?}").contains("hunter2"));
        assert_eq!(secrets.add("password", b"x").unwrap_err().status(), Status::Invalid);
        assert!(secrets.add("passwort", b"x").unwrap_err().message().contains("password"));
    }

    #[test]
    fn a_remote_that_cannot_be_reached_costs_nothing_unless_it_is_required() {
        let clock = Clock::real();
        let spec = read("redis(url=\"redis://127.0.0.1:1\", connect=200)").unwrap().unwrap();
        let (_, config, server) = spec.open(&Secrets::default(), None, &clock).unwrap();
        assert!(server.is_none() && config.object_bytes > 0);
        let text = "redis(url=\"redis://127.0.0.1:1\", connect=200, require=true)";
        let spec = read(text).unwrap().unwrap();
        assert!(spec.open(&Secrets::default(), None, &clock).is_err());
        let spec = read("custom()").unwrap().unwrap();
        let error = spec.open(&Secrets::default(), None, &clock).err().unwrap();
        assert_eq!(error.status(), Status::Invalid);
    }
}
