//! Changes of the whole sequence: resume from blocks in the store, fork, truncate.

use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::offload::copies::byte_copy;
use crate::offload::load::BlockSelection;
use crate::offload::opts::Policies;
use crate::offload::policy_state::needs_block_keys;
use crate::offload::ring::State;
use crate::offload::views::{canonical, part_of, rows_of};
use crate::offload::{Layer, Offload, end};
use crate::sparse::{Context, Sparse};
use crate::store::handle::Store;
use crate::store::state::session::Views;
use crate::store::state::{CellRange, TransferKind, Wanted};

impl Offload {
    /// Resumes from `tokens` tokens in whole blocks that the store has. Stored policy state of
    /// these blocks is loaded; keys of other blocks are loaded and passed to policies. Only before
    /// the first put; the session must have these tokens. After an error nothing is changed:
    /// NOT_FOUND = keys that policies need are not in the store.
    pub fn resume(&mut self, tokens: u32) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        if self.layers.iter().any(|layer| layer.tokens() > 0) {
            fail!(Busy, "the offload has tokens already: resume before the first put");
        }
        if tokens % block != 0 || tokens > self.geometry.shape.max_tokens {
            fail!(
                Invalid,
                "{tokens} tokens: accepted are whole blocks of {block}, up to max_tokens"
            );
        }
        self.check_known(tokens)?;
        self.layers.iter_mut().for_each(|layer| layer.stored = tokens);
        self.sealed_together = tokens;
        let notified = (0..self.geometry.shape.layers)
            .try_for_each(|layer| self.restore_policies(layer, tokens));
        if notified.is_err() {
            self.layers.iter_mut().for_each(|layer| layer.stored = 0);
            self.sealed_together = 0;
            self.policies.all().for_each(|policy| policy.reset());
        }
        self.charge_account();
        notified
    }

    /// Passes the blocks of a layer to policies.
    fn restore_policies(&mut self, layer: u32, tokens: u32) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        let mut unknown: Vec<u32> = Vec::new();
        unknown.try_reserve_exact((tokens / block) as usize).map_err(|_| Status::NoMem)?;
        unknown.extend(0..tokens / block);
        if let Some(policy_state) = &mut self.policy_state {
            let what = (layer, tokens, block);
            unknown = policy_state.load(&self.store, self.session, &mut self.policies, what)?;
        }
        if !self.policies.all().any(|policy| needs_block_keys(&**policy)) {
            return Ok(());
        }
        let at_once = (self.geometry.buffer_tokens / block) as usize;
        let context = Context { tokens, ..Context::default() };
        for ids in unknown.chunks(at_once) {
            self.done(0)?;
            self.load(0, layer, BlockSelection::Blocks(ids), None, &context)?;
            self.wait(0)?;
            let sealed = self.seal_loaded(layer, ids);
            self.done(0)?;
            sealed?;
        }
        Ok(())
    }

    /// Passes the keys of blocks in buffer 0 to policies.
    fn seal_loaded(&mut self, layer: u32, ids: &[u32]) -> Result<()> {
        let (geometry, at) = (self.geometry, self.ring.at(0));
        let (block, heads) = (geometry.shape.block_tokens, geometry.shape.key_heads);
        let tokens = ids.len() as u32 * block;
        let address = self.memory.range(at, u64::from(tokens) * geometry.k_bytes)?;
        let all = (address, self.memory.memory());
        let shown = self.host_keys(vec![canonical(all, tokens, heads, geometry.k_bytes)])?;
        let Some(keys) = shown.first() else { return Ok(()) };
        for (row, &id) in (0u32..).zip(ids) {
            let plane = part_of(keys, row * block, block).ok_or(Status::Invalid)?;
            // SAFETY: rows of the buffer, which was waited for and is still in use, or a copy.
            let keys = unsafe { rows_of(&geometry, &plane)? };
            for policy in self.policies.all().filter(|policy| policy.traits().rows.is_none()) {
                policy.seal(layer, id, id * block, &keys)?;
            }
        }
        Ok(())
    }
}

// Fork.

