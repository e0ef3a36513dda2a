/*
 * kvtier for llama.cpp: sequences that are longer than the engine's KV cache.
 *
 * When a sequence fills the context, its cells are divided. The first tokens (sinks) and the last ones
 * (the window) keep their cells; the cells between become slots. Blocks that leave the window are
 * stored in a kvtier store, layer by layer. In each layer a sparse policy chooses, by this layer's
 * queries, which stored blocks are loaded into this layer's slots. The layer's attention sees sinks,
 * window and chosen blocks. Up to n_ctx tokens the results equal those of the engine alone, bit for
 * bit. Beyond that attention is sparse, which the counters show.
 *
 *     struct llama_context_params params = llama_context_default_params();
 *     kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
 *     kvt_llama_longer_open(&opts, &params, &longer, &why);      // sets a callback, sequence ids
 *     ctx = llama_init_from_model(model, params);
 *     kvt_llama_longer_bind(longer, ctx, &why);
 *     kvt_llama_longer_decode(longer, prompt, n_prompt, &why);   // llama_get_logits_ith(ctx, -1)
 *     kvt_llama_longer_decode(longer, &token, 1, &why);
 *     llama_free(ctx);
 *     kvt_llama_longer_close(&longer, &why);
 *
 * One object serves one sequence of one context, on the thread that uses the context. While it is
 * bound, do not touch that sequence or the one that holds its cells. No other sequence may have cells
 * in the context, because the object relies on all of them; tokens that find no cell fail with
 * KVT_E_BUSY. It may be closed before its context. After that, do not decode with the context: it still
 * has the callback.
 */
#ifndef KVTIER_LLAMA_LONGER_H
#define KVTIER_LLAMA_LONGER_H

#include <kvtier/llama.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvt_llama_longer_t kvt_llama_longer_t;

/** Zero selects the default of every field. */
typedef struct kvt_llama_longer_opts_t {
    /** A store that is already open; null = an own store from the three fields below. */
    const kvt_store_t *store;
    /**
     * Account that is charged for memory outside the store; null = the own store's budget, or no
     * account.
     */
    const kvt_account_t *account;
    /** Bytes of host memory for the own store and the policy's metadata together; 0 = 1 GiB. */
    uint64_t host_bytes;
    /** Directory of the own store's disk tier; null = none: host memory limits the sequence. */
    const char *disk_path;
    /** Limit of that directory in bytes; 0 = 8 GiB. */
    uint64_t disk_bytes;

    /**
     * Name of the sequence in the store, to resume it later (_save, _resume); null = it is discarded at
     * close. No other KV uses this name. Blocks that were computed with full attention are found by
     * contexts of any size. Blocks that were computed sparsely are found only with the same spec,
     * block_tokens, sinks, slots, parts and cells.
     */
    const char *name;
    /**
     * Identifies the model's weights; required with a name. The identity also includes the engine's
     * versions, RoPE and YaRN of the params, types of K and V, and the file's metadata. It does not
     * include what `adapters` below describes.
     */
    const char *model_id;

    /**
     * Spec string of the sparse policy: one that selects blocks for a whole layer by its own queries.
     * Null = "arkvale(sinks=0, window=0, dense=0)" with pages of one block and a budget of all slots.
     */
    const char *spec;

    /** Tokens of a block, which is stored and loaded as a whole; 0 = 8. */
    uint32_t block_tokens;
    /** First tokens that are always visible, rounded up to blocks; 0 = 16. */
    uint32_t sink_tokens;
    /** Cells used as slots, rounded down to blocks; 0 = two thirds of the context's cells. */
    uint32_t slot_tokens;
    /**
     * Tokens computed together after the first n_ctx; 0 = 16. They share one choice of blocks. Fewer
     * tokens are closer to the choice of single tokens, and slower.
     */
    uint32_t part_tokens;
    /** Maximum number of tokens of the sequence; 0 = 1048576. */
    uint32_t max_tokens;
    /** The sequence id that is served. */
    llama_seq_id seq;
    /** A sequence id that nothing else uses, to hold the slots; 0 = the last one of the context. */
    llama_seq_id held_seq;
    /** KVT_LLAMA_LONGER_* below. */
    uint32_t flags;
    /**
     * Identifies whatever changes KV and cannot be queried from the engine; null = nothing does. That
     * is: LoRA adapters and control vectors of the context with their scales, and metadata overridden
     * when the model was loaded.
     */
    const char *adapters;
} kvt_llama_longer_opts_t;

/**
 * Chosen blocks lie in the slots in the order of the sequence. Equal choices then give equal bits,
 * whatever was chosen before. More is copied, because a block that stays may have to move.
 */
#define KVT_LLAMA_LONGER_ORDERED 1u
/**
 * Rows pass through staging memory and the engine's calls, as with a cache in device memory. For tests
 * on a machine without a device.
 */
#define KVT_LLAMA_LONGER_STAGED 2u

