//! Stores, namespaces and remotes.

use std::ffi::{c_char, c_void};

use crate::base::budget::Tier;
use crate::base::callback::{Foreign as Callback, refuse_reentry};
use crate::base::core::Core;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::{
    Plain, Strided, bytes, capi, check_out, enter, free, give, give_text, insert, inspect,
    known_flags, length_of, no_reserved, noun, numbers, pin_optional, put, read, require, text,
    text_bytes, write,
};
use crate::ffi::base::{kvt_destroy_fn, kvt_error_t, kvt_status_t};
use crate::ffi::device::{device_of, kvt_device_t};
use crate::ffi::memory::kvt_budget_t;
use crate::ffi::policy::{kvt_policy_log_entry_t, log_entry};
use crate::ffi::runtime::{begin_one, kvt_op_t, kvt_runtime_t, kvt_submit_opts_t, on_runtime};
use crate::format::codec::Codec;
use crate::format::keys::identity::{Extra, Identity, MAX_EXTRA, Shard};
use crate::format::keys::{Fingerprint, recipe};
use crate::meta::chunks::WHOLE;
use crate::meta::cost::Cost;
use crate::meta::dtype::Dtype;
use crate::meta::key::Key;
use crate::meta::layout::{Group, Layout, MAX_GROUPS, MAX_LAYERS, Rule};
use crate::meta::reuse::State as ReuseState;
use crate::store::events::{Event, Kind};
use crate::store::handle::Store;
use crate::store::spec::{CustomRemote, Fields, Secrets, StoreSpec};
use crate::store::state::plans::{Look, Stretch};
use crate::store::state::snapshot::MOST_EVICTIONS;
use crate::store::state::stats::{Engine, Latency, Report, TIMED, Tenant};
use crate::store::state::{Adopted, RemoteCounters, SpaceOpts, Write};
use crate::store::token_path::MAX_TOKENS;
use crate::tier::remote::breaker::{Breaker, Direction, State as BreakerState};
use crate::tier::remote::name::Prefix;
use crate::tier::remote::{
    Caps, Client, Gets, Name, Part, Puts, Queries, Remote, RemoteError, Server,
};

// Stores.

/// Keeps the KV cache of sessions in tiers: memory, disk, a remote. Internally
/// locked: any thread may use it.
pub struct kvt_store_t(());

/// To disk as soon as a put has ended.
pub const KVT_WRITE_THROUGH: u32 = 1;
/// To disk when the memory is needed.
pub const KVT_WRITE_BACK: u32 = 2;
/// To disk only when a put asks for it.
pub const KVT_WRITE_NEVER: u32 = 3;
/// To disk in the background, at most about a second after the put has ended (`write=behind`,
/// with its parameters in the spec). This is the default.
pub const KVT_WRITE_BEHIND: u32 = 4;

/// There is no disk.
pub const KVT_IO_NONE: u32 = 0;
/// Files are read and written one transfer at a time, by threads.
pub const KVT_IO_THREADS: u32 = 1;
/// Files are read and written many transfers at once, by io_uring.
pub const KVT_IO_URING: u32 = 2;

const _: () = assert!(KVT_IO_URING == Engine::Uring as u32 && KVT_IO_NONE == Engine::None as u32);

/// How to open a store. Zero is the default everywhere. Fields that are set count instead
/// of what the spec says, and are read by the same rules.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_store_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// None are defined yet: 0.
    pub flags: u64,
    /// The spec, such as "store(host=8GiB, disk=disk(path=\"kv\", bytes=200GiB))";
    /// null = "store": 1 GiB of memory and no disk. docs/abi.md has its parameters.
    pub spec: *const c_char,
    /// Length of the spec.
    pub spec_bytes: u64,
    /// Most bytes of cells in memory (`host`); 0 = as the spec says.
    pub host_bytes: u64,
    /// Most bytes of all files (`disk(bytes=...)`); 0 = as the spec says.
    pub disk_bytes: u64,
    /// The directory of the disk tier (`disk(path=...)`), UTF-8; null = as the spec says.
    pub disk_path: *const c_char,
    /// Length of that.
    pub disk_path_bytes: u64,
    /// Who leaves memory (`policy`); null = as the spec says.
    pub policy: *const c_char,
    /// Length of that.
    pub policy_bytes: u64,
    /// Who leaves the disk (`disk_policy`); null = as the spec says.
    pub disk_policy: *const c_char,
    /// Length of that.
    pub disk_policy_bytes: u64,
    /// KVT_WRITE_*; 0 = as the spec says.
    pub write: u32,
    /// Always 0.
    pub reserved: u32,
    /// Who copies between the engine's memory and the store's, a device of the same runtime;
    /// null = the processor. With one that has memory of its own, moves take views of it, and
    /// `device=device(capacity=8GiB)` in the spec keeps cells there, too.
    pub device: *const kvt_device_t,
    /// What only the server of its remote (`remote=redis(...)`) is to see; null = nothing.
    pub secrets: *const kvt_secret_t,
    /// How many, at most 16.
    pub secret_count: u64,
    /// sizeof(kvt_secret_t).
    pub secret_stride_bytes: u64,
    /// The engine's own remote, which `remote=custom(...)` in the spec is; null = none.
    pub remote: *const kvt_remote_custom_t,
}

/// A store, and the runtime it belongs to.
pub(crate) struct StoreNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) store: Arc<Store>,
}

noun!(StoreNoun, kvt_store_t, 10, "store");

/// # Safety
/// Its texts are null or valid for their lengths.
unsafe fn spec_of(given: &kvt_store_opts_t) -> Result<StoreSpec> {
    known_flags(given.flags, 0)?;
    no_reserved(given.reserved)?;
    let write = match given.write {
        0 => None,
        KVT_WRITE_THROUGH => Some(Write::Through),
        KVT_WRITE_BACK => Some(Write::Back),
        KVT_WRITE_NEVER => Some(Write::Never),
        KVT_WRITE_BEHIND => Some(Write::Behind),
        other => fail!(Invalid, "write is {other}, none of KVT_WRITE_*"),
    };
    let (host_bytes, disk_bytes) = (given.host_bytes, given.disk_bytes);
    // SAFETY: the caller's promise.
    unsafe {
        let disk_path = text("disk_path", given.disk_path, given.disk_path_bytes)?;
        let policy = text("policy", given.policy, given.policy_bytes)?;
        let disk_policy = text("disk_policy", given.disk_policy, given.disk_policy_bytes)?;
        let fields = Fields { host_bytes, disk_bytes, disk_path, policy, disk_policy, write };
        let mut spec = fields.over(text("spec", given.spec, given.spec_bytes)?)?;
        let (count, stride_bytes) = (given.secret_count, given.secret_stride_bytes);
        spec.secrets = secrets_of(given.secrets, count, stride_bytes)?;
        Ok(spec)
    }
}

