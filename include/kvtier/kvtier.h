/*
 * kvtier: tiered KV-cache storage, weight streaming, eviction and sparse policies for LLM engines.
 *
 * Rules of every function and struct, said once (docs/abi.md explains them):
 *
 * Status     A function that can fail returns kvt_status_t: 0 is success, negative is an error. On failure
 *            no output is written, except counts and sizes with KVT_E_TOO_SMALL. Any function may return
 *            KVT_E_INVALID (an argument outside its range), KVT_E_HANDLE (stale, foreign or null),
 *            KVT_E_CLOSED, KVT_E_FORKED, KVT_E_NOMEM, KVT_E_TOO_NEW (a struct has a field that this library
 *            does not know), KVT_E_REENTRANT and KVT_E_PANIC. @return names only the other codes.
 * err        Receives an error object that explains a failure; free it with kvt_error_free. May be null.
 * Pointers   Must not be null, unless the comment says so. Null options mean the defaults.
 * Structs    Start with KVT_..._INIT, which sets struct_size. Zero is the default of every field; reserved
 *            fields are 0. A struct without struct_size stands in arrays; pass its sizeof as stride_bytes.
 * Arrays     An output array has `capacity` entries (or `out_capacity` bytes). The call writes the number
 *            of entries to its count, also with KVT_E_TOO_SMALL. A null array with capacity 0 asks for it,
 *            where the number is known before the call.
 * Handles    Are never followed: a stale one is an error. Objects that a call returns belong to the caller;
 *            the close or free takes a pointer to the handle, clears it, and accepts null. Structs and
 *            arrays are copied during the call, unless the comment says that they are borrowed.
 * Threads    Any thread may call any function, also inside a callback. A call that would wait for its own
 *            callback returns KVT_E_REENTRANT. Only what differs from this is said ("Threading: ...").
 * Time       Deadlines are CLOCK_MONOTONIC nanoseconds, 0 = none. Durations end in _ns, sizes in _bytes.
 * Texts      UTF-8 with a length in bytes, or KVT_NUL_TERMINATED as the length. Output has no NUL at its end.
 *
 * Generated from src/ffi by cbindgen and committed; a test compares. Do not edit.
 */

#ifndef KVTIER_H
#define KVTIER_H

#include <stdint.h>

#ifdef __cplusplus
/* C++ has no designated initialisers before C++20. */
template <typename T> inline T kvt_sized_() {
    T value = T();
    value.struct_size = sizeof(T);
    return value;
}
#define KVT_INIT_(T) (kvt_sized_<T>())
#else
#define KVT_INIT_(T) { .struct_size = sizeof(T) }
#endif

/* Initialisers: kvt_runtime_opts_t opts = KVT_RUNTIME_OPTS_INIT; */
#define KVT_ACCOUNT_OPTS_INIT KVT_INIT_(kvt_account_opts_t)
#define KVT_ATTENTION_INIT KVT_INIT_(kvt_attention_t)
#define KVT_BUDGET_OPTS_INIT KVT_INIT_(kvt_budget_opts_t)
#define KVT_BUDGET_REPORT_INIT KVT_INIT_(kvt_budget_report_t)
#define KVT_BUFFER_INFO_INIT KVT_INIT_(kvt_buffer_info_t)
#define KVT_BUFFER_OPTS_INIT KVT_INIT_(kvt_buffer_opts_t)
#define KVT_CLEAR_REPORT_INIT KVT_INIT_(kvt_clear_report_t)
#define KVT_CLOSE_REPORT_INIT KVT_INIT_(kvt_close_report_t)
#define KVT_CONFORMANCE_REPORT_INIT KVT_INIT_(kvt_conformance_report_t)
#define KVT_CONFORMANCE_OPTS_INIT KVT_INIT_(kvt_conformance_opts_t)
#define KVT_DEMOTE_REPORT_INIT KVT_INIT_(kvt_demote_report_t)
#define KVT_DEVICE_CUSTOM_INIT KVT_INIT_(kvt_device_custom_t)
#define KVT_DEVICE_INFO_INIT KVT_INIT_(kvt_device_info_t)
#define KVT_DEVICE_MEMORY_INIT KVT_INIT_(kvt_device_memory_t)
#define KVT_DEVICE_OPTS_INIT KVT_INIT_(kvt_device_opts_t)
#define KVT_ERROR_INFO_INIT KVT_INIT_(kvt_error_info_t)
#define KVT_FEATURE_INIT KVT_INIT_(kvt_feature_t)
#define KVT_FORECAST_INIT KVT_INIT_(kvt_forecast_t)
#define KVT_UNIT_LEASE_INIT KVT_INIT_(kvt_unit_lease_t)
#define KVT_IDENTITY_INIT KVT_INIT_(kvt_identity_t)
#define KVT_INDEX_INIT KVT_INIT_(kvt_index_t)
#define KVT_ATTENTION_JOB_INFO_INIT KVT_INIT_(kvt_attention_job_info_t)
#define KVT_TOKEN_LISTS_INIT KVT_INIT_(kvt_token_lists_t)
#define KVT_KERNEL_LIMITS_INIT KVT_INIT_(kvt_kernel_limits_t)
#define KVT_LAYOUT_INIT KVT_INIT_(kvt_layout_t)
#define KVT_LOOKUP_INIT KVT_INIT_(kvt_lookup_t)
#define KVT_MODEL_FILE_INIT KVT_INIT_(kvt_model_file_t)
#define KVT_MODEL_INFO_INIT KVT_INIT_(kvt_model_info_t)
#define KVT_MODEL_TABLE_INIT KVT_INIT_(kvt_model_table_t)
#define KVT_TRANSFER_INIT KVT_INIT_(kvt_transfer_t)
#define KVT_BLOCK_NAMES_INIT KVT_INIT_(kvt_block_names_t)
#define KVT_BLOCKS_INIT KVT_INIT_(kvt_blocks_t)
#define KVT_OFFLOAD_KV_INIT KVT_INIT_(kvt_offload_kv_t)
#define KVT_OFFLOAD_OPTS_INIT KVT_INIT_(kvt_offload_opts_t)
#define KVT_OFFLOAD_STATS_INIT KVT_INIT_(kvt_offload_stats_t)
#define KVT_OP_INFO_INIT KVT_INIT_(kvt_op_info_t)
#define KVT_BLOCK_PLACEMENT_INIT KVT_INIT_(kvt_block_placement_t)
#define KVT_PLAN_INIT KVT_INIT_(kvt_plan_t)
#define KVT_PLAN_TERMS_INIT KVT_INIT_(kvt_plan_terms_t)
#define KVT_POLICY_ADVICE_INIT KVT_INIT_(kvt_policy_advice_t)
#define KVT_POLICY_COLUMNS_INIT KVT_INIT_(kvt_policy_columns_t)
#define KVT_POLICY_CUSTOM_INIT KVT_INIT_(kvt_policy_custom_t)
#define KVT_POLICY_HINT_INIT KVT_INIT_(kvt_policy_hint_t)
#define KVT_POLICY_INFO_INIT KVT_INIT_(kvt_policy_info_t)
#define KVT_POLICY_OPTS_INIT KVT_INIT_(kvt_policy_opts_t)
#define KVT_POLICY_OUTCOME_INIT KVT_INIT_(kvt_policy_outcome_t)
#define KVT_POLICY_PREDICTOR_INIT KVT_INIT_(kvt_policy_predictor_t)
#define KVT_POLICY_ADVICE_RULES_INIT KVT_INIT_(kvt_policy_advice_rules_t)
#define KVT_POLICY_SELECTION_INIT KVT_INIT_(kvt_policy_selection_t)
#define KVT_POLICY_STATS_INIT KVT_INIT_(kvt_policy_stats_t)
#define KVT_POLICY_CONTEXT_INIT KVT_INIT_(kvt_policy_context_t)
#define KVT_PREFILL_COST_INIT KVT_INIT_(kvt_prefill_cost_t)
#define KVT_ATTENTION_ARGS_INIT KVT_INIT_(kvt_attention_args_t)
#define KVT_QUEUE_OPTS_INIT KVT_INIT_(kvt_queue_opts_t)
#define KVT_QUEUE_STATS_INIT KVT_INIT_(kvt_queue_stats_t)
#define KVT_REMOTE_CUSTOM_INIT KVT_INIT_(kvt_remote_custom_t)
#define KVT_REMOTE_STATS_INIT KVT_INIT_(kvt_remote_stats_t)
#define KVT_REPLAY_OPTS_INIT KVT_INIT_(kvt_replay_opts_t)
#define KVT_REPLAY_REPORT_INIT KVT_INIT_(kvt_replay_report_t)
#define KVT_ROWS_INIT KVT_INIT_(kvt_rows_t)
#define KVT_RUNTIME_OPTS_INIT KVT_INIT_(kvt_runtime_opts_t)
#define KVT_RUNTIME_STATS_INIT KVT_INIT_(kvt_runtime_stats_t)
#define KVT_SEQUENCE_INIT KVT_INIT_(kvt_sequence_t)
#define KVT_SESSION_INFO_INIT KVT_INIT_(kvt_session_info_t)
#define KVT_SESSION_OPTS_INIT KVT_INIT_(kvt_session_opts_t)
#define KVT_SPARSE_CONTEXT_INIT KVT_INIT_(kvt_sparse_context_t)
#define KVT_SPARSE_CUSTOM_INIT KVT_INIT_(kvt_sparse_custom_t)
#define KVT_SPARSE_INFO_INIT KVT_INIT_(kvt_sparse_info_t)
#define KVT_SPARSE_OPTS_INIT KVT_INIT_(kvt_sparse_opts_t)
#define KVT_SPARSE_STATS_INIT KVT_INIT_(kvt_sparse_stats_t)
#define KVT_SPARSE_TRAITS_INIT KVT_INIT_(kvt_sparse_traits_t)
#define KVT_STORE_OPTS_INIT KVT_INIT_(kvt_store_opts_t)
#define KVT_STORE_STATS_INIT KVT_INIT_(kvt_store_stats_t)
#define KVT_STREAM_MEMORY_INIT KVT_INIT_(kvt_stream_memory_t)
#define KVT_STREAM_OPTS_INIT KVT_INIT_(kvt_stream_opts_t)
#define KVT_STREAM_PLAN_INIT KVT_INIT_(kvt_stream_plan_t)
#define KVT_STREAM_PROGRESS_INIT KVT_INIT_(kvt_stream_progress_t)
#define KVT_STREAM_LIMITS_INIT KVT_INIT_(kvt_stream_limits_t)
#define KVT_STREAM_STATS_INIT KVT_INIT_(kvt_stream_stats_t)
#define KVT_STREAM_TERMS_INIT KVT_INIT_(kvt_stream_terms_t)
#define KVT_SUBMIT_OPTS_INIT KVT_INIT_(kvt_submit_opts_t)
#define KVT_TENSOR_INIT KVT_INIT_(kvt_tensor_t)
#define KVT_RESIDENT_TOKENS_INIT KVT_INIT_(kvt_resident_tokens_t)
#define KVT_TIER_REPORT_INIT KVT_INIT_(kvt_tier_report_t)
#define KVT_TRACE_INFO_INIT KVT_INIT_(kvt_trace_info_t)
#define KVT_TRACE_OPTS_INIT KVT_INIT_(kvt_trace_opts_t)
#define KVT_UNIT_INIT KVT_INIT_(kvt_unit_t)


/// Length of a text that ends with a NUL, after at most 1 MiB.
#define KVT_NUL_TERMINATED UINT64_MAX

/// Version of this header.
#define KVT_VERSION_MAJOR 0
#define KVT_VERSION_MINOR 1
#define KVT_VERSION_PATCH 0

/// Version of this header as one number: (major << 32) | (minor << 16) | patch.
#define KVT_HEADER_VERSION 65536

/// Log levels; each includes those before it. OFF: no messages. ERROR: unexpected failures. WARN:
/// degraded operation. INFO: rare events. DEBUG: for debugging. TRACE: everything.
#define KVT_LOG_OFF 0
#define KVT_LOG_ERROR 1
#define KVT_LOG_WARN 2
#define KVT_LOG_INFO 3
#define KVT_LOG_DEBUG 4
#define KVT_LOG_TRACE 5

/// Roles of threads: workers execute ops, the notifier calls callbacks and watches deadlines, the
/// others belong to a store or a streamer.
#define KVT_THREAD_WORKER 0
#define KVT_THREAD_NOTIFIER 1
#define KVT_THREAD_STORE 2
#define KVT_THREAD_STREAMER 3

/// Execution has begun, or the op ended before it could begin.
#define KVT_OP_ISSUED 1
/// The result is known.
#define KVT_OP_RESOLVED 2
/// The library no longer touches the caller's memory.
#define KVT_OP_RELEASED 4
/// A cancel was requested.
#define KVT_OP_CANCEL 8

/// Make each item an op of its own: out_ops receives one op for each item.
#define KVT_SUBMIT_EACH 1

/// Priorities: a caller waits for the work, the work is needed soon, the work can wait. Lower
/// priorities get a turn from time to time while higher ones have work.
#define KVT_PRIORITY_DEMAND 0
#define KVT_PRIORITY_PREFETCH 1
#define KVT_PRIORITY_BACKGROUND 2

/// Tiers: device memory, host memory, local disk, remote stores, and locked host memory; a locked
/// buffer is charged in the last and in KVT_TIER_HOST. Functions of budgets and accounts take one
/// as `tier`.
#define KVT_TIER_DEVICE 0
#define KVT_TIER_HOST 1
#define KVT_TIER_DISK 2
#define KVT_TIER_REMOTE 3
#define KVT_TIER_PINNED 4

/// Fail with KVT_E_BUDGET if the host or pinned limit exceeds the available memory. Otherwise the
/// limit is lowered to it.
#define KVT_BUDGET_STRICT 1
/// Take 0 in host_bytes, pinned_bytes or reserve_bytes as 0 bytes, not as the default.
#define KVT_BUDGET_ZERO_HOST 2
#define KVT_BUDGET_ZERO_PINNED 4
#define KVT_BUDGET_ZERO_RESERVE 8

/// Lock the memory in RAM, or fail.
#define KVT_BUFFER_PIN 1
/// Lock the memory in RAM if the lock quota and the account allow it.
#define KVT_BUFFER_TRY_PIN 2
/// Use reserved huge pages of 2 MiB, or fail.
#define KVT_BUFFER_HUGETLB 4
/// Ask the kernel for transparent huge pages.
#define KVT_BUFFER_TRY_HUGE 8
/// Make all pages present before the call returns, in parallel on the workers. Not in a callback.
#define KVT_BUFFER_PREFAULT 16

/// Kinds of pages: normal, transparent huge pages (the kernel was asked for them), reserved huge
/// pages, the caller's memory.
#define KVT_PAGES_NORMAL 0
#define KVT_PAGES_TRANSPARENT 1
#define KVT_PAGES_HUGETLB 2
#define KVT_PAGES_FOREIGN 3

/// Copy the source to the target; the ranges may overlap.
#define KVT_ITEM_COPY 1
/// Report the checksum of the source, as it was read, as the value of the item.
#define KVT_ITEM_CHECKSUM 2

/// Compare that checksum with `expect`; KVT_E_CORRUPT if they differ. A copy by the same item is
/// made all the same.
#define KVT_ITEM_VERIFY 4
/// Make the target's pages present and keep their contents. Not combined with other bits.
#define KVT_ITEM_PREFAULT 8

/// Memory that the processor can access.
#define KVT_MEMORY_HOST 0
/// Memory that only the device can access.
#define KVT_MEMORY_DEVICE 1

/// Chunks are written to disk right after each put.
#define KVT_WRITE_THROUGH 1
/// Chunks are written to disk when their memory is needed.
#define KVT_WRITE_BACK 2
/// Chunks are written to disk only when a put's `level` asks for it.
#define KVT_WRITE_NEVER 3

/// Default: chunks are written to disk in the background, about 1 s after the put (`age` in the
/// spec).
#define KVT_WRITE_BEHIND 4

/// How files are read and written: the store has no disk, worker threads make one request at a time
/// (THREADS), or io_uring carries many at once (URING).
#define KVT_IO_NONE 0
#define KVT_IO_THREADS 1
#define KVT_IO_URING 2

/// The engine can compute a missing chunk (a hole) before reused ones, so chunks are evicted in any
/// order. Without this flag a chunk is evicted only after the chunks that continue it.
#define KVT_NAMESPACE_HOLES 1

/// Bytes of a namespace's or chunk's key.
#define KVT_KEY_BYTES 32

/// Reuse rules: the earlier tokens that a layer needs in order to continue. FULL: all. WINDOW: the
/// last window_tokens. STATE: its state at exactly that point, which is kept at the ends of chunks.
#define KVT_RULE_FULL 0
#define KVT_RULE_WINDOW 1
#define KVT_RULE_STATE 2

/// Element types. BYTES: opaque to the library. F32, F16: IEEE 754. BF16: the upper half of an F32.
/// F8_E4M3, F8_E5M2: 8 bits with 4 or 5 of exponent. I8: signed. I4: 4 bits, two to a byte.
#define KVT_DTYPE_BYTES 0
#define KVT_DTYPE_F32 1
#define KVT_DTYPE_F16 2
#define KVT_DTYPE_BF16 3
#define KVT_DTYPE_F8_E4M3 4
#define KVT_DTYPE_F8_E5M2 5
#define KVT_DTYPE_I8 6
#define KVT_DTYPE_I4 7

/// No tier.
#define KVT_TIER_NONE 4294967295

/// Some needed cells are in no tier: the engine must compute these tokens.
#define KVT_RANGE_MISS 0
/// All needed cells can be loaded.
#define KVT_RANGE_HIT 1
/// All needed cells can be loaded once transfers in flight have arrived.
#define KVT_RANGE_PENDING 2
/// No layer needs these tokens in order to continue.
#define KVT_RANGE_UNNEEDED 3

/// Every cell of the chunk is resident in some tier of the store, not necessarily in the same one.
#define KVT_EXISTS_WHOLE 16

/// All cells of a chunk are resident in a tier.
#define KVT_STORE_EVENT_STORED 1
/// Some cell of a chunk is no longer resident in a tier that had them all.
#define KVT_STORE_EVENT_REMOVED 2
/// All chunks of a namespace are gone from every tier (kvt_namespace_clear).
#define KVT_STORE_EVENT_CLEARED 3

/// Kinds of kvt_latency_t. GET_HOST: gets that read nothing from disk. GET_DISK: gets that did.
/// PUT_*: puts by `level`, until they are in memory, on disk, durable. *_BATCH: batches of workers:
/// copies between tensors and memory, disk reads, disk writes, syncs, upkeep (compaction, sweeps,
/// checkpoints, namespace records), remote reads, remote writes, remote lookups. *_DECISION:
/// choices of victims, of which one in 16 is timed.
#define KVT_LATENCY_GET_HOST 1
#define KVT_LATENCY_GET_DISK 2
#define KVT_LATENCY_PUT_RAM 3
#define KVT_LATENCY_PUT_DISK 4
#define KVT_LATENCY_PUT_DURABLE 5
#define KVT_LATENCY_COPY_BATCH 6
#define KVT_LATENCY_READ_BATCH 7
#define KVT_LATENCY_WRITE_BATCH 8
#define KVT_LATENCY_SYNC_BATCH 9
#define KVT_LATENCY_UPKEEP_BATCH 10
#define KVT_LATENCY_HOST_DECISION 11
#define KVT_LATENCY_DISK_DECISION 12
#define KVT_LATENCY_FETCH_BATCH 13
#define KVT_LATENCY_UPLOAD_BATCH 14
#define KVT_LATENCY_LOOKUP_BATCH 15

/// State of the circuit breaker of a remote: requests are sent (CLOSED), none are sent for a while
/// after failures or malformed replies (OPEN), one request probes the remote (PROBING).
#define KVT_REMOTE_CIRCUIT_CLOSED 1
#define KVT_REMOTE_CIRCUIT_OPEN 2
#define KVT_REMOTE_CIRCUIT_PROBING 3
/// A put of a name that exists does nothing. Without this flag the last writer wins.
#define KVT_REMOTE_FIRST_WINS 1

/// `priority` is set, even if it is 0.
#define KVT_SESSION_PRIORITY 1

/// States of a ready event.
#define KVT_READY_EVENT_PENDING 0
#define KVT_READY_EVENT_SIGNALLED 1

/// One op per layer: out_ops receives one for each layer of the transfer. The tag of its i-th
/// layer is the given tag plus i. The transfer is cancelled once all of its ops are.
#define KVT_TRANSFER_EACH_LAYER 1

/// Gets and prefetches: only the cells that are needed to continue after the last token. Layers
/// with a window need the chunks of the window's last tokens, layers with a state the last chunk.
/// Their other cells are not touched and are no misses. A load step of a plan is got like this.
/// Views describe all tokens of the transfer.
#define KVT_TRANSFER_NEEDED_ONLY 2

/// When a put completes. RAM: its cells are in host memory.
#define KVT_LEVEL_RAM 0
/// Its cells are written to disk.
#define KVT_LEVEL_DISK 1
/// Its cells are synced to disk: they survive a crash of the machine.
#define KVT_LEVEL_DURABLE 2

/// The remote has confirmed all full chunks that have all layers; other chunks are in host memory.
/// The put ends with KVT_E_AGAIN if layers of a chunk have left host memory: they are not uploaded
/// from elsewhere.
#define KVT_LEVEL_REMOTE 3

/// Loads and computation run one after the other, not at the same time.
#define KVT_PLAN_NO_OVERLAP 1
/// Ignore KV that is still on its way into the store.
#define KVT_PLAN_NO_WAIT 2
/// `alpha_ns` and `beta_ns` are set, even if they are 0.
#define KVT_PLAN_COST 4
/// Steps of a plan. RESIDENT: nothing to do, the KV is in place or not needed.
#define KVT_PLAN_RESIDENT 0
/// Load the tokens: kvt_session_get with KVT_TRANSFER_NEEDED_ONLY.
#define KVT_PLAN_LOAD 1
/// Compute the tokens.
#define KVT_PLAN_RECOMPUTE 2

/// The engine can use objects behind a missing one, so objects are evicted in any order. Otherwise
/// children are evicted before their parents.
#define KVT_POLICY_HOLES 1
/// remember = 0 means none, not the default.
#define KVT_POLICY_ZERO_REMEMBER 2
/// alpha and beta are taken as they are: 0 means 0, not the default.
#define KVT_POLICY_COST 4

/// kvt_policy_context_t.session is set.
#define KVT_CONTEXT_SESSION 1
/// kvt_policy_context_t.priority is set, also if it is 0. Needs KVT_CONTEXT_SESSION.
#define KVT_CONTEXT_PRIORITY 2

/// kvt_policy_object_t.parent is set.
#define KVT_OBJECT_HAS_PARENT 1

/// The objects will not be used again.
#define KVT_HINT_DONE 1
/// confidence = 0 means 0, not the default 1.
#define KVT_HINT_ZERO_CONFIDENCE 2

/// Why a sequence stopped. TOOL_USE: it waits for a tool and continues soon. END_TURN: a person
/// reads the answer. LENGTH: it reached the limit of tokens.
#define KVT_STOP_UNKNOWN 0
#define KVT_STOP_TOOL_USE 1
#define KVT_STOP_END_TURN 2
#define KVT_STOP_LENGTH 3
#define KVT_STOP_CANCELLED 4

/// The last victim may give up a tail of its blocks and keep the others.
#define KVT_SELECT_TAIL 1

/// shrink_above = 0 means 0, not the default.
#define KVT_ADVICE_ZERO_SHRINK 1
/// grow_below = 0 means 0, not the default.
#define KVT_ADVICE_ZERO_GROW 2

/// Capabilities of a policy (caps). LOAD: selects the blocks to load. INDEX: selects the keys to
/// compute with. EVICT: evicts tokens. PREFILL: for the prompt; EVICT_PREFILL acts once the prompt
/// is computed. DECODE: for the tokens that follow.
#define KVT_SPARSE_LOAD_PREFILL 1
#define KVT_SPARSE_LOAD_DECODE 2
#define KVT_SPARSE_INDEX_PREFILL 4
#define KVT_SPARSE_INDEX_DECODE 8
#define KVT_SPARSE_EVICT_PREFILL 16
#define KVT_SPARSE_EVICT_DECODE 32

/// Inputs that a policy needs (needs). Keys of new tokens: kvt_sparse_append, or by blocks
/// kvt_sparse_add_block.
#define KVT_NEEDS_KEYS 1
/// Queries, in kvt_sparse_select and kvt_sparse_index.
#define KVT_NEEDS_QUERIES 2
/// Attention that each key received, before kvt_sparse_plan_eviction: kvt_sparse_observe.
#define KVT_NEEDS_COLUMN_SUMS 4
/// In kvt_sparse_select, the query of the layer `ahead` layers earlier, or a prediction from it.
#define KVT_NEEDS_NEXT_QUERY 8
/// A score for each candidate, before each kvt_sparse_select: kvt_sparse_add_scores.
#define KVT_NEEDS_SCORES 16
/// Values of new tokens.
#define KVT_NEEDS_VALUES 32
/// A weight for each query and head, before each kvt_sparse_select or _index: kvt_sparse_add_scores.
#define KVT_NEEDS_WEIGHTS 64
/// All keys of the sequence, in kvt_sparse_index.
#define KVT_NEEDS_ALL_KEYS 128

/// Scope of an answer: one for each query head, one for each key head, or one for the layer.
#define KVT_SCOPE_QUERY_HEAD 0
#define KVT_SCOPE_KEY_HEAD 1
#define KVT_SCOPE_LAYER 2

/// Unit of an answer: it names tokens or blocks.
#define KVT_GRANULARITY_TOKEN 0
#define KVT_GRANULARITY_BLOCK 1

/// Heads may retain different numbers of tokens.
#define KVT_SPARSE_RAGGED 1
/// Only selected blocks are loaded; without this flag all blocks are loaded.
#define KVT_SPARSE_SELECTS 2
/// The engine must rotate the keys (RoPE) to their places in the cache.
#define KVT_SPARSE_ROTATES 4
/// Fills the entries of `ids` after the last chosen id (kvt_sparse_select).
#define KVT_SPARSE_NO_ID 4294967295

/// All keys; no list.
#define KVT_INDEX_DENSE 0
/// Two lists: keys that every query sees, and distances back from a query at which it sees a key.
#define KVT_INDEX_LINES 1
/// A list of blocks of keys for each row of queries.
#define KVT_INDEX_BLOCKS 2

/// A list of keys that every query sees, then a list of ranges for each row of queries. A range is
/// two items: its first key, and the key after its last.
#define KVT_INDEX_RANGES 3

/// Kernel of kvt_prefill_open, of kvt_decode_open, of kvt_column_sums_open.
#define KVT_KERNEL_PREFILL 0
#define KVT_KERNEL_DECODE 1
#define KVT_KERNEL_SUMS 2

/// Separate keys and values, by head.
#define KVT_ATTENTION_SPLIT 0
/// One latent row a token for all heads (MLA); values are its first elements.
#define KVT_ATTENTION_LATENT 1

/// Scales of int8 rows: none, one per token and head ([tokens, heads]), or one per head and element
/// ([heads, dim]).
#define KVT_SCALES_NONE 0
#define KVT_SCALES_TOKEN 1
#define KVT_SCALES_CHANNEL 2

/// Keep scores, for kvt_decode_sums.
#define KVT_DECODE_SCORES 1

/// Sums for each query head; without this flag one row for all heads.
#define KVT_SUMS_BY_HEAD 1

/// In kvt_offload_opts_t.flags: the ring and the tails are in memory of the store's device.
#define KVT_OFFLOAD_ON_DEVICE 1

/// In the flags of kvt_offload_load: the caller has chosen the blocks. They are loaded without a
/// policy, and the tail follows them. A query is used for audits only.
#define KVT_OFFLOAD_LOAD_CHOSEN 1

/// No layer, no expert; for kvt_stream_unit_address: all units.
#define KVT_NONE 4294967295

/// kvt_model_info_t.format: GGUF, one file or split.
#define KVT_FORMAT_GGUF 1
/// safetensors, one file or sharded.
#define KVT_FORMAT_SAFETENSORS 2
/// Byte ranges that the engine names: kvt_model_table.
#define KVT_FORMAT_TABLE 3

/// kvt_unit_t.role: other tensors.
#define KVT_ROLE_OTHER 0
/// A layer, without its experts.
#define KVT_ROLE_LAYER 1
/// An expert of a layer.
#define KVT_ROLE_EXPERT 2
/// The table of token embeddings.
#define KVT_ROLE_EMBEDDING 3
/// The norm between the last layer and the head.
#define KVT_ROLE_NORM 4
/// The output projection (LM head).
#define KVT_ROLE_HEAD 5

/// kvt_stream_terms_t.compute: the engine computes on the processor, with weights in host memory.
#define KVT_COMPUTE_HOST 1
/// The engine computes on kvt_stream_opts_t.device.
#define KVT_COMPUTE_DEVICE 2

/// kvt_stream_terms_t.mode: some units are resident, the others pass through a few slots.
#define KVT_STREAM_TIERED 0

/// No unit is resident: all memory is slots, and a policy chooses the victim. For unknown orders;
/// slower than KVT_STREAM_TIERED where the order is known.
#define KVT_STREAM_RING 1

/// kvt_stream_terms_t.placement: resident units at equal distances, the first, or the last ones.
#define KVT_PLACE_INTERLEAVED 0
#define KVT_PLACE_FIRST 1
#define KVT_PLACE_LAST 2

/// kvt_stream_terms_t.flags: use the field of that name even if it is 0, not its default.
#define KVT_TERMS_DEVICE_CEILING 1
#define KVT_TERMS_HOST_CEILING 2
#define KVT_TERMS_DEVICE_SAFETY 4
#define KVT_TERMS_HOST_RESERVE 8
#define KVT_TERMS_KV 16
#define KVT_TERMS_EXPERT_SLOTS 32

/// kvt_stream_terms_t.flags: weights must be able to give memory back later, by
/// kvt_stream_rebalance or to the budget. Slots exist even where all units fit, of the size that
/// lets most memory be given back. Experts get no more slots than a layer needs, unless
/// expert_slots is set; slots beyond that need are given back, too. Always set with a budget; no
/// effect with KVT_STREAM_RING.
#define KVT_TERMS_SHRINKS 256

/// kvt_stream_opts_t.flags: measure the disk first if its rate is not set; reads up to 256 MiB.
#define KVT_STREAM_MEASURE 1
/// Passes do not follow each other: nothing is prefetched across the end of a pass.
#define KVT_STREAM_ONCE 2

/// Each unit has a fixed address, and memory only while it is loaded: see kvt_stream_unit_address. On a
/// device, a unit takes a multiple of the mapping granularity (2 MiB on CUDA), which the plan
/// counts.
#define KVT_STREAM_IN_PLACE 4
/// Read through the page cache, and drop the pages afterwards.
#define KVT_STREAM_BUFFERED 8
/// Do not use io_uring.
#define KVT_STREAM_NO_URING 16

/// Copy from a memory map: slow, for comparison. A file that is truncated meanwhile ends the
/// process (SIGBUS).
#define KVT_STREAM_MAPPED 32
/// Keep checksums in the file `sidecar`, or beside the model (.kvtsum) if that is empty.
#define KVT_STREAM_SIDECAR 64
/// Use pinned_percent even if it is 0, not its default.
#define KVT_STREAM_SET_PINNED_PERCENT 128

/// The device reads files into its slots, bypassing host memory (CUDA: cuFile, whose compatibility
/// mode is disabled in the whole process). Opening returns KVT_E_UNAVAILABLE and the reason where
/// it cannot: no library, no kernel module, a file system other than ext4 and XFS. Unaligned
/// chunks, resident units and failed reads go through host memory: kvt_stream_stats_t.direct_bytes,
/// direct_failed. The number of slots is fixed. Not with KVT_VERIFY_ALWAYS or KVT_STREAM_IN_PLACE.
#define KVT_STREAM_DIRECT 512

/// kvt_stream_opts_t.verify: do not compare bytes with checksums.
#define KVT_VERIFY_NEVER 0
/// When a unit is read for the first time; unknown checksums are stored.
#define KVT_VERIFY_FIRST 1
/// At each read.
#define KVT_VERIFY_ALWAYS 2

/// kvt_unit_residency_t.residency: only in the file, in host memory, or in device memory.
#define KVT_RESIDENT_FILE 1
#define KVT_RESIDENT_HOST 2
#define KVT_RESIDENT_DEVICE 3

/// kvt_forecast_t.binding: computing, the link to the device, or the disk.
#define KVT_BINDING_COMPUTE 1
#define KVT_BINDING_DEVICE 2
#define KVT_BINDING_DISK 3

/// A plan as text for people.
#define KVT_PLAN_TEXT 0
/// A plan as one JSON object.
#define KVT_PLAN_JSON 1

/// kvt_stream_acquire: do not wait; KVT_E_AGAIN if the unit is not loaded.
#define KVT_ACQUIRE_POLL 1

/// Do not wait for copies that were submitted to the device: the bytes are complete after
/// kvt_unit_lease_t.event. See kvt_device_stream_wait.
#define KVT_ACQUIRE_SUBMITTED 2

/// kvt_stream_limits_t.flags: use host_bytes or device_bytes even if it is 0.
#define KVT_LIMIT_HOST 1
#define KVT_LIMIT_DEVICE 2

/// kvt_stream_span_t.stage: a chunk was read.
#define KVT_STAGE_READ 1
/// A chunk was copied to the device.
#define KVT_STAGE_COPY 2
/// The engine leased a unit.
#define KVT_STAGE_USE 3
/// The engine waited for a unit.
#define KVT_STAGE_WAIT 4