impl Offload {
    /// An offload for a session that was forked from this one's. Blocks in the store are shared;
    /// tails and lists of retained tokens are copied; policies are forked. It has a ring and
    /// counters of its own. INVALID = the session does not have the same tokens. The store's
    /// account is charged as for this one. If this one uses lent memory, the device allocates the
    /// other's.
    ///
    /// A full tail is put first, if possible. Other puts may still be in flight: loads find these
    /// blocks once the puts have ended.
    pub fn fork(&mut self, store: &Arc<Store>, session: u32) -> Result<Offload> {
        self.check_same(store, session)?;
        for layer in 0..self.layers.len() as u32 {
            // After a failed put, the tail is copied and put by the fork, too.
            let _ = self.flush_full_tail(layer);
        }
        let fork = |policy: &Option<Box<dyn Sparse>>| {
            policy.as_ref().map(|policy| policy.fork()).transpose()
        };
        let (prefill, decode) = (fork(&self.policies.prefill)?, fork(&self.policies.decode)?);
        let (store, geometry, buffers) = (&self.store, self.geometry, self.ring.len());
        let placement = self.memory.like();
        let mut other = Offload::empty(store, session, geometry, buffers, placement)?;
        (other.level, other.clock) = (self.level, self.clock.clone());
        other.sealed_together = self.sealed_together;
        other.policies = Policies { prefill, decode };
        other.audit(self.audit_interval())?;
        other.policy_state =
            self.policy_state.as_ref().map(|policy_state| policy_state.fork(store)).transpose()?;
        if !other.charge_account() {
            fail!(
                Budget,
                "the budget has no memory for policy state: raise it, or end other sequences"
            );
        }
        for (from, to) in self.layers.iter().zip(&mut other.layers) {
            *to = from.try_clone().ok_or(Status::NoMem)?;
        }
        self.copy_tails(&mut other)?;
        Ok(other)
    }

    /// Fails if a session does not have the tokens of this offload.
    fn check_same(&self, store: &Arc<Store>, session: u32) -> Result<()> {
        let tokens = self.layers.iter().map(|layer| layer.tokens()).max().unwrap_or(0) as usize;
        let whole = tokens / self.geometry.shape.block_tokens as usize;
        if !Arc::ptr_eq(store, &self.store) || session == self.session {
            fail!(Invalid, "an offload is forked for another session of the same store");
        }
        self.store.with(|core| {
            let (own, other) = (core.session(self.session)?, core.session(session)?);
            let is_space = own.namespace() == other.namespace();
            let (own, other) = (own.path(), other.path());
            let keys = (own.keys().get(..whole), other.keys().get(..whole));
            let ends = (own.tokens().get(..tokens), other.tokens().get(..tokens));
            // Keys cover tokens and media of whole blocks; compare what follows them.
            let media = |path: &crate::store::token_path::Path| {
                let until = path.media().partition_point(|one| one.token < tokens as u64);
                path.media().get(..until).map(<[_]>::to_vec)
            };
            let same = ends.0.is_some() && ends.0 == ends.1 && keys.0 == keys.1;
            if !is_space || !same || media(own) != media(other) {
                fail!(Invalid, "the session does not have the same {tokens} tokens");
            }
            Ok(())
        })
    }

    /// Copies tails to another offload with as many layers.
    fn copy_tails(&self, other: &mut Offload) -> Result<()> {
        let (bytes, is) = (self.geometry.tail_bytes(), self.memory.memory());
        let mut copies = Vec::new();
        copies.try_reserve_exact(self.layers.len()).map_err(|_| Status::NoMem)?;
        for (layer, state) in (0u32..).zip(&self.layers) {
            if state.tail.tokens > 0 {
                let from = self.memory.range(self.tail_offset(layer), bytes)?;
                let to = other.memory.range(other.tail_offset(layer), bytes)?;
                copies.push(byte_copy((from, is), (to, is), bytes)?);
            }
        }
        // SAFETY: checked parts of memory of two offloads; nothing else uses the other's yet, and
        // workers only read tails of this one.
        unsafe { self.copier.copy(&mut copies)? };
        other.stats.tail_bytes += copies.len() as u64 * bytes;
        Ok(())
    }
}

impl Layer {
    /// State of a layer for a fork; none if there is no memory for it.
    fn try_clone(&self) -> Option<Layer> {
        let retained = match &self.retained {
            Some(retained) => Some(retained.try_clone()?),
            None => None,
        };
        let mut copy = Layer { stored: self.stored, retained, ..Layer::default() };
        // The fork puts a full tail itself.
        copy.tail.tokens = self.tail.tokens;
        Some(copy)
    }
}

