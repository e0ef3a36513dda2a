//! `kvtier lab compare`: replays one trace under several policies and capacities, in parallel.

use std::path::PathBuf;

use kvtier::meta::cost::Cost;
use kvtier::trace::replay::{self, Hints, Replay, ReplayOpts};
use kvtier::trace::requests::Trace;
use kvtier::trace::study::Study;
use kvtier_lab::tiers::{self, Estimate, Machine, Tier};

use super::{Input, Outcome, describe, html, parse, progress_bar, run_parallel, table};

/// The trace, the policies and the capacities.
#[derive(clap::Args)]
pub struct Args {
    /// The trace; - = the standard input
    #[arg(long)]
    trace: PathBuf,
    #[command(flatten)]
    input: Input,
    /// Policy specs, separated by commas
    #[arg(long, default_value = "lru,fifo")]
    policies: String,
    /// Capacities, separated by commas: blocks, or percent of the distinct blocks of the trace
    #[arg(long, default_value = "1%,5%,10%")]
    sizes: String,
    /// Replay cells: every block has this many layers
    #[arg(long, default_value_t = 1)]
    layers: u32,
    /// The engine can use blocks behind a hole
    #[arg(long)]
    holes: bool,
    /// Replay every block as a request of its own, without prefixes
    #[arg(long)]
    flat: bool,
    /// Replay only the first requests
    #[arg(long)]
    head: Option<usize>,
    /// Requests replayed before counting starts: a number, or percent of all
    #[arg(long, default_value = "0")]
    warm_up: String,
    /// Hints for policies: none, stop (stop reasons), think (also the time of the next turn)
    #[arg(long, default_value = "stop")]
    hints: String,
    /// Attention cost of a token per token of context, relative to the other cost of a token
    #[arg(long)]
    alpha: Option<f64>,
    /// Memory of the accelerator, such as 40GiB; tiers replace --sizes
    #[arg(long)]
    device: Option<String>,
    /// Host memory and its bandwidth to the accelerator, such as 200GiB@25GB
    #[arg(long)]
    host: Option<String>,
    /// Disk and its bandwidth, such as 1TiB@5GB
    #[arg(long)]
    disk: Option<String>,
    /// Bytes of KV for a token
    #[arg(long, default_value_t = Machine::default().token_bytes)]
    token_bytes: u64,
    /// Microseconds to prefill a token without context
    #[arg(long, default_value_t = Machine::default().unit_ns / 1e3)]
    prefill_us: f64,
    /// Parallel runs; 0 = the number of cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print CSV
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    /// Write a self-contained page with plots
    #[arg(long)]
    html: Option<PathBuf>,
}

/// A run: a policy at a capacity.
pub struct Run {
    /// The result.
    pub estimate: Estimate,
    /// Whether tiers were simulated.
    pub tiered: bool,
}

struct Job {
    spec: String,
    blocks: u64,
}

