//! Model files: the tensors, and where their bytes are. Files are not trusted: every count, length
//! and offset is checked before it is used, and no memory is allocated for a size that only a file
//! states.

pub mod config;
pub mod dtype;
mod facts;
pub mod gguf;
mod open;
pub mod safetensors;
pub mod shards;

use std::path::PathBuf;

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::header::Header;
pub use crate::stream::model::facts::Facts;
pub use crate::stream::model::gguf::Stop;

/// Most files of a model.
pub const MAX_FILES: usize = 1 << 12;
/// Most tensors of a model.
pub const MAX_TENSORS: usize = 1 << 20;
/// Most dimensions of a tensor.
pub const MAX_DIMS: usize = 8;
/// Longest name of a tensor.
pub const MAX_NAME_BYTES: usize = 512;

/// Format of a model.
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
    /// Path of the file.
    pub path: PathBuf,
    /// Length of the file.
    pub bytes: u64,
}

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Name of the data type in the file's format: `Q6_K`, `BF16`.
    pub dtype: &'static str,
    /// Dimensions, the innermost first.
    pub dims: Vec<u64>,
    /// Index in [`Model::files`].
    pub file: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Length in the file.
    pub bytes: u64,
}

/// A model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Format of the files.
    pub format: Format,
    /// The files.
    pub files: Vec<File>,
    /// The tensors, sorted by file and offset. They do not overlap.
    pub tensors: Vec<Tensor>,
    /// Properties of the model.
    pub facts: Facts,
    /// Hash of the headers of the files.
    pub heads: [u8; 32],
}

impl Model {
    /// Opens a model: a GGUF or safetensors file, the index of a sharded model, the directory of a
    /// model, one file of a split GGUF model, or all its files.
    pub fn open(paths: &[PathBuf]) -> Result<Model> {
        open::open(paths)
    }

    /// A model whose tensors the caller names, in existing files.
    pub fn table(paths: &[PathBuf], tensors: Vec<Tensor>) -> Result<Model> {
        let mut files = Vec::new();
        for path in paths.iter().take(MAX_FILES + 1) {
            files.push(File { path: path.clone(), bytes: Header::open(path)?.bytes() });
        }
        Model::named(files, tensors)
    }

    /// The same for files of known length.
    pub fn named(files: Vec<File>, tensors: Vec<Tensor>) -> Result<Model> {
        let heads = hash_headers(std::iter::empty());
        finish(Format::Table, files, tensors, Facts::default(), heads)
    }

    /// A model from the header of one GGUF file; `head` is its start or all of it.
    pub fn of_gguf(file: File, head: &[u8]) -> std::result::Result<Model, Stop> {
        let found = gguf::parse(head, file.bytes)?;
        let used = usize::try_from(found.head_bytes).ok().and_then(|bytes| head.get(..bytes));
        let heads = hash_headers(used.into_iter());
        Ok(finish(Format::Gguf, vec![file], found.tensors, found.facts, heads)?)
    }

