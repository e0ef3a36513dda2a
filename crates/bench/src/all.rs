//! `kvtier-bench all`: runs every group in a process of its own, and writes one page and one JSON.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::fixtures::{Outcome, Scratch, say};
use super::{GROUPS, history, page};

/// The arguments of `all`.
#[derive(clap::Args)]
pub struct Args {
    /// Measure each group as `GROUP --quick` does
    #[arg(long)]
    quick: bool,
    /// Groups to measure, with commas between; by default all groups
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Minutes for the whole run; groups without time left are skipped
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: u64,
    /// Write a page of HTML
    #[arg(long)]
    html: Option<PathBuf>,
    /// Write the run, with the history of each bar, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Directory with history/ and results/ of earlier runs
    #[arg(long, default_value = "docs/benchmarks")]
    history: PathBuf,
    /// Save the run in history/
    #[arg(long)]
    record: bool,
    /// Show the run in this file; measure nothing
    #[arg(long, conflicts_with_all = ["quick", "only", "minutes", "record"])]
    from: Option<PathBuf>,
    /// Exit with 1 if a bar is over 10 % worse than in the last run on the same kind of machine
    #[arg(long)]
    fail_on_regression: bool,
}

/// What a group needs beyond two cores and 4 GiB of memory, and how to get it.
fn needs(group: &str) -> &'static str {
    match group {
        "cache" => "build with `--features peers`",
        "device" => "needs an NVIDIA GPU and its driver (libcuda.so.1)",
        "remote" => "install redis-server and redis-benchmark (Debian: redis-server, redis-tools)",
        "scale" => "needs 4 GiB of free memory, and 9 GiB of disk in KVTIER_BENCH_DIR",
        "stream" => "needs root, a memory controller of cgroups, and O_DIRECT in KVTIER_BENCH_DIR",
        _ => "",
    }
}

