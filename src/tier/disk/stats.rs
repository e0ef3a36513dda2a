//! Counters of the tier.

/// Counters since the tier was opened, and its present state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of cells that callers appended, padded to blocks.
    pub appended_bytes: u64,
    /// Bytes of cells that compaction wrote again.
    pub compacted_bytes: u64,
    /// Bytes of headers, of records without cells, and of checkpoints.
    pub overhead_bytes: u64,
    /// Records written.
    pub records: u64,
    /// Records that could not be written.
    pub failed_records: u64,
    /// Bytes of cells that were read.
    pub read_bytes: u64,
    /// Cells that were requested.
    pub reads: u64,
    /// Cells that did not match their seal.
    pub corrupt: u64,
    /// Cells that could not be read.
    pub failed_reads: u64,
    /// Syncs of segments.
    pub syncs: u64,
    /// Syncs that failed; each one poisons its segment.
    pub failed_syncs: u64,
    /// Segments created.
    pub segments_made: u64,
    /// Of these, in files of removed segments.
    pub segments_reused: u64,
    /// Segments removed.
    pub segments_removed: u64,
    /// Segments that were compacted.
    pub compactions: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Requests for space that the budget or the disk rejected.
    pub refused: u64,
    /// Bytes of the budget in use, without files that are kept for the next segments.
    pub used_bytes: u64,
    /// Bytes of files that are kept for the next segments. They are removed if anything else needs the
    /// space.
    pub spare_bytes: u64,
    /// Most bytes of all files at any moment.
    pub most_used_bytes: u64,
    /// The budget.
    pub budget_bytes: u64,
    /// Present scratch memory for encoding and moving cells, its reserve included.
    pub scratch_bytes: u64,
    /// The same, with the memory for headers and unaligned transfers.
    pub staging_bytes: u64,
}

/// One segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its number.
    pub number: u64,
    /// Blocks, the header included.
    pub blocks: u32,
    /// Blocks of live cells.
    pub live_blocks: u32,
    /// Blocks that removing or compacting the segment would free: all written blocks without live
    /// cells.
    pub dead_blocks: u32,
    /// Records written to any segment since this segment's newest one.
    pub age_records: u64,
    /// Records are being written to it.
    pub is_front: bool,
    /// It has records without cells that must be moved before it can be removed.
    pub has_notes: bool,
    /// A sync failed: writes that were not durable then never will be.
    pub poisoned: bool,
    /// Places that should be records and are not.
    pub damaged: u32,
}

/// Result of opening a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenReport {
    /// The directory had no store: one was created.
    pub is_new: bool,
    /// Unsound copies of the store's name; they were rewritten.
    pub damaged_names: u32,
    /// The checkpoint that was used; 0 = none.
    pub checkpoint: u64,
    /// Checkpoints that were not sound.
    pub unsound_checkpoints: u32,
    /// Segments of the store.
    pub segments: u32,
    /// Segments of other stores; they are left alone.
    pub foreign_segments: u32,
    /// Segments whose first block was not sound.
    pub damaged_segments: u32,
    /// Records that were found by reading segments.
    pub scanned_records: u64,
    /// Cells found, the checkpoint's included.
    pub cells: u64,
    /// Segments whose end was torn.
    pub torn_tails: u32,
    /// Places before other records that should be records and are not.
    pub damaged_headers: u32,
    /// Transfers that failed.
    pub failed_reads: u32,
    /// Duration of the opening.
    pub elapsed_ns: u64,
}
