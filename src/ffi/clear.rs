//! What leaves a store, or its memory, at the engine's wish, and pins that go.

use crate::base::callback::refuse_reentry;
use crate::base::status::Result;
use crate::ffi::abi::{HasSize, Plain, capi, check_out, enter, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::namespace::kvt_namespace_t;
use crate::ffi::session::kvt_session_t;
use crate::ffi::status::kvt_status_t;
use crate::store::state::StoreState;
use crate::store::state::disk_gc::Cleared;

/// What became of chunks that were to go.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_clear_report_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Chunks that are in no tier any more.
    pub removed_chunks: u64,
    /// Chunks that stay: sessions, moves or pins hold them, or others that stay
    /// continue them.
    pub referenced_chunks: u64,
    /// Chunks that stay, since they were on their way between tiers: call again.
    pub transferring_chunks: u64,
}

/// What becomes of chunks in memory that are to go down.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_demote_report_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Chunks that were on disk, too: their memory is given back.
    pub freed_chunks: u64,
    /// Chunks whose memory is given back as soon as they are on disk.
    pub pending_chunks: u64,
    /// Chunks that stay: there is no disk.
    pub kept_chunks: u64,
}

fn report(cleared: &Cleared) -> kvt_clear_report_t {
    kvt_clear_report_t {
        struct_size: 0,
        removed_chunks: cleared.gone,
        referenced_chunks: cleared.held,
        transferring_chunks: cleared.moving,
    }
}

/// # Safety
/// `out` is null, or passed check_out and is valid for the size it states.
pub(crate) unsafe fn tell(out: *mut kvt_clear_report_t, cleared: &Cleared) {
    if !out.is_null() {
        // SAFETY: the caller's promise.
        unsafe { write(out, &report(cleared)) };
    }
}

/// # Safety
/// `out` is null or valid for the size it states.
pub(crate) unsafe fn check<T: HasSize>(out: *mut T) -> Result<()> {
    // SAFETY: the caller's promise.
    if out.is_null() { Ok(()) } else { unsafe { check_out(out) } }
}

/// Takes everything of a namespace away that nobody holds: out of all tiers, and so
/// that it does not come back when the store is opened again. Waits for that; of
/// chunks that are stored meanwhile nothing is said. Their bytes stay in files until
/// those are used again; nobody finds them there.
///
/// @param ns        The namespace, which stays open.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param out          What stays, in counts; start it with KVT_CLEAR_REPORT_INIT. May
///                     be null.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TIMEOUT, KVT_E_BUDGET, KVT_E_IO: the chunks are gone, but may
///         come back with another opening (call again); KVT_E_REENTRANT inside a
///         callback; KVT_E_INVALID, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `out` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_namespace_clear(
    ns: *const kvt_namespace_t,
    deadline_ns: u64,
    out: *mut kvt_clear_report_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check(out)?;
    let ns = enter(ns)?;
    refuse_reentry()?;
    let cleared = ns.0.store.clear(ns.0.number, deadline_ns)?;
    tell(out, &cleared);
    Ok(())
}

/// What 0 tokens stands for: all from the first one on.
fn extent(core: &StoreState, session: u32, first_token: u64, tokens: u64) -> Result<u64> {
    let all = core.session(session)?.path().tokens().len() as u64;
    Ok(if tokens == 0 { all.saturating_sub(first_token) } else { tokens })
}

/// Takes chunks of a session away that nobody else holds: out of all tiers. The
/// session keeps its tokens, and finds chunks again that stay or are stored anew.
/// Never waits: after a crash what was on disk may be there again, as after any
/// eviction.
///
/// @param session      The session.
/// @param first_token  Where they begin, a multiple of a chunk's tokens.
/// @param tokens       How many, up to a multiple or the end; 0 = to the end.
/// @param out          What stays, in counts; start it with KVT_CLEAR_REPORT_INIT. May
///                     be null.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `out` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_session_drop(
    session: *const kvt_session_t,
    first_token: u64,
    tokens: u64,
    out: *mut kvt_clear_report_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check(out)?;
    let session = enter(session)?;
    let cleared = session.ns.store.with(|core| {
        let tokens = extent(core, session.number, first_token, tokens)?;
        core.drop_range(session.number, first_token, tokens)
    })?;
    tell(out, &cleared);
    Ok(())
}

/// Sends chunks of a session down: what of them is in memory is written to disk where it
/// is not there yet, and its memory is given back. Never waits: events
/// (KVT_STORE_REMOVED) and kvt_store_stats tell of the end. What admission and write=
/// say does not count. Who holds or has pinned the chunks finds them on disk; a get brings
/// them up again. What the disk refuses stays in memory as long as somebody holds it.
///
/// @param session      The session.
/// @param first_token  Where they begin, a multiple of a chunk's tokens.
/// @param tokens       How many, up to a multiple or the end; 0 = to the end.
/// @param out          How many leave; start it with KVT_DEMOTE_REPORT_INIT. May be
///                     null.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK, also where nothing is in memory; KVT_E_INVALID, KVT_E_NOMEM,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `out` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_session_demote(
    session: *const kvt_session_t,
    first_token: u64,
    tokens: u64,
    out: *mut kvt_demote_report_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check(out)?;
    let session = enter(session)?;
    let demoted = session.ns.store.with(|core| {
        let tokens = extent(core, session.number, first_token, tokens)?;
        core.demote_range(session.number, first_token, tokens)
    })?;
    write(
        out,
        &kvt_demote_report_t {
            struct_size: 0,
            freed_chunks: demoted.freed,
            pending_chunks: demoted.leaving,
            kept_chunks: demoted.staying,
        },
    );
    Ok(())
}

/// Takes the pins of chunks of a session away, whoever has set them.
///
/// @param session      The session.
/// @param first_token  Where they begin, a multiple of a chunk's tokens.
/// @param tokens       How many, up to a multiple or the end; 0 = to the end.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK, also where nothing is pinned; KVT_E_INVALID, KVT_E_NOMEM,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_session_unpin(
    session: *const kvt_session_t,
    first_token: u64,
    tokens: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let session = enter(session)?;
    session.ns.store.with(|core| {
        let tokens = extent(core, session.number, first_token, tokens)?;
        core.unpin_range(session.number, first_token, tokens)
    })
}
