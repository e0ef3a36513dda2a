//! Statistics of a store: gauges, counters, Prometheus text, per-tenant counts, latency histograms,
//! and accounting of metadata bytes.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::exposition::{Exposition, Kind, Labels};
use crate::base::status::{Error, Status};
use crate::base::sync::Arc;
use crate::format::segment::BLOCK_BYTES;
use crate::meta::chunks::{CELL_BYTES, CHUNK_BYTES};
use crate::policy::metrics::Histogram;
use crate::store::admission::REFUSALS;
use crate::store::job_queues::LANES;
use crate::store::state::device_tier::Replicas;
use crate::store::state::eviction::TierCache;
use crate::store::state::stage::Stage;
use crate::store::state::transfer::{Level, Transfer, TransferKind};
use crate::store::state::work::{KINDS, WorkerKind};
use crate::store::state::{ChunkTable, Counters, StoreState};
use crate::tier::device::DeviceStats;
use crate::tier::disk::{self, DiskTier};

/// Host memory of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostGauge {
    /// Limit of bytes of cells.
    pub limit_bytes: u64,
    /// Bytes of cells.
    pub live_bytes: u64,
    /// Bytes charged: cells, tables and unused parts of segments.
    pub cost_bytes: u64,
    /// Cells.
    pub pieces: u64,
    /// Segments.
    pub segments: u32,
}

/// Device memory of a store; all zero without a device tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceGauge {
    /// Limit of bytes of slabs.
    pub limit_bytes: u64,
    /// Bytes of slabs.
    pub used_bytes: u64,
    /// Bytes of cells.
    pub live_bytes: u64,
    /// Slabs.
    pub slabs: u32,
    /// The device is lost and the tier is closed.
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
    /// There are no files.
    #[default]
    None = 0,
    /// One request at a time, by the calling thread.
    Threads = 1,
    /// Many requests at once, by io_uring.
    Uring = 2,
}

/// Disk of a store; all zero without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskGauge {
    /// Limit in bytes.
    pub budget_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes of live cells.
    pub live_bytes: u64,
    /// Bytes that compaction would free.
    pub dead_bytes: u64,
    /// Segments.
    pub segments: u64,
    /// Bytes written and read, and failures.
    pub stats: disk::Stats,
    /// How files are read and written now.
    pub engine: Engine,
    /// Files bypass the page cache.
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

    /// Write amplification: bytes written for each byte of cells from callers; 0 if nothing was
    /// written.
    pub fn wear(&self) -> f64 {
        let disk::Stats { appended_bytes, compacted_bytes, overhead_bytes, .. } = self.stats;
        share(appended_bytes + compacted_bytes + overhead_bytes, appended_bytes)
    }
}

/// A stage: cells that are queued or in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueGauge {
    /// Cells queued, by urgency.
    pub cells: [u64; LANES],
    /// Bytes queued, by urgency.
    pub bytes: [u64; LANES],
    /// Batches in flight.
    pub batches: u32,
    /// Their bytes.
    pub batch_bytes: u64,
    /// Measured bandwidth.
    pub bytes_per_second: f64,
    /// Measured delay of a batch.
    pub delay_ns: f64,
}

impl QueueGauge {
    fn of(stage: &Stage, batches: u32) -> QueueGauge {
        let waiting: [(u32, u64); LANES] = std::array::from_fn(|lane| stage.queue.waiting(lane));
        QueueGauge {
            cells: waiting.map(|(cells, _)| u64::from(cells)),
            bytes: waiting.map(|(_, bytes)| bytes),
            batches,
            batch_bytes: stage.in_flight_bytes,
            bytes_per_second: stage.bandwidth.bytes_per_second(),
            delay_ns: stage.bandwidth.ns(0, 1),
        }
    }
}

/// A tier's policy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicyGauge {
    /// Its name.
    pub name: &'static str,
    /// Objects in it.
    pub objects: u64,
    /// Accesses.
    pub references: u64,
    /// Accesses to an object that it had.
    pub hits: u64,
    /// Evictions.
    pub evictions: u64,
    /// Calls for victims.
    pub decisions: u64,
    /// Calls that found fewer victims than requested.
    pub shortfalls: u64,
    /// Time of the measured calls for victims.
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

    /// Hits for each access; 0 without any.
    pub fn hit_ratio(&self) -> f64 {
        share(self.hits, self.references)
    }
}

