/// @file
/// Runtimes, operations and completion queues: how work is submitted and how its end is learnt.
///
/// A runtime owns worker threads and a table of ops. kvt_open makes one; engines that want several
/// stores on the same threads open it themselves. Each submission returns an op at once. An op is
/// issued, then resolved (its result is known), then released (the caller's memory is free). The
/// caller waits for an op, or takes completions from a queue, and frees the op when it is released.
///
/// Life cycle: kvt_runtime_open, kvt_queue_open, submissions, kvt_queue_wait, kvt_op_free,
/// kvt_queue_close, kvt_runtime_close. Closing a runtime cancels its open ops and waits for them.
///
///     kvt_completion_t done[64];
///     uint64_t count = 0;
///     if (kvt_queue_open(runtime, NULL, &queue, &err) != KVT_OK) return fail(err);
///     kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
///     opts.queue = queue, opts.tag = 7; /* 7 comes back with the completion */
///     if (kvt_session_put(session, &transfer, &opts, &op, &err) != KVT_OK) return fail(err);
///     compute_next_layer();
///     if (kvt_queue_wait(queue, 0, done, 64, sizeof done[0], &count) != KVT_OK) return fail(NULL);
///     for (uint64_t i = 0; i < count; i++)
///         if (done[i].status != KVT_OK) kvt_op_error(done[i].op, &err);
///     return kvt_op_free(&op) == KVT_OK ? 0 : fail(err);
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_RUNTIME_H
#define KVTIER_RUNTIME_H

#include <kvtier/base.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_queue_t;

/* ---- Runtimes -------------------------------------------------------------------------------- */

/// The root object: worker threads, clock and notifier thread. Stores, streamers, devices, queues,
/// budgets and buffers are opened on it.
typedef struct kvt_runtime_t kvt_runtime_t;

/// Roles of threads: workers execute ops, the notifier calls callbacks and watches deadlines, the
/// others belong to a store or a streamer.
typedef uint32_t kvt_thread_role_t;
enum {
    KVT_THREAD_WORKER = 0,
    KVT_THREAD_NOTIFIER = 1,
    KVT_THREAD_STORE = 2,
    KVT_THREAD_STREAMER = 3,
};

/// Called first in every thread of the runtime and of its stores and streamers, so that the host
/// can name the thread, or set its affinity or priority. `role` is KVT_THREAD_*; more may be added.
/// `index` counts from 0 within the role, and within each store or streamer. May be called from
/// several threads at once. It must not unwind and must not call the library.
typedef void (*kvt_thread_fn)(void *user_data, kvt_thread_role_t role, uint32_t index);

/// Options of a runtime.
typedef struct kvt_runtime_opts_t {
    uint64_t struct_size;
    /// 0: no flags are defined.
    uint64_t flags;
    /// Worker threads, at most 256; 0 = the number of cores, at most 4.
    uint32_t workers;
    /// Most ops that are not freed, at most 524288; 0 = 65536.
    uint32_t max_ops;
    /// Prefix of thread names, at most 10 bytes; null = "kvt".
    const char *name;
    uint64_t name_bytes;
    /// Faults to inject, for tests of error paths, such as "faults(pin=at(fail=1))"; null = none.
    /// See "Injected faults" in docs/reference/c.md.
    const char *faults;
    uint64_t faults_bytes;
    /// Called first in every thread; null = none.
    kvt_thread_fn on_thread;
    /// Passed to on_thread, and to destroy at the end; taken over only on success.
    void *user_data;
    /// May be null.
    kvt_destroy_fn destroy;
} kvt_runtime_opts_t;
#define KVT_RUNTIME_OPTS_INIT KVT_INIT_(kvt_runtime_opts_t)

/// Counters of a runtime.
typedef struct kvt_runtime_stats_t {
    uint64_t struct_size;
    /// Ops submitted so far.
    uint64_t ops_submitted;
    /// Ops that are not released. May briefly count ops whose completion was already delivered.
    uint64_t ops_open;
    /// Ops that are not freed. May briefly count ops that were freed.
    uint64_t ops_live;
    /// Ops that wait for a worker; a large one counts once for each worker that may share it.
    uint64_t ops_queued;
    /// Submissions that failed because max_ops ops were not freed.
    uint64_t ops_rejected;
    uint32_t workers;
    /// 1 = a defect inside the library was caught: close the runtime.
    uint32_t poisoned;
} kvt_runtime_stats_t;
#define KVT_RUNTIME_STATS_INIT KVT_INIT_(kvt_runtime_stats_t)

