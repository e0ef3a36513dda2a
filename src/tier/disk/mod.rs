//! The disk tier: a log of records in segments, under a hard budget.
//!
//! It keeps nothing per cell: callers keep a [`Spot`] and a seal for each, and
//! say which cells live. Everything else is in the headers on disk. What the bytes
//! are stands in `docs/store.md`.
//!
//! Calls block while files are read and written, and may come from any thread;
//! no lock is held meanwhile but that of making a segment. A segment is written
//! at one end only and never after the store was opened again: what follows a
//! hole in it is found by looking for it block by block, so nobody waits for
//! records that others write before theirs.

mod append;
mod batch;
mod budget;
mod checkpoint;
mod clean;
mod commit;
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
mod spot;
mod staging;
mod state;
mod stats;
mod twice;
mod underway;

use crate::base::account::Account;
use crate::base::clock::Clock;
use crate::base::status::Result;
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::format::segment::{BLOCK_BYTES, STORE_BLOCKS, StoreId};
use crate::io::files::Files;
use crate::tier::disk::budget::Paid;
use crate::tier::disk::staging::Staging;
use crate::tier::disk::state::State;

pub use crate::tier::disk::batch::{Get, GetPlane, Gets, Mark, Put, PutCell, PutPlane, Puts};
pub use crate::tier::disk::checkpoint::{Cover, Sink};
pub use crate::tier::disk::clean::{CellAt, Cleaned, Keeper};
pub use crate::tier::disk::fsck::{
    CheckpointFound, Damage, FsckOptions, NamespaceFound, Report, Tally, What, fsck,
};
pub use crate::tier::disk::recovered::{Recovered, RecoveredSession};
pub use crate::tier::disk::spot::{MAX_SEGMENT, MAX_SEGMENT_BLOCKS, Spot};
pub use crate::tier::disk::staging::{Lent, RESERVE_BYTES};
pub use crate::tier::disk::stats::{OpenReport, SegmentInfo, Stats};

/// Longest segments that are made where nothing is said of them.
pub const MOST_USUAL_SEGMENT_BYTES: u64 = 64 << 20;
/// The shortest, where a quarter of the budget is not shorter.
const LEAST_USUAL_SEGMENT_BYTES: u64 = 8 << 20;
const SEGMENT_STEP_BYTES: u64 = 64 << 10;
/// Fewest segments that a budget must have room for: one that callers write, one
/// that cleaning writes, one that is kept back.
pub const MIN_SEGMENTS: u64 = 3;

/// How a tier is opened.
#[derive(Clone)]
pub struct Options {
    /// Most bytes of all files together, until [`DiskTier::set_budget`] says otherwise.
    pub budget_bytes: u64,
    /// Bytes of new segments, a multiple of the block; 0 = as the budget says: one part in 1,024 of
    /// it, from 8 MiB to [`MOST_USUAL_SEGMENT_BYTES`], and a quarter of a very small one.
    pub segment_bytes: u64,
    /// Random bytes: the name of the store if it must be made.
    pub random: StoreId,
    /// Segments that stay open, beside those that are in use at the moment; 0 = 32.
    pub max_open: usize,
    /// Who pays for staging memory: [`RESERVE_BYTES`] as long as the tier is open, and
    /// more while there is room.
    pub account: Option<Arc<Account>>,
    /// What opening is timed by.
    pub clock: Clock,
    /// Whole cells that are read are checked. Not doing so is for measurements alone, of
    /// what checking costs: no store does without.
    pub verify: bool,
}

