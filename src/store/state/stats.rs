//! What a store counts and has, as plain numbers.

use crate::base::budget::Tier;
use crate::format::segment::BLOCK_BYTES;
use crate::store::admission::REFUSALS;
use crate::store::job_queues::{LANES, Queues};
use crate::store::state::bandwidth::Flow;
use crate::store::state::device_replicas::Replicas;
use crate::store::state::latency::{Latency, TIMED};
use crate::store::state::tenants::Tenant;
use crate::store::state::tier_cache::TierCache;
use crate::store::state::work::{KINDS, WorkerKind};
use crate::store::state::{Counters, StoreState};
use crate::tier::device::DeviceStats;
use crate::tier::disk::{DiskTier, Stats};

/// What the memory of a store has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostGauge {
    /// Most bytes of cells.
    pub limit_bytes: u64,
    /// Bytes of cells.
    pub live_bytes: u64,
    /// What they cost, tables and what is not used included.
    pub cost_bytes: u64,
    /// Cells.
    pub pieces: u64,
    /// Segments.
    pub segments: u32,
}

/// What the device memory of a store has; all zero where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceGauge {
    /// Most bytes of slabs.
    pub limit_bytes: u64,
    /// Bytes of slabs.
    pub used_bytes: u64,
    /// Bytes of cells.
    pub live_bytes: u64,
    /// Slabs.
    pub slabs: u32,
    /// The device is lost, and the tier closed.
    pub is_lost: bool,
}

impl DeviceGauge {
    fn of(replicas: &Replicas) -> DeviceGauge {
        let DeviceStats { limit_bytes, slabs, slab_bytes, live_bytes, .. } = replicas.stats();
        let (used_bytes, is_lost) = (slab_bytes, replicas.is_lost());
        DeviceGauge { limit_bytes, used_bytes, live_bytes, slabs, is_lost }
    }
}

/// How files are read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// There are none.
    #[default]
    None = 0,
    /// One transfer at a time, by the thread that wants it.
    Threads = 1,
    /// Many at once, by io_uring.
    Uring = 2,
}

/// What the disk of a store has; all zero where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskGauge {
    /// Bytes that may be used.
    pub budget_bytes: u64,
    /// Bytes that are used.
    pub used_bytes: u64,
    /// Bytes of cells that live.
    pub live_bytes: u64,
    /// Bytes that cleaning would free.
    pub dead_bytes: u64,
    /// Segments.
    pub segments: u64,
    /// What was written and read, and what went wrong.
    pub stats: Stats,
    /// How its files are read and written now.
    pub engine: Engine,
    /// Past the page cache.
    pub is_direct: bool,
}

impl DiskGauge {
    fn of(disk: &DiskTier) -> DiskGauge {
        let stats = disk.stats();
        let (used_bytes, budget_bytes) = (stats.used_bytes, stats.budget_bytes);
        let engine = match disk.files().engine().starts_with("io_uring") {
            true => Engine::Uring,
            false => Engine::Threads,
        };
        let is_direct = disk.files().align_bytes() > 1;
        let usual = DiskGauge::default();
        let mut gauge = DiskGauge { used_bytes, budget_bytes, stats, engine, is_direct, ..usual };
        for segment in disk.segments() {
            gauge.segments += 1;
            gauge.live_bytes += u64::from(segment.live_blocks) * BLOCK_BYTES as u64;
            gauge.dead_bytes += u64::from(segment.dead_blocks) * BLOCK_BYTES as u64;
        }
        gauge
    }

    /// Bytes that were written for each byte of cells from callers: 1 is no wear
    /// beyond that; 0 where nothing was written.
    pub fn wear(&self) -> f64 {
        let Stats { appended_bytes, cleaned_bytes, overhead_bytes, .. } = self.stats;
        share(appended_bytes + cleaned_bytes + overhead_bytes, appended_bytes)
    }
}

