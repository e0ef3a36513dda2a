//! What holds for every model, wherever it comes from.

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::stream::model::{
    Facts, File, Format, MAX_DIMS, MAX_FILES, MAX_NAME_BYTES, MAX_TENSORS, Model, Tensor,
};

/// Longest file: offsets that are rounded up stay within what the system calls take.
const MAX_FILE_BYTES: u64 = 1 << 62;

/// Makes a model of what was read or named. Statements that contradict each other are of
/// the status that fits where they come from.
pub fn finish(
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
        Some(file) => fail!(Limit, "{}: {} bytes", file.path.display(), file.bytes),
        None => Ok(()),
    }
}

/// What is wrong with a tensor, whatever others there are.
fn alone(tensor: &Tensor, files: &[File]) -> std::result::Result<(), String> {
    if tensor.name.is_empty() || tensor.name.chars().any(char::is_control) {
        return Err("has no name that can be printed".into());
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

/// A file, to stand before what is said of it.
fn place(files: &[File], number: u32) -> String {
    let file = files.get(number as usize);
    file.map_or(String::new(), |file| format!("{}: ", file.path.display()))
}
