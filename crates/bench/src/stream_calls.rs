//! The cost of the streamer itself: a plan of a thousand units, the lease of a resident unit.

use std::hint::black_box;
use std::time::Instant;

use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Result;
use kvtier::stream::model::Facts;
use kvtier::stream::plan::{ComputeLocation, Inputs, Links, Memory, Plan, PlanOptions};
use kvtier::stream::streamer::{AcquireOpts, Opts, Streamer, UnitLease};

use super::fixtures::stream::{files, model, units};
use super::{Bar, median, per_call};

const UNITS: u32 = 1000;

/// The slower of both seats. The units differ in size, so that packing memory takes work.
fn plan_ms(rounds: u32) -> Result<f64> {
    let mut units = units(UNITS, 64 << 20);
    for (i, unit) in (0u64..).zip(&mut units.units) {
        unit.image_bytes += i.wrapping_mul(2_654_435_761) % 4096 * 4096;
        unit.bytes = unit.image_bytes;
    }
    let facts =
        Facts { layers: UNITS, kv_heads: 8, key_dim: 128, value_dim: 128, ..Facts::default() };
    let memory = Memory {
        device_free_bytes: 24 << 30,
        host_free_bytes: 40 << 30,
        host_total_bytes: 64 << 30,
        host_is_limited: false,
        lockable_bytes: u64::MAX,
    };
    let links = Links { disk: 3_300_000_000, device: 13_000_000_000, processor: 0 };
    let mut slowest = 0.0f64;
    for compute in [ComputeLocation::Host, ComputeLocation::Device] {
        let plan_options = PlanOptions { compute: Some(compute), ..PlanOptions::default() };
        let inputs =
            Inputs { units: &units, facts: &facts, memory, links, plan_options: &plan_options };
        let mut took = Vec::new();
        for _ in 0..rounds {
            let begun = Instant::now();
            black_box(Plan::make(&inputs)?);
            took.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        slowest = slowest.max(median(&mut took));
    }
    Ok(slowest)
}

/// Nanoseconds of an acquire, and of an acquire with its release.
fn acquire_ns(rounds: u32) -> Result<(f64, f64)> {
    const CALLS: u32 = 100_000;
    let (model, units) = model(16, 1 << 20)?;
    let runtime = Runtime::open(RuntimeOpts::default())?;
    let plan_options =
        PlanOptions { kv_bytes: Some(0), host_reserve_bytes: Some(0), ..PlanOptions::default() };
    let files = files(&model, 0)?;
    let opts = Opts { plan_options, ..Opts::default() };
    let streamer = Streamer::open_on(runtime.core(), files, model, units, opts)?;
    streamer.load(0)?;
    let opts = AcquireOpts::default();
    let (mut alone, mut acquired_and_released) = (Vec::new(), Vec::new());
    let mut held: Vec<UnitLease> = Vec::with_capacity(CALLS as usize);
    for _ in 0..rounds {
        let (mut unit, mut failed) = (0, None);
        alone.push(per_call(CALLS, || {
            unit = (unit + 1) % 16;
            match streamer.acquire(unit, opts) {
                Ok(lease) => held.push(lease),
                Err(error) => failed = Some(error),
            }
        }));
        held.drain(..).try_for_each(|lease| streamer.release(&lease, None))?;
        acquired_and_released.push(per_call(CALLS, || {
            unit = (unit + 1) % 16;
            let done =
                streamer.acquire(unit, opts).and_then(|lease| streamer.release(&lease, None));
            failed = failed.take().or(done.err());
        }));
        if let Some(error) = failed {
            return Err(error);
        }
    }
    streamer.close(0)?;
    Ok((median(&mut alone), median(&mut acquired_and_released)))
}

/// Measures the bars.
pub fn bars(quick: bool) -> Vec<Bar> {
    let rounds = if quick { 9 } else { 31 };
    let bar = |bar, unit, baseline, goal| Bar::lower(bar, unit).baseline(baseline).goal(goal);
    let plan = bar("plan_1000_units", "ms", "nothing", 10.0);
    let acquire = bar("acquire_resident", "ns", "with its release", 200.0);
    vec![plan.measured(plan_ms(rounds)), acquire.measured_pair(acquire_ns(rounds))]
}
