//! What tells one model from another without reading its weights.

use crate::stream::model::{Format, Model};

const DOMAIN: &str = "kvtier model fingerprint v1";

/// A hash of the headers of files, each with its length before it.
pub fn heads<'a>(heads: impl Iterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("kvtier model headers v1");
    for head in heads {
        field(&mut hasher, head);
    }
    *hasher.finalize().as_bytes()
}

fn field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// See [`Model::fingerprint`].
pub fn of(model: &Model) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(DOMAIN);
    let format: u8 = match model.format {
        Format::Gguf => 1,
        Format::Safetensors => 2,
        Format::Table => 3,
    };
    hasher.update(&[format]);
    hasher.update(&model.heads);
    hasher.update(&(model.files.len() as u64).to_le_bytes());
    for file in &model.files {
        hasher.update(&file.bytes.to_le_bytes());
    }
    let mut order: Vec<_> = model.tensors.iter().collect();
    order.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    hasher.update(&(order.len() as u64).to_le_bytes());
    for tensor in order {
        field(&mut hasher, tensor.name.as_bytes());
        field(&mut hasher, tensor.dtype.as_bytes());
        hasher.update(&(tensor.dims.len() as u64).to_le_bytes());
        for dim in &tensor.dims {
            hasher.update(&dim.to_le_bytes());
        }
        hasher.update(&tensor.file.to_le_bytes());
        hasher.update(&tensor.offset.to_le_bytes());
        hasher.update(&tensor.bytes.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}
