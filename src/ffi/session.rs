//! Sessions: sequences of tokens, transfers of their KV, plans, blocks.

use std::ffi::c_char;

use crate::base::budget::Tier;
use crate::base::callback::refuse_reentry;
use crate::base::fork;
use crate::base::op::{Op, OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Event;
use crate::fail;
use crate::ffi::abi::{
    HasSize, Plain, Strided, bytes, capi, check_optional_out, check_out, encode, enter, free, give,
    insert, inspect, known_flags, no_reserved, noun, numbers, pin_optional, read, require, text,
    write,
};
use crate::ffi::base::{kvt_error_t, kvt_status_t};
use crate::ffi::memory::{check_memory, kvt_view_t, views_of};
use crate::ffi::policy::{hint, kvt_policy_hint_t};
use crate::ffi::runtime::{begin_one, kvt_op_t, kvt_submit_opts_t, submit_opts};
use crate::ffi::store::{
    KVT_TIER_NONE, MAX_ROWS, Space, Target, answer, kvt_lookup_t, kvt_namespace_t, kvt_range_t,
};
use crate::format::keys::Key;
use crate::format::keys::block::BlockKeys;
use crate::format::keys::media::Medium;
use crate::meta::chunks::Pin;
use crate::meta::cost::Cost;
use crate::store::job_queues::LANES;
use crate::store::plan::StepKind;
use crate::store::ready_event::{Ready, Word};
use crate::store::state::blocks::{BlockMove, MAX_BLOCKS};
use crate::store::state::disk_gc::Cleared;
use crate::store::state::plans::{Leg, PlanTerms, SessionPlan};
use crate::store::state::session::Views;
use crate::store::state::transfer::MAX_MOVE_CHUNKS;
use crate::store::state::{
    CellRange, Level, SessionOpts, StoreState, TO_THE_END, TransferKind, Wanted,
};
use crate::store::token_path::MAX_TOKENS;

// Sessions.

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
    no_reserved(given.reserved)?;
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

// Ready events.

/// A moment that comes once: memory is ready. Moves wait for it (kvt_transfer_t.ready).
/// Internally locked: any thread may use it.
pub struct kvt_ready_event_t(());

/// It has not come yet.
pub const KVT_READY_EVENT_PENDING: u32 = 0;
/// It has come.
pub const KVT_READY_EVENT_SIGNALLED: u32 = 1;

/// An event; what waits for one that goes without a word does not begin.
pub(crate) struct EventNoun(pub(crate) Arc<Ready>);

impl Drop for EventNoun {
    fn drop(&mut self) {
        self.0.take_back();
    }
}

noun!(EventNoun, kvt_ready_event_t, 13, "event");

/// Opens an event that the program signals itself. It needs no runtime; moves of any
/// store may wait for it.
///
/// @param flags  None are defined yet: 0.
/// @param out    The event, pending; close it with kvt_ready_event_close.
/// @param err    Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the event. Threading: any thread, also in callbacks.
/// Since 0.1.
///
/// # Safety
/// Pointers are null or valid.
#[capi]
pub unsafe extern "C" fn kvt_ready_event_open(
    flags: u64,
    out: *mut *mut kvt_ready_event_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    fork::check()?;
    require(out)?;
    known_flags(flags, 0)?;
    out.write(insert(EventNoun(Arc::default()))?);
    Ok(())
}

/// Signals an event: it has come, for good. Moves that wait for it begin. Never
/// waits; of one that has come already nothing changes.
///
/// @param event  The event.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// None beyond the handle.
#[capi]
pub unsafe extern "C" fn kvt_ready_event_signal(event: *const kvt_ready_event_t) -> kvt_status_t {
    let event = enter(event)?;
    event.0.give();
    Ok(())
}

/// Whether an event has come.
///
/// @param event      The event.
/// @param out_state  KVT_EVENT_*.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `out_state` is null or valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_ready_event_query(
    event: *const kvt_ready_event_t,
    out_state: *mut u32,
) -> kvt_status_t {
    require(out_state)?;
    let event = inspect(event)?;
    let has_come = event.0.word() == Some(Word::Given);
    let state = if has_come { KVT_READY_EVENT_SIGNALLED } else { KVT_READY_EVENT_PENDING };
    out_state.write(state);
    Ok(())
}

/// Closes an event. Moves that wait for one that has not come end with
/// KVT_E_CANCELLED, and have touched nothing.
///
/// @param event  Pointer to the handle, cleared on success; null, or a null
///               handle, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `event` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_ready_event_close(event: *mut *mut kvt_ready_event_t) -> kvt_status_t {
    free(event, |_| Ok(()))
}

// Submission of transfers.

/// A struct that says what is moved.
pub(crate) trait Moved: HasSize {
    /// The flags that it has.
    const FLAGS: u64;
    /// Where a caller who wants an op for each item is sent.
    const EACH: &'static str;

    /// What of it all such structs have.
    fn common(&self) -> Common;
}

/// What all structs of moves have.
pub(crate) struct Common {
    pub(crate) flags: u64,
    pub(crate) reserved: u32,
    pub(crate) level: u32,
    pub(crate) ready: *const kvt_ready_event_t,
    pub(crate) first_layer: u32,
    pub(crate) k: *const kvt_view_t,
    pub(crate) v: *const kvt_view_t,
    pub(crate) stride_bytes: u64,
    pub(crate) after: u64,
}

/// How a move is begun.
pub(crate) struct How<'a> {
    pub(crate) level: Level,
    pub(crate) opts: OpOpts,
    pub(crate) ready: Option<&'a Ready>,
}

