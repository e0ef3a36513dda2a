//! Runtimes, operations and completion queues: how work is submitted and how its end is learnt.
//!
//! A runtime owns worker threads and a table of ops. kvt_open makes one; engines that want several
//! stores on the same threads open it themselves. Each submission returns an op at once. An op is
//! issued, then resolved (its result is known), then released (the caller's memory is free). The
//! caller waits for an op, or takes completions from a queue, and frees the op when it is released.
//!
//! Life cycle: kvt_runtime_open, kvt_queue_open, submissions, kvt_queue_wait, kvt_op_free,
//! kvt_queue_close, kvt_runtime_close. Closing a runtime cancels its open ops and waits for them.
//!
//! ```c
//! kvt_completion_t done[64];
//! uint64_t count = 0;
//! if (kvt_queue_open(runtime, NULL, &queue, &err) != KVT_OK) return fail(err);
//! kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
//! opts.queue = queue, opts.tag = 7; /* 7 comes back with the completion */
//! if (kvt_session_put(session, &transfer, &opts, &op, &err) != KVT_OK) return fail(err);
//! compute_next_layer();
//! if (kvt_queue_wait(queue, 0, done, 64, sizeof done[0], &count) != KVT_OK) return fail(NULL);
//! for (uint64_t i = 0; i < count; i++)
//!     if (done[i].status != KVT_OK) kvt_op_error(done[i].op, &err);
//! return kvt_op_free(&op) == KVT_OK ? 0 : fail(err);
//! ```

use std::ffi::{c_char, c_void};

use crate::base::callback::{Foreign, refuse_reentry};
use crate::base::core::Core;
use crate::base::fault::Faults;
use crate::base::item::MAX_ITEMS;
use crate::base::op::{EVENTS, ISSUED, Op, OpOpts, OpRef, RELEASED, RESOLVED, ops};
use crate::base::queue::{BATCH, Completion, MAX_CAPACITY, Queue, Sink};
use crate::base::runtime::{OnThread, Role, Runtime, RuntimeOpts};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::base::worker::PRIORITIES;
use crate::fail;
use crate::ffi::abi::{
    Noun, Plain, Strided, capi, check_optional_out, check_out, encode, encode_bits, enter, foreign,
    free, insert, inspect, known_flags, noun, pin_optional, read, require, text, write,
};
use crate::ffi::base::{handle_of, kvt_destroy_fn, kvt_error_t, kvt_status_t};
use crate::ffi::device::DeviceNoun;
use crate::ffi::memory::{AccountNoun, BudgetNoun, BufferNoun};
use crate::ffi::offload::OffloadNoun;
use crate::ffi::session::SessionNoun;
use crate::ffi::store::{NamespaceNoun, StoreNoun};
use crate::ffi::stream::StreamNoun;

// Runtimes.

/// The root object: worker threads, clock and notifier thread. Stores, streamers, devices, queues,
/// budgets and buffers are opened on it.
pub struct kvt_runtime_t(());

/// Roles of threads: workers execute ops, the notifier calls callbacks and watches deadlines, the
/// others belong to a store or a streamer.
pub type kvt_thread_role_t = u32;

pub const KVT_THREAD_WORKER: kvt_thread_role_t = 0;
pub const KVT_THREAD_NOTIFIER: kvt_thread_role_t = 1;
pub const KVT_THREAD_STORE: kvt_thread_role_t = 2;
pub const KVT_THREAD_STREAMER: kvt_thread_role_t = 3;

/// Called first in every thread of the runtime and of its stores and streamers, so that the host
/// can name the thread, or set its affinity or priority. `role` is KVT_THREAD_*; more may be added.
/// `index` counts from 0 within the role, and within each store or streamer. May be called from
/// several threads at once. It must not unwind and must not call the library.
pub type kvt_thread_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, role: kvt_thread_role_t, index: u32)>;

