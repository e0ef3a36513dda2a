//! Puts: whole blocks go to the store, the rest to the tail.

use crate::attention::check_finite;
use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::{Event, Memory};
use crate::fail;
use crate::offload::copies::{address_of, row_copy};
use crate::offload::views::{PutSource, part_of, rows_of};
use crate::offload::{Layer, Offload, end};
use crate::sparse::{Sparse, Traits};
use crate::store::state::session::{LayerViews, PlaneView, Views};
use crate::store::state::{CellRange, Level, TransferKind, Wanted};

impl Offload {
    /// Puts K and V of the next `tokens` tokens of a layer. The session must have these tokens.
    /// Policies see the keys; then whole blocks are put into the store, and the rest is copied to
    /// the tail. The op, if one is returned, reports when the library no longer accesses the
    /// engine's tensors; without one, it does not when this returns.
    ///
    /// After an error [`Offload::tokens`] returns how many tokens were taken. BUDGET, IO = the tail
    /// could not be put: the tail keeps the tokens that fitted, and the next put tries again.
    ///
    /// # Safety
    /// The views lead to readable memory that nothing writes until then.
    pub unsafe fn put(
        &mut self,
        layer: u32,
        first: u32,
        tokens: u32,
        views: &LayerViews,
        opts: &OpOpts,
    ) -> Result<Option<OpRef>> {
        let block = self.geometry.shape.block_tokens;
        self.check_put(layer, first, tokens)?;
        let reaches = self.store.reaches_device();
        let mut source = PutSource::new(&self.geometry, views, tokens, reaches)?;
        // SAFETY: the caller's promise.
        unsafe { self.fetch_and_check_keys(&mut source)? };
        if !self.charge_account() {
            fail!(
                Budget,
                "the budget has no memory for policy state: raise it, or end other sequences"
            );
        }
        self.flush_full_tail(layer)?;
        let mut done = 0;
        let tail = self.layer(layer)?.tail.tokens;
        if tail > 0 {
            done = tokens.min(block - tail);
            // SAFETY: the caller's promise.
            unsafe { self.extend_tail(layer, &source, 0, done)? };
        }
        let whole = (tokens - done) / block * block;
        let rest = tokens - done - whole;
        if whole + rest > 0 {
            self.flush_full_tail(layer)?;
        }
        let mut op = None;
        if whole > 0 {
            let part = source.part(done, whole).filter(|_| source.has_blocks_of(block));
            match part {
                Some(part) => {
                    let keys = source.keys_of(done, whole);
                    // SAFETY: the caller's promise.
                    op = Some(unsafe { self.put_blocks(layer, part, keys, opts)? });
                }
                // Pages end within blocks: copy through the tail.
                None => {
                    for at in (done..done + whole).step_by(block as usize) {
                        // SAFETY: the caller's promise.
                        unsafe { self.extend_tail(layer, &source, at, block)? };
                        self.flush_full_tail(layer)?;
                    }
                }
            }
        }
        if rest > 0 {
            // SAFETY: the caller's promise.
            let extended = unsafe { self.extend_tail(layer, &source, done + whole, rest) };
            if let Err(error) = extended {
                // The op is not returned, and still reads the engine's tensors.
                if op.is_some_and(|op| end(&op).is_err()) {
                    self.layers[layer as usize].stored -= whole;
                }
                return Err(error);
            }
        }
        Ok(op)
    }

    fn check_put(&self, layer: u32, first: u32, tokens: u32) -> Result<()> {
        let have = self.layer(layer)?.tokens();
        let most = self.geometry.shape.max_tokens;
        if first != have || tokens == 0 {
            fail!(
                Invalid,
                "{tokens} tokens from {first} on: layer {layer} has {have} tokens, not {first}"
            );
        }
        let Some(end) = first.checked_add(tokens).filter(|&end| end <= most) else {
            fail!(Limit, "{tokens} tokens from {first} on: a sequence has at most {most} tokens");
        };
        self.check_known(end)
    }

