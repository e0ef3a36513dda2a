//! `kvtier stream`: plans for models in files, passes over them, and what those take.

mod bench;
pub mod child;
mod demo;
mod draw;
mod picture;
mod plan;
mod report;
mod run;
mod sizes;

use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use kvtier::stream::model::Model;
use kvtier::stream::plan::Placement;
use kvtier::stream::units::Units;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// What `kvtier stream` does.
#[derive(Subcommand)]
pub enum Command {
    /// Say which units would live where, why, and what a pass would take
    Plan(plan::Args),
    /// Stream a model: passes over all units, and where their time went
    Run(Box<run::Args>),
    /// Make a model and have it write, with less and less memory for its weights
    Demo(demo::Args),
    /// Measure passes beside the bound, other placements and a memory map, in memory cgroups
    Bench(bench::Args),
    /// What the benchmarks run inside of memory cgroups
    #[command(hide = true)]
    Child(child::Args),
}

/// Which model.
#[derive(Args)]
pub struct Files {
    /// A GGUF or safetensors file, all files of one model, an index, or a directory
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

impl Files {
    fn open(&self) -> Outcome<(Model, Units)> {
        let model = Model::open(&self.files)?;
        let units = Units::of(&model)?;
        Ok((model, units))
    }
}

/// Prints. Who reads no further, as `head` does, is no failure.
fn print(text: &str) -> Outcome<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// How residents are chosen.
#[derive(Clone, Copy, ValueEnum)]
pub enum Place {
    /// At equal distances
    Interleaved,
    /// The first ones
    First,
    /// The last ones
    Last,
}

impl From<Place> for Placement {
    fn from(place: Place) -> Placement {
        match place {
            Place::Interleaved => Placement::Interleaved,
            Place::First => Placement::First,
            Place::Last => Placement::Last,
        }
    }
}

/// Does it.
pub fn run(command: Command) -> Outcome<()> {
    match command {
        Command::Plan(args) => plan::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Child(args) => child::run(&args),
    }
}
