//! `kvtier lab compare`: several policies at several sizes on one trace, as many
//! at a time as there are threads.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use kvtier::base::sync::cores;
use kvtier::meta::cost::Cost;
use kvtier::trace::replay::{self, Hints, Replay, ReplayOpts};
use kvtier::trace::requests::Trace;
use kvtier::trace::study::Study;
use kvtier_lab::tiers::{self, Estimate, Machine, Tier};

use super::{Input, Outcome, describe, html, parse, table};

/// What to compare.
#[derive(clap::Args)]
pub struct Args {
    /// The trace; - = the standard input
    #[arg(long)]
    trace: PathBuf,
    #[command(flatten)]
    input: Input,
    /// Policy specs between commas
    #[arg(long, default_value = "lru,fifo")]
    policies: String,
    /// Sizes between commas: blocks, or percent of the different blocks of the trace
    #[arg(long, default_value = "1%,5%,10%")]
    sizes: String,
    /// Replay cells: every block in so many layers
    #[arg(long, default_value_t = 1)]
    layers: u32,
    /// The engine can use what lies behind a hole
    #[arg(long)]
    holes: bool,
    /// Every block a request of its own, without prefixes
    #[arg(long)]
    flat: bool,
    /// Only so many requests
    #[arg(long)]
    head: Option<usize>,
    /// Requests replayed before counting starts: a number, or percent of all
    #[arg(long, default_value = "0")]
    warm_up: String,
    /// What policies are told: none, stop (reasons), think (also when the next turn comes)
    #[arg(long, default_value = "stop")]
    hints: String,
    /// Attention cost of a token per token of context, where computing a token costs 1
    #[arg(long)]
    alpha: Option<f64>,
    /// Memory of the accelerator, such as 40GiB; with tiers, --sizes is not used
    #[arg(long)]
    device: Option<String>,
    /// Host memory and its speed to the accelerator, such as 200GiB@25GB
    #[arg(long)]
    host: Option<String>,
    /// Disk and its speed, such as 1TiB@5GB
    #[arg(long)]
    disk: Option<String>,
    /// Bytes of KV of a token
    #[arg(long, default_value_t = Machine::default().token_bytes)]
    token_bytes: u64,
    /// Microseconds to prefill a token without context
    #[arg(long, default_value_t = Machine::default().unit_ns / 1e3)]
    prefill_us: f64,
    /// Runs at a time; 0 = one a core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print comma separated values
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    /// Write a page with plots that needs no network
    #[arg(long)]
    html: Option<PathBuf>,
}

/// One run: a policy at a size.
pub struct Run {
    /// What came of it.
    pub estimate: Estimate,
    /// Whether it ran on tiers.
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

/// Compares.
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
    // What cannot be opened is told before the first replay starts.
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
        eprintln!("{} is written", path.display());
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

/// How many requests are not counted.
pub fn warm_up(text: &str, trace: &Trace) -> Outcome<usize> {
    let total = trace.requests().len();
    let count = match text.strip_suffix('%') {
        Some(percent) => percent.parse::<f64>().ok().map(|p| (total as f64 * p / 100.0) as usize),
        None => text.parse().ok(),
    };
    match count {
        Some(count) if count < total || count == 0 => Ok(count),
        _ => Err(format!("--warm-up {text} leaves nothing of {total} requests").into()),
    }
}

fn options(args: &Args) -> Outcome<ReplayOpts> {
    if !(args.prefill_us > 0.0 && args.prefill_us <= 1e9) {
        return Err(format!("--prefill-us {} is out of range", args.prefill_us).into());
    }
    let (holes, layers) = (args.holes, args.layers);
    Ok(ReplayOpts { holes, layers, ..replay_options(&args.hints, args.alpha)? })
}

/// What policies are told, and what computing costs.
pub fn replay_options(hints: &str, alpha: Option<f64>) -> Outcome<ReplayOpts> {
    let hints = match hints {
        "none" => Hints::None,
        "stop" => Hints::Stop,
        "think" => Hints::Think,
        other => return Err(format!("--hints {other}: none, stop or think").into()),
    };
    let mut cost = Cost::default();
    if let Some(alpha) = alpha {
        if !(0.0..=1e6).contains(&alpha) {
            return Err(format!("--alpha {alpha} is out of range").into());
        }
        cost.alpha = alpha;
    }
    Ok(ReplayOpts { hints, cost, ..ReplayOpts::default() })
}

fn tiers_of(args: &Args, trace: &Trace) -> Outcome<Vec<Tier>> {
    let all = [("device", &args.device), ("host", &args.host), ("disk", &args.disk)];
    let given = all.into_iter().filter_map(|(name, text)| Some((name, text.as_ref()?)));
    given.map(|(name, text)| parse::tier(name, text, args.token_bytes, trace)).collect()
}

impl Work<'_> {
    fn one(&self, job: &Job, watch: &mut dyn FnMut(usize) -> bool) -> Outcome<Run> {
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

    /// Runs every job, in any order; the results are in the order of the jobs.
    fn all(&self, jobs: &[Job], threads: usize, quiet: bool) -> Outcome<Vec<Run>> {
        let threads = if threads == 0 { cores() } else { threads }.min(jobs.len()).min(256);
        let bar = progress(jobs.len() * self.trace.requests().len(), quiet)?;
        let next = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<Run>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
        let failed: Mutex<Option<String>> = Mutex::new(None);
        let lock = |slot: &Mutex<Option<String>>, text: String| {
            slot.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(text);
        };
        let body = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(at) else { break };
                let mut told = 0;
                let mut watch = |done: usize| {
                    bar.inc((done - told) as u64);
                    told = done;
                    next.load(Ordering::Relaxed) != usize::MAX / 2
                };
                match self.one(job, &mut watch) {
                    Ok(run) => {
                        *results[at].lock().unwrap_or_else(|e| e.into_inner()) = Some(run);
                    }
                    Err(error) => {
                        lock(&failed, format!("{} at {} blocks: {error}", job.spec, job.blocks));
                        // Nothing more is started, and what runs stops.
                        next.store(usize::MAX / 2, Ordering::Relaxed);
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            (0..threads).for_each(|_| drop(scope.spawn(body)));
        });
        bar.finish_and_clear();
        if let Some(error) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
            return Err(error.into());
        }
        let taken = results.into_iter().filter_map(|r| r.into_inner().ok().flatten());
        Ok(taken.collect())
    }
}

fn progress(requests: usize, quiet: bool) -> Outcome<ProgressBar> {
    if quiet || !std::io::stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let style = "replaying [{bar:40}] {percent:>3} %  {elapsed_precise}, {eta} to go";
    let style = ProgressStyle::with_template(style)?.progress_chars("=> ");
    Ok(ProgressBar::new(requests as u64).with_style(style))
}
