// The engine's functions that this library defines in its place. Each calls the engine's own one. While
// kvtier is off, or calls the engine itself, it does nothing else.
#include "run/models.hpp"
#include "run/process.hpp"
#include "run/settings.hpp"

#include <algorithm>

using namespace kvtier_run;

#define KVTIER_RUN_EXPORT extern "C" __attribute__((visibility("default")))
#define KVTIER_RUN_EXPORT_CXX __attribute__((visibility("default")))

namespace {

/// Sequence ids that the engine has at most.
constexpr uint32_t max_sequences = 256;

context_t *watched(const llama_context *ctx) { return active() ? find_context(ctx) : nullptr; }
context_t *watched(llama_memory_t memory) { return active() ? find_context(memory) : nullptr; }

/// Tells whether a context generates text. Contexts that give embeddings of whole texts, and contexts of other
/// kinds, are not watched.
bool is_generating(const llama_context_params &params) {
    const bool pooled = params.pooling_type != LLAMA_POOLING_TYPE_NONE &&
                        params.pooling_type != LLAMA_POOLING_TYPE_UNSPECIFIED;
    return !kvtier_llama::shares_cells(params, 0) && !params.embeddings && !pooled && params.attention_type != LLAMA_ATTENTION_TYPE_NON_CAUSAL;
}

/// The parameters with one more sequence, through which the tier copies cells.
llama_context_params with_scratch(llama_context_params params) {
    const bool together = params.kv_unified || params.n_seq_max <= 1;
    // The engine wants room for an output of each sequence in a batch.
    const uint32_t batch = params.n_ctx != 0 ? std::min(params.n_batch, params.n_ctx) : params.n_batch;
    if (together && params.n_seq_max < max_sequences && params.n_seq_max + 1 < batch) {
        params.n_seq_max = std::max(params.n_seq_max, 1u) + 1;
        params.kv_unified = true;
        kvtier_llama::allow_outputs(params, 0);
    }
    return params;
}

/// Calls a function of the engine that may call others which this library defines.
template <typename F> auto unwatched(F &&call) {
    const inside_scope scope;
    return call();
}

/// The context, whose engine then holds all that the program decoded into a sequence; null = not watched.
context_t *settled(llama_context *ctx, llama_seq_id seq) {
    context_t *of = watched(ctx);
    if (of) {
        of->settle(seq);
    }
    return of;
}

/// Calls one of the engine's functions that take an index of the last batch.
template <typename F> auto with_index(F *real, llama_context *ctx, int32_t at) {
    context_t *of = watched(ctx);
    return real(ctx, of ? of->index(at) : at);
}

} // namespace

// Models and adapters.

KVTIER_RUN_EXPORT llama_model *llama_model_load_from_file(const char *path, llama_model_params params) {
    llama_model *made = engine().llama_model_load_from_file(path, params);
    if (made && active()) {
        note_model(made, path, params);
    }
    return made;
}

KVTIER_RUN_EXPORT llama_model *llama_model_load_from_splits(const char **paths, size_t n_paths,
                                                           llama_model_params params) {
    llama_model *made = engine().llama_model_load_from_splits(paths, n_paths, params);
    if (made && active()) {
        note_model(made, n_paths != 0 ? paths[0] : nullptr, params);
    }
    return made;
}

KVTIER_RUN_EXPORT llama_model *llama_model_load_from_file_ptr(FILE *file, llama_model_params params) {
    llama_model *made = engine().llama_model_load_from_file_ptr(file, params);
    forget_model(made);
    return made;
}

KVTIER_RUN_EXPORT void llama_model_free(llama_model *model) {
    if (active()) {
        // Closing their tiers needs the model.
        remove_contexts_of(model);
    }
    forget_model(model);
    engine().llama_model_free(model);
}

KVTIER_RUN_EXPORT llama_adapter_lora *llama_adapter_lora_init(llama_model *model, const char *path) {
    llama_adapter_lora *made = engine().llama_adapter_lora_init(model, path);
    if (made && active()) {
        note_lora(made, path);
    }
    return made;
}

KVTIER_RUN_EXPORT llama_adapter_lora *llama_adapter_lora_init_from_file_ptr(llama_model *model, FILE *file) {
    llama_adapter_lora *made = engine().llama_adapter_lora_init_from_file_ptr(model, file);
    forget_lora(made);
    return made;
}

KVTIER_RUN_EXPORT void llama_adapter_lora_free(llama_adapter_lora *adapter) {
    forget_lora(adapter);
    engine().llama_adapter_lora_free(adapter);
}