/// All statistics of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Counters since the store was opened.
    pub counters: Counters,
    /// Host memory.
    pub host: HostGauge,
    /// Disk.
    pub disk: DiskGauge,
    /// Device memory.
    pub device: DeviceGauge,
    /// Layouts.
    pub layouts: u64,
    /// Namespaces.
    pub namespaces: u64,
    /// Open sessions.
    pub sessions: u64,
    /// Chunks.
    pub chunks: u64,
    /// Cells in host memory.
    pub host_cells: u64,
    /// Cells on disk.
    pub disk_cells: u64,
    /// Cells in device memory.
    pub device_cells: u64,
    /// Pinned chunks.
    pub pins: u64,
    /// Transfers in flight.
    pub moves: u64,
    /// Cells of transfers in flight.
    pub jobs: u64,
    /// Of those, cells that wait for host memory.
    pub memory_waiters: u64,
    /// Their bytes.
    pub memory_waiter_bytes: u64,
    /// Bytes that leave memory once they are on disk.
    pub leaving_bytes: u64,
    /// Chunks queued for write-back.
    pub writebacks: u64,
    /// Bytes that write-behind has not begun to write.
    pub unwritten_bytes: u64,
    /// Age of the oldest of them.
    pub unwritten_age_ns: u64,
    /// Puts that wait for a sync.
    pub syncs: u64,
    /// Copies.
    pub copies: QueueGauge,
    /// Disk reads.
    pub reads: QueueGauge,
    /// Copies from device memory.
    pub replicas: QueueGauge,
    /// Batches in flight, by [`WorkerKind`].
    pub batches: [u32; KINDS],
    /// Events published.
    pub events: u64,
    /// Policy of the host tier.
    pub host_policy: PolicyGauge,
    /// Policy of the disk tier; its name is empty without one.
    pub disk_policy: PolicyGauge,
    /// Policy of the device tier; its name is empty without one.
    pub device_policy: PolicyGauge,
    /// Tenants that are counted separately.
    pub tenants: u64,
    /// Chunks that admission let go to disk.
    pub admission_admitted: u64,
    /// Their bytes.
    pub admission_admitted_bytes: u64,
    /// Chunks that admission rejected, by [`REFUSALS`].
    pub admission_refused: [u64; REFUSALS.len()],
    /// Times of transfers and batches, by [`TIMED`].
    pub latencies: [Latency; TIMED.len()],
}

impl Report {
    /// Share of requested cells that were resident anywhere; 0 without requests.
    pub fn hit_ratio(&self) -> f64 {
        let Counters { device_hits, host_hits, disk_hits, misses, .. } = self.counters;
        let hits = device_hits + host_hits + disk_hits;
        share(hits, hits + misses)
    }

