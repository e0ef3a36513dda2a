//! What a store counts and has: a struct, and the text that Prometheus collects.

use std::ffi::c_char;

use crate::fail;
use crate::ffi::abi::{Plain, capi, check_out, give_text, inspect, write};
use crate::ffi::status::kvt_status_t;
use crate::ffi::store::kvt_store_t;
use crate::store::state::Adopted;
use crate::store::state::stats::Report;

/// What a store counts since it was opened, and what it has now.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_store_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Puts begun.
    pub puts: u64,
    /// Gets begun.
    pub gets: u64,
    /// Prefetches begun.
    pub prefetches: u64,
    /// Cells stored from outside.
    pub stored_cells: u64,
    /// Cells that were there when they were to be stored.
    pub known_cells: u64,
    /// Cells read from memory.
    pub host_hit_cells: u64,
    /// Cells that had to be read from disk first.
    pub disk_hit_cells: u64,
    /// Cells that were nowhere.
    pub missed_cells: u64,
    /// Cells whose bytes were wrong, and that became misses.
    pub corrupt_cells: u64,
    /// Cells written to disk.
    pub written_cells: u64,
    /// Bytes of them.
    pub written_bytes: u64,
    /// Bytes loaded from disk.
    pub loaded_bytes: u64,
    /// Chunks that left memory and are on disk.
    pub demoted_chunks: u64,
    /// Chunks that left memory and are gone.
    pub dropped_chunks: u64,
    /// Chunks that left the disk.
    pub evicted_chunks: u64,
    /// Chunks that were to leave memory, and the disk had no room for.
    pub refused_chunks: u64,
    /// Cells that failed for want of room.
    pub no_room_cells: u64,
    /// Writes that failed.
    pub failed_writes: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Namespaces, those included that nobody has open.
    pub namespaces: u64,
    /// Sessions that are open.
    pub sessions: u64,
    /// Chunks that are known, of all layouts.
    pub chunks: u64,
    /// Chunks that are pinned.
    pub pins: u64,
    /// Moves under way.
    pub moves: u64,
    /// Cells on their way.
    pub moving_cells: u64,
    /// Most bytes of cells in memory.
    pub host_limit_bytes: u64,
    /// Bytes of cells in memory.
    pub host_used_bytes: u64,
    /// What that memory costs, tables and gaps included.
    pub host_cost_bytes: u64,
    /// Cells in memory.
    pub host_cells: u64,
    /// Most bytes of all files; 0 = there is no disk.
    pub disk_limit_bytes: u64,
    /// Bytes of all files.
    pub disk_used_bytes: u64,
    /// The most they ever were.
    pub disk_peak_bytes: u64,
    /// Bytes of cells that live on disk, padded to blocks.
    pub disk_live_bytes: u64,
    /// Bytes that cleaning would free.
    pub disk_dead_bytes: u64,
    /// Cells on disk.
    pub disk_cells: u64,
    /// Wear: bytes of cells that were written for callers, padded to blocks.
    pub disk_appended_bytes: u64,
    /// Wear: bytes of cells that cleaning wrote again.
    pub disk_cleaned_bytes: u64,
    /// Wear: bytes of headers, notes and checkpoints.
    pub disk_overhead_bytes: u64,
    /// Files of cells.
    pub disk_segments: u64,
    /// Syncs of those files.
    pub disk_syncs: u64,
    /// Syncs that failed.
    pub disk_failed_syncs: u64,
    /// Chunks that opening found on disk.
    pub found_chunks: u64,
    /// Their cells.
    pub found_cells: u64,
    /// Cells that were found and of no use.
    pub found_useless_cells: u64,
    /// Chunks that admission let go to disk.
    pub admission_admitted: u64,
    /// Bytes of them.
    pub admission_admitted_bytes: u64,
    /// Chunks that it kept from there, since nothing is admitted.
    pub admission_refused_never: u64,
    /// Since they had too few uses.
    pub admission_refused_hits: u64,
    /// Since the class of their session was too low.
    pub admission_refused_priority: u64,
    /// Since they were too small or too large.
    pub admission_refused_size: u64,
    /// Since the day's writes were used up.
    pub admission_refused_wear: u64,
    /// How files are read and written now, KVT_IO_*; why not in a better way is in
    /// kvt_store_metrics.
    pub disk_engine: u32,
    /// 1: past the page cache, 0: through it.
    pub disk_direct: u32,
    /// Cells read from device memory; host_hit_cells does not count them.
    pub device_hit_cells: u64,
    /// Cells that came to device memory.
    pub device_promoted_cells: u64,
    /// Chunks that left device memory for others; they are elsewhere, too.
    pub device_evicted_chunks: u64,
    /// Cells that were forgotten there when the device was lost.
    pub device_lost_cells: u64,
    /// Most bytes of device memory; 0 = there is no device tier.
    pub device_limit_bytes: u64,
    /// Bytes of device memory that are taken.
    pub device_used_bytes: u64,
    /// Cells in device memory.
    pub device_cells: u64,
    /// Bytes of chunks that write-behind has not begun to write (`write=behind`).
    pub unwritten_bytes: u64,
    /// For how long the oldest of those chunks has waited, in nanoseconds.
    pub unwritten_age_ns: u64,
}

