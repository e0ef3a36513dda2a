//! The spec string of a store, for C callers and for the tool.
//!
//! [`PARAMS`] and the tables below it list the parameters; [`describe()`] adds types, defaults and
//! limits, for the manual.
//!
//! Passwords are not part of a spec, because a spec may be logged or shown. They are given beside it as
//! secrets: `password` of Redis; `s3.key`, `s3.secret` and `s3.token` of S3; and `seal`, which encrypts
//! objects and keys their names.

use crate::base::clock::Clock;
use crate::base::spec::describe::{self, Description, Param, Recorded};
use crate::base::spec::{Arg, Reader, Spec, Value};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::format::codec::Codec;
use crate::io::real::RealOpts;
use crate::io::tls_opts::TlsOpts;
use crate::policy::custom;
use crate::policy::registry::{self, Setting};
use crate::store::executor::remote::RemoteExecutor;
use crate::store::state::tier_cache::Granularity;
use crate::store::state::{Config, DeviceConfig, RemoteConfig, Write};
use crate::tier::remote::name::Prefix;
#[cfg(feature = "redis")]
use crate::tier::remote::redis::Redis;
use crate::tier::remote::secret::Secret;
use crate::tier::remote::shape::{MAX_OBJECT_BYTES, MIN_OBJECT_BYTES};
use crate::tier::remote::{Publish, Remote, Server};
use std::path::PathBuf;

/// Parameters of `store`.
const PARAMS: &[Param] = &[
    Param::new("host", "limit of cells in host memory"),
    Param::new("disk", "the disk tier: `disk(...)` or `none`").default_is("`none`"),
    Param::new(
        "remote",
        "the remote tier: `redis(...)`, `s3(...)`, `dir(...)`, `custom(...)` or `none`",
    )
    .default_is("`none`"),
    Param::new(
        "device",
        "the device tier: `device(...)` or `none`; needs a device with memory of its own",
    )
    .default_is("`none`"),
    Param::new("policy", "eviction policy of host memory").default_is("`horizon`"),
    Param::new("disk_policy", "eviction policy of the disk").default_is("`lru`"),
    Param::new(
        "granularity",
        "what policies choose among. `chunk`: chunks. `cell`: cells, late layers before early ones. \
         `session`: chunks that a session used last are evicted together",
    ),
    Param::new(
        "drop",
        "`chunk`: a chunk evicted from the last tier is dropped with all its layers. `cell`, only \
         with `granularity=cell`: cell by cell",
    ),
    Param::new(
        "write",
        "when chunks are written to disk: `behind(...)`, `through`, `back`, `never`",
    )
    .default_is("`behind`"),
    Param::new(
        "codec",
        "encoding of cells on disk. `lz4`: smaller, without loss. The recipe of a namespace takes \
         precedence, and may also name `int8`",
    ),
    Param::new("admission", "which chunks may be written to disk: `all`, `none`, `select(...)`")
        .default_is("`all`"),
    Param::new(
        "pins",
        "share of the last tier that pinned chunks may have, of the disk if there is one",
    ),
    Param::new("quota", "quota of each tenant: `quota(...)` or `none`").default_is("`none`"),
    Param::new("high", "share of a tier at which eviction begins"),
    Param::new("low", "share of a tier at which eviction ends"),
    Param::new("chunks", "most chunks, of all namespaces"),
    Param::new(
        "forget",
        "`true`: an opening with fewer `chunks` than before may drop chunks from disk for good. \
         `false`: it fails if there are more",
    ),
    Param::new("sessions", "most sessions at once"),
    Param::new("transfers", "most transfers in flight"),
    Param::new("cells", "most cells of transfers in flight"),
    Param::new("events", "events that are kept for readers"),
    Param::new("copiers", "threads that copy; 0 = as many as cores, at most 4"),
    Param::new(
        "inline",
        "transfers between host memory of at most so many bytes are copied by the thread that submits \
         them, before the call returns; 0 = none",
    ),
    Param::new("readers", "threads that read the disk"),
    Param::new("control", "path of the control socket").default_is("none"),
    Param::new("serve", "socket at which other processes open this store: `\"unix:PATH\"`")
        .default_is("none"),
    Param::new("shared", "socket of a store that another process serves; this process opens that")
        .default_is("none"),
];

/// The write modes with their meaning.
const WRITES: [(&str, &str); 4] = [
    ("behind", "in the background, a bounded time after the put"),
    ("through", "as soon as the put has ended"),
    ("back", "when the memory is needed"),
    (
        "never",
        "only if the level of a put or a demotion requires it, and for victims that are \
         referenced, pinned or continued by other chunks",
    ),
];

/// Parameters of `behind`.
const BEHIND_PARAMS: &[Param] = &[
    Param::new("age", "age at which a chunk is written, as far as the disk keeps up"),
    Param::new("bytes", "when more bytes than this wait to be written, the oldest are written")
        .default_is("an eighth of `host`"),
];

/// Parameters of `quota`.
const QUOTA_PARAMS: &[Param] = &[
    Param::new("host", "most bytes of a tenant's chunks in host memory; 0 = no limit"),
    Param::new("disk", "most bytes of a tenant's chunks on disk, before encoding; 0 = no limit"),
];

/// Parameters of `disk`.
const DISK_PARAMS: &[Param] = &[
    Param::new("path", "the directory; it is created if it does not exist").default_is("required"),
    Param::new("bytes", "limit of all files").default_is("required"),
    Param::new("segment", "bytes of a segment").default_is("`bytes` / 1024, 8MiB to 64MiB"),
    Param::new("buffered", "`true`: files are read and written through the page cache"),
    Param::new("uring", "`true`: io_uring, where it works. `false`: threads"),
];

/// Parameters of `device`.
const DEVICE_PARAMS: &[Param] = &[
    Param::new("capacity", "limit of device memory").default_is("required"),
    Param::new("policy", "its eviction policy").default_is("`s3fifo`"),
    Param::new("admission", "which chunks may enter: `all`, `none`, `select(...)`")
        .default_is("`all`"),
];

