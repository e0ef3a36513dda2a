//! Blocks of a layer come into a buffer of the ring, the tail behind them.

use crate::attention::{Rows, Scales, check_finite};
use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::{Event, Memory};
use crate::fail;
use crate::meta::view::{Place, View};
use crate::offload::audit::Selection;
use crate::offload::carry::{address_of, bytes_to};
use crate::offload::ring::State;
use crate::offload::{Offload, end};
use crate::sparse::{Context, Kind, caps};
use crate::store::state::session::{LayerViews, PlaneView, Views};
use crate::store::state::{CellRange, TransferKind, Wanted};

/// Which blocks are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which<'a> {
    /// All that a policy does not leave out, and the tail.
    All,
    /// Of these, ascending, those that a policy does not leave out; no tail.
    Blocks(&'a [u32]),
    /// These, ascending, which somebody else has chosen, and the tail. A query serves audits
    /// alone.
    Chosen(&'a [u32]),
}

/// What a load brings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Tokens: of blocks, and of the tail behind them.
    pub tokens: u32,
    /// Of them those of the tail.
    pub tail_tokens: u32,
    /// Blocks.
    pub blocks: u32,
}

/// K and V of a buffer, row by row.
#[derive(Clone, Copy, Debug)]
pub struct Kv<'a> {
    /// Keys.
    pub keys: Rows<'a>,
    /// Values.
    pub values: Rows<'a>,
}

impl Offload {
    /// Begins to load blocks of a layer into a buffer, which must be free; how many. Where the
    /// policy selects blocks and a query is given, it is asked; otherwise all of them come.
    /// LIMIT = the buffer is too short for them. [`Offload::wait`] waits for the end.
    pub fn load(
        &mut self,
        buffer: u32,
        layer: u32,
        which: Which<'_>,
        query: Option<&Rows<'_>>,
        context: &Context,
    ) -> Result<u32> {
        if !matches!(self.ring.get(buffer)?.state, State::Free) {
            fail!(Busy, "buffer {buffer} is in use");
        }
        let candidates = self.candidates(layer, which)?;
        let is_chosen = matches!(which, Which::Chosen(_));
        if let Some(query) = query.filter(|_| is_chosen) {
            self.geometry.shape.check_queries(layer, query)?;
            check_finite("queries", query)?;
        }
        let asked = query.filter(|_| !is_chosen);
        let blocks = self.chosen(layer, asked, &candidates, context)?;
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
                Some(self.submit_get(layer, &blocks, views, self.carrier.open())?)
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
        (slot.has_tail, slot.tail_tokens) = (!matches!(which, Which::Blocks(_)), 0);
        Ok(count)
    }

    /// Waits until what is loaded into a buffer is there, and puts the tail behind it, as it
    /// is now. After an error it is free again: NOT_FOUND = a block is not in the store any
    /// more; STATE = the tail has become a block since, so that one is missing.
    pub fn wait(&mut self, buffer: u32) -> Result<Loaded> {
        let slot = self.ring.get_mut(buffer)?;
        match std::mem::take(&mut slot.state) {
            State::Free => fail!(State, "nothing is loaded into buffer {buffer}"),
            State::Ready => {}
            State::Loading(op) => self.arrive(buffer, op)?,
        }
        self.ring.get_mut(buffer)?.state = State::Ready;
        let slot = self.ring.get(buffer)?;
        let (tail_tokens, blocks) = (slot.tail_tokens, slot.blocks.len() as u32);
        let tokens = blocks * self.geometry.shape.block_tokens + tail_tokens;
        Ok(Loaded { tokens, tail_tokens, blocks })
    }

    /// What was loaded is there, the tail too.
    fn arrive(&mut self, buffer: u32, op: Option<OpRef>) -> Result<()> {
        let begun_ns = self.clock.now_ns();
        let came = op.map_or(Ok(0), |op| end(&op));
        self.stats.load_waits.add(self.clock.now_ns().saturating_sub(begun_ns));
        if let Err(error) = came {
            self.stats.failed_loads += 1;
            return Err(error);
        }
        let slot = self.ring.get(buffer)?;
        if !slot.has_tail {
            return Ok(());
        }
        let (layer, behind) = (slot.layer, slot.blocks.len() as u32);
        let one = self.layer(layer)?;
        if one.stored != slot.stored {
            fail!(State, "layer {layer} has other blocks than when they were asked for");
        }
        let tokens = one.tail.tokens;
        self.copy_tail(buffer, layer, behind * self.geometry.shape.block_tokens, tokens)?;
        self.ring.get_mut(buffer)?.tail_tokens = tokens;
        Ok(())
    }

    /// The engine has computed with a buffer: it is free. One whose load is under way is
    /// given up.
    pub fn done(&mut self, buffer: u32) -> Result<()> {
        let slot = self.ring.get_mut(buffer)?;
        if let State::Loading(Some(op)) = std::mem::take(&mut slot.state) {
            op.cancel();
            let _ = end(&op);
        }
        Ok(())
    }

    /// Where K and V of a buffer are that has been waited for, row by row.
    pub fn places(&self, buffer: u32) -> Result<LayerViews> {
        let slot = self.ring.get(buffer)?;
        if !matches!(slot.state, State::Ready) {
            fail!(State, "buffer {buffer} is not there: wait for it first");
        }
        let tokens = slot.blocks.len() as u32 * self.geometry.shape.block_tokens;
        self.slot_views(buffer, 0, tokens + slot.tail_tokens)
    }

