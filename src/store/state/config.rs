//! Configuration of a store, and its counters.

use crate::base::memory::Requirement;
use crate::base::spec::Spec;
use crate::base::status::Result;
use crate::fail;
use crate::format::codec::Codec;
use crate::policy::custom;
use crate::policy::evictor::MAX_OBJECTS;
use crate::store::state::tier_cache::{Granularity, PIECE_BYTES, TierCache};
use crate::tier::host::HostOpts;
use crate::tier::remote::secret::Secret;

/// When puts are written to disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// As soon as the put is in memory.
    Through,
    /// In the background, a bounded time after the put.
    Behind,
    /// When the memory is needed.
    Back,
    /// Never, unless a put's level requires it.
    Never,
}

/// Configuration of the device tier.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Limit in bytes; 0 = no device tier.
    pub bytes: u64,
    /// Spec of its policy.
    pub policy: String,
    /// Spec of its admission rule.
    pub admission: String,
}

impl Default for DeviceConfig {
    fn default() -> DeviceConfig {
        DeviceConfig { bytes: 0, policy: "s3fifo".into(), admission: "all".into() }
    }
}

/// Most namespaces.
pub const MAX_NAMESPACES: usize = 1 << 16;
/// Most layouts.
pub const MAX_CHUNK_TABLES: usize = 64;
/// Least limit of host memory, in bytes.
pub const LEAST_HOST_BYTES: u64 = 64 << 10;

/// Configuration of the remote.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// Layers are joined to one object up to so many bytes.
    pub object_bytes: u64,
    /// Most bytes of an object that the remote accepts.
    pub max_bytes: u64,
    /// Most objects of a batch.
    pub batch: usize,
    /// Most names of a lookup.
    pub names: usize,
    /// Fetch workers; 0 = not known.
    pub fetchers: u32,
    /// When chunks are uploaded.
    pub write: Write,
    /// Spec of the admission rule for uploads.
    pub admission: String,
    /// Timeout of a request, without the time for its bytes.
    pub timeout_ns: u64,
    /// Validity of an answer "present".
    pub fresh_ns: u64,
    /// Validity of an answer "absent".
    pub absent_ns: u64,
    /// Names whose answers are remembered.
    pub known: usize,
    /// Sessions start a lookup as soon as they have tokens.
    pub lookup_on_append: bool,
    /// KV that a lookup has found is prefetched.
    pub prefetch_found: bool,
    /// Key of the names, if objects are sealed.
    pub secret: Option<Secret>,
    /// Seed of the breaker's random choices.
    pub seed: u64,
    /// Memory of the remote workers, charged with the tables.
    pub beside_bytes: u64,
}

impl Default for RemoteConfig {
    fn default() -> RemoteConfig {
        RemoteConfig {
            object_bytes: 1 << 20,
            max_bytes: 128 << 20,
            batch: 32,
            names: 64,
            fetchers: 0,
            write: Write::Through,
            admission: "all".into(),
            timeout_ns: 250_000_000,
            fresh_ns: 60_000_000_000,
            absent_ns: 5_000_000_000,
            known: 1 << 16,
            lookup_on_append: true,
            prefetch_found: false,
            secret: None,
            seed: 0,
            beside_bytes: 0,
        }
    }
}

/// Configuration of a store.
#[derive(Clone, Debug)]
pub struct Config {
    /// Limit of cells in host memory, in bytes.
    pub host_bytes: u64,
    /// The device tier.
    pub device: DeviceConfig,
    /// The remote, if there is one.
    pub remote: Option<RemoteConfig>,
    /// Spec of the host policy.
    pub host_policy: String,
    /// Spec of the disk policy.
    pub disk_policy: String,
    /// Granularity of eviction: the objects of the policies.
    pub granularity: Granularity,
    /// Cells are dropped alone, though a chunk is useless without one of them.
    pub drop_cells: bool,
    /// When puts are written to disk.
    pub write: Write,
    /// With [`Write::Behind`], the age at which a chunk is written.
    pub write_age_ns: u64,
    /// With [`Write::Behind`], most bytes that wait; 0 = an eighth of host memory.
    pub unwritten_bytes: u64,
    /// Spec of the admission rule of the disk.
    pub admission: String,
    /// Lossless codec of cells on disk, where the namespace's recipe names none.
    pub codec: Codec,
    /// Share of the last tier that pinned chunks may have.
    pub pins: f64,
    /// Quota of each tenant that has none of its own, in bytes of host memory and of the disk;
    /// 0 = none.
    pub quota: [u64; 2],
    /// Share of a tier at which eviction begins.
    pub high: f64,
    /// Share at which eviction ends.
    pub low: f64,
    /// Most chunks.
    pub max_chunks: usize,
    /// Chunks recovered beyond that limit may be forgotten.
    pub forgets: bool,
    /// Most namespaces that are open or have chunks.
    pub max_namespaces: usize,
    /// Most layouts.
    pub max_layouts: usize,
    /// Most sessions.
    pub max_sessions: u32,
    /// Most transfers in flight.
    pub max_transfers: u32,
    /// Most jobs in flight.
    pub max_jobs: u32,
    /// Events kept for readers.
    pub events: usize,
    /// Most cells of a batch.
    pub batch_cells: usize,
    /// Most bytes of a batch.
    pub batch_bytes: u64,
    /// Most bytes of a batch of copies by the processor. An urgent copy waits for at most one.
    pub copy_bytes: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            host_bytes: 1 << 30,
            device: DeviceConfig::default(),
            remote: None,
            host_policy: "horizon".into(),
            disk_policy: "lru".into(),
            granularity: Granularity::Chunk,
            drop_cells: false,
            write: Write::Behind,
            write_age_ns: 1_000_000_000,
            unwritten_bytes: 0,
            admission: "all".into(),
            codec: Codec::None,
            pins: 0.5,
            quota: [0; 2],
            high: 0.97,
            low: 0.92,
            max_chunks: 1 << 20,
            forgets: false,
            max_namespaces: MAX_NAMESPACES,
            max_layouts: MAX_CHUNK_TABLES,
            max_sessions: 1 << 16,
            max_transfers: 1 << 14,
            max_jobs: 1 << 16,
            events: 1 << 14,
            batch_cells: 64,
            batch_bytes: 8 << 20,
            copy_bytes: 1 << 20,
        }
    }
}

