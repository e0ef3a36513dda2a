//! Configuration of a store, and its counters.

use crate::base::memory::Wish;
use crate::base::spec::Spec;
use crate::base::status::Result;
use crate::fail;
use crate::format::codec::Codec;
use crate::format::codec::int8::Quality;
use crate::policy::custom;
use crate::policy::evictor::MAX_OBJECTS;
use crate::store::state::eviction::{Granularity, PIECE_BYTES, TierCache};
use crate::store::state::namespaces::{MAX_CHUNK_TABLES, MAX_SPACES};
use crate::store::state::remote::RemoteConfig;
use crate::store::state::snapshot::LEAST_HOST_BYTES;
use crate::tier::host::HostOpts;

/// When what is in memory is written to disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// As soon as a put has ended.
    Through,
    /// In the background, a bounded time after a put has ended.
    Behind,
    /// When its memory is needed.
    Back,
    /// Never, unless a put asks for it.
    Never,
}

/// What of a store rests in device memory, too.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Most bytes of device memory; 0 = none, there is no such tier.
    pub bytes: u64,
    /// Who leaves it.
    pub policy: String,
    /// What may come.
    pub admission: String,
}

impl Default for DeviceConfig {
    fn default() -> DeviceConfig {
        DeviceConfig { bytes: 0, policy: "s3fifo".into(), admission: "all".into() }
    }
}

/// What a store is to be like.
#[derive(Clone, Debug)]
pub struct Config {
    /// Most bytes of cells in memory.
    pub host_bytes: u64,
    /// Its copies in device memory.
    pub device: DeviceConfig,
    /// The remote, if it has one.
    pub remote: Option<RemoteConfig>,
    /// Who leaves memory.
    pub host_policy: String,
    /// Who leaves the disk.
    pub disk_policy: String,
    /// What policies choose among.
    pub granularity: Granularity,
    /// Cells are dropped alone, though a chunk is of no use without one.
    pub drop_cells: bool,
    /// What goes to disk when.
    pub write: Write,
    /// With [`Write::Behind`], how old a chunk may become that is in memory only.
    pub write_age_ns: u64,
    /// With [`Write::Behind`], most bytes that wait for their time; 0 = an eighth of host memory.
    pub unwritten_bytes: u64,
    /// What may go to disk.
    pub admission: String,
    /// What cells are coded with on disk where the namespace's recipe does not say; it
    /// loses nothing.
    pub codec: Codec,
    /// The share of a tier at which room is made ahead of need.
    pub high: f64,
    /// The share at which that ends.
    pub low: f64,
    /// Most chunks.
    pub max_chunks: usize,
    /// Chunks on disk that are more than that may be forgotten.
    pub forgets: bool,
    /// Most namespaces that are open or have chunks.
    pub max_spaces: usize,
    /// Most layouts of theirs.
    pub max_layouts: usize,
    /// Most sessions.
    pub max_sessions: u32,
    /// Most moves at once.
    pub max_moves: u32,
    /// Most cells on their way at once.
    pub max_jobs: u32,
    /// Events that are kept.
    pub events: usize,
    /// Cells of a batch.
    pub batch_cells: usize,
    /// Bytes of a batch.
    pub batch_bytes: u64,
    /// Bytes of a batch of copies by the processor: what is urgent waits for one of them.
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
            high: 0.97,
            low: 0.92,
            max_chunks: 1 << 20,
            forgets: false,
            max_spaces: MAX_SPACES,
            max_layouts: MAX_CHUNK_TABLES,
            max_sessions: 1 << 16,
            max_moves: 1 << 14,
            max_jobs: 1 << 16,
            events: 1 << 14,
            batch_cells: 64,
            batch_bytes: 8 << 20,
            copy_bytes: 1 << 20,
        }
    }
}

impl Config {
    /// The share of a disk that cells and their headers have when room was made, but for the
    /// segments beside them: three quarters of the way up from the lower mark. Each cell that is
    /// kept is one that cleaning may have to move.
    pub fn disk_share(&self) -> f64 {
        self.low + (self.high - self.low) * 0.75
    }

