//! `kvtier-bench`: groups of bars, each a measured number beside a baseline of the same run.
//!
//! `cargo run --release -p kvtier-bench -- GROUP`; measure the shipped profile with
//! `--profile dist` instead of `--release`.

mod abi;
mod all;
mod attention;
mod bar;
mod callers;
mod count;
mod device;
mod device_files;
mod device_kernels;
mod device_offload;
mod device_stream;
mod disk;
mod fixtures;
mod history;
mod index;
mod lab;
mod model;
mod model_child;
mod offload;
mod overlap;
mod page;
mod peers;
mod policy;
mod promises;
mod remote;
mod remote_server;
mod remote_store;
mod scale;
mod sparse;
mod store;
mod stream;
mod stream_calls;
mod stream_child;
mod stream_group;
mod stream_passes;
mod stream_timed;

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

pub use bar::{Bar, Better};
use clap::{Parser, Subcommand};

/// Counts the allocations of this process.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards every call to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this process so far.
pub fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// Measure kvtier, each number beside a baseline of the same run
#[derive(Parser)]
#[command(name = "kvtier-bench", version = kvtier_cli::VERSION, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Group of bars; without it all groups are listed
    group: Option<String>,
    /// Finish within 50 seconds
    #[arg(long)]
    quick: bool,
    /// Server of the group `remote`, redis://HOST[:PORT]; by default a server is started
    #[arg(long)]
    url: Option<String>,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Measure every group; write one page and one JSON with the history of each bar
    All(all::Args),
    /// Measure passes over a model, beside their bound, other placements and a memory map
    Model(model::Args),
    /// Put or get a number of cells, for tools that count instructions
    Count(count::Args),
    /// A process of the group `stream` and of `model` in a memory cgroup
    #[command(hide = true)]
    Child(model_child::Args),
}

fn main() -> ExitCode {
    env_logger::init();
    let cli = Cli::parse();
    let result = match (cli.command, cli.group) {
        (Some(Command::All(args)), _) => all::run(&args).map_err(Into::into),
        (Some(Command::Count(args)), _) => count::run(&args).map_err(Into::into),
        (Some(Command::Model(args)), _) => model::run(&args),
        (Some(Command::Child(args)), _) => model_child::run(&args),
        (None, None) => {
            list();
            Ok(())
        }
        (None, Some(group)) => {
            run(&group, cli.quick, cli.url.as_deref(), cli.json).map_err(Into::into)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvtier-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

type Group = fn(quick: bool) -> Vec<Bar>;

const GROUPS: [(&str, &str, Group); 15] = [
    ("abi", "calls through the C boundary, ops and queues", abi::run),
    ("attention", "kernels on one core, beside its multiply-adds and its reading", attention::run),
    ("cache", "lookups and inserts at a million entries, beside other caches", peers::run),
    ("callers", "several callers of one store, beside one", callers::run),
    ("device", "copies and kernels of a GPU, beside one large copy", device::run),
    ("disk", "transfers, appends and reads of the disk tier, beside plain calls", disk::run),
    ("lab", "replaying a trace on one thread", lab::run),
    (
        "offload",
        "layer loads hidden behind computing, blocks that a sparse policy saves",
        offload::run,
    ),
    ("policy", "choosing victims, in the caller's tables and among a million", policy::run),
    (
        "promises",
        "disk utilisation, write-behind, closes by polls, long sessions, gets beside puts",
        promises::run,
    ),
    (
        "remote",
        "objects of a Redis server, beside its own benchmark and a bare socket",
        remote::run,
    ),
    ("scale", "ten million cells, an opening after a crash, memory in a storm", scale::run),
    ("sparse", "decisions of sparse policies, beside reading their inputs", sparse::run),
    ("store", "puts, gets and restores, beside memcpy and plain reads", store::run),
    ("stream", "weights larger than memory, beside the disk and a memory map", stream::run),
];

/// Prints the groups.
pub fn list() {
    for (name, what, _) in GROUPS {
        println!("{name:<12} {what}");
    }
    println!("{:<12} every group; one page and one JSON with the history of each bar", "all");
}

/// Runs a group, on the server at `url` if given. A missed goal is printed and is not a failure:
/// time is not a test.
pub fn run(group: &str, quick: bool, url: Option<&str>, json: bool) -> Result<(), String> {
    let Some((_, _, measure)) = GROUPS.iter().find(|(name, _, _)| *name == group) else {
        return Err(format!("unknown group '{group}'; `kvtier-bench` lists the groups"));
    };
    let bars = match (group, url) {
        ("remote", Some(_)) => remote::run_at(quick, url),
        (_, Some(_)) => return Err("only the group 'remote' accepts --url".to_string()),
        (_, None) => measure(quick),
    };
    print(group, &bars, json);
    Ok(())
}

/// Prints the bars of a group.
pub fn print(group: &str, bars: &[Bar], json: bool) {
    if !json {
        println!("kvtier-bench {}, group {group}", kvtier_cli::VERSION);
        println!(
            "{:<24} {:>12} {:<10} {:>10}  {:<8} {:>12}  baseline",
            "bar", "value", "unit", "goal", "", "baseline"
        );
    }
    for bar in bars {
        match json {
            true => println!("{}", bar.json(group)),
            false => println!("{}", bar.row()),
        }
    }
}

/// The median; sorts the slice.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Nanoseconds per call of `body`, over `n` calls.
pub fn per_call(n: u32, mut body: impl FnMut()) -> f64 {
    let start = Instant::now();
    (0..n).for_each(|_| body());
    start.elapsed().as_nanos() as f64 / f64::from(n)
}

/// Medians of two measurements taken in turn, so that both see the same state of the machine.
pub fn pairs(rounds: u32, mut a: impl FnMut() -> f64, mut b: impl FnMut() -> f64) -> (f64, f64) {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        left.push(a());
        right.push(b());
    }
    (median(&mut left), median(&mut right))
}
