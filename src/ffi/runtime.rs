//! The runtime and the machine's checks behind it.

use std::ffi::{c_char, c_void};

use crate::base::callback::Foreign;
use crate::base::core::Core;
use crate::base::fault::Faults;
use crate::base::op::ops;
use crate::base::runtime::{OnThread, Role, Runtime, RuntimeOpts};
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::ffi::abi::{
    Noun, Plain, capi, check_optional_out, check_out, enter, foreign, free, insert, inspect,
    known_flags, noun, read, require, text, write,
};
use crate::ffi::account::AccountNoun;
use crate::ffi::budget::BudgetNoun;
use crate::ffi::buffer::BufferNoun;
use crate::ffi::device::DeviceNoun;
use crate::ffi::error::kvt_error_t;
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::namespace::NamespaceNoun;
use crate::ffi::offload::OffloadNoun;
use crate::ffi::queue::QueueNoun;
use crate::ffi::session::SessionNoun;
use crate::ffi::status::kvt_status_t;
use crate::ffi::store::StoreNoun;
use crate::ffi::stream::StreamNoun;

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
    pub ops_refused: u64,
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
            ops_refused: stats.refused,
            workers: stats.workers,
            poisoned: u32::from(stats.poisoned || runtime.is_poisoned()),
        },
    );
    Ok(())
}