/// Cells that wait for a way, or are on it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueGauge {
    /// Cells that wait, by urgency.
    pub cells: [u64; LANES],
    /// Their bytes.
    pub bytes: [u64; LANES],
    /// Batches under way.
    pub batches: u32,
    /// Their bytes.
    pub batch_bytes: u64,
    /// What is known of the way: its rate.
    pub bytes_per_second: f64,
    /// The delay of a batch.
    pub delay_ns: f64,
}

impl QueueGauge {
    fn of(queues: &Queues, flow: &Flow, batches: u32) -> QueueGauge {
        let waiting: [(u32, u64); LANES] = std::array::from_fn(|lane| queues.waiting(lane));
        QueueGauge {
            cells: waiting.map(|(cells, _)| u64::from(cells)),
            bytes: waiting.map(|(_, bytes)| bytes),
            batches,
            batch_bytes: flow.under_way,
            bytes_per_second: flow.speed.bytes_per_second(),
            delay_ns: flow.speed.ns(0, 1),
        }
    }
}

/// A policy at work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicyGauge {
    /// Its name.
    pub name: &'static str,
    /// Chunks that it knows.
    pub objects: u64,
    /// Chunks it was asked for.
    pub references: u64,
    /// Of those, found.
    pub hits: u64,
    /// Chunks that it has sent away.
    pub evictions: u64,
    /// Times that it was asked whom.
    pub decisions: u64,
    /// Times that it found fewer than wanted.
    pub shortfalls: u64,
    /// How long it took to say whom, of those times that were measured.
    pub decision: Latency,
}

impl PolicyGauge {
    fn of(cache: &TierCache) -> PolicyGauge {
        let counts = &cache.evictor.metrics.counts;
        PolicyGauge {
            name: cache.evictor.name(),
            objects: cache.evictor.objects().len() as u64,
            references: counts.references,
            hits: counts.hits,
            evictions: counts.evictions,
            decisions: counts.decisions,
            shortfalls: counts.shortfalls,
            decision: Latency::of(&cache.evictor.metrics.decision),
        }
    }

    /// Found per asked for; 0 of none.
    pub fn hit_ratio(&self) -> f64 {
        share(self.hits, self.references)
    }
}

/// All of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// What was counted since the store was opened.
    pub counters: Counters,
    /// Its memory.
    pub host: HostGauge,
    /// Its disk.
    pub disk: DiskGauge,
    /// Its device memory.
    pub device: DeviceGauge,
    /// Layouts.
    pub layouts: u64,
    /// Namespaces.
    pub namespaces: u64,
    /// Sessions that are open.
    pub sessions: u64,
    /// Chunks.
    pub chunks: u64,
    /// Cells in memory.
    pub host_cells: u64,
    /// Cells on disk.
    pub disk_cells: u64,
    /// Cells in device memory.
    pub device_cells: u64,
    /// Pins.
    pub pins: u64,
    /// Moves under way.
    pub moves: u64,
    /// Cells of moves under way.
    pub jobs: u64,
    /// Of those, waiting for memory.
    pub memory_waiters: u64,
    /// How much they wait for.
    pub memory_waiter_bytes: u64,
    /// Bytes that leave memory as soon as they are on disk.
    pub leaving_bytes: u64,
    /// Chunks that wait to be written.
    pub writebacks: u64,
    /// Bytes of chunks that wait for their time to be written.
    pub unwritten_bytes: u64,
    /// For how long the oldest of them has waited.
    pub unwritten_age_ns: u64,
    /// Puts that wait for a sync.
    pub syncs: u64,
    /// Copies.
    pub copies: QueueGauge,
    /// Reads of the disk.
    pub reads: QueueGauge,
    /// Copies out of device memory.
    pub replicas: QueueGauge,
    /// Batches under way, by [`WorkerKind`].
    pub batches: [u32; KINDS],
    /// Events that were written.
    pub events: u64,
    /// Who leaves memory.
    pub host_policy: PolicyGauge,
    /// Who leaves the disk; without a name where there is none.
    pub disk_policy: PolicyGauge,
    /// Who leaves device memory; without a name where there is none.
    pub device_policy: PolicyGauge,
    /// Tenants that are told apart.
    pub tenants: u64,
    /// Times that a chunk was to go to disk, and admission let it.
    pub admission_admitted: u64,
    /// Bytes of these.
    pub admission_admitted_bytes: u64,
    /// Times that it did not, by [`REFUSALS`].
    pub admission_refused: [u64; REFUSALS.len()],
    /// How long moves and batches took, by [`TIMED`].
    pub latencies: [Latency; TIMED.len()],
}