/// Parameters that every remote has.
const REMOTE_PARAMS: &[Param] = &[
    Param::new("prefix", "prefix of all object names").default_is("`kvt`"),
    Param::new("object", "size up to which layers of a chunk share an object")
        .default_is("as the backend prefers")
        .limits_are("4KiB to 128MiB"),
    Param::new(
        "write",
        "`through`: a chunk is uploaded when the put has ended. `back`: when the chunk is evicted \
         from memory. `never`: only if the level of the put requires it",
    ),
    Param::new("admission", "which chunks are uploaded: `all`, `none`, `select(...)`")
        .default_is("`all`"),
    Param::new(
        "timeout",
        "milliseconds for a request, and one more for every 16 KiB that it moves",
    )
    .default_is("250; 2000 with `s3`"),
    Param::new("connect", "milliseconds until a connection is usable"),
    Param::new(
        "lookup",
        "`append`: sessions look up the remote as soon as they have tokens. `fetch`: they also fetch \
         what arrives sooner than it is computed. `explicit`: only `kvt_session_remote_lookup` does",
    ),
    Param::new("fresh", "milliseconds for which the answer \"present\" is valid"),
    Param::new("absent", "milliseconds for which the answer \"absent\" is valid"),
    Param::new("known", "names of which the answer is remembered"),
    Param::new("fetchers", "threads that fetch; 0 = 4 of a Redis server without seal, else 2"),
    Param::new("uploaders", "threads that upload; 0 = 4 to a Redis server without seal, else 1"),
    Param::new("require", "`true`: an unreachable remote fails the opening of the store"),
    Param::new("ca", "with TLS: file of certificate authorities (PEM)")
        .default_is("those of the system"),
    Param::new("insecure", "with TLS: `true` disables the verification of certificates"),
    Param::new("cert", "with TLS: file of a client certificate (PEM)").default_is("none"),
    Param::new("cert_key", "with TLS: file of its key (PEM)").default_is("as `cert`"),
];

/// The remotes: name, meaning, own parameters, and a spec that reads all of them.
const REMOTES: [(&str, &str, &[Param], &str); 4] = [
    (
        "redis",
        "a server of Redis or Valkey, or a cluster",
        REDIS_PARAMS,
        "redis(url=\"redis://h\")",
    ),
    (
        "s3",
        "a bucket of S3 or of a compatible server",
        S3_PARAMS,
        "s3(url=\"https://h\",bucket=\"b\")",
    ),
    ("dir", "a directory that machines share", DIR_PARAMS, "dir(path=\"d\")"),
    ("custom", "the caller's own backend, which is given beside the spec", &[], "custom"),
];

/// Parameters of `redis`.
const REDIS_PARAMS: &[Param] = &[
    Param::new(
        "url",
        "`redis://[user@]host[:port][/db]`; with TLS `rediss://`; several hosts of a cluster are \
         separated by commas",
    )
    .default_is("required"),
    Param::new("user", "user name, unless the URL has one").default_is("none"),
    Param::new("cluster", "`true`: the server is a cluster"),
    Param::new("replicas", "`read`: replicas of the servers are read too"),
    Param::new("ttl", "seconds until objects expire; 0 = the server evicts"),
    Param::new("wait", "replicas that must have an object before its upload completes"),
    Param::new(
        "events",
        "publish events in the stream `PREFIX/events`, under this name of the engine",
    )
    .default_is("none"),
    Param::new(
        "events_kept",
        "approximate number of entries in that stream; an entry has up to 256 events",
    ),
];

/// Parameters of `s3`.
const S3_PARAMS: &[Param] = &[
    Param::new("url", "the endpoint, without the bucket").default_is("required"),
    Param::new("bucket", "the bucket").default_is("required"),
    Param::new("region", "region for signatures").default_is("`us-east-1`"),
    Param::new("style", "where the address has the bucket: in the `path`, or as a `virtual` host"),
    Param::new("connections", "connections of each thread"),
];

/// Parameters of `dir`.
const DIR_PARAMS: &[Param] = &[
    Param::new("path", "an existing directory").default_is("required"),
    Param::new("fsync", "`true`: an upload completes when the object is on the server's disk"),
];

/// The disk tier of a spec.
#[derive(Clone, Debug)]
pub struct DiskSpec {
    /// Its directory.
    pub path: PathBuf,
    /// Limit of all files, in bytes.
    pub bytes: u64,
    /// Bytes of a segment; 0 = default.
    pub segment_bytes: u64,
    /// How files are read and written.
    pub files: RealOpts,
}

/// Builds the engine's own remote, for names with a prefix.
#[derive(Clone)]
pub struct CustomRemote(pub Arc<MakeRemote>);

/// The function that does.
pub type MakeRemote = dyn Fn(&Prefix) -> Box<dyn Remote> + Send + Sync;

impl std::fmt::Debug for CustomRemote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CustomRemote")
    }
}

/// A parsed spec of a store.
#[derive(Clone, Debug)]
pub struct StoreSpec {
    /// Configuration of the state machine.
    pub config: Config,
    /// Its disk.
    pub disk: Option<DiskSpec>,
    /// Its remote.
    pub remote: Option<RemoteSpec>,
    /// Secrets of the remote.
    pub secrets: Secrets,
    /// The engine's own remote.
    pub custom_remote: Option<CustomRemote>,
    /// Copy workers; 0 = one for each core, at most 4.
    pub copiers: u32,
    /// Transfers of at most so many bytes are copied by the thread that submits them.
    pub inline_bytes: u64,
    /// Disk read workers.
    pub readers: u32,
    /// Path of the control socket, if there is one.
    pub control: Option<PathBuf>,
    /// Path of the socket at which other processes open the store, if it is shared.
    pub serve: Option<PathBuf>,
    /// Path of the socket of a store that another process serves: this one opens that.
    pub shared: Option<PathBuf>,
}

impl StoreSpec {
    /// Whether its remote is the engine's own.
    pub fn has_custom_remote(&self) -> bool {
        self.remote.as_ref().is_some_and(RemoteSpec::is_custom)
    }

