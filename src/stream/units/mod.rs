//! Units: bytes that are needed together, and move together. A layer is one, and so is an
//! expert of a layer, the embedding, the last norm, the head.

mod check;
mod chunks;
mod group;
mod image;
mod index;
pub mod names;
mod table;

use std::path::PathBuf;

use crate::base::status::Result;
use crate::stream::model::Model;
pub use crate::stream::units::chunks::{Chunk, Chunks};
pub use crate::stream::units::index::Index;
pub use crate::stream::units::table::{Entry, Range};

/// What offsets of images and of reads are multiples of.
pub const GRAIN_BYTES: u64 = 4096;
/// Of no layer, or no expert.
pub const NONE: u32 = u32::MAX;
/// Most units of a model.
pub const MAX_UNITS: usize = 1 << 18;
/// Most parts of tensors.
pub const MAX_PARTS: usize = 1 << 22;

/// What a unit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// What symbols are looked up in.
    Embedding,
    /// A layer, without its experts.
    Layer,
    /// An expert of a layer.
    Expert,
    /// What comes between the last layer and the head.
    Norm,
    /// What makes symbols of a hidden state.
    Head,
    /// Something else.
    Other,
}

/// A stretch of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Which file of the model.
    pub file: u32,
    /// Where in it.
    pub offset: u64,
    /// How long.
    pub bytes: u64,
    /// Where its first byte is in the image of its unit: at the same place within a grain
    /// as in the file, so that whole grains of the file can be read to where they belong.
    pub at: u64,
}

/// A unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// What it is called: `layer 3`, `layer 3 expert 7`, `embedding`.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Its layer, or [`NONE`].
    pub layer: u32,
    /// Its expert, or [`NONE`].
    pub expert: u32,
    /// Where its bytes are, in the order of files and offsets.
    pub extents: Vec<Extent>,
    /// What its tensors have.
    pub bytes: u64,
    /// What it takes in memory: its extents, each rounded to whole grains.
    pub image_bytes: u64,
}

/// Where a tensor, or an expert's part of one, is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which tensor of the model.
    pub tensor: u32,
    /// Which unit.
    pub unit: u32,
    /// Where in the image of the unit.
    pub at: u64,
    /// Where in the tensor: 0 unless it is divided between experts.
    pub from: u64,
    /// How long.
    pub bytes: u64,
}

/// The units of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Units {
    /// They, in the order in which a pass needs them: the embedding, what has no role, each
    /// layer followed by its experts, the norm, the head. Those of a table are in its order.
    pub units: Vec<Unit>,
    /// What is where, by unit, then by place. A tensor without bytes has no part.
    pub parts: Vec<Part>,
}

impl Units {
    /// Groups the tensors of a model by their names. Stacked experts are taken apart.
    pub fn of(model: &Model) -> Result<Units> {
        group::of(model)
    }

    /// Units that the caller names, of files that are there; and the model that they make,
    /// whose tensors are the ranges. They stay in the order given.
    pub fn table(paths: &[PathBuf], entries: Vec<Entry>) -> Result<(Model, Units)> {
        table::table(paths, entries)
    }

    /// Checks that every byte of every tensor is in one part, that parts are where the bytes
    /// come to lie when extents are read, and extents in their files.
    pub fn check(&self, model: &Model) -> Result<()> {
        check::check(self, model)
    }

    /// Where a tensor is: one part, or one for each expert. Looks at all parts; who asks often
    /// makes an [`Index`].
    pub fn part(&self, tensor: u32) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(move |part| part.tensor == tensor)
    }

    /// The unit of a layer.
    pub fn layer(&self, layer: u32) -> Option<u32> {
        self.position(|unit| unit.role == Role::Layer && unit.layer == layer)
    }

    /// The unit of an expert of a layer.
    pub fn expert(&self, layer: u32, expert: u32) -> Option<u32> {
        self.position(|u| u.role == Role::Expert && (u.layer, u.expert) == (layer, expert))
    }

    /// The unit of a name.
    pub fn find(&self, name: &str) -> Option<u32> {
        self.position(|unit| unit.name == name)
    }

    fn position(&self, is: impl Fn(&Unit) -> bool) -> Option<u32> {
        self.units.iter().position(is).map(|number| number as u32)
    }
}