impl Common {
    /// The event of the store's device that copies are behind.
    pub(crate) fn after(&self) -> Option<Event> {
        (self.after != 0).then_some(Event(self.after))
    }

    /// Where the engine has so many layers and tokens; none = to the end of the session.
    ///
    /// # Safety
    /// What views lead to is valid, as the exported functions say.
    pub(crate) unsafe fn views(
        &self,
        noun: &SessionNoun,
        kind: TransferKind,
        (layers, tokens): (usize, Option<u64>),
    ) -> Result<Arc<Views>> {
        let views = match kind {
            TransferKind::Prefetch if self.k.is_null() && self.v.is_null() => Views::default(),
            TransferKind::Prefetch => fail!(Invalid, "a prefetch has no views"),
            // SAFETY: the caller's promise.
            _ => unsafe {
                views_of((self.k, self.v, self.stride_bytes), self.first_layer, layers, tokens)?
            },
        };
        check_memory(&noun.ns.store, &views, self.first_layer)?;
        Ok(Arc::new(views))
    }
}

/// Reads what all transfers have in common, has `begin` submit one, and gives its ops out.
///
/// # Safety
/// Pointers are null or valid, structs for the size they state; there is room for as many
/// ops as `begin` gives.
pub(crate) unsafe fn submit<M: Moved>(
    session: *const kvt_session_t,
    kind: TransferKind,
    moved: *const M,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
    begin: impl FnOnce(&SessionNoun, &M, &How<'_>) -> Result<Vec<OpRef>>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let (given, (opts, each)) = unsafe { (read(moved)?, submit_opts(opts, out_ops.is_null())?) };
    let common = given.common();
    known_flags(common.flags, M::FLAGS)?;
    if each {
        fail!(Invalid, "KVT_SUBMIT_EACH has no meaning here: see {}", M::EACH);
    }
    no_reserved(common.reserved)?;
    let level = level_of(common.level, kind)?;
    let ready = pin_optional(common.ready)?.map(|noun| noun.0.clone());
    let how = How { level, opts, ready: ready.as_deref() };
    let ops = begin(&*enter(session)?, &given, &how)?;
    for (i, op) in ops.iter().enumerate().filter(|_| !out_ops.is_null()) {
        // SAFETY: the caller has room for them.
        unsafe { out_ops.add(i).write(encode::<Op>(op.key())) };
    }
    Ok(())
}

// Transfers.

/// An op for each layer: out_ops then receives one per layer of the move, and the
/// tag of layer i of the move is the given one plus i. The move is given up once all
/// of them were cancelled.
pub const KVT_TRANSFER_EACH_LAYER: u64 = 1;
/// Of a get or a prefetch: only what going on after its last token needs. Of layers with a
/// window that is the chunks that have one of the window's last tokens, of layers with a
/// state the last chunk; their other cells are left alone, and are no misses. So a segment
/// of a plan can be got as it is planned. Views describe all tokens of the move.
pub const KVT_TRANSFER_NEEDED_ONLY: u64 = 2;

/// A put has ended when the cells are in memory.
pub const KVT_LEVEL_RAM: u32 = 0;
/// A put has ended when the cells are written to disk.
pub const KVT_LEVEL_DISK: u32 = 1;
/// A put has ended when the cells survive the end of the machine.
pub const KVT_LEVEL_DURABLE: u32 = 2;
/// A put has ended when the store's remote has said that it has the full chunks of which all
/// layers are there; what does not fill one, or misses layers that are still to come, is in
/// memory then. KVT_E_AGAIN where layers have left memory: they cannot be sent from elsewhere.
pub const KVT_LEVEL_REMOTE: u32 = 3;

/// A transfer of a session: tokens by layers, and where the engine has them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_transfer_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_TRANSFER_*.
    pub flags: u64,
    /// The first token, a multiple of a chunk's tokens.
    pub first_token: u64,
    /// How many; up to a multiple, or to the end of the session. 0 = to the end that it has
    /// when this is submitted: views say then how many tokens they have.
    pub tokens: u64,
    /// The first layer.
    pub first_layer: u32,
    /// How many; 0 = all from the first on.
    pub layers: u32,
    /// K (or the latent, or the states) of each layer; null for a prefetch.
    pub k: *const kvt_view_t,
    /// V of each layer; null when the layout has none in these layers. A layer
    /// without V has an entry that is all zero.
    pub v: *const kvt_view_t,
    /// sizeof(kvt_view_t).
    pub stride_bytes: u64,
    /// KVT_LEVEL_*, for puts alone.
    pub level: u32,
    /// Always 0.
    pub reserved: u32,
    /// Nothing of the move is begun before this event has come: sources are complete
    /// then, targets in use by nobody. Null = now. The handle may be closed once it was
    /// signalled. Prefetch before, if what comes from disk is to come meanwhile.
    pub ready: *const kvt_ready_event_t,
    /// Of a get or a prefetch: the chunks that are wanted, 0 = the one of first_token,
    /// ascending; copied. Views have their tokens one after the other, and no others. Null =
    /// all. What a sparse policy selects is got so.
    pub chunks: *const u32,
    /// How many.
    pub chunk_count: u64,
    /// An event of the store's device (kvt_device_copy, kvt_device_launch, kvt_device_import_event,
    /// kvt_device_create_event); 0 = none. No copy between the tensors and the store runs before it
    /// has come: they are put behind it on the device, and no thread waits. What they need from
    /// disk comes meanwhile. It stays yours, several moves may name it, and it is not to be
    /// released before the last of their ops was. One that fails, or is released before it was
    /// seen to come, fails the move with that: tensors are as they were where nothing came.
    /// With `ready` both have to come. Not for prefetches.
    pub after: u64,
}

