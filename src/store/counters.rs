//! The table of a store's statistics. A field here is a field of the C struct, a key of the JSON
//! views, and a metric: `kvtier_NAME_total` for a counter, `kvtier_NAME` for a gauge. Its comment
//! is the documentation in the C header and the metric's help text.

/// Statistics of a store: counters since it was opened, and gauges.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, kvtier_macros::Rows)]
pub struct StoreStats {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Puts begun.
    pub puts: u64,
    /// Gets begun.
    pub gets: u64,
    /// Prefetches begun.
    pub prefetches: u64,
    /// Cells that puts stored.
    pub stored_cells: u64,
    /// Cells of puts that were resident already.
    pub known_cells: u64,
    /// Cells of gets that were in host memory, or that the get fetched from the remote.
    pub host_hit_cells: u64,
    /// Cells of gets that were read from disk.
    pub disk_hit_cells: u64,
    /// Cells of gets that were in device memory.
    pub device_hit_cells: u64,
    /// Cells of gets that were in no tier.
    pub missed_cells: u64,
    /// Cells with a wrong checksum; they became misses.
    pub corrupt_cells: u64,
    /// Copies that arrived damaged over a device's bus and were repeated.
    pub damaged_copies: u64,
    /// Cells of transfers that failed for lack of host memory.
    pub no_room_cells: u64,
    /// Cells written to disk.
    pub written_cells: u64,
    /// Bytes of written cells, before encoding.
    pub written_bytes: u64,
    /// Bytes of cells read from disk.
    pub loaded_bytes: u64,
    /// Written cells that a codec encoded.
    pub coded_cells: u64,
    /// Bytes of encoded cells before encoding.
    pub coded_raw_bytes: u64,
    /// Bytes of encoded cells on disk.
    pub coded_bytes: u64,
    /// Numbers written by lossy codecs.
    pub lossy_numbers: u64,
    /// Largest error of a number written by a lossy codec.
    #[gauge]
    pub lossy_error_max: f64,
    /// Mean error of these numbers.
    #[gauge]
    pub lossy_error_mean: f64,
    /// Root mean square error of these numbers, relative to that of the numbers.
    #[gauge]
    pub lossy_error_relative: f64,
    /// Chunks evicted from host memory that are on disk.
    pub demoted_chunks: u64,
    /// Chunks evicted from host memory that are in no other tier.
    pub dropped_chunks: u64,
    /// Chunks evicted from disk as a whole.
    pub evicted_chunks: u64,
    /// Parts of chunks evicted from disk, where cells are evicted alone.
    pub evicted_parts: u64,
    /// Victims in host memory that the disk had no space for.
    pub disk_full_chunks: u64,
    /// Failed writes.
    pub failed_writes: u64,
    /// Failed reads.
    pub failed_reads: u64,
    /// Chunks admitted to the disk.
    pub admitted_chunks: u64,
    /// Bytes of admitted chunks.
    pub admitted_bytes: u64,
    /// Chunks rejected because nothing is admitted.
    pub rejected_never: u64,
    /// Chunks rejected for too few uses.
    pub rejected_hits: u64,
    /// Chunks rejected for the priority of their session.
    pub rejected_priority: u64,
    /// Chunks rejected for their size.
    pub rejected_size: u64,
    /// Chunks rejected because the day's writes were used up.
    pub rejected_wear: u64,
    /// Namespaces, including those that no caller has open.
    #[gauge]
    pub namespaces: u64,
    /// Layouts in use.
    #[gauge]
    pub layouts: u64,
    /// Open sessions.
    #[gauge]
    pub sessions: u64,
    /// Tenants that are counted separately.
    #[gauge]
    pub tenants: u64,
    /// Known chunks, of all layouts.
    #[gauge]
    pub chunks: u64,
    /// Pinned chunks.
    #[gauge]
    pub pins: u64,
    /// Bytes of pinned chunks: all layers, stored or not, each cell in whole blocks of 4 KiB.
    #[gauge]
    pub pinned_bytes: u64,
    /// Chunks that were not pinned, because pins would exceed their share of the last tier (`pins`).
    pub rejected_pins: u64,
    /// Chunks removed at the end that their sessions gave them.
    pub expired_chunks: u64,
    /// Chunks evicted because their tenant exceeded its quota.
    pub quota_evicted_chunks: u64,
    /// Puts rejected because their tenant would exceed its quota.
    pub quota_rejected_puts: u64,
    /// Transfers in flight.
    #[gauge]
    pub transfers: u64,
    /// Cells of transfers in flight.
    #[gauge]
    pub transfer_cells: u64,
    /// Cells of transfers that wait for host memory.
    #[gauge]
    pub memory_waiters: u64,
    /// Bytes that these cells wait for.
    #[gauge]
    pub memory_waiter_bytes: u64,
    /// Bytes in host memory that are evicted once they are on disk.
    #[gauge]
    pub demoting_bytes: u64,
    /// Chunks queued for write-back.
    #[gauge]
    pub writeback_chunks: u64,
    /// Bytes of chunks that write-behind has not begun to write (`write=behind`).
    #[gauge]
    pub unwritten_bytes: u64,
    /// Age of the oldest of those chunks, in nanoseconds.
    #[gauge]
    pub unwritten_age_ns: u64,
    /// Puts that wait for a sync.
    #[gauge]
    pub sync_waiters: u64,
    /// Events published.
    pub events: u64,
    /// Limit of cells in host memory, in bytes.
    #[gauge]
    pub host_limit_bytes: u64,
    /// Bytes of cells in host memory.
    #[gauge]
    pub host_used_bytes: u64,
    /// Bytes charged for slabs of host memory, their unused parts included, and for the read reserve.
    #[gauge]
    pub host_cost_bytes: u64,
    /// Cells in host memory.
    #[gauge]
    pub host_cells: u64,
    /// Slabs of host memory.
    #[gauge]
    pub host_slabs: u64,
    /// Limit of all files, in bytes; 0 = there is no disk.
    #[gauge]
    pub disk_limit_bytes: u64,
    /// Bytes of all files.
    #[gauge]
    pub disk_used_bytes: u64,
    /// Maximum of disk_used_bytes so far.
    #[gauge]
    pub disk_peak_bytes: u64,
    /// Bytes of live cells on disk, padded to blocks.
    #[gauge]
    pub disk_live_bytes: u64,
    /// Bytes that compaction would free.
    #[gauge]
    pub disk_dead_bytes: u64,
    /// Cells on disk.
    #[gauge]
    pub disk_cells: u64,
    /// Segments of the disk.
    #[gauge]
    pub disk_segments: u64,
    /// Bytes of memory in which cells are encoded.
    #[gauge]
    pub disk_scratch_bytes: u64,
    /// Bytes written for cells of callers, padded to blocks.
    pub disk_appended_bytes: u64,
    /// Bytes of cells that compaction wrote again.
    pub disk_compacted_bytes: u64,
    /// Bytes written for headers, records and checkpoints.
    pub disk_overhead_bytes: u64,
    /// Bytes read from disk.
    pub disk_read_bytes: u64,
    /// Syncs of segments.
    pub disk_syncs: u64,
    /// Failed syncs.
    pub disk_failed_syncs: u64,
    /// Segments that were compacted.
    pub disk_compactions: u64,
    /// Checkpoints written.
    pub disk_checkpoints: u64,
    /// Appends that the disk rejected for lack of space.
    pub disk_rejected_appends: u64,
    /// Chunks recovered from disk when the store was opened.
    pub recovered_chunks: u64,
    /// Cells recovered from disk.
    pub recovered_cells: u64,
    /// Cells found on disk that could not be used.
    pub recovered_unusable_cells: u64,
    /// KVT_IO_*: how files are read and written now. kvt_store_metrics says why not faster.
    #[gauge]
    pub disk_engine: u32,
    /// 1 = files bypass the page cache.
    #[gauge]
    pub disk_direct: u32,
    /// Limit of device memory, in bytes; 0 = there is no device tier.
    #[gauge]
    pub device_limit_bytes: u64,
    /// Bytes of device memory in use.
    #[gauge]
    pub device_used_bytes: u64,
    /// Bytes of cells in device memory.
    #[gauge]
    pub device_live_bytes: u64,
    /// Cells in device memory.
    #[gauge]
    pub device_cells: u64,
    /// Slabs of device memory.
    #[gauge]
    pub device_slabs: u32,
    /// 1 = the device is lost and the tier is closed.
    #[gauge]
    pub device_is_lost: u32,
    /// Cells copied into device memory.
    pub device_promoted_cells: u64,
    /// Chunks evicted from device memory; they stay in another tier.
    pub device_evicted_chunks: u64,
    /// Replicas lost with their device.
    pub device_lost_cells: u64,
}

