//! Builds units: from the names of tensors, or from a table; with their extents and images.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::model::{Model, Tensor};
use crate::stream::units::names::{Belongs, MAX_EXPERTS, MAX_LAYERS, belongs};
use crate::stream::units::{
    ALIGN_BYTES, Extent, MAX_PARTS, MAX_UNITS, NONE, Part, Role, Unit, Units, ceil, floor,
};

/// Identity of a unit, in the order of a pass.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Embedding,
    /// Tensors without a role come before the layers: all of them may need these.
    Other(String),
    /// Experts, from 1, follow the layer itself (0).
    Layer(u32, u32),
    Norm,
    Head,
}

impl Key {
    fn unit(&self) -> Unit {
        let (name, role, layer, expert) = match self {
            Key::Embedding => ("embedding".into(), Role::Embedding, NONE, NONE),
            Key::Other(word) => (format!("other {word}"), Role::Other, NONE, NONE),
            Key::Layer(layer, 0) => (format!("layer {layer}"), Role::Layer, *layer, NONE),
            Key::Layer(layer, n) => {
                let expert = n - 1;
                (format!("layer {layer} expert {expert}"), Role::Expert, *layer, expert)
            }
            Key::Norm => ("norm".into(), Role::Norm, NONE, NONE),
            Key::Head => ("head".into(), Role::Head, NONE, NONE),
        };
        Unit { name, role, layer, expert, extents: Vec::new(), bytes: 0, image_bytes: 0 }
    }
}

/// The number of experts that a stacked tensor is divided into, if the division is even.
fn division(tensor: &Tensor, experts: u32) -> Option<u64> {
    let experts = u64::from(experts);
    let even = experts > 0 && tensor.bytes % experts == 0 && tensor.bytes > 0;
    (even && tensor.dims.last() == Some(&experts)).then_some(experts)
}

/// The number of experts of each layer with stacked tensors: the last dimension of tensors with
/// three, if these agree, else the number that the files state.
fn experts(model: &Model) -> BTreeMap<u32, u32> {
    let mut found: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    let mut differ = Vec::new();
    for tensor in &model.tensors {
        let Belongs::Stacked(layer) = belongs(&tensor.name) else { continue };
        let slot = found.entry(layer).or_default();
        let Some(&last) = tensor.dims.last().filter(|_| tensor.dims.len() >= 3) else { continue };
        match slot {
            Some(known) if *known != last => differ.push(layer),
            slot => *slot = Some(last),
        }
    }
    for layer in differ {
        found.insert(layer, None);
    }
    let experts = u64::from(model.facts.experts);
    let count = |found: Option<u64>| u32::try_from(found.unwrap_or(experts)).unwrap_or(0);
    found.into_iter().map(|(layer, found)| (layer, count(found))).collect()
}

fn push(groups: &mut BTreeMap<Key, Vec<Slice>>, key: Key, slice: Slice) -> Result<()> {
    let group = groups.entry(key).or_default();
    group.try_reserve(1).map_err(|_| Status::NoMem)?;
    group.push(slice);
    Ok(())
}

/// See [`Units::of`].
pub fn units_of(model: &Model) -> Result<Units> {
    let experts = experts(model);
    let mut groups = BTreeMap::new();
    let mut slices = 0u64;
    for (number, tensor) in model.tensors.iter().enumerate().filter(|(_, t)| t.bytes > 0) {
        let whole = Slice { tensor: number as u32, from: 0, bytes: tensor.bytes };
        let key = match belongs(&tensor.name) {
            Belongs::Embedding => Key::Embedding,
            Belongs::Other(word) => Key::Other(word.into()),
            Belongs::Layer(layer) => Key::Layer(layer, 0),
            Belongs::Expert(layer, expert) => Key::Layer(layer, expert + 1),
            Belongs::Norm => Key::Norm,
            Belongs::Head => Key::Head,
            Belongs::Stacked(layer) => {
                let count = experts.get(&layer).copied().unwrap_or(0);
                match division(tensor, count) {
                    None => Key::Layer(layer, 0),
                    Some(count) => {
                        slices += count;
                        divide(&mut groups, layer, whole, count, slices)?;
                        continue;
                    }
                }
            }
        };
        slices += 1;
        push(&mut groups, key, whole)?;
        if groups.len() > MAX_UNITS {
            fail!(Limit, "more than {MAX_UNITS} units");
        }
    }
    build(model, groups.into_iter().map(|(key, slices)| (key.unit(), slices)))
}

