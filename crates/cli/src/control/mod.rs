//! Commands for a running store, sent to its control socket.

mod ab;
mod client;
mod exporter;
mod show;
mod spans;
mod stores;
mod timed;
mod top;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use kvtier::base::spec::Spec;
use serde_json::Value;

use client::Client;
use stores::Source;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The store, and the form of the answer.
#[derive(Args)]
pub struct Target {
    /// Control socket of the store: `control="PATH"` of its spec
    #[arg(long)]
    socket: PathBuf,
    /// Print the store's JSON
    #[arg(long)]
    json: bool,
}

/// A tier with an eviction policy.
#[derive(Clone, Copy, ValueEnum)]
pub enum Tier {
    /// Host memory
    Host,
    /// Disk
    Disk,
}

impl Tier {
    fn name(self) -> &'static str {
        match self {
            Tier::Host => "host",
            Tier::Disk => "disk",
        }
    }
}

/// The stores whose metrics are printed or served.
#[derive(Args)]
pub struct MetricsArgs {
    /// Control socket of a store, or a directory of control sockets; may be repeated. With NAME, with a
    /// directory, or with several sockets each sample has the label `store`: NAME, or the file name
    /// without `.sock`
    #[arg(long = "socket", value_name = "[NAME=]PATH", required = true, value_parser = Source::parse)]
    sockets: Vec<Source>,
    /// Print one JSON object with the text
    #[arg(long)]
    json: bool,
    /// Serve /metrics and /healthz over HTTP until the process is stopped; PORT alone is at 127.0.0.1,
    /// no value is 127.0.0.1:9479
    #[arg(long, value_name = "[ADDRESS:]PORT", num_args = 0..=1, conflicts_with = "json",
          default_missing_value = exporter::USUAL_ADDRESS)]
    serve: Option<String>,
    /// Seconds after which a store that does not answer is reported as down (`kvtier_up 0`)
    #[arg(long, default_value = "5", value_parser = seconds, value_name = "SECONDS")]
    timeout: Duration,
}

/// The stores whose transfers are exported.
#[derive(Args)]
pub struct SpansArgs {
    /// Control socket of a store, or a directory of control sockets; may be repeated. NAME, or the file
    /// name without `.sock`, is the `service.instance.id`
    #[arg(long = "socket", value_name = "[NAME=]PATH", required = true, value_parser = Source::parse)]
    sockets: Vec<Source>,
    /// Collector with OTLP over HTTP; without it each export is printed as a line of JSON
    #[arg(long, value_name = "URL", value_parser = spans::Endpoint::parse)]
    otlp: Option<spans::Endpoint>,
    /// The `service.name` of the spans
    #[arg(long, default_value = "kvtier", value_name = "NAME")]
    service: String,
    /// Seconds between exports
    #[arg(long, default_value = "1", value_parser = seconds, value_name = "SECONDS")]
    every: Duration,
    /// Seconds after which a store that does not answer is left out until the next export
    #[arg(long, default_value = "5", value_parser = seconds, value_name = "SECONDS")]
    timeout: Duration,
}

/// A time: 0.1 to 60 seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=60.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "use 0.1 to 60 seconds".into())
}

/// The commands.
#[derive(Subcommand)]
pub enum Command {
    /// Print counters, usage and latencies of a running store
    Stats {
        #[command(flatten)]
        at: Target,
    },
    /// Watch a running store: its tiers, and the residency of a session's cells
    Top {
        #[command(flatten)]
        at: Target,
        /// Print one frame, without colours or cursor movement
        #[arg(long)]
        once: bool,
        /// Number of the session; by default the one that was opened last
        #[arg(long)]
        session: Option<u32>,
        /// First chunk to show
        #[arg(long, default_value_t = 0)]
        first: u64,
        /// Seconds between frames
        #[arg(long, default_value_t = 1.0)]
        every: f64,
    },
    /// List the last evictions of a running store
    Evictions {
        #[command(flatten)]
        at: Target,
        /// Most evictions of each tier
        #[arg(long, default_value_t = 20)]
        tail: u32,
        /// Only this tier
        #[arg(long)]
        tier: Option<Tier>,
    },
    /// Change the eviction policy of a tier of a running store
    SetPolicy {
        /// Spec of the policy, such as `arc` or `qos(inner=s3fifo)`
        policy: String,
        #[command(flatten)]
        at: Target,
        /// The tier
        #[arg(long, default_value = "host")]
        tier: Tier,
    },
    /// Print the budgets of a running store's tiers, or change them
    Budget {
        #[command(flatten)]
        at: Target,
        /// New size of host memory, such as 2GiB
        #[arg(long)]
        host: Option<String>,
        /// New size of the disk tier
        #[arg(long)]
        disk: Option<String>,
    },
    /// Print the metrics of running stores in the Prometheus text format, or serve them over HTTP
    Metrics(MetricsArgs),
    /// Export the ended transfers of running stores as OpenTelemetry spans, until the process is stopped
    Spans(SpansArgs),
    /// Compare eviction policies on the live requests of a running store, on metadata alone
    Ab {
        #[command(flatten)]
        at: Target,
        /// Specs of the policies, such as `lru,lfu,arc`; the live policy is included
        #[arg(long)]
        policies: String,
        /// Duration in seconds
        #[arg(long, default_value_t = 60)]
        duration: u64,
        /// The tier
        #[arg(long, default_value = "host")]
        tier: Tier,
    },
}

