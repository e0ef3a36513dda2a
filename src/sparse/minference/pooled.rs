//! The blocks of keys that match a block of queries best, by the products of their means.

use crate::base::status::Result;
use crate::sparse::index_builder::{IndexBuilder, rows};
use crate::sparse::lanes::{LANES, add_products, transpose};
use crate::sparse::minference::inflate::BLOCK;
use crate::sparse::numbers::{all_finite, zeros};
use crate::sparse::pool::{Divisor, pool};
use crate::sparse::prefill_inputs::{PrefillInputs, not_finite};
use crate::sparse::ranks::Ranks;

/// Means of blocks, and their products.
#[derive(Default)]
pub struct Pooled {
    queries: Vec<f32>,
    keys: Vec<f32>,
    transposed: Vec<f32>,
    products: Vec<f32>,
    scores: Vec<f32>,
    ranks: Ranks,
    chosen: Vec<u32>,
}

impl Pooled {
    /// Adds the best `count` blocks for each row of a head. Blocks that begin inside a row are
    /// always added. That is the row's own block, unless a part of the prompt begins inside a
    /// block.
    pub fn add(
        &mut self,
        inputs: &PrefillInputs<'_>,
        head: u32,
        count: u32,
        out: &mut IndexBuilder,
    ) -> Result<()> {
        let dim = inputs.dim();
        // Missing rows of a block count as zeros, as in the published code.
        pool(inputs.queries, head, BLOCK, Divisor::Full, &mut self.queries)?;
        pool(inputs.keys, inputs.key_head(head), BLOCK, Divisor::Full, &mut self.keys)?;
        zeros(&mut self.transposed, dim * LANES)?;
        let blocks = self.keys.len() / dim;
        let all = rows(inputs.first, inputs.tokens, BLOCK);
        for group in (0..all.clone().count()).step_by(LANES) {
            transpose(self.queries.chunks_exact(dim).skip(group), 1.0, &mut self.transposed);
            zeros(&mut self.products, blocks * LANES)?;
            add_products(&self.transposed, &self.keys, dim, &mut self.products);
            if !all_finite(&self.products) {
                return Err(not_finite("products of queries and keys"));
            }
            for (lane, row) in all.clone().skip(group).take(LANES).enumerate() {
                let open = (row.first / BLOCK + 1) as usize;
                self.scores.clear();
                let column = self.products.iter().skip(lane).step_by(LANES).take(open);
                self.scores.extend(column);
                self.chosen.clear();
                self.ranks.top(&self.scores, count as usize, &mut self.chosen)?;
                let inside = open as u32..row.end.div_ceil(BLOCK);
                out.list(self.chosen.iter().copied().chain(inside))?;
            }
        }
        Ok(())
    }
}