/// Opens a store: makes or recovers its disk, and starts its threads. Waits for
/// the disk, and for an answer of its remote as long as `connect` and `timeout` say; one that
/// does not answer is tried again later, unless the spec requires it.
///
/// @param runtime  Where it belongs.
/// @param budget   Who pays for its memory, a budget of that runtime; null = one of its own,
///                 of what the machine or the cgroup can give now, less a reserve.
/// @param opts     What it is to be like; null for defaults.
/// @param out      The store; close it with kvt_store_close.
/// @param err      Explains a failure, with the offset in the spec and the nearest
///                 name that exists; may be null.
/// @return KVT_OK; KVT_E_SPEC, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_BUDGET, KVT_E_BUSY (the directory, or the control socket's
///         path, is in use), KVT_E_STATE (what is at that path is no socket of this
///         user's), KVT_E_NOT_FOUND (a folder above that of the disk is missing), KVT_E_IO,
///         KVT_E_CORRUPT, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_UNAVAILABLE (a remote that is required, or that refuses us),
///         KVT_E_UNSUPPORTED (a remote that is not built in), KVT_E_PANIC.
///
/// Ownership: the caller owns the store. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_store_open(
    runtime: *const kvt_runtime_t,
    budget: *const kvt_budget_t,
    opts: *const kvt_store_opts_t,
    out: *mut *mut kvt_store_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let spec = spec_of(&given)?;
    let custom = remote_of(given.remote)?;
    let (given, mut spec, custom) = (given, spec, custom);
    let keep = custom.map(|(custom, keep)| {
        spec.custom_remote = Some(custom);
        keep
    });
    if keep.is_some() && !spec.has_custom_remote() {
        fail!(Invalid, "a remote is given, and the spec does not say remote=custom(...)");
    }
    let budget = pin_optional(budget)?.map(|noun| noun.0.clone());
    let noun = on_runtime(runtime, |core| {
        core.check_open()?;
        if budget.as_ref().is_some_and(|budget| !Arc::ptr_eq(budget.core(), core)) {
            fail!(Invalid, "the budget belongs to another runtime");
        }
        let store = match device_of(core, given.device)? {
            Some(device) => Store::open_with(core, budget.as_ref(), &spec, device)?,
            None => Store::open(core, budget.as_ref(), &spec)?,
        };
        Ok(StoreNoun { core: core.clone(), store: Arc::new(store) })
    })?;
    let handle = insert(noun)?;
    keep.into_iter().for_each(|keep| keep());
    out.write(handle);
    Ok(())
}

/// Closes a store: refuses new work, cancels what is open, waits for it and for
/// the threads, and lets the directory go. Before that, full chunks that are in
/// memory only are written to disk, as far as admission and room allow and unless
/// it says write=never; what is left in memory is gone. Namespaces and sessions
/// that are left open give KVT_E_CLOSED from then on and are closed as usual;
/// results of ops stay.
///
/// @param store        Pointer to the handle, cleared on success; null, or a null
///                     handle, is fine.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY at the deadline (the store stays closing and valid:
///         call again); KVT_E_IO when the disk failed at the end (all the same it is
///         closed: call again to free the handle); KVT_E_REENTRANT inside a callback;
///         KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_store_close(
    store: *mut *mut kvt_store_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let close = |noun: &crate::base::slab::Pin<'static, StoreNoun>| {
        refuse_reentry()?;
        noun.store.close(deadline_ns)
    };
    free(store, close)
}

// Statistics of stores.

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
    write(out, &stats_for_c(&report, &store.store.opened.adopted));
    Ok(())
}

fn stats_for_c(report: &Report, adopted: &Adopted) -> kvt_store_stats_t {
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

// Namespaces.

/// A namespace of a store: sessions in it share what they have in common.
/// Internally locked: any thread may use it.
pub struct kvt_namespace_t(());

/// The engine can compute what lies behind a hole: chunks leave in any order.
/// Without it those that continue a chunk leave before it.
pub const KVT_NAMESPACE_HOLES: u64 = 1;

/// Bytes of a namespace's key.
pub const KVT_KEY_BYTES: u32 = 32;

/// A layer needs every earlier token.
pub const KVT_RULE_FULL: u32 = 0;
/// A layer needs the last window_tokens tokens.
pub const KVT_RULE_WINDOW: u32 = 1;
/// A layer needs its state at the very point; it is kept at the ends of chunks.
pub const KVT_RULE_STATE: u32 = 2;

/// Bytes that only the engine understands.
pub const KVT_DTYPE_BYTES: u32 = 0;
/// IEEE 754 binary32.
pub const KVT_DTYPE_F32: u32 = 1;
/// IEEE 754 binary16.
pub const KVT_DTYPE_F16: u32 = 2;
/// The upper half of a binary32.
pub const KVT_DTYPE_BF16: u32 = 3;
/// 8 bits, 4 of exponent and 3 of mantissa.
pub const KVT_DTYPE_F8_E4M3: u32 = 4;
/// 8 bits, 5 of exponent and 2 of mantissa.
pub const KVT_DTYPE_F8_E5M2: u32 = 5;
/// Signed 8-bit integers.
pub const KVT_DTYPE_I8: u32 = 6;
/// 4 bits each, two to a byte.
pub const KVT_DTYPE_I4: u32 = 7;

const _: () = assert!(KVT_DTYPE_F32 == Dtype::F32.code() && KVT_DTYPE_BF16 == Dtype::Bf16.code());
const _: () = assert!(KVT_DTYPE_F8_E4M3 == Dtype::F8E4m3.code());
const _: () = assert!(KVT_DTYPE_F8_E5M2 == Dtype::F8E5m2.code());
const _: () = assert!(KVT_DTYPE_I8 == Dtype::I8.code() && KVT_DTYPE_I4 == Dtype::I4.code());

/// A field of an identity that is the engine's own. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_identity_extra_t {
    /// Its tag, 0x80000000 at least; each once.
    pub tag: u32,
    /// Always 0.
    pub reserved: u32,
    /// Its bytes.
    pub value: *const c_void,
    /// How many, at most 65536.
    pub value_bytes: u64,
}

/// Everything that makes KV other KV. Fields are bytes, hashed as they are, at
/// most 65536 each. A null field is absent; that differs from an empty one, which
/// has a pointer and no length. docs/keys.md says how the key is made of them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_identity_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Name of the model.
    pub model: *const c_void,
    /// Its length.
    pub model_bytes: u64,
    /// Fingerprint of its weights.
    pub weights: *const c_void,
    /// Its length.
    pub weights_bytes: u64,
    /// Adapters that change the KV.
    pub lora: *const c_void,
    /// Their length.
    pub lora_bytes: u64,
    /// Digest of media that all sequences share.
    pub media: *const c_void,
    /// Its length.
    pub media_bytes: u64,
    /// What keeps a tenant's KV from others.
    pub salt: *const c_void,
    /// Its length.
    pub salt_bytes: u64,
    /// Canonical spec of how the KV is computed and stored, if not exactly. Its
    /// parameter codec (none, lz4, int8) says how cells are coded on disk.
    pub recipe: *const c_void,
    /// Its length.
    pub recipe_bytes: u64,
    /// Which part of the KV this rank holds, from 0.
    pub shard_index: u32,
    /// How many parts there are; 0 = all ranks hold the same.
    pub shard_count: u32,
    /// Fields of the engine's own, in any order.
    pub extra: *const kvt_identity_extra_t,
    /// How many, at most 64.
    pub extra_count: u64,
    /// sizeof(kvt_identity_extra_t).
    pub extra_stride_bytes: u64,
    /// Whose names its objects have at a remote, which rules of access there may tell apart;
    /// 0 = everybody's. No part of the identity: all that open a namespace say the same.
    pub remote_tenant: u64,
}

/// Layers that keep the same, and need the same. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_group_t {
    /// KVT_RULE_*: how much of the past its layers need.
    pub rule: u32,
    /// KVT_DTYPE_*.
    pub dtype: u32,
    /// Heads that K and V are divided into; 0 = not said.
    pub kv_heads: u32,
    /// With KVT_RULE_WINDOW: how many tokens.
    pub window_tokens: u32,
    /// Bytes of K a token and layer; of the latent, where there is one.
    pub k_bytes: u64,
    /// Bytes of V a token and layer; 0 = it is in K.
    pub v_bytes: u64,
    /// With KVT_RULE_STATE: bytes of a layer's state; then no K, V or heads.
    pub state_bytes: u64,
    /// Its layers, in any order. Every layer from 0 on is in one group.
    pub layers: *const u16,
    /// How many.
    pub layer_count: u64,
}

