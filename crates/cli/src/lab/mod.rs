//! `kvtier lab`: read, make, convert and replay traces, compare policies on
//! them, and ask why one chose as it did; what many engines on one remote come
//! to; and what sparse policies cost.

mod compare;
mod explain;
pub mod html;
pub mod parse;
pub mod plot;
mod scale;
mod scale_table;
mod sparse;
mod table;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use kvtier::io::source::Source;
use kvtier::meta::cost::Cost;
use kvtier::policy::registry;
use kvtier::trace::generate::{self, GenOpts};
use kvtier::trace::reader::{self, ReadOpts};
use kvtier::trace::requests::Trace;
use kvtier::trace::{format, study::Study};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// What `kvtier lab` does.
#[derive(Subcommand)]
pub enum Command {
    /// Replay a trace under several policies and sizes
    Compare(Box<compare::Args>),
    /// Say who would leave next at a point of a trace, and why
    Explain(explain::Args),
    /// Run a trace on many engines that share a remote
    Scale(Box<scale::Args>),
    /// Make up a workload
    Gen {
        /// chat, agent, batch, multitenant or burst
        #[arg(long)]
        kind: String,
        /// How long it goes on, such as 90s, 10m, 2h
        #[arg(long, default_value = "10m")]
        duration: String,
        /// The same seed makes the same workload
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Sessions that start in a second; 0 = what is usual for the kind
        #[arg(long, default_value_t = 0.0)]
        rate: f64,
        /// Tokens of a block
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
    /// List the policies
    Policies,
    /// Measure what a budget of tokens costs, by sparse policy: questions answered, perplexity
    Sparse(sparse::Args),
}

/// How traces are read.
#[derive(Args, Clone)]
pub struct Input {
    /// kvtier, mooncake, weka, sharegpt, azure, oracle or csv; by default what the content says
    #[arg(long)]
    format: Option<String>,
    /// Tokens of a block, where the file leaves it open
    #[arg(long, default_value_t = 512)]
    block_tokens: u32,
    /// For starts of sessions that the file does not tell
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Mean time between such starts, such as 120s; by default what is usual for the format
    #[arg(long)]
    gap: Option<String>,
    /// What comes later is left out where starts are chosen here
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

fn save(trace: &Trace, path: &Path) -> Outcome<()> {
    let bytes = format::write(trace)?;
    std::fs::write(path, &bytes).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("{}", describe(trace)?);
    println!("{}: {}", path.display(), crate::human(bytes.len() as u64));
    Ok(())
}

/// A trace in a line.
fn describe(trace: &Trace) -> Outcome<String> {
    let study = Study::of(trace, &Cost::default())?;
    let floor = &study.floor;
    Ok(format!(
        "{} requests in {:.1} h, {} sessions{}, {} blocks of {} tokens referenced, {} different; \
         an unbounded cache finds {:.1} % of {} tokens",
        trace.requests().len(),
        trace.duration_ns() as f64 / 3.6e12,
        study.session_count,
        if study.sessions_named { "" } else { " (as the paths tell)" },
        trace.references(),
        trace.block_tokens(),
        trace.uniques(),
        100.0 * floor.hit_tokens as f64 / floor.tokens.max(1) as f64,
        floor.tokens,
    ))
}