KVTIER_RUN_EXPORT int32_t llama_set_adapters_lora(llama_context *ctx, llama_adapter_lora **adapters,
                                                  size_t n_adapters, float *scales) {
    context_t *of = watched(ctx);
    std::string text;
    const bool known = of && describe_loras(adapters, n_adapters, scales, &text);
    if (of && of->changes_loras(known, text)) {
        of->settle(-1);
    }
    const int32_t status = engine().llama_set_adapters_lora(ctx, adapters, n_adapters, scales);
    if (of) {
        of->set_loras(known && status == 0, text);
    }
    return status;
}

KVTIER_RUN_EXPORT int32_t llama_set_adapter_cvec(llama_context *ctx, const float *data, size_t len,
                                                 int32_t n_embd, int32_t il_start, int32_t il_end) {
    context_t *of = watched(ctx);
    if (of) {
        of->settle(-1);
    }
    const int32_t status = engine().llama_set_adapter_cvec(ctx, data, len, n_embd, il_start, il_end);
    if (of && status == 0) {
        of->set_vector(describe_vector(data, len, n_embd, il_start, il_end));
    }
    return status;
}

// Contexts.

KVTIER_RUN_EXPORT llama_context *llama_init_from_model(llama_model *model, llama_context_params params) {
    if (!active() || !is_generating(params)) {
        return engine().llama_init_from_model(model, params);
    }
    const inside_scope scope;
    llama_context_params wider = with_scratch(params);
    llama_context *made = engine().llama_init_from_model(model, wider);
    if (!made && wider.n_seq_max != params.n_seq_max) {
        wider = params;
        made = engine().llama_init_from_model(model, params);
    }
    if (made && engine().llama_get_memory(made)) {
        const bool has_scratch = wider.n_seq_max != params.n_seq_max;
        add_context(made, wider, engine().llama_n_seq_max(made) - has_scratch, has_scratch);
    }
    return made;
}

KVTIER_RUN_EXPORT void llama_free(llama_context *ctx) {
    if (active()) {
        remove_context(ctx);
    }
    engine().llama_free(ctx);
}

KVTIER_RUN_EXPORT uint32_t llama_n_seq_max(const llama_context *ctx) {
    const context_t *of = watched(ctx);
    return of ? of->sequences : engine().llama_n_seq_max(ctx);
}

KVTIER_RUN_EXPORT void llama_set_embeddings(llama_context *ctx, bool embeddings) {
    engine().llama_set_embeddings(ctx, embeddings);
    if (context_t *of = watched(ctx)) {
        of->set_special(special_embeddings, embeddings);
    }
}

KVTIER_RUN_EXPORT void llama_set_causal_attn(llama_context *ctx, bool causal) {
    engine().llama_set_causal_attn(ctx, causal);
    if (context_t *of = watched(ctx)) {
        of->set_special(special_attention, !causal);
    }
}

KVTIER_RUN_EXPORT void llama_set_warmup(llama_context *ctx, bool warmup) {
    engine().llama_set_warmup(ctx, warmup);
    if (context_t *of = watched(ctx)) {
        of->set_special(special_warmup, warmup);
    }
}

KVTIER_RUN_EXPORT_CXX void llama_set_embeddings_nextn(llama_context *ctx, bool value, bool masked) {
    engine().set_embeddings_nextn(ctx, value, masked);
    if (context_t *of = watched(ctx)) {
        of->set_special(special_next, value && !masked);
    }
}

KVTIER_RUN_EXPORT_CXX void llama_set_embeddings_layer_inp(llama_context *ctx, uint32_t layer, bool value) {
    engine().set_embeddings_layer_inp(ctx, layer, value);
    context_t *of = watched(ctx);
    // Other layers may still be on, so it is never turned off.
    if (of && value) {
        of->set_special(special_layers, true);
    }
}

// Decoding and its results.

KVTIER_RUN_EXPORT int32_t llama_decode(llama_context *ctx, llama_batch batch) {
    context_t *of = watched(ctx);
    if (!of) {
        return engine().llama_decode(ctx, batch);
    }
    const batch_t read = read_batch(batch, of->embedding_width(), of->embedding_positions());
    return of->decode(&read, [&] { return engine().llama_decode(ctx, batch); });
}

KVTIER_RUN_EXPORT float *llama_get_logits_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().llama_get_logits_ith, ctx, i);
}

KVTIER_RUN_EXPORT float *llama_get_embeddings_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().llama_get_embeddings_ith, ctx, i);
}

