//! Models in files: what tensors there are, and where their bytes are. Files are read,
//! never trusted: every count, length and offset is checked before it is used.

use std::path::PathBuf;

/// Most files of a model.
pub const MAX_FILES: usize = 1 << 12;
/// Most tensors of a model.
pub const MAX_TENSORS: usize = 1 << 20;
/// Most dimensions of a tensor.
pub const MAX_DIMS: usize = 8;
/// Longest name of a tensor.
pub const MAX_NAME_BYTES: usize = 512;

/// What kind of files a model is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// GGUF, one file or split.
    Gguf,
    /// safetensors, one file or sharded.
    Safetensors,
    /// Byte ranges that the engine names.
    Table,
}

/// A file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Where it is.
    pub path: PathBuf,
    /// How long it is.
    pub bytes: u64,
}

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// What its numbers are, as the file's format calls it: `Q6_K`, `BF16`.
    pub dtype: &'static str,
    /// Its dimensions, the innermost first.
    pub dims: Vec<u64>,
    /// Which file of [`Model::files`].
    pub file: u32,
    /// Where in that file, from its start.
    pub offset: u64,
    /// How long it is there.
    pub bytes: u64,
}

/// What the files say of the model; 0 and empty where they say nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Its architecture: `llama`.
    pub architecture: String,
    /// Its layers.
    pub layers: u32,
    /// Numbers of a hidden state.
    pub hidden: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values of one layer; the most where layers differ.
    pub kv_heads: u32,
    /// Numbers of a key.
    pub key_dim: u32,
    /// Numbers of a value.
    pub value_dim: u32,
    /// The longest context.
    pub context: u32,
    /// Symbols.
    pub vocabulary: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Of them, those that a token uses.
    pub experts_used: u32,
}

/// What is in the files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// What kind of files.
    pub format: Format,
    /// The files.
    pub files: Vec<File>,
    /// The tensors, in the order of files and offsets. None overlaps another.
    pub tensors: Vec<Tensor>,
    /// What the files say of the model.
    pub facts: Facts,
}
