//! Stores, namespaces and remotes: where KV is kept, and for which model.
//!
//! A store keeps cells (the KV of a chunk of tokens in one layer) in tiers: device memory, host
//! memory, a disk, a remote. A namespace is a model with its layout and tenant: sessions share KV
//! if their namespaces are equal. Names of KV are hashes of the namespace and of all tokens before
//! a chunk's end.
//!
//! Life cycle: kvt_open (or kvt_store_open on a runtime of one's own), kvt_namespace_open,
//! sessions, kvt_namespace_close, kvt_store_close, which writes chunks that are in memory only to
//! disk. A store that is opened on the same directory again finds them.
//!
//! ```c
//! const char *spec = "store(host=8GiB, disk=disk(path=\"/var/cache/kv\", bytes=200GiB))";
//! if (kvt_open(spec, KVT_NUL_TERMINATED, &store, &err) != KVT_OK) return fail(err);
//! kvt_identity_t model = KVT_IDENTITY_INIT;
//! model.model = "llama-3-8b", model.model_bytes = KVT_NUL_TERMINATED;
//! model.weights = digest, model.weights_bytes = sizeof digest;
//! kvt_layout_t layout = KVT_LAYOUT_INIT; /* 32 layers, 8 KV heads of 128, chunks of 64 tokens */
//! if (kvt_layout_gqa(&layout, 32, 8, 128, KVT_DTYPE_F16, 64, &err) != KVT_OK) return fail(err);
//! if (kvt_namespace_open(store, &model, &layout, 0, &ns, &err) != KVT_OK) return fail(err);
//! kvt_lookup_t found = KVT_LOOKUP_INIT;
//! if (kvt_namespace_lookup(ns, tokens, count, NULL, 0, sizeof(kvt_range_t), NULL, &found, &err))
//!     return fail(err);
//! use(&found.reusable_tokens); /* the longest prefix that need not be computed */
//! ```

use std::ffi::{c_char, c_void};

use crate::base::budget::Tier;
use crate::base::callback::{Foreign as Callback, refuse_reentry};
use crate::base::core::Core;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::{
    HasSize, Plain, Strided, bytes, capi, check_out, enter, free, give, give_text, insert, inspect,
    known_flags, length_of, no_reserved, noun, numbers, pin_optional, put, read, require, text,
    text_bytes, write,
};
use crate::ffi::base::{kvt_destroy_fn, kvt_error_t, kvt_status_t};
use crate::ffi::device::{device_of, kvt_device_t};
use crate::ffi::memory::{
    KVT_DTYPE_BF16, KVT_DTYPE_F8_E4M3, KVT_DTYPE_F8_E5M2, KVT_DTYPE_F32, KVT_DTYPE_I4,
    KVT_DTYPE_I8, kvt_budget_t, kvt_dtype_t, kvt_tier_t,
};
use crate::ffi::policy::{kvt_policy_log_entry_t, log_entry};
use crate::ffi::runtime::{
    RuntimeHandle, RuntimeNoun, begin_one, kvt_op_t, kvt_runtime_t, kvt_submit_opts_t, on_runtime,
};
use crate::format::keys::identity::{Extra, Identity, MAX_EXTRA, Shard};
use crate::meta::chunks::WHOLE;
use crate::meta::cost::Cost;
use crate::meta::dtype::Dtype;
use crate::meta::key::Key;
use crate::meta::layout::{Group, Layout, MAX_GROUPS, MAX_LAYERS, Rule};
use crate::meta::reuse::State as ReuseState;
use crate::store::bundle::Bundle;
use crate::store::events::{Event, Kind};
use crate::store::handle::Store;
use crate::store::pool::calls;
use crate::store::pool::wire::Raw;
use crate::store::spec::{CustomRemote, Fields, Secrets, StoreSpec};
use crate::store::state::plans::{LookupRange, LookupResult};
use crate::store::state::quotas::TenantUse;
use crate::store::state::snapshot::{ALL_READ, MOST_EVICTIONS};
use crate::store::state::stats::{Engine, Latency, TIMED, Tenant};
use crate::store::state::{StoreState, Write};
use crate::store::token_path::MAX_TOKENS;
use crate::tier::remote::breaker::State as BreakerState;
use crate::tier::remote::name::Prefix;
use crate::tier::remote::{
    Caps, Client, Gets, Name, Part, Puts, Queries, Remote, RemoteError, Server,
};

// Stores.

/// A store: keeps KV in tiers (DEVICE, HOST, DISK, REMOTE).
pub struct kvt_store_t(());

/// When chunks are written to disk.
pub type kvt_write_t = u32;

/// Chunks are written to disk right after each put.
pub const KVT_WRITE_THROUGH: kvt_write_t = 1;
/// Chunks are written to disk when their memory is needed.
pub const KVT_WRITE_BACK: kvt_write_t = 2;
/// Chunks are written to disk only when a put's `level` or kvt_session_demote asks for it, and when
/// their memory is needed while they are referenced, pinned or continued by other chunks.
pub const KVT_WRITE_NEVER: kvt_write_t = 3;
/// Default: chunks are written to disk in the background, about 1 s after the put (`age` in the
/// spec).
pub const KVT_WRITE_BEHIND: kvt_write_t = 4;

/// How files are read and written: the store has no disk, worker threads make one request at a time
/// (THREADS), or io_uring carries many at once (URING).
pub type kvt_io_t = u32;

pub const KVT_IO_NONE: kvt_io_t = 0;
pub const KVT_IO_THREADS: kvt_io_t = 1;
pub const KVT_IO_URING: kvt_io_t = 2;

const _: () =
    assert!(KVT_IO_URING == Engine::Uring as u32 && KVT_IO_THREADS == Engine::Threads as u32);

/// Options of kvt_store_open. A field that is set overrides the spec's parameter that its comment
/// names, and is checked by the same rules.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_store_opts_t {
    pub struct_size: u64,
    /// None are defined: 0.
    pub flags: u64,
    /// Spec (docs/reference/specs.md), such as
    /// "store(host=8GiB, disk=disk(path=\"kv\", bytes=200GiB))"; null = "store(host=1GiB)".
    pub spec: *const c_char,
    pub spec_bytes: u64,
    /// Limit of cells in host memory, at least 64 KiB (`host`); 0 = as in the spec.
    pub host_bytes: u64,
    /// Limit of all files (`disk(bytes=...)`); 0 = as in the spec.
    pub disk_bytes: u64,
    /// Directory of the disk tier, UTF-8 (`disk(path=...)`); null = as in the spec.
    pub disk_path: *const c_char,
    pub disk_path_bytes: u64,
    /// Eviction policy of HOST (`policy`); null = as in the spec.
    pub policy: *const c_char,
    pub policy_bytes: u64,
    /// Eviction policy of DISK (`disk_policy`); null = as in the spec.
    pub disk_policy: *const c_char,
    pub disk_policy_bytes: u64,
    /// (`write`); 0 = as in the spec.
    pub write: kvt_write_t,
    pub reserved: u32,
    /// Device of the same runtime that copies between the engine and the store; null = the CPU. If
    /// it has memory of its own, transfers accept views of that memory, and
    /// `device=device(capacity=8GiB)` in the spec adds a DEVICE tier.
    pub device: *const kvt_device_t,
    /// Credentials for the remote's server; null = none.
    pub secrets: *const kvt_secret_t,
    /// At most 16.
    pub secret_count: u64,
    pub secret_stride_bytes: u64,
    /// Custom backend, required by `remote=custom(...)` in the spec; null = none.
    pub remote: *const kvt_remote_custom_t,
}

/// A store, and the runtime it belongs to.
pub(crate) struct StoreNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) store: Arc<Store>,
    /// The handle of its runtime.
    runtime: RuntimeHandle,
    /// kvt_open opened the runtime for this store: it closes with the store.
    owns_runtime: bool,
}

noun!(StoreNoun, kvt_store_t, 10, "store");

/// Parses the options of a store.
///
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
        other => fail!(Invalid, "write is {other}: use one of KVT_WRITE_*, or 0 for the spec's"),
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

