//! Opens the files of a model: determines their format, and finds the other files of the model.

use std::path::{Path, PathBuf};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::header;
use crate::io::header::Header;
use crate::stream::model::gguf::Gguf;
use crate::stream::model::{
    Facts, File, Format, MAX_FILES, Model, Tensor, config, finish, gguf, hash_headers, safetensors,
    shards,
};

/// One file of a model, with its header.
pub struct Part {
    /// Path of the file.
    pub path: PathBuf,
    /// Length of the file.
    pub bytes: u64,
    /// Its tensors.
    pub tensors: Vec<Tensor>,
    /// Bytes of its header.
    pub head: Vec<u8>,
}

/// Adds the path to an error.
pub fn of(path: &Path) -> impl Fn(Error) -> Error + '_ {
    let place = path.display().to_string();
    // System errors name the file already.
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
            true => open_gguf(one),
            false => plain(&[one]),
        },
        several => {
            let mut kinds = several.iter().map(|path| is_gguf(path));
            let first = kinds.next().unwrap_or(Ok(false))?;
            for kind in kinds {
                if kind? != first {
                    fail!(Invalid, "GGUF files and other files cannot form one model");
                }
            }
            match first {
                true => open_split(several),
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
    // A safetensors file that begins with these bytes would have a header longer than the limit.
    Ok(start == gguf::MAGIC)
}

/// Opens the model in a directory: an index of shards, a safetensors file, or the GGUF files of
/// one model. If there is a choice, it is left to the caller: several files may be variants of the
/// same weights.
fn directory(path: &Path) -> Result<Model> {
    let names = header::names(path)?;
    let with = |suffix: &str| -> Vec<PathBuf> {
        // A vision projector is in a file of its own beside the model.
        let is = |name: &&String| name.ends_with(suffix) && !name.starts_with("mmproj");
        names.iter().filter(is).map(|name| path.join(name)).collect()
    };
    let (indexes, whole, ggufs) = (with(shards::SUFFIX), with(".safetensors"), with(".gguf"));
    let (place, main) = (path.display(), path.join("model.safetensors"));
    match (indexes.as_slice(), whole.as_slice(), ggufs.as_slice()) {
        ([], [], []) => fail!(NotFound, "{place}: the directory has no model files"),
        ([], [], [first, ..]) if is_one_model(&ggufs) => open_gguf(first),
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

/// Properties in the `config.json` beside a file; none if it does not exist.
fn config_of(path: &Path) -> Result<Facts> {
    let path = path.with_file_name("config.json");
    match Header::open(&path) {
        Ok(file) => config::read(&file).map_err(of(&path)),
        Err(error) if error.status() == Status::NotFound => Ok(Facts::default()),
        Err(error) => Err(error),
    }
}

/// Joins files to a model.
pub fn gather(format: Format, mut parts: Vec<Part>, facts: Facts) -> Result<Model> {
    let heads = hash_headers(parts.iter().map(|part| part.head.as_slice()));
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

// GGUF models of one file or several, `NAME-00001-of-00005.gguf`.

const SUFFIX: &str = ".gguf";
const OF: &str = "-of-";
const DIGITS: usize = 5;

/// Splits the name of a file of a split model: stem, number from 1, number of files.
fn numbered(name: &str) -> Option<(&str, u64, u64)> {
    let rest = name.strip_suffix(SUFFIX)?;
    let (rest, count) = digits(rest)?;
    let (rest, no) = digits(rest.strip_suffix(OF)?)?;
    let stem = rest.strip_suffix('-')?;
    (no >= 1 && no <= count).then_some((stem, no, count))
}

fn digits(text: &str) -> Option<(&str, u64)> {
    let at = text.len().checked_sub(DIGITS)?;
    let (rest, number) = (text.get(..at)?, text.get(at..)?);
    number.bytes().all(|b| b.is_ascii_digit()).then(|| number.parse().ok())?.map(|n| (rest, n))
}

fn name_of(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// Whether files are one file, or all have names of the same split model.
pub fn is_one_model(paths: &[PathBuf]) -> bool {
    let [first, others @ ..] = paths else { return false };
    let of =
        |path: &Path| name_of(path).and_then(numbered).map(|(stem, _, n)| (stem.to_string(), n));
    others.is_empty()
        || of(first).is_some_and(|one| others.iter().all(|path| of(path).as_ref() == Some(&one)))
}

fn part(path: &Path) -> Result<(Part, Gguf)> {
    let file = Header::open(path)?;
    let (mut found, head) = gguf::read(&file).map_err(of(path))?;
    let tensors = std::mem::take(&mut found.tensors);
    Ok((Part { path: path.into(), bytes: file.bytes(), tensors, head }, found))
}

/// Opens the model that a GGUF file is, or is a part of.
pub fn open_gguf(path: &Path) -> Result<Model> {
    let (opened, found) = part(path)?;
    let Some(split) = found.split else {
        return gather(Format::Gguf, vec![opened], found.facts);
    };
    let place = path.display();
    if split.count > MAX_FILES as u64 {
        fail!(Limit, "{place}: one of {} files: more than {MAX_FILES}", split.count);
    }
    let Some((stem, _, count)) = name_of(path).and_then(numbered) else {
        fail!(
            Invalid,
            "{place}: one of {} files, but not called NAME-00001-of-{:05}.gguf: name them all",
            split.count,
            split.count
        );
    };
    if count != split.count {
        fail!(Corrupt, "{place}: one of {} files, not of {count}", split.count);
    }
    let paths: Vec<PathBuf> = (1..=count)
        .map(|no| path.with_file_name(format!("{stem}-{no:05}{OF}{count:05}{SUFFIX}")))
        .collect();
    open_split(&paths)
}

/// Opens a split model whose files are all named, in any order.
pub fn open_split(paths: &[PathBuf]) -> Result<Model> {
    let mut all = Vec::new();
    for path in paths {
        let (part, found) = part(path).map_err(|error| match error.status() {
            Status::NotFound => error.within("a file of the split model is missing"),
            _ => error,
        })?;
        let Some(split) = found.split else {
            fail!(Invalid, "{}: not a file of a split model: name it alone", path.display());
        };
        let count = paths.len() as u64;
        if split.count != count || split.no >= count {
            let (no, of, place) = (split.no.saturating_add(1), split.count, path.display());
            fail!(Corrupt, "{place}: file {no} of {of}, where {count} files are named");
        }
        all.push((split, part, found.facts));
    }
    all.sort_by_key(|(split, ..)| split.no);
    if let Some(pair) = all.windows(2).find(|pair| pair[0].0.no == pair[1].0.no) {
        let (a, b) = (pair[0].1.path.display(), pair[1].1.path.display());
        fail!(Corrupt, "{a} and {b} are both file {} of the model", pair[0].0.no + 1);
    }
    let found: u64 = all.iter().map(|(_, part, _)| part.tensors.len() as u64).sum();
    let expected = all.iter().find_map(|(split, ..)| split.tensors).unwrap_or(found);
    if expected != found {
        let text =
            format!("the files have {found} tensors, where split.tensors.count is {expected}");
        return Err(all.first().map_or(Error::from(Status::Corrupt), |(_, part, _)| {
            of(&part.path)(Error::new(Status::Corrupt, text))
        }));
    }
    // Properties of the model are in the first file only.
    let facts = all.first().map_or(Facts::default(), |(_, _, facts)| facts.clone());
    gather(Format::Gguf, all.into_iter().map(|(_, part, _)| part).collect(), facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_split_files_are_parsed() {
        assert_eq!(numbered("a-b-00002-of-00005.gguf"), Some(("a-b", 2, 5)));
        assert_eq!(numbered("-00001-of-00001.gguf"), Some(("", 1, 1)));
        for name in [
            "a.gguf",
            "a-00000-of-00005.gguf",
            "a-00006-of-00005.gguf",
            "a-0001-of-00005.gguf",
            "a-00001-of-00005",
            "a00001-of-00005.gguf",
            "a-00001-of-0000é.gguf",
            "a-+0001-of-00005.gguf",
        ] {
            assert_eq!(numbered(name), None, "{name}");
        }
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert!(is_one_model(&paths(&["x/a-00001-of-00002.gguf", "x/a-00002-of-00002.gguf"])));
        assert!(!is_one_model(&paths(&["x/a-00001-of-00002.gguf", "x/b-00002-of-00002.gguf"])));
        assert!(is_one_model(&paths(&["x/a.gguf"])) && !is_one_model(&[]));
    }
}
