//! Loads: blocks of a layer are loaded into a buffer of the ring, followed by the tail.

use crate::attention::{Rows, Scales, check_finite};
use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::{Event, Memory};
use crate::fail;
use crate::meta::view::{Place, View};
use crate::offload::audit::Selection;
use crate::offload::copies::{address_of, byte_copy};
use crate::offload::ring::State;
use crate::offload::{Offload, end};
use crate::sparse::{Context, Kind, caps};
use crate::store::state::session::{LayerViews, PlaneView, Views};
use crate::store::state::{CellRange, TransferKind, Wanted};

/// The blocks to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSelection<'a> {
    /// All blocks that a policy selects, and the tail.
    All,
    /// The blocks that a policy selects among these, ascending; no tail.
    Blocks(&'a [u32]),
    /// These blocks, ascending, chosen by the caller, and the tail. A query is used for audits
    /// only.
    Chosen(&'a [u32]),
}

/// The result of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Tokens of blocks and of the tail.
    pub tokens: u32,
    /// Tokens of the tail.
    pub tail_tokens: u32,
    /// Number of blocks.
    pub blocks: u32,
}

/// Rows of K and V in a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Kv<'a> {
    /// Keys.
    pub keys: Rows<'a>,
    /// Values.
    pub values: Rows<'a>,
}

impl Offload {
    /// Begins to load blocks of a layer into a free buffer. Returns their number. The policy
    /// selects blocks if it can and a query is given; otherwise all are loaded. LIMIT = the buffer
    /// is too small. [`Offload::wait`] waits for the end.
    pub fn load(
        &mut self,
        buffer: u32,
        layer: u32,
        which: BlockSelection<'_>,
        query: Option<&Rows<'_>>,
        context: &Context,
    ) -> Result<u32> {
        if !matches!(self.ring.get(buffer)?.state, State::Free) {
            fail!(Busy, "buffer {buffer} is in use: release it first");
        }
        let candidates = self.candidates(layer, which)?;
        let is_chosen = matches!(which, BlockSelection::Chosen(_));
        if let Some(query) = query.filter(|_| is_chosen) {
            self.geometry.shape.check_queries(layer, query)?;
            check_finite("queries", query)?;
        }
        let selection_query = query.filter(|_| !is_chosen);
        let blocks = self.chosen(layer, selection_query, &candidates, context)?;
        let block = self.geometry.shape.block_tokens;
        let (count, tokens) = (blocks.len() as u32, blocks.len() as u64 * u64::from(block));
        if tokens > self.geometry.buffer_tokens.into() {
            fail!(
                Limit,
                "{count} blocks have {tokens} tokens, a buffer {}: load them in parts",
                self.geometry.buffer_tokens
            );
        }
        let op = match blocks.is_empty() {
            true => None,
            false => {
                let views = self.slot_views(buffer, 0, tokens as u32)?;
                Some(self.submit_get(layer, &blocks, views, self.copier.pending_event())?)
            }
        };
        let bytes = self.geometry.token_bytes() * u64::from(block);
        self.stats.loads += 1;
        self.stats.candidates += candidates.len() as u64;
        self.stats.loaded_blocks += u64::from(count);
        self.stats.loaded_bytes += u64::from(count) * bytes;
        self.stats.saved_bytes += (candidates.len() as u64 - u64::from(count)) * bytes;
        if let Some(query) = query {
            self.audit_load(layer, which, (&candidates, &blocks), query, context);
        }
        let stored = self.layer(layer)?.stored;
        let slot = self.ring.get_mut(buffer)?;
        slot.state = State::Loading(op);
        (slot.layer, slot.blocks, slot.stored) = (layer, blocks, stored);
        (slot.has_tail, slot.tail_tokens) = (!matches!(which, BlockSelection::Blocks(_)), 0);
        Ok(count)
    }