    /// Whether it can be.
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
            fail!(Invalid, "low={} and high={}: 0 <= low <= high <= 1 can be", self.low, self.high);
        }
        if self.host_bytes < LEAST_HOST_BYTES {
            let (has, least) = (self.host_bytes, LEAST_HOST_BYTES);
            fail!(Invalid, "{has} bytes of memory (host=); at least {least} are needed");
        }
        if self.batch_cells == 0 || self.max_sessions == 0 || self.max_jobs == 0 {
            fail!(Invalid, "batches, sessions and jobs cannot be limited to none");
        }
        let most = 1..=MAX_SPACES;
        if !most.contains(&self.max_spaces) || !(1..=MAX_CHUNK_TABLES).contains(&self.max_layouts) {
            fail!(Invalid, "{} namespaces of {} layouts", self.max_spaces, self.max_layouts);
        }
        Ok(())
    }

    /// How the host tier is cut: of short segments, where it is small.
    pub fn host_opts(&self) -> HostOpts {
        let segment_bytes = (self.host_bytes / 16).clamp(64 << 10, 32 << 20);
        HostOpts { segment_bytes, max_bytes: self.host_bytes, huge: Wish::Try }
    }

    /// Objects of a policy that chooses chunks: what is gone, and others continue, is known
    /// for some time yet.
    pub(super) fn chunk_objects(&self) -> usize {
        self.max_chunks + self.max_chunks / 4 + 64
    }

    /// Opens the policies of memory and, if there is one, of a disk of so many bytes.
    pub(super) fn open_caches(
        &self,
        disk_bytes: Option<u64>,
    ) -> Result<(TierCache, Option<TierCache>)> {
        let chunks = self.chunk_objects();
        let objects = |granularity, bytes: u64| match granularity {
            // Memory may be made larger, and cells be told of before they come.
            Granularity::Cell => {
                let most = (bytes / PIECE_BYTES).saturating_mul(4);
                let most = usize::try_from(most).unwrap_or(usize::MAX);
                most.saturating_add(2 * self.max_jobs as usize + (1 << 16)).min(MAX_OBJECTS)
            }
            Granularity::Chunk | Granularity::Session => chunks,
        };
        // From the last tier chunks go as a whole, but where that is not wanted.
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

/// What is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Moves begun, by deed.
    pub moves: [u64; 3],
    /// Cells stored from outside.
    pub stored: u64,
    /// Cells that were there when they were to be stored.
    pub known: u64,
    /// Cells read from memory.
    pub host_hits: u64,
    /// Cells that had to be read from disk first.
    pub disk_hits: u64,
    /// Cells read from device memory.
    pub device_hits: u64,
    /// Cells that were copied into device memory.
    pub promoted: u64,
    /// Chunks that its policy has sent away from there.
    pub device_evicted: u64,
    /// Cells that were forgotten there because the device has failed.
    pub device_lost: u64,
    /// Cells that were nowhere.
    pub misses: u64,
    /// Cells whose bytes were wrong, and that became misses.
    pub corrupt: u64,
    /// Copies that came damaged over a device's bus, and were made again.
    pub damaged: u64,
    /// Cells written to disk.
    pub written: u64,
    /// Their bytes, as they are in memory.
    pub written_bytes: u64,
    /// Of those, cells that were coded.
    pub coded: u64,
    /// Their bytes, as they are in memory.
    pub coded_raw_bytes: u64,
    /// Their bytes on disk.
    pub coded_bytes: u64,
    /// What lossy codecs have lost.
    pub lost: Quality,
    /// Bytes loaded from disk.
    pub loaded_bytes: u64,
    /// Chunks that left memory and are on disk.
    pub demoted: u64,
    /// Chunks that left memory and are gone.
    pub dropped: u64,
    /// Chunks of which nothing is left on disk, since others needed the room.
    pub disk_evicted: u64,
    /// Times that a part of a chunk left the disk for that, where cells are dropped alone.
    pub disk_parted: u64,
    /// Chunks that were to leave memory, and the disk had no room for.
    pub refused: u64,
    /// Jobs that failed for want of room.
    pub no_room: u64,
    /// Writes that failed.
    pub failed_writes: u64,
    /// Reads that failed.
    pub failed_reads: u64,
}