    /// Parses a spec; an empty one has all defaults.
    pub fn parse(text: &str) -> Result<StoreSpec> {
        StoreSpec::read(&Spec::parse(if text.trim().is_empty() { "store()" } else { text })?)
    }

    /// Reads a parsed spec.
    pub fn read(spec: &Spec) -> Result<StoreSpec> {
        if spec.name != "store" {
            return Err(spec.unknown_name(&["store"]));
        }
        let mut reader = Reader::new(spec);
        let store = StoreSpec::read_params(&mut reader)?;
        reader.finish()?;
        Ok(store)
    }

    /// Checks a store of another process: what only its server decides cannot be given here.
    pub fn check_shared(&self) -> Result<()> {
        let is_given = self.disk.is_some() || self.remote.is_some() || self.serve.is_some();
        if is_given || self.config.device.bytes > 0 || self.control.is_some() {
            fail!(
                Invalid,
                "a store with shared=... has its tiers in the process that serves it: give disk, \
                 remote, device, control and serve there"
            );
        }
        Ok(())
    }

    fn read_params(reader: &mut Reader) -> Result<StoreSpec> {
        let usual = Config::default();
        let granularity = reader.choice("granularity", &["chunk", "cell", "session"])?;
        let drops = reader.choice("drop", &["chunk", "cell"])?;
        let (write, write_age_ns, unwritten_bytes) = match reader.spec("write")? {
            Some(write) => read_write(write, &usual)?,
            None => (usual.write, usual.write_age_ns, usual.unwritten_bytes),
        };
        let config = Config {
            host_bytes: reader.bytes("host", usual.host_bytes)?,
            device: reader.spec("device")?.map_or(Ok(DeviceConfig::default()), read_device)?,
            host_policy: policy(reader, "policy", &usual.host_policy)?,
            disk_policy: policy(reader, "disk_policy", &usual.disk_policy)?,
            granularity: match granularity {
                Some(1) => Granularity::Cell,
                Some(2) => Granularity::Session,
                _ => usual.granularity,
            },
            drop_cells: drops == Some(1),
            write,
            write_age_ns,
            unwritten_bytes,
            admission: written(reader, "admission", &usual.admission)?,
            // A lossy codec belongs into the recipe of a namespace, not into the spec of a store.
            codec: match reader.choice("codec", &["none", "lz4"])? {
                Some(1) => Codec::Lz4,
                _ => usual.codec,
            },
            pins: reader.f64("pins", usual.pins, 0.0..=1.0)?,
            quota: reader.spec("quota")?.map_or(Ok(usual.quota), read_quota)?,
            high: reader.f64("high", usual.high, 0.0..=1.0)?,
            low: reader.f64("low", usual.low, 0.0..=1.0)?,
            max_chunks: reader.u64("chunks", usual.max_chunks as u64, 1..=1 << 28)? as usize,
            forgets: reader.bool("forget", false)?,
            max_sessions: reader.u64("sessions", u64::from(usual.max_sessions), 1..=1 << 24)?
                as u32,
            max_transfers: reader.u64("transfers", u64::from(usual.max_transfers), 1..=1 << 20)?
                as u32,
            max_jobs: reader.u64("cells", u64::from(usual.max_jobs), 1..=1 << 24)? as u32,
            events: reader.u64("events", usual.events as u64, 1..=1 << 22)? as usize,
            ..usual
        };
        let copiers = reader.u64("copiers", 0, 0..=64)? as u32;
        let inline_bytes = reader.bytes("inline", 64 << 10)?;
        let readers = reader.u64("readers", 2, 1..=64)? as u32;
        let control = reader.text("control")?.filter(|path| !path.is_empty()).map(PathBuf::from);
        let disk = match reader.spec("disk")? {
            Some(disk) => read_disk(disk)?,
            None => None,
        };
        let remote = match reader.spec("remote")? {
            Some(remote) => RemoteSpec::read(remote)?,
            None => None,
        };
        let (secrets, custom_remote) = (Secrets::default(), None);
        Ok(StoreSpec {
            config,
            disk,
            remote,
            secrets,
            custom_remote,
            copiers,
            inline_bytes,
            readers,
            control,
            serve: read_socket(reader, "serve")?,
            shared: read_socket(reader, "shared")?,
        })
    }
}

/// Path of a socket, given as `unix:PATH`.
fn read_socket(reader: &mut Reader, key: &'static str) -> Result<Option<PathBuf>> {
    let Some(text) = reader.text(key)?.filter(|text| !text.is_empty()) else { return Ok(None) };
    match text.strip_prefix("unix:") {
        Some(path) if !path.is_empty() => Ok(Some(PathBuf::from(path))),
        _ => fail!(Spec, "{key} is \"{text}\": use \"unix:PATH\", the path of a socket"),
    }
}

/// Spec of a policy, as written, if a store can use it.
fn policy(reader: &mut Reader, key: &'static str, usual: &str) -> Result<String> {
    if let Some(spec) = reader.spec(key)? {
        custom::refuse(spec, "a store")?;
        // The store makes the policy from its text alone. Here errors get their offset in the whole
        // spec.
        registry::make(spec, &Setting { max_objects: 64, capacity_units: 64, holes: false })?;
    }
    written(reader, key, usual)
}

/// A nested spec, as written.
fn written(reader: &mut Reader, key: &'static str, usual: &str) -> Result<String> {
    Ok(reader.spec(key)?.map_or_else(|| usual.to_string(), |spec| spec.to_string()))
}

/// Write mode, its age and its limit.
fn read_write(spec: &Spec, usual: &Config) -> Result<(Write, u64, u64)> {
    let write = match spec.name.as_str() {
        "behind" => Write::Behind,
        "through" => Write::Through,
        "back" => Write::Back,
        "never" => Write::Never,
        _ => return Err(spec.unknown_name(&WRITES.map(|(name, _)| name))),
    };
    let mut reader = Reader::new(spec);
    let (mut age_ns, mut bytes) = (usual.write_age_ns, usual.unwritten_bytes);
    if write == Write::Behind {
        (age_ns, bytes) = read_behind(&mut reader, usual)?;
    }
    reader.finish()?;
    Ok((write, age_ns, bytes))
}