#ifdef __cplusplus
#define KVT_LLAMA_LONGER_OPTS_INIT {}
#else
#define KVT_LLAMA_LONGER_OPTS_INIT {0}
#endif

/**
 * Opens the store, and sets the required fields in `params`: cb_eval (an earlier callback is still
 * called), a unified cache, flash attention, a second sequence. With `params` null it only checks the
 * options, and no context can be bound later.
 */
kvt_status_t kvt_llama_longer_open(const kvt_llama_longer_opts_t *opts, struct llama_context_params *params,
                                   kvt_llama_longer_t **out, kvt_llama_why_t *why);

/**
 * Binds an empty context that was made from these params. Inspects its graph once, by decoding a token
 * and removing it. KVT_E_UNSUPPORTED, with the reason in `why`, for sliding windows, recurrent layers,
 * latents (MLA), no flash attention, ALiBi. May be called again after a failure.
 */
kvt_status_t kvt_llama_longer_bind(kvt_llama_longer_t *longer, struct llama_context *ctx,
                                   kvt_llama_why_t *why);

/**
 * Decodes tokens after those that the sequence has. Afterwards the logits of the last one are available
 * (llama_get_logits_ith(ctx, -1)). After a failure the sequence keeps the parts that were computed
 * completely (_stats, tokens), and may be continued. KVT_E_BUDGET: the store is full. KVT_E_NOT_FOUND:
 * the store has lost a block. KVT_E_BUSY: llama_decode failed. KVT_E_AGAIN: other users kept the store
 * busy for five seconds.
 */
kvt_status_t kvt_llama_longer_decode(kvt_llama_longer_t *longer, const llama_token *tokens, size_t n_tokens,
                                     kvt_llama_why_t *why);

/**
 * Removes all but the first n_tokens. Tokens that have left the window cannot return:
 * KVT_E_UNSUPPORTED. n_tokens = 0 is always possible and begins another sequence.
 */
kvt_status_t kvt_llama_longer_truncate(kvt_llama_longer_t *longer, size_t n_tokens, kvt_llama_why_t *why);

/**
 * Stores all full blocks that are not in the store yet, including those in the window. When it returns
 * they are on disk (with a disk tier) and durable. The sequence continues.
 */
kvt_status_t kvt_llama_longer_save(kvt_llama_longer_t *longer, kvt_llama_why_t *why);

/**
 * Fills an empty sequence with the first `*out_tokens` of these tokens, as far as the store has them
 * under this name. Only whole blocks are used, and the last token is left to decode. The blocks may
 * come from a context of another size if they were computed exactly. Model, RoPE settings, adapters,
 * block_tokens and types of K and V must be the same.
 */
kvt_status_t kvt_llama_longer_resume(kvt_llama_longer_t *longer, const llama_token *tokens, size_t n_tokens,
                                     size_t *out_tokens, kvt_llama_why_t *why);

typedef struct kvt_llama_longer_stats_t {
    /** Tokens of the sequence; part of them: have left the cells, visible where they are chosen. */
    uint64_t tokens, stored_tokens;
    /** Cells of the context: all, of the sinks, of the slots. */
    uint64_t cells, sink_cells, slot_cells;
    /** Tokens decoded while all KV was in cells, and after that. */
    uint64_t dense_tokens, sparse_tokens;
    /** Choices (one per layer and part), blocks to choose from, blocks that were chosen. */
    uint64_t choices, candidate_blocks, chosen_blocks;
    /** Chosen blocks that were loaded; that were already in their layer's slots; bytes loaded. */
    uint64_t loaded_blocks, kept_blocks, loaded_bytes;
    /** Tokens and bytes written to the store. */
    uint64_t saved_tokens, saved_bytes;
    /** Bytes of the policy's metadata of the sequence, and of this object's own. */
    uint64_t policy_bytes, own_bytes;
    /** Nanoseconds in the caller's thread: all of decode; part of it: choosing, loading, saving. */
    uint64_t decode_ns, choose_ns, load_ns, save_ns;
    /** Parts that failed and were removed. */
    uint64_t failed_parts;
} kvt_llama_longer_stats_t;

kvt_status_t kvt_llama_longer_stats(const kvt_llama_longer_t *longer, kvt_llama_longer_stats_t *out);

/**
 * Blocks that a layer chose last, ascending; block i has the tokens from i * block_tokens on.
 * `count_out` receives their number, also with KVT_E_TOO_SMALL.
 */
kvt_status_t kvt_llama_longer_chosen(const kvt_llama_longer_t *longer, uint32_t layer, uint32_t *blocks,
                                     size_t room, size_t *count_out);

/**
 * Closes the object and clears the pointer. The context may be freed before or after. If the own store
 * cannot be closed the pointer stays valid for another close, and for nothing else.
 */
kvt_status_t kvt_llama_longer_close(kvt_llama_longer_t **longer, kvt_llama_why_t *why);

#ifdef __cplusplus
}
#endif

#endif
