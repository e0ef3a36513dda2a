//! Sessions: sequences of tokens, transfers of their KV, plans, named blocks, ready events.
//!
//! A session is a sequence of tokens in a namespace. Its tokens name its KV: a session with the
//! same first tokens as an earlier one finds the KV that the earlier one stored. An open session
//! references its chunks, so that they stay in some tier.
//!
//! Life cycle: kvt_session_open, kvt_session_append, kvt_session_plan, then kvt_session_get for
//! stored KV and kvt_session_put for computed KV, kvt_session_close. Transfers that were submitted
//! continue after the close. Views begin at the first token of their transfer.
//!
//! ```c
//! if (kvt_session_open(ns, NULL, &session, &err) != KVT_OK) return fail(err);
//! if (kvt_session_append(session, tokens, count, &err) != KVT_OK) return fail(err);
//! kvt_plan_step_t steps[16];
//! uint64_t step_count = 0;
//! kvt_plan_t plan = KVT_PLAN_INIT;
//! if (kvt_session_plan(session, NULL, steps, 16, sizeof steps[0], &step_count, &plan, &err))
//!     return fail(err);
//! for (uint64_t i = 0; i < step_count; i++) { /* load, or compute and put */
//!     kvt_transfer_t part = KVT_TRANSFER_INIT;
//!     part.first_token = steps[i].first_token, part.tokens = steps[i].tokens;
//!     part.k = k_views, part.v = v_views, part.stride_bytes = sizeof k_views[0];
//!     part.flags = steps[i].kind == KVT_PLAN_LOAD ? KVT_TRANSFER_NEEDED_ONLY : 0;
//!     if (steps[i].kind == KVT_PLAN_LOAD) status = kvt_session_get_wait(session, &part, NULL, &err);
//!     else if (steps[i].kind == KVT_PLAN_RECOMPUTE) compute_next_layer(); /* then put */
//!     if (status != KVT_OK) return fail(err);
//! }
//! ```

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
use crate::ffi::memory::{check_memory, kvt_tier_t, kvt_view_t, views_of};
use crate::ffi::policy::{hint, kvt_policy_hint_t};
use crate::ffi::runtime::{
    begin_one, finish, kvt_op_t, kvt_priority_t, kvt_submit_opts_t, submit_opts,
};
use crate::ffi::store::{
    KVT_TIER_NONE, MAX_ROWS, Namespace, Target, answer, kvt_lookup_t, kvt_namespace_t, kvt_range_t,
};
use crate::format::keys::Key;
use crate::format::keys::block::BlockKeys;
use crate::format::keys::media::Medium;
use crate::meta::chunks::Pin;
use crate::meta::cost::Cost;
use crate::store::job_queues::LANES;
use crate::store::plan::StepKind;
use crate::store::pool::calls;
use crate::store::ready_event::{EventState, Ready};
use crate::store::state::blocks::{BlockTransfer, MAX_BLOCKS};
use crate::store::state::disk_gc::Cleared;
use crate::store::state::plans::{PlanStep, PlanTerms, SessionPlan};
use crate::store::state::session::Views;
use crate::store::state::transfer::MAX_TRANSFER_CHUNKS;
use crate::store::state::{CellRange, Level, SessionOpts, TO_THE_END, TransferKind, Wanted};
use crate::store::token_path::MAX_TOKENS;

// Sessions.

/// A sequence of tokens in a namespace. While it is open, it references its chunks: they stay in
/// at least one tier.
pub struct kvt_session_t(());

/// Flags of a session.
pub type kvt_session_flags_t = u64;

/// `priority` is set, even if it is 0.
pub const KVT_SESSION_PRIORITY: kvt_session_flags_t = 1;

/// Options of a session.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_session_opts_t {
    pub struct_size: u64,
    pub flags: kvt_session_flags_t,
    /// At most 256 bytes; null = no name.
    pub name: *const c_char,
    pub name_bytes: u64,
    /// Tenant number, for fairness and statistics.
    pub tenant: u32,
    /// Priority class, 0 to 255; 0 is evicted first. Needs KVT_SESSION_PRIORITY.
    pub priority: u32,
    /// Expected maximum length in tokens, for policies; not enforced; 0 = unknown.
    pub max_tokens: u32,
    pub reserved: u32,
    /// Time to live of chunks that the session stores first, in nanoseconds; 0 = no end. Each put or
    /// get of them by a session with a TTL starts the time again, but never shortens it; a put
    /// without a TTL removes the end. At its end a chunk is removed from all tiers, once nothing
    /// references, pins or continues it. Ends are not stored: a chunk that is on disk when the store
    /// is opened has none.
    pub ttl_ns: u64,
}

/// Length and layout of a session.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_session_info_t {
    pub struct_size: u64,
    pub tokens: u64,
    pub full_chunks: u64,
    /// Tokens per chunk.
    pub chunk_tokens: u32,
    pub layers: u32,
}

pub(crate) use crate::store::guards::Session as SessionNoun;

noun!(SessionNoun, kvt_session_t, 12, "session");

/// # Safety
/// The name in `given` is null or valid for its length.
unsafe fn options<'a>(given: &kvt_session_opts_t) -> Result<SessionOpts<'a>> {
    known_flags(given.flags, KVT_SESSION_PRIORITY)?;
    let has_priority = given.flags & KVT_SESSION_PRIORITY != 0;
    let priority = match u8::try_from(given.priority) {
        Ok(priority) if has_priority => Some(priority),
        Ok(0) => None,
        Ok(priority) => fail!(
            Invalid,
            "priority is {priority} without KVT_SESSION_PRIORITY: set the flag, or leave it 0"
        ),
        Err(_) => fail!(Invalid, "priority is {}: a session has 0 to 255", given.priority),
    };
    no_reserved(given.reserved)?;
    // SAFETY: the caller's promise.
    let name = unsafe { text("name", given.name, given.name_bytes)? }.as_bytes();
    let &kvt_session_opts_t { tenant, max_tokens, ttl_ns, .. } = given;
    Ok(SessionOpts { name, tenant, priority, max_tokens, ttl_ns })
}

/// Opens a session without tokens. The session keeps its namespace open.
///
/// @return KVT_E_AGAIN (as many are open as `sessions` of the spec), KVT_E_LIMIT (name too long).
#[capi]
pub unsafe extern "C" fn kvt_session_open(
    ns: *const kvt_namespace_t,
    opts: *const kvt_session_opts_t,
    out: *mut *mut kvt_session_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let opts = options(&read(opts)?)?;
    let entered = enter(ns)?;
    out.write(insert(SessionNoun::open(&entered.0, &opts)?)?);
    Ok(())
}

/// Opens a session with the tokens of another one. Both share the full chunks; a partial chunk at
/// the end is private to each.
///
/// @param opts  Options of the new session; it inherits none.
/// @return As kvt_session_open.
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
    out.write(insert(session.fork(&opts)?)?);
    Ok(())
}

/// Appends tokens. The session references the chunks that they complete, as far as these are
/// stored. On failure nothing changes.
///
/// @param count  A session has at most 2^27 tokens.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_session_append(
    session: *const kvt_session_t,
    tokens: *const u32,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let tokens = numbers(tokens, count, MAX_TOKENS)?;
    let session = enter(session)?;
    session.append(tokens, &[])
}