/// Age and limit of what waits to be written.
fn read_behind(reader: &mut Reader, usual: &Config) -> Result<(u64, u64)> {
    let age_ns = reader.duration_ns("age", usual.write_age_ns)?;
    Ok((age_ns, reader.bytes("bytes", usual.unwritten_bytes)?))
}

fn read_device(spec: &Spec) -> Result<DeviceConfig> {
    let usual = DeviceConfig::default();
    match spec.name.as_str() {
        "none" => return Reader::new(spec).finish().map(|()| usual),
        "device" => {}
        _ => return Err(spec.unknown_name(&["device", "none"])),
    }
    let mut reader = Reader::new(spec);
    let device = read_device_params(&mut reader, &usual)?;
    reader.finish()?;
    if device.bytes == 0 {
        fail!(Spec, "device(...) needs capacity=...: most bytes of device memory");
    }
    Ok(device)
}

fn read_device_params(reader: &mut Reader, usual: &DeviceConfig) -> Result<DeviceConfig> {
    Ok(DeviceConfig {
        bytes: reader.bytes("capacity", 0)?,
        policy: policy(reader, "policy", &usual.policy)?,
        admission: written(reader, "admission", &usual.admission)?,
    })
}

fn read_quota(spec: &Spec) -> Result<[u64; 2]> {
    match spec.name.as_str() {
        "none" => return Reader::new(spec).finish().map(|()| [0; 2]),
        "quota" => {}
        _ => return Err(spec.unknown_name(&["quota", "none"])),
    }
    let mut reader = Reader::new(spec);
    let quota = read_quota_params(&mut reader)?;
    reader.finish()?;
    Ok(quota)
}

fn read_quota_params(reader: &mut Reader) -> Result<[u64; 2]> {
    Ok([reader.bytes("host", 0)?, reader.bytes("disk", 0)?])
}

fn read_disk(spec: &Spec) -> Result<Option<DiskSpec>> {
    match spec.name.as_str() {
        "none" => return Reader::new(spec).finish().map(|()| None),
        "disk" => {}
        _ => return Err(spec.unknown_name(&["disk", "none"])),
    }
    let mut reader = Reader::new(spec);
    let disk = read_disk_params(&mut reader)?;
    reader.finish()?;
    if disk.path.as_os_str().is_empty() {
        fail!(Spec, "disk(...) needs path=\"...\": the directory of the disk tier");
    }
    if disk.bytes == 0 {
        fail!(Spec, "disk(...) needs bytes=...: most bytes of all its files");
    }
    Ok(Some(disk))
}

fn read_disk_params(reader: &mut Reader) -> Result<DiskSpec> {
    Ok(DiskSpec {
        path: reader.text("path")?.map(PathBuf::from).unwrap_or_default(),
        bytes: reader.bytes("bytes", 0)?,
        segment_bytes: reader.bytes("segment", 0)?,
        files: RealOpts {
            buffered: reader.bool("buffered", false)?,
            no_uring: !reader.bool("uring", true)?,
            ..RealOpts::default()
        },
    })
}

// ---------- descriptions

/// Specs of stores with their parameters, for the manual.
pub struct Descriptions {
    /// `store`.
    pub store: Description,
    /// The write modes.
    pub writes: Vec<Description>,
    /// `quota`.
    pub quota: Description,
    /// `disk`.
    pub disk: Description,
    /// `device`.
    pub device: Description,
    /// The remotes with their own parameters.
    pub remotes: Vec<Description>,
    /// Parameters that every remote has.
    pub every_remote: Vec<describe::Row>,
}

/// Describes the specs of stores by what their parsers read.
pub fn describe() -> Result<Descriptions> {
    let none = Spec::parse("none")?;
    let recorded = |read: &dyn Fn(&mut Reader) -> Result<()>| {
        let mut reader = Reader::recording(&none);
        read(&mut reader).map(|()| reader.recorded())
    };
    let store = recorded(&|reader| StoreSpec::read_params(reader).map(drop))?;
    let behind = recorded(&|reader| read_behind(reader, &Config::default()).map(drop))?;
    let quota = recorded(&|reader| read_quota_params(reader).map(drop))?;
    let disk = recorded(&|reader| read_disk_params(reader).map(drop))?;
    let usual = DeviceConfig::default();
    let device = recorded(&|reader| read_device_params(reader, &usual).map(drop))?;
    let mut writes = Vec::new();
    for (name, about) in WRITES {
        let is_behind = name == "behind";
        let (params, recorded) =
            if is_behind { (BEHIND_PARAMS, behind.clone()) } else { (&[][..], Vec::new()) };
        writes.push(Description::new(name, about, params, recorded)?);
    }
    let (mut remotes, mut common) = (Vec::new(), Vec::new());
    for (name, about, params, complete) in REMOTES {
        let spec = Spec::parse(complete)?;
        let mut reader = Reader::recording(&spec);
        RemoteSpec::read_params(&spec, &mut reader)?;
        let is_own = |read: &Recorded| params.iter().any(|param| param.key == read.key);
        let (own, rest) = reader.recorded().into_iter().partition(is_own);
        remotes.push(Description::new(name, about, params, own)?);
        common.push(rest);
    }
    Ok(Descriptions {
        store: Description::new("store", "a store with its tiers", PARAMS, store)?,
        writes,
        quota: Description::new("quota", "quotas of a tenant", QUOTA_PARAMS, quota)?,
        disk: Description::new("disk", "the disk tier", DISK_PARAMS, disk)?,
        device: Description::new("device", "replicas in device memory", DEVICE_PARAMS, device)?,
        remotes,
        every_remote: describe::rows("remote", &[REMOTE_PARAMS], &common)?,
    })
}

// ---------- fields
//
// Fields of the C options that override parameters of the spec string. They are parsed by the same
// rules.

