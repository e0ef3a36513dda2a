//! The store: opened from a spec, looked at, closed.

use std::ffi::c_char;

use crate::base::callback::refuse_reentry;
use crate::base::core::Core;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::{
    Plain, capi, free, insert, known_flags, noun, pin_optional, read, require, text,
};
use crate::ffi::budget::kvt_budget_t;
use crate::ffi::device::{device_of, kvt_device_t};
use crate::ffi::error::kvt_error_t;
use crate::ffi::remote::{kvt_secret_t, secrets_of};
use crate::ffi::remote_custom::{kvt_remote_custom_t, remote_of};
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::ffi::status::kvt_status_t;
use crate::store::handle::Store;
use crate::store::spec::{Fields, StoreSpec};
use crate::store::state::Write;
use crate::store::state::stats::Engine;

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
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
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