    /// K and V of a buffer that has been waited for. UNSUPPORTED = in device memory.
    pub fn kv(&self, buffer: u32) -> Result<Kv<'_>> {
        let (shape, views) = (&self.geometry.shape, self.places(buffer)?);
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
            // SAFETY: the buffer's own rows; nobody writes them while it is Ready, and that
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

    /// Which rows of a buffer have these tokens, both ascending. Tokens that are not in it are
    /// left out.
    pub fn rows_of(&self, buffer: u32, positions: &[u32], rows: &mut Vec<u32>) -> Result<()> {
        let slot = self.ring.get(buffer)?;
        let block = self.geometry.shape.block_tokens;
        let tail_row = slot.blocks.len() as u32 * block;
        let mut at = 0;
        rows.clear();
        rows.try_reserve(positions.len()).map_err(|_| Status::NoMem)?;
        for &position in positions {
            let wanted = position / block;
            while slot.blocks.get(at).is_some_and(|&has| has < wanted) {
                at += 1;
            }
            if slot.blocks.get(at) == Some(&wanted) {
                rows.push(at as u32 * block + position % block);
            } else if let Some(in_tail) =
                position.checked_sub(slot.stored).filter(|&n| n < slot.tail_tokens)
            {
                rows.push(tail_row + in_tail);
            }
        }
        Ok(())
    }

    /// The blocks that may be wanted: those of which something was kept.
    fn candidates(&self, layer: u32, which: Which<'_>) -> Result<Vec<u32>> {
        let one = self.layer(layer)?;
        let all = one.stored / self.geometry.shape.block_tokens;
        let mut blocks = Vec::new();
        match which {
            Which::All => {
                blocks.try_reserve_exact(all as usize).map_err(|_| Status::NoMem)?;
                blocks.extend(0..all);
            }
            Which::Blocks(given) | Which::Chosen(given) => {
                let is_last = given.last().is_none_or(|&last| last < all);
                if !is_last || !given.is_sorted_by(|a, b| a < b) {
                    fail!(Invalid, "blocks ascend, each once, below the {all} of layer {layer}");
                }
                blocks = copy_of(given)?;
            }
        }
        if one.kept.is_some() {
            self.drop_emptied(layer, &mut blocks);
        }
        Ok(blocks)
    }

    /// What is loaded of the candidates.
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
        // A policy may be anybody's.
        let mut rest = candidates.iter();
        if !chosen.is_sorted_by(|a, b| a < b) || !chosen.iter().all(|id| rest.any(|c| c == id)) {
            fail!(Invalid, "a policy has selected blocks that are no candidates, or twice");
        }
        self.stats.selections += 1;
        Ok(chosen)
    }

    /// Audits what a load brings, if its query is the layer's own.
    fn audit_load(
        &mut self,
        layer: u32,
        which: Which<'_>,
        (candidates, chosen): (&[u32], &[u32]),
        query: &Rows<'_>,
        context: &Context,
    ) {
        if self.audited_every() == 0 {
            return;
        }
        let is_chosen = matches!(which, Which::Chosen(_));
        let traits = self.policies.of(context.is_prefill).map(|policy| policy.traits());
        if !is_chosen && traits.is_some_and(|traits| traits.ahead > 0 || traits.rows.is_some()) {
            return;
        }
        // Whoever has chosen had all blocks to choose from.
        let all = if is_chosen { self.candidates(layer, Which::All) } else { Ok(Vec::new()) };
        let Ok(all) = all else { return };
        let candidates = if is_chosen { &all } else { candidates };
        let has_tail = !matches!(which, Which::Blocks(_));
        let first_query = context.first_query;
        let what = Selection { layer, candidates, chosen, has_tail, first_query };
        self.audit_selection(&what, query);
    }

    /// Audits what a buffer has of a layer, which was selected by another layer's query, by
    /// the layer's own.
    pub(super) fn audit_ahead(&mut self, buffer: u32, query: &Rows<'_>, context: &Context) {
        let traits = self.policies.of(context.is_prefill).map(|policy| policy.traits());
        let is_ahead = traits.is_some_and(|traits| traits.ahead > 0 && traits.rows.is_none());
        if !is_ahead || self.audited_every() == 0 {
            return;
        }
        let Ok(slot) = self.ring.get_mut(buffer) else { return };
        let (layer, chosen) = (slot.layer, std::mem::take(&mut slot.blocks));
        if let Ok(candidates) = self.candidates(layer, Which::All) {
            let first_query = context.first_query;
            let (candidates, chosen) = (candidates.as_slice(), chosen.as_slice());
            let what = Selection { layer, candidates, chosen, has_tail: true, first_query };
            self.audit_selection(&what, query);
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
            views: Arc::new(Views(vec![views])),
            after,
        };
        self.submit(TransferKind::Get, cell_range, &OpOpts::default())
    }

    /// Rows of a buffer.
    fn slot_views(&self, buffer: u32, first: u32, tokens: u32) -> Result<LayerViews> {
        let (geometry, at) = (&self.geometry, self.ring.at(buffer));
        geometry.views(&self.memory, at, geometry.slot_tokens(), (first, tokens))
    }

    /// The tail lies behind what is loaded.
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
            copies.push(bytes_to(from, (address_of(to)?, to.memory), bytes)?);
            all += bytes;
        }
        // SAFETY: both are checked parts of the offload's own memory, apart from each other;
        // the rows behind the blocks of a buffer are nobody's but this call's.
        unsafe { self.carrier.carry_behind(&mut copies)? };
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