/// The processor copies; copies are complete when the call returns.
#define KVT_DEVICE_KIND_HOST 1
/// A GPU, through the CUDA driver, which is loaded when the device is opened.
#define KVT_DEVICE_KIND_CUDA 2
/// The engine copies, through the callbacks of kvt_device_custom_t.
#define KVT_DEVICE_KIND_CUSTOM 3

/// A simulated device for tests: copies take time, and targets hold garbage until their event has
/// completed.
#define KVT_DEVICE_KIND_SIMULATED 4
/// kvt_device_info_t.flags: work continues after a call has returned.
#define KVT_DEVICE_ASYNCHRONOUS 1
/// The device computes checksums of the planes that it copies (KVT_COPY_CHECKSUM).
#define KVT_DEVICE_CHECKSUMS 2
/// The device has memory that only it can access: KVT_MEMORY_DEVICE.
#define KVT_DEVICE_HAS_MEMORY 4
/// Copies of host memory that is not pinned are slow and block; see kvt_device_register_host.
#define KVT_DEVICE_WANTS_PINNED 8

/// kvt_device_opts_t.flags, CUDA and simulated: the device computes checksums of copied planes in
/// its own memory, and stores compare them with the bytes on the host. A copy that differs is
/// repeated once, then fails with KVT_E_CORRUPT.
#define KVT_DEVICE_VERIFY 1

/// kvt_copy_t.direction: from the view to the plane.
#define KVT_COPY_GATHER 0
/// kvt_copy_t.direction: from the plane to the view.
#define KVT_COPY_SCATTER 1

/// kvt_copy_t.flags: compute a checksum; ignored without KVT_DEVICE_CHECKSUMS. An asynchronous device
/// sums the side in its own memory: the source as read, or the target as written. If both sides are
/// there, it sums the target.
#define KVT_COPY_CHECKSUM 1

/// kvt_kernel_t.kind: copy runs of bytes, convert numbers to another type, compute checksums.
#define KVT_DEVICE_KERNEL_MOVE 1
#define KVT_DEVICE_KERNEL_CONVERT 2
#define KVT_DEVICE_KERNEL_SUM 3

/// Page selection: extend bounding boxes of pages, bound a query's scores of pages, choose the
/// largest scores.
#define KVT_DEVICE_KERNEL_PAGE_BOXES 4
#define KVT_DEVICE_KERNEL_PAGE_SCORES 5
#define KVT_DEVICE_KERNEL_TOP 6

/// Token eviction: add attention weights to scores of tokens, choose the tokens to keep, compact
/// their rows.
#define KVT_DEVICE_KERNEL_ADD 7
#define KVT_DEVICE_KERNEL_KEEP 8
#define KVT_DEVICE_KERNEL_COMPACT 9

/// Attention: estimate weights of columns and diagonals from the last queries; attention of a
/// prompt over columns, diagonals or blocks; attention of few queries over chosen pages.
#define KVT_DEVICE_KERNEL_ESTIMATE 10
#define KVT_DEVICE_KERNEL_PREFILL 11
#define KVT_DEVICE_KERNEL_DECODE 12

/// kvt_conformance_opts_t.flags: close the device at the end, and check that.
#define KVT_CONFORMANCE_CLOSES 1

/// Results of a check. SKIPPED: it does not apply to the device, or an earlier failure prevents it.
#define KVT_VERDICT_PASSED 0
#define KVT_VERDICT_SKIPPED 1
#define KVT_VERDICT_FAILED 2

/// kvt_trace_opts_t.flags: each block becomes a request of its own, without a prefix.
#define KVT_TRACE_FLAT 1

/// kvt_replay_opts_t.flags: the engine can use blocks after a hole.
#define KVT_REPLAY_HOLES 1
/// kvt_replay_opts_t.flags: does not measure decision times; faster.
#define KVT_REPLAY_UNTIMED 2

/// kvt_replay_opts_t.hints: hints that the policy receives. STOP: the stop reason of each request,
/// where the trace has it; NONE: no hints; THINK: as STOP, and the time of the session's next
/// request.
#define KVT_HINTS_STOP 0
#define KVT_HINTS_NONE 1
#define KVT_HINTS_THINK 2

/// One owner's part of a budget: the bytes that it has reserved and committed.
typedef struct kvt_account_t kvt_account_t;

/// An attention computation, cut into items. Threads of the engine run each item once, in any order
/// (kvt_attention_job_run), and those of step 1 after all of step 0. The bits of the results do not depend on
/// threads. Tensors, scales, outputs, memory and the arrays of `select` are borrowed until
/// kvt_attention_job_close.
typedef struct kvt_attention_job_t kvt_attention_job_t;

/// Hard limits on the bytes in use, one for each tier.
typedef struct kvt_budget_t kvt_budget_t;

/// A range of host memory that ops read and write. Its bytes belong to the library from the
/// submission of such an op until the release of that op, otherwise to the caller.
typedef struct kvt_buffer_t kvt_buffer_t;

/// Copies between an engine's tensors and the library's memory: with the processor, a GPU or code
/// of the engine. Several stores and streamers of the runtime may share a device.
typedef struct kvt_device_t kvt_device_t;

/// The explanation of a failure. Calls with a `kvt_error_t **err` write an error there only if they
/// fail. The variable must be null or hold an error, which is freed and replaced. In a forked child
/// (KVT_E_FORKED) no error is written.
typedef struct kvt_error_t kvt_error_t;

/// The files of a model: tensors, and the units that they are loaded in. Immutable; belongs to no
/// runtime and keeps no file open. Texts of its structs are not NUL-terminated; they and other
/// arrays are valid until the model is closed. At most 4096 files, 2^20 tensors, 2^18 units and
/// 2^22 parts of tensors.
typedef struct kvt_model_t kvt_model_t;

/// A namespace of a store: its sessions share the KV of common prefixes.
typedef struct kvt_namespace_t kvt_namespace_t;

/// Layer-wise KV of one session: a ring of buffers that kernels read, backed by a store. A block is
/// a chunk of the session's namespace. The last tokens of a layer, which fill no block, are its
/// tail. Sparse policies may select the blocks to load, and evict tokens.
///
/// Threading: calls on one offload run one at a time. A second call waits; inside a callback it
/// returns KVT_E_REENTRANT instead.
typedef struct kvt_offload_t kvt_offload_t;

/// A submitted operation; completes exactly once. It is *resolved* when its result is known, and
/// *released* when the library no longer touches the caller's memory. Both usually come together; a
/// deadline or a defect may resolve an op earlier.
typedef struct kvt_op_t kvt_op_t;

/// An eviction policy with its table of objects. Needs no runtime.
typedef struct kvt_policy_t kvt_policy_t;

/// A bounded queue of completions. It is polled, or it calls back on the notifier thread, never
/// both. It loses no completion: submissions fail with KVT_E_AGAIN while it is full. Several
/// threads may drain it.
typedef struct kvt_queue_t kvt_queue_t;

/// A ready event: the engine signals it once, when the memory of a transfer may be touched
/// (kvt_transfer_t.ready). Events of a device are numbers, see kvt_transfer_t.after.
typedef struct kvt_ready_event_t kvt_ready_event_t;

/// The root object: worker threads, clock and notifier thread. Stores, streamers, devices, queues,
/// budgets and buffers are opened on it.
typedef struct kvt_runtime_t kvt_runtime_t;

/// A sequence of tokens in a namespace. While it is open, it references its chunks: they stay in
/// at least one tier.
typedef struct kvt_session_t kvt_session_t;

/// A sparse policy for one sequence. Calls on one policy must not overlap: a second call, also one
/// from a callback of the policy, returns KVT_E_BUSY. kvt_sparse_traits and kvt_sparse_close are
/// exempt.
typedef struct kvt_sparse_t kvt_sparse_t;

/// A store: keeps KV in tiers (DEVICE, HOST, DISK, REMOTE).
typedef struct kvt_store_t kvt_store_t;

/// A streamer: loads the units of a model ahead of their use, under a budget of memory. Resident
/// units stay in memory; the others pass through slots and are prefetched in the order of a pass.
/// Threads may lease units at the same time.
typedef struct kvt_stream_t kvt_stream_t;

/// Requests to a KV cache over time. Immutable; needs no runtime.
typedef struct kvt_trace_t kvt_trace_t;

/// Status of a call: 0 is success, negative is an error. Later libraries add codes and change none:
/// treat a negative code that your header does not list as an error.
typedef int32_t kvt_status_t;

/// Details of an error.
typedef struct kvt_error_info_t {
    uint64_t struct_size;
    /// UTF-8 and NUL-terminated; valid until the error is freed or replaced.
    const char *message;
    /// Without the NUL.
    uint64_t message_bytes;
    /// Byte offset in the input text; UINT64_MAX = the error is not about a text.
    uint64_t offset;
    /// Status that the failed call returned.
    kvt_status_t status;
    /// errno of the failed system call; 0 = none failed.
    int32_t os_errno;
} kvt_error_info_t;

/// Receives a log message of at most 2048 bytes. Texts are UTF-8, not NUL-terminated, and borrowed
/// for the call. Any thread calls it, also several at once. It must not unwind.
typedef void (*kvt_log_fn)(void *user_data,
                           uint32_t level,
                           const char *target,
                           uint64_t target_bytes,
                           const char *message,
                           uint64_t message_bytes);

/// Releases `user_data`. Called once, after the last call of the callback that it was registered
/// with. It must not unwind.
typedef void (*kvt_destroy_fn)(void *user_data);

/// An optional feature. Texts are static UTF-8, not NUL-terminated.
typedef struct kvt_feature_t {
    uint64_t struct_size;
    const char *name;
    uint64_t name_bytes;
    /// The purpose of the feature.
    const char *note;
    uint64_t note_bytes;
    /// 1 = this library contains the feature.
    uint32_t built;
    /// 1 = this machine supports it, as probed during the call.
    uint32_t present;
} kvt_feature_t;

/// Called first in every thread of the runtime and of its stores and streamers, so that the host
/// can name the thread, or set its affinity or priority. `role` is KVT_THREAD_*; more may be added.
/// `index` counts from 0 within the role, and within each store or streamer. May be called from
/// several threads at once. It must not unwind and must not call the library.
typedef void (*kvt_thread_fn)(void *user_data, uint32_t role, uint32_t index);

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
    /// See docs/abi.md.
    const char *faults;
    uint64_t faults_bytes;
    /// Called first in every thread; null = none.
    kvt_thread_fn on_thread;
    /// Passed to on_thread, and to destroy at the end; taken over only on success.
    void *user_data;
    /// May be null.
    kvt_destroy_fn destroy;
} kvt_runtime_opts_t;

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