    /// Share of requested cells that were in host or device memory; 0 without requests.
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
    /// All statistics now.
    pub fn report(&self) -> Report {
        let host = self.host.stats();
        let (unwritten_bytes, unwritten_age_ns) = self.unwritten();
        let batches = |workers: WorkerKind| self.stages.in_flight[workers as usize];
        let (admission_admitted, admission_admitted_bytes) = self.eviction.admission.admitted();
        let mut report = Report {
            counters: self.counters,
            host: HostGauge {
                limit_bytes: self.config.host_bytes,
                live_bytes: host.live_bytes,
                cost_bytes: host.cost_bytes,
                pieces: host.live_pieces,
                segments: host.slabs,
            },
            disk: self.disk.as_deref().map(DiskGauge::of).unwrap_or_default(),
            layouts: self.tables.iter().filter(|table| table.spaces > 0).count() as u64,
            namespaces: self.namespaces.len() as u64,
            sessions: self.sessions.len() as u64,
            pins: self.eviction.pins.len() as u64,
            moves: self.transfers.table.len() as u64,
            jobs: self.transfers.jobs.len() as u64,
            memory_waiters: self.transfers.memory_waiters.len() as u64,
            memory_waiter_bytes: self.transfers.memory_waiter_bytes,
            leaving_bytes: self.writeback.demoting_bytes,
            writebacks: self.writeback.queue.len() as u64,
            unwritten_bytes,
            unwritten_age_ns,
            syncs: self.writeback.sync_waiters.len() as u64,
            copies: QueueGauge::of(&self.stages.copy, batches(WorkerKind::Copy)),
            replicas: match &self.replicas {
                Some(replicas) => QueueGauge::of(&replicas.stage, 0),
                None => QueueGauge::default(),
            },
            reads: QueueGauge::of(&self.stages.read, batches(WorkerKind::Read)),
            batches: self.stages.in_flight,
            events: self.events.next_number(),
            host_policy: PolicyGauge::of(&self.eviction.host),
            disk_policy: self.eviction.disk.as_ref().map(PolicyGauge::of).unwrap_or_default(),
            device: self.replicas.as_deref().map(DeviceGauge::of).unwrap_or_default(),
            device_policy: self
                .replicas
                .as_ref()
                .map(|n| PolicyGauge::of(&n.cache))
                .unwrap_or_default(),
            tenants: self.stats.tenants.rows().len() as u64,
            admission_admitted,
            admission_admitted_bytes,
            admission_refused: self.eviction.admission.refused(),
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

    /// Tenants that are counted separately, by number.
    pub fn tenants(&self) -> &[Tenant] {
        self.stats.tenants.rows()
    }

    /// All other tenants together.
    pub fn other_tenants(&self) -> Tenant {
        self.stats.tenants.others()
    }
}

// ---------- metrics
//
// Gauges and counters as Prometheus text.

/// Names of urgencies.
const LANE_NAMES: [&str; crate::store::job_queues::LANES] = ["demand", "prefetch", "demotion"];

/// Names of the levels of puts, and of the tiers of gets.
const LEVELS: [&str; PUTS] = ["ram", "disk", "durable"];
const TIERS: [&str; GETS] = ["host", "disk"];

/// Bounds of buckets, as powers of two of a nanosecond: 1 us to 34 s.
const OCTAVES: std::ops::RangeInclusive<usize> = 10..=35;

/// Name of a metric family, its value, and its help text.
type Family<T> = (&'static str, fn(&T) -> u64, &'static str);

impl StoreState {
    /// All metrics as Prometheus text.
    pub fn metrics_text(&self) -> String {
        let mut out = Exposition::default();
        let report = self.report();
        counters(&mut out, &report.counters);
        admission(&mut out, &report);
        losses(&mut out, &report.counters);
        tiers(&mut out, &report);
        self.engine(&mut out);
        device(&mut out, &report);
        wear(&mut out, &report);
        numbers(&mut out, &report);
        let mut ways = vec![("copies", &report.copies), ("reads", &report.reads)];
        ways.extend(self.replicas.as_ref().map(|_| ("device", &report.replicas)));
        queues(&mut out, &ways);
        batches(&mut out, &report);
        times(&mut out, self.times());
        policies(&mut out, &report);
        self.decisions(&mut out);
        tenants(&mut out, self.tenants(), self.other_tenants());
        out.into_text()
    }

    /// The I/O engine of the disk, and why a better one is not used.
    fn engine(&self, out: &mut Exposition) {
        let Some(disk) = &self.disk else { return };
        let help = "How files are read and written, and why not in a better way.";
        out.family("kvtier_disk_engine_info", Kind::Gauge, help);
        let files = disk.files();
        let reason = files.fallback().unwrap_or_default();
        out.sample(&[("engine", files.engine()), ("reason", reason)], 1.0);
    }

    fn decisions(&self, out: &mut Exposition) {
        let help = "Time in which a policy said who leaves, of one decision in 16.";
        out.family("kvtier_policy_decision_seconds", Kind::Histogram, help);
        let replicas = self.replicas.as_ref().map(|replicas| &replicas.cache);
        let caches = [Some(&self.eviction.host), self.eviction.disk.as_ref(), replicas];
        for (tier, cache) in ["host", "disk", "device"].into_iter().zip(caches) {
            let Some(cache) = cache else { continue };
            let labels = [("tier", tier), ("policy", cache.evictor.name())];
            histogram(out, &labels, &cache.evictor.metrics.decision);
        }
    }
}

fn family(out: &mut Exposition, name: &str, kind: Kind, help: &str, samples: &[(Labels, f64)]) {
    out.family(name, kind, help);
    for (labels, value) in samples {
        out.sample(labels, *value);
    }
}

fn counters(out: &mut Exposition, all: &Counters) {
    let [puts, gets, prefetches] = all.moves.map(|n| n as f64);
    let samples: [(Labels, f64); 3] = [
        (&[("deed", "put")], puts),
        (&[("deed", "get")], gets),
        (&[("deed", "prefetch")], prefetches),
    ];
    family(out, "kvtier_moves_total", Kind::Counter, "Moves begun.", &samples);
    let samples: [(Labels, f64); 4] = [
        (&[("from", "device")], all.device_hits as f64),
        (&[("from", "host")], all.host_hits as f64),
        (&[("from", "disk")], all.disk_hits as f64),
        (&[("from", "nowhere")], all.misses as f64),
    ];
    let help = "Cells that were asked for, by where they were.";
    family(out, "kvtier_cells_read_total", Kind::Counter, help, &samples);
    let plain = [
        ("cells_stored", all.stored, "Cells stored from outside."),
        ("cells_known", all.known, "Cells that were there when they were to be stored."),
        ("cells_corrupt", all.corrupt, "Cells whose bytes were wrong, and that became misses."),
        ("copies_damaged", all.damaged, "Copies that came damaged over a device's bus."),
        ("cells_written", all.written, "Cells written to disk."),
        ("written_bytes", all.written_bytes, "Bytes of cells written to disk."),
        ("coded_cells", all.coded, "Of those, cells that were coded."),
        ("coded_raw_bytes", all.coded_raw_bytes, "Bytes of these before they were coded."),
        ("coded_bytes", all.coded_bytes, "Bytes of these on disk."),
        ("lossy_numbers", all.lost.count, "Numbers written by a codec that loses something."),
        ("loaded_bytes", all.loaded_bytes, "Bytes of cells loaded from disk."),
        ("chunks_demoted", all.demoted, "Chunks that left memory and are on disk."),
        ("chunks_dropped", all.dropped, "Chunks that left memory and are gone."),
        ("chunks_evicted", all.disk_evicted, "Chunks that left the disk as a whole."),
        ("chunks_parted", all.disk_parted, "Times that a part of a chunk left the disk."),
        ("chunks_refused", all.refused, "Chunks that the disk had no room for."),
        ("cells_without_room", all.no_room, "Cells of moves that found no memory."),
        ("failed_writes", all.failed_writes, "Writes that failed."),
        ("failed_reads", all.failed_reads, "Reads that failed."),
    ];
    for (name, value, help) in plain {
        let name = format!("kvtier_{name}_total");
        family(out, &name, Kind::Counter, help, &[(&[], value as f64)]);
    }
}

/// Outcomes of admission.
fn admission(out: &mut Exposition, all: &Report) {
    let (count, bytes) = (all.admission_admitted, all.admission_admitted_bytes);
    let plain = [
        ("admitted", count, "Times that admission let a chunk go to disk."),
        ("admitted_bytes", bytes, "Bytes of these."),
    ];
    for (name, value, help) in plain {
        let name = format!("kvtier_admission_{name}_total");
        family(out, &name, Kind::Counter, help, &[(&[], value as f64)]);
    }
    let help = "Times that admission kept a chunk from the disk, by why.";
    out.family("kvtier_admission_refused_total", Kind::Counter, help);
    for (reason, count) in REFUSALS.into_iter().zip(all.admission_refused) {
        out.sample(&[("reason", reason)], count as f64);
    }
}

/// Loss of precision by lossy codecs.
fn losses(out: &mut Exposition, all: &Counters) {
    let values = [
        ("max", all.lost.most, "Largest error of a number that a lossy codec has written."),
        ("mean", all.lost.mean(), "Mean error of the numbers that lossy codecs have written."),
        (
            "relative",
            all.lost.relative(),
            "Root of the mean square of these errors, in parts of that of the numbers.",
        ),
    ];
    for (name, value, help) in values {
        family(out, &format!("kvtier_lossy_error_{name}"), Kind::Gauge, help, &[(&[], value)]);
    }
}

fn tiers(out: &mut Exposition, all: &Report) {
    let (host, disk) = (&all.host, &all.disk);
    let families = [
        ("limit_bytes", [host.limit_bytes, disk.budget_bytes], "Most bytes that may be used."),
        ("used_bytes", [host.cost_bytes, disk.used_bytes], "Bytes that are used."),
        ("live_bytes", [host.live_bytes, disk.live_bytes], "Bytes of cells."),
        ("cells", [all.host_cells, all.disk_cells], "Cells."),
        ("segments", [u64::from(host.segments), disk.segments], "Segments."),
    ];
    for (name, values, help) in families {
        let [host, disk] = values.map(|n| n as f64);
        let samples: [(Labels, f64); 2] =
            [(&[("tier", "host")], host), (&[("tier", "disk")], disk)];
        family(out, &format!("kvtier_{name}"), Kind::Gauge, help, &samples);
    }
}

/// The device tier, if there is one.
fn device(out: &mut Exposition, all: &Report) {
    if all.device_policy.name.is_empty() {
        return;
    }
    let (device, counters) = (&all.device, &all.counters);
    let gauges = [
        ("limit_bytes", device.limit_bytes, "Most bytes of device memory."),
        ("used_bytes", device.used_bytes, "Bytes of device memory that are taken."),
        ("live_bytes", device.live_bytes, "Bytes of cells there."),
        ("cells", all.device_cells, "Cells there."),
        ("is_lost", u64::from(device.is_lost), "The device has failed, and the tier is closed."),
    ];
    for (name, value, help) in gauges {
        family(out, &format!("kvtier_device_{name}"), Kind::Gauge, help, &[(&[], value as f64)]);
    }
    let totals = [
        ("hits", counters.device_hits, "Cells that were asked for and copied from there."),
        ("promoted", counters.promoted, "Cells that have come there."),
        ("evicted", counters.device_evicted, "Chunks that the policy has sent away from there."),
        ("lost", counters.device_lost, "Cells that were forgotten there with the device."),
    ];
    for (name, value, help) in totals {
        let name = format!("kvtier_device_{name}_total");
        family(out, &name, Kind::Counter, help, &[(&[], value as f64)]);
    }
}

fn wear(out: &mut Exposition, all: &Report) {
    let stats = &all.disk.stats;
    let samples: [(Labels, f64); 3] = [
        (&[("for", "callers")], stats.appended_bytes as f64),
        (&[("for", "cleaning")], stats.compacted_bytes as f64),
        (&[("for", "headers")], stats.overhead_bytes as f64),
    ];
    let help = "Bytes written to the disk, by what for.";
    family(out, "kvtier_disk_written_bytes_total", Kind::Counter, help, &samples);
    let plain = [
        ("syncs", stats.syncs, "Syncs of segments."),
        ("failed_syncs", stats.failed_syncs, "Syncs that failed."),
        ("cleanings", stats.compactions, "Segments that were cleaned."),
    ];
    for (name, value, help) in plain {
        let name = format!("kvtier_disk_{name}_total");
        family(out, &name, Kind::Counter, help, &[(&[], value as f64)]);
    }
    let help = "Memory in which cells are coded.";
    let scratch = stats.scratch_bytes as f64;
    family(out, "kvtier_scratch_bytes", Kind::Gauge, help, &[(&[], scratch)]);
    let help = "Bytes that cleaning the disk would free.";
    let dead = all.disk.dead_bytes as f64;
    family(out, "kvtier_disk_dead_bytes", Kind::Gauge, help, &[(&[], dead)]);
}

fn numbers(out: &mut Exposition, all: &Report) {
    let plain = [
        ("namespaces", all.namespaces, "Namespaces."),
        ("sessions", all.sessions, "Sessions that are open."),
        ("chunks", all.chunks, "Chunks, of all layouts."),
        ("pins", all.pins, "Chunks that are pinned."),
        ("moves", all.moves, "Moves under way."),
        ("jobs", all.jobs, "Cells of moves under way."),
        ("hungry", all.memory_waiters, "Cells that wait for memory."),
        ("hungry_bytes", all.memory_waiter_bytes, "Memory that is waited for."),
        ("leaving_bytes", all.leaving_bytes, "Bytes that leave memory once they are on disk."),
        ("downs", all.writebacks, "Chunks that wait to be written."),
        (
            "unwritten_bytes",
            all.unwritten_bytes,
            "Bytes of chunks that write-behind has not begun to write.",
        ),
        (
            "unwritten_age_ns",
            all.unwritten_age_ns,
            "For how long the oldest of those chunks has waited, in nanoseconds.",
        ),
        ("sync_waits", all.syncs, "Puts that wait for a sync."),
    ];
    for (name, value, help) in plain {
        family(out, &format!("kvtier_{name}"), Kind::Gauge, help, &[(&[], value as f64)]);
    }
    let events = all.events as f64;
    family(out, "kvtier_events_total", Kind::Counter, "Events written.", &[(&[], events)]);
}

fn queues(out: &mut Exposition, queues: &[(&str, &QueueGauge)]) {
    out.family("kvtier_queue_cells", Kind::Gauge, "Cells that wait, by way and urgency.");
    for &(way, gauge) in queues {
        for (lane, cells) in LANE_NAMES.into_iter().zip(gauge.cells) {
            out.sample(&[("way", way), ("lane", lane)], cells as f64);
        }
    }
    out.family("kvtier_queue_bytes", Kind::Gauge, "Bytes that wait, by way and urgency.");
    for &(way, gauge) in queues {
        for (lane, bytes) in LANE_NAMES.into_iter().zip(gauge.bytes) {
            out.sample(&[("way", way), ("lane", lane)], bytes as f64);
        }
    }
    out.family("kvtier_batch_bytes", Kind::Gauge, "Bytes of batches under way.");
    for &(way, gauge) in queues {
        out.sample(&[("way", way)], gauge.batch_bytes as f64);
    }
    out.family("kvtier_speed_bytes_per_second", Kind::Gauge, "What is known of a way's rate.");
    for &(way, gauge) in queues {
        out.sample(&[("way", way)], gauge.bytes_per_second);
    }
    out.family("kvtier_delay_seconds", Kind::Gauge, "What is known of a batch's delay.");
    for &(way, gauge) in queues {
        out.sample(&[("way", way)], gauge.delay_ns / 1e9);
    }
}

fn batches(out: &mut Exposition, all: &Report) {
    out.family("kvtier_batches", Kind::Gauge, "Batches under way.");
    for workers in WorkerKind::ALL {
        out.sample(&[("kind", name_of(workers))], f64::from(all.batches[workers as usize]));
    }
}

fn name_of(workers: WorkerKind) -> &'static str {
    match workers {
        WorkerKind::Copy => "copy",
        WorkerKind::Read => "read",
        WorkerKind::Write => "write",
        WorkerKind::Sync => "sync",
        WorkerKind::Upkeep => "upkeep",
        WorkerKind::Fetch => "fetch",
        WorkerKind::Send => "send",
        WorkerKind::Ask => "ask",
    }
}

/// Times of transfers and batches.
fn times(out: &mut Exposition, all: &[Histogram; TIMED.len()]) {
    let (gets, rest) = all.split_at(GETS);
    let (puts, batches) = rest.split_at(PUTS);
    let help = "Time of gets that brought all, by the farthest tier that was needed.";
    out.family("kvtier_get_seconds", Kind::Histogram, help);
    for (tier, one) in TIERS.into_iter().zip(gets) {
        histogram(out, &[("tier", tier)], one);
    }
    let help = "Time of puts that stored all, by what they waited for.";
    out.family("kvtier_put_seconds", Kind::Histogram, help);
    for (level, one) in LEVELS.into_iter().zip(puts) {
        histogram(out, &[("level", level)], one);
    }
    let help = "Time of batches, by kind.";
    out.family("kvtier_batch_seconds", Kind::Histogram, help);
    for (workers, one) in WorkerKind::ALL.into_iter().zip(batches) {
        histogram(out, &[("kind", name_of(workers))], one);
    }
}

fn histogram(out: &mut Exposition, labels: Labels, times: &Histogram) {
    let seconds = |octave: usize| (1u64 << octave) as f64 / 1e9;
    let buckets = OCTAVES.map(|octave| (seconds(octave), times.below(octave)));
    let buckets: Vec<(f64, u64)> = buckets.collect();
    out.histogram(labels, &buckets, times.total(), times.sum_ns() as f64 / 1e9);
}

fn policies(out: &mut Exposition, all: &Report) {
    let tiers =
        [("host", &all.host_policy), ("disk", &all.disk_policy), ("device", &all.device_policy)];
    let there = || tiers.iter().filter(|(_, policy)| !policy.name.is_empty());
    out.family("kvtier_policy_objects", Kind::Gauge, "Chunks that a policy knows.");
    for (tier, policy) in there() {
        out.sample(&[("tier", tier), ("policy", policy.name)], policy.objects as f64);
    }
    let families: [Family<PolicyGauge>; 5] = [
        ("references", |policy| policy.references, "Chunks that a policy was asked for."),
        ("hits", |policy| policy.hits, "Of those, chunks that it knew."),
        ("evictions", |policy| policy.evictions, "Chunks that a policy has sent away."),
        ("decisions", |policy| policy.decisions, "Times that a policy was asked whom."),
        ("shortfalls", |policy| policy.shortfalls, "Times that it found fewer than wanted."),
    ];
    for (name, value, help) in families {
        out.family(&format!("kvtier_policy_{name}_total"), Kind::Counter, help);
        for (tier, policy) in there() {
            out.sample(&[("tier", tier), ("policy", policy.name)], value(policy) as f64);
        }
    }
}

fn tenants(out: &mut Exposition, rows: &[Tenant], others: Tenant) {
    let names: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let all = || names.iter().map(String::as_str).zip(rows).chain([("others", &others)]);
    let families: [Family<Tenant>; 4] = [
        ("put_bytes", |row| row.put_bytes, "Bytes that a tenant has stored."),
        ("got_bytes", |row| row.got_bytes, "Bytes that a tenant was given back."),
        ("hits", |row| row.hits, "Cells that a tenant has asked for and got."),
        ("misses", |row| row.misses, "Cells that a tenant has asked for and were nowhere."),
    ];
    for (name, value, help) in families {
        out.family(&format!("kvtier_tenant_{name}_total"), Kind::Counter, help);
        for (tenant, row) in all() {
            out.sample(&[("tenant", tenant)], value(row) as f64);
        }
    }
}

// ---------- tenants
//
// Bytes moved for each tenant. A limited number of tenants is counted separately, the rest together.

/// Most tenants that are counted separately.
pub const MAX_TENANTS: usize = 1024;

/// Traffic of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tenant {
    /// Its number; without meaning for the others together.
    pub id: u32,
    /// Bytes stored.
    pub put_bytes: u64,
    /// Bytes loaded by gets.
    pub got_bytes: u64,
    /// Requested cells that were resident.
    pub hits: u64,
    /// Requested cells that were not.
    pub misses: u64,
}