/// Truncates a session. Submitted transfers continue.
///
/// @param tokens  Tokens that remain; at most those that the session has.
#[capi]
pub unsafe extern "C" fn kvt_session_truncate(
    session: *const kvt_session_t,
    tokens: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let session = enter(session)?;
    session.truncate(tokens)
}

/// Pins chunks of a session: they stay in at least one tier, also when the session is closed. The
/// weakest pin is given up when nothing else can be evicted. A chunk that is pinned twice keeps the
/// higher priority and the later end. Chunks that are not stored yet are pinned, too, if the chunk
/// table has room for them. Pins have at most a share of the last tier (`pins` of the spec, 0.5 by
/// default). A call that would exceed it pins nothing.
///
/// @param first_token  A multiple of chunk_tokens.
/// @param tokens       Up to a multiple of chunk_tokens or the end of the session; 0 = to the end.
/// @param priority     0 to 255; pins of low priority are given up first.
/// @param until_ns     End of the pin, CLOCK_MONOTONIC; 0 = none.
/// @return KVT_E_BUDGET (pins would exceed their share).
#[capi]
pub unsafe extern "C" fn kvt_session_pin(
    session: *const kvt_session_t,
    first_token: u64,
    tokens: u64,
    priority: u32,
    until_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let pin = pin_of(priority, until_ns)?;
    let session = enter(session)?;
    session.ns.store.call(
        |core| {
            let tokens = core.range_tokens(session.number, first_token, tokens)?;
            core.pin(session.number, first_token, tokens, pin)
        },
        || calls::PinRange { session: session.id(), first: first_token, tokens, pin },
    )
}

fn pin_of(priority: u32, until_ns: u64) -> Result<Pin> {
    let Ok(priority) = u8::try_from(priority) else {
        fail!(Invalid, "priority is {priority}: a pin has 0 to 255");
    };
    Ok(Pin { priority, until_ns: if until_ns == 0 { u64::MAX } else { until_ns } })
}

/// Passes a hint about the future of a session to the policies of its store, usually when a
/// request has ended.
///
/// @param hint  Its times are CLOCK_MONOTONIC.
#[capi]
pub unsafe extern "C" fn kvt_session_hint(
    session: *const kvt_session_t,
    hint: *const kvt_policy_hint_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let hint = self::hint(hint)?;
    let session = enter(session)?;
    session.ns.store.call(
        |core| core.hint(session.number, &hint),
        || calls::HintSession { session: session.id(), hint },
    )
}

/// Reads length and layout of a session.
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

/// Closes a session. Its chunks may be evicted then; submitted transfers continue.
#[capi]
pub unsafe extern "C" fn kvt_session_close(session: *mut *mut kvt_session_t) -> kvt_status_t {
    free(session, |_| Ok(()))
}

// Ready events.

/// A ready event: the engine signals it once, when the memory of a transfer may be touched
/// (kvt_transfer_t.ready). Events of a device are numbers, see kvt_transfer_t.after.
pub struct kvt_ready_event_t(());

/// States of a ready event.
pub type kvt_ready_event_state_t = u32;

pub const KVT_READY_EVENT_PENDING: kvt_ready_event_state_t = 0;
pub const KVT_READY_EVENT_SIGNALLED: kvt_ready_event_state_t = 1;

/// A ready event. If it is dropped pending, the transfers that wait for it are cancelled.
pub(crate) struct EventNoun(pub(crate) Arc<Ready>);

impl Drop for EventNoun {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

noun!(EventNoun, kvt_ready_event_t, 13, "event");

/// Opens a pending event. It belongs to no runtime: transfers of any store may wait for it.
///
/// @param flags  0; none are defined.
/// @return KVT_E_LIMIT (too many are open).
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

/// Signals an event: transfers that wait for it begin. Never blocks; a second signal has no effect.
#[capi]
pub unsafe extern "C" fn kvt_ready_event_signal(event: *const kvt_ready_event_t) -> kvt_status_t {
    let event = enter(event)?;
    event.0.signal();
    Ok(())
}

/// Reads the state of an event.
///
/// @param out_state  KVT_READY_EVENT_*.
#[capi]
pub unsafe extern "C" fn kvt_ready_event_query(
    event: *const kvt_ready_event_t,
    out_state: *mut kvt_ready_event_state_t,
) -> kvt_status_t {
    require(out_state)?;
    let event = inspect(event)?;
    let is_signalled = event.0.state() == Some(EventState::Signalled);
    let state = if is_signalled { KVT_READY_EVENT_SIGNALLED } else { KVT_READY_EVENT_PENDING };
    out_state.write(state);
    Ok(())
}

/// Closes an event. If it is pending, transfers that wait for it end with KVT_E_CANCELLED and have
/// touched no memory.
#[capi]
pub unsafe extern "C" fn kvt_ready_event_close(event: *mut *mut kvt_ready_event_t) -> kvt_status_t {
    free(event, |_| Ok(()))
}

// Submission of transfers.

/// A struct that describes a transfer.
pub(crate) trait TransferRequest: HasSize {
    /// Flags that it accepts.
    const FLAGS: u64;
    /// Alternative to KVT_SUBMIT_EACH, for messages.
    const PER_ITEM: &'static str;

    /// The fields that all such structs have.
    fn common(&self) -> CommonFields;
}

/// Fields that all structs of transfers have.
pub(crate) struct CommonFields {
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

/// Level, options and ready event of a transfer.
pub(crate) struct Submission<'a> {
    pub(crate) level: Level,
    pub(crate) opts: OpOpts,
    pub(crate) ready: Option<&'a Ready>,
}

impl CommonFields {
    /// Device event that its copies run after.
    pub(crate) fn after(&self) -> Option<Event> {
        (self.after != 0).then_some(Event(self.after))
    }