impl StoreStats {
    /// Share of requested cells that were resident in any tier; 0 without requests.
    pub fn hit_ratio(&self) -> f64 {
        let hits = self.device_hit_cells + self.host_hit_cells + self.disk_hit_cells;
        share(hits, hits + self.missed_cells)
    }

    /// Share of requested cells that were in host or device memory; 0 without requests.
    pub fn host_hit_ratio(&self) -> f64 {
        let hits = self.device_hit_cells + self.host_hit_cells;
        share(hits, hits + self.disk_hit_cells + self.missed_cells)
    }

    /// Bytes written to disk for each byte of cells from callers; 0 if nothing was written.
    pub fn write_amplification(&self) -> f64 {
        let StoreStats { disk_appended_bytes: new, disk_compacted_bytes: again, .. } = *self;
        share(new + again + self.disk_overhead_bytes, new)
    }
}

/// A part of a whole; 0 if the whole is 0.
pub fn share(part: u64, whole: u64) -> f64 {
    if whole > 0 { part as f64 / whole as f64 } else { 0.0 }
}

/// Statistics of a store's remote. Metrics are named `kvtier_remote_NAME`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, kvtier_macros::Rows)]
pub struct RemoteStats {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_REMOTE_CIRCUIT_* of reads; 0 = there is no remote.
    #[gauge]
    pub read_circuit: u32,
    /// KVT_REMOTE_CIRCUIT_* of writes.
    #[gauge]
    pub write_circuit: u32,
    /// Times that a circuit was opened: requests were suspended for a while.
    pub circuit_opens: u64,
    /// Names looked up.
    pub looked_up_names: u64,
    /// Names that lookups found.
    pub found_names: u64,
    /// Names answered from the remote index, without a lookup.
    pub cached_names: u64,
    /// Objects fetched.
    pub fetched_objects: u64,
    /// Cells fetched with a valid checksum.
    pub fetched_cells: u64,
    /// Bytes of those cells.
    pub fetched_bytes: u64,
    /// Fetched bytes that no transfer needed.
    pub wasted_bytes: u64,
    /// Objects that a hint promised and the remote did not have.
    pub absent_objects: u64,
    /// Objects, or cells of them, with wrong content; malformed replies.
    pub corrupt_objects: u64,
    /// Requests without an answer before their deadline, or to an unreachable or busy server.
    pub late_requests: u64,
    /// Requests that have not returned after twice their timeout.
    pub hung_requests: u64,
    /// Objects not fetched because the circuit was open.
    pub skipped_objects: u64,
    /// Objects uploaded.
    pub uploaded_objects: u64,
    /// Bytes of uploaded objects.
    pub uploaded_bytes: u64,
    /// Objects that another store had uploaded before.
    pub known_objects: u64,
    /// Failed uploads.
    pub failed_uploads: u64,
    /// Chunks not uploaded: rejected by admission, or too many were queued.
    pub rejected_chunks: u64,
    /// Objects removed because they were damaged or their chunk was dropped.
    pub removed_objects: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::exposition::{Kind, Value};

