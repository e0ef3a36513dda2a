//! Group `stream`: passes over weights larger than memory, beside the bound of the disk and a memory
//! map, and the cost of the streamer itself. `KVTIER_BENCH_DIR` names the directory; by default
//! that for temporary files.

use std::path::PathBuf;
use std::time::Instant;

use kvtier::base::memory::{Buffer, prefault};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::stream::model::Model;
use kvtier::stream::plan::PlanOptions;
use kvtier::stream::streamer::{Opts, Streamer};
use kvtier::stream::units::Units;

use super::disk::{DEPTH, PIECE, fill, in_turn, part_of_raw, raw};
use super::fixtures::stream::{make, stock, untouched};
use super::fixtures::{Outcome, Scratch, say};
use super::stream_passes::{
    FIRST_STAY, FOUND, MAP, MAP_USUAL, Measured, NOTHING_STAYS, SPREAD_STAY, Setting, measure,
};
use super::{Bar, Better, median, stream_calls, stream_timed};
use kvtier::stream::plan::size as human;

const LAYERS: u64 = 40;
/// Limit of the memory cgroups, in percent of the model.
const PERCENT: u64 = 59;

fn bar(bar: &'static str, unit: &'static str, baseline: &'static str) -> Bar {
    Bar::higher(bar, unit).baseline(baseline).baseline_value(1.0)
}

/// Sets value and note of a bar, or the reason why there is no value.
fn filled(bar: Bar, value: Outcome<f64>, note: String) -> Bar {
    bar.note(note).measured(value)
}

fn lower(mut bar: Bar, goal: f64) -> Bar {
    (bar.goal, bar.better) = (Some(goal), Better::Lower);
    bar
}

fn higher(mut bar: Bar, goal: f64) -> Bar {
    bar.goal = Some(goal);
    bar
}

/// The measurements as bars.
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
    let plain = "plain O_DIRECT calls for what is not resident, 1 MiB, 8 at once, into two slots";
    let map = "a thrashing memory map";
    let usual = "a thrashing memory map, 128 KiB readahead";
    let of_map = |name: &'static str, value: Outcome<f64>, note: String| {
        filled(bar(name, "x map", map), value, note)
    };
    let spread = measured.ratio(MAP, SPREAD_STAY);
    let bound_ratio = measured.seconds(MAP).and_then(|map| Ok(map / bound.clone()?));
    vec![
        filled(
            lower(bar("steady_pass", "of bound", plain), 1.05),
            measured.over_bound(SPREAD_STAY),
            about,
        ),
        filled(
            bar("interleaved_over_first", "x", "the first units stay"),
            measured.ratio(FIRST_STAY, SPREAD_STAY),
            String::new(),
        ),
        filled(
            higher(bar("over_map", "x", map), 2.5),
            spread.clone(),
            format!("(map {}, readahead {readahead} KiB)", seconds(MAP)),
        ),
        filled(
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
        filled(
            bar("found_pass", "of bound", plain),
            measured.over_bound(FOUND),
            format!("({} a pass)", seconds(FOUND)),
        ),
    ]
}

/// The peak memory of a method as a share of its limit; a killed process has none.
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
    filled(lower(bar(name, "of limit", "the memory cgroup's limit"), 1.0), part, note)
}

/// Touches and frees as much memory as a model uses. A virtual machine backs memory on first
/// touch, which is slower than any disk and not the work of the streamer.
fn touch(bytes: u64) -> Outcome<()> {
    let memory = untouched(bytes)?;
    // SAFETY: the memory is this call's alone.
    unsafe { prefault(memory.address(), memory.bytes()) };
    Ok(())
}

/// Seconds of loading a model whose units are all resident, from open until the end.
fn load(path: &PathBuf, in_place: bool) -> Outcome<f64> {
    let runtime = Runtime::open(RuntimeOpts::default()).map_err(say)?;
    let model = Model::open(std::slice::from_ref(path)).map_err(say)?;
    let units = Units::of(&model).map_err(say)?;
    let bytes = model.bytes();
    let plan_options = PlanOptions {
        host_ceiling_bytes: Some(bytes + (1 << 30)),
        host_reserve_bytes: Some(0),
        kv_bytes: Some(0),
        ..PlanOptions::default()
    };
    let opts = Opts { plan_options, in_place, ..Opts::default() };
    touch(bytes)?;
    let begun = Instant::now();
    let streamer = Streamer::open(runtime.core(), model, units, opts).map_err(say)?;
    streamer.load(0).map_err(say)?;
    let took = begun.elapsed().as_secs_f64();
    streamer.close(0).map_err(say)?;
    Ok(took)
}

/// Loads beside plain reads. A loaded model stays, so plain reads into untouched memory that stays
/// are its baseline; those into memory that they reuse are another bar.
fn load_bars(path: &PathBuf, rounds: u32) -> Vec<Bar> {
    const STAYS: &str = "plain O_DIRECT calls, 1 MiB, 8 at once, into untouched memory that stays";
    const REUSED: &str = "plain O_DIRECT calls, 1 MiB, 8 at once, into 8 MiB over and over";
    let mut bars = vec![
        part_of_raw("load_resident", STAYS, Some(0.95)),
        part_of_raw("load_in_place", STAYS, Some(0.95)),
        part_of_raw("load_resident_over_reused", REUSED, None),
    ];
    let mut pairs = vec![Vec::new(); bars.len()];
    let mut one = |turn: u32| -> Outcome<()> {
        let (files, stock) = (std::slice::from_ref(path), stock(0)?);
        let bytes = std::fs::metadata(path).map_err(say)?.len() / PIECE * PIECE;
        let plain = |memory: &Buffer| {
            raw(files, kvtier::io::files::Access::Read, bytes, memory, DEPTH as usize)
        };
        let stays = || touch(bytes).and_then(|()| plain(&untouched(bytes)?));
        pairs[0].push(in_turn(turn, || load(path, false), stays)?);
        pairs[1].push(in_turn(turn, || load(path, true), stays)?);
        pairs[2].push(in_turn(turn, || load(path, false), || plain(&stock))?);
        Ok(())
    };
    let ended = (0..rounds).try_for_each(&mut one);
    let bytes = std::fs::metadata(path).map_or(0, |about| about.len());
    for (bar, pairs) in bars.iter_mut().zip(&pairs) {
        match &ended {
            Ok(()) => fill(bar, pairs, bytes),
            Err(why) => bar.note = why.clone(),
        }
    }
    bars
}

/// Measures passes over a generated model.
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
    bars.append(&mut load_bars(&path, if quick { 3 } else { 7 }));
    Ok(bars)
}

/// Measures the bars.
pub fn run(quick: bool) -> Vec<Bar> {
    let mut bars = match on_disk(quick) {
        Ok(bars) => bars,
        Err(why) => vec![Bar { note: why, ..lower(bar("steady_pass", "of bound", ""), 1.05) }],
    };
    bars.append(&mut stream_timed::bars(quick));
    bars.append(&mut stream_calls::bars(quick));
    bars
}

/// Measures passes over a model of the caller in memory cgroups of `limit_bytes`; 0 = the share of
/// the model that the group uses.
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
