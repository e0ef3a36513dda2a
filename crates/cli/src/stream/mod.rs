//! `kvtier stream`: plans for models in files, passes over them, and what those take.

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

/// What commands come to.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// What `kvtier stream` does.
#[derive(Subcommand)]
pub enum Command {
    /// Say which units would live where, why, and what a pass would take
    Plan(plan::Args),
    /// Stream a model: passes over all units, and where their time went
    Run(Box<run::Args>),
    /// Make a model and have it write, with less and less memory for its weights
    Demo(demo::Args),
}

/// Which model.
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
    }
}

/// The sum of what a unit has, where the streamer has put it.
pub fn sum(unit: &Unit, held: &UnitLease) -> u64 {
    unit.extents.iter().fold(0u64, |sum, extent| {
        let address = (held.address + extent.at) as *const u8;
        // SAFETY: the unit is held, so all of its image is there and stays; its extents lie
        // in it.
        let bytes = unsafe { std::slice::from_raw_parts(address, extent.bytes as usize) };
        sum.rotate_left(1) ^ checksum(bytes)
    })
}