/// Opens a store with a runtime and a budget of its own. kvt_store_close closes them, too. A store
/// with a device, with secrets or with a custom remote needs kvt_store_open.
///
/// @param spec  "store(...)", or "kvtier(workers=4, budget=budget(host=8GiB), store=store(...))"
///              with parameters of the runtime and the budget; null = "store(host=1GiB)".
/// @return As kvt_store_open.
#[capi]
pub unsafe extern "C" fn kvt_open(
    spec: *const c_char,
    spec_bytes: u64,
    out: *mut *mut kvt_store_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let spec = if spec.is_null() { "" } else { text("spec", spec, spec_bytes)? };
    let bundle = Bundle::parse(spec)?;
    if bundle.store.has_custom_remote() {
        fail!(
            Invalid,
            "the spec has remote=custom(...): open the store with kvt_store_open, which takes the \
             callbacks"
        );
    }
    let (runtime, store) = bundle.open()?;
    let (core, store) = (runtime.core().clone(), Arc::new(store));
    let runtime = RuntimeHandle::of(insert(RuntimeNoun(runtime))?);
    match insert(StoreNoun { core, store, runtime, owns_runtime: true }) {
        Ok(handle) => out.write(handle),
        Err(error) => {
            let mut runtime = runtime.get();
            free(&raw mut runtime, |_| Ok(()))?;
            return Err(error);
        }
    }
    Ok(())
}

/// Opens a store: creates or recovers its disk tier and starts its threads. Waits for the disk, and
/// for the remote up to `connect` plus `timeout` of its spec. An unreachable remote is retried
/// later, unless the spec has `require=true`.
///
/// @param budget  Budget of the same runtime that is charged; null = a private one, limited to the
///                memory that the machine or cgroup has available, less a reserve.
/// @return KVT_E_INVALID (also: the remote rejects the credentials or cannot be authenticated),
///         KVT_E_SPEC, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_BUSY (directory or control socket in use),
///         KVT_E_STATE (the control path exists and is not a socket of this user), KVT_E_NOT_FOUND
///         (the parent of the disk's directory is missing), KVT_E_IO, KVT_E_CORRUPT,
///         KVT_E_UNAVAILABLE or KVT_E_TIMEOUT (a required remote cannot be reached),
///         KVT_E_UNSUPPORTED (the remote's backend is not built in).
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
    let take_over = custom.map(|(custom, take_over)| {
        spec.custom_remote = Some(custom);
        take_over
    });
    if take_over.is_some() && !spec.has_custom_remote() {
        fail!(
            Invalid,
            "a custom remote is set in the options, but not in the spec: add remote=custom(...) to \
             the spec, or leave remote null"
        );
    }
    let budget = pin_optional(budget)?.map(|noun| noun.0.clone());
    let handle = RuntimeHandle::of(runtime.cast_mut());
    let noun = on_runtime(runtime, |core| {
        core.check_open()?;
        if budget.as_ref().is_some_and(|budget| !Arc::ptr_eq(budget.core(), core)) {
            fail!(Invalid, "the budget belongs to another runtime: pass one of the same runtime");
        }
        let store = match device_of(core, given.device)? {
            Some(device) => Store::open_with(core, budget.as_ref(), &spec, device)?,
            None => Store::open(core, budget.as_ref(), &spec)?,
        };
        let (core, store) = (core.clone(), Arc::new(store));
        Ok(StoreNoun { core, store, runtime: handle, owns_runtime: false })
    })?;
    let handle = insert(noun)?;
    take_over.into_iter().for_each(|take_over| take_over());
    out.write(handle);
    Ok(())
}

/// Closes a store: refuses new work, cancels open ops and waits for them. Then writes full chunks
/// that are in memory only to disk, as admission and space allow, unless `write=never`. At last
/// ends the threads, frees the memory and the directory, and closes the runtime that kvt_open made.
/// Open namespaces and sessions return KVT_E_CLOSED from then on and are closed as usual; results
/// of ops stay.
///
/// @return KVT_E_BUSY (deadline: the store stays closing and valid, call again), KVT_E_IO (the disk
///         failed, but the store is closed: call again to free the handle).
#[capi]
pub unsafe extern "C" fn kvt_store_close(
    store: *mut *mut kvt_store_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let close = |noun: &crate::base::slab::Pin<'static, StoreNoun>| {
        refuse_reentry()?;
        noun.store.close(deadline_ns)?;
        if noun.owns_runtime { close_runtime_of(noun, deadline_ns) } else { Ok(()) }
    };
    free(store, close)
}

/// Closes the runtime that kvt_open made for a store, which is closed itself.
fn close_runtime_of(store: &StoreNoun, deadline_ns: u64) -> Result<()> {
    let mut runtime = store.runtime.get();
    // SAFETY: the handle is in a variable of this function.
    let closed = unsafe {
        free(&raw mut runtime, |noun: &crate::base::slab::Pin<'static, RuntimeNoun>| {
            noun.0.close(deadline_ns)
        })
    };
    match closed {
        // The caller closed it, against the rules.
        Err(error) if error.status() == Status::Handle => Ok(()),
        closed => closed,
    }
}

/// Returns the runtime of a store: the argument of kvt_store_open, or the runtime that kvt_open
/// made. Do not close the latter: it closes with the store.
#[capi]
pub unsafe extern "C" fn kvt_store_runtime(
    store: *const kvt_store_t,
    out: *mut *mut kvt_runtime_t,
) -> kvt_status_t {
    require(out)?;
    let store = inspect(store)?;
    out.write(store.runtime.get());
    Ok(())
}

// Statistics of stores.

pub use crate::store::counters::{
    RemoteStats as kvt_remote_stats_t, StoreStats as kvt_store_stats_t,
};

// SAFETY: all their fields are whole numbers and floats, for which any bytes are a value. `Rows`
// accepts no other types.
unsafe impl Plain for kvt_store_stats_t {}
// SAFETY: as above.
unsafe impl Plain for kvt_remote_stats_t {}
// SAFETY: their first field is `struct_size: u64`.
unsafe impl HasSize for kvt_store_stats_t {}
// SAFETY: as above.
unsafe impl HasSize for kvt_remote_stats_t {}

/// Reads counters since the open, and current state. Works on a poisoned store, too.
#[capi]
pub unsafe extern "C" fn kvt_store_stats(
    store: *const kvt_store_t,
    out: *mut kvt_store_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let store = inspect(store)?;
    let stats = store.store.ask(|core| Raw(core.stats_now()), || calls::Stats {})?.0;
    write(out, &stats);
    Ok(())
}

/// Writes the statistics of a store as Prometheus text, not NUL-terminated.
///
/// @param out_capacity  The text grows between calls: leave some spare room.
/// @param out_bytes     May be null.
/// @return KVT_E_TOO_SMALL.
#[capi]
pub unsafe extern "C" fn kvt_store_metrics(
    store: *const kvt_store_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    if out.is_null() && out_capacity > 0 {
        fail!(
            Invalid,
            "out is null, but out_capacity is {out_capacity}: pass memory, or 0 to ask for the size"
        );
    }
    let store = inspect(store)?;
    let text = store.store.ask(|core| core.metrics_text(), || calls::MetricsText {})?;
    give_text(&text, out, out_capacity, out_bytes)
}

// Namespaces.

/// A namespace of a store: its sessions share the KV of common prefixes.
pub struct kvt_namespace_t(());

/// Flags of a namespace.
pub type kvt_namespace_flags_t = u64;

/// The engine can compute a missing chunk (a hole) before reused ones, so chunks are evicted in any
/// order. Without this flag a chunk is evicted only after the chunks that continue it.
pub const KVT_NAMESPACE_HOLES: kvt_namespace_flags_t = 1;

/// Bytes of a namespace's or chunk's key.
pub const KVT_KEY_BYTES: u32 = 32;

/// Reuse rules: the earlier tokens that a layer needs in order to continue. FULL: all. WINDOW: the
/// last window_tokens. STATE: its state at exactly that point, which is kept at the ends of chunks.
pub type kvt_rule_t = u32;

pub const KVT_RULE_FULL: kvt_rule_t = 0;
pub const KVT_RULE_WINDOW: kvt_rule_t = 1;
pub const KVT_RULE_STATE: kvt_rule_t = 2;

const _: () = assert!(KVT_DTYPE_F32 == Dtype::F32.code() && KVT_DTYPE_BF16 == Dtype::Bf16.code());
const _: () = assert!(KVT_DTYPE_F8_E4M3 == Dtype::F8E4m3.code());
const _: () = assert!(KVT_DTYPE_F8_E5M2 == Dtype::F8E5m2.code());
const _: () = assert!(KVT_DTYPE_I8 == Dtype::I8.code() && KVT_DTYPE_I4 == Dtype::I4.code());

/// A field of an identity that the engine defines. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_identity_extra_t {
    /// At least 0x80000000, unique in the identity.
    pub tag: u32,
    pub reserved: u32,
    /// Bytes that are hashed unchanged.
    pub value: *const c_void,
    /// At most 65536.
    pub value_bytes: u64,
}

