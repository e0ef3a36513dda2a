//! Which blocks and tokens matter: sparse policies. One file a policy, one registry.
//!
//! A policy is made for one sequence of one model and keeps what it needs to know of it. It
//! may do up to three things, before and while text is written: say which blocks of keys to
//! *load*, which keys to *compute* with, and which tokens to *evict*. What it can do, and
//! what it needs to be told for that, its [`Traits`] say; what it does not do it refuses.
//!
//! Answers are ascending and unique, in memory of the caller. Where scores are equal the
//! lower index is chosen, and the lower position is evicted. Numbers that are not finite are
//! an error, and change nothing.

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

/// What a policy does for one sequence. Layers, heads and counts are those of its [`Shape`];
/// whoever calls checks them ([`shape::Shape::check_rows`]). Positions are logical ones: a
/// token keeps its own whatever is evicted before it.
pub trait Sparse: Send {
    /// What it is like.
    fn traits(&self) -> Traits;

    /// What it has chosen so far.
    fn stats(&self) -> Stats {
        Stats::default()
    }

    /// What it keeps of the sequence now, in bytes.
    fn state_bytes(&self) -> u64 {
        0
    }

    /// Keys of tokens from a position on have been computed in a layer, with their positions
    /// in them.
    fn append(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        let _ = (layer, first, keys);
        Ok(())
    }

    /// A block of keys is complete and about to be moved away; `id` is how candidates name
    /// it, `first` the position of its first token. What was appended before need not be.
    fn seal(&mut self, layer: u32, id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        let _ = (layer, id, first, keys);
        Ok(())
    }

    /// The same for a block of all layers, which is complete in all of them: one that was
    /// written token by token.
    fn seal_all(&mut self, id: u32, first: u32, keys: &[Rows<'_>]) -> Result<()> {
        (0..).zip(keys).try_for_each(|(layer, keys)| self.seal(layer, id, first, keys))
    }

    /// What each key got of the attention of `queries` queries in a layer: for each query
    /// head (or one for all, where there is one row only) a number a token that is kept, in
    /// their order.
    fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        let _ = (layer, queries, sums, tokens);
        Ok(())
    }

    /// Numbers of the engine's for the next question: a score a candidate, or a weight for
    /// each query and head ([`Traits::scores`]).
    fn score(&mut self, layer: u32, scores: &[f32]) -> Result<()> {
        let _ = (layer, scores);
        Err(Status::Unsupported.into())
    }

    /// Which of the candidates are to be loaded for a query; all where there is no query, or
    /// it does not select. `out` gets their ids, ascending.
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

    /// Which keys queries are computed with. `keys` are those of the whole sequence; only
    /// policies that need [`needs::ALL_KEYS`] look at them, others do without.
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

    /// Computes the attention of a prompt itself, `[queries, query heads, value dim]`; false =
    /// it leaves that to kernels, and says an index.
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

    /// Which tokens of a layer stay, if some have to go: false = all stay. What goes is
    /// forgotten when it is told with [`Sparse::evicted`].
    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        let _ = (layer, context, out);
        Ok(false)
    }

    /// What was kept by an answer of [`Sparse::evict`] is all there is now.
    fn evicted(&mut self, layer: u32, kept: &RetainedTokens) -> Result<()> {
        let _ = (layer, kept);
        Ok(())
    }

    /// The sequence has so many tokens now; what came after them is taken back.
    fn truncate(&mut self, tokens: u32) -> Result<()> {
        let _ = tokens;
        Ok(())
    }

    /// The sequence begins anew.
    fn reset(&mut self) {
        let emptied = self.truncate(0);
        debug_assert!(emptied.is_ok(), "truncating to 0 tokens fails in no policy");
    }

    /// A copy for a sequence that goes on from here.
    fn fork(&self) -> Result<Box<dyn Sparse>>;

    /// What is to be kept with a block of a layer, so that it can be loaded again: adds it
    /// to `out`.
    fn save(&self, layer: u32, id: u32, out: &mut Vec<u8>) -> Result<()> {
        let _ = (layer, id, out);
        Ok(())
    }

    /// What was saved of a block of a layer; bytes from outside.
    fn load(&mut self, layer: u32, id: u32, first: u32, bytes: &[u8]) -> Result<()> {
        let _ = (layer, id, first);
        if bytes.is_empty() { Ok(()) } else { Err(Status::Unsupported.into()) }
    }
}