/// Fields of `kvt_store_opts_t`; empty, 0 or `None` = as in the spec.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fields<'a> {
    /// Limit of cells in host memory, in bytes.
    pub host_bytes: u64,
    /// Limit of all files, in bytes.
    pub disk_bytes: u64,
    /// Directory of the disk tier.
    pub disk_path: &'a str,
    /// Spec of the host policy.
    pub policy: &'a str,
    /// Spec of the disk policy.
    pub disk_policy: &'a str,
    /// When puts are written to disk.
    pub write: Option<Write>,
}

impl Fields<'_> {
    /// Parses a spec and overrides it with these fields.
    pub fn over(&self, text: &str) -> Result<StoreSpec> {
        let mut spec = Spec::parse(if text.trim().is_empty() { "store()" } else { text })?;
        if self.host_bytes > 0 {
            set(&mut spec, "host", bytes(self.host_bytes));
        }
        for (key, policy) in [("policy", self.policy), ("disk_policy", self.disk_policy)] {
            if !policy.is_empty() {
                let policy = Spec::parse(policy).map_err(|error| error.within(key))?;
                set(&mut spec, key, Value::Spec(policy));
            }
        }
        if let Some(write) = self.write {
            let mode = match write {
                Write::Through => "through",
                Write::Behind => "behind",
                Write::Back => "back",
                Write::Never => "never",
            };
            let has_mode =
                |arg: &Arg| matches!(&arg.value, Value::Spec(value) if value.name == mode);
            // The spec's parameters of the same mode stay.
            if !spec.args.iter().any(|arg| arg.key == "write" && has_mode(arg)) {
                set(&mut spec, "write", Value::Spec(spec_named(mode)));
            }
        }
        if self.disk_bytes > 0 || !self.disk_path.is_empty() {
            self.set_disk(&mut spec);
        }
        StoreSpec::read(&spec)
    }

    fn set_disk(&self, spec: &mut Spec) {
        let disk_arg = spec.args.iter().find(|arg| arg.key == "disk").map(|arg| arg.value.clone());
        let mut disk = match disk_arg {
            Some(Value::Spec(disk)) if disk.name != "none" => disk,
            None | Some(Value::Spec(_)) => spec_named("disk"),
            // Errors are reported when the spec is read.
            Some(_) => return,
        };
        if self.disk_bytes > 0 {
            set(&mut disk, "bytes", bytes(self.disk_bytes));
        }
        if !self.disk_path.is_empty() {
            set(&mut disk, "path", Value::Text(self.disk_path.to_string()));
        }
        set(spec, "disk", Value::Spec(disk));
    }
}

fn spec_named(name: &str) -> Spec {
    Spec { name: name.to_string(), args: Vec::new(), offset: 0 }
}

fn bytes(bytes: u64) -> Value {
    Value::Number(bytes as f64, "B".to_string())
}

/// Sets a parameter, or replaces it.
fn set(spec: &mut Spec, key: &str, value: Value) {
    match spec.args.iter_mut().find(|arg| arg.key == key) {
        Some(arg) => arg.value = value,
        None => spec.args.push(Arg { key: key.to_string(), value, offset: spec.offset }),
    }
}

// ---------- remote

const MS: u64 = 1_000_000;
/// Most bytes of an engine's name in an event stream.
const MAX_NODE_BYTES: usize = 128;

/// Secrets by name. Only the remote's server may see them.
#[derive(Clone, Debug, Default)]
pub struct Secrets(Vec<(String, Secret)>);

impl Secrets {
    /// Names of secrets.
    pub const NAMES: [&'static str; 5] = ["password", "s3.key", "s3.secret", "s3.token", "seal"];

    /// Adds a secret. INVALID = the name is unknown or was added before.
    pub fn add(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if !Self::NAMES.contains(&name) {
            let all = Self::NAMES.join(", ");
            // The name may be the secret itself, by mistake, so it is not repeated.
            fail!(Invalid, "unknown name of a secret: the names are {all}");
        }
        if self.get(name).is_some() {
            fail!(Invalid, "the secret '{name}' is given twice");
        }
        self.0.push((name.to_string(), Secret::new(bytes)?));
        Ok(())
    }

    /// A secret.
    pub fn get(&self, name: &str) -> Option<Secret> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, secret)| secret.clone())
    }
}

/// Kind of a remote.
// Kinds that are not built in are parsed, too, so that errors are found and the missing feature is
// named.
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

/// The remote of a spec.
// Kinds that are not built in are parsed, too, so that errors are found and the missing feature is
// named.
#[cfg_attr(not(all(feature = "redis", feature = "s3", feature = "dir")), allow(dead_code))]
#[derive(Clone, Debug)]
pub struct RemoteSpec {
    pub(super) kind: Kind,
    pub(super) prefix: Prefix,
    pub(super) tls: TlsOpts,
    pub(super) connect_ns: u64,
    object_bytes: u64,
    require: bool,
    /// Configuration of the state machine. Sizes are the remote's, once it is open.
    pub config: RemoteConfig,
    /// Fetch workers.
    pub fetchers: u32,
    /// Upload workers.
    pub uploaders: u32,
}

impl RemoteSpec {
    /// Parses a remote; `None` for `none`.
    pub fn read(spec: &Spec) -> Result<Option<RemoteSpec>> {
        let mut reader = Reader::new(spec);
        let remote = RemoteSpec::read_params(spec, &mut reader)?;
        reader.finish()?;
        Ok(remote)
    }