    /// Waits for a load, and appends the current tail. After an error the buffer is free:
    /// NOT_FOUND = a block is not in the store any more; STATE = the tail became a block
    /// meanwhile, so that one is missing.
    pub fn wait(&mut self, buffer: u32) -> Result<Loaded> {
        let slot = self.ring.get_mut(buffer)?;
        match std::mem::take(&mut slot.state) {
            State::Free => fail!(State, "buffer {buffer} has no load to wait for"),
            State::Ready => {}
            State::Loading(op) => self.arrive(buffer, op)?,
        }
        self.ring.get_mut(buffer)?.state = State::Ready;
        let slot = self.ring.get(buffer)?;
        let (tail_tokens, blocks) = (slot.tail_tokens, slot.blocks.len() as u32);
        let tokens = blocks * self.geometry.shape.block_tokens + tail_tokens;
        Ok(Loaded { tokens, tail_tokens, blocks })
    }

    /// Ends a load, and copies the tail.
    fn arrive(&mut self, buffer: u32, op: Option<OpRef>) -> Result<()> {
        let begun_ns = self.clock.now_ns();
        let loaded = op.map_or(Ok(0), |op| end(&op));
        self.stats.load_waits.add(self.clock.now_ns().saturating_sub(begun_ns));
        if let Err(error) = loaded {
            self.stats.failed_loads += 1;
            return Err(error);
        }
        let slot = self.ring.get(buffer)?;
        if !slot.has_tail {
            return Ok(());
        }
        let (layer, behind) = (slot.layer, slot.blocks.len() as u32);
        let state = self.layer(layer)?;
        if state.stored != slot.stored {
            fail!(
                State,
                "layer {layer} has more or fewer blocks than when the load began: load again"
            );
        }
        let tokens = state.tail.tokens;
        self.copy_tail(buffer, layer, behind * self.geometry.shape.block_tokens, tokens)?;
        self.ring.get_mut(buffer)?.tail_tokens = tokens;
        Ok(())
    }

    /// Frees a buffer after the engine has used it. A load in progress is canceled.
    pub fn done(&mut self, buffer: u32) -> Result<()> {
        let slot = self.ring.get_mut(buffer)?;
        if let State::Loading(Some(op)) = std::mem::take(&mut slot.state) {
            op.cancel();
            let _ = end(&op);
        }
        Ok(())
    }

    /// Views of K and V in a buffer that was waited for.
    pub fn views(&self, buffer: u32) -> Result<LayerViews> {
        let slot = self.ring.get(buffer)?;
        if !matches!(slot.state, State::Ready) {
            fail!(State, "buffer {buffer} is not loaded: wait for it first");
        }
        let tokens = slot.blocks.len() as u32 * self.geometry.shape.block_tokens;
        self.slot_views(buffer, 0, tokens + slot.tail_tokens)
    }

