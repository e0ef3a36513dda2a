//! Offloads on a device: how much memory they take, and what their copies wait for.

use crate::device::Event;
use crate::ffi::error::kvt_error_t;
use crate::ffi::guard::guard_err;
use crate::ffi::handle::{Access, pin};
use crate::ffi::offload::{kvt_offload_opts_t, kvt_offload_t, options, with_offload};
use crate::ffi::session::SessionNoun;
use crate::ffi::slice::require;
use crate::ffi::status::kvt_status_t;
use crate::ffi::structs::read;
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_offload_memory_bytes(
    opts: *const kvt_offload_opts_t,
    bytes_out: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let body = || {
        // SAFETY: the caller's promise.
        let mut given = unsafe {
            require(bytes_out)?;
            read(opts)?
        };
        (given.memory, given.memory_bytes) = (0, 0);
        let session = pin::<SessionNoun>(given.session, Access::Use)?;
        // SAFETY: the caller's promise; policies of the engine's are not kept.
        let (opts, _) = unsafe { options(&given, session.number)? };
        let bytes = Offload::memory_bytes(&session.ns.store, &opts)?;
        // SAFETY: not null, and the caller's promise.
        unsafe { bytes_out.write(bytes) };
        Ok(())
    };
    // SAFETY: the caller's promise about `err`.
    unsafe { guard_err(err, body) }
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvt_offload_after(
    offload: *const kvt_offload_t,
    event: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let event = (event != 0).then_some(Event(event));
    // SAFETY: the caller's promise about `err`.
    unsafe { guard_err(err, || with_offload(offload, |offload| offload.after(event))) }
}
