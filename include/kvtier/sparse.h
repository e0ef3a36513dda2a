/// @file
/// Sparse policies for engines that keep KV themselves: which keys to compute with, which to load,
/// which to evict.
///
/// A policy sees keys as they are appended, and answers for a query. Its traits (kvt_sparse_traits)
/// say what it can do (select blocks to load, select keys to compute with, evict tokens) and which
/// inputs it needs. kvt_offload_t uses the same policies over KV that a store keeps.
///
/// Life cycle: kvt_sparse_open, kvt_sparse_append for each layer, kvt_sparse_select or
/// kvt_sparse_index for a query, kvt_sparse_plan_eviction and _commit_eviction, kvt_sparse_close.
/// Calls on one policy run one at a time.
///
///     kvt_attention_t shape = KVT_ATTENTION_INIT;
///     shape.layers = 32, shape.query_heads = 32, shape.key_heads = 8;
///     shape.key_dim = shape.value_dim = 128, shape.block_tokens = 16, shape.max_tokens = 131072;
///     kvt_sparse_opts_t opts = KVT_SPARSE_OPTS_INIT;
///     opts.attention = &shape, opts.spec = "quest(budget=2048)", opts.spec_bytes = KVT_NUL_TERMINATED;
///     if (kvt_sparse_open(&opts, &sparse, &err) != KVT_OK) return fail(err);
///     if (kvt_sparse_append(sparse, 0, 0, &rows, &err) != KVT_OK) return fail(err); /* keys of layer 0 */
///     kvt_sparse_context_t step = KVT_SPARSE_CONTEXT_INIT;
///     step.tokens = 4096, step.first_query = 4095;
///     kvt_index_t chosen = KVT_INDEX_INIT;
///     if (kvt_sparse_index(sparse, 0, &rows, NULL, &step, &chosen, &err) != KVT_OK) return fail(err);
///     use(&chosen); /* attention over these keys only: kvt_attention_args_t.select */
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_SPARSE_H
#define KVTIER_SPARSE_H

#include <kvtier/attention.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_sparse_custom_t;

/* ---- Sparse policies ------------------------------------------------------------------------- */

/// A sparse policy for one sequence. Calls on one policy must not overlap: a second call, also one
/// from a callback of the policy, returns KVT_E_BUSY. kvt_sparse_traits and kvt_sparse_close are
/// exempt.
typedef struct kvt_sparse_t kvt_sparse_t;

/// Capabilities of a policy (caps). LOAD: selects the blocks to load. INDEX: selects the keys to
/// compute with. EVICT: evicts tokens. PREFILL: for the prompt; EVICT_PREFILL acts once the prompt
/// is computed. DECODE: for the tokens that follow.
typedef uint32_t kvt_sparse_caps_t;
enum {
    KVT_SPARSE_LOAD_PREFILL = 1,
    KVT_SPARSE_LOAD_DECODE = 2,
    KVT_SPARSE_INDEX_PREFILL = 4,
    KVT_SPARSE_INDEX_DECODE = 8,
    KVT_SPARSE_EVICT_PREFILL = 16,
    KVT_SPARSE_EVICT_DECODE = 32,
};

/// Inputs that a policy needs: bits.
typedef uint32_t kvt_needs_t;
enum {
    /// Keys of new tokens: kvt_sparse_append, or by blocks kvt_sparse_add_block.
    KVT_NEEDS_KEYS = 1,
    /// Queries, in kvt_sparse_select and kvt_sparse_index.
    KVT_NEEDS_QUERIES = 2,
    /// Attention that each key received, before kvt_sparse_plan_eviction: kvt_sparse_observe.
    KVT_NEEDS_COLUMN_SUMS = 4,
    /// In kvt_sparse_select, the query of the layer `ahead` layers earlier, or a prediction from it.
    KVT_NEEDS_NEXT_QUERY = 8,
    /// A score for each candidate, before each kvt_sparse_select: kvt_sparse_add_scores.
    KVT_NEEDS_SCORES = 16,
    /// Values of new tokens.
    KVT_NEEDS_VALUES = 32,
    /// A weight for each query and head, before each kvt_sparse_select or _index:
    /// kvt_sparse_add_scores.
    KVT_NEEDS_WEIGHTS = 64,
    /// All keys of the sequence, in kvt_sparse_index.
    KVT_NEEDS_ALL_KEYS = 128,
};

