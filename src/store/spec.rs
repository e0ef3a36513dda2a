//! How a store is described: one spec, for the struct of a C caller and for the tool.
//!
//! | parameter | default | meaning |
//! |---|---|---|
//! | `host` | 1GiB | most bytes of cells in memory |
//! | `disk` | none | `disk(path="...", bytes=...)`: the disk tier |
//! | `remote` | none | `redis(url="...")`, `dir(path="...")`, `custom()`: a remote that engines share, see [`remote_spec`](crate::store::remote_spec) |
//! | `device` | none | `device(capacity=...)`: copies in device memory; needs a device with memory of its own |
//! | `policy` | `horizon` | who leaves memory: any policy |
//! | `disk_policy` | `lru` | who leaves the disk |
//! | `granularity` | `chunk` | what policies choose among: `chunk`; `cell`: late layers leave memory before early ones; `session`: what a session was the last to use leaves together |
//! | `drop` | `chunk` | what is gone from the last tier goes with all its layers; `cell` (with `granularity=cell`): cell by cell |
//! | `write` | `behind` | `behind`: to disk in the background, a bounded time after a put has ended; `through`: as soon as it has ended; `back`: when its memory is needed; `never`: only when a put asks for it |
//! | `codec` | `none` | `lz4`: cells are smaller on disk, and lose nothing; a namespace's recipe may say otherwise, also `int8` (see `docs/keys.md`) |
//! | `admission` | `all` | what may go to disk: `all`, `none`, `select(...)` |
//! | `high`, `low` | 0.97, 0.92 | share of a tier at which room is made ahead of need, and at which that ends |
//! | `chunks` | 1048576 | most chunks, of all namespaces |
//! | `forget` | false | chunks on disk may be forgotten that are more than `chunks`, where that was larger before |
//! | `sessions` | 65536 | most sessions at once |
//! | `moves`, `cells` | 16384, 65536 | most moves, and cells on their way, at once |
//! | `events` | 16384 | events that are kept for readers |
//! | `copiers`, `readers` | 0, 2 | threads that copy (0: as many as cores, at most 4), and that read the disk |
//! | `control` | none | `"path"` of a local socket at which the tool can look at the store and change it |
//!
//! | parameter of `behind` | default | meaning |
//! |---|---|---|
//! | `age` | 1s | how old a chunk may become that is in memory only, as far as the disk keeps up |
//! | `bytes` | an eighth of `host` | when more bytes than this wait to be written, the oldest are written at once |
//!
//! | parameter of `disk` | default | meaning |
//! |---|---|---|
//! | `path` | | the directory; it is made if it is not there |
//! | `bytes` | | most bytes of all its files |
//! | `segment` | one part in 1,024 of `bytes`, 8 to 64 MiB | bytes of a segment |
//! | `buffered` | false | through the page cache |
//! | `uring` | true | io_uring where it works |
//!
//! | parameter of `device` | default | meaning |
//! |---|---|---|
//! | `capacity` | | most bytes of device memory |
//! | `policy` | `s3fifo` | who leaves it |
//! | `admission` | `all` | what may come: `all`, `none`, `select(...)` |

use std::path::PathBuf;

use crate::base::spec::{Reader, Spec};
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::format::codec::Codec;
use crate::io::real::RealOpts;
use crate::policy::custom;
use crate::store::remote_spec::{RemoteSpec, Secrets};
use crate::store::state::granularity::Granularity;
use crate::store::state::{Config, DeviceConfig, Write};
use crate::tier::remote::Remote;
use crate::tier::remote::name::Prefix;

/// A disk tier as described.
#[derive(Clone, Debug)]
pub struct DiskSpec {
    /// The directory.
    pub path: PathBuf,
    /// Most bytes of all files.
    pub bytes: u64,
    /// Bytes of a segment; 0 = as usual.
    pub segment_bytes: u64,
    /// How files are read and written.
    pub files: RealOpts,
}

/// Makes the remote that an engine brought, with what stands before its names.
#[derive(Clone)]
pub struct CustomRemote(pub Arc<MakeRemote>);

/// The function of that.
pub type MakeRemote = dyn Fn(&Prefix) -> Box<dyn Remote> + Send + Sync;

impl std::fmt::Debug for CustomRemote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CustomRemote")
    }
}

/// A store as described.
#[derive(Clone, Debug)]
pub struct StoreSpec {
    /// What it decides by.
    pub config: Config,
    /// Its disk.
    pub disk: Option<DiskSpec>,
    /// Its remote.
    pub remote: Option<RemoteSpec>,
    /// What only the remote is to see.
    pub secrets: Secrets,
    /// The engine's own remote.
    pub custom_remote: Option<CustomRemote>,
    /// Threads that copy; 0 = as many as cores, at most 4.
    pub copiers: u32,
    /// Threads that read the disk.
    pub readers: u32,
    /// Where the control socket is, if there is one.
    pub control: Option<PathBuf>,
}

impl StoreSpec {
    /// Whether its remote is the engine's own.
    pub fn has_custom_remote(&self) -> bool {
        self.remote.as_ref().is_some_and(RemoteSpec::is_custom)
    }

    /// Reads a spec; an empty one is all defaults.
    pub fn parse(text: &str) -> Result<StoreSpec> {
        StoreSpec::read(&Spec::parse(if text.trim().is_empty() { "store()" } else { text })?)
    }