impl Moved for kvt_transfer_t {
    const FLAGS: u64 = KVT_TRANSFER_EACH_LAYER | KVT_TRANSFER_NEEDED_ONLY;
    const EACH: &'static str = "KVT_TRANSFER_EACH_LAYER";

    fn common(&self) -> Common {
        let kvt_transfer_t { flags, reserved, level, ready, first_layer, .. } = *self;
        let kvt_transfer_t { k, v, stride_bytes, after, .. } = *self;
        Common { flags, reserved, level, ready, first_layer, k, v, stride_bytes, after }
    }
}

pub(crate) fn level_of(level: u32, kind: TransferKind) -> Result<Level> {
    match level {
        KVT_LEVEL_RAM => Ok(Level::Ram),
        _ if kind != TransferKind::Put => fail!(Invalid, "level is for puts alone"),
        KVT_LEVEL_DISK => Ok(Level::Disk),
        KVT_LEVEL_DURABLE => Ok(Level::Durable),
        KVT_LEVEL_REMOTE => Ok(Level::Remote),
        other => fail!(Invalid, "level {other} is none of KVT_LEVEL_*"),
    }
}

/// # Safety
/// `chunks` of `given` is null or valid for reads.
unsafe fn wanted_of(given: &kvt_transfer_t, kind: TransferKind) -> Result<Wanted> {
    let needed = given.flags & KVT_TRANSFER_NEEDED_ONLY != 0;
    if needed && kind == TransferKind::Put {
        fail!(Invalid, "KVT_TRANSFER_NEEDED_ONLY has no meaning for a put");
    }
    // SAFETY: the caller's promise.
    let chunks = unsafe { numbers(given.chunks, given.chunk_count, MAX_MOVE_CHUNKS)? };
    if !given.chunks.is_null() && chunks.is_empty() {
        fail!(Invalid, "chunk_count is 0 and chunks is not null: a move of nothing");
    }
    match (chunks.is_empty(), needed) {
        (true, true) => Ok(Wanted::Needed),
        (true, false) => Ok(Wanted::All),
        (false, true) => fail!(Invalid, "KVT_TRANSFER_NEEDED_ONLY and chunks: one or the other"),
        (false, false) if kind == TransferKind::Put => fail!(Invalid, "chunks are for gets alone"),
        (false, false) => {
            let mut wanted = Vec::new();
            wanted.try_reserve_exact(chunks.len()).map_err(|_| Status::NoMem)?;
            wanted.extend_from_slice(chunks);
            Ok(Wanted::Chunks(wanted))
        }
    }
}

/// The layers of a move, with what 0 stands for.
pub(crate) fn layers_of(all: usize, first: u32, given: u32) -> Result<usize> {
    let left = all.saturating_sub(first as usize);
    let layers = if given == 0 { left } else { given as usize };
    if layers == 0 || layers > left {
        fail!(Invalid, "{given} layers from {first} on, of a model with {all}");
    }
    Ok(layers)
}

/// # Safety
/// As the exported functions that call it.
unsafe fn move_rectangle(
    session: *const kvt_session_t,
    kind: TransferKind,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
) -> Result<()> {
    let begin = |noun: &SessionNoun, given: &kvt_transfer_t, how: &How<'_>| {
        // SAFETY: the caller's promise.
        let wanted = unsafe { wanted_of(given, kind)? };
        let layers = layers_of(noun.ns.layers, given.first_layer, given.layers)?;
        if given.tokens == TO_THE_END {
            fail!(Invalid, "{} tokens: no session has so many", given.tokens);
        }
        let tokens = (given.tokens != 0).then_some(given.tokens);
        let common = given.common();
        let transfer = CellRange {
            first_token: given.first_token,
            tokens: tokens.unwrap_or(TO_THE_END),
            first_layer: given.first_layer as usize,
            layers,
            by_layer: given.flags & KVT_TRANSFER_EACH_LAYER != 0,
            wanted,
            // SAFETY: the caller's promise.
            views: unsafe { common.views(noun, kind, (layers, tokens))? },
            after: common.after(),
        };
        let (store, How { level, opts, ready, .. }) = (&noun.ns.store, how);
        store.submit_after(noun.number, kind, *level, transfer, opts, *ready)
    };
    // SAFETY: the caller's promise; he has room for one op, or one a layer.
    unsafe { submit(session, kind, transfer, opts, out_ops, begin) }
}

/// Stores the KV of a transfer: from the engine's tensors into memory, and down
/// from there as the spec says. Cells that are there already are not stored again.
/// Never waits.
///
/// The op's value (kvt_completion_t, kvt_op_info_t) is how many tokens from the
/// first on were stored without a gap; bytes_done is what was copied. It ends with
/// KVT_E_BUDGET when memory could not be had, or KVT_E_IO when the disk failed; the
/// other cells are stored all the same.
///
/// @param session    The session; closing it does not end its moves.
/// @param transfer  What, and where it is; copied, tables of pages too.
/// @param opts       Queue, tag, deadline, priority; null for none.
/// @param out_ops    Receives the op (one per layer with KVT_TRANSFER_EACH_LAYER), to
///                   be freed by you; null when the queue alone tells of the end.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK when submitted; KVT_E_AGAIN when the queue, the runtime or the
///         store is full; KVT_E_INVALID, KVT_E_UNAVAILABLE (a level that needs a disk,
///         memory that no device reaches, an event of a device to a store without one),
///         KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE (also: `after`
///         is no event of the store's device), KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the ops; the tensors are the library's until the
/// release. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state; views lead
/// to memory that can be read until the release.
#[capi]
pub unsafe extern "C" fn kvt_session_put(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_rectangle(session, TransferKind::Put, transfer, opts, out_ops)
}

