//! What came behind some tokens is taken back, in all layers or in none.

use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::offload::ring::State;
use crate::offload::{Offload, end};
use crate::store::state::session::Views;
use crate::store::state::{CellRange, TransferKind, Wanted};

impl Offload {
    /// Takes back what came behind `tokens` tokens, in all layers: a guess that was wrong. To
    /// be called before the session is cut. Loads under way are given up: what they bring may
    /// be what is cut, and the layer may have as many blocks again when they are waited for.
    ///
    /// After an error no layer is cut, and this can be called again. Where a policy has failed,
    /// others may have forgotten tokens that are still there: then it has to be.
    pub fn truncate(&mut self, tokens: u32) -> Result<()> {
        for buffer in 0..self.ring.len() {
            if matches!(self.ring.get(buffer)?.state, State::Loading(_)) {
                self.done(buffer)?;
            }
        }
        for layer in 0..self.layers.len() as u32 {
            // One that cannot leave is cut where it is.
            let _ = self.empty_full_tail(layer);
        }
        let begun_ns = self.clock.now_ns();
        let fetched = self.fetch_tails(tokens);
        if !fetched.as_ref().is_ok_and(Vec::is_empty) {
            self.stats.cut_waits.add(self.clock.now_ns().saturating_sub(begun_ns));
        }
        let fetched = fetched?;
        // It may know less than there is: it is told again what it lacks.
        if let Some(saved) = &mut self.saved {
            saved.truncate(&self.store, tokens)?;
        }
        for policy in self.policies.all() {
            policy.truncate(tokens)?;
        }
        // Nothing fails from here on.
        for layer in fetched {
            let one = &mut self.layers[layer as usize].tail;
            one.is_second = !one.is_second;
            self.stats.tail_bytes += self.geometry.tail_bytes();
        }
        let block = self.geometry.shape.block_tokens;
        self.together = self.together.min(tokens / block * block);
        for one in &mut self.layers {
            if tokens >= one.stored {
                one.tail.tokens = one.tail.tokens.min(tokens - one.stored);
            } else {
                (one.stored, one.tail.tokens) = (tokens / block * block, tokens % block);
            }
            if let Some(kept) = &mut one.kept {
                kept.cut(tokens);
            }
        }
        Ok(())
    }

    /// Brings the blocks that a cut at some token divides, beside the tails, which still count;
    /// of which layers.
    fn fetch_tails(&self, tokens: u32) -> Result<Vec<u32>> {
        let block = self.geometry.shape.block_tokens;
        let mut layers = Vec::new();
        layers.try_reserve_exact(self.layers.len()).map_err(|_| Status::NoMem)?;
        let is_cut = |layer: &u32| self.layer(*layer).is_ok_and(|one| tokens < one.stored);
        layers.extend((0..self.layers.len() as u32).filter(is_cut));
        if layers.is_empty() || tokens % block == 0 {
            return Ok(Vec::new());
        }
        let mut ops: Vec<OpRef> = Vec::new();
        ops.try_reserve_exact(layers.len()).map_err(|_| Status::NoMem)?;
        let mut came = Ok(());
        for &layer in &layers {
            match self.fetch_block(layer, tokens / block) {
                Ok(op) => ops.push(op),
                Err(error) => {
                    came = Err(error);
                    break;
                }
            }
        }
        // Hands write to the memory until all have ended, whatever one of them came to.
        for op in ops {
            if came.is_err() {
                op.cancel();
            }
            let one = end(&op).map(|_| ());
            came = came.and(one);
        }
        came.map(|()| layers)
    }

    /// Begins to get a block of a layer to where its next tail is.
    fn fetch_block(&self, layer: u32, id: u32) -> Result<OpRef> {
        let block = self.geometry.shape.block_tokens;
        let at = self.tail_place(layer, !self.layer(layer)?.tail.is_second);
        let views = self.geometry.tail_views(&self.memory, at, (0, block))?;
        let cell_range = CellRange {
            first_token: u64::from(id) * u64::from(block),
            tokens: block.into(),
            first_layer: layer as usize,
            layers: 1,
            by_layer: false,
            wanted: Wanted::All,
            views: Arc::new(Views(vec![views])),
            after: None,
        };
        self.submit(TransferKind::Get, cell_range, &OpOpts::default())
    }
}