// Truncation.

impl Offload {
    /// Drops the tokens from `tokens` on in all layers, for example after a rejected draft. To be
    /// called before the session is truncated. Loads in progress are canceled, since they may load
    /// dropped blocks.
    ///
    /// After an error no layer is truncated, and the call can be repeated. After an error of a
    /// policy it must be: other policies may have dropped tokens already.
    pub fn truncate(&mut self, tokens: u32) -> Result<()> {
        for buffer in 0..self.ring.len() {
            if matches!(self.ring.get(buffer)?.state, State::Loading(_)) {
                self.done(buffer)?;
            }
        }
        for layer in 0..self.layers.len() as u32 {
            // A tail that cannot be put is truncated in place.
            let _ = self.flush_full_tail(layer);
        }
        let begun_ns = self.clock.now_ns();
        let fetched = self.fetch_cut_blocks(tokens);
        if !fetched.as_ref().is_ok_and(Vec::is_empty) {
            self.stats.cut_waits.add(self.clock.now_ns().saturating_sub(begun_ns));
        }
        let fetched = fetched?;
        // The stored state may have fewer tokens: they are appended later.
        if let Some(policy_state) = &mut self.policy_state {
            policy_state.truncate(&self.store, tokens)?;
        }
        for policy in self.policies.all() {
            policy.truncate(tokens)?;
        }
        // No step fails from here on.
        for layer in fetched {
            let tail = &mut self.layers[layer as usize].tail;
            tail.is_second = !tail.is_second;
            self.stats.tail_bytes += self.geometry.tail_bytes();
        }
        let block = self.geometry.shape.block_tokens;
        self.sealed_together = self.sealed_together.min(tokens / block * block);
        for state in &mut self.layers {
            if tokens >= state.stored {
                state.tail.tokens = state.tail.tokens.min(tokens - state.stored);
            } else {
                (state.stored, state.tail.tokens) = (tokens / block * block, tokens % block);
            }
            if let Some(retained) = &mut state.retained {
                retained.cut(tokens);
            }
        }
        Ok(())
    }

    /// Loads the blocks that a truncation divides into the second tails. Returns their layers.
    fn fetch_cut_blocks(&self, tokens: u32) -> Result<Vec<u32>> {
        let block = self.geometry.shape.block_tokens;
        let mut layers = Vec::new();
        layers.try_reserve_exact(self.layers.len()).map_err(|_| Status::NoMem)?;
        let is_cut = |layer: &u32| self.layer(*layer).is_ok_and(|state| tokens < state.stored);
        layers.extend((0..self.layers.len() as u32).filter(is_cut));
        if layers.is_empty() || tokens % block == 0 {
            return Ok(Vec::new());
        }
        let mut ops: Vec<OpRef> = Vec::new();
        ops.try_reserve_exact(layers.len()).map_err(|_| Status::NoMem)?;
        let mut result = Ok(());
        for &layer in &layers {
            match self.fetch_cut_block(layer, tokens / block) {
                Ok(op) => ops.push(op),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        // Workers write to the memory until all ops have ended, whatever their result is.
        for op in ops {
            if result.is_err() {
                op.cancel();
            }
            let ended = end(&op).map(|_| ());
            result = result.and(ended);
        }
        result.map(|()| layers)
    }

    /// Begins to load a block of a layer into its second tail.
    fn fetch_cut_block(&self, layer: u32, id: u32) -> Result<OpRef> {
        let block = self.geometry.shape.block_tokens;
        let at = self.tail_slot_offset(layer, !self.layer(layer)?.tail.is_second);
        let views = self.geometry.tail_views(&self.memory, at, (0, block))?;
        let cell_range = CellRange {
            first_token: u64::from(id) * u64::from(block),
            tokens: block.into(),
            first_layer: layer as usize,
            layers: 1,
            by_layer: false,
            wanted: Wanted::All,
            views: Arc::new(Views::from(vec![views])),
            after: None,
        };
        self.submit(TransferKind::Get, cell_range, &OpOpts::default())
    }
}
