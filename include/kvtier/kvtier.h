/*
 * kvtier: tiered KV-cache storage, weight streaming and eviction policies.
 *
 * Read docs/abi.md for the rules all functions share. In short: every function
 * that can fail returns a kvt_status_t and writes no output when it does; handles
 * are never followed, so a stale one is KVT_E_HANDLE and not a crash; structs start
 * with their size (use KVT_..._INIT) and zero is every field's default; deadlines
 * are CLOCK_MONOTONIC nanoseconds, 0 = none.
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


/**
 * As the length of a text: it ends with a NUL.
 */
#define KVT_NUL_TERMINATED UINT64_MAX

/**
 * Major version of this header.
 */
#define KVT_VERSION_MAJOR 0

/**
 * Minor version of this header.
 */
#define KVT_VERSION_MINOR 1

/**
 * Patch version of this header.
 */
#define KVT_VERSION_PATCH 0

/**
 * Version of this header as one number: (major << 32) | (minor << 16) | patch.
 */
#define KVT_HEADER_VERSION 65536

/**
 * Nothing is logged.
 */
#define KVT_LOG_OFF 0

/**
 * Something failed that should not.
 */
#define KVT_LOG_ERROR 1

/**
 * Something degraded.
 */
#define KVT_LOG_WARN 2

/**
 * Something worth knowing, rarely.
 */
#define KVT_LOG_INFO 3

/**
 * For debugging.
 */
#define KVT_LOG_DEBUG 4

/**
 * Everything.
 */
#define KVT_LOG_TRACE 5

/**
 * The thread carries out ops.
 */
#define KVT_THREAD_WORKER 0

/**
 * The thread makes callbacks and keeps deadlines.
 */
#define KVT_THREAD_NOTIFIER 1

/**
 * The thread is a store's: it copies, reads or writes, or answers the control socket.
 */
#define KVT_THREAD_STORE 2

/**
 * The thread is a streamer's: it reads weights, or copies them to a device.
 */
#define KVT_THREAD_STREAMER 3

/**
 * Execution has begun (or was ended before it could).
 */
#define KVT_OP_ISSUED 1

/**
 * The result is known.
 */
#define KVT_OP_RESOLVED 2

/**
 * Your memory is yours again.
 */
#define KVT_OP_RELEASED 4

/**
 * A cancel was asked for.
 */
#define KVT_OP_CANCEL 8

/**
 * Each item becomes an op of its own; out_ops then receives one per item.
 */
#define KVT_SUBMIT_EACH 1

/**
 * Work somebody waits for.
 */
#define KVT_PRIORITY_DEMAND 0

/**
 * Work that will be wanted soon.
 */
#define KVT_PRIORITY_PREFETCH 1

/**
 * Work that can wait.
 */
#define KVT_PRIORITY_BACKGROUND 2

/**
 * Memory of the accelerator.
 */
#define KVT_TIER_DEVICE 0

/**
 * RAM.
 */
#define KVT_TIER_HOST 1

/**
 * Local files.
 */
#define KVT_TIER_DISK 2

/**
 * A store elsewhere.
 */
#define KVT_TIER_REMOTE 3

/**
 * RAM that is locked; counted beside KVT_TIER_HOST.
 */
#define KVT_TIER_PINNED 4

/**
 * Fail when the host or pinned limit is above what the machine has, instead of
 * cutting it to that.
 */
#define KVT_BUDGET_STRICT 1

/**
 * host_bytes = 0 means none, not the default.
 */
#define KVT_BUDGET_ZERO_HOST 2

/**
 * pinned_bytes = 0 means none, not the default.
 */
#define KVT_BUDGET_ZERO_PINNED 4

/**
 * reserve_bytes = 0 means none, not the default.
 */
#define KVT_BUDGET_ZERO_RESERVE 8

/**
 * Lock the memory in RAM; fail when the quota does not allow it.
 */
#define KVT_BUFFER_PIN 1

/**
 * Lock the memory in RAM if the quota allows it.
 */
#define KVT_BUFFER_TRY_PIN 2

/**
 * Use huge pages of the reserved pool; fail when there are not enough.
 */
#define KVT_BUFFER_HUGETLB 4

/**
 * Ask the kernel for transparent huge pages.
 */
#define KVT_BUFFER_TRY_HUGE 8

/**
 * Make every page present before returning, on the workers in parallel.
 */
#define KVT_BUFFER_PREFAULT 16

/**
 * Normal pages.
 */
#define KVT_PAGES_NORMAL 0

/**
 * Pages the kernel was asked to merge into huge ones.
 */
#define KVT_PAGES_TRANSPARENT 1

/**
 * Huge pages of the reserved pool.
 */
#define KVT_PAGES_HUGETLB 2

/**
 * The caller's own memory.
 */
#define KVT_PAGES_FOREIGN 3

/**
 * Copy the source to the target; they may overlap.
 */
#define KVT_ITEM_COPY 1

/**
 * Report the checksum of the source as it was read.
 */
#define KVT_ITEM_CHECKSUM 2

/**
 * Compare that checksum with `expect`: KVT_E_CORRUPT if it differs (a copy
 * asked for along with it has been made all the same).
 */
#define KVT_ITEM_VERIFY 4

/**
 * Make the target's pages present; contents stay. Alone only.
 */
#define KVT_ITEM_PREFAULT 8

/**
 * The processor reaches it.
 */
#define KVT_MEMORY_HOST 0

/**
 * Only the device does.
 */
#define KVT_MEMORY_DEVICE 1

/**
 * To disk as soon as a put has ended.
 */
#define KVT_WRITE_THROUGH 1

/**
 * To disk when the memory is needed.
 */
#define KVT_WRITE_BACK 2

/**
 * To disk only when a put asks for it.
 */
#define KVT_WRITE_NEVER 3

/**
 * To disk in the background, at most about a second after the put has ended (`write=behind`,
 * with its parameters in the spec). This is the default.
 */
#define KVT_WRITE_BEHIND 4

/**
 * There is no disk.
 */
#define KVT_IO_NONE 0

/**
 * Files are read and written one transfer at a time, by threads.
 */
#define KVT_IO_THREADS 1

/**
 * Files are read and written many transfers at once, by io_uring.
 */
#define KVT_IO_URING 2

/**
 * The engine can compute what lies behind a hole: chunks leave in any order.
 * Without it those that continue a chunk leave before it.
 */
#define KVT_NAMESPACE_HOLES 1

/**
 * Bytes of a namespace's key.
 */
#define KVT_KEY_BYTES 32

/**
 * A layer needs every earlier token.
 */
#define KVT_RULE_FULL 0

/**
 * A layer needs the last window_tokens tokens.
 */
#define KVT_RULE_WINDOW 1

/**
 * A layer needs its state at the very point; it is kept at the ends of chunks.
 */
#define KVT_RULE_STATE 2

/**
 * Bytes that only the engine understands.
 */
#define KVT_DTYPE_BYTES 0

/**
 * IEEE 754 binary32.
 */
#define KVT_DTYPE_F32 1

/**
 * IEEE 754 binary16.
 */
#define KVT_DTYPE_F16 2

/**
 * The upper half of a binary32.
 */
#define KVT_DTYPE_BF16 3

/**
 * 8 bits, 4 of exponent and 3 of mantissa.
 */
#define KVT_DTYPE_F8_E4M3 4

/**
 * 8 bits, 5 of exponent and 2 of mantissa.
 */
#define KVT_DTYPE_F8_E5M2 5

/**
 * Signed 8-bit integers.
 */
#define KVT_DTYPE_I8 6

/**
 * 4 bits each, two to a byte.
 */
#define KVT_DTYPE_I4 7

/**
 * No tier.
 */
#define KVT_TIER_NONE 4294967295

/**
 * What is needed of the tokens is not all there: the engine computes them.
 */
#define KVT_RANGE_MISS 0

/**
 * All that is needed of them can be loaded.
 */
#define KVT_RANGE_HIT 1

/**
 * All that is needed of them can be loaded, once what is on its way has come.
 */
#define KVT_RANGE_PENDING 2

/**
 * Nothing is needed of them: no layer reaches back so far.
 */
#define KVT_RANGE_UNNEEDED 3

/**
 * Every layer of the chunk is in some tier, not all in the same perhaps.
 */
#define KVT_EXISTS_WHOLE 16

/**
 * A whole chunk has come to a tier.
 */
#define KVT_STORE_EVENT_STORED 1

/**
 * A chunk is whole in a tier no more.
 */
#define KVT_STORE_EVENT_REMOVED 2

/**
 * Nothing of a namespace is left in any tier (kvt_namespace_clear).
 */
#define KVT_STORE_EVENT_CLEARED 3

/**
 * Gets of which all was in memory.
 */
#define KVT_LATENCY_GET_HOST 1

/**
 * Gets of which something had to be read from disk.
 */
#define KVT_LATENCY_GET_DISK 2

/**
 * Puts until they are in memory.
 */
#define KVT_LATENCY_PUT_RAM 3

/**
 * Puts until they are on disk.
 */
#define KVT_LATENCY_PUT_DISK 4

/**
 * Puts until they are durable.
 */
#define KVT_LATENCY_PUT_DURABLE 5

/**
 * Batches of copies between tensors and memory.
 */
#define KVT_LATENCY_COPY_BATCH 6

/**
 * Batches of reads of the disk.
 */
#define KVT_LATENCY_READ_BATCH 7

/**
 * Batches of writes to it.
 */
#define KVT_LATENCY_WRITE_BATCH 8

/**
 * Syncs.
 */
#define KVT_LATENCY_SYNC_BATCH 9

/**
 * Cleanings, sweeps, checkpoints and notes.
 */
#define KVT_LATENCY_UPKEEP_BATCH 10

/**
 * Choices of who leaves memory: one in some is timed.
 */
#define KVT_LATENCY_HOST_DECISION 11

/**
 * Choices of who leaves the disk: one in some is timed.
 */
#define KVT_LATENCY_DISK_DECISION 12

/**
 * Batches of objects that come from the remote.
 */
#define KVT_LATENCY_FETCH_BATCH 13

/**
 * Batches of objects that go there.
 */
#define KVT_LATENCY_UPLOAD_BATCH 14

/**
 * Questions what the remote has.
 */
#define KVT_LATENCY_LOOKUP_BATCH 15

/**
 * Requests go to the remote.
 */
#define KVT_REMOTE_CIRCUIT_CLOSED 1

/**
 * The remote is left alone for a while: it did not answer, or answered nonsense.
 */
#define KVT_REMOTE_CIRCUIT_OPEN 2

/**
 * One request goes there, to see whether it is well again.
 */
#define KVT_REMOTE_CIRCUIT_PROBING 3

/**
 * A put does nothing where there is an object of that name; without it the last writer wins.
 */
#define KVT_REMOTE_FIRST_WINS 1

/**
 * `priority` is given, also when it is 0.
 */
#define KVT_SESSION_PRIORITY 1

/**
 * It has not come yet.
 */
#define KVT_READY_EVENT_PENDING 0

/**
 * It has come.
 */
#define KVT_READY_EVENT_SIGNALLED 1

/**
 * An op for each layer: out_ops then receives one per layer of the move, and the
 * tag of layer i of the move is the given one plus i. The move is given up once all
 * of them were cancelled.
 */
#define KVT_TRANSFER_EACH_LAYER 1

/**
 * Of a get or a prefetch: only what going on after its last token needs. Of layers with a
 * window that is the chunks that have one of the window's last tokens, of layers with a
 * state the last chunk; their other cells are left alone, and are no misses. So a segment
 * of a plan can be got as it is planned. Views describe all tokens of the move.
 */
#define KVT_TRANSFER_NEEDED_ONLY 2

/**
 * A put has ended when the cells are in memory.
 */
#define KVT_LEVEL_RAM 0

/**
 * A put has ended when the cells are written to disk.
 */
#define KVT_LEVEL_DISK 1

/**
 * A put has ended when the cells survive the end of the machine.
 */
#define KVT_LEVEL_DURABLE 2

/**
 * A put has ended when the store's remote has said that it has the full chunks of which all
 * layers are there; what does not fill one, or misses layers that are still to come, is in
 * memory then. KVT_E_AGAIN where layers have left memory: they cannot be sent from elsewhere.
 */
#define KVT_LEVEL_REMOTE 3

/**
 * Loads and computing do not go on at the same time, but one after the other.
 */
#define KVT_PLAN_NO_OVERLAP 1

/**
 * What is on its way into the store is not counted on.
 */
#define KVT_PLAN_NO_WAIT 2

/**
 * `alpha_ns` and `beta_ns` are given, also when they are 0.
 */
#define KVT_PLAN_COST 4

/**
 * Nothing is to be done: the tokens are where the engine computes, or not needed.
 */
#define KVT_PLAN_RESIDENT 0

/**
 * Load them (kvt_session_get).
 */
#define KVT_PLAN_LOAD 1

/**
 * Compute them.
 */
#define KVT_PLAN_RECOMPUTE 2

/**
 * The engine can use what lies behind a hole: objects leave in any order.
 * Without it those that continue an object leave before it.
 */
#define KVT_POLICY_HOLES 1

/**
 * remember = 0 means nothing, not the default.
 */
#define KVT_POLICY_ZERO_REMEMBER 2

/**
 * alpha and beta are meant as they are, also when they are 0.
 */
#define KVT_POLICY_COST 4

/**
 * `session` is given.
 */
#define KVT_CONTEXT_SESSION 1

/**
 * `priority` is given, also when it is 0.
 */
#define KVT_CONTEXT_PRIORITY 2

/**
 * `parent` is given.
 */
#define KVT_OBJECT_HAS_PARENT 1

/**
 * It will not be used again.
 */
#define KVT_HINT_DONE 1

/**
 * `confidence` is meant as it is; without this flag it is 1.
 */
#define KVT_HINT_ZERO_CONFIDENCE 2

/**
 * Why a sequence stopped: not said.
 */
#define KVT_STOP_UNKNOWN 0

/**
 * It waits for a tool and goes on soon.
 */
#define KVT_STOP_TOOL_USE 1

/**
 * The turn ended; a person reads it.
 */
#define KVT_STOP_END_TURN 2

/**
 * The length limit was reached.
 */
#define KVT_STOP_LENGTH 3

/**
 * It was cancelled.
 */
#define KVT_STOP_CANCELLED 4

/**
 * The last victim may give a tail of its blocks and keep the rest.
 */
#define KVT_SELECT_TAIL 1

/**
 * shrink_above = 0 is meant, not the default.
 */
#define KVT_ADVICE_ZERO_SHRINK 1

/**
 * grow_below = 0 is meant, not the default.
 */
#define KVT_ADVICE_ZERO_GROW 2

/**
 * Says which blocks to load before the prompt is computed on.
 */
#define KVT_SPARSE_LOAD_PREFILL 1

/**
 * Says which blocks to load for the next token.
 */
#define KVT_SPARSE_LOAD_DECODE 2

/**
 * Says which keys the prompt is computed with.
 */
#define KVT_SPARSE_INDEX_PREFILL 4

/**
 * Says which keys the next token is computed with.
 */
#define KVT_SPARSE_INDEX_DECODE 8

/**
 * Evicts tokens when the prompt has been computed.
 */
#define KVT_SPARSE_EVICT_PREFILL 16

/**
 * Evicts tokens while text is written.
 */
#define KVT_SPARSE_EVICT_DECODE 32

/**
 * Has to be told keys, as they come or block by block.
 */
#define KVT_NEEDS_KEYS 1

/**
 * Queries, when it is asked.
 */
#define KVT_NEEDS_QUERIES 2

/**
 * What each key got of the attention: kvt_sparse_observe.
 */
#define KVT_NEEDS_COLUMN_SUMS 4

/**
 * The query of the layer `ahead` before, when it is asked what to load.
 */
#define KVT_NEEDS_NEXT_QUERY 8

/**
 * A score a candidate, before each selection: kvt_sparse_add_scores.
 */
#define KVT_NEEDS_SCORES 16

/**
 * Values, as they come.
 */
#define KVT_NEEDS_VALUES 32

/**
 * A weight for each query and head, before each question: kvt_sparse_add_scores.
 */
#define KVT_NEEDS_WEIGHTS 64

/**
 * All keys of the sequence, when it is asked for an index.
 */
#define KVT_NEEDS_ALL_KEYS 128

/**
 * Each query head has its own answer.
 */
#define KVT_SCOPE_QUERY_HEAD 0

/**
 * Each head of keys.
 */
#define KVT_SCOPE_KEY_HEAD 1

/**
 * All heads of a layer share one.
 */
#define KVT_SCOPE_LAYER 2

/**
 * Answers name tokens.
 */
#define KVT_GRANULARITY_TOKEN 0

/**
 * Answers name blocks.
 */
#define KVT_GRANULARITY_BLOCK 1

/**
 * Heads keep different numbers of tokens.
 */
#define KVT_SPARSE_RAGGED 1

/**
 * Loads are restricted to what it selects; without, all is loaded.
 */
#define KVT_SPARSE_SELECTS 2

/**
 * Keys are to be turned to the places that they have in the cache.
 */
#define KVT_SPARSE_ROTATES 4

/**
 * Fills what is left of an array behind the last id.
 */
#define KVT_SPARSE_NO_ID 4294967295

/**
 * All keys. No list.
 */
#define KVT_INDEX_DENSE 0

/**
 * Two lists: keys that every query sees, and distances back from a query at which it sees a
 * key.
 */
#define KVT_INDEX_LINES 1

/**
 * For each row of queries a list of blocks of keys.
 */
#define KVT_INDEX_BLOCKS 2

/**
 * A list of keys that every query sees; then for each row of queries a list of ranges, each
 * two numbers: its first key, and the one behind its last.
 */
#define KVT_INDEX_RANGES 3

/**
 * kvt_prefill_open.
 */
#define KVT_KERNEL_PREFILL 0

/**
 * kvt_decode_open.
 */
#define KVT_KERNEL_DECODE 1

/**
 * kvt_column_sums_open.
 */
#define KVT_KERNEL_SUMS 2

/**
 * Keys and values apart, by head.
 */
#define KVT_ATTENTION_SPLIT 0

/**
 * One row a token for all heads, of which values are the first part (MLA's latent).
 */
#define KVT_ATTENTION_LATENT 1

/**
 * Numbers are what they are.
 */
#define KVT_SCALES_NONE 0

/**
 * One scale for each token and head, heads innermost.
 */
#define KVT_SCALES_TOKEN 1

/**
 * One scale for each head and number, numbers innermost.
 */
#define KVT_SCALES_CHANNEL 2

/**
 * Scores are kept, for kvt_decode_sums.
 */
#define KVT_DECODE_SCORES 1

/**
 * Sums for each query head; else one row for all of them.
 */
#define KVT_SUMS_BY_HEAD 1

/**
 * The ring and the tails are in memory of the store's device: buffers have device addresses.
 */
#define KVT_OFFLOAD_ON_DEVICE 1

/**
 * Of a load: these blocks were chosen by somebody else. They come as they are, no policy is
 * asked, and the tail comes behind them. A query serves audits alone.
 */
#define KVT_OFFLOAD_LOAD_CHOSEN 1

/**
 * Of no layer, or no expert.
 */
#define KVT_NONE 4294967295

/**
 * kvt_model_info_t.format: GGUF, one file or split.
 */
#define KVT_FORMAT_GGUF 1

/**
 * kvt_model_info_t.format: safetensors, one file or sharded.
 */
#define KVT_FORMAT_SAFETENSORS 2

/**
 * kvt_model_info_t.format: byte ranges that the engine has named.
 */
#define KVT_FORMAT_TABLE 3

/**
 * kvt_unit_t.role: something else.
 */
#define KVT_ROLE_OTHER 0

/**
 * kvt_unit_t.role: a layer, without its experts.
 */
#define KVT_ROLE_LAYER 1

/**
 * kvt_unit_t.role: an expert of a layer.
 */
#define KVT_ROLE_EXPERT 2

/**
 * kvt_unit_t.role: what symbols are looked up in.
 */
#define KVT_ROLE_EMBEDDING 3

/**
 * kvt_unit_t.role: what comes between the last layer and the head.
 */
#define KVT_ROLE_NORM 4

/**
 * kvt_unit_t.role: what makes symbols of a hidden state.
 */
#define KVT_ROLE_HEAD 5

/**
 * kvt_stream_terms_t.seat: the engine computes on the processor, with weights in host memory.
 */
#define KVT_COMPUTE_HOST 1

/**
 * kvt_stream_terms_t.seat: the engine computes on a device: kvt_stream_opts_t.device.
 */
#define KVT_COMPUTE_DEVICE 2

/**
 * kvt_stream_terms_t.mode: residents stay, the others pass through a few slots.
 */
#define KVT_STREAM_TIERED 0

/**
 * kvt_stream_terms_t.mode: nothing stays, all memory is slots, and a policy says who leaves.
 * For orders that nobody knows; slower where the order is known.
 */
#define KVT_STREAM_RING 1

/**
 * kvt_stream_terms_t.placement: residents at equal distances.
 */
#define KVT_PLACE_INTERLEAVED 0

/**
 * kvt_stream_terms_t.placement: the first units.
 */
#define KVT_PLACE_FIRST 1

/**
 * kvt_stream_terms_t.placement: the last units.
 */
#define KVT_PLACE_LAST 2

/**
 * device_ceiling_bytes is meant as it is, also when it is 0.
 */
#define KVT_TERMS_DEVICE_CEILING 1

/**
 * host_ceiling_bytes is meant as it is, also when it is 0.
 */
#define KVT_TERMS_HOST_CEILING 2

/**
 * device_safety_bytes is meant as it is, also when it is 0.
 */
#define KVT_TERMS_DEVICE_SAFETY 4

/**
 * host_reserve_bytes is meant as it is, also when it is 0.
 */
#define KVT_TERMS_HOST_RESERVE 8

/**
 * kv_bytes is meant as it is, also when it is 0.
 */
#define KVT_TERMS_KV 16

/**
 * expert_slots is meant as it is, also when it is 0.
 */
#define KVT_TERMS_EXPERT_SLOTS 32

/**
 * kvt_stream_terms_t.flags: weights are to be given back while the streamer is used, by
 * kvt_stream_rebalance or as the budget asks. Slots are there also where everything fits, as
 * large as lets it shrink most, and no more for experts than a layer needs, unless
 * expert_slots says so; the streamer gives those beyond that need back, too. A streamer with a budget is opened like this in any case. Not the bit
 * of any flag of kvt_stream_opts_t.
 */
#define KVT_TERMS_SHRINKS 256

/**
 * kvt_stream_opts_t.flags: the disk is measured first, if its speed is not said: that reads
 * up to 256 MiB.
 */
#define KVT_STREAM_MEASURE 1

/**
 * No pass follows a pass: nothing is fetched ahead across its end.
 */
#define KVT_STREAM_ONCE 2

/**
 * Every unit has an address of its own, which never changes, and memory only while it is
 * there: see kvt_stream_unit_address. On a device it takes whole pieces of what the device maps by
 * (2 MiB on CUDA), and the plan counts them.
 */
#define KVT_STREAM_IN_PLACE 4

/**
 * Files are read through the page cache, which is told to forget what was read.
 */
#define KVT_STREAM_BUFFERED 8

/**
 * Without io_uring.
 */
#define KVT_STREAM_NO_URING 16

/**
 * By copies out of a memory map: slow, and there to be compared with. A file that is cut
 * short while it is read ends the process (SIGBUS).
 */
#define KVT_STREAM_MAPPED 32

/**
 * Checksums are kept: in the file `sidecar`, beside the model if that is empty.
 */
#define KVT_STREAM_SIDECAR 64

/**
 * pinned_percent is meant as it is, also when it is 0.
 */
#define KVT_STREAM_SET_PINNED_PERCENT 128

/**
 * The device reads units into its slots by itself, past host memory (CUDA: cuFile, loaded now,
 * with its silent way by host memory switched off for the whole process). KVT_E_UNAVAILABLE and
 * why, where it cannot: no library, no kernel module, another file system than ext4 and XFS. What
 * does not lie in the file as it needs that goes by host memory as ever, and so does what fails:
 * kvt_stream_stats counts both. Not with KVT_VERIFY_ALWAYS, and not in place.
 */
#define KVT_STREAM_DIRECT 512

/**
 * kvt_stream_opts_t.verify: bytes are not compared with checksums.
 */
#define KVT_VERIFY_NEVER 0

/**
 * When a unit is read for the first time; checksums that nobody knows are noted.
 */
#define KVT_VERIFY_FIRST 1

/**
 * Whenever it is read.
 */
#define KVT_VERIFY_ALWAYS 2

/**
 * kvt_unit_residency_t.home: the file alone.
 */
#define KVT_RESIDENT_FILE 1

/**
 * kvt_unit_residency_t.home: host memory.
 */
#define KVT_RESIDENT_HOST 2

/**
 * kvt_unit_residency_t.home: memory of the device.
 */
#define KVT_RESIDENT_DEVICE 3

/**
 * kvt_forecast_t.binding: computing.
 */
#define KVT_BINDING_COMPUTE 1

/**
 * kvt_forecast_t.binding: the way to the device.
 */
#define KVT_BINDING_DEVICE 2

/**
 * kvt_forecast_t.binding: the disk.
 */
#define KVT_BINDING_DISK 3

/**
 * A plan as text for people.
 */
#define KVT_PLAN_TEXT 0

/**
 * A plan as one JSON object.
 */
#define KVT_PLAN_JSON 1

/**
 * kvt_stream_acquire: does not wait; KVT_E_AGAIN when the unit is not there.
 */
#define KVT_ACQUIRE_POLL 1

/**
 * kvt_stream_acquire, on a device: does not wait for copies that are on their way:
 * kvt_unit_lease_t.event says when the bytes are there. kvt_device_stream_wait has a stream wait for it.
 */
#define KVT_ACQUIRE_SUBMITTED 2

/**
 * host_bytes is meant as it is, also when it is 0.
 */
#define KVT_LIMIT_HOST 1

/**
 * device_bytes is meant as it is, also when it is 0.
 */
#define KVT_LIMIT_DEVICE 2

/**
 * kvt_stream_span_t.stage: a chunk was read.
 */
#define KVT_STAGE_READ 1

/**
 * kvt_stream_span_t.stage: a chunk was copied to the device.
 */
#define KVT_STAGE_COPY 2

/**
 * kvt_stream_span_t.stage: the engine had a unit.
 */
#define KVT_STAGE_USE 3

/**
 * kvt_stream_span_t.stage: the engine waited for a unit.
 */
#define KVT_STAGE_WAIT 4

/**
 * The processor copies, done when the call returns.
 */
#define KVT_DEVICE_KIND_HOST 1

/**
 * A GPU by way of the CUDA driver, which is loaded when the device is opened.
 */
#define KVT_DEVICE_KIND_CUDA 2

/**
 * The engine copies: kvt_device_custom_t.
 */
#define KVT_DEVICE_KIND_CUSTOM 3

/**
 * None at all: it takes its time and spoils what is not waited for. For tests.
 */
#define KVT_DEVICE_KIND_SIMULATED 4

/**
 * Work goes on after a call has returned.
 */
#define KVT_DEVICE_ASYNCHRONOUS 1

/**
 * It sums what it copies.
 */
#define KVT_DEVICE_CHECKSUMS 2

/**
 * It has memory that only it reaches: KVT_MEMORY_DEVICE.
 */
#define KVT_DEVICE_HAS_MEMORY 4

/**
 * Copies are slow, and not asynchronous, unless host memory is pinned: see
 * kvt_device_register_host.
 */
#define KVT_DEVICE_WANTS_PINNED 8

/**
 * CUDA and simulated: the device sums what it copies, where it lies in its memory, and stores
 * hold what has come over the bus against that: a copy that came damaged is made again, and if
 * that does not help, fails with KVT_E_CORRUPT.
 */
#define KVT_DEVICE_VERIFY 1

/**
 * From the view into the plane.
 */
#define KVT_COPY_GATHER 0

/**
 * From the plane into the view.
 */
#define KVT_COPY_SCATTER 1

/**
 * Its checksum is wanted, of devices that sum (KVT_DEVICE_CHECKSUMS): of an asynchronous one that of
 * the side in its memory, what was read there or what is there now (both sides: the target).
 */
#define KVT_COPY_CHECKSUM 1

/**
 * Moves runs of bytes.
 */
#define KVT_DEVICE_KERNEL_MOVE 1

/**
 * Changes what numbers are, with scales or without.
 */
#define KVT_DEVICE_KERNEL_CONVERT 2

/**
 * Sums bytes as the store does.
 */
#define KVT_DEVICE_KERNEL_SUM 3

/**
 * Makes the boxes of pages wider.
 */
#define KVT_DEVICE_KERNEL_PAGE_BOXES 4

/**
 * The most that a query can have of each page.
 */
#define KVT_DEVICE_KERNEL_PAGE_SCORES 5

/**
 * The largest of each row.
 */
#define KVT_DEVICE_KERNEL_TOP 6

/**
 * Adds weights to what tokens had.
 */
#define KVT_DEVICE_KERNEL_ADD 7

/**
 * Which tokens stay.
 */
#define KVT_DEVICE_KERNEL_KEEP 8

/**
 * Moves what stays together.
 */
#define KVT_DEVICE_KERNEL_COMPACT 9

/**
 * Columns and diagonals of the last queries.
 */
#define KVT_DEVICE_KERNEL_ESTIMATE 10

/**
 * Attention of a prompt over lines or blocks.
 */
#define KVT_DEVICE_KERNEL_PREFILL 11

/**
 * Attention of few queries over chosen pages.
 */
#define KVT_DEVICE_KERNEL_DECODE 12

/**
 * The device is closed at the end, which is a check as well.
 */
#define KVT_CONFORMANCE_CLOSES 1

/**
 * The device does what it should.
 */
#define KVT_VERDICT_PASSED 0

/**
 * It has nothing that could be tested.
 */
#define KVT_VERDICT_SKIPPED 1

/**
 * It does not do what it should.
 */
#define KVT_VERDICT_FAILED 2

/**
 * kvt_trace_opts_t.flags: every block becomes a request of its own, without prefixes.
 */
#define KVT_TRACE_FLAT 1

/**
 * kvt_replay_opts_t.flags: the engine can use what lies behind a hole.
 */
#define KVT_REPLAY_HOLES 1

/**
 * kvt_replay_opts_t.flags: decisions are not timed, which makes the replay faster.
 */
#define KVT_REPLAY_UNTIMED 2

/**
 * kvt_replay_opts_t.hints: the policy is told why requests stopped.
 */
#define KVT_HINTS_STOP 0

/**
 * kvt_replay_opts_t.hints: the policy is told nothing of the future.
 */
#define KVT_HINTS_NONE 1

/**
 * kvt_replay_opts_t.hints: also when a session's next request comes.
 */
#define KVT_HINTS_THINK 2

/**
 * One owner's part in a budget. Internally locked: any thread may use it.
 */
typedef struct kvt_account_t kvt_account_t;

/**
 * The bytes that may be used, per tier; hard at every instant. Internally
 * locked: any thread may use it.
 */
typedef struct kvt_budget_t kvt_budget_t;

/**
 * A range of host memory that ops may read and write. Internally locked; the
 * bytes themselves are yours, except between submitting an op on them and its
 * release: then the library's alone.
 */
typedef struct kvt_buffer_t kvt_buffer_t;

/**
 * Who copies between an engine's memory and the library's: the processor, a GPU, or the engine
 * itself. Stores and streamers are opened with one. Internally locked: any thread may use it.
 */
typedef struct kvt_device_t kvt_device_t;

/**
 * A failure in words. Calls that take a `kvt_error_t **err` write one there
 * when they fail (only then) and `err` is not null. The variable must be null
 * or hold an error; that one is replaced. Free it with kvt_error_free. In a
 * forked child (KVT_E_FORKED) none is written.
 */
typedef struct kvt_error_t kvt_error_t;

/**
 * A moment that comes once: memory is ready. Moves wait for it (kvt_transfer_t.ready).
 * Internally locked: any thread may use it.
 */
typedef struct kvt_ready_event_t kvt_ready_event_t;

/**
 * Attention that is to be computed. Pieces of it are *items*, which the engine's threads run,
 * each once and in any order; items of a step once all of the step before have ended. What
 * comes out has the same bits whoever runs what. All that a job was opened with stays as it
 * is until it is closed.
 */
typedef struct kvt_attention_job_t kvt_attention_job_t;

/**
 * What is in the files of a model: tensors, and the units that they move in. It never
 * changes, so any thread may use it, and it needs no runtime. The files are not kept open.
 */
typedef struct kvt_model_t kvt_model_t;

/**
 * A namespace of a store: sessions in it share what they have in common.
 * Internally locked: any thread may use it.
 */
typedef struct kvt_namespace_t kvt_namespace_t;

/**
 * A session's KV, layer by layer: a ring of buffers that kernels read, the store behind it,
 * and sparse policies that say which blocks have to come. Calls on one come one at a time: a
 * second one waits for the first, or is KVT_E_REENTRANT in a callback.
 */
typedef struct kvt_offload_t kvt_offload_t;

/**
 * A submitted operation. It completes exactly once and has two moments:
 * *resolved*, the result is known, and *released*, the library does not touch
 * your memory any more. Usually both come together; a deadline or a defect may
 * resolve an op earlier. Internally locked: any thread may use it.
 */
typedef struct kvt_op_t kvt_op_t;

/**
 * An eviction policy at work. Needs no runtime. Internally locked: any thread
 * may use it.
 */
typedef struct kvt_policy_t kvt_policy_t;

/**
 * Where completions arrive: polled (with an eventfd on request) or called back
 * on the notifier thread, never both. It never drops one: submitting fails
 * with KVT_E_AGAIN while it is full. Internally locked: any thread may use it,
 * several may drain it.
 */
typedef struct kvt_queue_t kvt_queue_t;

/**
 * The root: owns threads, clock and notifier. Everything is opened on one.
 * Internally locked: any thread may use it at any time.
 */
typedef struct kvt_runtime_t kvt_runtime_t;

/**
 * A sequence of tokens whose KV is kept. Its chunks stay in a tier while it is
 * open. Internally locked: any thread may use it.
 */
typedef struct kvt_session_t kvt_session_t;

/**
 * A sparse policy that serves one sequence. Any thread may use it, one at a time: a call
 * that comes while another is inside is refused with KVT_E_BUSY.
 */
typedef struct kvt_sparse_t kvt_sparse_t;

/**
 * Keeps the KV cache of sessions in tiers: memory, disk, a remote. Internally
 * locked: any thread may use it.
 */
typedef struct kvt_store_t kvt_store_t;

/**
 * Weights that come as the engine computes: units whose home is in memory are at hand, the
 * others pass through a few slots, fetched ahead in the order of a pass. Internally locked:
 * any thread may use it, and different threads may have different units.
 */
typedef struct kvt_stream_t kvt_stream_t;

/**
 * Requests to a KV cache over time. Never changes: any thread may use it.
 */
typedef struct kvt_trace_t kvt_trace_t;

/**
 * Result of every call: 0 is success, negative is an error. Numbers are only
 * ever added; a code your header does not know is still an error.
 */
typedef int32_t kvt_status_t;

/**
 * The particulars of an error.
 */
typedef struct kvt_error_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * The message, UTF-8 and NUL-terminated. Lives until the error is freed
     * or replaced.
     */
    const char *message;
    /**
     * Length of the message without the NUL.
     */
    uint64_t message_bytes;
    /**
     * Offset in the input text, for errors about one; else UINT64_MAX.
     */
    uint64_t offset;
    /**
     * The status the failed call returned.
     */
    kvt_status_t status;
    /**
     * errno, when the operating system was asked; else 0.
     */
    int32_t os_errno;
} kvt_error_info_t;

/**
 * Receives a log message; texts are UTF-8, not NUL-terminated, borrowed for
 * the call. May be called from any thread, and from several at once. It must
 * not unwind.
 */
typedef void (*kvt_log_fn)(void *user_data,
                           uint32_t level,
                           const char *target,
                           uint64_t target_bytes,
                           const char *message,
                           uint64_t message_bytes);

/**
 * Releases `user_data`. Called once, after the last call of the callback it
 * was registered with. It must not unwind.
 */
typedef void (*kvt_destroy_fn)(void *user_data);

/**
 * An optional feature. Texts are UTF-8, not NUL-terminated, and live as long
 * as the library.
 */
typedef struct kvt_feature_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Its name, such as "cuda".
     */
    const char *name;
    /**
     * Length of the name.
     */
    uint64_t name_bytes;
    /**
     * What it is for.
     */
    const char *note;
    /**
     * Length of the note.
     */
    uint64_t note_bytes;
    /**
     * 1 when the code for it is in this library.
     */
    uint32_t built;
    /**
     * 1 when this machine offers it, as probed now.
     */
    uint32_t present;
} kvt_feature_t;

/**
 * Called first in every thread of the runtime, and of the stores and streamers on it,
 * so that the host can name it, place it on a core or a NUMA node, or set its
 * priority. It must not unwind and must not call the library. `role` is KVT_THREAD_*,
 * more may be added; `index` counts the threads of that role, of each store or
 * streamer from 0. May be called from several threads at once.
 */
typedef void (*kvt_thread_fn)(void *user_data, uint32_t role, uint32_t index);

/**
 * How to open a runtime. Zero is the default everywhere.
 */
typedef struct kvt_runtime_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * None are defined yet: 0.
     */
    uint64_t flags;
    /**
     * Worker threads, at most 256; 0 = the number of cores, at most 4.
     */
    uint32_t workers;
    /**
     * Ops that may live (not freed) at once, at most 524288; 0 = 65536.
     */
    uint32_t max_ops;
    /**
     * Prefix of thread names, at most 10 bytes; empty = "kvt".
     */
    const char *name;
    /**
     * Length of the name.
     */
    uint64_t name_bytes;
    /**
     * Faults to plant, for tests of the host's own error paths, such as
     * "faults(worker=at(panic=3), pin=at(fail=1))"; empty = none. See docs/abi.md.
     */
    const char *faults;
    /**
     * Length of the faults text.
     */
    uint64_t faults_bytes;
    /**
     * Called first in every thread; may be null.
     */
    kvt_thread_fn on_thread;
    /**
     * Handed to on_thread; taken over on success only.
     */
    void *user_data;
    /**
     * Releases user_data; may be null.
     */
    kvt_destroy_fn destroy;
} kvt_runtime_opts_t;

/**
 * What was still there when a runtime was closed. Nothing of it is lost: open
 * handles keep working as far as they can without a runtime, and are freed as usual.
 */
typedef struct kvt_close_report_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Queues not closed.
     */
    uint64_t queues;
    /**
     * Buffers not freed.
     */
    uint64_t buffers;
    /**
     * Budgets not closed.
     */
    uint64_t budgets;
    /**
     * Accounts not closed.
     */
    uint64_t accounts;
    /**
     * Ops not freed.
     */
    uint64_t ops;
    /**
     * Stores not closed. Their threads go on until they are.
     */
    uint64_t stores;
    /**
     * Namespaces not closed.
     */
    uint64_t namespaces;
    /**
     * Sessions not closed.
     */
    uint64_t sessions;
    /**
     * Offloads not closed.
     */
    uint64_t offloads;
    /**
     * Streamers not closed. Their threads have ended: calls on them give KVT_E_CLOSED.
     */
    uint64_t streamers;
    /**
     * Devices not closed.
     */
    uint64_t devices;
} kvt_close_report_t;