    /// The engine's tensors for so many layers and tokens; no tokens = to the end of the session.
    ///
    /// # Safety
    /// All that the views point to is valid, as the exported functions require.
    pub(crate) unsafe fn views(
        &self,
        session: &SessionNoun,
        kind: TransferKind,
        (layers, tokens): (usize, Option<u64>),
    ) -> Result<Arc<Views>> {
        let views = match kind {
            TransferKind::Prefetch if self.k.is_null() && self.v.is_null() => Views::default(),
            TransferKind::Prefetch => {
                fail!(
                    Invalid,
                    "k or v is set for a prefetch, which takes no views: leave both null"
                )
            }
            // SAFETY: the caller's promise.
            _ => unsafe {
                views_of((self.k, self.v, self.stride_bytes), self.first_layer, layers, tokens)?
            },
        };
        check_memory(&session.ns.store, &views, self.first_layer)?;
        Ok(Arc::new(views))
    }
}

/// Reads the fields that all transfers have, lets `begin` submit one, and writes the handles of
/// its ops.
///
/// # Safety
/// Pointers are null or valid, structs for the size they state; `out_ops` has room for as many
/// handles as `begin` returns ops.
pub(crate) unsafe fn submit<R: TransferRequest>(
    session: *const kvt_session_t,
    kind: TransferKind,
    request: *const R,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
    begin: impl FnOnce(&SessionNoun, &R, &Submission<'_>) -> Result<Vec<OpRef>>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let (given, (opts, per_item)) =
        unsafe { (read(request)?, submit_opts(opts, out_ops.is_null())?) };
    let common = given.common();
    known_flags(common.flags, R::FLAGS)?;
    if per_item {
        fail!(Invalid, "KVT_SUBMIT_EACH is not for transfers: use {}", R::PER_ITEM);
    }
    no_reserved(common.reserved)?;
    let level = level_of(common.level, kind)?;
    let ready = pin_optional(common.ready)?.map(|noun| noun.0.clone());
    let submission = Submission { level, opts, ready: ready.as_deref() };
    let ops = begin(&*enter(session)?, &given, &submission)?;
    for (i, op) in ops.iter().enumerate().filter(|_| !out_ops.is_null()) {
        // SAFETY: out_ops has room for as many ops, as the caller promises.
        unsafe { out_ops.add(i).write(encode::<Op>(op.key())) };
    }
    Ok(())
}

// Transfers.

/// Flags of a transfer.
pub type kvt_transfer_flags_t = u64;

/// One op per layer: out_ops receives one for each layer of the transfer. The tag of its i-th
/// layer is the given tag plus i. The transfer is cancelled once all of its ops are.
pub const KVT_TRANSFER_EACH_LAYER: kvt_transfer_flags_t = 1;
/// Gets and prefetches: only the cells that are needed to continue after the last token. Layers
/// with a window need the chunks of the window's last tokens, layers with a state the last chunk.
/// Their other cells are not touched and are no misses. A load step of a plan is got like this.
/// Views describe all tokens of the transfer.
pub const KVT_TRANSFER_NEEDED_ONLY: kvt_transfer_flags_t = 2;

/// When a put completes.
pub type kvt_level_t = u32;

/// Its cells are in host memory.
pub const KVT_LEVEL_RAM: kvt_level_t = 0;
/// Its cells are written to disk.
pub const KVT_LEVEL_DISK: kvt_level_t = 1;
/// Its cells are synced to disk: they survive a crash of the machine.
pub const KVT_LEVEL_DURABLE: kvt_level_t = 2;
/// The remote has confirmed all full chunks that have all layers; other chunks are in host memory.
/// The put ends with KVT_E_AGAIN if layers of a chunk have left host memory: they are not uploaded
/// from elsewhere.
pub const KVT_LEVEL_REMOTE: kvt_level_t = 3;

/// A range of tokens by a range of layers of a session, and the engine's tensors for them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_transfer_t {
    pub struct_size: u64,
    pub flags: kvt_transfer_flags_t,
    /// A multiple of chunk_tokens.
    pub first_token: u64,
    /// Up to a multiple of chunk_tokens or the end of the session. 0 = to the end at submission;
    /// views must then state their tokens.
    pub tokens: u64,
    pub first_layer: u32,
    /// 0 = all from first_layer on.
    pub layers: u32,
    /// One view per layer of K, the latent or the states; null for a prefetch.
    pub k: *const kvt_view_t,
    /// One view per layer of V, all zero for a layer without V; null if none of the layers has V.
    pub v: *const kvt_view_t,
    pub stride_bytes: u64,
    /// Puts only.
    pub level: kvt_level_t,
    pub reserved: u32,
    /// The transfer begins when this event is signalled: sources are complete then, targets unused.
    /// Null = at once. At most 65536 transfers wait for one event. The handle may be closed after
    /// the signal. To read from disk in the meantime, submit a prefetch first.
    pub ready: *const kvt_ready_event_t,
    /// Gets and prefetches: indices of the chunks to transfer, such as a sparse policy selects.
    /// Ascending; 0 = the chunk of first_token. Views have the tokens of these chunks without gaps.
    /// Null = all chunks.
    pub chunks: *const u32,
    /// At most 2^22; not 0 unless chunks is null.
    pub chunk_count: u64,
    /// Event of the store's device (kvt_device_copy, kvt_device_launch, kvt_device_import_event,
    /// kvt_device_create_event); 0 = none. Not for prefetches. Copies between tensors and store run
    /// after it, on the device; no thread waits. Reads from disk do not wait for it. The caller
    /// keeps the event, may use it for several transfers, and releases it after the last of their
    /// ops. If it fails, or is released before the library saw it complete, the transfer fails with
    /// that status, and tensors of cells that were not copied are unchanged. With `ready`, the
    /// transfer waits for both.
    pub after: u64,
}

impl TransferRequest for kvt_transfer_t {
    const FLAGS: u64 = KVT_TRANSFER_EACH_LAYER | KVT_TRANSFER_NEEDED_ONLY;
    const PER_ITEM: &'static str = "KVT_TRANSFER_EACH_LAYER";

    fn common(&self) -> CommonFields {
        let kvt_transfer_t { flags, reserved, level, ready, first_layer, .. } = *self;
        let kvt_transfer_t { k, v, stride_bytes, after, .. } = *self;
        CommonFields { flags, reserved, level, ready, first_layer, k, v, stride_bytes, after }
    }
}

pub(crate) fn level_of(level: u32, kind: TransferKind) -> Result<Level> {
    match level {
        KVT_LEVEL_RAM => Ok(Level::Ram),
        _ if kind != TransferKind::Put => {
            fail!(Invalid, "level is {level}, but only puts have one: leave it 0")
        }
        KVT_LEVEL_DISK => Ok(Level::Disk),
        KVT_LEVEL_DURABLE => Ok(Level::Durable),
        KVT_LEVEL_REMOTE => Ok(Level::Remote),
        other => fail!(Invalid, "level is {other}: use one of KVT_LEVEL_*, 0 to 3"),
    }
}

/// # Safety
/// `chunks` of `given` is null or valid for reads.
unsafe fn selection_of(given: &kvt_transfer_t, kind: TransferKind) -> Result<Wanted> {
    let needed = given.flags & KVT_TRANSFER_NEEDED_ONLY != 0;
    if needed && kind == TransferKind::Put {
        fail!(Invalid, "KVT_TRANSFER_NEEDED_ONLY is set for a put: it is for gets and prefetches");
    }
    // SAFETY: the caller's promise.
    let chunks = unsafe { numbers(given.chunks, given.chunk_count, MAX_TRANSFER_CHUNKS)? };
    if !given.chunks.is_null() && chunks.is_empty() {
        fail!(Invalid, "chunk_count is 0: list at least one chunk, or set chunks to null for all");
    }
    match (chunks.is_empty(), needed) {
        (true, true) => Ok(Wanted::Needed),
        (true, false) => Ok(Wanted::All),
        (false, true) => {
            fail!(Invalid, "KVT_TRANSFER_NEEDED_ONLY and chunks are both set: use only one of them")
        }
        (false, false) if kind == TransferKind::Put => {
            fail!(Invalid, "chunks is set for a put, which takes all chunks: set it to null")
        }
        (false, false) => {
            let mut wanted = Vec::new();
            wanted.try_reserve_exact(chunks.len()).map_err(|_| Status::NoMem)?;
            wanted.extend_from_slice(chunks);
            Ok(Wanted::Chunks(wanted))
        }
    }
}

/// Number of layers of a transfer; `given` 0 = all from `first` on.
pub(crate) fn layers_of(all: usize, first: u32, given: u32) -> Result<usize> {
    let left = all.saturating_sub(first as usize);
    let layers = if given == 0 { left } else { given as usize };
    if layers == 0 || layers > left {
        fail!(
            Invalid,
            "first_layer is {first} and layers {given}, but the layout has {all} layers: at most \
             {left} from there, 0 for all of them"
        );
    }
    Ok(layers)
}

/// # Safety
/// As the exported functions that call it.
unsafe fn submit_transfer(
    session: *const kvt_session_t,
    kind: TransferKind,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
) -> Result<()> {
    let begin = |session: &SessionNoun, given: &kvt_transfer_t, submission: &Submission<'_>| {
        // SAFETY: the caller's promise.
        let wanted = unsafe { selection_of(given, kind)? };
        let layers = layers_of(session.ns.layers, given.first_layer, given.layers)?;
        if given.tokens == TO_THE_END {
            fail!(
                Invalid,
                "tokens is {}: a session has at most {MAX_TOKENS}; 0 is to its end",
                given.tokens
            );
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
            views: unsafe { common.views(session, kind, (layers, tokens))? },
            after: common.after(),
        };
        let Submission { level, opts, ready } = submission;
        let store = &session.ns.store;
        store.submit_after(session.number, kind, *level, transfer, opts, *ready)
    };
    // SAFETY: the caller's promise; out_ops has room for one op, or one per layer.
    unsafe { submit(session, kind, transfer, opts, out_ops, begin) }
}

