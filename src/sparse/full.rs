//! `full`: loads everything and computes with everything. The baseline of the other policies.

use crate::attention::Rows;
use crate::base::status::Result;
use crate::sparse::index::{Context, Index};
use crate::sparse::shape::Shape;
use crate::sparse::{Sparse, Stats, Traits, caps, load_all, prefill_inputs};

/// Leaves nothing out.
#[derive(Clone)]
pub struct Full {
    shape: Shape,
    stats: Stats,
}

impl Full {
    /// `full` has no parameters.
    pub fn new(shape: &Shape) -> Result<Full> {
        Ok(Full { shape: *shape, stats: Stats::default() })
    }
}

impl Sparse for Full {
    fn traits(&self) -> Traits {
        Traits {
            caps: caps::LOAD_PREFILL | caps::LOAD_DECODE | caps::INDEX_PREFILL | caps::INDEX_DECODE,
            ..Traits::NONE
        }
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn select(
        &mut self,
        _layer: u32,
        _query: Option<&Rows<'_>>,
        candidates: &[u32],
        _context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        load_all(candidates, out);
        self.stats.count(candidates.len(), out.len());
        Ok(())
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        _keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        self.shape.check_queries(layer, queries)?;
        prefill_inputs::check_context(&self.shape, queries.tokens(), context)?;
        out.set_dense();
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(Full { stats: Stats::default(), ..self.clone() }))
    }
}