/// Scope of an answer: one for each query head, one for each key head, or one for the layer.
typedef uint32_t kvt_scope_t;
enum {
    KVT_SCOPE_QUERY_HEAD = 0,
    KVT_SCOPE_KEY_HEAD = 1,
    KVT_SCOPE_LAYER = 2,
};

/// Unit of an answer: it names tokens or blocks.
typedef uint32_t kvt_granularity_t;
enum {
    KVT_GRANULARITY_TOKEN = 0,
    KVT_GRANULARITY_BLOCK = 1,
};

/// Properties of a sparse policy.
typedef uint64_t kvt_sparse_flags_t;
enum {
    /// Heads may retain different numbers of tokens.
    KVT_SPARSE_RAGGED = 1,
    /// Only selected blocks are loaded; without this flag all blocks are loaded.
    KVT_SPARSE_SELECTS = 2,
    /// The engine must rotate the keys (RoPE) to their places in the cache.
    KVT_SPARSE_ROTATES = 4,
};

/// Traits of a policy. They suffice to serve a policy without knowing its name.
typedef struct kvt_sparse_traits_t {
    uint64_t struct_size;
    /// Calls that need another capability return KVT_E_UNSUPPORTED.
    kvt_sparse_caps_t caps;
    /// Other inputs are ignored, except that kvt_sparse_add_scores rejects them.
    kvt_needs_t needs;
    kvt_scope_t scope;
    kvt_granularity_t granularity;
    /// KVT_SPARSE_RAGGED, KVT_SPARSE_SELECTS, KVT_SPARSE_ROTATES.
    kvt_sparse_flags_t flags;
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
#define KVT_SPARSE_TRAITS_INIT KVT_INIT_(kvt_sparse_traits_t)

/// Options of kvt_sparse_open. Exactly one of `spec` and `custom` is set.
typedef struct kvt_sparse_opts_t {
    uint64_t struct_size;
    /// Always 0.
    uint64_t flags;
    /// Attention shape of the model.
    const kvt_attention_t *attention;
    /// Spec string, such as "minference(budget=0.2)"; see docs/reference/sparse.md.
    const char *spec;
    uint64_t spec_bytes;
    /// Callbacks of the engine that make up a policy.
    const struct kvt_sparse_custom_t *custom;
    /// Account that pays for the policy's state in host memory; may be null. While it cannot, calls
    /// that add input return KVT_E_BUDGET and change nothing.
    const kvt_account_t *account;
} kvt_sparse_opts_t;
#define KVT_SPARSE_OPTS_INIT KVT_INIT_(kvt_sparse_opts_t)

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
#define KVT_SPARSE_STATS_INIT KVT_INIT_(kvt_sparse_stats_t)

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
#define KVT_SPARSE_INFO_INIT KVT_INIT_(kvt_sparse_info_t)

/// Opens a sparse policy for one sequence; close it with kvt_sparse_close.
///
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_BUDGET; for a file that the spec names KVT_E_NOT_FOUND,
///         KVT_E_IO and KVT_E_CORRUPT.
kvt_status_t kvt_sparse_open(const kvt_sparse_opts_t *opts, kvt_sparse_t **out, kvt_error_t **err);

/// Closes a policy. Does not wait: a running call ends first, then user data is destroyed.
kvt_status_t kvt_sparse_close(kvt_sparse_t **policy);

/// Copies a policy with its state, for a sequence that continues from here. The account of the
/// original pays for the copy, too.
///
/// @return KVT_E_UNSUPPORTED (a custom policy without `fork`), KVT_E_BUDGET.
kvt_status_t kvt_sparse_fork(const kvt_sparse_t *policy, kvt_sparse_t **out, kvt_error_t **err);

/// Reads the traits of a policy.
kvt_status_t kvt_sparse_traits(const kvt_sparse_t *policy, kvt_sparse_traits_t *out);

/// Reads the counters of a policy.
kvt_status_t kvt_sparse_stats(const kvt_sparse_t *policy, kvt_sparse_stats_t *out);

/// Counts the policies that kvt_sparse_open knows by name.
kvt_status_t kvt_sparse_count(uint64_t *out_count);

/// Describes a policy that kvt_sparse_open knows by name.
///
/// @param index  0 to kvt_sparse_count - 1.
/// @return KVT_E_NOT_FOUND (the index is too large).
kvt_status_t kvt_sparse_info(uint64_t index, kvt_sparse_info_t *out);

/* ---- Notifications --------------------------------------------------------------------------- */

/// Adds the keys of new tokens of a layer. Their positions are already encoded (RoPE is applied).
///
/// @param first  Position of the first token.
/// @param keys   [tokens, key heads, key dim], or rows of the policy's own if its traits have some.
///               Elements must be finite.
/// @return KVT_E_STATE (tokens before `first` are missing), KVT_E_LIMIT, KVT_E_BUDGET,
///         KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (not in host memory).
kvt_status_t kvt_sparse_append(const kvt_sparse_t *policy, uint32_t layer, uint32_t first,
                               const kvt_rows_t *keys, kvt_error_t **err);

/// Registers a block of a layer as a candidate. Call it before the block is moved away, while its
/// keys can be read. Appended tokens are known to the policy without it.
///
/// @param id     Id of the block in kvt_sparse_select.
/// @param first  Position of its first token.
/// @param keys   The model's keys of its tokens, all, or the first ones.
/// @return As kvt_sparse_append.
kvt_status_t kvt_sparse_add_block(const kvt_sparse_t *policy, uint32_t layer, uint32_t id,
                                  uint32_t first, const kvt_rows_t *keys, kvt_error_t **err);

/// Registers a block that decode has completed in all layers: kvt_sparse_add_block for each layer,
/// or one call of on_decode_offload of a custom policy.
///
/// @param keys  An entry for each layer of the model.
/// @return As kvt_sparse_append.
kvt_status_t kvt_sparse_seal_all(const kvt_sparse_t *policy, uint32_t id, uint32_t first,
                                 const kvt_rows_t *keys, uint64_t count, uint64_t stride_bytes,
                                 kvt_error_t **err);

/// Adds the attention that each resident token of a layer received from some queries: the result of
/// kvt_column_sums_open or kvt_decode_sums.
///
/// @param queries    Number of queries: the last ones of a prompt, or those of a decode step.
/// @param sums       [query heads, tokens], or [tokens] for all heads; finite, at least 0.
/// @param sum_count  At most 2^28.
/// @param tokens     Resident tokens of a list; sums are in their order.
/// @return KVT_E_LIMIT, KVT_E_BUDGET.
kvt_status_t kvt_sparse_observe(const kvt_sparse_t *policy, uint32_t layer, uint32_t queries,
                                const float *sums, uint64_t sum_count, uint32_t tokens,
                                kvt_error_t **err);

/// Passes what the engine computed for the next kvt_sparse_select or kvt_sparse_index of a layer: a
/// score for each candidate (KVT_NEEDS_SCORES), or weights [queries, query heads]
/// (KVT_NEEDS_WEIGHTS).
///
/// @param score_count  At most 2^28.
/// @return KVT_E_UNSUPPORTED (the policy needs neither), KVT_E_LIMIT, KVT_E_BUDGET.
kvt_status_t kvt_sparse_add_scores(const kvt_sparse_t *policy, uint32_t layer, const float *scores,
                                   uint64_t score_count, kvt_error_t **err);

/// Truncates the sequence to its first `tokens` tokens.
kvt_status_t kvt_sparse_truncate(const kvt_sparse_t *policy, uint32_t tokens, kvt_error_t **err);

/// Starts a new, empty sequence.
kvt_status_t kvt_sparse_reset(const kvt_sparse_t *policy);

/// Saves the policy's state of a block, to be stored with the block and restored by
/// kvt_sparse_load.
///
/// @param data       Null = only the size is wanted.
/// @param out_count  Receives the number of bytes; 0 = the policy saves nothing with blocks.
/// @return KVT_E_TOO_SMALL, KVT_E_NOT_FOUND (an unknown block).
kvt_status_t kvt_sparse_save(const kvt_sparse_t *policy, uint32_t layer, uint32_t id, uint8_t *data,
                             uint64_t capacity, uint64_t *out_count, kvt_error_t **err);

/// Restores the state that kvt_sparse_save saved for a block. The bytes are validated.
///
/// @param id     Id of the block from now on.
/// @param first  Position of its first token.
/// @return KVT_E_CORRUPT, KVT_E_UNSUPPORTED (the policy saves nothing with blocks), KVT_E_STATE
///         (tokens before `first` are missing), KVT_E_LIMIT, KVT_E_BUDGET.
kvt_status_t kvt_sparse_load(const kvt_sparse_t *policy, uint32_t layer, uint32_t id,
                             uint32_t first, const uint8_t *data, uint64_t count,
                             kvt_error_t **err);

/* ---- Selections ------------------------------------------------------------------------------ */

/// Fills the entries of `ids` after the last chosen id (kvt_sparse_select).
#define KVT_SPARSE_NO_ID 4294967295

/// Forms of a selection of keys.
typedef uint32_t kvt_index_kind_t;
enum {
    /// All keys; no list.
    KVT_INDEX_DENSE = 0,
    /// Two lists: keys that every query sees, and distances back from a query at which it sees a key.
    KVT_INDEX_LINES = 1,
    /// A list of blocks of keys for each row of queries.
    KVT_INDEX_BLOCKS = 2,
    /// A list of keys that every query sees, then a list of ranges for each row of queries. A range is
    /// two items: its first key, and the key after its last.
    KVT_INDEX_RANGES = 3,
};

/// How the lists of a head are read. Heads may share lists.
typedef struct kvt_index_head_t {
    kvt_index_kind_t kind;
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
    kvt_index_head_t *heads;
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
#define KVT_INDEX_INIT KVT_INIT_(kvt_index_t)

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
#define KVT_TOKEN_LISTS_INIT KVT_INIT_(kvt_token_lists_t)

/// Selects the candidates to load for a query.
///
/// @param query       [queries, query heads, key dim], of the layer `ahead` (traits) layers
///                    earlier; null = policies that select by queries choose all candidates.
/// @param candidates  Ids of blocks, in any order, each once.
/// @param ids         Receives the chosen ids, ascending, then KVT_SPARSE_NO_ID to its end.
/// @param capacity    At least candidate_count; with less the policy is not called.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (no KVT_SPARSE_LOAD_* for this phase), KVT_E_STATE
///         (weights or keys are missing), KVT_E_LIMIT, KVT_E_UNAVAILABLE (not in host memory).
kvt_status_t kvt_sparse_select(const kvt_sparse_t *policy, uint32_t layer, const kvt_rows_t *query,
                               const uint32_t *candidates, uint64_t candidate_count,
                               const kvt_sparse_context_t *context, uint32_t *ids,
                               uint64_t capacity, uint64_t *out_count, kvt_error_t **err);

/// Selects the keys that queries are computed with. After KVT_E_TOO_SMALL, kvt_sparse_last_index
/// returns the same answer.
///
/// @param queries  [queries, query heads, key dim].
/// @param keys     All keys of the sequence with KVT_NEEDS_ALL_KEYS; otherwise may be null.
/// @param out      Set its arrays and their capacities.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (no KVT_SPARSE_INDEX_* for this phase), KVT_E_STATE
///         (weights or keys are missing), KVT_E_LIMIT, KVT_E_UNAVAILABLE (not in host memory).
kvt_status_t kvt_sparse_index(const kvt_sparse_t *policy, uint32_t layer, const kvt_rows_t *queries,
                              const kvt_rows_t *keys, const kvt_sparse_context_t *context,
                              kvt_index_t *out, kvt_error_t **err);

/// Reads the last index of the policy again.
///
/// @param out  See kvt_sparse_index.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_sparse_last_index(const kvt_sparse_t *policy, kvt_index_t *out, kvt_error_t **err);

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
kvt_status_t kvt_sparse_prefill_attention(const kvt_sparse_t *policy, uint32_t layer,
                                          const kvt_rows_t *queries, const kvt_rows_t *keys,
                                          const kvt_rows_t *values,
                                          const kvt_sparse_context_t *context, float *out,
                                          uint64_t out_count, float *lse, uint64_t lse_count,
                                          kvt_error_t **err);

/// Chooses the tokens of a layer that stay, if some are to be evicted. Nothing is evicted before
/// kvt_sparse_commit_eviction; the call may be repeated. After KVT_E_TOO_SMALL,
/// kvt_sparse_last_retained returns the same answer.
///
/// @param out          Set its arrays and their capacities. Counts are 0 if all tokens stay.
/// @param out_evicted  Receives 1 if tokens are to be evicted, else 0.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (no KVT_SPARSE_EVICT_* for this phase), KVT_E_STATE
///         (sums are missing), KVT_E_LIMIT.
kvt_status_t kvt_sparse_plan_eviction(const kvt_sparse_t *policy, uint32_t layer,
                                      const kvt_sparse_context_t *context, kvt_token_lists_t *out,
                                      uint32_t *out_evicted, kvt_error_t **err);

/// Reads the last lists of kvt_sparse_plan_eviction again; none if all tokens stayed.
///
/// @param out  See kvt_sparse_plan_eviction.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_sparse_last_retained(const kvt_sparse_t *policy, kvt_token_lists_t *out,
                                      kvt_error_t **err);

/// Confirms an eviction: only the tokens in `kept` are left in the layer.
///
/// @param kept  Some of the resident tokens: an answer of kvt_sparse_plan_eviction, of this policy
///              or another one of the sequence, to which the engine may have added tokens.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_sparse_commit_eviction(const kvt_sparse_t *policy, uint32_t layer,
                                        const kvt_token_lists_t *kept, kvt_error_t **err);

