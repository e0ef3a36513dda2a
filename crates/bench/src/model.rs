//! `kvtier-bench model`: the passes of the group `stream` over a given model.

use kvtier_cli::human;
use kvtier_cli::stream::sizes::bytes;
use kvtier_cli::stream::{Files, Outcome};

use crate::Bar;

/// Smallest model. A smaller one is read too fast for concurrent pieces, and a cgroup for a part of
/// it is too small for a process.
const LEAST_BYTES: u64 = 64 << 20;

/// The model and the setting.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    files: Files,
    /// Memory of each method, such as 8G; by default 59 % of the model
    #[arg(long, value_parser = bytes)]
    host: Option<u64>,
    /// Rounds; each runs every method
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// Shortens repeated notes of bars without values: the text is long.
fn say_once(bars: &mut [Bar]) {
    let mut reports: Vec<(String, &str)> = Vec::new();
    for bar in bars.iter_mut().filter(|bar| bar.value.is_none()) {
        match reports.iter().find(|(note, _)| *note == bar.note) {
            Some((_, first)) => bar.note = format!("(as {first})"),
            None => reports.push((bar.note.clone(), bar.bar)),
        }
    }
}

/// Measures and prints the bars.
pub fn run(args: &Args) -> Outcome<()> {
    let (model, _) = args.files.open()?;
    let (has, limit) = (model.bytes(), args.host.unwrap_or(0));
    if has < LEAST_BYTES {
        let (has, least) = (human(has), human(LEAST_BYTES));
        return Err(format!("a model of {has}: passes are measured from {least} on").into());
    }
    if limit >= has {
        let (has, limit) = (human(has), human(limit));
        return Err(format!("--host {limit} holds all {has} of the model: nothing moves").into());
    }
    drop(model);
    let mut bars = crate::stream::of_files(&args.files.files, limit, args.rounds)?;
    if !args.json {
        say_once(&mut bars);
    }
    crate::print("stream", &bars, args.json);
    Ok(())
}
