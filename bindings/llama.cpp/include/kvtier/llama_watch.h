/*
 * kvtier for llama.cpp, adapter B: what the engine computes, watched node by node, and sparse decode.
 *
 * A watch stands in cb_eval of a context. It keeps the time of layers for others, and serves sparse
 * policies of the library (kvt_sparse_info lists them), one for a sequence:
 *
 *   tokens leave    h2o, tova, snapkv, pyramidkv by the attention they get (contexts without flash
 *                   attention only), knorm and keydiff by their keys, streaming by their places.
 *                   Cells of llama.cpp are shared by all layers and heads, so one verdict serves all.
 *   blocks are      quest, arkvale, predict: for each layer, by its queries and what is known of the
 *   chosen          keys. Nothing leaves; what is not chosen is masked in this layer for this token.
 *
 * Prompts are computed with everything; blocks are chosen for batches of one token.
 *
 * Nodes are found by the part they play in a graph. Where one is absent the policy ends, the call
 * says which role of which layer it was, and the engine goes on as without it: from that layer on
 * everything is seen. What left before is gone.
 *
 * A watch belongs to one context and is used by the thread that uses the context.
 */
#ifndef KVTIER_LLAMA_WATCH_H
#define KVTIER_LLAMA_WATCH_H

#include <kvtier/llama.h>

#include <ggml-backend.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvt_llama_watch_t kvt_llama_watch_t;

/**
 * A layer begins (`is_end` 0): all layers before it have been computed, and nothing of it. Or it
 * ends (1): what it gives is there. In the order of the layers, in each graph that is computed, in
 * the thread that decodes. Weights and the cache of a layer may be changed where it begins.
 */
typedef void (*kvt_llama_layer_fn)(void *user_data, int32_t layer, int32_t is_end);

/** Zero = default in every field. */
typedef struct kvt_llama_watch_opts_t {
    /** Told of the beginning and the end of each layer; null = nobody. Costs one stop a layer. */
    kvt_llama_layer_fn on_layer;
    void *on_layer_data;
} kvt_llama_watch_opts_t;

#ifdef __cplusplus
#define KVT_LLAMA_WATCH_OPTS_INIT {}
#else
#define KVT_LLAMA_WATCH_OPTS_INIT {0}
#endif

/** Opens a watch for contexts on `model`. */
kvt_status_t kvt_llama_watch_open(const struct llama_model *model, const kvt_llama_watch_opts_t *opts,
                                  kvt_llama_watch_t **out, kvt_llama_why_t *why);

/**
 * Puts the watch into the parameters that a context is going to be made with. A callback that is
 * there already goes on being asked, and is told of the nodes that it wants.
 */
kvt_status_t kvt_llama_watch_params(kvt_llama_watch_t *watch, struct llama_context_params *params,
                                    kvt_llama_why_t *why);

/** The context that was made with those parameters. */
kvt_status_t kvt_llama_watch_attach(kvt_llama_watch_t *watch, struct llama_context *ctx,
                                    kvt_llama_why_t *why);

/** Zero = default in every field. */
typedef struct kvt_llama_sparse_opts_t {
    /** Such as "h2o(budget=512)" or "quest(budget=1024, share=bound)"; null = no policy any more. */
    const char *spec;
    /**
     * A policy of the caller's own instead: by keys and queries as quest, or by attention or keys as
     * h2o and knorm. Its data is released with the policy, if setting it succeeds.
     */
    const kvt_sparse_custom_t *custom;
    /** Tokens of a block that is chosen; 0 = the fewest that fit the policy's pages, from 16 on. */
    uint32_t block_tokens;
    /**
     * Every so many tokens a choice of blocks is not applied but held against the attention of all
     * cells: audited_mass below. Without flash attention only; 0 = never.
     */
    uint32_t audit_every;
} kvt_llama_sparse_opts_t;

#ifdef __cplusplus
#define KVT_LLAMA_SPARSE_OPTS_INIT {}
#else
#define KVT_LLAMA_SPARSE_OPTS_INIT {0}
#endif

