/*
 * kvtier for llama.cpp: declarations shared by all adapters, and adapter A, the KV tier.
 *
 * The adapters are source. Compile them against the headers of the engine that you use, because ggml's
 * structs change with its version. Every open function first compares the compiled version with the
 * loaded one (kvt_llama_check).
 *
 * An adapter object belongs to one llama_context. Use it on the thread that uses the context. Stores,
 * budgets and runtimes belong to kvtier; any number of contexts and threads may share them.
 */
#ifndef KVTIER_LLAMA_H
#define KVTIER_LLAMA_H

#include <kvtier/kvtier.h>
#include <llama.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Error text: what went wrong and what to do about it. Empty after success. */
typedef struct kvt_llama_why_t {
    char text[512];
} kvt_llama_why_t;

/**
 * Checks that the loaded llama.cpp is the one that this code was compiled against. If it is not,
 * returns KVT_E_UNSUPPORTED with both versions in `why`. `why` may be null, here and below.
 */
kvt_status_t kvt_llama_check(kvt_llama_why_t *why);

/** The KV tier of one context. */
typedef struct kvt_llama_tier_t kvt_llama_tier_t;

/** Zero selects the default of every field. */
typedef struct kvt_llama_tier_opts_t {
    /** A store that is already open, shared by several contexts or with other users;
        null = an own store from the four fields below, which copies up to 32 MiB in the calling
        thread. A shared store does so with `inline=32MiB` in its spec. */
    const kvt_store_t *store;
    /** Bytes of host memory for cells of the tier's own store; 0 = 1 GiB. */
    uint64_t host_bytes;
    /** Directory of the own store's disk tier; null = no disk tier, and no KV outlives the process. */
    const char *disk_path;
    /** Limit of that directory in bytes; 0 = 8 GiB. */
    uint64_t disk_bytes;
    /** Spec string of the own store's eviction policy; null = the library's default. */
    const char *policy;

    /** The model's file. Its fingerprint identifies the KV. Null = `model_id` is given. */
    const char *model_path;
    /**
     * Used instead of the file's fingerprint: an id that the caller guarantees to identify the weights.
     */
    const char *model_id;
    /** Identifies the LoRA adapters and control vectors that are set on the context; null = none. If they
        change later, open one tier for each set, and use only the tier of the current set. */
    const char *adapters;
    /** Separates tenants: a long random string; null = one tenant. */
    const char *salt;

    /** Tokens of a chunk, the unit of sharing; 0 = 32, less with a shorter window, 128 with DeepSeek V4. */
    uint32_t chunk_tokens;
    /** A sequence id that nothing else uses, as scratch space; 0 = the last one of the context, -1 = none.
        Used with kv_unified only. Whole sequences are copied each time without a scratch sequence, where
        recurrent states can be rolled back (n_rs_seq), and for DeepSeek V4. While it is not empty, attach restores
        nothing and commit saves nothing (KVT_E_STATE). */
    int32_t scratch_seq;
    /** Tokens between checkpoints of recurrent states while a prompt is decoded; 0 = 512. */
    uint32_t checkpoint_tokens;
    /** KVT_LLAMA_* below. */
    uint32_t flags;

    /** The parameters that the context was made with; null = llama_context_default_params(). Their RoPE
        and YaRN settings change K and cannot be queried from the context. */
    const struct llama_context_params *params;
    /** Runtime on which the own store is opened; null = an own runtime. */
    const kvt_runtime_t *runtime;
    /** Budget of that runtime, charged for the own store and the tier's buffers; null = none. */
    const kvt_budget_t *budget;
    /** Limit in bytes of the buffers between context and store; 0 = 64 MiB. A context without a scratch
        sequence needs buffers for two whole sequences, regardless of this limit. */
    uint64_t buffer_bytes;
    /** Nanoseconds that a commit may wait for a buffer before it leaves saving to the next commit;
        0 = 50 ms. */
    uint64_t save_wait_ns;
    /** The parameters that the model was loaded with; null = loaded without overrides. Their kv_overrides
        change what it computes and cannot be queried from the model. */
    const struct llama_model_params *model_params;
} kvt_llama_tier_opts_t;

/** The store may evict chunks in the middle of a prompt; `attach` computes these holes again. Not for
    models with windows or recurrent states (KVT_E_UNSUPPORTED). */
#define KVT_LLAMA_HOLES 1u

