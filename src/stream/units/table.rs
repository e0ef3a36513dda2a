//! Units that the engine names itself: for files of a format that is not known here.

use std::path::PathBuf;

use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::model::{Model, Tensor};
use crate::stream::units::image::{Slice, build};
use crate::stream::units::names::{MAX_EXPERTS, MAX_LAYERS};
use crate::stream::units::{MAX_UNITS, NONE, Role, Unit, Units};

/// A stretch of a file that a unit has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Which of the files.
    pub file: u32,
    /// Where in it.
    pub offset: u64,
    /// How long.
    pub bytes: u64,
}

/// A unit as the engine names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it is called.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Its layer, or [`NONE`].
    pub layer: u32,
    /// Its expert, or [`NONE`].
    pub expert: u32,
    /// Its bytes.
    pub ranges: Vec<Range>,
}

/// See [`Units::table`].
pub fn table(paths: &[PathBuf], entries: Vec<Entry>) -> Result<(Model, Units)> {
    if entries.len() > MAX_UNITS {
        fail!(Limit, "{} units: a model has {MAX_UNITS} at most", entries.len());
    }
    let mut tensors = Vec::new();
    for (number, entry) in entries.iter().enumerate() {
        let name = &entry.name;
        numbers(entry)?;
        if entry.ranges.is_empty() {
            fail!(Invalid, "{name:?} has no bytes");
        }
        for (i, range) in entry.ranges.iter().enumerate() {
            if range.bytes == 0 {
                fail!(Invalid, "{name:?} has a range without bytes at {}", range.offset);
            }
            tensors.try_reserve(1).map_err(|_| Status::NoMem)?;
            tensors.push((number, tensor(format!("{name}#{i}"), range)));
        }
    }
    distinct(&entries)?;
    // The model has its tensors in the order of files, so whose they are is kept beside it.
    tensors.sort_by_key(|(_, tensor)| (tensor.file, tensor.offset, tensor.bytes));
    let owners: Vec<usize> = tensors.iter().map(|(owner, _)| *owner).collect();
    let model = Model::table(paths, tensors.into_iter().map(|(_, tensor)| tensor).collect())?;
    let mut slices = vec![Vec::new(); entries.len()];
    for (number, (owner, tensor)) in owners.into_iter().zip(&model.tensors).enumerate() {
        slices[owner].push(Slice { tensor: number as u32, from: 0, bytes: tensor.bytes });
    }
    let units = entries.into_iter().map(|Entry { name, role, layer, expert, .. }| Unit {
        name,
        role,
        layer,
        expert,
        extents: Vec::new(),
        bytes: 0,
        image_bytes: 0,
    });
    let units = build(&model, units.zip(slices))?;
    Ok((model, units))
}

/// Checks that a unit has the numbers that its role has, and no others.
fn numbers(entry: &Entry) -> Result<()> {
    let (name, is_expert) = (&entry.name, entry.role == Role::Expert);
    let in_layer = is_expert || entry.role == Role::Layer;
    if in_layer != (entry.layer != NONE) || is_expert != (entry.expert != NONE) {
        fail!(Invalid, "{name:?} has a layer or an expert that does not go with its role");
    }
    if (in_layer && entry.layer >= MAX_LAYERS) || (is_expert && entry.expert >= MAX_EXPERTS) {
        let (layer, expert) = (entry.layer, entry.expert);
        fail!(Limit, "{name:?} is of layer {layer}, expert {expert}: numbers are below 65536");
    }
    Ok(())
}

/// Checks that no two units are the same layer or expert.
fn distinct(entries: &[Entry]) -> Result<()> {
    let mut all = Vec::new();
    all.try_reserve(entries.len()).map_err(|_| Status::NoMem)?;
    let of_layers = entries.iter().filter(|entry| entry.layer != NONE);
    all.extend(of_layers.map(|entry| (entry.layer, entry.expert, entry.name.as_str())));
    all.sort_unstable();
    match all.windows(2).find(|pair| (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1)) {
        Some(pair) => fail!(Invalid, "{:?} and {:?} are the same", pair[0].2, pair[1].2),
        None => Ok(()),
    }
}

fn tensor(name: String, range: &Range) -> Tensor {
    let Range { file, offset, bytes } = *range;
    Tensor { name, dtype: "bytes", dims: vec![bytes], file, offset, bytes }
}
