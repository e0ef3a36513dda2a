//! What a store counts and has, as text for Prometheus.

use crate::base::exposition::{Exposition, Kind, Labels};
use crate::policy::metrics::Histogram;
use crate::store::admission::REFUSALS;
use crate::store::state::latency::{GETS, PUTS, TIMED};
use crate::store::state::stats::{PolicyGauge, QueueGauge, Report};
use crate::store::state::tenants::Tenant;
use crate::store::state::work::WorkerKind;
use crate::store::state::{Counters, StoreState};

/// What urgencies are called.
const LANES: [&str; crate::store::job_queues::LANES] = ["demand", "prefetch", "demotion"];

/// Levels of puts, and tiers that gets need.
const LEVELS: [&str; PUTS] = ["ram", "disk", "durable"];
const TIERS: [&str; GETS] = ["host", "disk"];

/// Bounds of buckets, as powers of two of a nanosecond: 1 us to 34 s.
const OCTAVES: std::ops::RangeInclusive<usize> = 10..=35;

/// The name of a family, where its values are, and what they say.
type Family<T> = (&'static str, fn(&T) -> u64, &'static str);

impl StoreState {
    /// The metrics of the store.
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

    /// How the disk is read and written, and why no better way is used.
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
        let caches = [Some(&self.host_cache), self.disk_cache.as_ref(), replicas];
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

/// What admission let go to disk, and why it did not let others.
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

/// What lossy codecs have lost in all that was written.
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

/// What is in device memory, where the store has some.
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
        (&[("for", "cleaning")], stats.cleaned_bytes as f64),
        (&[("for", "headers")], stats.overhead_bytes as f64),
    ];
    let help = "Bytes written to the disk, by what for.";
    family(out, "kvtier_disk_written_bytes_total", Kind::Counter, help, &samples);
    let plain = [
        ("syncs", stats.syncs, "Syncs of segments."),
        ("failed_syncs", stats.failed_syncs, "Syncs that failed."),
        ("cleanings", stats.cleanings, "Segments that were cleaned."),
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
        for (lane, cells) in LANES.into_iter().zip(gauge.cells) {
            out.sample(&[("way", way), ("lane", lane)], cells as f64);
        }
    }
    out.family("kvtier_queue_bytes", Kind::Gauge, "Bytes that wait, by way and urgency.");
    for &(way, gauge) in queues {
        for (lane, bytes) in LANES.into_iter().zip(gauge.bytes) {
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

/// How long moves and batches took.
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
