//! Sessions: sequences of tokens in a namespace.

use std::ffi::c_char;

use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::{
    Plain, capi, check_out, enter, free, insert, inspect, known_flags, noun, read, require, text,
    write,
};
use crate::ffi::error::kvt_error_t;
use crate::ffi::namespace::{Space, kvt_namespace_t};
use crate::ffi::policy_keep::hint;
use crate::ffi::policy_use::{kvt_policy_hint_t, numbers};
use crate::ffi::status::kvt_status_t;
use crate::meta::chunks::Pin;
use crate::store::state::{SessionOpts, StoreState};
use crate::store::token_path::MAX_TOKENS;

/// A sequence of tokens whose KV is kept. Its chunks stay in a tier while it is
/// open. Internally locked: any thread may use it.
pub struct kvt_session_t(());

/// `priority` is given, also when it is 0.
pub const KVT_SESSION_PRIORITY: u64 = 1;

/// Who asks. All of it is optional.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_session_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_SESSION_*.
    pub flags: u64,
    /// What it is called, UTF-8, at most 256 bytes.
    pub name: *const c_char,
    /// Length of the name.
    pub name_bytes: u64,
    /// Its tenant.
    pub tenant: u32,
    /// Its class, at most 255: 0 leaves first; needs KVT_SESSION_PRIORITY.
    pub priority: u32,
    /// Most tokens it can have; 0 = not known.
    pub max_tokens: u32,
    /// Always 0.
    pub reserved: u32,
}

/// How far a session is.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_session_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Chunks that they fill.
    pub full_chunks: u64,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// Layers of a chunk.
    pub layers: u32,
}

/// A session, by its number in the store's core. The number is free again when
/// nobody is inside a call on the handle any more.
pub(crate) struct SessionNoun {
    pub(crate) ns: Arc<Space>,
    pub(crate) number: u32,
}

impl SessionNoun {
    /// How many tokens it has.
    pub(crate) fn tokens(&self) -> Result<u64> {
        let tokens = |core: &StoreState| -> Result<u64> {
            Ok(core.session(self.number)?.path().tokens().len() as u64)
        };
        self.ns.store.look(tokens)?
    }
}

impl Drop for SessionNoun {
    fn drop(&mut self) {
        if let Err(error) = self.ns.store.let_go(|core| core.close_session(self.number)) {
            log::error!("a session was not closed in its store: {error}");
        }
    }
}

noun!(SessionNoun, kvt_session_t, 12, "session");

/// # Safety
/// Its name is null or valid for its length.
unsafe fn options<'a>(given: &kvt_session_opts_t) -> Result<SessionOpts<'a>> {
    known_flags(given.flags, KVT_SESSION_PRIORITY)?;
    let named = given.flags & KVT_SESSION_PRIORITY != 0;
    let priority = match u8::try_from(given.priority) {
        Ok(priority) if named => Some(priority),
        Ok(0) => None,
        _ => fail!(Invalid, "priority {} without its flag, or above 255", given.priority),
    };
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
    // SAFETY: the caller's promise.
    let name = unsafe { text("name", given.name, given.name_bytes)? }.as_bytes();
    Ok(SessionOpts { name, tenant: given.tenant, priority, max_tokens: given.max_tokens })
}

/// Opens a session without tokens.
///
/// @param ns  Its namespace, which it keeps.
/// @param opts   Who asks; null for nothing.
/// @param out    The session; close it with kvt_session_close.
/// @param err    Explains a failure; may be null.
/// @return KVT_OK; KVT_E_AGAIN when as many are open as may be, KVT_E_INVALID,
///         KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the session. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_session_open(
    ns: *const kvt_namespace_t,
    opts: *const kvt_session_opts_t,
    out: *mut *mut kvt_session_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let opts = options(&read(opts)?)?;
    let noun = enter(ns)?;
    let ns = noun.0.clone();
    let number = ns.store.with(|core| core.open_session(ns.number, &opts))?;
    out.write(insert(SessionNoun { ns, number })?);
    Ok(())
}