/// What the KV of a model is made of. It is part of the namespace's key.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_layout_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Tokens of a chunk, the unit that is shared, 1 to 32768. A cell, a layer of
    /// a chunk, has at most 32 MiB.
    pub chunk_tokens: u32,
    /// Always 0.
    pub reserved: u32,
    /// Groups of layers, in any order.
    pub groups: *const kvt_group_t,
    /// How many, 1 to 64.
    pub group_count: u64,
    /// sizeof(kvt_group_t).
    pub stride_bytes: u64,
}

/// A namespace that somebody has open. Its sessions keep it.
pub(crate) struct Space {
    pub(crate) core: Arc<crate::base::core::Core>,
    pub(crate) store: Arc<Store>,
    pub(crate) number: u32,
    pub(crate) layers: usize,
    pub(crate) chunk_tokens: u32,
    pub(crate) key: Key,
}

impl Drop for Space {
    fn drop(&mut self) {
        let ended = self.store.let_go(|core| {
            core.close_space(self.number);
            Ok(())
        });
        if let Err(error) = ended {
            log::error!("a namespace was not closed in its store: {error}");
        }
    }
}

pub(crate) struct NamespaceNoun(pub(crate) Arc<Space>);

noun!(NamespaceNoun, kvt_namespace_t, 11, "namespace");

/// A field of an identity; null = absent, which is not the same as empty.
///
/// # Safety
/// `data` is null or valid for reads of `len` bytes, or up to a NUL.
unsafe fn field<'a>(data: *const c_void, len: u64, name: &str) -> Result<Option<&'a [u8]>> {
    // SAFETY: the caller's promise.
    let len = unsafe { length_of(name, data.cast(), len)? };
    match data.is_null() {
        true if len > 0 => fail!(Invalid, "{name} is null and has {len} bytes"),
        true => Ok(None),
        // SAFETY: the caller's promise.
        false => Ok(Some(unsafe { bytes(data.cast(), len)? })),
    }
}

/// The key of an identity with a layout.
///
/// # Safety
/// Its pointers are null or valid for their lengths.
unsafe fn key_of(given: &kvt_identity_t, layout: &Layout) -> Result<Key> {
    let shard = match (given.shard_index, given.shard_count) {
        (0, 0) => None,
        (index, count) => Some(Shard { index, count }),
    };
    let mut extra = Vec::new();
    // SAFETY: the caller's promise.
    let rows = unsafe {
        let (count, stride) = (given.extra_count, given.extra_stride_bytes);
        Strided::new(given.extra.cast_mut(), count, stride, MAX_EXTRA as u64)?
    };
    for i in 0..rows.len() {
        let row: kvt_identity_extra_t = rows.get(i)?;
        if row.reserved != 0 {
            fail!(Invalid, "reserved of extra field {i} is {}", row.reserved);
        }
        // SAFETY: the caller's promise.
        let value = unsafe { bytes(row.value.cast(), row.value_bytes)? };
        extra.push(Extra { tag: row.tag, value });
    }
    // SAFETY: the caller's promise.
    let identity = unsafe {
        Identity {
            model: field(given.model, given.model_bytes, "model")?,
            weights: field(given.weights, given.weights_bytes, "weights")?,
            layout: Some(Fingerprint::of(&layout.encode())),
            lora: field(given.lora, given.lora_bytes, "lora")?,
            media: field(given.media, given.media_bytes, "media")?,
            salt: field(given.salt, given.salt_bytes, "salt")?,
            shard,
            recipe: field(given.recipe, given.recipe_bytes, "recipe")?,
            extra: &extra,
        }
    };
    identity.key()
}

/// The codec that the recipe of an identity names.
///
/// # Safety
/// Its pointers are null or valid for their lengths.
unsafe fn codec_of(given: &kvt_identity_t) -> Result<Option<Codec>> {
    // SAFETY: the caller's promise.
    let recipe = unsafe { field(given.recipe, given.recipe_bytes, "recipe")? };
    recipe::codec_of(recipe.unwrap_or(&[])).map_err(|e| e.within("recipe"))
}

/// # Safety
/// Its pointers are null or valid for their lengths.
unsafe fn layout_of(given: &kvt_layout_t) -> Result<Layout> {
    if given.reserved != 0 {
        fail!(Invalid, "reserved of the layout is {}", given.reserved);
    }
    // SAFETY: the caller's promise.
    let rows = unsafe {
        let (count, stride) = (given.group_count, given.stride_bytes);
        Strided::new(given.groups.cast_mut(), count, stride, MAX_GROUPS as u64)?
    };
    let mut groups = Vec::new();
    for i in 0..rows.len() {
        let row: kvt_group_t = rows.get(i)?;
        // SAFETY: the caller's promise.
        let group = unsafe { group_of(&row) };
        groups.push(group.map_err(|e: Error| e.within(&format!("group {i}")))?);
    }
    Layout::new(given.chunk_tokens, groups)
}

/// # Safety
/// Its layers are valid for reads.
unsafe fn group_of(row: &kvt_group_t) -> Result<Group> {
    let rule = match row.rule {
        KVT_RULE_FULL => Rule::Full,
        KVT_RULE_WINDOW => Rule::Window(row.window_tokens),
        KVT_RULE_STATE => Rule::State,
        other => fail!(Invalid, "rule {other} is none of KVT_RULE_*"),
    };
    if row.window_tokens != 0 && row.rule != KVT_RULE_WINDOW {
        fail!(Invalid, "window_tokens without KVT_RULE_WINDOW");
    }
    let Some(dtype) = Dtype::from_code(row.dtype) else {
        fail!(Invalid, "dtype {} is none of KVT_DTYPE_*", row.dtype);
    };
    Ok(Group {
        // SAFETY: the caller's promise.
        layers: unsafe { numbers(row.layers, row.layer_count, MAX_LAYERS)? }.to_vec(),
        dtype,
        kv_heads: row.kv_heads,
        k_bytes: row.k_bytes,
        v_bytes: row.v_bytes,
        state_bytes: row.state_bytes,
        rule,
    })
}

/// Opens a namespace of a store, or finds it: equal identities and layouts are
/// the same one. What a store found on disk is there again under its key.
///
/// @param store     The store.
/// @param identity  Who may share; null = all fields absent.
/// @param layout    What the KV is made of.
/// @param flags     KVT_NAMESPACE_*.
/// @param out       The namespace; close it with kvt_namespace_close.
/// @param err       Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (also when it is open with other flags),
///         KVT_E_SPEC (the recipe names an unknown codec), KVT_E_LIMIT (65,536
///         namespaces, or those of 64 layouts, are open or have chunks that are
///         held or pinned; what nobody has open gives way), KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the namespace; structs and arrays are copied.
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state, arrays
/// for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_namespace_open(
    store: *const kvt_store_t,
    identity: *const kvt_identity_t,
    layout: *const kvt_layout_t,
    flags: u64,
    out: *mut *mut kvt_namespace_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_NAMESPACE_HOLES)?;
    if layout.is_null() {
        fail!(Invalid, "the layout is null");
    }
    require(out)?;
    let (layout, identity) = (layout_of(&read(layout)?)?, read(identity)?);
    let (key, layout, codec, tenant) =
        (key_of(&identity, &layout)?, layout, codec_of(&identity)?, identity.remote_tenant);
    let (layers, chunk_tokens) = (layout.layers(), layout.chunk_tokens());
    let opts = SpaceOpts { key, layout, holes: flags & KVT_NAMESPACE_HOLES != 0 };
    let noun = enter(store)?;
    let number = noun.store.with(|core| {
        let number = core.open_space(&opts)?;
        core.set_codec(number, codec);
        if let Err(error) = core.set_tenant(number, tenant) {
            core.close_space(number);
            return Err(error);
        }
        Ok(number)
    })?;
    let (core, store) = (noun.core.clone(), noun.store.clone());
    let ns = Space { core, store, number, layers, chunk_tokens, key };
    out.write(insert(NamespaceNoun(Arc::new(ns)))?);
    Ok(())
}