/// Progress and result of an op.
typedef struct kvt_op_info_t {
    uint64_t struct_size;
    uint64_t tag;
    /// Bytes of the items that ended with KVT_OK.
    uint64_t bytes_done;
    /// KVT_OP_* bits.
    uint32_t state;
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

/// Result of one item of an op.
typedef struct kvt_op_item_t {
    /// Computed value, such as a checksum; 0 = none.
    uint64_t value;
    /// Valid once `done` is 1.
    kvt_status_t status;
    /// 1 = executed or skipped.
    uint32_t done;
} kvt_op_item_t;

/// One entry of a queue: moments that an op has reached.
typedef struct kvt_completion_t {
    /// Still to be freed by the caller; null if the op was submitted without a handle.
    struct kvt_op_t *op;
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
typedef void (*kvt_completion_fn)(void *user_data,
                                  const struct kvt_completion_t *batch,
                                  uint64_t count,
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

/// Options of a budget.
typedef struct kvt_budget_opts_t {
    uint64_t struct_size;
    /// KVT_BUDGET_*.
    uint64_t flags;
    /// Limit of the device tier; 0 = no bytes.
    uint64_t device_bytes;
    /// Limit of the host tier; 0 = half of what this process may still use, which is min(cgroup
    /// headroom, available memory) - reserve_bytes.
    uint64_t host_bytes;
    /// Limit of all disk tiers together. 0 = no limit for stores, no bytes for accounts of the
    /// caller.
    uint64_t disk_bytes;
    /// Limit of the remote tier; 0 = no bytes.
    uint64_t remote_bytes;
    /// Limit of locked memory; 0 = what this process may still lock. At most the host limit.
    uint64_t pinned_bytes;
    /// Memory left to the rest of the process; 0 = an eighth of min(cgroup headroom, available
    /// memory), at most 512 MiB.
    uint64_t reserve_bytes;
} kvt_budget_opts_t;

/// Memory of the machine, and limits of this process, as measured during the call.
typedef struct kvt_budget_report_t {
    uint64_t struct_size;
    /// RAM of the machine.
    uint64_t total_bytes;
    /// The kernel's estimate of the bytes available without swapping.
    uint64_t available_bytes;
    /// Lowest memory limit of the process's cgroup and its ancestors; UINT64_MAX = none.
    uint64_t cgroup_limit_bytes;
    /// Bytes still free below that limit; UINT64_MAX = no limit.
    uint64_t cgroup_headroom_bytes;
    /// min(cgroup_headroom_bytes, available_bytes).
    uint64_t effective_bytes;
    /// Bytes of those that the budget leaves to the rest of the process, fixed when it was opened.
    uint64_t reserve_bytes;
    /// Bytes that this process may lock in total; UINT64_MAX = unlimited.
    uint64_t lock_quota_bytes;
    /// Bytes that it has locked.
    uint64_t locked_bytes;
    /// Open accounts of the budget.
    uint64_t accounts;
    /// 1 or 2; 0 = no cgroup limit.
    uint32_t cgroup_version;
    uint32_t reserved;
} kvt_budget_report_t;

/// Limit and counters of one tier of a budget.
typedef struct kvt_tier_report_t {
    uint64_t struct_size;
    /// Requested limit.
    uint64_t asked_bytes;
    /// Effective limit: the requested one, lowered to what the machine has.
    uint64_t limit_bytes;
    /// Reserved by accounts and not yet in use.
    uint64_t reserved_bytes;
    /// In use by accounts.
    uint64_t committed_bytes;
    /// Most bytes ever reserved and committed together.
    uint64_t peak_bytes;
    /// limit_bytes - reserved_bytes - committed_bytes, at least 0.
    uint64_t free_bytes;
    /// Reservations that failed at once.
    uint64_t refused;
    /// Reservations that wait.
    uint64_t waiting;
    /// Bytes that reclaim callbacks were asked for so far.
    uint64_t reclaim_requested_bytes;
} kvt_tier_report_t;

/// Asks an owner to release up to `bytes` of a tier. Returns the bytes that it promises to release,
/// 0 if none. The release may follow later, from any thread. A promise counts until `deadline_ns`
/// (0 = none). Called on the notifier thread, with no lock held; it must not unwind and must not
/// wait.
typedef uint64_t (*kvt_reclaim_fn)(void *user_data,
                                   uint32_t tier,
                                   uint64_t bytes,
                                   uint64_t deadline_ns);

/// Options of an account.
typedef struct kvt_account_opts_t {
    uint64_t struct_size;
    /// 0: no flags are defined.
    uint64_t flags;
    /// Name in messages, at most 64 bytes; null = none.
    const char *name;
    uint64_t name_bytes;
    /// -2^31 to 2^31 - 1. Owners of low priority are asked to release bytes first.
    int64_t priority;
    /// Called when other owners need bytes; null = never.
    kvt_reclaim_fn reclaim;
    /// Passed to reclaim, and to destroy at the end; taken over only on success.
    void *user_data;
    /// May be null.
    kvt_destroy_fn destroy;
} kvt_account_opts_t;

/// Options of a submission.
typedef struct kvt_submit_opts_t {
    uint64_t struct_size;
    /// KVT_SUBMIT_*.
    uint64_t flags;
    /// Receives the completions; null = none, and the call must return a handle.
    const struct kvt_queue_t *queue;
    /// The caller's value, returned in completions.
    uint64_t tag;
    /// The op resolves with KVT_E_TIMEOUT at this time; 0 = never.
    uint64_t deadline_ns;
    /// KVT_OP_ISSUED, _RESOLVED, _RELEASED: moments that post a completion. Moments that come
    /// together share one. 0 = KVT_OP_RELEASED.
    uint32_t notify;
    /// KVT_PRIORITY_*.
    uint32_t priority;
} kvt_submit_opts_t;

/// Options of kvt_buffer_alloc.
typedef struct kvt_buffer_opts_t {
    uint64_t struct_size;
    /// KVT_BUFFER_*.
    uint64_t flags;
    /// 1 to 2^46.
    uint64_t bytes;
    /// A power of two up to 1 GiB, with KVT_BUFFER_HUGETLB up to 2 MiB; 0 = one page.
    uint64_t align_bytes;
    /// Charged in KVT_TIER_HOST and, for locked memory, KVT_TIER_PINNED; null = no account.
    const struct kvt_account_t *account;
} kvt_buffer_opts_t;

/// Properties of a buffer.
typedef struct kvt_buffer_info_t {
    uint64_t struct_size;
    void *address;
    /// Usable size.
    uint64_t bytes;
    /// Charged to its account: the size in whole pages; 0 for the caller's memory.
    uint64_t charged_bytes;
    /// Uses by ops that are not released, one for each item that reads or writes the buffer.
    uint64_t in_flight;
    /// 1 = locked in RAM.
    uint32_t pinned;
    /// KVT_PAGES_*.
    uint32_t pages;
} kvt_buffer_info_t;

/// One item of kvt_buffer_submit: work on up to two buffers.
typedef struct kvt_buffer_item_t {
    /// KVT_ITEM_* bits.
    uint32_t kind;
    /// 0: no flags are defined.
    uint32_t flags;
    /// Target; null unless `kind` has KVT_ITEM_COPY or KVT_ITEM_PREFAULT.
    const struct kvt_buffer_t *dst;
    uint64_t dst_offset;
    /// Source; null with KVT_ITEM_PREFAULT.
    const struct kvt_buffer_t *src;
    uint64_t src_offset;
    uint64_t bytes;
    /// Expected checksum, with KVT_ITEM_VERIFY.
    uint64_t expect;
    /// Tag of the item's op, with KVT_SUBMIT_EACH.
    uint64_t tag;
} kvt_buffer_item_t;

/// A credential for the remote's server. Copied when the store is opened, wiped when it is closed,
/// and never shown in specs, logs, errors or at the control socket. Stands in arrays only.
typedef struct kvt_secret_t {
    /// "password" (Redis), "s3.key", "s3.secret", "s3.token", or "seal" (encrypts objects).
    const char *name;
    uint64_t name_bytes;
    const void *secret;
    /// At most 4,096.
    uint64_t secret_bytes;
} kvt_secret_t;

/// A piece of host memory. Parts of a put must not be written; parts of a get whose bytes are not
/// wanted may share memory. Stands in arrays only.
typedef struct kvt_remote_part_t {
    void *address;
    uint64_t bytes;
} kvt_remote_part_t;

/// One object of a batch. Stands in arrays only; the next one is `stride_bytes` further.
typedef struct kvt_remote_item_t {
    /// Letters, digits, '.', '_', '-' and '/'. Not NUL-terminated.
    const char *name;
    uint64_t name_bytes;
    /// Memory that the object's bytes go to (get) or come from (put), in order.
    const struct kvt_remote_part_t *parts;
    uint64_t part_count;
    /// Get: first byte of the object that is wanted.
    uint64_t offset;
    /// Out. Get: bytes read, less than the room if the object ends before. Exists: length of the
    /// object. Put: 1 = it existed already.
    uint64_t bytes;
    /// Out, preset to KVT_E_AGAIN: KVT_OK, KVT_E_NOT_FOUND, KVT_E_AGAIN (retry later),
    /// KVT_E_TIMEOUT, KVT_E_BUDGET (full), KVT_E_LIMIT (object too long), KVT_E_CORRUPT,
    /// KVT_E_UNSUPPORTED, KVT_E_UNAVAILABLE.
    kvt_status_t status;
    uint32_t reserved;
} kvt_remote_item_t;

/// Processes a batch of objects until a deadline (CLOCK_MONOTONIC), and sets the status of each
/// item. Must not touch memory of the batch after it returns. A result other than KVT_OK becomes
/// the status of every item that has none.
typedef kvt_status_t (*kvt_remote_batch_fn)(void *user_data,
                                            struct kvt_remote_item_t *items,
                                            uint64_t count,
                                            uint64_t stride_bytes,
                                            uint64_t deadline_ns);

/// A custom remote backend, for `remote=custom(...)` in a store's spec. The store calls it from
/// several threads at once, without a lock. Callbacks must return by the deadline, must not unwind
/// and must not call the same store. The store verifies every object and treats `exists` as a hint.
typedef struct kvt_remote_custom_t {
    uint64_t struct_size;
    /// KVT_REMOTE_FIRST_WINS.
    uint64_t flags;
    /// Object size that the backend handles best; 0 = 1 MiB.
    uint64_t preferred_bytes;
    /// Longest object; 0 = unlimited.
    uint64_t max_bytes;
    /// Most objects of a call, at most 4096; 0 = 32.
    uint32_t batch;
    uint32_t reserved;
    /// Reads objects or parts of objects.
    kvt_remote_batch_fn get;
    /// Stores objects.
    kvt_remote_batch_fn put;
    /// Reports which objects exist, and their lengths.
    kvt_remote_batch_fn exists;
    /// Removes objects; null = objects are never removed.
    kvt_remote_batch_fn remove;
    /// Passed to the callbacks; the store owns it once kvt_store_open has succeeded.
    void *user_data;
    /// Releases user_data after the store is closed; may be null.
    kvt_destroy_fn destroy;
} kvt_remote_custom_t;

/// Options of kvt_store_open. A field that is set overrides the spec's parameter that its comment
/// names, and is checked by the same rules.
typedef struct kvt_store_opts_t {
    uint64_t struct_size;
    /// None are defined: 0.
    uint64_t flags;
    /// Spec (docs/abi.md), such as "store(host=8GiB, disk=disk(path=\"kv\", bytes=200GiB))"; null =
    /// "store(host=1GiB)".
    const char *spec;
    uint64_t spec_bytes;
    /// Limit of cells in host memory, at least 64 KiB (`host`); 0 = as in the spec.
    uint64_t host_bytes;
    /// Limit of all files (`disk(bytes=...)`); 0 = as in the spec.
    uint64_t disk_bytes;
    /// Directory of the disk tier, UTF-8 (`disk(path=...)`); null = as in the spec.
    const char *disk_path;
    uint64_t disk_path_bytes;
    /// Eviction policy of HOST (`policy`); null = as in the spec.
    const char *policy;
    uint64_t policy_bytes;
    /// Eviction policy of DISK (`disk_policy`); null = as in the spec.
    const char *disk_policy;
    uint64_t disk_policy_bytes;
    /// KVT_WRITE_* (`write`); 0 = as in the spec.
    uint32_t write;
    uint32_t reserved;
    /// Device of the same runtime that copies between the engine and the store; null = the CPU. If
    /// it has memory of its own, transfers accept views of that memory, and
    /// `device=device(capacity=8GiB)` in the spec adds a DEVICE tier.
    const struct kvt_device_t *device;
    /// Credentials for the remote's server; null = none.
    const struct kvt_secret_t *secrets;
    /// At most 16.
    uint64_t secret_count;
    uint64_t secret_stride_bytes;
    /// Custom backend, required by `remote=custom(...)` in the spec; null = none.
    const struct kvt_remote_custom_t *remote;
} kvt_store_opts_t;

/// Statistics of a store: counters since it was opened, and gauges.
typedef struct kvt_store_stats_t {
    /// sizeof of this struct.
    uint64_t struct_size;
    /// Puts begun.
    uint64_t puts;
    /// Gets begun.
    uint64_t gets;
    /// Prefetches begun.
    uint64_t prefetches;
    /// Cells that puts stored.
    uint64_t stored_cells;
    /// Cells of puts that were resident already.
    uint64_t known_cells;
    /// Cells of gets that were in host memory.
    uint64_t host_hit_cells;
    /// Cells of gets that were read from disk.
    uint64_t disk_hit_cells;
    /// Cells of gets that were in device memory.
    uint64_t device_hit_cells;
    /// Cells of gets that were in no tier.
    uint64_t missed_cells;
    /// Cells with a wrong checksum; they became misses.
    uint64_t corrupt_cells;
    /// Copies that arrived damaged over a device's bus and were repeated.
    uint64_t damaged_copies;
    /// Cells of transfers that failed for lack of host memory.
    uint64_t no_room_cells;
    /// Cells written to disk.
    uint64_t written_cells;
    /// Bytes of written cells, before encoding.
    uint64_t written_bytes;
    /// Bytes of cells read from disk.
    uint64_t loaded_bytes;
    /// Written cells that a codec encoded.
    uint64_t coded_cells;
    /// Bytes of encoded cells before encoding.
    uint64_t coded_raw_bytes;
    /// Bytes of encoded cells on disk.
    uint64_t coded_bytes;
    /// Numbers written by lossy codecs.
    uint64_t lossy_numbers;
    /// Largest error of a number written by a lossy codec.
    double lossy_error_max;
    /// Mean error of these numbers.
    double lossy_error_mean;
    /// Root mean square error of these numbers, relative to that of the numbers.
    double lossy_error_relative;
    /// Chunks evicted from host memory that are on disk.
    uint64_t demoted_chunks;
    /// Chunks evicted from host memory that are in no other tier.
    uint64_t dropped_chunks;
    /// Chunks evicted from disk as a whole.
    uint64_t evicted_chunks;
    /// Parts of chunks evicted from disk, where cells are evicted alone.
    uint64_t evicted_parts;
    /// Victims in host memory that the disk had no space for.
    uint64_t disk_full_chunks;
    /// Failed writes.
    uint64_t failed_writes;
    /// Failed reads.
    uint64_t failed_reads;
    /// Chunks admitted to the disk.
    uint64_t admitted_chunks;
    /// Bytes of admitted chunks.
    uint64_t admitted_bytes;
    /// Chunks rejected because nothing is admitted.
    uint64_t rejected_never;
    /// Chunks rejected for too few uses.
    uint64_t rejected_hits;
    /// Chunks rejected for the priority of their session.
    uint64_t rejected_priority;
    /// Chunks rejected for their size.
    uint64_t rejected_size;
    /// Chunks rejected because the day's writes were used up.
    uint64_t rejected_wear;
    /// Namespaces, including those that no caller has open.
    uint64_t namespaces;
    /// Layouts in use.
    uint64_t layouts;
    /// Open sessions.
    uint64_t sessions;
    /// Tenants that are counted separately.
    uint64_t tenants;
    /// Known chunks, of all layouts.
    uint64_t chunks;
    /// Pinned chunks.
    uint64_t pins;
    /// Transfers in flight.
    uint64_t transfers;
    /// Cells of transfers in flight.
    uint64_t transfer_cells;
    /// Of those, cells that wait for host memory.
    uint64_t memory_waiters;
    /// Bytes that these cells wait for.
    uint64_t memory_waiter_bytes;
    /// Bytes in host memory that are evicted once they are on disk.
    uint64_t demoting_bytes;
    /// Chunks queued for write-back.
    uint64_t writeback_chunks;
    /// Bytes of chunks that write-behind has not begun to write (`write=behind`).
    uint64_t unwritten_bytes;
    /// Age of the oldest of those chunks, in nanoseconds.
    uint64_t unwritten_age_ns;
    /// Puts that wait for a sync.
    uint64_t sync_waiters;
    /// Events published.
    uint64_t events;
    /// Limit of cells in host memory, in bytes.
    uint64_t host_limit_bytes;
    /// Bytes of cells in host memory.
    uint64_t host_used_bytes;
    /// Bytes charged for host memory, including tables and unused parts of slabs.
    uint64_t host_cost_bytes;
    /// Cells in host memory.
    uint64_t host_cells;
    /// Slabs of host memory.
    uint64_t host_slabs;
    /// Limit of all files, in bytes; 0 = there is no disk.
    uint64_t disk_limit_bytes;
    /// Bytes of all files.
    uint64_t disk_used_bytes;
    /// Maximum of disk_used_bytes so far.
    uint64_t disk_peak_bytes;
    /// Bytes of live cells on disk, padded to blocks.
    uint64_t disk_live_bytes;
    /// Bytes that compaction would free.
    uint64_t disk_dead_bytes;
    /// Cells on disk.
    uint64_t disk_cells;
    /// Segments of the disk.
    uint64_t disk_segments;
    /// Bytes of memory in which cells are encoded.
    uint64_t disk_scratch_bytes;
    /// Bytes written for cells of callers, padded to blocks.
    uint64_t disk_appended_bytes;
    /// Bytes of cells that compaction wrote again.
    uint64_t disk_compacted_bytes;
    /// Bytes written for headers, records and checkpoints.
    uint64_t disk_overhead_bytes;
    /// Bytes read from disk.
    uint64_t disk_read_bytes;
    /// Syncs of segments.
    uint64_t disk_syncs;
    /// Failed syncs.
    uint64_t disk_failed_syncs;
    /// Segments that were compacted.
    uint64_t disk_compactions;
    /// Checkpoints written.
    uint64_t disk_checkpoints;
    /// Appends that the disk rejected for lack of space.
    uint64_t disk_rejected_appends;
    /// Chunks recovered from disk when the store was opened.
    uint64_t recovered_chunks;
    /// Cells recovered from disk.
    uint64_t recovered_cells;
    /// Cells found on disk that could not be used.
    uint64_t recovered_unusable_cells;
    /// KVT_IO_*: how files are read and written now. kvt_store_metrics says why not faster.
    uint32_t disk_engine;
    /// 1 = files bypass the page cache.
    uint32_t disk_direct;
    /// Limit of device memory, in bytes; 0 = there is no device tier.
    uint64_t device_limit_bytes;
    /// Bytes of device memory in use.
    uint64_t device_used_bytes;
    /// Bytes of cells in device memory.
    uint64_t device_live_bytes;
    /// Cells in device memory.
    uint64_t device_cells;
    /// Slabs of device memory.
    uint32_t device_slabs;
    /// 1 = the device is lost and the tier is closed.
    uint32_t device_is_lost;
    /// Cells copied into device memory.
    uint64_t device_promoted_cells;
    /// Chunks evicted from device memory; they stay in another tier.
    uint64_t device_evicted_chunks;
    /// Replicas lost with their device.
    uint64_t device_lost_cells;
} kvt_store_stats_t;

/// A field of an identity that the engine defines. Stands in arrays only.
typedef struct kvt_identity_extra_t {
    /// At least 0x80000000, unique in the identity.
    uint32_t tag;
    uint32_t reserved;
    /// Bytes that are hashed unchanged.
    const void *value;
    /// At most 65536.
    uint64_t value_bytes;
} kvt_identity_extra_t;

/// Everything that KV depends on beside its tokens: sessions share KV if all fields are equal.
/// Fields are bytes, at most 65536 each, hashed unchanged. A null field is absent, which differs
/// from an empty one (a pointer with length 0). docs/keys.md defines the hash.
typedef struct kvt_identity_t {
    uint64_t struct_size;
    /// Name of the model.
    const void *model;
    uint64_t model_bytes;
    /// Fingerprint of the weights, the engine's own.
    const void *weights;
    uint64_t weights_bytes;
    /// Adapters that change the KV, in the order they apply.
    const void *lora;
    uint64_t lora_bytes;
    /// Digest of media that all sequences of the namespace have.
    const void *media;
    uint64_t media_bytes;
    /// Separates the KV of tenants; long and random.
    const void *salt;
    uint64_t salt_bytes;
    /// How KV is computed and encoded where that is not exact: a canonical spec. Its argument
    /// `codec` (none, lz4, int8) sets the codec on disk; without it the store's applies.
    const void *recipe;
    uint64_t recipe_bytes;
    /// Part of the KV that this rank holds, below shard_count.
    uint32_t shard_index;
    /// Number of parts; 0 = all ranks hold the same KV (shard_index is 0).
    uint32_t shard_count;
    /// Fields that the engine defines, in any order.
    const struct kvt_identity_extra_t *extra;
    /// At most 64.
    uint64_t extra_count;
    uint64_t extra_stride_bytes;
    /// Tenant in the names of the namespace's objects at a remote (`prefix/t42/...`), for access
    /// rules; 0 = no tenant. Not part of the identity.
    uint64_t remote_tenant;
} kvt_identity_t;

/// Layers with equal sizes, dtype and reuse rule. Stands in arrays only.
typedef struct kvt_group_t {
    /// KVT_RULE_*.
    uint32_t rule;
    /// KVT_DTYPE_*.
    uint32_t dtype;
    /// Heads of K and V, at most 65536; 0 = unspecified. Each head fills whole elements.
    uint32_t kv_heads;
    /// With KVT_RULE_WINDOW: 1 to 2^30; else 0.
    uint32_t window_tokens;
    /// Bytes of K, or of the latent, per token and layer.
    uint64_t k_bytes;
    /// Bytes of V per token and layer; 0 = V is part of K.
    uint64_t v_bytes;
    /// With KVT_RULE_STATE: bytes of a layer's state; k_bytes, v_bytes and kv_heads are 0.
    uint64_t state_bytes;
    /// Layers in any order; each layer of the model, from 0, is in exactly one group.
    const uint16_t *layers;
    /// At least 1; at most 4096 in all groups.
    uint64_t layer_count;
} kvt_group_t;

/// Chunk length and contents of a model's cells. Part of the namespace's key.
typedef struct kvt_layout_t {
    uint64_t struct_size;
    /// 1 to 32768 tokens of a chunk, the unit of sharing. A cell (a chunk in one layer) has at most
    /// 32 MiB.
    uint32_t chunk_tokens;
    uint32_t reserved;
    /// Groups of layers, in any order.
    const struct kvt_group_t *groups;
    /// 1 to 64.
    uint64_t group_count;
    uint64_t stride_bytes;
} kvt_layout_t;

/// A run of tokens in the same state. Stands in arrays only.
typedef struct kvt_range_t {
    uint64_t first_token;
    uint64_t tokens;
    /// KVT_RANGE_*.
    uint32_t state;
    /// Slowest tier that a needed cell is loaded from, KVT_TIER_*; KVT_TIER_NONE = nothing to load.
    uint32_t tier;
    /// Bytes that are resident in DEVICE.
    uint64_t device_bytes;
    /// Bytes to load from HOST.
    uint64_t host_bytes;
    /// Bytes to load from DISK.
    uint64_t disk_bytes;
    /// Bytes to fetch from the remote, by remote hints.
    uint64_t remote_bytes;
    /// Bytes on their way into the store, in no tier yet.
    uint64_t pending_bytes;
    /// Predicted time to load these tokens alone.
    uint64_t load_ns;
} kvt_range_t;

/// Totals of a lookup. Bytes and time are those of continuing after reusable_soon_tokens; with
/// KVT_NAMESPACE_HOLES, of loading all that is resident.
typedef struct kvt_lookup_t {
    uint64_t struct_size;
    /// Tokens looked up.
    uint64_t tokens;
    /// Longest prefix that can be reused now.
    uint64_t reusable_tokens;
    /// Longest prefix that can be reused once transfers in flight have arrived.
    uint64_t reusable_soon_tokens;
    /// Bytes that are resident in DEVICE.
    uint64_t device_bytes;
    /// Bytes to load from HOST.
    uint64_t host_bytes;
    /// Bytes to load from DISK.
    uint64_t disk_bytes;
    /// Bytes to fetch from the remote, by remote hints.
    uint64_t remote_bytes;
    /// Bytes on their way into the store, in no tier yet.
    uint64_t pending_bytes;
    /// Predicted time to load all of it, including queued work.
    uint64_t load_ns;
} kvt_lookup_t;

/// Cost of prefill. Computing n tokens after l tokens of context takes, in nanoseconds,
/// n * beta_ns + alpha_ns * (n * l + n * n / 2).
typedef struct kvt_prefill_cost_t {
    uint64_t struct_size;
    /// Nanoseconds per token and token of context.
    double alpha_ns;
    /// Nanoseconds per token.
    double beta_ns;
    /// Out: number of calls of kvt_namespace_observe_prefill.
    uint64_t observed;
    /// Out: 1 = set by kvt_namespace_set_prefill_cost, 0 = observed.
    uint32_t fixed;
    uint32_t reserved;
} kvt_prefill_cost_t;

/// A change of residency. Stands in arrays only.
typedef struct kvt_store_event_t {
    /// Consecutive, from 0.
    uint64_t number;
    /// Time, CLOCK_MONOTONIC.
    uint64_t at_ns;
    /// KVT_STORE_EVENT_STORED, _REMOVED or _CLEARED. Ignore others: kinds may be added.
    uint32_t kind;
    /// KVT_TIER_*; 0 with KVT_STORE_EVENT_CLEARED.
    uint32_t tier;
    /// Tokens of the chunk.
    uint32_t tokens;
    /// Index of the chunk in its sequence, from 0.
    uint32_t position;
    /// Key of the chunk.
    uint8_t key[32];
    /// Key of the chunk before it; for the first one the namespace's key.
    uint8_t parent[32];
    uint8_t namespace_key[32];
} kvt_store_event_t;

/// An eviction in the log.
typedef struct kvt_policy_log_entry_t {
    /// Counts evictions from 1; a gap means that entries were overwritten.
    uint64_t number;
    /// Time of the eviction, by the caller's clock.
    int64_t at_ns;
    uint64_t id;
    /// Valid if has_session is not 0.
    uint64_t session;
    /// Time of the last use, as far as the policy knows it.
    int64_t stamp_ns;
    /// Score in the policy's order; the lowest is evicted first.
    double score;
    /// Units freed.
    uint32_t units;
    /// Uses since the object was inserted.
    uint32_t hits;
    /// The policy's queue that the object was in.
    uint32_t queue;
    uint32_t has_session;
    /// Index of the policy that decided, for kvt_policy_info.
    uint32_t policy;
    uint32_t reserved;
} kvt_policy_log_entry_t;

/// Traffic of a tenant: puts and gets, no prefetches. Stands in arrays only.
typedef struct kvt_tenant_t {
    /// kvt_session_opts_t.tenant.
    uint32_t tenant;
    /// 1 = this row sums all tenants beyond the 1,024 that are counted separately.
    uint32_t is_rest;
    /// Bytes stored by puts.
    uint64_t put_bytes;
    /// Bytes loaded by gets.
    uint64_t got_bytes;
    /// Cells that gets asked for and loaded.
    uint64_t hit_cells;
    /// Cells that gets asked for and that were in no tier.
    uint64_t missed_cells;
} kvt_tenant_t;

/// Latencies of one kind since the store was opened, in nanoseconds. Stands in arrays only.
typedef struct kvt_latency_t {
    /// KVT_LATENCY_*.
    uint32_t kind;
    uint32_t reserved;
    /// Number of timings.
    uint64_t count;
    uint64_t mean_ns;
    /// Median, at most a quarter too high.
    uint64_t p50_ns;
    /// 99th percentile, at most a quarter too high.
    uint64_t p99_ns;
    uint64_t max_ns;
} kvt_latency_t;

/// Statistics of a store's remote. Metrics are named `kvtier_remote_NAME`.
typedef struct kvt_remote_stats_t {
    /// sizeof of this struct.
    uint64_t struct_size;
    /// KVT_REMOTE_CIRCUIT_* of reads; 0 = there is no remote.
    uint32_t read_circuit;
    /// KVT_REMOTE_CIRCUIT_* of writes.
    uint32_t write_circuit;
    /// Times that a circuit was opened: requests were suspended for a while.
    uint64_t circuit_opens;
    /// Names looked up.
    uint64_t looked_up_names;
    /// Names that lookups found.
    uint64_t found_names;
    /// Names answered from the remote index, without a lookup.
    uint64_t cached_names;
    /// Objects fetched.
    uint64_t fetched_objects;
    /// Cells fetched with a valid checksum.
    uint64_t fetched_cells;
    /// Bytes of those cells.
    uint64_t fetched_bytes;
    /// Fetched bytes that no transfer needed.
    uint64_t wasted_bytes;
    /// Objects that a hint promised and the remote did not have.
    uint64_t absent_objects;
    /// Objects, or cells of them, with wrong content.
    uint64_t corrupt_objects;
    /// Requests without an answer before their deadline.
    uint64_t late_requests;
    /// Requests that have not returned after twice their timeout.
    uint64_t hung_requests;
    /// Objects not fetched because the circuit was open.
    uint64_t skipped_objects;
    /// Objects uploaded.
    uint64_t uploaded_objects;
    /// Bytes of uploaded objects.
    uint64_t uploaded_bytes;
    /// Objects that another store had uploaded before.
    uint64_t known_objects;
    /// Failed uploads.
    uint64_t failed_uploads;
    /// Chunks not uploaded: rejected by admission, or too many were queued.
    uint64_t rejected_chunks;
    /// Objects removed because they were damaged or their chunk was dropped.
    uint64_t removed_objects;
} kvt_remote_stats_t;

/// Options of a session.
typedef struct kvt_session_opts_t {
    uint64_t struct_size;
    /// KVT_SESSION_*.
    uint64_t flags;
    /// At most 256 bytes; null = no name.
    const char *name;
    uint64_t name_bytes;
    /// Tenant number, for fairness and statistics.
    uint32_t tenant;
    /// Priority class, 0 to 255; 0 is evicted first. Needs KVT_SESSION_PRIORITY.
    uint32_t priority;
    /// Expected maximum length in tokens, for policies; not enforced; 0 = unknown.
    uint32_t max_tokens;
    uint32_t reserved;
} kvt_session_opts_t;

/// What the engine expects of the future of objects.
typedef struct kvt_policy_hint_t {
    uint64_t struct_size;
    /// KVT_HINT_*.
    uint64_t flags;
    /// Expected time of the next use, by the clock of now_ns; 0 = unknown.
    int64_t next_use_ns;
    /// Confidence of next_use_ns, 0 to 1; 0 = 1, unless KVT_HINT_ZERO_CONFIDENCE is set.
    double confidence;
    /// KVT_STOP_* of the request that used the objects.
    uint32_t stop;
    uint32_t reserved;
} kvt_policy_hint_t;

/// Length and layout of a session.
typedef struct kvt_session_info_t {
    uint64_t struct_size;
    uint64_t tokens;
    uint64_t full_chunks;
    /// Tokens per chunk.
    uint32_t chunk_tokens;
    uint32_t layers;
} kvt_session_info_t;

/// One plane (K or V) of one layer in the engine's memory, from the first token of a transfer on.
/// The bytes of one head of a token are contiguous; tokens and heads have constant strides. The
/// tokens are at one address or in pages. All zero = no such plane. Stands in arrays and in other
/// structs.
typedef struct kvt_view_t {
    /// Address of the first token; null with pages.
    void *address;
    /// Address of each page; null with an address.
    void *const *pages;
    /// At most 2^24.
    uint64_t page_count;
    /// Added to the address of each page: one page table serves K, V and all layers.
    int64_t shift_bytes;
    /// Tokens of a page.
    uint32_t page_tokens;
    /// Tokens of the view (chunks, for a layer with a state); 0 = as many as the transfer has or,
    /// with pages, as the pages hold. With an address it must be set where no transfer gives a
    /// number: in kvt_rows_t, in kvt_copy_t, and for a transfer to the end of a session.
    uint32_t tokens;
    /// Heads of a token; 0 = 1.
    uint32_t heads;
    /// KVT_MEMORY_*.
    uint32_t memory;
    /// Bytes of one head of a token; heads * run_bytes must be what the layout says.
    uint64_t run_bytes;
    /// Bytes from a token to the next; 0 = heads * run_bytes.
    uint64_t token_stride_bytes;
    /// Bytes from a head to the next; 0 = run_bytes.
    uint64_t head_stride_bytes;
} kvt_view_t;

/// A range of tokens by a range of layers of a session, and the engine's tensors for them.
typedef struct kvt_transfer_t {
    uint64_t struct_size;
    /// KVT_TRANSFER_*.
    uint64_t flags;
    /// A multiple of chunk_tokens.
    uint64_t first_token;
    /// Up to a multiple of chunk_tokens or the end of the session. 0 = to the end at submission;
    /// views must then state their tokens.
    uint64_t tokens;
    uint32_t first_layer;
    /// 0 = all from first_layer on.
    uint32_t layers;
    /// One view per layer of K, the latent or the states; null for a prefetch.
    const struct kvt_view_t *k;
    /// One view per layer of V, all zero for a layer without V; null if none of the layers has V.
    const struct kvt_view_t *v;
    uint64_t stride_bytes;
    /// KVT_LEVEL_*; puts only.
    uint32_t level;
    uint32_t reserved;
    /// The transfer begins when this event is signalled: sources are complete then, targets unused.
    /// Null = at once. At most 65536 transfers wait for one event. The handle may be closed after
    /// the signal. To read from disk in the meantime, submit a prefetch first.
    const struct kvt_ready_event_t *ready;
    /// Gets and prefetches: only these chunks, for example those that a sparse policy selects.
    /// Ascending; 0 = the chunk of first_token. Views have the tokens of these chunks without gaps.
    /// Null = all.
    const uint32_t *chunks;
    /// At most 2^22; not 0 unless chunks is null.
    uint64_t chunk_count;
    /// Event of the store's device (kvt_device_copy, kvt_device_launch, kvt_device_import_event,
    /// kvt_device_create_event); 0 = none. Not for prefetches. Copies between tensors and store run
    /// after it, on the device; no thread waits. Reads from disk do not wait for it. The caller
    /// keeps the event, may use it for several transfers, and releases it after the last of their
    /// ops. If it fails, or is released before the library saw it complete, the transfer fails with
    /// that status, and tensors of cells that were not copied are unchanged. With `ready`, the
    /// transfer waits for both.
    uint64_t after;
} kvt_transfer_t;

/// How the engine will run, as input of a plan.
typedef struct kvt_plan_terms_t {
    uint64_t struct_size;
    /// KVT_PLAN_NO_OVERLAP, KVT_PLAN_NO_WAIT, KVT_PLAN_COST.
    uint64_t flags;
    /// With KVT_PLAN_COST: nanoseconds per token and token of context, 0 to 1e15. Without it, plans
    /// use the cost of kvt_namespace_prefill_cost.
    double alpha_ns;
    /// With KVT_PLAN_COST: nanoseconds per token, 0 to 1e15.
    double beta_ns;
    /// KVT_PRIORITY_* of the loads.
    uint32_t priority;
    uint32_t reserved;
} kvt_plan_terms_t;

/// Successive tokens with the same step.
typedef struct kvt_plan_step_t {
    uint64_t first_token;
    uint64_t tokens;
    /// KVT_PLAN_RESIDENT, KVT_PLAN_LOAD or KVT_PLAN_RECOMPUTE.
    uint32_t kind;
    /// Slowest tier that anything is loaded from, KVT_TIER_*; KVT_TIER_NONE if nothing is.
    uint32_t tier;
    /// Bytes to load from each tier.
    uint64_t host_bytes;
    uint64_t disk_bytes;
    uint64_t remote_bytes;
    /// Predicted time of this step alone.
    uint64_t predicted_ns;
    /// Bytes to copy from the device tier, on the device.
    uint64_t device_bytes;
} kvt_plan_step_t;

/// Totals of a plan.
typedef struct kvt_plan_t {
    uint64_t struct_size;
    /// All tokens of the session; the next three counts add up to it.
    uint64_t tokens;
    uint64_t resident_tokens;
    uint64_t load_tokens;
    uint64_t recompute_tokens;
    /// Predicted time until all KV is available, queues included.
    uint64_t total_ns;
    /// Predicted time of the loads alone, queues included.
    uint64_t load_ns;
    /// Predicted time of the computation alone.
    uint64_t compute_ns;
    /// Predicted time to compute all tokens instead.
    uint64_t without_ns;
} kvt_plan_t;

/// An image or a sound in a sequence.
typedef struct kvt_media_t {
    /// Index of its first token in the sequence.
    uint64_t token;
    /// Hash of its content: 32 bytes of a hash of at least 256 bits.
    uint8_t digest[32];
} kvt_media_t;

/// Tokens, and the media that start in them.
typedef struct kvt_sequence_t {
    uint64_t struct_size;
    const uint32_t *tokens;
    /// At most 2^27.
    uint64_t token_count;
    /// Ascending by token, at most one per token; null = none.
    const struct kvt_media_t *media;
    /// At most 2^24.
    uint64_t media_count;
    uint64_t media_stride_bytes;
} kvt_sequence_t;

/// Names of blocks: any bytes. Equal names must mean equal content, so a name is, for example, the
/// engine's hash of all that the content depends on, except the namespace's identity.
typedef struct kvt_block_names_t {
    uint64_t struct_size;
    /// The names one after the other, without gaps.
    const uint8_t *bytes;
    /// End of each name as an offset from `bytes`, ascending; null = all have each_bytes bytes.
    const uint64_t *ends;
    /// 1 to 65536; 0 if `ends` is set.
    uint64_t each_bytes;
    /// At most 65536; 2^22 for kvt_namespace_block_keys and kvt_namespace_blocks_exist.
    uint64_t count;
} kvt_block_names_t;

/// Blocks to transfer, and the engine's tensors for them.
typedef struct kvt_blocks_t {
    uint64_t struct_size;
    /// 0; none are defined.
    uint64_t flags;
    /// 1 to 65536 names.
    const struct kvt_block_names_t *names;
    uint32_t first_layer;
    /// 0 = all from first_layer on.
    uint32_t layers;
    /// One view per layer of K, the latent or the states: the tokens of all blocks, in the order of
    /// their names. Pages of chunk_tokens tokens give each block an address of its own. Null for a
    /// prefetch.
    const struct kvt_view_t *k;
    /// This and the next fields: see kvt_transfer_t.
    const struct kvt_view_t *v;
    uint64_t stride_bytes;
    uint32_t level;
    uint32_t reserved;
    const struct kvt_ready_event_t *ready;
    uint64_t after;
} kvt_blocks_t;

/// Counts of chunks after a clear or drop.
typedef struct kvt_clear_report_t {
    uint64_t struct_size;
    /// Removed from all tiers.
    uint64_t removed_chunks;
    /// Kept: sessions, transfers or pins reference them, or a kept chunk continues them.
    uint64_t referenced_chunks;
    /// Kept, because they were moving between tiers: call again.
    uint64_t transferring_chunks;
} kvt_clear_report_t;

/// Counts of chunks after a demotion.
typedef struct kvt_demote_report_t {
    uint64_t struct_size;
    /// They were on disk already: their memory is freed.
    uint64_t freed_chunks;
    /// Their memory is freed once they are written to disk.
    uint64_t pending_chunks;
    /// They stay in memory: there is no disk.
    uint64_t kept_chunks;
} kvt_demote_report_t;

/// Candidates as columns: one array per property, with `rows` entries each. A null array means that
/// every row has the default. Arrays are aligned as C requires.
typedef struct kvt_policy_columns_t {
    uint64_t struct_size;
    /// Number of candidates, up to 2^28.
    uint64_t rows;
    /// Required; each id once.
    const uint64_t *ids;
    /// Blocks of the candidate, up to 2^32 - 1; default: those listed in block_ids, else 1.
    const uint64_t *blocks;
    /// Time of creation; default 0.
    const int64_t *created_ns;
    /// Time of the last use; default: created_ns.
    const int64_t *last_access_ns;
    /// Number of uses; default 1.
    const uint64_t *count;
    /// Class, 0 is evicted first; default 1.
    const uint8_t *priority;
    /// Not 0: never chosen.
    const uint8_t *pinned;
    /// Time until the next use or the end; below 0 = unknown, the default.
    const int64_t *lifetime_ns;
    /// Confidence of lifetime_ns, 0 to 1; default 1.
    const float *confidence;
    /// Tokens of the candidate; default 0.
    const uint64_t *length;
    /// Most tokens that the candidate can have; 0 = unknown, the default.
    const uint64_t *max_length;
    /// Holders; above 1 the candidate is shared and never chosen; default 1.
    const uint32_t *refs;
    /// Default 0.
    const uint32_t *tenant;
    /// Recompute cost; 0, the default = computed from context and tokens.
    const double *cost;
    /// Tokens before the candidate; default 0.
    const uint64_t *context;
    /// Tokens in the candidate; default: length.
    const uint64_t *tokens;
    /// Layer of a cell; default 0.
    const uint32_t *layer;
    /// Layers of the model, for cells; default 0.
    const uint32_t *layers;
    /// Index of the chunk in its sequence; default 0.
    const uint32_t *chunk;
    /// Chunks of that sequence; default 0.
    const uint32_t *chunks;
    /// rows + 1 entries: start of each row's blocks in block_ids, and the end of the last. Null:
    /// blocks are only counted.
    const uint64_t *block_offsets;
    /// Blocks of all rows, those of a row in the order of its tokens. A block that several rows
    /// list is shared: it counts once, and is free when all its holders are evicted.
    const uint64_t *block_ids;
    /// Holders of each entry of block_ids, including those that are no rows; 0, the default = the
    /// rows that list it.
    const uint32_t *block_refs;
    /// Entries of block_ids and of block_refs, up to 2^28.
    uint64_t block_entries;
} kvt_policy_columns_t;

/// Scores candidates for the policy "custom": writes one number per row to `out_scores`. The lowest
/// score is evicted first; NaN is an error. Any status but KVT_OK fails the calling function with
/// that status, without effect. Columns and scores are borrowed for the call. The function must not
/// unwind.
///
/// An eviction skips objects that were used, referenced or removed meanwhile. If too little is free
/// then, it scores again, at most 4 times in all; an error in a repetition is a shortfall.
///
/// Threading: called on the thread that evicts or selects, under no lock, so on several threads at
/// once. It may use the policy.
typedef kvt_status_t (*kvt_policy_score_fn)(void *user_data,
                                            const struct kvt_policy_columns_t *columns,
                                            int64_t now_ns,
                                            double *out_scores);

/// Callback table of the policy "custom".
typedef struct kvt_policy_custom_t {
    uint64_t struct_size;
    kvt_policy_score_fn score;
    /// Passed to score; owned by the policy once it is open.
    void *user_data;
    /// Releases user_data; may be null.
    kvt_destroy_fn destroy;
} kvt_policy_custom_t;

/// Predicts when a sequence is used next or ends: seconds from now, with a confidence of 0 to 1.
/// Returns 1, or 0 if unknown; values out of range count as unknown. Lengths are in tokens,
/// 0 = unknown. It is called
///
/// - after kvt_policy_lookup and kvt_policy_record with a session, which is `sequence`: the
///   prediction acts as a hint;
/// - in kvt_policy_select for each row without a lifetime: `sequence` is the id.
///
/// Threading and unwinding: as for kvt_policy_score_fn.
typedef uint32_t (*kvt_policy_predict_fn)(void *user_data,
                                          uint64_t sequence,
                                          uint64_t length,
                                          uint64_t max_length,
                                          double *out_seconds,
                                          double *out_confidence);

/// The engine's predictor of next uses and lifetimes.
typedef struct kvt_policy_predictor_t {
    uint64_t struct_size;
    kvt_policy_predict_fn predict;
    /// Passed to predict; owned by the policy once it is open.
    void *user_data;
    /// Releases user_data; may be null.
    kvt_destroy_fn destroy;
} kvt_policy_predictor_t;

/// Options of kvt_policy_open.
typedef struct kvt_policy_opts_t {
    uint64_t struct_size;
    /// KVT_POLICY_*.
    uint64_t flags;
    /// Such as "arc" or "qos(inner=s3fifo)"; null = "lru".
    const char *spec;
    uint64_t spec_bytes;
    /// Most objects in the table, up to 2^28; 0 = 1048576.
    uint64_t max_objects;
    /// Capacity of the cache in units; 0 = unknown.
    uint64_t capacity_units;
    /// Evictions that the log keeps, up to 2^20; 0 = none.
    uint64_t log_entries;
    /// Evicted ids that are remembered for the re-prefill rate, up to 2^28; 0 = 1048576.
    uint64_t remember;
    /// 0 to 1e12; 0 = 1 / 53800. Recomputing n tokens after l tokens of context costs n * beta +
    /// alpha * (n * l + n * n / 2). The defaults describe a model of the 70B class.
    double alpha;
    /// 0 to 1e12; 0 = 1. See alpha.
    double beta;
    /// Score function. The spec "custom" needs it; else it may be null.
    const struct kvt_policy_custom_t *custom;
    /// May be null.
    const struct kvt_policy_predictor_t *predictor;
} kvt_policy_opts_t;

/// A policy that can be opened. Texts are not NUL-terminated and live as long as the library.
typedef struct kvt_policy_info_t {
    uint64_t struct_size;
    /// Name in specs.
    const char *name;
    uint64_t name_bytes;
    /// Description in one line.
    const char *about;
    uint64_t about_bytes;
} kvt_policy_info_t;

/// The request that a call belongs to. Every field is optional.
typedef struct kvt_policy_context_t {
    uint64_t struct_size;
    /// KVT_CONTEXT_*.
    uint64_t flags;
    /// The caller's id of a sequence; needs KVT_CONTEXT_SESSION.
    uint64_t session;
    /// Tenant of the session; must be 0 without KVT_CONTEXT_SESSION.
    uint32_t tenant;
    /// Class of the session, 0 to 255; 0 is evicted first. Without KVT_CONTEXT_PRIORITY the class
    /// stays as it is, at first 1.
    uint32_t priority;
    /// Tokens of the whole request; 0 = tokens_each for each id.
    uint32_t length;
    /// Most tokens that the sequence can have; 0 = unknown.
    uint32_t max_length;
    /// Tokens of each object of the path, of which the last may have fewer; 0 = 1.
    uint32_t tokens_each;
    uint32_t reserved;
} kvt_policy_context_t;

/// An object to insert.
typedef struct kvt_policy_object_t {
    /// The caller's id.
    uint64_t id;
    /// Id of the object that this one continues; needs KVT_OBJECT_HAS_PARENT. It may be inserted later.
    uint64_t parent;
    /// Size, 1 to 2^32 - 1.
    uint64_t units;
    /// KVT_OBJECT_*.
    uint64_t flags;
    /// Expected time of the next use, by the clock of now_ns; 0 = unknown.
    int64_t next_use_ns;
    /// Recompute cost; 0 = computed from context and tokens.
    double cost;
    /// Tokens before the object.
    uint32_t context;
    /// Tokens in the object.
    uint32_t tokens;
    /// Layer of a cell, up to 65535.
    uint32_t layer;
    /// Layers of the model, up to 65535; 0 = the object has all layers.
    uint32_t layers;
    /// Index of the chunk in its sequence.
    uint32_t chunk;
    /// Chunks of that sequence.
    uint32_t chunks;
} kvt_policy_object_t;

/// An evicted object.
typedef struct kvt_policy_victim_t {
    uint64_t id;
    /// Units that it frees.
    uint64_t units;
} kvt_policy_victim_t;

/// The result of an eviction.
typedef struct kvt_policy_outcome_t {
    uint64_t struct_size;
    /// Number of victims.
    uint64_t victims;
    /// Units that the victims free.
    uint64_t freed_units;
    /// Units missing to the number required.
    uint64_t shortfall_units;
    /// Time of the decision; 0 = not measured (1 eviction in 16 is, no preview).
    uint64_t decision_ns;
    /// Policy that decided, maybe not the one opened. The text lives as long as the library.
    const char *decided_by;
    uint64_t decided_by_bytes;
} kvt_policy_outcome_t;

/// A chosen candidate.
typedef struct kvt_policy_pick_t {
    /// Index of its row.
    uint64_t row;
    uint64_t id;
    /// Blocks that it frees.
    uint64_t freed_blocks;
    /// Leading blocks that it keeps; 0 = it is evicted.
    uint64_t kept_blocks;
    /// Index in the selection's block_ids of the first block that it frees.
    uint64_t first_block;
} kvt_policy_pick_t;

/// The result of a selection. Set the fields marked "In" before the call.
typedef struct kvt_policy_selection_t {
    uint64_t struct_size;
    /// In: receives the chosen candidates in the order of eviction.
    struct kvt_policy_pick_t *victims;
    /// In: entries of `victims`; as many as rows are always enough.
    uint64_t victim_capacity;
    /// In: sizeof(kvt_policy_pick_t).
    uint64_t stride_bytes;
    /// In: receives the freed blocks by victim, if the columns list blocks; may be null.
    uint64_t *block_ids;
    /// In: entries of `block_ids`.
    uint64_t block_capacity;
    /// Victims chosen; with KVT_E_TOO_SMALL the capacity needed.
    uint64_t victim_count;
    /// Blocks in block_ids; with KVT_E_TOO_SMALL the capacity needed.
    uint64_t block_count;
    uint64_t freed_blocks;
    /// Blocks missing to the number required.
    uint64_t shortfall_blocks;
    /// Time of the decision.
    uint64_t decision_ns;
    /// Policy that decided, maybe not the one opened. The text lives as long as the library.
    const char *decided_by;
    uint64_t decided_by_bytes;
} kvt_policy_selection_t;

/// Statistics of a policy since it was opened. Without lookups, ratios and rates are 0 and Jain's
/// indices 1.
typedef struct kvt_policy_stats_t {
    uint64_t struct_size;
    /// Objects in the table.
    uint64_t objects;
    uint64_t max_objects;
    /// Sum of the objects' sizes.
    uint64_t units;
    /// 0 = unknown.
    uint64_t capacity_units;
    /// Known sessions.
    uint64_t sessions;
    /// Tenants counted separately, up to 1024; the others count as one.
    uint64_t tenants;
    /// Lookups.
    uint64_t requests;
    /// Objects looked up, in all lookups.
    uint64_t references;
    /// References that found a usable object.
    uint64_t hits;
    /// References to objects that were evicted before and are missing: to be recomputed.
    uint64_t evicted_references;
    /// Tokens looked up.
    uint64_t tokens;
    /// Tokens found.
    uint64_t hit_tokens;
    /// Recompute cost of the tokens looked up.
    double cost;
    /// Recompute cost of the tokens found.
    double hit_cost;
    /// Objects inserted.
    uint64_t inserts;
    /// Objects evicted.
    uint64_t evictions;
    /// Units evicted.
    uint64_t evicted_units;
    /// Evictions and selections called.
    uint64_t decisions;
    /// Decisions that freed less than required.
    uint64_t shortfalls;
    /// Decisions that were timed: every selection, 1 eviction in 16 (by "custom": every one).
    uint64_t decisions_timed;
    /// Times of these decisions: median, 99th percentile, maximum, mean.
    uint64_t decision_p50_ns;
    uint64_t decision_p99_ns;
    uint64_t decision_max_ns;
    uint64_t decision_mean_ns;
    /// hits / references.
    double hit_ratio;
    /// hit_tokens / tokens.
    double token_hit_ratio;
    /// hit_cost / cost.
    double cost_hit_ratio;
    /// evicted_references / references.
    double re_prefill_rate;
    /// Jain's index, over sessions, of the tokens found per token that an unbounded cache would
    /// have found: 1 if all are equal, 1/n if one of n has everything.
    double jain_sessions;
    /// The same over tenants.
    double jain_tenants;
    /// Metadata bytes per object of a full table.
    double bytes_per_object;
    /// Number of the next eviction in the log.
    uint64_t next_log_number;
    /// Name of the policy; lives as long as the library.
    const char *name;
    uint64_t name_bytes;
} kvt_policy_stats_t;

/// Advice for a scheduler.
typedef struct kvt_policy_advice_t {
    uint64_t struct_size;
    /// Batch size to run next.
    uint64_t batch;
    /// Re-prefill rate of the last full window.
    double re_prefill_rate;
    /// Evictions in that window.
    uint64_t evictions;
} kvt_policy_advice_t;

/// Rules of the advice.
typedef struct kvt_policy_advice_rules_t {
    uint64_t struct_size;
    /// KVT_ADVICE_*.
    uint64_t flags;
    /// Re-prefill rate of a window above which batches are halved, 0 to 1; 0 = 0.3.
    double shrink_above;
    /// Evictions in a window below which batches are doubled; 0 = 10.
    uint64_t grow_below;
    /// Smallest batch; 0 = 1.
    uint64_t min_batch;
    /// Largest batch; 0 = 128.
    uint64_t max_batch;
    /// Lookups in a window; 0 = 100.
    uint64_t window;
    /// Consecutive windows that must agree; 0 = 2.
    uint64_t patience;
} kvt_policy_advice_rules_t;

/// Attention shape of a model.
typedef struct kvt_attention_t {
    uint64_t struct_size;
    /// 1 to 2048.
    uint32_t layers;
    /// 1 to 1024, a multiple of key_heads.
    uint32_t query_heads;
    /// At least 1; 1 with KVT_ATTENTION_LATENT.
    uint32_t key_heads;
    /// Elements of a query and key head, 1 to 2048.
    uint32_t key_dim;
    /// Elements of a value head, 1 to 2048; at most key_dim with KVT_ATTENTION_LATENT.
    uint32_t value_dim;
    /// KVT_ATTENTION_*.
    uint32_t kind;
    /// Tokens of a block, the unit of loading: 1 to 2^20. With a session: its chunk_tokens.
    uint32_t block_tokens;
    /// Longest sequence, 1 to 2^30 tokens.
    uint32_t max_tokens;
    /// Factor of query-key products, finite; 0 = 1 / sqrt(key_dim).
    float scale;
    uint32_t reserved;
} kvt_attention_t;

/// Traits of a policy. They suffice to serve a policy without knowing its name.
typedef struct kvt_sparse_traits_t {
    uint64_t struct_size;
    /// KVT_SPARSE_LOAD_*, _INDEX_*, _EVICT_*. Other calls return KVT_E_UNSUPPORTED.
    uint32_t caps;
    /// KVT_NEEDS_*. Other inputs are ignored, except that kvt_sparse_add_scores rejects them.
    uint32_t needs;
    /// KVT_SCOPE_*.
    uint32_t scope;
    /// KVT_GRANULARITY_*.
    uint32_t granularity;
    /// KVT_SPARSE_RAGGED, KVT_SPARSE_SELECTS, KVT_SPARSE_ROTATES.
    uint64_t flags;
    /// Number of first layers that are not restricted, 0 to all.
    uint32_t dense_layers;
    /// Last queries of a prompt whose attention kvt_sparse_observe takes; 0 = none, UINT32_MAX =
    /// all. A policy that evicts in decode also takes that of each step.
    uint32_t sum_queries;
    /// kvt_sparse_select takes the query of this many layers earlier; 0 = the layer's own query.
    uint32_t ahead;
    /// Query heads of rows of the policy's own (as `dsa` has); 0 = the model's rows.
    uint32_t own_query_heads;
    /// Key heads of these rows; all own_* fields are set, or all are 0.
    uint32_t own_key_heads;
    /// Elements of a query or key head of these rows.
    uint32_t own_dim;
} kvt_sparse_traits_t;

/// Queries, keys or values that the library reads: one row of `dim` elements per token and head.
typedef struct kvt_rows_t {
    uint64_t struct_size;
    /// Host memory, aligned for the dtype. run_bytes gives dim: 1 to 2048 whole elements.
    struct kvt_view_t view;
    /// KVT_DTYPE_F32, _F16, _BF16 or _I8.
    uint32_t dtype;
    /// KVT_SCALES_*; only _I8 has scales.
    uint32_t scaling;
    /// Null with KVT_SCALES_NONE.
    const float *scales;
    /// Exactly as many as `scaling` says.
    uint64_t scale_count;
} kvt_rows_t;

/// Called before a block of a layer is moved away. `block` is its id as a candidate, `first` the
/// position of its first token; `keys` has its `keys->view.tokens` valid tokens.
typedef kvt_status_t (*kvt_on_prefill_offload_fn)(void *user_data,
                                                  uint32_t block,
                                                  uint32_t layer,
                                                  uint32_t first,
                                                  const struct kvt_rows_t *keys);

/// Called when a block that was written token by token is complete. `keys` has an entry for each
/// layer, `keys->struct_size` bytes apart.
typedef kvt_status_t (*kvt_on_decode_offload_fn)(void *user_data,
                                                 uint32_t block,
                                                 uint32_t first,
                                                 const struct kvt_rows_t *keys,
                                                 uint32_t layers);

/// Place of a call in its sequence.
typedef struct kvt_sparse_context_t {
    uint64_t struct_size;
    /// 1 = prefill, 0 = decode.
    uint32_t is_prefill;
    /// Index of this part of the prompt, below `parts`.
    uint32_t part;
    /// Parts in which the prompt is computed; 0 = 1.
    uint32_t parts;
    /// Position of the first query, at most `tokens`.
    uint32_t first_query;
    /// Tokens of the sequence, those of the queries included.
    uint32_t tokens;
    uint32_t reserved;
} kvt_sparse_context_t;

/// Selects blocks for `query`. Writes at most candidate_count ids to `ids`, in any order, each a
/// candidate and each once, and their number to `out_count`. `query` may be null.
typedef kvt_status_t (*kvt_select_blocks_fn)(void *user_data,
                                             uint32_t layer,
                                             const struct kvt_rows_t *query,
                                             const uint32_t *candidates,
                                             uint64_t candidate_count,
                                             const struct kvt_sparse_context_t *context,
                                             uint32_t *ids,
                                             uint64_t *out_count);

/// How the lists of a head are read. Heads may share lists.
typedef struct kvt_index_head_t {
    /// KVT_INDEX_*.
    uint32_t kind;
    /// Index of its first list.
    uint32_t first;
    /// Number of its lists.
    uint32_t lists;
    /// Blocks and ranges: queries in a row, counted from the first computed query; 0 = all queries
    /// are one row.
    uint32_t query_block;
    /// Blocks: keys in a block.
    uint32_t key_block;
    /// Queries from this position on see all keys; UINT32_MAX = no query does, 0 = all do.
    uint32_t dense_from;
} kvt_index_head_t;

/// Keys that queries are computed with, chosen by a policy or by the engine. A query never sees
/// keys after its own position. Items of a list ascend strictly. Capacities are for outputs.
typedef struct kvt_index_t {
    uint64_t struct_size;
    /// How lists are read. 0 heads = all keys; 1 = all heads share it; otherwise one for each query
    /// head, or one for each key head.
    struct kvt_index_head_t *heads;
    uint64_t head_capacity;
    uint64_t head_count;
    /// Start of each list in `items`, then the end of the last list.
    uint32_t *starts;
    uint64_t start_capacity;
    uint64_t start_count;
    /// Contents of all lists.
    uint32_t *items;
    uint64_t item_capacity;
    uint64_t item_count;
} kvt_index_t;

/// Selects the keys that queries are computed with. Points the arrays of `out` at memory of its
/// own, valid until the next call, and sets their counts; counts left at 0 = all keys. `keys` may
/// be null.
typedef kvt_status_t (*kvt_sparse_index_fn)(void *user_data,
                                            uint32_t layer,
                                            const struct kvt_rows_t *queries,
                                            const struct kvt_rows_t *keys,
                                            const struct kvt_sparse_context_t *context,
                                            struct kvt_index_t *out);

/// Computes the attention of a prompt for kvt_sparse_prefill_attention. Writes [queries, query
/// heads, value dim] to `out`, and [queries, query heads] to `lse` unless it is null.
/// KVT_E_UNSUPPORTED = the library's kernel computes it, by the index.
typedef kvt_status_t (*kvt_sparse_attention_fn)(void *user_data,
                                                uint32_t layer,
                                                const struct kvt_rows_t *queries,
                                                const struct kvt_rows_t *keys,
                                                const struct kvt_rows_t *values,
                                                const struct kvt_sparse_context_t *context,
                                                float *out,
                                                float *lse);

/// Takes the attention that each of `tokens` resident tokens received from `queries` queries:
/// `count` sums. See kvt_sparse_observe.
typedef kvt_status_t (*kvt_sparse_observe_fn)(void *user_data,
                                              uint32_t layer,
                                              uint32_t queries,
                                              const float *sums,
                                              uint64_t count,
                                              uint32_t tokens);

/// Retained tokens: ascending positions, one list for each key head, for each query head, or one
/// for all heads. In an answer, no list = all tokens stay. An argument has at least one list.
typedef struct kvt_token_lists_t {
    uint64_t struct_size;
    /// Start of each list in `items`, then the end of the last: the number of lists plus 1.
    uint32_t *starts;
    uint64_t start_capacity;
    uint64_t start_count;
    /// Positions of tokens.
    uint32_t *items;
    uint64_t item_capacity;
    uint64_t item_count;
} kvt_token_lists_t;

/// Chooses the tokens of a layer that stay. Fills `out` as kvt_sparse_index_fn does; counts left at
/// 0 = all tokens stay.
typedef kvt_status_t (*kvt_sparse_evict_fn)(void *user_data,
                                            uint32_t layer,
                                            const struct kvt_sparse_context_t *context,
                                            struct kvt_token_lists_t *out);

/// Called after an eviction: only the tokens in `kept` are left in the layer.
typedef kvt_status_t (*kvt_sparse_evicted_fn)(void *user_data,
                                              uint32_t layer,
                                              const struct kvt_token_lists_t *kept);

/// Truncates the sequence to `tokens` tokens; 0 = a new sequence starts.
typedef kvt_status_t (*kvt_sparse_truncate_fn)(void *user_data, uint32_t tokens);

/// Creates the user data of a copy, which continues from the same state with the same callbacks.
typedef kvt_status_t (*kvt_sparse_fork_fn)(void *user_data, void **copy_out);

/// A custom policy: callbacks of the engine. They may be null unless the traits require them. They
/// run on the thread that calls the policy or the offload, one at a time, and must not unwind.
/// Arguments are borrowed for the call. A status other than KVT_OK fails the engine's call with
/// that status. From a callback, calls on the same policy return KVT_E_BUSY, on the same offload
/// KVT_E_REENTRANT.
typedef struct kvt_sparse_custom_t {
    uint64_t struct_size;
    /// caps is 1 to 63.
    const struct kvt_sparse_traits_t *traits;
    kvt_on_prefill_offload_fn on_prefill_offload;
    /// Null = on_prefill_offload is called for each layer.
    kvt_on_decode_offload_fn on_decode_offload;
    /// Required for KVT_SPARSE_LOAD_* and KVT_SPARSE_SELECTS.
    kvt_select_blocks_fn select_blocks;
    /// Required for KVT_SPARSE_INDEX_*; for KVT_SPARSE_INDEX_PREFILL, sparse_prefill_attention
    /// alone is enough.
    kvt_sparse_index_fn index;
    kvt_sparse_attention_fn sparse_prefill_attention;
    /// For KVT_NEEDS_COLUMN_SUMS.
    kvt_sparse_observe_fn observe;
    /// Required for KVT_SPARSE_EVICT_*.
    kvt_sparse_evict_fn evict;
    kvt_sparse_evicted_fn evicted;
    kvt_sparse_truncate_fn truncate;
    /// Null = the policy cannot be forked.
    kvt_sparse_fork_fn fork;
    /// Passed to all callbacks. The library owns it once the policy or the offload is open.
    void *user_data;
    /// Destroys user_data, and that of each copy; may be null.
    kvt_destroy_fn destroy;
} kvt_sparse_custom_t;

/// Options of kvt_sparse_open. Exactly one of `spec` and `custom` is set.
typedef struct kvt_sparse_opts_t {
    uint64_t struct_size;
    /// Always 0.
    uint64_t flags;
    /// Attention shape of the model.
    const struct kvt_attention_t *attention;
    /// Spec string, such as "minference(budget=0.2)"; see docs/sparse.md.
    const char *spec;
    uint64_t spec_bytes;
    /// Callbacks of the engine that make up a policy.
    const struct kvt_sparse_custom_t *custom;
    /// Account that pays for the policy's state in host memory; may be null. While it cannot, calls
    /// that add input return KVT_E_BUDGET and change nothing.
    const struct kvt_account_t *account;
} kvt_sparse_opts_t;

/// Counters since the policy was opened. A fork starts at 0.
typedef struct kvt_sparse_stats_t {
    uint64_t struct_size;
    /// Bytes of state of the sequence that the policy holds now.
    uint64_t state_bytes;
    /// Answered selections (kvt_sparse_select).
    uint64_t selections;
    /// Candidates in them.
    uint64_t candidates;
    /// Candidates chosen to be loaded.
    uint64_t chosen;
    /// Candidates that need not be loaded.
    uint64_t spared;
    /// Selections that were compared with the choice of the layer's own query.
    uint64_t audited;
    /// Blocks that the own queries would have chosen.
    uint64_t wanted;
    /// Blocks of `wanted` that were chosen: found / wanted is the recall.
    uint64_t found;
} kvt_sparse_stats_t;

/// A policy that kvt_sparse_open knows. Texts live as long as the library and have no NUL.
typedef struct kvt_sparse_info_t {
    uint64_t struct_size;
    /// Name in specs.
    const char *name;
    uint64_t name_bytes;
    /// Description, one line.
    const char *about;
    uint64_t about_bytes;
} kvt_sparse_info_t;

/// Tokens in a buffer, in the order of their positions: full blocks of a sequence, then its tail.
typedef struct kvt_block_placement_t {
    uint64_t struct_size;
    /// Blocks, ascending: block n starts at position n * block_tokens.
    const uint32_t *blocks;
    /// At most 2^28.
    uint64_t block_count;
    /// Tokens of a block, at least 1.
    uint32_t block_tokens;
    /// Position of the first token of the tail, after all blocks.
    uint32_t tail_first;
    /// Tokens of the tail.
    uint32_t tail_tokens;
    uint32_t reserved;
} kvt_block_placement_t;

/// Resident tokens of a layer, in the order in which kvt_sparse_observe counts them.
typedef struct kvt_resident_tokens_t {
    uint64_t struct_size;
    /// Attention shape of the model.
    const struct kvt_attention_t *attention;
    /// Lists of the last kvt_sparse_commit_eviction; null = nothing was evicted.
    const struct kvt_token_lists_t *kept;
    /// Tokens from this position on came after it and are all resident; 0 without `kept`.
    uint32_t since;
    /// Tokens of the sequence.
    uint32_t tokens;
} kvt_resident_tokens_t;

/// Largest sizes of problems, independent of each other. Each is at least 1.
typedef struct kvt_kernel_limits_t {
    uint64_t struct_size;
    /// KVT_DECODE_*.
    uint64_t flags;
    /// Queries of a problem, at most `tokens`.
    uint32_t queries;
    /// Keys of a problem, at most 2^30.
    uint32_t keys;
    /// Positions of a sequence, at most 2^30.
    uint32_t tokens;
    uint32_t query_heads;
    /// Elements of a query or key head, at most 2,048.
    uint32_t key_dim;
    /// Elements of a value head, at most 2,048.
    uint32_t value_dim;
} kvt_kernel_limits_t;

/// Size of a job.
typedef struct kvt_attention_job_info_t {
    uint64_t struct_size;
    /// 1, or 2 for a decode.
    uint32_t steps;
    /// Items of step 0.
    uint32_t items;
    /// Items of step 1; 0 = the job has one step.
    uint32_t last_items;
    uint32_t reserved;
    /// f32 elements of scratch that each thread needs.
    uint64_t scratch_count;
    /// Keys per head in kvt_decode_sums; 0 without KVT_DECODE_SCORES.
    uint64_t sum_keys;
} kvt_attention_job_info_t;

/// Input of an attention kernel. Queries see the keys up to their own position.
typedef struct kvt_attention_args_t {
    uint64_t struct_size;
    /// [queries, query_heads, key_dim].
    const struct kvt_rows_t *queries;
    /// [keys, key_heads, key_dim].
    const struct kvt_rows_t *keys;
    /// [keys, key_heads, value_dim]. Latent rows: the first elements of the keys, at the same
    /// address.
    const struct kvt_rows_t *values;
    /// Positions of the keys to use, from kvt_sparse_index or the engine; null = all.
    const struct kvt_index_t *select;
    /// Position of the first query.
    uint32_t first_query;
    /// Position of the first key. If keys come in pieces, kvt_attention_merge merges their results.
    uint32_t first_key;
    /// Factor of query-key products, finite; 0 = 1 / sqrt(key_dim).
    float scale;
    uint32_t reserved;
} kvt_attention_args_t;

/// Options of kvt_offload_open.
typedef struct kvt_offload_opts_t {
    uint64_t struct_size;
    /// KVT_OFFLOAD_ON_DEVICE or 0.
    uint64_t flags;
    /// The session; it stays open until the offload is closed, even if its handle is closed first.
    const struct kvt_session_t *session;
    /// Shape of the attention; block_tokens must be the chunk_tokens of the session's namespace.
    const struct kvt_attention_t *attention;
    /// KVT_DTYPE_* of K and V.
    uint32_t dtype;
    /// Buffers of the ring, 1 to 256. A pass loads up to buffers - 1 layers ahead.
    uint32_t buffers;
    /// Tokens of a buffer, 1 to max_tokens, rounded up to blocks; the tail has room in addition.
    uint32_t buffer_tokens;
    /// KVT_LEVEL_* at which a put completes.
    uint32_t level;
    /// Spec of the sparse policy for prefill; null = all blocks are loaded.
    const char *prefill;
    uint64_t prefill_bytes;
    /// Spec of the sparse policy for decode; null = all blocks are loaded.
    const char *decode;
    uint64_t decode_bytes;
    /// Audit every n-th load that leaves out blocks; 0 = none. An audit loads the keys of all
    /// blocks, and compares the selection with the attention of the layer's own queries.
    uint32_t audit_every;
    uint32_t reserved;
    /// Custom policy instead of `prefill`, or null; called by the threads that call the offload.
    const struct kvt_sparse_custom_t *prefill_custom;
    /// Custom policy instead of `decode`, or null.
    const struct kvt_sparse_custom_t *decode_custom;
    /// With KVT_OFFLOAD_ON_DEVICE: device address of memory that the engine lends for the ring and
    /// the tails until the offload is closed, a multiple of 256. 0 = the device allocates it.
    uint64_t memory;
    /// Bytes of `memory`, at least kvt_offload_memory_bytes.
    uint64_t memory_bytes;
} kvt_offload_opts_t;

/// Counters since the offload was opened. Fields named ..._waits count waits that took time, and
/// the ..._wait_ns after them sum up their durations.
typedef struct kvt_offload_stats_t {
    uint64_t struct_size;
    /// Loads of a layer.
    uint64_t loads;
    /// Loads for which a policy selected blocks.
    uint64_t selections;
    /// Blocks that loads could choose from.
    uint64_t candidates;
    uint64_t loaded_blocks;
    uint64_t loaded_bytes;
    /// Bytes of candidates that were not loaded, because they were not selected.
    uint64_t saved_bytes;
    uint64_t failed_loads;
    /// Blocks that were put into the store.
    uint64_t put_blocks;
    uint64_t put_bytes;
    /// Bytes that were copied to or from tails.
    uint64_t tail_bytes;
    /// Tokens that policies evicted, counted once for each list of retained tokens.
    uint64_t evicted_tokens;
    /// Bytes of the policies' state of the sequence, at present.
    uint64_t policy_bytes;
    /// Waits for loads.
    uint64_t load_waits;
    uint64_t load_wait_ns;
    /// Waits for puts of full tails.
    uint64_t tail_waits;
    uint64_t tail_wait_ns;
    /// Waits for blocks that kvt_offload_truncate divides.
    uint64_t cut_waits;
    uint64_t cut_wait_ns;
    /// Selections by policies.
    uint64_t select_waits;
    uint64_t select_wait_ns;
    /// Loads that were audited.
    uint64_t audited;
    /// Blocks with the most attention in audited loads, as many for each load as it loaded.
    uint64_t wanted;
    /// Wanted blocks that were loaded: found / wanted is the recall of selections.
    uint64_t found;
    /// Share of the attention to blocks that went to loaded ones, in millionths; sum over audits.
    uint64_t found_ppm;
    /// Bytes of keys that were copied from device to host memory for policies.
    uint64_t key_bytes;
} kvt_offload_stats_t;

/// Rows of K and V of a layer in a buffer: blocks in ascending order, then the tail. They are valid
/// until the buffer is given back.
typedef struct kvt_offload_kv_t {
    uint64_t struct_size;
    /// K of the first row; a row has key_heads * key_dim elements. Null if there are no rows.
    const void *k;
    /// V of the first row; a row has key_heads * value_dim elements. Equals `k` for a latent.
    const void *v;
    /// Rows, including those of the tail.
    uint32_t tokens;
    uint32_t tail_tokens;
    /// Blocks before the tail.
    uint32_t blocks;
    /// Index of the buffer in the ring.
    uint32_t buffer;
    /// KVT_MEMORY_* of `k` and `v`.
    uint32_t memory;
    uint32_t reserved;
} kvt_offload_kv_t;

/// A text or a path. Stands in arrays.
typedef struct kvt_str_t {
    const char *text;
    /// Length of the text, or KVT_NUL_TERMINATED.
    uint64_t bytes;
} kvt_str_t;

/// Properties of a model; 0 where its files do not state them.
typedef struct kvt_model_info_t {
    uint64_t struct_size;
    /// Bytes of all tensors.
    uint64_t bytes;
    /// KVT_FORMAT_*.
    uint32_t format;
    /// Numbers of files, units and tensors.
    uint32_t files;
    uint32_t units;
    uint32_t tensors;
    /// Such as "llama".
    const char *architecture;
    uint64_t architecture_bytes;
    uint32_t layers;
    /// Elements of a hidden state.
    uint32_t hidden;
    /// Query heads.
    uint32_t heads;
    /// Key and value heads of a layer, the most where layers differ; 1 where keys are a latent
    /// vector.
    uint32_t kv_heads;
    /// Elements of a stored key.
    uint32_t key_dim;
    /// Elements of a value; 0 beside a key_dim: values are computed from the stored keys.
    uint32_t value_dim;
    /// Longest context in tokens.
    uint32_t context;
    uint32_t vocabulary;
    /// Experts of a layer.
    uint32_t experts;
    /// Experts of a layer that a token uses.
    uint32_t experts_used;
    /// BLAKE3 of the headers, of the lengths of the files, and of the names, types, sizes and
    /// offsets of the tensors. Models that differ only in weights may have the same.
    uint8_t fingerprint[32];
} kvt_model_info_t;

/// A file of a model.
typedef struct kvt_model_file_t {
    uint64_t struct_size;
    const char *path;
    uint64_t path_bytes;
    /// Length of the file.
    uint64_t bytes;
} kvt_model_file_t;

/// A unit of weights: bytes that are needed together and loaded together. Units have the order in
/// which a pass needs them: the embedding, tensors without a role, each layer followed by its
/// experts, the norm, the head. Units of kvt_model_table have the order of the table.
typedef struct kvt_unit_t {
    uint64_t struct_size;
    /// Such as "layer 3 expert 7".
    const char *name;
    uint64_t name_bytes;
    /// KVT_ROLE_*.
    uint32_t role;
    /// Layer and expert; KVT_NONE where the role has none.
    uint32_t layer;
    uint32_t expert;
    /// Parts of tensors in the unit: see kvt_model_unit_parts.
    uint32_t parts;
    /// Bytes of its tensors.
    uint64_t bytes;
    /// Bytes in memory: tensors with their alignment, a multiple of 4096.
    uint64_t image_bytes;
} kvt_unit_t;

/// A tensor in its file.
typedef struct kvt_tensor_t {
    uint64_t struct_size;
    const char *name;
    uint64_t name_bytes;
    /// Data type as the format names it, such as "Q6_K" or "BF16".
    const char *dtype;
    uint64_t dtype_bytes;
    /// Dimensions, the innermost first.
    const uint64_t *dims;
    uint32_t dim_count;
    /// Index of the file; offset and bytes are those in the file.
    uint32_t file;
    uint64_t offset;
    uint64_t bytes;
    /// Parts: 1, or one for each expert; 0 if the tensor has no bytes.
    uint32_t parts;
    uint32_t reserved;
} kvt_tensor_t;

/// A tensor in its unit, or one expert's share of a tensor. Stands in arrays.
typedef struct kvt_part_t {
    uint32_t tensor;
    uint32_t unit;
    /// Offset in the unit: the first byte is at kvt_unit_lease_t.address + at.
    uint64_t at;
    /// Offset in the tensor; 0 unless the tensor is divided between experts.
    uint64_t from;
    /// Length of the part.
    uint64_t bytes;
} kvt_part_t;

/// A byte range of a file. Stands in arrays.
typedef struct kvt_file_range_t {
    /// Index in kvt_model_table_t.paths.
    uint32_t file;
    uint32_t reserved;
    uint64_t offset;
    /// At least 1.
    uint64_t bytes;
} kvt_file_range_t;

/// A unit that the engine names. Stands in arrays.
typedef struct kvt_unit_entry_t {
    const char *name;
    /// 1 to 504, or KVT_NUL_TERMINATED.
    uint64_t name_bytes;
    /// KVT_ROLE_*.
    uint32_t role;
    /// Below 65536 with KVT_ROLE_LAYER and KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    uint32_t layer;
    /// Below 65536 with KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    uint32_t expert;
    uint32_t reserved;
    /// Bytes of the unit, at least one range; each range becomes a tensor.
    const struct kvt_file_range_t *ranges;
    uint64_t range_count;
} kvt_unit_entry_t;

/// A model as a table of byte ranges.
typedef struct kvt_model_table_t {
    uint64_t struct_size;
    /// 0: none are defined.
    uint64_t flags;
    const struct kvt_str_t *paths;
    uint64_t path_count;
    uint64_t path_stride_bytes;
    /// In the order in which a pass needs them.
    const struct kvt_unit_entry_t *units;
    uint64_t unit_count;
    uint64_t unit_stride_bytes;
    uint64_t range_stride_bytes;
} kvt_model_table_t;

/// Memory limits and link rates of a plan. 0 is the default of every field; where 0 is also a
/// value, a KVT_TERMS_* flag selects it.
typedef struct kvt_stream_terms_t {
    uint64_t struct_size;
    /// KVT_TERMS_*, KVT_TERMS_SHRINKS.
    uint64_t flags;
    /// KVT_COMPUTE_*; 0 = on the device if there is one.
    uint32_t compute;
    /// KVT_STREAM_TIERED or KVT_STREAM_RING.
    uint32_t mode;
    /// KVT_PLACE_*.
    uint32_t placement;
    /// At most 65536; 0 = 2. Slots for units that are not resident; in a ring the least number.
    uint32_t slots;
    /// Most device memory for weights; 0 = as much as is free.
    uint64_t device_ceiling_bytes;
    /// Most host memory for weights, slots and staging; 0 = as much as is free.
    uint64_t host_ceiling_bytes;
    /// Device memory that stays free; 0 = 256 MiB.
    uint64_t device_safety_bytes;
    /// Host memory that stays free; 0 = 6 GiB, or a quarter of a machine with less than 24 GiB.
    uint64_t host_reserve_bytes;
    /// Tokens that KV is reserved for, where the engine computes; 0 = the model's, at most 4096.
    uint32_t context;
    /// Concurrent sequences; 0 = 1.
    uint32_t sequences;
    /// Bytes of a KV element; 0 = 2.
    uint32_t kv_element_bytes;
    /// Number of last layers that the processor computes; only if the engine computes on a device.
    uint32_t processor_layers;
    /// Bytes of KV; 0 = computed from context, sequences and kv_element_bytes.
    uint64_t kv_bytes;
    /// Workspace of the engine.
    uint64_t workspace_bytes;
    /// Buffers for hidden states.
    uint64_t hidden_bytes;
    /// 0 = as many as fit; with KVT_TERMS_SHRINKS as few as a layer needs.
    uint32_t expert_slots;
    uint32_t reserved;
    /// Host memory for reads on their way to a device; 0 = chosen, usually 16 chunks.
    uint64_t staging_bytes;
    /// Bytes of one read or copy, at most 1 GiB; 0 = 4 MiB.
    uint64_t chunk_bytes;
    /// Time to compute a layer, for forecasts.
    uint64_t layer_compute_ns;
    /// Rate from the file to host memory; 0 = not known.
    uint64_t disk_bytes_per_s;
    /// Rate from host memory to the device; 0 = not known.
    uint64_t device_bytes_per_s;
    /// Rate at which the processor computes with weights in host memory; 0 = not known.
    uint64_t processor_bytes_per_s;
} kvt_stream_terms_t;

/// Memory that a plan is made for.
typedef struct kvt_stream_memory_t {
    uint64_t struct_size;
    /// Free on the device; 0 = no device.
    uint64_t device_free_bytes;
    /// Host memory that the process may still use.
    uint64_t host_free_bytes;
    /// RAM of the machine, or the limit of its cgroup if that is less; 0 = host_free_bytes.
    uint64_t host_total_bytes;
    /// Memory that may be locked; UINT64_MAX = no limit.
    uint64_t lockable_bytes;
} kvt_stream_memory_t;

/// A plan: the residency of units, the slots, and the memory that they need.
typedef struct kvt_stream_plan_t {
    uint64_t struct_size;
    /// KVT_COMPUTE_*.
    uint32_t compute;
    /// KVT_STREAM_TIERED or KVT_STREAM_RING.
    uint32_t mode;
    /// Number of units resident in device memory, in host memory, and in the file alone.
    uint32_t device_units;
    uint32_t host_units;
    uint32_t file_units;
    /// Slots for units that are not resident where they are used.
    uint32_t slots;
    /// Bytes of one slot.
    uint64_t slot_bytes;
    uint32_t expert_slots;
    uint32_t reserved;
    /// Bytes of one expert slot.
    uint64_t expert_slot_bytes;
    /// Host memory for reads on their way to a device.
    uint64_t staging_bytes;
    /// Bytes of one read or copy.
    uint64_t chunk_bytes;
    /// Device memory of the plan.
    uint64_t device_bytes;
    /// Host memory of the plan.
    uint64_t host_bytes;
    /// Part of host_bytes that is locked.
    uint64_t pinned_bytes;
} kvt_stream_plan_t;

/// Forecast of a pass; all 0 if the rate of a link that the plan needs is not known.
typedef struct kvt_forecast_t {
    uint64_t struct_size;
    /// A pass in the steady state.
    uint64_t pass_ns;
    /// The first pass, without prefetched units.
    uint64_t first_ns;
    /// Lower bound of a pass: the longest of the three below.
    uint64_t bound_ns;
    /// Computing alone.
    uint64_t compute_ns;
    /// The device link alone.
    uint64_t device_ns;
    /// The disk alone.
    uint64_t disk_ns;
    /// Bytes that cross the device link in a pass.
    uint64_t device_bytes;
    /// Bytes that are read in a pass.
    uint64_t disk_bytes;
    /// Passes a second: tokens, if a pass makes one. 0 if pass_ns is 0.
    double tokens_per_s;
    /// KVT_BINDING_*: the resource that limits a pass; 0 = not known.
    uint32_t binding;
    uint32_t reserved;
} kvt_forecast_t;

/// Residency of a unit. Stands in arrays.
typedef struct kvt_unit_residency_t {
    /// KVT_RESIDENT_*.
    uint32_t residency;
    /// 1: used in host memory, although the engine computes on a device; else 0.
    uint32_t on_processor;
} kvt_unit_residency_t;

/// Options of kvt_stream_open.
typedef struct kvt_stream_opts_t {
    uint64_t struct_size;
    /// KVT_STREAM_MEASURE, _ONCE, _IN_PLACE, _BUFFERED, _NO_URING, _MAPPED, _SIDECAR,
    /// _SET_PINNED_PERCENT, _DIRECT.
    uint64_t flags;
    /// Required. May be closed afterwards.
    const struct kvt_model_t *model;
    /// Null = defaults.
    const struct kvt_stream_terms_t *terms;
    /// Charged for all memory, of the same runtime; null = none. Implies KVT_TERMS_SHRINKS: the
    /// budget can reclaim resident units and expert slots.
    const struct kvt_budget_t *budget;
    /// 32 bits; the budget reclaims from owners of low priority first.
    int64_t priority;
    /// Units in the order of a pass, without experts; null = the order of their numbers.
    const uint32_t *order;
    uint64_t order_count;
    /// Policy spec that chooses victims in KVT_STREAM_RING; empty = "fifo".
    const char *policy;
    uint64_t policy_bytes;
    /// Policy spec of the expert slots; empty = "lru".
    const char *expert_policy;
    uint64_t expert_policy_bytes;
    /// Path of the checksum file; implies KVT_STREAM_SIDECAR. Ignored with KVT_VERIFY_NEVER.
    const char *sidecar;
    uint64_t sidecar_bytes;
    /// KVT_VERIFY_*.
    uint32_t verify;
    /// Reader threads, at most 64; 0 = 4.
    uint32_t readers;
    /// Reads in flight of one thread, at most 64; 0 = 64.
    uint32_t depth;
    /// Spans kept for kvt_stream_marks, at most 2^20; with any, each acquire takes a lock.
    uint32_t marks;
    /// Percent of the expert slots that the most used experts keep; 0 = 50.
    uint32_t pinned_percent;
    uint32_t reserved;
    /// Device of the same runtime, with memory of its own, that the engine computes on; null = the
    /// processor.
    const struct kvt_device_t *device;
} kvt_stream_opts_t;

/// A lease of a unit: the right to read its bytes until kvt_stream_release. A copy of the struct is
/// the same lease, and is not released on its own.
typedef struct kvt_unit_lease_t {
    uint64_t struct_size;
    /// Read-only, a multiple of 4096. A part of a tensor is at address + kvt_part_t.at.
    const void *address;
    /// kvt_unit_t.image_bytes.
    uint64_t bytes;
    uint32_t unit;
    /// KVT_MEMORY_*: where the address is valid.
    uint32_t memory;
    /// Opaque; 0 = released.
    uint64_t place;
    /// Device event that completes the bytes; 0 = complete. Valid until the release.
    uint64_t event;
    /// When the lease was granted; 0 = not recorded.
    uint64_t since_ns;
} kvt_unit_lease_t;

/// Progress of loading the resident units.
typedef struct kvt_stream_progress_t {
    uint64_t struct_size;
    /// Units that are not yet where the plan puts them.
    uint64_t missing;
    /// Units that are resident in memory by the plan.
    uint64_t resident_units;
    /// Bytes read so far, for any purpose.
    uint64_t read_bytes;
} kvt_stream_progress_t;

/// Memory for weights from now on; 0 = unchanged.
typedef struct kvt_stream_limits_t {
    uint64_t struct_size;
    /// KVT_LIMIT_*.
    uint64_t flags;
    /// Most host memory.
    uint64_t host_bytes;
    /// Most device memory.
    uint64_t device_bytes;
    /// Tokens that KV is reserved for.
    uint32_t context;
    uint32_t reserved;
} kvt_stream_limits_t;

/// Counters of a streamer since it was opened.
typedef struct kvt_stream_stats_t {
    uint64_t struct_size;
    /// Passes that ended.
    uint64_t passes;
    /// Duration of the last pass.
    uint64_t pass_ns;
    /// Leases that were granted.
    uint64_t acquires;
    /// Acquires that waited.
    uint64_t waited;
    /// Time that acquires waited: for reads, for copies to the device, and for slots.
    uint64_t wait_read_ns;
    uint64_t wait_copy_ns;
    uint64_t wait_slot_ns;
    /// Time that units were leased; of resident ones only with kvt_stream_opts_t.marks.
    uint64_t use_ns;
    uint64_t read_bytes;
    /// Sum of the durations of reads: more than the elapsed time where reads overlapped.
    uint64_t read_ns;
    /// Bytes a second of the disk, as measured or set; 0 = not known.
    uint64_t read_ceiling_bytes_per_s;
    /// Bytes copied to the device.
    uint64_t copied_bytes;
    /// Sum of the durations of copies.
    uint64_t copy_ns;
    /// Bytes a second of the device link, as set; 0 = not known.
    uint64_t copy_ceiling_bytes_per_s;
    /// Bytes that were loaded and never used.
    uint64_t wasted_bytes;
    /// Reads and copies that failed.
    uint64_t failed;
    /// Acquired experts that were in a slot.
    uint64_t expert_hits;
    /// Acquired experts that had to be loaded.
    uint64_t expert_misses;
    /// Part of read_bytes that the device read itself (KVT_STREAM_DIRECT).
    uint64_t direct_bytes;
    /// Direct reads that failed, and went through host memory; three in a row end direct reads.
    uint64_t direct_failed;
} kvt_stream_stats_t;

/// Expert counters of a layer. Stands in arrays.
typedef struct kvt_expert_stats_t {
    uint32_t layer;
    uint32_t reserved;
    /// Acquired experts that were in a slot.
    uint64_t hits;
    /// Acquired experts that had to be loaded.
    uint64_t misses;
    /// Bytes that were loaded.
    uint64_t bytes;
} kvt_expert_stats_t;

/// A span of time. Stands in arrays.
typedef struct kvt_stream_span_t {
    /// KVT_STAGE_*.
    uint32_t stage;
    uint32_t unit;
    /// CLOCK_MONOTONIC, as end_ns.
    uint64_t begin_ns;
    uint64_t end_ns;
} kvt_stream_span_t;

/// Rows of bytes to copy: `runs` runs of `run_bytes` bytes at constant strides. One side has no
/// gaps.
typedef struct kvt_copy_rows_t {
    /// Source and target of the first run.
    uint64_t from;
    uint64_t to;
    /// From a run to the next, in the source and in the target.
    uint64_t from_stride_bytes;
    uint64_t to_stride_bytes;
    uint64_t run_bytes;
    uint64_t runs;
    /// KVT_MEMORY_* of source and target.
    uint32_t from_memory;
    uint32_t to_memory;
} kvt_copy_rows_t;

/// Submits copies to a stream (0 to `streams` - 1, each in order), after the event `after` (0 =
/// none). Entries are `stride_bytes` apart. Writes the event that completes with them, a number of
/// the engine's choice, not 0. Without copies it only records an event. A batch whose `after` fails
/// must fail. A rejected batch must not have begun. KVT_E_UNAVAILABLE, from any callback, means
/// that the device is lost; afterwards the library only calls `release` and `free`.
typedef kvt_status_t (*kvt_device_submit_fn)(void *user_data,
                                             uint32_t stream,
                                             uint64_t after,
                                             const struct kvt_copy_rows_t *copies,
                                             uint64_t count,
                                             uint64_t stride_bytes,
                                             uint64_t *out_event);

/// Queries an event: KVT_OK (completed), KVT_E_AGAIN (pending), or the status that its batch failed
/// with; the batch must not access memory any more. If only the query failed, return KVT_E_AGAIN.
typedef kvt_status_t (*kvt_device_query_fn)(void *user_data, uint64_t event);

/// Waits for an event until a deadline. It may return early: the library queries the event
/// afterwards, and pauses before the next wait if this one was very short.
typedef kvt_status_t (*kvt_device_wait_fn)(void *user_data, uint64_t event, uint64_t deadline_ns);

/// Releases an event: the library uses it no more. Batches that have it as `after` may still wait
/// for it.
typedef void (*kvt_device_release_fn)(void *user_data, uint64_t event);

/// Allocates memory at a multiple of 256, not 0. KVT_E_NOMEM: not enough is free.
typedef kvt_status_t (*kvt_device_allocate_fn)(void *user_data,
                                               uint64_t bytes,
                                               uint64_t *out_address);

/// Frees memory.
typedef void (*kvt_device_free_fn)(void *user_data, uint64_t address, uint64_t bytes);

/// Writes the number of bytes that can still be allocated.
typedef kvt_status_t (*kvt_device_free_bytes_fn)(void *user_data, uint64_t *out_bytes);

/// Registers host memory that many copies will use; with `bytes` 0, unregisters it.
typedef kvt_status_t (*kvt_device_register_host_fn)(void *user_data,
                                                    uint64_t address,
                                                    uint64_t bytes);

/// Imports an event; see kvt_device_import_event. `raw` stays the caller's.
typedef kvt_status_t (*kvt_device_import_event_fn)(void *user_data,
                                                   uint64_t raw,
                                                   uint64_t *out_event);

/// Makes a stream wait for an event; see kvt_device_stream_wait. Not called for an event that is
/// known to have completed.
typedef kvt_status_t (*kvt_device_stream_wait_fn)(void *user_data,
                                                  uint64_t raw_stream,
                                                  uint64_t event);

/// One kernel launch: the same 256 bytes for all kernels. Addresses are device addresses, strides
/// are in bytes, unused fields are 0. docs/kernels.md lists the fields of each kernel.
typedef struct kvt_kernel_t {
    /// KVT_DEVICE_KERNEL_*.
    uint32_t kind;
    /// KVT_DTYPE_* of keys and values, or of the input.
    uint32_t dtype;
    /// KVT_DTYPE_* of queries and output, or of the output.
    uint32_t other_dtype;
    /// KVT_SCALES_*.
    uint32_t scaling;
    uint64_t queries;
    /// Keys, or the input.
    uint64_t keys;
    uint64_t values;
    /// The output.
    uint64_t out;
    /// Lists of positions, and the length of each list.
    uint64_t index;
    uint64_t counts;
    /// Page table, or list of ranges.
    uint64_t table;
    /// Numbers that are read or updated (boxes, scores, sums), and further ones.
    uint64_t numbers;
    uint64_t more;
    /// Scales of quantized numbers.
    uint64_t scales;
    uint64_t scratch;
    uint64_t scratch_bytes;
    /// Distances from an item to the next, and from a head of an item to the next.
    int64_t query_stride;
    int64_t query_head_stride;
    int64_t key_stride;
    int64_t key_head_stride;
    int64_t value_stride;
    int64_t value_head_stride;
    int64_t out_stride;
    int64_t out_head_stride;
    uint32_t query_count;
    uint32_t query_heads;
    uint32_t key_heads;
    /// Elements of a key head, and of a value head.
    uint32_t key_dim;
    uint32_t value_dim;
    /// Tokens of a page or block.
    uint32_t page_tokens;
    /// Tokens of the sequence.
    uint32_t tokens;
    /// First item to process, and number of items.
    uint32_t first;
    uint32_t count;
    /// Items to keep or choose; last and first items that are always kept.
    uint32_t keep;
    uint32_t recent;
    uint32_t sinks;
    /// Factor of the products of queries and keys.
    float scale;
    /// Flags of the kernel.
    uint32_t flags;
    uint64_t reserved[3];
} kvt_kernel_t;

/// Submits kernels to a stream, as kvt_device_submit_fn does copies.
typedef kvt_status_t (*kvt_device_launch_fn)(void *user_data,
                                             uint32_t stream,
                                             uint64_t after,
                                             const struct kvt_kernel_t *kernels,
                                             uint64_t count,
                                             uint64_t stride_bytes,
                                             uint64_t *out_event);

/// Creates an event that completes when `signal_event` is called with it.
typedef kvt_status_t (*kvt_device_create_event_fn)(void *user_data, uint64_t *out_event);

/// Signals an event of `create_event`; signalling it again does nothing. Must not wait. Called from
/// any thread, also from the one that releases an op.
typedef kvt_status_t (*kvt_device_signal_event_fn)(void *user_data, uint64_t event);

/// A device that the engine implements; test it with kvt_device_conformance. `submit` and `query`
/// are required; the others may be null, and the device then lacks that feature. Set both or none
/// of `allocate` and `free`, `create_event` and `signal_event`, `kernels` and `launch`.
///
/// Threading: callbacks are called from any thread, several at once. They must not unwind, and must
/// not call this device. `release`, `allocate`, `free` and `free_bytes` may be called while the
/// library holds a lock: they must not call the library, nor wait for a thread that does.
typedef struct kvt_device_custom_t {
    uint64_t struct_size;
    /// KVT_DEVICE_HAS_MEMORY, KVT_DEVICE_WANTS_PINNED.
    uint64_t flags;
    /// 1 to 64. The upper half is for batches that wait for late events, so that they delay nothing
    /// else.
    uint32_t streams;
    uint32_t reserved;
    /// Kernels of `launch`: a set of 1 << KVT_DEVICE_KERNEL_*.
    uint64_t kernels;
    kvt_device_submit_fn submit;
    kvt_device_query_fn query;
    /// Null = the library polls with `query`.
    kvt_device_wait_fn wait;
    kvt_device_release_fn release;
    kvt_device_allocate_fn allocate;
    kvt_device_free_fn free;
    kvt_device_free_bytes_fn free_bytes;
    kvt_device_register_host_fn register_host;
    kvt_device_import_event_fn import_event;
    kvt_device_stream_wait_fn stream_wait;
    kvt_device_launch_fn launch;
    /// Passed to all callbacks; taken over only if the open succeeds.
    void *user_data;
    /// Releases user_data; may be null.
    kvt_destroy_fn destroy;
    /// Null = streams cannot wait for an op.
    kvt_device_create_event_fn create_event;
    kvt_device_signal_event_fn signal_event;
} kvt_device_custom_t;

/// Options of kvt_device_open. Fields for other kinds of devices must be 0.
typedef struct kvt_device_opts_t {
    uint64_t struct_size;
    /// KVT_DEVICE_VERIFY or 0.
    uint64_t flags;
    /// KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED.
    uint32_t kind;
    /// CUDA: index of the device, unless `context` is given.
    uint32_t ordinal;
    /// CUDA: the engine's context (CUcontext), which must outlive the device; 0 = the primary
    /// context.
    uint64_t context;
    /// CUDA: at most 64 streams (CUstream) of the engine in `context`, no default streams; null =
    /// four of the device's own.
    const uint64_t *streams;
    uint64_t stream_count;
    /// CUDA: path of the driver's library; null = the system's.
    const char *library;
    uint64_t library_bytes;
    /// Custom: the engine's callbacks.
    const struct kvt_device_custom_t *custom;
    /// Simulated: bytes that can be allocated; 0 = no limit.
    uint64_t memory_bytes;
    /// Simulated: seed of all random choices.
    uint64_t seed;
    /// Simulated: least duration of a batch of copies; 0 = 10 us.
    uint64_t latency_ns;
    /// Simulated: bandwidth of a stream; 0 = 20 GB/s.
    uint64_t bytes_per_s;
    /// CUDA: device memory of the engine that stores, streamers and kvt_device_alloc allocate from;
    /// it must outlive the device. 0 = allocate from the driver.
    uint64_t arena;
    uint64_t arena_bytes;
    /// CUDA: ordinals of at most 63 other devices of the process. Copies may name memory of their
    /// primary contexts. Null = none.
    const uint32_t *peers;
    uint64_t peer_count;
    /// CUDA: path of cuFile's library, which KVT_STREAM_DIRECT loads; null = the system's.
    const char *cufile;
    uint64_t cufile_bytes;
} kvt_device_opts_t;

/// Properties of a device.
typedef struct kvt_device_info_t {
    uint64_t struct_size;
    /// KVT_DEVICE_ASYNCHRONOUS, _CHECKSUMS, _HAS_MEMORY, _WANTS_PINNED.
    uint64_t flags;
    /// KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED.
    uint32_t kind;
    /// Number of streams. Work runs in order within a stream, in any order across streams.
    uint32_t streams;
    /// Available kernels: a set of 1 << KVT_DEVICE_KERNEL_*.
    uint64_t kernels;
    /// Device memory that can still be allocated; UINT64_MAX = unknown.
    uint64_t free_bytes;
} kvt_device_info_t;

/// An allocation of device memory.
typedef struct kvt_device_memory_t {
    uint64_t struct_size;
    /// A multiple of 256.
    uint64_t address;
    uint64_t bytes;
    /// Id of the allocation, set by the library.
    uint64_t number;
    /// KVT_MEMORY_*: address space of `address`.
    uint32_t memory;
    uint32_t reserved;
} kvt_device_memory_t;

/// A copy between an engine's tensor and a plane, which holds the same tokens, heads and elements
/// without gaps.
typedef struct kvt_copy_t {
    /// KVT_COPY_CHECKSUM or 0.
    uint64_t flags;
    /// The engine's tensor; it must state its number of tokens.
    struct kvt_view_t view;
    /// tokens * heads * run_bytes bytes.
    void *plane;
    /// KVT_MEMORY_*: address space of `plane`.
    uint32_t plane_memory;
    /// KVT_COPY_GATHER or KVT_COPY_SCATTER.
    uint32_t direction;
    /// First token of the view to copy.
    uint32_t first_token;
    /// 0 = all from `first_token` on.
    uint32_t tokens;
    /// Receives the checksum (see kvt_checksum) that KVT_COPY_CHECKSUM requests from a synchronous
    /// device; an asynchronous one returns it from kvt_device_checksums.
    uint64_t sum;
} kvt_copy_t;

/// Options of kvt_device_conformance.
typedef struct kvt_conformance_opts_t {
    uint64_t struct_size;
    /// KVT_CONFORMANCE_CLOSES or 0.
    uint64_t flags;
    /// Seed of all random choices.
    uint64_t seed;
    /// Time limit of an event; 0 = 30 s.
    uint64_t patience_ns;
    /// Random trials, at most 100,000; 0 = 40.
    uint32_t rounds;
    uint32_t reserved;
} kvt_conformance_opts_t;

/// Receives the result of a check: its name, a KVT_VERDICT_*, and the reason (empty if it passed).
/// Texts are not NUL-terminated and valid during the call. Called on the calling thread. Must not
/// unwind.
typedef void (*kvt_conformance_fn)(void *user_data,
                                   const char *name,
                                   uint64_t name_bytes,
                                   uint32_t verdict,
                                   const char *why,
                                   uint64_t why_bytes);

/// Number of checks with each result.
typedef struct kvt_conformance_report_t {
    uint64_t struct_size;
    uint32_t passed;
    uint32_t skipped;
    uint32_t failed;
    uint32_t reserved;
} kvt_conformance_report_t;

/// Options of kvt_trace_open and kvt_trace_generate.
typedef struct kvt_trace_opts_t {
    uint64_t struct_size;
    /// KVT_TRACE_FLAT or 0.
    uint64_t flags;
    /// kvt_trace_open: a regular file, plain or zstd.
    const char *path;
    uint64_t path_bytes;
    /// kvt_trace_open: kvtier, mooncake, weka, sharegpt, azure, oracle or csv; empty = detect from
    /// the content. kvt_trace_generate: chat, agent, batch, multitenant or burst.
    const char *kind;
    uint64_t kind_bytes;
    /// Tokens of a block, at most 2^20, unless the file states it; 0 = 512.
    uint64_t block_tokens;
    /// Seed of generated workloads, and of times that a file lacks; 0 = 7.
    uint64_t seed;
    /// kvt_trace_open: mean time between session starts that a file (weka, sharegpt) lacks; 0 = the
    /// format's default.
    uint64_t gap_ns;
    /// Later requests are dropped, if generated or with random start times; 0 = one day.
    uint64_t duration_ns;
    /// kvt_trace_generate: sessions started per second; 0 = the default of the kind.
    double rate;
} kvt_trace_opts_t;

/// Totals of a trace.
typedef struct kvt_trace_info_t {
    uint64_t struct_size;
    uint64_t requests;
    /// Blocks requested, with repetitions.
    uint64_t references;
    /// Distinct blocks.
    uint64_t blocks;
    /// Tokens of a block.
    uint64_t block_tokens;
    /// Sessions, named in the trace or inferred from the prefixes.
    uint64_t sessions;
    /// From the first request to the last.
    uint64_t duration_ns;
    /// Tokens requested.
    uint64_t tokens;
    /// Tokens that an unbounded cache would find.
    uint64_t known_tokens;
} kvt_trace_info_t;

/// Receives the progress of a replay, every 256 requests and at the end, on the calling thread.
/// Returns 0 to cancel the replay. Must not unwind.
typedef int32_t (*kvt_progress_fn)(void *user_data, uint64_t requests_done, uint64_t requests);

/// Options of kvt_trace_replay.
typedef struct kvt_replay_opts_t {
    uint64_t struct_size;
    /// KVT_REPLAY_*.
    uint64_t flags;
    /// Policy, such as "lru"; not "custom".
    const char *spec;
    uint64_t spec_bytes;
    /// Capacity in blocks, at least 1; times `layers` at most 2^28.
    uint64_t capacity_blocks;
    /// Requests replayed before counting starts.
    uint64_t warm_up;
    /// Objects are cells of this many layers, at most 1,024; 0 = whole blocks.
    uint32_t layers;
    /// KVT_HINTS_*.
    uint32_t hints;
    /// Attention cost of a token per token of context, 0 to 1e12, where computing a token costs 1;
    /// 0 = 1 / 53,800, a model of the 70B class.
    double alpha;
    /// May be null.
    kvt_progress_fn progress;
    /// Passed to `progress`.
    void *user_data;
} kvt_replay_opts_t;

/// Result of a replay. All but the times are equal in every run.
typedef struct kvt_replay_report_t {
    uint64_t struct_size;
    /// Requests after the warm-up.
    uint64_t requests;
    /// Blocks requested, and the resident, usable ones among them.
    uint64_t references;
    uint64_t hits;
    /// Tokens requested, and the hits among them.
    uint64_t tokens;
    uint64_t hit_tokens;
    /// Recompute cost of the tokens requested, and of the hits among them.
    double cost;
    double hit_cost;
    /// Objects inserted and evicted, including the warm-up.
    uint64_t inserts;
    uint64_t evictions;
    /// References to blocks seen before that were evicted or did not fit, per reference.
    double re_prefill_rate;
    /// Jain's fairness index over sessions and over tenants.
    double jain_sessions;
    double jain_tenants;
    /// Mean share of the capacity in use since the first eviction.
    double utilisation;
    /// Durations of eviction calls: median, 99th percentile, maximum.
    uint64_t decision_p50_ns;
    uint64_t decision_p99_ns;
    uint64_t decision_max_ns;
    /// Duration of the replay.
    uint64_t run_ns;
} kvt_replay_report_t;

/// The call succeeded.
#define KVT_OK 0

/// An argument is null, out of range or has unknown flags.
#define KVT_E_INVALID (-1)
/// A handle is null, stale, of another type or not from this library.
#define KVT_E_HANDLE (-2)
/// A struct sets a field that this library does not know.
#define KVT_E_TOO_NEW (-3)
/// An output buffer is too small; the call has written the size that is needed.
#define KVT_E_TOO_SMALL (-4)
/// The system has no memory for the call.
#define KVT_E_NOMEM (-5)
/// The budget of a tier has too few free bytes.
#define KVT_E_BUDGET (-6)
/// A bounded queue or table is full: drain completions, free ops, then retry.
#define KVT_E_AGAIN (-7)
/// The object is in use by work in flight: wait for its release, then retry.
#define KVT_E_BUSY (-8)
/// The object is closed or closing.
#define KVT_E_CLOSED (-9)
/// The operation was cancelled before it completed.
#define KVT_E_CANCELLED (-10)
/// The deadline passed before the operation completed.
#define KVT_E_TIMEOUT (-11)
/// The call is not allowed inside a callback.
#define KVT_E_REENTRANT (-12)
/// This process is a fork of the one that opened the library.
#define KVT_E_FORKED (-13)
/// A defect inside the library was caught. The object is poisoned: close it.
#define KVT_E_PANIC (-14)
/// The program was built against a header that does not fit this library.
#define KVT_E_ABI (-15)
/// The object does not support the operation, or the library was built without it.
#define KVT_E_UNSUPPORTED (-16)
/// A device, tier or feature that the call needs does not exist here, or is lost.
#define KVT_E_UNAVAILABLE (-17)
/// The requested object or data does not exist.
#define KVT_E_NOT_FOUND (-18)
/// Bytes do not match their checksum: treat them as absent.
#define KVT_E_CORRUPT (-19)
/// The operating system reported an error.
#define KVT_E_IO (-20)
/// A spec string is malformed; the error object has the offset.
#define KVT_E_SPEC (-21)
/// A documented limit was exceeded.
#define KVT_E_LIMIT (-22)
/// The quota of locked memory (RLIMIT_MEMLOCK) is too small.
#define KVT_E_PIN_QUOTA (-23)
/// The object is not in a state that allows the call.
#define KVT_E_STATE (-24)

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/// Returns the name of a status, such as "KVT_E_BUSY"; "KVT_E_UNKNOWN" if the library does not know
/// it. The string is static, NUL-terminated and never null. Threading: also in a forked child.
const char *kvt_status_name(kvt_status_t status);

/// Returns a sentence on what a status means and what the caller can do. The string is static,
/// NUL-terminated and never null. Threading: also in a forked child.
const char *kvt_status_str(kvt_status_t status);

/// Returns the version of the library as text, such as "0.1.0". The string is static,
/// NUL-terminated and never null. Threading: also in a forked child.
const char *kvt_version_str(void);

/// Reads the version of the library as one number, in the format of KVT_HEADER_VERSION. Threading:
/// also in a forked child.
kvt_status_t kvt_version(uint64_t *out);

/// Checks that a program can use this library. Call it once, before any other function:
/// kvt_abi_check(KVT_HEADER_VERSION, &err).
///
/// Before 1.0 the library must have the same minor version as the program's header, and at least
/// its patch version; from 1.0 on the same major version, and at least its minor version.
///
/// @return KVT_E_ABI.
kvt_status_t kvt_abi_check(uint64_t header_version, struct kvt_error_t **err);

/// Reads the details of an error. `out->message` is borrowed until the error is freed or replaced.
kvt_status_t kvt_error_info(const struct kvt_error_t *error, struct kvt_error_info_t *out);

/// Returns the message of an error, UTF-8 and NUL-terminated; empty if the handle is null or stale.
/// It is borrowed until the error is freed or replaced.
const char *kvt_error_message(const struct kvt_error_t *error);

/// Frees an error.
kvt_status_t kvt_error_free(struct kvt_error_t **error);

/// Sets or removes the log callback of the process. Without one the library logs nothing; it never
/// writes to standard output or error. The previous callback may still run in another thread when
/// this returns; its destroy is called after that.
///
/// @param level      KVT_LOG_*: the most detailed level that is passed on.
/// @param callback   Null removes the present one.
/// @param user_data  Passed to the callback; taken over on success only.
/// @param destroy    May be null.
/// @return KVT_E_STATE (a Rust program has installed a logger of its own).
kvt_status_t kvt_log_set(uint32_t level,
                         kvt_log_fn callback,
                         void *user_data,
                         kvt_destroy_fn destroy,
                         struct kvt_error_t **err);

/// Reads the number of optional features.
kvt_status_t kvt_feature_count(uint64_t *out_count);

/// Reads a feature by its index, below kvt_feature_count. Probes the machine: not for a hot path.
///
/// @return KVT_E_NOT_FOUND.
kvt_status_t kvt_feature_at(uint64_t index, struct kvt_feature_t *out);

/// Reads a feature by its name, such as "cuda", "io_uring" or "redis". Probes the machine: not for
/// a hot path.
///
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_feature_find(const char *name,
                              uint64_t name_bytes,
                              struct kvt_feature_t *out,
                              struct kvt_error_t **err);

/// Checks the grammar of a spec string, and writes its canonical form. A spec is a name with
/// optional arguments, such as "qos(inner=s3fifo(small=10%))". The call that uses the spec checks
/// that the name and its parameters exist.
///
/// @param out        Receives the canonical form, not NUL-terminated; may be null.
/// @param out_bytes  Receives its length; may be null.
/// @return KVT_E_SPEC, KVT_E_LIMIT (more than 4096 bytes, 8 levels or 64 arguments),
///         KVT_E_TOO_SMALL.
kvt_status_t kvt_spec_check(const char *spec,
                            uint64_t spec_bytes,
                            char *out,
                            uint64_t out_capacity,
                            uint64_t *out_bytes,
                            struct kvt_error_t **err);

/// Opens a runtime and starts its threads.
///
/// @return KVT_E_LIMIT, KVT_E_SPEC (in `faults`), KVT_E_IO.
kvt_status_t kvt_runtime_open(const struct kvt_runtime_opts_t *opts,
                              struct kvt_runtime_t **out,
                              struct kvt_error_t **err);

/// Closes a runtime: refuses new work, cancels open ops, and waits for them and for the threads.
/// Objects that are still open are reported, not destroyed. A store among them keeps its directory
/// and its memory; its transfers have ended and its calls return KVT_E_CLOSED, but kvt_store_close
/// still writes back what is not on disk.
///
/// @param report  May be null.
/// @return KVT_E_BUSY (at the deadline; the runtime stays closing: call again).
///
/// Threading: not inside callbacks.
kvt_status_t kvt_runtime_close(struct kvt_runtime_t **runtime,
                               uint64_t deadline_ns,
                               struct kvt_close_report_t *report,
                               struct kvt_error_t **err);

/// Reads the runtime's clock: CLOCK_MONOTONIC nanoseconds, for deadlines.
kvt_status_t kvt_runtime_now(const struct kvt_runtime_t *runtime, uint64_t *out_ns);

/// Reads the counters of a runtime, also of a poisoned one.
kvt_status_t kvt_runtime_stats(const struct kvt_runtime_t *runtime,
                               struct kvt_runtime_stats_t *out);

/// Reads the progress and the result of an op.
kvt_status_t kvt_op_info(const struct kvt_op_t *op, struct kvt_op_info_t *out);

/// Waits until an op has reached all of the given moments. Succeeds whatever the result of the op
/// is.
///
/// @param moments  KVT_OP_ISSUED, _RESOLVED and _RELEASED bits, at least one.
/// @return KVT_E_TIMEOUT.
///
/// Threading: not inside callbacks.
kvt_status_t kvt_op_wait(const struct kvt_op_t *op, uint32_t moments, uint64_t deadline_ns);

/// Requests the end of an op, and does not wait for it. An op that has not begun ends at once with
/// KVT_E_CANCELLED. A running op skips the items that have not begun. An op that has ended does not
/// change.
kvt_status_t kvt_op_cancel(const struct kvt_op_t *op);

/// Reads the results of the items of an op, also while it runs.
///
/// @param first      First item to read, at most the number of items.
/// @param capacity   At most 65536.
/// @param out_count  Number of entries written.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_op_items(const struct kvt_op_t *op,
                          uint64_t first,
                          struct kvt_op_item_t *out,
                          uint64_t capacity,
                          uint64_t stride_bytes,
                          uint64_t *out_count);

/// Returns the error object of a failed op.
///
/// @return KVT_E_NOT_FOUND (no details are recorded), KVT_E_STATE (the op is not resolved).
kvt_status_t kvt_op_error(const struct kvt_op_t *op, struct kvt_error_t **out);

/// Frees the handle of a released op. Before, cancel the op and wait for KVT_OP_RELEASED.
///
/// @return KVT_E_BUSY (the op is not released).
kvt_status_t kvt_op_free(struct kvt_op_t **op);

/// Frees several op handles and clears each. Skips null handles. Stops at the first failure, which
/// is then the first handle that is not null.
///
/// @return KVT_E_BUSY (the op is not released).
kvt_status_t kvt_op_free_many(struct kvt_op_t **ops, uint64_t count);

/// Opens a completion queue.
///
/// @return KVT_E_LIMIT.
kvt_status_t kvt_queue_open(const struct kvt_runtime_t *runtime,
                            const struct kvt_queue_opts_t *opts,
                            struct kvt_queue_t **out,
                            struct kvt_error_t **err);

/// Closes a queue: refuses new work, cancels the ops that report to it, and waits for their
/// release. A callback has then received every completion. Completions that were not polled are
/// dropped; their ops stay valid until they are freed.
///
/// @return KVT_E_BUSY (at the deadline; the queue stays closing: call again).
///
/// Threading: not inside callbacks.
kvt_status_t kvt_queue_close(struct kvt_queue_t **queue,
                             uint64_t deadline_ns,
                             struct kvt_error_t **err);

/// Takes completions from a polled queue without waiting, oldest first.
///
/// @param capacity   At most 1048576.
/// @param out_count  Number of completions written; 0 if none is pending.
/// @return KVT_E_STATE (the queue calls back), KVT_E_LIMIT.
kvt_status_t kvt_queue_poll(const struct kvt_queue_t *queue,
                            struct kvt_completion_t *out,
                            uint64_t capacity,
                            uint64_t stride_bytes,
                            uint64_t *out_count);

/// Takes completions from a polled queue, oldest first, and waits for the first one. Returns
/// KVT_E_CLOSED once the queue closes and no more completions will come.
///
/// @param capacity   1 to 1048576.
/// @param out_count  Number of completions written, at least 1.
/// @return KVT_E_TIMEOUT, KVT_E_STATE (the queue calls back), KVT_E_LIMIT.
///
/// Threading: not inside callbacks.
kvt_status_t kvt_queue_wait(const struct kvt_queue_t *queue,
                            uint64_t deadline_ns,
                            struct kvt_completion_t *out,
                            uint64_t capacity,
                            uint64_t stride_bytes,
                            uint64_t *out_count);

/// Returns an eventfd (close-on-exec, non-blocking) for poll, select and epoll. It is readable
/// exactly while completions are pending. Do not read, write or close it: draining the queue resets
/// it, closing the queue closes it.
///
/// @return KVT_E_STATE (the queue calls back), KVT_E_IO.
kvt_status_t kvt_queue_fd(const struct kvt_queue_t *queue, int32_t *out_fd);

/// Reads the counters of a queue.
kvt_status_t kvt_queue_stats(const struct kvt_queue_t *queue, struct kvt_queue_stats_t *out);

/// Opens a budget, with limits from the memory that the machine has now.
///
/// @return KVT_E_BUDGET (with KVT_BUDGET_STRICT only).
kvt_status_t kvt_budget_open(const struct kvt_runtime_t *runtime,
                             const struct kvt_budget_opts_t *opts,
                             struct kvt_budget_t **out,
                             struct kvt_error_t **err);

/// Closes a budget. Waiting reservations end with KVT_E_CLOSED and new ones are refused. Its
/// accounts stay valid and can still release bytes until they are closed.
kvt_status_t kvt_budget_close(struct kvt_budget_t **budget, struct kvt_error_t **err);

/// Sets the limit of a tier. Below the bytes in use, reservations are granted again only after
/// owners, whose reclaim callbacks are called, have released enough.
///
/// @param bytes  New limit; host and pinned limits are lowered to what the machine has.
kvt_status_t kvt_budget_resize(const struct kvt_budget_t *budget,
                               uint32_t tier,
                               uint64_t bytes,
                               struct kvt_error_t **err);

/// Measures the memory that this process may use. Reads files in /proc and /sys: not for a hot
/// path.
kvt_status_t kvt_budget_report(const struct kvt_budget_t *budget, struct kvt_budget_report_t *out);

/// Reads the limit and counters of one tier.
kvt_status_t kvt_budget_tier(const struct kvt_budget_t *budget,
                             uint32_t tier,
                             struct kvt_tier_report_t *out);

/// Opens an account in a budget.
///
/// @return KVT_E_LIMIT (1024 accounts of the budget are open, or the name is too long).
kvt_status_t kvt_account_open(const struct kvt_budget_t *budget,
                              const struct kvt_account_opts_t *opts,
                              struct kvt_account_t **out,
                              struct kvt_error_t **err);

/// Reserves bytes at once, or fails. Does not overtake reservations that wait.
///
/// @return KVT_E_BUDGET (the bytes do not fit, or reservations wait).
kvt_status_t kvt_account_reserve(const struct kvt_account_t *account,
                                 uint32_t tier,
                                 uint64_t bytes,
                                 struct kvt_error_t **err);

/// Reserves bytes as soon as they are free. Reservations of a tier are granted in their order,
/// while the reclaim callbacks of owners are called. The op ends with KVT_OK when the bytes are
/// reserved, with KVT_E_BUDGET when a new limit makes that impossible.
///
/// @param out  May be null if opts names a queue.
/// @return KVT_E_BUDGET (more than the limit of the tier), KVT_E_AGAIN (4096 reservations of the
///         budget wait, or the queue or the runtime is full), KVT_E_LIMIT.
kvt_status_t kvt_account_reserve_later(const struct kvt_account_t *account,
                                       uint32_t tier,
                                       uint64_t bytes,
                                       const struct kvt_submit_opts_t *opts,
                                       struct kvt_op_t **out,
                                       struct kvt_error_t **err);

/// Commits reserved bytes: used_bytes are in use from now on, the rest of reserved_bytes is free
/// again.
///
/// @param reserved_bytes  At most what the account has reserved in the tier.
/// @param used_bytes      At most reserved_bytes; 0 ends the reservation.
kvt_status_t kvt_account_commit(const struct kvt_account_t *account,
                                uint32_t tier,
                                uint64_t reserved_bytes,
                                uint64_t used_bytes,
                                struct kvt_error_t **err);

/// Releases bytes in use.
///
/// @param bytes  At most what the account has committed in the tier.
kvt_status_t kvt_account_release(const struct kvt_account_t *account,
                                 uint32_t tier,
                                 uint64_t bytes,
                                 struct kvt_error_t **err);

/// Reads the bytes of a tier that an account holds.
///
/// @param out_reserved_bytes  Reserved and not yet in use; may be null.
/// @param out_used_bytes      Committed; may be null.
kvt_status_t kvt_account_held(const struct kvt_account_t *account,
                              uint32_t tier,
                              uint64_t *out_reserved_bytes,
                              uint64_t *out_used_bytes);

/// Closes an account that has released all its bytes. Waits for a running call of its reclaim
/// callback, except inside a callback.
///
/// @return KVT_E_BUSY (the account holds bytes, a reservation waits, or, inside a callback, its
///         reclaim callback is running).
kvt_status_t kvt_account_close(struct kvt_account_t **account, struct kvt_error_t **err);

/// Allocates a buffer. Forked children do not inherit its memory.
///
/// @param opts  Its `bytes` must be set.
/// @return KVT_E_IO, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_PIN_QUOTA, KVT_E_UNAVAILABLE (too few
///         reserved huge pages are free); with KVT_BUFFER_PREFAULT also KVT_E_AGAIN and
///         KVT_E_CANCELLED (the runtime closes).
kvt_status_t kvt_buffer_alloc(const struct kvt_runtime_t *runtime,
                              const struct kvt_buffer_opts_t *opts,
                              struct kvt_buffer_t **out,
                              struct kvt_error_t **err);

/// Makes a buffer of memory that belongs to the caller. It must stay valid until the buffer is
/// freed.
///
/// @param size       1 to 2^46 bytes.
/// @param user_data  Passed to destroy; taken over only on success.
/// @param destroy    Called once, when the buffer is freed and no op uses it; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_buffer_wrap(const struct kvt_runtime_t *runtime,
                             void *address,
                             uint64_t size,
                             void *user_data,
                             kvt_destroy_fn destroy,
                             struct kvt_buffer_t **out,
                             struct kvt_error_t **err);

/// Frees a buffer.
///
/// @return KVT_E_BUSY (an op uses it).
kvt_status_t kvt_buffer_free(struct kvt_buffer_t **buffer);

/// Reads the address and the usable size of a buffer. Both hold until it is freed.
///
/// @param out_address  May be null.
/// @param out_bytes    May be null.
kvt_status_t kvt_buffer_address(const struct kvt_buffer_t *buffer,
                                void **out_address,
                                uint64_t *out_bytes);

/// Reads the properties of a buffer.
kvt_status_t kvt_buffer_info(const struct kvt_buffer_t *buffer, struct kvt_buffer_info_t *out);

/// Submits work on buffers: all items or none, as one op or, with KVT_SUBMIT_EACH, as one op each.
/// Never waits. Items of an op run in any order and in parallel, so an item must not write what
/// another one reads or writes.
///
/// @param count    1 to 65536.
/// @param out_ops  Receives one op, or `count` ops with KVT_SUBMIT_EACH; may be null if opts names
///                 a queue.
/// @return KVT_E_AGAIN (the queue or the runtime is full), KVT_E_LIMIT.
kvt_status_t kvt_buffer_submit(const struct kvt_runtime_t *runtime,
                               const struct kvt_submit_opts_t *opts,
                               const struct kvt_buffer_item_t *items,
                               uint64_t count,
                               uint64_t stride_bytes,
                               struct kvt_op_t **out_ops,
                               struct kvt_error_t **err);

/// Computes the checksum of bytes as ops do: XXH3-64 (seed 0) of every 4096-byte block, the last
/// one as short as it is, then XXH3-64 of these sums as little-endian numbers.
///
/// @param data  May be null if size is 0.
kvt_status_t kvt_checksum(const void *data, uint64_t size, uint64_t *out_value);

/// Opens a store: creates or recovers its disk tier and starts its threads. Waits for the disk, and
/// for the remote up to `connect` plus `timeout` of its spec. An unreachable remote is retried
/// later, unless the spec has `require=true`.
///
/// @param budget  Budget of the same runtime that is charged; null = a private one, limited to the
///                memory that the machine or cgroup has available, less a reserve.
/// @return KVT_E_INVALID (also: the remote rejects the credentials or cannot be authenticated),
///         KVT_E_SPEC, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_BUSY (directory or control socket in use),
///         KVT_E_STATE (the control path exists and is not a socket of this user), KVT_E_NOT_FOUND
///         (the parent of the disk's directory is missing), KVT_E_IO, KVT_E_CORRUPT,
///         KVT_E_UNAVAILABLE or KVT_E_TIMEOUT (a required remote cannot be reached),
///         KVT_E_UNSUPPORTED (the remote's backend is not built in).
kvt_status_t kvt_store_open(const struct kvt_runtime_t *runtime,
                            const struct kvt_budget_t *budget,
                            const struct kvt_store_opts_t *opts,
                            struct kvt_store_t **out,
                            struct kvt_error_t **err);

/// Closes a store: refuses new work, cancels open ops and waits for them and for the threads. Then
/// frees its memory and directory. Full chunks that are in memory only are first written to disk,
/// as admission and space allow, unless `write=never`. Open namespaces and sessions return
/// KVT_E_CLOSED from then on and are closed as usual; results of ops stay.
///
/// @return KVT_E_BUSY (deadline: the store stays closing and valid, call again), KVT_E_IO (the disk
///         failed, but the store is closed: call again to free the handle).
kvt_status_t kvt_store_close(struct kvt_store_t **store,
                             uint64_t deadline_ns,
                             struct kvt_error_t **err);

/// Reads counters since the open, and current state. Works on a poisoned store, too.
kvt_status_t kvt_store_stats(const struct kvt_store_t *store, struct kvt_store_stats_t *out);

/// Writes the statistics of a store as Prometheus text, not NUL-terminated.
///
/// @param out_capacity  The text grows between calls: leave some spare room.
/// @param out_bytes     May be null.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_store_metrics(const struct kvt_store_t *store,
                               char *out,
                               uint64_t out_capacity,
                               uint64_t *out_bytes);

