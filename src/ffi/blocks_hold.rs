//! Blocks that stay as long as an engine says, and what it says of their future.

use crate::base::status::Status;
use crate::fail;
use crate::ffi::abi::{capi, enter};
use crate::ffi::blocks::{keys_of, kvt_names_t};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy_keep::hint;
use crate::ffi::policy_use::kvt_policy_hint_t;
use crate::ffi::session::kvt_session_t;
use crate::ffi::status::kvt_status_t;
use crate::store::state::blocks::MAX_BLOCKS;

/// Cells that policies are told of while the lock is held.
const CELLS_AT_ONCE: usize = 1 << 14;

/// Holds those of some blocks that are there: until they are let go they are in some tier, and
/// what is asked for of them is found. Memory that others need may still have them go down to
/// disk; kvt_session_prefetch_blocks brings them up. No use is counted. Never waits.
///
/// Each call counts, and each name in it: what is held twice is to be let go twice. A block of
/// which not all is there, or whose put has not ended, is not held, and says so. Closing the
/// session lets all go; forks hold nothing. Where memory or the table is full and all is held
/// there is no room for anything else: puts end with KVT_E_BUDGET, or are refused with
/// KVT_E_LIMIT. A hold does not repair: of a block whose only copy is found damaged only the
/// name stays held, for whoever puts it again.
///
/// @param session  The session. Others hold the same blocks on their own account.
/// @param names    The names, at most 65536.
/// @param out      Receives a byte for each, as kvt_namespace_find_blocks gives: 0 = not held.
///                 May be null for who lets go by closing the session.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_LIMIT (also: a session has 2^20 holds), KVT_E_INVALID,
///         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///         Nothing is held on failure.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `names` for the size it states, `out` for a byte a name.
#[capi]
pub unsafe extern "C" fn kvt_session_hold_blocks(
    session: *const kvt_session_t,
    names: *const kvt_names_t,
    out: *mut u8,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let session = enter(session)?;
    let keys = keys_of(&session.ns, names)?;
    let mut found = Vec::new();
    found.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
    found.resize(keys.len(), 0);
    let store = &session.ns.store;
    store.with(|core| core.hold_names(session.number, &keys, &mut found))?;
    if !out.is_null() {
        // SAFETY: room for a byte a name, by the caller's promise.
        std::ptr::copy_nonoverlapping(found.as_ptr(), out, found.len());
    }
    Ok(())
}

/// Takes one hold of each block back; the last one of all lets it leave. Never waits.
///
/// Give the names that were held, as kvt_session_hold_blocks said, and no others: one that the
/// session does not hold as often as it is named fails the call. Passing it over would let a
/// mistake in counting take away what another part of the program holds.
///
/// @param session  The session that holds them.
/// @param names    The names, at most 65536.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (also: not held), KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. Nothing changes on failure.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `names` for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_session_release_blocks(
    session: *const kvt_session_t,
    names: *const kvt_names_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let session = enter(session)?;
    let keys = keys_of(&session.ns, names)?;
    session.ns.store.with(|core| core.release_names(session.number, &keys))
}

/// Tells the policies what the engine knows of the future of some blocks, as kvt_session_hint
/// does of a session: in each tier, of each block by itself. Those that are not there are
/// passed over, and nothing is remembered of them.
///
/// @param session  The session; says whose words these are. Nothing is told of it.
/// @param names    The names, at most 65536.
/// @param hint     The hint; its times are CLOCK_MONOTONIC.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_session_hint_blocks(
    session: *const kvt_session_t,
    names: *const kvt_names_t,
    hint: *const kvt_policy_hint_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let hint = self::hint(hint)?;
    let session = enter(session)?;
    let keys = keys_of(&session.ns, names)?;
    if keys.len() > MAX_BLOCKS {
        fail!(Limit, "{} names; a call has at most {MAX_BLOCKS}", keys.len());
    }
    // Others have their turn between: policies may be told of each layer of each.
    let at_once = (CELLS_AT_ONCE / session.ns.layers.max(1)).max(1);
    let mut rest = &keys[..];
    loop {
        let (some, others) = rest.split_at(rest.len().min(at_once));
        session.ns.store.with(|core| core.hint_blocks(session.number, some, &hint))?;
        if others.is_empty() {
            return Ok(());
        }
        rest = others;
    }
}