/* ---- Custom policies: callbacks of the engine ------------------------------------------------ */

/// Called before a block of a layer is moved away. `block` is its id as a candidate, `first` the
/// position of its first token; `keys` has its `keys->view.tokens` valid tokens.
typedef kvt_status_t (*kvt_on_prefill_offload_fn)(void *user_data, uint32_t block, uint32_t layer,
                                                  uint32_t first, const kvt_rows_t *keys);

/// Called when a block that was written token by token is complete. `keys` has an entry for each
/// layer, `keys->struct_size` bytes apart.
typedef kvt_status_t (*kvt_on_decode_offload_fn)(void *user_data, uint32_t block, uint32_t first,
                                                 const kvt_rows_t *keys, uint32_t layers);

/// Selects blocks for `query`. Writes at most candidate_count ids to `ids`, in any order, each a
/// candidate and each once, and their number to `out_count`. `query` may be null.
typedef kvt_status_t (*kvt_select_blocks_fn)(void *user_data, uint32_t layer,
                                             const kvt_rows_t *query, const uint32_t *candidates,
                                             uint64_t candidate_count,
                                             const kvt_sparse_context_t *context, uint32_t *ids,
                                             uint64_t *out_count);

/// Selects the keys that queries are computed with. Points the arrays of `out` at memory of its
/// own, valid until the next call, and sets their counts; counts left at 0 = all keys. `keys` may
/// be null.
typedef kvt_status_t (*kvt_sparse_index_fn)(void *user_data, uint32_t layer,
                                            const kvt_rows_t *queries, const kvt_rows_t *keys,
                                            const kvt_sparse_context_t *context, kvt_index_t *out);