/// Loads the KV of a transfer into the engine's tensors, from whatever tier has
/// it. Never waits.
///
/// The op's value is how many tokens from the first on came without a gap. It ends
/// with KVT_E_NOT_FOUND when something was missing: the other cells came, and
/// the tensors are as they were where nothing came. A deadline turns what is late
/// into a miss.
///
/// @param session    See kvt_session_put.
/// @param transfer  See kvt_session_put.
/// @param opts       See kvt_session_put.
/// @param out_ops    See kvt_session_put.
/// @param err        Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: as kvt_session_put. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_session_put; views lead to memory that can be written.
#[capi]
pub unsafe extern "C" fn kvt_session_get(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_rectangle(session, TransferKind::Get, transfer, opts, out_ops)
}

/// Brings the KV of a transfer into memory, for a get to come. Never waits. The
/// op's value and result are those of a get.
///
/// @param session    See kvt_session_put.
/// @param transfer  What; without views.
/// @param opts       See kvt_session_put; KVT_PRIORITY_PREFETCH is what it is for.
/// @param out_ops    See kvt_session_put.
/// @param err        Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: the caller owns the ops. Threading: any thread, also in callbacks.
/// Since 0.1.
///
/// # Safety
/// As kvt_session_put.
#[capi]
pub unsafe extern "C" fn kvt_session_prefetch(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_rectangle(session, TransferKind::Prefetch, transfer, opts, out_ops)
}

// Plans.

/// Loads and computing do not go on at the same time, but one after the other.
pub const KVT_PLAN_NO_OVERLAP: u64 = 1;
/// What is on its way into the store is not counted on.
pub const KVT_PLAN_NO_WAIT: u64 = 2;
/// `alpha_ns` and `beta_ns` are given, also when they are 0.
pub const KVT_PLAN_COST: u64 = 4;

/// Nothing is to be done: the tokens are where the engine computes, or not needed.
pub const KVT_PLAN_RESIDENT: u32 = 0;
/// Load them (kvt_session_get).
pub const KVT_PLAN_LOAD: u32 = 1;
/// Compute them.
pub const KVT_PLAN_RECOMPUTE: u32 = 2;

/// How the engine will run. Zero is the default everywhere.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_plan_terms_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_PLAN_NO_OVERLAP, KVT_PLAN_NO_WAIT, KVT_PLAN_COST.
    pub flags: u64,
    /// With KVT_PLAN_COST: nanoseconds a token and token of context. Without it plans
    /// go by kvt_namespace_prefill_cost.
    pub alpha_ns: f64,
    /// With KVT_PLAN_COST: nanoseconds a token.
    pub beta_ns: f64,
    /// KVT_PRIORITY_* of the loads.
    pub priority: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Tokens in a row with which the same is to be done. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_plan_step_t {
    /// The first one.
    pub first_token: u64,
    /// How many.
    pub tokens: u64,
    /// KVT_PLAN_RESIDENT, KVT_PLAN_LOAD or KVT_PLAN_RECOMPUTE.
    pub kind: u32,
    /// The farthest tier that something of them is loaded from, KVT_TIER_*; or
    /// KVT_TIER_NONE.
    pub tier: u32,
    /// Bytes to be loaded from memory.
    pub host_bytes: u64,
    /// Bytes to be loaded from disk.
    pub disk_bytes: u64,
    /// Bytes to be loaded from elsewhere.
    pub remote_bytes: u64,
    /// How long this takes by itself, predicted.
    pub predicted_ns: u64,
    /// Bytes to be copied from the device tier, on the device.
    pub device_bytes: u64,
}

/// What a plan comes to.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_plan_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// All tokens of the session.
    pub tokens: u64,
    /// Tokens with which nothing is to be done.
    pub resident_tokens: u64,
    /// Tokens to be loaded.
    pub load_tokens: u64,
    /// Tokens to be computed.
    pub recompute_tokens: u64,
    /// Until all is there, predicted, with what waits before it.
    pub total_ns: u64,
    /// Of that, loading alone.
    pub load_ns: u64,
    /// Of that, computing alone.
    pub compute_ns: u64,
    /// What computing all of it would take.
    pub without_ns: u64,
}

fn terms_of(given: &kvt_plan_terms_t) -> Result<PlanTerms> {
    known_flags(given.flags, KVT_PLAN_NO_OVERLAP | KVT_PLAN_NO_WAIT | KVT_PLAN_COST)?;
    let is_set = |flag: u64| given.flags & flag != 0;
    no_reserved(given.reserved)?;
    if given.priority as usize >= LANES {
        fail!(Invalid, "priority {} is none of 0 to {}", given.priority, LANES - 1);
    }
    let (alpha, beta) = (given.alpha_ns, given.beta_ns);
    let cost = match is_set(KVT_PLAN_COST) {
        true => Some(Cost { alpha, beta }),
        false if alpha != 0.0 || beta != 0.0 => fail!(Invalid, "a cost without KVT_PLAN_COST"),
        false => None,
    };
    let sound = |x: f64| x.is_finite() && (0.0..=1e15).contains(&x);
    if !sound(alpha) || !sound(beta) {
        fail!(Invalid, "a cost of {alpha} and {beta} ns is not 0 to 1e15");
    }
    Ok(PlanTerms {
        overlap: !is_set(KVT_PLAN_NO_OVERLAP),
        wait: !is_set(KVT_PLAN_NO_WAIT),
        lane: given.priority as usize,
        cost,
    })
}

