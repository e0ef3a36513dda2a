//! Which tensors make a unit.

use std::collections::BTreeMap;

use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::model::{Model, Tensor};
use crate::stream::units::image::{Slice, build};
use crate::stream::units::names::{Belongs, MAX_EXPERTS, belongs};
use crate::stream::units::{MAX_PARTS, MAX_UNITS, NONE, Role, Unit, Units};

/// What a unit is, in the order of a pass.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Embedding,
    /// What has no role comes before the layers: they may all need it.
    Other(String),
    /// Experts, from 1, follow what is of the layer alone.
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

/// Into how many experts a tensor is divided, if it is stacked and that comes out even.
fn division(tensor: &Tensor, experts: u32) -> Option<u64> {
    let experts = u64::from(experts);
    let even = experts > 0 && tensor.bytes % experts == 0 && tensor.bytes > 0;
    (even && tensor.dims.last() == Some(&experts)).then_some(experts)
}

/// The experts of each layer that has stacked tensors: what those of three dimensions agree
/// on, or else what the files say.
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
    let said = u64::from(model.facts.experts);
    let count = |found: Option<u64>| u32::try_from(found.unwrap_or(said)).unwrap_or(0);
    found.into_iter().map(|(layer, found)| (layer, count(found))).collect()
}

fn push(groups: &mut BTreeMap<Key, Vec<Slice>>, key: Key, slice: Slice) -> Result<()> {
    let group = groups.entry(key).or_default();
    group.try_reserve(1).map_err(|_| Status::NoMem)?;
    group.push(slice);
    Ok(())
}

/// See [`Units::of`].
pub fn of(model: &Model) -> Result<Units> {
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
        fail!(Limit, "layer {layer} has {count} experts: too many to be told apart");
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
