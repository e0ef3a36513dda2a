//! Simulates the store with many seeds in parallel: `cargo run --release -p kvtier-testkit --bin
//! kvtier-sim -- --seeds 1000`.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use clap::Parser;
use kvtier_testkit::sim::{Report, SimOpts, run as simulate};

/// Simulates the store: seeds choose workloads, faults, crashes and orders.
#[derive(Parser)]
#[command(name = "kvtier-sim", version)]
struct Args {
    /// Number of seeds
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Steps of each seed
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    steps: u32,
    /// Threads; 0 = number of cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// Runs seeds until one fails. The first line of a failure says how to repeat it.
fn main() -> ExitCode {
    let args = Args::parse();
    let threads = match args.threads {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
        threads => threads,
    };
    let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let all = Mutex::new((Report::default(), Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !failed.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= args.seeds {
                        break;
                    }
                    let opts = SimOpts { seed: args.first.wrapping_add(at), steps: args.steps };
                    let ended = simulate(&opts);
                    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                    match ended {
                        Ok(report) => add(&mut all.0, &report),
                        Err(failure) => {
                            failed.store(true, Ordering::Relaxed);
                            all.1.push(failure);
                        }
                    }
                }
            });
        }
    });
    let (report, failures) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    for failure in &failures {
        eprintln!("FAIL {failure}");
        let (seed, steps) = (failure.seed, args.steps);
        eprintln!("     again: kvtier-sim --first {seed} --seeds 1 --steps {steps}");
    }
    if !failures.is_empty() {
        return ExitCode::FAILURE;
    }
    let counted = &report.counters;
    println!("seeds            {}", args.seeds);
    println!("moves            {}", report.moves);
    println!("bytes compared   {}", report.checked_bytes);
    println!("crashes          {}", report.crashes);
    println!("durable, found   {}", report.durable_found);
    println!("cells stored     {}", counted.stored_cells);
    println!("loaded from disk {}", counted.disk_hit_cells);
    println!("evicted (host)   {}", counted.demoted_chunks + counted.dropped_chunks);
    println!("evicted (disk)   {}", counted.evicted_chunks);
    println!("damage found     {}", counted.corrupt_cells);
    let remote = &report.remote;
    println!(
        "uploaded         {} objects, {} failed",
        remote.uploaded_objects, remote.failed_uploads
    );
    println!("rejected         {} chunks", remote.rejected_chunks);
    println!("fetched          {} objects, {} cells", remote.fetched_objects, remote.fetched_cells);
    println!(
        "looked up        {} names, {} found, {} late",
        remote.looked_up_names, remote.found_names, remote.late_requests
    );
    println!("hung             {} requests", remote.hung_requests);
    println!("remembered       {} names", remote.cached_names);
    println!("remote misses    {} objects", remote.absent_objects);
    println!("remote damaged   {}", remote.corrupt_objects);
    ExitCode::SUCCESS
}

fn add(all: &mut Report, report: &Report) {
    all.moves += report.moves;
    all.checked_bytes += report.checked_bytes;
    all.crashes += report.crashes;
    all.durable_found += report.durable_found;
    all.remote.add_counters(&report.remote);
    all.counters.add_counters(&report.counters);
}
