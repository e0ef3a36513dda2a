//! `keydiff`: evicts the tokens whose keys are most similar to the others (Park et al., 2025).
//!
//! The anchor of a head is the mean of its normalized keys. The token whose key has the smallest
//! angle to the anchor is evicted. Only keys decide. Every angle changes when the anchor moves, and
//! keys may be evicted by then. The policy therefore stores the directions of retained keys, in 16
//! bits a number (angles are exact to 1e-4).

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::sparse::eviction::{self, Retention};
use crate::sparse::lists::Lists;
use crate::sparse::numbers::{check_rows, fill, grow, norm, reserve};
use crate::sparse::token_scores::{TokenScores, compact};
use crate::sparse::{Context, RetainedTokens, Scope, Shape, Sparse, Traits, needs};

/// Parameters of `keydiff`.
pub const PARAMS: &[Param] = &[eviction::BUDGET, eviction::RATIO, eviction::SINK, eviction::RECENT];

/// Fixed-point scale of directions: the code of 1.
const ONE: f32 = 32_767.0;

/// Directions of keys.
#[derive(Clone, Debug)]
pub struct Keydiff {
    shape: Shape,
    retained: TokenScores,
    retention: Retention,
    /// For each layer and head: the directions of keys, in the order of tokens.
    directions: Vec<Vec<i16>>,
    row: Vec<f32>,
}

impl Keydiff {
    /// Reads the parameters of `keydiff`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Keydiff> {
        shape.check()?;
        let (mut row, mut directions) = (Vec::new(), Vec::new());
        grow(&mut row, shape.key_dim as usize, 0.0)?;
        grow(&mut directions, shape.layers as usize * shape.key_heads as usize, Vec::new())?;
        Ok(Keydiff {
            shape: *shape,
            retained: TokenScores::new(shape.layers, shape.key_heads, shape.max_tokens)?,
            retention: Retention::read(reader)?,
            directions,
            row,
        })
    }

    fn of_layer(&mut self, layer: u32) -> &mut [Vec<i16>] {
        let heads = self.shape.key_heads as usize;
        let from = layer as usize * heads;
        self.directions.get_mut(from..from + heads).unwrap_or_default()
    }

    /// Scores all tokens of a layer: the smaller the angle to the anchor, the lower.
    fn score(&mut self, layer: u32) -> Result<()> {
        let heads = self.shape.key_heads as usize;
        let dim = self.shape.key_dim as usize;
        let mut anchor = Vec::new();
        reserve(&mut anchor, dim)?;
        let directions = self.directions.iter().skip(layer as usize * heads);
        for (list, directions) in self.retained.lists(layer).iter_mut().zip(directions) {
            anchor.clear();
            anchor.resize(dim, 0i64);
            for direction in directions.chunks_exact(dim) {
                anchor.iter_mut().zip(direction).for_each(|(sum, &n)| *sum += i64::from(n));
            }
            let length = anchor.iter().map(|&n| (n as f64) * (n as f64)).sum::<f64>().sqrt();
            self.row.iter_mut().zip(&anchor).for_each(|(to, &n)| *to = (n as f64 / length) as f32);
            if length == 0.0 {
                self.row.fill(0.0);
            }
            for (score, direction) in list.scores.iter_mut().zip(directions.chunks_exact(dim)) {
                let products = direction.iter().zip(&self.row).map(|(&n, a)| f32::from(n) * a);
                *score = -products.sum::<f32>();
            }
        }
        Ok(())
    }
}

impl Sparse for Keydiff {
    fn traits(&self) -> Traits {
        Traits {
            caps: self.retention.caps(),
            needs: needs::KEYS,
            scope: Scope::KeyHead,
            ..Traits::NONE
        }
    }

    fn state_bytes(&self) -> u64 {
        let directions: usize = self.directions.iter().map(Vec::capacity).sum();
        self.retained.bytes() + 2 * directions as u64
    }

    fn append(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.shape.check_keys(layer, keys)?;
        self.retained.check_next(layer, first)?;
        check_rows("keys", keys)?;
        let numbers = keys.tokens() as usize * keys.dim() as usize;
        for directions in self.of_layer(layer) {
            reserve(directions, numbers)?;
        }
        self.retained.extend(layer, first.saturating_add(keys.tokens()), 0.0)?;
        let mut row = std::mem::take(&mut self.row);
        for (head, directions) in (0..).zip(self.of_layer(layer)) {
            for token in 0..keys.tokens() {
                fill(keys, token, head, &mut row);
                let length = norm(&row);
                // A zero key has no direction.
                let factor = if length > 0.0 { f64::from(ONE) / length } else { 0.0 };
                directions.extend(row.iter().map(|&n| (f64::from(n) * factor).round() as i16));
            }
        }
        self.row = row;
        Ok(())
    }

    fn seal(&mut self, layer: u32, _id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        // Appended keys are known; a block appended as a whole is not.
        if self.retained.layer(layer)?.next > first {
            return Ok(());
        }
        self.append(layer, first, keys)
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        if !self.retention.is_due(&self.retained, layer, context)? {
            return Ok(false);
        }
        self.score(layer)?;
        self.retention.plan(&mut self.retained, layer, context, out)
    }

    fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        let mut victims = Lists::default();
        self.retained.victims(layer, retained, &mut victims)?;
        let dim = self.shape.key_dim as usize;
        for (at, directions) in self.of_layer(layer).iter_mut().enumerate() {
            compact(directions, victims.get(at), dim);
        }
        self.retained.remove(layer, &victims);
        Ok(())
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        self.retained.truncate(tokens);
        let heads = self.shape.key_heads as usize;
        let dim = self.shape.key_dim as usize;
        for (layer, directions) in (0..).zip(self.directions.chunks_exact_mut(heads)) {
            for (list, directions) in self.retained.lists(layer).iter().zip(directions) {
                directions.truncate(list.positions.len() * dim);
            }
        }
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