/**
 * Counters of a runtime.
 */
typedef struct kvt_runtime_stats_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Ops submitted so far.
     */
    uint64_t ops_submitted;
    /**
     * Ops not yet released; for a moment, those that were just told of may still count.
     */
    uint64_t ops_open;
    /**
     * Ops not yet freed; the same.
     */
    uint64_t ops_live;
    /**
     * Ops waiting for a worker.
     */
    uint64_t ops_queued;
    /**
     * Submissions refused because max_ops lived.
     */
    uint64_t ops_rejected;
    /**
     * Worker threads.
     */
    uint32_t workers;
    /**
     * 1 after a defect was caught inside; close the runtime then.
     */
    uint32_t poisoned;
} kvt_runtime_stats_t;

/**
 * How far an op is.
 */
typedef struct kvt_op_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * The word given at submission.
     */
    uint64_t tag;
    /**
     * Bytes of the items that are done and OK.
     */
    uint64_t bytes_done;
    /**
     * KVT_OP_* bits.
     */
    uint32_t state;
    /**
     * The result; meaningful once KVT_OP_RESOLVED is set.
     */
    kvt_status_t status;
    /**
     * Items in all.
     */
    uint32_t items;
    /**
     * Items that are done or were skipped.
     */
    uint32_t items_done;
    /**
     * Of those, the ones that are not OK.
     */
    uint32_t items_failed;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * What the first item computed; of a move of a session how many tokens from
     * the first on came, or were stored, without a gap.
     */
    uint64_t value;
} kvt_op_info_t;

/**
 * How one item of an op went.
 */
typedef struct kvt_op_item_t {
    /**
     * What it computed, such as a checksum; 0 where nothing was.
     */
    uint64_t value;
    /**
     * Its result; meaningful once done.
     */
    kvt_status_t status;
    /**
     * 1 when it is done or was skipped.
     */
    uint32_t done;
} kvt_op_item_t;

/**
 * One thing that happened to an op.
 */
typedef struct kvt_completion_t {
    /**
     * The op, still to be freed by you; null when it was submitted without a
     * handle (out_ops null).
     */
    struct kvt_op_t *op;
    /**
     * The word given at submission.
     */
    uint64_t tag;
    /**
     * Bytes of the items that are done and OK.
     */
    uint64_t bytes_done;
    /**
     * What the first item computed, such as a checksum; of a move of a session
     * how many tokens from the first on came, or were stored, without a gap.
     */
    uint64_t value;
    /**
     * The op's result; KVT_OK for a KVT_OP_ISSUED alone.
     */
    kvt_status_t status;
    /**
     * KVT_OP_ISSUED, _RESOLVED, _RELEASED: the moments this entry tells of.
     */
    uint32_t events;
    /**
     * Items that are not OK.
     */
    uint32_t items_failed;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_completion_t;

/**
 * Receives completions on the notifier thread, never from two threads at once
 * for one queue. `batch` is borrowed for the call; its entries lie
 * `stride_bytes` apart. It must not unwind, and must not wait for work of the
 * same runtime: kvt_op_wait, kvt_queue_close and kvt_runtime_close give
 * KVT_E_REENTRANT in here. Submitting and freeing ops is fine.
 */
typedef void (*kvt_completion_fn)(void *user_data,
                                  const struct kvt_completion_t *batch,
                                  uint64_t count,
                                  uint64_t stride_bytes);

/**
 * How to open a queue. Zero is the default everywhere.
 */
typedef struct kvt_queue_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * None are defined yet: 0.
     */
    uint64_t flags;
    /**
     * Completions that can be outstanding or waiting, at most 1048576; 0 = 4096.
     */
    uint64_t capacity;
    /**
     * Called back with completions; null = the queue is polled.
     */
    kvt_completion_fn callback;
    /**
     * Handed to the callback; taken over on success only.
     */
    void *user_data;
    /**
     * Releases user_data; may be null.
     */
    kvt_destroy_fn destroy;
} kvt_queue_opts_t;

/**
 * Counters of a queue.
 */
typedef struct kvt_queue_stats_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Places in all.
     */
    uint64_t capacity;
    /**
     * Completions waiting to be drained.
     */
    uint64_t pending;
    /**
     * Places kept for ops that have not completed.
     */
    uint64_t reserved;
    /**
     * Most places ever taken.
     */
    uint64_t peak;
    /**
     * Completions posted so far.
     */
    uint64_t posted;
    /**
     * Submissions refused because it was full.
     */
    uint64_t refused;
} kvt_queue_stats_t;

/**
 * How to open a budget.
 */
typedef struct kvt_budget_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_BUDGET_*.
     */
    uint64_t flags;
    /**
     * Limit of the device tier; 0 = none.
     */
    uint64_t device_bytes;
    /**
     * Limit of the host tier; 0 = half of what this process may still use:
     * min(cgroup headroom, available memory) less the reserve.
     */
    uint64_t host_bytes;
    /**
     * Limit of what stores keep on disk, all together: the bytes of their disk tiers; 0 = no
     * limit.
     */
    uint64_t disk_bytes;
    /**
     * Limit of the remote tier; 0 = none.
     */
    uint64_t remote_bytes;
    /**
     * Limit of locked memory; 0 = the quota of this process, at most host_bytes.
     */
    uint64_t pinned_bytes;
    /**
     * Kept free of the memory this process may use; 0 = an eighth of it, at most 512 MiB.
     */
    uint64_t reserve_bytes;
} kvt_budget_opts_t;

/**
 * What a budget found on this machine.
 */
typedef struct kvt_budget_report_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * RAM of the machine.
     */
    uint64_t total_bytes;
    /**
     * What the kernel could give without swapping, now.
     */
    uint64_t available_bytes;
    /**
     * The tightest cgroup limit; UINT64_MAX when there is none.
     */
    uint64_t cgroup_limit_bytes;
    /**
     * What is left under it now; UINT64_MAX when there is none.
     */
    uint64_t cgroup_headroom_bytes;
    /**
     * min(cgroup headroom, available), now.
     */
    uint64_t effective_bytes;
    /**
     * Kept free of that.
     */
    uint64_t reserve_bytes;
    /**
     * What this process may lock in all; UINT64_MAX when unlimited.
     */
    uint64_t lock_quota_bytes;
    /**
     * What it has locked now.
     */
    uint64_t locked_bytes;
    /**
     * Accounts that are open.
     */
    uint64_t accounts;
    /**
     * 1 or 2; 0 when there is no limit.
     */
    uint32_t cgroup_version;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_budget_report_t;

/**
 * Counters of one tier of a budget.
 */
typedef struct kvt_tier_report_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * The limit that was asked for.
     */
    uint64_t asked_bytes;
    /**
     * The limit that holds.
     */
    uint64_t limit_bytes;
    /**
     * Promised to accounts.
     */
    uint64_t reserved_bytes;
    /**
     * In use by accounts.
     */
    uint64_t committed_bytes;
    /**
     * Most ever promised and in use together.
     */
    uint64_t peak_bytes;
    /**
     * What can be reserved now.
     */
    uint64_t free_bytes;
    /**
     * Reservations that failed.
     */
    uint64_t refused;
    /**
     * Reservations that wait.
     */
    uint64_t waiting;
    /**
     * Bytes owners were asked to give back so far.
     */
    uint64_t reclaim_requested_bytes;
} kvt_tier_report_t;

/**
 * Asked to give bytes of a tier back. Returns how many it promises to release
 * soon (0 is allowed); the release itself may come later, from any thread, and
 * matters only before `deadline_ns` (0 = none). Called on the notifier thread
 * under no lock. It must not unwind and must not wait.
 */
typedef uint64_t (*kvt_reclaim_fn)(void *user_data,
                                   uint32_t tier,
                                   uint64_t bytes,
                                   uint64_t deadline_ns);

/**
 * How to open an account.
 */
typedef struct kvt_account_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * None are defined yet: 0.
     */
    uint64_t flags;
    /**
     * Name in messages.
     */
    const char *name;
    /**
     * Length of the name, at most 64.
     */
    uint64_t name_bytes;
    /**
     * Owners of low priority are asked to give back first.
     */
    int64_t priority;
    /**
     * Asked to give back; null = never.
     */
    kvt_reclaim_fn reclaim;
    /**
     * Handed to reclaim; taken over on success only.
     */
    void *user_data;
    /**
     * Releases user_data; may be null.
     */
    kvt_destroy_fn destroy;
} kvt_account_opts_t;

/**
 * How to submit. Zero is the default everywhere.
 */
typedef struct kvt_submit_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_SUBMIT_*.
     */
    uint64_t flags;
    /**
     * Where completions go; null = nowhere, the op handle must be kept.
     */
    const struct kvt_queue_t *queue;
    /**
     * Your own word, handed back in the completion.
     */
    uint64_t tag;
    /**
     * CLOCK_MONOTONIC; the op resolves with KVT_E_TIMEOUT then. 0 = never.
     */
    uint64_t deadline_ns;
    /**
     * Moments (KVT_OP_ISSUED, _RESOLVED, _RELEASED) that get a completion each;
     * moments that come together share one. 0 = KVT_OP_RELEASED.
     */
    uint32_t notify;
    /**
     * KVT_PRIORITY_*.
     */
    uint32_t priority;
} kvt_submit_opts_t;

/**
 * How to allocate a buffer.
 */
typedef struct kvt_buffer_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_BUFFER_*.
     */
    uint64_t flags;
    /**
     * Size.
     */
    uint64_t bytes;
    /**
     * Alignment, a power of two up to 1 GiB; 0 = one page.
     */
    uint64_t align_bytes;
    /**
     * Who pays, in KVT_TIER_HOST and, when locked, KVT_TIER_PINNED; null = nobody.
     */
    const struct kvt_account_t *account;
} kvt_buffer_opts_t;

/**
 * What a buffer is.
 */
typedef struct kvt_buffer_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Where it starts.
     */
    void *address;
    /**
     * Its usable size.
     */
    uint64_t bytes;
    /**
     * What its account pays: the size in whole pages.
     */
    uint64_t charged_bytes;
    /**
     * Ops submitted on it and not yet released.
     */
    uint64_t in_flight;
    /**
     * 1 when it is locked in RAM.
     */
    uint32_t pinned;
    /**
     * KVT_PAGES_*.
     */
    uint32_t pages;
} kvt_buffer_info_t;

/**
 * One piece of work on up to two buffers.
 */
typedef struct kvt_buffer_item_t {
    /**
     * KVT_ITEM_* bits.
     */
    uint32_t kind;
    /**
     * None are defined yet: 0.
     */
    uint32_t flags;
    /**
     * The target; null for work that only reads.
     */
    const struct kvt_buffer_t *dst;
    /**
     * Where in the target.
     */
    uint64_t dst_offset;
    /**
     * The source; null for KVT_ITEM_PREFAULT.
     */
    const struct kvt_buffer_t *src;
    /**
     * Where in the source.
     */
    uint64_t src_offset;
    /**
     * How much.
     */
    uint64_t bytes;
    /**
     * The checksum to compare with, for KVT_ITEM_VERIFY.
     */
    uint64_t expect;
    /**
     * Your own word, with KVT_SUBMIT_EACH.
     */
    uint64_t tag;
} kvt_buffer_item_t;

/**
 * Something that only the remote's server is to see. Copied when a store is opened, wiped
 * when it is closed, and shown by no spec, log, error or control socket. Stands in arrays
 * only.
 */
typedef struct kvt_secret_t {
    /**
     * Which it is: "password".
     */
    const char *name;
    /**
     * Length of that.
     */
    uint64_t name_bytes;
    /**
     * The secret.
     */
    const void *secret;
    /**
     * Its length, at most 4,096.
     */
    uint64_t secret_bytes;
} kvt_secret_t;

/**
 * A piece of memory. Pieces of a get that nobody wants may be the same memory in several items;
 * those of a put are not to be written. Stands in arrays only.
 */
typedef struct kvt_remote_part_t {
    /**
     * Where it is, in host memory.
     */
    void *address;
    /**
     * How long.
     */
    uint64_t bytes;
} kvt_remote_part_t;

/**
 * An object of a batch. Stands in arrays only; the next is `stride_bytes` behind it.
 */
typedef struct kvt_remote_item_t {
    /**
     * Its name: letters, digits, '.', '_', '-' and '/'. Not NUL-terminated.
     */
    const char *name;
    /**
     * Length of that.
     */
    uint64_t name_bytes;
    /**
     * Where its bytes go (get) or come from (put), one piece after the other.
     */
    const struct kvt_remote_part_t *parts;
    /**
     * How many pieces.
     */
    uint64_t part_count;
    /**
     * Of a get: the first of its bytes that is wanted.
     */
    uint64_t offset;
    /**
     * Written by the callback. Of a get: how many bytes came, fewer than there is room for where
     * the object ends. Of a question: how long the object is. Of a put: 1 if it was there.
     */
    uint64_t bytes;
    /**
     * Written by the callback: KVT_OK; KVT_E_NOT_FOUND; KVT_E_AGAIN (at another time),
     * KVT_E_TIMEOUT, KVT_E_BUDGET (full), KVT_E_LIMIT (it takes none that long), KVT_E_CORRUPT,
     * KVT_E_UNAVAILABLE. It is KVT_E_AGAIN before.
     */
    kvt_status_t status;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_remote_item_t;

/**
 * Does something with all objects of a batch until a deadline (CLOCK_MONOTONIC). Each has a
 * status of its own afterwards, and no memory of the batch is touched any more. Anything but
 * KVT_OK is the status of all that have none.
 */
typedef kvt_status_t (*kvt_remote_batch_fn)(void *user_data,
                                            struct kvt_remote_item_t *items,
                                            uint64_t count,
                                            uint64_t stride_bytes,
                                            uint64_t deadline_ns);

/**
 * A remote of the engine's own, for `remote=custom(...)` in a store's spec. Its functions are
 * called from threads of the store, from several at once, with no lock held; they must not
 * unwind, and must not call the store that they are of. What they say of being there is a hint,
 * and what they give is checked: they may be wrong, but not late.
 */
typedef struct kvt_remote_custom_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_REMOTE_FIRST_WINS.
     */
    uint64_t flags;
    /**
     * Bytes of an object that it is quick with; 0 = 1 MiB.
     */
    uint64_t preferred_bytes;
    /**
     * Most bytes of an object; 0 = as many as an object can have.
     */
    uint64_t max_bytes;
    /**
     * Most objects of a batch; 0 = 32.
     */
    uint32_t batch;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Fetches objects, or parts of them.
     */
    kvt_remote_batch_fn get;
    /**
     * Stores objects.
     */
    kvt_remote_batch_fn put;
    /**
     * Says which are there, and how long they are.
     */
    kvt_remote_batch_fn exists;
    /**
     * Takes objects away; null = they are never taken away.
     */
    kvt_remote_batch_fn remove;
    /**
     * Handed to all of them; taken over on success only.
     */
    void *user_data;
    /**
     * Releases user_data, once the store is closed; may be null.
     */
    kvt_destroy_fn destroy;
} kvt_remote_custom_t;

/**
 * How to open a store. Zero is the default everywhere. Fields that are set count instead
 * of what the spec says, and are read by the same rules.
 */
typedef struct kvt_store_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * None are defined yet: 0.
     */
    uint64_t flags;
    /**
     * The spec, such as "store(host=8GiB, disk=disk(path=\"kv\", bytes=200GiB))";
     * null = "store": 1 GiB of memory and no disk. docs/abi.md has its parameters.
     */
    const char *spec;
    /**
     * Length of the spec.
     */
    uint64_t spec_bytes;
    /**
     * Most bytes of cells in memory (`host`); 0 = as the spec says.
     */
    uint64_t host_bytes;
    /**
     * Most bytes of all files (`disk(bytes=...)`); 0 = as the spec says.
     */
    uint64_t disk_bytes;
    /**
     * The directory of the disk tier (`disk(path=...)`), UTF-8; null = as the spec says.
     */
    const char *disk_path;
    /**
     * Length of that.
     */
    uint64_t disk_path_bytes;
    /**
     * Who leaves memory (`policy`); null = as the spec says.
     */
    const char *policy;
    /**
     * Length of that.
     */
    uint64_t policy_bytes;
    /**
     * Who leaves the disk (`disk_policy`); null = as the spec says.
     */
    const char *disk_policy;
    /**
     * Length of that.
     */
    uint64_t disk_policy_bytes;
    /**
     * KVT_WRITE_*; 0 = as the spec says.
     */
    uint32_t write;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Who copies between the engine's memory and the store's, a device of the same runtime;
     * null = the processor. With one that has memory of its own, moves take views of it, and
     * `device=device(capacity=8GiB)` in the spec keeps cells there, too.
     */
    const struct kvt_device_t *device;
    /**
     * What only the server of its remote (`remote=redis(...)`) is to see; null = nothing.
     */
    const struct kvt_secret_t *secrets;
    /**
     * How many, at most 16.
     */
    uint64_t secret_count;
    /**
     * sizeof(kvt_secret_t).
     */
    uint64_t secret_stride_bytes;
    /**
     * The engine's own remote, which `remote=custom(...)` in the spec is; null = none.
     */
    const struct kvt_remote_custom_t *remote;
} kvt_store_opts_t;

/**
 * What a store counts since it was opened, and what it has now.
 */
typedef struct kvt_store_stats_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Puts begun.
     */
    uint64_t puts;
    /**
     * Gets begun.
     */
    uint64_t gets;
    /**
     * Prefetches begun.
     */
    uint64_t prefetches;
    /**
     * Cells stored from outside.
     */
    uint64_t stored_cells;
    /**
     * Cells that were there when they were to be stored.
     */
    uint64_t known_cells;
    /**
     * Cells read from memory.
     */
    uint64_t host_hit_cells;
    /**
     * Cells that had to be read from disk first.
     */
    uint64_t disk_hit_cells;
    /**
     * Cells that were nowhere.
     */
    uint64_t missed_cells;
    /**
     * Cells whose bytes were wrong, and that became misses.
     */
    uint64_t corrupt_cells;
    /**
     * Cells written to disk.
     */
    uint64_t written_cells;
    /**
     * Bytes of them.
     */
    uint64_t written_bytes;
    /**
     * Bytes loaded from disk.
     */
    uint64_t loaded_bytes;
    /**
     * Chunks that left memory and are on disk.
     */
    uint64_t demoted_chunks;
    /**
     * Chunks that left memory and are gone.
     */
    uint64_t dropped_chunks;
    /**
     * Chunks that left the disk.
     */
    uint64_t evicted_chunks;
    /**
     * Chunks that were to leave memory, and the disk had no room for.
     */
    uint64_t refused_chunks;
    /**
     * Cells that failed for want of room.
     */
    uint64_t no_room_cells;
    /**
     * Writes that failed.
     */
    uint64_t failed_writes;
    /**
     * Reads that failed.
     */
    uint64_t failed_reads;
    /**
     * Namespaces, those included that nobody has open.
     */
    uint64_t namespaces;
    /**
     * Sessions that are open.
     */
    uint64_t sessions;
    /**
     * Chunks that are known, of all layouts.
     */
    uint64_t chunks;
    /**
     * Chunks that are pinned.
     */
    uint64_t pins;
    /**
     * Moves under way.
     */
    uint64_t moves;
    /**
     * Cells on their way.
     */
    uint64_t moving_cells;
    /**
     * Most bytes of cells in memory.
     */
    uint64_t host_limit_bytes;
    /**
     * Bytes of cells in memory.
     */
    uint64_t host_used_bytes;
    /**
     * What that memory costs, tables and gaps included.
     */
    uint64_t host_cost_bytes;
    /**
     * Cells in memory.
     */
    uint64_t host_cells;
    /**
     * Most bytes of all files; 0 = there is no disk.
     */
    uint64_t disk_limit_bytes;
    /**
     * Bytes of all files.
     */
    uint64_t disk_used_bytes;
    /**
     * The most they ever were.
     */
    uint64_t disk_peak_bytes;
    /**
     * Bytes of cells that live on disk, padded to blocks.
     */
    uint64_t disk_live_bytes;
    /**
     * Bytes that cleaning would free.
     */
    uint64_t disk_dead_bytes;
    /**
     * Cells on disk.
     */
    uint64_t disk_cells;
    /**
     * Wear: bytes of cells that were written for callers, padded to blocks.
     */
    uint64_t disk_appended_bytes;
    /**
     * Wear: bytes of cells that cleaning wrote again.
     */
    uint64_t disk_cleaned_bytes;
    /**
     * Wear: bytes of headers, notes and checkpoints.
     */
    uint64_t disk_overhead_bytes;
    /**
     * Files of cells.
     */
    uint64_t disk_segments;
    /**
     * Syncs of those files.
     */
    uint64_t disk_syncs;
    /**
     * Syncs that failed.
     */
    uint64_t disk_failed_syncs;
    /**
     * Chunks that opening found on disk.
     */
    uint64_t found_chunks;
    /**
     * Their cells.
     */
    uint64_t found_cells;
    /**
     * Cells that were found and of no use.
     */
    uint64_t found_useless_cells;
    /**
     * Chunks that admission let go to disk.
     */
    uint64_t admission_admitted;
    /**
     * Bytes of them.
     */
    uint64_t admission_admitted_bytes;
    /**
     * Chunks that it kept from there, since nothing is admitted.
     */
    uint64_t admission_refused_never;
    /**
     * Since they had too few uses.
     */
    uint64_t admission_refused_hits;
    /**
     * Since the class of their session was too low.
     */
    uint64_t admission_refused_priority;
    /**
     * Since they were too small or too large.
     */
    uint64_t admission_refused_size;
    /**
     * Since the day's writes were used up.
     */
    uint64_t admission_refused_wear;
    /**
     * How files are read and written now, KVT_IO_*; why not in a better way is in
     * kvt_store_metrics.
     */
    uint32_t disk_engine;
    /**
     * 1: past the page cache, 0: through it.
     */
    uint32_t disk_direct;
    /**
     * Cells read from device memory; host_hit_cells does not count them.
     */
    uint64_t device_hit_cells;
    /**
     * Cells that came to device memory.
     */
    uint64_t device_promoted_cells;
    /**
     * Chunks that left device memory for others; they are elsewhere, too.
     */
    uint64_t device_evicted_chunks;
    /**
     * Cells that were forgotten there when the device was lost.
     */
    uint64_t device_lost_cells;
    /**
     * Most bytes of device memory; 0 = there is no device tier.
     */
    uint64_t device_limit_bytes;
    /**
     * Bytes of device memory that are taken.
     */
    uint64_t device_used_bytes;
    /**
     * Cells in device memory.
     */
    uint64_t device_cells;
    /**
     * Bytes of chunks that write-behind has not begun to write (`write=behind`).
     */
    uint64_t unwritten_bytes;
    /**
     * For how long the oldest of those chunks has waited, in nanoseconds.
     */
    uint64_t unwritten_age_ns;
} kvt_store_stats_t;

/**
 * A field of an identity that is the engine's own. Stands in arrays only.
 */
typedef struct kvt_identity_extra_t {
    /**
     * Its tag, 0x80000000 at least; each once.
     */
    uint32_t tag;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Its bytes.
     */
    const void *value;
    /**
     * How many, at most 65536.
     */
    uint64_t value_bytes;
} kvt_identity_extra_t;

/**
 * Everything that makes KV other KV. Fields are bytes, hashed as they are, at
 * most 65536 each. A null field is absent; that differs from an empty one, which
 * has a pointer and no length. docs/keys.md says how the key is made of them.
 */
typedef struct kvt_identity_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Name of the model.
     */
    const void *model;
    /**
     * Its length.
     */
    uint64_t model_bytes;
    /**
     * Fingerprint of its weights.
     */
    const void *weights;
    /**
     * Its length.
     */
    uint64_t weights_bytes;
    /**
     * Adapters that change the KV.
     */
    const void *lora;
    /**
     * Their length.
     */
    uint64_t lora_bytes;
    /**
     * Digest of media that all sequences share.
     */
    const void *media;
    /**
     * Its length.
     */
    uint64_t media_bytes;
    /**
     * What keeps a tenant's KV from others.
     */
    const void *salt;
    /**
     * Its length.
     */
    uint64_t salt_bytes;
    /**
     * Canonical spec of how the KV is computed and stored, if not exactly. Its
     * parameter codec (none, lz4, int8) says how cells are coded on disk.
     */
    const void *recipe;
    /**
     * Its length.
     */
    uint64_t recipe_bytes;
    /**
     * Which part of the KV this rank holds, from 0.
     */
    uint32_t shard_index;
    /**
     * How many parts there are; 0 = all ranks hold the same.
     */
    uint32_t shard_count;
    /**
     * Fields of the engine's own, in any order.
     */
    const struct kvt_identity_extra_t *extra;
    /**
     * How many, at most 64.
     */
    uint64_t extra_count;
    /**
     * sizeof(kvt_identity_extra_t).
     */
    uint64_t extra_stride_bytes;
    /**
     * Whose names its objects have at a remote, which rules of access there may tell apart;
     * 0 = everybody's. No part of the identity: all that open a namespace say the same.
     */
    uint64_t remote_tenant;
} kvt_identity_t;

/**
 * Layers that keep the same, and need the same. Stands in arrays only.
 */
typedef struct kvt_group_t {
    /**
     * KVT_RULE_*: how much of the past its layers need.
     */
    uint32_t rule;
    /**
     * KVT_DTYPE_*.
     */
    uint32_t dtype;
    /**
     * Heads that K and V are divided into; 0 = not said.
     */
    uint32_t kv_heads;
    /**
     * With KVT_RULE_WINDOW: how many tokens.
     */
    uint32_t window_tokens;
    /**
     * Bytes of K a token and layer; of the latent, where there is one.
     */
    uint64_t k_bytes;
    /**
     * Bytes of V a token and layer; 0 = it is in K.
     */
    uint64_t v_bytes;
    /**
     * With KVT_RULE_STATE: bytes of a layer's state; then no K, V or heads.
     */
    uint64_t state_bytes;
    /**
     * Its layers, in any order. Every layer from 0 on is in one group.
     */
    const uint16_t *layers;
    /**
     * How many.
     */
    uint64_t layer_count;
} kvt_group_t;

/**
 * What the KV of a model is made of. It is part of the namespace's key.
 */
typedef struct kvt_layout_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Tokens of a chunk, the unit that is shared, 1 to 32768. A cell, a layer of
     * a chunk, has at most 32 MiB.
     */
    uint32_t chunk_tokens;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Groups of layers, in any order.
     */
    const struct kvt_group_t *groups;
    /**
     * How many, 1 to 64.
     */
    uint64_t group_count;
    /**
     * sizeof(kvt_group_t).
     */
    uint64_t stride_bytes;
} kvt_layout_t;

/**
 * Tokens in a row of which the same can be said. Stands in arrays only.
 */
typedef struct kvt_range_t {
    /**
     * The first one.
     */
    uint64_t first_token;
    /**
     * How many.
     */
    uint64_t tokens;
    /**
     * KVT_RANGE_*.
     */
    uint32_t state;
    /**
     * The farthest tier that something of them is loaded from, KVT_TIER_*; or
     * KVT_TIER_NONE.
     */
    uint32_t tier;
    /**
     * Bytes that are on the device.
     */
    uint64_t device_bytes;
    /**
     * Bytes to be loaded from memory.
     */
    uint64_t host_bytes;
    /**
     * Bytes to be loaded from disk.
     */
    uint64_t disk_bytes;
    /**
     * Bytes to be loaded from elsewhere.
     */
    uint64_t remote_bytes;
    /**
     * Bytes that are on their way into the store, and in no tier yet.
     */
    uint64_t pending_bytes;
    /**
     * How long loading them takes by itself, predicted.
     */
    uint64_t load_ns;
} kvt_range_t;

/**
 * What a lookup has found in all.
 */
typedef struct kvt_lookup_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Tokens that were asked for.
     */
    uint64_t tokens;
    /**
     * The longest prefix that can be gone on from now.
     */
    uint64_t reusable_tokens;
    /**
     * The same, once what is on its way has come.
     */
    uint64_t reusable_soon_tokens;
    /**
     * Bytes that are on the device.
     */
    uint64_t device_bytes;
    /**
     * Bytes to be loaded from memory.
     */
    uint64_t host_bytes;
    /**
     * Bytes to be loaded from disk.
     */
    uint64_t disk_bytes;
    /**
     * Bytes to be loaded from elsewhere.
     */
    uint64_t remote_bytes;
    /**
     * Bytes that are on their way into the store, and in no tier yet.
     */
    uint64_t pending_bytes;
    /**
     * How long loading all that takes, predicted, with what waits before it.
     */
    uint64_t load_ns;
} kvt_lookup_t;

/**
 * What computing costs: n tokens after l tokens of context take
 * n * beta_ns + alpha_ns * (n * l + n * n / 2).
 */
typedef struct kvt_prefill_cost_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Nanoseconds a token and token of context.
     */
    double alpha_ns;
    /**
     * Nanoseconds a token.
     */
    double beta_ns;
    /**
     * Out: how often kvt_namespace_observe_prefill told something.
     */
    uint64_t observed;
    /**
     * Out: 1 when the cost was fixed.
     */
    uint32_t fixed;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_prefill_cost_t;

/**
 * Something that changed. Stands in arrays only.
 */
typedef struct kvt_store_event_t {
    /**
     * Its number: each has the one after that of the event before it.
     */
    uint64_t number;
    /**
     * When, CLOCK_MONOTONIC.
     */
    uint64_t at_ns;
    /**
     * KVT_STORE_EVENT_STORED, KVT_STORE_EVENT_REMOVED or KVT_STORE_EVENT_CLEARED. There may be others
     * one day: pass them by.
     */
    uint32_t kind;
    /**
     * Which tier, KVT_TIER_*; 0 with KVT_STORE_EVENT_CLEARED.
     */
    uint32_t tier;
    /**
     * Tokens of the chunk.
     */
    uint32_t tokens;
    /**
     * Which chunk of its sequence it is, from 0.
     */
    uint32_t position;
    /**
     * Its key.
     */
    uint8_t key[32];
    /**
     * The key before it in its sequence: the namespace's for the first.
     */
    uint8_t parent[32];
    /**
     * The namespace's key.
     */
    uint8_t namespace_key[32];
} kvt_store_event_t;

/**
 * An eviction in the log. Stands in arrays only.
 */
typedef struct kvt_policy_log_entry_t {
    /**
     * Counts evictions from 1; a gap means that entries were overwritten.
     */
    uint64_t number;
    /**
     * When, by the caller's clock.
     */
    int64_t at_ns;
    /**
     * Who.
     */
    uint64_t id;
    /**
     * Its session; meaningful when `has_session` is not 0.
     */
    uint64_t session;
    /**
     * When it was used last, as far as the policy noted.
     */
    int64_t stamp_ns;
    /**
     * Why: what counted in the policy's order, the less the earlier.
     */
    double score;
    /**
     * What was freed.
     */
    uint32_t units;
    /**
     * Uses since it was inserted.
     */
    uint32_t hits;
    /**
     * Which of the policy's queues it came from.
     */
    uint32_t queue;
    /**
     * Not 0: `session` is known.
     */
    uint32_t has_session;
    /**
     * The policy that decided: its index for kvt_policy_info.
     */
    uint32_t policy;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_policy_log_entry_t;

/**
 * What a tenant has moved. Stands in arrays only.
 */
typedef struct kvt_tenant_t {
    /**
     * Its number (kvt_session_opts_t.tenant).
     */
    uint32_t tenant;
    /**
     * 1: all tenants together that are not told apart; 1,024 are.
     */
    uint32_t is_rest;
    /**
     * Bytes it has stored.
     */
    uint64_t put_bytes;
    /**
     * Bytes it was given back.
     */
    uint64_t got_bytes;
    /**
     * Cells it has asked for, and got.
     */
    uint64_t hit_cells;
    /**
     * Cells it has asked for that were nowhere.
     */
    uint64_t missed_cells;
} kvt_tenant_t;

/**
 * How long one kind of thing took. Stands in arrays only.
 */
typedef struct kvt_latency_t {
    /**
     * KVT_TIMED_*.
     */
    uint32_t kind;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * How many were timed since the store was opened.
     */
    uint64_t count;
    /**
     * The mean, in nanoseconds.
     */
    uint64_t mean_ns;
    /**
     * What half of them did not exceed, to a fourth.
     */
    uint64_t p50_ns;
    /**
     * The same of 99 in 100.
     */
    uint64_t p99_ns;
    /**
     * The longest.
     */
    uint64_t max_ns;
} kvt_latency_t;

/**
 * What a store counts of its remote since it was opened, and how that is now.
 */
typedef struct kvt_remote_stats_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_REMOTE_*: how it is to fetch from, and to ask; 0 = the store has no remote.
     */
    uint32_t reads;
    /**
     * KVT_REMOTE_*: how it is to send to.
     */
    uint32_t writes;
    /**
     * Times that a way to it was given up for a while.
     */
    uint64_t left_alone;
    /**
     * Names that were asked for.
     */
    uint64_t asked_names;
    /**
     * Of those, names that were there.
     */
    uint64_t found_names;
    /**
     * Names that were known to be there without asking.
     */
    uint64_t remembered_names;
    /**
     * Objects that came.
     */
    uint64_t fetched_objects;
    /**
     * Cells that came and were right.
     */
    uint64_t fetched_cells;
    /**
     * Bytes of those.
     */
    uint64_t fetched_bytes;
    /**
     * Bytes that came and were not wanted.
     */
    uint64_t wasted_bytes;
    /**
     * Objects that were said to be there and were not.
     */
    uint64_t absent_objects;
    /**
     * Objects, or cells of them, that were not what they should be.
     */
    uint64_t corrupt_objects;
    /**
     * Requests that were not answered in time, or not at all.
     */
    uint64_t late_requests;
    /**
     * Objects that were not fetched, because the remote was left alone.
     */
    uint64_t avoided_objects;
    /**
     * Objects that were sent.
     */
    uint64_t sent_objects;
    /**
     * Their bytes.
     */
    uint64_t sent_bytes;
    /**
     * Objects that somebody else had sent before.
     */
    uint64_t known_objects;
    /**
     * Objects that could not be sent.
     */
    uint64_t failed_sends;
    /**
     * Chunks that were not sent: not admitted, or too many waited.
     */
    uint64_t refused_chunks;
    /**
     * Objects that were taken away there: damaged ones, and what was dropped.
     */
    uint64_t removed_objects;
} kvt_remote_stats_t;

/**
 * Who asks. All of it is optional.
 */
typedef struct kvt_session_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_SESSION_*.
     */
    uint64_t flags;
    /**
     * What it is called, UTF-8, at most 256 bytes.
     */
    const char *name;
    /**
     * Length of the name.
     */
    uint64_t name_bytes;
    /**
     * Its tenant.
     */
    uint32_t tenant;
    /**
     * Its class, at most 255: 0 leaves first; needs KVT_SESSION_PRIORITY.
     */
    uint32_t priority;
    /**
     * Most tokens it can have; 0 = not known.
     */
    uint32_t max_tokens;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_session_opts_t;

/**
 * What the engine says of the future of objects.
 */
typedef struct kvt_policy_hint_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_HINT_*.
     */
    uint64_t flags;
    /**
     * When they are used next, by the clock of now_ns; 0 = not said.
     */
    int64_t next_use_ns;
    /**
     * How sure that is, 0 to 1.
     */
    double confidence;
    /**
     * KVT_STOP_*: why the request that used them stopped.
     */
    uint32_t stop;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_policy_hint_t;

/**
 * How far a session is.
 */
typedef struct kvt_session_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Its tokens.
     */
    uint64_t tokens;
    /**
     * Chunks that they fill.
     */
    uint64_t full_chunks;
    /**
     * Tokens of a chunk.
     */
    uint32_t chunk_tokens;
    /**
     * Layers of a chunk.
     */
    uint32_t layers;
} kvt_session_info_t;

/**
 * Where the engine has one plane (K or V) of one layer, from the first token of
 * a move on: the bytes of a head and token lie together, tokens and heads each at
 * equal distances. Either at one address, or in pages. Stands in arrays only. All
 * zero = there is no such plane.
 */
typedef struct kvt_view_t {
    /**
     * Where the first token is; null with pages.
     */
    void *address;
    /**
     * Where each page starts; null with an address.
     */
    void *const *pages;
    /**
     * How many pages.
     */
    uint64_t page_count;
    /**
     * Added to the address of each page: one table serves K, V and all layers.
     */
    int64_t shift_bytes;
    /**
     * Tokens of a page.
     */
    uint32_t page_tokens;
    /**
     * Tokens of the view (of a layer with a state: chunks); 0 = as many as the move
     * says, or as the pages hold. A move to the end of a session says none.
     */
    uint32_t tokens;
    /**
     * Heads of a token; 0 = 1.
     */
    uint32_t heads;
    /**
     * KVT_MEMORY_*.
     */
    uint32_t memory;
    /**
     * Bytes of a head and token. All heads together have what the layout says.
     */
    uint64_t run_bytes;
    /**
     * From a token to the next; 0 = heads * run_bytes.
     */
    uint64_t token_stride_bytes;
    /**
     * From a head to the next; 0 = run_bytes.
     */
    uint64_t head_stride_bytes;
} kvt_view_t;

/**
 * A transfer of a session: tokens by layers, and where the engine has them.
 */
typedef struct kvt_transfer_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_TRANSFER_*.
     */
    uint64_t flags;
    /**
     * The first token, a multiple of a chunk's tokens.
     */
    uint64_t first_token;
    /**
     * How many; up to a multiple, or to the end of the session. 0 = to the end that it has
     * when this is submitted: views say then how many tokens they have.
     */
    uint64_t tokens;
    /**
     * The first layer.
     */
    uint32_t first_layer;
    /**
     * How many; 0 = all from the first on.
     */
    uint32_t layers;
    /**
     * K (or the latent, or the states) of each layer; null for a prefetch.
     */
    const struct kvt_view_t *k;
    /**
     * V of each layer; null when the layout has none in these layers. A layer
     * without V has an entry that is all zero.
     */
    const struct kvt_view_t *v;
    /**
     * sizeof(kvt_view_t).
     */
    uint64_t stride_bytes;
    /**
     * KVT_LEVEL_*, for puts alone.
     */
    uint32_t level;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Nothing of the move is begun before this event has come: sources are complete
     * then, targets in use by nobody. Null = now. The handle may be closed once it was
     * signalled. Prefetch before, if what comes from disk is to come meanwhile.
     */
    const struct kvt_ready_event_t *ready;
    /**
     * Of a get or a prefetch: the chunks that are wanted, 0 = the one of first_token,
     * ascending; copied. Views have their tokens one after the other, and no others. Null =
     * all. What a sparse policy selects is got so.
     */
    const uint32_t *chunks;
    /**
     * How many.
     */
    uint64_t chunk_count;
    /**
     * An event of the store's device (kvt_device_copy, kvt_device_launch, kvt_device_import_event,
     * kvt_device_create_event); 0 = none. No copy between the tensors and the store runs before it
     * has come: they are put behind it on the device, and no thread waits. What they need from
     * disk comes meanwhile. It stays yours, several moves may name it, and it is not to be
     * released before the last of their ops was. One that fails, or is released before it was
     * seen to come, fails the move with that: tensors are as they were where nothing came.
     * With `ready` both have to come. Not for prefetches.
     */
    uint64_t after;
} kvt_transfer_t;