KVTIER_RUN_EXPORT_CXX float *llama_get_embeddings_nextn_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().get_embeddings_nextn_ith, ctx, i);
}

KVTIER_RUN_EXPORT llama_token llama_get_sampled_token_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().llama_get_sampled_token_ith, ctx, i);
}

KVTIER_RUN_EXPORT float *llama_get_sampled_probs_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().llama_get_sampled_probs_ith, ctx, i);
}

KVTIER_RUN_EXPORT uint32_t llama_get_sampled_probs_count_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().llama_get_sampled_probs_count_ith, ctx, i);
}

KVTIER_RUN_EXPORT float *llama_get_sampled_logits_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().llama_get_sampled_logits_ith, ctx, i);
}

KVTIER_RUN_EXPORT uint32_t llama_get_sampled_logits_count_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().llama_get_sampled_logits_count_ith, ctx, i);
}

KVTIER_RUN_EXPORT llama_token *llama_get_sampled_candidates_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().llama_get_sampled_candidates_ith, ctx, i);
}

KVTIER_RUN_EXPORT uint32_t llama_get_sampled_candidates_count_ith(llama_context *ctx, int32_t i) {
    return with_index(engine().llama_get_sampled_candidates_count_ith, ctx, i);
}

KVTIER_RUN_EXPORT llama_token llama_sampler_sample(llama_sampler *smpl, llama_context *ctx, int32_t idx) {
    context_t *of = watched(ctx);
    const int32_t at = of ? of->index(idx) : idx;
    // It calls the functions above with the index that it gets here.
    const inside_scope scope;
    return engine().llama_sampler_sample(smpl, ctx, at);
}

// Cells.

KVTIER_RUN_EXPORT void llama_memory_clear(llama_memory_t mem, bool data) {
    context_t *of = watched(mem);
    if (of) {
        of->leaving(-1, -1);
    }
    engine().llama_memory_clear(mem, data);
    if (of) {
        of->cleared();
    }
}

KVTIER_RUN_EXPORT bool llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0,
                                           llama_pos p1) {
    context_t *of = watched(mem);
    if (of) {
        of->leaving(seq_id, p0);
    }
    const bool done = engine().llama_memory_seq_rm(mem, seq_id, p0, p1);
    if (of && done) {
        of->removed(seq_id, p0, p1);
    }
    return done;
}

KVTIER_RUN_EXPORT void llama_memory_seq_cp(llama_memory_t mem, llama_seq_id seq_id_src,
                                           llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    context_t *of = watched(mem);
    if (of) {
        of->settle(seq_id_src);
    }
    engine().llama_memory_seq_cp(mem, seq_id_src, seq_id_dst, p0, p1);
    if (of) {
        of->copied(seq_id_src, seq_id_dst, p0, p1);
    }
}

KVTIER_RUN_EXPORT void llama_memory_seq_keep(llama_memory_t mem, llama_seq_id seq_id) {
    engine().llama_memory_seq_keep(mem, seq_id);
    if (context_t *of = watched(mem)) {
        of->kept_only(seq_id);
    }
}

KVTIER_RUN_EXPORT void llama_memory_seq_add(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0,
                                            llama_pos p1, llama_pos delta) {
    context_t *of = watched(mem);
    if (of) {
        of->settle(seq_id);
    }
    engine().llama_memory_seq_add(mem, seq_id, p0, p1, delta);
    if (of) {
        of->changed(seq_id);
    }
}

KVTIER_RUN_EXPORT void llama_memory_seq_div(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0,
                                            llama_pos p1, int d) {
    context_t *of = watched(mem);
    if (of) {
        of->settle(seq_id);
    }
    engine().llama_memory_seq_div(mem, seq_id, p0, p1, d);
    if (of) {
        of->changed(seq_id);
    }
}

KVTIER_RUN_EXPORT llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id) {
    const llama_pos real = engine().llama_memory_seq_pos_max(mem, seq_id);
    const context_t *of = watched(mem);
    return of ? of->last_position(seq_id, real) : real;
}

KVTIER_RUN_EXPORT llama_pos llama_memory_seq_pos_min(llama_memory_t mem, llama_seq_id seq_id) {
    const llama_pos real = engine().llama_memory_seq_pos_min(mem, seq_id);
    const context_t *of = watched(mem);
    return of ? of->first_position(seq_id, real) : real;
}

// States.

KVTIER_RUN_EXPORT size_t llama_state_get_size(llama_context *ctx) {
    settled(ctx, -1);
    return engine().llama_state_get_size(ctx);
}

