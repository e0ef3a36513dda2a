//! `predict`: selects the blocks of a layer by the query of an earlier layer, so that they are
//! loaded in time (the idea of InfiniGen, Lee et al., OSDI'24).
//!
//! The first `ahead` layers have no earlier query: all their blocks are loaded. Recall is the share
//! of blocks wanted by the own queries that the earlier queries selected.

use crate::attention::Rows;
use crate::base::spec::describe::Param;
use crate::base::spec::{Reader, Spec};
use crate::base::status::Result;
use crate::sparse::eviction::conflict;
use crate::sparse::numbers::{grow, reserve};
use crate::sparse::registry::make;
use crate::sparse::{Context, Index, RetainedTokens, Shape, Sparse, Stats, Traits, caps, needs};

/// Parameters of `predict`.
pub const PARAMS: &[Param] = &[
    Param::new("of", "the policy that selects; it must select blocks by queries")
        .default_is("`quest`"),
    Param::new(
        "ahead",
        "selections get the query of this many layers before, or a prediction of the layer's own \
         query from it",
    ),
    Param::new(
        "audit",
        "`true`: when the layer's own query is known (`index`), count what it would have selected",
    ),
];

/// The last selection of a layer.
#[derive(Clone, Debug, Default)]
struct LastSelection {
    candidates: Vec<u32>,
    chosen: Vec<u32>,
}

/// Selects by earlier queries.
pub struct Predict {
    inner: Box<dyn Sparse>,
    ahead: u32,
    is_audited: bool,
    last: Vec<LastSelection>,
    stats: Stats,
    truth: Vec<u32>,
}

impl Predict {
    /// Reads the parameters of `predict`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Predict> {
        let inner = match reader.spec("of")? {
            Some(spec) => make(spec, shape)?,
            None => make(&Spec::parse("quest")?, shape)?,
        };
        let ahead = reader.u64("ahead", 1, 1..=2048)? as u32;
        Predict::new(inner, shape, ahead, reader.bool("audit", false)?)
    }

    /// Selects as `inner` does.
    pub fn new(inner: Box<dyn Sparse>, shape: &Shape, ahead: u32, audit: bool) -> Result<Predict> {
        if inner.traits().caps & caps::LOAD_DECODE == 0
            || inner.traits().needs & needs::QUERIES == 0
        {
            return Err(conflict(
                "predict needs a policy that selects blocks by queries, like quest",
            ));
        }
        let mut last = Vec::new();
        grow(&mut last, shape.layers as usize, LastSelection::default())?;
        let (stats, truth) = (Stats::default(), Vec::new());
        Ok(Predict { inner, ahead, is_audited: audit, last, stats, truth })
    }

    /// Compares the last selection of a layer with that of its own query.
    fn audit(&mut self, layer: u32, queries: &Rows<'_>, context: &Context) -> Result<()> {
        let Some(last) = self.last.get_mut(layer as usize) else { return Ok(()) };
        if last.candidates.is_empty() {
            return Ok(());
        }
        let LastSelection { candidates, chosen } = last;
        self.inner.select(layer, Some(queries), candidates, context, &mut self.truth)?;
        let hits = self.truth.iter().filter(|id| chosen.binary_search(id).is_ok()).count();
        candidates.clear();
        self.stats.audit(self.truth.len(), hits);
        Ok(())
    }

    fn forget(&mut self) {
        self.last.iter_mut().for_each(|last| *last = LastSelection::default());
    }
}

impl Sparse for Predict {
    fn traits(&self) -> Traits {
        let traits = self.inner.traits();
        let dense_layers = traits.dense_layers.max(self.ahead);
        let needs = traits.needs | needs::NEXT_QUERY;
        Traits { needs, dense_layers, ahead: self.ahead, ..traits }
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn state_bytes(&self) -> u64 {
        let of =
            |last: &LastSelection| 4 * (last.candidates.capacity() + last.chosen.capacity()) as u64;
        self.inner.state_bytes() + self.last.iter().map(of).sum::<u64>()
    }

    fn append(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.inner.append(layer, first, keys)
    }

    fn seal(&mut self, layer: u32, id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.inner.seal(layer, id, first, keys)
    }

    fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        self.inner.observe(layer, queries, sums, tokens)
    }

    fn score(&mut self, layer: u32, scores: &[f32]) -> Result<()> {
        self.inner.score(layer, scores)
    }

    fn select(
        &mut self,
        layer: u32,
        query: Option<&Rows<'_>>,
        candidates: &[u32],
        context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let query = query.filter(|_| layer >= self.ahead);
        self.inner.select(layer, query, candidates, context, out)?;
        self.stats.count(candidates.len(), out.len());
        // A selection of all candidates misses nothing.
        let is_choice = self.is_audited && !context.is_prefill && out.len() < candidates.len();
        if let Some(last) = self.last.get_mut(layer as usize) {
            last.candidates.clear();
            last.chosen.clear();
            if is_choice {
                reserve(&mut last.candidates, candidates.len())?;
                reserve(&mut last.chosen, out.len())?;
                last.candidates.extend_from_slice(candidates);
                last.chosen.extend_from_slice(out);
            }
        }
        Ok(())
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        if !context.is_prefill {
            self.audit(layer, queries, context)?;
        }
        self.inner.index(layer, queries, keys, context, out)
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        self.inner.evict(layer, context, out)
    }

    fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        self.inner.evicted(layer, retained)
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        self.forget();
        self.inner.truncate(tokens)
    }

    fn reset(&mut self) {
        self.forget();
        self.inner.reset();
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        let (inner, last) = (self.inner.fork()?, self.last.clone());
        let (ahead, is_audited, stats) = (self.ahead, self.is_audited, Stats::default());
        Ok(Box::new(Predict { inner, ahead, is_audited, last, stats, truth: Vec::new() }))
    }

    fn save(&self, layer: u32, id: u32, out: &mut Vec<u8>) -> Result<()> {
        self.inner.save(layer, id, out)
    }

    fn load(&mut self, layer: u32, id: u32, first: u32, bytes: &[u8]) -> Result<()> {
        self.inner.load(layer, id, first, bytes)
    }
}
