//! The engine's tensors: filled by the model, loaded from the store, and compared.

use kvtier::base::sync::Arc;
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::{CellRange, Wanted};

use super::model::Model;

/// K and V of each layer for one conversation.
pub struct Tensors(Vec<[Vec<u8>; 2]>);

impl Tensors {
    /// Tensors for `tokens` tokens.
    pub fn new(model: &Model, tokens: u64) -> Tensors {
        let bytes = (tokens * model.token_bytes()) as usize;
        Tensors((0..model.layout.layers()).map(|_| [vec![0; bytes], vec![0; bytes]]).collect())
    }

    /// A transfer of the first `tokens` tokens in all layers.
    pub fn cell_range(&mut self, model: &Model, tokens: u64, by_layer: bool) -> CellRange {
        let token_bytes = model.token_bytes();
        let plane = |bytes: &mut Vec<u8>| {
            PlaneView::canonical(bytes.as_mut_ptr() as u64, tokens as u32, token_bytes)
        };
        let layers = self.0.iter_mut();
        let views: Vec<_> =
            layers.map(|[k, v]| LayerViews { k: plane(k), v: Some(plane(v)) }).collect();
        let layers = model.layout.layers();
        let (first_token, first_layer) = (0, 0);
        let views = Arc::new(Views::from(views));
        let (wanted, after) = (Wanted::All, None);
        CellRange { first_token, tokens, first_layer, layers, by_layer, wanted, views, after }
    }

    /// The forward pass: computes the KV of the tokens from index `from`.
    pub fn compute(&mut self, model: &Model, marks: &[u64], from: usize) {
        let each = model.token_bytes() as usize;
        for (layer, planes) in self.0.iter_mut().enumerate() {
            for (plane, bytes) in planes.iter_mut().enumerate() {
                for (i, &mark) in marks.iter().enumerate().skip(from) {
                    model.fill(mark, layer, plane as u64, &mut bytes[i * each..][..each]);
                }
            }
        }
    }

    /// The number of chunks of planes that differ from the model's KV for these tokens.
    pub fn wrong(&self, model: &Model, marks: &[u64]) -> u64 {
        let each = model.token_bytes() as usize;
        let chunk = model.layout.chunk_tokens() as usize;
        let mut right = vec![0u8; each];
        let mut wrong = 0;
        for (layer, planes) in self.0.iter().enumerate() {
            for (plane, bytes) in planes.iter().enumerate() {
                let bad = marks.iter().enumerate().filter(|&(i, &mark)| {
                    model.fill(mark, layer, plane as u64, &mut right);
                    bytes[i * each..][..each] != *right
                });
                wrong += bad.count().div_ceil(chunk) as u64;
            }
        }
        wrong
    }
}
