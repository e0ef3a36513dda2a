/*
 * kvtier for llama.cpp, adapter B: observes the engine's graph node by node, and decodes sparsely.
 *
 * A watch is the cb_eval of a context. It reports the beginning and end of layers, and serves the
 * library's sparse policies (kvt_sparse_info lists them), one per sequence:
 *
 *   tokens are      h2o, tova, snapkv, pyramidkv by the attention they get (contexts without flash
 *   evicted         attention only), knorm and keydiff by their keys, streaming by their positions.
 *                   All layers and heads share llama.cpp's cells, so one decision serves all of them.
 *   blocks are      quest, arkvale, predict: for each layer, by its queries and metadata of the keys.
 *   chosen          Nothing is evicted; other blocks are masked in this layer for this token.
 *
 * Prompts are computed with full attention; blocks are chosen for batches of one token.
 *
 * Nodes are found by their role in a graph. If one is missing, the policy ends and the call reports
 * which role of which layer it was. The engine continues as without the policy: from that layer on
 * attention is full. Tokens that were evicted before stay evicted.
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
 * Notification that a layer begins (`is_end` 0) or ends (1). At the beginning all earlier layers have
 * been computed, and nothing of this one. At the end its output is complete. Calls come in the order of
 * the layers, for each computed graph, on the thread that decodes. A layer's weights and cache may be
 * changed at its beginning.
 */
typedef void (*kvt_llama_layer_fn)(void *user_data, int32_t layer, int32_t is_end);

/** Zero selects the default of every field. */
typedef struct kvt_llama_watch_opts_t {
    /**
     * Called at the beginning and end of each layer; null = never. Costs one scheduler stop per layer.
     */
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
 * Sets the watch in the parameters of a context that is made next. A callback that is already there is
 * still asked, and is called for the nodes that it wants.
 */
kvt_status_t kvt_llama_watch_params(kvt_llama_watch_t *watch, struct llama_context_params *params,
                                    kvt_llama_why_t *why);

/** Attaches the context that was made with those parameters. */
kvt_status_t kvt_llama_watch_attach(kvt_llama_watch_t *watch, struct llama_context *ctx,
                                    kvt_llama_why_t *why);

/** Zero selects the default of every field. */
typedef struct kvt_llama_sparse_opts_t {
    /**
     * Spec string, such as "h2o(budget=512)" or "quest(budget=1024, share=bound)"; null = remove the
     * policy.
     */
    const char *spec;
    /**
     * The caller's own policy instead. It selects by keys and queries as quest does, or by attention or
     * keys as h2o and knorm do. If setting it succeeds, its data is released with the policy.
     */
    const kvt_sparse_custom_t *custom;
    /** Tokens of a block that is chosen; 0 = the fewest, at least 16, that fit the policy's pages. */
    uint32_t block_tokens;
    /**
     * Tokens between audits; 0 = never. In an audit a choice of blocks is not applied but compared with
     * the attention of all cells (audited_mass below). Without flash attention only.
     */
    uint32_t audit_every;
    /**
     * Tokens that a choice of blocks serves in its layer, with the blocks completed since; 0 or 1 = each
     * token chooses anew. 4 quarters what choosing costs.
     */
    uint32_t keep_tokens;
} kvt_llama_sparse_opts_t;

#ifdef __cplusplus
#define KVT_LLAMA_SPARSE_OPTS_INIT {}
#else
#define KVT_LLAMA_SPARSE_OPTS_INIT {0}
#endif

/**
 * Sets or removes the policy of a sequence. Policies that use attention or keys must see all tokens. If
 * the sequence is not empty, the next batch refuses them (KVT_E_STATE). KVT_E_SPEC: the spec is wrong;
 * `why` names the nearest one. KVT_E_UNSUPPORTED: not possible here.
 */
kvt_status_t kvt_llama_watch_policy(kvt_llama_watch_t *watch, llama_seq_id seq,
                                    const kvt_llama_sparse_opts_t *opts, kvt_llama_why_t *why);

/**
 * Calls llama_decode and serves the policy of the sequence whose batch it is; evictions follow the
 * decode. Batches of several sequences are decoded with full attention. An eviction policy ends there,
 * because it would miss tokens.
 *
 * A prompt ends with the first batch whose last token requests logits.
 *
 * `rc` receives the result of llama_decode, which is called unless an argument is null (KVT_E_INVALID).
 * Any status but KVT_OK: a policy ended, and `why` says why. The watch observes batches that are
 * decoded by other means, but no policy serves them.
 */
kvt_status_t kvt_llama_watch_decode(kvt_llama_watch_t *watch, struct llama_batch batch, int32_t *rc,
                                    kvt_llama_why_t *why);

/** Number of tokens evicted from a sequence since it was empty. */
kvt_status_t kvt_llama_watch_evicted(const kvt_llama_watch_t *watch, llama_seq_id seq,
                                     uint64_t *out_tokens);

/**
 * Tells whether the KV of a sequence follows exactly from its tokens. That holds if, since it was
 * empty, no token was evicted (_evicted) and no block policy masked a block for a computed token. If
 * the result is 0, the KV must not be stored for others (kvt_llama_commit), only for this sequence.
 *
 * The watch checks that a sequence is empty when its policy is set and in _decode. It knows nothing
 * about KV from elsewhere. A copy (llama_memory_seq_cp) or a restored state of an inexact sequence is
 * inexact too, but this function and _evicted report it for the original sequence only.
 */
kvt_status_t kvt_llama_watch_is_exact(const kvt_llama_watch_t *watch, llama_seq_id seq, int *out_exact);

/**
 * Tells the watch that cells of a sequence were changed by other means than decoding, and may have
 * other numbers. The watch notices restored states in host memory by itself, but not those on other
 * devices.
 */
kvt_status_t kvt_llama_watch_changed(kvt_llama_watch_t *watch, llama_seq_id seq);

/** The first failure since the watch was opened; KVT_OK and an empty text if there was none. */
kvt_status_t kvt_llama_watch_fault(const kvt_llama_watch_t *watch, kvt_llama_why_t *why);

/** Counters of all sequences. */
typedef struct kvt_llama_watch_stats_t {
    /** Observed graphs, and their nodes at which the scheduler stopped for the watch. */
    uint64_t graphs, stops;
    /** Layers whose attention was summed, and queries whose attention a policy received. */
    uint64_t observed_layers, observed_rows;
    /** Evictions, and tokens evicted. */
    uint64_t evictions, evicted_tokens;
    /** Tokens for which blocks were chosen, and their layers in which some blocks were masked. */
    uint64_t sparse_tokens, sparse_layers;
    /** Cells that those layers would have attended to, and how many of them were masked. */
    uint64_t seen_cells, masked_cells;
    /** Rows of keys that were read, and how often the metadata of a sequence was rebuilt. */
    uint64_t rows_read, rebuilds;
    /** Layers whose choice was audited, and the sum of the attention it covered, in millionths. */
    uint64_t audited_layers, audited_mass;
    /** Nanoseconds of policies, in callbacks and after batches. */
    uint64_t policy_ns;
    /** Policies that ended because a requirement was not met. */
    uint64_t ended;
    /** Part of sparse_layers: the choice was made for an earlier token (keep_tokens). */
    uint64_t kept_layers;
} kvt_llama_watch_stats_t;

kvt_status_t kvt_llama_watch_stats(const kvt_llama_watch_t *watch, kvt_llama_watch_stats_t *out);

/** Close it after the context was freed, because the context calls the watch. Clears the pointer. */
kvt_status_t kvt_llama_watch_close(kvt_llama_watch_t **watch);

#ifdef __cplusplus
}
#endif

#endif