/// Opens a namespace. Equal identities and layouts give the same namespace, with the chunks that
/// the store recovered from disk. While it is open, other opens must pass the same flags and
/// remote_tenant.
///
/// @param identity  Null = all fields absent.
/// @param flags     KVT_NAMESPACE_*.
/// @return KVT_E_SPEC (the recipe names an unknown codec), KVT_E_LIMIT (a field is too long, or
///         65,536 namespaces or 64 layouts are in use: open, or with referenced or pinned chunks;
///         others are dropped to make room).
kvt_status_t kvt_namespace_open(const struct kvt_store_t *store,
                                const struct kvt_identity_t *identity,
                                const struct kvt_layout_t *layout,
                                uint64_t flags,
                                struct kvt_namespace_t **out,
                                struct kvt_error_t **err);

/// Reads the key of a namespace, the hash of its identity and layout.
///
/// @param out_key  Receives KVT_KEY_BYTES bytes.
kvt_status_t kvt_namespace_key(const struct kvt_namespace_t *ns, uint8_t *out_key);

/// Closes a namespace. Its chunks stay in the store, its sessions stay open.
kvt_status_t kvt_namespace_close(struct kvt_namespace_t **ns);

/// Reports how much of a token sequence is reusable in a namespace, and what loading it takes; for
/// routers that compare stores. Counts no use and references nothing: chunks may be evicted before
/// the next call.
///
/// @param token_count  At most 2^27.
/// @param ranges       Receives ranges that cover all tokens, in order.
/// @param capacity     At most 2^24.
/// @param out_count    May be null.
/// @param out          Receives the totals; may be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_namespace_lookup(const struct kvt_namespace_t *ns,
                                  const uint32_t *tokens,
                                  uint64_t token_count,
                                  struct kvt_range_t *ranges,
                                  uint64_t capacity,
                                  uint64_t stride_bytes,
                                  uint64_t *out_count,
                                  struct kvt_lookup_t *out,
                                  struct kvt_error_t **err);