    fn read_params(spec: &Spec, reader: &mut Reader) -> Result<Option<RemoteSpec>> {
        let Some(kind) = read_kind(spec, reader)? else { return Ok(None) };
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
            fail!(
                Spec,
                "object={object_bytes}: must be {MIN_OBJECT_BYTES} to {MAX_OBJECT_BYTES} bytes"
            );
        }
        let write = reader.choice("write", &["through", "back", "never"])?;
        let lookup_mode = reader.choice("lookup", &["append", "explicit", "fetch"])?;
        // Objects of S3 are long, and may come from far away.
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
            lookup_on_append: lookup_mode != Some(1),
            prefetch_found: lookup_mode == Some(2),
            ..usual
        };
        let (fetchers, uploaders) =
            (reader.u64("fetchers", 0, 0..=64)? as u32, reader.u64("uploaders", 0, 0..=64)? as u32);
        let require = reader.bool("require", false)?;
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
            uploaders,
        }))
    }

    /// Numbers of threads that fetch, and that upload. Redis servers serve several connections with
    /// one request each sooner than one connection with several; sealed ones need memory for each.
    pub fn worker_counts(&self, secrets: &Secrets) -> (u32, u32) {
        let is_light = matches!(self.kind, Kind::Redis { .. }) && secrets.get("seal").is_none();
        let (fetchers, uploaders) = if is_light { (4, 4) } else { (2, 1) };
        let or = |given: u32, usual| if given == 0 { usual } else { given };
        (or(self.fetchers, fetchers), or(self.uploaders, uploaders))
    }

    /// Whether it is the engine's own.
    pub fn is_custom(&self) -> bool {
        matches!(self.kind, Kind::Custom)
    }

    /// The publisher of events to this remote, if the spec has one. It is not connected yet.
    pub fn publisher(&self, secrets: &Secrets, clock: &Clock) -> Result<Option<(String, Publish)>> {
        let Kind::Redis { events: Some(node), .. } = &self.kind else { return Ok(None) };
        if secrets.get("seal").is_some() {
            fail!(
                Spec,
                "events=\"...\" publishes the names of chunks to the server, and seal hides them from \
                 it: use one of the two"
            );
        }
        Ok(Some((node.clone(), publisher(self, secrets, clock)?)))
    }

    /// Opens the remote and identifies its server. A remote that cannot be reached is an error only
    /// if it is required; one that rejects us is an error.
    pub fn open(
        &self,
        secrets: &Secrets,
        custom: Option<&CustomRemote>,
        clock: &Clock,
    ) -> Result<(Arc<dyn Remote>, RemoteConfig, Option<Server>)> {
        let remote = open(self, secrets, custom, clock)?;
        let caps = remote.caps();
        // Leaves space for headers, and for cells that begin at whole blocks.
        let most = (caps.max_bytes - caps.max_bytes / 16).clamp(MIN_OBJECT_BYTES, MAX_OBJECT_BYTES);
        let object_bytes = match self.object_bytes {
            0 => caps.preferred_bytes.clamp(MIN_OBJECT_BYTES, most),
            bytes if bytes > most => {
                fail!(Spec, "object={bytes}: this remote accepts objects of up to {most} bytes")
            }
            bytes => bytes,
        };
        let seed = crate::base::machine::random_bytes()?;
        let (fetchers, uploaders) = self.worker_counts(secrets);
        let config = RemoteConfig {
            object_bytes,
            max_bytes: caps.max_bytes,
            batch: caps.batch.max(1),
            names: caps.names.max(1),
            fetchers,
            secret: secrets.get("seal"),
            seed: u64::from_le_bytes(seed),
            // One lookup worker beside them.
            beside_bytes: u64::from(fetchers + uploaders + 1) * RemoteExecutor::bytes_of(&*remote),
            ..self.config.clone()
        };
        let deadline_ns = clock.now_ns() + self.connect_ns + self.config.timeout_ns;
        let server = match remote.client().greet(deadline_ns) {
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
                log::warn!("the remote cannot be reached; the store retries later: {error}");
                None
            }
        };
        Ok((remote, config, server))
    }
}