fn divide(
    groups: &mut BTreeMap<Key, Vec<Slice>>,
    layer: u32,
    whole: Slice,
    count: u64,
    slices: u64,
) -> Result<()> {
    if count > u64::from(MAX_EXPERTS) || slices > MAX_PARTS as u64 {
        fail!(Limit, "layer {layer} has {count} experts: more than can be separated");
    }
    let bytes = whole.bytes / count;
    for expert in 0..count as u32 {
        let from = u64::from(expert) * bytes;
        push(groups, Key::Layer(layer, expert + 1), Slice { from, bytes, ..whole })?;
        if groups.len() > MAX_UNITS {
            fail!(Limit, "more than {MAX_UNITS} units");
        }
    }
    Ok(())
}

// Units named by the engine, for files of an unknown format.

/// A range of a file that belongs to a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Index of the file.
    pub file: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Length of the range.
    pub bytes: u64,
}

/// A unit named by the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of the unit.
    pub name: String,
    /// Role of the unit.
    pub role: Role,
    /// Its layer, or [`NONE`].
    pub layer: u32,
    /// Its expert, or [`NONE`].
    pub expert: u32,
    /// Ranges of the unit.
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
    // The model sorts its tensors by file, so their units are stored beside it.
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

/// Checks that a unit has the layer and expert numbers of its role, and no others.
fn numbers(entry: &Entry) -> Result<()> {
    let (name, is_expert) = (&entry.name, entry.role == Role::Expert);
    let in_layer = is_expert || entry.role == Role::Layer;
    if in_layer != (entry.layer != NONE) || is_expert != (entry.expert != NONE) {
        fail!(Invalid, "{name:?}: its layer or expert number does not match its role");
    }
    if (in_layer && entry.layer >= MAX_LAYERS) || (is_expert && entry.expert >= MAX_EXPERTS) {
        let (layer, expert) = (entry.layer, entry.expert);
        fail!(Limit, "{name:?} has layer {layer} and expert {expert}: numbers must be below 65536");
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
        Some(pair) => {
            fail!(Invalid, "{:?} and {:?} are the same layer or expert", pair[0].2, pair[1].2)
        }
        None => Ok(()),
    }
}

fn tensor(name: String, range: &Range) -> Tensor {
    let Range { file, offset, bytes } = *range;
    Tensor { name, dtype: "bytes", dims: vec![bytes], file, offset, bytes }
}

// Extents and images: where the bytes of units are in files and in memory.

/// A tensor or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Index of the tensor.
    pub tensor: u32,
    /// Offset in the tensor.
    pub from: u64,
    /// Length.
    pub bytes: u64,
}

/// Builds units without extents from their slices.
pub fn build(model: &Model, all: impl Iterator<Item = (Unit, Vec<Slice>)>) -> Result<Units> {
    let mut made = Units { units: Vec::new(), parts: Vec::new() };
    for (mut unit, slices) in all {
        let number = made.units.len() as u32;
        place(model, &mut unit, slices, number, &mut made.parts)?;
        made.units.try_reserve(1).map_err(|_| Status::NoMem)?;
        made.units.push(unit);
    }
    check(&made, model)?;
    Ok(made)
}

fn place(
    model: &Model,
    unit: &mut Unit,
    slices: Vec<Slice>,
    number: u32,
    parts: &mut Vec<Part>,
) -> Result<()> {
    if parts.len() + slices.len() > MAX_PARTS {
        fail!(Limit, "more than {MAX_PARTS} parts of tensors");
    }
    let mut located = Vec::new();
    located.try_reserve(slices.len()).map_err(|_| Status::NoMem)?;
    for slice in slices {
        let Some(tensor) = model.tensors.get(slice.tensor as usize) else {
            fail!(Invalid, "tensor {} does not exist", slice.tensor);
        };
        located.push((tensor.file, tensor.offset + slice.from, slice));
    }
    located.sort_unstable_by_key(|(file, offset, slice)| (*file, *offset, slice.bytes));
    parts.try_reserve(located.len()).map_err(|_| Status::NoMem)?;
    for (file, offset, Slice { tensor, from, bytes }) in located {
        let end = offset + bytes;
        // A gap smaller than the alignment is read along: that costs less than a second read, and
        // no aligned block is read twice.
        let adjacent = unit
            .extents
            .last_mut()
            .filter(|last| last.file == file && offset - (last.offset + last.bytes) < ALIGN_BYTES);
        let at = match adjacent {
            Some(last) => {
                last.bytes = end - last.offset;
                last.at + (offset - last.offset)
            }
            None => {
                let at = end_of(&unit.extents) + offset % ALIGN_BYTES;
                unit.extents.push(Extent { file, offset, bytes, at });
                at
            }
        };
        unit.bytes += bytes;
        parts.push(Part { tensor, unit: number, at, from, bytes });
    }
    unit.image_bytes = end_of(&unit.extents);
    Ok(())
}