    /// Makes keys visible to policies that need them, and checks that they are finite.
    ///
    /// # Safety
    /// As [`Offload::put`].
    unsafe fn fetch_and_check_keys(&mut self, source: &mut PutSource) -> Result<()> {
        let is_host = [self.memory.memory(), source.views.k.memory] == [Memory::Host; 2];
        if source.views.k.memory == Memory::Host && self.policies.all().next().is_some() {
            self.copier.wait_until_ready()?;
        }
        if !self.policies.need_keys() {
            return Ok(());
        }
        if !is_host {
            let keys = std::slice::from_ref(&source.views.k);
            // SAFETY: the caller's promise.
            let brought = unsafe {
                self.put_keys.copy_keys_to_host(
                    &self.copier,
                    self.store.account(),
                    &self.geometry,
                    keys,
                    true,
                )?
            };
            self.count_keys(keys);
            source.keys = brought.into_iter().next();
        }
        let keys = source.keys.as_ref().unwrap_or(&source.views.k);
        // SAFETY: the caller's promise, or just written by this call.
        check_finite("keys", &unsafe { rows_of(&self.geometry, keys)? })
    }

    /// Counts keys that were copied from device memory.
    pub(super) fn count_keys(&mut self, planes: &[PlaneView]) {
        let on_device = planes.iter().filter(|plane| plane.memory == Memory::Device);
        let tokens: u64 = on_device.map(|plane| u64::from(plane.tokens)).sum();
        self.stats.key_bytes += tokens * self.geometry.k_bytes;
    }

    /// Puts whole blocks from the engine's own memory.
    ///
    /// # Safety
    /// As [`Offload::put`].
    unsafe fn put_blocks(
        &mut self,
        layer: u32,
        part: LayerViews,
        keys: Option<PlaneView>,
        opts: &OpOpts,
    ) -> Result<OpRef> {
        let block = self.geometry.shape.block_tokens;
        let first = self.layer(layer)?.stored;
        let tokens = part.k.tokens;
        if let Some(keys) = keys {
            // SAFETY: the caller's promise.
            unsafe { self.seal(layer, first, &keys, |_| true)? };
        }
        let op = self.submit_put(layer, first, (part, self.copier.pending_event()), opts)?;
        self.save(layer, first, tokens);
        self.layers[layer as usize].stored += tokens;
        self.stats.put_blocks += u64::from(tokens / block);
        self.stats.put_bytes += u64::from(tokens) * self.geometry.token_bytes();
        Ok(op)
    }