/// Runs the groups, or reads a run, and writes what was asked for.
pub fn run(args: &Args) -> Outcome<()> {
    let mut run = match &args.from {
        Some(path) => history::read(path)?,
        None => measure(args)?,
    };
    if args.record {
        println!("{}", history::record(&args.history, &run)?.display());
    }
    history::compare(&mut run, &args.history)?;
    if let Some(path) = &args.json {
        std::fs::write(path, history::text(&run))
            .map_err(|e| format!("{}: {e}", path.display()))?;
    }
    if let Some(path) = &args.html {
        std::fs::write(path, page::html(&run)).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let regressions = history::list(&run, "regressions");
    for one in regressions {
        eprintln!("regression: {}", page::regression(one));
    }
    match args.fail_on_regression && !regressions.is_empty() {
        true => Err(format!("{} bars are over 10 % worse", regressions.len())),
        false => Ok(()),
    }
}

/// Runs the groups one after the other.
fn measure(args: &Args) -> Outcome<Value> {
    let names: Vec<&str> = GROUPS.iter().map(|group| group.0).collect();
    if let Some(name) = args.only.iter().find(|name| !names.contains(&name.as_str())) {
        return Err(format!("unknown group '{name}'; `kvtier-bench` lists the groups"));
    }
    let is_chosen = |name: &&str| args.only.is_empty() || args.only.iter().any(|one| one == name);
    let chosen: Vec<&str> = names.into_iter().filter(is_chosen).collect();
    let mut run = head(args.quick);
    let (start, whole) = (Instant::now(), Duration::from_secs(60 * args.minutes));
    let mut bars = Vec::new();
    for (at, group) in chosen.iter().enumerate() {
        // A group may take three times its share of the time that is left.
        let left = whole.saturating_sub(start.elapsed());
        let limit = left.min(3 * left / (chosen.len() - at) as u32);
        eprintln!("{group} ({} of {}, {} s)", at + 1, chosen.len(), start.elapsed().as_secs());
        bars.extend(child(group, args.quick, limit)?);
    }
    run["seconds"] = start.elapsed().as_secs().into();
    run["bars"] = bars.into();
    Ok(run)
}

/// Runs a group in a process, for at most `limit`.
fn child(group: &str, quick: bool, limit: Duration) -> Outcome<Vec<Value>> {
    if limit < Duration::from_secs(1) {
        return Ok(vec![skipped(group, "no time is left: raise --minutes")]);
    }
    let mut command = Command::new(std::env::current_exe().map_err(say)?);
    command.args([group, "--json"]).stdin(Stdio::null()).stdout(Stdio::piped());
    if quick {
        command.arg("--quick");
    }
    let mut process = command.spawn().map_err(say)?;
    let mut pipe = process.stdout.take().ok_or("no pipe")?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        pipe.read_to_string(&mut text).map(|_| text)
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = process.try_wait().map_err(say)? {
            break Some(status);
        }
        if start.elapsed() > limit {
            process.kill().map_err(say)?;
            process.wait().map_err(say)?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let why = match status {
        None => format!("stopped after {} s: raise --minutes", limit.as_secs()),
        Some(status) if !status.success() => format!("the group failed: {status}"),
        Some(_) => {
            let text = reader.join().map_err(|_| "a reader panicked")?.map_err(say)?;
            let bars = text.lines().map(|line| serde_json::from_str(line).map_err(say));
            return Ok(bars.collect::<Outcome<Vec<Value>>>()?.into_iter().map(completed).collect());
        }
    };
    Ok(vec![skipped(group, &why)])
}

/// A bar in place of a group that gave none.
fn skipped(group: &str, why: &str) -> Value {
    completed(json!({ "group": group, "bar": group, "value": null, "note": why }))
}

/// A bar with its ratio to the baseline, or with the reason why it was skipped. A difference from
/// the baseline has no ratio.
fn completed(mut bar: Value) -> Value {
    let (value, baseline) = (bar["value"].as_f64(), bar["baseline_value"].as_f64());
    let is_difference = bar["unit"].as_str().is_some_and(|unit| unit.ends_with(" more"));
    bar["ratio"] = match (value, baseline) {
        (Some(value), Some(baseline)) if baseline != 0.0 && !is_difference => {
            (value / baseline).into()
        }
        _ => Value::Null,
    };
    if value.is_none() {
        let note = bar["note"].as_str().unwrap_or("no reason given");
        let words = [note.trim_start_matches("SKIP: "), needs(bar["group"].as_str().unwrap_or(""))];
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        bar["skip"] = format!("SKIP: {}", words.join("; ")).into();
    }
    bar
}

/// What a run is measured with: code, machine, date.
fn head(quick: bool) -> Value {
    json!({
        "date": date(),
        "commit": commit(),
        "version": env!("CARGO_PKG_VERSION"),
        "profile": kvtier_cli::PROFILE,
        "quick": quick,
        "machine": {
            "cpu": field("/proc/cpuinfo", "model name"),
            "cores": std::thread::available_parallelism().map_or(0, |cores| cores.get()),
            "memory_gib": memory_gib(),
            "kernel": word("/proc/sys/kernel/osrelease"),
            "disk": disk(),
        },
        "load": word("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" "),
    })
}

/// The time in UTC, as in 2026-11-28T16:40:00Z.
fn date() -> String {
    // SAFETY: valid outputs; both calls take no other state.
    let time = unsafe {
        let (now, mut time) = (libc::time(std::ptr::null_mut()), std::mem::zeroed::<libc::tm>());
        libc::gmtime_r(&now, &mut time);
        time
    };
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z",
        time.tm_year + 1900,
        time.tm_mon + 1,
        time.tm_mday,
        time.tm_hour,
        time.tm_min,
        time.tm_sec
    )
}

/// The commit of the working directory, with `+` if files differ from it.
fn commit() -> String {
    let output =
        Command::new("git").args(["describe", "--always", "--dirty=+", "--exclude=*"]).output();
    match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_string()
        }
        _ => "unknown".to_string(),
    }
}

/// The contents of a small file; empty if it cannot be read.
fn word(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_string()
}

/// The first value of a field, as in `NAME : VALUE`.
fn field(path: &str, name: &str) -> String {
    let text = word(path);
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    let found = pairs.find(|(field, _)| field.trim() == name);
    found.map_or("unknown".to_string(), |(_, value)| value.trim().to_string())
}

fn memory_gib() -> Option<f64> {
    let kib = field("/proc/meminfo", "MemTotal");
    let kib: f64 = kib.strip_suffix(" kB")?.parse().ok()?;
    Some((kib / f64::from(1 << 20) * 10.0).round() / 10.0)
}

/// File system and device of the directory in which groups write.
fn disk() -> String {
    let scratch = Scratch::new("all");
    let dir = scratch.0.parent().and_then(|dir| dir.canonicalize().ok()).unwrap_or_default();
    let text = word("/proc/self/mountinfo");
    let mounts = text.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let at = left.split(' ').nth(4)?;
        let mut kind = right.split(' ');
        dir.starts_with(at).then_some((at.len(), format!("{} on {}", kind.next()?, kind.next()?)))
    });
    // The last of equals is mounted over the others.
    mounts.max_by_key(|(length, _)| *length).map_or("unknown".to_string(), |(_, words)| words)
}
