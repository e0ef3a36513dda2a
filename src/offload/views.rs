//! Views of the engine's tensors of one layer, and their division into blocks.

use crate::attention::{Rows, Scales};
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::device::Memory;
use crate::fail;
use crate::offload::memory::OwnedMemory;
use crate::offload::opts::Geometry;
use crate::store::state::session::{LayerViews, PlaneView, Tokens};

/// K and V of some tokens of a layer.
pub(super) struct PutSource {
    pub views: LayerViews,
    /// The keys in host memory, if they were copied there.
    pub keys: Option<PlaneView>,
}

impl PutSource {
    /// Checks the engine's views. Heads in one run are separated.
    pub fn new(
        geometry: &Geometry,
        view: &LayerViews,
        tokens: u32,
        reaches_device: bool,
    ) -> Result<PutSource> {
        let on_device = |plane: &PlaneView| plane.memory == Memory::Device;
        if !reaches_device && (on_device(&view.k) || view.v.as_ref().is_some_and(on_device)) {
            fail!(
                Unavailable,
                "K or V is in device memory, and the store was opened without a device that \
                 reaches it: open it with one"
            );
        }
        let heads = geometry.shape.key_heads;
        let k = plane_of("K", &view.k, heads, geometry.k_bytes, tokens)?;
        let v = match (&view.v, geometry.v_bytes) {
            (Some(v), bytes) if bytes > 0 => Some(plane_of("V", v, heads, bytes, tokens)?),
            (None, 0) => None,
            (Some(_), _) => {
                fail!(Invalid, "V is a part of K in this shape, so no view of V is accepted")
            }
            (None, _) => fail!(Invalid, "the view of V is missing"),
        };
        Ok(PutSource { views: LayerViews { k, v }, keys: None })
    }

    /// Whether blocks of this size begin at page boundaries.
    pub fn has_blocks_of(&self, block: u32) -> bool {
        let begin = |plane: &PlaneView| match plane.place {
            Tokens::At(_) => true,
            Tokens::Pages { page_tokens, .. } => page_tokens > 0 && block % page_tokens == 0,
        };
        begin(&self.views.k) && self.views.v.as_ref().is_none_or(begin)
    }

    /// The keys of some tokens in host memory; none if they are elsewhere, or begin within a page.
    pub fn keys_of(&self, first: u32, tokens: u32) -> Option<PlaneView> {
        let is_here = self.views.k.memory == Memory::Host;
        let keys = self.keys.as_ref().or(is_here.then_some(&self.views.k));
        part_of(keys?, first, tokens)
    }

    /// The views of some tokens; none if they begin within a page.
    pub fn part(&self, first: u32, tokens: u32) -> Option<LayerViews> {
        let v = match &self.views.v {
            Some(v) => Some(part_of(v, first, tokens)?),
            None => None,
        };
        Some(LayerViews { k: part_of(&self.views.k, first, tokens)?, v })
    }
}

/// Rows of a plane.
///
/// # Safety
/// The memory of the view is readable, and nothing writes it while the rows live.
pub(super) unsafe fn rows_of<'a>(geometry: &Geometry, plane: &'a PlaneView) -> Result<Rows<'a>> {
    // SAFETY: the caller's promise.
    unsafe { Rows::new(plane.view(), geometry.dtype, Scales::None) }
}

fn plane_of(
    name: &str,
    view: &PlaneView,
    heads: u32,
    token_bytes: u64,
    tokens: u32,
) -> Result<PlaneView> {
    if view.tokens < tokens {
        fail!(Invalid, "{name}: the view has {} tokens, and {tokens} are put", view.tokens);
    }
    let run_bytes = token_bytes / u64::from(heads);
    let mut plane = PlaneView { tokens, ..view.clone() };
    if plane.heads == 1 && plane.run_bytes == token_bytes {
        (plane.heads, plane.run_bytes, plane.head_stride_bytes) = (heads, run_bytes, run_bytes);
    }
    if plane.heads != heads || plane.run_bytes != run_bytes {
        fail!(
            Invalid,
            "{name}: {} heads of {} bytes, and the shape has {heads} of {run_bytes}",
            plane.heads,
            plane.run_bytes
        );
    }
    Ok(plane)
}

/// Some tokens of a plane; none if they begin within a page.
pub(super) fn part_of(plane: &PlaneView, first: u32, tokens: u32) -> Option<PlaneView> {
    let place = match &plane.place {
        Tokens::At(address) => {
            let shift = u64::from(first).checked_mul(plane.token_stride_bytes)?;
            Tokens::At(address.checked_add(shift)?)
        }
        &Tokens::Pages { ref addresses, page_tokens, shift_bytes } => {
            if page_tokens == 0 || first % page_tokens != 0 {
                return None;
            }
            let from = (first / page_tokens) as usize;
            let pages = addresses.get(from..from + tokens.div_ceil(page_tokens) as usize)?;
            Tokens::Pages { addresses: Arc::new(pages.to_vec()), page_tokens, shift_bytes }
        }
    };
    Some(PlaneView { place, tokens, ..plane.clone() })
}

/// A contiguous plane in canonical order.
pub(super) fn canonical(
    (address, memory): (u64, Memory),
    tokens: u32,
    heads: u32,
    token_bytes: u64,
) -> PlaneView {
    let run_bytes = token_bytes / u64::from(heads);
    PlaneView {
        place: Tokens::At(address),
        tokens,
        heads,
        run_bytes,
        token_stride_bytes: token_bytes,
        head_stride_bytes: run_bytes,
        memory,
    }
}

impl Geometry {
    /// Views of rows of K and V in the offload's memory, at an offset with room for `all` rows.
    pub(super) fn views(
        &self,
        memory: &OwnedMemory,
        at: u64,
        all: u32,
        (first, tokens): (u32, u32),
    ) -> Result<LayerViews> {
        let heads = self.shape.key_heads;
        let plane = |at: u64, token_bytes: u64| -> Result<PlaneView> {
            let bytes = u64::from(tokens) * token_bytes;
            let address = memory.range(at + u64::from(first) * token_bytes, bytes)?;
            Ok(canonical((address, memory.memory()), tokens, heads, token_bytes))
        };
        let v = match self.v_bytes {
            0 => None,
            bytes => Some(plane(at + self.v_at(all), bytes)?),
        };
        Ok(LayerViews { k: plane(at, self.k_bytes)?, v })
    }

    /// Views of rows of a tail.
    pub(super) fn tail_views(
        &self,
        memory: &OwnedMemory,
        at: u64,
        rows: (u32, u32),
    ) -> Result<LayerViews> {
        self.views(memory, at, self.shape.block_tokens, rows)
    }
}
