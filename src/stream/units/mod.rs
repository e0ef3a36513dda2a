//! Units of weights: bytes that are needed together and moved together. A unit is a layer, an
//! expert of a layer, the embedding, the last norm, or the head.

mod build;
mod chunks;
pub mod names;

use std::path::PathBuf;

use crate::base::status::{Error, Result, Status};
use crate::stream::model::Model;
pub use crate::stream::units::build::{Entry, Range};
use crate::stream::units::build::{check, table, units_of};
pub use crate::stream::units::chunks::{
    CHUNK_ALIGN_BYTES, Chunk, ChunkIter, ChunkTable, MAX_CHUNK_BYTES,
};

/// Alignment of offsets in images, and of reads.
pub const ALIGN_BYTES: u64 = 4096;
/// No layer, or no expert.
pub const NONE: u32 = u32::MAX;
/// Most units of a model.
pub const MAX_UNITS: usize = 1 << 18;
/// Most parts of tensors.
pub const MAX_PARTS: usize = 1 << 22;

/// Rounds an offset down to the alignment.
fn floor(offset: u64) -> u64 {
    offset - offset % ALIGN_BYTES
}

/// Rounds an offset up to the alignment.
fn ceil(offset: u64) -> u64 {
    offset.checked_next_multiple_of(ALIGN_BYTES).unwrap_or(floor(u64::MAX))
}

/// The error of a unit number that no unit of the model has.
pub fn unknown_unit(unit: u32, count: usize) -> Error {
    Error::new(Status::Invalid, format!("unit {unit} does not exist: the model has {count} units"))
}

/// Role of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Table of token embeddings.
    Embedding,
    /// A layer, without its experts.
    Layer,
    /// An expert of a layer.
    Expert,
    /// Norm between the last layer and the head.
    Norm,
    /// Output projection (LM head).
    Head,
    /// Other tensors.
    Other,
}

/// A range of a file that belongs to a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the file.
    pub file: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
    /// Offset of its first byte in the image of the unit. It has the same alignment as in the
    /// file, so that aligned blocks of the file can be read into the image.
    pub at: u64,
}

/// A unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Name: `layer 3`, `layer 3 expert 7`, `embedding`.
    pub name: String,
    /// Role of the unit.
    pub role: Role,
    /// Its layer, or [`NONE`].
    pub layer: u32,
    /// Its expert, or [`NONE`].
    pub expert: u32,
    /// Ranges of files, sorted by file and offset.
    pub extents: Vec<Extent>,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Bytes of its image in memory: the extents, each rounded to the alignment.
    pub image_bytes: u64,
}

/// Where a tensor is, or an expert's part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Index of the tensor in the model.
    pub tensor: u32,
    /// Index of the unit.
    pub unit: u32,
    /// Offset in the image of the unit.
    pub at: u64,
    /// Offset in the tensor: 0 unless it is divided between experts.
    pub from: u64,
    /// Length.
    pub bytes: u64,
}

/// The units of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Units {
    /// The units in the order of a pass: the embedding, tensors without a role, each layer
    /// followed by its experts, the norm, the head. Units of a table keep its order.
    pub units: Vec<Unit>,
    /// Parts of tensors, sorted by unit and offset. A tensor without bytes has no part.
    pub parts: Vec<Part>,
}

impl Units {
    /// Groups the tensors of a model by their names. Stacked experts are separated.
    pub fn of(model: &Model) -> Result<Units> {
        units_of(model)
    }

    /// Units that the caller names, in existing files, in the order given; and the model whose
    /// tensors are the ranges.
    pub fn table(paths: &[PathBuf], entries: Vec<Entry>) -> Result<(Model, Units)> {
        table(paths, entries)
    }

    /// Checks that every byte of every tensor is in one part, that parts match the extents, and
    /// that extents are inside their files.
    pub fn check(&self, model: &Model) -> Result<()> {
        check(self, model)
    }

    /// The parts of a tensor: one, or one for each expert. Searches all parts; use an [`Index`]
    /// for many calls.
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

    /// The unit with a name.
    pub fn find(&self, name: &str) -> Option<u32> {
        self.position(|unit| unit.name == name)
    }

    fn position(&self, is: impl Fn(&Unit) -> bool) -> Option<u32> {
        self.units.iter().position(is).map(|number| number as u32)
    }
}

// Index of units and parts, for lookups without a search.

/// Units and parts, sorted.
#[derive(Clone, Debug)]
pub struct Index {
    /// Layer, expert and unit.
    layers: Vec<(u32, u32, u32)>,
    /// Parts, sorted by tensor and offset.
    parts: Vec<Part>,
}

impl Index {
    /// Builds the index.
    pub fn new(units: &Units) -> Result<Index> {
        let (mut layers, mut parts) = (Vec::new(), Vec::new());
        layers.try_reserve(units.units.len()).map_err(|_| Status::NoMem)?;
        parts.try_reserve(units.parts.len()).map_err(|_| Status::NoMem)?;
        let numbered = units.units.iter().zip(0u32..);
        let of_layers = numbered.filter(|(u, _)| matches!(u.role, Role::Layer | Role::Expert));
        layers.extend(of_layers.map(|(unit, number)| (unit.layer, unit.expert, number)));
        parts.extend_from_slice(&units.parts);
        layers.sort_unstable();
        parts.sort_unstable_by_key(|part| (part.tensor, part.from));
        Ok(Index { layers, parts })
    }

    /// The unit of a layer.
    pub fn layer(&self, layer: u32) -> Option<u32> {
        self.expert(layer, NONE)
    }

    /// The unit of an expert of a layer.
    pub fn expert(&self, layer: u32, expert: u32) -> Option<u32> {
        let at = self.layers.partition_point(|known| (known.0, known.1) < (layer, expert));
        let (l, e, unit) = *self.layers.get(at)?;
        ((l, e) == (layer, expert)).then_some(unit)
    }

    /// The parts of a tensor: one, or one for each expert.
    pub fn parts(&self, tensor: u32) -> &[Part] {
        let from = self.parts.partition_point(|part| part.tensor < tensor);
        let to = self.parts.partition_point(|part| part.tensor <= tensor);
        self.parts.get(from..to).unwrap_or(&[])
    }
}