/// Runs a command.
pub fn run(command: Command) -> Outcome<()> {
    match command {
        Command::Stats { at } => ask_and_print(&at, "stats", show::stats),
        Command::Top { at, once, session, first, every } => {
            let every = Duration::try_from_secs_f64(every.max(0.05))?;
            top::run(&at, &top::Opts { once, session, first, every })
        }
        Command::Evictions { at, tail, tier } => {
            let tier = tier.map_or(String::new(), |tier| format!(",tier={}", tier.name()));
            ask_and_print(&at, &format!("evictions(tail={tail}{tier})"), show::evictions)
        }
        Command::SetPolicy { policy, at, tier } => {
            let policy = Spec::parse(&policy)?;
            let request = format!("set-policy(policy={policy},tier={})", tier.name());
            ask_and_print(&at, &request, show::policy)
        }
        Command::Budget { at, host, disk } => {
            let budgets = [("host", host), ("disk", disk)];
            let budgets: Vec<String> = budgets
                .into_iter()
                .filter_map(|(key, bytes)| bytes.map(|bytes| format!("{key}={bytes}")))
                .collect();
            // Errors in the numbers are reported before the request is sent.
            let request = Spec::parse(&format!("budget({})", budgets.join(",")))?;
            ask_and_print(&at, &request.to_string(), show::budget)
        }
        Command::Metrics(args) => metrics(args),
        Command::Spans(SpansArgs { sockets: sources, otlp: endpoint, service, every, timeout }) => {
            spans::run(&spans::Opts { sources, endpoint, service, every, timeout })
        }
        Command::Ab { at, policies, duration, tier } => {
            let policies = Spec::parse(&format!("any({policies})"))?;
            ab::run(&at, &policies, duration, tier)
        }
    }
}

/// Prints or serves the metrics of stores.
fn metrics(MetricsArgs { sockets, json, serve, timeout }: MetricsArgs) -> Outcome<()> {
    if let Some(address) = serve {
        return exporter::serve(&address, sockets, timeout);
    }
    match &sockets[..] {
        [Source { name: None, path }] if !path.is_dir() => {
            let text = Client::connect_within(path, timeout)?.request("metrics")?;
            match json {
                true => println!("{}", serde_json::json!({ "metrics": text })),
                false => print!("{text}"),
            }
        }
        _ if json => return Err("--json prints one store without a NAME".into()),
        _ => exporter::print(sockets, timeout),
    }
    Ok(())
}

/// Ends the process when a signal asks for it. The first process of a container ignores signals without a handler of their own.
fn exit_on_signals() -> std::io::Result<()> {
    extern "C" fn exit(_: libc::c_int) {
        // SAFETY: _exit may be called by a handler of signals.
        unsafe { libc::_exit(0) }
    }
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler calls only what a handler may call.
        let before = unsafe { libc::signal(signal, exit as *const () as libc::sighandler_t) };
        if before == libc::SIG_ERR {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Sends a request, and prints the answer as JSON or as text.
fn ask_and_print(at: &Target, request: &str, show: fn(&Value)) -> Outcome<()> {
    let text = Client::connect(&at.socket)?.request(request)?;
    match at.json {
        true => println!("{text}"),
        false => show(&serde_json::from_str(&text)?),
    }
    Ok(())
}