KVTIER_RUN_EXPORT size_t llama_state_get_data(llama_context *ctx, uint8_t *dst, size_t size) {
    settled(ctx, -1);
    return engine().llama_state_get_data(ctx, dst, size);
}

KVTIER_RUN_EXPORT bool llama_state_save_file(llama_context *ctx, const char *path_session,
                                             const llama_token *tokens, size_t n_token_count) {
    settled(ctx, -1);
    return engine().llama_state_save_file(ctx, path_session, tokens, n_token_count);
}

KVTIER_RUN_EXPORT size_t llama_state_seq_save_file(llama_context *ctx, const char *filepath,
                                                   llama_seq_id seq_id, const llama_token *tokens,
                                                   size_t n_token_count) {
    settled(ctx, seq_id);
    return engine().llama_state_seq_save_file(ctx, filepath, seq_id, tokens, n_token_count);
}

KVTIER_RUN_EXPORT size_t llama_state_seq_get_size(llama_context *ctx, llama_seq_id seq_id) {
    settled(ctx, seq_id);
    return engine().llama_state_seq_get_size(ctx, seq_id);
}

KVTIER_RUN_EXPORT size_t llama_state_seq_get_size_ext(llama_context *ctx, llama_seq_id seq_id,
                                                      llama_state_seq_flags flags) {
    settled(ctx, seq_id);
    return engine().llama_state_seq_get_size_ext(ctx, seq_id, flags);
}

KVTIER_RUN_EXPORT size_t llama_state_set_data(llama_context *ctx, const uint8_t *src, size_t size) {
    const size_t done = engine().llama_state_set_data(ctx, src, size);
    if (context_t *of = watched(ctx)) {
        of->changed(-1);
    }
    return done;
}

KVTIER_RUN_EXPORT bool llama_state_load_file(llama_context *ctx, const char *path_session,
                                             llama_token *tokens_out, size_t n_token_capacity,
                                             size_t *n_token_count_out) {
    const bool done = engine().llama_state_load_file(ctx, path_session, tokens_out, n_token_capacity,
                                                     n_token_count_out);
    if (context_t *of = watched(ctx)) {
        of->changed(-1);
    }
    return done;
}

KVTIER_RUN_EXPORT size_t llama_state_seq_load_file(llama_context *ctx, const char *filepath,
                                                   llama_seq_id dest_seq_id, llama_token *tokens_out,
                                                   size_t n_token_capacity, size_t *n_token_count_out) {
    const size_t done = engine().llama_state_seq_load_file(ctx, filepath, dest_seq_id, tokens_out,
                                                           n_token_capacity, n_token_count_out);
    context_t *of = watched(ctx);
    // Without room for tokens only their number is read.
    if (of && tokens_out) {
        of->changed(dest_seq_id);
    }
    return done;
}

KVTIER_RUN_EXPORT size_t llama_state_seq_get_data_ext(llama_context *ctx, uint8_t *dst, size_t size,
                                                      llama_seq_id seq_id, llama_state_seq_flags flags) {
    context_t *of = settled(ctx, seq_id);
    const size_t bytes = engine().llama_state_seq_get_data_ext(ctx, dst, size, seq_id, flags);
    if (of) {
        of->state_taken(seq_id, dst, bytes, flags);
    }
    return bytes;
}

KVTIER_RUN_EXPORT size_t llama_state_seq_get_data(llama_context *ctx, uint8_t *dst, size_t size,
                                                  llama_seq_id seq_id) {
    context_t *of = settled(ctx, seq_id);
    const size_t bytes = unwatched([&] { return engine().llama_state_seq_get_data(ctx, dst, size, seq_id); });
    if (of) {
        of->state_taken(seq_id, dst, bytes, 0);
    }
    return bytes;
}

KVTIER_RUN_EXPORT size_t llama_state_seq_set_data_ext(llama_context *ctx, const uint8_t *src, size_t size,
                                                      llama_seq_id dest_seq_id,
                                                      llama_state_seq_flags flags) {
    context_t *of = watched(ctx);
    if (of) {
        of->leaving(dest_seq_id, -1);
    }
    const size_t bytes = engine().llama_state_seq_set_data_ext(ctx, src, size, dest_seq_id, flags);
    if (of) {
        of->state_given(dest_seq_id, src, bytes, flags);
    }
    return bytes;
}