    /// A model from the header of one safetensors file, without the length before it.
    pub fn of_safetensors(file: File, head: &[u8]) -> Result<Model> {
        let tensors = safetensors::parse(head, file.bytes)?;
        let heads = hash_headers(std::iter::once(head));
        finish(Format::Safetensors, vec![file], tensors, Facts::default(), heads)
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    /// Identifies the model: a BLAKE3 hash of its headers, the lengths of its files, and the
    /// names, types, sizes and offsets of its tensors. File names do not matter. Two models that
    /// differ only in weights may have the same fingerprint.
    pub fn fingerprint(&self) -> [u8; 32] {
        fingerprint_of(self)
    }
}

// Checks that hold for every model.

/// Longest file: rounded offsets stay within the limits of system calls.
const MAX_FILE_BYTES: u64 = 1 << 62;

/// Makes a model. Contradictions have the status INVALID if the caller named the tensors, else
/// CORRUPT.
fn finish(
    format: Format,
    files: Vec<File>,
    mut tensors: Vec<Tensor>,
    facts: Facts,
    heads: [u8; 32],
) -> Result<Model> {
    let wrong = match format {
        Format::Table => Status::Invalid,
        _ => Status::Corrupt,
    };
    limits(&files, &tensors)?;
    for tensor in &tensors {
        alone(tensor, &files).map_err(|what| {
            let (name, place) = (&tensor.name, place(&files, tensor.file));
            Error::new(wrong, format!("{place}tensor {name:?} {what}"))
        })?;
    }
    names(&tensors, &files, wrong)?;
    tensors.sort_by_key(|tensor| (tensor.file, tensor.offset, tensor.bytes));
    for pair in tensors.windows(2) {
        let [a, b] = pair else { continue };
        if a.file == b.file && a.offset + a.bytes > b.offset && b.bytes > 0 {
            let (place, at) = (place(&files, a.file), b.offset);
            let text = format!("{place}tensors {:?} and {:?} overlap at byte {at}", a.name, b.name);
            return Err(Error::new(wrong, text));
        }
    }
    Ok(Model { format, files, tensors, facts, heads })
}

fn limits(files: &[File], tensors: &[Tensor]) -> Result<()> {
    if files.len() > MAX_FILES {
        fail!(Limit, "{} files: a model has {MAX_FILES} at most", files.len());
    }
    if tensors.len() > MAX_TENSORS {
        fail!(Limit, "{} tensors: a model has {MAX_TENSORS} at most", tensors.len());
    }
    match files.iter().find(|file| file.bytes > MAX_FILE_BYTES) {
        Some(file) => fail!(
            Limit,
            "{}: {} bytes, more than any file may have",
            file.path.display(),
            file.bytes
        ),
        None => Ok(()),
    }
}

/// Checks a tensor by itself. The error says what is wrong.
fn alone(tensor: &Tensor, files: &[File]) -> std::result::Result<(), String> {
    if tensor.name.is_empty() || tensor.name.chars().any(char::is_control) {
        return Err("has no printable name".into());
    }
    if tensor.name.len() > MAX_NAME_BYTES {
        return Err(format!("has a name of more than {MAX_NAME_BYTES} bytes"));
    }
    if tensor.dims.len() > MAX_DIMS {
        return Err(format!("has more than {MAX_DIMS} dimensions"));
    }
    let Some(file) = files.get(tensor.file as usize) else {
        return Err(format!("is in file {} of {}", tensor.file, files.len()));
    };
    let end = tensor.offset.checked_add(tensor.bytes);
    if end.is_none_or(|end| end > file.bytes) {
        let (offset, bytes) = (tensor.offset, tensor.bytes);
        let what = format!("has {bytes} bytes at {offset}, beyond the end at {}", file.bytes);
        return Err(format!("{what}: the file is damaged or cut off"));
    }
    Ok(())
}

fn names(tensors: &[Tensor], files: &[File], wrong: Status) -> Result<()> {
    let mut names = Vec::new();
    names.try_reserve(tensors.len()).map_err(|_| Status::NoMem)?;
    names.extend(tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.file)));
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => {
            let (name, place) = (pair[1].0, place(files, pair[1].1));
            Err(Error::new(wrong, format!("{place}two tensors are called {name:?}")))
        }
        None => Ok(()),
    }
}

/// The path of a file, as a prefix of messages.
fn place(files: &[File], number: u32) -> String {
    let file = files.get(number as usize);
    file.map_or(String::new(), |file| format!("{}: ", file.path.display()))
}

// Fingerprints: identify a model without reading its weights.

const DOMAIN: &str = "kvtier model fingerprint v1";

/// Hash of the headers of files, each with its length before it.
fn hash_headers<'a>(heads: impl Iterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("kvtier model headers v1");
    for head in heads {
        field(&mut hasher, head);
    }
    *hasher.finalize().as_bytes()
}

fn field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// See [`Model::fingerprint`].
fn fingerprint_of(model: &Model) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(DOMAIN);
    let format: u8 = match model.format {
        Format::Gguf => 1,
        Format::Safetensors => 2,
        Format::Table => 3,
    };
    hasher.update(&[format]);
    hasher.update(&model.heads);
    hasher.update(&(model.files.len() as u64).to_le_bytes());
    for file in &model.files {
        hasher.update(&file.bytes.to_le_bytes());
    }
    let mut order: Vec<_> = model.tensors.iter().collect();
    order.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    hasher.update(&(order.len() as u64).to_le_bytes());
    for tensor in order {
        field(&mut hasher, tensor.name.as_bytes());
        field(&mut hasher, tensor.dtype.as_bytes());
        hasher.update(&(tensor.dims.len() as u64).to_le_bytes());
        for dim in &tensor.dims {
            hasher.update(&dim.to_le_bytes());
        }
        hasher.update(&tensor.file.to_le_bytes());
        hasher.update(&tensor.offset.to_le_bytes());
        hasher.update(&tensor.bytes.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}