/// Options of a runtime.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_runtime_opts_t {
    pub struct_size: u64,
    /// 0: no flags are defined.
    pub flags: u64,
    /// Worker threads, at most 256; 0 = the number of cores, at most 4.
    pub workers: u32,
    /// Most ops that are not freed, at most 524288; 0 = 65536.
    pub max_ops: u32,
    /// Prefix of thread names, at most 10 bytes; null = "kvt".
    pub name: *const c_char,
    pub name_bytes: u64,
    /// Faults to inject, for tests of error paths, such as "faults(pin=at(fail=1))"; null = none.
    /// See "Injected faults" in docs/reference/c.md.
    pub faults: *const c_char,
    pub faults_bytes: u64,
    /// Called first in every thread; null = none.
    pub on_thread: kvt_thread_fn,
    /// Passed to on_thread, and to destroy at the end; taken over only on success.
    pub user_data: *mut c_void,
    /// May be null.
    pub destroy: kvt_destroy_fn,
}

/// Counters of a runtime.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_runtime_stats_t {
    pub struct_size: u64,
    /// Ops submitted so far.
    pub ops_submitted: u64,
    /// Ops that are not released. May briefly count ops whose completion was already delivered.
    pub ops_open: u64,
    /// Ops that are not freed. May briefly count ops that were freed.
    pub ops_live: u64,
    /// Ops that wait for a worker; a large one counts once for each worker that may share it.
    pub ops_queued: u64,
    /// Submissions that failed because max_ops ops were not freed.
    pub ops_rejected: u64,
    pub workers: u32,
    /// 1 = a defect inside the library was caught: close the runtime.
    pub poisoned: u32,
}

/// Numbers of objects that were open when a runtime was closed. None is destroyed: they stay valid
/// as far as they work without a runtime, and are closed or freed as usual. Threads of stores sleep
/// until the store is closed; those of streamers have ended, and their calls return KVT_E_CLOSED.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_close_report_t {
    pub struct_size: u64,
    pub queues: u64,
    pub buffers: u64,
    pub budgets: u64,
    pub accounts: u64,
    pub ops: u64,
    pub stores: u64,
    pub namespaces: u64,
    pub sessions: u64,
    pub offloads: u64,
    pub streamers: u64,
    pub devices: u64,
}

pub(crate) struct RuntimeNoun(pub(crate) Runtime);

noun!(RuntimeNoun, kvt_runtime_t, 2, "runtime");

/// The handle of a runtime, for objects that return it.
#[derive(Clone, Copy)]
pub(crate) struct RuntimeHandle(usize);

impl RuntimeHandle {
    pub(crate) fn of(handle: *mut kvt_runtime_t) -> Self {
        RuntimeHandle(handle.addr())
    }

    /// Handles are never followed: the number is all of it.
    pub(crate) fn get(self) -> *mut kvt_runtime_t {
        std::ptr::without_provenance_mut(self.0)
    }
}

/// Calls `body` with the core of a runtime.
pub(crate) fn on_runtime<R>(
    runtime: *const kvt_runtime_t,
    body: impl FnOnce(&Arc<Core>) -> Result<R>,
) -> Result<R> {
    body(enter(runtime)?.0.core())
}

/// Opens a runtime and starts its threads.
///
/// @return KVT_E_LIMIT, KVT_E_SPEC (in `faults`), KVT_E_IO.
#[capi]
pub unsafe extern "C" fn kvt_runtime_open(
    opts: *const kvt_runtime_opts_t,
    out: *mut *mut kvt_runtime_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let name = text("name", given.name, given.name_bytes)?;
    let faults = text("faults", given.faults, given.faults_bytes)?;
    known_flags(given.flags, 0)?;
    let foreign = foreign(given.on_thread, given.user_data, given.destroy)?;
    let runtime = Runtime::open(RuntimeOpts {
        workers: given.workers,
        max_ops: given.max_ops,
        name: name.to_string(),
        faults: if faults.is_empty() { None } else { Some(Faults::parse(faults)?) },
        on_thread: foreign.clone().map(on_thread),
        ..RuntimeOpts::default()
    })?;
    let handle = insert(RuntimeNoun(runtime))?;
    foreign.iter().for_each(|f| f.keep());
    out.write(handle);
    Ok(())
}

