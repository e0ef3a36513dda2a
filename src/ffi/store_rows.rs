//! What a store can list: who left, what each tenant has moved, how long things took.

use crate::base::budget::Tier;
use crate::ffi::abi::{Plain, Strided, capi, give, inspect, require};
use crate::ffi::namespace_look::MAX_ROWS;
use crate::ffi::policy_stats::{kvt_policy_log_entry_t, log_entry};
use crate::ffi::status::kvt_status_t;
use crate::ffi::store::kvt_store_t;
use crate::store::state::snapshot::MOST_EVICTIONS;
use crate::store::state::stats::{Latency, TIMED, Tenant};

/// Gets of which all was in memory.
pub const KVT_TIMED_GET_HOST: u32 = 1;
/// Gets of which something had to be read from disk.
pub const KVT_TIMED_GET_DISK: u32 = 2;
/// Puts until they are in memory.
pub const KVT_TIMED_PUT_RAM: u32 = 3;
/// Puts until they are on disk.
pub const KVT_TIMED_PUT_DISK: u32 = 4;
/// Puts until they are durable.
pub const KVT_TIMED_PUT_DURABLE: u32 = 5;
/// Batches of copies between tensors and memory.
pub const KVT_TIMED_COPY_BATCH: u32 = 6;
/// Batches of reads of the disk.
pub const KVT_TIMED_READ_BATCH: u32 = 7;
/// Batches of writes to it.
pub const KVT_TIMED_WRITE_BATCH: u32 = 8;
/// Syncs.
pub const KVT_TIMED_SYNC_BATCH: u32 = 9;
/// Cleanings, sweeps, checkpoints and notes.
pub const KVT_TIMED_UPKEEP_BATCH: u32 = 10;
/// Choices of who leaves memory: one in some is timed.
pub const KVT_TIMED_HOST_DECISION: u32 = 11;
/// Choices of who leaves the disk: one in some is timed.
pub const KVT_TIMED_DISK_DECISION: u32 = 12;
/// Batches of objects that come from the remote.
pub const KVT_TIMED_FETCH_BATCH: u32 = 13;
/// Batches of objects that go there.
pub const KVT_TIMED_UPLOAD_BATCH: u32 = 14;
/// Questions what the remote has.
pub const KVT_TIMED_LOOKUP_BATCH: u32 = 15;

/// Kinds of the core's own that decisions come behind, in its order.
const BEFORE_DECISIONS: usize = KVT_TIMED_UPKEEP_BATCH as usize;

const _: () = assert!(KVT_TIMED_LOOKUP_BATCH as usize == TIMED.len() + 2);

/// How long one kind of thing took. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_latency_t {
    /// KVT_TIMED_*.
    pub kind: u32,
    /// Always 0.
    pub reserved: u32,
    /// How many were timed since the store was opened.
    pub count: u64,
    /// The mean, in nanoseconds.
    pub mean_ns: u64,
    /// What half of them did not exceed, to a fourth.
    pub p50_ns: u64,
    /// The same of 99 in 100.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// What a tenant has moved. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_tenant_t {
    /// Its number (kvt_session_opts_t.tenant).
    pub tenant: u32,
    /// 1: all tenants together that are not told apart; 1,024 are.
    pub is_rest: u32,
    /// Bytes it has stored.
    pub put_bytes: u64,
    /// Bytes it was given back.
    pub got_bytes: u64,
    /// Cells it has asked for, and got.
    pub hit_cells: u64,
    /// Cells it has asked for that were nowhere.
    pub missed_cells: u64,
}

fn outward(row: &Tenant, is_rest: bool) -> kvt_tenant_t {
    kvt_tenant_t {
        tenant: row.id,
        is_rest: u32::from(is_rest),
        put_bytes: row.put_bytes,
        got_bytes: row.got_bytes,
        hit_cells: row.hits,
        missed_cells: row.misses,
    }
}

