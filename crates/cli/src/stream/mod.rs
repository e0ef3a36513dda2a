//! `kvtier stream`: plans for models in files, and measured passes over them.

mod demo;
mod draw;
mod picture;
mod plan;
mod report;
mod run;
pub mod sizes;

use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use kvtier::base::checksum::checksum;
use kvtier::stream::model::Model;
use kvtier::stream::plan::Placement;
use kvtier::stream::streamer::UnitLease;
use kvtier::stream::units::{Unit, Units};

/// The result of a command.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The commands of `kvtier stream`.
#[derive(Subcommand)]
pub enum Command {
    /// Plan the residency of units, with reasons and the forecast of a pass
    Plan(plan::Args),
    /// Stream a model: run passes over all units, and print where their time went
    Run(Box<run::Args>),
    /// Generate text with a demo model, with less and less memory for its weights
    Demo(demo::Args),
}

/// The model.
#[derive(Args)]
pub struct Files {
    /// A GGUF or safetensors file, all files of one model, an index, or a directory
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
}

impl Files {
    /// Opens the model, and divides it into units.
    pub fn open(&self) -> Outcome<(Model, Units)> {
        let model = Model::open(&self.files)?;
        let units = Units::of(&model)?;
        Ok((model, units))
    }
}

/// Prints to standard output. A closed pipe, as of `head`, is not a failure.
fn print(text: &str) -> Outcome<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// The choice of resident units.
#[derive(Clone, Copy, ValueEnum)]
pub enum Place {
    /// Units at equal distances
    Interleaved,
    /// The first units
    First,
    /// The last units
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

/// Runs a command.
pub fn run(command: Command) -> Outcome<()> {
    match command {
        Command::Plan(args) => plan::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Demo(args) => demo::run(&args),
    }
}

/// A checksum of a unit's tensors in the memory of the streamer.
pub fn sum(unit: &Unit, held: &UnitLease) -> u64 {
    unit.extents.iter().fold(0u64, |sum, extent| {
        let address = (held.address + extent.at) as *const u8;
        // SAFETY: the unit is leased, so its image stays in memory, and its extents lie in it.
        let bytes = unsafe { std::slice::from_raw_parts(address, extent.bytes as usize) };
        sum.rotate_left(1) ^ checksum(bytes)
    })
}