/// Traffic of all tenants.
#[derive(Default)]
pub(super) struct Tenants {
    /// By number.
    rows: Vec<Tenant>,
    others: Tenant,
}

impl Tenants {
    /// Counts a cell of a tenant's transfer.
    pub(super) fn count(&mut self, id: u32, kind: TransferKind, bytes: u64, error: Option<&Error>) {
        let status = error.map_or(Status::Ok, Error::status);
        if kind == TransferKind::Prefetch || !matches!(status, Status::Ok | Status::NotFound) {
            return;
        }
        let row = self.row(id);
        match kind {
            TransferKind::Put => row.put_bytes += bytes,
            _ if status == Status::Ok => {
                row.hits += 1;
                row.got_bytes += bytes;
            }
            _ => row.misses += 1,
        }
    }

    fn row(&mut self, id: u32) -> &mut Tenant {
        match self.rows.binary_search_by_key(&id, |row| row.id) {
            Ok(at) => &mut self.rows[at],
            Err(at) if self.rows.len() < MAX_TENANTS && self.rows.try_reserve(1).is_ok() => {
                self.rows.insert(at, Tenant { id, ..Tenant::default() });
                &mut self.rows[at]
            }
            Err(_) => &mut self.others,
        }
    }

    /// Tenants that are counted separately, by number.
    pub(super) fn rows(&self) -> &[Tenant] {
        &self.rows
    }