/// Everything that KV depends on beside its tokens: sessions share KV if all fields are equal.
/// Fields are bytes, at most 65536 each, hashed unchanged. A null field is absent, which differs
/// from an empty one (a pointer with length 0). docs/internals/keys.md defines the hash.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_identity_t {
    pub struct_size: u64,
    /// Name of the model.
    pub model: *const c_void,
    pub model_bytes: u64,
    /// Fingerprint of the weights, the engine's own.
    pub weights: *const c_void,
    pub weights_bytes: u64,
    /// Adapters that change the KV, in the order they apply.
    pub lora: *const c_void,
    pub lora_bytes: u64,
    /// Digest of media that all sequences of the namespace have.
    pub media: *const c_void,
    pub media_bytes: u64,
    /// Separates the KV of tenants; long and random.
    pub salt: *const c_void,
    pub salt_bytes: u64,
    /// How KV is computed and encoded where that is not exact: a canonical spec. Its argument
    /// `codec` (none, lz4, int8) sets the codec on disk; without it the store's applies.
    pub recipe: *const c_void,
    pub recipe_bytes: u64,
    /// Part of the KV that this rank holds, below shard_count.
    pub shard_index: u32,
    /// Number of parts; 0 = all ranks hold the same KV (shard_index is 0).
    pub shard_count: u32,
    /// Fields that the engine defines, in any order.
    pub extra: *const kvt_identity_extra_t,
    /// At most 64.
    pub extra_count: u64,
    pub extra_stride_bytes: u64,
    /// Tenant in the names of the namespace's objects at a remote (`prefix/t42/...`), for access
    /// rules; 0 = no tenant. Not part of the identity.
    pub remote_tenant: u64,
}

/// Layers with equal sizes, dtype and reuse rule. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_group_t {
    pub rule: kvt_rule_t,
    pub dtype: kvt_dtype_t,
    /// Heads of K and V, at most 65536; 0 = unspecified. Each head fills whole elements.
    pub kv_heads: u32,
    /// With KVT_RULE_WINDOW: 1 to 2^30; else 0.
    pub window_tokens: u32,
    /// Bytes of K, or of the latent, per token and layer.
    pub k_bytes: u64,
    /// Bytes of V per token and layer; 0 = V is part of K.
    pub v_bytes: u64,
    /// With KVT_RULE_STATE: bytes of a layer's state; k_bytes, v_bytes and kv_heads are 0.
    pub state_bytes: u64,
    /// Layers in any order; each layer of the model, from 0, is in exactly one group.
    pub layers: *const u16,
    /// At least 1; at most 4096 in all groups.
    pub layer_count: u64,
}

/// Chunk length and contents of a model's cells. Part of the namespace's key.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_layout_t {
    pub struct_size: u64,
    /// 1 to 32768 tokens of a chunk, the unit of sharing. A cell (a chunk in one layer) has at most
    /// 32 MiB.
    pub chunk_tokens: u32,
    pub reserved: u32,
    /// Groups of layers, in any order.
    pub groups: *const kvt_group_t,
    /// 1 to 64.
    pub group_count: u64,
    pub stride_bytes: u64,
    /// The layers of a model whose layers are alike, at most 4096: set by kvt_layout_gqa, _mla and
    /// _window, with the fields below. 0 = `groups` describes the layers; else `groups` is null.
    pub layers: u32,
    pub dtype: kvt_dtype_t,
    /// Heads of K and V; 0 = unspecified.
    pub kv_heads: u32,
    /// Tokens of the window of layers that have one; 0 = all layers attend to all tokens.
    pub window_tokens: u32,
    /// With a window: each full_every-th layer attends to all tokens; 0 = no layer does.
    pub full_every: u32,
    /// The first layer that does, below full_every.
    pub full_first: u32,
    /// Bytes of K, or of the latent, per token and layer.
    pub k_bytes: u64,
    /// Bytes of V per token and layer; 0 = V is part of K.
    pub v_bytes: u64,
}

pub(crate) use crate::store::guards::Namespace;

pub(crate) struct NamespaceNoun(pub(crate) Arc<Namespace>);

noun!(NamespaceNoun, kvt_namespace_t, 11, "namespace");

/// A field of an identity; null = absent, which is not the same as empty.
///
/// # Safety
/// `data` is null or valid for reads of `len` bytes, or up to a NUL.
unsafe fn field<'a>(data: *const c_void, len: u64, name: &str) -> Result<Option<&'a [u8]>> {
    // SAFETY: the caller's promise.
    let len = unsafe { length_of(name, data.cast(), len)? };
    match data.is_null() {
        true if len > 0 => fail!(
            Invalid,
            "{name} is null, but its length is {len}: pass bytes, or 0 for an absent field"
        ),
        true => Ok(None),
        // SAFETY: the caller's promise.
        false => Ok(Some(unsafe { bytes(data.cast(), len)? })),
    }
}

/// Opens a namespace with the identity that C gave.
///
/// # Safety
/// Pointers of `given` are null or valid for their lengths.
unsafe fn namespace_of(
    noun: &StoreNoun,
    given: &kvt_identity_t,
    layout: Layout,
    flags: kvt_namespace_flags_t,
) -> Result<Namespace> {
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
            fail!(Invalid, "extra field {i}: reserved is {}, it must be 0", row.reserved);
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
            layout: None,
            lora: field(given.lora, given.lora_bytes, "lora")?,
            media: field(given.media, given.media_bytes, "media")?,
            salt: field(given.salt, given.salt_bytes, "salt")?,
            shard,
            recipe: field(given.recipe, given.recipe_bytes, "recipe")?,
            extra: &extra,
        }
    };
    let holes = flags & KVT_NAMESPACE_HOLES != 0;
    Namespace::open(&noun.core, &noun.store, &identity, layout, holes, given.remote_tenant)
}

/// Reads a layout.
///
/// # Safety
/// Its pointers are null or valid for their lengths.
unsafe fn layout_of(given: &kvt_layout_t) -> Result<Layout> {
    if given.reserved != 0 {
        fail!(Invalid, "layout: reserved is {}, it must be 0", given.reserved);
    }
    // SAFETY: the caller's promise.
    let rows = unsafe {
        let (count, stride) = (given.group_count, given.stride_bytes);
        Strided::new(given.groups.cast_mut(), count, stride, MAX_GROUPS as u64)?
    };
    if given.layers != 0 {
        if rows.len() > 0 {
            fail!(
                Invalid,
                "layout: layers is {} and there are groups: set layers to 0, or pass no groups",
                given.layers
            );
        }
        return Layout::new(given.chunk_tokens, groups_of_shape(given)?);
    }
    let mut groups = Vec::new();
    for i in 0..rows.len() {
        let row: kvt_group_t = rows.get(i)?;
        // SAFETY: the caller's promise.
        let group = unsafe { group_of(&row) };
        groups.push(group.map_err(|e: Error| e.within(&format!("group {i}")))?);
    }
    Layout::new(given.chunk_tokens, groups)
}

/// The groups of a layout without groups: full layers, layers with a window, or both.
fn groups_of_shape(given: &kvt_layout_t) -> Result<Vec<Group>> {
    let Ok(layers) = u16::try_from(given.layers) else {
        fail!(Limit, "layout: layers is {}: a model has at most {MAX_LAYERS}", given.layers);
    };
    let (every, first, window) = (given.full_every, given.full_first, given.window_tokens);
    if window == 0 && every != 0 || first != 0 && first >= every {
        fail!(
            Invalid,
            "layout: full_every is {every}, full_first {first} and window_tokens {window}: \
             full_every needs a window, and full_first is below full_every"
        );
    }
    let Some(dtype) = Dtype::from_code(given.dtype) else {
        fail!(Invalid, "layout: dtype {} is unknown: use one of KVT_DTYPE_*", given.dtype);
    };
    let is_full = |layer: &u16| window == 0 || every != 0 && u32::from(*layer) % every == first;
    let (full, windowed): (Vec<u16>, Vec<u16>) = (0..layers).partition(is_full);
    let rules = [(Rule::Full, full), (Rule::Window(window), windowed)];
    let groups = rules.into_iter().filter(|(_, layers)| !layers.is_empty());
    let groups = groups.map(|(rule, layers)| Group {
        layers,
        dtype,
        kv_heads: given.kv_heads,
        k_bytes: given.k_bytes,
        v_bytes: given.v_bytes,
        state_bytes: 0,
        rule,
    });
    Ok(groups.collect())
}

/// Bytes of `count` elements, for a layout.
fn plane_bytes(dtype: kvt_dtype_t, count: u64, what: &str) -> Result<u64> {
    let Some(kind) = Dtype::from_code(dtype) else {
        fail!(Invalid, "dtype {dtype} is unknown: use one of KVT_DTYPE_*");
    };
    match kind.bytes_of(count) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => fail!(
            Invalid,
            "{what} is {count} elements of {}: they must fill at least one whole byte",
            kind.name()
        ),
    }
}

