//! An offload for a session that was forked.

use crate::ffi::abi::{Access, capi, insert, pin, require};
use crate::ffi::error::kvt_error_t;
use crate::ffi::offload::{OffloadNoun, kvt_offload_t, with_offload};
use crate::ffi::session::kvt_session_t;
use crate::ffi::status::kvt_status_t;

/// Opens another offload for a session that was forked from an offload's (kvt_session_fork):
/// it has the same tokens. The blocks in the store are those of both, the tails are copied,
/// and so are the lists of tokens that are left; policies go on from what they know. It has a
/// ring of its own, with nothing in it, which the store's account pays for, and counts from
/// zero. A full tail leaves first.
///
/// @param offload  The offload, which stays as it is.
/// @param session  The new session; it has the tokens that the offload's layers have, and may
///                 have more.
/// @param out      The new offload; close it with kvt_offload_close.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID when the session is the offload's own, another store's or
///         namespace's, or has other tokens; KVT_E_BUDGET, KVT_E_LIMIT, KVT_E_AGAIN,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the new offload. Threading: any thread; waits for a full tail to
/// leave. Since 0.1.
///
/// # Safety
/// Pointers are null or valid.
#[capi]
pub unsafe extern "C" fn kvt_offload_fork(
    offload: *const kvt_offload_t,
    session: *const kvt_session_t,
    out: *mut *mut kvt_offload_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let session = pin(session, Access::Use)?;
    let other = with_offload(offload, |offload| offload.fork(&session.ns.store, session.number))?;
    out.write(insert(OffloadNoun::new(other, session))?);
    Ok(())
}
