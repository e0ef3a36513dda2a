/*
 * kvtier for llama.cpp: sequences that are longer than the engine's KV cache.
 *
 * The cells of a context are divided when a sequence fills them: its first tokens (sinks) and its
 * last ones (the window) stay at their places, the cells between are held as slots. What leaves the
 * window is kept in a kvtier store, layer by layer. In each layer a sparse policy chooses by this
 * layer's queries which blocks of that are seen; these are written into the slots of this layer, and
 * its attention sees sinks, window and chosen blocks. Up to n_ctx tokens nothing is different from
 * the engine alone, bit for bit; beyond them attention is sparse, and says so in its counters.
 *
 *     struct llama_context_params params = llama_context_default_params();
 *     kvt_llama_longer_opts_t opts = KVT_LLAMA_LONGER_OPTS_INIT;
 *     kvt_llama_longer_open(&opts, &params, &longer, &why);      // a callback, sequence ids
 *     ctx = llama_init_from_model(model, params);
 *     kvt_llama_longer_bind(longer, ctx, &why);
 *     kvt_llama_longer_decode(longer, prompt, n_prompt, &why);   // llama_get_logits_ith(ctx, -1)
 *     kvt_llama_longer_decode(longer, &token, 1, &why);
 *     llama_free(ctx);
 *     kvt_llama_longer_close(&longer, &why);
 *
 * One object serves one sequence of one context, on the thread that uses the context. While it is
 * bound, nothing else touches that sequence or the one whose cells it holds, and no other sequence
 * has cells of the context: it counts on all of them, and tokens that find none are refused
 * (KVT_E_BUSY). It may be closed before its context: that then must not be decoded with any more, for
 * the context still has the callback.
 */
#ifndef KVTIER_LLAMA_LONGER_H
#define KVTIER_LLAMA_LONGER_H

#include <kvtier/llama.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvt_llama_longer_t kvt_llama_longer_t;

/** Zero = default in every field. */
typedef struct kvt_llama_longer_opts_t {
    /** A store that is open already; null = an own one of the three fields below. */
    const kvt_store_t *store;
    /** Who pays for what is kept beside the store; null = the own store's budget, or nobody. */
    const kvt_account_t *account;
    /** Bytes of host memory for all of it: an own store, what the policy knows; 0 = 1 GiB. */
    uint64_t host_bytes;
    /** Directory of an own store's disk tier; null = none: the sequence ends where memory does. */
    const char *disk_path;
    /** Bytes of that directory; 0 = 8 GiB. */
    uint64_t disk_bytes;

    /**
     * Under which name the sequence is in the store, to be gone on with later (_save, _resume).
     * Nobody else's KV is under it. What was computed with everything is found by contexts of any
     * size; what was computed sparsely only where spec, block_tokens, sinks, slots, parts and cells
     * are the same. Null = it is gone when this is closed.
     */
    const char *name;
    /**
     * What identifies the model's weights; needed with a name. How they are used is looked at beside
     * it (versions of the engine, RoPE and YaRN of the params, types of K and V, metadata of the
     * file), but for `adapters` below.
     */
    const char *model_id;

    /**
     * The sparse policy of text: one that selects blocks for a whole layer by its own queries.
     * Null = "arkvale(sinks=0, window=0, dense=0)" with pages of a block and all slots as its budget.
     */
    const char *spec;

    /** Tokens of a block, which comes and goes as a whole; 0 = 8. */
    uint32_t block_tokens;
    /** First tokens that always are seen, rounded up to blocks; 0 = 16. */
    uint32_t sink_tokens;
    /** Cells of the slots, rounded down to blocks; 0 = two thirds of the context's. */
    uint32_t slot_tokens;
    /**
     * Tokens that are computed at once behind the first n_ctx: they share a choice of blocks. 0 = 16.
     * Fewer are nearer to what single tokens would choose, and slower.
     */
    uint32_t part_tokens;
    /** Most tokens of the sequence; 0 = 1048576. */
    uint32_t max_tokens;
    /** The sequence. */
    llama_seq_id seq;
    /** A sequence id that nothing else uses, to hold slots with; 0 = the last one of the context. */
    llama_seq_id held_seq;
    /** KVT_LLAMA_LONGER_* below. */
    uint32_t flags;
    /**
     * What the engine does not tell of and changes KV: adapters (LoRA, control vectors) of the context
     * and their scales, metadata that was overridden when the model was loaded. Null = nothing.
     */
    const char *adapters;
} kvt_llama_longer_opts_t;

/**
 * Chosen blocks lie in the slots in the order of the sequence. Equal choices then give equal bits
 * whatever was chosen before; more is copied, for a block that stays may have to move.
 */
#define KVT_LLAMA_LONGER_ORDERED 1u
/**
 * Rows pass through staging memory and the engine's calls, as where the cache is in memory of a
 * device: to try that on a machine without one.
 */
#define KVT_LLAMA_LONGER_STAGED 2u