/// The key of a namespace: what its identity and layout come to.
///
/// @param ns    The namespace.
/// @param out_key  Receives KVT_KEY_BYTES bytes.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out_key` is null or valid for writes of 32 bytes.
#[capi]
pub unsafe extern "C" fn kvt_namespace_key(
    ns: *const kvt_namespace_t,
    out_key: *mut u8,
) -> kvt_status_t {
    require(out_key)?;
    let ns = inspect(ns)?;
    let key = ns.0.key.0;
    // SAFETY: room for the whole key, by the caller's promise.
    std::ptr::copy_nonoverlapping(key.as_ptr(), out_key, key.len());
    Ok(())
}

/// Closes a namespace. Its chunks stay in the store, its sessions stay open.
///
/// @param ns  Pointer to the handle, cleared on success; null, or a null
///               handle, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `space` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_namespace_close(ns: *mut *mut kvt_namespace_t) -> kvt_status_t {
    free(ns, |_| Ok(()))
}

// Lookups.

/// No tier.
pub const KVT_TIER_NONE: u32 = 0xFFFF_FFFF;

/// What is needed of the tokens is not all there: the engine computes them.
pub const KVT_RANGE_MISS: u32 = 0;
/// All that is needed of them can be loaded.
pub const KVT_RANGE_HIT: u32 = 1;
/// All that is needed of them can be loaded, once what is on its way has come.
pub const KVT_RANGE_PENDING: u32 = 2;
/// Nothing is needed of them: no layer reaches back so far.
pub const KVT_RANGE_UNNEEDED: u32 = 3;

/// Every layer of the chunk is in some tier, not all in the same perhaps.
pub const KVT_EXISTS_WHOLE: u32 = 16;

const _: () = assert!(KVT_EXISTS_WHOLE == WHOLE as u32);
/// Most rows of an array that a call fills.
pub(crate) const MAX_ROWS: u64 = 1 << 24;
/// Keys that are looked for while the lock is held.
const LOOKUP_GROUP: usize = 1024;

/// Tokens in a row of which the same can be said. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_range_t {
    /// The first one.
    pub first_token: u64,
    /// How many.
    pub tokens: u64,
    /// KVT_RANGE_*.
    pub state: u32,
    /// The farthest tier that something of them is loaded from, KVT_TIER_*; or
    /// KVT_TIER_NONE.
    pub tier: u32,
    /// Bytes that are on the device.
    pub device_bytes: u64,
    /// Bytes to be loaded from memory.
    pub host_bytes: u64,
    /// Bytes to be loaded from disk.
    pub disk_bytes: u64,
    /// Bytes to be loaded from elsewhere.
    pub remote_bytes: u64,
    /// Bytes that are on their way into the store, and in no tier yet.
    pub pending_bytes: u64,
    /// How long loading them takes by itself, predicted.
    pub load_ns: u64,
}

/// What a lookup has found in all.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_lookup_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Tokens that were asked for.
    pub tokens: u64,
    /// The longest prefix that can be gone on from now.
    pub reusable_tokens: u64,
    /// The same, once what is on its way has come.
    pub reusable_soon_tokens: u64,
    /// Bytes that are on the device.
    pub device_bytes: u64,
    /// Bytes to be loaded from memory.
    pub host_bytes: u64,
    /// Bytes to be loaded from disk.
    pub disk_bytes: u64,
    /// Bytes to be loaded from elsewhere.
    pub remote_bytes: u64,
    /// Bytes that are on their way into the store, and in no tier yet.
    pub pending_bytes: u64,
    /// How long loading all that takes, predicted, with what waits before it.
    pub load_ns: u64,
}

fn range(stretch: &Stretch) -> kvt_range_t {
    let [device_bytes, host_bytes, disk_bytes, remote_bytes] = stretch.bytes;
    kvt_range_t {
        first_token: stretch.first_token,
        tokens: stretch.tokens,
        state: match stretch.state {
            ReuseState::Miss => KVT_RANGE_MISS,
            ReuseState::Hit => KVT_RANGE_HIT,
            ReuseState::Pending => KVT_RANGE_PENDING,
            ReuseState::Unneeded => KVT_RANGE_UNNEEDED,
        },
        tier: stretch.farthest.map_or(KVT_TIER_NONE, |tier| tier as u32),
        device_bytes,
        host_bytes,
        disk_bytes,
        remote_bytes,
        pending_bytes: stretch.pending_bytes,
        load_ns: stretch.load_ns,
    }
}

fn summary(look: &Look) -> kvt_lookup_t {
    let [device_bytes, host_bytes, disk_bytes, remote_bytes] = look.bytes;
    kvt_lookup_t {
        struct_size: 0,
        tokens: look.tokens,
        reusable_tokens: look.now_tokens,
        reusable_soon_tokens: look.reusable_soon_tokens,
        device_bytes,
        host_bytes,
        disk_bytes,
        remote_bytes,
        pending_bytes: look.pending_bytes,
        load_ns: look.load_ns,
    }
}

/// Where the results of a lookup go.
pub(crate) struct Target {
    pub(crate) ranges: *mut kvt_range_t,
    pub(crate) capacity: u64,
    pub(crate) stride_bytes: u64,
    pub(crate) out_count: *mut u64,
    pub(crate) out: *mut kvt_lookup_t,
}

/// # Safety
/// As the exported functions that call it.
pub(crate) unsafe fn answer(
    ns: *const kvt_namespace_t,
    to: &Target,
    look: impl FnOnce(&Space) -> Result<Look>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let rows = unsafe {
        if !to.out.is_null() {
            check_out(to.out)?;
        }
        Strided::new(to.ranges, to.capacity, to.stride_bytes, MAX_ROWS)?
    };
    let ns = enter(ns)?;
    let look = look(&ns.0)?;
    // SAFETY: the caller's promise.
    unsafe {
        give(&rows, to.ranges.is_null(), look.ranges.iter().map(range), to.out_count)?;
        if !to.out.is_null() {
            write(to.out, &summary(&look));
        }
    }
    Ok(())
}

/// Says how far a sequence could go on with what a namespace has, and what that
/// takes: for schedulers that choose between places. No use is counted, nothing is
/// held: what is there now may be gone at the next call.
///
/// @param ns         The namespace.
/// @param tokens        The sequence.
/// @param token_count   How many, at most 2^27.
/// @param ranges        Receives all tokens as ranges, in their order; may be null
///                      with capacity 0 to learn how many there are.
/// @param capacity      Room there, in entries, at most 2^24.
/// @param stride_bytes  sizeof(kvt_range_t).
/// @param out_count     How many ranges there are; also written with KVT_E_TOO_SMALL.
///                      May be null.
/// @param out           The sum of it; start it with KVT_LOOKUP_INIT. May be null.
/// @param err           Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_INVALID, KVT_E_NOMEM,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `out` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_namespace_lookup(
    ns: *const kvt_namespace_t,
    tokens: *const u32,
    token_count: u64,
    ranges: *mut kvt_range_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out: *mut kvt_lookup_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = Target { ranges, capacity, stride_bytes, out_count, out };
    let tokens = numbers(tokens, token_count, MAX_TOKENS)?;
    answer(ns, &to, |ns| ns.store.lookup(ns.number, tokens))
}