struct Work<'a> {
    trace: &'a Trace,
    study: &'a Study,
    tiers: &'a [Tier],
    machine: Machine,
    opts: ReplayOpts,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<()> {
    let trace = load(args)?;
    let opts = ReplayOpts { warm_up: warm_up(&args.warm_up, &trace)?, ..options(args)? };
    let tiers = tiers_of(args, &trace)?;
    let sizes = match tiers.is_empty() {
        true => parse::sizes(&args.sizes, &trace)?,
        false => vec![tiers.iter().map(|t| t.blocks).sum()],
    };
    let specs = parse::specs(&args.policies);
    if trace.requests().is_empty() || specs.is_empty() || sizes.is_empty() {
        return Err("nothing to compare: no requests, no policies or no sizes".into());
    }
    let study = Study::of(&trace, &opts.cost)?;
    // Errors in specs are reported before the first replay starts.
    for spec in &specs {
        Replay::open(&trace, &study, spec, 1, &opts).map_err(|e| format!("{spec}: {e}"))?;
    }
    let jobs: Vec<Job> = sizes
        .iter()
        .flat_map(|&blocks| specs.iter().map(move |spec| Job { spec: spec.clone(), blocks }))
        .collect();
    let machine = Machine { token_bytes: args.token_bytes, unit_ns: args.prefill_us * 1e3 };
    let work = Work { trace: &trace, study: &study, tiers: &tiers, machine, opts };
    let runs = work.all(&jobs, args.threads, args.csv || args.json)?;
    let about = format!("{}: {}", args.trace.display(), describe(&trace)?);
    match (args.csv, args.json) {
        (true, _) => table::csv(&runs),
        (_, true) => table::json(&runs),
        _ => table::print(&about, &runs),
    }
    if let Some(path) = &args.html {
        let page = html::page(&about, &runs, &trace);
        std::fs::write(path, page).map_err(|e| format!("{}: {e}", path.display()))?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

fn load(args: &Args) -> Outcome<Trace> {
    let mut trace = args.input.read(&args.trace)?;
    if let Some(requests) = args.head {
        trace = trace.head(requests)?;
    }
    Ok(if args.flat { trace.flat()? } else { trace })
}

/// The number of requests of the warm-up.
pub fn warm_up(text: &str, trace: &Trace) -> Outcome<usize> {
    let total = trace.requests().len();
    let count = match text.strip_suffix('%') {
        Some(percent) => percent.parse::<f64>().ok().map(|p| (total as f64 * p / 100.0) as usize),
        None => text.parse().ok(),
    };
    match count {
        Some(count) if count < total || count == 0 => Ok(count),
        _ => Err(format!("--warm-up {text} leaves nothing to count of {total} requests").into()),
    }
}

fn options(args: &Args) -> Outcome<ReplayOpts> {
    if !(args.prefill_us > 0.0 && args.prefill_us <= 1e9) {
        return Err(format!("--prefill-us {} is not above 0 and up to 1e9", args.prefill_us).into());
    }
    let (holes, layers) = (args.holes, args.layers);
    Ok(ReplayOpts { holes, layers, ..replay_options(&args.hints, args.alpha)? })
}

/// The hints for policies, and the cost of computing.
pub fn replay_options(hints: &str, alpha: Option<f64>) -> Outcome<ReplayOpts> {
    let hints = match hints {
        "none" => Hints::None,
        "stop" => Hints::Stop,
        "think" => Hints::Think,
        other => return Err(format!("--hints {other} is not one of none, stop or think").into()),
    };
    let mut cost = Cost::default();
    if let Some(alpha) = alpha {
        if !(0.0..=1e6).contains(&alpha) {
            return Err(format!("--alpha {alpha} is not from 0 to 1e6").into());
        }
        cost.alpha = alpha;
    }
    Ok(ReplayOpts { hints, cost, ..ReplayOpts::default() })
}

fn tiers_of(args: &Args, trace: &Trace) -> Outcome<Vec<Tier>> {
    let all = [("device", &args.device), ("host", &args.host), ("disk", &args.disk)];
    let passed = all.into_iter().filter_map(|(name, text)| Some((name, text.as_ref()?)));
    passed.map(|(name, text)| parse::tier(name, text, args.token_bytes, trace)).collect()
}

impl Work<'_> {
    fn run_job(&self, job: &Job, watch: &mut dyn FnMut(usize) -> bool) -> Outcome<Run> {
        let (trace, study, opts) = (self.trace, self.study, &self.opts);
        let tiered = !self.tiers.is_empty();
        let estimate = match tiered {
            true => tiers::run(trace, study, &job.spec, self.tiers, &self.machine, opts, watch)?,
            false => {
                let report = replay::run(trace, study, &job.spec, job.blocks, opts, watch)?;
                Estimate { report, ..Estimate::default() }
            }
        };
        Ok(Run { estimate, tiered })
    }

    /// Runs every job in parallel; the results are in the order of the jobs.
    fn all(&self, jobs: &[Job], threads: usize, quiet: bool) -> Outcome<Vec<Run>> {
        let style = "replaying [{bar:40}] {percent:>3} %  {elapsed_precise}, {eta} to go";
        let bar = progress_bar(jobs.len() * self.trace.requests().len(), style, quiet)?;
        let runs = run_parallel(jobs.len(), threads, |at, go_on| {
            let (job, mut reported) = (&jobs[at], 0);
            let mut watch = |done: usize| {
                bar.inc((done - reported) as u64);
                reported = done;
                go_on()
            };
            self.run_job(job, &mut watch)
                .map_err(|error| format!("{} at {} blocks: {error}", job.spec, job.blocks).into())
        });
        bar.finish_and_clear();
        runs
    }
}