fn on_thread(foreign: Arc<Foreign<unsafe extern "C" fn(*mut c_void, u32, u32)>>) -> OnThread {
    Arc::new(move |role: Role, index| {
        foreign.call(|function, user_data| {
            // SAFETY: function and data came together from the caller.
            unsafe { function(user_data, role as u32, index) }
        });
    })
}

/// Closes a runtime: refuses new work, cancels open ops, and waits for them and for the threads.
/// Objects that are still open are reported, not destroyed. A store among them keeps its directory
/// and its memory; its transfers have ended and its calls return KVT_E_CLOSED, but kvt_store_close
/// still writes back what is not on disk.
///
/// @param report  May be null.
/// @return KVT_E_BUSY (at the deadline; the runtime stays closing: call again).
///
/// Threading: not inside callbacks.
#[capi]
pub unsafe extern "C" fn kvt_runtime_close(
    runtime: *mut *mut kvt_runtime_t,
    deadline_ns: u64,
    report: *mut kvt_close_report_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_optional_out(report)?;
    let mut open = kvt_close_report_t::zeroed();
    free(runtime, |noun| {
        noun.0.close(deadline_ns)?;
        open = open_objects(noun.0.core());
        Ok(())
    })?;
    warn_of_open(&open);
    write(report, &open);
    Ok(())
}

fn warn_of_open(open: &kvt_close_report_t) {
    let counts = [
        (open.queues, "queues"),
        (open.buffers, "buffers"),
        (open.budgets, "budgets"),
        (open.accounts, "accounts"),
        (open.ops, "ops"),
        (open.stores, "stores"),
        (open.namespaces, "namespaces"),
        (open.sessions, "sessions"),
        (open.offloads, "offloads"),
        (open.streamers, "streamers"),
        (open.devices, "devices"),
    ];
    let counts = counts.iter().filter(|(count, _)| *count > 0);
    let words: Vec<String> = counts.map(|(count, name)| format!("{count} {name}")).collect();
    if !words.is_empty() {
        log::warn!("a runtime was closed with {} still open", words.join(", "));
    }
}

/// Counts the objects of a runtime that are open.
fn open_objects(core: &Arc<Core>) -> kvt_close_report_t {
    let mut open = kvt_close_report_t::zeroed();
    let same = |other: &Arc<Core>| u64::from(Arc::ptr_eq(core, other));
    QueueNoun::table().visit(|n| open.queues += same(n.0.core()));
    BufferNoun::table().visit(|n| open.buffers += same(&n.core));
    BudgetNoun::table().visit(|n| open.budgets += same(n.0.core()));
    AccountNoun::table().visit(|n| open.accounts += same(n.0.budget().core()));
    ops().visit(|op| open.ops += same(&op.core));
    StoreNoun::table().visit(|n| open.stores += same(&n.core));
    NamespaceNoun::table().visit(|n| open.namespaces += same(&n.0.core));
    SessionNoun::table().visit(|n| open.sessions += same(&n.ns.core));
    OffloadNoun::table().visit(|n| open.offloads += same(&n.session.ns.core));
    StreamNoun::table().visit(|n| open.streamers += same(&n.core));
    DeviceNoun::table().visit(|n| open.devices += same(&n.core));
    open
}

/// Reads the runtime's clock: CLOCK_MONOTONIC nanoseconds, for deadlines.
#[capi]
pub unsafe extern "C" fn kvt_runtime_now(
    runtime: *const kvt_runtime_t,
    out_ns: *mut u64,
) -> kvt_status_t {
    require(out_ns)?;
    let runtime = inspect(runtime)?;
    out_ns.write(runtime.0.core().clock().now_ns());
    Ok(())
}