/// Writes a layout that describes layers which are alike.
///
/// # Safety
/// `out` passed `check_out`.
unsafe fn write_shape(out: *mut kvt_layout_t, shape: &kvt_layout_t) -> Result<()> {
    Layout::new(shape.chunk_tokens, groups_of_shape(shape)?)?;
    // SAFETY: the caller's promise.
    unsafe { write(out, shape) };
    Ok(())
}

/// Fills the layout of a model with grouped-query, multi-query or multi-head attention: K and V by
/// head, all layers alike.
///
/// @param layers        Layers of the model, 1 to 4096.
/// @param kv_heads      Heads of K and V, 1 to 65536.
/// @param head_dim      Elements of a head.
/// @param chunk_tokens  1 to 32768 tokens of a chunk, the unit of sharing and eviction.
/// @return KVT_E_LIMIT (more layers).
#[capi]
pub unsafe extern "C" fn kvt_layout_gqa(
    layout: *mut kvt_layout_t,
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    dtype: kvt_dtype_t,
    chunk_tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(layout)?;
    let bytes = plane_bytes(dtype, u64::from(kv_heads) * u64::from(head_dim), "a token of K")?;
    let (k_bytes, v_bytes) = (bytes, bytes);
    let zero = kvt_layout_t::zeroed();
    let shape = kvt_layout_t { chunk_tokens, layers, dtype, kv_heads, k_bytes, v_bytes, ..zero };
    write_shape(layout, &shape)
}

/// Fills the layout of a model with latent attention (MLA): one plane, K, of the latent and the
/// rotated part of the key, shared by all heads.
///
/// @param layers      As kvt_layout_gqa.
/// @param latent_dim  Elements of the latent, such as 512.
/// @param rope_dim    Elements of the rotated part, such as 64; may be 0.
/// @return KVT_E_LIMIT (more layers).
#[capi]
pub unsafe extern "C" fn kvt_layout_mla(
    layout: *mut kvt_layout_t,
    layers: u32,
    latent_dim: u32,
    rope_dim: u32,
    dtype: kvt_dtype_t,
    chunk_tokens: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(layout)?;
    let count = u64::from(latent_dim) + u64::from(rope_dim);
    let k_bytes = plane_bytes(dtype, count, "a token of the latent")?;
    let zero = kvt_layout_t::zeroed();
    let shape = kvt_layout_t { chunk_tokens, layers, dtype, kv_heads: 1, k_bytes, ..zero };
    write_shape(layout, &shape)
}

/// Fills the layout of a model whose layers attend to the last tokens only, all or most of them.
///
/// @param kv_heads       This and the others: as kvt_layout_gqa.
/// @param window_tokens  Tokens that a layer with a window attends to, 1 to 2^30.
/// @param full_every     Each full_every-th layer attends to all tokens: 6 for Gemma 3, 2 for
///                       gpt-oss. 0 = no layer does. The first one is layer full_every - 1; change
///                       kvt_layout_t.full_first where it is another.
/// @return KVT_E_LIMIT (more layers).
#[capi]
pub unsafe extern "C" fn kvt_layout_window(
    layout: *mut kvt_layout_t,
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    dtype: kvt_dtype_t,
    chunk_tokens: u32,
    window_tokens: u32,
    full_every: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(layout)?;
    if window_tokens == 0 {
        fail!(Invalid, "window_tokens is 0: pass 1 to 2^30, or use kvt_layout_gqa");
    }
    let bytes = plane_bytes(dtype, u64::from(kv_heads) * u64::from(head_dim), "a token of K")?;
    let (k_bytes, v_bytes) = (bytes, bytes);
    let full_first = full_every.saturating_sub(1);
    let zero = kvt_layout_t::zeroed();
    let shape = kvt_layout_t {
        chunk_tokens,
        layers,
        dtype,
        kv_heads,
        window_tokens,
        full_every,
        full_first,
        k_bytes,
        v_bytes,
        ..zero
    };
    write_shape(layout, &shape)
}

/// Reads a group of layers.
///
/// # Safety
/// Its layers are valid for reads.
unsafe fn group_of(row: &kvt_group_t) -> Result<Group> {
    let rule = match row.rule {
        KVT_RULE_FULL => Rule::Full,
        KVT_RULE_WINDOW => Rule::Window(row.window_tokens),
        KVT_RULE_STATE => Rule::State,
        other => fail!(Invalid, "rule {other} is unknown: use one of KVT_RULE_*"),
    };
    if row.window_tokens != 0 && row.rule != KVT_RULE_WINDOW {
        fail!(
            Invalid,
            "window_tokens is {}, it must be 0 unless rule is KVT_RULE_WINDOW",
            row.window_tokens
        );
    }
    let Some(dtype) = Dtype::from_code(row.dtype) else {
        fail!(Invalid, "dtype {} is unknown: use one of KVT_DTYPE_*", row.dtype);
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

/// Opens a namespace. Equal identities and layouts give the same namespace, with the chunks that
/// the store recovered from disk. While it is open, other opens must pass the same flags and
/// remote_tenant.
///
/// @param identity  Null = all fields absent.
/// @param flags     KVT_NAMESPACE_*.
/// @return KVT_E_SPEC (the recipe names an unknown codec), KVT_E_LIMIT (a field is too long, or
///         65,536 namespaces or 64 layouts are in use: open, or with referenced or pinned chunks;
///         others are dropped to make room).
#[capi]
pub unsafe extern "C" fn kvt_namespace_open(
    store: *const kvt_store_t,
    identity: *const kvt_identity_t,
    layout: *const kvt_layout_t,
    flags: kvt_namespace_flags_t,
    out: *mut *mut kvt_namespace_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_NAMESPACE_HOLES)?;
    if layout.is_null() {
        fail!(Invalid, "layout is null: a namespace needs one");
    }
    require(out)?;
    let (layout, identity) = (layout_of(&read(layout)?)?, read(identity)?);
    let ns = namespace_of(&*enter(store)?, &identity, layout, flags)?;
    out.write(insert(NamespaceNoun(Arc::new(ns)))?);
    Ok(())
}

/// Reads the key of a namespace, the hash of its identity and layout.
///
/// @param out_key  Receives KVT_KEY_BYTES bytes.
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
#[capi]
pub unsafe extern "C" fn kvt_namespace_close(ns: *mut *mut kvt_namespace_t) -> kvt_status_t {
    free(ns, |_| Ok(()))
}

// Lookups.

/// No tier.
pub const KVT_TIER_NONE: u32 = 0xFFFF_FFFF;

/// States of a range of tokens.
pub type kvt_range_state_t = u32;

/// Some needed cells are in no tier: the engine must compute these tokens.
pub const KVT_RANGE_MISS: kvt_range_state_t = 0;
/// All needed cells can be loaded.
pub const KVT_RANGE_HIT: kvt_range_state_t = 1;
/// All needed cells can be loaded once transfers in flight have arrived.
pub const KVT_RANGE_PENDING: kvt_range_state_t = 2;
/// No layer needs these tokens in order to continue.
pub const KVT_RANGE_UNNEEDED: kvt_range_state_t = 3;

/// Every cell of the chunk is resident in some tier of the store, not necessarily in the same one.
pub const KVT_EXISTS_WHOLE: u32 = 16;

const _: () = assert!(KVT_EXISTS_WHOLE == WHOLE as u32);
/// Most entries of an array that a call fills.
pub(crate) const MAX_ROWS: u64 = 1 << 24;
/// Keys that are looked up under one lock.
const LOOKUP_GROUP: usize = 1024;

/// A run of tokens in the same state. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_range_t {
    pub first_token: u64,
    pub tokens: u64,
    pub state: kvt_range_state_t,
    /// Slowest tier that a needed cell is loaded from, KVT_TIER_*; KVT_TIER_NONE = nothing to load.
    pub tier: kvt_tier_t,
    /// Bytes that are resident in DEVICE.
    pub device_bytes: u64,
    /// Bytes to load from HOST.
    pub host_bytes: u64,
    /// Bytes to load from DISK.
    pub disk_bytes: u64,
    /// Bytes to fetch from the remote, by remote hints.
    pub remote_bytes: u64,
    /// Bytes on their way into the store, in no tier yet.
    pub pending_bytes: u64,
    /// Predicted time to load these tokens alone.
    pub load_ns: u64,
}