/// Numbers of objects that were open when a runtime was closed. None is destroyed: they stay valid
/// as far as they work without a runtime, and are closed or freed as usual. Threads of stores sleep
/// until the store is closed; those of streamers have ended, and their calls return KVT_E_CLOSED.
typedef struct kvt_close_report_t {
    uint64_t struct_size;
    uint64_t queues;
    uint64_t buffers;
    uint64_t budgets;
    uint64_t accounts;
    uint64_t ops;
    uint64_t stores;
    uint64_t namespaces;
    uint64_t sessions;
    uint64_t offloads;
    uint64_t streamers;
    uint64_t devices;
} kvt_close_report_t;
#define KVT_CLOSE_REPORT_INIT KVT_INIT_(kvt_close_report_t)

/// Opens a runtime and starts its threads.
///
/// @return KVT_E_LIMIT, KVT_E_SPEC (in `faults`), KVT_E_IO.
kvt_status_t kvt_runtime_open(const kvt_runtime_opts_t *opts, kvt_runtime_t **out,
                              kvt_error_t **err);

/// Closes a runtime: refuses new work, cancels open ops, and waits for them and for the threads.
/// Objects that are still open are reported, not destroyed. A store among them keeps its directory
/// and its memory; its transfers have ended and its calls return KVT_E_CLOSED, but kvt_store_close
/// still writes back what is not on disk.
///
/// @param report  May be null.
/// @return KVT_E_BUSY (at the deadline; the runtime stays closing: call again).
///
/// Threading: not inside callbacks.
kvt_status_t kvt_runtime_close(kvt_runtime_t **runtime, uint64_t deadline_ns,
                               kvt_close_report_t *report, kvt_error_t **err);

/// Reads the runtime's clock: CLOCK_MONOTONIC nanoseconds, for deadlines.
kvt_status_t kvt_runtime_now(const kvt_runtime_t *runtime, uint64_t *out_ns);

/// Reads the counters of a runtime, also of a poisoned one.
kvt_status_t kvt_runtime_stats(const kvt_runtime_t *runtime, kvt_runtime_stats_t *out);

/* ---- Operations ------------------------------------------------------------------------------ */

/// A submitted operation; completes exactly once. It is *resolved* when its result is known, and
/// *released* when the library no longer touches the caller's memory. Both usually come together; a
/// deadline or a defect may resolve an op earlier.
typedef struct kvt_op_t kvt_op_t;

/// Moments of an op: one or more bits.
typedef uint32_t kvt_op_moments_t;
enum {
    /// Execution has begun, or the op ended before it could begin.
    KVT_OP_ISSUED = 1,
    /// The result is known.
    KVT_OP_RESOLVED = 2,
    /// The library no longer touches the caller's memory.
    KVT_OP_RELEASED = 4,
    /// A cancel was requested.
    KVT_OP_CANCEL = 8,
};

/// Flags of a submission.
typedef uint64_t kvt_submit_flags_t;
enum {
    /// Make each item an op of its own: out_ops receives one op for each item.
    KVT_SUBMIT_EACH = 1,
};

/// Priorities: a caller waits for the work, the work is needed soon, the work can wait. Lower
/// priorities get a turn from time to time while higher ones have work.
typedef uint32_t kvt_priority_t;
enum {
    KVT_PRIORITY_DEMAND = 0,
    KVT_PRIORITY_PREFETCH = 1,
    KVT_PRIORITY_BACKGROUND = 2,
};

/// Options of a submission.
typedef struct kvt_submit_opts_t {
    uint64_t struct_size;
    kvt_submit_flags_t flags;
    /// Receives the completions; null = none, and the call must return a handle.
    const struct kvt_queue_t *queue;
    /// The caller's value, returned in completions.
    uint64_t tag;
    /// The op resolves with KVT_E_TIMEOUT at this time; 0 = never.
    uint64_t deadline_ns;
    /// KVT_OP_ISSUED, _RESOLVED, _RELEASED: moments that post a completion. Moments that come
    /// together share one. 0 = KVT_OP_RELEASED.
    uint32_t notify;
    kvt_priority_t priority;
} kvt_submit_opts_t;
#define KVT_SUBMIT_OPTS_INIT KVT_INIT_(kvt_submit_opts_t)

