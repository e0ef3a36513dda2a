//! Passes with compute time over a simulated disk and device of exact speed, beside the arithmetic
//! lower bound.

use std::time::{Duration, Instant};

use kvtier::base::clock::Clock;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Result;
use kvtier::base::sync::Arc;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::stream::plan::{Links, PlanOptions, Residency};
use kvtier::stream::streamer::{AcquireOpts, Opts, Streamer};

use super::fixtures::stream::{files, model};
use super::{Bar, median};

const LAYERS: u32 = 80;
/// Bytes of a layer, which is one tensor.
const LAYER_BYTES: u64 = 4 << 20;
const CHUNK_BYTES: u64 = 1 << 20;
/// Time of a layer to the device and from the disk; a tenth of the published cases.
const DEVICE_NS: u64 = 10_300_000;
const DISK_NS: u64 = 20_000_000;

fn rate(ns: u64) -> u64 {
    (LAYER_BYTES as f64 * 1e9 / ns as f64) as u64
}

/// A case: layers resident on the device and in host memory; the others are in the file.
#[derive(Clone, Copy)]
struct Case {
    bar: &'static str,
    device: u32,
    host: u32,
    compute_ns: u64,
}

impl Case {
    fn open(&self, runtime: &Runtime) -> Result<Streamer> {
        let (model, units) = model(LAYERS, LAYER_BYTES)?;
        let (disk, link) = (rate(DISK_NS), rate(DEVICE_NS));
        // Staging of two layers: the disk reads while layers of host memory are copied.
        let staging = 2 * LAYER_BYTES;
        let plan_options = PlanOptions {
            device_ceiling_bytes: Some(u64::from(self.device + 2) * LAYER_BYTES),
            host_ceiling_bytes: Some(u64::from(self.host) * LAYER_BYTES + staging),
            device_safety_bytes: Some(0),
            host_reserve_bytes: Some(0),
            kv_bytes: Some(0),
            staging_bytes: staging,
            chunk_bytes: CHUNK_BYTES,
            layer_compute_ns: self.compute_ns,
            ..PlanOptions::default()
        };
        let device = SimulatedOpts {
            latency_ns: 0,
            bytes_per_second: link,
            jitter_percent: 0,
            memory_bytes: 1 << 30,
            ..SimulatedOpts::default()
        };
        let opts = Opts {
            plan_options,
            links: Links { disk, device: link, processor: 0 },
            device: Some(Arc::new(Simulated::new(Clock::real(), device)?)),
            ..Opts::default()
        };
        let files = files(&model, disk)?;
        Streamer::open_on(runtime.core(), files, model, units, opts)
    }

    /// The ratio of a pass and its lower bound, and a note with the residency of layers.
    fn measure(&self, passes: u32) -> Result<(f64, String)> {
        let runtime = Runtime::open(RuntimeOpts::default())?;
        let streamer = self.open(&runtime)?;
        streamer.load(0)?;
        let plan = streamer.plan();
        let count = |residency: Residency| {
            plan.residencies.iter().filter(|h| **h == residency).count() as u64
        };
        let (device, host, file) =
            (count(Residency::Device), count(Residency::Host), count(Residency::File));
        let link_ns = (host + file) * DEVICE_NS;
        let all_compute_ns = u64::from(LAYERS) * self.compute_ns;
        let least_ns = all_compute_ns.max(link_ns).max(file * DISK_NS);
        let mut took = Vec::new();
        let (mut begun, mut computed) = (Instant::now(), Instant::now());
        for pass in 0..passes + 1 {
            streamer.pass_begin()?;
            for layer in 0..LAYERS {
                let start = Instant::now();
                let held = streamer.acquire(layer, AcquireOpts::default())?;
                // A loaded layer begins when the previous one ends, as on a stream of a device:
                // a late wake-up of this thread does not count.
                let waited = start.elapsed() > Duration::from_micros(50);
                computed = if waited { computed.max(Instant::now()) } else { computed };
                computed += Duration::from_nanos(self.compute_ns);
                std::thread::sleep(computed.saturating_duration_since(Instant::now()));
                streamer.release(&held, None)?;
            }
            streamer.pass_end()?;
            let now = computed.max(Instant::now());
            if pass > 0 {
                took.push(now.duration_since(begun).as_nanos() as f64 / least_ns as f64);
            }
            begun = now;
        }
        streamer.close(0)?;
        let note = format!("({device}/{host}/{file}, least {:.0} ms)", least_ns as f64 / 1e6);
        Ok((median(&mut took), note))
    }
}

/// Measures the bars.
pub fn bars(quick: bool) -> Vec<Bar> {
    let case = |bar, device, host, compute_ns| Case { bar, device, host, compute_ns };
    let all = [
        case("pass_29_51_c0.07", 29, 51, 70_000),
        case("pass_29_51_c2", 29, 51, 2_000_000),
        case("pass_29_51_c4", 29, 51, 4_000_000),
        case("pass_29_51_c6.5", 29, 51, 6_500_000),
        case("pass_29_51_c9", 29, 51, 9_000_000),
        case("pass_20_30_30_c0.07", 20, 30, 70_000),
        case("pass_20_30_30_c2", 20, 30, 2_000_000),
    ];
    let bar = |case: &Case| {
        let mut bar = Bar::lower(case.bar, "of least")
            .baseline("the most of computing, the device link and the disk (simulated)")
            .baseline_value(1.0)
            .goal(1.05);
        match case.measure(if quick { 3 } else { 7 }) {
            Ok((value, note)) => (bar.value, bar.note) = (Some(value), note),
            Err(error) => bar.note = error.to_string(),
        }
        bar
    };
    // A quick run skips every other case.
    let step = if quick { 2 } else { 1 };
    all.iter().step_by(step).map(bar).collect()
}
