//! Sparse policies: they choose blocks to load, keys to compute with, and tokens to evict, inside
//! one sequence. One file holds one policy, and [`registry`] lists all of them.
//!
//! A policy serves one sequence of one model and keeps the state that it needs. It does up to three
//! things, in the prompt and in decode: it selects blocks of keys to *load*, keys to *compute*
//! with, and tokens to *evict*. Its [`Traits`] say what it can do and what input it needs. It
//! rejects every other call.
//!
//! Answers are ascending and unique, and go to memory of the caller. Between equal scores the
//! policy chooses the lower index and evicts the lower position. Numbers that are not finite are an
//! error and change nothing.

pub mod adakv;
pub mod arkvale;
pub mod checked;
pub mod dsa;
pub mod duo;
pub mod estimate;
pub mod eviction;
pub mod external;
pub mod flexprefill;
pub mod full;
pub mod h2o;
pub mod index;
pub mod index_builder;
pub mod infinigen;
pub mod keydiff;
pub mod knorm;
pub mod lanes;
pub mod lists;
pub mod minference;
pub mod numbers;
pub mod pages;
pub mod pattern;
pub mod placement;
pub mod pool;
pub mod prefill_inputs;
pub mod pyramidkv;
pub mod quest;
pub mod ranks;
pub mod registry;
pub mod resident;
pub mod shape;
pub mod snapkv;
pub mod stats;
pub mod streaming;
pub mod token_scores;
pub mod tova;
pub mod traits;
pub mod xattention;

pub use checked::CheckedPolicy;
pub use index::{Context, Index};
pub use lists::RetainedTokens;
pub use placement::BlockPlacement;
pub use resident::ResidentTokens;
pub use shape::{Kind, Shape};
pub use stats::Stats;
pub use traits::{ALL_QUERIES, Granularity, OwnRows, Scope, Traits, caps, needs};

use crate::attention::Rows;
use crate::base::status::{Result, Status};

/// All candidates, ascending.
fn load_all(candidates: &[u32], out: &mut Vec<u32>) {
    out.clear();
    out.extend_from_slice(candidates);
    out.sort_unstable();
    out.dedup();
}

/// A policy for one sequence. The caller checks that layers, heads and counts fit its [`Shape`]
/// ([`shape::Shape::check_rows`]). Positions are logical: a token keeps its position when tokens
/// before it are evicted.
pub trait Sparse: Send {
    /// Capabilities and needs.
    fn traits(&self) -> Traits;

    /// Counters of selections, since the policy was made.
    fn stats(&self) -> Stats {
        Stats::default()
    }

    /// Bytes of the state that it keeps of the sequence.
    fn state_bytes(&self) -> u64 {
        0
    }

    /// Takes the keys of new tokens of a layer, from position `first` on. Their positions are
    /// encoded in them.
    fn append(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        let _ = (layer, first, keys);
        Ok(())
    }

    /// Takes a complete block of keys that is about to be moved away. Candidates name it by `id`;
    /// `first` is the position of its first token. Its keys need not have been appended before.
    fn seal(&mut self, layer: u32, id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        let _ = (layer, id, first, keys);
        Ok(())
    }

    /// Takes a block that is complete in all layers because it was written token by token.
    fn seal_all(&mut self, id: u32, first: u32, keys: &[Rows<'_>]) -> Result<()> {
        (0..).zip(keys).try_for_each(|(layer, keys)| self.seal(layer, id, first, keys))
    }

    /// Takes the attention that `queries` queries gave to each key of a layer. Each query head has
    /// one row, or all heads share one row. A row has one sum for each retained token, in the order
    /// of tokens.
    fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        let _ = (layer, queries, sums, tokens);
        Ok(())
    }

    /// Takes numbers that the engine computed for the next call: a score for each candidate, or a
    /// weight for each query and head ([`Traits::scores`]).
    fn score(&mut self, layer: u32, scores: &[f32]) -> Result<()> {
        let _ = (layer, scores);
        Err(Status::Unsupported.into())
    }

    /// Selects the candidates to load for a query and puts their ids into `out`, ascending. Without
    /// a query, or in a policy that does not select, all are loaded.
    fn select(
        &mut self,
        layer: u32,
        query: Option<&Rows<'_>>,
        candidates: &[u32],
        context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let _ = (layer, query, context);
        load_all(candidates, out);
        Ok(())
    }

    /// Selects the keys that queries are computed with. `keys` are those of the whole sequence;
    /// only policies with [`needs::ALL_KEYS`] read them.
    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        let _ = (layer, queries, keys, context);
        out.set_dense();
        Ok(())
    }

    /// Computes the attention of a prompt itself: `[queries, query heads, value dim]`. Returns
    /// false if kernels are to compute it by an index.
    fn attend(
        &mut self,
        layer: u32,
        (queries, keys, values): (&Rows<'_>, &Rows<'_>, &Rows<'_>),
        context: &Context,
        out: &mut [f32],
        lse: Option<&mut [f32]>,
    ) -> Result<bool> {
        let _ = (layer, queries, keys, values, context, out, lse);
        Ok(false)
    }

    /// Chooses the tokens of a layer that stay. Returns false if all stay. The policy drops the
    /// others when [`Sparse::evicted`] confirms the eviction.
    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        let _ = (layer, context, out);
        Ok(false)
    }

    /// Confirms an answer of [`Sparse::evict`]: only the tokens in `retained` are left.
    fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        let _ = (layer, retained);
        Ok(())
    }

    /// Truncates the sequence to `tokens` tokens. The default suits policies without state.
    fn truncate(&mut self, tokens: u32) -> Result<()> {
        let _ = tokens;
        Ok(())
    }

    /// Begins a new sequence.
    fn reset(&mut self) {
        let emptied = self.truncate(0);
        debug_assert!(emptied.is_ok(), "truncating to 0 tokens fails in no policy");
    }

    /// A copy for another sequence that continues from the same state.
    fn fork(&self) -> Result<Box<dyn Sparse>>;

    /// Appends to `out` what has to be saved with a block of a layer, so that [`Sparse::load`]
    /// restores it.
    fn save(&self, layer: u32, id: u32, out: &mut Vec<u8>) -> Result<()> {
        let _ = (layer, id, out);
        Ok(())
    }

    /// Restores the saved state of a block of a layer. The bytes are not trusted.
    fn load(&mut self, layer: u32, id: u32, first: u32, bytes: &[u8]) -> Result<()> {
        let _ = (layer, id, first);
        if bytes.is_empty() { Ok(()) } else { Err(Status::Unsupported.into()) }
    }
}