/// The same for a sequence whose chunks' keys are known (docs/keys.md says how they
/// are made).
///
/// @param ns         The namespace.
/// @param keys          The keys of its full chunks, KVT_KEY_BYTES each.
/// @param key_count     How many.
/// @param token_count   Tokens of the sequence: as many as the keys stand for, or
///                      some more that fill no chunk.
/// @param ranges        See kvt_namespace_lookup.
/// @param capacity      See kvt_namespace_lookup.
/// @param stride_bytes  See kvt_namespace_lookup.
/// @param out_count     See kvt_namespace_lookup.
/// @param out           See kvt_namespace_lookup.
/// @param err           Explains a failure; may be null.
/// @return As kvt_namespace_lookup.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_namespace_lookup.
#[capi]
pub unsafe extern "C" fn kvt_namespace_lookup_keys(
    ns: *const kvt_namespace_t,
    keys: *const u8,
    key_count: u64,
    token_count: u64,
    ranges: *mut kvt_range_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out: *mut kvt_lookup_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = Target { ranges, capacity, stride_bytes, out_count, out };
    let keys = given_keys(keys, key_count)?;
    answer(ns, &to, |ns| ns.store.lookup_keys(ns.number, keys, token_count))
}

/// # Safety
/// `keys` is null with a count of 0, or valid for reads of so many keys.
unsafe fn given_keys<'a>(keys: *const u8, count: u64) -> Result<&'a [Key]> {
    if count > MAX_TOKENS as u64 {
        fail!(Limit, "{count} keys, at most {MAX_TOKENS} are allowed");
    }
    // SAFETY: the caller's promise.
    let keys = unsafe { bytes(keys, count * size_of::<Key>() as u64)? };
    Ok(Key::list(keys))
}

/// Says of chunks whether a namespace has them, and where. No use is counted, nothing
/// is held.
///
/// @param ns      The namespace.
/// @param keys       Keys of full chunks, KVT_KEY_BYTES each.
/// @param key_count  How many, at most 2^27.
/// @param out        Receives a byte for each: KVT_EXISTS_WHOLE when every layer of it
///                   is in some tier of the store, and 1 << KVT_TIER_* for each tier
///                   that has every layer. 1 << KVT_TIER_REMOTE is a hint, and never makes
///                   it whole: the remote had all of it when that was last heard of, and is
///                   not left alone now. 0 = it is not there, or layers of it are missing.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `keys` and `out` are null with a count of 0, or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_namespace_exists(
    ns: *const kvt_namespace_t,
    keys: *const u8,
    key_count: u64,
    out: *mut u8,
) -> kvt_status_t {
    let keys = given_keys(keys, key_count)?;
    if out.is_null() && !keys.is_empty() {
        fail!(Invalid, "the output pointer is null");
    }
    let ns = enter(ns)?;
    let mut found = [0; LOOKUP_GROUP];
    for (at, keys) in keys.chunks(LOOKUP_GROUP).enumerate() {
        ns.0.store.look(|core| core.exists(ns.0.number, keys, &mut found))??;
        // SAFETY: room for a byte a key, by the caller's promise.
        std::ptr::copy_nonoverlapping(found.as_ptr(), out.add(at * LOOKUP_GROUP), keys.len());
    }
    Ok(())
}

// Prefill cost.

/// What computing costs: n tokens after l tokens of context take
/// n * beta_ns + alpha_ns * (n * l + n * n / 2).
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_prefill_cost_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Nanoseconds a token and token of context.
    pub alpha_ns: f64,
    /// Nanoseconds a token.
    pub beta_ns: f64,
    /// Out: how often kvt_namespace_observe_prefill told something.
    pub observed: u64,
    /// Out: 1 when the cost was fixed.
    pub fixed: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Tells what the engine took to compute tokens: plans go by what was observed.
///
/// @param ns           The namespace.
/// @param context_tokens  Tokens before the first one that was computed.
/// @param tokens          How many were computed, at least 1.
/// @param duration_ns              How long that took, 1 to an hour.
/// @param err             Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_namespace_observe_prefill(
    ns: *const kvt_namespace_t,
    context_tokens: u64,
    tokens: u64,
    duration_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let noun = enter(ns)?;
    let ns = &noun.0;
    ns.store.with(|core| core.observe_prefill(ns.number, context_tokens, tokens, duration_ns))
}

/// Fixes what computing costs, whatever is observed.
///
/// @param ns  The namespace.
/// @param cost   alpha_ns and beta_ns of it, 0 to 1e15 each, are read; null = go by
///               what is observed again.
/// @param err    Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `cost` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_namespace_set_prefill_cost(
    ns: *const kvt_namespace_t,
    cost: *const kvt_prefill_cost_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let cost = match cost.is_null() {
        true => None,
        false => {
            let given = read(cost)?;
            Some(Cost { alpha: given.alpha_ns, beta: given.beta_ns })
        }
    };
    let noun = enter(ns)?;
    let ns = &noun.0;
    ns.store.with(|core| core.fix_prefill(ns.number, cost))
}

/// What computing costs, as plans see it now.
///
/// @param ns  The namespace.
/// @param out    Filled in; start it with KVT_PREFILL_COST_INIT.
/// @return KVT_OK; KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_namespace_prefill_cost(
    ns: *const kvt_namespace_t,
    out: *mut kvt_prefill_cost_t,
) -> kvt_status_t {
    check_out(out)?;
    let ns = inspect(ns)?;
    let prefill = ns.0.store.look(|core| core.prefill(ns.0.number))?;
    let Cost { alpha, beta } = prefill.cost();
    write(
        out,
        &kvt_prefill_cost_t {
            struct_size: 0,
            alpha_ns: alpha,
            beta_ns: beta,
            observed: prefill.observed(),
            fixed: u32::from(prefill.is_fixed()),
            reserved: 0,
        },
    );
    Ok(())
}

// Events of stores.

/// A whole chunk has come to a tier.
pub const KVT_STORE_EVENT_STORED: u32 = 1;
/// A chunk is whole in a tier no more.
pub const KVT_STORE_EVENT_REMOVED: u32 = 2;
/// Nothing of a namespace is left in any tier (kvt_namespace_clear).
pub const KVT_STORE_EVENT_CLEARED: u32 = 3;

const _: () = assert!(KVT_STORE_EVENT_STORED == Kind::Stored as u32);
const _: () = assert!(KVT_STORE_EVENT_REMOVED == Kind::Removed as u32);
const _: () = assert!(KVT_STORE_EVENT_CLEARED == Kind::Cleared as u32);

/// Events that are read while the lock is held.
const EVENT_GROUP: usize = 32;

/// Something that changed. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_store_event_t {
    /// Its number: each has the one after that of the event before it.
    pub number: u64,
    /// When, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// KVT_STORE_EVENT_STORED, KVT_STORE_EVENT_REMOVED or KVT_STORE_EVENT_CLEARED. There may be others
    /// one day: pass them by.
    pub kind: u32,
    /// Which tier, KVT_TIER_*; 0 with KVT_STORE_EVENT_CLEARED.
    pub tier: u32,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Which chunk of its sequence it is, from 0.
    pub position: u32,
    /// Its key.
    pub key: [u8; 32],
    /// The key before it in its sequence: the namespace's for the first.
    pub parent: [u8; 32],
    /// The namespace's key.
    pub namespace_key: [u8; 32],
}

fn event_for_c(event: &Event) -> kvt_store_event_t {
    let Event { number, at_ns, kind, tier, tokens, position, key, parent, namespace } = *event;
    kvt_store_event_t {
        number,
        at_ns,
        kind,
        tier,
        tokens,
        position,
        key,
        parent,
        namespace_key: namespace,
    }
}

