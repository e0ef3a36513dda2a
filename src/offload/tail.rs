//! The last tokens of a layer, which fill no block yet. They stay beside the ring, and lie
//! behind the blocks of each load.

use crate::base::op::OpRef;

/// A layer's tail. Its rows are in the offload's memory, K and then V. There is room for two:
/// a cut brings what becomes the tail beside the one that still counts.
#[derive(Default)]
pub(super) struct Tail {
    /// It is in the second of the two.
    pub is_second: bool,
    /// Tokens in it; a full one is on its way into the store.
    pub tokens: u32,
    /// The put that it leaves by. Until it has ended its rows are what counts.
    pub leaving: Option<OpRef>,
}