/**
 * How the engine will run. Zero is the default everywhere.
 */
typedef struct kvt_plan_terms_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_PLAN_NO_OVERLAP, KVT_PLAN_NO_WAIT, KVT_PLAN_COST.
     */
    uint64_t flags;
    /**
     * With KVT_PLAN_COST: nanoseconds a token and token of context. Without it plans
     * go by kvt_namespace_prefill_cost.
     */
    double alpha_ns;
    /**
     * With KVT_PLAN_COST: nanoseconds a token.
     */
    double beta_ns;
    /**
     * KVT_PRIORITY_* of the loads.
     */
    uint32_t priority;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_plan_terms_t;

/**
 * Tokens in a row with which the same is to be done. Stands in arrays only.
 */
typedef struct kvt_plan_step_t {
    /**
     * The first one.
     */
    uint64_t first_token;
    /**
     * How many.
     */
    uint64_t tokens;
    /**
     * KVT_PLAN_RESIDENT, KVT_PLAN_LOAD or KVT_PLAN_RECOMPUTE.
     */
    uint32_t kind;
    /**
     * The farthest tier that something of them is loaded from, KVT_TIER_*; or
     * KVT_TIER_NONE.
     */
    uint32_t tier;
    /**
     * Bytes to be loaded from memory.
     */
    uint64_t host_bytes;
    /**
     * Bytes to be loaded from disk.
     */
    uint64_t disk_bytes;
    /**
     * Bytes to be loaded from elsewhere.
     */
    uint64_t remote_bytes;
    /**
     * How long this takes by itself, predicted.
     */
    uint64_t predicted_ns;
    /**
     * Bytes to be copied from the device tier, on the device.
     */
    uint64_t device_bytes;
} kvt_plan_step_t;

/**
 * What a plan comes to.
 */
typedef struct kvt_plan_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * All tokens of the session.
     */
    uint64_t tokens;
    /**
     * Tokens with which nothing is to be done.
     */
    uint64_t resident_tokens;
    /**
     * Tokens to be loaded.
     */
    uint64_t load_tokens;
    /**
     * Tokens to be computed.
     */
    uint64_t recompute_tokens;
    /**
     * Until all is there, predicted, with what waits before it.
     */
    uint64_t total_ns;
    /**
     * Of that, loading alone.
     */
    uint64_t load_ns;
    /**
     * Of that, computing alone.
     */
    uint64_t compute_ns;
    /**
     * What computing all of it would take.
     */
    uint64_t without_ns;
} kvt_plan_t;

/**
 * An image or a sound in a sequence. Stands in arrays only.
 */
typedef struct kvt_media_t {
    /**
     * Its first token, as an index into the sequence's tokens.
     */
    uint64_t token;
    /**
     * What it is: 32 bytes of a hash of at least 256 bits, never shortened.
     */
    uint8_t digest[32];
} kvt_media_t;

/**
 * Tokens, and the media that start in them.
 */
typedef struct kvt_sequence_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * The tokens.
     */
    const uint32_t *tokens;
    /**
     * How many, at most 2^27.
     */
    uint64_t token_count;
    /**
     * The media, ascending by their tokens, one at each.
     */
    const struct kvt_media_t *media;
    /**
     * How many, at most 2^24.
     */
    uint64_t media_count;
    /**
     * sizeof(kvt_media_t).
     */
    uint64_t media_stride_bytes;
} kvt_sequence_t;

/**
 * What an engine calls its blocks: any bytes, one name after the other. Equal names
 * are equal content: its own hashes, say, of all that the content depends on and the
 * namespace's identity does not say.
 */
typedef struct kvt_block_names_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * The names, without gaps.
     */
    const uint8_t *bytes;
    /**
     * Where each ends, from `bytes` on, ascending; null = all have each_bytes bytes.
     */
    const uint64_t *ends;
    /**
     * Bytes of a name, 1 to 65536; 0 with ends.
     */
    uint64_t each_bytes;
    /**
     * How many; at most 2^22, and 65536 for a move or to locate them.
     */
    uint64_t count;
} kvt_block_names_t;

/**
 * Blocks, and where the engine has them.
 */
typedef struct kvt_blocks_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Always 0.
     */
    uint64_t flags;
    /**
     * What they are called.
     */
    const struct kvt_block_names_t *names;
    /**
     * The first layer.
     */
    uint32_t first_layer;
    /**
     * How many; 0 = all from the first on.
     */
    uint32_t layers;
    /**
     * K (or the latent, or the states) of each layer: the tokens of all blocks, in the
     * order of their names. Pages with the tokens of a chunk each give every block its own
     * address. Null for a prefetch.
     */
    const struct kvt_view_t *k;
    /**
     * V of each layer; null when the layout has none in these layers. A layer
     * without V has an entry that is all zero.
     */
    const struct kvt_view_t *v;
    /**
     * sizeof(kvt_view_t).
     */
    uint64_t stride_bytes;
    /**
     * KVT_LEVEL_*, for puts alone.
     */
    uint32_t level;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * See kvt_transfer_t.
     */
    const struct kvt_ready_event_t *ready;
    /**
     * See kvt_transfer_t.
     */
    uint64_t after;
} kvt_blocks_t;

/**
 * What became of chunks that were to go.
 */
typedef struct kvt_clear_report_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Chunks that are in no tier any more.
     */
    uint64_t removed_chunks;
    /**
     * Chunks that stay: sessions, moves or pins hold them, or others that stay
     * continue them.
     */
    uint64_t referenced_chunks;
    /**
     * Chunks that stay, since they were on their way between tiers: call again.
     */
    uint64_t transferring_chunks;
} kvt_clear_report_t;

/**
 * What becomes of chunks in memory that are to go down.
 */
typedef struct kvt_demote_report_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Chunks that were on disk, too: their memory is given back.
     */
    uint64_t freed_chunks;
    /**
     * Chunks whose memory is given back as soon as they are on disk.
     */
    uint64_t pending_chunks;
    /**
     * Chunks that stay: there is no disk.
     */
    uint64_t kept_chunks;
} kvt_demote_report_t;

/**
 * Candidates as columns: one array a fact, each with `rows` entries. Null = the
 * default holds for every row. Arrays are aligned as C has them.
 */
typedef struct kvt_policy_columns_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * How many candidates there are, at most 2^28.
     */
    uint64_t rows;
    /**
     * Who; required.
     */
    const uint64_t *ids;
    /**
     * Blocks that each holds; default 1.
     */
    const uint64_t *blocks;
    /**
     * When it was made; default 0.
     */
    const int64_t *created_ns;
    /**
     * When it was used last; default: when it was made.
     */
    const int64_t *last_access_ns;
    /**
     * How often it was used; default 1.
     */
    const uint64_t *count;
    /**
     * Its class, 0 leaves first; default 1.
     */
    const uint8_t *priority;
    /**
     * Not 0: stays.
     */
    const uint8_t *pinned;
    /**
     * Time until its next use or its end, below 0 = unknown; default unknown.
     */
    const int64_t *lifetime_ns;
    /**
     * How sure that is, 0 to 1; default 1.
     */
    const float *confidence;
    /**
     * Tokens it has; default 0.
     */
    const uint64_t *length;
    /**
     * Tokens it can have; default unknown.
     */
    const uint64_t *max_length;
    /**
     * Who holds it: above 1 it is shared and stays; default 1.
     */
    const uint32_t *refs;
    /**
     * Whose it is; default 0.
     */
    const uint32_t *tenant;
    /**
     * Recompute cost; default: from context and tokens.
     */
    const double *cost;
    /**
     * Tokens before it; default 0.
     */
    const uint64_t *context;
    /**
     * Tokens in it; default: its length.
     */
    const uint64_t *tokens;
    /**
     * Its layer; default 0.
     */
    const uint32_t *layer;
    /**
     * Layers of the model, for candidates that are cells; default 0.
     */
    const uint32_t *layers;
    /**
     * Which chunk of its sequence it is; default 0.
     */
    const uint32_t *chunk;
    /**
     * Chunks of its sequence; default 0.
     */
    const uint32_t *chunks;
    /**
     * Where the blocks of each row start in `block_ids`, and the end of the last:
     * rows + 1 entries. Null: blocks are only counted.
     */
    const uint64_t *block_offsets;
    /**
     * The blocks of all rows, each row's in the order of its tokens. One that
     * several rows list is shared: it counts once, and is free when all who hold
     * it have left.
     */
    const uint64_t *block_ids;
    /**
     * Who holds each of `block_ids`, in all; 0, and null: the rows that list it.
     */
    const uint32_t *block_refs;
    /**
     * Entries of block_ids, and of block_refs.
     */
    uint64_t block_entries;
} kvt_policy_columns_t;

/**
 * Scores candidates for the policy "custom": one number a row into
 * `out_scores`, the least leaves first, NaN is an error. Anything but KVT_OK
 * ends the call that asked, with that status and without any effect. Columns
 * and scores are borrowed for the call. Called on the thread that evicts or
 * selects, under no lock, so from several at once if several do; it may use the
 * policy. It must not unwind.
 */
typedef kvt_status_t (*kvt_policy_score_fn)(void *user_data,
                                            const struct kvt_policy_columns_t *columns,
                                            int64_t now_ns,
                                            double *out_scores);

/**
 * The callback table of the policy "custom".
 */
typedef struct kvt_policy_custom_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Scores candidates.
     */
    kvt_policy_score_fn score;
    /**
     * Handed to score; taken over on success only.
     */
    void *user_data;
    /**
     * Releases user_data; may be null.
     */
    kvt_destroy_fn destroy;
} kvt_policy_custom_t;

/**
 * Says when a sequence is used next or ends: seconds from now and how sure
 * that is (0 to 1). Returns 1, or 0 when it does not know; what is no number or
 * out of range counts as that. Called as kvt_policy_score_fn is: in lookups and
 * records with a session (that is the sequence), where the answer acts as a
 * hint, and in selections for rows without a lifetime (the sequence is the id).
 */
typedef uint32_t (*kvt_policy_predict_fn)(void *user_data,
                                          uint64_t sequence,
                                          uint64_t length,
                                          uint64_t max_length,
                                          double *out_seconds,
                                          double *out_confidence);

/**
 * The engine's own predictor of lifetimes.
 */
typedef struct kvt_policy_predictor_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Says when a sequence is used next.
     */
    kvt_policy_predict_fn predict;
    /**
     * Handed to predict; taken over on success only.
     */
    void *user_data;
    /**
     * Releases user_data; may be null.
     */
    kvt_destroy_fn destroy;
} kvt_policy_predictor_t;

/**
 * How to open a policy.
 */
typedef struct kvt_policy_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_POLICY_*.
     */
    uint64_t flags;
    /**
     * The spec, such as "arc" or "qos(inner=s3fifo)"; null = "lru".
     */
    const char *spec;
    /**
     * Length of the spec.
     */
    uint64_t spec_bytes;
    /**
     * Most objects at once; 0 = 1048576, at most 2^28.
     */
    uint64_t max_objects;
    /**
     * What fits, in units; 0 = not known.
     */
    uint64_t capacity_units;
    /**
     * Evictions that the log keeps; 0 = none, at most 2^20.
     */
    uint64_t log_entries;
    /**
     * Evicted ids that are remembered, to tell what is computed again; 0 =
     * 1048576.
     */
    uint64_t remember;
    /**
     * Recompute cost of n tokens after l tokens of context: n * beta +
     * alpha * (n * l + n * n / 2). 0 = as for a model of the 70B class.
     */
    double alpha;
    /**
     * See alpha.
     */
    double beta;
    /**
     * Scores for the spec "custom", which needs them; else may be null.
     */
    const struct kvt_policy_custom_t *custom;
    /**
     * The engine's predictor; may be null.
     */
    const struct kvt_policy_predictor_t *predictor;
} kvt_policy_opts_t;

/**
 * A policy that can be opened. Texts are UTF-8, not NUL-terminated, and live as
 * long as the library.
 */
typedef struct kvt_policy_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Its name in specs.
     */
    const char *name;
    /**
     * Length of the name.
     */
    uint64_t name_bytes;
    /**
     * What it does, in a line.
     */
    const char *about;
    /**
     * Length of that line.
     */
    uint64_t about_bytes;
} kvt_policy_info_t;

/**
 * Who asks. All of it is optional.
 */
typedef struct kvt_policy_context_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_CONTEXT_*.
     */
    uint64_t flags;
    /**
     * The session: the caller's number for a sequence.
     */
    uint64_t session;
    /**
     * Its tenant. Kept with the session: without KVT_CONTEXT_SESSION it must be 0.
     */
    uint32_t tenant;
    /**
     * Its class, at most 255: 0 leaves first; without KVT_CONTEXT_PRIORITY as before,
     * at first 1. KVT_CONTEXT_PRIORITY needs KVT_CONTEXT_SESSION too.
     */
    uint32_t priority;
    /**
     * Tokens of the whole request; 0 = tokens_each for each id.
     */
    uint32_t length;
    /**
     * Tokens it can have; 0 = unknown.
     */
    uint32_t max_length;
    /**
     * Tokens of one object of its path, the last may have fewer; 0 = 1.
     */
    uint32_t tokens_each;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_policy_context_t;

/**
 * An object to be inserted. Stands in arrays only.
 */
typedef struct kvt_policy_object_t {
    /**
     * The caller's number for it.
     */
    uint64_t id;
    /**
     * The object that it continues, with KVT_OBJECT_HAS_PARENT; one that is not there
     * counts as none.
     */
    uint64_t parent;
    /**
     * Its size, 1 to 2^32 - 1.
     */
    uint64_t units;
    /**
     * KVT_ROW_*.
     */
    uint64_t flags;
    /**
     * When it is used next, as the caller expects; 0 = unknown.
     */
    int64_t next_use_ns;
    /**
     * Recompute cost; 0 = from the tokens.
     */
    double cost;
    /**
     * Tokens before it.
     */
    uint32_t context;
    /**
     * Tokens in it.
     */
    uint32_t tokens;
    /**
     * Its layer, when objects are cells.
     */
    uint32_t layer;
    /**
     * Layers of the model; 0 = an object has all.
     */
    uint32_t layers;
    /**
     * Which chunk of its sequence it is.
     */
    uint32_t chunk;
    /**
     * Chunks of that sequence.
     */
    uint32_t chunks;
} kvt_policy_object_t;

/**
 * One that leaves. Stands in arrays only.
 */
typedef struct kvt_policy_victim_t {
    /**
     * Who.
     */
    uint64_t id;
    /**
     * What it frees.
     */
    uint64_t units;
} kvt_policy_victim_t;

/**
 * What an eviction came to. The text lives as long as the library.
 */
typedef struct kvt_policy_outcome_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * How many leave.
     */
    uint64_t victims;
    /**
     * What they free.
     */
    uint64_t freed_units;
    /**
     * What is missing to what was asked.
     */
    uint64_t shortfall_units;
    /**
     * How long it took to choose; 0 = not timed (one in 16 is).
     */
    uint64_t decision_ns;
    /**
     * The policy that decided, which may be another than the one that was opened.
     */
    const char *decided_by;
    /**
     * Length of that name.
     */
    uint64_t decided_by_bytes;
} kvt_policy_outcome_t;

/**
 * A candidate that was chosen. Stands in arrays only.
 */
typedef struct kvt_policy_pick_t {
    /**
     * Its row.
     */
    uint64_t row;
    /**
     * Who.
     */
    uint64_t id;
    /**
     * Blocks that are free by it.
     */
    uint64_t freed_blocks;
    /**
     * Of its blocks it keeps so many, the first ones; 0 = it leaves.
     */
    uint64_t kept_blocks;
    /**
     * Where its freed blocks start in the selection's block_ids.
     */
    uint64_t first_block;
} kvt_policy_pick_t;

/**
 * What was chosen: the caller's arrays, and what the library says. Start it with
 * KVT_POLICY_SELECTION_INIT and set the arrays.
 */
typedef struct kvt_policy_selection_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * In: receives who was chosen, in the order of leaving.
     */
    struct kvt_policy_pick_t *victims;
    /**
     * In: room there; as many as there are rows is always enough.
     */
    uint64_t victim_capacity;
    /**
     * In: sizeof(kvt_policy_pick_t).
     */
    uint64_t stride_bytes;
    /**
     * In: receives the blocks that are free, by victim, where the columns list
     * blocks; may be null.
     */
    uint64_t *block_ids;
    /**
     * In: room there.
     */
    uint64_t block_capacity;
    /**
     * How many were chosen; the number needed with KVT_E_TOO_SMALL.
     */
    uint64_t victim_count;
    /**
     * How many block_ids there are; the number needed with KVT_E_TOO_SMALL.
     */
    uint64_t block_count;
    /**
     * How many blocks are free.
     */
    uint64_t freed_blocks;
    /**
     * What is missing to what was asked.
     */
    uint64_t shortfall_blocks;
    /**
     * How long it took to choose.
     */
    uint64_t decision_ns;
    /**
     * The policy that decided, which may be another than the one that was
     * opened. The text lives as long as the library.
     */
    const char *decided_by;
    /**
     * Length of that name.
     */
    uint64_t decided_by_bytes;
} kvt_policy_selection_t;

/**
 * What a policy has counted.
 */
typedef struct kvt_policy_stats_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Objects in the table.
     */
    uint64_t objects;
    /**
     * Most there can be.
     */
    uint64_t max_objects;
    /**
     * The sum of their sizes.
     */
    uint64_t units;
    /**
     * What fits; 0 = not known.
     */
    uint64_t capacity_units;
    /**
     * Sessions that are known.
     */
    uint64_t sessions;
    /**
     * Tenants that are told apart.
     */
    uint64_t tenants;
    /**
     * Lookups.
     */
    uint64_t requests;
    /**
     * Objects that they asked for.
     */
    uint64_t references;
    /**
     * Of those, found and usable.
     */
    uint64_t hits;
    /**
     * Of those, evicted before and not there: to be computed again.
     */
    uint64_t evicted_references;
    /**
     * Tokens asked for.
     */
    uint64_t tokens;
    /**
     * Tokens found.
     */
    uint64_t hit_tokens;
    /**
     * Recompute cost of what was asked for.
     */
    double cost;
    /**
     * Recompute cost of what was found.
     */
    double hit_cost;
    /**
     * Objects inserted.
     */
    uint64_t inserts;
    /**
     * Objects evicted.
     */
    uint64_t evictions;
    /**
     * Units they had.
     */
    uint64_t evicted_units;
    /**
     * Calls that asked for victims, selections included.
     */
    uint64_t decisions;
    /**
     * Calls that freed less than asked.
     */
    uint64_t shortfalls;
    /**
     * Decisions that were timed: every selection, one eviction in 16.
     */
    uint64_t decisions_timed;
    /**
     * Half of those took no longer.
     */
    uint64_t decision_p50_ns;
    /**
     * 99 of 100 took no longer.
     */
    uint64_t decision_p99_ns;
    /**
     * The longest.
     */
    uint64_t decision_max_ns;
    /**
     * The mean.
     */
    uint64_t decision_mean_ns;
    /**
     * hits / references; this and the ratios below are 0 of nothing.
     */
    double hit_ratio;
    /**
     * hit_tokens / tokens.
     */
    double token_hit_ratio;
    /**
     * hit_cost / cost.
     */
    double cost_hit_ratio;
    /**
     * evicted_references / references.
     */
    double re_prefill_rate;
    /**
     * Jain's index over sessions of tokens found in parts of those that an unbounded
     * cache would have found: 1 when all fare alike, 1/n when one has everything.
     */
    double jain_sessions;
    /**
     * The same over tenants.
     */
    double jain_tenants;
    /**
     * Metadata of the table for each object when it is full.
     */
    double bytes_per_object;
    /**
     * The number that the next eviction has in the log.
     */
    uint64_t next_log_number;
    /**
     * The policy's name. The text lives as long as the library.
     */
    const char *name;
    /**
     * Length of that name.
     */
    uint64_t name_bytes;
} kvt_policy_stats_t;

/**
 * What a scheduler is advised.
 */
typedef struct kvt_policy_advice_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * The batch to run.
     */
    uint64_t batch;
    /**
     * Re-prefill rate of the last full window.
     */
    double re_prefill_rate;
    /**
     * Evictions in it.
     */
    uint64_t evictions;
} kvt_policy_advice_t;

/**
 * What advice goes by.
 */
typedef struct kvt_policy_advice_rules_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_ADVICE_*.
     */
    uint64_t flags;
    /**
     * Above this share of references computed again, batches are halved; 0 = 0.3.
     */
    double shrink_above;
    /**
     * Below this many evictions in a window, batches are doubled; 0 = 10.
     */
    uint64_t grow_below;
    /**
     * Smallest batch; 0 = 1.
     */
    uint64_t min_batch;
    /**
     * Largest batch; 0 = 128.
     */
    uint64_t max_batch;
    /**
     * Lookups that make a window; 0 = 100.
     */
    uint64_t window;
    /**
     * Windows in a row that must agree; 0 = 2.
     */
    uint64_t patience;
} kvt_policy_advice_rules_t;

/**
 * What a model's attention is.
 */
typedef struct kvt_attention_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Layers, at most 2,048.
     */
    uint32_t layers;
    /**
     * Heads of queries, at most 1,024.
     */
    uint32_t query_heads;
    /**
     * Heads of keys; groups of query heads share one.
     */
    uint32_t key_heads;
    /**
     * Numbers of a query's and a key's head, at most 2,048.
     */
    uint32_t key_dim;
    /**
     * Numbers of a value's head.
     */
    uint32_t value_dim;
    /**
     * KVT_ATTENTION_*.
     */
    uint32_t kind;
    /**
     * Tokens of a block, which is loaded or moved as a whole: those of a chunk.
     */
    uint32_t block_tokens;
    /**
     * Most tokens of a sequence.
     */
    uint32_t max_tokens;
    /**
     * What products of queries and keys are multiplied with; 0 = 1 / sqrt(key_dim).
     */
    float scale;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_attention_t;

/**
 * What a policy is like: enough to serve any without knowing its name.
 */
typedef struct kvt_sparse_traits_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_SPARSE_* of what it can do. What it cannot do it refuses.
     */
    uint32_t caps;
    /**
     * KVT_NEEDS_*: what it has to be told. Being told more is fine.
     */
    uint32_t needs;
    /**
     * KVT_SCOPE_*: for whom an answer is.
     */
    uint32_t scope;
    /**
     * KVT_GRANULARITY_*: what it names.
     */
    uint32_t granularity;
    /**
     * KVT_SPARSE_RAGGED and others.
     */
    uint64_t flags;
    /**
     * So many first layers are not restricted.
     */
    uint32_t dense_layers;
    /**
     * Sums of attention are wanted of so many last queries; UINT32_MAX = of all, 0 = none.
     */
    uint32_t sum_queries;
    /**
     * Queries that it selects by are of so many layers before; 0 = the layer's own.
     */
    uint32_t ahead;
    /**
     * Heads of its own queries, where they are not the model's; else 0.
     */
    uint32_t own_query_heads;
    /**
     * Heads of its own keys, likewise.
     */
    uint32_t own_key_heads;
    /**
     * Numbers of a head of both.
     */
    uint32_t own_dim;
} kvt_sparse_traits_t;

/**
 * Queries, keys or values that the library reads during a call: a view, and what its
 * numbers are.
 */
typedef struct kvt_rows_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Where they are; heads and the bytes of one say what a row is. In host memory.
     */
    struct kvt_view_t view;
    /**
     * KVT_DTYPE_*: f32, f16, bf16 or int8.
     */
    uint32_t dtype;
    /**
     * KVT_SCALES_*, for int8.
     */
    uint32_t scaling;
    /**
     * The scales; null without.
     */
    const float *scales;
    /**
     * How many.
     */
    uint64_t scale_count;
} kvt_rows_t;

/**
 * A block of a layer is about to be moved away; `keys` are its `keys->view.tokens` valid
 * tokens. All callbacks: anything but KVT_OK ends the call that led here, with that status.
 * What they are handed is borrowed for the call. They must not unwind, and calls on the same
 * policy from inside are refused with KVT_E_BUSY, on the same offload with KVT_E_REENTRANT.
 */
typedef kvt_status_t (*kvt_on_prefill_offload_fn)(void *user_data,
                                                  uint32_t block,
                                                  uint32_t layer,
                                                  uint32_t first,
                                                  const struct kvt_rows_t *keys);

/**
 * A block that was written token by token is complete: `keys` are those of all layers, each
 * `keys->struct_size` bytes behind the one before.
 */
typedef kvt_status_t (*kvt_on_decode_offload_fn)(void *user_data,
                                                 uint32_t block,
                                                 uint32_t first,
                                                 const struct kvt_rows_t *keys,
                                                 uint32_t layers);

/**
 * Where in a sequence a question is asked.
 */
typedef struct kvt_sparse_context_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * 1 = the prompt is being computed; 0 = text is written.
     */
    uint32_t is_prefill;
    /**
     * Which part of the prompt it is, where it is computed in parts.
     */
    uint32_t part;
    /**
     * How many parts; 0 = 1.
     */
    uint32_t parts;
    /**
     * The position of the first query.
     */
    uint32_t first_query;
    /**
     * Tokens that the sequence has, with those of the queries.
     */
    uint32_t tokens;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_sparse_context_t;

/**
 * Chooses among blocks, for `query`: writes ids, each a candidate and each once, to `ids`,
 * which has room for all of them, and their number to `out_count`. Any order.
 */
typedef kvt_status_t (*kvt_select_blocks_fn)(void *user_data,
                                             uint32_t layer,
                                             const struct kvt_rows_t *query,
                                             const uint32_t *candidates,
                                             uint64_t candidate_count,
                                             const struct kvt_sparse_context_t *context,
                                             uint32_t *ids,
                                             uint64_t *out_count);

/**
 * How the lists of a head are meant. Heads may share lists. Stands in arrays only.
 */
typedef struct kvt_index_head_t {
    /**
     * KVT_INDEX_*.
     */
    uint32_t kind;
    /**
     * The first of its lists.
     */
    uint32_t first;
    /**
     * How many lists it has.
     */
    uint32_t lists;
    /**
     * Blocks and ranges: queries of a row, counted from the first that is computed; 0 = all
     * of them are one row.
     */
    uint32_t query_block;
    /**
     * Blocks: keys of a block.
     */
    uint32_t key_block;
    /**
     * Queries at this position and behind it see all keys, whatever lists say; UINT32_MAX =
     * none does.
     */
    uint32_t dense_from;
} kvt_index_head_t;

/**
 * Which keys queries are computed with: by policies, or by the engine. No query sees keys
 * behind it. No head = all keys; one = for all heads; else one for each query head (an
 * engine may also say it for each head of keys). Numbers of lists ascend, each once.
 */
typedef struct kvt_index_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * How lists are meant.
     */
    struct kvt_index_head_t *heads;
    /**
     * Room there, when an answer is wanted.
     */
    uint64_t head_capacity;
    /**
     * How many there are; the number needed with KVT_E_TOO_SMALL.
     */
    uint64_t head_count;
    /**
     * Where each list begins in `items`, and where the last ends.
     */
    uint32_t *starts;
    /**
     * Room there.
     */
    uint64_t start_capacity;
    /**
     * How many there are.
     */
    uint64_t start_count;
    /**
     * What is in lists.
     */
    uint32_t *items;
    /**
     * Room there.
     */
    uint64_t item_capacity;
    /**
     * How many there are.
     */
    uint64_t item_count;
} kvt_index_t;

/**
 * Says which keys queries are computed with: points the arrays of `out` at memory of its own,
 * which stays until the next call, and sets their counts. `keys` is null where there are none.
 */
typedef kvt_status_t (*kvt_sparse_index_fn)(void *user_data,
                                            uint32_t layer,
                                            const struct kvt_rows_t *queries,
                                            const struct kvt_rows_t *keys,
                                            const struct kvt_sparse_context_t *context,
                                            struct kvt_index_t *out);

/**
 * Computes the attention of a prompt instead of the library's kernel, for
 * kvt_sparse_prefill_attention: writes [queries, query heads, value dim] to `out`, and
 * [queries, query heads] to `lse` where that is not null. KVT_E_UNSUPPORTED leaves it to the
 * library's kernel, by the index.
 */
typedef kvt_status_t (*kvt_sparse_attention_fn)(void *user_data,
                                                uint32_t layer,
                                                const struct kvt_rows_t *queries,
                                                const struct kvt_rows_t *keys,
                                                const struct kvt_rows_t *values,
                                                const struct kvt_sparse_context_t *context,
                                                float *out,
                                                float *lse);

/**
 * Is told what each key got of the attention of `queries` queries: `count` numbers, for
 * `tokens` tokens that are kept.
 */
typedef kvt_status_t (*kvt_sparse_observe_fn)(void *user_data,
                                              uint32_t layer,
                                              uint32_t queries,
                                              const float *sums,
                                              uint64_t count,
                                              uint32_t tokens);

/**
 * Lists of positions of tokens, ascending: what each head of keys keeps, or each query head, or
 * one list for all. No list is an answer that all stay, and none that can be told.
 */
typedef struct kvt_token_lists_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Where each list begins in `items`, and where the last ends: one more than there are
     * lists.
     */
    uint32_t *starts;
    /**
     * Room there, when an answer is wanted.
     */
    uint64_t start_capacity;
    /**
     * How many there are; the number needed with KVT_E_TOO_SMALL.
     */
    uint64_t start_count;
    /**
     * The positions.
     */
    uint32_t *items;
    /**
     * Room there.
     */
    uint64_t item_capacity;
    /**
     * How many there are.
     */
    uint64_t item_count;
} kvt_token_lists_t;

/**
 * Says which tokens of a layer stay, as an index is said; counts left at 0 = all stay.
 */
typedef kvt_status_t (*kvt_sparse_evict_fn)(void *user_data,
                                            uint32_t layer,
                                            const struct kvt_sparse_context_t *context,
                                            struct kvt_token_lists_t *out);

/**
 * Is told that these tokens of a layer are all there is now.
 */
typedef kvt_status_t (*kvt_sparse_evicted_fn)(void *user_data,
                                              uint32_t layer,
                                              const struct kvt_token_lists_t *kept);

/**
 * Is told that the sequence has so many tokens now; 0 = it begins anew.
 */
typedef kvt_status_t (*kvt_sparse_truncate_fn)(void *user_data, uint32_t tokens);

/**
 * Makes user data for a copy, which goes on from here with the same functions.
 */
typedef kvt_status_t (*kvt_sparse_fork_fn)(void *user_data, void **copy_out);

/**
 * A sparse policy of the engine's own. What its traits say it can do needs the function for
 * it; all others may be null. It is called by the thread that calls the policy or the offload,
 * by one at a time.
 */
typedef struct kvt_sparse_custom_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * What it is like.
     */
    const struct kvt_sparse_traits_t *traits;
    /**
     * Before a block of a prompt is moved away.
     */
    kvt_on_prefill_offload_fn on_prefill_offload;
    /**
     * When a block of text is complete in all layers. Null: on_prefill_offload, layer by
     * layer.
     */
    kvt_on_decode_offload_fn on_decode_offload;
    /**
     * KVT_SPARSE_LOAD_*.
     */
    kvt_select_blocks_fn select_blocks;
    /**
     * KVT_SPARSE_INDEX_*.
     */
    kvt_sparse_index_fn index;
    /**
     * KVT_SPARSE_INDEX_PREFILL, too: the kernel itself.
     */
    kvt_sparse_attention_fn sparse_prefill_attention;
    /**
     * KVT_NEEDS_COLUMN_SUMS.
     */
    kvt_sparse_observe_fn observe;
    /**
     * KVT_SPARSE_EVICT_*.
     */
    kvt_sparse_evict_fn evict;
    /**
     * After tokens have gone.
     */
    kvt_sparse_evicted_fn evicted;
    /**
     * When tokens are taken back.
     */
    kvt_sparse_truncate_fn truncate;
    /**
     * For sequences that are forked.
     */
    kvt_sparse_fork_fn fork;
    /**
     * Handed to all of them; taken over on success only.
     */
    void *user_data;
    /**
     * Releases user_data, and that of each copy; may be null.
     */
    kvt_destroy_fn destroy;
} kvt_sparse_custom_t;

/**
 * How to open a sparse policy.
 */
typedef struct kvt_sparse_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Always 0.
     */
    uint64_t flags;
    /**
     * The model's attention.
     */
    const struct kvt_attention_t *attention;
    /**
     * The spec, such as "minference(budget=0.2)"; null with `custom`.
     */
    const char *spec;
    /**
     * Length of the spec.
     */
    uint64_t spec_bytes;
    /**
     * A policy of the engine's own instead; else null.
     */
    const struct kvt_sparse_custom_t *custom;
    /**
     * Pays for what the policy keeps, in host memory; may be null.
     */
    const struct kvt_account_t *account;
} kvt_sparse_opts_t;

/**
 * What a policy has chosen since it was opened.
 */
typedef struct kvt_sparse_stats_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * What it keeps of the sequence now, in bytes.
     */
    uint64_t state_bytes;
    /**
     * Selections that were asked for and answered.
     */
    uint64_t selections;
    /**
     * Candidates that they named.
     */
    uint64_t candidates;
    /**
     * Of those, blocks that are to be loaded.
     */
    uint64_t chosen;
    /**
     * Of those, blocks that need not be.
     */
    uint64_t spared;
    /**
     * Selections that were compared with what the layer's own query would have chosen.
     */
    uint64_t audited;
    /**
     * Blocks that own queries would have chosen.
     */
    uint64_t wanted;
    /**
     * Of those, blocks that were chosen: found / wanted is the recall.
     */
    uint64_t found;
} kvt_sparse_stats_t;

/**
 * A sparse policy that can be opened. Texts are UTF-8, not NUL-terminated, and live as long
 * as the library.
 */
typedef struct kvt_sparse_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Its name in specs.
     */
    const char *name;
    /**
     * Length of the name.
     */
    uint64_t name_bytes;
    /**
     * What it does, in a line.
     */
    const char *about;
    /**
     * Length of that line.
     */
    uint64_t about_bytes;
} kvt_sparse_info_t;

/**
 * Tokens in a buffer, in the order of their positions: some blocks of a sequence, and its
 * last tokens behind them.
 */
typedef struct kvt_block_placement_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Which blocks, ascending: block n has the positions from n * block_tokens on.
     */
    const uint32_t *blocks;
    /**
     * How many.
     */
    uint64_t block_count;
    /**
     * Tokens of a block.
     */
    uint32_t block_tokens;
    /**
     * The position of the first of the last tokens, behind all blocks.
     */
    uint32_t tail_first;
    /**
     * How many last tokens.
     */
    uint32_t tail_tokens;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_block_placement_t;

/**
 * Tokens of a layer that are there, as policies count them.
 */
typedef struct kvt_resident_tokens_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * The model's attention.
     */
    const struct kvt_attention_t *attention;
    /**
     * What has stayed: the lists of kvt_sparse_commit_eviction. Null = nothing was evicted.
     */
    const struct kvt_token_lists_t *kept;
    /**
     * Tokens from this position on came after that; 0 without lists.
     */
    uint32_t since;
    /**
     * Tokens of the sequence.
     */
    uint32_t tokens;
} kvt_resident_tokens_t;

/**
 * The largest that problems become, each of its own.
 */
typedef struct kvt_kernel_limits_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_DECODE_*.
     */
    uint64_t flags;
    /**
     * Queries of a problem.
     */
    uint32_t queries;
    /**
     * Keys of a problem.
     */
    uint32_t keys;
    /**
     * Positions of a sequence.
     */
    uint32_t tokens;
    /**
     * Heads of queries.
     */
    uint32_t query_heads;
    /**
     * Numbers of a query and a key.
     */
    uint32_t key_dim;
    /**
     * Numbers of a value.
     */
    uint32_t value_dim;
} kvt_kernel_limits_t;

/**
 * How a job is cut.
 */
typedef struct kvt_attention_job_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * How many steps it has.
     */
    uint32_t steps;
    /**
     * Items of the first step.
     */
    uint32_t items;
    /**
     * Items of the second step, where there is one.
     */
    uint32_t last_items;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Numbers of scratch that each thread needs.
     */
    uint64_t scratch_count;
    /**
     * Of a decode that keeps scores: keys that kvt_decode_sums has sums of, for each head.
     */
    uint64_t sum_keys;
} kvt_attention_job_info_t;

/**
 * What is to be computed: queries are at `first_query` and the positions after it, and see
 * keys up to their own position.
 */
typedef struct kvt_attention_args_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * [tokens, query heads, key dim]
     */
    const struct kvt_rows_t *queries;
    /**
     * [tokens, key heads, key dim]
     */
    const struct kvt_rows_t *keys;
    /**
     * [tokens, key heads, value dim]; of a latent the first numbers of the keys, at the same
     * address.
     */
    const struct kvt_rows_t *values;
    /**
     * Which keys queries are computed with, by their positions; null = all. Policies say it
     * (kvt_sparse_index), or the engine.
     */
    const struct kvt_index_t *select;
    /**
     * The position of the first query.
     */
    uint32_t first_query;
    /**
     * The position of the first key: where keys come in pieces, results of each are put
     * together by kvt_attention_merge.
     */
    uint32_t first_key;
    /**
     * What products are multiplied with; 0 = 1 / sqrt(key dim).
     */
    float scale;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_attention_args_t;

/**
 * What an offload is opened with.
 */
typedef struct kvt_offload_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_OFFLOAD_ON_DEVICE or 0.
     */
    uint64_t flags;
    /**
     * The session; kept, and not to be closed for another meanwhile.
     */
    const struct kvt_session_t *session;
    /**
     * The model's attention; a block is a chunk of the session's namespace.
     */
    const struct kvt_attention_t *attention;
    /**
     * KVT_DTYPE_*: what K and V are.
     */
    uint32_t dtype;
    /**
     * Buffers of the ring, 1 to 256; also how many layers are loaded ahead.
     */
    uint32_t buffers;
    /**
     * Tokens of a buffer, rounded up to blocks.
     */
    uint32_t buffer_tokens;
    /**
     * KVT_LEVEL_*: when a put has ended.
     */
    uint32_t level;
    /**
     * Spec of the sparse policy for prompts; null = everything is loaded.
     */
    const char *prefill;
    /**
     * Length of that.
     */
    uint64_t prefill_bytes;
    /**
     * Spec of the sparse policy for text that is written; null = everything is loaded.
     */
    const char *decode;
    /**
     * Length of that.
     */
    uint64_t decode_bytes;
    /**
     * Every so many-th load that leaves blocks out is audited: its blocks are compared with
     * those that the layer's own queries look at most, for which the keys of all are loaded.
     * 0 = none; 1 = each.
     */
    uint32_t audit_every;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * A policy of the engine's own instead of `prefill`; else null. It is called by the
     * threads that call the offload.
     */
    const struct kvt_sparse_custom_t *prefill_custom;
    /**
     * The same instead of `decode`.
     */
    const struct kvt_sparse_custom_t *decode_custom;
    /**
     * With KVT_OFFLOAD_ON_DEVICE: memory of the store's device that the engine lends for the
     * ring and the tails, a multiple of 256, until the offload is closed. 0 = the device gives
     * it.
     */
    uint64_t memory;
    /**
     * How long that is: at least what kvt_offload_memory_bytes says.
     */
    uint64_t memory_bytes;
} kvt_offload_opts_t;