/// Reads the counters of a runtime, also of a poisoned one.
#[capi]
pub unsafe extern "C" fn kvt_runtime_stats(
    runtime: *const kvt_runtime_t,
    out: *mut kvt_runtime_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let runtime = inspect(runtime)?;
    let stats = runtime.0.core().stats();
    write(
        out,
        &kvt_runtime_stats_t {
            struct_size: 0,
            ops_submitted: stats.ops_submitted,
            ops_open: stats.ops_open,
            ops_live: u64::from(stats.ops_live),
            ops_queued: stats.ops_queued,
            ops_rejected: stats.refused,
            workers: stats.workers,
            poisoned: u32::from(stats.poisoned || runtime.is_poisoned()),
        },
    );
    Ok(())
}

// Operations.

/// A submitted operation; completes exactly once. It is *resolved* when its result is known, and
/// *released* when the library no longer touches the caller's memory. Both usually come together; a
/// deadline or a defect may resolve an op earlier.
pub struct kvt_op_t(());

/// Moments of an op: one or more bits.
pub type kvt_op_moments_t = u32;

/// Execution has begun, or the op ended before it could begin.
pub const KVT_OP_ISSUED: kvt_op_moments_t = 1;
/// The result is known.
pub const KVT_OP_RESOLVED: kvt_op_moments_t = 2;
/// The library no longer touches the caller's memory.
pub const KVT_OP_RELEASED: kvt_op_moments_t = 4;
/// A cancel was requested.
pub const KVT_OP_CANCEL: kvt_op_moments_t = 8;

/// Flags of a submission.
pub type kvt_submit_flags_t = u64;

/// Make each item an op of its own: out_ops receives one op for each item.
pub const KVT_SUBMIT_EACH: kvt_submit_flags_t = 1;

/// Priorities: a caller waits for the work, the work is needed soon, the work can wait. Lower
/// priorities get a turn from time to time while higher ones have work.
pub type kvt_priority_t = u32;

pub const KVT_PRIORITY_DEMAND: kvt_priority_t = 0;
pub const KVT_PRIORITY_PREFETCH: kvt_priority_t = 1;
pub const KVT_PRIORITY_BACKGROUND: kvt_priority_t = 2;

const _: () = assert!(KVT_OP_ISSUED == ISSUED && KVT_OP_RESOLVED == RESOLVED);
const _: () = assert!(KVT_OP_RELEASED == RELEASED && KVT_OP_CANCEL == crate::base::op::CANCEL);

/// Options of a submission.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_submit_opts_t {
    pub struct_size: u64,
    pub flags: kvt_submit_flags_t,
    /// Receives the completions; null = none, and the call must return a handle.
    pub queue: *const kvt_queue_t,
    /// The caller's value, returned in completions.
    pub tag: u64,
    /// The op resolves with KVT_E_TIMEOUT at this time; 0 = never.
    pub deadline_ns: u64,
    /// KVT_OP_ISSUED, _RESOLVED, _RELEASED: moments that post a completion. Moments that come
    /// together share one. 0 = KVT_OP_RELEASED.
    pub notify: u32,
    pub priority: kvt_priority_t,
}

/// Progress and result of an op.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_op_info_t {
    pub struct_size: u64,
    pub tag: u64,
    /// Bytes of the items that ended with KVT_OK.
    pub bytes_done: u64,
    pub state: kvt_op_moments_t,
    /// Result; valid once KVT_OP_RESOLVED is set.
    pub status: kvt_status_t,
    pub items: u32,
    /// Items that were executed or skipped.
    pub items_done: u32,
    /// Items of those whose status is not KVT_OK.
    pub items_failed: u32,
    pub reserved: u32,
    /// Value of the first item, such as a checksum. For a transfer of a session: the tokens that
    /// were loaded or stored from its first token on, without a gap.
    pub value: u64,
}

/// Result of one item of an op.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_op_item_t {
    /// Computed value, such as a checksum; 0 = none.
    pub value: u64,
    /// Valid once `done` is 1.
    pub status: kvt_status_t,
    /// 1 = executed or skipped.
    pub done: u32,
}

noun!(Op, kvt_op_t, 3, "op", ops());