/// Reads what changed in a store, the oldest first. The store keeps the newest events
/// (`events` of its spec) for any number of readers; one that is too slow hears how
/// many it has missed, and asks kvt_namespace_lookup or _exists.
///
/// @param store         The store.
/// @param cursor        In: the number of the first event that is wanted, 0 at the
///                      start, UINT64_MAX for those to come. Out: that of the next
///                      call.
/// @param events        Receives them.
/// @param capacity      Room there, in entries, at most 2^24; 0 = only move the cursor
///                      to what is still known.
/// @param stride_bytes  sizeof(kvt_store_event_t).
/// @param out_count     How many were written.
/// @param out_missed    How many between cursor and the next call's were lost; may be
///                      null.
/// @return KVT_OK, also when there is none; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `events` is valid for `capacity` * `stride_bytes`.
#[capi]
pub unsafe extern "C" fn kvt_store_events(
    store: *const kvt_store_t,
    cursor: *mut u64,
    events: *mut kvt_store_event_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out_missed: *mut u64,
) -> kvt_status_t {
    require(out_count)?;
    if cursor.is_null() || !cursor.is_aligned() {
        fail!(Invalid, "the cursor is null or not aligned");
    }
    let (rows, first) = (Strided::new(events, capacity, stride_bytes, MAX_ROWS)?, cursor.read());
    let (mut at, mut written, mut missed) = (first, 0, 0);
    let store = inspect(store)?;
    let mut group = [Event::default(); EVENT_GROUP];
    loop {
        let room = (rows.len() - written).min(EVENT_GROUP);
        let Some(part) = group.get_mut(..room) else { break };
        let (count, lost, next) = store.store.look(|core| {
            let (count, lost) = core.events.read(at, part);
            (count, lost, core.events.next_number())
        })?;
        for (i, event) in part.iter().take(count).enumerate() {
            rows.put(written + i, &event_for_c(event));
        }
        (written, missed) = (written + count, missed + lost);
        at = at.min(next).saturating_add(lost).saturating_add(count as u64);
        if count == 0 || written == rows.len() {
            break;
        }
    }
    cursor.write(at);
    out_count.write(written as u64);
    put(out_missed, missed);
    Ok(())
}

/// Begins an op that ends when there is an event to read: one with the number `from`, or a later
/// one. Never waits. The op's value is how many there are; more may have come when they are read.
/// Its queue is the descriptor (kvt_queue_fd) or the callback by which a reader is woken. One that
/// was woken reads all (kvt_store_events), and watches again from where that has left its cursor.
///
/// @param store   The store.
/// @param from    The number of the first event that is wanted, as kvt_store_events has left it
///                in its cursor; UINT64_MAX for the next one to come.
/// @param opts    Queue, tag, deadline; null for defaults.
/// @param out_op  Receives the op; null with a queue to be told by that alone.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_AGAIN (1,024 watches wait, as many ops are under way as may be, or the
///         queue is full), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the op. A store that is closed ends it with KVT_E_CANCELLED.
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_store_watch(
    store: *const kvt_store_t,
    from: u64,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    begin_one(opts, out_op, |opts| enter(store)?.store.watch(from, opts))
}

// Changes of open stores.

/// Goes on with another policy for a tier. It is told of every chunk with its last use and
/// its uses, and of what the one before has learned if it is of its kind: 0.1 to 0.2 s for
/// a million chunks, in which the store answers nobody. The next opening goes by its spec.
///
/// @param store       The store.
/// @param tier        KVT_TIER_HOST or KVT_TIER_DISK.
/// @param spec        The policy, as in the store's spec.
/// @param spec_bytes  Its length.
/// @param err         Explains a failure, with the offset in the spec and the nearest name
///                    that exists; may be null.
/// @return KVT_OK; KVT_E_SPEC, KVT_E_LIMIT, KVT_E_NOT_FOUND when there is no disk,
///         KVT_E_UNSUPPORTED for another tier, KVT_E_INVALID, KVT_E_NOMEM,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. Nothing changes on
///         failure.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_store_set_policy(
    store: *const kvt_store_t,
    tier: u32,
    spec: *const c_char,
    spec_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let spec = text("spec", spec, spec_bytes)?;
    let tier = Tier::from_code(tier)?;
    let store = enter(store)?;
    store.store.with(|core| core.set_policy(tier, spec))
}

/// Changes how many bytes of cells a store may have in memory, or of files on disk. What
/// is more than that leaves as it would for want of room, while everything else goes on:
/// nothing waits for it. The account of a budget bounds memory as well. The next opening
/// goes by its spec.
///
/// @param store  The store.
/// @param tier   KVT_TIER_HOST or KVT_TIER_DISK.
/// @param bytes  Most bytes; of memory at least 64 KiB, of a disk at least what an opening
///               wants.
/// @param err    Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID or KVT_E_LIMIT when it is too little,
///         KVT_E_NOT_FOUND when there is no disk, KVT_E_UNSUPPORTED for another tier,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. Nothing
///         changes on failure.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_store_set_limit(
    store: *const kvt_store_t,
    tier: u32,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let noun = enter(store)?;
    noun.store.with(|core| match tier {
        Tier::Host => core.set_host_bytes(bytes),
        Tier::Disk => core.set_disk_bytes(bytes),
        _ => fail!(Unsupported, "a store has no budget for {}", tier.name()),
    })
}

// Rows of stores.

/// Gets of which all was in memory.
pub const KVT_LATENCY_GET_HOST: u32 = 1;
/// Gets of which something had to be read from disk.
pub const KVT_LATENCY_GET_DISK: u32 = 2;
/// Puts until they are in memory.
pub const KVT_LATENCY_PUT_RAM: u32 = 3;
/// Puts until they are on disk.
pub const KVT_LATENCY_PUT_DISK: u32 = 4;
/// Puts until they are durable.
pub const KVT_LATENCY_PUT_DURABLE: u32 = 5;
/// Batches of copies between tensors and memory.
pub const KVT_LATENCY_COPY_BATCH: u32 = 6;
/// Batches of reads of the disk.
pub const KVT_LATENCY_READ_BATCH: u32 = 7;
/// Batches of writes to it.
pub const KVT_LATENCY_WRITE_BATCH: u32 = 8;
/// Syncs.
pub const KVT_LATENCY_SYNC_BATCH: u32 = 9;
/// Cleanings, sweeps, checkpoints and notes.
pub const KVT_LATENCY_UPKEEP_BATCH: u32 = 10;
/// Choices of who leaves memory: one in some is timed.
pub const KVT_LATENCY_HOST_DECISION: u32 = 11;
/// Choices of who leaves the disk: one in some is timed.
pub const KVT_LATENCY_DISK_DECISION: u32 = 12;
/// Batches of objects that come from the remote.
pub const KVT_LATENCY_FETCH_BATCH: u32 = 13;
/// Batches of objects that go there.
pub const KVT_LATENCY_UPLOAD_BATCH: u32 = 14;
/// Questions what the remote has.
pub const KVT_LATENCY_LOOKUP_BATCH: u32 = 15;

/// Kinds of the core's own that decisions come behind, in its order.
const BEFORE_DECISIONS: usize = KVT_LATENCY_UPKEEP_BATCH as usize;

const _: () = assert!(KVT_LATENCY_LOOKUP_BATCH as usize == TIMED.len() + 2);

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

fn tenant_for_c(row: &Tenant, is_rest: bool) -> kvt_tenant_t {
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
        let rest = (rest != Tenant::default()).then(|| tenant_for_c(&rest, true));
        core.tenants().iter().map(|row| tenant_for_c(row, false)).chain(rest).collect()
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

// Remotes.

/// Requests go to the remote.
pub const KVT_REMOTE_CIRCUIT_CLOSED: u32 = 1;
/// The remote is left alone for a while: it did not answer, or answered nonsense.
pub const KVT_REMOTE_CIRCUIT_OPEN: u32 = 2;
/// One request goes there, to see whether it is well again.
pub const KVT_REMOTE_CIRCUIT_PROBING: u32 = 3;

/// Most secrets.
const MAX_SECRETS: u64 = 16;

/// Something that only the remote's server is to see. Copied when a store is opened, wiped
/// when it is closed, and shown by no spec, log, error or control socket. Stands in arrays
/// only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_secret_t {
    /// Which it is: "password".
    pub name: *const c_char,
    /// Length of that.
    pub name_bytes: u64,
    /// The secret.
    pub secret: *const c_void,
    /// Its length, at most 4,096.
    pub secret_bytes: u64,
}