/// What a store counts and has; also of a poisoned one.
///
/// @param store  The store.
/// @param out    Filled in; start it with KVT_STORE_STATS_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_store_stats(
    store: *const kvt_store_t,
    out: *mut kvt_store_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let store = inspect(store)?;
    let report = store.store.look(|core| core.report())?;
    write(out, &filled(&report, &store.store.opened.adopted));
    Ok(())
}

fn filled(report: &Report, adopted: &Adopted) -> kvt_store_stats_t {
    let Report { counters: c, host, disk, .. } = report;
    let disk_stats = &disk.stats;
    let [puts, gets, prefetches] = c.moves;
    let [never, hits, priority, size, wear] = report.admission_refused;
    kvt_store_stats_t {
        struct_size: 0,
        puts,
        gets,
        prefetches,
        stored_cells: c.stored,
        known_cells: c.known,
        host_hit_cells: c.host_hits,
        disk_hit_cells: c.disk_hits,
        missed_cells: c.misses,
        corrupt_cells: c.corrupt,
        written_cells: c.written,
        written_bytes: c.written_bytes,
        loaded_bytes: c.loaded_bytes,
        demoted_chunks: c.demoted,
        dropped_chunks: c.dropped,
        evicted_chunks: c.disk_evicted,
        refused_chunks: c.refused,
        no_room_cells: c.no_room,
        failed_writes: c.failed_writes,
        failed_reads: c.failed_reads,
        namespaces: report.namespaces,
        sessions: report.sessions,
        chunks: report.chunks,
        pins: report.pins,
        moves: report.moves,
        moving_cells: report.jobs,
        host_limit_bytes: host.limit_bytes,
        host_used_bytes: host.live_bytes,
        host_cost_bytes: host.cost_bytes,
        host_cells: report.host_cells,
        disk_limit_bytes: disk.budget_bytes,
        disk_used_bytes: disk.used_bytes,
        disk_peak_bytes: disk_stats.most_used_bytes,
        disk_live_bytes: disk.live_bytes,
        disk_dead_bytes: disk.dead_bytes,
        disk_cells: report.disk_cells,
        disk_appended_bytes: disk_stats.appended_bytes,
        disk_cleaned_bytes: disk_stats.compacted_bytes,
        disk_overhead_bytes: disk_stats.overhead_bytes,
        disk_segments: disk.segments,
        disk_syncs: disk_stats.syncs,
        disk_failed_syncs: disk_stats.failed_syncs,
        found_chunks: adopted.chunks,
        found_cells: adopted.cells,
        found_useless_cells: adopted.dropped,
        admission_admitted: report.admission_admitted,
        admission_admitted_bytes: report.admission_admitted_bytes,
        admission_refused_never: never,
        admission_refused_hits: hits,
        admission_refused_priority: priority,
        admission_refused_size: size,
        admission_refused_wear: wear,
        disk_engine: disk.engine as u32,
        disk_direct: u32::from(disk.is_direct),
        device_hit_cells: c.device_hits,
        device_promoted_cells: c.promoted,
        device_evicted_chunks: c.device_evicted,
        device_lost_cells: c.device_lost,
        device_limit_bytes: report.device.limit_bytes,
        device_used_bytes: report.device.used_bytes,
        device_cells: report.device_cells,
        unwritten_bytes: report.unwritten_bytes,
        unwritten_age_ns: report.unwritten_age_ns,
    }
}

/// The same numbers as text, in the format that Prometheus collects.
///
/// @param store         The store.
/// @param out           Receives the text, not NUL-terminated; may be null with
///                      out_capacity 0 to learn the size.
/// @param out_capacity  Room at `out`. Numbers grow: leave some to spare.
/// @param out_bytes     Length of the text; also written with KVT_E_TOO_SMALL. May
///                      be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_store_metrics(
    store: *const kvt_store_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    if out.is_null() && out_capacity > 0 {
        fail!(Invalid, "the output pointer is null and its capacity {out_capacity}");
    }
    let store = inspect(store)?;
    let text = store.store.look(|core| core.metrics_text())?;
    give_text(&text, out, out_capacity, out_bytes)
}
