//! The last tokens of a layer, which fill no block yet. They stay beside the ring, and lie
//! behind the blocks of each load.

use crate::base::op::OpRef;

/// A layer's tail. Its rows are in the offload's memory, K and then V.
#[derive(Default)]
pub(super) struct Tail {
    /// Tokens in it; a full one is on its way into the store.
    pub tokens: u32,
    /// The put that it leaves by. Until it has ended its rows are what counts.
    pub leaving: Option<OpRef>,
}
