//! `kvtier lab`: reads, generates, converts and replays traces; compares eviction policies and
//! explains their choices; simulates many engines on one remote; measures sparse policies.

mod compare;
mod experts;
mod explain;
pub mod html;
pub mod parse;
pub mod plot;
mod scale;
mod scale_table;
mod sparse;
mod table;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use kvtier::base::sync::cores;
use kvtier::io::source::Source;
use kvtier::meta::cost::Cost;
use kvtier::policy::registry;
use kvtier::trace::generate::{self, GenOpts};
use kvtier::trace::reader::{self, ReadOpts};
use kvtier::trace::requests::Trace;
use kvtier::trace::{format, study::Study};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The commands of `kvtier lab`.
#[derive(Subcommand)]
pub enum Command {
    /// Replay a trace under several policies and sizes
    Compare(Box<compare::Args>),
    /// List the next victims at a point of a trace, and why they are chosen
    Explain(explain::Args),
    /// Compare eviction policies for the experts of a model on a routing trace
    Experts(experts::Args),
    /// Simulate a trace on many engines that share a remote
    Scale(Box<scale::Args>),
    /// Generate a workload
    Gen {
        /// chat, agent, batch, multitenant or burst
        #[arg(long)]
        kind: String,
        /// Duration, such as 90s, 10m, 2h
        #[arg(long, default_value = "10m")]
        duration: String,
        /// Seed; equal seeds generate equal workloads
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Sessions started a second; 0 = default of the kind
        #[arg(long, default_value_t = 0.0)]
        rate: f64,
        /// Tokens in a block
        #[arg(long, default_value_t = 512)]
        block_tokens: u32,
        /// The file to write
        #[arg(long, short)]
        out: PathBuf,
    },
    /// Write a trace in kvtier's compact format
    Convert {
        #[command(flatten)]
        input: Input,
        /// The trace to read; - = the standard input
        from: PathBuf,
        /// The file to write
        to: PathBuf,
    },
    /// List the eviction policies
    Policies,
    /// Measure the answers and perplexity of sparse policies under token budgets
    Sparse(sparse::Args),
}

/// Options of reading a trace.
#[derive(Args, Clone)]
pub struct Input {
    /// kvtier, mooncake, weka, sharegpt, azure, oracle or csv; by default detected from the content
    #[arg(long)]
    format: Option<String>,
    /// Tokens in a block, if the file does not define it
    #[arg(long, default_value_t = 512)]
    block_tokens: u32,
    /// Seed of session starts, for files without time stamps
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Mean time between generated session starts, such as 120s; by default that of the format
    #[arg(long)]
    gap: Option<String>,
    /// Requests after this time are left out, for files without time stamps
    #[arg(long, default_value = "24h")]
    within: String,
}

impl Input {
    /// Reads a trace; `-` is the standard input.
    fn read(&self, path: &Path) -> Outcome<Trace> {
        let opts = ReadOpts {
            kind: self.format.as_deref().map(reader::kind_of).transpose()?,
            block_tokens: self.block_tokens,
            seed: self.seed,
            gap_ns: self.gap.as_deref().map(parse::duration_ns).transpose()?.unwrap_or(0),
            duration_ns: parse::duration_ns(&self.within)?,
        };
        if path == Path::new("-") {
            let read = Source::stdin().and_then(|mut source| reader::read(&mut source, &opts));
            return Ok(read.map_err(|e| e.within("standard input"))?);
        }
        Ok(reader::open(path, &opts)?)
    }
}

/// Runs a command.
pub fn run(command: Command) -> Outcome<()> {
    match command {
        Command::Compare(args) => compare::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Experts(args) => experts::run(&args),
        Command::Scale(args) => scale::run(&args),
        Command::Sparse(args) => sparse::run(&args),
        Command::Gen { kind, duration, seed, rate, block_tokens, out } => {
            let duration_ns = parse::duration_ns(&duration)?;
            let kind = generate::kind_of(&kind)?;
            let opts = GenOpts { kind, duration_ns, seed, rate, block_tokens };
            save(&generate::make(&opts)?, &out)
        }
        Command::Convert { input, from, to } => save(&input.read(&from)?, &to),
        Command::Policies => {
            for entry in registry::ENTRIES {
                let aliases = match entry.aliases {
                    [] => String::new(),
                    some => format!(" (also {})", some.join(", ")),
                };
                println!("{:<14} {}{aliases}", entry.name, entry.about);
            }
            Ok(())
        }
    }
}

/// A progress bar on standard error; hidden if `quiet` or without a terminal.
fn progress_bar(length: usize, style: &str, quiet: bool) -> Outcome<ProgressBar> {
    if quiet || !std::io::stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let style = ProgressStyle::with_template(style)?.progress_chars("=> ");
    Ok(ProgressBar::new(length as u64).with_style(style))
}

/// Runs `count` jobs on `threads` threads; 0 = the number of cores. Results are in the order of
/// the jobs. After a failure no further job starts, and the second argument of `work` returns
/// false, so that running jobs can stop.
fn run_parallel<T: Send>(
    count: usize,
    threads: usize,
    work: impl Fn(usize, &dyn Fn() -> bool) -> Outcome<T> + Sync,
) -> Outcome<Vec<T>> {
    let threads = if threads == 0 { cores() } else { threads }.min(count).min(256);
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<T>>> = Mutex::new((0..count).map(|_| None).collect());
    let failure: Mutex<Option<String>> = Mutex::new(None);
    let has_failed = || failure.lock().unwrap_or_else(|e| e.into_inner()).is_some();
    let body = || {
        while !has_failed() {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                break;
            }
            match work(at, &|| !has_failed()) {
                Ok(done) => results.lock().unwrap_or_else(|e| e.into_inner())[at] = Some(done),
                Err(error) => {
                    let mut first = failure.lock().unwrap_or_else(|e| e.into_inner());
                    first.get_or_insert(error.to_string());
                }
            }
        }
    };
    std::thread::scope(|scope| {
        (0..threads).for_each(|_| drop(scope.spawn(body)));
    });
    if let Some(error) = failure.into_inner().unwrap_or_else(|e| e.into_inner()) {
        return Err(error.into());
    }
    Ok(results.into_inner().unwrap_or_else(|e| e.into_inner()).into_iter().flatten().collect())
}

fn save(trace: &Trace, path: &Path) -> Outcome<()> {
    let bytes = format::write(trace)?;
    std::fs::write(path, &bytes).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("{}", describe(trace)?);
    println!("{}: {}", path.display(), crate::human(bytes.len() as u64));
    Ok(())
}

/// A summary of a trace in one line.
fn describe(trace: &Trace) -> Outcome<String> {
    let study = Study::of(trace, &Cost::default())?;
    let floor = &study.floor;
    Ok(format!(
        "{} requests in {:.1} h, {} sessions{}, {} references to blocks of {} tokens, {} distinct; \
         an unbounded cache hits {:.1} % of {} tokens",
        trace.requests().len(),
        trace.duration_ns() as f64 / 3.6e12,
        study.session_count,
        if study.sessions_named { "" } else { " (inferred from prefixes)" },
        trace.references(),
        trace.block_tokens(),
        trace.uniques(),
        100.0 * floor.hit_tokens as f64 / floor.tokens.max(1) as f64,
        floor.tokens,
    ))
}