    /// K and V in a buffer that was waited for. UNSUPPORTED = the ring is in device memory.
    pub fn kv(&self, buffer: u32) -> Result<Kv<'_>> {
        let (shape, views) = (&self.geometry.shape, self.views(buffer)?);
        if self.memory.memory() == Memory::Device {
            fail!(Unsupported, "the ring is in device memory: the processor cannot read its rows");
        }
        let size = u64::from(self.geometry.dtype.bits() / 8);
        let rows = |plane: &PlaneView, dim: u32| {
            let view = View {
                place: Place::At(address_of(plane)?),
                run_bytes: u64::from(dim) * size,
                ..plane.view()
            };
            // SAFETY: rows of the buffer; nothing writes them while it is Ready, and that state
            // cannot change while `self` is borrowed.
            unsafe { Rows::new(view, self.geometry.dtype, Scales::None) }
        };
        let keys = rows(&views.k, shape.key_dim)?;
        let values = match (&views.v, shape.kind) {
            (Some(v), Kind::Split) => rows(v, shape.value_dim)?,
            _ => rows(&views.k, shape.value_dim)?,
        };
        Ok(Kv { keys, values })
    }

    /// The blocks of a buffer, ascending.
    pub fn blocks(&self, buffer: u32) -> Result<&[u32]> {
        Ok(&self.ring.get(buffer)?.blocks)
    }

    /// The rows of a buffer that hold these positions, both ascending. Positions that are not in
    /// the buffer are skipped.
    pub fn rows_of(&self, buffer: u32, positions: &[u32], rows: &mut Vec<u32>) -> Result<()> {
        let slot = self.ring.get(buffer)?;
        let block = self.geometry.shape.block_tokens;
        let tail_row = slot.blocks.len() as u32 * block;
        let mut at = 0;
        rows.clear();
        rows.try_reserve(positions.len()).map_err(|_| Status::NoMem)?;
        for &position in positions {
            let block_number = position / block;
            while slot.blocks.get(at).is_some_and(|&has| has < block_number) {
                at += 1;
            }
            if slot.blocks.get(at) == Some(&block_number) {
                rows.push(at as u32 * block + position % block);
            } else if let Some(in_tail) =
                position.checked_sub(slot.stored).filter(|&n| n < slot.tail_tokens)
            {
                rows.push(tail_row + in_tail);
            }
        }
        Ok(())
    }

    /// The candidate blocks: those with retained tokens.
    fn candidates(&self, layer: u32, which: BlockSelection<'_>) -> Result<Vec<u32>> {
        let state = self.layer(layer)?;
        let all = state.stored / self.geometry.shape.block_tokens;
        let mut blocks = Vec::new();
        match which {
            BlockSelection::All => {
                blocks.try_reserve_exact(all as usize).map_err(|_| Status::NoMem)?;
                blocks.extend(0..all);
            }
            BlockSelection::Blocks(listed) | BlockSelection::Chosen(listed) => {
                let is_last = listed.last().is_none_or(|&last| last < all);
                if !is_last || !listed.is_sorted_by(|a, b| a < b) {
                    fail!(
                        Invalid,
                        "blocks must be ascending, without repetition, and below {all}, the \
                         number of blocks of layer {layer}"
                    );
                }
                blocks = copy_of(listed)?;
            }
        }
        if state.retained.is_some() {
            self.drop_empty_blocks(layer, &mut blocks);
        }
        Ok(blocks)
    }

    /// The blocks to load, of the candidates.
    fn chosen(
        &mut self,
        layer: u32,
        query: Option<&Rows<'_>>,
        candidates: &[u32],
        context: &Context,
    ) -> Result<Vec<u32>> {
        let cap = if context.is_prefill { caps::LOAD_PREFILL } else { caps::LOAD_DECODE };
        let shape = self.geometry.shape;
        let policy = self.policies.of(context.is_prefill);
        let policy = policy.filter(|policy| policy.traits().caps & cap != 0);
        let (Some(policy), Some(query)) = (policy, query) else { return copy_of(candidates) };
        let (heads, dim) = policy.traits().query_rows(&shape);
        shape.check_rows("queries", layer, query, heads, dim)?;
        check_finite("queries", query)?;
        let mut chosen = Vec::new();
        let begun_ns = self.clock.now_ns();
        policy.select(layer, Some(query), candidates, context, &mut chosen)?;
        self.stats.select_waits.add(self.clock.now_ns().saturating_sub(begun_ns));
        // A policy may be the engine's, so its answer is checked.
        let mut rest = candidates.iter();
        if !chosen.is_sorted_by(|a, b| a < b) || !chosen.iter().all(|id| rest.any(|c| c == id)) {
            fail!(Invalid, "a policy selected blocks that are no candidates, or repeated some");
        }
        self.stats.selections += 1;
        Ok(chosen)
    }

    /// Audits a load, if its query is the layer's own.
    fn audit_load(
        &mut self,
        layer: u32,
        which: BlockSelection<'_>,
        (candidates, chosen): (&[u32], &[u32]),
        query: &Rows<'_>,
        context: &Context,
    ) {
        if self.audit_interval() == 0 {
            return;
        }
        let is_chosen = matches!(which, BlockSelection::Chosen(_));
        let traits = self.policies.of(context.is_prefill).map(|policy| policy.traits());
        if !is_chosen && traits.is_some_and(|traits| traits.ahead > 0 || traits.rows.is_some()) {
            return;
        }
        // A caller that chose blocks had all blocks as candidates.
        let all =
            if is_chosen { self.candidates(layer, BlockSelection::All) } else { Ok(Vec::new()) };
        let Ok(all) = all else { return };
        let candidates = if is_chosen { &all } else { candidates };
        let has_tail = !matches!(which, BlockSelection::Blocks(_));
        let first_query = context.first_query;
        let selection = Selection { layer, candidates, chosen, has_tail, first_query };
        self.audit_selection(&selection, query);
    }

    /// Audits a buffer that was selected by another layer's query, with the layer's own query.
    pub(super) fn audit_ahead(&mut self, buffer: u32, query: &Rows<'_>, context: &Context) {
        let traits = self.policies.of(context.is_prefill).map(|policy| policy.traits());
        let is_ahead = traits.is_some_and(|traits| traits.ahead > 0 && traits.rows.is_none());
        if !is_ahead || self.audit_interval() == 0 {
            return;
        }
        let Ok(slot) = self.ring.get_mut(buffer) else { return };
        let (layer, chosen) = (slot.layer, std::mem::take(&mut slot.blocks));
        if let Ok(candidates) = self.candidates(layer, BlockSelection::All) {
            let first_query = context.first_query;
            let (candidates, chosen) = (candidates.as_slice(), chosen.as_slice());
            let selection = Selection { layer, candidates, chosen, has_tail: true, first_query };
            self.audit_selection(&selection, query);
        }
        if let Ok(slot) = self.ring.get_mut(buffer) {
            slot.blocks = chosen;
        }
    }

    /// Begins to get blocks of a layer.
    pub(super) fn submit_get(
        &self,
        layer: u32,
        blocks: &[u32],
        views: LayerViews,
        after: Option<Event>,
    ) -> Result<OpRef> {
        let cell_range = CellRange {
            first_token: 0,
            tokens: self.layer(layer)?.stored.into(),
            first_layer: layer as usize,
            layers: 1,
            by_layer: false,
            wanted: Wanted::Chunks(copy_of(blocks)?),
            views: Arc::new(Views::from(vec![views])),
            after,
        };
        self.submit(TransferKind::Get, cell_range, &OpOpts::default())
    }

    /// Views of rows of a buffer.
    fn slot_views(&self, buffer: u32, first: u32, tokens: u32) -> Result<LayerViews> {
        let (geometry, at) = (&self.geometry, self.ring.at(buffer));
        geometry.views(&self.memory, at, geometry.slot_tokens(), (first, tokens))
    }

    /// Copies the tail behind the loaded blocks.
    fn copy_tail(&mut self, buffer: u32, layer: u32, behind: u32, tokens: u32) -> Result<()> {
        if tokens == 0 {
            return Ok(());
        }
        let from = self.tail_views(layer, 0, tokens)?;
        let to = self.slot_views(buffer, behind, tokens)?;
        let (mut copies, mut all) = (Vec::new(), 0);
        for (from, to) in [(Some(&from.k), Some(&to.k)), (from.v.as_ref(), to.v.as_ref())] {
            let (Some(from), Some(to)) = (from, to) else { continue };
            let bytes = u64::from(tokens) * from.token_stride_bytes;
            let from = (address_of(from)?, from.memory);
            copies.push(byte_copy(from, (address_of(to)?, to.memory), bytes)?);
            all += bytes;
        }
        // SAFETY: checked, disjoint parts of the offload's own memory; only this call uses the
        // rows behind the blocks of a buffer.
        unsafe { self.copier.copy_after_event(&mut copies)? };
        self.stats.tail_bytes += all;
        Ok(())
    }
}

/// A copy, if there is memory for it.
fn copy_of(list: &[u32]) -> Result<Vec<u32>> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(list.len()).map_err(|_| Status::NoMem)?;
    copy.extend_from_slice(list);
    Ok(copy)
}
