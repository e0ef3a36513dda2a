//! Weights streamed from host memory through two slots of a GPU, and in place, with memory mapped
//! behind fixed addresses; beside one large copy in the same run.

use std::time::Instant;

use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Result;
use kvtier::base::sync::Arc;
use kvtier::device::cuda::Cuda;
use kvtier::device::{Device, Stream};
use kvtier::stream::plan::{PlanOptions, Residency};
use kvtier::stream::streamer::{AcquireOpts, Opts, Streamer};

use super::fixtures::stream::{files, model};
use super::{Bar, median};

const LAYERS: u32 = 12;
const CHUNK_BYTES: u64 = 4 << 20;

/// The bars, and whether units are in place.
const BARS: [(&str, bool); 2] = [("stream_slots", false), ("stream_in_place", true)];

/// A streamer with two slots on the device and all layers in host memory.
fn open(
    runtime: &Runtime,
    device: &Arc<Cuda>,
    layer_bytes: u64,
    in_place: bool,
) -> Result<Streamer> {
    let (model, units) = model(LAYERS, layer_bytes)?;
    let granule = if in_place { device.window_granularity()? } else { 1 };
    let staging = 2 * CHUNK_BYTES;
    let plan_options = PlanOptions {
        device_ceiling_bytes: Some(2 * layer_bytes.next_multiple_of(granule)),
        host_ceiling_bytes: Some(u64::from(LAYERS) * layer_bytes + staging),
        device_safety_bytes: Some(0),
        host_reserve_bytes: Some(0),
        kv_bytes: Some(0),
        staging_bytes: staging,
        chunk_bytes: CHUNK_BYTES,
        ..PlanOptions::default()
    };
    let shared: Arc<dyn Device> = device.clone();
    let opts = Opts { plan_options, in_place, device: Some(shared), ..Opts::default() };
    let files = files(&model, 0)?;
    Streamer::open_on(runtime.core(), files, model, units, opts)
}

/// GB/s of passes whose units are released by an event of the device.
fn rate(
    device: &Arc<Cuda>,
    layer_bytes: u64,
    in_place: bool,
    passes: usize,
) -> Result<(f64, String)> {
    let runtime = Runtime::open(RuntimeOpts::default())?;
    let streamer = open(&runtime, device, layer_bytes, in_place)?;
    streamer.load(0)?;
    let residencies = streamer.plan().residencies;
    let sent = residencies.iter().filter(|residency| **residency != Residency::Device).count()
        as u64
        * layer_bytes;
    let stream = Stream(1 % device.facts().streams);
    let mut took = Vec::new();
    for pass in 0..passes + 1 {
        let begun = Instant::now();
        streamer.pass_begin()?;
        for layer in 0..LAYERS {
            let held = streamer
                .acquire(layer, AcquireOpts { when_issued: true, ..AcquireOpts::default() })?;
            // SAFETY: an empty batch, which only records an event.
            let used = unsafe { device.submit(stream, held.lease.event, &mut []) }?;
            streamer.release(&held, Some(used))?;
        }
        streamer.pass_end()?;
        if pass > 0 {
            took.push(sent as f64 / begun.elapsed().as_secs_f64() / 1e9);
        }
    }
    streamer.close(0)?;
    let note = format!("{} layers of {} MiB pass", residencies.len(), layer_bytes >> 20);
    Ok((median(&mut took), note))
}

fn bar(bar: &'static str, rate: Option<f64>, up: Option<f64>, note: String) -> Bar {
    Bar::higher(bar, "x")
        .baseline("one large copy to the device")
        .baseline_value(up)
        .goal(0.95)
        .value(rate.zip(up).map(|(rate, up)| rate / up))
        .note(note)
}

/// Measures both; `up` is the GB/s of one large copy to the device.
pub fn run(device: &Arc<Cuda>, up: Option<f64>, is_small: bool, passes: usize) -> Vec<Bar> {
    let layer_bytes = if is_small { 1 << 20 } else { 64 << 20 };
    let measure = |(name, in_place)| match rate(device, layer_bytes, in_place, passes) {
        Ok((rate, note)) => bar(name, Some(rate), up, format!("{rate:.2} GB/s; {note}")),
        Err(error) => bar(name, None, up, error.to_string()),
    };
    BARS.into_iter().map(measure).collect()
}

/// The bars without a device.
pub fn none(why: &str) -> impl Iterator<Item = Bar> {
    BARS.into_iter().map(move |(name, _)| bar(name, None, None, why.to_string()))
}