/// Copies the secrets of a store's options.
///
/// # Safety
/// The array, and what its entries point to, is null or valid for its lengths.
pub(crate) unsafe fn secrets_of(
    secrets: *const kvt_secret_t,
    count: u64,
    stride_bytes: u64,
) -> Result<Secrets> {
    // SAFETY: the caller's promise; the rows are only read.
    let rows = unsafe { Strided::new(secrets.cast_mut(), count, stride_bytes, MAX_SECRETS)? };
    let mut all = Secrets::default();
    for at in 0..rows.len() {
        let one = rows.get(at)?;
        // SAFETY: the caller's promise.
        unsafe {
            let name = text("name", one.name, one.name_bytes)?;
            all.add(name, text_bytes("secret", one.secret.cast(), one.secret_bytes)?)?;
        }
    }
    Ok(all)
}

/// What a store counts of its remote since it was opened, and how that is now.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_REMOTE_*: how it is to fetch from, and to ask; 0 = the store has no remote.
    pub reads: u32,
    /// KVT_REMOTE_*: how it is to send to.
    pub writes: u32,
    /// Times that a way to it was given up for a while.
    pub left_alone: u64,
    /// Names that were asked for.
    pub asked_names: u64,
    /// Of those, names that were there.
    pub found_names: u64,
    /// Names that were known to be there without asking.
    pub remembered_names: u64,
    /// Objects that came.
    pub fetched_objects: u64,
    /// Cells that came and were right.
    pub fetched_cells: u64,
    /// Bytes of those.
    pub fetched_bytes: u64,
    /// Bytes that came and were not wanted.
    pub wasted_bytes: u64,
    /// Objects that were said to be there and were not.
    pub absent_objects: u64,
    /// Objects, or cells of them, that were not what they should be.
    pub corrupt_objects: u64,
    /// Requests that were not answered in time, or not at all.
    pub late_requests: u64,
    /// Objects that were not fetched, because the remote was left alone.
    pub avoided_objects: u64,
    /// Objects that were sent.
    pub sent_objects: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Objects that somebody else had sent before.
    pub known_objects: u64,
    /// Objects that could not be sent.
    pub failed_sends: u64,
    /// Chunks that were not sent: not admitted, or too many waited.
    pub refused_chunks: u64,
    /// Objects that were taken away there: damaged ones, and what was dropped.
    pub removed_objects: u64,
}

fn state_of(breaker: &Breaker, way: Direction) -> u32 {
    match breaker.state(way) {
        BreakerState::Closed => KVT_REMOTE_CIRCUIT_CLOSED,
        BreakerState::Open => KVT_REMOTE_CIRCUIT_OPEN,
        BreakerState::HalfOpen => KVT_REMOTE_CIRCUIT_PROBING,
    }
}

fn remote_stats_for_c(breaker: &Breaker, counted: &RemoteCounters) -> kvt_remote_stats_t {
    kvt_remote_stats_t {
        struct_size: size_of::<kvt_remote_stats_t>() as u64,
        reads: state_of(breaker, Direction::Read),
        writes: state_of(breaker, Direction::Write),
        left_alone: breaker.opened(),
        asked_names: counted.asked,
        found_names: counted.found,
        remembered_names: counted.remembered,
        fetched_objects: counted.fetched,
        fetched_cells: counted.cells,
        fetched_bytes: counted.fetched_bytes,
        wasted_bytes: counted.wasted_bytes,
        absent_objects: counted.absent,
        corrupt_objects: counted.corrupt,
        late_requests: counted.late,
        avoided_objects: counted.avoided,
        sent_objects: counted.sent,
        sent_bytes: counted.sent_bytes,
        known_objects: counted.known_there,
        failed_sends: counted.failed_sends,
        refused_chunks: counted.refused,
        removed_objects: counted.removed,
    }
}

/// What a store counts of its remote; also of a poisoned one. Of a store without a remote all
/// is 0.
///
/// @param store  The store.
/// @param out    Filled in; start it with KVT_REMOTE_STATS_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_store_remote_stats(
    store: *const kvt_store_t,
    out: *mut kvt_remote_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let store = inspect(store)?;
    let stats = store.store.look(|core| {
        let both = core.remote_breaker().zip(core.remote_counters());
        both.map_or(kvt_remote_stats_t::zeroed(), |(breaker, counted)| {
            remote_stats_for_c(breaker, &counted)
        })
    })?;
    write(out, &stats);
    Ok(())
}

// Remotes of the engine: a table of callbacks.

/// A put does nothing where there is an object of that name; without it the last writer wins.
pub const KVT_REMOTE_FIRST_WINS: u64 = 1;

/// Most objects of a batch that an engine's remote is given.
const MAX_BATCH: u32 = 4096;

/// A piece of memory. Pieces of a get that nobody wants may be the same memory in several items;
/// those of a put are not to be written. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_part_t {
    /// Where it is, in host memory.
    pub address: *mut c_void,
    /// How long.
    pub bytes: u64,
}

/// An object of a batch. Stands in arrays only; the next is `stride_bytes` behind it.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_item_t {
    /// Its name: letters, digits, '.', '_', '-' and '/'. Not NUL-terminated.
    pub name: *const c_char,
    /// Length of that.
    pub name_bytes: u64,
    /// Where its bytes go (get) or come from (put), one piece after the other.
    pub parts: *const kvt_remote_part_t,
    /// How many pieces.
    pub part_count: u64,
    /// Of a get: the first of its bytes that is wanted.
    pub offset: u64,
    /// Written by the callback. Of a get: how many bytes came, fewer than there is room for where
    /// the object ends. Of a question: how long the object is. Of a put: 1 if it was there.
    pub bytes: u64,
    /// Written by the callback: KVT_OK; KVT_E_NOT_FOUND; KVT_E_AGAIN (at another time),
    /// KVT_E_TIMEOUT, KVT_E_BUDGET (full), KVT_E_LIMIT (it takes none that long), KVT_E_CORRUPT,
    /// KVT_E_UNAVAILABLE. It is KVT_E_AGAIN before.
    pub status: kvt_status_t,
    /// Always 0.
    pub reserved: u32,
}

/// Does something with all objects of a batch until a deadline (CLOCK_MONOTONIC). Each has a
/// status of its own afterwards, and no memory of the batch is touched any more. Anything but
/// KVT_OK is the status of all that have none.
pub type kvt_remote_batch_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        items: *mut kvt_remote_item_t,
        count: u64,
        stride_bytes: u64,
        deadline_ns: u64,
    ) -> kvt_status_t,
>;

/// A remote of the engine's own, for `remote=custom(...)` in a store's spec. Its functions are
/// called from threads of the store, from several at once, with no lock held; they must not
/// unwind, and must not call the store that they are of. What they say of being there is a hint,
/// and what they give is checked: they may be wrong, but not late.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_custom_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_REMOTE_FIRST_WINS.
    pub flags: u64,
    /// Bytes of an object that it is quick with; 0 = 1 MiB.
    pub preferred_bytes: u64,
    /// Most bytes of an object; 0 = as many as an object can have.
    pub max_bytes: u64,
    /// Most objects of a batch; 0 = 32.
    pub batch: u32,
    /// Always 0.
    pub reserved: u32,
    /// Fetches objects, or parts of them.
    pub get: kvt_remote_batch_fn,
    /// Stores objects.
    pub put: kvt_remote_batch_fn,
    /// Says which are there, and how long they are.
    pub exists: kvt_remote_batch_fn,
    /// Takes objects away; null = they are never taken away.
    pub remove: kvt_remote_batch_fn,
    /// Handed to all of them; taken over on success only.
    pub user_data: *mut c_void,
    /// Releases user_data, once the store is closed; may be null.
    pub destroy: kvt_destroy_fn,
}

#[derive(Clone, Copy)]
struct Table {
    get: kvt_remote_batch_fn,
    put: kvt_remote_batch_fn,
    exists: kvt_remote_batch_fn,
    remove: kvt_remote_batch_fn,
}

