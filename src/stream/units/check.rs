//! What holds for the units of a model, whoever made them.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::model::Model;
use crate::stream::units::image::{ceil, floor};
use crate::stream::units::{GRAIN_BYTES, MAX_PARTS, MAX_UNITS, Part, Unit, Units};

/// See [`Units::check`].
pub fn check(units: &Units, model: &Model) -> Result<()> {
    if units.units.len() > MAX_UNITS || units.parts.len() > MAX_PARTS {
        fail!(Limit, "{} units of {} parts", units.units.len(), units.parts.len());
    }
    for unit in &units.units {
        extents(unit, model)?;
    }
    let key = |part: &Part| (part.unit, part.at);
    if !units.parts.is_sorted_by_key(key) {
        fail!(Invalid, "parts are not in the order of units and places");
    }
    let mut has = vec![0u64; units.units.len()];
    for part in &units.parts {
        inside(part, units, model)?;
        has[part.unit as usize] += part.bytes;
    }
    for (unit, has) in units.units.iter().zip(has) {
        if unit.bytes != has {
            fail!(Invalid, "{} is said to have {} bytes and has {has}", unit.name, unit.bytes);
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
            fail!(Invalid, "{name} has grains of its files twice, or not in their order");
        }
        if Some(extent.at) != end.checked_add(extent.offset % GRAIN_BYTES) {
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

/// Checks that a part is where its tensor's bytes come to lie.
fn inside(part: &Part, units: &Units, model: &Model) -> Result<()> {
    let unit = units.units.get(part.unit as usize);
    let tensor = model.tensors.get(part.tensor as usize);
    let Some((unit, tensor)) = unit.zip(tensor) else {
        fail!(Invalid, "there is no unit {} or no tensor {}", part.unit, part.tensor);
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
                fail!(Invalid, "{:?} has no byte {end}, or twice", tensor.name);
            }
            end = from.saturating_add(bytes);
        }
        if end != tensor.bytes {
            fail!(Invalid, "{:?} has {end} of its {} bytes", tensor.name, tensor.bytes);
        }
    }
    Ok(())
}
