//! Models with random weights, for bitwise tests; a policy for the prompt and one for decoding.

use kvtier::sparse::Sparse;

use crate::reference::model::{Model, Sizes};
use crate::reference::numbers::Random;
use crate::reference::policies::{DECODE, PREFILL, Policies};

impl Sizes {
    /// Dimensions of a Llama.
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

    /// Dimensions of a model with latent rows; key and value dimensions differ.
    pub fn mla(layers: usize, heads: usize, latent: usize) -> Sizes {
        let llama = Sizes::llama(layers, heads, 1, 8);
        Sizes { nope: 16, value: 12, latent, ..llama }
    }
}

impl Random {
    /// Approximately normal: the sum of four uniform numbers.
    pub fn normal(&mut self) -> f32 {
        let sum: u32 = (0..4).map(|_| self.below(1 << 16)).sum();
        (sum as f32 / 65_536.0 - 2.0) * 1.732
    }
}

impl Model {
    /// A model with random weights.
    pub fn random(sizes: Sizes, seed: u64) -> Model {
        let mut random = Random::new(seed);
        Model::with(sizes, |count, inputs| {
            let by = if inputs == 0 { 0.0 } else { 1.2 / (inputs as f32).sqrt() };
            (0..count).map(|_| random.normal() * by + f32::from(inputs == 0)).collect()
        })
    }
}

impl Policies {
    /// One policy for the prompt, another one for decoding.
    pub fn prompt_and_decode(prompt: Box<dyn Sparse>, decode: Box<dyn Sparse>) -> Policies {
        Policies::default().with(prompt, PREFILL).with(decode, DECODE)
    }
}