#ifdef __cplusplus
#define KVT_LLAMA_TIER_OPTS_INIT {}
#else
#define KVT_LLAMA_TIER_OPTS_INIT {0}
#endif

/** Result of an attach. */
typedef struct kvt_llama_attached_t {
    /**
     * Tokens at the start of the prompt whose KV the sequence now holds. Decode from this position on.
     */
    uint32_t reused_tokens;
    /** Part of reused_tokens: the sequence already held them. */
    uint32_t kept_tokens;
    /** Part of reused_tokens: restored from host memory. */
    uint32_t host_tokens;
    /** Part of reused_tokens: restored from disk. */
    uint32_t disk_tokens;
    /** Part of reused_tokens: holes that were computed again. */
    uint32_t recomputed_tokens;
    /** Bytes copied into the context, and nanoseconds of the whole attach. */
    uint64_t bytes;
    uint64_t ns;
    /** KVT_OK, or the status with which a restore failed; the engine then decodes the rest. */
    kvt_status_t refused;
    /** Position of the first token to decode: reused_tokens, unless media of M-RoPE were reused. */
    llama_pos next_position;
} kvt_llama_attached_t;

/** An image or a sound in a prompt: embeddings in place of tokens. */
typedef struct kvt_llama_media_t {
    /** Index of its first token in the prompt. */
    uint64_t first;
    /** Number of its tokens, which are embeddings, and number of positions that they take; at least 1. */
    uint32_t tokens, positions;
    /** M-RoPE only: token i has the position of the first token, x of i % width and y of i / width more.
        0 = consecutive positions. */
    uint32_t width;
    /** M-RoPE only, where tokens are no grid: position (time), x and y of each token, as offsets from the
        first position, at most 2^24; positions must not decrease. Null = by width. */
    const llama_pos *layout;
    /** Hash of the pixels or samples, and of all that changes their embeddings (the projector's file, its
        settings): 32 bytes of a hash of at least 256 bits. */
    uint8_t digest[32];
} kvt_llama_media_t;

/** A prompt, or what a sequence holds. */
typedef struct kvt_llama_prompt_t {
    /** In the place of media: any values. */
    const llama_token *tokens;
    size_t n_tokens;
    /** Ascending by `first`; null = none. */
    const kvt_llama_media_t *media;
    size_t n_media;
} kvt_llama_prompt_t;

/**
 * Opens the tier of a context. To learn the layout of the context's KV, it decodes two tokens in an
 * empty sequence and removes them. This overwrites the logits of an earlier decode.
 *
 * KVT_E_UNSUPPORTED, with the reason in `why`: the loaded engine is not the compiled one, or the KV of
 * this model cannot be stored. Not supported are attention that is not causal, and models with an
 * encoder or without a decoder. KVT_E_INVALID: a mistake in `opts`, including chunks longer than the
 * model's window, or not a multiple of its compressed keys' tokens. KVT_E_STATE: all sequences of the
 * context are in use.
 */
kvt_status_t kvt_llama_tier_open(struct llama_context *ctx, const kvt_llama_tier_opts_t *opts,
                                 kvt_llama_tier_t **out, kvt_llama_why_t *why);

/**
 * Call it before a request. It makes sequence `seq` hold the longest prefix of the prompt that is
 * available. Tokens of the sequence that do not match the prompt are saved if necessary, then removed.
 * At least the last token of the prompt is left to decode, because its logits are needed.
 *
 * Returns KVT_OK also when a restore failed; `refused` has the status and `why` the text. The sequence
 * then holds fewer tokens of the prompt, or none, and the engine decodes the rest as it would without
 * kvtier. Any other status is a mistake in the call, and nothing was changed. Tokens outside the
 * vocabulary are such a mistake (KVT_E_INVALID), here and below: placeholder ids of images do not
 * identify the image; kvt_llama_attach_prompt describes it.
 */
kvt_status_t kvt_llama_attach(kvt_llama_tier_t *tier, llama_seq_id seq, const llama_token *tokens,
                              size_t n_tokens, kvt_llama_attached_t *out, kvt_llama_why_t *why);

/**
 * kvt_llama_attach for a prompt with media. It reuses media completely or not at all. KVT_E_UNSUPPORTED: a
 * grid or a layout, but the model has no M-RoPE, or has windows or another cache whose cells lack x and y.
 */