/// Submits a put: copies the engine's tensors into host memory, from where they are written to
/// disk and remote as the spec says. Cells that are stored already are not stored again. Never
/// blocks. Closing the session does not end the transfer.
///
/// At most `inline` bytes (a parameter of the store's spec; default 64 KiB) between host memory are
/// copied by the calling thread: the op is released when the call returns. Workers copy more.
///
/// The op's value (kvt_completion_t, kvt_op_info_t) is the number of tokens, from the first on,
/// that were stored without a gap; bytes_done is the number of copied bytes. The op ends with
/// KVT_E_BUDGET if host memory runs out, or KVT_E_IO if the disk fails; other cells are stored all
/// the same. The tensors must not change before the op is released.
///
/// @param transfer  Copied, tables of pages included.
/// @param out_ops   Receives the op, or one per layer with KVT_TRANSFER_EACH_LAYER; free them with
///                  kvt_op_free. Null = no handle, only completions.
/// @return KVT_E_AGAIN (queue, runtime, store or `ready` is full), KVT_E_UNAVAILABLE (no disk or
///         remote for this level, memory that no device reaches, `after` without a device),
///         KVT_E_LIMIT (more than 2^22 chunks or 2^32 cells, or the chunk table is full),
///         KVT_E_HANDLE (also: `after` is no event of the store's device).
#[capi]
pub unsafe extern "C" fn kvt_session_put(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    submit_transfer(session, TransferKind::Put, transfer, opts, out_ops)
}

/// Submits a get: copies KV into the engine's tensors, from whichever tier has it. Never blocks.
/// Up to `inline` bytes in host memory are copied as by kvt_session_put.
///
/// The op's value is the number of tokens, from the first on, that arrived without a gap. The op
/// ends with KVT_E_NOT_FOUND if cells are missing: the others have arrived, and tensors of missing
/// cells are unchanged. At its deadline it resolves with KVT_E_TIMEOUT; the tensors are the
/// library's until the op is released.
///
/// @param transfer  See kvt_session_put.
/// @param out_ops   See kvt_session_put.
/// @return As kvt_session_put.
#[capi]
pub unsafe extern "C" fn kvt_session_get(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    submit_transfer(session, TransferKind::Get, transfer, opts, out_ops)
}

/// Submits a transfer, waits until its op is released, and returns the result of the op.
///
/// # Safety
/// As the exported functions that call it.
unsafe fn transfer_and_wait(
    session: *const kvt_session_t,
    kind: TransferKind,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
) -> Result<()> {
    refuse_reentry()?;
    // SAFETY: the caller's promise.
    if unsafe { read(transfer)? }.flags & KVT_TRANSFER_EACH_LAYER != 0 {
        fail!(
            Invalid,
            "KVT_TRANSFER_EACH_LAYER is set, and the call waits for all layers: clear the flag"
        );
    }
    let mut handle = std::ptr::null_mut();
    // SAFETY: the caller's promise; one op is written, to a variable of this function.
    unsafe { submit_transfer(session, kind, transfer, opts, &raw mut handle)? };
    // SAFETY: the handle is in a variable of this function.
    unsafe { finish(&raw mut handle, 0, std::ptr::null_mut()) }
}

/// Puts and waits: kvt_session_put and kvt_op_finish.
///
/// @param opts  Null = the defaults. At its deadline the call ends with KVT_E_TIMEOUT, as soon as
///              the tensors are free. Its queue, if set, receives the completion as well.
/// @return KVT_E_TIMEOUT, or as kvt_session_put and its op.
///
/// Threading: not inside callbacks.
#[capi]
pub unsafe extern "C" fn kvt_session_put_wait(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    transfer_and_wait(session, TransferKind::Put, transfer, opts)
}

/// Gets and waits: kvt_session_get and kvt_op_finish.
///
/// @param opts  See kvt_session_put_wait.
/// @return KVT_E_NOT_FOUND (cells are missing; the others have arrived), KVT_E_TIMEOUT, or as
///         kvt_session_get and its op.
///
/// Threading: not inside callbacks.
#[capi]
pub unsafe extern "C" fn kvt_session_get_wait(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    transfer_and_wait(session, TransferKind::Get, transfer, opts)
}

/// Submits a prefetch: brings KV into host memory for a later get. Never blocks. Value and status
/// of the op are those of a get.
///
/// @param transfer  Without views.
/// @param opts      Set `priority` to KVT_PRIORITY_PREFETCH.
/// @param out_ops   See kvt_session_put.
/// @return As kvt_session_put.
#[capi]
pub unsafe extern "C" fn kvt_session_prefetch(
    session: *const kvt_session_t,
    transfer: *const kvt_transfer_t,
    opts: *const kvt_submit_opts_t,
    out_ops: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    submit_transfer(session, TransferKind::Prefetch, transfer, opts, out_ops)
}

// Plans.

/// Flags of a plan.
pub type kvt_plan_flags_t = u64;

/// Loads and computation run one after the other, not at the same time.
pub const KVT_PLAN_NO_OVERLAP: kvt_plan_flags_t = 1;
/// Ignore KV that is still on its way into the store.
pub const KVT_PLAN_NO_WAIT: kvt_plan_flags_t = 2;
/// `alpha_ns` and `beta_ns` are set, even if they are 0.
pub const KVT_PLAN_COST: kvt_plan_flags_t = 4;

/// What to do in a step of a plan.
pub type kvt_plan_step_kind_t = u32;

/// Nothing to do, the KV is in place or not needed.
pub const KVT_PLAN_RESIDENT: kvt_plan_step_kind_t = 0;
/// Load the tokens: kvt_session_get with KVT_TRANSFER_NEEDED_ONLY.
pub const KVT_PLAN_LOAD: kvt_plan_step_kind_t = 1;
/// Compute the tokens.
pub const KVT_PLAN_RECOMPUTE: kvt_plan_step_kind_t = 2;

