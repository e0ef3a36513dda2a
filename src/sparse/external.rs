//! `external`: the engine scores blocks, and the best are loaded: for learned gates and
//! indexers that it runs itself.
//!
//! | parameter | default | meaning |
//! |---|---|---|
//! | `topk` | 16 | so many blocks |
//! | `threshold` | none | instead: all with a greater score |
//! | `last` | 0 | so many last candidates are always among them |
//!
//! Before each selection it is told a score a candidate, in their order; of equal ones the
//! candidate that comes first is chosen. Scores serve one selection. Without any all are
//! loaded, whether there is a query or not.

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::numbers::{check, grow, room};
use crate::sparse::ranks::{Ranks, ascending};
use crate::sparse::{Context, Granularity, Shape, Sparse, Stats, Traits, caps, needs};

/// Scores of the engine's.
#[derive(Clone, Debug)]
pub struct External {
    count: usize,
    threshold: Option<f32>,
    last: usize,
    scores: Vec<Vec<f32>>,
    most: usize,
    ranks: Ranks,
    stats: Stats,
}

impl External {
    /// Reads `external` with its parameters.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<External> {
        shape.check()?;
        let most = u64::from(u32::MAX);
        let threshold = reader.f64("threshold", f64::INFINITY, -1e30..=1e30)?;
        let mut scores = Vec::new();
        grow(&mut scores, shape.layers as usize, Vec::new())?;
        Ok(External {
            count: reader.u64("topk", 16, 1..=most)? as usize,
            threshold: Some(threshold as f32).filter(|threshold| threshold.is_finite()),
            last: reader.u64("last", 0, 0..=most)? as usize,
            scores,
            most: shape.max_tokens as usize,
            ranks: Ranks::default(),
            stats: Stats::default(),
        })
    }

    /// Which of the candidates, by their places.
    fn choose(&mut self, scores: &[f32], out: &mut Vec<u32>) -> Result<()> {
        let free = scores.len().saturating_sub(self.last);
        let (scores, forced) = scores.split_at(free);
        room(out, scores.len() + forced.len())?;
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
        let layers = self.scores.len();
        let Some(own) = self.scores.get_mut(layer as usize) else {
            fail!(Invalid, "layer {layer} of a model with {layers}");
        };
        if scores.len() > self.most {
            fail!(Limit, "{} scores, the limit is {}", scores.len(), self.most);
        }
        check("scores", scores)?;
        room(own, scores.len().saturating_sub(own.len()))?;
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
        let layers = self.scores.len();
        let Some(own) = self.scores.get_mut(layer as usize) else {
            fail!(Invalid, "layer {layer} of a model with {layers}");
        };
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
        // The memory serves the next scores.
        if let Some(own) = self.scores.get_mut(layer as usize) {
            *own = scores;
            own.clear();
        }
        Ok(())
    }

    fn truncate(&mut self, _tokens: u32) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset(&mut self) {
        self.scores.iter_mut().for_each(Vec::clear);
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(External { stats: Stats::default(), ..self.clone() }))
    }
}
