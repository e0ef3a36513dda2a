/*
 * kvtier for llama.cpp: what all adapters share, and adapter A, the KV tier.
 *
 * Source, compiled against the engine's own headers: structs of ggml change with its version. What
 * these adapters were compiled for and what is loaded is compared before anything else is done
 * (kvt_llama_check); every open does that by itself.
 *
 * An adapter object belongs to one llama_context and is used by the thread that uses the context.
 * Stores, budgets and runtimes are kvtier's and may be shared by any number of contexts and threads.
 */
#ifndef KVTIER_LLAMA_H
#define KVTIER_LLAMA_H

#include <kvtier/kvtier.h>
#include <llama.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What went wrong, in words, and what to do about it. Empty where nothing did. */
typedef struct kvt_llama_why_t {
    char text[512];
} kvt_llama_why_t;

/**
 * Whether the llama.cpp that is loaded is the one that this was compiled against.
 * KVT_E_UNSUPPORTED with both versions in `why` where it is not. `why` may be null, here and below.
 */
kvt_status_t kvt_llama_check(kvt_llama_why_t *why);

/** The KV tier of one context. */
typedef struct kvt_llama_tier_t kvt_llama_tier_t;

/** Zero = default in every field. */
typedef struct kvt_llama_tier_opts_t {
    /** A store that is open already, for several contexts or next to other users; null = an own one
        of the four fields below. */
    const kvt_store_t *store;
    /** Bytes of host memory for cells of an own store; 0 = 1 GiB. */
    uint64_t host_bytes;
    /** Directory of an own store's disk tier; null = none: nothing outlives the process. */
    const char *disk_path;
    /** Bytes of that directory; 0 = 8 GiB. */
    uint64_t disk_bytes;
    /** Spec of an own store's eviction policy; null = the library's default. */
    const char *policy;

    /** The model's file: its fingerprint says whose KV this is. Null = `model_id` is given. */
    const char *model_path;
    /** A fingerprint of the weights that the caller knows to be right, instead of the file's. */
    const char *model_id;
    /** What identifies the LoRA adapters and control vectors that are set on the context; null = none. Where
        they change later on, open another tier for each set, and use only the one of the set that is on. */
    const char *adapters;
    /** What separates tenants: a long random string; null = one tenant. */
    const char *salt;

    /** Tokens of a chunk, the unit that is shared; 0 = 32. */
    uint32_t chunk_tokens;
    /** A sequence id that nothing else uses, for work on the side; 0 = the last one of the context,
        -1 = none. Used where kv_unified is set; without one whole sequences are copied each time, and so
        they are where recurrent states can be rolled back (n_rs_seq). While it is not empty attach
        restores nothing and commit saves nothing (KVT_E_STATE). */
    int32_t scratch_seq;
    /** Tokens between checkpoints of recurrent states while a prompt is decoded; 0 = 512. */
    uint32_t checkpoint_tokens;
    /** KVT_LLAMA_* below. */
    uint32_t flags;

    /** What the context was made with: its RoPE and YaRN settings change K, and the context does not
        tell them. Null = those settings are llama_context_default_params()'s. */
    const struct llama_context_params *params;
    /** For an own store: the runtime that it is opened on; null = an own one. */
    const kvt_runtime_t *runtime;
    /** Who pays for an own store and for the tier's buffers, a budget of that runtime; null = nobody. */
    const kvt_budget_t *budget;
    /** Most bytes of buffers between context and store; 0 = 64 MiB. A context that has no scratch
        sequence needs two whole sequences whatever this says. */
    uint64_t buffer_bytes;
    /** How long a commit may wait for a buffer before it leaves saving to the next one; 0 = 50 ms. */
    uint64_t save_wait_ns;
    /** What the model was loaded with: its kv_overrides change what it computes, and the model does not
        tell them. Null = it was loaded without overrides. */
    const struct llama_model_params *model_params;
} kvt_llama_tier_opts_t;

/** Let the store drop chunks in the middle of a prompt: `attach` computes them anew. Not for models
    with windows or recurrent states (KVT_E_UNSUPPORTED). */
#define KVT_LLAMA_HOLES 1u

#ifdef __cplusplus
#define KVT_LLAMA_TIER_OPTS_INIT {}
#else
#define KVT_LLAMA_TIER_OPTS_INIT {0}
#endif

/** What an attach did. */
typedef struct kvt_llama_attached_t {
    /** Tokens at the start of the prompt whose KV is in the sequence now: decode from here on. */
    uint32_t reused_tokens;
    /** Of those: were in the sequence before. */
    uint32_t kept_tokens;
    /** Of those: came from memory. */
    uint32_t host_tokens;
    /** Of those: came from disk. */
    uint32_t disk_tokens;
    /** Of those: were holes, computed anew. */
    uint32_t recomputed_tokens;
    /** Bytes that were copied into the context, and the nanoseconds that all of it took. */
    uint64_t bytes;
    uint64_t ns;
    /** Why not more: KVT_OK, or what a restore was refused with (the prompt is decoded then). */
    kvt_status_t refused;
} kvt_llama_attached_t;