kvt_status_t kvt_llama_attach_prompt(kvt_llama_tier_t *tier, llama_seq_id seq,
                                     const kvt_llama_prompt_t *prompt, kvt_llama_attached_t *out,
                                     kvt_llama_why_t *why);

/**
 * Call it after a request, or more often. `tokens` are all tokens that the sequence now holds, from
 * position 0 on, all of them decoded. New KV is copied out of the context; other threads store it.
 * Chunks that are not full wait until they are full, or until an attach reuses their sequence. A save
 * that finds no space is counted and is not an error.
 *
 * If cells of the sequence were moved or removed (llama_memory_seq_add, seq_div, seq_rm of a middle
 * part), its tokens no longer describe it: call kvt_llama_forget instead. After any other change by the
 * caller (llama_memory_seq_rm, seq_cp, loading a state), call this function with the current tokens, or
 * kvt_llama_forget. Do so before anything else is decoded into the sequence.
 */
kvt_status_t kvt_llama_commit(kvt_llama_tier_t *tier, llama_seq_id seq, const llama_token *tokens,
                              size_t n_tokens, kvt_llama_why_t *why);

/** kvt_llama_commit for a sequence with media, all of them decoded completely. */
kvt_status_t kvt_llama_commit_prompt(kvt_llama_tier_t *tier, llama_seq_id seq,
                                     const kvt_llama_prompt_t *prompt, kvt_llama_why_t *why);

/**
 * Decodes the prompt from `first` on in batches of the context's size, and commits in between. The
 * commits also store windows and recurrent states at checkpoints. Afterwards the logits of the last
 * token are available. Engines that build their own batches call kvt_llama_commit instead.
 */
kvt_status_t kvt_llama_prefill(kvt_llama_tier_t *tier, llama_seq_id seq, const llama_token *tokens,
                               size_t n_tokens, size_t first, kvt_llama_why_t *why);

/**
 * Stops saving and reusing what the sequence holds now, and what is decoded after it, whatever is
 * committed. This ends with the next attach, which empties the sequence, or with a commit that finds it
 * empty. KV that is already in the store stays there.
 */
kvt_status_t kvt_llama_forget(kvt_llama_tier_t *tier, llama_seq_id seq);

/**
 * Waits until all committed full chunks are in the store, on disk (with a disk tier), and durable.
 * KVT_E_TIMEOUT at the deadline (CLOCK_MONOTONIC, 0 = none); KVT_E_BUDGET or KVT_E_IO if something
 * could not be stored since the last flush.
 */
kvt_status_t kvt_llama_flush(kvt_llama_tier_t *tier, uint64_t deadline_ns, kvt_llama_why_t *why);

typedef struct kvt_llama_tier_stats_t {
    uint64_t attaches, commits, reused_tokens, kept_tokens, host_tokens, disk_tokens,
        recomputed_tokens, decoded_tokens, saved_tokens, saved_bytes, restored_bytes, refused_restores,
        failed_saves;
    /** Nanoseconds spent in the caller's thread. */
    uint64_t attach_ns, commit_ns;
    /** Saves that found no buffer in time; the next commit tries again. */
    uint64_t skipped_saves;
    /** Bytes of buffers: now, and at most so far. */
    uint64_t buffer_bytes, most_buffer_bytes;
    /** Part of restored_bytes: copied from the store into the engine's cache, without a buffer. */
    uint64_t in_place_bytes;
} kvt_llama_tier_stats_t;

kvt_status_t kvt_llama_tier_stats(const kvt_llama_tier_t *tier, kvt_llama_tier_stats_t *out);

/** The key of the namespace (32 bytes). Tiers with equal keys can exchange KV. */
kvt_status_t kvt_llama_tier_key(const kvt_llama_tier_t *tier, uint8_t *out_key);

/**
 * Saves full chunks that are not saved yet, waits for pending saves, then closes. Clears the pointer
 * whatever it returns. The status is the first failure of kvt_llama_flush and of closing the own store.
 * Waits at most one minute for the flush and one for the store. Memory that a hanging disk still uses
 * after that is never freed (KVT_E_TIMEOUT, KVT_E_BUSY). Free the context after this call, never
 * before, and not after KVT_E_TIMEOUT: the disk may still write into its cells.
 */
kvt_status_t kvt_llama_tier_close(kvt_llama_tier_t **tier, kvt_llama_why_t *why);

#ifdef __cplusplus
}
#endif

#endif
