//! `kvtier lab scale`: simulates a trace on many engines that share a remote.

use std::path::PathBuf;

use kvtier::base::spec::unknown;
use kvtier::trace::replay::ReplayOpts;
use kvtier::trace::requests::Trace;
use kvtier::trace::study::Study;
use kvtier_lab::scale::copies::{self, CopyOpts};
use kvtier_lab::scale::{
    self, LookupUnit, Placement, Prices, RemoteOpts, Router, ScaleOpts, ScaleReport, ShardFailure,
    Write,
};
use kvtier_lab::tiers::{Machine, Tier};

use super::scale_table as table;
use super::{Input, Outcome, compare, describe, parse};

/// Most runs of one call.
const MAX_RUNS: usize = 64;

/// The trace, the engines and the remote.
#[derive(clap::Args)]
pub struct Args {
    /// The trace; - = the standard input
    #[arg(long)]
    trace: PathBuf,
    #[command(flatten)]
    input: Input,
    /// Replay only the first requests
    #[arg(long)]
    head: Option<usize>,
    /// Copies of the trace, each a tenant with its own blocks
    #[arg(long, default_value_t = 1)]
    copies: u32,
    /// Share of branches after common prefixes that all copies share, such as 30%
    #[arg(long, default_value = "0%")]
    shared: String,
    /// Copies start at random times within this duration
    #[arg(long, default_value = "10m")]
    shift: String,
    /// Numbers of engines, separated by commas; one run each
    #[arg(long, default_value = "1,4,16")]
    engines: String,
    /// round, session or prefix, separated by commas; one run each
    #[arg(long, default_value = "session")]
    routers: String,
    /// With prefix: an engine with more than this times the mean load gets no requests
    #[arg(long, default_value_t = 1.25)]
    load_bound: f64,
    /// Eviction policy of the engines' tiers
    #[arg(long, default_value = "lru")]
    policy: String,
    /// Host memory of an engine and its bandwidth
    #[arg(long, default_value = "256GiB@25GB")]
    host: String,
    /// Disk of an engine and its bandwidth, such as 1TiB@5GB
    #[arg(long)]
    disk: Option<String>,
    /// Requests replayed before counting starts: a number, or percent of all
    #[arg(long)]
    warm_up: Option<String>,
    /// Hints for policies: none, stop (stop reasons), think (also the time of the next turn)
    #[arg(long, default_value = "stop")]
    hints: String,
    /// Attention cost of a token per token of context, relative to the other cost of a token
    #[arg(long)]
    alpha: Option<f64>,
    /// Bytes of KV for a token
    #[arg(long, default_value_t = Machine::default().token_bytes)]
    token_bytes: u64,
    /// Microseconds to prefill a token without context
    #[arg(long, default_value_t = Machine::default().unit_ns / 1e3)]
    prefill_us: f64,
    #[command(flatten)]
    remote: Remote,
    #[command(flatten)]
    prices: Price,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// The shared remote.
#[derive(clap::Args)]
struct Remote {
    /// Size of the remote: bytes, unbounded, or none = no remote
    #[arg(long, default_value = "unbounded")]
    remote: String,
    /// Number of shards
    #[arg(long, default_value_t = 16)]
    shards: usize,
    /// Sharding key: object (its name), chunk, or root (of its path)
    #[arg(long, default_value = "object")]
    place: String,
    /// Latency from a request to the first byte
    #[arg(long, default_value = "500us")]
    latency: String,
    /// Bandwidth of an engine in bytes a second, in each direction; 0 = no limit
    #[arg(long, default_value = "5GB")]
    engine_speed: String,
    /// Bandwidth of a shard in bytes a second; 0 = no limit
    #[arg(long, default_value = "2500MB")]
    shard_speed: String,
    /// Largest object, unless a layer is larger
    #[arg(long, default_value = "8MiB")]
    object: String,
    /// Layers of the model
    #[arg(long, default_value_t = 80)]
    layers: u16,
    /// When chunks are uploaded: back (on eviction from host memory), through (when computed),
    /// never
    #[arg(long, default_value = "back")]
    write: String,
    /// Upload only chunks with at least this many uses in host memory
    #[arg(long, default_value_t = 0)]
    hits: u16,
    /// Lookups: object (every object), chunk (its first object)
    #[arg(long, default_value = "object")]
    ask: String,
    /// Look up before uploads, too
    #[arg(long)]
    ask_before_put: bool,
    /// Absent objects that an engine remembers
    #[arg(long, default_value_t = 65_536)]
    known: usize,
    /// Present chunks that an engine remembers
    #[arg(long, default_value_t = 65_536)]
    known_there: usize,
    /// Age at which a present object is looked up again
    #[arg(long, default_value = "60s")]
    fresh: String,
    /// Age at which an absent object is looked up again
    #[arg(long, default_value = "5s")]
    absent: String,
    /// Most gets of one chunk a second, of all engines; 0 = no limit
    #[arg(long, default_value_t = 0)]
    cap: u32,
    /// Fail shards at a time, such as 1@30m. Counting starts then, unless --warm-up is given, and
    /// a run without the failure is made for comparison
    #[arg(long)]
    dead: Option<String>,
    /// Move the objects of failed shards to other shards
    #[arg(long)]
    rehome: bool,
}

/// Prices in any currency.
#[derive(clap::Args)]
struct Price {
    /// A million puts
    #[arg(long, default_value_t = Prices::default().puts)]
    price_puts: f64,
    /// A million gets or lookups
    #[arg(long, default_value_t = Prices::default().gets)]
    price_gets: f64,
    /// A GiB read from the remote
    #[arg(long, default_value_t = Prices::default().gib)]
    price_gib: f64,
    /// A GiB stored for a month
    #[arg(long, default_value_t = Prices::default().gib_month)]
    price_gib_month: f64,
    /// An hour of an engine's accelerators
    #[arg(long, default_value_t = Prices::default().engine_hour)]
    price_engine_hour: f64,
}

/// One run.
pub struct Run {
    /// The result.
    pub report: ScaleReport,
    /// The result without the failure of shards.
    pub whole: Option<ScaleReport>,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<()> {
    let trace = load(args)?;
    if trace.requests().is_empty() {
        return Err("nothing to run: no requests".into());
    }
    let opts = options(args, &trace)?;
    let prices = prices(&args.prices)?;
    let runs = plan(args, &opts)?;
    let study = Study::of(&trace, &opts.replay.cost)?;
    let mut done = Vec::new();
    for opts in &runs {
        let report = scale::run(&trace, &study, opts, &mut |_| true)?;
        let whole = match without_dead(opts) {
            Some(opts) => Some(scale::run(&trace, &study, &opts, &mut |_| true)?),
            None => None,
        };
        done.push(Run { report, whole });
    }
    match args.json {
        true => table::json(&done, &prices, trace.block_tokens()),
        false => {
            println!("{}: {}\n", args.trace.display(), describe(&trace)?);
            table::print(&done, &prices);
        }
    }
    Ok(())
}

fn load(args: &Args) -> Outcome<Trace> {
    let mut trace = args.input.read(&args.trace)?;
    if let Some(requests) = args.head {
        trace = trace.head(requests)?;
    }
    let shared = args.shared.strip_suffix('%').and_then(|text| text.parse::<f64>().ok());
    let opts = CopyOpts {
        copies: args.copies,
        shared: shared.ok_or_else(|| format!("--shared {}: write it such as 30%", args.shared))?
            / 100.0,
        shift_ns: age(&args.shift)?,
        seed: args.input.seed,
    };
    Ok(copies::make(&trace, &opts)?)
}

/// A duration, or 0.
fn age(text: &str) -> Outcome<i64> {
    if matches!(text, "0" | "0s") { Ok(0) } else { parse::duration_ns(text) }
}

/// One of several words.
fn word<T: Copy, const N: usize>(option: &str, text: &str, all: [(&str, T); N]) -> Outcome<T> {
    match all.iter().find(|(name, _)| *name == text) {
        Some((_, value)) => Ok(*value),
        None => Err(unknown(option, text, 0, &all.map(|(name, _)| name)).into()),
    }
}

fn options(args: &Args, trace: &Trace) -> Outcome<ScaleOpts> {
    let tier = |name: &str, text: &str| -> Outcome<Tier> {
        parse::tier(name, text, args.token_bytes, trace)
    };
    let remote = remote(&args.remote)?;
    let dead = remote.as_ref().and_then(|remote| remote.dead);
    let replay = compare::replay_options(&args.hints, args.alpha)?;
    let warm_up = match (&args.warm_up, dead) {
        (Some(text), _) => compare::warm_up(text, trace)?,
        (None, Some(dead)) => {
            let first = trace.requests().first().map_or(0, |request| request.at_ns);
            let before = |at_ns: i64| at_ns - first < dead.at_ns;
            let count = trace.requests().partition_point(|request| before(request.at_ns));
            if count == trace.requests().len() {
                return Err("--dead: no request is after that time, choose an earlier one".into());
            }
            count
        }
        (None, None) => 0,
    };
    Ok(ScaleOpts {
        engines: 1,
        policy: args.policy.clone(),
        host: tier("host", &args.host)?,
        disk: args.disk.as_ref().map(|text| tier("disk", text)).transpose()?,
        router: Router::Session,
        load_bound: args.load_bound,
        remote,
        machine: Machine { token_bytes: args.token_bytes, unit_ns: args.prefill_us * 1e3 },
        replay: ReplayOpts { warm_up, points: 0, timed: false, ..replay },
        seed: args.input.seed,
    })
}

fn remote(args: &Remote) -> Outcome<Option<RemoteOpts>> {
    let bytes = match args.remote.as_str() {
        "none" => return Ok(None),
        "unbounded" => 0,
        text => match parse::bytes(text)? {
            0 => return Err("--remote 0: pass bytes, unbounded or none".into()),
            bytes => bytes,
        },
    };
    let places =
        [("object", Placement::Object), ("chunk", Placement::Chunk), ("root", Placement::Root)];
    let modes = [("back", Write::Back), ("through", Write::Through), ("never", Write::Never)];
    Ok(Some(RemoteOpts {
        bytes,
        shards: args.shards,
        place: word("--place", &args.place, places)?,
        latency_ns: age(&args.latency)?,
        engine_bytes_per_second: parse::bytes(&args.engine_speed)? as f64,
        shard_bytes_per_second: parse::bytes(&args.shard_speed)? as f64,
        object_bytes: parse::bytes(&args.object)?,
        layers: args.layers,
        write: word("--write", &args.write, modes)?,
        hits: args.hits,
        lookup_unit: word(
            "--ask",
            &args.ask,
            [("object", LookupUnit::Object), ("chunk", LookupUnit::Chunk)],
        )?,
        lookup_before_put: args.ask_before_put,
        known: args.known,
        hints: args.known_there,
        fresh_ns: age(&args.fresh)?,
        absent_ns: age(&args.absent)?,
        cap: args.cap,
        dead: args.dead.as_deref().map(dead).transpose()?,
        rehome: args.rehome,
    }))
}

fn dead(text: &str) -> Outcome<ShardFailure> {
    let wrong = || format!("--dead {text}: write it such as 1@30m");
    let (shards, at) = text.split_once('@').ok_or_else(wrong)?;
    let shards = shards.parse().ok().filter(|&n| n > 0).ok_or_else(wrong)?;
    Ok(ShardFailure { shards, at_ns: age(at)? })
}

fn prices(args: &Price) -> Outcome<Prices> {
    let prices = Prices {
        puts: args.price_puts,
        gets: args.price_gets,
        gib: args.price_gib,
        gib_month: args.price_gib_month,
        engine_hour: args.price_engine_hour,
    };
    let all = [prices.puts, prices.gets, prices.gib, prices.gib_month, prices.engine_hour];
    match all.iter().all(|price| (0.0..=1e9).contains(price)) {
        true => Ok(prices),
        false => Err(format!("a price is out of range, allowed is 0 to 1e9: {all:?}").into()),
    }
}

/// The runs: every router with every number of engines.
fn plan(args: &Args, opts: &ScaleOpts) -> Outcome<Vec<ScaleOpts>> {
    let mut runs = Vec::new();
    let words = |text: &str| -> Vec<String> {
        text.split(',').map(|s| s.trim().to_string()).filter(|s| !s.is_empty()).collect()
    };
    for router in words(&args.routers) {
        let router = Router::of(&router)?;
        for engines in words(&args.engines) {
            let engines =
                engines.parse().map_err(|_| format!("'{engines}' is not a number of engines"))?;
            runs.push(ScaleOpts { engines, router, ..opts.clone() });
        }
    }
    if runs.is_empty() || runs.len() > MAX_RUNS {
        return Err(format!("{} runs, allowed are 1 to {MAX_RUNS}", runs.len()).into());
    }
    // Errors are reported before the first run starts.
    for opts in &runs {
        opts.check()?;
    }
    Ok(runs)
}

/// The options without the failure of shards; `None` if none fail.
fn without_dead(opts: &ScaleOpts) -> Option<ScaleOpts> {
    let mut opts = opts.clone();
    opts.remote.as_mut()?.dead.take()?;
    Some(opts)
}