/// Progress and result of an op.
typedef struct kvt_op_info_t {
    uint64_t struct_size;
    uint64_t tag;
    /// Bytes of the items that ended with KVT_OK.
    uint64_t bytes_done;
    kvt_op_moments_t state;
    /// Result; valid once KVT_OP_RESOLVED is set.
    kvt_status_t status;
    uint32_t items;
    /// Items that were executed or skipped.
    uint32_t items_done;
    /// Items of those whose status is not KVT_OK.
    uint32_t items_failed;
    uint32_t reserved;
    /// Value of the first item, such as a checksum. For a transfer of a session: the tokens that
    /// were loaded or stored from its first token on, without a gap.
    uint64_t value;
} kvt_op_info_t;
#define KVT_OP_INFO_INIT KVT_INIT_(kvt_op_info_t)

/// Result of one item of an op.
typedef struct kvt_op_item_t {
    /// Computed value, such as a checksum; 0 = none.
    uint64_t value;
    /// Valid once `done` is 1.
    kvt_status_t status;
    /// 1 = executed or skipped.
    uint32_t done;
} kvt_op_item_t;

/// Reads the progress and the result of an op.
kvt_status_t kvt_op_info(const kvt_op_t *op, kvt_op_info_t *out);

/// Waits until an op is released, reads its result, and frees it: kvt_op_wait, kvt_op_info,
/// kvt_op_error and kvt_op_free in one call.
///
/// @param op   Cleared, unless the op is still running at the deadline.
/// @param out  Receives the result of the op, also of a failed one; may be null.
/// @return The status of the op, whose message `err` receives; KVT_E_TIMEOUT also at the deadline.
///
/// Threading: not inside callbacks.
kvt_status_t kvt_op_finish(kvt_op_t **op, uint64_t deadline_ns, kvt_op_info_t *out,
                           kvt_error_t **err);

/// Waits until an op has reached all of the given moments. Succeeds whatever the result of the op
/// is.
///
/// @param moments  KVT_OP_ISSUED, _RESOLVED and _RELEASED bits, at least one.
/// @return KVT_E_TIMEOUT.
///
/// Threading: not inside callbacks.
kvt_status_t kvt_op_wait(const kvt_op_t *op, kvt_op_moments_t moments, uint64_t deadline_ns);

/// Requests the end of an op, and does not wait for it. An op that has not begun ends at once with
/// KVT_E_CANCELLED. A running op skips the items that have not begun. An op that has ended does not
/// change.
kvt_status_t kvt_op_cancel(const kvt_op_t *op);

/// Reads the results of the items of an op, also while it runs.
///
/// @param first      First item to read, at most the number of items.
/// @param capacity   At most 65536.
/// @param out_count  Number of entries written.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_op_items(const kvt_op_t *op, uint64_t first, kvt_op_item_t *out, uint64_t capacity,
                          uint64_t stride_bytes, uint64_t *out_count);

/// Returns the error object of a failed op.
///
/// @return KVT_E_NOT_FOUND (no details are recorded), KVT_E_STATE (the op is not resolved).
kvt_status_t kvt_op_error(const kvt_op_t *op, kvt_error_t **out);

/// Frees the handle of a released op. Before, cancel the op and wait for KVT_OP_RELEASED.
///
/// @return KVT_E_BUSY (the op is not released).
kvt_status_t kvt_op_free(kvt_op_t **op);

/// Frees several op handles and clears each. Skips null handles. Stops at the first failure, which
/// is then the first handle that is not null.
///
/// @return KVT_E_BUSY (the op is not released).
kvt_status_t kvt_op_free_many(kvt_op_t **ops, uint64_t count);

/* ---- Completion queues ----------------------------------------------------------------------- */

/// A bounded queue of completions. It is polled, or it calls back on the notifier thread, never
/// both. It loses no completion: submissions fail with KVT_E_AGAIN while it is full. Several
/// threads may drain it.
typedef struct kvt_queue_t kvt_queue_t;

/// One entry of a queue: moments that an op has reached.
typedef struct kvt_completion_t {
    /// Still to be freed by the caller; null if the op was submitted without a handle.
    kvt_op_t *op;
    uint64_t tag;
    /// See kvt_op_info_t.
    uint64_t bytes_done;
    /// See kvt_op_info_t.
    uint64_t value;
    /// Result of the op; KVT_OK while it is not resolved.
    kvt_status_t status;
    /// KVT_OP_ISSUED, _RESOLVED, _RELEASED: the moments of this entry.
    uint32_t events;
    /// Items whose status is not KVT_OK.
    uint32_t items_failed;
    uint32_t reserved;
} kvt_completion_t;

