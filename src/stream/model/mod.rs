//! Models in files: what tensors there are, and where their bytes are. Files are read,
//! never trusted: every count, length and offset is checked before it is used, and no
//! memory is taken for what a file only says it has.

mod check;
pub mod config;
mod cursor;
pub mod dtype;
mod fingerprint;
pub mod gguf;
mod gguf_value;
mod open;
pub mod safetensors;
pub mod shards;
mod split;
mod window;

use std::path::PathBuf;

use crate::base::status::Result;
use crate::io::header::Header;
pub use crate::stream::model::cursor::Stop;

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
    /// Heads of keys and values of one layer; the most where layers differ. One, where keys
    /// are compressed to a latent vector.
    pub kv_heads: u32,
    /// Numbers of a key, as it is kept.
    pub key_dim: u32,
    /// Numbers of a value; 0 beside a `key_dim` that is not 0 where values are made of what
    /// is kept of keys.
    pub value_dim: u32,
    /// The longest context.
    pub context: u32,
    /// Symbols.
    pub vocabulary: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Of them, those that a token uses.
    pub experts_used: u32,
    /// Tokens that some layers see back, and need KV of; 0 = all see everything.
    pub window: u32,
    /// How many layers that is true of; 0 beside a window = nobody knows which.
    pub windowed_layers: u32,
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
    /// A hash of the headers of the files.
    pub heads: [u8; 32],
}

impl Model {
    /// Opens a model: a GGUF or safetensors file, the index of a sharded model, the directory
    /// of a model, any one file of a split GGUF model, or all its files.
    pub fn open(paths: &[PathBuf]) -> Result<Model> {
        open::open(paths)
    }

    /// A model whose tensors the caller names, in files that are there.
    pub fn table(paths: &[PathBuf], tensors: Vec<Tensor>) -> Result<Model> {
        let mut files = Vec::new();
        for path in paths.iter().take(MAX_FILES + 1) {
            files.push(File { path: path.clone(), bytes: Header::open(path)?.bytes() });
        }
        Model::named(files, tensors)
    }

    /// The same, of files whose lengths are known.
    pub fn named(files: Vec<File>, tensors: Vec<Tensor>) -> Result<Model> {
        let heads = fingerprint::heads(std::iter::empty());
        check::finish(Format::Table, files, tensors, Facts::default(), heads)
    }

    /// A model of the header of one GGUF file, of which `head` is the start or all.
    pub fn of_gguf(file: File, head: &[u8]) -> std::result::Result<Model, Stop> {
        let found = gguf::parse(head, file.bytes)?;
        let used = usize::try_from(found.head_bytes).ok().and_then(|bytes| head.get(..bytes));
        let heads = fingerprint::heads(used.into_iter());
        Ok(check::finish(Format::Gguf, vec![file], found.tensors, found.facts, heads)?)
    }

    /// A model of the header of one safetensors file, without the length before it.
    pub fn of_safetensors(file: File, head: &[u8]) -> Result<Model> {
        let tensors = safetensors::parse(head, file.bytes)?;
        let heads = fingerprint::heads(std::iter::once(head));
        check::finish(Format::Safetensors, vec![file], tensors, Facts::default(), heads)
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    /// What tells this model from others: a BLAKE3 hash of its headers, the lengths of its
    /// files, and names, types, sizes and places of its tensors, whatever the files are
    /// called. Two models that differ in weights alone may have the same.
    pub fn fingerprint(&self) -> [u8; 32] {
        fingerprint::of(self)
    }
}
