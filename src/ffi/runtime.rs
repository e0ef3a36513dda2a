//! Runtimes, operations and completion queues.

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

/// The root: owns threads, clock and notifier. Everything is opened on one.
/// Internally locked: any thread may use it at any time.
pub struct kvt_runtime_t(());

/// The thread carries out ops.
pub const KVT_THREAD_WORKER: u32 = 0;
/// The thread makes callbacks and keeps deadlines.
pub const KVT_THREAD_NOTIFIER: u32 = 1;
/// The thread is a store's: it copies, reads or writes, or answers the control socket.
pub const KVT_THREAD_STORE: u32 = 2;
/// The thread is a streamer's: it reads weights, or copies them to a device.
pub const KVT_THREAD_STREAMER: u32 = 3;

/// Called first in every thread of the runtime, and of the stores and streamers on it,
/// so that the host can name it, place it on a core or a NUMA node, or set its
/// priority. It must not unwind and must not call the library. `role` is KVT_THREAD_*,
/// more may be added; `index` counts the threads of that role, of each store or
/// streamer from 0. May be called from several threads at once.
pub type kvt_thread_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, role: u32, index: u32)>;

/// How to open a runtime. Zero is the default everywhere.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_runtime_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// None are defined yet: 0.
    pub flags: u64,
    /// Worker threads, at most 256; 0 = the number of cores, at most 4.
    pub workers: u32,
    /// Ops that may live (not freed) at once, at most 524288; 0 = 65536.
    pub max_ops: u32,
    /// Prefix of thread names, at most 10 bytes; empty = "kvt".
    pub name: *const c_char,
    /// Length of the name.
    pub name_bytes: u64,
    /// Faults to plant, for tests of the host's own error paths, such as
    /// "faults(worker=at(panic=3), pin=at(fail=1))"; empty = none. See docs/abi.md.
    pub faults: *const c_char,
    /// Length of the faults text.
    pub faults_bytes: u64,
    /// Called first in every thread; may be null.
    pub on_thread: kvt_thread_fn,
    /// Handed to on_thread; taken over on success only.
    pub user_data: *mut c_void,
    /// Releases user_data; may be null.
    pub destroy: kvt_destroy_fn,
}

/// Counters of a runtime.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_runtime_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Ops submitted so far.
    pub ops_submitted: u64,
    /// Ops not yet released; for a moment, those that were just told of may still count.
    pub ops_open: u64,
    /// Ops not yet freed; the same.
    pub ops_live: u64,
    /// Ops waiting for a worker.
    pub ops_queued: u64,
    /// Submissions refused because max_ops lived.
    pub ops_rejected: u64,
    /// Worker threads.
    pub workers: u32,
    /// 1 after a defect was caught inside; close the runtime then.
    pub poisoned: u32,
}

/// What was still there when a runtime was closed. Nothing of it is lost: open
/// handles keep working as far as they can without a runtime, and are freed as usual.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_close_report_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Queues not closed.
    pub queues: u64,
    /// Buffers not freed.
    pub buffers: u64,
    /// Budgets not closed.
    pub budgets: u64,
    /// Accounts not closed.
    pub accounts: u64,
    /// Ops not freed.
    pub ops: u64,
    /// Stores not closed. Their threads go on until they are.
    pub stores: u64,
    /// Namespaces not closed.
    pub namespaces: u64,
    /// Sessions not closed.
    pub sessions: u64,
    /// Offloads not closed.
    pub offloads: u64,
    /// Streamers not closed. Their threads have ended: calls on them give KVT_E_CLOSED.
    pub streamers: u64,
    /// Devices not closed.
    pub devices: u64,
}

pub(crate) struct RuntimeNoun(pub(crate) Runtime);

noun!(RuntimeNoun, kvt_runtime_t, 2, "runtime");

/// Calls `body` with what nouns share of an open runtime.
pub(crate) fn on_runtime<R>(
    runtime: *const kvt_runtime_t,
    body: impl FnOnce(&Arc<Core>) -> Result<R>,
) -> Result<R> {
    body(enter(runtime)?.0.core())
}