    /// Reads one that was parsed, or came from elsewhere.
    pub fn read(spec: &Spec) -> Result<StoreSpec> {
        if spec.name != "store" {
            return Err(spec.unknown_name(&["store"]));
        }
        let mut reader = Reader::new(spec);
        let usual = Config::default();
        let granularity = reader.choice("grain", &["chunk", "cell", "session"])?;
        let drops = reader.choice("drop", &["chunk", "cell"])?;
        let (write, write_age_ns, unwritten_bytes) = match reader.spec("write")? {
            Some(write) => read_write(write, &usual)?,
            None => (usual.write, usual.write_age_ns, usual.unwritten_bytes),
        };
        let config = Config {
            host_bytes: reader.bytes("host", usual.host_bytes)?,
            device: match reader.spec("device")? {
                Some(device) => read_device(device)?,
                None => DeviceConfig::default(),
            },
            host_policy: policy(&mut reader, "policy", &usual.host_policy)?,
            disk_policy: policy(&mut reader, "disk_policy", &usual.disk_policy)?,
            granularity: match granularity {
                Some(1) => Granularity::Cell,
                Some(2) => Granularity::Session,
                _ => usual.granularity,
            },
            drop_cells: drops == Some(1),
            write,
            write_age_ns,
            unwritten_bytes,
            admission: written(&mut reader, "admission", &usual.admission)?,
            // One that loses something is a matter of recipes, not of stores.
            codec: match reader.choice("codec", &["none", "lz4"])? {
                Some(1) => Codec::Lz4,
                _ => usual.codec,
            },
            high: reader.f64("high", usual.high, 0.0..=1.0)?,
            low: reader.f64("low", usual.low, 0.0..=1.0)?,
            max_chunks: reader.u64("chunks", usual.max_chunks as u64, 1..=1 << 28)? as usize,
            forgets: reader.bool("forget", false)?,
            max_sessions: reader.u64("sessions", u64::from(usual.max_sessions), 1..=1 << 24)?
                as u32,
            max_moves: reader.u64("moves", u64::from(usual.max_moves), 1..=1 << 20)? as u32,
            max_jobs: reader.u64("cells", u64::from(usual.max_jobs), 1..=1 << 24)? as u32,
            events: reader.u64("events", usual.events as u64, 1..=1 << 22)? as usize,
            ..usual
        };
        let copiers = reader.u64("copiers", 0, 0..=64)? as u32;
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
        reader.finish()?;
        let (secrets, custom_remote) = (Secrets::default(), None);
        Ok(StoreSpec { config, disk, remote, secrets, custom_remote, copiers, readers, control })
    }
}

/// A policy's spec as it was written; one that a store can have.
fn policy(reader: &mut Reader, key: &'static str, usual: &str) -> Result<String> {
    if let Some(spec) = reader.spec(key)? {
        custom::refuse(spec, "a store")?;
    }
    written(reader, key, usual)
}

/// A spec as it was written.
fn written(reader: &mut Reader, key: &'static str, usual: &str) -> Result<String> {
    Ok(reader.spec(key)?.map_or_else(|| usual.to_string(), |spec| spec.to_string()))
}

/// When what is put goes to the disk, and what bounds that.
fn read_write(spec: &Spec, usual: &Config) -> Result<(Write, u64, u64)> {
    let write = match spec.name.as_str() {
        "behind" => Write::Behind,
        "through" => Write::Through,
        "back" => Write::Back,
        "never" => Write::Never,
        _ => return Err(spec.unknown_name(&["behind", "through", "back", "never"])),
    };
    let mut reader = Reader::new(spec);
    let (mut age_ns, mut bytes) = (usual.write_age_ns, usual.unwritten_bytes);
    if write == Write::Behind {
        age_ns = reader.duration_ns("age", age_ns)?;
        bytes = reader.bytes("bytes", bytes)?;
    }
    reader.finish()?;
    Ok((write, age_ns, bytes))
}

fn read_device(spec: &Spec) -> Result<DeviceConfig> {
    let usual = DeviceConfig::default();
    match spec.name.as_str() {
        "none" => return Reader::new(spec).finish().map(|()| usual),
        "device" => {}
        _ => return Err(spec.unknown_name(&["device", "none"])),
    }
    let mut reader = Reader::new(spec);
    let bytes = reader.bytes("capacity", 0)?;
    let policy = policy(&mut reader, "policy", &usual.policy)?;
    let admission = written(&mut reader, "admission", &usual.admission)?;
    reader.finish()?;
    if bytes == 0 {
        fail!(Spec, "device(...) needs capacity=...: most bytes of device memory");
    }
    Ok(DeviceConfig { bytes, policy, admission })
}

fn read_disk(spec: &Spec) -> Result<Option<DiskSpec>> {
    match spec.name.as_str() {
        "none" => return Reader::new(spec).finish().map(|()| None),
        "disk" => {}
        _ => return Err(spec.unknown_name(&["disk", "none"])),
    }
    let mut reader = Reader::new(spec);
    let path = reader.text("path")?.map(PathBuf::from);
    let bytes = reader.bytes("bytes", 0)?;
    let segment_bytes = reader.bytes("segment", 0)?;
    let buffered = reader.bool("buffered", false)?;
    let no_uring = !reader.bool("uring", true)?;
    reader.finish()?;
    let Some(path) = path.filter(|path| !path.as_os_str().is_empty()) else {
        fail!(Spec, "disk(...) needs path=\"...\": the directory of the disk tier");
    };
    if bytes == 0 {
        fail!(Spec, "disk(...) needs bytes=...: most bytes of all its files");
    }
    let files = RealOpts { buffered, no_uring, ..RealOpts::default() };
    Ok(Some(DiskSpec { path, bytes, segment_bytes, files }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_described_in_one_line() {
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
        for (bad, word) in [
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
            ("store(disk_policy=qos(inner=custom))", "'custom' at offset 28"),
        ] {
            let error = StoreSpec::parse(bad).unwrap_err();
            assert!(error.message().contains(word), "{bad}: {error}");
        }
    }
}
