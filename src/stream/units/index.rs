//! Units and parts found without looking at all of them.

use crate::base::status::{Result, Status};
use crate::stream::units::{NONE, Part, Role, Units};

/// What was sorted once, to be asked often.
#[derive(Clone, Debug)]
pub struct Index {
    /// Layers, experts, units.
    layers: Vec<(u32, u32, u32)>,
    /// By tensor, then by place in it.
    parts: Vec<Part>,
}

impl Index {
    /// Sorts what units have.
    pub fn new(units: &Units) -> Result<Index> {
        let (mut layers, mut parts) = (Vec::new(), Vec::new());
        layers.try_reserve(units.units.len()).map_err(|_| Status::NoMem)?;
        parts.try_reserve(units.parts.len()).map_err(|_| Status::NoMem)?;
        let numbered = units.units.iter().zip(0u32..);
        let of_layers = numbered.filter(|(u, _)| matches!(u.role, Role::Layer | Role::Expert));
        layers.extend(of_layers.map(|(unit, number)| (unit.layer, unit.expert, number)));
        parts.extend_from_slice(&units.parts);
        layers.sort_unstable();
        parts.sort_unstable_by_key(|part| (part.tensor, part.from));
        Ok(Index { layers, parts })
    }

    /// The unit of a layer.
    pub fn layer(&self, layer: u32) -> Option<u32> {
        self.expert(layer, NONE)
    }

    /// The unit of an expert of a layer.
    pub fn expert(&self, layer: u32, expert: u32) -> Option<u32> {
        let at = self.layers.partition_point(|known| (known.0, known.1) < (layer, expert));
        let (l, e, unit) = *self.layers.get(at)?;
        ((l, e) == (layer, expert)).then_some(unit)
    }

    /// Where a tensor is: one part, or one for each expert.
    pub fn parts(&self, tensor: u32) -> &[Part] {
        let from = self.parts.partition_point(|part| part.tensor < tensor);
        let to = self.parts.partition_point(|part| part.tensor <= tensor);
        self.parts.get(from..to).unwrap_or(&[])
    }
}
