//! Statistics of a store: gauges, counters, Prometheus text, per-tenant counts, latency histograms,
//! and accounting of metadata bytes.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::exposition::{Exposition, Kind, Labels};
use crate::base::status::{Error, Status};
use crate::base::sync::Arc;
use crate::format::codec::int8::Quality;
use crate::format::segment::BLOCK_BYTES;
use crate::meta::chunks::{CELL_BYTES, CHUNK_BYTES};
use crate::policy::metrics::Histogram;
use crate::store::counters::{RemoteStats, StoreStats, share};
use crate::store::job_queues::LANES;
use crate::store::state::batches::Stage;
use crate::store::state::batches::{KINDS, WorkerKind};
use crate::store::state::tier_cache::TierCache;
use crate::store::state::transfer::{Level, Transfer, TransferKind};
use crate::store::state::{ChunkTable, StoreState};
use crate::tier::device::DeviceStats;
use crate::tier::disk::DiskTier;

/// A stage: cells that are queued or in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueGauge {
    /// Cells queued, by urgency.
    pub cells: [u64; LANES],
    /// Bytes queued, by urgency.
    pub bytes: [u64; LANES],
    /// Batches in flight.
    pub batches: u32,
    /// Bytes of the batches in flight.
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
    /// Counters and gauges.
    pub stats: StoreStats,
    /// Copies.
    pub copies: QueueGauge,
    /// Disk reads.
    pub reads: QueueGauge,
    /// Copies from device memory.
    pub replicas: QueueGauge,
    /// Batches in flight, by [`WorkerKind`].
    pub batches: [u32; KINDS],
    /// Policy of the host tier.
    pub host_policy: PolicyGauge,
    /// Policy of the disk tier; its name is empty without one.
    pub disk_policy: PolicyGauge,
    /// Policy of the device tier; its name is empty without one.
    pub device_policy: PolicyGauge,
    /// Times of transfers and batches, by [`TIMED`].
    pub latencies: [Latency; TIMED.len()],
}

/// How files are read and written; 0 = there are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// One request at a time, by the calling thread.
    Threads = 1,
    /// Many requests at once, by io_uring.
    Uring = 2,
}

fn disk_stats(stats: &mut StoreStats, disk: &DiskTier) {
    let counted = disk.stats();
    stats.disk_limit_bytes = counted.budget_bytes;
    stats.disk_used_bytes = counted.used_bytes;
    stats.disk_peak_bytes = counted.most_used_bytes;
    stats.disk_scratch_bytes = counted.scratch_bytes;
    stats.disk_appended_bytes = counted.appended_bytes;
    stats.disk_compacted_bytes = counted.compacted_bytes;
    stats.disk_overhead_bytes = counted.overhead_bytes;
    stats.disk_read_bytes = counted.read_bytes;
    stats.disk_syncs = counted.syncs;
    stats.disk_failed_syncs = counted.failed_syncs;
    stats.disk_compactions = counted.compactions;
    stats.disk_checkpoints = counted.checkpoints;
    stats.disk_rejected_appends = counted.refused;
    for segment in disk.segments() {
        stats.disk_segments += 1;
        stats.disk_live_bytes += u64::from(segment.live_blocks) * BLOCK_BYTES as u64;
        stats.disk_dead_bytes += u64::from(segment.dead_blocks) * BLOCK_BYTES as u64;
    }
    let engine = match disk.files().engine().starts_with("io_uring") {
        true => Engine::Uring,
        false => Engine::Threads,
    };
    stats.disk_engine = engine as u32;
    stats.disk_direct = u32::from(disk.files().align_bytes() > 1);
}

impl StoreState {
    /// All statistics now.
    pub fn report(&self) -> Report {
        let batches = |workers: WorkerKind| self.stages.in_flight[workers as usize];
        let policy = |cache: Option<&TierCache>| cache.map(PolicyGauge::of).unwrap_or_default();
        let replicas = self.replicas.as_deref();
        Report {
            stats: self.stats_now(),
            copies: QueueGauge::of(&self.stages.copy, batches(WorkerKind::Copy)),
            reads: QueueGauge::of(&self.stages.read, batches(WorkerKind::Read)),
            replicas: replicas.map(|all| QueueGauge::of(&all.stage, 0)).unwrap_or_default(),
            batches: self.stages.in_flight,
            host_policy: policy(Some(&self.eviction.host)),
            disk_policy: policy(self.eviction.disk.as_ref()),
            device_policy: policy(replicas.map(|all| &all.cache)),
            latencies: std::array::from_fn(|at| Latency::of(&self.times()[at])),
        }
    }