/// End of the image after its extents, aligned.
fn end_of(extents: &[Extent]) -> u64 {
    extents.last().map_or(0, |last| ceil(last.at + last.bytes))
}

// Checks that hold for the units of every model.

/// See [`Units::check`].
pub fn check(units: &Units, model: &Model) -> Result<()> {
    if units.units.len() > MAX_UNITS || units.parts.len() > MAX_PARTS {
        fail!(
            Limit,
            "{} units with {} parts, the limits are {MAX_UNITS} and {MAX_PARTS}",
            units.units.len(),
            units.parts.len()
        );
    }
    for unit in &units.units {
        extents(unit, model)?;
    }
    let key = |part: &Part| (part.unit, part.at);
    if !units.parts.is_sorted_by_key(key) {
        fail!(Invalid, "parts are not sorted by unit and offset");
    }
    let mut has = vec![0u64; units.units.len()];
    for part in &units.parts {
        inside(part, units, model)?;
        has[part.unit as usize] += part.bytes;
    }
    for (unit, has) in units.units.iter().zip(has) {
        if unit.bytes != has {
            fail!(Invalid, "{} states {} bytes and has {has}", unit.name, unit.bytes);
        }
    }
    whole(units, model)
}

fn extents(unit: &Unit, model: &Model) -> Result<()> {
    let name = &unit.name;
    let mut end = 0u64;
    let mut last: Option<(u32, u64)> = None;
    for extent in &unit.extents {
        let Some(file) = model.files.get(extent.file as usize) else {
            fail!(Invalid, "{name} is in file {} of {}", extent.file, model.files.len());
        };
        let stop = extent.offset.checked_add(extent.bytes).filter(|stop| *stop <= file.bytes);
        let Some(stop) = stop.filter(|_| extent.bytes > 0) else {
            let (bytes, offset) = (extent.bytes, extent.offset);
            fail!(Invalid, "{name} has {bytes} bytes at {offset}, of a file of {}", file.bytes);
        };
        if last.is_some_and(|last| last > (extent.file, floor(extent.offset))) {
            fail!(Invalid, "{name} has overlapping or unsorted extents");
        }
        if Some(extent.at) != end.checked_add(extent.offset % ALIGN_BYTES) {
            fail!(Invalid, "{name} has {} at {} of its image", extent.offset, extent.at);
        }
        end = end.saturating_add(ceil(stop) - floor(extent.offset));
        last = Some((extent.file, ceil(stop)));
    }
    if end != unit.image_bytes {
        fail!(Invalid, "the image of {name} has {end} bytes, not {}", unit.image_bytes);
    }
    Ok(())
}

/// Checks that a part is where its tensor's bytes are loaded.
fn inside(part: &Part, units: &Units, model: &Model) -> Result<()> {
    let unit = units.units.get(part.unit as usize);
    let tensor = model.tensors.get(part.tensor as usize);
    let Some((unit, tensor)) = unit.zip(tensor) else {
        fail!(Invalid, "unit {} or tensor {} does not exist", part.unit, part.tensor);
    };
    let Some(offset) = tensor.offset.checked_add(part.from) else {
        fail!(Invalid, "{:?} ends before {}", tensor.name, part.from);
    };
    let after = unit.extents.partition_point(|extent| extent.at <= part.at);
    let extent = after.checked_sub(1).and_then(|i| unit.extents.get(i));
    let fits = extent.is_some_and(|extent| {
        let from = part.at - extent.at;
        extent.file == tensor.file
            && extent.offset.checked_add(from) == Some(offset)
            && from.checked_add(part.bytes).is_some_and(|end| end <= extent.bytes)
    });
    if !fits {
        fail!(Invalid, "{:?} is not where {} says", tensor.name, unit.name);
    }
    Ok(())
}

/// Checks that every byte of every tensor is in one part.
fn whole(units: &Units, model: &Model) -> Result<()> {
    let mut order = Vec::new();
    order.try_reserve(units.parts.len()).map_err(|_| Status::NoMem)?;
    order.extend(units.parts.iter().map(|part| (part.tensor, part.from, part.bytes)));
    order.sort_unstable();
    let mut parts = order.into_iter().peekable();
    for (number, tensor) in model.tensors.iter().enumerate() {
        let mut end = 0;
        while let Some((_, from, bytes)) = parts.next_if(|part| part.0 == number as u32) {
            if from != end || bytes == 0 {
                fail!(Invalid, "{:?}: byte {end} is in no part or in two", tensor.name);
            }
            end = from.saturating_add(bytes);
        }
        if end != tensor.bytes {
            fail!(Invalid, "{:?}: its parts have {end} of {} bytes", tensor.name, tensor.bytes);
        }
    }
    Ok(())
}
