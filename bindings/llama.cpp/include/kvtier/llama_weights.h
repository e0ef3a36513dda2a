/*
 * kvtier for llama.cpp: adapter C, streamed weights, for programs that embed libllama.
 *
 * A model never has to fit into memory: its layers, and the experts of its layers, come from the GGUF
 * file when the engine computes them, in memory of a size that was said, by direct I/O.
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
 * Compiled against private headers of the engine (ggml-backend-impl.h): another engine than that one is
 * refused by kvt_llama_weights_open.
 *
 * The bytes are those of the file. One that is written to while it is used is noticed when the next pass
 * begins, and from then on not used any more: a pass that is under way may have bytes of both.
 *
 * llama_model_save_to_file works, but not for models with experts in place (KVT_LLAMA_WEIGHTS_IN_PLACE): the
 * engine takes their distances for a layout that it cannot save, and ends the process. Say
 * KVT_LLAMA_WEIGHTS_NOT_IN_PLACE, or load without this adapter, to save one.
 *
 * The processor computes. One object is for one model, and for as many contexts as `contexts` says;
 * each may be used by a thread of its own, as the engine allows. All functions here may be called by
 * any thread, but for close.
 */
#ifndef KVTIER_LLAMA_WEIGHTS_H
#define KVTIER_LLAMA_WEIGHTS_H

#include <kvtier/llama.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The streamed weights of one model. */
typedef struct kvt_llama_weights_t kvt_llama_weights_t;

/** Every unit has an address of its own, and memory only while it is there: see docs/stream.md. */
#define KVT_LLAMA_WEIGHTS_IN_PLACE 1u
/**
 * Never in place. Without it models with experts are in place by themselves where their experts lie at
 * equal distances then; the others' experts are copied to where the engine wants them.
 */
#define KVT_LLAMA_WEIGHTS_NOT_IN_PLACE 8u
/** Files are read through the page cache. Without it by direct I/O, where the file system can. */
#define KVT_LLAMA_WEIGHTS_BUFFERED 2u
/** Bytes are compared with checksums, kept beside the model (.kvtsum), whenever they are read. */
#define KVT_LLAMA_WEIGHTS_VERIFY 4u

/** Zero = default in every field. */
typedef struct kvt_llama_weights_opts_t {
    /** The GGUF file; of a split model the first file. */
    const char *model_path;
    /** Most memory for weights, everything counted; 0 = what `budget` has left, or what is free. */
    uint64_t budget_bytes;
    /** A budget that others use too, and its runtime; null = an own one. */
    const kvt_budget_t *budget;
    const kvt_runtime_t *runtime;
    /** The rank in that budget: owners of low priority are asked first to give back. */
    int64_t priority;
    /** Layers that are in memory on their way through; 0 = `contexts` and one. */
    uint32_t slots;
    /** Contexts that may decode at once; 0 = 1. */
    uint32_t contexts;
    /** Threads that read; 0 = 4. */
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
 * Opens the model's file and the streamer, which takes its memory and begins to read what stays.
 * KVT_E_BUDGET says how much is needed at least; KVT_E_UNSUPPORTED that another engine is loaded.
 */
kvt_status_t kvt_llama_weights_open(const kvt_llama_weights_opts_t *opts, kvt_llama_weights_t **out,
                                    kvt_llama_why_t *why);

/**
 * Loads the model without reading its weights, and waits until those are there that stay. The
 * progress callback of `params` is told of that; where it returns false, this is KVT_E_CANCELLED.
 * What `params` says of devices, load mode and buffer types is replaced.
 */
kvt_status_t kvt_llama_weights_load(kvt_llama_weights_t *weights, const struct llama_model_params *params,
                                    struct llama_model **out, kvt_llama_why_t *why);

/**
 * For programs that call llama_model_load_from_file by themselves, with the same file, before
 * kvt_llama_weights_bind: changes `params`, for one load. Loading maps the file, and the engine has
 * all of it read into the page cache once: kvt_llama_weights_load does not.
 */
kvt_status_t kvt_llama_weights_params(kvt_llama_weights_t *weights, struct llama_model_params *params,
                                      kvt_llama_why_t *why);

/** After that: the model is there. Not needed after kvt_llama_weights_load. */
kvt_status_t kvt_llama_weights_bind(kvt_llama_weights_t *weights, const struct llama_model *model,
                                    kvt_llama_why_t *why);

/**
 * Changes `params` of a context that is made next: its callbacks become the adapter's, which call those
 * that were there. With experts that do not all fit n_ubatch may become less. Callbacks must not be
 * set anew on the context (llama_set_abort_callback): say them here.
 */
kvt_status_t kvt_llama_weights_context(kvt_llama_weights_t *weights, struct llama_context_params *params,
                                       kvt_llama_why_t *why);

/** The context that was made with `params` is freed: another may take its place. */
kvt_status_t kvt_llama_weights_context_end(kvt_llama_weights_t *weights,
                                           const struct llama_context_params *params);

/**
 * What went wrong with weights, and clears it: KVT_OK if nothing did. Where llama_decode failed because
 * of weights, this says why, and until it is called all decodes of that context fail. Where a decode of
 * the thread that calls has failed, it is about that thread's contexts only; otherwise about all, and no
 * context of it may decode meanwhile. A disk that gives no answer for 300 seconds fails a decode.
 */
kvt_status_t kvt_llama_weights_error(kvt_llama_weights_t *weights, kvt_llama_why_t *why);

typedef struct kvt_llama_weights_stats_t {
    /** Of the model: its bytes, units that stay and units that are read again and again. */
    uint64_t model_bytes;
    uint32_t resident_units, streamed_units;
    /** Slots of layers and of experts, and the size of one. */
    uint32_t slots, expert_slots;
    uint64_t slot_bytes, expert_slot_bytes;
    /** Passes through the model; units that were asked for, and of those the ones waited for. */
    uint64_t passes, acquires, waited;
    /** Bytes that were read, and how long the engine stood still for that. */
    uint64_t read_bytes, wait_ns;
    /** Experts that were there and that had to be read; bytes copied to where the engine wants them. */
    uint64_t expert_hits, expert_misses, copied_bytes;
    /** Reads that failed, and decodes that were ended because of weights. */
    uint64_t failed_reads, failed_decodes;
    /** What the budget allows, has in use, and had in use at most (of all owners). */
    uint64_t budget_bytes, used_bytes, peak_bytes;
} kvt_llama_weights_stats_t;

kvt_status_t kvt_llama_weights_stats(const kvt_llama_weights_t *weights, kvt_llama_weights_stats_t *out);

/** The streamer, for plans, marks and rebalancing (kvt_stream_*). It stays this object's. */
const kvt_stream_t *kvt_llama_weights_stream(const kvt_llama_weights_t *weights);

/**
 * Closes and clears the pointer; null is fine. KVT_E_BUSY while the model is there: free the contexts,
 * then the model, then this. No load with parameters of kvt_llama_weights_params may follow.
 */
kvt_status_t kvt_llama_weights_close(kvt_llama_weights_t **weights, kvt_llama_why_t *why);

#ifdef __cplusplus
}
#endif

#endif
