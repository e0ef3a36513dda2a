//! Completion queues.

use std::ffi::c_void;

use crate::base::callback::Foreign;
use crate::base::op::Op;
use crate::base::queue::{BATCH, Completion, MAX_CAPACITY, Queue, Sink};
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::ffi::abi::{
    Plain, Strided, capi, check_out, encode_bits, foreign, free, insert, inspect, known_flags,
    noun, read, require, write,
};
use crate::ffi::error::kvt_error_t;
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::op::kvt_op_t;
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::ffi::status::kvt_status_t;

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
    /// handle (ops_out null).
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
