//! Weights that do not fit into memory: passes over them beside what the disk allows, and
//! beside a memory map; what the streamer itself takes. `KVTIER_BENCH_DIR` names the
//! directory (the temporary one if it is not set).

use std::path::PathBuf;
use std::time::Instant;

use kvtier::base::memory::{AllocationRequest, Buffer, prefault};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::stream::model::Model;
use kvtier::stream::plan::PlanOptions;
use kvtier::stream::streamer::{Opts, Streamer};
use kvtier::stream::units::Units;

use super::disk::{DEPTH, Outcome, PIECE, Scratch, fill, in_turn, part_of_raw, raw};
use super::stream_passes::{
    FIRST_STAY, FOUND, MAP, MAP_USUAL, Measured, NOTHING_STAYS, SPREAD_STAY, Setting, make,
    measure, stock,
};
use super::{Bar, Better, median, stream_calls, stream_timed};
use kvtier::stream::plan::size as human;

const LAYERS: u64 = 40;
/// Of the model, what the memory cgroups hold.
const PERCENT: u64 = 59;

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn bar(bar: &'static str, unit: &'static str, baseline: &'static str) -> Bar {
    Bar {
        bar,
        value: None,
        unit,
        baseline,
        baseline_value: Some(1.0),
        goal: None,
        better: Better::Higher,
        note: String::new(),
    }
}

/// Fills a bar, or says why there is no number.
fn told(mut bar: Bar, value: Outcome<f64>, note: String) -> Bar {
    match value {
        Ok(value) => (bar.value, bar.note) = (Some(value), note),
        Err(why) => bar.note = why,
    }
    bar
}

fn lower(mut bar: Bar, goal: f64) -> Bar {
    (bar.goal, bar.better) = (Some(goal), Better::Lower);
    bar
}

fn higher(mut bar: Bar, goal: f64) -> Bar {
    bar.goal = Some(goal);
    bar
}

/// What was measured, as bars.
pub fn pass_bars(measured: &Measured, limit_bytes: u64) -> Vec<Bar> {
    let seconds =
        |access: usize| measured.seconds(access).map_or("-".into(), |s| format!("{s:.3} s"));
    let bound = measured.bounds(SPREAD_STAY).map(|mut bounds| median(&mut bounds));
    let rate =
        measured.bytes as f64 / median(&mut measured.raw[SPREAD_STAY].clone()) / f64::from(1 << 30);
    let moved = measured.ready[SPREAD_STAY]["moved_bytes"].as_u64().unwrap_or(0);
    let about = format!(
        "({} a pass, {} of {} moved, raw {rate:.2} GiB/s)",
        seconds(SPREAD_STAY),
        human(moved),
        human(measured.bytes)
    );
    let readahead = measured.readahead_kib.map_or("?".to_string(), |kib| kib.to_string());
    let plain = "plain O_DIRECT calls for what is not resident, 1 MiB, 8 at once";
    let map = "a thrashing memory map";
    let usual = "a thrashing memory map, 128 KiB readahead";
    let of_map = |name: &'static str, value: Outcome<f64>, note: String| {
        told(bar(name, "x map", map), value, note)
    };
    let spread = measured.ratio(MAP, SPREAD_STAY);
    let bound_ratio = measured.seconds(MAP).and_then(|map| Ok(map / bound.clone()?));
    vec![
        told(
            lower(bar("steady_pass", "of bound", plain), 1.10),
            measured.over_bound(SPREAD_STAY),
            about,
        ),
        told(
            bar("interleaved_over_first", "x", "the first units stay"),
            measured.ratio(FIRST_STAY, SPREAD_STAY),
            String::new(),
        ),
        told(
            higher(bar("over_map", "x", map), 2.5),
            spread.clone(),
            format!("(map {}, readahead {readahead} KiB)", seconds(MAP)),
        ),
        told(
            higher(bar("over_map_128k", "x", usual), 4.8),
            measured.ratio(MAP_USUAL, SPREAD_STAY),
            format!("(map {})", seconds(MAP_USUAL)),
        ),
        of_map("parts_direct", measured.ratio(MAP, NOTHING_STAYS), seconds(NOTHING_STAYS)),
        of_map("parts_pinned_first", measured.ratio(MAP, FIRST_STAY), seconds(FIRST_STAY)),
        of_map("parts_interleaved", spread, seconds(SPREAD_STAY)),
        of_map("parts_bound", bound_ratio, bound.map_or(String::new(), |s| format!("{s:.3} s"))),
        memory_bar(measured, limit_bytes, SPREAD_STAY, "memory_as_told"),
        memory_bar(measured, limit_bytes, FOUND, "memory_as_found"),
        told(
            bar("found_pass", "of bound", plain),
            measured.over_bound(FOUND),
            format!("({} a pass)", seconds(FOUND)),
        ),
    ]
}

