//! Traits of a policy: they suffice for an engine to serve it without knowing its name.

use crate::sparse::shape::Shape;

/// Capabilities: bits of [`Traits::caps`].
pub mod caps {
    /// Selects blocks to load before the prompt is computed.
    pub const LOAD_PREFILL: u32 = 1;
    /// Selects blocks to load for the next token.
    pub const LOAD_DECODE: u32 = 2;
    /// Selects the keys that the prompt is computed with.
    pub const INDEX_PREFILL: u32 = 4;
    /// Selects the keys that the next token is computed with.
    pub const INDEX_DECODE: u32 = 8;
    /// Evicts tokens after the prompt.
    pub const EVICT_PREFILL: u32 = 16;
    /// Evicts tokens in decode.
    pub const EVICT_DECODE: u32 = 32;
}

/// Inputs that a policy needs: bits of [`Traits::needs`].
pub mod needs {
    /// Keys of new tokens.
    pub const KEYS: u32 = 1;
    /// Queries, in each call.
    pub const QUERIES: u32 = 2;
    /// Attention of [`Traits::sum_queries`](super::Traits::sum_queries) queries to each key, before
    /// evictions: [`Sparse::observe`](crate::sparse::Sparse::observe).
    pub const COLUMN_SUMS: u32 = 4;
    /// For loads: the query of the layer [`Traits::ahead`](super::Traits::ahead) layers before, or
    /// a prediction of the own query from it. For an index: the layer's own query.
    pub const NEXT_QUERY: u32 = 8;
    /// A score for each candidate, computed by the engine before each selection.
    pub const SCORES: u32 = 16;
    /// Values of new tokens.
    pub const VALUES: u32 = 32;
    /// A weight for each query and query head, heads innermost, before each call:
    /// [`Sparse::score`](crate::sparse::Sparse::score).
    pub const WEIGHTS: u32 = 64;
    /// All keys of the sequence, in calls for an index. Other policies ignore these keys.
    pub const ALL_KEYS: u32 = 128;
}

/// Heads that share an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Each query head has its own.
    QueryHead,
    /// Each head of keys has its own.
    KeyHead,
    /// All heads of a layer share one.
    Layer,
}

/// Unit of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// Tokens.
    Token,
    /// Blocks of tokens.
    Block,
}

/// Rows of the policy's own, not the model's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnRows {
    /// Heads of its queries.
    pub query_heads: u32,
    /// Heads of its keys.
    pub key_heads: u32,
    /// Numbers of a head, of queries and keys.
    pub dim: u32,
}

/// All queries: [`Traits::sum_queries`].
pub const ALL_QUERIES: u32 = u32::MAX;

/// Traits of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits {
    /// Capabilities: [`caps`].
    pub caps: u32,
    /// Needed inputs: [`needs`].
    pub needs: u32,
    /// Heads that share an answer.
    pub scope: Scope,
    /// Unit of answers.
    pub granularity: Granularity,
    /// Heads retain different numbers of tokens.
    pub is_ragged: bool,
    /// Loads are restricted to the selected blocks.
    pub requires_block_selection: bool,
    /// Keys are to be rotated to their places in the cache.
    pub rotates: bool,
    /// This many first layers are not restricted.
    pub dense_layers: u32,
    /// Sums of attention are needed of this many last queries of a prompt (all, if there are
    /// fewer), and of each step if the policy evicts in decode. 0 = none; [`ALL_QUERIES`]: every
    /// query counts once. Sums of more queries are rejected.
    pub sum_queries: u32,
    /// Selections use the queries of this many layers before; 0 = the layer's own.
    pub ahead: u32,
    /// Blocks that were written token by token are sealed when they are complete in all layers:
    /// [`Sparse::seal_all`](crate::sparse::Sparse::seal_all).
    pub seals_together: bool,
    /// Shape of its rows, where it is not the model's.
    pub rows: Option<OwnRows>,
}

impl Traits {
    /// Traits of a policy that does nothing: the base of all others.
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

    /// Heads and numbers of a head of its queries.
    pub fn query_rows(&self, shape: &Shape) -> (u32, u32) {
        match self.rows {
            Some(own) => (own.query_heads, own.dim),
            None => (shape.query_heads, shape.key_dim),
        }
    }

    /// Heads and numbers of a head of its appended keys. The keys of a sealed block are the model's
    /// in any case.
    pub fn key_rows(&self, shape: &Shape) -> (u32, u32) {
        match self.rows {
            Some(own) => (own.key_heads, own.dim),
            None => (shape.key_heads, shape.key_dim),
        }
    }

    /// Numbers that [`Sparse::score`](crate::sparse::Sparse::score) takes before a call with this
    /// many queries and candidates; 0 = the call is not made.
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
