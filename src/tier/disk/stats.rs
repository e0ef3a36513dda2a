//! What the tier counts.

/// Counters since the tier was opened, and what it holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of cells that callers appended, padded to blocks.
    pub appended_bytes: u64,
    /// Bytes of cells that cleaning wrote again.
    pub cleaned_bytes: u64,
    /// Bytes of headers, of records without cells, and of checkpoints.
    pub overhead_bytes: u64,
    /// Records written.
    pub records: u64,
    /// Records that could not be written.
    pub failed_records: u64,
    /// Bytes of cells that were read.
    pub read_bytes: u64,
    /// Cells that were asked for.
    pub reads: u64,
    /// Cells whose bytes were not what was expected.
    pub corrupt: u64,
    /// Cells that could not be read.
    pub failed_reads: u64,
    /// Syncs of segments.
    pub syncs: u64,
    /// Syncs that failed; each poisons its segment.
    pub failed_syncs: u64,
    /// Segments made and removed.
    pub segments_made: u64,
    /// Segments removed.
    pub segments_removed: u64,
    /// Segments that were cleaned.
    pub cleanings: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Requests for room that the budget or the disk refused.
    pub refused: u64,
    /// Bytes of the budget that are used.
    pub used_bytes: u64,
    /// The most that were used at any moment.
    pub most_used_bytes: u64,
    /// The budget.
    pub budget_bytes: u64,
    /// Memory in which cells are coded and moved, now, its reserve included.
    pub scratch_bytes: u64,
    /// The same, and the memory of headers and of what is not aligned.
    pub staging_bytes: u64,
}

/// One segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its number.
    pub number: u64,
    /// Its blocks, the header included.
    pub blocks: u32,
    /// Blocks of cells that live.
    pub live_blocks: u32,
    /// Blocks that removing or cleaning it would free: all that was written and
    /// is no living cell.
    pub dead_blocks: u32,
    /// Records that were written, anywhere, since its newest one.
    pub age_records: u64,
    /// It is being written to.
    pub is_front: bool,
    /// It has records that are no cells and must be moved before it can go.
    pub has_notes: bool,
    /// A sync of it failed: what was not durable then never will be.
    pub poisoned: bool,
    /// Places that should have been records and were not.
    pub damaged: u32,
}

/// What opening found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenReport {
    /// The directory had no store: one was made.
    pub is_new: bool,
    /// Copies of the store's name that were not sound: they were written anew.
    pub damaged_names: u32,
    /// The checkpoint that was used; 0 = none.
    pub checkpoint: u64,
    /// Checkpoints that were not sound.
    pub unsound_checkpoints: u32,
    /// Segments of the store.
    pub segments: u32,
    /// Segments that are not this store's; they are left alone.
    pub foreign_segments: u32,
    /// Segments whose first block was not sound.
    pub damaged_segments: u32,
    /// Records that were found by reading segments.
    pub scanned_records: u64,
    /// Cells that were found, the checkpoint's included.
    pub cells: u64,
    /// Segments whose end was torn.
    pub torn_tails: u32,
    /// Places before other records that should have been records and were not.
    pub damaged_headers: u32,
    /// Transfers that failed.
    pub failed_reads: u32,
    /// How long it took.
    pub elapsed_ns: u64,
}