/// The most memory of a way, in parts of its limit; a way that was killed has none.
fn memory_bar(measured: &Measured, limit: u64, access: usize, name: &'static str) -> Bar {
    let ready = &measured.ready[access];
    let bytes = |name: &str| human(ready[name].as_u64().unwrap_or(0));
    let note = format!(
        "(weights {}, limit {}, available {})",
        bytes("host_bytes"),
        human(limit),
        bytes("available_bytes")
    );
    let ended = measured.took[access].as_ref().map(|_| ()).map_err(Clone::clone);
    let part =
        ended.and_then(|()| measured.peak[access].clone()).map(|peak| peak as f64 / limit as f64);
    told(lower(bar(name, "of limit", "the memory cgroup's limit"), 1.0), part, note)
}

/// Has the machine touch as much memory as a model takes, and gives it back. Memory of a
/// virtual machine is not there before it was touched once, which is slower than any disk
/// and no work of ours.
fn touch(bytes: u64) -> Outcome<()> {
    let wish = AllocationRequest { bytes, prefer_huge: true, ..AllocationRequest::default() };
    let memory = Buffer::map(&wish, None).map_err(say)?;
    // SAFETY: the memory is this call's alone.
    unsafe { prefault(memory.address(), memory.bytes()) };
    Ok(())
}

/// A model of which everything stays, from open until all of it is there.
fn load_bar(path: &PathBuf, rounds: u32) -> Bar {
    let mut bar =
        part_of_raw("load_resident", "plain O_DIRECT calls, 1 MiB, 8 at once", Some(0.95));
    let mut pairs = Vec::new();
    let mut bytes = 0;
    let mut one = |turn: u32| -> Outcome<()> {
        let runtime = Runtime::open(RuntimeOpts::default()).map_err(say)?;
        let stock = stock()?;
        let ours = || {
            let model = Model::open(std::slice::from_ref(path)).map_err(say)?;
            let units = Units::of(&model).map_err(say)?;
            bytes = model.bytes();
            let plan_options = PlanOptions {
                host_ceiling_bytes: Some(bytes + (1 << 30)),
                host_reserve_bytes: Some(0),
                kv_bytes: Some(0),
                ..PlanOptions::default()
            };
            let opts = Opts { plan_options, ..Opts::default() };
            touch(bytes)?;
            let begun = Instant::now();
            let streamer = Streamer::open(runtime.core(), model, units, opts).map_err(say)?;
            streamer.load(0).map_err(say)?;
            let took = begun.elapsed().as_secs_f64();
            streamer.close(0).map_err(say)?;
            Ok(took)
        };
        let all = std::fs::metadata(path).map_err(say)?.len() / PIECE * PIECE;
        let plain = || {
            let files = std::slice::from_ref(path);
            raw(files, kvtier::io::files::Access::Read, all, &stock, DEPTH as usize)
        };
        pairs.push(in_turn(turn, ours, plain)?);
        Ok(())
    };
    match (0..rounds).try_for_each(&mut one) {
        Ok(()) => fill(&mut bar, &pairs, bytes),
        Err(why) => bar.note = why,
    }
    bar
}

/// Measures passes over a model that is there, or is made.
fn on_disk(quick: bool) -> Outcome<Vec<Bar>> {
    let scratch = Scratch::new("stream");
    std::fs::create_dir_all(&scratch.0).map_err(say)?;
    let path = scratch.0.join("model.safetensors");
    let layer_bytes = if quick { 8 << 20 } else { 52 << 20 };
    make(&path, LAYERS, layer_bytes)?;
    let limit_bytes = LAYERS * layer_bytes * PERCENT / 100;
    let (rounds, passes) = if quick { (3, 2) } else { (5, 2) };
    let setting = Setting { limit_bytes, rounds, passes };
    let measured = measure(std::slice::from_ref(&path), &setting)?;
    let mut bars = pass_bars(&measured, limit_bytes);
    bars.push(load_bar(&path, 3));
    Ok(bars)
}

/// Measures the bars.
pub fn run(quick: bool) -> Vec<Bar> {
    let mut bars = match on_disk(quick) {
        Ok(bars) => bars,
        Err(why) => vec![Bar { note: why, ..lower(bar("steady_pass", "of bound", ""), 1.10) }],
    };
    bars.append(&mut stream_timed::bars(quick));
    bars.append(&mut stream_calls::bars(quick));
    bars
}

/// Measures passes over a model of the caller's, in memory cgroups of so many bytes; 0 = of
/// a part of it as in the group.
pub fn of_files(files: &[PathBuf], limit_bytes: u64, rounds: u32) -> Outcome<Vec<Bar>> {
    let model = Model::open(files).map_err(say)?;
    let limit_bytes = match limit_bytes {
        0 => model.bytes() / 100 * PERCENT,
        said => said,
    };
    drop(model);
    let measured = measure(files, &Setting { limit_bytes, rounds, passes: 2 })?;
    Ok(pass_bars(&measured, limit_bytes))
}
