//! `kvtier lab scale`: a trace on many engines that share a remote.

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

/// What to run.
#[derive(clap::Args)]
pub struct Args {
    /// The trace; - = the standard input
    #[arg(long)]
    trace: PathBuf,
    #[command(flatten)]
    input: Input,
    /// Only so many requests
    #[arg(long)]
    head: Option<usize>,
    /// So many copies of the trace, each a tenant with blocks of its own
    #[arg(long, default_value_t = 1)]
    copies: u32,
    /// Part of the branches behind common stems that all copies share, such as 30%
    #[arg(long, default_value = "0%")]
    shared: String,
    /// Copies start at random within this
    #[arg(long, default_value = "10m")]
    shift: String,
    /// Engines between commas: a run for each number
    #[arg(long, default_value = "1,4,16")]
    engines: String,
    /// round, session or prefix, between commas: a run for each
    #[arg(long, default_value = "session")]
    routers: String,
    /// With prefix: no request for an engine with so many times the mean work
    #[arg(long, default_value_t = 1.25)]
    load_bound: f64,
    /// The policy of the engines' tiers
    #[arg(long, default_value = "lru")]
    policy: String,
    /// Host memory of an engine and its speed
    #[arg(long, default_value = "256GiB@25GB")]
    host: String,
    /// Disk of an engine and its speed, such as 1TiB@5GB
    #[arg(long)]
    disk: Option<String>,
    /// Requests replayed before counting starts: a number, or percent of all
    #[arg(long)]
    warm_up: Option<String>,
    /// What policies are told: none, stop (reasons), think (also when the next turn comes)
    #[arg(long, default_value = "stop")]
    hints: String,
    /// Attention cost of a token per token of context, where computing a token costs 1
    #[arg(long)]
    alpha: Option<f64>,
    /// Bytes of KV of a token
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
    /// What fits into the remote: bytes, unbounded, or none = there is no remote
    #[arg(long, default_value = "unbounded")]
    remote: String,
    /// Its shards
    #[arg(long, default_value_t = 16)]
    shards: usize,
    /// What chooses an object's shard: object (its name), chunk, or root (of its path)
    #[arg(long, default_value = "object")]
    place: String,
    /// From a request to the first byte
    #[arg(long, default_value = "500us")]
    latency: String,
    /// Bytes that an engine gets, and sends, in a second; 0 = no bound
    #[arg(long, default_value = "5GB")]
    engine_speed: String,
    /// Bytes that a shard gives in a second; 0 = no bound
    #[arg(long, default_value = "2500MB")]
    shard_speed: String,
    /// Longest object, unless a layer is longer
    #[arg(long, default_value = "8MiB")]
    object: String,
    /// Layers of the model
    #[arg(long, default_value_t = 80)]
    layers: u16,
    /// When chunks are sent: back (when they leave the host), through (when computed), never
    #[arg(long, default_value = "back")]
    write: String,
    /// Only chunks used so often since they came to the host
    #[arg(long, default_value_t = 0)]
    hits: u16,
    /// What is asked for: object (every one), chunk (its first object)
    #[arg(long, default_value = "object")]
    ask: String,
    /// Ask before sending as well
    #[arg(long)]
    ask_before_put: bool,
    /// Absent objects that an engine remembers
    #[arg(long, default_value_t = 65_536)]
    known: usize,
    /// Chunks that an engine remembers to be there
    #[arg(long, default_value_t = 65_536)]
    known_there: usize,
    /// Age at which what is there is asked for again
    #[arg(long, default_value = "60s")]
    fresh: String,
    /// Age at which what is absent is asked for again
    #[arg(long, default_value = "5s")]
    absent: String,
    /// Most gets of one chunk in a second, of all engines; 0 = no bound
    #[arg(long, default_value_t = 0)]
    cap: u32,
    /// So many shards go away at a time, such as 1@30m. Counting starts then, unless --warm-up
    /// says otherwise, and a run without that is made as well
    #[arg(long)]
    dead: Option<String>,
    /// What was on such shards has its place on others from then on
    #[arg(long)]
    rehome: bool,
}

/// What things cost, in any currency.
#[derive(clap::Args)]
struct Price {
    /// A million puts
    #[arg(long, default_value_t = Prices::default().puts)]
    price_puts: f64,
    /// A million gets or asks
    #[arg(long, default_value_t = Prices::default().gets)]
    price_gets: f64,
    /// A GiB that comes out of the remote
    #[arg(long, default_value_t = Prices::default().gib)]
    price_gib: f64,
    /// A GiB kept for a month
    #[arg(long, default_value_t = Prices::default().gib_month)]
    price_gib_month: f64,
    /// An hour of an engine's accelerators
    #[arg(long, default_value_t = Prices::default().engine_hour)]
    price_engine_hour: f64,
}

/// One run.
pub struct Run {
    /// What came of it.
    pub report: ScaleReport,
    /// The same with all shards, where some went away.
    pub whole: Option<ScaleReport>,
}

/// Runs.
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
        shared: shared.ok_or_else(|| format!("--shared {}: such as 30%", args.shared))? / 100.0,
        shift_ns: age(&args.shift)?,
        seed: args.input.seed,
    };
    Ok(copies::make(&trace, &opts)?)
}

/// A time; also none.
fn age(text: &str) -> Outcome<i64> {
    if matches!(text, "0" | "0s") { Ok(0) } else { parse::duration_ns(text) }
}

/// One of several words.
fn word<T: Copy, const N: usize>(what: &str, text: &str, all: [(&str, T); N]) -> Outcome<T> {
    match all.iter().find(|(name, _)| *name == text) {
        Some((_, value)) => Ok(*value),
        None => Err(unknown(what, text, 0, &all.map(|(name, _)| name)).into()),
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
                return Err("--dead: no request comes after that".into());
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
            0 => return Err("--remote 0: bytes, unbounded or none".into()),
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
        ask: word(
            "--ask",
            &args.ask,
            [("object", LookupUnit::Object), ("chunk", LookupUnit::Chunk)],
        )?,
        ask_before_put: args.ask_before_put,
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
    let wrong = || format!("--dead {text}: such as 1@30m");
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
        false => Err(format!("a price is out of range: {all:?}").into()),
    }
}

/// The runs: routers, and engines of each.
fn plan(args: &Args, opts: &ScaleOpts) -> Outcome<Vec<ScaleOpts>> {
    let mut runs = Vec::new();
    let words = |text: &str| -> Vec<String> {
        text.split(',').map(|s| s.trim().to_string()).filter(|s| !s.is_empty()).collect()
    };
    for router in words(&args.routers) {
        let router = Router::of(&router)?;
        for engines in words(&args.engines) {
            let engines = engines.parse().map_err(|_| format!("'{engines}' engines"))?;
            runs.push(ScaleOpts { engines, router, ..opts.clone() });
        }
    }
    if runs.is_empty() || runs.len() > MAX_RUNS {
        return Err(format!("{} runs, allowed are 1 to {MAX_RUNS}", runs.len()).into());
    }
    // What cannot run is told before the first run starts.
    for opts in &runs {
        opts.check()?;
    }
    Ok(runs)
}

/// The same with all shards.
fn without_dead(opts: &ScaleOpts) -> Option<ScaleOpts> {
    let mut opts = opts.clone();
    opts.remote.as_mut()?.dead.take()?;
    Some(opts)
}
