/*
 * kvtier for llama.cpp: adapter C, streamed weights, for programs that embed libllama.
 *
 * A model need not fit into memory. Its layers, and the experts of its layers, are read from the GGUF
 * file by direct I/O when the engine computes them, into memory of a fixed size.
 *
 *     kvt_llama_weights_opts_t opts = KVT_LLAMA_WEIGHTS_OPTS_INIT;
 *     opts.model_path = "model.gguf";
 *     opts.budget_bytes = 8ull << 30;
 *     kvt_llama_weights_t *weights = NULL;
 *     kvt_llama_weights_open(&opts, &weights, &why);
 *
 *     struct llama_model_params mp = llama_model_default_params();
 *     struct llama_model *model = NULL;
 *     kvt_llama_weights_load(weights, &mp, &model, &why);
 *
 *     struct llama_context_params cp = llama_context_default_params();
 *     kvt_llama_weights_context(weights, &cp, &why);
 *     struct llama_context *ctx = llama_init_from_model(model, cp);
 *     ...
 *     if (llama_decode(ctx, batch) != 0) kvt_llama_weights_error(weights, &why);
 *     ...
 *     llama_free(ctx);
 *     llama_model_free(model);
 *     kvt_llama_weights_close(&weights, &why);
 *
 * This code is compiled against private headers of the engine (ggml-backend-impl.h).
 * kvt_llama_weights_open refuses any other engine.
 *
 * The weights are the file's bytes. If the file is written to while it is used, the next pass notices
 * it when it begins, and the file is not used any more. A pass that is running may see bytes of both.
 *
 * llama_model_save_to_file works, except for models with experts in place (KVT_LLAMA_WEIGHTS_IN_PLACE):
 * their strides look to the engine like a layout that it cannot save, and it aborts the process. To
 * save such a model, use KVT_LLAMA_WEIGHTS_NOT_IN_PLACE, or load it without this adapter.
 *
 * The CPU computes. One object serves one model, and as many contexts as `contexts` says. Each context
 * may have a thread of its own, as the engine allows. Any thread may call the functions here, except
 * close.
 */
#ifndef KVTIER_LLAMA_WEIGHTS_H
#define KVTIER_LLAMA_WEIGHTS_H

#include <kvtier/llama.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The streamed weights of one model. */
typedef struct kvt_llama_weights_t kvt_llama_weights_t;

/**
 * Every unit has a fixed address, backed by memory only while it is resident: see "In place" in
 * docs/reference/stream.md.
 */
#define KVT_LLAMA_WEIGHTS_IN_PLACE 1u
/**
 * Never in place. Without this flag, models with experts are loaded in place if their experts then have
 * equal distances. Otherwise experts are copied to where the engine expects them.
 */
#define KVT_LLAMA_WEIGHTS_NOT_IN_PLACE 8u
/**
 * Read files through the page cache. Without this flag by direct I/O, where the file system supports
 * it.
 */
#define KVT_LLAMA_WEIGHTS_BUFFERED 2u
/** Compare bytes with checksums, stored next to the model (.kvtsum), at every read. */
#define KVT_LLAMA_WEIGHTS_VERIFY 4u

/** Zero selects the default of every field. */
typedef struct kvt_llama_weights_opts_t {
    /** The GGUF file; the first file of a split model. */
    const char *model_path;
    /**
     * Limit in bytes for weights, including all overhead; 0 = the rest of `budget`, or the free memory.
     */
    uint64_t budget_bytes;
    /** A budget that others use too, and its runtime; null = an own one. */
    const kvt_budget_t *budget;
    const kvt_runtime_t *runtime;
    /** Priority in that budget; memory is reclaimed from owners of low priority first. */
    int64_t priority;
    /** Slots: layers that are in memory at once while they are streamed; 0 = `contexts` + 1. */
    uint32_t slots;
    /** Contexts that may decode at once; 0 = 1. */
    uint32_t contexts;
    /** Threads that read; 0 = 8. */
    uint32_t readers;
    /** KVT_LLAMA_WEIGHTS_* above. */
    uint32_t flags;
} kvt_llama_weights_opts_t;

#ifdef __cplusplus
#define KVT_LLAMA_WEIGHTS_OPTS_INIT {}
#else
#define KVT_LLAMA_WEIGHTS_OPTS_INIT {0}
#endif