fn step(leg: &Leg) -> kvt_plan_step_t {
    let [host_bytes, disk_bytes, remote_bytes, device_bytes] = leg.bytes;
    let from = [
        (remote_bytes, Tier::Remote),
        (disk_bytes, Tier::Disk),
        (host_bytes, Tier::Host),
        (device_bytes, Tier::Device),
    ];
    let farthest = from.into_iter().find(|&(bytes, _)| bytes > 0);
    kvt_plan_step_t {
        first_token: leg.first_token,
        tokens: leg.tokens,
        kind: match leg.kind {
            StepKind::Resident => KVT_PLAN_RESIDENT,
            StepKind::Load => KVT_PLAN_LOAD,
            StepKind::Recompute => KVT_PLAN_RECOMPUTE,
        },
        tier: farthest.map_or(KVT_TIER_NONE, |(_, tier)| tier as u32),
        host_bytes,
        disk_bytes,
        remote_bytes,
        predicted_ns: leg.ns as u64,
        device_bytes,
    }
}

fn summary(plan: &SessionPlan) -> kvt_plan_t {
    let tokens = |kind: Option<StepKind>| -> u64 {
        let legs = plan.legs.iter().filter(|leg| kind.is_none_or(|kind| leg.kind == kind));
        legs.map(|leg| leg.tokens).sum()
    };
    kvt_plan_t {
        struct_size: 0,
        tokens: tokens(None),
        resident_tokens: tokens(Some(StepKind::Resident)),
        load_tokens: tokens(Some(StepKind::Load)),
        recompute_tokens: tokens(Some(StepKind::Recompute)),
        total_ns: plan.total_ns as u64,
        load_ns: plan.load_ns as u64,
        compute_ns: plan.compute_ns as u64,
        without_ns: plan.without_ns as u64,
    }
}

/// The cheapest way to have the KV of all tokens of a session: what is loaded, what is
/// computed, from what is where, what waits before it, and what both take. No use is
/// counted, nothing is held beyond what the session holds.
///
/// Without KVT_NAMESPACE_HOLES everything before the first token to be computed is
/// loaded or resident, and all behind it is computed.
///
/// @param session       The session.
/// @param terms         How the engine will run; null for defaults.
/// @param steps      Receives all tokens as steps, in their order; may be null
///                      with capacity 0 to learn how many there are.
/// @param capacity      Room there, in entries, at most 2^24.
/// @param stride_bytes  sizeof(kvt_plan_step_t).
/// @param out_count     How many steps there are; also written with
///                      KVT_E_TOO_SMALL. May be null.
/// @param out           The sum of it; start it with KVT_PLAN_INIT. May be null.
/// @param err           Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; structs are valid for the size they
/// state.
#[capi]
pub unsafe extern "C" fn kvt_session_plan(
    session: *const kvt_session_t,
    terms: *const kvt_plan_terms_t,
    steps: *mut kvt_plan_step_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out: *mut kvt_plan_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_optional_out(out)?;
    let terms = terms_of(&read(terms)?)?;
    let (terms, rows) = (terms, Strided::new(steps, capacity, stride_bytes, MAX_ROWS)?);
    let session = enter(session)?;
    let plan = session.ns.store.with(|core| core.plan(session.number, &terms).cloned())?;
    give(&rows, steps.is_null(), plan.legs.iter().map(step), out_count)?;
    write(out, &summary(&plan));
    Ok(())
}

// Media.

/// An image or a sound in a sequence. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_media_t {
    /// Its first token, as an index into the sequence's tokens.
    pub token: u64,
    /// What it is: 32 bytes of a hash of at least 256 bits, never shortened.
    pub digest: [u8; 32],
}

/// Tokens, and the media that start in them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sequence_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The tokens.
    pub tokens: *const u32,
    /// How many, at most 2^27.
    pub token_count: u64,
    /// The media, ascending by their tokens, one at each.
    pub media: *const kvt_media_t,
    /// How many, at most 2^24.
    pub media_count: u64,
    /// sizeof(kvt_media_t).
    pub media_stride_bytes: u64,
}

/// The media of a sequence, by their indices.
///
/// # Safety
/// Its array is null or valid for its length.
unsafe fn media_of(given: &kvt_sequence_t) -> Result<Vec<Medium>> {
    let (base, count) = (given.media.cast_mut(), given.media_count);
    // SAFETY: the caller's promise; nothing is written there.
    let rows = unsafe { Strided::new(base, count, given.media_stride_bytes, MAX_ROWS)? };
    let mut media = Vec::new();
    media.try_reserve_exact(rows.len()).map_err(|_| Status::NoMem)?;
    for at in 0..rows.len() {
        let kvt_media_t { token, digest } = rows.get(at)?;
        if token >= given.token_count {
            fail!(Invalid, "media {at} starts at token {token} of {}", given.token_count);
        }
        media.push(Medium { token, digest });
    }
    Ok(media)
}

