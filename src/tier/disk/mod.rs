//! The disk tier: a log of records in segments, under a hard budget.
//!
//! It keeps no state per cell. Callers keep a [`Spot`] and a seal for each cell, and decide which
//! cells live. Everything else is in the headers on disk; `docs/internals/formats.md` has the
//! format.
//!
//! Calls block while files are read and written, and may be made from any thread. Meanwhile no lock is
//! held but the one for creating a segment. A segment is written at one end only, and never after
//! the store was opened again. Records after a hole are found by a search block by block, so no
//! record waits for another one before it.

mod append;
mod batch;
mod budget;
mod checkpoint;
mod commit;
mod compact;
mod duplicates;
mod files;
mod fsck;
mod gather;
mod grow;
mod name;
mod note;
mod open;
mod read;
mod recovered;
mod scan;
mod spare;
mod spot;
mod staging;
mod state;
mod stats;
mod underway;

use crate::base::account::Account;
use crate::base::clock::Clock;
use crate::base::status::Result;
use crate::base::sync::atomic::AtomicBool;
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::format::segment::{BLOCK_BYTES, STORE_BLOCKS, StoreId};
use crate::io::files::Files;
use crate::tier::disk::budget::Paid;
use crate::tier::disk::staging::Staging;
use crate::tier::disk::state::State;

pub use crate::tier::disk::batch::{Get, GetPlane, Gets, Mark, Put, PutCell, PutPlane, Puts};
pub use crate::tier::disk::checkpoint::{Cover, Sink};
pub use crate::tier::disk::compact::{CellAt, CellIndex, Compacted};
pub use crate::tier::disk::fsck::{
    CellTotals, CheckpointFound, Damage, DamageKind, FsckOptions, NamespaceFound, Report, fsck,
};
pub use crate::tier::disk::read::ReadFeed;
pub use crate::tier::disk::recovered::{Recovered, RecoveredSession};
pub use crate::tier::disk::spot::{MAX_SEGMENT, MAX_SEGMENT_BLOCKS, Spot};
pub use crate::tier::disk::staging::{RESERVE_BYTES, StagingGuard};
pub use crate::tier::disk::stats::{OpenReport, SegmentInfo, Stats};

/// Longest segments that are created by default.
pub const MOST_USUAL_SEGMENT_BYTES: u64 = 64 << 20;
/// Shortest segments by default, unless a quarter of the budget is shorter.
const LEAST_USUAL_SEGMENT_BYTES: u64 = 8 << 20;
const SEGMENT_STEP_BYTES: u64 = 64 << 10;
/// Fewest segments that a budget must have space for: one for callers, one for compaction, one that
/// is kept back.
pub const MIN_SEGMENTS: u64 = 3;

/// Options of a tier.
#[derive(Clone)]
pub struct Options {
    /// Most bytes of all files, until [`DiskTier::set_budget`] changes it.
    pub budget_bytes: u64,
    /// Bytes of new segments, a multiple of the block; 0 = 1/1024 of the budget, from 8 MiB to
    /// [`MOST_USUAL_SEGMENT_BYTES`], and a quarter of a very small budget.
    pub segment_bytes: u64,
    /// Random bytes: the name of a new store.
    pub random: StoreId,
    /// Segments that stay open beside those in use; 0 = 32.
    pub max_open: usize,
    /// Account for staging memory: [`RESERVE_BYTES`] while the tier is open, and more while it has
    /// room.
    pub account: Option<Arc<Account>>,
    /// Clock for the duration of opening.
    pub clock: Clock,
    /// Whole cells are verified when they are read. False only for measuring the cost of
    /// verification: every store verifies.
    pub verify: bool,
}

impl Options {
    /// A budget and random bytes, with defaults for the rest.
    pub fn new(budget_bytes: u64, random: StoreId) -> Options {
        Options {
            budget_bytes,
            segment_bytes: 0,
            random,
            max_open: 0,
            account: None,
            clock: Clock::real(),
            verify: true,
        }
    }
}

/// A directory of segments.
///
/// Any number of threads may be in any of its calls at once, the same one or different ones:
/// [`append`](DiskTier::append), [`read`](DiskTier::read), [`read_plane`](DiskTier::read_plane),
/// [`planes`](DiskTier::planes), [`commit`](DiskTier::commit),
/// [`commit_all`](DiskTier::commit_all), [`forget`](DiskTier::forget),
/// [`put_session`](DiskTier::put_session), [`drop_cells`](DiskTier::drop_cells),
/// [`sweep`](DiskTier::sweep), [`compact`](DiskTier::compact), [`cover`](DiskTier::cover),
/// [`checkpoint`](DiskTier::checkpoint), [`close`](DiskTier::close), [`stats`](DiskTier::stats),
/// [`segments`](DiskTier::segments). No call waits for another one, except as stated. Concurrent
/// calls:
///
/// - Two compactions of one segment, or a compaction and a record being written to it: BUSY.
///   Compactions of different segments run side by side.
/// - Two checkpoints: BUSY.
/// - A read of a cell that is moved or dropped meanwhile succeeds if it began before the old place
///   was removed: a segment being read stays. A later read of the old place is NOT_FOUND: callers
///   look the place up again.
/// - A cell dropped while it is moved: [`CellIndex::moved`] returns false. It is called under no lock
///   of the tier, from the compacting thread.
/// - Two `put_session` of one name: the one that took its space later counts.
/// - A `forget` and an `append` of the same chunk: callers order them. The append counts if it took
///   its space later.
/// - A checkpoint and everything else: see [`DiskTier::cover`].
/// - Calls of `append` that need a segment, and find none that [`DiskTier::prepare`] has made, wait
///   for the one that creates it. `commit` waits for a sync of the same segment that is in flight.
///
/// A batch ([`Puts`], [`Gets`]) and its memory belong to one call at a time.
pub struct DiskTier {
    files: Arc<dyn Files>,
    options: Options,
    store: StoreId,
    align: u64,
    state: Mutex<State>,
    /// Signals the end of a sync or of a record in `underway`.
    changed: Condvar,
    /// Held while a segment is created.
    growth: Mutex<()>,
    /// [`DiskTier::prepare`] has something to do.
    wants_prepare: AtomicBool,
    staging: Staging,
    paid: Paid,
}