/// A remote, and what stands before its names.
#[derive(Clone)]
struct Called {
    callback: Arc<Callback<Table>>,
    caps: Caps,
    prefix: Prefix,
}

/// A way to it: memory for batches.
struct CustomClient {
    remote: Called,
    items: Vec<kvt_remote_item_t>,
    parts: Vec<kvt_remote_part_t>,
    names: Vec<u8>,
}

// SAFETY: pointers in its tables are of the batch that is under way, and of no use after it.
unsafe impl Send for CustomClient {}

/// The remote of a store's options, and who is to keep its data once the store is open.
///
/// # Safety
/// `custom` is null or valid for the size it states; its functions are what they say.
pub(crate) unsafe fn remote_of(
    custom: *const kvt_remote_custom_t,
) -> Result<Option<(CustomRemote, impl FnOnce())>> {
    if custom.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(custom)? };
    known_flags(given.flags, KVT_REMOTE_FIRST_WINS)?;
    if given.reserved != 0 || given.batch > MAX_BATCH {
        fail!(
            Invalid,
            "reserved is {}, batch {} (at most {MAX_BATCH})",
            given.reserved,
            given.batch
        );
    }
    let kvt_remote_custom_t { get, put, exists, remove, user_data, destroy, .. } = given;
    if get.is_none() || put.is_none() || exists.is_none() {
        fail!(Invalid, "a remote needs get, put and exists");
    }
    let or = |given: u64, usual: u64| if given == 0 { usual } else { given };
    let caps = Caps {
        preferred_bytes: or(given.preferred_bytes, 1 << 20),
        max_bytes: or(given.max_bytes, u64::MAX),
        batch: or(given.batch.into(), 32) as usize,
        ranges: true,
        first_wins: given.flags & KVT_REMOTE_FIRST_WINS != 0,
        // What the engine's own keeps is the engine's to count.
        client_bytes: 0,
    };
    let table = Table { get, put, exists, remove };
    let callback = Arc::new(Callback::new(table, user_data, destroy));
    let keeper = callback.clone();
    let make = move |prefix: &Prefix| {
        let (callback, prefix) = (callback.clone(), prefix.clone());
        Box::new(Called { callback, caps, prefix }) as Box<dyn Remote>
    };
    Ok(Some((CustomRemote(Arc::new(make)), move || keeper.keep())))
}

impl Remote for Called {
    fn caps(&self) -> Caps {
        self.caps
    }

    fn client(&self) -> Box<dyn Client> {
        let (items, parts, names) = (Vec::new(), Vec::new(), Vec::new());
        Box::new(CustomClient { remote: self.clone(), items, parts, names })
    }
}

/// What a callback's status says.
fn trouble(status: kvt_status_t) -> RemoteError {
    match Status::from_code(status) {
        Some(Status::NotFound) => RemoteError::Absent,
        Some(Status::Again) => RemoteError::Busy,
        Some(Status::Timeout) => RemoteError::Timeout,
        Some(Status::Budget | Status::NoMem) => RemoteError::Full,
        Some(Status::Limit) => RemoteError::TooLong,
        Some(Status::Corrupt) => RemoteError::Damaged,
        Some(Status::Unsupported) => RemoteError::Denied,
        _ => RemoteError::Unreachable,
    }
}

/// Which of the callbacks.
type Which = fn(&Table) -> kvt_remote_batch_fn;

impl CustomClient {
    fn clear(&mut self) {
        self.items.clear();
        self.parts.clear();
        self.names.clear();
    }

    fn add(&mut self, name: &Name, parts: &[Part], offset: u64) {
        let begin = self.names.len();
        self.remote.prefix.write(name, &mut self.names);
        let name_bytes = (self.names.len() - begin) as u64;
        let of =
            |part: &Part| kvt_remote_part_t { address: part.address.cast(), bytes: part.bytes };
        self.parts.extend(parts.iter().map(of));
        self.items.push(kvt_remote_item_t {
            name: std::ptr::null(),
            name_bytes,
            parts: std::ptr::null(),
            part_count: parts.len() as u64,
            offset,
            bytes: 0,
            status: Status::Again.code(),
            reserved: 0,
        });
    }

    /// Calls; each item's status and bytes are known then.
    fn call(&mut self, which: Which, deadline_ns: u64) {
        let (mut name, mut part) = (0, 0);
        for item in &mut self.items {
            item.name = self.names.as_ptr().wrapping_add(name).cast();
            item.parts = self.parts.as_ptr().wrapping_add(part);
            name += item.name_bytes as usize;
            part += item.part_count as usize;
        }
        for items in self.items.chunks_mut(self.remote.caps.batch) {
            let status = self.remote.callback.call(|table, user_data| {
                let Some(function) = which(&table) else { return Status::Unsupported.code() };
                let (count, stride) = (items.len() as u64, size_of::<kvt_remote_item_t>() as u64);
                // SAFETY: function and data came together; the tables are borrowed for the call.
                unsafe { function(user_data, items.as_mut_ptr(), count, stride, deadline_ns) }
            });
            if status == Status::Ok.code() {
                continue;
            }
            let unsaid = Status::Again.code();
            items.iter_mut().filter(|item| item.status == unsaid).for_each(|i| i.status = status);
        }
    }

    /// What each came to.
    fn results(&self) -> impl Iterator<Item = std::result::Result<u64, RemoteError>> + '_ {
        self.items.iter().map(|item| match item.status == Status::Ok.code() {
            true => Ok(item.bytes),
            false => Err(trouble(item.status)),
        })
    }
}

impl Client for CustomClient {
    fn greet(&mut self, deadline_ns: u64) -> Result<Server> {
        self.clear();
        self.add(&Name { tenant: 0, hash: [0; 20] }, &[], 0);
        self.call(|table| table.exists, deadline_ns);
        match self.results().next() {
            Some(Ok(_) | Err(RemoteError::Absent)) => {}
            Some(Err(trouble)) => return Err(Error::from(trouble)),
            None => return Err(Status::Invalid.into()),
        }
        let words = "a remote of the engine's own".to_string();
        Ok(Server { words, warnings: Vec::new() })
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        self.clear();
        for at in 0..gets.items.len() {
            let Some(get) = gets.items.get(at) else { break };
            let (name, offset) = (get.name, get.offset);
            self.add(&name, gets.parts_of(at), offset);
        }
        self.call(|table| table.get, deadline_ns);
        let rooms: Vec<u64> = (0..gets.items.len()).map(|at| gets.room_of(at)).collect();
        for ((get, result), room) in gets.items.iter_mut().zip(self.results()).zip(rooms) {
            // More than there is room for cannot have come.
            get.result = result
                .and_then(|came| if came <= room { Ok(came) } else { Err(RemoteError::Malformed) });
        }
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        self.clear();
        for at in 0..puts.items.len() {
            let Some(put) = puts.items.get(at) else { break };
            let name = put.name;
            self.add(&name, puts.parts_of(at), 0);
        }
        self.call(|table| table.put, deadline_ns);
        for (put, result) in puts.items.iter_mut().zip(self.results()) {
            put.result = result.map(|was_there| was_there != 0);
        }
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.clear();
        queries.items.iter().for_each(|ask| self.add(&ask.name, &[], 0));
        self.call(|table| table.exists, deadline_ns);
        queries.items.iter_mut().zip(self.results()).for_each(|(ask, result)| ask.result = result);
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.clear();
        queries.items.iter().for_each(|ask| self.add(&ask.name, &[], 0));
        self.call(|table| table.remove, deadline_ns);
        for (ask, result) in queries.items.iter_mut().zip(self.results()) {
            ask.result = match result {
                Err(RemoteError::Absent) => Ok(0),
                result => result,
            };
        }
    }
}