/// How the engine will run, as input of a plan.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_plan_terms_t {
    pub struct_size: u64,
    /// KVT_PLAN_NO_OVERLAP, KVT_PLAN_NO_WAIT, KVT_PLAN_COST.
    pub flags: kvt_plan_flags_t,
    /// With KVT_PLAN_COST: nanoseconds per token and token of context, 0 to 1e15. Without it, plans
    /// use the cost of kvt_namespace_prefill_cost.
    pub alpha_ns: f64,
    /// With KVT_PLAN_COST: nanoseconds per token, 0 to 1e15.
    pub beta_ns: f64,
    /// Of the loads.
    pub priority: kvt_priority_t,
    pub reserved: u32,
}

/// Successive tokens with the same step.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_plan_step_t {
    pub first_token: u64,
    pub tokens: u64,
    /// KVT_PLAN_RESIDENT, KVT_PLAN_LOAD or KVT_PLAN_RECOMPUTE.
    pub kind: kvt_plan_step_kind_t,
    /// Slowest tier that anything is loaded from, KVT_TIER_*; KVT_TIER_NONE if nothing is.
    pub tier: kvt_tier_t,
    /// Bytes to load from each tier.
    pub host_bytes: u64,
    pub disk_bytes: u64,
    pub remote_bytes: u64,
    /// Predicted time of this step alone.
    pub predicted_ns: u64,
    /// Bytes to copy from the device tier, on the device.
    pub device_bytes: u64,
}

/// Totals of a plan.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_plan_t {
    pub struct_size: u64,
    /// All tokens of the session; the next three counts add up to it.
    pub tokens: u64,
    pub resident_tokens: u64,
    pub load_tokens: u64,
    pub recompute_tokens: u64,
    /// Predicted time until all KV is available, queues included.
    pub total_ns: u64,
    /// Predicted time of the loads alone, queues included.
    pub load_ns: u64,
    /// Predicted time of the computation alone.
    pub compute_ns: u64,
    /// Predicted time to compute all tokens instead.
    pub without_ns: u64,
}

fn terms_of(given: &kvt_plan_terms_t) -> Result<PlanTerms> {
    known_flags(given.flags, KVT_PLAN_NO_OVERLAP | KVT_PLAN_NO_WAIT | KVT_PLAN_COST)?;
    let is_set = |flag: u64| given.flags & flag != 0;
    no_reserved(given.reserved)?;
    if given.priority as usize >= LANES {
        fail!(
            Invalid,
            "priority is {}: use one of KVT_PRIORITY_*, 0 to {}",
            given.priority,
            LANES - 1
        );
    }
    let (alpha, beta) = (given.alpha_ns, given.beta_ns);
    let cost = match is_set(KVT_PLAN_COST) {
        true => Some(Cost { alpha, beta }),
        false if alpha != 0.0 || beta != 0.0 => fail!(
            Invalid,
            "alpha_ns is {alpha} and beta_ns {beta} without KVT_PLAN_COST: set the flag, or leave \
             both 0"
        ),
        false => None,
    };
    let is_valid = |ns: f64| ns.is_finite() && (0.0..=1e15).contains(&ns);
    if !is_valid(alpha) || !is_valid(beta) {
        fail!(Invalid, "alpha_ns is {alpha} and beta_ns {beta}: both must be 0 to 1e15");
    }
    Ok(PlanTerms {
        overlap: !is_set(KVT_PLAN_NO_OVERLAP),
        wait: !is_set(KVT_PLAN_NO_WAIT),
        lane: given.priority as usize,
        cost,
    })
}

fn step(step: &PlanStep) -> kvt_plan_step_t {
    let [host_bytes, disk_bytes, remote_bytes, device_bytes] = step.bytes;
    let from = [
        (remote_bytes, Tier::Remote),
        (disk_bytes, Tier::Disk),
        (host_bytes, Tier::Host),
        (device_bytes, Tier::Device),
    ];
    let slowest = from.into_iter().find(|&(bytes, _)| bytes > 0);
    kvt_plan_step_t {
        first_token: step.first_token,
        tokens: step.tokens,
        kind: match step.kind {
            StepKind::Resident => KVT_PLAN_RESIDENT,
            StepKind::Load => KVT_PLAN_LOAD,
            StepKind::Recompute => KVT_PLAN_RECOMPUTE,
        },
        tier: slowest.map_or(KVT_TIER_NONE, |(_, tier)| tier as u32),
        host_bytes,
        disk_bytes,
        remote_bytes,
        predicted_ns: step.ns as u64,
        device_bytes,
    }
}

fn summary(plan: &SessionPlan) -> kvt_plan_t {
    let tokens = |kind: Option<StepKind>| -> u64 {
        let steps = plan.steps.iter().filter(|step| kind.is_none_or(|kind| step.kind == kind));
        steps.map(|step| step.tokens).sum()
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

/// Computes the cheapest way to get the KV of all tokens of a session: what to load, what to
/// compute, and how long that takes, from residency, measured bandwidth and queues. Counts no use
/// and references nothing. Without KVT_NAMESPACE_HOLES, all tokens from the first computed one on
/// are computed.
///
/// @param steps      Receives all tokens in order, as steps.
/// @param capacity   At most 2^24.
/// @param out_count  May be null.
/// @param out        Totals; may be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (capacity, or more than 2^22 chunks).
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
    let plan = session.ns.store.call(
        |core| core.plan(session.number, &terms).cloned(),
        || calls::Plan { session: session.id(), terms },
    )?;
    give(&rows, steps.is_null(), plan.steps.iter().map(step), out_count)?;
    write(out, &summary(&plan));
    Ok(())
}

// Clearing, dropping, demotion, unpinning.

/// Counts of chunks after a clear or drop.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_clear_report_t {
    pub struct_size: u64,
    /// Removed from all tiers.
    pub removed_chunks: u64,
    /// Kept: sessions, transfers or pins reference them, or a kept chunk continues them.
    pub referenced_chunks: u64,
    /// Kept, because they were moving between tiers: call again.
    pub transferring_chunks: u64,
}

/// Counts of chunks after a demotion.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_demote_report_t {
    pub struct_size: u64,
    /// They were on disk already: their memory is freed.
    pub freed_chunks: u64,
    /// Their memory is freed once they are written to disk.
    pub pending_chunks: u64,
    /// They stay in memory: there is no disk.
    pub kept_chunks: u64,
}

fn clear_report(cleared: &Cleared) -> kvt_clear_report_t {
    kvt_clear_report_t {
        struct_size: 0,
        removed_chunks: cleared.removed,
        referenced_chunks: cleared.held,
        transferring_chunks: cleared.moving,
    }
}

/// Removes all chunks of a namespace that nothing references from all tiers, and waits until no
/// opening of the store finds them again. Chunks that are stored meanwhile may stay. The bytes
/// stay in files until these are reused, but no lookup finds them.
///
/// @param out  Counts; may be null.
/// @return KVT_E_TIMEOUT, KVT_E_BUDGET, KVT_E_IO: removed chunks may be found by the next opening
///         (call again).
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
    write(out, &clear_report(&cleared));
    Ok(())
}

