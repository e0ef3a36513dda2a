//! `kvtier lab experts`: compares eviction policies for the experts of a model on a routing trace.

use std::path::PathBuf;

use kvtier_lab::experts::{self, Counts, Routing};
use serde_json::json;

use super::{Outcome, run_parallel};

/// Most bytes of a trace.
const MAX_BYTES: u64 = 4 << 30;

/// The trace, the policies and the sizes.
#[derive(clap::Args)]
pub struct Args {
    /// The trace, as the llama.cpp plugin writes it with KVTIER_ROUTING_TRACE
    trace: PathBuf,
    /// Policy specs, separated by commas
    #[arg(long, default_value = "lru,lfu,wtinylfu,arc,auto")]
    policies: String,
    /// Cache sizes, separated by commas: experts, or percent of all
    #[arg(long, default_value = "10%,25%,50%,75%")]
    sizes: String,
    /// Policy of the replay that reads predicted experts ahead
    #[arg(long, default_value = "lru")]
    predicted: String,
    /// Parallel replays; 0 = the number of cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// A policy at a size.
struct Run {
    policy: String,
    size: u64,
    counts: Counts,
}

/// What is replayed: a policy, with or without guesses, or the optimum.
enum Kind {
    Policy(String),
    Predicted(String),
    Optimum,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<()> {
    let routing = read(args)?;
    let sizes = sizes(&args.sizes, routing.experts())?;
    let mut kinds: Vec<Kind> = specs(&args.policies).into_iter().map(Kind::Policy).collect();
    if routing.uses.iter().any(|one| !one.guessed.is_empty()) {
        kinds.push(Kind::Predicted(args.predicted.clone()));
    }
    kinds.push(Kind::Optimum);
    let runs = run_parallel(kinds.len() * sizes.len(), args.threads, |at, _| {
        let (kind, size) = (&kinds[at / sizes.len()], sizes[at % sizes.len()]);
        let (policy, counts) = match kind {
            Kind::Policy(spec) => (spec.clone(), experts::replay(&routing, spec, size, false)?),
            Kind::Predicted(spec) => {
                (format!("{spec}, predicted"), experts::replay(&routing, spec, size, true)?)
            }
            Kind::Optimum => ("belady".to_string(), experts::optimum(&routing, size)),
        };
        Ok(Run { policy, size, counts })
    })?;
    match args.json {
        true => runs.iter().for_each(|run| println!("{}", object(run, &routing))),
        false => table(&runs, &sizes, &routing),
    }
    Ok(())
}

fn read(args: &Args) -> Outcome<Routing> {
    let at = |e: &dyn std::fmt::Display| format!("{}: {e}", args.trace.display());
    let bytes = std::fs::metadata(&args.trace).map_err(|e| at(&e))?.len();
    if bytes > MAX_BYTES {
        return Err(at(&format!("{bytes} bytes, at most {MAX_BYTES} are read")).into());
    }
    let text = std::fs::read_to_string(&args.trace).map_err(|e| at(&e))?;
    let routing = Routing::read(&text).map_err(|e| at(&e))?;
    match routing.uses.is_empty() {
        true => Err(at(&"no layer used its experts: decode some tokens first").into()),
        false => Ok(routing),
    }
}

/// Splits at commas outside of parentheses.
fn specs(text: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    let mut depth = 0;
    for letter in text.chars() {
        depth += i32::from(letter == '(') - i32::from(letter == ')');
        match (letter, depth, out.last_mut()) {
            (',', 0, _) => out.push(String::new()),
            (_, _, Some(last)) => last.push(letter),
            _ => {}
        }
    }
    out.into_iter().map(|spec| spec.trim().to_string()).filter(|spec| !spec.is_empty()).collect()
}

fn sizes(text: &str, experts: u64) -> Outcome<Vec<u64>> {
    let one = |word: &str| -> Outcome<u64> {
        let size = match word.strip_suffix('%') {
            Some(percent) => {
                let share: f64 =
                    percent.parse().map_err(|_| format!("{word:?} is no percentage"))?;
                (experts as f64 * share / 100.0) as u64
            }
            None => word.parse().map_err(|_| format!("{word:?} is no number of experts"))?,
        };
        match (1..=experts).contains(&size) {
            true => Ok(size),
            false => Err(format!("{word}: {size} experts, allowed is 1 to {experts}").into()),
        }
    };
    text.split(',').map(|word| one(word.trim())).collect()
}

fn object(run: &Run, routing: &Routing) -> serde_json::Value {
    json!({
        "policy": run.policy,
        "experts": run.size,
        "share": run.size as f64 / routing.experts() as f64,
        "uses": run.counts.uses,
        "hits": run.counts.hits,
        "hit_ratio": run.counts.hit_ratio(),
        "covered": run.counts.covered,
        "wasted": run.counts.wasted,
    })
}

fn table(runs: &[Run], sizes: &[u64], routing: &Routing) {
    let (uses, experts) = (runs.first().map_or(0, |run| run.counts.uses), routing.experts());
    println!(
        "{uses} uses of {experts} experts in {} layers, {}. Hits in percent:\n",
        routing.layers.len(),
        crate::human(routing.bytes()),
    );
    print!("{:<24}", "policy");
    sizes.iter().for_each(|size| print!(" {size:>8}"));
    println!();
    let mut notes = Vec::new();
    for row in runs.chunks(sizes.len()) {
        print!("{:<24}", row[0].policy);
        row.iter().for_each(|run| print!(" {:>8.1}", 100.0 * run.counts.hit_ratio()));
        println!();
        for run in row.iter().filter(|run| run.counts.covered + run.counts.wasted > 0) {
            notes.push(format!(
                "{}, {} experts: predictions cover {:.1} % of the misses, with {:.2} wasted reads for \
                 each useful one",
                run.policy,
                run.size,
                100.0 * run.counts.coverage(),
                run.counts.waste(),
            ));
        }
    }
    if !notes.is_empty() {
        println!("\n{}", notes.join("\n"));
    }
}
