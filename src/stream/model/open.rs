//! Finding out what the named files are, and which others belong to them.

use std::path::{Path, PathBuf};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::header::{self, Header};
use crate::stream::model::check::finish;
use crate::stream::model::{
    Facts, File, Format, MAX_FILES, Model, Tensor, config, fingerprint, gguf, safetensors, shards,
    split,
};

/// What one file says.
pub struct Part {
    /// Which file.
    pub path: PathBuf,
    /// How long it is.
    pub bytes: u64,
    /// Its tensors.
    pub tensors: Vec<Tensor>,
    /// Its header.
    pub head: Vec<u8>,
}

/// The same error, said of a file.
pub fn of(path: &Path) -> impl Fn(Error) -> Error + '_ {
    let place = path.display().to_string();
    // What comes from the system names the file already.
    move |error| match error.message().starts_with(&place) {
        true => error,
        false => error.within(&place),
    }
}

/// See [`Model::open`].
pub fn open(paths: &[PathBuf]) -> Result<Model> {
    if paths.len() > MAX_FILES {
        fail!(Limit, "{} files: a model has {MAX_FILES} at most", paths.len());
    }
    match paths {
        [] => fail!(Invalid, "no file is named: name a model file or its directory"),
        [one] if header::is_directory(one)? => directory(one),
        [one] if is_index(one) => sharded(one),
        [one] => match is_gguf(one)? {
            true => split::open(one),
            false => plain(&[one]),
        },
        several => {
            let mut kinds = several.iter().map(|path| is_gguf(path));
            let first = kinds.next().unwrap_or(Ok(false))?;
            for kind in kinds {
                if kind? != first {
                    fail!(Invalid, "GGUF files and others cannot make one model");
                }
            }
            match first {
                true => split::several(several),
                false => plain(&several.iter().collect::<Vec<_>>()),
            }
        }
    }
}

fn is_index(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.ends_with(shards::SUFFIX))
}

fn is_gguf(path: &Path) -> Result<bool> {
    let file = Header::open(path)?;
    if file.bytes() == 0 {
        fail!(Corrupt, "{}: the file is empty", path.display());
    }
    let start = file.read(0, file.bytes().min(4))?;
    // A header of that length in a file of safetensors would be longer than they may be.
    Ok(start == gguf::MAGIC)
}

/// The model in a directory: an index of shards, or a safetensors file, or the GGUF files of
/// one model. Where that leaves a choice, it is the caller's: several files may be copies of
/// the same weights by other names.
fn directory(path: &Path) -> Result<Model> {
    let names = header::names(path)?;
    let with = |suffix: &str| -> Vec<PathBuf> {
        // What looks at pictures stands beside a model, in a file of its own.
        let is = |name: &&String| name.ends_with(suffix) && !name.starts_with("mmproj");
        names.iter().filter(is).map(|name| path.join(name)).collect()
    };
    let (indexes, whole, ggufs) = (with(shards::SUFFIX), with(".safetensors"), with(".gguf"));
    let (place, main) = (path.display(), path.join("model.safetensors"));
    match (indexes.as_slice(), whole.as_slice(), ggufs.as_slice()) {
        ([], [], []) => fail!(NotFound, "{place}: no model files are there"),
        ([], [], [first, ..]) if split::is_one_model(&ggufs) => split::open(first),
        ([], [], several) => {
            fail!(Invalid, "{place}: {} GGUF files of different models: name one", several.len())
        }
        ([index], _, []) => sharded(index),
        ([], [one], []) => plain(&[one]),
        ([], several, []) if several.contains(&main) => plain(&[&main]),
        ([], several, []) => {
            fail!(Invalid, "{place}: {} safetensors files without index: name them", several.len())
        }
        (several, _, []) => fail!(Invalid, "{place}: {} indexes: name one", several.len()),
        _ => fail!(Invalid, "{place}: both GGUF and safetensors files are there: name one"),
    }
}

fn sharded(index: &Path) -> Result<Model> {
    let file = Header::open(index)?;
    let (names, map) = shards::read(&file).map_err(of(index))?;
    let directory = index.parent().unwrap_or(Path::new(""));
    let mut parts = Vec::new();
    for name in &names {
        let part = shard(&directory.join(name)).map_err(|error| match error.status() {
            Status::NotFound => error.within(&format!("{}: a shard is missing", index.display())),
            _ => error,
        })?;
        parts.push(part);
    }
    shards::choose(&map, &names, &mut parts).map_err(of(index))?;
    gather(Format::Safetensors, parts, config_of(index)?)
}

fn shard(path: &Path) -> Result<Part> {
    let file = Header::open(path)?;
    let (tensors, head) = safetensors::read(&file).map_err(of(path))?;
    Ok(Part { path: path.into(), bytes: file.bytes(), tensors, head })
}

fn plain(paths: &[&PathBuf]) -> Result<Model> {
    let mut parts = Vec::new();
    for path in paths {
        parts.push(shard(path)?);
    }
    let facts = paths.first().map_or(Ok(Facts::default()), |path| config_of(path))?;
    gather(Format::Safetensors, parts, facts)
}

/// What `config.json` beside a file says; nothing where there is none.
fn config_of(path: &Path) -> Result<Facts> {
    let path = path.with_file_name("config.json");
    match Header::open(&path) {
        Ok(file) => config::read(&file).map_err(of(&path)),
        Err(error) if error.status() == Status::NotFound => Ok(Facts::default()),
        Err(error) => Err(error),
    }
}

/// Makes one model of what files say.
pub fn gather(format: Format, mut parts: Vec<Part>, facts: Facts) -> Result<Model> {
    let heads = fingerprint::heads(parts.iter().map(|part| part.head.as_slice()));
    let (mut files, mut tensors) = (Vec::new(), Vec::new());
    for (number, part) in parts.iter_mut().enumerate() {
        tensors.try_reserve(part.tensors.len()).map_err(|_| Status::NoMem)?;
        for mut tensor in part.tensors.drain(..) {
            tensor.file = number as u32;
            tensors.push(tensor);
        }
        files.push(File { path: std::mem::take(&mut part.path), bytes: part.bytes });
    }
    finish(format, files, tensors, facts, heads)
}