/// Reads submit options; the second result is true if each item becomes an op of its own.
///
/// # Safety
/// `opts` is null or valid for the size it states.
pub(crate) unsafe fn submit_opts(
    opts: *const kvt_submit_opts_t,
    detached: bool,
) -> Result<(OpOpts, bool)> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(opts)? };
    known_flags(given.flags, KVT_SUBMIT_EACH)?;
    if given.notify & !EVENTS != 0 {
        fail!(
            Invalid,
            "notify is {:#x}: pass KVT_OP_ISSUED, _RESOLVED and _RELEASED bits, or 0",
            given.notify
        );
    }
    if given.priority as usize >= PRIORITIES {
        fail!(Invalid, "priority {} is unknown: pass 0 to {}", given.priority, PRIORITIES - 1);
    }
    let queue = pin_optional(given.queue)?.map(|noun| noun.0.clone());
    let opts = OpOpts {
        queue,
        tag: given.tag,
        deadline_ns: given.deadline_ns,
        notify: given.notify,
        priority: given.priority as usize,
        detached,
    };
    Ok((opts, given.flags & KVT_SUBMIT_EACH != 0))
}

/// Begins one op and writes its handle.
///
/// # Safety
/// `opts` is null or valid for the size it states, `out_op` null or valid.
pub(crate) unsafe fn begin_one(
    opts: *const kvt_submit_opts_t,
    out_op: *mut *mut kvt_op_t,
    begin: impl FnOnce(&OpOpts) -> Result<OpRef>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let (opts, each) = unsafe { submit_opts(opts, out_op.is_null())? };
    if each {
        fail!(Invalid, "KVT_SUBMIT_EACH is set, and the call submits one op: clear the flag");
    }
    if out_op.is_null() && opts.queue.is_none() {
        fail!(Invalid, "out_op and the queue are both null: pass one of them to learn of the end");
    }
    let op = begin(&opts)?;
    if !out_op.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { out_op.write(encode::<Op>(op.key())) };
    }
    Ok(())
}

/// Reads the progress and the result of an op.
#[capi]
pub unsafe extern "C" fn kvt_op_info(op: *const kvt_op_t, out: *mut kvt_op_info_t) -> kvt_status_t {
    check_out(out)?;
    write(out, &info_of(&*inspect(op)?));
    Ok(())
}

fn info_of(op: &Op) -> kvt_op_info_t {
    let info = op.info();
    kvt_op_info_t {
        struct_size: 0,
        tag: info.tag,
        bytes_done: info.bytes_done,
        state: info.state,
        status: info.status.unwrap_or(0),
        items: info.items,
        items_done: info.items_done,
        items_failed: info.items_failed,
        reserved: 0,
        value: op.value(),
    }
}

/// Waits until an op is released, reads its result, and frees it: kvt_op_wait, kvt_op_info,
/// kvt_op_error and kvt_op_free in one call.
///
/// @param op   Cleared, unless the op is still running at the deadline.
/// @param out  Receives the result of the op, also of a failed one; may be null.
/// @return The status of the op, whose message `err` receives; KVT_E_TIMEOUT also at the deadline.
///
/// Threading: not inside callbacks.
#[capi]
pub unsafe extern "C" fn kvt_op_finish(
    op: *mut *mut kvt_op_t,
    deadline_ns: u64,
    out: *mut kvt_op_info_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_optional_out(out)?;
    finish(op, deadline_ns, out)
}

/// # Safety
/// As kvt_op_finish, whose checks are done.
pub(crate) unsafe fn finish(
    op: *mut *mut kvt_op_t,
    deadline_ns: u64,
    out: *mut kvt_op_info_t,
) -> Result<()> {
    refuse_reentry()?;
    // SAFETY: the caller's promise.
    let handle = if op.is_null() { std::ptr::null_mut() } else { unsafe { op.read() } };
    if handle.is_null() {
        return Ok(());
    }
    let object = inspect(handle)?;
    object.wait(RELEASED, deadline_ns)?;
    let (info, result) = (info_of(&object), object.result());
    drop(object);
    // SAFETY: the caller's promise.
    unsafe {
        write(out, &info);
        free_op(op)?;
    }
    result
}