    /// All others together.
    pub(super) fn others(&self) -> Tenant {
        self.others
    }
}

// ---------- latency
//
// Latency histograms of transfers and batches. A transfer counts once, however many cells it has.

/// What is timed: name in views, and description. First two gets, then three puts by
/// [`Level`](crate::store::state::Level), then batches by
/// [`WorkerKind`](crate::store::state::work::WorkerKind).
pub const TIMED: [(&str, &str); GETS + PUTS + KINDS] = [
    ("get_host", "Gets of which all was in memory."),
    ("get_disk", "Gets of which something had to be read from disk."),
    ("put_ram", "Puts until they are in memory."),
    ("put_disk", "Puts until they are on disk."),
    ("put_durable", "Puts until they are durable."),
    ("copy_batch", "Batches of copies between tensors and memory."),
    ("read_batch", "Batches of reads of the disk."),
    ("write_batch", "Batches of writes to it."),
    ("sync_batch", "Syncs."),
    ("upkeep_batch", "Cleanings, sweeps, checkpoints and notes."),
    ("fetch_batch", "Batches of objects that come from the remote."),
    ("send_batch", "Batches of objects that go there."),
    ("ask_batch", "Questions what it has."),
];

/// Gets: from memory, and from disk.
pub const GETS: usize = 2;
/// Puts: in memory, on disk, durable.
pub const PUTS: usize = 3;

