/// @file
/// Attention on the processor: rows of queries, keys and values, and jobs that compute with them.
///
/// The kernels compute exact attention over the keys that a selection lists: prefill, decode, and
/// sums of attention weights by key. A job is divided into steps and items, so that an engine runs
/// it on its own threads. Rows are views with an element type, and scales where they are quantized.
///
/// Life cycle: kvt_prefill_open or kvt_decode_open, kvt_attention_job_run for each step,
/// kvt_attention_job_close. Outputs and inputs stay in place until the job is closed.
///
///     /* Decode: one query of 8 heads over 4096 keys of 2 heads, 128 elements each. */
///     kvt_rows_t q = KVT_ROWS_INIT, k = KVT_ROWS_INIT, v = KVT_ROWS_INIT;
///     q.dtype = KVT_DTYPE_F32, q.view.address = query, q.view.tokens = 1, q.view.heads = 8;
///     q.view.run_bytes = 128 * sizeof(float);
///     k.dtype = KVT_DTYPE_F16, k.view.address = keys, k.view.tokens = 4096, k.view.heads = 2;
///     k.view.run_bytes = 128 * 2;
///     v = k, v.view.address = values;
///     kvt_attention_args_t args = KVT_ATTENTION_ARGS_INIT;
///     args.queries = &q, args.keys = &k, args.values = &v, args.first_query = 4095;
///     uint64_t floats = 0;
///     if (kvt_decode_memory(&args, 0, &floats, &err) != KVT_OK) return fail(err);
///     use(&floats); /* allocate that many floats, then kvt_decode_open and kvt_attention_job_run */
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_ATTENTION_H
#define KVTIER_ATTENTION_H

#include <kvtier/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_index_t; /* kvtier/sparse.h */

/* ---- Rows and shapes of attention ------------------------------------------------------------ */

/// Shapes of attention.
typedef uint32_t kvt_attention_kind_t;
enum {
    /// Separate keys and values, by head.
    KVT_ATTENTION_SPLIT = 0,
    /// One latent row a token for all heads (MLA); values are its first elements.
    KVT_ATTENTION_LATENT = 1,
};

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
    kvt_attention_kind_t kind;
    /// Tokens of a block, the unit of loading: 1 to 2^20. With a session: its chunk_tokens.
    uint32_t block_tokens;
    /// Longest sequence, 1 to 2^30 tokens.
    uint32_t max_tokens;
    /// Factor of query-key products, finite; 0 = 1 / sqrt(key_dim).
    float scale;
    uint32_t reserved;
} kvt_attention_t;
#define KVT_ATTENTION_INIT KVT_INIT_(kvt_attention_t)

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
#define KVT_SPARSE_CONTEXT_INIT KVT_INIT_(kvt_sparse_context_t)

/// Scales of int8 rows: none, one per token and head ([tokens, heads]), or one per head and element
/// ([heads, dim]).
typedef uint32_t kvt_scales_t;
enum {
    KVT_SCALES_NONE = 0,
    KVT_SCALES_TOKEN = 1,
    KVT_SCALES_CHANNEL = 2,
};

/// Queries, keys or values that the library reads: one row of `dim` elements per token and head.
typedef struct kvt_rows_t {
    uint64_t struct_size;
    /// Host memory, aligned for the dtype. run_bytes gives dim: 1 to 2048 whole elements.
    kvt_view_t view;
    /// KVT_DTYPE_F32, _F16, _BF16 or _I8.
    kvt_dtype_t dtype;
    /// Only _I8 has scales.
    kvt_scales_t scaling;
    /// Null with KVT_SCALES_NONE.
    const float *scales;
    /// Exactly as many as `scaling` says.
    uint64_t scale_count;
} kvt_rows_t;
#define KVT_ROWS_INIT KVT_INIT_(kvt_rows_t)

/* ---- Jobs ------------------------------------------------------------------------------------ */

/// An attention computation, cut into items. Threads of the engine run each item once, in any order
/// (kvt_attention_job_run), and those of step 1 after all of step 0. The bits of the results do not
/// depend on threads. Tensors, scales, outputs, memory and the arrays of `select` are borrowed
/// until kvt_attention_job_close.
typedef struct kvt_attention_job_t kvt_attention_job_t;

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
#define KVT_ATTENTION_JOB_INFO_INIT KVT_INIT_(kvt_attention_job_info_t)

/// Reads the size of a job.
kvt_status_t kvt_attention_job_info(const kvt_attention_job_t *job, kvt_attention_job_info_t *out);

/// Runs items of a job on the calling thread.
///
/// @param step           Below kvt_attention_job_info_t.steps.
/// @param items          Number of items; those after the step's last one are ignored.
/// @param scratch        Memory that no other thread uses during the call.
/// @param scratch_count  At least kvt_attention_job_info_t.scratch_count.
/// @return KVT_E_TOO_SMALL (scratch).
///
/// Threading: several threads at once, each with other items.
kvt_status_t kvt_attention_job_run(const kvt_attention_job_t *job, uint32_t step, uint32_t first,
                                   uint32_t items, float *scratch, uint64_t scratch_count,
                                   kvt_error_t **err);

/// Waits for running items and closes a job. Everything that it borrowed is the caller's again.
kvt_status_t kvt_attention_job_close(kvt_attention_job_t **job);

/* ---- Kernels --------------------------------------------------------------------------------- */