/**
 * Opens the model's file and the streamer, which reserves its memory and begins to read resident units.
 * KVT_E_BUDGET: `why` has the smallest sufficient budget. KVT_E_UNSUPPORTED: another engine is loaded.
 */
kvt_status_t kvt_llama_weights_open(const kvt_llama_weights_opts_t *opts, kvt_llama_weights_t **out,
                                    kvt_llama_why_t *why);

/**
 * Loads the model without reading its weights, and waits until the resident units are in memory.
 * Progress goes to the progress callback of `params`; if it returns false, this returns
 * KVT_E_CANCELLED. Devices, load mode and buffer types in `params` are replaced.
 */
kvt_status_t kvt_llama_weights_load(kvt_llama_weights_t *weights, const struct llama_model_params *params,
                                    struct llama_model **out, kvt_llama_why_t *why);

/**
 * For programs that call llama_model_load_from_file themselves, with the same file, before
 * kvt_llama_weights_bind. Changes `params`, for one load. Such a load maps the file, and the engine
 * reads all of it into the page cache once; kvt_llama_weights_load avoids that.
 */
kvt_status_t kvt_llama_weights_params(kvt_llama_weights_t *weights, struct llama_model_params *params,
                                      kvt_llama_why_t *why);

/** Call it after that load, with the model. Not needed after kvt_llama_weights_load. */
kvt_status_t kvt_llama_weights_bind(kvt_llama_weights_t *weights, const struct llama_model *model,
                                    kvt_llama_why_t *why);

/**
 * Changes `params` of a context that is made next. The adapter's callbacks replace those of `params`
 * and call them. If not all experts fit, n_ubatch may be reduced. Do not set callbacks on the context
 * later (llama_set_abort_callback): set them here.
 */
kvt_status_t kvt_llama_weights_context(kvt_llama_weights_t *weights, struct llama_context_params *params,
                                       kvt_llama_why_t *why);

/** The context that was made with `params` is freed; another one may take its place. */
kvt_status_t kvt_llama_weights_context_end(kvt_llama_weights_t *weights,
                                           const struct llama_context_params *params);

/**
 * Returns the last failure of the weights and clears it; KVT_OK if there was none. After llama_decode
 * failed because of weights, `why` has the cause. Until this is called, all decodes of that context
 * fail. If a decode of the calling thread failed, the result concerns that thread's contexts only.
 * Otherwise it concerns all contexts, and none of them may decode meanwhile. A disk that does not
 * answer for 300 seconds fails a decode.
 */
kvt_status_t kvt_llama_weights_error(kvt_llama_weights_t *weights, kvt_llama_why_t *why);

typedef struct kvt_llama_weights_stats_t {
    /** The model's bytes, its resident units, and its streamed units. */
    uint64_t model_bytes;
    uint32_t resident_units, streamed_units;
    /** Slots of layers and of experts, and the size of one. */
    uint32_t slots, expert_slots;
    uint64_t slot_bytes, expert_slot_bytes;
    /** Passes through the model; units acquired, and those that had to be waited for. */
    uint64_t passes, acquires, waited;
    /** Bytes read, and nanoseconds that the engine waited for them. */
    uint64_t read_bytes, wait_ns;
    /**
     * Experts that were in memory, experts that had to be read; bytes copied to where the engine
     * expects them.
     */
    uint64_t expert_hits, expert_misses, copied_bytes;
    /** Reads that failed, and decodes that were ended because of weights. */
    uint64_t failed_reads, failed_decodes;
    /** The budget's limit, its use now, and its highest use (of all owners). */
    uint64_t budget_bytes, used_bytes, peak_bytes;
} kvt_llama_weights_stats_t;

kvt_status_t kvt_llama_weights_stats(const kvt_llama_weights_t *weights, kvt_llama_weights_stats_t *out);

/** The streamer, for plans, marks and rebalancing (kvt_stream_*). This object still owns it. */
const kvt_stream_t *kvt_llama_weights_stream(const kvt_llama_weights_t *weights);

/**
 * Closes the object and clears the pointer; null is allowed. KVT_E_BUSY while the model exists: free
 * the contexts, then the model, then this object. After that, parameters of kvt_llama_weights_params
 * must not be used for another load.
 */
kvt_status_t kvt_llama_weights_close(kvt_llama_weights_t **weights, kvt_llama_why_t *why);

#ifdef __cplusplus
}
#endif

#endif