/// Summary of a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// Number of values.
    pub count: u64,
    /// Mean.
    pub mean_ns: u64,
    /// Median, at most a quarter too high.
    pub p50_ns: u64,
    /// 99th percentile, at most a quarter too high.
    pub p99_ns: u64,
    /// Maximum.
    pub max_ns: u64,
}

impl Latency {
    /// Summarises a histogram.
    pub fn of(times: &Histogram) -> Latency {
        Latency {
            count: times.total(),
            mean_ns: times.mean_ns(),
            p50_ns: times.quantile_ns(0.5),
            p99_ns: times.quantile_ns(0.99),
            max_ns: times.max_ns(),
        }
    }
}

/// What is measured beside the counters.
pub(super) struct Stats {
    pub(super) metadata: MetadataAccount,
    pub(super) latencies: Latencies,
    pub(super) tenants: Tenants,
}

impl Stats {
    pub(super) fn new(account: Option<Arc<Account>>) -> Stats {
        Stats {
            metadata: MetadataAccount::new(account),
            latencies: Latencies::default(),
            tenants: Tenants::default(),
        }
    }

    pub(super) fn reserve_for_tables(&mut self, bytes: u64) -> bool {
        let Some(account) = &self.metadata.account else { return true };
        let is_paid = account.take(Tier::Host, bytes).is_ok();
        if is_paid {
            self.metadata.paid_bytes += bytes;
        }
        is_paid
    }
}