/// Adds tokens with media to a session. Where media start in a chunk its key depends on
/// them, and so do the keys of all chunks behind it (docs/keys.md): equal tokens with other
/// images share nothing from there on.
///
/// @param session   The session.
/// @param sequence  What is added; copied.
/// @param err       Explains a failure; may be null.
/// @return As kvt_session_append; KVT_E_INVALID also for media that do not ascend or
///         start beyond the tokens, KVT_E_TOO_NEW. Nothing changes on failure.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `sequence` is null or valid for the size it states, its arrays for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_session_append_media(
    session: *const kvt_session_t,
    sequence: *const kvt_sequence_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let given = read(sequence)?;
    let (tokens, mut media) =
        (numbers(given.tokens, given.token_count, MAX_TOKENS)?, media_of(&given)?);
    let session = enter(session)?;
    session.ns.store.with(|core| {
        let before = core.session(session.number)?.path().tokens().len() as u64;
        media.iter_mut().for_each(|one| one.token += before);
        core.append_media(session.number, tokens, &media)
    })
}

/// kvt_namespace_lookup for a sequence with media.
///
/// @param ns         The namespace.
/// @param sequence      The sequence.
/// @param ranges        See kvt_namespace_lookup.
/// @param capacity      See kvt_namespace_lookup.
/// @param stride_bytes  See kvt_namespace_lookup.
/// @param out_count     See kvt_namespace_lookup.
/// @param out           See kvt_namespace_lookup.
/// @param err           Explains a failure; may be null.
/// @return As kvt_namespace_lookup; KVT_E_TOO_NEW.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_namespace_lookup; `sequence` is null or valid for the size it states, its arrays
/// for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_namespace_lookup_media(
    ns: *const kvt_namespace_t,
    sequence: *const kvt_sequence_t,
    ranges: *mut kvt_range_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    out: *mut kvt_lookup_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = Target { ranges, capacity, stride_bytes, out_count, out };
    let given = read(sequence)?;
    let tokens = numbers(given.tokens, given.token_count, MAX_TOKENS)?;
    let media = media_of(&given)?;
    answer(ns, &to, |ns| ns.store.lookup_media(ns.number, tokens, &media))
}

/// Says what the full chunks of a sequence are called in events and files: the keys that
/// docs/keys.md defines. A router that knows who has which keys finds by them where a prompt's
/// prefix is.
///
/// @param ns      The namespace.
/// @param sequence   The sequence.
/// @param keys       Receives KVT_KEY_BYTES for each, in their order; may be null with
///                   capacity 0 to learn how many there are.
/// @param capacity   Room there, in keys.
/// @param out_count  How many there are; also written with KVT_E_TOO_SMALL.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `sequence` is valid for the size it states,
/// its arrays for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_namespace_chunk_keys(
    ns: *const kvt_namespace_t,
    sequence: *const kvt_sequence_t,
    keys: *mut u8,
    capacity: u64,
    out_count: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_count)?;
    let given = read(sequence)?;
    let (tokens, media) =
        (numbers(given.tokens, given.token_count, MAX_TOKENS)?, media_of(&given)?);
    if keys.is_null() && capacity > 0 {
        fail!(Invalid, "keys is null, and capacity {capacity}");
    }
    let ns = enter(ns)?;
    let made = ns.0.store.chunk_keys(ns.0.number, tokens, &media)?;
    out_count.write(made.len() as u64);
    if keys.is_null() || made.is_empty() {
        return Ok(());
    }
    if (made.len() as u64) > capacity {
        fail!(TooSmall, "{} keys, and room for {capacity}", made.len());
    }
    // SAFETY: there is room for as many keys, as the caller promises, and a key is its
    // bytes.
    std::ptr::copy_nonoverlapping(made.as_ptr().cast(), keys, size_of_val(&made[..]));
    Ok(())
}

// Blocks: chunks that the engine names itself.

/// Most names of a call.
const MAX_NAMES: usize = 1 << 22;
/// Keys that are looked for while the lock is held.
const GROUP: usize = 1024;

/// What an engine calls its blocks: any bytes, one name after the other. Equal names
/// are equal content: its own hashes, say, of all that the content depends on and the
/// namespace's identity does not say.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_block_names_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The names, without gaps.
    pub bytes: *const u8,
    /// Where each ends, from `bytes` on, ascending; null = all have each_bytes bytes.
    pub ends: *const u64,
    /// Bytes of a name, 1 to 65536; 0 with ends.
    pub each_bytes: u64,
    /// How many; at most 2^22, and 65536 for a move or to locate them.
    pub count: u64,
}

/// Blocks, and where the engine has them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_blocks_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Always 0.
    pub flags: u64,
    /// What they are called.
    pub names: *const kvt_block_names_t,
    /// The first layer.
    pub first_layer: u32,
    /// How many; 0 = all from the first on.
    pub layers: u32,
    /// K (or the latent, or the states) of each layer: the tokens of all blocks, in the
    /// order of their names. Pages with the tokens of a chunk each give every block its own
    /// address. Null for a prefetch.
    pub k: *const kvt_view_t,
    /// V of each layer; null when the layout has none in these layers. A layer
    /// without V has an entry that is all zero.
    pub v: *const kvt_view_t,
    /// sizeof(kvt_view_t).
    pub stride_bytes: u64,
    /// KVT_LEVEL_*, for puts alone.
    pub level: u32,
    /// Always 0.
    pub reserved: u32,
    /// See kvt_transfer_t.
    pub ready: *const kvt_ready_event_t,
    /// See kvt_transfer_t.
    pub after: u64,
}

impl Moved for kvt_blocks_t {
    const FLAGS: u64 = 0;
    const EACH: &'static str = "kvt_op_items";

    fn common(&self) -> Common {
        let kvt_blocks_t { flags, reserved, level, ready, first_layer, .. } = *self;
        let kvt_blocks_t { k, v, stride_bytes, after, .. } = *self;
        Common { flags, reserved, level, ready, first_layer, k, v, stride_bytes, after }
    }
}