/**
 * What an offload has done, and who waited for what.
 */
typedef struct kvt_offload_stats_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Loads of a layer.
     */
    uint64_t loads;
    /**
     * Of them, those that a policy has cut.
     */
    uint64_t selections;
    /**
     * Blocks that could have been loaded.
     */
    uint64_t candidates;
    /**
     * Blocks that were.
     */
    uint64_t loaded_blocks;
    /**
     * Bytes of them.
     */
    uint64_t loaded_bytes;
    /**
     * Bytes that were not loaded, since a policy did not want them.
     */
    uint64_t saved_bytes;
    /**
     * Loads that failed.
     */
    uint64_t failed_loads;
    /**
     * Blocks that were put into the store.
     */
    uint64_t put_blocks;
    /**
     * Bytes of them.
     */
    uint64_t put_bytes;
    /**
     * Bytes that were copied to or from tails, the last tokens, which fill no block.
     */
    uint64_t tail_bytes;
    /**
     * Tokens that policies evicted: heads times tokens, where heads have lists of their own.
     */
    uint64_t evicted_tokens;
    /**
     * What policies know of the sequence, in bytes.
     */
    uint64_t policy_bytes;
    /**
     * Waits for blocks to come.
     */
    uint64_t load_waits;
    /**
     * How long those took, in nanoseconds.
     */
    uint64_t load_wait_ns;
    /**
     * Waits for a full tail to leave.
     */
    uint64_t tail_waits;
    /**
     * How long those took, in nanoseconds.
     */
    uint64_t tail_wait_ns;
    /**
     * Waits for blocks that kvt_offload_truncate divides.
     */
    uint64_t cut_waits;
    /**
     * How long those took, in nanoseconds.
     */
    uint64_t cut_wait_ns;
    /**
     * Selections of a policy that took any time.
     */
    uint64_t select_waits;
    /**
     * How long those took, in nanoseconds.
     */
    uint64_t select_wait_ns;
    /**
     * Loads that were audited.
     */
    uint64_t audited;
    /**
     * Blocks that their layers' own queries looked at most, as many of each load as came.
     */
    uint64_t wanted;
    /**
     * Of those, blocks that came: found / wanted is the recall of selections.
     */
    uint64_t found;
    /**
     * Which part of the attention to blocks went to those that came, in millionths: the sum
     * over what was audited.
     */
    uint64_t found_ppm;
    /**
     * Bytes of keys that came from device memory to host memory, for policies to see.
     */
    uint64_t key_bytes;
} kvt_offload_stats_t;

/**
 * K and V of a layer in a buffer, row by row: those of blocks, ascending, and of the tail
 * behind them. They stay until the buffer is given back.
 */
typedef struct kvt_offload_kv_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * K of the first row; rows lie key_heads * key_dim numbers apart, heads key_dim.
     */
    const void *k;
    /**
     * V; rows lie key_heads * value_dim numbers apart. Of a latent the same as `k`.
     */
    const void *v;
    /**
     * Rows.
     */
    uint32_t tokens;
    /**
     * Of them those of the tail.
     */
    uint32_t tail_tokens;
    /**
     * Blocks before it.
     */
    uint32_t blocks;
    /**
     * The buffer.
     */
    uint32_t buffer;
    /**
     * KVT_MEMORY_*: where `k` and `v` are valid.
     */
    uint32_t memory;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_offload_kv_t;

/**
 * A text, or a path. Stands in arrays only.
 */
typedef struct kvt_str_t {
    /**
     * It.
     */
    const char *text;
    /**
     * Its length.
     */
    uint64_t bytes;
} kvt_str_t;

/**
 * What a model is; numbers that its files do not say are 0.
 */
typedef struct kvt_model_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Bytes of all tensors.
     */
    uint64_t bytes;
    /**
     * KVT_FORMAT_*.
     */
    uint32_t format;
    /**
     * Files.
     */
    uint32_t files;
    /**
     * Units: see kvt_model_unit.
     */
    uint32_t units;
    /**
     * Tensors: see kvt_model_tensor.
     */
    uint32_t tensors;
    /**
     * Its architecture, such as "llama"; not NUL-terminated, lives until the model is closed.
     */
    const char *architecture;
    /**
     * Length of that.
     */
    uint64_t architecture_bytes;
    /**
     * Layers.
     */
    uint32_t layers;
    /**
     * Numbers of a hidden state.
     */
    uint32_t hidden;
    /**
     * Heads of queries.
     */
    uint32_t heads;
    /**
     * Heads of keys and values of one layer; the most where layers differ.
     */
    uint32_t kv_heads;
    /**
     * Numbers of a key, as it is kept.
     */
    uint32_t key_dim;
    /**
     * Numbers of a value; 0 beside a key_dim where values are made of what is kept of keys.
     */
    uint32_t value_dim;
    /**
     * The longest context.
     */
    uint32_t context;
    /**
     * Symbols.
     */
    uint32_t vocabulary;
    /**
     * Experts of a layer.
     */
    uint32_t experts;
    /**
     * Of them, those that a token uses.
     */
    uint32_t experts_used;
    /**
     * What tells it from other models: a hash of headers, lengths of files, names, types,
     * sizes and places of tensors. Models that differ in weights alone may have the same.
     */
    uint8_t fingerprint[32];
} kvt_model_info_t;

/**
 * A file of a model.
 */
typedef struct kvt_model_file_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Its path; not NUL-terminated, lives until the model is closed.
     */
    const char *path;
    /**
     * Length of that.
     */
    uint64_t path_bytes;
    /**
     * How long the file is.
     */
    uint64_t bytes;
} kvt_model_file_t;

/**
 * A unit: bytes that are needed together, and move together. Units are numbered in the order
 * in which a pass needs them: the embedding, what has no role, each layer followed by its
 * experts, the norm, the head.
 */
typedef struct kvt_unit_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * What it is called, such as "layer 3 expert 7"; not NUL-terminated, lives until the
     * model is closed.
     */
    const char *name;
    /**
     * Length of that.
     */
    uint64_t name_bytes;
    /**
     * KVT_ROLE_*.
     */
    uint32_t role;
    /**
     * Its layer, or KVT_NONE.
     */
    uint32_t layer;
    /**
     * Its expert, or KVT_NONE.
     */
    uint32_t expert;
    /**
     * Parts of tensors that it has.
     */
    uint32_t parts;
    /**
     * What its tensors have.
     */
    uint64_t bytes;
    /**
     * What it takes in memory.
     */
    uint64_t image_bytes;
} kvt_unit_t;

/**
 * A tensor as it is in its file.
 */
typedef struct kvt_tensor_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Its name; not NUL-terminated, lives until the model is closed.
     */
    const char *name;
    /**
     * Length of that.
     */
    uint64_t name_bytes;
    /**
     * What its numbers are, as the format calls it, such as "Q6_K" or "BF16"; lives as long
     * as the library.
     */
    const char *dtype;
    /**
     * Length of that.
     */
    uint64_t dtype_bytes;
    /**
     * Its dimensions, the innermost first; they live until the model is closed.
     */
    const uint64_t *dims;
    /**
     * How many.
     */
    uint32_t dim_count;
    /**
     * Which file of the model.
     */
    uint32_t file;
    /**
     * Where in that file, from its start.
     */
    uint64_t offset;
    /**
     * How long it is there.
     */
    uint64_t bytes;
    /**
     * Parts that it is divided into: one, or one for each expert; none if it has no bytes.
     */
    uint32_t parts;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_tensor_t;

/**
 * Where a tensor, or an expert's part of one, is in its unit. Stands in arrays only.
 */
typedef struct kvt_part_t {
    /**
     * Which tensor of the model.
     */
    uint32_t tensor;
    /**
     * Which unit.
     */
    uint32_t unit;
    /**
     * Where in the unit: kvt_unit_lease_t.address + at is its first byte.
     */
    uint64_t at;
    /**
     * Where in the tensor: 0 unless it is divided between experts.
     */
    uint64_t from;
    /**
     * How long.
     */
    uint64_t bytes;
} kvt_part_t;

/**
 * A stretch of a file. Stands in arrays only.
 */
typedef struct kvt_file_range_t {
    /**
     * Which of the files.
     */
    uint32_t file;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Where in it.
     */
    uint64_t offset;
    /**
     * How long, at least 1.
     */
    uint64_t bytes;
} kvt_file_range_t;

/**
 * A unit as the engine names it. Stands in arrays only.
 */
typedef struct kvt_unit_entry_t {
    /**
     * What it is called.
     */
    const char *name;
    /**
     * Length of that, 1 to 504.
     */
    uint64_t name_bytes;
    /**
     * KVT_ROLE_*.
     */
    uint32_t role;
    /**
     * The layer, of KVT_ROLE_LAYER and KVT_ROLE_EXPERT; else 0 or KVT_NONE.
     */
    uint32_t layer;
    /**
     * The expert, of KVT_ROLE_EXPERT; else 0 or KVT_NONE.
     */
    uint32_t expert;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Its bytes; each range becomes a tensor.
     */
    const struct kvt_file_range_t *ranges;
    /**
     * How many ranges.
     */
    uint64_t range_count;
} kvt_unit_entry_t;

/**
 * A model as a table of byte ranges.
 */
typedef struct kvt_model_table_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * None are defined yet: 0.
     */
    uint64_t flags;
    /**
     * The files.
     */
    const struct kvt_str_t *paths;
    /**
     * How many.
     */
    uint64_t path_count;
    /**
     * sizeof(kvt_str_t).
     */
    uint64_t path_stride_bytes;
    /**
     * The units, in the order in which a pass needs them.
     */
    const struct kvt_unit_entry_t *units;
    /**
     * How many.
     */
    uint64_t unit_count;
    /**
     * sizeof(kvt_unit_entry_t).
     */
    uint64_t unit_stride_bytes;
    /**
     * sizeof(kvt_file_range_t).
     */
    uint64_t range_stride_bytes;
} kvt_model_table_t;

/**
 * What you decide about memory, and know of links. 0 is the default everywhere; where 0 has
 * a meaning of its own a flag says that it is meant.
 */
typedef struct kvt_stream_terms_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_TERMS_*, KVT_TERMS_SHRINKS.
     */
    uint64_t flags;
    /**
     * KVT_COMPUTE_*; 0 = on the device, if it has memory.
     */
    uint32_t compute;
    /**
     * KVT_STREAM_TIERED or KVT_STREAM_RING.
     */
    uint32_t mode;
    /**
     * KVT_PLACE_*: which units stay.
     */
    uint32_t placement;
    /**
     * Slots that units pass through; 0 = 2. In a ring, the least there may be.
     */
    uint32_t slots;
    /**
     * Most device memory for weights; 0 = what is free.
     */
    uint64_t device_ceiling_bytes;
    /**
     * Most host memory for weights, slots and staging; 0 = what is free.
     */
    uint64_t host_ceiling_bytes;
    /**
     * Kept free on the device; 0 = 256 MiB.
     */
    uint64_t device_safety_bytes;
    /**
     * Kept free of host memory; 0 = 6 GiB, less on small machines.
     */
    uint64_t host_reserve_bytes;
    /**
     * Tokens of context, for the KV that is held where the engine computes; 0 = the
     * model's, at most 4096.
     */
    uint32_t context;
    /**
     * Sequences at once; 0 = 1.
     */
    uint32_t sequences;
    /**
     * Bytes of a number of KV; 0 = 2.
     */
    uint32_t kv_element_bytes;
    /**
     * So many of the last layers are computed by the processor; for a device seat.
     */
    uint32_t processor_layers;
    /**
     * KV; 0 = computed from the context.
     */
    uint64_t kv_bytes;
    /**
     * Memory that the engine computes in.
     */
    uint64_t workspace_bytes;
    /**
     * Buffers for hidden states.
     */
    uint64_t hidden_bytes;
    /**
     * Slots for experts; 0 = as many as there is room for, with KVT_TERMS_SHRINKS as few as a
     * layer needs.
     */
    uint32_t expert_slots;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Host memory that reads go to on their way to a device; 0 = chosen.
     */
    uint64_t staging_bytes;
    /**
     * How much one read or copy moves; 0 = 4 MiB.
     */
    uint64_t chunk_bytes;
    /**
     * What computing a layer takes, for forecasts.
     */
    uint64_t layer_compute_ns;
    /**
     * From the file into host memory, in bytes a second; 0 = not known.
     */
    uint64_t disk_bytes_per_s;
    /**
     * From host memory to the device; 0 = not known.
     */
    uint64_t device_bytes_per_s;
    /**
     * How fast the processor computes with weights in host memory; 0 = not known.
     */
    uint64_t processor_bytes_per_s;
} kvt_stream_terms_t;

/**
 * What memory there is.
 */
typedef struct kvt_stream_memory_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Free on the device.
     */
    uint64_t device_free_bytes;
    /**
     * What this process may still take of host memory.
     */
    uint64_t host_free_bytes;
    /**
     * RAM of the machine, or of the cgroup if that is less.
     */
    uint64_t host_total_bytes;
    /**
     * What may be locked; UINT64_MAX = as much as there is.
     */
    uint64_t lockable_bytes;
} kvt_stream_memory_t;

/**
 * Who lives where, in numbers.
 */
typedef struct kvt_stream_plan_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_COMPUTE_*: where the engine computes.
     */
    uint32_t compute;
    /**
     * KVT_STREAM_TIERED or KVT_STREAM_RING.
     */
    uint32_t mode;
    /**
     * Units at home in memory of the device.
     */
    uint32_t device_units;
    /**
     * Units at home in host memory.
     */
    uint32_t host_units;
    /**
     * Units at home in the file alone.
     */
    uint32_t file_units;
    /**
     * Slots that units without a home where they are used pass through.
     */
    uint32_t slots;
    /**
     * The size of one.
     */
    uint64_t slot_bytes;
    /**
     * Slots for experts.
     */
    uint32_t expert_slots;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * The size of one.
     */
    uint64_t expert_slot_bytes;
    /**
     * Host memory that reads go to on their way to a device.
     */
    uint64_t staging_bytes;
    /**
     * How much one read or copy moves.
     */
    uint64_t chunk_bytes;
    /**
     * What it takes of the device.
     */
    uint64_t device_bytes;
    /**
     * What it takes of host memory.
     */
    uint64_t host_bytes;
    /**
     * How much of that is locked.
     */
    uint64_t pinned_bytes;
} kvt_stream_plan_t;

/**
 * What a pass will take; all 0 where the speed of a link that it needs is not known.
 */
typedef struct kvt_forecast_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * A pass in the steady state.
     */
    uint64_t pass_ns;
    /**
     * The first one: nothing was fetched ahead.
     */
    uint64_t first_ns;
    /**
     * No pass can take less.
     */
    uint64_t bound_ns;
    /**
     * Computing alone.
     */
    uint64_t compute_ns;
    /**
     * The device link alone.
     */
    uint64_t device_ns;
    /**
     * The disk alone.
     */
    uint64_t disk_ns;
    /**
     * Bytes that cross the device link in a pass.
     */
    uint64_t device_bytes;
    /**
     * Bytes that are read in a pass.
     */
    uint64_t disk_bytes;
    /**
     * Passes a second, which are tokens where a pass makes one; 0 = pass_ns is 0.
     */
    double tokens_per_s;
    /**
     * KVT_BINDING_*: what limits it; 0 = nothing is known.
     */
    uint32_t binding;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_forecast_t;

/**
 * Where a unit lives. Stands in arrays only.
 */
typedef struct kvt_unit_residency_t {
    /**
     * KVT_RESIDENT_*.
     */
    uint32_t residency;
    /**
     * 1: it is used in host memory though the engine computes on a device, else 0.
     */
    uint32_t on_processor;
} kvt_unit_residency_t;

/**
 * How to open a streamer.
 */
typedef struct kvt_stream_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_STREAM_MEASURE and the like.
     */
    uint64_t flags;
    /**
     * The model. It may be closed afterwards.
     */
    const struct kvt_model_t *model;
    /**
     * What you decide about memory; null for defaults.
     */
    const struct kvt_stream_terms_t *terms;
    /**
     * Who pays for memory, a budget of the same runtime; null = nobody. When the budget needs
     * host memory for others, residents go back to the file: with a budget the terms have
     * KVT_TERMS_SHRINKS.
     */
    const struct kvt_budget_t *budget;
    /**
     * Its rank there: owners of low priority are asked first to give back.
     */
    int64_t priority;
    /**
     * The order of units in a pass, without experts; null = as they are numbered.
     */
    const uint32_t *order;
    /**
     * How many.
     */
    uint64_t order_count;
    /**
     * Spec of who leaves slots, for KVT_STREAM_RING; empty = "fifo".
     */
    const char *policy;
    /**
     * Length of that.
     */
    uint64_t policy_bytes;
    /**
     * Spec of who leaves the slots for experts; empty = "lru".
     */
    const char *expert_policy;
    /**
     * Length of that.
     */
    uint64_t expert_policy_bytes;
    /**
     * Path of the file that checksums are kept in; not empty means KVT_STREAM_SIDECAR.
     */
    const char *sidecar;
    /**
     * Length of that.
     */
    uint64_t sidecar_bytes;
    /**
     * KVT_VERIFY_*.
     */
    uint32_t verify;
    /**
     * Threads that read; 0 = 4, at most 64.
     */
    uint32_t readers;
    /**
     * Reads that one thread has in flight; 0 = as many as can be.
     */
    uint32_t depth;
    /**
     * Marks of what happened that are kept, for kvt_stream_marks; at most 2^20. With any,
     * units at home are noted too, and had under a lock.
     */
    uint32_t marks;
    /**
     * Of a hundred slots for experts, those that the most used have for themselves; 0 = 50.
     */
    uint32_t pinned_percent;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Where the engine computes, a device of the same runtime with memory of its own; null = on
     * the processor.
     */
    const struct kvt_device_t *device;
} kvt_stream_opts_t;

/**
 * A unit that the engine has until it gives it back. Nobody but the library writes
 * into it; copies of it are not given back on their own.
 */
typedef struct kvt_unit_lease_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Its bytes, to be read alone: a part of a tensor is at address + kvt_part_t.at. A
     * multiple of 4096.
     */
    const void *address;
    /**
     * How many bytes there are: kvt_unit_t.image_bytes.
     */
    uint64_t bytes;
    /**
     * Which unit.
     */
    uint32_t unit;
    /**
     * KVT_MEMORY_*: where the address is valid.
     */
    uint32_t memory;
    /**
     * The library's own: where it is. 0 = it was given back.
     */
    uint64_t place;
    /**
     * The device's event from which on the bytes are complete; 0 = they are. It is the
     * streamer's, and known until the unit is given back.
     */
    uint64_t event;
    /**
     * When it was had, where that is noted; else 0.
     */
    uint64_t since_ns;
} kvt_unit_lease_t;

/**
 * How far the residents are.
 */
typedef struct kvt_stream_progress_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Units that have to come home and have not.
     */
    uint64_t missing;
    /**
     * Units whose home is in memory.
     */
    uint64_t resident_units;
    /**
     * Bytes read so far, for whatever.
     */
    uint64_t read_bytes;
} kvt_stream_progress_t;

/**
 * What weights may have from now on.
 */
typedef struct kvt_stream_limits_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_LIMIT_*.
     */
    uint64_t flags;
    /**
     * Most host memory; 0 = as it is.
     */
    uint64_t host_bytes;
    /**
     * Most device memory; 0 = as it is.
     */
    uint64_t device_bytes;
    /**
     * Tokens of context that KV is kept for; 0 = as it is.
     */
    uint32_t context;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_stream_limits_t;

/**
 * What a streamer has done.
 */
typedef struct kvt_stream_stats_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Passes that have ended.
     */
    uint64_t passes;
    /**
     * How long the last one took.
     */
    uint64_t pass_ns;
    /**
     * Units that were had.
     */
    uint64_t acquires;
    /**
     * Calls that had to wait.
     */
    uint64_t waited;
    /**
     * How long calls waited for reads.
     */
    uint64_t wait_read_ns;
    /**
     * For copies to the device.
     */
    uint64_t wait_copy_ns;
    /**
     * For slots.
     */
    uint64_t wait_slot_ns;
    /**
     * How long the engine had units; of those at home only where marks are kept.
     */
    uint64_t use_ns;
    /**
     * Bytes that were read.
     */
    uint64_t read_bytes;
    /**
     * How long reads took, added up: more than the time that passed where several were under
     * way.
     */
    uint64_t read_ns;
    /**
     * What the disk was measured or said to do, in bytes a second; 0 = not known.
     */
    uint64_t read_ceiling_bytes_per_s;
    /**
     * Bytes that were copied to the device.
     */
    uint64_t copied_bytes;
    /**
     * How long copies took, added up.
     */
    uint64_t copy_ns;
    /**
     * What the link to the device was said to do; 0 = not known.
     */
    uint64_t copy_ceiling_bytes_per_s;
    /**
     * Bytes that were brought and never used.
     */
    uint64_t wasted_bytes;
    /**
     * Reads and copies that failed.
     */
    uint64_t failed;
    /**
     * Experts that were asked for and there.
     */
    uint64_t expert_hits;
    /**
     * Experts that had to be brought.
     */
    uint64_t expert_misses;
    /**
     * Of the bytes that were read, those that the device read by itself (KVT_STREAM_DIRECT).
     */
    uint64_t direct_bytes;
    /**
     * Reads of the device's that failed: those bytes came by way of host memory. After three in a
     * row no more are tried.
     */
    uint64_t direct_failed;
} kvt_stream_stats_t;

/**
 * What became of the experts of a layer. Stands in arrays only.
 */
typedef struct kvt_expert_stats_t {
    /**
     * The layer.
     */
    uint32_t layer;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * Experts that were asked for and there.
     */
    uint64_t hits;
    /**
     * Those that had to be brought.
     */
    uint64_t misses;
    /**
     * Bytes that were brought.
     */
    uint64_t bytes;
} kvt_expert_stats_t;

/**
 * Something that took time. Stands in arrays only.
 */
typedef struct kvt_stream_span_t {
    /**
     * KVT_STAGE_*.
     */
    uint32_t stage;
    /**
     * Which unit.
     */
    uint32_t unit;
    /**
     * From when, CLOCK_MONOTONIC.
     */
    uint64_t begin_ns;
    /**
     * Until when.
     */
    uint64_t end_ns;
} kvt_stream_span_t;

/**
 * Rows of bytes to copy: `runs` runs of `run_bytes` bytes, read and written at equal distances.
 * One side has them without gaps. Stands in arrays only.
 */
typedef struct kvt_copy_rows_t {
    /**
     * Where the first run is read.
     */
    uint64_t from;
    /**
     * Where it is written.
     */
    uint64_t to;
    /**
     * From a run to the next, where they are read.
     */
    uint64_t from_stride_bytes;
    /**
     * The same, where they are written.
     */
    uint64_t to_stride_bytes;
    /**
     * Bytes of a run.
     */
    uint64_t run_bytes;
    /**
     * How many runs.
     */
    uint64_t runs;
    /**
     * KVT_MEMORY_*: where they are read.
     */
    uint32_t from_memory;
    /**
     * KVT_MEMORY_*: where they are written.
     */
    uint32_t to_memory;
} kvt_copy_rows_t;

/**
 * Puts copies on a stream (0 to `streams` - 1, each in order), behind the event `after` if that
 * is not 0, and writes the event of their end, a number of the engine's own that is not 0. No
 * copies: the event marks the place. A batch whose `after` fails must fail. What is refused must
 * not have begun. KVT_E_UNAVAILABLE, from any callback: the device is gone; nothing is asked
 * of it any more but to release and free.
 */
typedef kvt_status_t (*kvt_device_submit_fn)(void *user_data,
                                             uint32_t stream,
                                             uint64_t after,
                                             const struct kvt_copy_rows_t *copies,
                                             uint64_t count,
                                             uint64_t stride_bytes,
                                             uint64_t *out_event);

/**
 * Whether an event has come: KVT_OK, or KVT_E_AGAIN while it has not. Anything else is what its
 * batch failed with, and the library takes it that the batch touches no memory any more: where
 * only the question failed, KVT_E_AGAIN is the answer.
 */
typedef kvt_status_t (*kvt_device_query_fn)(void *user_data, uint64_t event);

/**
 * Waits for an event until a deadline (CLOCK_MONOTONIC, 0 = none). It may return early: the
 * event is asked for afterwards, and after a pause if it was very early.
 */
typedef kvt_status_t (*kvt_device_wait_fn)(void *user_data, uint64_t event, uint64_t deadline_ns);

/**
 * Takes an event back that nobody asks for any more. Batches that were given it as `after` may
 * still wait for it.
 */
typedef void (*kvt_device_release_fn)(void *user_data, uint64_t event);

/**
 * Gives memory at a multiple of 256; KVT_E_NOMEM where there is not so much.
 */
typedef kvt_status_t (*kvt_device_allocate_fn)(void *user_data,
                                               uint64_t bytes,
                                               uint64_t *out_address);

/**
 * Takes it back.
 */
typedef void (*kvt_device_free_fn)(void *user_data, uint64_t address, uint64_t bytes);

/**
 * What it has left to give.
 */
typedef kvt_status_t (*kvt_device_free_bytes_fn)(void *user_data, uint64_t *out_bytes);

/**
 * Learns of host memory that copies use again and again; with 0 bytes: that it goes.
 */
typedef kvt_status_t (*kvt_device_register_host_fn)(void *user_data,
                                                    uint64_t address,
                                                    uint64_t bytes);

/**
 * Makes an event of its own that comes with one that the engine names: see kvt_device_import_event.
 * The one that is named stays the engine's.
 */
typedef kvt_status_t (*kvt_device_import_event_fn)(void *user_data,
                                                   uint64_t raw,
                                                   uint64_t *out_event);

/**
 * Has a stream that the engine names go on only after an event: see kvt_device_stream_wait. It is not
 * called for an event that has come already.
 */
typedef kvt_status_t (*kvt_device_stream_wait_fn)(void *user_data,
                                                  uint64_t raw_stream,
                                                  uint64_t event);

/**
 * One kernel: 256 bytes, the same for all. Addresses are the device's, strides are bytes, 0 =
 * none; each kernel uses some of the fields, and the others are 0. docs/kernels.md says which.
 * Stands in arrays only.
 */
typedef struct kvt_kernel_t {
    /**
     * KVT_DEVICE_KERNEL_*.
     */
    uint32_t kind;
    /**
     * KVT_DTYPE_*: what keys and values, or what is read, are.
     */
    uint32_t dtype;
    /**
     * KVT_DTYPE_*: what queries and the output, or what is written, are.
     */
    uint32_t other_dtype;
    /**
     * KVT_SCALES_*.
     */
    uint32_t scaling;
    /**
     * Queries.
     */
    uint64_t queries;
    /**
     * Keys, or what is read.
     */
    uint64_t keys;
    /**
     * Values.
     */
    uint64_t values;
    /**
     * What is written.
     */
    uint64_t out;
    /**
     * Lists of places.
     */
    uint64_t index;
    /**
     * How long each list is.
     */
    uint64_t counts;
    /**
     * Where pages are.
     */
    uint64_t table;
    /**
     * Numbers that are read or changed.
     */
    uint64_t numbers;
    /**
     * More of them.
     */
    uint64_t more;
    /**
     * Scales of narrow numbers.
     */
    uint64_t scales;
    /**
     * Memory of the kernel's while it runs.
     */
    uint64_t scratch;
    /**
     * How much.
     */
    uint64_t scratch_bytes;
    /**
     * From a query to the next.
     */
    int64_t query_stride;
    /**
     * From a head of a query to the next.
     */
    int64_t query_head_stride;
    /**
     * From a key to the next.
     */
    int64_t key_stride;
    /**
     * From a head of a key to the next.
     */
    int64_t key_head_stride;
    /**
     * From a value to the next.
     */
    int64_t value_stride;
    /**
     * From a head of a value to the next.
     */
    int64_t value_head_stride;
    /**
     * From a row of what is written to the next.
     */
    int64_t out_stride;
    /**
     * From a head of it to the next.
     */
    int64_t out_head_stride;
    /**
     * How many queries.
     */
    uint32_t query_count;
    /**
     * Heads of a query.
     */
    uint32_t query_heads;
    /**
     * Heads of a key.
     */
    uint32_t key_heads;
    /**
     * Numbers of a key's head.
     */
    uint32_t key_dim;
    /**
     * Numbers of a value's head.
     */
    uint32_t value_dim;
    /**
     * Tokens of a page or block.
     */
    uint32_t page_tokens;
    /**
     * Tokens that the sequence has.
     */
    uint32_t tokens;
    /**
     * The first of what is worked on.
     */
    uint32_t first;
    /**
     * How many.
     */
    uint32_t count;
    /**
     * How many stay, or are chosen.
     */
    uint32_t keep;
    /**
     * So many of the last stay.
     */
    uint32_t recent;
    /**
     * So many of the first stay.
     */
    uint32_t sinks;
    /**
     * What products are multiplied with.
     */
    float scale;
    /**
     * What else it is to do, as the kernel says.
     */
    uint32_t flags;
    /**
     * 0.
     */
    uint64_t reserved[3];
} kvt_kernel_t;

/**
 * Puts kernels on a stream, as copies.
 */
typedef kvt_status_t (*kvt_device_launch_fn)(void *user_data,
                                             uint32_t stream,
                                             uint64_t after,
                                             const struct kvt_kernel_t *kernels,
                                             uint64_t count,
                                             uint64_t stride_bytes,
                                             uint64_t *out_event);

/**
 * Makes an event that comes when `keep` says so: what is put behind it waits until then.
 */
typedef kvt_status_t (*kvt_device_create_event_fn)(void *user_data, uint64_t *out_event);

/**
 * Has such an event come, if it has not. It must not wait. Any thread may say so: that which ends
 * an op, too.
 */
typedef kvt_status_t (*kvt_device_signal_event_fn)(void *user_data, uint64_t event);

/**
 * A device of the engine's own. `submit` and `query` must be there; each of the others may be
 * null, and then there is none of that. They are called from any thread, from several at once;
 * they must not unwind, and must not call the device they are of. `release`, `allocate`, `free`
 * and `free_bytes` may be called while the library holds a lock: they must call nothing of it,
 * and wait for no thread that does. The others are called with no lock held.
 * kvt_device_conformance says whether all is as it should be.
 */
typedef struct kvt_device_custom_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_DEVICE_HAS_MEMORY, KVT_DEVICE_WANTS_PINNED.
     */
    uint64_t flags;
    /**
     * How many streams it has, 1 to 64. The upper half is for batches behind events that may
     * come late, so that they hold up nothing else.
     */
    uint32_t streams;
    /**
     * Always 0.
     */
    uint32_t reserved;
    /**
     * The kernels that `launch` knows: 1 << KVT_DEVICE_KERNEL_* for each.
     */
    uint64_t kernels;
    /**
     * Copies.
     */
    kvt_device_submit_fn submit;
    /**
     * How far an event is.
     */
    kvt_device_query_fn query;
    /**
     * Waits; null = events are asked for every so often.
     */
    kvt_device_wait_fn wait;
    /**
     * Takes events back.
     */
    kvt_device_release_fn release;
    /**
     * Gives memory.
     */
    kvt_device_allocate_fn allocate;
    /**
     * Takes it back.
     */
    kvt_device_free_fn free;
    /**
     * What is left.
     */
    kvt_device_free_bytes_fn free_bytes;
    /**
     * Host memory that is used again and again.
     */
    kvt_device_register_host_fn register_host;
    /**
     * Events of the engine's.
     */
    kvt_device_import_event_fn import_event;
    /**
     * Streams of the engine's.
     */
    kvt_device_stream_wait_fn stream_wait;
    /**
     * Kernels.
     */
    kvt_device_launch_fn launch;
    /**
     * Handed to all of them; taken over on success only.
     */
    void *user_data;
    /**
     * Releases user_data; may be null.
     */
    kvt_destroy_fn destroy;
    /**
     * Events that come when they are told to; null = there are none, and no stream can wait for
     * an op.
     */
    kvt_device_create_event_fn create_event;
    /**
     * Tells them: there with `promise` alone.
     */
    kvt_device_signal_event_fn signal_event;
} kvt_device_custom_t;

/**
 * How to open a device.
 */
typedef struct kvt_device_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_DEVICE_VERIFY, or 0.
     */
    uint64_t flags;
    /**
     * KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED.
     */
    uint32_t kind;
    /**
     * CUDA: which device, where no context is given.
     */
    uint32_t ordinal;
    /**
     * CUDA: the engine's context (CUcontext), which outlives the device; 0 = the one that the
     * process shares.
     */
    uint64_t context;
    /**
     * CUDA: the engine's streams (CUstream) of that context, none of them a default stream;
     * null = some of its own.
     */
    const uint64_t *streams;
    /**
     * How many, at most 64.
     */
    uint64_t stream_count;
    /**
     * CUDA: the path of the driver's library; null = the system's.
     */
    const char *library;
    /**
     * Length of that.
     */
    uint64_t library_bytes;
    /**
     * Custom: what the engine can do.
     */
    const struct kvt_device_custom_t *custom;
    /**
     * Simulated: its memory; 0 = no limit.
     */
    uint64_t memory_bytes;
    /**
     * Simulated: chooses all that is left to chance.
     */
    uint64_t seed;
    /**
     * Simulated: what a batch takes at least; 0 = 10 us.
     */
    uint64_t latency_ns;
    /**
     * Simulated: what a stream moves; 0 = 20 GB/s.
     */
    uint64_t bytes_per_s;
    /**
     * CUDA: memory of that device, which outlives it: what it gives out (to stores, streamers,
     * and by kvt_device_alloc) comes from there. 0 = the driver is asked.
     */
    uint64_t arena;
    /**
     * How much; 0 with 0.
     */
    uint64_t arena_bytes;
    /**
     * CUDA: other devices of the process (ordinals) whose memory copies may name, too, as what
     * their primary contexts gave out; null = none.
     */
    const uint32_t *peers;
    /**
     * How many, at most 63.
     */
    uint64_t peer_count;
    /**
     * CUDA: the path of cuFile's library, which is loaded when files are to be read straight
     * into device memory (KVT_STREAM_DIRECT); null = the system's.
     */
    const char *cufile;
    /**
     * Length of that.
     */
    uint64_t cufile_bytes;
} kvt_device_opts_t;

/**
 * What a device is and can do.
 */
typedef struct kvt_device_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_DEVICE_ASYNCHRONOUS and so on.
     */
    uint64_t flags;
    /**
     * The kind that it was opened as.
     */
    uint32_t kind;
    /**
     * How many streams it has: work on one is in order.
     */
    uint32_t streams;
    /**
     * The kernels it has: 1 << KVT_DEVICE_KERNEL_* for each.
     */
    uint64_t kernels;
    /**
     * What it has left to give; UINT64_MAX where it does not know.
     */
    uint64_t free_bytes;
} kvt_device_info_t;

/**
 * Memory that a device has set aside.
 */
typedef struct kvt_device_memory_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Where it starts: a multiple of 256.
     */
    uint64_t address;
    /**
     * How long it is.
     */
    uint64_t bytes;
    /**
     * The library's own: which one it is.
     */
    uint64_t number;
    /**
     * KVT_MEMORY_*: where the address is valid.
     */
    uint32_t memory;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_device_memory_t;

/**
 * A copy between tokens as an engine has them and a plane: the same tokens, heads and numbers
 * one after the other, without gaps. Stands in arrays only.
 */
typedef struct kvt_copy_t {
    /**
     * KVT_COPY_CHECKSUM or 0.
     */
    uint64_t flags;
    /**
     * Where the engine has the tokens. It says how many it has.
     */
    struct kvt_view_t view;
    /**
     * The plane: tokens * heads * run_bytes bytes.
     */
    void *plane;
    /**
     * KVT_MEMORY_*: where that is.
     */
    uint32_t plane_memory;
    /**
     * KVT_COPY_GATHER or KVT_COPY_SCATTER.
     */
    uint32_t direction;
    /**
     * The first token that is copied.
     */
    uint32_t first_token;
    /**
     * How many; 0 = all from there on.
     */
    uint32_t tokens;
    /**
     * Receives the checksum (as kvt_checksum makes it), if one was wanted and the device sums. An
     * asynchronous device is asked for it later: kvt_device_checksums.
     */
    uint64_t sum;
} kvt_copy_t;

/**
 * How a device is put to the test.
 */
typedef struct kvt_conformance_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_CONFORMANCE_CLOSES or 0.
     */
    uint64_t flags;
    /**
     * Chooses all that is left to chance.
     */
    uint64_t seed;
    /**
     * How long an event may take; 0 = 30 s.
     */
    uint64_t patience_ns;
    /**
     * How often what is left to chance is tried; 0 = 40, at most 100,000.
     */
    uint32_t rounds;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_conformance_opts_t;

/**
 * Hears of a check: its name, a KVT_VERDICT_*, and why. Texts are UTF-8, not NUL-terminated,
 * borrowed for the call. Called by the thread that called. It must not unwind.
 */
typedef void (*kvt_conformance_fn)(void *user_data,
                                   const char *name,
                                   uint64_t name_bytes,
                                   uint32_t verdict,
                                   const char *why,
                                   uint64_t why_bytes);

/**
 * How many checks ended how.
 */
typedef struct kvt_conformance_report_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * As they should.
     */
    uint32_t passed;
    /**
     * There was nothing to test.
     */
    uint32_t skipped;
    /**
     * Something is wrong.
     */
    uint32_t failed;
    /**
     * Always 0.
     */
    uint32_t reserved;
} kvt_conformance_report_t;

/**
 * What to read or make.
 */
typedef struct kvt_trace_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_TRACE_*.
     */
    uint64_t flags;
    /**
     * To read: a regular file, plain or zstd.
     */
    const char *path;
    /**
     * Length of the path.
     */
    uint64_t path_bytes;
    /**
     * To read: kvtier, mooncake, weka, sharegpt, azure, oracle or csv; empty = by
     * the content. To make: chat, agent, batch, multitenant or burst.
     */
    const char *kind;
    /**
     * Length of the kind.
     */
    uint64_t kind_bytes;
    /**
     * Tokens of a block, where the file leaves it open; 0 = 512.
     */
    uint64_t block_tokens;
    /**
     * For whatever the file leaves to chance, and for everything made; 0 = 7.
     */
    uint64_t seed;
    /**
     * Mean time between starts of sessions that the file does not tell; 0 = usual.
     */
    uint64_t gap_ns;
    /**
     * How long it goes on, where that is chosen here; 0 = a day.
     */
    uint64_t duration_ns;
    /**
     * To make: sessions that start in a second; 0 = usual.
     */
    double rate;
} kvt_trace_opts_t;

/**
 * What is in a trace.
 */
