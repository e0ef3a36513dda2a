//! Attention of the last queries by key and by distance: policies estimate the pattern of a prompt
//! from it.

use crate::base::status::Result;
use crate::sparse::lanes::{LANES, add_products, scale_and_sum, softmax_lanes, transpose};
use crate::sparse::numbers::{all_finite, zeros};
use crate::sparse::prefill_inputs::{PrefillInputs, not_finite};

/// Keys that are read at once.
const TILE: usize = 64;

/// Attention by key and by distance, with its working memory: 128 bytes a token.
#[derive(Clone, Debug, Default)]
pub struct Estimate {
    /// Attention to each key.
    pub columns: Vec<f32>,
    /// Attention at each distance.
    pub diagonals: Vec<f32>,
    transposed: Vec<f32>,
    rows: Vec<f32>,
    weights: Vec<f32>,
}

impl Estimate {
    /// Sums the attention of the last `count` queries of a head. Each query contributes 1.
    pub fn run(&mut self, inputs: &PrefillInputs<'_>, head: u32, count: u32) -> Result<()> {
        let tokens = inputs.tokens as usize;
        zeros(&mut self.columns, tokens)?;
        zeros(&mut self.diagonals, tokens)?;
        zeros(&mut self.transposed, inputs.dim() * LANES)?;
        zeros(&mut self.rows, inputs.dim() * TILE.max(LANES))?;
        let from = inputs.count() - count.min(inputs.count());
        for start in (from..inputs.count()).step_by(LANES) {
            self.add(inputs, head, start, (inputs.count() - start).min(LANES as u32) as usize)?;
        }
        Ok(())
    }

    /// Adds `count` queries from `start` on, at most [`LANES`].
    fn add(
        &mut self,
        inputs: &PrefillInputs<'_>,
        head: u32,
        start: u32,
        count: usize,
    ) -> Result<()> {
        let dim = inputs.dim();
        if let Some(rows) = self.rows.get_mut(..count * dim) {
            inputs.read_queries(head, start, rows)?;
            transpose(rows.chunks_exact(dim), inputs.scale, &mut self.transposed);
        }
        let nearest = (inputs.first + start) as usize;
        zeros(&mut self.weights, (nearest + count) * LANES)?;
        for (tile, out) in self.weights.chunks_mut(TILE * LANES).enumerate() {
            let keys = self.rows.get_mut(..out.len() / LANES * dim).unwrap_or_default();
            inputs.read_keys(head, (tile * TILE) as u32, keys)?;
            add_products(&self.transposed, keys, dim, out);
        }
        if !all_finite(&self.weights) {
            return Err(not_finite("products of queries and keys"));
        }
        self.add_softmax(nearest, count);
        Ok(())
    }

    /// Turns products into softmax weights, and adds them to columns and diagonals.
    fn add_softmax(&mut self, nearest: usize, count: usize) {
        let mut factors = softmax_lanes(&mut self.weights, nearest);
        factors.iter_mut().skip(count).for_each(|factor| *factor = 0.0);
        scale_and_sum(&mut self.weights, &factors, &mut self.columns);
        for (key, row) in self.weights.chunks_exact(LANES).enumerate() {
            let at = nearest.saturating_sub(key);
            let row = row.get(key.saturating_sub(nearest)..count).unwrap_or_default();
            let distances = self.diagonals.get_mut(at..at + row.len()).unwrap_or_default();
            distances.iter_mut().zip(row).for_each(|(sum, weight)| *sum += weight);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sparse::index::Context;
    use crate::sparse::numbers::testing::rows;
    use crate::sparse::shape::Shape;

    fn number(n: usize) -> f32 {
        ((n * 7919 + 13) % 1009) as f32 / 250.0 - 2.0
    }

    /// The definition, in binary64.
    fn plain(q: &[f32], k: &[f32], dim: usize, first: usize, from: usize) -> [Vec<f64>; 2] {
        let mut out = [vec![0.0; k.len() / dim], vec![0.0; k.len() / dim]];
        for (at, query) in q.chunks(dim).enumerate().skip(from) {
            let position = first + at;
            let weights: Vec<f64> = k
                .chunks(dim)
                .take(position + 1)
                .map(|key| {
                    let product: f64 =
                        query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    (product / (dim as f64).sqrt()).exp()
                })
                .collect();
            let sum: f64 = weights.iter().sum();
            for (key, weight) in weights.iter().enumerate() {
                out[0][key] += weight / sum;
                out[1][position - key] += weight / sum;
            }
        }
        out
    }

    #[test]
    fn estimate_is_softmax_summed_by_key_and_distance() {
        for (queries, tokens, count, dim) in
            [(1, 1, 1, 4), (5, 5, 9, 8), (70, 70, 64, 16), (40, 200, 33, 8), (100, 131, 100, 4)]
        {
            let q: Vec<f32> = (0..queries * dim).map(number).collect();
            let k: Vec<f32> = (0..tokens * dim).map(|n| number(n + 17)).collect();
            let shape = Shape {
                layers: 1,
                query_heads: 1,
                key_heads: 1,
                key_dim: dim as u32,
                value_dim: 1,
                scale: 0.0,
                kind: Default::default(),
                block_tokens: 1,
                max_tokens: 1000,
            };
            let first = tokens - queries;
            let context = Context {
                is_prefill: true,
                first_query: first as u32,
                tokens: tokens as u32,
                ..Context::default()
            };
            let (queries_rows, keys_rows) = (rows(&q, 1, dim as u32), rows(&k, 1, dim as u32));
            let inputs = PrefillInputs::check(&shape, 0, &queries_rows, Some(&keys_rows), &context);
            let inputs = inputs.expect("sound");
            let mut estimate = Estimate::default();
            estimate.run(&inputs, 0, count as u32).expect("finite");
            let expected = plain(&q, &k, dim, first, queries.saturating_sub(count));
            for (got, expected) in
                [(&estimate.columns, &expected[0]), (&estimate.diagonals, &expected[1])]
            {
                assert_eq!(got.len(), expected.len());
                for (a, b) in got.iter().zip(expected) {
                    assert!((f64::from(*a) - b).abs() < 2e-6 * b.max(0.1), "{a} {b}");
                }
            }
        }
    }
}
