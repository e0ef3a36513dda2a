//! Units: bytes that are needed together, and move together. A layer is one, and so is an
//! expert of a layer, the embedding, the last norm, the head.

/// What offsets of images and of reads are multiples of.
pub const GRAIN_BYTES: u64 = 4096;
/// Of no layer, or no expert.
pub const NONE: u32 = u32::MAX;
/// Most units of a model.
pub const MAX_UNITS: usize = 1 << 18;

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
    /// What it has.
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
    /// They, in the order in which a pass needs them; the experts of a layer follow it.
    pub units: Vec<Unit>,
    /// What is where, by unit, then by place.
    pub parts: Vec<Part>,
}
