//! What the engine computed goes in: whole blocks into the store, the rest into the tail.

use crate::attention::check_finite;
use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::host::Host;
use crate::device::{Copy, Device, Stream, Way};
use crate::fail;
use crate::kv::core::views::{LayerViews, Tokens, Views};
use crate::kv::core::{Deed, Rectangle, Wanted};
use crate::offload::source::{Source, rows_of};
use crate::offload::{Layer, Offload, end};
use crate::sparse::{Sparse, Traits, needs};

impl Offload {
    /// Keeps K and V of `tokens` tokens of a layer, which go on where those before ended. The
    /// session has these tokens already. Policies see the keys; then whole blocks are on their
    /// way into the store, and what is left is in the tail. The op, if there is one, tells when
    /// the engine's tensors are its own again; without one they are when this returns.
    ///
    /// After an error [`Offload::tokens`] says how far it came. BUDGET, IO = the tail could not
    /// leave: nothing was taken in, and the next put tries again.
    ///
    /// # Safety
    /// The views lead to memory that can be read, and that nobody writes, until then.
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
        let source = Source::new(&self.geometry, views, tokens)?;
        if self.policies.all().any(|policy| policy.traits().needs & needs::KEYS != 0) {
            // SAFETY: the caller's promise.
            check_finite("keys", &unsafe { rows_of(&self.geometry, &source.views.k)? })?;
        }
        if !self.pay() {
            fail!(Budget, "no memory is left for what policies know of the sequence");
        }
        self.empty_full_tail(layer)?;
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
            self.empty_full_tail(layer)?;
        }
        let mut op = None;
        if whole > 0 {
            let part = source.part(done, whole).filter(|_| source.has_blocks_of(block));
            match part {
                // SAFETY: the caller's promise.
                Some(part) => op = Some(unsafe { self.put_blocks(layer, part, opts)? }),
                // Pages end within blocks: by way of the tail.
                None => {
                    for at in (done..done + whole).step_by(block as usize) {
                        // SAFETY: the caller's promise.
                        unsafe { self.extend_tail(layer, &source, at, block)? };
                        self.empty_full_tail(layer)?;
                    }
                }
            }
        }
        if rest > 0 {
            // SAFETY: the caller's promise.
            let extended = unsafe { self.extend_tail(layer, &source, done + whole, rest) };
            if let Err(error) = extended {
                // The op goes to nobody, and reads the engine's tensors.
                let _ = op.as_ref().map(end);
                return Err(error);
            }
        }
        Ok(op)
    }

    fn check_put(&self, layer: u32, first: u32, tokens: u32) -> Result<()> {
        let have = self.layer(layer)?.tokens();
        let most = self.geometry.shape.max_tokens;
        if first != have || tokens == 0 {
            fail!(Invalid, "{tokens} tokens from {first} on: layer {layer} has {have}");
        }
        let Some(end) = first.checked_add(tokens).filter(|&end| end <= most) else {
            fail!(Limit, "{tokens} tokens from {first} on, of {most} that a sequence may have");
        };
        self.check_known(end)
    }

    /// Whole blocks from the engine's own memory.
    ///
    /// # Safety
    /// As [`Offload::put`].
    unsafe fn put_blocks(&mut self, layer: u32, part: LayerViews, opts: &OpOpts) -> Result<OpRef> {
        let block = self.geometry.shape.block_tokens;
        let first = self.layer(layer)?.stored;
        let tokens = part.k.tokens;
        // SAFETY: the caller's promise.
        unsafe { self.seal(layer, first, &part, |_| true)? };
        let op = self.submit_put(layer, first, part, opts)?;
        self.save(layer, first, tokens);
        self.layers[layer as usize].stored += tokens;
        self.stats.put_blocks += u64::from(tokens / block);
        self.stats.put_bytes += u64::from(tokens) * self.geometry.token_bytes();
        Ok(op)
    }

    /// Policies see blocks that are about to be moved away.
    ///
    /// # Safety
    /// As [`Offload::put`].
    unsafe fn seal(
        &mut self,
        layer: u32,
        first: u32,
        part: &LayerViews,
        who: impl Fn(&Traits) -> bool,
    ) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        for at in (0..part.k.tokens).step_by(block as usize) {
            let Some(one) = Source { views: part.clone() }.part(at, block) else {
                // Blocks are in pages, and not in whole ones: they were copied before.
                return Err(Status::Invalid.into());
            };
            // SAFETY: the caller's promise.
            let keys = unsafe { rows_of(&self.geometry, &one.k)? };
            let id = (first + at) / block;
            for policy in self.policies.all().filter(|policy| who(&policy.traits())) {
                policy.seal(layer, id, first + at, &keys)?;
            }
        }
        Ok(())
    }

    fn submit_put(&self, layer: u32, first: u32, part: LayerViews, opts: &OpOpts) -> Result<OpRef> {
        let rectangle = Rectangle {
            first_token: first.into(),
            tokens: part.k.tokens.into(),
            first_layer: layer as usize,
            layers: 1,
            by_layer: false,
            wanted: Wanted::All,
            views: Arc::new(Views(vec![part])),
            after: None,
        };
        let ops = self.store.submit(self.session, Deed::Put, self.level, rectangle, opts)?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Adds rows to a tail that has room for them; once it is full it is on its way.
    ///
    /// # Safety
    /// As [`Offload::put`].
    unsafe fn extend_tail(
        &mut self,
        layer: u32,
        source: &Source,
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
            let Tokens::At(address) = to.place else { continue };
            let view = plane.view();
            copies.push(Copy::new(&view, from, tokens, address as *mut u8, Way::Gather)?);
        }
        // SAFETY: sources by the caller's promise; the tail's rows are nobody else's while it
        // is not full.
        unsafe { Host::default().submit(Stream(0), None, &mut copies)? };
        drop(copies);
        // SAFETY: they were just written.
        let keys = unsafe { rows_of(&self.geometry, &tail.k)? };
        // Who has rows of its own is told of them by the engine.
        for policy in self.policies.all().filter(|policy| policy.traits().rows.is_none()) {
            policy.append(layer, first, &keys)?;
        }
        self.layers[layer as usize].tail.tokens += tokens;
        self.stats.tail_bytes += u64::from(tokens) * self.geometry.token_bytes();
        if self.layer(layer)?.tail.tokens == self.geometry.shape.block_tokens {
            self.send_tail(layer)?;
        }
        Ok(())
    }

    /// A full tail is a block: on its way into the store.
    fn send_tail(&mut self, layer: u32) -> Result<()> {
        let (first, block) = (self.layer(layer)?.stored, self.geometry.shape.block_tokens);
        let views = self.tail_views(layer, 0, block)?;
        // SAFETY: the tail's own rows, which stay until the put has ended.
        unsafe { self.seal(layer, first, &views, |traits| !traits.seals_together)? };
        let op = self.submit_put(layer, first, views, &OpOpts::default())?;
        self.layers[layer as usize].tail.leaving = Some(op);
        self.save(layer, first, block);
        self.seal_together(first)
    }

    /// Policies that want to see a block in all layers together do, once the tails of all are
    /// full of it.
    fn seal_together(&mut self, first: u32) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        let is_full = |layer: &Layer| layer.stored == first && layer.tail.tokens == block;
        let wants = |policy: &mut Box<dyn Sparse>| policy.traits().seals_together;
        if first < self.together
            || !self.policies.all().any(wants)
            || !self.layers.iter().all(is_full)
        {
            return Ok(());
        }
        let mut views: Vec<LayerViews> = Vec::new();
        views.try_reserve_exact(self.layers.len()).map_err(|_| Status::NoMem)?;
        for layer in 0..self.layers.len() as u32 {
            views.push(self.tail_views(layer, 0, block)?);
        }
        let mut keys = Vec::new();
        keys.try_reserve_exact(views.len()).map_err(|_| Status::NoMem)?;
        for one in &views {
            // SAFETY: rows of tails, which stay until they are put to again.
            keys.push(unsafe { rows_of(&self.geometry, &one.k)? });
        }
        for policy in self.policies.all().filter(|policy| policy.traits().seals_together) {
            policy.seal_all(first / block, first, &keys)?;
        }
        self.together = first + block;
        Ok(())
    }

    /// A block that has left one layer's tail before it was complete in others is told alone.
    fn seal_alone(&mut self, layer: u32) -> Result<()> {
        let (first, block) = (self.layer(layer)?.stored, self.geometry.shape.block_tokens);
        let wants = |policy: &mut Box<dyn Sparse>| policy.traits().seals_together;
        if first < self.together || !self.policies.all().any(wants) {
            return Ok(());
        }
        let views = self.tail_views(layer, 0, block)?;
        // SAFETY: the tail's own rows.
        unsafe { self.seal(layer, first, &views, |traits| traits.seals_together) }
    }

    /// What policies know of blocks is kept with them, if that can be.
    fn save(&mut self, layer: u32, first: u32, tokens: u32) {
        let Some(saved) = &mut self.saved else { return };
        let what = (layer, first, tokens, self.geometry.shape.block_tokens);
        if let Err(error) = saved.put(&self.store, self.session, &mut self.policies, what) {
            self.note = Some(error.within("what policies know of blocks"));
        }
    }

    /// Waits until a full tail has left.
    pub(super) fn empty_full_tail(&mut self, layer: u32) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        if self.layer(layer)?.tail.tokens < block {
            return Ok(());
        }
        if self.layer(layer)?.tail.leaving.is_none() {
            // It could not leave before.
            self.send_tail(layer)?;
        }
        self.seal_alone(layer)?;
        let begun_ns = self.clock.now_ns();
        let one = &mut self.layers[layer as usize];
        let left = one.tail.leaving.take().map_or(Ok(0), |op| end(&op));
        if left.is_ok() {
            one.stored += block;
            one.tail.tokens = 0;
            self.stats.put_blocks += 1;
            self.stats.put_bytes += u64::from(block) * self.geometry.token_bytes();
        }
        self.stats.tail_waits.add(self.clock.now_ns().saturating_sub(begun_ns));
        left.map(|_| ())
    }

    /// Rows of a layer's tail.
    pub(super) fn tail_views(&self, layer: u32, first: u32, tokens: u32) -> Result<LayerViews> {
        self.geometry.tail_views(&self.memory, self.tail_at(layer), (first, tokens))
    }

    /// Where a layer's tail begins, in the offload's memory.
    pub(super) fn tail_at(&self, layer: u32) -> u64 {
        self.ring.bytes() + u64::from(layer) * self.geometry.tail_bytes()
    }
}