/// Does the same for a sequence whose chunk keys are known (docs/keys.md). See kvt_namespace_lookup
/// for the other parameters.
///
/// @param keys         Keys of the full chunks, KVT_KEY_BYTES each, in order.
/// @param key_count    token_count / chunk_tokens.
/// @param token_count  Tokens of the sequence, those of a last partial chunk included.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_namespace_lookup_keys(const struct kvt_namespace_t *ns,
                                       const uint8_t *keys,
                                       uint64_t key_count,
                                       uint64_t token_count,
                                       struct kvt_range_t *ranges,
                                       uint64_t capacity,
                                       uint64_t stride_bytes,
                                       uint64_t *out_count,
                                       struct kvt_lookup_t *out,
                                       struct kvt_error_t **err);

/// Reports in which tiers chunks are resident. Counts no use and references nothing.
///
/// @param keys       Keys of full chunks, KVT_KEY_BYTES each.
/// @param key_count  At most 2^27.
/// @param out        Receives a byte for each key: KVT_EXISTS_WHOLE, and 1 << KVT_TIER_* for each
///                   tier that has every cell. 1 << KVT_TIER_REMOTE is a remote hint: it may be
///                   stale, does not count for KVT_EXISTS_WHOLE, and is set only while the remote's
///                   circuit is closed. 0 = absent, or incomplete.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_namespace_exists(const struct kvt_namespace_t *ns,
                                  const uint8_t *keys,
                                  uint64_t key_count,
                                  uint8_t *out);

