//! The command line tool: what `kvtier` runs, and what `kvtier-bench` shares with it.

mod config;
mod conformance;
mod control;
mod demo;
pub mod direct;
mod doctor;
mod fsck;
mod lab;
mod plan;
mod remote;
pub mod stream;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

/// The profile of cargo that this was built with.
pub const PROFILE: &str = env!("KVTIER_PROFILE");

/// The version, and what the library was built for: `release` builds fast, `dist` is shipped.
pub const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (profile ", env!("KVTIER_PROFILE"), ")");

/// Tiered KV-cache storage for LLM inference engines: the tool beside the library.
#[derive(Parser)]
#[command(name = "kvtier", version = VERSION, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Look at this machine: memory, quotas, I/O, accelerators, and what each means
    Doctor {
        /// Directory a disk tier would live in
        #[arg(long, default_value = ".")]
        path: PathBuf,
        /// A remote to be tried instead: redis://HOST[:PORT], dir:PATH, or a spec as a store's
        #[arg(long, conflicts_with = "path")]
        remote: Option<String>,
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Conversations that do not fit into memory: kept in a store, brought back, compared
    Demo {
        /// Conversations
        #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=4096))]
        sessions: u32,
        /// Worker threads; 0 = as many as cores, at most 4
        #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=64))]
        workers: u32,
        /// Who leaves memory, such as `lru` or `lru,qos(inner=lfu)`: several are compared
        #[arg(long, default_value = "horizon")]
        policies: String,
        /// One JSON object a policy instead of a live view and a table
        #[arg(long)]
        json: bool,
        /// A store's configuration, as `kvtier config` reads it; its directory must not exist
        #[arg(long, value_name = "FILE", conflicts_with_all = ["policies", "workers"])]
        config: Option<PathBuf>,
        /// Open a control socket there: `kvtier top --socket PATH --once` and others look at it
        #[arg(long, value_name = "PATH")]
        control: Option<PathBuf>,
        /// Have conversations come back for so many seconds more, before the table
        #[arg(long, default_value_t = 0, value_name = "SECONDS")]
        linger: u64,
        /// Two processes share a remote instead: redis://HOST[:PORT], dir:PATH, or a spec as a
        /// store's; its secrets are taken from KVTIER_REMOTE_PASSWORD and others (docs/remote.md)
        #[arg(long, conflicts_with_all = ["sessions", "workers", "policies", "config", "control", "linger"])]
        remote: Option<String>,
    },
    /// What the demo of a remote runs in processes of their own
    #[command(hide = true)]
    DemoPart(demo::shared::Args),
    /// Print the spec string of a store's configuration, a TOML file (docs/control.md)
    Config {
        /// The file
        file: PathBuf,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// How much memory, disk and remote hold of a model's KV, and the least sizes
    Plan(plan::Args),
    #[command(flatten)]
    Control(control::Command),
    /// Check a disk tier's directory that nobody has open; 0 = clean, 1 = damaged, 2 = not usable
    Fsck {
        /// The directory
        dir: PathBuf,
        /// One JSON object a line
        #[arg(long)]
        json: bool,
        /// Without its lock, even while the store is in use: what is being written looks damaged
        #[arg(long)]
        read_only: bool,
        /// Most damaged places that are listed
        #[arg(long, default_value_t = 1000)]
        most: usize,
    },
    /// Put a device to the test: the processor, a GPU, or one of your own
    DeviceConformance {
        /// Which device
        kind: conformance::Kind,
        /// A custom device's library, or the CUDA driver's
        #[arg(long, value_name = "PATH")]
        library: Option<PathBuf>,
        /// Which GPU
        #[arg(long, default_value_t = 0)]
        ordinal: u32,
        /// Chooses what is left to chance
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// How often that is tried; 0 = 40
        #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
        rounds: u32,
        /// One JSON object a check
        #[arg(long)]
        json: bool,
    },
    /// Models larger than memory: plan who lives where, stream them, measure that
    Stream {
        #[command(subcommand)]
        command: stream::Command,
    },
    /// Read, make and replay traces; compare eviction policies on them, and sparse ones
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
        Command::Demo { remote: Some(remote), json, .. } => demo::shared::run(&remote, json),
        Command::DemoPart(args) => demo::shared::part(&args),
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

/// Bytes for people.
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