impl Options {
    /// A budget and some random bytes; all else as it is by default.
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
/// Any number of threads may be in any of its calls at once, the same one or
/// different ones: [`append`](DiskTier::append), [`read`](DiskTier::read),
/// [`read_plane`](DiskTier::read_plane), [`planes`](DiskTier::planes),
/// [`commit`](DiskTier::commit), [`commit_all`](DiskTier::commit_all),
/// [`forget`](DiskTier::forget), [`put_session`](DiskTier::put_session),
/// [`drop_cells`](DiskTier::drop_cells), [`sweep`](DiskTier::sweep),
/// [`clean`](DiskTier::clean), [`cover`](DiskTier::cover),
/// [`checkpoint`](DiskTier::checkpoint), [`close`](DiskTier::close),
/// [`stats`](DiskTier::stats), [`segments`](DiskTier::segments). None waits for
/// another but where it says so; what meets:
///
/// - Two cleanings of one segment, or a cleaning and a record that is being written
///   to it: BUSY. Two of different segments go on side by side.
/// - Two checkpoints: BUSY.
/// - A read of a cell that is moved or dropped meanwhile is right as long as it has
///   begun before the old place goes: a segment that is read stays. One that begins
///   later with the old place is NOT_FOUND: callers look the place up again.
/// - A cell that is dropped while it is moved: [`Keeper::moved`] answers false. It is
///   called under no lock of the tier, from the thread that cleans.
/// - Two `put_session` of one name: the one that took its room later counts.
/// - A `forget` and an `append` of the same chunk: callers order them. The append
///   counts if it took its room later.
/// - A checkpoint and everything else: see [`DiskTier::cover`].
/// - Calls of `append` that need a segment wait for the one that makes it. `commit`
///   waits for a sync of the same segment that is under way.
///
/// A batch ([`Puts`], [`Gets`]) and its memory belong to one call at a time.
pub struct DiskTier {
    files: Arc<dyn Files>,
    options: Options,
    store: StoreId,
    align: u64,
    state: Mutex<State>,
    /// A sync ended, or something of `underway`.
    changed: Condvar,
    /// Held while a segment is made: one at a time.
    growth: Mutex<()>,
    staging: Staging,
    paid: Paid,
}

impl DiskTier {
    /// The random name of the store.
    pub fn store(&self) -> &StoreId {
        &self.store
    }

    /// Counters, and what is used.
    pub fn stats(&self) -> Stats {
        let state = self.state.lock();
        Stats {
            used_bytes: state.used_bytes,
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

    /// Says that cells are no longer wanted: their places, and the bytes that were
    /// stored. Nothing is written; when no cell of a segment is left,
    /// [`DiskTier::sweep`] removes it.
    pub fn drop_cells(&self, cells: impl IntoIterator<Item = (Spot, u64)>) {
        let mut state = self.state.lock();
        for (spot, stored_bytes) in cells {
            state.drop_blocks(spot.segment(), blocks_u32(stored_bytes));
        }
    }

    /// Memory in which cells are coded, aligned to pages: `most` bytes, or fewer where
    /// there is not so much, but `least`. Who pays for the tier's own staging memory pays
    /// for it. Whoever has some asks for no more before that went back.
    pub fn scratch(&self, least: u64, most: u64) -> Result<Lent<'_>> {
        self.staging.scratch(least, most)
    }

    /// Gives back memory that is kept for later; how much that was.
    pub fn trim(&self) -> u64 {
        self.staging.trim()
    }

    /// Bytes of segments that are made from now on.
    pub fn segment_bytes(&self) -> u64 {
        self.options.segment_bytes
    }

    /// Blocks of segments that are made from now on.
    fn segment_blocks(&self) -> u32 {
        (self.options.segment_bytes / BLOCK_BYTES as u64) as u32
    }
}

/// Bytes of segments where nothing is said of them. About three are kept free or half full, and
/// what is dropped together lies together rather in a small one: cleaning moves less. But many
/// segments are many files; a record has to fit into one.
pub fn usual_segment_bytes(budget_bytes: u64) -> u64 {
    let part = (budget_bytes / 1024).clamp(LEAST_USUAL_SEGMENT_BYTES, MOST_USUAL_SEGMENT_BYTES);
    let bytes = part.min(budget_bytes / 4);
    (bytes - bytes % SEGMENT_STEP_BYTES).max(SEGMENT_STEP_BYTES)
}

/// Bytes that a record of several cells has at most in segments of so many. Where a segment ends
/// half a record is left empty, as a rule, and each has a header: as many as make both together
/// least.
pub fn usual_record_bytes(segment_bytes: u64) -> u64 {
    (segment_bytes / 64).clamp(256 << 10, 1 << 20).min(segment_bytes / 4)
}

/// The least that a budget can be.
fn least_bytes(options: &Options) -> u64 {
    least_bytes_for(options.segment_bytes)
}

/// The same with segments of so many bytes.
pub fn least_bytes_for(segment_bytes: u64) -> u64 {
    let store = (STORE_BLOCKS * BLOCK_BYTES) as u64;
    segment_bytes.saturating_mul(MIN_SEGMENTS).saturating_add(store)
}

/// Blocks that some bytes take, in a segment.
fn blocks_u32(bytes: u64) -> u32 {
    u32::try_from(crate::format::record::blocks_of(bytes)).unwrap_or(u32::MAX)
}

fn offset_of(block: u32) -> u64 {
    u64::from(block) * BLOCK_BYTES as u64
}