typedef struct kvt_trace_info_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Requests.
     */
    uint64_t requests;
    /**
     * Blocks they ask for.
     */
    uint64_t references;
    /**
     * Different ones of those.
     */
    uint64_t blocks;
    /**
     * Tokens of a block.
     */
    uint64_t block_tokens;
    /**
     * Sessions, named or told from the paths.
     */
    uint64_t sessions;
    /**
     * From the first request to the last.
     */
    uint64_t duration_ns;
    /**
     * Tokens asked for.
     */
    uint64_t tokens;
    /**
     * Of those, what an unbounded cache finds.
     */
    uint64_t known_tokens;
} kvt_trace_info_t;

/**
 * Hears of the progress of a replay; returns 0 to stop it. Called on the calling
 * thread, under no lock. It must not unwind.
 */
typedef int32_t (*kvt_progress_fn)(void *user_data, uint64_t requests_done, uint64_t requests);

/**
 * How to replay.
 */
typedef struct kvt_replay_opts_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * KVT_REPLAY_*.
     */
    uint64_t flags;
    /**
     * The policy, such as "lru".
     */
    const char *spec;
    /**
     * Length of the spec.
     */
    uint64_t spec_bytes;
    /**
     * Blocks that fit; at least 1.
     */
    uint64_t capacity_blocks;
    /**
     * Requests that are replayed before counting starts.
     */
    uint64_t warm_up;
    /**
     * Objects are cells of so many layers; 0 = whole blocks.
     */
    uint32_t layers;
    /**
     * KVT_HINTS_*.
     */
    uint32_t hints;
    /**
     * Attention cost of a token per token of context, where computing a token costs
     * 1; 0 = as a model of the 70B class.
     */
    double alpha;
    /**
     * Hears of the progress; may be null.
     */
    kvt_progress_fn progress;
    /**
     * Handed to progress.
     */
    void *user_data;
} kvt_replay_opts_t;

/**
 * How a policy did.
 */
typedef struct kvt_replay_report_t {
    /**
     * sizeof of this struct.
     */
    uint64_t struct_size;
    /**
     * Requests counted.
     */
    uint64_t requests;
    /**
     * Blocks asked for.
     */
    uint64_t references;
    /**
     * Of those, found and usable.
     */
    uint64_t hits;
    /**
     * Tokens asked for.
     */
    uint64_t tokens;
    /**
     * Of those, found.
     */
    uint64_t hit_tokens;
    /**
     * Recompute cost of everything asked for.
     */
    double cost;
    /**
     * Of that, found.
     */
    double hit_cost;
    /**
     * Objects inserted.
     */
    uint64_t inserts;
    /**
     * Objects evicted.
     */
    uint64_t evictions;
    /**
     * References to what was evicted and wanted again, per reference.
     */
    double re_prefill_rate;
    /**
     * Jain's index over sessions.
     */
    double jain_sessions;
    /**
     * Jain's index over tenants.
     */
    double jain_tenants;
    /**
     * Mean share of the capacity in use since the first eviction.
     */
    double utilisation;
    /**
     * Half of the eviction calls took at most this.
     */
    uint64_t decision_p50_ns;
    /**
     * 99 of 100 took at most this.
     */
    uint64_t decision_p99_ns;
    /**
     * The longest.
     */
    uint64_t decision_max_ns;
    /**
     * The whole replay, by the machine's clock.
     */
    uint64_t run_ns;
} kvt_replay_report_t;

/**
 * Success.
 */
#define KVT_OK 0

/**
 * An argument is null, out of range or has unknown flags.
 */
#define KVT_E_INVALID (-1)

/**
 * A handle is null, stale, of another type or not from this library.
 */
#define KVT_E_HANDLE (-2)

/**
 * A struct sets fields this library does not know yet.
 */
#define KVT_E_TOO_NEW (-3)

/**
 * An output buffer is too small; the size needed was reported.
 */
#define KVT_E_TOO_SMALL (-4)

/**
 * The system has no memory for this.
 */
#define KVT_E_NOMEM (-5)

/**
 * The budget of that tier has no room.
 */
#define KVT_E_BUDGET (-6)

/**
 * A bounded queue or table is full: drain, free, retry.
 */
#define KVT_E_AGAIN (-7)

/**
 * Still in use by work in flight.
 */
#define KVT_E_BUSY (-8)

/**
 * The object is closed or closing.
 */
#define KVT_E_CLOSED (-9)

/**
 * Cancelled before it was done.
 */
#define KVT_E_CANCELLED (-10)

/**
 * The deadline passed first.
 */
#define KVT_E_TIMEOUT (-11)

/**
 * Not allowed from inside a callback.
 */
#define KVT_E_REENTRANT (-12)

/**
 * This process is a fork of the one that opened the library.
 */
#define KVT_E_FORKED (-13)

/**
 * A defect inside the library was caught; the object is poisoned.
 */
#define KVT_E_PANIC (-14)

/**
 * Header and library do not fit together.
 */
#define KVT_E_ABI (-15)

/**
 * Not built into this library.
 */
#define KVT_E_UNSUPPORTED (-16)

/**
 * This machine does not offer it.
 */
#define KVT_E_UNAVAILABLE (-17)

/**
 * No such thing.
 */
#define KVT_E_NOT_FOUND (-18)

/**
 * Bytes do not match their checksum: treat them as absent.
 */
#define KVT_E_CORRUPT (-19)

/**
 * The operating system reported an error.
 */
#define KVT_E_IO (-20)

/**
 * A spec string is malformed; the error carries the offset.
 */
#define KVT_E_SPEC (-21)

/**
 * A documented limit was exceeded.
 */
#define KVT_E_LIMIT (-22)

/**
 * The locked-memory quota is too small.
 */
#define KVT_E_PIN_QUOTA (-23)

/**
 * The object is not in a state that allows this.
 */
#define KVT_E_STATE (-24)

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The constant's name of a status, such as "KVT_E_BUSY".
 *
 * @param status  Any number; one this library does not know is "KVT_E_UNKNOWN".
 * @return A NUL-terminated string that lives as long as the library. Never null.
 *
 * Threading: any thread, also in callbacks and after fork. Since 0.1.
 */
const char *kvt_status_name(kvt_status_t status);

/**
 * What a status means and what the caller can do about it.
 *
 * @param status  Any number.
 * @return A NUL-terminated sentence that lives as long as the library. Never null.
 *
 * Threading: any thread, also in callbacks and after fork. Since 0.1.
 */
const char *kvt_status_str(kvt_status_t status);

/**
 * The library's version as text, such as "0.1.0".
 *
 * @return A NUL-terminated string that lives as long as the library. Never null.
 *
 * Threading: any thread, also in callbacks and after fork. Since 0.1.
 */
const char *kvt_version_str(void);

/**
 * The library's version as a number: (major << 32) | (minor << 16) | patch.
 *
 * @param out  The number.
 * @return KVT_OK; KVT_E_INVALID when `out` is null.
 *
 * Threading: any thread, also in callbacks and after fork. Since 0.1.
 */
kvt_status_t kvt_version(uint64_t *out);

/**
 * Whether a program compiled against a header can use this library. Call it
 * once, first: kvt_abi_check(KVT_HEADER_VERSION, &err).
 *
 * Before 1.0 a program needs a library of the same minor version and at least
 * the same patch; from 1.0 on one of the same major and at least the same minor.
 *
 * @param header_version  KVT_HEADER_VERSION as the program was compiled.
 * @param err             Explains a mismatch; may be null.
 * @return KVT_OK; KVT_E_ABI.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_abi_check(uint64_t header_version, struct kvt_error_t **err);

/**
 * Reads an error.
 *
 * @param error  The error.
 * @param out    Filled in; start it with KVT_ERROR_INFO_INIT.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Ownership: `out->message` is borrowed until the error is freed or replaced.
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_error_info(const struct kvt_error_t *error, struct kvt_error_info_t *out);

/**
 * The message of an error, for printing.
 *
 * @param error  The error, or null.
 * @return A NUL-terminated UTF-8 string, borrowed until the error is freed or
 *         replaced. Never null: without an error it is an empty one.
 *
 * Threading: any thread. Since 0.1.
 */
const char *kvt_error_message(const struct kvt_error_t *error);

/**
 * Frees an error and clears the variable.
 *
 * @param error  Pointer to the handle; null, or a null handle, is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_error_free(struct kvt_error_t **error);

/**
 * Sets the process-wide log sink, or removes it. Without one the library says
 * nothing; it never writes to standard output or error.
 *
 * @param level      KVT_LOG_*: the most detailed level that is passed on.
 * @param callback   The sink; null removes the present one.
 * @param user_data  Handed to the callback; taken over on success only.
 * @param destroy    Releases user_data; may be null.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID; KVT_E_STATE in a Rust program with a logger of its own;
 *         KVT_E_FORKED.
 *
 * Threading: any thread. The former sink may still be running in another
 * thread when this returns; its destroy is called after that. Since 0.1.
 */
kvt_status_t kvt_log_set(uint32_t level,
                         kvt_log_fn callback,
                         void *user_data,
                         kvt_destroy_fn destroy,
                         struct kvt_error_t **err);

/**
 * How many features there are to ask about.
 *
 * @param out_count  The number.
 * @return KVT_OK; KVT_E_INVALID.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_feature_count(uint64_t *out_count);

/**
 * A feature by its place in the list.
 *
 * @param index  0 to kvt_feature_count - 1.
 * @param out    Filled in; start it with KVT_FEATURE_INIT.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID.
 *
 * Threading: any thread; probes the machine, so not in a hot path. Since 0.1.
 */
kvt_status_t kvt_feature_at(uint64_t index, struct kvt_feature_t *out);

/**
 * A feature by its name.
 *
 * @param name        Such as "cuda", "io_uring", "redis".
 * @param name_bytes  Length of the name.
 * @param out         Filled in; start it with KVT_FEATURE_INIT.
 * @param err         Names the nearest feature; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_LIMIT, KVT_E_INVALID.
 *
 * Threading: any thread; probes the machine, so not in a hot path. Since 0.1.
 */
kvt_status_t kvt_feature_find(const char *name,
                              uint64_t name_bytes,
                              struct kvt_feature_t *out,
                              struct kvt_error_t **err);

/**
 * Checks the grammar of a spec string and gives its canonical form.
 *
 * A spec is a name with optional arguments, such as "qos(inner=s3fifo(small=10%))".
 * Whether the name and its parameters exist is checked where the spec is used.
 *
 * @param spec          The text, UTF-8.
 * @param spec_bytes    Its length.
 * @param out           Receives the canonical form, not NUL-terminated; may be
 *                      null with out_capacity 0 to learn the size.
 * @param out_capacity  Room at `out`.
 * @param out_bytes     Length of the canonical form; also written with
 *                      KVT_E_TOO_SMALL. May be null.
 * @param err           Explains a failure, with the offset; may be null.
 * @return KVT_OK; KVT_E_SPEC, KVT_E_LIMIT, KVT_E_INVALID, KVT_E_TOO_SMALL.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_spec_check(const char *spec,
                            uint64_t spec_bytes,
                            char *out,
                            uint64_t out_capacity,
                            uint64_t *out_bytes,
                            struct kvt_error_t **err);

/**
 * Opens a runtime and starts its threads.
 *
 * @param opts  How; null for defaults.
 * @param out   The runtime; close it with kvt_runtime_close.
 * @param err   Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_SPEC,
 *         KVT_E_NOMEM, KVT_E_IO, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the runtime. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_runtime_open(const struct kvt_runtime_opts_t *opts,
                              struct kvt_runtime_t **out,
                              struct kvt_error_t **err);

/**
 * Closes a runtime: refuses new work, cancels what is open, waits for it and
 * for the threads. Close queues and free buffers first where you can; what is
 * left is reported, not destroyed. A store that is left keeps its directory, its
 * memory and its own threads, which sleep; its moves have ended, calls on it give
 * KVT_E_CLOSED, and kvt_store_close still writes down what it has.
 *
 * @param runtime      Pointer to the handle, cleared on success; null, or a null
 *                     handle, is fine.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @param report       What was left open; may be null. Start it with
 *                     KVT_CLOSE_REPORT_INIT.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY at the deadline (the runtime stays closing and valid:
 *         call again); KVT_E_REENTRANT inside a callback; KVT_E_INVALID, KVT_E_HANDLE,
 *         KVT_E_FORKED.
 *
 * Threading: any thread but the runtime's own. Since 0.1.
 */
kvt_status_t kvt_runtime_close(struct kvt_runtime_t **runtime,
                               uint64_t deadline_ns,
                               struct kvt_close_report_t *report,
                               struct kvt_error_t **err);

/**
 * The runtime's clock: CLOCK_MONOTONIC nanoseconds, for deadlines.
 *
 * @param runtime  The runtime.
 * @param out_ns   The time.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_runtime_now(const struct kvt_runtime_t *runtime, uint64_t *out_ns);

/**
 * Counters of a runtime; also of a poisoned one.
 *
 * @param runtime  The runtime.
 * @param out      Filled in; start it with KVT_RUNTIME_STATS_INIT.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_runtime_stats(const struct kvt_runtime_t *runtime,
                               struct kvt_runtime_stats_t *out);

/**
 * How far an op is.
 *
 * @param op   The op.
 * @param out  Filled in; start it with KVT_OP_INFO_INIT.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_op_info(const struct kvt_op_t *op, struct kvt_op_info_t *out);

/**
 * Waits until an op has reached moments.
 *
 * @param op           The op.
 * @param moments      KVT_OP_ISSUED, _RESOLVED, _RELEASED or several; all are
 *                     waited for.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @return KVT_OK when they are reached, whatever the op's own result (see
 *         kvt_op_info); KVT_E_TIMEOUT; KVT_E_REENTRANT inside a callback;
 *         KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_op_wait(const struct kvt_op_t *op, uint32_t moments, uint64_t deadline_ns);

/**
 * Asks an op to end. One that has not been issued ends at once with
 * KVT_E_CANCELLED; one that runs skips the items it has not begun. An op that
 * is done stays as it is.
 *
 * @param op  The op.
 * @return KVT_OK, also when it is too late; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_op_cancel(const struct kvt_op_t *op);

/**
 * How the items of an op went; also while it runs.
 *
 * @param op            The op.
 * @param first         The first item wanted.
 * @param out           Receives the entries.
 * @param capacity      Room at `out`, in entries, at most 65536.
 * @param stride_bytes  sizeof(kvt_op_item_t).
 * @param out_count     How many were written.
 * @return KVT_OK; KVT_E_INVALID when `first` is beyond the last item;
 *         KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_op_items(const struct kvt_op_t *op,
                          uint64_t first,
                          struct kvt_op_item_t *out,
                          uint64_t capacity,
                          uint64_t stride_bytes,
                          uint64_t *out_count);

/**
 * The words behind an op's failure.
 *
 * @param op   The op.
 * @param out  The error; free it with kvt_error_free.
 * @return KVT_OK; KVT_E_NOT_FOUND when there is nothing to say beyond the
 *         status; KVT_E_STATE before it is resolved; KVT_E_HANDLE,
 *         KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_op_error(const struct kvt_op_t *op, struct kvt_error_t **out);

/**
 * Frees an op handle. The op must have been released: cancel and wait first
 * to get there.
 *
 * @param op  Pointer to the handle, cleared on success; null, or a null handle,
 *            is fine.
 * @return KVT_OK; KVT_E_BUSY before the release; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_op_free(struct kvt_op_t **op);

/**
 * Frees many op handles; stops at the first that cannot be freed.
 *
 * @param ops    The handles, each cleared when freed; null handles are skipped.
 * @param count  How many.
 * @return KVT_OK; KVT_E_BUSY, KVT_E_HANDLE for the first handle that is not
 *         null afterwards; KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_op_free_many(struct kvt_op_t **ops, uint64_t count);

/**
 * Opens a completion queue.
 *
 * @param runtime  Where it belongs.
 * @param opts     How; null for defaults.
 * @param out      The queue; close it with kvt_queue_close.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the queue. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_queue_open(const struct kvt_runtime_t *runtime,
                            const struct kvt_queue_opts_t *opts,
                            struct kvt_queue_t **out,
                            struct kvt_error_t **err);

/**
 * Closes a queue: refuses new work, cancels the ops that report to it and
 * waits for their release. A callback has then seen every completion;
 * completions nobody polled are dropped, their ops stay until freed.
 *
 * @param queue        Pointer to the handle, cleared on success; null, or a null
 *                     handle, is fine.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY at the deadline (the queue stays closing and valid:
 *         call again); KVT_E_REENTRANT inside a callback; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_queue_close(struct kvt_queue_t **queue,
                             uint64_t deadline_ns,
                             struct kvt_error_t **err);

/**
 * Takes completions without waiting; none is not an error.
 *
 * @param queue         A polled queue.
 * @param out           Receives completions, oldest first.
 * @param capacity      Room at `out`, in entries, at most 1048576.
 * @param stride_bytes  sizeof(kvt_completion_t).
 * @param out_count     How many were written.
 * @return KVT_OK; KVT_E_STATE for a queue that calls back; KVT_E_INVALID,
 *         KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, several at once. Since 0.1.
 */
kvt_status_t kvt_queue_poll(const struct kvt_queue_t *queue,
                            struct kvt_completion_t *out,
                            uint64_t capacity,
                            uint64_t stride_bytes,
                            uint64_t *out_count);

/**
 * Takes completions, waiting for the first.
 *
 * @param queue         A polled queue.
 * @param deadline_ns   CLOCK_MONOTONIC; 0 = wait for ever.
 * @param out           Receives completions, oldest first.
 * @param capacity      Room at `out`, in entries, 1 to 1048576.
 * @param stride_bytes  sizeof(kvt_completion_t).
 * @param out_count     How many were written, at least 1.
 * @return KVT_OK; KVT_E_TIMEOUT; KVT_E_CLOSED when the queue closes and nothing
 *         is left; KVT_E_STATE for a queue that calls back; KVT_E_REENTRANT inside
 *         a callback; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, several at once. Since 0.1.
 */
kvt_status_t kvt_queue_wait(const struct kvt_queue_t *queue,
                            uint64_t deadline_ns,
                            struct kvt_completion_t *out,
                            uint64_t capacity,
                            uint64_t stride_bytes,
                            uint64_t *out_count);

/**
 * A descriptor for poll, select and epoll: readable exactly while completions
 * are waiting. Do not read, write or close it: draining the queue resets it,
 * closing the queue closes it.
 *
 * @param queue   A polled queue.
 * @param out_fd  The descriptor (an eventfd, close-on-exec, non-blocking).
 * @return KVT_OK; KVT_E_STATE for a queue that calls back; KVT_E_IO,
 *         KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_queue_fd(const struct kvt_queue_t *queue, int32_t *out_fd);

/**
 * Counters of a queue.
 *
 * @param queue  The queue.
 * @param out    Filled in; start it with KVT_QUEUE_STATS_INIT.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_queue_stats(const struct kvt_queue_t *queue, struct kvt_queue_stats_t *out);

/**
 * Opens a budget.
 *
 * @param runtime  Where it belongs.
 * @param opts     Limits; null for defaults.
 * @param out      The budget; close it with kvt_budget_close.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUDGET (strict alone), KVT_E_INVALID, KVT_E_TOO_NEW,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the budget. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_budget_open(const struct kvt_runtime_t *runtime,
                             const struct kvt_budget_opts_t *opts,
                             struct kvt_budget_t **out,
                             struct kvt_error_t **err);

/**
 * Closes a budget: reservations that wait end with KVT_E_CLOSED, nothing more
 * is granted. Accounts stay until they are closed and can still give back.
 *
 * @param budget  Pointer to the handle, cleared on success; null, or a null
 *                handle, is fine.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_budget_close(struct kvt_budget_t **budget, struct kvt_error_t **err);

/**
 * Changes a tier's limit. Below what is in use: nothing more is granted until
 * the owners, who are asked to, have given back.
 *
 * @param budget  The budget.
 * @param tier    KVT_TIER_*.
 * @param bytes   The new limit; host and pinned are cut to what the machine has.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_budget_resize(const struct kvt_budget_t *budget,
                               uint32_t tier,
                               uint64_t bytes,
                               struct kvt_error_t **err);

/**
 * What this process may use, measured now.
 *
 * @param budget  The budget.
 * @param out     Filled in; start it with KVT_BUDGET_REPORT_INIT.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread; reads files, so not in a hot path. Since 0.1.
 */
kvt_status_t kvt_budget_report(const struct kvt_budget_t *budget, struct kvt_budget_report_t *out);

/**
 * Counters of one tier.
 *
 * @param budget  The budget.
 * @param tier    KVT_TIER_*.
 * @param out     Filled in; start it with KVT_TIER_REPORT_INIT.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_budget_tier(const struct kvt_budget_t *budget,
                             uint32_t tier,
                             struct kvt_tier_report_t *out);

/**
 * Opens an account in a budget.
 *
 * @param budget  The budget.
 * @param opts    Name, priority and reclaimer; null for none.
 * @param out     The account; close it with kvt_account_close.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the account. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_account_open(const struct kvt_budget_t *budget,
                              const struct kvt_account_opts_t *opts,
                              struct kvt_account_t **out,
                              struct kvt_error_t **err);

/**
 * Reserves bytes now, or fails. Never waits and never passes those who wait.
 *
 * @param account  The account.
 * @param tier     KVT_TIER_*.
 * @param bytes    How many.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUDGET when they do not fit; KVT_E_INVALID,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_account_reserve(const struct kvt_account_t *account,
                                 uint32_t tier,
                                 uint64_t bytes,
                                 struct kvt_error_t **err);

/**
 * Reserves bytes when they can be had: first come, first served, and owners
 * with a reclaimer are asked to give back. The op ends with KVT_OK when the
 * bytes are reserved.
 *
 * @param account  The account.
 * @param tier     KVT_TIER_*.
 * @param bytes    How many.
 * @param opts     Queue, tag, deadline; null for none.
 * @param out      The op; null when a queue tells of it.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK when submitted; KVT_E_BUDGET when they can never fit;
 *         KVT_E_AGAIN (at most 4096 wait), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED,
 *         KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. The op ends with
 *         KVT_E_BUDGET when the limit shrinks below it.
 *
 * Ownership: the caller owns the op. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_account_reserve_later(const struct kvt_account_t *account,
                                       uint32_t tier,
                                       uint64_t bytes,
                                       const struct kvt_submit_opts_t *opts,
                                       struct kvt_op_t **out,
                                       struct kvt_error_t **err);

/**
 * Turns reserved bytes into used ones; the difference is free again.
 *
 * @param account         The account.
 * @param tier            KVT_TIER_*.
 * @param reserved_bytes  How many of the reserved bytes this settles.
 * @param used_bytes      How many of those are used; 0 gives all back.
 * @param err             Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID when fewer are reserved; KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_account_commit(const struct kvt_account_t *account,
                                uint32_t tier,
                                uint64_t reserved_bytes,
                                uint64_t used_bytes,
                                struct kvt_error_t **err);

/**
 * Gives used bytes back.
 *
 * @param account  The account.
 * @param tier     KVT_TIER_*.
 * @param bytes    How many.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID when fewer are used; KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_account_release(const struct kvt_account_t *account,
                                 uint32_t tier,
                                 uint64_t bytes,
                                 struct kvt_error_t **err);

/**
 * What an account holds of a tier.
 *
 * @param account             The account.
 * @param tier                KVT_TIER_*.
 * @param out_reserved_bytes  Promised to it; may be null.
 * @param out_used_bytes      In use by it; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_account_held(const struct kvt_account_t *account,
                              uint32_t tier,
                              uint64_t *out_reserved_bytes,
                              uint64_t *out_used_bytes);

/**
 * Closes an account. Everything must have been given back. Waits for a call of
 * its reclaimer that is under way, except inside a callback.
 *
 * @param account  Pointer to the handle, cleared on success; null, or a null
 *                 handle, is fine.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY while it holds or awaits bytes, or, inside a
 *         callback, while its reclaimer is being called; KVT_E_HANDLE,
 *         KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_account_close(struct kvt_account_t **account, struct kvt_error_t **err);

/**
 * Allocates a buffer.
 *
 * @param runtime  Where it belongs.
 * @param opts     Size and kind; `bytes` must be set.
 * @param out      The buffer; free it with kvt_buffer_free.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOMEM, KVT_E_IO, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_PIN_QUOTA, KVT_E_UNAVAILABLE
 *         (no reserved huge pages), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC; with KVT_BUFFER_PREFAULT also
 *         KVT_E_AGAIN, KVT_E_CANCELLED beside a close, and KVT_E_REENTRANT inside a
 *         callback.
 *
 * Ownership: the caller owns the buffer; it is not inherited by forked
 * children. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_buffer_alloc(const struct kvt_runtime_t *runtime,
                              const struct kvt_buffer_opts_t *opts,
                              struct kvt_buffer_t **out,
                              struct kvt_error_t **err);

/**
 * Makes memory of yours usable for ops.
 *
 * @param runtime    Where it belongs.
 * @param address    Where the memory starts.
 * @param size       Its size in bytes.
 * @param user_data  Handed to destroy; taken over on success only.
 * @param destroy    Called once, when the buffer is freed and no op uses it any
 *                   more; may be null.
 * @param out        The buffer; free it with kvt_buffer_free.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the memory stays yours and must outlive the buffer. Threading:
 * any thread. Since 0.1.
 */
kvt_status_t kvt_buffer_wrap(const struct kvt_runtime_t *runtime,
                             void *address,
                             uint64_t size,
                             void *user_data,
                             kvt_destroy_fn destroy,
                             struct kvt_buffer_t **out,
                             struct kvt_error_t **err);

/**
 * Frees a buffer.
 *
 * @param buffer  Pointer to the handle, cleared on success; null, or a null
 *                handle, is fine.
 * @return KVT_OK; KVT_E_BUSY while an op uses it; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_buffer_free(struct kvt_buffer_t **buffer);

/**
 * Where a buffer's bytes are.
 *
 * @param buffer       The buffer.
 * @param out_address  Where it starts; may be null.
 * @param out_bytes    Its usable size; may be null.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Ownership: the address is borrowed until the buffer is freed. Threading: any
 * thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_buffer_address(const struct kvt_buffer_t *buffer,
                                void **out_address,
                                uint64_t *out_bytes);

/**
 * What a buffer is.
 *
 * @param buffer  The buffer.
 * @param out     Filled in; start it with KVT_BUFFER_INFO_INIT.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_buffer_info(const struct kvt_buffer_t *buffer, struct kvt_buffer_info_t *out);

/**
 * Submits work on buffers: one op for all items, or, with KVT_SUBMIT_EACH, one
 * per item. All or nothing; never waits. Items of one op run in any order and
 * on several workers, so they must not write what another reads.
 *
 * @param runtime       Who does it.
 * @param opts          Queue, tag, deadline, priority; null for none.
 * @param items         The work; copied, so yours again when this returns.
 * @param count         How many items, 1 to 65536.
 * @param stride_bytes  sizeof(kvt_buffer_item_t).
 * @param out_ops       Receives the op (`count` ops with KVT_SUBMIT_EACH), to be
 *                      freed by you; null when the queue alone tells of the end.
 * @param err           Explains a failure; may be null.
 * @return KVT_OK when submitted; KVT_E_AGAIN when the queue or the runtime is
 *         full; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the ops; the buffers' bytes are the library's
 * until the release. Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_buffer_submit(const struct kvt_runtime_t *runtime,
                               const struct kvt_submit_opts_t *opts,
                               const struct kvt_buffer_item_t *items,
                               uint64_t count,
                               uint64_t stride_bytes,
                               struct kvt_op_t **out_ops,
                               struct kvt_error_t **err);

/**
 * The checksum of bytes, as ops compute it: XXH3-64 of every 4096 bytes, then
 * XXH3-64 of those sums as little-endian numbers.
 *
 * @param data       The bytes.
 * @param size       How many.
 * @param out_value  The checksum.
 * @return KVT_OK; KVT_E_INVALID.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_checksum(const void *data, uint64_t size, uint64_t *out_value);

/**
 * Opens a store: makes or recovers its disk, and starts its threads. Waits for
 * the disk, and for an answer of its remote as long as `connect` and `timeout` say; one that
 * does not answer is tried again later, unless the spec requires it.
 *
 * @param runtime  Where it belongs.
 * @param budget   Who pays for its memory, a budget of that runtime; null = one of its own,
 *                 of what the machine or the cgroup can give now, less a reserve.
 * @param opts     What it is to be like; null for defaults.
 * @param out      The store; close it with kvt_store_close.
 * @param err      Explains a failure, with the offset in the spec and the nearest
 *                 name that exists; may be null.
 * @return KVT_OK; KVT_E_SPEC, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_BUDGET, KVT_E_BUSY (the directory, or the control socket's
 *         path, is in use), KVT_E_STATE (what is at that path is no socket of this
 *         user's), KVT_E_NOT_FOUND (a folder above that of the disk is missing), KVT_E_IO,
 *         KVT_E_CORRUPT, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_UNAVAILABLE (a remote that is required, or that refuses us),
 *         KVT_E_UNSUPPORTED (a remote that is not built in), KVT_E_PANIC.
 *
 * Ownership: the caller owns the store. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_store_open(const struct kvt_runtime_t *runtime,
                            const struct kvt_budget_t *budget,
                            const struct kvt_store_opts_t *opts,
                            struct kvt_store_t **out,
                            struct kvt_error_t **err);

/**
 * Closes a store: refuses new work, cancels what is open, waits for it and for
 * the threads, and lets the directory go. Before that, full chunks that are in
 * memory only are written to disk, as far as admission and room allow and unless
 * it says write=never; what is left in memory is gone. Namespaces and sessions
 * that are left open give KVT_E_CLOSED from then on and are closed as usual;
 * results of ops stay.
 *
 * @param store        Pointer to the handle, cleared on success; null, or a null
 *                     handle, is fine.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY at the deadline (the store stays closing and valid:
 *         call again); KVT_E_IO when the disk failed at the end (all the same it is
 *         closed: call again to free the handle); KVT_E_REENTRANT inside a callback;
 *         KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_store_close(struct kvt_store_t **store,
                             uint64_t deadline_ns,
                             struct kvt_error_t **err);

/**
 * What a store counts and has; also of a poisoned one.
 *
 * @param store  The store.
 * @param out    Filled in; start it with KVT_STORE_STATS_INIT.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_store_stats(const struct kvt_store_t *store, struct kvt_store_stats_t *out);

/**
 * The same numbers as text, in the format that Prometheus collects.
 *
 * @param store         The store.
 * @param out           Receives the text, not NUL-terminated; may be null with
 *                      out_capacity 0 to learn the size.
 * @param out_capacity  Room at `out`. Numbers grow: leave some to spare.
 * @param out_bytes     Length of the text; also written with KVT_E_TOO_SMALL. May
 *                      be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_store_metrics(const struct kvt_store_t *store,
                               char *out,
                               uint64_t out_capacity,
                               uint64_t *out_bytes);

/**
 * Opens a namespace of a store, or finds it: equal identities and layouts are
 * the same one. What a store found on disk is there again under its key.
 *
 * @param store     The store.
 * @param identity  Who may share; null = all fields absent.
 * @param layout    What the KV is made of.
 * @param flags     KVT_NAMESPACE_*.
 * @param out       The namespace; close it with kvt_namespace_close.
 * @param err       Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (also when it is open with other flags),
 *         KVT_E_SPEC (the recipe names an unknown codec), KVT_E_LIMIT (65,536
 *         namespaces, or those of 64 layouts, are open or have chunks that are
 *         held or pinned; what nobody has open gives way), KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the namespace; structs and arrays are copied.
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_namespace_open(const struct kvt_store_t *store,
                                const struct kvt_identity_t *identity,
                                const struct kvt_layout_t *layout,
                                uint64_t flags,
                                struct kvt_namespace_t **out,
                                struct kvt_error_t **err);

/**
 * The key of a namespace: what its identity and layout come to.
 *
 * @param ns    The namespace.
 * @param out_key  Receives KVT_KEY_BYTES bytes.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_namespace_key(const struct kvt_namespace_t *ns, uint8_t *out_key);

/**
 * Closes a namespace. Its chunks stay in the store, its sessions stay open.
 *
 * @param ns  Pointer to the handle, cleared on success; null, or a null
 *               handle, is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_close(struct kvt_namespace_t **ns);

/**
 * Says how far a sequence could go on with what a namespace has, and what that
 * takes: for schedulers that choose between places. No use is counted, nothing is
 * held: what is there now may be gone at the next call.
 *
 * @param ns         The namespace.
 * @param tokens        The sequence.
 * @param token_count   How many, at most 2^27.
 * @param ranges        Receives all tokens as ranges, in their order; may be null
 *                      with capacity 0 to learn how many there are.
 * @param capacity      Room there, in entries, at most 2^24.
 * @param stride_bytes  sizeof(kvt_range_t).
 * @param out_count     How many ranges there are; also written with KVT_E_TOO_SMALL.
 *                      May be null.
 * @param out           The sum of it; start it with KVT_LOOKUP_INIT. May be null.
 * @param err           Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_INVALID, KVT_E_NOMEM,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_lookup(const struct kvt_namespace_t *ns,
                                  const uint32_t *tokens,
                                  uint64_t token_count,
                                  struct kvt_range_t *ranges,
                                  uint64_t capacity,
                                  uint64_t stride_bytes,
                                  uint64_t *out_count,
                                  struct kvt_lookup_t *out,
                                  struct kvt_error_t **err);

/**
 * The same for a sequence whose chunks' keys are known (docs/keys.md says how they
 * are made).
 *
 * @param ns         The namespace.
 * @param keys          The keys of its full chunks, KVT_KEY_BYTES each.
 * @param key_count     How many.
 * @param token_count   Tokens of the sequence: as many as the keys stand for, or
 *                      some more that fill no chunk.
 * @param ranges        See kvt_namespace_lookup.
 * @param capacity      See kvt_namespace_lookup.
 * @param stride_bytes  See kvt_namespace_lookup.
 * @param out_count     See kvt_namespace_lookup.
 * @param out           See kvt_namespace_lookup.
 * @param err           Explains a failure; may be null.
 * @return As kvt_namespace_lookup.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
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

/**
 * Says of chunks whether a namespace has them, and where. No use is counted, nothing
 * is held.
 *
 * @param ns      The namespace.
 * @param keys       Keys of full chunks, KVT_KEY_BYTES each.
 * @param key_count  How many, at most 2^27.
 * @param out        Receives a byte for each: KVT_EXISTS_WHOLE when every layer of it
 *                   is in some tier of the store, and 1 << KVT_TIER_* for each tier
 *                   that has every layer. 1 << KVT_TIER_REMOTE is a hint, and never makes
 *                   it whole: the remote had all of it when that was last heard of, and is
 *                   not left alone now. 0 = it is not there, or layers of it are missing.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_exists(const struct kvt_namespace_t *ns,
                                  const uint8_t *keys,
                                  uint64_t key_count,
                                  uint8_t *out);

/**
 * Tells what the engine took to compute tokens: plans go by what was observed.
 *
 * @param ns           The namespace.
 * @param context_tokens  Tokens before the first one that was computed.
 * @param tokens          How many were computed, at least 1.
 * @param duration_ns              How long that took, 1 to an hour.
 * @param err             Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_observe_prefill(const struct kvt_namespace_t *ns,
                                           uint64_t context_tokens,
                                           uint64_t tokens,
                                           uint64_t duration_ns,
                                           struct kvt_error_t **err);

/**
 * Fixes what computing costs, whatever is observed.
 *
 * @param ns  The namespace.
 * @param cost   alpha_ns and beta_ns of it, 0 to 1e15 each, are read; null = go by
 *               what is observed again.
 * @param err    Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_set_prefill_cost(const struct kvt_namespace_t *ns,
                                       const struct kvt_prefill_cost_t *cost,
                                       struct kvt_error_t **err);

/**
 * What computing costs, as plans see it now.
 *
 * @param ns  The namespace.
 * @param out    Filled in; start it with KVT_PREFILL_COST_INIT.
 * @return KVT_OK; KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_prefill_cost(const struct kvt_namespace_t *ns, struct kvt_prefill_cost_t *out);

/**
 * Reads what changed in a store, the oldest first. The store keeps the newest events
 * (`events` of its spec) for any number of readers; one that is too slow hears how
 * many it has missed, and asks kvt_namespace_lookup or _exists.
 *
 * @param store         The store.
 * @param cursor        In: the number of the first event that is wanted, 0 at the
 *                      start, UINT64_MAX for those to come. Out: that of the next
 *                      call.
 * @param events        Receives them.
 * @param capacity      Room there, in entries, at most 2^24; 0 = only move the cursor
 *                      to what is still known.
 * @param stride_bytes  sizeof(kvt_store_event_t).
 * @param out_count     How many were written.
 * @param out_missed    How many between cursor and the next call's were lost; may be
 *                      null.
 * @return KVT_OK, also when there is none; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_store_events(const struct kvt_store_t *store,
                              uint64_t *cursor,
                              struct kvt_store_event_t *events,
                              uint64_t capacity,
                              uint64_t stride_bytes,
                              uint64_t *out_count,
                              uint64_t *out_missed);

/**
 * Begins an op that ends when there is an event to read: one with the number `from`, or a later
 * one. Never waits. The op's value is how many there are; more may have come when they are read.
 * Its queue is the descriptor (kvt_queue_fd) or the callback by which a reader is woken. One that
 * was woken reads all (kvt_store_events), and watches again from where that has left its cursor.
 *
 * @param store   The store.
 * @param from    The number of the first event that is wanted, as kvt_store_events has left it
 *                in its cursor; UINT64_MAX for the next one to come.
 * @param opts    Queue, tag, deadline; null for defaults.
 * @param out_op  Receives the op; null with a queue to be told by that alone.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_AGAIN (1,024 watches wait, as many ops are under way as may be, or the
 *         queue is full), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the op. A store that is closed ends it with KVT_E_CANCELLED.
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_store_watch(const struct kvt_store_t *store,
                             uint64_t from,
                             const struct kvt_submit_opts_t *opts,
                             struct kvt_op_t **out_op,
                             struct kvt_error_t **err);

/**
 * Goes on with another policy for a tier. It is told of every chunk with its last use and
 * its uses, and of what the one before has learned if it is of its kind: 0.1 to 0.2 s for
 * a million chunks, in which the store answers nobody. The next opening goes by its spec.
 *
 * @param store       The store.
 * @param tier        KVT_TIER_HOST or KVT_TIER_DISK.
 * @param spec        The policy, as in the store's spec.
 * @param spec_bytes  Its length.
 * @param err         Explains a failure, with the offset in the spec and the nearest name
 *                    that exists; may be null.
 * @return KVT_OK; KVT_E_SPEC, KVT_E_LIMIT, KVT_E_NOT_FOUND when there is no disk,
 *         KVT_E_UNSUPPORTED for another tier, KVT_E_INVALID, KVT_E_NOMEM,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. Nothing changes on
 *         failure.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_store_set_policy(const struct kvt_store_t *store,
                                  uint32_t tier,
                                  const char *spec,
                                  uint64_t spec_bytes,
                                  struct kvt_error_t **err);

/**
 * Changes how many bytes of cells a store may have in memory, or of files on disk. What
 * is more than that leaves as it would for want of room, while everything else goes on:
 * nothing waits for it. The account of a budget bounds memory as well. The next opening
 * goes by its spec.
 *
 * @param store  The store.
 * @param tier   KVT_TIER_HOST or KVT_TIER_DISK.
 * @param bytes  Most bytes; of memory at least 64 KiB, of a disk at least what an opening
 *               wants.
 * @param err    Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID or KVT_E_LIMIT when it is too little,
 *         KVT_E_NOT_FOUND when there is no disk, KVT_E_UNSUPPORTED for another tier,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. Nothing
 *         changes on failure.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_store_set_limit(const struct kvt_store_t *store,
                                  uint32_t tier,
                                  uint64_t bytes,
                                  struct kvt_error_t **err);

/**
 * The last evictions of a tier, the oldest of them first. The store keeps 4,096 of each
 * tier; by their numbers a reader knows what it has seen, and what it has missed.
 *
 * @param store         The store.
 * @param tier          KVT_TIER_HOST or KVT_TIER_DISK.
 * @param entries       Receives them: `id` is the first eight bytes of the chunk's key,
 *                      little-endian (where policies choose other things, theirs),
 *                      `units` are blocks of 4 KiB, times CLOCK_MONOTONIC.
 * @param capacity      Room there, in entries.
 * @param stride_bytes  sizeof(kvt_policy_log_entry_t).
 * @param out_count     How many were written.
 * @return KVT_OK; KVT_E_NOT_FOUND when there is no disk, KVT_E_UNSUPPORTED for
 *         another tier, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_store_evictions(const struct kvt_store_t *store,
                                 uint32_t tier,
                                 struct kvt_policy_log_entry_t *entries,
                                 uint64_t capacity,
                                 uint64_t stride_bytes,
                                 uint64_t *out_count);

/**
 * What each tenant has moved, by number; last, where there are more tenants than are told
 * apart, the rest of them as one.
 *
 * @param store         The store.
 * @param rows          Receives them; may be null with capacity 0 to learn how many
 *                      there are.
 * @param capacity      Room there, in entries, at most 2^24; 1,025 are enough.
 * @param stride_bytes  sizeof(kvt_tenant_t).
 * @param out_count     How many there are; also written with KVT_E_TOO_SMALL. May be
 *                      null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_store_tenants(const struct kvt_store_t *store,
                               struct kvt_tenant_t *rows,
                               uint64_t capacity,
                               uint64_t stride_bytes,
                               uint64_t *out_count);

/**
 * How long gets, puts, the store's own work and its policies' choices took: a row for
 * each KVT_TIMED_*, in their order, also where nothing was timed yet. Moves count that
 * brought or stored everything, from their call (or the engine's event) to their end.
 * kvt_store_metrics has the same as histograms.
 *
 * @param store         The store.
 * @param rows          Receives them; may be null with capacity 0 to learn how many
 *                      there are.
 * @param capacity      Room there, in entries, at most 2^24; 32 are enough.
 * @param stride_bytes  sizeof(kvt_latency_t).
 * @param out_count     How many there are; also written with KVT_E_TOO_SMALL. May be
 *                      null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_store_latencies(const struct kvt_store_t *store,
                                 struct kvt_latency_t *rows,
                                 uint64_t capacity,
                                 uint64_t stride_bytes,
                                 uint64_t *out_count);

/**
 * What a store counts of its remote; also of a poisoned one. Of a store without a remote all
 * is 0.
 *
 * @param store  The store.
 * @param out    Filled in; start it with KVT_REMOTE_STATS_INIT.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_store_remote_stats(const struct kvt_store_t *store, struct kvt_remote_stats_t *out);

/**
 * Opens a session without tokens.
 *
 * @param ns  Its namespace, which it keeps.
 * @param opts   Who asks; null for nothing.
 * @param out    The session; close it with kvt_session_close.
 * @param err    Explains a failure; may be null.
 * @return KVT_OK; KVT_E_AGAIN when as many are open as may be, KVT_E_INVALID,
 *         KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the session. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_session_open(const struct kvt_namespace_t *ns,
                              const struct kvt_session_opts_t *opts,
                              struct kvt_session_t **out,
                              struct kvt_error_t **err);

/**
 * Opens another session that goes on from where one is: it has the same tokens
 * and shares their full chunks.
 *
 * @param session  The session, which stays as it is.
 * @param opts     Who asks; null for nothing. Nothing is taken from the other one.
 * @param out      The new session; close it with kvt_session_close.
 * @param err      Explains a failure; may be null.
 * @return As kvt_session_open.
 *
 * Ownership: the caller owns the new session. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_session_fork(const struct kvt_session_t *session,
                              const struct kvt_session_opts_t *opts,
                              struct kvt_session_t **out,
                              struct kvt_error_t **err);

/**
 * Adds tokens to a session. Chunks that they fill and that are in the store are
 * held from then on.
 *
 * @param session  The session.
 * @param tokens   The tokens; copied.
 * @param count    How many; a session has at most 2^27.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_LIMIT, KVT_E_INVALID, KVT_E_NOMEM, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. Nothing changes on failure.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_session_append(const struct kvt_session_t *session,
                                const uint32_t *tokens,
                                uint64_t count,
                                struct kvt_error_t **err);

/**
 * Cuts a session. Moves that were submitted go on.
 *
 * @param session  The session.
 * @param tokens   How many of its tokens are left.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID when it has fewer; KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_session_truncate(const struct kvt_session_t *session,
                                  uint64_t tokens,
                                  struct kvt_error_t **err);

/**
 * Keeps chunks of a session longer than their use says, also when it is closed:
 * until a time, unless nothing else may leave. Of two pins of a chunk the
 * stronger counts: the higher priority, the later time.
 *
 * @param session      The session.
 * @param first_token  Where they begin, a multiple of a chunk's tokens.
 * @param tokens       How many, up to a multiple or the end; 0 = to the end.
 * @param priority     At most 255; what has less is given up first.
 * @param until_ns     CLOCK_MONOTONIC; 0 = for ever.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT when there are too many chunks,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_session_pin(const struct kvt_session_t *session,
                             uint64_t first_token,
                             uint64_t tokens,
                             uint32_t priority,
                             uint64_t until_ns,
                             struct kvt_error_t **err);

/**
 * Tells the policies what the engine knows of the future of a session, usually
 * when a request of it has ended.
 *
 * @param session  The session.
 * @param hint     The hint; its times are CLOCK_MONOTONIC.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_session_hint(const struct kvt_session_t *session,
                              const struct kvt_policy_hint_t *hint,
                              struct kvt_error_t **err);

/**
 * How far a session is.
 *
 * @param session  The session.
 * @param out      Filled in; start it with KVT_SESSION_INFO_INIT.
 * @return KVT_OK; KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_session_info(const struct kvt_session_t *session, struct kvt_session_info_t *out);

/**
 * Closes a session: its chunks may leave. Moves that were submitted go on.
 *
 * @param session  Pointer to the handle, cleared on success; null, or a null
 *                 handle, is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_close(struct kvt_session_t **session);

/**
 * Opens an event that the program signals itself. It needs no runtime; moves of any
 * store may wait for it.
 *
 * @param flags  None are defined yet: 0.
 * @param out    The event, pending; close it with kvt_ready_event_close.
 * @param err    Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the event. Threading: any thread, also in callbacks.
 * Since 0.1.
 */