impl DiskTier {
    /// The random name of the store.
    pub fn store(&self) -> &StoreId {
        &self.store
    }

    /// Counters, and bytes in use.
    pub fn stats(&self) -> Stats {
        let state = self.state.lock();
        Stats {
            used_bytes: state.used_bytes - state.spare_bytes,
            spare_bytes: state.spare_bytes,
            budget_bytes: state.budget_bytes,
            scratch_bytes: self.staging.scratch_bytes(),
            staging_bytes: self.staging.bytes(),
            ..state.stats
        }
    }

    /// All segments, by number.
    pub fn segments(&self) -> Vec<SegmentInfo> {
        let state = self.state.lock();
        let info = |(&number, segment): (&u64, &state::Segment)| SegmentInfo {
            number,
            blocks: segment.blocks,
            live_blocks: segment.live,
            dead_blocks: segment.next.saturating_sub(1).saturating_sub(segment.live),
            age_records: state.next_record.saturating_sub(segment.newest).saturating_sub(1),
            is_front: state.is_front(number),
            has_notes: segment.forgets > 0 || segment.sessions > 0 || segment.held,
            poisoned: segment.poisoned,
            damaged: segment.damaged,
        };
        state.segments.iter().map(info).collect()
    }

    /// Drops cells, by their places and stored lengths. Nothing is written. [`DiskTier::sweep`]
    /// removes a segment once it has no cells.
    pub fn drop_cells(&self, cells: impl IntoIterator<Item = (Spot, u64)>) {
        let mut state = self.state.lock();
        for (spot, stored_bytes) in cells {
            state.drop_blocks(spot.segment(), blocks_u32(stored_bytes));
        }
    }

    /// Memory for encoding cells, page-aligned: `most` bytes, or fewer if less is free, but at
    /// least `least`. The account of the staging memory pays for it. A thread must return it before
    /// it requests more.
    pub fn scratch(&self, least: u64, most: u64) -> Result<StagingGuard<'_>> {
        self.staging.scratch(least, most)
    }

    /// Returns memory that is kept for reuse; how many bytes that was.
    pub fn trim(&self) -> u64 {
        self.staging.trim()
    }

    /// Bytes of new segments.
    pub fn segment_bytes(&self) -> u64 {
        self.options.segment_bytes
    }

    /// Blocks of new segments.
    fn segment_blocks(&self) -> u32 {
        (self.options.segment_bytes / BLOCK_BYTES as u64) as u32
    }
}

/// Default length of segments. About three are kept free or half full. Cells that are dropped
/// together are rather in one small segment, so compaction moves less. But many segments are many
/// files, and a record must fit into one.
pub fn usual_segment_bytes(budget_bytes: u64) -> u64 {
    let part = (budget_bytes / 1024).clamp(LEAST_USUAL_SEGMENT_BYTES, MOST_USUAL_SEGMENT_BYTES);
    let bytes = part.min(budget_bytes / 4);
    (bytes - bytes % SEGMENT_STEP_BYTES).max(SEGMENT_STEP_BYTES)
}

/// Most bytes of a record of several cells, in segments of that length. At the end of a segment
/// half a record is left empty on average, and each record has a header: this length minimizes both
/// together.
pub fn usual_record_bytes(segment_bytes: u64) -> u64 {
    (segment_bytes / 64).clamp(256 << 10, 1 << 20).min(segment_bytes / 4)
}

/// The smallest possible budget.
fn least_bytes(options: &Options) -> u64 {
    least_bytes_for(options.segment_bytes)
}

/// The same for segments of that length.
pub fn least_bytes_for(segment_bytes: u64) -> u64 {
    let store = (STORE_BLOCKS * BLOCK_BYTES) as u64;
    segment_bytes.saturating_mul(MIN_SEGMENTS).saturating_add(store)
}

/// Blocks in a segment that `bytes` bytes take.
fn blocks_u32(bytes: u64) -> u32 {
    u32::try_from(crate::format::record::blocks_of(bytes)).unwrap_or(u32::MAX)
}

fn offset_of(block: u32) -> u64 {
    u64::from(block) * BLOCK_BYTES as u64
}
