//! Policies and models of the tests' own: tokens that are named are looked at, as if the others
//! were gone; models with random weights, for tests of bits.

use kvtier::attention::Rows;
use kvtier::base::status::Result;
use kvtier::sparse::{Context, Index, Scope, Sparse, Traits, caps};

use crate::model::{Model, Sizes};
use crate::numbers::Random;
use crate::policies::{BEHIND, IN_PROMPT, Policies};
use crate::rows::tokens;

impl Sizes {
    /// A Llama of some heads.
    pub fn llama(layers: usize, heads: usize, key_heads: usize, dim: usize) -> Sizes {
        Sizes {
            vocab: 96,
            layers,
            width: 32,
            hidden: 48,
            heads,
            key_heads,
            nope: 0,
            rope: dim,
            value: dim,
            latent: 0,
            theta: 10_000.0,
        }
    }

    /// One with latent rows; what values have differs from what keys have.
    pub fn mla(layers: usize, heads: usize, latent: usize) -> Sizes {
        let llama = Sizes::llama(layers, heads, 1, 8);
        Sizes { nope: 16, value: 12, latent, ..llama }
    }
}

impl Random {
    /// About the normal distribution: the sum of four even ones.
    pub fn normal(&mut self) -> f32 {
        let sum: u32 = (0..4).map(|_| self.below(1 << 16)).sum();
        (sum as f32 / 65_536.0 - 2.0) * 1.732
    }
}

impl Model {
    /// Random weights of any sizes.
    pub fn random(sizes: Sizes, seed: u64) -> Model {
        let mut random = Random::new(seed);
        Model::with(sizes, |count, inputs| {
            let by = if inputs == 0 { 0.0 } else { 1.2 / (inputs as f32).sqrt() };
            (0..count).map(|_| random.normal() * by + f32::from(inputs == 0)).collect()
        })
    }
}

impl Policies {
    /// One in the prompt, another behind it.
    pub fn two(prompt: Box<dyn Sparse>, behind: Box<dyn Sparse>) -> Policies {
        Policies::default().with(prompt, IN_PROMPT).with(behind, BEHIND)
    }
}

/// Names the same tokens at every step, for each layer and head of keys, and all behind the
/// prompt.
#[derive(Clone)]
pub struct Fixed {
    pub lists: Vec<Vec<Vec<u32>>>,
    pub prompt: u32,
}

impl Sparse for Fixed {
    fn traits(&self) -> Traits {
        Traits { caps: caps::INDEX_DECODE, scope: Scope::KeyHead, ..Traits::NONE }
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        _keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        let of = &self.lists[layer as usize];
        // An index is of query heads.
        let group = queries.heads() as usize / of.len();
        let since = self.prompt..context.tokens;
        let list = |head: usize| of[head / group].iter().copied().chain(since.clone()).collect();
        let lists: Vec<Vec<u32>> = (0..queries.heads() as usize).map(list).collect();
        *out = tokens(&lists);
        Ok(())
    }

    fn truncate(&mut self, _tokens: u32) -> Result<()> {
        Ok(())
    }

    fn reset(&mut self) {}

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