/// Flags of decode kernels.
typedef uint64_t kvt_decode_flags_t;
enum {
    /// Keep scores, for kvt_decode_sums.
    KVT_DECODE_SCORES = 1,
};

/// Flags of column sums.
typedef uint64_t kvt_sums_flags_t;
enum {
    /// Sums for each query head; without this flag one row for all heads.
    KVT_SUMS_BY_HEAD = 1,
};

/// Input of an attention kernel. Queries see the keys up to their own position.
typedef struct kvt_attention_args_t {
    uint64_t struct_size;
    /// [queries, query_heads, key_dim].
    const kvt_rows_t *queries;
    /// [keys, key_heads, key_dim].
    const kvt_rows_t *keys;
    /// [keys, key_heads, value_dim]. Latent rows: the first elements of the keys, at the same
    /// address.
    const kvt_rows_t *values;
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
#define KVT_ATTENTION_ARGS_INIT KVT_INIT_(kvt_attention_args_t)

/// Opens a job that computes the attention of a prompt or of a part of one.
///
/// @param out        Receives [queries, query_heads, value_dim]; zeros where a query sees no key.
/// @param out_count  Capacity in elements.
/// @param lse        Receives log-sum-exps [queries, query_heads], -inf where a query sees no key;
///                   may be null.
/// @param lse_count  Capacity in elements.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device
///         memory).
kvt_status_t kvt_prefill_open(const kvt_attention_args_t *args, float *out, uint64_t out_count,
                              float *lse, uint64_t lse_count, kvt_attention_job_t **out_job,
                              kvt_error_t **err);

/// Computes the memory that kvt_decode_open needs for the same input.
///
/// @param flags      KVT_DECODE_*.
/// @param out_count  Receives the number of f32 elements.
/// @return The codes of kvt_decode_open, except KVT_E_TOO_SMALL.
kvt_status_t kvt_decode_memory(const kvt_attention_args_t *args, kvt_decode_flags_t flags,
                               uint64_t *out_count, kvt_error_t **err);

/// Opens a job of two steps that computes the attention of the next token or of a few. See
/// kvt_prefill_open for out and lse; lse is required.
///
/// @param args          `select` may have blocks only, one row of lists per head for all queries.
/// @param flags         KVT_DECODE_*.
/// @param memory        Memory of the job until it is closed.
/// @param memory_count  At least the result of kvt_decode_memory.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype, or other lists),
///         KVT_E_UNAVAILABLE (device memory).
kvt_status_t kvt_decode_open(const kvt_attention_args_t *args, kvt_decode_flags_t flags, float *out,
                             uint64_t out_count, float *lse, uint64_t lse_count, float *memory,
                             uint64_t memory_count, kvt_attention_job_t **out_job,
                             kvt_error_t **err);

/// Opens a job that sums, for each key, the attention that a prompt's queries pay to it. Open it
/// after a kvt_prefill_open job of the same input has ended.
///
/// @param lse        Log-sum-exps of that job, over all keys: [queries, query_heads].
/// @param first      First query that counts, an index into the queries.
/// @param flags      KVT_SUMS_*.
/// @param sums       Receives [query_heads, keys] with KVT_SUMS_BY_HEAD, else [keys].
/// @param sum_count  Exactly that many elements.
/// @return KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device memory).
kvt_status_t kvt_column_sums_open(const kvt_attention_args_t *args, const float *lse,
                                  uint64_t lse_count, uint32_t first, kvt_sums_flags_t flags,
                                  float *sums, uint64_t sum_count, kvt_attention_job_t **out_job,
                                  kvt_error_t **err);

/// Adds, for each key, the attention that a decode's queries pay to it. Requires KVT_DECODE_SCORES,
/// and that all items of both steps have ended.
///
/// @param flags      KVT_SUMS_*; KVT_SUMS_BY_HEAD is required if heads select different keys.
/// @param sums       In and out: [query_heads, sum_keys] or [sum_keys] (kvt_attention_job_info_t),
///                   in the order of the selected keys.
/// @param sum_count  Exactly that many elements.
///
/// Threading: not while a thread runs items of the job.
kvt_status_t kvt_decode_sums(const kvt_attention_job_t *job, kvt_sums_flags_t flags, float *sums,
                             uint64_t sum_count, kvt_error_t **err);

/* ---- Pages, partial results, checks ---------------------------------------------------------- */

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
kvt_status_t kvt_pages_extend(float *boxes, uint64_t box_count, uint32_t page_tokens,
                              uint32_t first, const kvt_rows_t *keys, kvt_error_t **err);

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
kvt_status_t kvt_pages_score(const kvt_rows_t *boxes, const kvt_rows_t *queries, uint32_t first,
                             uint32_t count, float *scores, uint64_t score_count, float *scratch,
                             uint64_t scratch_count, kvt_error_t **err);

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
kvt_status_t kvt_attention_merge(float *out, float *lse, const float *other, const float *other_lse,
                                 uint64_t rows, uint32_t dim, kvt_error_t **err);

/// Checks that all elements and scales of rows are finite. Kernels do not check: other values give
/// arbitrary results. Policies reject them.
///
/// @return KVT_E_INVALID (an element is not finite), KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE
///         (device memory).
kvt_status_t kvt_rows_check(const kvt_rows_t *rows, kvt_error_t **err);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_ATTENTION_H */
