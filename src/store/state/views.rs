//! The engine's tensors of a transfer: planes of host or device memory.

use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::device::{Direction, Memory};
use crate::fail;
use crate::meta::layout::{Layout, Rule};
use crate::meta::view::{Place, Side, View};

/// Addresses of a plane's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// Contiguous from this address on.
    At(u64),
    /// In pages.
    Pages {
        /// Address of each page. One table serves K, V and all layers.
        addresses: Arc<Vec<u64>>,
        /// Tokens of a page.
        page_tokens: u32,
        /// Offset added to each address.
        shift_bytes: i64,
    },
}

/// One plane of one layer in the engine's memory; see [`View`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneView {
    /// Addresses.
    pub place: Tokens,
    /// Tokens; for a state, the number of states.
    pub tokens: u32,
    /// Heads of a token.
    pub heads: u32,
    /// Bytes of one head of a token.
    pub run_bytes: u64,
    /// Bytes from a token to the next.
    pub token_stride_bytes: u64,
    /// Bytes from a head to the next.
    pub head_stride_bytes: u64,
    /// Kind of memory.
    pub memory: Memory,
}

impl PlaneView {
    /// A plane of host memory in canonical order.
    pub fn canonical(address: u64, tokens: u32, token_bytes: u64) -> PlaneView {
        PlaneView {
            place: Tokens::At(address),
            tokens,
            heads: 1,
            run_bytes: token_bytes,
            token_stride_bytes: token_bytes,
            head_stride_bytes: token_bytes,
            memory: Memory::Host,
        }
    }

    /// The view that copies use.
    pub fn view(&self) -> View<'_> {
        View {
            place: match &self.place {
                Tokens::At(address) => Place::At(*address),
                Tokens::Pages { addresses, page_tokens, shift_bytes } => {
                    Place::Pages { addresses, page_tokens: *page_tokens, shift_bytes: *shift_bytes }
                }
            },
            tokens: self.tokens,
            heads: self.heads,
            run_bytes: self.run_bytes,
            token_stride_bytes: self.token_stride_bytes,
            head_stride_bytes: self.head_stride_bytes,
        }
    }
}

/// The planes of one layer: K (or the latent, or the states), and V.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerViews {
    /// K.
    pub k: PlaneView,
    /// V, if the layout has it.
    pub v: Option<PlaneView>,
}

/// The planes of all layers of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Views(pub Vec<LayerViews>);

impl Views {
    /// Name and layer of the first plane that only a device can reach.
    pub fn on_device(&self) -> Option<(&'static str, usize)> {
        let is_there = |plane: &PlaneView| plane.memory == Memory::Device;
        self.0.iter().enumerate().find_map(|(at, layer)| match &layer.v {
            _ if is_there(&layer.k) => Some(("K", at)),
            Some(v) if is_there(v) => Some(("V", at)),
            _ => None,
        })
    }

    /// Checks them against the layout, for a transfer of `tokens` tokens in `chunks` chunks.
    pub fn check(
        &self,
        layout: &Layout,
        first_layer: usize,
        tokens: u32,
        chunks: u32,
        direction: Direction,
    ) -> Result<()> {
        let side = if direction == Direction::Gather { Side::Source } else { Side::Target };
        for (i, layer) in self.0.iter().enumerate() {
            let at = first_layer + i;
            let Some(group) = layout.group(at) else {
                fail!(Invalid, "there is no layer {at}: the layout has {}", layout.layers());
            };
            let is_state = group.rule == Rule::State;
            let (count, k_bytes) =
                if is_state { (chunks, group.state_bytes) } else { (tokens, group.k_bytes) };
            check_plane(&layer.k, "K", at, count, k_bytes, side)?;
            let has_v = !is_state && group.v_bytes > 0;
            match &layer.v {
                Some(v) if has_v => check_plane(v, "V", at, count, group.v_bytes, side)?,
                None if !has_v => {}
                Some(_) => fail!(Invalid, "layer {at} has no V in its layout, and a view of it"),
                None => fail!(Invalid, "layer {at}: the view of V is missing"),
            }
        }
        Ok(())
    }
}

fn check_plane(
    plane: &PlaneView,
    name: &str,
    layer: usize,
    tokens: u32,
    token_bytes: u64,
    side: Side,
) -> Result<()> {
    let view = plane.view();
    if view.token_bytes() != token_bytes {
        fail!(
            Invalid,
            "{name} of layer {layer}: heads x bytes of a head are {}, the layout says {token_bytes}",
            view.token_bytes()
        );
    }
    view.span(0, tokens, side)
        .map(|_| ())
        .map_err(|e| e.within(&format!("{name} of layer {layer}")))
}
