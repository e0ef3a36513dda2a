// The functions of the loaded engine. This library defines functions of the same names, which programs call.
#pragma once

#include "common/engine.hpp"

#include <string>

// Programs may still call functions that the engine deprecates.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace kvtier_run {

// Functions without which the library does nothing: name in C++, name of the symbol.
#define KVTIER_RUN_REQUIRED(X)                                                                                \
    X(llama_model_load_from_file)                                                                             \
    X(llama_model_free)                                                                                       \
    X(llama_init_from_model)                                                                                  \
    X(llama_free)                                                                                             \
    X(llama_get_memory)                                                                                       \
    X(llama_n_seq_max)                                                                                        \
    X(llama_decode)                                                                                           \
    X(llama_memory_clear)                                                                                     \
    X(llama_memory_seq_rm)                                                                                    \
    X(llama_memory_seq_cp)                                                                                    \
    X(llama_memory_seq_keep)                                                                                  \
    X(llama_memory_seq_add)                                                                                   \
    X(llama_memory_seq_div)                                                                                   \
    X(llama_memory_seq_pos_max)                                                                               \
    X(llama_memory_seq_pos_min)                                                                               \
    X(llama_state_get_size)                                                                                   \
    X(llama_state_get_data)                                                                                   \
    X(llama_state_save_file)                                                                                  \
    X(llama_state_seq_save_file)                                                                              \
    X(llama_state_seq_get_size)                                                                               \
    X(llama_state_seq_get_size_ext)                                                                           \
    X(llama_state_set_data)                                                                                   \
    X(llama_state_load_file)                                                                                  \
    X(llama_state_seq_get_data)                                                                               \
    X(llama_state_seq_set_data)                                                                               \
    X(llama_state_seq_get_data_ext)                                                                           \
    X(llama_state_seq_set_data_ext)                                                                           \
    X(llama_state_seq_load_file)                                                                              \
    X(llama_get_logits_ith)                                                                                   \
    X(llama_get_embeddings_ith)                                                                               \
    X(llama_sampler_sample)                                                                                   \
    X(llama_set_embeddings)                                                                                   \
    X(llama_set_causal_attn)                                                                                  \
    X(llama_set_adapters_lora)                                                                                \
    X(llama_set_adapter_cvec)                                                                                 \
    X(llama_adapter_lora_init)

// Functions that only newer programs call.
#define KVTIER_RUN_OPTIONAL(X)                                                                                \
    X(llama_model_load_from_file_ptr)                                                                         \
    X(llama_adapter_lora_init_from_file_ptr)                                                                  \
    X(llama_adapter_lora_free)                                                                                \
    X(llama_model_load_from_splits)                                                                           \
    X(llama_set_warmup)                                                                                       \
    X(llama_get_sampled_token_ith)                                                                            \
    X(llama_get_sampled_probs_ith)                                                                            \
    X(llama_get_sampled_probs_count_ith)                                                                      \
    X(llama_get_sampled_logits_ith)                                                                           \
    X(llama_get_sampled_logits_count_ith)                                                                     \
    X(llama_get_sampled_candidates_ith)                                                                       \
    X(llama_get_sampled_candidates_count_ith)

#ifdef KVTIER_LLAMA_BATCH_EXT
#define KVTIER_RUN_BATCH_EXT(X)                                                                               \
    X(llama_batch_ext_init)                                                                                   \
    X(llama_batch_ext_free)                                                                                   \
    X(llama_batch_ext_clear)                                                                                  \
    X(llama_batch_ext_add)                                                                                    \
    X(llama_batch_ext_add_token)                                                                              \
    X(llama_batch_ext_add_embd)                                                                               \
    X(llama_batch_ext_add_seq)                                                                                \
    X(llama_batch_ext_set_embd_token)                                                                         \
    X(llama_batch_ext_set_embd_state)                                                                         \
    X(llama_batch_ext_set_output_embd)                                                                        \
    X(llama_batch_ext_set_output_logits)                                                                      \
    X(llama_batch_ext_set_pos)                                                                                \
    X(llama_process)
#else
#define KVTIER_RUN_BATCH_EXT(X)
#endif

struct engine_t {
#define KVTIER_RUN_MEMBER(name) decltype(&::name) name = nullptr;
    KVTIER_RUN_REQUIRED(KVTIER_RUN_MEMBER)
    KVTIER_RUN_OPTIONAL(KVTIER_RUN_MEMBER)
    KVTIER_RUN_BATCH_EXT(KVTIER_RUN_MEMBER)
#undef KVTIER_RUN_MEMBER
    decltype(&::llama_set_embeddings_nextn) set_embeddings_nextn = nullptr;
    decltype(&::llama_get_embeddings_nextn_ith) get_embeddings_nextn_ith = nullptr;
    decltype(&::llama_set_embeddings_layer_inp) set_embeddings_layer_inp = nullptr;
#ifdef KVTIER_LLAMA_BATCH_EXT
    decltype(&::llama_batch_ext_set_decision_order) set_decision_order = nullptr;
#endif
    /// A symbol that the tier needs and that the loaded engine lacks; empty = it has all.
    std::string missing;
};

/// The loaded engine; without one all functions are null.
const engine_t &engine();

/// True while this library itself calls the engine, also through functions that it defines.
bool inside();

/// Calls of the engine in the scope go straight to it.
class inside_scope {
public:
    inside_scope();
    ~inside_scope();
    inside_scope(const inside_scope &) = delete;
    inside_scope &operator=(const inside_scope &) = delete;
};

} // namespace kvtier_run
