//! `kvtier lab explain`: the next victims at a point of a trace, and how the policy ranks the
//! blocks around them.

use std::path::PathBuf;

use kvtier::trace::replay::{Replay, ReplayOpts};
use kvtier::trace::study::Study;
use kvtier_lab::explain::{self, ExplainedBlock, Explanation};

use super::table::time;
use super::{Input, Outcome, parse};

/// The trace, the policy and the point.
#[derive(clap::Args)]
pub struct Args {
    /// The trace; - = the standard input
    #[arg(long)]
    trace: PathBuf,
    #[command(flatten)]
    input: Input,
    /// The policy
    #[arg(long, default_value = "lru")]
    policy: String,
    /// Capacity, in blocks or percent of the distinct blocks of the trace
    #[arg(long, default_value = "5%")]
    size: String,
    /// Number of requests before the point; by default half of them
    #[arg(long)]
    at: Option<usize>,
    /// Number of victims
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    victims: u32,
    /// The engine can use blocks behind a hole
    #[arg(long)]
    holes: bool,
    /// Print a graph for Graphviz instead of a list
    #[arg(long)]
    dot: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<()> {
    let trace = args.input.read(&args.trace)?;
    let opts = ReplayOpts { holes: args.holes, ..ReplayOpts::default() };
    let study = Study::of(&trace, &opts.cost)?;
    let blocks = *parse::sizes(&args.size, &trace)?.first().ok_or("no size")?;
    let mut replay = Replay::open(&trace, &study, &args.policy, blocks, &opts)?;
    let at = args.at.unwrap_or(trace.requests().len() / 2);
    while replay.done() < at && replay.step()?.is_some() {}
    let explanation = explain::explain(&trace, &mut replay, args.victims as usize)?;
    match args.dot {
        true => dot(&explanation, blocks),
        false => list(&explanation, blocks),
    }
    Ok(())
}

fn list(explanation: &Explanation, blocks: u64) {
    println!(
        "{} after {} requests, {} of {blocks} blocks in use. The lowest score is evicted first.\n",
        explanation.policy, explanation.requests, explanation.resident
    );
    println!(
        "{:>20} {:>20} {:>6} {:>14} {:>10} {:>6} {:>8} {:>5}",
        "block", "parent", "victim", "score", "idle", "uses", "children", "list"
    );
    for b in &explanation.blocks {
        let parent = b.parent.map_or("-".to_string(), |p| p.to_string());
        let turn = b.turn.map_or("-".to_string(), |t| format!("{}.", t + 1));
        match &b.standing {
            Some(s) => println!(
                "{:>20} {parent:>20} {turn:>6} {:>14.6e} {:>10} {:>6} {:>8} {:>5}",
                b.id,
                s.score,
                time(s.age_ns as u64),
                s.hits,
                s.children,
                s.list
            ),
            None => println!("{:>20} {parent:>20} {turn:>6} {:>14}", b.id, "not resident"),
        }
        if b.more_children > 0 {
            println!("{:>20} and {} more children", "", b.more_children);
        }
    }
}

fn dot(explanation: &Explanation, blocks: u64) {
    println!("digraph victims {{");
    println!("  rankdir=LR; node [shape=box, fontname=\"sans-serif\", style=filled];");
    println!(
        "  label=\"{} after {} requests, {} of {blocks} blocks in use; red is evicted first\";",
        explanation.policy, explanation.requests, explanation.resident
    );
    for b in &explanation.blocks {
        println!("  \"{}\" [{}];", b.id, node_style(b));
        if let Some(parent) = b.parent {
            println!("  \"{parent}\" -> \"{}\";", b.id);
        }
        if b.more_children > 0 {
            let id = b.id;
            println!("  \"more {id}\" [label=\"{} more\", fillcolor=white];", b.more_children);
            println!("  \"{id}\" -> \"more {id}\";");
        }
    }
    println!("}}");
}

fn node_style(b: &ExplainedBlock) -> String {
    let Some(s) = &b.standing else {
        return format!("label=\"{}\\nnot resident\", fillcolor=white, style=dashed", b.id);
    };
    let (colour, turn) = match b.turn {
        Some(0) => ("\"#ff9a8a\"", "\\nfirst victim".to_string()),
        Some(t) => ("\"#ffd9a8\"", format!("\\nvictim {}", t + 1)),
        None if s.children > 0 => ("\"#e4e4e4\"", String::new()),
        None => ("\"#d5e8d4\"", String::new()),
    };
    format!(
        "label=\"{}\\nscore {:.4e}\\nidle {}, {} uses{turn}\", fillcolor={colour}",
        b.id,
        s.score,
        time(s.age_ns as u64),
        s.hits
    )
}
