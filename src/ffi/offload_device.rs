//! Offloads on a device: how much memory they take, and what their copies wait for.

use crate::device::Event;
use crate::ffi::abi::{Access, capi, pin, read, require};
use crate::ffi::error::kvt_error_t;
use crate::ffi::offload::{kvt_offload_opts_t, kvt_offload_t, options, with_offload};
use crate::ffi::status::kvt_status_t;
use crate::offload::Offload;

/// How much memory the ring and the tails of an offload take that is opened so: what an engine
/// has to lend. Nothing is opened.
///
/// @param opts       What it would be opened with; `memory` is not looked at.
/// @param bytes_out  Receives how much.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; what kvt_offload_open refuses of `opts`.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_offload_memory_bytes(
    opts: *const kvt_offload_opts_t,
    bytes_out: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(bytes_out)?;
    let mut given = read(opts)?;
    (given.memory, given.memory_bytes) = (0, 0);
    let session = pin(given.session, Access::Use)?;
    // SAFETY: the caller's promise; policies of the engine's are not kept.
    let (opts, _) = options(&given, session.number)?;
    let bytes = Offload::memory_bytes(&session.ns.store, &opts)?;
    bytes_out.write(bytes);
    Ok(())
}

/// What an offload copies from now on waits for an event of the store's device: that kernels
/// have read buffers which are given back, that what is put was computed. To be called before
/// kvt_offload_put, and before the kvt_offload_done or kvt_offload_give_back of a buffer that
/// kernels may still read. Only the newest event counts: one that comes behind all that has to
/// be waited for.
///
/// @param offload  The offload.
/// @param event    An event of the device that the store was opened with; 0 = none.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_HANDLE when it is none of that device (or the offload's handle). What
///         the event's batch failed with: the one before still counts. KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Ownership: the event stays yours. Release it after another one or 0 was given, or the
/// offload was closed, and once the puts and loads that were begun until then have ended. What
/// waits for an event that fails, fails. Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_offload_after(
    offload: *const kvt_offload_t,
    event: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let event = (event != 0).then_some(Event(event));
    with_offload(offload, |offload| offload.after(event))
}