kvt_status_t kvt_ready_event_open(uint64_t flags, struct kvt_ready_event_t **out, struct kvt_error_t **err);

/**
 * Signals an event: it has come, for good. Moves that wait for it begin. Never
 * waits; of one that has come already nothing changes.
 *
 * @param event  The event.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_ready_event_signal(const struct kvt_ready_event_t *event);

/**
 * Whether an event has come.
 *
 * @param event      The event.
 * @param out_state  KVT_EVENT_*.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_ready_event_query(const struct kvt_ready_event_t *event, uint32_t *out_state);

/**
 * Closes an event. Moves that wait for one that has not come end with
 * KVT_E_CANCELLED, and have touched nothing.
 *
 * @param event  Pointer to the handle, cleared on success; null, or a null
 *               handle, is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_ready_event_close(struct kvt_ready_event_t **event);

/**
 * Stores the KV of a transfer: from the engine's tensors into memory, and down
 * from there as the spec says. Cells that are there already are not stored again.
 * Never waits.
 *
 * The op's value (kvt_completion_t, kvt_op_info_t) is how many tokens from the
 * first on were stored without a gap; bytes_done is what was copied. It ends with
 * KVT_E_BUDGET when memory could not be had, or KVT_E_IO when the disk failed; the
 * other cells are stored all the same.
 *
 * @param session    The session; closing it does not end its moves.
 * @param transfer  What, and where it is; copied, tables of pages too.
 * @param opts       Queue, tag, deadline, priority; null for none.
 * @param out_ops    Receives the op (one per layer with KVT_TRANSFER_EACH_LAYER), to
 *                   be freed by you; null when the queue alone tells of the end.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK when submitted; KVT_E_AGAIN when the queue, the runtime or the
 *         store is full; KVT_E_INVALID, KVT_E_UNAVAILABLE (a level that needs a disk,
 *         memory that no device reaches, an event of a device to a store without one),
 *         KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE (also: `after`
 *         is no event of the store's device), KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the ops; the tensors are the library's until the
 * release. Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_put(const struct kvt_session_t *session,
                             const struct kvt_transfer_t *transfer,
                             const struct kvt_submit_opts_t *opts,
                             struct kvt_op_t **out_ops,
                             struct kvt_error_t **err);

/**
 * Loads the KV of a transfer into the engine's tensors, from whatever tier has
 * it. Never waits.
 *
 * The op's value is how many tokens from the first on came without a gap. It ends
 * with KVT_E_NOT_FOUND when something was missing: the other cells came, and
 * the tensors are as they were where nothing came. A deadline turns what is late
 * into a miss.
 *
 * @param session    See kvt_session_put.
 * @param transfer  See kvt_session_put.
 * @param opts       See kvt_session_put.
 * @param out_ops    See kvt_session_put.
 * @param err        Explains a failure; may be null.
 * @return As kvt_session_put.
 *
 * Ownership: as kvt_session_put. Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_get(const struct kvt_session_t *session,
                             const struct kvt_transfer_t *transfer,
                             const struct kvt_submit_opts_t *opts,
                             struct kvt_op_t **out_ops,
                             struct kvt_error_t **err);

/**
 * Brings the KV of a transfer into memory, for a get to come. Never waits. The
 * op's value and result are those of a get.
 *
 * @param session    See kvt_session_put.
 * @param transfer  What; without views.
 * @param opts       See kvt_session_put; KVT_PRIORITY_PREFETCH is what it is for.
 * @param out_ops    See kvt_session_put.
 * @param err        Explains a failure; may be null.
 * @return As kvt_session_put.
 *
 * Ownership: the caller owns the ops. Threading: any thread, also in callbacks.
 * Since 0.1.
 */
kvt_status_t kvt_session_prefetch(const struct kvt_session_t *session,
                                  const struct kvt_transfer_t *transfer,
                                  const struct kvt_submit_opts_t *opts,
                                  struct kvt_op_t **out_ops,
                                  struct kvt_error_t **err);

/**
 * The cheapest way to have the KV of all tokens of a session: what is loaded, what is
 * computed, from what is where, what waits before it, and what both take. No use is
 * counted, nothing is held beyond what the session holds.
 *
 * Without KVT_NAMESPACE_HOLES everything before the first token to be computed is
 * loaded or resident, and all behind it is computed.
 *
 * @param session       The session.
 * @param terms         How the engine will run; null for defaults.
 * @param steps      Receives all tokens as steps, in their order; may be null
 *                      with capacity 0 to learn how many there are.
 * @param capacity      Room there, in entries, at most 2^24.
 * @param stride_bytes  sizeof(kvt_plan_step_t).
 * @param out_count     How many steps there are; also written with
 *                      KVT_E_TOO_SMALL. May be null.
 * @param out           The sum of it; start it with KVT_PLAN_INIT. May be null.
 * @param err           Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_plan(const struct kvt_session_t *session,
                              const struct kvt_plan_terms_t *terms,
                              struct kvt_plan_step_t *steps,
                              uint64_t capacity,
                              uint64_t stride_bytes,
                              uint64_t *out_count,
                              struct kvt_plan_t *out,
                              struct kvt_error_t **err);

/**
 * Adds tokens with media to a session. Where media start in a chunk its key depends on
 * them, and so do the keys of all chunks behind it (docs/keys.md): equal tokens with other
 * images share nothing from there on.
 *
 * @param session   The session.
 * @param sequence  What is added; copied.
 * @param err       Explains a failure; may be null.
 * @return As kvt_session_append; KVT_E_INVALID also for media that do not ascend or
 *         start beyond the tokens, KVT_E_TOO_NEW. Nothing changes on failure.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_session_append_media(const struct kvt_session_t *session,
                                      const struct kvt_sequence_t *sequence,
                                      struct kvt_error_t **err);

/**
 * kvt_namespace_lookup for a sequence with media.
 *
 * @param ns         The namespace.
 * @param sequence      The sequence.
 * @param ranges        See kvt_namespace_lookup.
 * @param capacity      See kvt_namespace_lookup.
 * @param stride_bytes  See kvt_namespace_lookup.
 * @param out_count     See kvt_namespace_lookup.
 * @param out           See kvt_namespace_lookup.
 * @param err           Explains a failure; may be null.
 * @return As kvt_namespace_lookup; KVT_E_TOO_NEW.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_lookup_media(const struct kvt_namespace_t *ns,
                                        const struct kvt_sequence_t *sequence,
                                        struct kvt_range_t *ranges,
                                        uint64_t capacity,
                                        uint64_t stride_bytes,
                                        uint64_t *out_count,
                                        struct kvt_lookup_t *out,
                                        struct kvt_error_t **err);

/**
 * Says what the full chunks of a sequence are called in events and files: the keys that
 * docs/keys.md defines. A router that knows who has which keys finds by them where a prompt's
 * prefix is.
 *
 * @param ns      The namespace.
 * @param sequence   The sequence.
 * @param keys       Receives KVT_KEY_BYTES for each, in their order; may be null with
 *                   capacity 0 to learn how many there are.
 * @param capacity   Room there, in keys.
 * @param out_count  How many there are; also written with KVT_E_TOO_SMALL.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_chunk_keys(const struct kvt_namespace_t *ns,
                                      const struct kvt_sequence_t *sequence,
                                      uint8_t *keys,
                                      uint64_t capacity,
                                      uint64_t *out_count,
                                      struct kvt_error_t **err);

/**
 * Says what blocks are called in events and files: the keys that docs/keys.md defines.
 *
 * @param ns  The namespace.
 * @param names  The names.
 * @param out    Receives KVT_KEY_BYTES for each.
 * @param err    Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_block_keys(const struct kvt_namespace_t *ns,
                                      const struct kvt_block_names_t *names,
                                      uint8_t *out,
                                      struct kvt_error_t **err);

/**
 * Says of blocks whether a namespace has them, and where. No use is counted, nothing
 * is held. The remote is not asked: kvt_session_remote_lookup_blocks does that, and one that was found
 * there has 1 << KVT_TIER_REMOTE alone; without KVT_EXISTS_WHOLE it is not here, but gets and
 * prefetches bring it.
 *
 * @param ns  The namespace.
 * @param names  The names.
 * @param out    Receives a byte for each, as kvt_namespace_exists gives.
 * @param err    Explains a failure; may be null.
 * @return As kvt_namespace_block_keys.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_namespace_blocks_exist(const struct kvt_namespace_t *ns,
                                       const struct kvt_block_names_t *names,
                                       uint8_t *out,
                                       struct kvt_error_t **err);

/**
 * Stores blocks that the engine has named: from its tensors into memory, and down from
 * there as the spec says. Those that are there already are not stored again. Never waits.
 *
 * A block is a chunk of the namespace's layout that continues no other one: it comes and
 * goes by itself. Sessions of the namespace share blocks as they share chunks; tokens have
 * nothing to do with it. The session says who asks: its tenant, priority and turn. Whoever
 * keeps KV by tokens uses kvt_session_put.
 *
 * The op has an item for each block (kvt_op_items), in their order, with the status of
 * that block. Its own status is KVT_OK when all are well, else that of one of them: a miss
 * only where nothing else went wrong. Its value is how many tokens from the first on were
 * stored without a gap.
 *
 * @param session  The session; closing it does not end its moves.
 * @param blocks   What, and where it is; copied, names and tables of pages too.
 * @param opts     Queue, tag, deadline, priority; null for none.
 * @param out_op   Receives the op, to be freed by you; null when the queue alone tells of
 *                 the end.
 * @param err      Explains a failure; may be null.
 * @return As kvt_session_put.
 *
 * Ownership: the caller owns the op; the tensors are the library's until the release.
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_put_blocks(const struct kvt_session_t *session,
                                    const struct kvt_blocks_t *blocks,
                                    const struct kvt_submit_opts_t *opts,
                                    struct kvt_op_t **out_op,
                                    struct kvt_error_t **err);

/**
 * Loads blocks into the engine's tensors, from whatever tier has them; from the remote those that
 * were located there (kvt_session_remote_lookup_blocks). Never waits.
 *
 * The op ends with KVT_E_NOT_FOUND where some are missing: the others came. Its items say
 * which; the tensors of one that did not come may have been written in part.
 *
 * @param session  See kvt_session_put_blocks.
 * @param blocks   See kvt_session_put_blocks.
 * @param opts     See kvt_session_put_blocks.
 * @param out_op   See kvt_session_put_blocks.
 * @param err      Explains a failure; may be null.
 * @return As kvt_session_put.
 *
 * Ownership: as kvt_session_put_blocks. Threading: any thread, also in callbacks.
 * Since 0.1.
 */
kvt_status_t kvt_session_get_blocks(const struct kvt_session_t *session,
                                    const struct kvt_blocks_t *blocks,
                                    const struct kvt_submit_opts_t *opts,
                                    struct kvt_op_t **out_op,
                                    struct kvt_error_t **err);

/**
 * Brings blocks into memory, for a get to come. Never waits. The op's items are as those
 * of a get.
 *
 * @param session  See kvt_session_put_blocks.
 * @param blocks   What; without views.
 * @param opts     See kvt_session_put_blocks; KVT_PRIORITY_PREFETCH is what it is for.
 * @param out_op   See kvt_session_put_blocks.
 * @param err      Explains a failure; may be null.
 * @return As kvt_session_put.
 *
 * Ownership: the caller owns the op. Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_prefetch_blocks(const struct kvt_session_t *session,
                                         const struct kvt_blocks_t *blocks,
                                         const struct kvt_submit_opts_t *opts,
                                         struct kvt_op_t **out_op,
                                         struct kvt_error_t **err);

/**
 * Takes blocks away that nobody holds: out of all tiers. Those that moves or sessions hold
 * (kvt_session_hold_blocks) stay and are counted. Never waits: after a crash what was on disk
 * may be there again, as after any eviction.
 *
 * @param session  The session.
 * @param names    The names, at most 65536; those that are not there are passed over.
 * @param out      What stays, in counts; start it with KVT_CLEAR_REPORT_INIT. May be null.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_drop_blocks(const struct kvt_session_t *session,
                                     const struct kvt_block_names_t *names,
                                     struct kvt_clear_report_t *out,
                                     struct kvt_error_t **err);

/**
 * Begins to find out how far a session can go on with what the store has and what its remote
 * has. Never waits. The op's value is the tokens from the session's first one on that can be
 * used; what is at the remote is part of lookups and plans from then on, and comes with gets
 * and prefetches. Appending a chunk or more asks by itself (ask=append): the op then only
 * waits for the answers. Without a remote, or while that is left alone, it ends at once with
 * what is here.
 *
 * What the remote has is a hint: it may be gone when it is fetched, which is a miss.
 *
 * @param session  The session.
 * @param opts     Queue, tag, deadline; null for defaults. Set a deadline: after it the op
 *                 ends with KVT_E_TIMEOUT, and what was heard until then counts.
 * @param out_op   Receives the op; null with a queue to be told by that alone.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_AGAIN (as many moves or ops are under way as may be, or the queue is
 *         full), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the op. Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_remote_lookup(const struct kvt_session_t *session,
                                const struct kvt_submit_opts_t *opts,
                                struct kvt_op_t **out_op,
                                struct kvt_error_t **err);

/**
 * Begins to find out which of some blocks the store has, in a tier of its own or at its remote.
 * Never waits. What is at the remote is known to kvt_namespace_blocks_exist from then on, as
 * 1 << KVT_TIER_REMOTE, and comes with kvt_session_get_blocks and kvt_session_prefetch_blocks.
 * No block depends on another: all are asked for that are not here and were not asked for lately.
 * Without a remote, or while that is left alone, the op ends at once with what is here.
 *
 * The op has an item for each block (kvt_op_items): KVT_OK when all of it is here or at the
 * remote, KVT_E_NOT_FOUND when it is not, as far as is known. Its own status is KVT_OK when all
 * are, else that of those that are not. Its value is how many tokens from the first on can be
 * used without a gap.
 *
 * What the remote has is a hint: it may be gone when it is fetched, which is a miss. A hint is
 * forgotten when rows of the table are needed for what the store itself keeps, or after as many
 * others as the remote's parameter `known` says; ask again then.
 *
 * @param session  The session; closing it does not end the op.
 * @param names    The names, 1 to 65536; one that is there twice has two items. Copied.
 * @param opts     Queue, tag, deadline; null for defaults. Set a deadline: after it blocks that
 *                 nothing is known of end with KVT_E_TIMEOUT, and what was heard counts.
 * @param out_op   Receives the op; null with a queue to be told by that alone.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_AGAIN (as many moves or ops are under way, or 2^20 blocks are asked for,
 *         as may be; or the queue is full), KVT_E_LIMIT, KVT_E_INVALID, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the op. Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_remote_lookup_blocks(const struct kvt_session_t *session,
                                       const struct kvt_block_names_t *names,
                                       const struct kvt_submit_opts_t *opts,
                                       struct kvt_op_t **out_op,
                                       struct kvt_error_t **err);

/**
 * Holds those of some blocks that are there: until they are let go they are in some tier, and
 * what is asked for of them is found. Memory that others need may still have them go down to
 * disk; kvt_session_prefetch_blocks brings them up. No use is counted. Never waits.
 *
 * Each call counts, and each name in it: what is held twice is to be let go twice. A block of
 * which not all is there, or whose put has not ended, is not held, and says so. Closing the
 * session lets all go; forks hold nothing. Where memory or the table is full and all is held
 * there is no room for anything else: puts end with KVT_E_BUDGET, or are refused with
 * KVT_E_LIMIT. A hold does not repair: of a block whose only copy is found damaged only the
 * name stays held, for whoever puts it again.
 *
 * @param session  The session. Others hold the same blocks on their own account.
 * @param names    The names, at most 65536.
 * @param out      Receives a byte for each, as kvt_namespace_blocks_exist gives: 0 = not held.
 *                 May be null for who lets go by closing the session.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_LIMIT (also: a session has 2^20 holds), KVT_E_INVALID,
 *         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *         Nothing is held on failure.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_hold_blocks(const struct kvt_session_t *session,
                                     const struct kvt_block_names_t *names,
                                     uint8_t *out,
                                     struct kvt_error_t **err);

/**
 * Takes one hold of each block back; the last one of all lets it leave. Never waits.
 *
 * Give the names that were held, as kvt_session_hold_blocks said, and no others: one that the
 * session does not hold as often as it is named fails the call. Passing it over would let a
 * mistake in counting take away what another part of the program holds.
 *
 * @param session  The session that holds them.
 * @param names    The names, at most 65536.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (also: not held), KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. Nothing changes on failure.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_release_blocks(const struct kvt_session_t *session,
                                        const struct kvt_block_names_t *names,
                                        struct kvt_error_t **err);

/**
 * Tells the policies what the engine knows of the future of some blocks, as kvt_session_hint
 * does of a session: in each tier, of each block by itself. Those that are not there are
 * passed over, and nothing is remembered of them.
 *
 * @param session  The session; says whose words these are. Nothing is told of it.
 * @param names    The names, at most 65536.
 * @param hint     The hint; its times are CLOCK_MONOTONIC.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_session_hint_blocks(const struct kvt_session_t *session,
                                     const struct kvt_block_names_t *names,
                                     const struct kvt_policy_hint_t *hint,
                                     struct kvt_error_t **err);

/**
 * Takes everything of a namespace away that nobody holds: out of all tiers, and so
 * that it does not come back when the store is opened again. Waits for that; of
 * chunks that are stored meanwhile nothing is said. Their bytes stay in files until
 * those are used again; nobody finds them there.
 *
 * @param ns        The namespace, which stays open.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @param out          What stays, in counts; start it with KVT_CLEAR_REPORT_INIT. May
 *                     be null.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TIMEOUT, KVT_E_BUDGET, KVT_E_IO: the chunks are gone, but may
 *         come back with another opening (call again); KVT_E_REENTRANT inside a
 *         callback; KVT_E_INVALID, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_namespace_clear(const struct kvt_namespace_t *ns,
                                 uint64_t deadline_ns,
                                 struct kvt_clear_report_t *out,
                                 struct kvt_error_t **err);

/**
 * Takes chunks of a session away that nobody else holds: out of all tiers. The
 * session keeps its tokens, and finds chunks again that stay or are stored anew.
 * Never waits: after a crash what was on disk may be there again, as after any
 * eviction.
 *
 * @param session      The session.
 * @param first_token  Where they begin, a multiple of a chunk's tokens.
 * @param tokens       How many, up to a multiple or the end; 0 = to the end.
 * @param out          What stays, in counts; start it with KVT_CLEAR_REPORT_INIT. May
 *                     be null.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_drop(const struct kvt_session_t *session,
                              uint64_t first_token,
                              uint64_t tokens,
                              struct kvt_clear_report_t *out,
                              struct kvt_error_t **err);

/**
 * Sends chunks of a session down: what of them is in memory is written to disk where it
 * is not there yet, and its memory is given back. Never waits: events
 * (KVT_STORE_EVENT_REMOVED) and kvt_store_stats tell of the end. What admission and write=
 * say does not count. Who holds or has pinned the chunks finds them on disk; a get brings
 * them up again. What the disk refuses stays in memory as long as somebody holds it.
 *
 * @param session      The session.
 * @param first_token  Where they begin, a multiple of a chunk's tokens.
 * @param tokens       How many, up to a multiple or the end; 0 = to the end.
 * @param out          How many leave; start it with KVT_DEMOTE_REPORT_INIT. May be
 *                     null.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK, also where nothing is in memory; KVT_E_INVALID, KVT_E_NOMEM,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_demote(const struct kvt_session_t *session,
                                uint64_t first_token,
                                uint64_t tokens,
                                struct kvt_demote_report_t *out,
                                struct kvt_error_t **err);

/**
 * Takes the pins of chunks of a session away, whoever has set them.
 *
 * @param session      The session.
 * @param first_token  Where they begin, a multiple of a chunk's tokens.
 * @param tokens       How many, up to a multiple or the end; 0 = to the end.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK, also where nothing is pinned; KVT_E_INVALID, KVT_E_NOMEM,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_session_unpin(const struct kvt_session_t *session,
                               uint64_t first_token,
                               uint64_t tokens,
                               struct kvt_error_t **err);

/**
 * Opens a policy.
 *
 * @param opts  What and how large; null for an lru with defaults.
 * @param out   The policy; close it with kvt_policy_close.
 * @param err   Explains a failure, with the offset in the spec and the nearest
 *              name that exists; may be null.
 * @return KVT_OK; KVT_E_SPEC, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the policy. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_open(const struct kvt_policy_opts_t *opts,
                             struct kvt_policy_t **out,
                             struct kvt_error_t **err);

/**
 * Closes a policy. Calls that are inside it end first; its callbacks' user data
 * is released after them.
 *
 * @param policy  Pointer to the handle, cleared on success; null, or a null
 *                handle, is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_policy_close(struct kvt_policy_t **policy);

/**
 * Goes on with another policy. Objects stay, in their order; what carries over
 * from the old policy does (times, counts, references, pins, sessions).
 *
 * @param policy      The policy.
 * @param spec        The new spec, UTF-8.
 * @param spec_bytes  Its length.
 * @param err         Explains a failure; may be null.
 * @return KVT_OK; KVT_E_SPEC, KVT_E_INVALID ("custom" without a score function),
 *         KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread; others wait while it sorts all objects. Since 0.1.
 */
kvt_status_t kvt_policy_switch(const struct kvt_policy_t *policy,
                               const char *spec,
                               uint64_t spec_bytes,
                               struct kvt_error_t **err);

/**
 * Changes what fits; nothing is evicted by that.
 *
 * @param policy          The policy.
 * @param capacity_units  What fits, in units; 0 = not known.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_set_capacity(const struct kvt_policy_t *policy, uint64_t capacity_units);

/**
 * How many policies can be opened.
 *
 * @param out_count  The number.
 * @return KVT_OK; KVT_E_INVALID.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_count(uint64_t *out_count);

/**
 * A policy that can be opened, by its place in the list: the number that the
 * log gives for it.
 *
 * @param index  0 to kvt_policy_count - 1.
 * @param out    Filled in; start it with KVT_POLICY_INFO_INIT.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_info(uint64_t index, struct kvt_policy_info_t *out);

/**
 * Looks up a path of objects, first to last, and counts it in the statistics.
 * Found ones are touched, the last first, so that none is older than what
 * continues it. Where holes are allowed, objects behind one are found too.
 *
 * @param policy       The policy.
 * @param now_ns       The caller's clock, which must not go back; 0 = the
 *                     library's (CLOCK_MONOTONIC).
 * @param context          Who asks; may be null.
 * @param ids          The path.
 * @param count        How many, at most 2^24.
 * @param out_found    1 or 0 for each id; may be null.
 * @param out_leading  How many from the start on are there; may be null.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (also a clock that went back), KVT_E_LIMIT,
 *         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_lookup(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const struct kvt_policy_context_t *context,
                               const uint64_t *ids,
                               uint64_t count,
                               uint8_t *out_found,
                               uint64_t *out_leading,
                               struct kvt_error_t **err);

/**
 * Touches objects, the last first, without counting a lookup. Those that are
 * not there are passed over.
 *
 * @param policy       The policy.
 * @param now_ns       See kvt_policy_lookup.
 * @param context          Who uses them; may be null.
 * @param ids          The objects.
 * @param count        How many.
 * @param out_touched  How many were there; may be null.
 * @param err          Explains a failure; may be null.
 * @return As kvt_policy_lookup.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_touch(const struct kvt_policy_t *policy,
                              int64_t now_ns,
                              const struct kvt_policy_context_t *context,
                              const uint64_t *ids,
                              uint64_t count,
                              uint64_t *out_touched,
                              struct kvt_error_t **err);

/**
 * Notes a use of objects ("update access"): those that are there are touched,
 * the others inserted; all or none. For engines that keep their own tables and
 * choose by kvt_policy_select: recorded uses win over columns.
 *
 * @param policy     The policy.
 * @param now_ns     See kvt_policy_lookup.
 * @param context        Who uses them; may be null.
 * @param ids        The objects.
 * @param units      Sizes of those that are new; null = 1 each.
 * @param count      How many.
 * @param out_added  How many were new; may be null.
 * @param err        Explains a failure; may be null.
 * @return As kvt_policy_lookup; KVT_E_LIMIT when the table is full.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_record(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const struct kvt_policy_context_t *context,
                               const uint64_t *ids,
                               const uint64_t *units,
                               uint64_t count,
                               uint64_t *out_added,
                               struct kvt_error_t **err);

/**
 * Inserts objects, all or none.
 *
 * @param policy        The policy.
 * @param now_ns        See kvt_policy_lookup.
 * @param context           Who brought them; may be null.
 * @param rows          The objects; a parent stands before what continues it.
 * @param count         How many.
 * @param stride_bytes  sizeof(kvt_policy_object_t).
 * @param err           Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (an id that is there, a size of 0, a clock that
 *         went back), KVT_E_LIMIT (the table is full: evict), KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_insert(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const struct kvt_policy_context_t *context,
                               const struct kvt_policy_object_t *rows,
                               uint64_t count,
                               uint64_t stride_bytes,
                               struct kvt_error_t **err);

/**
 * Takes objects away that their owner gave up, pinned or not; all or none. It
 * is no eviction. What continues one of them must go with it. References and pins
 * of an object go with it: a later release of it is KVT_E_NOT_FOUND, and an object
 * inserted under its id has none.
 *
 * @param policy  The policy.
 * @param now_ns  See kvt_policy_lookup.
 * @param ids     The objects, each once.
 * @param count   How many.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_STATE when others continue one,
 *         KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_remove(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const uint64_t *ids,
                               uint64_t count,
                               struct kvt_error_t **err);

/**
 * Says that the objects which kvt_policy_select named were freed: they leave
 * the table as evicted, so that the log, the re-prefill rate, advice and what
 * policies remember of the evicted learn of it; all or none. What continues one of
 * them must go with it. Ids that are not in the table are remembered as well.
 *
 * @param policy  The policy.
 * @param now_ns  See kvt_policy_lookup.
 * @param ids     The objects, each once.
 * @param count   How many.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_STATE when others continue one, KVT_E_INVALID,
 *         KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_report_evicted(const struct kvt_policy_t *policy,
                                int64_t now_ns,
                                const uint64_t *ids,
                                uint64_t count,
                                struct kvt_error_t **err);

/**
 * Changes sizes; all or none.
 *
 * @param policy  The policy.
 * @param ids     The objects.
 * @param units   Their new sizes, 1 to 2^32 - 1.
 * @param count   How many.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_resize(const struct kvt_policy_t *policy,
                               const uint64_t *ids,
                               const uint64_t *units,
                               uint64_t count,
                               struct kvt_error_t **err);

/**
 * Takes a reference to each of some objects; all or none. A referenced object
 * never leaves.
 *
 * @param policy  The policy.
 * @param ids     The objects; one that is there twice gets two references.
 * @param count   How many.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_acquire(const struct kvt_policy_t *policy,
                                const uint64_t *ids,
                                uint64_t count,
                                struct kvt_error_t **err);

/**
 * Gives a reference to each of some objects back; all or none.
 *
 * @param policy  The policy.
 * @param ids     The objects.
 * @param count   How many.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_STATE when one has no reference,
 *         KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_release(const struct kvt_policy_t *policy,
                                const uint64_t *ids,
                                uint64_t count,
                                struct kvt_error_t **err);

/**
 * Pins objects, which never leave then; all or none. Pins do not count: one
 * kvt_policy_unpin ends any number.
 *
 * @param policy  The policy.
 * @param ids     The objects.
 * @param count   How many.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_pin(const struct kvt_policy_t *policy,
                            const uint64_t *ids,
                            uint64_t count,
                            struct kvt_error_t **err);

/**
 * Unpins objects; all or none. One that is not pinned stays so.
 *
 * @param policy  The policy.
 * @param ids     The objects.
 * @param count   How many.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_unpin(const struct kvt_policy_t *policy,
                              const uint64_t *ids,
                              uint64_t count,
                              struct kvt_error_t **err);

/**
 * Tells what the engine knows of the future of objects, usually of the path of
 * a request that ended. Those that are not there are passed over.
 *
 * @param policy     The policy.
 * @param now_ns     See kvt_policy_lookup.
 * @param context        Whose they are; may be null.
 * @param ids        The objects.
 * @param count      How many.
 * @param hint       The hint.
 * @param out_known  How many were there; may be null.
 * @param err        Explains a failure; may be null.
 * @return As kvt_policy_lookup.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_hint(const struct kvt_policy_t *policy,
                             int64_t now_ns,
                             const struct kvt_policy_context_t *context,
                             const uint64_t *ids,
                             uint64_t count,
                             const struct kvt_policy_hint_t *hint,
                             uint64_t *out_known,
                             struct kvt_error_t **err);

/**
 * Evicts until enough is free: the victims are gone from the table, and what
 * they held is the caller's to free. None leaves without which it would be
 * enough. Too few that may leave, or too little room for them, is a shortfall
 * and no error.
 *
 * @param policy          The policy.
 * @param now_ns          See kvt_policy_lookup.
 * @param required_units  What must be free; 0 frees nothing.
 * @param victims         Receives who leaves, in the order of leaving.
 * @param capacity        Room there: the most that leave, at most 2^28.
 * @param stride_bytes    sizeof(kvt_policy_victim_t).
 * @param out             What it came to; start it with KVT_POLICY_OUTCOME_INIT.
 * @param err             Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (also a clock that went back, a score that is no
 *         number), KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC; what a custom policy's score function gives.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_evict(const struct kvt_policy_t *policy,
                              int64_t now_ns,
                              uint64_t required_units,
                              struct kvt_policy_victim_t *victims,
                              uint64_t capacity,
                              uint64_t stride_bytes,
                              struct kvt_policy_outcome_t *out,
                              struct kvt_error_t **err);

/**
 * Says who would leave now, without anything leaving. A policy that moves objects
 * while it searches (arc's kin, queues with a hand), or that learns, may choose others
 * when it is asked again.
 *
 * @param policy          The policy.
 * @param now_ns          See kvt_policy_lookup.
 * @param required_units  What must be free.
 * @param victims         Receives who would leave, in the order of leaving.
 * @param capacity        Room there.
 * @param stride_bytes    sizeof(kvt_policy_victim_t).
 * @param out             What it came to; start it with KVT_POLICY_OUTCOME_INIT.
 * @param err             Explains a failure; may be null.
 * @return As kvt_policy_evict.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_preview(const struct kvt_policy_t *policy,
                                int64_t now_ns,
                                uint64_t required_units,
                                struct kvt_policy_victim_t *victims,
                                uint64_t capacity,
                                uint64_t stride_bytes,
                                struct kvt_policy_outcome_t *out,
                                struct kvt_error_t **err);

/**
 * Chooses candidates that free enough blocks, in the policy's order, the least
 * first, and none without which it would be enough. Uses that were recorded of
 * an id (kvt_policy_record and the like) win over its columns; what these say of
 * its context, tokens, layer, layers, chunk, chunks and cost is noted of the
 * object in the table, for policies that want to know. Rows that are pinned
 * or shared are never chosen, nor are those whose object in the table is
 * referenced, pinned or continued by another. Nothing is evicted: the caller
 * frees what was chosen, and removes it from the table where it is in one. The
 * order of the rows does not matter.
 *
 * @param policy           The policy.
 * @param now_ns           See kvt_policy_lookup.
 * @param candidates       The columns.
 * @param required_blocks  What must be free; 0 frees nothing. When it cannot be,
 *                         everything that may leave is chosen and the shortfall
 *                         told.
 * @param flags            KVT_SELECT_*.
 * @param selection        Filled in. When its arrays are too small nothing but
 *                         the counts is, with KVT_E_TOO_SMALL.
 * @param err              Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (an id that is there twice, a confidence or cost
 *         that is no number, a clock that went back), KVT_E_TOO_SMALL,
 *         KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC; what a custom policy's score function gives.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_select(const struct kvt_policy_t *policy,
                               int64_t now_ns,
                               const struct kvt_policy_columns_t *candidates,
                               uint64_t required_blocks,
                               uint64_t flags,
                               struct kvt_policy_selection_t *selection,
                               struct kvt_error_t **err);

/**
 * What a policy has counted since it was opened.
 *
 * @param policy  The policy.
 * @param out     Filled in; start it with KVT_POLICY_STATS_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread; looks at every session, so not in a hot path. Since 0.1.
 */
