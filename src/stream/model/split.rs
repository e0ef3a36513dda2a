//! GGUF models of one file or of several, `NAME-00001-of-00005.gguf`.

use std::path::{Path, PathBuf};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::header::Header;
use crate::stream::model::gguf::{self, Gguf};
use crate::stream::model::open::{Part, gather, of};
use crate::stream::model::{Facts, Format, MAX_FILES, Model};

const SUFFIX: &str = ".gguf";
const OF: &str = "-of-";
const DIGITS: usize = 5;

/// A name of a file of a split model: what stands before, its number from 1, and how many.
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

/// Whether files are one, or all of the files of one split model.
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

/// Opens the model that a file is, or is one of.
pub fn open(path: &Path) -> Result<Model> {
    let (one, found) = part(path)?;
    let Some(split) = found.split else {
        return gather(Format::Gguf, vec![one], found.facts);
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
    several(&paths)
}

/// Opens a model whose files are all named, in any order.
pub fn several(paths: &[PathBuf]) -> Result<Model> {
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
    let said = all.iter().find_map(|(split, ..)| split.tensors).unwrap_or(found);
    if said != found {
        let text = format!("the files have {found} tensors, where split.tensors.count is {said}");
        return Err(all.first().map_or(Error::from(Status::Corrupt), |(_, part, _)| {
            of(&part.path)(Error::new(Status::Corrupt, text))
        }));
    }
    // What is said of the model stands in the first file alone.
    let facts = all.first().map_or(Facts::default(), |(_, _, facts)| facts.clone());
    gather(Format::Gguf, all.into_iter().map(|(_, part, _)| part).collect(), facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_split_files_are_known() {
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