/// Removes chunks of a session from all tiers, unless something else references them. The session
/// keeps its tokens, and finds chunks that stay or are stored again. Does not wait for the disk:
/// after a crash, chunks that were on disk may be found again, as after any eviction. For the
/// range, see kvt_session_pin.
///
/// @param out  Counts; may be null.
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
    let cleared = session.ns.store.call(
        |core| {
            let tokens = core.range_tokens(session.number, first_token, tokens)?;
            core.drop_range(session.number, first_token, tokens)
        },
        || calls::DropRange { session: session.id(), first: first_token, tokens },
    )?;
    write(out, &clear_report(&cleared));
    Ok(())
}

/// Demotes chunks of a session, also referenced and pinned ones. Chunks that are not on disk yet
/// are written, whatever admission and `write` of the spec say; then their memory is freed. Never
/// blocks: events (KVT_STORE_EVENT_REMOVED) and kvt_store_stats show the end. A get promotes the
/// chunks again. A chunk that cannot be written stays in memory while something references it. For
/// the range, see kvt_session_pin.
///
/// @param out  Counts; may be null.
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
    let demoted = session.ns.store.call(
        |core| {
            let tokens = core.range_tokens(session.number, first_token, tokens)?;
            core.demote_range(session.number, first_token, tokens)
        },
        || calls::DemoteRange { session: session.id(), first: first_token, tokens },
    )?;
    write(
        out,
        &kvt_demote_report_t {
            struct_size: 0,
            freed_chunks: demoted.freed,
            pending_chunks: demoted.pending,
            kept_chunks: demoted.staying,
        },
    );
    Ok(())
}

/// Removes the pins of chunks of a session, whichever session set them. For the range, see
/// kvt_session_pin.
#[capi]
pub unsafe extern "C" fn kvt_session_unpin(
    session: *const kvt_session_t,
    first_token: u64,
    tokens: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let session = enter(session)?;
    session.ns.store.call(
        |core| {
            let tokens = core.range_tokens(session.number, first_token, tokens)?;
            core.unpin_range(session.number, first_token, tokens)
        },
        || calls::UnpinRange { session: session.id(), first: first_token, tokens },
    )
}

// Media.

/// An image or a sound in a sequence.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_media_t {
    /// Index of its first token in the sequence.
    pub token: u64,
    /// Hash of its content: 32 bytes of a hash of at least 256 bits.
    pub digest: [u8; 32],
}

/// Tokens, and the media that start in them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sequence_t {
    pub struct_size: u64,
    pub tokens: *const u32,
    /// At most 2^27.
    pub token_count: u64,
    /// Ascending by token, at most one per token; null = none.
    pub media: *const kvt_media_t,
    /// At most 2^24.
    pub media_count: u64,
    pub media_stride_bytes: u64,
}

/// Media of a sequence, by index of their tokens.
///
/// # Safety
/// The array is null or valid for its length.
unsafe fn media_of(given: &kvt_sequence_t) -> Result<Vec<Medium>> {
    let (base, count) = (given.media.cast_mut(), given.media_count);
    // SAFETY: the caller's promise; nothing is written there.
    let rows = unsafe { Strided::new(base, count, given.media_stride_bytes, MAX_ROWS)? };
    let mut media = Vec::new();
    media.try_reserve_exact(rows.len()).map_err(|_| Status::NoMem)?;
    for at in 0..rows.len() {
        let kvt_media_t { token, digest } = rows.get(at)?;
        if token >= given.token_count {
            fail!(
                Invalid,
                "media {at} starts at token {token}, but the sequence has {}: give an index below",
                given.token_count
            );
        }
        media.push(Medium { token, digest });
    }
    Ok(media)
}

/// Appends tokens with media. Media enter the key of the chunk that they start in and of all later
/// chunks (docs/internals/keys.md): equal tokens with other images share nothing from there on. On
/// failure nothing changes.
///
/// @return As kvt_session_append.
#[capi]
pub unsafe extern "C" fn kvt_session_append_media(
    session: *const kvt_session_t,
    sequence: *const kvt_sequence_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let given = read(sequence)?;
    let (tokens, media) =
        (numbers(given.tokens, given.token_count, MAX_TOKENS)?, media_of(&given)?);
    let session = enter(session)?;
    session.append(tokens, &media)
}

/// Looks up a sequence with media; otherwise as kvt_namespace_lookup.
///
/// @return As kvt_namespace_lookup.
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

/// Computes the keys of the full chunks of a sequence (docs/internals/keys.md), as events and files
/// have them. A router that knows the keys of each store finds a prompt's prefix by them.
///
/// @param keys      Receives KVT_KEY_BYTES per chunk, in order.
/// @param capacity  In keys.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
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
        fail!(Invalid, "keys is null with capacity {capacity}: use 0 to learn the number of keys");
    }
    let ns = enter(ns)?;
    let all = ns.0.store.chunk_keys(ns.0.number, tokens, &media)?;
    out_count.write(all.len() as u64);
    if keys.is_null() || all.is_empty() {
        return Ok(());
    }
    if (all.len() as u64) > capacity {
        fail!(TooSmall, "capacity is {capacity}, but there are {} keys: give more room", all.len());
    }
    // SAFETY: there is room for as many keys, as the caller promises, and a key is its
    // bytes.
    std::ptr::copy_nonoverlapping(all.as_ptr().cast(), keys, size_of_val(&all[..]));
    Ok(())
}

// Named blocks: chunks that the engine names itself.

/// Most names of a call.
const MAX_NAMES: usize = 1 << 22;
/// Keys that are looked up during one lock of the store.
const KEYS_PER_LOCK: usize = 1024;

/// Names of blocks: any bytes. Equal names must mean equal content, so a name is, for example, the
/// engine's hash of all that the content depends on, except the namespace's identity.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_block_names_t {
    pub struct_size: u64,
    /// The names one after the other, without gaps.
    pub bytes: *const u8,
    /// End of each name as an offset from `bytes`, ascending; null = all have each_bytes bytes.
    pub ends: *const u64,
    /// 1 to 65536; 0 if `ends` is set.
    pub each_bytes: u64,
    /// At most 65536; 2^22 for kvt_namespace_block_keys and kvt_namespace_blocks_exist.
    pub count: u64,
}

/// Blocks to transfer, and the engine's tensors for them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_blocks_t {
    pub struct_size: u64,
    /// 0; none are defined.
    pub flags: u64,
    /// 1 to 65536 names.
    pub names: *const kvt_block_names_t,
    pub first_layer: u32,
    /// 0 = all from first_layer on.
    pub layers: u32,
    /// One view per layer of K, the latent or the states: the tokens of all blocks, in the order of
    /// their names. Pages of chunk_tokens tokens give each block an address of its own. Null for a
    /// prefetch.
    pub k: *const kvt_view_t,
    /// This and the next fields: see kvt_transfer_t.
    pub v: *const kvt_view_t,
    pub stride_bytes: u64,
    pub level: kvt_level_t,
    pub reserved: u32,
    pub ready: *const kvt_ready_event_t,
    pub after: u64,
}