/**
 * Gives a sequence a policy, or takes it away. Policies that go by attention or keys want to see all
 * tokens: the sequence is empty, or they are refused at the next batch (KVT_E_STATE).
 * KVT_E_SPEC: the spec, with the nearest that exists. KVT_E_UNSUPPORTED: cannot be done here.
 */
kvt_status_t kvt_llama_watch_policy(kvt_llama_watch_t *watch, llama_seq_id seq,
                                    const kvt_llama_sparse_opts_t *opts, kvt_llama_why_t *why);

/**
 * llama_decode, watched: policies serve the sequence whose batch this is, and what has to leave it
 * does so behind. Batches of several sequences are decoded with everything; a policy by which tokens
 * leave ends there, since it would miss some.
 *
 * A prompt ends with the first batch whose last token asks for logits.
 *
 * `rc` receives what llama_decode returned; it is called in any case but KVT_E_INVALID for null
 * arguments. Anything but KVT_OK: a policy ended, and why is said. Batches decoded by other means are
 * seen, but no policy serves them.
 */
kvt_status_t kvt_llama_watch_decode(kvt_llama_watch_t *watch, struct llama_batch batch, int32_t *rc,
                                    kvt_llama_why_t *why);

/** How many tokens have left a sequence since it was empty. */
kvt_status_t kvt_llama_watch_evicted(const kvt_llama_watch_t *watch, llama_seq_id seq,
                                     uint64_t *out_tokens);

/**
 * Whether the KV of a sequence is what its tokens give: since it was empty no token has left it
 * (_evicted), and no block policy has masked anything for a token that was computed. Where it is 0
 * the KV must not be stored for others (kvt_llama_commit), only for itself.
 *
 * The watch sees that a sequence was empty when its policy is set, and at _decode. Of what came from
 * elsewhere it knows nothing: a copy (llama_memory_seq_cp) or a restored state of a sequence that is
 * not exact is not exact either, though this, and _evicted, say so of the first one only.
 */
kvt_status_t kvt_llama_watch_is_exact(const kvt_llama_watch_t *watch, llama_seq_id seq, int *out_exact);

/**
 * The cells of a sequence were changed by other means than decoding, and their numbers may be others
 * now. Restored states in host memory are noticed without; those of other devices are not.
 */
kvt_status_t kvt_llama_watch_changed(kvt_llama_watch_t *watch, llama_seq_id seq);

/** What went wrong since the watch was opened, first things first: KVT_OK and no words for nothing. */
kvt_status_t kvt_llama_watch_fault(const kvt_llama_watch_t *watch, kvt_llama_why_t *why);

/** Of all sequences. */
typedef struct kvt_llama_watch_stats_t {
    /** Graphs that were seen, and nodes of them that the scheduler stopped at for us. */
    uint64_t graphs, stops;
    /** Attention of a layer that was added up, queries whose attention a policy was told. */
    uint64_t observed_layers, observed_rows;
    /** Times that tokens left, and how many did. */
    uint64_t evictions, evicted_tokens;
    /** Tokens that blocks were chosen for, and layers of them where some were left out. */
    uint64_t sparse_tokens, sparse_layers;
    /** Cells that those layers would have looked at, and how many of them were masked. */
    uint64_t seen_cells, masked_cells;
    /** Rows of keys that were read, and how often what was known of a sequence was read anew. */
    uint64_t rows_read, rebuilds;
    /** Layers whose choice was audited, and the attention that it had, in millionths, added up. */
    uint64_t audited_layers, audited_mass;
    /** Nanoseconds of policies, in callbacks and behind batches. */
    uint64_t policy_ns;
    /** Policies that ended because something was not as they need it. */
    uint64_t ended;
} kvt_llama_watch_stats_t;

kvt_status_t kvt_llama_watch_stats(const kvt_llama_watch_t *watch, kvt_llama_watch_stats_t *out);

/** After the context was freed: it calls the watch. Clears the pointer. */
kvt_status_t kvt_llama_watch_close(kvt_llama_watch_t **watch);

#ifdef __cplusplus
}
#endif

#endif