/// Records how long the engine took to compute tokens. Plans use the cost that these observations
/// give.
///
/// @param context_tokens  Tokens before the first computed one, at most 2^27.
/// @param tokens          Tokens computed, 1 to 2^27.
/// @param duration_ns     Time taken, from 10 ns a token to one hour.
kvt_status_t kvt_namespace_observe_prefill(const struct kvt_namespace_t *ns,
                                           uint64_t context_tokens,
                                           uint64_t tokens,
                                           uint64_t duration_ns,
                                           struct kvt_error_t **err);

/// Sets the prefill cost of a namespace, whatever is observed.
///
/// @param cost  Its alpha_ns and beta_ns, 0 to 1e15 each; null = use observations again.
kvt_status_t kvt_namespace_set_prefill_cost(const struct kvt_namespace_t *ns,
                                            const struct kvt_prefill_cost_t *cost,
                                            struct kvt_error_t **err);

/// Reads the prefill cost that plans use now.
kvt_status_t kvt_namespace_prefill_cost(const struct kvt_namespace_t *ns,
                                        struct kvt_prefill_cost_t *out);

/// Reads events, oldest first. The store keeps the newest ones (`events` of its spec, 16,384 by
/// default) for any number of readers. A reader that missed some must read the state again
/// (kvt_namespace_lookup, _exists).
///
/// @param cursor      In: number of the first event wanted; 0 = all that are kept, UINT64_MAX =
///                    future ones. Out: the cursor of the next call.
/// @param capacity    At most 2^24; 0 = only skip the events that are no longer kept.
/// @param out_count   Receives the number of events written.
/// @param out_missed  Receives the number of events that were lost; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_store_events(const struct kvt_store_t *store,
                              uint64_t *cursor,
                              struct kvt_store_event_t *events,
                              uint64_t capacity,
                              uint64_t stride_bytes,
                              uint64_t *out_count,
                              uint64_t *out_missed);

/// Submits an op that completes when the event `from` or a later one exists. Never waits. The op's
/// value is the number of events from `from` on. Its queue (kvt_queue_fd, or a callback) wakes the
/// reader, which reads all events and watches again from its new cursor. Closing the store ends the
/// op with KVT_E_CANCELLED.
///
/// @param from    Cursor of kvt_store_events; UINT64_MAX = the next event.
/// @param out_op  May be null if opts names a queue.
/// @return KVT_E_AGAIN (1,024 watches are open, `max_ops` is reached, or the queue is full).
kvt_status_t kvt_store_watch(const struct kvt_store_t *store,
                             uint64_t from,
                             const struct kvt_submit_opts_t *opts,
                             struct kvt_op_t **out_op,
                             struct kvt_error_t **err);

/// Switches the eviction policy of a tier. The new policy receives every chunk with its last use
/// and number of uses, and the learned state of a former policy of the same kind. The store is
/// blocked for 0.1 to 0.2 s per million chunks. The next open uses its spec again.
///
/// @param tier  KVT_TIER_HOST, KVT_TIER_DISK or KVT_TIER_DEVICE.
/// @param spec  The policy, as in the store's spec; not `custom`.
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_NOT_FOUND (the store has no such tier), KVT_E_UNSUPPORTED
///         (another tier).
kvt_status_t kvt_store_set_policy(const struct kvt_store_t *store,
                                  uint32_t tier,
                                  const char *spec,
                                  uint64_t spec_bytes,
                                  struct kvt_error_t **err);

/// Changes the limit of a tier: bytes of cells in HOST, bytes of files on DISK. Chunks beyond it
/// are evicted in the background; the call does not wait. The store's account in its budget limits
/// HOST as well. The next open uses its spec again.
///
/// @param tier   KVT_TIER_HOST or KVT_TIER_DISK.
/// @param bytes  At least 64 KiB for HOST; for DISK at least what kvt_store_open requires.
/// @return KVT_E_LIMIT (above what a tier can have), KVT_E_NOT_FOUND (the store has no disk),
///         KVT_E_UNSUPPORTED (another tier).
kvt_status_t kvt_store_set_limit(const struct kvt_store_t *store,
                                 uint32_t tier,
                                 uint64_t bytes,
                                 struct kvt_error_t **err);

/// Reads the latest evictions of a tier, oldest first. The store keeps 4,096 of each tier; gaps in
/// their numbers show what a reader missed.
///
/// @param tier       KVT_TIER_HOST, KVT_TIER_DISK or KVT_TIER_DEVICE.
/// @param entries    Receives entries: `id` is the first 8 bytes of the chunk's key, little-endian
///                   (with another granularity: the policy's id), `units` are blocks of 4 KiB,
///                   times CLOCK_MONOTONIC.
/// @param capacity   At most 2^24; the latest entries that fit are written.
/// @param out_count  Receives the number written.
/// @return KVT_E_NOT_FOUND (the store has no such tier), KVT_E_UNSUPPORTED (another tier),
///         KVT_E_LIMIT.
kvt_status_t kvt_store_evictions(const struct kvt_store_t *store,
                                 uint32_t tier,
                                 struct kvt_policy_log_entry_t *entries,
                                 uint64_t capacity,
                                 uint64_t stride_bytes,
                                 uint64_t *out_count);

/// Reads the traffic of each tenant, by number. The last row sums the tenants that are not counted
/// separately, if there are any.
///
/// @param capacity   At most 2^24; 1,025 always suffice.
/// @param out_count  May be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_store_tenants(const struct kvt_store_t *store,
                               struct kvt_tenant_t *rows,
                               uint64_t capacity,
                               uint64_t stride_bytes,
                               uint64_t *out_count);

/// Reads the latencies of gets, puts, worker batches and policy decisions: one row for each
/// KVT_LATENCY_*, in their order. Gets and puts count if they moved everything, from the call (or the
/// ready event) to completion; those with `after` do not count. kvt_store_metrics has the
/// histograms.
///
/// @param capacity   At most 2^24; 32 always suffice.
/// @param out_count  May be null.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_store_latencies(const struct kvt_store_t *store,
                                 struct kvt_latency_t *rows,
                                 uint64_t capacity,
                                 uint64_t stride_bytes,
                                 uint64_t *out_count);

/// Reads the counters of a store's remote; all 0 without a remote. Works on a poisoned store, too.
kvt_status_t kvt_store_remote_stats(const struct kvt_store_t *store,
                                    struct kvt_remote_stats_t *out);

/// Opens a session without tokens. The session keeps its namespace open.
///
/// @return KVT_E_AGAIN (as many are open as `sessions` of the spec), KVT_E_LIMIT (name too long).
kvt_status_t kvt_session_open(const struct kvt_namespace_t *ns,
                              const struct kvt_session_opts_t *opts,
                              struct kvt_session_t **out,
                              struct kvt_error_t **err);

/// Opens a session with the tokens of another one. Both share the full chunks; a partial chunk at
/// the end is private to each.
///
/// @param opts  Options of the new session; it inherits none.
/// @return As kvt_session_open.
kvt_status_t kvt_session_fork(const struct kvt_session_t *session,
                              const struct kvt_session_opts_t *opts,
                              struct kvt_session_t **out,
                              struct kvt_error_t **err);

/// Appends tokens. The session references the chunks that they complete, as far as these are
/// stored. On failure nothing changes.
///
/// @param count  A session has at most 2^27 tokens.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_session_append(const struct kvt_session_t *session,
                                const uint32_t *tokens,
                                uint64_t count,
                                struct kvt_error_t **err);

/// Truncates a session. Submitted transfers continue.
///
/// @param tokens  Tokens that remain; at most those that the session has.
kvt_status_t kvt_session_truncate(const struct kvt_session_t *session,
                                  uint64_t tokens,
                                  struct kvt_error_t **err);

/// Pins chunks of a session: they stay in at least one tier, also when the session is closed. The
/// weakest pin is given up when nothing else can be evicted. A chunk that is pinned twice keeps the
/// higher priority and the later end. Chunks that are not stored yet are pinned, too, if the chunk
/// table has room for them.
///
/// @param first_token  A multiple of chunk_tokens.
/// @param tokens       Up to a multiple of chunk_tokens or the end of the session; 0 = to the end.
/// @param priority     0 to 255; pins of low priority are given up first.
/// @param until_ns     End of the pin, CLOCK_MONOTONIC; 0 = none.
kvt_status_t kvt_session_pin(const struct kvt_session_t *session,
                             uint64_t first_token,
                             uint64_t tokens,
                             uint32_t priority,
                             uint64_t until_ns,
                             struct kvt_error_t **err);

/// Passes a hint about the future of a session to the policies of its store, usually when a
/// request has ended.
///
/// @param hint  Its times are CLOCK_MONOTONIC.
kvt_status_t kvt_session_hint(const struct kvt_session_t *session,
                              const struct kvt_policy_hint_t *hint,
                              struct kvt_error_t **err);

/// Reads length and layout of a session.
kvt_status_t kvt_session_info(const struct kvt_session_t *session, struct kvt_session_info_t *out);

/// Closes a session. Its chunks may be evicted then; submitted transfers continue.
kvt_status_t kvt_session_close(struct kvt_session_t **session);

/// Opens a pending event. It belongs to no runtime: transfers of any store may wait for it.
///
/// @param flags  0; none are defined.
/// @return KVT_E_LIMIT (too many are open).
kvt_status_t kvt_ready_event_open(uint64_t flags,
                                  struct kvt_ready_event_t **out,
                                  struct kvt_error_t **err);

/// Signals an event: transfers that wait for it begin. Never blocks; a second signal has no effect.
kvt_status_t kvt_ready_event_signal(const struct kvt_ready_event_t *event);

/// Reads the state of an event.
///
/// @param out_state  KVT_EVENT_*.
kvt_status_t kvt_ready_event_query(const struct kvt_ready_event_t *event, uint32_t *out_state);

/// Closes an event. If it is pending, transfers that wait for it end with KVT_E_CANCELLED and have
/// touched no memory.
kvt_status_t kvt_ready_event_close(struct kvt_ready_event_t **event);

/// Submits a put: copies the engine's tensors into host memory, from where they are written to
/// disk and remote as the spec says. Cells that are stored already are not stored again. Never
/// blocks. Closing the session does not end the transfer.
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
kvt_status_t kvt_session_put(const struct kvt_session_t *session,
                             const struct kvt_transfer_t *transfer,
                             const struct kvt_submit_opts_t *opts,
                             struct kvt_op_t **out_ops,
                             struct kvt_error_t **err);

/// Submits a get: copies KV into the engine's tensors, from whichever tier has it. Never blocks.
///
/// The op's value is the number of tokens, from the first on, that arrived without a gap. The op
/// ends with KVT_E_NOT_FOUND if cells are missing: the others have arrived, and tensors of missing
/// cells are unchanged. At its deadline it resolves with KVT_E_TIMEOUT; the tensors are the
/// library's until the op is released.
///
/// @param transfer  See kvt_session_put.
/// @param out_ops   See kvt_session_put.
/// @return As kvt_session_put.
kvt_status_t kvt_session_get(const struct kvt_session_t *session,
                             const struct kvt_transfer_t *transfer,
                             const struct kvt_submit_opts_t *opts,
                             struct kvt_op_t **out_ops,
                             struct kvt_error_t **err);

/// Submits a prefetch: brings KV into host memory for a later get. Never blocks. Value and status
/// of the op are those of a get.
///
/// @param transfer  Without views.
/// @param opts      Set `priority` to KVT_PRIORITY_PREFETCH.
/// @param out_ops   See kvt_session_put.
/// @return As kvt_session_put.
kvt_status_t kvt_session_prefetch(const struct kvt_session_t *session,
                                  const struct kvt_transfer_t *transfer,
                                  const struct kvt_submit_opts_t *opts,
                                  struct kvt_op_t **out_ops,
                                  struct kvt_error_t **err);

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
kvt_status_t kvt_session_plan(const struct kvt_session_t *session,
                              const struct kvt_plan_terms_t *terms,
                              struct kvt_plan_step_t *steps,
                              uint64_t capacity,
                              uint64_t stride_bytes,
                              uint64_t *out_count,
                              struct kvt_plan_t *out,
                              struct kvt_error_t **err);

/// Appends tokens with media. Media enter the key of the chunk that they start in and of all later
/// chunks (docs/keys.md): equal tokens with other images share nothing from there on. On failure
/// nothing changes.
///
/// @return As kvt_session_append.
kvt_status_t kvt_session_append_media(const struct kvt_session_t *session,
                                      const struct kvt_sequence_t *sequence,
                                      struct kvt_error_t **err);

/// Looks up a sequence with media; otherwise as kvt_namespace_lookup.
///
/// @return As kvt_namespace_lookup.
kvt_status_t kvt_namespace_lookup_media(const struct kvt_namespace_t *ns,
                                        const struct kvt_sequence_t *sequence,
                                        struct kvt_range_t *ranges,
                                        uint64_t capacity,
                                        uint64_t stride_bytes,
                                        uint64_t *out_count,
                                        struct kvt_lookup_t *out,
                                        struct kvt_error_t **err);

/// Computes the keys of the full chunks of a sequence (docs/keys.md), as events and files have
/// them. A router that knows the keys of each store finds a prompt's prefix by them.
///
/// @param keys      Receives KVT_KEY_BYTES per chunk, in order.
/// @param capacity  In keys.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_namespace_chunk_keys(const struct kvt_namespace_t *ns,
                                      const struct kvt_sequence_t *sequence,
                                      uint8_t *keys,
                                      uint64_t capacity,
                                      uint64_t *out_count,
                                      struct kvt_error_t **err);

/// Computes the keys of blocks (docs/keys.md), as events and files have them.
///
/// @param out  Receives KVT_KEY_BYTES per name.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_namespace_block_keys(const struct kvt_namespace_t *ns,
                                      const struct kvt_block_names_t *names,
                                      uint8_t *out,
                                      struct kvt_error_t **err);

/// Reads in which tiers blocks are resident. Counts no use and references nothing. It does not ask
/// the remote: a block that kvt_session_remote_lookup_blocks found there has 1 << KVT_TIER_REMOTE without
/// KVT_EXISTS_WHOLE, and gets and prefetches fetch it.
///
/// @param out  Receives a byte per name, as kvt_namespace_exists.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_namespace_blocks_exist(const struct kvt_namespace_t *ns,
                                        const struct kvt_block_names_t *names,
                                        uint8_t *out,
                                        struct kvt_error_t **err);

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
kvt_status_t kvt_session_put_blocks(const struct kvt_session_t *session,
                                    const struct kvt_blocks_t *blocks,
                                    const struct kvt_submit_opts_t *opts,
                                    struct kvt_op_t **out_op,
                                    struct kvt_error_t **err);

/// Submits a get of blocks, from whichever tier has them; from the remote only those that
/// kvt_session_remote_lookup_blocks found there. Never blocks. If blocks are missing, the op ends with
/// KVT_E_NOT_FOUND and its items say which; the tensors of a missing block may be written in part.
///
/// @param blocks  See kvt_session_put_blocks.
/// @param out_op  See kvt_session_put_blocks.
/// @return As kvt_session_put.
kvt_status_t kvt_session_get_blocks(const struct kvt_session_t *session,
                                    const struct kvt_blocks_t *blocks,
                                    const struct kvt_submit_opts_t *opts,
                                    struct kvt_op_t **out_op,
                                    struct kvt_error_t **err);

/// Submits a prefetch of blocks into host memory, for a later get. Never blocks. The items of the
/// op are those of a get.
///
/// @param blocks  Without views.
/// @param opts    Set `priority` to KVT_PRIORITY_PREFETCH.
/// @param out_op  See kvt_session_put_blocks.
/// @return As kvt_session_put.
kvt_status_t kvt_session_prefetch_blocks(const struct kvt_session_t *session,
                                         const struct kvt_blocks_t *blocks,
                                         const struct kvt_submit_opts_t *opts,
                                         struct kvt_op_t **out_op,
                                         struct kvt_error_t **err);

/// Removes blocks from all tiers, unless transfers or sessions (kvt_session_hold_blocks) reference
/// them. Does not wait for the disk: after a crash, blocks that were on disk may be found again, as
/// after any eviction.
///
/// @param names  Names without a block are skipped.
/// @param out    Counts; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_session_drop_blocks(const struct kvt_session_t *session,
                                     const struct kvt_block_names_t *names,
                                     struct kvt_clear_report_t *out,
                                     struct kvt_error_t **err);

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
kvt_status_t kvt_session_remote_lookup(const struct kvt_session_t *session,
                                       const struct kvt_submit_opts_t *opts,
                                       struct kvt_op_t **out_op,
                                       struct kvt_error_t **err);

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
/// @return KVT_E_AGAIN (as kvt_session_remote_lookup, or 2^20 blocks are being looked up), KVT_E_LIMIT.
kvt_status_t kvt_session_remote_lookup_blocks(const struct kvt_session_t *session,
                                              const struct kvt_block_names_t *names,
                                              const struct kvt_submit_opts_t *opts,
                                              struct kvt_op_t **out_op,
                                              struct kvt_error_t **err);

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
/// @param out  Receives a byte per name, as kvt_namespace_blocks_exist; 0 = not held. May be null if
///             only kvt_session_close releases them.
/// @return KVT_E_LIMIT (also: 2^20 holds of a session). On failure nothing is held.
kvt_status_t kvt_session_hold_blocks(const struct kvt_session_t *session,
                                     const struct kvt_block_names_t *names,
                                     uint8_t *out,
                                     struct kvt_error_t **err);

/// Releases one hold of each block. A block without holds may be evicted. Never blocks.
///
/// The session must hold each block as often as it is named, else nothing changes: a miscount
/// would release holds of another part of the program.
///
/// @return KVT_E_INVALID (also: not held as often), KVT_E_LIMIT.
kvt_status_t kvt_session_release_blocks(const struct kvt_session_t *session,
                                        const struct kvt_block_names_t *names,
                                        struct kvt_error_t **err);

/// Passes a hint about the future of each block to the policies, as kvt_session_hint does for a
/// session. Names without a block are skipped.
///
/// @param session  Supplies tenant and priority; the hint does not concern it.
/// @param hint     Its times are CLOCK_MONOTONIC.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_session_hint_blocks(const struct kvt_session_t *session,
                                     const struct kvt_block_names_t *names,
                                     const struct kvt_policy_hint_t *hint,
                                     struct kvt_error_t **err);

/// Removes all chunks of a namespace that nothing references from all tiers, and waits until no
/// opening of the store finds them again. Chunks that are stored meanwhile may stay. The bytes
/// stay in files until these are reused, but no lookup finds them.
///
/// @param out  Counts; may be null.
/// @return KVT_E_TIMEOUT, KVT_E_BUDGET, KVT_E_IO: removed chunks may be found by the next opening
///         (call again).
kvt_status_t kvt_namespace_clear(const struct kvt_namespace_t *ns,
                                 uint64_t deadline_ns,
                                 struct kvt_clear_report_t *out,
                                 struct kvt_error_t **err);

/// Removes chunks of a session from all tiers, unless something else references them. The session
/// keeps its tokens, and finds chunks that stay or are stored again. Does not wait for the disk:
/// after a crash, chunks that were on disk may be found again, as after any eviction. For the
/// range, see kvt_session_pin.
///
/// @param out  Counts; may be null.
kvt_status_t kvt_session_drop(const struct kvt_session_t *session,
                              uint64_t first_token,
                              uint64_t tokens,
                              struct kvt_clear_report_t *out,
                              struct kvt_error_t **err);

/// Demotes chunks of a session, also referenced and pinned ones. Chunks that are not on disk yet
/// are written, whatever admission and `write` of the spec say; then their memory is freed. Never
/// blocks: events (KVT_STORE_EVENT_REMOVED) and kvt_store_stats show the end. A get promotes the chunks
/// again. A chunk that cannot be written stays in memory while something references it. For the
/// range, see kvt_session_pin.
///
/// @param out  Counts; may be null.
kvt_status_t kvt_session_demote(const struct kvt_session_t *session,
                                uint64_t first_token,
                                uint64_t tokens,
                                struct kvt_demote_report_t *out,
                                struct kvt_error_t **err);

/// Removes the pins of chunks of a session, whichever session set them. For the range, see
/// kvt_session_pin.
kvt_status_t kvt_session_unpin(const struct kvt_session_t *session,
                               uint64_t first_token,
                               uint64_t tokens,
                               struct kvt_error_t **err);

/// Opens a policy.
///
/// @return KVT_E_SPEC, KVT_E_LIMIT.
kvt_status_t kvt_policy_open(const struct kvt_policy_opts_t *opts,
                             struct kvt_policy_t **out,
                             struct kvt_error_t **err);

/// Closes a policy. Calls in progress still finish; then the callbacks' user data is released.
kvt_status_t kvt_policy_close(struct kvt_policy_t **policy);

/// Switches to another policy. Objects keep their last use, number of uses, references, pins and
/// sessions. Learned state passes only to a policy of the same kind. The call sorts all objects;
/// other calls on the policy wait meanwhile.
///
/// @param spec  As in kvt_policy_opts_t; "custom" needs a score function given at the open.
/// @return KVT_E_SPEC, KVT_E_LIMIT.
kvt_status_t kvt_policy_switch(const struct kvt_policy_t *policy,
                               const char *spec,
                               uint64_t spec_bytes,
                               struct kvt_error_t **err);

/// Sets the capacity. Evicts nothing.
///
/// @param capacity_units  0 = unknown.
kvt_status_t kvt_policy_set_capacity(const struct kvt_policy_t *policy, uint64_t capacity_units);

/// Counts the policies that can be opened.
kvt_status_t kvt_policy_count(uint64_t *out_count);

/// Describes a policy that can be opened.
///
/// @param index  0 to kvt_policy_count - 1; kvt_policy_log_entry_t.policy is such an index.
/// @return KVT_E_NOT_FOUND.
kvt_status_t kvt_policy_info(uint64_t index, struct kvt_policy_info_t *out);

/// Looks up a path of objects and counts the lookup. Touches the hits, the last one first, so that
/// no object is older than its children. Objects behind a missing one are hits only with
/// KVT_POLICY_HOLES.
///
/// @param now_ns       The caller's monotonic clock, -2^62 to 2^62 - 1; it must not go back.
///                     0 = CLOCK_MONOTONIC. Use one clock per policy.
/// @param context      May be null.
/// @param ids          The path, from its start.
/// @param count        At most 2^24.
/// @param out_found    `count` bytes: 1 for a hit, else 0; may be null.
/// @param out_leading  Number of hits before the first miss; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_policy_lookup(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const struct kvt_policy_context_t *context,
                               const uint64_t *ids,
                               uint64_t count,
                               uint8_t *out_found,
                               uint64_t *out_leading,
                               struct kvt_error_t **err);

/// Touches objects, the last one first, without counting a lookup. Skips ids that are not in the
/// table.
///
/// @param now_ns       See kvt_policy_lookup, also for context and count.
/// @param out_touched  Number of objects touched; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_policy_touch(const struct kvt_policy_t *policy,
                              int64_t now_ns,
                              const struct kvt_policy_context_t *context,
                              const uint64_t *ids,
                              uint64_t count,
                              uint64_t *out_touched,
                              struct kvt_error_t **err);

/// Records a use of objects: touches those in the table and inserts the others, all or none. For
/// engines that keep their own tables: kvt_policy_select prefers recorded uses to columns.
///
/// @param now_ns     See kvt_policy_lookup, also for context and count.
/// @param units      Sizes of new objects, 1 to 2^32 - 1; null = 1 each.
/// @param out_added  Number of objects inserted; may be null.
/// @return KVT_E_LIMIT (also: the table is full).
kvt_status_t kvt_policy_record(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const struct kvt_policy_context_t *context,
                               const uint64_t *ids,
                               const uint64_t *units,
                               uint64_t count,
                               uint64_t *out_added,
                               struct kvt_error_t **err);

/// Inserts objects, all or none. An id that is in the table is an error.
///
/// @param now_ns  See kvt_policy_lookup, also for context and count.
/// @param rows    Parents before children: the first row counts as used last.
/// @return KVT_E_LIMIT (also: the table is full; evict first).
kvt_status_t kvt_policy_insert(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const struct kvt_policy_context_t *context,
                               const struct kvt_policy_object_t *rows,
                               uint64_t count,
                               uint64_t stride_bytes,
                               struct kvt_error_t **err);

/// Removes objects that their owner gave up, with their references and pins; all or none. It does
/// not count as an eviction. Children must be removed with their parents.
///
/// @param now_ns  See kvt_policy_lookup, also for count.
/// @param ids     Each once.
/// @return KVT_E_NOT_FOUND, KVT_E_STATE (a child would stay), KVT_E_LIMIT.
kvt_status_t kvt_policy_remove(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const uint64_t *ids,
                               uint64_t count,
                               struct kvt_error_t **err);

/// Reports that the objects chosen by kvt_policy_select were freed: removes them as evicted, all or
/// none. Statistics, log, advice and ghosts then know of them. Children must be evicted with their
/// parents. An id that is not in the table counts as 1 unit and is remembered, but not logged.
///
/// @param now_ns  See kvt_policy_lookup, also for count.
/// @param ids     Each once.
/// @return KVT_E_STATE (a child would stay), KVT_E_LIMIT.
kvt_status_t kvt_policy_report_evicted(const struct kvt_policy_t *policy,
                                       int64_t now_ns,
                                       const uint64_t *ids,
                                       uint64_t count,
                                       struct kvt_error_t **err);

/// Changes the sizes of objects, all or none.
///
/// @param units  New sizes, 1 to 2^32 - 1.
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_resize(const struct kvt_policy_t *policy,
                               const uint64_t *ids,
                               const uint64_t *units,
                               uint64_t count,
                               struct kvt_error_t **err);

/// Adds a reference to each object, all or none. A referenced object is never evicted.
///
/// @param ids    An id that occurs twice gets two references.
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_acquire(const struct kvt_policy_t *policy,
                                const uint64_t *ids,
                                uint64_t count,
                                struct kvt_error_t **err);

/// Removes a reference from each object, all or none.
///
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_STATE (an object has no reference), KVT_E_LIMIT.
kvt_status_t kvt_policy_release(const struct kvt_policy_t *policy,
                                const uint64_t *ids,
                                uint64_t count,
                                struct kvt_error_t **err);

/// Pins objects, all or none. A pinned object is never evicted. Pins are not counted: one
/// kvt_policy_unpin ends any number.
///
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_pin(const struct kvt_policy_t *policy,
                            const uint64_t *ids,
                            uint64_t count,
                            struct kvt_error_t **err);