/// Takes the attention that each of `tokens` resident tokens received from `queries` queries:
/// `count` sums. See kvt_sparse_observe.
typedef kvt_status_t (*kvt_sparse_observe_fn)(void *user_data, uint32_t layer, uint32_t queries,
                                              const float *sums, uint64_t count, uint32_t tokens);

/// Chooses the tokens of a layer that stay. Fills `out` as kvt_sparse_index_fn does; counts left at
/// 0 = all tokens stay.
typedef kvt_status_t (*kvt_sparse_evict_fn)(void *user_data, uint32_t layer,
                                            const kvt_sparse_context_t *context,
                                            kvt_token_lists_t *out);

/// Truncates the sequence to `tokens` tokens; 0 = a new sequence starts.
typedef kvt_status_t (*kvt_sparse_truncate_fn)(void *user_data, uint32_t tokens);

/// Computes the attention of a prompt for kvt_sparse_prefill_attention. Writes [queries, query
/// heads, value dim] to `out`, and [queries, query heads] to `lse` unless it is null.
/// KVT_E_UNSUPPORTED = the library's kernel computes it, by the index.
typedef kvt_status_t (*kvt_sparse_attention_fn)(void *user_data, uint32_t layer,
                                                const kvt_rows_t *queries, const kvt_rows_t *keys,
                                                const kvt_rows_t *values,
                                                const kvt_sparse_context_t *context, float *out,
                                                float *lse);

