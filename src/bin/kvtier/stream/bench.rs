//! The passes of `kvtier bench stream`, over a model that is there.

use super::Files;
use super::Outcome;
use super::sizes::bytes;

/// What is measured.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    files: Files,
    /// Memory of each way, such as 8G; else 59 % of the model
    #[arg(long, value_parser = bytes)]
    host: Option<u64>,
    /// Rounds, in each of which every way has its turn
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// Measures, and prints bars.
pub fn run(args: &Args) -> Outcome<()> {
    let files = &args.files.files;
    let bars = crate::bench::stream::of_files(files, args.host.unwrap_or(0), args.rounds)?;
    crate::bench::print("stream", &bars, args.json);
    Ok(())
}