/// Receives completions on the notifier thread, one call at a time for each queue. `batch` is
/// borrowed for the call; its entries are `stride_bytes` apart. The function may submit and free
/// ops. It must not unwind, and must not wait for work of the same runtime.
typedef void (*kvt_completion_fn)(void *user_data, const kvt_completion_t *batch, uint64_t count,
                                  uint64_t stride_bytes);

/// Options of a queue.
typedef struct kvt_queue_opts_t {
    uint64_t struct_size;
    /// 0: no flags are defined.
    uint64_t flags;
    /// Entries, at most 1048576; 0 = 4096. Each op reserves one for its release and one for each
    /// other moment in `notify`. An entry is free again when it is drained or not needed.
    uint64_t capacity;
    /// Receives the completions; null = the queue is polled.
    kvt_completion_fn callback;
    /// Passed to callback, and to destroy at the end; taken over only on success.
    void *user_data;
    /// May be null.
    kvt_destroy_fn destroy;
} kvt_queue_opts_t;
#define KVT_QUEUE_OPTS_INIT KVT_INIT_(kvt_queue_opts_t)

/// Counters of a queue.
typedef struct kvt_queue_stats_t {
    uint64_t struct_size;
    uint64_t capacity;
    /// Entries that wait to be drained.
    uint64_t pending;
    /// Entries reserved by ops that are not released, or in use by the callback.
    uint64_t reserved;
    /// Most entries ever pending and reserved together.
    uint64_t peak;
    /// Completions posted so far.
    uint64_t posted;
    /// Submissions that failed because the queue was full.
    uint64_t refused;
} kvt_queue_stats_t;
#define KVT_QUEUE_STATS_INIT KVT_INIT_(kvt_queue_stats_t)

/// Opens a completion queue.
///
/// @return KVT_E_LIMIT.
kvt_status_t kvt_queue_open(const kvt_runtime_t *runtime, const kvt_queue_opts_t *opts,
                            kvt_queue_t **out, kvt_error_t **err);

/// Closes a queue: refuses new work, cancels the ops that report to it, and waits for their
/// release. A callback has then received every completion. Completions that were not polled are
/// dropped; their ops stay valid until they are freed.
///
/// @return KVT_E_BUSY (at the deadline; the queue stays closing: call again).
///
/// Threading: not inside callbacks.
kvt_status_t kvt_queue_close(kvt_queue_t **queue, uint64_t deadline_ns, kvt_error_t **err);

/// Takes completions from a polled queue without waiting, oldest first.
///
/// @param capacity   At most 1048576.
/// @param out_count  Number of completions written; 0 if none is pending.
/// @return KVT_E_STATE (the queue calls back), KVT_E_LIMIT.
kvt_status_t kvt_queue_poll(const kvt_queue_t *queue, kvt_completion_t *out, uint64_t capacity,
                            uint64_t stride_bytes, uint64_t *out_count);

/// Takes completions from a polled queue, oldest first, and waits for the first one. Returns
/// KVT_E_CLOSED once the queue closes and no more completions will come.
///
/// @param capacity   1 to 1048576.
/// @param out_count  Number of completions written, at least 1.
/// @return KVT_E_TIMEOUT, KVT_E_STATE (the queue calls back), KVT_E_LIMIT.
///
/// Threading: not inside callbacks.
kvt_status_t kvt_queue_wait(const kvt_queue_t *queue, uint64_t deadline_ns, kvt_completion_t *out,
                            uint64_t capacity, uint64_t stride_bytes, uint64_t *out_count);

/// Returns an eventfd (close-on-exec, non-blocking) for poll, select and epoll. It is readable
/// exactly while completions are pending. Do not read, write or close it: draining the queue resets
/// it, closing the queue closes it.
///
/// @return KVT_E_STATE (the queue calls back), KVT_E_IO.
kvt_status_t kvt_queue_fd(const kvt_queue_t *queue, int32_t *out_fd);

/// Reads the counters of a queue.
kvt_status_t kvt_queue_stats(const kvt_queue_t *queue, kvt_queue_stats_t *out);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_RUNTIME_H */
