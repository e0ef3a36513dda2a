/// @file
/// Traces: reading, generation, and replay, which measures a policy.
///
/// A trace is a list of requests with the hashes of their blocks. Replaying it on a policy gives
/// the hit ratio, the cost of misses and the time of decisions, without an engine.
///
/// Life cycle: kvt_trace_open or kvt_trace_generate, kvt_trace_replay as often as wanted,
/// kvt_trace_free.
///
///     kvt_trace_opts_t opts = KVT_TRACE_OPTS_INIT;
///     opts.path = "requests.jsonl", opts.path_bytes = KVT_NUL_TERMINATED;
///     if (kvt_trace_open(&opts, &trace, &err) != KVT_OK) return fail(err);
///     kvt_replay_opts_t replay = KVT_REPLAY_OPTS_INIT;
///     replay.spec = "lru", replay.spec_bytes = KVT_NUL_TERMINATED;
///     replay.capacity_blocks = 5000;
///     kvt_replay_report_t report = KVT_REPLAY_REPORT_INIT;
///     if (kvt_trace_replay(trace, &replay, &report, &err) != KVT_OK) return fail(err);
///     printf("%.1f %% of the tokens found\n", 100.0 * (double)report.hit_tokens / (double)report.tokens);
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_TRACE_H
#define KVTIER_TRACE_H

#include <kvtier/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Traces ---------------------------------------------------------------------------------- */

/// Requests to a KV cache over time. Immutable; needs no runtime.
typedef struct kvt_trace_t kvt_trace_t;

/// Flags of a trace.
typedef uint64_t kvt_trace_flags_t;
enum {
    /// Each block becomes a request of its own, without a prefix.
    KVT_TRACE_FLAT = 1,
};

/// Flags of a replay.
typedef uint64_t kvt_replay_flags_t;
enum {
    /// The engine can use blocks after a hole.
    KVT_REPLAY_HOLES = 1,
    /// Does not measure decision times; faster.
    KVT_REPLAY_UNTIMED = 2,
};

/// Hints that the policy receives. STOP: the stop reason of each request, where the trace has it;
/// NONE: no hints; THINK: as STOP, and the time of the session's next request.
typedef uint32_t kvt_hints_t;
enum {
    KVT_HINTS_STOP = 0,
    KVT_HINTS_NONE = 1,
    KVT_HINTS_THINK = 2,
};

/// Receives the progress of a replay, every 256 requests and at the end, on the calling thread.
/// Returns 0 to cancel the replay. Must not unwind.
typedef int32_t (*kvt_progress_fn)(void *user_data, uint64_t requests_done, uint64_t requests);

/// Options of kvt_trace_open and kvt_trace_generate.
typedef struct kvt_trace_opts_t {
    uint64_t struct_size;
    /// KVT_TRACE_FLAT or 0.
    kvt_trace_flags_t flags;
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
#define KVT_TRACE_OPTS_INIT KVT_INIT_(kvt_trace_opts_t)

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
#define KVT_TRACE_INFO_INIT KVT_INIT_(kvt_trace_info_t)

/// Options of kvt_trace_replay.
typedef struct kvt_replay_opts_t {
    uint64_t struct_size;
    kvt_replay_flags_t flags;
    /// Policy, such as "lru"; not "custom".
    const char *spec;
    uint64_t spec_bytes;
    /// Capacity in blocks, at least 1; times `layers` at most 2^28.
    uint64_t capacity_blocks;
    /// Requests replayed before counting starts.
    uint64_t warm_up;
    /// Objects are cells of this many layers, at most 1,024; 0 = whole blocks.
    uint32_t layers;
    kvt_hints_t hints;
    /// Attention cost of a token per token of context, 0 to 1e12, where computing a token costs 1;
    /// 0 = 1 / 53,800, a model of the 70B class.
    double alpha;
    /// May be null.
    kvt_progress_fn progress;
    /// Passed to `progress`.
    void *user_data;
} kvt_replay_opts_t;
#define KVT_REPLAY_OPTS_INIT KVT_INIT_(kvt_replay_opts_t)

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
#define KVT_REPLAY_REPORT_INIT KVT_INIT_(kvt_replay_report_t)

/// Reads a trace from a file, to its end. The file is not trusted.
///
/// @param out  Free it with kvt_trace_free.
/// @return KVT_E_INVALID (also malformed content; the message names the place), KVT_E_NOT_FOUND,
///         KVT_E_IO, KVT_E_CORRUPT (a damaged zstd or kvtier file), KVT_E_UNSUPPORTED (Parquet),
///         KVT_E_SPEC (unknown kind), KVT_E_LIMIT.
kvt_status_t kvt_trace_open(const kvt_trace_opts_t *opts, kvt_trace_t **out, kvt_error_t **err);

/// Generates a workload. Equal options give equal traces on every machine; `path` and `gap_ns` are
/// ignored.
///
/// @param out  Free it with kvt_trace_free.
/// @return KVT_E_SPEC (unknown kind), KVT_E_LIMIT (more than 90 days or 16 million sessions).
kvt_status_t kvt_trace_generate(const kvt_trace_opts_t *opts, kvt_trace_t **out, kvt_error_t **err);

/// Frees a trace. Replays in progress continue to their end.
kvt_status_t kvt_trace_free(kvt_trace_t **trace);

/// Computes the totals of a trace. Reads all of its requests.
kvt_status_t kvt_trace_info(const kvt_trace_t *trace, kvt_trace_info_t *out);

/// Replays a trace on a policy: the code of production, driven as by an engine.
///
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_CANCELLED (`progress` returned 0).
///
/// Threading: inside any callback it returns KVT_E_REENTRANT.
kvt_status_t kvt_trace_replay(const kvt_trace_t *trace, const kvt_replay_opts_t *opts,
                              kvt_replay_report_t *out, kvt_error_t **err);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_TRACE_H */