/// Totals of a lookup. Bytes and time are those of continuing after reusable_soon_tokens; with
/// KVT_NAMESPACE_HOLES, of loading all that is resident.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_lookup_t {
    pub struct_size: u64,
    /// Tokens looked up.
    pub tokens: u64,
    /// Longest prefix that can be reused now.
    pub reusable_tokens: u64,
    /// Longest prefix that can be reused once transfers in flight have arrived.
    pub reusable_soon_tokens: u64,
    /// Bytes that are resident in DEVICE.
    pub device_bytes: u64,
    /// Bytes to load from HOST.
    pub host_bytes: u64,
    /// Bytes to load from DISK.
    pub disk_bytes: u64,
    /// Bytes to fetch from the remote, by remote hints.
    pub remote_bytes: u64,
    /// Bytes on their way into the store, in no tier yet.
    pub pending_bytes: u64,
    /// Predicted time to load all of it, including queued work.
    pub load_ns: u64,
}

fn range(stretch: &LookupRange) -> kvt_range_t {
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

fn summary(look: &LookupResult) -> kvt_lookup_t {
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

/// Output pointers of a lookup.
pub(crate) struct Target {
    pub(crate) ranges: *mut kvt_range_t,
    pub(crate) capacity: u64,
    pub(crate) stride_bytes: u64,
    pub(crate) out_count: *mut u64,
    pub(crate) out: *mut kvt_lookup_t,
}

/// Runs a lookup and writes its results.
///
/// # Safety
/// As the exported functions that call it.
pub(crate) unsafe fn answer(
    ns: *const kvt_namespace_t,
    to: &Target,
    look: impl FnOnce(&Namespace) -> Result<LookupResult>,
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

/// Reports how much of a token sequence is reusable in a namespace, and what loading it takes; for
/// routers that compare stores. Counts no use and references nothing: chunks may be evicted before
/// the next call.
///
/// @param token_count  At most 2^27.
/// @param ranges       Receives ranges that cover all tokens, in order.
/// @param capacity     At most 2^24.
/// @param out_count    May be null.
/// @param out          Receives the totals; may be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
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

/// Does the same for a sequence whose chunk keys are known (docs/internals/keys.md). See
/// kvt_namespace_lookup for the other parameters.
///
/// @param keys         Keys of the full chunks, KVT_KEY_BYTES each, in order.
/// @param key_count    token_count / chunk_tokens.
/// @param token_count  Tokens of the sequence, those of a last partial chunk included.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
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

/// The caller's array of keys.
///
/// # Safety
/// `keys` is null with a count of 0, or valid for reads of so many keys.
unsafe fn given_keys<'a>(keys: *const u8, count: u64) -> Result<&'a [Key]> {
    if count > MAX_TOKENS as u64 {
        fail!(Limit, "key_count is {count}, the limit is {MAX_TOKENS}");
    }
    // SAFETY: the caller's promise.
    let keys = unsafe { bytes(keys, count * size_of::<Key>() as u64)? };
    Ok(Key::list(keys))
}

/// Reports in which tiers chunks are resident. Counts no use and references nothing.
///
/// @param keys       Keys of full chunks, KVT_KEY_BYTES each.
/// @param key_count  At most 2^27.
/// @param out        Receives a byte for each key: KVT_EXISTS_WHOLE, and 1 << KVT_TIER_* for each
///                   tier that has every cell. 1 << KVT_TIER_REMOTE is a remote hint: it may be
///                   stale, does not count for KVT_EXISTS_WHOLE, and is set only while the remote's
///                   circuit is closed. 0 = absent, or incomplete.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_namespace_exists(
    ns: *const kvt_namespace_t,
    keys: *const u8,
    key_count: u64,
    out: *mut u8,
) -> kvt_status_t {
    let keys = given_keys(keys, key_count)?;
    if out.is_null() && !keys.is_empty() {
        fail!(Invalid, "out is null: it must have room for {key_count} bytes");
    }
    let ns = enter(ns)?;
    let mut found = [0; LOOKUP_GROUP];
    for (at, keys) in keys.chunks(LOOKUP_GROUP).enumerate() {
        ns.0.exist(keys, &mut found)?;
        // SAFETY: room for one byte per key, by the caller's promise.
        std::ptr::copy_nonoverlapping(found.as_ptr(), out.add(at * LOOKUP_GROUP), keys.len());
    }
    Ok(())
}

// Prefill cost.

/// Cost of prefill. Computing n tokens after l tokens of context takes, in nanoseconds,
/// n * beta_ns + alpha_ns * (n * l + n * n / 2).
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_prefill_cost_t {
    pub struct_size: u64,
    /// Nanoseconds per token and token of context.
    pub alpha_ns: f64,
    /// Nanoseconds per token.
    pub beta_ns: f64,
    /// Out: number of calls of kvt_namespace_observe_prefill.
    pub observed: u64,
    /// Out: 1 = set by kvt_namespace_set_prefill_cost, 0 = observed.
    pub fixed: u32,
    pub reserved: u32,
}

/// Records how long the engine took to compute tokens. Plans use the cost that these observations
/// give.
///
/// @param context_tokens  Tokens before the first computed one, at most 2^27.
/// @param tokens          Tokens computed, 1 to 2^27.
/// @param duration_ns     Time taken, from 10 ns a token to one hour.
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
    let (context, ns_taken) = (context_tokens, duration_ns);
    ns.store.call(
        |core| core.observe_prefill(ns.number, context, tokens, ns_taken),
        || calls::ObservePrefill { namespace: ns.id(), context, tokens, ns: ns_taken },
    )
}

/// Sets the prefill cost of a namespace, whatever is observed.
///
/// @param cost  Its alpha_ns and beta_ns, 0 to 1e15 each; null = use observations again.
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
    ns.store.call(
        |core| core.fix_prefill(ns.number, cost),
        || calls::FixPrefill { namespace: ns.id(), cost },
    )
}

/// Reads the prefill cost that plans use now.
#[capi]
pub unsafe extern "C" fn kvt_namespace_prefill_cost(
    ns: *const kvt_namespace_t,
    out: *mut kvt_prefill_cost_t,
) -> kvt_status_t {
    check_out(out)?;
    let ns = inspect(ns)?;
    let own = |core: &StoreState| {
        let prefill = core.prefill(ns.0.number);
        (prefill.cost(), prefill.observed(), prefill.is_fixed())
    };
    let call = || calls::PrefillCost { namespace: ns.0.id() };
    let (Cost { alpha, beta }, observed, is_fixed) = ns.0.store.ask(own, call)?;
    write(
        out,
        &kvt_prefill_cost_t {
            struct_size: 0,
            alpha_ns: alpha,
            beta_ns: beta,
            observed,
            fixed: u32::from(is_fixed),
            reserved: 0,
        },
    );
    Ok(())
}

// Events of stores.

/// Kinds of events of a store.
pub type kvt_store_event_kind_t = u32;

/// All cells of a chunk are resident in a tier.
pub const KVT_STORE_EVENT_STORED: kvt_store_event_kind_t = 1;
/// Some cell of a chunk is no longer resident in a tier that had them all.
pub const KVT_STORE_EVENT_REMOVED: kvt_store_event_kind_t = 2;
/// All chunks of a namespace are gone from every tier (kvt_namespace_clear).
pub const KVT_STORE_EVENT_CLEARED: kvt_store_event_kind_t = 3;

const _: () = assert!(KVT_STORE_EVENT_STORED == Kind::Stored as u32);
const _: () = assert!(KVT_STORE_EVENT_REMOVED == Kind::Removed as u32);
const _: () = assert!(KVT_STORE_EVENT_CLEARED == Kind::Cleared as u32);

/// Events that are read under one lock.
const EVENT_GROUP: usize = 32;

/// A change of residency. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_store_event_t {
    /// Consecutive, from 0.
    pub number: u64,
    /// Time, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// KVT_STORE_EVENT_STORED, _REMOVED or _CLEARED. Ignore others: kinds may be added.
    pub kind: kvt_store_event_kind_t,
    /// 0 with KVT_STORE_EVENT_CLEARED.
    pub tier: kvt_tier_t,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Index of the chunk in its sequence, from 0.
    pub position: u32,
    /// Key of the chunk.
    pub key: [u8; 32],
    /// Key of the chunk before it; for the first one the namespace's key.
    pub parent: [u8; 32],
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