/// Waits until an op has reached all of the given moments. Succeeds whatever the result of the op
/// is.
///
/// @param moments  KVT_OP_ISSUED, _RESOLVED and _RELEASED bits, at least one.
/// @return KVT_E_TIMEOUT.
///
/// Threading: not inside callbacks.
#[capi]
pub extern "C" fn kvt_op_wait(
    op: *const kvt_op_t,
    moments: kvt_op_moments_t,
    deadline_ns: u64,
) -> kvt_status_t {
    if moments == 0 || moments & !EVENTS != 0 {
        fail!(Invalid, "moments is {moments:#x}: pass KVT_OP_ISSUED, _RESOLVED or _RELEASED bits");
    }
    refuse_reentry()?;
    let op = inspect(op)?;
    op.wait(moments, deadline_ns)
}

/// Requests the end of an op, and does not wait for it. An op that has not begun ends at once with
/// KVT_E_CANCELLED. A running op skips the items that have not begun. An op that has ended does not
/// change.
#[capi]
pub extern "C" fn kvt_op_cancel(op: *const kvt_op_t) -> kvt_status_t {
    let op = inspect(op)?;
    op.cancel();
    Ok(())
}

/// Reads the results of the items of an op, also while it runs.
///
/// @param first      First item to read, at most the number of items.
/// @param capacity   At most 65536.
/// @param out_count  Number of entries written.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_op_items(
    op: *const kvt_op_t,
    first: u64,
    out: *mut kvt_op_item_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    require(out_count)?;
    let entries = Strided::new(out, capacity, stride_bytes, MAX_ITEMS as u64)?;
    let op = inspect(op)?;
    let items = usize::try_from(first).ok().and_then(|first| op.items().get(first..));
    let Some(items) = items else {
        fail!(Invalid, "first is {first}: the op has {} items", op.items().len());
    };
    let n = items.len().min(entries.len());
    for (i, item) in items.iter().take(n).enumerate() {
        let (status, value) = item.outcome();
        let done = u32::from(status.is_some());
        entries.put(i, &kvt_op_item_t { value, status: status.unwrap_or(0), done });
    }
    out_count.write(n as u64);
    Ok(())
}

/// Returns the error object of a failed op.
///
/// @return KVT_E_NOT_FOUND (no details are recorded), KVT_E_STATE (the op is not resolved).
#[capi]
pub unsafe extern "C" fn kvt_op_error(
    op: *const kvt_op_t,
    out: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let op = inspect(op)?;
    if op.state() & RESOLVED == 0 {
        return Err(Status::State.into());
    }
    let error = op.error().ok_or_else(|| Error::from(Status::NotFound))?;
    let handle = handle_of(error)?;
    out.write(handle);
    Ok(())
}

/// Frees the handle of a released op. Before, cancel the op and wait for KVT_OP_RELEASED.
///
/// @return KVT_E_BUSY (the op is not released).
#[capi]
pub unsafe extern "C" fn kvt_op_free(op: *mut *mut kvt_op_t) -> kvt_status_t {
    free_op(op)
}

/// Frees several op handles and clears each. Skips null handles. Stops at the first failure, which
/// is then the first handle that is not null.
///
/// @return KVT_E_BUSY (the op is not released).
#[capi]
pub unsafe extern "C" fn kvt_op_free_many(ops: *mut *mut kvt_op_t, count: u64) -> kvt_status_t {
    if count == 0 {
        return Ok(());
    }
    require(ops)?;
    for i in 0..count as usize {
        // SAFETY: inside the caller's array.
        free_op(ops.add(i))?;
    }
    Ok(())
}

/// Frees the handle of a released op.
///
/// # Safety
/// `op` is null or valid for reads and writes.
unsafe fn free_op(op: *mut *mut kvt_op_t) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        free(op, |op| match op.state() & RELEASED {
            0 => Err(Status::Busy.into()),
            _ => Ok(()),
        })
    }
}

// Completion queues.

