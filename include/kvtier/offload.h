/// @file
/// Layer-wise offload of the KV of one session: contexts larger than the engine's memory.
///
/// An offload keeps the KV of a session in a store, and a ring of buffers for the layers that are
/// being computed. Loads of the next layers run while a layer is computed. With a sparse policy
/// only the blocks that it selects are loaded.
///
/// Life cycle: kvt_offload_open, kvt_offload_put for each layer of the prompt, then for each step
/// of decode kvt_offload_begin, kvt_offload_take and _give_back for each layer, kvt_offload_put for
/// the new token; kvt_offload_close.
///
///     kvt_offload_opts_t opts = KVT_OFFLOAD_OPTS_INIT;
///     opts.session = session, opts.attention = &shape, opts.dtype = KVT_DTYPE_F16;
///     opts.buffers = 3, opts.buffer_tokens = 4096;
///     opts.decode = "quest(budget=2048)", opts.decode_bytes = KVT_NUL_TERMINATED;
///     if (kvt_offload_open(&opts, &offload, &err) != KVT_OK) return fail(err);
///     kvt_sparse_context_t step = KVT_SPARSE_CONTEXT_INIT;
///     step.tokens = 65536, step.first_query = 65535;
///     if (kvt_offload_begin(offload, &step, &err) != KVT_OK) return fail(err); /* loads begin */
///     for (uint32_t layer = 0; layer < shape.layers; layer++) {
///         kvt_offload_kv_t kv = KVT_OFFLOAD_KV_INIT;
///         if (kvt_offload_take(offload, layer, &rows, &kv, &err) != KVT_OK) return fail(err);
///         use(&kv); /* attention over kv.k and kv.v */
///         if (kvt_offload_give_back(offload, layer, &err) != KVT_OK) return fail(err);
///     }
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_OFFLOAD_H
#define KVTIER_OFFLOAD_H

#include <kvtier/session.h>
#include <kvtier/sparse.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Offloads -------------------------------------------------------------------------------- */

/// Layer-wise KV of one session: a ring of buffers that kernels read, backed by a store. A block is
/// a chunk of the session's namespace. The last tokens of a layer, which fill no block, are its
/// tail. Sparse policies may select the blocks to load, and evict tokens.
///
/// Threading: calls on one offload run one at a time. A second call waits; inside a callback it
/// returns KVT_E_REENTRANT instead.
typedef struct kvt_offload_t kvt_offload_t;

/// Flags of an offload.
typedef uint64_t kvt_offload_flags_t;
enum {
    /// The ring and the tails are in memory of the store's device.
    KVT_OFFLOAD_ON_DEVICE = 1,
};

/// Options of kvt_offload_open.
typedef struct kvt_offload_opts_t {
    uint64_t struct_size;
    /// KVT_OFFLOAD_ON_DEVICE or 0.
    kvt_offload_flags_t flags;
    /// The session; it stays open until the offload is closed, even if its handle is closed first.
    const kvt_session_t *session;
    /// Shape of the attention; block_tokens must be the chunk_tokens of the session's namespace.
    const kvt_attention_t *attention;
    /// Elements of K and V.
    kvt_dtype_t dtype;
    /// Buffers of the ring, 1 to 256. A pass loads up to buffers - 1 layers ahead.
    uint32_t buffers;
    /// Tokens of a buffer, 1 to max_tokens, rounded up to blocks; the tail has room in addition.
    uint32_t buffer_tokens;
    /// Level at which a put completes.
    kvt_level_t level;
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
    const kvt_sparse_custom_t *prefill_custom;
    /// Custom policy instead of `decode`, or null.
    const kvt_sparse_custom_t *decode_custom;
    /// With KVT_OFFLOAD_ON_DEVICE: device address of memory that the engine lends for the ring and
    /// the tails until the offload is closed, a multiple of 256. 0 = the device allocates it.
    uint64_t memory;
    /// Bytes of `memory`, at least kvt_offload_memory_bytes.
    uint64_t memory_bytes;
} kvt_offload_opts_t;
#define KVT_OFFLOAD_OPTS_INIT KVT_INIT_(kvt_offload_opts_t)

/// Opens an offload for a session. The attention must match the layout of the session's namespace.
/// The store's account is charged for the ring and the tails, unless the engine lends their memory.
///
/// @return KVT_E_SPEC, KVT_E_UNSUPPORTED (a policy has no function in its phase, or the device does
///         not allocate memory), KVT_E_UNAVAILABLE (the store has no device with memory of its own,
///         or the device is lost), KVT_E_TOO_SMALL (the lent memory), KVT_E_BUDGET, KVT_E_LIMIT.
kvt_status_t kvt_offload_open(const kvt_offload_opts_t *opts, kvt_offload_t **out,
                              kvt_error_t **err);

/// Closes an offload. Cancels its loads and its puts of full tails, and waits for their end. Blocks
/// in the store stay. Kernels must not read its buffers any more.
kvt_status_t kvt_offload_close(kvt_offload_t **offload);