/// Reads events, oldest first. The store keeps the newest ones (`events` of its spec, 16,384 by
/// default) for any number of readers. A reader that missed some must read the state again
/// (kvt_store_residents, kvt_namespace_lookup, _exists).
///
/// @param cursor      In: number of the first event wanted; 0 = all that are kept, UINT64_MAX =
///                    future ones. Out: the cursor of the next call.
/// @param capacity    At most 2^24; 0 = only skip the events that are no longer kept.
/// @param out_count   Receives the number of events written.
/// @param out_missed  Receives the number of events that were lost; may be null.
/// @return KVT_E_LIMIT.
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
        fail!(Invalid, "cursor is null or misaligned: it must point to a uint64_t");
    }
    let (rows, first) = (Strided::new(events, capacity, stride_bytes, MAX_ROWS)?, cursor.read());
    let (mut at, mut written, mut missed) = (first, 0, 0);
    let store = inspect(store)?;
    let mut group = [Event::default(); EVENT_GROUP];
    loop {
        let room = (rows.len() - written).min(EVENT_GROUP);
        let Some(part) = group.get_mut(..room) else { break };
        let (count, lost, next) = store.store.read_events(at, part)?;
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

/// Reads what is resident, as KVT_STORE_EVENT_STORED: an entry for each chunk and each tier that has
/// all cells of it. Read the cursor of kvt_store_events first, then all of this, then the events
/// from that cursor on: their last word about a chunk and a tier holds. The `number` of an entry is
/// that of the first event that it does not reflect. The order of entries is unspecified. The store
/// is locked for at most 4,096 chunks at a time.
///
/// @param cursor     In: 0 = from the start. Out: the cursor of the next call; UINT64_MAX = all
///                   entries were read.
/// @param capacity   At most 2^24; 0 = write nothing.
/// @param out_count  Receives the number of entries written.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_store_residents(
    store: *const kvt_store_t,
    cursor: *mut u64,
    entries: *mut kvt_store_event_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    require(out_count)?;
    if cursor.is_null() || !cursor.is_aligned() {
        fail!(Invalid, "cursor is null or misaligned: it must point to a uint64_t");
    }
    let (rows, mut at) = (Strided::new(entries, capacity, stride_bytes, MAX_ROWS)?, cursor.read());
    let store = inspect(store)?;
    let (mut written, mut group) = (0, [Event::default(); EVENT_GROUP]);
    while at != ALL_READ && written < rows.len() {
        let room = (rows.len() - written).min(EVENT_GROUP);
        let Some(part) = group.get_mut(..room) else { break };
        let (count, next) = store.store.residents(at, part)?;
        for (i, event) in part.iter().take(count).enumerate() {
            rows.put(written + i, &event_for_c(event));
        }
        (written, at) = (written + count, next);
    }
    cursor.write(at);
    out_count.write(written as u64);
    Ok(())
}

/// Submits an op that completes when the event `from` or a later one exists. Never waits. The op's
/// value is the number of events from `from` on. Its queue (kvt_queue_fd, or a callback) wakes the
/// reader, which reads all events and watches again from its new cursor. Closing the store ends the
/// op with KVT_E_CANCELLED.
///
/// @param from    Cursor of kvt_store_events; UINT64_MAX = the next event.
/// @param out_op  May be null if opts names a queue.
/// @return KVT_E_AGAIN (1,024 watches are open, `max_ops` is reached, or the queue is full).
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

// Changes to open stores.

/// Switches the eviction policy of a tier. The new policy receives every chunk with its last use
/// and number of uses, and the learned state of a former policy of the same kind. The store is
/// blocked for 0.1 to 0.2 s per million chunks. The next open uses its spec again.
///
/// @param tier  KVT_TIER_HOST, KVT_TIER_DISK or KVT_TIER_DEVICE.
/// @param spec  The policy, as in the store's spec; not `custom`.
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_NOT_FOUND (the store has no such tier), KVT_E_UNSUPPORTED
///         (another tier).
#[capi]
pub unsafe extern "C" fn kvt_store_set_policy(
    store: *const kvt_store_t,
    tier: kvt_tier_t,
    spec: *const c_char,
    spec_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let spec = text("spec", spec, spec_bytes)?;
    let tier = Tier::from_code(tier)?;
    let store = enter(store)?;
    store.store.call(
        |core| core.set_policy(tier, spec),
        || calls::SetPolicy { tier, spec: spec.to_string() },
    )
}

/// Changes the limit of a tier: bytes of cells in HOST, bytes of files on DISK. Chunks beyond it
/// are evicted in the background; the call does not wait. The store's account in its budget limits
/// HOST as well. The next open uses its spec again.
///
/// @param tier   KVT_TIER_HOST or KVT_TIER_DISK.
/// @param bytes  At least 64 KiB for HOST; for DISK at least what kvt_store_open requires.
/// @return KVT_E_LIMIT (above what a tier can have), KVT_E_NOT_FOUND (the store has no disk),
///         KVT_E_UNSUPPORTED (another tier).
#[capi]
pub unsafe extern "C" fn kvt_store_set_limit(
    store: *const kvt_store_t,
    tier: kvt_tier_t,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let noun = enter(store)?;
    noun.store.call(|core| core.set_limit(tier, bytes), || calls::SetLimit { tier, bytes })
}

// Latencies, tenants and evictions.

/// Kinds of kvt_latency_t. GET_HOST: gets that read nothing from disk. GET_DISK: gets that did.
/// PUT_*: puts by `level`, until they are in memory, on disk, durable. *_BATCH: batches of workers:
/// copies between tensors and memory, disk reads, disk writes, syncs, upkeep (compaction, sweeps,
/// checkpoints, namespace records), remote reads, remote writes, remote lookups. *_DECISION:
/// choices of victims, of which one in 16 is timed.
pub type kvt_latency_kind_t = u32;

pub const KVT_LATENCY_GET_HOST: kvt_latency_kind_t = 1;
pub const KVT_LATENCY_GET_DISK: kvt_latency_kind_t = 2;
pub const KVT_LATENCY_PUT_RAM: kvt_latency_kind_t = 3;
pub const KVT_LATENCY_PUT_DISK: kvt_latency_kind_t = 4;
pub const KVT_LATENCY_PUT_DURABLE: kvt_latency_kind_t = 5;
pub const KVT_LATENCY_COPY_BATCH: kvt_latency_kind_t = 6;
pub const KVT_LATENCY_READ_BATCH: kvt_latency_kind_t = 7;
pub const KVT_LATENCY_WRITE_BATCH: kvt_latency_kind_t = 8;
pub const KVT_LATENCY_SYNC_BATCH: kvt_latency_kind_t = 9;
pub const KVT_LATENCY_UPKEEP_BATCH: kvt_latency_kind_t = 10;
pub const KVT_LATENCY_HOST_DECISION: kvt_latency_kind_t = 11;
pub const KVT_LATENCY_DISK_DECISION: kvt_latency_kind_t = 12;
pub const KVT_LATENCY_FETCH_BATCH: kvt_latency_kind_t = 13;
pub const KVT_LATENCY_UPLOAD_BATCH: kvt_latency_kind_t = 14;
pub const KVT_LATENCY_LOOKUP_BATCH: kvt_latency_kind_t = 15;

/// Number of kinds before the decisions of policies, which `TIMED` does not contain.
const BEFORE_DECISIONS: usize = KVT_LATENCY_UPKEEP_BATCH as usize;

const _: () = assert!(KVT_LATENCY_LOOKUP_BATCH as usize == TIMED.len() + 2);

/// Latencies of one kind since the store was opened, in nanoseconds. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_latency_t {
    pub kind: kvt_latency_kind_t,
    pub reserved: u32,
    /// Number of timings.
    pub count: u64,
    pub mean_ns: u64,
    /// Median, at most a quarter too high.
    pub p50_ns: u64,
    /// 99th percentile, at most a quarter too high.
    pub p99_ns: u64,
    pub max_ns: u64,
}

/// Traffic of a tenant: puts and gets, no prefetches. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_tenant_t {
    /// kvt_session_opts_t.tenant.
    pub tenant: u32,
    /// 1 = this row sums all tenants beyond the 1,024 that are counted separately.
    pub is_rest: u32,
    /// Bytes stored by puts.
    pub put_bytes: u64,
    /// Bytes loaded by gets.
    pub got_bytes: u64,
    /// Cells that gets asked for and loaded.
    pub hit_cells: u64,
    /// Cells that gets asked for and that were in no tier.
    pub missed_cells: u64,
    /// Puts rejected because the tenant would exceed its quota (kvt_store_set_quota).
    pub rejected_puts: u64,
    /// Bytes of its chunks in host memory; 0 = it has no quota there.
    pub host_bytes: u64,
    /// Bytes of its chunks on disk, before encoding; 0 = it has no quota there.
    pub disk_bytes: u64,
    /// Quota of host memory; 0 = none.
    pub host_quota_bytes: u64,
    /// Quota of the disk; 0 = none.
    pub disk_quota_bytes: u64,
}

fn tenant_for_c(row: &Tenant, used: &TenantUse, is_rest: bool) -> kvt_tenant_t {
    kvt_tenant_t {
        tenant: row.id,
        is_rest: u32::from(is_rest),
        put_bytes: row.put_bytes,
        got_bytes: row.got_bytes,
        hit_cells: row.hits,
        missed_cells: row.misses,
        rejected_puts: row.rejected_puts,
        host_bytes: used.bytes[0],
        disk_bytes: used.bytes[1],
        host_quota_bytes: used.quota[0],
        disk_quota_bytes: used.quota[1],
    }
}

