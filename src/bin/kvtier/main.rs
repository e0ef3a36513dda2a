//! The command line tool.

mod bench;
mod demo;
mod doctor;
mod lab;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tiered KV-cache storage for LLM inference engines: the tool beside the library.
#[derive(Parser)]
#[command(name = "kvtier", version)]
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
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Move and verify KV chunks of many sessions through ops and queues
    Demo {
        /// Sessions
        #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=4096))]
        sessions: u32,
        /// Worker threads; 0 = as many as cores, at most 4
        #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=256))]
        workers: u32,
        /// One JSON object at the end instead of progress bars and a table
        #[arg(long)]
        json: bool,
    },
    /// Measure a group of bars against baselines of the same run; without a group, list them
    Bench {
        /// The group
        group: Option<String>,
        /// Finish within 50 seconds
        #[arg(long)]
        quick: bool,
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Read, make and replay traces; compare eviction policies on them
    Lab {
        #[command(subcommand)]
        command: lab::Command,
    },
}

fn main() -> ExitCode {
    env_logger::init();
    let result = match Cli::parse().command {
        Command::Doctor { path, json } => {
            doctor::run(&path, json);
            Ok(())
        }
        Command::Demo { sessions, workers, json } => demo::run(sessions, workers, json),
        Command::Bench { group: None, .. } => {
            bench::list();
            Ok(())
        }
        Command::Bench { group: Some(group), quick, json } => match bench::run(&group, quick, json)
        {
            true => Ok(()),
            false => Err(format!("there is no group '{group}'; `kvtier bench` lists them").into()),
        },
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
