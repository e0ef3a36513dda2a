//! A store's remote: its secrets, what it has of a session, what is counted of it.

use std::ffi::{c_char, c_void};

use crate::base::status::Result;
use crate::ffi::abi::{Plain, Strided, capi, check_out, enter, inspect, text, text_bytes, write};
use crate::ffi::blocks::{keys_of, kvt_names_t};
use crate::ffi::error::kvt_error_t;
use crate::ffi::op::{begin_one, kvt_op_t, kvt_submit_opts_t};
use crate::ffi::session::kvt_session_t;
use crate::ffi::status::kvt_status_t;
use crate::ffi::store::kvt_store_t;
use crate::store::spec::Secrets;
use crate::store::state::RemoteCounters;
use crate::tier::remote::breaker::{Breaker, Direction, State};

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
        State::Closed => KVT_REMOTE_CIRCUIT_CLOSED,
        State::Open => KVT_REMOTE_CIRCUIT_OPEN,
        State::HalfOpen => KVT_REMOTE_CIRCUIT_PROBING,
    }
}

fn filled(breaker: &Breaker, counted: &RemoteCounters) -> kvt_remote_stats_t {
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
pub unsafe extern "C" fn kvt_store_remote(
    store: *const kvt_store_t,
    out: *mut kvt_remote_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let store = inspect(store)?;
    let stats = store.store.look(|core| {
        let both = core.remote_breaker().zip(core.remote_counters());
        both.map_or(kvt_remote_stats_t::zeroed(), |(breaker, counted)| filled(breaker, &counted))
    })?;
    write(out, &stats);
    Ok(())
}

/// Begins to find out how far a session can go on with what the store has and what its remote
/// has. Never waits. The op's value is the tokens from the session's first one on that can be
/// used; what is at the remote is part of lookups and plans from then on, and comes with gets
/// and prefetches. Appending a chunk or more asks by itself (ask=append): the op then only
/// waits for the answers. Without a remote, or while that is left alone, it ends at once with
/// what is here.
///
/// What the remote has is a hint: it may be gone when it is fetched, which is a miss.
///
/// @param session  The session.
/// @param opts     Queue, tag, deadline; null for defaults. Set a deadline: after it the op
///                 ends with KVT_E_TIMEOUT, and what was heard until then counts.
/// @param op_out   Receives the op; null with a queue to be told by that alone.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_AGAIN (as many moves or ops are under way as may be, or the queue is
///         full), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the op. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_session_locate(
    session: *const kvt_session_t,
    opts: *const kvt_submit_opts_t,
    op_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    begin_one(opts, op_out, |opts| {
        let session = enter(session)?;
        session.ns.store.locate(session.number, opts)
    })
}

/// Begins to find out which of some blocks the store has, in a tier of its own or at its remote.
/// Never waits. What is at the remote is known to kvt_namespace_find_blocks from then on, as
/// 1 << KVT_TIER_REMOTE, and comes with kvt_session_get_blocks and kvt_session_prefetch_blocks.
/// No block depends on another: all are asked for that are not here and were not asked for lately.
/// Without a remote, or while that is left alone, the op ends at once with what is here.
///
/// The op has an item for each block (kvt_op_items): KVT_OK when all of it is here or at the
/// remote, KVT_E_NOT_FOUND when it is not, as far as is known. Its own status is KVT_OK when all
/// are, else that of those that are not. Its value is how many tokens from the first on can be
/// used without a gap.
///
/// What the remote has is a hint: it may be gone when it is fetched, which is a miss. A hint is
/// forgotten when rows of the table are needed for what the store itself keeps, or after as many
/// others as the remote's parameter `known` says; ask again then.
///
/// @param session  The session; closing it does not end the op.
/// @param names    The names, 1 to 65536; one that is there twice has two items. Copied.
/// @param opts     Queue, tag, deadline; null for defaults. Set a deadline: after it blocks that
///                 nothing is known of end with KVT_E_TIMEOUT, and what was heard counts.
/// @param op_out   Receives the op; null with a queue to be told by that alone.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_AGAIN (as many moves or ops are under way, or 2^20 blocks are asked for,
///         as may be; or the queue is full), KVT_E_LIMIT, KVT_E_INVALID, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the op. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_session_locate_blocks(
    session: *const kvt_session_t,
    names: *const kvt_names_t,
    opts: *const kvt_submit_opts_t,
    op_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    begin_one(opts, op_out, |opts| {
        let session = enter(session)?;
        session.ns.store.locate_blocks(session.number, keys_of(&session.ns, names)?, opts)
    })
}