/// Opens another session that goes on from where one is: it has the same tokens
/// and shares their full chunks.
///
/// @param session  The session, which stays as it is.
/// @param opts     Who asks; null for nothing. Nothing is taken from the other one.
/// @param out      The new session; close it with kvt_session_close.
/// @param err      Explains a failure; may be null.
/// @return As kvt_session_open.
///
/// Ownership: the caller owns the new session. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_session_fork(
    session: *const kvt_session_t,
    opts: *const kvt_session_opts_t,
    out: *mut *mut kvt_session_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let opts = options(&read(opts)?)?;
    let session = enter(session)?;
    let ns = session.ns.clone();
    let number = ns.store.with(|core| core.fork(session.number, &opts))?;
    out.write(insert(SessionNoun { ns, number })?);
    Ok(())
}

/// Adds tokens to a session. Chunks that they fill and that are in the store are
/// held from then on.
///
/// @param session  The session.
/// @param tokens   The tokens; copied.
/// @param count    How many; a session has at most 2^27.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_LIMIT, KVT_E_INVALID, KVT_E_NOMEM, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. Nothing changes on failure.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `tokens` is null with a count of 0, or valid for reads of `count` numbers.
#[capi]
pub unsafe extern "C" fn kvt_session_append(
    session: *const kvt_session_t,
    tokens: *const u32,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tokens = numbers(tokens, count, MAX_TOKENS)?;
    let session = enter(session)?;
    session.ns.store.with(|core| core.append(session.number, tokens))
}

/// Cuts a session. Moves that were submitted go on.
///
/// @param session  The session.
/// @param tokens   How many of its tokens are left.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID when it has fewer; KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_session_truncate(
    session: *const kvt_session_t,
    tokens: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let session = enter(session)?;
    session.ns.store.with(|core| core.truncate(session.number, tokens).map(|_| ()))
}

/// Keeps chunks of a session longer than their use says, also when it is closed:
/// until a time, unless nothing else may leave. Of two pins of a chunk the
/// stronger counts: the higher priority, the later time.
///
/// @param session      The session.
/// @param first_token  Where they begin, a multiple of a chunk's tokens.
/// @param tokens       How many, up to a multiple or the end; 0 = to the end.
/// @param priority     At most 255; what has less is given up first.
/// @param until_ns     CLOCK_MONOTONIC; 0 = for ever.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT when there are too many chunks,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_session_pin(
    session: *const kvt_session_t,
    first_token: u64,
    tokens: u64,
    priority: u32,
    until_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let Ok(priority) = u8::try_from(priority) else {
        fail!(Invalid, "priority {priority} is above 255");
    };
    let pin = Pin { priority, until_ns: if until_ns == 0 { u64::MAX } else { until_ns } };
    let session = enter(session)?;
    session.ns.store.with(|core| {
        let tokens = match tokens {
            0 => (core.session(session.number)?.path().tokens().len() as u64)
                .saturating_sub(first_token),
            tokens => tokens,
        };
        core.pin(session.number, first_token, tokens, pin)
    })
}

/// Tells the policies what the engine knows of the future of a session, usually
/// when a request of it has ended.
///
/// @param session  The session.
/// @param hint     The hint; its times are CLOCK_MONOTONIC.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `told` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_session_hint(
    session: *const kvt_session_t,
    hint: *const kvt_policy_hint_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let hint = self::hint(hint)?;
    let session = enter(session)?;
    session.ns.store.with(|core| core.hint(session.number, &hint))
}

/// How far a session is.
///
/// @param session  The session.
/// @param out      Filled in; start it with KVT_SESSION_INFO_INIT.
/// @return KVT_OK; KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_session_info(
    session: *const kvt_session_t,
    out: *mut kvt_session_info_t,
) -> kvt_status_t {
    check_out(out)?;
    let session = inspect(session)?;
    let ns = &session.ns;
    let tokens = session.tokens()?;
    write(
        out,
        &kvt_session_info_t {
            struct_size: 0,
            tokens,
            full_chunks: tokens / u64::from(ns.chunk_tokens),
            chunk_tokens: ns.chunk_tokens,
            layers: ns.layers as u32,
        },
    );
    Ok(())
}

/// Closes a session: its chunks may leave. Moves that were submitted go on.
///
/// @param session  Pointer to the handle, cleared on success; null, or a null
///                 handle, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `session` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_session_close(session: *mut *mut kvt_session_t) -> kvt_status_t {
    free(session, |_| Ok(()))
}