KVTIER_RUN_EXPORT size_t llama_state_seq_set_data(llama_context *ctx, const uint8_t *src, size_t size,
                                                  llama_seq_id dest_seq_id) {
    context_t *of = watched(ctx);
    if (of) {
        of->leaving(dest_seq_id, -1);
    }
    const size_t bytes = unwatched([&] { return engine().llama_state_seq_set_data(ctx, src, size, dest_seq_id); });
    if (of) {
        of->state_given(dest_seq_id, src, bytes, 0);
    }
    return bytes;
}

#ifdef KVTIER_LLAMA_BATCH_EXT

// Extended batches.

KVTIER_RUN_EXPORT llama_batch_ext *llama_batch_ext_init(llama_context *ctx) {
    llama_batch_ext *made = engine().llama_batch_ext_init(ctx);
    if (made && active()) {
        const context_t *of = watched(ctx);
        record_init(made, of ? of->embedding_positions() : 1);
    }
    return made;
}

KVTIER_RUN_EXPORT void llama_batch_ext_free(llama_batch_ext *batch) {
    record_free(batch);
    engine().llama_batch_ext_free(batch);
}

KVTIER_RUN_EXPORT void llama_batch_ext_clear(llama_batch_ext *batch) {
    engine().llama_batch_ext_clear(batch);
    record_clear(batch);
}

KVTIER_RUN_EXPORT int32_t llama_batch_ext_add(llama_batch_ext *batch, llama_seq_id seq_id) {
    const int32_t at = engine().llama_batch_ext_add(batch, seq_id);
    record_add(batch, at, seq_id, LLAMA_TOKEN_NULL, nullptr);
    return at;
}

KVTIER_RUN_EXPORT int32_t llama_batch_ext_add_token(llama_batch_ext *batch, llama_seq_id seq_id,
                                                    llama_token id) {
    const int32_t at = engine().llama_batch_ext_add_token(batch, seq_id, id);
    record_add(batch, at, seq_id, id, nullptr);
    return at;
}

KVTIER_RUN_EXPORT int32_t llama_batch_ext_add_embd(llama_batch_ext *batch, llama_seq_id seq_id,
                                                   llama_embd embd) {
    const int32_t at = engine().llama_batch_ext_add_embd(batch, seq_id, embd);
    record_add(batch, at, seq_id, LLAMA_TOKEN_NULL, &embd);
    return at;
}

KVTIER_RUN_EXPORT bool llama_batch_ext_add_seq(llama_batch_ext *batch, int32_t idx, llama_seq_id seq_id) {
    const bool done = engine().llama_batch_ext_add_seq(batch, idx, seq_id);
    if (done) {
        record_sequence(batch, idx, seq_id);
    }
    return done;
}

KVTIER_RUN_EXPORT bool llama_batch_ext_set_embd_token(llama_batch_ext *batch, int32_t idx, llama_embd embd) {
    record_special(batch);
    return engine().llama_batch_ext_set_embd_token(batch, idx, embd);
}

KVTIER_RUN_EXPORT bool llama_batch_ext_set_embd_state(llama_batch_ext *batch, int32_t idx, llama_embd embd) {
    record_special(batch);
    return engine().llama_batch_ext_set_embd_state(batch, idx, embd);
}

KVTIER_RUN_EXPORT bool llama_batch_ext_set_output_embd(llama_batch_ext *batch, int32_t idx, bool value) {
    record_output(batch, idx, value);
    return engine().llama_batch_ext_set_output_embd(batch, idx, value);
}

KVTIER_RUN_EXPORT bool llama_batch_ext_set_output_logits(llama_batch_ext *batch, int32_t idx, bool value) {
    record_output(batch, idx, value);
    return engine().llama_batch_ext_set_output_logits(batch, idx, value);
}

KVTIER_RUN_EXPORT bool llama_batch_ext_set_pos(llama_batch_ext *batch, int32_t idx, const llama_pos *pos) {
    const bool done = engine().llama_batch_ext_set_pos(batch, idx, pos);
    if (done) {
        record_position(batch, idx, pos);
    }
    return done;
}

KVTIER_RUN_EXPORT_CXX bool llama_batch_ext_set_decision_order(llama_batch_ext *batch, int32_t at,
                                                              llama_decision_order order) {
    record_special(batch);
    return engine().set_decision_order(batch, at, order);
}

KVTIER_RUN_EXPORT int32_t llama_process(llama_context *ctx, llama_process_type type,
                                        llama_batch_ext *batch) {
    context_t *of = type == LLAMA_PROCESS_TYPE_DECODE ? watched(ctx) : nullptr;
    if (!of) {
        return engine().llama_process(ctx, type, batch);
    }
    return of->decode(recorded(batch), [&] { return engine().llama_process(ctx, type, batch); });
}

#endif