/// Opens a runtime and starts its threads.
///
/// @param opts  How; null for defaults.
/// @param out   The runtime; close it with kvt_runtime_close.
/// @param err   Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_SPEC,
///         KVT_E_NOMEM, KVT_E_IO, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the runtime. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_runtime_open(
    opts: *const kvt_runtime_opts_t,
    out: *mut *mut kvt_runtime_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let name = text("name", given.name, given.name_bytes)?;
    let (given, name, faults) = (given, name, text("faults", given.faults, given.faults_bytes)?);
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

/// Closes a runtime: refuses new work, cancels what is open, waits for it and
/// for the threads. Close queues and free buffers first where you can; what is
/// left is reported, not destroyed. A store that is left keeps its directory, its
/// memory and its own threads, which sleep; its moves have ended, calls on it give
/// KVT_E_CLOSED, and kvt_store_close still writes down what it has.
///
/// @param runtime      Pointer to the handle, cleared on success; null, or a null
///                     handle, is fine.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param report       What was left open; may be null. Start it with
///                     KVT_CLOSE_REPORT_INIT.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY at the deadline (the runtime stays closing and valid:
///         call again); KVT_E_REENTRANT inside a callback; KVT_E_INVALID, KVT_E_HANDLE,
///         KVT_E_FORKED.
///
/// Threading: any thread but the runtime's own. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `report` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_runtime_close(
    runtime: *mut *mut kvt_runtime_t,
    deadline_ns: u64,
    report: *mut kvt_close_report_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_optional_out(report)?;
    let mut left = kvt_close_report_t::zeroed();
    free(runtime, |noun| {
        noun.0.close(deadline_ns)?;
        left = census(noun.0.core());
        Ok(())
    })?;
    warn_of(&left);
    write(report, &left);
    Ok(())
}

fn warn_of(left: &kvt_close_report_t) {
    let counts = [
        (left.queues, "queues"),
        (left.buffers, "buffers"),
        (left.budgets, "budgets"),
        (left.accounts, "accounts"),
        (left.ops, "ops"),
        (left.stores, "stores"),
        (left.namespaces, "namespaces"),
        (left.sessions, "sessions"),
        (left.offloads, "offloads"),
        (left.streamers, "streamers"),
        (left.devices, "devices"),
    ];
    let open = counts.iter().filter(|(count, _)| *count > 0);
    let words: Vec<String> = open.map(|(count, what)| format!("{count} {what}")).collect();
    if !words.is_empty() {
        log::warn!("a runtime was closed with {} left open", words.join(", "));
    }
}

fn census(core: &Arc<Core>) -> kvt_close_report_t {
    let mut left = kvt_close_report_t::zeroed();
    let same = |other: &Arc<Core>| u64::from(Arc::ptr_eq(core, other));
    QueueNoun::table().visit(|n| left.queues += same(n.0.core()));
    BufferNoun::table().visit(|n| left.buffers += same(&n.core));
    BudgetNoun::table().visit(|n| left.budgets += same(n.0.core()));
    AccountNoun::table().visit(|n| left.accounts += same(n.0.budget().core()));
    ops().visit(|op| left.ops += same(&op.core));
    StoreNoun::table().visit(|n| left.stores += same(&n.core));
    NamespaceNoun::table().visit(|n| left.namespaces += same(&n.0.core));
    SessionNoun::table().visit(|n| left.sessions += same(&n.ns.core));
    OffloadNoun::table().visit(|n| left.offloads += same(&n.session.ns.core));
    StreamNoun::table().visit(|n| left.streamers += same(&n.core));
    DeviceNoun::table().visit(|n| left.devices += same(&n.core));
    left
}

/// The runtime's clock: CLOCK_MONOTONIC nanoseconds, for deadlines.
///
/// @param runtime  The runtime.
/// @param out_ns   The time.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out_ns` is null or valid for writes.
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

/// Counters of a runtime; also of a poisoned one.
///
/// @param runtime  The runtime.
/// @param out      Filled in; start it with KVT_RUNTIME_STATS_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
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

/// A submitted operation. It completes exactly once and has two moments:
/// *resolved*, the result is known, and *released*, the library does not touch
/// your memory any more. Usually both come together; a deadline or a defect may
/// resolve an op earlier. Internally locked: any thread may use it.
pub struct kvt_op_t(());