fn latency_for_c(kind: u32, times: &Latency) -> kvt_latency_t {
    let &Latency { count, mean_ns, p50_ns, p99_ns, max_ns } = times;
    kvt_latency_t { kind, reserved: 0, count, mean_ns, p50_ns, p99_ns, max_ns }
}

/// Reads the latest evictions of a tier, oldest first. The store keeps 4,096 of each tier; gaps in
/// their numbers show what a reader missed.
///
/// @param tier       KVT_TIER_HOST, KVT_TIER_DISK or KVT_TIER_DEVICE.
/// @param entries    Receives entries: `id` is the first 8 bytes of the chunk's key, little-endian
///                   (with another granularity: the policy's id), `units` are blocks of 4 KiB,
///                   times CLOCK_MONOTONIC.
/// @param capacity   At most 2^24; the latest entries that fit are written.
/// @param out_count  Receives the number written.
/// @return KVT_E_NOT_FOUND (the store has no such tier), KVT_E_UNSUPPORTED (another tier),
///         KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_store_evictions(
    store: *const kvt_store_t,
    tier: kvt_tier_t,
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
    let last = match store.store.client() {
        None => store.store.inspect(|core| core.evictions(tier, most))??,
        Some(client) => {
            let call = calls::Evictions { tier, most: most as u32 };
            client.call(&call)?.into_iter().map(|entry| entry.0).collect()
        }
    };
    for (at, entry) in last.iter().take(most).enumerate() {
        rows.put(at, &log_entry(entry));
    }
    out_count.write(last.len().min(most) as u64);
    Ok(())
}

/// Sets the most bytes that a tenant's chunks may have in a tier. A chunk belongs to the tenant of
/// the session that stored it first, and counts with all its layers, before encoding; chunks that
/// were on disk when the store was opened belong to none. A put that would exceed the quota of host
/// memory evicts the tenant's least recently used chunks, and is rejected with KVT_E_BUDGET if they
/// do not suffice (because sessions, transfers or pins hold them). Chunks that gets bring into
/// memory, or that are written to disk, evict others of their tenant afterwards. `quota` of the
/// store's spec limits each tenant for which this call set no quota.
///
/// @param tenant  kvt_session_opts_t.tenant, not 0: that stands for no tenant.
/// @param tier    KVT_TIER_HOST or KVT_TIER_DISK.
/// @param bytes   0 = remove the tenant's own quota, so that `quota` of the spec applies again.
/// @return KVT_E_UNSUPPORTED (another tier, or DISK in a store without a disk), KVT_E_INVALID
///         (tenant 0), KVT_E_LIMIT (65,536 tenants have quotas of their own).
#[capi]
pub unsafe extern "C" fn kvt_store_set_quota(
    store: *const kvt_store_t,
    tenant: u32,
    tier: kvt_tier_t,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tier = Tier::from_code(tier)?;
    let store = enter(store)?;
    store.store.call(
        |core| core.set_quota(tenant, tier, bytes),
        || calls::SetQuota { tenant, tier, bytes },
    )
}

/// Reads the traffic of each tenant, by number. The last row sums the tenants that are not counted
/// separately, if there are any.
///
/// @param capacity   At most 2^24; 1,025 always suffice.
/// @param out_count  May be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
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
    let all: Vec<kvt_tenant_t> = store.store.inspect(|core| {
        let (rest, uses) = (core.other_tenants(), core.tenant_uses());
        let none = TenantUse::default();
        let rest = (rest != Tenant::default()).then(|| tenant_for_c(&rest, &none, true));
        let row = |row: &Tenant| tenant_for_c(row, uses.get(&row.id).unwrap_or(&none), false);
        core.tenants().iter().map(row).chain(rest).collect()
    })?;
    give(&to, rows.is_null(), all.into_iter(), out_count)
}

/// Reads the latencies of gets, puts, worker batches and policy decisions: one row for each
/// KVT_LATENCY_*, in their order. Gets and puts count if they moved everything, from the call (or
/// the ready event) to completion; those with `after` do not count. kvt_store_metrics has the
/// histograms.
///
/// @param capacity   At most 2^24; 32 always suffice.
/// @param out_count  May be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
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
    let report = store.store.inspect(|core| core.report())?;
    let decisions = [report.host_policy.decision, report.disk_policy.decision];
    let (first, last) = report.latencies.split_at(BEFORE_DECISIONS);
    let all = (1..).zip(first.iter().chain(&decisions).chain(last));
    let all: Vec<_> = all.map(|(kind, times)| latency_for_c(kind, times)).collect();
    give(&to, rows.is_null(), all.into_iter(), out_count)
}

// Remotes.

/// State of the circuit breaker of a remote: requests are sent (CLOSED), none are sent for a while
/// after failures or malformed replies (OPEN), one request probes the remote (PROBING).
pub type kvt_circuit_t = u32;

pub const KVT_REMOTE_CIRCUIT_CLOSED: kvt_circuit_t = 1;
pub const KVT_REMOTE_CIRCUIT_OPEN: kvt_circuit_t = 2;
pub const KVT_REMOTE_CIRCUIT_PROBING: kvt_circuit_t = 3;

const _: () = assert!(KVT_REMOTE_CIRCUIT_CLOSED == BreakerState::Closed as u32);
const _: () = assert!(KVT_REMOTE_CIRCUIT_OPEN == BreakerState::Open as u32);
const _: () = assert!(KVT_REMOTE_CIRCUIT_PROBING == BreakerState::HalfOpen as u32);

/// Most secrets of a store.
const MAX_SECRETS: u64 = 16;

/// A credential for the remote's server. Copied when the store is opened, wiped when it is closed,
/// and never shown in specs, logs, errors or at the control socket. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_secret_t {
    /// "password" (Redis), "s3.key", "s3.secret", "s3.token", or "seal" (encrypts objects).
    pub name: *const c_char,
    pub name_bytes: u64,
    pub secret: *const c_void,
    /// At most 4,096.
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

/// Reads the counters of a store's remote; all 0 without a remote. Works on a poisoned store, too.
#[capi]
pub unsafe extern "C" fn kvt_store_remote_stats(
    store: *const kvt_store_t,
    out: *mut kvt_remote_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let store = inspect(store)?;
    let own = |core: &StoreState| core.remote_stats().map(Raw);
    let stats = store.store.ask(own, || calls::RemoteStatsNow {})?;
    write(out, &stats.map(|stats| stats.0).unwrap_or_default());
    Ok(())
}

// Custom remotes: a table of callbacks.

/// Flags of puts to a custom remote.
pub type kvt_remote_put_flags_t = u64;

/// A put of a name that exists does nothing. Without this flag the last writer wins.
pub const KVT_REMOTE_FIRST_WINS: kvt_remote_put_flags_t = 1;

/// Most objects of one call of a custom remote.
const MAX_BATCH: u32 = 4096;

/// A piece of host memory. Parts of a put must not be written; parts of a get whose bytes are not
/// wanted may share memory. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_part_t {
    pub address: *mut c_void,
    pub bytes: u64,
}

/// One object of a batch. Stands in arrays only; the next one is `stride_bytes` further.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_item_t {
    /// Letters, digits, '.', '_', '-' and '/'. Not NUL-terminated.
    pub name: *const c_char,
    pub name_bytes: u64,
    /// Memory that the object's bytes go to (get) or come from (put), in order.
    pub parts: *const kvt_remote_part_t,
    pub part_count: u64,
    /// Get: first byte of the object that is wanted.
    pub offset: u64,
    /// Out, preset to 0. Get: bytes read, fewer than the parts have if the object ends before.
    /// Exists: length of the object. Put: 1 = it existed already.
    pub bytes: u64,
    /// Out, preset to KVT_E_AGAIN: KVT_OK, KVT_E_NOT_FOUND, KVT_E_AGAIN (retry later),
    /// KVT_E_TIMEOUT, KVT_E_BUDGET (full), KVT_E_LIMIT (object too long), KVT_E_CORRUPT,
    /// KVT_E_UNSUPPORTED, KVT_E_UNAVAILABLE.
    pub status: kvt_status_t,
    pub reserved: u32,
}

/// Processes a batch of objects until a deadline (CLOCK_MONOTONIC), and sets the status of each
/// item. Must not touch memory of the batch after it returns. A result other than KVT_OK becomes
/// the status of every item that has none.
pub type kvt_remote_batch_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        items: *mut kvt_remote_item_t,
        count: u64,
        stride_bytes: u64,
        deadline_ns: u64,
    ) -> kvt_status_t,
>;