/// A bounded queue of completions. It is polled, or it calls back on the notifier thread, never
/// both. It loses no completion: submissions fail with KVT_E_AGAIN while it is full. Several
/// threads may drain it.
pub struct kvt_queue_t(());

/// One entry of a queue: moments that an op has reached.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_completion_t {
    /// Still to be freed by the caller; null if the op was submitted without a handle.
    pub op: *mut kvt_op_t,
    pub tag: u64,
    /// See kvt_op_info_t.
    pub bytes_done: u64,
    /// See kvt_op_info_t.
    pub value: u64,
    /// Result of the op; KVT_OK while it is not resolved.
    pub status: kvt_status_t,
    /// KVT_OP_ISSUED, _RESOLVED, _RELEASED: the moments of this entry.
    pub events: u32,
    /// Items whose status is not KVT_OK.
    pub items_failed: u32,
    pub reserved: u32,
}

/// Receives completions on the notifier thread, one call at a time for each queue. `batch` is
/// borrowed for the call; its entries are `stride_bytes` apart. The function may submit and free
/// ops. It must not unwind, and must not wait for work of the same runtime.
pub type kvt_completion_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        batch: *const kvt_completion_t,
        count: u64,
        stride_bytes: u64,
    ),
>;

/// Options of a queue.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_queue_opts_t {
    pub struct_size: u64,
    /// 0: no flags are defined.
    pub flags: u64,
    /// Entries, at most 1048576; 0 = 4096. Each op reserves one for its release and one for each
    /// other moment in `notify`. An entry is free again when it is drained or not needed.
    pub capacity: u64,
    /// Receives the completions; null = the queue is polled.
    pub callback: kvt_completion_fn,
    /// Passed to callback, and to destroy at the end; taken over only on success.
    pub user_data: *mut c_void,
    /// May be null.
    pub destroy: kvt_destroy_fn,
}

/// Counters of a queue.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_queue_stats_t {
    pub struct_size: u64,
    pub capacity: u64,
    /// Entries that wait to be drained.
    pub pending: u64,
    /// Entries reserved by ops that are not released, or in use by the callback.
    pub reserved: u64,
    /// Most entries ever pending and reserved together.
    pub peak: u64,
    /// Completions posted so far.
    pub posted: u64,
    /// Submissions that failed because the queue was full.
    pub refused: u64,
}

pub(crate) struct QueueNoun(pub(crate) Arc<Queue>);

noun!(QueueNoun, kvt_queue_t, 4, "queue");

fn to_c(entry: &Completion) -> kvt_completion_t {
    kvt_completion_t {
        op: encode_bits::<Op>(entry.op),
        tag: entry.tag,
        bytes_done: entry.bytes_done,
        value: entry.value,
        status: entry.status,
        events: entry.events,
        items_failed: entry.items_failed,
        reserved: 0,
    }
}

type Call = unsafe extern "C" fn(*mut c_void, *const kvt_completion_t, u64, u64);

fn sink(foreign: Arc<Foreign<Call>>) -> Sink {
    Box::new(move |batch| {
        let mut out = [kvt_completion_t::zeroed(); BATCH];
        for (slot, entry) in out.iter_mut().zip(batch) {
            *slot = to_c(entry);
        }
        foreign.call(|function, user_data| {
            let stride = size_of::<kvt_completion_t>() as u64;
            // SAFETY: function and data came together from the caller; the array
            // lives for the call and holds at least `batch.len()` entries.
            unsafe { function(user_data, out.as_ptr(), batch.len() as u64, stride) };
        });
    })
}

/// Opens a completion queue.
///
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_queue_open(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_queue_opts_t,
    out: *mut *mut kvt_queue_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    known_flags(given.flags, 0)?;
    let capacity = u32::try_from(given.capacity).unwrap_or(u32::MAX);
    let foreign = foreign(given.callback, given.user_data, given.destroy)?;
    let queue = on_runtime(runtime, |core| Queue::open(core, capacity, foreign.clone().map(sink)))?;
    let handle = insert(QueueNoun(queue))?;
    foreign.iter().for_each(|f| f.keep());
    out.write(handle);
    Ok(())
}