/// Kind of remote in a spec; `None` = no remote.
fn read_kind(spec: &Spec, reader: &mut Reader) -> Result<Option<Kind>> {
    Ok(Some(match spec.name.as_str() {
        "none" => return Ok(None),
        "redis" => Kind::Redis {
            url: text(reader, "url", "redis(...) needs url=\"redis://host:6379\"")?,
            user: reader.text("user")?.map(str::to_string),
            cluster: reader.bool("cluster", false)?,
            replicas: reader.choice("replicas", &["never", "read"])? == Some(1),
            ttl_s: reader.u64("ttl", 0, 0..=u64::from(u32::MAX))?,
            wait: reader.u64("wait", 0, 0..=16)? as u32,
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

/// Name under which events are published.
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

/// Whether a later attempt may succeed.
fn is_passing(error: &Error) -> bool {
    matches!(error.status(), Status::Timeout | Status::Unavailable | Status::Again)
}

/// A text parameter that is required.
fn text(reader: &mut Reader, key: &'static str, missing: &str) -> Result<String> {
    match reader.text(key)?.filter(|text| !text.is_empty()) {
        Some(text) => Ok(text.to_string()),
        None => Err(Error::new(Status::Spec, missing)),
    }
}

// ---------- remote open
//
// Opens a remote from its spec, as far as its backend is built in.

/// Opens the remote of a spec. UNSUPPORTED = not built in.
pub(super) fn open(
    spec: &RemoteSpec,
    secrets: &Secrets,
    custom: Option<&CustomRemote>,
    clock: &Clock,
) -> Result<Arc<dyn Remote>> {
    let remote = match &spec.kind {
        Kind::Redis { .. } => redis(spec, secrets, clock)?,
        Kind::S3 { .. } => s3(spec, secrets, clock)?,
        Kind::Dir { .. } => dir(spec, clock)?,
        Kind::Custom => match custom {
            Some(custom) => (custom.0)(&spec.prefix),
            None => fail!(Invalid, "remote=custom(...) needs the remote itself, in the options"),
        },
    };
    match secrets.get("seal") {
        Some(secret) => seal(remote, &secret),
        None => Ok(Arc::from(remote)),
    }
}

/// A feature that this library was built without.
#[allow(dead_code, reason = "a library may have all of them")]
fn missing<T>(feature: &str) -> Result<T> {
    crate::tier::remote::need(feature)?;
    fail!(Unsupported, "built without {feature}")
}

/// The publisher of events. UNSUPPORTED = not built in.
#[cfg(feature = "redis")]
pub(super) fn publisher(spec: &RemoteSpec, secrets: &Secrets, clock: &Clock) -> Result<Publish> {
    let Kind::Redis { events_kept, .. } = &spec.kind else { fail!(Invalid, "not a Redis server") };
    Ok(open_redis(spec, secrets, clock)?.publisher(*events_kept))
}

#[cfg(not(feature = "redis"))]
pub(super) fn publisher(_: &RemoteSpec, _: &Secrets, _: &Clock) -> Result<Publish> {
    missing("redis")
}

#[cfg(feature = "redis")]
fn open_redis(spec: &RemoteSpec, secrets: &Secrets, clock: &Clock) -> Result<Redis> {
    use crate::tier::remote::redis::RedisOpts;

    let Kind::Redis { url, user, cluster, replicas, ttl_s, wait, .. } = &spec.kind else {
        fail!(Invalid, "not a Redis server");
    };
    let opts = RedisOpts {
        user: user.clone(),
        password: secrets.get("password"),
        cluster: *cluster,
        replicas: *replicas,
        ttl_s: *ttl_s,
        wait: *wait,
        connect_ns: spec.connect_ns,
        tls: spec.tls.clone(),
        ..RedisOpts::new(url, spec.prefix.clone())
    };
    Redis::open(&opts, clock.clone())
}

#[cfg(feature = "redis")]
fn redis(spec: &RemoteSpec, secrets: &Secrets, clock: &Clock) -> Result<Box<dyn Remote>> {
    Ok(Box::new(open_redis(spec, secrets, clock)?))
}

#[cfg(not(feature = "redis"))]
fn redis(_: &RemoteSpec, _: &Secrets, _: &Clock) -> Result<Box<dyn Remote>> {
    missing("redis")
}

#[cfg(feature = "s3")]
fn s3(spec: &RemoteSpec, secrets: &Secrets, clock: &Clock) -> Result<Box<dyn Remote>> {
    use crate::tier::remote::s3::{S3, S3Opts, Style};

    let Kind::S3 { url, bucket, region, is_virtual, connections } = &spec.kind else {
        fail!(Invalid, "not a bucket");
    };
    let opts = S3Opts {
        url: url.clone(),
        bucket: bucket.clone(),
        region: region.clone(),
        style: if *is_virtual { Style::Virtual } else { Style::Path },
        prefix: spec.prefix.clone(),
        key: secrets.get("s3.key"),
        secret: secrets.get("s3.secret"),
        token: secrets.get("s3.token"),
        connect_ns: spec.connect_ns,
        connections: *connections,
        tls: spec.tls.clone(),
    };
    Ok(Box::new(S3::open(&opts, clock.clone())?))
}

#[cfg(not(feature = "s3"))]
fn s3(_: &RemoteSpec, _: &Secrets, _: &Clock) -> Result<Box<dyn Remote>> {
    missing("s3")
}

#[cfg(feature = "dir")]
fn dir(spec: &RemoteSpec, clock: &Clock) -> Result<Box<dyn Remote>> {
    use crate::tier::remote::dir::{Dir, DirOpts};

    let Kind::Dir { path, fsync } = &spec.kind else { fail!(Invalid, "not a directory") };
    let (path, prefix, clock) = (path.clone(), spec.prefix.clone(), clock.clone());
    Ok(Box::new(Dir::new(DirOpts { path, prefix, fsync: *fsync, clock })))
}

#[cfg(not(feature = "dir"))]
fn dir(_: &RemoteSpec, _: &Clock) -> Result<Box<dyn Remote>> {
    missing("dir")
}

#[cfg(feature = "seal")]
fn seal(
    remote: Box<dyn Remote>,
    secret: &crate::tier::remote::secret::Secret,
) -> Result<Arc<dyn Remote>> {
    Ok(Arc::new(crate::tier::remote::seal::Sealed::new(remote, secret)?))
}

#[cfg(not(feature = "seal"))]
fn seal(_: Box<dyn Remote>, _: &crate::tier::remote::secret::Secret) -> Result<Arc<dyn Remote>> {
    missing("seal")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_is_described() {
        let all = describe().expect("complete tables");
        assert_eq!(all.remotes.len(), REMOTES.len());
        let object = all.every_remote.iter().find(|row| row.key == "object").expect("one");
        let limits = [MIN_OBJECT_BYTES, MAX_OBJECT_BYTES].map(describe::bytes).join(" to ");
        assert_eq!(object.limits, limits);
        let (usual, device) = (Config::default(), DeviceConfig::default());
        let words = |rows: &[describe::Row], key: &str| {
            rows.iter().find(|row| row.key == key).expect("one").default.replace('`', "")
        };
        assert_eq!(words(&all.store.rows, "policy"), usual.host_policy);
        assert_eq!(words(&all.store.rows, "disk_policy"), usual.disk_policy);
        assert_eq!(words(&all.store.rows, "admission"), usual.admission);
        assert_eq!(words(&all.device.rows, "policy"), device.policy);
        assert_eq!(words(&all.device.rows, "admission"), device.admission);
        assert_eq!(words(&all.every_remote, "admission"), RemoteConfig::default().admission);
    }

    #[test]
    fn store_specs_are_parsed_and_invalid_ones_rejected() {
        let text = "store(host=64MiB, disk=disk(path=\"kv\", bytes=2GiB, buffered=true), \
                    policy=slru(segments=2), write=through, chunks=1000, codec=lz4, control=\"run/kv\")";
        let spec = StoreSpec::parse(text).unwrap();
        let disk = spec.disk.unwrap();
        assert_eq!((spec.config.host_bytes, spec.config.write), (64 << 20, Write::Through));
        assert_eq!(spec.config.host_policy, "slru(segments=2)");
        assert_eq!((disk.bytes, disk.files.buffered), (2 << 30, true));
        assert_eq!((spec.config.max_chunks, spec.config.codec), (1000, Codec::Lz4));
        assert_eq!(spec.control, Some(PathBuf::from("run/kv")));
        assert!(StoreSpec::parse("store(control=\"\")").unwrap().control.is_none());
        assert!(StoreSpec::parse("").unwrap().disk.is_none());
        assert_eq!(StoreSpec::parse("store(device=none)").unwrap().config.device.bytes, 0);
        let usual = StoreSpec::parse("").unwrap().config;
        assert_eq!((usual.write, usual.write_age_ns), (Write::Behind, 1_000_000_000));
        let config = StoreSpec::parse("store(write=behind(age=20ms, bytes=3MiB))").unwrap().config;
        assert_eq!((config.write, config.write_age_ns), (Write::Behind, 20_000_000));
        assert_eq!(config.unwritten_bytes, 3 << 20);
        let text = "store(device=device(capacity=2GiB, policy=lru, admission=select(hits=2)))";
        let device = StoreSpec::parse(text).unwrap().config.device;
        assert_eq!((device.bytes, &device.policy[..]), (2 << 30, "lru"));
        assert_eq!(device.admission, "select(hits=2)");
        for (bad, expected) in [
            ("store(hots=1GiB)", "host"),
            ("stor()", "store"),
            ("store(disk=disk(path=\"x\"))", "bytes="),
            ("store(disk=disk(bytes=1GiB))", "path="),
            ("store(disk=disc(bytes=1GiB))", "disk"),
            ("store(device=device())", "capacity="),
            ("store(device=devise(capacity=1GiB))", "device"),
            ("store(device=device(capacity=1GiB, policy=custom))", "score function"),
            ("store(write=thru)", "through"),
            ("store(write=back(age=1s))", "no arguments"),
            ("store(write=behind(age=1MiB))", "age"),
            ("store(codec=lz)", "lz4"),
            ("store(codec=int8)", "none"),
            ("store(policy=custom)", "at offset 13 needs a score function, and a store has none"),
            ("store(policy=lruu)", "'lruu' at offset 13; did you mean 'lru'?"),
            ("store(host=1GiB,disk_policy=lru-k(k=9))", "'k' at offset 34"),
            ("store(disk_policy=qos(inner=custom))", "'custom' at offset 28"),
        ] {
            let error = StoreSpec::parse(bad).unwrap_err();
            assert!(error.message().contains(expected), "{bad}: {error}");
        }
    }
}

#[cfg(test)]
mod fields_tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn fields_override_parameters_of_the_spec() {
        let none = Fields::default();
        let text = "store(host=1GiB,disk=disk(path=\"a\",bytes=1GiB,segment=1MiB),policy=lru)";
        let plain = none.over(text).expect("sound");
        assert_eq!((plain.config.host_bytes, plain.config.host_policy.as_str()), (1 << 30, "lru"));
        let fields = Fields {
            host_bytes: (5 << 20) + 1,
            disk_bytes: 7 << 20,
            disk_path: "b c\"(,",
            policy: "slru(segments=3)",
            disk_policy: "arc",
            write: Some(Write::Never),
        };
        for text in ["", "store", text, "store(disk=none)"] {
            let spec = fields.over(text).expect(text);
            let disk = spec.disk.expect("one");
            assert_eq!((spec.config.host_bytes, disk.bytes), ((5 << 20) + 1, 7 << 20));
            assert_eq!(disk.path, Path::new("b c\"(,"));
            assert_eq!(spec.config.host_policy, "slru(segments=3)");
            assert_eq!(
                (spec.config.disk_policy.as_str(), spec.config.write),
                ("arc", Write::Never)
            );
            assert_eq!(disk.segment_bytes == 1 << 20, text.contains("segment"));
        }
        let behind = Fields { write: Some(Write::Behind), ..none };
        let config = behind.over("store(write=behind(age=3s))").expect("sound").config;
        assert_eq!((config.write, config.write_age_ns), (Write::Behind, 3_000_000_000));
        let config = behind.over("store(write=never)").expect("sound").config;
        assert_eq!((config.write, config.write_age_ns), (Write::Behind, 1_000_000_000));
        let half = Fields { disk_bytes: 9, ..none }.over(text).expect("sound").disk.expect("one");
        assert_eq!((half.bytes, half.path.as_path()), (9, Path::new("a")));
    }

    #[test]
    fn errors_of_fields_name_the_parameter() {
        let none = Fields::default();
        for (fields, text, expected) in [
            (Fields { disk_bytes: 1, ..none }, "", "path="),
            (Fields { disk_path: "a", ..none }, "store", "bytes="),
            (Fields { disk_path: "a", ..none }, "store(disk=disc(bytes=1GiB))", "'disk'"),
            (Fields { disk_path: "a", ..none }, "store(disk=3)", "'disk'"),
            (Fields { policy: "lru(", ..none }, "", "policy"),
            (Fields { host_bytes: 1, ..none }, "shop", "'store'"),
            (Fields { host_bytes: 1, ..none }, "store(hots=1)", "'host'"),
        ] {
            let error = fields.over(text).expect_err(text);
            assert!(error.message().contains(expected), "{text}: {error}");
        }
    }
}

#[cfg(test)]
mod remote_spec_tests {
    use super::*;

    fn read(text: &str) -> Result<Option<RemoteSpec>> {
        RemoteSpec::read(&Spec::parse(text).unwrap())
    }

    #[test]
    fn remote_specs_are_parsed_and_invalid_ones_rejected() {
        let text =
            "redis(url=\"redis://a:1\", write=through, timeout=100, lookup=explicit, prefix=\"p\")";
        let spec = read(text).unwrap().unwrap();
        assert_eq!((spec.config.write, spec.config.timeout_ns), (Write::Through, 100 * MS));
        assert!(!spec.config.lookup_on_append && !spec.require && spec.fetchers == 0);
        let spec = read("dir(path=\"x\", fetchers=3, object=64KiB)").unwrap().unwrap();
        assert_eq!((spec.fetchers, spec.object_bytes), (3, 64 << 10));
        assert!(read("none").unwrap().is_none());
        for (bad, expected) in [
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
            assert!(error.message().contains(expected), "{bad}: {error}");
        }
    }

    #[test]
    fn secrets_are_named_unique_and_not_printed() {
        let mut secrets = Secrets::default();
        secrets.add("password", b"hunter2").unwrap();
        assert!(!format!("{secrets:?}").contains("hunter2"));
        assert_eq!(secrets.add("password", b"x").unwrap_err().status(), Status::Invalid);
        assert!(secrets.add("passwort", b"x").unwrap_err().message().contains("password"));
    }

    #[test]
    fn an_unreachable_remote_is_an_error_only_if_required() {
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