/// Unpins objects, all or none. An object that is not pinned is no error.
///
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_unpin(const struct kvt_policy_t *policy,
                              const uint64_t *ids,
                              uint64_t count,
                              struct kvt_error_t **err);

/// Passes the engine's hint about objects to the policy, usually about the path of a finished
/// request. Skips ids that are not in the table.
///
/// @param now_ns     See kvt_policy_lookup, also for context and count.
/// @param out_known  Number of ids in the table; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_policy_hint(const struct kvt_policy_t *policy,
                             int64_t now_ns,
                             const struct kvt_policy_context_t *context,
                             const uint64_t *ids,
                             uint64_t count,
                             const struct kvt_policy_hint_t *hint,
                             uint64_t *out_known,
                             struct kvt_error_t **err);

/// Evicts objects until `required_units` are free. Removes the victims from the table; the caller
/// frees their memory. No victim is superfluous. If there are too few candidates, or `capacity` is
/// too small, the rest is a shortfall and no error.
///
/// @param now_ns          See kvt_policy_lookup.
/// @param required_units  0 evicts nothing.
/// @param victims         Receives the victims in the order of eviction.
/// @param capacity        Most victims, up to 2^28.
/// @return KVT_E_LIMIT, any status of the score function.
kvt_status_t kvt_policy_evict(const struct kvt_policy_t *policy,
                              int64_t now_ns,
                              uint64_t required_units,
                              struct kvt_policy_victim_t *victims,
                              uint64_t capacity,
                              uint64_t stride_bytes,
                              struct kvt_policy_outcome_t *out,
                              struct kvt_error_t **err);

/// Reports the victims that kvt_policy_evict would choose, and evicts nothing. A policy that
/// learns, or that moves objects while it searches (such as arc and sieve), may choose others the
/// next time. Parameters and statuses are those of kvt_policy_evict.
kvt_status_t kvt_policy_preview(const struct kvt_policy_t *policy,
                                int64_t now_ns,
                                uint64_t required_units,
                                struct kvt_policy_victim_t *victims,
                                uint64_t capacity,
                                uint64_t stride_bytes,
                                struct kvt_policy_outcome_t *out,
                                struct kvt_error_t **err);

/// Chooses candidates that free `required_blocks`, in the policy's order. No victim is superfluous.
/// Ids break ties, so the order of the rows does not matter. The call evicts nothing: the caller
/// frees the victims and reports them with kvt_policy_report_evicted.
///
/// - Uses recorded for an id (such as by kvt_policy_record) take precedence over its columns.
/// - The table keeps an object's context, tokens, layer, layers, chunk, chunks and cost from the
///   columns, for policies that use them.
/// - Pinned and shared rows are never chosen, nor rows whose object in the table is pinned,
///   referenced or the parent of another object.
///
/// @param now_ns           See kvt_policy_lookup.
/// @param required_blocks  0 chooses nothing. If it cannot be reached, every candidate that may be
///                         evicted is chosen, and the rest is a shortfall.
/// @param flags            KVT_SELECT_*.
/// @param selection        With KVT_E_TOO_SMALL only its counts are written.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, any status of the score function.
kvt_status_t kvt_policy_select(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const struct kvt_policy_columns_t *candidates,
                               uint64_t required_blocks,
                               uint64_t flags,
                               struct kvt_policy_selection_t *selection,
                               struct kvt_error_t **err);

/// Reads a policy's statistics. Visits every session, so keep it out of hot paths.
kvt_status_t kvt_policy_stats(const struct kvt_policy_t *policy, struct kvt_policy_stats_t *out);

/// Writes the policy's spec in canonical form, not NUL-terminated.
///
/// @param out_bytes  Length of the spec; may be null.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_policy_spec(const struct kvt_policy_t *policy,
                             char *out,
                             uint64_t out_capacity,
                             uint64_t *out_bytes);

/// Reads a gauge: a number particular to the policy, such as "arc_p" of arc.
///
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_gauge(const struct kvt_policy_t *policy,
                              const char *name,
                              uint64_t name_bytes,
                              double *out_value,
                              struct kvt_error_t **err);

/// Reads a gauge by its index, to list them all. kvt_policy_switch changes the list.
///
/// @param out_name        Not NUL-terminated; lives as long as the library. May be null.
/// @param out_name_bytes  May be null.
/// @param out_value       May be null.
/// @return KVT_E_NOT_FOUND (`index` is past the last gauge).
kvt_status_t kvt_policy_gauge_at(const struct kvt_policy_t *policy,
                                 uint64_t index,
                                 const char **out_name,
                                 uint64_t *out_name_bytes,
                                 double *out_value);

/// Reads the log of evictions, oldest first.
///
/// @param from_number  First entry wanted, such as the last one read plus 1. Overwritten entries
///                     are left out.
/// @param capacity     Up to 2^21. More entries are no error: read on from the last one.
/// @param out_count    Entries written.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_policy_log(const struct kvt_policy_t *policy,
                            uint64_t from_number,
                            struct kvt_policy_log_entry_t *entries,
                            uint64_t capacity,
                            uint64_t stride_bytes,
                            uint64_t *out_count);

/// Advises a scheduler on its batch size: half if too much is recomputed, double if hardly anything
/// is evicted. Consecutive windows of lookups must agree first (kvt_policy_advice_rules_t). A change is
/// advised once.
///
/// @param batch  The current batch size.
kvt_status_t kvt_policy_advise(const struct kvt_policy_t *policy,
                               uint64_t batch,
                               struct kvt_policy_advice_t *out);

/// Replaces the rules of kvt_policy_advise. Windows before the call no longer count.
kvt_status_t kvt_policy_set_advice(const struct kvt_policy_t *policy,
                                   const struct kvt_policy_advice_rules_t *given,
                                   struct kvt_error_t **err);

/// Opens a sparse policy for one sequence; close it with kvt_sparse_close.
///
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_BUDGET; for a file that the spec names KVT_E_NOT_FOUND,
///         KVT_E_IO and KVT_E_CORRUPT.
kvt_status_t kvt_sparse_open(const struct kvt_sparse_opts_t *opts,
                             struct kvt_sparse_t **out,
                             struct kvt_error_t **err);

/// Closes a policy. Does not wait: a running call ends first, then user data is destroyed.
kvt_status_t kvt_sparse_close(struct kvt_sparse_t **policy);

/// Copies a policy with its state, for a sequence that continues from here. The account of the
/// original pays for the copy, too.
///
/// @return KVT_E_UNSUPPORTED (a custom policy without `fork`), KVT_E_BUDGET.
kvt_status_t kvt_sparse_fork(const struct kvt_sparse_t *policy,
                             struct kvt_sparse_t **out,
                             struct kvt_error_t **err);

/// Reads the traits of a policy.
kvt_status_t kvt_sparse_traits(const struct kvt_sparse_t *policy, struct kvt_sparse_traits_t *out);

/// Reads the counters of a policy.
kvt_status_t kvt_sparse_stats(const struct kvt_sparse_t *policy, struct kvt_sparse_stats_t *out);

/// Counts the policies that kvt_sparse_open knows by name.
kvt_status_t kvt_sparse_count(uint64_t *out_count);

/// Describes a policy that kvt_sparse_open knows by name.
///
/// @param index  0 to kvt_sparse_count - 1.
/// @return KVT_E_NOT_FOUND (the index is too large).
kvt_status_t kvt_sparse_info(uint64_t index, struct kvt_sparse_info_t *out);

/// Adds the keys of new tokens of a layer. Their positions are already encoded (RoPE is applied).
///
/// @param first  Position of the first token.
/// @param keys   [tokens, key heads, key dim], or rows of the policy's own if its traits have some.
///               Elements must be finite.
/// @return KVT_E_STATE (tokens before `first` are missing), KVT_E_LIMIT, KVT_E_BUDGET,
///         KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (not in host memory).
kvt_status_t kvt_sparse_append(const struct kvt_sparse_t *policy,
                               uint32_t layer,
                               uint32_t first,
                               const struct kvt_rows_t *keys,
                               struct kvt_error_t **err);

/// Registers a block of a layer as a candidate. Call it before the block is moved away, while its
/// keys can be read. Appended tokens are known to the policy without it.
///
/// @param id     Id of the block in kvt_sparse_select.
/// @param first  Position of its first token.
/// @param keys   The model's keys of its tokens, all, or the first ones.
/// @return As kvt_sparse_append.
kvt_status_t kvt_sparse_add_block(const struct kvt_sparse_t *policy,
                                  uint32_t layer,
                                  uint32_t id,
                                  uint32_t first,
                                  const struct kvt_rows_t *keys,
                                  struct kvt_error_t **err);

/// Registers a block that decode has completed in all layers: kvt_sparse_add_block for each layer, or
/// one call of on_decode_offload of a custom policy.
///
/// @param keys  An entry for each layer of the model.
/// @return As kvt_sparse_append.
kvt_status_t kvt_sparse_seal_all(const struct kvt_sparse_t *policy,
                                 uint32_t id,
                                 uint32_t first,
                                 const struct kvt_rows_t *keys,
                                 uint64_t count,
                                 uint64_t stride_bytes,
                                 struct kvt_error_t **err);

/// Adds the attention that each resident token of a layer received from some queries: the result of
/// kvt_column_sums_open or kvt_decode_sums.
///
/// @param queries    Number of queries: the last ones of a prompt, or those of a decode step.
/// @param sums       [query heads, tokens], or [tokens] for all heads; finite, at least 0.
/// @param sum_count  At most 2^28.
/// @param tokens     Resident tokens of a list; sums are in their order.
/// @return KVT_E_LIMIT, KVT_E_BUDGET.
kvt_status_t kvt_sparse_observe(const struct kvt_sparse_t *policy,
                                uint32_t layer,
                                uint32_t queries,
                                const float *sums,
                                uint64_t sum_count,
                                uint32_t tokens,
                                struct kvt_error_t **err);

/// Passes what the engine computed for the next kvt_sparse_select or kvt_sparse_index of a layer: a
/// score for each candidate (KVT_NEEDS_SCORES), or weights [queries, query heads]
/// (KVT_NEEDS_WEIGHTS).
///
/// @param score_count  At most 2^28.
/// @return KVT_E_UNSUPPORTED (the policy needs neither), KVT_E_LIMIT, KVT_E_BUDGET.
kvt_status_t kvt_sparse_add_scores(const struct kvt_sparse_t *policy,
                                   uint32_t layer,
                                   const float *scores,
                                   uint64_t score_count,
                                   struct kvt_error_t **err);

/// Truncates the sequence to its first `tokens` tokens.
kvt_status_t kvt_sparse_truncate(const struct kvt_sparse_t *policy,
                                 uint32_t tokens,
                                 struct kvt_error_t **err);

/// Starts a new, empty sequence.
kvt_status_t kvt_sparse_reset(const struct kvt_sparse_t *policy);

/// Saves the policy's state of a block, to be stored with the block and restored by
/// kvt_sparse_load.
///
/// @param data       Null = only the size is wanted.
/// @param out_count  Receives the number of bytes; 0 = the policy saves nothing with blocks.
/// @return KVT_E_TOO_SMALL, KVT_E_NOT_FOUND (an unknown block).
kvt_status_t kvt_sparse_save(const struct kvt_sparse_t *policy,
                             uint32_t layer,
                             uint32_t id,
                             uint8_t *data,
                             uint64_t capacity,
                             uint64_t *out_count,
                             struct kvt_error_t **err);

/// Restores the state that kvt_sparse_save saved for a block. The bytes are validated.
///
/// @param id     Id of the block from now on.
/// @param first  Position of its first token.
/// @return KVT_E_CORRUPT, KVT_E_UNSUPPORTED (the policy saves nothing with blocks), KVT_E_STATE
///         (tokens before `first` are missing), KVT_E_LIMIT, KVT_E_BUDGET.
kvt_status_t kvt_sparse_load(const struct kvt_sparse_t *policy,
                             uint32_t layer,
                             uint32_t id,
                             uint32_t first,
                             const uint8_t *data,
                             uint64_t count,
                             struct kvt_error_t **err);

/// Selects the candidates to load for a query.
///
/// @param query       [queries, query heads, key dim], of the layer `ahead` (traits) layers
///                    earlier; null = policies that select by queries choose all candidates.
/// @param candidates  Ids of blocks, in any order, each once.
/// @param ids         Receives the chosen ids, ascending, then KVT_SPARSE_NO_ID to its end.
/// @param capacity    At least candidate_count; with less the policy is not called.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (no KVT_SPARSE_LOAD_* for this phase), KVT_E_STATE
///         (weights or keys are missing), KVT_E_LIMIT, KVT_E_UNAVAILABLE (not in host memory).
kvt_status_t kvt_sparse_select(const struct kvt_sparse_t *policy,
                               uint32_t layer,
                               const struct kvt_rows_t *query,
                               const uint32_t *candidates,
                               uint64_t candidate_count,
                               const struct kvt_sparse_context_t *context,
                               uint32_t *ids,
                               uint64_t capacity,
                               uint64_t *out_count,
                               struct kvt_error_t **err);

/// Selects the keys that queries are computed with. After KVT_E_TOO_SMALL, kvt_sparse_last_index
/// returns the same answer.
///
/// @param queries  [queries, query heads, key dim].
/// @param keys     All keys of the sequence with KVT_NEEDS_ALL_KEYS; otherwise may be null.
/// @param out      Set its arrays and their capacities.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (no KVT_SPARSE_INDEX_* for this phase), KVT_E_STATE
///         (weights or keys are missing), KVT_E_LIMIT, KVT_E_UNAVAILABLE (not in host memory).
kvt_status_t kvt_sparse_index(const struct kvt_sparse_t *policy,
                              uint32_t layer,
                              const struct kvt_rows_t *queries,
                              const struct kvt_rows_t *keys,
                              const struct kvt_sparse_context_t *context,
                              struct kvt_index_t *out,
                              struct kvt_error_t **err);

/// Reads the last index of the policy again.
///
/// @param out  See kvt_sparse_index.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_sparse_last_index(const struct kvt_sparse_t *policy,
                                   struct kvt_index_t *out,
                                   struct kvt_error_t **err);

/// Computes the attention of a prompt, or of a part of one, on the calling thread. It uses the
/// policy's index and the library's kernel, or sparse_prefill_attention of a custom policy. A
/// policy without KVT_SPARSE_INDEX_PREFILL sees all keys. For several threads use kvt_sparse_index
/// and kvt_prefill_open.
///
/// @param queries  [queries, query heads, key dim]: the last tokens of the sequence.
/// @param keys     All keys of the sequence.
/// @param values   All values; with latent attention, the first elements of the keys.
/// @param context  is_prefill must be 1.
/// @param out      Receives [queries, query heads, value dim].
/// @param lse      Receives [queries, query heads] log-sum-exps; may be null.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (a policy with rows of its own), KVT_E_STATE,
///         KVT_E_LIMIT, KVT_E_UNAVAILABLE (not in host memory).
kvt_status_t kvt_sparse_prefill_attention(const struct kvt_sparse_t *policy,
                                          uint32_t layer,
                                          const struct kvt_rows_t *queries,
                                          const struct kvt_rows_t *keys,
                                          const struct kvt_rows_t *values,
                                          const struct kvt_sparse_context_t *context,
                                          float *out,
                                          uint64_t out_count,
                                          float *lse,
                                          uint64_t lse_count,
                                          struct kvt_error_t **err);

/// Chooses the tokens of a layer that stay, if some are to be evicted. Nothing is evicted before
/// kvt_sparse_commit_eviction; the call may be repeated. After KVT_E_TOO_SMALL, kvt_sparse_last_retained
/// returns the same answer.
///
/// @param out          Set its arrays and their capacities. Counts are 0 if all tokens stay.
/// @param out_evicted  Receives 1 if tokens are to be evicted, else 0.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (no KVT_SPARSE_EVICT_* for this phase), KVT_E_STATE
///         (sums are missing), KVT_E_LIMIT.
kvt_status_t kvt_sparse_plan_eviction(const struct kvt_sparse_t *policy,
                                      uint32_t layer,
                                      const struct kvt_sparse_context_t *context,
                                      struct kvt_token_lists_t *out,
                                      uint32_t *out_evicted,
                                      struct kvt_error_t **err);

/// Reads the last lists of kvt_sparse_plan_eviction again; none if all tokens stayed.
///
/// @param out  See kvt_sparse_plan_eviction.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_sparse_last_retained(const struct kvt_sparse_t *policy,
                                      struct kvt_token_lists_t *out,
                                      struct kvt_error_t **err);

/// Confirms an eviction: only the tokens in `kept` are left in the layer.
///
/// @param kept  Some of the resident tokens: an answer of kvt_sparse_plan_eviction, of this policy or
///              another one of the sequence, to which the engine may have added tokens.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_sparse_commit_eviction(const struct kvt_sparse_t *policy,
                                        uint32_t layer,
                                        const struct kvt_token_lists_t *kept,
                                        struct kvt_error_t **err);

/// Translates an index of positions into an index of the rows of a buffer. Tokens that are not in
/// the buffer are left out. No token may be missing between the first query and the last token of
/// the buffer.
///
/// @param index            Index of positions; null = all keys.
/// @param first            Position of the first query.
/// @param count            Number of queries.
/// @param out              Set its arrays and their capacities.
/// @param out_first_query  Receives first_query of a problem over these rows, whose first_key is 0.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT.
kvt_status_t kvt_index_place(const struct kvt_attention_t *attention,
                             const struct kvt_block_placement_t *placement,
                             const struct kvt_index_t *index,
                             uint32_t first,
                             uint32_t count,
                             struct kvt_index_t *out,
                             uint32_t *out_first_query,
                             struct kvt_error_t **err);

/// Adds sums of attention over the rows of a buffer to sums over the resident tokens, as
/// kvt_sparse_observe takes them. Tokens that are not in the buffer get nothing.
///
/// @param select       Index of rows of the decode whose kvt_decode_sums are passed; null = `sums`
///                     are of all rows.
/// @param first_query  With `select`: row of the first query.
/// @param queries      With `select`: number of queries.
/// @param sums         [query heads, rows]; [rows] for all heads if they share one list; with
///                     `select` [query heads, sum_keys].
/// @param out          [query heads, tokens], or [tokens]; undefined after a failure.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_column_sums_place(const struct kvt_resident_tokens_t *resident,
                                   const struct kvt_block_placement_t *placement,
                                   const struct kvt_index_t *select,
                                   uint32_t first_query,
                                   uint32_t queries,
                                   const float *sums,
                                   uint64_t sum_count,
                                   float *out,
                                   uint64_t out_count,
                                   struct kvt_error_t **err);

/// Computes how much memory suffices for every problem within some limits, to be allocated once.
///
/// @param kernel       KVT_KERNEL_*.
/// @param out_memory   Receives the floats of `memory` of kvt_decode_open, 0 for other kernels; may
///                     be null.
/// @param out_scratch  Receives the floats of scratch of each thread; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_kernel_workspace(uint32_t kernel,
                                  const struct kvt_kernel_limits_t *limits,
                                  uint64_t *out_memory,
                                  uint64_t *out_scratch,
                                  struct kvt_error_t **err);

/// Reads the size of a job.
kvt_status_t kvt_attention_job_info(const struct kvt_attention_job_t *job,
                                    struct kvt_attention_job_info_t *out);

/// Runs items of a job on the calling thread.
///
/// @param step           Below kvt_attention_job_info_t.steps.
/// @param items          Number of items; those after the step's last one are ignored.
/// @param scratch        Memory that no other thread uses during the call.
/// @param scratch_count  At least kvt_attention_job_info_t.scratch_count.
/// @return KVT_E_TOO_SMALL (scratch).
///
/// Threading: several threads at once, each with other items.
kvt_status_t kvt_attention_job_run(const struct kvt_attention_job_t *job,
                                   uint32_t step,
                                   uint32_t first,
                                   uint32_t items,
                                   float *scratch,
                                   uint64_t scratch_count,
                                   struct kvt_error_t **err);

/// Waits for running items and closes a job. Everything that it borrowed is the caller's again.
kvt_status_t kvt_attention_job_close(struct kvt_attention_job_t **job);

/// Opens a job that computes the attention of a prompt or of a part of one.
///
/// @param out        Receives [queries, query_heads, value_dim]; zeros where a query sees no key.
/// @param out_count  Capacity in elements.
/// @param lse        Receives log-sum-exps [queries, query_heads], -inf where a query sees no key;
///                   may be null.
/// @param lse_count  Capacity in elements.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device
///         memory).
kvt_status_t kvt_prefill_open(const struct kvt_attention_args_t *args,
                              float *out,
                              uint64_t out_count,
                              float *lse,
                              uint64_t lse_count,
                              struct kvt_attention_job_t **out_job,
                              struct kvt_error_t **err);

/// Computes the memory that kvt_decode_open needs for the same input.
///
/// @param flags      KVT_DECODE_*.
/// @param out_count  Receives the number of f32 elements.
/// @return The codes of kvt_decode_open, except KVT_E_TOO_SMALL.
kvt_status_t kvt_decode_memory(const struct kvt_attention_args_t *args,
                               uint64_t flags,
                               uint64_t *out_count,
                               struct kvt_error_t **err);

/// Opens a job of two steps that computes the attention of the next token or of a few. See
/// kvt_prefill_open for out and lse; lse is required.
///
/// @param args          `select` may have blocks only, one row of lists per head for all queries.
/// @param flags         KVT_DECODE_*.
/// @param memory        Memory of the job until it is closed.
/// @param memory_count  At least the result of kvt_decode_memory.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype, or other lists),
///         KVT_E_UNAVAILABLE (device memory).
kvt_status_t kvt_decode_open(const struct kvt_attention_args_t *args,
                             uint64_t flags,
                             float *out,
                             uint64_t out_count,
                             float *lse,
                             uint64_t lse_count,
                             float *memory,
                             uint64_t memory_count,
                             struct kvt_attention_job_t **out_job,
                             struct kvt_error_t **err);

/// Opens a job that sums, for each key, the attention that a prompt's queries pay to it. Open it
/// after a kvt_prefill_open job of the same input has ended.
///
/// @param lse        Log-sum-exps of that job, over all keys: [queries, query_heads].
/// @param first      First query that counts, an index into the queries.
/// @param flags      KVT_SUMS_*.
/// @param sums       Receives [query_heads, keys] with KVT_SUMS_BY_HEAD, else [keys].
/// @param sum_count  Exactly that many elements.
/// @return KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device memory).
kvt_status_t kvt_column_sums_open(const struct kvt_attention_args_t *args,
                                  const float *lse,
                                  uint64_t lse_count,
                                  uint32_t first,
                                  uint64_t flags,
                                  float *sums,
                                  uint64_t sum_count,
                                  struct kvt_attention_job_t **out_job,
                                  struct kvt_error_t **err);

/// Adds, for each key, the attention that a decode's queries pay to it. Requires KVT_DECODE_SCORES,
/// and that all items of both steps have ended.
///
/// @param flags      KVT_SUMS_*; KVT_SUMS_BY_HEAD is required if heads select different keys.
/// @param sums       In and out: [query_heads, sum_keys] or [sum_keys] (kvt_attention_job_info_t), in the
///                   order of the selected keys.
/// @param sum_count  Exactly that many elements.
///
/// Threading: not while a thread runs items of the job.
kvt_status_t kvt_decode_sums(const struct kvt_attention_job_t *job,
                             uint64_t flags,
                             float *sums,
                             uint64_t sum_count,
                             struct kvt_error_t **err);

/// Adds keys to the bounding boxes of pages. A box has, for each page and head, the least and then
/// the greatest value of each element of the page's keys.
///
/// @param boxes        In and out: [pages, key_heads, 2 * key_dim].
/// @param box_count    Capacity in elements.
/// @param page_tokens  At least 1.
/// @param first        Position of the first key. A box is reset if its page's first key is among
///                     the keys, else widened.
/// @param keys         [keys, key_heads, key_dim]; key_dim at most 1024.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device memory).
kvt_status_t kvt_pages_extend(float *boxes,
                              uint64_t box_count,
                              uint32_t page_tokens,
                              uint32_t first,
                              const struct kvt_rows_t *keys,
                              struct kvt_error_t **err);

/// Computes the largest product that a query can have with a key of each page, by the page's box.
///
/// @param boxes          [pages, key_heads, 2 * key_dim], f32 or bf16 (kvt_pages_extend).
/// @param queries        [queries, query_heads, key_dim].
/// @param first          First page.
/// @param count          Number of pages.
/// @param scores         Receives [queries, query_heads, count].
/// @param score_count    Exactly that many elements.
/// @param scratch_count  queries * query_heads * (2 * key_dim + 96) + 4096 elements suffice.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device
///         memory).
///
/// Threading: several threads at once, each with other pages and scratch.
kvt_status_t kvt_pages_score(const struct kvt_rows_t *boxes,
                             const struct kvt_rows_t *queries,
                             uint32_t first,
                             uint32_t count,
                             float *scores,
                             uint64_t score_count,
                             float *scratch,
                             uint64_t scratch_count,
                             struct kvt_error_t **err);

/// Merges the attention of the same queries to other keys into a result, by the log-sum-exps of
/// both.
///
/// @param out        In and out: [rows, dim].
/// @param lse        In and out: [rows].
/// @param other      Result for the other keys, [rows, dim].
/// @param other_lse  Its log-sum-exps, [rows].
/// @param rows       Queries * query_heads.
/// @param dim        value_dim.
/// @return KVT_E_LIMIT.
///
/// Threading: several threads at once, each with other rows.
kvt_status_t kvt_attention_merge(float *out,
                                 float *lse,
                                 const float *other,
                                 const float *other_lse,
                                 uint64_t rows,
                                 uint32_t dim,
                                 struct kvt_error_t **err);

/// Checks that all elements and scales of rows are finite. Kernels do not check: other values give
/// arbitrary results. Policies reject them.
///
/// @return KVT_E_INVALID (an element is not finite), KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE
///         (device memory).
kvt_status_t kvt_rows_check(const struct kvt_rows_t *rows, struct kvt_error_t **err);

/// Opens an offload for a session. The attention must match the layout of the session's namespace.
/// The store's account is charged for the ring and the tails, unless the engine lends their memory.
///
/// @return KVT_E_SPEC, KVT_E_UNSUPPORTED (a policy has no function in its phase, or the device does
///         not allocate memory), KVT_E_UNAVAILABLE (the store has no device with memory of its own,
///         or the device is lost), KVT_E_TOO_SMALL (the lent memory), KVT_E_BUDGET, KVT_E_LIMIT.
kvt_status_t kvt_offload_open(const struct kvt_offload_opts_t *opts,
                              struct kvt_offload_t **out,
                              struct kvt_error_t **err);

/// Closes an offload. Cancels its loads and its puts of full tails, and waits for their end. Blocks
/// in the store stay. Kernels must not read its buffers any more.
kvt_status_t kvt_offload_close(struct kvt_offload_t **offload);

/// Reads the number of tokens of a layer.
///
/// @param out_stored  Receives the tokens that were put into the store, in whole blocks.
/// @param out_tail    Receives the tokens of the tail, which follow; may be null.
kvt_status_t kvt_offload_tokens(const struct kvt_offload_t *offload,
                                uint32_t layer,
                                uint32_t *out_stored,
                                uint32_t *out_tail);

/// Drops the tokens from position `tokens` on, in all layers. Call it before kvt_session_truncate.
/// Loads in progress are cancelled. If the new end divides a block, the call loads the first tokens
/// of that block from the store, and waits for them. After a failure no layer is truncated: call it
/// again, for example with a multiple of block_tokens, which loads nothing.
///
/// @return KVT_E_NOT_FOUND (a divided block is not in the store any more), KVT_E_IO,
///         KVT_E_UNAVAILABLE.
kvt_status_t kvt_offload_truncate(const struct kvt_offload_t *offload,
                                  uint32_t tokens,
                                  struct kvt_error_t **err);

/// Resumes from tokens that the store has, for example from another session or an earlier process.
/// Call it before the first put; the session must have these tokens. Stored policy state of the
/// blocks is loaded. For blocks without it, the call loads the keys and passes them to policies.
///
/// @param tokens  A multiple of block_tokens, at most max_tokens.
/// @return KVT_E_BUSY (the offload has tokens), KVT_E_NOT_FOUND (keys that a policy needs are not
///         in the store), KVT_E_IO, KVT_E_AGAIN.
kvt_status_t kvt_offload_resume(const struct kvt_offload_t *offload,
                                uint32_t tokens,
                                struct kvt_error_t **err);

/// Reads the counters of an offload.
kvt_status_t kvt_offload_stats(const struct kvt_offload_t *offload,
                               struct kvt_offload_stats_t *out);

/// Computes the bytes of the ring and the tails of an offload with these options, for an engine
/// that lends this memory. Opens nothing.
///
/// @param opts  `memory` and `memory_bytes` are ignored.
/// @return As kvt_offload_open, for errors in `opts`.
kvt_status_t kvt_offload_memory_bytes(const struct kvt_offload_opts_t *opts,
                                      uint64_t *out_bytes,
                                      struct kvt_error_t **err);

/// Sets the ready event of copies that begin from now on, between the engine's tensors, the buffers
/// and the store. Call it before kvt_offload_put, with an event after the kernels that compute K
/// and V. Call it before kvt_offload_release and kvt_offload_give_back, with an event after the
/// kernels that read the buffer. Only the newest event counts: it must come after all work that
/// copies have to wait for. Copies fail if their event fails.
///
/// The event stays the caller's. Release it once two things have happened: another event or 0 was
/// set, or the offload was closed; and all puts and loads that began before have ended.
///
/// @param event  Event of the store's device; 0 = none.
/// @return The status of the event, if it has failed. After a failure the previous event still
///         counts.
kvt_status_t kvt_offload_set_ready_event(const struct kvt_offload_t *offload,
                                         uint64_t event,
                                         struct kvt_error_t **err);

/// Puts K and V of the next `tokens` tokens of a layer. The session must have these tokens
/// (kvt_session_append). Policies see the keys, which must be finite. Then whole blocks are put
/// into the store, and the rest is copied to the tail. The call waits for the put of a full tail.
/// After a failure kvt_offload_tokens says how many tokens were taken.
///
/// @param first   Position of the first token: the number of tokens that the layer has.
/// @param k       K, or the latent, in host memory or in memory of the store's device.
/// @param v       V; null for a latent.
/// @param opts    Options of the op; KVT_SUBMIT_EACH is not accepted.
/// @param out_op  Receives an op, which the caller frees; its release ends the use of `k` and `v`.
///                Receives null if their use has ended already. May be null with a queue, or if
///                `tokens` is less than block_tokens.
/// @return KVT_E_BUDGET, KVT_E_IO (a full tail could not be put; the next put tries again),
///         KVT_E_UNAVAILABLE (the memory belongs to no device of the store, or the device is lost),
///         KVT_E_LIMIT, KVT_E_AGAIN.
kvt_status_t kvt_offload_put(const struct kvt_offload_t *offload,
                             uint32_t layer,
                             uint32_t first,
                             uint32_t tokens,
                             const struct kvt_view_t *k,
                             const struct kvt_view_t *v,
                             const struct kvt_submit_opts_t *opts,
                             struct kvt_op_t **out_op,
                             struct kvt_error_t **err);

/// Begins to load blocks of a layer into a free buffer. From then on kvt_offload_blocks lists them;
/// kvt_offload_wait waits for them. Blocks without retained tokens are left out.
///
/// @param blocks     Candidates, ascending, and without the tail: for a prompt that is computed in
///                   parts. Null = all blocks, and the tail.
/// @param flags      KVT_OFFLOAD_LOAD_CHOSEN or 0. With it, null `blocks` load the tail alone.
/// @param query      Queries of the layer, [tokens, query heads, key dim], by which the policy
///                   selects; null = all candidates are loaded.
/// @param out_count  Receives the number of blocks; may be null.
/// @return KVT_E_BUSY (the buffer is in use), KVT_E_LIMIT (the blocks do not fit into a buffer),
///         KVT_E_AGAIN.
kvt_status_t kvt_offload_load(const struct kvt_offload_t *offload,
                              uint32_t buffer,
                              uint32_t layer,
                              const uint32_t *blocks,
                              uint64_t block_count,
                              uint64_t flags,
                              const struct kvt_rows_t *query,
                              const struct kvt_sparse_context_t *context,
                              uint32_t *out_count,
                              struct kvt_error_t **err);

/// Waits for the load of a buffer, and appends the layer's tail as it is now. After a failure the
/// buffer is free.
///
/// @param out  May be null.
/// @return KVT_E_NOT_FOUND (a block is not in the store any more), KVT_E_STATE (nothing is loaded,
///         or a full tail became a block meanwhile: load again), KVT_E_IO, KVT_E_CORRUPT.
kvt_status_t kvt_offload_wait(const struct kvt_offload_t *offload,
                              uint32_t buffer,
                              struct kvt_offload_kv_t *out,
                              struct kvt_error_t **err);

/// Frees a buffer that the engine does not read any more; a load in progress is cancelled. If
/// kernels may still read the buffer, call kvt_offload_set_ready_event before.
kvt_status_t kvt_offload_release(const struct kvt_offload_t *offload,
                                 uint32_t buffer,
                                 struct kvt_error_t **err);

/// Begins a pass over all layers in order, and frees all buffers. Layers whose blocks no policy
/// selects by query are loaded ahead, as far as buffers are free. A policy that selects by the
/// query of an earlier layer (`predict`) loads the next layer ahead.
kvt_status_t kvt_offload_begin(const struct kvt_offload_t *offload,
                               const struct kvt_sparse_context_t *context,
                               struct kvt_error_t **err);