/// Execution has begun (or was ended before it could).
pub const KVT_OP_ISSUED: u32 = 1;
/// The result is known.
pub const KVT_OP_RESOLVED: u32 = 2;
/// Your memory is yours again.
pub const KVT_OP_RELEASED: u32 = 4;
/// A cancel was asked for.
pub const KVT_OP_CANCEL: u32 = 8;

/// Each item becomes an op of its own; out_ops then receives one per item.
pub const KVT_SUBMIT_EACH: u64 = 1;

/// Work somebody waits for.
pub const KVT_PRIORITY_DEMAND: u32 = 0;
/// Work that will be wanted soon.
pub const KVT_PRIORITY_PREFETCH: u32 = 1;
/// Work that can wait.
pub const KVT_PRIORITY_BACKGROUND: u32 = 2;

const _: () = assert!(KVT_OP_ISSUED == ISSUED && KVT_OP_RESOLVED == RESOLVED);
const _: () = assert!(KVT_OP_RELEASED == RELEASED && KVT_OP_CANCEL == crate::base::op::CANCEL);

/// How to submit. Zero is the default everywhere.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_submit_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_SUBMIT_*.
    pub flags: u64,
    /// Where completions go; null = nowhere, the op handle must be kept.
    pub queue: *const kvt_queue_t,
    /// Your own word, handed back in the completion.
    pub tag: u64,
    /// CLOCK_MONOTONIC; the op resolves with KVT_E_TIMEOUT then. 0 = never.
    pub deadline_ns: u64,
    /// Moments (KVT_OP_ISSUED, _RESOLVED, _RELEASED) that get a completion each;
    /// moments that come together share one. 0 = KVT_OP_RELEASED.
    pub notify: u32,
    /// KVT_PRIORITY_*.
    pub priority: u32,
}

/// How far an op is.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_op_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The word given at submission.
    pub tag: u64,
    /// Bytes of the items that are done and OK.
    pub bytes_done: u64,
    /// KVT_OP_* bits.
    pub state: u32,
    /// The result; meaningful once KVT_OP_RESOLVED is set.
    pub status: kvt_status_t,
    /// Items in all.
    pub items: u32,
    /// Items that are done or were skipped.
    pub items_done: u32,
    /// Of those, the ones that are not OK.
    pub items_failed: u32,
    /// Always 0.
    pub reserved: u32,
    /// What the first item computed; of a move of a session how many tokens from
    /// the first on came, or were stored, without a gap.
    pub value: u64,
}

/// How one item of an op went.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_op_item_t {
    /// What it computed, such as a checksum; 0 where nothing was.
    pub value: u64,
    /// Its result; meaningful once done.
    pub status: kvt_status_t,
    /// 1 when it is done or was skipped.
    pub done: u32,
}

noun!(Op, kvt_op_t, 3, "op", ops());

/// Reads submit options; the second result says whether every item is an op.
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
        fail!(Invalid, "notify {:#x} has bits that are no moments", given.notify);
    }
    if given.priority as usize >= PRIORITIES {
        fail!(Invalid, "priority {} is none of 0 to {}", given.priority, PRIORITIES - 1);
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

/// Begins what is one op, and gives its handle.
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
        fail!(Invalid, "KVT_SUBMIT_EACH has no meaning here: there is one op");
    }
    if out_op.is_null() && opts.queue.is_none() {
        fail!(Invalid, "there is no queue, and out_op is null: nobody would hear of its end");
    }
    let op = begin(&opts)?;
    if !out_op.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { out_op.write(encode::<Op>(op.key())) };
    }
    Ok(())
}

/// How far an op is.
///
/// @param op   The op.
/// @param out  Filled in; start it with KVT_OP_INFO_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_op_info(op: *const kvt_op_t, out: *mut kvt_op_info_t) -> kvt_status_t {
    check_out(out)?;
    let op = inspect(op)?;
    let info = op.info();
    write(
        out,
        &kvt_op_info_t {
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
        },
    );
    Ok(())
}

/// Waits until an op has reached moments.
///
/// @param op           The op.
/// @param moments      KVT_OP_ISSUED, _RESOLVED, _RELEASED or several; all are
///                     waited for.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @return KVT_OK when they are reached, whatever the op's own result (see
///         kvt_op_info); KVT_E_TIMEOUT; KVT_E_REENTRANT inside a callback;
///         KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
#[capi]
pub extern "C" fn kvt_op_wait(op: *const kvt_op_t, moments: u32, deadline_ns: u64) -> kvt_status_t {
    if moments == 0 || moments & !EVENTS != 0 {
        fail!(Invalid, "moments {moments:#x} are not moments of an op");
    }
    refuse_reentry()?;
    let op = inspect(op)?;
    op.wait(moments, deadline_ns)
}

