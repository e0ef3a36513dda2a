//! `external`: the engine scores blocks, and the best are loaded. It serves learned gates and
//! indexers that the engine runs itself.
//!
//! The engine gives one score for each candidate before a selection, in their order. Between equal
//! scores the candidate that comes first is chosen. Scores serve one selection. Without scores all
//! candidates are loaded, with or without a query.

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::sparse::eviction::count;
use crate::sparse::numbers::{check, grow, reserve};
use crate::sparse::ranks::{Ranks, ascending};
use crate::sparse::shape::check_layer;
use crate::sparse::{Context, Granularity, Shape, Sparse, Stats, Traits, caps, needs};

/// Parameters of `external`.
pub const PARAMS: &[Param] = &[
    Param::new("topk", "number of blocks that are loaded"),
    Param::new("threshold", "instead of `topk`: load all blocks with a greater score")
        .default_is("none"),
    Param::new("last", "this many last candidates are always among them"),
];

/// Blocks by the engine's scores.
#[derive(Clone, Debug)]
pub struct External {
    count: usize,
    threshold: Option<f32>,
    last: usize,
    scores: Vec<Vec<f32>>,
    max_tokens: usize,
    ranks: Ranks,
    stats: Stats,
}

impl External {
    /// Reads the parameters of `external`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<External> {
        shape.check()?;
        let threshold = reader.f64("threshold", f64::INFINITY, -1e30..=1e30)?;
        let mut scores = Vec::new();
        grow(&mut scores, shape.layers as usize, Vec::new())?;
        Ok(External {
            count: count(reader, "topk", 16, 1)? as usize,
            threshold: Some(threshold as f32).filter(|threshold| threshold.is_finite()),
            last: count(reader, "last", 0, 0)? as usize,
            scores,
            max_tokens: shape.max_tokens as usize,
            ranks: Ranks::default(),
            stats: Stats::default(),
        })
    }

    /// The scores of the next selection in a layer.
    fn layer(&mut self, layer: u32) -> Result<&mut Vec<f32>> {
        check_layer(layer, self.scores.len())?;
        Ok(self.scores.get_mut(layer as usize).ok_or(Status::Invalid)?)
    }

    /// Chooses candidates, by their index.
    fn choose(&mut self, scores: &[f32], out: &mut Vec<u32>) -> Result<()> {
        let free = scores.len().saturating_sub(self.last);
        let (scores, forced) = scores.split_at(free);
        reserve(out, scores.len() + forced.len())?;
        match self.threshold {
            Some(threshold) => {
                let above = scores.iter().enumerate().filter(|(_, score)| **score > threshold);
                out.extend(above.map(|(at, _)| at as u32));
            }
            None => self.ranks.top(scores, self.count.saturating_sub(forced.len()), out)?,
        }
        out.extend((free..free + forced.len()).map(|at| at as u32));
        Ok(())
    }
}

impl Sparse for External {
    fn traits(&self) -> Traits {
        Traits {
            caps: caps::LOAD_PREFILL | caps::LOAD_DECODE,
            needs: needs::SCORES,
            granularity: Granularity::Block,
            requires_block_selection: true,
            ..Traits::NONE
        }
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn state_bytes(&self) -> u64 {
        self.scores.iter().map(|scores| 4 * scores.capacity() as u64).sum()
    }

    fn score(&mut self, layer: u32, scores: &[f32]) -> Result<()> {
        let max_tokens = self.max_tokens;
        let own = self.layer(layer)?;
        if scores.len() > max_tokens {
            fail!(Limit, "{} scores exceed the limit of {max_tokens} candidates", scores.len());
        }
        check("scores", scores)?;
        reserve(own, scores.len().saturating_sub(own.len()))?;
        own.clear();
        own.extend_from_slice(scores);
        Ok(())
    }

    fn select(
        &mut self,
        layer: u32,
        _query: Option<&Rows<'_>>,
        candidates: &[u32],
        _context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let own = self.layer(layer)?;
        if own.is_empty() {
            ascending(candidates, out)?;
            self.stats.count(candidates.len(), out.len());
            return Ok(());
        }
        if own.len() != candidates.len() {
            fail!(Invalid, "{} scores of {} candidates", own.len(), candidates.len());
        }
        let mut all = Vec::new();
        ascending(candidates, &mut all)?;
        let scores = std::mem::take(own);
        out.clear();
        self.choose(&scores, out)?;
        let id = |at: u32| candidates.get(at as usize).copied().unwrap_or_default();
        out.iter_mut().for_each(|at| *at = id(*at));
        out.sort_unstable();
        self.stats.count(candidates.len(), out.len());
        // The next scores reuse the memory.
        if let Some(own) = self.scores.get_mut(layer as usize) {
            *own = scores;
            own.clear();
        }
        Ok(())
    }

    fn truncate(&mut self, _tokens: u32) -> Result<()> {
        self.scores.iter_mut().for_each(Vec::clear);
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(External { stats: Stats::default(), ..self.clone() }))
    }
}