    /// Passes blocks to policies before they are put.
    ///
    /// # Safety
    /// As [`Offload::put`].
    unsafe fn seal(
        &mut self,
        layer: u32,
        first: u32,
        keys: &PlaneView,
        needs_keys: impl Fn(&Traits) -> bool,
    ) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        for at in (0..keys.tokens).step_by(block as usize) {
            let Some(part) = part_of(keys, at, block) else {
                // Blocks in pages that are no multiple were copied through the tail.
                return Err(Status::Invalid.into());
            };
            // SAFETY: the caller's promise.
            let keys = unsafe { rows_of(&self.geometry, &part)? };
            let id = (first + at) / block;
            for policy in self.policies.all().filter(|policy| needs_keys(&policy.traits())) {
                policy.seal(layer, id, first + at, &keys)?;
            }
        }
        Ok(())
    }

    fn submit_put(
        &self,
        layer: u32,
        first: u32,
        (part, after): (LayerViews, Option<Event>),
        opts: &OpOpts,
    ) -> Result<OpRef> {
        let cell_range = CellRange {
            first_token: first.into(),
            tokens: part.k.tokens.into(),
            first_layer: layer as usize,
            layers: 1,
            by_layer: false,
            wanted: Wanted::All,
            views: Arc::new(Views::from(vec![part])),
            after,
        };
        self.submit(TransferKind::Put, cell_range, opts)
    }

    /// Submits a transfer to the store.
    pub(super) fn submit(
        &self,
        kind: TransferKind,
        range: CellRange,
        opts: &OpOpts,
    ) -> Result<OpRef> {
        let level = if kind == TransferKind::Put { self.level } else { Level::Ram };
        let ops = self.store.submit(self.session, kind, level, range, opts)?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Appends rows to a tail with room for them. A full tail is put.
    ///
    /// # Safety
    /// As [`Offload::put`].
    unsafe fn extend_tail(
        &mut self,
        layer: u32,
        source: &PutSource,
        from: u32,
        tokens: u32,
    ) -> Result<()> {
        let (first, at) = (self.layer(layer)?.tokens(), self.layer(layer)?.tail.tokens);
        let tail = self.tail_views(layer, at, tokens)?;
        let planes =
            [(Some(&source.views.k), Some(&tail.k)), (source.views.v.as_ref(), tail.v.as_ref())];
        let mut copies = Vec::new();
        for (from_plane, to_plane) in planes {
            let (Some(plane), Some(to)) = (from_plane, to_plane) else { continue };
            copies.push(row_copy(plane, (from, tokens), address_of(to)?, to.memory)?);
        }
        // SAFETY: the sources by the caller's promise; nothing else uses the tail's free rows.
        unsafe { self.copier.copy_after_event(&mut copies)? };
        drop(copies);
        let keys = match tail.k.memory {
            Memory::Host => Some(tail.k),
            Memory::Device => source.keys_of(from, tokens),
        };
        if let Some(keys) = keys {
            // SAFETY: just written by this call, or a copy.
            let keys = unsafe { rows_of(&self.geometry, &keys)? };
            // Policies with rows of their own get these from the engine.
            for policy in self.policies.all().filter(|policy| policy.traits().rows.is_none()) {
                policy.append(layer, first, &keys)?;
            }
        }
        self.layers[layer as usize].tail.tokens += tokens;
        self.stats.tail_bytes += u64::from(tokens) * self.geometry.token_bytes();
        if self.layer(layer)?.tail.tokens == self.geometry.shape.block_tokens {
            self.put_full_tail(layer)?;
        }
        Ok(())
    }

    /// Begins to put a full tail into the store.
    fn put_full_tail(&mut self, layer: u32) -> Result<()> {
        let (first, block) = (self.layer(layer)?.stored, self.geometry.shape.block_tokens);
        let views = self.tail_views(layer, 0, block)?;
        if let Some(keys) = self.tail_keys(&[layer])?.first() {
            // SAFETY: rows of the tail, which stay until the put has ended, or a copy.
            unsafe { self.seal(layer, first, keys, |traits| !traits.seals_together)? };
        }
        let op = self.submit_put(layer, first, (views, None), &OpOpts::default())?;
        self.layers[layer as usize].tail.leaving = Some(op);
        self.save(layer, first, block);
        self.seal_together(first)
    }

    /// Passes a block to policies that need it of all layers together, once the tails of all
    /// layers are full.
    fn seal_together(&mut self, first: u32) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        let is_full = |layer: &Layer| layer.stored == first && layer.tail.tokens == block;
        let seals_together = |policy: &mut Box<dyn Sparse>| policy.traits().seals_together;
        if first < self.sealed_together
            || !self.policies.all().any(seals_together)
            || !self.layers.iter().all(is_full)
        {
            return Ok(());
        }
        let all: Vec<u32> = (0..self.layers.len() as u32).collect();
        let planes = self.tail_keys(&all)?;
        if planes.is_empty() {
            return Ok(());
        }
        let mut keys = Vec::new();
        keys.try_reserve_exact(planes.len()).map_err(|_| Status::NoMem)?;
        for plane in &planes {
            // SAFETY: rows of tails, which stay until the next put, or copies.
            keys.push(unsafe { rows_of(&self.geometry, plane)? });
        }
        for policy in self.policies.all().filter(|policy| policy.traits().seals_together) {
            policy.seal_all(first / block, first, &keys)?;
        }
        self.sealed_together = first + block;
        Ok(())
    }

    /// Passes a single layer's block to these policies, if it leaves the tail before other layers
    /// have it.
    fn seal_single_layer(&mut self, layer: u32) -> Result<()> {
        let first = self.layer(layer)?.stored;
        let seals_together = |policy: &mut Box<dyn Sparse>| policy.traits().seals_together;
        if first < self.sealed_together || !self.policies.all().any(seals_together) {
            return Ok(());
        }
        match self.tail_keys(&[layer])?.first() {
            // SAFETY: rows of the tail, or a copy.
            Some(keys) => unsafe { self.seal(layer, first, keys, |traits| traits.seals_together) },
            None => Ok(()),
        }
    }

    /// The keys of full tails in host memory; none if they are in device memory and no policy
    /// needs them.
    fn tail_keys(&mut self, layers: &[u32]) -> Result<Vec<PlaneView>> {
        let block = self.geometry.shape.block_tokens;
        let mut planes = Vec::new();
        planes.try_reserve_exact(layers.len()).map_err(|_| Status::NoMem)?;
        for &layer in layers {
            planes.push(self.tail_views(layer, 0, block)?.k);
        }
        self.host_keys(planes)
    }

    /// The keys of the offload's own memory, in host memory.
    pub(super) fn host_keys(&mut self, planes: Vec<PlaneView>) -> Result<Vec<PlaneView>> {
        if self.memory.memory() == Memory::Host {
            return Ok(planes);
        }
        if !self.policies.need_keys() {
            return Ok(Vec::new());
        }
        let account = self.store.account();
        // SAFETY: rows that nothing writes during this call.
        let shown = unsafe {
            self.seal_keys.copy_keys_to_host(
                &self.copier,
                account,
                &self.geometry,
                &planes,
                false,
            )?
        };
        self.count_keys(&planes);
        Ok(shown)
    }

    /// Stores the policy state of blocks, if possible.
    fn save(&mut self, layer: u32, first: u32, tokens: u32) {
        let Some(policy_state) = &mut self.policy_state else { return };
        let what = (layer, first, tokens, self.geometry.shape.block_tokens);
        if let Err(error) = policy_state.put(&self.store, self.session, &mut self.policies, what) {
            self.last_error = Some(error.within("policy state of blocks"));
        }
    }

    /// Waits until a full tail was put.
    pub(super) fn flush_full_tail(&mut self, layer: u32) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        if self.layer(layer)?.tail.tokens < block {
            return Ok(());
        }
        if self.layer(layer)?.tail.leaving.is_none() {
            // An earlier attempt failed.
            self.put_full_tail(layer)?;
        }
        self.seal_single_layer(layer)?;
        let begun_ns = self.clock.now_ns();
        let state = &mut self.layers[layer as usize];
        let left = state.tail.leaving.take().map_or(Ok(0), |op| end(&op));
        if left.is_ok() {
            state.stored += block;
            state.tail.tokens = 0;
            self.stats.put_blocks += 1;
            self.stats.put_bytes += u64::from(block) * self.geometry.token_bytes();
        }
        self.stats.tail_waits.add(self.clock.now_ns().saturating_sub(begun_ns));
        left.map(|_| ())
    }

    /// Views of rows of a layer's tail.
    pub(super) fn tail_views(&self, layer: u32, first: u32, tokens: u32) -> Result<LayerViews> {
        self.geometry.tail_views(&self.memory, self.tail_offset(layer), (first, tokens))
    }

    /// Offset of a layer's current tail in the offload's memory.
    pub(super) fn tail_offset(&self, layer: u32) -> u64 {
        let is_second = self.layers.get(layer as usize).is_some_and(|one| one.tail.is_second);
        self.tail_slot_offset(layer, is_second)
    }

    /// Offset of one of the two tails of a layer.
    pub(super) fn tail_slot_offset(&self, layer: u32, is_second: bool) -> u64 {
        let number = 2 * u64::from(layer) + u64::from(is_second);
        self.ring.bytes() + number * self.geometry.tail_bytes()
    }
}