/// Reads the number of tokens of a layer.
///
/// @param out_stored  Receives the tokens that were put into the store, in whole blocks.
/// @param out_tail    Receives the tokens of the tail, which follow; may be null.
kvt_status_t kvt_offload_tokens(const kvt_offload_t *offload, uint32_t layer, uint32_t *out_stored,
                                uint32_t *out_tail);

/// Drops the tokens from position `tokens` on, in all layers. Call it before kvt_session_truncate.
/// Loads in progress are cancelled. If the new end divides a block, the call loads the first tokens
/// of that block from the store, and waits for them. After a failure no layer is truncated: call it
/// again, for example with a multiple of block_tokens, which loads nothing.
///
/// @return KVT_E_NOT_FOUND (a divided block is not in the store any more), KVT_E_IO,
///         KVT_E_UNAVAILABLE.
kvt_status_t kvt_offload_truncate(const kvt_offload_t *offload, uint32_t tokens, kvt_error_t **err);

/// Resumes from tokens that the store has, for example from another session or an earlier process.
/// Call it before the first put; the session must have these tokens. Stored policy state of the
/// blocks is loaded. For blocks without it, the call loads the keys and passes them to policies.
///
/// @param tokens  A multiple of block_tokens, at most max_tokens.
/// @return KVT_E_BUSY (the offload has tokens), KVT_E_NOT_FOUND (keys that a policy needs are not
///         in the store), KVT_E_IO, KVT_E_AGAIN.
kvt_status_t kvt_offload_resume(const kvt_offload_t *offload, uint32_t tokens, kvt_error_t **err);

/* ---- Statistics of offloads ------------------------------------------------------------------ */

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
#define KVT_OFFLOAD_STATS_INIT KVT_INIT_(kvt_offload_stats_t)

/// Reads the counters of an offload.
kvt_status_t kvt_offload_stats(const kvt_offload_t *offload, kvt_offload_stats_t *out);

/* ---- Offloads on devices --------------------------------------------------------------------- */

/// Computes the bytes of the ring and the tails of an offload with these options, for an engine
/// that lends this memory. Opens nothing.
///
/// @param opts  `memory` and `memory_bytes` are ignored.
/// @return As kvt_offload_open, for errors in `opts`.
kvt_status_t kvt_offload_memory_bytes(const kvt_offload_opts_t *opts, uint64_t *out_bytes,
                                      kvt_error_t **err);

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
kvt_status_t kvt_offload_set_ready_event(const kvt_offload_t *offload, uint64_t event,
                                         kvt_error_t **err);

/* ---- Input and loads ------------------------------------------------------------------------- */

/// Flags of kvt_offload_load.
typedef uint64_t kvt_offload_load_flags_t;
enum {
    /// The caller has chosen the blocks. They are loaded without a policy, and the tail follows them. A
    /// query is used for audits only.
    KVT_OFFLOAD_LOAD_CHOSEN = 1,
};

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
    /// Address space of `k` and `v`.
    kvt_memory_t memory;
    uint32_t reserved;
} kvt_offload_kv_t;
#define KVT_OFFLOAD_KV_INIT KVT_INIT_(kvt_offload_kv_t)

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
kvt_status_t kvt_offload_put(const kvt_offload_t *offload, uint32_t layer, uint32_t first,
                             uint32_t tokens, const kvt_view_t *k, const kvt_view_t *v,
                             const kvt_submit_opts_t *opts, kvt_op_t **out_op, kvt_error_t **err);

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
kvt_status_t kvt_offload_load(const kvt_offload_t *offload, uint32_t buffer, uint32_t layer,
                              const uint32_t *blocks, uint64_t block_count,
                              kvt_offload_load_flags_t flags, const kvt_rows_t *query,
                              const kvt_sparse_context_t *context, uint32_t *out_count,
                              kvt_error_t **err);

/// Waits for the load of a buffer, and appends the layer's tail as it is now. After a failure the
/// buffer is free.
///
/// @param out  May be null.
/// @return KVT_E_NOT_FOUND (a block is not in the store any more), KVT_E_STATE (nothing is loaded,
///         or a full tail became a block meanwhile: load again), KVT_E_IO, KVT_E_CORRUPT.
kvt_status_t kvt_offload_wait(const kvt_offload_t *offload, uint32_t buffer, kvt_offload_kv_t *out,
                              kvt_error_t **err);

/// Frees a buffer that the engine does not read any more; a load in progress is cancelled. If
/// kernels may still read the buffer, call kvt_offload_set_ready_event before.
kvt_status_t kvt_offload_release(const kvt_offload_t *offload, uint32_t buffer, kvt_error_t **err);

/// Begins a pass over all layers in order, and frees all buffers. Layers whose blocks no policy
/// selects by query are loaded ahead, as far as buffers are free. A policy that selects by the
/// query of an earlier layer (`predict`) loads the next layer ahead.
kvt_status_t kvt_offload_begin(const kvt_offload_t *offload, const kvt_sparse_context_t *context,
                               kvt_error_t **err);

