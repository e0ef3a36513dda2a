//! `kvtier sim`: the store in simulations, many seeds at once.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressStyle};
use kvtier::kv::sim::{Report, SimOpts, run as simulate};

/// Which seeds, and how.
pub struct Seeds {
    /// How many.
    pub count: u64,
    /// The first.
    pub first: u64,
    /// Steps of each.
    pub steps: u32,
    /// Threads; 0 = as many as cores.
    pub threads: usize,
}

/// Runs seeds until one fails. The first line of a failure says how to see it again.
pub fn run(seeds: &Seeds) -> ExitCode {
    let threads = match seeds.threads {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
        threads => threads,
    };
    let bar = ProgressBar::new(seeds.count);
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} seeds, {per_sec}, {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let all = Mutex::new((Report::default(), Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !failed.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= seeds.count {
                        break;
                    }
                    let opts = SimOpts { seed: seeds.first.wrapping_add(at), steps: seeds.steps };
                    let ended = simulate(&opts);
                    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                    match ended {
                        Ok(report) => add(&mut all.0, &report),
                        Err(failure) => {
                            failed.store(true, Ordering::Relaxed);
                            all.1.push(failure);
                        }
                    }
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    let (report, failures) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    for failure in &failures {
        eprintln!("FAIL {failure}");
        let (seed, steps) = (failure.seed, seeds.steps);
        eprintln!("     again: kvtier sim --first {seed} --seeds 1 --steps {steps}");
    }
    if !failures.is_empty() {
        return ExitCode::FAILURE;
    }
    let counted = &report.counters;
    println!("seeds            {}", seeds.count);
    println!("moves            {}", report.moves);
    println!("bytes compared   {}", crate::human(report.checked_bytes));
    println!("crashes          {}", report.crashes);
    println!("durable, found   {}", report.kept);
    println!("cells stored     {}", counted.stored);
    println!("loaded from disk {}", counted.disk_hits);
    println!("left memory      {}", counted.demoted + counted.dropped);
    println!("left the disk    {}", counted.disk_evicted);
    println!("damage found     {}", counted.corrupt);
    let far = &report.far;
    println!("sent             {} objects, {} not", far.sent, far.failed_sends);
    println!("not to be sent   {} chunks", far.refused);
    println!("fetched          {} objects, {} cells", far.fetched, far.cells);
    println!("asked            {} names, {} there, {} late", far.asked, far.found, far.late);
    println!("remembered       {} names", far.remembered);
    println!("far, not there   {} objects", far.absent);
    println!("far, damaged     {}", far.corrupt);
    ExitCode::SUCCESS
}

fn add(all: &mut Report, one: &Report) {
    all.moves += one.moves;
    all.checked_bytes += one.checked_bytes;
    all.crashes += one.crashes;
    all.kept += one.kept;
    all.far.add(&one.far);
    let (all, one) = (&mut all.counters, &one.counters);
    all.stored += one.stored;
    all.disk_hits += one.disk_hits;
    all.demoted += one.demoted;
    all.dropped += one.dropped;
    all.disk_evicted += one.disk_evicted;
    all.corrupt += one.corrupt;
}