    /// Counters and gauges now.
    pub fn stats_now(&self) -> StoreStats {
        let host = self.host.stats();
        let (unwritten_bytes, unwritten_age_ns) = self.unwritten();
        let lossy = &self.stats.lossy;
        let mut stats = StoreStats {
            lossy_numbers: lossy.count,
            lossy_error_max: lossy.most,
            lossy_error_mean: lossy.mean(),
            lossy_error_relative: lossy.relative(),
            namespaces: self.namespaces.len() as u64,
            layouts: self.tables.iter().filter(|table| table.namespaces > 0).count() as u64,
            sessions: self.sessions.len() as u64,
            tenants: self.stats.tenants.rows().len() as u64,
            pins: self.retention.pins() as u64,
            pinned_bytes: self.retention.pinned_bytes(),
            transfers: self.transfers.table.len() as u64,
            transfer_cells: self.transfers.jobs.iter().map(|(_, job)| u64::from(job.cells())).sum(),
            memory_waiters: self.transfers.memory_waiters.len() as u64,
            memory_waiter_bytes: self.transfers.memory_waiter_bytes,
            demoting_bytes: self.writeback.demoting_bytes,
            writeback_chunks: self.writeback.queue.len() as u64,
            unwritten_bytes,
            unwritten_age_ns,
            sync_waiters: self.writeback.sync_waiters.len() as u64,
            events: self.events.next_number(),
            host_limit_bytes: self.config.host_bytes,
            host_used_bytes: host.live_bytes,
            host_cost_bytes: host.cost_bytes,
            host_slabs: host.slabs.into(),
            ..self.counters
        };
        let admission = &self.eviction.admission;
        (stats.admitted_chunks, stats.admitted_bytes) = admission.admitted();
        let [never, hits, priority, size, wear] = admission.refused();
        (stats.rejected_never, stats.rejected_hits) = (never, hits);
        (stats.rejected_priority, stats.rejected_size) = (priority, size);
        stats.rejected_wear = wear;
        for table in &self.tables {
            let counts = table.chunks.counts();
            stats.chunks += counts.chunks;
            stats.host_cells += counts.cells[Tier::Host as usize];
            stats.disk_cells += counts.cells[Tier::Disk as usize];
            stats.device_cells += counts.cells[Tier::Device as usize];
        }
        if let Some(disk) = &self.disk {
            disk_stats(&mut stats, disk);
        }
        if let Some(replicas) = &self.replicas {
            let DeviceStats { limit_bytes, slabs, slab_bytes, live_bytes, .. } = replicas.stats();
            (stats.device_limit_bytes, stats.device_used_bytes) = (limit_bytes, slab_bytes);
            (stats.device_live_bytes, stats.device_slabs) = (live_bytes, slabs);
            stats.device_is_lost = replicas.is_lost().into();
        }
        stats
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
        out.rows("kvtier", StoreStats::ROWS, &report.stats);
        if let Some(remote) = self.remote_stats() {
            out.rows("kvtier_remote", RemoteStats::ROWS, &remote);
        }
        self.engine(&mut out);
        let mut stages = vec![("copies", &report.copies), ("reads", &report.reads)];
        stages.extend(self.replicas.as_ref().map(|_| ("device", &report.replicas)));
        queues(&mut out, &stages);
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
        let help = "How files are read and written, and why not faster.";
        out.family("kvtier_disk_engine_info", Kind::Gauge, help);
        let files = disk.files();
        let reason = files.fallback().unwrap_or_default();
        out.sample(&[("engine", files.engine()), ("reason", reason)], 1.0);
    }