/// Waits for the next layer of a pass: its blocks, and its tail with all tokens that were put. The
/// engine may read the buffer until kvt_offload_give_back.
///
/// @param layer  0, 1, ... in this order.
/// @param query  As in kvt_offload_load.
/// @return As kvt_offload_load and kvt_offload_wait. KVT_E_STATE also means that no pass has begun,
///         that it is another layer's turn, or that the layer before was not given back.
kvt_status_t kvt_offload_take(const kvt_offload_t *offload, uint32_t layer, const kvt_rows_t *query,
                              kvt_offload_kv_t *out, kvt_error_t **err);

/// Gives back the layer that was taken, and loads a later layer into its buffer.
///
/// @return KVT_E_STATE (the layer is not taken).
kvt_status_t kvt_offload_give_back(const kvt_offload_t *offload, uint32_t layer, kvt_error_t **err);

/// Lists the blocks of a buffer, ascending. Block i starts at position i * block_tokens.
///
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_offload_blocks(const kvt_offload_t *offload, uint32_t buffer, uint32_t *blocks,
                                uint64_t capacity, uint64_t *out_count);

/// Finds the rows of a buffer that hold tokens at given positions: turns an index of positions into
/// one for kernels that read the buffer. Positions that are not in the buffer are skipped.
///
/// @param positions  Positions in the sequence, ascending, without repetition.
/// @param count      Up to 16777216.
/// @param rows       Receives the rows, ascending; room for `count`. May be `positions`.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_offload_rows(const kvt_offload_t *offload, uint32_t buffer,
                              const uint32_t *positions, uint64_t count, uint32_t *rows,
                              uint64_t *out_count);

/* ---- Retained tokens ------------------------------------------------------------------------- */

/// Passes the attention that queries gave to each key to the policies that need it (h2o, tova,
/// snapkv and similar ones).
///
/// @param queries    Number of queries that the sums are over.
/// @param sums       A row for each query head, or one row for all of them. A row has one sum for
///                   each retained token, in their order; finite, and not negative.
/// @param sum_count  Up to 268435456.
/// @param tokens     Number of retained tokens.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_offload_observe(const kvt_offload_t *offload, uint32_t layer, uint32_t queries,
                                 const float *sums, uint64_t sum_count, uint32_t tokens,
                                 kvt_error_t **err);

/// Lets the policy evict tokens of a layer, if it has to. No data is moved or dropped: blocks
/// without retained tokens are not loaded any more, and kvt_offload_retained lists the tokens that
/// kernels may use.
///
/// @param out_evicted  Receives 1 if tokens were evicted, else 0; may be null.
/// @return KVT_E_UNSUPPORTED (both policies evict).
kvt_status_t kvt_offload_evict(const kvt_offload_t *offload, uint32_t layer,
                               const kvt_sparse_context_t *context, uint32_t *out_evicted,
                               kvt_error_t **err);

/// Lists the positions of the retained tokens of a layer, ascending.
///
/// @param head       Index of the list, below `out_heads`; 0 if there are no lists.
/// @param out_heads  Receives the number of lists: one for each key head or query head, one for
///                   all, or 0 = all tokens are retained (then `out_count` is 0). May be null.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_offload_retained(const kvt_offload_t *offload, uint32_t layer, uint32_t head,
                                  uint32_t *positions, uint64_t capacity, uint64_t *out_count,
                                  uint32_t *out_heads);

/// Passes rows of keys to a policy with rows of its own (dsa: the keys of its indexer). Call it
/// before the kvt_offload_put of these tokens, which passes the model's keys to all other policies.
///
/// @param first  Position of the first token.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_offload_append_keys(const kvt_offload_t *offload, uint32_t layer, uint32_t first,
                                     const kvt_rows_t *keys, kvt_error_t **err);

/// Passes scores that the engine computed to a policy, for the next load of a layer: one for each
/// block that can be loaded (external), or a weight for each query and head (dsa).
///
/// @param is_prefill  1 = to the policy for prefill, 0 = to the one for decode.
/// @return KVT_E_UNSUPPORTED (the policy accepts no scores), KVT_E_LIMIT.
kvt_status_t kvt_offload_score(const kvt_offload_t *offload, uint32_t layer, uint32_t is_prefill,
                               const float *scores, uint64_t score_count, kvt_error_t **err);

/* ---- Forks ----------------------------------------------------------------------------------- */

/// Opens another offload for a session that was forked from the offload's (kvt_session_fork). Both
/// share the blocks in the store. Tails, lists of retained tokens and policies are copied. The fork
/// has an empty ring of its own, for which the store's account is charged; lent memory is not
/// reused. Its counters start at zero. The call waits for the put of a full tail.
///
/// @param session  Must have the tokens that the layers of the offload have, and may have more.
/// @return KVT_E_UNSUPPORTED (a custom policy without `fork`), KVT_E_BUDGET, KVT_E_LIMIT,
///         KVT_E_AGAIN.
kvt_status_t kvt_offload_fork(const kvt_offload_t *offload, const kvt_session_t *session,
                              kvt_offload_t **out, kvt_error_t **err);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_OFFLOAD_H */
