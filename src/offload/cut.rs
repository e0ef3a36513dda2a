//! What came behind some tokens is taken back, in all layers or in none.

use crate::base::memory::{Buffer, MemoryWish};
use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::kv::core::views::Views;
use crate::kv::core::{Deed, Level, Rectangle, Wanted};
use crate::offload::ring::State;
use crate::offload::{Offload, end};

/// Blocks that become tails, on their way.
struct Fetched {
    memory: Buffer,
    /// The layers that they are of, in the order in which they lie there.
    layers: Vec<u32>,
}

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
        if !matches!(fetched, Ok(None)) {
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
        if let Some(fetched) = &fetched {
            self.take_tails(fetched);
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

    /// The blocks that a cut at some token divides, beside the tails, which still count.
    fn fetch_tails(&self, tokens: u32) -> Result<Option<Fetched>> {
        let block = self.geometry.shape.block_tokens;
        let mut layers = Vec::new();
        layers.try_reserve_exact(self.layers.len()).map_err(|_| Status::NoMem)?;
        let is_cut = |layer: &u32| self.layer(*layer).is_ok_and(|one| tokens < one.stored);
        layers.extend((0..self.layers.len() as u32).filter(is_cut));
        if layers.is_empty() || tokens % block == 0 {
            return Ok(None);
        }
        let bytes = layers.len() as u64 * self.geometry.tail_bytes();
        let account = self.store.account().cloned();
        let memory = Buffer::map(&MemoryWish { bytes, account, ..Default::default() }, None)?;
        let mut ops: Vec<OpRef> = Vec::new();
        ops.try_reserve_exact(layers.len()).map_err(|_| Status::NoMem)?;
        let mut came = Ok(());
        for (at, &layer) in (0u64..).zip(&layers) {
            match self.fetch_block(layer, tokens / block, &memory, at) {
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
        came.map(|()| Some(Fetched { memory, layers }))
    }

    /// Begins to get a block of a layer into one of the tails of some memory.
    fn fetch_block(&self, layer: u32, id: u32, memory: &Buffer, at: u64) -> Result<OpRef> {
        let block = self.geometry.shape.block_tokens;
        let views =
            self.geometry.tail_views(memory, at * self.geometry.tail_bytes(), (0, block))?;
        let rectangle = Rectangle {
            first_token: u64::from(id) * u64::from(block),
            tokens: block.into(),
            first_layer: layer as usize,
            layers: 1,
            by_layer: false,
            wanted: Wanted::All,
            views: Arc::new(Views(vec![views])),
            after: None,
        };
        let opts = OpOpts::default();
        let ops = self.store.submit(self.session, Deed::Get, Level::Ram, rectangle, &opts)?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Blocks that came are the tails now.
    fn take_tails(&mut self, fetched: &Fetched) {
        let bytes = self.geometry.tail_bytes();
        for (at, &layer) in (0u64..).zip(&fetched.layers) {
            let from = fetched.memory.range(at * bytes, bytes);
            let to = self.memory.range(self.tail_at(layer), bytes);
            let (Some(from), Some(to)) = (from, to) else { continue };
            // SAFETY: both are checked parts of memory of the offload's, apart from each
            // other, that no op writes: all of a fetch have ended, and no tail is leaving.
            unsafe { to.copy_from_nonoverlapping(from, bytes as usize) };
            self.stats.tail_bytes += bytes;
        }
    }
}