/// Called after an eviction: only the tokens in `kept` are left in the layer.
typedef kvt_status_t (*kvt_sparse_evicted_fn)(void *user_data, uint32_t layer,
                                              const kvt_token_lists_t *kept);

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
    const kvt_sparse_traits_t *traits;
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
#define KVT_SPARSE_CUSTOM_INIT KVT_INIT_(kvt_sparse_custom_t)

/* ---- Placement in buffers, and memory of kernels --------------------------------------------- */

/// Kernel of kvt_prefill_open, of kvt_decode_open, of kvt_column_sums_open.
typedef uint32_t kvt_attention_kernel_t;
enum {
    KVT_KERNEL_PREFILL = 0,
    KVT_KERNEL_DECODE = 1,
    KVT_KERNEL_SUMS = 2,
};

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
#define KVT_BLOCK_PLACEMENT_INIT KVT_INIT_(kvt_block_placement_t)

/// Resident tokens of a layer, in the order in which kvt_sparse_observe counts them.
typedef struct kvt_resident_tokens_t {
    uint64_t struct_size;
    /// Attention shape of the model.
    const kvt_attention_t *attention;
    /// Lists of the last kvt_sparse_commit_eviction; null = nothing was evicted.
    const kvt_token_lists_t *kept;
    /// Tokens from this position on came after it and are all resident; 0 without `kept`.
    uint32_t since;
    /// Tokens of the sequence.
    uint32_t tokens;
} kvt_resident_tokens_t;
#define KVT_RESIDENT_TOKENS_INIT KVT_INIT_(kvt_resident_tokens_t)

