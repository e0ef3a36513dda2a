//! The attention shape of a model, as sparse policies need it.

use crate::attention::Rows;
use crate::base::status::Result;
use crate::fail;

/// Most layers.
pub const MAX_LAYERS: u32 = 2048;
/// Most heads.
pub const MAX_HEADS: u32 = 1024;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Separate keys and values, by head.
    #[default]
    Split,
    /// One latent row a token for all heads; values are its first numbers.
    Latent,
}

/// The attention shape of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Layers.
    pub layers: u32,
    /// Query heads.
    pub query_heads: u32,
    /// Heads of keys; groups of query heads share them.
    pub key_heads: u32,
    /// Numbers of a query and key head.
    pub key_dim: u32,
    /// Numbers of a value head.
    pub value_dim: u32,
    /// Factor of the products of queries and keys; 0 = 1 / sqrt(key_dim).
    pub scale: f32,
    /// How keys and values are stored.
    pub kind: Kind,
    /// Tokens of a block, which is loaded or moved as a whole.
    pub block_tokens: u32,
    /// Most tokens of a sequence.
    pub max_tokens: u32,
}

/// Fails with `Invalid` unless `layer` is one of `layers`.
pub fn check_layer(layer: u32, layers: usize) -> Result<()> {
    if layer as usize >= layers {
        fail!(Invalid, "layer {layer} does not exist: the model has {layers} layers");
    }
    Ok(())
}

/// Fails with `Limit` if `tokens` exceeds the most that a sequence may have.
pub fn check_tokens(tokens: u64, max_tokens: u32) -> Result<()> {
    if tokens > u64::from(max_tokens) {
        fail!(Limit, "{tokens} tokens exceed the limit of {max_tokens} (max_tokens of the shape)");
    }
    Ok(())
}

impl Shape {
    /// Checks all fields against their limits.
    pub fn check(&self) -> Result<()> {
        let counts = [
            ("layers", self.layers, MAX_LAYERS),
            ("query_heads", self.query_heads, MAX_HEADS),
            ("key_heads", self.key_heads, self.query_heads),
            ("key_dim", self.key_dim, crate::attention::rows::MAX_DIM),
            ("value_dim", self.value_dim, crate::attention::rows::MAX_DIM),
            ("block_tokens", self.block_tokens, 1 << 20),
            ("max_tokens", self.max_tokens, 1 << 30),
        ];
        if let Some((name, n, most)) = counts.into_iter().find(|&(_, n, most)| n == 0 || n > most) {
            fail!(Invalid, "{name} is {n}, it must be 1 to {most}");
        }
        if self.query_heads % self.key_heads != 0 {
            let (q, k) = (self.query_heads, self.key_heads);
            fail!(Invalid, "{q} query heads cannot share {k} heads of keys evenly");
        }
        if self.kind == Kind::Latent && (self.key_heads != 1 || self.value_dim > self.key_dim) {
            fail!(Invalid, "latent rows require key_heads = 1 and value_dim <= key_dim");
        }
        if !(self.scale.is_finite() && self.scale >= 0.0) {
            fail!(Invalid, "scale is {}, it must be finite and at least 0", self.scale);
        }
        Ok(())
    }

    /// Factor of the products of queries and keys.
    pub fn softmax_scale(&self) -> f32 {
        if self.scale > 0.0 { self.scale } else { 1.0 / (self.key_dim as f32).sqrt() }
    }

    /// Query heads that share a head of keys.
    pub fn group(&self) -> u32 {
        self.query_heads / self.key_heads
    }

    /// Fails with `Invalid` unless the model has this layer.
    pub fn check_layer(&self, layer: u32) -> Result<()> {
        check_layer(layer, self.layers as usize)
    }

    /// Fails with `Limit` if a sequence may not have this many tokens.
    pub fn check_tokens(&self, tokens: u64) -> Result<()> {
        check_tokens(tokens, self.max_tokens)
    }

    /// Checks that rows of keys match this shape.
    pub fn check_keys(&self, layer: u32, keys: &Rows<'_>) -> Result<()> {
        self.check_rows("keys", layer, keys, self.key_heads, self.key_dim)
    }

    /// Checks that rows of queries match this shape.
    pub fn check_queries(&self, layer: u32, queries: &Rows<'_>) -> Result<()> {
        self.check_rows("queries", layer, queries, self.query_heads, self.key_dim)
    }

    /// Checks that rows have this many heads and numbers.
    pub fn check_rows(
        &self,
        name: &str,
        layer: u32,
        rows: &Rows<'_>,
        heads: u32,
        dim: u32,
    ) -> Result<()> {
        self.check_layer(layer)?;
        if rows.heads() != heads || rows.dim() != dim {
            let (h, d) = (rows.heads(), rows.dim());
            fail!(Invalid, "{name} have {h} heads of {d} numbers, the model {heads} of {dim}");
        }
        Ok(())
    }
}