/// Waits for the next layer of a pass: its blocks, and its tail with all tokens that were put. The
/// engine may read the buffer until kvt_offload_give_back.
///
/// @param layer  0, 1, ... in this order.
/// @param query  As in kvt_offload_load.
/// @return As kvt_offload_load and kvt_offload_wait. KVT_E_STATE also means that no pass has begun,
///         that it is another layer's turn, or that the layer before was not given back.
kvt_status_t kvt_offload_take(const struct kvt_offload_t *offload,
                              uint32_t layer,
                              const struct kvt_rows_t *query,
                              struct kvt_offload_kv_t *out,
                              struct kvt_error_t **err);

/// Gives back the layer that was taken, and loads a later layer into its buffer.
///
/// @return KVT_E_STATE (the layer is not taken).
kvt_status_t kvt_offload_give_back(const struct kvt_offload_t *offload,
                                   uint32_t layer,
                                   struct kvt_error_t **err);

/// Lists the blocks of a buffer, ascending. Block i starts at position i * block_tokens.
///
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_offload_blocks(const struct kvt_offload_t *offload,
                                uint32_t buffer,
                                uint32_t *blocks,
                                uint64_t capacity,
                                uint64_t *out_count);

/// Finds the rows of a buffer that hold tokens at given positions: turns an index of positions into
/// one for kernels that read the buffer. Positions that are not in the buffer are skipped.
///
/// @param positions  Positions in the sequence, ascending, without repetition.
/// @param count      Up to 16777216.
/// @param rows       Receives the rows, ascending; room for `count`. May be `positions`.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_offload_rows(const struct kvt_offload_t *offload,
                              uint32_t buffer,
                              const uint32_t *positions,
                              uint64_t count,
                              uint32_t *rows,
                              uint64_t *out_count);

/// Passes the attention that queries gave to each key to the policies that need it (h2o, tova,
/// snapkv and similar ones).
///
/// @param queries    Number of queries that the sums are over.
/// @param sums       A row for each query head, or one row for all of them. A row has one sum for
///                   each retained token, in their order; finite, and not negative.
/// @param sum_count  Up to 268435456.
/// @param tokens     Number of retained tokens.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_offload_observe(const struct kvt_offload_t *offload,
                                 uint32_t layer,
                                 uint32_t queries,
                                 const float *sums,
                                 uint64_t sum_count,
                                 uint32_t tokens,
                                 struct kvt_error_t **err);

/// Lets the policy evict tokens of a layer, if it has to. No data is moved or dropped: blocks
/// without retained tokens are not loaded any more, and kvt_offload_retained lists the tokens that
/// kernels may use.
///
/// @param out_evicted  Receives 1 if tokens were evicted, else 0; may be null.
/// @return KVT_E_UNSUPPORTED (both policies evict).
kvt_status_t kvt_offload_evict(const struct kvt_offload_t *offload,
                               uint32_t layer,
                               const struct kvt_sparse_context_t *context,
                               uint32_t *out_evicted,
                               struct kvt_error_t **err);

/// Lists the positions of the retained tokens of a layer, ascending.
///
/// @param head       Index of the list, below `out_heads`; 0 if there are no lists.
/// @param out_heads  Receives the number of lists: one for each key head or query head, one for
///                   all, or 0 = all tokens are retained (then `out_count` is 0). May be null.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_offload_retained(const struct kvt_offload_t *offload,
                                  uint32_t layer,
                                  uint32_t head,
                                  uint32_t *positions,
                                  uint64_t capacity,
                                  uint64_t *out_count,
                                  uint32_t *out_heads);

/// Passes rows of keys to a policy with rows of its own (dsa: the keys of its indexer). Call it
/// before the kvt_offload_put of these tokens, which passes the model's keys to all other policies.
///
/// @param first  Position of the first token.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_offload_append_keys(const struct kvt_offload_t *offload,
                                     uint32_t layer,
                                     uint32_t first,
                                     const struct kvt_rows_t *keys,
                                     struct kvt_error_t **err);

/// Passes scores that the engine computed to a policy, for the next load of a layer: one for each
/// block that can be loaded (external), or a weight for each query and head (dsa).
///
/// @param is_prefill  1 = to the policy for prefill, 0 = to the one for decode.
/// @return KVT_E_UNSUPPORTED (the policy accepts no scores), KVT_E_LIMIT.
kvt_status_t kvt_offload_score(const struct kvt_offload_t *offload,
                               uint32_t layer,
                               uint32_t is_prefill,
                               const float *scores,
                               uint64_t score_count,
                               struct kvt_error_t **err);

/// Opens another offload for a session that was forked from the offload's (kvt_session_fork). Both
/// share the blocks in the store. Tails, lists of retained tokens and policies are copied. The fork
/// has an empty ring of its own, for which the store's account is charged; lent memory is not
/// reused. Its counters start at zero. The call waits for the put of a full tail.
///
/// @param session  Must have the tokens that the layers of the offload have, and may have more.
/// @return KVT_E_UNSUPPORTED (a custom policy without `fork`), KVT_E_BUDGET, KVT_E_LIMIT,
///         KVT_E_AGAIN.
kvt_status_t kvt_offload_fork(const struct kvt_offload_t *offload,
                              const struct kvt_session_t *session,
                              struct kvt_offload_t **out,
                              struct kvt_error_t **err);

/// Opens a model and groups its tensors into units by their names. Reads headers, not weights.
///
/// @param paths  All files of the model, or one path: a GGUF or safetensors file, the index of a
///               sharded model, the directory of a model, any file of a split GGUF model.
/// @return KVT_E_CORRUPT (a damaged file, files that contradict each other), KVT_E_UNSUPPORTED
///         (version or data type), KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT.
kvt_status_t kvt_model_open(const struct kvt_str_t *paths,
                            uint64_t path_count,
                            uint64_t stride_bytes,
                            struct kvt_model_t **out,
                            struct kvt_error_t **err);

/// Closes a model. Streamers that were opened with it stay open.
kvt_status_t kvt_model_close(struct kvt_model_t **model);

/// Reads the properties of a model.
kvt_status_t kvt_model_info(const struct kvt_model_t *model, struct kvt_model_info_t *out);

/// Describes a file of a model.
///
/// @param file  Below kvt_model_info_t.files.
kvt_status_t kvt_model_file(const struct kvt_model_t *model,
                            uint32_t file,
                            struct kvt_model_file_t *out);

/// Describes a unit of a model.
///
/// @param unit  Below kvt_model_info_t.units.
kvt_status_t kvt_model_unit(const struct kvt_model_t *model, uint32_t unit, struct kvt_unit_t *out);

/// Describes a tensor of a model. Tensors have the order of files and offsets.
///
/// @param tensor  Below kvt_model_info_t.tensors.
kvt_status_t kvt_model_tensor(const struct kvt_model_t *model,
                              uint32_t tensor,
                              struct kvt_tensor_t *out);

/// Lists the parts of tensors in a unit, by offset in the unit.
///
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (a capacity over 2^22).
kvt_status_t kvt_model_unit_parts(const struct kvt_model_t *model,
                                  uint32_t unit,
                                  struct kvt_part_t *parts,
                                  uint64_t capacity,
                                  uint64_t stride_bytes,
                                  uint64_t *out_count);

/// Lists the parts of a tensor, by offset in the tensor: one, or one for each expert.
///
/// @return As kvt_model_unit_parts.
kvt_status_t kvt_model_tensor_parts(const struct kvt_model_t *model,
                                    uint32_t tensor,
                                    struct kvt_part_t *parts,
                                    uint64_t capacity,
                                    uint64_t stride_bytes,
                                    uint64_t *out_count);

/// Finds a tensor by its name, and writes its index.
///
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT (a name over 1 MiB).
kvt_status_t kvt_model_find_tensor(const struct kvt_model_t *model,
                                   const char *name,
                                   uint64_t name_bytes,
                                   uint32_t *out);

/// Finds the unit of a layer, or of an expert of a layer.
///
/// @param expert  KVT_NONE = the layer itself.
/// @return KVT_E_NOT_FOUND.
kvt_status_t kvt_model_find_unit(const struct kvt_model_t *model,
                                 uint32_t layer,
                                 uint32_t expert,
                                 uint32_t *out);

/// Makes a model from units that the engine names, for files of other formats. Each range becomes a
/// tensor, named after its unit: "layer 3#0". Ranges lie in their files and do not overlap; no two
/// units are the same layer or expert. Plans reserve no KV, unless kvt_stream_terms_t.kv_bytes is
/// set.
///
/// @return KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT.
kvt_status_t kvt_model_table(const struct kvt_model_table_t *table,
                             struct kvt_model_t **out,
                             struct kvt_error_t **err);

/// Plans where units are resident, and forecasts a pass. Opens no files and takes no memory.
/// kvt_stream_open makes the same plan from the same terms and the memory that is free then.
///
/// @param memory     Null = this machine, without a device.
/// @param out        May be null, as may forecast.
/// @param residency  One entry for each unit; may be null with capacity 0.
/// @return KVT_E_BUDGET (too little memory: the message names the least), KVT_E_TOO_SMALL,
///         KVT_E_LIMIT.
kvt_status_t kvt_model_plan(const struct kvt_model_t *model,
                            const struct kvt_stream_terms_t *terms,
                            const struct kvt_stream_memory_t *memory,
                            struct kvt_stream_plan_t *out,
                            struct kvt_forecast_t *forecast,
                            struct kvt_unit_residency_t *residency,
                            uint64_t capacity,
                            uint64_t stride_bytes,
                            struct kvt_error_t **err);

/// Describes the plan of kvt_model_plan as text, with the reason for each figure.
///
/// @param kind          KVT_PLAN_TEXT or KVT_PLAN_JSON.
/// @param out           Receives the text, not NUL-terminated.
/// @param out_capacity  Free memory changes between calls: add some room to the size.
/// @return As kvt_model_plan.
kvt_status_t kvt_model_plan_describe(const struct kvt_model_t *model,
                                     const struct kvt_stream_terms_t *terms,
                                     const struct kvt_stream_memory_t *memory,
                                     uint32_t kind,
                                     char *out,
                                     uint64_t out_capacity,
                                     uint64_t *out_bytes,
                                     struct kvt_error_t **err);

/// Forecasts a pass of the plan of kvt_model_plan with other link rates. Every link that the plan
/// needs must have a rate, in links or in terms.
///
/// @param links  GB/s (1e9 bytes) of h2d, disk and cpu, such as "h2d=13,disk=3.3"; others as in
///               terms.
/// @return As kvt_model_plan; KVT_E_SPEC.
kvt_status_t kvt_model_forecast(const struct kvt_model_t *model,
                                const struct kvt_stream_terms_t *terms,
                                const struct kvt_stream_memory_t *memory,
                                const char *links,
                                uint64_t links_bytes,
                                struct kvt_forecast_t *out,
                                struct kvt_error_t **err);

/// Opens a streamer: opens the files, makes a plan, takes its memory, and begins to load resident
/// units. With a device, the engine computes there and units are loaded to device memory.
///
/// @return KVT_E_BUDGET (too little memory: the message names the least), KVT_E_CORRUPT (a file
///         changed since the model was opened), KVT_E_UNSUPPORTED (KVT_COMPUTE_DEVICE without a
///         device; KVT_STREAM_IN_PLACE on a host or custom device; flags that exclude each other),
///         KVT_E_UNAVAILABLE (KVT_STREAM_DIRECT), KVT_E_SPEC, KVT_E_NOT_FOUND, KVT_E_IO,
///         KVT_E_LIMIT.
kvt_status_t kvt_stream_open(const struct kvt_runtime_t *runtime,
                             const struct kvt_stream_opts_t *opts,
                             struct kvt_stream_t **out,
                             struct kvt_error_t **err);

/// Closes a streamer: ends calls that wait for units, waits for reads and copies in flight, and
/// saves new checksums to the sidecar.
///
/// @return KVT_E_BUSY (units are leased: the streamer stays open; or a read, a copy or an event of
///         kvt_stream_release did not end before the deadline: it stays closing, close again).
kvt_status_t kvt_stream_close(struct kvt_stream_t **stream,
                              uint64_t deadline_ns,
                              struct kvt_error_t **err);

/// Leases a unit, and waits until it is loaded. The unit stays where it is until it was released as
/// often as it was acquired. If it is resident where it is used, this costs one atomic operation.
/// To retry a failed read, acquire the unit again.
///
/// @param flags  KVT_ACQUIRE_*, or 0.
/// @return KVT_E_AGAIN (KVT_ACQUIRE_POLL), KVT_E_TIMEOUT, KVT_E_BUSY (leases hold all slots, or the
///         unit itself after a failed copy), KVT_E_CORRUPT (wrong checksum, changed file),
///         KVT_E_IO, KVT_E_BUDGET (a unit larger than slots lost its memory: see
///         kvt_stream_rebalance).
kvt_status_t kvt_stream_acquire(const struct kvt_stream_t *stream,
                                uint32_t unit,
                                uint64_t flags,
                                uint64_t deadline_ns,
                                struct kvt_unit_lease_t *out,
                                struct kvt_error_t **err);

/// Releases a lease, and clears the struct. Allowed while the streamer closes. If a copy failed
/// after KVT_ACQUIRE_SUBMITTED, the lease is released and the copy's error is returned: results
/// computed with the unit are wrong. After another error the lease is not released.
///
/// @param after  Device event after which the memory may be reused; 0 = now. The streamer takes the
///               event over, except with KVT_E_UNSUPPORTED, _INVALID, _HANDLE and _STATE. See
///               kvt_device_import_event.
/// @return KVT_E_STATE (released before), KVT_E_UNSUPPORTED (an event, without a device).
kvt_status_t kvt_stream_release(const struct kvt_stream_t *stream,
                                struct kvt_unit_lease_t *lease,
                                uint64_t after,
                                struct kvt_error_t **err);

/// Waits until all resident units are loaded. Optional: acquired units are loaded first.
///
/// @return KVT_E_TIMEOUT, KVT_E_IO, KVT_E_CORRUPT.
kvt_status_t kvt_stream_wait_resident(const struct kvt_stream_t *stream,
                                      uint64_t deadline_ns,
                                      struct kvt_error_t **err);

/// Reads the progress of loading the resident units.
kvt_status_t kvt_stream_progress(const struct kvt_stream_t *stream,
                                 struct kvt_stream_progress_t *out);

/// Begins a pass, in which units are prefetched in their order. Fails if a file was changed.
///
/// @return KVT_E_CORRUPT (a changed file), KVT_E_IO.
kvt_status_t kvt_stream_pass_begin(const struct kvt_stream_t *stream, struct kvt_error_t **err);

/// Ends a pass. Without KVT_STREAM_ONCE, the first units of the next pass are being prefetched.
kvt_status_t kvt_stream_pass_end(const struct kvt_stream_t *stream, struct kvt_error_t **err);

/// Prefetches units that the engine will use, such as the experts that a router chose, into slots
/// that are free or whose unit may be evicted. Experts of earlier hints that were not used may be
/// evicted.
///
/// @return KVT_E_LIMIT (more than 2^18 units).
kvt_status_t kvt_stream_hint(const struct kvt_stream_t *stream,
                             const uint32_t *units,
                             uint64_t count,
                             struct kvt_error_t **err);

/// Gives weights more or less memory while passes go on, and makes a new plan. Returns at once:
/// leased units move after their release, the others are loaded meanwhile (kvt_stream_progress).
/// Slots stay, except expert slots: their number may fall, and rise up to the number at opening.
///
/// @param out  Receives the new plan; may be null.
/// @return KVT_E_BUDGET (slots do not fit: nothing was changed), KVT_E_UNSUPPORTED (in place, a
///         unit would move between processor and device).
kvt_status_t kvt_stream_rebalance(const struct kvt_stream_t *stream,
                                  const struct kvt_stream_limits_t *limits,
                                  struct kvt_stream_plan_t *out,
                                  struct kvt_error_t **err);

/// Reads the current plan, its forecast, and the residency of each unit: see kvt_model_plan.
///
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (a capacity over 2^18).
kvt_status_t kvt_stream_plan(const struct kvt_stream_t *stream,
                             struct kvt_stream_plan_t *out,
                             struct kvt_forecast_t *forecast,
                             struct kvt_unit_residency_t *residency,
                             uint64_t capacity,
                             uint64_t stride_bytes);

/// Describes the current plan as text: see kvt_model_plan_describe.
///
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_stream_plan_describe(const struct kvt_stream_t *stream,
                                      uint32_t kind,
                                      char *out,
                                      uint64_t out_capacity,
                                      uint64_t *out_bytes);

/// Forecasts a pass of the current plan with other link rates.
///
/// @param links  See kvt_model_forecast; others keep their current rate.
/// @return KVT_E_SPEC, KVT_E_LIMIT (links over 256 bytes).
kvt_status_t kvt_stream_forecast(const struct kvt_stream_t *stream,
                                 const char *links,
                                 uint64_t links_bytes,
                                 struct kvt_forecast_t *out,
                                 struct kvt_error_t **err);

/// Reads the counters of a streamer.
kvt_status_t kvt_stream_stats(const struct kvt_stream_t *stream, struct kvt_stream_stats_t *out);

/// Reads expert counters, one row for each layer that has experts.
///
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (a capacity over 2^24).
kvt_status_t kvt_stream_layers(const struct kvt_stream_t *stream,
                               struct kvt_expert_stats_t *rows,
                               uint64_t capacity,
                               uint64_t stride_bytes,
                               uint64_t *out_count);

/// Reads the last kvt_stream_opts_t.marks spans of time, the oldest first.
///
/// @return As kvt_stream_layers.
kvt_status_t kvt_stream_marks(const struct kvt_stream_t *stream,
                              struct kvt_stream_span_t *rows,
                              uint64_t capacity,
                              uint64_t stride_bytes,
                              uint64_t *out_count);

/// Describes in one line how files are read, and why no faster method is used.
///
/// @param out  Receives the text, not NUL-terminated.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_stream_describe_io(const struct kvt_stream_t *stream,
                                    char *out,
                                    uint64_t out_capacity,
                                    uint64_t *out_bytes);

/// Reads a unit from its files, not from memory, on the calling thread, and compares it with its
/// checksums. Unknown checksums are stored.
///
/// @param out_sum  Receives the checksum of the unit; may be null.
/// @return KVT_E_CORRUPT (wrong checksum), KVT_E_IO, KVT_E_BUDGET.
kvt_status_t kvt_stream_verify(const struct kvt_stream_t *stream,
                               uint32_t unit,
                               uint64_t *out_sum,
                               struct kvt_error_t **err);

/// Reads the checksum of a unit.
///
/// @return KVT_E_NOT_FOUND (no sidecar has it, and not all of the unit was read with checksums).
kvt_status_t kvt_stream_checksum(const struct kvt_stream_t *stream, uint32_t unit, uint64_t *out);

/// Reads the address that a unit has from open to close (KVT_STREAM_IN_PLACE). The address has
/// memory only while the unit is leased: other reads see zeros or incomplete data, and may be an
/// error that ends the device's context. With a device it is a device address, except for units
/// that the processor uses (kvt_unit_lease_t.memory): they are outside the range.
///
/// @param unit       KVT_NONE = the range of all units.
/// @param out_bytes  May be null.
/// @return KVT_E_STATE (units are not in place).
kvt_status_t kvt_stream_unit_address(const struct kvt_stream_t *stream,
                                     uint32_t unit,
                                     const void **out_address,
                                     uint64_t *out_bytes);

/// Opens a device.
///
/// @param out  Close it with kvt_device_close.
/// @return KVT_E_UNAVAILABLE (CUDA: no driver, one that is too old or broken, or no such device;
///         the message says which), KVT_E_UNSUPPORTED (KVT_DEVICE_VERIFY without the checksum
///         kernel), KVT_E_LIMIT.
kvt_status_t kvt_device_open(const struct kvt_runtime_t *runtime,
                             const struct kvt_device_opts_t *opts,
                             struct kvt_device_t **out,
                             struct kvt_error_t **err);

/// Closes a device: rejects new work, signals the events of kvt_device_create_event, waits for work
/// in flight and for calls of other threads, and frees the device's memory.
///
/// @return KVT_E_BUSY (a store or streamer uses the device, which stays open; or work was in flight
///         at the deadline: the device stays closing, call again).
kvt_status_t kvt_device_close(struct kvt_device_t **device,
                              uint64_t deadline_ns,
                              struct kvt_error_t **err);

/// Reads the properties of a device.
kvt_status_t kvt_device_info(const struct kvt_device_t *device, struct kvt_device_info_t *out);

/// Describes a device for logs: its name, and how it copies.
///
/// @param out        Text, not NUL-terminated; may be null.
/// @param out_bytes  Length of the text; may be null.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_device_describe(const struct kvt_device_t *device,
                                 char *out,
                                 uint64_t out_capacity,
                                 uint64_t *out_bytes);

/// Allocates device memory with undefined content. Closing the device frees it.
///
/// @param bytes  At least 1.
/// @param out    Free it with kvt_device_free.
/// @return KVT_E_UNSUPPORTED (the device cannot allocate), KVT_E_UNAVAILABLE (the device is lost).
kvt_status_t kvt_device_alloc(const struct kvt_device_t *device,
                              uint64_t bytes,
                              struct kvt_device_memory_t *out,
                              struct kvt_error_t **err);

/// Frees device memory.
///
/// @param memory  As kvt_device_alloc wrote it.
/// @return KVT_E_BUSY (work in flight uses the memory, as far as the device can tell), KVT_E_HANDLE
///         (also: memory of another device, or freed before).
kvt_status_t kvt_device_free(const struct kvt_device_t *device,
                             const struct kvt_device_memory_t *memory,
                             struct kvt_error_t **err);

/// Registers host memory that many copies will use, so that they run at full speed: CUDA pins it;
/// host and simulated devices do nothing. Memory that cannot be pinned is registered all the same:
/// its copies are slower and block in the call, and kvt_device_describe states how much that is.
/// The memory must stay mapped until it is unregistered.
///
/// @param address  Start of a page.
/// @return KVT_E_INVALID (also: overlaps registered memory), KVT_E_UNAVAILABLE, or the status of a
///         custom device's `register_host`.
kvt_status_t kvt_device_register_host(const struct kvt_device_t *device,
                                      void *address,
                                      uint64_t bytes,
                                      struct kvt_error_t **err);

/// Unregisters host memory, before it is unmapped and when no work in flight uses it.
///
/// @param address  As it was registered.
/// @return KVT_E_HANDLE (also: CUDA, not registered), KVT_E_UNAVAILABLE, or the status of a custom
///         device's `register_host`.
kvt_status_t kvt_device_unregister_host(const struct kvt_device_t *device,
                                        void *address,
                                        struct kvt_error_t **err);

/// Submits copies to a stream, after its earlier work and after an event. Until the event of the
/// batch has completed or failed, do not change sources, and do not access targets. CUDA blocks in
/// the call until earlier work has completed, if a copy is within host memory or uses host memory
/// that is not registered (kvt_device_register_host) or not pinned.
///
/// @param stream     0 to kvt_device_info_t.streams - 1.
/// @param after      An event of the device; 0 = none.
/// @param count      At most 65,536; 0 = only record an event.
/// @param out_event  Completes with the copies; release it with kvt_device_release.
/// @return KVT_E_LIMIT, KVT_E_UNSUPPORTED (memory that the device cannot access, or a checksum that
///         it cannot compute), KVT_E_AGAIN (65,536 events, or 256 batches with checksums, are not
///         released), KVT_E_STATE (the stream is being captured into a graph), KVT_E_UNAVAILABLE
///         (the device is lost), KVT_E_IO, or the status that `after` failed with.
kvt_status_t kvt_device_copy(const struct kvt_device_t *device,
                             uint32_t stream,
                             uint64_t after,
                             struct kvt_copy_t *copies,
                             uint64_t count,
                             uint64_t stride_bytes,
                             uint64_t *out_event,
                             struct kvt_error_t **err);

/// Queries an event. Never waits for it, but may wait for a submission of another thread. After a
/// failure the content of the targets is undefined.
///
/// @return KVT_OK (completed), KVT_E_AGAIN (pending), KVT_E_HANDLE (also: an event of another
///         device, or released), or the status that its batch failed with.
kvt_status_t kvt_device_query(const struct kvt_device_t *device, uint64_t event);

/// Waits for an event.
///
/// @return KVT_E_TIMEOUT, or as kvt_device_query.
kvt_status_t kvt_device_wait(const struct kvt_device_t *device,
                             uint64_t event,
                             uint64_t deadline_ns,
                             struct kvt_error_t **err);

/// Reads the checksums that copies of a batch requested (KVT_COPY_CHECKSUM), in the order of the copies.
/// They are available from the completion of the event until its release. Compare them with
/// kvt_checksum of the bytes in host memory: a difference means that bytes changed on the bus.
///
/// @param device    Asynchronous, with KVT_DEVICE_CHECKSUMS.
/// @param sums      Receives at most `capacity` checksums; not null.
/// @param capacity  At most 65,536.
/// @return KVT_E_BUSY (the event is pending), KVT_E_UNSUPPORTED (the device computes no checksums),
///         KVT_E_LIMIT, or the status that the batch failed with.
kvt_status_t kvt_device_checksums(const struct kvt_device_t *device,
                                  uint64_t event,
                                  uint64_t *sums,
                                  uint64_t capacity,
                                  uint64_t *out_count,
                                  struct kvt_error_t **err);

/// Returns events that have completed or failed. Never waits for one. An asynchronous device
/// reports each event once, unless it is released before; a synchronous one reports none. Events of
/// stores and streamers that share the device are reported as well, and internal ones of a
/// kvt_device_copy that blocks in another thread.
///
/// @param events    Receives at most `capacity` events; not null.
/// @param capacity  At most 65,536.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_device_poll(const struct kvt_device_t *device,
                             uint64_t *events,
                             uint64_t capacity,
                             uint64_t *out_count);

/// Releases events that have completed or failed. Stops at the first error; the events before it
/// are released. A synchronous device keeps no events and accepts each of them repeatedly.
///
/// @param count  At most 65,536.
/// @return KVT_E_BUSY (an event is pending), KVT_E_HANDLE (also: an event of another device, or
///         released before), KVT_E_LIMIT.
kvt_status_t kvt_device_release(const struct kvt_device_t *device,
                                const uint64_t *events,
                                uint64_t count,
                                struct kvt_error_t **err);

/// Imports an event of the engine: creates a device event that completes with it. Work submitted
/// after the device event waits for the engine's kernels; no thread waits.
///
/// @param raw        CUDA: a CUevent that was recorded; it must stay valid until it has completed.
/// @param out_event  Release it with kvt_device_release.
/// @return KVT_E_UNSUPPORTED, KVT_E_HANDLE (also: `raw` is no event, or of another context),
///         KVT_E_AGAIN (65,536 events are not released), KVT_E_STATE (`raw` was recorded on a
///         stream that is being captured into a graph), KVT_E_UNAVAILABLE.
kvt_status_t kvt_device_import_event(const struct kvt_device_t *device,
                                     uint64_t raw,
                                     uint64_t *out_event,
                                     struct kvt_error_t **err);

/// Makes a stream of the engine wait for a device event. No thread waits.
///
/// @param raw_stream  CUDA: a CUstream of the device's context, not a default stream.
/// @return KVT_E_UNSUPPORTED, KVT_E_HANDLE (device, stream or event), KVT_E_STATE (the stream is
///         being captured into a graph), KVT_E_UNAVAILABLE, or the status that the event failed
///         with.
kvt_status_t kvt_device_stream_wait(const struct kvt_device_t *device,
                                    uint64_t raw_stream,
                                    uint64_t event,
                                    struct kvt_error_t **err);

/// Creates an event that completes when kvt_device_signal_event signals it, or when the device or
/// its runtime is closed. Batches, transfers and streams may wait for it before that. A
/// kvt_device_copy that blocks in the call (see there) waits for the event: signal it from another
/// thread then.
///
/// @param out_event  Signal it, then release it with kvt_device_release.
/// @return KVT_E_UNSUPPORTED (by the device or its driver), KVT_E_AGAIN (1,024 such events are not
///         released), KVT_E_UNAVAILABLE.
kvt_status_t kvt_device_create_event(const struct kvt_device_t *device,
                                     uint64_t *out_event,
                                     struct kvt_error_t **err);

/// Signals an event of kvt_device_create_event: work that waits for it proceeds. Signalling it
/// again does nothing.
///
/// @return KVT_E_HANDLE (also: no such event of this device, or released), or the status of a
///         custom device's `signal_event`.
kvt_status_t kvt_device_signal_event(const struct kvt_device_t *device,
                                     uint64_t event,
                                     struct kvt_error_t **err);

/// Makes a stream of the engine wait until an op, of any kind, is released, whether it succeeded or
/// not: query the op afterwards. The op need not have begun. No thread waits. Closing the device or
/// its runtime ends the wait.
///
/// CUDA waits for a number in memory (cuStreamWaitValue32), a dependency that the driver does not
/// know: the op's release must not depend on work that waits for this stream.
///
/// @param raw_stream  See kvt_device_stream_wait.
/// @return KVT_E_UNSUPPORTED, KVT_E_HANDLE (device, stream or op), KVT_E_STATE (the stream is being
///         captured into a graph), KVT_E_AGAIN (see kvt_device_create_event), KVT_E_UNAVAILABLE.
kvt_status_t kvt_device_stream_wait_op(const struct kvt_device_t *device,
                                       uint64_t raw_stream,
                                       const struct kvt_op_t *op,
                                       struct kvt_error_t **err);

/// Submits kernels to a stream, after its earlier work and after an event. They run in order. The
/// memory that they name belongs to the device until the event of the batch has completed or
/// failed.
///
/// @param stream     0 to kvt_device_info_t.streams - 1.
/// @param after      An event of the device; 0 = none.
/// @param count      At most 4,096.
/// @param out_event  Completes with the kernels; release it with kvt_device_release.
/// @return KVT_E_UNSUPPORTED (see kvt_device_info_t.kernels), KVT_E_UNAVAILABLE (also: a kernel
///         does not load), and as kvt_device_copy.
kvt_status_t kvt_device_launch(const struct kvt_device_t *device,
                               uint32_t stream,
                               uint64_t after,
                               const struct kvt_kernel_t *kernels,
                               uint64_t count,
                               uint64_t stride_bytes,
                               uint64_t *out_event,
                               struct kvt_error_t **err);

/// Packs an index for KVT_DEVICE_KERNEL_PREFILL (heads, `starts` and `items` of kvt_index_t, contiguous)
/// and enters it in a kernel. The call validates the index; the kernel trusts it. Afterwards copy
/// the bytes to `address`, and set the kernel's `scratch`.
///
/// @param index    Keys that are visible; null, or without heads = all keys, 0 bytes.
/// @param kernel   Its query_count, query_heads, key_heads, tokens and first must be set. The call
///                 writes count, numbers, counts, index and scratch_bytes (the bytes needed).
/// @param address  Where the device will read the bytes; a multiple of 4, not 0.
/// @param to       Receives the bytes, at most `out_capacity`; may be null.
/// @return KVT_E_TOO_SMALL (`kernel` is not written), KVT_E_INVALID (also: an index that is not
///         valid), KVT_E_LIMIT.
kvt_status_t kvt_kernel_pack_index(const struct kvt_index_t *index,
                                   struct kvt_kernel_t *kernel,
                                   uint64_t address,
                                   void *to,
                                   uint64_t out_capacity,
                                   uint64_t *out_bytes,
                                   struct kvt_error_t **err);

/// Runs the conformance suite on a device: memory, copies of all sizes, layouts and address spaces,
/// order, events, deadlines, rejections, threads, and its kernels. Run it first on a custom device.
/// It uses at most a few hundred MiB; nothing else should use the device meanwhile.
///
/// @param report  Receives each result; may be null.
/// @return KVT_OK, also if checks failed (see `out`); KVT_E_LIMIT.
kvt_status_t kvt_device_conformance(const struct kvt_device_t *device,
                                    const struct kvt_conformance_opts_t *opts,
                                    kvt_conformance_fn report,
                                    void *user_data,
                                    struct kvt_conformance_report_t *out,
                                    struct kvt_error_t **err);

/// Reads a trace from a file, to its end. The file is not trusted.
///
/// @param out  Free it with kvt_trace_free.
/// @return KVT_E_INVALID (also malformed content; the message names the place), KVT_E_NOT_FOUND,
///         KVT_E_IO, KVT_E_CORRUPT (a damaged zstd or kvtier file), KVT_E_UNSUPPORTED (Parquet),
///         KVT_E_SPEC (unknown kind), KVT_E_LIMIT.
kvt_status_t kvt_trace_open(const struct kvt_trace_opts_t *opts,
                            struct kvt_trace_t **out,
                            struct kvt_error_t **err);

/// Generates a workload. Equal options give equal traces on every machine; `path` and `gap_ns` are
/// ignored.
///
/// @param out  Free it with kvt_trace_free.
/// @return KVT_E_SPEC (unknown kind), KVT_E_LIMIT (more than 90 days or 16 million sessions).
kvt_status_t kvt_trace_generate(const struct kvt_trace_opts_t *opts,
                                struct kvt_trace_t **out,
                                struct kvt_error_t **err);

/// Frees a trace. Replays in progress continue to their end.
kvt_status_t kvt_trace_free(struct kvt_trace_t **trace);

/// Computes the totals of a trace. Reads all of its requests.
kvt_status_t kvt_trace_info(const struct kvt_trace_t *trace, struct kvt_trace_info_t *out);

/// Replays a trace on a policy: the code of production, driven as by an engine.
///
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_CANCELLED (`progress` returned 0).
///
/// Threading: inside any callback it returns KVT_E_REENTRANT.
kvt_status_t kvt_trace_replay(const struct kvt_trace_t *trace,
                              const struct kvt_replay_opts_t *opts,
                              struct kvt_replay_report_t *out,
                              struct kvt_error_t **err);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVTIER_H */
