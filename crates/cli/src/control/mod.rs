//! Commands for a store at work: they ask at its control socket.

mod ab;
mod client;
mod show;
mod top;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use kvtier::base::spec::Spec;
use serde_json::Value;

use client::Client;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Where to ask, and how to say it.
#[derive(Args)]
pub struct Where {
    /// The control socket: `control="PATH"` of the store's spec
    #[arg(long)]
    socket: PathBuf,
    /// JSON, as the store said it
    #[arg(long)]
    json: bool,
}

/// A tier with a policy.
#[derive(Clone, Copy, ValueEnum)]
pub enum Tier {
    /// Memory
    Host,
    /// The disk
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

/// What can be asked.
#[derive(Subcommand)]
pub enum Command {
    /// What a running store counts and has
    Stats {
        #[command(flatten)]
        at: Where,
    },
    /// Watch a running store: its tiers, and where the cells of a session are
    Top {
        #[command(flatten)]
        at: Where,
        /// One frame, without colours and cursor
        #[arg(long)]
        once: bool,
        /// The session's number; without it, the one that was opened last
        #[arg(long)]
        session: Option<u32>,
        /// The first chunk that is shown
        #[arg(long, default_value_t = 0)]
        first: u64,
        /// Seconds between frames
        #[arg(long, default_value_t = 1.0)]
        every: f64,
    },
    /// Who left a running store's tiers last
    Evictions {
        #[command(flatten)]
        at: Where,
        /// Most of each tier
        #[arg(long, default_value_t = 20)]
        tail: u32,
        /// Only this tier
        #[arg(long)]
        tier: Option<Tier>,
    },
    /// Have another policy decide who leaves a tier of a running store
    SetPolicy {
        /// Its spec, such as `arc` or `qos(inner=s3fifo)`
        policy: String,
        #[command(flatten)]
        at: Where,
        /// Which tier
        #[arg(long, default_value = "host")]
        tier: Tier,
    },
    /// The budgets of a running store's tiers; with numbers, other ones from now on
    Budget {
        #[command(flatten)]
        at: Where,
        /// Bytes of cells in memory, such as 2GiB
        #[arg(long)]
        host: Option<String>,
        /// Bytes of all files of the disk tier
        #[arg(long)]
        disk: Option<String>,
    },
    /// A running store's metrics as Prometheus reads them
    Metrics {
        #[command(flatten)]
        at: Where,
    },
    /// Compare policies on what is asked of a running store, on metadata alone
    Ab {
        #[command(flatten)]
        at: Where,
        /// Their specs, such as `lru,lfu,arc`; the live one is compared as well
        #[arg(long)]
        policies: String,
        /// Seconds
        #[arg(long, default_value_t = 60)]
        duration: u64,
        /// Which tier
        #[arg(long, default_value = "host")]
        tier: Tier,
    },
}

/// Carries a command out.
pub fn run(command: Command) -> Outcome<()> {
    match command {
        Command::Stats { at } => say(&at, "stats", show::stats),
        Command::Top { at, once, session, first, every } => {
            let every = Duration::try_from_secs_f64(every.max(0.05))?;
            top::run(&at, &top::Opts { once, session, first, every })
        }
        Command::Evictions { at, tail, tier } => {
            let tier = tier.map_or(String::new(), |tier| format!(",tier={}", tier.name()));
            say(&at, &format!("evictions(tail={tail}{tier})"), show::evictions)
        }
        Command::SetPolicy { policy, at, tier } => {
            let policy = Spec::parse(&policy)?;
            let request = format!("set-policy(policy={policy},tier={})", tier.name());
            say(&at, &request, show::policy)
        }
        Command::Budget { at, host, disk } => {
            let given = [("host", host), ("disk", disk)];
            let given: Vec<String> = given
                .into_iter()
                .filter_map(|(key, bytes)| bytes.map(|bytes| format!("{key}={bytes}")))
                .collect();
            // What is no number is told of here, before anybody is asked.
            let request = Spec::parse(&format!("budget({})", given.join(",")))?;
            say(&at, &request.to_string(), show::budget)
        }
        Command::Metrics { at } => {
            let text = Client::connect(&at.socket)?.ask("metrics")?;
            match at.json {
                true => println!("{}", serde_json::json!({ "metrics": text })),
                false => print!("{text}"),
            }
            Ok(())
        }
        Command::Ab { at, policies, duration, tier } => {
            let policies = Spec::parse(&format!("any({policies})"))?;
            ab::run(&at, &policies, duration, tier)
        }
    }
}

/// Asks, and prints the answer: as it is, or for people.
fn say(at: &Where, request: &str, show: fn(&Value)) -> Outcome<()> {
    let text = Client::connect(&at.socket)?.ask(request)?;
    match at.json {
        true => println!("{text}"),
        false => show(&serde_json::from_str(&text)?),
    }
    Ok(())
}
