// Everything that differs between versions of llama.cpp and ggml. No other source of the adapters depends
// on a version. Supported: LLAMA_STATE_SEQ_VERSION 2 to 4, and GGML_BACKEND_API_VERSION 2 and 3. engine.sh
// names the two engines that tests run.
#pragma once

#if __has_include(<llama.h>) // not for the plugin in other engines of ggml

#include <llama.h>

#if LLAMA_STATE_SEQ_VERSION < 2 || LLAMA_STATE_SEQ_VERSION > 4
#error "kvtier supports LLAMA_STATE_SEQ_VERSION 2 to 4: use a newer kvtier, or one for the older engine"
#endif

// Functions that not all engines declare, or not in the installed header. The library of `kvtier run` defines
// them in the engine's place.
#include <cstdio>

extern "C" llama_adapter_lora *llama_adapter_lora_init_from_file_ptr(llama_model *model, FILE *file);
enum llama_decision_order : int;
void llama_set_embeddings_nextn(llama_context *ctx, bool value, bool masked);
float *llama_get_embeddings_nextn_ith(llama_context *ctx, int32_t i);
void llama_set_embeddings_layer_inp(llama_context *ctx, uint32_t layer, bool value);
#ifdef KVTIER_LLAMA_BATCH_EXT
bool llama_batch_ext_set_decision_order(llama_batch_ext *batch, int32_t at, llama_decision_order order);
#endif

namespace kvtier_llama {

/// Some engines bound the outputs of a context, and want room for one a sequence.
template <typename params_t> auto allow_outputs(params_t &params, int) -> decltype(void(params.n_outputs_max)) {
    if (params.n_outputs_max != 0 && params.n_outputs_max < params.n_seq_max) {
        params.n_outputs_max = params.n_seq_max;
    }
}
template <typename params_t> void allow_outputs(params_t &, long) {}

/// Contexts of another kind, or that share their cells with another one (MTP, EAGLE).
template <typename params_t>
auto shares_cells(const params_t &params, int) -> decltype(params.ctx_type, params.ctx_other, bool()) {
    return params.ctx_type != decltype(params.ctx_type)(0) || params.ctx_other;
}
template <typename params_t> bool shares_cells(const params_t &, long) { return false; }

/// The reader of states gives the tensors that rows go to, so that the store can copy into them.
#define KVTIER_LLAMA_TENSOR_READER (LLAMA_STATE_SEQ_VERSION >= 4)

/// State 4: the sizes of rotations precede K.
constexpr bool has_rotations = LLAMA_STATE_SEQ_VERSION >= 4;

/// Fallbacks for calls that not every engine has. Where the engine declares one, overload resolution prefers
/// it, because its argument type fits better.
inline uint32_t llama_n_rs_seq(const void *) { return 0; }
inline bool llama_get_causal_attn(const void *) { return true; }

/// The model reads all of each tensor when it is loaded. Older engines always do so.
template <typename params_t>
auto disable_lazy_reads(params_t &params, int) -> decltype(void(params.lazy_mode)) {
    params.lazy_mode = decltype(params.lazy_mode)(0); // LLAMA_LAZY_MODE_OFF
}
template <typename params_t> void disable_lazy_reads(params_t &, long) {}

} // namespace kvtier_llama

#endif

#if __has_include(<ggml-backend-impl.h>)

#include <ggml-backend-impl.h>

#include <cstddef>
#include <vector>

static_assert(GGML_BACKEND_API_VERSION == 2 || GGML_BACKEND_API_VERSION == 3,
              "kvtier supports versions 2 and 3 of ggml's backend interface: use a kvtier for the version "
              "of these headers");

namespace kvtier_llama {

#if GGML_BACKEND_API_VERSION >= 3

/// Interface 3 passes the tensors for which a buffer is allocated.
template <typename allocate_t, typename size_t_>
void set_list_functions(ggml_backend_buffer_type_i &type, allocate_t allocate, size_t_ size) {
    type.alloc_buffer_n = allocate;
    type.get_alloc_size_n = size;
}

struct sized_tensors {
    void add(const ggml_tensor *, size_t) {}
    std::vector<ggml_tensor *> take(size_t) { return {}; }
};

#else

template <typename allocate_t, typename size_t_>
void set_list_functions(ggml_backend_buffer_type_i &, allocate_t, size_t_) {}

/// Interface 2 asks for the size of each tensor, then for a buffer of their sum. It allocates tensors that
/// have no data yet, so a buffer type that recognises the tensors can allocate them itself. One object per
/// thread.
class sized_tensors {
public:
    /// Results of computation are sized too, but are in no list.
    void add(const ggml_tensor *tensor, size_t bytes) {
        if (tensor->op != GGML_OP_NONE || tensor->data || tensor->view_src) {
            tensors_.clear();
        } else {
            tensors_.push_back({const_cast<ggml_tensor *>(tensor), bytes});
        }
    }

    /// The last tensors whose sizes add up to `bytes`; empty if there are none.
    std::vector<ggml_tensor *> take(size_t bytes) {
        size_t first = tensors_.size(), sum = 0;
        while (first > 0 && sum < bytes) {
            sum += tensors_[--first].bytes;
        }
        std::vector<ggml_tensor *> list;
        for (size_t at = first; sum == bytes && at < tensors_.size(); at++) {
            list.push_back(tensors_[at].tensor);
        }
        tensors_.clear();
        return list;
    }

private:
    struct sized {
        ggml_tensor *tensor;
        size_t bytes;
    };
    std::vector<sized> tensors_;
};

#endif

} // namespace kvtier_llama

#endif