    #[test]
    fn rows_have_the_names_and_values_of_fields() {
        let stats =
            StoreStats { gets: 3, host_cells: 5, lossy_error_max: 0.5, ..Default::default() };
        let row = |name| StoreStats::ROWS.iter().find(|row| row.name == name).expect(name);
        assert_eq!((row("gets").get)(&stats), Value::Whole(3));
        assert_eq!((row("lossy_error_max").get)(&stats), Value::Real(0.5));
        assert_eq!((row("gets").kind, row("host_cells").kind), (Kind::Counter, Kind::Gauge));
        assert_eq!(row("gets").help, "Gets begun.");
        assert!(StoreStats::ROWS.iter().all(|row| row.name != "struct_size"));
    }

    #[test]
    fn counters_add_up_and_gauges_do_not() {
        let mut sum = StoreStats { gets: 1, host_cells: 1, ..Default::default() };
        sum.add_counters(&StoreStats { gets: 2, host_cells: 7, ..Default::default() });
        assert_eq!((sum.gets, sum.host_cells), (3, 1));
    }

    #[test]
    fn ratios_of_nothing_are_zero() {
        let stats = StoreStats::default();
        assert_eq!((stats.hit_ratio(), stats.host_hit_ratio()), (0.0, 0.0));
        assert_eq!(stats.write_amplification(), 0.0);
    }
}