kvt_status_t kvt_policy_stats(const struct kvt_policy_t *policy, struct kvt_policy_stats_t *out);

/**
 * The spec of a policy, in canonical form.
 *
 * @param policy        The policy.
 * @param out           Receives it, not NUL-terminated; may be null with
 *                      out_capacity 0 to learn the size.
 * @param out_capacity  Room at `out`.
 * @param out_bytes     Its length; also written with KVT_E_TOO_SMALL. May be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_spec(const struct kvt_policy_t *policy,
                             char *out,
                             uint64_t out_capacity,
                             uint64_t *out_bytes);

/**
 * A number of the policy's own, such as arc's "arc_p".
 *
 * @param policy      The policy.
 * @param name        Which, UTF-8.
 * @param name_bytes  Length of the name.
 * @param out_value   The number.
 * @param err         Names what there is; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_gauge(const struct kvt_policy_t *policy,
                              const char *name,
                              uint64_t name_bytes,
                              double *out_value,
                              struct kvt_error_t **err);

/**
 * The numbers of a policy's own one after the other, such as all that an exporter
 * shows. Another policy (kvt_policy_switch) has others.
 *
 * @param policy          The policy.
 * @param index           Which, from 0.
 * @param out_name        Its name, UTF-8, not terminated; lives as long as the
 *                        library. May be null.
 * @param out_name_bytes  Length of the name; may be null.
 * @param out_value       The number; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND past the last, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_gauge_at(const struct kvt_policy_t *policy,
                                 uint64_t index,
                                 const char **out_name,
                                 uint64_t *out_name_bytes,
                                 double *out_value);

/**
 * Reads the log of evictions, the oldest first.
 *
 * @param policy        The policy.
 * @param from_number   The first that is wanted, such as the last one read plus
 *                      1; those that were overwritten are missing.
 * @param entries       Receives them.
 * @param capacity      Room there.
 * @param stride_bytes  sizeof(kvt_policy_log_entry_t).
 * @param out_count     How many were written.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_log(const struct kvt_policy_t *policy,
                            uint64_t from_number,
                            struct kvt_policy_log_entry_t *entries,
                            uint64_t capacity,
                            uint64_t stride_bytes,
                            uint64_t *out_count);

/**
 * Advises a scheduler how large a batch to run: half when too much is computed
 * again, twice as much when hardly anything is evicted, judged by windows of
 * lookups that must agree. A change is advised once.
 *
 * @param policy  The policy.
 * @param batch   The batch that runs.
 * @param out     Filled in; start it with KVT_POLICY_ADVICE_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_advise(const struct kvt_policy_t *policy,
                               uint64_t batch,
                               struct kvt_policy_advice_t *out);

/**
 * Changes what advice goes by, from the next window on.
 *
 * @param policy  The policy.
 * @param given   The rules; null for the defaults.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_policy_set_advice(const struct kvt_policy_t *policy,
                                   const struct kvt_policy_advice_rules_t *given,
                                   struct kvt_error_t **err);

/**
 * Opens a sparse policy for one sequence of a model.
 *
 * @param opts  Which, and for what.
 * @param out   The policy; close it with kvt_sparse_close.
 * @param err   Explains a failure, with the offset in the spec and the nearest name that
 *              exists; may be null.
 * @return KVT_OK; KVT_E_SPEC, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_CLOSED,
 *         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the policy. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_open(const struct kvt_sparse_opts_t *opts,
                             struct kvt_sparse_t **out,
                             struct kvt_error_t **err);

/**
 * Closes a policy and clears the handle. It does not wait: a call that is inside ends first,
 * and user data of the engine's is released after it.
 *
 * @param policy  The handle; null, or a handle that is null, is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_close(struct kvt_sparse_t **policy);

/**
 * Opens a copy for a sequence that goes on from here. The same account pays.
 *
 * @param policy  The policy.
 * @param out     The copy; close it with kvt_sparse_close.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_UNSUPPORTED (a policy of the engine's own that cannot), KVT_E_BUSY,
 *         KVT_E_BUDGET, KVT_E_CLOSED (who pays was), KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Ownership: the caller owns the copy. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_fork(const struct kvt_sparse_t *policy,
                             struct kvt_sparse_t **out,
                             struct kvt_error_t **err);

/**
 * What a policy is like.
 *
 * @param policy  The policy.
 * @param out     Filled in; start it with KVT_SPARSE_TRAITS_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks of the policy. Since 0.1.
 */
kvt_status_t kvt_sparse_traits(const struct kvt_sparse_t *policy, struct kvt_sparse_traits_t *out);

/**
 * What a policy has chosen, and what it keeps.
 *
 * @param policy  The policy.
 * @param out     Filled in; start it with KVT_SPARSE_STATS_INIT.
 * @return KVT_OK; KVT_E_BUSY, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_stats(const struct kvt_sparse_t *policy, struct kvt_sparse_stats_t *out);

/**
 * How many sparse policies can be opened by name.
 *
 * @param out_count  The number.
 * @return KVT_OK; KVT_E_INVALID.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_count(uint64_t *out_count);

/**
 * A sparse policy that can be opened, by its place in the list.
 *
 * @param index  0 to kvt_sparse_count - 1.
 * @param out    Filled in; start it with KVT_SPARSE_INFO_INIT.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_info(uint64_t index, struct kvt_sparse_info_t *out);

/**
 * Keys of tokens have been computed in a layer, with their positions in them.
 *
 * @param policy  The policy.
 * @param layer   The layer.
 * @param first   The position of the first token.
 * @param keys    [tokens, key heads, key dim]; the policy's own rows, if its traits have some.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (numbers that are not finite, too), KVT_E_STATE when tokens
 *         are missing before them, KVT_E_LIMIT, KVT_E_BUDGET when what was told before is not
 *         paid for, KVT_E_CLOSED when who pays was closed, KVT_E_BUSY, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_append(const struct kvt_sparse_t *policy,
                               uint32_t layer,
                               uint32_t first,
                               const struct kvt_rows_t *keys,
                               struct kvt_error_t **err);

/**
 * A block of a layer is about to be moved away: to be called while its keys are still there.
 * What was appended before need not be sealed to be known.
 *
 * @param policy  The policy.
 * @param layer   The layer.
 * @param id      How candidates name the block.
 * @param first   The position of its first token.
 * @param keys    The model's keys of its tokens, all or the first ones of a block.
 * @param err     Explains a failure; may be null.
 * @return As kvt_sparse_append.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_add_block(const struct kvt_sparse_t *policy,
                             uint32_t layer,
                             uint32_t id,
                             uint32_t first,
                             const struct kvt_rows_t *keys,
                             struct kvt_error_t **err);

/**
 * A block that was written token by token is complete in all layers: kvt_sparse_add_block of
 * each, or on_decode_offload of an engine's own policy.
 *
 * @param policy        The policy.
 * @param id            How candidates name the block.
 * @param first         The position of its first token.
 * @param keys          Its keys, a view for each layer of the model.
 * @param count         How many.
 * @param stride_bytes  sizeof(kvt_rows_t).
 * @param err           Explains a failure; may be null.
 * @return As kvt_sparse_append.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_seal_all(const struct kvt_sparse_t *policy,
                                 uint32_t id,
                                 uint32_t first,
                                 const struct kvt_rows_t *keys,
                                 uint64_t count,
                                 uint64_t stride_bytes,
                                 struct kvt_error_t **err);

/**
 * What each key got of the attention of some queries: a kernel's sums (kvt_column_sums_open,
 * kvt_decode_sums).
 *
 * @param policy     The policy.
 * @param layer      The layer.
 * @param queries    Of how many queries: the last ones of a prompt, or those of a step.
 * @param sums       For each query head, or one row for all of them, a number for each token
 *                   that is kept, in their order.
 * @param sum_count  How many numbers that are.
 * @param tokens     How many tokens are kept.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (numbers below zero or not finite, wrong counts), KVT_E_LIMIT,
 *         KVT_E_BUDGET, KVT_E_CLOSED, KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_observe(const struct kvt_sparse_t *policy,
                                uint32_t layer,
                                uint32_t queries,
                                const float *sums,
                                uint64_t sum_count,
                                uint32_t tokens,
                                struct kvt_error_t **err);

/**
 * Gives numbers of the engine's for the next question about a layer: a score a candidate
 * (KVT_NEEDS_SCORES), or a weight for each query and head, heads innermost
 * (KVT_NEEDS_WEIGHTS).
 *
 * @param policy       The policy.
 * @param layer        The layer.
 * @param scores       The numbers.
 * @param score_count  How many.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_UNSUPPORTED when it wants none, KVT_E_INVALID, KVT_E_LIMIT,
 *         KVT_E_BUDGET, KVT_E_CLOSED, KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_add_scores(const struct kvt_sparse_t *policy,
                              uint32_t layer,
                              const float *scores,
                              uint64_t score_count,
                              struct kvt_error_t **err);

/**
 * The sequence has so many tokens now: what came behind them is taken back.
 *
 * @param policy  The policy.
 * @param tokens  How many are left.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_truncate(const struct kvt_sparse_t *policy,
                                 uint32_t tokens,
                                 struct kvt_error_t **err);

/**
 * The sequence begins anew.
 *
 * @param policy  The policy.
 * @return KVT_OK; KVT_E_BUSY, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_reset(const struct kvt_sparse_t *policy);

/**
 * What a policy knows of a block: to be kept beside it, so that it can be told again where
 * the block comes back.
 *
 * @param policy     The policy.
 * @param layer      The layer.
 * @param id         The block, as it was sealed.
 * @param data       Receives the bytes; null = only their number is wanted.
 * @param capacity       How many it has room for.
 * @param out_count  Receives how many there are, also when there is no room; 0 = the policy
 *                   keeps nothing with blocks.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_NOT_FOUND (a block that is not known), KVT_E_INVALID,
 *         KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_save(const struct kvt_sparse_t *policy,
                             uint32_t layer,
                             uint32_t id,
                             uint8_t *data,
                             uint64_t capacity,
                             uint64_t *out_count,
                             struct kvt_error_t **err);

/**
 * What was saved of a block, which came back. The bytes may be anyone's: they are checked.
 *
 * @param policy  The policy.
 * @param layer   The layer.
 * @param id      How candidates name the block from now on.
 * @param first   The position of its first token.
 * @param data    What kvt_sparse_save gave.
 * @param count   How many bytes.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_CORRUPT, KVT_E_TOO_NEW, KVT_E_UNSUPPORTED when the policy keeps
 *         nothing with blocks, KVT_E_STATE, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_BUDGET,
 *         KVT_E_CLOSED, KVT_E_BUSY, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_load(const struct kvt_sparse_t *policy,
                             uint32_t layer,
                             uint32_t id,
                             uint32_t first,
                             const uint8_t *data,
                             uint64_t count,
                             struct kvt_error_t **err);

/**
 * Which of the candidates are to be loaded for a query.
 *
 * @param policy           The policy.
 * @param layer            The layer.
 * @param query            [queries, query heads, key dim], of the layer `ahead` before where the
 *                         traits say so; null = all candidates.
 * @param candidates       Ids of blocks, in any order, each once.
 * @param candidate_count  How many.
 * @param context          Where in the sequence that is.
 * @param ids              Receives the ids that are chosen, ascending, and KVT_SPARSE_NO_ID
 *                         behind them.
 * @param capacity             How many it has room for: as many as there are candidates, or the
 *                         call is refused before the policy is asked.
 * @param out_count        Receives how many are chosen; with KVT_E_TOO_SMALL how much room is
 *                         needed.
 * @param err              Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED when it does not select there,
 *         KVT_E_INVALID (queries that are not finite, too), KVT_E_STATE (weights are missing),
 *         KVT_E_LIMIT, KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
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

/**
 * Which keys queries are computed with. With KVT_E_TOO_SMALL the answer is kept:
 * kvt_sparse_last_index has it.
 *
 * @param policy   The policy.
 * @param layer    The layer.
 * @param queries  [queries, query heads, key dim].
 * @param keys     All keys of the sequence where the traits say KVT_NEEDS_ALL_KEYS; else null,
 *                 or any.
 * @param context  Where in the sequence that is.
 * @param out      Start it with KVT_INDEX_INIT, and set arrays and their room.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED when it does not say that there,
 *         KVT_E_INVALID (numbers that are not finite, too), KVT_E_STATE, KVT_E_LIMIT,
 *         KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_index(const struct kvt_sparse_t *policy,
                              uint32_t layer,
                              const struct kvt_rows_t *queries,
                              const struct kvt_rows_t *keys,
                              const struct kvt_sparse_context_t *context,
                              struct kvt_index_t *out,
                              struct kvt_error_t **err);

/**
 * The last index that a policy answered with, again.
 *
 * @param policy  The policy.
 * @param out     As in kvt_sparse_index.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_last_index(const struct kvt_sparse_t *policy,
                                   struct kvt_index_t *out,
                                   struct kvt_error_t **err);

/**
 * Attention of a prompt, or of a part of one, as a policy wants it, on this thread: its index
 * and the kernel, or the function of an engine's own policy. With a policy that does not say
 * what a prompt is computed with all keys are. Engines with more threads ask kvt_sparse_index,
 * and open a job.
 *
 * @param policy     The policy.
 * @param layer      The layer.
 * @param queries    [queries, query heads, key dim], the last of the sequence.
 * @param keys       All keys of the sequence.
 * @param values     All values; of a latent the first numbers of the keys.
 * @param context    Where in the sequence that is.
 * @param out        Receives [queries, query heads, value dim].
 * @param out_count  How many numbers it has room for.
 * @param lse        Receives [queries, query heads] log-sum-exps; may be null.
 * @param lse_count  How many it has room for.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (a policy with rows of its
 *         own), KVT_E_UNAVAILABLE, KVT_E_LIMIT, KVT_E_STATE, KVT_E_BUSY, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
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

/**
 * Which tokens of a layer stay, if some have to go. Nothing has gone until it is told with
 * kvt_sparse_commit_eviction: to ask again is fine. With KVT_E_TOO_SMALL the answer is kept:
 * kvt_sparse_last_retained has it.
 *
 * @param policy       The policy.
 * @param layer        The layer.
 * @param context      Where in the sequence that is.
 * @param out          Start it with KVT_TOKEN_LISTS_INIT, and set arrays and their room. Counts are 0
 *                     where all stay.
 * @param out_evicted  Receives 1 when some have to go, else 0.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED when it does not evict there, KVT_E_STATE
 *         when sums are missing, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_BUSY, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_plan_eviction(const struct kvt_sparse_t *policy,
                              uint32_t layer,
                              const struct kvt_sparse_context_t *context,
                              struct kvt_token_lists_t *out,
                              uint32_t *out_evicted,
                              struct kvt_error_t **err);

/**
 * The last lists that a policy answered with, again; none where all stayed.
 *
 * @param policy  The policy.
 * @param out     As in kvt_sparse_plan_eviction.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_last_retained(const struct kvt_sparse_t *policy,
                                  struct kvt_token_lists_t *out,
                                  struct kvt_error_t **err);

/**
 * What was kept of a layer is all there is now: an answer of kvt_sparse_plan_eviction, of this policy
 * or another of the sequence, to which the engine may have added tokens that must stay.
 *
 * @param policy  The policy.
 * @param layer   The layer.
 * @param kept    The lists; any part of what is there.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_BUSY, KVT_E_TOO_NEW, KVT_E_NOMEM,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_sparse_commit_eviction(const struct kvt_sparse_t *policy,
                                uint32_t layer,
                                const struct kvt_token_lists_t *kept,
                                struct kvt_error_t **err);

/**
 * Says of the rows of a buffer what an index says of positions; tokens that are not there are
 * left out. No token may be missing between a query and those behind it.
 *
 * @param attention        The model's attention.
 * @param placement           What is in the buffer.
 * @param index            The index, of positions; null = all keys.
 * @param first            The position of the first query.
 * @param count            How many queries.
 * @param out              Start it with KVT_INDEX_INIT, and set arrays and their room.
 * @param out_first_query  Receives first_query of a problem over these rows, whose first_key
 *                         is 0.
 * @param err              Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL with counts in `out`, KVT_E_INVALID, KVT_E_LIMIT,
 *         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_index_place(const struct kvt_attention_t *attention,
                             const struct kvt_block_placement_t *placement,
                             const struct kvt_index_t *index,
                             uint32_t first,
                             uint32_t count,
                             struct kvt_index_t *out,
                             uint32_t *out_first_query,
                             struct kvt_error_t **err);

/**
 * Adds sums of attention over the rows of a buffer to sums of the tokens that are there, as
 * kvt_sparse_observe wants them: tokens that were not loaded got nothing.
 *
 * @param resident        Which tokens are there.
 * @param placement       What is in the buffer.
 * @param select       The index of rows that a decode went by, whose sums are those of
 *                     kvt_decode_sums; null = sums of all rows.
 * @param first_query  The row of the first query, with `select`.
 * @param queries      How many, with `select`.
 * @param sums         [query heads, rows]; or [rows] for all heads, where there is one list.
 * @param sum_count    How many numbers that are.
 * @param out          [query heads, tokens], or [tokens]. After a failure it means nothing.
 * @param out_count    How many numbers that are.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
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

/**
 * How much memory no problem within some limits needs more of: to be lent once.
 *
 * @param kernel       KVT_KERNEL_*.
 * @param limits       The largest that problems become.
 * @param out_memory   Receives numbers of a job's memory (0 but for decodes); may be null.
 * @param out_scratch  Receives numbers of scratch of each thread; may be null.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_kernel_workspace(uint32_t kernel,
                                  const struct kvt_kernel_limits_t *limits,
                                  uint64_t *out_memory,
                                  uint64_t *out_scratch,
                                  struct kvt_error_t **err);

/**
 * How a job is cut.
 *
 * @param job  The job.
 * @param out  Filled in; start it with KVT_ATTENTION_JOB_INFO_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_attention_job_info(const struct kvt_attention_job_t *job, struct kvt_attention_job_info_t *out);

/**
 * Runs items of a job, on this thread.
 *
 * @param job            The job.
 * @param step           Which step.
 * @param first          Its first item.
 * @param items          How many; all to the last of the step, if it has fewer.
 * @param scratch        Memory that no other thread uses meanwhile.
 * @param scratch_count  How many numbers: kvt_attention_job_info.
 * @param err            Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any threads at a time, with other items each. Since 0.1.
 */
kvt_status_t kvt_attention_job_run(const struct kvt_attention_job_t *job,
                         uint32_t step,
                         uint32_t first,
                         uint32_t items,
                         float *scratch,
                         uint64_t scratch_count,
                         struct kvt_error_t **err);

/**
 * Closes a job and clears the handle. Waits for items that run; all that it was opened with
 * is the caller's again.
 *
 * @param job  The handle; null, or a handle that is null, is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
 *
 * Threading: any thread; waits. Since 0.1.
 */
kvt_status_t kvt_attention_job_close(struct kvt_attention_job_t **job);

/**
 * Opens a job that computes the attention of a prompt, or of a part of one.
 *
 * @param args    What is to be computed.
 * @param out        Receives [queries, query heads, value dim]; zeros where a query sees no
 *                   key.
 * @param out_count  How many numbers it has room for.
 * @param lse        Receives [queries, query heads] log-sum-exps, -inf where a query sees no
 *                   key; may be null.
 * @param lse_count  How many it has room for.
 * @param out_job    The job; close it with kvt_attention_job_close.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (a type that
 *         kernels do not read), KVT_E_UNAVAILABLE (not in host memory), KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the job, and all that it was opened with. Threading: any thread.
 * Since 0.1.
 */
kvt_status_t kvt_prefill_open(const struct kvt_attention_args_t *args,
                              float *out,
                              uint64_t out_count,
                              float *lse,
                              uint64_t lse_count,
                              struct kvt_attention_job_t **out_job,
                              struct kvt_error_t **err);

/**
 * How many numbers of memory a decode of this problem needs beside scratch.
 *
 * @param args    What is to be computed.
 * @param flags      KVT_DECODE_*.
 * @param out_count  Receives the number.
 * @param err        Explains a failure; may be null.
 * @return As kvt_decode_open.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_decode_memory(const struct kvt_attention_args_t *args,
                               uint64_t flags,
                               uint64_t *out_count,
                               struct kvt_error_t **err);

/**
 * Opens a job that computes the attention of the next token, or of a few. It has two steps.
 *
 * @param args       What is to be computed; rows of an index are for all of its queries.
 * @param flags         KVT_DECODE_*.
 * @param out           Receives [queries, query heads, value dim].
 * @param out_count     How many numbers it has room for.
 * @param lse           Receives [queries, query heads] log-sum-exps.
 * @param lse_count     How many it has room for.
 * @param memory        Memory of the job's until it is closed.
 * @param memory_count  How many numbers: kvt_decode_memory.
 * @param out_job       The job; close it with kvt_attention_job_close.
 * @param err           Explains a failure; may be null.
 * @return As kvt_prefill_open.
 *
 * Ownership: as kvt_prefill_open. Threading: any thread. Since 0.1.
 */
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

/**
 * Opens a job that says what each key got of the attention of a prompt's queries, after a
 * kvt_prefill_open job of the same problem has ended.
 *
 * @param args    The problem.
 * @param lse        The log-sum-exps that came out, over all keys.
 * @param lse_count  How many.
 * @param first      Sums are of the queries from this one on, counted from the problem's first.
 * @param flags      KVT_SUMS_*.
 * @param sums       Receives [query heads, keys], or [keys].
 * @param sum_count  How many numbers that are.
 * @param out_job    The job; close it with kvt_attention_job_close.
 * @param err        Explains a failure; may be null.
 * @return As kvt_prefill_open.
 *
 * Ownership: as kvt_prefill_open. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_column_sums_open(const struct kvt_attention_args_t *args,
                           const float *lse,
                           uint64_t lse_count,
                           uint32_t first,
                           uint64_t flags,
                           float *sums,
                           uint64_t sum_count,
                           struct kvt_attention_job_t **out_job,
                           struct kvt_error_t **err);

/**
 * Adds what each key got of the attention of a decode's queries to sums, when all items of
 * both steps have ended and scores were kept.
 *
 * @param job        The job.
 * @param flags      KVT_SUMS_*; sums of heads that see different keys are by head.
 * @param sums       [query heads, sum_keys] or [sum_keys] (kvt_attention_job_info), in the order in which
 *                   keys are selected.
 * @param sum_count  How many numbers that are.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, while none runs items. Since 0.1.
 */
kvt_status_t kvt_decode_sums(const struct kvt_attention_job_t *job,
                             uint64_t flags,
                             float *sums,
                             uint64_t sum_count,
                             struct kvt_error_t **err);

/**
 * Adds keys to the boxes of pages: of each page and head the least and the largest of each
 * number of its keys, [pages, key heads, 2 * key dim].
 *
 * @param boxes        The boxes.
 * @param box_count    How many numbers.
 * @param page_tokens  Tokens of a page.
 * @param first        The place of the first key: one that begins a page begins its box anew,
 *                     others make it wider.
 * @param keys         [tokens, key heads, key dim].
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED, KVT_E_UNAVAILABLE,
 *         KVT_E_TOO_NEW, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_pages_extend(float *boxes,
                              uint64_t box_count,
                              uint32_t page_tokens,
                              uint32_t first,
                              const struct kvt_rows_t *keys,
                              struct kvt_error_t **err);

/**
 * The largest product that a query can have with a key of each page, by its box:
 * [queries, query heads, count].
 *
 * @param boxes          [pages, key heads, 2 * key dim], f32 or bf16: rows of boxes.
 * @param queries        [queries, query heads, key dim].
 * @param first          The first page.
 * @param count          How many.
 * @param scores         Receives the scores.
 * @param score_count    How many numbers that are.
 * @param scratch        Memory of the call.
 * @param scratch_count  How many numbers; queries * query heads * (2 * key dim + 96) +
 *                       4096 are enough.
 * @param err            Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED,
 *         KVT_E_UNAVAILABLE, KVT_E_TOO_NEW, KVT_E_PANIC.
 *
 * Threading: any threads at a time, with pages of their own. Since 0.1.
 */
kvt_status_t kvt_pages_score(const struct kvt_rows_t *boxes,
                             const struct kvt_rows_t *queries,
                             uint32_t first,
                             uint32_t count,
                             float *scores,
                             uint64_t score_count,
                             float *scratch,
                             uint64_t scratch_count,
                             struct kvt_error_t **err);

/**
 * Puts attention to other keys together with what is there: results of pieces of the keys, by
 * their log-sum-exps.
 *
 * @param out        [rows, numbers of a value]: what is there, and comes out.
 * @param lse        [rows]: likewise.
 * @param other      Attention of the same queries to the other keys.
 * @param other_lse  Its log-sum-exps.
 * @param rows       How many rows: queries times query heads.
 * @param dim        Numbers of a row.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_PANIC.
 *
 * Threading: any threads at a time, with rows of their own. Since 0.1.
 */
kvt_status_t kvt_attention_merge(float *out,
                                 float *lse,
                                 const float *other,
                                 const float *other_lse,
                                 uint64_t rows,
                                 uint32_t dim,
                                 struct kvt_error_t **err);

/**
 * Whether all numbers of rows are finite, scales included. Kernels do not look: with others
 * they give some result. Policies refuse them.
 *
 * @param rows  The rows.
 * @param err   Says which number is not; may be null.
 * @return KVT_OK; KVT_E_INVALID when one is not, KVT_E_UNSUPPORTED, KVT_E_UNAVAILABLE,
 *         KVT_E_TOO_NEW, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_rows_check(const struct kvt_rows_t *rows, struct kvt_error_t **err);

/**
 * Opens an offload for a session. The ring is in host memory, or with KVT_OFFLOAD_ON_DEVICE in
 * memory of the store's device; the store's account pays for it, unless the engine lends it.
 *
 * @param opts  What it is for.
 * @param out   The offload; close it with kvt_offload_close.
 * @param err   Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID when the attention is not that of the session's namespace,
 *         KVT_E_SPEC, KVT_E_UNSUPPORTED (a policy that does nothing there, a device that gives
 *         out no memory), KVT_E_UNAVAILABLE (the store has no device with memory, or it is
 *         lost), KVT_E_TOO_SMALL (memory that is lent), KVT_E_BUDGET, KVT_E_LIMIT,
 *         KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the offload. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_open(const struct kvt_offload_opts_t *opts,
                              struct kvt_offload_t **out,
                              struct kvt_error_t **err);

/**
 * Closes an offload and clears the handle. Loads and puts of its own are given up; it waits
 * for their end. What the store has stays there. On a device no kernel reads buffers any more.
 *
 * @param offload  The handle; null, or a handle that is null, is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_close(struct kvt_offload_t **offload);

/**
 * How many tokens of a layer it has.
 *
 * @param offload     The offload.
 * @param layer       The layer.
 * @param out_stored  Receives those that are in the store, in whole blocks.
 * @param out_tail    Receives those behind them, which fill no block yet; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_tokens(const struct kvt_offload_t *offload,
                                uint32_t layer,
                                uint32_t *out_stored,
                                uint32_t *out_tail);

/**
 * Takes back what came behind `tokens` tokens, in all layers. To be called before
 * kvt_session_truncate: where a block is cut, its first tokens come back from the store.
 * Loads under way are given up, as by kvt_offload_release. After a failure no layer is cut: cut
 * again, there or at a multiple of a block, which brings nothing back.
 *
 * @param offload  The offload.
 * @param tokens   How many are left.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND when a block that is cut is not in the store any more,
 *         KVT_E_NOMEM, KVT_E_IO, KVT_E_UNAVAILABLE, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread; waits. Since 0.1.
 */
kvt_status_t kvt_offload_truncate(const struct kvt_offload_t *offload,
                                  uint32_t tokens,
                                  struct kvt_error_t **err);

/**
 * Goes on from tokens that are in the store already, from another session or an earlier
 * life: whole blocks. Only before anything was put; the session has these tokens. What
 * policies knew of the blocks comes back as far as it was kept with them; of others they are
 * told the keys, which are loaded for that.
 *
 * @param offload  The offload.
 * @param tokens   How many, a multiple of a block's.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY when it has tokens already, KVT_E_NOT_FOUND when keys that
 *         policies have to see are not in the store, KVT_E_INVALID, KVT_E_IO, KVT_E_AGAIN,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread; waits. Since 0.1.
 */
kvt_status_t kvt_offload_resume(const struct kvt_offload_t *offload,
                                uint32_t tokens,
                                struct kvt_error_t **err);

/**
 * What an offload has done since it was opened.
 *
 * @param offload  The offload.
 * @param out      Receives it.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_stats(const struct kvt_offload_t *offload,
                               struct kvt_offload_stats_t *out);

/**
 * How much memory the ring and the tails of an offload take that is opened so: what an engine
 * has to lend. Nothing is opened.
 *
 * @param opts       What it would be opened with; `memory` is not looked at.
 * @param out_bytes  Receives how much.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; what kvt_offload_open refuses of `opts`.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_memory_bytes(const struct kvt_offload_opts_t *opts,
                                      uint64_t *out_bytes,
                                      struct kvt_error_t **err);

/**
 * What an offload copies from now on waits for an event of the store's device: that kernels
 * have read buffers which are given back, that what is put was computed. To be called before
 * kvt_offload_put, and before the kvt_offload_release or kvt_offload_give_back of a buffer that
 * kernels may still read. Only the newest event counts: one that comes behind all that has to
 * be waited for.
 *
 * @param offload  The offload.
 * @param event    An event of the device that the store was opened with; 0 = none.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_HANDLE when it is none of that device (or the offload's handle). What
 *         the event's batch failed with: the one before still counts. KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Ownership: the event stays yours. Release it after another one or 0 was given, or the
 * offload was closed, and once the puts and loads that were begun until then have ended. What
 * waits for an event that fails, fails. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_set_ready_event(const struct kvt_offload_t *offload,
                               uint64_t event,
                               struct kvt_error_t **err);

/**
 * Keeps K and V of tokens of a layer, which go on where those before ended. The session
 * has these tokens (kvt_session_append). Policies see the keys; then whole blocks are on
 * their way into the store, the rest is in the tail.
 *
 * @param offload  The offload.
 * @param layer    The layer.
 * @param first    The position of the first: as many as the layer has.
 * @param tokens   How many.
 * @param k        K, or the latent, in host memory or in that of the store's device.
 * @param v        V; null for a latent.
 * @param opts     Queue, tag, deadline, priority of the op; null for none.
 * @param out_op   Receives an op, to be freed by you: when it is released `k` and `v` are
 *                 yours again. Receives null where they are at once. May be null when the
 *                 queue tells, and where fewer tokens are put than a block has.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (tokens that do not go on, that the session does not have,
 *         keys that are not finite), KVT_E_BUDGET, KVT_E_IO (the full tail cannot leave: nothing
 *         was taken, and the next put tries again), KVT_E_UNAVAILABLE (memory of no device of
 *         the store's, or that is lost), KVT_E_LIMIT, KVT_E_AGAIN, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *         kvt_offload_tokens says how far it came.
 *
 * Ownership: the caller owns the op. Threading: any thread; waits for a full tail to leave.
 * Since 0.1.
 */
kvt_status_t kvt_offload_put(const struct kvt_offload_t *offload,
                             uint32_t layer,
                             uint32_t first,
                             uint32_t tokens,
                             const struct kvt_view_t *k,
                             const struct kvt_view_t *v,
                             const struct kvt_submit_opts_t *opts,
                             struct kvt_op_t **out_op,
                             struct kvt_error_t **err);

/**
 * Begins to load blocks of a layer into a buffer, which must be free. kvt_offload_blocks says
 * which come, from now on; how many tokens that are with the tail, kvt_offload_wait.
 *
 * @param offload      The offload.
 * @param buffer       Which buffer of the ring.
 * @param layer        The layer.
 * @param blocks       Only of these, ascending, and without the tail: a prompt in parts
 *                     goes through earlier blocks so. Null = all there are, and the tail.
 * @param block_count  How many.
 * @param flags        KVT_OFFLOAD_LOAD_CHOSEN or 0. With it `blocks` is not null unless there is
 *                     none: then the tail comes alone.
 * @param query        The layer's queries, [tokens, query heads, key dim], for which a
 *                     policy selects; null = all blocks come.
 * @param context      Where in the sequence that is.
 * @param out_count    Receives how many blocks come; may be null.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY when the buffer is in use, KVT_E_LIMIT when it is too short for
 *         the blocks, KVT_E_INVALID, KVT_E_AGAIN, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
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

/**
 * Waits until what is loaded into a buffer is there; the tail is then behind it, as it is
 * now.
 *
 * @param offload  The offload.
 * @param buffer   The buffer.
 * @param out      Receives where K and V are; may be null.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOT_FOUND when a block is not in the store any more, KVT_E_STATE when
 *         nothing is loaded, or a full tail became a block meanwhile: load again. KVT_E_IO,
 *         KVT_E_CORRUPT, KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *         After a failure the buffer is free.
 *
 * Threading: any thread; waits. Since 0.1.
 */
kvt_status_t kvt_offload_wait(const struct kvt_offload_t *offload,
                              uint32_t buffer,
                              struct kvt_offload_kv_t *out,
                              struct kvt_error_t **err);

/**
 * The engine has computed with a buffer, and does not read it any more. A load under way
 * is given up.
 *
 * @param offload  The offload.
 * @param buffer   The buffer.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_release(const struct kvt_offload_t *offload,
                              uint32_t buffer,
                              struct kvt_error_t **err);

/**
 * Begins a pass over all layers in their order. Layers of which nobody selects blocks by a
 * query are loaded ahead, as many as there are buffers; where the policy is `predict`, the
 * next layer is, by the query of the one before.
 *
 * @param offload  The offload; what it has loaded is given up.
 * @param context  Where in the sequence that is.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_begin(const struct kvt_offload_t *offload,
                               const struct kvt_sparse_context_t *context,
                               struct kvt_error_t **err);

/**
 * Takes the next layer of a pass: its blocks are there, and its tail with all that was put.
 *
 * @param offload  The offload.
 * @param layer    The layer: 0, 1, ... in this order.
 * @param query    Its queries; null = all blocks come.
 * @param out      Receives where K and V are, and in which buffer.
 * @param err      Explains a failure; may be null.
 * @return As kvt_offload_load and kvt_offload_wait; KVT_E_STATE when no pass has begun, or
 *         it is another layer's turn.
 *
 * Threading: any thread; waits. Since 0.1.
 */
kvt_status_t kvt_offload_take(const struct kvt_offload_t *offload,
                              uint32_t layer,
                              const struct kvt_rows_t *query,
                              struct kvt_offload_kv_t *out,
                              struct kvt_error_t **err);

/**
 * Gives the layer back that was taken: its buffer is used for one that is loaded ahead.
 *
 * @param offload  The offload.
 * @param layer    The layer.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_STATE when it was not taken, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_give_back(const struct kvt_offload_t *offload,
                                   uint32_t layer,
                                   struct kvt_error_t **err);

/**
 * The blocks of a buffer, ascending; block i has the tokens from i * block_tokens on.
 *
 * @param offload    The offload.
 * @param buffer     The buffer.
 * @param blocks     Receives them; null = only the count is wanted.
 * @param capacity       How many it has room for.
 * @param out_count  Receives how many there are, also when there is no room for them.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_blocks(const struct kvt_offload_t *offload,
                                uint32_t buffer,
                                uint32_t *blocks,
                                uint64_t capacity,
                                uint64_t *out_count);

/**
 * Which rows of a buffer have tokens at these positions: what an index of positions is for
 * kernels that read the buffer. Positions that are not in it are left out.
 *
 * @param offload    The offload.
 * @param buffer     The buffer.
 * @param positions  Positions in the sequence, ascending.
 * @param count      How many.
 * @param rows       Receives the rows, ascending; room for `count`. May be `positions`.
 * @param out_count  Receives how many there are.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_rows(const struct kvt_offload_t *offload,
                              uint32_t buffer,
                              const uint32_t *positions,
                              uint64_t count,
                              uint32_t *rows,
                              uint64_t *out_count);

/**
 * What each key got of the attention of some queries: policies that want to know it are
 * told (h2o, tova, snapkv and those like it).
 *
 * @param offload    The offload.
 * @param layer      The layer.
 * @param queries    Of how many queries.
 * @param sums       For each query head (or one row for all of them) a number for each token
 *                   that is kept, in their order.
 * @param sum_count  How many numbers that are.
 * @param tokens     How many tokens are kept.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (numbers below zero or not finite, wrong counts), KVT_E_LIMIT,
 *         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_observe(const struct kvt_offload_t *offload,
                                 uint32_t layer,
                                 uint32_t queries,
                                 const float *sums,
                                 uint64_t sum_count,
                                 uint32_t tokens,
                                 struct kvt_error_t **err);

/**
 * Has policies evict tokens of a layer, if some have to go. Nothing is moved in the store:
 * blocks of which nothing is left are not loaded any more, and kvt_offload_retained says which
 * tokens of the others kernels are to see.
 *
 * @param offload      The offload.
 * @param layer        The layer.
 * @param context      Where in the sequence that is.
 * @param out_evicted  Receives 1 when some went, else 0; may be null.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_UNSUPPORTED when both policies evict, KVT_E_INVALID, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_evict(const struct kvt_offload_t *offload,
                               uint32_t layer,
                               const struct kvt_sparse_context_t *context,
                               uint32_t *out_evicted,
                               struct kvt_error_t **err);

/**
 * Which tokens of a layer are left.
 *
 * @param offload    The offload.
 * @param layer      The layer.
 * @param head       Of which list: there are `out_heads` of them, one for each head of keys
 *                   (or of queries), or one for all.
 * @param positions  Receives positions, ascending; null = only counts are wanted.
 * @param capacity       How many it has room for.
 * @param out_count  Receives how many there are, also when there is no room for them.
 * @param out_heads  Receives how many lists there are; 0 = all tokens are left. May be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_retained(const struct kvt_offload_t *offload,
                              uint32_t layer,
                              uint32_t head,
                              uint32_t *positions,
                              uint64_t capacity,
                              uint64_t *out_count,
                              uint32_t *out_heads);

/**
 * Tells a policy of rows of its own (dsa: what its indexer keeps of each token): kvt_offload_put
 * tells all others of the model's keys.
 *
 * @param offload  The offload.
 * @param layer    The layer.
 * @param first    The position of the first token.
 * @param keys     The rows.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_append_keys(const struct kvt_offload_t *offload,
                                     uint32_t layer,
                                     uint32_t first,
                                     const struct kvt_rows_t *keys,
                                     struct kvt_error_t **err);

/**
 * Gives a policy numbers of the engine's for the next load of a layer: a score for each
 * block that can be loaded (external), or a weight for each query and head (dsa).
 *
 * @param offload      The offload.
 * @param layer        The layer.
 * @param is_prefill   1 = for the policy for prompts, 0 = for text that is written.
 * @param scores       The numbers.
 * @param score_count  How many.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_UNSUPPORTED when the policy wants none, KVT_E_INVALID, KVT_E_LIMIT,
 *         KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_offload_score(const struct kvt_offload_t *offload,
                               uint32_t layer,
                               uint32_t is_prefill,
                               const float *scores,
                               uint64_t score_count,
                               struct kvt_error_t **err);

/**
 * Opens another offload for a session that was forked from an offload's (kvt_session_fork):
 * it has the same tokens. The blocks in the store are those of both, the tails are copied,
 * and so are the lists of tokens that are left; policies go on from what they know. It has a
 * ring of its own, with nothing in it, which the store's account pays for, and counts from
 * zero. A full tail leaves first.
 *
 * @param offload  The offload, which stays as it is.
 * @param session  The new session; it has the tokens that the offload's layers have, and may
 *                 have more.
 * @param out      The new offload; close it with kvt_offload_close.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID when the session is the offload's own, another store's or
 *         namespace's, or has other tokens; KVT_E_BUDGET, KVT_E_LIMIT, KVT_E_AGAIN,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the new offload. Threading: any thread; waits for a full tail to
 * leave. Since 0.1.
 */
