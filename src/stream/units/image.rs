//! Where the bytes of units lie in files, and where in memory.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::model::Model;
use crate::stream::units::{Extent, GRAIN_BYTES, MAX_PARTS, Part, Unit, Units, check};

/// A tensor, or a piece of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Which tensor.
    pub tensor: u32,
    /// Where in it.
    pub from: u64,
    /// How long.
    pub bytes: u64,
}

/// The place on the grain at or before an offset.
pub fn floor(offset: u64) -> u64 {
    offset - offset % GRAIN_BYTES
}

/// The place on the grain at or after an offset.
pub fn ceil(offset: u64) -> u64 {
    offset.checked_next_multiple_of(GRAIN_BYTES).unwrap_or(floor(u64::MAX))
}

/// Makes units, which have no extents yet, of the slices that belong to them.
pub fn build(model: &Model, all: impl Iterator<Item = (Unit, Vec<Slice>)>) -> Result<Units> {
    let mut made = Units { units: Vec::new(), parts: Vec::new() };
    for (mut unit, slices) in all {
        let number = made.units.len() as u32;
        place(model, &mut unit, slices, number, &mut made.parts)?;
        made.units.try_reserve(1).map_err(|_| Status::NoMem)?;
        made.units.push(unit);
    }
    check::check(&made, model)?;
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
        fail!(Limit, "more than {MAX_PARTS} tensors and parts of such");
    }
    let mut places = Vec::new();
    places.try_reserve(slices.len()).map_err(|_| Status::NoMem)?;
    for slice in slices {
        let Some(tensor) = model.tensors.get(slice.tensor as usize) else {
            fail!(Invalid, "there is no tensor {}", slice.tensor);
        };
        places.push((tensor.file, tensor.offset + slice.from, slice));
    }
    places.sort_unstable_by_key(|(file, offset, slice)| (*file, *offset, slice.bytes));
    parts.try_reserve(places.len()).map_err(|_| Status::NoMem)?;
    for (file, offset, Slice { tensor, from, bytes }) in places {
        let end = offset + bytes;
        // What lies between is less than a grain: reading it costs less than leaving it out,
        // and no grain is read twice.
        let near = unit
            .extents
            .last_mut()
            .filter(|last| last.file == file && offset - (last.offset + last.bytes) < GRAIN_BYTES);
        let at = match near {
            Some(last) => {
                last.bytes = end - last.offset;
                last.at + (offset - last.offset)
            }
            None => {
                let at = end_of(&unit.extents) + offset % GRAIN_BYTES;
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

/// Where the image ends after extents: on the grain.
fn end_of(extents: &[Extent]) -> u64 {
    extents.last().map_or(0, |last| ceil(last.at + last.bytes))
}