impl Config {
    /// Share of a disk, without open segments, that cells and headers have after an eviction: three
    /// quarters of the way from the low watermark to all of it. Each live cell is one that
    /// compaction may have to move.
    pub fn disk_share(&self) -> f64 {
        self.low + (self.high - self.low) * 0.75
    }

    /// Checks the values.
    pub(super) fn check(&self) -> Result<()> {
        for policy in [&self.host_policy, &self.disk_policy, &self.device.policy] {
            custom::refuse(&Spec::parse(policy)?, "a store")?;
        }
        if self.drop_cells && self.granularity != Granularity::Cell {
            fail!(
                Invalid,
                "drop=cell: cells can be dropped where policies choose cells, granularity=cell"
            );
        }
        if !(0.0..=1.0).contains(&self.high) || !(0.0..=self.high).contains(&self.low) {
            fail!(Invalid, "low={}, high={}: must be 0 <= low <= high <= 1", self.low, self.high);
        }
        if self.host_bytes < LEAST_HOST_BYTES {
            let (has, least) = (self.host_bytes, LEAST_HOST_BYTES);
            fail!(Invalid, "host={has}: at least {least} bytes are needed");
        }
        if self.batch_cells == 0 || self.max_sessions == 0 || self.max_jobs == 0 {
            fail!(Invalid, "batch, sessions and jobs must be at least 1");
        }
        let most = 1..=MAX_NAMESPACES;
        if !most.contains(&self.max_namespaces)
            || !(1..=MAX_CHUNK_TABLES).contains(&self.max_layouts)
        {
            fail!(Invalid, "{} namespaces of {} layouts", self.max_namespaces, self.max_layouts);
        }
        Ok(())
    }

    /// Options of the host tier. A small tier has small slabs.
    pub fn host_opts(&self) -> HostOpts {
        let slab_bytes = (self.host_bytes / 16).clamp(64 << 10, 32 << 20);
        HostOpts { slab_bytes, max_bytes: self.host_bytes, huge: Requirement::Try }
    }

    /// Policy objects for chunks. Evicted chunks that others continue are kept for a while.
    pub(super) fn chunk_objects(&self) -> usize {
        self.max_chunks + self.max_chunks / 4 + 64
    }

    /// Opens the policies of host memory and, if there is a disk, of its bytes.
    pub(super) fn open_caches(
        &self,
        disk_bytes: Option<u64>,
    ) -> Result<(TierCache, Option<TierCache>)> {
        let chunks = self.chunk_objects();
        let objects = |granularity, bytes: u64| match granularity {
            // The limit of memory may grow, and cells are announced before they arrive.
            Granularity::Cell => {
                let most = (bytes / PIECE_BYTES).saturating_mul(4);
                let most = usize::try_from(most).unwrap_or(usize::MAX);
                most.saturating_add(2 * self.max_jobs as usize + (1 << 16)).min(MAX_OBJECTS)
            }
            Granularity::Chunk | Granularity::Session => chunks,
        };
        // From the last tier whole chunks are evicted, unless the store drops cells alone.
        let last = match self.granularity {
            Granularity::Cell if !self.drop_cells => Granularity::Chunk,
            granularity => granularity,
        };
        let open = |spec: &str, granularity, bytes, holes| {
            TierCache::open(spec, granularity, objects(granularity, bytes), bytes, holes)
        };
        let Some(disk_bytes) = disk_bytes else {
            return Ok((open(&self.host_policy, last, self.host_bytes, false)?, None));
        };
        let host = open(&self.host_policy, self.granularity, self.host_bytes, true)?;
        Ok((host, Some(open(&self.disk_policy, last, disk_bytes, false)?)))
    }
}