/**
 * Opens the tier of a context. Decodes two tokens in a sequence that is empty, and removes them: what
 * the context's KV looks like cannot be asked for otherwise. Logits of an earlier decode are gone then.
 *
 * KVT_E_UNSUPPORTED with the reason in `why`: the engine is not the one that this was compiled against,
 * or the KV of this model cannot be kept (M-RoPE; attention with extra caches or that is not causal;
 * models that do not decode). KVT_E_INVALID: a mistake in `opts`, also chunks that are longer than the
 * model's window. KVT_E_STATE: all sequences of the context are in use.
 */
kvt_status_t kvt_llama_tier_open(struct llama_context *ctx, const kvt_llama_tier_opts_t *opts,
                                 kvt_llama_tier_t **out, kvt_llama_why_t *why);

/**
 * Before a request: makes sequence `seq` hold as much of the prompt as there is. What the sequence
 * held and the prompt does not go on with is removed, after it was saved if it was not yet.
 * At least the last token is left to decode: its logits are wanted.
 *
 * KVT_OK also where something could not be restored (`refused` says it, `why` in words): the sequence then
 * has fewer tokens of the prompt, or none, and the rest is decoded as without kvtier. Anything else is a
 * mistake of the call, and nothing was touched. So are tokens that are none of the vocabulary
 * (KVT_E_INVALID), here and below: numbers that stand for images do not say which image it is.
 */
kvt_status_t kvt_llama_attach(kvt_llama_tier_t *tier, llama_seq_id seq, const llama_token *tokens,
                              size_t n_tokens, kvt_llama_attached_t *out, kvt_llama_why_t *why);

/**
 * After a request, or as often as is liked: `tokens` are what the sequence holds now, from position
 * 0 on, each decoded. What is new is copied out of the context and stored by other threads; chunks that
 * are not full wait until they are, or until an attach takes their sequence. A save that finds no room
 * is counted, and is no error.
 *
 * A sequence whose cells were moved or thinned out (llama_memory_seq_add, seq_div, seq_rm of a middle)
 * is not what its tokens say any more: call kvt_llama_forget instead. After any other change that the
 * caller makes to a sequence (llama_memory_seq_rm, seq_cp, loading a state) call this one with what is
 * there now, before anything else is decoded into it, or kvt_llama_forget.
 */
kvt_status_t kvt_llama_commit(kvt_llama_tier_t *tier, llama_seq_id seq, const llama_token *tokens,
                              size_t n_tokens, kvt_llama_why_t *why);

/**
 * Decodes the prompt from `first` on in batches of the context's size, committing on the way: what
 * windows and recurrent states held at a checkpoint is kept as well. Logits of the last token are
 * there afterwards. Engines that batch by themselves call kvt_llama_commit instead.
 */
kvt_status_t kvt_llama_prefill(kvt_llama_tier_t *tier, llama_seq_id seq, const llama_token *tokens,
                               size_t n_tokens, size_t first, kvt_llama_why_t *why);

/**
 * Nothing of what the sequence holds now is saved or kept from here on, nor of what is decoded behind it,
 * whatever is committed: until the next attach, which empties it, or a commit that finds it empty. What
 * is in the store already stays.
 */
kvt_status_t kvt_llama_forget(kvt_llama_tier_t *tier, llama_seq_id seq);

/**
 * Waits until all that was committed is in the store, on disk (where there is one), and durable: full
 * chunks, that is. KVT_E_TIMEOUT at the deadline (CLOCK_MONOTONIC, 0 = none); KVT_E_BUDGET or KVT_E_IO
 * where something could not be stored since the last flush.
 */
kvt_status_t kvt_llama_flush(kvt_llama_tier_t *tier, uint64_t deadline_ns, kvt_llama_why_t *why);

typedef struct kvt_llama_tier_stats_t {
    uint64_t attaches, commits, reused_tokens, kept_tokens, host_tokens, disk_tokens,
        recomputed_tokens, decoded_tokens, saved_tokens, saved_bytes, restored_bytes, refused_restores,
        failed_saves;
    /** Nanoseconds in the caller's thread. */
    uint64_t attach_ns, commit_ns;
    /** Saves that found no buffer in time; the next commit tries again. */
    uint64_t skipped_saves;
    /** Bytes of buffers now, and the most there ever were. */
    uint64_t buffer_bytes, most_buffer_bytes;
} kvt_llama_tier_stats_t;

kvt_status_t kvt_llama_tier_stats(const kvt_llama_tier_t *tier, kvt_llama_tier_stats_t *out);

/** The key of the namespace (32 bytes): equal where KV is exchangeable. */
kvt_status_t kvt_llama_tier_key(const kvt_llama_tier_t *tier, uint8_t *out_key);

/**
 * Saves what full chunks are not saved yet, waits for what is being stored, then closes. Clears the
 * pointer whatever it returns, which is what kvt_llama_flush and the closing of an own store said. It
 * waits a minute for the flush and another one for the store; what a disk that hangs has not ended then
 * keeps its memory for good (KVT_E_TIMEOUT, KVT_E_BUSY). The context is freed after it, never before.
 */
kvt_status_t kvt_llama_tier_close(kvt_llama_tier_t **tier, kvt_llama_why_t *why);

#ifdef __cplusplus
}
#endif

#endif