#ifdef __cplusplus
#define KVT_LLAMA_LONGER_OPTS_INIT {}
#else
#define KVT_LLAMA_LONGER_OPTS_INIT {0}
#endif

/**
 * Opens the store, and sets in `params` what this needs: cb_eval (one that was there is called as
 * well), a unified cache, flash attention, a second sequence. `params` may be null: then nothing
 * could be bound later, and the options alone are checked.
 */
kvt_status_t kvt_llama_longer_open(const kvt_llama_longer_opts_t *opts, struct llama_context_params *params,
                                   kvt_llama_longer_t **out, kvt_llama_why_t *why);

/**
 * Takes a context that was made from these params, and is empty. Its graph is looked at once, by
 * decoding a token that is taken back. KVT_E_UNSUPPORTED with words where it cannot be served:
 * sliding windows, recurrent layers, latents (MLA), no flash attention, ALiBi. May be called again
 * after a failure.
 */
kvt_status_t kvt_llama_longer_bind(kvt_llama_longer_t *longer, struct llama_context *ctx,
                                   kvt_llama_why_t *why);

/**
 * Decodes tokens behind those that the sequence has. Logits of the last one are there afterwards
 * (llama_get_logits_ith(ctx, -1)). After a failure the sequence has the parts that were computed
 * whole (_stats, tokens), and may be gone on with: KVT_E_BUDGET means that the store is full,
 * KVT_E_NOT_FOUND that it has lost a block, KVT_E_BUSY that llama_decode has failed, KVT_E_AGAIN
 * that others have kept the store busy for five seconds.
 */
kvt_status_t kvt_llama_longer_decode(kvt_llama_longer_t *longer, const llama_token *tokens, size_t n_tokens,
                                     kvt_llama_why_t *why);

/**
 * Takes back all but the first n_tokens. What has left the window does not come back:
 * KVT_E_UNSUPPORTED then, and 0, which is always possible, begins another sequence.
 */
kvt_status_t kvt_llama_longer_truncate(kvt_llama_longer_t *longer, size_t n_tokens, kvt_llama_why_t *why);

/**
 * Stores what fills blocks and is not in the store yet, window and all; on disk (where there is one)
 * and durable when it returns. The sequence goes on.
 */
kvt_status_t kvt_llama_longer_save(kvt_llama_longer_t *longer, kvt_llama_why_t *why);

/**
 * Makes an empty sequence one of the first `*out_tokens` of these tokens, as far as the store has
 * them under this name: whole blocks, and the last token is left to decode. They may come from a
 * context of another size (of the same model, settings of RoPE, adapters, block_tokens and types of K
 * and V), where they were computed exactly.
 */
kvt_status_t kvt_llama_longer_resume(kvt_llama_longer_t *longer, const llama_token *tokens, size_t n_tokens,
                                     size_t *out_tokens, kvt_llama_why_t *why);

typedef struct kvt_llama_longer_stats_t {
    /** Tokens of the sequence; of those: have left the cells, and are seen where they are chosen. */
    uint64_t tokens, stored_tokens;
    /** Cells of the context: all, of the first tokens, of slots. */
    uint64_t cells, sink_cells, slot_cells;
    /** Tokens that were decoded while all was in cells, and behind that. */
    uint64_t dense_tokens, sparse_tokens;
    /** Choices (one a layer and part), blocks to choose from, blocks that were chosen. */
    uint64_t choices, candidate_blocks, chosen_blocks;
    /** Chosen blocks that were loaded, that were in their layer's slots already; bytes of the former. */
    uint64_t loaded_blocks, kept_blocks, loaded_bytes;
    /** What went to the store. */
    uint64_t saved_tokens, saved_bytes;
    /** What the policy knows of the sequence, and what this keeps beside it. */
    uint64_t policy_bytes, own_bytes;
    /** Nanoseconds in the caller's thread: all of decode; of that choosing, loading, saving. */
    uint64_t decode_ns, choose_ns, load_ns, save_ns;
    /** Parts that failed and were taken back. */
    uint64_t failed_parts;
} kvt_llama_longer_stats_t;

kvt_status_t kvt_llama_longer_stats(const kvt_llama_longer_t *longer, kvt_llama_longer_stats_t *out);

/**
 * The blocks that a layer chose last, ascending; block i has the tokens from i * block_tokens on.
 * `count_out` says how many there are, also with KVT_E_TOO_SMALL.
 */
kvt_status_t kvt_llama_longer_chosen(const kvt_llama_longer_t *longer, uint32_t layer, uint32_t *blocks,
                                     size_t room, size_t *count_out);

/**
 * Closes it and clears the pointer. The context may be freed before or after it. After a failure, of
 * an own store that cannot be closed, the pointer is as it was: it may only be closed again.
 */
kvt_status_t kvt_llama_longer_close(kvt_llama_longer_t **longer, kvt_llama_why_t *why);

#ifdef __cplusplus
}
#endif

#endif