/// Closes a queue: refuses new work, cancels the ops that report to it, and waits for their
/// release. A callback has then received every completion. Completions that were not polled are
/// dropped; their ops stay valid until they are freed.
///
/// @return KVT_E_BUSY (at the deadline; the queue stays closing: call again).
///
/// Threading: not inside callbacks.
#[capi]
pub unsafe extern "C" fn kvt_queue_close(
    queue: *mut *mut kvt_queue_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    free(queue, |noun| noun.0.close(deadline_ns))
}

/// Takes entries of a queue with `fetch` and writes them to the caller's array.
///
/// # Safety
/// As the exported functions that call it.
unsafe fn drain(
    queue: *const kvt_queue_t,
    out: *mut kvt_completion_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    fetch: impl FnOnce(&Queue, usize, &mut dyn FnMut(Completion)) -> Result<usize>,
) -> Result<()> {
    require(out_count)?;
    // SAFETY: the caller's promise.
    let entries = unsafe { Strided::new(out, capacity, stride_bytes, u64::from(MAX_CAPACITY))? };
    let queue = inspect(queue)?;
    let mut i = 0;
    let mut put = |entry: Completion| {
        entries.put(i, &to_c(&entry));
        i += 1;
    };
    let n = fetch(&queue.0, entries.len(), &mut put)?;
    // SAFETY: not null, and the caller's promise.
    unsafe { out_count.write(n as u64) };
    Ok(())
}

/// Takes completions from a polled queue without waiting, oldest first.
///
/// @param capacity   At most 1048576.
/// @param out_count  Number of completions written; 0 if none is pending.
/// @return KVT_E_STATE (the queue calls back), KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_queue_poll(
    queue: *const kvt_queue_t,
    out: *mut kvt_completion_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    drain(queue, out, capacity, stride_bytes, out_count, |q, n, put| q.poll(n, put))
}

/// Takes completions from a polled queue, oldest first, and waits for the first one. Returns
/// KVT_E_CLOSED once the queue closes and no more completions will come.
///
/// @param capacity   1 to 1048576.
/// @param out_count  Number of completions written, at least 1.
/// @return KVT_E_TIMEOUT, KVT_E_STATE (the queue calls back), KVT_E_LIMIT.
///
/// Threading: not inside callbacks.
#[capi]
pub unsafe extern "C" fn kvt_queue_wait(
    queue: *const kvt_queue_t,
    deadline_ns: u64,
    out: *mut kvt_completion_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    let fetch = |q: &Queue, n: usize, put: &mut dyn FnMut(Completion)| {
        if n == 0 {
            fail!(Invalid, "capacity is 0: pass room for at least one completion");
        }
        q.wait(n, deadline_ns, put)
    };
    drain(queue, out, capacity, stride_bytes, out_count, fetch)
}

/// Returns an eventfd (close-on-exec, non-blocking) for poll, select and epoll. It is readable
/// exactly while completions are pending. Do not read, write or close it: draining the queue resets
/// it, closing the queue closes it.
///
/// @return KVT_E_STATE (the queue calls back), KVT_E_IO.
#[capi]
pub unsafe extern "C" fn kvt_queue_fd(queue: *const kvt_queue_t, out_fd: *mut i32) -> kvt_status_t {
    require(out_fd)?;
    let queue = inspect(queue)?;
    let fd = queue.0.eventfd()?;
    out_fd.write(fd);
    Ok(())
}

/// Reads the counters of a queue.
#[capi]
pub unsafe extern "C" fn kvt_queue_stats(
    queue: *const kvt_queue_t,
    out: *mut kvt_queue_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let queue = inspect(queue)?;
    let stats = queue.0.stats();
    write(
        out,
        &kvt_queue_stats_t {
            struct_size: 0,
            capacity: u64::from(stats.capacity),
            pending: u64::from(stats.pending),
            reserved: u64::from(stats.reserved),
            peak: u64::from(stats.peak),
            posted: stats.posted,
            refused: stats.refused,
        },
    );
    Ok(())
}