kvt_status_t kvt_offload_fork(const struct kvt_offload_t *offload,
                              const struct kvt_session_t *session,
                              struct kvt_offload_t **out,
                              struct kvt_error_t **err);

/**
 * Opens a model and groups its tensors into units by their names. Reads headers, not
 * weights.
 *
 * @param paths         One path: a GGUF or safetensors file, the index of a sharded model,
 *                      the directory of a model, any one file of a split GGUF model. Or
 *                      all its files.
 * @param path_count    How many.
 * @param stride_bytes  sizeof(kvt_str_t).
 * @param out           The model; close it with kvt_model_close.
 * @param err           Explains a failure; may be null.
 * @return KVT_OK; KVT_E_CORRUPT (files that are not what they say, with the reason),
 *         KVT_E_UNSUPPORTED, KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT, KVT_E_INVALID,
 *         KVT_E_NOMEM, KVT_E_TOO_NEW, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the model. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_open(const struct kvt_str_t *paths,
                            uint64_t path_count,
                            uint64_t stride_bytes,
                            struct kvt_model_t **out,
                            struct kvt_error_t **err);

/**
 * Closes a model and clears the handle. Streamers that were opened with it stay; texts that
 * were borrowed from it go.
 *
 * @param model  Pointer to the handle; null, or a null handle, is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_close(struct kvt_model_t **model);

/**
 * What a model is.
 *
 * @param model  The model.
 * @param out    Filled in; start it with KVT_MODEL_INFO_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: texts are borrowed until the model is closed. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_info(const struct kvt_model_t *model, struct kvt_model_info_t *out);

/**
 * A file of a model.
 *
 * @param model  The model.
 * @param file   Which, below kvt_model_info_t.files.
 * @param out    Filled in; start it with KVT_MODEL_FILE_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the path is borrowed until the model is closed. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_file(const struct kvt_model_t *model,
                            uint32_t file,
                            struct kvt_model_file_t *out);

/**
 * A unit of a model.
 *
 * @param model  The model.
 * @param unit   Which, below kvt_model_info_t.units.
 * @param out    Filled in; start it with KVT_UNIT_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the name is borrowed until the model is closed. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_unit(const struct kvt_model_t *model, uint32_t unit, struct kvt_unit_t *out);

/**
 * A tensor of a model.
 *
 * @param model   The model.
 * @param tensor  Which, below kvt_model_info_t.tensors: they are in the order of files and
 *                offsets.
 * @param out     Filled in; start it with KVT_TENSOR_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: name and dims are borrowed until the model is closed. Threading: any thread.
 * Since 0.1.
 */
kvt_status_t kvt_model_tensor(const struct kvt_model_t *model,
                              uint32_t tensor,
                              struct kvt_tensor_t *out);

/**
 * What is in a unit, in the order of places.
 *
 * @param model         The model.
 * @param unit          The unit.
 * @param parts         Receives its parts; null with room for 0 asks for the count alone.
 * @param capacity          How many it has room for.
 * @param stride_bytes  sizeof(kvt_part_t).
 * @param out_count     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_unit_parts(const struct kvt_model_t *model,
                                  uint32_t unit,
                                  struct kvt_part_t *parts,
                                  uint64_t capacity,
                                  uint64_t stride_bytes,
                                  uint64_t *out_count);

/**
 * Where a tensor is: one part, or one for each expert, in the order of places in it.
 *
 * @param model         The model.
 * @param tensor        The tensor.
 * @param parts         Receives its parts; null with room for 0 asks for the count alone.
 * @param capacity          How many it has room for.
 * @param stride_bytes  sizeof(kvt_part_t).
 * @param out_count     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
 * @return As kvt_model_unit_parts.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_tensor_parts(const struct kvt_model_t *model,
                                    uint32_t tensor,
                                    struct kvt_part_t *parts,
                                    uint64_t capacity,
                                    uint64_t stride_bytes,
                                    uint64_t *out_count);

/**
 * The tensor of a name.
 *
 * @param model       The model.
 * @param name        The name.
 * @param name_bytes  Its length.
 * @param out         Receives its number.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_find_tensor(const struct kvt_model_t *model,
                            const char *name,
                            uint64_t name_bytes,
                            uint32_t *out);

/**
 * The unit of a layer, or of an expert of a layer.
 *
 * @param model   The model.
 * @param layer   The layer.
 * @param expert  The expert; KVT_NONE = the layer itself.
 * @param out     Receives the unit.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_find_unit(const struct kvt_model_t *model,
                             uint32_t layer,
                             uint32_t expert,
                             uint32_t *out);

/**
 * A model whose units the engine names, for files of a format that is not known here. The
 * ranges are its tensors, named after their units: "layer 3#0". Numbers of the model that a
 * plan reckons KV from are not known: say kvt_stream_terms_t.kv_bytes.
 *
 * @param table  Files and units. The library takes copies.
 * @param out    The model; close it with kvt_model_close.
 * @param err    Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (units without bytes, two of the same layer and expert, ranges
 *         that overlap or lie outside of their file), KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT,
 *         KVT_E_NOMEM, KVT_E_TOO_NEW, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the model. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_table(const struct kvt_model_table_t *table,
                             struct kvt_model_t **out,
                             struct kvt_error_t **err);

/**
 * Who would live where, and what a pass would take. Opens nothing and takes no memory;
 * kvt_stream_open makes the same plan from the same terms and what memory there is then.
 *
 * @param model         The model.
 * @param terms         What you decide; null for defaults. The seat may be a device, of which
 *                      `memory` says what is free.
 * @param memory        What memory there is; null = looked up, and no device.
 * @param out           Receives it in numbers; start it with KVT_STREAM_PLAN_INIT. May be null.
 * @param forecast      Receives what a pass takes; start it with KVT_FORECAST_INIT. May be
 *                      null.
 * @param residency         Receives the home of each unit; may be null with room for 0.
 * @param capacity     How many it has room for: kvt_model_info_t.units.
 * @param stride_bytes  sizeof(kvt_unit_residency_t).
 * @param err           Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUDGET when the model cannot run in that memory (the message says what
 *         it takes at least), KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM,
 *         KVT_E_TOO_NEW, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_plan(const struct kvt_model_t *model,
                            const struct kvt_stream_terms_t *terms,
                            const struct kvt_stream_memory_t *memory,
                            struct kvt_stream_plan_t *out,
                            struct kvt_forecast_t *forecast,
                            struct kvt_unit_residency_t *residency,
                            uint64_t capacity,
                            uint64_t stride_bytes,
                            struct kvt_error_t **err);

/**
 * The same in words, with every figure explained.
 *
 * @param model         The model.
 * @param terms         See kvt_model_plan.
 * @param memory        See kvt_model_plan.
 * @param kind          KVT_PLAN_TEXT or KVT_PLAN_JSON.
 * @param out           Receives the words, not NUL-terminated; may be null with
 *                      out_capacity 0 to learn the size.
 * @param out_capacity  Room at `out`. Free memory changes meanwhile: leave some to spare.
 * @param out_bytes     Length of the words; also written with KVT_E_TOO_SMALL. May be null.
 * @param err           Explains a failure; may be null.
 * @return As kvt_model_plan.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_plan_describe(const struct kvt_model_t *model,
                                     const struct kvt_stream_terms_t *terms,
                                     const struct kvt_stream_memory_t *memory,
                                     uint32_t kind,
                                     char *out,
                                     uint64_t out_capacity,
                                     uint64_t *out_bytes,
                                     struct kvt_error_t **err);

/**
 * What a pass would take over other links, with the homes of the plan for these terms.
 *
 * @param model        The model.
 * @param terms        See kvt_model_plan.
 * @param memory       See kvt_model_plan.
 * @param links        The other links, such as "h2d=13,disk=3.3" in gigabytes (1e9) a second;
 *                     those not named are as the terms say.
 * @param links_bytes  Its length.
 * @param out          Receives it; start it with KVT_FORECAST_INIT.
 * @param err          Explains a failure, with the offset in `links`; may be null.
 * @return As kvt_model_plan; KVT_E_SPEC, KVT_E_INVALID when a link that is needed is not known.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_model_forecast(const struct kvt_model_t *model,
                               const struct kvt_stream_terms_t *terms,
                               const struct kvt_stream_memory_t *memory,
                               const char *links,
                               uint64_t links_bytes,
                               struct kvt_forecast_t *out,
                               struct kvt_error_t **err);

/**
 * Opens the files of a model, makes a plan and takes the memory that it says. Units are on
 * their way home when this returns. With a device the engine computes there, and units come to
 * its memory; without one it computes in host memory.
 *
 * @param runtime  Where it belongs.
 * @param opts     What it streams, and how.
 * @param out      The streamer; close it with kvt_stream_close.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUDGET when the model cannot run in that memory (the message says what
 *         it takes at least), KVT_E_CORRUPT when a file is not what it was when the model was
 *         opened, KVT_E_IO, KVT_E_NOT_FOUND, KVT_E_SPEC, KVT_E_UNSUPPORTED (a device seat without
 *         a device, a host seat with one, units in place on a device that has no addresses
 *         which stay while memory moves: the host device and custom ones), KVT_E_INVALID,
 *         KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Ownership: the caller owns the streamer. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_open(const struct kvt_runtime_t *runtime,
                             const struct kvt_stream_opts_t *opts,
                             struct kvt_stream_t **out,
                             struct kvt_error_t **err);

/**
 * Closes a streamer: ends calls that wait for units, and waits for reads that are under way.
 * Checksums that are new are written to the sidecar.
 *
 * @param stream       Pointer to the handle, cleared on success; null, or a null handle, is
 *                     fine.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY while units are in use (it stays open: give them back first), or
 *         when reads have not ended at the deadline (it stays closing and valid: call again);
 *         KVT_E_REENTRANT inside a callback; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_close(struct kvt_stream_t **stream,
                              uint64_t deadline_ns,
                              struct kvt_error_t **err);

/**
 * Asks for a unit, and waits until it is there. It stays where it is until it was given back
 * as often as it was had. A unit at home where it is used costs one atomic operation.
 *
 * @param stream       The streamer.
 * @param unit         The unit.
 * @param flags        KVT_ACQUIRE_POLL or 0.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @param out          Receives where it is; start it with KVT_UNIT_LEASE_INIT.
 * @param err          Explains a failure; may be null, which costs less where KVT_E_AGAIN is
 *                     expected.
 * @return KVT_OK; KVT_E_AGAIN (poll: it is on its way), KVT_E_TIMEOUT, KVT_E_BUSY when all
 *         slots are in use by the engine, KVT_E_CORRUPT (bytes that are not what their
 *         checksums say, a file that has changed), KVT_E_IO, KVT_E_INVALID (no such unit),
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. A failed read is tried again
 *         when the unit is asked for again.
 *
 * Ownership: the bytes are borrowed until kvt_stream_release, and are to be read alone.
 * Threading: any thread; waits. Since 0.1.
 */
kvt_status_t kvt_stream_acquire(const struct kvt_stream_t *stream,
                                uint32_t unit,
                                uint64_t flags,
                                uint64_t deadline_ns,
                                struct kvt_unit_lease_t *out,
                                struct kvt_error_t **err);

/**
 * Gives a unit back, and clears what it was held by. Allowed while a streamer closes.
 *
 * @param stream  The streamer.
 * @param lease    What kvt_stream_acquire wrote.
 * @param after   The device's event after which its memory may be used for another; 0 = now.
 *                The streamer takes it over, and releases it. kvt_device_import_event makes one of an
 *                event of the engine's.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_STATE when it was given back before, KVT_E_INVALID,
 *         KVT_E_UNSUPPORTED (an event, without a device), KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC: it was not given back. What a copy failed with that was on its way when
 *         the unit was had: it was given back, `held` is cleared, and what was computed with
 *         it is wrong.
 *
 * Threading: any thread, also another one than had it. Since 0.1.
 */
kvt_status_t kvt_stream_release(const struct kvt_stream_t *stream,
                                struct kvt_unit_lease_t *lease,
                                uint64_t after,
                                struct kvt_error_t **err);

/**
 * Waits until all residents are at home. Not needed: units that are asked for come first.
 *
 * @param stream       The streamer.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TIMEOUT, KVT_E_REENTRANT inside a callback; KVT_E_IO, KVT_E_CORRUPT,
 *         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread; waits. Since 0.1.
 */
kvt_status_t kvt_stream_wait_resident(const struct kvt_stream_t *stream,
                             uint64_t deadline_ns,
                             struct kvt_error_t **err);

/**
 * How far that is.
 *
 * @param stream  The streamer.
 * @param out     Filled in; start it with KVT_STREAM_PROGRESS_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_progress(const struct kvt_stream_t *stream,
                                 struct kvt_stream_progress_t *out);

/**
 * A pass begins: units come in the order that was given. Files are looked at: a model that was
 * changed meanwhile is not used any more.
 *
 * @param stream  The streamer.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_CORRUPT when a file is not what it was, KVT_E_IO, KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_pass_begin(const struct kvt_stream_t *stream, struct kvt_error_t **err);

/**
 * A pass has ended. Unless KVT_STREAM_ONCE was said, the first units of the next are on
 * their way already.
 *
 * @param stream  The streamer.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_pass_end(const struct kvt_stream_t *stream, struct kvt_error_t **err);

/**
 * The engine will use these units, such as the experts that a router has named: they are
 * fetched as far as there are slots that nobody needs. What was hinted before and has not
 * been used may leave.
 *
 * @param stream  The streamer.
 * @param units   The units.
 * @param count   How many.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (no such unit), KVT_E_LIMIT, KVT_E_CLOSED, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_hint(const struct kvt_stream_t *stream,
                             const uint32_t *units,
                             uint64_t count,
                             struct kvt_error_t **err);

/**
 * Gives weights more memory, or less, while passes go on: the context grows, KV needs room.
 * Returns at once: units in use move when they are given back, the others are brought
 * meanwhile (kvt_stream_progress says how far). Slots stay as they are, except those for
 * experts: with less memory there may be fewer, with more as many as at opening.
 *
 * @param stream  The streamer.
 * @param limits    What there is from now on.
 * @param out     Receives the new plan; start it with KVT_STREAM_PLAN_INIT. May be null.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUDGET when the slots do not fit any more (nothing was changed),
 *         KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_rebalance(const struct kvt_stream_t *stream,
                                  const struct kvt_stream_limits_t *limits,
                                  struct kvt_stream_plan_t *out,
                                  struct kvt_error_t **err);

/**
 * Who lives where now.
 *
 * @param stream        The streamer.
 * @param out           Receives it in numbers; start it with KVT_STREAM_PLAN_INIT. May be null.
 * @param forecast      Receives what a pass takes; start it with KVT_FORECAST_INIT. May be
 *                      null.
 * @param residency         Receives the home of each unit; may be null with room for 0.
 * @param capacity     How many it has room for.
 * @param stride_bytes  sizeof(kvt_unit_residency_t).
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_plan(const struct kvt_stream_t *stream,
                             struct kvt_stream_plan_t *out,
                             struct kvt_forecast_t *forecast,
                             struct kvt_unit_residency_t *residency,
                             uint64_t capacity,
                             uint64_t stride_bytes);

/**
 * The same in words, with every figure explained.
 *
 * @param stream        The streamer.
 * @param kind          KVT_PLAN_TEXT or KVT_PLAN_JSON.
 * @param out           Receives the words, not NUL-terminated; may be null with
 *                      out_capacity 0 to learn the size.
 * @param out_capacity  Room at `out`.
 * @param out_bytes     Length of the words; also written with KVT_E_TOO_SMALL. May be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_plan_describe(const struct kvt_stream_t *stream,
                                      uint32_t kind,
                                      char *out,
                                      uint64_t out_capacity,
                                      uint64_t *out_bytes);

/**
 * What a pass would take over other links.
 *
 * @param stream       The streamer.
 * @param links        The other links, such as "disk=3.3" in gigabytes (1e9) a second; those
 *                     not named are as they are.
 * @param links_bytes  Its length.
 * @param out          Receives it; start it with KVT_FORECAST_INIT.
 * @param err          Explains a failure, with the offset in `links`; may be null.
 * @return KVT_OK; KVT_E_SPEC, KVT_E_LIMIT, KVT_E_INVALID when a link that is needed is not
 *         known; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_forecast(const struct kvt_stream_t *stream,
                                const char *links,
                                uint64_t links_bytes,
                                struct kvt_forecast_t *out,
                                struct kvt_error_t **err);

/**
 * What a streamer has done since it was opened; also of a poisoned one.
 *
 * @param stream  The streamer.
 * @param out     Filled in; start it with KVT_STREAM_STATS_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_stats(const struct kvt_stream_t *stream, struct kvt_stream_stats_t *out);

/**
 * What became of experts, by layer.
 *
 * @param stream        The streamer.
 * @param rows          Receives a row for each layer that has experts; null with room for 0
 *                      asks for the count alone.
 * @param capacity          How many it has room for.
 * @param stride_bytes  sizeof(kvt_expert_stats_t).
 * @param out_count     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_layers(const struct kvt_stream_t *stream,
                               struct kvt_expert_stats_t *rows,
                               uint64_t capacity,
                               uint64_t stride_bytes,
                               uint64_t *out_count);

/**
 * What happened last, for a picture of it: as many marks as kvt_stream_opts_t.marks says, the
 * oldest first.
 *
 * @param stream        The streamer.
 * @param rows          Receives them; null with room for 0 asks for the count alone.
 * @param capacity          How many it has room for.
 * @param stride_bytes  sizeof(kvt_stream_span_t).
 * @param out_count     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
 * @return As kvt_stream_layers.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_marks(const struct kvt_stream_t *stream,
                              struct kvt_stream_span_t *rows,
                              uint64_t capacity,
                              uint64_t stride_bytes,
                              uint64_t *out_count);

/**
 * How files are read, for people, and why not better.
 *
 * @param stream        The streamer.
 * @param out           Receives a line of text, not NUL-terminated; may be null with
 *                      out_capacity 0 to learn the size.
 * @param out_capacity  Room at `out`.
 * @param out_bytes     Length of the text; also written with KVT_E_TOO_SMALL. May be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_describe_io(const struct kvt_stream_t *stream,
                               char *out,
                               uint64_t out_capacity,
                               uint64_t *out_bytes);

/**
 * Reads a unit from its files, past whatever is in memory, and compares it with its
 * checksums; what nobody knows yet is noted. The calling thread reads, and waits.
 *
 * @param stream   The streamer.
 * @param unit     The unit.
 * @param out_sum  Receives its checksum; may be null.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_CORRUPT when it is not what it was, KVT_E_IO, KVT_E_INVALID, KVT_E_BUDGET,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread; waits. Since 0.1.
 */
kvt_status_t kvt_stream_verify(const struct kvt_stream_t *stream,
                               uint32_t unit,
                               uint64_t *out_sum,
                               struct kvt_error_t **err);

/**
 * The checksum of a unit, if all of it has been looked at (KVT_VERIFY_*, or a sidecar).
 *
 * @param stream  The streamer.
 * @param unit    The unit.
 * @param out     Receives it.
 * @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_stream_checksum(const struct kvt_stream_t *stream, uint32_t unit, uint64_t *out);

/**
 * The address that a unit has in place (KVT_STREAM_IN_PLACE), from the opening to the close:
 * an engine can set its pointers to weights once. There is memory only while the unit is had:
 * reading there at another time reads zeros, or what is being brought; on a device it may be an
 * error after which the device is lost. With a device the address is the device's, but for
 * units that the processor uses (kvt_unit_lease_t.memory says so): theirs are outside of the range.
 *
 * @param stream       The streamer.
 * @param unit         The unit; KVT_NONE = the whole range of addresses.
 * @param out_address  Receives the address.
 * @param out_bytes    Receives how many bytes it has; may be null.
 * @return KVT_OK; KVT_E_STATE when units are not in place, KVT_E_INVALID, KVT_E_HANDLE,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the range is the streamer's, and goes with its close. Threading: any thread.
 * Since 0.1.
 */
kvt_status_t kvt_stream_unit_address(const struct kvt_stream_t *stream,
                              uint32_t unit,
                              const void **out_address,
                              uint64_t *out_bytes);

/**
 * Opens a device.
 *
 * @param runtime  Where it belongs.
 * @param opts     Which one.
 * @param out      The device; close it with kvt_device_close.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_UNAVAILABLE (CUDA: no driver, one that is too old or broken, or no such
 *         device; the message says which), KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW,
 *         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the device. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_open(const struct kvt_runtime_t *runtime,
                             const struct kvt_device_opts_t *opts,
                             struct kvt_device_t **out,
                             struct kvt_error_t **err);

/**
 * Closes a device: refuses new work and waits for what is under way, and for calls of other
 * threads. Its memory that was not given back goes with it.
 *
 * @param device       Pointer to the handle, cleared on success; null, or a null handle, is
 *                     fine.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY while a store or a streamer has it (it stays open), or when work
 *         has not ended at the deadline (it stays closing and valid: call again);
 *         KVT_E_REENTRANT inside a callback; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_close(struct kvt_device_t **device,
                              uint64_t deadline_ns,
                              struct kvt_error_t **err);

/**
 * What a device is and can do.
 *
 * @param device  The device.
 * @param out     Filled in; start it with KVT_DEVICE_INFO_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_info(const struct kvt_device_t *device, struct kvt_device_info_t *out);

/**
 * A device in words, for logs: its name, and how it copies.
 *
 * @param device        The device.
 * @param out           Receives the words, not NUL-terminated; may be null.
 * @param out_capacity  How many bytes there is room for.
 * @param out_bytes     Length of the words; also written with KVT_E_TOO_SMALL. May be null.
 * @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_describe(const struct kvt_device_t *device,
                                 char *out,
                                 uint64_t out_capacity,
                                 uint64_t *out_bytes);

/**
 * Sets memory of a device aside.
 *
 * @param device  The device.
 * @param bytes   How much.
 * @param out     What it is; start it with KVT_DEVICE_MEMORY_INIT. What is in it is not said.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_NOMEM, KVT_E_UNSUPPORTED (it has none to give), KVT_E_UNAVAILABLE (the
 *         device is lost), KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Ownership: give it back with kvt_device_free; else it goes with the device. Threading: any
 * thread. Since 0.1.
 */
kvt_status_t kvt_device_alloc(const struct kvt_device_t *device,
                              uint64_t bytes,
                              struct kvt_device_memory_t *out,
                              struct kvt_error_t **err);

/**
 * Gives memory back.
 *
 * @param device  The device that gave it.
 * @param memory  As kvt_device_alloc wrote it.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY while work under way is seen to use it; KVT_E_HANDLE (it is not
 *         this device's, or was given back; or the device's handle), KVT_E_INVALID,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_free(const struct kvt_device_t *device,
                             const struct kvt_device_memory_t *memory,
                             struct kvt_error_t **err);

/**
 * Tells a device of host memory that copies will use again and again, so that they are as fast
 * as they can be: CUDA pins it. Where it cannot, copies work, are slower, and wait in the call;
 * kvt_device_describe says how much memory that is. A device to which all host memory is the same
 * does nothing.
 *
 * @param device   The device.
 * @param address  Where it starts, of a page.
 * @param bytes    How much.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_INVALID (also where it overlaps what the device was told of),
 *         KVT_E_UNAVAILABLE, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. What a
 *         device of the engine's own says.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_register_host(const struct kvt_device_t *device,
                                      void *address,
                                      uint64_t bytes,
                                      struct kvt_error_t **err);

/**
 * Takes that back, before the memory goes.
 *
 * @param device   The device.
 * @param address  As it was said.
 * @param err      Explains a failure; may be null.
 * @return KVT_OK; KVT_E_HANDLE (CUDA was not told of it; or the device's handle),
 *         KVT_E_UNAVAILABLE, KVT_E_FORKED, KVT_E_PANIC. What a device of the engine's own says.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_unregister_host(const struct kvt_device_t *device,
                                        void *address,
                                        struct kvt_error_t **err);

/**
 * Puts copies on a stream, behind an event if one is given, and behind what is there. Without
 * copies it marks the place. CUDA waits in the call for what they are behind where they go from
 * host to host memory, or use any that was not told of (kvt_device_register_host) or not pinned.
 *
 * @param device        The device.
 * @param stream        0 to kvt_device_info_t.streams - 1.
 * @param after         An event of the device's; 0 = none.
 * @param copies        The copies; their sums are written.
 * @param count         How many, at most 65,536.
 * @param stride_bytes  sizeof(kvt_copy_t).
 * @param out_event     Receives the event of their end; release it with kvt_device_release.
 * @param err           Explains a failure; may be null.
 * @return KVT_OK: they are on their way, or done where the device is not asynchronous;
 *         KVT_E_INVALID, KVT_E_LIMIT, KVT_E_UNSUPPORTED (memory that the device does not
 *         reach), KVT_E_TOO_NEW, KVT_E_AGAIN (65,536 events are open), KVT_E_STATE (a graph is
 *         made of the stream), KVT_E_UNAVAILABLE (the device is lost), KVT_E_CLOSED,
 *         KVT_E_HANDLE, KVT_E_NOMEM, KVT_E_IO, KVT_E_FORKED, KVT_E_PANIC. What `after` failed
 *         with.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_copy(const struct kvt_device_t *device,
                             uint32_t stream,
                             uint64_t after,
                             struct kvt_copy_t *copies,
                             uint64_t count,
                             uint64_t stride_bytes,
                             uint64_t *out_event,
                             struct kvt_error_t **err);

/**
 * How far an event is. Never waits for one; at most until another thread's call has put its work
 * on a stream.
 *
 * @param device  The device.
 * @param event   One of its events.
 * @return KVT_OK: it has come. KVT_E_AGAIN: not yet. What its batch failed with; of targets it
 *         is not known then what they have. KVT_E_HANDLE: it is none of this device, or was
 *         released. KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_query(const struct kvt_device_t *device, uint64_t event);

/**
 * Waits for an event.
 *
 * @param device       The device.
 * @param event        One of its events.
 * @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
 * @param err          Explains a failure; may be null.
 * @return KVT_OK: it has come; KVT_E_TIMEOUT; what its batch failed with; KVT_E_HANDLE,
 *         KVT_E_REENTRANT inside a callback, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_wait(const struct kvt_device_t *device,
                             uint64_t event,
                             uint64_t deadline_ns,
                             struct kvt_error_t **err);

/**
 * The checksums of the copies of a batch that wanted one (KVT_COPY_CHECKSUM), in their order, from
 * when its event has come until that is released. Who copies by itself holds them against
 * kvt_checksum of what is in host memory: bytes that changed on the bus have another. Never
 * waits.
 *
 * @param device     An asynchronous device that sums (KVT_DEVICE_CHECKSUMS): others have put sums
 *                   into the copies.
 * @param event      One of its events.
 * @param sums       Receives checksums.
 * @param capacity   How many there is room for, at most 65,536.
 * @param out_count  How many were written.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY (the event has not come), what its batch failed with,
 *         KVT_E_UNSUPPORTED (the device has no such sums), KVT_E_INVALID, KVT_E_LIMIT,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_checksums(const struct kvt_device_t *device,
                             uint64_t event,
                             uint64_t *sums,
                             uint64_t capacity,
                             uint64_t *out_count,
                             struct kvt_error_t **err);

/**
 * Which events have ended, well or not: of an asynchronous device each is told once, unless it
 * was released before. Never waits for one. Who shares a device with a store or a streamer is
 * told of their events, too, and so is who polls while another thread's kvt_device_copy waits.
 *
 * @param device     The device.
 * @param events     Receives events.
 * @param capacity   How many there is room for, at most 65,536.
 * @param out_count  How many were written.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_poll(const struct kvt_device_t *device,
                             uint64_t *events,
                             uint64_t capacity,
                             uint64_t *out_count);

/**
 * Forgets events that have ended.
 *
 * @param device  The device.
 * @param events  The events.
 * @param count   How many, at most 65,536.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_BUSY (one has not ended) and KVT_E_HANDLE (one is none of this device,
 *         or was released; a device that is not asynchronous knows its events for ever): those
 *         before it are released. KVT_E_INVALID, KVT_E_LIMIT,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_release(const struct kvt_device_t *device,
                                const uint64_t *events,
                                uint64_t count,
                                struct kvt_error_t **err);

/**
 * Makes an event of the device's that comes when an event of the engine's own has come: what is
 * behind it waits for the engine's kernels, and no thread does.
 *
 * @param device     The device.
 * @param raw        The engine's event: for CUDA a CUevent that was recorded, as a number.
 * @param out_event  Receives the event; release it with kvt_device_release.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_UNSUPPORTED, KVT_E_HANDLE (it is none, or of another context; or the
 *         device's handle), KVT_E_AGAIN, KVT_E_STATE, KVT_E_UNAVAILABLE, KVT_E_CLOSED,
 *         KVT_E_INVALID, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_import_event(const struct kvt_device_t *device,
                                     uint64_t raw,
                                     uint64_t *out_event,
                                     struct kvt_error_t **err);

/**
 * Has a stream of the engine's own go on only when an event has come. No thread waits.
 *
 * @param device      The device.
 * @param raw_stream  The engine's stream: for CUDA a CUstream, as a number.
 * @param event       One of the device's events.
 * @param err         Explains a failure; may be null.
 * @return KVT_OK; KVT_E_UNSUPPORTED, KVT_E_HANDLE (of the event, the stream or the device),
 *         KVT_E_STATE (a graph is made of the stream), KVT_E_UNAVAILABLE, KVT_E_INVALID,
 *         KVT_E_FORKED, KVT_E_PANIC. What the event's batch failed with.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_stream_wait(const struct kvt_device_t *device,
                                    uint64_t raw_stream,
                                    uint64_t event,
                                    struct kvt_error_t **err);

/**
 * Makes an event that comes when kvt_device_signal_event says so: batches, moves and streams can be put
 * behind it before. Closing the device or its runtime keeps it, too. A copy that the device can
 * only make in its call (CUDA: within host memory, or of host memory that is not registered)
 * waits there for what it is behind: then another thread has to keep it.
 *
 * @param device     The device.
 * @param out_event  Receives the event; release it with kvt_device_release once it was kept.
 * @param err        Explains a failure; may be null.
 * @return KVT_OK; KVT_E_UNSUPPORTED (the device, or its driver, has no such thing), KVT_E_AGAIN
 *         (1,024 are known), KVT_E_UNAVAILABLE, KVT_E_CLOSED, KVT_E_NOMEM, KVT_E_INVALID,
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_create_event(const struct kvt_device_t *device,
                                     uint64_t *out_event,
                                     struct kvt_error_t **err);

/**
 * Has an event of kvt_device_create_event come: what is behind it goes on. One that has come already
 * stays as it is.
 *
 * @param device  The device.
 * @param event   The event.
 * @param err     Explains a failure; may be null.
 * @return KVT_OK; KVT_E_HANDLE (it is no promise of this device's, or was released; or the
 *         device's handle); of a custom device what its `keep` says; KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_device_signal_event(const struct kvt_device_t *device,
                                     uint64_t event,
                                     struct kvt_error_t **err);

/**
 * Has a stream of the engine's own go on only when an op was released, well or not: ask the op
 * afterwards. The op need not have begun. No thread waits. A device or a runtime that is closed
 * before lets the stream go on.
 *
 * With CUDA the stream waits for a number in memory (cuStreamWaitValue32), of which the driver
 * knows no more: what releases the op must not itself be behind that stream.
 *
 * @param device      The device.
 * @param raw_stream  The engine's stream: for CUDA a CUstream, as a number.
 * @param op          The op, of any kind. It may be freed, once it was released.
 * @param err         Explains a failure; may be null.
 * @return KVT_OK (also: the op was released before); KVT_E_UNSUPPORTED, KVT_E_HANDLE (of the op,
 *         the stream or the device), KVT_E_STATE (a graph is made of the stream), KVT_E_AGAIN
 *         (as many promises are open as can be), KVT_E_UNAVAILABLE, KVT_E_CLOSED, KVT_E_NOMEM,
 *         KVT_E_INVALID, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_device_stream_wait_op(const struct kvt_device_t *device,
                                       uint64_t raw_stream,
                                       const struct kvt_op_t *op,
                                       struct kvt_error_t **err);

/**
 * Puts kernels on a stream, behind an event if one is given, and behind what is there.
 *
 * @param device        The device; kvt_device_info says which kernels it has.
 * @param stream        0 to kvt_device_info_t.streams - 1.
 * @param after         An event of the device's; 0 = none.
 * @param kernels       The kernels, done in order.
 * @param count         How many, at most 4,096.
 * @param stride_bytes  sizeof(kvt_kernel_t).
 * @param out_event     Receives the event of their end; release it with kvt_device_release.
 * @param err           Explains a failure; may be null.
 * @return KVT_OK: the kernels are on their way; KVT_E_UNSUPPORTED, KVT_E_INVALID, KVT_E_LIMIT,
 *         KVT_E_TOO_NEW, KVT_E_AGAIN (65,536 events are open), KVT_E_UNAVAILABLE (the device is
 *         lost), KVT_E_STATE, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_NOMEM, KVT_E_FORKED,
 *         KVT_E_PANIC. What `after` failed with.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_launch(const struct kvt_device_t *device,
                               uint32_t stream,
                               uint64_t after,
                               const struct kvt_kernel_t *kernels,
                               uint64_t count,
                               uint64_t stride_bytes,
                               uint64_t *out_event,
                               struct kvt_error_t **err);

/**
 * Lays an index out for KVT_DEVICE_KERNEL_PREFILL, and tells the kernel of it: heads, then `starts`, then
 * `items`, as kvt_index_t has them, one behind the other. It is checked here: the kernel trusts
 * it. The caller copies the bytes to where the device reaches them, and sets `scratch`.
 *
 * @param index       Which keys are seen; null or without heads = all, and there are no bytes.
 * @param kernel      A kernel whose query_count, query_heads, key_heads, tokens and first are
 *                    set; its count, numbers, counts, index and scratch_bytes (what is needed)
 *                    are written.
 * @param address     Where the bytes will be for the device: a multiple of 4, not 0.
 * @param to          Receives the bytes.
 * @param out_capacity  How many it has room for.
 * @param out_bytes   Receives how many there are, also with KVT_E_TOO_SMALL.
 * @param err         Explains a failure; may be null.
 * @return KVT_OK; KVT_E_TOO_SMALL (the kernel stays as it is), KVT_E_INVALID (an index that is not
 *         sound, too), KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, also in callbacks. Since 0.1.
 */
kvt_status_t kvt_kernel_pack_index(const struct kvt_index_t *index,
                              struct kvt_kernel_t *kernel,
                              uint64_t address,
                              void *to,
                              uint64_t out_capacity,
                              uint64_t *out_bytes,
                              struct kvt_error_t **err);

/**
 * Puts a device to the test: memory, copies of all sizes and layouts in all places, order,
 * events, deadlines, refusals, threads. Whoever brings a device of their own
 * (kvt_device_custom_t) runs this first. It uses a few hundred MiB of memory at most, and
 * nothing else should use the device meanwhile.
 *
 * @param device     The device.
 * @param opts       How; null for defaults.
 * @param report     Hears of each check; may be null.
 * @param user_data  Handed to it.
 * @param out        How many checks ended how; start it with KVT_CONFORMANCE_REPORT_INIT.
 * @param err        Explains a failure of the call; may be null.
 * @return KVT_OK, also where checks failed: look at `out`. KVT_E_INVALID, KVT_E_LIMIT,
 *         KVT_E_TOO_NEW, KVT_E_REENTRANT inside a callback, KVT_E_HANDLE, KVT_E_FORKED,
 *         KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_device_conformance(const struct kvt_device_t *device,
                                    const struct kvt_conformance_opts_t *opts,
                                    kvt_conformance_fn report,
                                    void *user_data,
                                    struct kvt_conformance_report_t *out,
                                    struct kvt_error_t **err);

/**
 * Reads a trace from a file of one of the known kinds, whole.
 *
 * @param opts  What to read.
 * @param out   The trace; free it with kvt_trace_free.
 * @param err   Explains a failure, with the place in the file; may be null.
 * @return KVT_OK; KVT_E_IO, KVT_E_NOT_FOUND, KVT_E_CORRUPT, KVT_E_SPEC, KVT_E_LIMIT,
 *         KVT_E_NOMEM, KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the trace. Threading: any thread; takes as long as the
 * file is long. Since 0.1.
 */
kvt_status_t kvt_trace_open(const struct kvt_trace_opts_t *opts,
                            struct kvt_trace_t **out,
                            struct kvt_error_t **err);

/**
 * Makes a workload up: the same for the same options on every machine.
 *
 * @param opts  What to make; its path is not used.
 * @param out   The trace; free it with kvt_trace_free.
 * @param err   Explains a failure; may be null.
 * @return KVT_OK; KVT_E_SPEC, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_INVALID, KVT_E_TOO_NEW,
 *         KVT_E_FORKED, KVT_E_PANIC.
 *
 * Ownership: the caller owns the trace. Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_trace_generate(const struct kvt_trace_opts_t *opts,
                                struct kvt_trace_t **out,
                                struct kvt_error_t **err);

/**
 * Frees a trace. Replays that are going on go on to their end.
 *
 * @param trace  Pointer to the handle, which is cleared; null is fine.
 * @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread. Since 0.1.
 */
kvt_status_t kvt_trace_free(struct kvt_trace_t **trace);

/**
 * What is in a trace.
 *
 * @param trace  The trace.
 * @param out    Filled in; start it with KVT_TRACE_INFO_INIT.
 * @return KVT_OK; KVT_E_INVALID, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread; goes through the whole trace. Since 0.1.
 */
kvt_status_t kvt_trace_info(const struct kvt_trace_t *trace, struct kvt_trace_info_t *out);

/**
 * Replays a trace under a policy: the code that decides in production, driven as an
 * engine would.
 *
 * @param trace  The trace.
 * @param opts   Policy, capacity and the rest.
 * @param out    Filled in; start it with KVT_REPLAY_REPORT_INIT.
 * @param err    Explains a failure; may be null.
 * @return KVT_OK; KVT_E_SPEC, KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_INVALID, KVT_E_TOO_NEW,
 *         KVT_E_CANCELLED (progress said so), KVT_E_REENTRANT (in a callback),
 *         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
 *
 * Threading: any thread, several at a time; takes as long as the trace. Since 0.1.
 */
kvt_status_t kvt_trace_replay(const struct kvt_trace_t *trace,
                              const struct kvt_replay_opts_t *opts,
                              struct kvt_replay_report_t *out,
                              struct kvt_error_t **err);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVTIER_H */
