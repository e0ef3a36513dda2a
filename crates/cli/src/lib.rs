//! The command line tool `kvtier`, and code that `kvtier-bench` shares with it.

mod config;
mod conformance;
mod control;
mod demo;
pub mod direct;
mod doctor;
mod fsck;
mod lab;
pub mod manual;
mod plan;
mod remote;
mod run;
mod serve;
mod spec;
mod store_args;
pub mod stream;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

/// The cargo profile of the build.
pub const PROFILE: &str = env!("KVTIER_PROFILE");

/// Version and cargo profile: `release` builds fast, `dist` is shipped.
pub const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (profile ", env!("KVTIER_PROFILE"), ")");

/// Tools for kvtier, tiered KV-cache storage for LLM inference engines
#[derive(Parser)]
#[command(name = "kvtier", version = VERSION, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check this machine: memory, quotas, I/O, accelerators, and what each finding means
    Doctor {
        /// Directory for a disk tier
        #[arg(long, default_value = ".")]
        path: PathBuf,
        /// Check a remote instead: redis://HOST[:PORT], dir:PATH, or a remote of a store's spec
        #[arg(long, conflicts_with = "path")]
        remote: Option<String>,
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Store conversations that do not fit into memory, load them again, and compare every byte
    Demo {
        /// Number of conversations
        #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=4096))]
        sessions: u32,
        /// Worker threads; 0 = the number of cores, at most 4
        #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=64))]
        workers: u32,
        /// Eviction policies of host memory, such as `lru` or `lru,qos(inner=lfu)`; one run each
        #[arg(long, default_value = "horizon")]
        policies: String,
        /// Print one JSON object a policy instead of a live view and a table
        #[arg(long)]
        json: bool,
        /// Configuration file of a store (see `kvtier config`); its directory must not exist
        #[arg(long, value_name = "FILE", conflicts_with_all = ["policies", "workers"])]
        config: Option<PathBuf>,
        /// Open a control socket at PATH for `kvtier top --socket PATH --once` and others
        #[arg(long, value_name = "PATH")]
        control: Option<PathBuf>,
        /// Keep loading conversations for this many seconds before the table
        #[arg(long, default_value_t = 0, value_name = "SECONDS")]
        linger: u64,
        /// Share KV between two processes through a remote instead: redis://HOST[:PORT], dir:PATH,
        /// or a remote of a store's spec; secrets are read from KVTIER_REMOTE_PASSWORD and others
        #[arg(long, conflicts_with_all = ["sessions", "workers", "policies", "config", "control", "linger"])]
        remote: Option<String>,
    },
    /// One process of `demo --remote`
    #[command(hide = true)]
    DemoPart(demo::remote::Args),
    /// Print the spec string of a store's configuration file, which is TOML
    Config {
        /// The file
        file: PathBuf,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Check spec strings and print their canonical forms; exit 1 = at least one is wrong
    Spec {
        /// The specs, each as one argument; without any, one a line of the standard input
        #[arg(value_name = "SPEC")]
        specs: Vec<String>,
        /// Print one JSON object a spec
        #[arg(long)]
        json: bool,
    },
    /// Write the man pages of this tool
    #[command(hide = true)]
    Man {
        /// Directory, which is created
        dir: PathBuf,
    },
    /// Run a program of llama.cpp, such as llama-server, with a KV cache that outlives it
    Run(run::Args),
    /// Serve one store to several processes of this machine, which share its memory and its disk
    Serve(serve::Args),
    /// Compute how many tokens of a model's KV memory, disk and remote hold, and minimum sizes
    Plan(plan::Args),
    #[command(flatten)]
    Control(control::Command),
    /// Check the directory of a disk tier that is closed; exit 0 = clean, 1 = damaged, 2 = unusable
    Fsck {
        /// The directory
        dir: PathBuf,
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
        /// Do not lock the directory; while the store is open, data being written looks damaged
        #[arg(long)]
        read_only: bool,
        /// Most damaged places to list
        #[arg(long, default_value_t = 1000)]
        most: usize,
    },
    /// Test a device for conformance: the processor, a GPU, or a custom device
    DeviceConformance {
        /// Kind of device
        kind: conformance::Kind,
        /// Library of a custom device, or of the CUDA driver
        #[arg(long, value_name = "PATH")]
        library: Option<PathBuf>,
        /// Ordinal of the GPU
        #[arg(long, default_value_t = 0)]
        ordinal: u32,
        /// Seed of the randomised checks
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Rounds of the randomised checks; 0 = 40
        #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
        rounds: u32,
        /// Print one JSON object a check
        #[arg(long)]
        json: bool,
    },
    /// Stream models larger than memory: plan residency, run passes, measure them
    Stream {
        #[command(subcommand)]
        command: stream::Command,
    },
    /// Read, generate and replay traces; compare eviction policies and sparse policies
    Lab {
        #[command(subcommand)]
        command: lab::Command,
    },
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    env_logger::init();
    let result = match Cli::parse().command {
        Command::Doctor { remote: Some(remote), json, .. } => doctor::remote::run(&remote, json),
        Command::Doctor { path, json, .. } => {
            doctor::run(&path, json);
            Ok(())
        }
        Command::Demo { remote: Some(remote), json, .. } => demo::remote::run(&remote, json),
        Command::DemoPart(args) => demo::remote::role_main(&args),
        Command::Demo { sessions, workers, policies, json, config, control, linger, .. } => {
            let linger = Duration::from_secs(linger);
            let policies = lab::parse::specs(&policies);
            demo::run(&demo::Opts { sessions, workers, policies, json, config, control, linger })
        }
        Command::DeviceConformance { kind, library, ordinal, seed, rounds, json } => {
            let opts = conformance::Opts { kind, library, ordinal, seed, rounds, json };
            return conformance::run(&opts);
        }
        Command::Config { file, json } => config::run(&file, json),
        Command::Spec { specs, json } => spec::run(specs, json),
        Command::Man { dir } => manual::write_man(&dir).map_err(Into::into),
        Command::Run(args) => run::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Control(command) => control::run(command),
        Command::Fsck { dir, json, read_only, most } => {
            return fsck::run(&dir, json, read_only, most);
        }
        Command::Stream { command } => stream::run(command),
        Command::Lab { command } => lab::run(command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvtier: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Bytes with a binary unit.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