    fn decisions(&self, out: &mut Exposition) {
        let help = "Time in which a policy chose victims, of one decision in 16.";
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

fn queues(out: &mut Exposition, queues: &[(&str, &QueueGauge)]) {
    out.family("kvtier_queue_cells", Kind::Gauge, "Queued cells, by stage and urgency.");
    for &(stage, gauge) in queues {
        for (lane, cells) in LANE_NAMES.into_iter().zip(gauge.cells) {
            out.sample(&[("stage", stage), ("lane", lane)], cells as f64);
        }
    }
    out.family("kvtier_queue_bytes", Kind::Gauge, "Queued bytes, by stage and urgency.");
    for &(stage, gauge) in queues {
        for (lane, bytes) in LANE_NAMES.into_iter().zip(gauge.bytes) {
            out.sample(&[("stage", stage), ("lane", lane)], bytes as f64);
        }
    }
    out.family("kvtier_batch_bytes", Kind::Gauge, "Bytes of batches in flight.");
    for &(stage, gauge) in queues {
        out.sample(&[("stage", stage)], gauge.batch_bytes as f64);
    }
    out.family("kvtier_bandwidth_bytes_per_second", Kind::Gauge, "Measured bandwidth of a stage.");
    for &(stage, gauge) in queues {
        out.sample(&[("stage", stage)], gauge.bytes_per_second);
    }
    out.family("kvtier_delay_seconds", Kind::Gauge, "Measured delay of a batch.");
    for &(stage, gauge) in queues {
        out.sample(&[("stage", stage)], gauge.delay_ns / 1e9);
    }
}

fn batches(out: &mut Exposition, all: &Report) {
    out.family("kvtier_batches", Kind::Gauge, "Batches in flight.");
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
        WorkerKind::Upload => "upload",
        WorkerKind::Lookup => "lookup",
    }
}

/// Times of transfers and batches.
fn times(out: &mut Exposition, all: &[Histogram; TIMED.len()]) {
    let (gets, rest) = all.split_at(GETS);
    let (puts, batches) = rest.split_at(PUTS);
    let help = "Latency of complete gets, by the slowest tier that was read.";
    out.family("kvtier_get_seconds", Kind::Histogram, help);
    for (tier, one) in TIERS.into_iter().zip(gets) {
        histogram(out, &[("tier", tier)], one);
    }
    let help = "Latency of complete puts, by level.";
    out.family("kvtier_put_seconds", Kind::Histogram, help);
    for (level, one) in LEVELS.into_iter().zip(puts) {
        histogram(out, &[("level", level)], one);
    }
    let help = "Latency of batches, by kind.";
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
    let present = || tiers.iter().filter(|(_, policy)| !policy.name.is_empty());
    out.family("kvtier_policy_objects", Kind::Gauge, "Chunks in a policy.");
    for (tier, policy) in present() {
        out.sample(&[("tier", tier), ("policy", policy.name)], policy.objects as f64);
    }
    let families: [Family<PolicyGauge>; 5] = [
        ("references", |policy| policy.references, "Accesses that a policy was notified of."),
        ("hits", |policy| policy.hits, "Accesses to a chunk in the policy."),
        ("evictions", |policy| policy.evictions, "Chunks that a policy evicted."),
        ("decisions", |policy| policy.decisions, "Calls for victims."),
        (
            "shortfalls",
            |policy| policy.shortfalls,
            "Calls that found fewer victims than requested.",
        ),
    ];
    for (name, value, help) in families {
        out.family(&format!("kvtier_policy_{name}_total"), Kind::Counter, help);
        for (tier, policy) in present() {
            out.sample(&[("tier", tier), ("policy", policy.name)], value(policy) as f64);
        }
    }
}

fn tenants(out: &mut Exposition, rows: &[Tenant], others: Tenant) {
    let names: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let all = || names.iter().map(String::as_str).zip(rows).chain([("others", &others)]);
    let families: [Family<Tenant>; 5] = [
        ("put_bytes", |row| row.put_bytes, "Bytes that a tenant put."),
        ("got_bytes", |row| row.got_bytes, "Bytes that a tenant got."),
        ("hits", |row| row.hits, "Cells of gets of a tenant that were resident."),
        ("misses", |row| row.misses, "Cells of gets of a tenant that were in no tier."),
        (
            "rejected_puts",
            |row| row.rejected_puts,
            "Puts rejected because the tenant would exceed its quota.",
        ),
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
    /// Puts rejected because the tenant would exceed its quota.
    pub rejected_puts: u64,
}

/// Traffic of all tenants.
#[derive(Default)]
pub(super) struct Tenants {
    /// By number.
    rows: Vec<Tenant>,
    others: Tenant,
}

impl Tenants {
    /// Counts cells of a tenant's transfer that have ended alike, and their bytes.
    pub(super) fn count(
        &mut self,
        id: u32,
        kind: TransferKind,
        (bytes, cells): (u64, u32),
        error: Option<&Error>,
    ) {
        let status = error.map_or(Status::Ok, Error::status);
        if kind == TransferKind::Prefetch || !matches!(status, Status::Ok | Status::NotFound) {
            return;
        }
        let row = self.row(id);
        match kind {
            TransferKind::Put => row.put_bytes += bytes,
            _ if status == Status::Ok => {
                row.hits += u64::from(cells);
                row.got_bytes += bytes;
            }
            _ => row.misses += u64::from(cells),
        }
    }

    /// Counts a put that was rejected because its tenant would exceed its quota.
    pub(super) fn rejected_put(&mut self, id: u32) {
        self.row(id).rejected_puts += 1;
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

/// Latency histograms: name in views, and description. First two gets, then three puts by
/// [`Level`](crate::store::state::Level), then batches by
/// [`WorkerKind`](crate::store::state::batches::WorkerKind).
pub const TIMED: [(&str, &str); GETS + PUTS + KINDS] = [
    ("get_host", "Gets from memory alone."),
    ("get_disk", "Gets that read from disk."),
    ("put_ram", "Puts of level ram."),
    ("put_disk", "Puts of level disk."),
    ("put_durable", "Puts of level durable."),
    ("copy_batch", "Batches of copies between tensors and memory."),
    ("read_batch", "Batches of disk reads."),
    ("write_batch", "Batches of disk writes."),
    ("sync_batch", "Syncs."),
    ("upkeep_batch", "Compactions, sweeps, checkpoints and records."),
    ("fetch_batch", "Batches of remote reads."),
    ("upload_batch", "Batches of remote writes."),
    ("lookup_batch", "Remote lookups."),
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

/// Measurements beside the counters.
pub(super) struct Stats {
    pub(super) metadata: MetadataAccount,
    pub(super) latencies: Latencies,
    pub(super) tenants: Tenants,
    /// Loss of precision by lossy codecs.
    pub(super) lossy: Quality,
}

impl Stats {
    pub(super) fn new(account: Option<Arc<Account>>) -> Stats {
        Stats {
            metadata: MetadataAccount::new(account),
            latencies: Latencies::default(),
            tenants: Tenants::default(),
            lossy: Quality::default(),
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
        // A transfer that depends on a device event took as long as the event.
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
        let requested_bytes = self.stats.metadata.missing.map_or(0, |(bytes, _)| bytes);
        let missing = needed.saturating_sub(self.stats.metadata.paid_bytes);
        if missing > requested_bytes {
            let bytes = missing.next_multiple_of(STEP_BYTES);
            if !self.charge_tables(bytes) {
                return self.request_reclaim(bytes - requested_bytes);
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
    fn tenants_beyond_the_limit_are_counted_together() {
        let mut tenants = Tenants::default();
        let most = MAX_TENANTS as u32;
        let miss: Error = Status::NotFound.into();
        let failed: Error = Status::Io.into();
        for round in 0..2 {
            for id in (0..most + 3).rev() {
                tenants.count(id, TransferKind::Put, (u64::from(id), 1), None);
                tenants.count(id, TransferKind::Get, (10, 1), None);
                tenants.count(id, TransferKind::Get, (0, 1), Some(&miss));
                tenants.count(id, TransferKind::Get, (0, 1), Some(&failed));
                tenants.count(id, TransferKind::Prefetch, (5, 1), None);
            }
            let rows = tenants.rows();
            assert_eq!(rows.len(), MAX_TENANTS);
            assert!(rows.is_sorted_by(|a, b| a.id < b.id));
            let (n, put_bytes) = (round + 1, u64::from(rows[7].id) * (round + 1));
            let expected = Tenant {
                id: 10,
                put_bytes,
                got_bytes: 10 * n,
                hits: n,
                misses: n,
                rejected_puts: 0,
            };
            assert_eq!(rows[7], expected, "the first three ids were counted last");
            let rest = Tenant {
                id: 0,
                put_bytes: 3 * n,
                got_bytes: 30 * n,
                hits: 3 * n,
                misses: 3 * n,
                rejected_puts: 0,
            };
            assert_eq!(tenants.others(), rest);
        }
    }
}