/// A histogram for each timed operation.
pub(super) struct Latencies([Histogram; TIMED.len()]);

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies(std::array::from_fn(|_| Histogram::default()))
    }
}

impl Latencies {
    /// Adds the time of a batch; 0 = not known.
    pub(super) fn batch(&mut self, workers: usize, elapsed_ns: u64) {
        if elapsed_ns > 0 {
            self.0[GETS + PUTS + workers].add(elapsed_ns);
        }
    }

    /// Adds the time of a transfer. One that failed is ignored, since it may have ended early.
    pub(super) fn moved(&mut self, one: &Transfer, now_ns: u64) {
        // A transfer behind a device event took as long as the event.
        if !one.is_sound() || one.spec.slots.is_empty() || one.spec.after.is_some() {
            return;
        }
        let at = match one.spec.kind {
            TransferKind::Get => usize::from(one.was_below),
            // Those puts are part of the remote's own times.
            TransferKind::Put if one.spec.level == Level::Remote => return,
            TransferKind::Put => GETS + one.spec.level as usize,
            TransferKind::Prefetch => return,
        };
        self.0[at].add(now_ns.saturating_sub(one.began_ns));
    }
}

impl StoreState {
    /// Histograms in the order of [`TIMED`].
    pub fn times(&self) -> &[Histogram; TIMED.len()] {
        &self.stats.latencies.0
    }
}

// ---------- metadata account
//
// Accounting of table bytes to the account that pays for cells. Tables grow with the number of chunks
// and never shrink. They are charged in steps, ahead of their growth; when the account is exhausted,
// cells are evicted.

const STEP_BYTES: u64 = 1 << 20;
/// Bytes of a chunk beside its row and cells: indexes, flags, and policy objects.
pub const BESIDE_BYTES: u64 = 512;

/// Metadata bytes charged to the store's account.
pub(super) struct MetadataAccount {
    account: Option<Arc<Account>>,
    paid_bytes: u64,
    /// Bytes that could not be charged and for which cells are evicted, with the returned bytes
    /// when that was last tried.
    missing: Option<(u64, u64)>,
    /// Rows that may be added before the tables are measured again.
    ahead: usize,
}

