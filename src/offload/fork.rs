//! Another offload, for a session that goes on from where this one is.

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::offload::carry::bytes_to;
use crate::offload::opts::Policies;
use crate::offload::{Layer, Offload};
use crate::sparse::Sparse;
use crate::store::handle::Store;

impl Offload {
    /// Another offload for a session that was forked from this one's: the blocks in the store
    /// are those of both, tails and lists of tokens that are left are copied, policies forked.
    /// It has a ring of its own, and counts from zero. INVALID = the session does not have the
    /// same tokens. The store's account pays for it as for this one; where the engine has lent
    /// memory for this one, the device gives that of the other.
    ///
    /// A full tail leaves first, if it can. Puts of blocks under way may go on: who goes on
    /// from these blocks finds them once they have ended.
    pub fn fork(&mut self, store: &Arc<Store>, session: u32) -> Result<Offload> {
        self.check_same(store, session)?;
        for layer in 0..self.layers.len() as u32 {
            // One that cannot is copied, and leaves there too.
            let _ = self.empty_full_tail(layer);
        }
        let fork = |policy: &Option<Box<dyn Sparse>>| {
            policy.as_ref().map(|policy| policy.fork()).transpose()
        };
        let (prefill, decode) = (fork(&self.policies.prefill)?, fork(&self.policies.decode)?);
        let (store, geometry, buffers) = (&self.store, self.geometry, self.ring.len());
        let home = self.memory.like();
        let mut other = Offload::empty(store, session, geometry, buffers, home)?;
        (other.level, other.clock) = (self.level, self.clock.clone());
        other.together = self.together;
        other.policies = Policies { prefill, decode };
        other.audit(self.audited_every())?;
        other.saved = self.saved.as_ref().map(|saved| saved.fork(store)).transpose()?;
        if !other.pay() {
            fail!(Budget, "no memory is left for what policies know of the sequence");
        }
        for (one, to) in self.layers.iter().zip(&mut other.layers) {
            *to = one.try_clone().ok_or(Status::NoMem)?;
        }
        self.copy_tails(&mut other)?;
        Ok(other)
    }

    /// An error if a session does not have the tokens that layers have.
    fn check_same(&self, store: &Arc<Store>, session: u32) -> Result<()> {
        let tokens = self.layers.iter().map(|layer| layer.tokens()).max().unwrap_or(0) as usize;
        let whole = tokens / self.geometry.shape.block_tokens as usize;
        if !Arc::ptr_eq(store, &self.store) || session == self.session {
            fail!(Invalid, "an offload is forked for another session of the same store");
        }
        self.store.with(|core| {
            let (mine, other) = (core.session(self.session)?, core.session(session)?);
            let is_space = mine.space() == other.space();
            let (mine, other) = (mine.path(), other.path());
            let keys = (mine.keys().get(..whole), other.keys().get(..whole));
            let ends = (mine.tokens().get(..tokens), other.tokens().get(..tokens));
            // Keys say what tokens and media are; behind the last of them, look.
            let media = |path: &crate::store::token_path::Path| {
                let until = path.media().partition_point(|one| one.token < tokens as u64);
                path.media().get(..until).map(<[_]>::to_vec)
            };
            let same = ends.0.is_some() && ends.0 == ends.1 && keys.0 == keys.1;
            if !is_space || !same || media(mine) != media(other) {
                fail!(Invalid, "the session does not have the same {tokens} tokens");
            }
            Ok(())
        })
    }

    /// Tails of this one are those of another, which has as many layers.
    fn copy_tails(&self, other: &mut Offload) -> Result<()> {
        let (bytes, is) = (self.geometry.tail_bytes(), self.memory.memory());
        let mut copies = Vec::new();
        copies.try_reserve_exact(self.layers.len()).map_err(|_| Status::NoMem)?;
        for (layer, one) in (0u32..).zip(&self.layers) {
            if one.tail.tokens > 0 {
                let from = self.memory.range(self.tail_at(layer), bytes)?;
                let to = other.memory.range(other.tail_at(layer), bytes)?;
                copies.push(bytes_to((from, is), (to, is), bytes)?);
            }
        }
        // SAFETY: checked parts of memory of two offloads; the other's is nobody else's yet,
        // and hands only read tails of this one.
        unsafe { self.carrier.carry(&mut copies)? };
        other.stats.tail_bytes += copies.len() as u64 * bytes;
        Ok(())
    }
}

impl Layer {
    /// What is known of a layer that goes on from here; none if there is no memory for it.
    fn try_clone(&self) -> Option<Layer> {
        let kept = match &self.kept {
            Some(kept) => Some(kept.try_clone()?),
            None => None,
        };
        let mut copy = Layer { stored: self.stored, kept, ..Layer::default() };
        // A tail that is leaving from here leaves from there by itself.
        copy.tail.tokens = self.tail.tokens;
        Some(copy)
    }
}
