//! One method of passes over a model, in its own process: a memory cgroup is then charged for the
//! page cache that it fills.
//!
//! The process prints one line of JSON when it is ready, and one for each line of its input, which
//! is a number of passes after a warm-up pass. A line with an `error` is the last one.

use std::fs::File;
use std::io::{BufRead, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::ValueEnum;
use kvtier::base::checksum::checksum;
use kvtier::base::machine::MemoryFacts;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::stream::model::Model;
use kvtier::stream::plan::{Placement, PlanOptions, Residency};
use kvtier::stream::streamer::{AcquireOpts as Ask, Opts, Streamer};
use kvtier::stream::units::Units;
use serde_json::json;

use kvtier_cli::stream::{Files, Outcome, sum};

/// The method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AcquireOpts {
    /// A memory map
    Map,
    /// The streamer, with resident units at equal distances
    Interleaved,
    /// The streamer, with the first units resident
    First,
}

/// The arguments of the process.
#[derive(clap::Args)]
pub struct Args {
    /// The method
    #[arg(long, value_enum)]
    how: AcquireOpts,
    /// Folder of the cgroup to join first
    #[arg(long)]
    cgroup: Option<PathBuf>,
    /// Host memory for the streamer in bytes; by default that of the machine
    #[arg(long)]
    host: Option<u64>,
    #[command(flatten)]
    files: Files,
}

/// A file in memory.
struct Map {
    address: *mut libc::c_void,
    bytes: usize,
}

impl Map {
    fn new(path: &Path) -> Outcome<Map> {
        let file = File::open(path)?;
        let bytes = usize::try_from(file.metadata()?.len())?;
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: a new mapping of an open file.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file.as_raw_fd(), 0)
        };
        match address {
            libc::MAP_FAILED => Err(std::io::Error::last_os_error().into()),
            address => Ok(Map { address, bytes }),
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `new`, which is not used any more.
        unsafe { libc::munmap(self.address, self.bytes) };
    }
}

enum Subject {
    Map(Vec<Map>, Units),
    Stream { streamer: Streamer, _runtime: Runtime },
}

impl Subject {
    fn open(args: &Args, (model, units): (Model, Units)) -> Outcome<Subject> {
        let placement = match args.how {
            AcquireOpts::Map => {
                let maps = model.files.iter().map(|file| Map::new(&file.path));
                return Ok(Subject::Map(maps.collect::<Outcome<_>>()?, units));
            }
            AcquireOpts::Interleaved => Placement::Interleaved,
            AcquireOpts::First => Placement::First,
        };
        let plan_options = PlanOptions {
            placement,
            host_ceiling_bytes: args.host,
            host_reserve_bytes: args.host.map(|_| 0),
            kv_bytes: args.host.map(|_| 0),
            ..PlanOptions::default()
        };
        let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() })?;
        let opts = Opts { plan_options, ..Opts::default() };
        let streamer = Streamer::open(runtime.core(), model, units, opts)?;
        streamer.load(0)?;
        Ok(Subject::Stream { streamer, _runtime: runtime })
    }

    /// Reads every byte of every unit in order; returns a checksum.
    fn pass(&self) -> Outcome<u64> {
        let mut all = 0u64;
        let mut add = |sum: u64| all = all.rotate_left(7) ^ sum;
        match self {
            Subject::Map(maps, units) => {
                for unit in &units.units {
                    let of = |sum: u64, extent: &kvtier::stream::units::Extent| {
                        let map = &maps[extent.file as usize];
                        debug_assert!(extent.offset + extent.bytes <= map.bytes as u64);
                        // SAFETY: the model was checked: extents lie in their files, and the map
                        // has the length of the file.
                        let bytes = unsafe {
                            let start = map.address.cast::<u8>().add(extent.offset as usize);
                            std::slice::from_raw_parts(start, extent.bytes as usize)
                        };
                        sum.rotate_left(1) ^ checksum(bytes)
                    };
                    add(unit.extents.iter().fold(0, of));
                }
            }
            Subject::Stream { streamer, .. } => {
                streamer.pass_begin()?;
                for (number, unit) in (0u32..).zip(&streamer.units().units) {
                    let held = streamer.acquire(number, Ask::default())?;
                    let sum = sum(unit, &held);
                    streamer.release(&held, None)?;
                    add(sum);
                }
                streamer.pass_end()?;
            }
        }
        Ok(all)
    }

    fn ready(&self) -> serde_json::Value {
        let facts = MemoryFacts::probe();
        let Subject::Stream { streamer, .. } = self else { return json!({}) };
        let plan = streamer.plan();
        let streamed = plan.residencies.iter().zip(&streamer.units().units);
        let streamed = streamed.filter(|(residency, _)| **residency == Residency::File);
        let (engine, fallback) = streamer.engine();
        json!({
            "moved_bytes": streamed.clone().map(|(_, unit)| unit.bytes).sum::<u64>(),
            "moved_units": streamed.count(),
            "units": plan.residencies.len(),
            "host_bytes": plan.host_bytes,
            "available_bytes": facts.available_bytes,
            "engine": engine,
            "fallback": fallback,
        })
    }
}

fn join(group: &Path) -> Outcome<()> {
    let procs = group.join("cgroup.procs");
    std::fs::write(&procs, std::process::id().to_string())
        .map_err(|error| format!("no memory cgroup to be in: {}: {error}", procs.display()).into())
}

/// Serves requests from the input; prints a failure as an answer.
pub fn run(args: &Args) -> Outcome<()> {
    if let Err(error) = serve(args) {
        // A parent that was stopped reads no answer.
        let _ = writeln!(std::io::stdout(), "{}", json!({ "error": error.to_string() }));
    }
    Ok(())
}

fn serve(args: &Args) -> Outcome<()> {
    if let Some(group) = &args.cgroup {
        join(group)?;
    }
    let subject = Subject::open(args, args.files.open()?)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", subject.ready())?;
    out.flush()?;
    for line in std::io::stdin().lock().lines() {
        let count: u32 = line?.trim().parse()?;
        let sum = subject.pass()?;
        let begun = Instant::now();
        for _ in 0..count {
            if subject.pass()? != sum {
                return Err("a pass read other bytes than the previous one".into());
            }
        }
        let ns = begun.elapsed().as_nanos() as f64 / f64::from(count.max(1));
        writeln!(out, "{}", json!({ "pass_ns": ns, "sum": sum }))?;
        out.flush()?;
    }
    Ok(())
}