impl MetadataAccount {
    pub(super) fn new(account: Option<Arc<Account>>) -> MetadataAccount {
        MetadataAccount { account, paid_bytes: 0, missing: None, ahead: 0 }
    }
}

impl Drop for MetadataAccount {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.give_back(Tier::Host, self.paid_bytes);
        }
    }
}

impl StoreState {
    /// Bytes of all tables: chunks, cells, policies, and those of the remote.
    pub fn table_bytes(&self) -> u64 {
        let tables = self.tables.iter().map(ChunkTable::used_bytes);
        let replicas = self.replicas.as_ref().map(|replicas| &replicas.cache);
        let caches = [Some(&self.eviction.host), self.eviction.disk.as_ref(), replicas];
        let caches = caches.into_iter().flatten().map(TierCache::used_bytes);
        let remote =
            self.remote.as_ref().map(|remote| remote.known.bytes() + remote.config.beside_bytes);
        tables.sum::<u64>() + caches.sum::<u64>() + remote.unwrap_or(0)
    }

    /// Charges rows for so many chunks that will be added.
    pub(super) fn charge_rows(&mut self, chunks: usize) {
        if self.stats.metadata.account.is_none() {
            return;
        }
        if chunks <= self.stats.metadata.ahead {
            self.stats.metadata.ahead -= chunks;
            return;
        }
        self.stats.metadata.ahead = 0;
        let layers = self.tables.iter().map(|table| table.layout.layers()).max().unwrap_or(0);
        let piece = if self.replicas.is_some() { size_of::<u32>() } else { 0 };
        let each = (CHUNK_BYTES + layers * (CELL_BYTES + piece)) as u64 + BESIDE_BYTES;
        let needed = self.table_bytes() + chunks as u64 * each;
        let asked = self.stats.metadata.missing.map_or(0, |(bytes, _)| bytes);
        let missing = needed.saturating_sub(self.stats.metadata.paid_bytes);
        if missing > asked {
            let bytes = missing.next_multiple_of(STEP_BYTES);
            if !self.charge_tables(bytes) {
                return self.request_reclaim(bytes - asked);
            }
        }
        self.stats.metadata.ahead =
            (self.stats.metadata.paid_bytes.saturating_sub(needed) / each) as usize;
    }

    /// Charges missing bytes with memory that was freed, before waiters for memory get it.
    pub(super) fn charge_grown_tables(&mut self) {
        let Some((missing, since_bytes)) = self.stats.metadata.missing else { return };
        let now_bytes = self.host.returned_bytes();
        let part = missing.min(now_bytes - since_bytes);
        if part == 0 {
            return;
        }
        if self.stats.reserve_for_tables(part) {
            let left = missing - part;
            self.stats.metadata.missing = (left > 0).then_some((left, now_bytes));
        } else {
            // Another owner of the budget was faster.
            self.stats.metadata.missing = Some((missing, now_bytes));
            self.request_reclaim(part);
        }
    }

    /// Bytes of tables that are charged.
    pub fn paid_table_bytes(&self) -> u64 {
        self.stats.metadata.paid_bytes
    }

    fn charge_tables(&mut self, bytes: u64) -> bool {
        let since_bytes = self.host.returned_bytes();
        let is_paid = self.stats.reserve_for_tables(bytes)
            || self.host.trim() > 0 && self.stats.reserve_for_tables(bytes);
        // Trimming freed less than was missing; it pays for a part.
        self.stats.metadata.missing = (!is_paid).then_some((bytes, since_bytes));
        is_paid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_many_tenants_is_counted_and_the_rest_together() {
        let mut tenants = Tenants::default();
        let most = MAX_TENANTS as u32;
        let miss: Error = Status::NotFound.into();
        let failed: Error = Status::Io.into();
        for round in 0..2 {
            for id in (0..most + 3).rev() {
                tenants.count(id, TransferKind::Put, u64::from(id), None);
                tenants.count(id, TransferKind::Get, 10, None);
                tenants.count(id, TransferKind::Get, 0, Some(&miss));
                tenants.count(id, TransferKind::Get, 0, Some(&failed));
                tenants.count(id, TransferKind::Prefetch, 5, None);
            }
            let rows = tenants.rows();
            assert_eq!(rows.len(), MAX_TENANTS);
            assert!(rows.is_sorted_by(|a, b| a.id < b.id));
            let (n, put_bytes) = (round + 1, u64::from(rows[7].id) * (round + 1));
            let want = Tenant { id: 10, put_bytes, got_bytes: 10 * n, hits: n, misses: n };
            assert_eq!(rows[7], want, "the first three came last");
            let rest =
                Tenant { id: 0, put_bytes: 3 * n, got_bytes: 30 * n, hits: 3 * n, misses: 3 * n };
            assert_eq!(tenants.others(), rest);
        }
    }
}