/// Asks an op to end. One that has not been issued ends at once with
/// KVT_E_CANCELLED; one that runs skips the items it has not begun. An op that
/// is done stays as it is.
///
/// @param op  The op.
/// @return KVT_OK, also when it is too late; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
#[capi]
pub extern "C" fn kvt_op_cancel(op: *const kvt_op_t) -> kvt_status_t {
    let op = inspect(op)?;
    op.cancel();
    Ok(())
}

/// How the items of an op went; also while it runs.
///
/// @param op            The op.
/// @param first         The first item wanted.
/// @param out           Receives the entries.
/// @param capacity      Room at `out`, in entries, at most 65536.
/// @param stride_bytes  sizeof(kvt_op_item_t).
/// @param out_count     How many were written.
/// @return KVT_OK; KVT_E_INVALID when `first` is beyond the last item;
///         KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is valid for `capacity` * `stride_bytes`, `out_count` for a write.
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
        fail!(Invalid, "item {first} of an op with {}", op.items().len());
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

/// The words behind an op's failure.
///
/// @param op   The op.
/// @param out  The error; free it with kvt_error_free.
/// @return KVT_OK; KVT_E_NOT_FOUND when there is nothing to say beyond the
///         status; KVT_E_STATE before it is resolved; KVT_E_HANDLE,
///         KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for writes.
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

/// Frees an op handle. The op must have been released: cancel and wait first
/// to get there.
///
/// @param op  Pointer to the handle, cleared on success; null, or a null handle,
///            is fine.
/// @return KVT_OK; KVT_E_BUSY before the release; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `op` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_op_free(op: *mut *mut kvt_op_t) -> kvt_status_t {
    free_op(op)
}

/// Frees many op handles; stops at the first that cannot be freed.
///
/// @param ops    The handles, each cleared when freed; null handles are skipped.
/// @param count  How many.
/// @return KVT_OK; KVT_E_BUSY, KVT_E_HANDLE for the first handle that is not
///         null afterwards; KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `ops` is null with a count of 0, or valid for reads and writes of `count` handles.
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

/// Where completions arrive: polled (with an eventfd on request) or called back
/// on the notifier thread, never both. It never drops one: submitting fails
/// with KVT_E_AGAIN while it is full. Internally locked: any thread may use it,
/// several may drain it.
pub struct kvt_queue_t(());

/// One thing that happened to an op.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_completion_t {
    /// The op, still to be freed by you; null when it was submitted without a
    /// handle (out_ops null).
    pub op: *mut kvt_op_t,
    /// The word given at submission.
    pub tag: u64,
    /// Bytes of the items that are done and OK.
    pub bytes_done: u64,
    /// What the first item computed, such as a checksum; of a move of a session
    /// how many tokens from the first on came, or were stored, without a gap.
    pub value: u64,
    /// The op's result; KVT_OK for a KVT_OP_ISSUED alone.
    pub status: kvt_status_t,
    /// KVT_OP_ISSUED, _RESOLVED, _RELEASED: the moments this entry tells of.
    pub events: u32,
    /// Items that are not OK.
    pub items_failed: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Receives completions on the notifier thread, never from two threads at once
/// for one queue. `batch` is borrowed for the call; its entries lie
/// `stride_bytes` apart. It must not unwind, and must not wait for work of the
/// same runtime: kvt_op_wait, kvt_queue_close and kvt_runtime_close give
/// KVT_E_REENTRANT in here. Submitting and freeing ops is fine.
pub type kvt_completion_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        batch: *const kvt_completion_t,
        count: u64,
        stride_bytes: u64,
    ),
>;

/// How to open a queue. Zero is the default everywhere.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_queue_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// None are defined yet: 0.
    pub flags: u64,
    /// Completions that can be outstanding or waiting, at most 1048576; 0 = 4096.
    pub capacity: u64,
    /// Called back with completions; null = the queue is polled.
    pub callback: kvt_completion_fn,
    /// Handed to the callback; taken over on success only.
    pub user_data: *mut c_void,
    /// Releases user_data; may be null.
    pub destroy: kvt_destroy_fn,
}