impl TransferRequest for kvt_blocks_t {
    const FLAGS: u64 = 0;
    const PER_ITEM: &'static str = "kvt_op_items";

    fn common(&self) -> CommonFields {
        let kvt_blocks_t { flags, reserved, level, ready, first_layer, .. } = *self;
        let kvt_blocks_t { k, v, stride_bytes, after, .. } = *self;
        CommonFields { flags, reserved, level, ready, first_layer, k, v, stride_bytes, after }
    }
}

/// Keys of named blocks of a namespace.
///
/// # Safety
/// `names` is null or valid for the size it states, and all that it points to for reads.
pub(crate) unsafe fn keys_of(ns: &Namespace, names: *const kvt_block_names_t) -> Result<Vec<Key>> {
    if names.is_null() {
        fail!(Invalid, "names is null: give a kvt_block_names_t, with count 0 for no names");
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(names)? };
    if given.count > MAX_NAMES as u64 {
        fail!(Limit, "{} names: a call has at most {MAX_NAMES}, make several", given.count);
    }
    let block_keys = BlockKeys::new(&ns.key);
    if given.ends.is_null() {
        let Some(total_bytes) = given.each_bytes.checked_mul(given.count) else {
            fail!(
                Limit,
                "{} names of {} bytes each: a name has at most 65536 bytes",
                given.count,
                given.each_bytes
            );
        };
        if given.each_bytes == 0 && given.count > 0 {
            fail!(Invalid, "each_bytes is 0 and ends is null: one of them must give the lengths");
        }
        // SAFETY: the caller's promise.
        let all_names = unsafe { bytes(given.bytes, total_bytes)? };
        return block_keys.all(all_names.chunks_exact(given.each_bytes.max(1) as usize));
    }
    if given.each_bytes != 0 {
        fail!(
            Invalid,
            "each_bytes is {} and ends is not null: set only one of them",
            given.each_bytes
        );
    }
    // SAFETY: the caller's promise.
    let (ends, all_names) = unsafe {
        let ends = numbers(given.ends, given.count, MAX_NAMES)?;
        (ends, bytes(given.bytes, ends.last().copied().unwrap_or(0))?)
    };
    let mut keys = Vec::new();
    keys.try_reserve_exact(ends.len()).map_err(|_| Status::NoMem)?;
    let mut from = 0;
    for (at, &end) in ends.iter().enumerate() {
        let Some(name) = all_names.get(from..usize::try_from(end).unwrap_or(usize::MAX)) else {
            fail!(
                Invalid,
                "name {at} begins at byte {from} and ends at {end}, the last name at {}: ends must \
                 ascend",
                all_names.len()
            );
        };
        keys.push(block_keys.key(name)?);
        from += name.len();
    }
    Ok(keys)
}

/// Computes the keys of blocks (docs/internals/keys.md), as events and files have them.
///
/// @param out  Receives KVT_KEY_BYTES per name.
/// @return KVT_E_LIMIT.
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
    let key_bytes = crate::ffi::store::KVT_KEY_BYTES as usize;
    for (i, key) in keys.iter().enumerate() {
        std::ptr::copy_nonoverlapping(key.0.as_ptr(), out.add(i * key_bytes), key_bytes);
    }
    Ok(())
}

/// Reads in which tiers blocks are resident. Counts no use and references nothing. It does not ask
/// the remote: a block that kvt_session_remote_lookup_blocks found there has 1 << KVT_TIER_REMOTE
/// without KVT_EXISTS_WHOLE, and gets and prefetches fetch it.
///
/// @param out  Receives a byte per name, as kvt_namespace_exists.
/// @return KVT_E_LIMIT.
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
    for (keys, found) in keys.chunks(KEYS_PER_LOCK).zip(found.chunks_mut(KEYS_PER_LOCK)) {
        ns.0.exist(keys, found)?;
    }
    // SAFETY: `out` has room for a byte per name, by the caller's promise.
    std::ptr::copy_nonoverlapping(found.as_ptr(), out, found.len());
    Ok(())
}

/// # Safety
/// As the exported functions that call it.
unsafe fn submit_block_transfer(
    session: *const kvt_session_t,
    kind: TransferKind,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
) -> Result<()> {
    let begin = |session: &SessionNoun, given: &kvt_blocks_t, submission: &Submission<'_>| {
        let layers = layers_of(session.ns.layers, given.first_layer, given.layers)?;
        // SAFETY: the caller's promise.
        let keys = unsafe { keys_of(&session.ns, given.names)? };
        let tokens = keys.len() as u64 * u64::from(session.ns.chunk_tokens);
        let common = given.common();
        let blocks = BlockTransfer {
            keys,
            first_layer: given.first_layer as usize,
            layers,
            // SAFETY: the caller's promise.
            views: unsafe { common.views(session, kind, (layers, Some(tokens)))? },
            after: common.after(),
        };
        let Submission { level, opts, ready } = submission;
        let store = &session.ns.store;
        store.submit_blocks(session.number, (kind, *level), blocks, opts, *ready)
    };
    // SAFETY: the caller's promise; there is one op.
    unsafe { submit(session, kind, blocks, opts, out_op, begin) }
}

/// Submits a put of blocks that the engine names itself; otherwise as kvt_session_put, which stores
/// KV by tokens. Never blocks.
///
/// A block is a chunk of the namespace's layout without a parent, so it is evicted by itself. All
/// sessions of the namespace share blocks. The session only says for whom the transfer is: its
/// tenant, priority and share of the bandwidth.
///
/// The op has an item per block (kvt_op_items), in order, with the status of the block. The op's
/// status is KVT_OK if that of all blocks is, else that of a failed one; KVT_E_NOT_FOUND only if
/// nothing else failed. Its value is the number of tokens, from the first on, that were stored
/// without a gap.
///
/// @param blocks  Copied, names and tables of pages included.
/// @param out_op  Receives the op; free it with kvt_op_free. Null = no handle, only a completion.
/// @return As kvt_session_put.
#[capi]
pub unsafe extern "C" fn kvt_session_put_blocks(
    session: *const kvt_session_t,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    submit_block_transfer(session, TransferKind::Put, blocks, opts, out_op)
}

/// Submits a get of blocks, from whichever tier has them; from the remote only those that
/// kvt_session_remote_lookup_blocks found there. Never blocks. If blocks are missing, the op ends
/// with KVT_E_NOT_FOUND and its items say which; the tensors of a missing block may be written in
/// part.
///
/// @param blocks  See kvt_session_put_blocks.
/// @param out_op  See kvt_session_put_blocks.
/// @return As kvt_session_put.
#[capi]
pub unsafe extern "C" fn kvt_session_get_blocks(
    session: *const kvt_session_t,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    submit_block_transfer(session, TransferKind::Get, blocks, opts, out_op)
}

/// Submits a prefetch of blocks into host memory, for a later get. Never blocks. The items of the
/// op are those of a get.
///
/// @param blocks  Without views.
/// @param opts    Set `priority` to KVT_PRIORITY_PREFETCH.
/// @param out_op  See kvt_session_put_blocks.
/// @return As kvt_session_put.
#[capi]
pub unsafe extern "C" fn kvt_session_prefetch_blocks(
    session: *const kvt_session_t,
    blocks: *const kvt_blocks_t,
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    submit_block_transfer(session, TransferKind::Prefetch, blocks, opts, out_op)
}