/// The keys of named blocks of a namespace.
///
/// # Safety
/// `names` is valid for the size it states, and what it leads to for reads.
pub(crate) unsafe fn keys_of(ns: &Space, names: *const kvt_block_names_t) -> Result<Vec<Key>> {
    if names.is_null() {
        fail!(Invalid, "names is null");
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(names)? };
    if given.count > MAX_NAMES as u64 {
        fail!(Limit, "{} names; a call has at most {MAX_NAMES}", given.count);
    }
    let keys = BlockKeys::new(&ns.key);
    if given.ends.is_null() {
        let Some(all) = given.each_bytes.checked_mul(given.count) else {
            fail!(Limit, "{} names of {} bytes", given.count, given.each_bytes);
        };
        if given.each_bytes == 0 && given.count > 0 {
            fail!(Invalid, "each_bytes is 0, and ends null: how long are the names?");
        }
        // SAFETY: the caller's promise.
        let all = unsafe { bytes(given.bytes, all)? };
        return keys.all(all.chunks_exact(given.each_bytes.max(1) as usize));
    }
    if given.each_bytes != 0 {
        fail!(Invalid, "each_bytes is {} and ends is not null: one or the other", given.each_bytes);
    }
    // SAFETY: the caller's promise.
    let (ends, all) = unsafe {
        let ends = numbers(given.ends, given.count, MAX_NAMES)?;
        (ends, bytes(given.bytes, ends.last().copied().unwrap_or(0))?)
    };
    let mut made = Vec::new();
    made.try_reserve_exact(ends.len()).map_err(|_| Status::NoMem)?;
    let mut from = 0;
    for (at, &end) in ends.iter().enumerate() {
        let Some(name) = all.get(from..usize::try_from(end).unwrap_or(usize::MAX)) else {
            fail!(Invalid, "name {at} ends at {end}, behind it or before its beginning at {from}");
        };
        made.push(keys.key(name)?);
        from += name.len();
    }
    Ok(made)
}

/// Says what blocks are called in events and files: the keys that docs/keys.md defines.
///
/// @param ns  The namespace.
/// @param names  The names.
/// @param out    Receives KVT_KEY_BYTES for each.
/// @param err    Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_namespace_block_keys(
    ns: *const kvt_namespace_t,
    names: *const kvt_block_names_t,
    out: *mut u8,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let ns = enter(ns)?;
    let keys = keys_of(&ns.0, names)?;
    if !keys.is_empty() {
        require(out)?;
    }
    let each = crate::ffi::store::KVT_KEY_BYTES as usize;
    for (i, key) in keys.iter().enumerate() {
        std::ptr::copy_nonoverlapping(key.0.as_ptr(), out.add(i * each), each);
    }
    Ok(())
}

/// Says of blocks whether a namespace has them, and where. No use is counted, nothing
/// is held. The remote is not asked: kvt_session_remote_lookup_blocks does that, and one that was found
/// there has 1 << KVT_TIER_REMOTE alone; without KVT_EXISTS_WHOLE it is not here, but gets and
/// prefetches bring it.
///
/// @param ns  The namespace.
/// @param names  The names.
/// @param out    Receives a byte for each, as kvt_namespace_exists gives.
/// @param err    Explains a failure; may be null.
/// @return As kvt_namespace_block_keys.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_namespace_block_keys.
#[capi]
pub unsafe extern "C" fn kvt_namespace_blocks_exist(
    ns: *const kvt_namespace_t,
    names: *const kvt_block_names_t,
    out: *mut u8,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let ns = enter(ns)?;
    let keys = keys_of(&ns.0, names)?;
    if !keys.is_empty() {
        require(out)?;
    }
    let mut found = Vec::new();
    found.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
    found.resize(keys.len(), 0);
    for (keys, found) in keys.chunks(GROUP).zip(found.chunks_mut(GROUP)) {
        ns.0.store.look(|core| core.exists(ns.0.number, keys, found))??;
    }
    // SAFETY: room for a byte a name, by the caller's promise.
    std::ptr::copy_nonoverlapping(found.as_ptr(), out, found.len());
    Ok(())
}

/// # Safety
/// As the exported functions that call it.
unsafe fn move_blocks(
    session: *const kvt_session_t,
    kind: TransferKind,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
) -> Result<()> {
    let begin = |noun: &SessionNoun, given: &kvt_blocks_t, how: &How<'_>| {
        let layers = layers_of(noun.ns.layers, given.first_layer, given.layers)?;
        // SAFETY: the caller's promise.
        let keys = unsafe { keys_of(&noun.ns, given.names)? };
        let tokens = keys.len() as u64 * u64::from(noun.ns.chunk_tokens);
        let common = given.common();
        let blocks = BlockMove {
            keys,
            first_layer: given.first_layer as usize,
            layers,
            // SAFETY: the caller's promise.
            views: unsafe { common.views(noun, kind, (layers, Some(tokens)))? },
            after: common.after(),
        };
        let (store, How { level, opts, ready, .. }) = (&noun.ns.store, how);
        store.submit_blocks(noun.number, (kind, *level), blocks, opts, *ready)
    };
    // SAFETY: the caller's promise; there is one op.
    unsafe { submit(session, kind, blocks, opts, out_op, begin) }
}

