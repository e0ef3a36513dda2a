//! `kvtier lab explain`: who would leave next at a point of a trace, and how the
//! policy ranks what is around.

use std::path::PathBuf;

use kvtier::trace::replay::{Replay, ReplayOpts};
use kvtier::trace::study::Study;
use kvtier_lab::explain::{self, ExplainedBlock, Explanation};

use super::table::time;
use super::{Input, Outcome, parse};

/// What to look at.
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
    /// The size, in blocks or percent of the different blocks of the trace
    #[arg(long, default_value = "5%")]
    size: String,
    /// After so many requests; by default half of them
    #[arg(long)]
    at: Option<usize>,
    /// How many victims
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    victims: u32,
    /// The engine can use what lies behind a hole
    #[arg(long)]
    holes: bool,
    /// Print a picture for Graphviz instead of a list
    #[arg(long)]
    dot: bool,
}

/// Explains.
pub fn run(args: &Args) -> Outcome<()> {
    let trace = args.input.read(&args.trace)?;
    let opts = ReplayOpts { holes: args.holes, ..ReplayOpts::default() };
    let study = Study::of(&trace, &opts.cost)?;
    let blocks = *parse::sizes(&args.size, &trace)?.first().ok_or("no size")?;
    let mut replay = Replay::open(&trace, &study, &args.policy, blocks, &opts)?;
    let at = args.at.unwrap_or(trace.requests().len() / 2);
    while replay.done() < at && replay.step()?.is_some() {}
    let told = explain::explain(&trace, &mut replay, args.victims as usize)?;
    match args.dot {
        true => dot(&told, blocks),
        false => list(&told, blocks),
    }
    Ok(())
}

fn list(told: &Explanation, blocks: u64) {
    println!(
        "{} after {} requests, {} of {blocks} blocks in use. The least score leaves first.\n",
        told.policy, told.requests, told.resident
    );
    println!(
        "{:>20} {:>20} {:>6} {:>14} {:>10} {:>6} {:>8} {:>5}",
        "block", "continues", "leaves", "score", "idle", "uses", "children", "list"
    );
    for b in &told.blocks {
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
            println!("{:>20} and {} more that continue it", "", b.more_children);
        }
    }
}

fn dot(told: &Explanation, blocks: u64) {
    println!("digraph victims {{");
    println!("  rankdir=LR; node [shape=box, fontname=\"sans-serif\", style=filled];");
    println!(
        "  label=\"{} after {} requests, {} of {blocks} blocks in use; red leaves first\";",
        told.policy, told.requests, told.resident
    );
    for b in &told.blocks {
        println!("  \"{}\" [{}];", b.id, look(b));
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

fn look(b: &ExplainedBlock) -> String {
    let Some(s) = &b.standing else {
        return format!("label=\"{}\\nnot resident\", fillcolor=white, style=dashed", b.id);
    };
    let (colour, turn) = match b.turn {
        Some(0) => ("\"#ff9a8a\"", "\\nleaves first".to_string()),
        Some(t) => ("\"#ffd9a8\"", format!("\\nleaves {}.", t + 1)),
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