/// Removes blocks from all tiers, unless transfers or sessions (kvt_session_hold_blocks) reference
/// them. Does not wait for the disk: after a crash, blocks that were on disk may be found again, as
/// after any eviction.
///
/// @param names  Names without a block are skipped.
/// @param out    Counts; may be null.
/// @return KVT_E_LIMIT.
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
    let cleared = session.ns.store.call(
        |core| core.drop_blocks(session.number, &keys),
        || calls::DropBlocks { session: session.id(), keys: keys.clone() },
    )?;
    write(out, &clear_report(&cleared));
    Ok(())
}

// Remote lookups.

/// Starts a remote lookup of a session's chunks. Never blocks. The op's value is the number of
/// tokens, from the first on, that can be reused from this store and its remote. From then on,
/// lookups and plans count chunks at the remote, and gets and prefetches fetch them. Appending at
/// least a chunk starts the same lookup (`lookup=append`); the op then only waits for it. Without a
/// remote, or while its circuit is open, the op ends at once. Closing the session ends it with
/// KVT_E_CANCELLED.
///
/// An answer is a hint: a chunk that is gone when it is fetched is a miss.
///
/// @param opts    Set a deadline: the op then ends with KVT_E_TIMEOUT, and answers so far count.
/// @param out_op  Null = no handle, only a completion in the queue of `opts`.
/// @return KVT_E_AGAIN (too many transfers or ops are in flight, or the queue is full).
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

/// Starts a lookup of blocks in this store and its remote. Never blocks. From then on,
/// kvt_namespace_blocks_exist reports those at the remote as 1 << KVT_TIER_REMOTE, and
/// kvt_session_get_blocks and kvt_session_prefetch_blocks fetch them. The remote is asked for all
/// blocks that are not in this store and have no recent answer. Without a remote, or while its
/// circuit is open, the op ends at once. Closing the session does not end it.
///
/// The op has an item per block (kvt_op_items): KVT_OK if all of it is in this store or at the
/// remote, else KVT_E_NOT_FOUND. Its status is KVT_OK if that of all blocks is. Its value is the
/// number of tokens, from the first on, that can be used without a gap.
///
/// An answer is a hint: a block that is gone when it is fetched is a miss. A hint is forgotten when
/// the store needs its row for a chunk of its own, or after `known` later ones (a parameter of the
/// remote); look the block up again then.
///
/// @param names   1 to 65536; a name that occurs twice has two items. Copied.
/// @param opts    Set a deadline: blocks without an answer then end with KVT_E_TIMEOUT.
/// @param out_op  See kvt_session_remote_lookup.
/// @return KVT_E_AGAIN (as kvt_session_remote_lookup, or 2^20 blocks are being looked up),
///         KVT_E_LIMIT.
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

/// Cells that policies are notified of during one lock of the store.
const CELLS_PER_LOCK: usize = 1 << 14;

/// References blocks that are stored: they stay in at least one tier, and gets find them, until
/// they are released. They may be demoted to disk; kvt_session_prefetch_blocks promotes them.
/// Counts no use. Never blocks.
///
/// Holds are counted, for each name of each call: a block that is held twice must be released
/// twice. A block that lacks layers, or whose put has not completed, is not held. Closing the
/// session releases all; forks hold none. If held blocks fill the memory or the chunk table, puts
/// end with KVT_E_BUDGET, or are refused with KVT_E_LIMIT. A held block whose only copy is damaged
/// is lost; its name stays held for the next put.
///
/// @param out  Receives a byte per name, as kvt_namespace_blocks_exist; 0 = not held. May be null
///             if only kvt_session_close releases them.
/// @return KVT_E_LIMIT (also: 2^20 holds of a session). On failure nothing is held.
#[capi]
pub unsafe extern "C" fn kvt_session_hold_blocks(
    session: *const kvt_session_t,
    names: *const kvt_block_names_t,
    out: *mut u8,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let session = enter(session)?;
    let keys = keys_of(&session.ns, names)?;
    let found = session.ns.store.call(
        |core| {
            let mut found = Vec::new();
            found.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
            found.resize(keys.len(), 0);
            core.hold_names(session.number, &keys, &mut found).map(|()| found)
        },
        || calls::HoldNames { session: session.id(), keys: keys.clone() },
    )?;
    if found.len() != keys.len() {
        fail!(Corrupt, "the server has answered for {} names of {}", found.len(), keys.len());
    }
    if !out.is_null() {
        // SAFETY: `out` has room for a byte per name, by the caller's promise.
        std::ptr::copy_nonoverlapping(found.as_ptr(), out, found.len());
    }
    Ok(())
}

/// Releases one hold of each block. A block without holds may be evicted. Never blocks.
///
/// The session must hold each block as often as it is named, else nothing changes: a miscount
/// would release holds of another part of the program.
///
/// @return KVT_E_INVALID (also: not held as often), KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_session_release_blocks(
    session: *const kvt_session_t,
    names: *const kvt_block_names_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let session = enter(session)?;
    let keys = keys_of(&session.ns, names)?;
    session.ns.store.call(
        |core| core.release_names(session.number, &keys),
        || calls::ReleaseNames { session: session.id(), keys: keys.clone() },
    )
}

/// Passes a hint about the future of each block to the policies, as kvt_session_hint does for a
/// session. Names without a block are skipped.
///
/// @param session  Supplies tenant and priority; the hint does not concern it.
/// @param hint     Its times are CLOCK_MONOTONIC.
/// @return KVT_E_LIMIT.
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
        fail!(Limit, "{} names: a call has at most {MAX_BLOCKS}, make several", keys.len());
    }
    // Policies may be notified of each layer of each block, so the lock is released in between.
    let batch_blocks = (CELLS_PER_LOCK / session.ns.layers.max(1)).max(1);
    let mut rest = &keys[..];
    loop {
        let (batch, others) = rest.split_at(rest.len().min(batch_blocks));
        session.ns.store.call(
            |core| core.hint_blocks(session.number, batch, &hint),
            || calls::HintBlocks { session: session.id(), keys: batch.to_vec(), hint },
        )?;
        if others.is_empty() {
            return Ok(());
        }
        rest = others;
    }
}

/// Pins blocks until a time, as kvt_session_pin pins chunks of a session. Names without a block are
/// skipped.
///
/// @param priority  0 to 255; pins of low priority are given up first.
/// @param until_ns  End of the pin, CLOCK_MONOTONIC; not 0: blocks cannot be unpinned.
/// @return KVT_E_BUDGET (pins would exceed their share), KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_session_pin_blocks(
    session: *const kvt_session_t,
    names: *const kvt_block_names_t,
    priority: u32,
    until_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if until_ns == 0 {
        fail!(Invalid, "until_ns is 0: a pin of blocks needs an end");
    }
    let pin = pin_of(priority, until_ns)?;
    let session = enter(session)?;
    let keys = keys_of(&session.ns, names)?;
    session.ns.store.call(
        |core| core.pin_blocks(session.number, &keys, pin),
        || calls::PinBlocks { session: session.id(), keys: keys.clone(), pin },
    )
}