/// Counters of a queue.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_queue_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Places in all.
    pub capacity: u64,
    /// Completions waiting to be drained.
    pub pending: u64,
    /// Places kept for ops that have not completed.
    pub reserved: u64,
    /// Most places ever taken.
    pub peak: u64,
    /// Completions posted so far.
    pub posted: u64,
    /// Submissions refused because it was full.
    pub refused: u64,
}

pub(crate) struct QueueNoun(pub(crate) Arc<Queue>);

noun!(QueueNoun, kvt_queue_t, 4, "queue");

fn outward(entry: &Completion) -> kvt_completion_t {
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
            *slot = outward(entry);
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
/// @param runtime  Where it belongs.
/// @param opts     How; null for defaults.
/// @param out      The queue; close it with kvt_queue_close.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the queue. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
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

/// Closes a queue: refuses new work, cancels the ops that report to it and
/// waits for their release. A callback has then seen every completion;
/// completions nobody polled are dropped, their ops stay until freed.
///
/// @param queue        Pointer to the handle, cleared on success; null, or a null
///                     handle, is fine.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY at the deadline (the queue stays closing and valid:
///         call again); KVT_E_REENTRANT inside a callback; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_queue_close(
    queue: *mut *mut kvt_queue_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    free(queue, |noun| noun.0.close(deadline_ns))
}

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
        entries.put(i, &outward(&entry));
        i += 1;
    };
    let n = fetch(&queue.0, entries.len(), &mut put)?;
    // SAFETY: not null, and the caller's promise.
    unsafe { out_count.write(n as u64) };
    Ok(())
}

/// Takes completions without waiting; none is not an error.
///
/// @param queue         A polled queue.
/// @param out           Receives completions, oldest first.
/// @param capacity      Room at `out`, in entries, at most 1048576.
/// @param stride_bytes  sizeof(kvt_completion_t).
/// @param out_count     How many were written.
/// @return KVT_OK; KVT_E_STATE for a queue that calls back; KVT_E_INVALID,
///         KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, several at once. Since 0.1.
///
/// # Safety
/// `out` is valid for `capacity` * `stride_bytes`, `out_count` for a write.
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

/// Takes completions, waiting for the first.
///
/// @param queue         A polled queue.
/// @param deadline_ns   CLOCK_MONOTONIC; 0 = wait for ever.
/// @param out           Receives completions, oldest first.
/// @param capacity      Room at `out`, in entries, 1 to 1048576.
/// @param stride_bytes  sizeof(kvt_completion_t).
/// @param out_count     How many were written, at least 1.
/// @return KVT_OK; KVT_E_TIMEOUT; KVT_E_CLOSED when the queue closes and nothing
///         is left; KVT_E_STATE for a queue that calls back; KVT_E_REENTRANT inside
///         a callback; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, several at once. Since 0.1.
///
/// # Safety
/// `out` is valid for `capacity` * `stride_bytes`, `out_count` for a write.
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
            crate::fail!(Invalid, "waiting for completions without room for one");
        }
        q.wait(n, deadline_ns, put)
    };
    drain(queue, out, capacity, stride_bytes, out_count, fetch)
}

/// A descriptor for poll, select and epoll: readable exactly while completions
/// are waiting. Do not read, write or close it: draining the queue resets it,
/// closing the queue closes it.
///
/// @param queue   A polled queue.
/// @param out_fd  The descriptor (an eventfd, close-on-exec, non-blocking).
/// @return KVT_OK; KVT_E_STATE for a queue that calls back; KVT_E_IO,
///         KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out_fd` is null or valid for writes.
#[capi]
pub unsafe extern "C" fn kvt_queue_fd(queue: *const kvt_queue_t, out_fd: *mut i32) -> kvt_status_t {
    require(out_fd)?;
    let queue = inspect(queue)?;
    let fd = queue.0.eventfd()?;
    out_fd.write(fd);
    Ok(())
}

/// Counters of a queue.
///
/// @param queue  The queue.
/// @param out    Filled in; start it with KVT_QUEUE_STATS_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
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