/// Stores blocks that the engine has named: from its tensors into memory, and down from
/// there as the spec says. Those that are there already are not stored again. Never waits.
///
/// A block is a chunk of the namespace's layout that continues no other one: it comes and
/// goes by itself. Sessions of the namespace share blocks as they share chunks; tokens have
/// nothing to do with it. The session says who asks: its tenant, priority and turn. Whoever
/// keeps KV by tokens uses kvt_session_put.
///
/// The op has an item for each block (kvt_op_items), in their order, with the status of
/// that block. Its own status is KVT_OK when all are well, else that of one of them: a miss
/// only where nothing else went wrong. Its value is how many tokens from the first on were
/// stored without a gap.
///
/// @param session  The session; closing it does not end its moves.
/// @param blocks   What, and where it is; copied, names and tables of pages too.
/// @param opts     Queue, tag, deadline, priority; null for none.
/// @param out_op   Receives the op, to be freed by you; null when the queue alone tells of
///                 the end.
/// @param err      Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: the caller owns the op; the tensors are the library's until the release.
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state; views lead
/// to memory that can be read until the release.
#[capi]
pub unsafe extern "C" fn kvt_session_put_blocks(
    session: *const kvt_session_t,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_blocks(session, TransferKind::Put, blocks, opts, out_op)
}

/// Loads blocks into the engine's tensors, from whatever tier has them; from the remote those that
/// were located there (kvt_session_remote_lookup_blocks). Never waits.
///
/// The op ends with KVT_E_NOT_FOUND where some are missing: the others came. Its items say
/// which; the tensors of one that did not come may have been written in part.
///
/// @param session  See kvt_session_put_blocks.
/// @param blocks   See kvt_session_put_blocks.
/// @param opts     See kvt_session_put_blocks.
/// @param out_op   See kvt_session_put_blocks.
/// @param err      Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: as kvt_session_put_blocks. Threading: any thread, also in callbacks.
/// Since 0.1.
///
/// # Safety
/// As kvt_session_put_blocks; views lead to memory that can be written.
#[capi]
pub unsafe extern "C" fn kvt_session_get_blocks(
    session: *const kvt_session_t,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_blocks(session, TransferKind::Get, blocks, opts, out_op)
}

/// Brings blocks into memory, for a get to come. Never waits. The op's items are as those
/// of a get.
///
/// @param session  See kvt_session_put_blocks.
/// @param blocks   What; without views.
/// @param opts     See kvt_session_put_blocks; KVT_PRIORITY_PREFETCH is what it is for.
/// @param out_op   See kvt_session_put_blocks.
/// @param err      Explains a failure; may be null.
/// @return As kvt_session_put.
///
/// Ownership: the caller owns the op. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// As kvt_session_put_blocks.
#[capi]
pub unsafe extern "C" fn kvt_session_prefetch_blocks(
    session: *const kvt_session_t,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    move_blocks(session, TransferKind::Prefetch, blocks, opts, out_op)
}

/// Takes blocks away that nobody holds: out of all tiers. Those that moves or sessions hold
/// (kvt_session_hold_blocks) stay and are counted. Never waits: after a crash what was on disk
/// may be there again, as after any eviction.
///
/// @param session  The session.
/// @param names    The names, at most 65536; those that are not there are passed over.
/// @param out      What stays, in counts; start it with KVT_CLEAR_REPORT_INIT. May be null.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_session_drop_blocks(
    session: *const kvt_session_t,
    names: *const kvt_block_names_t,
    out: *mut kvt_clear_report_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_optional_out(out)?;
    let session = enter(session)?;
    let keys = keys_of(&session.ns, names)?;
    let cleared = session.ns.store.with(|core| core.drop_blocks(session.number, &keys))?;
    write(out, &report(&cleared));
    Ok(())
}

// Where a remote has what a session misses.

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
/// @param out_op   Receives the op; null with a queue to be told by that alone.
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
pub unsafe extern "C" fn kvt_session_remote_lookup(
    session: *const kvt_session_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    begin_one(opts, out_op, |opts| {
        let session = enter(session)?;
        session.ns.store.locate(session.number, opts)
    })
}

/// Begins to find out which of some blocks the store has, in a tier of its own or at its remote.
/// Never waits. What is at the remote is known to kvt_namespace_blocks_exist from then on, as
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
/// @param out_op   Receives the op; null with a queue to be told by that alone.
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
pub unsafe extern "C" fn kvt_session_remote_lookup_blocks(
    session: *const kvt_session_t,
    names: *const kvt_block_names_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    begin_one(opts, out_op, |opts| {
        let session = enter(session)?;
        session.ns.store.locate_blocks(session.number, keys_of(&session.ns, names)?, opts)
    })
}

// References to blocks.

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
/// @param out      Receives a byte for each, as kvt_namespace_blocks_exist gives: 0 = not held.
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
    names: *const kvt_block_names_t,
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
    names: *const kvt_block_names_t,
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
    names: *const kvt_block_names_t,
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

// Removal, demotion, unpinning.

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
    check_optional_out(out)?;
    let ns = enter(ns)?;
    refuse_reentry()?;
    let cleared = ns.0.store.clear(ns.0.number, deadline_ns)?;
    write(out, &report(&cleared));
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
    check_optional_out(out)?;
    let session = enter(session)?;
    let cleared = session.ns.store.with(|core| {
        let tokens = extent(core, session.number, first_token, tokens)?;
        core.drop_range(session.number, first_token, tokens)
    })?;
    write(out, &report(&cleared));
    Ok(())
}

/// Sends chunks of a session down: what of them is in memory is written to disk where it
/// is not there yet, and its memory is given back. Never waits: events
/// (KVT_STORE_EVENT_REMOVED) and kvt_store_stats tell of the end. What admission and write=
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
    check_optional_out(out)?;
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
