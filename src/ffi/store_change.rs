//! What may be changed of a store at work.

use std::ffi::c_char;

use crate::base::budget::Tier;
use crate::fail;
use crate::ffi::abi::{capi, enter, text};
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;
use crate::ffi::store::kvt_store_t;

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
pub unsafe extern "C" fn kvt_store_set_budget(
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