/// Largest sizes of problems, independent of each other. Each is at least 1.
typedef struct kvt_kernel_limits_t {
    uint64_t struct_size;
    kvt_decode_flags_t flags;
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
#define KVT_KERNEL_LIMITS_INIT KVT_INIT_(kvt_kernel_limits_t)

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
kvt_status_t kvt_index_place(const kvt_attention_t *attention,
                             const kvt_block_placement_t *placement, const kvt_index_t *index,
                             uint32_t first, uint32_t count, kvt_index_t *out,
                             uint32_t *out_first_query, kvt_error_t **err);

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
kvt_status_t kvt_column_sums_place(const kvt_resident_tokens_t *resident,
                                   const kvt_block_placement_t *placement,
                                   const kvt_index_t *select, uint32_t first_query,
                                   uint32_t queries, const float *sums, uint64_t sum_count,
                                   float *out, uint64_t out_count, kvt_error_t **err);

/// Computes how much memory suffices for every problem within some limits, to be allocated once.
///
/// @param kernel       KVT_KERNEL_*.
/// @param out_memory   Receives the floats of `memory` of kvt_decode_open, 0 for other kernels; may
///                     be null.
/// @param out_scratch  Receives the floats of scratch of each thread; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_kernel_workspace(kvt_attention_kernel_t kernel, const kvt_kernel_limits_t *limits,
                                  uint64_t *out_memory, uint64_t *out_scratch, kvt_error_t **err);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_SPARSE_H */
