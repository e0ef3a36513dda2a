//! The log of ended transfers, for tracing: a ring that begins with the first reader and costs nothing
//! before.

use crate::base::status::Result;
use crate::base::zeroed::Zeroable;
use crate::store::events::Ring;

/// Transfers that are kept for readers.
pub const TRANSFERS_KEPT: usize = 1 << 14;

/// A transfer that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndedTransfer {
    /// Number; consecutive from 0, since the log began.
    pub number: u64,
    /// When it began: at its submission, or at the engine's ready event.
    pub began_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
    /// Serial number of its session; 0 = it has none.
    pub session: u64,
    /// Leading tokens that arrived without a gap.
    pub tokens: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Tenant.
    pub tenant: u32,
    /// A [`TransferKind`](crate::store::state::transfer::TransferKind).
    pub kind: u8,
    /// A [`Level`](crate::store::state::transfer::Level).
    pub level: u8,
    /// 1 = it moved nothing and waited for a remote lookup.
    pub is_lookup: u8,
    /// 1 = some of its cells were on disk only.
    pub read_disk: u8,
    /// Requested chunks.
    pub chunks: u32,
    /// Requested layers.
    pub layers: u32,
    /// Cells that were in no tier.
    pub missed_cells: u32,
    /// A [`Status`](crate::base::status::Status).
    pub status: i32,
}

// SAFETY: integers only, none of which has a forbidden value.
unsafe impl Zeroable for EndedTransfer {}

/// The log.
pub struct TransferLog {
    /// Differs between openings of a store.
    pub run: u64,
    /// The newest entries.
    pub ring: Ring<EndedTransfer>,
}

impl TransferLog {
    /// An empty log.
    pub fn new(run: u64) -> Result<TransferLog> {
        Ok(TransferLog { run, ring: Ring::of(TRANSFERS_KEPT)? })
    }
}
