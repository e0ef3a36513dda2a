//! The header of a safetensors file: its length, then JSON with types, shapes and offsets of
//! tensors. The tensors fill the rest of the file without holes.

use crate::base::json::Json;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::header::Header;
use crate::stream::model::dtype;
use crate::stream::model::{MAX_DIMS, MAX_NAME_BYTES, MAX_TENSORS, Tensor};

/// Longest header, according to the format.
pub const MAX_HEAD_BYTES: u64 = 100_000_000;
/// Bytes of the length before the header.
const LENGTH_BYTES: u64 = 8;

/// Changes INVALID to CORRUPT, for errors in files.
pub fn corrupt(error: Error) -> Error {
    match error.status() {
        Status::Invalid => Error::new(Status::Corrupt, error.message()),
        _ => error,
    }
}

/// Length of the header of a file that begins with these bytes.
pub fn head_bytes(start: [u8; 8], file_bytes: u64) -> Result<u64> {
    let bytes = u64::from_le_bytes(start);
    if file_bytes.checked_sub(LENGTH_BYTES).is_none_or(|left| bytes > left) {
        fail!(
            Corrupt,
            "a header of {bytes} bytes in a file of {file_bytes}: it is cut off, or no model file"
        );
    }
    if bytes > MAX_HEAD_BYTES {
        fail!(Limit, "a header of {bytes} bytes: more than {MAX_HEAD_BYTES}");
    }
    Ok(bytes)
}

/// Reads the header of an open file. Returns its tensors and its bytes.
pub fn read(file: &Header) -> Result<(Vec<Tensor>, Vec<u8>)> {
    if file.bytes() < LENGTH_BYTES {
        fail!(Corrupt, "{} bytes: too short for a safetensors file", file.bytes());
    }
    let mut start = [0; 8];
    start.copy_from_slice(&file.read(0, LENGTH_BYTES)?);
    let head = file.read(LENGTH_BYTES, head_bytes(start, file.bytes())?)?;
    Ok((parse(&head, file.bytes())?, head))
}

/// Parses the header of a file of `file_bytes` bytes; the tensors' file number is 0.
pub fn parse(head: &[u8], file_bytes: u64) -> Result<Vec<Tensor>> {
    let data = LENGTH_BYTES.saturating_add(head.len() as u64);
    let mut tensors = Vec::new();
    let mut json = Json::new(head);
    let read = json.object(|json, name| match name {
        "__metadata__" => metadata(json),
        name => {
            if tensors.len() == MAX_TENSORS {
                fail!(Limit, "more than {MAX_TENSORS} tensors");
            }
            tensors.try_reserve(1).map_err(|_| Status::NoMem)?;
            tensors.push(tensor(json, name, data)?);
            Ok(())
        }
    });
    read.and_then(|()| json.end()).map_err(corrupt)?;
    // The format requires consecutive tensors up to the end of the file.
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    let mut end = data;
    for tensor in &tensors {
        if tensor.offset != end {
            let what = if tensor.offset < end { "overlaps what is" } else { "leaves a hole" };
            fail!(Corrupt, "tensor {:?} at {} {what} before {end}", tensor.name, tensor.offset);
        }
        end = end.saturating_add(tensor.bytes);
    }
    if end != file_bytes {
        let what = if end > file_bytes { "the file is cut off" } else { "something follows" };
        fail!(Corrupt, "tensors end at {end}, the file at {file_bytes}: {what}");
    }
    Ok(tensors)
}

/// Metadata is not used, but must be valid.
fn metadata(json: &mut Json<'_>) -> Result<()> {
    match json.null() {
        true => Ok(()),
        false => json.object(|json, _| json.string().map(drop)),
    }
}

fn once<T>(slot: &mut Option<T>, value: T, name: &str, key: &str) -> Result<()> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => fail!(Corrupt, "tensor {name:?} has {key:?} twice"),
    }
}

fn tensor(json: &mut Json<'_>, name: &str, data: u64) -> Result<Tensor> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::new(Status::Limit, format!("a tensor's name of {} bytes", name.len())));
    }
    let (mut dtype, mut dims, mut range) = (None, None, None);
    json.object(|json, key| match key {
        "dtype" => {
            let word = json.string()?;
            let Some(found) = dtype::safetensors(&word) else {
                fail!(Unsupported, "tensor {name:?} is of the unknown type {word:?}");
            };
            once(&mut dtype, found, name, key)
        }
        "shape" => once(&mut dims, shape(json, name)?, name, key),
        "data_offsets" => once(&mut range, offsets(json, name)?, name, key),
        _ => json.skip(),
    })?;
    let (Some(dtype), Some(dims), Some((from, to))) = (dtype, dims, range) else {
        fail!(Corrupt, "tensor {name:?} lacks its dtype, shape or data_offsets");
    };
    let Some(bytes) = to.checked_sub(from) else {
        fail!(Corrupt, "tensor {name:?} ends at {to}, before it begins at {from}");
    };
    if dtype.bytes(&dims) != Some(bytes) {
        let shape: Vec<u64> = dims.iter().rev().copied().collect();
        fail!(Corrupt, "tensor {name:?}: {} of shape {shape:?} is not {bytes} bytes", dtype.name);
    }
    let Some(offset) = data.checked_add(from) else {
        fail!(Corrupt, "tensor {name:?} at {from} is beyond any file");
    };
    Ok(Tensor { name: name.into(), dtype: dtype.name, dims, file: 0, offset, bytes })
}

/// Dimensions, the innermost first; the file has the reverse order.
fn shape(json: &mut Json<'_>, name: &str) -> Result<Vec<u64>> {
    let mut dims = Vec::new();
    json.array(|json| {
        if dims.len() == MAX_DIMS {
            fail!(Limit, "tensor {name:?} has more than {MAX_DIMS} dimensions");
        }
        dims.push(json.u64()?);
        Ok(())
    })?;
    dims.reverse();
    Ok(dims)
}

fn offsets(json: &mut Json<'_>, name: &str) -> Result<(u64, u64)> {
    let (mut pair, mut count) = ([0; 2], 0);
    json.array(|json| {
        let value = json.u64()?;
        if let Some(slot) = pair.get_mut(count) {
            *slot = value;
        }
        count += 1;
        Ok(())
    })?;
    match count {
        2 => Ok((pair[0], pair[1])),
        _ => fail!(Corrupt, "tensor {name:?} has {count} data_offsets instead of 2"),
    }
}