fn timed(kind: u32, times: &Latency) -> kvt_latency_t {
    let &Latency { count, mean_ns, p50_ns, p99_ns, max_ns } = times;
    kvt_latency_t { kind, reserved: 0, count, mean_ns, p50_ns, p99_ns, max_ns }
}

/// The last evictions of a tier, the oldest of them first. The store keeps 4,096 of each
/// tier; by their numbers a reader knows what it has seen, and what it has missed.
///
/// @param store         The store.
/// @param tier          KVT_TIER_HOST or KVT_TIER_DISK.
/// @param entries       Receives them: `id` is the first eight bytes of the chunk's key,
///                      little-endian (where policies choose other things, theirs),
///                      `units` are blocks of 4 KiB, times CLOCK_MONOTONIC.
/// @param capacity      Room there, in entries.
/// @param stride_bytes  sizeof(kvt_policy_log_entry_t).
/// @param out_count     How many were written.
/// @return KVT_OK; KVT_E_NOT_FOUND when there is no disk, KVT_E_UNSUPPORTED for
///         another tier, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_store_evictions(
    store: *const kvt_store_t,
    tier: u32,
    entries: *mut kvt_policy_log_entry_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    require(out_count)?;
    let rows = Strided::new(entries, capacity, stride_bytes, MAX_ROWS)?;
    let tier = Tier::from_code(tier)?;
    let store = inspect(store)?;
    let most = rows.len().min(MOST_EVICTIONS);
    let last = store.store.look(|core| core.evictions(tier, most))??;
    for (at, entry) in last.iter().take(most).enumerate() {
        rows.put(at, &log_entry(entry));
    }
    out_count.write(last.len().min(most) as u64);
    Ok(())
}

/// What each tenant has moved, by number; last, where there are more tenants than are told
/// apart, the rest of them as one.
///
/// @param store         The store.
/// @param rows          Receives them; may be null with capacity 0 to learn how many
///                      there are.
/// @param capacity      Room there, in entries, at most 2^24; 1,025 are enough.
/// @param stride_bytes  sizeof(kvt_tenant_t).
/// @param out_count     How many there are; also written with KVT_E_TOO_SMALL. May be
///                      null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_store_tenants(
    store: *const kvt_store_t,
    rows: *mut kvt_tenant_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    let to = Strided::new(rows, capacity, stride_bytes, MAX_ROWS)?;
    let store = inspect(store)?;
    let all: Vec<kvt_tenant_t> = store.store.look(|core| {
        let rest = core.other_tenants();
        let rest = (rest != Tenant::default()).then(|| outward(&rest, true));
        core.tenants().iter().map(|row| outward(row, false)).chain(rest).collect()
    })?;
    give(&to, rows.is_null(), all.into_iter(), out_count)
}

/// How long gets, puts, the store's own work and its policies' choices took: a row for
/// each KVT_TIMED_*, in their order, also where nothing was timed yet. Moves count that
/// brought or stored everything, from their call (or the engine's event) to their end.
/// kvt_store_metrics has the same as histograms.
///
/// @param store         The store.
/// @param rows          Receives them; may be null with capacity 0 to learn how many
///                      there are.
/// @param capacity      Room there, in entries, at most 2^24; 32 are enough.
/// @param stride_bytes  sizeof(kvt_latency_t).
/// @param out_count     How many there are; also written with KVT_E_TOO_SMALL. May be
///                      null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_store_latencies(
    store: *const kvt_store_t,
    rows: *mut kvt_latency_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    let to = Strided::new(rows, capacity, stride_bytes, MAX_ROWS)?;
    let store = inspect(store)?;
    let report = store.store.look(|core| core.report())?;
    let decisions = [report.host_policy.decision, report.disk_policy.decision];
    let (first, last) = report.latencies.split_at(BEFORE_DECISIONS);
    let all = (1..).zip(first.iter().chain(&decisions).chain(last));
    let all: Vec<_> = all.map(|(kind, times)| timed(kind, times)).collect();
    give(&to, rows.is_null(), all.into_iter(), out_count)
}
