//! What a policy is like: enough for an engine to serve it without knowing its name.

use crate::sparse::shape::Shape;

/// What a policy can do: bits of [`Traits::caps`].
pub mod caps {
    /// Says which blocks to load before the prompt is computed on.
    pub const LOAD_PREFILL: u32 = 1;
    /// Says which blocks to load for the next token.
    pub const LOAD_DECODE: u32 = 2;
    /// Says which keys the prompt is computed with.
    pub const INDEX_PREFILL: u32 = 4;
    /// Says which keys the next token is computed with.
    pub const INDEX_DECODE: u32 = 8;
    /// Evicts tokens when the prompt has been computed.
    pub const EVICT_PREFILL: u32 = 16;
    /// Evicts tokens while text is written.
    pub const EVICT_DECODE: u32 = 32;
}

/// What a policy has to be told: bits of [`Traits::needs`].
pub mod needs {
    /// Keys, as they come.
    pub const KEYS: u32 = 1;
    /// Queries, when it is asked.
    pub const QUERIES: u32 = 2;
    /// What each key got of the attention of [`Traits::sum_queries`](super::Traits::sum_queries)
    /// queries, before it is asked to evict: [`Sparse::observe`](crate::sparse::Sparse::observe).
    pub const COLUMN_SUMS: u32 = 4;
    /// The query of the layer [`Traits::ahead`](super::Traits::ahead) before, or what predicts
    /// the layer's own from it, when it is asked what to load; its own for an index.
    pub const NEXT_QUERY: u32 = 8;
    /// A score a candidate that the engine computes, before each selection.
    pub const SCORES: u32 = 16;
    /// Values, as they come.
    pub const VALUES: u32 = 32;
    /// A weight for each query and head of queries, heads innermost, before each question:
    /// [`Sparse::score`](crate::sparse::Sparse::score).
    pub const WEIGHTS: u32 = 64;
    /// All keys of the sequence, when it is asked for an index. Others need none then, and do
    /// not look at those that they are given.
    pub const ALL_KEYS: u32 = 128;
}

/// For whom an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Each query head has its own.
    QueryHead,
    /// Each head of keys.
    KeyHead,
    /// All heads of a layer share one.
    Layer,
}

/// What an answer names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// Tokens.
    Token,
    /// Blocks of tokens.
    Block,
}

/// Rows that are a policy's own, not the model's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnRows {
    /// Heads of the queries that it is asked with.
    pub query_heads: u32,
    /// Heads of the keys that it is told of as they come.
    pub key_heads: u32,
    /// Numbers of a head of both.
    pub dim: u32,
}

/// All queries: [`Traits::sum_queries`].
pub const ALL_QUERIES: u32 = u32::MAX;

/// What a policy is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits {
    /// What it can do: [`caps`].
    pub caps: u32,
    /// What it has to be told: [`needs`].
    pub needs: u32,
    /// For whom its answers are.
    pub scope: Scope,
    /// What they name.
    pub granularity: Granularity,
    /// Heads keep different numbers of tokens.
    pub is_ragged: bool,
    /// Loads are restricted to what it selects.
    pub requires_block_selection: bool,
    /// Keys are to be turned to the places that they have in the cache.
    pub rotates: bool,
    /// So many first layers are not restricted.
    pub dense_layers: u32,
    /// Sums of attention are wanted of so many last queries: of a prompt (fewer, if it has
    /// fewer), and where it evicts while text is written of each step's. 0 = none;
    /// [`ALL_QUERIES`]: every query is told once. A word of more queries is refused.
    pub sum_queries: u32,
    /// Queries that it selects by are of so many layers before; 0 = the layer's own.
    pub ahead: u32,
    /// A block that was written token by token is told when it is complete in all layers:
    /// [`Sparse::seal_all`](crate::sparse::Sparse::seal_all).
    pub seals_together: bool,
    /// What its rows are, where they are not the model's.
    pub rows: Option<OwnRows>,
}

impl Traits {
    /// Of a policy that does nothing: what others differ from.
    pub const NONE: Traits = Traits {
        caps: 0,
        needs: 0,
        scope: Scope::Layer,
        granularity: Granularity::Token,
        is_ragged: false,
        requires_block_selection: false,
        rotates: false,
        dense_layers: 0,
        sum_queries: 0,
        ahead: 0,
        seals_together: false,
        rows: None,
    };

    /// Heads and numbers of a head of the queries that it is asked with.
    pub fn query_rows(&self, shape: &Shape) -> (u32, u32) {
        match self.rows {
            Some(own) => (own.query_heads, own.dim),
            None => (shape.query_heads, shape.key_dim),
        }
    }

    /// Heads and numbers of a head of the keys that it is told of as they come. Those of a
    /// block that is sealed are the model's, if it has rows of its own.
    pub fn key_rows(&self, shape: &Shape) -> (u32, u32) {
        match self.rows {
            Some(own) => (own.key_heads, own.dim),
            None => (shape.key_heads, shape.key_dim),
        }
    }

    /// How many numbers [`Sparse::score`](crate::sparse::Sparse::score) takes before a
    /// question for so many queries and candidates; 0 = it is not to be called.
    pub fn scores(&self, shape: &Shape, queries: u32, candidates: usize) -> usize {
        if self.needs & needs::WEIGHTS != 0 {
            queries as usize * self.query_rows(shape).0 as usize
        } else if self.needs & needs::SCORES != 0 {
            candidates
        } else {
            0
        }
    }
}