/// A custom remote backend, for `remote=custom(...)` in a store's spec. The store calls it from
/// several threads at once, without a lock. Callbacks must return by the deadline, must not unwind
/// and must not call the same store. The store verifies every object and treats `exists` as a hint.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_custom_t {
    pub struct_size: u64,
    /// KVT_REMOTE_FIRST_WINS.
    pub flags: kvt_remote_put_flags_t,
    /// Object size that the backend handles best; 0 = 1 MiB.
    pub preferred_bytes: u64,
    /// Longest object; 0 = unlimited.
    pub max_bytes: u64,
    /// Most objects of a call, at most 4096; 0 = 32.
    pub batch: u32,
    pub reserved: u32,
    /// Reads objects or parts of objects.
    pub get: kvt_remote_batch_fn,
    /// Stores objects.
    pub put: kvt_remote_batch_fn,
    /// Reports which objects exist, and their lengths.
    pub exists: kvt_remote_batch_fn,
    /// Removes objects; null = objects are never removed.
    pub remove: kvt_remote_batch_fn,
    /// Passed to the callbacks; the store owns it once kvt_store_open has succeeded.
    pub user_data: *mut c_void,
    /// Releases user_data after the store is closed; may be null.
    pub destroy: kvt_destroy_fn,
}

/// The callbacks of a custom remote.
#[derive(Clone, Copy)]
struct Callbacks {
    get: kvt_remote_batch_fn,
    put: kvt_remote_batch_fn,
    exists: kvt_remote_batch_fn,
    remove: kvt_remote_batch_fn,
}

/// A custom remote, with the prefix of its names.
#[derive(Clone)]
struct CustomBackend {
    callbacks: Arc<Callback<Callbacks>>,
    caps: Caps,
    prefix: Prefix,
}

/// A client of a custom remote, with the tables of its batches.
struct CustomClient {
    backend: CustomBackend,
    items: Vec<kvt_remote_item_t>,
    parts: Vec<kvt_remote_part_t>,
    names: Vec<u8>,
}

// SAFETY: pointers in its tables belong to the batch in flight, and are not used after it.
unsafe impl Send for CustomClient {}

/// The custom remote of a store's options, and the function that takes over its user data once the
/// store is open.
///
/// # Safety
/// `custom` is null or valid for the size it states; its functions do what the header requires.
pub(crate) unsafe fn remote_of(
    custom: *const kvt_remote_custom_t,
) -> Result<Option<(CustomRemote, impl FnOnce())>> {
    if custom.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(custom)? };
    known_flags(given.flags, KVT_REMOTE_FIRST_WINS)?;
    no_reserved(given.reserved)?;
    if given.batch > MAX_BATCH {
        fail!(Invalid, "batch is {}, it must be at most {MAX_BATCH} (0 = default)", given.batch);
    }
    let kvt_remote_custom_t { get, put, exists, remove, user_data, destroy, .. } = given;
    if get.is_none() || put.is_none() || exists.is_none() {
        fail!(Invalid, "get, put or exists is null: a custom remote needs all three");
    }
    let or_default = |given: u64, default: u64| if given == 0 { default } else { given };
    let caps = Caps {
        preferred_bytes: or_default(given.preferred_bytes, 1 << 20),
        max_bytes: or_default(given.max_bytes, u64::MAX),
        batch: or_default(given.batch.into(), 32) as usize,
        names: 64,
        ranges: true,
        first_wins: given.flags & KVT_REMOTE_FIRST_WINS != 0,
        // The engine accounts for the memory of its backend.
        client_bytes: 0,
    };
    let callbacks = Callbacks { get, put, exists, remove };
    let callbacks = Arc::new(Callback::new(callbacks, user_data, destroy));
    let owner = callbacks.clone();
    let make = move |prefix: &Prefix| {
        let (callbacks, prefix) = (callbacks.clone(), prefix.clone());
        Box::new(CustomBackend { callbacks, caps, prefix }) as Box<dyn Remote>
    };
    Ok(Some((CustomRemote(Arc::new(make)), move || owner.keep())))
}

impl Remote for CustomBackend {
    fn caps(&self) -> Caps {
        self.caps
    }

    fn client(&self) -> Box<dyn Client> {
        let (items, parts, names) = (Vec::new(), Vec::new(), Vec::new());
        Box::new(CustomClient { backend: self.clone(), items, parts, names })
    }
}

/// The error that a callback's status stands for.
fn remote_error(status: kvt_status_t) -> RemoteError {
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

/// Selects one of the callbacks.
type Select = fn(&Callbacks) -> kvt_remote_batch_fn;

impl CustomClient {
    fn clear(&mut self) {
        self.items.clear();
        self.parts.clear();
        self.names.clear();
    }

    fn add(&mut self, name: &Name, parts: &[Part], offset: u64) {
        let begin = self.names.len();
        self.backend.prefix.write(name, &mut self.names);
        let name_bytes = (self.names.len() - begin) as u64;
        let part_for_c =
            |part: &Part| kvt_remote_part_t { address: part.address.cast(), bytes: part.bytes };
        self.parts.extend(parts.iter().map(part_for_c));
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

    /// Calls a callback for all items. Afterwards each item has its status and bytes.
    fn call(&mut self, select: Select, deadline_ns: u64) {
        let (mut name, mut part) = (0, 0);
        for item in &mut self.items {
            item.name = self.names.as_ptr().wrapping_add(name).cast();
            item.parts = self.parts.as_ptr().wrapping_add(part);
            name += item.name_bytes as usize;
            part += item.part_count as usize;
        }
        for items in self.items.chunks_mut(self.backend.caps.batch) {
            let status = self.backend.callbacks.call(|callbacks, user_data| {
                let Some(function) = select(&callbacks) else { return Status::Unsupported.code() };
                let (count, stride) = (items.len() as u64, size_of::<kvt_remote_item_t>() as u64);
                // SAFETY: function and data came together; the tables are borrowed for the call.
                unsafe { function(user_data, items.as_mut_ptr(), count, stride, deadline_ns) }
            });
            if status == Status::Ok.code() {
                continue;
            }
            let preset = Status::Again.code();
            items.iter_mut().filter(|item| item.status == preset).for_each(|i| i.status = status);
        }
    }

    /// The result of each item.
    fn results(&self) -> impl Iterator<Item = std::result::Result<u64, RemoteError>> + '_ {
        self.items.iter().map(|item| match item.status == Status::Ok.code() {
            true => Ok(item.bytes),
            false => Err(remote_error(item.status)),
        })
    }
}

impl Client for CustomClient {
    fn greet(&mut self, deadline_ns: u64) -> Result<Server> {
        self.clear();
        self.add(&Name { tenant: 0, hash: [0; 20] }, &[], 0);
        self.call(|callbacks| callbacks.exists, deadline_ns);
        match self.results().next() {
            Some(Ok(_) | Err(RemoteError::Absent)) => {}
            Some(Err(error)) => return Err(Error::from(error)),
            None => return Err(Status::Invalid.into()),
        }
        let words = "a custom remote".to_string();
        Ok(Server { words, warnings: Vec::new() })
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        self.clear();
        for at in 0..gets.items.len() {
            let Some(get) = gets.items.get(at) else { break };
            let (name, offset) = (get.name, get.offset);
            self.add(&name, gets.parts_of(at), offset);
        }
        self.call(|callbacks| callbacks.get, deadline_ns);
        let rooms: Vec<u64> = (0..gets.items.len()).map(|at| gets.room_of(at)).collect();
        for ((get, result), room) in gets.items.iter_mut().zip(self.results()).zip(rooms) {
            // A callback that reports more bytes than there is room for is wrong.
            get.result = result
                .and_then(|read| if read <= room { Ok(read) } else { Err(RemoteError::Malformed) });
        }
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        self.clear();
        for at in 0..puts.items.len() {
            let Some(put) = puts.items.get(at) else { break };
            let name = put.name;
            self.add(&name, puts.parts_of(at), 0);
        }
        self.call(|callbacks| callbacks.put, deadline_ns);
        for (put, result) in puts.items.iter_mut().zip(self.results()) {
            put.result = result.map(|existed| existed != 0);
        }
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.clear();
        queries.items.iter().for_each(|query| self.add(&query.name, &[], 0));
        self.call(|callbacks| callbacks.exists, deadline_ns);
        let results = self.results();
        queries.items.iter_mut().zip(results).for_each(|(query, result)| query.result = result);
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.clear();
        queries.items.iter().for_each(|query| self.add(&query.name, &[], 0));
        self.call(|callbacks| callbacks.remove, deadline_ns);
        for (query, result) in queries.items.iter_mut().zip(self.results()) {
            query.result = match result {
                Err(RemoteError::Absent) => Ok(0),
                result => result,
            };
        }
    }
}