impl Report {
    /// Cells that were asked for and were somewhere; 0 of none.
    pub fn hit_ratio(&self) -> f64 {
        let Counters { device_hits, host_hits, disk_hits, misses, .. } = self.counters;
        let hits = device_hits + host_hits + disk_hits;
        share(hits, hits + misses)
    }

    /// Cells that were asked for and were in memory, the device's or the host's; 0 of none.
    pub fn host_hit_ratio(&self) -> f64 {
        let Counters { device_hits, host_hits, disk_hits, misses, .. } = self.counters;
        let hits = device_hits + host_hits;
        share(hits, hits + disk_hits + misses)
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole > 0 { part as f64 / whole as f64 } else { 0.0 }
}

impl StoreState {
    /// What the store counts and has.
    pub fn report(&self) -> Report {
        let host = self.host.stats();
        let (unwritten_bytes, unwritten_age_ns) = self.unwritten();
        let batches = |workers: WorkerKind| self.under_way[workers as usize];
        let (admission_admitted, admission_admitted_bytes) = self.admission.admitted();
        let mut report = Report {
            counters: self.counters,
            host: HostGauge {
                limit_bytes: self.config.host_bytes,
                live_bytes: host.live_bytes,
                cost_bytes: host.cost_bytes,
                pieces: host.live_pieces,
                segments: host.segments,
            },
            disk: self.disk.as_deref().map(DiskGauge::of).unwrap_or_default(),
            layouts: self.tables.iter().filter(|table| table.spaces > 0).count() as u64,
            namespaces: self.spaces.len() as u64,
            sessions: self.sessions.len() as u64,
            pins: self.pins.len() as u64,
            moves: self.moves.len() as u64,
            jobs: self.jobs.len() as u64,
            memory_waiters: self.memory_waiters.len() as u64,
            memory_waiter_bytes: self.memory_waiter_bytes,
            leaving_bytes: self.leaving_bytes,
            writebacks: self.writebacks.len() as u64,
            unwritten_bytes,
            unwritten_age_ns,
            syncs: self.commits.len() as u64,
            copies: QueueGauge::of(&self.copies, &self.speeds.copies, batches(WorkerKind::Copy)),
            replicas: match &self.replicas {
                Some(replicas) => QueueGauge::of(replicas.queue(), &self.speeds.replicas, 0),
                None => QueueGauge::default(),
            },
            reads: QueueGauge::of(&self.reads, &self.speeds.reads, batches(WorkerKind::Read)),
            batches: self.under_way,
            events: self.events.next_number(),
            host_policy: PolicyGauge::of(&self.host_cache),
            disk_policy: self.disk_cache.as_ref().map(PolicyGauge::of).unwrap_or_default(),
            device: self.replicas.as_deref().map(DeviceGauge::of).unwrap_or_default(),
            device_policy: self
                .replicas
                .as_ref()
                .map(|n| PolicyGauge::of(&n.cache))
                .unwrap_or_default(),
            tenants: self.tenants.rows().len() as u64,
            admission_admitted,
            admission_admitted_bytes,
            admission_refused: self.admission.refused(),
            latencies: std::array::from_fn(|at| Latency::of(&self.times()[at])),
            ..Report::default()
        };
        for table in &self.tables {
            let counts = table.chunks.counts();
            report.chunks += counts.chunks;
            report.host_cells += counts.cells[Tier::Host as usize];
            report.disk_cells += counts.cells[Tier::Disk as usize];
            report.device_cells += counts.cells[Tier::Device as usize];
        }
        report
    }

    /// Tenants that are told apart, by number.
    pub fn tenants(&self) -> &[Tenant] {
        self.tenants.rows()
    }

    /// All other tenants together.
    pub fn other_tenants(&self) -> Tenant {
        self.tenants.others()
    }
}
